//! What the frames say.

use std::collections::{BTreeMap, BTreeSet};

use bytes::Bytes;
use serde::{Deserialize, Serialize};

use super::{FileAbout, FileAsk, FileFault, Nonce, SpareConfig};
use crate::ExecutionId;

/// The number of an execution within its sandbox, given by the server and rising. Frames refer to an execution by it.
pub type ExecutionNumber = u64;

/// The number of a stream of the network within a conversation: odd if the agent opened it, even if the server did.
pub type TunnelStream = u64;

/// One of the two output streams. With a terminal everything is `Stdout`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Stream {
    Stdout,
    Stderr,
}

/// A value for each of the two output streams.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PerStream<T> {
    pub stdout: T,
    pub stderr: T,
}

impl<T> PerStream<T> {
    pub fn get(&self, stream: Stream) -> &T {
        match stream {
            Stream::Stdout => &self.stdout,
            Stream::Stderr => &self.stderr,
        }
    }

    pub fn get_mut(&mut self, stream: Stream) -> &mut T {
        match stream {
            Stream::Stdout => &mut self.stdout,
            Stream::Stderr => &mut self.stderr,
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Language {
    Python,
    Bash,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct TerminalSize {
    pub rows: u16,
    pub cols: u16,
}

/// What happens to output beyond the window while no client is attached.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DetachedOutput {
    /// The program waits.
    #[default]
    Block,
    /// The oldest bytes go.
    DropOldest,
}

/// What the agent is told once, in its environment variable [`AgentConfig::VARIABLE`] as JSON, when the sandbox starts.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct AgentConfig {
    /// Hex of the marker that opens a conversation.
    pub marker: String,
    /// Size of the writable layer.
    pub disk_bytes: u64,
    /// Most files in the writable layer.
    pub disk_inodes: u64,
    /// Use of memory at which the largest user process is killed; none: not watched.
    pub memory_bytes: Option<u64>,
    /// Most processes and threads of user code; none: not limited.
    pub pids: Option<u32>,
    pub output_window_bytes: u64,
    pub stdin_window_bytes: u64,
    /// Interpreters that wait for their code; none: each execution starts its own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub spares: Option<SpareConfig>,
}

impl AgentConfig {
    pub const VARIABLE: &str = "SANDBOXER_AGENT_CONFIG";
}

/// What to run. The code itself travels beside it, as bytes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExecSpec {
    pub number: ExecutionNumber,
    pub id: ExecutionId,
    pub language: Language,
    /// The whole environment of the program; nothing else is inherited.
    pub env: BTreeMap<String, String>,
    /// What of it is this execution's alone: nobody else may get to see it, so no interpreter that waits for the next is started with it.
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    pub only_here: BTreeSet<String>,
    pub cwd: String,
    /// Whether standard input is open; if not, it is at its end from the start.
    pub stdin: bool,
    pub tty: Option<TerminalSize>,
    #[serde(default)]
    pub detached_output: DetachedOutput,
    /// Kept by the agent and returned in [`ExecState`], so that a server that takes the sandbox up knows what only the last one knew.
    #[serde(default)]
    pub note: String,
}

/// Server to agent, as control frames.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum ToAgent {
    /// Opens a conversation, right behind the marker. Answered by [`FromAgent::HelloReply`] behind the nonce. Until a `Resume` comes,
    /// no output is sent, and credit starts at none.
    Hello {
        version: u32,
        nonce: Nonce,
    },
    /// End of input, at this offset of it.
    StdinEof {
        number: ExecutionNumber,
        offset: u64,
    },
    /// Sends a signal to the foreground of the execution: its process group, or the terminal's foreground group.
    Signal {
        number: ExecutionNumber,
        signal: i32,
    },
    Resize {
        number: ExecutionNumber,
        size: TerminalSize,
    },
    /// Kills every process that descends from the execution. Answered by its `Exited`, with the cause that is given here.
    Kill {
        number: ExecutionNumber,
        #[serde(default)]
        cause: Option<ExitCause>,
    },
    /// Go on sending from these offsets; answered by [`FromAgent::Resumed`]. Offsets before what is held go on from what is held, offsets
    /// beyond the end go on at the end. Credit is where it goes on plus `credit`. For an execution that is not held: no answer.
    Resume {
        number: ExecutionNumber,
        from: PerStream<u64>,
        credit: u64,
        /// Comes back in the answer, so that one can be told from another.
        #[serde(default)]
        sequence: u64,
    },
    /// Stop sending output; no client is attached.
    Pause {
        number: ExecutionNumber,
    },
    /// A stream may be sent up to here.
    Credit {
        number: ExecutionNumber,
        upto: PerStream<u64>,
    },
    /// A client has everything before these offsets: it need not be held any longer. With `end`, it has also been told the end.
    Ack {
        number: ExecutionNumber,
        upto: PerStream<u64>,
        #[serde(default)]
        end: bool,
    },
    /// Answered by `Pong` with the same value, after all that came before.
    Ping {
        value: u64,
    },
    /// Who the sandbox is now. A copy of another one learns it by this; only for an agent that said that it can be told.
    Identify {
        hostname: String,
        /// Rises with every rewinding, and differs in every copy. Programs find it in `/run/sandboxer/generation`.
        generation: u64,
    },
    /// Send all that was changed in the file system, as a tar archive, up to `credit` bytes of it. The user's processes stand still until it is
    /// read. Answered by [`FromAgent::FilesPacked`] behind all of it, or by [`FromAgent::FilesFailed`]. For an agent that said `files`, as all
    /// of these.
    PackFiles {
        sequence: u64,
        credit: u64,
    },
    /// The archive may be sent up to here.
    FilesCredit {
        sequence: u64,
        upto: u64,
    },
    /// Nobody wants it any longer.
    FilesCancel {
        sequence: u64,
    },
    /// The file system is to be what an archive says that follows, in frames of its own; nothing was run so far. Answered by
    /// [`FromAgent::FilesFailed`] as soon as something is wrong with it.
    UnpackFiles {
        sequence: u64,
    },
    /// All of it was sent. Answered by [`FromAgent::FilesUnpacked`], or of a single file by [`FromAgent::FileDone`].
    FilesEnd {
        sequence: u64,
    },
    /// Something is to be done with a single file or directory. What is sent of it is sent up to `credit` bytes, then as [`ToAgent::FilesCredit`] says;
    /// what is to be taken follows [`FromAgent::FileOpened`] in frames of its own, up to [`ToAgent::FilesEnd`]; [`ToAgent::FilesCancel`] ends either. For an
    /// agent that said `single_files`.
    File {
        sequence: u64,
        ask: FileAsk,
        credit: u64,
    },
    /// Whether programs find a proxy on their loopback, and its address in their environment. For an agent that said `tunnel`, as all of these.
    Proxy {
        on: bool,
    },
    /// Connect to a port of the sandbox's own loopback. The number is even and was never used in this conversation. Answered by
    /// [`FromAgent::TunnelOpened`] or [`FromAgent::TunnelReset`]. What comes from there may be sent up to `credit` bytes.
    TunnelConnect {
        stream: TunnelStream,
        port: u16,
        credit: u64,
    },
    /// What comes on this stream may be sent up to here.
    TunnelCredit {
        stream: TunnelStream,
        upto: u64,
    },
    /// Nothing more goes into this stream; what comes out of it still may.
    TunnelEnd {
        stream: TunnelStream,
    },
    /// The stream is cut off in both directions.
    TunnelReset {
        stream: TunnelStream,
    },
}

/// Everything the server sends.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ToAgentFrame {
    Control(ToAgent),
    Exec {
        spec: ExecSpec,
        code: Bytes,
    },
    Stdin {
        number: ExecutionNumber,
        offset: u64,
        data: Bytes,
    },
    /// A piece of an archive.
    Files {
        sequence: u64,
        offset: u64,
        data: Bytes,
    },
    /// A piece of a stream.
    Tunnel {
        stream: TunnelStream,
        data: Bytes,
    },
}

/// How an execution ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Exit {
    /// The exit code, if it ended by itself.
    pub code: Option<i32>,
    /// The number of the signal that ended it.
    pub signal: Option<i32>,
    /// How long it ran, in microseconds.
    pub duration_us: u64,
    /// Where its output ends. Output before this comes before `Exited`'s meaning, not always before its frame.
    pub end: PerStream<u64>,
    /// Why the agent ended it, if it did.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cause: Option<ExitCause>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ExitCause {
    /// The sandbox came near its memory limit and this was its largest process.
    OutOfMemory,
    /// The guest killed the init of its own namespace, and so every process in it.
    NamespaceEnded,
    /// The server asked for it because the execution's time was over.
    TimedOut,
    /// The server asked for it because the client did.
    ForceKilled,
}

/// What the agent holds of the running or the last execution.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExecState {
    pub number: ExecutionNumber,
    pub id: ExecutionId,
    /// None while it runs.
    pub exit: Option<Exit>,
    /// The first byte still held of each stream: what was acknowledged, or dropped, lies before.
    pub held_from: PerStream<u64>,
    /// The end of each stream so far.
    pub end: PerStream<u64>,
    /// How much input was taken.
    pub stdin_offset: u64,
    pub stdin_eof: bool,
    /// A client has been told the end, as [`ToAgent::Ack`] said.
    #[serde(default)]
    pub end_acknowledged: bool,
    #[serde(default)]
    pub tty: bool,
    #[serde(default)]
    pub note: String,
}

/// Agent to server, as control frames.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum FromAgent {
    HelloReply {
        /// The version the agent speaks.
        version: u32,
        agent: String,
        /// What can be limited inside this sandbox.
        enforced: Enforced,
        execution: Option<ExecState>,
        /// The highest number that an execution was ever asked for with, also if it could not be started: the next one is higher.
        #[serde(default)]
        last_number: Option<ExecutionNumber>,
        /// It understands [`ToAgent::Identify`].
        #[serde(default)]
        identifies: bool,
        /// It packs and unpacks files.
        #[serde(default)]
        files: bool,
        /// It understands [`ToAgent::File`].
        #[serde(default)]
        single_files: bool,
        /// It watches directories.
        #[serde(default)]
        watches: bool,
        /// It carries streams of the network, and offers a proxy.
        #[serde(default)]
        tunnel: bool,
    },
    Started {
        number: ExecutionNumber,
        spawn_us: u64,
        /// By an interpreter that waited for it.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        by_spare: bool,
    },
    StartFailed {
        number: ExecutionNumber,
        message: String,
    },
    Exited {
        number: ExecutionNumber,
        exit: Exit,
    },
    StdinAck {
        number: ExecutionNumber,
        offset: u64,
    },
    /// The piece did not fit into the input window, or the input is at its end: it was not taken.
    StdinRefused {
        number: ExecutionNumber,
        offset: u64,
        reason: StdinRefusal,
        /// How much input was taken so far.
        #[serde(default)]
        taken: u64,
    },
    /// The answer to every `Resume`: from where output really goes on (later than asked for if that is no longer held), where it ends
    /// so far, and how much input was taken. Output frames sent before this one belong to what was asked for earlier.
    Resumed {
        number: ExecutionNumber,
        from: PerStream<u64>,
        end: PerStream<u64>,
        stdin_offset: u64,
        #[serde(default)]
        sequence: u64,
    },
    Pong {
        value: u64,
        /// No process of the user is there and none is being started: until the agent is told something, nothing changes here.
        #[serde(default)]
        alone: bool,
    },
    /// The largest process was killed because memory ran out; it belonged to no running execution or was not its main process.
    MemoryKill {
        command: String,
        resident_bytes: u64,
    },
    /// The init of the user's namespace died, with every user process; a new one was started.
    NamespaceRestarted,
    /// The archive was sent to its end.
    FilesPacked {
        sequence: u64,
        /// How long it is.
        bytes: u64,
        /// How long the user's processes stood still, in microseconds.
        held_us: u64,
        /// Of that, how long it took until all of them did.
        #[serde(default)]
        hold_us: u64,
        /// And how long reading took; the rest was waiting for the server.
        #[serde(default)]
        read_us: u64,
    },
    FilesUnpacked {
        sequence: u64,
    },
    FilesFailed {
        sequence: u64,
        reason: FilesFault,
        message: String,
    },
    /// Before anything that is sent of a file, or taken.
    FileOpened {
        sequence: u64,
        about: Option<FileAbout>,
        /// Where what is sent begins in it.
        start: u64,
        /// How much will be sent, if that is known.
        length: Option<u64>,
    },
    /// Behind all that was sent.
    FileDone {
        sequence: u64,
        /// How much was sent.
        bytes: u64,
        about: Option<FileAbout>,
    },
    FileFailed {
        sequence: u64,
        fault: FileFault,
        message: String,
        /// How large the file is, where that is why.
        size: Option<u64>,
    },
    /// A program has connected to the proxy. The number is odd and higher than any before in this conversation. What comes from the server may be sent
    /// up to `credit` bytes; what the program says is sent as [`ToAgent::TunnelCredit`] allows.
    TunnelOpen {
        stream: TunnelStream,
        credit: u64,
    },
    /// What [`ToAgent::TunnelConnect`] asked for is there.
    TunnelOpened {
        stream: TunnelStream,
        credit: u64,
    },
    TunnelCredit {
        stream: TunnelStream,
        upto: u64,
    },
    TunnelEnd {
        stream: TunnelStream,
    },
    TunnelReset {
        stream: TunnelStream,
        reason: TunnelFault,
    },
}

/// Why a stream was cut off.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TunnelFault {
    /// Nobody listens at this port.
    Refused,
    /// There are too many streams already.
    Busy,
    /// The program cut it off, or is gone.
    #[serde(other)]
    Reset,
}

/// Why files were not packed or unpacked.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FilesFault {
    /// There is not enough room for them.
    NoRoom,
    /// The archive is not one that can be unpacked.
    Refused,
    #[serde(other)]
    Failed,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum StdinRefusal {
    Full,
    Closed,
    /// The piece begins after what was taken so far: something before it is missing.
    Gap,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Enforced {
    pub pids: bool,
    pub memory: bool,
    pub disk: bool,
    pub inodes: bool,
}

/// Everything the agent sends.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum FromAgentFrame {
    Control(FromAgent),
    Output {
        number: ExecutionNumber,
        stream: Stream,
        offset: u64,
        data: Bytes,
    },
    /// A piece of an archive.
    Files {
        sequence: u64,
        offset: u64,
        data: Bytes,
    },
    /// A piece of a stream.
    Tunnel {
        stream: TunnelStream,
        data: Bytes,
    },
}
