//! The same for programs without an async runtime: every call waits for its answer.
//!
//! ```no_run
//! # fn example() -> Result<(), sandboxer_client::Error> {
//! use sandboxer_client::{Options, blocking::Sandbox};
//!
//! let sandbox = Sandbox::create("http://127.0.0.1:8080", Options::default())?;
//! for piece in &mut sandbox.python("print('hello')")? {
//!     print!("{}", String::from_utf8_lossy(&piece.data));
//! }
//! sandbox.kill_sandbox()
//! # }
//! ```
//!
//! None of this may be called from within an async runtime.

use std::sync::Arc;

use tokio::runtime::Runtime;

use crate::{Connection, Error, Execution, ExecutionId, Exit, Options, Output, Piece, ResumeFrom, SandboxId};

fn runtime() -> Result<Arc<Runtime>, Error> {
    // One thread, on which the connection is kept between the calls.
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).thread_name("sandboxer-client").enable_all().build();
    runtime.map(Arc::new).map_err(|error| Error::unavailable(format!("starting a thread: {error}")))
}

/// As [`crate::Sandbox`].
///
/// ```no_run
/// # fn example() -> Result<(), sandboxer_client::Error> {
/// use sandboxer_client::{Connection, Execution, Options, ResumeFrom, blocking::Sandbox};
///
/// let server = "http://127.0.0.1:8080";
/// let sandbox = Sandbox::create(server, Options::default())?;
/// sandbox.bash("echo hello > file")?.wait()?;
/// let run = sandbox.run(Execution::bash("sleep 10; cat file"))?;
/// println!("{} of {}, set back {} times", run.id(), sandbox.id(), sandbox.generation());
/// if sandbox.generation() > 0 {
///     println!("{} is still there", sandbox.resume_execution(run.id())?.id());
/// }
/// let (id, token) = (sandbox.id(), sandbox.token().map(str::to_owned));
/// sandbox.close();
/// let sandbox = Sandbox::attach(server, id, token.as_deref())?;
/// sandbox.close();
/// let sandbox = Sandbox::attach_with(server, id, token.as_deref(), Connection::default(), ResumeFrom::peek())?;
/// if let Some(run) = sandbox.resume()? {
///     assert_eq!(run.output()?.stdout, b"hello\n");
/// }
/// sandbox.kill_sandbox()
/// # }
/// ```
#[derive(Debug)]
pub struct Sandbox {
    runtime: Arc<Runtime>,
    inner: crate::Sandbox,
}

impl Sandbox {
    /// As [`crate::Sandbox::create`].
    ///
    /// # Errors
    /// As there.
    pub fn create(address: &str, options: Options) -> Result<Self, Error> {
        let runtime = runtime()?;
        let inner = runtime.block_on(crate::Sandbox::create(address, options))?;
        Ok(Self { runtime, inner })
    }

    /// As [`crate::Sandbox::attach`].
    ///
    /// # Errors
    /// As there.
    pub fn attach(address: &str, id: SandboxId, token: Option<&str>) -> Result<Self, Error> {
        Self::attach_with(address, id, token, Connection::default(), ResumeFrom::default())
    }

    /// As [`crate::Sandbox::attach_with`].
    ///
    /// # Errors
    /// As there.
    pub fn attach_with(address: &str, id: SandboxId, token: Option<&str>, connection: Connection, from: ResumeFrom) -> Result<Self, Error> {
        let runtime = runtime()?;
        let inner = runtime.block_on(crate::Sandbox::attach_with(address, id, token, connection, from))?;
        Ok(Self { runtime, inner })
    }

    /// As [`crate::Sandbox::id`].
    #[must_use]
    pub fn id(&self) -> SandboxId {
        self.inner.id()
    }

    /// As [`crate::Sandbox::token`].
    #[must_use]
    pub fn token(&self) -> Option<&str> {
        self.inner.token()
    }

    /// As [`crate::Sandbox::generation`].
    #[must_use]
    pub fn generation(&self) -> u64 {
        self.inner.generation()
    }

    /// As [`crate::Sandbox::python`].
    ///
    /// # Errors
    /// As there.
    pub fn python(&self, code: impl Into<String>) -> Result<Run, Error> {
        self.run(Execution::python(code))
    }

    /// As [`crate::Sandbox::bash`].
    ///
    /// # Errors
    /// As there.
    pub fn bash(&self, code: impl Into<String>) -> Result<Run, Error> {
        self.run(Execution::bash(code))
    }

    /// As [`crate::Sandbox::run`].
    ///
    /// # Errors
    /// As there.
    pub fn run(&self, execution: Execution) -> Result<Run, Error> {
        let inner = self.runtime.block_on(self.inner.run(execution))?;
        Ok(Run { runtime: self.runtime.clone(), inner })
    }

    /// As [`crate::Sandbox::resume`].
    ///
    /// # Errors
    /// As there.
    pub fn resume(&self) -> Result<Option<Run>, Error> {
        let inner = self.runtime.block_on(self.inner.resume())?;
        Ok(inner.map(|inner| Run { runtime: self.runtime.clone(), inner }))
    }

    /// As [`crate::Sandbox::resume_execution`].
    ///
    /// # Errors
    /// As there.
    pub fn resume_execution(&self, id: &ExecutionId) -> Result<Run, Error> {
        let inner = self.runtime.block_on(self.inner.resume_execution(id))?;
        Ok(Run { runtime: self.runtime.clone(), inner })
    }

    /// As [`crate::Sandbox::close`].
    pub fn close(self) {
        self.runtime.block_on(self.inner.close());
    }

    /// As [`crate::Sandbox::kill_sandbox`].
    ///
    /// # Errors
    /// As there.
    pub fn kill_sandbox(self) -> Result<(), Error> {
        self.runtime.block_on(self.inner.kill_sandbox())
    }
}

/// As [`crate::Run`]; its output comes by iterating over it.
///
/// ```no_run
/// # fn example(sandbox: sandboxer_client::blocking::Sandbox) -> Result<(), sandboxer_client::Error> {
/// let mut run = sandbox.python("print(input().upper())")?;
/// run.write("hello\n")?;
/// run.flush()?;
/// run.stdin_eof()?;
/// assert_eq!(run.output_up_to(100)?.stdout, b"HELLO\n");
///
/// let mut run = sandbox.bash("while sleep 1; do date; done")?;
/// run.resize(50, 132)?;
/// for piece in run.by_ref().take(3) {
///     print!("{}", String::from_utf8_lossy(&piece.data));
/// }
/// println!("{:?}", run.offsets());
/// run.signal("SIGINT")?;
/// run.kill()?;
/// run.wait()?;
/// # Ok(()) }
/// ```
#[derive(Debug)]
pub struct Run {
    runtime: Arc<Runtime>,
    inner: crate::Run,
}

impl Run {
    /// As [`crate::Run::id`].
    #[must_use]
    pub fn id(&self) -> &ExecutionId {
        self.inner.id()
    }

    /// As [`crate::Run::offsets`].
    #[must_use]
    pub fn offsets(&self) -> (u64, u64) {
        self.inner.offsets()
    }

    /// As [`crate::Run::wait`].
    ///
    /// # Errors
    /// As there.
    pub fn wait(&mut self) -> Result<Exit, Error> {
        self.runtime.block_on(self.inner.wait())
    }

    /// As [`crate::Run::output`].
    ///
    /// # Errors
    /// As there.
    pub fn output(self) -> Result<Output, Error> {
        self.runtime.block_on(self.inner.output())
    }

    /// As [`crate::Run::output_up_to`].
    ///
    /// # Errors
    /// As there.
    pub fn output_up_to(self, limit: usize) -> Result<Output, Error> {
        self.runtime.block_on(self.inner.output_up_to(limit))
    }

    /// As [`crate::Stdin::write`].
    ///
    /// # Errors
    /// As there.
    pub fn write(&mut self, data: impl AsRef<[u8]>) -> Result<(), Error> {
        self.runtime.block_on(self.inner.stdin().write(data))
    }

    /// As [`crate::Stdin::flush`].
    ///
    /// # Errors
    /// As there.
    pub fn flush(&mut self) -> Result<(), Error> {
        self.runtime.block_on(self.inner.stdin().flush())
    }

    /// As [`crate::Stdin::eof`].
    ///
    /// # Errors
    /// As there.
    pub fn stdin_eof(&mut self) -> Result<(), Error> {
        self.runtime.block_on(self.inner.stdin_eof())
    }

    /// As [`crate::Run::signal`].
    ///
    /// # Errors
    /// As there.
    pub fn signal(&self, signal: &str) -> Result<(), Error> {
        self.runtime.block_on(self.inner.signal(signal))
    }

    /// As [`crate::Run::resize`].
    ///
    /// # Errors
    /// As there.
    pub fn resize(&self, rows: u16, cols: u16) -> Result<(), Error> {
        self.runtime.block_on(self.inner.resize(rows, cols))
    }

    /// As [`crate::Run::kill`].
    ///
    /// # Errors
    /// As there.
    pub fn kill(&self) -> Result<(), Error> {
        self.runtime.block_on(self.inner.kill())
    }
}

impl Iterator for Run {
    type Item = Piece;

    fn next(&mut self) -> Option<Piece> {
        self.runtime.block_on(self.inner.next())
    }
}
