//! Messages from a client.

use std::{collections::BTreeMap, time::Instant};

use sandboxer_protocol::{
    client::{ErrorEvent, Request, Seconds, ServerEvent},
    limits::{MAX_COMPLAINT_BYTES, MAX_ENV_BYTES, MAX_METADATA_BYTES, MAX_PATH_BYTES},
};

/// One text message. It is a request within its bounds, which means the same when it is written down and read again, or it is refused
/// in a few words.
pub fn client_message(data: &[u8]) {
    // Others never get this far: a text message that is not UTF-8 closes the connection.
    let Ok(text) = std::str::from_utf8(data) else { return };
    match Request::parse(text) {
        Ok(request) => accepted(&request),
        Err(bad) => {
            assert!(!bad.message.is_empty() && bad.message.len() <= MAX_COMPLAINT_BYTES, "{} bytes of complaint", bad.message.len());
            let told = ServerEvent::Error(ErrorEvent::new(bad.code, bad.message)).to_json();
            assert!(serde_json::from_str::<serde_json::Value>(&told).unwrap()["message"].is_string());
        }
    }
}

fn accepted(request: &Request) {
    match request {
        Request::Configure(config) => {
            let metadata: usize = config.metadata.iter().flatten().map(|(name, value)| name.len() + value.len()).sum();
            assert!(metadata <= MAX_METADATA_BYTES);
            check_times(&[config.idle_timeout, config.client_gone_timeout, config.autosave_seconds]);
            check_place(config.env.as_ref(), config.cwd.as_deref());
        }
        Request::Execute(execute) => {
            assert!(!execute.code.contains('\0'), "the program would end there");
            check_times(&[execute.timeout]);
            check_place(execute.env.as_ref(), execute.cwd.as_deref());
        }
        _ => {}
    }
    let again = Request::parse(&request.to_json()).unwrap();
    let same = match request {
        // Numbers of seconds may differ in their last digit.
        Request::Configure(_) | Request::Execute(_) => std::mem::discriminant(&again) == std::mem::discriminant(request),
        _ => again == *request,
    };
    assert!(same, "{request:?} is {again:?} once it is written down");
}

/// Adding it to a clock must not overflow.
fn check_times(times: &[Option<Seconds>]) {
    for time in times.iter().flatten().filter_map(|seconds| seconds.nonzero()) {
        assert!(Instant::now().checked_add(time).is_some(), "{time:?}");
    }
}

fn check_place(env: Option<&BTreeMap<String, String>>, cwd: Option<&str>) {
    let variables = || env.into_iter().flatten();
    assert!(variables().map(|(name, value)| name.len() + value.len()).sum::<usize>() <= MAX_ENV_BYTES);
    assert!(variables().all(|(name, value)| !name.is_empty() && !name.contains(['=', '\0']) && !value.contains('\0')));
    assert!(cwd.is_none_or(|cwd| cwd.starts_with('/') && cwd.len() <= MAX_PATH_BYTES && !cwd.contains('\0')));
}
