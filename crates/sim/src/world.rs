//! Virtual time, and an executor that a seed drives: which task goes on next, when a node stops, and at which await it dies.

use std::{
    cmp::Reverse,
    collections::{BTreeSet, BinaryHeap},
    future::Future,
    pin::Pin,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    task::{Context, Poll, Wake, Waker},
    time::Duration,
};

use crate::rng::Rng;

pub(crate) type Task = Pin<Box<dyn Future<Output = ()> + Send>>;
pub(crate) type Call = Box<dyn FnOnce(&Arc<World>) + Send>;

/// Everything that the tasks of one run share. Never locked while a task is polled or dropped.
pub(crate) struct World {
    state: Mutex<State>,
    ready: Arc<Ready>,
    trace: bool,
}

struct State {
    now: Duration,
    rng: Rng,
    timers: BinaryHeap<Reverse<Timer>>,
    order: u64,
    spawned: Vec<(Option<usize>, Task)>,
    nodes: Vec<Node>,
    violation: Option<String>,
}

/// A machine, as far as the executor knows it.
#[derive(Debug, Default, Clone)]
struct Node {
    dead: bool,
    stalled_until: Duration,
    /// Tasks that would go on if the node were not stalled.
    parked: Vec<usize>,
    /// It dies when its tasks have been polled this often.
    dies_in: Option<u32>,
}

enum What {
    Wake(Waker),
    Call(Call),
}

struct Timer {
    at: Duration,
    order: u64,
    what: What,
}

impl PartialEq for Timer {
    fn eq(&self, other: &Self) -> bool {
        (self.at, self.order) == (other.at, other.order)
    }
}

impl Eq for Timer {}

impl PartialOrd for Timer {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Timer {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        (self.at, self.order).cmp(&(other.at, other.order))
    }
}

/// The tasks that can go on. A set: in which order tasks are woken at one moment is not for a library to decide.
#[derive(Default)]
struct Ready(Mutex<BTreeSet<usize>>);

struct TaskWaker {
    id: usize,
    ready: Arc<Ready>,
}

impl Wake for TaskWaker {
    fn wake(self: Arc<Self>) {
        lock(&self.ready.0).insert(self.id);
    }
}

struct Slot {
    node: Option<usize>,
    task: Task,
    waker: Arc<TaskWaker>,
}

/// The tasks of one run.
#[derive(Default)]
pub(crate) struct Executor {
    slots: Vec<Option<Slot>>,
}

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl World {
    pub(crate) fn new(seed: u64, nodes: usize, trace: bool) -> Arc<Self> {
        let state = State {
            now: Duration::ZERO,
            rng: Rng::new(seed),
            timers: BinaryHeap::new(),
            order: 0,
            spawned: Vec::new(),
            nodes: vec![Node::default(); nodes],
            violation: None,
        };
        Arc::new(Self { state: Mutex::new(state), ready: Arc::default(), trace })
    }

    pub(crate) fn now(&self) -> Duration {
        lock(&self.state).now
    }

    pub(crate) fn random<T>(&self, draw: impl FnOnce(&mut Rng) -> T) -> T {
        draw(&mut lock(&self.state).rng)
    }

    pub(crate) fn note(&self, text: impl FnOnce() -> String) {
        if self.trace {
            println!("{:10.4} {}", self.now().as_secs_f64(), text());
        }
    }

    /// Something that must never happen has. The first one counts.
    pub(crate) fn violated(&self, what: impl Into<String>) {
        let what = what.into();
        self.note(|| format!("VIOLATED: {what}"));
        let mut state = lock(&self.state);
        let at = state.now;
        state.violation.get_or_insert_with(|| format!("{what} (at {:.3} s)", at.as_secs_f64()));
    }

    pub(crate) fn violation(&self) -> Option<String> {
        lock(&self.state).violation.clone()
    }

    /// Runs a task on a node, or outside of all.
    pub(crate) fn spawn(&self, node: Option<usize>, task: Task) {
        lock(&self.state).spawned.push((node, task));
    }

    pub(crate) fn after(&self, length: Duration, call: Call) {
        let mut state = lock(&self.state);
        let at = state.now + length;
        state.add_timer(at, What::Call(call));
    }

    pub(crate) fn sleep(self: &Arc<Self>, length: Duration) -> Sleep {
        self.sleep_until(self.now() + length)
    }

    pub(crate) fn sleep_until(self: &Arc<Self>, at: Duration) -> Sleep {
        Sleep { world: Arc::clone(self), at, armed: None }
    }

    pub(crate) fn is_dead(&self, node: usize) -> bool {
        lock(&self.state).nodes[node].dead
    }

    pub(crate) fn stall(&self, node: usize, length: Duration) {
        let mut state = lock(&self.state);
        let until = state.now + length;
        state.nodes[node].stalled_until = until;
        state.add_timer(until, What::Call(Box::new(move |world: &Arc<Self>| world.unpark(node))));
    }

    pub(crate) fn end_stall(&self, node: usize) {
        lock(&self.state).nodes[node].stalled_until = Duration::ZERO;
        self.unpark(node);
    }

    fn unpark(&self, node: usize) {
        let mut state = lock(&self.state);
        if state.now >= state.nodes[node].stalled_until {
            lock(&self.ready.0).extend(state.nodes[node].parked.drain(..));
        }
    }

    /// The node dies when its tasks have been polled `polls` times more: at whatever await they are then.
    pub(crate) fn doom(&self, node: usize, polls: u32) {
        lock(&self.state).nodes[node].dies_in = Some(polls);
    }

    pub(crate) fn revive(&self, node: usize) {
        lock(&self.state).nodes[node] = Node::default();
    }
}

impl State {
    fn add_timer(&mut self, at: Duration, what: What) {
        self.order += 1;
        let order = self.order;
        self.timers.push(Reverse(Timer { at, order, what }));
    }
}

impl Executor {
    /// Goes on until `done`, a violation, or `until`.
    pub(crate) fn run(&mut self, world: &Arc<World>, until: Duration, done: impl Fn() -> bool) {
        while world.violation().is_none() && !done() && world.now() < until {
            self.adopt(world);
            let next = {
                let mut ready = lock(&world.ready.0);
                let chosen = if ready.is_empty() { None } else { ready.iter().nth(world.random(|rng| rng.index(ready.len()))).copied() };
                if let Some(chosen) = chosen {
                    ready.remove(&chosen);
                }
                chosen
            };
            match next {
                Some(id) => self.poll(world, id),
                None => {
                    if !fire_next(world) {
                        return;
                    }
                }
            }
        }
    }

    fn adopt(&mut self, world: &Arc<World>) {
        let spawned = std::mem::take(&mut lock(&world.state).spawned);
        for (node, task) in spawned {
            let id = self.slots.iter().position(Option::is_none).unwrap_or(self.slots.len());
            let waker = Arc::new(TaskWaker { id, ready: Arc::clone(&world.ready) });
            let slot = Some(Slot { node, task, waker });
            if id == self.slots.len() {
                self.slots.push(slot);
            } else {
                self.slots[id] = slot;
            }
            lock(&world.ready.0).insert(id);
        }
    }

    fn poll(&mut self, world: &Arc<World>, id: usize) {
        let Some(slot) = &mut self.slots[id] else { return };
        if let Some(node) = slot.node {
            let mut state = lock(&world.state);
            if state.nodes[node].dead {
                drop(state);
                self.slots[id] = None;
                return;
            }
            if state.now < state.nodes[node].stalled_until {
                state.nodes[node].parked.push(id);
                return;
            }
        }
        let waker = Waker::from(Arc::clone(&slot.waker));
        let node = slot.node;
        if slot.task.as_mut().poll(&mut Context::from_waker(&waker)).is_ready() {
            self.slots[id] = None;
        }
        if let Some(node) = node {
            let dies = {
                let mut state = lock(&world.state);
                let left = state.nodes[node].dies_in.map(|left| left.saturating_sub(1));
                state.nodes[node].dies_in = left;
                left == Some(0)
            };
            if dies {
                self.kill(world, node);
            }
        }
    }

    fn kill(&mut self, world: &Arc<World>, node: usize) {
        lock(&world.state).nodes[node] = Node { dead: true, ..Node::default() };
        for slot in &mut self.slots {
            if slot.as_ref().is_some_and(|slot| slot.node == Some(node)) {
                *slot = None;
            }
        }
        // What it was about to begin.
        let mut state = lock(&world.state);
        let (begun, kept) = std::mem::take(&mut state.spawned).into_iter().partition::<Vec<_>, _>(|(of, _)| *of == Some(node));
        state.spawned = kept;
        drop(state);
        drop(begun);
    }
}

fn fire_next(world: &Arc<World>) -> bool {
    let what = {
        let mut state = lock(&world.state);
        let Some(Reverse(timer)) = state.timers.pop() else { return false };
        state.now = state.now.max(timer.at);
        timer.what
    };
    match what {
        What::Wake(waker) => waker.wake(),
        What::Call(call) => call(world),
    }
    true
}

pub(crate) struct Sleep {
    world: Arc<World>,
    at: Duration,
    /// Whom its timer wakes. One timer is enough: who is woken for nothing, and sets another each time, has twice as many with each round.
    armed: Option<Waker>,
}

impl Future for Sleep {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        let this = &mut *self;
        let mut state = lock(&this.world.state);
        if state.now >= this.at {
            return Poll::Ready(());
        }
        if !this.armed.as_ref().is_some_and(|armed| armed.will_wake(context.waker())) {
            this.armed = Some(context.waker().clone());
            state.add_timer(this.at, What::Wake(context.waker().clone()));
        }
        Poll::Pending
    }
}
