//! The two named FIFOs between the server and a sandbox.
//!
//! `in` carries bytes to the agent, `out` from it. The sandbox's ends are read-only and write-only: gVisor drains what it can read
//! when it saves. Opening never blocks: a FIFO is opened for both first, which always succeeds, and that descriptor is dropped when
//! both real ends are there.

use std::{fs, io, os::fd::OwnedFd, path::Path};

use nix::{
    fcntl::{FcntlArg, OFlag, fcntl},
    sys::stat::Mode,
    unistd::mkfifo,
};
use tokio::net::unix::pipe;

const IN: &str = "in";
const OUT: &str = "out";
/// What runsc says while it starts; read only until it has.
pub(crate) const BOOT: &str = "boot";

/// As large as an ordinary user may have one; programs that write much go twice as fast.
const OUT_PIPE_BYTES: i32 = 1024 * 1024;
/// Less than the other: all pipes of an ordinary user together have 64 MiB, and input is small.
const IN_PIPE_BYTES: i32 = 256 * 1024;

/// All four ends.
pub(crate) struct Ends {
    pub(crate) guest_stdin: OwnedFd,
    pub(crate) guest_stdout: OwnedFd,
    pub(crate) to_agent: pipe::Sender,
    pub(crate) from_agent: pipe::Receiver,
}

/// Makes both FIFOs and opens all their ends.
pub(crate) fn create(dir: &Path) -> io::Result<Ends> {
    for name in [IN, OUT, BOOT] {
        mkfifo(&dir.join(name), Mode::S_IRUSR | Mode::S_IWUSR)?;
    }
    let (to, from) = (dir.join(IN), dir.join(OUT));
    let both_in = open(&to, OFlag::O_RDWR)?;
    let both_out = open(&from, OFlag::O_RDWR)?;
    for (fd, size) in [(&both_in, IN_PIPE_BYTES), (&both_out, OUT_PIPE_BYTES)] {
        // Refused where the user's share of pipe memory is used up; a smaller pipe works too.
        fcntl(fd, FcntlArg::F_SETPIPE_SZ(size)).ok();
    }
    let (to_agent, from_agent) = open_server_ends(dir)?;
    Ok(Ends { guest_stdin: open(&to, OFlag::O_RDONLY)?, guest_stdout: open(&from, OFlag::O_WRONLY)?, to_agent, from_agent })
}

/// The server's ends. Without a sandbox at the other side the first fails with `ENXIO`.
pub(crate) fn open_server_ends(dir: &Path) -> io::Result<(pipe::Sender, pipe::Receiver)> {
    let to_agent = pipe::OpenOptions::new().open_sender(dir.join(IN))?;
    let from_agent = pipe::OpenOptions::new().open_receiver(dir.join(OUT))?;
    Ok((to_agent, from_agent))
}

/// The reading end of the boot log. Whoever writes it waits until this is called.
pub(crate) fn open_boot_log(dir: &Path) -> io::Result<pipe::Receiver> {
    pipe::OpenOptions::new().open_receiver(dir.join(BOOT))
}

/// Removes the FIFOs; those that are not there are removed already.
pub(crate) fn remove(dir: &Path) -> io::Result<()> {
    for name in [IN, OUT, BOOT] {
        match fs::remove_file(dir.join(name)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
    }
    Ok(())
}

fn open(path: &Path, how: OFlag) -> io::Result<OwnedFd> {
    Ok(nix::fcntl::open(path, how | OFlag::O_CLOEXEC, Mode::empty())?)
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    use super::*;

    #[tokio::test]
    async fn bytes_pass_and_the_servers_ends_can_be_opened_again() {
        let dir = tempfile::tempdir().unwrap();
        let mut ends = create(dir.path()).unwrap();
        ends.to_agent.write_all(b"hel").await.unwrap();
        drop((ends.to_agent, ends.from_agent));
        let (mut to_agent, mut from_agent) = open_server_ends(dir.path()).unwrap();
        to_agent.write_all(b"lo").await.unwrap();
        let mut bytes = [0; 5];
        std::io::Read::read_exact(&mut fs::File::from(ends.guest_stdin), &mut bytes).unwrap();
        assert_eq!(&bytes, b"hello");
        std::io::Write::write_all(&mut fs::File::from(ends.guest_stdout), b"back").unwrap();
        let mut back = String::new();
        from_agent.read_to_string(&mut back).await.unwrap();
        assert_eq!(back, "back");
        assert!(open_server_ends(dir.path()).is_err(), "there is no sandbox any longer");
        remove(dir.path()).unwrap();
        remove(dir.path()).unwrap();
    }
}
