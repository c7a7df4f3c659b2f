//! The memory budget of the process: its parts, what each may take, and what each takes now.
//!
//! ```text
//! budget ─ divide (at the start) ─▶ a bound for each part ─▶ the part refuses what exceeds its bound
//! parts ─ accounts ─┐
//!                   ├─▶ the larger of both ─ Shedding ─▶ what the daemon refuses while memory is short
//! /proc ─ resident ─┘
//! ```
//!
//! The table of parts is [`MemoryPart`], and [`Division`] holds the bound of each: the sum of all bounds never exceeds
//! the budget. [`MemoryAccounts`] knows what each part takes. Memory is counted where it is taken, by the thread that
//! takes it: a [`Gauge`] is one relaxed store. Nothing here is locked or allocated on the way of a query.

mod division;
mod shedding;

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;

pub use division::{Demands, Division, divide, least};
pub use shedding::{Pressure, Shed, ShedChange, ShedFlags, Shedding, next_to_hold_back};

use crate::reasons::reasons;

reasons! {
    /// A part of the process's memory.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
    MemoryPart {}
    /// Code, stacks of threads and tables of fixed size.
    Process = "process";
    /// The blocks of workers that publish events, over all spaces.
    Index = "index";
    /// The blocks predicted for workers that publish none.
    Predictions = "predictions";
    /// Gateways' connections at rest.
    Connections = "connections";
    /// Large frames of gateways that are being received.
    Frames = "frames";
    /// Replies that gateways have not read.
    Replies = "replies";
    /// Shm lanes.
    Lanes = "lanes";
    /// Large messages of publishers and relays that are being received, or wait to be applied.
    EventMessages = "event_messages";
    /// Messages of workers that wait during a dump, load or recovery.
    HeldEvents = "held_events";
    /// Replayed batches that are received and not yet applied.
    Replays = "replays";
    /// Parts of dumps and loads that wait for their receiver.
    Dumps = "dumps";
    /// Queued requests.
    Queue = "queue";
    /// Bookings, and the blocks of booked prompts.
    Bookings = "bookings";
    /// Decisions that wait for the journal or the shadow policy.
    Journal = "journal";
    /// Bodies, replies, selections and records of the HTTP port.
    Http = "http";
    /// Connections from other hosts.
    Remote = "remote";
    /// Metrics pages.
    MetricsPages = "metrics_pages";
    /// Buffers of snapshots.
    Snapshots = "snapshots";
}

/// The number of parts.
pub const PARTS: usize = MemoryPart::ALL.len();

/// Bytes that one owner takes now. Only the owner writes it. Relaxed everywhere: a figure, which orders nothing.
#[derive(Clone, Debug, Default)]
pub struct Gauge(Arc<AtomicU64>);

impl Gauge {
    /// The owner takes this many bytes now.
    #[inline]
    pub fn set(&self, bytes: u64) {
        self.0.store(bytes, Ordering::Relaxed);
    }

    /// Bytes that several owners share: this many more.
    pub fn add(&self, bytes: u64) {
        self.0.fetch_add(bytes, Ordering::Relaxed);
    }

    /// This many fewer.
    pub fn subtract(&self, bytes: u64) {
        self.0.fetch_sub(bytes, Ordering::Relaxed);
    }

    /// The bytes now.
    #[must_use]
    pub fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// Reads the bytes that a part takes, or one of its owners.
type Source = Box<dyn Fn() -> u64 + Send + Sync>;

/// What each part of the process takes now.
#[derive(Clone)]
pub struct MemoryAccounts {
    division: Arc<Division>,
    /// By part.
    sources: Arc<[Mutex<Vec<Source>>; PARTS]>,
}

impl fmt::Debug for MemoryAccounts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MemoryAccounts").field("division", &self.division).finish_non_exhaustive()
    }
}

impl MemoryAccounts {
    /// Accounts of parts with these bounds. Nothing is taken yet but what is fixed.
    #[must_use]
    pub fn new(division: Division) -> Self {
        let accounts = Self { division: Arc::new(division), sources: Arc::default() };
        for part in MemoryPart::ALL.iter().filter(|part| division.is_fixed(**part)) {
            let bytes = division.bound(*part);
            accounts.watch(*part, move || bytes);
        }
        accounts
    }

    /// Accounts without a budget.
    #[must_use]
    pub fn unlimited() -> Self {
        Self::new(Division::unlimited())
    }

    /// What each part may take.
    #[must_use]
    pub fn division(&self) -> &Division {
        &self.division
    }

    /// The gauge of one more owner of a part's memory.
    #[must_use]
    pub fn gauge(&self, part: MemoryPart) -> Gauge {
        let gauge = Gauge::default();
        let read = gauge.clone();
        self.watch(part, move || read.get());
        gauge
    }

    /// Reads a part's memory, or more of it, by `read`, which is called a few times a second.
    pub fn watch(&self, part: MemoryPart, read: impl Fn() -> u64 + Send + Sync + 'static) {
        self.sources[part as usize].lock().push(Box::new(read));
    }

    /// What a part takes now, bytes.
    #[must_use]
    pub fn used(&self, part: MemoryPart) -> u64 {
        self.sources[part as usize].lock().iter().map(|read| read()).fold(0, u64::saturating_add)
    }

    /// What all parts take now, bytes.
    #[must_use]
    pub fn used_in_all(&self) -> u64 {
        MemoryPart::ALL.iter().map(|part| self.used(*part)).fold(0, u64::saturating_add)
    }
}

/// Memory that several owners share: each draws what it will need, and returns what it does not need.
///
/// Sync point POOL: a draw is one compare-and-exchange of the sum, so that the sum never exceeds the bound. Relaxed:
/// the sum guards no other memory.
#[derive(Debug)]
pub struct MemoryPool {
    bytes_max: u64,
    drawn: AtomicU64,
    /// Those for whom the owners draw: workers.
    users: AtomicU64,
}

impl MemoryPool {
    /// A pool of this many bytes.
    #[must_use]
    pub const fn new(bytes_max: u64) -> Self {
        Self { bytes_max, drawn: AtomicU64::new(0), users: AtomicU64::new(0) }
    }

    /// An owner draws for `after` users from now on, instead of `before`.
    pub fn change_users(&self, before: u64, after: u64) {
        // Wrapping, as atomic additions are: the sum is right.
        self.users.fetch_add(after.wrapping_sub(before), Ordering::Relaxed);
    }

    /// An equal part for each user, bytes.
    #[must_use]
    pub fn share(&self) -> u64 {
        self.bytes_max / self.users.load(Ordering::Relaxed).max(1)
    }

    /// Draws bytes; `false` = there are not as many, and none were drawn.
    pub fn draw(&self, bytes: u64) -> bool {
        let fits = |drawn: u64| drawn.checked_add(bytes).filter(|drawn| *drawn <= self.bytes_max);
        self.drawn.fetch_update(Ordering::Relaxed, Ordering::Relaxed, fits).is_ok()
    }

    /// Draws bytes that are taken already, beyond the bound if need be.
    pub fn force(&self, bytes: u64) {
        self.drawn.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Returns bytes that were drawn.
    pub fn give_back(&self, bytes: u64) {
        self.drawn.fetch_sub(bytes, Ordering::Relaxed);
    }

    /// The bytes drawn now.
    #[must_use]
    pub fn drawn(&self) -> u64 {
        self.drawn.load(Ordering::Relaxed)
    }

    /// The bound.
    #[must_use]
    pub const fn bytes_max(&self) -> u64 {
        self.bytes_max
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_part_takes_what_all_of_its_owners_take() {
        let accounts = MemoryAccounts::unlimited();
        let [one, other] = [0; 2].map(|_| accounts.gauge(MemoryPart::Frames));
        accounts.watch(MemoryPart::Queue, || 5);
        one.set(70);
        other.add(40);
        other.subtract(10);
        assert_eq!((accounts.used(MemoryPart::Frames), accounts.used(MemoryPart::Queue)), (100, 5));
        assert_eq!(accounts.used_in_all(), 105 + accounts.used(MemoryPart::Process));
    }

    /// Sync point POOL, with more threads and draws than loom could follow.
    #[test]
    fn a_pool_is_never_drawn_beyond_its_bound() {
        const BYTES_MAX: u64 = 1000;
        let pool = MemoryPool::new(BYTES_MAX);
        std::thread::scope(|scope| {
            for owner in 1..=4_u64 {
                let pool = &pool;
                scope.spawn(move || {
                    let mut held = 0;
                    for step in 0..20_000_u64 {
                        let bytes = (step * owner * 7919) % 300;
                        if pool.draw(bytes) {
                            held += bytes;
                        }
                        assert!(pool.drawn() <= BYTES_MAX && held <= BYTES_MAX);
                        if step % 3 == 0 || held > 400 {
                            pool.give_back(std::mem::take(&mut held));
                        }
                    }
                    pool.give_back(held);
                });
            }
        });
        assert_eq!(pool.drawn(), 0);
        pool.force(BYTES_MAX + 5);
        assert!(!pool.draw(0) && !pool.draw(u64::MAX));
    }
}
