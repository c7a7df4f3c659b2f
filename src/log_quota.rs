//! A limit on log lines that peers can cause again and again. A few lines are written in each window, and the next line
//! states how many were withheld. Counters count every time.

use std::cell::Cell;
use std::time::{Duration, Instant};

use crate::limits::{LOG_LINES_PER_WINDOW_MAX, LOG_WINDOW_MS};

/// The quota of one place in the code, for one thread.
#[derive(Debug, Default)]
pub(crate) struct LogQuota(Cell<Window>);

#[derive(Clone, Copy, Debug, Default)]
struct Window {
    began: Option<Instant>,
    lines: u32,
    withheld: u64,
}

impl LogQuota {
    /// Asks for one line. Returns the number of lines withheld since the last one, or `None` if this line is withheld
    /// too.
    pub(crate) fn take(&self, now: Instant) -> Option<u64> {
        let mut window = self.0.get();
        let window_length = Duration::from_millis(LOG_WINDOW_MS);
        if window.began.is_none_or(|began| now.saturating_duration_since(began) >= window_length) {
            window = Window { began: Some(now), lines: 0, ..window };
        }
        let granted = if window.lines < LOG_LINES_PER_WINDOW_MAX {
            window.lines += 1;
            Some(std::mem::take(&mut window.withheld))
        } else {
            window.withheld += 1;
            None
        };
        self.0.set(window);
        granted
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_window_has_its_lines_and_the_next_states_the_number_withheld() {
        let (quota, start) = (LogQuota::default(), Instant::now());
        for _ in 0..LOG_LINES_PER_WINDOW_MAX {
            assert_eq!(quota.take(start), Some(0));
        }
        assert_eq!((quota.take(start), quota.take(start)), (None, None));
        let next = start + Duration::from_millis(LOG_WINDOW_MS);
        assert_eq!((quota.take(next), quota.take(next)), (Some(2), Some(0)));
    }
}
