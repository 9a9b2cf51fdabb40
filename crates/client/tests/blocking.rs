//! The facade for programs without an async runtime, on a real server.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use sandboxer_client::{Execution, Options, blocking::Sandbox};
use sandboxer_e2e::shared;

#[test]
fn a_program_is_fed_read_and_waited_for_without_a_runtime() {
    let url = format!("http://{}", shared().address());
    let sandbox = Sandbox::create(&url, Options::default()).unwrap();
    let mut run = sandbox.run(Execution::python("import sys\nfor line in sys.stdin: print(line.upper(), end='')")).unwrap();
    run.write("one\ntwo\n").unwrap();
    run.stdin_eof().unwrap();
    let text: Vec<u8> = (&mut run).flat_map(|piece| piece.data).collect();
    assert_eq!(text, b"ONE\nTWO\n");
    assert!(run.wait().unwrap().success());
    assert_eq!(sandbox.bash("exit 3").unwrap().output().unwrap().exit.code, Some(3));
    sandbox.kill_sandbox().unwrap();
}
