//! The conversation with one sandbox's agent: opening it, frames out and in.
//!
//! Everything the agent says is hostile input. The decoder bounds and parses it; what does not fit the moment ends the conversation.

use std::time::Duration;

use bytes::{Buf, BytesMut};
use sandboxer_protocol::agent::{
    AGENT_PROTOCOL_VERSION, Corrupt, Enforced, ExecSpec, ExecState, FromAgent, FromAgentFrame, Marker, Nonce, ServerDecoder, ToAgent,
    encode_exec, encode_opening, encode_stdin, encode_to_agent,
};
use sandboxer_runtime::Instance;
use tokio::{
    io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt},
    time::timeout,
};

/// One read from the FIFO: as much as a FIFO holds.
const READ_BYTES: usize = 1024 * 1024;

/// Why there is no conversation any longer.
#[derive(Debug, thiserror::Error)]
pub(crate) enum LinkError {
    #[error("the agent closed its end")]
    Closed,
    #[error("the agent said something that makes no sense: {0}")]
    Corrupt(#[from] Corrupt),
    #[error("the agent did not answer within {0:?}")]
    Silent(Duration),
    #[error("the agent speaks version {0} of the protocol, which this server does not know")]
    Version(u32),
    #[error("reading from the agent: {0}")]
    Io(#[from] std::io::Error),
}

/// What the agent tells of itself when a conversation opens.
#[derive(Debug)]
pub(crate) struct Hello {
    pub(crate) enforced: Enforced,
    pub(crate) execution: Option<ExecState>,
}

/// Opens a conversation over the two streams of an instance.
pub(crate) async fn open(instance: Instance, marker: &Marker, within: Duration) -> Result<(Hello, AgentReader, AgentWriter), LinkError> {
    let nonce = Nonce::new(rand::random());
    let mut reader = AgentReader { stream: instance.from_agent, decoder: ServerDecoder::new(nonce) };
    let mut writer = AgentWriter { stream: instance.to_agent, pending: BytesMut::new() };
    writer.pending.extend_from_slice(&encode_opening(marker, AGENT_PROTOCOL_VERSION, nonce));
    let answer = async {
        while writer.has_pending() {
            writer.flush_some().await?;
        }
        reader.next().await
    };
    let first = timeout(within, answer).await.map_err(|_| LinkError::Silent(within))??;
    match first {
        FromAgentFrame::Control(FromAgent::HelloReply { version: AGENT_PROTOCOL_VERSION, enforced, execution, .. }) => {
            Ok((Hello { enforced, execution }, reader, writer))
        }
        FromAgentFrame::Control(FromAgent::HelloReply { version, .. }) => Err(LinkError::Version(version)),
        _ => Err(Corrupt::Control("something else came before the answer to the opening".to_owned()).into()),
    }
}

pub(crate) struct AgentReader {
    stream: Box<dyn AsyncRead + Send + Unpin>,
    decoder: ServerDecoder,
}

impl AgentReader {
    /// The next frame. Cancel-safe: bytes that were read stay in the decoder.
    pub(crate) async fn next(&mut self) -> Result<FromAgentFrame, LinkError> {
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
}

/// Frames on their way to the agent. Whoever adds to it looks at [`Self::backlog`] first: it is bounded by that.
pub(crate) struct AgentWriter {
    stream: Box<dyn AsyncWrite + Send + Unpin>,
    pending: BytesMut,
}

impl AgentWriter {
    pub(crate) fn control(&mut self, message: &ToAgent) {
        encode_to_agent(&mut self.pending, message);
    }

    pub(crate) fn exec(&mut self, spec: &ExecSpec, code: &[u8]) {
        encode_exec(&mut self.pending, spec, code);
    }

    pub(crate) fn stdin(&mut self, number: u64, offset: u64, data: &[u8]) {
        encode_stdin(&mut self.pending, number, offset, data);
    }

    pub(crate) fn backlog(&self) -> usize {
        self.pending.len()
    }

    pub(crate) fn has_pending(&self) -> bool {
        !self.pending.is_empty()
    }

    /// Writes what the FIFO takes now. Cancel-safe: what was not written stays.
    pub(crate) async fn flush_some(&mut self) -> std::io::Result<()> {
        let written = self.stream.write(&self.pending).await?;
        self.pending.advance(written);
        if self.pending.is_empty() && self.pending.capacity() > READ_BYTES {
            self.pending = BytesMut::new();
        }
        Ok(())
    }
}
