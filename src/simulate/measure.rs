//! What one run is remembered by: a line of the suite's file, and a row of a report once several seeds are its median.

use serde::{Deserialize, Serialize};

use super::figures::{Distribution, Outcome, Slo};
use super::statistics::median;
use crate::simulated_engine::EngineSpec;

/// The figures of a run, or the medians of several.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Measured {
    /// Requests that arrived.
    pub requests: f64,
    /// Requests that no engine can hold.
    pub refused: f64,
    /// Time to the first token, seconds.
    pub ttft_s: Distribution,
    /// Mean time between two tokens of an output, seconds.
    pub tpot_s: Distribution,
    /// Time to the last token, seconds.
    pub e2e_s: Distribution,
    /// The share of requests that met the SLO.
    pub goodput: f64,
    /// The share of prompt tokens that engines found in caches.
    pub hit_rate: f64,
    /// How often requests were preempted.
    pub preemptions: f64,
    /// Seconds of prefill that cached tokens saved, by the engines' law, summed over requests.
    pub prefill_s_saved: f64,
    /// Over workers: the 90th percentile of the time to the first token, seconds.
    pub worker_ttft_p90_s: Distribution,
    /// Mean of |predicted − observed| / observed over the times to the first token; `None` = none was predicted.
    pub ttft_error: Option<f64>,
    /// The 99th percentile of the same.
    pub ttft_error_p99: Option<f64>,
    /// Mean decision regret over the sampled requests, seconds: see [`Outcome::regret_s`].
    pub regret_s: Option<f64>,
    /// Mean imbalance over the sampled requests, seconds: see [`Outcome::imbalance_s`].
    #[serde(default)]
    pub imbalance_s: Option<f64>,
    /// Requests served in a second of virtual time.
    pub served_rps: f64,
}

impl Measured {
    /// The figures of a run's outcomes on these engines.
    #[must_use]
    pub fn of(outcomes: &[Outcome], slo: &Slo, engines: &[EngineSpec]) -> Self {
        let served: Vec<&Outcome> = outcomes.iter().filter(|outcome| !outcome.is_refused).collect();
        let sum = |of: fn(&Outcome) -> u32| served.iter().map(|outcome| u64::from(of(outcome))).sum::<u64>() as f64;
        let all = |of: fn(&Outcome) -> f64| Distribution::of(served.iter().map(|outcome| of(outcome)).collect());
        let known = |of: fn(&Outcome) -> f64| -> Option<Distribution> {
            let values: Vec<f64> = served.iter().map(|outcome| of(outcome)).filter(|value| value.is_finite()).collect();
            (!values.is_empty()).then(|| Distribution::of(values))
        };
        let errors = known(|outcome| (outcome.predicted_ttft_s / outcome.ttft_s().max(1e-9) - 1.0).abs());
        let p90_of = |worker: usize| {
            let of_it = served.iter().filter(|outcome| outcome.worker as usize == worker);
            Distribution::of(of_it.map(|outcome| outcome.ttft_s()).collect()).p90
        };
        let workers = served.iter().map(|outcome| outcome.worker as usize + 1).max().unwrap_or(0);
        let saved_s =
            |outcome: &&Outcome| engines.get(outcome.worker as usize).map_or(0.0, |spec| saved_s(outcome, spec));
        let span_s = served.iter().map(|outcome| outcome.end_ns).max().unwrap_or(0) as f64 / 1e9;
        Self {
            requests: outcomes.len() as f64,
            refused: (outcomes.len() - served.len()) as f64,
            ttft_s: all(Outcome::ttft_s),
            tpot_s: Distribution::of(served.iter().filter_map(|outcome| outcome.tpot_s()).collect()),
            e2e_s: all(Outcome::e2e_s),
            goodput: served.iter().filter(|outcome| outcome.meets(slo)).count() as f64 / served.len().max(1) as f64,
            hit_rate: sum(|outcome| outcome.cached_tokens) / sum(|outcome| outcome.prompt_tokens).max(1.0),
            preemptions: sum(|outcome| outcome.preemptions),
            prefill_s_saved: served.iter().map(saved_s).sum(),
            worker_ttft_p90_s: Distribution::of((0..workers).map(p90_of).collect()),
            ttft_error: errors.map(|errors| errors.mean),
            ttft_error_p99: errors.map(|errors| errors.p99),
            regret_s: known(|outcome| outcome.regret_s).map(|regrets| regrets.mean),
            imbalance_s: known(|outcome| outcome.imbalance_s).map(|imbalances| imbalances.mean),
            served_rps: served.len() as f64 / span_s.max(1e-9),
        }
    }

    /// The median of every figure over several runs.
    #[must_use]
    pub fn median(runs: &[Self]) -> Self {
        let of = |get: &dyn Fn(&Self) -> f64| median(&runs.iter().map(get).collect::<Vec<_>>());
        let maybe = |get: fn(&Self) -> Option<f64>| {
            let known: Vec<f64> = runs.iter().filter_map(get).collect();
            (!known.is_empty()).then(|| median(&known))
        };
        let all = |get: fn(&Self) -> &Distribution| Distribution {
            mean: of(&|run| get(run).mean),
            p50: of(&|run| get(run).p50),
            p90: of(&|run| get(run).p90),
            p99: of(&|run| get(run).p99),
        };
        Self {
            requests: of(&|run| run.requests),
            refused: of(&|run| run.refused),
            ttft_s: all(|run| &run.ttft_s),
            tpot_s: all(|run| &run.tpot_s),
            e2e_s: all(|run| &run.e2e_s),
            goodput: of(&|run| run.goodput),
            hit_rate: of(&|run| run.hit_rate),
            preemptions: of(&|run| run.preemptions),
            prefill_s_saved: of(&|run| run.prefill_s_saved),
            worker_ttft_p90_s: all(|run| &run.worker_ttft_p90_s),
            ttft_error: maybe(|run| run.ttft_error),
            ttft_error_p99: maybe(|run| run.ttft_error_p99),
            regret_s: maybe(|run| run.regret_s),
            imbalance_s: maybe(|run| run.imbalance_s),
            served_rps: of(&|run| run.served_rps),
        }
    }
}

/// Seconds of prefill that a request's cached tokens saved.
fn saved_s(outcome: &Outcome, spec: &EngineSpec) -> f64 {
    let (prompt, cached) = (f64::from(outcome.prompt_tokens), f64::from(outcome.cached_tokens));
    let step = f64::from(spec.step_tokens_max);
    spec.law.prefill_s(prompt, 0.0, step) - spec.law.prefill_s(prompt - cached, cached, step)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(goodput: f64, ttft_error: Option<f64>) -> Measured {
        Measured {
            goodput,
            ttft_error,
            ttft_s: Distribution { p99: 2.0 * goodput, ..Default::default() },
            ..Default::default()
        }
    }

    #[test]
    fn medians_are_of_each_figure_by_itself() {
        let of = Measured::median(&[run(0.5, None), run(0.9, Some(0.25)), run(0.7, None)]);
        assert_eq!((of.goodput, of.ttft_s.p99, of.ttft_error, of.regret_s), (0.7, 1.4, Some(0.25), None));
    }

    #[test]
    fn a_line_of_the_file_reads_back_as_what_was_written() {
        let run = run(0.1 + 0.2, Some(1.0 / 3.0));
        let line = serde_json::to_string(&run).expect("numbers");
        assert_eq!(serde_json::from_str::<Measured>(&line).expect("the same"), run);
    }
}
