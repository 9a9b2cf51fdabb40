//! A sandbox saved, copied, gone back: as its client asks for it.

use crate::{CheckpointInfo, Connection, Error, FilesystemInfo, ResumeFrom, Sandbox, SnapshotInfo, Target, driver::Command};

impl Sandbox {
    /// A snapshot of the whole sandbox, with what runs in it. It goes on.
    ///
    /// ```no_run
    /// # async fn example(sandbox: sandboxer_client::Sandbox) -> Result<(), sandboxer_client::Error> {
    /// let good = sandbox.snapshot(Some("before")).await?;
    /// if !sandbox.bash("./risky.sh").await?.wait().await?.success() {
    ///     sandbox.rollback(&good).await?;
    /// }
    /// # Ok(()) }
    /// ```
    ///
    /// Not cancel-safe: dropped halfway, it may be taken all the same.
    ///
    /// # Errors
    /// [`Error::Refused`] where the server keeps no snapshots, or it could not be taken. The sandbox is unharmed.
    pub async fn snapshot(&self, name: Option<&str>) -> Result<SnapshotInfo, Error> {
        self.api().snapshot(self.id(), name).await
    }

    /// Goes back to a snapshot or a checkpoint, in place: memory, processes and files. Nothing newer is deleted. A [`Run`](crate::Run)
    /// that was under way ends with [`Error::Rewound`]; what runs then can be had by [`resume`](Self::resume).
    ///
    /// Not cancel-safe: dropped halfway, it may go back all the same.
    ///
    /// # Errors
    /// [`Error::NotFound`], or it could not be restored. The sandbox is unharmed then.
    pub async fn rollback(&self, to: impl Into<Target>) -> Result<(), Error> {
        let back = self.api().rollback(self.id(), to).await?;
        let Some(generation) = back.generation else { return Ok(()) };
        self.inner().ask(|reply| Command::WentBack { generation, reply }).await
    }

    /// Copies of this sandbox as it is now, with its memory, processes and files: so many, or none. This one goes on, and this program
    /// is the client of all of them.
    ///
    /// ```no_run
    /// # async fn example(sandbox: sandboxer_client::Sandbox) -> Result<(), sandboxer_client::Error> {
    /// for (number, copy) in sandbox.fork(10).await?.iter().enumerate() {
    ///     copy.python(format!("print({number})")).await?;
    /// }
    /// # Ok(()) }
    /// ```
    ///
    /// Not cancel-safe: dropped halfway, copies may have been made, which go when their idle time is over.
    ///
    /// # Errors
    /// [`Error::Refused`] where the server has no room for all of them, or keeps no snapshots.
    pub async fn fork(&self, count: usize) -> Result<Vec<Sandbox>, Error> {
        let mut copies = Vec::new();
        for made in self.api().fork(self.id(), count).await? {
            let (address, connection) = (self.address(), self.connection().clone());
            let token = made.token.as_deref();
            copies.push(Sandbox::attach_with(address, made.id, token, connection, ResumeFrom::default()).await?);
        }
        Ok(copies)
    }

    /// Keeps its files under a name, from which others can be made ([`Options::filesystem_snapshot`](crate::Options::filesystem_snapshot)).
    /// It goes on, and so does what runs in it.
    ///
    /// ```no_run
    /// # async fn example(sandbox: sandboxer_client::Sandbox) -> Result<(), sandboxer_client::Error> {
    /// use sandboxer_client::{Options, Sandbox};
    ///
    /// sandbox.bash("pip install --target /opt/lib ./wheels/*").await?.wait().await?;
    /// sandbox.snapshot_filesystem("with-libraries", true).await?;
    /// let options = Options::default().filesystem_snapshot("with-libraries");
    /// let another = Sandbox::create("http://127.0.0.1:8080", options).await?;
    /// # Ok(()) }
    /// ```
    ///
    /// Not cancel-safe: dropped halfway, it may be made all the same.
    ///
    /// # Errors
    /// [`Error::Refused`] with `name_taken` unless it may be replaced, or where the server keeps none; [`Error::Invalid`] for a bad name.
    pub async fn snapshot_filesystem(&self, name: &str, replace: bool) -> Result<FilesystemInfo, Error> {
        self.api().snapshot_filesystem(self.id(), name, replace).await
    }

    /// Leaves the sandbox and has it saved, with what runs in it if that is wanted. It rests then, until somebody attaches to it, at this server
    /// or at another that has the same volume.
    ///
    /// ```no_run
    /// # async fn example() -> Result<(), sandboxer_client::Error> {
    /// use sandboxer_client::{Options, Sandbox};
    ///
    /// let sandbox = Sandbox::create("http://127.0.0.1:8080", Options::default().checkpoint(true)).await?;
    /// let (id, token) = (sandbox.id(), sandbox.token().map(str::to_owned));
    /// sandbox.checkpoint(false).await?;
    /// let sandbox = Sandbox::attach("http://127.0.0.1:8081", id, token.as_deref()).await?;
    /// # Ok(()) }
    /// ```
    ///
    /// Not cancel-safe: dropped halfway, it may or may not be saved.
    ///
    /// # Errors
    /// [`Error::Refused`]: it was made without [`Options::checkpoint`](crate::Options::checkpoint), something runs
    /// (`execution_in_progress`), or it could not be saved. It goes on in every case, and can be attached to.
    pub async fn checkpoint(self, include_execution: bool) -> Result<CheckpointInfo, Error> {
        let (api, id) = (self.api().clone(), self.id());
        self.close().await;
        api.checkpoint(id, include_execution).await
    }

    /// Its checkpoints, oldest first.
    ///
    /// # Errors
    /// [`Error::Refused`] where the server keeps none.
    pub async fn checkpoints(&self) -> Result<Vec<CheckpointInfo>, Error> {
        self.api().checkpoints(self.id()).await
    }

    /// How this was connected to.
    pub(crate) fn connection(&self) -> &Connection {
        &self.reach().1
    }

    fn address(&self) -> &str {
        &self.reach().0
    }
}
