//! A window of memory that is shared with the sandbox, in which both sides take turns: gVisor's flipcall, the server's end of it.
//!
//! The sandbox is not trusted. What lies in the window is copied out before it is looked at, the window can't be made smaller under our
//! hands, and waiting for a turn ends when [`Window::stop`] is called, whatever the other side does.

use std::{
    fs::File,
    io,
    os::fd::OwnedFd,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU32, Ordering},
    },
};

use rustix::{
    fs::{MemfdFlags, SealFlags, fcntl_add_seals, memfd_create},
    io::Errno,
    thread::futex::{self, Flags, Timespec},
};
use vm_memory::{FileOffset, MmapRegion, VolatileMemory as _};

const PAGE_BYTES: usize = 4096;
/// Whose turn it is, how long what was left is, and eight bytes of nothing.
const HEADER_BYTES: usize = 16;
const TURN_AT: usize = 0;
const LENGTH_AT: usize = 4;
/// The sandbox's turn, which it has first.
const THEIRS: u32 = 0;
const OURS: u32 = 1;
const OVER: u32 = 2;
/// What both say first.
const GREETING: &[u8] = b"{}\n";
/// A sandbox that plays tricks with the turn can keep a wake-up from us, but not for long.
const LOOK_AGAIN: Timespec = Timespec { tv_sec: 1, tv_nsec: 0 };

pub(super) struct Window {
    region: MmapRegion,
    memory: Arc<File>,
    stopped: AtomicBool,
}

impl Window {
    /// With room for so many bytes.
    pub(super) fn new(bytes: usize) -> io::Result<Self> {
        let length = (HEADER_BYTES + bytes).next_multiple_of(PAGE_BYTES);
        let memory = memfd_create("sandboxer-window", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
        let memory = File::from(memory);
        memory.set_len(length as u64)?;
        fcntl_add_seals(&memory, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
        let memory = Arc::new(memory);
        let region = MmapRegion::from_file(FileOffset::from_arc(Arc::clone(&memory), 0), length).map_err(io::Error::other)?;
        Ok(Self { region, memory, stopped: AtomicBool::new(false) })
    }

    /// What the sandbox maps.
    pub(super) fn file(&self) -> io::Result<OwnedFd> {
        Ok(self.memory.try_clone()?.into())
    }

    pub(super) fn length(&self) -> usize {
        self.region.size()
    }

    /// Answers the greeting and waits for the first request. Returns the number that came with it; none: it is over.
    pub(super) fn accept(&self) -> io::Result<Option<u32>> {
        if !self.wait()? {
            return Ok(None);
        }
        self.write(0, GREETING)?;
        self.exchange(GREETING.len() as u32)
    }

    /// Gives the turn to the sandbox with a number, and waits for the next one. None: it is over.
    pub(super) fn exchange(&self, number: u32) -> io::Result<Option<u32>> {
        self.word(LENGTH_AT)?.store(number, Ordering::Relaxed);
        let turn = self.word(TURN_AT)?;
        if turn.compare_exchange(OURS, THEIRS, Ordering::AcqRel, Ordering::Acquire).is_err() {
            return Ok(None);
        }
        futex::wake(turn, Flags::empty(), 1)?;
        if self.wait()? { Ok(Some(self.word(LENGTH_AT)?.load(Ordering::Acquire))) } else { Ok(None) }
    }

    /// Waits for our turn. False: it is over.
    fn wait(&self) -> io::Result<bool> {
        let turn = self.word(TURN_AT)?;
        loop {
            if self.stopped.load(Ordering::Acquire) {
                return Ok(false);
            }
            match turn.load(Ordering::Acquire) {
                OURS => return Ok(true),
                THEIRS => match futex::wait(turn, Flags::empty(), THEIRS, Some(&LOOK_AGAIN)) {
                    Ok(()) | Err(Errno::AGAIN | Errno::INTR | Errno::TIMEDOUT) => {}
                    Err(error) => return Err(error.into()),
                },
                _ => return Ok(false),
            }
        }
    }

    /// Ends it, for both sides.
    pub(super) fn stop(&self) {
        self.stopped.store(true, Ordering::Release);
        if let Ok(turn) = self.word(TURN_AT) {
            turn.store(OVER, Ordering::Release);
            // Whoever does not hear of it looks by itself.
            let _ = futex::wake(turn, Flags::empty(), i32::MAX as u32);
        }
    }

    /// Copies what lies there.
    pub(super) fn read(&self, at: usize, into: &mut [u8]) -> io::Result<()> {
        self.region.get_slice(HEADER_BYTES + at, into.len()).map_err(io::Error::other)?.copy_to(into);
        Ok(())
    }

    pub(super) fn write(&self, at: usize, bytes: &[u8]) -> io::Result<()> {
        self.region.get_slice(HEADER_BYTES + at, bytes.len()).map_err(io::Error::other)?.copy_from(bytes);
        Ok(())
    }

    fn word(&self, at: usize) -> io::Result<&AtomicU32> {
        self.region.get_atomic_ref(at).map_err(io::Error::other)
    }
}

/// The sandbox's end, for tests.
#[cfg(test)]
pub(super) struct OtherEnd(Window);

#[cfg(test)]
impl OtherEnd {
    pub(super) fn of(window: &Window) -> Self {
        let memory = Arc::clone(&window.memory);
        let region = MmapRegion::from_file(FileOffset::from_arc(Arc::clone(&memory), 0), window.length()).unwrap();
        Self(Window { region, memory, stopped: AtomicBool::new(false) })
    }

    pub(super) fn greet(&self) {
        self.0.write(0, GREETING).unwrap();
        assert_eq!(self.ask(GREETING.len() as u32), Some(GREETING.len() as u32));
    }

    /// None: it is over.
    pub(super) fn ask(&self, number: u32) -> Option<u32> {
        self.0.word(LENGTH_AT).unwrap().store(number, Ordering::Relaxed);
        let turn = self.0.word(TURN_AT).unwrap();
        turn.compare_exchange(THEIRS, OURS, Ordering::AcqRel, Ordering::Acquire).ok()?;
        futex::wake(turn, Flags::empty(), 1).unwrap();
        loop {
            match turn.load(Ordering::Acquire) {
                THEIRS => return Some(self.0.word(LENGTH_AT).unwrap().load(Ordering::Acquire)),
                OURS => drop(futex::wait(turn, Flags::empty(), OURS, Some(&LOOK_AGAIN))),
                _ => return None,
            }
        }
    }

    pub(super) fn put(&self, bytes: &[u8]) {
        self.0.write(0, bytes).unwrap();
    }

    pub(super) fn get(&self, length: usize) -> Vec<u8> {
        let mut bytes = vec![0; length];
        self.0.read(0, &mut bytes).unwrap();
        bytes
    }

    pub(super) fn memory(&self) -> &File {
        &self.0.memory
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;

    #[test]
    fn both_sides_take_turns_until_one_ends_it() {
        let window = Arc::new(Window::new(100).unwrap());
        let other = OtherEnd::of(&window);
        let ours = thread::spawn({
            let window = Arc::clone(&window);
            move || {
                let mut numbers = Vec::new();
                let mut next = window.accept().unwrap();
                while let Some(number) = next {
                    numbers.push(number);
                    let mut said = [0; 5];
                    window.read(3, &mut said).unwrap();
                    window.write(0, &said).unwrap();
                    next = window.exchange(number + 1).unwrap();
                }
                numbers
            }
        });
        other.greet();
        other.put(b"...hello");
        assert_eq!(other.ask(7), Some(8));
        assert_eq!(other.get(5), b"hello");
        assert_eq!(other.ask(20), Some(21));
        window.stop();
        assert_eq!(other.ask(1), None);
        assert_eq!(ours.join().unwrap(), [7, 20]);
    }

    #[test]
    fn waiting_ends_and_the_window_stays_as_large_as_it_is_whatever_the_sandbox_does() {
        let window = Arc::new(Window::new(1).unwrap());
        let other = OtherEnd::of(&window);
        assert!(other.memory().set_len(0).is_err() && other.memory().set_len(1 << 30).is_err());
        let waits = thread::spawn({
            let window = Arc::clone(&window);
            move || window.accept().unwrap()
        });
        window.stop();
        // As if nobody had stopped it.
        other.0.word(TURN_AT).unwrap().store(THEIRS, Ordering::Release);
        assert_eq!(waits.join().unwrap(), None);
        assert!(window.read(PAGE_BYTES, &mut [0]).is_err() && window.write(usize::MAX - HEADER_BYTES, &[0]).is_err());
    }
}
