//! One prepared sandbox becomes ten, each tries something else, and the best one is kept:
//! `cargo run -p sandboxer-client --example fork [SERVER [COUNT]]`.

use sandboxer_client::{Error, Options, Sandbox};

/// What takes long is done once, before.
const PREPARE: &str = "
import random
random.seed(7)
open('data', 'w').write('\\n'.join(str(random.gauss(3.2, 1)) for _ in range(1000)))
";

/// How well a guess fits: smaller is better.
const TRY: &str = "
values = [float(line) for line in open('data')]
print(sum((value - GUESS) ** 2 for value in values) / len(values))
";

#[tokio::main]
async fn main() -> Result<(), Error> {
    let mut arguments = std::env::args().skip(1);
    let server = arguments.next().unwrap_or_else(|| "http://127.0.0.1:8080".to_owned());
    let count = arguments.next().and_then(|count| count.parse().ok()).unwrap_or(10);

    let sandbox = Sandbox::create(&server, Options::default().memory_mb(128)).await?;
    sandbox.python(PREPARE).await?.wait().await?;

    let copies = sandbox.fork(count).await?;
    let mut best: Option<(f64, usize, Sandbox)> = None;
    // All at once, and then one result after the other.
    let mut runs = Vec::new();
    for (guess, copy) in copies.into_iter().enumerate() {
        let run = copy.python(TRY.replace("GUESS", &guess.to_string())).await?;
        runs.push((guess, copy, run));
    }
    for (guess, copy, run) in runs {
        let output = run.output().await?;
        let score: f64 = String::from_utf8_lossy(&output.stdout).trim().parse().unwrap_or(f64::INFINITY);
        println!("{guess}: {score:.3}");
        match &best {
            Some((least, ..)) if *least <= score => copy.kill_sandbox().await?,
            _ => {
                if let Some((_, _, beaten)) = best.replace((score, guess, copy)) {
                    beaten.kill_sandbox().await?;
                }
            }
        }
    }
    if let Some((_, guess, winner)) = best {
        println!("the best is {guess}, in sandbox {}", winner.id());
        winner.kill_sandbox().await?;
    }
    sandbox.kill_sandbox().await
}
