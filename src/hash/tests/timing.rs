//! The time of every implementation beside the library, which hashes one block after the other, by length and number of
//! blocks.

use super::super::blocks::Blocks;
use super::super::isa::Isa;
use super::super::keys::Keys;
use super::*;
use std::hint::black_box;
use std::time::Instant;

const LENGTHS: [usize; 20] = [4, 8, 16, 24, 32, 36, 48, 64, 68, 96, 100, 128, 132, 160, 192, 240, 256, 260, 512, 1024];
const COUNTS: [usize; 10] = [1, 2, 4, 8, 10, 12, 16, 24, 32, 64];
const MEASUREMENTS: usize = 31;
/// Bytes that are hashed between two reads of the clock.
const MEASUREMENT_BYTES: usize = 1 << 18;

/// Nanoseconds for each block, the least of all measurements: `does` hashes `count` blocks.
fn least(best: &mut f64, rounds: usize, count: usize, mut does: impl FnMut()) {
    let started = Instant::now();
    (0..rounds).for_each(|_| does());
    *best = best.min(started.elapsed().as_nanos() as f64 / (rounds * count) as f64);
}

#[test]
#[ignore = "takes times; run with --release --nocapture"]
fn every_isa_beside_the_library() {
    for isa in Isa::all() {
        println!("{isa:?}: how many times the library's speed, by bytes of a block and number of blocks");
        println!("{:>6}{}", "", COUNTS.map(|count| format!("{count:>6}")).concat());
        for window in LENGTHS {
            let ratios = COUNTS.map(|count| {
                let bytes: Vec<u8> = (0..count * window).map(|at| (at * 167) as u8).collect();
                let (mut expected, mut out) = (vec![LocalHash(0); count], vec![LocalHash(0); count]);
                let (mut theirs, mut ours) = (f64::MAX, f64::MAX);
                let rounds = MEASUREMENT_BYTES.div_ceil(bytes.len());
                for _ in 0..MEASUREMENTS {
                    least(&mut theirs, rounds, count, || {
                        let (bytes, seed) = black_box((&bytes[..], SEED_BASE));
                        for (block, to) in black_box(&mut expected).iter_mut().enumerate() {
                            to.0 = xxh3_64_with_seed(&bytes[block * window..][..window], seed);
                        }
                    });
                    least(&mut ours, rounds, count, || {
                        let (bytes, seed) = black_box((&bytes[..], SEED_BASE));
                        let blocks = Blocks::side_by_side(bytes, window);
                        isa.hash_blocks(blocks, &Keys::new(seed), black_box(&mut out));
                    });
                }
                assert_eq!(out, expected);
                format!("{:>6.2}", theirs / ours)
            });
            println!("{window:>6}{}", ratios.concat());
        }
    }
}
