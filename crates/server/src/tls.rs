//! TLS, from two PEM files.

use std::{path::Path, sync::Arc};

use tokio_rustls::rustls::{
    ServerConfig,
    crypto::ring,
    pki_types::{CertificateDer, PrivateKeyDer, pem, pem::PemObject as _},
    version::{TLS12, TLS13},
};

/// A certificate and its key, ready for use.
#[derive(Debug, Clone)]
pub struct Tls(pub(crate) Arc<ServerConfig>);

/// Why a certificate or key can't be used.
#[derive(Debug, thiserror::Error)]
pub enum InvalidTls {
    #[error("the certificate can't be read: {0}")]
    Certificate(pem::Error),
    #[error("there is no certificate in the file")]
    NoCertificate,
    #[error("the key can't be read: {0}")]
    Key(pem::Error),
    #[error("{0}")]
    Pair(#[from] tokio_rustls::rustls::Error),
}

impl Tls {
    /// Reads a certificate with its chain, and its private key.
    ///
    /// # Errors
    /// A file can't be read, or the two don't belong together.
    pub fn read(certificate: &Path, key: &Path) -> Result<Self, InvalidTls> {
        let read = |path| std::fs::read(path).map_err(pem::Error::Io);
        let certificate = read(certificate).map_err(InvalidTls::Certificate)?;
        Self::parse(&certificate, &read(key).map_err(InvalidTls::Key)?)
    }

    /// From the content of both files.
    pub(crate) fn parse(certificate: &[u8], key: &[u8]) -> Result<Self, InvalidTls> {
        let chain: Vec<_> = CertificateDer::pem_slice_iter(certificate).collect::<Result<_, _>>().map_err(InvalidTls::Certificate)?;
        if chain.is_empty() {
            return Err(InvalidTls::NoCertificate);
        }
        let key = PrivateKeyDer::from_pem_slice(key).map_err(InvalidTls::Key)?;
        let config = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()))
            .with_protocol_versions(&[&TLS13, &TLS12])?
            .with_no_client_auth()
            .with_single_cert(chain, key)?;
        Ok(Self(Arc::new(config)))
    }
}
