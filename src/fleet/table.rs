//! The fleet table: every space and worker, published whole; and the allocation of places in it.

use std::collections::BTreeSet;
use std::sync::{Arc, Weak};

use arc_swap::ArcSwap;
use parking_lot::Mutex;

use super::cells::{SchemeCell, TrustCell};
use crate::endpoint::Endpoint;
use crate::ids::{ShardId, SpaceId, Worker, WorkerIndex, WorkerSlot};
use crate::limits::WORKERS_MAX;
use crate::trust::Trust;

/// Which part of a request a pool serves.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum PoolRole {
    /// Prefill and decode.
    #[default]
    Both,
    /// Prefill only.
    Prefill,
    /// Decode only.
    Decode,
}

impl PoolRole {
    /// The lower-case name used in the configuration, logs and JSON.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Both => "both",
            Self::Prefill => "prefill",
            Self::Decode => "decode",
        }
    }
}

/// Where a worker is in its life.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum WorkerState {
    /// Named, and its publisher not reached yet, for less than the configured time. Eligible: it may be about to be.
    #[default]
    Joining,
    /// Its publisher is connected.
    Ready,
    /// Takes no new requests.
    Draining,
    /// Its publisher has been gone, or not been reached since the start, for longer than the configured time.
    /// Takes no requests while others can, until its publisher connects.
    Down,
}

impl WorkerState {
    /// The lower-case name used in logs, metrics and JSON.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Joining => "joining",
            Self::Ready => "ready",
            Self::Draining => "draining",
            Self::Down => "down",
        }
    }
}

/// What a worker computes on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum DeviceClass {
    /// An accelerator.
    #[default]
    Gpu,
    /// The host's processor.
    Cpu,
}

impl DeviceClass {
    /// The lower-case name used in the configuration, logs and JSON.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Gpu => "gpu",
            Self::Cpu => "cpu",
        }
    }
}

/// Where a worker's events come from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EventSource {
    /// ZeroMQ endpoint of its PUB socket, as we connect to it.
    pub endpoint: Endpoint,
    /// ZeroMQ endpoint of its replay ROUTER socket.
    pub replay: Option<Endpoint>,
    /// Subscription prefix; empty = everything.
    pub topic: String,
}

/// Prompts and blocks that may be compared: one model, namespace and pool.
#[derive(Clone, Debug)]
pub struct Space {
    /// Its number on the wire.
    pub id: SpaceId,
    /// The model's name, as gateways say it.
    pub model: String,
    /// What else separates it; empty = the default namespace.
    pub namespace: String,
    /// Which pool it is.
    pub role: PoolRole,
    /// How its tokens become hashes.
    pub scheme: Arc<SchemeCell>,
}

/// One worker's record. What every decision reads of it lies together on its first cache line.
#[derive(Clone, Debug)]
#[repr(C, align(64))]
pub struct WorkerRecord {
    /// Its place in the table.
    pub index: WorkerIndex,
    /// The space it serves.
    pub space: SpaceId,
    /// Who it is.
    pub worker: Worker,
    /// Which shard's writer owns its blocks.
    pub shard: ShardId,
    /// The index's name for it in that shard.
    pub slot: WorkerSlot,
    /// Where it is in its life.
    pub state: WorkerState,
    /// What it computes on.
    pub device_class: DeviceClass,
    /// How much the index's word about it may be believed.
    pub trust: Arc<TrustCell>,
    /// Its throughput relative to a CPU worker's 1.
    pub weight: f64,
    /// KV blocks its device holds; 0 = not known.
    pub capacity_blocks: u64,
    /// Tokens it batches in one step.
    pub batched_tokens_max: u64,
    /// A short name for people.
    pub name: String,
    /// Labels that constraints match.
    pub taints: Vec<String>,
    /// LoRA adapters that it has loaded, as far as its record says.
    pub loras: Vec<String>,
    /// Where its events come from; `None` = it publishes none.
    pub events: Option<EventSource>,
}

const _: () = assert!(std::mem::offset_of!(WorkerRecord, name) == 64, "what decisions keep of a worker is one line");

impl WorkerRecord {
    /// A GPU worker of the first space and shard that is ready and has nothing, of which nothing more is known.
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
    /// By place, ascending; places that nobody has are left out.
    pub workers: Vec<WorkerRecord>,
}

impl FleetTable {
    /// The space with this number.
    #[must_use]
    pub fn space(&self, id: SpaceId) -> Option<&Space> {
        self.spaces.get(id.0 as usize)
    }

    /// The worker of this index, not another one in its place.
    #[must_use]
    pub fn worker(&self, index: WorkerIndex) -> Option<&WorkerRecord> {
        self.workers.get(self.position(index.place()).ok()?).filter(|record| record.index == index)
    }

    /// As [`FleetTable::worker`], to change it.
    #[must_use]
    pub fn worker_mut(&mut self, index: WorkerIndex) -> Option<&mut WorkerRecord> {
        let at = self.position(index.place()).ok()?;
        self.workers.get_mut(at).filter(|record| record.index == index)
    }

    /// Puts a worker in its place; whoever was there is gone.
    pub fn put(&mut self, record: WorkerRecord) {
        match self.position(record.index.place()) {
            Ok(at) => self.workers[at] = record,
            Err(at) => self.workers.insert(at, record),
        }
    }

    /// Takes a worker out; `None` if it is not there.
    pub fn take(&mut self, index: WorkerIndex) -> Option<WorkerRecord> {
        let at = self.position(index.place()).ok().filter(|at| self.workers[*at].index == index)?;
        Some(self.workers.remove(at))
    }

    /// Where a place is in `workers`, else where it would be: no further back than there are empty places.
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

/// The published table. Readers take it whole and without a lock; changes are made one at a time.
#[derive(Debug)]
pub struct Fleet {
    table: ArcSwap<FleetTable>,
    /// Held while a change is made, so that two changes cannot start from the same table. The tables before,
    /// as long as somebody reads them.
    changing: Mutex<Vec<(u64, Weak<FleetTable>)>>,
}

impl Fleet {
    /// Publishes the first table, as version 1.
    #[must_use]
    pub fn new(mut table: FleetTable) -> Self {
        table.version = 1;
        Self { table: ArcSwap::from_pointee(table), changing: Mutex::default() }
    }

    /// The current table; wait-free, no reference count is touched.
    #[must_use]
    pub fn load(&self) -> arc_swap::Guard<Arc<FleetTable>> {
        self.table.load()
    }

    /// Publishes a changed copy under the next version. `change` says whether it changed anything.
    pub fn update(&self, change: impl FnOnce(&mut FleetTable) -> bool) -> bool {
        let mut earlier = self.changing.lock();
        let mut next = FleetTable::clone(&self.table.load());
        if !change(&mut next) {
            return false;
        }
        next.version += 1;
        // After the swap every reader of the table before holds a count of it.
        let before = self.table.swap(Arc::new(next));
        earlier.retain(|(_, table)| table.strong_count() > 0);
        earlier.push((before.version, Arc::downgrade(&before)));
        true
    }

    /// The oldest version that somebody still reads: who is in no table since then is named by nobody's reading.
    #[must_use]
    pub fn oldest_in_use(&self) -> u64 {
        let mut earlier = self.changing.lock();
        earlier.retain(|(_, table)| table.strong_count() > 0);
        earlier.first().map_or_else(|| self.table.load().version, |(version, _)| *version)
    }

    /// Moves a worker to another state.
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

/// The places of all workers, up to `WORKERS_MAX`. A place is given again under the next generation, so that
/// whatever still names its last owner names nobody; a place whose generations are used up stays empty.
#[derive(Debug, Default)]
pub struct PlaceAllocator {
    /// The next generation of every place ever given.
    generations: Vec<u32>,
    free: BTreeSet<u16>,
}

impl PlaceAllocator {
    /// The lowest place that is free; `None` when all are taken.
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

    /// Frees the place of `index`, once nothing can act in its name any more.
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
    fn a_place_is_found_whatever_is_missing_before_it() {
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
    fn a_version_is_in_use_as_long_as_somebody_reads_it() {
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
    fn a_place_given_again_names_another() {
        let mut places = PlaceAllocator::default();
        let [a, b, c] = std::array::from_fn(|_| places.take().unwrap());
        assert_eq!([a, b, c], [WorkerIndex(0), WorkerIndex(1), WorkerIndex(2)]);
        places.give_back(b);
        places.give_back(b);
        let again = places.take().unwrap();
        assert_eq!((again.place(), again.generation()), (1, 1));
        assert_ne!(again, b);
        places.give_back(b);
        assert_eq!(places.take(), Some(WorkerIndex(3)), "who has left cannot free the place of who came after");
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
