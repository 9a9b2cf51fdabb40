//! The opening of a conversation with an agent, and its two halves after it.

use std::{io, time::Duration};

use bytes::{Buf as _, BytesMut};
use sandboxer_protocol::agent::{
    AGENT_PROTOCOL_VERSION, Corrupt, ExecSpec, ExecutionNumber, FromAgent, FromAgentFrame, Marker, NONCE_BYTES, Nonce, ServerDecoder,
    ToAgent, TunnelStream, encode_exec, encode_files_to_agent, encode_opening, encode_stdin, encode_to_agent, encode_tunnel_to_agent,
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
    queue: BytesMut,
    frames: u64,
}

impl LinkWriter {
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

    pub fn queue_tunnel(&mut self, stream: TunnelStream, data: &[u8]) {
        self.frames += 1;
        encode_tunnel_to_agent(&mut self.queue, stream, data);
    }

    /// How many frames were queued so far.
    #[must_use]
    pub fn frames(&self) -> u64 {
        self.frames
    }

    /// Bytes that wait to be written.
    #[must_use]
    pub fn backlog(&self) -> usize {
        self.queue.len()
    }

    /// Writes what the FIFO takes now. Cancel-safe: what was not written stays.
    ///
    /// # Errors
    /// The sandbox is gone.
    pub async fn flush_some(&mut self) -> io::Result<()> {
        let written = self.stream.write(&self.queue).await?;
        self.queue.advance(written);
        if self.queue.is_empty() && self.queue.capacity() > KEEP_BYTES {
            self.queue = BytesMut::new();
        }
        Ok(())
    }

    /// Writes everything. Cancel-safe, like [`Self::flush_some`].
    ///
    /// # Errors
    /// The sandbox is gone.
    pub async fn flush(&mut self) -> Result<(), LinkError> {
        while !self.queue.is_empty() {
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
    let mut writer = LinkWriter { stream: instance.to_agent, queue: BytesMut::new(), frames: 0 };
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
