//! Spans of the facts of decisions and bookings. Pure but for the ids, which are drawn at random.

use rand::{RngExt, SeedableRng};
use rand_xoshiro::Xoshiro256PlusPlus;
use rustc_hash::FxHashMap;

use super::exemplars::{Exemplar, Exemplars};
use super::otlp::{Event, KeyValue, Span, SpanKind, Status, StatusCode};
use super::traced_decision::{TracedDecision, TracedOutcome, TracedWorker};
use crate::fleet::FleetTable;
use crate::ids::Worker;
use crate::limits::TRACE_PURGE_EVERY_MS;
use crate::load::{EndReason, EndedBooking};
use crate::protocol::BookingHandle;

/// Turns times of the bookings' clock into those of the Unix clock.
#[derive(Clone, Copy, Debug)]
pub(crate) struct UnixClock {
    /// The Unix time at 0 of the bookings' clock, nanoseconds.
    pub(crate) began_unix_ns: u64,
}

impl UnixClock {
    const fn at(self, ns: u64) -> u64 {
        self.began_unix_ns.saturating_add(ns)
    }
}

/// A booking whose span is to be made when it ends.
#[derive(Clone, Copy, Debug)]
struct OpenBooking {
    /// Its slot, as its handle has it.
    slot: u64,
    trace_id: u128,
    parent: u64,
    booked_at_ns: u64,
    /// The same by the Unix clock, as the span of its decision has it: the clock may be set before the booking ends.
    booked_at_unix_ns: u64,
    worker: Worker,
}

/// Makes spans. It remembers the bookings of traced requests until they end.
#[derive(Debug)]
pub(crate) struct SpanMaker {
    rng: Xoshiro256PlusPlus,
    /// By the generation of its handle, which no other booking of the daemon's run has.
    open: FxHashMap<u64, OpenBooking>,
    open_max: usize,
    /// A booking is forgotten at this age: its end was lost.
    age_ns_max: u64,
    /// When such bookings were last looked for.
    purged_ns: u64,
}

impl SpanMaker {
    /// Remembers at most `open_max` bookings, each for at most `age_ns_max`.
    pub(crate) fn new(open_max: usize, age_ns_max: u64) -> Self {
        let rng = Xoshiro256PlusPlus::seed_from_u64(rand::rng().random());
        Self { rng, open: FxHashMap::default(), open_max, age_ns_max, purged_ns: 0 }
    }

    /// An id that is not 0.
    fn span_id(&mut self) -> u64 {
        self.rng.random_range(1..=u64::MAX)
    }

    /// The spans of a decision: `route`, and `queue` if the request waited. `false` = too many bookings are open to have a
    /// span made of this one, too.
    pub(crate) fn decided(
        &mut self,
        decision: &TracedDecision,
        (clock, fleet, exemplars): (UnixClock, &FleetTable, &Exemplars),
        spans: &mut Vec<Span>,
    ) -> bool {
        let trace_id =
            decision.context.map_or_else(|| self.rng.random_range(1..=u128::MAX), |context| context.trace_id);
        let (route_id, began_ns) = (self.span_id(), decision.began_ns.saturating_sub(decision.waited_ns));
        let exemplar = |ns: u64, span_id| Exemplar {
            trace_id,
            span_id,
            seconds: ns as f64 * 1e-9,
            at_unix_ns: clock.at(decision.ended_ns),
        };
        if !matches!(decision.outcome, TracedOutcome::Refused(_)) {
            let ns = decision.ended_ns.saturating_sub(decision.began_ns);
            exemplars.decisions.note(ns, exemplar(ns, route_id));
        }
        spans.push(Span {
            parent_span_id: decision.context.map_or_else(Vec::new, |context| bytes_of(context.span_id)),
            kind: SpanKind::Server.into(),
            attributes: attributes(decision, fleet),
            status: status(decision.outcome),
            ..span("route", (trace_id, route_id), (clock.at(began_ns), clock.at(decision.ended_ns)))
        });
        if decision.waited_ns > 0 {
            let queue_id = self.span_id();
            exemplars.waits.note(decision.waited_ns / 1000, exemplar(decision.waited_ns, queue_id));
            spans.push(Span {
                parent_span_id: bytes_of(route_id),
                kind: SpanKind::Internal.into(),
                ..span("queue", (trace_id, queue_id), (clock.at(began_ns), clock.at(decision.began_ns)))
            });
        }
        let (Some(booking), Some(chosen)) = (decision.booking, decision.chosen) else { return true };
        self.purge_if_full(decision.ended_ns);
        if self.open.len() >= self.open_max {
            return false;
        }
        let open = OpenBooking {
            slot: booking.slot,
            trace_id,
            parent: route_id,
            booked_at_ns: decision.began_ns,
            booked_at_unix_ns: clock.at(decision.began_ns),
            worker: chosen.worker,
        };
        self.open.insert(booking.generation, open);
        true
    }

    /// Makes room by forgetting bookings that are too old, which takes a look at each.
    fn purge_if_full(&mut self, now_ns: u64) {
        let is_due = now_ns.saturating_sub(self.purged_ns) >= TRACE_PURGE_EVERY_MS * 1_000_000;
        if self.open.len() >= self.open_max && is_due {
            let age_ns_max = self.age_ns_max;
            self.open.retain(|_, open| now_ns.saturating_sub(open.booked_at_ns) < age_ns_max);
            self.purged_ns = now_ns;
        }
    }

    /// The bookings whose ends it waits for.
    pub(crate) fn open(&self) -> Vec<BookingHandle> {
        self.open.iter().map(|(generation, open)| BookingHandle { slot: open.slot, generation: *generation }).collect()
    }

    /// Forgets bookings whose ends were lost, by the generations of their handles.
    pub(crate) fn forget(&mut self, lost: &[u64]) {
        for generation in lost {
            self.open.remove(generation);
        }
    }

    /// The span of a booking that ended; `None` = its decision was lost.
    pub(crate) fn ended(&mut self, ended: &EndedBooking, fleet: &FleetTable) -> Option<Span> {
        let OpenBooking { trace_id, parent, booked_at_unix_ns, worker, .. } = self.open.remove(&ended.booking)?;
        let at = |after_ns: u64| booked_at_unix_ns.saturating_add(after_ns);
        // The gateway may have moved it.
        let worker = fleet.worker(ended.worker).map_or(worker, |record| record.worker);
        let is_failed = !matches!(ended.reason, EndReason::Freed | EndReason::Superseded);
        let first_token = |ns| Event { at_unix_ns: at(ns), name: "prefill_complete".to_owned() };
        Some(Span {
            parent_span_id: bytes_of(parent),
            kind: SpanKind::Internal.into(),
            attributes: vec![
                KeyValue::text("kvrouted.worker", name_of(worker)),
                KeyValue::text("kvrouted.end", reason_name(ended.reason)),
                KeyValue::number("kvrouted.prefill_tokens", ended.prefill_tokens),
                KeyValue::number("kvrouted.cached_tokens", ended.cached_tokens),
                KeyValue::number("kvrouted.output_tokens", u64::from(ended.output_tokens)),
            ],
            events: ended.first_token_ns.map(first_token).into_iter().collect(),
            status: is_failed.then(|| failed(reason_name(ended.reason))),
            ..span("booking", (trace_id, self.span_id()), (at(0), at(ended.end_ns)))
        })
    }
}

fn span(name: &str, (trace_id, span_id): (u128, u64), (start_unix_ns, end_unix_ns): (u64, u64)) -> Span {
    Span {
        trace_id: trace_id.to_be_bytes().to_vec(),
        span_id: bytes_of(span_id),
        name: name.to_owned(),
        start_unix_ns,
        end_unix_ns: end_unix_ns.max(start_unix_ns),
        ..Span::default()
    }
}

fn bytes_of(span_id: u64) -> Vec<u8> {
    span_id.to_be_bytes().to_vec()
}

/// A worker as the gateway's header names it.
fn name_of(worker: Worker) -> String {
    format!("{}/{}", worker.id.0, worker.rank.0)
}

fn attributes(decision: &TracedDecision, fleet: &FleetTable) -> Vec<KeyValue> {
    let (outcome, reason) = match decision.outcome {
        TracedOutcome::Booked => ("booked", None),
        TracedOutcome::Chosen => ("chosen", None),
        TracedOutcome::NoWorker(kind) => ("no_worker", Some(kind)),
        TracedOutcome::Refused(kind) => ("refused", Some(kind)),
    };
    let mut attributes = vec![KeyValue::text("kvrouted.outcome", outcome)];
    attributes.extend(reason.map(|kind| KeyValue::text("error.type", kind.name())));
    if let Some(space) = fleet.space(decision.space) {
        attributes.push(KeyValue::text("kvrouted.model", space.model.as_str()));
        attributes.push(KeyValue::text("kvrouted.namespace", space.namespace.as_str()));
        attributes.push(KeyValue::text("kvrouted.pool", space.role.name()));
    }
    attributes.push(KeyValue::number("kvrouted.prompt_tokens", decision.prompt_tokens));
    if !matches!(decision.outcome, TracedOutcome::Refused(_)) {
        attributes.push(KeyValue::text("kvrouted.mode", decision.mode.name()));
        attributes.push(KeyValue::number("kvrouted.prompt_blocks", u64::from(decision.prompt_blocks)));
        attributes.push(KeyValue::number("kvrouted.eligible_workers", u64::from(decision.eligible)));
    }
    if let Some(TracedWorker { worker, overlap, trust }) = decision.chosen {
        attributes.push(KeyValue::text("kvrouted.worker", name_of(worker)));
        attributes.push(KeyValue::number("kvrouted.overlap_blocks", u64::from(overlap.total())));
        attributes.push(KeyValue::number("kvrouted.overlap_device_blocks", u64::from(overlap.device)));
        attributes.push(KeyValue::text("kvrouted.trust", trust.name()));
    }
    if let Some(TracedWorker { worker, overlap, .. }) = decision.prefill {
        attributes.push(KeyValue::text("kvrouted.prefill_worker", name_of(worker)));
        attributes.push(KeyValue::number("kvrouted.prefill_overlap_blocks", u64::from(overlap.total())));
    }
    attributes
}

fn status(outcome: TracedOutcome) -> Option<Status> {
    match outcome {
        TracedOutcome::Booked | TracedOutcome::Chosen => None,
        TracedOutcome::NoWorker(kind) | TracedOutcome::Refused(kind) => Some(failed(kind.name())),
    }
}

fn failed(why: &str) -> Status {
    Status { message: why.to_owned(), code: StatusCode::Error.into() }
}

const fn reason_name(reason: EndReason) -> &'static str {
    match reason {
        EndReason::Freed => "freed",
        EndReason::Superseded => "superseded",
        EndReason::TooOld => "too_old",
        EndReason::SessionGone => "session_gone",
        EndReason::WorkerLeft => "worker_left",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Kind;
    use crate::ids::{SpaceId, TierBlocks};
    use crate::protocol::{Mode, TraceContext};
    use crate::traces::otlp::Value;
    use crate::trust::TrustLevel;

    const CLOCK: UnixClock = UnixClock { began_unix_ns: 1_000_000 };
    const CONTEXT: TraceContext = TraceContext { trace_id: 0xabc, span_id: 0xdef, flags: 1 };

    const fn handle(generation: u64) -> BookingHandle {
        BookingHandle { slot: 3, generation }
    }

    fn decision() -> TracedDecision {
        let overlap = TierBlocks { device: 2, host: 1, ..TierBlocks::default() };
        TracedDecision {
            context: Some(CONTEXT),
            space: SpaceId(0),
            began_ns: 500,
            waited_ns: 0,
            ended_ns: 700,
            outcome: TracedOutcome::Booked,
            mode: Mode::Kv,
            prompt_tokens: 40,
            prompt_blocks: 5,
            eligible: 3,
            chosen: Some(TracedWorker { worker: Worker::new(7, 1), overlap, trust: TrustLevel::Exact }),
            prefill: None,
            booking: Some(handle(9)),
        }
    }

    fn made(maker: &mut SpanMaker, decision: &TracedDecision) -> (Vec<Span>, bool) {
        let mut spans = Vec::new();
        let has_room = maker.decided(decision, (CLOCK, &FleetTable::default(), &Exemplars::default()), &mut spans);
        (spans, has_room)
    }

    fn has(span: &Span, key: &str, value: Value) -> bool {
        let of_key = span.attributes.iter().find(|attribute| attribute.key == key);
        of_key.and_then(|attribute| attribute.value.as_ref()?.value.clone()) == Some(value)
    }

    #[test]
    fn a_decision_joins_the_callers_trace_and_its_booking_follows() {
        let mut maker = SpanMaker::new(8, u64::MAX);
        let (spans, _) = made(&mut maker, &decision());
        let [route] = &spans[..] else { panic!("{spans:?}") };
        assert_eq!((&*route.name, route.kind), ("route", SpanKind::Server as i32));
        assert_eq!((&route.trace_id, &route.parent_span_id), (&0xabc_u128.to_be_bytes().to_vec(), &bytes_of(0xdef)));
        assert_eq!((route.start_unix_ns, route.end_unix_ns, &route.status), (1_000_500, 1_000_700, &None));
        assert!(has(route, "kvrouted.worker", Value::Text("7/1".into())));
        assert!(has(route, "kvrouted.overlap_blocks", Value::Number(3)));
        let ended = EndedBooking { booking: 9, first_token_ns: Some(50), end_ns: 90, ..EndedBooking::default() };
        let booking = maker.ended(&ended, &FleetTable::default()).unwrap();
        assert_eq!((&booking.trace_id, &booking.parent_span_id), (&route.trace_id, &route.span_id));
        assert_eq!((booking.start_unix_ns, booking.end_unix_ns), (1_000_500, 1_000_590));
        assert_eq!(booking.events[0].at_unix_ns, 1_000_550);
        assert!(has(&booking, "kvrouted.end", Value::Text("freed".into())));
        assert_eq!(maker.ended(&ended, &FleetTable::default()), None, "only once");
    }

    #[test]
    fn a_request_that_waited_has_a_span_for_its_wait() {
        let waited = TracedDecision { waited_ns: 300, context: None, ..decision() };
        let (spans, _) = made(&mut SpanMaker::new(8, u64::MAX), &waited);
        let [route, queue] = &spans[..] else { panic!("{spans:?}") };
        assert!(route.parent_span_id.is_empty() && route.trace_id != [0; 16], "the trace begins here");
        assert_eq!((&*queue.name, &queue.parent_span_id, &queue.trace_id), ("queue", &route.span_id, &route.trace_id));
        assert_eq!((route.start_unix_ns, queue.start_unix_ns, queue.end_unix_ns), (1_000_200, 1_000_200, 1_000_500));
    }

    #[test]
    fn a_request_without_a_worker_is_an_error_and_a_booking_that_was_lost_too() {
        let mut maker = SpanMaker::new(8, u64::MAX);
        let outcome = TracedOutcome::NoWorker(Kind::AllFiltered);
        let (spans, _) = made(&mut maker, &TracedDecision { outcome, chosen: None, booking: None, ..decision() });
        assert_eq!(spans[0].status, Some(failed("all_filtered")));
        assert!(has(&spans[0], "error.type", Value::Text("all_filtered".into())));
        made(&mut maker, &decision());
        let ended = EndedBooking { booking: 9, reason: EndReason::TooOld, ..EndedBooking::default() };
        let booking = maker.ended(&ended, &FleetTable::default()).unwrap();
        assert_eq!((booking.status, booking.events.len()), (Some(failed("too_old")), 0));
    }

    #[test]
    fn bookings_whose_end_is_lost_are_forgotten_at_their_age() {
        const S: u64 = 1_000_000_000;
        let mut maker = SpanMaker::new(2, 10 * S);
        assert!([1, 2].iter().all(|booking| made(&mut maker, &booked(*booking, 5 * S)).1));
        let (spans, has_room) = made(&mut maker, &booked(3, 15 * S - 1));
        assert_eq!((spans.len(), has_room), (1, false), "the decision has its span all the same");
        assert!(!made(&mut maker, &booked(4, 15 * S)).1, "it has just looked at all of them");
        assert!(made(&mut maker, &booked(5, 16 * S)).1);
    }

    #[test]
    fn bookings_whose_ends_were_lost_make_room_at_once() {
        let mut maker = SpanMaker::new(2, u64::MAX);
        assert!([1, 2].iter().all(|booking| made(&mut maker, &booked(*booking, 0)).1));
        let mut open = maker.open();
        open.sort_by_key(|handle| handle.generation);
        assert_eq!(open, [handle(1), handle(2)]);
        maker.forget(&[2, 7]);
        assert_eq!(maker.open(), [handle(1)]);
        assert!(made(&mut maker, &booked(3, 1)).1);
    }

    fn booked(generation: u64, began_ns: u64) -> TracedDecision {
        TracedDecision { booking: Some(handle(generation)), began_ns, ended_ns: began_ns, ..decision() }
    }
}
