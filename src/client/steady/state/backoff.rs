//! The pauses between tries of a daemon that does not answer. Pure: time and chance are arguments.

use std::time::{Duration, Instant};

use crate::limits::{CLIENT_BACK_OFF_MS_MAX, CLIENT_BACK_OFF_MS_MIN};

/// The pauses between tries of a daemon that does not answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BackOff {
    /// The pause after the first failure. It doubles after each further one; chance adds or takes up to a quarter.
    pub first: Duration,
    /// The longest pause.
    pub most: Duration,
}

impl Default for BackOff {
    fn default() -> Self {
        Self {
            first: Duration::from_millis(CLIENT_BACK_OFF_MS_MIN),
            most: Duration::from_millis(CLIENT_BACK_OFF_MS_MAX),
        }
    }
}

/// Whether and how long a daemon has not answered.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(in crate::client) enum Silence {
    /// It answered the last request, or there was none yet.
    #[default]
    None,
    /// It does not answer.
    Since {
        /// The first failure.
        since: Instant,
        /// Failures so far.
        failures: u32,
        /// The end of the current pause.
        until: Instant,
    },
}

impl Silence {
    /// Notes that the daemon did not answer. `chance`, from 0 up to 1, keeps clients that lost it together from coming back
    /// together. Requests that fail during a pause count as one failure.
    pub(in crate::client) fn failed(&mut self, times: BackOff, now: Instant, chance: f64) {
        let (since, failures) = match *self {
            Self::None => (now, 0),
            Self::Since { until, .. } if now < until => return,
            Self::Since { since, failures, .. } => (since, failures),
        };
        let doubled = times.first.saturating_mul(1 << failures.min(30)).min(times.most);
        let until = now + doubled.mul_f64(0.75 + chance.clamp(0.0, 1.0) / 2.0);
        *self = Self::Since { since, failures: failures.saturating_add(1), until };
    }

    /// Notes that the daemon answered.
    pub(in crate::client) const fn answered(&mut self) {
        *self = Self::None;
    }

    /// The end of the current pause; `None` = requests may be sent.
    pub(in crate::client) fn paused_until(&self, now: Instant) -> Option<Instant> {
        match *self {
            Self::Since { until, .. } if now < until => Some(until),
            _ => None,
        }
    }

    /// The start of the silence.
    pub(in crate::client) const fn since(&self) -> Option<Instant> {
        match *self {
            Self::Since { since, .. } => Some(since),
            Self::None => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_double_up_to_the_limit_and_count_one_failure_each() {
        let times = BackOff { first: Duration::from_millis(100), most: Duration::from_millis(350) };
        let start = Instant::now();
        let (mut silence, mut now) = (Silence::default(), start);
        assert_eq!((silence.paused_until(now), silence.since()), (None, None));
        for expected in [100, 200, 350, 350] {
            silence.failed(times, now, 0.5);
            let until = now + Duration::from_millis(expected);
            assert_eq!((silence.paused_until(now), silence.since()), (Some(until), Some(start)));
            // Another request that fails during the same pause.
            silence.failed(times, until - Duration::from_millis(1), 0.5);
            assert_eq!(silence.paused_until(now), Some(until));
            assert_eq!(silence.paused_until(until), None, "then requests may be sent");
            now = until;
        }
        silence.answered();
        assert_eq!(silence, Silence::None);
        silence.failed(times, now, 0.0);
        assert_eq!(silence.paused_until(now), Some(now + Duration::from_millis(75)), "it begins anew");
    }
}
