use proptest::prelude::*;

use super::*;

/// The same promises kept in the plainest way: the whole stream, and five numbers.
#[derive(Default)]
struct Model {
    stream: Vec<u8>,
    held_from: usize,
    acked: usize,
    sent: usize,
    sent_ever: usize,
    credit: usize,
    paused: bool,
}

impl Model {
    fn drop_to(&mut self, upto: usize) {
        self.held_from = self.held_from.max(upto);
        self.sent = self.sent.max(self.held_from);
        self.sent_ever = self.sent_ever.max(self.sent);
    }

    fn drop_acked(&mut self) {
        self.drop_to(if self.paused { self.acked } else { self.acked.min(self.sent) });
    }

    fn unsent(&self) -> &[u8] {
        let upto = self.stream.len().min(self.credit);
        if self.paused || upto <= self.sent { &[] } else { &self.stream[self.sent..upto] }
    }
}

#[derive(Debug, Clone)]
enum Step {
    Append(usize),
    AppendDropping(usize),
    Fill(usize, usize),
    Ack(u64),
    Pause,
    Resume(u64, u64),
    Allow(u64),
    Send(usize),
    Shrink,
    Extend(usize),
}

fn offset() -> impl Strategy<Value = u64> {
    prop_oneof![8 => 0..600u64, 1 => Just(u64::MAX)]
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        4 => (0..80usize).prop_map(Step::Append),
        1 => (0..80usize).prop_map(Step::AppendDropping),
        3 => (0..80usize, 0..90usize).prop_map(|(want, got)| Step::Fill(want, got)),
        3 => offset().prop_map(Step::Ack),
        1 => Just(Step::Pause),
        2 => (offset(), offset()).prop_map(|(from, credit)| Step::Resume(from, credit)),
        2 => offset().prop_map(Step::Allow),
        5 => (0..60usize).prop_map(Step::Send),
        1 => Just(Step::Shrink),
        1 => (0..20usize).prop_map(Step::Extend),
    ]
}

fn small(value: u64) -> usize {
    usize::try_from(value).unwrap()
}

proptest! {
    #[test]
    fn any_sequence_of_requests_agrees_with_the_model(capacity in 1..64usize, steps in prop::collection::vec(step(), 0..120)) {
        let mut capacity = capacity;
        let mut window = Window::new(capacity as u64);
        let mut model = Model::default();
        let mut next = 0u8;
        let mut bytes = |count: usize| -> Vec<u8> {
            (0..count).map(|_| { next = next.wrapping_add(1); next }).collect()
        };
        for step in steps {
            match step {
                Step::Append(count) => {
                    let data = bytes(count);
                    let taken = window.append(&data);
                    prop_assert_eq!(taken, count.min(capacity - (model.stream.len() - model.held_from)));
                    model.stream.extend_from_slice(&data[..taken]);
                }
                Step::AppendDropping(count) => {
                    let data = bytes(count);
                    window.append_dropping_oldest(&data);
                    model.stream.extend_from_slice(&data);
                    model.drop_to(model.stream.len().saturating_sub(capacity));
                }
                Step::Fill(want, got) => {
                    let [a, b] = window.spare(want);
                    let data = bytes(got.min(a.len() + b.len()));
                    let cut = data.len().min(a.len());
                    a[..cut].copy_from_slice(&data[..cut]);
                    b[..data.len() - cut].copy_from_slice(&data[cut..]);
                    window.commit(data.len());
                    model.stream.extend_from_slice(&data);
                }
                Step::Ack(upto) => {
                    window.ack(upto);
                    model.acked = model.acked.max(small(upto.min(model.sent_ever as u64)));
                    model.drop_acked();
                }
                Step::Pause => {
                    window.pause();
                    model.paused = true;
                    model.drop_acked();
                }
                Step::Resume(from, credit) => {
                    model.sent = small(from.clamp(model.held_from as u64, model.stream.len() as u64));
                    model.sent_ever = model.sent_ever.max(model.sent);
                    model.credit = model.sent.saturating_add(small(credit));
                    model.paused = false;
                    prop_assert_eq!(window.resume(from, credit), model.sent as u64);
                }
                Step::Allow(upto) => {
                    window.allow(upto);
                    model.credit = model.credit.max(small(upto));
                }
                Step::Send(max) => {
                    let expected = &model.unsent()[..model.unsent().len().min(max)];
                    let got = window.next_piece(max).map(|piece| (piece.offset, piece.data.concat()));
                    if expected.is_empty() {
                        prop_assert_eq!(got, None);
                    } else {
                        prop_assert_eq!(got, Some((model.sent as u64, expected.to_vec())));
                        let count = expected.len();
                        window.mark_sent(count);
                        model.sent += count;
                        model.sent_ever = model.sent_ever.max(model.sent);
                        model.drop_acked();
                    }
                }
                Step::Shrink => window.shrink(),
                Step::Extend(bytes) => {
                    window.extend(bytes);
                    capacity += bytes;
                }
            }
            prop_assert_eq!(window.held_from(), model.held_from as u64);
            prop_assert_eq!(window.end(), model.stream.len() as u64);
            prop_assert_eq!(window.sent(), model.sent as u64);
            prop_assert!(window.allocated() <= capacity);
            prop_assert_eq!(window.space(), capacity - window.held());
        }
    }
}

#[test]
fn an_acknowledgement_of_the_future_loses_nothing() {
    let mut window = Window::new(100);
    window.append(b"seen, unseen");
    window.allow(100);
    window.mark_sent(6);
    window.ack(u64::MAX);
    assert_eq!(window.held_from(), 6);
    assert_eq!(window.next_piece(100).map(|piece| piece.data.concat()), Some(b"unseen".to_vec()));
}

#[test]
fn what_was_sent_and_not_acknowledged_can_be_asked_for_again() {
    let mut window = Window::new(100);
    window.append(b"abcdef");
    window.allow(100);
    window.mark_sent(6);
    window.ack(2);
    assert_eq!(window.resume(0, 100), 2);
    assert_eq!(window.next_piece(100).map(|piece| piece.data.concat()), Some(b"cdef".to_vec()));
}

/// The acknowledgement was on its way when the client asked again: it gets all that it was promised, and then it counts.
#[test]
fn an_acknowledgement_behind_a_question_takes_nothing_from_its_answer() {
    let mut window = Window::new(100);
    window.append(b"abcdef");
    window.allow(100);
    window.mark_sent(6);
    assert_eq!(window.resume(2, 100), 2);
    window.ack(6);
    let piece = window.next_piece(3).unwrap();
    assert_eq!((piece.offset, piece.data.concat()), (2, b"cde".to_vec()));
    window.mark_sent(3);
    assert_eq!(window.held_from(), 5);
    window.mark_sent(1);
    assert_eq!((window.held_from(), window.held()), (6, 0));
}

#[test]
fn what_was_acknowledged_goes_when_nobody_waits_for_it_any_longer() {
    let mut window = Window::new(100);
    window.append(b"abcdef");
    window.allow(100);
    window.mark_sent(6);
    window.resume(2, 100);
    window.ack(6);
    window.pause();
    assert_eq!((window.held_from(), window.held()), (6, 0));
}

#[test]
fn an_idle_window_holds_no_memory_and_a_large_one_grows_as_needed() {
    let mut window = Window::new(8 * 1024 * 1024);
    assert_eq!(window.allocated(), 0);
    window.append(&[1; 1000]);
    assert!(window.allocated() < 100_000);
    window.allow(u64::MAX);
    window.mark_sent(1000);
    window.ack(1000);
    window.shrink();
    assert_eq!(window.allocated(), 0);
}
