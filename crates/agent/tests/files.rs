//! Packing a tree and unpacking it again, on the file system of whoever runs the tests; and archives that mean harm.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use std::{
    collections::BTreeMap,
    fs,
    os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt, symlink},
    path::Path,
};

use nix::{
    sys::stat::{Mode, SFlag, mknod},
    unistd::mkfifo,
};
use sandboxer_agent::{
    pack::Packer,
    unpack::{Failure, Unpacker},
};
use sandboxer_layer::{
    Entry, EntryPath, Kind, Limits, Meta, Summary,
    write::{put_end, put_head, put_padding},
};

const ROOM: Limits = Limits { bytes: 1 << 32, content: 1 << 40, entries: 1 << 20 };

fn packed(root: &Path) -> Vec<u8> {
    let mut packer = Packer::new(root).unwrap();
    let mut archive = Vec::new();
    while !packer.is_done() {
        archive.append(packer.fill(100_000).unwrap());
    }
    archive
}

fn unpacked(archive: &[u8], root: &Path, lower: Option<&Path>, limits: Limits) -> Result<Summary, Failure> {
    let mut unpacker = Unpacker::new(root, lower, limits).unwrap();
    for piece in archive.chunks(70_001) {
        unpacker.push(piece)?;
    }
    unpacker.finish()
}

/// All that can be told of a tree.
fn listed(root: &Path) -> BTreeMap<String, String> {
    let mut found = BTreeMap::new();
    let mut first = BTreeMap::new();
    let mut waiting = vec![root.to_owned()];
    while let Some(path) = waiting.pop() {
        let about = fs::symlink_metadata(&path).unwrap();
        let name = path.strip_prefix(root).unwrap().to_str().unwrap().to_owned();
        let kind = about.file_type();
        let content = if kind.is_symlink() {
            fs::read_link(&path).unwrap().to_str().unwrap().to_owned()
        } else if kind.is_file() {
            let sum = |sum: u64, byte: &u8| sum.wrapping_mul(31).wrapping_add(u64::from(*byte));
            fs::read(&path).unwrap().iter().fold(about.len(), sum).to_string()
        } else {
            String::new()
        };
        let links = if kind.is_dir() { String::new() } else { first.entry(about.ino()).or_insert_with(|| name.clone()).clone() };
        let (mode, uid, gid, seconds, nanos) = (about.mode(), about.uid(), about.gid(), about.mtime(), about.mtime_nsec());
        found.insert(name, format!("{mode:o} {uid} {gid} {seconds} {nanos} {links:?} {content}"));
        if kind.is_dir() {
            let mut entries: Vec<_> = fs::read_dir(&path).unwrap().map(|entry| entry.unwrap().path()).collect();
            entries.sort_by(|one, other| other.cmp(one));
            waiting.extend(entries);
        }
    }
    found
}

#[test]
fn a_tree_comes_back_as_it_was_and_equal_trees_give_equal_archives() {
    let (from, to) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let root = from.path();
    fs::create_dir_all(root.join("a/b/c")).unwrap();
    for number in 0..300_usize {
        fs::write(root.join(format!("a/b/{number}")), vec![number.to_le_bytes()[0]; number * 37]).unwrap();
    }
    fs::write(root.join("a/empty"), b"").unwrap();
    symlink("../nowhere", root.join("a/link")).unwrap();
    fs::hard_link(root.join("a/b/7"), root.join("z")).unwrap();
    fs::hard_link(root.join("a/link"), root.join("zlink")).unwrap();
    mkfifo(&root.join("pipe"), Mode::from_bits_truncate(0o620)).unwrap();
    let large: Vec<u8> = (0..3_000_000u32).flat_map(|n| if n / 100_000 % 3 == 0 { [0; 4] } else { n.to_le_bytes() }).collect();
    fs::write(root.join("large"), &large).unwrap();
    fs::File::create(root.join("holes")).unwrap().set_len(200 << 20).unwrap();
    fs::write(root.join(".wh.literal"), b"really").unwrap();
    fs::set_permissions(root.join("a/b/c"), fs::Permissions::from_mode(0o1750)).unwrap();
    fs::set_permissions(root.join("a/b/9"), fs::Permissions::from_mode(0o4711)).unwrap();
    fs::set_permissions(root, fs::Permissions::from_mode(0o711)).unwrap();
    let archive = packed(root);
    assert!(archive.len() < large.len() + 3_000_000, "holes cost nothing: {}", archive.len());
    let summary = unpacked(&archive, to.path(), None, ROOM).unwrap();
    assert_eq!(listed(root), listed(to.path()));
    assert_eq!(summary.entries, listed(root).len() as u64);
    assert_eq!(packed(to.path()), archive);
    assert!(fs::metadata(to.path().join("holes")).unwrap().blocks() * 512 < 1 << 20, "a hole stays one");
}

#[test]
fn deletions_come_back() {
    let (from, to) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    // Anybody may make this one device: it is what overlays need.
    mknod(&from.path().join("gone"), SFlag::S_IFCHR, Mode::empty(), 0).unwrap();
    fs::create_dir(from.path().join("dir")).unwrap();
    let archive = packed(from.path());
    unpacked(&archive, to.path(), None, ROOM).unwrap();
    let gone = fs::symlink_metadata(to.path().join("gone")).unwrap();
    assert!(gone.file_type().is_char_device() && gone.rdev() == 0);
    assert_eq!(packed(to.path()), archive);
}

fn entry(path: &str, kind: Kind) -> Entry {
    // Nobody but root may give files away.
    let (uid, gid) = (nix::unistd::geteuid().as_raw(), nix::unistd::getegid().as_raw());
    Entry { path: EntryPath::parse(path.as_bytes()).unwrap(), kind, meta: Meta { mode: 0o755, uid, gid, ..Meta::default() } }
}

fn archive(entries: &[(Entry, &[u8])]) -> Vec<u8> {
    let mut out = Vec::new();
    for (entry, content) in entries {
        put_head(&mut out, entry, None);
        out.extend_from_slice(content);
        put_padding(&mut out, content.len() as u64);
    }
    put_end(&mut out);
    out
}

#[test]
fn nothing_is_written_through_a_link_or_over_a_directory() {
    let around = tempfile::tempdir().unwrap();
    fs::create_dir(around.path().join("outside")).unwrap();
    fs::write(around.path().join("outside/kept"), b"kept").unwrap();
    let link = || (entry("way", Kind::Symlink { target: b"../outside".to_vec() }), &b""[..]);
    let file = |path: &str| (entry(path, Kind::File { size: 4 }), &b"evil"[..]);
    let hard = |target: &[u8]| (entry("hard", Kind::HardLink { target: EntryPath::parse(target).unwrap() }), &b""[..]);
    let hostile: Vec<Vec<(Entry, &[u8])>> = vec![
        vec![link(), file("way/kept")],
        vec![link(), (entry("way/dir", Kind::Directory), b"")],
        vec![link(), (entry("way/kept", Kind::Whiteout), b"")],
        vec![link(), hard(b"way/kept")],
        vec![link(), (entry("way", Kind::Opaque), b"")],
        vec![file("a/b"), file("a")],
        vec![hard(b"nothing")],
        vec![(entry("dir", Kind::Directory), b""), hard(b"dir")],
    ];
    for (number, entries) in hostile.into_iter().enumerate() {
        let root = around.path().join(format!("root{number}"));
        fs::create_dir(&root).unwrap();
        let failed = unpacked(&archive(&entries), &root, None, ROOM).unwrap_err();
        assert!(matches!(failed, Failure::Refused(_)), "{number}: {failed}");
        assert_eq!(fs::read(around.path().join("outside/kept")).unwrap(), b"kept");
        assert_eq!(fs::read_dir(around.path().join("outside")).unwrap().count(), 1);
    }
    // A file in the place of a link takes that place.
    let root = around.path().join("replaced");
    fs::create_dir(&root).unwrap();
    let link = entry("way", Kind::Symlink { target: b"../outside/kept".to_vec() });
    unpacked(&archive(&[(link, b""), file("way")]), &root, None, ROOM).unwrap();
    assert_eq!(fs::read(root.join("way")).unwrap(), b"evil");
    assert_eq!(fs::read(around.path().join("outside/kept")).unwrap(), b"kept");
}

#[test]
fn bounds_hold_and_what_is_cut_off_is_no_archive() {
    let file = |path: &str| (entry(path, Kind::File { size: 4 }), &b"data"[..]);
    let whole = archive(&[file("a"), file("b"), file("c")]);
    let try_with = |archive: &[u8], limits: Limits| {
        let root = tempfile::tempdir().unwrap();
        unpacked(archive, root.path(), None, limits).map(drop)
    };
    try_with(&whole, ROOM).unwrap();
    for limits in [Limits { entries: 2, ..ROOM }, Limits { content: 11, ..ROOM }, Limits { bytes: 2000, ..ROOM }] {
        assert!(matches!(try_with(&whole, limits), Err(Failure::Refused(_))));
    }
    assert!(matches!(try_with(&whole[..2000], ROOM), Err(Failure::Refused(_))));
}

#[test]
fn a_directory_that_is_only_implied_is_as_it_is_in_the_image() {
    let (lower, to) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    fs::create_dir_all(lower.path().join("var/tmp")).unwrap();
    fs::set_permissions(lower.path().join("var/tmp"), fs::Permissions::from_mode(0o1777)).unwrap();
    symlink("usr/lib", lower.path().join("lib")).unwrap();
    let file = |path: &str| (entry(path, Kind::File { size: 4 }), &b"data"[..]);
    unpacked(&archive(&[file("var/tmp/x"), file("new/dir/x")]), to.path(), Some(lower.path()), ROOM).unwrap();
    assert_eq!(fs::metadata(to.path().join("var/tmp")).unwrap().mode() & 0o7777, 0o1777);
    assert_eq!(fs::metadata(to.path().join("new/dir")).unwrap().mode() & 0o7777, 0o755);
    let hidden = unpacked(&archive(&[file("lib/x")]), to.path(), Some(lower.path()), ROOM).unwrap_err();
    assert!(hidden.to_string().contains("lib"), "{hidden}");
}
