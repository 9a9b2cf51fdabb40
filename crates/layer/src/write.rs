//! Entries to bytes. Who calls this writes a head, then the content of a file, then [`put_padding`]; at last [`put_end`].

use crate::{
    BLOCK, Entry, Extent, Kind, LITERAL, OPAQUE, Time, WHITEOUT, XATTR,
    header::{self, Block, put_number},
    sparse,
};

/// What precedes the content of an entry. `extents`: of a file with holes, the parts that are not, whose bytes alone follow.
pub fn put_head(out: &mut Vec<u8>, entry: &Entry, extents: Option<&[Extent]>) {
    let path = path_of(entry);
    let mut records = Records::default();
    let mut block: Block = [0; BLOCK];
    let (kind, mut size) = match &entry.kind {
        Kind::File { size } => (b'0', *size),
        Kind::Directory => (b'5', 0),
        Kind::Symlink { .. } => (b'2', 0),
        Kind::HardLink { .. } => (b'1', 0),
        Kind::Fifo => (b'6', 0),
        Kind::Whiteout | Kind::Opaque => (b'0', 0),
    };
    let mut map = Vec::new();
    let mut name = path.clone();
    if let Some(extents) = extents {
        map = sparse::map(extents, size);
        records.add("GNU.sparse.major", b"1");
        records.add("GNU.sparse.minor", b"0");
        records.add("GNU.sparse.name", &path);
        records.add("GNU.sparse.realsize", size.to_string().as_bytes());
        size = map.len() as u64 + extents.iter().map(|extent| extent.length).sum::<u64>();
        // For who does not know this form: the file is not what it seems.
        let (parent, file) = path.iter().rposition(|byte| *byte == b'/').map_or((&b""[..], &path[..]), |at| path.split_at(at + 1));
        name = [parent, b"GNUSparseFile.0/", file].concat();
    }
    if name.len() <= header::NAME.len() {
        block[..name.len()].copy_from_slice(&name);
    } else {
        records.add("path", &name);
        block[header::NAME].copy_from_slice(&name[..header::NAME.len()]);
    }
    let link = match &entry.kind {
        Kind::Symlink { target } => &target[..],
        Kind::HardLink { target } => target.as_bytes(),
        _ => b"",
    };
    let shown = link.len().min(header::LINK.len());
    block[header::LINK.start..header::LINK.start + shown].copy_from_slice(&link[..shown]);
    if link.len() > shown {
        records.add("linkpath", link);
    }
    let meta = &entry.meta;
    for (field, name, value) in [
        (header::MODE, "mode", u64::from(meta.mode & 0o7777)),
        (header::UID, "uid", u64::from(meta.uid)),
        (header::GID, "gid", u64::from(meta.gid)),
        (header::SIZE, "size", size),
    ] {
        if !put_number(&mut block[field], value) {
            records.add(name, value.to_string().as_bytes());
        }
    }
    let whole =
        meta.mtime.nanos == 0 && u64::try_from(meta.mtime.seconds).is_ok_and(|seconds| put_number(&mut block[header::MTIME], seconds));
    if !whole {
        put_number(&mut block[header::MTIME], 0);
        records.add("mtime", time(meta.mtime).as_bytes());
    }
    if let Some(atime) = meta.atime {
        records.add("atime", time(atime).as_bytes());
    }
    for xattr in &meta.xattrs {
        records.add_bytes(&[XATTR.as_bytes(), &xattr.name].concat(), &xattr.value);
    }
    if entry.path.name().is_some_and(|name| name.starts_with(WHITEOUT)) && entry.kind != Kind::Opaque {
        records.add(LITERAL, if entry.kind == Kind::Whiteout { b"2" } else { b"1" });
    }
    if !records.0.is_empty() {
        let mut before: Block = [0; BLOCK];
        before[..PAX_NAME.len()].copy_from_slice(PAX_NAME);
        put_number(&mut before[header::MODE], 0o644);
        put_number(&mut before[header::UID], 0);
        put_number(&mut before[header::GID], 0);
        put_number(&mut before[header::SIZE], records.0.len() as u64);
        put_number(&mut before[header::MTIME], 0);
        finish(out, &mut before, b'x');
        out.extend_from_slice(&records.0);
        put_padding(out, records.0.len() as u64);
    }
    finish(out, &mut block, kind);
    out.extend_from_slice(&map);
}

const PAX_NAME: &[u8] = b"././@PaxHeader";

/// Zeros up to the next block, behind so many bytes of content.
pub fn put_padding(out: &mut Vec<u8>, bytes: u64) {
    let over = (bytes % BLOCK as u64) as usize;
    if over > 0 {
        out.resize(out.len() + BLOCK - over, 0);
    }
}

/// The end of the archive.
pub fn put_end(out: &mut Vec<u8>) {
    out.resize(out.len() + 2 * BLOCK, 0);
}

fn finish(out: &mut Vec<u8>, block: &mut Block, kind: u8) {
    block[header::KIND] = kind;
    block[header::MAGIC].copy_from_slice(header::POSIX);
    let sum = header::checksum(block);
    // Six digits, a zero, a space: the sum of 512 bytes is below 8^6.
    block[header::CHECKSUM].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
    out.extend_from_slice(block);
}

fn path_of(entry: &Entry) -> Vec<u8> {
    let path = entry.path.as_bytes();
    let inside = |name: &[u8]| if path.is_empty() { name.to_vec() } else { [path, b"/", name].concat() };
    match entry.kind {
        Kind::Directory if path.is_empty() => b"./".to_vec(),
        Kind::Directory => [path, b"/"].concat(),
        Kind::Opaque => inside(OPAQUE),
        Kind::Whiteout => {
            let name = entry.path.name().unwrap_or_default();
            [&path[..path.len() - name.len()], WHITEOUT, name].concat()
        }
        _ => path.to_vec(),
    }
}

fn time(time: Time) -> String {
    if time.seconds < 0 && time.nanos > 0 {
        // Before 1970: -0.25 is the last quarter of the second before.
        return format!("-{}.{:09}", -(time.seconds + 1), 1_000_000_000 - time.nanos);
    }
    if time.nanos == 0 { time.seconds.to_string() } else { format!("{}.{:09}", time.seconds, time.nanos) }
}

/// Records of a pax header: `LENGTH KEY=VALUE\n`, the length counting itself.
#[derive(Default)]
struct Records(Vec<u8>);

impl Records {
    fn add(&mut self, key: &str, value: &[u8]) {
        self.add_bytes(key.as_bytes(), value);
    }

    fn add_bytes(&mut self, key: &[u8], value: &[u8]) {
        let rest = key.len() + value.len() + 3;
        let mut length = rest;
        while length != rest + digits(length) {
            length = rest + digits(length);
        }
        self.0.extend_from_slice(length.to_string().as_bytes());
        self.0.push(b' ');
        self.0.extend_from_slice(key);
        self.0.push(b'=');
        self.0.extend_from_slice(value);
        self.0.push(b'\n');
    }
}

fn digits(number: usize) -> usize {
    number.checked_ilog10().unwrap_or(0) as usize + 1
}
