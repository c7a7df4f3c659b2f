//! The last batches of a relay's stream, from which it is replayed: pure.

use std::collections::VecDeque;
use std::sync::Arc;

use crate::ids::EventSeq;

/// Batches that follow each other, bounded in number and bytes. The last one is always there, whatever its size, so
/// that who knows it can be shown that nothing is missing.
#[derive(Debug)]
pub struct ReplayBuffer {
    first: u64,
    batches: VecDeque<Arc<[u8]>>,
    bytes: usize,
    batches_max: usize,
    bytes_max: usize,
}

impl ReplayBuffer {
    /// An empty one.
    #[must_use]
    pub const fn new(batches_max: usize, bytes_max: usize) -> Self {
        Self { first: 0, batches: VecDeque::new(), bytes: 0, batches_max, bytes_max }
    }

    /// Takes the next batch; answers how many had to go for it. One that does not follow begins anew.
    pub fn push(&mut self, seq: EventSeq, payload: Arc<[u8]>) -> u64 {
        if seq != self.next() {
            self.forget();
            self.first = seq.0;
        }
        self.bytes += payload.len();
        self.batches.push_back(payload);
        let mut gone = 0;
        while self.batches.len() > 1 && (self.batches.len() > self.batches_max || self.bytes > self.bytes_max) {
            self.pop();
            gone += 1;
        }
        gone
    }

    fn pop(&mut self) {
        if let Some(oldest) = self.batches.pop_front() {
            self.bytes -= oldest.len();
            self.first += 1;
        }
    }

    /// Drops every batch; what comes next has the next sequence.
    pub fn forget(&mut self) {
        while !self.batches.is_empty() {
            self.pop();
        }
    }

    /// The oldest batch there is, or the next one where there is none.
    #[must_use]
    pub const fn first(&self) -> EventSeq {
        EventSeq(self.first)
    }

    /// The batch that will come next.
    #[must_use]
    pub fn next(&self) -> EventSeq {
        EventSeq(self.first + self.batches.len() as u64)
    }

    /// Bytes of all batches.
    #[must_use]
    pub const fn bytes(&self) -> usize {
        self.bytes
    }

    /// A batch, if it is there.
    #[must_use]
    pub fn get(&self, seq: EventSeq) -> Option<&Arc<[u8]>> {
        self.batches.get(usize::try_from(seq.0.checked_sub(self.first)?).ok()?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn batch(bytes: usize) -> Arc<[u8]> {
        vec![7; bytes].into()
    }

    #[test]
    fn it_is_bounded_in_batches_and_bytes_and_keeps_the_last() {
        let mut buffer = ReplayBuffer::new(3, 100);
        assert_eq!((buffer.first(), buffer.next()), (EventSeq(0), EventSeq(0)));
        let gone: Vec<u64> = (0..5).map(|seq| buffer.push(EventSeq(seq), batch(10))).collect();
        assert_eq!((gone, buffer.first(), buffer.bytes()), (vec![0, 0, 0, 1, 1], EventSeq(2), 30));
        assert!(buffer.get(EventSeq(1)).is_none() && buffer.get(EventSeq(2)).is_some());
        assert_eq!((buffer.push(EventSeq(5), batch(1000)), buffer.first()), (3, EventSeq(5)), "larger than all it may");
        assert_eq!((buffer.push(EventSeq(6), batch(1)), buffer.bytes()), (1, 1));
        buffer.forget();
        assert_eq!((buffer.first(), buffer.next(), buffer.bytes()), (EventSeq(7), EventSeq(7), 0));
        buffer.push(EventSeq(9), batch(1));
        assert_eq!((buffer.first(), buffer.next()), (EventSeq(9), EventSeq(10)), "what does not follow begins anew");
    }
}
