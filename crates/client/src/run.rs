//! A running program: its output, its input, its end.

use std::{
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
};

use bytes::Bytes;
use sandboxer_protocol::{
    ExecutionId,
    agent::{PerStream, signal_number},
    client::ErrorCode,
};
use tokio::sync::{mpsc, watch};

use crate::{
    Error, Exit, Piece,
    driver::Control,
    ends::{Delivery, UserEnd, Written},
    sandbox::Inner,
    session::INPUT_PIECE_BYTES,
};

/// A program that runs, or ran, in a sandbox.
///
/// Its output comes by [`next`](Self::next), or as a [`Stream`](futures_util::Stream), in order and each byte once. It is held for a
/// slow consumer within bounds; beyond them the program waits. Dropping a `Run` neither ends nor stops the program; its output is
/// then dropped.
///
/// ```no_run
/// # async fn example(sandbox: sandboxer_client::Sandbox) -> Result<(), sandboxer_client::Error> {
/// let mut run = sandbox.python("for i in range(10): print(i)").await?;
/// while let Some(piece) = run.next().await {
///     println!("{:?} from byte {}: {:?}", piece.stream, piece.offset, piece.data);
/// }
/// let exit = run.wait().await?;
/// assert!(exit.success());
///
/// // One that reads.
/// let mut run = sandbox.bash("sort").await?;
/// run.stdin().write("b\na\n").await?;
/// run.stdin_eof().await?;
/// println!("{} has written {:?} so far", run.id(), run.offsets());
/// assert_eq!(run.output_up_to(1_000_000).await?.stdout, b"a\nb\n");
///
/// // One that listens.
/// let mut run = sandbox.bash("trap 'echo interrupted' INT; sleep 1000 & wait").await?;
/// run.signal("SIGINT").await?;
/// run.resize(50, 132).await?;
/// run.kill().await?;
/// assert_eq!(run.wait().await?.shell_code(), 137);
/// # Ok(()) }
/// ```
#[derive(Debug)]
pub struct Run {
    user: UserEnd,
    inner: Arc<Inner>,
    stdin: Stdin,
    end: Option<Result<Exit, Error>>,
    offsets: PerStream<u64>,
}

/// All that a program wrote, and how it ended.
///
/// ```no_run
/// # async fn example(sandbox: sandboxer_client::Sandbox) -> Result<(), sandboxer_client::Error> {
/// let output = sandbox.bash("echo out; echo err >&2; exit 3").await?.output().await?;
/// assert_eq!((&output.stdout[..], &output.stderr[..]), (&b"out\n"[..], &b"err\n"[..]));
/// assert_eq!(output.exit.code, Some(3));
/// assert!(!output.truncated);
/// # Ok(()) }
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Output {
    /// What it wrote to stdout.
    pub stdout: Vec<u8>,
    /// What it wrote to stderr.
    pub stderr: Vec<u8>,
    /// How it ended.
    pub exit: Exit,
    /// Whether output is missing: beyond the limit that was given, or let go by the server while nobody was attached.
    pub truncated: bool,
}

impl Run {
    pub(crate) fn new(user: UserEnd, inner: Arc<Inner>) -> Self {
        let offsets = user.consumed.upto();
        let stdin = Stdin { input: user.input.clone(), acknowledged: user.acknowledged.clone(), written: user.input_from };
        Self { user, inner, stdin, end: None, offsets }
    }

    /// Its identity within its sandbox.
    #[must_use]
    pub fn id(&self) -> &ExecutionId {
        &self.user.id
    }

    /// Whether it has a terminal, of one that was found by an attach; a server of an older version does not say.
    #[must_use]
    pub fn has_terminal(&self) -> bool {
        self.user.tty
    }

    /// How far the output of one that was found by an attach went at that moment, of stdout and of stderr; a server of an older version
    /// does not say.
    #[must_use]
    pub fn held_to(&self) -> Option<(u64, u64)> {
        self.user.held_to.map(|held| (held.stdout, held.stderr))
    }

    /// How many bytes of stdout and of stderr were consumed.
    #[must_use]
    pub fn offsets(&self) -> (u64, u64) {
        (self.offsets.stdout, self.offsets.stderr)
    }

    /// The next piece of output. None when there is no more, which [`wait`](Self::wait) then tells the reason of: the program ended,
    /// or something failed.
    ///
    /// Cancel-safe.
    pub async fn next(&mut self) -> Option<Piece> {
        std::future::poll_fn(|context| self.poll_piece(context)).await
    }

    fn poll_piece(&mut self, context: &mut Context<'_>) -> Poll<Option<Piece>> {
        if self.end.is_some() {
            return Poll::Ready(None);
        }
        match ready!(self.user.pieces.poll_recv(context)) {
            Some(Delivery::Piece(piece)) => {
                *self.offsets.get_mut(piece.stream) = piece.end;
                self.user.consumed.advance(piece.stream, piece.end);
                Poll::Ready(Some(piece))
            }
            Some(Delivery::End(result)) => {
                self.end = Some(result);
                Poll::Ready(None)
            }
            None => {
                // It was let go for a `kill_sandbox`, or replaced.
                self.end = Some(Err(Error::Closed));
                Poll::Ready(None)
            }
        }
    }

    /// Waits for the program to end. Output that was not consumed by then is dropped.
    ///
    /// Cancel-safe, but for the output that it dropped.
    ///
    /// # Errors
    /// What kept it from running to its end, or from being known to: [`Error::SandboxEnded`], [`Error::Rewound`],
    /// [`Error::Unavailable`], [`Error::NotFound`], [`Error::InUse`], [`Error::Refused`], [`Error::Closed`].
    pub async fn wait(&mut self) -> Result<Exit, Error> {
        while self.next().await.is_some() {}
        self.end.clone().unwrap_or(Err(Error::Closed))
    }

    /// Ends the program's input and collects all of its output, however much that is; see [`output_up_to`](Self::output_up_to) for
    /// programs that are not trusted in this.
    ///
    /// Not cancel-safe: what was collected is dropped with it.
    ///
    /// # Errors
    /// As [`wait`](Self::wait).
    pub async fn output(self) -> Result<Output, Error> {
        self.output_up_to(usize::MAX).await
    }

    /// Ends the program's input and collects its output, of each stream at most the first `limit` bytes. The rest is dropped as it
    /// comes.
    ///
    /// Not cancel-safe: what was collected is dropped with it.
    ///
    /// # Errors
    /// As [`wait`](Self::wait).
    pub async fn output_up_to(mut self, limit: usize) -> Result<Output, Error> {
        // A program that has ended, or takes no input, needs no end of it.
        let _ = self.stdin.eof().await;
        let mut output = PerStream::<Vec<u8>>::default();
        let mut truncated = false;
        let mut expected = self.offsets;
        while let Some(piece) = self.next().await {
            truncated |= std::mem::replace(expected.get_mut(piece.stream), piece.end) != piece.offset;
            let collected = output.get_mut(piece.stream);
            let room = limit - collected.len();
            truncated |= piece.data.len() > room;
            collected.extend_from_slice(&piece.data[..piece.data.len().min(room)]);
        }
        let exit = self.wait().await?;
        Ok(Output { stdout: output.stdout, stderr: output.stderr, exit, truncated })
    }

    /// Its input, for another task to write. This `Run` has it no more: its own [`stdin`](Self::stdin) is then closed.
    #[must_use]
    pub fn take_stdin(&mut self) -> Stdin {
        let closed = Stdin { input: mpsc::channel(1).0, acknowledged: watch::channel(None).1, written: 0 };
        std::mem::replace(&mut self.stdin, closed)
    }

    /// Its input.
    #[must_use]
    pub fn stdin(&mut self) -> &mut Stdin {
        &mut self.stdin
    }

    /// Ends its input; shorthand for `stdin().eof()`.
    ///
    /// # Errors
    /// [`Error::InputClosed`]
    pub async fn stdin_eof(&mut self) -> Result<(), Error> {
        self.stdin.eof().await
    }

    /// A handle for others that want to signal, resize or kill it.
    #[must_use]
    pub fn controller(&self) -> Controller {
        Controller { id: self.user.id.clone(), inner: self.inner.clone() }
    }

    /// Sends a signal, such as `SIGINT`, to the program in the foreground. It arrives at most once: not at all if the connection
    /// breaks at that very moment.
    ///
    /// Cancel-safe: sent or not.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a signal that there is not, [`Error::Refused`] (`nothing_running`) after its end, and whatever ended
    /// the connection.
    pub async fn signal(&self, signal: &str) -> Result<(), Error> {
        self.controller().signal(signal).await
    }

    /// Gives its terminal another size.
    ///
    /// Cancel-safe: done or not.
    ///
    /// # Errors
    /// [`Error::Refused`] (`nothing_running`) after its end, and whatever ended the connection.
    pub async fn resize(&self, rows: u16, cols: u16) -> Result<(), Error> {
        self.controller().resize(rows, cols).await
    }

    /// Kills it with everything that it started; [`wait`](Self::wait) tells when it is gone. After its end it does nothing.
    ///
    /// Cancel-safe: done or not.
    ///
    /// # Errors
    /// Whatever ended the connection.
    pub async fn kill(&self) -> Result<(), Error> {
        self.controller().kill().await
    }
}

impl futures_util::Stream for Run {
    type Item = Piece;

    fn poll_next(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Piece>> {
        self.get_mut().poll_piece(context)
    }
}

/// Signals, resizes and kills a program, from wherever it is needed.
///
/// ```no_run
/// # async fn example(mut run: sandboxer_client::Run) -> Result<(), sandboxer_client::Error> {
/// let controller = run.controller();
/// tokio::spawn(async move {
///     controller.resize(50, 132).await?;
///     controller.signal("SIGINT").await?;
///     tokio::time::sleep(std::time::Duration::from_secs(5)).await;
///     controller.kill().await
/// });
/// run.wait().await?;
/// # Ok(()) }
/// ```
#[derive(Debug, Clone)]
pub struct Controller {
    id: ExecutionId,
    inner: Arc<Inner>,
}

impl Controller {
    /// As [`Run::signal`].
    ///
    /// # Errors
    /// As [`Run::signal`].
    pub async fn signal(&self, signal: &str) -> Result<(), Error> {
        let number = signal_number(signal).ok_or_else(|| Error::invalid(format!("There is no signal {signal:?}.")))?;
        self.control(Control::Signal(number)).await
    }

    /// As [`Run::resize`].
    ///
    /// # Errors
    /// As [`Run::resize`].
    pub async fn resize(&self, rows: u16, cols: u16) -> Result<(), Error> {
        self.control(Control::Resize { rows, cols }).await
    }

    /// As [`Run::kill`].
    ///
    /// # Errors
    /// As [`Run::kill`].
    pub async fn kill(&self) -> Result<(), Error> {
        self.inner.control(&self.id, Control::Kill).await.map(|_| ())
    }

    async fn control(&self, control: Control) -> Result<(), Error> {
        if self.inner.control(&self.id, control).await? {
            return Ok(());
        }
        Err(Error::refused(ErrorCode::NothingRunning, "The program has ended."))
    }
}

/// The input of a program. What is written is kept until the server has acknowledged it, within bounds, and sent again if a
/// connection breaks; the program gets each byte once.
///
/// ```no_run
/// # async fn example(mut run: sandboxer_client::Run) -> Result<(), sandboxer_client::Error> {
/// let mut stdin = run.take_stdin();
/// tokio::spawn(async move {
///     stdin.write("what it reads\n").await?;
///     stdin.flush().await?;
///     stdin.eof().await
/// });
/// run.wait().await?;
/// # Ok(()) }
/// ```
#[derive(Debug)]
pub struct Stdin {
    input: mpsc::Sender<Written>,
    acknowledged: watch::Receiver<Option<u64>>,
    written: u64,
}

impl Stdin {
    /// Writes all of it. Returns when it is kept, which waits while too much is not acknowledged, as when the program does not read.
    ///
    /// Not cancel-safe: dropped halfway, some of it was written.
    ///
    /// # Errors
    /// [`Error::InputClosed`]: the program has ended, or its input has.
    pub async fn write(&mut self, data: impl AsRef<[u8]>) -> Result<(), Error> {
        for piece in data.as_ref().chunks(INPUT_PIECE_BYTES) {
            self.input.send(Written::Data(Bytes::copy_from_slice(piece))).await.map_err(|_| Error::InputClosed)?;
            self.written += piece.len() as u64;
        }
        Ok(())
    }

    /// Waits until everything that was written has reached the sandbox (not: was read by the program).
    ///
    /// Cancel-safe.
    ///
    /// # Errors
    /// [`Error::InputClosed`]: the program has ended before.
    pub async fn flush(&mut self) -> Result<(), Error> {
        let written = self.written;
        let reached = self.acknowledged.wait_for(|upto| upto.is_none_or(|upto| upto >= written)).await;
        match reached.as_deref() {
            Ok(Some(_)) => Ok(()),
            Ok(None) | Err(_) => Err(Error::InputClosed),
        }
    }

    /// Ends the input, behind everything that was written.
    ///
    /// Cancel-safe.
    ///
    /// # Errors
    /// [`Error::InputClosed`]: the program has ended, or its input has.
    pub async fn eof(&mut self) -> Result<(), Error> {
        self.input.send(Written::End).await.map_err(|_| Error::InputClosed)
    }
}
