//! Lanes and sets of them.

use crate::ids::{Tier, WorkerSlot};

/// One tier of one worker, from one clear to the next: a place in every bit set of a shard.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Lane(pub(super) u32);

impl Lane {
    /// No lane.
    pub(super) const NONE: Self = Self(u32::MAX);

    /// Whether this is a lane at all.
    pub(super) const fn is_some(self) -> bool {
        self.0 != Self::NONE.0
    }

    /// Its place in a table indexed by lane.
    pub(super) const fn index(self) -> usize {
        self.0 as usize
    }

    /// The 64-bit word of a set that has its bit.
    pub(super) const fn word(self) -> usize {
        self.0 as usize / 64
    }

    /// Its bit within that word.
    pub(super) const fn bit(self) -> u64 {
        1 << (self.0 % 64)
    }

    /// The lane of the lowest bit of `bits`, word `word` of a set.
    pub(super) const fn lowest(word: usize, bits: u64) -> Self {
        Self((word * 64) as u32 + bits.trailing_zeros())
    }
}

/// Whose a lane is.
#[derive(Clone, Copy, Debug)]
pub(super) struct LaneOwner {
    /// The worker.
    pub(super) slot: WorkerSlot,
    /// Its tier.
    pub(super) tier: Tier,
}

/// A set of lanes: the words from the first that is needed to the last, so that a block held by one
/// worker costs one word whatever its lane is.
#[derive(Clone, Debug)]
pub(super) struct LaneSet {
    first: u32,
    words: Words,
}

#[derive(Clone, Debug)]
enum Words {
    One(u64),
    Many(Box<[u64]>),
}

impl Default for LaneSet {
    fn default() -> Self {
        Self { first: 0, words: Words::One(0) }
    }
}

impl LaneSet {
    /// The set of one lane.
    pub(super) fn of(lane: Lane) -> Self {
        Self { first: lane.word() as u32, words: Words::One(lane.bit()) }
    }

    /// The number of the first word, and the words.
    pub(super) fn window(&self) -> (usize, &[u64]) {
        let words = match &self.words {
            Words::One(word) => std::slice::from_ref(word),
            Words::Many(words) => words,
        };
        (self.first as usize, words)
    }

    fn word_mut(&mut self, word: usize) -> Option<&mut u64> {
        let at = word.checked_sub(self.first as usize)?;
        match &mut self.words {
            Words::One(word) => (at == 0).then_some(word),
            Words::Many(words) => words.get_mut(at),
        }
    }

    /// Whether `lane` is in it.
    pub(super) fn contains(&self, lane: Lane) -> bool {
        let (first, words) = self.window();
        words.get(lane.word().wrapping_sub(first)).is_some_and(|word| word & lane.bit() != 0)
    }

    /// Whether no lane is in it.
    pub(super) fn is_empty(&self) -> bool {
        self.window().1.iter().all(|word| *word == 0)
    }

    /// Puts `lane` in.
    pub(super) fn insert(&mut self, lane: Lane) {
        if let Some(word) = self.word_mut(lane.word()) {
            *word |= lane.bit();
            return;
        }
        if self.is_empty() {
            *self = Self::of(lane);
            return;
        }
        let (first, words) = self.window();
        let from = first.min(lane.word());
        let to = (first + words.len()).max(lane.word() + 1);
        let mut wider = vec![0; to - from];
        wider[first - from..first - from + words.len()].copy_from_slice(words);
        wider[lane.word() - from] |= lane.bit();
        *self = Self { first: from as u32, words: Words::Many(wider.into_boxed_slice()) };
    }

    /// Takes `lane` out.
    pub(super) fn remove(&mut self, lane: Lane) {
        if let Some(word) = self.word_mut(lane.word()) {
            *word &= !lane.bit();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_set_holds_what_was_put_in_and_widens_both_ways() {
        let mut set = LaneSet::of(Lane(700));
        assert_eq!(set.window().1.len(), 1, "one word, wherever the lane is");
        let lanes = [3, 64, 700, 701, 4095];
        lanes.iter().for_each(|lane| set.insert(Lane(*lane)));
        for lane in 0..5000 {
            assert_eq!(set.contains(Lane(lane)), lanes.contains(&lane), "lane {lane}");
        }
        assert!(!set.contains(Lane::NONE));
        lanes.iter().for_each(|lane| set.remove(Lane(*lane)));
        assert!(set.is_empty());
    }

    #[test]
    fn an_empty_set_starts_anew_where_the_next_lane_is() {
        let mut set = LaneSet::of(Lane(1));
        set.remove(Lane(1));
        set.insert(Lane(4000));
        assert_eq!(set.window(), (62, &[1_u64 << 32][..]));
    }
}
