//! What is written is read back, in whatever pieces it comes; what others write is understood; what is hostile is refused.

use std::convert::Infallible;

use proptest::prelude::*;

use crate::{
    Decoder, Entry, EntryPath, Extent, Fault, Kind, Limits, Meta, Sink, Summary, Time, Xattr,
    write::{put_end, put_head, put_padding},
};

const ROOM: Limits = Limits { bytes: 1 << 30, content: 1 << 40, entries: 1 << 20 };

/// Entries with the content of files, holes filled.
#[derive(Debug, Default)]
struct Collected {
    entries: Vec<(Entry, Vec<u8>)>,
    ended: usize,
}

impl Sink for Collected {
    type Error = Infallible;

    fn entry(&mut self, entry: Entry) -> Result<(), Infallible> {
        let size = if let Kind::File { size } = entry.kind { size } else { 0 };
        self.entries.push((entry, vec![0; usize::try_from(size).unwrap().min(1 << 24)]));
        Ok(())
    }

    fn data(&mut self, offset: u64, bytes: &[u8]) -> Result<(), Infallible> {
        let offset = usize::try_from(offset).unwrap();
        self.entries.last_mut().unwrap().1[offset..offset + bytes.len()].copy_from_slice(bytes);
        Ok(())
    }

    fn end(&mut self) -> Result<(), Infallible> {
        self.ended += 1;
        Ok(())
    }
}

fn read(archive: &[u8], piece: usize, limits: Limits) -> Result<(Collected, Summary), Fault<Infallible>> {
    let (mut decoder, mut collected) = (Decoder::new(limits), Collected::default());
    for piece in archive.chunks(piece.max(1)) {
        decoder.push(piece, &mut collected)?;
    }
    Ok((collected, decoder.finish()?))
}

fn path(text: &[u8]) -> EntryPath {
    EntryPath::parse(text).unwrap()
}

fn file(name: &[u8], content: &[u8]) -> (Entry, Vec<u8>) {
    (Entry { path: path(name), kind: Kind::File { size: content.len() as u64 }, meta: Meta::default() }, content.to_vec())
}

fn archive(entries: &[(Entry, Vec<u8>)]) -> Vec<u8> {
    let mut out = Vec::new();
    for (entry, content) in entries {
        put_head(&mut out, entry, None);
        out.extend_from_slice(content);
        put_padding(&mut out, content.len() as u64);
    }
    put_end(&mut out);
    out
}

fn components() -> impl Strategy<Value = Vec<u8>> {
    let component = prop_oneof![
        proptest::collection::vec(prop_oneof![Just(b'a'), Just(b' '), Just(b'\n'), Just(0xff)], 1..120),
        Just(b".wh.literal".to_vec()),
        Just(b".wh..wh..opq".to_vec()),
    ];
    proptest::collection::vec(component, 1..6).prop_map(|components| components.join(&b'/'))
}

fn kinds() -> impl Strategy<Value = Kind> {
    prop_oneof![
        (0u64..3000).prop_map(|size| Kind::File { size }),
        Just(Kind::Directory),
        proptest::collection::vec(1u8..255, 1..200).prop_map(|target| Kind::Symlink { target }),
        components().prop_map(|target| Kind::HardLink { target: path(&target) }),
        Just(Kind::Fifo),
        Just(Kind::Whiteout),
        Just(Kind::Opaque),
    ]
}

fn entries() -> impl Strategy<Value = (Entry, Vec<u8>)> {
    let meta = (0u32..0o10000, any::<u32>(), any::<u32>(), -10_000_000_000i64..100_000_000_000, 0u32..1_000_000_000, any::<[u8; 20]>());
    (components(), kinds(), meta).prop_map(|(name, kind, (mode, uid, gid, seconds, nanos, value))| {
        let time = Time { seconds, nanos };
        let xattrs = vec![Xattr { name: b"user.x".to_vec(), value: value.to_vec() }];
        let content = if let Kind::File { size } = kind { value.iter().copied().cycle().take(size as usize).collect() } else { Vec::new() };
        (Entry { path: path(&name), kind, meta: Meta { mode, uid, gid, mtime: time, atime: Some(time), xattrs } }, content)
    })
}

proptest! {
    #[test]
    fn what_is_written_is_read_back_however_it_is_cut(entries in proptest::collection::vec(entries(), 0..12), piece in 1usize..2000) {
        let bytes = archive(&entries);
        prop_assert_eq!(bytes.len() % 512, 0);
        let (collected, summary) = read(&bytes, piece, ROOM).unwrap();
        prop_assert_eq!(summary.entries, entries.len() as u64);
        prop_assert_eq!(collected.entries, entries);
    }

    #[test]
    fn an_archive_that_is_cut_off_is_never_taken_for_a_whole_one(entries in proptest::collection::vec(entries(), 1..4), cut in any::<prop::sample::Index>()) {
        let bytes = archive(&entries);
        let whole = bytes.len() - 1024;
        prop_assert!(read(&bytes[..cut.index(whole)], 512, ROOM).is_err());
    }

    #[test]
    fn whatever_comes_no_bound_is_passed(bytes in proptest::collection::vec(any::<u8>(), 0..4096), piece in 1usize..600) {
        let limits = Limits { bytes: 3000, content: 1000, entries: 3 };
        if let Ok((_, summary)) = read(&bytes, piece, limits) {
            prop_assert!(summary.bytes <= 3000 && summary.content <= 1000 && summary.entries <= 3);
        }
    }
}

#[test]
fn holes_are_not_written_and_come_back() {
    let mut content = vec![0; 1 << 20];
    content[300_000..300_010].fill(7);
    content[(1 << 20) - 1] = 9;
    let mut scan = crate::Scan::default();
    content.chunks(64 * 1024).for_each(|piece| scan.push(piece));
    let extents = scan.finish(65_536).unwrap();
    assert_eq!(extents, [Extent { offset: 299_008, length: 4096 }, Extent { offset: (1 << 20) - 4096, length: 4096 }]);
    let (entry, _) = file(b"dir/holes", &content);
    let mut out = Vec::new();
    put_head(&mut out, &entry, Some(&extents));
    for extent in &extents {
        let start = usize::try_from(extent.offset).unwrap();
        out.extend_from_slice(&content[start..start + 4096]);
    }
    put_padding(&mut out, 8192);
    put_end(&mut out);
    assert!(out.len() < 16 * 1024);
    for piece in [1, 511, 512, 4096, 100_000] {
        let (collected, summary) = read(&out, piece, ROOM).unwrap();
        assert_eq!(collected.entries, [(entry.clone(), content.clone())]);
        assert_eq!((summary.content, collected.ended), (1 << 20, 1));
    }
}

#[test]
fn a_file_that_is_all_hole_and_one_of_many_parts_are_read() {
    let mut out = Vec::new();
    let (entry, _) = file(b"hole", &[0; 5000]);
    put_head(&mut out, &entry, Some(&[]));
    put_end(&mut out);
    let (collected, _) = read(&out, 512, ROOM).unwrap();
    assert_eq!(collected.entries[0].1, [0; 5000]);
    let mut scan = crate::Scan::default();
    for page in 0..3 * crate::MAX_EXTENTS {
        scan.push(&[u8::from(page % 2 == 0); 4096]);
    }
    assert_eq!(scan.finish(1).unwrap().len(), crate::MAX_EXTENTS);
}

/// The form that docker and GNU tar write.
#[test]
fn archives_of_others_are_understood() {
    let mut builder = tar::Builder::new(Vec::new());
    let mut add = |name: &str, kind: tar::EntryType, link: Option<&str>, data: &[u8]| {
        let mut header = tar::Header::new_gnu();
        header.set_entry_type(kind);
        header.set_size(data.len() as u64);
        header.set_mode(0o644);
        header.set_mtime(5);
        match link {
            Some(link) => builder.append_link(&mut header, name, link).unwrap(),
            None => builder.append_data(&mut header, name, data).unwrap(),
        }
    };
    let long = "l/".repeat(90) + "name";
    add("dir/", tar::EntryType::Directory, None, b"");
    add("dir/file", tar::EntryType::Regular, None, b"content");
    add(&long, tar::EntryType::Regular, None, b"long");
    add("dir/link", tar::EntryType::Symlink, Some(&"t".repeat(150)), b"");
    add("dir/hard", tar::EntryType::Link, Some("dir/file"), b"");
    add("dir/.wh.gone", tar::EntryType::Regular, None, b"");
    add("dir/.wh..wh..opq", tar::EntryType::Regular, None, b"");
    add("dev/null", tar::EntryType::Char, None, b"");
    add("dir/.wh..wh.plnk", tar::EntryType::Regular, None, b"");
    let bytes = builder.into_inner().unwrap();
    let (collected, summary) = read(&bytes, 777, ROOM).unwrap();
    let found: Vec<(String, Kind)> = collected.entries.iter().map(|(entry, _)| (entry.path.to_string(), entry.kind.clone())).collect();
    let expected = [
        ("/dir".to_owned(), Kind::Directory),
        ("/dir/file".to_owned(), Kind::File { size: 7 }),
        (format!("/{long}"), Kind::File { size: 4 }),
        ("/dir/link".to_owned(), Kind::Symlink { target: vec![b't'; 150] }),
        ("/dir/hard".to_owned(), Kind::HardLink { target: path(b"dir/file") }),
        ("/dir/gone".to_owned(), Kind::Whiteout),
        ("/dir".to_owned(), Kind::Opaque),
    ];
    assert_eq!(found, expected);
    assert_eq!((summary.entries, summary.left_out), (9, 2));
}

#[test]
fn another_reader_understands_what_is_written() {
    let long = [b"x/".repeat(80), b"end".to_vec()].concat();
    let entries = [file(b"short", b"one"), file(&long, b"two"), file(b".wh.literal", b"three")];
    let bytes = archive(&entries);
    let mut archive = tar::Archive::new(&bytes[..]);
    let names: Vec<Vec<u8>> = archive.entries().unwrap().map(|entry| entry.unwrap().path_bytes().into_owned()).collect();
    assert_eq!(names, [b"short".to_vec(), long, b".wh.literal".to_vec()]);
}

#[test]
fn what_leads_outside_or_lies_is_refused() {
    let refused = |change: fn(&mut Vec<u8>)| {
        let mut bytes = archive(&[file(b"aa/bb", b"content")]);
        change(&mut bytes);
        let mut sum = [0; 512];
        sum.copy_from_slice(&bytes[..512]);
        let sum = crate::header::checksum(&sum);
        bytes[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
        read(&bytes, 512, ROOM).unwrap_err().to_string()
    };
    assert!(refused(|bytes| bytes[..5].copy_from_slice(b"../bb")).contains(".."));
    assert!(refused(|bytes| bytes[..5].copy_from_slice(b"/a/bb")).contains("absolute"));
    assert!(refused(|bytes| bytes[..7].copy_from_slice(b"a/.wh..")).contains("no name"));
    assert!(refused(|bytes| bytes[156] = b'S').contains("unknown kind"));
    assert!(refused(|bytes| bytes[156] = b'1').contains("target"));
    assert!(refused(|bytes| bytes[124] = b'9').contains("size"));
    // Binary, and longer than anything: it does not fit, and nothing is set aside for it.
    assert!(refused(|bytes| bytes[124..136].fill(0xff)).contains("size"));
    assert!(
        refused(|bytes| bytes[124..136].copy_from_slice(&[0x80, 0, 0, 0, 0x7f, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff]))
            .contains("larger")
    );
    let mut bytes = archive(&[file(b"aa", b"content")]);
    bytes[0] = b'b';
    assert!(read(&bytes, 512, ROOM).unwrap_err().to_string().contains("checksum"));
}

#[test]
fn extensions_without_end_are_refused() {
    let mut pax = Vec::new();
    let meta = Meta { xattrs: vec![Xattr { name: b"user.x".to_vec(), value: vec![1; 60_000] }], ..Meta::default() };
    put_head(&mut pax, &Entry { path: path(b"a"), kind: Kind::Fifo, meta }, None);
    pax.truncate(pax.len() - 512);
    let bytes = pax.repeat(100);
    assert!(read(&bytes, 4096, ROOM).unwrap_err().to_string().contains("too large"));
}

#[test]
fn what_follows_behind_the_end_is_bounded() {
    let mut whole = archive(&[file(b"one", b"content")]);
    whole.resize(whole.len() + (1 << 20) - 1024, 7);
    assert_eq!(read(&whole, 4096, ROOM).unwrap().0.entries.len(), 1, "as much as programs fill up with");
    whole.resize(whole.len() + 1024, 0);
    assert!(matches!(read(&whole, 4096, ROOM), Err(Fault::Refused { .. })));
}
