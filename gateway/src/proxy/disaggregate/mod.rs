//! Requests on two engines: one computes the prompt (prefill), the other one generates the output (decode), and the KV
//! blocks go from one to the other.
//!
//! ```text
//!  roles ─▶ can it be split? ─▶ choose (two workers, two bookings) ─▶ nixl       vLLM: prefill, then decode
//!             │ no                        │ nobody prefills           bootstrap  SGLang: both at once
//!             ▼                           ▼
//!           one engine for whole requests, or an error that says why
//! ```
//!
//! Nothing goes to the caller before the decode engine's first byte. Until then a failed half may run on another engine;
//! what that costs the other half is said in [`nixl`] and [`bootstrap`].

mod bootstrap;
mod nixl;

use std::sync::{Arc, OnceLock};
use std::time::Instant;

use bytes::Bytes;
use hyper::header::ACCEPT_ENCODING;
use hyper::{Response, StatusCode};

use super::attempt::{Attempts, Begun};
use super::body::ReplyBody;
use super::choose::{Asked, Booking, Candidate, Choice, Observer, PrefillChoice};
use super::handle::{Call, Proxy, Reply};
use super::prepared::Prepared;
use super::relay::Held;
use crate::api::{ApiError, ApiPath, Usage, asks_one_output, prompts, sglang_splits, vllm_splits};
use crate::engines::{Dialect, Engine, EngineRole};

/// What became of a request that two engines might have run.
pub(super) enum OnTwo {
    /// It is answered.
    Answered(Response<ReplyBody>),
    /// One engine must run it.
    Whole(Held),
}

/// The usage of the prefill engine's reply, once it is known. It says how many tokens were cached; the decode engine
/// gets all of them from elsewhere.
pub(crate) type PrefillUsage = Arc<OnceLock<Usage>>;

/// How one round of both halves ended.
enum Round {
    /// A reply has begun.
    Begun(Box<Reply>),
    /// An engine failed; others may run the request.
    Failed,
    /// No candidate could be tried.
    Nobody,
}

/// The engines of a model that are not known to have failed for this request.
struct Roles {
    has_roles: bool,
    any: bool,
    prefill: bool,
    decode: bool,
    dialect: Dialect,
    /// The engines that only decode, usable or not.
    decoders: Vec<u64>,
}

impl Roles {
    fn of(engines: impl Iterator<Item = Arc<Engine>>, failed: &[u64]) -> Self {
        let now = Instant::now();
        let mut roles = Self {
            has_roles: false,
            any: false,
            prefill: false,
            decode: false,
            dialect: Dialect::Vllm,
            decoders: Vec::new(),
        };
        for engine in engines {
            let is_usable = engine.is_usable(now) && !failed.contains(&engine.worker());
            let facts = engine.facts();
            match engine.config().role {
                EngineRole::Any => roles.any |= is_usable,
                EngineRole::Prefill => {
                    roles.has_roles = true;
                    // Without that port no decode engine of SGLang would find it.
                    roles.prefill |= is_usable && (facts.dialect == Dialect::Vllm || facts.bootstrap_port.is_some());
                }
                EngineRole::Decode => {
                    roles.has_roles = true;
                    roles.decode |= is_usable;
                    roles.dialect = facts.dialect;
                    roles.decoders.push(engine.worker());
                }
            }
        }
        roles
    }

    /// Whether engines of this kind can share a request of this path and with so many prompts.
    fn split(&self, path: ApiPath, prepared: &Prepared) -> bool {
        match self.dialect {
            Dialect::Vllm => vllm_splits(path) && matches!(prompts(&prepared.facts), (1, false)),
            Dialect::Sglang => sglang_splits(path) && prompts(&prepared.facts).0 > 0,
        }
    }

    /// Why no two engines can run the request; `None` = they can.
    const fn lack(&self) -> Option<&'static str> {
        match (self.prefill, self.decode) {
            (true, true) => None,
            (false, true) => Some("no engine with the role prefill is usable"),
            (true, false) => Some("no engine with the role decode is usable"),
            (false, false) => Some("no engine with the role prefill and none with the role decode is usable"),
        }
    }
}

/// How an event begins by which both kinds of engines say that a request failed. A stream's status is sent before the
/// prompt is computed.
const ERROR_EVENT: &[u8] = b"data: {\"error\"";

/// A request on its way to two engines.
struct Halves<'a> {
    proxy: &'a Proxy,
    call: &'a Call,
    prepared: &'a Prepared,
    body: &'a Bytes,
    prefill: Attempts,
    decode: Attempts,
    /// Whether a decode engine has answered with a failure, which may be that of the transfer.
    has_lost_blocks: bool,
}

impl Halves<'_> {
    /// The decode engine's reply; `None` = it says that it failed, for the first time. It may have found no blocks
    /// because the prefill engine died since (vLLM's `kv_load_failure_policy` is `fail`), so that both halves may run
    /// once more, on the same engines if need be.
    fn unless_transfer_failed(&mut self, candidate: Candidate, begun: Begun) -> Option<(Candidate, Begun)> {
        let status = begun.parts.status;
        let has_failed = match begun.first.as_ref().and_then(|first| first.data_ref()) {
            Some(data) if status.is_success() => data.starts_with(ERROR_EVENT),
            _ => status.is_server_error(),
        };
        let worker = candidate.worker.id.0;
        if !has_failed || self.has_lost_blocks || !self.may_go_on() {
            return Some((candidate, begun));
        }
        self.has_lost_blocks = true;
        self.decode.tried.retain(|tried| *tried != worker);
        self.decode.failed_why = Some("decode");
        self.decode.failure = Some(Ok((worker, begun)));
        None
    }

    /// Engines that failed, or were passed over because they back off.
    fn failed(&self) -> Vec<u64> {
        [self.prefill.tried.as_slice(), &self.decode.tried].concat()
    }

    fn has_failed(&self) -> bool {
        self.prefill.failure.is_some() || self.decode.failure.is_some()
    }

    /// Whether the request may be sent to engines again.
    const fn may_go_on(&self) -> bool {
        self.prefill.can_repeat && self.prefill.left > 0 && self.decode.left > 0
    }

    /// The half whose failure the caller is told.
    fn last_failed(self) -> Attempts {
        if self.decode.failure.is_some() { self.decode } else { self.prefill }
    }

    fn model(&self) -> &str {
        &self.prepared.model.base
    }
}

/// What both kinds of engines need of a choice.
struct Chosen {
    body: Bytes,
    filters_usage: bool,
    candidates: Vec<Candidate>,
    booking: Option<Box<dyn Booking>>,
    prefill: PrefillChoice,
    observer: Option<Observer>,
}

impl Chosen {
    /// The reply of the decode engine that has begun to answer.
    fn reply(self, candidate: Candidate, prefill: Candidate, begun: Begun, usage: PrefillUsage) -> Reply {
        let Self { candidates, mut booking, filters_usage, .. } = self;
        let is_first = candidates.first().is_some_and(|first| first.worker == candidate.worker);
        if let Some(booking) = booking.as_mut().filter(|_| !is_first) {
            booking.served(candidate.worker);
        }
        // What counts is what the engine that prefills had.
        let candidate = Candidate { overlap_tokens: prefill.overlap_tokens, ..candidate };
        let prefill = Some((prefill.worker, usage));
        Reply { candidate, begun, booking, observer: None, filters_usage, prefill }
    }
}

/// 503: no two engines, and no single one, can run the request.
fn no_pair(why: &str) -> ApiError {
    let message = format!("{why}, and no engine with the role any is; try again");
    ApiError::engine(StatusCode::SERVICE_UNAVAILABLE, "no_engine_pair", message).retry_after(1)
}

/// A reply of an engine that refuses the request itself, as any other engine would.
fn refusal(candidate: Candidate, begun: Begun) -> Reply {
    Reply { candidate, begun, booking: None, observer: None, filters_usage: false, prefill: None }
}

impl Proxy {
    /// Runs a request on two engines if its model has such engines and the request can be split.
    pub(super) async fn on_two_engines(
        &self,
        call: &Call,
        prepared: &Prepared,
        body: &Bytes,
        attempts: &mut Attempts,
        deadline: Instant,
        held: Held,
    ) -> Result<OnTwo, ApiError> {
        let roles = Roles::of(self.engines.serving(&prepared.model), &[]);
        if !roles.has_roles {
            return Ok(OnTwo::Whole(held));
        }
        if !roles.split(call.path, prepared) || !asks_one_output(body)? {
            self.metrics.on_two_engines("not_split");
            return self.whole(&roles).map(|()| OnTwo::Whole(held));
        }
        let mut prefill = attempts.fresh();
        // The gateway reads that reply itself.
        prefill.headers.remove(ACCEPT_ENCODING);
        let decode = attempts.fresh();
        let mut halves = Halves { proxy: self, call, prepared, body, prefill, decode, has_lost_blocks: false };
        let why = loop {
            let failed = halves.failed();
            if let Some(why) = Roles::of(self.engines.serving(&prepared.model), &failed).lack() {
                break why.to_owned();
            }
            let asked = Asked { disaggregate: true, ..prepared.asked(call.path, body, &failed, deadline) };
            let choice = match self.choose.choose(asked).await {
                Ok(choice) => choice,
                // An engine may still run all of it, or what an engine said is more to the point.
                Err(error) if halves.has_failed() || error.status == StatusCode::SERVICE_UNAVAILABLE => {
                    break error.message;
                }
                Err(error) => return Err(error),
            };
            self.metrics.decided(choice.decided_by, choice.token_source);
            let Some(chosen) = halves.chosen(choice)? else {
                break "no engine with the role prefill can take the prompt".to_owned();
            };
            let round = match roles.dialect {
                Dialect::Vllm => halves.prefill_then_decode(chosen).await?,
                Dialect::Sglang => halves.both_at_once(chosen).await?,
            };
            match round {
                Round::Begun(reply) => {
                    self.metrics.on_two_engines("split");
                    return Ok(OnTwo::Answered(self.relay(call, *reply, held, deadline)));
                }
                Round::Failed if halves.may_go_on() => {}
                Round::Failed => return self.give_up(call, halves.last_failed(), held, deadline).map(OnTwo::Answered),
                Round::Nobody => break "every engine that could run it backs off after a failure".to_owned(),
            }
        };
        let failed = halves.failed();
        if roles.any && (!halves.has_failed() || attempts.can_repeat) {
            self.metrics.on_two_engines("any");
            tracing::info!(request_id = call.id_text(), why, "one engine runs the request");
            // Those that only decode are not for whole requests.
            attempts.tried = [roles.decoders, failed].concat();
            return Ok(OnTwo::Whole(held));
        }
        if halves.has_failed() {
            return self.give_up(call, halves.last_failed(), held, deadline).map(OnTwo::Answered);
        }
        self.metrics.on_two_engines("nobody");
        Err(no_pair(&why))
    }

    /// Whether a request that cannot be split may go to one engine.
    fn whole(&self, roles: &Roles) -> Result<(), ApiError> {
        // A decode engine of vLLM computes a prompt too. One of SGLang refuses whoever names no room.
        if roles.any || roles.dialect == Dialect::Vllm && !roles.decoders.is_empty() {
            return Ok(());
        }
        let message = "this path, several outputs (n, best_of) and beam search need an engine with the role any, and \
            none is usable; send one output for each request, to a path of chats or completions";
        Err(ApiError::caller(StatusCode::BAD_REQUEST, "cannot_be_split", message))
    }
}

impl Halves<'_> {
    /// What both halves need of a choice; `None` = nobody prefills.
    fn chosen(&self, choice: Choice) -> Result<Option<Chosen>, ApiError> {
        let edits = self.proxy.edits(&choice);
        let edited = crate::api::edit_body(self.call.path, self.body, &self.prepared.facts, &edits)?;
        let Choice { candidates, booking, prefill, observer, .. } = choice;
        let filters_usage = edited.has_extra_usage;
        Ok(prefill.map(|prefill| Chosen { body: edited.body, filters_usage, candidates, booking, prefill, observer }))
    }
}
