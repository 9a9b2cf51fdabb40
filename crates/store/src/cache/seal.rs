//! When a cached set needs no second look, and the second look.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use serde::{Deserialize, Serialize};

use crate::manifest::{Chunk, ChunkHash, Codec, MAX_CHUNK_BYTES, Manifest};

const MAX_SEAL_BYTES: u64 = 64 << 10;
/// Chunks that a thread takes at once.
const TAKE: usize = 16;

/// What the files look like to the kernel.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Seal {
    boot: String,
    files: Vec<FileLook>,
}

#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
struct FileLook {
    device: u64,
    inode: u64,
    bytes: u64,
    modified: (i64, i64),
    changed: (i64, i64),
}

impl Seal {
    pub(super) fn of(manifest: &Manifest, dir: &Path) -> io::Result<Self> {
        let look = |path: &Path| {
            let about = fs::symlink_metadata(path)?;
            Ok(FileLook {
                device: about.dev(),
                inode: about.ino(),
                bytes: about.len(),
                modified: (about.mtime(), about.mtime_nsec()),
                changed: (about.ctime(), about.ctime_nsec()),
            })
        };
        let files = manifest.files().iter().map(|file| look(&dir.join(file.name.as_str()))).collect::<io::Result<_>>()?;
        Ok(Self { boot: fs::read_to_string("/proc/sys/kernel/random/boot_id")?, files })
    }

    pub(super) fn is_written_in(&self, path: &Path) -> bool {
        let small = fs::metadata(path).is_ok_and(|about| about.len() <= MAX_SEAL_BYTES);
        small && fs::read(path).ok().and_then(|bytes| serde_json::from_slice::<Self>(&bytes).ok()).is_some_and(|sealed| sealed == *self)
    }

    pub(super) fn write(&self, path: &Path) -> io::Result<()> {
        let staged = path.with_extension("new");
        fs::write(&staged, serde_json::to_vec(self)?)?;
        fs::rename(&staged, path)
    }
}

/// Hashes every chunk of the files, on all workers.
pub(super) fn files_match(manifest: &Manifest, dir: &Path) -> bool {
    let open = |name: &str| {
        let path = dir.join(name);
        if fs::symlink_metadata(&path)?.is_file() { File::open(path) } else { Err(io::ErrorKind::InvalidData.into()) }
    };
    let Ok(files) = manifest.files().iter().map(|file| open(file.name.as_str())).collect::<io::Result<Vec<_>>>() else { return false };
    let sized = files.iter().zip(manifest.files()).all(|(file, entry)| file.metadata().is_ok_and(|about| about.len() == entry.bytes));
    if !sized {
        return false;
    }
    let mut pieces: Vec<(&File, u64, &Chunk)> = Vec::with_capacity(manifest.chunks().len());
    for (file, (_, chunks)) in files.iter().zip(manifest.files_with_chunks()) {
        let mut offset = 0;
        for chunk in chunks {
            pieces.push((file, offset, chunk));
            offset += u64::from(chunk.raw);
        }
    }
    let (next, wrong, key) = (AtomicUsize::new(0), AtomicBool::new(false), manifest.tenant().chunk_key());
    let worker = || {
        let mut buffer = vec![0; MAX_CHUNK_BYTES as usize];
        while !wrong.load(Ordering::Relaxed) {
            let from = next.fetch_add(TAKE, Ordering::Relaxed);
            if from >= pieces.len() {
                return;
            }
            for (file, offset, chunk) in &pieces[from..(from + TAKE).min(pieces.len())] {
                let raw = &mut buffer[..chunk.raw as usize];
                let right = file.read_exact_at(raw, *offset).is_ok()
                    && match chunk.codec {
                        Codec::Zero => raw.iter().all(|byte| *byte == 0),
                        _ => ChunkHash::of(&key, raw) == chunk.hash,
                    };
                if !right {
                    wrong.store(true, Ordering::Relaxed);
                }
            }
        }
    };
    std::thread::scope(|scope| {
        for _ in 0..crate::workers() {
            scope.spawn(worker);
        }
    });
    !wrong.into_inner()
}
