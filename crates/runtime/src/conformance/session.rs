//! A sandbox under test and the conversation with it.

use std::{collections::BTreeMap, fs, path::PathBuf, time::Duration};

use rand::random;
use sandboxer_protocol::{
    ExecutionId, SandboxId,
    agent::{
        AgentConfig, DetachedOutput, ExecSpec, Exit, FromAgent, FromAgentFrame, Language, MARKER_BYTES, Marker, PerStream, Stream, ToAgent,
    },
};

use super::Subject;
use crate::{
    HostResources, Instance, Launch, Runtime,
    link::{self, Link, LinkError},
};

/// Far longer than anything takes on a loaded machine.
const LIMIT: Duration = Duration::from_secs(60);
/// Credit beyond what any of these programs writes.
pub(super) const PLENTY: u64 = 1 << 40;
/// Of every resume.
pub(super) const SEQUENCE: u64 = 77;
/// Small, so that filling it takes no time.
pub(super) const WINDOW: u64 = 256 * 1024;

/// A sandbox with its conversation and all that came out of the execution so far.
pub struct Session {
    pub launch: Launch,
    pub link: Link,
    pub received: PerStream<Vec<u8>>,
    pub exit: Option<Exit>,
    marker: Marker,
    pub number: u64,
    // Removed with everything in it when the test is over.
    _home: tempfile::TempDir,
}

/// What a sandbox is started with, in a new directory.
pub(super) fn launch(subject: &dyn Subject) -> (Launch, Marker, tempfile::TempDir) {
    let home = tempfile::tempdir().expect("a directory for the test");
    let marker = Marker::new(random::<[u8; MARKER_BYTES]>());
    let config = AgentConfig {
        marker: marker.to_hex(),
        disk_bytes: 64 << 20,
        disk_inodes: 10_000,
        memory_bytes: None,
        pids: None,
        output_window_bytes: WINDOW,
        stdin_window_bytes: WINDOW,
        spares: None,
    };
    let id = SandboxId::random();
    let dir = home.path().join(id.to_string());
    fs::create_dir(&dir).expect("a directory for the sandbox");
    let launch = Launch { id, dir, image: subject.image().to_owned(), config, resources: HostResources::default() };
    (launch, marker, home)
}

impl Session {
    pub async fn start(subject: &dyn Subject) -> Self {
        Self::start_limited(subject, HostResources::default()).await
    }

    pub async fn start_limited(subject: &dyn Subject, resources: HostResources) -> Self {
        let (mut launch, marker, home) = launch(subject);
        launch.resources = resources;
        let instance = subject.runtime().start(&launch).await.expect("it starts");
        Self::open(instance, launch, marker, home).await
    }

    async fn open(instance: Instance, launch: Launch, marker: Marker, home: tempfile::TempDir) -> Self {
        let ended = instance.ended.clone();
        let link = match link::open(instance, &marker, LIMIT).await {
            Ok(link) => link,
            Err(error) => panic!("the agent did not answer: {error}; ended: {:?}", ended.now()),
        };
        Self { launch, link, received: PerStream::default(), exit: None, marker, number: 0, _home: home }
    }

    /// Where a checkpoint may go.
    pub fn save_dir(&self) -> PathBuf {
        let dir = self._home.path().join("saved");
        fs::create_dir_all(&dir).expect("a directory to save into");
        dir
    }

    /// A copy of this sandbox out of what was saved, its conversation opened and its output going on from what this one has.
    pub async fn restored(&self, subject: &dyn Subject) -> Self {
        let (mut launch, _, home) = launch(subject);
        launch.config = self.launch.config.clone();
        let instance = subject.runtime().restore(&launch, &self.save_dir()).await.expect("it is restored");
        self.copied(instance, launch, home).await
    }

    /// Likewise, begun before anything was there to restore.
    pub async fn restored_late(&self, subject: &dyn Subject) -> Self {
        let (mut launch, _, home) = launch(subject);
        launch.config = self.launch.config.clone();
        let instance = subject.runtime().create(&launch).await.expect("a container is made");
        subject.runtime().restore_into(&launch, &self.save_dir()).await.expect("it is restored");
        self.copied(instance, launch, home).await
    }

    async fn copied(&self, instance: Instance, launch: Launch, home: tempfile::TempDir) -> Self {
        let mut copy = Self::open(instance, launch, self.marker, home).await;
        copy.number = self.number;
        copy.received = self.received.clone();
        copy.resume().await;
        copy
    }

    /// The same sandbox in the hands of another server; `half` is what the last one had written of its next frame when it died.
    pub async fn handed_to(self, runtime: &dyn Runtime, half: &[u8]) -> Self {
        let Self { launch, mut link, received, marker, number, _home: home, .. } = self;
        link.writer.send_raw(half).await.expect("half a frame is written");
        drop(link);
        let instance = runtime.take_up(launch.id, &launch.dir).await.expect("it is taken up");
        let mut taken = Self::open(instance, launch, marker, home).await;
        (taken.received, taken.number) = (received, number);
        taken
    }

    /// Output goes on from what was received.
    pub async fn resume(&mut self) {
        let from = PerStream { stdout: self.received.stdout.len() as u64, stderr: self.received.stderr.len() as u64 };
        self.send(ToAgent::Resume { number: self.number, from, credit: PLENTY, sequence: SEQUENCE }).await;
    }

    pub async fn send(&mut self, message: ToAgent) {
        self.link.writer.send(&message).await.expect("it is sent");
    }

    /// Starts a program, with no credit yet.
    pub async fn exec(&mut self, code: &str) -> u64 {
        self.exec_as(code, |_| {}).await
    }

    /// Starts a program as `change` wants it.
    pub async fn exec_as(&mut self, code: &str, change: impl FnOnce(&mut ExecSpec)) -> u64 {
        let mut spec = ExecSpec {
            number: self.number + 1,
            id: ExecutionId::random(),
            language: Language::Bash,
            env: BTreeMap::from([("PATH".to_owned(), "/usr/bin:/bin".to_owned()), ("HOME".to_owned(), "/root".to_owned())]),
            only_here: Default::default(),
            cwd: "/root".to_owned(),
            stdin: true,
            tty: None,
            detached_output: DetachedOutput::Block,
            note: "of the test".to_owned(),
        };
        change(&mut spec);
        self.number = spec.number;
        (self.received, self.exit) = (PerStream::default(), None);
        self.link.writer.exec(&spec, code.as_bytes()).await.expect("it is sent");
        self.number
    }

    pub async fn allow(&mut self, upto: u64) {
        self.send(ToAgent::Credit { number: self.number, upto: PerStream { stdout: upto, stderr: upto } }).await;
    }

    /// Runs a program to its end.
    pub async fn run(&mut self, code: &str) -> (String, String, Exit) {
        self.exec(code).await;
        self.allow(PLENTY).await;
        let exit = self.until_exit().await;
        (text(&self.received.stdout), text(&self.received.stderr), exit)
    }

    /// The next control frame; output is put aside, and must follow on what was received.
    pub async fn control(&mut self) -> FromAgent {
        self.try_control(LIMIT).await.expect("a frame comes")
    }

    pub async fn try_control(&mut self, limit: Duration) -> Result<FromAgent, LinkError> {
        let until = tokio::time::Instant::now() + limit;
        loop {
            let left = until.saturating_duration_since(tokio::time::Instant::now());
            match self.link.reader.recv_within(left).await? {
                FromAgentFrame::Control(message) => return Ok(message),
                FromAgentFrame::Output { number, stream, offset, data } => self.take(number, stream, offset, &data),
                FromAgentFrame::Files { .. } | FromAgentFrame::Tunnel { .. } => panic!("nobody asked for this"),
            }
        }
    }

    fn take(&mut self, number: u64, stream: Stream, offset: u64, data: &[u8]) {
        if number != self.number {
            return;
        }
        let received = self.received.get_mut(stream);
        assert_eq!(offset, received.len() as u64, "output of {stream:?} must follow on what was there");
        received.extend_from_slice(data);
    }

    /// Waits until that much of standard output is there.
    pub async fn until_stdout(&mut self, count: usize) {
        let until = tokio::time::Instant::now() + LIMIT;
        while self.received.stdout.len() < count {
            let left = until.saturating_duration_since(tokio::time::Instant::now());
            match self.link.reader.recv_within(left).await.expect("output comes") {
                FromAgentFrame::Output { number, stream, offset, data } => self.take(number, stream, offset, &data),
                FromAgentFrame::Control(FromAgent::Exited { exit, .. }) => self.exit = Some(exit),
                FromAgentFrame::Control(_) => {}
                FromAgentFrame::Files { .. } | FromAgentFrame::Tunnel { .. } => panic!("nobody asked for this"),
            }
        }
    }

    /// Waits until the program has ended and everything before its end is there.
    pub async fn until_exit(&mut self) -> Exit {
        let exit = loop {
            if let Some(exit) = self.exit.clone() {
                break exit;
            }
            match self.control().await {
                FromAgent::Exited { number, exit } if number == self.number => self.exit = Some(exit),
                FromAgent::StartFailed { message, .. } => panic!("it could not be started: {message}"),
                _ => {}
            }
        };
        let until = tokio::time::Instant::now() + LIMIT;
        while (self.received.stdout.len() as u64) < exit.end.stdout || (self.received.stderr.len() as u64) < exit.end.stderr {
            let left = until.saturating_duration_since(tokio::time::Instant::now());
            if let FromAgentFrame::Output { number, stream, offset, data } = self.link.reader.recv_within(left).await.expect("output comes")
            {
                self.take(number, stream, offset, &data);
            }
        }
        exit
    }

    /// Nothing more comes for a while.
    pub async fn expect_silence(&mut self) {
        let before = self.received.stdout.len();
        // Many times longer than a frame takes.
        match self.try_control(Duration::from_millis(300)).await {
            Err(LinkError::TimedOut) => assert_eq!(self.received.stdout.len(), before, "output came without credit"),
            other => panic!("something came: {other:?}"),
        }
    }

    /// Everything that was sent before this has been carried out.
    pub async fn settle(&mut self) {
        self.send(ToAgent::Ping { value: 7 }).await;
        while !matches!(self.control().await, FromAgent::Pong { value: 7, .. }) {}
    }

    pub async fn remove(self, subject: &dyn Subject) {
        subject.runtime().remove(self.launch.id, &self.launch.dir).await.expect("it is removed");
    }
}

pub(super) fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}
