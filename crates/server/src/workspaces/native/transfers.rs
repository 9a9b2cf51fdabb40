//! Single files of gVisor's own sandboxes.

use std::time::Duration;

use bytes::Bytes;
use sandboxer_protocol::{
    SandboxId,
    agent::{FileAbout, FileAsk, FileFault},
};
use tokio::time::timeout;

use super::{Native, NativeError};
use crate::{
    manager::Handle,
    sandbox::transfers::{Ends, NotDone, Push, Word, order},
    shares::Share,
};

/// What has to be passed on before the sandbox is told.
const TELL_BYTES: u64 = 256 * 1024;
/// How long the sandbox may take to begin: it may be in the middle of a save.
const BEGIN_WITHIN: Duration = Duration::from_secs(300);

/// Why something was not done, or not to its end.
#[derive(Debug)]
pub(crate) enum Broken {
    Native(NativeError),
    NotDone(NotDone),
    /// The sandbox went from here, or went back.
    Cut,
    /// Too much is going on in this server.
    Busy,
}

/// Something that is being done with a file.
pub(crate) struct Going {
    ends: Ends,
    taken: u64,
    told: u64,
    /// How much must have been taken before the sandbox is told.
    tell: u64,
    _turn: Option<Share>,
}

/// What a file is that was opened.
pub(crate) struct Opened {
    pub(crate) about: Option<FileAbout>,
    pub(crate) start: u64,
    pub(crate) length: Option<u64>,
}

impl Native {
    /// Begins something with a file of a sandbox that runs here.
    pub(crate) async fn begin_file(&self, id: SandboxId, who: Option<&str>, ask: FileAsk) -> Result<Going, Broken> {
        let turn = self.manager.file_turns.take(&ask, who).ok_or(Broken::Busy)?;
        let handle = self.running(id, who).await.map_err(Broken::Native)?;
        Going::begin(&handle, ask, turn).await
    }

    /// Does something that is done at once.
    pub(crate) async fn file(&self, id: SandboxId, who: Option<&str>, ask: FileAsk) -> Result<Option<FileAbout>, Broken> {
        self.begin_file(id, who, ask).await?.done().await
    }
}

impl Going {
    /// Begins something with a file of this sandbox; a turn is given back when it is over.
    pub(crate) async fn begin(handle: &Handle, ask: FileAsk, turn: Share) -> Result<Self, Broken> {
        // What watches waits for this to be told of every piece.
        let tell = if matches!(ask, FileAsk::Watch { .. }) { 1 } else { TELL_BYTES };
        let (order, ends) = order(ask);
        if !handle.file(order).await {
            return Err(Broken::Cut);
        }
        Ok(Self::new(ends, tell, Some(turn)))
    }

    fn new(ends: Ends, tell: u64, turn: Option<Share>) -> Self {
        Self { ends, taken: 0, told: 0, tell, _turn: turn }
    }

    /// One that a test plays the sandbox of.
    #[cfg(test)]
    pub(crate) fn played(ends: Ends) -> Self {
        Self::new(ends, TELL_BYTES, None)
    }

    async fn word(&mut self) -> Result<Word, Broken> {
        match self.ends.words.recv().await {
            Some(Word::Failed(why)) => Err(Broken::NotDone(why)),
            Some(word) => Ok(word),
            None => Err(Broken::Cut),
        }
    }

    pub(crate) async fn opened(&mut self) -> Result<Opened, Broken> {
        match timeout(BEGIN_WITHIN, self.word()).await.map_err(|_| Broken::Busy)?? {
            Word::Opened { about, start, length } => Ok(Opened { about, start, length }),
            _ => Err(unexpected()),
        }
    }

    /// The next bytes; none: those were all.
    pub(crate) async fn next(&mut self) -> Result<Option<Bytes>, Broken> {
        if self.taken >= self.told + self.tell {
            self.told = self.taken;
            // A driver that has gone is noticed by what follows.
            let _ = self.ends.pushes.send(Push::Taken(self.taken)).await;
        }
        match self.word().await? {
            Word::Data(data) => {
                self.taken += data.len() as u64;
                Ok(Some(data))
            }
            Word::Done(_) => Ok(None),
            _ => Err(unexpected()),
        }
    }

    /// Hands over the next bytes. An error comes as soon as the sandbox has one.
    pub(crate) async fn push(&mut self, data: Bytes) -> Result<(), Broken> {
        self.send(Push::Data(data)).await
    }

    async fn send(&mut self, push: Push) -> Result<(), Broken> {
        let Ends { words, pushes } = &mut self.ends;
        tokio::select! {
            biased;
            word = words.recv() => Err(broken_by(word)),
            sent = pushes.send(push) => sent.map_err(|_| Broken::Cut),
        }
    }

    /// Returns when the sandbox has an error, or has given it up, before all was handed over. Cancel-safe.
    pub(crate) async fn broken(&mut self) -> Broken {
        broken_by(self.ends.words.recv().await)
    }

    /// All was handed over.
    pub(crate) async fn finish(mut self) -> Result<Option<FileAbout>, Broken> {
        self.send(Push::End).await?;
        self.done().await
    }

    /// Waits for its end.
    pub(crate) async fn done(mut self) -> Result<Option<FileAbout>, Broken> {
        loop {
            match self.word().await? {
                Word::Done(about) => return Ok(about),
                Word::Opened { .. } => {}
                _ => return Err(unexpected()),
            }
        }
    }

    /// All that is sent, if it is not more than this.
    pub(crate) async fn whole(mut self, at_most: usize) -> Result<Vec<u8>, Broken> {
        self.opened().await?;
        let mut all = Vec::new();
        while let Some(data) = self.next().await? {
            all.extend_from_slice(&data);
            if all.len() > at_most {
                return Err(unexpected());
            }
        }
        Ok(all)
    }
}

/// What a word means that comes before all was handed over.
fn broken_by(word: Option<Word>) -> Broken {
    match word {
        Some(Word::Failed(why)) => Broken::NotDone(why),
        Some(_) => unexpected(),
        None => Broken::Cut,
    }
}

fn unexpected() -> Broken {
    Broken::NotDone(NotDone { fault: FileFault::Failed, message: "the sandbox's agent said something else".to_owned(), size: None })
}
