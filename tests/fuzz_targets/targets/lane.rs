//! The reading side of a shm ring beside a plain model. The writer may write anything.

use std::sync::atomic::{AtomicU64, Ordering};

use kvrouted::lane::{Consumer, LaneFault, Ring};

/// Words of the ring.
pub(crate) const WORDS: usize = 32;

/// What a writer may do, and when the reader reads; each has its arguments in the bytes that follow.
#[derive(Clone, Copy, Debug)]
#[repr(u8)]
pub(crate) enum Step {
    /// A place and a word: the word is stored there.
    Store,
    /// A number: the writer claims this many more words.
    Publish,
    /// A word: the tail is that.
    Lie,
    /// A number: the reader takes at most this many words.
    Read,
}

struct Model {
    head: u64,
    tail_seen: u64,
}

impl Model {
    fn read(&mut self, tail: u64, words: &[AtomicU64], words_max: usize) -> Result<Vec<u8>, LaneFault> {
        if tail < self.tail_seen {
            return Err(LaneFault::TailBackwards);
        }
        if tail - self.head > WORDS as u64 {
            return Err(LaneFault::TailBeyond);
        }
        self.tail_seen = tail;
        let end = tail.min(self.head + words_max as u64);
        let word = |at: u64| words[(at % WORDS as u64) as usize].load(Ordering::Relaxed).to_ne_bytes();
        let bytes = (self.head..end).flat_map(word).collect();
        self.head = end;
        Ok(bytes)
    }
}

fn word(data: &mut &[u8]) -> Option<u64> {
    let (bytes, rest) = data.split_first_chunk::<8>()?;
    *data = rest;
    Some(u64::from_le_bytes(*bytes))
}

fn byte(data: &mut &[u8]) -> Option<u8> {
    let (byte, rest) = data.split_first()?;
    *data = rest;
    Some(*byte)
}

/// Steps of a writer and a reader.
pub(crate) fn lane(mut data: &[u8]) {
    let words: Vec<AtomicU64> = (0..WORDS).map(|_| AtomicU64::new(0)).collect();
    let (tail, head) = (AtomicU64::new(0), AtomicU64::new(0));
    let ring = Ring { tail: &tail, head: &head, words: &words };
    let (mut consumer, mut model) = (Consumer::default(), Model { head: 0, tail_seen: 0 });
    let mut received = Vec::new();
    let mut step = |data: &mut &[u8]| -> Option<()> {
        match byte(data)? % 4 {
            0 => words[usize::from(byte(data)?) % WORDS].store(word(data)?, Ordering::Relaxed),
            1 => drop(tail.fetch_add(u64::from(byte(data)?), Ordering::Relaxed)),
            2 => tail.store(word(data)?, Ordering::Relaxed),
            _ => {
                let words_max = usize::from(byte(data)?);
                let expected = model.read(tail.load(Ordering::Relaxed), &words, words_max);
                received.clear();
                let read = consumer.pop(&ring, words_max, &mut received);
                assert_eq!(read, expected.as_ref().map(Vec::len).map_err(|fault| *fault));
                assert_eq!(received, expected.unwrap_or_default());
                assert_eq!(head.load(Ordering::Relaxed), model.head, "what is freed is what was read");
            }
        }
        Some(())
    };
    while step(&mut data).is_some() {}
}
