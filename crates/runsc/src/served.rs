//! The files of a checkpoint, served to a sandbox that is being restored from them, by a process of its own.
//!
//! Left to itself, gVisor reads the memory of a sandbox by up to 128 reads at once, each into pages that are cleared and faulted in for it. Beside that the
//! one thread that loads its kernel hardly gets a processor, where there are few. It can ask somebody else for its files instead (its "checkpoint gofer"): then it is
//! us who decide how many read, and who write into its memory at half the cost. So it runs while its memory is still being brought.
//!
//! That it can run before all of its memory is there makes the one who brings it indispensable: if that one ends, gVisor ends the sandbox. So it is not the server, which may
//! end at any time, but a process that does nothing else ([`FileServer`]) and lives as long as the sandbox asks. It is put into the sandbox's cgroup, since whoever
//! writes a page first is the one whose memory it is counted as.
//!
//! A sandbox asks over a socket to open a file and to register its memory; reads are asked for in a [`window`] of memory for each file. It is
//! hostile all the same: it has no more than three files open, and nothing that it says is used unchecked.

mod reading;
mod window;

use std::{
    fs::{self, File},
    io::{self, IoSlice, IoSliceMut, Read as _, Write as _},
    mem::MaybeUninit,
    os::{
        fd::{AsFd, OwnedFd},
        unix::net::UnixStream,
    },
    path::Path,
};

use rustix::{
    cmsg_space,
    fs::fcntl_get_seals,
    net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, recvmsg, sendmsg},
    thread::{CapabilitySet, CapabilitySets, set_capabilities, set_no_new_privs},
};
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::process::{Child, Command};

use self::reading::{COMPLAINT, Kind, MAX_PARALLEL, MAX_RANGES, MAX_READ_BYTES, Reading, UNREADABLE, complain};
use crate::control::{FILES, PAGES};

/// In the directory of the sandbox, until it has all of its memory; empty unless something failed.
const LOG: &str = "serve-files.log";
/// What of it is looked at. A complaint is far shorter.
const MAX_LOG_BYTES: u64 = 1024;
const MAX_CALL_BYTES: usize = 1024 * 1024;
/// Descriptors that may come with one call.
const MAX_DESCRIPTORS: usize = 4;
/// A sandbox registers one for each file, and one for each memory that it has.
const MAX_TARGETS: usize = 64;
/// A file is opened for reading.
const OPEN_TO_READ: i64 = 1;

/// A process that serves the files of one restore. It ends when the sandbox has all of them, when the sandbox is gone, and when this is dropped unused.
#[derive(Debug)]
pub struct FileServer {
    /// The sandbox's end of the conversation.
    pub(crate) socket: File,
    /// Where it is given what to serve.
    files: UnixStream,
}

impl FileServer {
    /// Starts one, which may wait for its use, for the sandbox with this directory: it has its log there, and is told apart by it. The program is to
    /// call [`serve_files`] with its standard input and output. Whoever started it waits for it, and before it is used puts it where its memory is to be counted.
    ///
    /// # Errors
    /// The program could not be executed.
    pub fn start(program: &Path, arguments: &[&str], sandbox: &Path) -> io::Result<(Self, Child)> {
        let (ours, theirs) = UnixStream::pair()?;
        let (files, given) = UnixStream::pair()?;
        let log = File::create(sandbox.join(LOG))?;
        let mut command = Command::new(program);
        command.args(arguments).arg(sandbox).env_clear().stdin(OwnedFd::from(given)).stdout(OwnedFd::from(ours)).stderr(log);
        let child = command.spawn()?;
        Ok((Self { socket: File::from(OwnedFd::from(theirs)), files }, child))
    }

    /// Gives it the files of a checkpoint, open: what the server may read it need not be able to find.
    ///
    /// # Errors
    /// There are not all of them, or it has died while it waited.
    pub(crate) fn serve(&mut self, from: &Path) -> io::Result<()> {
        let files = FILES.into_iter().map(|name| File::open(from.join(name))).collect::<io::Result<Vec<File>>>()?;
        let files: Vec<_> = files.iter().map(AsFd::as_fd).collect();
        let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(FILES.len()))];
        let mut along = SendAncillaryBuffer::new(&mut space);
        along.push(SendAncillaryMessage::ScmRights(&files));
        sendmsg(&self.files, &[IoSlice::new(&[0])], &mut along, SendFlags::NOSIGNAL)?;
        Ok(())
    }
}

/// Why whoever brings the sandbox with this directory its memory did not do so.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NotBrought {
    pub why: String,
    /// What was saved can't be read, whatever the sandbox does.
    pub unreadable: bool,
}

impl NotBrought {
    /// None: nothing went wrong, as far as is known.
    #[must_use]
    pub fn of(sandbox: &Path) -> Option<Self> {
        let mut said = Vec::new();
        File::open(sandbox.join(LOG)).ok()?.take(MAX_LOG_BYTES).read_to_end(&mut said).ok()?;
        let said = String::from_utf8_lossy(&said);
        let first = said.lines().next()?;
        let why = first.strip_prefix(COMPLAINT).unwrap_or(first).to_owned();
        Some(Self { unreadable: first.starts_with(COMPLAINT) && why.starts_with(UNREADABLE), why })
    }

    /// Notes for whom it brought memory that it ended before it was done, and how, unless it has said why itself, or all of it is there.
    pub fn note_end(sandbox: &Path, how: &str) {
        if Self::of(sandbox).is_none()
            && let Ok(mut log) = File::options().append(true).open(sandbox.join(LOG))
        {
            // What can't be noted is not told.
            let _ = writeln!(log, "{COMPLAINT}whoever brought it ended too early: {how}");
        }
    }

    /// Whether somebody brings this sandbox its memory, as far as is known.
    #[must_use]
    pub fn is_possible(sandbox: &Path) -> bool {
        sandbox.join(LOG).exists()
    }

    /// All of it is there: nothing that went wrong, or is said to, is of interest any more.
    pub fn forget(sandbox: &Path) {
        let _ = fs::remove_file(sandbox.join(LOG));
    }
}

/// Waits for the files of a checkpoint, and serves them to the sandbox at the other end, until that has closed it.
///
/// # Errors
/// It breaks off, or the sandbox makes no sense.
pub fn serve_files(given: &UnixStream, sandbox: UnixStream) -> io::Result<()> {
    let mut files = Vec::new();
    if receive(given, &mut [0], |file| files.push(file))? == 0 {
        // Nobody had a use for it.
        return Ok(());
    }
    let files = <[File; FILES.len()]>::try_from(files).map_err(|_| io::ErrorKind::InvalidData)?;
    match (Served { stream: sandbox, files, open: Vec::new(), heard: Vec::new(), descriptors: Vec::new() }).serve() {
        // It was gone before it had read all answers.
        Err(error) if matches!(error.kind(), io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe) => Ok(()),
        served => served,
    }
}

/// Returns how many bytes came; none: the other end is closed.
fn receive(stream: &UnixStream, bytes: &mut [u8], take: impl FnMut(File)) -> io::Result<usize> {
    let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(MAX_DESCRIPTORS))];
    let mut along = RecvAncillaryBuffer::new(&mut space);
    let got = rustix::io::retry_on_intr(|| recvmsg(stream, &mut [IoSliceMut::new(bytes)], &mut along, RecvFlags::CMSG_CLOEXEC))?;
    let rights = along.drain().filter_map(|message| match message {
        RecvAncillaryMessage::ScmRights(rights) => Some(rights),
        _ => None,
    });
    rights.flatten().map(File::from).for_each(take);
    Ok(got.bytes)
}

/// Gives up for good what whoever serves files has no use for. Before there is another thread.
///
/// # Errors
/// The system refuses it.
pub fn give_up_privileges() -> io::Result<()> {
    // What is sent to the server's terminal is not for it. Nor is what the system sends to those who were stopped when whoever started them ends, as it would to a group of the
    // server's own session.
    rustix::process::setsid()?;
    set_no_new_privs(true)?;
    let none = CapabilitySet::empty();
    Ok(set_capabilities(None, CapabilitySets { effective: none, permitted: none, inheritable: none })?)
}

struct Served {
    stream: UnixStream,
    /// As they are called in [`FILES`].
    files: [File; FILES.len()],
    open: Vec<Option<Reading>>,
    heard: Vec<u8>,
    descriptors: Vec<File>,
}

#[derive(Deserialize)]
struct Call {
    method: String,
    #[serde(default)]
    arg: Value,
}

impl Served {
    fn serve(mut self) -> io::Result<()> {
        while let Some((call, descriptors)) = self.next()? {
            let (answer, descriptor) = match self.carry_out(&call, descriptors) {
                Ok((result, descriptor)) => (json!({"success": true, "err": "", "result": result}), descriptor),
                Err(why) => (json!({"success": false, "err": why, "result": null}), None),
            };
            self.answer(&answer.to_string(), descriptor)?;
        }
        Ok(())
    }

    fn carry_out(&mut self, call: &Call, descriptors: Vec<File>) -> Result<(Value, Option<OwnedFd>), String> {
        let Call { method, arg } = call;
        match method.as_str() {
            "AsyncFileServer.Open" => self.open(arg).map_err(|error| error.to_string()),
            "AsyncFileServer.RegisterClientFile" => self.register(arg, descriptors).map(|handle| (json!({"handle": handle}), None)),
            "AsyncFileServer.Close" => {
                let open = handle_of(arg).and_then(|handle| self.open.get_mut(handle)).ok_or("there is no such file")?;
                *open = None;
                Ok((json!({}), None))
            }
            _ => Err("there is no such method".to_owned()),
        }
    }

    fn open(&mut self, arg: &Value) -> io::Result<(Value, Option<OwnedFd>)> {
        let path = arg["path"].as_str().ok_or(io::ErrorKind::NotFound)?;
        let at = FILES.iter().position(|name| *name == path).ok_or(io::ErrorKind::NotFound)?;
        if arg["mode"].as_i64() != Some(OPEN_TO_READ) || self.open.len() >= FILES.len() {
            return Err(io::ErrorKind::PermissionDenied.into());
        }
        let kind = if FILES[at] == PAGES { Kind::Pages } else { Kind::Stream };
        let reading = Reading::start(self.files[at].try_clone()?, kind, complain)?;
        let answer = json!({
            "handle": self.open.len(),
            "max_io_bytes": MAX_READ_BYTES,
            "max_ranges": MAX_RANGES,
            "max_parallel": MAX_PARALLEL,
            "packet_window_offset": 0,
            "packet_window_length": reading.window().length(),
        });
        let window = reading.window().file()?;
        self.open.push(Some(reading));
        Ok((answer, Some(window)))
    }

    fn register(&mut self, arg: &Value, descriptors: Vec<File>) -> Result<usize, String> {
        let reading = handle_of(arg).and_then(|handle| self.open.get(handle)).and_then(Option::as_ref).ok_or("there is no such file")?;
        let [target] = <[File; 1]>::try_from(descriptors).map_err(|_| "it is one file that is registered")?;
        if reading.registered() >= MAX_TARGETS {
            return Err("there are too many already".to_owned());
        }
        Ok(reading.register(target))
    }

    /// None: it has closed its end.
    fn next(&mut self) -> io::Result<Option<(Call, Vec<File>)>> {
        loop {
            let mut calls = serde_json::Deserializer::from_slice(&self.heard).into_iter::<Call>();
            match calls.next() {
                Some(Ok(call)) => {
                    let length = calls.byte_offset();
                    self.heard.drain(..length);
                    return Ok(Some((call, std::mem::take(&mut self.descriptors))));
                }
                // Why not is not repeated: it would be in words of the sandbox's.
                Some(Err(error)) if !error.is_eof() => return Err(io::Error::new(io::ErrorKind::InvalidData, "a call makes no sense")),
                _ => {}
            }
            if self.heard.len() > MAX_CALL_BYTES {
                return Err(io::Error::new(io::ErrorKind::InvalidData, "a call is too long"));
            }
            if !self.receive()? {
                return Ok(None);
            }
        }
    }

    fn receive(&mut self) -> io::Result<bool> {
        let mut bytes = vec![0; 64 * 1024];
        let descriptors = &mut self.descriptors;
        let count = receive(&self.stream, &mut bytes, |file| {
            // Memory, and nothing else: no file that somebody else reads is written for a sandbox, and who kept the sandbox's own end of this conversation
            // would never hear of its end. What can be sealed is memory.
            if fcntl_get_seals(&file).is_ok() {
                descriptors.push(file);
            }
        })?;
        if self.descriptors.len() > MAX_DESCRIPTORS {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "a call comes with too many files"));
        }
        self.heard.extend_from_slice(&bytes[..count]);
        Ok(count > 0)
    }

    fn answer(&mut self, answer: &str, descriptor: Option<OwnedFd>) -> io::Result<()> {
        let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(1))];
        let mut along = SendAncillaryBuffer::new(&mut space);
        let descriptors: Vec<_> = descriptor.iter().map(AsFd::as_fd).collect();
        if !descriptors.is_empty() {
            along.push(SendAncillaryMessage::ScmRights(&descriptors));
        }
        // It has room for many of these. A sandbox that does not read them gets no more.
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        let sent = rustix::io::retry_on_intr(|| sendmsg(self.stream.as_fd(), &[IoSlice::new(answer.as_bytes())], &mut along, flags))?;
        if sent == answer.len() { Ok(()) } else { Err(io::ErrorKind::WriteZero.into()) }
    }
}

fn handle_of(arg: &Value) -> Option<usize> {
    arg["handle"].as_u64().and_then(|handle| usize::try_from(handle).ok())
}

#[cfg(test)]
mod tests {
    use std::thread;

    use rustix::fs::{MemfdFlags, memfd_create};

    use super::*;

    /// A sandbox that asks for the files in a directory.
    struct Sandbox(UnixStream);

    impl Sandbox {
        fn of(dir: &Path) -> (Self, thread::JoinHandle<io::Result<()>>) {
            let (ours, theirs) = UnixStream::pair().unwrap();
            let (files, given) = UnixStream::pair().unwrap();
            FileServer { socket: OwnedFd::from(theirs.try_clone().unwrap()).into(), files }.serve(dir).unwrap();
            (Self(theirs), thread::spawn(move || serve_files(&given, ours)))
        }

        fn call(&mut self, method: &str, arg: Value, file: Option<&File>) -> Value {
            let call = json!({"method": method, "arg": arg}).to_string();
            let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(1))];
            let mut along = SendAncillaryBuffer::new(&mut space);
            let descriptors: Vec<_> = file.iter().map(|file| file.as_fd()).collect();
            if !descriptors.is_empty() {
                assert!(along.push(SendAncillaryMessage::ScmRights(&descriptors)));
            }
            sendmsg(&self.0, &[IoSlice::new(call.as_bytes())], &mut along, SendFlags::empty()).unwrap();
            let mut answer = vec![0; 65536];
            let length = self.0.read(&mut answer).unwrap();
            serde_json::from_slice(&answer[..length]).unwrap()
        }

        fn open(&mut self, path: &str, mode: i64) -> Value {
            self.call("AsyncFileServer.Open", json!({"path": path, "mode": mode}), None)
        }
    }

    #[test]
    fn a_sandbox_gets_the_files_of_its_checkpoint_and_nothing_else() {
        let dir = tempfile::tempdir().unwrap();
        FILES.iter().for_each(|name| fs::write(dir.path().join(name), "bytes").unwrap());
        fs::write(dir.path().join("other"), "").unwrap();
        let (mut sandbox, served) = Sandbox::of(dir.path());
        for (path, mode) in [("other", 1), ("../other", 1), ("/etc/passwd", 1), ("", 1), (FILES[0], 2), (FILES[0], 0)] {
            assert_eq!(sandbox.open(path, mode)["success"], false, "{path} {mode}");
        }
        for (handle, name) in FILES.iter().enumerate() {
            let opened = sandbox.open(name, 1);
            assert_eq!((&opened["success"], &opened["result"]["handle"]), (&json!(true), &json!(handle)), "{opened}");
        }
        assert_eq!(sandbox.open(FILES[0], 1)["success"], false, "it has all of them");
        let memory = File::from(memfd_create("memory", MemfdFlags::CLOEXEC).unwrap());
        let on_disk = File::open("/proc/self/exe").unwrap();
        let (pipe, _writer) = io::pipe().unwrap();
        let pipe = File::from(OwnedFd::from(pipe));
        let mut register =
            |handle: Value, file: Option<&File>| sandbox.call("AsyncFileServer.RegisterClientFile", json!({"handle": handle}), file);
        assert_eq!(register(json!(0), Some(&memory))["result"]["handle"], 0);
        assert_eq!(register(json!(0), Some(&memory))["result"]["handle"], 1);
        for (handle, file) in [
            (json!(0), None),
            (json!(3), Some(&memory)),
            (json!(-1), Some(&memory)),
            (Value::Null, Some(&memory)),
            (json!(0), Some(&pipe)),
            (json!(0), Some(&on_disk)),
        ] {
            assert_eq!(register(handle.clone(), file)["success"], false, "{handle}");
        }
        assert_eq!(sandbox.call("AsyncFileServer.Close", json!({"handle": 0}), None)["success"], true);
        assert_eq!(sandbox.call("AsyncFileServer.RegisterClientFile", json!({"handle": 0}), Some(&memory))["success"], false);
        assert_eq!(sandbox.call("AsyncFileServer.Format", json!({}), None)["success"], false);
        // It is killed before it has read an answer, which is nothing to complain of.
        sandbox.0.write_all(br#"{"method": "AsyncFileServer.Format"}"#).unwrap();
        drop(sandbox);
        served.join().unwrap().unwrap();
    }

    #[test]
    fn what_is_told_of_a_failure_is_one_short_line_and_only_a_read_that_failed_blames_what_was_saved() {
        let dir = tempfile::tempdir().unwrap();
        let log = dir.path().join(LOG);
        assert!(NotBrought::of(dir.path()).is_none() && !NotBrought::is_possible(dir.path()));
        // Nobody brings it anything.
        NotBrought::note_end(dir.path(), "signal: 9");
        assert!(!log.exists());
        fs::write(&log, "").unwrap();
        assert!(NotBrought::of(dir.path()).is_none() && NotBrought::is_possible(dir.path()));
        NotBrought::note_end(dir.path(), "signal: 9");
        let noted = NotBrought { why: "whoever brought it ended too early: signal: 9".to_owned(), unreadable: false };
        assert_eq!(NotBrought::of(dir.path()), Some(noted));
        fs::write(&log, format!("{COMPLAINT}{UNREADABLE}: EIO\nmore\n")).unwrap();
        NotBrought::note_end(dir.path(), "exit status: 1");
        assert_eq!(NotBrought::of(dir.path()), Some(NotBrought { why: format!("{UNREADABLE}: EIO"), unreadable: true }));
        for forged in [format!("{COMPLAINT}no field {UNREADABLE}: EIO"), format!("{UNREADABLE}: EIO"), "x".repeat(1 << 20)] {
            fs::write(&log, &forged).unwrap();
            let told = NotBrought::of(dir.path()).unwrap();
            assert!(!told.unreadable && told.why.len() as u64 <= MAX_LOG_BYTES, "{told:?}");
        }
        NotBrought::forget(dir.path());
        assert!(NotBrought::of(dir.path()).is_none() && !NotBrought::is_possible(dir.path()));
    }

    #[test]
    fn one_that_is_of_no_use_ends_and_one_that_hears_nonsense_too() {
        let (ours, _theirs) = UnixStream::pair().unwrap();
        let (files, given) = UnixStream::pair().unwrap();
        drop(files);
        serve_files(&given, ours).unwrap();
        let (ours, theirs) = UnixStream::pair().unwrap();
        let (mut files, given) = UnixStream::pair().unwrap();
        files.write_all(b"no files").unwrap();
        assert!(serve_files(&given, ours).is_err());
        let dir = tempfile::tempdir().unwrap();
        let mut server = FileServer { socket: OwnedFd::from(theirs).into(), files };
        assert_eq!(server.serve(dir.path()).unwrap_err().kind(), io::ErrorKind::NotFound, "gVisor reads by itself what there is");
        FILES.iter().for_each(|name| fs::write(dir.path().join(name), "bytes").unwrap());
        let (mut sandbox, served) = Sandbox::of(dir.path());
        // In no words of the sandbox's.
        sandbox.0.write_all(b"{\"method\": 1, \"what was saved can't be read\": 2}").unwrap();
        assert_eq!(served.join().unwrap().unwrap_err().to_string(), "a call makes no sense");
        let (mut sandbox, served) = Sandbox::of(dir.path());
        let long = format!("{{\"method\":\"{}", "x".repeat(2 * MAX_CALL_BYTES));
        // It may have gone before it has heard all of it.
        let _ = sandbox.0.write_all(long.as_bytes());
        assert!(served.join().unwrap().is_err());
    }
}
