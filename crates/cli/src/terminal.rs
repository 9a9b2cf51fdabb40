//! This command's terminal, given to a program in a sandbox: every key goes inside, its size with it, and it is left as it was found.

use std::{
    io::{self, Write as _},
    sync::Mutex,
};

use anyhow::{Context as _, Result};
use rustix::termios::{OptionalActions, Termios, tcgetattr, tcgetwinsize, tcsetattr};
use sandboxer_client::{Controller, Execution, Run, Stdin};
use tokio::{
    signal::unix::{SignalKind, signal},
    sync::oneshot,
};

use crate::{
    input::Input,
    passing::{Ending, Leave},
};

/// What a program inside may know of the terminal here.
const ABOUT_TERMINAL: [&str; 2] = ["TERM", "COLORTERM"];

/// The terminal as it was found, for as long as it is another.
static FOUND: Mutex<Option<Termios>> = Mutex::new(None);

/// The terminal hands on every key as it is. Dropped, it is as before.
pub(crate) struct Raw(());

impl Raw {
    /// # Errors
    /// The standard input is no terminal.
    pub(crate) fn enter() -> Result<Self> {
        let found = tcgetattr(io::stdin()).context("the standard input is no terminal")?;
        // Should this panic, its message is to be read, and the terminal to be used afterwards.
        static HOOK: std::sync::Once = std::sync::Once::new();
        HOOK.call_once(|| {
            let before = std::panic::take_hook();
            std::panic::set_hook(Box::new(move |panic| {
                restore();
                before(panic);
            }));
        });
        *FOUND.lock().unwrap_or_else(std::sync::PoisonError::into_inner) = Some(found);
        let raw = Self(());
        make_raw()?;
        Ok(raw)
    }
}

fn make_raw() -> Result<()> {
    let found = FOUND.lock().unwrap_or_else(std::sync::PoisonError::into_inner).clone();
    let Some(mut raw) = found else { return Ok(()) };
    raw.make_raw();
    tcsetattr(io::stdin(), OptionalActions::Now, &raw).context("change the mode of the terminal")
}

impl Drop for Raw {
    fn drop(&mut self) {
        restore();
    }
}

fn restore() {
    let found = FOUND.try_lock().ok().and_then(|mut found| found.take());
    if let Some(found) = found {
        // If it is gone there is nothing to restore.
        let _ = tcsetattr(io::stdin(), OptionalActions::Now, &found);
    }
}

/// Rows and columns of this command's terminal, if it has one.
pub(crate) fn size() -> Option<(u16, u16)> {
    let size = tcgetwinsize(io::stdin()).or_else(|_| tcgetwinsize(io::stdout())).ok()?;
    (size.ws_row > 0 && size.ws_col > 0).then_some((size.ws_row, size.ws_col))
}

/// Tells a program what kind of terminal this is.
pub(crate) fn about_here(mut execution: Execution) -> Execution {
    for name in ABOUT_TERMINAL {
        if let Ok(value) = std::env::var(name)
            && !value.is_empty()
            && value.len() < 256
        {
            execution = execution.env(name, value);
        }
    }
    execution
}

/// Passes on every key and all output until the program ends, or its user leaves it. [`Raw`] was entered.
pub(crate) async fn pass_on(run: &mut Run, input: &Input, leave: &mut Leave) -> Result<Ending> {
    let (left, mut has_left) = oneshot::channel();
    let typing = tokio::spawn(type_in(input.clone(), run.take_stdin(), left));
    let resizing = tokio::spawn(follow_size(run.controller()));
    let mut interrupts = signal(SignalKind::interrupt())?;
    let ending = loop {
        tokio::select! {
            code = leave.asked() => break Ok(Ending::Left(code)),
            // Not by a key: those go inside.
            _ = interrupts.recv() => break Ok(Ending::Left(130)),
            Ok(()) = &mut has_left => break Ok(Ending::Left(0)),
            piece = run.next() => match piece {
                Some(piece) => {
                    let mut stdout = io::stdout().lock();
                    if let Err(error) = stdout.write_all(&piece.data).and_then(|()| stdout.flush()) {
                        break match error.kind() {
                            io::ErrorKind::BrokenPipe => Ok(Ending::BrokenPipe),
                            _ => Err(error).context("write to the terminal"),
                        };
                    }
                }
                None => break run.wait().await.map(Ending::Exit).map_err(Into::into),
            },
        }
    };
    typing.abort();
    resizing.abort();
    ending
}

/// Every key to the program, until its user says to leave, or the terminal is gone.
async fn type_in(input: Input, mut stdin: Stdin, left: oneshot::Sender<()>) {
    let mut escape = Escape::default();
    while let Ok(Some(typed)) = input.next().await {
        match escape.typed(&typed) {
            Typed::Leave => break,
            Typed::Nothing => {}
            Typed::Keys { tilde, keys } => {
                let tilde = if tilde { &b"~"[..] } else { b"" };
                if stdin.write([tilde, keys].concat()).await.is_err() {
                    // It has ended, and that it has is on its way: until then there is nothing to type into.
                    std::future::pending::<()>().await;
                }
            }
        }
    }
    // Nobody listens any longer if the program has ended meanwhile.
    let _ = left.send(());
}

/// Tells the program the size of the terminal whenever that changes, and takes the terminal again when this command goes on after it was stopped.
async fn follow_size(controller: Controller) {
    let (Ok(mut changed), Ok(mut goes_on)) = (signal(SignalKind::window_change()), signal(SignalKind::from_raw(nix::libc::SIGCONT))) else {
        return;
    };
    loop {
        if let Some((rows, cols)) = size() {
            // It may have ended already.
            let _ = controller.resize(rows, cols).await;
        }
        tokio::select! {
            _ = changed.recv() => {}
            // A shell has set its own mode meanwhile. Should this fail, keys go inside by the line.
            _ = goes_on.recv() => drop(make_raw()),
        }
    }
}

/// `~.` typed by hand at the beginning of a line, as with ssh: leave. What is pasted comes in one piece and is never taken for it.
#[derive(Debug)]
struct Escape {
    line_begins: bool,
    tilde: bool,
}

impl Default for Escape {
    fn default() -> Self {
        Self { line_begins: true, tilde: false }
    }
}

#[derive(Debug, PartialEq, Eq)]
enum Typed<'a> {
    /// With a tilde before them that was held back.
    Keys {
        tilde: bool,
        keys: &'a [u8],
    },
    Nothing,
    Leave,
}

impl Escape {
    fn typed<'a>(&mut self, keys: &'a [u8]) -> Typed<'a> {
        let tilde = std::mem::take(&mut self.tilde);
        match keys {
            b"." if tilde => return Typed::Leave,
            // Typed quickly, both come together; more than these is pasted.
            b"~." if self.line_begins && !tilde => return Typed::Leave,
            // Twice is one for the program.
            b"~" if tilde => {
                self.line_begins = false;
                return Typed::Keys { tilde: false, keys };
            }
            b"~" if self.line_begins => {
                self.tilde = true;
                return Typed::Nothing;
            }
            _ => {}
        }
        self.line_begins = keys.last().is_some_and(|key| matches!(key, b'\r' | b'\n'));
        Typed::Keys { tilde, keys }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn keys(keys: &[u8]) -> Typed<'_> {
        Typed::Keys { tilde: false, keys }
    }

    #[test]
    fn a_tilde_and_a_dot_at_the_beginning_of_a_line_leave() {
        let mut escape = Escape::default();
        assert_eq!(escape.typed(b"~"), Typed::Nothing);
        assert_eq!(escape.typed(b"."), Typed::Leave);
        assert_eq!(Escape::default().typed(b"~."), Typed::Leave, "typed quickly");
        let mut escape = Escape::default();
        assert_eq!(escape.typed(b"a"), keys(b"a"));
        assert_eq!(escape.typed(b"~"), keys(b"~"), "not at the beginning");
        assert_eq!(escape.typed(b"\r"), keys(b"\r"));
        assert_eq!(escape.typed(b"~"), Typed::Nothing);
        assert_eq!(escape.typed(b"/"), Typed::Keys { tilde: true, keys: b"/" });
        assert_eq!(escape.typed(b"\r"), keys(b"\r"));
        assert_eq!(escape.typed(b"~"), Typed::Nothing);
        assert_eq!(escape.typed(b"~"), keys(b"~"));
        assert_eq!(escape.typed(b"."), keys(b"."));
    }

    #[test]
    fn what_is_pasted_never_leaves() {
        let mut escape = Escape::default();
        for pasted in [&b"~.\n~.\n"[..], b"\n~", b".~."] {
            assert_eq!(escape.typed(pasted), keys(pasted));
        }
    }
}
