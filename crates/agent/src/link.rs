//! The agent's end of the conversation: two FIFOs whose other ends come and go.
//!
//! Nothing is said before an opening, and an opening drops whatever was about to be said: the server skips everything before its nonce.

use std::{
    io::{self, IoSlice, Read, Write},
    os::fd::{AsFd, BorrowedFd, OwnedFd},
};

use bytes::{Buf, BytesMut};
use sandboxer_agent::window::Window;
use sandboxer_protocol::agent::{
    AgentDecoder, AgentEvent, ExecutionNumber, FromAgent, Marker, Nonce, Stream, encode_files_from_agent, encode_from_agent, encode_output,
    encode_reply_opening, encode_tunnel_from_agent,
};
use sandboxer_protocol::limits::MAX_OUTPUT_PIECE_BYTES;

use crate::sys;

/// With this much unsaid nothing more is read: whoever asks without listening waits.
const MAX_UNSAID_BYTES: usize = 1024 * 1024;

/// A buffer that had to be larger than this is given back as soon as it is empty.
const KEEP_ROOM_BYTES: usize = 256 * 1024;

/// Frames of output written by one call, and what each carries at most. A server goes through it several times, and has it in its processor's own cache all that time.
const PIECES_AT_ONCE: usize = 16;
const PIECE_BYTES: usize = 64 * 1024;
const _: () = assert!(PIECE_BYTES <= MAX_OUTPUT_PIECE_BYTES);

pub(crate) struct Link {
    input: std::fs::File,
    output: std::fs::File,
    decoder: AgentDecoder,
    unsaid: BytesMut,
    /// A `Hello` was heard, and the other end has not closed since: what it says is carried out.
    open: bool,
    /// Nobody listens any more: nothing is said until the next opening. What was sent before still counts.
    mute: bool,
    pub(crate) readable: bool,
    /// The other end has gone, which makes no further edge.
    pub(crate) ended: bool,
    pub(crate) writable: bool,
    /// The last read found nobody at the other end.
    pub(crate) alone: bool,
    /// The most that was in the buffer since it was given back.
    room: usize,
}

/// What [`Link::hear`] found.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Heard {
    Event(AgentEvent),
    /// More was read; it may make something whole.
    Bytes,
    /// The other end has just gone, and everything that it finished was heard before.
    Gone,
    /// Nothing for now.
    Nothing,
}

impl Link {
    /// Over standard input and output.
    pub(crate) fn new(marker: Marker) -> io::Result<Self> {
        Self::over(io::stdin().as_fd().try_clone_to_owned()?, io::stdout().as_fd().try_clone_to_owned()?, marker)
    }

    pub(crate) fn over(input: OwnedFd, output: OwnedFd, marker: Marker) -> io::Result<Self> {
        sys::set_nonblocking(input.as_fd(), true)?;
        sys::set_nonblocking(output.as_fd(), true)?;
        Ok(Self {
            input: input.into(),
            output: output.into(),
            decoder: AgentDecoder::new(marker),
            unsaid: BytesMut::new(),
            open: false,
            mute: false,
            readable: true,
            ended: false,
            writable: true,
            alone: false,
            room: 0,
        })
    }

    pub(crate) fn descriptors(&self) -> (BorrowedFd<'_>, BorrowedFd<'_>) {
        (self.input.as_fd(), self.output.as_fd())
    }

    pub(crate) fn is_open(&self) -> bool {
        self.open
    }

    /// There may be something to read, and room for the answers.
    pub(crate) fn wants_to_read(&self) -> bool {
        self.readable && self.unsaid.len() < MAX_UNSAID_BYTES
    }

    /// The next thing that is whole. Reads, once, only if nothing is: so no more is held than one read and the frame it did not finish,
    /// and the end of the input comes after all that was said before it.
    pub(crate) fn hear(&mut self, scratch: &mut [u8]) -> Heard {
        if let Some(event) = self.decoder.next() {
            return Heard::Event(event);
        }
        if self.room > KEEP_ROOM_BYTES {
            self.rest();
        }
        if self.wants_to_read() { self.read(scratch) } else { Heard::Nothing }
    }

    pub(crate) fn holds_room(&self) -> bool {
        self.room > 0
    }

    /// Gives back what it has to hear with: an idle agent holds no buffer. Not after each time: to get it anew is dear here, and more may come.
    pub(crate) fn rest(&mut self) {
        if self.decoder.buffer().is_empty() {
            *self.decoder.buffer() = BytesMut::new();
            self.room = 0;
        }
    }

    fn read(&mut self, scratch: &mut [u8]) -> Heard {
        match self.input.read(scratch) {
            Ok(0) => {
                self.readable = false;
                let was_there = !self.alone;
                self.alone = true;
                self.decoder.end_of_input();
                self.close();
                if was_there { Heard::Gone } else { Heard::Nothing }
            }
            Ok(count) => {
                self.alone = false;
                self.decoder.buffer().extend_from_slice(&scratch[..count]);
                // Less than there was room for: the FIFO is empty, and the next byte makes an edge.
                self.readable = count == scratch.len() || self.ended;
                self.room = self.room.max(self.decoder.buffer().len());
                Heard::Bytes
            }
            Err(error) => {
                if error.kind() != io::ErrorKind::Interrupted {
                    self.readable = false;
                }
                // Somebody holds the other end, with nothing to say yet.
                self.alone &= error.kind() != io::ErrorKind::WouldBlock;
                Heard::Nothing
            }
        }
    }

    /// Says nothing more, and takes nothing more seriously, until the next opening.
    pub(crate) fn close(&mut self) {
        self.open = false;
        self.unsaid = BytesMut::new();
    }

    pub(crate) fn answer_opening(&mut self, nonce: &Nonce, reply: &FromAgent) {
        self.unsaid = BytesMut::new();
        self.open = true;
        self.mute = false;
        // Whoever is there now may have come since the last write failed.
        self.writable = true;
        encode_reply_opening(&mut self.unsaid, nonce, reply);
    }

    pub(crate) fn say(&mut self, message: &FromAgent) {
        if self.open && !self.mute {
            encode_from_agent(&mut self.unsaid, message);
        }
    }

    /// Writes what is unsaid, as far as it goes now.
    pub(crate) fn flush(&mut self) {
        while self.writable && !self.unsaid.is_empty() {
            match self.output.write(&self.unsaid) {
                Ok(count) => self.unsaid.advance(count),
                Err(error) => self.failed(&error),
            }
        }
        if self.unsaid.is_empty() && self.unsaid.capacity() > 0 {
            self.unsaid = BytesMut::new();
        }
    }

    /// Sends the next pieces of a window straight from where they lie, behind what is unsaid. Returns whether anything was sent.
    pub(crate) fn send_output(&mut self, number: ExecutionNumber, stream: Stream, window: &mut Window) -> bool {
        if !self.open || self.mute || !self.writable {
            return false;
        }
        let Some(batch) = window.next_piece(PIECES_AT_ONCE * PIECE_BYTES) else { return false };
        let pieces: Vec<(BytesMut, [&[u8]; 2])> = (0..batch.len())
            .step_by(PIECE_BYTES)
            .map(|from| {
                let data = cut(batch.data, from, PIECE_BYTES);
                let mut head = BytesMut::with_capacity(32);
                encode_output(&mut head, number, stream, batch.offset + from as u64, &[]);
                add_to_length(&mut head, data[0].len() + data[1].len());
                (head, data)
            })
            .collect();
        let parts: Vec<IoSlice<'_>> = std::iter::once(&self.unsaid[..])
            .chain(pieces.iter().flat_map(|(head, data)| [&head[..], data[0], data[1]]))
            .filter(|part| !part.is_empty())
            .map(IoSlice::new)
            .collect();
        match self.output.write_vectored(&parts) {
            Ok(mut written) => {
                let said = written.min(self.unsaid.len());
                self.unsaid.advance(said);
                written -= said;
                let mut sent = 0;
                for (head, data) in &pieces {
                    if written == 0 {
                        break;
                    }
                    // A frame once begun must be finished, whatever becomes of the window.
                    for part in [&head[..], data[0], data[1]] {
                        let skipped = written.min(part.len());
                        self.unsaid.extend_from_slice(&part[skipped..]);
                        written -= skipped;
                    }
                    sent += data[0].len() + data[1].len();
                }
                window.mark_sent(sent);
                true
            }
            Err(error) => {
                self.failed(&error);
                false
            }
        }
    }

    /// Whether a piece of an archive can be sent now.
    pub(crate) fn takes_files(&self) -> bool {
        self.open && !self.mute && self.writable && self.unsaid.is_empty()
    }

    /// Sends a piece of an archive, from where it lies as far as that goes now.
    pub(crate) fn send_files(&mut self, sequence: u64, offset: u64, data: &[u8]) {
        let mut head = BytesMut::with_capacity(32);
        encode_files_from_agent(&mut head, sequence, offset, &[]);
        self.send_behind(head, data);
    }

    /// Sends a piece of a stream of the network, likewise.
    pub(crate) fn send_tunnel(&mut self, stream: u64, data: &[u8]) {
        let mut head = BytesMut::with_capacity(32);
        encode_tunnel_from_agent(&mut head, stream, &[]);
        self.send_behind(head, data);
    }

    fn send_behind(&mut self, mut head: BytesMut, data: &[u8]) {
        add_to_length(&mut head, data.len());
        match self.output.write_vectored(&[IoSlice::new(&head), IoSlice::new(data)]) {
            Ok(written) => {
                self.unsaid.extend_from_slice(&head[written.min(head.len())..]);
                self.unsaid.extend_from_slice(&data[written.saturating_sub(head.len())..]);
            }
            Err(error) => {
                self.unsaid.extend_from_slice(&head);
                self.unsaid.extend_from_slice(data);
                self.failed(&error);
            }
        }
    }

    fn failed(&mut self, error: &io::Error) {
        match error.kind() {
            io::ErrorKind::Interrupted => {}
            io::ErrorKind::WouldBlock => self.writable = false,
            // Nobody reads. What it sent before it went is still on its way here.
            _ => {
                self.mute = true;
                self.unsaid = BytesMut::new();
            }
        }
    }
}

/// Frames begin with their length; this one is followed by `more` bytes that were not copied into it.
fn add_to_length(frame: &mut BytesMut, more: usize) {
    if let Some(length) = frame.first_chunk_mut::<4>() {
        let total = u32::from_le_bytes(*length).saturating_add(u32::try_from(more).unwrap_or(u32::MAX));
        *length = total.to_le_bytes();
    }
}

/// At most `length` bytes from `from` on, of bytes that lie in two parts.
fn cut([first, second]: [&[u8]; 2], from: usize, length: usize) -> [&[u8]; 2] {
    let until = from + length;
    let split = first.len();
    [
        &first[from.min(split)..until.min(split)],
        &second[from.saturating_sub(split).min(second.len())..until.saturating_sub(split).min(second.len())],
    ]
}

#[cfg(test)]
mod tests {
    use nix::{fcntl::OFlag, unistd::pipe2};
    use sandboxer_protocol::agent::{ToAgent, ToAgentFrame, encode_opening, encode_stdin};

    use super::*;

    const MARKER: [u8; 32] = [3; 32];

    fn link() -> (Link, std::fs::File, std::fs::File) {
        let ((input, server_out), (server_in, output)) = (pipe2(OFlag::O_CLOEXEC).unwrap(), pipe2(OFlag::O_CLOEXEC).unwrap());
        (Link::over(input, output, Marker::new(MARKER)).unwrap(), server_out.into(), server_in.into())
    }

    fn reply() -> FromAgent {
        FromAgent::HelloReply {
            version: 1,
            agent: String::new(),
            enforced: Default::default(),
            execution: None,
            last_number: None,
            identifies: true,
            files: true,
            single_files: true,
            watches: true,
            tunnel: true,
        }
    }

    /// What a server sent before it went is heard to the end, though the answers can't be said and the end of the input is there already.
    #[test]
    fn the_last_words_of_a_server_that_died_all_count() {
        const PIECES: u64 = 3000;
        let (mut link, mut to_agent, from_agent) = link();
        let mut said = BytesMut::from(&encode_opening(&Marker::new(MARKER), 1, Nonce::new([4; 32]))[..]);
        (0..PIECES).for_each(|offset| encode_stdin(&mut said, 1, offset, b"x"));
        let whole = said.len();
        encode_stdin(&mut said, 1, PIECES, b"never finished");
        sys::set_pipe_size(to_agent.as_fd(), 1024 * 1024).unwrap();
        to_agent.write_all(&said[..whole + 10]).unwrap();
        drop((to_agent, from_agent));
        // As the edge tells.
        link.ended = true;
        let mut scratch = [0; 64 * 1024];
        let (mut heard, mut most_held) = (0, 0);
        loop {
            match link.hear(&mut scratch) {
                Heard::Event(AgentEvent::Opened) => link.close(),
                Heard::Event(AgentEvent::Frame(ToAgentFrame::Control(ToAgent::Hello { nonce, .. }))) => {
                    link.answer_opening(&nonce, &reply())
                }
                Heard::Event(AgentEvent::Frame(ToAgentFrame::Stdin { offset, .. })) => {
                    assert!(link.is_open() && offset == heard);
                    heard += 1;
                    link.say(&FromAgent::StdinAck { number: 1, offset });
                    // Nobody reads it, which must not matter.
                    link.flush();
                }
                Heard::Event(other) => panic!("{other:?}"),
                Heard::Bytes => {}
                Heard::Gone => break,
                Heard::Nothing => panic!("there is more"),
            }
            most_held = most_held.max(link.decoder.buffer().len());
        }
        assert_eq!(heard, PIECES);
        assert!(most_held < scratch.len() + 100, "{most_held}");
        assert!(!link.is_open());
        assert_eq!(link.hear(&mut scratch), Heard::Nothing);
    }

    #[test]
    fn cutting_two_parts_loses_nothing() {
        let whole: Vec<u8> = (0..20).collect();
        for split in 0..=20 {
            for length in 1..=21 {
                let (first, second) = whole.split_at(split);
                let pieces: Vec<u8> = (0..20).step_by(length).flat_map(|from| cut([first, second], from, length).concat()).collect();
                assert_eq!(pieces, whole);
            }
        }
    }
}
