//! Memory: however large the sandbox, a save and a load stay within their bound. `SANDBOXER_SOAK` makes it 2 GiB.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use std::fs::{self, File};
use std::io::Write;
use std::path::Path;

use sandboxer_protocol::SandboxId;
use sandboxer_store::{ChunkIndex, Contract, ImageDigest, Loader, Saver, Source, Tenant, Volume};

/// What a save or a load may take on top of the process. The server has 64 MiB in all.
const BOUND: u64 = 48 << 20;

fn peak() -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
    line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() * 1024
}

fn forget_peak() {
    fs::write("/proc/self/clear_refs", "5").unwrap();
}

/// A quarter random, a quarter repetitive, the rest holes; each MiB differs.
fn fill(path: &Path, mib: u64) {
    let mut file = File::create(path).unwrap();
    let mut piece = vec![0; 1 << 20];
    for n in (0..mib).filter(|n| n % 4 < 2) {
        blake3::Hasher::new().update(&n.to_le_bytes()).finalize_xof().fill(&mut piece);
        if n % 4 == 1 {
            let (word, rest) = piece.split_at_mut(64);
            rest.chunks_mut(64).enumerate().for_each(|(index, out)| {
                out.copy_from_slice(&word[..out.len()]);
                out[..8].copy_from_slice(&index.to_le_bytes());
            });
        }
        std::os::unix::fs::FileExt::write_all_at(&file, &piece, n << 20).unwrap();
    }
    file.set_len(mib << 20).unwrap();
    file.flush().unwrap();
}

fn same(one: &Path, other: &Path) -> bool {
    let hash = |path: &Path| {
        let mut hasher = blake3::Hasher::new();
        std::io::copy(&mut File::open(path).unwrap(), &mut hasher).unwrap();
        hasher.finalize()
    };
    hash(one) == hash(other)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_large_sandbox_is_saved_and_loaded_in_little_memory() {
    let mib = if std::env::var_os("SANDBOXER_SOAK").is_some() { 2048 } else { 256 };
    let (root, local) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let path = local.path().join("pages.img");
    fill(&path, mib);
    let volume = Volume::open_directory(root.path()).unwrap();
    let sandbox_id = SandboxId::random();
    let contract = Contract {
        sandbox_id,
        created_at: jiff::Timestamp::now(),
        parent: None,
        epoch: 1,
        automatic: false,
        name: None,
        runsc_version: String::new(),
        platform: String::new(),
        cpu_features: Vec::new(),
        image: ImageDigest::from_bytes([1; 32]),
        agent_version: String::new(),
        spec: serde_json::Value::Null,
        state: serde_json::Value::Null,
        other: serde_json::Map::new(),
    };
    forget_peak();
    let before = peak();
    let sources = [Source { name: "pages.img".parse().unwrap(), path: path.clone() }];
    let saved = Saver::new(volume.clone(), ChunkIndex::default()).save(Tenant::open(), &sources, &[]).await.unwrap();
    let prepared = volume.prepare(&saved, contract, None).await.unwrap();
    let saving = peak() - before;
    drop(saved);
    forget_peak();
    let into = local.path().join("loaded");
    fs::create_dir(&into).unwrap();
    Loader::new(volume, ChunkIndex::default()).load(&prepared.manifest, &into, u64::MAX).await.unwrap();
    let loading = peak() - before;
    println!("{mib} MiB: saving took {} KiB, loading {} KiB", saving >> 10, loading >> 10);
    assert!(same(&path, &into.join("pages.img")));
    assert!(saving <= BOUND && loading <= BOUND, "saving {saving}, loading {loading}");
}
