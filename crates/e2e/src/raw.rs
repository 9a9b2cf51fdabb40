//! A WebSocket client made by hand, for what a library would not do: leave pings unanswered, not read, break the rules.

use std::{net::SocketAddr, time::Duration};

use serde_json::Value;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpSocket, TcpStream},
    time::timeout,
};

use crate::{DEADLINE, http::UPGRADE, ws::shorten};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Opcode {
    Continuation = 0,
    Text = 1,
    Binary = 2,
    Close = 8,
    Ping = 9,
    Pong = 10,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Frame {
    pub opcode: Opcode,
    pub payload: Vec<u8>,
}

impl Frame {
    /// The code of a close frame.
    #[must_use]
    pub fn close_code(&self) -> u16 {
        assert_eq!(self.opcode, Opcode::Close, "{self:?}");
        u16::from_be_bytes([self.payload[0], self.payload[1]])
    }

    #[must_use]
    pub fn json(&self) -> Value {
        assert_eq!(self.opcode, Opcode::Text, "{self:?}");
        serde_json::from_slice(&self.payload).unwrap()
    }
}

#[derive(Debug)]
pub struct Raw {
    stream: TcpStream,
    buffer: Vec<u8>,
    transcript: Vec<String>,
    /// How many pings [`Raw::message`] still answers.
    pub answers: usize,
}

impl Raw {
    /// Connects and is upgraded. `receive_buffer` bounds what the kernel takes for a client that does not read.
    pub async fn connect(address: SocketAddr, path: &str, receive_buffer: Option<u32>) -> Self {
        Self::try_connect(address, path, receive_buffer, DEADLINE).await.expect("the connection fails during the handshake")
    }

    /// The same over a network that fails: none if it is cut, or nothing comes for this long, before the handshake is over.
    pub async fn try_connect(address: SocketAddr, path: &str, receive_buffer: Option<u32>, patience: Duration) -> Option<Self> {
        let socket = TcpSocket::new_v4().unwrap();
        if let Some(bytes) = receive_buffer {
            socket.set_recv_buffer_size(bytes).unwrap();
        }
        let mut stream = socket.connect(address).await.ok()?;
        stream.set_nodelay(true).ok()?;
        let mut head = format!("GET {path} HTTP/1.1\r\nHost: {address}\r\n");
        for (name, value) in UPGRADE {
            head += &format!("{name}: {value}\r\n");
        }
        stream.write_all((head + "\r\n").as_bytes()).await.ok()?;
        let mut raw = Self { stream, buffer: Vec::new(), transcript: Vec::new(), answers: 0 };
        let end = loop {
            if let Some(end) = raw.buffer.windows(4).position(|window| window == b"\r\n\r\n") {
                break end + 4;
            }
            if !timeout(patience, raw.fill()).await.ok()? {
                return None;
            }
        };
        let answer: Vec<u8> = raw.buffer.drain(..end).collect();
        assert!(answer.starts_with(b"HTTP/1.1 101"), "{}", String::from_utf8_lossy(&answer));
        Some(raw)
    }

    /// A sandbox of this client's own, with the defaults; returns its id. The ping behind the 101 is answered, and no other.
    pub async fn create(address: SocketAddr, receive_buffer: Option<u32>) -> (Self, String) {
        let mut raw = Self::connect(address, "/create", receive_buffer).await;
        raw.answers = 1;
        raw.send_text("{}").await;
        assert_eq!(raw.message().await["status"], "SANDBOX_CREATING");
        let id = raw.message().await["sandbox_id"].as_str().unwrap().to_owned();
        assert_eq!(raw.message().await["status"], "SANDBOX_RUNNING");
        (raw, id)
    }

    async fn fill(&mut self) -> bool {
        let mut piece = vec![0; 64 * 1024];
        match timeout(DEADLINE, self.stream.read(&mut piece)).await.expect("nothing comes") {
            Ok(count @ 1..) => {
                self.buffer.extend_from_slice(&piece[..count]);
                true
            }
            _ => false,
        }
    }

    /// The next frame; none at the end of the connection.
    pub async fn frame(&mut self) -> Option<Frame> {
        loop {
            if let Some(frame) = self.take_frame() {
                self.transcript.push(format!("← {:?} {}", frame.opcode, shorten(&String::from_utf8_lossy(&frame.payload))));
                return Some(frame);
            }
            if !self.fill().await {
                self.transcript.push("← (end)".to_owned());
                return None;
            }
        }
    }

    /// The next frame, if one comes in this time.
    pub async fn frame_within(&mut self, time: Duration) -> Option<Frame> {
        timeout(time, self.frame()).await.ok().flatten()
    }

    fn take_frame(&mut self) -> Option<Frame> {
        let [first, second, ..] = *self.buffer.as_slice() else { return None };
        assert!(first & 0x80 != 0, "the server sent a fragment");
        assert!(second & 0x80 == 0, "the server masked a frame");
        let (header, length) = match second {
            126 => (4, usize::from(u16::from_be_bytes(self.buffer.get(2..4)?.try_into().unwrap()))),
            127 => (10, usize::try_from(u64::from_be_bytes(self.buffer.get(2..10)?.try_into().unwrap())).unwrap()),
            length => (2, usize::from(length)),
        };
        let payload = self.buffer.get(header..header + length)?.to_vec();
        self.buffer.drain(..header + length);
        let opcode = match first & 0x0f {
            1 => Opcode::Text,
            2 => Opcode::Binary,
            8 => Opcode::Close,
            9 => Opcode::Ping,
            10 => Opcode::Pong,
            other => panic!("opcode {other}"),
        };
        Some(Frame { opcode, payload })
    }

    /// Attaches to a running sandbox. The ping behind the 101 is answered, so that the grace for `reconnect` is short, and no other.
    pub async fn attach(address: SocketAddr, sandbox_id: &str) -> Self {
        let mut raw = Self::connect(address, &format!("/attach/{sandbox_id}"), None).await;
        raw.answers = 1;
        assert_eq!(raw.message().await["status"], "SANDBOX_RUNNING");
        raw
    }

    /// The next message.
    pub async fn message(&mut self) -> Value {
        loop {
            let frame = self.frame().await.expect("a message, not the end of the connection");
            match frame.opcode {
                Opcode::Ping if self.answers > 0 => {
                    self.answers -= 1;
                    self.send(true, Opcode::Pong, &frame.payload).await;
                }
                Opcode::Ping => {}
                _ => return frame.json(),
            }
        }
    }

    pub async fn send(&mut self, last: bool, opcode: Opcode, payload: &[u8]) {
        self.transcript.push(format!("→ {opcode:?} {}", shorten(&String::from_utf8_lossy(payload))));
        let mut bytes = header(last, opcode, payload.len() as u64);
        // A mask of zeros is a mask.
        bytes.extend_from_slice(payload);
        // The server may have closed already; then the test sees so by what it reads.
        let _ = self.stream.write_all(&bytes).await;
    }

    pub async fn send_text(&mut self, text: &str) {
        self.send(true, Opcode::Text, text.as_bytes()).await;
    }

    /// The header of a frame whose payload is never sent.
    pub async fn announce(&mut self, opcode: Opcode, length: u64) {
        self.stream.write_all(&header(true, opcode, length)).await.unwrap();
    }

    /// Bytes as they are.
    pub async fn send_bytes(&mut self, bytes: &[u8]) {
        self.stream.write_all(bytes).await.unwrap();
    }
}

fn header(last: bool, opcode: Opcode, length: u64) -> Vec<u8> {
    let mut bytes = vec![opcode as u8 | if last { 0x80 } else { 0 }];
    match length {
        0..=125 => bytes.push(0x80 | u8::try_from(length).unwrap()),
        126..=65535 => {
            bytes.push(0x80 | 126);
            bytes.extend_from_slice(&u16::try_from(length).unwrap().to_be_bytes());
        }
        _ => {
            bytes.push(0x80 | 127);
            bytes.extend_from_slice(&length.to_be_bytes());
        }
    }
    bytes.extend_from_slice(&[0; 4]);
    bytes
}

impl Drop for Raw {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("--- transcript of a raw client ---\n{}", self.transcript.join("\n"));
        }
    }
}
