//! Policies on one fleet and one workload.

use std::borrow::Cow;
use std::io::Write;
use std::path::Path;

use indicatif::ProgressBar;
use serde_json::{Value, json};

use super::fleet::described;
use super::requests::Requests;
use super::{SimulateArgs, progress, usage, write_report};
use crate::cli::exit::{Exit, Failure};
use crate::simulate::bounds::{self, HINDSIGHT, POOLED};
use crate::simulate::capacity::Search;
use crate::simulate::experiment::{self, OURS, in_parallel, is_closed, loaded, loads_at, own_rps, peers, silent};
use crate::simulate::measure::Measured;
use crate::simulate::picture::{Section, panels};
use crate::simulate::recorded::{FittedFleet, RecordedLoad};
use crate::simulate::report::{self, Row};
use crate::simulate::suite::{LOAD_SHARES, VERDICT_SHARE};
use crate::simulate::workload::{Arrivals, Workload};
use crate::simulate::{NAMES, Outcome, RouterSettings, Settings, Slo, TRIED_TERMS};

/// Requests that hindsight searches, at most: each try replays them all.
const HINDSIGHT_REQUESTS: usize = 400;

/// Policies on one fleet and one workload.
pub(super) struct Comparison<'a> {
    args: &'a SimulateArgs,
    requests: Requests,
    /// The requests of seed 1.
    first: Workload,
    settings: Settings,
    /// What a reader must know first.
    remarks: Vec<String>,
    policies: Vec<&'a str>,
    bar: ProgressBar,
}

impl<'a> Comparison<'a> {
    /// The comparison that a command line asks for.
    pub(super) fn of(args: &'a SimulateArgs) -> Result<Self, Failure> {
        let (recorded, remarks) = args.recorded()?.unzip();
        let fitted = recorded
            .as_ref()
            .map(|load: &RecordedLoad| FittedFleet::of(load, load.simulated_block_size(args.block_size)));
        let settings = args.settings(fitted.as_ref())?;
        if settings.has_pools() && args.bounds.is_some_and(|tries| tries > 0) {
            return Err(usage(
                "the search in hindsight is for fleets without pools; --bounds 0 runs the pooled bound alone",
            ));
        }
        let requests = args.requests(settings.engines.len(), recorded.as_ref())?;
        let mut policies: Vec<&str> = args.policies.iter().map(String::as_str).collect();
        if policies.is_empty() {
            policies.extend(NAMES.into_iter().filter(|name| *name != TRIED_TERMS));
        }
        policies.extend(args.bounds.map(|_| POOLED));
        let (first, bar) = (requests.of_seed(1), progress(u64::MAX, args.json));
        let remarks = remarks.unwrap_or_default();
        Ok(Self { args, requests, first, settings, remarks, policies, bar })
    }

    /// Runs everything and writes the result to `out`.
    pub(super) fn run(&self, out: &mut impl Write) -> Result<Exit, Failure> {
        let (args, slo) = (self.args, Slo::default());
        let reference = match args.load {
            Some(_) => Some(self.best_peer(&slo)?),
            None => None,
        };
        let load = match (args.load, &reference) {
            (Some(share), Some((_, capacity))) => share * capacity,
            _ => self.own_load(),
        };
        let runs = self.measured(load, &slo);
        let row = |(policy, runs): (&&str, &Vec<Measured>)| Row {
            policy: (*policy).into(),
            figures: Measured::median(runs),
            ..Row::default()
        };
        let mut rows: Vec<Row> = self.policies.iter().zip(&runs).map(row).collect();
        if args.capacity {
            self.add_capacities(&mut rows, &slo);
        }
        if let Some(tries) = args.bounds.filter(|tries| *tries > 0) {
            rows.extend(self.hindsight(load, tries as usize, &slo));
        }
        // The runs may have taken long: their result is printed also if the report cannot be written.
        let reported = args.report.as_ref().map_or(Ok(()), |file| self.report(file, load, &rows, &slo));
        self.bar.finish_and_clear();
        let text = match args.json {
            true => {
                let seeds: Vec<u64> = (1..=args.seeds).collect();
                report::json(&rows, &self.json_settings(load, reference.as_ref()), &seeds).to_string()
            }
            false => self.text(load, &rows),
        };
        writeln!(out, "{text}")?;
        out.flush()?;
        reported.map(|()| Exit::Done)
    }

    fn text(&self, load: f64, rows: &[Row]) -> String {
        let (requests, engines) = (self.first.requests(), described(&self.settings.engines));
        let head = format!("{requests} requests, {engines}, {}{load:.3} {}\n", self.routers(), self.load_unit());
        let remarks: String = self.remarks.iter().map(|remark| format!("{remark}\n")).collect();
        remarks + &head + &report::table(rows)
    }

    /// What a load counts.
    fn load_unit(&self) -> &'static str {
        if is_closed(&self.first) { "live sessions" } else { "times the requests' own rate" }
    }

    /// The routers in words, if there are several.
    fn routers(&self) -> String {
        let RouterSettings { count, age_s, .. } = self.settings.routers;
        match age_s {
            _ if count == 1 => String::new(),
            Some(age_s) => format!("{count} routers that learn of each other after {} ms, ", age_s * 1e3),
            None => format!("{count} routers that never learn of each other, "),
        }
    }

    fn own_load(&self) -> f64 {
        match self.first.arrivals {
            Arrivals::Timed => self.args.rate.unwrap_or(1.0),
            Arrivals::Live(live) => live as f64,
        }
    }

    fn json_settings(&self, load: f64, reference: Option<&(&str, f64)>) -> Value {
        let (args, settings) = (self.args, &self.settings);
        let RouterSettings { count, age_s, sessions_stick } = settings.routers;
        let engine = settings.engines.first();
        json!({
            "trace": args.trace,
            "generate": args.generate,
            "fleet": args.fleet,
            "remarks": self.remarks,
            "requests": self.first.requests(),
            "workers": settings.engines.len(),
            "engine": described(&settings.engines),
            "kv_tokens": engine.map(|engine| engine.kv_tokens),
            "block_size": engine.map(|engine| engine.block_size),
            "event_lag_ms": settings.event_lag_s * 1e3,
            "routers": count,
            "router_age_ms": age_s.map(|age_s| age_s * 1e3),
            "sessions_stick": sessions_stick,
            "load": load,
            "load_unit": self.load_unit(),
            "load_share": args.load,
            "best_peer": reference.map(|(peer, _)| peer),
            "best_peer_capacity": reference.map(|(_, capacity)| capacity),
            "own_rps": own_rps(&self.first),
        })
    }

    /// The requests of a seed.
    fn of_seed(&self, seed: u64) -> Cow<'_, Workload> {
        if seed == 1 { Cow::Borrowed(&self.first) } else { Cow::Owned(self.requests.of_seed(seed)) }
    }

    /// By policy: the figures of all seeds.
    fn measured(&self, load: f64, slo: &Slo) -> Vec<Vec<Measured>> {
        let seeds = self.args.seeds;
        let jobs = self.policies.len() * seeds as usize;
        self.begin("runs", jobs);
        let mut runs = in_parallel(jobs, self.args.threads(), |job| {
            let (policy, seed) = (self.policies[job / seeds as usize], job as u64 % seeds + 1);
            self.once(policy, seed, load, slo)
        });
        let mut by_policy = Vec::new();
        while !runs.is_empty() {
            by_policy.push(runs.drain(..seeds as usize).collect());
        }
        by_policy
    }

    /// Begins to show the requests of a number of runs.
    fn begin(&self, stage: &'static str, runs: usize) {
        self.bar.reset();
        self.bar.set_message(stage);
        self.bar.set_length((runs * self.first.requests()) as u64);
    }

    fn once(&self, policy: &str, seed: u64, load: f64, slo: &Slo) -> Measured {
        let settings = Settings { seed, ..self.settings.clone() };
        let arrived = |requests| self.bar.inc(requests);
        experiment::measure(&self.of_seed(seed), load, &settings, slo, policy, &arrived).unwrap_or_default()
    }

    /// The capacity of each of these policies by the first seed, as a load and in requests a second.
    fn capacities(&self, policies: &[&str], slo: &Slo) -> Vec<Option<(f64, f64)>> {
        let how = Search::new(self.own_load(), is_closed(&self.first));
        self.bar.reset();
        self.bar.set_message("capacity");
        self.bar.set_length(policies.len() as u64);
        in_parallel(policies.len(), self.args.threads(), |at| {
            let found = experiment::capacity(&self.first, &self.settings, slo, policies[at], &how);
            self.bar.inc(1);
            found.map(|(capacity, rps)| (capacity.load, rps))
        })
    }

    fn best_peer(&self, slo: &Slo) -> Result<(&'static str, f64), Failure> {
        let peers: Vec<&'static str> = peers().collect();
        let found = peers.iter().zip(self.capacities(&peers, slo));
        let found = found.filter_map(|(peer, found)| Some((*peer, found?.0)));
        let best = found.max_by(|a, b| a.1.total_cmp(&b.1));
        best.ok_or_else(|| {
            usage(
                "no policy has a capacity for these requests: at each load that was tried, fewer than 90 % of them meet \
                 the SLO, or always more because they are too few to fill the fleet; use --rate instead of --load",
            )
        })
    }

    fn add_capacities(&self, rows: &mut [Row], slo: &Slo) {
        for (row, found) in rows.iter_mut().zip(self.capacities(&self.policies, slo)) {
            (row.capacity_load, row.capacity_rps) = found.unzip();
        }
    }

    /// Hindsight on the first requests of the workload, beside the run that it began with.
    fn hindsight(&self, load: f64, tries: usize, slo: &Slo) -> Vec<Row> {
        let mut first = loaded(&self.first, load).into_owned();
        let mut left = HINDSIGHT_REQUESTS;
        first.sessions.retain(|session| {
            let is_kept = left > 0;
            left = left.saturating_sub(session.turns.len());
            is_kept
        });
        let from = self.policies.first().copied().unwrap_or(OURS);
        let Some(outcomes) = experiment::outcomes(&first, &self.settings, from, &silent) else { return Vec::new() };
        let row = |policy: String, outcomes: &[Outcome]| Row {
            policy,
            figures: Measured::of(outcomes, slo, &self.settings.engines),
            ..Row::default()
        };
        let began = row(format!("{from}, first {} requests", outcomes.len()), &outcomes);
        self.bar.reset();
        self.bar.set_message("hindsight");
        self.bar.set_length(tries as u64);
        let found = bounds::hindsight(&first, &self.settings, outcomes, (tries, 1), &|| self.bar.inc(1));
        vec![began, row(HINDSIGHT.into(), &found.outcomes)]
    }

    /// Writes curves over load: at shares of the capacity of the first policy, by the first seed, around `load` if it
    /// has none.
    fn report(&self, file: &Path, load: f64, rows: &[Row], slo: &Slo) -> Result<(), Failure> {
        let capacity = match rows.iter().filter_map(|row| row.capacity_load).reduce(f64::max) {
            Some(capacity) => capacity,
            None => load / VERDICT_SHARE,
        };
        let loads = loads_at(&LOAD_SHARES, capacity, is_closed(&self.first));
        let jobs = self.policies.len() * loads.len();
        self.begin("curves", jobs);
        let runs = in_parallel(jobs, self.args.threads(), |job| {
            self.once(self.policies[job / loads.len()], 1, loads[job % loads.len()], slo)
        });
        let curve = |(policy, runs): (&&str, &[Measured])| {
            ((*policy).to_owned(), loads.iter().copied().zip(runs.iter().cloned()).collect())
        };
        let curves: Vec<_> = self.policies.iter().zip(runs.chunks(loads.len())).map(curve).collect();
        let section = Section {
            title: described(&self.settings.engines),
            text: format!(
                "the table is at load {load:.3}, medians over {} seeds; the curves are of seed 1",
                self.args.seeds
            ),
            panels: panels(self.load_unit(), &curves),
            rows: rows.to_vec(),
        };
        write_report(file, "Policies on a simulated fleet", section, OURS)
    }
}
