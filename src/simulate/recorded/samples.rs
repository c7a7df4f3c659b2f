//! What a journal's requests tell of the speed of its engines.

use super::regression::Row;
use super::{Booked, RecordedLoad, RecordedRequest};
use crate::engine_law::PrefillLaw;
use crate::load::EndReason;
use crate::simulate::STEP_TOKENS_MAX;

/// A sample that took longer than this is a broken report, seconds.
const TOOK_S_MAX: f64 = 3600.0;

/// A prefill that was alone on its worker.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct PrefillSample {
    pub(super) worker: usize,
    pub(super) uncached: f64,
    pub(super) cached: f64,
    /// Steps that it took, with at most the worker's tokens in each.
    pub(super) steps: f64,
    /// What decoded beside it.
    beside: Booked,
    pub(super) took_s: f64,
}

/// The constants of a prefill, and what decoding requests add to it: the wait for the step under way, and their part of
/// each step.
pub(super) const PREFILL_COLUMNS: usize = 6;

impl PrefillSample {
    /// A row that explains the time by base, token, attention; and by whether anything decoded, how many, and with how
    /// many tokens. `slowness` is that of its worker.
    pub(super) fn row(&self, slowness: f64) -> Row<PREFILL_COLUMNS> {
        let attention = self.uncached * (self.cached + 0.5 * self.uncached);
        let is_beside = f64::from(self.beside.requests > 0.0);
        let beside = [is_beside, self.steps * self.beside.requests, self.steps * self.beside.kv_tokens];
        let columns = [self.steps, self.uncached, attention, beside[0], beside[1], beside[2]];
        Row { columns, value: self.took_s / slowness }
    }
}

/// An output that was decoded to its end.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct DecodeSample {
    pub(super) worker: usize,
    /// Steps after the first token.
    steps: f64,
    /// The mean of what decoded in these steps, itself included.
    beside: Booked,
    /// Predicted seconds of the prefills that ran in between.
    prefilled_s: f64,
    pub(super) took_s: f64,
}

/// The constants of a decode step, and the share of the predicted time of prefills that came on top.
pub(super) const DECODE_COLUMNS: usize = 4;

impl DecodeSample {
    pub(super) fn row(&self, slowness: f64) -> Row<DECODE_COLUMNS> {
        let columns =
            [self.steps, self.steps * self.beside.requests, self.steps * self.beside.kv_tokens, self.prefilled_s];
        Row { columns, value: self.took_s / slowness }
    }
}

impl RecordedLoad {
    /// The prefills that were alone, in the order of their arrival.
    pub(super) fn prefill_samples(&self) -> Vec<PrefillSample> {
        self.requests.iter().filter_map(|request| self.prefill_sample(request)).collect()
    }

    fn prefill_sample(&self, request: &RecordedRequest) -> Option<PrefillSample> {
        let end = request.end.filter(|end| end.began_alone && end.prefill_tokens > 0)?;
        let took_s = end.first_token_ns? as f64 * 1e-9;
        let (uncached, cached) = (end.prefill_tokens as f64, end.cached_tokens as f64);
        let steps = (uncached / self.step_tokens(request.worker)).ceil().max(1.0);
        let sample = PrefillSample { worker: request.worker, uncached, cached, steps, beside: request.before, took_s };
        (took_s > 0.0 && took_s < TOOK_S_MAX).then_some(sample)
    }

    /// The outputs that were decoded to their end, in the order of their arrival.
    pub(super) fn decode_samples(&self) -> Vec<DecodeSample> {
        self.requests.iter().filter_map(|request| self.decode_sample(request)).collect()
    }

    fn decode_sample(&self, request: &RecordedRequest) -> Option<DecodeSample> {
        let end = request.end.filter(|end| end.reason == EndReason::Freed)?;
        let steps = f64::from(request.output_tokens()?) - 1.0;
        let took_s = end.end_ns.checked_sub(end.first_token_ns?)? as f64 * 1e-9;
        let block_size = f64::from(self.block_size);
        // Between the booking and the end, as the two saw it; outputs grow half of theirs on average.
        let requests = f64::midpoint(request.before.requests + 1.0, end.requests as f64);
        let prompts = f64::midpoint(
            request.before.kv_tokens + f64::from(request.prompt_tokens),
            end.decode_blocks as f64 * block_size,
        );
        let sample = DecodeSample {
            worker: request.worker,
            steps,
            beside: Booked { requests, kv_tokens: prompts + requests * steps / 2.0 },
            prefilled_s: f64::from(end.prefilled_us) * 1e-6,
            took_s,
        };
        (steps >= 1.0 && took_s > 0.0 && took_s < TOOK_S_MAX).then_some(sample)
    }

    /// Tokens of a step of a worker: the usual number, if the journal does not say.
    pub(super) fn step_tokens(&self, worker: usize) -> f64 {
        let known = self.workers.get(worker).map_or(0, |worker| worker.step_tokens_max);
        if known == 0 { f64::from(STEP_TOKENS_MAX) } else { known as f64 }
    }
}

/// The prefill law of fitted columns.
pub(super) fn prefill_law(constants: &[f64; PREFILL_COLUMNS]) -> PrefillLaw {
    PrefillLaw::of([constants[0], constants[1], constants[2]])
}
