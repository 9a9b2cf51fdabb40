//! A program, its output as it comes, and a file: `cargo run -p sandboxer-client --example basic [SERVER]`.

use sandboxer_client::{Error, Options, OutputStream, Sandbox};

#[tokio::main]
async fn main() -> Result<(), Error> {
    let server = std::env::args().nth(1).unwrap_or_else(|| "http://127.0.0.1:8080".to_owned());
    let sandbox = Sandbox::create(&server, Options::default().memory_mb(256)).await?;

    let mut run = sandbox.python("import sys\nfor i in range(3): print(i)\nprint('done', file=sys.stderr)").await?;
    while let Some(piece) = run.next().await {
        let text = String::from_utf8_lossy(&piece.data);
        match piece.stream {
            OutputStream::Stdout => print!("{text}"),
            OutputStream::Stderr => eprint!("{text}"),
        }
    }
    println!("exit code {:?}", run.wait().await?.code);

    sandbox.files().write("/root/in.csv", "b\na\n").await?;
    let sorted = sandbox.bash("sort in.csv | tee out.csv").await?.output().await?;
    assert_eq!(sorted.stdout, sandbox.files().read("/root/out.csv").await?);
    println!("sorted: {:?}", String::from_utf8_lossy(&sorted.stdout));

    sandbox.kill_sandbox().await
}
