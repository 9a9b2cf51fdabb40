//! A sandbox's control socket: what some commands of runsc come down to, said to the sandbox directly. It saves the start of the binary, and more.
//!
//! A call is one JSON object on a stream socket, its files passed along; the answer is another one. None of it is promised by gVisor, so it is used with the
//! versions alone that it is known of ([`crate::Features::control_socket`]), and the commands do the same with all others.

use std::{
    fs::{self, File, OpenOptions},
    io::{self, IoSlice},
    os::{
        fd::{AsRawFd, RawFd},
        unix::fs::OpenOptionsExt,
    },
    path::{Path, PathBuf},
};

use nix::sys::socket::{ControlMessage, MsgFlags, sendmsg};
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt, Interest},
    net::UnixStream,
};

use crate::{FileServer, Written, growth::Growth};

/// What a path of a socket may be long, with its end.
const PATH_MAX: usize = 108;
const MAX_ANSWER_BYTES: usize = 64 * 1024;
/// The files of a checkpoint, in the order in which they are passed.
pub(crate) const FILES: [&str; 3] = ["checkpoint.img", "pages_meta.img", PAGES];
/// What was in memory, and nothing else.
pub const PAGES: &str = "pages.img";

/// Why a call did not do what it was to do.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ControlError {
    /// Nothing was said to the sandbox.
    #[error("there is no talking to it: {0}")]
    Unreachable(io::Error),
    #[error("{0}")]
    Refused(String),
    #[error("{0}")]
    Broken(#[from] io::Error),
}

/// A connection to one sandbox.
#[derive(Debug)]
pub(crate) struct Control {
    stream: UnixStream,
    root: PathBuf,
    id: String,
}

#[derive(Deserialize)]
struct Answer {
    success: bool,
    #[serde(default)]
    err: String,
}

impl Control {
    pub(crate) async fn connect(root: &Path, id: &str) -> Result<Self, ControlError> {
        let path = root.join(format!("runsc-{id}.sock"));
        let connect = async {
            if path.as_os_str().len() < PATH_MAX {
                return UnixStream::connect(&path).await;
            }
            let place = OpenOptions::new().read(true).custom_flags(nix::libc::O_PATH).open(&path)?;
            UnixStream::connect(format!("/proc/self/fd/{}", place.as_raw_fd())).await
        };
        let stream = connect.await.map_err(ControlError::Unreachable)?;
        Ok(Self { stream, root: root.to_owned(), id: id.to_owned() })
    }

    /// `runsc checkpoint -leave-running --compression=none`: the sandbox is left as it is, running or frozen.
    pub(crate) async fn checkpoint(&mut self, into: &Path, written: Option<Written<'_>>) -> Result<(), ControlError> {
        fs::create_dir_all(into)?;
        let create = |name| OpenOptions::new().read(true).write(true).create_new(true).mode(0o600).open(into.join(name));
        let files = FILES.into_iter().map(create).collect::<io::Result<Vec<File>>>()?;
        let argument = json!({
            "metadata": {"compression": "none"},
            "have_pages_file": true,
            "Resume": true,
            "ExecOpts": {"ContainerID": self.id},
        });
        let watched = written.and_then(|written| Some((Growth::of(&into.join(PAGES)).ok()?, written)));
        let call = self.call("containerManager.Checkpoint", argument, &files);
        match watched {
            Some((growth, written)) => tokio::select! {
                done = call => done,
                never = growth.tell(written) => match never {},
            },
            None => call.await,
        }
    }

    /// `runsc restore` into a container that was created and waits. It runs when this returns; with somebody who serves its files, its memory may still be on its way.
    pub(crate) async fn restore(&mut self, from: &Path, files: Option<FileServer>) -> Result<(), ControlError> {
        self.call("containerManager.SetNetworkArgs", loopback(), &[]).await?;
        // One that has died while it waited is nobody.
        match files.and_then(|mut files| files.serve(from).ok().map(|()| files)) {
            Some(files) => {
                let argument = json!({"use_checkpoint_gofer": true, "Background": true});
                self.call("containerManager.Restore", argument, std::slice::from_ref(&files.socket)).await?;
            }
            None => {
                let mut files = vec![File::open(from.join(FILES[0]))?];
                if from.join(FILES[1]).exists() {
                    files.push(File::open(from.join(FILES[1]))?);
                    files.push(File::open(from.join(FILES[2]))?);
                }
                let argument = json!({"HavePagesFile": files.len() > 1});
                self.call("containerManager.Restore", argument, &files).await?;
            }
        }
        self.note_running().map_err(ControlError::Broken)
    }

    /// Waits until all memory of a sandbox that was restored is there. Refused: it never will be.
    pub(crate) async fn whole(&mut self) -> Result<(), ControlError> {
        self.call("containerManager.WaitRestore", Value::Null, &[]).await
    }

    async fn call(&mut self, method: &str, argument: Value, files: &[File]) -> Result<(), ControlError> {
        let call = json!({"method": method, "arg": argument}).to_string();
        let descriptors: Vec<RawFd> = files.iter().map(AsRawFd::as_raw_fd).collect();
        let rights = [ControlMessage::ScmRights(&descriptors)];
        let with = if files.is_empty() { &[][..] } else { &rights[..] };
        let send = || {
            let pieces = [IoSlice::new(call.as_bytes())];
            sendmsg::<()>(self.stream.as_raw_fd(), &pieces, with, MsgFlags::MSG_NOSIGNAL, None).map_err(io::Error::from)
        };
        let sent = self.stream.async_io(Interest::WRITABLE, send).await?;
        self.stream.write_all(call.as_bytes().get(sent..).unwrap_or_default()).await?;
        let answer = self.answer().await?;
        if answer.success {
            return Ok(());
        }
        Err(ControlError::Refused(if answer.err.is_empty() { format!("{method} failed and does not say why") } else { answer.err }))
    }

    /// Nothing says how long it is: it is over when it is one whole object.
    async fn answer(&mut self) -> io::Result<Answer> {
        let mut bytes = Vec::new();
        loop {
            if self.stream.read_buf(&mut bytes).await? == 0 {
                return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "the sandbox is gone"));
            }
            match serde_json::from_slice(&bytes) {
                Ok(answer) => return Ok(answer),
                Err(error) if error.is_eof() && bytes.len() < MAX_ANSWER_BYTES => {}
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Says in runsc's own notes that the container runs, as its command does: it freezes and thaws no other.
    fn note_running(&self) -> io::Result<()> {
        let id = &self.id;
        let notes = self.root.join(format!("{id}_sandbox:{id}.state"));
        let mut state: Value = serde_json::from_slice(&fs::read(&notes)?)?;
        if let Some(status) = state.get_mut("status") {
            *status = "running".into();
        }
        if let Some(restored) = state.pointer_mut("/sandbox/restored") {
            *restored = true.into();
        }
        let newer = self.root.join(format!(".{id}.state"));
        fs::write(&newer, state.to_string())?;
        fs::rename(newer, notes)
    }
}

/// The network of a sandbox that has none but its own loopback, as runsc sets it up.
fn loopback() -> Value {
    let route = |ip: &str, mask: &str| json!({"Destination": {"IP": ip, "Mask": mask}});
    json!({
        "LoopbackLinks": [{
            "Name": "lo",
            "Addresses": [{"Address": "127.0.0.1", "PrefixLen": 8}, {"Address": "::1", "PrefixLen": 128}],
            // Masks are bytes, which Go's JSON has in base64.
            "Routes": [route("127.0.0.0", "/wAAAA=="), route("::1", "/////////////////////w==")],
        }],
        "IsRestore": true,
    })
}

#[cfg(test)]
mod tests {
    use std::{
        io::{IoSliceMut, Read as _, Write as _},
        os::unix::net::UnixListener,
        thread,
    };

    use nix::{
        cmsg_space,
        sys::socket::{ControlMessageOwned, recvmsg},
    };

    use super::*;

    /// A sandbox that takes one call for each answer, and tells what was said and how many files came along.
    fn sandbox(root: &Path, id: &str, answers: &'static [&'static [&'static str]]) -> thread::JoinHandle<Vec<(Value, usize)>> {
        let listener = UnixListener::bind(root.join(format!("runsc-{id}.sock"))).unwrap();
        thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let mut said = Vec::new();
            for answer in answers {
                let (mut bytes, mut space) = (vec![0; 65536], cmsg_space!([RawFd; 8]));
                let mut pieces = [IoSliceMut::new(&mut bytes)];
                let got = recvmsg::<()>(stream.as_raw_fd(), &mut pieces, Some(&mut space), MsgFlags::empty()).unwrap();
                let length = got.bytes;
                let files = got.cmsgs().unwrap().map(|message| match message {
                    ControlMessageOwned::ScmRights(files) => files.len(),
                    _ => 0,
                });
                let files = files.sum();
                said.push((serde_json::from_slice(&bytes[..length]).unwrap(), files));
                for piece in *answer {
                    // Who has heard enough goes.
                    if stream.write_all(piece.as_bytes()).is_err() {
                        break;
                    }
                }
            }
            drop(stream.read(&mut [0]));
            said
        })
    }

    #[tokio::test]
    async fn a_checkpoint_is_one_call_with_three_new_files() {
        let dir = tempfile::tempdir().unwrap();
        let said = sandbox(dir.path(), "x", &[&["{\"success\":true,", "\"err\":\"\",\"result\":{}}"]]);
        let mut control = Control::connect(dir.path(), "x").await.unwrap();
        control.checkpoint(&dir.path().join("into"), Some(&|_| {})).await.unwrap();
        drop(control);
        let said = said.join().unwrap();
        assert_eq!((said[0].0["method"].as_str(), said[0].1), (Some("containerManager.Checkpoint"), 3));
        assert_eq!(said[0].0["arg"]["Resume"], true);
        assert!(FILES.iter().all(|name| dir.path().join("into").join(name).is_file()));
    }

    #[tokio::test]
    async fn a_restore_sets_up_the_network_first_and_is_noted() {
        let dir = tempfile::tempdir().unwrap();
        let from = dir.path().join("from");
        fs::create_dir(&from).unwrap();
        fs::write(from.join(FILES[0]), "state").unwrap();
        let notes = dir.path().join("x_sandbox:x.state");
        fs::write(&notes, r#"{"id":"x","status":"created","sandbox":{"pid":7,"restored":false}}"#).unwrap();
        let said = sandbox(dir.path(), "x", &[&["{\"success\":true}"], &["{\"success\":true}"]]);
        let mut control = Control::connect(dir.path(), "x").await.unwrap();
        control.restore(&from, None).await.unwrap();
        drop(control);
        let said = said.join().unwrap();
        assert_eq!((said[0].0["method"].as_str(), said[0].1), (Some("containerManager.SetNetworkArgs"), 0));
        assert_eq!((said[1].0["method"].as_str(), said[1].1), (Some("containerManager.Restore"), 1));
        assert_eq!(said[1].0["arg"]["HavePagesFile"], false);
        let noted: Value = serde_json::from_slice(&fs::read(notes).unwrap()).unwrap();
        assert_eq!(noted, json!({"id": "x", "status": "running", "sandbox": {"pid": 7, "restored": true}}));
    }

    #[tokio::test]
    async fn a_refusal_says_why_and_what_can_not_be_reached_was_told_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let missing = Control::connect(dir.path(), "y").await.unwrap_err();
        assert!(matches!(missing, ControlError::Unreachable(_)), "{missing}");
        let said = sandbox(dir.path(), "x", &[&["{\"success\":false,\"err\":\"no space\",\"result\":null}"]]);
        let mut control = Control::connect(dir.path(), "x").await.unwrap();
        let refused = control.checkpoint(&dir.path().join("into"), None).await.unwrap_err();
        assert_eq!(refused.to_string(), "no space");
        drop(control);
        said.join().unwrap();
    }

    #[tokio::test]
    async fn an_answer_that_never_ends_is_not_waited_for() {
        static PIECES: [&str; 1100] = ["                                                                "; 1100];
        static ANSWERS: [&[&str]; 1] = [&PIECES];
        let dir = tempfile::tempdir().unwrap();
        let said = sandbox(dir.path(), "x", &ANSWERS);
        let mut control = Control::connect(dir.path(), "x").await.unwrap();
        let error = control.checkpoint(&dir.path().join("into"), None).await.unwrap_err();
        assert!(matches!(error, ControlError::Broken(_)), "{error}");
        drop(control);
        said.join().unwrap();
    }
}
