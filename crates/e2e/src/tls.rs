//! A certificate of the test's own, and a way to a server that speaks TLS for clients that don't.

use std::{net::SocketAddr, path::PathBuf, process::Command, sync::Arc};

use tempfile::TempDir;
use tokio::{
    io::copy_bidirectional,
    net::{TcpListener, TcpStream},
    task::{JoinHandle, JoinSet},
};
use tokio_rustls::{
    TlsConnector,
    rustls::{
        ClientConfig, RootCertStore,
        crypto::ring,
        pki_types::{CertificateDer, ServerName, pem::PemObject},
    },
};

use crate::binary::stderr_of;

/// For 127.0.0.1, signed by itself.
#[derive(Debug)]
pub struct Certificate {
    dir: TempDir,
}

impl Certificate {
    #[must_use]
    pub fn make() -> Self {
        let certificate = Self { dir: tempfile::tempdir().unwrap() };
        let made = Command::new("openssl")
            .args(["req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"])
            .args(["-subj", "/CN=sandboxer test", "-addext", "subjectAltName=IP:127.0.0.1"])
            .args(["-addext", "basicConstraints=critical,CA:FALSE"])
            .arg("-keyout")
            .arg(certificate.key())
            .arg("-out")
            .arg(certificate.file())
            .output()
            .expect("openssl is there");
        assert!(made.status.success(), "{}", stderr_of(&made));
        certificate
    }

    #[must_use]
    pub fn file(&self) -> PathBuf {
        self.dir.path().join("cert.pem")
    }

    #[must_use]
    pub fn key(&self) -> PathBuf {
        self.dir.path().join("key.pem")
    }
}

/// Takes plain connections and carries them over TLS, trusting this one certificate.
#[derive(Debug)]
pub struct TlsTunnel {
    address: SocketAddr,
    task: JoinHandle<()>,
}

impl TlsTunnel {
    pub async fn start(target: SocketAddr, certificate: &Certificate) -> Self {
        let mut roots = RootCertStore::empty();
        roots.add(CertificateDer::from_pem_file(certificate.file()).unwrap()).unwrap();
        let config = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_root_certificates(roots)
            .with_no_client_auth();
        let connector = TlsConnector::from(Arc::new(config));
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let task = tokio::spawn(async move {
            let mut lines = JoinSet::new();
            while let Ok((mut client, _)) = listener.accept().await {
                let connector = connector.clone();
                lines.spawn(async move {
                    let server = TcpStream::connect(target).await.unwrap();
                    let mut server = connector.connect(ServerName::from(target.ip()), server).await.unwrap();
                    // Ends as either side does; what the test makes of it is the test's.
                    let _ = copy_bidirectional(&mut client, &mut server).await;
                });
            }
        });
        Self { address, task }
    }

    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }
}

impl Drop for TlsTunnel {
    fn drop(&mut self) {
        self.task.abort();
    }
}
