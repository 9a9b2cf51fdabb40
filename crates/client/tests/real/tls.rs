//! `https://` addresses. Which certificates are trusted is a matter of the environment, so a process of its own connects: the command
//! line, which sits on the library.

use std::{
    io::{BufRead as _, BufReader},
    path::Path,
    process::{Child, Command, Stdio},
};

use sandboxer_e2e::{command, stderr_of, stdout_of};

/// A server that speaks TLS.
struct Server {
    child: Child,
    url: String,
}

impl Server {
    fn start(directory: &Path, certificate: &str, key: &str) -> Self {
        let mut command = command();
        command.args(["serve", "--listen", "127.0.0.1:0", "--tls-cert", certificate, "--tls-key", key, "--data-dir"]);
        command.arg(directory.join("data")).stdout(Stdio::piped()).stderr(Stdio::null());
        let mut child = command.spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let url = line.trim_end().strip_prefix("sandboxer listening on ").unwrap_or_else(|| panic!("{line:?}")).to_owned();
        Self { child, url }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // It ends its sandboxes and itself.
        let _ = Command::new("kill").arg(self.child.id().to_string()).status();
        let _ = self.child.wait();
    }
}

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
    let server = Server::start(directory.path(), &certificate, &key);
    assert!(server.url.starts_with("https://"), "{}", server.url);
    let run = |trusted: Option<&str>| {
        let mut command = command();
        if let Some(file) = trusted {
            command.env("SSL_CERT_FILE", file);
        }
        command.args(["run", "--server", &server.url, "-l", "bash", "echo over TLS"]).output().unwrap()
    };
    let output = run(Some(&certificate));
    assert_eq!((stdout_of(&output).as_str(), output.status.code()), ("over TLS\n", Some(0)), "{}", stderr_of(&output));
    let output = run(None);
    assert_eq!(output.status.code(), Some(125));
    assert!(stderr_of(&output).contains("certificate"), "{}", stderr_of(&output));
}
