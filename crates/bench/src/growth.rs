//! How cost grows: with the sandboxes that live, the size of what is saved, the copies that are made at once, and the clients that create at once.

use std::{fmt::Write as _, path::Path, time::Instant};

use anyhow::{Context as _, Result, ensure};
use futures_util::future::try_join_all;
use sandboxer_client::{Api, Connection};
use serde::Serialize;
use serde_json::json;

use crate::{
    client::Client,
    machine::Processors,
    memory::{processes_under, pss_mib},
    programs,
    raw::ms_since,
    samples::{Summary, percentile},
    server::Server,
};

const LIVE: [usize; 4] = [1, 10, 50, 100];
const SIZES_MIB: [usize; 5] = [10, 64, 256, 1024, 2048];
const FORKS: [usize; 6] = [1, 2, 4, 8, 16, 32];
const CLIENTS: [usize; 7] = [1, 2, 4, 8, 16, 32, 64];
/// How often something is done at each step.
const TIMES: usize = 5;
/// How long clients create.
const SUSTAINED: std::time::Duration = std::time::Duration::from_secs(10);
/// What a sandbox has beside what it is to hold: its Python and gVisor.
const BESIDE_MIB: usize = 512;

/// One line of the table.
#[derive(Debug, Serialize)]
pub(crate) struct Step {
    pub(crate) what: String,
    pub(crate) count: usize,
    pub(crate) values: Vec<(&'static str, f64)>,
}

/// All of it, on servers of its own.
pub(crate) async fn measure(plain: &Server, kept: &Server, largest_mib: usize) -> Result<Vec<Step>> {
    let mut steps = live(plain).await.context("live sandboxes")?;
    steps.extend(sizes(kept, largest_mib).await.context("sizes of checkpoints")?);
    steps.extend(forks(kept).await.context("forks at once")?);
    steps.extend(clients(plain).await.context("clients at once")?);
    Ok(steps)
}

async fn live(server: &Server) -> Result<Vec<Step>> {
    let mut clients = Vec::new();
    let mut steps = Vec::new();
    for count in LIVE {
        eprintln!("sandboxer-bench: {count} live sandboxes");
        while clients.len() < count {
            clients.push(Client::create(server.address).await?.0);
        }
        let (mut echoes, mut creates) = (Vec::new(), Vec::new());
        for _ in 0..TIMES {
            let (client, taken) = Client::create(server.address).await?;
            creates.push(taken);
            client.kill().await?;
            let client = clients.last_mut().context("there is one")?;
            echoes.push(client.run(&programs::echo()).await?.done_ms);
        }
        let memory = pss_mib(&processes_under(&server.data, server.pid()));
        #[expect(clippy::cast_precision_loss, reason = "some sandboxes")]
        let each = memory / count as f64;
        steps.push(Step {
            what: "live sandboxes".to_owned(),
            count,
            values: vec![
                ("create ms", median(&creates)),
                ("echo ms", median(&echoes)),
                ("MiB of each", each),
                ("MiB of the server", pss_mib(&[server.pid()])),
            ],
        });
    }
    try_join_all(clients.into_iter().map(Client::kill)).await?;
    Ok(steps)
}

async fn sizes(server: &Server, largest_mib: usize) -> Result<Vec<Step>> {
    let mut steps = Vec::new();
    for mib in SIZES_MIB.into_iter().filter(|mib| *mib <= largest_mib) {
        eprintln!("sandboxer-bench: a checkpoint of {mib} MiB");
        let config = json!({"idle_timeout": 900, "enable_checkpoint": true, "limits": {"memory_mb": mib * 2 + BESIDE_MIB}});
        let (mut client, _) = Client::create_with(server.address, &config).await?;
        let id = client.sandbox_id.clone();
        let program = format!("import os, sys\nheld = bytearray(os.urandom({mib} << 20))\nprint('ready', flush=True)\nsys.stdin.read()\n");
        client.start(&program, 6).await?;
        let saved = client.checkpoint().await?;
        let (client, restored) = Client::attach(server.address, &id).await?;
        client.kill().await?;
        steps.push(Step {
            what: "MiB saved".to_owned(),
            count: mib,
            values: vec![("checkpoint ms", saved), ("attach with restore ms", restored)],
        });
    }
    Ok(steps)
}

async fn forks(server: &Server) -> Result<Vec<Step>> {
    let (mut client, _) = Client::create_with(server.address, &json!({"idle_timeout": 900, "enable_checkpoint": true})).await?;
    client.start("import os, sys\nheld = bytearray(os.urandom(20 << 20))\nprint('ready', flush=True)\nsys.stdin.read()\n", 6).await?;
    let snapshot = client.snapshot().await?;
    let api = Api::new(&format!("http://{}", server.address), &Connection::default())?;
    let mut steps = Vec::new();
    for count in FORKS {
        eprintln!("sandboxer-bench: {count} forks at once");
        let begun = Instant::now();
        let made = api.request("POST", &format!("/v1/snapshots/{snapshot}/restore"), Some(&json!({ "count": count }))).await?;
        let taken = ms_since(begun);
        let made = made.ok().map_err(anyhow::Error::msg)?;
        let ids: Vec<&str> = match made["items"].as_array() {
            Some(items) => items.iter().filter_map(|item| item["id"].as_str()).collect(),
            None => made["id"].as_str().into_iter().collect(),
        };
        ensure!(ids.len() == count, "these were made: {ids:?}");
        try_join_all(ids.iter().map(|id| Client::end(server.address, id))).await?;
        #[expect(clippy::cast_precision_loss, reason = "some forks")]
        let each = taken / count as f64;
        steps.push(Step { what: "forks at once".to_owned(), count, values: vec![("all ms", taken), ("each ms", each)] });
    }
    client.kill().await?;
    Ok(steps)
}

/// Each client creates, runs one program, and ends its sandbox, again and again.
async fn clients(server: &Server) -> Result<Vec<Step>> {
    let mut steps = Vec::new();
    for count in CLIENTS {
        eprintln!("sandboxer-bench: {count} clients create for {} s", SUSTAINED.as_secs());
        let (begun, processors) = (Instant::now(), Processors::now());
        let client = || async {
            let mut times = Vec::new();
            while begun.elapsed() < SUSTAINED {
                let (mut client, taken) = Client::create(server.address).await?;
                client.run(&programs::echo()).await?;
                client.kill().await?;
                times.push(taken);
            }
            Ok::<_, anyhow::Error>(times)
        };
        let times: Vec<f64> = try_join_all((0..count).map(|_| client())).await?.into_iter().flatten().collect();
        #[expect(clippy::cast_precision_loss, reason = "some creates")]
        let rate = times.len() as f64 / begun.elapsed().as_secs_f64();
        let summary = Summary::of(&times).context("nothing was made")?;
        steps.push(Step {
            what: "clients at once".to_owned(),
            count,
            values: vec![
                ("creates a second", rate),
                ("create p50 ms", summary.p50),
                ("create p99 ms", summary.p99),
                ("processors busy %", processors.used_since()),
            ],
        });
    }
    Ok(steps)
}

fn median(values: &[f64]) -> f64 {
    percentile(values, 50.0).unwrap_or(f64::NAN)
}

pub(crate) fn table(steps: &[Step]) -> String {
    let mut text = String::new();
    for step in steps {
        let values: Vec<String> = step.values.iter().map(|(name, value)| format!("{name} {value:.1}")).collect();
        // Writing to memory can't fail.
        let _ = writeln!(text, "{:>5} {:<16} {}", step.count, step.what, values.join(", "));
    }
    text
}

/// Not more than the disk below `dir` and the machine's memory take at ease.
pub(crate) fn largest_mib(dir: &Path) -> usize {
    let disk = nix::sys::statvfs::statvfs(dir).map_or(0, |stat| stat.blocks_available().saturating_mul(stat.fragment_size()));
    let meminfo = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let memory = meminfo
        .lines()
        .find_map(|line| line.strip_prefix("MemAvailable:")?.trim().trim_end_matches("kB").trim().parse::<u64>().ok())
        .unwrap_or(0)
        .saturating_mul(1024);
    usize::try_from((disk / 4).min(memory / 3) >> 20).unwrap_or(usize::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_step_is_a_line() {
        let step = Step { what: "forks at once".to_owned(), count: 8, values: vec![("all ms", 800.0), ("each ms", 100.0)] };
        assert_eq!(table(&[step]), "    8 forks at once    all ms 800.0, each ms 100.0\n");
    }
}
