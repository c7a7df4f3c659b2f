//! The memory of the tree: numbered words in chunks that come as they are needed and stay.

use std::sync::OnceLock;

use crate::sync::{AtomicU64, Ordering};

/// Words of a chunk, as a power of two. The model checker gets a small world.
pub(super) const CHUNK_ORDER: u32 = if cfg!(all(test, kvrouted_loom)) { 7 } else { 16 };
/// Words of a chunk: what is given out as one never reaches beyond one.
pub(super) const CHUNK_WORDS: u32 = 1 << CHUNK_ORDER;
/// Words of a cache line: what is given out begins with one.
pub(super) const LINE_WORDS: u32 = 8;
/// Bytes of a cache line.
const LINE_BYTES: usize = 64;

/// The words of a cache line.
pub(super) type Line = [AtomicU64; LINE_WORDS as usize];

/// Some words, the first of which begins a cache line.
#[derive(Debug)]
struct Chunk {
    words: Box<[AtomicU64]>,
    /// Words before the first.
    skipped: usize,
}

impl Chunk {
    fn new() -> Self {
        let spare = LINE_WORDS - 1;
        let words: Box<[AtomicU64]> = (0..CHUNK_WORDS + spare).map(|_| AtomicU64::new(0)).collect();
        let skipped = words.as_ptr().align_offset(LINE_BYTES).min(spare as usize);
        Self { words, skipped }
    }
}

/// Words by number. Every access is checked, as a reader may follow a number that is no longer true; what it
/// then reads is thrown away when it finds that its root has changed.
#[derive(Debug)]
pub(super) struct Words(Box<[OnceLock<Chunk>]>);

impl Words {
    /// Room for so many words at most; none is there yet.
    pub(super) fn new(words_max: usize) -> Self {
        Self((0..words_max.div_ceil(CHUNK_WORDS as usize)).map(|_| OnceLock::new()).collect())
    }

    /// Makes a chunk that is not there yet; `None` if all are. The one writer calls it.
    pub(super) fn grow(&self) -> Option<u32> {
        let (at, chunk) = self.0.iter().enumerate().find(|(_, chunk)| chunk.get().is_none())?;
        chunk.set(Chunk::new()).ok()?;
        Some((at as u32) << CHUNK_ORDER)
    }

    /// The words from `at` to the end of its chunk, and some behind; none where there is no such chunk.
    #[inline]
    fn from(&self, at: u32) -> &[AtomicU64] {
        let Some(chunk) = self.0.get((at >> CHUNK_ORDER) as usize).and_then(OnceLock::get) else { return &[] };
        let from = chunk.skipped + (at & (CHUNK_WORDS - 1)) as usize;
        chunk.words.get(from..).unwrap_or_default()
    }

    /// The words `at..at + len`; `None` where there are none, or not in one chunk.
    #[inline]
    pub(super) fn slice(&self, at: u32, len: u32) -> Option<&[AtomicU64]> {
        self.from(at).get(..len as usize)
    }

    /// The line that begins with `at`, if there is one.
    #[inline]
    pub(super) fn line(&self, at: u32) -> Option<&Line> {
        self.from(at).first_chunk()
    }

    /// As [`Words::slice`], for the writer, who knows what it may ask for.
    #[inline]
    pub(super) fn run(&self, at: u32, len: u32) -> &[AtomicU64] {
        let words = self.slice(at, len);
        debug_assert!(words.is_some(), "the writer looks where there is nothing: {at}, {len}");
        words.unwrap_or_default()
    }

    /// Copies words. Relaxed: the root's sequence tells readers of it.
    pub(super) fn copy(&self, from: u32, to: u32, len: u32) {
        let (from, to) = (self.run(from, len), self.run(to, len));
        to.iter().zip(from).for_each(|(to, from)| to.store(from.load(Ordering::Relaxed), Ordering::Relaxed));
    }
}

/// Two halves of a word, the upper first.
#[inline]
pub(super) const fn halves(word: u64) -> (u32, u32) {
    ((word >> 32) as u32, word as u32)
}

/// The word of two halves, the upper first.
#[inline]
pub(super) const fn word(upper: u32, lower: u32) -> u64 {
    (upper as u64) << 32 | lower as u64
}
