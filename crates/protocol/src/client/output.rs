//! Messages of output, written without being built first: this is the path that every byte of output takes.

use base64::{Engine as _, prelude::BASE64_STANDARD};
use bytes::{BufMut as _, BytesMut};

use super::request::Encoding;
use crate::{ExecutionId, agent::Stream};

/// Looked at together: a few instructions of the processor tell whether any of them must be escaped.
const CHUNK: usize = 32;

/// A message of output as text.
#[must_use]
pub fn encode_output(stream: Stream, encoding: Encoding, data: &[u8], offset: u64, end: u64, id: &ExecutionId) -> String {
    let mut json = BytesMut::new();
    put_output(&mut json, stream, encoding, data, offset, end, id);
    // Every part of it is text.
    String::from_utf8(json.into()).unwrap_or_default()
}

/// Appends a message of output, which is text.
pub fn put_output(json: &mut BytesMut, stream: Stream, encoding: Encoding, data: &[u8], offset: u64, end: u64, id: &ExecutionId) {
    json.reserve(data.len() + data.len() / 8 + 256);
    json.put_slice(match stream {
        Stream::Stdout => b"{\"event\":\"stdout\",\"data\":",
        Stream::Stderr => b"{\"event\":\"stderr\",\"data\":",
    });
    match encoding {
        // Checking is many times faster than replacing, and nearly always finds nothing to replace.
        Encoding::Text => match std::str::from_utf8(data) {
            Ok(text) => put_string(json, text),
            Err(_) => put_string(json, &String::from_utf8_lossy(data)),
        },
        Encoding::Base64 => put_string(json, &BASE64_STANDARD.encode(data)),
    }
    json.put_slice(format!(",\"offset\":{offset},\"end\":{end},\"execution_id\":").as_bytes());
    put_string(json, id.as_str());
    if encoding == Encoding::Base64 {
        json.put_slice(b",\"encoding\":\"base64\"");
    }
    json.put_u8(b'}');
}

/// As serde_json does it, byte for byte, several times faster.
fn put_string(json: &mut BytesMut, text: &str) {
    let text = text.as_bytes();
    json.put_u8(b'"');
    let (mut at, mut written) = (0, 0);
    while at < text.len() {
        let chunk = &text[at..text.len().min(at + CHUNK)];
        if chunk.iter().fold(false, |any, byte| any | must_be_escaped(*byte)) {
            for (i, byte) in (at..).zip(chunk).filter(|(_, byte)| must_be_escaped(**byte)) {
                json.put_slice(&text[written..i]);
                put_escaped(json, *byte);
                written = i + 1;
            }
        }
        at += chunk.len();
    }
    json.put_slice(&text[written..]);
    json.put_u8(b'"');
}

fn must_be_escaped(byte: u8) -> bool {
    (byte < 0x20) | (byte == b'"') | (byte == b'\\')
}

fn put_escaped(json: &mut BytesMut, byte: u8) {
    const HEX: &[u8; 16] = b"0123456789abcdef";
    let short = match byte {
        b'\n' => b'n',
        b'\t' => b't',
        b'\r' => b'r',
        b'"' | b'\\' => byte,
        0x08 => b'b',
        0x0c => b'f',
        _ => {
            let [high, low] = [byte >> 4, byte & 15].map(|digit| HEX[usize::from(digit)]);
            return json.put_slice(&[b'\\', b'u', b'0', b'0', high, low]);
        }
    };
    json.put_slice(&[b'\\', short]);
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
        let mut json = BytesMut::new();
        put_string(&mut json, text);
        json.to_vec()
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
