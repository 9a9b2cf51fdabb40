//! How a sandbox is made, and how the client keeps in touch with it.

use std::{collections::BTreeMap, time::Duration};

use sandboxer_protocol::{
    agent::DetachedOutput,
    client::{CreateConfig, LimitsRequest, Network},
};

/// How to reach the server, and for how long to try.
///
/// ```
/// use std::time::Duration;
/// use sandboxer_client::Connection;
///
/// let seconds = Duration::from_secs;
/// let patient = Connection::default().api_key("key").connect_timeout(seconds(30)).open_within(seconds(60)).give_up_after(seconds(600));
/// let far_away = Connection::default().pings(seconds(10), seconds(20)).in_use_for(seconds(30)).restore_timeout(seconds(1800));
/// let small = Connection::default().output_buffer(64 * 1024);
/// ```
#[derive(Debug, Clone)]
pub struct Connection {
    pub(crate) api_key: Option<String>,
    pub(crate) connect_timeout: Duration,
    pub(crate) open_within: Duration,
    pub(crate) give_up_after: Duration,
    pub(crate) restore_timeout: Duration,
    pub(crate) in_use_for: Duration,
    pub(crate) ping_after: Duration,
    pub(crate) dead_after: Duration,
    pub(crate) output_buffer: usize,
}

impl Default for Connection {
    fn default() -> Self {
        Self {
            api_key: None,
            connect_timeout: Duration::from_secs(10),
            open_within: Duration::from_secs(10),
            give_up_after: Duration::from_secs(120),
            restore_timeout: Duration::from_secs(600),
            in_use_for: Duration::from_secs(10),
            ping_after: Duration::from_secs(3),
            dead_after: Duration::from_secs(5),
            output_buffer: 1024 * 1024,
        }
    }
}

impl Connection {
    /// The key that the server asks for, if it does.
    #[must_use]
    pub fn api_key(mut self, key: impl Into<String>) -> Self {
        self.api_key = Some(key.into());
        self
    }

    /// How long one attempt to connect may take (10 s).
    #[must_use]
    pub fn connect_timeout(mut self, timeout: Duration) -> Self {
        self.connect_timeout = timeout;
        self
    }

    /// For how long a create or a first attach is tried again while the server can't be reached (10 s).
    #[must_use]
    pub fn open_within(mut self, limit: Duration) -> Self {
        self.open_within = limit;
        self
    }

    /// How long the sandbox may be out of reach before that is an error (2 minutes). It counts anew after every recovery.
    #[must_use]
    pub fn give_up_after(mut self, limit: Duration) -> Self {
        self.give_up_after = limit;
        self
    }

    /// How long the server may take to restore a sandbox, or to have it handed over, while it answers (10 minutes).
    #[must_use]
    pub fn restore_timeout(mut self, limit: Duration) -> Self {
        self.restore_timeout = limit;
        self
    }

    /// How long "in use" is taken for this client's own lost connection, which the server may not have noticed yet (10 s). A first
    /// attach does not wait at all.
    #[must_use]
    pub fn in_use_for(mut self, limit: Duration) -> Self {
        self.in_use_for = limit;
        self
    }

    /// After how long a silence the server is pinged (3 s), and how long it may then stay silent (5 s) before the connection counts
    /// as dead.
    #[must_use]
    pub fn pings(mut self, after: Duration, dead: Duration) -> Self {
        self.ping_after = after;
        self.dead_after = dead;
        self
    }

    /// How many bytes of output are held for a consumer that is slower than the program (1 MiB). Beyond it nothing is read from the
    /// connection, and in the end the program waits.
    #[must_use]
    pub fn output_buffer(mut self, bytes: usize) -> Self {
        self.output_buffer = bytes.max(1);
        self
    }
}

/// What a new sandbox shall be like. Everything that is not set is as the server has it by default.
///
/// ```
/// use std::time::Duration;
/// use sandboxer_client::{Connection, Options};
///
/// let small = Options::default().memory_mb(512).cpus(0.5).pids(64).disk_mb(128).env("LANG", "C.UTF-8").cwd("/tmp");
/// let kept = Options::default().checkpoint(true).handoff(true).autosave(Duration::from_secs(60)).metadata("of", "nightly");
/// let thrown_away = Options::default().checkpoint(true).checkpoint_when_idle(false).idle_timeout(Duration::from_secs(60));
/// let with_tools = Options::default().image("default").filesystem_snapshot("tools").allow_host("*.example.org").drop_detached_output();
/// let elsewhere = Options::default().api_key("key");
/// let with_me = Options::default().client_gone_timeout(Duration::from_secs(60));
/// let patient = Options::default().connection(Connection::default().open_within(Duration::from_secs(60)));
/// ```
#[derive(Debug, Clone, Default)]
pub struct Options {
    pub(crate) config: CreateConfig,
    pub(crate) connection: Connection,
}

impl Options {
    /// How to reach the server, and for how long to try.
    #[must_use]
    pub fn connection(mut self, connection: Connection) -> Self {
        self.connection = connection;
        self
    }

    /// The key that the server asks for, if it does.
    #[must_use]
    pub fn api_key(mut self, key: impl Into<String>) -> Self {
        self.connection.api_key = Some(key.into());
        self
    }

    /// How long the sandbox stays without a client and with nothing executing; zero: for ever.
    #[must_use]
    pub fn idle_timeout(mut self, timeout: Duration) -> Self {
        self.config.idle_timeout = Some(timeout.into());
        self
    }

    /// How long the sandbox goes on without a client, even while a program runs; zero: for as long as a program runs, which is the default.
    /// The option can't be combined with [`checkpoint`](Self::checkpoint). Servers of an older version ignore it.
    #[must_use]
    pub fn client_gone_timeout(mut self, timeout: Duration) -> Self {
        self.config.client_gone_timeout = Some(timeout.into());
        self
    }

    /// Whether it can be saved: it then survives its server, by its last save.
    #[must_use]
    pub fn checkpoint(mut self, enable: bool) -> Self {
        self.config.enable_checkpoint = Some(enable);
        self
    }

    /// Whether another client may have it handed over while this one is attached. Needs [`checkpoint`](Self::checkpoint).
    #[must_use]
    pub fn handoff(mut self, enable: bool) -> Self {
        self.config.enable_sandbox_handoff = Some(enable);
        self
    }

    /// Whether it is saved (the default with [`checkpoint`](Self::checkpoint)) or deleted when its idle time is over.
    #[must_use]
    pub fn checkpoint_when_idle(mut self, enable: bool) -> Self {
        self.config.enable_idle_timeout_auto_checkpoint = Some(enable);
        self
    }

    /// Saves it this often while it runs. Needs [`checkpoint`](Self::checkpoint).
    #[must_use]
    pub fn autosave(mut self, every: Duration) -> Self {
        self.config.autosave_seconds = Some(every.into());
        self
    }

    /// The filesystem snapshot to start from.
    #[must_use]
    pub fn filesystem_snapshot(mut self, name: impl Into<String>) -> Self {
        self.config.filesystem_snapshot_name = Some(name.into());
        self
    }

    /// Name or digest of the image to start from.
    #[must_use]
    pub fn image(mut self, image: impl Into<String>) -> Self {
        self.config.image = Some(image.into());
        self
    }

    /// A variable of the environment of every execution.
    #[must_use]
    pub fn env(mut self, name: impl Into<String>, value: impl Into<String>) -> Self {
        self.config.env.get_or_insert_with(BTreeMap::new).insert(name.into(), value.into());
        self
    }

    /// Where executions start, unless they say otherwise.
    #[must_use]
    pub fn cwd(mut self, path: impl Into<String>) -> Self {
        self.config.cwd = Some(path.into());
        self
    }

    /// Most memory, in MiB.
    #[must_use]
    pub fn memory_mb(mut self, memory: u64) -> Self {
        self.limits().memory_mb = Some(memory);
        self
    }

    /// How many processors' worth of time.
    #[must_use]
    pub fn cpus(mut self, cpus: f64) -> Self {
        self.limits().cpus = Some(cpus);
        self
    }

    /// Most processes and threads.
    #[must_use]
    pub fn pids(mut self, pids: u32) -> Self {
        self.limits().pids = Some(pids);
        self
    }

    /// Most bytes written to files, in MiB.
    #[must_use]
    pub fn disk_mb(mut self, disk: u64) -> Self {
        self.limits().disk_mb = Some(disk);
        self
    }

    /// A host that the sandbox may reach, such as `example.com` or `*.example.org:443`; without any it has no network.
    #[must_use]
    pub fn allow_host(mut self, host: impl Into<String>) -> Self {
        match &mut self.config.network {
            Some(Network::Allow { allow }) => allow.push(host.into()),
            network => *network = Some(Network::Allow { allow: vec![host.into()] }),
        }
        self
    }

    /// Lets output that nobody is attached for go, oldest first, instead of making the program wait.
    #[must_use]
    pub fn drop_detached_output(mut self) -> Self {
        self.config.detached_output = Some(DetachedOutput::DropOldest);
        self
    }

    /// A note that is kept with the sandbox.
    #[must_use]
    pub fn metadata(mut self, name: impl Into<String>, value: impl Into<String>) -> Self {
        self.config.metadata.get_or_insert_with(BTreeMap::new).insert(name.into(), value.into());
        self
    }

    fn limits(&mut self) -> &mut LimitsRequest {
        self.config.limits.get_or_insert_with(LimitsRequest::default)
    }
}
