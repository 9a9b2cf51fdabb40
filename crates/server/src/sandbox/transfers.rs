//! Single files of a running sandbox: what the resource API asks of its agent, several at once.
//!
//! A transfer waits while the sandbox is brought to rest for a save and goes on after it. Where the sandbox ends here, or goes back, it is cut off: who
//! reads hears it from a body that breaks off, who writes finds the old file. Nothing of it is held for another instance.

use std::{
    collections::BTreeMap,
    task::{Context, Poll},
    time::Duration,
};

use bytes::Bytes;
use sandboxer_protocol::{
    agent::{FileAbout, FileAsk, FileFault, ToAgent},
    limits::{FILE_CREDIT_BYTES, MAX_FILE_TRANSFERS},
};
use tokio::{sync::mpsc, time::Instant};
use tracing::info;

use super::driver::Driver;

/// Words that may wait for who asked: more than an honest agent sends under its credit.
const WORDS: usize = 64;
/// Pieces that may wait for the driver.
const PIECES: usize = 4;
/// Beyond this much on its way to the agent no more is taken from who sends.
const MAX_BACKLOG_BYTES: usize = 1024 * 1024;
/// How much must have been taken before the agent is told.
const CREDIT_STEP_BYTES: u64 = FILE_CREDIT_BYTES / 8;
/// A piece smaller than this is copied: it would keep all of the buffer that it was read into.
const SMALL_BYTES: usize = 16 * 1024;
/// How long nothing may move before who asked is given up.
pub(crate) const STALLED: Duration = Duration::from_secs(300);

/// What an agent does with single files: older ones less.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum SingleFiles {
    Nothing,
    AllButWatch,
    All,
}

impl SingleFiles {
    /// As it says of itself.
    pub(crate) fn of(single_files: bool, watches: bool) -> Self {
        match (single_files, watches) {
            (false, _) => Self::Nothing,
            (true, false) => Self::AllButWatch,
            (true, true) => Self::All,
        }
    }
}

/// What is told to who asked.
#[derive(Debug)]
pub(crate) enum Word {
    Opened { about: Option<FileAbout>, start: u64, length: Option<u64> },
    Data(Bytes),
    Done(Option<FileAbout>),
    Failed(NotDone),
}

/// Why it was not done.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct NotDone {
    pub(crate) fault: FileFault,
    pub(crate) message: String,
    pub(crate) size: Option<u64>,
}

/// What comes from who asked.
#[derive(Debug)]
pub(crate) enum Push {
    Data(Bytes),
    /// That was all.
    End,
    /// So many bytes were passed on.
    Taken(u64),
}

/// An ask on its way to the driver.
pub(crate) struct Order {
    ask: FileAsk,
    words: mpsc::Sender<Word>,
    pushes: mpsc::Receiver<Push>,
}

#[cfg(test)]
impl Order {
    /// For a test that plays the driver.
    pub(crate) fn played(self) -> (FileAsk, mpsc::Sender<Word>, mpsc::Receiver<Push>) {
        (self.ask, self.words, self.pushes)
    }
}

/// The ends of who asked. Dropped, the transfer is given up.
pub(crate) struct Ends {
    pub(crate) words: mpsc::Receiver<Word>,
    pub(crate) pushes: mpsc::Sender<Push>,
}

pub(crate) fn order(ask: FileAsk) -> (Order, Ends) {
    let ((to_asker, words), (pushes, from_asker)) = (mpsc::channel(WORDS), mpsc::channel(PIECES));
    (Order { ask, words: to_asker, pushes: from_asker }, Ends { words, pushes })
}

struct Transfer {
    order: Order,
    /// The agent was asked.
    asked: bool,
    received: u64,
    granted: u64,
    sent: u64,
    moved: Instant,
}

impl Transfer {
    /// It has no end, and long pauses.
    fn watches(&self) -> bool {
        matches!(self.order.ask, FileAsk::Watch { .. })
    }
}

/// All of a sandbox.
#[derive(Default)]
pub(super) struct Transfers {
    all: BTreeMap<u64, Transfer>,
    /// The one that had its turn.
    last: u64,
}

impl Transfers {
    pub(super) fn is_empty(&self) -> bool {
        self.all.is_empty()
    }

    /// Whether something is done that has an end. Who only watches does not keep a sandbox from being idle.
    pub(super) fn keep_busy(&self) -> bool {
        self.all.values().any(|transfer| !transfer.watches())
    }

    /// Whether something is being written.
    pub(super) fn write(&self) -> bool {
        self.all.values().any(|transfer| transfer.asked && transfer.order.ask.changes())
    }

    /// The next of what comes; none: who asked has gone. Never, if there is nothing that could come. Cancel-safe.
    pub(super) async fn next(&mut self, backlog: usize) -> (u64, Option<Push>) {
        std::future::poll_fn(|context| self.poll(context, backlog)).await
    }

    fn poll(&mut self, context: &mut Context<'_>, backlog: usize) -> Poll<(u64, Option<Push>)> {
        // The one that had its turn comes last, so that none waits for another.
        let numbers = self.all.range(self.last + 1..).chain(self.all.range(..=self.last)).map(|(number, _)| *number);
        for number in numbers.collect::<Vec<_>>() {
            let Some(transfer) = self.all.get_mut(&number) else { continue };
            let takes = !matches!(transfer.order.ask, FileAsk::Write { .. } | FileAsk::Unpack { .. }) || backlog < MAX_BACKLOG_BYTES;
            if transfer.asked
                && takes
                && let Poll::Ready(push) = transfer.order.pushes.poll_recv(context)
            {
                self.last = number;
                return Poll::Ready((number, push));
            }
        }
        Poll::Pending
    }

    pub(super) fn deadline(&self) -> Option<Instant> {
        self.all.values().filter(|transfer| !transfer.watches()).map(|transfer| transfer.moved + STALLED).min()
    }
}

impl Driver {
    pub(super) fn on_order(&mut self, order: Order) {
        let needed = if matches!(order.ask, FileAsk::Watch { .. }) { SingleFiles::All } else { SingleFiles::AllButWatch };
        let refusal = if self.single_files < needed {
            Some((FileFault::Failed, "This sandbox was made by an older version of this server, whose agent can't do it."))
        } else if self.transfers.all.len() >= MAX_FILE_TRANSFERS {
            Some((FileFault::Busy, "Too many files of this sandbox are being transferred. Try again later."))
        } else {
            None
        };
        if let Some((fault, message)) = refusal {
            // Nobody waits for an answer any longer if this fails.
            let _ = order.words.try_send(Word::Failed(NotDone { fault, message: message.to_owned(), size: None }));
            return;
        }
        self.file_numbers += 1;
        let transfer = Transfer { order, asked: false, received: 0, granted: FILE_CREDIT_BYTES, sent: 0, moved: Instant::now() };
        self.transfers.all.insert(self.file_numbers, transfer);
    }

    /// Asks the agent for what was ordered, if this is the moment. What changes files waits while they are packed.
    pub(super) fn begin_transfers(&mut self) {
        if self.transfers.is_empty() || !self.saves.may_serve() || !self.saves.may_act() || self.rollback.is_some() {
            return;
        }
        let packing = self.packing.is_some();
        for (sequence, transfer) in &mut self.transfers.all {
            let waits = packing && transfer.order.ask.changes();
            if !transfer.asked && !waits {
                transfer.asked = true;
                transfer.moved = Instant::now();
                let ask = transfer.order.ask.clone();
                self.writer.queue(&ToAgent::File { sequence: *sequence, ask, credit: FILE_CREDIT_BYTES });
            }
        }
    }

    pub(super) fn on_push(&mut self, sequence: u64, push: Option<Push>) {
        let Some(transfer) = self.transfers.all.get_mut(&sequence) else { return };
        transfer.moved = Instant::now();
        match push {
            Some(Push::Data(data)) => {
                self.writer.queue_files(sequence, transfer.sent, &data);
                transfer.sent += data.len() as u64;
            }
            Some(Push::End) => self.writer.queue(&ToAgent::FilesEnd { sequence }),
            Some(Push::Taken(taken)) => {
                let upto = taken.saturating_add(FILE_CREDIT_BYTES);
                let step = if transfer.watches() { 1 } else { CREDIT_STEP_BYTES };
                if upto >= transfer.granted.saturating_add(step) {
                    transfer.granted = upto;
                    self.writer.queue(&ToAgent::FilesCredit { sequence, upto });
                }
            }
            None => {
                self.transfers.all.remove(&sequence);
                self.writer.queue(&ToAgent::FilesCancel { sequence });
            }
        }
    }

    /// Gives up those of which nothing has moved for long.
    pub(super) fn give_up_transfers(&mut self, now: Instant) {
        let writer = &mut self.writer;
        self.transfers.all.retain(|sequence, transfer| {
            let stalled = !transfer.watches() && transfer.moved + STALLED <= now;
            if stalled {
                info!(sequence, "a transfer of a file was given up: nothing moved");
                let message = format!("Nothing moved for {} s, so it was given up.", STALLED.as_secs());
                // Full: it is cut off then, which says as much.
                let _ = transfer.order.words.try_send(Word::Failed(NotDone { fault: FileFault::Failed, message, size: None }));
                if transfer.asked {
                    writer.queue(&ToAgent::FilesCancel { sequence: *sequence });
                }
            }
            !stalled
        });
    }

    /// The agent is another one, and knows nothing of them.
    pub(super) fn cut_transfers(&mut self) {
        self.transfers.all.clear();
    }

    /// A piece of a file. An error is a break of the agent's protocol.
    pub(super) fn on_file_data(&mut self, sequence: u64, offset: u64, data: Bytes) -> Result<(), &'static str> {
        // What was on its way when it was given up.
        let Some(transfer) = self.transfers.all.get_mut(&sequence) else { return Ok(()) };
        let end = transfer.received.saturating_add(data.len() as u64);
        if !transfer.asked || offset != transfer.received || end > transfer.granted {
            return Err("a file that was not asked for");
        }
        transfer.received = end;
        transfer.moved = Instant::now();
        let data = if data.len() < SMALL_BYTES { Bytes::copy_from_slice(&data) } else { data };
        match transfer.order.words.try_send(Word::Data(data)) {
            Err(mpsc::error::TrySendError::Full(_)) => Err("a file in crumbs"),
            // Nobody takes it any longer, which is about to be noticed.
            _ => Ok(()),
        }
    }

    pub(super) fn on_file_opened(&mut self, sequence: u64, about: Option<FileAbout>, start: u64, length: Option<u64>) {
        if let Some(transfer) = self.transfers.all.get_mut(&sequence).filter(|transfer| transfer.asked && transfer.received == 0) {
            transfer.moved = Instant::now();
            let _ = transfer.order.words.try_send(Word::Opened { about, start, length });
        }
    }

    pub(super) fn on_file_done(&mut self, sequence: u64, bytes: u64, about: Option<FileAbout>) {
        let Some(transfer) = self.transfers.all.remove(&sequence) else { return };
        let last = if bytes == transfer.received {
            Word::Done(about)
        } else {
            Word::Failed(NotDone { fault: FileFault::Failed, message: "the agent miscounted".to_owned(), size: None })
        };
        // Full, or nobody there: then it is cut off, which is an error as well.
        let _ = transfer.order.words.try_send(last);
    }

    pub(super) fn on_file_failed(&mut self, sequence: u64, fault: FileFault, message: &str, size: Option<u64>) {
        let Some(transfer) = self.transfers.all.remove(&sequence) else { return };
        let message = message.chars().filter(|c| !c.is_control()).take(1000).collect();
        let _ = transfer.order.words.try_send(Word::Failed(NotDone { fault, message, size }));
    }
}
