//! The time for which a reader may keep its writer waiting.

use std::time::Duration;

/// The time that is left to a reader. Waiting for it uses the time up, and bytes that it reads give some back: a reader
/// that keeps up with the least rate never runs out of time, and one that reads a byte now and then soon does.
#[derive(Clone, Copy, Debug)]
pub(super) struct ReaderTime {
    max: Duration,
    left: Duration,
    bytes_per_s_min: u64,
}

impl ReaderTime {
    /// All of `max` is left to a reader that has to keep up with `bytes_per_s_min`.
    pub(super) const fn new(max: Duration, bytes_per_s_min: u64) -> Self {
        Self { max, left: max, bytes_per_s_min }
    }

    /// The longest time that the writer may wait now.
    pub(super) const fn left(&self) -> Duration {
        self.left
    }

    /// The time by which the reader is behind.
    pub(super) fn behind(&self) -> Duration {
        self.max - self.left
    }

    /// The reader took `bytes` after a wait.
    pub(super) fn took(&mut self, bytes: usize, waited: Duration) {
        let earned = Duration::from_micros(bytes as u64 * 1_000_000 / self.bytes_per_s_min);
        self.left = (self.left.saturating_sub(waited) + earned).min(self.max);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reader_that_keeps_up_may_pause_and_one_that_trickles_runs_out_of_time() {
        const S: Duration = Duration::from_secs(1);
        let (max, bytes_per_s_min, piece) = (10 * S, 1 << 20, 1 << 18);
        let mut time = ReaderTime::new(max, bytes_per_s_min);
        for _ in 0..100 {
            time.took(bytes_per_s_min as usize, S);
        }
        assert_eq!((time.left(), time.behind()), (max, Duration::ZERO), "exactly at the least rate");
        time.took(piece, max - S);
        assert!(time.left() > S && time.behind() < 9 * S, "a pause");
        time.took(1 << 30, Duration::ZERO);
        assert_eq!(time.left(), max, "time is not saved beyond the maximum");
        (0..13).for_each(|_| time.took(piece, S));
        assert_eq!(time.left(), S / 4, "10 s, less three quarters of each of 13 s");
        (0..10).for_each(|_| time.took(piece, S));
        assert_eq!(time.left(), S / 4, "nothing but what the last piece earned");
    }
}
