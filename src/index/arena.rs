//! The arena: memory for the blocks of a shard, as u64 words in chunks that never move.
//!
//! A u32 names a word: the chunk in its upper bits, the position in the chunk in its lower bits. The writer takes
//! **extents**, whole granules of 64 bytes within one chunk, and frees any granules of them. A chunk is neither moved
//! nor unmapped before the arena and all its views are gone. So a reader that follows a stale index finds mapped memory
//! there, however old its content.
//!
//! Each granule has an **owner**, a number that the arena does not interpret. The tree uses it to find the node of a
//! word.
//!
//! # How free granules are kept
//!
//! A free run stores its own bookkeeping, so no list has to be allocated. Its first granule has its neighbours on the
//! list of runs of its size, and its length. Its last word has its length again, for the caller that frees the granule
//! behind it. One bit per granule says whether the granule is in a free run. Runs of 1 to 128 granules have a list per
//! size; all longer runs share one list. So an extent of any size is found in a few steps. Two free runs never touch.
//!
//! The end of the newest chunk that was never handed out is **fresh**. It is not a run, and nothing has been written to
//! it, so that it costs no memory unless it was mapped ahead. The system maps zeros, so every word below it may be read.
//!
//! A chunk with no granule in use gives its memory back to the system: it stays mapped, reads as zeros, is not a run,
//! and has no bookkeeping. One such chunk is kept as a run, so that a shard whose size varies around a chunk's end does
//! not map pages each time.
//!
//! # Fingerprints
//!
//! The last words of a chunk belong to no extent. There is one for each section of the chunk, for its fingerprint
//! ([`fingerprint`](super::fingerprint)). [`Arena::seal`] writes it. A reader that may look at all words of a section may
//! look at its fingerprint.

#![expect(unsafe_code, reason = "words are written through raw pointers while readers look at others")]

mod free_runs;

use super::fingerprint::{Fingerprinted, Keys, SECTION_WORDS};
use super::pages;
use super::prefault;
use crate::prefetch::prefetch;
use free_runs::FreeRuns;
use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicPtr, Ordering};
use std::{fmt, ptr};

/// Words of a chunk: 2 MiB, a huge page where the system has them, except for the first chunk.
pub(super) const CHUNK_WORDS: u32 = 1 << CHUNK_BITS;
/// The first of those that are fingerprints.
const FINGERPRINTS_FIRST: u32 = CHUNK_WORDS - CHUNK_WORDS / SECTION_WORDS as u32;
/// Words of a granule: one cache line.
pub(super) const GRANULE_WORDS: u32 = 1 << GRANULE_BITS;
/// Words of an extent, at most.
const EXTENT_WORDS_MAX: u32 = 1024;

const CHUNK_BITS: u32 = 18;
const GRANULE_BITS: u32 = 3;
const CHUNKS_MAX: usize = 1 << (u32::BITS - CHUNK_BITS);
const CHUNK_GRANULES: u32 = CHUNK_WORDS / GRANULE_WORDS;
/// Granules of a chunk that extents are made of: those before the fingerprints.
const EXTENTS_GRANULES: u32 = FINGERPRINTS_FIRST / GRANULE_WORDS;
const EXTENT_GRANULES_MAX: u32 = EXTENT_WORDS_MAX / GRANULE_WORDS;
const CHUNK_BYTES: usize = CHUNK_WORDS as usize * size_of::<u64>();
/// Granules of the newest chunk that are still fresh when the writer asks for a spare chunk: half of it. That leaves
/// 40 ms at 200 000 blocks a second if each block is a chain of its own, which takes two granules.
const AHEAD_GRANULES: u32 = EXTENTS_GRANULES / 2;
/// Chunks without a granule in use that keep their memory.
const WHOLE_CHUNKS_KEPT: u32 = 1;

const _: () = assert!(CHUNK_BYTES == pages::HUGE_PAGE_BYTES, "a chunk is a huge page");
const _: () = assert!(EXTENT_GRANULES_MAX == u128::BITS, "free runs keep one bit for each size of extent");
const _: () = assert!(CHUNK_GRANULES.is_multiple_of(u64::BITS), "the bits of a chunk are whole words");
const _: () = assert!(FINGERPRINTS_FIRST.is_multiple_of(SECTION_WORDS as u32), "sections are whole");

/// Consecutive words inside one chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Allocation {
    /// The first word, a multiple of [`GRANULE_WORDS`].
    pub(super) base: u32,
    /// Number of words, a multiple of [`GRANULE_WORDS`].
    pub(super) words: u32,
}

/// The writer's bookkeeping of a chunk.
#[derive(Debug)]
struct ChunkRecord {
    /// The owner of each granule.
    owners: Box<[u32]>,
    /// One bit for each granule: it is in a free run.
    free: Box<[u64]>,
}

impl ChunkRecord {
    /// Bytes of the record of an open chunk.
    const BYTES: usize = CHUNK_GRANULES as usize * size_of::<u32>() + CHUNK_GRANULES as usize / 8;

    /// The record of a chunk that has given its memory back.
    fn none() -> Self {
        Self { owners: Box::default(), free: Box::default() }
    }

    fn new() -> Self {
        // Zeroed by the allocator: pages of the table are touched only as granules are used.
        Self {
            owners: vec![0; CHUNK_GRANULES as usize].into_boxed_slice(),
            free: vec![0; (CHUNK_GRANULES / u64::BITS) as usize].into_boxed_slice(),
        }
    }
}

/// The memory, as its only writer has it.
#[derive(Debug)]
pub(super) struct Arena {
    chunks: Arc<ChunkTable>,
    /// Whether a chunk is asked for before it is needed.
    maps_ahead: bool,
    chunk_records: Vec<ChunkRecord>,
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
    /// An arena without a chunk; `secret` keys the fingerprints.
    pub(super) fn new(secret: u64) -> Self {
        Self {
            chunks: Arc::new(ChunkTable::new(secret)),
            maps_ahead: false,
            chunk_records: Vec::new(),
            runs: FreeRuns::new(),
            fresh: 0,
            released: BTreeSet::new(),
            fresh_end: 0,
            known: 0,
        }
    }

    /// Asks for a spare chunk before the next one is needed from now on, or no longer.
    pub(super) fn set_maps_ahead(&mut self, maps_ahead: bool) {
        self.maps_ahead = maps_ahead;
    }

    /// The same words, for a reader.
    pub(super) fn view(&self) -> ArenaView {
        ArenaView::new(Arc::clone(&self.chunks))
    }

    /// An extent of at least this many words and at least one granule, without an owner. Its content is unspecified.
    ///
    /// `None` if there are no more word numbers, if the system has no memory for a chunk, or beyond
    /// [`EXTENT_WORDS_MAX`].
    pub(super) fn allocate(&mut self, words: u32) -> Option<Allocation> {
        let granules = granules(words.max(1));
        if granules > EXTENT_GRANULES_MAX {
            return None;
        }
        let mut found = self.runs.take_fit(&self.chunks, granules);
        if found.is_none() && granules > self.fresh_end - self.fresh && self.reopen_chunk() {
            found = self.runs.take_fit(&self.chunks, granules);
        }
        let first = match found {
            Some(first) => {
                self.mark(first, granules, false);
                first
            }
            None => self.take_fresh(granules)?,
        };
        Some(Allocation { base: first << GRANULE_BITS, words: granules << GRANULE_BITS })
    }

    /// Lengthens an extent of `words_now` words in place, if the granules behind it are free; the granules that it
    /// gains have no owner. Returns whether it is now `words_wanted` long.
    pub(super) fn extend(&mut self, base: u32, words_now: u32, words_wanted: u32) -> bool {
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
        if !self.is_free(next) || self.runs.length(&self.chunks, next) < gain {
            return false;
        }
        self.runs.take(&self.chunks, next, gain);
        self.mark(next, gain, false);
        true
    }

    /// Frees all or some granules of one extent. They may be handed out again at once, so no reader may still look at
    /// them.
    pub(super) fn free(&mut self, base: u32, words: u32) {
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
            start -= self.runs.length_before(&self.chunks, first);
            self.runs.unlink(&self.chunks, start);
        }
        // Fresh granules have no bits, so a run does not grow into the fresh part; the fresh part grows into the run
        // instead.
        if end == self.fresh && start >= self.fresh_end - EXTENTS_GRANULES {
            self.mark(start, first - start, false);
            self.fresh = start;
            return;
        }
        let mut length = end - start;
        if !end.is_multiple_of(CHUNK_GRANULES) && self.is_free(end) {
            length += self.runs.length(&self.chunks, end);
            self.runs.unlink(&self.chunks, end);
        }
        if length == EXTENTS_GRANULES && self.runs.whole_chunks() >= WHOLE_CHUNKS_KEPT {
            self.release_chunk(start / CHUNK_GRANULES);
            return;
        }
        self.runs.link(&self.chunks, start, length);
        self.mark(first, count, true);
    }

    /// Gives back the memory of a chunk that has no granule in use and no run on a list.
    fn release_chunk(&mut self, chunk: u32) {
        self.chunk_records[chunk as usize] = ChunkRecord::none();
        self.chunks.discard(chunk as usize);
        self.released.insert(chunk);
    }

    /// Makes a run of a chunk that has given its memory back; `false` if there is none.
    fn reopen_chunk(&mut self) -> bool {
        let Some(chunk) = self.released.pop_first() else { return false };
        self.chunk_records[chunk as usize] = ChunkRecord::new();
        let first = chunk * CHUNK_GRANULES;
        self.runs.link(&self.chunks, first, EXTENTS_GRANULES);
        self.mark(first, EXTENTS_GRANULES, true);
        true
    }

    /// The owner of the granule of this word; 0 for none, also where nothing was handed out yet.
    #[inline]
    pub(super) fn owner(&self, word: u32) -> u32 {
        let record = self.chunk_records.get(chunk(word));
        record.and_then(|record| record.owners.get(granule_inside(granule(word)))).copied().unwrap_or(0)
    }

    /// Sets the owner of the granules that these words touch.
    pub(super) fn set_owner(&mut self, base: u32, words: u32, owner: u32) {
        let first = granule_inside(granule(base));
        let end = first + granules(words + base % GRANULE_WORDS) as usize;
        self.chunk_records[chunk(base)].owners[first..end].fill(owner);
    }

    /// These words of one chunk. They must have been handed out at some time.
    #[inline]
    pub(super) fn words(&self, base: u32, len: u32) -> &[u64] {
        if len == 0 {
            return &[];
        }
        self.check(base, len);
        // SAFETY: `check` says that the words are in one chunk and were initialised; `&self` says that the only writer
        // does not write while the slice lives.
        unsafe { self.chunks.words(base, len) }
    }

    #[inline]
    pub(super) fn word(&self, word: u32) -> u64 {
        self.check(word, 1);
        // SAFETY: as in `words`.
        unsafe { self.chunks.at(word).read() }
    }

    /// Writes these words, which no reader may be looking at.
    #[inline]
    pub(super) fn write(&mut self, base: u32, words: &[u64]) {
        if words.is_empty() {
            return;
        }
        // A slice that does not fit a u32 does not fit a chunk either.
        self.check(base, u32::try_from(words.len()).unwrap_or(u32::MAX));
        // SAFETY: `check` says that the target is inside one chunk, and `&mut self` that no slice of `words` is
        // alive. Through the raw pointer, as a reader may hold slices of other words of the chunk.
        unsafe { self.chunks.at(base).copy_from_nonoverlapping(words.as_ptr(), words.len()) };
    }

    /// Writes this word, which no reader may be looking at.
    #[cfg(test)]
    #[inline]
    pub(super) fn set(&mut self, word: u32, value: u64) {
        self.check(word, 1);
        // SAFETY: as in `write`.
        unsafe { self.chunks.at(word).write(value) };
    }

    /// Copies words, to where no reader may be looking; source and target may overlap.
    pub(super) fn copy(&mut self, from: u32, to: u32, words: u32) {
        if words == 0 {
            return;
        }
        self.check(from, words);
        self.check(to, words);
        // SAFETY: both are inside chunks and initialised, and `&mut self` says that no slice of `words` is alive.
        unsafe { self.chunks.at(to).copy_from(self.chunks.at(from), words as usize) };
    }

    /// Writes the fingerprints of the sections that lie inside these `len` words of one chunk and have a word of
    /// `from..to`, counted from the first. From then on, all of these may be looked at, together with the words.
    ///
    /// A fingerprint that is right is not written again: a reader that may look at the section's words may look at it.
    #[inline]
    pub(super) fn seal(&mut self, base: u32, len: u32, (from, to): (u32, u32)) {
        let first = (base + from) / SECTION_WORDS as u32;
        let last = (base + to.min(len)) / SECTION_WORDS as u32;
        // Most appends end inside a section.
        if to > from && (first < last || to < len) {
            self.seal_sections(base, len, (from, to));
        }
    }

    fn seal_sections(&mut self, base: u32, len: u32, (from, to): (u32, u32)) {
        let Some(keys) = &self.chunks.keys else { return };
        self.check(base, len);
        let section_words = SECTION_WORDS as u32;
        let first = base.next_multiple_of(section_words).max((base + from) / section_words * section_words);
        let end = ((base + len) / section_words * section_words).min((base + to).next_multiple_of(section_words));
        for at in (first..end).step_by(SECTION_WORDS) {
            // SAFETY: `check` says that the words are in one chunk and were initialised, and `&mut self` that none of
            // them is written meanwhile.
            let words = unsafe { self.chunks.words(at, section_words) };
            let Some(section) = words.first_chunk() else { return };
            // SAFETY: a word of the open chunk, which was mapped as zeros. A reader that may look at it looks at the
            // words of the section, which have not changed since it was right.
            unsafe {
                let place = self.chunks.at(fingerprint_of(at));
                if let Some(fingerprint) = keys.other(section, place.read()) {
                    place.write(fingerprint);
                }
            }
        }
    }

    /// Panics unless the fingerprints of the sections inside these words are right.
    #[cfg(test)]
    pub(super) fn check_sealed(&self, base: u32, len: u32) {
        let view = self.view();
        // SAFETY: `&self` says that no word is written meanwhile.
        let Some(words) = (unsafe { view.fingerprinted(base, len) }) else { return };
        let (sections, rest) = words.words[words.head..].as_chunks();
        assert!(words.head < SECTION_WORDS && rest.len() < SECTION_WORDS || sections.is_empty());
        let matching = words.keys.matching(sections, words.fingerprints);
        assert_eq!([matching; 2], [sections.len(), words.fingerprints.len()], "fingerprints of {len} words at {base}");
    }

    #[inline]
    pub(super) fn prefetch(&self, word: u32) {
        prefetch(self.chunks.address(word).cast());
    }

    /// Prefetches the owner of a word.
    #[inline]
    pub(super) fn prefetch_owner(&self, word: u32) {
        let record = self.chunk_records.get(chunk(word));
        if let Some(owner) = record.and_then(|record| record.owners.get(granule_inside(granule(word)))) {
            prefetch(std::ptr::from_ref(owner).cast());
        }
    }

    /// Memory taken from the system and not given back, touched or not, bookkeeping included.
    pub(super) fn bytes(&self) -> u64 {
        let open = self.chunk_records.len() - self.released.len();
        (self.chunks.bytes() + open * (ChunkRecord::BYTES + CHUNK_BYTES)) as u64
    }

    /// Words of chunks that have not been opened yet, or have given their memory back.
    pub(super) fn unopened_words(&self) -> u64 {
        (CHUNKS_MAX - 1 - self.chunk_records.len() + self.released.len()) as u64 * u64::from(FINGERPRINTS_FIRST)
    }

    /// Words that could be handed out without another chunk, if their runs are long enough.
    pub(super) fn free_words(&self) -> u64 {
        u64::from(self.runs.granules() + (self.fresh_end - self.fresh)) << GRANULE_BITS
    }

    /// Words that were handed out at some time.
    #[cfg(test)]
    pub(super) fn known_words(&self) -> u32 {
        self.known << GRANULE_BITS
    }

    /// Whether a granule has no owner and is in no extent.
    #[cfg(test)]
    pub(super) fn is_free_granule(&self, granule: u32) -> bool {
        if granule % CHUNK_GRANULES >= EXTENTS_GRANULES {
            return true;
        }
        let is_fresh =
            granule >= self.fresh && granule < self.fresh_end && granule >= self.fresh_end - EXTENTS_GRANULES;
        let is_released = self.released.contains(&(granule / CHUNK_GRANULES));
        is_fresh || is_released || self.is_free(granule)
    }

    /// Panics unless the words, one or more, are in one chunk and were initialised: a wrong index is a bug of this
    /// program, and all unsafe code here rests on this check.
    #[inline]
    fn check(&self, base: u32, len: u32) {
        let end = u64::from(base) + u64::from(len);
        let inside = u64::from(base % CHUNK_WORDS) + u64::from(len) <= u64::from(FINGERPRINTS_FIRST);
        assert!(inside && end <= u64::from(self.known) << GRANULE_BITS, "{len} words at {base} are not of the arena");
    }

    /// Granules from the fresh part, or from that of a new chunk if it is too short.
    fn take_fresh(&mut self, granules: u32) -> Option<u32> {
        if granules > self.fresh_end - self.fresh {
            self.open_chunk()?;
        }
        let first = self.fresh;
        self.fresh += granules;
        if self.maps_ahead && self.fresh_end - self.fresh < AHEAD_GRANULES {
            prefault::ask();
        }
        self.know(self.fresh);
        Some(first)
    }

    /// Notes that the granules up to this one have left the fresh part. Those that leave it for the first time are zeros,
    /// because the system maps zeros.
    fn know(&mut self, end: u32) {
        self.known = self.known.max(end);
    }

    #[cold]
    fn open_chunk(&mut self) -> Option<()> {
        let chunk = self.chunk_records.len();
        // The last chunk stays closed, so that the word behind every extent has a number.
        if chunk + 1 >= CHUNKS_MAX {
            return None;
        }
        self.chunks.open(chunk)?;
        self.chunk_records.push(ChunkRecord::new());
        // The rest of the chunk before is shorter than the longest extent; it becomes a run like any other.
        let (rest, length) = (self.fresh, self.fresh_end - self.fresh);
        if length > 0 {
            self.know(self.fresh_end);
            self.runs.link(&self.chunks, rest, length);
            self.mark(rest, length, true);
        }
        self.fresh = chunk as u32 * CHUNK_GRANULES;
        self.know(self.fresh);
        self.fresh_end = self.fresh + EXTENTS_GRANULES;
        Some(())
    }

    #[inline]
    fn is_free(&self, granule: u32) -> bool {
        let inside = granule_inside(granule);
        self.chunk_records[(granule / CHUNK_GRANULES) as usize].free[inside / 64] >> (inside % 64) & 1 == 1
    }

    /// Marks granules of one chunk as in a free run, or as not.
    #[inline]
    fn mark(&mut self, first: u32, count: u32, free: bool) {
        let bits = &mut self.chunk_records[(first / CHUNK_GRANULES) as usize].free;
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

/// Granules that this many words fill, the last perhaps in part.
#[inline]
const fn granules(words: u32) -> u32 {
    words.div_ceil(GRANULE_WORDS)
}

/// The word with the fingerprint of the section of this word.
#[inline]
const fn fingerprint_of(word: u32) -> u32 {
    let inside = word % CHUNK_WORDS;
    word - inside + FINGERPRINTS_FIRST + inside / SECTION_WORDS as u32
}

/// The number of a granule inside its chunk.
#[inline]
const fn granule_inside(granule: u32) -> usize {
    (granule % CHUNK_GRANULES) as usize
}

/// The chunks, by number, for the writer and for every reader. Space for all is reserved from the beginning, so that
/// the table itself never moves.
struct ChunkTable {
    /// The keys of the fingerprints; `None` where the processor has no fingerprints.
    keys: Option<Keys>,
    /// Null where there is no chunk yet; set once, by the writer.
    starts: Box<[AtomicPtr<u64>]>,
}

impl ChunkTable {
    fn new(secret: u64) -> Self {
        let starts = (0..CHUNKS_MAX).map(|_| AtomicPtr::new(ptr::null_mut())).collect();
        Self { keys: Keys::new(secret), starts }
    }

    /// Makes a chunk of the memory that was mapped ahead, or of untouched memory; only the writer calls this. `None` if
    /// the system has no memory, or if the chunk has no number.
    ///
    /// The first chunk has small pages: a shard that holds little takes little, and no event waits for a huge page.
    fn open(&self, chunk: usize) -> Option<()> {
        let place = self.starts.get(chunk)?;
        let memory = if chunk == 0 { pages::map_small(CHUNK_BYTES) } else { prefault::chunk() };
        let memory = memory?.as_ptr().cast::<u64>();
        // Release: pairs with the Acquire of `ArenaView::words`. The content of the words is published later, by the
        // store that gives the reader their index; this orders only the chunk itself.
        place.store(memory, Ordering::Release);
        Some(())
    }

    /// Gives the memory of a chunk back to the system; its words are zeros from now on. Only the writer calls this, for
    /// a chunk in which no reader looks at any word.
    fn discard(&self, chunk: usize) {
        // Relaxed: the writer reads what the writer stored.
        if let Some(memory) = ptr::NonNull::new(self.starts[chunk].load(Ordering::Relaxed)) {
            // SAFETY: mapped in `open` with this size; no reader looks at it.
            unsafe { pages::discard(memory.as_ptr().cast(), CHUNK_BYTES) };
        }
    }

    fn bytes(&self) -> usize {
        size_of_val(&*self.starts)
    }

    /// The address of a word; only for the writer.
    ///
    /// # Safety
    /// The chunk of the word has been opened by this thread, or by one that handed the arena to it.
    #[inline]
    unsafe fn at(&self, word: u32) -> *mut u64 {
        // Relaxed: the writer reads what the writer stored.
        let base = self.starts[chunk(word)].load(Ordering::Relaxed);
        // SAFETY: the caller says that there is a chunk, and the remainder is inside it.
        unsafe { base.add((word % CHUNK_WORDS) as usize) }
    }

    /// Words for the writer to read.
    ///
    /// # Safety
    /// As `at`; and the words are all in that chunk, initialised, and not written while the slice lives.
    #[inline]
    unsafe fn words(&self, base: u32, len: u32) -> &[u64] {
        // SAFETY: the caller's, word for word.
        unsafe { std::slice::from_raw_parts(self.at(base), len as usize) }
    }

    /// The address of a word, to prefetch it.
    #[inline]
    fn address(&self, word: u32) -> *const u64 {
        // Relaxed: a hint reads nothing, so there is nothing to be ordered.
        let base = self.starts[chunk(word)].load(Ordering::Relaxed);
        base.wrapping_add((word % CHUNK_WORDS) as usize)
    }
}

impl fmt::Debug for ChunkTable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Relaxed: a number for debugging.
        let open = self.starts.iter().take_while(|chunk| !chunk.load(Ordering::Relaxed).is_null()).count();
        f.debug_struct("ChunkTable").field("chunks", &open).finish()
    }
}

impl Drop for ChunkTable {
    fn drop(&mut self) {
        for place in &mut self.starts {
            let memory = *place.get_mut();
            if memory.is_null() {
                break; // chunks are opened in order
            }
            // SAFETY: mapped in `open`; the arena and all its views are gone.
            unsafe { pages::unmap(memory.cast(), CHUNK_BYTES) };
        }
    }
}

/// The words of an [`Arena`], for a reader beside the writer of other words.
#[derive(Clone, Debug)]
pub(super) struct ArenaView {
    chunks: Arc<ChunkTable>,
}

impl ArenaView {
    fn new(chunks: Arc<ChunkTable>) -> Self {
        Self { chunks }
    }

    /// These words; empty if there is no such chunk or if they would cross its end.
    ///
    /// # Safety
    /// The arena has handed out the words. Their index was published after they were written, so that their content is
    /// visible here. They are not written while the slice lives: a grace period has to pass between the last moment at
    /// which a reader can learn of them and the first write to them.
    #[inline]
    pub(super) unsafe fn words(&self, base: u32, len: u32) -> &[u64] {
        let inside = (base % CHUNK_WORDS) as usize;
        // Acquire: pairs with the Release of `ChunkTable::open`.
        let memory = self.chunks.starts[chunk(base)].load(Ordering::Acquire);
        if memory.is_null() || inside + len as usize > CHUNK_WORDS as usize {
            return &[];
        }
        // SAFETY: inside the chunk, as just checked; initialised and unchanging, as the caller says.
        unsafe { std::slice::from_raw_parts(memory.add(inside), len as usize) }
    }

    /// These words with their fingerprints; `None` where the processor has none. Empty like [`words`](Self::words).
    ///
    /// # Safety
    /// As [`words`](Self::words); and the words have been [sealed](Arena::seal) before their index was published.
    #[inline]
    pub(super) unsafe fn fingerprinted(&self, base: u32, len: u32) -> Option<Fingerprinted<'_>> {
        let keys = self.chunks.keys.as_ref()?;
        // SAFETY: the caller's, word for word.
        let words = unsafe { self.words(base, len) };
        let head = base.next_multiple_of(SECTION_WORDS as u32) - base;
        let sections = len.saturating_sub(head) / SECTION_WORDS as u32;
        if sections == 0 || words.is_empty() {
            return Some(Fingerprinted { keys, words, head: words.len(), fingerprints: &[] });
        }
        // SAFETY: fingerprints of sections inside the words lie in the same chunk, and do not change while the words do
        // not.
        let fingerprints = unsafe { self.words(fingerprint_of(base + head), sections) };
        Some(Fingerprinted { keys, words, head: head as usize, fingerprints })
    }

    /// Prefetches the lines of these words.
    #[inline(always)]
    pub(super) fn prefetch(&self, base: u32, len: u32) {
        let first = self.chunks.address(base);
        for word in (0..len).step_by(GRANULE_WORDS as usize) {
            prefetch(first.wrapping_add(word as usize).cast());
        }
    }
}

#[cfg(test)]
mod tests;
