//! Every setting of the server: as an option, as an environment variable, checked all together.

use std::{
    env, fs,
    net::{IpAddr, Ipv4Addr, SocketAddr},
    os::unix::fs::{DirBuilderExt as _, PermissionsExt as _},
    path::{Path, PathBuf},
    time::Duration,
};

use clap::ValueEnum;
use sandboxer_extensions::Config;
use sandboxer_image::{ExtraAuthorities, ImageStore};
use sandboxer_protocol::agent::ImageSpares;
use sandboxer_server::{
    Access, ApiKey, CheckpointSettings, Collection, Facts, FilesystemSettings, KeyLimits, Limits, PoolSettings, SPARE_INTERPRETERS,
    Settings, Spares, TemplateSettings, Terms, Tls, WARM_MODULES, WorkspaceSettings,
};
use sandboxer_store::Place;

use super::network::NetworkArgs;
use crate::image::Authorities;

const DEFAULT_PORT: u16 = 8080;
/// A shorter lease runs out whenever the disk is busy; for a longer one nobody would wait.
const MIN_LEASE: f64 = 3.0;
const MAX_LEASE: f64 = 300.0;
const MAX_POOL: usize = 1000;

/// Serve sandboxes over WebSockets
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Address to listen on; without a port: $PORT, or 8080. Other than a loopback address only with API keys or --insecure-no-auth
    #[arg(long, env = "SANDBOXER_LISTEN", default_value = "127.0.0.1", value_name = "ADDRESS[:PORT]")]
    listen: String,
    /// Address at which /metrics is served without a key, and nothing else is
    #[arg(long, env = "SANDBOXER_METRICS_LISTEN", value_name = "ADDRESS:PORT")]
    metrics_listen: Option<String>,
    /// Directory of this instance's own state [default: $XDG_STATE_HOME/sandboxer, or ~/.local/state/sandboxer]
    #[arg(long, env = "SANDBOXER_DATA_DIR", value_name = "DIR")]
    data_dir: Option<PathBuf>,
    /// Directory of images, shared by all instances of a machine [default: $XDG_DATA_HOME/sandboxer/images, or ~/.local/share/sandboxer/images]
    #[arg(long, env = "SANDBOXER_IMAGE_DIR", value_name = "DIR")]
    image_dir: Option<PathBuf>,
    #[command(flatten)]
    authorities: Authorities,
    /// The runsc binary [default: the one that scripts/setup installed, or the one in PATH]
    #[arg(long, env = "SANDBOXER_RUNSC", value_name = "FILE")]
    runsc: Option<PathBuf>,
    /// Sandboxes at once
    #[arg(long, env = "SANDBOXER_MAX_SANDBOXES", default_value_t = 100, value_name = "N")]
    max_sandboxes: usize,
    /// Started sandboxes that wait for their creators, so that creating one takes no time; 0: none. They give way when --max-sandboxes is reached
    #[arg(long, env = "SANDBOXER_POOL", default_value_t = 2, value_name = "N")]
    pool: usize,
    /// Containers that wait for what is restored into them, where there is a checkpoint path or a template cache; 0: none
    #[arg(long, env = "SANDBOXER_RESTORE_POOL", default_value_t = 1, value_name = "N")]
    restore_pool: usize,
    /// With less memory than this available on the machine, nothing waits
    #[arg(long, env = "SANDBOXER_POOL_MIN_FREE_MB", default_value_t = 512, value_name = "MIB")]
    pool_min_free_mb: u64,
    /// Where the machine says how much memory it has
    #[arg(long, env = "SANDBOXER_MEMINFO", default_value = "/proc/meminfo", value_name = "FILE", hide = true)]
    meminfo: PathBuf,
    /// Seconds without client and running program after which a sandbox is deleted, unless its creator says otherwise; 0: never
    #[arg(long, env = "SANDBOXER_IDLE_TIMEOUT", default_value_t = 300.0, value_name = "SECONDS")]
    idle_timeout: f64,
    /// Seconds that any sandbox may live; 0: no bound
    #[arg(long, env = "SANDBOXER_MAX_LIFETIME", default_value_t = 0.0, value_name = "SECONDS")]
    max_lifetime: f64,
    /// The most memory that a sandbox may ask for
    #[arg(long, env = "SANDBOXER_MAX_MEMORY_MB", default_value_t = 8192, value_name = "MIB")]
    max_memory_mb: u64,
    /// The most CPUs that a sandbox may ask for
    #[arg(long, env = "SANDBOXER_MAX_CPUS", default_value_t = 64.0, value_name = "N")]
    max_cpus: f64,
    /// The most processes and threads that a sandbox may ask for
    #[arg(long, env = "SANDBOXER_MAX_PIDS", default_value_t = 4096, value_name = "N")]
    max_pids: u32,
    /// The most disk space that a sandbox may ask for
    #[arg(long, env = "SANDBOXER_MAX_DISK_MB", default_value_t = 8192, value_name = "MIB")]
    max_disk_mb: u64,
    /// The largest message that a client may send
    #[arg(long, env = "SANDBOXER_MAX_MESSAGE_BYTES", default_value_t = 8 * 1024 * 1024, value_name = "BYTES")]
    max_message_bytes: usize,
    /// Output of a stream that is held until a client has it; beyond it the program waits
    #[arg(long, env = "SANDBOXER_OUTPUT_WINDOW_BYTES", default_value_t = 8 * 1024 * 1024, value_name = "BYTES")]
    output_window_bytes: u64,
    /// Interpreters of each language (bash, Python) that wait in every sandbox for their code, so that an execution need not start one; 0: none.
    /// A pair is resident with about 32 MiB, pages of the image among them; none waits in sandboxes of less than 256 MiB
    #[arg(long, env = "SANDBOXER_SPARE_INTERPRETERS", default_value_t = SPARE_INTERPRETERS, value_name = "N")]
    spare_interpreters: u32,
    /// Modules that a waiting Python has imported already, separated by commas
    #[arg(long, env = "SANDBOXER_WARM_MODULES", value_delimiter = ',', default_values = WARM_MODULES, value_name = "NAMES")]
    warm_modules: Vec<String>,
    /// Seconds that ending everything may take when the server is stopped
    #[arg(long, env = "SANDBOXER_STOP_GRACE", default_value_t = 10.0, value_name = "SECONDS")]
    stop_grace: f64,
    /// Seconds for which the reason is remembered why a sandbox ended
    #[arg(long, env = "SANDBOXER_REMEMBER", default_value_t = 3600.0, value_name = "SECONDS")]
    remember: f64,
    /// File of API keys, one a line, as NAME:KEY or KEY. $SANDBOXER_API_KEYS holds such lines itself. A name is a tenant: it owns what its key makes, and a
    /// key that gets another name leaves all of that behind. A key without a name has one that follows from its hash
    #[arg(long, env = "SANDBOXER_API_KEYS_FILE", value_name = "FILE")]
    api_keys_file: Option<PathBuf>,
    /// Listen on another than a loopback address without API keys: whoever reaches it may run code
    #[arg(long, env = "SANDBOXER_INSECURE_NO_AUTH")]
    insecure_no_auth: bool,
    /// Sandboxes at once for each API key; 0: as many as the server has
    #[arg(long, env = "SANDBOXER_KEY_MAX_SANDBOXES", default_value_t = 0, value_name = "N")]
    key_max_sandboxes: usize,
    /// Sandboxes that each API key may make within a minute; 0: no bound
    #[arg(long, env = "SANDBOXER_KEY_CREATES_PER_MINUTE", default_value_t = 0, value_name = "N")]
    key_creates_per_minute: usize,
    /// Maximum data of each API key on the volume, in MiB. Saves beyond it fail, except those without which a sandbox would be lost. 0: no bound
    #[arg(long, env = "SANDBOXER_KEY_VOLUME_MB", default_value_t = 0, value_name = "MIB")]
    key_volume_mb: u64,
    /// File of the TLS certificate with its chain (PEM); needs --tls-key
    #[arg(long, env = "SANDBOXER_TLS_CERT", value_name = "FILE")]
    tls_cert: Option<PathBuf>,
    /// File of the certificate's private key (PEM)
    #[arg(long, env = "SANDBOXER_TLS_KEY", value_name = "FILE")]
    tls_key: Option<PathBuf>,
    /// Another name by which clients may call this machine where no key is needed; may be given several times
    #[arg(long, env = "SANDBOXER_ALLOW_HOST", value_delimiter = ',', value_name = "NAME")]
    allow_host: Vec<String>,
    /// Where checkpoints are kept: a directory that all instances share, s3://BUCKET/PREFIX or gs://BUCKET/PREFIX; without it there are none
    #[arg(long, env = "CHECKPOINT_AND_RESTORE_PATH", value_name = "DIR|URL")]
    checkpoint_path: Option<PathBuf>,
    /// Where filesystem snapshots are kept, likewise; without it there are none
    #[arg(long, env = "FILESYSTEM_SNAPSHOT_MOUNT_PATH", value_name = "DIR|URL")]
    filesystem_snapshot_path: Option<PathBuf>,
    /// File of a secret that authenticates what is on these volumes: all instances have the same
    #[arg(long, env = "SANDBOXER_VOLUME_KEY_FILE", value_name = "FILE")]
    volume_key_file: Option<PathBuf>,
    /// What is kept of checkpoints, and of filesystem snapshots, on this machine's own disk, below --data-dir
    #[arg(long, env = "SANDBOXER_CACHE_MB", default_value_t = 4096, value_name = "MIB")]
    cache_mb: u64,
    /// What is kept, below --data-dir too, of sandboxes as they are when a filesystem snapshot was unpacked, so that the next one from it is a restore; 0: nothing
    #[arg(long, env = "SANDBOXER_TEMPLATE_CACHE_MB", default_value_t = 2048, value_name = "MIB")]
    template_cache_mb: u64,
    /// Seconds after which an instance that gives no sign of life has lost its sandboxes to whoever asks for them. All instances of a
    /// volume need the same
    #[arg(long, env = "SANDBOXER_LEASE", default_value_t = 15.0, value_name = "SECONDS")]
    lease: f64,
    /// Checkpoints that are kept of a sandbox, beside the newest one and the newest two that nobody asked for
    #[arg(long, env = "SANDBOXER_KEEP_CHECKPOINTS", default_value_t = 5, value_name = "N")]
    keep_checkpoints: usize,
    /// Seconds between two collections of the volume by this instance, which remove what nobody needs; 0: it does none
    #[arg(long, env = "SANDBOXER_COLLECT_EVERY", default_value_t = 600.0, value_name = "SECONDS")]
    collect_every: f64,
    /// Seconds that saving a sandbox may take; a save that takes longer fails, and a writer that is silent for twice as long is taken for dead by whoever collects
    #[arg(long, env = "SANDBOXER_LONGEST_SAVE", default_value_t = 900.0, value_name = "SECONDS")]
    longest_save: f64,
    /// Directory of hosts.toml, extensions.toml and profiles/, for sandboxes of other kinds [default: $XDG_CONFIG_HOME/sandboxer, or ~/.config/sandboxer]
    #[arg(long, env = "SANDBOXER_CONFIG_DIR", value_name = "DIR")]
    config_dir: Option<PathBuf>,
    #[command(flatten)]
    network: NetworkArgs,
    /// What is logged: error, warn, info, debug, trace, or by module
    #[arg(long, env = "SANDBOXER_LOG", default_value = "info", value_name = "FILTER")]
    pub(super) log: String,
    /// How: as lines for people, or as JSON
    #[arg(long, env = "SANDBOXER_LOG_FORMAT", value_enum, default_value_t = LogFormat::Text)]
    pub(super) log_format: LogFormat,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum LogFormat {
    Text,
    Json,
}

/// Settings that a server can start with.
pub(crate) struct Checked {
    /// What checkpoints are bound to is not known yet: that takes runsc.
    pub(crate) settings: Settings,
    pub(crate) image_dir: PathBuf,
    pub(crate) authorities: Option<ExtraAuthorities>,
    pub(crate) runsc: PathBuf,
    /// What is not as it was written down, and is to be told.
    pub(crate) notes: Vec<String>,
}

/// Collects what is wrong, so that all of it is told at once.
#[derive(Default)]
struct Faults(Vec<String>);

impl Faults {
    fn take<T>(&mut self, value: Result<T, String>) -> Option<T> {
        value.map_err(|fault| self.0.push(fault)).ok()
    }

    fn unless(&mut self, good: bool, fault: &str) {
        if !good {
            self.0.push(fault.to_owned());
        }
    }
}

impl Args {
    /// Checks everything and returns all faults together.
    pub(crate) fn check(&self) -> Result<Checked, Vec<String>> {
        let mut faults = Faults::default();
        let listen = faults.take(self.listen_address(env::var("PORT").ok().as_deref()));
        let metrics_listen = faults.take(self.metrics_address());
        let keys = faults.take(self.keys(env::var("SANDBOXER_API_KEYS").ok().as_deref()));
        if let (Some(listen), Some(keys)) = (&listen, &keys) {
            let open = listen.ip().is_loopback() || !keys.is_empty() || self.insecure_no_auth;
            faults.unless(
                open,
                "--listen: on another than a loopback address everybody could run code: give API keys (--api-keys-file, SANDBOXER_API_KEYS), or \
                 --insecure-no-auth if something else keeps strangers out",
            );
        }
        faults.unless(self.max_sandboxes > 0, "--max-sandboxes: at least 1");
        faults.unless(self.pool <= MAX_POOL && self.restore_pool <= MAX_POOL, "--pool, --restore-pool: at most 1000");
        faults.unless(self.max_message_bytes >= 1024, "--max-message-bytes: at least 1024");
        faults.unless(self.max_message_bytes <= 8 * 1024 * 1024, "--max-message-bytes: at most 8388608");
        faults.unless(self.output_window_bytes >= 64 * 1024, "--output-window-bytes: at least 65536");
        faults.unless(self.output_window_bytes <= 1024 * 1024 * 1024, "--output-window-bytes: at most 1073741824");
        let spares = faults.take(self.spares());
        faults.unless(self.max_cpus.is_finite() && self.max_cpus > 0.0, "--max-cpus: more than 0");
        let idle_timeout = faults.take(seconds("--idle-timeout", self.idle_timeout));
        let max_lifetime = faults.take(seconds("--max-lifetime", self.max_lifetime));
        let stop_grace = faults.take(seconds("--stop-grace", self.stop_grace));
        let remember = faults.take(seconds("--remember", self.remember));
        faults.unless((MIN_LEASE..=MAX_LEASE).contains(&self.lease), "--lease: at least 3 and at most 300 seconds");
        let collect_every = faults.take(seconds("--collect-every", self.collect_every));
        faults.unless((1.0..=86_400.0).contains(&self.longest_save), "--longest-save: at least 1 and at most 86400 seconds");
        let data_dir = faults.take(self.data_dir());
        let image_dir = faults.take(self.image_dir.clone().or_else(ImageStore::default_directory).ok_or_else(no_home("--image-dir")));
        let authorities = faults.take(self.authorities.read().map_err(|error| format!("--extra-ca-file: {error}"))).flatten();
        let runsc = faults.take(sandboxer_runsc::find(self.runsc.as_deref()).map_err(|error| format!("--runsc: {error}")));
        let tls = faults.take(self.tls());
        let checkpoint_path = faults.take(volume("CHECKPOINT_AND_RESTORE_PATH", self.checkpoint_path.as_deref()));
        let filesystem_path = faults.take(volume("FILESYSTEM_SNAPSHOT_MOUNT_PATH", self.filesystem_snapshot_path.as_deref()));
        let network = self.network.check(&mut faults.0);
        if let Err(error) = tracing_subscriber::EnvFilter::try_new(&self.log) {
            faults.0.push(format!("--log: {error}"));
        }
        let (Some(listen), Some(keys), Some(data_dir), Some(image_dir), Some(runsc)) = (listen, keys, data_dir, image_dir, runsc) else {
            return Err(faults.0);
        };
        if !faults.0.is_empty() {
            return Err(faults.0);
        }
        let workspaces = self.workspaces(&data_dir).map_err(|fault| vec![fault])?;
        let mut settings = Settings::new(listen, data_dir);
        settings.workspaces = Some(workspaces);
        settings.network = network;
        settings.metrics_listen = metrics_listen.flatten();
        settings.max_sandboxes = self.max_sandboxes;
        settings.idle_timeout = idle_timeout.flatten();
        settings.max_lifetime = max_lifetime.flatten();
        settings.max_limits = Limits { memory_mb: self.max_memory_mb, cpus: self.max_cpus, pids: self.max_pids, disk_mb: self.max_disk_mb };
        settings.max_message_bytes = self.max_message_bytes;
        settings.output_window_bytes = self.output_window_bytes;
        settings.spares = spares.unwrap_or_default();
        settings.stop_grace = stop_grace.flatten().unwrap_or_default();
        settings.remember = remember.flatten().unwrap_or_default();
        settings.access = Access { any_host: self.insecure_no_auth && !listen.ip().is_loopback(), keys, hosts: self.allow_host.clone() };
        let bound = |most: usize| (most > 0).then_some(most);
        settings.key_limits = KeyLimits {
            sandboxes: bound(self.key_max_sandboxes),
            creates_per_minute: bound(self.key_creates_per_minute),
            volume_bytes: (self.key_volume_mb > 0).then(|| self.key_volume_mb.saturating_mul(1024 * 1024)),
        };
        settings.pool = PoolSettings {
            sandboxes: self.pool,
            containers: self.restore_pool,
            min_free_bytes: self.pool_min_free_mb.saturating_mul(1024 * 1024),
            meminfo: self.meminfo.clone(),
        };
        settings.tls = tls.flatten();
        settings.checkpoints = checkpoint_path.flatten().map(|place| CheckpointSettings {
            place,
            key_file: self.volume_key_file.clone(),
            cache_bytes: self.cache_mb.saturating_mul(1024 * 1024),
            terms: Terms::of_lease(Duration::from_secs_f64(self.lease)),
            facts: Facts::default(),
            collection: Collection {
                every: collect_every.flatten(),
                keep_checkpoints: self.keep_checkpoints,
                longest_save: Duration::from_secs_f64(self.longest_save),
            },
        });
        settings.filesystems = filesystem_path.flatten().map(|place| FilesystemSettings {
            place,
            key_file: self.volume_key_file.clone(),
            cache_bytes: self.cache_mb.saturating_mul(1024 * 1024),
            templates: (self.template_cache_mb > 0)
                .then(|| TemplateSettings { max_bytes: self.template_cache_mb.saturating_mul(1024 * 1024), facts: Facts::default() }),
            collect_every: collect_every.flatten(),
        });
        let asked = [
            (self.checkpoint_path.as_deref(), settings.checkpoints.as_ref().map(|checkpoints| &checkpoints.place)),
            (self.filesystem_snapshot_path.as_deref(), settings.filesystems.as_ref().map(|filesystems| &filesystems.place)),
        ];
        let mounted = asked.into_iter().filter_map(|(path, place)| used_by_url(path?, place?));
        let notes = mounted.chain(settings.access.keys.iter().filter_map(ApiKey::note)).collect();
        Ok(Checked { settings, image_dir, authorities, runsc, notes })
    }

    /// Sandboxes of other kinds: what may be made, and where it is kept. A data directory that was asked for has files of its own.
    fn workspaces(&self, data_dir: &Path) -> Result<WorkspaceSettings, String> {
        let config_dir = self.config_dir.clone().or_else(|| xdg("XDG_CONFIG_HOME", ".config"));
        let config = Config::load(config_dir.as_deref(), &data_dir.join("extensions"));
        let config = config.map_err(|faults| format!("--config-dir: {}: {faults}", config_dir.unwrap_or_default().display()))?;
        let dir = match &self.data_dir {
            Some(_) => data_dir.to_owned(),
            None => xdg("XDG_DATA_HOME", ".local/share").unwrap_or_else(|| data_dir.to_owned()),
        };
        Ok(WorkspaceSettings { dir, run_dir: data_dir.to_owned(), config })
    }

    fn spares(&self) -> Result<Spares, String> {
        let warm_modules: Vec<String> = self.warm_modules.iter().filter(|name| !name.is_empty()).cloned().collect();
        let wanted = ImageSpares { each: Some(self.spare_interpreters), warm_modules: Some(warm_modules.clone()) };
        wanted.check().map_err(|fault| format!("--spare-interpreters, --warm-modules: {fault}"))?;
        Ok(Spares { each: self.spare_interpreters, warm_modules })
    }

    fn tls(&self) -> Result<Option<Tls>, String> {
        match (&self.tls_cert, &self.tls_key) {
            (None, None) => Ok(None),
            (Some(cert), Some(key)) => Tls::read(cert, key)
                .map(Some)
                .map_err(|error| format!("--tls-cert {}, --tls-key {}: {error}", cert.display(), key.display())),
            (Some(_), None) => Err("--tls-cert needs --tls-key".to_owned()),
            (None, Some(_)) => Err("--tls-key needs --tls-cert".to_owned()),
        }
    }

    fn listen_address(&self, port: Option<&str>) -> Result<SocketAddr, String> {
        if let Ok(address) = self.listen.parse() {
            return Ok(address);
        }
        let address = match self.listen.trim_matches(['[', ']']) {
            "localhost" => IpAddr::V4(Ipv4Addr::LOCALHOST),
            text => text.parse().map_err(|_| format!("--listen: {:?} is not an address such as 127.0.0.1:8080", self.listen))?,
        };
        let port = match port.filter(|port| !port.is_empty()) {
            Some(port) => port.parse().map_err(|_| format!("PORT: {port:?} is not a port number"))?,
            None => DEFAULT_PORT,
        };
        Ok(SocketAddr::new(address, port))
    }

    fn metrics_address(&self) -> Result<Option<SocketAddr>, String> {
        let Some(text) = self.metrics_listen.as_deref().filter(|text| !text.is_empty()) else { return Ok(None) };
        text.parse().map(Some).map_err(|_| format!("--metrics-listen: {text:?} is not an address with a port such as 127.0.0.1:9090"))
    }

    fn keys(&self, variable: Option<&str>) -> Result<Vec<ApiKey>, String> {
        let mut keys = Vec::new();
        if let Some(file) = &self.api_keys_file {
            let text = fs::read_to_string(file).map_err(|error| format!("--api-keys-file: {}: {error}", file.display()))?;
            keys.extend(ApiKey::parse_list(&text).map_err(|error| format!("--api-keys-file: {}: {error}", file.display()))?);
        }
        if let Some(text) = variable.filter(|text| !text.trim().is_empty()) {
            let lines = text.replace(',', "\n");
            keys.extend(ApiKey::parse_list(&lines).map_err(|error| format!("SANDBOXER_API_KEYS: {error}"))?);
        }
        ApiKey::check_all(&keys).map_err(|error| format!("--api-keys-file, SANDBOXER_API_KEYS: {error}"))?;
        Ok(keys)
    }

    fn data_dir(&self) -> Result<PathBuf, String> {
        let dir = self.data_dir.clone().or_else(default_data_dir).ok_or_else(no_home("--data-dir"))?;
        let fault = |error| format!("--data-dir: {}: {error}", dir.display());
        fs::DirBuilder::new().recursive(true).mode(0o700).create(&dir).map_err(fault)?;
        // Who can write there can speak to the sandboxes.
        fs::set_permissions(&dir, fs::Permissions::from_mode(0o700)).map_err(fault)?;
        // Sandboxes are found by it after a restart, wherever that is started from.
        let dir = dir.canonicalize().map_err(fault)?;
        check_length(&dir)?;
        Ok(dir)
    }
}

/// It has to be there and to be written to, all the same who started the server and where.
fn volume(name: &str, path: Option<&Path>) -> Result<Option<Place>, String> {
    let Some(path) = path.filter(|path| !path.as_os_str().is_empty()) else { return Ok(None) };
    let place = Place::at(path).map_err(|fault| format!("{name}: {fault}"))?;
    if let Some(path) = place.directory() {
        tempfile::tempfile_in(path).map_err(|error| format!("{name}: {}: it can't be written to: {error}", path.display()))?;
    }
    Ok(Some(place))
}

/// That a directory is a mounted bucket, if it is.
fn used_by_url(path: &Path, place: &Place) -> Option<String> {
    let named = path.to_str().is_some_and(|text| text.contains("://"));
    (place.directory().is_none() && !named)
        .then(|| format!("{} is a mounted bucket, which has no atomic operations: it is used by its URL, {place}", path.display()))
}

fn default_data_dir() -> Option<PathBuf> {
    xdg("XDG_STATE_HOME", ".local/state")
}

/// This program's directory of a kind.
fn xdg(variable: &str, below_home: &str) -> Option<PathBuf> {
    let absolute = |name: &str| env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
    let base = absolute(variable).or_else(|| absolute("HOME").map(|home| home.join(below_home)))?;
    Some(base.join("sandboxer"))
}

/// runsc puts sockets below this directory, and the path of a socket is short.
fn check_length(dir: &Path) -> Result<(), String> {
    const LONGEST: usize = 108 - "/runsc/runsc-00000000-0000-0000-0000-000000000000.sock\0".len();
    let length = dir.as_os_str().len();
    if length > LONGEST {
        return Err(format!("--data-dir: {} has {length} characters, and at most {LONGEST} leave room for runsc's sockets", dir.display()));
    }
    Ok(())
}

fn no_home(option: &'static str) -> impl Fn() -> String {
    move || format!("{option}: give one, since neither HOME nor an XDG directory is set")
}

fn seconds(option: &str, value: f64) -> Result<Option<Duration>, String> {
    match value {
        0.0 => Ok(None),
        value if value > 0.0 && value < 1e9 => Ok(Some(Duration::from_secs_f64(value))),
        _ => Err(format!("{option}: a number of seconds, zero or more")),
    }
}
