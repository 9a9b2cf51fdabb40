//! `https://` addresses. Which certificates are trusted is a matter of the environment, so a process of its own connects: the command
//! line, which sits on the library.

use std::{path::Path, process::Command};

use sandboxer_e2e::{command, http, stderr_of, stdout_of};

/// A certificate for 127.0.0.1 and its key, made by openssl.
fn certificate(directory: &Path) -> (String, String) {
    let path = |name: &str| directory.join(name).to_str().unwrap().to_owned();
    let (certificate, key) = (path("cert.pem"), path("key.pem"));
    let made = Command::new("openssl")
        .args(["req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=sandboxer test"])
        .args(["-addext", "subjectAltName=IP:127.0.0.1", "-addext", "basicConstraints=critical,CA:FALSE"])
        .args(["-keyout", &key, "-out", &certificate])
        .output()
        .expect("openssl is there");
    assert!(made.status.success(), "{}", stderr_of(&made));
    (certificate, key)
}

#[test]
fn a_trusted_server_is_spoken_to_and_another_is_refused_at_once() {
    let directory = tempfile::tempdir().unwrap();
    let (certificate, key) = certificate(directory.path());
    // Whether it is ready is not asked in the clear.
    let server = sandboxer_e2e::Options::default().arg("--tls-cert").arg(&certificate).arg("--tls-key").arg(&key).not_waiting().start();
    assert!(http::try_get(server.address(), "/healthz", &[]).is_err() || !server.log().is_empty());
    let run = |trusted: Option<&str>| {
        let mut command = command();
        if let Some(file) = trusted {
            command.env("SSL_CERT_FILE", file);
        }
        command.args(["run", "--server", &format!("https://{}", server.address()), "-l", "bash", "echo over TLS"]).output().unwrap()
    };
    let output = run(Some(&certificate));
    assert_eq!((stdout_of(&output).as_str(), output.status.code()), ("over TLS\n", Some(0)), "{}", stderr_of(&output));
    let output = run(None);
    assert_eq!(output.status.code(), Some(125));
    assert!(stderr_of(&output).contains("certificate"), "{}", stderr_of(&output));
}
