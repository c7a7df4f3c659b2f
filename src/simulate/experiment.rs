//! One workload under one policy at one load: what capacities, suites and bounds are made of.

use std::borrow::Cow;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::bounds;
use super::capacity::{Capacity, Search, search};
use super::figures::{Outcome, Slo};
use super::measure::Measured;
use super::policies::{NAMES, SimulatedPolicy, TRIED_TERMS};
use super::run::Settings;
use super::workload::{Arrivals, Workload};

/// The policy that the others are compared with.
pub const OURS: &str = "latency";

/// The names of the other systems' rules: all policies but ours.
pub fn peers() -> impl Iterator<Item = &'static str> {
    NAMES.into_iter().filter(|name| ![OURS, TRIED_TERMS].contains(name))
}

/// The workload at a load: `load` times its own rate or, if a number of sessions is live at a time, that number.
#[must_use]
pub fn loaded(workload: &Workload, load: f64) -> Cow<'_, Workload> {
    match workload.arrivals {
        Arrivals::Timed if load.total_cmp(&1.0).is_eq() => Cow::Borrowed(workload),
        Arrivals::Timed => Cow::Owned(workload.clone().scaled(load)),
        Arrivals::Live(_) => {
            let arrivals = Arrivals::Live(possible_load(load, true) as usize);
            Cow::Owned(Workload { sessions: workload.sessions.clone(), arrivals })
        }
    }
}

/// Tells no one how many requests have arrived.
pub fn silent(_: u64) {}

/// Whether loads of a workload are live sessions.
#[must_use]
pub fn is_closed(workload: &Workload) -> bool {
    matches!(workload.arrivals, Arrivals::Live(_))
}

/// A load that can be run: if loads are live sessions, a whole number of them, at least 1.
#[must_use]
pub fn possible_load(load: f64, is_closed: bool) -> f64 {
    if is_closed { load.round().max(1.0) } else { load }
}

/// The loads at shares of one, as [`possible_load`]; none comes twice in a row.
#[must_use]
pub fn loads_at(shares: &[f64], load: f64, is_closed: bool) -> Vec<f64> {
    let mut loads: Vec<f64> = shares.iter().map(|share| possible_load(share * load, is_closed)).collect();
    loads.dedup();
    loads
}

/// Requests that arrive in a second at load 1; 0 for sessions that are live at a time, whose pace the fleet sets.
#[must_use]
pub fn own_rps(workload: &Workload) -> f64 {
    let span_s = workload.sessions.last().map_or(0.0, |session| session.start_s);
    if is_closed(workload) || span_s <= 0.0 { 0.0 } else { workload.requests() as f64 / span_s }
}

/// Runs a workload as it is. `policy` is a policy's name or [`bounds::POOLED`]; `None` = neither. `arrived` hears how many
/// more requests have arrived.
#[must_use]
pub fn outcomes(workload: &Workload, settings: &Settings, policy: &str, arrived: &dyn Fn(u64)) -> Option<Vec<Outcome>> {
    if policy == bounds::POOLED {
        return bounds::pooled(workload, settings, arrived);
    }
    super::simulate_with_progress(workload, settings, &SimulatedPolicy::parse(policy).ok()?, arrived)
}

/// The figures of a workload at a load. `arrived` as for [`outcomes`].
#[must_use]
pub fn measure(
    workload: &Workload,
    load: f64,
    settings: &Settings,
    slo: &Slo,
    policy: &str,
    arrived: &dyn Fn(u64),
) -> Option<Measured> {
    let outcomes = outcomes(&loaded(workload, load), settings, policy, arrived)?;
    let pooled = bounds::pooled_settings(settings);
    let engines = if policy == bounds::POOLED { &pooled.engines } else { &settings.engines };
    Some(Measured::of(&outcomes, slo, engines))
}

/// The capacity of a fleet under a policy, and the requests that it then serves in a second. `None`: there is no such
/// policy, or the search found none.
#[must_use]
pub fn capacity(
    workload: &Workload,
    settings: &Settings,
    slo: &Slo,
    policy: &str,
    how: &Search,
) -> Option<(Capacity, f64)> {
    let mut closed_rps = Vec::new();
    let goodput = |load: f64| {
        let measured = measure(workload, load, settings, slo, policy, &silent).unwrap_or_default();
        closed_rps.push((load, measured.served_rps));
        measured.goodput
    };
    // With fewer than two sessions for each live one, most of the run has fewer live ones.
    let load_max = if is_closed(workload) { workload.sessions.len() as f64 / 2.0 } else { f64::INFINITY };
    let found = search(&Search { load_max, ..*how }, goodput)?;
    let nearest = |a: &&(f64, f64), b: &&(f64, f64)| (a.0 - found.load).abs().total_cmp(&(b.0 - found.load).abs());
    let served_rps = closed_rps.iter().min_by(nearest).map_or(0.0, |(_, rps)| *rps);
    let rps = if is_closed(workload) { served_rps } else { found.load * own_rps(workload) };
    Some((found, rps))
}

/// Does `jobs` pieces of work on `threads` threads. The results are in the order of the jobs, whatever thread did them.
pub fn in_parallel<T: Send>(jobs: usize, threads: usize, work: impl Fn(usize) -> T + Sync) -> Vec<T> {
    let (next, done) = (AtomicUsize::new(0), Mutex::new(Vec::with_capacity(jobs)));
    let take = || {
        loop {
            let job = next.fetch_add(1, Ordering::Relaxed);
            if job >= jobs {
                return;
            }
            let result = work(job);
            done.lock().unwrap_or_else(std::sync::PoisonError::into_inner).push((job, result));
        }
    };
    std::thread::scope(|scope| {
        for _ in 0..threads.clamp(1, jobs.max(1)) {
            scope.spawn(take);
        }
    });
    let mut done: Vec<(usize, T)> = done.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner);
    done.sort_unstable_by_key(|(job, _)| *job);
    done.into_iter().map(|(_, result)| result).collect()
}

#[cfg(test)]
mod tests {
    use super::super::workload::generators::{Agents, Chat};
    use super::*;

    #[test]
    fn results_come_in_the_order_of_the_jobs() {
        for threads in [1, 2, 7] {
            assert_eq!(in_parallel(50, threads, |job| job * job), (0..50).map(|job| job * job).collect::<Vec<_>>());
        }
        assert_eq!(in_parallel(0, 2, |job| job), Vec::<usize>::new());
    }

    #[test]
    fn a_load_is_a_rate_or_a_number_of_sessions() {
        let chat = Chat { requests: 50, ..Chat::default() }.generate(1);
        assert!((own_rps(&loaded(&chat, 2.0)) / own_rps(&chat) - 2.0).abs() < 1e-9);
        let agents = Agents { requests: 50, ..Agents::default() }.generate(1);
        assert_eq!(loaded(&agents, 7.4).arrivals, Arrivals::Live(7));
        assert_eq!(own_rps(&agents), 0.0);
        assert_eq!(loads_at(&[0.1, 0.2, 0.4, 1.0], 4.0, true), [1.0, 2.0, 4.0]);
        assert_eq!(loads_at(&[0.5, 1.0], 3.0, false), [1.5, 3.0]);
    }

    #[test]
    fn the_number_of_threads_changes_no_figure() {
        let chat = Chat { requests: 200, ..Chat::default() }.generate(1);
        let settings = super::super::tests::fleet(2);
        let run = |threads| {
            in_parallel(4, threads, |job| {
                let measured = measure(&chat, 1.0, &settings, &Slo::default(), NAMES[job], &silent);
                measured.map(|measured| measured.ttft_s)
            })
        };
        assert_eq!(run(1), run(3));
    }
}
