//! What saving and loading cost against their parts, on the same bytes in the same run: `cargo run --release -p sandboxer-store --example measure -- DIR [FILE…] [then FILE…]`.
//!
//! Without files it makes 100 MiB, half of it compressible. Files behind `then` are saved as the next checkpoint of the same sandbox. The parts: one write and sync of the bytes, BLAKE3 plus zstd -1 on all cores, BLAKE3 plus
//! decompression on all cores.

use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use sandboxer_protocol::SandboxId;
use sandboxer_store::{Cache, ChunkIndex, Contract, ImageDigest, Loader, Saver, Source, Tenant, Volume};

const ROUNDS: usize = 7;
const PIECE: usize = 1 << 20;

fn contract(sandbox_id: SandboxId) -> Contract {
    Contract {
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
    }
}

fn named(files: &[PathBuf]) -> Result<Vec<Source>, Box<dyn std::error::Error>> {
    files.iter().enumerate().map(|(n, path)| Ok(Source { name: format!("file{n}").parse()?, path: path.clone() })).collect()
}

fn make(path: &Path) -> std::io::Result<()> {
    let mut data = vec![0; 100 << 20];
    blake3::Hasher::new().finalize_xof().fill(&mut data);
    for (n, page) in data.chunks_mut(4096).enumerate().filter(|(n, _)| n % 2 == 0) {
        for (index, word) in page.chunks_mut(16).enumerate() {
            word.fill((n % 251) as u8);
            word[0] = index as u8;
            word[1] = (n >> 8) as u8;
        }
    }
    fs::write(path, data)
}

fn timed<T>(work: impl FnOnce() -> T) -> (Duration, T) {
    let began = Instant::now();
    let done = work();
    (began.elapsed(), done)
}

/// On all cores, each taking the next piece.
fn on_all<T: Sync>(
    pieces: &[T],
    start: impl Fn() -> zstd::bulk::Compressor<'static> + Sync,
    work: impl Fn(&T, &mut zstd::bulk::Compressor<'static>) + Sync,
) {
    let next = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for _ in 0..std::thread::available_parallelism().map_or(2, std::num::NonZero::get) {
            scope.spawn(|| {
                let mut zstd = start();
                while let Some(piece) = pieces.get(next.fetch_add(1, Ordering::Relaxed)) {
                    work(piece, &mut zstd);
                }
            });
        }
    });
}

fn median(mut times: Vec<Duration>) -> f64 {
    times.sort_unstable();
    times[times.len() / 2].as_secs_f64() * 1e3
}

#[tokio::main(flavor = "multi_thread", worker_threads = 2)]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut arguments = std::env::args_os().skip(1).map(PathBuf::from);
    let dir = arguments.next().ok_or("say where to work")?;
    let mut files: Vec<PathBuf> = arguments.by_ref().take_while(|argument| argument != Path::new("then")).collect();
    let later: Vec<PathBuf> = arguments.collect();
    let work = dir.join(format!("measure-{}", std::process::id()));
    fs::create_dir_all(&work)?;
    if files.is_empty() {
        files.push(work.join("pages.img"));
        make(&files[0])?;
    }
    let (sources, next) = (named(&files)?, named(&later)?);
    let mut bytes = Vec::new();
    for file in &files {
        bytes.extend(fs::read(file)?);
    }
    let new = || zstd::bulk::Compressor::new(1).expect("zstd starts");
    let (mut sync, mut hash, mut save, mut load, mut unhash, mut cached) = (vec![], vec![], vec![], vec![], vec![], vec![]);
    let (mut last, mut second) = (None, None);
    for round in 0..ROUNDS {
        let target = work.join("sync");
        sync.push(
            timed(|| -> std::io::Result<()> {
                let mut file = File::create(&target)?;
                file.write_all(&bytes)?;
                file.sync_all()
            })
            .0,
        );
        fs::remove_file(&target)?;
        let pieces: Vec<&[u8]> = bytes.chunks(PIECE).collect();
        hash.push(
            timed(|| {
                on_all(&pieces, new, |piece, zstd| {
                    std::hint::black_box(blake3::hash(piece));
                    std::hint::black_box(zstd.compress(piece).expect("it compresses"));
                })
            })
            .0,
        );
        let packed: Vec<Vec<u8>> = pieces.iter().map(|piece| zstd::bulk::compress(piece, 1)).collect::<Result<_, _>>()?;
        unhash.push(
            timed(|| {
                on_all(&packed, new, |piece, _| {
                    std::hint::black_box(blake3::hash(&zstd::bulk::decompress(piece, PIECE).expect("it was compressed")));
                })
            })
            .0,
        );

        let root = work.join(format!("volume{round}"));
        fs::create_dir(&root)?;
        let volume = Volume::open_directory(&root)?;
        let began = Instant::now();
        let saved = Saver::new(volume.clone(), ChunkIndex::default()).save(Tenant::open(), &sources, &[]).await?;
        let prepared = volume.prepare(&saved, contract(SandboxId::random()), None).await?;
        volume.put_latest(prepared.sandbox_id, prepared.name).await?;
        save.push(began.elapsed());
        last = Some(saved.stats);
        if !next.is_empty() {
            let again = Saver::new(volume.clone(), ChunkIndex::default()).save(Tenant::open(), &next, &[&prepared.manifest]).await?;
            second = Some(again.stats);
        }

        let loader = Loader::new(volume, ChunkIndex::default());
        let cache = Cache::open(&work.join(format!("cache{round}")), u64::MAX, loader)?;
        let manifest = std::sync::Arc::new(prepared.manifest);
        let began = Instant::now();
        drop(cache.files(&manifest, u64::MAX).await?);
        load.push(began.elapsed());
        let began = Instant::now();
        drop(cache.files(&manifest, u64::MAX).await?);
        cached.push(began.elapsed());
        fs::remove_dir_all(&root)?;
        fs::remove_dir_all(work.join(format!("cache{round}")))?;
    }
    fs::remove_dir_all(&work)?;
    let (sync, hash, save, load, unhash, cached) = (median(sync), median(hash), median(save), median(load), median(unhash), median(cached));
    println!("{} MiB, {:?}", bytes.len() >> 20, last);
    if let Some(second) = second {
        println!("the next one: {second:?}");
    }
    println!("sync {sync:.1} ms, BLAKE3 + zstd -1 {hash:.1} ms, save {save:.1} ms: {:.2} of their sum", save / (sync + hash));
    println!("BLAKE3 + unzstd {unhash:.1} ms, load into the cache {load:.1} ms, from the cache {cached:.3} ms");
    Ok(())
}
