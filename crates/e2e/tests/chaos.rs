//! Instances die and stand still at random under living sandboxes, and an observer outside watches that no two of them serve the same one.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use std::{
    collections::{BTreeMap, HashMap},
    net::SocketAddr,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use futures_util::future::join_all;
use rand::{RngExt, SeedableRng, rngs::StdRng};
use sandboxer_e2e::{DEADLINE, Incoming, Server, Volume, Ws, count, http, seed, sha256, soak};
use serde_json::{Value, json};
use tokio::{sync::watch, time::timeout};

const INSTANCES: usize = 3;
/// How long a client may think between two visits: with twenty of them the machine should have something else to do than to move them.
const THINKING_MS: u64 = 5000;
/// How long one step of a client may take before it takes its instance for dead.
const STEP: Duration = Duration::from_secs(6);
/// What everything may take beyond the lease; where only liveness is meant, much longer.
const BEYOND: Duration = Duration::from_secs(5);
const BEYOND_BESIDE_OTHER_TESTS: Duration = Duration::from_secs(60);
/// After so many faults there is none for as long as everything may take to be reachable again.
const QUIET_AFTER: usize = 20;

fn lease() -> Duration {
    Duration::from_secs(if soak() { 15 } else { 6 })
}

fn bound() -> Duration {
    lease() + if soak() { BEYOND } else { BEYOND_BESIDE_OTHER_TESTS }
}

/// Where each instance is now.
type Addresses = Arc<Instances>;

struct Instances {
    /// None while it is dead.
    at: Mutex<Vec<Option<SocketAddr>>>,
    /// Which of them stand still.
    halted: Mutex<[bool; INSTANCES]>,
    /// When something last happened to any of them.
    changed: Mutex<Instant>,
}

impl Instances {
    fn get(&self, number: usize) -> Option<SocketAddr> {
        self.at.lock().unwrap()[number]
    }

    fn set(&self, number: usize, address: Option<SocketAddr>) {
        self.at.lock().unwrap()[number] = address;
        self.note();
    }

    fn set_halted(&self, number: usize, halted: bool) {
        self.halted.lock().unwrap()[number] = halted;
        self.note();
    }

    fn is_halted(&self, number: usize) -> bool {
        self.halted.lock().unwrap()[number]
    }

    fn note(&self) {
        *self.changed.lock().unwrap() = Instant::now();
    }

    fn changed(&self) -> Instant {
        *self.changed.lock().unwrap()
    }
}

/// Samples what every instance says it serves.
struct Observer {
    addresses: Addresses,
    /// Who was seen to serve a sandbox in an epoch.
    served: Mutex<BTreeMap<(String, u64), String>>,
    /// The highest epoch in which a sandbox was seen to be served.
    newest: Mutex<HashMap<String, u64>>,
    samples: AtomicUsize,
    done: AtomicBool,
}

impl Observer {
    fn watch(self: &Arc<Self>, number: usize) -> tokio::task::JoinHandle<()> {
        let observer = Arc::clone(self);
        tokio::task::spawn_blocking(move || {
            while !observer.done.load(Ordering::SeqCst) {
                let address = observer.addresses.get(number);
                // What was seen before the question was put can't be undone by its answer.
                let before = observer.newest.lock().unwrap().clone();
                let answer = address.and_then(|address| http::try_get(address, "/v1/instance", &[]).ok());
                if let Some(answer) = answer.filter(|answer| answer.status == 200) {
                    observer.saw(&answer.json(), &before);
                }
                std::thread::sleep(Duration::from_millis(50));
            }
        })
    }

    fn saw(&self, view: &Value, before: &HashMap<String, u64>) {
        self.samples.fetch_add(1, Ordering::SeqCst);
        let instance = view["instance"].as_str().unwrap();
        for seen in view["sandboxes"].as_array().unwrap().iter().filter(|seen| seen["serving"] == true) {
            let (id, epoch) = (seen["id_sha256"].as_str().unwrap(), seen["epoch"].as_u64().unwrap());
            let mut served = self.served.lock().unwrap();
            let first = served.entry((id.to_owned(), epoch)).or_insert_with(|| instance.to_owned());
            assert_eq!(first, instance, "two instances serve {id} in epoch {epoch}");
            drop(served);
            let known = before.get(id).copied().unwrap_or(0);
            assert!(epoch >= known, "{instance} serves {id} in epoch {epoch}, after it was served in {known}");
            let mut newest = self.newest.lock().unwrap();
            let newest = newest.entry(id.to_owned()).or_default();
            *newest = epoch.max(*newest);
        }
    }
}

/// Ends the watching also when the test fails.
struct Watching(Arc<Observer>);

impl Drop for Watching {
    fn drop(&mut self) {
        self.0.done.store(true, Ordering::SeqCst);
    }
}

/// A client that counts in a file, saves now and then, and knows what it may expect to find.
struct User {
    id: String,
    random: StdRng,
    addresses: Addresses,
    volume: Arc<Volume>,
    /// What the file says in the newest checkpoint that was acknowledged, and what was written last.
    saved: u64,
    written: u64,
    /// A write whose answer was lost.
    unsure: bool,
    /// The instance that it was at.
    at: usize,
    /// A process that runs since the beginning.
    process: String,
    rewinds: usize,
    checkpoints: usize,
    longest: Duration,
}

enum Broken {
    /// The connection, or the instance.
    Connection,
    /// The sandbox can't be had at the moment, or not there.
    NotNow,
}

impl User {
    async fn start(server: &Server, volume: &Arc<Volume>, addresses: &Addresses, number: u64) -> Self {
        let mut ws = Ws::create_with(server, json!({"enable_checkpoint": true, "idle_timeout": 0})).await;
        let process = ws.bash("echo 0 > n; sleep 100000 & echo $!").await.ok().trim().to_owned();
        let mut user = Self {
            id: ws.sandbox_id.clone(),
            random: StdRng::seed_from_u64(seed().wrapping_add(number)),
            addresses: Arc::clone(addresses),
            volume: Arc::clone(volume),
            saved: 0,
            written: 0,
            unsure: false,
            at: usize::try_from(number).unwrap() % INSTANCES,
            process,
            rewinds: 0,
            checkpoints: 0,
            longest: Duration::ZERO,
        };
        // From here on there is something to come back to.
        assert!(user.checkpoint(ws).await.is_ok(), "the first checkpoint");
        user
    }

    /// Attaches, looks, counts, saves or not, until `over`.
    async fn live(&mut self, mut over: watch::Receiver<bool>) {
        while !*over.borrow_and_update() {
            let ws = self.reach().await;
            // What breaks is tried again by the next round.
            let _ = self.use_it(ws).await;
            tokio::time::sleep(Duration::from_millis(self.random.random_range(0..THINKING_MS))).await;
        }
    }

    /// Attaches at any instance that answers. What counts is the time for which one that lives was asked and nothing new went wrong.
    async fn reach(&mut self) -> Ws {
        let mut asked = Instant::now();
        // Most come back to where they were.
        let mut at = if self.random.random_range(0..4) == 0 { self.random.random_range(0..INSTANCES) } else { self.at };
        loop {
            let attached = match self.addresses.get(at) {
                Some(address) => self.attach(address, at).await,
                None => Err(Broken::Connection),
            };
            let took = asked.max(self.addresses.changed()).elapsed();
            match attached {
                Ok(ws) => {
                    assert!(took < bound(), "{} was reachable only after {took:?}", self.id);
                    self.longest = self.longest.max(took);
                    self.at = at;
                    return ws;
                }
                Err(Broken::NotNow) => assert!(took < bound(), "{} was not reachable within {:?}", self.id, bound()),
                Err(Broken::Connection) => {
                    at = (at + 1) % INSTANCES;
                    asked = Instant::now();
                }
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    }

    async fn attach(&mut self, address: SocketAddr, at: usize) -> Result<Ws, Broken> {
        let path = format!("/attach/{}", self.id);
        let mut ws =
            timeout(STEP, Ws::connect(address, &path, &[])).await.map_err(|_| Broken::Connection)?.map_err(|_| Broken::Connection)?;
        ws.repeats_allowed = true;
        self.id.clone_into(&mut ws.sandbox_id);
        let mut restoring = None;
        loop {
            match ws.incoming_within(STEP).await {
                // The instance lives and has to wait for another one.
                Some(Incoming::Message(message)) if message["status"] == "SANDBOX_RESTORING" => restoring = Some(Instant::now()),
                Some(Incoming::Message(message)) if message["status"] == "SANDBOX_RUNNING" => {
                    if message["rewound"] == true {
                        self.rewinds += 1;
                    }
                    return Ok(ws);
                }
                Some(Incoming::Message(message)) => {
                    let status = message["status"].as_str().unwrap_or_default();
                    assert!(
                        matches!(status, "SANDBOX_IN_USE" | "SANDBOX_HANDOFF_IN_PROGRESS" | "SANDBOX_RESTORE_ERROR")
                            || message["event"] == "error",
                        "{message}"
                    );
                    return Err(Broken::NotNow);
                }
                Some(Incoming::Closed(_) | Incoming::Dropped) => return Err(Broken::Connection),
                // One that does not even answer pings, as a client would find out, is left.
                None if restoring.is_none() || self.addresses.is_halted(at) => return Err(Broken::Connection),
                None if restoring.is_some_and(|since| since.elapsed() >= bound()) => return Err(Broken::NotNow),
                None => {}
            }
        }
    }

    async fn use_it(&mut self, mut ws: Ws) -> Result<(), Broken> {
        let process = self.process.clone();
        let found: u64 = self.bash(&mut ws, &format!("kill -0 {process} && cat n")).await?.trim().parse().unwrap();
        let newest = self.written + u64::from(self.unsure);
        assert!((self.saved..=newest).contains(&found), "{}: found {found}, saved {}, written {newest}", self.id, self.saved);
        (self.written, self.unsure) = (found, false);
        for _ in 0..self.random.random_range(1..4) {
            self.unsure = true;
            self.bash(&mut ws, &format!("echo {} > n", self.written + 1)).await?;
            (self.written, self.unsure) = (self.written + 1, false);
            tokio::time::sleep(Duration::from_millis(self.random.random_range(0..300))).await;
        }
        match self.random.random_range(0..3) {
            0 => self.checkpoint(ws).await,
            1 => self.leave_and_see_it_saved(ws).await,
            _ => {
                ws.vanish();
                Ok(())
            }
        }
    }

    /// Asks for a checkpoint. What is acknowledged has to be there from now on.
    async fn checkpoint(&mut self, mut ws: Ws) -> Result<(), Broken> {
        let written = self.written;
        ws.try_send(json!({"action": "checkpoint"}).to_string().into()).await.map_err(|_| Broken::Connection)?;
        loop {
            match ws.incoming_within(DEADLINE).await {
                Some(Incoming::Message(message)) if message["status"] == "SANDBOX_CHECKPOINTED" => {
                    self.saved = written;
                    self.checkpoints += 1;
                    return Ok(());
                }
                Some(Incoming::Message(_)) => {}
                _ => return Err(Broken::Connection),
            }
        }
    }

    /// Goes away and waits for a while until the sandbox is saved in the background, as it is where it runs.
    async fn leave_and_see_it_saved(&mut self, ws: Ws) -> Result<(), Broken> {
        let written_at = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_millis();
        let written = self.written;
        ws.close().await;
        for _ in 0..self.random.random_range(0..40) {
            tokio::time::sleep(Duration::from_millis(50)).await;
            let record = self.volume.record(&self.id);
            // A checkpoint is named when it has been captured, and only this client writes.
            let name = record["latest"].as_str().unwrap();
            let saved_at: u128 = name.trim_start_matches("checkpoint_").trim_end_matches(".img").parse().unwrap();
            if saved_at > written_at {
                self.saved = written;
                self.checkpoints += 1;
                break;
            }
        }
        Ok(())
    }

    async fn bash(&mut self, ws: &mut Ws, code: &str) -> Result<String, Broken> {
        let request = json!({"language": "bash", "code": code, "execution_id": uuid::Uuid::new_v4().to_string()});
        let id = request["execution_id"].clone();
        ws.try_send(request.to_string().into()).await.map_err(|_| Broken::Connection)?;
        let mut output = String::new();
        loop {
            match ws.incoming_within(STEP).await {
                // The one before, whose answer was lost, may still run.
                Some(Incoming::Message(message)) if message["event"] == "error" => return Err(Broken::NotNow),
                Some(Incoming::Message(message)) if message["execution_id"] != id => {}
                Some(Incoming::Message(message)) if message["event"] == "stdout" => output += message["data"].as_str().unwrap(),
                Some(Incoming::Message(message)) if message["status"] == "SANDBOX_EXECUTION_DONE" => {
                    assert_eq!(message["exit_code"], 0, "{code}: {message}");
                    return Ok(output);
                }
                Some(Incoming::Message(_)) => {}
                _ => return Err(Broken::Connection),
            }
        }
    }
}

/// One instance at a time is hurt; now and then the next one is before the last is well again.
async fn hurt(mut servers: Vec<Server>, addresses: Addresses, faults: usize) -> (Vec<Server>, [usize; 3]) {
    let mut random = StdRng::seed_from_u64(seed());
    let mut done = [0; 3];
    for fault in 1..=faults {
        let at = random.random_range(0..servers.len());
        let kind = random.random_range(0..3);
        done[kind] += 1;
        let long = random.random_range(0..5) == 0;
        let pause = if long { lease().mul_f64(random.random_range(0.8..1.6)) } else { Duration::from_millis(random.random_range(0..3000)) };
        if kind == 0 {
            servers[at].halt();
            addresses.set_halted(at, true);
            tokio::time::sleep(pause).await;
            servers[at].go_on();
            addresses.set_halted(at, false);
        } else {
            addresses.set(at, None);
            if kind == 1 {
                servers[at].kill9()
            } else {
                servers[at].burn_down()
            }
            tokio::time::sleep(pause).await;
            let mut server = servers.swap_remove(at);
            let (server, address) = tokio::task::spawn_blocking(move || {
                server.restart();
                let address = server.address();
                (server, address)
            })
            .await
            .unwrap();
            servers.push(server);
            let last = servers.len() - 1;
            servers.swap(at, last);
            addresses.set(at, Some(address));
        }
        if fault % QUIET_AFTER == 0 {
            println!("{fault} of {faults} faults");
            tokio::time::sleep(lease() + BEYOND).await;
        }
        tokio::time::sleep(Duration::from_millis(random.random_range(0..1500))).await;
    }
    (servers, done)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn instances_that_die_and_stand_still_never_serve_a_sandbox_twice_nor_lose_what_was_acknowledged() {
    let volume = Arc::new(Volume::default());
    // When the test is over nothing has to be saved.
    let options = volume.options().arg("--lease").arg(lease().as_secs().to_string()).arg("--stop-grace").arg("0.2");
    let servers: Vec<Server> = (0..INSTANCES).map(|_| options.clone().start()).collect();
    let at = Mutex::new(servers.iter().map(|server| Some(server.address())).collect());
    let addresses: Addresses = Arc::new(Instances { at, halted: Mutex::default(), changed: Mutex::new(Instant::now()) });
    let sandboxes = count(5, 20);
    let mut users = Vec::new();
    for number in 0..sandboxes {
        users.push(User::start(&servers[number % INSTANCES], &volume, &addresses, number as u64).await);
    }
    let observer = Arc::new(Observer {
        addresses: Arc::clone(&addresses),
        served: Mutex::default(),
        newest: Mutex::default(),
        samples: AtomicUsize::new(0),
        done: AtomicBool::new(false),
    });
    let watched = Watching(Arc::clone(&observer));
    let watching: Vec<_> = (0..INSTANCES).map(|number| observer.watch(number)).collect();
    let (over, until) = watch::channel(false);
    let faults = std::env::var("SANDBOXER_FAULTS").ok().and_then(|text| text.parse().ok()).unwrap_or_else(|| count(10, 300));
    let living = users.iter_mut().map(|user| user.live(until.clone()));
    let hurting = async {
        let hurt = hurt(servers, Arc::clone(&addresses), faults).await;
        over.send_replace(true);
        hurt
    };
    let (_, (servers, done)) = tokio::join!(join_all(living), hurting);
    // Once more, with nothing in its way.
    join_all(users.iter_mut().map(async |user| {
        let begun = Instant::now();
        loop {
            let ws = user.reach().await;
            if user.use_it(ws).await.is_ok() {
                break;
            }
            assert!(begun.elapsed() < bound(), "{} is well again", user.id);
        }
    }))
    .await;
    drop(watched);
    for watching in watching {
        watching.await.expect("the observer has seen nothing wrong");
    }
    let served = observer.served.lock().unwrap();
    for user in &users {
        assert!(served.keys().any(|(id, _)| *id == sha256(user.id.as_bytes())), "the observer has seen {}", user.id);
    }
    let sum = |of: fn(&User) -> usize| users.iter().map(of).sum::<usize>();
    println!(
        "{faults} faults ({} stops, {} kills, {} machines lost) under {sandboxes} sandboxes, lease {:?}: {} epochs served, {} samples, {} checkpoints \
         acknowledged, {} rewinds, longest until reachable {:.1} s",
        done[0],
        done[1],
        done[2],
        lease(),
        served.len(),
        observer.samples.load(Ordering::SeqCst),
        sum(|user| user.checkpoints),
        sum(|user| user.rewinds),
        users.iter().map(|user| user.longest).max().unwrap().as_secs_f64(),
    );
    drop(servers);
}
