//! A sandbox by runsc and the agent alone, with the limits that the server gives one: what its FIFO carries without a server.

use std::{collections::BTreeMap, fs, path::PathBuf, time::Instant};

use bytes::Bytes;
use nix::{
    sys::signal::{Signal, kill},
    unistd::{Pid, geteuid},
};
use sandboxer_e2e::DEADLINE;
use sandboxer_protocol::{
    ExecutionId, SandboxId,
    agent::{
        AgentConfig, DetachedOutput, ExecSpec, FromAgent, FromAgentFrame, Language, MARKER_BYTES, Marker, PerStream, ToAgent, TunnelStream,
    },
    limits::{MAX_TUNNEL_PIECE_BYTES, TUNNEL_CREDIT_BYTES},
};
use sandboxer_runtime::{
    Controller, GvisorOptions, GvisorRuntime, HostLimits, HostResources, Launch, Runtime as _,
    link::{self, Link},
};
use tempfile::TempDir;

const MIB: u64 = 1024 * 1024;
/// The server's defaults.
const MEMORY_BYTES: u64 = 1024 * MIB;
const GVISOR_BYTES: u64 = 256 * MIB;
const CPUS: f64 = 1.0;
/// What is on its way to the agent at once, as in the server.
const BACKLOG_BYTES: usize = 256 * 1024;
/// More than any program here prints.
const PLENTY: u64 = 1 << 40;

pub(crate) struct Bare {
    link: Link,
    number: u64,
    _runtime: GvisorRuntime,
    launch: Launch,
    _home: TempDir,
}

/// A download that is served from memory.
#[derive(Default)]
struct Served {
    stream: TunnelStream,
    asked: Vec<u8>,
    sent: u64,
    allowed: u64,
    ended: bool,
}

impl Bare {
    pub(crate) async fn start() -> Self {
        assert!(geteuid().is_root(), "only root can start a sandbox in a test's own process: run these tests as root");
        sandboxer_runtime::become_subreaper().unwrap();
        // Short: there are socket paths below it.
        let home = tempfile::Builder::new().prefix("sbx-bare-").tempdir_in("/tmp").unwrap();
        let limits = HostLimits::probe();
        let can = |controller| limits.enforces(controller).is_ok();
        let resources = HostResources {
            memory_bytes: can(Controller::Memory).then_some(MEMORY_BYTES + GVISOR_BYTES),
            cpus: can(Controller::Cpu).then_some(CPUS),
            pids_ceiling: None,
        };
        let runsc = sandboxer_runsc::find(std::env::var_os("SANDBOXER_RUNSC").map(PathBuf::from).as_deref()).unwrap();
        let runtime =
            GvisorRuntime::open(GvisorOptions { runsc, state_dir: home.path().join("state"), limits, file_server: None }).await.unwrap();
        let marker = Marker::new(rand::random::<[u8; MARKER_BYTES]>());
        let config = AgentConfig {
            marker: marker.to_hex(),
            disk_bytes: 512 * MIB,
            disk_inodes: 128 * 1024,
            memory_bytes: Some(MEMORY_BYTES),
            pids: Some(256),
            output_window_bytes: 8 * MIB,
            stdin_window_bytes: 8 * MIB,
            spares: None,
        };
        let id = SandboxId::random();
        let dir = home.path().join(id.to_string());
        fs::create_dir(&dir).unwrap();
        let launch = Launch { id, dir, image: image(), config, resources };
        let instance = runtime.start(&launch).await.unwrap();
        let link = link::open(instance, &marker, DEADLINE).await.unwrap();
        let mut bare = Self { link, number: 0, _runtime: runtime, launch, _home: home };
        bare.link.writer.send(&ToAgent::Proxy { on: true }).await.unwrap();
        bare
    }

    /// Bytes a second that get to the agent, which drops them: they are of a stream that is not there.
    pub(crate) async fn carries(&mut self, bytes: u64) -> f64 {
        const NOBODYS: TunnelStream = 2;
        let piece = Bytes::from(vec![7; MAX_TUNNEL_PIECE_BYTES]);
        let begun = Instant::now();
        let mut left = bytes;
        while left > 0 {
            while left > 0 && self.link.writer.backlog() < BACKLOG_BYTES {
                let length = left.min(piece.len() as u64);
                self.link.writer.queue_tunnel(NOBODYS, piece.slice(..usize::try_from(length).unwrap()));
                left -= length;
            }
            self.link.writer.flush_some().await.unwrap();
        }
        // It has heard all of it when it answers to what comes behind.
        self.number += 1;
        let value = self.number;
        self.link.writer.send(&ToAgent::Ping { value }).await.unwrap();
        while !matches!(self.next().await, FromAgentFrame::Control(FromAgent::Pong { value: back, .. }) if back == value) {}
        bytes as f64 / begun.elapsed().as_secs_f64()
    }

    /// Bytes a second that a program downloads through the agent from who has all of them in memory.
    pub(crate) async fn serves(&mut self, code: &str, bytes: u64) -> f64 {
        self.number += 1;
        let number = self.number;
        let variable = |(name, value): (&str, &str)| (name.to_owned(), value.to_owned());
        let spec = ExecSpec {
            number,
            id: ExecutionId::random(),
            language: Language::Bash,
            env: BTreeMap::from([("PATH", "/usr/bin:/bin"), ("HOME", "/root")].map(variable)),
            only_here: Default::default(),
            cwd: "/root".to_owned(),
            stdin: false,
            tty: None,
            detached_output: DetachedOutput::Block,
            note: String::new(),
        };
        let begun = Instant::now();
        self.link.writer.exec(&spec, code.as_bytes()).await.unwrap();
        let upto = PerStream { stdout: PLENTY, stderr: PLENTY };
        self.link.writer.send(&ToAgent::Credit { number, upto }).await.unwrap();
        let piece = Bytes::from(vec![7; MAX_TUNNEL_PIECE_BYTES]);
        let mut served = Served::default();
        let exit = loop {
            self.go_on(&mut served, &piece, bytes);
            let flushing = self.link.writer.backlog() > 0;
            let frame = tokio::select! {
                frame = self.link.reader.recv() => frame.unwrap(),
                flushed = self.link.writer.flush_some(), if flushing => {
                    flushed.unwrap();
                    continue;
                }
                () = tokio::time::sleep(DEADLINE) => panic!("nothing goes on"),
            };
            match frame {
                FromAgentFrame::Control(FromAgent::TunnelOpen { stream, credit }) => {
                    served = Served { stream, allowed: credit, ..Served::default() };
                    self.link.writer.queue(&ToAgent::TunnelCredit { stream, upto: TUNNEL_CREDIT_BYTES });
                }
                FromAgentFrame::Control(FromAgent::TunnelCredit { upto, .. }) => served.allowed = upto,
                FromAgentFrame::Tunnel { data, .. } => served.asked.extend_from_slice(&data),
                FromAgentFrame::Control(FromAgent::Exited { exit, .. }) => break exit,
                FromAgentFrame::Control(FromAgent::StartFailed { message, .. }) => panic!("{message}"),
                _ => {}
            }
        };
        let rate = bytes as f64 / begun.elapsed().as_secs_f64();
        assert_eq!(exit.code, Some(0), "{exit:?}");
        self.link.writer.send(&ToAgent::Ack { number, upto: exit.end, end: true }).await.unwrap();
        rate
    }

    /// Queues of an answer what may be sent now.
    fn go_on(&mut self, served: &mut Served, piece: &Bytes, bytes: u64) {
        if !served.asked.ends_with(b"\r\n\r\n") || served.ended {
            return;
        }
        let head = format!("HTTP/1.1 200 OK\r\nContent-Length: {bytes}\r\nConnection: close\r\n\r\n");
        let whole = head.len() as u64 + bytes;
        while served.sent < whole && served.sent < served.allowed && self.link.writer.backlog() < BACKLOG_BYTES {
            let part = if served.sent == 0 { Bytes::from(head.clone()) } else { piece.clone() };
            let length = (whole.min(served.allowed) - served.sent).min(part.len() as u64);
            self.link.writer.queue_tunnel(served.stream, part.slice(..usize::try_from(length).unwrap()));
            served.sent += length;
        }
        if served.sent == whole {
            self.link.writer.queue(&ToAgent::TunnelEnd { stream: served.stream });
            served.ended = true;
        }
    }

    async fn next(&mut self) -> FromAgentFrame {
        self.link.reader.recv_within(DEADLINE).await.unwrap()
    }
}

/// However the test ends, nothing is left of it.
impl Drop for Bare {
    fn drop(&mut self) {
        let pid = fs::read_to_string(self.launch.dir.join("pid")).ok().and_then(|text| text.trim().parse().ok());
        if let Some(pid) = pid {
            let _ = kill(Pid::from_raw(pid), Signal::SIGKILL);
        }
    }
}

/// The image of the server under test.
fn image() -> PathBuf {
    let dir = std::env::var_os("SANDBOXER_IMAGE_DIR").map(PathBuf::from).or_else(sandboxer_image::ImageStore::default_directory);
    let store = sandboxer_image::ImageStore::open(dir.unwrap()).unwrap();
    store.ensure_base(&sandboxer_image::Silent).unwrap().path
}
