//! Tags: a byte for each line of a segment, from which a search learns that a key is not there without reading a line.
//!
//! Most prompts end below a node with many children, at a child that no worker holds. A line of the table is one of
//! many, so it is seldom in a cache. Its tag often is: the tags of 64 lines share a cache line.
//!
//! A tag is [`EMPTY`], [`TOMBSTONE`], or a number from the hash of the node in the line. So tags follow the rules of
//! lines in [`super`]: a search ends at an empty one. A tag that equals the key's proves nothing, and the line decides.
//!
//! # What a reader can see
//!
//! The writer sets a tag before it publishes the node, and clears a tag after it has vacated the line. A node that
//! exists has its tag, and no tag before it on its path is empty.
//!
//! * A reader that has met a line which the writer published later sees the tag: CLOSE of that line publishes it.
//! * A reader that has met a cleared tag finds every earlier change when it checks versions. Each of them began with a
//!   fence of its own: OPEN of a line, the start of a change of several lines, or SHIFT. It comes before the store of the
//!   tag, and the reader's fence comes after its load.

#![expect(unsafe_code, reason = "tags are found by an address that readers load together with their number")]

use super::memory::Word;
use crate::prefetch::prefetch;
use crate::sync::{AtomicU64, Ordering};
use std::marker::PhantomData;

/// The tag of an unused line at which a search ends.
const EMPTY: u8 = 0;
/// The tag of an unused line over which a search goes on.
pub(super) const TOMBSTONE: u8 = 1;
/// The lowest tag of a node.
const NODE_MIN: u8 = 2;

/// Tags in a word.
pub(super) const WORD_TAGS: usize = 8;
/// A one in each tag of a word, and the highest bit of each.
const ONES: u64 = u64::from_ne_bytes([1; WORD_TAGS]);
const HIGHS: u64 = ONES << 7;

/// The tags of 64 lines, or of all lines of a smaller segment.
#[repr(align(64))]
#[derive(Debug)]
pub(super) struct TagLine(
    #[expect(dead_code, reason = "tags are reached through the address of a line of them")] [AtomicU64; TagLine::WORDS],
);

impl TagLine {
    const WORDS: usize = 8;

    /// Tags of empty lines: zeroed memory, except under the model checker.
    #[cfg(all(test, kvrouted_loom))]
    pub(super) fn new() -> Self {
        Self(std::array::from_fn(|_| AtomicU64::new(0)))
    }

    /// Lines of tags that a segment of `lines` lines needs.
    pub(super) const fn count(lines: usize) -> usize {
        lines.div_ceil(Self::WORDS * WORD_TAGS)
    }
}

/// The tag of a node whose key has this hash. The highest bits of the hash choose the line.
#[inline]
const fn tag_of(hash: u64) -> u8 {
    let tag = hash as u8;
    if tag < NODE_MIN { tag + NODE_MIN } else { tag }
}

/// The tags of a segment.
#[derive(Clone, Copy, Debug)]
pub(super) struct Tags<'a> {
    word: Word<TagLine>,
    lives: PhantomData<&'a TagLine>,
}

impl<'a> Tags<'a> {
    /// The tags of a word.
    ///
    /// # Safety
    ///
    /// The word is one of tags, and is not freed for as long as the borrow lasts.
    #[inline]
    pub(super) const unsafe fn of(word: Word<TagLine>) -> Self {
        Self { word, lives: PhantomData }
    }

    /// Eight tags, by the number of the first divided by eight; numbers wrap around.
    #[inline(always)]
    fn eight(self, at: usize) -> &'a AtomicU64 {
        let at = at & (self.word.mask() / WORD_TAGS);
        // SAFETY: the word has the address of tags for as many lines as its mask says, eight to an `AtomicU64`, and by the
        // promise made to `of` they live as long as this borrow.
        unsafe { &*self.word.start().cast::<AtomicU64>().add(at) }
    }

    /// Looks at the tags of the eight lines from `at` on, for a key with this hash. Lines are numbered around the end.
    #[inline(always)]
    pub(super) fn look(self, at: usize, hash: u64) -> Look {
        let tags = self.window(at);
        let empty = zeros(tags);
        let first_empty = empty & empty.wrapping_neg();
        // Those before the first empty one; all of them if there is none.
        let before = first_empty.wrapping_sub(1);
        Look { equal: zeros(tags ^ (u64::from(tag_of(hash)) * ONES)) & before, is_end: empty != 0 }
    }

    /// Prefetches the tag of a line.
    #[inline]
    pub(super) fn prefetch(self, line: usize) {
        prefetch(std::ptr::from_ref(self.eight(line / WORD_TAGS)).cast());
    }

    /// The tags of eight lines from `at` on, the first in the lowest bits.
    #[inline]
    fn window(self, at: usize) -> u64 {
        let (first, shift) = (at / WORD_TAGS, (at % WORD_TAGS * 8) as u32);
        // Relaxed: see the module. The two words may be of different moments: a node that exists all the time has its
        // tag in either, and no tag on its path is empty at any of them.
        let low = self.eight(first).load(Ordering::Relaxed);
        let high = self.eight(first + 1).load(Ordering::Relaxed);
        // Two shifts, because the window may begin with a word.
        low >> shift | high << 1 << (63 - shift)
    }

    /// Notes that a line is about to get the node of a key with this hash. For the writer.
    #[inline]
    pub(super) fn set(self, line: usize, hash: u64) {
        self.store(line, tag_of(hash));
    }

    /// Notes that a line has no node any more. For the writer.
    #[inline]
    pub(super) fn clear(self, line: usize, is_empty: bool) {
        self.store(line, if is_empty { EMPTY } else { TOMBSTONE });
    }

    #[inline]
    fn store(self, line: usize, tag: u8) {
        let (word, shift) = (self.eight(line / WORD_TAGS), line % WORD_TAGS * 8);
        // Relaxed, both: the writer reads what it wrote; for the store see the module.
        let others = word.load(Ordering::Relaxed) & !(0xff << shift);
        word.store(others | u64::from(tag) << shift, Ordering::Relaxed);
    }

    /// The tag of a line.
    #[cfg(test)]
    pub(super) fn get(self, line: usize) -> u8 {
        self.window(line) as u8
    }
}

/// The lines of eight that may hold a key.
#[derive(Clone, Copy, Debug)]
pub(super) struct Look {
    /// A bit for each whose tag is that of the key, before the first empty one. Rarely, more than those.
    equal: u64,
    /// Whether one is empty: the search ends here.
    pub(super) is_end: bool,
}

impl Iterator for Look {
    type Item = usize;

    /// The next of them, counted from the first of the eight.
    #[inline(always)]
    fn next(&mut self) -> Option<usize> {
        let at = self.equal.trailing_zeros() as usize / WORD_TAGS;
        let found = (self.equal != 0).then_some(at);
        self.equal &= self.equal.wrapping_sub(1);
        found
    }
}

/// The highest bit of each byte that is zero. Above the lowest of these, bytes of one may have theirs too.
#[inline]
const fn zeros(bytes: u64) -> u64 {
    bytes.wrapping_sub(ONES) & !bytes & HIGHS
}

#[cfg(all(test, not(kvrouted_loom)))]
mod tests {
    use super::super::memory::LineMemory;
    use super::*;
    use crate::index::row_pool::Rows;

    /// The specification of [`Tags::look`], but for tags that it may take for equal.
    fn look(tags: &[u8], at: usize, tag: u8) -> (Vec<usize>, bool) {
        let eight: Vec<u8> = (at..at + WORD_TAGS).map(|at| tags[at % tags.len()]).collect();
        let before = eight.iter().take_while(|tag| **tag != EMPTY).count();
        ((0..before).filter(|at| eight[*at] == tag).collect(), before < WORD_TAGS)
    }

    #[test]
    fn eight_tags_at_once_equal_one_after_the_other() {
        let mut seed = 7_u64;
        let mut random = move || {
            seed = super::super::spread(seed);
            seed
        };
        for _ in 0..if cfg!(miri) { 100 } else { 20_000 } {
            let lines = [8, 16, 64, 128][random() as usize % 4];
            let memory = LineMemory { rows: Rows::new() };
            let segment = memory.allocate(lines);
            // SAFETY: freed below, after the last use.
            let tags = unsafe { Tags::of(segment.tags) };
            // Few values and few empty lines, so that each case is met.
            let used = random() % 9;
            let bytes: Vec<u8> =
                (0..lines).map(|_| if random() % 8 < used { (random() % 6) as u8 } else { EMPTY }).collect();
            bytes.iter().enumerate().for_each(|(at, tag)| tags.store(at, *tag));
            assert!(bytes.iter().enumerate().all(|(at, tag)| tags.get(at) == *tag));
            for (at, tag) in (0..lines).flat_map(|at| (NODE_MIN..6).map(move |tag| (at, tag))) {
                let found = tags.look(at, u64::from(tag));
                let (expected, is_end) = look(&bytes, at, tag);
                assert_eq!(found.is_end, is_end, "from {at} in {bytes:?}");
                let found: Vec<usize> = found.collect();
                assert_eq!(found.first(), expected.first(), "{tag} from {at} in {bytes:?}");
                assert!(expected.iter().all(|line| found.contains(line)), "{tag} from {at} in {bytes:?}");
            }
            // SAFETY: allocated above, and not used any more.
            unsafe { memory.free(segment) };
        }
    }

    #[test]
    fn a_node_has_neither_tag_of_unused_lines() {
        assert!((0..=u64::from(u8::MAX)).all(|hash| tag_of(hash) >= NODE_MIN));
    }
}
