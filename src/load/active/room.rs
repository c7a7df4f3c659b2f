//! Which words are free: a buddy allocator whose lists lie in the free words themselves.

use super::words::{CHUNK_ORDER, CHUNK_WORDS, Words, halves, word};

/// The word that is nobody's: a link to nothing.
const NOTHING: u32 = 0;
/// Orders of free runs, 0 to a whole chunk.
const ORDERS: usize = CHUNK_ORDER as usize + 1;

/// The free words. Runs of any length are given out and taken back, in whole or in pieces.
#[derive(Debug, Default)]
pub(super) struct Room {
    /// By word: 1 + the order of the free run that starts there, 0 = none does.
    starts: Vec<u8>,
    /// The first free run of each order, doubly linked through its first word.
    heads: [u32; ORDERS],
    /// Words given out.
    used: u32,
}

impl Room {
    /// Words given out and not taken back.
    pub(super) const fn used(&self) -> u32 {
        self.used
    }

    /// A run of `len` words, 1 to a chunk; `None` if no more may be used.
    pub(super) fn take(&mut self, words: &Words, len: u32) -> Option<u32> {
        let order = len.max(1).next_power_of_two().trailing_zeros();
        if len > CHUNK_WORDS {
            return None;
        }
        let mut from = match self.find(order) {
            Some(from) => from,
            None => {
                self.grow(words)?;
                self.find(order)?
            }
        };
        let at = self.heads[from as usize];
        self.unlink(words, at, from);
        while from > order {
            from -= 1;
            self.link(words, at + (1 << from), from);
        }
        self.used += 1 << order;
        self.give_back(words, at + len, (1 << order) - len);
        Some(at)
    }

    /// Takes words back: a run as it was given out, or a piece of one.
    pub(super) fn give_back(&mut self, words: &Words, mut at: u32, mut len: u32) {
        debug_assert!(len <= self.used, "more is given back than was taken");
        self.used -= len;
        while len > 0 {
            let order = at.trailing_zeros().min(len.ilog2());
            self.free(words, at, order);
            at += 1 << order;
            len -= 1 << order;
        }
    }

    fn find(&self, order: u32) -> Option<u32> {
        (order..ORDERS as u32).find(|order| self.heads[*order as usize] != NOTHING)
    }

    fn grow(&mut self, words: &Words) -> Option<()> {
        let at = words.grow()?;
        self.starts.resize((at + CHUNK_WORDS) as usize, 0);
        match at {
            // The first word of all is nobody's.
            0 => {
                self.used += CHUNK_WORDS - 1;
                self.give_back(words, 1, CHUNK_WORDS - 1);
            }
            at => self.link(words, at, CHUNK_ORDER),
        }
        Some(())
    }

    /// Frees a run of a power of two that lies on its own multiple, joined with its buddies that are free.
    fn free(&mut self, words: &Words, mut at: u32, mut order: u32) {
        while order < CHUNK_ORDER {
            let buddy = at ^ (1 << order);
            if self.starts[buddy as usize] != order as u8 + 1 {
                break;
            }
            self.unlink(words, buddy, order);
            at = at.min(buddy);
            order += 1;
        }
        self.link(words, at, order);
    }

    fn link(&mut self, words: &Words, at: u32, order: u32) {
        let next = self.heads[order as usize];
        words.store(at, word(NOTHING, next));
        if next != NOTHING {
            let (_, after) = halves(words.load(next));
            words.store(next, word(at, after));
        }
        self.heads[order as usize] = at;
        self.starts[at as usize] = order as u8 + 1;
    }

    fn unlink(&mut self, words: &Words, at: u32, order: u32) {
        let (before, after) = halves(words.load(at));
        if before == NOTHING {
            self.heads[order as usize] = after;
        } else {
            let (first, _) = halves(words.load(before));
            words.store(before, word(first, after));
        }
        if after != NOTHING {
            let (_, last) = halves(words.load(after));
            words.store(after, word(before, last));
        }
        self.starts[at as usize] = 0;
    }
}

#[cfg(all(test, not(kvrouted_loom)))]
mod tests {
    use super::*;
    use rand::{RngExt, SeedableRng};
    use rand_xoshiro::Xoshiro256PlusPlus;
    use std::collections::BTreeMap;

    #[test]
    fn runs_never_overlap_and_what_is_given_back_can_be_had_again() {
        let words = Words::new(2 * CHUNK_WORDS as usize);
        let (mut room, mut rng) = (Room::default(), Xoshiro256PlusPlus::seed_from_u64(1));
        let mut given: BTreeMap<u32, u32> = BTreeMap::new();
        for _ in 0..20_000 {
            if rng.random_bool(0.5) {
                let len = rng.random_range(1..2000);
                let Some(at) = room.take(&words, len) else { continue };
                assert!(at > 0 && words.slice(at, len).is_some());
                assert!(given.range(..at + len).next_back().is_none_or(|(other, its)| other + its <= at));
                given.insert(at, len);
            } else if let Some((&at, &len)) = given.range(rng.random_range(0..2 * CHUNK_WORDS)..).next() {
                given.remove(&at);
                // In one piece or in two.
                let cut = rng.random_range(0..=len);
                room.give_back(&words, at, cut);
                room.give_back(&words, at + cut, len - cut);
            }
            assert_eq!(room.used(), given.values().sum::<u32>());
        }
        for (at, len) in given {
            room.give_back(&words, at, len);
        }
        assert_eq!(room.used(), 0);
        assert!(room.take(&words, CHUNK_WORDS).is_some(), "everything was joined again");
        assert!(room.take(&words, CHUNK_WORDS).is_none(), "the first word of all is nobody's");
        assert!(room.take(&words, CHUNK_WORDS / 2).is_some());
        assert!(room.take(&words, CHUNK_WORDS + 1).is_none());
    }
}
