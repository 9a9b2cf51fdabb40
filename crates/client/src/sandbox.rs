//! A sandbox, as its client holds it.

use std::sync::{Arc, atomic::Ordering};

use sandboxer_protocol::{ExecutionId, SandboxId, client::OffsetsRequest};
use tokio::{
    sync::{mpsc, oneshot},
    task::JoinHandle,
};

use crate::{
    Api, Connection, Error, Execution, Files, Options, Run,
    driver::{Command, Control, Driver, Resume, Shared},
    route::{Addresses, Route},
    session::{Identity, Session},
};

/// Requests on their way to the driver.
const MAX_WAITING_COMMANDS: usize = 16;

/// A sandbox whose client this is.
///
/// A task in the background holds the connection and makes it anew when it breaks. It ends when the sandbox ends, when the server is
/// out of reach for too long, or when this and every [`Run`] of it is dropped or closed. Dropping leaves the sandbox as it is: it goes
/// on until its idle time is over.
///
/// ```no_run
/// # async fn example() -> Result<(), sandboxer_client::Error> {
/// use sandboxer_client::{Execution, Options, Sandbox};
///
/// let server = "http://127.0.0.1:8080";
/// let sandbox = Sandbox::create(server, Options::default().checkpoint(true)).await?;
/// let run = sandbox.run(Execution::python("input()").env("WHO", "me")).await?;
/// println!("{} at {} files", sandbox.id(), sandbox.files().list("/root").await?.len());
/// println!("{} checkpoints, set back {} times", sandbox.checkpoints().await?.len(), sandbox.generation());
/// let copies = sandbox.api().fork(sandbox.id(), 2).await?;
///
/// // Leave it to itself, and come back.
/// let (id, token) = (sandbox.id(), sandbox.token().map(str::to_owned));
/// sandbox.close().await;
/// let sandbox = Sandbox::attach(server, id, token.as_deref()).await?;
/// sandbox.kill_sandbox().await
/// # }
/// ```
#[derive(Debug)]
pub struct Sandbox {
    inner: Arc<Inner>,
    id: SandboxId,
    token: Option<String>,
    api: Api,
    /// The address, and how to connect to it.
    reach: (String, Connection),
}

/// What every handle of one sandbox shares.
#[derive(Debug)]
pub(crate) struct Inner {
    commands: mpsc::Sender<Command>,
    shared: Arc<Shared>,
    /// Ends by itself when `commands` is dropped.
    _task: JoinHandle<()>,
}

impl Inner {
    fn over(&self) -> Error {
        self.shared.over.get().cloned().unwrap_or(Error::Closed)
    }

    pub(crate) async fn ask<T>(&self, command: impl FnOnce(oneshot::Sender<T>) -> Command) -> Result<T, Error> {
        let (reply, answer) = oneshot::channel();
        self.commands.send(command(reply)).await.map_err(|_| self.over())?;
        answer.await.map_err(|_| self.over())
    }

    pub(crate) async fn control(&self, id: &ExecutionId, control: Control) -> Result<bool, Error> {
        self.ask(|reply| Command::Control { id: id.clone(), control, reply }).await
    }
}

impl Sandbox {
    /// Makes a sandbox. Several addresses, separated by commas, are of servers that share a volume: where one is gone, the next is
    /// tried, now and whenever the connection breaks.
    ///
    /// If the connection breaks before the server has named the sandbox, another one is made; the first is deleted by the server when
    /// its idle time is over.
    ///
    /// ```no_run
    /// # async fn example() -> Result<(), sandboxer_client::Error> {
    /// use sandboxer_client::{Options, Sandbox};
    ///
    /// let sandbox = Sandbox::create("http://127.0.0.1:8080", Options::default()).await?;
    /// let output = sandbox.python("print('hello')").await?.output().await?;
    /// assert_eq!(output.stdout, b"hello\n");
    /// sandbox.kill_sandbox().await
    /// # }
    /// ```
    ///
    /// Not cancel-safe: when it is dropped halfway, a sandbox may have been made, which goes when its idle time is over.
    ///
    /// # Errors
    /// Any but [`Error::Rewound`] and [`Error::InputClosed`].
    ///
    /// # Panics
    /// Outside of a tokio runtime.
    pub async fn create(address: &str, options: Options) -> Result<Self, Error> {
        let Options { config, connection } = options;
        Self::open(address, connection, Session::create(config)).await
    }

    /// Becomes the client of a sandbox that exists, wherever it is; it is restored if need be. What runs in it can then be had by
    /// [`resume`](Self::resume).
    ///
    /// ```no_run
    /// # async fn example() -> Result<(), Box<dyn std::error::Error>> {
    /// # let (id, token) = ("0f5ae5a5-3a4c-4b2c-8c6e-1d2f3a4b5c6d", "secret");
    /// use sandboxer_client::Sandbox;
    ///
    /// let sandbox = Sandbox::attach("http://127.0.0.1:8080", id.parse()?, Some(token)).await?;
    /// if let Some(mut run) = sandbox.resume().await? {
    ///     println!("it was still running, and ended with {:?}", run.wait().await?);
    /// }
    /// # Ok(()) }
    /// ```
    ///
    /// Cancel-safe: dropped halfway, it only leaves again.
    ///
    /// # Errors
    /// [`Error::NotFound`], [`Error::InUse`], [`Error::Denied`], [`Error::Unavailable`], [`Error::Invalid`], and [`Error::Refused`] if
    /// it could not be restored.
    ///
    /// # Panics
    /// Outside of a tokio runtime.
    pub async fn attach(address: &str, id: SandboxId, token: Option<&str>) -> Result<Self, Error> {
        Self::attach_with(address, id, token, Connection::default(), ResumeFrom::default()).await
    }

    /// As [`attach`](Self::attach), with a choice of how to connect and of where the output shall go on.
    ///
    /// # Errors
    /// As [`attach`](Self::attach).
    ///
    /// # Panics
    /// Outside of a tokio runtime.
    pub async fn attach_with(
        address: &str,
        id: SandboxId,
        token: Option<&str>,
        connection: Connection,
        from: ResumeFrom,
    ) -> Result<Self, Error> {
        let identity = Identity { id, token: token.map(str::to_owned) };
        Self::open(address, connection, Session::attach(identity, from.0)).await
    }

    async fn open(address: &str, connection: Connection, session: Session) -> Result<Self, Error> {
        let addresses: Addresses = address.parse()?;
        let api = Api::of(addresses.clone(), &connection)?;
        let route = Route::new(addresses, &connection)?;
        let (sender, receiver) = mpsc::channel(MAX_WAITING_COMMANDS);
        let (opened, answer) = oneshot::channel();
        let shared = Arc::new(Shared::default());
        let reach = (address.to_owned(), connection.clone());
        let driver = Driver::new(session, connection, route, receiver, shared.clone(), opened);
        let inner = Arc::new(Inner { commands: sender, shared, _task: tokio::spawn(driver.drive()) });
        let Identity { id, token } = answer.await.map_err(|_| inner.over())??;
        Ok(Self { inner, id, token, api, reach })
    }

    /// Its identity, by which it can be attached to.
    #[must_use]
    pub fn id(&self) -> SandboxId {
        self.id
    }

    /// The secret that an attach may have to show.
    #[must_use]
    pub fn token(&self) -> Option<&str> {
        self.token.as_deref()
    }

    /// The resource API of its server.
    #[must_use]
    pub fn api(&self) -> &Api {
        &self.api
    }

    pub(crate) fn inner(&self) -> &Inner {
        &self.inner
    }

    pub(crate) fn reach(&self) -> &(String, Connection) {
        &self.reach
    }

    /// How often it was set back to an earlier state, as far as this client knows.
    #[must_use]
    pub fn generation(&self) -> u64 {
        self.inner.shared.generation.load(Ordering::Relaxed)
    }

    /// Its files. They are reached beside the connection that this holds, and while a program runs.
    #[must_use]
    pub fn files(&self) -> Files {
        Files::of(self.api.clone(), self.id)
    }

    /// Runs a Python program; returns when it has been started.
    ///
    /// # Errors
    /// As [`run`](Self::run).
    pub async fn python(&self, code: impl Into<String>) -> Result<Run, Error> {
        self.run(Execution::python(code)).await
    }

    /// Runs a bash script; returns when it has been started.
    ///
    /// # Errors
    /// As [`run`](Self::run).
    pub async fn bash(&self, code: impl Into<String>) -> Result<Run, Error> {
        self.run(Execution::bash(code)).await
    }

    /// Runs a program; returns when it has been started. It runs once, however often the connection breaks.
    ///
    /// Not cancel-safe: dropped halfway, the program may run, with its output dropped.
    ///
    /// # Errors
    /// [`Error::Refused`] if another one runs (`execution_in_progress`) or it could not be started, [`Error::Invalid`],
    /// [`Error::Rewound`] once after the sandbox was set back while nothing ran, and whatever ended the connection.
    pub async fn run(&self, execution: Execution) -> Result<Run, Error> {
        let (id, message) = execution.into_message()?;
        let user = self.inner.ask(|reply| Command::Run { id, message, reply }).await??;
        Ok(Run::new(user, self.inner.clone()))
    }

    /// The execution that was there when this client attached, or after the sandbox was set back: running still, or ended with
    /// output that nobody had acknowledged. None if there is none, or it was taken before.
    ///
    /// Cancel-safe.
    ///
    /// # Errors
    /// Whatever ended the connection.
    pub async fn resume(&self) -> Result<Option<Run>, Error> {
        let user = self.inner.ask(|reply| Command::Resume(Resume { only: None, reply })).await??;
        Ok(user.map(|user| Run::new(user, self.inner.clone())))
    }

    /// The execution `id`, after [`Error::Rewound`]: the state that the sandbox was set back to may have it, or another one, or none.
    ///
    /// ```no_run
    /// # async fn example(sandbox: sandboxer_client::Sandbox) -> Result<(), sandboxer_client::Error> {
    /// use sandboxer_client::Error;
    ///
    /// let mut run = sandbox.bash("make").await?;
    /// let id = run.id().clone();
    /// while let Err(Error::Rewound { .. }) = run.wait().await {
    ///     run = match sandbox.resume_execution(&id).await {
    ///         Err(Error::ExecutionLost { .. }) => sandbox.bash("make").await?,
    ///         resumed => resumed?,
    ///     };
    /// }
    /// # Ok(()) }
    /// ```
    ///
    /// Cancel-safe.
    ///
    /// # Errors
    /// [`Error::ExecutionLost`] if the sandbox does not have it, and whatever ended the connection.
    pub async fn resume_execution(&self, id: &ExecutionId) -> Result<Run, Error> {
        let user = self.inner.ask(|reply| Command::Resume(Resume { only: Some(id.clone()), reply })).await??;
        let user = user.ok_or_else(|| Error::ExecutionLost { id: id.clone(), now: None })?;
        Ok(Run::new(user, self.inner.clone()))
    }

    /// Leaves the sandbox. It goes on, with whatever runs in it, and can be attached to. Output that came and was not consumed is
    /// dropped.
    ///
    /// Cancel-safe: it leaves in any case.
    pub async fn close(self) {
        // It is closed if nobody answers.
        let _ = self.inner.ask(|reply| Command::Close { reply }).await;
    }

    /// Ends the sandbox with everything in it, and deletes its checkpoints.
    ///
    /// Not cancel-safe: dropped halfway, it may or may not be killed.
    ///
    /// # Errors
    /// Whatever ended the connection, if not this.
    pub async fn kill_sandbox(self) -> Result<(), Error> {
        match self.inner.ask(|reply| Command::KillSandbox { reply }).await {
            Err(Error::SandboxEnded { .. } | Error::NotFound { .. }) => Ok(()),
            result => result,
        }
    }
}

/// Where the output of the execution that is found by an attach shall go on. By default: behind what some client has acknowledged.
///
/// ```no_run
/// # async fn example(id: sandboxer_client::SandboxId, earlier: sandboxer_client::Run) -> Result<(), sandboxer_client::Error> {
/// use sandboxer_client::{Connection, ResumeFrom, Sandbox};
///
/// let server = "http://127.0.0.1:8080";
/// // What was kept of an earlier run is gone on from.
/// let (stdout, stderr) = earlier.offsets();
/// let from = ResumeFrom::offsets(earlier.id().clone(), stdout, stderr);
/// let sandbox = Sandbox::attach_with(server, id, None, Connection::default(), from).await?;
/// if let Some(run) = sandbox.resume().await? {
///     println!("on a terminal: {}; held: {:?}", run.has_terminal(), run.held_to());
/// }
/// sandbox.close().await;
/// // Only to look.
/// let sandbox = Sandbox::attach_with(server, id, None, Connection::default(), ResumeFrom::peek()).await?;
/// # Ok(()) }
/// ```
#[derive(Debug, Clone, Default)]
pub struct ResumeFrom(OffsetsRequest);

impl ResumeFrom {
    /// Goes on where a [`Run`] of an earlier client had got to, as told by [`Run::offsets`].
    #[must_use]
    pub fn offsets(id: ExecutionId, stdout: u64, stderr: u64) -> Self {
        Self(OffsetsRequest { execution_id: Some(id), stdout_offset: Some(stdout), stderr_offset: Some(stderr), peek: None })
    }

    /// Everything that the sandbox still holds, only to look at: nothing is acknowledged by it, and the next client finds it all again.
    /// What a client has acknowledged is not held.
    #[must_use]
    pub fn peek() -> Self {
        Self(OffsetsRequest { execution_id: None, stdout_offset: Some(0), stderr_offset: Some(0), peek: Some(true) })
    }
}
