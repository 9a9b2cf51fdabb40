//! Applies one layer of an image, a tar archive, to a tree.

use std::collections::HashSet;
use std::ffi::OsStr;
use std::io::{self, Read};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use tar::EntryType;

use crate::error::{Doing, Error, Result};
use crate::tar_reader::{Bounded, RawEntry, for_each_entry};
use crate::tree::{Meta, Tree};
use sandboxer_layer::{EntryPath, check_symlink_target};

const WHITEOUT: &[u8] = b".wh.";
const OPAQUE: &[u8] = b".wh..wh..opq";
/// Other bookkeeping of the union filesystem that this form comes from.
const WHITEOUT_META: &[u8] = b".wh..wh.";

/// How large an image may be. Counts down while its layers are applied.
#[derive(Debug, Clone)]
pub struct Limits {
    /// Bytes of all layers, uncompressed.
    pub bytes: u64,
    /// Files, directories and links of all layers, with the directories that their paths imply.
    pub entries: u64,
    /// Layers.
    pub layers: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self { bytes: 32 << 30, entries: 2_000_000, layers: 512 }
    }
}

/// Applies a layer; returns how many device nodes and the like were left out.
pub(crate) fn apply_layer(tree: &mut Tree, layer: &mut dyn Read, limits: &mut Limits) -> Result<u64> {
    let mut layer = Bounded { inner: layer, left: &mut limits.bytes };
    let mut applied = Layer { tree, own: HashSet::new(), left_out: 0 };
    let entries = &mut limits.entries;
    let too_many = || Error::refused("image", "it has more files than are allowed");
    for_each_entry(&mut layer, |entry, content| {
        *entries = entries.checked_sub(1).ok_or_else(too_many)?;
        applied.apply(entry, content)?;
        // One entry may bring as many directories as its path is deep.
        *entries = entries.checked_sub(applied.tree.take_implied()).ok_or_else(too_many)?;
        Ok(())
    })?;
    let left_out = applied.left_out;
    // Behind the end mark there may be padding, which the digest covers.
    io::copy(&mut layer, &mut io::sink()).doing(|| "read the archive")?;
    Ok(left_out)
}

struct Layer<'a> {
    tree: &'a mut Tree,
    /// What this layer itself brought: a whiteout hides what was below, whichever comes first in the archive.
    own: HashSet<PathBuf>,
    left_out: u64,
}

impl Layer<'_> {
    fn apply(&mut self, entry: &RawEntry, content: &mut dyn Read) -> Result<()> {
        let path = EntryPath::parse(&entry.path).map_err(|fault| Error::refused(entry.shown_path(), fault.to_string()))?;
        if let Some((_, name)) = path.split()
            && name.as_bytes().starts_with(WHITEOUT)
        {
            return self.white_out(&path, name);
        }
        let meta = Meta { mode: entry.mode, mtime: entry.mtime };
        match entry.kind {
            EntryType::Regular | EntryType::Continuous => {
                let written = self.tree.write_file(&path, meta, content)?;
                if written != entry.size {
                    return Err(Error::refused(path.to_string(), "the archive ends in the middle of it"));
                }
            }
            EntryType::Directory => self.tree.make_dir(&path, meta)?,
            EntryType::Symlink => {
                let target = self.link_of(entry)?;
                check_symlink_target(&path, target).map_err(|fault| Error::refused(path.to_string(), fault.to_string()))?;
                self.tree.make_symlink(&path, target, entry.mtime)?;
            }
            EntryType::Link => {
                let target = EntryPath::parse(self.link_of(entry)?)
                    .map_err(|fault| Error::refused(format!("hard link {path}"), format!("its target is {fault}")))?;
                self.tree.make_hard_link(&path, &target)?;
            }
            // The sandbox has a /dev of its own.
            EntryType::Block | EntryType::Char | EntryType::Fifo => {
                self.left_out += 1;
                return Ok(());
            }
            other => {
                return Err(Error::refused(path.to_string(), format!("an entry of the unknown kind {:?}", char::from(other.as_byte()))));
            }
        }
        self.own.extend(path.as_path().ancestors().map(Path::to_path_buf));
        Ok(())
    }

    fn link_of<'e>(&self, entry: &'e RawEntry) -> Result<&'e [u8]> {
        entry.link.as_deref().ok_or_else(|| Error::refused(entry.shown_path(), "a link without a target"))
    }

    fn white_out(&mut self, path: &EntryPath, name: &OsStr) -> Result<()> {
        let name = name.as_bytes();
        if name == OPAQUE {
            return self.tree.remove_children(&path.parent(), &self.own);
        }
        if name.starts_with(WHITEOUT_META) {
            return Ok(());
        }
        match &name[WHITEOUT.len()..] {
            b"" | b"." | b".." => Err(Error::refused(path.to_string(), "a whiteout of no name")),
            hidden => self.tree.remove(&path.sibling(OsStr::from_bytes(hidden)), &self.own),
        }
    }
}

#[cfg(test)]
#[path = "layer/tests.rs"]
mod tests;
