//! Every bound of the protocol by name. Beyond one of them is an error, never a stall.

/// One WebSocket message from a client, unless the server is told otherwise.
pub const MAX_CLIENT_MESSAGE_BYTES: usize = 8 * MIB;
/// One frame to the agent: a whole client message of code or input, with room for its envelope.
pub const MAX_FRAME_TO_AGENT_BYTES: usize = MAX_CLIENT_MESSAGE_BYTES + MAX_CONTROL_BYTES;
/// One frame from the agent.
pub const MAX_FRAME_FROM_AGENT_BYTES: usize = MAX_OUTPUT_PIECE_BYTES + 64;
/// The JSON of one control frame, in either direction. The head of an execution is the longest: two environments, every byte of which may be
/// written as six.
pub const MAX_CONTROL_BYTES: usize = 4 * MIB;
/// Bytes of output in one frame.
pub const MAX_OUTPUT_PIECE_BYTES: usize = 256 * 1024;
/// What the agent holds of a stream until it is acknowledged, unless the server is told otherwise.
pub const OUTPUT_WINDOW_BYTES: u64 = 8 * MIB as u64;
/// What the agent holds of input that the program has not read.
pub const STDIN_WINDOW_BYTES: u64 = 8 * MIB as u64;
/// What the agent may send of a stream beyond what the server has passed on.
pub const OUTPUT_CREDIT_BYTES: u64 = 2 * MIB as u64;
/// Bytes of an archive in one frame, in either direction.
pub const MAX_FILES_PIECE_BYTES: usize = 256 * 1024;
/// What the agent may send of an archive beyond what the server has taken.
pub const FILES_CREDIT_BYTES: u64 = 4 * MIB as u64;
/// What the agent may send of a single file beyond what the server has passed on.
pub const FILE_CREDIT_BYTES: u64 = 2 * MIB as u64;
/// What is done with single files at once in one sandbox.
pub const MAX_FILE_TRANSFERS: usize = 16;
/// Streams of the network in one sandbox at once, in both directions together.
pub const MAX_TUNNEL_STREAMS: usize = 512;
/// Those of them that programs may open to the proxy: ports are reached all the same.
pub const MAX_PROXY_STREAMS: usize = 384;
/// Bytes of a stream in one frame.
pub const MAX_TUNNEL_PIECE_BYTES: usize = 64 * 1024;
/// What may be sent of a stream beyond what was passed on, while there are few of them.
pub const TUNNEL_CREDIT_BYTES: u64 = MIB as u64;
/// The same, of those beyond [`FEW_TUNNEL_STREAMS`].
pub const SMALL_TUNNEL_CREDIT_BYTES: u64 = 128 * 1024;
/// So many streams have the large credit.
pub const FEW_TUNNEL_STREAMS: usize = 16;
/// Names in one part of a directory.
pub const MAX_FILE_LIST: u32 = 1000;
/// Directories that one watch has an eye on.
pub const MAX_WATCHED_DIRECTORIES: usize = 1024;
/// What a client is told of a message that is no request.
pub const MAX_COMPLAINT_BYTES: usize = 1024;
/// An `execution_id`.
pub const MAX_EXECUTION_ID_BYTES: usize = 128;
/// Names and values of `env` together.
pub const MAX_ENV_BYTES: usize = 256 * 1024;
/// A path such as `cwd`.
pub const MAX_PATH_BYTES: usize = 4096;
/// Names and values of `metadata` together.
pub const MAX_METADATA_BYTES: usize = 16 * 1024;

/// The credit of a stream that is opened beside so many others.
#[must_use]
pub fn tunnel_credit(others: usize) -> u64 {
    if others < FEW_TUNNEL_STREAMS { TUNNEL_CREDIT_BYTES } else { SMALL_TUNNEL_CREDIT_BYTES }
}

const MIB: usize = 1024 * 1024;
