//! The pages of a checkpoint, while gVisor writes them.
//!
//! gVisor writes that file by one thread, from its start to its end, and never comes back to what it has written. So what is there can be read while it goes on. Two things could make
//! that untrue, and both can be seen: a write that was cut short, which it repeats behind the others and which is a hole until then, and files that are written past the page cache, which
//! it does only if they are given to it so.

use std::{convert::Infallible, fs::File, future, io, os::fd::OwnedFd, path::Path, sync::Arc, time::Duration};

use rustix::fs::{SeekFrom, inotify, seek};
use tokio::{
    io::{Interest, unix::AsyncFd},
    task::spawn_blocking,
    time::sleep,
};

/// It is not told more often than this: by then there is something to do.
const STEP: u64 = 1 << 20;
/// Nor is it looked at more often, however often it is written to.
const PAUSE: Duration = Duration::from_millis(1);

/// Who is told how much of the pages is there, and will not change any more, as it grows.
pub type Written<'a> = &'a (dyn Fn(u64) + Send + Sync);

pub(crate) struct Growth {
    file: Arc<File>,
    events: AsyncFd<OwnedFd>,
}

impl Growth {
    /// Of a file that is there, and empty.
    pub(crate) fn of(path: &Path) -> io::Result<Self> {
        // Not the descriptor that the sandbox gets: it is one place in the file that both would have.
        let file = Arc::new(File::open(path)?);
        let events = inotify::init(inotify::CreateFlags::CLOEXEC | inotify::CreateFlags::NONBLOCK)?;
        inotify::add_watch(&events, path, inotify::WatchFlags::MODIFY)?;
        #[expect(deprecated, reason = "its successor is unsafe for types that lie about their descriptor, which an OwnedFd does not")]
        let events = AsyncFd::with_interest(events, Interest::READABLE)?;
        Ok(Self { file, events })
    }

    /// Tells of it for as long as this is polled. If that can't be done any more, nobody is told, and all of it is there at the end all the same.
    pub(crate) async fn tell(self, written: Written<'_>) -> Infallible {
        let mut told = 0;
        while let Ok(there) = self.grown(told).await {
            if there >= told + STEP {
                told = there;
                written(there);
            }
            sleep(PAUSE).await;
        }
        future::pending().await
    }

    /// How much there is when it has been written to, of which so much is known.
    async fn grown(&self, known: u64) -> io::Result<u64> {
        let mut events = [0; 4096];
        // What they say is nothing but that there are some.
        self.events.async_io(Interest::READABLE, |fd| Ok(rustix::io::read(fd, &mut events)?)).await?;
        let length = self.file.metadata()?.len();
        if length < known + STEP {
            return Ok(known);
        }
        // This waits for whoever writes just now, who may wait for the disk.
        let file = Arc::clone(&self.file);
        let hole = spawn_blocking(move || seek(&*file, SeekFrom::Hole(known))).await.map_err(io::Error::other)??;
        Ok(hole.min(length))
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt as _;

    use super::*;

    const MIB: usize = 1 << 20;

    /// How much of a file is found to be there when this has been done to it.
    async fn there(path: &Path, write: impl FnOnce(&File)) -> u64 {
        let file = File::options().write(true).create_new(true).open(path).unwrap();
        let growth = Growth::of(path).unwrap();
        write(&file);
        growth.grown(0).await.unwrap()
    }

    #[tokio::test]
    async fn what_is_there_is_found_and_a_hole_ends_it() {
        let dir = tempfile::tempdir().unwrap();
        let full = vec![1; 4 * MIB];
        let path = dir.path().join("nothing");
        let nothing = there(&path, |_| {});
        assert!(tokio::time::timeout(Duration::from_millis(1), nothing).await.is_err(), "nobody has written to it");
        assert_eq!(there(&dir.path().join("little"), |file| file.write_all_at(&full[..MIB - 1], 0).unwrap()).await, 0);
        assert_eq!(there(&dir.path().join("all"), |file| file.write_all_at(&full, 0).unwrap()).await, 4 * MIB as u64);
        // One write was cut short, and the next one went on behind it.
        let cut_short = |file: &File| {
            file.write_all_at(&full[..2 * MIB], 0).unwrap();
            file.write_all_at(&full, 3 * MIB as u64).unwrap();
        };
        assert_eq!(there(&dir.path().join("hole"), cut_short).await, 2 * MIB as u64);
    }

    #[tokio::test]
    async fn it_is_told_as_it_grows() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("pages");
        let file = File::options().write(true).create_new(true).open(&path).unwrap();
        let growth = Growth::of(&path).unwrap();
        let (sender, mut told) = tokio::sync::mpsc::unbounded_channel();
        let written = move |bytes| sender.send(bytes).unwrap();
        let telling = tokio::spawn(async move { growth.tell(&written).await });
        for round in 0..4 {
            file.write_all_at(&vec![1; MIB], round * MIB as u64).unwrap();
            assert_eq!(told.recv().await, Some((round + 1) * MIB as u64));
        }
        telling.abort();
    }
}
