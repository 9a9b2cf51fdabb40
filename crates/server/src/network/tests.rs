//! What may be reached and what may not, with every connection recorded and none made.

use std::{
    collections::{HashMap, VecDeque},
    io,
    net::IpAddr,
    sync::Mutex,
};

use futures_util::future::BoxFuture;
use tokio::{net::TcpStream, sync::OwnedSemaphorePermit};

use super::{policy::Kind, *};

/// Answers each question for a name with the next of its answers, and connects to nothing.
#[derive(Debug, Default)]
struct Names {
    answers: Mutex<HashMap<String, VecDeque<Vec<IpAddr>>>>,
    asked: Mutex<Vec<String>>,
}

impl Dialer for Arc<Names> {
    fn resolve<'a>(&'a self, name: &'a str, _turn: OwnedSemaphorePermit) -> BoxFuture<'a, io::Result<Vec<IpAddr>>> {
        Box::pin(async move {
            self.asked.lock().unwrap().push(name.to_owned());
            let answer = self.answers.lock().unwrap().get_mut(name).and_then(VecDeque::pop_front);
            answer.ok_or_else(|| io::Error::other("no such name"))
        })
    }

    fn connect(&self, _: SocketAddr) -> BoxFuture<'_, io::Result<TcpStream>> {
        unreachable!("the recorder is before it")
    }
}

struct Tried {
    shared: Arc<Shared>,
    names: Arc<Names>,
    dialer: Arc<RecordingDialer>,
    _dir: tempfile::TempDir,
}

impl Tried {
    fn new(allow: &[&str], change: impl FnOnce(&mut NetworkSettings)) -> Self {
        let names = Arc::new(Names::default());
        let dialer = Arc::new(RecordingDialer::new(Arc::clone(&names)));
        let mut settings = NetworkSettings { allow: vec!["*:*".parse().unwrap()], dialer: dialer.clone(), ..NetworkSettings::default() };
        change(&mut settings);
        let dir = tempfile::tempdir().unwrap();
        let rules: Vec<Rule> = allow.iter().map(|rule| rule.parse().unwrap()).collect();
        let egress = Egress::new(&Arc::new(settings), &rules, Log::open(dir.path())).unwrap();
        Self { shared: egress.shared, names, dialer, _dir: dir }
    }

    fn name(self, name: &str, answers: &[&[&str]]) -> Self {
        let answers = answers.iter().map(|answer| answer.iter().map(|text| text.parse().unwrap()).collect()).collect();
        self.names.answers.lock().unwrap().insert(name.to_owned(), answers);
        self
    }

    async fn open(&self, host: &str, port: u16) -> Kind {
        match policy::open(&self.shared, "connect", host, port).await {
            Ok(_) => unreachable!("nothing is connected to"),
            Err(refusal) => refusal.kind,
        }
    }

    fn dialled(&self) -> Vec<String> {
        self.dialer.dialled().iter().map(ToString::to_string).collect()
    }
}

#[tokio::test]
async fn an_allowed_name_is_dialled_at_the_address_that_was_checked_and_asked_for_once() {
    // The second answer is that of somebody who rebinds the name.
    let tried = Tried::new(&["index.test"], |_| {}).name("index.test", &[&["1.2.3.4"], &["127.0.0.1"]]);
    assert_eq!(tried.open("INDEX.test.", 443).await, Kind::NotConnected);
    assert_eq!(tried.dialled(), ["1.2.3.4:443"]);
    assert_eq!(*tried.names.asked.lock().unwrap(), ["index.test"]);
    assert_eq!(tried.open("index.test", 443).await, Kind::Address);
    assert_eq!(tried.dialled().len(), 1);
}

#[tokio::test]
async fn no_escape_gets_as_far_as_a_connection_and_each_is_written_down() {
    let tried = Tried::new(&["*.test", "*.example:*"], |settings| settings.deny = vec!["deny.test:*".parse().unwrap()])
        .name("loop.test", &[&["127.0.0.1"], &["127.0.0.1"]])
        .name("meta.test", &[&["169.254.169.254"]])
        .name("private.test", &[&["10.1.2.3"]])
        .name("mapped.test", &[&["::ffff:127.0.0.1"]])
        .name("nat64.test", &[&["64:ff9b::a00:1"]])
        .name("six.test", &[&["2002:7f00:1::"]])
        .name("mixed.test", &[&["1.2.3.4", "192.168.0.1"]])
        .name("zero.test", &[&["0.0.0.0"]])
        .name("none.test", &[&[]]);
    let escapes = [
        ("127.0.0.1", 443, Kind::NotAllowed),
        ("[::1]", 443, Kind::NotAllowed),
        ("::ffff:127.0.0.1", 443, Kind::NotAllowed),
        ("1.2.3.4", 443, Kind::NotAllowed),
        ("2130706433", 443, Kind::Malformed),
        ("0x7f.1", 443, Kind::Malformed),
        ("loop.test", 443, Kind::Address),
        ("LOOP.TEST.", 443, Kind::Address),
        ("meta.test", 80, Kind::Address),
        ("private.test", 443, Kind::Address),
        ("mapped.test", 443, Kind::Address),
        ("nat64.test", 443, Kind::Address),
        ("six.test", 443, Kind::Address),
        ("mixed.test", 443, Kind::Address),
        ("zero.test", 443, Kind::Address),
        ("none.test", 443, Kind::NotResolved),
        ("other.test", 22, Kind::NotAllowed),
        ("test", 443, Kind::NotAllowed),
        ("other.invalid", 443, Kind::NotAllowed),
        ("a.test.evil.invalid", 443, Kind::NotAllowed),
        ("deny.test", 443, Kind::Denied),
        ("bücher.test", 443, Kind::Malformed),
        ("a.test\r\nHost: evil", 443, Kind::Malformed),
        ("a.test/../", 443, Kind::Malformed),
        ("user@a.test", 443, Kind::Malformed),
        ("", 443, Kind::Malformed),
    ];
    for (host, port, kind) in escapes {
        assert_eq!(tried.open(host, port).await, kind, "{host}:{port}");
    }
    assert!(tried.dialled().is_empty());
    let log = tried.shared.log.all();
    assert_eq!(log.len(), escapes.len());
    assert!(log.iter().all(|connection| connection.verdict != "allowed" && !connection.why.is_empty() && connection.duration_ms.is_some()));
    assert!(log.iter().all(|connection| !connection.host.contains(['\r', '\n'])));
}

#[tokio::test]
async fn what_is_not_public_is_reached_only_where_the_settings_name_it_and_the_server_itself_never() {
    let own: SocketAddr = "127.0.0.1:8080".parse().unwrap();
    let tried = Tried::new(&["*:*", "10.0.0.5:5432"], |settings| {
        settings.addresses = vec!["127.0.0.0/8".parse().unwrap(), "10.0.0.5:5432".parse().unwrap()];
        settings.allow.push("10.0.0.5:5432".parse().unwrap());
        settings.own = vec![own];
    })
    .name("local.test", &[&["127.0.0.1"], &["127.0.0.1"]])
    .name("db.test", &[&["10.0.0.5"], &["10.0.0.5"]]);
    assert_eq!(tried.open("local.test", 9000).await, Kind::NotConnected);
    assert_eq!(tried.open("local.test", 8080).await, Kind::Address, "the server's own port");
    assert_eq!(tried.open("db.test", 5432).await, Kind::NotConnected);
    assert_eq!(tried.open("db.test", 5433).await, Kind::Address);
    assert_eq!(tried.open("10.0.0.5", 5432).await, Kind::NotConnected);
    assert_eq!(tried.dialled(), ["127.0.0.1:9000", "10.0.0.5:5432", "10.0.0.5:5432"]);
}

#[tokio::test]
async fn a_sandbox_of_a_server_that_allowed_more_gets_no_more_here() {
    let tried = Tried::new(&["a.test", "b.test"], |settings| settings.allow = vec!["a.test".parse().unwrap()])
        .name("a.test", &[&["1.2.3.4"]])
        .name("b.test", &[&["1.2.3.4"]]);
    assert_eq!(tried.open("b.test", 443).await, Kind::NotAllowed);
    assert_eq!(tried.open("a.test", 443).await, Kind::NotConnected);
}

#[test]
fn what_a_sandbox_may_not_ask_for_is_named() {
    let rules = |texts: &[&str]| texts.iter().map(|text| text.parse().unwrap()).collect::<Vec<Rule>>();
    let asks = |texts: &[&str]| texts.iter().map(|&text| text.to_owned()).collect::<Vec<String>>();
    let settings =
        NetworkSettings { allow: rules(&["*.example.org"]), deny: rules(&["secret.example.org:*"]), ..NetworkSettings::default() };
    assert_eq!(settings.admit(&asks(&["a.example.org", "*.b.example.org:443"])).unwrap().len(), 2);
    for (asked, named) in [
        ("example.com", "--network-allow"),
        ("*", "--network-allow"),
        ("secret.example.org", "--network-deny secret.example.org:*"),
        ("bücher.example.org", "xn--"),
        ("a.example.org:0", "port"),
    ] {
        let error = settings.admit(&asks(&["ok.example.org", asked])).unwrap_err();
        assert!(error.contains(asked) && error.contains(named), "{asked}: {error}");
    }
    assert!(NetworkSettings::default().admit(&asks(&["example.com"])).unwrap_err().contains("no network"));
    assert!(settings.admit(&vec!["a.example.org".to_owned(); MAX_RULES + 1]).is_err());
}
