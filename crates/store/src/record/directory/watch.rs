//! Hints by inotify: one descriptor for all records, one watch for each that someone cares about.

use std::{
    collections::HashMap,
    os::fd::{AsFd as _, AsRawFd, RawFd},
    path::Path,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use nix::sys::inotify::{AddWatchFlags, InitFlags, Inotify, WatchDescriptor};
use tokio::{
    io::{Interest, unix::AsyncFd},
    runtime::Handle,
    sync::watch,
    task::AbortHandle,
};

/// Below this many watches nobody looks for those that nobody needs any more.
const MIN_PRUNED: usize = 64;

/// Begins with the first subscription. Where inotify can't be had there are no hints, and polling has to do.
#[derive(Default)]
pub(super) struct Watch(Mutex<Option<Running>>);

struct Running {
    shared: Arc<Shared>,
    reader: AbortHandle,
}

impl Drop for Running {
    fn drop(&mut self) {
        self.reader.abort();
    }
}

/// What the runtime polls.
struct Descriptor(Inotify);

impl AsRawFd for Descriptor {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_fd().as_raw_fd()
    }
}

struct Shared {
    inotify: AsyncFd<Descriptor>,
    watched: Mutex<Watched>,
}

#[derive(Default)]
struct Watched {
    counters: HashMap<WatchDescriptor, watch::Sender<u64>>,
    prune_at: usize,
}

impl Watch {
    /// A counter that goes up when something happens in `dir`.
    pub(super) fn subscribe(&self, dir: &Path) -> Option<watch::Receiver<u64>> {
        let mut running = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if running.is_none() {
            *running = start();
        }
        let shared = &running.as_ref()?.shared;
        let mut watched = shared.watched();
        let made = AddWatchFlags::IN_CREATE | AddWatchFlags::IN_MOVED_TO | AddWatchFlags::IN_DELETE_SELF | AddWatchFlags::IN_ONLYDIR;
        let descriptor = shared.inotify.get_ref().0.add_watch(dir, made).ok()?;
        let counter = watched.counters.entry(descriptor).or_default().subscribe();
        if watched.counters.len() > watched.prune_at.max(MIN_PRUNED) {
            watched.prune(&shared.inotify.get_ref().0);
        }
        Some(counter)
    }
}

impl Watched {
    fn prune(&mut self, inotify: &Inotify) {
        self.counters.retain(|descriptor, counter| {
            let needed = counter.receiver_count() > 0;
            if !needed {
                let _ = inotify.rm_watch(*descriptor);
            }
            needed
        });
        self.prune_at = self.counters.len() * 2;
    }
}

impl Shared {
    fn watched(&self) -> MutexGuard<'_, Watched> {
        self.watched.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn pass_on(&self) {
        while let Ok(events) = self.inotify.async_io(Interest::READABLE, |inotify| inotify.0.read_events().map_err(Into::into)).await {
            let mut watched = self.watched();
            for event in events {
                if event.mask.contains(AddWatchFlags::IN_Q_OVERFLOW) {
                    watched.counters.values().for_each(|counter| counter.send_modify(|count| *count += 1));
                } else if event.mask.contains(AddWatchFlags::IN_IGNORED) {
                    watched.counters.remove(&event.wd);
                } else if is_version(&event)
                    && let Some(counter) = watched.counters.get(&event.wd)
                {
                    counter.send_modify(|count| *count += 1);
                }
            }
        }
    }
}

/// Files that are being written have a dot in their names.
fn is_version(event: &nix::sys::inotify::InotifyEvent) -> bool {
    event.name.as_ref().is_none_or(|name| !name.as_encoded_bytes().contains(&b'.'))
}

fn start() -> Option<Running> {
    let runtime = Handle::try_current().ok()?;
    let inotify = Inotify::init(InitFlags::IN_NONBLOCK | InitFlags::IN_CLOEXEC).ok()?;
    #[allow(deprecated, reason = "its successor is unsafe for the sake of descriptors that are exchanged, which this one is not")]
    let inotify = AsyncFd::with_interest(Descriptor(inotify), Interest::READABLE).ok()?;
    let shared = Arc::new(Shared { inotify, watched: Mutex::default() });
    let reader = Arc::clone(&shared);
    let reader = runtime.spawn(async move { reader.pass_on().await }).abort_handle();
    Some(Running { shared, reader })
}
