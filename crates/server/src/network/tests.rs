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
        let egress = Egress::new(&Arc::new(settings), &AllPlaces::new(4096), &rules, Log::open(dir.path())).unwrap();
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
        let said = error.to_string();
        assert!(said.contains(asked) && said.contains(named), "{asked}: {error}");
    }
    assert!(NetworkSettings::default().admit(&asks(&["example.com"])).unwrap_err().to_string().contains("no network"));
    assert!(settings.admit(&vec!["a.example.org".to_owned(); MAX_RULES + 1]).is_err());
}

#[tokio::test]
async fn of_a_name_with_many_addresses_a_few_are_tried() {
    let addresses: Vec<String> = (1..=20).map(|last| format!("1.2.3.{last}")).collect();
    let addresses: Vec<&str> = addresses.iter().map(String::as_str).collect();
    let tried = Tried::new(&["many.test"], |_| {}).name("many.test", &[&addresses]);
    assert_eq!(tried.open("many.test", 443).await, Kind::NotConnected);
    assert_eq!(tried.dialled().len(), 8);
}

#[tokio::test]
async fn what_a_program_says_is_written_down_without_what_would_change_how_it_is_shown() {
    let tried = Tried::new(&["a.test"], |_| {});
    assert_eq!(tried.open("\u{202e}evil\u{1b}[2J\r\n\u{2028}.test", 443).await, Kind::Malformed);
    let log = tried.shared.log.all();
    assert_eq!(log[0].host, "evil[2J.test");
    assert!(log[0].why.chars().all(|c| !c.is_control() && !matches!(c, '\u{2028}' | '\u{202e}')), "{}", log[0].why);
}

/// As many as are answered at once.
const AT_ONCE: usize = 100;

#[tokio::test(start_paused = true)]
async fn who_is_refused_again_and_again_waits_for_it() {
    let tried = Tried::new(&["*.test"], |_| {}).name("good.test", &[&["1.2.3.4"], &["1.2.3.4"]]);
    let began = tokio::time::Instant::now();
    for _ in 0..AT_ONCE + 50 {
        assert_eq!(tried.open("evil.invalid", 443).await, Kind::NotAllowed);
    }
    let took = began.elapsed().as_secs_f64();
    assert!((4.5..=5.5).contains(&took), "{took}");
    // What may be reached does not wait for it.
    let began = tokio::time::Instant::now();
    assert_eq!(tried.open("good.test", 443).await, Kind::NotConnected);
    assert_eq!(began.elapsed().as_millis(), 0);
    // What comes to nothing after work for others waits before the next.
    for number in 0..AT_ONCE + 50 {
        assert_eq!(tried.open(&format!("n{number}.test"), 443).await, Kind::NotResolved);
    }
    let took = began.elapsed().as_secs_f64();
    assert!((4.5..=5.5).contains(&took), "{took}");
    assert_eq!(tried.names.asked.lock().unwrap().len(), AT_ONCE + 50 + 1);
    assert_eq!(tried.shared.log.all().len(), 2 * (AT_ONCE + 50) + 1, "each is written down");
}

#[tokio::test(start_paused = true)]
async fn who_does_not_wait_for_refusals_is_counted_and_fills_no_log() {
    let tried = Tried::new(&["a.test"], |_| {});
    for _ in 0..AT_ONCE + 900 {
        tokio::select! {
            biased;
            _ = policy::open(&tried.shared, "connect", "evil.invalid", 443) => {}
            () = std::future::ready(()) => {}
        }
    }
    assert_eq!(tried.shared.log.all().len(), AT_ONCE);
    // What was answered with its end already.
    policy::was_refused(&tried.shared, "http", &policy::Refusal::new(Kind::Malformed, "this is no request"));
    assert_eq!(tried.shared.log.all().len(), AT_ONCE);
    assert_eq!(tried.open("evil.invalid", 443).await, Kind::NotAllowed);
    let log = tried.shared.log.all();
    assert_eq!(log.len(), AT_ONCE + 1);
    assert!(log[AT_ONCE].why.contains("901 more were refused"), "{}", log[AT_ONCE].why);
}

/// Resolves every name to one address, and never gets an answer from there.
#[derive(Debug)]
struct Silent;

impl Dialer for Silent {
    fn resolve<'a>(&'a self, _: &'a str, _turn: OwnedSemaphorePermit) -> BoxFuture<'a, io::Result<Vec<IpAddr>>> {
        Box::pin(async { Ok(vec!["1.2.3.4".parse().unwrap()]) })
    }

    fn connect(&self, _: SocketAddr) -> BoxFuture<'_, io::Result<TcpStream>> {
        Box::pin(std::future::pending())
    }
}

#[tokio::test(start_paused = true)]
async fn who_goes_before_it_is_connected_is_written_down_and_held_back() {
    let tried = Tried::new(&["*.test"], |settings| settings.dialer = Arc::new(Silent));
    let try_and_go = async || {
        let open = policy::open(&tried.shared, "connect", "slow.test", 443);
        assert!(tokio::time::timeout(std::time::Duration::from_millis(1), open).await.is_err());
    };
    for _ in 0..AT_ONCE + 200 {
        try_and_go().await;
    }
    let log = tried.shared.log.all();
    assert_eq!((log[0].verdict.as_str(), log[0].address.as_deref()), ("given_up", Some("1.2.3.4")));
    assert!((AT_ONCE..AT_ONCE + 10).contains(&log.len()), "{} were dialled", log.len());
    // What they held is free again.
    let held: Vec<_> = (0..tried.shared.settings.connections).map_while(|_| tried.shared.places.take().ok()).collect();
    assert_eq!(held.len(), tried.shared.settings.connections);
}
