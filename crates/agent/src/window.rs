//! What the agent holds of one output stream.
//!
//! ```text
//!   0 ────────── held_from ────────── sent ────────── end
//!     acknowledged,        may be asked     not yet      │
//!     or dropped           for again        sent         └ the program's next byte
//! ```
//!
//! At most `capacity` bytes are held. When it is full the caller stops reading the program's pipe, and the program blocks; or, with
//! nobody attached and the `drop_oldest` setting, the oldest bytes go ([`Window::append_dropping_oldest`]). Offsets count the
//! bytes of the stream from its first one and never go back.
//!
//! Every number that the other side names is clamped: none makes it panic, lose unsent bytes or grow beyond its capacity.

/// Bytes to send, as they lie in the ring: up to two parts.
#[derive(Debug, PartialEq, Eq)]
pub struct Piece<'a> {
    /// The offset in the stream of the first byte.
    pub offset: u64,
    pub data: [&'a [u8]; 2],
}

impl Piece<'_> {
    #[must_use]
    pub fn len(&self) -> usize {
        self.data[0].len() + self.data[1].len()
    }

    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// The bytes of one stream that no client has acknowledged, and how far they were sent.
#[derive(Debug)]
pub struct Window {
    capacity: usize,
    /// Grows by doubling up to the capacity; empty while nothing was ever held or after [`Window::shrink`].
    ring: Vec<u8>,
    /// Where in the ring the byte at `held_from` lies.
    head: usize,
    held_from: u64,
    end: u64,
    /// A client has everything before this. It may be beyond `sent`: whoever asked for it again before the acknowledgement came is
    /// promised every byte from there, so those are kept until they are sent, or nobody waits for them.
    acked: u64,
    /// The next byte to send.
    sent: u64,
    /// The highest `sent` ever: nothing beyond it can have been seen by anybody.
    sent_ever: u64,
    /// Sending stops here.
    credit: u64,
    paused: bool,
}

const FIRST_RING_BYTES: usize = 64 * 1024;

impl Window {
    /// An empty window of a new stream: resumed from zero, with no credit.
    #[must_use]
    pub fn new(capacity: u64) -> Self {
        Self {
            capacity: usize::try_from(capacity).unwrap_or(usize::MAX).max(1),
            ring: Vec::new(),
            head: 0,
            held_from: 0,
            end: 0,
            acked: 0,
            sent: 0,
            sent_ever: 0,
            credit: 0,
            paused: false,
        }
    }

    /// The first byte that is still held.
    #[must_use]
    pub fn held_from(&self) -> u64 {
        self.held_from
    }

    /// One after the last byte so far.
    #[must_use]
    pub fn end(&self) -> u64 {
        self.end
    }

    /// The next byte to be sent.
    #[must_use]
    pub fn sent(&self) -> u64 {
        self.sent
    }

    #[must_use]
    pub fn is_paused(&self) -> bool {
        self.paused
    }

    #[must_use]
    pub fn held(&self) -> usize {
        distance(self.held_from, self.end)
    }

    /// How many bytes can be appended.
    #[must_use]
    pub fn space(&self) -> usize {
        self.capacity - self.held()
    }

    /// Where the next bytes go, to be read into directly: at most `want`, at most [`Window::space`]. Follow with [`Window::commit`].
    pub fn spare(&mut self, want: usize) -> [&mut [u8]; 2] {
        let want = want.min(self.space());
        self.reserve(want);
        if want == 0 {
            return [&mut [], &mut []];
        }
        let held = self.held();
        let size = self.ring.len();
        let start = (self.head + held) % size;
        let first = want.min(size - start);
        let (low, high) = self.ring.split_at_mut(start);
        [&mut high[..first], &mut low[..want - first]]
    }

    /// The first `count` bytes of what [`Window::spare`] gave were filled.
    pub fn commit(&mut self, count: usize) {
        let count = count.min(self.space()).min(self.ring.len() - self.held());
        self.end += count as u64;
    }

    /// Appends as much as there is space for, and says how much.
    pub fn append(&mut self, data: &[u8]) -> usize {
        let [first, second] = self.spare(data.len());
        let taken = first.len() + second.len();
        let (a, b) = data[..taken].split_at(first.len());
        first.copy_from_slice(a);
        second.copy_from_slice(b);
        self.commit(taken);
        taken
    }

    /// Appends everything; what no longer fits goes, the oldest first.
    pub fn append_dropping_oldest(&mut self, data: &[u8]) {
        let skipped = data.len().saturating_sub(self.capacity);
        self.make_room(data.len());
        if skipped > 0 {
            // Nothing is held now, so the stream can jump over what could not be kept.
            self.held_from += skipped as u64;
            self.end = self.held_from;
            self.raise_sent();
        }
        self.append(&data[skipped..]);
    }

    /// Drops the oldest bytes until `count` (or the whole capacity) can be appended.
    pub fn make_room(&mut self, count: usize) {
        let count = count.min(self.capacity);
        self.release(count.saturating_sub(self.space()));
    }

    /// Lets the window hold this much more for good: what lies in the pipe of a program that has ended must go somewhere.
    pub fn extend(&mut self, bytes: usize) {
        self.capacity = self.capacity.saturating_add(bytes);
    }

    /// A client has everything before `upto`. What nobody can have seen stays, whatever it says.
    pub fn ack(&mut self, upto: u64) {
        self.acked = self.acked.max(upto.min(self.sent_ever).min(self.end));
        self.release_acked();
    }

    /// Nothing is sent until the next [`Window::resume`].
    pub fn pause(&mut self) {
        self.paused = true;
        self.release_acked();
    }

    /// Sending goes on from `from`, or from the nearest offset that is held, which is returned; it may go `credit` bytes far.
    pub fn resume(&mut self, from: u64, credit: u64) -> u64 {
        self.sent = from.clamp(self.held_from, self.end);
        self.sent_ever = self.sent_ever.max(self.sent);
        self.credit = self.sent.saturating_add(credit);
        self.paused = false;
        self.sent
    }

    /// Sending may go up to this offset. Credit is never taken back.
    pub fn allow(&mut self, upto: u64) {
        self.credit = self.credit.max(upto);
    }

    /// The next bytes to send, at most `max`; none if there are none, or no credit, or it is paused. Follow with [`Window::mark_sent`].
    #[must_use]
    pub fn next_piece(&self, max: usize) -> Option<Piece<'_>> {
        let upto = self.end.min(self.credit);
        if self.paused || upto <= self.sent || max == 0 {
            return None;
        }
        let length = distance(self.sent, upto).min(max);
        let size = self.ring.len();
        let start = (self.head + distance(self.held_from, self.sent)) % size;
        let first = length.min(size - start);
        Some(Piece { offset: self.sent, data: [&self.ring[start..start + first], &self.ring[..length - first]] })
    }

    pub fn mark_sent(&mut self, count: usize) {
        self.sent = (self.sent + count as u64).min(self.end);
        self.sent_ever = self.sent_ever.max(self.sent);
        self.release_acked();
    }

    /// Gives the memory back if nothing is held. Not done by itself: a busy stream is empty again and again, and fresh pages are dear.
    pub fn shrink(&mut self) {
        if self.held() == 0 {
            self.ring = Vec::new();
            self.head = 0;
        }
    }

    /// Memory in use.
    #[must_use]
    pub fn allocated(&self) -> usize {
        self.ring.len()
    }

    /// Lets go of what was acknowledged and is promised to nobody.
    fn release_acked(&mut self) {
        let upto = if self.paused { self.acked } else { self.acked.min(self.sent) };
        self.release(distance(self.held_from, upto));
    }

    fn release(&mut self, count: usize) {
        let count = count.min(self.held());
        if count == 0 {
            return;
        }
        self.held_from += count as u64;
        self.head = (self.head + count) % self.ring.len();
        if self.held() == 0 {
            // Go on at the front, which is warm.
            self.head = 0;
        }
        self.raise_sent();
    }

    fn raise_sent(&mut self) {
        self.sent = self.sent.max(self.held_from);
        self.sent_ever = self.sent_ever.max(self.sent);
    }

    /// Makes the ring large enough for `more` bytes on top of what is held.
    fn reserve(&mut self, more: usize) {
        let needed = self.held() + more;
        if needed <= self.ring.len() {
            return;
        }
        let size = needed.max(self.ring.len().saturating_mul(2)).max(FIRST_RING_BYTES).min(self.capacity);
        let held = self.held();
        let mut grown = vec![0; size];
        let first = held.min(self.ring.len() - self.head);
        grown[..first].copy_from_slice(&self.ring[self.head..self.head + first]);
        grown[first..held].copy_from_slice(&self.ring[..held - first]);
        self.ring = grown;
        self.head = 0;
    }
}

/// Both are within one window of each other, which fits into memory.
fn distance(from: u64, to: u64) -> usize {
    usize::try_from(to.saturating_sub(from)).unwrap_or(usize::MAX)
}

#[cfg(test)]
mod tests;
