//! What was recorded, beside the simulation of the policy that decided it: whether to believe the simulation.

use comfy_table::presets::UTF8_FULL_CONDENSED;
use comfy_table::{Cell, CellAlignment, Table};
use serde::Serialize;
use serde_json::{Value, json};

use super::{RecordedLoad, RecordedRequest, span_s};
use crate::simulate::statistics::median;
use crate::simulate::{Distribution, Outcome};

/// Relative difference of the median and of the 90th percentile of the time to the first token, and difference of the
/// hit rate, up to which a simulation agrees.
const AGREES: (f64, f64, f64) = (0.2, 0.3, 0.05);

/// What requests felt. Not a number = not known.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Felt {
    /// Time to the first token, seconds.
    pub ttft_s: Distribution,
    /// Mean time between two tokens of an output, seconds.
    pub tpot_s: Distribution,
    /// Time to the last token, seconds.
    pub e2e_s: Distribution,
    /// The share of prompt tokens that the chosen workers held, by the index.
    pub hit_rate: f64,
    /// Requests that arrived in a second.
    pub arrivals_rps: f64,
}

const UNKNOWN: Distribution = Distribution { mean: f64::NAN, p50: f64::NAN, p90: f64::NAN, p99: f64::NAN };

fn distribution(values: Vec<f64>) -> Distribution {
    if values.is_empty() { UNKNOWN } else { Distribution::of(values) }
}

fn rps(requests: usize, span_s: f64) -> f64 {
    if span_s > 0.0 { requests as f64 / span_s } else { f64::NAN }
}

impl Felt {
    /// What simulated requests felt.
    #[must_use]
    pub fn of(outcomes: &[Outcome]) -> Self {
        let served: Vec<&Outcome> = outcomes.iter().filter(|outcome| !outcome.is_refused).collect();
        let sum = |of: fn(&Outcome) -> u32| served.iter().map(|outcome| f64::from(of(outcome))).sum::<f64>();
        let at = |outcome: Option<&Outcome>| outcome.map_or(0, |outcome| outcome.arrived_ns);
        let span_s = at(outcomes.last()).saturating_sub(at(outcomes.first())) as f64 * 1e-9;
        Self {
            ttft_s: distribution(served.iter().map(|outcome| outcome.ttft_s()).collect()),
            tpot_s: distribution(served.iter().filter_map(|outcome| outcome.tpot_s()).collect()),
            e2e_s: distribution(served.iter().map(|outcome| outcome.e2e_s()).collect()),
            hit_rate: sum(|outcome| outcome.believed_tokens) / sum(|outcome| outcome.prompt_tokens),
            arrivals_rps: rps(outcomes.len(), span_s),
        }
    }

    /// The median of each over several runs.
    #[must_use]
    pub fn median(runs: &[Self]) -> Self {
        let of = |get: &dyn Fn(&Self) -> f64| median(&runs.iter().map(get).collect::<Vec<_>>());
        let all = |get: fn(&Self) -> Distribution| Distribution {
            mean: of(&|run| get(run).mean),
            p50: of(&|run| get(run).p50),
            p90: of(&|run| get(run).p90),
            p99: of(&|run| get(run).p99),
        };
        Self {
            ttft_s: all(|run| run.ttft_s),
            tpot_s: all(|run| run.tpot_s),
            e2e_s: all(|run| run.e2e_s),
            hit_rate: of(&|run| run.hit_rate),
            arrivals_rps: of(&|run| run.arrivals_rps),
        }
    }
}

impl RecordedLoad {
    /// What the recorded requests felt that arrived after this time of the load's workload, seconds.
    #[must_use]
    pub fn felt(&self, after_s: f64) -> Felt {
        let first_ns = self.requests.first().map_or(0, |request| request.arrived_ns);
        let from_ns = first_ns.saturating_add((after_s * 1e9) as u64);
        let requests = &self.requests[self.requests.partition_point(|request| request.arrived_ns < from_ns)..];
        let sum = |of: fn(&RecordedRequest) -> u32| requests.iter().map(|request| f64::from(of(request))).sum::<f64>();
        let e2e_s = |request: &RecordedRequest| {
            let end_ns = request.end_ns().filter(|_| request.ttft_s().is_some())?;
            Some(end_ns.saturating_sub(request.arrived_ns) as f64 * 1e-9)
        };
        let tpot_s = |request: &RecordedRequest| {
            let gaps = request.reported_output_tokens()?.checked_sub(1).filter(|gaps| *gaps > 0)?;
            Some((e2e_s(request)? - request.ttft_s()?) / f64::from(gaps))
        };
        let has_known_caches = self.present.iter().any(|place| self.workers[*place].believed);
        let hit_rate = sum(|request| request.held_tokens) / sum(|request| request.prompt_tokens);
        Felt {
            ttft_s: distribution(requests.iter().filter_map(RecordedRequest::ttft_s).collect()),
            tpot_s: distribution(requests.iter().filter_map(tpot_s).collect()),
            e2e_s: distribution(requests.iter().filter_map(e2e_s).collect()),
            hit_rate: if has_known_caches { hit_rate } else { f64::NAN },
            arrivals_rps: rps(requests.len(), span_s(requests) * self.sample),
        }
    }
}

/// What was recorded, beside what the same policy did in simulation.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Agreement {
    /// What was recorded.
    pub recorded: Felt,
    /// The simulation.
    pub simulated: Felt,
}

impl Agreement {
    /// The differences that matter, each with the largest that agrees: relative ones of the time to the first token, and
    /// that of the hit rate. `None` = not recorded.
    fn differences(&self) -> [(&'static str, Option<f64>, f64); 3] {
        let (recorded, simulated) = (&self.recorded, &self.simulated);
        let known = |difference: f64| Some(difference).filter(|difference| difference.is_finite());
        let ratio = |simulated: f64, recorded: f64| known(simulated / recorded - 1.0);
        [
            ("TTFT p50", ratio(simulated.ttft_s.p50, recorded.ttft_s.p50), AGREES.0),
            ("TTFT p90", ratio(simulated.ttft_s.p90, recorded.ttft_s.p90), AGREES.1),
            ("hits", known(simulated.hit_rate - recorded.hit_rate), AGREES.2),
        ]
    }

    /// Whether a reader may believe the simulation; `None` = nothing was recorded to compare it with.
    #[must_use]
    pub fn agrees(&self) -> Option<bool> {
        let known: Vec<(f64, f64)> =
            self.differences().into_iter().filter_map(|(_, difference, most)| Some((difference?, most))).collect();
        (!known.is_empty()).then(|| known.iter().all(|(difference, most)| difference.abs() <= *most))
    }

    /// The verdict in a sentence.
    #[must_use]
    pub fn verdict(&self) -> String {
        let parts = self.differences().map(|(name, difference, _)| match (name, difference) {
            (_, None) => format!("{name} were not recorded"),
            ("hits", Some(difference)) => format!("hits differ by {:+.1} points", difference * 100.0),
            (_, Some(difference)) => format!("{name} by {:+.0} %", difference * 100.0),
        });
        let parts = parts.join(", ");
        match self.agrees() {
            Some(true) => format!("The simulation of the recorded policy agrees with what was recorded: {parts}."),
            Some(false) => format!(
                "The simulation of the recorded policy does NOT agree with what was recorded: {parts}. Believe differences \
                 between policies that are much larger than this one only."
            ),
            None => {
                "Nothing was recorded that the simulation could be compared with. Report first tokens and ends.".into()
            }
        }
    }

    /// The table, with the verdict below.
    #[must_use]
    pub fn text(&self) -> String {
        let mut table = Table::new();
        table.load_style(UTF8_FULL_CONDENSED).set_header(["recorded policy", "recorded", "simulated", "difference"]);
        let mut row = |name: &str, of: &dyn Fn(&Felt) -> f64, unit: &str, scale: f64| {
            let (recorded, simulated) = (of(&self.recorded), of(&self.simulated));
            let text =
                |value: f64| if value.is_finite() { format!("{:.3}{unit}", value * scale) } else { "–".into() };
            let difference = match (unit, recorded.is_finite() && simulated.is_finite()) {
                (_, false) => "–".into(),
                (" %", true) => format!("{:+.1} points", (simulated - recorded) * 100.0),
                _ => format!("{:+.1} %", (simulated / recorded - 1.0) * 100.0),
            };
            let right = |text: String| Cell::new(text).set_alignment(CellAlignment::Right);
            table.add_row([Cell::new(name), right(text(recorded)), right(text(simulated)), right(difference)]);
        };
        row("TTFT p50", &|felt| felt.ttft_s.p50, " s", 1.0);
        row("TTFT p90", &|felt| felt.ttft_s.p90, " s", 1.0);
        row("TTFT mean", &|felt| felt.ttft_s.mean, " s", 1.0);
        row("TPOT p50", &|felt| felt.tpot_s.p50, " ms", 1e3);
        row("E2E mean", &|felt| felt.e2e_s.mean, " s", 1.0);
        row("hits, by the index", &|felt| felt.hit_rate, " %", 100.0);
        row("requests a second", &|felt| felt.arrivals_rps, "", 1.0);
        format!("{table}\n{}", self.verdict())
    }

    /// The same as JSON.
    #[must_use]
    pub fn json(&self) -> Value {
        json!({ "recorded": self.recorded, "simulated": self.simulated, "agrees": self.agrees() })
    }
}
