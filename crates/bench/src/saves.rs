//! Checkpoint, restore and handoff against what they are made of: runsc's own part and the work on the same bytes, in the same round.
//!
//! The sandbox holds 100 MiB of live memory, half of it compressible, in a Python that goes on through all of it.

use std::{
    fs::{self, File},
    io::Write as _,
    path::{Path, PathBuf},
    sync::atomic::{AtomicUsize, Ordering},
    time::Instant,
};

use anyhow::{Context as _, Result, anyhow};
use serde_json::json;

use crate::{
    autosaves,
    client::Client,
    forks,
    raw::{Raw, ms_since},
    report::{CHECKPOINT_AT_MOST, UNCACHED_AT_MOST},
    samples::{Column, Row, Samples},
    server::{Server, Waits},
};

const PIECE_BYTES: usize = 1 << 20;
/// What a sandbox holds, in MiB, where nothing else is said.
const HELD_MIB: usize = 100;
const SMALL_MIB: usize = 64;

/// What the program is to do before it answers: change one contiguous MiB, or look at each page that it has.
const CHANGE: &str = "";
const LOOK: &str = "look";

/// Changes one contiguous MiB and nothing else: by way of a value of its own it would leave two more of them behind, which a save writes too.
pub(crate) const REWRITE: &str = "\
source = open('/dev/urandom', 'rb', buffering=0)
def rewrite(held, start):
    piece = memoryview(held)[start:start + (1 << 20)]
    while piece:
        piece = piece[source.readinto(piece):]
";

/// Prints 6 bytes when it is ready and 2 for each line of input, when it has done what that says.
fn program(mib: usize) -> String {
    format!(
        "\
import os, sys
half = {mib} << 19
{REWRITE}
random = bytearray(os.urandom(half))
text = bytearray(b''.join(b'%07d %08x\\n' % (n, n * 2654435761 % 4294967296) for n in range(half // 17)))
print('ready', end='\\n', flush=True)
for number, line in enumerate(sys.stdin):
    if line == '{LOOK}\\n':
        sum(random[::4096]) + sum(text[::4096])
    else:
        rewrite(random, number << 20)
    sys.stdout.write('x\\n')
    sys.stdout.flush()
"
    )
}

/// What saving and restoring come down to, each by itself, in ms.
struct Parts {
    checkpoint: f64,
    sync: f64,
    compress: f64,
    decompress: f64,
}

impl Parts {
    fn of_save(&self) -> f64 {
        self.checkpoint + self.sync + self.compress
    }
}

pub(crate) struct Saves {
    pub(crate) one: Server,
    pub(crate) other: Server,
    pub(crate) volume: PathBuf,
    pub(crate) work: PathBuf,
}

impl Saves {
    pub(crate) async fn round(&self, raw: &mut Raw, samples: &mut Samples) -> Result<()> {
        let files = self.work.join("raw-image");
        let small = self.holding(SMALL_MIB).await?;
        let parts = self.parts(raw, &small.sandbox_id, &files).await?;
        fs::remove_dir_all(&files)?;
        samples.add(Row::CheckpointSmall, Column::Raw, parts.of_save());
        samples.add(Row::CheckpointSmall, Column::Server, small.checkpoint().await.context("checkpoint")?);

        let client = self.holding(HELD_MIB).await?;
        let id = client.sandbox_id.clone();
        let (image, marker) = (self.one.image_of(&id)?, self.one.marker_of(&id)?);
        let parts = self.parts(raw, &id, &files).await?;
        let (save_parts, Parts { checkpoint, sync, compress, decompress }) = (parts.of_save(), parts);
        for (row, value) in
            [(Row::RunscCheckpoint, checkpoint), (Row::Sync, sync), (Row::Compress, compress), (Row::Decompress, decompress)]
        {
            samples.add(row, Column::Raw, value);
        }
        samples.add(Row::Checkpoint, Column::Raw, save_parts);
        samples.add(Row::Checkpoint, Column::Server, client.checkpoint().await.context("checkpoint")?);

        let (sandbox, restore) = raw.restore(&image, &marker, &files).await.context("raw restore")?;
        raw.remove(sandbox).await?;
        fs::remove_dir_all(&files)?;
        self.one.one_waits(Waits::Container).await?;
        let (mut client, cached) = Client::attach(self.one.address, &id).await.context("restore from the cache")?;
        samples.add(Row::RestoreCached, Column::Raw, restore);
        samples.add(Row::RestoreCached, Column::Server, cached);
        // It runs before all of its memory is there, which runsc's own does not: what a program waits that wants all of it at once counts too.
        let (first, again) = (look(&mut client, 8).await?, look(&mut client, 10).await?);
        samples.add(Row::RestoreWhole, Column::Raw, restore);
        samples.add(Row::RestoreWhole, Column::Server, cached + (first - again).max(0.0));

        client.ask(CHANGE, 12).await?;
        let before = packs_mib(&self.volume)?;
        client.checkpoint().await.context("the second checkpoint")?;
        samples.add(Row::SecondWrites, Column::Raw, 1.0);
        samples.add(Row::SecondWrites, Column::Server, packs_mib(&self.volume)? - before);

        self.other.one_waits(Waits::Container).await?;
        let (client, uncached) = Client::attach(self.other.address, &id).await.context("restore from the volume")?;
        let restore_parts = restore + decompress;
        samples.add(Row::RestoreUncached, Column::Raw, restore_parts);
        samples.add(Row::RestoreUncached, Column::Server, uncached);

        self.one.one_waits(Waits::Container).await?;
        // At once: the save that follows a disconnect has not begun.
        client.leave().await?;
        let (mut client, handoff) = Client::attach(self.one.address, &id).await.context("handoff")?;
        samples.add(Row::Handoff, Column::Raw, CHECKPOINT_AT_MOST * save_parts + UNCACHED_AT_MOST * restore_parts);
        samples.add(Row::Handoff, Column::Server, handoff);
        client.ask(CHANGE, 14).await.context("the program after all of it")?;
        forks::measure(&self.one, &mut client, raw, &self.work, samples).await.context("forks")?;
        client.kill().await?;
        autosaves::measure(&self.one, raw, &self.volume, &self.work, samples).await.context("autosaves")
    }

    /// A sandbox with so much live memory.
    async fn holding(&self, mib: usize) -> Result<Client> {
        let (mut client, _) = Client::create_with(self.one.address, &json!({"idle_timeout": 600, "enable_checkpoint": true})).await?;
        client.start(&program(mib), 6).await.context("the program")?;
        // The base image goes to the volume once, beside the first sandbox.
        image_is_there(&self.volume).await?;
        Ok(client)
    }

    async fn parts(&self, raw: &Raw, id: &str, files: &Path) -> Result<Parts> {
        let checkpoint = raw.checkpoint(self.one.runsc_state(), id, files).await.context("raw checkpoint")?;
        let bytes = read(files)?;
        let sync = write_and_sync(&bytes, &self.work.join("sync"))?;
        let (compress, packed) = compress(&bytes)?;
        Ok(Parts { checkpoint, sync, compress, decompress: decompress(&packed)? })
    }

    pub(crate) async fn end(self) -> Result<()> {
        self.one.end().await?;
        self.other.end().await
    }
}

/// How long the program takes to look at all of its memory.
async fn look(client: &mut Client, printed: u64) -> Result<f64> {
    let begun = Instant::now();
    client.ask(LOOK, printed).await?;
    Ok(ms_since(begun))
}

async fn image_is_there(volume: &Path) -> Result<()> {
    let images = volume.join("images");
    let begun = Instant::now();
    while !fs::read_dir(&images).is_ok_and(|entries| entries.flatten().any(|entry| entry.path().extension().is_some_and(|e| e == "img"))) {
        anyhow::ensure!(begun.elapsed() < crate::raw::LIMIT, "the base image does not come to the volume");
        tokio::time::sleep(std::time::Duration::from_millis(100)).await;
    }
    Ok(())
}

/// The files of a checkpoint, one after the other.
fn read(dir: &Path) -> Result<Vec<u8>> {
    let mut bytes = Vec::new();
    for entry in fs::read_dir(dir)? {
        bytes.extend(fs::read(entry?.path())?);
    }
    Ok(bytes)
}

fn write_and_sync(bytes: &[u8], path: &Path) -> Result<f64> {
    let begun = Instant::now();
    let mut file = File::create(path)?;
    file.write_all(bytes)?;
    file.sync_all()?;
    let taken = ms_since(begun);
    fs::remove_file(path)?;
    Ok(taken)
}

fn compress(bytes: &[u8]) -> Result<(f64, Vec<Vec<u8>>)> {
    let pieces: Vec<&[u8]> = bytes.chunks(PIECE_BYTES).collect();
    let begun = Instant::now();
    let packed = on_all_cores(
        &pieces,
        || zstd::bulk::Compressor::new(1),
        |piece, zstd| {
            std::hint::black_box(blake3::hash(piece));
            zstd.compress(piece)
        },
    )?;
    Ok((ms_since(begun), packed))
}

fn decompress(packed: &[Vec<u8>]) -> Result<f64> {
    let begun = Instant::now();
    on_all_cores(packed, zstd::bulk::Decompressor::new, |piece, zstd| {
        let bytes = zstd.decompress(piece, PIECE_BYTES)?;
        Ok(std::hint::black_box(blake3::hash(&bytes)))
    })?;
    Ok(ms_since(begun))
}

/// Each core takes the next piece.
fn on_all_cores<P: Sync, C, T: Send>(
    pieces: &[P],
    context: impl Fn() -> std::io::Result<C> + Sync,
    work: impl Fn(&P, &mut C) -> std::io::Result<T> + Sync,
) -> Result<Vec<T>> {
    let next = AtomicUsize::new(0);
    let cores = std::thread::available_parallelism().map_or(2, std::num::NonZero::get);
    let core = || -> std::io::Result<Vec<(usize, T)>> {
        let (mut context, mut done) = (context()?, Vec::new());
        loop {
            let number = next.fetch_add(1, Ordering::Relaxed);
            let Some(piece) = pieces.get(number) else { return Ok(done) };
            done.push((number, work(piece, &mut context)?));
        }
    };
    let mut all = Vec::new();
    std::thread::scope(|scope| -> Result<()> {
        let cores: Vec<_> = (0..cores).map(|_| scope.spawn(core)).collect();
        for core in cores {
            all.extend(core.join().map_err(|_| anyhow!("a core's work failed"))??);
        }
        Ok(())
    })?;
    all.sort_unstable_by_key(|(number, _)| *number);
    Ok(all.into_iter().map(|(_, value)| value).collect())
}

#[expect(clippy::cast_precision_loss, reason = "some MiB")]
pub(crate) fn packs_mib(volume: &Path) -> Result<f64> {
    fn bytes(dir: &Path) -> Result<u64> {
        let mut sum = 0;
        for entry in fs::read_dir(dir)? {
            let entry = entry?;
            let meta = entry.metadata()?;
            sum += if meta.is_dir() { bytes(&entry.path())? } else { meta.len() };
        }
        Ok(sum)
    }
    Ok(bytes(&volume.join("packs"))? as f64 / PIECE_BYTES as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_compressed_comes_back_in_order() {
        let bytes: Vec<u8> = (0..5 * PIECE_BYTES + 17).map(|n| (n / 4096) as u8).collect();
        let (_, packed) = compress(&bytes).unwrap();
        let back: Vec<u8> = packed.iter().flat_map(|piece| zstd::bulk::decompress(piece, PIECE_BYTES).unwrap()).collect();
        assert!(back == bytes && decompress(&packed).unwrap() > 0.0);
    }
}
