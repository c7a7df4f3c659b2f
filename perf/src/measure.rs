//! Times: what the clock costs, how long single lookups take, and medians over repeats.

use std::hint::black_box;
use std::time::Instant;

use hdrhistogram::Histogram;
use serde::Serialize;

/// Readings of the clock from which its own cost is taken.
const CLOCK_READINGS: usize = 100_001;
/// Longest time that is told from longer ones.
const LATENCY_NS_MAX: u64 = 10_000_000_000;
/// Lookups before the first that counts.
const WARM_UP_QUERIES: usize = 500;

/// Something that answers lookups.
pub(crate) trait Lookups {
    /// Its name for a local hash.
    type Block: Copy;
    /// Its answer, before anyone has looked into it.
    type Answer;

    /// One lookup.
    fn look(&mut self, blocks: &[Self::Block]) -> Self::Answer;

    /// The device depths of all workers together, and the end of the answer.
    fn sum(&mut self, answer: Self::Answer) -> u64;
}

/// The prompts that are looked up, one after the other in memory.
#[derive(Debug)]
pub(crate) struct Queries<B> {
    blocks: Vec<B>,
    ends: Vec<usize>,
}

impl<B> Default for Queries<B> {
    fn default() -> Self {
        Self { blocks: Vec::new(), ends: Vec::new() }
    }
}

impl<B: Copy> Queries<B> {
    /// One more.
    pub(crate) fn push(&mut self, blocks: &[B]) {
        self.blocks.extend_from_slice(blocks);
        self.ends.push(self.blocks.len());
    }

    /// How many.
    #[must_use]
    pub(crate) fn len(&self) -> usize {
        self.ends.len()
    }

    /// Blocks of all of them.
    #[must_use]
    pub(crate) fn blocks(&self) -> usize {
        self.blocks.len()
    }

    /// All of them, in order.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &[B]> {
        self.ends.iter().scan(0, |start, end| Some(&self.blocks[std::mem::replace(start, *end)..*end]))
    }
}

/// Where the blocks of a query are when its time begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Approach {
    /// Just copied: what a router has right after hashing a prompt.
    Hot,
    /// In a set larger than the caches.
    Cold,
}

/// Two percentiles of one set of lookups, in nanoseconds, the clock's own cost taken off.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub(crate) struct Percentiles {
    /// Half of the lookups took no longer.
    pub(crate) p50: f64,
    /// All but one in a hundred took no longer.
    pub(crate) p99: f64,
}

impl Percentiles {
    /// Of these times.
    pub(crate) fn of(histogram: &Histogram<u64>, clock_ns: f64) -> Self {
        let at = |quantile| (histogram.value_at_quantile(quantile) as f64 - clock_ns).max(1.0);
        Self { p50: at(0.5), p99: at(0.99) }
    }

    /// The median of each over repeats.
    #[must_use]
    pub(crate) fn medians(repeats: &[Self]) -> Self {
        let of = |field: fn(&Self) -> f64| median(repeats.iter().map(field).collect());
        Self { p50: of(|times| times.p50), p99: of(|times| times.p99) }
    }
}

/// The middle one; the mean of the middle two of an even number, 0 of none.
#[must_use]
pub(crate) fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    match values.len() {
        0 => 0.0,
        len if len % 2 == 1 => values[len / 2],
        len => f64::midpoint(values[len / 2 - 1], values[len / 2]),
    }
}

/// What two readings of the clock, one after the other, are apart: inside every measured time.
#[must_use]
pub(crate) fn clock_ns() -> f64 {
    let between = || {
        let start = Instant::now();
        black_box(start).elapsed().as_nanos() as f64
    };
    let readings: Vec<f64> = (0..CLOCK_READINGS).map(|_| between()).collect();
    // Clocks tick in steps of their own: the mean of what is not an interruption is finer than the median.
    let bound = 4.0 * median(readings.clone()).max(1.0);
    let calm: Vec<f64> = readings.into_iter().filter(|reading| *reading <= bound).collect();
    calm.iter().sum::<f64>() / calm.len().max(1) as f64
}

/// Times every query once, by itself; returns the percentiles and the sum of all depths.
///
/// Looking into an answer and giving it up are not in the time: our answer is a buffer that is used again,
/// the peer's is a map that has to be freed.
pub(crate) fn time_lookups<L: Lookups>(
    lookups: &mut L,
    queries: &Queries<L::Block>,
    approach: Approach,
    clock_ns: f64,
) -> (Percentiles, u64) {
    let mut histogram = Histogram::new_with_max(LATENCY_NS_MAX, 3).expect("3 digits up to 10 s is a histogram");
    let mut scratch: Vec<L::Block> = Vec::with_capacity(queries.blocks());
    for query in queries.iter().take(WARM_UP_QUERIES) {
        let answer = lookups.look(query);
        black_box(lookups.sum(answer));
    }
    let mut checksum = 0;
    for query in queries.iter() {
        let blocks = match approach {
            Approach::Cold => query,
            Approach::Hot => {
                scratch.clear();
                scratch.extend_from_slice(query);
                black_box(scratch.as_slice())
            }
        };
        let start = Instant::now();
        let answer = black_box(lookups.look(blocks));
        let elapsed = start.elapsed();
        checksum += lookups.sum(answer);
        histogram.saturating_record((elapsed.as_nanos() as u64).max(1));
    }
    (Percentiles::of(&histogram, clock_ns), checksum)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn medians_and_percentiles() {
        assert_eq!(median(vec![]), 0.0);
        assert_eq!((median(vec![3.0, 1.0, 2.0]), median(vec![4.0, 1.0])), (2.0, 2.5));
        let mut histogram = Histogram::new_with_max(LATENCY_NS_MAX, 3).expect("a histogram");
        (1..=100).for_each(|ns| histogram.saturating_record(ns * 10));
        let times = Percentiles::of(&histogram, 20.0);
        assert_eq!((times.p50, times.p99), (480.0, 970.0));
        assert_eq!(Percentiles::of(&histogram, 1e9).p50, 1.0);
        let other = Percentiles { p50: 100.0, p99: 2000.0 };
        assert_eq!(Percentiles::medians(&[times, other, other]), other);
    }

    #[test]
    fn queries_come_back_as_they_were() {
        let mut queries = Queries::default();
        queries.push(&[1, 2, 3]);
        queries.push(&[]);
        queries.push(&[4]);
        let all: Vec<&[i32]> = queries.iter().collect();
        assert_eq!(all, [&[1, 2, 3][..], &[], &[4]]);
        assert_eq!((queries.len(), queries.blocks()), (3, 4));
    }

    struct Counts;

    impl Lookups for Counts {
        type Block = u8;
        type Answer = usize;

        fn look(&mut self, blocks: &[u8]) -> usize {
            blocks.len()
        }

        fn sum(&mut self, answer: usize) -> u64 {
            answer as u64
        }
    }

    #[test]
    fn every_query_counts_once() {
        let mut queries = Queries::default();
        (0..2000).for_each(|_| queries.push(&[0; 3]));
        for approach in [Approach::Hot, Approach::Cold] {
            let (times, checksum) = time_lookups(&mut Counts, &queries, approach, 0.0);
            assert_eq!(checksum, 6000);
            assert!(times.p50 <= times.p99);
        }
    }
}
