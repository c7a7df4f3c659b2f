//! WHEN a request runs that found every worker it may have busy. Pure: time is an argument, and what waits is the
//! caller's own.
//!
//! A request waits with the set of workers that may take it. Requests with the same set share a lane, ordered by
//! [`Rank`]; a worker that has room gets the first of the lanes it is in. So a request whose workers are all busy keeps
//! nobody waiting whose workers are not, and whoever asks looks at the heads of lanes only.
//!
//! ```text
//! push ─▶ waiting ─ next_for / next_where ─▶ in hand ─┬─ finish    it is answered
//!            ▲ │                                       └─ put_back  everybody was busy again: its rank is kept
//!            └─┼───────────────────────────────────────────┘
//!              └─ next_expired, cancel, drain            it is answered with an error, or with nothing
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

/// The name of a request that waits; never used again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Ticket(pub u64);

/// How much may wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QueueLimits {
    /// Requests.
    pub requests_max: usize,
    /// Their memory, as their claims say it.
    pub bytes_max: usize,
    /// Different sets of workers.
    pub sets_max: usize,
    /// Of those, the ones that the requests of one user may wait for.
    pub user_sets_max: usize,
}

/// Why a request may not wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QueueFull {
    /// As many wait as may.
    Requests,
    /// Those that wait take as much memory as they may.
    Bytes,
    /// Those that wait may have too many different sets of workers.
    Sets,
    /// Those of the same user may have as many of them as those of one user may.
    UserSets,
    /// Nothing waits any more: [`Queue::drain`].
    Closed,
}

/// What became of a request that was in hand and finds everybody busy again.
#[derive(Debug, PartialEq, Eq)]
pub enum Requeued<T> {
    /// It waits again, at its rank.
    Waits,
    /// It was cancelled meanwhile.
    Cancelled(T),
    /// Nothing waits any more.
    Closed(T),
}

/// A request that was taken out to be served. It is in hand until [`Queue::finish`] or [`Queue::put_back`].
#[derive(Debug)]
pub struct Dequeued<T> {
    /// Its name.
    pub ticket: Ticket,
    /// When it began to wait, nanoseconds.
    pub since_ns: u64,
    /// When it is given up, nanoseconds.
    pub ends_ns: u64,
    /// What waited.
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

/// Requests that wait for one of their workers to have room.
#[derive(Debug)]
pub struct Queue<T> {
    bounds: QueueLimits,
    sets: WorkerSets,
    waiting: FxHashMap<Ticket, Waiting<T>>,
    by_end: BTreeSet<(u64, Ticket)>,
    /// In hand, and whether cancelled since.
    in_hand: FxHashMap<Ticket, bool>,
    next_ticket: u64,
    bytes: usize,
    is_closed: bool,
    /// When the last one was served, nanoseconds, and how far apart that is, smoothed.
    served_last_ns: Option<u64>,
    served_every_ns: u64,
}

impl<T> Queue<T> {
    /// An empty queue.
    #[must_use]
    pub fn new(bounds: QueueLimits) -> Self {
        Self {
            bounds,
            sets: WorkerSets::default(),
            waiting: FxHashMap::default(),
            by_end: BTreeSet::new(),
            in_hand: FxHashMap::default(),
            next_ticket: 0,
            bytes: 0,
            is_closed: false,
            served_last_ns: None,
            served_every_ns: 0,
        }
    }

    /// Requests that wait; those in hand are not among them.
    #[must_use]
    pub fn len(&self) -> usize {
        self.waiting.len()
    }

    /// Whether nobody waits.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    /// Memory of those that wait, as their claims say it.
    #[must_use]
    pub const fn bytes(&self) -> usize {
        self.bytes
    }

    /// When the next one is given up, nanoseconds.
    #[must_use]
    pub fn next_end_ns(&self) -> Option<u64> {
        self.by_end.first().map(|(ends_ns, _)| *ends_ns)
    }

    /// Lets `what` wait for one of `workers`, of which there is at least one, in any order.
    ///
    /// # Errors
    /// Which bound is reached, and `what` itself.
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
        let (QueueLimits { requests_max, bytes_max, sets_max, user_sets_max }, user) = (self.bounds, claim.user);
        if self.is_closed {
            Some(QueueFull::Closed)
        } else if self.waiting.len() >= requests_max {
            Some(QueueFull::Requests)
        } else if self.bytes.saturating_add(claim.bytes) > bytes_max {
            Some(QueueFull::Bytes)
        } else if self.sets.used() >= sets_max && !self.sets.has(workers) {
            Some(QueueFull::Sets)
        } else if self.sets.used_by(user) >= user_sets_max && !self.sets.has_of(user, workers) {
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
        self.in_hand.insert(ticket, false);
        Some(taken)
    }

    /// Takes the first request that `worker`, which has room, may have.
    pub fn next_for(&mut self, worker: WorkerIndex) -> Option<Dequeued<T>> {
        self.sets.first_for(worker).and_then(|ticket| self.take(ticket))
    }

    /// Takes the first request of which a worker has room. Looks at every set of workers that somebody waits for.
    pub fn next_where(&mut self, has_room: impl FnMut(WorkerIndex) -> bool) -> Option<Dequeued<T>> {
        self.sets.first_where(has_room).and_then(|ticket| self.take(ticket))
    }

    /// All who wait, in no order.
    pub fn iter(&self) -> impl Iterator<Item = &T> {
        self.waiting.values().map(|waiting| &waiting.what)
    }

    /// Who waits, in order, whomever they wait for.
    #[must_use]
    pub fn tickets(&self) -> Vec<Ticket> {
        let mut ranked: Vec<_> = self.waiting.iter().map(|(ticket, waiting)| (waiting.rank, *ticket)).collect();
        ranked.sort_unstable();
        ranked.into_iter().map(|(_, ticket)| ticket).collect()
    }

    /// Takes this request, if it still waits.
    pub fn take_back(&mut self, ticket: Ticket) -> Option<Dequeued<T>> {
        self.take(ticket)
    }

    /// What was in hand is answered. Says whether it was cancelled meanwhile, so that nobody wants the answer.
    pub fn finish(&mut self, ticket: Ticket, now_ns: u64) -> bool {
        if let Some(last_ns) = self.served_last_ns.replace(now_ns) {
            // An eighth of what is new, so that a burst does not hide the pace.
            self.served_every_ns = self.served_every_ns / 8 * 7 + now_ns.saturating_sub(last_ns) / 8;
        }
        self.in_hand.remove(&ticket).unwrap_or(false)
    }

    /// What was in hand finds all of `workers` busy again, and waits as if it had not been taken. No bound keeps it out.
    pub fn put_back(&mut self, taken: Dequeued<T>, workers: &[WorkerIndex]) -> Requeued<T> {
        let is_cancelled = self.in_hand.remove(&taken.ticket).unwrap_or(false);
        if is_cancelled {
            return Requeued::Cancelled(taken.what);
        }
        if self.is_closed {
            return Requeued::Closed(taken.what);
        }
        self.enter(&set_of(workers), taken);
        Requeued::Waits
    }

    /// Nobody wants the answer any more. `None` if it is in hand, whose holder is told, or no longer there.
    pub fn cancel(&mut self, ticket: Ticket) -> Option<T> {
        if let Some(cancelled) = self.in_hand.get_mut(&ticket) {
            *cancelled = true;
        }
        self.leave(ticket).map(|taken| taken.what)
    }

    /// Takes one that is to be given up by `now_ns`; the earliest first.
    pub fn next_expired(&mut self, now_ns: u64) -> Option<Dequeued<T>> {
        let (ends_ns, ticket) = *self.by_end.first()?;
        if ends_ns > now_ns { None } else { self.leave(ticket) }
    }

    /// Nothing waits any more from now on: all that does, in no particular order.
    pub fn drain(&mut self) -> Vec<(Ticket, T)> {
        self.is_closed = true;
        (self.sets, self.bytes) = (WorkerSets::default(), 0);
        self.by_end.clear();
        self.waiting.drain().map(|(ticket, waiting)| (ticket, waiting.what)).collect()
    }

    /// In how long somebody who found it full may try again, nanoseconds: about the time in which one is served.
    #[must_use]
    pub fn retry_after_ns(&self) -> u64 {
        self.served_every_ns.clamp(QUEUE_RETRY_NS_MIN, QUEUE_RETRY_NS_MAX)
    }
}

/// Ascending, without repetition.
fn set_of(workers: &[WorkerIndex]) -> Vec<WorkerIndex> {
    let mut set = workers.to_vec();
    set.sort_unstable();
    set.dedup();
    set
}
