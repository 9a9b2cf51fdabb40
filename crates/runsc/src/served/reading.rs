//! One file that a sandbox reads: its requests in a [`Window`], and the thread that carries them out.
//!
//! A request says which bytes of the file go where in memory of the sandbox, a file that it has registered. They are written there, not
//! copied into a mapping of it: that costs half as much, since no page has to be cleared and faulted in first, and a sandbox that makes its file
//! smaller gets an error and not us a signal. By one thread, since a memory file takes one writer at a time, and the sandbox needs the other processors.

use std::{
    fs::File,
    io,
    ops::Range,
    os::unix::fs::FileExt as _,
    sync::{Arc, Mutex, Once, PoisonError},
    thread::{self, JoinHandle},
};

use super::window::Window;

/// What one read brings at most: so much fits into a processor's own cache.
pub(super) const MAX_READ_BYTES: usize = 256 * 1024;
/// The pieces of memory that one read goes to.
pub(super) const MAX_RANGES: usize = MAX_READ_BYTES / 4096;
/// Reads that are asked for at a time. What a program waits for comes behind them, so they are few.
pub(super) const MAX_PARALLEL: usize = 4;

const REQUEST_HEADER_BYTES: usize = 8;
const READ_HEADER_BYTES: usize = 24;
const RANGE_BYTES: usize = 16;
const ANSWER_HEADER_BYTES: usize = 8;
const WINDOW_BYTES: usize = REQUEST_HEADER_BYTES + MAX_PARALLEL * (READ_HEADER_BYTES + MAX_RANGES * RANGE_BYTES);

/// What every complaint begins with.
pub(super) const COMPLAINT: &str = "serve-files: ";
/// What it goes on with where it is the file that is to blame, and nothing that the sandbox did or asked for.
pub(super) const UNREADABLE: &str = "what was saved can't be read";
/// How a read tells that the file ended.
const END_OF_FILE: i32 = -1;
const EINVAL: i32 = nix::libc::EINVAL;
const EIO: i32 = nix::libc::EIO;

/// The memory that reads may go to, by the number it was registered with.
type Targets = Arc<Mutex<Vec<Arc<File>>>>;

/// A file that is open. Nothing of it is read or written any more when this is gone.
pub(super) struct Reading {
    window: Arc<Window>,
    targets: Targets,
    thread: Option<JoinHandle<()>>,
}

/// How a file is read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// From its beginning until it is over, which is found out by reading on.
    Stream,
    /// Where it is known what lies: nothing is asked for that was not saved.
    Pages,
}

impl Reading {
    /// Serves a file from a thread of its own. What goes wrong is said to `complain`.
    pub(super) fn start(file: File, kind: Kind, complain: impl Fn(&str) + Send + 'static) -> io::Result<Self> {
        let (window, targets) = (Arc::new(Window::new(WINDOW_BYTES)?), Targets::default());
        let bytes = file.metadata()?.len();
        let serving = Serving { file, bytes, kind, complain, window: Arc::clone(&window), targets: Arc::clone(&targets) };
        let thread = thread::Builder::new().name("restoring".to_owned()).spawn(move || {
            if let Err(error) = serving.run() {
                (serving.complain)(&error.to_string());
            }
            // The sandbox gets no answer any more, and knows what that means.
            serving.window.stop();
        })?;
        Ok(Self { window, targets, thread: Some(thread) })
    }

    pub(super) fn window(&self) -> &Window {
        &self.window
    }

    /// Returns its number.
    pub(super) fn register(&self, target: File) -> usize {
        let mut targets = self.targets.lock().unwrap_or_else(PoisonError::into_inner);
        targets.push(Arc::new(target));
        targets.len() - 1
    }

    pub(super) fn registered(&self) -> usize {
        self.targets.lock().unwrap_or_else(PoisonError::into_inner).len()
    }
}

impl Drop for Reading {
    fn drop(&mut self) {
        self.window.stop();
        // It does no more than what it was asked for last.
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

struct Serving<C> {
    file: File,
    /// As many as there were when it was opened. What lies beyond is never read: that it is not there is nobody's fault but that of who asks.
    bytes: u64,
    kind: Kind,
    complain: C,
    window: Arc<Window>,
    targets: Targets,
}

/// What is to be read.
#[derive(Debug, PartialEq, Eq)]
struct Read {
    id: u32,
    offset: u64,
    target: u32,
    ranges: Vec<Range<u64>>,
}

/// What became of it.
#[derive(Debug, PartialEq, Eq)]
struct Completion {
    id: u32,
    bytes: u32,
    errno: i32,
}

impl<C: Fn(&str)> Serving<C> {
    fn run(&self) -> io::Result<()> {
        let (mut request, mut buffer) = (vec![0; WINDOW_BYTES], vec![0; MAX_READ_BYTES]);
        let mut next = self.window.accept()?;
        while let Some(count) = next {
            self.window.read(0, &mut request)?;
            let reads = parse(&request, count).ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, "the sandbox makes no sense"))?;
            let mut answer = vec![0; ANSWER_HEADER_BYTES];
            for read in &reads {
                let Completion { id, bytes, errno } = self.carry_out(read, &mut buffer);
                answer.extend(id.to_ne_bytes().into_iter().chain(bytes.to_ne_bytes()).chain(errno.to_ne_bytes()));
            }
            self.window.write(0, &answer)?;
            next = self.window.exchange(count)?;
        }
        Ok(())
    }

    fn carry_out(&self, read: &Read, buffer: &mut [u8]) -> Completion {
        let failed = |errno| Completion { id: read.id, bytes: 0, errno };
        let target = self.targets.lock().unwrap_or_else(PoisonError::into_inner).get(read.target as usize).cloned();
        let Some(target) = target else { return failed(EINVAL) };
        let wanted: u64 = read.ranges.iter().map(|range| range.end - range.start).sum();
        let Some(buffer) = usize::try_from(wanted).ok().and_then(|wanted| buffer.get_mut(..wanted)) else { return failed(EINVAL) };
        let there = wanted.min(self.bytes.saturating_sub(read.offset));
        if there < wanted && self.kind == Kind::Pages {
            // Too little was saved, or the sandbox asks for more than it knows of. Which of them can't be told from here.
            (self.complain)("more of its memory is asked for than was saved");
        }
        let filled = usize::try_from(there).unwrap_or(usize::MAX).min(buffer.len());
        let found = self.file.read_exact_at(&mut buffer[..filled], read.offset);
        let found = found.inspect_err(|error| (self.complain)(&format!("{UNREADABLE}: {error}")));
        let copied = found.and_then(|()| {
            let mut rest = &buffer[..filled];
            for range in &read.ranges {
                let length = rest.len().min(usize::try_from(range.end - range.start).unwrap_or(usize::MAX));
                let (piece, more) = rest.split_at(length);
                target.write_all_at(piece, range.start)?;
                rest = more;
            }
            Ok(filled)
        });
        match copied {
            Ok(filled) => {
                let errno = if filled < buffer.len() { END_OF_FILE } else { 0 };
                Completion { id: read.id, bytes: u32::try_from(filled).unwrap_or(u32::MAX), errno }
            }
            Err(error) => {
                (self.complain)(&format!("its memory can't be written: {error}"));
                failed(error.raw_os_error().unwrap_or(EIO))
            }
        }
    }
}

/// Says what went wrong, to whoever looks into the sandbox's directory afterwards. Once: the sandbox could have us say it for ever. Never in words of the sandbox's.
pub(super) fn complain(why: &str) {
    static FIRST: Once = Once::new();
    FIRST.call_once(|| eprintln!("{COMPLAINT}{why}"));
}

/// What is to be read. How many of them must be done before the sandbox hears again does not matter: all are. None: it makes no sense.
fn parse(request: &[u8], count: u32) -> Option<Vec<Read>> {
    let mut rest = request.get(REQUEST_HEADER_BYTES..).filter(|_| count as usize <= MAX_PARALLEL)?;
    (0..count).map(|_| parse_read(&mut rest)).collect()
}

fn parse_read(rest: &mut &[u8]) -> Option<Read> {
    let id = u32_of(rest)?;
    let _nothing = u32_of(rest)?;
    // Signed there, and never negative.
    let offset = u64_of(rest).filter(|offset| i64::try_from(*offset).is_ok())?;
    let target = u32_of(rest)?;
    let ranges = u32_of(rest).filter(|count| (1..=MAX_RANGES).contains(&(*count as usize)))?;
    let ranges = (0..ranges).map(|_| parse_range(rest)).collect::<Option<Vec<Range<u64>>>>()?;
    let total = ranges.iter().try_fold(0u64, |total, range| total.checked_add(range.end - range.start))?;
    // No file is that long; the system would refuse it as it refuses to read a broken disk.
    offset.checked_add(total).filter(|end| i64::try_from(*end).is_ok())?;
    (total <= MAX_READ_BYTES as u64).then_some(Read { id, offset, target, ranges })
}

fn parse_range(rest: &mut &[u8]) -> Option<Range<u64>> {
    let range = u64_of(rest)?..u64_of(rest)?;
    (range.start < range.end && i64::try_from(range.end).is_ok()).then_some(range)
}

fn u32_of(rest: &mut &[u8]) -> Option<u32> {
    let (bytes, more) = rest.split_first_chunk()?;
    *rest = more;
    Some(u32::from_ne_bytes(*bytes))
}

fn u64_of(rest: &mut &[u8]) -> Option<u64> {
    let (bytes, more) = rest.split_first_chunk()?;
    *rest = more;
    Some(u64::from_ne_bytes(*bytes))
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use super::{super::window::OtherEnd, *};

    const COMPLETION_BYTES: usize = 12;

    fn one(range: Range<u64>) -> Vec<Range<u64>> {
        std::iter::once(range).collect()
    }

    fn file(bytes: &[u8]) -> File {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(bytes).unwrap();
        file
    }

    fn request(least: u32, reads: &[Read]) -> Vec<u8> {
        let mut bytes: Vec<u8> = [least, 0].iter().flat_map(|word| word.to_ne_bytes()).collect();
        for Read { id, offset, target, ranges } in reads {
            bytes.extend([*id, 0].iter().flat_map(|word| word.to_ne_bytes()));
            bytes.extend(offset.to_ne_bytes());
            bytes.extend([*target, ranges.len() as u32].iter().flat_map(|word| word.to_ne_bytes()));
            bytes.extend(ranges.iter().flat_map(|range| [range.start, range.end]).flat_map(u64::to_ne_bytes));
        }
        bytes
    }

    fn completions(bytes: &[u8]) -> Vec<Completion> {
        let mut rest = &bytes[ANSWER_HEADER_BYTES..];
        let mut completions = Vec::new();
        while let (Some(id), Some(bytes), Some(errno)) = (u32_of(&mut rest), u32_of(&mut rest), u32_of(&mut rest)) {
            completions.push(Completion { id, bytes, errno: errno as i32 });
        }
        completions.sort_by_key(|completion| completion.id);
        completions
    }

    fn ask(other: &OtherEnd, least: u32, reads: &[Read]) -> Option<Vec<Completion>> {
        other.put(&request(least, reads));
        let count = other.ask(reads.len() as u32)?;
        Some(completions(&other.get(ANSWER_HEADER_BYTES + count as usize * COMPLETION_BYTES)))
    }

    fn start(bytes: &[u8]) -> (Reading, OtherEnd, File) {
        start_with(file(bytes), Kind::Stream, |_| {})
    }

    fn start_with(file: File, kind: Kind, complain: impl Fn(&str) + Send + 'static) -> (Reading, OtherEnd, File) {
        let reading = Reading::start(file, kind, complain).unwrap();
        let other = OtherEnd::of(reading.window());
        other.greet();
        let memory = tempfile::tempfile().unwrap();
        assert_eq!(reading.register(memory.try_clone().unwrap()), 0);
        (reading, other, memory)
    }

    #[test]
    fn what_is_asked_for_is_written_where_it_is_to_go() {
        let bytes: Vec<u8> = (0..3 * MAX_READ_BYTES).map(|at| (at / 7) as u8).collect();
        let (_reading, other, memory) = start(&bytes);
        let most = MAX_READ_BYTES as u64;
        let reads = [
            Read { id: 0, offset: 10, target: 0, ranges: one(0..most) },
            // Into two places, and to the end of the file.
            Read { id: 2, offset: 3 * most - 100, target: 0, ranges: vec![2 * most..2 * most + 60, 3 * most..3 * most + 60] },
            Read { id: 3, offset: 0, target: 1, ranges: one(0..1) },
            Read { id: 1, offset: 9 * most, target: 0, ranges: one(0..1) },
        ];
        let done = ask(&other, 4, &reads).unwrap();
        let wanted = [(0, most as u32, 0), (1, 0, END_OF_FILE), (2, 100, END_OF_FILE), (3, 0, EINVAL)];
        assert_eq!(done, wanted.map(|(id, bytes, errno)| Completion { id, bytes, errno }));
        let mut found = vec![0; 3 * MAX_READ_BYTES + 40];
        memory.read_exact_at(&mut found, 0).unwrap();
        let (most, end) = (MAX_READ_BYTES, bytes.len());
        assert!(found[..most] == bytes[10..10 + most]);
        assert!(found[2 * most..2 * most + 60] == bytes[end - 100..end - 40] && found[3 * most..] == bytes[end - 40..]);
        // Its numbers are free again.
        assert_eq!(ask(&other, 1, &reads[..1]).unwrap(), [Completion { id: 0, bytes: most as u32, errno: 0 }]);
        assert_eq!(ask(&other, 0, &[]).unwrap(), []);
    }

    #[test]
    fn what_was_saved_is_to_blame_for_a_read_that_failed_and_for_nothing_that_the_sandbox_asked_for() {
        let complaints = |kind, read: Read, cut: Option<u64>| {
            let (sender, complaints) = std::sync::mpsc::channel();
            let saved = file(b"0123456789");
            let (reading, other, _memory) = start_with(saved.try_clone().unwrap(), kind, move |why| sender.send(why.to_owned()).unwrap());
            cut.into_iter().for_each(|bytes| saved.set_len(bytes).unwrap());
            let done = ask(&other, 1, &[read]);
            drop((reading, other));
            (done.map(|done| (done[0].bytes, done[0].errno)), complaints.into_iter().next())
        };
        let read = |offset, range: Range<u64>| Read { id: 0, offset, target: 0, ranges: one(range) };
        // Reading on is how the end of a stream is found out.
        assert_eq!(complaints(Kind::Stream, read(0, 0..20), None), (Some((10, END_OF_FILE)), None));
        assert_eq!(complaints(Kind::Pages, read(0, 0..10), None), (Some((10, 0)), None));
        for (offset, bytes) in [(0, 10), (9, 1), (10, 0), (i64::MAX as u64 - 20, 0)] {
            let (done, why) = complaints(Kind::Pages, read(offset, 0..20), None);
            assert_eq!(done, Some((bytes, END_OF_FILE)), "{offset}");
            assert!(why.is_some_and(|why| !why.starts_with(UNREADABLE)), "{offset}");
        }
        assert!(complaints(Kind::Pages, read(i64::MAX as u64, 0..1), None).1.is_some_and(|why| !why.starts_with(UNREADABLE)));
        // It was there when it was opened.
        for kind in [Kind::Stream, Kind::Pages] {
            let (done, why) = complaints(kind, read(0, 0..10), Some(5));
            assert!(done.is_some_and(|(bytes, errno)| bytes == 0 && errno > 0), "{done:?}");
            assert!(why.is_some_and(|why| why.starts_with(UNREADABLE)));
        }
    }

    #[test]
    fn a_sandbox_that_makes_no_sense_gets_no_answer() {
        let read = |id, range: Range<u64>| Read { id, offset: 0, target: 0, ranges: one(range) };
        let many: Vec<Read> = (0..=MAX_PARALLEL as u32).map(|id| read(id, 0..1)).collect();
        let too_long = read(0, 0..MAX_READ_BYTES as u64 + 1);
        let beyond_all_files = Read { offset: i64::MAX as u64, ..read(0, 0..1) };
        for reads in [&many[..], &[too_long], &[read(0, 5..5)], &[beyond_all_files]] {
            let (_reading, other, _memory) = start(b"bytes");
            assert_eq!(ask(&other, 1, reads), None, "{reads:?}");
        }
    }

    #[test]
    fn whatever_lies_in_the_window_is_read_within_its_bounds() {
        let mut state = 1u64;
        for _ in 0..20_000 {
            let bytes: Vec<u8> = (0..200)
                .map(|_| {
                    state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                    // Mostly small numbers, which get further.
                    if state >> 60 == 0 { (state >> 33) as u8 } else { (state >> 62) as u8 }
                })
                .collect();
            if let Some(reads) = parse(&bytes, (state >> 59) as u32) {
                assert!(reads.len() <= MAX_PARALLEL);
                for read in reads {
                    let total: u64 = read.ranges.iter().map(|range| range.end - range.start).sum();
                    assert!(read.ranges.len() <= MAX_RANGES && total <= MAX_READ_BYTES as u64);
                }
            }
        }
    }
}
