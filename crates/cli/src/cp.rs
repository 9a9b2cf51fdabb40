//! `cp`: files and directories into a sandbox and out of it.

use std::{
    ffi::{OsStr, OsString},
    fs::{self, File, Metadata, OpenOptions},
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

/// Where what comes out of a sandbox goes.
enum Target {
    /// A device or a FIFO: it is written into, and stays what it is.
    Into(File),
    /// A file: until it is whole it has another name, which nobody else has, and is private.
    File { part: tempfile::NamedTempFile, path: PathBuf },
}

impl Target {
    /// A link is followed, as `cp` does.
    fn open(to: &Path) -> Result<Self> {
        let context = || format!("write {}", to.display());
        let path = match fs::symlink_metadata(to) {
            Ok(about) if about.is_symlink() => fs::canonicalize(to).with_context(context)?,
            _ => to.to_owned(),
        };
        match fs::metadata(&path) {
            Ok(about) if about.is_dir() => bail!("{} is a directory", to.display()),
            Ok(about) if !about.is_file() => {
                return Ok(Self::Into(OpenOptions::new().write(true).open(&path).with_context(context)?));
            }
            _ => {}
        }
        let beside = path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
        let part = tempfile::Builder::new().prefix(".sandboxer-cp-").tempfile_in(beside).with_context(context)?;
        Ok(Self::File { part, path })
    }

    fn writer(&self) -> io::Result<File> {
        match self {
            Self::Into(file) => file.try_clone(),
            Self::File { part, .. } => part.as_file().try_clone(),
        }
    }

    /// All of it was written.
    fn finish(self, mode: u32) -> Result<()> {
        let Self::File { part, path } = self else { return Ok(()) };
        part.as_file().set_permissions(std::os::unix::fs::PermissionsExt::from_mode(mode))?;
        part.persist(&path).with_context(|| format!("write {}", path.display()))?;
        Ok(())
    }
}

/// Under its name only when it is whole. What was not is removed.
fn write(ask: &Ask, files: &Files, there: &There, found: &FileInfo, to: &Path) -> Result<()> {
    let target = Target::open(to)?;
    let bar = bar(found.size);
    let mut writer = bar.wrap_async_write(tokio::fs::File::from_std(target.writer()?));
    let written = wait(ask, async |_| files.read_into(&there.path, &mut writer).await);
    bar.finish_and_clear();
    written?;
    target.finish(u32::from_str_radix(&found.mode, 8).unwrap_or(0o644) & 0o777)
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
    use std::io::Write as _;

    use super::*;

    fn put(to: &Path, content: &[u8], mode: u32) -> Result<()> {
        let target = Target::open(to)?;
        target.writer()?.write_all(content)?;
        target.finish(mode)
    }

    fn names(dir: &Path) -> Vec<String> {
        let mut names: Vec<_> = fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    #[test]
    fn a_file_has_its_name_when_it_is_whole_and_is_private_until_then() {
        let dir = tempfile::tempdir().unwrap();
        let (to, part) = (dir.path().join("f"), dir.path().join("f.part"));
        fs::write(&part, "of the user").unwrap();
        let target = Target::open(&to).unwrap();
        target.writer().unwrap().write_all(b"half").unwrap();
        let hidden = names(dir.path()).into_iter().find(|name| name != "f.part").unwrap();
        assert!(hidden.starts_with('.') && !to.exists(), "{hidden}");
        assert_eq!(fs::metadata(dir.path().join(hidden)).unwrap().mode() & 0o777, 0o600);
        drop(target);
        assert_eq!(names(dir.path()), ["f.part"], "nothing is left of what was not whole");
        put(&to, b"whole", 0o640).unwrap();
        assert_eq!((fs::read(&to).unwrap().as_slice(), fs::metadata(&to).unwrap().mode() & 0o777), (&b"whole"[..], 0o640));
        assert_eq!(fs::read(part).unwrap(), b"of the user");
    }

    #[test]
    fn what_is_no_file_is_written_into_and_stays_what_it_is() {
        let dir = tempfile::tempdir().unwrap();
        let fifo = dir.path().join("fifo");
        nix::unistd::mkfifo(&fifo, nix::sys::stat::Mode::S_IRWXU).unwrap();
        let reader = std::thread::spawn({
            let fifo = fifo.clone();
            move || fs::read(fifo).unwrap()
        });
        put(&fifo, b"through", 0o644).unwrap();
        assert_eq!(reader.join().unwrap(), b"through");
        assert!(!fs::metadata(&fifo).unwrap().is_file());
        let null = dir.path().join("null");
        std::os::unix::fs::symlink("/dev/null", &null).unwrap();
        put(&null, b"nothing", 0o644).unwrap();
        assert!(fs::symlink_metadata(&null).unwrap().is_symlink() && !fs::metadata("/dev/null").unwrap().is_file());
        assert_eq!(names(dir.path()), ["fifo", "null"]);
        assert!(put(dir.path(), b"", 0o644).is_err());
    }

    #[test]
    fn a_link_is_followed_and_one_that_leads_nowhere_is_told() {
        let dir = tempfile::tempdir().unwrap();
        let (real, link) = (dir.path().join("real"), dir.path().join("link"));
        std::os::unix::fs::symlink("real", &link).unwrap();
        assert!(put(&link, b"x", 0o644).is_err());
        fs::write(&real, "old").unwrap();
        put(&link, b"new", 0o644).unwrap();
        assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
        assert_eq!(fs::read(&real).unwrap(), b"new");
        assert_eq!(names(dir.path()), ["link", "real"]);
    }

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
