//! The chance of one decision.

use rand::Rng;
use rand_xoshiro::SplitMix64;
use rand_xoshiro::rand_core::SeedableRng;

/// Everything random about one decision follows from one number: whoever keeps the number can draw the same again,
/// on any machine and with any later release.
///
/// The generator is SplitMix64 and what is made of its numbers is written here, so that neither changes with a crate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Draws {
    seed: u64,
}

impl Draws {
    /// The draws that follow from `seed`.
    #[must_use]
    pub const fn new(seed: u64) -> Self {
        Self { seed }
    }

    /// What they follow from.
    #[must_use]
    pub const fn seed(self) -> u64 {
        self.seed
    }

    /// The first of them comes next.
    pub(super) fn begin(self) -> Drawing {
        Drawing(SplitMix64::seed_from_u64(self.seed))
    }
}

/// The draws of a decision under way.
#[derive(Clone, Debug)]
pub(super) struct Drawing(SplitMix64);

impl Drawing {
    /// A number below `bound`, each as likely as any other but for one part in 2⁵⁰; 0 if `bound` is 0.
    pub(super) fn below(&mut self, bound: usize) -> usize {
        ((u128::from(self.0.next_u64()) * bound as u128) >> 64) as usize
    }

    /// A number from 0 up to, not including, 1.
    pub(super) fn unit(&mut self) -> f64 {
        // The 53 bits that a number below 1 can have; exact, so the same everywhere.
        (self.0.next_u64() >> 11) as f64 / (1_u64 << 53) as f64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_says_all_draws() {
        let draw = |seed| {
            let mut drawing = Draws::new(seed).begin();
            (0..8).map(|_| drawing.below(1000)).collect::<Vec<_>>()
        };
        assert_eq!(draw(7), draw(7));
        assert_ne!(draw(7), draw(8));
    }

    #[test]
    fn the_draws_of_a_seed_never_change() {
        let mut drawing = Draws::new(1).begin();
        let drawn = [drawing.below(1000), drawing.below(1000), drawing.below(1000)];
        assert_eq!(drawn, [566, 745, 971], "the first numbers of SplitMix64 from 1");
        assert_eq!(Draws::new(1).begin().below(0), 0);
    }

    #[test]
    fn draws_stay_within_their_bounds() {
        let mut drawing = Draws::new(3).begin();
        for bound in 1..200 {
            assert!(drawing.below(bound) < bound);
            assert!((0.0..1.0).contains(&drawing.unit()));
        }
    }
}
