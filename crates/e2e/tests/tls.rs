//! TLS by the server itself.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use std::{path::Path, time::Duration};

use sandboxer_e2e::{Certificate, Options, Server, TlsTunnel, Ws, command, eventually, http, stderr_of};
use serde_json::json;

async fn serve(certificate: &Certificate) -> (Server, TlsTunnel) {
    let text = |path: &Path| path.to_str().unwrap().to_owned();
    let server =
        Options::default().arg("--tls-cert").arg(text(&certificate.file())).arg("--tls-key").arg(text(&certificate.key())).not_waiting();
    let server = server.start();
    let tunnel = TlsTunnel::start(server.address(), certificate).await;
    (server, tunnel)
}

/// A client that is served by tasks of this runtime must not block it.
async fn get(tunnel: &TlsTunnel, path: &'static str) -> u16 {
    let address = tunnel.address();
    tokio::task::spawn_blocking(move || http::try_get(address, path, &[]).map_or(0, |answer| answer.status)).await.unwrap()
}

#[tokio::test]
async fn everything_works_over_tls_and_nothing_without() {
    let certificate = Certificate::make();
    let (server, tunnel) = serve(&certificate).await;
    while get(&tunnel, "/readyz").await != 200 {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    assert_eq!(get(&tunnel, "/healthz").await, 200);
    let mut ws = Ws::connect(tunnel.address(), "/create", &[]).await.unwrap();
    ws.send(json!({"env": {"OVER": "TLS"}})).await;
    ws.expect_created().await;
    assert_eq!(ws.bash("echo $OVER; cat /dev/zero | head -c 3000000 | wc -c").await.ok(), "TLS\n3000000\n");
    let id = ws.sandbox_id.clone();
    ws.close().await;
    let mut ws = Ws::connect(tunnel.address(), &format!("/attach/{id}"), &[]).await.unwrap();
    ws.expect_status("SANDBOX_RUNNING").await;
    ws.expect_alive().await;

    for path in ["/healthz", "/create"] {
        let plain = http::try_get(server.address(), path, &http::UPGRADE);
        assert!(plain.is_err(), "plain HTTP is answered: {plain:?}");
    }
    assert_eq!(Ws::connect(server.address(), "/create", &[]).await.err(), Some(0));
    ws.expect_alive().await;
}

#[tokio::test]
async fn a_stranger_who_never_finishes_the_handshake_is_cut_off() {
    let certificate = Certificate::make();
    let (server, _tunnel) = serve(&certificate).await;
    // The beginning of a hello, and nothing more.
    let mut stream = tokio::net::TcpStream::connect(server.address()).await.unwrap();
    tokio::io::AsyncWriteExt::write_all(&mut stream, &[0x16, 0x03, 0x01, 0x02, 0x00]).await.unwrap();
    let begun = std::time::Instant::now();
    let mut answer = Vec::new();
    let read = tokio::time::timeout(Duration::from_secs(15), tokio::io::AsyncReadExt::read_to_end(&mut stream, &mut answer)).await;
    assert!(read.is_ok(), "it is still served after {:?}", begun.elapsed());
    assert!(begun.elapsed() > Duration::from_secs(8), "a slow handshake is given its time: {:?}", begun.elapsed());
}

#[tokio::test]
async fn a_certificate_that_can_not_be_used_is_a_fault_that_is_told_at_the_start() {
    let (one, other) = (Certificate::make(), Certificate::make());
    let home = tempfile::tempdir().unwrap();
    let refused = |arguments: &[&Path], fault: &str| {
        let names = ["--tls-cert", "--tls-key"];
        let mut command = command();
        command.args(["serve", "--listen", "127.0.0.1:0", "--data-dir"]).arg(home.path());
        for (name, value) in names.iter().zip(arguments) {
            command.arg(name).arg(value);
        }
        let output = command.output().unwrap();
        assert_eq!(output.status.code(), Some(64), "{}", stderr_of(&output));
        assert!(stderr_of(&output).contains(fault), "{fault} is not in {}", stderr_of(&output));
    };
    refused(&[&one.file()], "--tls-cert needs --tls-key");
    refused(&[&one.file(), &other.key()], "--tls-key");
    refused(&[&one.key(), &one.key()], "there is no certificate in the file");
    refused(&[Path::new("/no/such/file"), &one.key()], "the certificate can't be read");
    eventually("nothing is left of it", Duration::from_secs(1), || std::fs::read_dir(home.path()).unwrap().next().is_none()).await;
}
