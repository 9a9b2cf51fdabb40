//! A fake sandbox in a file, and out of it again.

use std::{collections::VecDeque, fs, path::Path, time::Duration};

use bytes::Bytes;
use sandboxer_agent::{input::Input, window::Window};
use sandboxer_protocol::agent::{AgentConfig, ExecSpec, ExecutionNumber, Exit, Marker, PerStream, Stream};
use serde::{Deserialize, Serialize};
use tokio::time::Instant;

use super::{
    agent::{Agent, Execution},
    program::{Disk, Program},
};
use crate::RuntimeError;

const FILE: &str = "checkpoint.img";

#[derive(Serialize, Deserialize)]
struct Saved {
    marker: Marker,
    disk: Disk,
    execution: Option<SavedExecution>,
    #[serde(default)]
    last_number: Option<ExecutionNumber>,
}

#[derive(Serialize, Deserialize)]
struct SavedExecution {
    spec: ExecSpec,
    program: Program,
    windows: PerStream<SavedStream>,
    input_taken: u64,
    input_held: Vec<u8>,
    input_ended: bool,
    pending: Vec<(Stream, Vec<u8>)>,
    sleeps: Option<Duration>,
    ran: Duration,
    exit: Option<Exit>,
    #[serde(default)]
    end_acknowledged: bool,
}

#[derive(Serialize, Deserialize)]
struct SavedStream {
    held_from: u64,
    held: Vec<u8>,
}

impl Agent {
    pub(super) fn save(&mut self, into: &Path) -> Result<(), RuntimeError> {
        let failed = |why: String| RuntimeError::Failed { what: "save the sandbox", why };
        let execution = self.execution.as_mut().map(SavedExecution::of);
        let saved = Saved { marker: self.marker, disk: self.disk.clone(), execution, last_number: self.last_number };
        let json = serde_json::to_vec(&saved).map_err(|error| failed(error.to_string()))?;
        fs::create_dir_all(into)
            .and_then(|()| fs::write(into.join(FILE), json))
            .map_err(|error| failed(format!("{}: {error}", into.display())))
    }

    pub(super) fn load(from: &Path, config: &AgentConfig) -> Result<Self, RuntimeError> {
        let failed = |why: String| RuntimeError::Failed { what: "restore the sandbox", why };
        let file = from.join(FILE);
        let json = fs::read(&file).map_err(|error| failed(format!("{}: {error}", file.display())))?;
        let saved: Saved = serde_json::from_slice(&json).map_err(|error| failed(format!("{}: {error}", file.display())))?;
        // As in a real one, what the agent was told when it started is part of its memory.
        let mut agent = Self::new(saved.marker, config);
        agent.disk = saved.disk;
        agent.last_number = saved.last_number;
        agent.execution = saved.execution.map(|execution| execution.into_execution(config));
        Ok(agent)
    }
}

impl SavedExecution {
    fn of(execution: &mut Execution) -> Self {
        let now = Instant::now();
        let (stdout, stderr) = (execution.credit.stdout, execution.credit.stderr);
        let mut input_held = Vec::new();
        while let Some(bytes) = execution.input.front().map(<[u8]>::to_vec) {
            execution.input.fed(bytes.len());
            input_held.extend(bytes);
        }
        let saved = Self {
            spec: execution.spec.clone(),
            program: execution.program.clone(),
            windows: PerStream { stdout: held(&mut execution.windows.stdout, stdout), stderr: held(&mut execution.windows.stderr, stderr) },
            input_taken: execution.input.taken(),
            input_held,
            input_ended: execution.input.ended(),
            pending: execution.pending.iter().map(|(stream, bytes)| (*stream, bytes.to_vec())).collect(),
            sleeps: execution.wake.map(|wake| wake.saturating_duration_since(now)),
            ran: now.saturating_duration_since(execution.started),
            exit: execution.exit.clone(),
            end_acknowledged: execution.end_acknowledged,
        };
        execution.input = saved.input();
        saved
    }

    fn input(&self) -> Input {
        // It can't be asked to begin elsewhere, so it is given what was there before and that is fed away.
        let mut input = Input::new(u64::MAX);
        let before = usize::try_from(self.input_taken).unwrap_or(usize::MAX).saturating_sub(self.input_held.len());
        input.take(0, vec![0; before].into()).ok();
        while let Some(count) = input.front().map(<[u8]>::len) {
            input.fed(count);
        }
        input.take(before as u64, self.input_held.clone().into()).ok();
        if self.input_ended {
            input.end(self.input_taken).ok();
        }
        input
    }

    fn into_execution(self, config: &AgentConfig) -> Execution {
        let now = Instant::now();
        let input = self.input();
        let window = |saved: &SavedStream| refilled(saved, config.output_window_bytes);
        Execution {
            windows: PerStream { stdout: window(&self.windows.stdout), stderr: window(&self.windows.stderr) },
            spec: self.spec,
            program: self.program,
            credit: PerStream::default(),
            attached: false,
            input,
            pending: self.pending.into_iter().map(|(stream, bytes)| (stream, Bytes::from(bytes))).collect::<VecDeque<_>>(),
            wake: self.sleeps.map(|left| now + left),
            started: now.checked_sub(self.ran).unwrap_or(now),
            exit: self.exit,
            end_acknowledged: self.end_acknowledged,
        }
    }
}

/// What a window holds, without a change that anybody could notice.
fn held(window: &mut Window, credit: u64) -> SavedStream {
    let (sent, paused, held_from) = (window.sent(), window.is_paused(), window.held_from());
    window.resume(held_from, u64::MAX);
    let mut held = Vec::new();
    while let Some(piece) = window.next_piece(usize::MAX) {
        let length = piece.len();
        piece.data.iter().for_each(|part| held.extend_from_slice(part));
        window.mark_sent(length);
    }
    window.resume(sent, credit.saturating_sub(sent));
    if paused {
        window.pause();
    }
    SavedStream { held_from, held }
}

fn refilled(saved: &SavedStream, capacity: u64) -> Window {
    let mut window = Window::new(capacity);
    // It can't be asked to begin elsewhere, so what was there before is put in and let go of again.
    while window.end() < saved.held_from {
        let count = usize::try_from(saved.held_from - window.end()).unwrap_or(usize::MAX).min(window.space());
        window.append(&vec![0; count]);
        let end = window.end();
        window.resume(end, 0);
        window.ack(end);
    }
    window.append(&saved.held);
    window.resume(saved.held_from, 0);
    window.pause();
    window
}
