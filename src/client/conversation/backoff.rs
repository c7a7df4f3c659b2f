//! When a daemon that did not answer is tried again. Pure: time and chance are arguments.

use std::time::{Duration, Instant};

use crate::limits::{CLIENT_BACK_OFF_MS_MAX, CLIENT_BACK_OFF_MS_MIN};

/// How long to leave a daemon alone that did not answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BackOff {
    /// After the first failure; twice as long after each further one, a quarter more or less by chance.
    pub first: Duration,
    /// No longer than this.
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

/// What a client knows of its daemon's silence.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(in crate::client) enum Silence {
    /// It answered when it was last asked, or was not asked yet.
    #[default]
    None,
    /// It did not answer, so many times since the first.
    Since {
        /// The first time.
        since: Instant,
        /// How often.
        failures: u32,
        /// It is left alone until then.
        until: Instant,
    },
}

impl Silence {
    /// The daemon did not answer. `chance` is from 0 up to 1, so that clients which lost it together do not come back
    /// together. However many requests one silence meets, it is one failure.
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

    /// The daemon answered.
    pub(in crate::client) const fn answered(&mut self) {
        *self = Self::None;
    }

    /// Until when it is left alone; `None` = it may be asked.
    pub(in crate::client) fn rests_until(&self, now: Instant) -> Option<Instant> {
        match *self {
            Self::Since { until, .. } if now < until => Some(until),
            _ => None,
        }
    }

    /// Since when it has not answered.
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
    fn a_silence_is_one_failure_and_each_further_one_lasts_twice_as_long_up_to_a_bound() {
        let times = BackOff { first: Duration::from_millis(100), most: Duration::from_millis(350) };
        let start = Instant::now();
        let (mut silence, mut now) = (Silence::default(), start);
        assert_eq!((silence.rests_until(now), silence.since()), (None, None));
        for expected in [100, 200, 350, 350] {
            silence.failed(times, now, 0.5);
            let until = now + Duration::from_millis(expected);
            assert_eq!((silence.rests_until(now), silence.since()), (Some(until), Some(start)));
            // Others who met the same silence.
            silence.failed(times, until - Duration::from_millis(1), 0.5);
            assert_eq!(silence.rests_until(now), Some(until));
            assert_eq!(silence.rests_until(until), None, "then it may be asked");
            now = until;
        }
        silence.answered();
        assert_eq!(silence, Silence::None);
        silence.failed(times, now, 0.0);
        assert_eq!(silence.rests_until(now), Some(now + Duration::from_millis(75)), "it begins anew");
    }
}
