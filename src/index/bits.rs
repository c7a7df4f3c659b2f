//! A set of blocks of one node.

use crate::limits::NODE_BLOCKS_MAX;

const WORDS: usize = NODE_BLOCKS_MAX / 64;

/// Which blocks of a node, by position from its first.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Bits([u64; WORDS]);

/// Blocks `from..to` of a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Run {
    pub(super) from: u16,
    pub(super) to: u16,
}

impl Run {
    pub(super) const fn new(from: u16, to: u16) -> Self {
        Self { from, to }
    }

    pub(super) const fn len(self) -> u32 {
        (self.to - self.from) as u32
    }
}

impl Bits {
    pub(super) const EMPTY: Self = Self([0; WORDS]);

    /// The blocks `from..to`.
    pub(super) fn range(from: u16, to: u16) -> Self {
        let mut bits = Self::EMPTY;
        bits.fill(from, to, true);
        bits
    }

    pub(super) const fn contains(&self, at: u16) -> bool {
        self.0[at as usize / 64] >> (at % 64) & 1 == 1
    }

    /// Puts `from..to` in, or takes it out.
    pub(super) fn fill(&mut self, from: u16, to: u16, value: bool) {
        let mut at = from;
        while at < to {
            let end = to.min((at / 64 + 1) * 64);
            let mask = (u64::MAX >> (64 - (end - at))) << (at % 64);
            let word = &mut self.0[usize::from(at / 64)];
            *word = if value { *word | mask } else { *word & !mask };
            at = end;
        }
    }

    /// The first block that is not in it; all are in it beyond none.
    pub(super) fn first_gap(&self) -> u16 {
        let word = self.0.iter().position(|word| *word != u64::MAX);
        word.map_or(NODE_BLOCKS_MAX as u16, |word| (word * 64) as u16 + self.0[word].trailing_ones() as u16)
    }

    /// One more than the last block in it.
    pub(super) fn end(&self) -> u16 {
        let word = self.0.iter().rposition(|word| *word != 0);
        word.map_or(0, |word| (word * 64) as u16 + 64 - self.0[word].leading_zeros() as u16)
    }

    pub(super) fn and(mut self, other: &Self) -> Self {
        self.0.iter_mut().zip(other.0).for_each(|(word, other)| *word &= other);
        self
    }

    pub(super) fn and_not(mut self, other: &Self) -> Self {
        self.0.iter_mut().zip(other.0).for_each(|(word, other)| *word &= !other);
        self
    }

    pub(super) fn or(mut self, other: &Self) -> Self {
        self.0.iter_mut().zip(other.0).for_each(|(word, other)| *word |= other);
        self
    }

    /// Without the first `blocks` blocks, and numbered from the next.
    pub(super) fn without_first(&self, blocks: u16) -> Self {
        let (words, shift) = (usize::from(blocks / 64), u32::from(blocks % 64));
        Self(std::array::from_fn(|at| {
            let word = |at: usize| self.0.get(at + words).copied().unwrap_or(0);
            if shift == 0 { word(at) } else { word(at) >> shift | word(at + 1) << (64 - shift) }
        }))
    }

    /// Numbered as if `blocks` more came before.
    pub(super) fn behind(&self, blocks: u16) -> Self {
        let (words, shift) = (usize::from(blocks / 64), u32::from(blocks % 64));
        Self(std::array::from_fn(|at| {
            let word = |back: usize| at.checked_sub(words + back).map_or(0, |at| self.0[at]);
            if shift == 0 { word(0) } else { word(0) << shift | word(1) >> (64 - shift) }
        }))
    }

    /// Where the run of blocks that begins with `from` ends; `from` if that is not in it.
    pub(super) fn end_of_run(&self, from: u16) -> u16 {
        if from as usize >= NODE_BLOCKS_MAX { from } else { self.next(from, false).unwrap_or(NODE_BLOCKS_MAX as u16) }
    }

    /// The runs of blocks in it, in order.
    pub(super) fn runs(&self) -> impl Iterator<Item = Run> + '_ {
        let mut at = 0_u16;
        std::iter::from_fn(move || {
            let from = self.next(at, true)?;
            let to = self.next(from, false).unwrap_or(NODE_BLOCKS_MAX as u16);
            at = to;
            Some(Run { from, to })
        })
    }

    /// The first block at or after `at` that is in it (`value`) or not in it.
    fn next(&self, at: u16, value: bool) -> Option<u16> {
        let mut word = usize::from(at / 64);
        let mut masked = u64::MAX << (at % 64);
        while let Some(bits) = self.0.get(word) {
            let bits = if value { *bits } else { !*bits } & masked;
            if bits != 0 {
                return Some((word * 64) as u16 + bits.trailing_zeros() as u16);
            }
            (word, masked) = (word + 1, u64::MAX);
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(blocks: &[u16]) -> Bits {
        let mut bits = Bits::EMPTY;
        blocks.iter().for_each(|at| bits.fill(*at, at + 1, true));
        bits
    }

    #[test]
    fn runs_ends_and_gaps_are_where_they_are() {
        let bits = of(&[0, 1, 2, 63, 64, 65, 700, 1023]);
        let runs: Vec<(u16, u16)> = bits.runs().map(|run| (run.from, run.to)).collect();
        assert_eq!(runs, [(0, 3), (63, 66), (700, 701), (1023, 1024)]);
        assert_eq!((bits.first_gap(), bits.end()), (3, 1024));
        assert_eq!((Bits::EMPTY.first_gap(), Bits::EMPTY.end()), (0, 0));
        assert_eq!(Bits::range(0, 1024).first_gap(), 1024);
    }

    #[test]
    fn shifts_are_each_others_inverse_where_nothing_is_lost() {
        let bits = of(&[0, 1, 2, 63, 64, 65, 500]);
        for blocks in [0, 1, 63, 64, 65, 128, 400] {
            assert_eq!(bits.behind(blocks).without_first(blocks), bits, "{blocks}");
            let (low, high) = (bits.clone().and(&Bits::range(0, blocks)), bits.without_first(blocks));
            assert_eq!(high.behind(blocks).or(&low), bits, "{blocks}");
        }
    }
}
