//! What becomes of a wish to connect: one decision, the same for every way to ask.

use std::{
    net::{IpAddr, SocketAddr},
    sync::{Arc, atomic::Ordering},
};

use tokio::{
    net::TcpStream,
    sync::OwnedSemaphorePermit,
    time::{Instant, sleep_until},
};
use tracing::info;

use super::{
    Connection, NetworkSettings, Shared,
    address::{is_own, why_not_public},
    meter::{Counted, Metered},
    places::{NoPlace, Place},
    rules::{Host, Rule},
};

/// What is kept of a name that a program asks for.
const MAX_TEXT_CHARS: usize = 300;
/// And of why it is refused.
const MAX_MESSAGE_CHARS: usize = 600;
/// Addresses of one name that are tried, one after the other.
const MAX_DIALLED: usize = 8;

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
    /// It took more than a look to find out.
    fn is_of_a_try(self) -> bool {
        matches!(self, Self::Address | Self::NotResolved | Self::NotConnected)
    }

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

/// What is written down of a connection, as far as it is known: when it is dropped, whatever became of it.
pub(super) struct Record {
    shared: Arc<Shared>,
    /// By which it is known already, while it goes on.
    number: Option<u64>,
    connection: Connection,
    began: Instant,
    counted: Arc<Counted>,
    _place: Option<Place>,
    how: How,
}

/// How what is dropped is written down.
#[derive(Clone, Copy, PartialEq, Eq)]
enum How {
    Whole,
    /// The program did not wait for its answer, and asks for more than is written down one by one.
    Counted,
}

impl Record {
    fn new(shared: &Arc<Shared>, via: &str, host: &str, port: u16) -> Self {
        let connection = Connection {
            time: jiff::Timestamp::now(),
            via: via.to_owned(),
            host: readable(host),
            port,
            address: None,
            verdict: "given_up".to_owned(),
            why: "the program went before it was connected".to_owned(),
            sent: 0,
            received: 0,
            duration_ms: None,
        };
        let (began, counted) = (Instant::now(), Arc::default());
        Self { shared: Arc::clone(shared), number: None, connection, began, counted, _place: None, how: How::Whole }
    }

    /// How many bytes have passed.
    pub(super) fn bytes(&self) -> u64 {
        let (sent, received) = self.counted.both();
        sent.saturating_add(received)
    }

    fn allowed(&mut self, place: Place) {
        "allowed".clone_into(&mut self.connection.verdict);
        self._place = Some(place);
        self.number = Some(self.shared.log.begin(self.connection.clone()));
    }

    /// Writes down a refusal when its time has come.
    async fn refused(mut self, refusal: &Refusal) {
        let answered_from = self.count(refusal);
        if self.how == How::Counted {
            sleep_until(answered_from).await;
            self.how = How::Whole;
        }
    }

    /// Counts a refusal. Returns from when on it may be answered, and is written down as more than a count.
    fn count(&mut self, refusal: &Refusal) -> Instant {
        refusal.kind.verdict().clone_into(&mut self.connection.verdict);
        self.connection.why.clone_from(&refusal.message);
        let pace = if refusal.kind.is_of_a_try() { &self.shared.tries } else { &self.shared.refusals };
        let answered_from = pace.count();
        if answered_from > Instant::now() {
            self.how = How::Counted;
        }
        answered_from
    }
}

/// What a program said, as far as it can be shown to people.
fn readable(text: &str) -> String {
    text.chars().filter(|c| c.is_ascii_graphic() || c.is_alphanumeric()).take(MAX_TEXT_CHARS).collect()
}

impl Drop for Record {
    fn drop(&mut self) {
        if self.how == How::Counted {
            self.shared.unwritten.fetch_add(1, Ordering::Relaxed);
            return;
        }
        if self.connection.verdict == "given_up" {
            self.shared.tries.count();
        }
        let (sent, received) = self.counted.both();
        let duration_ms = u64::try_from(self.began.elapsed().as_millis()).unwrap_or(u64::MAX);
        let mut connection = Connection { sent, received, duration_ms: Some(duration_ms), ..self.connection.clone() };
        let more = self.shared.unwritten.swap(0, Ordering::Relaxed);
        if more > 0 {
            connection.why += &format!("; before it {more} more were refused that did not wait for their answer");
        }
        info!(
            host = connection.host,
            port = connection.port,
            address = connection.address,
            verdict = connection.verdict,
            sent,
            received,
            duration_ms,
            more,
            "a connection of the sandbox"
        );
        self.shared.log.end(self.number, connection);
    }
}

/// Connects as a program wants it, if it may. Either way it is written down, also where the program does not wait for it.
pub(super) async fn open(shared: &Arc<Shared>, via: &str, host: &str, port: u16) -> Result<Open, Refusal> {
    let mut record = Record::new(shared, via, host, port);
    match connect(shared, host, port, &mut record).await {
        Ok((stream, place)) => {
            record.allowed(place);
            let stream = Metered::new(stream, Arc::clone(&shared.budget), Arc::clone(&record.counted));
            Ok(Open { stream, record })
        }
        Err(refusal) => {
            record.refused(&refusal).await;
            Err(refusal)
        }
    }
}

/// What can't even be asked for is written down too.
pub(super) async fn refuse(shared: &Arc<Shared>, via: &str, host: &str, port: u16, refusal: Refusal) -> Refusal {
    Record::new(shared, via, host, port).refused(&refusal).await;
    refusal
}

/// Nor does anybody wait for what was answered already.
pub(super) fn was_refused(shared: &Arc<Shared>, via: &str, refusal: &Refusal) {
    let _ = Record::new(shared, via, "", 0).count(refusal);
}

async fn connect(shared: &Arc<Shared>, host: &str, port: u16, record: &mut Record) -> Result<(TcpStream, Place), Refusal> {
    let policy = &shared.policy;
    let host: Host = host.parse().map_err(|error| Refusal::new(Kind::Malformed, format!("{host:?} is no name: {error}")))?;
    let rule = policy.check_name(&host, port)?;
    if shared.budget.is_used_up() {
        return Err(Refusal::new(Kind::UsedUp, "the sandbox has used up what it may send and receive (--network-mb)"));
    }
    let place = shared.place()?;
    // Those before it that came to nothing: what follows is work, here and for others.
    record.how = How::Counted;
    shared.tries.wait().await;
    record.how = How::Whole;
    let turn = Arc::clone(&shared.resolving).acquire_owned().await;
    let turn = turn.map_err(|_| Refusal::new(Kind::NotResolved, format!("{host} can't be resolved any more")))?;
    let addresses = policy.addresses(&host, port, turn).await?;
    record.connection.why = rule.to_string();
    let mut last = None;
    for address in addresses.into_iter().take(MAX_DIALLED) {
        record.connection.address = Some(address.ip().to_string());
        match shared.settings.dialer.connect(address).await {
            Ok(stream) => return Ok((stream, place)),
            Err(error) => last = Some((address, error)),
        }
    }
    let why = last.map_or_else(String::new, |(address, error)| format!(" at {address}: {error}"));
    Err(Refusal::new(Kind::NotConnected, format!("{host} could not be reached{why}")))
}

impl Shared {
    fn place(&self) -> Result<Place, Refusal> {
        self.places.take().map_err(|no_place| {
            let message = match no_place {
                NoPlace::Own => {
                    let most = self.settings.connections;
                    format!("the sandbox has {most} connections, and that is all it may have (--network-connections)")
                }
                NoPlace::OfAll => "the sandboxes of this server have as many connections as it can carry".to_owned(),
            };
            Refusal::new(Kind::TooMany, message)
        })
    }
}
