//! What the FIFO carries: a sandbox as the server starts it, with the limits that the server gives it, and a reader that grants
//! credit, acknowledges and discards.

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
    time::Instant,
};

use anyhow::{Result, bail, ensure};
use sandboxer_protocol::{
    ExecutionId, SandboxId,
    agent::{DetachedOutput, ExecSpec, Exit, FromAgent, FromAgentFrame, MARKER_BYTES, Marker, PerStream, Stream, ToAgent},
};
use sandboxer_runtime::{
    Controller, GvisorOptions, GvisorRuntime, HostLimits, HostResources, Launch, Runtime as _,
    link::{self, Link},
};

use crate::{
    programs::Program,
    raw::{LIMIT, agent_config, ms_since},
    timing::Timing,
};

/// More than any program here prints.
const PLENTY: u64 = 1 << 40;
/// An acknowledgement each: well within the agent's window, and few enough to cost nothing.
const ACK_BYTES: u64 = 1024 * 1024;
/// The server's default limits: memory with what it leaves to gVisor's own kernel, and one CPU.
const MEMORY_BYTES: u64 = (1024 + 256) * 1024 * 1024;
const CPUS: f64 = 1.0;

pub(crate) struct Bare {
    runtime: GvisorRuntime,
    launch: Launch,
    link: Link,
    number: u64,
}

impl Bare {
    pub(crate) async fn start(runsc: PathBuf, home: &Path, image: PathBuf) -> Result<Self> {
        let limits = HostLimits::probe();
        let can = |controller| limits.enforces(controller).is_ok();
        let resources = HostResources {
            memory_bytes: can(Controller::Memory).then_some(MEMORY_BYTES),
            cpus: can(Controller::Cpu).then_some(CPUS),
            pids_ceiling: None,
        };
        let runtime = GvisorRuntime::open(GvisorOptions { runsc, state_dir: home.join("state"), limits, file_server: None }).await?;
        let id = SandboxId::random();
        let dir = home.join(id.to_string());
        fs::create_dir_all(&dir)?;
        let marker = Marker::new(rand::random::<[u8; MARKER_BYTES]>());
        let launch = Launch { id, dir, image, config: agent_config(&marker), resources };
        let instance = runtime.start(&launch).await?;
        let ended = instance.ended.clone();
        match link::open(instance, &marker, LIMIT).await {
            Ok(link) => Ok(Self { runtime, launch, link, number: 0 }),
            Err(error) => bail!("the agent does not answer: {error} ({:?})", ended.now()),
        }
    }

    pub(crate) async fn run(&mut self, program: &Program) -> Result<Timing> {
        self.number += 1;
        let number = self.number;
        let spec = ExecSpec {
            number,
            id: ExecutionId::random(),
            language: program.language,
            env: BTreeMap::from([("PATH", "/usr/bin:/bin"), ("HOME", "/root")].map(|(name, value)| (name.to_owned(), value.to_owned()))),
            only_here: Default::default(),
            cwd: "/root".to_owned(),
            stdin: true,
            tty: None,
            detached_output: DetachedOutput::Block,
            note: String::new(),
        };
        let begun = Instant::now();
        self.link.writer.exec(&spec, program.code.as_bytes()).await?;
        let upto = PerStream { stdout: PLENTY, stderr: PLENTY };
        self.link.writer.send(&ToAgent::Credit { number, upto }).await?;
        let (mut first, mut bytes, mut acknowledged) = (None, 0, 0);
        let mut exit: Option<Exit> = None;
        let exit = loop {
            if let Some(exit) = exit.take_if(|exit| bytes >= exit.end.stdout) {
                break exit;
            }
            match self.link.reader.recv_within(LIMIT).await? {
                FromAgentFrame::Output { number: of, stream: Stream::Stdout, offset, data } if of == number => {
                    ensure!(offset == bytes, "output came at {offset} where {bytes} was next");
                    first.get_or_insert_with(|| ms_since(begun));
                    bytes += data.len() as u64;
                    drop(data);
                    if bytes - acknowledged >= ACK_BYTES {
                        acknowledged = bytes;
                        self.link.writer.send(&ToAgent::Ack { number, upto: PerStream { stdout: bytes, stderr: 0 }, end: false }).await?;
                    }
                }
                FromAgentFrame::Control(FromAgent::Exited { number: of, exit: how }) if of == number => exit = Some(how),
                FromAgentFrame::Control(FromAgent::StartFailed { message, .. }) => bail!("it could not be started: {message}"),
                FromAgentFrame::Output { .. }
                | FromAgentFrame::Control(_)
                | FromAgentFrame::Files { .. }
                | FromAgentFrame::Tunnel { .. } => {}
            }
        };
        let done_ms = ms_since(begun);
        ensure!(exit.code == Some(0), "it ended with {exit:?}");
        self.link.writer.send(&ToAgent::Ack { number, upto: exit.end, end: true }).await?;
        #[expect(clippy::cast_precision_loss, reason = "a duration of a human scale")]
        let agent_ms = Some(exit.duration_us as f64 / 1000.0);
        Timing { first_ms: first, done_ms, agent_ms, bytes }.checked(program)
    }

    pub(crate) async fn remove(self) -> Result<()> {
        drop(self.link);
        Ok(self.runtime.remove(self.launch.id, &self.launch.dir).await?)
    }
}
