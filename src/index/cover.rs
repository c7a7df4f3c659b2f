//! What one lane covers of one node.

use super::bits::{Bits, Run};
use super::lanes::Lane;
use smallvec::SmallVec;

/// Runs of blocks that a change touched; nearly always one.
pub(super) type Runs = SmallVec<[Run; 2]>;

/// A lane at a node.
///
/// `cut` is the lane's first gap: it covers `0..cut` and not `cut`. Blocks beyond the gap are `islands`, a
/// bitmap, so that taking blocks out in any order costs the same. A lane that covers nothing may stay as
/// an **anchor**: its worker holds (or may hold) blocks in nodes below, which are named after the names in
/// its column.
#[derive(Clone, Debug)]
pub(super) struct Entry {
    pub(super) lane: Lane,
    /// Which of the node's columns has the worker's names.
    pub(super) column: u16,
    pub(super) cut: u16,
    /// All blocks covered, `0..cut` included; only there if some are beyond the gap.
    pub(super) islands: Option<Box<Bits>>,
}

impl Entry {
    pub(super) const fn anchor(lane: Lane, column: u16) -> Self {
        Self { lane, column, cut: 0, islands: None }
    }

    pub(super) fn covers(&self, at: u16) -> bool {
        at < self.cut || self.islands.as_ref().is_some_and(|islands| islands.contains(at))
    }

    /// One more than the last block covered.
    pub(super) fn end(&self) -> u16 {
        self.islands.as_ref().map_or(self.cut, |islands| islands.end())
    }

    pub(super) fn is_empty(&self) -> bool {
        self.cut == 0 && self.islands.is_none()
    }

    pub(super) fn bits(&self) -> Bits {
        self.islands.as_ref().map_or_else(|| Bits::range(0, self.cut), |islands| Bits::clone(islands))
    }

    pub(super) fn set_bits(&mut self, bits: Bits) {
        self.cut = bits.first_gap();
        let beyond = bits.end() > self.cut;
        match &mut self.islands {
            Some(islands) if beyond => **islands = bits,
            islands => *islands = beyond.then(|| Box::new(bits)),
        }
    }

    /// Covers `from..to` too; returns what had not been covered.
    pub(super) fn add(&mut self, from: u16, to: u16) -> Runs {
        if self.islands.is_none() && from <= self.cut {
            let newly = Run { from: self.cut.min(to), to };
            self.cut = self.cut.max(to);
            return if newly.from < to { SmallVec::from_elem(newly, 1) } else { SmallVec::new() };
        }
        let had = self.bits();
        let wanted = Bits::range(from, to);
        let newly = wanted.clone().and_not(&had).runs().collect();
        self.set_bits(had.or(&wanted));
        newly
    }

    /// Covers `from..to` no more; returns what had been covered.
    pub(super) fn take(&mut self, from: u16, to: u16) -> Runs {
        if self.islands.is_none() && to >= self.cut {
            let taken = Run { from: from.min(self.cut), to: self.cut };
            self.cut = taken.from;
            return if taken.from < taken.to { SmallVec::from_elem(taken, 1) } else { SmallVec::new() };
        }
        let had = self.bits();
        let wanted = Bits::range(from, to);
        let taken = wanted.clone().and(&had).runs().collect();
        self.set_bits(had.and_not(&wanted));
        taken
    }

    /// Keeps the first `at` blocks and returns the rest as of a node that begins there.
    pub(super) fn split_off(&mut self, at: u16) -> Self {
        let mut high = Self::anchor(self.lane, self.column);
        if self.islands.is_none() {
            high.cut = self.cut.saturating_sub(at);
            self.cut = self.cut.min(at);
        } else {
            let bits = self.bits();
            high.set_bits(bits.without_first(at));
            self.set_bits(bits.and(&Bits::range(0, at)));
        }
        high
    }

    /// The inverse of [`split_off`](Self::split_off).
    pub(super) fn append(&mut self, at: u16, high: &Self) {
        if self.islands.is_none() && high.islands.is_none() && (self.cut == at || high.cut == 0) {
            self.cut += high.cut;
        } else {
            self.set_bits(self.bits().or(&high.bits().behind(at)));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn runs(runs: &Runs) -> Vec<(u16, u16)> {
        runs.iter().map(|run| (run.from, run.to)).collect()
    }

    #[test]
    fn a_gap_makes_islands_and_closing_it_makes_them_one() {
        let mut entry = Entry::anchor(Lane(3), 0);
        assert_eq!(runs(&entry.add(0, 10)), [(0, 10)]);
        assert_eq!(runs(&entry.take(4, 6)), [(4, 6)]);
        assert_eq!((entry.cut, entry.end(), entry.islands.is_some()), (4, 10, true));
        assert_eq!(runs(&entry.take(3, 8)), [(3, 4), (6, 8)]);
        assert_eq!(runs(&entry.add(0, 9)), [(3, 8)]);
        assert_eq!((entry.cut, entry.islands.is_none()), (10, true));
        assert_eq!(runs(&entry.take(0, 99)), [(0, 10)]);
        assert!(entry.is_empty());
    }

    #[test]
    fn a_split_and_its_inverse_give_the_same() {
        for cuts in [&[(0, 10)][..], &[(0, 3), (5, 9)], &[(2, 4), (7, 8)], &[]] {
            for at in 1..10 {
                let mut entry = Entry::anchor(Lane(0), 0);
                cuts.iter().for_each(|(from, to)| drop(entry.add(*from, *to)));
                let whole = entry.bits();
                let high = entry.split_off(at);
                entry.append(at, &high);
                assert_eq!(entry.bits(), whole, "{cuts:?} at {at}");
            }
        }
    }
}
