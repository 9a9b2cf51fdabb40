//! What the fuzz targets and the replay of their corpora reach of this crate. No part of its interface.

use crate::{obituaries::Obituary, sandbox::record::Record, tls::Tls};

/// Reads the record of a sandbox and writes it again; none: it was refused.
#[must_use]
pub fn record(json: &[u8]) -> Option<Vec<u8>> {
    let record = Record::parse(json).ok()?;
    serde_json::to_vec(&record).ok()
}

/// Whether this is why a sandbox ended.
#[must_use]
pub fn obituary(json: &[u8]) -> bool {
    serde_json::from_slice::<Obituary>(json).is_ok()
}

/// Whether this is a certificate with its key.
#[must_use]
pub fn tls(certificate: &[u8], key: &[u8]) -> bool {
    Tls::parse(certificate, key).is_ok()
}
