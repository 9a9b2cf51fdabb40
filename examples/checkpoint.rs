//! A sandbox is saved at one server and goes on at another that has the same volume, with its processes and their memory:
//! `cargo run -p sandboxer-client --example checkpoint SERVER OTHER_SERVER`.

use sandboxer_client::{Error, Options, Sandbox};

/// Counts in memory, and says so to whoever asks.
const COUNTER: &str = "
mkfifo ask answer
(n=0; while read -r line <ask; do n=$((n+1)); echo $n >answer; done) >/dev/null 2>&1 &
";

async fn count(sandbox: &Sandbox) -> Result<String, Error> {
    let output = sandbox.bash("echo >ask; cat answer").await?.output().await?;
    Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
}

#[tokio::main]
async fn main() -> Result<(), Error> {
    let mut servers = std::env::args().skip(1);
    let here = servers.next().unwrap_or_else(|| "http://127.0.0.1:8080".to_owned());
    let there = servers.next().unwrap_or_else(|| "http://127.0.0.1:8081".to_owned());

    let sandbox = Sandbox::create(&here, Options::default().checkpoint(true)).await?;
    sandbox.bash(COUNTER).await?.wait().await?;
    println!("here: {}, {}", count(&sandbox).await?, count(&sandbox).await?);

    let (id, token) = (sandbox.id(), sandbox.token().map(str::to_owned));
    let saved = sandbox.checkpoint(false).await?;
    println!("saved as {}", saved.name);

    let sandbox = Sandbox::attach(&there, id, token.as_deref()).await?;
    println!("there: {}", count(&sandbox).await?);
    sandbox.kill_sandbox().await
}
