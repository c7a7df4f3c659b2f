//! The fleet table: every space and worker, published as a whole, and the allocation of places in it.

use std::collections::BTreeSet;
use std::sync::{Arc, Weak};

use arc_swap::ArcSwap;
use parking_lot::Mutex;

use super::cells::{SchemeCell, TrustCell};
use crate::endpoint::Endpoint;
use crate::ids::{ShardId, SnapshotProposal, SpaceId, Worker, WorkerIndex, WorkerSlot};
use crate::limits::WORKERS_MAX;
use crate::protocol::{DeviceClass, PoolRole, WorkerState};
use crate::sync::{AtomicU64, Ordering};
use crate::trust::Trust;

/// The source of a worker's events.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EventSource {
    /// ZeroMQ endpoint of its PUB socket, as we connect to it.
    pub endpoint: Endpoint,
    /// ZeroMQ endpoint of its replay ROUTER socket.
    pub replay: Option<Endpoint>,
    /// Subscription prefix; empty = everything.
    pub topic: String,
    /// Where the engine itself sends snapshots of its blocks; `None` = it does not, or they are not to be used.
    pub snapshots: Option<SnapshotSource>,
}

/// Where an engine sends snapshots of its blocks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SnapshotSource {
    /// The proposal that they follow.
    pub proposal: SnapshotProposal,
    /// ZeroMQ endpoint of its snapshot ROUTER socket.
    pub endpoint: Endpoint,
}

impl EventSource {
    /// The source of the rank `ranks` ranks later. `None` if an endpoint has no port, or if a sum is not a port.
    #[must_use]
    pub fn of_rank(&self, ranks: u32) -> Option<Self> {
        let replay = match &self.replay {
            Some(replay) => Some(replay.of_rank(ranks)?),
            None => None,
        };
        let snapshots = match &self.snapshots {
            Some(of) => Some(SnapshotSource { endpoint: of.endpoint.of_rank(ranks)?, ..of.clone() }),
            None => None,
        };
        Some(Self { endpoint: self.endpoint.of_rank(ranks)?, replay, topic: self.topic.clone(), snapshots })
    }
}

/// A space: prompts and blocks of one model, namespace and pool, which may be compared.
#[derive(Clone, Debug)]
pub struct Space {
    /// Its number on the wire.
    pub id: SpaceId,
    /// The model's name, as gateways use it.
    pub model: String,
    /// The namespace; empty = the default one.
    pub namespace: String,
    /// The part of requests that its workers serve.
    pub role: PoolRole,
    /// The hash scheme of its tokens.
    pub scheme: Arc<SchemeCell>,
}

/// One worker's record. The facts of a decision lie on its first cache line.
#[derive(Clone, Debug)]
#[repr(C, align(64))]
pub struct WorkerRecord {
    /// Its place in the table.
    pub index: WorkerIndex,
    /// The space it serves.
    pub space: SpaceId,
    /// The worker's id and rank.
    pub worker: Worker,
    /// The shard whose writer owns its blocks.
    pub shard: ShardId,
    /// The worker's slot in that shard of the index.
    pub slot: WorkerSlot,
    /// The worker's state.
    pub state: WorkerState,
    /// The class of its device.
    pub device_class: DeviceClass,
    /// Trust in what the index holds for it.
    pub trust: Arc<TrustCell>,
    /// Throughput relative to a CPU worker, which has 1.
    pub weight: f64,
    /// KV blocks that its device can hold; 0 = unknown.
    pub capacity_blocks: u64,
    /// Tokens that it batches in one step.
    pub batched_tokens_max: u64,
    /// A short name for people.
    pub name: String,
    /// Labels that constraints match.
    pub taints: Vec<String>,
    /// LoRA adapters that its record lists.
    pub loras: Vec<String>,
    /// The source of its events; `None` = it publishes none.
    pub events: Option<EventSource>,
}

const _: () = assert!(std::mem::offset_of!(WorkerRecord, name) == 64, "what decisions keep of a worker is one line");

impl WorkerRecord {
    /// A ready GPU worker of the first space and shard, without further facts.
    #[must_use]
    pub fn new(index: WorkerIndex, worker: Worker, slot: WorkerSlot) -> Self {
        Self {
            index,
            space: SpaceId(0),
            worker,
            shard: ShardId(0),
            slot,
            state: WorkerState::Ready,
            device_class: DeviceClass::Gpu,
            trust: Arc::new(TrustCell::new(Trust::default())),
            weight: 1.0,
            capacity_blocks: 0,
            batched_tokens_max: 0,
            name: String::new(),
            taints: Vec::new(),
            loras: Vec::new(),
            events: None,
        }
    }
}

/// Every space and worker at one version.
#[derive(Clone, Debug, Default)]
pub struct FleetTable {
    /// Counts changes, from 1.
    pub version: u64,
    /// By [`SpaceId`].
    pub spaces: Vec<Space>,
    /// By place, ascending; without the unused places.
    pub workers: Vec<WorkerRecord>,
}

impl FleetTable {
    /// Whether any worker may be chosen.
    #[must_use]
    pub fn has_schedulable(&self) -> bool {
        self.workers.iter().any(|record| record.state.is_schedulable())
    }

    /// The space with this number.
    #[must_use]
    pub fn space(&self, id: SpaceId) -> Option<&Space> {
        self.spaces.get(id.0 as usize)
    }

    /// The worker of this index; `None` if another worker has its place.
    #[must_use]
    pub fn worker(&self, index: WorkerIndex) -> Option<&WorkerRecord> {
        self.workers.get(self.position(index.place()).ok()?).filter(|record| record.index == index)
    }

    /// As [`FleetTable::worker`], mutable.
    #[must_use]
    pub fn worker_mut(&mut self, index: WorkerIndex) -> Option<&mut WorkerRecord> {
        let at = self.position(index.place()).ok()?;
        self.workers.get_mut(at).filter(|record| record.index == index)
    }

    /// Puts a worker in its place, replacing the worker there.
    pub fn put(&mut self, record: WorkerRecord) {
        match self.position(record.index.place()) {
            Ok(at) => self.workers[at] = record,
            Err(at) => self.workers.insert(at, record),
        }
    }

    /// Removes a worker; `None` if it is not there.
    pub fn take(&mut self, index: WorkerIndex) -> Option<WorkerRecord> {
        let at = self.position(index.place()).ok().filter(|at| self.workers[*at].index == index)?;
        Some(self.workers.remove(at))
    }

    /// The position of a place in `workers`, or where it would be. The search range is as wide as the number of unused
    /// places.
    fn position(&self, place: usize) -> Result<usize, usize> {
        let span = self.workers.last().map_or(0, |last| last.index.place() + 1);
        let (from, to) = (place.saturating_sub(span - self.workers.len()), self.workers.len().min(place + 1));
        let from = from.min(to);
        match self.workers[from..to].binary_search_by_key(&place, |record| record.index.place()) {
            Ok(at) => Ok(from + at),
            Err(at) => Err(from + at),
        }
    }

    /// The workers of a space, in table order.
    pub fn workers_of(&self, space: SpaceId) -> impl Iterator<Item = &WorkerRecord> {
        self.workers.iter().filter(move |record| record.space == space)
    }
}

/// The published table. Readers take it as a whole, without a lock; changes are made one at a time.
#[derive(Debug)]
pub struct Fleet {
    table: ArcSwap<FleetTable>,
    /// The version of the table, or of the one before while it is published.
    version: AtomicU64,
    /// Held during a change, so that no two changes start from the same table. Holds the earlier tables while they have
    /// readers.
    changing: Mutex<Vec<(u64, Weak<FleetTable>)>>,
}

impl Fleet {
    /// Publishes the first table, as version 1.
    #[must_use]
    pub fn new(table: FleetTable) -> Self {
        Self::continuing(FleetTable { version: 1, ..table })
    }

    /// Publishes the first table as the version that it has, after those of an earlier run.
    #[must_use]
    pub fn continuing(table: FleetTable) -> Self {
        let version = AtomicU64::new(table.version);
        Self { table: ArcSwap::from_pointee(table), version, changing: Mutex::default() }
    }

    /// The current table. Wait-free; touches no reference count.
    #[must_use]
    pub fn load(&self) -> arc_swap::Guard<Arc<FleetTable>> {
        self.table.load()
    }

    /// The version of the current table, for a reader that holds a table and asks whether there is a newer one.
    #[must_use]
    pub fn version(&self) -> u64 {
        // Acquire: pairs with the Release in `update`; the table that is loaded next is at least of this version.
        self.version.load(Ordering::Acquire)
    }

    /// Publishes a changed copy as the next version. `change` returns whether it changed anything.
    pub fn update(&self, change: impl FnOnce(&mut FleetTable) -> bool) -> bool {
        let mut earlier = self.changing.lock();
        let mut next = FleetTable::clone(&self.table.load());
        if !change(&mut next) {
            return false;
        }
        next.version += 1;
        let version = next.version;
        // After the swap, every reader of the previous table holds a count of it.
        let before = self.table.swap(Arc::new(next));
        // Release: pairs with the Acquire in `version`.
        self.version.store(version, Ordering::Release);
        earlier.retain(|(_, table)| table.strong_count() > 0);
        earlier.push((before.version, Arc::downgrade(&before)));
        true
    }

    /// The oldest version with a reader. No reader can name a worker that left before it.
    #[must_use]
    pub fn oldest_in_use(&self) -> u64 {
        let mut earlier = self.changing.lock();
        earlier.retain(|(_, table)| table.strong_count() > 0);
        earlier.first().map_or_else(|| self.table.load().version, |(version, _)| *version)
    }

    /// Sets the state of a worker.
    pub fn set_state(&self, index: WorkerIndex, state: WorkerState) -> bool {
        self.update(|table| match table.worker_mut(index) {
            Some(record) if record.state != state => {
                record.state = state;
                true
            }
            _ => false,
        })
    }
}

/// Allocates the places of workers, up to `WORKERS_MAX`. A reused place has the next generation, so that an old index
/// names no worker. A place without generations left stays unused.
#[derive(Debug, Default)]
pub struct PlaceAllocator {
    /// The next generation of every place that was ever used.
    generations: Vec<u32>,
    free: BTreeSet<u16>,
}

impl PlaceAllocator {
    /// The lowest free place; `None` if all are taken.
    pub fn take(&mut self) -> Option<WorkerIndex> {
        let place = match self.free.pop_first() {
            Some(place) => place,
            None if self.generations.len() < WORKERS_MAX => {
                self.generations.push(0);
                (self.generations.len() - 1) as u16
            }
            None => return None,
        };
        Some(WorkerIndex::at(place, self.generations[usize::from(place)]))
    }

    /// Frees the place of `index`, once nothing can act in its name.
    pub fn give_back(&mut self, index: WorkerIndex) {
        let Some(next) = self.generations.get_mut(index.place()) else { return };
        if *next != index.generation() {
            return;
        }
        *next += 1;
        if *next < WorkerIndex::GENERATIONS {
            self.free.insert(index.place() as u16);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(index: u32) -> WorkerRecord {
        WorkerRecord {
            name: format!("w{index}"),
            batched_tokens_max: 8192,
            state: WorkerState::Joining,
            ..WorkerRecord::new(WorkerIndex(index), Worker::new(u64::from(index) + 1, 0), WorkerSlot(index as u16))
        }
    }

    #[test]
    fn every_change_is_a_new_version_and_no_change_is_none() {
        let fleet = Fleet::new(FleetTable { workers: vec![record(0), record(1)], ..FleetTable::default() });
        let before = fleet.load();
        assert!(fleet.set_state(WorkerIndex(1), WorkerState::Draining));
        assert!(!fleet.set_state(WorkerIndex(1), WorkerState::Draining));
        assert!(!fleet.set_state(WorkerIndex(2), WorkerState::Down));
        assert_eq!((before.version, fleet.load().version), (1, 2));
        assert_eq!(before.workers[1].state, WorkerState::Joining, "a table once taken does not change");
        assert_eq!(fleet.load().workers[1].state, WorkerState::Draining);
    }

    #[test]
    fn a_place_is_found_whatever_places_are_unused() {
        let mut table = FleetTable::default();
        for place in [5, 0, 3, 9, 1] {
            table.put(record(place));
        }
        let places = |table: &FleetTable| table.workers.iter().map(|record| record.index.place()).collect::<Vec<_>>();
        assert_eq!(places(&table), [0, 1, 3, 5, 9]);
        for place in 0..12 {
            assert_eq!(table.worker(WorkerIndex(place)).is_some(), [0, 1, 3, 5, 9].contains(&place), "{place}");
        }
        let next = WorkerIndex::at(3, 1);
        assert!(table.take(next).is_none() && table.take(WorkerIndex(3)).is_some());
        assert!(table.worker_mut(WorkerIndex(3)).is_none());
        table.put(WorkerRecord { index: next, ..record(3) });
        assert!(table.worker(WorkerIndex(3)).is_none() && table.worker(next).is_some());
        assert_eq!(places(&table), [0, 1, 3, 5, 9]);
    }

    #[test]
    fn a_version_is_in_use_while_it_has_a_reader() {
        let fleet = Fleet::new(FleetTable { workers: vec![record(0)], ..FleetTable::default() });
        let (first, drain) = (fleet.load(), |state| assert!(fleet.set_state(WorkerIndex(0), state)));
        drain(WorkerState::Draining);
        let second = fleet.load();
        drain(WorkerState::Down);
        assert_eq!(fleet.oldest_in_use(), 1);
        drop(first);
        assert_eq!(fleet.oldest_in_use(), 2);
        drain(WorkerState::Ready);
        drop(second);
        assert_eq!(fleet.oldest_in_use(), 4);
    }

    #[test]
    fn a_reused_place_names_another_worker() {
        let mut places = PlaceAllocator::default();
        let [a, b, c] = std::array::from_fn(|_| places.take().unwrap());
        assert_eq!([a, b, c], [WorkerIndex(0), WorkerIndex(1), WorkerIndex(2)]);
        places.give_back(b);
        places.give_back(b);
        let again = places.take().unwrap();
        assert_eq!((again.place(), again.generation()), (1, 1));
        assert_ne!(again, b);
        places.give_back(b);
        assert_eq!(places.take(), Some(WorkerIndex(3)), "a worker that has left cannot free its successor's place");
    }

    #[test]
    fn places_end_and_so_do_generations() {
        let mut places = PlaceAllocator::default();
        let all: Vec<_> = std::iter::from_fn(|| places.take()).collect();
        assert_eq!(all.len(), WORKERS_MAX);
        let last = WorkerIndex::at(7, WorkerIndex::GENERATIONS - 1);
        places.generations[7] = last.generation();
        places.give_back(last);
        assert_eq!(places.take(), None, "no number would come twice");
    }
}
