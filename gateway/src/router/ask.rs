//! The question to the router and its answer.

use std::time::Instant;

use kvrouted::client::TraceContext;
use kvrouted::ids::Worker;

use super::BookingGuard;
use crate::engines::ServedModel;
use crate::parity::Prediction;
use crate::tokens::PromptTokens;

/// A request that needs an engine.
#[derive(Clone, Copy, Debug)]
pub struct Ask<'a> {
    /// The model, and the LoRA adapter if there is one.
    pub model: &'a ServedModel,
    /// The prompt. Without tokens the daemon decides by load alone.
    pub prompt: &'a PromptTokens,
    /// The request's name in logs. It need not be unique.
    pub request_id: &'a str,
    /// The most tokens that the request generates, if the caller says so.
    pub output_tokens: Option<u32>,
    /// Requests of a higher priority leave the daemon's queue first.
    pub priority: i32,
    /// Requests of one session should go to one engine.
    pub session: Option<&'a str>,
    /// The tenant of the request. It begins the booking's name in the daemon; nothing else depends on it.
    pub tenant: Option<&'a str>,
    /// The trace that the request belongs to. The daemon's spans join it.
    pub trace: Option<TraceContext>,
    /// The only workers that may run the request; rank `u32::MAX` = every rank. `None` = all.
    pub allow: Option<&'a [Worker]>,
    /// Engines that failed for this request and must not be chosen again.
    pub exclude: &'a [u64],
    /// When the caller gets an error instead.
    pub deadline: Instant,
    /// Whether to choose two engines: one that decodes, and one that only prefills. Otherwise one engine runs the
    /// whole request: one for whole requests, or a decode engine if the model has no other.
    pub disaggregate: bool,
}

/// How a worker was chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DecidedBy {
    /// The daemon decided, by caches and load.
    Daemon,
    /// The daemon decided by load alone, because the prompt has no tokens.
    LoadOnly,
    /// This process decided, because the daemon did not answer. Nothing is booked.
    Fallback,
}

impl DecidedBy {
    /// The name in replies, logs and metrics.
    #[must_use]
    pub const fn label(self) -> &'static str {
        match self {
            Self::Daemon => "daemon",
            Self::LoadOnly => "load_only",
            Self::Fallback => "fallback",
        }
    }
}

/// Where a request may run.
#[derive(Debug)]
pub struct Pick {
    /// The workers, the best first; never empty. Each is a worker of an engine that the gateway knows.
    pub candidates: Vec<Worker>,
    /// The booking; `None` = nothing was booked. It is freed when the guard is dropped.
    pub booking: Option<BookingGuard>,
    /// What the first candidate should have of the prompt; `None` = nothing can be predicted.
    pub prediction: Option<Prediction>,
    /// The same for every candidate about which something can be predicted.
    pub predictions: Vec<Prediction>,
    /// Who decided.
    pub decided_by: DecidedBy,
    /// The engine that prefills, if a second one was wanted and found.
    pub prefill: Option<PrefillPick>,
}

/// Where the prompt of a request may be computed, if its output is generated elsewhere.
#[derive(Debug)]
pub struct PrefillPick {
    /// The workers, the best first; never empty.
    pub candidates: Vec<Worker>,
    /// The booking of the first one.
    pub booking: Option<BookingGuard>,
    /// What each should have of the prompt, as far as that can be predicted.
    pub predictions: Vec<Prediction>,
}
