//! What the messages of the server mean.

use base64::{Engine as _, prelude::BASE64_STANDARD};
use bytes::Bytes;
use sandboxer_protocol::{
    ExecutionId,
    agent::{PerStream, Stream},
    client::{Encoding, ErrorCode, ErrorEvent, OffsetsRequest, OutputEvent, Resumed, ServerEvent, Status, StatusUpdate},
};
use tokio::time::Instant;

use super::{
    Effect, Found, Identity, Link, Session, is_refusal,
    run::{Phase, Run, Taken},
};
use crate::{Ended, Error, Exit, outage::Setback};

impl Session {
    /// Takes one message. What can't be read is of a newer server and is ignored, as the contract says.
    pub(crate) fn received(&mut self, text: &str, now: Instant) -> Option<Effect> {
        match serde_json::from_str::<ServerEvent>(text) {
            Ok(ServerEvent::Stdout(event)) => self.output(Stream::Stdout, event),
            Ok(ServerEvent::Stderr(event)) => self.output(Stream::Stderr, event),
            Ok(ServerEvent::StatusUpdate(update)) => self.status(update),
            Ok(ServerEvent::SandboxId(event)) => {
                self.identity = Some(Identity { id: event.sandbox_id, token: Some(event.sandbox_token) });
                None
            }
            Ok(ServerEvent::StdinAck(ack)) => self.input_taken(ack.execution_id.as_ref(), ack.offset),
            Ok(ServerEvent::Resumed(resumed)) => self.resumed(resumed),
            Ok(ServerEvent::Error(event)) => self.error(event, now),
            // This client asks for files by HTTP.
            Ok(ServerEvent::File(_)) => None,
            Err(error) => {
                tracing::debug!(%error, "ignored a message that this client does not know");
                None
            }
        }
    }

    fn output(&mut self, stream: Stream, event: OutputEvent) -> Option<Effect> {
        let run = self.run.as_mut().filter(|run| run.id == event.execution_id && run.phase != Phase::Done)?;
        let data = match event.encoding.unwrap_or_default() {
            Encoding::Text => Bytes::from(event.data),
            Encoding::Base64 => match BASE64_STANDARD.decode(event.data) {
                Ok(data) => data.into(),
                Err(error) => return Some(Effect::Again(Setback::Cut(format!("the server sent broken base64: {error}")))),
            },
        };
        match run.take(stream, event.offset, event.end, data) {
            Taken::New(piece) => {
                run.phase = Phase::Running;
                Some(Effect::Piece(piece))
            }
            Taken::Known => None,
            // It was not asked for yet where to go on; that will settle it.
            Taken::Unusable if self.link != Link::Ready => None,
            Taken::Unusable => Some(Effect::Again(Setback::Cut("the server skipped output".into()))),
        }
    }

    fn input_taken(&mut self, id: Option<&ExecutionId>, offset: u64) -> Option<Effect> {
        let run = self.run.as_mut().filter(|run| id.is_none_or(|id| run.id == *id))?;
        if !run.input.acknowledge(offset) {
            return Some(Effect::Again(Setback::Cut("the server acknowledged input that was never sent".into())));
        }
        Some(Effect::Progress)
    }

    fn status(&mut self, update: StatusUpdate) -> Option<Effect> {
        let message = || update.message.clone().unwrap_or_else(|| update.status.as_str().to_owned());
        match update.status {
            status if is_refusal(status) => {
                self.refusal = Some(update);
                None
            }
            Status::Restoring => {
                if let Link::Opening { restoring, .. } = &mut self.link {
                    *restoring = true;
                }
                None
            }
            Status::Running => self.running(&update),
            Status::NotFound if self.kill.is_some() => Some(Effect::Over(killed())),
            Status::NotFound if self.config.is_some() && !self.settled => {
                // It was lost before it was ever there: make another.
                self.identity = None;
                Some(Effect::Again(Setback::Cut(message())))
            }
            Status::NotFound => Some(Effect::Over(Error::NotFound { message: message() })),
            Status::InUse if self.settled => Some(Effect::Again(Setback::InUse(message()))),
            Status::InUse => Some(Effect::Over(Error::InUse { message: message() })),
            Status::HandoffInProgress => Some(Effect::Again(Setback::Cut(message()))),
            Status::ExecutionRunning => {
                let run = self.run.as_mut().filter(|run| update.execution_id.as_ref().is_none_or(|id| run.id == *id))?;
                if !matches!(run.phase, Phase::Requested { sent: true, .. }) {
                    return None;
                }
                run.phase = Phase::Running;
                Some(Effect::Started)
            }
            Status::ExecutionDone => self.done(update),
            Status::LockReleaseRequested => {
                self.release_requested = true;
                None
            }
            Status::Checkpointed => {
                self.checkpointed = true;
                None
            }
            Status::Killed => Some(Effect::Over(killed())),
            _ => None,
        }
    }

    fn running(&mut self, update: &StatusUpdate) -> Option<Effect> {
        // Who has seen nothing yet can't have seen too much. The message that told of a generation first may have been lost, and one
        // that tells it again is no news.
        let news = update.generation.map_or(update.rewound == Some(true), |generation| generation > self.generation);
        let rewound = news && self.settled;
        self.settled = true;
        if let Some(generation) = update.generation {
            self.generation = generation;
        }
        if rewound {
            let void = self.run.take().is_some_and(|run| run.phase != Phase::Done);
            self.rewound = (!void).then_some(self.generation);
            // Whatever runs in the sandbox now is taken up from where it is.
            self.take_up = Some(OffsetsRequest::default());
            self.link = Link::Resuming { asked: false };
            return Some(Effect::Rewound(self.generation));
        }
        if !matches!(self.link, Link::Opening { .. }) {
            return None;
        }
        if self.take_up.is_some() || self.run.as_ref().is_some_and(Run::may_be_there) {
            self.link = Link::Resuming { asked: false };
            return None;
        }
        self.link = Link::Ready;
        Some(Effect::Ready(None))
    }

    fn done(&mut self, update: StatusUpdate) -> Option<Effect> {
        let run = self.run.as_mut()?;
        let ours = match &update.execution_id {
            Some(id) => run.id == *id && run.phase != Phase::Done,
            None => run.phase == Phase::Running,
        };
        if !ours || run.gap {
            return None;
        }
        run.phase = Phase::Done;
        Some(Effect::Done(Exit::from(update)))
    }

    fn resumed(&mut self, resumed: Resumed) -> Option<Effect> {
        if self.link != (Link::Resuming { asked: true }) {
            return None;
        }
        self.link = Link::Ready;
        let from = PerStream { stdout: resumed.stdout_offset.unwrap_or(0), stderr: resumed.stderr_offset.unwrap_or(0) };
        let stdin_offset = resumed.stdin_offset.unwrap_or(0);
        if let Some(asked) = self.take_up.take() {
            let end = resumed.stdout_end.zip(resumed.stderr_end).map(|(stdout, stderr)| PerStream { stdout, stderr });
            let (running, tty) = (resumed.running.unwrap_or(false), resumed.tty.unwrap_or(false));
            let found = resumed.execution_id.map(|id| Found { id, running, from, stdin_offset, end, tty });
            if self.run.is_some() && !found.as_ref().is_some_and(|found| found.running) {
                // Something else was asked for meanwhile, and nothing is in its way.
                return Some(Effect::Ready(None));
            }
            let peek = asked.peek == Some(true);
            self.run = found.as_ref().map(|found| Run::found(found.id.clone(), found.from, found.stdin_offset, peek));
            return Some(Effect::Ready(found));
        }
        let Some(run) = &mut self.run else { return Some(Effect::Ready(None)) };
        if resumed.execution_id.as_ref() != Some(&run.id) {
            return self.not_there();
        }
        run.phase = if run.phase == Phase::Done { Phase::Done } else { Phase::Running };
        run.skip_to(from.stdout, from.stderr);
        if !run.input.acknowledge(stdin_offset) || stdin_offset < run.input.acknowledged() {
            run.phase = Phase::Done;
            return Some(Effect::Failed(Error::refused(
                ErrorCode::StdinGap,
                "The program's input is not where this client knows it to be: was another client attached meanwhile?",
            )));
        }
        Some(Effect::Ready(None))
    }

    /// The server knows nothing of the execution: either it never heard of it, or it has forgotten it.
    fn not_there(&mut self) -> Option<Effect> {
        self.link = Link::Ready;
        let run = self.run.as_mut()?;
        if let Phase::Requested { sent, .. } = &mut run.phase {
            *sent = false;
            return Some(Effect::Ready(None));
        }
        run.phase = Phase::Done;
        let message = "The sandbox no longer knows this execution: another client ran something else meanwhile.";
        Some(Effect::Failed(Error::refused(ErrorCode::UnknownExecution, message)))
    }

    fn error(&mut self, event: ErrorEvent, now: Instant) -> Option<Effect> {
        if let Some(refusal) = self.refusal.take() {
            if refusal.status == Status::StdinError {
                return self.input_refused(event.code, now);
            }
            return self.refused(refusal, event.code, event.message);
        }
        let resuming = self.link == (Link::Resuming { asked: true });
        match event.code {
            ErrorCode::OutputGone => {
                let from = event.available_from?;
                self.run.as_mut()?.skip_to(from.stdout_offset, from.stderr_offset);
                None
            }
            ErrorCode::UnknownExecution if resuming && self.take_up.is_none() => self.not_there(),
            ErrorCode::UnknownExecution | ErrorCode::NotImplemented | ErrorCode::UnknownAction if resuming => {
                self.link = Link::Ready;
                self.take_up = None;
                match &mut self.run {
                    None => Some(Effect::Ready(None)),
                    Some(run) => {
                        run.phase = Phase::Done;
                        Some(Effect::Failed(Error::Refused { code: event.code, message: event.message }))
                    }
                }
            }
            _ => {
                tracing::debug!(code = event.code.as_str(), message = event.message, "the server complained");
                None
            }
        }
    }

    fn input_refused(&mut self, code: ErrorCode, now: Instant) -> Option<Effect> {
        let run = self.run.as_mut()?;
        match code {
            ErrorCode::StdinFull | ErrorCode::StdinGap => run.input.refused(now),
            // It has ended, and that it has is on its way; or it was not even started.
            ErrorCode::NothingRunning if run.phase != Phase::Running => run.input.refused(now),
            _ => run.input.close(),
        }
        Some(Effect::Progress)
    }

    /// An error status with its `error`.
    pub(super) fn refused(&mut self, refusal: StatusUpdate, code: ErrorCode, message: String) -> Option<Effect> {
        match refusal.status {
            Status::CreationError => Some(match code {
                ErrorCode::NotReady
                | ErrorCode::RateLimited
                | ErrorCode::VolumeUnavailable
                | ErrorCode::ServerStopping
                | ErrorCode::ServerRestarting => {
                    self.identity = None;
                    Effect::Again(Setback::Cut(message))
                }
                _ => Effect::Over(Error::Refused { code, message }),
            }),
            Status::RestoreError if matches!(self.link, Link::Opening { .. }) => Some(match code {
                ErrorCode::VolumeUnavailable => Effect::Again(Setback::Cut(message)),
                // It was there, and is waited for. Who comes for the first time is told, unless another server has room.
                ErrorCode::NoCapacity if self.settled => Effect::Again(Setback::Cut(message)),
                _ => Effect::Over(Error::Refused { code, message }),
            }),
            Status::PermissionDenialError => Some(Effect::Over(Error::Denied { message })),
            Status::Error if self.kill.is_some() => Some(Effect::Over(killed())),
            Status::Error => Some(Effect::Over(Error::SandboxEnded { reason: Ended::from(refusal.reason), message })),
            Status::ExecutionError | Status::ExecutionUnsupportedLanguageError => {
                let run = self.run.as_mut()?;
                let ours = match (&refusal.execution_id, run.phase) {
                    (Some(id), _) if run.id != *id => false,
                    (_, Phase::Requested { sent, .. }) => sent,
                    (_, Phase::Running) => code == ErrorCode::StartFailed,
                    (_, Phase::Done) => false,
                };
                if !ours || code == ErrorCode::TimedOut {
                    return None;
                }
                run.phase = Phase::Done;
                Some(Effect::Failed(Error::Refused { code, message }))
            }
            _ => None,
        }
    }
}

fn killed() -> Error {
    Error::SandboxEnded { reason: Ended::Killed, message: Ended::Killed.to_string() }
}
