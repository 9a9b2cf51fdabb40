//! Links to a port of a sandbox that open it until they expire, for who has no key.
//!
//! They are signed with what only the servers of the sandbox know, the hash of its token: so a link goes on to be good where the sandbox goes, and nothing
//! of it is kept.

use std::fmt;

use ring::hmac;
use sandboxer_protocol::SandboxId;

/// What a link is good for.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Link {
    pub(crate) id: SandboxId,
    pub(crate) port: u16,
    /// Seconds since 1970.
    pub(crate) expires: i64,
}

const OWN_PAGES_BYTES: usize = 16;

impl Link {
    fn text(&self) -> String {
        format!("sandboxer port link 1\n{}\n{}\n{}", self.id, self.port, self.expires)
    }

    /// What opens the port.
    pub(crate) fn sign(&self, token_sha256: &str) -> String {
        let tag = hmac::sign(&key(token_sha256), self.text().as_bytes());
        format!("{}.{}", self.expires, Hex(tag.as_ref()))
    }

    /// When what was given expires, if it opens this port now.
    pub(crate) fn check(id: SandboxId, port: u16, given: &str, token_sha256: &str, now: i64) -> Option<i64> {
        let (expires, tag) = given.split_once('.')?;
        let link = Self { id, port, expires: expires.parse().ok()? };
        let tag = from_hex(tag)?;
        // Without a secret there is nothing to be signed with.
        from_hex(token_sha256)?;
        hmac::verify(&key(token_sha256), link.text().as_bytes(), &tag).ok()?;
        (link.expires > now).then_some(link.expires)
    }
}

/// A part of the path below which the pages of a port know each other. They have no origin of their own
/// and no cookies where a server needs no key, and other pages must not pass for them.
pub(crate) fn own_pages(id: SandboxId, port: u16, token_sha256: &str) -> String {
    let tag = hmac::sign(&key(token_sha256), format!("sandboxer own pages 1\n{id}\n{port}").as_bytes());
    format!("~{}", Hex(&tag.as_ref()[..OWN_PAGES_BYTES]))
}

/// Whether a part of a path looks like one of [`own_pages`], of whichever port.
pub(crate) fn is_own_pages(part: &str) -> bool {
    part.strip_prefix('~').is_some_and(|tag| tag.len() == OWN_PAGES_BYTES * 2 && tag.bytes().all(|byte| byte.is_ascii_hexdigit()))
}

fn key(token_sha256: &str) -> hmac::Key {
    hmac::Key::new(hmac::HMAC_SHA256, token_sha256.as_bytes())
}

struct Hex<'a>(&'a [u8]);

impl fmt::Display for Hex<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

fn from_hex(text: &str) -> Option<Vec<u8>> {
    if text.len() != 64 || !text.bytes().all(|byte| byte.is_ascii_hexdigit()) {
        return None;
    }
    (0..text.len()).step_by(2).map(|at| u8::from_str_radix(&text[at..at + 2], 16).ok()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECRET: &str = "00112233445566778899aabbccddeeff00112233445566778899aabbccddeeff";

    #[test]
    fn a_link_opens_one_port_of_one_sandbox_until_it_expires() {
        let (id, other) = (SandboxId::random(), SandboxId::random());
        let signed = Link { id, port: 8000, expires: 100 }.sign(SECRET);
        assert_eq!(Link::check(id, 8000, &signed, SECRET, 99), Some(100));
        assert_eq!(Link::check(id, 8000, &signed, SECRET, 100), None);
        assert_eq!(Link::check(id, 8001, &signed, SECRET, 99), None);
        assert_eq!(Link::check(other, 8000, &signed, SECRET, 99), None);
        assert_eq!(Link::check(id, 8000, &signed, &SECRET.replace('0', "1"), 99), None);
        let unsigned = Link { id, port: 8000, expires: 100 }.sign("");
        assert_eq!(Link::check(id, 8000, &unsigned, "", 99), None, "without a secret nothing is opened");
        let later = signed.replacen("100", "900", 1);
        for forged in [later.as_str(), "", ".", "900.", "900.00", &signed[..signed.len() - 1], "900.é"] {
            assert_eq!(Link::check(id, 8000, forged, SECRET, 99), None, "{forged}");
        }
    }
}
