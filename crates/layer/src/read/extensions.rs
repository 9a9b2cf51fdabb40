//! What extension headers say about the entry behind them.

use crate::{LITERAL, Time, XATTR, Xattr};

const MAX_XATTR_NAME_BYTES: usize = 255;
const MAX_XATTR_BYTES: usize = 64 * 1024;
const NANO_DIGITS: usize = 9;

#[derive(Debug, Default)]
pub(super) struct Extensions {
    pub(super) path: Option<Vec<u8>>,
    pub(super) link: Option<Vec<u8>>,
    pub(super) size: Option<u64>,
    pub(super) uid: Option<u32>,
    pub(super) gid: Option<u32>,
    pub(super) mtime: Option<Time>,
    pub(super) atime: Option<Time>,
    pub(super) xattrs: Vec<Xattr>,
    /// It is really called `.wh.…`.
    pub(super) literal: bool,
    /// It deletes what is called so.
    pub(super) literal_whiteout: bool,
    pub(super) sparse: bool,
    major: bool,
    minor: bool,
    /// The form whose map stands before the content.
    pub(super) sparse_is_1_0: bool,
    pub(super) sparse_name: Option<Vec<u8>>,
    pub(super) real_size: Option<u64>,
}

impl Extensions {
    /// Records of the form `LENGTH KEY=VALUE\n`; a value may hold any byte, so the length decides.
    pub(super) fn read_pax(&mut self, mut data: &[u8]) -> Result<(), &'static str> {
        const MALFORMED: &str = "it is malformed";
        while !data.is_empty() {
            let space = data.iter().take(8).position(|byte| *byte == b' ').ok_or(MALFORMED)?;
            let length: usize = parse(&data[..space]).ok_or(MALFORMED)?;
            let record = data.get(space + 1..length).and_then(|record| record.strip_suffix(b"\n")).ok_or(MALFORMED)?;
            data = &data[length..];
            let equals = record.iter().position(|byte| *byte == b'=').ok_or(MALFORMED)?;
            self.take(&record[..equals], &record[equals + 1..]).ok_or(MALFORMED)?;
        }
        self.sparse_is_1_0 = self.major && self.minor;
        Ok(())
    }

    fn take(&mut self, key: &[u8], value: &[u8]) -> Option<()> {
        match key {
            b"path" => self.path = Some(value.to_vec()),
            b"linkpath" => self.link = Some(value.to_vec()),
            b"size" => self.size = Some(parse(value)?),
            b"uid" => self.uid = Some(parse(value)?),
            b"gid" => self.gid = Some(parse(value)?),
            b"mtime" => self.mtime = Some(time(value)?),
            b"atime" => self.atime = Some(time(value)?),
            b"GNU.sparse.name" => self.sparse_name = Some(value.to_vec()),
            b"GNU.sparse.realsize" => self.real_size = Some(parse(value)?),
            key if key.starts_with(b"GNU.sparse.") => {
                self.sparse = true;
                self.major |= key.ends_with(b".major") && value == b"1";
                self.minor |= key.ends_with(b".minor") && value == b"0";
            }
            key if key == LITERAL.as_bytes() => (self.literal, self.literal_whiteout) = (value == b"1", value == b"2"),
            key => {
                if let Some(name) = key.strip_prefix(XATTR.as_bytes()) {
                    let fits = !name.is_empty() && name.len() <= MAX_XATTR_NAME_BYTES && value.len() <= MAX_XATTR_BYTES;
                    if !fits || name.contains(&0) {
                        return None;
                    }
                    self.xattrs.push(Xattr { name: name.to_vec(), value: value.to_vec() });
                }
            }
        }
        Some(())
    }
}

/// Digits only: what Rust reads besides, tar does not write.
fn parse<T: std::str::FromStr>(digits: &[u8]) -> Option<T> {
    let plain = !digits.is_empty() && digits.iter().all(u8::is_ascii_digit);
    if plain { std::str::from_utf8(digits).ok()?.parse().ok() } else { None }
}

/// Seconds with an optional fraction.
fn time(text: &[u8]) -> Option<Time> {
    let (negative, text) = match text.strip_prefix(b"-") {
        Some(rest) => (true, rest),
        None => (false, text),
    };
    let mut parts = text.splitn(2, |byte| *byte == b'.');
    let seconds: i64 = parse(parts.next()?)?;
    let mut nanos: u32 = 0;
    if let Some(fraction) = parts.next() {
        let fraction = &fraction[..fraction.len().min(NANO_DIGITS)];
        let scale = 10u32.pow(u32::try_from(NANO_DIGITS - fraction.len()).ok()?);
        nanos = if fraction.is_empty() { 0 } else { parse::<u32>(fraction)?.checked_mul(scale)? };
    }
    Some(match (negative, nanos) {
        (false, nanos) => Time { seconds, nanos },
        (true, 0) => Time { seconds: -seconds, nanos },
        (true, nanos) => Time { seconds: -seconds - 1, nanos: 1_000_000_000 - nanos },
    })
}
