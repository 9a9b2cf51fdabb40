//! What becomes of a wish to connect: one decision, the same for every way to ask.

use std::{
    net::{IpAddr, SocketAddr},
    sync::{Arc, atomic::Ordering},
};

use tokio::{net::TcpStream, sync::OwnedSemaphorePermit, time::Instant};
use tracing::info;

use super::{
    Connection, NetworkSettings, Shared,
    address::{is_own, why_not_public},
    meter::{Counted, Metered},
    rules::{Host, Rule},
};

/// What is kept of a name that a program asks for.
const MAX_TEXT_CHARS: usize = 300;
/// And of why it is refused.
const MAX_MESSAGE_CHARS: usize = 600;

pub(super) struct Policy {
    settings: Arc<NetworkSettings>,
    rules: Vec<Rule>,
}

/// Why a program is not connected.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Refusal {
    pub(super) kind: Kind,
    /// Names the rule.
    pub(super) message: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// It makes no sense.
    Malformed,
    /// No rule of the sandbox, or of the server, allows it.
    NotAllowed,
    Denied,
    /// It resolves to what must not be reached.
    Address,
    UsedUp,
    TooMany,
    NotResolved,
    NotConnected,
}

impl Kind {
    /// As it is written down.
    fn verdict(self) -> &'static str {
        match self {
            Self::Malformed => "malformed",
            Self::NotAllowed => "not_allowed",
            Self::Denied => "denied",
            Self::Address => "address_refused",
            Self::UsedUp => "used_up",
            Self::TooMany => "too_many",
            Self::NotResolved => "not_resolved",
            Self::NotConnected => "not_connected",
        }
    }
}

impl Refusal {
    /// Of what a program said, no more than can be read is kept.
    pub(super) fn new(kind: Kind, message: impl Into<String>) -> Self {
        let message: String = message.into();
        let message = if message.len() <= MAX_MESSAGE_CHARS { message } else { message.chars().take(MAX_MESSAGE_CHARS).collect() };
        Self { kind, message }
    }
}

impl Policy {
    pub(super) fn new(settings: Arc<NetworkSettings>, rules: Vec<Rule>) -> Self {
        Self { settings, rules }
    }

    /// Whether the name may be reached at all, and by which rule.
    fn check_name(&self, host: &Host, port: u16) -> Result<&Rule, Refusal> {
        let refuse = |why: &str| Err(Refusal::new(Kind::NotAllowed, format!("{host}:{port} is not allowed: {why}")));
        let Some(rule) = self.rules.iter().find(|rule| rule.matches(host, port)) else {
            return refuse("no rule of this sandbox's network.allow names it");
        };
        // The sandbox may have been made by a server that allowed more.
        if !self.settings.allow.iter().any(|rule| rule.matches(host, port)) {
            return refuse("this server's --network-allow does not name it");
        }
        match self.settings.deny.iter().find(|rule| rule.matches(host, port)) {
            Some(rule) => Err(Refusal::new(Kind::Denied, format!("{host}:{port} is denied by this server: --network-deny {rule}"))),
            None => Ok(rule),
        }
    }

    /// All addresses of a name, each of which may be reached; asked for once.
    async fn addresses(&self, host: &Host, port: u16, turn: OwnedSemaphorePermit) -> Result<Vec<SocketAddr>, Refusal> {
        let found = match host {
            Host::Address(address) => vec![*address],
            Host::Name(name) => self
                .settings
                .dialer
                .resolve(name, turn)
                .await
                .map_err(|error| Refusal::new(Kind::NotResolved, format!("{host} could not be resolved: {error}")))?,
        };
        if found.is_empty() {
            return Err(Refusal::new(Kind::NotResolved, format!("{host} has no address")));
        }
        for address in &found {
            self.check_address(host, SocketAddr::new(*address, port))?;
        }
        Ok(found.into_iter().map(|address| SocketAddr::new(address, port)).collect())
    }

    fn check_address(&self, host: &Host, to: SocketAddr) -> Result<(), Refusal> {
        let refuse = |what: &str| {
            Err(Refusal::new(Kind::Address, format!("{host} is {}, {what}: --network-allow-address does not name it", to.ip())))
        };
        if self.settings.own.iter().any(|own| reaches(*own, to)) {
            return Err(Refusal::new(Kind::Address, format!("{host} is {to}, where this server itself listens")));
        }
        let literal = Host::Address(to.ip().to_canonical());
        if let Some(rule) = self.settings.deny.iter().find(|rule| rule.matches(&literal, to.port())) {
            return Err(Refusal::new(Kind::Denied, format!("{host} is {to}, which is denied by this server: --network-deny {rule}")));
        }
        if self.settings.addresses.iter().any(|rule| rule.matches(to)) {
            return Ok(());
        }
        match why_not_public(to.ip()) {
            Some(what) => refuse(what),
            None if is_own(to.ip()) => refuse("an address of the server's own machine"),
            None => Ok(()),
        }
    }
}

/// Whether a connection to an address ends at a listener.
fn reaches(listener: SocketAddr, to: SocketAddr) -> bool {
    let plain = |address: IpAddr| address.to_canonical();
    let same = plain(listener.ip()) == plain(to.ip());
    listener.port() == to.port() && (same || listener.ip().is_unspecified() && is_own(to.ip()) || to.ip().is_unspecified())
}

/// A connection that was allowed. What it came to is written down when it is dropped.
pub(super) struct Open {
    pub(super) stream: Metered<TcpStream>,
    pub(super) record: Record,
}

/// What is written down of a connection, as far as it is known.
pub(super) struct Record {
    shared: Arc<Shared>,
    number: u64,
    connection: Connection,
    began: Instant,
    counted: Arc<Counted>,
    _place: Option<OwnedSemaphorePermit>,
}

impl Record {
    /// How many bytes have passed.
    pub(super) fn bytes(&self) -> u64 {
        let (sent, received) = self.counted.both();
        sent + received
    }
}

impl Drop for Record {
    fn drop(&mut self) {
        let (sent, received) = (self.counted.sent.load(Ordering::Relaxed), self.counted.received.load(Ordering::Relaxed));
        let duration_ms = u64::try_from(self.began.elapsed().as_millis()).unwrap_or(u64::MAX);
        let connection = Connection { sent, received, duration_ms: Some(duration_ms), ..self.connection.clone() };
        info!(
            host = connection.host,
            port = connection.port,
            address = connection.address,
            verdict = connection.verdict,
            sent,
            received,
            duration_ms,
            "a connection of the sandbox"
        );
        self.shared.log.end(self.number, connection);
    }
}

/// Connects as a program wants it, if it may. Either way it is written down.
pub(super) async fn open(shared: &Arc<Shared>, via: &str, host: &str, port: u16) -> Result<Open, Refusal> {
    let began = Instant::now();
    let mut connection = Connection {
        time: jiff::Timestamp::now(),
        via: via.to_owned(),
        host: host.chars().filter(|c| !c.is_control()).take(MAX_TEXT_CHARS).collect(),
        port,
        address: None,
        verdict: String::new(),
        why: String::new(),
        sent: 0,
        received: 0,
        duration_ms: None,
    };
    let counted = Arc::new(Counted::default());
    match connect(shared, host, port, &mut connection).await {
        Ok((stream, place)) => {
            connection.verdict = "allowed".to_owned();
            let number = shared.log.begin(connection.clone());
            let stream = Metered::new(stream, Arc::clone(&shared.budget), Arc::clone(&counted));
            let record = Record { shared: Arc::clone(shared), number, connection, began, counted, _place: Some(place) };
            Ok(Open { stream, record })
        }
        Err(refusal) => {
            connection.verdict = refusal.kind.verdict().to_owned();
            connection.why.clone_from(&refusal.message);
            let number = shared.log.begin(connection.clone());
            drop(Record { shared: Arc::clone(shared), number, connection, began, counted, _place: None });
            Err(refusal)
        }
    }
}

/// What can't even be asked for is written down too.
pub(super) fn refuse(shared: &Arc<Shared>, via: &str, host: &str, port: u16, refusal: Refusal) -> Refusal {
    let connection = Connection {
        time: jiff::Timestamp::now(),
        via: via.to_owned(),
        host: host.chars().filter(|c| !c.is_control()).take(MAX_TEXT_CHARS).collect(),
        port,
        address: None,
        verdict: refusal.kind.verdict().to_owned(),
        why: refusal.message.clone(),
        sent: 0,
        received: 0,
        duration_ms: None,
    };
    let number = shared.log.begin(connection.clone());
    drop(Record { shared: Arc::clone(shared), number, connection, began: Instant::now(), counted: Arc::default(), _place: None });
    refusal
}

async fn connect(
    shared: &Arc<Shared>,
    host: &str,
    port: u16,
    connection: &mut Connection,
) -> Result<(TcpStream, OwnedSemaphorePermit), Refusal> {
    let policy = &shared.policy;
    let host: Host = host.parse().map_err(|error| Refusal::new(Kind::Malformed, format!("{host:?} is no name: {error}")))?;
    let rule = policy.check_name(&host, port)?;
    if shared.budget.is_used_up() {
        return Err(Refusal::new(Kind::UsedUp, "the sandbox has used up what it may send and receive (--network-mb)"));
    }
    let Ok(place) = Arc::clone(&shared.places).try_acquire_owned() else {
        let most = shared.settings.connections;
        return Err(Refusal::new(
            Kind::TooMany,
            format!("the sandbox has {most} connections, and that is all it may have (--network-connections)"),
        ));
    };
    let turn = Arc::clone(&shared.resolving).acquire_owned().await;
    let turn = turn.map_err(|_| Refusal::new(Kind::NotResolved, format!("{host} can't be resolved any more")))?;
    let addresses = policy.addresses(&host, port, turn).await?;
    connection.why = rule.to_string();
    let mut last = None;
    for address in addresses {
        connection.address = Some(address.ip().to_string());
        match shared.settings.dialer.connect(address).await {
            Ok(stream) => return Ok((stream, place)),
            Err(error) => last = Some((address, error)),
        }
    }
    let why = last.map_or_else(String::new, |(address, error)| format!(" at {address}: {error}"));
    Err(Refusal::new(Kind::NotConnected, format!("{host} could not be reached{why}")))
}
