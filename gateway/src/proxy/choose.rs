//! What the proxy asks of the router, as a trait: the tests choose without a daemon.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Instant;

use bytes::Bytes;
use kvrouted::client::TraceContext;
use kvrouted::ids::Worker;

use crate::api::{ApiError, ApiPath, RequestFacts, Usage};
use crate::engines::ServedModel;

/// A future in a box.
pub type BoxFuture<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;

/// A request that needs a worker.
#[derive(Clone, Copy, Debug)]
pub struct Asked<'a> {
    /// The request's path.
    pub path: ApiPath,
    /// What its body says.
    pub facts: &'a RequestFacts,
    /// The body as the caller sent it.
    pub body: &'a Bytes,
    /// The model that it names.
    pub model: &'a ServedModel,
    /// The booking's name. The gateway makes it, so that no caller can end another one's booking.
    pub booking_id: &'a str,
    /// The priority: higher goes first.
    pub priority: i32,
    /// The session whose requests should meet again on one worker.
    pub session: Option<&'a str>,
    /// The tenant, for fairness.
    pub tenant: Option<&'a str>,
    /// The trace that the request belongs to.
    pub trace: Option<TraceContext>,
    /// Engines that failed for this request.
    pub exclude: &'a [u64],
    /// When the caller stops waiting.
    pub deadline: Instant,
    /// Whether two engines should run it: one that prefills, and one that decodes.
    pub disaggregate: bool,
}

/// A worker that may run the request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Candidate {
    /// The worker.
    pub worker: Worker,
    /// Tokens of the prompt that it should have cached; `None` = not known.
    pub overlap_tokens: Option<u32>,
}

/// The booking of a request. Dropping it frees it.
pub trait Booking: Send + Sync {
    /// The first output has come.
    fn prefill_complete(&mut self);
    /// So many tokens have come since the start.
    fn output_progress(&mut self, tokens: u32);
    /// Another worker than the best one runs the request.
    fn served(&mut self, worker: Worker);
}

/// Compares what a reply says of its cached tokens with what was predicted for the worker that served it.
pub type Observer = Box<dyn FnOnce(Worker, &Usage) + Send + Sync>;

/// The router's answer.
pub struct Choice {
    /// Best first; never empty.
    pub candidates: Vec<Candidate>,
    /// The booking; `None` where the daemon did not decide.
    pub booking: Option<Box<dyn Booking>>,
    /// Where the prompt is computed, if two engines run the request.
    pub prefill: Option<PrefillChoice>,
    /// Takes the reply's usage: that of the engine that prefills, if there are two.
    pub observer: Option<Observer>,
    /// The prompt's tokens if they are the engine's own and may be sent in place of text.
    pub token_ids: Option<Arc<[u32]>>,
    /// Who decided: a short name for metrics.
    pub decided_by: &'static str,
    /// Where the tokens came from: a short name for metrics.
    pub token_source: &'static str,
}

/// The engines that may compute a prompt whose output another engine generates.
pub struct PrefillChoice {
    /// Best first; never empty.
    pub candidates: Vec<Candidate>,
    /// The booking of this half; `None` where the daemon did not decide.
    pub booking: Option<Box<dyn Booking>>,
}

/// A finding for the operator.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct Finding {
    /// What is wrong.
    pub what: String,
    /// The likeliest cause and the remedy; empty where `what` names it.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub remedy: String,
}

/// Chooses workers.
pub trait Choose: Send + Sync + 'static {
    /// Chooses and books.
    fn choose<'a>(&'a self, asked: Asked<'a>) -> BoxFuture<'a, Result<Choice, ApiError>>;
    /// An engine failed before the first byte of a reply.
    fn report_failure(&self, worker: Worker, model: &str, why: &str);
    /// Whether requests can be routed.
    fn is_ready(&self) -> bool;
    /// What the operator should know.
    fn findings(&self) -> Vec<Finding>;
    /// Further metrics, in the text format of OpenMetrics without its last line.
    fn metrics(&self) -> String {
        String::new()
    }
}
