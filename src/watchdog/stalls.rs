//! Which threads are stalled, from looks at their marks: pure, with the time as an argument.
//!
//! | state of a thread | look: waiting, or another round | look: the same round, and not waiting |
//! |---|---|---|
//! | in a round since `t` | in a round since now | after the limit: stalled since `t`, reported |
//! | stalled since `t` | in a round since now, reported | stalled since `t` |
//!
//! If the watchdog itself comes late, the whole process stood still: it was stopped, or got no processor. That time
//! counts against no thread.

use super::{Activity, Look};

/// A change that is worth reporting.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StallChange {
    /// A thread has been in one round for the limit.
    Began {
        /// The thread, by its position.
        thread: usize,
        /// How long it has been in this round, milliseconds.
        for_ms: u64,
        /// What it does.
        look: Look,
    },
    /// A stalled thread goes round again.
    Ended {
        /// The thread, by its position.
        thread: usize,
        /// How long it was stalled, milliseconds.
        after_ms: u64,
    },
}

#[derive(Clone, Copy, Debug)]
struct Seen {
    look: Look,
    since_ms: u64,
    is_stalled: bool,
}

/// What is known of all threads.
#[derive(Debug)]
pub struct Stalls {
    limit_ms: u64,
    every_ms: u64,
    seen: Vec<Seen>,
    looked_ms: Option<u64>,
}

impl Stalls {
    /// For threads that may stay in one round for less than `limit_ms`, looked at every `every_ms`.
    #[must_use]
    pub const fn new(limit_ms: u64, every_ms: u64) -> Self {
        Self { limit_ms, every_ms, seen: Vec::new(), looked_ms: None }
    }

    /// Looks at all threads, by position. Threads may be added at the end.
    pub fn look(&mut self, now_ms: u64, looks: &[Look]) -> Vec<StallChange> {
        let since_last_ms = self.looked_ms.replace(now_ms).map_or(0, |before| now_ms.saturating_sub(before));
        // A look that is up to one interval late may be so by chance.
        let lost_ms = if since_last_ms > 2 * self.every_ms { since_last_ms - self.every_ms } else { 0 };
        let mut changes = Vec::new();
        for (thread, look) in looks.iter().copied().enumerate() {
            let Some(seen) = self.seen.get_mut(thread) else {
                self.seen.push(Seen { look, since_ms: now_ms, is_stalled: false });
                continue;
            };
            seen.since_ms = (seen.since_ms + lost_ms).min(now_ms);
            let for_ms = now_ms - seen.since_ms;
            let goes_round = look.activity == Activity::Waiting || look.round != seen.look.round;
            if goes_round {
                if seen.is_stalled {
                    changes.push(StallChange::Ended { thread, after_ms: for_ms });
                }
                *seen = Seen { look, since_ms: now_ms, is_stalled: false };
                continue;
            }
            seen.look = look;
            if !seen.is_stalled && for_ms >= self.limit_ms {
                seen.is_stalled = true;
                changes.push(StallChange::Began { thread, for_ms, look });
            }
        }
        changes
    }

    /// How long a thread has been stalled by the last look, milliseconds; 0 = it is not.
    #[must_use]
    pub fn stalled_ms(&self, thread: usize) -> u64 {
        let now_ms = self.looked_ms.unwrap_or(0);
        let stalled = self.seen.get(thread).filter(|seen| seen.is_stalled);
        stalled.map_or(0, |seen| now_ms.saturating_sub(seen.since_ms).max(1))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const LIMIT_MS: u64 = 1000;
    const EVERY_MS: u64 = 100;

    const fn busy(round: u32) -> Look {
        Look { round, activity: Activity::Deciding, of: 0 }
    }

    const WAITING: Look = Look { round: 1, activity: Activity::Waiting, of: 0 };

    fn stalls() -> Stalls {
        Stalls::new(LIMIT_MS, EVERY_MS)
    }

    /// Looks at one thread from `from` to `to`, and returns the changes with their times.
    fn watch(stalls: &mut Stalls, from: u64, to: u64, look: impl Fn(u64) -> Look) -> Vec<(u64, StallChange)> {
        let times = (from..=to).step_by(EVERY_MS as usize);
        times.flat_map(|at| stalls.look(at, &[look(at)]).into_iter().map(move |change| (at, change))).collect()
    }

    #[test]
    fn a_thread_that_waits_or_goes_round_is_not_stalled() {
        assert!(watch(&mut stalls(), 0, 10_000, |_| WAITING).is_empty());
        assert!(watch(&mut stalls(), 0, 10_000, |at| busy((at / 500) as u32)).is_empty());
        let wakes = |at: u64| if at % 900 < 800 { busy(7) } else { WAITING };
        assert!(watch(&mut stalls(), 0, 10_000, wakes).is_empty(), "the same round number, but it waited between");
    }

    #[test]
    fn a_stall_is_reported_once_with_its_last_phase_and_its_end() {
        let mut stalls = stalls();
        let phase =
            |at: u64| Look { activity: if at < 600 { Activity::Deciding } else { Activity::Sweeping }, ..busy(3) };
        let began = StallChange::Began { thread: 0, for_ms: LIMIT_MS, look: phase(LIMIT_MS) };
        assert_eq!(watch(&mut stalls, 0, 2500, phase), [(LIMIT_MS, began)]);
        assert_eq!(stalls.stalled_ms(0), 2500);
        assert_eq!(stalls.look(2600, &[busy(4)]), [StallChange::Ended { thread: 0, after_ms: 2600 }]);
        assert_eq!((stalls.stalled_ms(0), stalls.stalled_ms(9)), (0, 0));
    }

    #[test]
    fn the_time_in_which_the_watchdog_did_not_run_counts_against_no_thread() {
        let mut stalls = stalls();
        watch(&mut stalls, 0, 500, |_| busy(1));
        assert!(stalls.look(60_500, &[busy(1)]).is_empty(), "the process was stopped for a minute");
        assert!(watch(&mut stalls, 60_600, 60_800, |_| busy(1)).is_empty());
        assert_eq!(watch(&mut stalls, 60_900, 61_100, |_| busy(1)).len(), 1, "it was seen to stand still for a second");
    }

    #[test]
    fn a_thread_may_be_added_at_any_time() {
        let mut stalls = stalls();
        watch(&mut stalls, 0, 900, |_| busy(1));
        let both = |at| [busy(1), busy((at / 100) as u32)];
        let mut changes = Vec::new();
        (1000..=5000).step_by(100).for_each(|at| changes.extend(stalls.look(at, &both(at))));
        assert_eq!(changes.len(), 1);
    }

    proptest! {
        /// A thread is reported exactly while its round lasts for the limit, if the watchdog is on time.
        #[test]
        fn every_long_round_is_reported_and_no_short_one(lengths in prop::collection::vec((1_u64..40, any::<bool>()), 1..60)) {
            let (mut stalls, mut at, mut round) = (stalls(), 0, 0);
            let mut reported = 0;
            let mut expected = 0;
            for (looks, waits) in lengths {
                round += 1;
                let look = if waits { Look { round, ..WAITING } } else { busy(round) };
                for _ in 0..looks {
                    for change in stalls.look(at, &[look]) {
                        if let StallChange::Began { for_ms, .. } = change {
                            prop_assert!(for_ms >= LIMIT_MS && !waits);
                            reported += 1;
                        }
                    }
                    at += EVERY_MS;
                }
                expected += usize::from(!waits && (looks - 1) * EVERY_MS >= LIMIT_MS);
            }
            prop_assert_eq!(reported, expected);
        }
    }
}
