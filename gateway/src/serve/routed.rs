//! The proxy's questions, answered by the core: tokens, then the router's decision, then the comparison with the reply.

use std::fmt::Write as _;
use std::sync::Arc;
use std::time::Instant;

use kvrouted::ids::Worker;

use super::{Core, sandboxed};
use crate::api::{ApiError, Usage};
use crate::parity::{ParityOutcome, Prediction};
use crate::proxy::{Asked, Booking, BoxFuture, Candidate, Choice, Choose, Finding, Observer, PrefillChoice};
use crate::router::{Ask, BookingGuard, DaemonState, ReportFigure, RouterFigure};
use crate::tokens::{LocalCounts, LocalFinding, LocalTokenizers, PromptTokens, TokenSource};

impl Booking for BookingGuard {
    fn prefill_complete(&mut self) {
        Self::prefill_complete(self);
    }

    fn output_progress(&mut self, tokens: u32) {
        Self::output_progress(self, tokens);
    }

    fn served(&mut self, worker: Worker) {
        Self::served(self, worker);
    }
}

/// Chooses by the core.
pub struct Routed(Arc<Core>);

impl Routed {
    /// Questions to this core.
    #[must_use]
    pub const fn new(core: Arc<Core>) -> Self {
        Self(core)
    }

    async fn route(&self, asked: Asked<'_>) -> Result<Choice, ApiError> {
        let Asked { path, facts, body, model, deadline, .. } = asked;
        let prompt = self.0.tokeniser().tokens(path, facts, model, body, deadline).await;
        let ask = Ask {
            model,
            prompt: &prompt,
            request_id: asked.booking_id,
            output_tokens: facts.output_tokens_max,
            priority: asked.priority,
            session: asked.session,
            tenant: asked.tenant,
            trace: asked.trace,
            allow: None,
            exclude: asked.exclude,
            deadline,
            disaggregate: asked.disaggregate,
        };
        let pick = self.0.router().pick(&ask).await?;
        let listed = candidates(&pick.candidates, &pick.predictions);
        let is_rendered = prompt.source == TokenSource::Renderer && prompt.media.is_empty();
        let token_ids = prompt.tokens.clone().filter(|_| is_rendered);
        let token_source = prompt.source.label();
        // Of two engines, the one that prefills says what was cached.
        let predictions = pick.prefill.as_ref().map_or(&pick.predictions, |prefill| &prefill.predictions);
        let observer = self.observer(&asked, predictions.clone(), prompt);
        Ok(Choice {
            candidates: listed,
            booking: pick.booking.map(|booking| Box::new(booking) as Box<dyn Booking>),
            prefill: pick.prefill.map(|prefill| PrefillChoice {
                candidates: candidates(&prefill.candidates, &prefill.predictions),
                booking: prefill.booking.map(|booking| Box::new(booking) as Box<dyn Booking>),
            }),
            observer: Some(observer),
            token_ids,
            decided_by: pick.decided_by.label(),
            token_source,
        })
    }

    /// Compares a reply with what was predicted, and the number of its tokens with that of the engine.
    fn observer(&self, asked: &Asked<'_>, predictions: Vec<Prediction>, prompt: PromptTokens) -> Observer {
        let core = Arc::clone(&self.0);
        let (path, model) = (asked.path, asked.model.clone());
        Box::new(move |worker: Worker, usage: &Usage| {
            core.tokeniser().observe(path, &model, &prompt, usage, Instant::now());
            if let Some(prediction) = Prediction::of_worker(&predictions, worker) {
                core.parity().observe(&model.base, prediction, usage);
            }
        })
    }
}

/// The workers with what they should have cached.
fn candidates(workers: &[Worker], predictions: &[Prediction]) -> Vec<Candidate> {
    let candidate = |worker: &Worker| {
        let overlap_tokens = Prediction::of_worker(predictions, *worker).map(Prediction::overlap_tokens);
        Candidate { worker: *worker, overlap_tokens }
    };
    workers.iter().map(candidate).collect()
}

impl Choose for Routed {
    fn choose<'a>(&'a self, asked: Asked<'a>) -> BoxFuture<'a, Result<Choice, ApiError>> {
        Box::pin(self.route(asked))
    }

    fn report_failure(&self, worker: Worker, model: &str, why: &str) {
        self.0.router().report_failure(worker, model, why);
    }

    fn is_ready(&self) -> bool {
        self.0.router().is_ready()
    }

    fn findings(&self) -> Vec<Finding> {
        let mut findings = Vec::new();
        for engine in self.0.engines().iter() {
            for problem in &engine.facts().problems {
                let what = format!("engine {} ({}): {problem}", engine.worker(), engine.base());
                findings.push(Finding { what, remedy: String::new() });
            }
        }
        findings.extend(sandboxed::findings());
        if let Some(pods) = self.0.pods() {
            findings.extend(pods.findings());
        }
        if let Some(daemon) = self.0.daemon() {
            let of_daemon = |what| Finding { what, remedy: String::new() };
            findings.extend(daemon.problems().into_iter().map(of_daemon));
            if let DaemonState::BackingOff { why } = daemon.state() {
                let remedy = "see the daemon's lines in the log; requests are spread by load until it runs".into();
                findings.push(Finding { what: format!("the daemon ended: {why}"), remedy });
            }
        }
        for finding in self.0.parity().findings() {
            findings.push(Finding { what: finding.text(), remedy: finding.cause.remedy().to_owned() });
        }
        let local = self.0.tokeniser().local().map(LocalTokenizers::findings).unwrap_or_default();
        findings.extend(local.into_iter().map(|LocalFinding { what, remedy }| Finding { what, remedy }));
        for what in self.0.memory().findings() {
            let remedy = "raise bounds.memory_bytes_max, or run another gateway".into();
            findings.push(Finding { what: format!("memory is short: {what}"), remedy });
        }
        if !self.0.router().is_connected() {
            let remedy = "start it, or correct --socket; requests are spread by load until it answers".into();
            findings.push(Finding { what: "the daemon does not answer".into(), remedy });
        }
        findings
    }

    fn metrics(&self) -> String {
        let mut text = String::new();
        sandboxed::metrics(&mut text);
        let router = self.0.router();
        let decided = RouterFigure::ALL.iter().map(|figure| (figure.label(), router.figures().get(*figure)));
        counter(&mut text, "routed", "Questions to the router, by how they ended", "outcome", decided);
        let reports = ReportFigure::ALL.iter().map(|figure| (figure.label(), router.report_figures().get(*figure)));
        counter(&mut text, "reports", "Reports to the daemon, by how they ended", "outcome", reports);
        let parity = self.0.parity().counts();
        let outcomes = ParityOutcome::ALL.iter().enumerate().map(|(at, outcome)| {
            (outcome.label(), parity.iter().map(|counts| counts.outcomes.get(at).copied().unwrap_or(0)).sum())
        });
        let help = "Replies by how their cached tokens compare with what was predicted";
        counter(&mut text, "parity", help, "outcome", outcomes);
        let tokens = self.0.tokeniser().counts();
        let cached = [("hit", tokens.cache_hits), ("miss", tokens.cache_misses)];
        let help = "Prompts looked up in the cache of rendered prompts";
        counter(&mut text, "token_cache", help, "result", cached.into_iter());
        let failures = [("engine", tokens.failures)].into_iter();
        counter(&mut text, "token_failures", "Questions to renderers that failed", "reason", failures);
        self.0.memory().metrics(&mut text);
        if let Some(pods) = self.0.pods() {
            pods.metrics(&mut text);
        }
        if let Some(local) = self.0.tokeniser().local() {
            local_metrics(&mut text, &local.counts());
        }
        if let Some(daemon) = self.0.daemon() {
            let restarts = daemon.restarts();
            counter(
                &mut text,
                "daemon_restarts",
                "Restarts of the daemon",
                "reason",
                [("ended", restarts)].into_iter(),
            );
        }
        text
    }
}

fn local_metrics(text: &mut String, counts: &LocalCounts) {
    let LocalCounts { equal, different, not_tokenised, skipped, panicked, proved, disproved } = *counts;
    let results = [
        ("equal", equal),
        ("different", different),
        ("not_tokenised", not_tokenised),
        ("skipped", skipped),
        ("panicked", panicked),
    ];
    let help = "Prompts that a local tokenizer was to compare with the engine or to use, by what came of them";
    counter(text, "local_tokens", help, "result", results.into_iter());
    let name = "kvrouted_gateway_local_proofs";
    let help = "Models and paths by the state of the proof that the local tokenizer equals the engine";
    // Writing to a string cannot fail.
    let _ = writeln!(text, "# HELP {name} {help}.\n# TYPE {name} gauge");
    for (state, count) in [("proved", proved), ("disproved", disproved)] {
        let _ = writeln!(text, "{name}{{state=\"{state}\"}} {count}");
    }
}

/// One counter with one label, in the text format of OpenMetrics.
pub(super) fn counter<'a>(
    text: &mut String,
    name: &str,
    help: &str,
    label: &str,
    values: impl Iterator<Item = (&'a str, u64)>,
) {
    let name = format!("kvrouted_gateway_{name}");
    // Writing to a string cannot fail.
    let _ = writeln!(text, "# HELP {name} {help}.\n# TYPE {name} counter");
    for (value, count) in values {
        let _ = writeln!(text, "{name}_total{{{label}=\"{value}\"}} {count}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn local_tokenizers_have_a_counter_and_a_gauge() {
        let mut text = String::new();
        local_metrics(&mut text, &LocalCounts { equal: 3, skipped: 2, proved: 1, ..LocalCounts::default() });
        for line in [
            "kvrouted_gateway_local_tokens_total{result=\"equal\"} 3",
            "kvrouted_gateway_local_tokens_total{result=\"skipped\"} 2",
            "# TYPE kvrouted_gateway_local_proofs gauge",
            "kvrouted_gateway_local_proofs{state=\"proved\"} 1",
        ] {
            assert!(text.lines().any(|found| found == line), "{line} is missing in\n{text}");
        }
    }
}
