//! Pipes of executions that are over, held open by background processes: read and thrown away, so that those never block and never get
//! SIGPIPE, for as long as they live.

use std::{
    collections::VecDeque,
    fs::File,
    io::{self, Read},
    os::fd::{AsFd, OwnedFd},
};

use nix::sys::epoll::{Epoll, EpollFlags};

use super::{token, watch};

/// More than this many are not held: the oldest is closed, and whoever still writes there gets SIGPIPE. With the usual limit of
/// processes it takes several abandoned pipes in every one of them.
const MAX_LINGERING: usize = 1024;
/// Reads from one pipe before the others, and everything else, get their turn.
const READS_A_ROUND: usize = 4;

#[derive(Default)]
pub(super) struct Lingering {
    pipes: VecDeque<Pipe>,
    next: u64,
    /// Some pipe may have something to read.
    ready: bool,
}

struct Pipe {
    token: u64,
    source: File,
    readable: bool,
}

impl Lingering {
    pub(super) fn add(&mut self, epoll: &Epoll, source: OwnedFd) {
        // It was watched as an output of the execution; not any more. It may never have got that far.
        let _ = epoll.delete(&source);
        self.next += 1;
        let token = token::LINGERING + self.next;
        if watch(epoll, source.as_fd(), token, EpollFlags::EPOLLIN).is_err() {
            return;
        }
        if self.pipes.len() >= MAX_LINGERING {
            self.pipes.pop_front();
        }
        self.pipes.push_back(Pipe { token, source: source.into(), readable: true });
        self.ready = true;
    }

    pub(super) fn ready(&mut self, token: u64) {
        if let Some(pipe) = self.pipes.iter_mut().find(|pipe| pipe.token == token) {
            pipe.readable = true;
            self.ready = true;
        }
    }

    /// Reads and forgets. Returns whether there is more.
    pub(super) fn drain(&mut self, scratch: &mut [u8]) -> bool {
        if !self.ready {
            return false;
        }
        self.ready = false;
        let mut more = false;
        self.pipes.retain_mut(|pipe| {
            for _ in 0..READS_A_ROUND {
                if !pipe.readable {
                    return true;
                }
                match pipe.source.read(scratch) {
                    Ok(0) => return false,
                    Ok(_) => {}
                    Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => pipe.readable = false,
                    // A terminal that nobody has open any more.
                    Err(_) => return false,
                }
            }
            more |= pipe.readable;
            true
        });
        self.ready = more;
        more
    }
}
