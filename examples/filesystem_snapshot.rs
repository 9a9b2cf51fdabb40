//! The files of one sandbox, prepared once, are what others start from:
//! `cargo run -p sandboxer-client --example filesystem_snapshot [SERVER]`.

use sandboxer_client::{Error, Options, Sandbox};

#[tokio::main]
async fn main() -> Result<(), Error> {
    let server = std::env::args().nth(1).unwrap_or_else(|| "http://127.0.0.1:8080".to_owned());
    let name = format!("example-{}", std::process::id());

    let sandbox = Sandbox::create(&server, Options::default()).await?;
    sandbox.bash("mkdir -p /opt/tool && echo 'echo hello from the tool' >/opt/tool/run && chmod +x /opt/tool/run").await?.wait().await?;
    let saved = sandbox.snapshot_filesystem(&name, true).await?;
    println!("{} entries saved", saved.entries);
    sandbox.kill_sandbox().await?;

    let sandbox = Sandbox::create(&server, Options::default().filesystem_snapshot(&name)).await?;
    let output = sandbox.bash("bash /opt/tool/run").await?.output().await?;
    print!("{}", String::from_utf8_lossy(&output.stdout));

    sandbox.api().delete_filesystem_snapshot(&name).await?;
    sandbox.kill_sandbox().await
}
