//! The queue of requests whose eligible workers are all busy. Pure: time is an argument, and the caller owns what
//! waits.
//!
//! A request waits with the set of workers that may take it. Requests with the same set are in one
//! [`WorkerSet`](worker_sets), ordered by [`Rank`]. A worker with room gets the first request of all sets that contain
//! it. A request whose workers are busy therefore never blocks a request whose workers are not, and a search looks only
//! at the first request of each set.
//!
//! ```text
//! push ─▶ waiting ─ next_for / next_where ─▶ dispatched ─┬─ finish    it is answered
//!            ▲ │                                          └─ put_back  its workers were busy again: its rank stays
//!            └─┼──────────────────────────────────────────────┘
//!              └─ next_expired, cancel, drain               it is answered with an error, or not at all
//! ```

mod rank;
#[cfg(test)]
mod tests;
mod worker_sets;

use std::collections::BTreeSet;

use rustc_hash::FxHashMap;

use crate::ids::WorkerIndex;
use crate::limits::{QUEUE_RETRY_NS_MAX, QUEUE_RETRY_NS_MIN};

pub use rank::{Claim, Discipline, Rank};
use worker_sets::{WorkerSetId, WorkerSets};

/// The number of a queued request; never reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Ticket(pub u64);

/// The limits of a queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QueueLimits {
    /// Requests.
    pub requests_max: usize,
    /// Memory of the requests, as their claims state it.
    pub bytes_max: usize,
    /// Different sets of workers.
    pub sets_max: usize,
    /// Different sets of workers of the requests of one user.
    pub user_sets_max: usize,
}

/// Why a request may not wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QueueFull {
    /// The number of requests is at its limit.
    Requests,
    /// The memory of the requests is at its limit.
    Bytes,
    /// The number of different sets of workers is at its limit.
    Sets,
    /// The number of sets of one user is at its limit.
    UserSets,
    /// The queue is closed: [`Queue::drain`].
    Closed,
}

/// The outcome for a dispatched request whose workers are busy again.
#[derive(Debug, PartialEq, Eq)]
pub enum Requeued<T> {
    /// It waits again, with the same rank.
    Waits,
    /// It was cancelled meanwhile.
    Cancelled(T),
    /// The queue is closed.
    Closed(T),
}

/// A request that left the queue to be served. It counts as dispatched until [`Queue::finish`] or [`Queue::put_back`].
#[derive(Debug)]
pub struct Dequeued<T> {
    /// Its number.
    pub ticket: Ticket,
    /// The start of its wait, nanoseconds.
    pub since_ns: u64,
    /// The end of its wait, nanoseconds.
    pub ends_ns: u64,
    /// The value that waited.
    pub what: T,
    rank: Rank,
    bytes: usize,
    user: u32,
}

#[derive(Debug)]
struct Waiting<T> {
    set: WorkerSetId,
    rank: Rank,
    since_ns: u64,
    ends_ns: u64,
    bytes: usize,
    user: u32,
    what: T,
}

/// Requests that wait until one of their workers has room.
#[derive(Debug)]
pub struct Queue<T> {
    limits: QueueLimits,
    sets: WorkerSets,
    waiting: FxHashMap<Ticket, Waiting<T>>,
    by_end: BTreeSet<(u64, Ticket)>,
    /// Dispatched requests, and whether they were cancelled since.
    dispatched: FxHashMap<Ticket, bool>,
    next_ticket: u64,
    bytes: usize,
    is_closed: bool,
    /// When the last request was served, and the smoothed time between two, nanoseconds.
    served_last_ns: Option<u64>,
    served_every_ns: u64,
}

impl<T> Queue<T> {
    /// An empty queue.
    #[must_use]
    pub fn new(limits: QueueLimits) -> Self {
        Self {
            limits,
            sets: WorkerSets::default(),
            waiting: FxHashMap::default(),
            by_end: BTreeSet::new(),
            dispatched: FxHashMap::default(),
            next_ticket: 0,
            bytes: 0,
            is_closed: false,
            served_last_ns: None,
            served_every_ns: 0,
        }
    }

    /// Requests that wait, without the dispatched ones.
    #[must_use]
    pub fn len(&self) -> usize {
        self.waiting.len()
    }

    /// Whether no request waits.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    /// Memory of the waiting requests, as their claims state it.
    #[must_use]
    pub const fn bytes(&self) -> usize {
        self.bytes
    }

    /// The earliest end of a wait, nanoseconds.
    #[must_use]
    pub fn next_end_ns(&self) -> Option<u64> {
        self.by_end.first().map(|(ends_ns, _)| *ends_ns)
    }

    /// Queues `what` for `workers`: at least one, in any order.
    ///
    /// # Errors
    /// The limit that is reached, and `what`.
    pub fn push(
        &mut self,
        now_ns: u64,
        claim: &Claim,
        workers: &[WorkerIndex],
        what: T,
    ) -> Result<Ticket, (QueueFull, T)> {
        let workers = set_of(workers);
        if let Some(full) = self.full_for(claim, &workers) {
            return Err((full, what));
        }
        let ticket = Ticket(self.next_ticket);
        self.next_ticket += 1;
        let rank = Rank::new(claim, now_ns, ticket.0);
        let (ends_ns, bytes, user) = (claim.ends_ns, claim.bytes, claim.user);
        self.enter(&workers, Dequeued { ticket, since_ns: now_ns, ends_ns, what, rank, bytes, user });
        Ok(ticket)
    }

    fn full_for(&self, claim: &Claim, workers: &[WorkerIndex]) -> Option<QueueFull> {
        let (QueueLimits { requests_max, bytes_max, sets_max, user_sets_max }, user) = (self.limits, claim.user);
        if self.is_closed {
            Some(QueueFull::Closed)
        } else if self.waiting.len() >= requests_max {
            Some(QueueFull::Requests)
        } else if self.bytes.saturating_add(claim.bytes) > bytes_max {
            Some(QueueFull::Bytes)
        } else if self.sets.used() >= sets_max && !self.sets.has(workers) {
            Some(QueueFull::Sets)
        } else if self.sets.sets_of_user(user) >= user_sets_max && !self.sets.has_request_of(user, workers) {
            Some(QueueFull::UserSets)
        } else {
            None
        }
    }

    fn enter(&mut self, workers: &[WorkerIndex], taken: Dequeued<T>) {
        let Dequeued { ticket, since_ns, ends_ns, what, rank, bytes, user } = taken;
        let set = self.sets.insert(workers, (rank, user), ticket);
        self.by_end.insert((ends_ns, ticket));
        self.bytes += bytes;
        self.waiting.insert(ticket, Waiting { set, rank, since_ns, ends_ns, bytes, user, what });
    }

    fn leave(&mut self, ticket: Ticket) -> Option<Dequeued<T>> {
        let Waiting { set, rank, since_ns, ends_ns, bytes, user, what } = self.waiting.remove(&ticket)?;
        self.sets.remove(set, &rank, user);
        self.by_end.remove(&(ends_ns, ticket));
        self.bytes -= bytes;
        Some(Dequeued { ticket, since_ns, ends_ns, what, rank, bytes, user })
    }

    fn take(&mut self, ticket: Ticket) -> Option<Dequeued<T>> {
        let taken = self.leave(ticket)?;
        self.dispatched.insert(ticket, false);
        Some(taken)
    }

    /// Dispatches the first request that `worker`, which has room, may take.
    pub fn next_for(&mut self, worker: WorkerIndex) -> Option<Dequeued<T>> {
        self.sets.first_for(worker).and_then(|ticket| self.take(ticket))
    }

    /// Dispatches the first request with a worker that has room. Looks at every set of workers with requests.
    pub fn next_where(&mut self, has_room: impl FnMut(WorkerIndex) -> bool) -> Option<Dequeued<T>> {
        self.sets.first_where(has_room).and_then(|ticket| self.take(ticket))
    }

    /// All waiting requests, in no order.
    pub fn iter(&self) -> impl Iterator<Item = &T> {
        self.waiting.values().map(|waiting| &waiting.what)
    }

    /// All waiting requests in order of their rank, whatever their workers.
    #[must_use]
    pub fn tickets(&self) -> Vec<Ticket> {
        let mut ranked: Vec<_> = self.waiting.iter().map(|(ticket, waiting)| (waiting.rank, *ticket)).collect();
        ranked.sort_unstable();
        ranked.into_iter().map(|(_, ticket)| ticket).collect()
    }

    /// Dispatches this request, if it still waits.
    pub fn take_back(&mut self, ticket: Ticket) -> Option<Dequeued<T>> {
        self.take(ticket)
    }

    /// Ends a dispatched request that was answered. Returns whether it was cancelled meanwhile: then no
    /// gateway waits for the answer.
    pub fn finish(&mut self, ticket: Ticket, now_ns: u64) -> bool {
        if let Some(last_ns) = self.served_last_ns.replace(now_ns) {
            // One eighth is new, so that a burst does not hide the pace.
            self.served_every_ns = self.served_every_ns / 8 * 7 + now_ns.saturating_sub(last_ns) / 8;
        }
        self.dispatched.remove(&ticket).unwrap_or(false)
    }

    /// Returns a dispatched request whose `workers` are all busy again to the queue, with its old rank. No limit
    /// applies.
    pub fn put_back(&mut self, taken: Dequeued<T>, workers: &[WorkerIndex]) -> Requeued<T> {
        let is_cancelled = self.dispatched.remove(&taken.ticket).unwrap_or(false);
        if is_cancelled {
            return Requeued::Cancelled(taken.what);
        }
        if self.is_closed {
            return Requeued::Closed(taken.what);
        }
        self.enter(&set_of(workers), taken);
        Requeued::Waits
    }

    /// Cancels a request. `None` if it is dispatched (its holder learns of the cancellation) or gone.
    pub fn cancel(&mut self, ticket: Ticket) -> Option<T> {
        if let Some(cancelled) = self.dispatched.get_mut(&ticket) {
            *cancelled = true;
        }
        self.leave(ticket).map(|taken| taken.what)
    }

    /// Takes the request whose wait ended first, if it ended by `now_ns`.
    pub fn next_expired(&mut self, now_ns: u64) -> Option<Dequeued<T>> {
        let (ends_ns, ticket) = *self.by_end.first()?;
        if ends_ns > now_ns { None } else { self.leave(ticket) }
    }

    /// Closes the queue and returns all waiting requests, in no order.
    pub fn drain(&mut self) -> Vec<(Ticket, T)> {
        self.is_closed = true;
        (self.sets, self.bytes) = (WorkerSets::default(), 0);
        self.by_end.clear();
        self.waiting.drain().map(|(ticket, waiting)| (ticket, waiting.what)).collect()
    }

    /// Nanoseconds after which a refused client should retry: about the time in which one request is served.
    #[must_use]
    pub fn retry_after_ns(&self) -> u64 {
        self.served_every_ns.clamp(QUEUE_RETRY_NS_MIN, QUEUE_RETRY_NS_MAX)
    }
}

/// Sorted, without duplicates.
fn set_of(workers: &[WorkerIndex]) -> Vec<WorkerIndex> {
    let mut set = workers.to_vec();
    set.sort_unstable();
    set.dedup();
    set
}
