//! What the agent and the init of the user's namespace say to each other: small packets with descriptors.
//!
//! The agent believes nothing of what it is told here beyond the execution that is current: the guest may have got hold of its init.

use std::{
    collections::BTreeMap,
    io::{self, IoSlice, IoSliceMut},
    os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd},
};

use nix::sys::socket::{ControlMessage, ControlMessageOwned, MsgFlags, recvmsg, sendmsg};
use sandboxer_protocol::agent::{Language, TerminalSize};
use serde::{Deserialize, Serialize, de::DeserializeOwned};

/// The descriptor on which init finds its socket.
pub(crate) const INIT_SOCKET: RawFd = 3;
const MAX_PACKET_BYTES: usize = 4096;

/// The agent's own number of an execution: rising, and never used twice while the sandbox lives. Groups and files are named by it. The
/// server's numbers may begin anew with a new server, while processes of an earlier execution still run.
pub(crate) type Serial = u64;

#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Request {
    /// With descriptors: a file that holds the [`Program`] (`head` bytes of JSON) and then the code; `cgroup.procs` if `group`; and
    /// standard input, output and error, unless the program gets a terminal.
    Spawn {
        serial: Serial,
        head: usize,
        group: bool,
    },
    /// Starts an interpreter that waits for the code of the execution with this number. With descriptors: a file that holds the [`Waiting`]
    /// (`head` bytes of JSON); the `cgroup.procs` of its group; standard input, on which it waits, output and error.
    /// `current` is the last execution, whose code is kept.
    Spare {
        serial: Serial,
        head: usize,
        current: Serial,
    },
    /// It is not wanted any more.
    Drop {
        serial: Serial,
    },
    Signal {
        serial: Serial,
        signal: i32,
    },
    /// The program is killed, with what descends from it. Only where there are no groups to do it by.
    Kill {
        serial: Serial,
    },
    /// Which copy of the sandbox this is, for programs to read.
    Generation {
        generation: u64,
    },
}

#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Program {
    pub(crate) language: Language,
    pub(crate) env: BTreeMap<String, String>,
    pub(crate) cwd: String,
    pub(crate) tty: Option<TerminalSize>,
}

/// An interpreter that is to wait.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Waiting {
    pub(crate) language: Language,
    pub(crate) env: BTreeMap<String, String>,
    pub(crate) cwd: String,
    pub(crate) warm_modules: Vec<String>,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Report {
    /// With the root that programs see, and the file that they see as `/proc/meminfo` if memory is limited.
    Ready,
    /// With the agent's end of the terminal, if there is one.
    Started {
        serial: Serial,
    },
    /// An interpreter waits. With the file that its code goes into.
    Waits {
        serial: Serial,
    },
    /// A program, or an interpreter that was to wait, could not be started.
    Failed {
        serial: Serial,
        message: String,
    },
    Exited {
        serial: Serial,
        code: Option<i32>,
        signal: Option<i32>,
    },
}

pub(crate) fn send(socket: BorrowedFd<'_>, message: &impl Serialize, descriptors: &[RawFd]) -> io::Result<()> {
    let bytes = serde_json::to_vec(message)?;
    let rights = [ControlMessage::ScmRights(descriptors)];
    let control = if descriptors.is_empty() { &[][..] } else { &rights[..] };
    sendmsg::<()>(socket.as_raw_fd(), &[IoSlice::new(&bytes)], control, MsgFlags::MSG_NOSIGNAL, None)?;
    Ok(())
}

/// The next packet; none if the other end is gone.
pub(crate) fn receive<T: DeserializeOwned>(socket: BorrowedFd<'_>) -> io::Result<Option<(T, Vec<OwnedFd>)>> {
    let mut bytes = [0; MAX_PACKET_BYTES];
    let mut space = nix::cmsg_space!([RawFd; 8]);
    let mut parts = [IoSliceMut::new(&mut bytes)];
    let received = recvmsg::<()>(socket.as_raw_fd(), &mut parts, Some(&mut space), MsgFlags::MSG_CMSG_CLOEXEC)?;
    let mut descriptors = Vec::new();
    for message in received.cmsgs()? {
        if let ControlMessageOwned::ScmRights(rights) = message {
            // SAFETY: the kernel has just made these descriptors for this process, and nobody else knows of them.
            descriptors.extend(rights.into_iter().map(|fd| unsafe { OwnedFd::from_raw_fd(fd) }));
        }
    }
    let length = received.bytes;
    if length == 0 {
        return Ok(None);
    }
    Ok(Some((serde_json::from_slice(&bytes[..length])?, descriptors)))
}
