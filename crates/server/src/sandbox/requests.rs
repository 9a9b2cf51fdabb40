//! What the driver does with requests of the client.

use bytes::Bytes;
use sandboxer_protocol::{
    ExecutionId,
    agent::{ExecSpec, ExitCause, Language, PerStream, TerminalSize, ToAgent},
    client::{About, BadRequest, ErrorCode, ExecuteRequest, OffsetsRequest, Request, Resumed, ServerEvent, Status},
    limits::OUTPUT_CREDIT_BYTES,
};
use tokio::time::Instant;
use tracing::debug;

use super::{
    admission::{Kind, Moment, Refusal, Verdict, admit},
    client::{Acknowledgement, FromClient},
    delivery::Delivery,
    driver::{Driver, Grace, KILL_ANSWERED, Outcome},
    execution::{Execution, Note, State},
};
use crate::spares::environment;

const HOME: &str = "/root";

impl Driver {
    pub(super) fn on_client(&mut self, from_client: FromClient) -> Option<Outcome> {
        let client = self.client.as_mut()?;
        client.heard();
        if client.leaving {
            match (&from_client, &client.delivery) {
                (FromClient::ReadToTheEnd, Some(delivery)) => {
                    let (number, handed, end) = (delivery.number, delivery.handed(), delivery.end_handed);
                    self.acknowledge(number, handed, end);
                }
                (FromClient::Received { id, upto, end }, _) => self.on_received(id, *upto, *end),
                _ => {}
            }
            return None;
        }
        match from_client {
            FromClient::Request(request) => self.on_request(request),
            FromClient::Bad(bad) => {
                self.end_grace();
                self.on_bad_request(&bad);
                None
            }
            FromClient::Received { id, upto, end } => {
                self.on_received(&id, upto, end);
                None
            }
            FromClient::ReadToTheEnd => None,
        }
    }

    /// A client says what it has of an execution. The client may mean another execution than the last one.
    fn on_received(&mut self, id: &ExecutionId, upto: PerStream<u64>, end: bool) {
        if let Some(execution) = self.execution.as_ref().filter(|execution| *execution.id == *id) {
            let (number, ended) = (execution.number, !execution.is_live());
            self.acknowledge(number, upto, end && ended);
        }
    }

    fn on_bad_request(&mut self, bad: &BadRequest) {
        let Some(client) = &mut self.client else { return };
        match bad.about {
            About::Execution => client.outbox.failure(Status::ExecutionError, bad.code, bad.message.clone()),
            About::Configuration => client.outbox.error(ErrorCode::LateConfiguration, late_configuration()),
            About::Other => client.outbox.error(bad.code, bad.message.clone()),
        }
    }

    /// Takes the request that waited, if what it waited for has come: the answer to another reconnect, or the end of the last execution.
    pub(super) fn take_waiting(&mut self) -> Option<Outcome> {
        let still = match &self.waiting {
            None => true,
            Some(Request::Reconnect(_)) => self.is_resuming(),
            Some(Request::Checkpoint { .. } | Request::Rollback(_)) if self.packing.is_some() => true,
            Some(_) => self.moment() == Moment::Finishing,
        };
        if still { None } else { self.waiting.take().and_then(|request| self.on_request(request)) }
    }

    /// The agent has been asked where output goes on, and has not answered.
    fn is_resuming(&self) -> bool {
        self.client.as_ref().and_then(|client| client.delivery.as_ref()).is_some_and(|delivery| !delivery.is_answered())
    }

    fn on_request(&mut self, request: Request) -> Option<Outcome> {
        if let Request::Reconnect(offsets) = request {
            // Each is answered, one after the other.
            if self.is_resuming() {
                self.waiting = Some(Request::Reconnect(offsets));
            } else {
                self.reconnect(offsets);
            }
            return None;
        }
        if let Request::Execute(execute) = &request
            && let Some(id) = &execute.execution_id
            && self.execution.as_ref().is_some_and(|execution| *execution.id == *id)
        {
            self.repeat_request();
            return None;
        }
        self.end_grace();
        if self.packing.is_some() && matches!(request, Request::Checkpoint { .. } | Request::Rollback(_)) {
            // Either is the end of what is being sent.
            self.waiting = Some(request);
            return None;
        }
        match admit(self.moment(), Kind::of(&request)) {
            Verdict::Go => self.carry_out(request),
            Verdict::Wait => {
                self.waiting = Some(request);
                None
            }
            Verdict::Refuse(refusal) => {
                self.refuse(refusal, &request);
                None
            }
        }
    }

    fn refuse(&mut self, refusal: Refusal, request: &Request) {
        let Some(client) = &mut self.client else { return };
        let outbox = &mut client.outbox;
        match refusal {
            Refusal::LateConfiguration => outbox.error(ErrorCode::LateConfiguration, late_configuration()),
            Refusal::ExecutionInProgress => {
                let message = "An execution is in progress. Wait for SANDBOX_EXECUTION_DONE, or end it with {\"action\":\"kill_process\"}.";
                outbox.failure(Status::ExecutionError, ErrorCode::ExecutionInProgress, message);
            }
            Refusal::NothingRunning => match request {
                Request::Stdin { .. } | Request::StdinEof { .. } => {
                    outbox.failure(Status::StdinError, ErrorCode::NothingRunning, "Nothing runs that could take this input.");
                }
                _ => outbox.error(ErrorCode::NothingRunning, "Nothing runs that this could be sent to."),
            },
            Refusal::CheckpointDuringExecution => {
                outbox.event(Status::Checkpointing);
                let message = "Cannot checkpoint while an execution is in progress.";
                outbox.failure(Status::ExecutionInProgressError, ErrorCode::ExecutionInProgress, message);
            }
        }
    }

    fn carry_out(&mut self, request: Request) -> Option<Outcome> {
        match request {
            Request::Execute(execute) => self.execute(*execute),
            Request::Stdin { data, offset } => self.stdin(data, offset),
            Request::StdinEof { offset } => {
                if let Some(execution) = &self.execution {
                    let offset = offset.unwrap_or(execution.stdin_next);
                    self.writer.queue(&ToAgent::StdinEof { number: execution.number, offset });
                }
            }
            Request::Resize { rows, cols } => {
                if let Some(execution) = &self.execution {
                    self.writer.queue(&ToAgent::Resize { number: execution.number, size: TerminalSize { rows, cols } });
                }
            }
            Request::Signal { signal } => {
                if let Some(execution) = &self.execution {
                    self.writer.queue(&ToAgent::Signal { number: execution.number, signal });
                }
            }
            Request::KillProcess => self.kill_process(),
            Request::KillSandbox => return Some(Outcome::KilledByClient),
            Request::Ack(offsets) => self.ack(&offsets),
            // Decided before it comes here.
            Request::Reconnect(_) | Request::Configure(_) | Request::File(_) => {}
            Request::Checkpoint { .. } => self.checkpoint(),
            Request::Snapshot { name } => self.snapshot(name),
            Request::Rollback(target) => self.roll_back(&target),
            Request::SnapshotFilesystem { name, replace } => self.snapshot_filesystem(&name, replace),
        }
        None
    }

    pub(super) fn tell(&mut self, status: Status) {
        if let Some(client) = &mut self.client {
            client.outbox.event(status);
        }
    }

    pub(super) fn fail(&mut self, status: Status, code: ErrorCode, message: &str) {
        if let Some(client) = &mut self.client {
            client.outbox.failure(status, code, message);
        }
    }

    fn execute(&mut self, request: ExecuteRequest) {
        let Some(client) = &mut self.client else { return };
        let language = match request.language.as_str() {
            "python" => Language::Python,
            "bash" => Language::Bash,
            other => {
                let other: String = other.chars().take(64).collect();
                let message = format!("The language {other:?} is not supported. There are \"python\" and \"bash\".");
                client.outbox.failure(Status::ExecutionUnsupportedLanguageError, ErrorCode::UnsupportedLanguage, message);
                client.outbox.event(Status::ExecutionDone);
                return;
            }
        };
        let number = self.next_number;
        self.next_number = number.saturating_add(1);
        let timeout = request.timeout.and_then(|timeout| timeout.nonzero());
        let note = Note {
            encoding: request.encoding.unwrap_or_default(),
            tty: request.tty.is_some(),
            timeout_ms: timeout.map(|timeout| u64::try_from(timeout.as_millis()).unwrap_or(u64::MAX)),
            deadline_unix_ms: timeout.map(|timeout| {
                jiff::Timestamp::now().as_millisecond().saturating_add(i64::try_from(timeout.as_millis()).unwrap_or(i64::MAX))
            }),
        };
        let config = &self.record.config;
        let mut env = environment();
        env.extend(config.env.clone());
        let own = request.env.unwrap_or_default();
        let only_here = own.keys().cloned().collect();
        env.extend(own);
        let spec = ExecSpec {
            number,
            id: request.execution_id.unwrap_or_else(ExecutionId::random),
            language,
            env,
            only_here,
            cwd: request.cwd.or_else(|| config.cwd.clone()).unwrap_or_else(|| HOME.to_owned()),
            stdin: request.stdin.unwrap_or(true),
            tty: request.tty.map(|tty| TerminalSize { rows: tty.rows, cols: tty.cols }),
            detached_output: config.detached_output,
            // A struct of plain fields: writing it can't fail.
            note: serde_json::to_string(&note).unwrap_or_default(),
        };
        debug!(execution = %spec.id, ?language, "execution asked for");
        let execution = Execution::new(number, spec.id.clone(), note, timeout);
        let delivery = Delivery::from_the_start(number, execution.id.clone(), execution.note.encoding);
        self.writer.queue_exec(&spec, request.code.as_bytes());
        self.writer.queue(&ToAgent::Credit { number, upto: delivery.granted() });
        client.delivery = Some(delivery);
        client.peeks = request.peek == Some(true);
        self.execution = Some(execution);
        self.metrics.executions.inc();
    }

    fn stdin(&mut self, data: Bytes, offset: Option<u64>) {
        let Some(execution) = &mut self.execution else { return };
        execution.stdin_acks |= offset.is_some();
        let at = offset.unwrap_or(execution.stdin_next);
        // One frame a message, so that it is taken whole or not at all: a client that sends no offsets could not go on from its middle.
        // An empty piece with an offset asks how far input was taken.
        self.writer.queue_stdin(execution.number, at, &data);
        // What lies behind a gap will be refused, and does not count.
        if at <= execution.stdin_next {
            execution.stdin_next = execution.stdin_next.max(at.saturating_add(data.len() as u64));
        }
    }

    fn kill_process(&mut self) {
        match &mut self.execution {
            Some(execution) if execution.is_live() => {
                self.kill_execution(ExitCause::ForceKilled);
            }
            Some(execution)
                if self.client.as_ref().and_then(|client| client.delivery.as_ref()).is_some_and(|delivery| delivery.end_due) =>
            {
                execution.force_killed = true;
            }
            _ => self.tell(Status::ExecutionForceKilled),
        }
    }

    pub(super) fn kill_execution(&mut self, cause: ExitCause) {
        if let Some(execution) = &self.execution {
            self.writer.queue(&ToAgent::Kill { number: execution.number, cause: Some(cause) });
            self.kill_deadline.get_or_insert_with(|| Instant::now() + KILL_ANSWERED);
        }
    }

    fn ack(&mut self, offsets: &OffsetsRequest) {
        let Some(execution) = self.known_execution(offsets) else { return };
        let upto = PerStream { stdout: offsets.stdout_offset.unwrap_or(0), stderr: offsets.stderr_offset.unwrap_or(0) };
        let (number, shown) = (execution.number, execution.shown);
        if beyond(upto, shown) {
            self.tell_error(ErrorCode::InvalidField, future_offset(shown));
            return;
        }
        self.acknowledge(number, upto, false);
    }

    /// The execution that a client means, or an error to it. None also: nothing was ever run.
    fn known_execution(&mut self, offsets: &OffsetsRequest) -> Option<&Execution> {
        let id = offsets.execution_id.as_ref();
        let known = self.execution.as_ref().is_some_and(|execution| id.is_none_or(|id| *execution.id == *id));
        if !known && let Some(id) = id {
            let message = format!("The execution {id} is neither the running nor the last one of this sandbox.");
            self.tell_error(ErrorCode::UnknownExecution, message);
        }
        self.execution.as_ref().filter(|_| known)
    }

    fn reconnect(&mut self, offsets: OffsetsRequest) {
        if self.execution.is_none() && offsets.execution_id.is_none() {
            if let Some(client) = &mut self.client {
                client.grace = Grace::Over;
                client.outbox.event(ServerEvent::Resumed(Resumed::default()));
            }
            return;
        }
        if self.known_execution(&offsets).is_none() {
            self.end_grace();
            return;
        }
        self.resume(Some(offsets));
    }

    /// The client said something else first: it does not tell where it goes on.
    fn end_grace(&mut self) {
        if self.client.as_ref().is_some_and(|client| client.grace != Grace::Over) {
            self.resume(None);
        }
    }

    /// A request that was sent before: what it started is told again, and nothing runs twice.
    fn repeat_request(&mut self) {
        let Some(execution) = &self.execution else { return };
        let update = execution.update(Status::ExecutionRunning);
        let told_when_it_starts = matches!(execution.state, State::Asked | State::Failed(_));
        let Some(client) = &mut self.client else { return };
        if !told_when_it_starts {
            client.outbox.event(ServerEvent::StatusUpdate(update));
        }
        match &client.delivery {
            // It is being delivered on this very connection.
            Some(delivery) if delivery.number == execution.number && delivery.end_due => client.grace = Grace::Over,
            _ => {
                // A collector has to know what it will not get. Other clients see it by the offsets of the output.
                client.announce_resume = client.port.acknowledgement == Acknowledgement::Explicit;
                self.resume(None);
                if let Some(delivery) = self.client.as_mut().and_then(|client| client.delivery.as_mut()) {
                    delivery.end_due = true;
                }
            }
        }
    }

    /// Asks the agent to go on from where the client says, or from what is not yet acknowledged.
    pub(super) fn resume(&mut self, offsets: Option<OffsetsRequest>) {
        let (Some(execution), Some(client)) = (&self.execution, &mut self.client) else { return };
        client.grace = Grace::Over;
        let acknowledged = execution.acknowledged;
        let mut from = acknowledged;
        // A client that asks is told the end, whoever was told it before.
        let end_due = !execution.end_acknowledged || offsets.is_some();
        if let Some(offsets) = offsets {
            client.announce_resume = true;
            client.peeks = offsets.peek == Some(true);
            from = PerStream {
                stdout: offsets.stdout_offset.unwrap_or(acknowledged.stdout),
                stderr: offsets.stderr_offset.unwrap_or(acknowledged.stderr),
            };
            if beyond(from, execution.shown) {
                client.outbox.error(ErrorCode::InvalidField, future_offset(execution.shown));
                from = acknowledged;
            }
        }
        client.wanted = Some(from);
        client.outbox.take_back_output();
        if matches!(execution.state, State::Failed(_)) {
            if end_due || client.announce_resume {
                self.tell_failure();
            }
            return;
        }
        self.resumes += 1;
        let (number, sequence) = (execution.number, self.resumes);
        client.delivery = Some(Delivery::resuming(number, execution.id.clone(), execution.note.encoding, end_due, sequence));
        self.writer.queue(&ToAgent::Resume { number, from, credit: OUTPUT_CREDIT_BYTES, sequence });
    }
}

fn beyond(offsets: PerStream<u64>, shown: PerStream<u64>) -> bool {
    offsets.stdout > shown.stdout || offsets.stderr > shown.stderr
}

fn future_offset(shown: PerStream<u64>) -> String {
    format!("An offset is beyond what was ever sent: stdout ends at {} and stderr at {} so far.", shown.stdout, shown.stderr)
}

fn late_configuration() -> String {
    "The sandbox has been made: a configuration must be the first message of /create. Create another sandbox for it.".to_owned()
}
