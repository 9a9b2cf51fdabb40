//! A shell with a terminal, fed with what comes on standard input: `cargo run -p sandboxer-client --example shell [SERVER]`.
//!
//! `sandboxer shell` does the same with this terminal in raw mode, so that full-screen programs work too.

use std::io::Write as _;

use sandboxer_client::{Error, Execution, Options, Sandbox};
use tokio::io::AsyncReadExt as _;

#[tokio::main]
async fn main() -> Result<(), Error> {
    let server = std::env::args().nth(1).unwrap_or_else(|| "http://127.0.0.1:8080".to_owned());
    let sandbox = Sandbox::create(&server, Options::default()).await?;
    let mut run = sandbox.run(Execution::bash("exec bash -i").tty(24, 80).env("PS1", "$ ")).await?;

    let mut shell = run.take_stdin();
    let typing = tokio::spawn(async move {
        let (mut keys, mut typed) = (tokio::io::stdin(), [0; 4096]);
        while let Ok(count @ 1..) = keys.read(&mut typed).await {
            if shell.write(&typed[..count]).await.is_err() {
                return;
            }
        }
        // A terminal has no end of input but this key.
        let _ = shell.write([4]).await;
    });
    while let Some(piece) = run.next().await {
        let mut screen = std::io::stdout();
        if screen.write_all(&piece.data).and_then(|()| screen.flush()).is_err() {
            break;
        }
    }
    typing.abort();
    let exit = run.wait().await?;
    sandbox.kill_sandbox().await?;
    // The thread that reads standard input can't be ended otherwise.
    std::process::exit(i32::from(exit.shell_code()))
}
