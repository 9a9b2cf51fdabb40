//! The client that is attached, those who knock, and what they are told.

use std::time::Duration;

use bytes::Bytes;
use sandboxer_protocol::{
    agent::{PerStream, ToAgent},
    client::{CloseCode, ErrorCode, ServerEvent},
};
use sandboxer_store::lease::handoff::Consent;
use tokio::{
    sync::{mpsc, oneshot},
    time::Instant,
};
use tracing::debug;

use super::{Attachment, Driver, GRACE, GRACE_AT_MOST};
use crate::sandbox::{
    client::{Acknowledgement, ClientPort, Outbox, Outgoing},
    delivery::Delivery,
    execution::Execution,
};

/// How long an attached client has to answer when another one knocks.
const KNOCK: Duration = Duration::from_secs(2);
/// Others that may knock while the attached client is asked for a sign of life.
pub(super) const MAX_KNOCKING: usize = 8;
/// So long behind output comes its ping: many a program has ended by then, and needs no two.
const PING_AFTER: Duration = Duration::from_millis(3);
/// Under load, output between two pings.
const PING_EVERY_BYTES: u64 = 512 * 1024;

/// A client that is attached.
pub(in crate::sandbox) struct Client {
    pub(in crate::sandbox) port: ClientPort,
    pub(in crate::sandbox) outbox: Outbox,
    pub(in crate::sandbox) delivery: Option<Delivery>,
    pub(in crate::sandbox) grace: Grace,
    /// It asked where its output goes on, and waits for the answer.
    pub(in crate::sandbox) announce_resume: bool,
    /// It only looks: what it gets is there for the next one too.
    pub(in crate::sandbox) peeks: bool,
    /// From where it wanted its output.
    pub(in crate::sandbox) wanted: Option<PerStream<u64>>,
    /// What the newest ping that is on its way will acknowledge.
    ping: Option<Pinged>,
    last_ping: Pinged,
    /// When output that was handed out is asked to be acknowledged, unless there is more of it or its end before.
    ping_at: Option<Instant>,
    /// A ping is wanted whatever there is to acknowledge.
    pub(super) ping_wanted: bool,
    /// A pong to this ping, or a later one, is a sign of life to those who knock.
    alive_from: u64,
    /// It was told to go: nothing more is taken from it.
    pub(in crate::sandbox) leaving: bool,
    /// When it last gave a sign of life.
    pub(super) heard_at: Instant,
    /// Having been silent for long, it was asked whether it is there.
    pub(super) asked_after_silence: bool,
    /// Its connection takes nothing any longer; what it sent before may still be here.
    pub(super) deaf: bool,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Pinged {
    /// Pings are numbered, so that the newest pong stands for all before it.
    pub(super) sequence: u64,
    pub(super) number: u64,
    pub(super) upto: PerStream<u64>,
    pub(super) end: bool,
}

/// Whether a client that has just attached may still say where its output goes on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::sandbox) enum Grace {
    Over,
    UntilPong(Instant),
    Until(Instant),
}

pub(in crate::sandbox) struct Knocking {
    pub(super) port: ClientPort,
    pub(super) greeting: Vec<ServerEvent>,
    pub(super) reply: oneshot::Sender<Attachment>,
}

impl Driver {
    /// Asks the attached client for a sign of life.
    pub(in crate::sandbox) fn knock(&mut self) {
        if let Some(client) = &mut self.client {
            client.ping_wanted = true;
            client.alive_from = client.last_ping.sequence + 1;
            self.knock_deadline.get_or_insert_with(|| Instant::now() + KNOCK);
        }
    }

    pub(in crate::sandbox) fn on_attach(&mut self, newcomer: Knocking) {
        match &self.client {
            Some(client) if !client.port.outgoing.is_closed() => {
                if self.knocking.len() >= MAX_KNOCKING {
                    // Nobody waits for an answer any longer if this fails.
                    let _ = newcomer.reply.send(Attachment::InUse);
                    return;
                }
                self.knocking.push(newcomer);
                self.knock();
            }
            Some(_) => {
                self.knocking.push(newcomer);
                self.on_client_gone();
            }
            None => self.attach(newcomer),
        }
    }

    pub(super) fn attach(&mut self, newcomer: Knocking) {
        let Knocking { port, greeting, reply } = newcomer;
        if reply.send(Attachment::Attached).is_err() {
            return;
        }
        let mut outbox = Outbox::default();
        for event in greeting {
            outbox.event(event);
        }
        // The one before may have been told that it waits; this one has not.
        self.client_waiting = None;
        let news = self.execution.as_ref().is_some_and(Execution::has_news);
        let grace = if news { Grace::UntilPong(Instant::now() + GRACE_AT_MOST) } else { Grace::Over };
        self.client = Some(Client {
            port,
            outbox,
            delivery: None,
            grace,
            announce_resume: false,
            peeks: false,
            wanted: None,
            ping: None,
            last_ping: Pinged::default(),
            ping_at: None,
            ping_wanted: news,
            alive_from: 0,
            leaving: false,
            heard_at: Instant::now(),
            asked_after_silence: false,
            deaf: false,
        });
        self.last_use.note();
        debug!("a client is attached");
    }

    pub(super) fn on_client_gone(&mut self) {
        self.knock_deadline = None;
        self.waiting = None;
        if let Some(mut client) = self.client.take() {
            self.last_use.note();
            debug!("the client is gone");
            if let Some(Pinged { number, upto, end, .. }) = client.last_answer() {
                self.acknowledge(number, upto, end);
            }
            if client.delivery.is_some()
                && let Some(execution) = &self.execution
            {
                self.writer.queue(&ToAgent::Pause { number: execution.number });
            }
        }
        while self.client.is_none() && !self.knocking.is_empty() {
            let next = self.knocking.remove(0);
            self.attach(next);
        }
        if self.client.is_none() {
            self.asks.let_in();
        }
        self.give_way();
        self.turn_away();
        self.save_soon();
    }

    /// The connection takes nothing any longer. What the client sent before it went is still carried out, except what waits for it to
    /// read.
    pub(super) fn on_deaf(&mut self) {
        if self.waiting.is_some() {
            self.on_client_gone();
        } else if let Some(client) = &mut self.client {
            client.deaf = true;
        }
    }

    /// The attached client lives: whoever knocked is told so.
    pub(super) fn turn_away(&mut self) {
        self.knock_deadline = None;
        self.asks.turn_away();
        for asking in self.asking.drain(..) {
            let _ = asking.send(Consent::InUse);
        }
        for knocking in self.knocking.drain(..) {
            let _ = knocking.reply.send(Attachment::InUse);
        }
    }

    pub(super) fn on_pong(&mut self, payload: &[u8]) {
        let Some(client) = &mut self.client else { return };
        client.heard();
        let sequence = Pinged::sequence_of(payload).filter(|sequence| *sequence <= client.last_ping.sequence);
        if !client.leaving && sequence >= Some(client.alive_from) {
            self.turn_away();
        }
        let Some(client) = &mut self.client else { return };
        if let Grace::UntilPong(_) = client.grace {
            client.grace = Grace::Until(Instant::now() + GRACE);
        }
        let Some(pinged) = client.ping.filter(|pinged| sequence >= Some(pinged.sequence)) else { return };
        client.ping = None;
        if client.port.acknowledgement == Acknowledgement::ByPong {
            self.acknowledge(pinged.number, pinged.upto, pinged.end);
        }
    }

    /// A client has this much of an execution for sure.
    pub(in crate::sandbox) fn acknowledge(&mut self, number: u64, upto: PerStream<u64>, end: bool) {
        if self.client.as_ref().is_some_and(|client| client.peeks) {
            return;
        }
        let Some(execution) = self.execution.as_mut().filter(|execution| execution.number == number) else { return };
        let news = end && !execution.end_acknowledged;
        execution.end_acknowledged |= end;
        if execution.acknowledge(upto) || news {
            let (upto, end) = (execution.acknowledged, execution.end_acknowledged);
            self.writer.queue(&ToAgent::Ack { number, upto, end });
        }
    }

    /// When to look for a ping that waits. None: whatever it waits for will be noticed.
    pub(super) fn next_ping(&self) -> Option<Instant> {
        let client = self.client.as_ref().filter(|client| !client.leaving && client.ping.is_none())?;
        client.ping_at.filter(|at| *at > Instant::now())
    }

    /// A ping that should go out now: behind output, one at a time.
    pub(super) fn ping_due(&self) -> Option<Pinged> {
        let client = self.client.as_ref().filter(|client| !client.leaving)?;
        let last = client.last_ping;
        let sequence = last.sequence + 1;
        let now = match &client.delivery {
            Some(delivery) if delivery.is_answered() => {
                Pinged { sequence, number: delivery.number, upto: delivery.handed(), end: delivery.end_handed }
            }
            _ => Pinged { sequence, ..last },
        };
        if client.ping_wanted {
            return Some(now);
        }
        if client.ping.is_some() {
            return None;
        }
        let fresh = |now: u64, last: u64| if last > now { now } else { now - last };
        let bytes = fresh(now.upto.stdout, last.upto.stdout).saturating_add(fresh(now.upto.stderr, last.upto.stderr));
        // Of an execution that has just begun there is nothing to acknowledge.
        let begun = now.end || now.upto != PerStream::default();
        let news = begun && (now.number, now.upto, now.end) != (last.number, last.upto, last.end);
        let soon = now.end || client.ping_at.is_none_or(|at| at <= Instant::now());
        (news && (client.outbox.is_empty() && soon || bytes >= PING_EVERY_BYTES)).then_some(now)
    }

    pub(super) fn hand_out(&mut self, permit: mpsc::OwnedPermit<Outgoing>, ping: Option<Pinged>) {
        let Some(client) = &mut self.client else { return };
        if let Some(ping) = ping {
            client.ping = Some(ping);
            client.last_ping = ping;
            client.ping_at = None;
            client.ping_wanted = false;
            permit.send(Outgoing::Ping(ping.payload()));
            return;
        }
        let Some(message) = client.outbox.pop() else { return };
        if let Some(delivery) = &mut client.delivery {
            match &message {
                Outgoing::Output(piece) => {
                    client.ping_at.get_or_insert_with(|| Instant::now() + PING_AFTER);
                    let more = delivery.hand(piece);
                    if more {
                        self.writer.queue(&ToAgent::Credit { number: delivery.number, upto: delivery.granted() });
                    }
                }
                Outgoing::End(_) => delivery.end_handed = true,
                _ => {}
            }
        }
        permit.send(message);
    }

    pub(in crate::sandbox) fn close_client(&mut self, code: CloseCode) {
        if let Some(client) = &mut self.client {
            client.outbox.push(Outgoing::Close(code));
            client.leaving = true;
        }
    }

    /// Tells what has happened in the sandbox by itself.
    pub(in crate::sandbox) fn tell_notice(&mut self, code: ErrorCode, message: impl Into<String>) {
        if let Some(client) = &mut self.client {
            client.outbox.notice(code, message);
        }
    }

    pub(in crate::sandbox) fn tell_error(&mut self, code: ErrorCode, message: impl Into<String>) {
        if let Some(client) = &mut self.client {
            client.outbox.error(code, message);
        }
    }
}

impl Client {
    /// It gave a sign of life.
    pub(in crate::sandbox) fn heard(&mut self) {
        self.heard_at = Instant::now();
        self.asked_after_silence = false;
    }

    /// What it was told and asked before is of no use any more: the sandbox is another one.
    pub(in crate::sandbox) fn begin_again(&mut self, grace: Grace) {
        self.outbox.take_back_output();
        self.delivery = None;
        self.announce_resume = false;
        self.wanted = None;
        // An answer to an earlier ping says nothing of what comes now.
        self.ping = None;
        self.last_ping = Pinged { sequence: self.last_ping.sequence, ..Pinged::default() };
        self.ping_wanted = true;
        self.grace = grace;
    }

    /// What its newest pong acknowledges, if nobody has looked at it yet: that it went right behind it takes nothing from its answer.
    pub(super) fn last_answer(&mut self) -> Option<Pinged> {
        let pong = self.port.pongs.borrow_and_update();
        let sequence = Pinged::sequence_of(&pong).filter(|sequence| pong.has_changed() && *sequence <= self.last_ping.sequence);
        drop(pong);
        let acknowledges = !self.peeks && self.port.acknowledgement == Acknowledgement::ByPong;
        self.ping.take_if(|pinged| sequence >= Some(pinged.sequence)).filter(|_| acknowledges)
    }
}

impl Pinged {
    /// At most 125 bytes, as a ping may carry.
    fn payload(&self) -> Bytes {
        let Self { sequence, number, upto: PerStream { stdout, stderr }, end } = self;
        Bytes::from(format!("{sequence} {number} {stdout} {stderr} {}", u8::from(*end)))
    }

    fn sequence_of(payload: &[u8]) -> Option<u64> {
        std::str::from_utf8(payload).ok()?.split(' ').next()?.parse().ok()
    }
}
