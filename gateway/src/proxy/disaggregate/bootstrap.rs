//! SGLang: both engines get the same request at once, with where the prefill engine's bootstrap server is and a room, a
//! random number by which they find each other there. The decode engine's reply goes to the caller.
//!
//! From SGLang 0.5: `python/sglang/srt/disaggregation/mini_lb.py`, and `prefill.py` and `decode.py` beside it: the prefill
//! engine answers one token when its blocks are sent, and the decode engine's first token comes after they arrived.
//!
//! A failure of either half before the decode engine's first byte ends both: the other one would wait for it in that
//! room until its own deadline. The request then begins again with a new room. After that byte the prefill engine has
//! nothing more to do, and what becomes of its reply does not matter.

use std::sync::{Arc, OnceLock};
use std::time::Instant;

use bytes::Bytes;
use http_body_util::BodyExt as _;
use hyper::body::{Frame, Incoming};
use hyper::header::{CONTENT_TYPE, HeaderValue};
use hyper::{Request, StatusCode};
use tokio::task::JoinHandle;

use super::{Booking, Candidate, Chosen, ERROR_EVENT, Halves, Observer, PrefillUsage, Round, refusal};
use crate::api::{ApiError, ApiPath, Bootstrap, UsageReader, bootstrap_body, prompts};
use crate::engines::{BoxBody, Engine, EngineError, body_of};
use crate::limits::PREFILL_END_MAX;
use crate::proxy::attempt::{Attempts, Begun, Outcome};

/// Rooms are numbers of 63 bits, as SGLang's own balancer draws them.
const ROOM_MAX: u64 = (1 << 63) - 1;

/// How the prefill half ended.
enum PrefillEnd {
    /// Its reply was read to its end.
    Done,
    /// The engine refuses the request itself.
    Refused(Box<Begun>),
    /// The engine failed: a short name of it, and the error for the caller.
    Failed(&'static str, ApiError),
}

/// The prefill half under way. Dropping it cancels the request at the engine.
struct PrefillTask(JoinHandle<PrefillEnd>);

impl Drop for PrefillTask {
    fn drop(&mut self) {
        self.0.abort();
    }
}

impl PrefillTask {
    /// Lets it come to its end without the request that it belongs to.
    fn let_end(mut self) {
        tokio::spawn(async move {
            match tokio::time::timeout(PREFILL_END_MAX, &mut self.0).await {
                Ok(Ok(PrefillEnd::Done)) => {}
                Ok(Ok(PrefillEnd::Failed(why, error))) => {
                    tracing::info!(why, %error, "a prefill engine failed after its blocks had arrived");
                }
                Ok(Ok(PrefillEnd::Refused(_)) | Err(_)) | Err(_) => {
                    tracing::info!("a prefill engine's reply did not end with the output of the other engine");
                }
            }
        });
    }
}

impl Halves<'_> {
    /// Sends the request to a prefill engine and a decode engine at once.
    pub(super) async fn both_at_once(&mut self, mut chosen: Chosen) -> Result<Round, ApiError> {
        let Some((by, prefill_engine)) = self.next(&self.prefill, &chosen.prefill.candidates) else {
            return Ok(Round::Nobody);
        };
        let Some((candidate, decode_engine)) = self.next(&self.decode, &chosen.candidates) else {
            return Ok(Round::Nobody);
        };
        let body = match self.body_for(&chosen.body, by, &prefill_engine)? {
            Some(body) => body,
            None => {
                self.prefill.tried.push(by.worker.id.0);
                return Ok(Round::Nobody);
            }
        };
        if let Some(why) = self.prefill.failed_why.or(self.decode.failed_why) {
            self.proxy.metrics.retried(why);
        }
        let is_first = chosen.prefill.candidates.first().is_some_and(|first| first.worker == by.worker);
        if let Some(booking) = chosen.prefill.booking.as_mut().filter(|_| !is_first) {
            booking.served(by.worker);
        }
        let (mut task, usage) = self.start_prefill(&mut chosen, by, &prefill_engine, &body);
        let mut is_prefilled = false;
        let outcome = {
            let sending = self.decode.send(&decode_engine, Some(candidate.worker.rank.0), &body);
            let mut sending = std::pin::pin!(sending);
            loop {
                tokio::select! {
                    biased;
                    end = &mut task.0, if !is_prefilled => match end {
                        Ok(PrefillEnd::Done) => is_prefilled = true,
                        Ok(end) => break Err(end),
                        Err(_) => {
                            let error = ApiError::gateway(StatusCode::INTERNAL_SERVER_ERROR, "prefill_failed",
                                "the prefill half ended without a result");
                            break Err(PrefillEnd::Failed("broken", error));
                        }
                    },
                    outcome = &mut sending => break Ok(outcome),
                }
            }
        };
        match outcome {
            Ok(Outcome::Begun(begun)) => match self.unless_transfer_failed(candidate, begun) {
                Some((candidate, begun)) if begun.parts.status.is_success() => {
                    if !is_prefilled {
                        task.let_end();
                    }
                    Ok(Round::Begun(Box::new(chosen.reply(candidate, by, begun, usage))))
                }
                Some((candidate, begun)) => Ok(Round::Begun(Box::new(refusal(candidate, begun)))),
                None => Ok(Round::Failed),
            },
            Ok(Outcome::Failed(why)) => {
                self.proxy.report(candidate.worker, self.model(), why);
                self.decode.tried.push(candidate.worker.id.0);
                self.decode.failed_why = Some(why);
                Ok(Round::Failed)
            }
            Ok(Outcome::TimedOut(error)) => {
                // The engine that keeps the other one waiting is at fault.
                let late = if is_prefilled { candidate } else { by };
                self.proxy.choose.report_failure(late.worker, self.model(), "timeout");
                Err(error)
            }
            Err(end) => self.prefill_ended(by, end),
        }
    }

    /// Sends the prefill half.
    fn start_prefill(
        &mut self,
        chosen: &mut Chosen,
        by: Candidate,
        engine: &Arc<Engine>,
        body: &Bytes,
    ) -> (PrefillTask, PrefillUsage) {
        self.prefill.left -= 1;
        let usage: PrefillUsage = OnceLock::new().into();
        let half = PrefillHalf {
            engine: Arc::clone(engine),
            request: self.prefill.request(body),
            path: self.call.path,
            deadline: self.prefill.first_byte,
            by,
            booking: chosen.prefill.booking.take(),
            observer: chosen.observer.take(),
            usage: Arc::clone(&usage),
        };
        (PrefillTask(tokio::spawn(half.run())), usage)
    }

    /// The prefill half ended before the decode engine's first byte, and not well.
    fn prefill_ended(&mut self, by: Candidate, end: PrefillEnd) -> Result<Round, ApiError> {
        match end {
            PrefillEnd::Failed("timeout", error) => {
                self.proxy.choose.report_failure(by.worker, self.model(), "timeout");
                Err(error)
            }
            PrefillEnd::Failed(why, error) => {
                self.proxy.choose.report_failure(by.worker, self.model(), why);
                self.prefill.tried.push(by.worker.id.0);
                self.prefill.failed_why = Some(why);
                self.prefill.failure = Some(Err(error));
                Ok(Round::Failed)
            }
            PrefillEnd::Refused(begun) => Ok(Round::Begun(Box::new(refusal(by, *begun)))),
            // The caller goes on waiting for the other half.
            PrefillEnd::Done => Ok(Round::Failed),
        }
    }

    /// The first candidate that may be tried.
    fn next(&self, attempts: &Attempts, candidates: &[Candidate]) -> Option<(Candidate, Arc<Engine>)> {
        let now = Instant::now();
        let left = candidates.iter().filter(|candidate| !attempts.tried.contains(&candidate.worker.id.0));
        let engines = &self.proxy.engines;
        let mut known = left.filter_map(|candidate| Some((*candidate, engines.get(candidate.worker.id.0)?)));
        known.find(|(_, engine)| engine.is_usable(now))
    }

    /// The body for both engines; `None` = the prefill engine does not say where its bootstrap server is.
    fn body_for(&self, body: &Bytes, by: Candidate, engine: &Engine) -> Result<Option<Bytes>, ApiError> {
        let facts = engine.facts();
        let (Some(port), Some(host)) = (facts.bootstrap_port, engine.base().host()) else { return Ok(None) };
        let (count, is_list) = prompts(&self.prepared.facts);
        let room = || room(rand::random(), by.worker.rank.0, facts.ranks.len());
        let rooms: Vec<u64> = std::iter::repeat_with(room).take(count).collect();
        bootstrap_body(body, &Bootstrap { host, port, rooms: &rooms, is_list }).map(Some)
    }
}

/// A room from a random number. The prefill engine's data-parallel rank is the rest of the room divided by the number
/// of ranks (`--load-balance-method follow_bootstrap_room`, the default of prefill engines).
const fn room(random: u64, rank: u32, ranks: usize) -> u64 {
    let room = random & ROOM_MAX;
    match ranks as u64 {
        0 | 1 => room,
        ranks => {
            let room = room / ranks * ranks + rank as u64 % ranks;
            if room > ROOM_MAX { room - ranks } else { room }
        }
    }
}

/// The prefill half: its request, and what ends with it.
struct PrefillHalf {
    engine: Arc<Engine>,
    request: Request<BoxBody>,
    path: ApiPath,
    deadline: Instant,
    by: Candidate,
    booking: Option<Box<dyn Booking>>,
    observer: Option<Observer>,
    usage: PrefillUsage,
}

impl PrefillHalf {
    async fn run(mut self) -> PrefillEnd {
        let guard = self.engine.enter();
        let request = std::mem::replace(&mut self.request, Request::new(body_of(Bytes::new())));
        let response = match self.engine.send(request, self.deadline).await {
            Ok(response) => response,
            Err(error) => {
                let why = match error {
                    EngineError::TimedOut => "timeout",
                    EngineError::Connect { .. } => "refused",
                    _ => "broken",
                };
                return self.failed(why, error.api_error());
            }
        };
        let (parts, rest) = response.into_parts();
        let status = parts.status;
        if status.is_server_error() {
            let why = if status == StatusCode::SERVICE_UNAVAILABLE { "unavailable" } else { "prefill" };
            return self.failed(why, prefill_failed(format!("the prefill engine answered {}", status.as_u16())));
        }
        if !status.is_success() {
            return PrefillEnd::Refused(Box::new(Begun { parts, first: None, rest, guard }));
        }
        let kind = parts.headers.get(CONTENT_TYPE).map(HeaderValue::as_bytes).unwrap_or_default();
        let mut reader = UsageReader::new(self.path, kind.starts_with(b"text/event-stream"));
        match tokio::time::timeout_at(self.deadline.into(), drain(rest, &mut reader)).await {
            Err(_) => return self.failed("timeout", EngineError::TimedOut.api_error()),
            Ok(Err(why)) => return self.failed("prefill", prefill_failed(why.to_owned())),
            Ok(Ok(())) => {}
        }
        self.engine.succeeded();
        if let Some(booking) = &mut self.booking {
            booking.prefill_complete();
        }
        if let Some(usage) = reader.finish() {
            if let Some(observer) = self.observer.take() {
                observer(self.by.worker, &usage);
            }
            // Nobody else sets it.
            let _ = self.usage.set(usage);
        }
        PrefillEnd::Done
    }

    fn failed(&self, why: &'static str, error: ApiError) -> PrefillEnd {
        self.engine.failed(Instant::now(), &error.message);
        PrefillEnd::Failed(why, error)
    }
}

fn prefill_failed(text: String) -> ApiError {
    ApiError::engine(StatusCode::BAD_GATEWAY, "prefill_failed", text)
}

/// Reads a reply to its end.
async fn drain(mut rest: Incoming, reader: &mut UsageReader) -> Result<(), &'static str> {
    let mut is_first = true;
    while let Some(frame) = rest.frame().await {
        let frame: Frame<Bytes> = frame.map_err(|_| "the prefill engine ended its reply before its end")?;
        let Ok(data) = frame.into_data() else { continue };
        if std::mem::take(&mut is_first) && data.starts_with(ERROR_EVENT) {
            return Err("the prefill engine answered with an error");
        }
        reader.feed(&data);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_room_has_63_bits_and_names_the_rank() {
        assert_eq!(room(u64::MAX, 3, 1), ROOM_MAX);
        for (random, rank, ranks) in [(0, 0, 2), (u64::MAX, 7, 8), (12_345, 2, 3), (u64::MAX, 4, 5), (ROOM_MAX, 6, 7)] {
            let room = room(random, rank, ranks);
            assert!(room <= ROOM_MAX && room % ranks as u64 == u64::from(rank), "{random} {rank} {ranks}: {room}");
        }
    }
}
