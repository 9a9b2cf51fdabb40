//! Many clients at once, and a server that is killed under them: what was acknowledged is there, and nothing else is.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use std::{
    collections::BTreeSet,
    fs,
    net::TcpListener,
    os::unix::process::CommandExt,
    path::Path,
    process::{Child, Command, Stdio},
    time::Duration,
};

use sandboxer_e2e::{Options, count, eventually, http, sandboxer};
use serde_json::{Value, json};

const CLIENTS: usize = 4;
const WITHIN: Duration = Duration::from_secs(300);

/// One client: all its calls at once, each repeated until it is answered. What was answered is a line in its file.
const CLIENT: &str = r#"
out=$1; sandbox=$2; shift 2
snapshot() {
    until id=$("$SANDBOXER_UNDER_TEST" snapshot "$sandbox" 2>/dev/null); do sleep 0.2; done
    echo "made $id" >>"$out"
}
delete() {
    until words=$("$SANDBOXER_UNDER_TEST" snapshots delete "$1" 2>&1); do
        case $words in *404*) break ;; esac
        sleep 0.2
    done
    echo "deleted $1" >>"$out"
}
for old; do snapshot & delete "$old" & done
wait
"#;

fn client(out: &Path, server: &str, sandbox: &str, old: &[String]) -> Child {
    let mut command = Command::new("sh");
    command.args(["-c", CLIENT, "client"]).arg(out).arg(sandbox).args(old);
    command.env("SANDBOXER_UNDER_TEST", sandboxer()).env("SANDBOXER_SERVER", server);
    command.stdin(Stdio::null()).stdout(Stdio::null()).process_group(0).spawn().unwrap()
}

fn lines(dir: &Path) -> Vec<(String, String)> {
    let read = |number: usize| fs::read_to_string(dir.join(number.to_string())).unwrap_or_default();
    let all: String = (0..CLIENTS).map(read).collect();
    all.lines().filter_map(|line| line.split_once(' ')).map(|(what, id)| (what.to_owned(), id.to_owned())).collect()
}

#[tokio::test]
async fn snapshots_and_deletes_at_once_survive_two_kills_of_the_server() {
    // One half makes snapshots, the other deletes some that were there.
    let each = count(6, 25);
    let calls = CLIENTS * each * 2;
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let mut server = Options::default().listen(Some(&format!("127.0.0.1:{port}"))).start();
    let address = server.address();
    let post = |path: &str, body: &Value| {
        let answer = http::json(address, "POST", path, &[], body).unwrap();
        assert_eq!(answer.status, 201, "{}", answer.body);
        answer.json()["id"].as_str().unwrap().to_owned()
    };
    let sandbox = post("/v1/sandboxes", &json!({ "profile": "profile.saas-stub" }));
    let path = format!("/v1/sandboxes/{sandbox}/snapshot");
    let old: Vec<String> = (0..CLIENTS * each).map(|_| post(&path, &Value::Null)).collect();

    let dir = tempfile::tempdir().unwrap();
    let url = format!("http://{address}");
    let mut clients: Vec<Child> =
        old.chunks(each).enumerate().map(|(number, old)| client(&dir.path().join(number.to_string()), &url, &sandbox, old)).collect();
    for kill in 1..=2 {
        let answered = calls * kill / 4;
        eventually(&format!("{answered} of {calls} calls are answered"), WITHIN, || lines(dir.path()).len() >= answered).await;
        server.kill9();
        server.restart();
    }
    eventually("all clients are done", WITHIN, || clients.iter_mut().all(|client| client.try_wait().unwrap().is_some())).await;

    let lines = lines(dir.path());
    assert_eq!(lines.len(), calls, "every call was answered in the end");
    let of = |what: &str| lines.iter().filter(|(said, _)| said == what).map(|(_, id)| id.clone()).collect::<BTreeSet<_>>();
    let (made, deleted) = (of("made"), of("deleted"));
    assert_eq!((made.len(), deleted.len()), (calls / 2, calls / 2));
    let file: Value = serde_json::from_slice(&fs::read(server.data_dir().join("snapshots.json")).unwrap()).unwrap();
    let rows = file["snapshots"].as_array().unwrap();
    let with = |status: &str| {
        rows.iter().filter(|row| row["status"] == status).map(|row| row["id"].as_str().unwrap().to_owned()).collect::<BTreeSet<_>>()
    };
    let completed = with("completed");
    assert!(made.is_subset(&completed), "what was acknowledged is there: {:?}", made.difference(&completed));
    assert!(rows.iter().all(|row| !deleted.contains(row["id"].as_str().unwrap())), "what was deleted is gone");
    assert_eq!(with("pending").len(), 0, "nothing is left in the middle");
    let unique: BTreeSet<&str> = rows.iter().map(|row| row["id"].as_str().unwrap()).collect();
    assert_eq!(unique.len(), rows.len(), "and nothing is there twice");
    assert!(!fs::read_dir(server.data_dir()).unwrap().any(|entry| entry.unwrap().file_name().to_string_lossy().contains("damaged")));
    let listed = http::json(address, "GET", "/v1/snapshots?limit=1000", &[], &Value::Null).unwrap().json();
    assert_eq!(listed["items"].as_array().unwrap().len(), rows.len());
}
