//! What the driver does about streams of the network: it passes on what the agent and the tasks of streams say to each other.
//!
//! While the sandbox is brought to rest for a save the streams wait. Where it ends here, or goes back, they are cut off.

use bytes::Bytes;
use sandboxer_protocol::agent::{ToAgent, TunnelFault};
use tokio::sync::oneshot;
use tracing::warn;

use super::{
    driver::Driver,
    tunnel::{Say, TunnelStream},
};
use crate::network::Egress;

/// Beyond this much on its way to the agent streams wait: so input and requests never wait long behind them.
pub(super) const MAX_BACKLOG_BYTES: usize = 256 * 1024;
/// What is said of streams between two looks at everything else.
const SAID_A_TURN_BYTES: usize = 256 * 1024;

/// Why there is no way to a port.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum NoWay {
    /// The agent is one that can't.
    Unable,
    Busy,
}

pub(crate) type WayReply = oneshot::Sender<Result<TunnelStream, NoWay>>;

/// What the driver has to do with the network.
#[derive(Default)]
pub(super) struct Streams {
    pub(super) tunnel: super::tunnel::Tunnel,
    /// The agent carries streams.
    pub(super) able: bool,
    /// Where those go that programs open; none: it has no network.
    pub(super) egress: Option<Egress>,
}

impl Driver {
    /// The agent is told whether it offers a proxy. One that never did is told nothing, nor is one that would not understand it.
    pub(super) fn begin_streams(&mut self) {
        if self.record.config.network.is_empty() {
            return;
        }
        if self.streams.able {
            self.writer.queue(&ToAgent::Proxy { on: self.streams.egress.is_some() });
        } else {
            warn!("the agent is of a version that carries no streams: the sandbox has no network, though it may have one");
        }
    }

    /// Somebody wants to reach a port of the sandbox.
    pub(super) fn on_way(&mut self, port: u16, reply: WayReply) {
        let way = if self.streams.able { self.streams.tunnel.connect(port).ok_or(NoWay::Busy) } else { Err(NoWay::Unable) };
        // Nobody waits for an answer any longer if this fails.
        let _ = reply.send(way);
    }

    /// Says to the agent what streams have to say.
    pub(super) fn on_streams_stirred(&mut self) {
        let mut said = 0;
        while said < SAID_A_TURN_BYTES && self.writer.backlog() < MAX_BACKLOG_BYTES {
            match self.streams.tunnel.next() {
                None => return,
                Some(Say::Control(message)) => self.writer.queue(&message),
                Some(Say::Data(stream, data)) => {
                    said += data.len();
                    self.writer.queue_tunnel(stream, data.freeze());
                }
            }
        }
    }

    /// A program has connected to the proxy.
    pub(super) fn on_stream_opened(&mut self, number: u64, credit: u64) -> Result<(), &'static str> {
        let stream = self.streams.tunnel.opened_by_agent(number, credit)?;
        // Without a network, because this server allows less than the last one did, and the agent has not heard of it yet, the stream is cut off by being
        // dropped.
        if let (Some(stream), Some(egress)) = (stream, &mut self.streams.egress) {
            egress.serve(self.id, stream);
        }
        Ok(())
    }

    pub(super) fn on_stream_data(&mut self, number: u64, data: &Bytes) -> Result<(), &'static str> {
        self.streams.tunnel.data(number, data)
    }

    pub(super) fn on_stream_reset(&mut self, number: u64, reason: TunnelFault) {
        self.streams.tunnel.reset(number, reason);
    }

    /// The agent is another one, and knows nothing of them.
    pub(super) fn cut_streams(&mut self, able: bool) {
        self.streams.tunnel.begin_again();
        self.streams.able = able;
        if let Some(egress) = &self.streams.egress {
            egress.move_to(&self.dir);
        }
        self.begin_streams();
    }
}
