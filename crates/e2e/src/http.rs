//! Plain HTTP requests, one a connection, with whatever headers a test wants.

use std::{
    io::{self, Read, Write},
    net::{SocketAddr, TcpStream},
    time::Duration,
};

use serde_json::Value;

#[derive(Debug, Clone)]
pub struct Answer {
    pub status: u16,
    /// As sent, names in lower case.
    pub headers: Vec<(String, String)>,
    pub body: String,
    /// The same as it came.
    pub bytes: Vec<u8>,
}

impl Answer {
    #[must_use]
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(found, _)| found == name).map(|(_, value)| value.as_str())
    }

    #[must_use]
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_else(|error| panic!("not JSON ({error}): {}", self.body))
    }
}

/// # Errors
/// The server does not answer.
pub fn try_get(address: SocketAddr, path: &str, headers: &[(&str, &str)]) -> io::Result<Answer> {
    request(address, "GET", path, headers)
}

/// What a browser or client sends to be upgraded, apart from `Host` and `Origin`.
pub const UPGRADE: [(&str, &str); 4] = [
    ("Connection", "Upgrade"),
    ("Upgrade", "websocket"),
    ("Sec-WebSocket-Version", "13"),
    ("Sec-WebSocket-Key", "dGhlIHNhbXBsZSBub25jZQ=="),
];

/// A `Host` among the headers replaces the right one. The body is not read if the answer is an upgrade.
///
/// # Errors
/// The server does not answer.
pub fn request(address: SocketAddr, method: &str, path: &str, headers: &[(&str, &str)]) -> io::Result<Answer> {
    exchange(address, method, path, headers, b"", Duration::from_secs(10))
}

/// The same with a body of JSON, and for work that may take minutes.
///
/// # Errors
/// The server does not answer.
pub fn json(address: SocketAddr, method: &str, path: &str, headers: &[(&str, &str)], body: &Value) -> io::Result<Answer> {
    let body = if body.is_null() { String::new() } else { body.to_string() };
    exchange(address, method, path, headers, body.as_bytes(), Duration::from_secs(300))
}

/// The same with any body, and an answer that may be any bytes.
///
/// # Errors
/// The server does not answer, or its answer breaks off.
pub fn bytes(address: SocketAddr, method: &str, path: &str, headers: &[(&str, &str)], body: &[u8]) -> io::Result<Answer> {
    exchange(address, method, path, headers, body, Duration::from_secs(300))
}

fn exchange(address: SocketAddr, method: &str, path: &str, headers: &[(&str, &str)], body: &[u8], within: Duration) -> io::Result<Answer> {
    let mut stream = TcpStream::connect_timeout(&address, Duration::from_secs(5))?;
    stream.set_read_timeout(Some(within))?;
    let mut text = format!("{method} {path} HTTP/1.1\r\n");
    if !headers.iter().any(|(name, _)| name.eq_ignore_ascii_case("host")) {
        text += &format!("Host: {address}\r\n");
    }
    if !headers.iter().any(|(name, _)| name.eq_ignore_ascii_case("connection")) {
        text += "Connection: close\r\n";
    }
    for (name, value) in headers {
        text += &format!("{name}: {value}\r\n");
    }
    if matches!(method, "POST" | "PUT") || !body.is_empty() {
        text += &format!("Content-Length: {}\r\n", body.len());
    }
    stream.write_all((text + "\r\n").as_bytes())?;
    stream.write_all(body)?;
    answer(&mut stream, method)
}

/// Reads the answer to what was sent.
///
/// # Errors
/// There is none, or it breaks off.
pub fn answer(stream: &mut TcpStream, method: &str) -> io::Result<Answer> {
    let mut bytes = Vec::new();
    let end = loop {
        if let Some(end) = bytes.windows(4).position(|window| window == b"\r\n\r\n") {
            break end;
        }
        let mut piece = [0; 4096];
        match stream.read(&mut piece)? {
            0 => return Err(io::ErrorKind::UnexpectedEof.into()),
            count => bytes.extend_from_slice(&piece[..count]),
        }
    };
    let head = String::from_utf8_lossy(&bytes[..end]).into_owned();
    let mut lines = head.lines();
    let status = lines.next().and_then(|line| line.split(' ').nth(1)?.parse().ok()).unwrap_or(0);
    let headers: Vec<(String, String)> =
        lines.filter_map(|line| line.split_once(':')).map(|(name, value)| (name.to_lowercase(), value.trim().to_owned())).collect();
    let mut body = bytes.split_off(end + 4);
    let length = headers.iter().find(|(name, _)| name == "content-length").and_then(|(_, value)| value.parse::<usize>().ok());
    let chunked = headers.iter().any(|(name, value)| name == "transfer-encoding" && value == "chunked");
    if status != 101 && method != "HEAD" {
        match length {
            Some(length) if length > body.len() => {
                let start = body.len();
                body.resize(length, 0);
                stream.read_exact(&mut body[start..])?;
            }
            Some(_) => {}
            None => {
                stream.read_to_end(&mut body)?;
                if chunked {
                    body = unchunked(&body).ok_or(io::ErrorKind::UnexpectedEof)?;
                }
            }
        }
    }
    Ok(Answer { status, headers, body: String::from_utf8_lossy(&body).into_owned(), bytes: body })
}

/// None: it has no end.
fn unchunked(mut body: &[u8]) -> Option<Vec<u8>> {
    let mut whole = Vec::new();
    loop {
        let line = body.windows(2).position(|window| window == b"\r\n")?;
        let length = usize::from_str_radix(std::str::from_utf8(&body[..line]).ok()?, 16).ok()?;
        if length == 0 {
            return Some(whole);
        }
        whole.extend_from_slice(body.get(line + 2..line + 2 + length)?);
        body = body.get(line + 2 + length + 2..)?;
    }
}
