//! What one request went through, and what was promised to it.

use serde::{Deserialize, Serialize};

/// What one request went through.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Outcome {
    /// Tokens of the prompt.
    pub prompt_tokens: u32,
    /// Tokens of the output.
    pub output_tokens: u32,
    /// When it arrived, nanoseconds of virtual time.
    pub arrived_ns: u64,
    /// When its first token came; 0 = never.
    pub first_ns: u64,
    /// When its last token came; 0 = never.
    pub end_ns: u64,
    /// The worker that computed its prompt, from 0. In a fleet with pools another one may have decoded it.
    pub worker: u32,
    /// Tokens of the prompt that the engine found in its caches.
    pub cached_tokens: u32,
    /// Tokens of the prompt that the router believed the worker to hold.
    pub believed_tokens: u32,
    /// The time to the first token that the router predicted; NaN = none.
    pub predicted_ttft_s: f64,
    /// How often the engine took the request out of its batch to make room.
    pub preemptions: u32,
    /// Whether no engine could hold it, or none was there.
    pub is_refused: bool,
    /// The regret of its decision, seconds; NaN = not sampled. It is the time to the first token that the chosen
    /// engine's true state promised when the request was sent (prompt tokens it had still to compute, its own among
    /// them, cached ones left out, alone on the engine), less the least such time among the engines that were there. It
    /// charges nothing for what the request does to others, so a rule that takes later requests into account has some.
    pub regret_s: f64,
    /// How unequal the engines' queues were when the request was sent: over the engines that might have computed it, the
    /// standard deviation of the seconds of prefill that are still to do. NaN = not sampled.
    pub imbalance_s: f64,
}

impl Outcome {
    pub(super) fn new(prompt_tokens: u32, output_tokens: u32, arrived_ns: u64) -> Self {
        Self {
            prompt_tokens,
            output_tokens,
            arrived_ns,
            first_ns: 0,
            end_ns: 0,
            worker: 0,
            cached_tokens: 0,
            believed_tokens: 0,
            predicted_ttft_s: f64::NAN,
            preemptions: 0,
            is_refused: false,
            regret_s: f64::NAN,
            imbalance_s: f64::NAN,
        }
    }

    /// Time to the first token, seconds.
    #[must_use]
    pub fn ttft_s(&self) -> f64 {
        seconds_between(self.arrived_ns, self.first_ns)
    }

    /// Time to the last token, seconds.
    #[must_use]
    pub fn e2e_s(&self) -> f64 {
        seconds_between(self.arrived_ns, self.end_ns)
    }

    /// Mean time between two tokens of the output, seconds; `None` if there is only one token.
    #[must_use]
    pub fn tpot_s(&self) -> Option<f64> {
        let gaps = self.output_tokens.checked_sub(1).filter(|gaps| *gaps > 0)?;
        Some(seconds_between(self.first_ns, self.end_ns) / f64::from(gaps))
    }

    /// Whether the request was served as well as was promised.
    #[must_use]
    pub fn meets(&self, slo: &Slo) -> bool {
        !self.is_refused
            && self.ttft_s() <= slo.ttft_s + slo.ttft_token_s * f64::from(self.prompt_tokens)
            && self.tpot_s().is_none_or(|tpot_s| tpot_s <= slo.tpot_s)
    }
}

fn seconds_between(from_ns: u64, to_ns: u64) -> f64 {
    to_ns.saturating_sub(from_ns) as f64 / 1e9
}

/// What is promised to every request.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Slo {
    /// Time to the first token of an empty prompt, seconds.
    pub ttft_s: f64,
    /// What each token of the prompt adds to it, seconds.
    pub ttft_token_s: f64,
    /// Mean time between two tokens of the output, seconds.
    pub tpot_s: f64,
}

impl Default for Slo {
    fn default() -> Self {
        Self { ttft_s: 2.0, ttft_token_s: 5e-5, tpot_s: 0.05 }
    }
}

/// Mean and percentiles of one quantity.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Distribution {
    /// The mean; 0 if there is no value.
    pub mean: f64,
    /// The median.
    pub p50: f64,
    /// Nine of ten values are at most this.
    pub p90: f64,
    /// 99 of 100 values are at most this.
    pub p99: f64,
}

impl Distribution {
    /// The distribution of these values.
    #[must_use]
    pub fn of(mut values: Vec<f64>) -> Self {
        if values.is_empty() {
            return Self::default();
        }
        values.sort_unstable_by(f64::total_cmp);
        let at = |share: f64| values[((values.len() as f64 * share).ceil() as usize).clamp(1, values.len()) - 1];
        Self { mean: values.iter().sum::<f64>() / values.len() as f64, p50: at(0.5), p90: at(0.9), p99: at(0.99) }
    }
}
