//! What the driver does with frames of the agent.

use sandboxer_protocol::{
    agent::{FromAgent, FromAgentFrame, PerStream, StdinRefusal},
    client::{ErrorCode, ErrorEvent, OffsetsEvent, Resumed, ServerEvent, Status, StdinAck},
};
use sandboxer_runtime::{End, link::LinkError};
use tokio::time::Instant;
use tracing::{debug, info, warn};

use super::{
    client::Outgoing,
    delivery::Delivery,
    driver::{Driver, END_EXPLAINED, Outcome},
    execution::State,
    files::Packed,
};

const STDIN_FULL: &str = "The program has not read its input, and no more of it is held. Send it again later.";

impl Driver {
    pub(super) fn on_frame(&mut self, frame: Result<FromAgentFrame, LinkError>) -> Option<Outcome> {
        let problem = match frame {
            Ok(FromAgentFrame::Control(FromAgent::TunnelOpen { stream, credit })) => match self.on_stream_opened(stream, credit) {
                Ok(()) => return None,
                Err(violation) => violation.to_owned(),
            },
            Ok(FromAgentFrame::Control(message)) => {
                self.on_control(message);
                return None;
            }
            Ok(FromAgentFrame::Output { number, stream, offset, data }) => {
                let client = self.client.as_mut()?;
                let delivery = client.delivery.as_mut().filter(|delivery| delivery.number == number)?;
                match delivery.output(stream, offset, data) {
                    Ok(piece) => {
                        if let (Some(piece), Some(execution)) = (piece, &mut self.execution) {
                            let shown = execution.shown.get_mut(stream);
                            *shown = (*shown).max(piece.end);
                            client.outbox.push(Outgoing::Output(piece));
                        }
                        self.try_finish();
                        return None;
                    }
                    Err(violation) => violation.to_string(),
                }
            }
            Ok(FromAgentFrame::Files { sequence, offset, data }) => match self.on_files(sequence, offset, data) {
                Ok(()) => return None,
                Err(violation) => violation.to_owned(),
            },
            Ok(FromAgentFrame::Tunnel { stream, data }) => match self.on_stream_data(stream, &data) {
                Ok(()) => return None,
                Err(violation) => violation.to_owned(),
            },
            Err(LinkError::Closed) => {
                self.link_closed = Some(Instant::now() + END_EXPLAINED);
                return None;
            }
            Err(error) => error.to_string(),
        };
        warn!(problem, "the agent broke its protocol");
        Some(Outcome::Died(End::Failed(format!("the agent broke its protocol: {problem}"))))
    }

    fn on_control(&mut self, message: FromAgent) {
        match message {
            FromAgent::Started { number, by_spare, .. } => {
                if by_spare {
                    self.metrics.executions_by_spare.inc();
                }
                let Some(execution) = self.execution.as_mut().filter(|execution| execution.number == number) else { return };
                if matches!(execution.state, State::Asked) {
                    execution.state = State::Running;
                    let update = execution.update(Status::ExecutionRunning);
                    if let Some(client) = &mut self.client {
                        client.outbox.event(ServerEvent::StatusUpdate(update));
                    }
                }
            }
            FromAgent::StartFailed { number, message } => self.on_start_failed(number, &message),
            FromAgent::Exited { number, exit } => {
                let Some(execution) = self.execution.as_mut().filter(|execution| execution.number == number && execution.is_live()) else {
                    return;
                };
                self.metrics.execution_seconds.observe(execution.asked_at.elapsed().as_secs_f64());
                debug!(execution = %execution.id, code = exit.code, signal = exit.signal, "execution ended");
                execution.state = State::Ended(exit);
                self.asks.ended(number, &execution.id);
                self.kill_deadline = None;
                self.try_finish();
            }
            FromAgent::Resumed { number, from, end, stdin_offset, sequence } => {
                self.on_resumed(number, sequence, (from, end), stdin_offset)
            }
            FromAgent::StdinAck { number, offset } => {
                let Some(execution) = self.execution.as_ref().filter(|execution| execution.number == number && execution.stdin_acks) else {
                    return;
                };
                let ack = StdinAck { offset, execution_id: Some((*execution.id).clone()) };
                if let Some(client) = &mut self.client {
                    client.outbox.stdin_ack(ack);
                }
            }
            FromAgent::StdinRefused { number, reason, taken, .. } => self.on_stdin_refused(number, taken, reason),
            FromAgent::MemoryKill { command, resident_bytes } => {
                let mib = resident_bytes / (1024 * 1024);
                info!(command, mib, "a process was killed because memory ran out");
                let command: String = command.chars().take(64).collect();
                let message =
                    format!("The sandbox came near its memory limit: its largest process, {command:?} with {mib} MiB, was killed.");
                self.tell_notice(ErrorCode::OutOfMemory, message);
            }
            FromAgent::NamespaceRestarted => {
                info!("the guest ended its own namespace");
                let message = "Every process of the sandbox was killed from inside. Its files are kept, and it goes on.";
                self.tell_notice(ErrorCode::ProcessesLost, message);
            }
            FromAgent::Pong { value, alone } => self.on_agent_pong(value, alone),
            FromAgent::FilesPacked { sequence, bytes, held_us, hold_us, read_us } => {
                self.on_files_end(sequence, Ok(Packed { bytes, held_us, hold_us, read_us }));
            }
            FromAgent::FilesFailed { sequence, message, .. } => self.on_files_end(sequence, Err(message)),
            FromAgent::FileOpened { sequence, about, start, length } => self.on_file_opened(sequence, about, start, length),
            FromAgent::FileDone { sequence, bytes, about } => self.on_file_done(sequence, bytes, about),
            FromAgent::FileFailed { sequence, fault, message, size } => self.on_file_failed(sequence, fault, &message, size),
            FromAgent::TunnelOpened { stream, credit } => self.streams.tunnel.opened(stream, credit),
            FromAgent::TunnelCredit { stream, upto } => self.streams.tunnel.credit(stream, upto),
            FromAgent::TunnelEnd { stream } => self.streams.tunnel.ended(stream),
            FromAgent::TunnelReset { stream, reason } => self.on_stream_reset(stream, reason),
            // Carried out by the caller, since it may break the protocol.
            FromAgent::TunnelOpen { .. } => {}
            FromAgent::FilesUnpacked { .. } => debug!("files were unpacked that nobody sent"),
            FromAgent::HelloReply { .. } => debug!("an answer to an opening that nobody made"),
        }
    }

    fn on_start_failed(&mut self, number: u64, message: &str) {
        let Some(execution) = self.execution.as_mut().filter(|execution| execution.number == number && execution.is_live()) else { return };
        execution.state = State::Failed(message.chars().take(1000).collect());
        self.kill_deadline = None;
        if self.client.as_ref().is_some_and(|client| client.delivery.is_some()) {
            self.tell_failure();
        }
    }

    /// Tells that the execution could not be started. The agent does not know of it any longer, so it is not asked.
    pub(super) fn tell_failure(&mut self) {
        let (Some(execution), Some(client)) = (&self.execution, &mut self.client) else { return };
        let State::Failed(why) = &execution.state else { return };
        client.wanted = None;
        if std::mem::take(&mut client.announce_resume) {
            client.outbox.event(ServerEvent::Resumed(Resumed {
                execution_id: Some((*execution.id).clone()),
                running: Some(false),
                stdout_offset: Some(0),
                stderr_offset: Some(0),
                stdin_offset: Some(0),
                ..Resumed::default()
            }));
        }
        let mut delivery = Delivery::from_the_start(execution.number, execution.id.clone(), execution.note.encoding);
        delivery.end_due = false;
        client.delivery = Some(delivery);
        client.outbox.push(Outgoing::End(execution.failure(why)));
    }

    fn on_resumed(&mut self, number: u64, sequence: u64, (from, end): (PerStream<u64>, PerStream<u64>), stdin_offset: u64) {
        let (Some(execution), Some(client)) = (&mut self.execution, &mut self.client) else { return };
        let Some(delivery) = client.delivery.as_mut().filter(|delivery| delivery.number == number) else { return };
        if !delivery.answered(sequence, from) {
            return;
        }
        let wanted = client.wanted.take();
        if client.announce_resume {
            client.announce_resume = false;
            client.outbox.event(ServerEvent::Resumed(Resumed {
                execution_id: Some((*execution.id).clone()),
                running: Some(execution.is_live()),
                stdout_offset: Some(from.stdout),
                stderr_offset: Some(from.stderr),
                stdin_offset: Some(stdin_offset),
                stdout_end: Some(end.stdout),
                stderr_end: Some(end.stderr),
                tty: execution.note.tty.then_some(true),
            }));
        }
        if wanted.is_some_and(|wanted| wanted.stdout < from.stdout || wanted.stderr < from.stderr) {
            let mut error = ErrorEvent::new(
                ErrorCode::OutputGone,
                format!(
                    "Output before byte {} of stdout and {} of stderr is no longer held. It goes on from there.",
                    from.stdout, from.stderr
                ),
            );
            error.available_from = Some(OffsetsEvent { stdout_offset: from.stdout, stderr_offset: from.stderr });
            client.outbox.event(ServerEvent::Error(error));
        }
        self.try_finish();
    }

    fn on_stdin_refused(&mut self, number: u64, taken: u64, reason: StdinRefusal) {
        let Some(execution) = self.execution.as_mut().filter(|execution| execution.number == number) else { return };
        execution.stdin_next = taken;
        let (code, message) = match reason {
            // Without offsets there is no gap of the client's making: this came behind what did not fit.
            StdinRefusal::Gap if !execution.stdin_acks => (ErrorCode::StdinFull, STDIN_FULL),
            StdinRefusal::Full => (ErrorCode::StdinFull, STDIN_FULL),
            StdinRefusal::Closed => (ErrorCode::StdinClosed, "The program's input is at its end."),
            StdinRefusal::Gap => {
                (ErrorCode::StdinGap, "Input before this piece is missing. Send it again from the last acknowledged offset.")
            }
        };
        // A client that has not read the last such errors has nothing of another one.
        if let Some(client) = self.client.as_mut().filter(|client| !client.outbox.is_full()) {
            client.outbox.failure(Status::StdinError, code, message);
        }
    }

    /// Once all output of an ended execution is on its way, tells its end, and then takes the request that waited for it.
    pub(super) fn try_finish(&mut self) {
        let (Some(execution), Some(client)) = (&mut self.execution, &mut self.client) else { return };
        let Some(exit) = execution.exit() else { return };
        let Some(delivery) = client.delivery.as_mut().filter(|delivery| delivery.number == execution.number) else { return };
        let Some(pieces) = delivery.finish(exit.end) else { return };
        let events = delivery.end_due.then(|| execution.finale(exit));
        delivery.end_due = false;
        for piece in pieces {
            let shown = execution.shown.get_mut(piece.stream);
            *shown = (*shown).max(piece.end);
            client.outbox.push(Outgoing::Output(piece));
        }
        if let Some(events) = events {
            client.outbox.push(Outgoing::End(events));
        }
    }
}
