//! The files of an image, by name: in a directory, or in an archive that is read in place.

use std::collections::HashMap;
use std::fs::{self, File, OpenOptions};
use std::io::{self, BufReader, Read, Seek, SeekFrom};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use nix::fcntl::OFlag;
use tar::EntryType;

use super::{decompressed, not_an_image};
use crate::error::{Doing, Error, Result};
use crate::layer::Limits;
use crate::tar_reader::{Bounded, for_each_entry};
use sandboxer_layer::EntryPath;

/// More members than this no image archive has.
const MAX_MEMBERS: usize = 10_000;

pub(super) enum Blobs {
    Directory(PathBuf),
    Archive { path: PathBuf, members: HashMap<PathBuf, Member> },
}

pub(super) enum Member {
    File {
        position: u64,
        size: u64,
    },
    /// Older versions of docker write a layer that occurs twice as a link.
    Link(PathBuf),
}

impl Blobs {
    pub(super) fn open(source: &Path, work: &Path, limits: &mut Limits) -> Result<Self> {
        let metadata = fs::metadata(source).doing(|| format!("open {}", source.display()))?;
        if metadata.is_dir() {
            return Ok(Self::Directory(source.to_path_buf()));
        }
        let mut path = source.to_path_buf();
        if is_compressed(source).doing(|| format!("read {}", source.display()))? {
            path = work.join("archive.tar");
            decompress(source, &path, limits)?;
        }
        let file = File::open(&path).doing(|| format!("open {}", path.display()))?;
        let members = members(BufReader::with_capacity(1 << 20, file)).map_err(|error| match error {
            Error::Io { source: cause, .. } => not_an_image(source, format!("as an archive it can't be read ({cause})")),
            other => other,
        })?;
        Ok(Self::Archive { path, members })
    }

    pub(super) fn has(&self, name: &str) -> bool {
        match self {
            Self::Directory(directory) => directory.join(name).is_file(),
            Self::Archive { members, .. } => members.contains_key(Path::new(name)),
        }
    }

    pub(super) fn open_blob(&self, name: &str) -> Result<Box<dyn Read>> {
        let checked = EntryPath::parse(name.as_bytes()).map_err(|fault| Error::refused(name, fault.to_string()))?;
        let opening = || format!("open {name}");
        match self {
            Self::Directory(directory) => {
                let file = OpenOptions::new()
                    .read(true)
                    .custom_flags((OFlag::O_NOFOLLOW | OFlag::O_NONBLOCK).bits())
                    .open(directory.join(checked.as_path()));
                let file = file.doing(opening)?;
                if !file.metadata().doing(opening)?.is_file() {
                    return Err(Error::refused(name, "it is no regular file"));
                }
                Ok(Box::new(file))
            }
            Self::Archive { path, members } => {
                let mut member = members.get(checked.as_path());
                if let Some(Member::Link(target)) = member {
                    member = members.get(target);
                }
                let Some(Member::File { position, size }) = member else {
                    return Err(Error::refused(name, "the manifest names it, but it is not in the archive"));
                };
                let mut file = File::open(path).doing(opening)?;
                file.seek(SeekFrom::Start(*position)).doing(opening)?;
                Ok(Box::new(file.take(*size)))
            }
        }
    }

    pub(super) fn read_small(&self, name: &str, limit: u64) -> Result<Vec<u8>> {
        let mut content = Vec::new();
        self.open_blob(name)?.take(limit + 1).read_to_end(&mut content).doing(|| format!("read {name}"))?;
        if content.len() as u64 > limit {
            return Err(Error::refused(name, format!("it is larger than {limit} bytes")));
        }
        Ok(content)
    }
}

fn is_compressed(path: &Path) -> io::Result<bool> {
    let mut start = Vec::new();
    File::open(path)?.take(4).read_to_end(&mut start)?;
    Ok(start.starts_with(&[0x1f, 0x8b]) || start == [0x28, 0xb5, 0x2f, 0xfd])
}

fn decompress(source: &Path, target: &Path, limits: &mut Limits) -> Result<()> {
    let unpacking = || format!("decompress {}", source.display());
    let from = decompressed(File::open(source).doing(unpacking)?).doing(unpacking)?;
    let mut to = File::create_new(target).doing(unpacking)?;
    // It does not count as the image's own size, but is bounded by the same number.
    let mut left = limits.bytes;
    io::copy(&mut Bounded { inner: from, left: &mut left }, &mut to).doing(unpacking)?;
    Ok(())
}

fn members(archive: impl Read) -> Result<HashMap<PathBuf, Member>> {
    let mut members = HashMap::new();
    for_each_entry(archive, |entry, _| {
        let refused = |fault: sandboxer_layer::PathFault| Error::refused(entry.shown_path(), fault.to_string());
        let path = EntryPath::parse(&entry.path).map_err(refused)?;
        let member = match entry.kind {
            EntryType::Regular | EntryType::Continuous => Member::File { position: entry.position, size: entry.size },
            EntryType::Symlink | EntryType::Link => match link_target(&path, entry.kind, entry.link.as_deref().unwrap_or_default()) {
                Some(target) => Member::Link(target),
                None => return Err(Error::refused(entry.shown_path(), "a link that points outside the archive")),
            },
            EntryType::Directory => return Ok(()),
            _ => return Err(Error::refused(entry.shown_path(), "it is no regular file")),
        };
        if members.len() >= MAX_MEMBERS {
            return Err(Error::refused("archive", "it has too many members"));
        }
        members.insert(path.as_path().to_path_buf(), member);
        Ok(())
    })?;
    Ok(members)
}

/// Where a link of the archive points, by name only: `../` from its own directory at most down to the archive's root.
fn link_target(path: &EntryPath, kind: EntryType, target: &[u8]) -> Option<PathBuf> {
    let target = std::str::from_utf8(target).ok()?;
    let mut resolved = if kind == EntryType::Symlink { path.parent().as_path().to_path_buf() } else { PathBuf::new() };
    if target.is_empty() || target.starts_with('/') {
        return None;
    }
    for component in target.split('/') {
        match component {
            "" | "." => {}
            ".." => {
                if !resolved.pop() {
                    return None;
                }
            }
            name => resolved.push(name),
        }
    }
    Some(resolved)
}
