//! A client leaves in the middle of a program's output, and another one goes on exactly there:
//! `cargo run -p sandboxer-client --example reconnect [SERVER]`.
//!
//! What breaks by itself (a network, a server that is restarted) needs none of this: the library goes on by itself.

use sandboxer_client::{Connection, Error, Options, ResumeFrom, Sandbox};

#[tokio::main]
async fn main() -> Result<(), Error> {
    let server = std::env::args().nth(1).unwrap_or_else(|| "http://127.0.0.1:8080".to_owned());
    let sandbox = Sandbox::create(&server, Options::default()).await?;
    let mut run = sandbox.python("import time\nfor i in range(200):\n    print(i, flush=True)\n    time.sleep(0.005)").await?;

    let mut all = Vec::new();
    while all.len() < 100 {
        let piece = run.next().await.ok_or(Error::Closed)?;
        all.extend_from_slice(&piece.data);
    }
    // This is all that has to be kept, in a file, say.
    let (id, token) = (sandbox.id(), sandbox.token().map(str::to_owned));
    let from = ResumeFrom::offsets(run.id().clone(), run.offsets().0, run.offsets().1);
    sandbox.close().await;
    println!("left after {} bytes", all.len());

    let sandbox = Sandbox::attach_with(&server, id, token.as_deref(), Connection::default(), from).await?;
    let output = sandbox.resume().await?.ok_or(Error::Closed)?.output().await?;
    all.extend_from_slice(&output.stdout);

    let expected: String = (0..200).map(|i| format!("{i}\n")).collect();
    assert_eq!(String::from_utf8_lossy(&all), expected);
    println!("all {} bytes, each once", all.len());
    sandbox.kill_sandbox().await
}
