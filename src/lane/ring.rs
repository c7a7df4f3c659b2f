//! A ring of words with one writer and one reader, neither of which trusts the other.
//!
//! Each side keeps its own position, and the other side's last valid position, in memory of its own. It never reads its
//! own position back from shared memory. It checks a position that it reads there against both before it uses it.
//!
//! Positions count words since the lane was made. At 10 GiB a second, a u64 lasts for centuries.

use std::sync::atomic::{AtomicU64, Ordering, fence};

use thiserror::Error;

use crate::limits::{LANE_LINES_PER_POLL, LANE_OWNED_BYTES, LANE_PUBLISHED_BYTES};

/// Bytes of a word.
pub(super) const WORD_BYTES: usize = 8;
/// Words that are published at once: a reader can copy the first words of a long frame while the rest is written.
const PUBLISHED_WORDS: usize = LANE_PUBLISHED_BYTES / WORD_BYTES;
/// Words beyond the tail whose lines a poll may take.
const OWNED_WORDS: u64 = (LANE_OWNED_BYTES / WORD_BYTES) as u64;
/// Words of a cache line. The model's ring has two words in all.
const LINE_WORDS: u64 = if cfg!(all(test, kvrouted_loom)) { 1 } else { 8 };

/// The shared part of a ring.
#[derive(Debug)]
pub struct Ring<'a, W> {
    /// Where the next word is written. Sync point PUBLISH: stored with Release by the writer after the words before it,
    /// loaded with Acquire by the reader before it copies them.
    pub tail: &'a W,
    /// Where the next word is read. Sync point RECLAIM: stored with Release by the reader after it has copied the words
    /// before it, loaded with Acquire by the writer before it writes over them.
    pub head: &'a W,
    /// The words; their number is a power of two.
    pub words: &'a [W],
}

impl<W> Ring<'_, W> {
    fn capacity(&self) -> u64 {
        self.words.len() as u64
    }

    /// The words from a position on: up to the end of the ring, and on from its beginning.
    fn from(&self, position: u64) -> (&[W], &[W]) {
        let at = position as usize & (self.words.len() - 1);
        let (wrapped, first) = self.words.split_at(at);
        (first, wrapped)
    }
}

fn copy_in<W: Word>(words: &[W], chunks: &[[u8; WORD_BYTES]]) {
    for (word, chunk) in words.iter().zip(chunks) {
        // Relaxed: the Release of PUBLISH publishes it.
        word.store(u64::from_ne_bytes(*chunk), Ordering::Relaxed);
    }
}

/// Reads the last word first. A processor that sees lines read in a row may fetch the next ones of that direction, as Zen 4
/// does. Upwards, these are lines that the writer owns and is about to write; downwards, lines that were read before.
fn copy_out<W: Word>(words: &[W], chunks: &mut [[u8; WORD_BYTES]]) {
    for (word, chunk) in words.iter().zip(chunks).rev() {
        // Relaxed: the Acquire of PUBLISH came before.
        *chunk = word.load(Ordering::Relaxed).to_ne_bytes();
    }
}

/// The side that writes.
#[derive(Debug, Default)]
pub struct Producer {
    tail: u64,
    /// The last valid head.
    head: u64,
    /// The end of the lines that this side has taken since they were last written. The reader's processor may have fetched
    /// some again, and it holds the line of the last words that it has read.
    owned: u64,
}

impl Producer {
    /// Words that can be written now.
    ///
    /// # Errors
    /// The reader's position is invalid.
    pub fn room<W: Word>(&mut self, ring: &Ring<'_, W>) -> Result<usize, LaneFault> {
        // Acquire: pairs with the Release of RECLAIM. Words written from here on come after the reader's copies.
        let head = ring.head.load(Ordering::Acquire);
        if head < self.head {
            return Err(LaneFault::HeadBackwards);
        }
        if head > self.tail {
            return Err(LaneFault::HeadBeyond);
        }
        self.head = head;
        Ok((ring.capacity() - (self.tail - head)) as usize)
    }

    /// Writes as many whole words of `bytes` as there is room for. Answers with their bytes.
    ///
    /// # Errors
    /// As [`Producer::room`].
    pub fn push<W: Word>(&mut self, ring: &Ring<'_, W>, bytes: &[u8]) -> Result<usize, LaneFault> {
        let (chunks, _) = bytes.as_chunks::<WORD_BYTES>();
        let mut room = (ring.capacity() - (self.tail - self.head)) as usize;
        if room < chunks.len() {
            room = self.room(ring)?;
        }
        let chunks = &chunks[..chunks.len().min(room)];
        if chunks.is_empty() {
            return Ok(0);
        }
        for piece in chunks.chunks(PUBLISHED_WORDS) {
            self.own(ring, self.tail + piece.len() as u64, usize::MAX);
            let (first, wrapped) = ring.from(self.tail);
            let (to_first, to_wrapped) = piece.split_at(piece.len().min(first.len()));
            copy_in(first, to_first);
            copy_in(wrapped, to_wrapped);
            self.tail += piece.len() as u64;
            // Release: PUBLISH, pairs with the Acquire in `Consumer::ready`.
            ring.tail.store(self.tail, Ordering::Release);
        }
        Ok(chunks.len() * WORD_BYTES)
    }

    /// Takes a few of the lines that will be written next, so that the write need not wait for them. Returns whether it
    /// took any. Call it while busy-polling.
    pub fn own_ahead<W: Word>(&mut self, ring: &Ring<'_, W>) -> bool {
        let capacity = ring.capacity();
        let end = self.tail + OWNED_WORDS.min(capacity / 2);
        if self.owned >= end {
            return false;
        }
        // A fault stays for the next write to find.
        if end - self.head > capacity && self.room(ring).is_err() {
            return false;
        }
        let takes = self.own(ring, end.min(self.head + capacity), LANE_LINES_PER_POLL);
        if takes {
            // SeqCst: orders nothing, and pairs with no other. It waits for these stores: with more of them pending, the
            // fence after the next transfer would wait for all.
            W::fence();
        }
        takes
    }

    /// Takes up to `lines_max` lines before `end`; every word up to there is free. Returns whether it took any.
    ///
    /// It stores a word to each. A prefetch for writing made no difference on Zen 4, perhaps because the processor has a
    /// copy of each line already. With one store for each line, a processor takes several lines at a time. With eight, the
    /// stores of a few lines fill its queue.
    fn own<W: Word>(&mut self, ring: &Ring<'_, W>, end: u64, lines_max: usize) -> bool {
        self.owned = self.owned.max(self.tail);
        let from = self.owned;
        for _ in 0..lines_max {
            if self.owned >= end {
                break;
            }
            // Relaxed: nothing reads this word before it is written and published.
            ring.words[self.owned as usize & (ring.words.len() - 1)].store(0, Ordering::Relaxed);
            self.owned = (self.owned / LINE_WORDS + 1) * LINE_WORDS;
        }
        self.owned > from
    }
}

/// The side that reads.
#[derive(Debug, Default)]
pub struct Consumer {
    head: u64,
    /// The last valid tail.
    tail: u64,
}

impl Consumer {
    /// Words that can be read now.
    ///
    /// # Errors
    /// The writer's position is invalid.
    pub fn ready<W: Word>(&mut self, ring: &Ring<'_, W>) -> Result<usize, LaneFault> {
        // Acquire: pairs with the Release of PUBLISH. The words before it are there.
        let tail = ring.tail.load(Ordering::Acquire);
        if tail < self.tail {
            return Err(LaneFault::TailBackwards);
        }
        if tail - self.head > ring.capacity() {
            return Err(LaneFault::TailBeyond);
        }
        self.tail = tail;
        Ok((tail - self.head) as usize)
    }

    /// Appends up to `words_max` words, at most one ring, to `out`, and frees their room. Answers with their bytes.
    /// Words that arrive meanwhile are copied too. Every word is read once: later writes to it change nothing here.
    ///
    /// # Errors
    /// As [`Consumer::ready`], and only if nothing was copied. Otherwise the next call finds the fault.
    pub fn pop<W: Word>(
        &mut self,
        ring: &Ring<'_, W>,
        words_max: usize,
        out: &mut Vec<u8>,
    ) -> Result<usize, LaneFault> {
        let (words_max, mut popped) = (words_max.min(ring.words.len()), 0);
        loop {
            let count = match self.ready(ring) {
                Ok(ready) => ready.min(words_max - popped),
                Err(fault) if popped == 0 => return Err(fault),
                Err(_) => 0,
            };
            if count == 0 {
                return Ok(popped * WORD_BYTES);
            }
            let held = out.len();
            out.resize(held + count * WORD_BYTES, 0);
            let (chunks, _) = out[held..].as_chunks_mut::<WORD_BYTES>();
            let (first, wrapped) = ring.from(self.head);
            let (of_first, of_wrapped) = chunks.split_at_mut(count.min(first.len()));
            copy_out(wrapped, of_wrapped);
            copy_out(first, of_first);
            self.head += count as u64;
            // Release: RECLAIM, pairs with the Acquire in `Producer::room`.
            ring.head.store(self.head, Ordering::Release);
            popped += count;
        }
    }

    /// The words read since the lane was made.
    #[must_use]
    pub const fn position(&self) -> u64 {
        self.head
    }
}

/// A word that two processes share: the operations of an atomic that a lane needs, so that the model checker can use
/// its own atomics.
pub trait Word {
    /// As [`AtomicU64::load`].
    fn load(&self, order: Ordering) -> u64;
    /// As [`AtomicU64::store`].
    fn store(&self, value: u64, order: Ordering);
    /// As [`AtomicU64::swap`].
    fn swap(&self, value: u64, order: Ordering) -> u64;
    /// As [`AtomicU64::fetch_or`].
    fn set(&self, bits: u64, order: Ordering);
    /// As [`AtomicU64::fetch_and`] of the complement.
    fn clear(&self, bits: u64, order: Ordering);
    /// As [`fence`] of sequential consistency.
    fn fence();
}

// Inlined everywhere: a call for each word makes a copy seven times as slow.
impl Word for AtomicU64 {
    #[inline]
    fn load(&self, order: Ordering) -> u64 {
        self.load(order)
    }

    #[inline]
    fn store(&self, value: u64, order: Ordering) {
        self.store(value, order);
    }

    #[inline]
    fn swap(&self, value: u64, order: Ordering) -> u64 {
        self.swap(value, order)
    }

    #[inline]
    fn set(&self, bits: u64, order: Ordering) {
        self.fetch_or(bits, order);
    }

    #[inline]
    fn clear(&self, bits: u64, order: Ordering) {
        self.fetch_and(!bits, order);
    }

    #[inline]
    fn fence() {
        // SeqCst: every caller names what it pairs with, or why it needs none.
        fence(Ordering::SeqCst);
    }
}

/// An invalid position of the other side, which is not trusted any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum LaneFault {
    /// The writer has taken back what it had published.
    #[error("the writer's position went backwards")]
    TailBackwards,
    /// The writer says that it has written more than the ring holds.
    #[error("the writer's position is beyond the ring")]
    TailBeyond,
    /// The reader has taken back what it had freed.
    #[error("the reader's position went backwards")]
    HeadBackwards,
    /// The reader says that it has read what was not written.
    #[error("the reader's position is beyond the writer's")]
    HeadBeyond,
}
