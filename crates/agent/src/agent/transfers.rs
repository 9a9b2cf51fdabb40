//! Single files: several asks at once, each gone on with for a moment in every round.

use std::{
    collections::BTreeMap,
    os::fd::{AsFd as _, OwnedFd},
};

use bytes::Bytes;
use nix::{
    fcntl::{OFlag, open},
    sys::{epoll::EpollFlags, stat::Mode},
};
use sandboxer_agent::guest::{self, Begun, Fault, Source, Work};
use sandboxer_protocol::{
    agent::{FileAsk, FileFault, FromAgent},
    limits::{MAX_FILE_TRANSFERS, MAX_FILES_PIECE_BYTES},
};

use super::{Agent, token, watch};
use crate::{memory::MemoryWatch, setup};

/// What is told of a fault.
const MAX_MESSAGE_CHARS: usize = 1000;

/// What is being done with single files, by the numbers that the server gave.
#[derive(Default)]
pub(super) struct Transfers {
    going: BTreeMap<u64, Transfer>,
    /// The root that programs see, with all that is mounted in it; none: as the agent has it.
    pub(super) root: Option<OwnedFd>,
}

struct Transfer {
    work: Work,
    /// Of what is taken: how much was.
    taken: u64,
    out: Vec<u8>,
    sent: u64,
    credit: u64,
    /// There is more to come than what is in `out`.
    more: bool,
    /// The credit under which something was sent last, of what goes by pieces and not by bytes.
    sent_under: u64,
}

impl Transfers {
    /// Some directory, no matter which: each is asked.
    pub(super) fn note_changes(&mut self) {
        for transfer in self.going.values_mut() {
            if let Work::Watch(watching) = &mut transfer.work {
                watching.readable = true;
            }
        }
    }

    pub(super) fn are_going(&self) -> bool {
        !self.going.is_empty()
    }
}

impl Agent {
    pub(super) fn begin_file(&mut self, sequence: u64, ask: FileAsk, credit: u64) {
        if self.transfers.going.len() >= MAX_FILE_TRANSFERS {
            let message = "too many files are being transferred".to_owned();
            return self.file_failed(sequence, Fault { kind: FileFault::Busy, message, size: None });
        }
        let begun = self.guest_root().and_then(|root| guest::begin(root.as_fd(), ask, self.archive_limits()));
        // Files are in memory.
        self.memory.iter_mut().for_each(MemoryWatch::unsure);
        match begun {
            Ok(Begun::Done(about)) => self.link.say(&FromAgent::FileDone { sequence, bytes: 0, about }),
            Ok(Begun::Going { work, about, start, length }) => {
                if let Work::Watch(watching) = &work
                    && let Err(error) = watch(&self.epoll, watching.descriptor(), token::CHANGES, EpollFlags::EPOLLIN)
                {
                    let message = format!("changes can't be waited for: {error}");
                    return self.file_failed(sequence, Fault { kind: FileFault::Failed, message, size: None });
                }
                self.link.say(&FromAgent::FileOpened { sequence, about, start, length });
                let transfer = Transfer { work, taken: 0, out: Vec::new(), sent: 0, credit, more: true, sent_under: 0 };
                self.transfers.going.insert(sequence, transfer);
            }
            Err(fault) => self.file_failed(sequence, fault),
        }
    }

    fn guest_root(&self) -> Result<OwnedFd, Fault> {
        let found = match &self.transfers.root {
            Some(root) => root.try_clone(),
            None => open(setup::ROOT, OFlag::O_RDONLY | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC, Mode::empty()).map_err(Into::into),
        };
        found.map_err(|error| Fault { kind: FileFault::Failed, message: format!("the root can't be opened: {error}"), size: None })
    }

    fn file_failed(&mut self, sequence: u64, Fault { kind, message, size }: Fault) {
        let message = message.chars().take(MAX_MESSAGE_CHARS).collect();
        self.link.say(&FromAgent::FileFailed { sequence, fault: kind, message, size });
    }

    pub(super) fn credit_file(&mut self, sequence: u64, upto: u64) {
        if let Some(transfer) = self.transfers.going.get_mut(&sequence) {
            transfer.credit = transfer.credit.max(upto);
        }
    }

    /// Whatever was begun is dropped, and leaves nothing behind.
    pub(super) fn cancel_file(&mut self, sequence: u64) {
        self.transfers.going.remove(&sequence);
    }

    pub(super) fn drop_transfers(&mut self) {
        self.transfers.going.clear();
    }

    pub(super) fn take_file(&mut self, sequence: u64, offset: u64, data: &Bytes) {
        let Some(transfer) = self.transfers.going.get_mut(&sequence) else { return };
        let Work::Take(target) = &mut transfer.work else { return };
        if transfer.taken != offset {
            return;
        }
        transfer.taken += data.len() as u64;
        if let Err(fault) = target.push(data) {
            self.transfers.going.remove(&sequence);
            self.file_failed(sequence, fault);
        }
    }

    pub(super) fn end_file(&mut self, sequence: u64) {
        let Some(transfer) = self.transfers.going.remove(&sequence) else { return };
        let Work::Take(target) = transfer.work else { return };
        match target.finish() {
            Ok(about) => self.link.say(&FromAgent::FileDone { sequence, bytes: 0, about }),
            Err(fault) => self.file_failed(sequence, fault),
        }
    }

    /// Goes on with each for a moment. Returns whether anything was done.
    pub(super) fn go_on_with_files(&mut self) -> bool {
        let numbers: Vec<u64> = self.transfers.going.keys().copied().collect();
        let mut any = false;
        for sequence in numbers {
            any |= self.go_on_with(sequence);
        }
        any
    }

    fn go_on_with(&mut self, sequence: u64) -> bool {
        let Some(transfer) = self.transfers.going.get_mut(&sequence) else { return false };
        let outcome = match &mut transfer.work {
            Work::Take(_) => return false,
            Work::Send(source) => {
                if !self.link.takes_files() || transfer.sent >= transfer.credit {
                    return false;
                }
                let wanted = usize::try_from(transfer.credit - transfer.sent).unwrap_or(usize::MAX).min(MAX_FILES_PIECE_BYTES);
                let filled = fill(source, &mut transfer.out, wanted, &mut transfer.more);
                filled.map(|()| {
                    let length = transfer.out.len().min(wanted);
                    // Only whole pieces: in crumbs they would take more room on their way than their bytes.
                    if length > 0 && (length == wanted || !transfer.more) {
                        self.link.send_files(sequence, transfer.sent, &transfer.out[..length]);
                        transfer.out.drain(..length);
                        transfer.sent += length as u64;
                    }
                    !transfer.more && transfer.out.is_empty()
                })
            }
            work @ Work::Remove(_) => work.go_on(),
            Work::Watch(watching) => {
                let fills = transfer.more && watching.has_work(!transfer.out.is_empty());
                let sends = self.link.takes_files() && transfer.credit > transfer.sent_under;
                if !fills && (!sends || transfer.out.is_empty()) {
                    return false;
                }
                let filled = if fills { watching.fill(&mut transfer.out) } else { Ok(transfer.more) };
                filled.map(|more| {
                    transfer.more = more;
                    let length = transfer.out.len().min(MAX_FILES_PIECE_BYTES);
                    if sends && length > 0 {
                        self.link.send_files(sequence, transfer.sent, &transfer.out[..length]);
                        transfer.out.drain(..length);
                        transfer.sent += length as u64;
                        transfer.sent_under = transfer.credit;
                    }
                    !transfer.more && transfer.out.is_empty()
                })
            }
        };
        match outcome {
            Ok(false) => {}
            Ok(true) => {
                let bytes = transfer.sent;
                self.transfers.going.remove(&sequence);
                self.link.say(&FromAgent::FileDone { sequence, bytes, about: None });
            }
            Err(fault) => {
                self.transfers.going.remove(&sequence);
                self.file_failed(sequence, fault);
            }
        }
        true
    }
}

fn fill(source: &mut Source, out: &mut Vec<u8>, wanted: usize, more: &mut bool) -> Result<(), Fault> {
    if *more && out.len() < wanted {
        let missing = wanted - out.len();
        *more = source.fill(out, missing)?;
    }
    Ok(())
}
