//! Reads tar archives entry by entry with everything bounded. The `tar` crate's own handling of long names and PAX headers reads them into memory whatever
//! their size, so it is used for the plain blocks only.

use std::io::{self, Read};

use tar::{Archive, EntryType};

use crate::error::{Doing, Error, Result};

/// A PAX header or a GNU long name: paths of 4 KiB and some attributes.
const MAX_EXTENSION_BYTES: u64 = 1 << 20;

/// One entry, as far as an image cares.
pub(crate) struct RawEntry {
    pub(crate) path: Vec<u8>,
    pub(crate) link: Option<Vec<u8>>,
    pub(crate) kind: EntryType,
    pub(crate) mode: u32,
    pub(crate) mtime: u64,
    pub(crate) size: u64,
    /// Where its content begins in the archive.
    pub(crate) position: u64,
}

impl RawEntry {
    pub(crate) fn shown_path(&self) -> String {
        String::from_utf8_lossy(&self.path).chars().take(300).collect()
    }
}

/// What extension headers say about the entry behind them.
#[derive(Default)]
struct Extensions {
    path: Option<Vec<u8>>,
    link: Option<Vec<u8>>,
    size: Option<u64>,
    mtime: Option<u64>,
    sparse: bool,
}

/// Calls `visit` for every entry with a reader of its content.
pub(crate) fn for_each_entry<R: Read>(reader: R, mut visit: impl FnMut(&RawEntry, &mut dyn Read) -> Result<()>) -> Result<()> {
    let mut archive = Archive::new(reader);
    let mut extensions = Extensions::default();
    let reading = || "read the archive".to_owned();
    for entry in archive.entries().doing(reading)?.raw(true) {
        let mut entry = entry.doing(reading)?;
        let header = entry.header();
        let kind = header.entry_type();
        match kind {
            EntryType::XGlobalHeader => continue,
            EntryType::XHeader => {
                let data = read_extension(&mut entry)?;
                extensions.read_pax(&data)?;
                continue;
            }
            EntryType::GNULongName => {
                extensions.path = Some(without_nul(read_extension(&mut entry)?));
                continue;
            }
            EntryType::GNULongLink => {
                extensions.link = Some(without_nul(read_extension(&mut entry)?));
                continue;
            }
            _ => {}
        }
        let known = std::mem::take(&mut extensions);
        let raw = RawEntry {
            path: known.path.unwrap_or_else(|| header.path_bytes().into_owned()),
            link: known.link.or_else(|| header.link_name_bytes().map(|name| name.into_owned())),
            kind,
            mode: header.mode().doing(reading)?,
            mtime: known.mtime.or_else(|| header.mtime().ok()).unwrap_or(0),
            size: entry.size(),
            position: entry.raw_file_position(),
        };
        if known.sparse || kind.is_gnu_sparse() {
            return Err(Error::refused(raw.shown_path(), "a sparse file; write the archive without them"));
        }
        // Only files of 8 GiB and more need the extension, and two readers that disagree on a size would see two different archives.
        if known.size.is_some_and(|size| size != raw.size) {
            return Err(Error::refused(raw.shown_path(), "its two sizes differ"));
        }
        visit(&raw, &mut entry)?;
    }
    Ok(())
}

fn read_extension(entry: &mut impl Read) -> Result<Vec<u8>> {
    let mut data = Vec::new();
    entry.take(MAX_EXTENSION_BYTES + 1).read_to_end(&mut data).doing(|| "read the archive")?;
    if data.len() as u64 > MAX_EXTENSION_BYTES {
        return Err(Error::refused("extended header", "it is too large"));
    }
    Ok(data)
}

fn without_nul(mut name: Vec<u8>) -> Vec<u8> {
    if let Some(end) = name.iter().position(|byte| *byte == 0) {
        name.truncate(end);
    }
    name
}

impl Extensions {
    /// Records of the form `LENGTH KEY=VALUE\n`; a value may hold any byte, so the length decides.
    fn read_pax(&mut self, mut data: &[u8]) -> Result<()> {
        let malformed = || Error::refused("extended header", "it is malformed");
        while !data.is_empty() {
            let space = data.iter().position(|byte| *byte == b' ').ok_or_else(malformed)?;
            let length: usize = parse(&data[..space]).ok_or_else(malformed)?;
            let record = data.get(space + 1..length).and_then(|record| record.strip_suffix(b"\n")).ok_or_else(malformed)?;
            data = &data[length..];
            let equals = record.iter().position(|byte| *byte == b'=').ok_or_else(malformed)?;
            let (key, value) = (&record[..equals], &record[equals + 1..]);
            match key {
                b"path" => self.path = Some(value.to_vec()),
                b"linkpath" => self.link = Some(value.to_vec()),
                b"size" => self.size = Some(parse(value).ok_or_else(malformed)?),
                // Seconds with an optional fraction; a time before 1970 becomes 1970.
                b"mtime" => self.mtime = Some(value.split(|byte| *byte == b'.').next().and_then(parse).unwrap_or(0)),
                key if key.starts_with(b"GNU.sparse.") => self.sparse = true,
                _ => {}
            }
        }
        Ok(())
    }
}

fn parse<T: std::str::FromStr>(digits: &[u8]) -> Option<T> {
    std::str::from_utf8(digits).ok()?.parse().ok()
}

/// A reader that fails beyond a bound that several share: no archive unpacks to more than is allowed.
pub(crate) struct Bounded<'a, R> {
    pub(crate) inner: R,
    pub(crate) left: &'a mut u64,
}

impl<R: Read> Read for Bounded<'_, R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let n = self.inner.read(buffer)?;
        match self.left.checked_sub(n as u64) {
            Some(left) => *self.left = left,
            None => return Err(io::Error::other("the image is larger than is allowed")),
        }
        Ok(n)
    }
}
