//! The gateway's metrics, in one registry. Labels come from fixed lists, so that no caller can make new ones.

use std::fmt;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

use prometheus_client::encoding::{EncodeLabelSet, text::encode};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;

use crate::api::ApiPath;

/// Seconds of a request: from a cached reply on a fast machine to a long generation.
const SECONDS: [f64; 16] =
    [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0];

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct PathStatus {
    path: &'static str,
    status: u16,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Path {
    path: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Reason {
    reason: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Outcome {
    outcome: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Decision {
    decided_by: &'static str,
    token_source: &'static str,
}

/// How the relaying of a reply ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReplyEnd {
    /// Whole.
    Whole,
    /// The caller hung up.
    HungUp,
    /// The caller took nothing for `deadlines.stall_ms`.
    Stalled,
    /// The engine broke it off.
    Engine,
    /// It took longer than `deadlines.total_ms`.
    Deadline,
}

impl ReplyEnd {
    /// The name in metrics and logs.
    #[must_use]
    pub const fn label(self) -> &'static str {
        match self {
            Self::Whole => "whole",
            Self::HungUp => "hung_up",
            Self::Stalled => "stalled",
            Self::Engine => "engine",
            Self::Deadline => "deadline",
        }
    }
}

/// All metrics.
pub struct Metrics {
    registry: Registry,
    requests: Family<PathStatus, Counter>,
    first_byte: Family<Path, Histogram>,
    duration: Family<Path, Histogram>,
    refused: Family<Reason, Counter>,
    retried: Family<Reason, Counter>,
    ended: Family<Reason, Counter>,
    decided: Family<Decision, Counter>,
    on_two_engines: Family<Outcome, Counter>,
    prompt_tokens: Counter,
    cached_tokens: Counter,
    completion_tokens: Counter,
    without_usage: Counter,
    /// Connections of callers.
    pub connections: Gauge,
    /// Requests under way.
    pub in_flight: Gauge,
    /// Picks of other proxies under way.
    pub picks_open: Gauge,
    /// Picks whose end never came.
    pub picks_expired: Counter<u64, AtomicU64>,
}

impl fmt::Debug for Metrics {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Metrics").finish_non_exhaustive()
    }
}

impl Default for Metrics {
    fn default() -> Self {
        Self::new()
    }
}

impl Metrics {
    /// All metrics at zero.
    #[must_use]
    pub fn new() -> Self {
        let histogram: fn() -> Histogram = || Histogram::new(SECONDS);
        let mut this = Self {
            registry: Registry::with_prefix("kvrouted_gateway"),
            requests: Family::default(),
            first_byte: Family::new_with_constructor(histogram),
            duration: Family::new_with_constructor(histogram),
            refused: Family::default(),
            retried: Family::default(),
            ended: Family::default(),
            decided: Family::default(),
            on_two_engines: Family::default(),
            prompt_tokens: Counter::default(),
            cached_tokens: Counter::default(),
            completion_tokens: Counter::default(),
            without_usage: Counter::default(),
            connections: Gauge::default(),
            in_flight: Gauge::default(),
            picks_open: Gauge::default(),
            picks_expired: Counter::default(),
        };
        this.register();
        this
    }

    fn register(&mut self) {
        let registry = &mut self.registry;
        registry.register("requests", "Requests answered, by path and status", self.requests.clone());
        let help = "Seconds from the request to the first byte of the reply's body";
        registry.register("first_byte_seconds", help, self.first_byte.clone());
        registry.register("request_seconds", "Seconds from the request to the reply's end", self.duration.clone());
        let help = "Requests that the gateway answered with an error of its own, by the error's code";
        registry.register("refused", help, self.refused.clone());
        let help = "Requests sent to another engine because one failed before the first byte, by what happened";
        for reason in ["refused", "broken", "unavailable", "cut_off"] {
            drop(self.retried.get_or_create(&Reason { reason })); // listed from the start, with 0
        }
        registry.register("retried", help, self.retried.clone());
        let help = "Replies by how they ended: whole, hung_up (the caller left), stalled (the caller read nothing), \
            engine (the engine broke off) or deadline";
        registry.register("replies_ended", help, self.ended.clone());
        let help = "Routed requests, by who decided and where the prompt's tokens came from";
        registry.register("decided", help, self.decided.clone());
        let help = "Requests for models with prefill and decode engines: split (one of both ran it), without_transfer \
            (the same, but the prefill engine gave no blocks), any (one engine ran it, because no prefill or no decode \
            engine was usable), not_split (one engine ran it, because it cannot be split) or nobody";
        for outcome in ["split", "without_transfer", "any", "not_split", "nobody"] {
            drop(self.on_two_engines.get_or_create(&Outcome { outcome })); // listed from the start, with 0
        }
        registry.register("disaggregated", help, self.on_two_engines.clone());
        registry.register("prompt_tokens", "Tokens of prompts, as engines count them", self.prompt_tokens.clone());
        let help = "Tokens of prompts that the engines had cached, as they say in their replies";
        registry.register("cached_tokens", help, self.cached_tokens.clone());
        registry.register("completion_tokens", "Tokens generated", self.completion_tokens.clone());
        let help = "Generating requests that ended well and whose reply said nothing of its usage; \
            forward.include_usage asks streams for it";
        registry.register("replies_without_usage", help, self.without_usage.clone());
        registry.register("connections", "Connections of callers", self.connections.clone());
        registry.register("requests_in_flight", "Requests under way", self.in_flight.clone());
        registry.register("picks_open", "Picks of other proxies whose end has not come", self.picks_open.clone());
        let help = "Picks freed by pick.booking_ms_max because their end never came";
        registry.register("picks_expired", help, self.picks_expired.clone());
    }

    /// A request was answered.
    pub fn answered(&self, path: ApiPath, status: u16) {
        self.requests.get_or_create(&PathStatus { path: path.label(), status }).inc();
    }

    /// The first byte of a reply's body came.
    pub fn first_byte(&self, path: ApiPath, after: Duration) {
        self.first_byte.get_or_create(&Path { path: path.label() }).observe(after.as_secs_f64());
    }

    /// A reply ended.
    pub fn ended(&self, path: ApiPath, end: ReplyEnd, after: Duration) {
        self.ended.get_or_create(&Reason { reason: end.label() }).inc();
        self.duration.get_or_create(&Path { path: path.label() }).observe(after.as_secs_f64());
    }

    /// The gateway refused a request.
    pub fn refused(&self, code: &'static str) {
        self.refused.get_or_create(&Reason { reason: code }).inc();
    }

    /// A request went to another engine.
    pub fn retried(&self, reason: &'static str) {
        self.retried.get_or_create(&Reason { reason }).inc();
    }

    /// The router decided.
    pub fn decided(&self, decided_by: &'static str, token_source: &'static str) {
        self.decided.get_or_create(&Decision { decided_by, token_source }).inc();
    }

    /// What became of a request for a model with prefill and decode engines.
    pub fn on_two_engines(&self, outcome: &'static str) {
        self.on_two_engines.get_or_create(&Outcome { outcome }).inc();
    }

    /// A generating reply ended well.
    pub fn usage(&self, usage: Option<&crate::api::Usage>) {
        let Some(usage) = usage else {
            self.without_usage.inc();
            return;
        };
        self.prompt_tokens.inc_by(usage.prompt_tokens.into());
        self.cached_tokens.inc_by(usage.cached_tokens.unwrap_or(0).into());
        self.completion_tokens.inc_by(usage.completion_tokens.into());
    }

    /// The text format of OpenMetrics, with metrics of other rooms before its last line.
    #[must_use]
    pub fn text(&self, others: &str) -> String {
        let mut text = String::new();
        // Writing to a string cannot fail.
        let _ = encode(&mut text, &self.registry);
        let end = "# EOF\n";
        if !others.is_empty() && text.ends_with(end) {
            text.truncate(text.len() - end.len());
            text.push_str(others);
            text.push_str(end);
        }
        text
    }
}

/// One more of something, until it is dropped.
#[derive(Debug)]
pub struct Counted(Gauge);

impl Counted {
    /// Counts one.
    #[must_use]
    pub fn of(gauge: &Gauge) -> Self {
        gauge.inc();
        Self(gauge.clone())
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.dec();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_text_has_what_was_counted_and_one_end() {
        let metrics = Metrics::new();
        metrics.answered(ApiPath::ChatCompletions, 200);
        metrics.retried("refused");
        let counted = Counted::of(&metrics.in_flight);
        let text = metrics.text("other 1\n");
        for line in [
            "kvrouted_gateway_requests_total{path=\"chat_completions\",status=\"200\"} 1",
            "kvrouted_gateway_retried_total{reason=\"refused\"} 1",
            "kvrouted_gateway_requests_in_flight 1",
            "other 1\n# EOF",
        ] {
            assert!(text.contains(line), "{line} is missing in\n{text}");
        }
        drop(counted);
        assert!(metrics.text("").contains("kvrouted_gateway_requests_in_flight 0"));
        assert_eq!(metrics.text("x 1\n").matches("# EOF").count(), 1);
    }
}
