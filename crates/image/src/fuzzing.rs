//! What the fuzz targets and the replay of their corpora reach of this crate. No part of its interface.

use std::path::Path;

use crate::apt_sources;
use crate::error::{Doing as _, Result};
use crate::index::Index;
use crate::layer::{Limits, apply_layer};
use crate::oci;
use crate::progress::Silent;
use crate::tree::Tree;

/// Applies layers, one on the other, to the directory `root`.
pub fn apply_layers(root: &Path, layers: &[&[u8]], mut limits: Limits) -> Result<()> {
    let mut tree = Tree::open(root)?;
    for layer in layers {
        apply_layer(&mut tree, &mut &**layer, &mut limits)?;
    }
    tree.finish()
}

/// Unpacks the container image at `source` into the directory `root`.
pub fn unpack(source: &Path, work: &Path, root: &Path, limits: Limits) -> Result<()> {
    let mut tree = Tree::open(root)?;
    oci::unpack(source, work, &mut tree, limits, &Silent)?;
    tree.finish()
}

/// Reads an index and writes it again.
pub fn index(json: &[u8]) -> Result<Vec<u8>> {
    let index = Index::parse(json, Path::new("index.json"))?;
    serde_json::to_vec(&index).map_err(std::io::Error::from).doing(|| "write the index")
}

/// The lines for mmdebstrap that come of this machine's apt configuration, in the form of `sources.list` and in that of `.sources`.
pub fn apt_lines(text: &str) -> Vec<String> {
    let sources: Vec<_> = apt_sources::parse_list(text).chain(apt_sources::parse_stanzas(text)).collect();
    apt_sources::lines_for(&sources, "bookworm", "bookworm", &["main", "universe"])
}
