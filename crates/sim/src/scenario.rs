//! What happens in one run: clients come and go, things break, and in the end everything is well again and the sandbox reachable.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use sandboxer_protocol::SandboxId;
use sandboxer_store::lease::{Faults, Terms};
use tokio::sync::oneshot;
use tokio_util::sync::CancellationToken;

use crate::{
    network::{Kept, Network, Weather},
    node::{Answer, Node},
    rng::Rng,
    truth::{Counts, Truth},
    world::{Executor, World},
};

/// No client waits longer for an answer, however often its node is stopped.
const ANSWERED_WITHIN: Duration = Duration::from_secs(300);
/// When everything works again the sandbox runs after this: the lease, five seconds, a few saves and restores that fail, and once the time
/// that a dead waiter counts.
const REACHABLE_WITHIN: Duration = Duration::from_secs(15 + 5 + 10 + 10);

/// What came of one seed.
pub struct Outcome {
    pub seed: u64,
    pub counts: Counts,
    /// What must never happen, and did.
    pub violation: Option<String>,
}

struct Scenario {
    world: Arc<World>,
    network: Arc<Network>,
    truth: Arc<Truth>,
    nodes: Vec<Arc<Node>>,
    /// From here on nothing breaks any more.
    calm: AtomicBool,
    kept: Kept,
    killed: AtomicBool,
    done: AtomicBool,
}

/// Runs one seed with the records in a directory.
#[must_use]
pub fn run(seed: u64, faults: Faults, trace: bool) -> Outcome {
    run_on(Kept::Directory, seed, faults, trace)
}

/// Runs one seed.
#[must_use]
pub fn run_on(kept: Kept, seed: u64, faults: Faults, trace: bool) -> Outcome {
    let count = 2 + (seed % 3) as usize;
    let world = World::new(seed, count, trace);
    let truth = Arc::new(Truth::new(&world));
    let network = Network::new(&world, &truth, count, kept);
    let terms = Terms { patience: Duration::from_secs(45), ..Terms::default() };
    let (failing, yields, length, clients) =
        world.random(|rng| (if rng.chance(50) { 0 } else { 10 }, rng.chance(50), rng.millis(40_000..150_000), rng.within(1..4)));
    let id = SandboxId::random();
    let nodes: Vec<_> = (0..count).map(|index| Node::new(index, id, &network, terms.clone(), faults, failing, yields)).collect();
    let scenario = Arc::new(Scenario {
        world: Arc::clone(&world),
        network,
        truth: Arc::clone(&truth),
        nodes,
        calm: AtomicBool::new(false),
        kept,
        killed: AtomicBool::new(false),
        done: AtomicBool::new(false),
    });
    let all = Arc::clone(&scenario);
    world.spawn(None, Box::pin(async move { all.play(length, clients).await }));
    let until = length + ANSWERED_WITHIN * 3;
    Executor::default().run(&world, until, || scenario.done.load(Ordering::Relaxed));
    if !scenario.done.load(Ordering::Relaxed) {
        world.violated("it never came to an end");
    }
    Outcome { seed, counts: truth.counts(), violation: world.violation() }
}

impl Scenario {
    async fn play(self: Arc<Self>, length: Duration, clients: u64) {
        for node in &self.nodes {
            node.start();
        }
        let (sender, made) = oneshot::channel();
        let node = Arc::clone(&self.nodes[0]);
        self.world.spawn(
            Some(0),
            Box::pin(async move {
                let _ = sender.send(node.create().await);
            }),
        );
        if !matches!(made.await, Ok(Ok(()))) {
            self.world.violated("a sandbox can't be created on a good day");
        }
        let (left, mut gone) = tokio::sync::mpsc::channel::<()>(1);
        for _ in 0..clients {
            let (all, left) = (Arc::clone(&self), left.clone());
            let client = async move {
                all.client().await;
                drop(left);
            };
            self.world.spawn(None, Box::pin(client));
        }
        drop(left);
        self.trouble(length).await;
        self.heal();
        // Those who are still waiting are answered.
        let _ = gone.recv().await;
        self.reach().await;
        self.done.store(true, Ordering::Relaxed);
    }

    /// Breaks things until `length` is over.
    async fn trouble(&self, length: Duration) {
        while self.world.now() < length {
            self.world.sleep(self.world.random(|rng| rng.millis(200..12_000))).await;
            let (what, victim) = self.world.random(|rng| (rng.within(0..100), rng.index(self.nodes.len())));
            match what {
                0..18 => self.crash(victim).await,
                18..32 => {
                    let length = self.world.random(|rng| rng.millis(500..30_000));
                    self.world.note(|| format!("{victim}: stops for {length:?}"));
                    self.world.stall(victim, length);
                }
                32..42 => {
                    let length = self.world.random(|rng| rng.millis(500..40_000));
                    self.cut(victim, length);
                }
                42..50 => self.flap(victim).await,
                50..66 => self.network.begin_move(victim),
                66..75 => {
                    let jump = self.world.random(|rng| rng.within(0..7_200_000) as i64 - 3_600_000);
                    self.nodes[victim].clock.jump(jump);
                }
                _ => {
                    let mut weather = self.world.random(weather);
                    if self.kept == Kept::Bucket {
                        // Now and then nothing gets through.
                        let throttled = [0, 0, 0, 20, 60, 100];
                        weather.throttled = self.world.random(|rng| throttled[rng.index(throttled.len())]);
                    }
                    self.world.note(|| format!("{weather:?}"));
                    self.network.set_weather(weather);
                }
            }
        }
    }

    async fn crash(&self, victim: usize) {
        if self.world.is_dead(victim) {
            return;
        }
        let (polls, with_sandbox, back) = self.world.random(|rng| (rng.within(1..60) as u32, rng.chance(50), rng.millis(50..30_000)));
        self.world.doom(victim, polls);
        while !self.world.is_dead(victim) {
            self.world.sleep(Duration::from_millis(20)).await;
        }
        self.truth.count(|counts| counts.crashes += 1);
        self.world.note(|| format!("{victim}: dies{}", if with_sandbox { ", and its sandbox with it" } else { "" }));
        self.nodes[victim].died(with_sandbox);
        let node = Arc::clone(&self.nodes[victim]);
        self.world.after(
            back,
            Box::new(move |world| {
                if world.is_dead(node.index) {
                    node.start()
                }
            }),
        );
    }

    /// Cut off again and again, with moments in which some of it gets through.
    async fn flap(&self, victim: usize) {
        for _ in 0..self.world.random(|rng| rng.within(2..6)) {
            let (length, open) = self.world.random(|rng| (rng.millis(1000..12_000), rng.millis(5..1500)));
            self.cut(victim, length);
            self.world.sleep(length + open).await;
        }
    }

    fn cut(&self, victim: usize, length: Duration) {
        self.world.note(|| format!("{victim}: cut off for {length:?}"));
        self.network.partition(victim, true);
        let network = Arc::clone(&self.network);
        self.world.after(length, Box::new(move |_| network.partition(victim, false)));
    }

    fn heal(&self) {
        self.world.note(|| "everything works again".to_owned());
        self.calm.store(true, Ordering::Relaxed);
        self.network.calm_down();
        for node in &self.nodes {
            if self.world.is_dead(node.index) {
                node.start();
            } else {
                self.world.end_stall(node.index);
            }
        }
    }

    /// Attaches, works, saves and leaves, again and again.
    async fn client(&self) {
        while !self.calm.load(Ordering::Relaxed) && !self.killed.load(Ordering::Relaxed) {
            self.world.sleep(self.world.random(|rng| rng.millis(50..6000))).await;
            let (node, gives_up) = self.world.random(|rng| (rng.index(self.nodes.len()), rng.chance(15).then(|| rng.millis(10..10_000))));
            if self.world.is_dead(node) {
                continue;
            }
            if let Some(Answer::Running) = self.attach(node, gives_up).await {
                self.work(node).await;
            }
        }
    }

    /// The answer, or none if the connection was cut.
    async fn attach(&self, node: usize, gives_up: Option<Duration>) -> Option<Answer> {
        let (sender, answer) = oneshot::channel();
        let (server, give_up) = (Arc::clone(&self.nodes[node]), CancellationToken::new());
        let given_up = give_up.clone();
        self.world.spawn(
            Some(node),
            Box::pin(async move {
                let _ = sender.send(server.attach(&give_up).await);
            }),
        );
        if let Some(after) = gives_up {
            self.world.after(after, Box::new(move |_| given_up.cancel()));
        }
        let answer = tokio::select! {
            biased;
            answer = answer => answer.ok(),
            () = self.world.sleep(ANSWERED_WITHIN) => {
                self.world.violated(format!("a client of node {node} never got an answer"));
                None
            }
        };
        self.world.note(|| format!("{node}: a client hears {answer:?}"));
        self.truth.count(|counts| match answer {
            Some(Answer::Running) => counts.running += 1,
            Some(Answer::InUse) => counts.in_use += 1,
            Some(Answer::HandoffInProgress) => counts.in_progress += 1,
            Some(Answer::CannotSave) => counts.cannot_save += 1,
            _ => counts.other_answers += 1,
        });
        answer
    }

    async fn work(&self, node: usize) {
        self.world.sleep(self.world.random(|rng| rng.millis(10..8000))).await;
        let Some((host, keeper)) = self.nodes[node].keeper() else { return };
        let what = self.world.random(|rng| rng.within(0..100));
        // A client whose server dies hears nothing: the reply is gone with it.
        let saved = match what {
            0..30 => keeper.save().await.ok(),
            30..45 => keeper.checkpoint().await.ok(),
            45..46 => {
                self.killed.store(true, Ordering::Relaxed);
                let _ = keeper.kill("as asked for".to_owned()).await;
                None
            }
            _ => None,
        };
        if let Some(name) = saved {
            self.world.note(|| format!("{node}: a client hears that {name} counts"));
            self.truth.acknowledged(name);
        }
        host.detach_client();
    }

    /// Somebody must get it now.
    async fn reach(&self) {
        let until = self.world.now() + REACHABLE_WITHIN;
        while self.world.now() < until {
            let node = self.world.random(|rng| rng.index(self.nodes.len()));
            match self.attach(node, None).await {
                Some(Answer::Running) if self.runs().await => return,
                Some(Answer::Gone) if self.killed.load(Ordering::Relaxed) => return,
                Some(Answer::NeverSaved) if !self.truth.anything_acknowledged() => return,
                _ => self.world.sleep(Duration::from_millis(500)).await,
            }
        }
        self.world.violated("everything works, and the sandbox can't be reached");
    }
}

impl Scenario {
    /// Whether what is said to run does. It may have been handed over at once, to one who has waited for it and is gone.
    async fn runs(&self) -> bool {
        let before = self.truth.counts().acts;
        self.world.sleep(Duration::from_secs(3)).await;
        self.truth.counts().acts > before
    }
}

fn weather(rng: &mut Rng) -> Weather {
    if rng.chance(30) {
        return Weather::default();
    }
    let mut part = |most: u64| if rng.chance(60) { rng.within(0..most) } else { 0 };
    Weather { lost: part(30), repeated: part(30), refused: part(20), slow: part(50), very_slow: part(15), throttled: 0 }
}
