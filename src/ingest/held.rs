//! Messages of one worker that wait while its blocks are dumped or loaded, or lost ones are fetched again: pure.
//!
//! | state | message | released | slice taken | held on |
//! |---|---|---|---|---|
//! | Holding | waits; beyond the bound the caller releases, or drops the oldest | Releasing | – | Holding |
//! | Releasing | waits behind the others (its shard leaves it in its socket) | Releasing | until nothing waits | Holding |
//!
//! What waits is bounded for each worker, and by [`HeldBytes`] for all that are recovered in one shard.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::event::gate::SequenceGate;
use crate::ids::EventSeq;
use crate::limits::{HELD_BYTES_MAX, HELD_MESSAGES_MAX, RECOVERY_HELD_BYTES_MAX};

/// What the worker is held for.
#[derive(Debug)]
pub(super) enum Purpose {
    /// Its blocks are walked. The gate is a copy that runs ahead, to tell at once what will empty the worker.
    Dump(Box<SequenceGate>),
    /// Blocks are put in; once that has begun, nothing else is in it.
    Load {
        /// Whether it has.
        begun: bool,
    },
    /// Lost batches are fetched. The gate judges what waits, to tell at once when another incarnation speaks.
    Recovery(Box<SequenceGate>),
}

/// Payload bytes that wait in all streams of a shard. One thread counts; atomic only so that a shard can be handed
/// to its thread.
#[derive(Clone, Debug, Default)]
pub(super) struct HeldBytes(Arc<AtomicUsize>);

impl HeldBytes {
    fn add(&self, bytes: usize) {
        // Relaxed, here and below: one thread reads and writes it.
        self.0.fetch_add(bytes, Ordering::Relaxed);
    }

    fn subtract(&self, bytes: usize) {
        self.0.fetch_sub(bytes, Ordering::Relaxed);
    }

    fn get(&self) -> usize {
        self.0.load(Ordering::Relaxed)
    }
}

/// One message that waits.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Message {
    /// A batch, with the hash of its payload.
    Batch { seq: EventSeq, payload_hash: u64, payload: Box<[u8]> },
    /// So many frames that are no batch.
    Misframed(usize),
}

impl Message {
    fn payload_bytes(&self) -> usize {
        match self {
            Self::Batch { payload, .. } => payload.len(),
            Self::Misframed(_) => 0,
        }
    }
}

/// What the messages that wait have in common with a stream known up to a watermark.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Overlap {
    /// Nothing of what waits is from before the watermark.
    None,
    /// So many, from the oldest, are of that stream and from before the watermark.
    Shown(usize),
    /// They are from before the watermark, and none of them is remembered: what follows will show.
    NotYet,
    /// They are of another stream.
    Contradicted,
}

/// The messages that wait, and what for.
#[derive(Debug)]
pub(super) struct Held {
    pub(super) purpose: Purpose,
    waiting: VecDeque<Message>,
    bytes: usize,
    of_shard: HeldBytes,
    is_releasing: bool,
}

impl Drop for Held {
    fn drop(&mut self) {
        self.of_shard.subtract(self.bytes);
    }
}

impl Held {
    pub(super) const fn new(purpose: Purpose, of_shard: HeldBytes) -> Self {
        Self { purpose, waiting: VecDeque::new(), bytes: 0, of_shard, is_releasing: false }
    }

    /// Takes a message; `false` = it is one more than may wait. It is kept all the same: nothing is lost.
    pub(super) fn push(&mut self, message: Message) -> bool {
        self.weigh(&message);
        self.waiting.push_back(message);
        self.waiting.len() <= HELD_MESSAGES_MAX && self.bytes <= HELD_BYTES_MAX
    }

    /// Puts back what was popped last.
    pub(super) fn put_back(&mut self, message: Message) {
        self.weigh(&message);
        self.waiting.push_front(message);
    }

    fn weigh(&mut self, message: &Message) {
        self.bytes += message.payload_bytes();
        self.of_shard.add(message.payload_bytes());
    }

    /// How many messages wait.
    pub(super) fn len(&self) -> usize {
        self.waiting.len()
    }

    /// Whether more waits than may while a worker is recovered.
    pub(super) fn is_over(&self) -> bool {
        self.waiting.len() > HELD_MESSAGES_MAX
            || self.bytes > HELD_BYTES_MAX
            || (self.of_shard.get() > RECOVERY_HELD_BYTES_MAX && self.bytes > 0)
    }

    /// The sequence of the batch that waits longest.
    pub(super) fn first_seq(&self) -> Option<EventSeq> {
        self.waiting.iter().find_map(|message| match message {
            Message::Batch { seq, .. } => Some(*seq),
            Message::Misframed(_) => None,
        })
    }

    /// Drops everything that waits and answers how much that was.
    pub(super) fn clear(&mut self) -> usize {
        let messages = self.waiting.len();
        while self.pop().is_some() {}
        messages
    }

    /// Drops the batches before `seq` that wait longest, and answers how many those were.
    pub(super) fn drop_before(&mut self, seq: EventSeq) -> usize {
        let messages = self.waiting.len();
        while self.first_seq().is_some_and(|first| first < seq) {
            self.pop();
        }
        messages - self.waiting.len()
    }

    /// From now on it waits for something else, and is not being applied any more.
    pub(super) fn hold_on(&mut self, purpose: Purpose) {
        (self.purpose, self.is_releasing) = (purpose, false);
    }

    /// The oldest message that waits.
    pub(super) fn pop(&mut self) -> Option<Message> {
        let message = self.waiting.pop_front()?;
        self.bytes -= message.payload_bytes();
        self.of_shard.subtract(message.payload_bytes());
        Some(message)
    }

    /// How many messages wait.
    pub(super) fn waiting(&self) -> usize {
        self.waiting.len()
    }

    /// What the oldest messages have in common with a stream of which these payloads are remembered, by ascending
    /// sequence up to the watermark. Only a run of ascending sequences is looked at: behind it another incarnation
    /// may speak.
    pub(super) fn overlap(&self, watermark: EventSeq, remembered: &[(EventSeq, u64)]) -> Overlap {
        let (mut before, mut overlap) = (None, Overlap::None);
        for (at, message) in self.waiting.iter().enumerate() {
            let Message::Batch { seq, payload_hash, .. } = message else { continue };
            if *seq > watermark || before.is_some_and(|before| *seq <= before) {
                break;
            }
            before = Some(*seq);
            match remembered.binary_search_by_key(seq, |(seq, _)| *seq) {
                Ok(found) if remembered[found].1 == *payload_hash => overlap = Overlap::Shown(at + 1),
                Ok(_) => return Overlap::Contradicted,
                Err(_) if overlap == Overlap::None => overlap = Overlap::NotYet,
                Err(_) => {}
            }
        }
        overlap
    }

    /// What waits is to be applied now. Answers whether that is new.
    pub(super) const fn release(&mut self) -> bool {
        !std::mem::replace(&mut self.is_releasing, true)
    }

    /// Whether what waits is being applied.
    pub(super) const fn is_releasing(&self) -> bool {
        self.is_releasing
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn batch(seq: u64, bytes: usize) -> Message {
        Message::Batch { seq: EventSeq(seq), payload_hash: seq, payload: vec![0; bytes].into() }
    }

    #[test]
    fn messages_leave_in_order_and_the_one_too_many_is_kept() {
        let mut held = Held::new(Purpose::Load { begun: true }, HeldBytes::default());
        for seq in 0..HELD_MESSAGES_MAX as u64 {
            assert!(held.push(batch(seq, 1)), "{seq}");
        }
        assert!(!held.push(Message::Misframed(1)));
        for seq in 0..HELD_MESSAGES_MAX as u64 {
            assert_eq!(held.pop(), Some(batch(seq, 1)));
        }
        assert_eq!((held.pop(), held.pop(), held.bytes), (Some(Message::Misframed(1)), None, 0));
    }

    #[test]
    fn bytes_are_bounded_too_and_leave_with_their_message() {
        let mut held = Held::new(Purpose::Load { begun: true }, HeldBytes::default());
        assert!(held.push(batch(0, HELD_BYTES_MAX)));
        assert!(!held.push(batch(1, 1)));
        held.pop();
        assert_eq!(held.bytes, 1);
        assert!(held.push(batch(2, HELD_BYTES_MAX - 1)));
    }

    #[test]
    fn what_waits_is_matched_with_a_stream_by_its_bytes() {
        let remembered: Vec<_> = (90..=100).map(|seq| (EventSeq(seq), seq)).collect();
        let overlap = |messages: &[(u64, u64)]| {
            let mut held = Held::new(Purpose::Load { begun: true }, HeldBytes::default());
            for (seq, payload_hash) in messages {
                held.push(Message::Batch { seq: EventSeq(*seq), payload_hash: *payload_hash, payload: [].into() });
            }
            held.overlap(EventSeq(100), &remembered)
        };
        assert_eq!(overlap(&[]), Overlap::None);
        assert_eq!(overlap(&[(101, 5)]), Overlap::None);
        assert_eq!(overlap(&[(7, 5), (8, 5)]), Overlap::NotYet);
        assert_eq!(overlap(&[(7, 5), (101, 5)]), Overlap::NotYet, "a gap beyond the watermark shows nothing");
        assert_eq!(overlap(&[(89, 5), (90, 90), (91, 91), (101, 5)]), Overlap::Shown(3));
        assert_eq!(overlap(&[(90, 90), (3, 5), (91, 7)]), Overlap::Shown(1), "3 is of another incarnation");
        assert_eq!(overlap(&[(89, 5), (90, 91)]), Overlap::Contradicted);
    }

    #[test]
    fn it_is_released_once() {
        let mut held = Held::new(Purpose::Load { begun: false }, HeldBytes::default());
        assert!(!held.is_releasing() && held.release());
        assert!(held.is_releasing() && !held.release());
    }
}
