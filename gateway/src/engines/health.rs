//! Whether an engine may get requests: a state machine without clock and without chance.
//!
//! | state \ event | failed | succeeded | began a request |
//! |---|---|---|---|
//! | `Usable` | `BackingOff`, first back-off | `Usable` | `Usable` |
//! | `BackingOff`, not over | unchanged: requests that began before fail together | `Usable` | unchanged |
//! | `BackingOff`, over | `BackingOff`, twice as long | `Usable` | `Probing` |
//! | `Probing` | `BackingOff`, twice as long | `Usable` | a new probe if the last one is lost |

use std::time::{Duration, Instant};

use crate::limits::{BACK_OFF_FIRST, BACK_OFF_JITTER, BACK_OFF_MAX, PROBE_MAX};

/// The state of an engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HealthState {
    /// It gets requests.
    Usable,
    /// It gets none until then.
    BackingOff {
        /// When a request may probe it.
        until: Instant,
        /// Failures in a row, at least 1.
        failures: u32,
    },
    /// One request probes it; others go elsewhere.
    Probing {
        /// When the probe began.
        since: Instant,
        /// Failures in a row before the probe.
        failures: u32,
    },
}

/// An engine's health. Time and chance are arguments.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Health(HealthState);

impl Default for Health {
    fn default() -> Self {
        Self(HealthState::Usable)
    }
}

impl Health {
    /// The state.
    #[must_use]
    pub const fn state(&self) -> HealthState {
        self.0
    }

    /// Whether a request may go to the engine now.
    #[must_use]
    pub fn is_usable(&self, now: Instant) -> bool {
        match self.0 {
            HealthState::Usable => true,
            HealthState::BackingOff { until, .. } => now >= until,
            HealthState::Probing { since, .. } => now.saturating_duration_since(since) >= PROBE_MAX,
        }
    }

    /// A request goes to the engine now. After a back-off it is the probe.
    pub fn began(&mut self, now: Instant) {
        self.0 = match self.0 {
            HealthState::BackingOff { until, failures } if now >= until => {
                HealthState::Probing { since: now, failures }
            }
            HealthState::Probing { since, failures } if now.saturating_duration_since(since) >= PROBE_MAX => {
                HealthState::Probing { since: now, failures }
            }
            state @ (HealthState::Usable | HealthState::BackingOff { .. } | HealthState::Probing { .. }) => state,
        };
    }

    /// A request failed through the engine's fault. `chance` is from 0 to 1. Returns the rest of the back-off.
    pub fn failed(&mut self, now: Instant, chance: f64) -> Duration {
        let failures = match self.0 {
            HealthState::Usable => 1,
            HealthState::BackingOff { until, .. } if now < until => return until - now,
            HealthState::BackingOff { failures, .. } | HealthState::Probing { failures, .. } => {
                failures.saturating_add(1)
            }
        };
        let rest = back_off(failures, chance);
        self.0 = HealthState::BackingOff { until: now + rest, failures };
        rest
    }

    /// A request went well. Returns whether the engine was not `Usable` before.
    pub fn succeeded(&mut self) -> bool {
        let was = std::mem::replace(&mut self.0, HealthState::Usable);
        was != HealthState::Usable
    }
}

/// The back-off after `failures` in a row. It doubles with each failure up to a bound, and `chance` takes off a share.
#[must_use]
pub fn back_off(failures: u32, chance: f64) -> Duration {
    let doublings = failures.saturating_sub(1).min(16);
    let whole = BACK_OFF_FIRST.saturating_mul(1 << doublings).min(BACK_OFF_MAX);
    let chance = if chance.is_finite() { chance.clamp(0.0, 1.0) } else { 0.0 };
    whole.mul_f64(1.0 - BACK_OFF_JITTER * chance)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[derive(Clone, Debug)]
    enum Event {
        Wait(u64),
        Failed(f64),
        Succeeded,
        Began,
    }

    fn event() -> impl Strategy<Value = Event> {
        prop_oneof![
            (0..60_000_u64).prop_map(Event::Wait),
            (0.0..=1.0).prop_map(Event::Failed),
            Just(Event::Succeeded),
            Just(Event::Began),
        ]
    }

    #[test]
    fn the_table_holds_row_by_row() {
        let start = Instant::now();
        let mut health = Health::default();
        assert!(health.is_usable(start) && !health.succeeded());
        let first = health.failed(start, 0.0);
        assert_eq!(first, BACK_OFF_FIRST);
        assert!(!health.is_usable(start));
        // A request that began before fails too: the back-off stays as it is.
        let later = start + first / 2;
        assert_eq!(health.failed(later, 0.0), first / 2);
        health.began(later);
        assert_eq!(health.state(), HealthState::BackingOff { until: start + first, failures: 1 });
        // One probe after the back-off.
        let over = start + first;
        assert!(health.is_usable(over));
        health.began(over);
        assert!(!health.is_usable(over), "others wait for the probe");
        assert_eq!(health.failed(over, 0.0), 2 * first);
        // A lost probe is made again.
        let over = over + 2 * first;
        health.began(over);
        assert!(health.is_usable(over + PROBE_MAX));
        health.began(over + PROBE_MAX);
        assert!(!health.is_usable(over + PROBE_MAX));
        assert!(health.succeeded() && health.is_usable(over));
        assert_eq!(health.failed(over, 0.0), first, "a success forgets earlier failures");
    }

    #[test]
    fn a_success_of_an_earlier_request_ends_the_back_off() {
        let now = Instant::now();
        let mut health = Health::default();
        health.failed(now, 0.5);
        assert!(health.succeeded() && health.is_usable(now));
    }

    proptest! {
        #[test]
        fn back_offs_are_bounded_and_an_engine_is_always_usable_again(
            events in proptest::collection::vec(event(), 0..200),
        ) {
            let mut now = Instant::now();
            let mut health = Health::default();
            for event in events {
                match event {
                    Event::Wait(ms) => now += Duration::from_millis(ms),
                    Event::Failed(chance) => {
                        let rest = health.failed(now, chance);
                        prop_assert!(rest <= BACK_OFF_MAX);
                        prop_assert!(!health.is_usable(now) || rest.is_zero());
                    }
                    Event::Succeeded => {
                        health.succeeded();
                        prop_assert!(health.is_usable(now));
                    }
                    Event::Began => health.began(now),
                }
                prop_assert!(health.is_usable(now + BACK_OFF_MAX.max(PROBE_MAX)), "no state is for ever");
            }
        }

        #[test]
        fn chance_only_shortens(failures in 0_u32..100, chance in -1.0..2.0_f64) {
            let (whole, rest) = (back_off(failures, 0.0), back_off(failures, chance));
            prop_assert!(rest <= whole && rest >= whole.mul_f64(1.0 - BACK_OFF_JITTER - 1e-6));
            prop_assert!(back_off(failures + 1, 0.0) >= whole);
        }
    }
}
