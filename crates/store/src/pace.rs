//! How much this machine can save in a given time: tried, not guessed.
//!
//! A sample of [`SAMPLE_BYTES`], half of it random and half of it not, as a program's memory is, is hashed, compressed and written to files on the volume by
//! as many threads as a save has, and synced: that is what a save does with what has changed since the last one, without naming anything. Beside it
//! every sandbox costs what does not depend on its size ([`EACH`]): to freeze it, to have gVisor write it down, and to change its record.

use std::{
    fmt,
    io::{self, Write as _},
    path::Path,
    thread,
    time::{Duration, Instant},
};

use crate::{chunker, workers};

const SAMPLE_BYTES: usize = 8 << 20;
const PIECE_BYTES: usize = 256 << 10;
/// Seen on the machine this was written on, two cores, with nothing else to do.
const EACH: Duration = Duration::from_millis(120);
/// What an idle Python has that no other sandbox has stored before.
const SMALL_SANDBOX_BYTES: f64 = (16 << 20) as f64;

/// How fast a volume takes what is saved.
#[derive(Debug, Clone, Copy)]
pub struct Pace {
    bytes_per_second: f64,
}

/// What can be saved in a time.
#[derive(Debug, Clone, Copy)]
pub struct Within {
    pace: Pace,
    time: Duration,
}

impl Pace {
    /// Writes a sample to the volume; nothing of it stays. Blocks for a fraction of a second.
    ///
    /// # Errors
    /// The volume can't be written.
    pub fn measure(volume: &Path) -> io::Result<Self> {
        let sample = sample();
        let pieces: Vec<&[u8]> = sample.chunks(PIECE_BYTES).collect();
        let begun = Instant::now();
        thread::scope(|scope| {
            let share = pieces.len().div_ceil(workers());
            let writers: Vec<_> = pieces.chunks(share).map(|pieces| scope.spawn(move || write(volume, pieces))).collect();
            writers.into_iter().try_for_each(|writer| writer.join().unwrap_or_else(|_| Err(io::Error::other("a writer panicked"))))
        })?;
        #[expect(clippy::cast_precision_loss, reason = "it is an estimate")]
        let bytes_per_second = SAMPLE_BYTES as f64 / begun.elapsed().as_secs_f64().max(f64::EPSILON);
        Ok(Self { bytes_per_second })
    }

    #[must_use]
    pub fn within(self, time: Duration) -> Within {
        Within { pace: self, time }
    }
}

impl Within {
    #[must_use]
    pub fn bytes(&self) -> f64 {
        self.pace.bytes_per_second * self.time.as_secs_f64()
    }

    /// How many sandboxes, of which little has changed since they were last saved.
    #[must_use]
    pub fn small_sandboxes(&self) -> f64 {
        (self.time.as_secs_f64() / (EACH.as_secs_f64() + SMALL_SANDBOX_BYTES / self.pace.bytes_per_second)).floor()
    }
}

impl fmt::Display for Within {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const MIB: f64 = 1_048_576.0;
        write!(
            f,
            "about {:.0} MiB of changed memory, or some {} sandboxes with {:.0} MiB each, in {} s ({:.0} MiB/s with {} MiB tried on the volume, and {} ms for each sandbox)",
            self.bytes() / MIB,
            self.small_sandboxes(),
            SMALL_SANDBOX_BYTES / MIB,
            self.time.as_secs_f64(),
            self.pace.bytes_per_second / MIB,
            SAMPLE_BYTES >> 20,
            EACH.as_millis(),
        )
    }
}

/// Every other page can't be compressed.
fn sample() -> Vec<u8> {
    let mut sample = vec![0; SAMPLE_BYTES];
    let mut random = blake3::Hasher::new().update(b"sample").finalize_xof();
    for (number, page) in sample.chunks_mut(chunker::PAGE).enumerate() {
        if number % 2 == 0 {
            random.fill(page);
        } else {
            page.fill(u8::try_from(number % 251).unwrap_or_default());
        }
    }
    sample
}

fn write(volume: &Path, pieces: &[&[u8]]) -> io::Result<()> {
    // Without a name, where that can be: nobody else sees it, and it goes with this process, whatever becomes of that.
    let mut file = tempfile::tempfile_in(volume)?;
    let mut hashes = [0; 32];
    for piece in pieces {
        hashes = *blake3::hash(piece).as_bytes();
        file.write_all(&zstd::bulk::compress(piece, 1)?)?;
    }
    file.write_all(&hashes)?;
    file.sync_all()
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn a_volume_is_tried_and_nothing_stays_on_it() {
        let volume = tempfile::tempdir().unwrap();
        let within = Pace::measure(volume.path()).unwrap().within(Duration::from_secs(10));
        assert!(within.bytes() > 0.0 && within.small_sandboxes() <= 83.0, "{within}");
        assert_eq!(fs::read_dir(volume.path()).unwrap().count(), 0);
        assert!(Pace::measure(&volume.path().join("gone")).is_err());
    }

    #[test]
    fn what_fits_is_what_the_pace_says() {
        let within = Pace { bytes_per_second: 160.0 * 1_048_576.0 }.within(Duration::from_secs(10));
        // 0.12 s for each, and 0.1 s for 16 MiB.
        assert!((within.small_sandboxes() - 45.0).abs() < f64::EPSILON, "{within}");
        assert!(within.to_string().starts_with("about 1600 MiB of changed memory, or some 45 sandboxes"), "{within}");
    }
}
