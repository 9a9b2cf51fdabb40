//! An agent that works in steps, and whose failed steps never happened: `cargo run -p sandboxer-client --example agent_loop [SERVER]`.

use sandboxer_client::{Error, Options, Sandbox};

/// What a model would come up with, one attempt after the other. The second and the third one break things.
const ATTEMPTS: [&str; 5] = [
    "echo 'def answer(): return 6 * 7' >work.py",
    "rm -rf /root/* /usr/lib/python3; echo 'all clean' >/root/work.py",
    "sed -i 's/6/six/' work.py && python3 -c 'import work; work.answer()'",
    "echo 'print(answer())' >>work.py",
    "python3 work.py",
];

#[tokio::main]
async fn main() -> Result<(), Error> {
    let server = std::env::args().nth(1).unwrap_or_else(|| "http://127.0.0.1:8080".to_owned());
    let sandbox = Sandbox::create(&server, Options::default()).await?;
    let mut last = String::new();
    for (number, step) in ATTEMPTS.iter().enumerate() {
        let before = sandbox.snapshot(Some(&format!("before step {number}"))).await?;
        let done = sandbox.bash(*step).await?.output().await?;
        // The check that the agent is held to.
        let sound = done.exit.success() && sandbox.bash("python3 -m py_compile work.py").await?.output().await?.exit.success();
        if sound {
            last = String::from_utf8_lossy(&done.stdout).trim().to_owned();
            println!("step {number}: kept");
        } else {
            sandbox.rollback(&before).await?;
            println!("step {number}: failed, and never happened");
        }
        sandbox.api().delete_snapshot(&before.id).await?;
    }
    println!("the answer is {last}");
    sandbox.kill_sandbox().await
}
