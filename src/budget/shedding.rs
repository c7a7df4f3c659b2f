//! What the daemon sheds while memory is short, in a stated order: pure, one look after another.
//!
//! | at this share of the budget | the daemon sheds | until below |
//! |---|---|---|
//! | 85 % | new connections | 80 % |
//! | 88 % | dumps | 83 % |
//! | 91 % | predictions | 86 % |
//! | 94 %, or 94 % of the index's part | new blocks of the worker with the most blocks, then of the next | 89 % of both |
//!
//! The share is that of the accounts or of the resident memory, whichever is larger. One look begins or ends at most one
//! thing. One more worker is held back only if the share has grown since the last one was: its blocks stay, so that the
//! share does not fall. Something ends only after several looks in a row below its share, the last one first.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::limits::{RESUME_AFTER_LOOKS, RESUME_BELOW_PERCENT, SHED_AT_PERCENT};
use crate::reasons::reasons;

reasons! {
    /// Something that the daemon gives up while memory is short, in the order in which it does.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
    Shed {}
    /// New connections of gateways are refused.
    Connections = "connections";
    /// Dumps, and so snapshots, are refused.
    Dumps = "dumps";
    /// Predictions are dropped, and none are made.
    Predictions = "predictions";
    /// New blocks of the workers with the most blocks are refused.
    Stores = "stores";
}

/// The memory at one look, bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Pressure {
    /// The larger of what the accounts say and what is resident.
    pub used: u64,
    /// The budget.
    pub bytes_max: u64,
    /// What the index takes.
    pub index_used: u64,
    /// What the index may take.
    pub index_bytes_max: u64,
}

fn percent(used: u64, of: u64) -> u64 {
    (u128::from(used) * 100 / u128::from(of.max(1))) as u64
}

/// The result of a look.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ShedChange {
    /// Something is given up from now on. For [`Shed::Stores`]: new blocks of one more worker.
    Begin(Shed),
    /// It is taken up again. For [`Shed::Stores`]: of the worker that came last.
    End(Shed),
}

/// What is given up now.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Shedding {
    /// How many of the things before the stores, in their order.
    level: usize,
    /// Workers of which new blocks are refused.
    held_back: usize,
    /// The share at which the last of them began, percent; 0 = the share has been lower since.
    held_at_percent: u64,
    /// Looks in a row in which the last thing could have ended.
    calm_looks: u32,
}

/// Things before the stores.
const LEVELS: usize = Shed::Stores as usize;

impl Shedding {
    /// Whether something is given up.
    #[must_use]
    pub fn has(&self, shed: Shed) -> bool {
        match shed {
            Shed::Stores => self.held_back > 0,
            other => (other as usize) < self.level,
        }
    }

    /// How many workers' new blocks are refused.
    #[must_use]
    pub const fn held_back(&self) -> usize {
        self.held_back
    }

    /// Takes a look. `has_more` = there is a worker with blocks that is not held back yet; asked only if it matters.
    pub fn look(&mut self, pressure: Pressure, has_more: impl FnOnce() -> bool) -> Option<ShedChange> {
        let share = percent(pressure.used, pressure.bytes_max);
        let of_index = percent(pressure.index_used, pressure.index_bytes_max);
        let stores_at = SHED_AT_PERCENT[LEVELS];
        if self.level < LEVELS && share >= SHED_AT_PERCENT[self.level] {
            let shed = Shed::ALL[self.level];
            (self.level, self.calm_looks) = (self.level + 1, 0);
            return Some(ShedChange::Begin(shed));
        }
        let larger = share.max(of_index);
        if larger >= stores_at {
            self.calm_looks = 0;
            if larger <= self.held_at_percent || !has_more() {
                return None;
            }
            (self.held_back, self.held_at_percent) = (self.held_back + 1, larger);
            return Some(ShedChange::Begin(Shed::Stores));
        }
        self.held_at_percent = 0;
        let last = if self.held_back > 0 { LEVELS } else { self.level.checked_sub(1)? };
        let below = RESUME_BELOW_PERCENT[last];
        if share >= below || (last == LEVELS && of_index >= below) {
            self.calm_looks = 0;
            return None;
        }
        self.calm_looks += 1;
        if self.calm_looks < RESUME_AFTER_LOOKS {
            return None;
        }
        self.calm_looks = 0;
        match last {
            LEVELS => self.held_back -= 1,
            _ => self.level = last,
        }
        Some(ShedChange::End(Shed::ALL[last]))
    }
}

/// The worker to hold back next: the one with the most blocks among those that are not held back. `workers` gives each
/// worker's blocks, and whether it is held back.
#[must_use]
pub fn next_to_hold_back<W: Copy>(workers: impl Iterator<Item = (W, u64, bool)>) -> Option<W> {
    let free = workers.filter(|(_, blocks, is_held_back)| *blocks > 0 && !is_held_back);
    free.max_by_key(|(_, blocks, _)| *blocks).map(|(worker, _, _)| worker)
}

/// What is given up now, for the threads that have to refuse it.
///
/// Relaxed everywhere: a thread may see a change a moment late, and nothing else depends on it.
#[derive(Clone, Debug, Default)]
pub struct ShedFlags(Arc<[AtomicBool; Shed::ALL.len()]>);

impl ShedFlags {
    /// Whether something is given up.
    #[must_use]
    pub fn has(&self, shed: Shed) -> bool {
        self.0[shed as usize].load(Ordering::Relaxed)
    }

    /// Gives something up from now on, or takes it up again.
    pub fn set(&self, shed: Shed, is_shed: bool) {
        self.0[shed as usize].store(is_shed, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const MAX: u64 = 10_000;

    /// A look at which this share of the budget, and of the index's part, is used.
    const fn at(share: u64, of_index: u64) -> Pressure {
        Pressure { used: share * MAX / 100, bytes_max: MAX, index_used: of_index * MAX / 100, index_bytes_max: MAX }
    }

    /// Looks again and again, and returns the changes.
    fn looks(shedding: &mut Shedding, pressure: Pressure, times: usize) -> Vec<ShedChange> {
        let has_more = |held_back| move || held_back < 3;
        (0..times).filter_map(|_| shedding.look(pressure, has_more(shedding.held_back))).collect()
    }

    #[test]
    fn things_are_given_up_in_their_order_and_taken_up_in_the_reverse() {
        use ShedChange::{Begin, End};
        let mut shedding = Shedding::default();
        assert!(looks(&mut shedding, at(84, 90), 50).is_empty());
        assert_eq!(looks(&mut shedding, at(85, 0), 50), [Begin(Shed::Connections)]);
        let rest = [Begin(Shed::Dumps), Begin(Shed::Predictions)];
        assert_eq!(looks(&mut shedding, at(93, 0), 50), rest);
        assert_eq!(looks(&mut shedding, at(94, 0), 9), [Begin(Shed::Stores)], "one worker, while nothing grows");
        assert_eq!(looks(&mut shedding, at(95, 0), 9), [Begin(Shed::Stores)]);
        assert_eq!(
            (shedding.held_back(), shedding.has(Shed::Stores), shedding.has(Shed::Connections)),
            (2, true, true)
        );
        let calm = RESUME_AFTER_LOOKS as usize;
        assert!(looks(&mut shedding, at(88, 0), calm - 1).is_empty());
        assert!(looks(&mut shedding, at(90, 0), 1).is_empty() && looks(&mut shedding, at(88, 0), calm - 1).is_empty());
        assert_eq!(looks(&mut shedding, at(88, 0), 1), [End(Shed::Stores)], "after looks in a row");
        assert_eq!(looks(&mut shedding, at(88, 0), 10 * calm), [End(Shed::Stores)], "88 % is too much for predictions");
        let rest = [End(Shed::Predictions), End(Shed::Dumps), End(Shed::Connections)];
        assert_eq!(looks(&mut shedding, at(10, 0), 10 * calm), rest);
        assert_eq!(shedding, Shedding::default());
    }

    #[test]
    fn a_full_index_holds_back_workers_and_nothing_else() {
        let mut shedding = Shedding::default();
        let begins = |shedding: &mut Shedding, of_index| looks(shedding, at(50, of_index), 9).len();
        assert_eq!([94, 96, 94, 96].map(|of_index| begins(&mut shedding, of_index)), [1, 1, 0, 0]);
        assert_eq!([93, 94, 99].map(|of_index| begins(&mut shedding, of_index)), [0, 1, 0], "all that have blocks");
        assert!(!shedding.has(Shed::Connections));
        let calm = RESUME_AFTER_LOOKS as usize;
        assert!(looks(&mut shedding, at(50, 89), 10 * calm).is_empty());
        assert_eq!(looks(&mut shedding, at(50, 88), 10 * calm), [ShedChange::End(Shed::Stores); 3]);
    }

    #[test]
    fn the_worker_with_the_most_blocks_comes_next() {
        let workers = [(1, 10, false), (2, 40, true), (3, 30, false), (4, 0, false)];
        assert_eq!(next_to_hold_back(workers.into_iter()), Some(3));
        assert_eq!(next_to_hold_back([(2, 40, true), (4, 0, false)].into_iter()), None);
        assert_eq!(next_to_hold_back(std::iter::empty::<(u8, u64, bool)>()), None);
    }

    #[test]
    fn flags_show_what_is_given_up() {
        let (flags, shown) = (ShedFlags::default(), Shed::Dumps);
        let other = flags.clone();
        flags.set(shown, true);
        assert!(other.has(shown) && !other.has(Shed::Connections));
    }

    /// A model of a daemon: parts that grow by what is asked of them, unless their bound or what is given up forbids it.
    #[derive(Clone, Copy, Debug)]
    struct Asked {
        connections: u64,
        dumps: u64,
        predictions: u64,
        worker: usize,
        stores: u64,
        freed: u64,
    }

    fn asked() -> impl Strategy<Value = Asked> {
        let amounts = (0_u64..400, 0_u64..400, 0_u64..400, 0_usize..4, 0_u64..400, 0_u64..900);
        amounts.prop_map(|(connections, dumps, predictions, worker, stores, freed)| Asked {
            connections,
            dumps,
            predictions,
            worker,
            stores,
            freed,
        })
    }

    proptest! {
        /// Whatever is asked, the parts never take more than the budget, every change is in order, and once everything is
        /// freed everything is taken up again.
        #[test]
        fn the_sum_never_exceeds_the_budget_and_all_is_taken_up_again(
            bounds in prop::array::uniform4(500_u64..4000), asked in prop::collection::vec(asked(), 1..300),
        ) {
            let bytes_max: u64 = bounds.iter().sum();
            let (mut shedding, mut held) = (Shedding::default(), Vec::new());
            let (mut used, mut workers) = ([0_u64; 4], [0_u64; 4]);
            let grow = |used: &mut u64, bound: u64, by: u64| if *used + by <= bound { *used += by };
            let mut begun: Vec<Shed> = Vec::new();
            for step in asked {
                if !shedding.has(Shed::Connections) { grow(&mut used[0], bounds[0], step.connections); }
                if !shedding.has(Shed::Dumps) { grow(&mut used[1], bounds[1], step.dumps); }
                if !shedding.has(Shed::Predictions) { grow(&mut used[2], bounds[2], step.predictions); }
                if !held.contains(&step.worker) {
                    let before = used[3];
                    grow(&mut used[3], bounds[3], step.stores);
                    workers[step.worker] += used[3] - before;
                }
                let part = (step.freed % 3) as usize;
                used[part] = used[part].saturating_sub(step.freed);
                let sum: u64 = used.iter().sum();
                prop_assert!(sum <= bytes_max, "{used:?} of {bounds:?}");
                let pressure = Pressure { used: sum, bytes_max, index_used: used[3], index_bytes_max: bounds[3] };
                let next = next_to_hold_back(workers.iter().enumerate().map(|(at, blocks)| (at, *blocks, held.contains(&at))));
                match shedding.look(pressure, || next.is_some()) {
                    Some(ShedChange::Begin(Shed::Stores)) => {
                        let next = next.expect("a worker to hold back");
                        prop_assert!(workers.iter().enumerate().all(|(at, blocks)| held.contains(&at) || *blocks <= workers[next]));
                        held.push(next);
                    }
                    Some(ShedChange::End(Shed::Stores)) => drop(held.pop()),
                    Some(ShedChange::Begin(shed)) => {
                        prop_assert_eq!(shed as usize, begun.len(), "in order");
                        if shed == Shed::Predictions { used[2] = 0; }
                        begun.push(shed);
                    }
                    Some(ShedChange::End(shed)) => prop_assert_eq!(begun.pop(), Some(shed)),
                    None => {}
                }
                prop_assert_eq!(held.len(), shedding.held_back());
            }
            let free = Pressure { used: 0, bytes_max, index_used: 0, index_bytes_max: bounds[3] };
            for _ in 0..(held.len() + begun.len() + 1) * RESUME_AFTER_LOOKS as usize {
                shedding.look(free, || false);
            }
            prop_assert_eq!(shedding, Shedding::default());
        }
    }
}
