//! `sandboxer run`, which sits on the library.

use std::{
    io::Write as _,
    process::{Command, Output, Stdio},
    time::{Duration, Instant},
};

use nix::sys::signal::Signal;
use sandboxer_e2e::{Cli, command, shared, stderr_of, stdout_of};

fn run(arguments: &[&str]) -> Command {
    let mut command = command();
    command.args(["run", "--server", &super::url(shared())]).args(arguments);
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

fn finish(arguments: &[&str], input: &[u8]) -> Output {
    let mut child = run(arguments).stdin(Stdio::piped()).spawn().unwrap();
    // It may end without reading it.
    let _ = child.stdin.take().unwrap().write_all(input);
    child.wait_with_output().unwrap()
}

#[test]
fn output_input_and_exit_code_pass_through() {
    let output =
        finish(&["--language", "python", "import sys\nprint(sys.stdin.read().upper())\nprint('e', file=sys.stderr)\nsys.exit(5)"], b"in");
    assert_eq!((output.status.code(), stdout_of(&output), stderr_of(&output)), (Some(5), "IN\n".to_owned(), "e\n".to_owned()));
    let output = finish(&["-l", "bash", "kill -9 $$"], b"");
    assert_eq!(output.status.code(), Some(137));
    let output = finish(&["-l", "bash", "--env", "A=b c", "echo \"$A\"; printf '\\xff'"], b"");
    assert_eq!(output.stdout, b"b c\n\xff");
    let output = finish(&["--language", "bash", "-"], b"echo from stdin");
    assert_eq!(stdout_of(&output), "from stdin\n");
}

#[test]
fn the_language_of_a_file_is_told_by_its_name() {
    let directory = tempfile::tempdir().unwrap();
    let file = |name: &str, text: &str| {
        let path = directory.path().join(name);
        std::fs::write(&path, text).unwrap();
        path.to_str().unwrap().to_owned()
    };
    assert_eq!(stdout_of(&finish(&[&file("a.py", "print(1 + 1)")], b"")), "2\n");
    assert_eq!(stdout_of(&finish(&[&file("a.sh", "echo $((2 + 2))")], b"")), "4\n");
    let output = finish(&[&file("program", "x")], b"");
    assert_eq!(output.status.code(), Some(64));
    let output = finish(&["print(1)"], b"");
    assert_eq!((output.status.code(), stderr_of(&output).contains("--language python")), (Some(64), true));
    let output = finish(&["missing.py"], b"");
    assert_eq!((output.status.code(), stderr_of(&output).contains("missing.py")), (Some(125), true));
}

#[test]
fn run_takes_the_options_of_create() {
    let options = ["-l", "bash", "--memory", "96", "--disk", "48", "--pids", "32", "--cwd", "/srv"];
    let code = "pwd; df -m --output=size / | tail -1 | tr -d ' '; (ulimit -u; true) >/dev/null";
    let output = finish(&[&options[..], &[code]].concat(), b"");
    assert_eq!(stdout_of(&output), "/srv\n48\n", "{}", stderr_of(&output));
    let output = finish(&["-l", "bash", "--image", "no-such-image", "true"], b"");
    assert_eq!(output.status.code(), Some(125));
    assert!(stderr_of(&output).contains("no-such-image"), "{}", stderr_of(&output));
}

#[test]
fn json_is_one_object() {
    let output = finish(&["-l", "bash", "--json", "--timeout", "10", "echo out; echo err >&2; sleep 100"], b"");
    let object: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!((&object["stdout"], &object["stderr"], &object["timed_out"]), (&"out\n".into(), &"err\n".into(), &true.into()));
    assert_eq!(output.status.code(), Some(137));
}

/// The program waits for the signal itself. A bash with a trap would not do: it may spin where Ctrl-C
/// meets the start of a child (docs/design/2026-11-18-a-signal-that-is-not-told.md).
#[tokio::test]
async fn ctrl_c_is_the_programs_first_and_then_its_end() {
    let code = "
import signal, time
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
print('ready', flush=True)
signal.sigwait([signal.SIGINT])
print('once', flush=True)
while True: time.sleep(1)
";
    let cli = Cli::new(shared());
    let mut running = cli.spawn(["run", "-l", "python", code]);
    for line in 1..=2 {
        running.printed(line).await;
        running.signal(Signal::SIGINT);
    }
    assert_eq!(running.exited().await.code(), Some(137));
    assert_eq!(running.stdout(), ["ready", "once"]);
}

#[test]
fn a_server_that_is_not_there_is_told_with_a_hint() {
    let mut command = command();
    let output = command.args(["run", "--server", "http://127.0.0.1:1", "-l", "bash", "true"]).output().unwrap();
    assert_eq!(output.status.code(), Some(125));
    assert!(stderr_of(&output).contains("sandboxer serve"), "{}", stderr_of(&output));
}

#[test]
fn nothing_is_left_of_a_run() {
    let output = finish(&["-l", "bash", "--json", "true"], b"");
    let object: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let id = object["sandbox_id"].as_str().unwrap().to_owned();
    let start = Instant::now();
    while shared().sandbox_processes().iter().any(|process| format!("{process:?}").contains(&id)) {
        assert!(start.elapsed() < super::DEADLINE, "the sandbox is still there");
        std::thread::sleep(Duration::from_millis(50));
    }
}
