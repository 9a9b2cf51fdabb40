//! The network of sandboxes: what their programs may reach, and the way there.
//!
//! A sandbox has no network but its own loopback. Where one was asked for, its agent offers a proxy there and passes each connection to this server as it is:
//! the protocol of the proxy is spoken here, and here it is decided. A name has to be among those that the sandbox was made with, among those that the server
//! allows to any, and not among those that it denies; every address that it resolves to has to be public or named by the server's own settings; and what is
//! then connected to is an address that was checked, never the name again.

mod address;
mod dial;
mod lingering;
mod link;
mod log;
mod meter;
mod pace;
mod places;
mod policy;
mod presets;
mod proxy;
mod rules;
mod socks;

use std::{
    net::SocketAddr,
    path::Path,
    sync::{Arc, atomic::AtomicU64},
};

use sandboxer_protocol::SandboxId;
use tokio::{sync::Semaphore, task::JoinSet};
use tracing::{Instrument as _, info_span};

pub use self::{
    address::AddressRule,
    dial::{Dialer, RecordingDialer, SystemDialer, check_hosts},
    presets::rules_of,
    rules::Rule,
};
pub(crate) use self::{
    link::{Link, is_own_pages, own_pages},
    log::{Connection, Log},
    places::AllPlaces,
    proxy::{Answer, strip},
    rules::MAX_RULES,
};
use self::{meter::Budget, pace::Pace, places::Places, policy::Policy};
use crate::sandbox::tunnel::TunnelStream;

/// Names that are resolved at once for one sandbox.
const MAX_RESOLVING: usize = 16;

/// What the server allows to any of its sandboxes.
#[derive(Debug, Clone)]
pub struct NetworkSettings {
    /// What sandboxes may ask for; none: they have no network.
    pub allow: Vec<Rule>,
    pub deny: Vec<Rule>,
    /// Addresses that are reached though they are not public.
    pub addresses: Vec<AddressRule>,
    pub dialer: Arc<dyn Dialer>,
    /// Connections of a sandbox at once.
    pub connections: usize,
    /// Bytes of a sandbox in both directions; none: no bound.
    pub bytes: Option<u64>,
    /// Bytes a second, likewise.
    pub rate: Option<u64>,
    /// Ports of sandboxes are served at names below it too.
    pub port_domain: Option<String>,
    /// Where this server itself listens: never reached, whatever is allowed.
    pub own: Vec<SocketAddr>,
}

/// Why a sandbox does not get the network that was asked for, with the rule.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum NotAdmitted {
    /// The text is no rule, or there are too many.
    #[error("{0}")]
    Malformed(String),
    /// This server gives no sandbox a network.
    #[error("{0}")]
    NoNetwork(String),
    /// The rule is more than this server allows.
    #[error("{0}")]
    TooMuch(String),
}

impl Default for NetworkSettings {
    fn default() -> Self {
        Self {
            allow: Vec::new(),
            deny: Vec::new(),
            addresses: Vec::new(),
            dialer: Arc::new(SystemDialer::default()),
            connections: 256,
            bytes: None,
            rate: None,
            port_domain: None,
            own: Vec::new(),
        }
    }
}

impl NetworkSettings {
    /// What a sandbox asks for, if it may have it. The error says which rule it may not.
    pub(crate) fn admit(&self, asked: &[String]) -> Result<Vec<Rule>, NotAdmitted> {
        if asked.len() > MAX_RULES {
            return Err(NotAdmitted::Malformed(format!("network.allow: at most {MAX_RULES} rules")));
        }
        let mut rules = Vec::with_capacity(asked.len());
        for text in asked {
            let stands_for = rules_of(text).map_err(|error| NotAdmitted::Malformed(format!("network.allow: {text:?}: {error}")))?;
            if self.allow.is_empty() {
                return Err(NotAdmitted::NoNetwork(format!(
                    "network.allow: {text:?}: this server gives its sandboxes no network (--network-allow names what they may reach)"
                )));
            }
            for rule in stands_for {
                if !rule.is_within(&self.allow) {
                    return Err(NotAdmitted::TooMuch(format!("network.allow: {text:?} is more than this server allows (--network-allow)")));
                }
                if let Some(denied) = self.deny.iter().find(|denied| rule.is_within(std::slice::from_ref(denied))) {
                    let why = format!("network.allow: {text:?} is denied by this server (--network-deny {denied})");
                    return Err(NotAdmitted::TooMuch(why));
                }
                rules.push(rule);
            }
        }
        if rules.len() > MAX_RULES {
            return Err(NotAdmitted::Malformed(format!("network.allow: at most {MAX_RULES} rules")));
        }
        Ok(rules)
    }
}

/// Where the streams go that a sandbox's programs open.
pub(crate) struct Egress {
    shared: Arc<Shared>,
    /// One for each stream, ended with the driver.
    tasks: JoinSet<()>,
}

struct Shared {
    policy: Policy,
    log: Arc<Log>,
    budget: Arc<Budget>,
    places: Places,
    /// So that the names of one sandbox don't keep those of all others waiting.
    resolving: Arc<Semaphore>,
    settings: Arc<NetworkSettings>,
    /// What was refused after a look.
    refusals: Pace,
    /// What came to nothing after more than that.
    tries: Pace,
    /// Refused since the last one that was written down, and only counted themselves.
    unwritten: AtomicU64,
}

impl Egress {
    /// None: the sandbox has no network.
    pub(crate) fn new(settings: &Arc<NetworkSettings>, connections: &AllPlaces, rules: &[Rule], log: Arc<Log>) -> Option<Self> {
        if rules.is_empty() || settings.allow.is_empty() {
            return None;
        }
        let shared = Shared {
            policy: Policy::new(Arc::clone(settings), rules.to_vec()),
            log,
            budget: Arc::new(Budget::new(settings.rate, settings.bytes)),
            places: Places::new(settings.connections, connections.clone()),
            resolving: Arc::new(Semaphore::new(MAX_RESOLVING)),
            settings: Arc::clone(settings),
            refusals: Pace::default(),
            tries: Pace::default(),
            unwritten: AtomicU64::new(0),
        };
        Some(Self { shared: Arc::new(shared), tasks: JoinSet::new() })
    }

    /// Serves a program that has connected to the proxy.
    pub(crate) fn serve(&mut self, id: SandboxId, stream: TunnelStream) {
        while self.tasks.try_join_next().is_some() {}
        let shared = Arc::clone(&self.shared);
        self.tasks.spawn(proxy::serve(stream, shared).instrument(info_span!(parent: None, "network", sandbox = %id)));
    }

    pub(crate) fn move_to(&self, dir: &Path) {
        self.shared.log.move_to(dir);
    }
}

#[cfg(test)]
mod tests;
