//! Archives that somebody wants imported.
//!
//! The checksums and digests in them would stop nearly everything that a fuzzer makes up, so they are put right first: whoever means harm
//! can do that too.

use std::{
    fs,
    os::unix::fs::{FileTypeExt as _, MetadataExt as _, PermissionsExt as _},
    path::{Path, PathBuf},
};

use sandboxer_image::{Limits, fuzzing};
use sha2::{Digest as _, Sha256};
use tempfile::TempDir;

const BLOCK: usize = 512;
/// Where the checksum of a tar header is, and its size.
const CHECKSUM: std::ops::Range<usize> = 148..156;
const SIZE: std::ops::Range<usize> = 124..136;

pub(crate) const MAX_BYTES: u64 = 1 << 20;
pub(crate) const MAX_ENTRIES: u64 = 64;
/// Directories that the last entry may bring before its path is counted.
const DEEPEST: u64 = 128;

/// Separates the files of a layout; `@2@` in one of them stands for the digest of the third.
const BETWEEN: &[u8] = b"\n---\n";

/// The first byte says what it is: `l` a layer, `i` an archive with an image in it, `d` the files of an OCI layout.
///
/// Whatever comes of it, nothing is written outside of the tree, and no more into it than is allowed.
pub fn archive(data: &[u8]) {
    let Some((kind, data)) = data.split_first() else { return };
    let place = Place::new();
    let limits = Limits { bytes: MAX_BYTES, entries: MAX_ENTRIES, layers: 4 };
    // Both are fine: that it is unpacked, and that it is refused.
    let _ = match kind {
        b'l' => fuzzing::apply_layers(&place.tree, &[&with_checksums(data)], limits),
        b'i' => {
            fs::write(&place.source, with_checksums(data)).unwrap();
            fuzzing::unpack(&place.source, &place.work, &place.tree, limits)
        }
        b'd' => {
            write_layout(data, &place.source);
            fuzzing::unpack(&place.source, &place.work, &place.tree, limits)
        }
        _ => return,
    };
    place.check();
}

/// `around/a/b/{tree,work,source}`: room above the tree for what climbs out of it.
pub(crate) struct Place {
    around: TempDir,
    pub(crate) tree: PathBuf,
    pub(crate) work: PathBuf,
    source: PathBuf,
}

impl Place {
    pub(crate) fn new() -> Self {
        let around = tempfile::Builder::new().prefix("fuzz-archive-").tempdir().unwrap();
        let inner = around.path().join("a/b");
        let place = Self { around, tree: inner.join("tree"), work: inner.join("work"), source: inner.join("source") };
        for dir in [&place.tree, &place.work] {
            fs::create_dir_all(dir).unwrap();
        }
        place
    }

    pub(crate) fn check(&self) {
        let names = |dir: &Path| {
            let mut names: Vec<_> = fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().file_name()).collect();
            names.sort();
            names
        };
        assert_eq!(names(self.around.path()), ["a"], "something was written outside");
        assert_eq!(names(&self.around.path().join("a")), ["b"], "something was written outside");
        let beside = names(&self.around.path().join("a/b"));
        assert!(beside.iter().all(|name| ["source", "tree", "work"].iter().any(|known| name == known)), "written outside: {beside:?}");
        let (mut entries, mut bytes, mut seen) = (0, 0, std::collections::HashSet::new());
        let mut dirs = vec![self.tree.clone()];
        while let Some(dir) = dirs.pop() {
            for entry in fs::read_dir(dir).unwrap() {
                let entry = entry.unwrap();
                let meta = entry.metadata().unwrap();
                entries += 1;
                if meta.is_dir() {
                    // So that this, and the removal of everything, work for an ordinary user too.
                    fs::set_permissions(entry.path(), fs::Permissions::from_mode(0o700)).unwrap();
                    dirs.push(entry.path());
                } else if seen.insert(meta.ino()) {
                    bytes += meta.len();
                }
                // A deletion is a device that leads nowhere.
                let deletion = meta.file_type().is_char_device() && meta.rdev() == 0;
                let harmless = meta.is_dir() || meta.is_file() || meta.is_symlink() || meta.file_type().is_fifo() || deletion;
                assert!(harmless, "a device or the like: {}", entry.path().display());
            }
        }
        assert!(entries <= MAX_ENTRIES + DEEPEST, "{entries} files and directories");
        assert!(bytes <= MAX_BYTES, "{bytes} bytes of content");
    }
}

/// Puts the checksum of every header right, as far as headers can be found.
pub(crate) fn with_checksums(data: &[u8]) -> Vec<u8> {
    let mut archive = data.to_vec();
    let mut at = 0;
    while let Some(header) = archive.get_mut(at..at + BLOCK) {
        if header.iter().any(|byte| *byte != 0) {
            header[CHECKSUM].fill(b' ');
            let sum: u32 = header.iter().map(|byte| u32::from(*byte)).sum();
            header[CHECKSUM].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
        }
        let digits: String = header[SIZE].iter().map(|byte| char::from(*byte)).filter(char::is_ascii_digit).collect();
        let size = usize::from_str_radix(&digits, 8).unwrap_or(0);
        let Some(next) = size.checked_next_multiple_of(BLOCK).and_then(|size| size.checked_add(at + BLOCK)) else { break };
        at = next;
    }
    archive
}

/// The first file is `index.json` (with `manifest.json` beside it, for docker's form), the others are blobs, named by their digests.
fn write_layout(data: &[u8], dir: &Path) {
    let mut files: Vec<Vec<u8>> = split(data).map(<[u8]>::to_vec).collect();
    files.truncate(8);
    let mut digests = vec![String::new(); files.len()];
    // From the end: a file names those behind it.
    for number in (0..files.len()).rev() {
        for (later, digest) in digests.iter().enumerate().skip(number + 1) {
            files[number] = replaced(&files[number], format!("@{later}@").as_bytes(), digest.as_bytes());
        }
        digests[number] = Sha256::digest(&files[number]).iter().map(|byte| format!("{byte:02x}")).collect();
    }
    let blobs = dir.join("blobs/sha256");
    fs::create_dir_all(&blobs).unwrap();
    for (number, (file, digest)) in files.iter().zip(&digests).enumerate() {
        if number == 0 {
            // Docker's is a list, and the layout's an object.
            let name = if file.starts_with(b"[") { "manifest.json" } else { "index.json" };
            fs::write(dir.join(name), file).unwrap();
        } else {
            fs::write(blobs.join(digest), file).unwrap();
        }
    }
}

fn split(data: &[u8]) -> impl Iterator<Item = &[u8]> {
    let mut rest = Some(data);
    std::iter::from_fn(move || {
        let data = rest.take()?;
        match data.windows(BETWEEN.len()).position(|window| window == BETWEEN) {
            Some(at) => {
                rest = Some(&data[at + BETWEEN.len()..]);
                Some(&data[..at])
            }
            None => Some(data),
        }
    })
}

fn replaced(text: &[u8], from: &[u8], to: &[u8]) -> Vec<u8> {
    let (mut out, mut at) = (Vec::with_capacity(text.len()), 0);
    while at < text.len() {
        if text[at..].starts_with(from) {
            out.extend_from_slice(to);
            at += from.len();
        } else {
            out.push(text[at]);
            at += 1;
        }
    }
    out
}
