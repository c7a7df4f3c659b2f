//! Which words are free: runs of whole lines, found by their length and joined with their neighbours at once, each in a
//! time that depends on nothing (the two-level segregated fit of Masmano et al.).
//!
//! What is known of a line lies beside the words, not in them: to give back what a prompt had touches nothing of what it
//! had, which is cold by then.

use super::words::{CHUNK_WORDS, LINE_WORDS, Words};

/// Lines of a chunk; no run reaches beyond one.
const CHUNK_LINES: u32 = CHUNK_WORDS / LINE_WORDS;
/// The line that is nobody's: a link to nothing.
const NOTHING: u32 = 0;
/// Classes of lengths for each power of two, as a power of two.
const FINE: u32 = 3;
/// Classes of lengths: exact below `1 << FINE`, then so many for each power of two.
const CLASSES: usize = class_of(CHUNK_LINES) + 1;

const _: () = assert!(CLASSES <= u128::BITS as usize, "one bit for each class");
const _: () = assert!(CHUNK_LINES <= 1 << 15, "a length is a u16");

/// What is known of a line.
#[derive(Clone, Copy, Debug, Default)]
struct Line {
    /// Lines of the free run that begins here, and of the one that ends here; 0 = none does.
    begins: u16,
    ends: u16,
    /// Runs in use that have a part of the line, beside the first of them.
    sharers: u8,
    /// Of a line with which a free run begins: the runs before and after it in the list of its class.
    before: u32,
    after: u32,
}

/// The free words. Runs of any length are given out and taken back, in whole or in the pieces they were [cut](WordAllocator::split_run)
/// into.
#[derive(Debug)]
pub(super) struct WordAllocator {
    lines: Vec<Line>,
    /// The first free run of each class.
    heads: [u32; CLASSES],
    /// The classes that have one, as a set of bits.
    filled: u128,
    /// Lines given out.
    used: u32,
}

impl Default for WordAllocator {
    fn default() -> Self {
        Self { lines: Vec::new(), heads: [NOTHING; CLASSES], filled: 0, used: 0 }
    }
}

/// The class of free runs of so many lines.
const fn class_of(lines: u32) -> usize {
    if lines < 1 << FINE {
        return lines as usize;
    }
    let order = lines.ilog2();
    (((order - FINE) << FINE) + (lines >> (order - FINE))) as usize
}

impl WordAllocator {
    /// Words given out and not taken back, in whole lines.
    pub(super) const fn used(&self) -> u32 {
        self.used * LINE_WORDS
    }

    /// A run of `len` words, 1 to a chunk, that begins with a line; `None` if no more may be used.
    pub(super) fn take(&mut self, words: &Words, len: u32) -> Option<u32> {
        let wanted = len.max(1).div_ceil(LINE_WORDS);
        if wanted > CHUNK_LINES {
            return None;
        }
        let at = match self.find(wanted) {
            Some(at) => at,
            None => {
                self.grow(words)?;
                self.find(wanted)?
            }
        };
        let has = u32::from(self.lines[at as usize].begins);
        self.unlink(at, has);
        if has > wanted {
            self.link(at + wanted, has - wanted);
        }
        self.used += wanted;
        Some(at * LINE_WORDS)
    }

    /// A run in use becomes two, the second of which begins with the word `at`: each is given back by itself.
    pub(super) fn split_run(&mut self, at: u32) {
        if !at.is_multiple_of(LINE_WORDS) {
            self.lines[(at / LINE_WORDS) as usize].sharers += 1;
        }
    }

    /// Two runs in use that were one are one again.
    pub(super) fn merge_runs(&mut self, at: u32) {
        if !at.is_multiple_of(LINE_WORDS) {
            self.lines[(at / LINE_WORDS) as usize].sharers -= 1;
        }
    }

    /// Takes a run back. A line of which another run still has a part stays in use.
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

    /// Whether others have a part of a line; then they are one less.
    fn leave_to_sharers(&mut self, line: u32) -> bool {
        let sharers = &mut self.lines[line as usize].sharers;
        let is_shared = *sharers > 0;
        *sharers -= u8::from(is_shared);
        is_shared
    }

    /// Where a free run of so many lines at least begins. The first class of which every run is long enough serves; what
    /// is in the one below may be too short, and is passed by.
    fn find(&self, lines: u32) -> Option<u32> {
        let coarse = if lines < 1 << FINE { 0 } else { (1 << (lines.ilog2() - FINE)) - 1 };
        let long_enough = self.filled >> class_of(lines + coarse);
        let class = class_of(lines + coarse) + long_enough.trailing_zeros() as usize;
        (long_enough != 0).then(|| self.heads[class])
    }

    fn grow(&mut self, words: &Words) -> Option<()> {
        let at = words.grow()? / LINE_WORDS;
        self.lines.resize((at + CHUNK_LINES) as usize, Line::default());
        // The first line of all is nobody's.
        let from = at.max(1);
        self.link(from, at + CHUNK_LINES - from);
        Some(())
    }

    /// Frees a run, joined with the free ones on both sides of it in its chunk.
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
        let Line { before, after, .. } = self.lines[at as usize];
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
                // Again one, if they were.
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
        assert!(room.take(&words, CHUNK_WORDS).is_none(), "the first line of all is nobody's");
        assert!(room.take(&words, CHUNK_WORDS / 2).is_some());
        assert!(room.take(&words, CHUNK_WORDS + 1).is_none());
    }
}
