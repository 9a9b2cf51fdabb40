//! The opening of a conversation with an agent, and its two halves after it.

use std::{
    collections::VecDeque,
    io::{self, IoSlice},
    time::Duration,
};

use bytes::{Buf as _, Bytes, BytesMut};
use sandboxer_protocol::agent::{
    AGENT_PROTOCOL_VERSION, Corrupt, ExecSpec, ExecutionNumber, FromAgent, FromAgentFrame, Marker, NONCE_BYTES, Nonce, ServerDecoder,
    ToAgent, TunnelStream, around_tunnel_to_agent, encode_exec, encode_files_to_agent, encode_opening, encode_stdin, encode_to_agent,
    encode_tunnel_to_agent,
};
use tokio::{
    io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt},
    time::{error::Elapsed, timeout},
};

use crate::{Ended, Instance};

/// Room for what is read. Frames share it, so it is new whenever it runs low: not so large that the allocator goes to the system for it.
const READ_BYTES: usize = 192 * 1024;
/// With less than this left there is new room.
const LOW_BYTES: usize = 32 * 1024;
/// Room that is kept for what is written.
const KEEP_BYTES: usize = 64 * 1024;
/// A piece of so much is written from where it lies; smaller ones are copied together.
const APART_BYTES: usize = 4 * 1024;
/// What goes between two of those gets its room by as much at a time.
const BETWEEN_BYTES: usize = 1024;
/// Parts that are written by one call.
const PARTS_AT_ONCE: usize = 16;

/// Why a conversation can't go on. The sandbox may well be alive: take it up and open another one.
#[derive(Debug, thiserror::Error)]
pub enum LinkError {
    #[error("the agent did not answer in time")]
    TimedOut,
    /// The sandbox's ends are closed: it is gone.
    #[error("the agent is gone")]
    Closed,
    #[error("the agent says what can't be understood: {0}")]
    Corrupt(#[from] Corrupt),
    #[error("the link to the agent broke: {0}")]
    Io(#[from] io::Error),
    #[error("the agent answered the opening with something else")]
    NotAReply,
    #[error("the agent speaks version {0} of the protocol, which this server does not know")]
    Version(u32),
}

impl From<Elapsed> for LinkError {
    fn from(_: Elapsed) -> Self {
        Self::TimedOut
    }
}

/// Frames from the agent.
pub struct LinkReader {
    stream: Box<dyn AsyncRead + Send + Unpin>,
    decoder: ServerDecoder,
}

impl LinkReader {
    /// The next frame. Cancel-safe: what was read is kept.
    ///
    /// # Errors
    /// The sandbox is gone or its agent talks nonsense.
    pub async fn recv(&mut self) -> Result<FromAgentFrame, LinkError> {
        loop {
            if let Some(frame) = self.decoder.next()? {
                return Ok(frame);
            }
            let buffer = self.decoder.buffer();
            if buffer.capacity() - buffer.len() < LOW_BYTES {
                buffer.reserve(READ_BYTES);
            }
            if self.stream.read_buf(buffer).await? == 0 {
                return Err(LinkError::Closed);
            }
        }
    }

    /// The next frame if all of it was read already.
    pub fn ready(&mut self) -> Option<Result<FromAgentFrame, LinkError>> {
        self.decoder.next().map_err(LinkError::from).transpose()
    }

    /// The next frame, within a time limit.
    ///
    /// # Errors
    /// As [`Self::recv`], or none came in time.
    pub async fn recv_within(&mut self, limit: Duration) -> Result<FromAgentFrame, LinkError> {
        timeout(limit, self.recv()).await?
    }
}

/// Frames to the agent. They are queued and written as the FIFO takes them; whoever queues looks at [`Self::backlog`] first, since that
/// is all that bounds it.
pub struct LinkWriter {
    stream: Box<dyn AsyncWrite + Send + Unpin>,
    /// Before the queue; none of them is empty.
    parts: VecDeque<Bytes>,
    /// How long they are together.
    parts_bytes: usize,
    queue: BytesMut,
    frames: u64,
}

impl LinkWriter {
    fn new(stream: Box<dyn AsyncWrite + Send + Unpin>) -> Self {
        Self { stream, parts: VecDeque::new(), parts_bytes: 0, queue: BytesMut::new(), frames: 0 }
    }

    pub fn queue(&mut self, message: &ToAgent) {
        self.frames += 1;
        encode_to_agent(&mut self.queue, message);
    }

    pub fn queue_exec(&mut self, spec: &ExecSpec, code: &[u8]) {
        self.frames += 1;
        encode_exec(&mut self.queue, spec, code);
    }

    pub fn queue_stdin(&mut self, number: ExecutionNumber, offset: u64, data: &[u8]) {
        self.frames += 1;
        encode_stdin(&mut self.queue, number, offset, data);
    }

    pub fn queue_files(&mut self, sequence: u64, offset: u64, data: &[u8]) {
        self.frames += 1;
        encode_files_to_agent(&mut self.queue, sequence, offset, data);
    }

    pub fn queue_tunnel(&mut self, stream: TunnelStream, data: Bytes) {
        self.frames += 1;
        if data.len() < APART_BYTES {
            return encode_tunnel_to_agent(&mut self.queue, stream, &data);
        }
        let (start, end) = around_tunnel_to_agent(stream, &data);
        if self.queue.capacity() - self.queue.len() < start.len() + end.len() {
            self.queue.reserve(BETWEEN_BYTES);
        }
        self.queue.extend_from_slice(&start);
        for part in [self.queue.split().freeze(), data] {
            self.parts_bytes += part.len();
            self.parts.push_back(part);
        }
        self.queue.extend_from_slice(&end);
    }

    /// How many frames were queued so far.
    #[must_use]
    pub fn frames(&self) -> u64 {
        self.frames
    }

    /// Bytes that wait to be written.
    #[must_use]
    pub fn backlog(&self) -> usize {
        self.parts_bytes + self.queue.len()
    }

    /// Writes what the FIFO takes now. Cancel-safe: what was not written stays.
    ///
    /// # Errors
    /// The sandbox is gone.
    pub async fn flush_some(&mut self) -> io::Result<()> {
        let mut slices = [IoSlice::new(&[]); PARTS_AT_ONCE];
        let parts = self.parts.iter().map(|part| &part[..]).chain([&self.queue[..]]);
        let count = slices.iter_mut().zip(parts).map(|(slice, part)| *slice = IoSlice::new(part)).count();
        let written = self.stream.write_vectored(&slices[..count]).await?;
        self.written(written);
        if self.backlog() == 0 && self.queue.capacity() > KEEP_BYTES {
            self.queue = BytesMut::new();
        }
        Ok(())
    }

    fn written(&mut self, mut bytes: usize) {
        while let Some(part) = self.parts.front_mut().filter(|_| bytes > 0) {
            let count = bytes.min(part.len());
            part.advance(count);
            bytes -= count;
            self.parts_bytes -= count;
            if part.is_empty() {
                self.parts.pop_front();
            }
        }
        self.queue.advance(bytes);
    }

    /// Writes everything. Cancel-safe, like [`Self::flush_some`].
    ///
    /// # Errors
    /// The sandbox is gone.
    pub async fn flush(&mut self) -> Result<(), LinkError> {
        while self.backlog() > 0 {
            self.flush_some().await?;
        }
        // A pipe needs none, the fake's stream might.
        Ok(self.stream.flush().await?)
    }

    /// # Errors
    /// The sandbox is gone.
    pub async fn send(&mut self, message: &ToAgent) -> Result<(), LinkError> {
        self.queue(message);
        self.flush().await
    }

    /// # Errors
    /// The sandbox is gone.
    pub async fn exec(&mut self, spec: &ExecSpec, code: &[u8]) -> Result<(), LinkError> {
        self.queue_exec(spec, code);
        self.flush().await
    }

    /// # Errors
    /// The sandbox is gone.
    pub async fn stdin(&mut self, number: ExecutionNumber, offset: u64, data: &[u8]) -> Result<(), LinkError> {
        self.queue_stdin(number, offset, data);
        self.flush().await
    }

    /// # Errors
    /// The sandbox is gone.
    pub async fn send_raw(&mut self, bytes: &[u8]) -> Result<(), LinkError> {
        self.queue.extend_from_slice(bytes);
        self.flush().await
    }
}

/// A conversation that was opened.
pub struct Link {
    /// The agent's [`FromAgent::HelloReply`].
    pub hello: FromAgent,
    pub reader: LinkReader,
    pub writer: LinkWriter,
    pub ended: Ended,
}

/// Opens a conversation: sends the marker and a nonce, and drops everything until that nonce comes back.
///
/// # Errors
/// The agent does not answer within the limit, or not with a reply.
pub async fn open(instance: Instance, marker: &Marker, limit: Duration) -> Result<Link, LinkError> {
    let nonce = Nonce::new(rand::random::<[u8; NONCE_BYTES]>());
    let mut writer = LinkWriter::new(instance.to_agent);
    let mut reader = LinkReader { stream: instance.from_agent, decoder: ServerDecoder::new(nonce) };
    let opening = encode_opening(marker, AGENT_PROTOCOL_VERSION, nonce);
    // Both at once: an agent that is in the middle of sending reads nothing until somebody takes what it sends.
    let (sent, answer) = timeout(limit, async { tokio::join!(writer.send_raw(&opening), reader.recv()) }).await?;
    sent?;
    match answer? {
        FromAgentFrame::Control(FromAgent::HelloReply { version, .. }) if version != AGENT_PROTOCOL_VERSION => {
            Err(LinkError::Version(version))
        }
        FromAgentFrame::Control(hello @ FromAgent::HelloReply { .. }) => Ok(Link { hello, reader, writer, ended: instance.ended }),
        _ => Err(LinkError::NotAReply),
    }
}

#[cfg(test)]
mod tests {
    use sandboxer_protocol::agent::{AgentDecoder, AgentEvent, ToAgentFrame};

    use super::*;

    /// Pieces that are written from where they lie come in between what is copied, whatever the FIFO takes at a time.
    #[tokio::test]
    async fn everything_that_is_queued_comes_in_its_order() {
        let marker = Marker::new([1; 32]);
        let (near, mut far) = tokio::io::duplex(777);
        let mut writer = LinkWriter::new(Box::new(near));
        writer.queue.extend_from_slice(&encode_opening(&marker, AGENT_PROTOCOL_VERSION, Nonce::new([2; 32])));
        let pieces: Vec<Bytes> = [1, APART_BYTES - 1, APART_BYTES, 3, 70_000, 70_000].map(|size| vec![size as u8; size].into()).into();
        for (stream, piece) in (0..).zip(&pieces) {
            writer.queue_tunnel(stream, piece.clone());
            writer.queue_stdin(1, stream, b"between");
        }
        let frames = 2 * pieces.len();
        let whole = writer.backlog();
        let write = async {
            while writer.backlog() > 0 {
                let before = writer.backlog();
                writer.flush_some().await.unwrap();
                assert!(writer.backlog() < before);
            }
            drop(writer);
        };
        let mut heard = Vec::new();
        let (read, ()) = tokio::join!(far.read_to_end(&mut heard), write);
        assert_eq!((read.unwrap(), heard.len()), (whole, whole));
        let mut decoder = AgentDecoder::new(marker);
        decoder.buffer().extend_from_slice(&heard);
        let events: Vec<AgentEvent> = std::iter::from_fn(|| decoder.next()).skip(2).collect();
        let expected = (0..).zip(pieces).flat_map(|(stream, data)| {
            let between = ToAgentFrame::Stdin { number: 1, offset: stream, data: Bytes::from_static(b"between") };
            [ToAgentFrame::Tunnel { stream, data }, between].map(AgentEvent::Frame)
        });
        assert_eq!(events.len(), frames);
        assert!(events.into_iter().eq(expected));
    }
}
