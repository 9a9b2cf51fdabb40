//! `cp`: files and directories into a sandbox and out of it.

use std::{
    ffi::{OsStr, OsString},
    fs::{self, File, Metadata},
    io::{self, IsTerminal as _},
    os::unix::{ffi::OsStrExt as _, fs::MetadataExt as _},
    path::{Path, PathBuf},
    process::ExitCode,
};

use anyhow::{Context as _, Result, anyhow, bail};
use indicatif::{ProgressBar, ProgressStyle};
use sandboxer_client::{Api, Error, FileInfo, FileKind, Files, SandboxId};
use serde_json::{Value, json};

use crate::{EXIT_USAGE, travel::working, workspaces::Ask};

#[derive(Debug, clap::Args)]
#[command(
    after_help = "One of the two is in a sandbox: ID:PATH, with an absolute path and an id or the beginning of one. A local file whose name has a colon \
                        in it is written with ./ before it. As with cp, what is copied to a directory that is there goes into it; SRC/. is what is in SRC. \
                        \"-\" is the standard input or output."
)]
pub(crate) struct Args {
    #[command(flatten)]
    ask: Ask,
    /// What to copy: a file or a directory
    #[arg(value_name = "SRC")]
    from: OsString,
    /// Where to
    #[arg(value_name = "DST")]
    to: OsString,
}

/// A path in a sandbox.
struct There {
    id: String,
    path: Vec<u8>,
}

impl There {
    /// None: it is a local path.
    fn parse(text: &OsStr) -> Option<Self> {
        let bytes = text.as_bytes();
        let at = bytes.iter().position(|byte| *byte == b':')?;
        let id = std::str::from_utf8(&bytes[..at]).ok()?;
        let is_id = !id.is_empty() && id.bytes().all(|byte| byte.is_ascii_hexdigit() || byte == b'-');
        is_id.then(|| Self { id: id.to_owned(), path: bytes[at + 1..].to_vec() })
    }

    fn inside(&self, name: &[u8]) -> Vec<u8> {
        let mut path = self.path.clone();
        if path.last() != Some(&b'/') {
            path.push(b'/');
        }
        path.extend_from_slice(name);
        path
    }
}

pub(crate) fn run(args: &Args) -> Result<ExitCode> {
    let ask = &args.ask;
    match (There::parse(&args.from), There::parse(&args.to)) {
        (None, Some(there)) => {
            let files = files_of(ask, &there)?;
            let copied =
                if args.from == "-" { from_stdin(ask, &files, &there)? } else { into(ask, &files, Path::new(&args.from), &there)? };
            ask.print(&copied, |_| String::new())
        }
        (Some(there), None) => {
            let files = files_of(ask, &there)?;
            if args.to == "-" {
                return to_stdout(ask, &files, &there);
            }
            let copied = out_of(ask, &files, &there, Path::new(&args.to))?;
            ask.print(&copied, |_| String::new())
        }
        _ => {
            eprintln!("sandboxer: one of the two, and not both, has to be in a sandbox: ID:PATH");
            Ok(ExitCode::from(EXIT_USAGE))
        }
    }
}

/// The files of the sandbox that is meant.
fn files_of(ask: &Ask, there: &There) -> Result<Files> {
    if !there.path.starts_with(b"/") {
        bail!("a path in a sandbox is absolute: {}:/root/{}", there.id, String::from_utf8_lossy(&there.path));
    }
    let id: SandboxId = ask.sandbox_id(&there.id)?.parse().map_err(|error| anyhow!("{error}"))?;
    Ok(Files::of(ask.api()?, id))
}

fn wait<T>(ask: &Ask, work: impl AsyncFnOnce(&Api) -> Result<T, Error>) -> Result<T> {
    ask.transfer(work)
}

fn name_of(path: &[u8]) -> Option<&[u8]> {
    path.split(|byte| *byte == b'/').rfind(|part| !part.is_empty()).filter(|name| !matches!(*name, b"." | b".."))
}

/// What is there, links followed; none: nothing.
fn look(ask: &Ask, files: &Files, path: &[u8]) -> Result<Option<FileInfo>> {
    wait(ask, async |_| match files.stat(path).await {
        Ok(found) => Ok(Some(found)),
        Err(Error::File { code, .. }) if code == "file_not_found" => Ok(None),
        Err(error) => Err(error),
    })
}

fn into(ask: &Ask, files: &Files, from: &Path, there: &There) -> Result<Value> {
    let about = fs::metadata(from).with_context(|| format!("read {}", from.display()))?;
    let contents = from.as_os_str().as_bytes().ends_with(b"/.");
    let is_directory = there.path.ends_with(b"/") || look(ask, files, &there.path)?.is_some_and(|found| found.kind == FileKind::Directory);
    let target = match from.file_name() {
        Some(name) if is_directory && !contents => there.inside(name.as_bytes()),
        _ => there.path.clone(),
    };
    if about.is_dir() {
        working("copying the directory", || wait(ask, async |_| files.upload(from, &target).await))?;
        return Ok(json!({ "path": String::from_utf8_lossy(&target), "kind": "directory" }));
    }
    if !about.is_file() {
        bail!("{} is neither a file nor a directory", from.display());
    }
    let file = File::open(from).with_context(|| format!("read {}", from.display()))?;
    let before = seen(&file.metadata()?);
    let bar = bar(about.len());
    let reader = bar.wrap_async_read(tokio::fs::File::from_std(file.try_clone()?));
    let written = wait(ask, async |_| files.write_from(&target, Some(about.mode() & 0o777), reader).await);
    bar.finish_and_clear();
    let written = written.with_context(|| format!("copy {}", from.display()))?;
    if seen(&file.metadata()?) != before {
        bail!("{} was changed while it was copied: what is in the sandbox may be a mixture", from.display());
    }
    Ok(json!({ "path": written.path, "kind": "file", "size": written.size, "mode": written.mode }))
}

fn seen(about: &Metadata) -> (u64, i64, i64) {
    (about.len(), about.mtime(), about.mtime_nsec())
}

fn from_stdin(ask: &Ask, files: &Files, there: &There) -> Result<Value> {
    let written = wait(ask, async |_| files.write_from(&there.path, None, tokio::io::stdin()).await)?;
    Ok(json!({ "path": written.path, "kind": "file", "size": written.size, "mode": written.mode }))
}

fn to_stdout(ask: &Ask, files: &Files, there: &There) -> Result<ExitCode> {
    wait(ask, async |_| files.read_into(&there.path, &mut tokio::io::stdout()).await)?;
    Ok(ExitCode::SUCCESS)
}

fn out_of(ask: &Ask, files: &Files, there: &There, to: &Path) -> Result<Value> {
    let shown = String::from_utf8_lossy(&there.path);
    let found = look(ask, files, &there.path)?.ok_or_else(|| anyhow!("{shown}: there is no such file in the sandbox"))?;
    let contents = there.path.ends_with(b"/.");
    let mut target = to.to_owned();
    if to.is_dir()
        && !contents
        && let Some(name) = name_of(&there.path)
    {
        target.push(OsStr::from_bytes(name));
    }
    let told = |bytes: Option<u64>| json!({ "path": shown, "local": target.to_string_lossy(), "size": bytes });
    match found.kind {
        FileKind::Directory => {
            working("copying the directory", || wait(ask, async |_| files.download(&there.path, &target).await))?;
            Ok(told(None))
        }
        FileKind::File => {
            write(ask, files, there, &found, &target)?;
            Ok(told(Some(found.size)))
        }
        _ => bail!("{shown} is neither a file nor a directory"),
    }
}

/// Under its name only when it is whole.
fn write(ask: &Ask, files: &Files, there: &There, found: &FileInfo, target: &Path) -> Result<()> {
    let mut part = target.as_os_str().to_owned();
    part.push(".part");
    let part = PathBuf::from(part);
    let opened = File::create(&part).with_context(|| format!("write {}", part.display()))?;
    let bar = bar(found.size);
    let mut writer = bar.wrap_async_write(tokio::fs::File::from_std(opened));
    let written = wait(ask, async |_| files.read_into(&there.path, &mut writer).await);
    bar.finish_and_clear();
    let finish = || -> Result<()> {
        let mode = u32::from_str_radix(&found.mode, 8).unwrap_or(0o644) & 0o777;
        fs::set_permissions(&part, std::os::unix::fs::PermissionsExt::from_mode(mode))?;
        fs::rename(&part, target).with_context(|| format!("write {}", target.display()))
    };
    let done = written.and_then(|()| finish());
    if done.is_err() {
        let _ = fs::remove_file(&part);
    }
    done
}

/// On a terminal only.
fn bar(bytes: u64) -> ProgressBar {
    if !io::stderr().is_terminal() {
        return ProgressBar::hidden();
    }
    let bar = ProgressBar::new(bytes);
    // The template is ours; should it be wrong, the default one does.
    if let Ok(style) = ProgressStyle::with_template("{bar:40} {bytes}/{total_bytes} {bytes_per_sec} {eta}") {
        bar.set_style(style);
    }
    bar
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_in_a_sandbox_is_told_from_what_is_not() {
        let there = There::parse(OsStr::new("0f5a-3:/root/a:b")).expect("an id and a path");
        assert_eq!((there.id.as_str(), there.path.as_slice()), ("0f5a-3", &b"/root/a:b"[..]));
        assert_eq!(there.inside(b"c"), b"/root/a:b/c");
        for local in ["./0f5a:/x", "file", "/a:/b", ":/x", "name:/x"] {
            assert!(There::parse(OsStr::new(local)).is_none(), "{local}");
        }
        assert_eq!(name_of(b"/a/b/"), Some(&b"b"[..]));
        assert_eq!(name_of(b"/"), None);
        assert_eq!(name_of(b"/a/.."), None);
    }
}
