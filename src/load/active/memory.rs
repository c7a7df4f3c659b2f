//! The memory of the tree: numbered words in chunks, and the allocator of runs of words.
//!
//! The allocator is the two-level segregated fit of Masmano et al.: it hands out runs of whole cache lines, finds them
//! by length and joins free neighbours at once, each in constant time. Its bookkeeping lies beside the words: freeing a
//! prompt's words touches none of them, which are cold by then.

use std::sync::OnceLock;

use crate::sync::{AtomicU64, Ordering};

/// Words of a chunk, as a power of two. The model checker gets a small world.
pub(super) const CHUNK_ORDER: u32 = if cfg!(all(test, kvrouted_loom)) { 7 } else { 16 };
/// Words of a chunk: no allocation crosses a chunk.
pub(super) const CHUNK_WORDS: u32 = 1 << CHUNK_ORDER;
/// Words of a cache line: every allocation begins at one.
pub(super) const LINE_WORDS: u32 = 8;
/// Bytes of a cache line.
const LINE_BYTES: usize = 64;

/// The words of a cache line.
pub(super) type Line = [AtomicU64; LINE_WORDS as usize];

/// Words whose first one begins a cache line.
#[derive(Debug)]
struct Chunk {
    words: Box<[AtomicU64]>,
    /// Words before the first one.
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

/// Words by number. Every access is checked, because a reader may follow an outdated number. The reader discards what
/// it read when it finds its root changed.
#[derive(Debug)]
pub(super) struct Words(Box<[OnceLock<Chunk>]>);

impl Words {
    /// At most `words_max` words in whole chunks, and at least one chunk; none is allocated yet.
    pub(super) fn new(words_max: usize) -> Self {
        Self((0..(words_max / CHUNK_WORDS as usize).max(1)).map(|_| OnceLock::new()).collect())
    }

    /// Words of all chunks, allocated or not.
    pub(super) fn words_max(&self) -> u32 {
        self.0.len() as u32 * CHUNK_WORDS
    }

    /// Bytes of the allocated chunks. Chunks are never freed.
    pub(super) fn bytes(&self) -> u64 {
        let allocated = self.0.iter().take_while(|chunk| chunk.get().is_some()).count();
        (allocated * CHUNK_WORDS as usize * size_of::<AtomicU64>()) as u64
    }

    /// Allocates the next chunk; `None` if all are allocated. Only the writer calls it.
    pub(super) fn grow(&self) -> Option<u32> {
        let (at, chunk) = self.0.iter().enumerate().find(|(_, chunk)| chunk.get().is_none())?;
        chunk.set(Chunk::new()).ok()?;
        Some((at as u32) << CHUNK_ORDER)
    }

    /// The words from `at` to the end of its chunk, and a few more; none without such a chunk.
    #[inline]
    fn from(&self, at: u32) -> &[AtomicU64] {
        let Some(chunk) = self.0.get((at >> CHUNK_ORDER) as usize).and_then(OnceLock::get) else { return &[] };
        let from = chunk.skipped + (at & (CHUNK_WORDS - 1)) as usize;
        chunk.words.get(from..).unwrap_or_default()
    }

    /// The words `at..at + len`; `None` if they are not allocated, or not in one chunk.
    #[inline]
    pub(super) fn slice(&self, at: u32, len: u32) -> Option<&[AtomicU64]> {
        self.from(at).get(..len as usize)
    }

    /// The cache line that begins with `at`.
    #[inline]
    pub(super) fn line(&self, at: u32) -> Option<&Line> {
        self.from(at).first_chunk()
    }

    /// As [`Words::slice`], for the writer, which asks for allocated words only.
    #[inline]
    pub(super) fn run(&self, at: u32, len: u32) -> &[AtomicU64] {
        let words = self.slice(at, len);
        debug_assert!(words.is_some(), "the writer looks where there is nothing: {at}, {len}");
        words.unwrap_or_default()
    }

    /// Copies words. Relaxed: the root's sequence tells readers of changes.
    pub(super) fn copy(&self, from: u32, to: u32, len: u32) {
        let (from, to) = (self.run(from, len), self.run(to, len));
        to.iter().zip(from).for_each(|(to, from)| to.store(from.load(Ordering::Relaxed), Ordering::Relaxed));
    }
}

/// The halves of a word, the upper first.
#[inline]
pub(super) const fn halves(word: u64) -> (u32, u32) {
    ((word >> 32) as u32, word as u32)
}

/// A word of two halves, the upper first.
#[inline]
pub(super) const fn word(upper: u32, lower: u32) -> u64 {
    (upper as u64) << 32 | lower as u64
}

/// Lines of a chunk; no run crosses it.
const CHUNK_LINES: u32 = CHUNK_WORDS / LINE_WORDS;
/// The unused first line: the end of a list.
const NOTHING: u32 = 0;
/// Length classes per power of two, as a power of two.
const FINE: u32 = 3;
/// Length classes: exact below `1 << FINE`, then a fixed number per power of two.
const CLASSES: usize = class_of(CHUNK_LINES) + 1;

const _: () = assert!(CLASSES <= u128::BITS as usize, "one bit for each class");
const _: () = assert!(CHUNK_LINES <= 1 << 15, "a length is a u16");

/// The bookkeeping of a line.
#[derive(Clone, Copy, Debug, Default)]
struct LineState {
    /// Lines of the free run that begins here, and of the one that ends here; 0 = none.
    begins: u16,
    ends: u16,
    /// Runs in use that share the line, without the first of them.
    sharers: u8,
    /// For the first line of a free run: its neighbours in the list of its class.
    before: u32,
    after: u32,
}

/// The allocator. Runs of any length are taken and given back, as a whole or in the pieces they were
/// [split](WordAllocator::split_run) into.
#[derive(Debug)]
pub(super) struct WordAllocator {
    lines: Vec<LineState>,
    /// The first free run of each class.
    heads: [u32; CLASSES],
    /// The classes with free runs, one bit each.
    filled: u128,
    /// Lines in use.
    used: u32,
}

impl Default for WordAllocator {
    fn default() -> Self {
        Self { lines: Vec::new(), heads: [NOTHING; CLASSES], filled: 0, used: 0 }
    }
}

/// The class of free runs of this many lines.
const fn class_of(lines: u32) -> usize {
    if lines < 1 << FINE {
        return lines as usize;
    }
    let order = lines.ilog2();
    (((order - FINE) << FINE) + (lines >> (order - FINE))) as usize
}

impl WordAllocator {
    /// Words in use, in whole lines.
    pub(super) const fn used(&self) -> u32 {
        self.used * LINE_WORDS
    }

    /// Takes a run of `len` words, at most a chunk, that begins with a line; `None` if memory is used up.
    pub(super) fn take(&mut self, words: &Words, len: u32) -> Option<u32> {
        if len > CHUNK_WORDS {
            return None;
        }
        self.take_allocated(len).or_else(|| {
            self.grow(words)?;
            self.take_allocated(len)
        })
    }

    /// Whether three quarters of all words that are allocated are in use.
    pub(super) fn is_crowded(&self) -> bool {
        self.used as usize * 4 >= self.lines.len() * 3
    }

    /// As [`take`](Self::take), without a further chunk.
    pub(super) fn take_allocated(&mut self, len: u32) -> Option<u32> {
        let wanted = len.max(1).div_ceil(LINE_WORDS);
        let at = self.find(wanted)?;
        let has = u32::from(self.lines[at as usize].begins);
        self.unlink(at, has);
        if has > wanted {
            self.link(at + wanted, has - wanted);
        }
        self.used += wanted;
        Some(at * LINE_WORDS)
    }

    /// Splits a run in use before the word `at`; each part is then given back by itself.
    pub(super) fn split_run(&mut self, at: u32) {
        if !at.is_multiple_of(LINE_WORDS) {
            self.lines[(at / LINE_WORDS) as usize].sharers += 1;
        }
    }

    /// Merges two runs in use that were split at the word `at`.
    pub(super) fn merge_runs(&mut self, at: u32) {
        if !at.is_multiple_of(LINE_WORDS) {
            self.lines[(at / LINE_WORDS) as usize].sharers -= 1;
        }
    }

    /// Gives a run back. A line that another run shares stays in use.
    pub(super) fn give_back(&mut self, at: u32, len: u32) {
        if len == 0 {
            return;
        }
        let (mut from, mut to) = (at / LINE_WORDS, (at + len).div_ceil(LINE_WORDS));
        if self.leave_to_sharers(from) {
            from += 1;
        }
        if from < to && self.leave_to_sharers(to - 1) {
            to -= 1;
        }
        if from < to {
            debug_assert!(to - from <= self.used, "more is given back than was taken");
            self.used -= to - from;
            self.free(from, to - from);
        }
    }

    /// Whether other runs share a line; if so, counts one less.
    fn leave_to_sharers(&mut self, line: u32) -> bool {
        let sharers = &mut self.lines[line as usize].sharers;
        let is_shared = *sharers > 0;
        *sharers -= u8::from(is_shared);
        is_shared
    }

    /// The start of a free run of at least `lines` lines. Searches the first class in which every run is long enough;
    /// the class below may hold runs that are too short.
    fn find(&self, lines: u32) -> Option<u32> {
        let coarse = if lines < 1 << FINE { 0 } else { (1 << (lines.ilog2() - FINE)) - 1 };
        let long_enough = self.filled >> class_of(lines + coarse);
        let class = class_of(lines + coarse) + long_enough.trailing_zeros() as usize;
        (long_enough != 0).then(|| self.heads[class])
    }

    fn grow(&mut self, words: &Words) -> Option<()> {
        let at = words.grow()? / LINE_WORDS;
        self.lines.resize((at + CHUNK_LINES) as usize, LineState::default());
        // The first line of all is never used.
        let from = at.max(1);
        self.link(from, at + CHUNK_LINES - from);
        Some(())
    }

    /// Frees a run and joins it with the free runs on both sides of it in its chunk.
    fn free(&mut self, mut at: u32, mut len: u32) {
        let end = at + len;
        if !end.is_multiple_of(CHUNK_LINES) {
            let behind = u32::from(self.lines[end as usize].begins);
            if behind > 0 {
                self.unlink(end, behind);
                len += behind;
            }
        }
        if !at.is_multiple_of(CHUNK_LINES) {
            let ahead = u32::from(self.lines[at as usize - 1].ends);
            if ahead > 0 {
                at -= ahead;
                self.unlink(at, ahead);
                len += ahead;
            }
        }
        self.link(at, len);
    }

    fn link(&mut self, at: u32, len: u32) {
        let class = class_of(len);
        let after = self.heads[class];
        if after != NOTHING {
            self.lines[after as usize].before = at;
        }
        let line = &mut self.lines[at as usize];
        (line.begins, line.before, line.after) = (len as u16, NOTHING, after);
        self.lines[(at + len) as usize - 1].ends = len as u16;
        self.heads[class] = at;
        self.filled |= 1 << class;
    }

    fn unlink(&mut self, at: u32, len: u32) {
        let class = class_of(len);
        let LineState { before, after, .. } = self.lines[at as usize];
        if before == NOTHING {
            self.heads[class] = after;
            if after == NOTHING {
                self.filled &= !(1 << class);
            }
        } else {
            self.lines[before as usize].after = after;
        }
        if after != NOTHING {
            self.lines[after as usize].before = before;
        }
        self.lines[at as usize].begins = 0;
        self.lines[(at + len) as usize - 1].ends = 0;
    }
}

#[cfg(all(test, not(kvrouted_loom)))]
mod tests {
    use super::*;
    use rand::{RngExt, SeedableRng};
    use rand_xoshiro::Xoshiro256PlusPlus;
    use std::collections::BTreeMap;

    #[test]
    fn classes_follow_lengths() {
        let classes: Vec<usize> = (1..=CHUNK_LINES).map(class_of).collect();
        assert_eq!(classes[..17], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 16]);
        assert!(classes.is_sorted_by(|one, next| one == next || one + 1 == *next), "none is left out");
        assert_eq!(classes.last(), Some(&(CLASSES - 1)));
    }

    #[test]
    fn runs_never_overlap_and_what_is_given_back_can_be_had_again() {
        let words = Words::new(2 * CHUNK_WORDS as usize);
        let (mut room, mut rng) = (WordAllocator::default(), Xoshiro256PlusPlus::seed_from_u64(1));
        let mut given: BTreeMap<u32, u32> = BTreeMap::new();
        for _ in 0..40_000 {
            let from = rng.random_range(0..2 * CHUNK_WORDS);
            let some = given.range(from..).next().map(|(at, len)| (*at, *len));
            match (rng.random_range(0..8), some) {
                (0..4, _) => {
                    let len = rng.random_range(1..2000);
                    let Some(at) = room.take(&words, len) else { continue };
                    assert!(at > 0 && at % LINE_WORDS == 0 && words.slice(at, len).is_some());
                    assert!(given.range(..at + len).next_back().is_none_or(|(other, its)| other + its <= at));
                    given.insert(at, len);
                }
                (4..6, Some((at, len))) => {
                    given.remove(&at);
                    room.give_back(at, len);
                }
                (6, Some((at, len))) if len > 1 => {
                    let cut = rng.random_range(1..len);
                    room.split_run(at + cut);
                    given.extend([(at, cut), (at + cut, len - cut)]);
                }
                // Merges two neighbours that were one run.
                (_, Some((at, len))) => {
                    let Some(behind) = given.get(&(at + len)).copied() else { continue };
                    if !(at + len).is_multiple_of(LINE_WORDS) {
                        given.remove(&(at + len));
                        room.merge_runs(at + len);
                        given.insert(at, len + behind);
                    }
                }
                (_, None) => {}
            }
            let lines = |(at, len): (&u32, &u32)| (at / LINE_WORDS)..(at + len).div_ceil(LINE_WORDS);
            if rng.random_range(0..100) == 0 {
                let distinct: std::collections::BTreeSet<u32> = given.iter().flat_map(lines).collect();
                assert_eq!(room.used(), distinct.len() as u32 * LINE_WORDS);
            }
        }
        for (at, len) in given {
            room.give_back(at, len);
        }
        assert_eq!(room.used(), 0);
        assert!(room.take(&words, CHUNK_WORDS).is_some(), "everything was joined again");
        assert!(room.take(&words, CHUNK_WORDS).is_none(), "the first line of all is never given out");
        assert!(room.take(&words, CHUNK_WORDS / 2).is_some());
        assert!(room.take(&words, CHUNK_WORDS + 1).is_none());
    }
}
