//! A running program moves from one server to another under its clients, and its output goes on where it was:
//! `cargo run -p sandboxer-client --example handoff SERVER OTHER_SERVER`.

use sandboxer_client::{Connection, Ended, Error, Execution, Options, ResumeFrom, Sandbox};

const PROGRAM: &str = "import sys\nfor line in sys.stdin: sys.stdout.write('heard ' + line)";

#[tokio::main]
async fn main() -> Result<(), Error> {
    let mut servers = std::env::args().skip(1);
    let here = servers.next().unwrap_or_else(|| "http://127.0.0.1:8080".to_owned());
    let there = servers.next().unwrap_or_else(|| "http://127.0.0.1:8081".to_owned());

    let first = Sandbox::create(&here, Options::default().checkpoint(true).handoff(true)).await?;
    let mut run = first.run(Execution::python(PROGRAM)).await?;
    run.stdin().write("one\n").await?;
    let piece = run.next().await.ok_or(Error::Closed)?;
    print!("at the first server: {}", String::from_utf8_lossy(&piece.data));

    // Another client asks another server for it: the first one gives way, with the program in the middle of its work.
    let (id, execution, (stdout, stderr)) = (first.id(), run.id().clone(), run.offsets());
    let from = ResumeFrom::offsets(execution, stdout, stderr);
    let second = Sandbox::attach_with(&there, id, first.token(), Connection::default(), from).await?;
    match run.wait().await {
        Err(Error::SandboxEnded { reason: Ended::HandedOff | Ended::Checkpointed, message }) => println!("the first client: {message}"),
        other => println!("the first client: {other:?}"),
    }

    let mut run = second.resume().await?.ok_or(Error::Closed)?;
    run.stdin().write("two\n").await?;
    let output = run.output().await?;
    print!("at the second server: {}", String::from_utf8_lossy(&output.stdout));
    second.kill_sandbox().await
}
