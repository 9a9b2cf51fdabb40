//! Messages of output, written without being built first: this is the path that every byte of output takes.

use base64::{Engine as _, prelude::BASE64_STANDARD};
use wide::u8x16;

use super::request::Encoding;
use crate::{ExecutionId, agent::Stream};

/// Looked at together: a few instructions of the processor tell which of them must be escaped.
const BLOCK: usize = 32;
const HALF: usize = BLOCK / 2;
const HEX: &[u8; 16] = b"0123456789abcdef";

/// A message of output as text.
#[must_use]
pub fn encode_output(stream: Stream, encoding: Encoding, data: &[u8], offset: u64, end: u64, id: &ExecutionId) -> String {
    let mut json = String::new();
    put_output(&mut json, stream, encoding, data, offset, end, id);
    json
}

/// Writes a message of output in place of what is in the buffer.
pub fn put_output(json: &mut String, stream: Stream, encoding: Encoding, data: &[u8], offset: u64, end: u64, id: &ExecutionId) {
    let mut bytes = std::mem::take(json).into_bytes();
    bytes.clear();
    put_message(&mut bytes, stream, encoding, data, offset, end, id);
    // Whether it is text is asked once, of the whole message: that finds nothing nearly always, and is many times faster than replacing.
    *json = String::from_utf8(bytes).unwrap_or_else(|not_text| {
        let mut bytes = not_text.into_bytes();
        bytes.clear();
        put_message(&mut bytes, stream, encoding, String::from_utf8_lossy(data).as_bytes(), offset, end, id);
        String::from_utf8(bytes).unwrap_or_default()
    });
}

fn put_message(json: &mut Vec<u8>, stream: Stream, encoding: Encoding, data: &[u8], offset: u64, end: u64, id: &ExecutionId) {
    json.reserve(data.len() + data.len() / 8 + 256);
    json.extend_from_slice(match stream {
        Stream::Stdout => b"{\"event\":\"stdout\",\"data\":",
        Stream::Stderr => b"{\"event\":\"stderr\",\"data\":",
    });
    match encoding {
        Encoding::Text => put_string(json, data),
        Encoding::Base64 => put_string(json, BASE64_STANDARD.encode(data).as_bytes()),
    }
    json.extend_from_slice(format!(",\"offset\":{offset},\"end\":{end},\"execution_id\":").as_bytes());
    put_string(json, id.as_str().as_bytes());
    if encoding == Encoding::Base64 {
        json.extend_from_slice(b",\"encoding\":\"base64\"");
    }
    json.push(b'}');
}

/// As serde_json does it, byte for byte, many times faster.
fn put_string(json: &mut Vec<u8>, mut text: &[u8]) {
    json.push(b'"');
    // A block of known length is copied by two instructions, and what was too much of it is taken back.
    while let Some(block) = text.first_chunk::<BLOCK>() {
        let found = escapes_in(block);
        json.extend_from_slice(block);
        text = if found == 0 {
            &text[BLOCK..]
        } else {
            let clean = found.trailing_zeros() as usize;
            json.truncate(json.len() - (BLOCK - clean));
            put_escaped(json, block[clean]);
            &text[clean + 1..]
        };
    }
    for byte in text {
        if must_be_escaped(*byte) {
            put_escaped(json, *byte);
        } else {
            json.push(*byte);
        }
    }
    json.push(b'"');
}

/// A bit for each byte that must be escaped, the lowest for the first.
fn escapes_in(block: &[u8; BLOCK]) -> u32 {
    let in_half = |half: &[u8; HALF]| {
        let bytes = u8x16::new(*half);
        let control = bytes.min(u8x16::splat(0x1f)).simd_eq(bytes);
        (control | bytes.simd_eq(u8x16::splat(b'"')) | bytes.simd_eq(u8x16::splat(b'\\'))).to_bitmask()
    };
    (0..).step_by(HALF).zip(block.as_chunks::<HALF>().0).fold(0, |all, (at, half)| all | in_half(half) << at)
}

fn must_be_escaped(byte: u8) -> bool {
    (byte < 0x20) | (byte == b'"') | (byte == b'\\')
}

fn put_escaped(json: &mut Vec<u8>, byte: u8) {
    let short = match byte {
        b'\n' => b'n',
        b'\t' => b't',
        b'\r' => b'r',
        b'"' | b'\\' => byte,
        0x08 => b'b',
        0x0c => b'f',
        _ => {
            let [high, low] = [byte >> 4, byte & 0xf].map(|digit| HEX[usize::from(digit)]);
            return json.extend_from_slice(&[b'\\', b'u', b'0', b'0', high, low]);
        }
    };
    json.extend_from_slice(&[b'\\', short]);
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
        let mut json = Vec::new();
        put_string(&mut json, text.as_bytes());
        json
    }

    #[test]
    fn each_byte_of_a_block_is_told_apart_whatever_is_beside_it() {
        for beside in [0, b' ', b'"', b'a', 0x7f, 0x80, 0xff] {
            for at in 0..BLOCK {
                for byte in 0..=0xff {
                    let mut block = [beside; BLOCK];
                    block[at] = byte;
                    let expected = (0..BLOCK).filter(|i| must_be_escaped(block[*i])).fold(0, |all, i| all | 1 << i);
                    assert_eq!(escapes_in(&block), expected, "{block:?}");
                }
            }
        }
    }

    #[test]
    fn a_buffer_that_is_used_again_holds_the_last_message_alone() {
        let (mut json, id) = (String::new(), "e".parse().unwrap());
        for data in [&b"a line\n"[..], b"a\xffb", b"", &[0xff; 3 * BLOCK]] {
            put_output(&mut json, Stream::Stdout, Encoding::Text, data, 0, data.len() as u64, &id);
            let ServerEvent::Stdout(event) = serde_json::from_str(&json).unwrap() else { panic!("{json}") };
            assert_eq!(event.data, String::from_utf8_lossy(data));
        }
    }

    #[test]
    fn every_character_of_ascii_is_written_as_serde_json_does() {
        let all: String = (0..=0x7f_u8).map(char::from).collect();
        assert_eq!(written(&all), serde_json::to_vec(&all).unwrap());
    }

    #[test]
    fn every_character_of_ascii_is_written_so_wherever_in_a_block_it_stands() {
        for byte in (0..=0x7f_u8).map(char::from) {
            for at in 0..=2 * BLOCK {
                let text = format!("{}{byte}{byte}{}", "x".repeat(at), "y".repeat(BLOCK));
                assert_eq!(written(&text), serde_json::to_vec(&text).unwrap());
            }
        }
    }

    proptest! {
        #[test]
        fn any_bytes_arrive_as_they_would_be_replaced(
            data in proptest::collection::vec(
                prop_oneof![
                    Just(vec![b'a'; 15]),
                    proptest::collection::vec(any::<u8>(), 1..4),
                    Just("ä\n\"".as_bytes().to_vec()),
                    Just(vec![0xc3]),
                ],
                0..20,
            ),
        ) {
            let data = data.concat();
            let json = encode_output(Stream::Stdout, Encoding::Text, &data, 0, data.len() as u64, &"e".parse().unwrap());
            let ServerEvent::Stdout(event) = serde_json::from_str(&json).unwrap() else { panic!("{json}") };
            prop_assert_eq!(event.data, String::from_utf8_lossy(&data));
        }

        #[test]
        fn any_text_is_written_as_serde_json_does(text in "([a-z]{0,40}|[\\x00-\\x7f]{0,10}|\\PC{0,10}){0,8}") {
            prop_assert_eq!(written(&text), serde_json::to_vec(&text).unwrap());
        }
    }
}
