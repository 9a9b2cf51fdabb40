//! A small pool of threads for blocking work that no other work may hold up.
//!
//! Tokio's own pool is shared by everything in the process. The record of a lease must be written
//! within seconds even while that pool is busy, so its files have threads of their own.

use std::{
    collections::VecDeque,
    fmt,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    thread,
    time::Duration,
};

use tokio::sync::oneshot;

/// How much the kernel prefers other threads to those of work in the background.
const BACKGROUND_NICE: i32 = 15;
/// How long a thread waits for more work before it ends.
const IDLE: Duration = Duration::from_secs(10);

type Job = Box<dyn FnOnce() + Send>;

/// The work was not done: its thread panicked, or no thread could be started.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the work was interrupted")]
pub struct Interrupted;

/// A pool whose threads start when work arrives and end when they have been idle for a while.
#[derive(Clone)]
pub struct Threads(Arc<Shared>);

struct Shared {
    name: &'static str,
    most: usize,
    background: bool,
    state: Mutex<State>,
    work: Condvar,
}

#[derive(Default)]
struct State {
    jobs: VecDeque<Job>,
    threads: usize,
    idle: usize,
}

impl Threads {
    /// A pool of at most `most` threads. Each bears `name`, of which Linux shows 15 bytes.
    #[must_use]
    pub fn new(name: &'static str, most: usize) -> Self {
        Self::with(name, most, false)
    }

    /// The same for long work that must slow nothing else down: the kernel prefers other threads.
    #[must_use]
    pub fn in_background(name: &'static str, most: usize) -> Self {
        Self::with(name, most, true)
    }

    fn with(name: &'static str, most: usize, background: bool) -> Self {
        Self(Arc::new(Shared { name, most: most.max(1), background, state: Mutex::default(), work: Condvar::new() }))
    }

    /// Does the work on one of the threads. Work whose caller has gone before it began is skipped.
    ///
    /// # Errors
    /// The work panicked, or no thread could be started for it.
    pub async fn run<T: Send + 'static>(&self, work: impl FnOnce() -> T + Send + 'static) -> Result<T, Interrupted> {
        let (reply, done) = oneshot::channel();
        self.queue(Box::new(move || {
            if !reply.is_closed() {
                // A caller that has gone meanwhile needs no answer.
                let _ = reply.send(work());
            }
        }));
        done.await.map_err(|_| Interrupted)
    }

    fn queue(&self, job: Job) {
        let mut state = self.0.lock();
        state.jobs.push_back(job);
        if state.idle >= state.jobs.len() {
            self.0.work.notify_one();
        } else if state.threads < self.0.most {
            state.threads += 1;
            let shared = Arc::clone(&self.0);
            let started = thread::Builder::new().name(self.0.name.to_owned()).spawn(move || shared.serve());
            if started.is_err() {
                state.threads -= 1;
                if state.threads == 0 {
                    // Dropping the jobs tells their callers.
                    state.jobs.clear();
                }
            }
        }
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn serve(&self) {
        if self.background {
            // On Linux this is of the thread alone. Without it the work is done all the same.
            let _ = rustix::process::nice(BACKGROUND_NICE);
        }
        let mut state = self.lock();
        loop {
            if let Some(job) = state.jobs.pop_front() {
                drop(state);
                // A panic drops the reply, which tells the caller.
                let _ = catch_unwind(AssertUnwindSafe(job));
                state = self.lock();
                continue;
            }
            state.idle += 1;
            let (woken, waited) = self.work.wait_timeout(state, IDLE).unwrap_or_else(PoisonError::into_inner);
            state = woken;
            state.idle -= 1;
            if waited.timed_out() && state.jobs.is_empty() {
                state.threads -= 1;
                return;
            }
        }
    }
}

impl fmt::Debug for Threads {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{} ({})", self.0.name, self.0.most)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    #[tokio::test]
    async fn work_is_done_beside_a_tokio_pool_that_is_full() {
        let runtime = tokio::runtime::Builder::new_current_thread().max_blocking_threads(1).build().unwrap();
        let (release, held) = mpsc::channel::<()>();
        let _stuck = runtime.spawn_blocking(move || held.recv());
        let threads = Threads::new("test", 1);
        for number in 0..100 {
            assert_eq!(threads.run(move || number).await, Ok(number));
        }
        drop(release);
        runtime.shutdown_background();
    }

    #[tokio::test]
    async fn a_panic_is_told_and_harms_no_later_work() {
        let threads = Threads::new("test", 1);
        assert_eq!(threads.run(|| panic!("on purpose")).await, Err::<(), _>(Interrupted));
        assert_eq!(threads.run(|| 1).await, Ok(1));
    }

    #[tokio::test]
    async fn work_runs_on_all_threads_and_no_more() {
        let threads = Threads::new("test", 3);
        let (release, held) = mpsc::channel::<()>();
        let held = Arc::new(Mutex::new(held));
        let (started, mut running) = tokio::sync::mpsc::unbounded_channel();
        let stuck: Vec<_> = (0..4)
            .map(|number| {
                let (threads, held, started) = (threads.clone(), Arc::clone(&held), started.clone());
                tokio::spawn(async move {
                    let work = move || {
                        started.send(number).unwrap();
                        drop(held.lock().map(|held| held.recv()));
                    };
                    threads.run(work).await
                })
            })
            .collect();
        for _ in 0..3 {
            running.recv().await.unwrap();
        }
        let (running_now, waiting) = {
            let state = threads.0.lock();
            (state.threads, state.jobs.len())
        };
        assert_eq!((running_now, waiting), (3, 1));
        drop(release);
        for one in stuck {
            one.await.unwrap().unwrap();
        }
        running.recv().await.unwrap();
    }
}
