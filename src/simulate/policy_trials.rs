//! Policies of the product on one load, compared in pairs over seeds.
//!
//! A stretch of the load is measured. All requests before it run too: they warm the caches up, and their sessions go on. All
//! policies see the same requests and the same chance.

use super::experiment::{in_parallel, is_closed, loaded};
use super::figures::{Outcome, Slo};
use super::measure::Measured;
use super::recorded::Felt;
use super::run::Settings;
use super::simulate_under;
use super::statistics::{Interval, bootstrap, paired_differences};
use super::workload::{Arrivals, Workload};
use crate::route::{Mode, Policy};

/// The share of a load that is not measured, because caches are cold.
pub const WARM_UP_SHARE: f64 = 0.1;
/// The seed of bootstraps.
const BOOTSTRAP_SEED: u64 = 1;

/// A stretch of a load, with all that comes before it.
#[derive(Clone, Debug)]
pub struct Stretch {
    workload: Workload,
    /// What is not measured: seconds from its beginning, or the share of its requests if sessions are live at a time.
    unmeasured: f64,
}

impl Stretch {
    /// The stretch from one share of the load to another, by time; by place, if sessions have no times of their own.
    #[must_use]
    pub fn of(workload: &Workload, from: f64, to: f64) -> Self {
        let end_s = workload.sessions.last().map_or(0.0, |session| session.start_s);
        let count = workload.sessions.len();
        let last = match workload.arrivals {
            _ if to >= 1.0 => count,
            Arrivals::Live(_) => (count as f64 * to) as usize,
            Arrivals::Timed => workload.sessions.partition_point(|session| session.start_s < end_s * to),
        };
        let unmeasured = match workload.arrivals {
            Arrivals::Timed => end_s * from,
            Arrivals::Live(_) => from / to.max(1e-9),
        };
        Self { workload: workload.take(0..last), unmeasured }
    }

    /// When measuring begins, seconds of the workload; 0 if sessions are live at a time.
    #[must_use]
    pub fn measured_from_s(&self) -> f64 {
        if self.is_closed() { 0.0 } else { self.unmeasured }
    }

    /// Requests, those before the stretch among them.
    #[must_use]
    pub fn requests(&self) -> usize {
        self.workload.requests()
    }

    /// The load at which the stretch was recorded: 1, or its live sessions.
    #[must_use]
    pub fn own_load(&self) -> f64 {
        match self.workload.arrivals {
            Arrivals::Timed => 1.0,
            Arrivals::Live(live) => live as f64,
        }
    }

    /// Whether loads are live sessions.
    #[must_use]
    pub fn is_closed(&self) -> bool {
        is_closed(&self.workload)
    }

    fn of_seed(&self, seed: u64) -> Workload {
        match self.workload.arrivals {
            _ if seed <= 1 => self.workload.clone(),
            Arrivals::Timed => self.workload.clone().jittered(seed),
            Arrivals::Live(_) => self.workload.clone().shuffled(seed),
        }
    }

    /// What the measured requests went through. None, if the fleet has no engine.
    #[must_use]
    pub fn outcomes(&self, fleet: &Settings, policy: &Policy, load: f64, seed: u64) -> Vec<Outcome> {
        let of_seed = self.of_seed(seed);
        let workload = loaded(&of_seed, load);
        let settings = Settings { seed, ..fleet.clone() };
        let mut outcomes = simulate_under(&workload, &settings, policy).unwrap_or_default();
        let skipped = match workload.arrivals {
            Arrivals::Timed => {
                let from_ns = (self.unmeasured / load * 1e9) as u64;
                outcomes.partition_point(|outcome| outcome.arrived_ns < from_ns)
            }
            Arrivals::Live(_) => (outcomes.len() as f64 * self.unmeasured) as usize,
        };
        outcomes.drain(..skipped);
        outcomes
    }
}

/// Policies on a stretch.
#[derive(Clone, Copy)]
pub struct Trials<'a> {
    /// The load.
    pub stretch: &'a Stretch,
    /// The fleet.
    pub fleet: &'a Settings,
    /// What requests are to feel.
    pub slo: Slo,
    /// Tokens of a block by which the policies' costs in blocks count; simulated blocks may be larger.
    pub block_size: u32,
    /// Threads. They change no figure.
    pub threads: usize,
    /// Is called after each run.
    pub tick: &'a (dyn Fn() + Sync),
}

/// Two policies over seeds.
#[derive(Clone, Debug)]
pub struct Pair {
    /// The figures of each by seed.
    pub runs: [Vec<(u64, Measured)>; 2],
    /// What requests felt under the first one: the medians over its seeds.
    pub felt: Felt,
}

impl Pair {
    /// The medians of each policy's figures over the seeds.
    #[must_use]
    pub fn medians(&self) -> [Measured; 2] {
        self.runs.each_ref().map(|runs| Measured::median(&runs.iter().map(|(_, run)| run.clone()).collect::<Vec<_>>()))
    }
}

/// One run: a policy at a load with a seed.
pub(super) type Job<'a> = (&'a Policy, f64, u64);

impl Trials<'_> {
    fn outcomes(&self, (policy, load, seed): Job<'_>) -> Vec<Outcome> {
        let simulated = self.fleet.engines.first().map_or(self.block_size, |engine| engine.block_size);
        let policy = in_blocks(policy, self.block_size, simulated);
        let outcomes = self.stretch.outcomes(self.fleet, &policy, load, seed);
        (self.tick)();
        outcomes
    }

    /// The figures of runs, in their order.
    #[must_use]
    pub fn measured(&self, jobs: &[Job<'_>]) -> Vec<Measured> {
        let measured = |at: usize| Measured::of(&self.outcomes(jobs[at]), &self.slo, &self.fleet.engines);
        in_parallel(jobs.len(), self.threads, measured)
    }

    /// Two policies at one load, over seeds.
    #[must_use]
    pub fn pair(&self, policies: [&Policy; 2], load: f64, seeds: u64) -> Pair {
        let jobs: Vec<Job<'_>> =
            policies.iter().flat_map(|policy| (1..=seeds).map(move |seed| (*policy, load, seed))).collect();
        let runs = in_parallel(jobs.len(), self.threads, |at| {
            let outcomes = self.outcomes(jobs[at]);
            (Measured::of(&outcomes, &self.slo, &self.fleet.engines), Felt::of(&outcomes))
        });
        let (before, after) = runs.split_at(seeds as usize);
        let felt: Vec<Felt> = before.iter().map(|(_, felt)| *felt).collect();
        let by_seed =
            |runs: &[(Measured, Felt)]| (1..=seeds).zip(runs.iter().map(|(measured, _)| measured.clone())).collect();
        Pair { runs: [by_seed(before), by_seed(after)], felt: Felt::median(&felt) }
    }

    /// The figures of some policies over loads, by the first seed.
    #[must_use]
    pub fn over_loads(&self, policies: &[&Policy], loads: &[f64]) -> Vec<Vec<(f64, Measured)>> {
        let jobs: Vec<Job<'_>> =
            policies.iter().flat_map(|policy| loads.iter().map(move |load| (*policy, *load, 1))).collect();
        let measured = self.measured(&jobs);
        let of_policy = |of: &[Measured]| loads.iter().copied().zip(of.iter().cloned()).collect();
        measured.chunks(loads.len().max(1)).map(of_policy).collect()
    }
}

/// A policy whose costs count blocks of `from` tokens, for blocks of `to` tokens: its one weight that is a number of
/// blocks is converted.
fn in_blocks(policy: &Policy, from: u32, to: u32) -> Policy {
    let active_request_weight = policy.active_request_weight * f64::from(from) / f64::from(to.max(1));
    Policy { active_request_weight, ..*policy }
}

/// Why a policy cannot be simulated; `None` = it can.
#[must_use]
pub fn unsimulated(policy: &Policy) -> Option<&'static str> {
    match policy.mode {
        Mode::Direct => Some("mode direct follows the pins of requests, which a simulation lacks"),
        Mode::Approximate => Some("mode approximate follows predictions, which a simulation lacks"),
        _ => None,
    }
}

/// The difference of a figure between two policies.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Difference {
    /// The median of the first policy.
    pub before: f64,
    /// The median of the second.
    pub after: f64,
    /// The median difference of a pair, and the interval that holds it with a confidence of 95 %.
    pub interval: Interval,
}

impl Difference {
    /// The difference of a figure of runs with the same seeds.
    #[must_use]
    pub fn of(before: &[(u64, Measured)], after: &[(u64, Measured)], figure: impl Fn(&Measured) -> f64) -> Self {
        let values = |runs: &[(u64, Measured)]| -> Vec<(u64, f64)> {
            runs.iter().map(|(seed, run)| (*seed, figure(run))).collect()
        };
        let (before, after) = (values(before), values(after));
        let median =
            |of: &[(u64, f64)]| super::statistics::median(&of.iter().map(|(_, value)| *value).collect::<Vec<_>>());
        let interval = bootstrap(&paired_differences(&after, &before), BOOTSTRAP_SEED);
        Self { before: median(&before), after: median(&after), interval }
    }

    /// Whether the interval leaves out 0.
    #[must_use]
    pub fn is_clear(&self) -> bool {
        self.interval.low > 0.0 || self.interval.high < 0.0
    }
}

/// A figure to compare.
pub struct Figure {
    /// Its name.
    pub name: &'static str,
    /// Its unit.
    pub unit: &'static str,
    /// From the figure to its unit.
    pub scale: f64,
    /// The figure of a run.
    pub of: fn(&Measured) -> f64,
}

/// What is compared.
pub const FIGURES: [Figure; 10] = [
    Figure { name: "TTFT mean", unit: "s", scale: 1.0, of: |run| run.ttft_s.mean },
    Figure { name: "TTFT p50", unit: "s", scale: 1.0, of: |run| run.ttft_s.p50 },
    Figure { name: "TTFT p90", unit: "s", scale: 1.0, of: |run| run.ttft_s.p90 },
    Figure { name: "TTFT p99", unit: "s", scale: 1.0, of: |run| run.ttft_s.p99 },
    Figure { name: "TPOT mean", unit: "ms", scale: 1e3, of: |run| run.tpot_s.mean },
    Figure { name: "TPOT p99", unit: "ms", scale: 1e3, of: |run| run.tpot_s.p99 },
    Figure { name: "E2E mean", unit: "s", scale: 1.0, of: |run| run.e2e_s.mean },
    Figure { name: "E2E p99", unit: "s", scale: 1.0, of: |run| run.e2e_s.p99 },
    Figure { name: "goodput", unit: "%", scale: 100.0, of: |run| run.goodput },
    Figure { name: "hits", unit: "%", scale: 100.0, of: |run| run.hit_rate },
];

#[cfg(test)]
mod tests {
    use super::super::workload::generators::{Agents, Chat};
    use super::*;

    fn chat() -> Workload {
        Chat { requests: 260, sessions_per_s: 6.0, ..Chat::default() }.generate(3)
    }

    fn trials<'a>(stretch: &'a Stretch, fleet: &'a Settings) -> Trials<'a> {
        Trials { stretch, fleet, slo: Slo::default(), block_size: 16, threads: 2, tick: &|| {} }
    }

    #[test]
    fn a_stretch_is_measured_after_it_has_warmed_up() {
        let (workload, fleet) = (chat(), super::super::tests::fleet(2));
        let end_s = workload.sessions.last().map_or(0.0, |session| session.start_s);
        let later = Stretch::of(&workload, 0.5, 1.0);
        let outcomes = later.outcomes(&fleet, &Policy::default(), 1.0, 1);
        assert!(!outcomes.is_empty() && outcomes.len() < later.requests());
        assert!(outcomes.iter().all(|outcome| outcome.arrived_ns as f64 >= end_s * 0.5e9));
        assert!(Stretch::of(&workload, 0.0, 0.5).requests() < workload.requests() * 3 / 4);
        let whole = Stretch::of(&workload, 0.0, 1.0);
        assert_eq!(whole.outcomes(&fleet, &Policy::default(), 1.0, 1).len(), workload.requests());
        let agents = Agents { requests: 60, ..Agents::default() }.generate(1);
        let half = Stretch::of(&agents, 0.5, 1.0);
        let measured = half.outcomes(&fleet, &Policy::default(), 2.0, 1).len();
        assert!(measured > 0 && measured < half.requests() && half.is_closed());
    }

    #[test]
    fn costs_in_blocks_do_not_depend_on_the_size_of_simulated_blocks() {
        let policy = Policy { active_request_weight: 64.0, ..Policy::default() };
        assert_eq!(in_blocks(&policy, 16, 64).active_request_weight, 16.0);
        assert_eq!(in_blocks(&policy, 16, 16), policy);
    }

    #[test]
    fn modes_that_a_simulation_cannot_run_are_named() {
        let with = |mode| unsimulated(&Policy { mode, ..Policy::default() });
        assert!(with(Mode::Direct).is_some() && with(Mode::Approximate).is_some() && with(Mode::Latency).is_none());
    }

    #[test]
    fn pairs_of_the_same_policy_do_not_differ() {
        let (workload, fleet) = (chat(), super::super::tests::fleet(2));
        let stretch = Stretch::of(&workload, WARM_UP_SHARE, 1.0);
        let policy = Policy::default();
        let pair = trials(&stretch, &fleet).pair([&policy, &policy], 1.0, 3);
        let (runs, [before, after]) = (&pair.runs, pair.medians());
        let difference = Difference::of(&runs[0], &runs[1], |run| run.ttft_s.mean);
        assert_eq!((before.ttft_s.p90, before.e2e_s), (pair.felt.ttft_s.p90, after.e2e_s));
        assert_eq!((difference.interval.low, difference.interval.high), (0.0, 0.0));
        assert!(!difference.is_clear() && difference.before > 0.0 && difference.before == difference.after);
        assert_ne!(runs[0][0].1, runs[0][1].1, "seeds differ");
    }
}
