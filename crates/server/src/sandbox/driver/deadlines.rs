//! Everything that time brings: idleness, lifetimes, timeouts, silence.

use std::time::Duration;

use sandboxer_protocol::agent::ExitCause;
use sandboxer_runtime::End;
use tokio::time::Instant;
use tracing::{info, warn};

use super::{
    Driver, Outcome,
    attached::{Client, Grace},
};
use crate::sandbox::{
    execution::Execution,
    saving::{Stillness, Why},
};

/// After how long a silent client is asked for a sign of life, and after how long it is given up. The second is long, since a client that
/// does not read is not dead: its program waits for it.
const SILENT_FOR: Duration = Duration::from_secs(60);
const SILENT_AT_MOST: Duration = Duration::from_secs(300);

impl Driver {
    pub(super) fn next_deadline(&self) -> Option<Instant> {
        let idle = self.idle_since.and_then(|since| Some(since + self.record.config.idle_timeout?));
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
            return [quieting, self.link_closed, asked].into_iter().flatten().min();
        }
        let save = self.saves.next_due();
        let stalled = self.transfers.deadline();
        let times = [idle, lifetime, execution, grace, silence, save, stalled, self.next_ping()];
        times.into_iter().chain([self.knock_deadline, self.kill_deadline, self.link_closed]).flatten().min()
    }

    pub(super) fn on_deadline(&mut self) -> Option<Outcome> {
        let now = Instant::now();
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
