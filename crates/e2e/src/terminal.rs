//! A command on a terminal of its own, typed to and looked at as a person would.

use std::{
    fs::File,
    io::{Read as _, Write as _},
    os::fd::AsFd as _,
    process::{Child, Command, ExitStatus, Stdio},
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use nix::{
    pty::{Winsize, openpty},
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use rustix::termios::{LocalModes, tcgetattr, tcsetwinsize};

use crate::{DEADLINE, eventually};

pub struct Terminal {
    master: File,
    slave: File,
    child: Child,
    /// All that was shown so far.
    shown: Arc<Mutex<Vec<u8>>>,
    /// What was waited for lies before this.
    seen: usize,
}

impl Terminal {
    /// Starts a command, with this terminal as its controlling one.
    #[must_use]
    pub fn start(command: &Command, rows: u16, cols: u16) -> Self {
        let size = Winsize { ws_row: rows, ws_col: cols, ws_xpixel: 0, ws_ypixel: 0 };
        let pair = openpty(&size, None).unwrap();
        let (master, slave) = (File::from(pair.master), File::from(pair.slave));
        let mut outer = Command::new("setsid");
        outer.arg("--ctty").arg(command.get_program()).args(command.get_args());
        for (name, value) in command.get_envs() {
            match value {
                Some(value) => outer.env(name, value),
                None => outer.env_remove(name),
            };
        }
        let end = || Stdio::from(slave.try_clone().unwrap());
        let child = outer.env("TERM", "xterm-256color").stdin(end()).stdout(end()).stderr(end()).spawn().unwrap();
        let shown: Arc<Mutex<Vec<u8>>> = Arc::default();
        let (mut reader, into) = (master.try_clone().unwrap(), Arc::clone(&shown));
        // It ends when nobody has the terminal open any longer.
        std::thread::spawn(move || {
            let mut buffer = [0; 65_536];
            while let Ok(count @ 1..) = reader.read(&mut buffer) {
                into.lock().unwrap().extend_from_slice(&buffer[..count]);
            }
        });
        Self { master, slave, child, shown, seen: 0 }
    }

    /// Types, or pastes: all of it in one go, waiting for the other side to take it.
    pub fn type_in(&mut self, keys: impl AsRef<[u8]>) {
        self.master.write_all(keys.as_ref()).unwrap();
    }

    pub fn resize(&self, rows: u16, cols: u16) {
        tcsetwinsize(self.master.as_fd(), rustix::termios::Winsize { ws_row: rows, ws_col: cols, ws_xpixel: 0, ws_ypixel: 0 }).unwrap();
    }

    /// Waits until this is shown, behind what was waited for before. Returns what was shown up to its end.
    pub async fn until(&mut self, text: &str) -> String {
        let start = Instant::now();
        loop {
            {
                let shown = self.shown.lock().unwrap();
                let new = &shown[self.seen..];
                if let Some(at) = new.windows(text.len()).position(|window| window == text.as_bytes()) {
                    let end = at + text.len();
                    let found = String::from_utf8_lossy(&new[..end]).into_owned();
                    self.seen += end;
                    return found;
                }
            }
            if start.elapsed() > DEADLINE {
                let shown = self.shown.lock().unwrap();
                let from = shown.len().saturating_sub(4000).max(self.seen.min(shown.len()));
                panic!("{text:?} is not shown; what is: {:?}", String::from_utf8_lossy(&shown[from..]));
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    /// Waits until the command has read all that was typed.
    pub async fn until_taken(&self) {
        let waiting = || rustix::io::ioctl_fionread(&self.slave).unwrap() > 0;
        eventually("what was typed is read", DEADLINE, || !waiting()).await;
    }

    /// Whether the terminal is as a shell leaves it to others: lines and echo. Full of keys that go elsewhere it is neither.
    #[must_use]
    pub fn is_cooked(&self) -> bool {
        let modes = tcgetattr(&self.slave).unwrap().local_modes;
        modes.contains(LocalModes::ICANON | LocalModes::ECHO | LocalModes::ISIG)
    }

    pub fn signal(&self, signal: Signal) {
        kill(Pid::from_raw(i32::try_from(self.child.id()).unwrap()), signal).unwrap();
    }

    /// Waits for the command to end.
    pub async fn exited(&mut self) -> ExitStatus {
        let start = Instant::now();
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                return status;
            }
            assert!(
                start.elapsed() < DEADLINE,
                "it does not end; shown: {:?}",
                String::from_utf8_lossy(&self.shown.lock().unwrap()[self.seen..])
            );
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
