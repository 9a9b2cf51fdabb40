//! Named points around every durable write, at which a test ends the process or makes the write fail.
//!
//! A point is `{kind}:{stage}`, e.g. `manifest:synced`. `SANDBOXER_FAILPOINTS` holds any number of `point=action`, separated by `;`. Actions: `kill` (this
//! process, by SIGKILL), `error`, `full` (no space left), each with `@n` for the n-th time only (else every time). `@` and a path: what that file holds at the
//! moment, so that a test can arm a point in a process that runs.
//!
//! Compiled into builds with debug assertions, which is what the tests run, and with the feature `failpoints`. In a release build a point is nothing, and the
//! variable is not read.

use std::io;

/// What is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Kind {
    Pack,
    Manifest,
    /// The swap of the record that names a checkpoint: the commit.
    Publish,
    /// Any other swap of the record.
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
    pub const ALL: [Self; 6] = [Self::Pack, Self::Manifest, Self::Publish, Self::Record, Self::Latest, Self::Metadata];

    pub fn as_str(self) -> &'static str {
        match self {
            Self::Pack => "pack",
            Self::Manifest => "manifest",
            Self::Publish => "publish",
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
    #[cfg(any(feature = "failpoints", debug_assertions))]
    set: std::sync::Arc<std::sync::Mutex<armed::Set>>,
}

impl FailPoints {
    /// What the environment asks for.
    ///
    /// # Errors
    /// The variable can't be understood: a test that misspells a point must not pass.
    pub fn from_env() -> io::Result<Self> {
        #[cfg(any(feature = "failpoints", debug_assertions))]
        if let Some(text) = std::env::var_os("SANDBOXER_FAILPOINTS") {
            return Self::parse(&text.to_string_lossy());
        }
        Ok(Self::default())
    }

    /// # Errors
    /// The point's action, if this is its time.
    pub fn hit(&self, kind: Kind, stage: Stage) -> io::Result<()> {
        #[cfg(any(feature = "failpoints", debug_assertions))]
        return self.fire(kind, stage);
        #[cfg(not(any(feature = "failpoints", debug_assertions)))]
        {
            let _ = (kind, stage);
            Ok(())
        }
    }
}

#[cfg(any(feature = "failpoints", debug_assertions))]
mod armed {
    use std::{
        fs, io,
        path::PathBuf,
        sync::{Arc, Mutex, PoisonError},
    };

    use super::{FailPoints, Kind, Stage};

    #[derive(Debug, Clone, Copy)]
    enum Action {
        Kill,
        Error,
        Full,
    }

    #[derive(Debug)]
    struct Armed {
        at: (Kind, Stage),
        action: Action,
        only: Option<u64>,
        hits: u64,
    }

    #[derive(Debug, Default)]
    pub(super) struct Set {
        /// Where the points stand, unless they were given once and for all.
        file: Option<PathBuf>,
        /// What it held when it was last looked at.
        text: String,
        points: Vec<Armed>,
    }

    impl FailPoints {
        /// # Errors
        /// The text is no list of `kind:stage=action`.
        pub fn parse(text: &str) -> io::Result<Self> {
            let set = match text.strip_prefix('@') {
                Some(file) => Set { file: Some(file.into()), ..Set::default() },
                None => Set { points: parse(text)?, ..Set::default() },
            };
            Ok(Self { set: Arc::new(Mutex::new(set)) })
        }

        pub(super) fn fire(&self, kind: Kind, stage: Stage) -> io::Result<()> {
            let mut set = self.set.lock().unwrap_or_else(PoisonError::into_inner);
            set.look_again()?;
            for point in set.points.iter_mut().filter(|point| point.at == (kind, stage)) {
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

    impl Set {
        /// Another text in the file counts anew.
        fn look_again(&mut self) -> io::Result<()> {
            let Some(file) = &self.file else { return Ok(()) };
            let text = match fs::read_to_string(file) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => String::new(),
                read => read?,
            };
            if text != self.text {
                self.points = parse(&text)?;
                self.text = text;
            }
            Ok(())
        }
    }

    fn parse(text: &str) -> io::Result<Vec<Armed>> {
        let bad = |part: &str| io::Error::new(io::ErrorKind::InvalidInput, format!("no fail point: {part:?}"));
        let mut points = Vec::new();
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
            points.push(Armed { at: (kind, stage), action, only, hits: 0 });
        }
        Ok(points)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_point_that_is_misspelt_is_refused() {
        for text in ["pack", "pack:before", "pack:never=kill", "park:before=kill", "pack:before=explode", "pack:before=error@x"] {
            assert!(FailPoints::parse(text).is_err(), "{text}");
        }
    }

    #[test]
    fn a_file_arms_and_disarms_what_runs() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("points");
        let points = FailPoints::parse(&format!("@{}", file.display())).unwrap();
        let hit = || points.hit(Kind::Pack, Stage::Named).is_ok();
        assert!(hit());
        std::fs::write(&file, "pack:named=error@2").unwrap();
        assert_eq!([hit(), hit(), hit()], [true, false, true]);
        std::fs::write(&file, "pack:named=full").unwrap();
        assert!(!hit() && points.hit(Kind::Pack, Stage::After).is_ok());
        std::fs::remove_file(&file).unwrap();
        assert!(hit());
        std::fs::write(&file, "nonsense").unwrap();
        assert!(!hit(), "a test that misspells a point must not pass");
    }
}
