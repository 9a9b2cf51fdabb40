use proptest::prelude::*;

use super::*;
use crate::agent::{AGENT_PROTOCOL_VERSION, PerStream};

const MARKER: [u8; MARKER_BYTES] = *b"0123456789abcdef0123456789abcdef";
const NONCE: [u8; NONCE_BYTES] = *b"fedcba9876543210fedcba9876543210";

fn agent() -> AgentDecoder {
    AgentDecoder::new(Marker::new(MARKER))
}

fn opening() -> Bytes {
    encode_opening(&Marker::new(MARKER), AGENT_PROTOCOL_VERSION, Nonce::new(NONCE))
}

fn hello() -> AgentEvent {
    let hello = ToAgent::Hello { version: AGENT_PROTOCOL_VERSION, nonce: Nonce::new(NONCE) };
    AgentEvent::Frame(ToAgentFrame::Control(hello))
}

/// Feeds `bytes` cut at `cuts` and returns all that comes out.
fn feed(decoder: &mut AgentDecoder, bytes: &[u8], step: usize) -> Vec<AgentEvent> {
    let mut events = Vec::new();
    for piece in bytes.chunks(step.max(1)) {
        decoder.buffer().extend_from_slice(piece);
        events.extend(std::iter::from_fn(|| decoder.next()));
    }
    events
}

fn stdin(data: &[u8]) -> BytesMut {
    let mut out = BytesMut::new();
    encode_stdin(&mut out, 3, 7, data);
    out
}

#[test]
fn nothing_is_heard_before_the_marker() {
    let mut decoder = agent();
    assert_eq!(feed(&mut decoder, &stdin(b"early"), 3), []);
    assert_eq!(feed(&mut decoder, &opening(), 5), [AgentEvent::Opened, hello()]);
}

#[test]
fn a_whole_frame_before_a_marker_is_heard_and_half_a_one_is_not() {
    let whole = stdin(b"whole");
    let half = &stdin(&[b'x'; 500])[..300];
    for step in [1, 2, 7, 31, 32, 33, 1000] {
        let mut decoder = agent();
        let bytes = [&opening()[..], &whole, half, &opening(), &whole].concat();
        let frame = AgentEvent::Frame(ToAgentFrame::Stdin { number: 3, offset: 7, data: Bytes::from_static(b"whole") });
        let expected = [AgentEvent::Opened, hello(), frame.clone(), AgentEvent::Opened, hello(), frame];
        assert_eq!(feed(&mut decoder, &bytes, step), expected, "in steps of {step}");
    }
}

#[test]
fn half_a_frame_completed_by_the_next_marker_is_not_carried_out() {
    let frame = stdin(&[b'x'; 64]);
    for missing in 1..frame.len() {
        for step in [1, 9, 4096] {
            let mut decoder = agent();
            let bytes = [&opening()[..], &frame[..frame.len() - missing], &opening()].concat();
            let events = feed(&mut decoder, &bytes, step);
            assert_eq!(events.first(), Some(&AgentEvent::Opened));
            assert!(
                !events.iter().any(|e| matches!(e, AgentEvent::Frame(ToAgentFrame::Stdin { .. }))),
                "{missing} bytes missing: {events:?}"
            );
            assert_eq!(&events[events.len() - 2..], [AgentEvent::Opened, hello()], "{missing} bytes missing");
        }
    }
}

#[test]
fn an_exec_carries_its_code_as_it_is() {
    let spec = ExecSpec {
        number: 9,
        id: "e1".parse().unwrap(),
        language: crate::agent::Language::Bash,
        env: [("A".to_owned(), "b c".to_owned())].into(),
        only_here: Default::default(),
        cwd: "/root".to_owned(),
        stdin: true,
        tty: None,
        detached_output: crate::agent::DetachedOutput::Block,
        note: String::new(),
    };
    let code = b"echo \xff\x00\n";
    let mut out = BytesMut::from(&opening()[..]);
    encode_exec(&mut out, &spec, code);
    let mut decoder = agent();
    let events = feed(&mut decoder, &out, 11);
    assert_eq!(events[2], AgentEvent::Frame(ToAgentFrame::Exec { spec, code: Bytes::from_static(code) }));
}

#[test]
fn the_server_hears_nothing_before_its_nonce() {
    let mut bytes = BytesMut::from(&b"half a frame of the last conversation"[..]);
    let reply = FromAgent::Pong { value: 1, alone: true };
    encode_reply_opening(&mut bytes, &Nonce::new(NONCE), &reply);
    encode_output(&mut bytes, 2, Stream::Stderr, 5, &[b"ab", b"c"]);
    for step in [1, 10, 1000] {
        let mut decoder = ServerDecoder::new(Nonce::new(NONCE));
        let mut frames = Vec::new();
        for piece in bytes.chunks(step) {
            decoder.buffer().extend_from_slice(piece);
            while let Some(frame) = decoder.next().unwrap() {
                frames.push(frame);
            }
        }
        let output = FromAgentFrame::Output { number: 2, stream: Stream::Stderr, offset: 5, data: Bytes::from_static(b"abc") };
        assert_eq!(frames, [FromAgentFrame::Control(reply.clone()), output]);
    }
}

#[test]
fn a_hostile_agent_is_found_out_not_waited_for() {
    let after_nonce = |bytes: &[u8]| {
        let mut decoder = ServerDecoder::new(Nonce::new(NONCE));
        decoder.buffer().extend_from_slice(&[&NONCE[..], bytes].concat());
        decoder.next()
    };
    assert_eq!(after_nonce(&[0xff; 8]), Err(Corrupt::TooLong(u32::MAX as usize)));
    assert_eq!(after_nonce(&[0; 4]), Err(Corrupt::TooShort(0)));
    assert_eq!(after_nonce(&[1, 0, 0, 0, 77]), Err(Corrupt::UnknownKind(77)));
    assert_eq!(after_nonce(&[2, 0, 0, 0, KIND_OUTPUT, 1]), Err(Corrupt::TooShort(1)));
    assert!(matches!(after_nonce(&[3, 0, 0, 0, KIND_CONTROL, b'{', b'}']), Err(Corrupt::Control(_))));
}

#[test]
fn secrets_are_not_printed() {
    let hello = format!("{:?}", hello());
    assert!(!hello.contains("66656463") && hello.contains("Nonce(…)"), "{hello}");
}

proptest! {
    #[test]
    fn neither_decoder_panics_on_any_bytes(bytes in proptest::collection::vec(any::<u8>(), 0..300), step in 1usize..50, opened: bool) {
        let prefix = if opened { opening() } else { Bytes::new() };
        feed(&mut agent(), &[&prefix[..], &bytes].concat(), step);
        let mut server = ServerDecoder::new(Nonce::new(NONCE));
        server.buffer().extend_from_slice(&[&NONCE[..], &bytes].concat());
        while let Ok(Some(_)) = server.next() {}
    }

    #[test]
    fn control_messages_survive_the_way(number: u64, a: u64, b: u64, credit: u64, step in 1usize..200) {
        let message = ToAgent::Resume { number, from: PerStream { stdout: a, stderr: b }, credit, sequence: a };
        let mut out = BytesMut::from(&opening()[..]);
        encode_to_agent(&mut out, &message);
        let events = feed(&mut agent(), &out, step);
        prop_assert_eq!(&events[2], &AgentEvent::Frame(ToAgentFrame::Control(message)));
    }
}
