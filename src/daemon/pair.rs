//! One request, two workers: one that prefills the prompt and one that decodes it.

use std::sync::atomic::Ordering;

use super::service::CoreService;
use crate::error::Result;
use crate::ids::SpaceId;
use crate::limits::PREFILL_BOOKING_SUFFIX;
use crate::load::{BookingRef, SessionId};
use crate::metrics::CoreCounter;
use crate::route::{
    BookingRequest, Bypass, Decision, Half, Mode, Overrides, ReplyNotes, RouteRequest, decode_overrides, prefill_pool,
};
use crate::serve::Routed;

/// The name under which the prefill half of a request is booked, written over `name`.
pub(super) fn prefill_name<'a>(request_id: &str, name: &'a mut String) -> &'a str {
    name.clear();
    name.push_str(request_id);
    name.push_str(PREFILL_BOOKING_SUFFIX);
    name
}

impl CoreService {
    /// Decides and books who prefills, then who decodes; or one worker for both, where nobody is there to prefill, or
    /// the policy says that it is not worth the way.
    pub(super) fn route_pair(
        &mut self,
        session: SessionId,
        request: &RouteRequest<'_>,
        decision: &mut Decision,
    ) -> Result<Routed> {
        let alone = RouteRequest { disaggregate: false, ..*request };
        let pool = prefill_pool(&self.shared.fleet.load(), request.space)?;
        let Some(pool) = pool else { return self.route_alone(session, &alone, ReplyNotes::PREFILL_NOBODY, decision) };
        let mut name = String::new();
        let name = request.book.map(|book| prefill_name(book.request_id, &mut name));
        let prefills = prefill_half(&alone, pool, name);
        if self.bypasses(&alone, &prefills, decision)? {
            return self.route_alone(session, &alone, ReplyNotes::PREFILL_LOCAL, decision);
        }
        let mut prefill = Box::<Decision>::default();
        if let busy @ Routed::Busy(_) = self.decide_and_book(session, &prefills, &mut prefill)? {
            return Ok(busy);
        }
        if prefill.candidates.is_empty() {
            return self.route_alone(session, &alone, ReplyNotes::PREFILL_NOBODY, decision);
        }
        let counter = (prefill.mode == Mode::RoundRobin).then(|| self.scratch.request_facts().round_robin_counter);
        let decodes = RouteRequest { overrides: decode_overrides(&alone.overrides), ..alone };
        let decided = self.decide_and_book(session, &decodes, decision);
        if matches!(decided, Ok(Routed::Decided)) && !decision.candidates.is_empty() {
            self.metrics.counters.bump(CoreCounter::Pairs);
            decision.prefill = Some(prefill);
        } else if let Some(handle) = prefill.booking {
            // Nobody decodes, or not yet: what would be prefilled would be for nobody.
            self.shared.loads.free(session, BookingRef::Handle(handle), self.shared.now_ns());
            // Somebody may have found it busy meanwhile.
            self.shared.room.made_room();
            if let Some(counter) = counter {
                self.return_round_robin(pool, counter);
            }
        }
        decided
    }

    /// Sets a pool's round-robin counter back to `counter`, unless another request has advanced it meanwhile.
    fn return_round_robin(&self, pool: SpaceId, counter: u64) {
        if let Some(counters) = self.shared.round_robin_counters.get(pool.0 as usize) {
            // Relaxed: the counter publishes no other memory. If the exchange fails, one worker was passed over.
            let _ = counters.compare_exchange(counter + 1, counter, Ordering::Relaxed, Ordering::Relaxed);
        }
    }

    /// One worker for both halves; the reply says why.
    fn route_alone(
        &mut self,
        session: SessionId,
        request: &RouteRequest<'_>,
        why: ReplyNotes,
        decision: &mut Decision,
    ) -> Result<Routed> {
        let decided = self.decide_and_book(session, request, decision)?;
        if decided == Routed::Decided {
            let is_local = why == ReplyNotes::PREFILL_LOCAL;
            self.metrics.counters.bump(if is_local { CoreCounter::PairsLocal } else { CoreCounter::PairsNobody });
            decision.notes.insert(why);
        }
        Ok(decided)
    }

    /// Whether who would decode, unpaired, is to prefill too. Nothing is booked, and nobody's turn is taken.
    fn bypasses(
        &mut self,
        alone: &RouteRequest<'_>,
        prefills: &RouteRequest<'_>,
        decision: &mut Decision,
    ) -> Result<bool> {
        let policy = self.shared.policies.load().of(alone.space).disaggregation;
        if policy.bypass == Bypass::Off {
            return Ok(false);
        }
        self.decide(&prefills.as_question(), decision)?;
        let Some(prefill) = Half::chosen(self.scratch.observation(), decision) else { return Ok(false) };
        self.decide(&alone.as_question(), decision)?;
        let Some(decode) = Half::chosen(self.scratch.observation(), decision) else { return Ok(false) };
        Ok(policy.bypasses(&decode, &prefill))
    }
}

/// What is asked of the pool that prefills. Whom the request names, it names among those that decode.
fn prefill_half<'a>(alone: &RouteRequest<'a>, pool: SpaceId, name: Option<&'a str>) -> RouteRequest<'a> {
    let book = alone.book.zip(name).map(|(book, request_id)| BookingRequest { request_id, ..book });
    // Where the other half is pinned this one is not.
    let mode = alone.overrides.mode.filter(|mode| *mode != Mode::Direct);
    let overrides = Overrides { mode, ..alone.overrides };
    RouteRequest { space: pool, book, overrides, pin: None, allow: None, ..*alone }
}
