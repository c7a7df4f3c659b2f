//! What one router's own bookings add to a worker, as the routers of one fleet tell each other.
//!
//! A router does not send its bookings one by one. It sends a worker's *gauge* whenever that has changed:
//!
//! * A gauge replaces the one before. A record that is lost or repeated cannot leave a phantom booking.
//! * Gauges are bounded by the number of workers, bookings are not.
//! * Each event of a booking shows in it: booked, first token, output progress, moved, freed.
//! * It says nothing about prompts. So a block counts once at each router that has it in flight.
//!
//! Failures and the engines' own reports are in no gauge: every router hears the engines itself.

use super::active::BLOCK_PARTS;
use super::loads::Loads;
use super::recent_work::{SHARE_MAX, recent_ms};
use crate::ids::{Worker, WorkerIndex};
use crate::limits::{BOOKINGS_MAX, GAUGE_NUMBER_MAX, GAUGE_WORK_NS_MAX, GAUGES_DROPPED_PER_LOCK_MAX, ORIGINS_MAX};
use crate::protocol::OtherLoad;

/// What one router's own bookings add to one worker, as of a moment.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Gauge {
    /// Requests in flight.
    pub requests: u32,
    /// Of these, requests whose prefill is in progress.
    pub prefills: u32,
    /// Tokens of those prefills, as booked.
    pub prefill_tokens: u64,
    /// Decode blocks, in parts of a block.
    pub decode_parts: u64,
    /// The predicted time of all prefills in progress, nanoseconds.
    pub queued_ns: u64,
    /// Of this, the time of the first one, which runs.
    pub running_ns: u64,
    /// For how long it has been running, nanoseconds.
    pub elapsed_ns: u64,
    /// The share of its time that prefills booked lately take, as
    /// [`RecentWork::prefill_share_at`](super::RecentWork::prefill_share_at) has it.
    pub recent_share: f32,
}

/// A smaller share of recent prefills is none, so that the gauge of a worker becomes zero some minutes after its last
/// request.
const SHARE_TOLD_MIN: f64 = 0.001;

impl Gauge {
    /// Whether it adds nothing.
    #[must_use]
    pub fn is_zero(&self) -> bool {
        let Self { requests, prefills, prefill_tokens, decode_parts, queued_ns, .. } = *self;
        requests == 0
            && prefills == 0
            && self.recent_share == 0.0
            && [prefill_tokens, decode_parts, queued_ns].iter().all(|number| *number == 0)
    }

    /// Decode blocks, rounded.
    #[must_use]
    pub const fn decode_blocks(&self) -> u64 {
        self.decode_parts.saturating_add(BLOCK_PARTS / 2) / BLOCK_PARTS
    }

    /// The gauge within its limits, so that sums over all routers are exact. Without prefills it has no prefill work.
    pub(super) fn bounded(&self) -> Self {
        let of_prefills = |value: u64, value_max: u64| if self.prefills == 0 { 0 } else { value.min(value_max) };
        let bookings_max = BOOKINGS_MAX as u32;
        let queued_ns = of_prefills(self.queued_ns, GAUGE_WORK_NS_MAX);
        Self {
            requests: self.requests.min(bookings_max),
            prefills: self.prefills.min(bookings_max),
            prefill_tokens: of_prefills(self.prefill_tokens, GAUGE_NUMBER_MAX),
            decode_parts: self.decode_parts.min(GAUGE_NUMBER_MAX * BLOCK_PARTS),
            queued_ns,
            running_ns: self.running_ns.min(queued_ns),
            elapsed_ns: of_prefills(self.elapsed_ns, u64::MAX),
            // `max` first: it makes a zero of what is not a number.
            recent_share: self.recent_share.max(0.0).min(SHARE_MAX as f32),
        }
    }
}

/// What a gauge has changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use = "requests that wait must learn of freed capacity"]
pub enum GaugeEffect {
    /// Nothing: the worker has left, or the origin has no place.
    Refused,
    /// The worker has the same load as before, or more.
    Counted,
    /// Some part of a worker's load fell, so that a request that waits may find room.
    MadeRoom,
}

/// The place of a router among those whose gauges this one hears: 0 to [`ORIGINS_MAX`] − 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct OriginPlace(pub u8);

impl Loads {
    /// What this router's own bookings add to a worker; zero for a worker that has left. The gauges of other routers do
    /// not change it.
    #[must_use]
    pub fn own_gauge(&self, worker: WorkerIndex, now_ns: u64) -> Gauge {
        let ledger = self.ledger.lock();
        if !self.cells.is_of(worker) {
            return Gauge::default();
        }
        let own = ledger.own(&self.cells, worker);
        let share = own.recent.prefill_share_at(recent_ms(now_ns));
        Gauge {
            requests: u32::try_from(own.requests).unwrap_or(u32::MAX),
            decode_parts: own.decode_parts,
            recent_share: if share < SHARE_TOLD_MIN { 0.0 } else { share as f32 },
            ..ledger.prefills.gauge(worker, now_ns)
        }
    }

    /// Sets what another router's bookings add to a worker. A zero gauge takes it away. A gauge beyond its limits counts
    /// as much as they allow. The daemon calls it by [`OthersLoads`](crate::requests::OthersLoads).
    pub(crate) fn set_gauge(&self, origin: OriginPlace, worker: WorkerIndex, gauge: Gauge, now_ns: u64) -> GaugeEffect {
        let mut ledger = self.ledger.lock();
        if usize::from(origin.0) >= ORIGINS_MAX || !self.cells.is_of(worker) {
            return GaugeEffect::Refused;
        }
        ledger.set_gauge(&self.cells, (origin, worker), &gauge.bounded(), now_ns)
    }

    /// Takes away all that a router said, and returns whether that was anything. Bookings are let in between slices of
    /// workers. When it returns, the origin's place is free for another router.
    pub(crate) fn drop_gauges(&self, origin: OriginPlace) -> GaugeEffect {
        let (mut effect, mut from) = (GaugeEffect::Counted, 0_usize);
        loop {
            let mut ledger = self.ledger.lock();
            let places = ledger.others.places();
            let to = from.saturating_add(GAUGES_DROPPED_PER_LOCK_MAX).min(places);
            for place in from..to {
                if ledger.others.take(&self.cells, place, origin) == GaugeEffect::MadeRoom {
                    effect = GaugeEffect::MadeRoom;
                }
            }
            if to == places {
                return effect;
            }
            from = to;
        }
    }

    /// What each of the other routers adds to a worker, by its last gauge, and when that came.
    #[must_use]
    pub fn gauges_of(&self, worker: WorkerIndex) -> Vec<(OriginPlace, Gauge, u64)> {
        self.ledger.lock().others.gauges_of(worker)
    }

    /// Notes the number of the router whose gauges have this place, for people.
    pub(crate) fn name_origin(&self, origin: OriginPlace, number: u64) {
        self.ledger.lock().others.name(origin, number);
    }

    /// Adds what each of the other routers adds to a worker to `listed`, by its last gauge.
    pub(crate) fn list_others(&self, (index, worker): (WorkerIndex, Worker), now_ns: u64, listed: &mut Vec<OtherLoad>) {
        let ledger = self.ledger.lock();
        let told = ledger.others.gauges_of(index).into_iter();
        listed.extend(told.map(|(origin, gauge, set_at_ns)| OtherLoad {
            worker,
            origin: ledger.others.number(origin),
            age_ms: now_ns.saturating_sub(set_at_ns) / 1_000_000,
            requests: gauge.requests,
            prefill_tokens: gauge.prefill_tokens,
            decode_blocks: gauge.decode_blocks(),
        }));
    }
}
