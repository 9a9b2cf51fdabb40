use proptest::prelude::*;

use super::*;

fn refusal(text: &str) -> (About, ErrorCode, String) {
    let error = Request::parse(text).unwrap_err();
    (error.about, error.code, error.message)
}

#[test]
fn a_message_is_what_its_fields_say() {
    assert!(matches!(Request::parse("{}"), Ok(Request::Configure(_))));
    assert!(matches!(Request::parse(r#"{"idle_timeout":300,"unknown":{}}"#), Ok(Request::Configure(_))));
    assert!(matches!(Request::parse(r#"{"language":"python","code":"1","extra":1}"#), Ok(Request::Execute(_))));
    assert_eq!(Request::parse(r#"{"action":"kill_process","extra":1}"#), Ok(Request::KillProcess));
    assert_eq!(Request::parse(r#"{"action":"signal","signal":"SIGINT"}"#), Ok(Request::Signal { signal: 2 }));
    assert_eq!(Request::parse(r#"{"event":"stdin","data":"x"}"#), Ok(Request::Stdin { data: Bytes::from_static(b"x"), offset: None }));
    assert_eq!(
        Request::parse(r#"{"event":"stdin","data":"/w==","encoding":"base64","offset":3}"#),
        Ok(Request::Stdin { data: Bytes::from_static(b"\xff"), offset: Some(3) })
    );
    assert_eq!(Request::parse(r#"{"action":"reconnect"}"#), Ok(Request::Reconnect(OffsetsRequest::default())));
    assert_eq!(Request::parse(r#"{"action":"checkpoint"}"#), Ok(Request::Checkpoint { include_execution: false }));
}

#[test]
fn a_null_is_a_field_left_out() {
    let Ok(Request::Configure(config)) = Request::parse(r#"{"idle_timeout":null,"env":null,"limits":{"pids":null}}"#) else { panic!() };
    assert_eq!(*config, CreateConfig { limits: Some(LimitsRequest::default()), ..CreateConfig::default() });
}

#[test]
fn a_refusal_names_the_field() {
    let cases = [
        (r#"{"idle_timeout":"5"}"#, About::Configuration, "idle_timeout"),
        (r#"{"idle_timeout":-1}"#, About::Configuration, "idle_timeout"),
        (r#"{"limits":{"memory_mb":"x"}}"#, About::Configuration, "limits.memory_mb"),
        (r#"{"network":"all"}"#, About::Configuration, "network"),
        (r#"{"env":{"A=B":"x"}}"#, About::Configuration, "env"),
        (r#"{"cwd":"relative"}"#, About::Configuration, "cwd"),
        (r#"{"language":"python"}"#, About::Execution, "code"),
        (r#"{"language":"python","code":7}"#, About::Execution, "code"),
        (r#"{"code":"x"}"#, About::Execution, "language"),
        (r#"{"language":"python","code":"x","timeout":"soon"}"#, About::Execution, "timeout"),
        (r#"{"language":"python","code":"x","execution_id":"a b"}"#, About::Execution, "execution_id"),
        (r#"{"language":"python","code":"\u0000"}"#, About::Execution, "code"),
        (r#"{"event":"stdin"}"#, About::Other, "data"),
        (r#"{"event":"stdin","data":5}"#, About::Other, "data"),
        (r#"{"action":5}"#, About::Other, "action"),
        (r#"{"action":"resize","rows":70000,"cols":1}"#, About::Other, "rows"),
        (r#"{"action":"signal","signal":"SIGNOT"}"#, About::Other, "signal"),
        (r#"{"action":"ack","stdout_offset":-1}"#, About::Other, "stdout_offset"),
    ];
    for (text, about, name) in cases {
        let (is_about, code, message) = refusal(text);
        assert_eq!((is_about, code), (about, ErrorCode::InvalidField), "{text}: {message}");
        assert!(message.contains(name), "{text}: {message}");
    }
}

#[test]
fn what_is_no_request_is_told_apart() {
    assert_eq!(refusal("{").1, ErrorCode::MalformedJson);
    assert_eq!(refusal("[1]").1, ErrorCode::NotAnObject);
    assert_eq!(refusal(r#"{"action":"fly"}"#).1, ErrorCode::UnknownAction);
    assert_eq!(refusal(r#"{"event":"sing"}"#).1, ErrorCode::UnknownEvent);
}

proptest! {
    #[test]
    fn no_text_makes_it_panic(text in "\\PC{0,80}") {
        let _ = Request::parse(&text);
    }

    #[test]
    fn no_json_object_makes_it_panic(
        key in "action|event|language|code|idle_timeout|limits|network|env|timeout|tty|data|offset",
        value in "null|true|-1|1e400|1e9|\"none\"|\"stdin\"|\\{\\}|\\[\\]|\\{\"a\":1\\}|[0-9]{1,30}",
    ) {
        let _ = Request::parse(&format!("{{\"{key}\":{value}}}"));
    }
}
