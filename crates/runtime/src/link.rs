//! The opening of a conversation with an agent, and its two halves after it.

use std::{io, time::Duration};

use bytes::{Bytes, BytesMut};
use sandboxer_protocol::agent::{
    AGENT_PROTOCOL_VERSION, Corrupt, ExecSpec, ExecutionNumber, FromAgent, FromAgentFrame, Marker, NONCE_BYTES, Nonce, ServerDecoder,
    ToAgent, encode_exec, encode_opening, encode_stdin, encode_to_agent,
};
use tokio::{
    io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt},
    time::{error::Elapsed, timeout},
};

use crate::{Ended, Instance};

/// What is read at a time.
const READ_BYTES: usize = 256 * 1024;

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
            buffer.reserve(READ_BYTES);
            if self.stream.read_buf(buffer).await? == 0 {
                return Err(LinkError::Closed);
            }
        }
    }

    /// The next frame, within a time limit.
    ///
    /// # Errors
    /// As [`Self::recv`], or none came in time.
    pub async fn recv_within(&mut self, limit: Duration) -> Result<FromAgentFrame, LinkError> {
        timeout(limit, self.recv()).await?
    }
}

/// Frames to the agent. A send that is dropped half-way leaves half a frame behind: open a new conversation then.
pub struct LinkWriter {
    stream: Box<dyn AsyncWrite + Send + Unpin>,
    buffer: BytesMut,
}

impl LinkWriter {
    /// # Errors
    /// The sandbox is gone.
    pub async fn send(&mut self, message: &ToAgent) -> Result<(), LinkError> {
        encode_to_agent(&mut self.buffer, message);
        self.flush().await
    }

    /// # Errors
    /// The sandbox is gone.
    pub async fn exec(&mut self, spec: &ExecSpec, code: &[u8]) -> Result<(), LinkError> {
        encode_exec(&mut self.buffer, spec, code);
        self.flush().await
    }

    /// # Errors
    /// The sandbox is gone.
    pub async fn stdin(&mut self, number: ExecutionNumber, offset: u64, data: &[u8]) -> Result<(), LinkError> {
        encode_stdin(&mut self.buffer, number, offset, data);
        self.flush().await
    }

    /// # Errors
    /// The sandbox is gone.
    pub async fn send_raw(&mut self, bytes: &[u8]) -> Result<(), LinkError> {
        self.buffer.extend_from_slice(bytes);
        self.flush().await
    }

    async fn flush(&mut self) -> Result<(), LinkError> {
        let bytes: Bytes = self.buffer.split().freeze();
        self.stream.write_all(&bytes).await?;
        // A pipe needs none, the fake's stream might.
        Ok(self.stream.flush().await?)
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
    let mut writer = LinkWriter { stream: instance.to_agent, buffer: BytesMut::new() };
    let mut reader = LinkReader { stream: instance.from_agent, decoder: ServerDecoder::new(nonce) };
    let opening = encode_opening(marker, AGENT_PROTOCOL_VERSION, nonce);
    // Both at once: an agent that is in the middle of sending reads nothing until somebody takes what it sends.
    let (sent, answer) = timeout(limit, async { tokio::join!(writer.send_raw(&opening), reader.recv()) }).await?;
    sent?;
    match answer? {
        FromAgentFrame::Control(hello @ FromAgent::HelloReply { .. }) => Ok(Link { hello, reader, writer, ended: instance.ended }),
        _ => Err(LinkError::NotAReply),
    }
}
