//! The conversation between a client and the server: JSON objects over a WebSocket.
//!
//! Both sides ignore fields and events they don't know, so these types only grow.

mod error;
mod event;
mod file;
mod output;
mod request;
#[cfg(test)]
mod schema;
mod status;
mod text;
mod write;

pub use error::{CloseCode, ErrorCode};
pub use event::{ErrorEvent, OffsetsEvent, OutputEvent, Resumed, SandboxIdEvent, ServerEvent, StatusUpdate, StdinAck};
pub use file::{FileError, FileEvent, FileOp, FileRequest};
pub use output::{encode_output, put_output};
pub use request::{
    About, BadRequest, CreateConfig, Encoding, ExecuteRequest, LimitsRequest, Network, NoNetwork, OffsetsRequest, Request, Seconds,
    SnapshotTarget, TtyRequest,
};
pub use status::{EndReason, Status};
pub use text::Utf8Pieces;
