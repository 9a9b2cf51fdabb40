//! Named points around every durable write, at which a test ends the process or makes the write fail.
//!
//! A point is `{kind}:{stage}`, e.g. `manifest:synced`. `SANDBOXER_FAILPOINTS` holds any number of `point=action`, separated by `;`. Actions: `kill` (this
//! process, by SIGKILL), `error`, `full` (no space left), each with `@n` for the n-th time only (else every time). Compiled in with the feature `failpoints`
//! alone; without it a point is nothing.

use std::io;

/// What is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Kind {
    Pack,
    Manifest,
    Record,
    Latest,
    Metadata,
}

/// How far the write into a directory has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Stage {
    /// Nothing has happened yet.
    Before,
    /// The bytes are in a file of another name, not synced.
    Written,
    /// That file is synced.
    Synced,
    /// It has its name; the directory is not synced.
    Named,
    /// All of it is durable.
    After,
}

impl Kind {
    pub const ALL: [Self; 5] = [Self::Pack, Self::Manifest, Self::Record, Self::Latest, Self::Metadata];

    pub fn as_str(self) -> &'static str {
        match self {
            Self::Pack => "pack",
            Self::Manifest => "manifest",
            Self::Record => "record",
            Self::Latest => "latest",
            Self::Metadata => "metadata",
        }
    }
}

impl Stage {
    pub const ALL: [Self; 5] = [Self::Before, Self::Written, Self::Synced, Self::Named, Self::After];

    pub fn as_str(self) -> &'static str {
        match self {
            Self::Before => "before",
            Self::Written => "written",
            Self::Synced => "synced",
            Self::Named => "named",
            Self::After => "after",
        }
    }
}

/// The points of one volume. Cloned, they count together.
#[derive(Debug, Clone, Default)]
pub struct FailPoints {
    #[cfg(feature = "failpoints")]
    set: std::sync::Arc<std::sync::Mutex<Vec<armed::Armed>>>,
}

impl FailPoints {
    /// What the environment asks for.
    ///
    /// # Errors
    /// The variable can't be understood: a test that misspells a point must not pass.
    pub fn from_env() -> io::Result<Self> {
        #[cfg(feature = "failpoints")]
        if let Some(text) = std::env::var_os("SANDBOXER_FAILPOINTS") {
            return Self::parse(&text.to_string_lossy());
        }
        Ok(Self::default())
    }

    /// # Errors
    /// The point's action, if this is its time.
    pub fn hit(&self, kind: Kind, stage: Stage) -> io::Result<()> {
        #[cfg(feature = "failpoints")]
        return self.fire(kind, stage);
        #[cfg(not(feature = "failpoints"))]
        {
            let _ = (kind, stage);
            Ok(())
        }
    }
}

#[cfg(feature = "failpoints")]
mod armed {
    use std::io;

    use super::{FailPoints, Kind, Stage};

    #[derive(Debug, Clone, Copy)]
    enum Action {
        Kill,
        Error,
        Full,
    }

    #[derive(Debug)]
    pub(super) struct Armed {
        at: (Kind, Stage),
        action: Action,
        only: Option<u64>,
        hits: u64,
    }

    impl FailPoints {
        /// # Errors
        /// The text is no list of `kind:stage=action`.
        pub fn parse(text: &str) -> io::Result<Self> {
            let bad = |part: &str| io::Error::new(io::ErrorKind::InvalidInput, format!("no fail point: {part:?}"));
            let points = Self::default();
            for part in text.split(';').map(str::trim).filter(|part| !part.is_empty()) {
                let (point, action) = part.split_once('=').ok_or_else(|| bad(part))?;
                let (kind, stage) = point.split_once(':').ok_or_else(|| bad(part))?;
                let kind = Kind::ALL.into_iter().find(|known| known.as_str() == kind).ok_or_else(|| bad(part))?;
                let stage = Stage::ALL.into_iter().find(|known| known.as_str() == stage).ok_or_else(|| bad(part))?;
                let (action, only) = match action.split_once('@') {
                    Some((action, n)) => (action, Some(n.parse().map_err(|_| bad(part))?)),
                    None => (action, None),
                };
                let action = match action {
                    "kill" => Action::Kill,
                    "error" => Action::Error,
                    "full" => Action::Full,
                    _ => return Err(bad(part)),
                };
                points.arm(kind, stage, action, only);
            }
            Ok(points)
        }

        fn arm(&self, kind: Kind, stage: Stage, action: Action, only: Option<u64>) {
            let mut set = self.set.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
            set.push(Armed { at: (kind, stage), action, only, hits: 0 });
        }

        pub(super) fn fire(&self, kind: Kind, stage: Stage) -> io::Result<()> {
            let mut set = self.set.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
            for point in set.iter_mut().filter(|point| point.at == (kind, stage)) {
                point.hits += 1;
                if point.only.is_some_and(|only| only != point.hits) {
                    continue;
                }
                match point.action {
                    Action::Kill => {
                        let _ = nix::sys::signal::kill(nix::unistd::Pid::this(), nix::sys::signal::Signal::SIGKILL);
                        loop {
                            std::thread::park();
                        }
                    }
                    Action::Error => return Err(io::Error::other(format!("fail point {}:{}", kind.as_str(), stage.as_str()))),
                    Action::Full => return Err(io::Error::from_raw_os_error(nix::libc::ENOSPC)),
                }
            }
            Ok(())
        }
    }
}
