//! Seeded mutations of byte strings: a fuzzer without coverage.

use rand::{RngExt, SeedableRng};
use rand_xoshiro::Xoshiro256PlusPlus;

/// Bytes at which things change: ends of ranges, and first bytes of msgpack values.
const TELLING: [u8; 16] =
    [0x00, 0x01, 0x7f, 0x80, 0x81, 0x90, 0x9f, 0xa0, 0xc0, 0xc4, 0xca, 0xcf, 0xd9, 0xdd, 0xdf, 0xff];
/// Longest run that is copied or cut, bytes.
const RUN_BYTES_MAX: usize = 64;
/// A mutant is no longer than this, bytes.
const MUTANT_BYTES_MAX: usize = 1 << 15;

/// Makes mutants of seeds; equal seeds of chance make equal mutants.
pub(crate) struct Mutator<'s> {
    seeds: &'s [Vec<u8>],
    rng: Xoshiro256PlusPlus,
}

impl<'s> Mutator<'s> {
    /// A mutator of `seeds`, of which there is one at least.
    pub(crate) fn new(seeds: &'s [Vec<u8>], chance: u64) -> Self {
        assert!(!seeds.is_empty(), "nothing to mutate");
        Self { seeds, rng: Xoshiro256PlusPlus::seed_from_u64(chance) }
    }

    /// The next mutant.
    pub(crate) fn next(&mut self) -> Vec<u8> {
        let mut bytes = self.seeds[self.rng.random_range(0..self.seeds.len())].clone();
        // One change most often: more and little of what was meant is left.
        let changes = 1 << self.rng.random_range(0..4);
        for _ in 0..changes {
            self.change(&mut bytes);
        }
        bytes.truncate(MUTANT_BYTES_MAX);
        bytes
    }

    fn change(&mut self, bytes: &mut Vec<u8>) {
        if bytes.is_empty() {
            return bytes.push(self.rng.random());
        }
        let at = self.rng.random_range(0..bytes.len());
        let run = at..bytes.len().min(at + self.rng.random_range(1..RUN_BYTES_MAX));
        match self.rng.random_range(0..10) {
            0 | 1 => bytes[at] ^= 1 << self.rng.random_range(0..8),
            2 | 3 => bytes[at] = TELLING[self.rng.random_range(0..TELLING.len())],
            4 => bytes[at] = bytes[at].wrapping_add(if self.rng.random() { 1 } else { 255 }),
            5 => bytes.insert(at, self.rng.random()),
            6 => drop(bytes.drain(run)),
            7 => bytes.truncate(at),
            8 => {
                let copy = bytes[run].to_vec();
                let to = self.rng.random_range(0..=bytes.len());
                bytes.splice(to..to, copy);
            }
            _ => {
                let other = &self.seeds[self.rng.random_range(0..self.seeds.len())];
                let from = self.rng.random_range(0..=other.len());
                bytes.truncate(at);
                bytes.extend_from_slice(&other[from..]);
            }
        }
    }
}
