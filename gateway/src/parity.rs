//! Whether cached tokens come out as predicted. No I/O, no clock.
//!
//! A prediction is compared only if the daemon called it exact, its tokens are the whole prompt, and the engine says
//! how many tokens it had cached. Two differences are explained:
//! * **The last block.** An engine computes at least the last token of a prompt, so of a prompt in whole blocks it
//!   reuses at most all but the last block.
//! * **More than predicted.** Another request stored blocks between the decision and the engine's scheduling. This
//!   explains single requests, not most of them: if most cached tokens are unforeseen, the gateway hashes other blocks
//!   than the engine.

use std::collections::{HashMap, VecDeque};

use kvrouted::ids::Worker;
use parking_lot::Mutex;

use crate::api::Usage;
use crate::limits::{
    PARITY_CAUSE_SHARE_MIN, PARITY_COMPARED_MIN, PARITY_JUDGED_EVERY, PARITY_MODELS_MAX, PARITY_SHARE_MIN,
    PARITY_UNFORESEEN_MAX, PARITY_WINDOW, PARITY_WITHOUT_TOKENS_MAX,
};
use crate::tokens::TokenSource;

/// What was predicted of a request on the worker that served it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Prediction {
    /// The worker: id and rank.
    pub worker: (u64, u32),
    /// Leading blocks of the prompt that the worker holds.
    pub overlap_blocks: u32,
    /// Tokens in a block.
    pub block_size: u32,
    /// Tokens of the prompt by which the request was routed.
    pub prompt_tokens: u32,
    /// Whether the daemon called the overlap exact and the tokens are the whole prompt.
    pub is_exact: bool,
    /// Where the tokens come from.
    pub source: TokenSource,
}

impl Prediction {
    /// That of a worker, among those of one request.
    #[must_use]
    pub fn of_worker(predictions: &[Self], worker: Worker) -> Option<&Self> {
        predictions.iter().find(|prediction| prediction.worker == (worker.id.0, worker.rank.0))
    }

    /// Tokens of the leading blocks that the worker holds.
    #[must_use]
    pub const fn overlap_tokens(&self) -> u32 {
        self.overlap_blocks.saturating_mul(self.block_size)
    }
}

/// How a reply compares with its prediction.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ParityOutcome {
    /// As predicted.
    Equal,
    /// As predicted, less the last block, which is always recomputed.
    LastBlock,
    /// More than predicted.
    Higher,
    /// Less than predicted.
    Lower,
    /// Not compared: nothing exact was predicted, or the engine does not say what it had cached.
    NotCompared,
}

impl ParityOutcome {
    /// All of them.
    pub const ALL: [Self; 5] = [Self::Equal, Self::LastBlock, Self::Higher, Self::Lower, Self::NotCompared];

    /// The name in metrics.
    #[must_use]
    pub const fn label(self) -> &'static str {
        match self {
            Self::Equal => "equal",
            Self::LastBlock => "last_block",
            Self::Higher => "higher",
            Self::Lower => "lower",
            Self::NotCompared => "not_compared",
        }
    }
}

/// The likeliest cause of a finding.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ParityCause {
    /// The engine counts other tokens than the gateway routes by.
    OtherTokens,
    /// The engine never has anything cached.
    NothingCached,
    /// The cached tokens are no multiple of the block size.
    BlockSize,
    /// Always one block less, as with speculative decoding.
    OneBlockLess,
    /// The engine has prompts cached of which nothing was predicted.
    Unforeseen,
    /// The engine does not say how many tokens it had cached.
    NotReported,
    /// Most requests are routed without tokens.
    WithoutTokens,
    /// None of the above.
    Unknown,
}

impl ParityCause {
    /// The name in metrics.
    #[must_use]
    pub const fn label(self) -> &'static str {
        match self {
            Self::OtherTokens => "other_tokens",
            Self::NothingCached => "nothing_cached",
            Self::BlockSize => "block_size",
            Self::OneBlockLess => "one_block_less",
            Self::Unforeseen => "unforeseen",
            Self::NotReported => "not_reported",
            Self::WithoutTokens => "without_tokens",
            Self::Unknown => "unknown",
        }
    }

    /// What is likely wrong, and what to do.
    #[must_use]
    pub const fn remedy(self) -> &'static str {
        match self {
            Self::OtherTokens => {
                "the engine counts other tokens than the gateway routes by: its chat template, its special tokens \
                 or its truncation differ; start vLLM with --enable-scale-out, so that it renders the prompts \
                 itself"
            }
            Self::NothingCached => {
                "the engine never has anything cached that was predicted: its prefix caching is off, its cache was \
                 reset without an event, or its cache salt differs; check --enable-prefix-caching and kvrouted \
                 doctor"
            }
            Self::BlockSize => {
                "the cached tokens are no multiple of the block size: the engine's blocks have another size than \
                 the daemon's; correct block_size"
            }
            Self::OneBlockLess => {
                "the engine reuses one block less than it holds, as vLLM does with EAGLE and MTP speculative \
                 decoding; predictions are one block too high for it"
            }
            Self::Unforeseen => {
                "the engine has prompts cached of which the daemon foresees nothing: blocks are hashed over other \
                 tokens, another block size, salt, adapter or image than the engine's; compare the engine's events \
                 with kvrouted doctor"
            }
            Self::NotReported => {
                "the engine does not say how many tokens it had cached, so that nothing can be compared; start vLLM \
                 with --enable-prompt-tokens-details, SGLang with --enable-cache-report"
            }
            Self::WithoutTokens => {
                "most requests are routed by load, because their tokens are unknown; the gateway's log says why; \
                 start vLLM with --enable-scale-out, or name a render server"
            }
            Self::Unknown => {
                "cached tokens do not come out as predicted, and no single cause explains it; look for evictions at \
                 the engine and for findings of kvrouted doctor"
            }
        }
    }
}

/// Requests of a model by outcome, since the start. For metrics.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ParityCounts {
    /// The model.
    pub model: String,
    /// In the order of [`ParityOutcome::ALL`].
    pub outcomes: [u64; 5],
    /// The share of compared requests in the window that are equal or explained; `None` = too few.
    pub share: Option<f64>,
}

/// A model whose cached tokens do not come out as predicted.
#[derive(Clone, Debug, PartialEq)]
pub struct ParityFinding {
    /// The model.
    pub model: String,
    /// The likeliest cause.
    pub cause: ParityCause,
    /// Compared requests in the window.
    pub compared: usize,
    /// Those whose difference nothing explains.
    pub unexplained: usize,
    /// The worker with the most unexplained differences.
    pub worker: Option<(u64, u32)>,
}

impl ParityFinding {
    /// A sentence for people.
    #[must_use]
    pub fn text(&self) -> String {
        let Self { model, cause, compared, unexplained, .. } = self;
        format!(
            "model {model:?}: {unexplained} of {compared} compared requests are unexplained; likely: {}",
            cause.remedy()
        )
    }
}

/// The outcome of one request.
#[must_use]
pub fn compare(prediction: &Prediction, usage: &Usage) -> ParityOutcome {
    let Some(cached) = usage.cached_tokens.filter(|_| prediction.is_exact && prediction.block_size > 0) else {
        return ParityOutcome::NotCompared;
    };
    let block = u64::from(prediction.block_size);
    let predicted = u64::from(prediction.overlap_blocks) * block;
    let cached = u64::from(cached);
    let reusable = u64::from(prediction.prompt_tokens).saturating_sub(1) / block * block;
    match cached.cmp(&predicted) {
        std::cmp::Ordering::Equal => ParityOutcome::Equal,
        std::cmp::Ordering::Greater => ParityOutcome::Higher,
        std::cmp::Ordering::Less if predicted > reusable && cached == reusable => ParityOutcome::LastBlock,
        std::cmp::Ordering::Less => ParityOutcome::Lower,
    }
}

/// One request in the window: what its outcome points to.
#[derive(Clone, Copy, Debug)]
struct Sample {
    outcome: ParityOutcome,
    worker: (u64, u32),
    without_tokens: bool,
    /// Exact, but the engine does not say what was cached.
    not_reported: bool,
    other_tokens: bool,
    nothing_cached: bool,
    broken_block: bool,
    one_block_less: bool,
    foreseen: bool,
    has_cached: bool,
}

impl Sample {
    fn new(prediction: &Prediction, usage: &Usage) -> Self {
        let outcome = compare(prediction, usage);
        let is_compared = outcome != ParityOutcome::NotCompared;
        let block = u64::from(prediction.block_size.max(1));
        let predicted = u64::from(prediction.overlap_blocks) * block;
        let cached = u64::from(usage.cached_tokens.unwrap_or(0));
        Self {
            outcome,
            worker: prediction.worker,
            without_tokens: prediction.source == TokenSource::None,
            not_reported: prediction.is_exact && usage.cached_tokens.is_none(),
            other_tokens: is_compared && prediction.prompt_tokens != usage.prompt_tokens,
            nothing_cached: is_compared && cached == 0 && predicted > 0,
            broken_block: is_compared && !cached.is_multiple_of(block),
            one_block_less: is_compared && predicted == cached + block,
            foreseen: predicted > 0,
            has_cached: is_compared && cached > 0,
        }
    }

    fn is_compared(&self) -> bool {
        self.outcome != ParityOutcome::NotCompared
    }

    fn is_unexplained(&self) -> bool {
        self.outcome == ParityOutcome::Lower || self.other_tokens
    }
}

type SampleTest = fn(&Sample) -> bool;

/// The sliding window of one model.
#[derive(Debug, Default)]
struct Window {
    samples: VecDeque<Sample>,
    outcomes: [u64; 5],
    state: Option<ParityCause>,
}

impl Window {
    fn push(&mut self, sample: Sample) {
        if self.samples.len() == PARITY_WINDOW {
            self.samples.pop_front();
        }
        self.samples.push_back(sample);
        let index = ParityOutcome::ALL.iter().position(|outcome| *outcome == sample.outcome);
        if let Some(count) = index.and_then(|index| self.outcomes.get_mut(index)) {
            *count += 1;
        }
    }

    fn count(&self, is: impl Fn(&Sample) -> bool) -> usize {
        self.samples.iter().filter(|sample| is(sample)).count()
    }

    fn share(&self) -> Option<f64> {
        let compared = self.count(Sample::is_compared);
        let explained = self.count(|sample| sample.is_compared() && !sample.is_unexplained());
        (compared >= PARITY_COMPARED_MIN).then(|| explained as f64 / compared as f64)
    }

    /// What is wrong. A finding ends only when its share is well over the bound, so that it does not come and go.
    fn judge(&self) -> Option<ParityCause> {
        if let Some(share) = self.share() {
            let bound = if self.state.is_some() { (1.0 + PARITY_SHARE_MIN) / 2.0 } else { PARITY_SHARE_MIN };
            let with_cached = self.count(|sample| sample.has_cached);
            let unforeseen = self.count(|sample| sample.has_cached && !sample.foreseen);
            if share < bound {
                return Some(self.likeliest());
            }
            let is_enough = with_cached >= PARITY_COMPARED_MIN;
            return (is_enough && unforeseen as f64 > PARITY_UNFORESEEN_MAX * with_cached as f64)
                .then_some(ParityCause::Unforeseen);
        }
        if self.samples.len() < PARITY_COMPARED_MIN {
            return None;
        }
        if self.count(|sample| sample.without_tokens) as f64 > PARITY_WITHOUT_TOKENS_MAX * self.samples.len() as f64 {
            return Some(ParityCause::WithoutTokens);
        }
        (self.count(|sample| sample.not_reported) >= PARITY_COMPARED_MIN).then_some(ParityCause::NotReported)
    }

    /// The first cause that most unexplained differences point to, the most telling first.
    fn likeliest(&self) -> ParityCause {
        let unexplained = self.count(Sample::is_unexplained) as f64;
        let points: [(ParityCause, SampleTest); 4] = [
            (ParityCause::OtherTokens, |sample| sample.other_tokens),
            (ParityCause::BlockSize, |sample| sample.broken_block),
            // Before "nothing": of a prediction of one block, one block less is nothing.
            (ParityCause::NothingCached, |sample| sample.nothing_cached && !sample.one_block_less),
            (ParityCause::OneBlockLess, |sample| sample.one_block_less),
        ];
        let holds = |point: SampleTest| {
            let pointing = self.count(|sample| sample.is_unexplained() && point(sample));
            pointing as f64 >= PARITY_CAUSE_SHARE_MIN * unexplained
        };
        let found = points.into_iter().find(|(_, point)| holds(*point)).map(|(cause, _)| cause);
        let is_nothing = self.count(|sample| sample.has_cached) == 0;
        match found {
            None | Some(ParityCause::OneBlockLess) if is_nothing => ParityCause::NothingCached,
            Some(cause) => cause,
            None => ParityCause::Unknown,
        }
    }

    fn finding(&self, model: &str) -> Option<ParityFinding> {
        let cause = self.state?;
        let mut by_worker: HashMap<(u64, u32), usize> = HashMap::new();
        for sample in self.samples.iter().filter(|sample| sample.is_unexplained()) {
            *by_worker.entry(sample.worker).or_default() += 1;
        }
        Some(ParityFinding {
            model: model.to_owned(),
            cause,
            compared: self.count(Sample::is_compared),
            unexplained: self.count(Sample::is_unexplained),
            worker: by_worker.into_iter().max_by_key(|(worker, count)| (*count, *worker)).map(|(worker, _)| worker),
        })
    }
}

/// Watches all models.
#[derive(Debug, Default)]
pub struct ParityWatch(Mutex<HashMap<String, Window>>);

impl ParityWatch {
    /// Takes a reply. Logs a line when a model's state changes.
    pub fn observe(&self, model: &str, prediction: &Prediction, usage: &Usage) -> ParityOutcome {
        let sample = Sample::new(prediction, usage);
        let mut windows = self.0.lock();
        if !windows.contains_key(model) {
            if windows.len() >= PARITY_MODELS_MAX {
                return sample.outcome;
            }
            windows.insert(model.to_owned(), Window::default());
        }
        let Some(window) = windows.get_mut(model) else { return sample.outcome };
        window.push(sample);
        let seen: u64 = window.outcomes.iter().sum();
        if !seen.is_multiple_of(PARITY_JUDGED_EVERY) {
            return sample.outcome;
        }
        let state = window.judge();
        if state == window.state {
            return sample.outcome;
        }
        window.state = state;
        match window.finding(model) {
            Some(finding) => tracing::warn!(model, cause = finding.cause.label(), compared = finding.compared,
                unexplained = finding.unexplained, worker = ?finding.worker, "{}", finding.cause.remedy()),
            None => tracing::info!(model, "cached tokens come out as predicted again"),
        }
        sample.outcome
    }

    /// The models with a finding, by name.
    #[must_use]
    pub fn findings(&self) -> Vec<ParityFinding> {
        let windows = self.0.lock();
        let mut findings: Vec<_> = windows.iter().filter_map(|(model, window)| window.finding(model)).collect();
        findings.sort_by(|a, b| a.model.cmp(&b.model));
        findings
    }

    /// The counts of all models, by name.
    #[must_use]
    pub fn counts(&self) -> Vec<ParityCounts> {
        let windows = self.0.lock();
        let of = |(model, window): (&String, &Window)| ParityCounts {
            model: model.clone(),
            outcomes: window.outcomes,
            share: window.share(),
        };
        let mut counts: Vec<_> = windows.iter().map(of).collect();
        counts.sort_by(|a, b| a.model.cmp(&b.model));
        counts
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn prediction(overlap_blocks: u32, prompt_tokens: u32) -> Prediction {
        Prediction {
            worker: (1, 0),
            overlap_blocks,
            block_size: 16,
            prompt_tokens,
            is_exact: true,
            source: TokenSource::Renderer,
        }
    }

    fn usage(prompt_tokens: u32, cached: u32) -> Usage {
        Usage { prompt_tokens, cached_tokens: Some(cached), completion_tokens: 1 }
    }

    /// Observes so many requests, and returns the cause of the finding.
    fn cause_of(count: usize, prediction: &Prediction, usage: &Usage) -> Option<ParityCause> {
        let watch = ParityWatch::default();
        (0..count).for_each(|_| {
            watch.observe("m", prediction, usage);
        });
        watch.findings().first().map(|finding| finding.cause)
    }

    #[test]
    fn outcomes_follow_vllms_rule_of_the_last_token() {
        for (overlap, prompt, cached, expected) in [
            (0, 40, 0, ParityOutcome::Equal),
            (2, 40, 32, ParityOutcome::Equal),
            (2, 32, 16, ParityOutcome::LastBlock),
            (1, 16, 0, ParityOutcome::LastBlock),
            (2, 33, 16, ParityOutcome::Lower),
            (2, 32, 0, ParityOutcome::Lower),
            (2, 32, 32, ParityOutcome::Equal),
            (1, 40, 32, ParityOutcome::Higher),
            (3, 64, 16, ParityOutcome::Lower),
        ] {
            let outcome = compare(&prediction(overlap, prompt), &usage(prompt, cached));
            assert_eq!(outcome, expected, "{overlap} blocks of {prompt} tokens, {cached} cached");
        }
        let unsure = Prediction { is_exact: false, ..prediction(2, 40) };
        assert_eq!(compare(&unsure, &usage(40, 0)), ParityOutcome::NotCompared);
        let silent = Usage { cached_tokens: None, ..usage(40, 0) };
        assert_eq!(compare(&prediction(2, 40), &silent), ParityOutcome::NotCompared);
        let no_size = Prediction { block_size: 0, ..prediction(2, 40) };
        assert_eq!(compare(&no_size, &usage(40, 0)), ParityOutcome::NotCompared);
    }

    #[test]
    fn each_cause_is_named() {
        let many = PARITY_COMPARED_MIN;
        for (prediction, usage, expected) in [
            (prediction(2, 40), usage(40, 32), None),
            (prediction(2, 32), usage(32, 16), None),
            (prediction(1, 40), usage(40, 32), None),
            (prediction(2, 40), usage(43, 32), Some(ParityCause::OtherTokens)),
            (prediction(3, 60), usage(60, 0), Some(ParityCause::NothingCached)),
            (prediction(1, 40), usage(40, 0), Some(ParityCause::NothingCached)),
            (prediction(3, 60), usage(60, 8), Some(ParityCause::BlockSize)),
            (prediction(3, 60), usage(60, 32), Some(ParityCause::OneBlockLess)),
            (prediction(3, 60), usage(60, 16), Some(ParityCause::Unknown)),
            (prediction(0, 60), usage(60, 48), Some(ParityCause::Unforeseen)),
            (prediction(0, 60), Usage { cached_tokens: None, ..usage(60, 0) }, Some(ParityCause::NotReported)),
        ] {
            assert_eq!(cause_of(many, &prediction, &usage), expected, "{prediction:?} {usage:?}");
            assert_eq!(cause_of(many - 1, &prediction, &usage), None, "too few to judge");
        }
        let blind = Prediction { source: TokenSource::None, is_exact: false, ..prediction(0, 0) };
        assert_eq!(cause_of(many, &blind, &usage(60, 48)), Some(ParityCause::WithoutTokens));
    }

    #[test]
    fn a_finding_names_the_worker_and_ends_when_predictions_hold_again() {
        let watch = ParityWatch::default();
        let bad = Prediction { worker: (7, 1), ..prediction(3, 60) };
        (0..PARITY_COMPARED_MIN).for_each(|_| {
            watch.observe("m", &prediction(3, 60), &usage(60, 48));
            watch.observe("m", &bad, &usage(60, 0));
        });
        let findings = watch.findings();
        let [finding] = findings.as_slice() else { panic!("{findings:?}") };
        assert_eq!((finding.worker, finding.unexplained), (Some((7, 1)), PARITY_COMPARED_MIN));
        assert!(finding.text().contains("prefix caching"));
        assert_eq!(watch.counts()[0].share, Some(0.5));
        (0..PARITY_WINDOW).for_each(|_| {
            watch.observe("m", &prediction(3, 60), &usage(60, 48));
        });
        assert!(watch.findings().is_empty());
        let expected = [(PARITY_WINDOW + PARITY_COMPARED_MIN) as u64, 0, 0, PARITY_COMPARED_MIN as u64, 0];
        assert_eq!(watch.counts()[0].outcomes, expected);
    }

    #[test]
    fn models_are_bounded() {
        let watch = ParityWatch::default();
        for model in 0..=PARITY_MODELS_MAX {
            watch.observe(&model.to_string(), &prediction(0, 4), &usage(4, 0));
        }
        assert_eq!(watch.counts().len(), PARITY_MODELS_MAX);
    }

    proptest! {
        /// An engine that follows vLLM's rule and holds what was predicted is never unexplained.
        #[test]
        fn an_honest_engine_has_no_finding(
            requests in proptest::collection::vec((0_u32..2000, 1_u32..64, 0.0..=1.0_f64), 1..200),
        ) {
            let watch = ParityWatch::default();
            for (prompt, block_size, held) in requests {
                let prompt = prompt + 1;
                let overlap = (f64::from(prompt / block_size) * held) as u32;
                let cached = overlap.min((prompt - 1) / block_size) * block_size;
                let prediction = Prediction { block_size, ..prediction(overlap, prompt) };
                let outcome = watch.observe("m", &prediction, &usage(prompt, cached));
                prop_assert!(matches!(outcome, ParityOutcome::Equal | ParityOutcome::LastBlock));
            }
            prop_assert!(watch.findings().is_empty());
        }

        #[test]
        fn any_figures_are_judged_without_a_panic(
            samples in proptest::collection::vec(any::<(u32, u32, u32, u32, Option<u32>, bool)>(), 0..120),
        ) {
            let watch = ParityWatch::default();
            for (overlap_blocks, block_size, prompt_tokens, counted, cached_tokens, is_exact) in samples {
                let prediction = Prediction { block_size, is_exact, ..prediction(overlap_blocks, prompt_tokens) };
                let usage = Usage { prompt_tokens: counted, cached_tokens, completion_tokens: 0 };
                watch.observe("m", &prediction, &usage);
            }
            let is_share = |share| (0.0..=1.0).contains(&share);
            prop_assert!(watch.counts().iter().all(|counts| counts.share.is_none_or(is_share)));
        }
    }
}
