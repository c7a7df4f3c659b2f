//! What the bookings of other routers add to each worker: their gauges, and the sums that the load cells hold. Under the
//! bookings' lock.
//!
//! A cell holds the sum of this router's own part and the parts of all others, so a decision reads no more than with one
//! router. Where others have a part, the own part is kept here; elsewhere the cell is the own part. The sum means:
//!
//! * **Requests, decode blocks and tokens to prefill** add up. Others' tokens count in full until their router says that
//!   the prefill is done: a gauge does not say how long it takes by the model of the backlog.
//! * **Predicted work.** An engine prefills prompts in the order of their arrival, from all routers together. So a newcomer
//!   waits for the sum of all that is queued. Each router takes its first prefill for the running one. Of these, the one
//!   with the earliest start runs. It cannot have begun before the prefill ahead of it ended; gauges show such ends.
//!   A wrong guess makes the wait wrong by less than one running prefill. The wait is never shorter than that by one
//!   router's bookings alone.
//! * **Recent prefills** add up, and fade as own ones do.
//! * **Decode times, laws, back-off and the engine's report** are this router's alone.

use super::gauge::{Gauge, GaugeEffect, OriginPlace};
use super::load_cells::{LoadCells, PrefillWork, Record};
use super::prefill::PrefillLoad;
use super::recent_work::{RecentWork, recent_ms};
use crate::ids::WorkerIndex;
use crate::limits::{ORIGINS_MAX, ROUTER_BYTES, WORKERS_MAX};

/// The running prefill of a router is another than before if it began later by this, nanoseconds. When a prefill began is
/// known up to the time that a gauge takes from router to router, which varies by less.
const BEGAN_LATER_NS: u64 = 50_000_000;

/// What one router said of a worker.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Told {
    origin: OriginPlace,
    gauge: Gauge,
    set_at_ns: u64,
    /// When its running prefill ended last, as far as its gauges show; 0 = never.
    ended_ns: u64,
}

impl Told {
    /// Since when its running prefill runs, by this router's clock.
    const fn since_ns(&self) -> u64 {
        self.set_at_ns.saturating_sub(self.gauge.elapsed_ns)
    }

    /// Replaces its gauge.
    fn set(&mut self, gauge: &Gauge, now_ns: u64) {
        let before = std::mem::replace(self, Self { gauge: *gauge, set_at_ns: now_ns, ..*self });
        if before.gauge.prefills == 0 {
            return;
        }
        let began_later = self.since_ns() > before.since_ns().saturating_add(BEGAN_LATER_NS);
        if gauge.prefills == 0 {
            self.ended_ns = now_ns;
        } else if gauge.running_ns != before.gauge.running_ns || began_later {
            self.ended_ns = self.since_ns();
        }
    }
}

/// The sum of what all others add to a worker.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct OthersLoad {
    requests: u64,
    prefills: u64,
    prefill_tokens: u64,
    decode_parts: u64,
    /// All that is queued; and of the routers' running prefills the one with the earliest start.
    work: PrefillWork,
    /// When a running prefill ended last; 0 = never.
    ended_ns: u64,
    /// Of this, only the share counts.
    recent: RecentWork,
}

impl OthersLoad {
    fn add(&mut self, told: &Told) {
        let gauge = &told.gauge;
        self.requests += u64::from(gauge.requests);
        self.prefills += u64::from(gauge.prefills);
        self.prefill_tokens += gauge.prefill_tokens;
        self.decode_parts += gauge.decode_parts;
        self.ended_ns = self.ended_ns.max(told.ended_ns);
        let (queued_ns, running_ns, since_ns) = (gauge.queued_ns, gauge.running_ns, told.since_ns());
        self.work = self.work.beside(&PrefillWork { queued_ns, running_ns, since_ns });
        let (prefill_share, at_ms) = (gauge.recent_share, recent_ms(told.set_at_ns));
        self.recent = self.recent.beside(&RecentWork { prefill_share, at_ms, ..RecentWork::default() });
    }

    /// Whether another router has a prefill in progress on the worker.
    pub(super) const fn has_prefills(&self) -> bool {
        self.prefills > 0
    }

    /// The predicted time of all prefills in progress, beside own ones, of which the first ended last at `own_ended_ns`.
    pub(super) fn work_beside(&self, own: PrefillWork, own_ended_ns: u64) -> PrefillWork {
        let all = own.beside(&self.work);
        if all.queued_ns == 0 {
            return all;
        }
        PrefillWork { since_ns: all.since_ns.max(own_ended_ns).max(self.ended_ns), ..all }
    }

    /// The load of a worker beside the own part.
    fn beside(&self, own: &Record) -> Record {
        let PrefillLoad { mut backlog, work, ended_ns, .. } = own.prefill;
        backlog.tokens = backlog.tokens.saturating_add(self.prefill_tokens);
        backlog.all_modelled &= self.prefill_tokens == 0;
        Record {
            prefill: PrefillLoad { backlog, work: self.work_beside(work, ended_ns), ..own.prefill },
            decode_parts: own.decode_parts + self.decode_parts,
            requests: own.requests + self.requests,
            recent: own.recent.beside(&self.recent),
            ..*own
        }
    }
}

/// A worker of which others have said something.
#[derive(Debug)]
struct SharedWorker {
    worker: WorkerIndex,
    /// What this router's own bookings, reports and laws make of its load.
    own: Record,
    /// In the order of their first gauges.
    told: Vec<Told>,
    sum: OthersLoad,
}

impl SharedWorker {
    /// Sums up what the others said, after a change of that.
    fn sum_up(&mut self, cells: &LoadCells) -> GaugeEffect {
        let before = self.sum.beside(&self.own);
        self.sum = OthersLoad::default();
        self.told.iter().for_each(|told| self.sum.add(told));
        let load = self.sum.beside(&self.own);
        if load != before {
            cells.change(self.worker, |record| *record = load);
        }
        let numbers =
            |of: &Record| [of.prefill.backlog.tokens, of.decode_parts, of.requests, of.prefill.work.queued_ns];
        let has_fallen = numbers(&load).into_iter().zip(numbers(&before)).any(|(now, before)| now < before);
        if has_fallen { GaugeEffect::MadeRoom } else { GaugeEffect::Counted }
    }
}

// What is reserved for each router holds a gauge for each worker, and those of its messages beside it.
const _: () = assert!((size_of::<Told>() + size_of::<SharedWorker>()) * WORKERS_MAX <= ROUTER_BYTES as usize / 2);

/// What other routers said of all workers.
#[derive(Debug)]
pub(super) struct Others {
    /// By the worker's place; `None` = nothing.
    places: Vec<Option<Box<SharedWorker>>>,
    /// The numbers of the routers, by their places; 0 = none yet.
    numbers: [u64; ORIGINS_MAX],
}

impl Default for Others {
    fn default() -> Self {
        Self { places: Vec::new(), numbers: [0; ORIGINS_MAX] }
    }
}

impl Others {
    fn at(&self, worker: WorkerIndex) -> Option<&SharedWorker> {
        self.places.get(worker.place())?.as_deref().filter(|at| at.worker == worker)
    }

    /// What all others add to a worker.
    #[inline]
    pub(super) fn of(&self, worker: WorkerIndex) -> OthersLoad {
        self.at(worker).map_or_else(OthersLoad::default, |at| at.sum)
    }

    /// The own part of a worker's load, if it is not all of it.
    pub(super) fn own_of(&self, worker: WorkerIndex) -> Option<Record> {
        self.at(worker).map(|at| at.own)
    }

    /// As [`Loads::gauges_of`](super::Loads::gauges_of).
    pub(super) fn gauges_of(&self, worker: WorkerIndex) -> Vec<(OriginPlace, Gauge, u64)> {
        let told = self.at(worker).into_iter().flat_map(|at| &at.told);
        told.map(|told| (told.origin, told.gauge, told.set_at_ns)).collect()
    }

    /// Notes the number of the router at a place.
    pub(super) fn name(&mut self, origin: OriginPlace, number: u64) {
        if let Some(at) = self.numbers.get_mut(usize::from(origin.0)) {
            *at = number;
        }
    }

    /// The number of the router at a place; 0 = none yet.
    pub(super) fn number(&self, origin: OriginPlace) -> u64 {
        self.numbers.get(usize::from(origin.0)).copied().unwrap_or_default()
    }

    /// All workers of which others have said something are at places below this.
    pub(super) fn places(&self) -> usize {
        self.places.len()
    }

    /// Changes the own part of a worker's load. The caller holds the bookings' lock.
    #[inline]
    pub(super) fn change(&mut self, cells: &LoadCells, worker: WorkerIndex, change: impl FnOnce(&mut Record)) {
        match self.places.get_mut(worker.place()) {
            Some(Some(at)) if at.worker == worker => {
                change(&mut at.own);
                let load = at.sum.beside(&at.own);
                cells.change(worker, |record| *record = load);
            }
            _ => cells.change(worker, change),
        }
    }

    /// Sets the gauge of an origin, which is not zero and within its limits. `own` is the own part of the worker's load
    /// if no router has said anything of the worker yet. The caller holds the bookings' lock.
    pub(super) fn set(
        &mut self,
        cells: &LoadCells,
        (origin, worker): (OriginPlace, WorkerIndex),
        gauge: &Gauge,
        now_ns: u64,
        own: impl FnOnce() -> Record,
    ) -> GaugeEffect {
        if self.places.len() <= worker.place() {
            self.places.resize_with(worker.place() + 1, || None);
        }
        let at = self.places[worker.place()].get_or_insert_with(|| {
            Box::new(SharedWorker { worker, own: own(), told: Vec::new(), sum: OthersLoad::default() })
        });
        if let Some(told) = at.told.iter_mut().find(|told| told.origin == origin) {
            told.set(gauge, now_ns);
        } else {
            // There are few origins, and memory is reserved for each.
            at.told.reserve_exact(1);
            at.told.push(Told { origin, gauge: *gauge, set_at_ns: now_ns, ended_ns: 0 });
        }
        at.sum_up(cells)
    }

    /// Takes away what an origin said of the worker at a place, if it said anything. The caller holds the bookings' lock.
    pub(super) fn take(&mut self, cells: &LoadCells, place: usize, origin: OriginPlace) -> GaugeEffect {
        let Some(Some(at)) = self.places.get_mut(place) else { return GaugeEffect::Counted };
        let Some(told) = at.told.iter().position(|told| told.origin == origin) else { return GaugeEffect::Counted };
        at.told.swap_remove(told);
        let effect = at.sum_up(cells);
        if at.told.is_empty() {
            let worker = at.worker;
            self.forget(worker);
        }
        effect
    }

    /// Forgets what others said of a worker, and its own part.
    pub(super) fn forget(&mut self, worker: WorkerIndex) {
        if let Some(place) = self.places.get_mut(worker.place()) {
            drop(place.take_if(|at| at.worker == worker));
        }
    }
}
