//! Memory for the blocks of a shard: u64 words in chunks that never move.
//!
//! A word is named by a u32: its chunk above, its place in the chunk below. The writer takes **extents**, whole
//! granules of 64 bytes that do not cross a chunk, and gives back any granules of them. A chunk is neither moved
//! nor returned to the system before the arena and all its views are gone, so that a reader that follows a stale
//! index finds memory there, old as it may be.
//!
//! Each granule has an **owner**, a number that means nothing here, to get from a word to whom it belongs.
//!
//! # How free granules are kept
//!
//! A free run carries its own bookkeeping, so that there is no list to allocate: in its first granule the
//! neighbours on the list of runs of its size and its length, in its last word its length again (for whoever frees
//! the granule behind it). One bit per granule says which granules begin or end such a run. Runs of 1 to 128
//! granules have a list per size, all longer ones share one: every extent is found by size in a few steps, and
//! two free runs never touch.
//!
//! The end of the newest chunk that was never handed out is **fresh**: it is no run, nothing has been written to
//! it, and so it costs no memory yet. Words are zeroed when they leave it, which makes every word below it
//! something that may be read.
//!
//! A chunk of which nothing is in use any more gives its memory back to the system: it stays where it is and reads as
//! zeros, is no run, and its bookkeeping goes. One such chunk is kept as a run, so that a shard that goes up and down
//! around a chunk's end does not ask for pages each time.

#![expect(unsafe_code, reason = "words are written through raw pointers while readers look at others")]

mod directory;
mod free_runs;
#[cfg(test)]
mod tests;

pub(in crate::index) use directory::ArenaView;

use super::ahead::Ahead;
use super::prefetch::prefetch;
use directory::Directory;
use free_runs::FreeRuns;
use std::collections::BTreeSet;
use std::sync::Arc;

/// Words of a chunk: 2 MiB, a huge page where the system has them, but for the first chunk.
pub(in crate::index) const CHUNK_WORDS: u32 = 1 << CHUNK_BITS;
/// Words of a granule: one cache line.
pub(in crate::index) const GRANULE_WORDS: u32 = 1 << GRANULE_BITS;
/// Words of an extent, at most.
pub(in crate::index) const EXTENT_WORDS_MAX: u32 = 1024;

const CHUNK_BITS: u32 = 18;
const GRANULE_BITS: u32 = 3;
const CHUNKS_MAX: usize = 1 << (u32::BITS - CHUNK_BITS);
const CHUNK_GRANULES: u32 = CHUNK_WORDS / GRANULE_WORDS;
const EXTENT_GRANULES_MAX: u32 = EXTENT_WORDS_MAX / GRANULE_WORDS;
const CHUNK_BYTES: usize = CHUNK_WORDS as usize * size_of::<u64>();
/// Granules of the newest chunk that are still fresh when the next chunk is asked for: half of it. That leaves 10 ms at
/// 200 000 blocks a second whose chains are one block long.
const AHEAD_GRANULES: u32 = CHUNK_GRANULES / 2;
/// Chunks of which nothing is in use that keep their memory.
const WHOLE_CHUNKS_KEPT: u32 = 1;

const _: () = assert!(EXTENT_GRANULES_MAX == u128::BITS, "free runs keep one bit for each size of extent");
const _: () = assert!(CHUNK_GRANULES.is_multiple_of(u64::BITS), "the bits of a chunk are whole words");

/// Some words in a row, inside one chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::index) struct Extent {
    /// The first word, a multiple of [`GRANULE_WORDS`].
    pub(in crate::index) base: u32,
    /// How many, a multiple of [`GRANULE_WORDS`].
    pub(in crate::index) words: u32,
}

/// What the writer keeps beside a chunk.
#[derive(Debug)]
struct Margin {
    /// The owner of each granule.
    owners: Box<[u32]>,
    /// One bit for each granule: it is in a free run.
    free: Box<[u64]>,
}

impl Margin {
    /// Of a chunk that has given its memory back.
    fn none() -> Self {
        Self { owners: Box::default(), free: Box::default() }
    }

    fn new() -> Self {
        // Zeroed by the allocator: pages of the table are used as granules are.
        Self {
            owners: vec![0; CHUNK_GRANULES as usize].into_boxed_slice(),
            free: vec![0; (CHUNK_GRANULES / u64::BITS) as usize].into_boxed_slice(),
        }
    }

    fn bytes(&self) -> usize {
        size_of_val(&*self.owners) + size_of_val(&*self.free)
    }
}

/// The memory, in the hand of the only one who writes to it.
#[derive(Debug)]
pub(in crate::index) struct Arena {
    directory: Arc<Directory>,
    /// The next chunk.
    ahead: Ahead,
    margins: Vec<Margin>,
    runs: FreeRuns,
    /// The first granule of the newest chunk that is fresh.
    fresh: u32,
    /// The granule behind the newest chunk.
    fresh_end: u32,
    /// Chunks that have given their memory back.
    released: BTreeSet<u32>,
    /// The granule behind the last that has ever left the fresh part; everything below can be read.
    known: u32,
}

impl Arena {
    /// An arena without a chunk.
    pub(in crate::index) fn new() -> Self {
        Self {
            directory: Arc::new(Directory::new()),
            ahead: Ahead::new(CHUNK_BYTES),
            margins: Vec::new(),
            runs: FreeRuns::new(),
            fresh: 0,
            released: BTreeSet::new(),
            fresh_end: 0,
            known: 0,
        }
    }

    /// The same words for a reader.
    pub(in crate::index) fn view(&self) -> ArenaView {
        ArenaView::new(Arc::clone(&self.directory))
    }

    /// An extent of at least so many words, at least a granule, without an owner. What is in it is anything.
    ///
    /// `None` if there are no more word numbers, if the system has no memory for a chunk, or beyond
    /// [`EXTENT_WORDS_MAX`].
    pub(in crate::index) fn allocate(&mut self, words: u32) -> Option<Extent> {
        let granules = granules(words.max(1));
        if granules > EXTENT_GRANULES_MAX {
            return None;
        }
        let mut found = self.runs.take_fit(&self.directory, granules);
        if found.is_none() && granules > self.fresh_end - self.fresh && self.reopen_chunk() {
            found = self.runs.take_fit(&self.directory, granules);
        }
        let first = match found {
            Some(first) => {
                self.mark(first, granules, false);
                first
            }
            None => self.take_fresh(granules)?,
        };
        Some(Extent { base: first << GRANULE_BITS, words: granules << GRANULE_BITS })
    }

    /// Makes an extent of `words_now` words longer where it is, if what follows it is free; the granules it gains
    /// have no owner. Whether it is now `words_wanted` long.
    pub(in crate::index) fn extend(&mut self, base: u32, words_now: u32, words_wanted: u32) -> bool {
        let (first, now, wanted) = (granule(base), granules(words_now), granules(words_wanted));
        if wanted <= now {
            return true;
        }
        let (next, gain) = (first + now, wanted - now);
        if wanted > EXTENT_GRANULES_MAX || next.is_multiple_of(CHUNK_GRANULES) {
            return false;
        }
        if next == self.fresh {
            return gain <= self.fresh_end - self.fresh && self.take_fresh(gain).is_some();
        }
        if !self.is_free(next) || self.runs.length(&self.directory, next) < gain {
            return false;
        }
        self.runs.take(&self.directory, next, gain);
        self.mark(next, gain, false);
        true
    }

    /// Gives back granules of one extent: all of them or some. They may be handed out again at once, so no
    /// reader may still be looking at them.
    pub(in crate::index) fn free(&mut self, base: u32, words: u32) {
        let (first, count) = (granule(base), granules(words));
        debug_assert!(base.is_multiple_of(GRANULE_WORDS), "granules are freed whole");
        debug_assert!((first..first + count).all(|at| !self.is_free(at)), "freed twice");
        if count == 0 {
            return;
        }
        self.set_owner(base, words, 0);
        let end = first + count;
        let mut start = first;
        if !first.is_multiple_of(CHUNK_GRANULES) && self.is_free(first - 1) {
            start -= self.runs.length_before(&self.directory, first);
            self.runs.unlink(&self.directory, start);
        }
        // What is fresh has no bits, so a run does not grow into it; it grows into the run instead.
        if end == self.fresh && start >= self.fresh_end - CHUNK_GRANULES {
            self.mark(start, first - start, false);
            self.fresh = start;
            return;
        }
        let mut length = end - start;
        if !end.is_multiple_of(CHUNK_GRANULES) && self.is_free(end) {
            length += self.runs.length(&self.directory, end);
            self.runs.unlink(&self.directory, end);
        }
        if length == CHUNK_GRANULES && self.runs.whole_chunks() >= WHOLE_CHUNKS_KEPT {
            self.release_chunk(start / CHUNK_GRANULES);
            return;
        }
        self.runs.link(&self.directory, start, length);
        self.mark(first, count, true);
    }

    /// Gives back the memory of a chunk of which nothing is in use and no run is on a list.
    fn release_chunk(&mut self, chunk: u32) {
        self.margins[chunk as usize] = Margin::none();
        self.directory.discard(chunk as usize);
        self.released.insert(chunk);
    }

    /// Makes a run of a chunk that has given its memory back; whether there is one.
    fn reopen_chunk(&mut self) -> bool {
        let Some(chunk) = self.released.pop_first() else { return false };
        self.margins[chunk as usize] = Margin::new();
        let first = chunk * CHUNK_GRANULES;
        self.runs.link(&self.directory, first, CHUNK_GRANULES);
        self.mark(first, CHUNK_GRANULES, true);
        true
    }

    /// To whom the granule of this word belongs; 0 is nobody, also where nothing was handed out yet.
    #[inline]
    pub(in crate::index) fn owner(&self, word: u32) -> u32 {
        let margin = self.margins.get(chunk(word));
        margin.and_then(|margin| margin.owners.get(granule_inside(granule(word)))).copied().unwrap_or(0)
    }

    /// Says to whom the granules that these words touch belong.
    pub(in crate::index) fn set_owner(&mut self, base: u32, words: u32, owner: u32) {
        let first = granule_inside(granule(base));
        let end = first + granules(words + base % GRANULE_WORDS) as usize;
        self.margins[chunk(base)].owners[first..end].fill(owner);
    }

    /// What is in these words of one chunk. They must have been handed out at some time.
    #[inline]
    pub(in crate::index) fn words(&self, base: u32, len: u32) -> &[u64] {
        if len == 0 {
            return &[];
        }
        self.check(base, len);
        // SAFETY: `check` says that the words are in one chunk and were initialised; `&self` says that the
        // writer, the only one who may write, does not while the slice lives.
        unsafe { self.directory.words(base, len) }
    }

    /// What is in this word.
    #[inline]
    pub(in crate::index) fn word(&self, word: u32) -> u64 {
        self.check(word, 1);
        // SAFETY: as in `words`.
        unsafe { self.directory.at(word).read() }
    }

    /// Writes these words, which no reader may be looking at.
    #[inline]
    pub(in crate::index) fn write(&mut self, base: u32, words: &[u64]) {
        if words.is_empty() {
            return;
        }
        // A slice that does not fit a u32 does not fit a chunk either.
        self.check(base, u32::try_from(words.len()).unwrap_or(u32::MAX));
        // SAFETY: `check` says that the target is inside one chunk, and `&mut self` that no slice of `words` is
        // alive. Through the raw pointer, as a reader may hold slices of other words of the chunk.
        unsafe { self.directory.at(base).copy_from_nonoverlapping(words.as_ptr(), words.len()) };
    }

    /// Writes this word, which no reader may be looking at.
    #[cfg(test)]
    #[inline]
    pub(in crate::index) fn set(&mut self, word: u32, value: u64) {
        self.check(word, 1);
        // SAFETY: as in `write`.
        unsafe { self.directory.at(word).write(value) };
    }

    /// Copies words from one place to another, which no reader may be looking at; the two may overlap.
    pub(in crate::index) fn copy(&mut self, from: u32, to: u32, words: u32) {
        if words == 0 {
            return;
        }
        self.check(from, words);
        self.check(to, words);
        // SAFETY: both are inside chunks and initialised, and `&mut self` says that no slice of `words` is alive.
        unsafe { self.directory.at(to).copy_from(self.directory.at(from), words as usize) };
    }

    /// Asks for the memory of a word.
    #[inline]
    pub(in crate::index) fn prefetch(&self, word: u32) {
        self.directory.prefetch(word);
    }

    /// Asks for the memory of the owner of a word.
    #[inline]
    pub(in crate::index) fn prefetch_owner(&self, word: u32) {
        let margin = self.margins.get(chunk(word));
        if let Some(owner) = margin.and_then(|margin| margin.owners.get(granule_inside(granule(word)))) {
            prefetch(std::ptr::from_ref(owner).cast());
        }
    }

    /// Memory taken from the system and not given back, touched or not, bookkeeping included.
    pub(in crate::index) fn bytes(&self) -> u64 {
        let margins: usize = self.margins.iter().map(Margin::bytes).sum();
        (self.directory.bytes()
            + self.ahead.bytes()
            + margins
            + (self.margins.len() - self.released.len()) * CHUNK_BYTES) as u64
    }

    /// Words of chunks that have not been opened yet, or have given their memory back.
    pub(in crate::index) fn unopened_words(&self) -> u64 {
        ((CHUNKS_MAX - 1 - self.margins.len() + self.released.len()) as u64) << CHUNK_BITS
    }

    /// Words that could be handed out without another chunk, if their runs suit.
    pub(in crate::index) fn free_words(&self) -> u64 {
        u64::from(self.runs.granules() + (self.fresh_end - self.fresh)) << GRANULE_BITS
    }

    /// Words that were handed out at some time.
    #[cfg(test)]
    pub(in crate::index) fn known_words(&self) -> u32 {
        self.known << GRANULE_BITS
    }

    /// Whether a granule is nobody's.
    #[cfg(test)]
    pub(in crate::index) fn is_free_granule(&self, granule: u32) -> bool {
        let is_fresh = granule >= self.fresh && granule < self.fresh_end && granule >= self.fresh_end - CHUNK_GRANULES;
        let is_released = self.released.contains(&(granule / CHUNK_GRANULES));
        is_fresh || is_released || self.is_free(granule)
    }

    /// Panics unless the words, one or more, are in one chunk and were initialised: a wrong index is a bug of this program, and
    /// everything unsafe here rests on it.
    #[inline]
    fn check(&self, base: u32, len: u32) {
        let end = u64::from(base) + u64::from(len);
        let inside = u64::from(base % CHUNK_WORDS) + u64::from(len) <= u64::from(CHUNK_WORDS);
        assert!(inside && end <= u64::from(self.known) << GRANULE_BITS, "{len} words at {base} are not of the arena");
    }

    /// Granules from the fresh part, from that of a new chunk if it is too short.
    fn take_fresh(&mut self, granules: u32) -> Option<u32> {
        if granules > self.fresh_end - self.fresh {
            self.open_chunk()?;
        }
        let first = self.fresh;
        self.fresh += granules;
        if self.fresh_end - self.fresh < AHEAD_GRANULES {
            self.ahead.ask();
        }
        self.know(self.fresh);
        Some(first)
    }

    /// Zeroes what leaves the fresh part up to this granule for the first time.
    fn know(&mut self, end: u32) {
        if end > self.known {
            let words = (end - self.known) << GRANULE_BITS;
            // SAFETY: `known..end` lies in the newest chunk, and nobody has been given any of it.
            unsafe { self.directory.at(self.known << GRANULE_BITS).write_bytes(0, words as usize) };
            self.known = end;
        }
    }

    #[cold]
    fn open_chunk(&mut self) -> Option<()> {
        let chunk = self.margins.len();
        // The last chunk stays closed, so that the word behind every extent has a number.
        if chunk + 1 >= CHUNKS_MAX {
            return None;
        }
        self.directory.open(chunk, &mut self.ahead)?;
        self.margins.push(Margin::new());
        // What is left of the chunk before is less than the largest extent; it becomes a run like any other.
        let (rest, length) = (self.fresh, self.fresh_end - self.fresh);
        if length > 0 {
            self.know(self.fresh_end);
            self.runs.link(&self.directory, rest, length);
            self.mark(rest, length, true);
        }
        self.fresh = self.fresh_end;
        self.known = self.fresh_end;
        self.fresh_end += CHUNK_GRANULES;
        Some(())
    }

    #[inline]
    fn is_free(&self, granule: u32) -> bool {
        let inside = granule_inside(granule);
        self.margins[(granule / CHUNK_GRANULES) as usize].free[inside / 64] >> (inside % 64) & 1 == 1
    }

    /// Says of these granules of one chunk that they are in a free run, or that they are not.
    #[inline]
    fn mark(&mut self, first: u32, count: u32, free: bool) {
        let bits = &mut self.margins[(first / CHUNK_GRANULES) as usize].free;
        let (mut at, mut left) = (granule_inside(first), count);
        while left > 0 {
            let here = left.min(u64::BITS - at as u32 % u64::BITS);
            let mask = (u64::MAX >> (u64::BITS - here)) << (at % 64);
            if free {
                bits[at / 64] |= mask;
            } else {
                bits[at / 64] &= !mask;
            }
            at += here as usize;
            left -= here;
        }
    }
}

#[inline]
const fn chunk(word: u32) -> usize {
    (word >> CHUNK_BITS) as usize
}

#[inline]
const fn granule(word: u32) -> u32 {
    word >> GRANULE_BITS
}

/// Granules that so many words fill, the last perhaps in part.
#[inline]
const fn granules(words: u32) -> u32 {
    words.div_ceil(GRANULE_WORDS)
}

/// The number of a granule inside its chunk.
#[inline]
const fn granule_inside(granule: u32) -> usize {
    (granule % CHUNK_GRANULES) as usize
}
