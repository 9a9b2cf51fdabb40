//! Where runsc is, how old it is, and what it can do.

use std::{
    env, fmt,
    path::{Path, PathBuf},
    str::FromStr,
    time::Duration,
};

use crate::call::{CallError, capture};

/// Older ones lack systrap's fixes and fail simple programs.
pub const OLDEST_VERSION: Version = Version(20_240_729);

const PROBE_LIMIT: Duration = Duration::from_secs(10);
/// The versions whose control socket takes what [`crate::control`] says.
const CONTROL_SOCKET_OF: [&str; 1] = ["release-20260905.0"];

/// The date a runsc was released on, as `yyyymmdd`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Version(u32);

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.0, f)
    }
}

/// The text names no date.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NoDate;

impl FromStr for Version {
    type Err = NoDate;

    /// From what the binary says of itself: `release-20260905.0`, `0.0~20240729.0`.
    fn from_str(text: &str) -> Result<Self, NoDate> {
        text.split(|c: char| !c.is_ascii_digit())
            .find(|digits| digits.len() == 8 && digits.starts_with("20"))
            .and_then(|digits| digits.parse().ok())
            .map(Self)
            .ok_or(NoDate)
    }
}

/// Why there is no runsc to use. The texts say what to do.
#[derive(Debug, thiserror::Error)]
pub enum FindError {
    #[error("there is no runsc (looked at {looked}); run scripts/setup, or name one by --runsc")]
    Missing { looked: String },
    #[error("{path} is runsc {found}, and nothing older than {OLDEST_VERSION} works; run scripts/setup, or name a newer one by --runsc")]
    TooOld { path: PathBuf, found: Version },
    #[error("{path} does not say its version ({said:?}); build it with the version set, as scripts/setup does, or take a release")]
    Unversioned { path: PathBuf, said: String },
    #[error("{path} can't be asked what it can do: {error}")]
    Broken { path: PathBuf, error: CallError },
}

/// Finds the binary: the one that is named, else the one that setup installed for this user, else the one in `PATH`.
///
/// # Errors
/// [`FindError::Missing`] if none of them is there.
pub fn find(explicit: Option<&Path>) -> Result<PathBuf, FindError> {
    find_in(explicit, |name| env::var_os(name).map(PathBuf::from))
}

fn find_in(explicit: Option<&Path>, var: impl Fn(&str) -> Option<PathBuf>) -> Result<PathBuf, FindError> {
    let candidates = match explicit {
        Some(path) => vec![path.to_owned()],
        None => {
            let data = var("XDG_DATA_HOME").filter(|dir| dir.is_absolute()).or_else(|| var("HOME").map(|home| home.join(".local/share")));
            let installed = data.map(|data| data.join("sandboxer/bin/runsc"));
            let in_path: Vec<_> = var("PATH").iter().flat_map(|path| env::split_paths(path)).map(|dir| dir.join("runsc")).collect();
            installed.into_iter().chain(in_path).filter(|path| path.is_absolute()).collect()
        }
    };
    match candidates.iter().find(|path| path.is_file()) {
        // Absolute, since it is called from any directory.
        Some(found) => Ok(std::path::absolute(found).unwrap_or_else(|_| found.clone())),
        None => {
            let looked = candidates.iter().map(|path| path.display().to_string()).collect::<Vec<_>>().join(", ");
            Err(FindError::Missing { looked })
        }
    }
}

/// What one runsc binary can do, as it says itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Features {
    pub version: Version,
    /// The whole version text, which a checkpoint is bound to.
    pub version_text: String,
    /// A cgroup v2 inside the sandbox, whose pids limit is kept by a restore.
    pub in_sandbox_cgroup_v2: bool,
    /// What its control socket is told is known.
    pub control_socket: bool,
    /// `checkpoint -exclude-committed-zero-pages`.
    pub exclude_zero_pages: bool,
    /// It compares the spec on restore, and can be told not to.
    pub spec_validation: bool,
}

impl Features {
    /// Asks the binary.
    ///
    /// # Errors
    /// It is too old, names no version, or does not answer.
    pub async fn probe(binary: &Path) -> Result<Self, FindError> {
        let broken = |error| FindError::Broken { path: binary.to_owned(), error };
        let ask = |arguments: &'static [&'static str]| capture(binary, arguments, PROBE_LIMIT);
        let (version, flags, checkpoint) =
            tokio::try_join!(ask(&["--version"]), ask(&["flags"]), ask(&["help", "checkpoint"])).map_err(broken)?;
        let features = Self::from_texts(&version, &flags, &checkpoint).ok_or_else(|| FindError::Unversioned {
            path: binary.to_owned(),
            said: version.lines().next().unwrap_or_default().to_owned(),
        })?;
        if features.version < OLDEST_VERSION {
            return Err(FindError::TooOld { path: binary.to_owned(), found: features.version });
        }
        Ok(features)
    }

    fn from_texts(version: &str, flags: &str, checkpoint: &str) -> Option<Self> {
        let version_text = version.lines().next()?.trim().trim_start_matches("runsc version").trim().to_owned();
        Some(Self {
            version: version_text.parse().ok()?,
            control_socket: CONTROL_SOCKET_OF.contains(&version_text.as_str()),
            version_text,
            in_sandbox_cgroup_v2: has_flag(flags, "in-sandbox-cgroup"),
            exclude_zero_pages: has_flag(checkpoint, "exclude-committed-zero-pages"),
            spec_validation: has_flag(flags, "restore-spec-validation"),
        })
    }
}

fn has_flag(help: &str, flag: &str) -> bool {
    help.lines().any(|line| line.trim_start().strip_prefix('-').and_then(|rest| rest.split_whitespace().next()) == Some(flag))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_of_all_packagers_are_dates() {
        assert_eq!("release-20260905.0".parse(), Ok(Version(20_260_905)));
        assert_eq!("0.0~20240729.0".parse(), Ok(OLDEST_VERSION));
        assert_eq!("20221219.0-1+b2".parse(), Ok(Version(20_221_219)));
        assert_eq!("VERSION_MISSING".parse::<Version>(), Err(NoDate));
    }

    #[test]
    fn features_are_read_from_the_help_texts() {
        let new = Features::from_texts(
            "runsc version release-20260905.0\nspec: 1.2.1\n",
            "  -in-sandbox-cgroup value\n    \tcgroup setup\n  -restore-spec-validation value\n",
            "  -exclude-committed-zero-pages\n",
        )
        .unwrap();
        assert!(new.in_sandbox_cgroup_v2 && new.control_socket && new.exclude_zero_pages && new.spec_validation);
        let old = Features::from_texts("runsc version 0.0~20240729.0\n", "  -in-sandbox-cgroups value\n", "").unwrap();
        assert!(!old.in_sandbox_cgroup_v2 && !old.control_socket);
    }

    #[test]
    fn the_users_own_binary_comes_before_the_one_in_path() {
        let dir = tempfile::tempdir().unwrap();
        let own = dir.path().join("data/sandboxer/bin/runsc");
        let path = dir.path().join("bin/runsc");
        let var = |name: &str| match name {
            "XDG_DATA_HOME" => Some(dir.path().join("data")),
            "PATH" => Some(dir.path().join("bin")),
            _ => None,
        };
        let missing = find_in(None, var).unwrap_err().to_string();
        assert!(missing.contains(own.to_str().unwrap()) && missing.contains("scripts/setup"), "{missing}");
        for file in [&path, &own] {
            std::fs::create_dir_all(file.parent().unwrap()).unwrap();
            std::fs::write(file, "").unwrap();
            assert_eq!(&find_in(None, var).unwrap(), file);
        }
        assert!(matches!(find_in(Some(Path::new("/nowhere/runsc")), var), Err(FindError::Missing { .. })));
    }
}
