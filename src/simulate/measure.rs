//! What one run is remembered by: a line of the suite's file, and a row of a report once several seeds are its median.

use serde::{Deserialize, Serialize};

use super::figures::{Distribution, Figures, Outcome, Slo};
use super::spec::EngineSpec;
use super::statistics::median;

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
    /// Requests served in a second of virtual time.
    pub served_rps: f64,
}

impl Measured {
    /// The figures of a run's outcomes on these engines.
    #[must_use]
    pub fn of(outcomes: &[Outcome], slo: &Slo, engines: &[EngineSpec]) -> Self {
        let figures = Figures::of(outcomes, slo);
        let served = || outcomes.iter().filter(|outcome| !outcome.is_refused);
        let errors: Vec<f64> = served()
            .map(|outcome| (outcome.predicted_ttft_s / outcome.ttft_s().max(1e-9) - 1.0).abs())
            .filter(|error| error.is_finite())
            .collect();
        let errors = (!errors.is_empty()).then(|| Distribution::of(errors));
        let regrets: Vec<f64> = served().map(|outcome| outcome.regret_s).filter(|regret| regret.is_finite()).collect();
        let saved_s =
            |outcome: &Outcome| engines.get(outcome.worker as usize).map_or(0.0, |spec| saved_s(outcome, spec));
        Self {
            requests: figures.requests as f64,
            refused: figures.refused as f64,
            ttft_s: figures.ttft_s,
            tpot_s: figures.tpot_s,
            e2e_s: figures.e2e_s,
            goodput: figures.goodput,
            hit_rate: figures.hit_rate,
            preemptions: figures.preemptions as f64,
            prefill_s_saved: served().map(saved_s).sum(),
            worker_ttft_p90_s: Distribution::of(figures.worker_ttft_p90_s),
            ttft_error: errors.map(|errors| errors.mean),
            ttft_error_p99: errors.map(|errors| errors.p99),
            regret_s: (!regrets.is_empty()).then(|| regrets.iter().sum::<f64>() / regrets.len() as f64),
            served_rps: served().count() as f64 / figures.span_s.max(1e-9),
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
