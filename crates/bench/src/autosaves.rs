//! What a program notices of autosaves, and what they write: 200 MiB of live memory of which one contiguous MiB changes between two of them, against the
//! pause that `runsc checkpoint -leave-running` makes in the same program.

use std::{
    fs,
    path::Path,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use serde_json::{Value, json};

use crate::{
    client::Client,
    raw::{LIMIT, Raw},
    samples::{Column, Row, Samples},
    saves::{REWRITE, packs_mib},
    server::Server,
};

const AUTOSAVE_SECONDS: u32 = 2;
const TIMES: usize = 3;
/// For each line of input it says how long it was stopped at the longest since the last one, in microseconds, and changes one MiB.
const PROGRAM: &str = "\
import os, sys, threading, time
held = bytearray(os.urandom(200 << 20))
longest = 0.0
def watch():
    global longest
    last = time.monotonic()
    while True:
        time.sleep(0.001)
        now = time.monotonic()
        longest = max(longest, now - last)
        last = now
threading.Thread(target=watch, daemon=True).start()
print('ready', flush=True)
for number, line in enumerate(sys.stdin):
    seen = longest
    rewrite(held, number % 200 << 20)
    time.sleep(0.005)
    longest = 0.0
    print(round(seen * 1e6), flush=True)
";

pub(crate) async fn measure(server: &Server, raw: &Raw, volume: &Path, work: &Path, samples: &mut Samples) -> Result<()> {
    let mut program = Paused::start(server, &json!({"idle_timeout": 600, "enable_checkpoint": true})).await?;
    let mut longest = 0.0_f64;
    for _ in 0..TIMES {
        program.longest_pause_ms().await?;
        let files = work.join("raw-autosave");
        raw.checkpoint(server.runsc_state(), &program.client.sandbox_id, &files).await.context("raw checkpoint")?;
        fs::remove_dir_all(&files)?;
        longest = longest.max(program.longest_pause_ms().await?);
    }
    samples.add(Row::AutosavePause, Column::Raw, longest);
    program.client.kill().await?;

    let config = json!({"idle_timeout": 600, "enable_checkpoint": true, "autosave_seconds": AUTOSAVE_SECONDS});
    let mut program = Paused::start(server, &config).await?;
    // The first one that the program was ready for writes everything, and may be the second one.
    let mut latest = program.saved(volume, &Value::Null).await?;
    latest = program.saved(volume, &latest).await?;
    let (mut longest, mut most) = (0.0_f64, 0.0_f64);
    for _ in 0..TIMES {
        program.longest_pause_ms().await?;
        let before = packs_mib(volume)?;
        latest = program.saved(volume, &latest).await?;
        most = most.max(packs_mib(volume)? - before);
        longest = longest.max(program.longest_pause_ms().await?);
    }
    samples.add(Row::AutosavePause, Column::Server, longest);
    samples.add(Row::AutosaveWrites, Column::Raw, 1.0);
    samples.add(Row::AutosaveWrites, Column::Server, most);
    program.client.kill().await
}

/// A program that knows how long it was stopped.
struct Paused {
    client: Client,
}

impl Paused {
    async fn start(server: &Server, config: &Value) -> Result<Self> {
        let (mut client, _) = Client::create_with(server.address, config).await?;
        client.start(&format!("{REWRITE}{PROGRAM}"), 6).await.context("the program")?;
        Ok(Self { client })
    }

    /// Since the last time this was asked.
    async fn longest_pause_ms(&mut self) -> Result<f64> {
        let answer = self.client.answer("").await?;
        Ok(answer.trim().parse::<f64>().with_context(|| format!("the program says {answer:?}"))? / 1000.0)
    }

    /// Waits until the record names another checkpoint than this, and returns it.
    async fn saved(&self, volume: &Path, than: &Value) -> Result<Value> {
        let record = volume.join("locks").join(format!("{}.lock", self.client.sandbox_id));
        let begun = Instant::now();
        loop {
            let latest = serde_json::from_slice::<Value>(&fs::read(&record)?).map(|record| record["latest"].clone());
            if let Ok(latest) = latest
                && latest != *than
            {
                return Ok(latest);
            }
            ensure!(begun.elapsed() < LIMIT, "it does not save itself");
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }
}
