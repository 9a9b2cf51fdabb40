//! The secrets of sandboxes that this user's commands made, one file each, which nobody else may read. Where a server asks for keys, an attach
//! has to show the sandbox's own besides.

use std::{
    fs::{self, DirBuilder, OpenOptions},
    io::{self, Write as _},
    os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _},
    path::{Path, PathBuf},
    time::SystemTime,
};

use sandboxer_client::SandboxId;
use serde_json::Value;

/// Sandboxes go without this command hearing of it: beyond so many, the tokens that were made first go too.
const MAX_TOKENS: usize = 10_000;
const MAX_TOKEN_BYTES: usize = 4096;

/// `$XDG_STATE_HOME/sandboxer/tokens`, or where that is by default.
fn directory() -> Option<PathBuf> {
    let absolute = |name| std::env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
    let state = absolute("XDG_STATE_HOME").or_else(|| Some(absolute("HOME")?.join(".local/state")))?;
    Some(state.join("sandboxer/tokens"))
}

/// Keeps the tokens of what a server made: of one object, or of a list of them. Should that fail, the sandbox is there all the same.
pub(crate) fn keep(made: &Value) {
    let several = made["items"].as_array().into_iter().flatten();
    for one in several.chain([made]) {
        let (Some(id), Some(token)) = (one["id"].as_str(), one["token"].as_str()) else { continue };
        let kept = match directory() {
            Some(directory) => write(&directory, id, token),
            None => Err(io::Error::other("neither XDG_STATE_HOME nor HOME names a directory")),
        };
        if let Err(error) = kept {
            eprintln!("sandboxer: the token of {id} could not be kept: {error}");
        }
    }
}

/// The token of a sandbox that was made here.
pub(crate) fn of(id: &str) -> Option<String> {
    read(&directory()?, id)
}

pub(crate) fn forget(id: &str) {
    if let Some(directory) = directory()
        && id.parse::<SandboxId>().is_ok()
    {
        // Most often there is none.
        let _ = fs::remove_file(directory.join(id));
    }
}

/// Sandboxes whose tokens are known. Some of them may be gone.
pub(crate) fn ids() -> Vec<String> {
    directory().map(|directory| known(&directory)).unwrap_or_default().into_iter().map(|(_, id)| id).collect()
}

fn known(directory: &Path) -> Vec<(SystemTime, String)> {
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    let named = entries.filter_map(|entry| {
        let id = entry.file_name().into_string().ok().filter(|id| id.parse::<SandboxId>().is_ok())?;
        Some((entry.metadata().and_then(|about| about.modified()).unwrap_or(SystemTime::UNIX_EPOCH), id))
    });
    named.collect()
}

fn read(directory: &Path, id: &str) -> Option<String> {
    let id = id.parse::<SandboxId>().ok()?.to_string();
    let token = fs::read_to_string(directory.join(id)).ok()?;
    let token = token.trim();
    (!token.is_empty() && token.len() <= MAX_TOKEN_BYTES).then(|| token.to_owned())
}

/// Whole or not at all, and never readable by others, not even for a moment.
fn write(directory: &Path, id: &str, token: &str) -> io::Result<()> {
    // What a server calls an id becomes the name of a file.
    let id = id.parse::<SandboxId>().map_err(io::Error::other)?.to_string();
    DirBuilder::new().recursive(true).mode(0o700).create(directory)?;
    let part = directory.join(format!(".{id}.{}", std::process::id()));
    let mut file = OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&part)?;
    file.write_all(format!("{token}\n").as_bytes())?;
    fs::rename(&part, directory.join(id))?;
    let mut all = known(directory);
    if all.len() > MAX_TOKENS {
        all.sort();
        for (_, oldest) in &all[..all.len() - MAX_TOKENS] {
            let _ = fs::remove_file(directory.join(oldest));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    #[test]
    fn a_token_is_kept_for_its_user_alone() {
        let place = tempfile::tempdir().unwrap();
        let directory = place.path().join("a/tokens");
        let id = SandboxId::random().to_string();
        write(&directory, &id, "secret").unwrap();
        write(&directory, &id, "newer").unwrap();
        assert_eq!(read(&directory, &id).as_deref(), Some("newer"));
        let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
        assert_eq!((mode(&directory), mode(&directory.join(&id))), (0o700, 0o600));
        assert_eq!(known(&directory).len(), 1, "nothing half written is left");
    }

    #[test]
    fn what_is_no_id_names_no_file() {
        let place = tempfile::tempdir().unwrap();
        for id in ["../x", "", ".", "a/b", "0f5a"] {
            assert!(write(place.path(), id, "secret").is_err() && read(place.path(), id).is_none(), "{id}");
        }
        assert_eq!(fs::read_dir(place.path()).unwrap().count(), 0);
    }
}
