//! Bytes to entries, as they come. Nothing of an archive is held but a header and what extends it.

mod extensions;

use self::extensions::Extensions;
use crate::{
    BLOCK, Entry, EntryPath, Extent, Kind, Meta, OPAQUE, PathFault, Time, WHITEOUT, WHITEOUT_META,
    header::{self, Block, number, text},
    sparse::MapReader,
};

/// Pax headers and GNU long names of one entry: paths of 4 KiB and some attributes.
const MAX_EXTENSION_BYTES: u64 = 1 << 20;

/// What may follow behind the end: programs fill up to some size of theirs.
const MAX_BEHIND_BYTES: u64 = 1 << 20;

/// What takes an archive in.
pub trait Sink {
    type Error;

    /// The next entry. The content of a file follows by [`Sink::data`], and ends with [`Sink::end`].
    ///
    /// # Errors
    /// It can't be taken: nothing more comes.
    fn entry(&mut self, entry: Entry) -> Result<(), Self::Error>;

    /// Bytes of the file of the last entry, in order; holes are left out.
    ///
    /// # Errors
    /// They can't be taken.
    fn data(&mut self, offset: u64, bytes: &[u8]) -> Result<(), Self::Error>;

    /// The file of the last entry is whole.
    ///
    /// # Errors
    /// It can't be finished.
    fn end(&mut self) -> Result<(), Self::Error>;
}

/// How large an archive may be.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// Bytes of the archive.
    pub bytes: u64,
    /// Bytes of all files, holes included.
    pub content: u64,
    pub entries: u64,
}

/// What an archive held.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Summary {
    pub bytes: u64,
    /// Bytes of all files, holes included.
    pub content: u64,
    pub entries: u64,
    /// Devices, which a sandbox has of its own, and bookkeeping of other programs.
    pub left_out: u64,
}

/// Why an archive was not taken.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Fault<E> {
    #[error("{at}: {why}")]
    Refused { at: String, why: String },
    #[error("the archive is larger than is allowed")]
    TooLarge,
    #[error("the archive has more entries than are allowed")]
    TooMany,
    #[error("the archive is cut off")]
    CutOff,
    #[error("{0}")]
    Sink(E),
}

impl<E> Fault<E> {
    fn refused(at: &[u8], why: impl Into<String>) -> Self {
        let at: String = String::from_utf8_lossy(at).chars().take(300).collect();
        Self::Refused { at: if at.is_empty() { "a header".to_owned() } else { at }, why: why.into() }
    }
}

#[derive(Debug)]
enum State {
    /// At a header, of which so much is there.
    Header {
        filled: usize,
    },
    Extension {
        kind: u8,
        data: Vec<u8>,
        left: u64,
    },
    /// The map of a file with holes, block by block, with what to say when it is whole.
    Map {
        entry: Box<Entry>,
        reader: MapReader,
        filled: usize,
        stored: u64,
    },
    /// Within a file: what is left of this part of it, and the parts behind it, the next one last.
    Data {
        offset: u64,
        left: u64,
        then: Vec<Extent>,
        padding: u64,
    },
    Skip {
        left: u64,
    },
    /// Behind the end mark there may be anything, but not much.
    End {
        behind: u64,
    },
}

/// Reads one archive.
#[derive(Debug)]
pub struct Decoder {
    limits: Limits,
    state: State,
    block: Block,
    extensions: Extensions,
    /// Of all extensions of the next entry.
    extended_bytes: u64,
    summary: Summary,
}

impl Decoder {
    #[must_use]
    pub fn new(limits: Limits) -> Self {
        Self {
            limits,
            state: State::Header { filled: 0 },
            block: [0; BLOCK],
            extensions: Extensions::default(),
            extended_bytes: 0,
            summary: Summary::default(),
        }
    }

    /// Takes the next bytes, all of them.
    ///
    /// # Errors
    /// The archive is refused, by this or by the sink. Nothing more may be pushed.
    pub fn push<S: Sink>(&mut self, mut bytes: &[u8], sink: &mut S) -> Result<(), Fault<S::Error>> {
        self.summary.bytes = self.summary.bytes.saturating_add(bytes.len() as u64);
        if self.summary.bytes > self.limits.bytes {
            return Err(Fault::TooLarge);
        }
        while !bytes.is_empty() {
            bytes = self.step(bytes, sink)?;
        }
        Ok(())
    }

    /// That the archive has come to its end.
    ///
    /// # Errors
    /// It has not.
    pub fn finish<E>(self) -> Result<Summary, Fault<E>> {
        if matches!(self.state, State::End { .. }) { Ok(self.summary) } else { Err(Fault::CutOff) }
    }

    /// Takes some bytes, and returns the others.
    fn step<'a, S: Sink>(&mut self, bytes: &'a [u8], sink: &mut S) -> Result<&'a [u8], Fault<S::Error>> {
        match &mut self.state {
            State::End { behind } => {
                *behind = behind.saturating_add(bytes.len() as u64);
                if *behind > MAX_BEHIND_BYTES {
                    return Err(Fault::refused(b"the archive", "too much behind its end"));
                }
                Ok(&[])
            }
            State::Skip { left } => {
                let (taken, rest) = cut(bytes, *left);
                *left -= taken.len() as u64;
                if *left == 0 {
                    self.state = State::Header { filled: 0 };
                }
                Ok(rest)
            }
            State::Header { filled } => {
                let (taken, rest) = cut(bytes, (BLOCK - *filled) as u64);
                self.block[*filled..*filled + taken.len()].copy_from_slice(taken);
                *filled += taken.len();
                if *filled == BLOCK {
                    self.state = State::Header { filled: 0 };
                    self.header(sink)?;
                }
                Ok(rest)
            }
            State::Extension { data, left, .. } => {
                let (taken, rest) = cut(bytes, *left);
                data.extend_from_slice(taken);
                *left -= taken.len() as u64;
                if *left == 0 {
                    self.extended()?;
                }
                Ok(rest)
            }
            State::Map { filled, .. } => {
                let (taken, rest) = cut(bytes, (BLOCK - *filled) as u64);
                self.block[*filled..*filled + taken.len()].copy_from_slice(taken);
                *filled += taken.len();
                if *filled == BLOCK {
                    self.mapped(sink)?;
                }
                Ok(rest)
            }
            State::Data { offset, left, .. } => {
                let (taken, rest) = cut(bytes, *left);
                sink.data(*offset, taken).map_err(Fault::Sink)?;
                *offset += taken.len() as u64;
                *left -= taken.len() as u64;
                if *left == 0 {
                    self.next_part(sink)?;
                }
                Ok(rest)
            }
        }
    }

    fn header<S: Sink>(&mut self, sink: &mut S) -> Result<(), Fault<S::Error>> {
        if self.block.iter().all(|byte| *byte == 0) {
            self.state = State::End { behind: 0 };
            return Ok(());
        }
        let name = text(&self.block[header::NAME]);
        let bad = |why: &str| Fault::refused(name, why);
        let sum = number(&self.block[header::CHECKSUM]).ok_or_else(|| bad("its header is malformed"))?;
        if sum != header::checksum(&self.block) {
            return Err(bad("the checksum of its header is wrong"));
        }
        let kind = self.block[header::KIND];
        let size = number(&self.block[header::SIZE]).ok_or_else(|| bad("its size is malformed"))?;
        match kind {
            b'x' | b'L' | b'K' => {
                self.extended_bytes = self.extended_bytes.saturating_add(size);
                if self.extended_bytes > MAX_EXTENSION_BYTES {
                    return Err(bad("an extended header is too large"));
                }
                self.state = State::Extension { kind, data: Vec::new(), left: size };
                if size == 0 {
                    self.extended()?;
                }
                return Ok(());
            }
            // What holds for all entries is of no use here: none of it is a name or a size.
            b'g' => return self.skip(size, name.to_vec()),
            _ => {}
        }
        self.summary.entries += 1;
        if self.summary.entries > self.limits.entries {
            return Err(Fault::TooMany);
        }
        let known = std::mem::take(&mut self.extensions);
        self.extended_bytes = 0;
        self.entry(kind, known.size.unwrap_or(size), known, sink)
    }

    fn entry<S: Sink>(&mut self, kind: u8, size: u64, known: Extensions, sink: &mut S) -> Result<(), Fault<S::Error>> {
        let path = known.sparse_name.clone().or_else(|| known.path.clone()).unwrap_or_else(|| self.path());
        let refuse = |why: String| Fault::refused(&path, why);
        let fault = |fault: PathFault| refuse(fault.to_string());
        let malformed = |what: &str| refuse(format!("its {what} is malformed"));
        let field = |known: Option<u32>, field: std::ops::Range<usize>| {
            known.map(u64::from).or_else(|| number(&self.block[field])).and_then(|number| u32::try_from(number).ok())
        };
        let meta = Meta {
            mode: field(None, header::MODE).ok_or_else(|| malformed("mode"))? & 0o7777,
            uid: field(known.uid, header::UID).ok_or_else(|| malformed("owner"))?,
            gid: field(known.gid, header::GID).ok_or_else(|| malformed("group"))?,
            mtime: match known.mtime {
                Some(mtime) => mtime,
                None => number(&self.block[header::MTIME])
                    .and_then(|seconds| i64::try_from(seconds).ok())
                    .map(|seconds| Time { seconds, nanos: 0 })
                    .unwrap_or_default(),
            },
            atime: known.atime,
            xattrs: known.xattrs,
        };
        let link = || known.link.clone().unwrap_or_else(|| text(&self.block[header::LINK]).to_vec());
        let trimmed = path.strip_suffix(b"/").unwrap_or(&path);
        let at = trimmed.iter().rposition(|byte| *byte == b'/').map_or(0, |at| at + 1);
        let (parent, name) = trimmed.split_at(at);
        // Old archives say that something is a directory by its name alone.
        let is_file = matches!(kind, b'0' | 0 | b'7') && !path.ends_with(b"/");
        let hidden = name.strip_prefix(WHITEOUT).filter(|_| is_file && !known.literal);
        if let Some(hidden) = hidden {
            let (path, kind) = match name {
                _ if known.literal_whiteout => ([parent, hidden].concat(), Kind::Whiteout),
                OPAQUE => (if parent.is_empty() { b".".to_vec() } else { parent.to_vec() }, Kind::Opaque),
                name if name.starts_with(WHITEOUT_META) => return self.leave_out(size, path),
                _ if matches!(hidden, b"" | b"." | b"..") => return Err(refuse("a deletion of no name".to_owned())),
                _ => ([parent, hidden].concat(), Kind::Whiteout),
            };
            let path = EntryPath::parse(&path).map_err(fault)?;
            sink.entry(Entry { path, kind, meta }).map_err(Fault::Sink)?;
            return self.skip(size, trimmed.to_vec());
        }
        let parsed = EntryPath::parse(&path).map_err(fault)?;
        let kind = match kind {
            _ if is_file => Kind::File { size: known.real_size.unwrap_or(size) },
            b'0' | 0 | b'7' | b'5' => Kind::Directory,
            b'2' => {
                let target = link();
                if target.is_empty() || target.len() > MAX_LINK_BYTES || target.contains(&0) {
                    return Err(refuse("a symbolic link to nowhere".to_owned()));
                }
                Kind::Symlink { target }
            }
            b'1' => Kind::HardLink { target: EntryPath::parse(&link()).map_err(|fault| refuse(format!("its target is {fault}")))? },
            b'6' => Kind::Fifo,
            // A sandbox has a /dev of its own.
            b'3' | b'4' => return self.leave_out(size, path),
            other => return Err(refuse(format!("an entry of the unknown kind {:?}", char::from(other)))),
        };
        if parsed.is_root() && kind != Kind::Directory {
            return Err(refuse("something else than a directory in the place of the root".to_owned()));
        }
        let Kind::File { size: content } = kind else {
            sink.entry(Entry { path: parsed, kind, meta }).map_err(Fault::Sink)?;
            return self.skip(size, path);
        };
        self.summary.content = self.summary.content.saturating_add(content);
        if self.summary.content > self.limits.content {
            return Err(Fault::TooLarge);
        }
        let entry = Entry { path: parsed, kind, meta };
        if known.sparse {
            if known.real_size.is_none() || !known.sparse_is_1_0 {
                return Err(refuse("a sparse file in another form than GNU's 1.0".to_owned()));
            }
            self.state = State::Map { entry: Box::new(entry), reader: MapReader::default(), filled: 0, stored: size };
            return Ok(());
        }
        sink.entry(entry).map_err(Fault::Sink)?;
        self.state = State::Data { offset: 0, left: size, then: Vec::new(), padding: padding(size) };
        if size == 0 { self.next_part(sink) } else { Ok(()) }
    }

    /// A block of the map of a file with holes.
    fn mapped<S: Sink>(&mut self, sink: &mut S) -> Result<(), Fault<S::Error>> {
        let State::Map { entry, mut reader, stored, .. } = std::mem::replace(&mut self.state, State::End { behind: 0 }) else {
            return Ok(());
        };
        let Kind::File { size } = entry.kind else { return Ok(()) };
        let bad = |why: &str| Fault::refused(entry.path.as_bytes(), why);
        if !reader.push(&self.block, size).map_err(bad)? {
            self.state = State::Map { entry, reader, filled: 0, stored };
            return Ok(());
        }
        let (mut extents, map) = reader.finish();
        let data: u64 = extents.iter().map(|extent| extent.length).sum();
        if map.checked_add(data) != Some(stored) {
            return Err(bad("its map does not fit its size"));
        }
        extents.reverse();
        sink.entry(*entry).map_err(Fault::Sink)?;
        self.state = State::Data { offset: 0, left: 0, then: extents, padding: padding(stored) };
        self.next_part(sink)
    }

    /// Goes on with the next part of a file, or with what is behind it.
    fn next_part<S: Sink>(&mut self, sink: &mut S) -> Result<(), Fault<S::Error>> {
        let State::Data { offset, left, then, padding } = &mut self.state else { return Ok(()) };
        if let Some(part) = then.pop() {
            (*offset, *left) = (part.offset, part.length);
            return Ok(());
        }
        let padding = *padding;
        self.state = if padding == 0 { State::Header { filled: 0 } } else { State::Skip { left: padding } };
        sink.end().map_err(Fault::Sink)
    }

    fn extended<E>(&mut self) -> Result<(), Fault<E>> {
        let State::Extension { kind, data, .. } = std::mem::replace(&mut self.state, State::Header { filled: 0 }) else { return Ok(()) };
        let padding = padding(data.len() as u64);
        if padding > 0 {
            self.state = State::Skip { left: padding };
        }
        match kind {
            b'L' => self.extensions.path = Some(text(&data).to_vec()),
            b'K' => self.extensions.link = Some(text(&data).to_vec()),
            _ => self.extensions.read_pax(&data).map_err(|why| Fault::refused(b"an extended header", why))?,
        }
        Ok(())
    }

    fn leave_out<E>(&mut self, size: u64, path: Vec<u8>) -> Result<(), Fault<E>> {
        self.summary.left_out += 1;
        self.skip(size, path)
    }

    fn skip<E>(&mut self, size: u64, path: Vec<u8>) -> Result<(), Fault<E>> {
        let left = size.checked_add(padding(size)).ok_or_else(|| Fault::refused(&path, "its size is malformed"))?;
        self.state = if left == 0 { State::Header { filled: 0 } } else { State::Skip { left } };
        Ok(())
    }

    fn path(&self) -> Vec<u8> {
        let name = text(&self.block[header::NAME]);
        let prefix = if self.block[header::MAGIC] == header::POSIX[..] { text(&self.block[header::PREFIX]) } else { b"" };
        if prefix.is_empty() { name.to_vec() } else { [prefix, b"/", name].concat() }
    }
}

/// What the kernel takes.
const MAX_LINK_BYTES: usize = 4095;

fn cut(bytes: &[u8], at_most: u64) -> (&[u8], &[u8]) {
    bytes.split_at(usize::try_from(at_most).unwrap_or(usize::MAX).min(bytes.len()))
}

fn padding(size: u64) -> u64 {
    (BLOCK as u64 - size % BLOCK as u64) % BLOCK as u64
}
