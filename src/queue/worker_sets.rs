//! Waiting requests, by the set of workers that may take them.

use std::collections::BTreeMap;
use std::sync::Arc;

use rustc_hash::FxHashMap;

use super::Ticket;
use super::rank::Rank;
use crate::ids::WorkerIndex;

/// The number of a worker set; reused once the set has no requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct WorkerSetId(u32);

/// The waiting requests that the same workers may take.
#[derive(Debug, Default)]
struct WorkerSet {
    /// Sorted, without duplicates.
    workers: Arc<[WorkerIndex]>,
    /// The first is served first.
    order: BTreeMap<Rank, Ticket>,
    /// Requests of each user.
    users: FxHashMap<u32, usize>,
}

/// All worker sets. A set without requests is unused.
#[derive(Debug, Default)]
pub(super) struct WorkerSets {
    sets: Vec<WorkerSet>,
    unused: Vec<WorkerSetId>,
    by_set: FxHashMap<Arc<[WorkerIndex]>, WorkerSetId>,
    by_worker: FxHashMap<WorkerIndex, Vec<WorkerSetId>>,
    /// Sets with requests of a user, by user.
    by_user: FxHashMap<u32, usize>,
}

impl WorkerSets {
    /// Sets with requests.
    pub(super) fn used(&self) -> usize {
        self.by_set.len()
    }

    /// Whether a set has requests.
    pub(super) fn has(&self, workers: &[WorkerIndex]) -> bool {
        self.by_set.contains_key(workers)
    }

    /// Sets with requests of a user.
    pub(super) fn sets_of_user(&self, user: u32) -> usize {
        self.by_user.get(&user).copied().unwrap_or_default()
    }

    /// Whether a user has requests in a set.
    pub(super) fn has_request_of(&self, user: u32, workers: &[WorkerIndex]) -> bool {
        self.by_set.get(workers).is_some_and(|id| self.sets[id.0 as usize].users.contains_key(&user))
    }

    /// Adds a request of a user to the set of `workers`, sorted and without duplicates.
    pub(super) fn insert(&mut self, workers: &[WorkerIndex], (rank, user): (Rank, u32), ticket: Ticket) -> WorkerSetId {
        let id = self.by_set.get(workers).copied().unwrap_or_else(|| self.open(workers));
        let set = &mut self.sets[id.0 as usize];
        set.order.insert(rank, ticket);
        let requests = set.users.entry(user).or_default();
        *requests += 1;
        if *requests == 1 {
            *self.by_user.entry(user).or_default() += 1;
        }
        id
    }

    /// Counts one request of a user less in a set.
    fn leave(&mut self, id: WorkerSetId, user: u32) {
        let users = &mut self.sets[id.0 as usize].users;
        let Some(requests) = users.get_mut(&user) else { return };
        *requests -= 1;
        if *requests > 0 {
            return;
        }
        users.remove(&user);
        if let Some(sets) = self.by_user.get_mut(&user) {
            *sets -= 1;
            if *sets == 0 {
                self.by_user.remove(&user);
            }
        }
    }

    fn open(&mut self, workers: &[WorkerIndex]) -> WorkerSetId {
        let id = self.unused.pop().unwrap_or_else(|| {
            self.sets.push(WorkerSet::default());
            WorkerSetId(self.sets.len() as u32 - 1)
        });
        let workers: Arc<[WorkerIndex]> = workers.into();
        for worker in workers.iter() {
            self.by_worker.entry(*worker).or_default().push(id);
        }
        self.sets[id.0 as usize].workers = Arc::clone(&workers);
        self.by_set.insert(workers, id);
        id
    }

    /// Removes a request of a user from its set.
    pub(super) fn remove(&mut self, id: WorkerSetId, rank: &Rank, user: u32) {
        self.leave(id, user);
        let set = &mut self.sets[id.0 as usize];
        set.order.remove(rank);
        if !set.order.is_empty() {
            return;
        }
        let workers = std::mem::take(&mut set.workers);
        self.by_set.remove(&workers);
        for worker in workers.iter() {
            if let Some(sets) = self.by_worker.get_mut(worker) {
                sets.retain(|set| *set != id);
                if sets.is_empty() {
                    self.by_worker.remove(worker);
                }
            }
        }
        self.unused.push(id);
    }

    /// The first request that this worker may take.
    pub(super) fn first_for(&self, worker: WorkerIndex) -> Option<Ticket> {
        let sets = self.by_worker.get(&worker)?;
        sets.iter().filter_map(|id| self.head(&self.sets[id.0 as usize])).min().map(|(_, ticket)| ticket)
    }

    /// The first request with a worker that has room.
    pub(super) fn first_where(&self, mut has_room: impl FnMut(WorkerIndex) -> bool) -> Option<Ticket> {
        let open = self.sets.iter().filter(|set| set.workers.iter().any(|worker| has_room(*worker)));
        open.filter_map(|set| self.head(set)).min().map(|(_, ticket)| ticket)
    }

    fn head(&self, set: &WorkerSet) -> Option<(Rank, Ticket)> {
        set.order.first_key_value().map(|(rank, ticket)| (*rank, *ticket))
    }
}
