//! Settings of the network of sandboxes.

use std::{path::PathBuf, str::FromStr, sync::Arc};

use sandboxer_server::{AddressRule, Dialer, NetworkSettings, RecordingDialer, Rule, SystemDialer, check_hosts, rules_of};

/// What a port's own host name may be long.
const MAX_DOMAIN_BYTES: usize = 180;

#[derive(Debug, clap::Args)]
pub(super) struct NetworkArgs {
    /// Hosts that sandboxes may ask for in network.allow: NAME[:PORT], *.NAME[:PORT], * for every name, an address, or a preset (@pypi, @npm, @debian); no port: 80
    /// and 443, * for every port. May be given several times; without it they have no network
    #[arg(long, env = "SANDBOXER_NETWORK_ALLOW", value_delimiter = ',', value_name = "RULE")]
    network_allow: Vec<String>,
    /// What no sandbox reaches, whatever is allowed; no port: every port
    #[arg(long, env = "SANDBOXER_NETWORK_DENY", value_delimiter = ',', value_name = "RULE")]
    network_deny: Vec<String>,
    /// An address that is reached though it is not public: ADDRESS[/BITS][:PORT]. Without it private, link-local, loopback and metadata addresses never are
    #[arg(long, env = "SANDBOXER_NETWORK_ALLOW_ADDRESS", value_delimiter = ',', value_name = "ADDRESS")]
    network_allow_address: Vec<String>,
    /// File of names and their addresses, as /etc/hosts, that comes before this machine's own resolver
    #[arg(long, env = "SANDBOXER_NETWORK_HOSTS", value_name = "FILE")]
    network_hosts: Option<PathBuf>,
    /// Connections to outside of each sandbox at once
    #[arg(long, env = "SANDBOXER_NETWORK_CONNECTIONS", default_value_t = 256, value_name = "N")]
    network_connections: usize,
    /// What each sandbox may send and receive; 0: no bound
    #[arg(long, env = "SANDBOXER_NETWORK_MB", default_value_t = 0, value_name = "MIB")]
    network_mb: u64,
    /// What each sandbox may send and receive within a second; 0: no bound
    #[arg(long, env = "SANDBOXER_NETWORK_MB_PER_SECOND", default_value_t = 0, value_name = "MIB")]
    network_mb_per_second: u64,
    /// Check and log connections of sandboxes, and connect to nothing
    #[arg(long, env = "SANDBOXER_NETWORK_DRY_RUN")]
    network_dry_run: bool,
    /// Serve ports of sandboxes at PORT-ID.DOMAIN too, each as an origin of its own: what browsers need for pages that are not trusted
    #[arg(long, env = "SANDBOXER_PORT_DOMAIN", value_name = "DOMAIN")]
    port_domain: Option<String>,
}

impl NetworkArgs {
    pub(super) fn check(&self, faults: &mut Vec<String>) -> NetworkSettings {
        if let Some(Err(error)) = self.network_hosts.as_deref().map(check_hosts) {
            faults.push(format!("--network-hosts: {error}"));
        }
        if self.network_connections == 0 || self.network_connections > 384 {
            faults.push("--network-connections: at least 1 and at most 384".to_owned());
        }
        let port_domain = self.port_domain.as_deref().filter(|domain| !domain.is_empty()).map(str::to_ascii_lowercase);
        let is_domain = |domain: &String| {
            domain.len() <= MAX_DOMAIN_BYTES && domain.bytes().all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'.'))
        };
        if !port_domain.as_ref().is_none_or(is_domain) {
            faults.push("--port-domain: a name such as ports.example.com".to_owned());
        }
        let system = SystemDialer::new(self.network_hosts.clone());
        let dialer: Arc<dyn Dialer> = if self.network_dry_run { Arc::new(RecordingDialer::new(system)) } else { Arc::new(system) };
        let mib = |count: u64| (count > 0).then(|| count.saturating_mul(1024 * 1024));
        NetworkSettings {
            allow: parsed("--network-allow", &self.network_allow, rules_of, faults).into_iter().flatten().collect(),
            deny: parsed("--network-deny", &self.network_deny, Rule::denying, faults),
            addresses: list::<AddressRule>("--network-allow-address", &self.network_allow_address, faults),
            dialer,
            connections: self.network_connections,
            bytes: mib(self.network_mb),
            rate: mib(self.network_mb_per_second),
            port_domain,
            ..NetworkSettings::default()
        }
    }
}

fn list<T: FromStr<Err: std::fmt::Display>>(option: &str, texts: &[String], faults: &mut Vec<String>) -> Vec<T> {
    parsed(option, texts, T::from_str, faults)
}

fn parsed<T, E: std::fmt::Display>(
    option: &str,
    texts: &[String],
    parse: impl Fn(&str) -> Result<T, E>,
    faults: &mut Vec<String>,
) -> Vec<T> {
    let texts = texts.iter().map(|text| text.trim()).filter(|text| !text.is_empty());
    texts.filter_map(|text| parse(text).map_err(|error| faults.push(format!("{option}: {text:?}: {error}"))).ok()).collect()
}
