//! Single files, on the file system of whoever runs the tests: what is asked for is done, and nothing outside of the root is reached.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use std::{
    fs,
    os::unix::fs::{MetadataExt as _, PermissionsExt as _, symlink},
    path::Path,
};

use nix::{
    fcntl::{OFlag, open},
    sys::stat::Mode,
    unistd::mkfifo,
};
use sandboxer_agent::guest::{Begun, Fault, Work, begin};
use sandboxer_layer::{
    Entry, EntryPath, Kind, Limits, Meta,
    write::{put_end, put_head},
};
use sandboxer_protocol::agent::{ByteRange, FileAbout, FileAsk, FileFault, FileKind, FileList, GuestPath, Raw};

const ROOM: Limits = Limits { bytes: 1 << 32, content: 1 << 40, entries: 1 << 20 };

fn path(text: &str) -> GuestPath {
    Raw::new(text).try_into().unwrap()
}

fn start(root: &Path, ask: FileAsk) -> Result<Begun, Fault> {
    let root = open(root, OFlag::O_RDONLY | OFlag::O_DIRECTORY, Mode::empty()).unwrap();
    begin(std::os::fd::AsFd::as_fd(&root), ask, ROOM)
}

/// All that is sent.
fn sent(root: &Path, ask: FileAsk) -> Result<Vec<u8>, Fault> {
    let Begun::Going { work: Work::Send(mut source), .. } = start(root, ask)? else { panic!("it sends nothing") };
    let mut out = Vec::new();
    while source.fill(&mut out, 1000)? {}
    Ok(out)
}

fn read(root: &Path, at: &str, range: Option<ByteRange>) -> Result<Vec<u8>, Fault> {
    sent(root, FileAsk::Read { path: path(at), range, live: false })
}

fn write(root: &Path, at: &str, parents: bool, content: &[u8]) -> Result<FileAbout, Fault> {
    let Begun::Going { work: Work::Take(mut target), .. } = start(root, FileAsk::Write { path: path(at), mode: None, parents })? else {
        panic!("it takes nothing")
    };
    for piece in content.chunks(70_001) {
        target.push(piece)?;
    }
    Ok(target.finish()?.unwrap())
}

fn list(root: &Path, at: &str, after: Option<&str>, limit: u32) -> Result<(Vec<String>, bool), Fault> {
    let json = sent(root, FileAsk::List { path: path(at), after: after.map(Raw::new), limit })?;
    let list: FileList = serde_json::from_slice(&json).unwrap();
    let name = |item: FileAbout| String::from_utf8(item.name.unwrap().as_bytes().to_vec()).unwrap();
    Ok((list.items.into_iter().map(name).collect(), list.more))
}

fn done(root: &Path, ask: FileAsk) -> Result<Option<FileAbout>, Fault> {
    match start(root, ask)? {
        Begun::Done(about) => Ok(about),
        Begun::Going { mut work, .. } => {
            while !work.go_on()? {}
            Ok(None)
        }
    }
}

fn stat(root: &Path, at: &str, follow: bool) -> Result<FileAbout, Fault> {
    done(root, FileAsk::Stat { path: path(at), follow }).map(Option::unwrap)
}

fn fault<T>(result: Result<T, Fault>) -> FileFault {
    result.err().unwrap().kind
}

fn names(dir: &Path) -> Vec<String> {
    let mut names: Vec<String> = fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

#[test]
fn what_is_written_is_read_and_what_was_there_keeps_its_mode() {
    let root = tempfile::tempdir().unwrap();
    let root = root.path();
    let content: Vec<u8> = (0..300_000_u32).map(|n| (n * 7 / 3) as u8).collect();
    assert_eq!(fault(write(root, "/a/b/c", false, b"x")), FileFault::NotFound);
    assert_eq!(write(root, "/a/b/c", true, &content).unwrap().size, 300_000);
    assert_eq!(read(root, "/a/b/c", None).unwrap(), content);
    assert_eq!(read(root, "/a/../a/./b//c", Some(ByteRange::From(5, Some(2004)))).unwrap(), content[5..2005]);
    assert_eq!(fault(read(root, "/a/b/c", Some(ByteRange::From(300_000, None)))), FileFault::Range);
    fs::set_permissions(root.join("a/b/c"), fs::Permissions::from_mode(0o751)).unwrap();
    assert_eq!(write(root, "/a/b/c", false, b"").unwrap().mode, 0o751);
    assert_eq!(read(root, "/a/b/c", None).unwrap(), b"");
    assert_eq!(names(&root.join("a/b")), ["c"]);
    // Pages of zeros are holes.
    write(root, "/holes", false, &vec![0; 4 << 20]).unwrap();
    assert_eq!(read(root, "/holes", None).unwrap(), vec![0; 4 << 20]);
    assert!(fs::metadata(root.join("holes")).unwrap().blocks() < 1024);
}

#[test]
fn half_a_file_takes_nobodys_place_and_leaves_nothing() {
    let root = tempfile::tempdir().unwrap();
    let root = root.path();
    fs::write(root.join("f"), "old").unwrap();
    let Begun::Going { work: Work::Take(mut target), .. } =
        start(root, FileAsk::Write { path: path("/f"), mode: None, parents: false }).unwrap()
    else {
        panic!()
    };
    target.push(b"new").unwrap();
    assert_eq!(fs::read(root.join("f")).unwrap(), b"old");
    assert_eq!(names(root).len(), 2);
    drop(target);
    assert_eq!((names(root), fs::read(root.join("f")).unwrap()), (vec!["f".to_owned()], b"old".to_vec()));
}

#[test]
fn links_lead_nowhere_but_into_the_root() {
    let outside = tempfile::tempdir().unwrap();
    fs::write(outside.path().join("secret"), "secret").unwrap();
    let root = outside.path().join("root");
    fs::create_dir_all(root.join("dir")).unwrap();
    fs::write(root.join("dir/f"), "inside").unwrap();
    symlink("../../../../secret", root.join("climbs")).unwrap();
    symlink("/dir/f", root.join("absolute")).unwrap();
    symlink("..", root.join("dir/up")).unwrap();
    symlink(outside.path(), root.join("out")).unwrap();
    symlink("b", root.join("a")).unwrap();
    symlink("a", root.join("b")).unwrap();
    symlink("new", root.join("dangling")).unwrap();
    for there in ["/absolute", "/dir/up/dir/up/absolute", "/../../dir/f", "/dir/up/../../../dir/f"] {
        assert_eq!(read(&root, there, None).unwrap(), b"inside", "{there}");
    }
    for nowhere in ["/climbs", "/../secret", "/out/secret", "/dir/../../secret"] {
        assert_eq!(fault(read(&root, nowhere, None)), FileFault::NotFound, "{nowhere}");
    }
    assert_eq!(fault(read(&root, "/a", None)), FileFault::Loop);
    assert_eq!(fault(write(&root, "/a/x", true, b"")), FileFault::Loop);
    // Written through a link, as a program would.
    write(&root, "/climbs", false, b"mine").unwrap();
    write(&root, "/dangling", false, b"new").unwrap();
    assert_eq!((fs::read(root.join("secret")).unwrap(), fs::read(root.join("new")).unwrap()), (b"mine".to_vec(), b"new".to_vec()));
    assert_eq!(fs::read(outside.path().join("secret")).unwrap(), b"secret");
    let link = stat(&root, "/out", false).unwrap();
    assert_eq!((link.kind, link.target.unwrap().as_bytes()), (FileKind::Symlink, outside.path().to_str().unwrap().as_bytes()));
    // The link goes, not where it leads to.
    done(&root, FileAsk::Remove { path: path("/out"), recursive: true }).unwrap();
    assert!(outside.path().join("secret").exists() && !root.join("out").is_symlink());
    done(&root, FileAsk::Rename { path: path("/absolute"), to: path("/moved"), replace: false }).unwrap();
    assert!(root.join("moved").is_symlink() && root.join("dir/f").exists());
}

#[test]
fn directories_are_listed_in_parts_and_removed_with_all_that_is_in_them() {
    let root = tempfile::tempdir().unwrap();
    let root = root.path();
    let made = done(root, FileAsk::MakeDirectory { path: path("/d/e"), mode: Some(0o700), parents: true }).unwrap().unwrap();
    assert_eq!((made.kind, made.mode), (FileKind::Directory, 0o700));
    let again = |parents| done(root, FileAsk::MakeDirectory { path: path("/d/e"), mode: None, parents });
    assert_eq!(again(true).unwrap().unwrap().mode, 0o700);
    assert_eq!(fault(again(false)), FileFault::Exists);
    assert_eq!(fault(done(root, FileAsk::MakeDirectory { path: path("/x/y"), mode: None, parents: false })), FileFault::NotFound);
    for n in 0..1200 {
        fs::write(root.join(format!("d/e/{n:04}")), "").unwrap();
    }
    symlink("/nowhere", root.join("d/e/link")).unwrap();
    let (mut all, mut after) = (Vec::new(), None);
    loop {
        let (mut part, more) = list(root, "/d/e", after.as_deref(), 500).unwrap();
        after = part.last().cloned();
        all.append(&mut part);
        if !more {
            break;
        }
    }
    assert_eq!(all, names(&root.join("d/e")));
    assert_eq!(list(root, "/", None, 1000).unwrap(), (vec!["d".to_owned()], false));
    assert_eq!(list(root, "/", None, 1000).unwrap(), (vec!["d".to_owned()], false));
    assert_eq!(fault(list(root, "/d/e/0001", None, 10)), FileFault::NotADirectory);
    let remove = |at: &str, recursive| done(root, FileAsk::Remove { path: path(at), recursive });
    assert_eq!(fault(remove("/d", false)), FileFault::NotEmpty);
    assert_eq!(fault(remove("/nothing", true)), FileFault::NotFound);
    assert_eq!(fault(remove("/", true)), FileFault::Denied);
    remove("/d", true).unwrap();
    assert_eq!(names(root), Vec::<String>::new());
}

#[test]
fn what_is_no_file_is_neither_read_nor_replaced() {
    let root = tempfile::tempdir().unwrap();
    let root = root.path();
    mkfifo(&root.join("fifo"), Mode::S_IRWXU).unwrap();
    fs::create_dir(root.join("dir")).unwrap();
    fs::write(root.join("f"), "f").unwrap();
    fs::write(root.join("g"), "g").unwrap();
    assert_eq!(fault(read(root, "/fifo", None)), FileFault::NotAFile);
    assert_eq!(fault(write(root, "/fifo", false, b"")), FileFault::NotAFile);
    assert_eq!(fault(read(root, "/dir", None)), FileFault::IsADirectory);
    assert_eq!(fault(write(root, "/dir", false, b"")), FileFault::IsADirectory);
    assert_eq!(fault(write(root, "/", false, b"")), FileFault::IsADirectory);
    assert_eq!(fault(read(root, "/f/x", None)), FileFault::NotADirectory);
    assert_eq!(fault(write(root, &format!("/{}", "n".repeat(300)), false, b"")), FileFault::TooLong);
    let rename = |replace| done(root, FileAsk::Rename { path: path("/f"), to: path("/g"), replace });
    assert_eq!(fault(rename(false)), FileFault::Exists);
    rename(true).unwrap();
    assert_eq!(fs::read(root.join("g")).unwrap(), b"f");
    assert_eq!(fault(rename(true)), FileFault::NotFound);
    let proc = start(Path::new("/proc/self"), FileAsk::Read { path: path("/status"), range: None, live: false });
    assert_eq!(fault(proc.map(drop)), FileFault::NotAFile);
    assert_eq!(names(root), ["dir", "fifo", "g"]);
}

#[test]
fn a_file_that_changes_while_it_is_read_is_never_whole() {
    let root = tempfile::tempdir().unwrap();
    let root = root.path();
    for live in [false, true] {
        fs::write(root.join("f"), vec![1; 100_000]).unwrap();
        let Begun::Going { work: Work::Send(mut source), length, .. } =
            start(root, FileAsk::Read { path: path("/f"), range: None, live }).unwrap()
        else {
            panic!()
        };
        assert_eq!(length, Some(100_000));
        let mut out = Vec::new();
        assert!(source.fill(&mut out, 50_000).unwrap());
        fs::write(root.join("f"), vec![2; 100_001]).unwrap();
        let last = source.fill(&mut out, 60_000);
        if live {
            assert!(!last.unwrap() && out.len() == 100_000);
        } else {
            assert_eq!(fault(last), FileFault::Changed);
        }
    }
    let Begun::Going { work: Work::Send(mut source), .. } =
        start(root, FileAsk::Read { path: path("/f"), range: None, live: true }).unwrap()
    else {
        panic!()
    };
    fs::write(root.join("f"), "short").unwrap();
    assert_eq!(fault(source.fill(&mut Vec::new(), 1000)), FileFault::Changed);
}

#[test]
fn a_tree_goes_out_and_in_and_an_archive_that_means_harm_does_not() {
    let root = tempfile::tempdir().unwrap();
    let root = root.path();
    fs::create_dir_all(root.join("from/sub")).unwrap();
    fs::write(root.join("from/sub/f\nwith a line"), "content").unwrap();
    fs::set_permissions(root.join("from/sub/f\nwith a line"), fs::Permissions::from_mode(0o600)).unwrap();
    symlink("nowhere", root.join("from/link")).unwrap();
    fs::hard_link(root.join("from/sub/f\nwith a line"), root.join("from/twin")).unwrap();
    let archive = sent(root, FileAsk::Pack { path: path("/from"), live: false }).unwrap();
    let unpack = |at: &str, archive: &[u8]| -> Result<(), Fault> {
        let Begun::Going { work: Work::Take(mut target), .. } = start(root, FileAsk::Unpack { path: path(at), parents: true })? else {
            panic!()
        };
        for piece in archive.chunks(777) {
            target.push(piece)?;
        }
        target.finish().map(drop)
    };
    unpack("/to/here", &archive).unwrap();
    assert_eq!(fs::read(root.join("to/here/twin")).unwrap(), b"content");
    assert_eq!(fs::metadata(root.join("to/here/sub/f\nwith a line")).unwrap().nlink(), 2);
    assert_eq!(fs::read_link(root.join("to/here/link")).unwrap(), Path::new("nowhere"));
    // Cut off in the middle of a file: that one is as it was, and nothing else is beside it.
    fs::write(root.join("to/here/sub/f\nwith a line"), "older").unwrap();
    let at = archive.windows(7).position(|window| window == b"content").unwrap();
    assert_eq!(fault(unpack("/to/here", &archive[..at + 3])), FileFault::Refused);
    assert_eq!(fs::read(root.join("to/here/sub/f\nwith a line")).unwrap(), b"older");
    assert_eq!(names(&root.join("to/here/sub")), ["f\nwith a line"]);
    // Through a link that is there already.
    symlink(root.join("from"), root.join("to/here/escape")).unwrap();
    let mut evil = Vec::new();
    let entry = Entry { path: EntryPath::parse(b"escape/planted").unwrap(), kind: Kind::File { size: 0 }, meta: Meta::default() };
    put_head(&mut evil, &entry, None);
    put_end(&mut evil);
    assert_eq!(fault(unpack("/to/here", &evil)), FileFault::Refused);
    assert!(!root.join("from/planted").exists());
    assert_eq!(fault(unpack("/to/here", &[7; 5000])), FileFault::Refused);
}
