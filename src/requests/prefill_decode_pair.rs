//! A prefill and decode pair: one request on two workers, one of which prefills the prompt and the other decodes.

use std::sync::atomic::Ordering;

use super::routing::RoutingService;
use super::service::Routed;
use crate::error::Result;
use crate::ids::SpaceId;
use crate::limits::PREFILL_BOOKING_SUFFIX;
use crate::load::{BookingRef, SessionId};
use crate::metrics::CoreCounter;
use crate::route::{
    Bypass, Decision, Half, Mode, ReplyNotes, RouteRequest, decode_overrides, prefill_pool, prefill_request,
};

/// The booking name of a request's prefill half, written into `name`.
pub(super) fn prefill_name<'a>(request_id: &str, name: &'a mut String) -> &'a str {
    name.clear();
    name.push_str(request_id);
    name.push_str(PREFILL_BOOKING_SUFFIX);
    name
}

impl RoutingService {
    /// Decides and books the worker that prefills, then the worker that decodes. One worker does both if no worker of
    /// the prefill pool is there, or if the policy says that a second worker does not pay.
    pub(super) fn route_pair(
        &mut self,
        session: SessionId,
        request: &RouteRequest<'_>,
        decision: &mut Decision,
    ) -> Result<Routed> {
        let alone = RouteRequest { disaggregate: false, ..*request };
        let pool = prefill_pool(self.loaded.fleet(&self.tables.fleet), request.space)?;
        let Some(pool) = pool else { return self.route_alone(session, &alone, ReplyNotes::PREFILL_NOBODY, decision) };
        let mut name = String::new();
        let name = request.book.map(|book| prefill_name(book.request_id, &mut name));
        let prefills = prefill_request(&alone, pool, name);
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
            // No worker decodes, or none yet: the prefill would be for nothing.
            self.tables.loads.free(session, BookingRef::Handle(handle), self.tables.now_ns());
            // Another request may have found that worker busy meanwhile.
            self.tables.queue.made_room();
            if let Some(counter) = counter {
                self.return_round_robin(pool, counter);
            }
        }
        decided
    }

    /// Sets a pool's round-robin counter back to `counter`, unless another request has advanced it meanwhile.
    fn return_round_robin(&self, pool: SpaceId, counter: u64) {
        if let Some(counters) = self.tables.round_robin_counters.get(pool.0 as usize) {
            // Relaxed: the counter publishes no other memory. If the exchange fails, one worker was passed over.
            let _ = counters.compare_exchange(counter + 1, counter, Ordering::Relaxed, Ordering::Relaxed);
        }
    }

    /// Decides one worker for both halves. The reply says why.
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

    /// Whether the policy wants the worker that would decode alone to prefill too. Books nothing and leaves the
    /// round-robin counters alone.
    fn bypasses(
        &mut self,
        alone: &RouteRequest<'_>,
        prefills: &RouteRequest<'_>,
        decision: &mut Decision,
    ) -> Result<bool> {
        let policy = self.loaded.policies().of(alone.space).disaggregation;
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
