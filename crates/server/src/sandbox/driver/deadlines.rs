//! Everything that time brings: idleness, lifetimes, timeouts, silence.

use std::time::Duration;

use sandboxer_protocol::{
    agent::ExitCause,
    client::{ServerEvent, Status, StatusUpdate},
};
use sandboxer_runtime::End;
use tokio::time::Instant;
use tracing::{info, warn};

use super::{
    Driver, Outcome,
    attached::{Client, Grace},
};
use crate::sandbox::{
    client::Outgoing,
    execution::Execution,
    saving::{Stillness, Why},
};

/// After how long a silent client is asked for a sign of life, and after how long it is given up. The second is long, since a client that
/// does not read is not dead: its program waits for it.
const SILENT_FOR: Duration = Duration::from_secs(60);
const SILENT_AT_MOST: Duration = Duration::from_secs(300);

/// How long a client waits before it is told that it does.
pub(crate) const TELL_WAITING_AFTER: Duration = Duration::from_millis(1500);

const STILL_WAITING: &str = "The sandbox stands still: it is being saved, or its volume does not answer. It goes on, or its client is told why not, as soon \
                             as that is settled.";

/// A client that can't be served at the moment.
#[derive(Debug)]
pub(super) struct Waiting {
    since: Instant,
    told: bool,
}

impl Driver {
    /// A client is served unless the sandbox stands still, or its lease may be another instance's.
    pub(super) fn note_waiting(&mut self) {
        let served = self.saves.may_serve() && self.saves.may_act() && self.rollback.is_none();
        let waits = !served && self.client.as_ref().is_some_and(|client| !client.leaving);
        if !waits {
            self.client_waiting = None;
        } else if self.client_waiting.is_none() {
            self.client_waiting = Some(Waiting { since: Instant::now(), told: false });
        }
    }

    /// When to tell a client that it waits.
    fn waiting_told_at(&self) -> Option<Instant> {
        self.client_waiting.as_ref().filter(|waiting| !waiting.told).map(|waiting| waiting.since + TELL_WAITING_AFTER)
    }

    /// Past all that is held back for the client: it says nothing of the sandbox that another instance could contradict.
    fn tell_waiting(&mut self, now: Instant) {
        if let (Some(waiting), Some(client)) = (&mut self.client_waiting, &self.client)
            && !waiting.told
            && waiting.since + TELL_WAITING_AFTER <= now
        {
            waiting.told = true;
            let update = StatusUpdate::new(Status::Waiting).message(STILL_WAITING);
            // A client that has not read what it was sent before is not waiting for a word.
            let _ = client.port.outgoing.try_send(Outgoing::Event(ServerEvent::StatusUpdate(update)));
        }
    }

    pub(super) fn next_deadline(&self) -> Option<Instant> {
        let idle = self.idle_since.and_then(|since| Some(since + self.record.config.idle_timeout?));
        let client_gone = self.clientless_since.and_then(|since| Some(since + self.record.config.client_gone_timeout?));
        let lifetime = self.max_lifetime.map(|lifetime| self.born + lifetime);
        let execution = self.execution.as_ref().filter(|execution| execution.is_live()).and_then(|execution| execution.deadline);
        let grace = self.client.as_ref().and_then(|client| match client.grace {
            Grace::Over => None,
            Grace::UntilPong(at) | Grace::Until(at) => Some(at),
        });
        let silence =
            self.client.as_ref().map(|client| client.heard_at + if client.asked_after_silence { SILENT_AT_MOST } else { SILENT_FOR });
        let quieting = match &self.saves.stillness {
            Stillness::Quieting { until, .. } => Some(*until),
            Stillness::Going | Stillness::Still => None,
        };
        if !self.saves.may_serve() {
            // It stands still, and so does its time. Another instance that asks is answered all the same.
            let asked = self.knock_deadline.filter(|_| !self.asking.is_empty());
            return [quieting, self.link_closed, asked, self.waiting_told_at()].into_iter().flatten().min();
        }
        let save = self.saves.next_due();
        let stalled = self.transfers.deadline();
        let times = [idle, client_gone, lifetime, execution, grace, silence, save, stalled, self.next_ping()];
        let more = [self.knock_deadline, self.kill_deadline, self.link_closed, self.waiting_told_at()];
        times.into_iter().chain(more).flatten().min()
    }

    pub(super) fn on_deadline(&mut self) -> Option<Outcome> {
        let now = Instant::now();
        self.tell_waiting(now);
        let due = |at: Option<Instant>| at.is_some_and(|at| at <= now);
        if !self.saves.may_serve() && !due(self.link_closed) {
            self.give_up_quieting(now);
            if due(self.knock_deadline) && !self.asking.is_empty() {
                self.on_client_gone();
            }
            return None;
        }
        self.give_up_transfers(now);
        if self.saves.saving.is_none() && self.rollback.is_none() {
            if due(self.saves.due) {
                self.save(Why::Disconnected);
            } else if due(self.saves.autosave_due) {
                self.autosave();
            }
        }
        if let Some(lifetime) = self.max_lifetime
            && due(Some(self.born + lifetime))
        {
            return Some(Outcome::Lifetime(lifetime));
        }
        if let (Some(since), Some(limit)) = (self.clientless_since, self.record.config.client_gone_timeout)
            && due(Some(since + limit))
        {
            return Some(Outcome::ClientGone(limit));
        }
        if let (Some(since), Some(idle)) = (self.idle_since, self.record.config.idle_timeout)
            && due(Some(since + idle))
        {
            if self.saves.kept.is_none() || !self.record.config.idle_checkpoint {
                return Some(Outcome::Idle(idle));
            }
            if self.saves.saving.is_none() {
                self.save(Why::Idle);
            }
            return None;
        }
        if due(self.link_closed) {
            return Some(Outcome::Died(End::Failed("the agent closed its end of the conversation".to_owned())));
        }
        if due(self.kill_deadline) {
            return Some(Outcome::Died(End::Failed("the agent did not end the processes it was told to kill".to_owned())));
        }
        if due(self.knock_deadline) {
            info!("the attached client gave no sign of life; the next one takes its place");
            self.on_client_gone();
        }
        if let Some(client) = &mut self.client {
            if due(Some(client.heard_at + SILENT_AT_MOST)) {
                info!("the client has been silent for too long");
                self.on_client_gone();
            } else if due(Some(client.heard_at + SILENT_FOR)) && !client.asked_after_silence {
                client.ping_wanted = true;
                client.asked_after_silence = true;
            }
        }
        if let Some(execution) = self.execution.as_mut()
            && execution.is_live()
            && due(execution.deadline)
        {
            execution.deadline = None;
            self.kill_execution(ExitCause::TimedOut);
        }
        if let Some(Client { grace: Grace::UntilPong(at) | Grace::Until(at), .. }) = &self.client
            && due(Some(*at))
        {
            self.resume(None);
        }
        None
    }

    /// With a client attached or a program running a sandbox is never idle. Since when it is, is written down: a server that is restarted
    /// does not begin to count anew.
    pub(super) fn note_idleness(&mut self) {
        self.clientless_since = if self.client.is_some() { None } else { self.clientless_since.or_else(|| Some(Instant::now())) };
        let busy = self.client.is_some()
            || self.packing.is_some()
            || self.transfers.keep_busy()
            || self.streams.tunnel.serves()
            || self.execution.as_ref().is_some_and(Execution::is_live);
        match (busy, self.idle_since) {
            (true, None) | (false, Some(_)) => return,
            (true, Some(_)) => {
                self.idle_since = None;
                self.record.idle_since = None;
            }
            (false, None) => {
                let now = jiff::Timestamp::now();
                let since = self.record.idle_since.get_or_insert(now);
                let gone_by = Duration::try_from(now.duration_since(*since)).unwrap_or_default();
                self.idle_since = Instant::now().checked_sub(gone_by).or_else(|| Some(Instant::now()));
            }
        }
        if let Err(error) = self.record.write(&self.dir) {
            warn!(%error, "the record of the sandbox could not be written");
        }
    }

    /// It could not be saved when it was idle: that is tried again after as long.
    pub(in crate::sandbox) fn count_idleness_anew(&mut self) {
        self.idle_since = Some(Instant::now());
    }
}
