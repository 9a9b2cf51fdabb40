//! The conversation between the server and the agent in a sandbox.
//!
//! It runs over two FIFOs and outlives both ends of it: the server may be killed and come back, the sandbox may be saved and
//! restored elsewhere. So each conversation has an opening that can be recognised in the middle of anything:
//!
//! ```text
//! server → agent   MARKER (32 bytes, fixed for the sandbox, known to nobody else) , frame Hello { nonce, … }
//! agent → server   NONCE (32 bytes, fresh for the conversation)                   , frame HelloReply { … everything it holds … }
//! ```
//!
//! The agent drops what it had of an unfinished frame when the marker comes; the server drops everything until its nonce comes.
//! After that, frames:
//!
//! ```text
//! server → agent   length: u32 LE | kind: u8 | body | crc32(kind, body): u32 LE      length counts kind, body and crc
//! agent → server   length: u32 LE | kind: u8 | body                                  length counts kind and body
//! ```
//!
//! The checksum is there because half a frame of a killed server may be completed by the first bytes of the next one's marker: such
//! a frame must not be carried out. A frame whose checksum is wrong is dropped and the agent looks for the next marker.
//!
//! ## Who may send what
//! The agent sends output of an execution only after [`ToAgent::Resume`] named the offsets to go on from (a new execution starts
//! resumed from zero, with no credit: send that right behind the request), and never further than [`ToAgent::Credit`] allows. So a
//! client that reads slowly holds back the agent's window and with it the program, while control frames still pass.
//! [`ToAgent::Ack`] frees what is held for replay.
//!
//! The file system travels as an archive in pieces, each with its offset: from the agent under a credit of its own, to the agent as the FIFO
//! takes them. It is not held for replay: a conversation that ends in the middle of it leaves nothing behind. Single files travel in the same frames, several
//! at a time, each under the number that the server gave it: [`ToAgent::File`] begins one, [`FromAgent::FileDone`] or [`FromAgent::FileFailed`] ends it.
//!
//! Streams of the network are multiplexed too: those that programs open to the proxy which the agent offers on their loopback, and those that the server opens
//! to programs that listen there. The agent looks into none of them. Each has a credit in each direction, an end in each direction, and can be cut off. None
//! outlives its conversation: when a new one begins, the agent cuts them all off.

mod file;
mod frame;
mod message;
mod raw;
mod signal;
mod spares;

pub use file::{ByteRange, ChangeKind, FileAbout, FileAsk, FileChange, FileFault, FileKind, FileList};

pub use frame::{
    AgentDecoder, AgentEvent, Corrupt, MARKER_BYTES, Marker, NONCE_BYTES, Nonce, ServerDecoder, encode_opening, encode_to_agent,
};
pub use frame::{
    around_tunnel_to_agent, encode_exec, encode_files_from_agent, encode_files_to_agent, encode_from_agent, encode_output,
    encode_reply_opening, encode_stdin, encode_tunnel_from_agent, encode_tunnel_to_agent,
};
pub use message::*;
pub use raw::{GuestPath, NoPath, Raw};
pub use signal::{signal_name, signal_number};
pub use spares::{ImageSpares, MAX_SPARES, MAX_WARM_MODULES, SpareConfig};

/// The version of this conversation, and the only one that a server speaks: it refuses an agent of any other version.
/// A restored sandbox has the agent that it was saved with. Changes within a version are new fields with defaults, and
/// new messages that an agent announces in [`FromAgent::HelloReply`].
pub const AGENT_PROTOCOL_VERSION: u32 = 1;
