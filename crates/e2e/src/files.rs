//! Files of a sandbox over HTTP.

use std::{
    io::{self, Read as _, Write as _},
    net::TcpStream,
    time::Duration,
};

use serde_json::Value;

use crate::{
    Server,
    http::{self, Answer},
};

/// The files of one sandbox.
#[derive(Debug, Clone)]
pub struct Files<'a> {
    server: &'a Server,
    id: String,
}

/// Bytes as an address has them.
#[must_use]
pub fn encoded(bytes: impl AsRef<[u8]>) -> String {
    bytes.as_ref().iter().map(|byte| format!("%{byte:02X}")).collect()
}

impl<'a> Files<'a> {
    #[must_use]
    pub fn of(server: &'a Server, id: &str) -> Self {
        Self { server, id: id.to_owned() }
    }

    fn address(&self, below: &str, path: impl AsRef<[u8]>, more: &str) -> String {
        format!("/v1/sandboxes/{}/files{below}?path={}{more}", self.id, encoded(path))
    }

    /// Whatever is answered.
    #[must_use]
    pub fn call(&self, method: &str, below: &str, path: impl AsRef<[u8]>, more: &str, body: &[u8]) -> Answer {
        http::bytes(self.server.address(), method, &self.address(below, path, more), &[], body).unwrap()
    }

    /// The object of what was written.
    pub fn put(&self, path: impl AsRef<[u8]>, more: &str, content: &[u8]) -> Value {
        let answer = self.call("PUT", "", path, more, content);
        assert_eq!(answer.status, 200, "{}", answer.body);
        answer.json()
    }

    #[must_use]
    pub fn get(&self, path: impl AsRef<[u8]>) -> Vec<u8> {
        let answer = self.call("GET", "", path, "", b"");
        assert_eq!(answer.status, 200, "{}", answer.body);
        answer.bytes
    }

    /// A part of it, as this header asks for it.
    #[must_use]
    pub fn range(&self, path: &str, range: &str) -> Answer {
        http::bytes(self.server.address(), "GET", &self.address("", path, ""), &[("Range", range)], b"").unwrap()
    }

    /// What is told of something.
    #[must_use]
    pub fn object(&self, below: &str, path: impl AsRef<[u8]>, more: &str) -> Value {
        let answer = self.call("GET", below, path, more, b"");
        assert_eq!(answer.status, 200, "{}", answer.body);
        answer.json()
    }

    /// It is refused with this. Returns the message.
    pub fn refuses(&self, method: &str, below: &str, path: &str, more: &str, status: u16, code: &str) -> String {
        let answer = self.call(method, below, path, more, b"");
        let body = answer.json();
        assert_eq!((answer.status, body["error"]["code"].as_str()), (status, Some(code)), "{method} {below} {path}: {body}");
        body["error"]["message"].as_str().unwrap().to_owned()
    }

    /// Begins to send a body of this length, of which nothing is sent yet.
    #[must_use]
    pub fn sending(&self, below: &str, path: &str, more: &str, length: usize) -> TcpStream {
        let mut stream = TcpStream::connect(self.server.address()).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(120))).unwrap();
        let (address, host) = (self.address(below, path, more), self.server.address());
        let head = format!("PUT {address} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\nContent-Length: {length}\r\n\r\n");
        stream.write_all(head.as_bytes()).unwrap();
        stream
    }

    /// Begins to read something, of which nothing is read yet.
    #[must_use]
    pub fn reading(&self, below: &str, path: &str, more: &str) -> TcpStream {
        let mut stream = TcpStream::connect(self.server.address()).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(120))).unwrap();
        let (address, host) = (self.address(below, path, more), self.server.address());
        stream.write_all(format!("GET {address} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n").as_bytes()).unwrap();
        // Once the first byte is here, the file is open.
        let mut first = [0];
        assert_eq!(stream.peek(&mut first).unwrap(), 1);
        stream
    }
}

/// Reads and drops so much of an answer.
pub fn skip(stream: &mut TcpStream, bytes: u64) -> io::Result<u64> {
    io::copy(&mut stream.take(bytes), &mut io::sink())
}
