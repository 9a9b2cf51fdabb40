//! Frames: encoding, and one decoder for each end that takes bytes as they come.

use std::fmt;

use bytes::{Buf, BufMut, Bytes, BytesMut};
use memchr::memmem;
use serde::{Deserialize, Deserializer, Serialize, Serializer, de::Error as _};

use super::message::{ExecSpec, ExecutionNumber, FromAgent, FromAgentFrame, Stream, ToAgent, ToAgentFrame, TunnelStream};
use crate::limits::{MAX_CONTROL_BYTES, MAX_FRAME_FROM_AGENT_BYTES, MAX_FRAME_TO_AGENT_BYTES};

pub const MARKER_BYTES: usize = 32;
pub const NONCE_BYTES: usize = 32;

const KIND_CONTROL: u8 = 1;
const KIND_EXEC: u8 = 2;
const KIND_STDIN: u8 = 3;
const KIND_OUTPUT: u8 = 4;
/// In both directions.
const KIND_FILES: u8 = 5;
/// In both directions.
const KIND_TUNNEL: u8 = 6;

const LENGTH_BYTES: usize = 4;
const CRC_BYTES: usize = 4;
const STDIN_HEAD_BYTES: usize = 16;
const OUTPUT_HEAD_BYTES: usize = 17;
const FILES_HEAD_BYTES: usize = 16;
const TUNNEL_HEAD_BYTES: usize = 8;
const KIND_BYTES: usize = 1;
const TUNNEL_START_BYTES: usize = LENGTH_BYTES + KIND_BYTES + TUNNEL_HEAD_BYTES;

/// Bytes that no frame can be made of. What comes after them can't be understood.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Corrupt {
    #[error("a frame of {0} bytes is longer than any that is allowed")]
    TooLong(usize),
    #[error("a frame of {0} bytes is too short for its kind")]
    TooShort(usize),
    #[error("unknown kind of frame {0}")]
    UnknownKind(u8),
    #[error("unknown stream {0}")]
    UnknownStream(u8),
    #[error("wrong checksum")]
    Checksum,
    #[error("bad control message: {0}")]
    Control(String),
}

macro_rules! secret_bytes {
    ($(#[$doc:meta])* $name:ident, $len:expr) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq)]
        pub struct $name([u8; $len]);

        impl $name {
            #[must_use]
            pub fn new(bytes: [u8; $len]) -> Self {
                Self(bytes)
            }

            #[must_use]
            pub fn as_bytes(&self) -> &[u8; $len] {
                &self.0
            }

            #[must_use]
            pub fn to_hex(&self) -> String {
                self.0.iter().map(|byte| format!("{byte:02x}")).collect()
            }

            #[must_use]
            pub fn from_hex(text: &str) -> Option<Self> {
                if text.len() != 2 * $len || !text.is_ascii() {
                    return None;
                }
                let mut bytes = [0; $len];
                for (i, byte) in bytes.iter_mut().enumerate() {
                    *byte = u8::from_str_radix(&text[2 * i..2 * i + 2], 16).ok()?;
                }
                Some(Self(bytes))
            }
        }

        // Never printed: whoever reads a log could speak to the agent.
        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(concat!(stringify!($name), "(…)"))
            }
        }

        impl Serialize for $name {
            fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                serializer.serialize_str(&self.to_hex())
            }
        }

        impl<'de> Deserialize<'de> for $name {
            fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                let text = String::deserialize(deserializer)?;
                Self::from_hex(&text).ok_or_else(|| D::Error::custom("not the right number of hex digits"))
            }
        }
    };
}

secret_bytes!(
    /// Opens a conversation with one sandbox's agent.
    Marker,
    MARKER_BYTES
);
secret_bytes!(
    /// Marks where the agent's answer to one opening begins.
    Nonce,
    NONCE_BYTES
);

/// The opening of a conversation, from the server.
#[must_use]
pub fn encode_opening(marker: &Marker, version: u32, nonce: Nonce) -> Bytes {
    let mut out = BytesMut::from(&marker.as_bytes()[..]);
    encode_to_agent(&mut out, &ToAgent::Hello { version, nonce });
    out.freeze()
}

/// The agent's answer to an opening.
pub fn encode_reply_opening(out: &mut BytesMut, nonce: &Nonce, reply: &FromAgent) {
    out.extend_from_slice(nonce.as_bytes());
    encode_from_agent(out, reply);
}

pub fn encode_to_agent(out: &mut BytesMut, message: &ToAgent) {
    checked(out, KIND_CONTROL, |out| put_json(out, message));
}

pub fn encode_exec(out: &mut BytesMut, spec: &ExecSpec, code: &[u8]) {
    checked(out, KIND_EXEC, |out| {
        let start = out.len();
        out.put_u32_le(0);
        put_json(out, spec);
        let json = out.len() - start - LENGTH_BYTES;
        patch_length(out, start, json);
        out.extend_from_slice(code);
    });
}

pub fn encode_stdin(out: &mut BytesMut, number: ExecutionNumber, offset: u64, data: &[u8]) {
    checked(out, KIND_STDIN, |out| {
        out.put_u64_le(number);
        out.put_u64_le(offset);
        out.extend_from_slice(data);
    });
}

/// A piece of an archive to the agent.
pub fn encode_files_to_agent(out: &mut BytesMut, sequence: u64, offset: u64, data: &[u8]) {
    checked(out, KIND_FILES, |out| put_files(out, sequence, offset, data));
}

/// A piece of an archive from the agent.
pub fn encode_files_from_agent(out: &mut BytesMut, sequence: u64, offset: u64, data: &[u8]) {
    framed(out, KIND_FILES, |out| put_files(out, sequence, offset, data));
}

fn put_files(out: &mut BytesMut, sequence: u64, offset: u64, data: &[u8]) {
    out.put_u64_le(sequence);
    out.put_u64_le(offset);
    out.extend_from_slice(data);
}

fn parse_files(mut frame: Bytes) -> Result<(u64, u64, Bytes), Corrupt> {
    if frame.len() < FILES_HEAD_BYTES {
        return Err(Corrupt::TooShort(frame.len()));
    }
    let sequence = frame.get_u64_le();
    let offset = frame.get_u64_le();
    Ok((sequence, offset, frame))
}

/// A piece of a stream of the network to the agent.
pub fn encode_tunnel_to_agent(out: &mut BytesMut, stream: TunnelStream, data: &[u8]) {
    checked(out, KIND_TUNNEL, |out| put_tunnel(out, stream, data));
}

/// What stands before and behind a piece of a stream to the agent: the same frame, for whoever writes the piece from where it lies.
#[must_use]
pub fn around_tunnel_to_agent(stream: TunnelStream, data: &[u8]) -> ([u8; TUNNEL_START_BYTES], [u8; CRC_BYTES]) {
    let length = KIND_BYTES + TUNNEL_HEAD_BYTES + data.len() + CRC_BYTES;
    let mut start = [0; TUNNEL_START_BYTES];
    let (head, checked) = start.split_at_mut(LENGTH_BYTES);
    head.copy_from_slice(&to_length(length).to_le_bytes());
    checked[0] = KIND_TUNNEL;
    checked[KIND_BYTES..].copy_from_slice(&stream.to_le_bytes());
    let mut crc = crc32fast::Hasher::new();
    crc.update(checked);
    crc.update(data);
    (start, crc.finalize().to_le_bytes())
}

/// A piece of a stream of the network from the agent.
pub fn encode_tunnel_from_agent(out: &mut BytesMut, stream: TunnelStream, data: &[u8]) {
    framed(out, KIND_TUNNEL, |out| put_tunnel(out, stream, data));
}

fn put_tunnel(out: &mut BytesMut, stream: TunnelStream, data: &[u8]) {
    out.put_u64_le(stream);
    out.extend_from_slice(data);
}

fn parse_tunnel(mut frame: Bytes) -> Result<(TunnelStream, Bytes), Corrupt> {
    if frame.len() < TUNNEL_HEAD_BYTES {
        return Err(Corrupt::TooShort(frame.len()));
    }
    let stream = frame.get_u64_le();
    Ok((stream, frame))
}

pub fn encode_from_agent(out: &mut BytesMut, message: &FromAgent) {
    framed(out, KIND_CONTROL, |out| put_json(out, message));
}

pub fn encode_output(out: &mut BytesMut, number: ExecutionNumber, stream: Stream, offset: u64, data: &[&[u8]]) {
    framed(out, KIND_OUTPUT, |out| {
        out.put_u64_le(number);
        out.put_u8(match stream {
            Stream::Stdout => 1,
            Stream::Stderr => 2,
        });
        out.put_u64_le(offset);
        for part in data {
            out.extend_from_slice(part);
        }
    });
}

fn put_json(out: &mut BytesMut, message: &impl Serialize) {
    // Serialising these types to memory can't fail: no map has other keys than strings.
    if let Ok(json) = serde_json::to_vec(message) {
        out.extend_from_slice(&json);
    }
}

fn framed(out: &mut BytesMut, kind: u8, body: impl FnOnce(&mut BytesMut)) {
    let start = out.len();
    out.put_u32_le(0);
    out.put_u8(kind);
    body(out);
    let length = out.len() - start - LENGTH_BYTES;
    patch_length(out, start, length);
}

fn checked(out: &mut BytesMut, kind: u8, body: impl FnOnce(&mut BytesMut)) {
    framed(out, kind, |out| {
        let start = out.len() - 1;
        body(out);
        let crc = crc32fast::hash(&out[start..]);
        out.put_u32_le(crc);
    });
}

fn patch_length(out: &mut BytesMut, at: usize, length: usize) {
    out[at..at + LENGTH_BYTES].copy_from_slice(&to_length(length).to_le_bytes());
}

#[expect(clippy::cast_possible_truncation, reason = "frames are bounded far below 4 GiB")]
fn to_length(bytes: usize) -> u32 {
    bytes as u32
}

/// Takes one whole frame (kind and body) off the front of `buffer`, if it is there.
fn split_frame(buffer: &mut BytesMut, max: usize) -> Result<Option<Bytes>, Corrupt> {
    let Some(head) = buffer.first_chunk::<LENGTH_BYTES>() else { return Ok(None) };
    let length = u32::from_le_bytes(*head) as usize;
    if length > max {
        return Err(Corrupt::TooLong(length));
    }
    if length == 0 {
        return Err(Corrupt::TooShort(0));
    }
    if buffer.len() < LENGTH_BYTES + length {
        return Ok(None);
    }
    buffer.advance(LENGTH_BYTES);
    Ok(Some(buffer.split_to(length).freeze()))
}

fn parse_json<'a, T: Deserialize<'a>>(bytes: &'a [u8]) -> Result<T, Corrupt> {
    if bytes.len() > MAX_CONTROL_BYTES {
        return Err(Corrupt::TooLong(bytes.len()));
    }
    serde_json::from_slice(bytes).map_err(|error| Corrupt::Control(error.to_string()))
}

/// The server's end: everything before the nonce is dropped, everything after it is frames.
///
/// What it decodes is hostile: the guest may have taken over its agent.
#[derive(Debug)]
pub struct ServerDecoder {
    buffer: BytesMut,
    waiting_for: Option<Nonce>,
}

impl ServerDecoder {
    #[must_use]
    pub fn new(nonce: Nonce) -> Self {
        Self { buffer: BytesMut::new(), waiting_for: Some(nonce) }
    }

    /// Where to read into. Keep it filled with no more than a frame at a time: reserve, read, then call [`Self::next`] until it is empty.
    pub fn buffer(&mut self) -> &mut BytesMut {
        &mut self.buffer
    }

    /// The next frame that is whole.
    ///
    /// # Errors
    /// The bytes are no frame. The conversation is over: open a new one, or give the sandbox up.
    #[expect(clippy::should_implement_trait, reason = "no iterator: after none there may be more")]
    pub fn next(&mut self) -> Result<Option<FromAgentFrame>, Corrupt> {
        if let Some(nonce) = &self.waiting_for {
            match memmem::find(&self.buffer, nonce.as_bytes()) {
                Some(at) => {
                    self.buffer.advance(at + NONCE_BYTES);
                    self.waiting_for = None;
                }
                None => {
                    let keep = self.buffer.len().min(NONCE_BYTES - 1);
                    self.buffer.advance(self.buffer.len() - keep);
                    return Ok(None);
                }
            }
        }
        split_frame(&mut self.buffer, MAX_FRAME_FROM_AGENT_BYTES)?.map(parse_from_agent).transpose()
    }
}

fn parse_from_agent(mut frame: Bytes) -> Result<FromAgentFrame, Corrupt> {
    match frame.get_u8() {
        KIND_CONTROL => Ok(FromAgentFrame::Control(parse_json(&frame)?)),
        KIND_OUTPUT => {
            if frame.len() < OUTPUT_HEAD_BYTES {
                return Err(Corrupt::TooShort(frame.len()));
            }
            let number = frame.get_u64_le();
            let stream = match frame.get_u8() {
                1 => Stream::Stdout,
                2 => Stream::Stderr,
                other => return Err(Corrupt::UnknownStream(other)),
            };
            let offset = frame.get_u64_le();
            Ok(FromAgentFrame::Output { number, stream, offset, data: frame })
        }
        KIND_FILES => parse_files(frame).map(|(sequence, offset, data)| FromAgentFrame::Files { sequence, offset, data }),
        KIND_TUNNEL => parse_tunnel(frame).map(|(stream, data)| FromAgentFrame::Tunnel { stream, data }),
        other => Err(Corrupt::UnknownKind(other)),
    }
}

/// What the agent's end finds in its input.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum AgentEvent {
    /// The marker came: a new conversation begins, and its `Hello` is next.
    Opened,
    Frame(ToAgentFrame),
}

/// The agent's end: frames, and a marker anywhere that begins a new conversation.
#[derive(Debug)]
pub struct AgentDecoder {
    marker: Marker,
    buffer: BytesMut,
    /// How much of the buffer was searched for the marker already.
    searched: usize,
    /// Nothing is understood until the next marker.
    lost: bool,
}

impl AgentDecoder {
    #[must_use]
    pub fn new(marker: Marker) -> Self {
        Self { marker, buffer: BytesMut::new(), searched: 0, lost: true }
    }

    pub fn buffer(&mut self) -> &mut BytesMut {
        &mut self.buffer
    }

    /// The other end is gone: what is left of an unfinished frame will not be finished.
    pub fn end_of_input(&mut self) {
        self.buffer.clear();
        self.searched = 0;
        self.lost = true;
    }

    /// The next thing that is whole. Bytes that are no frame are dropped up to the next marker.
    #[expect(clippy::should_implement_trait, reason = "no iterator: after none there may be more")]
    pub fn next(&mut self) -> Option<AgentEvent> {
        let marker_at = self.find_marker();
        if !self.lost {
            let mut before = match marker_at {
                Some(at) => self.buffer.split_to(at),
                None => std::mem::take(&mut self.buffer),
            };
            let length = before.len();
            let frame = split_frame(&mut before, MAX_FRAME_TO_AGENT_BYTES).and_then(|frame| frame.map(parse_to_agent).transpose());
            let used = length - before.len();
            // Whatever is left of the part before the marker goes back in front.
            before.unsplit(std::mem::take(&mut self.buffer));
            self.buffer = before;
            self.searched = self.searched.saturating_sub(used);
            match frame {
                Ok(Some(frame)) => return Some(AgentEvent::Frame(frame)),
                Ok(None) => {}
                Err(_) => self.lost = true,
            }
        }
        if let Some(at) = self.find_marker() {
            self.buffer.advance(at + MARKER_BYTES);
            self.searched = 0;
            self.lost = false;
            return Some(AgentEvent::Opened);
        }
        if self.lost {
            let keep = self.buffer.len().min(MARKER_BYTES - 1);
            self.buffer.advance(self.buffer.len() - keep);
            self.searched = 0;
        }
        None
    }

    fn find_marker(&mut self) -> Option<usize> {
        let from = self.searched.saturating_sub(MARKER_BYTES - 1).min(self.buffer.len());
        let found = memmem::find(&self.buffer[from..], self.marker.as_bytes()).map(|at| from + at);
        self.searched = found.unwrap_or(self.buffer.len());
        found
    }
}

fn parse_to_agent(mut frame: Bytes) -> Result<ToAgentFrame, Corrupt> {
    let Some(body) = frame.len().checked_sub(CRC_BYTES).filter(|body| *body > 0) else {
        return Err(Corrupt::TooShort(frame.len()));
    };
    let mut crc = frame.split_off(body);
    if crc.get_u32_le() != crc32fast::hash(&frame) {
        return Err(Corrupt::Checksum);
    }
    match frame.get_u8() {
        KIND_CONTROL => Ok(ToAgentFrame::Control(parse_json(&frame)?)),
        KIND_EXEC => {
            if frame.len() < LENGTH_BYTES {
                return Err(Corrupt::TooShort(frame.len()));
            }
            let json = frame.get_u32_le() as usize;
            if frame.len() < json {
                return Err(Corrupt::TooShort(frame.len()));
            }
            let spec = parse_json(&frame.split_to(json))?;
            Ok(ToAgentFrame::Exec { spec, code: frame })
        }
        KIND_STDIN => {
            if frame.len() < STDIN_HEAD_BYTES {
                return Err(Corrupt::TooShort(frame.len()));
            }
            let number = frame.get_u64_le();
            let offset = frame.get_u64_le();
            Ok(ToAgentFrame::Stdin { number, offset, data: frame })
        }
        KIND_FILES => parse_files(frame).map(|(sequence, offset, data)| ToAgentFrame::Files { sequence, offset, data }),
        KIND_TUNNEL => parse_tunnel(frame).map(|(stream, data)| ToAgentFrame::Tunnel { stream, data }),
        other => Err(Corrupt::UnknownKind(other)),
    }
}

#[cfg(test)]
mod tests;
