//! `simulate --suite`: every policy on every workload, over loads and seeds.
//!
//! Stages, each of which depends on the one before and on nothing else, so that threads change no figure:
//! 1. the capacity of every policy with seed 1, searched from the table's guess;
//! 2. the same with the other seeds, searched near that of seed 1;
//! 3. figures of every policy at shares of the best peer's capacity, which is the median of these;
//! 4. more seeds for ours, the best three peers, the best by each metric and LPWL: capacity, and figures at the load of the verdict;
//! 5. robustness: ours with wrong constants, ours and the best peer with a slow worker and behind several routers, and ours
//!    on an idle fleet.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use super::bounds::POOLED;
use super::capacity::Search;
use super::cells::{Cells, Found};
use super::experiment::{self, OURS, in_parallel, peers, possible_load, silent};
use super::figures::Slo;
use super::measure::Measured;
use super::picture::{Section, panels};
use super::policies::NAMES;
use super::report::Row;
use super::routers::RouterSettings;
use super::run::{FleetChange, FleetChangeKind, Settings};
use super::statistics::median;
use super::suite_workloads::{Case, Traces};
use super::verdict::{METRICS, best_by};

/// Shares of the best peer's capacity at which figures are taken.
pub const LOAD_SHARES: [f64; 5] = [0.5, 0.7, 0.85, 0.95, 1.05];
/// The share at which the verdict is taken.
pub const VERDICT_SHARE: f64 = 0.85;
/// The share of a fleet that is as good as idle.
pub const IDLE_SHARE: f64 = 0.1;
/// Peers that get as many seeds as ours.
const BEST_PEERS: usize = 3;
/// The peer whose tail is a measure of its own.
pub const TAIL_PEER: &str = "lpwl";
/// Runs of a search: without a good guess, and with one. For plans only.
const PROBES: (f64, f64) = (8.5, 5.5);

/// How much is run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Seeds of every policy.
    pub seeds_all: u64,
    /// Seeds of ours and the best peers.
    pub seeds_best: u64,
}

impl Shape {
    /// The quick form.
    pub const QUICK: Self = Self { seeds_all: 3, seeds_best: 20 };
    /// The full form.
    pub const FULL: Self = Self { seeds_all: 20, seeds_best: 20 };
}

/// What is different from the plain fleet in a robustness cell.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Condition {
    /// Nothing.
    Plain,
    /// The router begins with constants half as large as the true ones.
    ConstantsHalved,
    /// It begins with constants twice as large.
    ConstantsDoubled,
    /// One worker's steps take twice as long.
    SlowWorker,
    /// Requests are spread over 4 routers, which learn of each other's bookings 50 ms later.
    Routers,
}

impl Condition {
    /// Its name in cells and verdicts.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Plain => "plain",
            Self::ConstantsHalved => "constants x0.5",
            Self::ConstantsDoubled => "constants x2",
            Self::SlowWorker => "one worker at half speed",
            Self::Routers => "4 routers and 50 ms",
        }
    }

    fn apply(self, settings: &mut Settings) {
        match self {
            Self::Plain => {}
            Self::ConstantsHalved => settings.prior_factor = Some(0.5),
            Self::ConstantsDoubled => settings.prior_factor = Some(2.0),
            Self::SlowWorker => {
                settings.changes.push(FleetChange { at_s: 0.0, worker: 0, kind: FleetChangeKind::Slows(2.0) });
            }
            Self::Routers => {
                settings.routers = RouterSettings { count: 4, age_s: Some(0.05), sessions_stick: false };
            }
        }
    }
}

/// One run or search of the suite.
#[derive(Clone, Debug)]
struct Job {
    case: usize,
    policy: &'static str,
    seed: u64,
    kind: Kind,
}

#[derive(Clone, Copy, Debug)]
enum Kind {
    Search(Search),
    Run { share: f64, load: f64, condition: Condition },
}

impl Job {
    /// Its name: everything that its result depends on and that may differ between two suites.
    fn cell(&self, case: &Case) -> String {
        let Self { policy, seed, .. } = self;
        let of = format!("{}/{}/{policy}/seed {seed}", case.name, case.engine);
        match &self.kind {
            Kind::Search(search) => format!("{of}/capacity from {:.4}", search.first),
            Kind::Run { load, condition, .. } => format!("{of}/load {load:.4}/{}", condition.name()),
        }
    }
}

/// Policy, load in thousandths of the reference, and condition.
pub type RunKey = (&'static str, u32, Condition);

/// The results of a case.
#[derive(Clone, Debug, Default)]
pub struct CaseResults {
    /// By policy: seeds and capacities as a load.
    pub capacities: BTreeMap<&'static str, Vec<(u64, f64)>>,
    /// By policy: seeds and capacities in requests a second.
    pub capacities_rps: BTreeMap<&'static str, Vec<(u64, f64)>>,
    /// The best peer's median capacity, as a load; 0 = no peer has one.
    pub reference_load: f64,
    /// The peers, the one with the highest median capacity first.
    pub ranking: Vec<&'static str>,
    /// Seeds and figures.
    pub runs: BTreeMap<RunKey, Vec<(u64, Measured)>>,
}

impl CaseResults {
    /// Seeds and figures of a policy at a share of the reference load.
    #[must_use]
    pub fn at(&self, policy: &'static str, share: f64, condition: Condition) -> &[(u64, Measured)] {
        self.runs.get(&(policy, thousandths(share), condition)).map_or(&[], Vec::as_slice)
    }

    /// The medians of a policy at a share of the reference load, over the seeds that every policy has: a generated
    /// workload differs more between seeds than policies do.
    #[must_use]
    pub fn row(&self, policy: &'static str, share: f64) -> Option<Row> {
        let at_share = |key: &&RunKey| key.1 == thousandths(share) && key.2 == Condition::Plain;
        let seeds = self.runs.keys().filter(at_share).map(|key| self.runs[key].len()).min().unwrap_or(0) as u64;
        let runs = self.at(policy, share, Condition::Plain).iter().filter(|(seed, _)| *seed <= seeds);
        let runs: Vec<Measured> = runs.map(|(_, run)| run.clone()).collect();
        let of = |by: &BTreeMap<&str, Vec<(u64, f64)>>| {
            let found = by.get(policy)?.iter().filter(|(seed, _)| *seed <= seeds);
            let found: Vec<f64> = found.map(|(_, value)| *value).collect();
            (!found.is_empty()).then(|| median(&found))
        };
        (!runs.is_empty()).then(|| Row {
            policy: policy.into(),
            figures: Measured::median(&runs),
            capacity_rps: of(&self.capacities_rps),
            capacity_load: of(&self.capacities),
        })
    }
}

fn thousandths(share: f64) -> u32 {
    (share * 1000.0).round() as u32
}

/// A suite in progress.
pub struct Suite<'a> {
    /// The workloads.
    pub cases: Vec<Case>,
    /// Where they come from.
    pub traces: &'a Traces,
    /// How much is run.
    pub shape: Shape,
    /// What is promised to requests.
    pub slo: Slo,
    /// Threads.
    pub threads: usize,
    /// What was found, and what was found before.
    pub cells: &'a Cells,
    /// Told after each finished cell: how many of the stage's there are, and the name of the stage.
    pub tick: &'a (dyn Fn(usize, &str) + Sync),
}

impl Suite<'_> {
    /// Runs everything. Returns the results by case.
    ///
    /// # Errors
    /// A cell cannot be written.
    pub fn run(&self) -> Result<Vec<CaseResults>, String> {
        let mut results = vec![CaseResults::default(); self.cases.len()];
        let policies: Vec<&'static str> = NAMES.into_iter().chain([POOLED]).collect();
        let cold = |case: usize, _: &str| Some(Search::new(self.cases[case].first_load, self.cases[case].is_closed));
        self.search("capacity, first seed", &mut results, 1..=1, |_| policies.clone(), cold)?;
        self.search_near("capacity", &mut results, 2..=self.shape.seeds_all, |_| policies.clone())?;
        results.iter_mut().for_each(rank);
        let mut jobs = Vec::new();
        for (case, of_case) in results.iter().enumerate().filter(|(_, of_case)| of_case.reference_load > 0.0) {
            for (policy, share) in policies.iter().flat_map(|policy| LOAD_SHARES.map(|share| (*policy, share))) {
                for seed in 1..=self.shape.seeds_all {
                    jobs.push(self.at_share(case, policy, seed, share, Condition::Plain, of_case));
                }
            }
        }
        self.measure("figures over load", &mut results, jobs)?;
        let best: Vec<Vec<&'static str>> = results.iter().map(best_policies).collect();
        let more = self.shape.seeds_all + 1..=self.shape.seeds_best;
        self.search_near("capacity, more seeds", &mut results, more.clone(), |case| best[case].clone())?;
        let mut jobs = Vec::new();
        for (case, of_case) in results.iter().enumerate().filter(|(_, of_case)| of_case.reference_load > 0.0) {
            for (policy, seed) in best[case].iter().flat_map(|policy| more.clone().map(move |seed| (*policy, seed))) {
                jobs.push(self.at_share(case, policy, seed, VERDICT_SHARE, Condition::Plain, of_case));
            }
            jobs.extend(self.robustness(case, of_case));
        }
        self.measure("verdict and robustness", &mut results, jobs)?;
        Ok(results)
    }

    /// The robustness runs of a case.
    fn robustness(&self, case: usize, of_case: &CaseResults) -> Vec<Job> {
        let mut jobs = Vec::new();
        for seed in 1..=self.shape.seeds_all.min(5) {
            jobs.push(self.at_share(case, OURS, seed, IDLE_SHARE, Condition::Plain, of_case));
        }
        for seed in 1..=self.shape.seeds_best.div_ceil(2) {
            let of_both = [Condition::SlowWorker, Condition::Routers];
            for condition in [Condition::ConstantsHalved, Condition::ConstantsDoubled].into_iter().chain(of_both) {
                jobs.push(self.at_share(case, OURS, seed, VERDICT_SHARE, condition, of_case));
            }
            for (peer, condition) in of_case.ranking.first().into_iter().flat_map(|peer| of_both.map(|of| (peer, of))) {
                jobs.push(self.at_share(case, peer, seed, VERDICT_SHARE, condition, of_case));
            }
        }
        jobs
    }

    fn at_share(
        &self,
        case: usize,
        policy: &'static str,
        seed: u64,
        share: f64,
        condition: Condition,
        of_case: &CaseResults,
    ) -> Job {
        let load = possible_load(share * of_case.reference_load, self.cases[case].is_closed);
        Job { case, policy, seed, kind: Kind::Run { share, load, condition } }
    }

    /// Searches near the capacity of seed 1.
    fn search_near(
        &self,
        stage: &str,
        results: &mut [CaseResults],
        seeds: std::ops::RangeInclusive<u64>,
        policies: impl Fn(usize) -> Vec<&'static str>,
    ) -> Result<(), String> {
        let first: Vec<BTreeMap<&str, f64>> = results
            .iter()
            .map(|of_case| of_case.capacities.iter().filter_map(|(p, found)| Some((*p, found.first()?.1))).collect())
            .collect();
        let near = |case: usize, policy: &str| {
            let load = *first[case].get(policy)?;
            Some(Search::new(load, self.cases[case].is_closed).near(load))
        };
        self.search(stage, results, seeds, policies, near)
    }

    fn search(
        &self,
        stage: &str,
        results: &mut [CaseResults],
        seeds: std::ops::RangeInclusive<u64>,
        policies: impl Fn(usize) -> Vec<&'static str>,
        how: impl Fn(usize, &str) -> Option<Search>,
    ) -> Result<(), String> {
        let mut jobs = Vec::new();
        for case in 0..self.cases.len() {
            for policy in policies(case) {
                let Some(search) = how(case, policy) else { continue };
                jobs.extend(seeds.clone().map(|seed| Job { case, policy, seed, kind: Kind::Search(search) }));
            }
        }
        for (job, found) in self.done(stage, jobs)? {
            let of_case = &mut results[job.case];
            if let Found::Capacity { load: Some(load), rps: Some(rps), .. } = found {
                of_case.capacities.entry(job.policy).or_default().push((job.seed, load));
                of_case.capacities_rps.entry(job.policy).or_default().push((job.seed, rps));
            }
        }
        Ok(())
    }

    fn measure(&self, stage: &str, results: &mut [CaseResults], jobs: Vec<Job>) -> Result<(), String> {
        for (job, found) in self.done(stage, jobs)? {
            if let (Found::Run(measured), Kind::Run { share, condition, .. }) = (found, job.kind) {
                let of_case = &mut results[job.case];
                let key = (job.policy, thousandths(share), condition);
                of_case.runs.entry(key).or_default().push((job.seed, *measured));
            }
        }
        Ok(())
    }

    /// Does the jobs, or finds what they once gave.
    fn done(&self, stage: &str, jobs: Vec<Job>) -> Result<Vec<(Job, Found)>, String> {
        let found = in_parallel(jobs.len(), self.threads, |at| {
            let job = &jobs[at];
            let found = self.cells.get(&job.cell(&self.cases[job.case]), || self.find(job));
            (self.tick)(jobs.len(), stage);
            found
        });
        let found: Result<Vec<Found>, String> = found.into_iter().collect();
        Ok(jobs.into_iter().zip(found?).collect())
    }

    fn find(&self, job: &Job) -> Found {
        let case = &self.cases[job.case];
        let none = Found::Capacity { load: None, rps: None, probes: 0 };
        let (Some(workload), Some(mut settings)) = (self.traces.workload(case, job.seed), case.settings(job.seed))
        else {
            return none;
        };
        match &job.kind {
            Kind::Search(how) => match experiment::capacity(&workload, &settings, &self.slo, job.policy, how) {
                Some((found, rps)) => {
                    Found::Capacity { load: Some(found.load), rps: Some(rps), probes: found.probes.len() }
                }
                None => none,
            },
            Kind::Run { load, condition, .. } => {
                condition.apply(&mut settings);
                let measured = experiment::measure(&workload, *load, &settings, &self.slo, job.policy, &silent);
                measured.map_or(none, |measured| Found::Run(Box::new(measured)))
            }
        }
    }

    /// What would be run, and how long it takes with runs of `run_s` seconds by case.
    #[must_use]
    pub fn plan(&self, run_s: &[f64]) -> String {
        let Shape { seeds_all, seeds_best } = self.shape;
        let policies = NAMES.len() as f64 + 1.0;
        let (all, more) = (seeds_all as f64, (seeds_best - seeds_all) as f64);
        // Ours, the best peers by capacity, LPWL, and one more that is the best by a metric.
        let best = BEST_PEERS as f64 + 3.0;
        let first = policies * (PROBES.0 + (all - 1.0) * PROBES.1);
        let loads = policies * all * LOAD_SHARES.len() as f64;
        let verdict = best * more * (PROBES.1 + 1.0) + all.min(5.0) + 6.0 * (seeds_best as f64 / 2.0).ceil();
        let mut text = format!("{policies} policies and bounds, {seeds_all} seeds each, {seeds_best} for the best\n");
        let mut total_s = 0.0;
        for (case, run_s) in self.cases.iter().zip(run_s) {
            let case_s = (first + loads + verdict) * run_s;
            total_s += case_s;
            let _ = writeln!(
                text,
                "{:6} {:45} {:>5.0} runs for capacity, {:>5.0} over loads, {:>5.0} for the verdict, {run_s:.2} s each: \
                 {:.1} min of one core",
                case.name,
                case.title,
                first,
                loads,
                verdict,
                case_s / 60.0
            );
        }
        let _ = writeln!(
            text,
            "together about {:.0} min on {} threads",
            total_s / 60.0 / self.threads as f64,
            self.threads
        );
        text
    }
}

/// Ranks the peers of a case by their median capacity.
fn rank(of_case: &mut CaseResults) {
    let capacity = |policy: &str| {
        let found = of_case.capacities.get(policy).map_or(&[][..], Vec::as_slice);
        median(&found.iter().map(|(_, load)| *load).collect::<Vec<_>>())
    };
    let mut ranking: Vec<(&'static str, f64)> =
        peers().map(|peer| (peer, capacity(peer))).filter(|(_, load)| load.is_finite()).collect();
    ranking.sort_by(|a, b| b.1.total_cmp(&a.1));
    of_case.reference_load = ranking.first().map_or(0.0, |(_, load)| *load);
    of_case.ranking = ranking.into_iter().map(|(peer, _)| peer).collect();
}

/// Ours, the best peers by capacity, the best by each metric of the verdict, and the one whose tail is a measure.
fn best_policies(of_case: &CaseResults) -> Vec<&'static str> {
    let mut best = vec![OURS];
    best.extend(of_case.ranking.iter().take(BEST_PEERS));
    let by_metric = METRICS.iter().filter_map(|(_, metric)| best_by(of_case, *metric));
    for peer in by_metric.chain([TAIL_PEER]) {
        if !best.contains(&peer) {
            best.push(peer);
        }
    }
    best
}

/// The curves and the table of a case.
#[must_use]
pub fn section(case: &Case, of_case: &CaseResults) -> Section {
    let policies: Vec<&'static str> = NAMES.into_iter().chain([POOLED]).collect();
    let curve = |policy: &&'static str| {
        let point = |share: f64| Some((share, of_case.row(policy, share)?.figures));
        ((*policy).to_owned(), LOAD_SHARES.into_iter().filter_map(point).collect())
    };
    let curves: Vec<_> = policies.iter().map(curve).collect();
    Section {
        title: format!("{}: {}", case.name, case.title),
        text: format!(
            "{} engines {}; the table is at {VERDICT_SHARE} of the best peer's capacity ({}, {:.2} {})",
            case.workers,
            case.engine,
            of_case.ranking.first().unwrap_or(&"none"),
            of_case.reference_load,
            if case.is_closed { "live sessions" } else { "times the workload's own rate" }
        ),
        panels: panels("load, share of the best peer's capacity", &curves),
        rows: policies.iter().filter_map(|policy| of_case.row(policy, VERDICT_SHARE)).collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::super::suite_workloads::cases;
    use super::*;

    #[test]
    fn peers_are_ranked_by_median_capacity_and_bounds_are_no_peers() {
        let mut of_case = CaseResults::default();
        for (policy, loads) in
            [("lpwl", [1.0, 5.0, 2.0]), ("kv", [3.0, 1.0, 1.5]), (OURS, [9.0; 3]), (POOLED, [99.0; 3])]
        {
            of_case.capacities.insert(policy, (1..).zip(loads).collect());
        }
        rank(&mut of_case);
        assert_eq!((of_case.ranking.as_slice(), of_case.reference_load), (&["lpwl", "kv"][..], 2.0));
        assert_eq!(best_policies(&of_case), [OURS, "lpwl", "kv"]);
    }

    #[test]
    fn cells_that_differ_have_different_names() {
        let cases = cases();
        let job = |policy, seed, load, condition| {
            Job { case: 0, policy, seed, kind: Kind::Run { share: 0.5, load, condition } }.cell(&cases[0])
        };
        let names = [
            job("kv", 1, 1.0, Condition::Plain),
            job("kv", 2, 1.0, Condition::Plain),
            job("lpwl", 1, 1.0, Condition::Plain),
            job("kv", 1, 1.01, Condition::Plain),
            job("kv", 1, 1.0, Condition::SlowWorker),
        ];
        assert!(names.iter().all(|name| names.iter().filter(|other| *other == name).count() == 1), "{names:?}");
    }

    #[test]
    fn a_small_suite_gives_the_same_cells_on_any_number_of_threads() {
        let run = |threads| {
            let mut case = cases().into_iter().find(|case| case.name == "w4").expect("chat");
            case.workers = 2;
            case.first_load = 2.0;
            let (traces, cells) = (Traces::default(), Cells::default());
            let shape = Shape { seeds_all: 1, seeds_best: 1 };
            let (slo, tick) = (Slo { ttft_s: 0.2, ..Slo::default() }, |_: usize, _: &str| {});
            let suite = Suite { cases: vec![case], traces: &traces, shape, slo, threads, cells: &cells, tick: &tick };
            let mut results = vec![CaseResults::default()];
            suite
                .search("capacity", &mut results, 1..=1, |_| vec!["lpwl", "kv"], |_, _| Some(Search::new(2.0, false)))
                .expect("cells");
            results.remove(0).capacities
        };
        let found = run(1);
        assert_eq!(found.len(), 2);
        assert_eq!(found, run(2));
    }
}
