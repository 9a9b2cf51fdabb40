//! Frames from an agent that its guest may have taken over.

use std::{cell::RefCell, time::Duration};

use bytes::BytesMut;
use sandboxer_protocol::{
    agent::{
        AgentDecoder, AgentEvent, Corrupt, FromAgent, FromAgentFrame, Marker, Nonce, ServerDecoder, ToAgent, ToAgentFrame,
        encode_files_from_agent, encode_from_agent, encode_output, encode_tunnel_from_agent,
    },
    limits::MAX_OUTPUT_PIECE_BYTES,
};
use sandboxer_runtime::{
    Ended, Instance,
    link::{self, LinkError},
};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _, DuplexStream},
    runtime::Runtime,
};

const NONCE: [u8; 32] = *b"the nonce of this conversation..";
/// More than the agent of a fuzz run ever needs to read.
const PIPE_BYTES: usize = 64 * 1024;
const OPENING_WITHIN: Duration = Duration::from_secs(5);

/// What came of some bytes: the frames before the first fault, and that fault.
#[derive(Debug, PartialEq)]
struct Decoded {
    frames: Vec<FromAgentFrame>,
    fault: Option<Corrupt>,
}

/// The bytes that follow the nonce. However they are cut they mean the same, what they mean stays within its bounds, and the server's
/// link makes the same of them.
pub fn agent_frames(data: &[u8]) {
    let whole = decode(data, data.len().max(1));
    let cut = 1 + data.first().map_or(0, |byte| usize::from(*byte));
    assert_eq!(whole, decode(data, cut), "cut into pieces of {cut} bytes they mean something else");
    for frame in &whole.frames {
        if let FromAgentFrame::Output { data, .. } = frame {
            assert!(data.len() <= MAX_OUTPUT_PIECE_BYTES + 64, "a piece of {} bytes", data.len());
        }
        assert_eq!(
            decode(&encode(frame), usize::MAX),
            Decoded { frames: vec![frame.clone()], fault: None },
            "not the same when sent again"
        );
    }
    before_the_nonce(data);
    over_a_link(data, &whole);
}

fn decode(data: &[u8], piece: usize) -> Decoded {
    let mut decoder = ServerDecoder::new(Nonce::new(NONCE));
    decoder.buffer().extend_from_slice(&NONCE);
    let mut frames = Vec::new();
    for piece in data.chunks(piece) {
        decoder.buffer().extend_from_slice(piece);
        loop {
            match decoder.next() {
                Ok(Some(frame)) => frames.push(frame),
                Ok(None) => break,
                Err(fault) => return Decoded { frames, fault: Some(fault) },
            }
        }
    }
    Decoded { frames, fault: None }
}

fn encode(frame: &FromAgentFrame) -> BytesMut {
    let mut out = BytesMut::new();
    match frame {
        FromAgentFrame::Control(message) => encode_from_agent(&mut out, message),
        FromAgentFrame::Output { number, stream, offset, data } => encode_output(&mut out, *number, *stream, *offset, &[data]),
        FromAgentFrame::Files { sequence, offset, data } => encode_files_from_agent(&mut out, *sequence, *offset, data),
        FromAgentFrame::Tunnel { stream, data } => encode_tunnel_from_agent(&mut out, *stream, data),
    }
    out
}

/// What an earlier conversation left in the pipe is dropped, and not kept in memory either.
fn before_the_nonce(data: &[u8]) {
    let mut decoder = ServerDecoder::new(Nonce::new(NONCE));
    decoder.buffer().extend_from_slice(data);
    if decoder.next() == Ok(None) && !data.windows(NONCE.len()).any(|window| window == NONCE) {
        assert!(decoder.buffer().len() < NONCE.len(), "{} bytes are kept that nobody asked for", decoder.buffer().len());
    }
}

thread_local! {
    static RUNTIME: RefCell<Runtime> = RefCell::new(tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap());
}

fn over_a_link(data: &[u8], expected: &Decoded) {
    RUNTIME.with_borrow(|runtime| runtime.block_on(converse(data, expected)));
}

async fn converse(data: &[u8], expected: &Decoded) {
    let (to_agent, agent_in) = tokio::io::duplex(PIPE_BYTES);
    let (agent_out, from_agent) = tokio::io::duplex(PIPE_BYTES);
    let (_still_running, ended) = Ended::channel();
    let instance = Instance { from_agent: Box::new(from_agent), to_agent: Box::new(to_agent), ended };
    let marker = Marker::new([7; 32]);
    let server = async {
        let mut link = match link::open(instance, &marker, OPENING_WITHIN).await {
            Ok(link) => link,
            Err(fault) => {
                refused(&fault, expected);
                return;
            }
        };
        let mut frames = vec![FromAgentFrame::Control(link.hello.clone())];
        let fault = loop {
            match link.reader.recv().await {
                Ok(frame) => frames.push(frame),
                Err(LinkError::Corrupt(fault)) => break Some(fault),
                Err(LinkError::Closed) => break None,
                Err(other) => panic!("the link broke by itself: {other}"),
            }
        };
        assert_eq!(&Decoded { frames, fault }, expected, "the link makes something else of it");
    };
    tokio::join!(server, agent(agent_in, agent_out, marker, data));
}

/// An opening fails only because of what the agent said.
fn refused(fault: &LinkError, expected: &Decoded) {
    let as_expected = match (fault, expected.frames.first()) {
        (LinkError::Closed, None) => expected.fault.is_none(),
        (LinkError::Corrupt(fault), None) => expected.fault.as_ref() == Some(fault),
        (LinkError::Version(version), Some(FromAgentFrame::Control(FromAgent::HelloReply { version: said, .. }))) => version == said,
        (LinkError::NotAReply, Some(first)) => !matches!(first, FromAgentFrame::Control(FromAgent::HelloReply { .. })),
        _ => false,
    };
    assert!(as_expected, "{fault} in answer to {expected:?}");
}

/// Waits for the opening, answers with its nonce and the bytes, and hangs up.
async fn agent(mut incoming: DuplexStream, mut outgoing: DuplexStream, marker: Marker, data: &[u8]) {
    let mut decoder = AgentDecoder::new(marker);
    let nonce = loop {
        match decoder.next() {
            Some(AgentEvent::Frame(ToAgentFrame::Control(ToAgent::Hello { nonce, .. }))) => break nonce,
            Some(_) => {}
            None => assert!(incoming.read_buf(decoder.buffer()).await.unwrap() > 0, "no opening came"),
        }
    };
    // The server may hang up first, when it has seen enough.
    let _ = outgoing.write_all(nonce.as_bytes()).await;
    let _ = outgoing.write_all(data).await;
}
