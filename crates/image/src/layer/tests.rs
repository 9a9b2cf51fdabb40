use std::fs;
use std::os::unix::fs::MetadataExt;

use tar::{Builder, Header};
use tempfile::TempDir;

use super::*;

/// A tar archive in the making. Paths are written as they are: the `tar` crate's own setters refuse what these tests are about.
struct Tar(Builder<Vec<u8>>);

impl Tar {
    fn new() -> Self {
        Self(Builder::new(Vec::new()))
    }

    fn entry(mut self, kind: EntryType, path: &str, link: &str, mode: u32, content: &[u8]) -> Self {
        let mut header = Header::new_gnu();
        header.as_mut_bytes()[..path.len()].copy_from_slice(path.as_bytes());
        header.set_link_name_literal(link).unwrap();
        header.set_entry_type(kind);
        header.set_mode(mode);
        header.set_mtime(1_600_000_000);
        header.set_size(content.len() as u64);
        header.set_cksum();
        self.0.append(&header, content).unwrap();
        self
    }

    fn file(self, path: &str, content: &str) -> Self {
        self.entry(EntryType::Regular, path, "", 0o644, content.as_bytes())
    }

    fn dir(self, path: &str) -> Self {
        self.entry(EntryType::Directory, path, "", 0o755, b"")
    }

    fn symlink(self, path: &str, target: &str) -> Self {
        self.entry(EntryType::Symlink, path, target, 0o777, b"")
    }

    fn hard_link(self, path: &str, target: &str) -> Self {
        self.entry(EntryType::Link, path, target, 0o644, b"")
    }

    fn bytes(self) -> Vec<u8> {
        self.0.into_inner().unwrap()
    }
}

/// Applies layers to an empty tree inside a directory that also holds something to attack.
fn apply(layers: Vec<Vec<u8>>) -> (TempDir, Result<u64>) {
    apply_within(layers, Limits::default())
}

fn apply_within(layers: Vec<Vec<u8>>, mut limits: Limits) -> (TempDir, Result<u64>) {
    let directory = tempfile::tempdir().unwrap();
    fs::create_dir(directory.path().join("tree")).unwrap();
    fs::write(directory.path().join("outside"), "untouched").unwrap();
    let mut tree = Tree::open(&directory.path().join("tree")).unwrap();
    let mut left_out = 0;
    for layer in layers {
        match apply_layer(&mut tree, &mut layer.as_slice(), &mut limits) {
            Ok(more) => left_out += more,
            Err(error) => return (directory, Err(error)),
        }
    }
    let finished = tree.finish().map(|()| left_out);
    (directory, finished)
}

fn refusal(layers: Vec<Vec<u8>>) -> String {
    let (directory, result) = apply(layers);
    assert_eq!(fs::read_to_string(directory.path().join("outside")).unwrap(), "untouched");
    assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 2, "something was written beside the tree");
    match result {
        Err(Error::Refused { what, why }) => format!("{what}: {why}"),
        other => panic!("not refused: {other:?}"),
    }
}

#[test]
fn paths_that_point_outside_are_refused() {
    for path in ["/etc/passwd", "../outside", "a/../../outside", "a/.."] {
        for kind in [EntryType::Regular, EntryType::Directory, EntryType::Symlink, EntryType::Link] {
            let why = refusal(vec![Tar::new().file("a", "x").entry(kind, path, "a", 0o644, b"").bytes()]);
            assert!(why.contains("path"), "{path}: {why}");
        }
    }
}

#[test]
fn nothing_is_written_through_a_symbolic_link() {
    for target in ["/", "..", "/tmp", "."] {
        let layer = || Tar::new().dir("d").symlink("d/link", target);
        let why = refusal(vec![layer().file("d/link/outside", "pwned").bytes()]);
        assert!(why.contains("below /d/link"), "{why}");
        refusal(vec![layer().dir("d/link/new").bytes()]);
        refusal(vec![layer().symlink("d/link/new", "x").bytes()]);
        refusal(vec![layer().file("f", "").hard_link("d/link/new", "f").bytes()]);
        // Also from a later layer, and to remove something.
        refusal(vec![layer().bytes(), Tar::new().file("d/link/outside", "pwned").bytes()]);
        refusal(vec![layer().bytes(), Tar::new().file("d/link/.wh.outside", "").bytes()]);
    }
}

#[test]
fn hard_links_that_point_outside_are_refused() {
    for target in ["/etc/passwd", "../outside", "missing", "d", ".", "link/outside"] {
        let why = refusal(vec![Tar::new().dir("d").symlink("link", "/").hard_link("h", target).bytes()]);
        assert!(!why.is_empty(), "{target}");
    }
}

#[test]
fn symbolic_links_that_climb_above_the_root_are_refused() {
    let why = refusal(vec![Tar::new().symlink("a/link", "../../outside").bytes()]);
    assert!(why.contains("outside the image"), "{why}");
}

#[test]
fn a_file_in_the_place_of_a_link_replaces_the_link() {
    let (directory, result) = apply(vec![Tar::new().file("real", "old").symlink("f", "real").bytes(), Tar::new().file("f", "new").bytes()]);
    result.unwrap();
    assert_eq!(fs::read_to_string(directory.path().join("tree/real")).unwrap(), "old");
    assert_eq!(fs::read_to_string(directory.path().join("tree/f")).unwrap(), "new");
    assert!(fs::symlink_metadata(directory.path().join("tree/f")).unwrap().is_file());
}

#[test]
fn sizes_and_counts_are_bounded() {
    let layer = Tar::new().file("a", &"x".repeat(5000)).file("b", "").bytes();
    let (_directory, result) = apply_within(vec![layer.clone()], Limits { bytes: 3000, ..Limits::default() });
    assert!(matches!(result, Err(Error::Io { source, .. }) if source.to_string().contains("larger than is allowed")));
    let (_directory, result) = apply_within(vec![layer.clone()], Limits { entries: 1, ..Limits::default() });
    assert!(matches!(result, Err(Error::Refused { .. })));
    let (_directory, result) = apply_within(vec![layer], Limits { entries: 2, ..Limits::default() });
    result.unwrap();
}

#[test]
fn a_huge_extended_header_is_refused_before_it_is_read() {
    let mut header = Header::new_gnu();
    header.set_path("x").unwrap();
    header.set_entry_type(EntryType::GNULongName);
    header.set_size(8 << 30);
    header.set_cksum();
    let mut endless = header.as_bytes().chain(io::repeat(b'a'));
    let directory = tempfile::tempdir().unwrap();
    let mut tree = Tree::open(directory.path()).unwrap();
    let result = apply_layer(&mut tree, &mut endless, &mut Limits { bytes: 16 << 20, ..Limits::default() });
    assert!(matches!(result, Err(Error::Refused { why, .. }) if why.contains("too large")));
}

#[test]
fn odd_entries_are_refused_or_left_out() {
    refusal(vec![Tar::new().entry(EntryType::GNUSparse, "s", "", 0o644, b"").bytes()]);
    refusal(vec![Tar::new().entry(EntryType::new(b'Z'), "z", "", 0o644, b"").bytes()]);
    refusal(vec![Tar::new().file(".wh.", "").bytes()]);
    refusal(vec![Tar::new().file("d/.wh...", "").bytes()]);
    let (directory, result) =
        apply(vec![Tar::new().entry(EntryType::Char, "dev/null", "", 0o666, b"").entry(EntryType::Fifo, "pipe", "", 0o644, b"").bytes()]);
    assert_eq!(result.unwrap(), 2);
    assert_eq!(fs::read_dir(directory.path().join("tree")).unwrap().count(), 0);
}

#[test]
fn a_torn_archive_is_refused() {
    let whole = Tar::new().file("a", &"x".repeat(2000)).bytes();
    let (_directory, result) = apply(vec![whole[..1500].to_vec()]);
    assert!(result.is_err());
    let (_directory, result) = apply(vec![b"this is not an archive".repeat(100)]);
    assert!(result.is_err());
}

#[test]
fn whiteouts_hide_what_is_below_and_nothing_of_their_own_layer() {
    let below = Tar::new().dir("d").file("d/old", "1").file("d/both", "old").dir("gone").file("gone/x/y", "1").file("f", "1").bytes();
    let above = Tar::new()
        .file("d/new", "2")
        .file("d/.wh..wh..opq", "")
        .file("d/both", "new")
        .file(".wh.gone", "")
        .file(".wh.f", "")
        .file(".wh.missing", "")
        .bytes();
    let (directory, result) = apply(vec![below, above]);
    result.unwrap();
    let tree = directory.path().join("tree");
    let mut names: Vec<_> = fs::read_dir(tree.join("d")).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    assert_eq!(names, ["both", "new"]);
    assert_eq!(fs::read_to_string(tree.join("d/both")).unwrap(), "new");
    assert!(!tree.join("gone").exists() && !tree.join("f").exists());
}

#[test]
fn a_directory_that_is_removed_and_made_again_in_one_layer_has_only_its_new_content() {
    let below = Tar::new().dir("d").file("d/old", "1").bytes();
    let (directory, result) = apply(vec![below, Tar::new().dir("d").file("d/new", "2").file(".wh.d", "").bytes()]);
    result.unwrap();
    assert!(directory.path().join("tree/d/new").exists());
    assert!(!directory.path().join("tree/d/old").exists());
}

#[test]
fn hard_links_stay_one_file_also_across_layers() {
    let (directory, result) =
        apply(vec![Tar::new().file("a", "x").hard_link("b", "./a").bytes(), Tar::new().hard_link("d/c", "a").file("b", "changed").bytes()]);
    result.unwrap();
    let tree = directory.path().join("tree");
    assert_eq!(fs::metadata(tree.join("a")).unwrap().ino(), fs::metadata(tree.join("d/c")).unwrap().ino());
    assert_eq!(fs::read_to_string(tree.join("a")).unwrap(), "x");
    assert_eq!(fs::read_to_string(tree.join("b")).unwrap(), "changed");
}

#[test]
fn modes_and_times_are_kept() {
    let layer = Tar::new()
        .entry(EntryType::Directory, "locked", "", 0o555, b"")
        .entry(EntryType::Regular, "locked/su", "", 0o4755, b"x")
        .entry(EntryType::Regular, "secret", "", 0o000, b"x");
    let (directory, result) = apply(vec![layer.symlink("locked/link", "su").bytes()]);
    result.unwrap();
    let look = |name: &str| fs::symlink_metadata(directory.path().join("tree").join(name)).unwrap();
    assert_eq!(look("locked").mode() & 0o7777, 0o555);
    assert_eq!(look("locked/su").mode() & 0o7777, 0o4755);
    assert_eq!(look("secret").mode() & 0o7777, 0o400, "its owner must be able to read it");
    for name in ["locked", "locked/su", "locked/link"] {
        assert_eq!(look(name).mtime(), 1_600_000_000, "{name}");
    }
}

#[test]
fn long_names_of_both_kinds_are_read() {
    let long = format!("{}/{}", "d".repeat(120), "f".repeat(200));
    let mut gnu = Builder::new(Vec::new());
    let mut header = Header::new_gnu();
    header.set_size(1);
    header.set_mode(0o644);
    gnu.append_data(&mut header, &long, &b"g"[..]).unwrap();
    let mut pax = Builder::new(Vec::new());
    let value = [b'\n', 0, 0xff];
    pax.append_pax_extensions([("SCHILY.xattr.security.capability", &value[..]), ("path", b"pax/name"), ("mtime", b"1500000000.25")])
        .unwrap();
    let mut header = Header::new_ustar();
    header.set_path("short").unwrap();
    header.set_size(1);
    header.set_mode(0o644);
    header.set_cksum();
    pax.append(&header, &b"p"[..]).unwrap();
    let (directory, result) = apply(vec![gnu.into_inner().unwrap(), pax.into_inner().unwrap()]);
    result.unwrap();
    let tree = directory.path().join("tree");
    assert_eq!(fs::read_to_string(tree.join(long)).unwrap(), "g");
    assert_eq!(fs::metadata(tree.join("pax/name")).unwrap().mtime(), 1_500_000_000);
}
