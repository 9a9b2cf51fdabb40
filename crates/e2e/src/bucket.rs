//! A bucket of the test's own, on a real server with conditional writes, and a way to it that fails as networks and stores do.

mod google;
mod stores;
mod way;

use std::sync::Arc;

use tokio::net::TcpListener;

pub use self::stores::Store;
pub(crate) use self::stores::venv;
pub use self::way::Trouble;
use self::{
    stores::ObjectServer,
    way::{Way, Wayside},
};
use crate::{Options, Server};

/// Some of a bucket: all that is below a prefix.
pub struct Bucket {
    _server: Arc<ObjectServer>,
    store: Store,
    prefix: String,
    way: std::net::SocketAddr,
    side: Arc<Wayside>,
}

impl Bucket {
    pub const NAME: &'static str = stores::BUCKET;

    /// In `moto`, which is the quickest to start.
    ///
    /// # Panics
    /// `scripts/setup --dev` has not been run.
    pub async fn start() -> Self {
        Self::start_on(Store::Moto).await
    }

    /// # Panics
    /// As [`Bucket::start`].
    pub async fn start_on(store: Store) -> Self {
        let server = tokio::task::spawn_blocking(move || ObjectServer::of(store)).await.unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let (way, side) = (listener.local_addr().unwrap(), Arc::default());
        let prefix = format!("some/where-{}", &uuid::Uuid::new_v4().simple().to_string()[..8]);
        Way { server: server.address, store, side: Arc::clone(&side) }.pass_on(listener);
        Self { _server: server, store, prefix, way, side }
    }

    #[must_use]
    pub fn url(&self) -> String {
        let scheme = if self.store == Store::Google { "gs" } else { "s3" };
        format!("{scheme}://{}/{}", Self::NAME, self.prefix)
    }

    #[must_use]
    pub fn prefix(&self) -> &str {
        &self.prefix
    }

    /// What a program has to know to find it.
    #[must_use]
    pub fn environment(&self) -> Vec<(&'static str, String)> {
        let endpoint = self.endpoint();
        if self.store == Store::Google {
            return vec![("GOOGLE_SERVICE_ACCOUNT_KEY", google::account(&endpoint)), ("GOOGLE_ALLOW_HTTP", "true".to_owned())];
        }
        vec![
            ("AWS_ENDPOINT_URL", endpoint),
            ("AWS_ALLOW_HTTP", "true".to_owned()),
            ("AWS_ACCESS_KEY_ID", stores::KEY.to_owned()),
            ("AWS_SECRET_ACCESS_KEY", stores::KEY.to_owned()),
            ("AWS_REGION", "us-east-1".to_owned()),
        ]
    }

    #[must_use]
    pub fn endpoint(&self) -> String {
        format!("http://{}", self.way)
    }

    /// What Google's client takes for an account.
    #[must_use]
    pub fn account(&self) -> String {
        google::account(&self.endpoint())
    }

    /// A server that keeps checkpoints and filesystem snapshots here.
    #[must_use]
    pub fn options(&self) -> Options {
        let options = Options::default()
            .env("CHECKPOINT_AND_RESTORE_PATH", self.url())
            .env("FILESYSTEM_SNAPSHOT_MOUNT_PATH", format!("{}/filesystems", self.url()));
        self.environment().into_iter().fold(options, |options, (name, value)| options.env(name, value))
    }

    #[must_use]
    pub fn serve(&self) -> Server {
        self.options().start()
    }

    /// `sandboxer store`, with whatever it prints.
    #[must_use]
    pub fn store(&self, arguments: &[&str]) -> std::process::Output {
        let mut command = crate::command();
        command.arg("store").args(arguments).args(["--checkpoint-path", &self.url()]).envs(self.environment());
        command.output().unwrap()
    }

    /// From now on.
    pub fn trouble(&self, trouble: Trouble) {
        self.side.set(trouble);
    }

    /// Requests that came so far, by method and the kind of object.
    #[must_use]
    pub fn requests(&self) -> std::collections::BTreeMap<String, u64> {
        self.side.requests()
    }

    /// Bytes of the objects that were sent and fetched so far.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.side.bytes()
    }
}
