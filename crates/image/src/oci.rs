//! Reads container images: an OCI layout directory, or a tar archive of one, or what `docker save` writes. Every blob is checked against its digest.

mod blobs;

use std::io::{self, BufReader, Read};
use std::path::Path;

use serde::Deserialize;

use crate::error::{Doing, Error, Result};
use crate::layer::{Limits, apply_layer};
use crate::name::{Digest, Hasher};
use crate::progress::Progress;
use crate::tree::Tree;
use blobs::Blobs;

/// Manifests and configurations are small; whoever sends a larger one means harm.
const MAX_JSON_BYTES: u64 = 4 << 20;
/// The environment of an image, which every execution gets.
const MAX_ENV_BYTES: usize = 64 * 1024;
/// An index may name another index (one a platform); deeper is not used.
const MAX_INDEX_DEPTH: usize = 4;

/// The result of unpacking an image.
#[derive(Debug, Default)]
pub(crate) struct Imported {
    pub(crate) process: ProcessConfig,
    /// Device nodes and the like.
    pub(crate) left_out: u64,
}

#[derive(Deserialize)]
struct Index {
    manifests: Vec<Descriptor>,
}

#[derive(Deserialize, Clone)]
#[serde(rename_all = "camelCase")]
struct Descriptor {
    #[serde(default)]
    media_type: String,
    digest: Digest,
    #[serde(default)]
    size: Option<u64>,
    #[serde(default)]
    platform: Option<Platform>,
}

#[derive(Deserialize, Clone)]
struct Platform {
    architecture: String,
    os: String,
}

#[derive(Deserialize)]
struct Manifest {
    config: Descriptor,
    layers: Vec<Descriptor>,
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct DockerManifest {
    config: String,
    layers: Vec<String>,
}

#[derive(Deserialize)]
struct ImageConfig {
    #[serde(default)]
    architecture: String,
    #[serde(default)]
    config: Option<ProcessConfig>,
    rootfs: RootFs,
}

/// How an image wants its program to be started.
#[derive(Debug, Deserialize, Default)]
#[serde(rename_all = "PascalCase")]
pub(crate) struct ProcessConfig {
    #[serde(default)]
    pub(crate) env: Option<Vec<String>>,
    #[serde(default)]
    pub(crate) working_dir: Option<String>,
    #[serde(default)]
    pub(crate) user: Option<String>,
    #[serde(default)]
    pub(crate) entrypoint: Option<Vec<String>>,
    #[serde(default)]
    pub(crate) cmd: Option<Vec<String>>,
}

#[derive(Deserialize)]
struct RootFs {
    diff_ids: Vec<Digest>,
}

/// A layer: where it is, the digest of that blob if the manifest has one, and of the archive in it.
struct LayerSource {
    blob: String,
    digest: Option<Digest>,
    diff_id: Digest,
}

/// Unpacks the image at `source` into `tree`. `work` is a directory for temporary files.
pub(crate) fn unpack(source: &Path, work: &Path, tree: &mut Tree, mut limits: Limits, progress: &dyn Progress) -> Result<Imported> {
    let blobs = Blobs::open(source, work, &mut limits)?;
    let (config, layers) = if blobs.has("index.json") { from_oci(source, &blobs)? } else { from_docker(source, &blobs)? };
    if layers.len() > limits.layers {
        return Err(Error::refused("image", format!("it has more than {} layers", limits.layers)));
    }
    if !config.architecture.is_empty() && config.architecture != host_architecture() {
        return Err(not_an_image(source, format!("it is for {}, this machine is {}", config.architecture, host_architecture())));
    }
    let mut left_out = 0;
    for (number, layer) in layers.iter().enumerate() {
        progress.tell(number as f32 / layers.len() as f32, &format!("unpacking layer {} of {}", number + 1, layers.len()));
        left_out += unpack_layer(&blobs, layer, tree, &mut limits)?;
    }
    let process = config.config.unwrap_or_default();
    let env_bytes: usize = process.env.iter().flatten().map(String::len).sum();
    if env_bytes > MAX_ENV_BYTES {
        return Err(Error::refused("image", format!("its environment is larger than {MAX_ENV_BYTES} bytes")));
    }
    Ok(Imported { process, left_out })
}

fn from_oci(source: &Path, blobs: &Blobs) -> Result<(ImageConfig, Vec<LayerSource>)> {
    let mut index: Index = parse(&blobs.read_small("index.json", MAX_JSON_BYTES)?, "index.json")?;
    for _ in 0..MAX_INDEX_DEPTH {
        let chosen = choose(source, &index.manifests)?;
        let json = verified(blobs, &chosen)?;
        if chosen.media_type.contains("index") || chosen.media_type.contains("manifest.list") {
            index = parse(&json, "index")?;
            continue;
        }
        let manifest: Manifest = parse(&json, "manifest")?;
        let config: ImageConfig = parse(&verified(blobs, &manifest.config)?, "image configuration")?;
        let diff_ids = &config.rootfs.diff_ids;
        if diff_ids.len() != manifest.layers.len() {
            return Err(not_an_image(source, "its manifest and its configuration name different numbers of layers"));
        }
        let layers = manifest.layers.into_iter().zip(diff_ids.iter().cloned());
        let layers =
            layers.map(|(layer, diff_id)| LayerSource { blob: blob_name(&layer.digest), digest: Some(layer.digest), diff_id }).collect();
        return Ok((config, layers));
    }
    Err(not_an_image(source, "its index names indexes without end"))
}

/// The manifest for this machine.
fn choose(source: &Path, manifests: &[Descriptor]) -> Result<Descriptor> {
    let here = |descriptor: &&Descriptor| match &descriptor.platform {
        // Attestations are listed as manifests for an unknown platform.
        Some(platform) => platform.os == "linux" && platform.architecture == host_architecture(),
        None => true,
    };
    let mut fitting = manifests.iter().filter(here);
    match (fitting.next(), fitting.next()) {
        (Some(only), None) => Ok(only.clone()),
        (None, _) => Err(not_an_image(source, format!("it has nothing for linux/{}", host_architecture()))),
        (Some(_), Some(_)) => Err(not_an_image(source, "it holds several images; save one at a time")),
    }
}

fn from_docker(source: &Path, blobs: &Blobs) -> Result<(ImageConfig, Vec<LayerSource>)> {
    if !blobs.has("manifest.json") {
        return Err(not_an_image(source, "it has neither index.json nor manifest.json"));
    }
    let mut manifests: Vec<DockerManifest> = parse(&blobs.read_small("manifest.json", MAX_JSON_BYTES)?, "manifest.json")?;
    let manifest = match (manifests.pop(), manifests.is_empty()) {
        (Some(only), true) => only,
        (None, _) => return Err(not_an_image(source, "its manifest.json is empty")),
        (Some(_), false) => return Err(not_an_image(source, "it holds several images; save one at a time")),
    };
    let json = blobs.read_small(&manifest.config, MAX_JSON_BYTES)?;
    // The configuration is named by its digest (`<digest>.json` or `blobs/sha256/<digest>`); it in turn has the digests of the layers.
    let named = Path::new(&manifest.config).file_name().and_then(|name| name.to_str()).unwrap_or_default();
    let expected: Digest =
        named.trim_end_matches(".json").parse().map_err(|_| not_an_image(source, "its configuration is not named by its digest"))?;
    check("image configuration", &expected, &Digest::of(&json))?;
    let config: ImageConfig = parse(&json, "image configuration")?;
    if config.rootfs.diff_ids.len() != manifest.layers.len() {
        return Err(not_an_image(source, "its manifest and its configuration name different numbers of layers"));
    }
    let layers = manifest.layers.into_iter().zip(config.rootfs.diff_ids.iter().cloned());
    let layers = layers.map(|(blob, diff_id)| LayerSource { blob, digest: None, diff_id }).collect();
    Ok((config, layers))
}

fn unpack_layer(blobs: &Blobs, layer: &LayerSource, tree: &mut Tree, limits: &mut Limits) -> Result<u64> {
    let reading = || format!("read the layer {}", layer.blob);
    let mut blob = Hashing { inner: blobs.open_blob(&layer.blob)?, hasher: Hasher::default() };
    let left_out = {
        let mut archive = Hashing { inner: decompressed(&mut blob).doing(reading)?, hasher: Hasher::default() };
        let left_out = apply_layer(tree, &mut archive, limits)?;
        check(&format!("layer {}", layer.blob), &layer.diff_id, &archive.hasher.finish())?;
        left_out
    };
    if let Some(digest) = &layer.digest {
        // A decompressor may stop before the end of the blob.
        io::copy(&mut blob, &mut io::sink()).doing(reading)?;
        check(&format!("layer {}", layer.blob), digest, &blob.hasher.finish())?;
    }
    Ok(left_out)
}

/// Tells compression by its first bytes: media types are missing in some archives and wrong in others.
fn decompressed<'a>(blob: impl Read + 'a) -> io::Result<Box<dyn Read + 'a>> {
    let mut blob = BufReader::with_capacity(256 * 1024, blob);
    let start = io::BufRead::fill_buf(&mut blob)?;
    Ok(if start.starts_with(&[0x1f, 0x8b]) {
        Box::new(flate2::bufread::MultiGzDecoder::new(blob))
    } else if start.starts_with(&[0x28, 0xb5, 0x2f, 0xfd]) {
        Box::new(zstd::Decoder::with_buffer(blob)?)
    } else {
        Box::new(blob)
    })
}

fn verified(blobs: &Blobs, descriptor: &Descriptor) -> Result<Vec<u8>> {
    let json = blobs.read_small(&blob_name(&descriptor.digest), descriptor.size.unwrap_or(MAX_JSON_BYTES).min(MAX_JSON_BYTES))?;
    check("manifest or configuration", &descriptor.digest, &Digest::of(&json))?;
    Ok(json)
}

fn check(what: &str, expected: &Digest, found: &Digest) -> Result<()> {
    if expected == found {
        return Ok(());
    }
    Err(Error::refused(what, format!("its content has the digest {found}, not {expected}: the image is damaged or has been changed")))
}

fn blob_name(digest: &Digest) -> String {
    format!("blobs/sha256/{digest}")
}

fn parse<'a, T: Deserialize<'a>>(json: &'a [u8], what: &str) -> Result<T> {
    serde_json::from_slice(json).map_err(|error| Error::refused(what, format!("it is malformed: {error}")))
}

fn not_an_image(path: &Path, why: impl Into<String>) -> Error {
    Error::NotAnImage { path: path.to_path_buf(), why: why.into() }
}

/// This machine's architecture as container images name it.
fn host_architecture() -> &'static str {
    match std::env::consts::ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        other => other,
    }
}

/// Hashes what passes through.
struct Hashing<R> {
    inner: R,
    hasher: Hasher,
}

impl<R: Read> Read for Hashing<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let n = self.inner.read(buffer)?;
        self.hasher.update(&buffer[..n]);
        Ok(n)
    }
}
