//! vLLM with its NIXL connector: the prefill engine computes the prompt and answers where its blocks are, then the
//! decode engine gets the same request with that answer and reads the blocks.
//!
//! From vLLM 0.32: `vllm/distributed/kv_transfer/kv_connector/v1/nixl/pull_scheduler.py` (`request_finished` makes the
//! answer; blocks are kept for `kv_lease_duration`, 30 s, which the decode engine prolongs) and `pull_worker.py`
//! (`_get_new_notifs`: the first whole read frees them).
//!
//! An answer can be used once. So only a decode engine that refused the connection leaves it usable for another one. One
//! that broke off or answered 503 may have read the blocks, or given them back
//! (`vllm/entrypoints/generate/base/serving.py`, `_with_kv_transfer_rejection_cleanup`): a second reader would read
//! blocks that belong to another request by now. Then the prompt is computed again.

use std::sync::OnceLock;
use std::time::Instant;

use bytes::{Bytes, BytesMut};
use http_body_util::BodyExt as _;
use hyper::StatusCode;
use hyper::body::{Frame, Incoming};

use super::{Candidate, Chosen, Halves, PrefillUsage, Reply, Round, refusal};
use crate::api::{ApiError, Usage, UsageReader, decode_body, prefill_body, transfer_params};
use crate::engines::EngineError;
use crate::limits::PREFILL_REPLY_BYTES_MAX;
use crate::memory::{HeldReply, memory_short};
use crate::proxy::attempt::{Begun, Outcome};

/// How the prefill half ended.
enum Prefilled {
    /// It is done: where, and what the engine said.
    Done { by: Candidate, params: Option<String>, usage: Option<Usage> },
    /// The engine refuses the request itself.
    Refused(Box<Reply>),
    /// No engine did it.
    Failed,
}

impl Halves<'_> {
    /// Sends the request to a prefill engine, and then to a decode engine.
    pub(super) async fn prefill_then_decode(&mut self, mut chosen: Chosen) -> Result<Round, ApiError> {
        let body = prefill_body(&chosen.body)?;
        let (by, params, usage) = match self.compute(&chosen.prefill.candidates, &body).await? {
            Prefilled::Done { by, params, usage } => (by, params, usage),
            Prefilled::Refused(reply) => return Ok(Round::Begun(reply)),
            Prefilled::Failed if self.has_failed() => return Ok(Round::Failed),
            Prefilled::Failed => return Ok(Round::Nobody),
        };
        let is_first = chosen.prefill.candidates.first().is_some_and(|first| first.worker == by.worker);
        if let Some(booking) = &mut chosen.prefill.booking {
            if !is_first {
                booking.served(by.worker);
            }
            booking.prefill_complete();
        }
        let prefilled: PrefillUsage = OnceLock::new().into();
        if let Some(usage) = usage {
            if let Some(observer) = chosen.observer.take() {
                observer(by.worker, &usage);
            }
            // The cell is new.
            let _ = prefilled.set(usage);
        }
        let body = match &params {
            Some(params) => decode_body(&chosen.body, params)?,
            None => {
                self.proxy.metrics.on_two_engines("without_transfer");
                tracing::warn!(worker = %by.worker, "the prefill engine gave no kv_transfer_params, so that the decode \
                    engine computes the prompt again; start both with --kv-transfer-config for the NixlConnector");
                chosen.body.clone()
            }
        };
        let Some((candidate, begun)) = self.generate(&chosen.candidates, &body).await? else {
            return Ok(if self.has_failed() { Round::Failed } else { Round::Nobody });
        };
        // The decode engine has read the blocks, and the prefill engine has freed them.
        chosen.prefill.booking = None;
        Ok(Round::Begun(Box::new(chosen.reply(candidate, by, begun, prefilled))))
    }

    /// The prefill half, on one candidate after another.
    async fn compute(&mut self, candidates: &[Candidate], body: &Bytes) -> Result<Prefilled, ApiError> {
        loop {
            let sent = self.proxy.first_that_answers(candidates, &mut self.prefill, body, &self.prepared.model.base);
            let Some((by, begun)) = sent.await? else { return Ok(Prefilled::Failed) };
            let status = begun.parts.status;
            if !status.is_success() && !status.is_server_error() {
                return Ok(Prefilled::Refused(Box::new(refusal(by, begun))));
            }
            let failed = match read(begun, self.prefill.first_byte).await {
                Ok(reply) if status.is_success() => {
                    // It may prefill again if the other half fails.
                    self.prefill.tried.retain(|worker| *worker != by.worker.id.0);
                    let params = transfer_params(&reply).map(str::to_owned);
                    let mut reader = UsageReader::new(self.call.path, false);
                    reader.feed(&reply);
                    return Ok(Prefilled::Done { by, params, usage: reader.finish() });
                }
                Ok(_) => format!("the prefill engine answered {}", status.as_u16()),
                Err(ReadFailure::TimedOut) => {
                    self.prefill_failed(by, "timeout", "its reply did not end in time");
                    return Err(EngineError::TimedOut.api_error());
                }
                // The engine has done its part, so nothing is reported of it.
                Err(ReadFailure::NoRoom) => return Err(memory_short()),
                Err(ReadFailure::Broken) => "the prefill engine ended its reply before its end".to_owned(),
                Err(ReadFailure::TooLong) => {
                    format!("the prefill engine's reply has more than {PREFILL_REPLY_BYTES_MAX} bytes")
                }
            };
            self.prefill_failed(by, "prefill", &failed);
            self.prefill.failure = Some(Err(ApiError::engine(StatusCode::BAD_GATEWAY, "prefill_failed", failed)));
            self.prefill.failed_why = Some("prefill");
            if !self.prefill.can_repeat {
                return Ok(Prefilled::Failed);
            }
        }
    }

    fn prefill_failed(&self, by: Candidate, why: &str, text: &str) {
        if let Some(engine) = self.proxy.engines.get(by.worker.id.0) {
            engine.failed(Instant::now(), text);
        }
        self.proxy.choose.report_failure(by.worker, self.model(), why);
    }

    /// The decode half. `None` = the candidates failed, or one failed that may have read the blocks.
    async fn generate(
        &mut self,
        candidates: &[Candidate],
        body: &Bytes,
    ) -> Result<Option<(Candidate, Begun)>, ApiError> {
        for candidate in candidates {
            let (worker, decode) = (candidate.worker, &mut self.decode);
            if decode.left == 0 {
                return Ok(None);
            }
            let Some(engine) = self.proxy.engines.get(worker.id.0) else { continue };
            if decode.tried.contains(&worker.id.0) {
                continue;
            }
            decode.tried.push(worker.id.0);
            if !engine.is_usable(Instant::now()) {
                continue;
            }
            if let Some(why) = decode.failed_why {
                self.proxy.metrics.retried(why);
            }
            match decode.send(&engine, Some(worker.rank.0), body).await {
                Outcome::Begun(begun) => return Ok(self.unless_transfer_failed(*candidate, begun)),
                Outcome::Failed(why) => {
                    decode.failed_why = Some(why);
                    self.proxy.report(worker, &self.prepared.model.base, why);
                    if why != "refused" || !self.decode.can_repeat {
                        return Ok(None);
                    }
                }
                Outcome::TimedOut(error) => {
                    self.proxy.choose.report_failure(worker, &self.prepared.model.base, "timeout");
                    return Err(error);
                }
            }
        }
        Ok(None)
    }
}

enum ReadFailure {
    TimedOut,
    Broken,
    TooLong,
    NoRoom,
}

/// The whole of a reply that has begun.
async fn read(begun: Begun, deadline: Instant) -> Result<Bytes, ReadFailure> {
    let Begun { first, rest, guard: _counted, .. } = begun;
    tokio::time::timeout_at(deadline.into(), collect(first, rest)).await.unwrap_or(Err(ReadFailure::TimedOut))
}

async fn collect(first: Option<Frame<Bytes>>, mut rest: Incoming) -> Result<Bytes, ReadFailure> {
    let (mut whole, mut held) = (BytesMut::new(), HeldReply::default());
    let mut next = first;
    while let Some(frame) = next {
        if let Ok(data) = frame.into_data() {
            if whole.len() + data.len() > PREFILL_REPLY_BYTES_MAX {
                return Err(ReadFailure::TooLong);
            }
            if !held.grow(data.len()) {
                return Err(ReadFailure::NoRoom);
            }
            whole.extend_from_slice(&data);
        }
        next = rest.frame().await.transpose().map_err(|_| ReadFailure::Broken)?;
    }
    Ok(whole.freeze())
}
