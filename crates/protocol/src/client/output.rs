//! Messages of output, written without being built first: this is the path that every byte of output takes.

use std::fmt::Write as _;

use base64::{Engine as _, prelude::BASE64_STANDARD};

use super::request::Encoding;
use crate::{ExecutionId, agent::Stream};

/// Looked at together: a few instructions of the processor tell whether any of them must be escaped.
const CHUNK: usize = 32;
/// Told apart together, where one of a chunk must.
const WORD: usize = 8;

/// A message of output as text.
#[must_use]
pub fn encode_output(stream: Stream, encoding: Encoding, data: &[u8], offset: u64, end: u64, id: &ExecutionId) -> String {
    let mut json = String::new();
    put_output(&mut json, stream, encoding, data, offset, end, id);
    json
}

/// Appends a message of output.
pub fn put_output(json: &mut String, stream: Stream, encoding: Encoding, data: &[u8], offset: u64, end: u64, id: &ExecutionId) {
    json.reserve(data.len() + data.len() / 8 + 256);
    json.push_str(match stream {
        Stream::Stdout => "{\"event\":\"stdout\",\"data\":",
        Stream::Stderr => "{\"event\":\"stderr\",\"data\":",
    });
    match encoding {
        // Checking is many times faster than replacing, and nearly always finds nothing to replace.
        Encoding::Text => match std::str::from_utf8(data) {
            Ok(text) => put_string(json, text),
            Err(_) => put_string(json, &String::from_utf8_lossy(data)),
        },
        Encoding::Base64 => put_string(json, &BASE64_STANDARD.encode(data)),
    }
    // Writing to memory can't fail.
    let _ = write!(json, ",\"offset\":{offset},\"end\":{end},\"execution_id\":");
    put_string(json, id.as_str());
    if encoding == Encoding::Base64 {
        json.push_str(",\"encoding\":\"base64\"");
    }
    json.push('}');
}

/// As serde_json does it, byte for byte, several times faster.
fn put_string(json: &mut String, text: &str) {
    let bytes = text.as_bytes();
    json.push('"');
    let mut written = 0;
    let mut escape = |json: &mut String, at: usize| {
        json.push_str(&text[written..at]);
        put_escaped(json, bytes[at]);
        written = at + 1;
    };
    // Of a length that is known: both loops are several times faster by that.
    let (chunks, rest) = bytes.as_chunks::<CHUNK>();
    for (start, chunk) in (0..).step_by(CHUNK).zip(chunks) {
        if chunk.iter().fold(false, |any, byte| any | must_be_escaped(*byte)) {
            for (start, word) in (start..).step_by(WORD).zip(chunk.as_chunks::<WORD>().0) {
                let mut found = escapes_in(*word);
                while found != 0 {
                    escape(json, start + found.trailing_zeros() as usize / 8);
                    found &= found - 1;
                }
            }
        }
    }
    for (at, _) in (bytes.len() - rest.len()..).zip(rest).filter(|(_, byte)| must_be_escaped(**byte)) {
        escape(json, at);
    }
    json.push_str(&text[written..]);
    json.push('"');
}

/// The highest bit of each byte that must be escaped; the first byte is the lowest. No sum leaves its byte, so each is told exactly.
fn escapes_in(word: [u8; WORD]) -> u64 {
    const LOW: u64 = u64::from_le_bytes([0x7f; WORD]);
    let word = u64::from_le_bytes(word);
    let is_not = |byte: u8| {
        let difference = word ^ u64::from_le_bytes([byte; WORD]);
        ((difference & LOW) + LOW) | difference
    };
    let at_least_a_space = ((word & LOW) + u64::from_le_bytes([0x80 - 0x20; WORD])) | word;
    !(at_least_a_space & is_not(b'"') & is_not(b'\\')) & !LOW
}

fn must_be_escaped(byte: u8) -> bool {
    (byte < 0x20) | (byte == b'"') | (byte == b'\\')
}

fn put_escaped(json: &mut String, byte: u8) {
    let short = match byte {
        b'\n' => "\\n",
        b'\t' => "\\t",
        b'\r' => "\\r",
        b'"' => "\\\"",
        b'\\' => "\\\\",
        0x08 => "\\b",
        0x0c => "\\f",
        _ => {
            // Writing to memory can't fail.
            let _ = write!(json, "\\u{byte:04x}");
            return;
        }
    };
    json.push_str(short);
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::client::ServerEvent;

    #[test]
    fn output_is_written_as_its_type_reads_it() {
        let id: ExecutionId = "a\"b".parse().unwrap();
        for encoding in [Encoding::Text, Encoding::Base64] {
            let json = encode_output(Stream::Stderr, encoding, "ä\n\u{1}\"".as_bytes(), 5, 10, &id);
            let ServerEvent::Stderr(event) = serde_json::from_str(&json).unwrap() else { panic!("{json}") };
            let data = if encoding == Encoding::Text { "ä\n\u{1}\"" } else { "w6QKASI=" };
            assert_eq!((event.data.as_str(), event.offset, event.end, &event.execution_id), (data, 5, 10, &id));
        }
    }

    #[test]
    fn what_is_not_utf8_arrives_as_the_replacement_character() {
        let json = encode_output(Stream::Stdout, Encoding::Text, b"a\xffb", 0, 3, &"e".parse().unwrap());
        let ServerEvent::Stdout(event) = serde_json::from_str(&json).unwrap() else { panic!("{json}") };
        assert_eq!((event.data.as_str(), event.end), ("a\u{fffd}b", 3));
    }

    fn written(text: &str) -> Vec<u8> {
        let mut json = String::new();
        put_string(&mut json, text);
        json.into_bytes()
    }

    #[test]
    fn each_byte_of_a_word_is_told_apart_whatever_is_beside_it() {
        for beside in [0, b' ', b'"', b'a', 0x7f, 0x80, 0xff] {
            for at in 0..WORD {
                for byte in 0..=0xff {
                    let mut word = [beside; WORD];
                    word[at] = byte;
                    let expected = (0..WORD).filter(|i| must_be_escaped(word[*i])).fold(0, |all, i| all | 0x80 << (8 * i));
                    assert_eq!(escapes_in(word), expected, "{word:?}");
                }
            }
        }
    }

    #[test]
    fn every_character_of_ascii_is_written_as_serde_json_does() {
        let all: String = (0..=0x7f_u8).map(char::from).collect();
        assert_eq!(written(&all), serde_json::to_vec(&all).unwrap());
    }

    proptest! {
        #[test]
        fn any_text_is_written_as_serde_json_does(text in "([a-z]{0,40}|[\\x00-\\x7f]{0,10}|\\PC{0,10}){0,8}") {
            prop_assert_eq!(written(&text), serde_json::to_vec(&text).unwrap());
        }
    }
}
