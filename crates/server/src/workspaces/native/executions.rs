//! Executions for those who have no WebSocket: for as long as one is watched, who asked for it is the client of the sandbox. As with any other client it
//! keeps the sandbox only while it is there: where somebody waits for what is collected.

use bytes::Bytes;
use sandboxer_protocol::{
    ExecutionId, SandboxId,
    agent::PerStream,
    client::{ErrorCode, ExecuteRequest, Request, ServerEvent, Status},
};
use tokio::sync::{mpsc, watch};
use tokio_util::sync::{CancellationToken, DropGuard};

use super::{Native, NativeError, travel::RESTS};
use crate::sandbox::{
    asks::{Ask, Told},
    client::{Acknowledgement, ClientPort, FromClient, INCOMING_REQUESTS, Incoming, OUTGOING_MESSAGES, Outgoing, Piece},
    driver::Attachment,
};

/// Room that is left in the agent's window when a collector acknowledges: pieces of unfinished characters stay below it.
const WINDOW_RESERVE_BYTES: u64 = 64 * 1024;

/// What is told of an execution.
pub(crate) enum ExecutionWord {
    Event(ServerEvent),
    Output(Piece),
}

/// An execution that is watched. Dropped, it goes on, and who attaches finds it.
pub(crate) struct Watched {
    pub(crate) id: ExecutionId,
    outgoing: mpsc::Receiver<Outgoing>,
    pongs: watch::Sender<Bytes>,
    /// Output before these offsets was passed on.
    received: PerStream<u64>,
    /// Output before these offsets was acknowledged.
    acknowledged: PerStream<u64>,
    /// So much output may be unacknowledged. A request that is sent again gets it again. More than the agent's window would have the
    /// program wait for ever.
    hold: u64,
    /// How many wait for what is told; none: whoever reads this does.
    waiting_for_it: Option<watch::Receiver<usize>>,
    /// A ping that came while nobody waited.
    unanswered: Option<Bytes>,
    /// Events that came together.
    waiting: std::collections::VecDeque<ServerEvent>,
    /// It was heard that it runs: what comes from here on is its own.
    begun: bool,
    ended: bool,
    /// The end of the execution was passed on, not only the end of the connection.
    end_received: bool,
    incoming: mpsc::Sender<Incoming>,
    _open: DropGuard,
}

impl Native {
    /// Ends what runs, or sends it a signal, whoever its client is.
    pub(crate) async fn kill_execution(&self, id: SandboxId, who: Option<&str>, signal: Option<i32>) -> Result<ExecutionId, NativeError> {
        match self.running(id, who).await?.ask(Ask::Kill { signal }).await {
            Some(Ok(Told::Killed(execution))) => Ok((*execution).clone()),
            Some(Ok(_)) => Err(NativeError::Because(ErrorCode::Internal, "Something else was done.".to_owned())),
            Some(Err(refused)) => Err(refused.into()),
            None => Err(NativeError::NotReady(RESTS)),
        }
    }

    /// Has a sandbox that nobody is attached to run something. `input` is all that it gets to read. Dropped at any point, it leaves the sandbox to others.
    pub(crate) async fn execute(
        &self,
        id: SandboxId,
        who: Option<&str>,
        mut execute: ExecuteRequest,
        input: Option<String>,
        waiting_for_it: Option<watch::Receiver<usize>>,
    ) -> Result<Watched, NativeError> {
        let handle = self.running(id, who).await?;
        let (to_driver, incoming) = mpsc::channel(INCOMING_REQUESTS);
        let (to_client, outgoing) = mpsc::channel(OUTGOING_MESSAGES);
        let (pongs, pong) = watch::channel(Bytes::new());
        let closing = CancellationToken::new();
        let acknowledgement = Acknowledgement::Explicit;
        let port = ClientPort { incoming, pongs: pong, outgoing: to_client, acknowledgement, _closing: closing.clone().drop_guard() };
        match handle.attach(port, Vec::new()).await {
            None => return Err(NativeError::NotReady(RESTS)),
            Some(Attachment::InUse) => return Err(NativeError::InUse),
            Some(Attachment::Attached) => {}
        }
        let execution_id = execute.execution_id.get_or_insert_with(ExecutionId::random).clone();
        execute.stdin = Some(input.is_some());
        let mut requests = vec![Request::Execute(Box::new(execute))];
        if let Some(input) = input {
            if !input.is_empty() {
                requests.push(Request::Stdin { data: input.into(), offset: None });
            }
            requests.push(Request::StdinEof { offset: None });
        }
        for request in requests {
            let message = Incoming { message: FromClient::Request(request), _room: None };
            to_driver.send(message).await.map_err(|_| NativeError::NotReady(RESTS))?;
        }
        Ok(Watched {
            id: execution_id,
            outgoing,
            pongs,
            received: PerStream::default(),
            acknowledged: PerStream::default(),
            // A client that reads events has what it was sent. One that waits for the end has nothing before it.
            hold: handle
                .output_window_bytes
                .filter(|_| waiting_for_it.is_some())
                .map_or(0, |window| window.saturating_sub(WINDOW_RESERVE_BYTES)),
            waiting_for_it,
            unanswered: None,
            waiting: std::collections::VecDeque::new(),
            begun: false,
            ended: false,
            end_received: false,
            incoming: to_driver,
            _open: closing.drop_guard(),
        })
    }
}

impl Watched {
    /// Whether it was heard that it runs.
    pub(crate) fn has_begun(&self) -> bool {
        self.begun
    }

    /// The next that is told of it; none: it is over, or the sandbox is. Cancel-safe.
    pub(crate) async fn next(&mut self) -> Option<ExecutionWord> {
        loop {
            while let Some(event) = self.waiting.pop_front() {
                if let Some(event) = self.own(event) {
                    return Some(ExecutionWord::Event(event));
                }
            }
            if self.ended {
                self.acknowledge(self.end_received).await;
                return None;
            }
            if self.is_full() && self.is_waited_for() {
                self.acknowledge(false).await;
            }
            let message = tokio::select! {
                biased;
                message = self.outgoing.recv() => message?,
                () = somebody(self.waiting_for_it.as_mut()), if self.unanswered.is_some() || self.is_full() => {
                    self.answer_pings();
                    continue;
                }
            };
            match message {
                Outgoing::Event(event) => self.waiting.push_back(event),
                Outgoing::End(events) if self.is_of_another(&events) => {}
                Outgoing::End(events) => self.waiting.extend(events),
                Outgoing::Output(piece) if *piece.execution == self.id => {
                    self.begun = true;
                    *self.received.get_mut(piece.stream) = piece.end;
                    return Some(ExecutionWord::Output(piece));
                }
                // Of an execution before: nobody here may acknowledge it.
                Outgoing::Output(_) => {}
                Outgoing::Ping(payload) => {
                    self.unanswered = Some(payload);
                    self.answer_pings();
                    if self.hold == 0 && self.received != self.acknowledged {
                        self.acknowledge(false).await;
                    }
                }
                Outgoing::Close(_) => self.ended = true,
            }
        }
    }

    /// Whether it is there as a client has to be.
    fn is_waited_for(&self) -> bool {
        self.waiting_for_it.as_ref().is_none_or(|waiting| *waiting.borrow() > 0)
    }

    /// Who does not answer is not there, and makes room for those who are.
    fn answer_pings(&mut self) {
        if self.is_waited_for()
            && let Some(payload) = self.unanswered.take()
        {
            self.pongs.send_replace(payload);
        }
    }

    /// The program would wait for room.
    fn is_full(&self) -> bool {
        let held = |received: u64, acknowledged: u64| received.saturating_sub(acknowledged) >= self.hold;
        self.hold > 0 && (held(self.received.stdout, self.acknowledged.stdout) || held(self.received.stderr, self.acknowledged.stderr))
    }

    /// Says which output was passed on. `end`: the next client need not hear the end. Output that a collector holds stays with the
    /// agent, so that the same request gets it again. Cancel-safe.
    async fn acknowledge(&mut self, end: bool) {
        if !self.is_waited_for() {
            return;
        }
        let upto = if self.ended && self.hold > 0 { self.acknowledged } else { self.received };
        // A driver that has ended needs no word.
        if let Ok(permit) = self.incoming.reserve().await {
            permit.send(Incoming { message: FromClient::Received { id: self.id.clone(), upto, end }, _room: None });
        }
        self.acknowledged = upto;
    }

    /// What tells the end of an execution before this one.
    fn is_of_another(&self, events: &[ServerEvent]) -> bool {
        events.iter().any(
            |event| matches!(event, ServerEvent::StatusUpdate(update) if update.execution_id.as_ref().is_some_and(|id| *id != self.id)),
        )
    }

    /// None: it is of another execution, or of the sandbox.
    fn own(&mut self, event: ServerEvent) -> Option<ServerEvent> {
        if let ServerEvent::Error(_) = &event {
            // It was never started, so nothing follows.
            self.ended |= !self.begun;
            self.end_received |= !self.begun;
        }
        if let ServerEvent::Resumed(resumed) = &event {
            let from = PerStream { stdout: resumed.stdout_offset.unwrap_or(0), stderr: resumed.stderr_offset.unwrap_or(0) };
            (self.received, self.acknowledged) = (from, from);
        }
        let ServerEvent::StatusUpdate(update) = &event else { return Some(event) };
        if update.execution_id.as_ref().is_some_and(|id| *id != self.id) {
            return None;
        }
        match update.status {
            Status::ExecutionRunning => self.begun = true,
            Status::ExecutionDone => (self.ended, self.end_received) = (true, true),
            Status::Running => return None,
            _ => {}
        }
        Some(event)
    }
}

/// Returns when somebody waits.
async fn somebody(waiting: Option<&mut watch::Receiver<usize>>) {
    if let Some(waiting) = waiting
        && waiting.wait_for(|waiting| *waiting > 0).await.is_ok()
    {
        return;
    }
    std::future::pending().await
}
