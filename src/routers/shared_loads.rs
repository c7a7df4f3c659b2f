//! The loads of this daemon as other routers share them: workers by their ids, which all routers have in common, instead
//! of by their places, which are this daemon's alone.

use std::sync::Arc;

use rustc_hash::FxHashMap;

use super::values::{Gauge, OriginId};
use crate::fleet::Fleet;
use crate::ids::{Worker, WorkerIndex};
use crate::limits::ORIGINS_MAX;
use crate::load::{ChangesSeen, Loads, OriginPlace};
use crate::requests::OthersLoads;

/// The loads, and the workers that this router knows.
#[derive(Debug)]
pub(super) struct SharedLoads {
    loads: Arc<Loads>,
    others: OthersLoads,
    fleet: Arc<Fleet>,
    /// The version of the fleet's table that `indexes` and `by_place` are of; `None` = of none yet.
    version: Option<u64>,
    indexes: FxHashMap<Worker, WorkerIndex>,
    by_place: Vec<Option<Worker>>,
    seen: ChangesSeen,
    /// The origins that have named themselves, by place.
    named: [OriginId; ORIGINS_MAX],
    /// Reused memory.
    places: Vec<u32>,
}

/// What changed in the fleet.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct FleetChange {
    /// Workers that joined, or came back.
    pub(super) joined: Vec<Worker>,
    /// Workers that left.
    pub(super) left: Vec<Worker>,
}

impl SharedLoads {
    pub(super) fn new(loads: &Arc<Loads>, others: &OthersLoads, fleet: &Arc<Fleet>) -> Self {
        Self {
            loads: Arc::clone(loads),
            others: others.clone(),
            fleet: Arc::clone(fleet),
            version: None,
            indexes: FxHashMap::default(),
            by_place: Vec::new(),
            seen: ChangesSeen::default(),
            named: [OriginId::default(); ORIGINS_MAX],
            places: Vec::new(),
        }
    }

    /// Takes over the fleet's table if it changed since the last call.
    pub(super) fn follow(&mut self) -> FleetChange {
        let table = self.fleet.load();
        if self.version == Some(table.version) {
            return FleetChange::default();
        }
        self.version = Some(table.version);
        let indexes: FxHashMap<_, _> = table.workers.iter().map(|record| (record.worker, record.index)).collect();
        let joined = indexes.iter().filter(|(worker, index)| self.indexes.get(worker) != Some(index));
        let left = self.indexes.keys().filter(|worker| !indexes.contains_key(worker));
        let change = FleetChange { joined: joined.map(|(worker, _)| *worker).collect(), left: left.copied().collect() };
        self.by_place.clear();
        for record in &table.workers {
            let place = record.index.place();
            if self.by_place.len() <= place {
                self.by_place.resize(place + 1, None);
            }
            self.by_place[place] = Some(record.worker);
        }
        self.indexes = indexes;
        change
    }

    /// Names the workers whose load changed since the last call; a worker may be named more than once.
    pub(super) fn changed(&mut self, mut note: impl FnMut(Worker)) {
        self.places.clear();
        if self.loads.changed_since(&mut self.seen, &mut self.places) {
            let worker = |place: &u32| self.by_place.get(*place as usize).copied().flatten();
            self.places.iter().filter_map(worker).for_each(note);
        } else {
            self.indexes.keys().for_each(|worker| note(*worker));
        }
    }

    /// What this router's bookings add to a worker; nothing to one that it does not know.
    pub(super) fn own_gauge(&self, worker: Worker, now_ns: u64) -> Gauge {
        self.indexes.get(&worker).map_or_else(Gauge::default, |index| self.loads.own_gauge(*index, now_ns))
    }

    /// Sets what an origin adds to a worker, as of a time. `false` = this router does not know the worker.
    pub(super) fn set(&mut self, (place, of): (u8, OriginId), worker: Worker, gauge: Gauge, at_ns: u64) -> bool {
        if let Some(named) = self.named.get_mut(usize::from(place)).filter(|named| **named != of) {
            *named = of;
            self.loads.name_origin(OriginPlace(place), of.0);
        }
        let index = self.indexes.get(&worker);
        index.is_some_and(|index| self.others.set(OriginPlace(place), *index, gauge, at_ns))
    }

    /// Takes away all that an origin adds.
    pub(super) fn drop_all(&self, place: u8) {
        self.others.drop_all(OriginPlace(place));
    }
}
