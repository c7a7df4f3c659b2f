//! Session affinity: the policy, its effect on a decision, and the table of sessions and their workers.
//!
//! A gateway names a session with a request so that the requests of one conversation go to one worker. All serving
//! threads share one [`AffinityTable`] of fixed size: buckets of eight entries, 32 bytes each. The hash of the
//! session's name selects the bucket. A full bucket evicts its least recently used entry. The table stores 128-bit
//! hashes of the names, made with a secret, and no names.
//!
//! Readers take no lock. Each bucket has a sequence number, odd while a writer is in it; a reader that sees the number
//! change reads again. A writer that cannot enter a bucket within a bounded number of tries leaves the entry as it was
//! and reports that, so no thread here waits for a descheduled one.

use xxhash_rust::xxh3::xxh3_128_with_seed;

use super::decision::Decision;
use super::observation::Observation;
use super::policy::Policy;
use super::rules::Rule;
use crate::columns::numbered;
use crate::ids::{DpRank, SpaceId, Worker, WorkerId};
use crate::protocol::{CostTerms, Mode};
use crate::shares::share;
use crate::sync::{AtomicU32, AtomicU64, Ordering, SeqWord, spin};

/// How strongly a session stays with its worker.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum AffinityMode {
    /// Sessions are ignored.
    #[default]
    Off,
    /// A factor reduces the cost of the session's worker.
    Soft,
    /// The session's worker is chosen, as long as it is eligible and not overloaded.
    Hard,
}

impl AffinityMode {
    /// The names used in the configuration.
    pub const NAMES: [&'static str; 3] = ["off", "soft", "hard"];
    /// Every mode, in the order of [`AffinityMode::NAMES`].
    pub const ALL: [Self; 3] = [Self::Off, Self::Soft, Self::Hard];
}

numbered! {
    AffinityMode { Off = 0, Soft = 1, Hard = 2 }
}

/// The affinity part of a policy.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AffinityPolicy {
    /// How strongly a session stays with its worker.
    pub mode: AffinityMode,
    /// Seconds after which the binding of a session without bookings ends.
    pub ttl_s: u32,
    /// Factor of the bound worker's cost in soft mode, 0 to 1.
    pub factor: f64,
    /// A worker is overloaded above this multiple of the mean of requests in flight, this request included; at least 1.
    pub load_max: f64,
}

impl Default for AffinityPolicy {
    fn default() -> Self {
        Self { mode: AffinityMode::Off, ttl_s: 3600, factor: 0.5, load_max: 1.25 }
    }
}

/// What is known of the request's session.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum AffinitySession {
    /// The request names no session, or affinity is off.
    #[default]
    None,
    /// The session is not bound, or its binding has ended.
    Unbound,
    /// The session is bound to this worker.
    Bound(Worker),
}

/// The outcome of a decision for the session's binding.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum AffinityOutcome {
    /// The request has no session, or affinity is off.
    #[default]
    None,
    /// The session was not bound.
    New,
    /// The session stays with its worker.
    Kept,
    /// The bound worker is not eligible.
    Ineligible,
    /// The bound worker is overloaded.
    Overloaded,
    /// Another worker was cheaper in spite of the factor.
    Outweighed,
    /// The request is pinned to another worker.
    Pinned,
}

/// The effect of a binding on a decision.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum AffinityEffect {
    /// No effect.
    None,
    /// The bound worker cannot be chosen, or is overloaded.
    Lost(AffinityOutcome),
    /// The cost of the worker in this row is reduced.
    Discounted(u32),
    /// Only the worker in this row stays eligible.
    Only(u32),
}

impl AffinityEffect {
    /// The effect of the session's binding, given the eligible workers.
    pub(super) fn of(policy: &Policy, observation: &Observation, decision: &Decision) -> Self {
        let affinity = &policy.affinity;
        let AffinitySession::Bound(worker) = observation.request.session else { return Self::None };
        // A pin has precedence over a session.
        if affinity.mode == AffinityMode::Off || observation.request.pin.is_some() {
            return Self::None;
        }
        let workers = &observation.workers;
        let Some(row) = decision.eligible_rows.iter().copied().find(|row| workers.worker(*row as usize) == worker)
        else {
            return Self::Lost(AffinityOutcome::Ineligible);
        };
        let requests = |row: u32| workers.requests(row as usize);
        if is_overloaded(affinity.load_max, requests(row), decision.eligible_rows.iter().map(|row| requests(*row))) {
            return Self::Lost(AffinityOutcome::Overloaded);
        }
        match affinity.mode {
            AffinityMode::Soft if chooses_by_lowest_cost(policy.mode) => Self::Discounted(row),
            _ => Self::Only(row),
        }
    }

    /// The row of the worker whose cost is reduced.
    pub(super) const fn discounted_row(self) -> Option<u32> {
        if let Self::Discounted(place) = self { Some(place) } else { None }
    }

    /// The terms of the worker in a row, reduced if it is the bound one.
    #[inline]
    pub(super) fn discount(self, policy: &Policy, place: u32, terms: CostTerms) -> CostTerms {
        if self != Self::Discounted(place) {
            return terms;
        }
        let affinity_factor = factor(&policy.affinity, terms.cost);
        CostTerms { affinity_factor, cost: terms.cost * affinity_factor, ..terms }
    }

    /// Removes the other workers, if only one may stay.
    pub(super) fn apply(self, observation: &Observation, decision: &mut Decision) {
        let Self::Only(only) = self else { return };
        let others = decision.eligible_rows.iter().filter(|place| **place != only);
        let others = others.map(|row| observation.workers.worker(*row as usize));
        decision.removed.extend(others.map(|worker| (Rule::BoundElsewhere, worker)));
        decision.eligible_rows.clear();
        decision.eligible_rows.push(only);
    }

    /// The outcome for the binding, once a worker is chosen.
    pub(super) fn outcome(self, observation: &Observation, chosen: Option<Worker>) -> AffinityOutcome {
        match (observation.request.session, self) {
            (AffinitySession::None, _) => AffinityOutcome::None,
            (AffinitySession::Unbound, _) => AffinityOutcome::New,
            (AffinitySession::Bound(worker), _) if chosen == Some(worker) => AffinityOutcome::Kept,
            (AffinitySession::Bound(_), Self::Lost(why)) => why,
            (AffinitySession::Bound(_), _) if observation.request.pin.is_some() => AffinityOutcome::Pinned,
            (AffinitySession::Bound(_), _) => AffinityOutcome::Outweighed,
        }
    }
}

/// The factor of a cost. Negative or infinite costs are left alone (0 × ∞ is NaN).
pub(super) fn factor(affinity: &AffinityPolicy, cost: f64) -> f64 {
    let is_weighable = cost > 0.0 && cost.is_finite();
    if is_weighable { affinity.factor } else { 1.0 }
}

/// Whether one more request on the bound worker exceeds `load_max` times the mean of all eligible workers with it. This
/// is the bound of consistent hashing with bounded loads (Mirrokni, Thorup, Zadimoghaddam 2016).
fn is_overloaded(load_max: f64, bound_requests: u64, eligible_requests: impl Iterator<Item = u64>) -> bool {
    let (mut requests, mut workers) = (1_u64, 0_u64);
    for of_worker in eligible_requests {
        requests += of_worker;
        workers += 1;
    }
    let allowed = (load_max * requests as f64 / workers.max(1) as f64).ceil();
    (bound_requests + 1) as f64 > allowed
}

/// Whether a mode chooses by lowest cost, so that a factor has an effect. In other modes a soft session is treated as a
/// hard one.
const fn chooses_by_lowest_cost(mode: Mode) -> bool {
    matches!(mode, Mode::Kv | Mode::LoadAware | Mode::Approximate | Mode::LeastLoaded | Mode::Lmetric | Mode::Latency)
}

/// Entries of one bucket. The model checker gets a small world.
const WAYS: usize = if cfg!(all(test, kvrouted_loom)) { 1 } else { 8 };
/// Tries of a reader or writer that finds a bucket being written, before it gives up.
const TRIES_MAX: usize = if cfg!(all(test, kvrouted_loom)) { 1 } else { 256 };

/// The outcome of binding a session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BindOutcome {
    /// The session is bound: for the first time, again, or to another worker.
    Done,
    /// The session is bound, and the least recently used binding of its bucket was evicted.
    Evicted,
    /// The binding was left as it was, because other writers held the bucket for too long, or because a later one is there.
    Skipped,
}

/// A binding as a restart keeps it, for a table with the same secret.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KeptBinding {
    /// The hash of the session's name and space.
    pub key: [u64; 2],
    /// The worker of the session.
    pub worker: Worker,
    /// The user that bound it last.
    pub user: u32,
    /// The time since its last use, seconds.
    pub age_s: u32,
}

/// The user of bindings that other routers told. No process has this number.
pub const HEARD_USER: u32 = u32::MAX;

/// The session bindings of all spaces.
#[derive(Debug)]
pub struct AffinityTable {
    buckets: Box<[Bucket]>,
    secret: u64,
    /// Entries of a bucket that one user may hold before others may evict them.
    user_ways: usize,
}

#[derive(Debug, Default)]
#[repr(align(64))]
struct Bucket {
    /// Odd while a writer changes an entry.
    sequence: SeqWord,
    entries: [Entry; WAYS],
    /// The user that bound each entry last.
    users: [AtomicU32; WAYS],
}

#[derive(Debug, Default)]
struct Entry {
    key: [AtomicU64; 2],
    worker_id: AtomicU64,
    /// The rank in the upper half. In the lower half the time of the last use: seconds of the caller's clock plus one;
    /// 0 = empty.
    rank_and_used: AtomicU64,
}

/// An entry as plain values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Binding {
    key: [u64; 2],
    worker: Worker,
    used: u32,
}

impl Binding {
    /// Whether the binding still holds at `now` (seconds plus one), with this time to live.
    const fn holds(&self, now: u32, ttl_s: u32) -> bool {
        self.used != 0 && now.saturating_sub(self.used) <= ttl_s
    }
}

impl Entry {
    fn read(&self) -> Binding {
        // Relaxed everywhere: the sequence of the bucket tells whether the values belong together.
        let rank_and_used = self.rank_and_used.load(Ordering::Relaxed);
        let id = WorkerId(self.worker_id.load(Ordering::Relaxed));
        let worker = Worker { id, rank: DpRank((rank_and_used >> 32) as u32) };
        let key = [self.key[0].load(Ordering::Relaxed), self.key[1].load(Ordering::Relaxed)];
        Binding { key, worker, used: rank_and_used as u32 }
    }

    fn write(&self, binding: &Binding) {
        self.key[0].store(binding.key[0], Ordering::Relaxed);
        self.key[1].store(binding.key[1], Ordering::Relaxed);
        self.worker_id.store(binding.worker.id.0, Ordering::Relaxed);
        let rank_and_used = u64::from(binding.worker.rank.0) << 32 | u64::from(binding.used);
        self.rank_and_used.store(rank_and_used, Ordering::Relaxed);
    }
}

impl Bucket {
    /// All entries at one moment; `None` = writers changed the bucket during every try.
    fn read(&self) -> Option<[Binding; WAYS]> {
        for _ in 0..TRIES_MAX {
            let before = self.sequence.load();
            let entries = std::array::from_fn(|way| self.entries[way].read());
            if before.is_multiple_of(2) && self.sequence.is_unchanged(before) {
                return Some(entries);
            }
            spin();
        }
        None
    }

    /// Keeps other writers out until [`Bucket::close`]; `false` = another writer is in.
    fn open(&self) -> bool {
        for _ in 0..TRIES_MAX {
            if self.sequence.try_begin_write() {
                return true;
            }
            spin();
        }
        false
    }

    fn close(&self) {
        self.sequence.end_write();
    }
}

impl AffinityTable {
    /// A table for about `sessions_max` sessions. `secret` must be unknown to those who name sessions, so that they
    /// cannot force collisions.
    #[must_use]
    pub fn new(sessions_max: usize, secret: u64) -> Self {
        let buckets = sessions_max.div_ceil(WAYS).max(1);
        Self { buckets: (0..buckets).map(|_| Bucket::default()).collect(), secret, user_ways: WAYS }
    }

    /// The same table, with this share of a bucket, in percent, that one user may hold before others may evict its
    /// entries.
    #[must_use]
    pub fn shared_by(self, user_share_percent: u8) -> Self {
        Self { user_ways: share(user_share_percent, WAYS), ..self }
    }

    fn place(&self, space: SpaceId, session: &str) -> ([u64; 2], &Bucket) {
        let hash = xxh3_128_with_seed(session.as_bytes(), self.secret.wrapping_add(u64::from(space.0) << 32));
        let key = [hash as u64, (hash >> 64) as u64];
        (key, self.bucket_of(key))
    }

    fn bucket_of(&self, key: [u64; 2]) -> &Bucket {
        // The upper half of the product spreads keys evenly over the buckets.
        let bucket = (u128::from(key[0]) * self.buckets.len() as u128) >> 64;
        &self.buckets[bucket as usize]
    }

    /// The worker of a session that was used within `ttl_s` seconds. Takes no lock. A bucket that writers keep changing
    /// counts as unbound.
    #[must_use]
    pub fn worker_of(&self, space: SpaceId, session: &str, now_s: u32, ttl_s: u32) -> Option<Worker> {
        let (key, bucket) = self.place(space, session);
        let entries = bucket.read()?;
        let found = entries.iter().find(|entry| entry.key == key && entry.holds(now_s.saturating_add(1), ttl_s));
        found.map(|entry| entry.worker)
    }

    /// Binds a session to a worker for a user, or renews its binding.
    pub fn bind(
        &self,
        space: SpaceId,
        session: &str,
        (worker, user): (Worker, u32),
        now_s: u32,
        ttl_s: u32,
    ) -> BindOutcome {
        let (key, bucket) = self.place(space, session);
        let now = now_s.saturating_add(1);
        self.put((Binding { key, worker, used: now }, user), bucket, (now, ttl_s), |_| true)
    }

    /// Puts a binding into its bucket at `now` (seconds plus one), if it may replace the one that the session has.
    fn put(
        &self,
        (binding, user): (Binding, u32),
        bucket: &Bucket,
        (now, ttl_s): (u32, u32),
        may_replace: impl Fn(&Binding) -> bool,
    ) -> BindOutcome {
        if !bucket.open() {
            return BindOutcome::Skipped;
        }
        let key = binding.key;
        let entries: [Binding; WAYS] = std::array::from_fn(|way| bucket.entries[way].read());
        let own = entries.iter().position(|entry| entry.used != 0 && entry.key == key);
        if own.is_some_and(|way| !may_replace(&entries[way])) {
            bucket.close();
            return BindOutcome::Skipped;
        }
        // Relaxed: only the writer that opened the bucket reads its users.
        let users: [u32; WAYS] = std::array::from_fn(|way| bucket.users[way].load(Ordering::Relaxed));
        let holds = |way: usize| entries[way].holds(now, ttl_s);
        let way = own.unwrap_or_else(|| self.way_to_evict((&entries, &users), holds, user));
        bucket.entries[way].write(&binding);
        bucket.users[way].store(user, Ordering::Relaxed);
        bucket.close();
        if own.is_none() && holds(way) { BindOutcome::Evicted } else { BindOutcome::Done }
    }

    /// Appends the bindings in the buckets from `from`, 0 at first, that were used within `ttl_s` seconds. Looks at
    /// `buckets_max` buckets, and takes no lock. Returns where to continue; `None` = done.
    pub fn keep(
        &self,
        (from, buckets_max): (usize, usize),
        (now_s, ttl_s): (u32, u32),
        kept: &mut Vec<KeptBinding>,
    ) -> Option<usize> {
        let (now, to) = (now_s.saturating_add(1), from.saturating_add(buckets_max).min(self.buckets.len()));
        for bucket in self.buckets.get(from..to).unwrap_or_default() {
            // Of a bucket that was never written, only the first line is read.
            if bucket.sequence.load() == 0 {
                continue;
            }
            // A bucket that writers keep changing is left out.
            let entries = bucket.read().into_iter().flatten().zip(&bucket.users);
            let held = entries.filter(|(entry, _)| entry.holds(now, ttl_s));
            kept.extend(held.map(|(entry, user)| KeptBinding {
                key: entry.key,
                worker: entry.worker,
                // Relaxed: it may be the user of the next binding, which then counts for the one before.
                user: user.load(Ordering::Relaxed),
                age_s: now.saturating_sub(entry.used),
            }));
        }
        (to < self.buckets.len()).then_some(to)
    }

    /// Counts what changes in the bindings: while it is the same, so are they. Reads the whole table.
    #[must_use]
    pub fn changes(&self) -> u64 {
        self.buckets.iter().map(|bucket| bucket.sequence.load()).fold(0, u64::wrapping_add)
    }

    /// Restores a binding that was kept `since_s` seconds ago. `false` = its last use was more than `ttl_s` seconds ago.
    pub fn restore(&self, kept: &KeptBinding, since_s: u32, (now_s, ttl_s): (u32, u32)) -> bool {
        let now = now_s.saturating_add(1);
        let used = now.saturating_sub(kept.age_s.saturating_add(since_s));
        let binding = Binding { key: kept.key, worker: kept.worker, used };
        let holds = binding.holds(now, ttl_s);
        if holds {
            self.put((binding, kept.user), self.bucket_of(kept.key), (now, ttl_s), |_| true);
        }
        holds
    }

    /// Takes over a binding that another router told, unless the session was used here at the same time or later. `false` =
    /// it was not taken over.
    pub fn hear(&self, heard: &KeptBinding, (now_s, ttl_s): (u32, u32)) -> bool {
        let now = now_s.saturating_add(1);
        // What was used before this router's clock began counts as used then.
        let used = now.saturating_sub(heard.age_s).max(1);
        let binding = Binding { key: heard.key, worker: heard.worker, used };
        let (bucket, is_earlier) = (self.bucket_of(heard.key), |own: &Binding| own.used < used);
        binding.holds(now, ttl_s)
            && self.put((binding, heard.user), bucket, (now, ttl_s), is_earlier) != BindOutcome::Skipped
    }

    /// The entry to evict for a new one of `user`: an expired one; else, if the user has its share, the least recently
    /// used of its own; else of a user above its share; else of any user.
    fn way_to_evict(
        &self,
        (entries, users): (&[Binding; WAYS], &[u32; WAYS]),
        holds: impl Fn(usize) -> bool,
        user: u32,
    ) -> usize {
        let oldest =
            |may: &dyn Fn(usize) -> bool| (0..WAYS).filter(|way| may(*way)).min_by_key(|way| entries[*way].used);
        let held_by = |user: u32| (0..WAYS).filter(|way| holds(*way) && users[*way] == user).count();
        oldest(&|way| !holds(way))
            .or_else(|| oldest(&|way| users[way] == user && held_by(user) >= self.user_ways))
            .or_else(|| oldest(&|way| held_by(users[way]) > self.user_ways))
            .or_else(|| oldest(&|_| true))
            .unwrap_or(0)
    }

    /// Memory of the table, which does not depend on the number of bindings.
    #[must_use]
    pub const fn bytes(&self) -> usize {
        self.buckets.len() * size_of::<Bucket>()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ids::WorkerIndex;
    use crate::load::Load;
    use crate::protocol::{Overrides, WorkerState};
    use crate::route::{Draws, RequestFacts, WorkerFacts, judge};

    /// Workers 0, 1 and so on with these requests in flight, and a session that is bound to worker 0.
    fn facts(requests: &[u64]) -> Observation {
        let worker = |(place, requests): (usize, &u64)| WorkerFacts {
            index: WorkerIndex(place as u32),
            worker: Worker::new(place as u64, 0),
            load: Load { requests: *requests, decode_blocks: *requests * 10, ..Load::default() },
            ..WorkerFacts::default()
        };
        let request = RequestFacts {
            prompt_tokens: 160,
            block_size: 16,
            whole_blocks: 10,
            candidates_max: 8,
            session: AffinitySession::Bound(Worker::new(0, 0)),
            ..RequestFacts::default()
        };
        Observation { request, workers: requests.iter().enumerate().map(worker).collect(), ..Observation::default() }
    }

    fn policy(mode: AffinityMode, load_max: f64) -> Policy {
        Policy { affinity: AffinityPolicy { mode, load_max, ..AffinityPolicy::default() }, ..Policy::kv() }
    }

    fn judged(policy: &Policy, observation: &Observation) -> (u64, AffinityOutcome, u32) {
        let mut decision = Decision::default();
        judge(policy, observation, Draws::new(1), &mut decision);
        (decision.candidates[0].worker.id.0, decision.affinity, decision.eligible)
    }

    #[test]
    fn a_hard_session_stays_until_its_worker_is_overloaded_or_ineligible() {
        let hard = policy(AffinityMode::Hard, 2.0);
        // 4 requests on 2 workers, the next one included: 4 are allowed on one worker.
        assert_eq!(judged(&hard, &facts(&[3, 0])), (0, AffinityOutcome::Kept, 1));
        // On 3 workers, 3 are allowed.
        let (chosen, affinity, eligible) = judged(&hard, &facts(&[3, 0, 0]));
        assert!(chosen != 0 && (affinity, eligible) == (AffinityOutcome::Overloaded, 3));
        let mut drains = facts(&[0, 9]);
        drains.workers.update(0, |facts| facts.state = WorkerState::Draining);
        assert_eq!(judged(&hard, &drains), (1, AffinityOutcome::Ineligible, 1));
        let mut pinned = facts(&[0, 9]);
        pinned.request.pin = Some(Worker::new(1, 0));
        pinned.workers.update(0, |facts| facts.is_pinned = false);
        assert_eq!(judged(&hard, &pinned), (1, AffinityOutcome::Pinned, 1));
        assert_eq!(judged(&policy(AffinityMode::Off, 1.0), &facts(&[3, 0])).0, 1, "no worker is preferred");
    }

    #[test]
    fn a_soft_session_stays_while_its_worker_is_cheap_enough() {
        let soft = policy(AffinityMode::Soft, f64::MAX);
        // 10 to prefill and 10 to decode make 20; half of 20 + 10 is less, half of 20 + 30 is not.
        assert_eq!(judged(&soft, &facts(&[1, 0])), (0, AffinityOutcome::Kept, 2));
        assert_eq!(judged(&soft, &facts(&[3, 0])), (1, AffinityOutcome::Outweighed, 2));
        // In modes without a comparable cost, a soft session stays as a hard one does.
        for mode in [Mode::Random, Mode::RoundRobin, Mode::PowerOfTwo, Mode::DeviceAwareWeighted] {
            let mut observation = facts(&[3, 0]);
            observation.request.overrides = Overrides { mode: Some(mode), ..Overrides::default() };
            assert_eq!(judged(&soft, &observation), (0, AffinityOutcome::Kept, 1), "{mode:?}");
        }
    }

    #[test]
    fn infinite_and_negative_costs_ignore_the_factor() {
        let affinity = AffinityPolicy { factor: 0.0, ..AffinityPolicy::default() };
        let free = Policy { affinity, ..Policy::kv() };
        let discount =
            |cost| AffinityEffect::Discounted(0).discount(&free, 0, CostTerms { cost, ..CostTerms::default() }).cost;
        assert_eq!([30.0, f64::INFINITY, -3.0].map(discount), [0.0, f64::INFINITY, -3.0]);
    }

    #[test]
    fn an_unbound_session_is_new() {
        let mut observation = facts(&[0, 0]);
        observation.request.session = AffinitySession::Unbound;
        assert_eq!(judged(&policy(AffinityMode::Hard, 1.0), &observation).1, AffinityOutcome::New);
        observation.request.session = AffinitySession::None;
        assert_eq!(judged(&policy(AffinityMode::Hard, 1.0), &observation).1, AffinityOutcome::None);
    }
}

/// Every order of accesses that the memory model allows, tried by the model checker: `RUSTFLAGS="--cfg kvrouted_loom"
/// cargo test --lib --release route::affinity`
#[cfg(all(test, kvrouted_loom))]
mod loom {
    use std::sync::Arc;

    use super::*;

    const SPACE: SpaceId = SpaceId(0);

    fn worker(number: u32) -> Worker {
        Worker { id: WorkerId(u64::from(number)), rank: DpRank(number) }
    }

    fn bind(table: &AffinityTable, number: u32) -> BindOutcome {
        table.bind(SPACE, "s", (worker(number), 0), 0, 10)
    }

    #[test]
    fn a_concurrent_reader_sees_a_whole_binding_or_none() {
        ::loom::model(|| {
            let table = Arc::new(AffinityTable::new(1, 0));
            assert_eq!(bind(&table, 1), BindOutcome::Done);
            let shared = Arc::clone(&table);
            let reader = ::loom::thread::spawn(move || shared.worker_of(SPACE, "s", 0, 10));
            assert_eq!(bind(&table, 2), BindOutcome::Done);
            let seen = reader.join().expect("it ended");
            assert!(seen.is_none_or(|seen| seen == worker(1) || seen == worker(2)), "{seen:?}");
            assert_eq!(table.worker_of(SPACE, "s", 0, 10), Some(worker(2)));
        });
    }

    #[test]
    fn concurrent_writers_serialize_or_skip() {
        ::loom::model(|| {
            let table = Arc::new(AffinityTable::new(1, 0));
            let shared = Arc::clone(&table);
            let other = ::loom::thread::spawn(move || bind(&shared, 1));
            let done = [bind(&table, 2), other.join().expect("it ended")];
            assert!(done.contains(&BindOutcome::Done));
            let bound = table.worker_of(SPACE, "s", 0, 10).expect("bound by one of them");
            let skipped = done.map(|bound| bound == BindOutcome::Skipped);
            assert!(!skipped[0] || bound == worker(1));
            assert!(!skipped[1] || bound == worker(2));
        });
    }
}

#[cfg(all(test, not(kvrouted_loom)))]
mod table_tests {
    use std::collections::HashMap;

    use proptest::prelude::*;

    use super::*;

    const SPACE: SpaceId = SpaceId(0);
    const TTL_S: u32 = 10;

    proptest! {
        #[test]
        fn bindings_equal_those_of_a_map_except_evicted_ones(
            steps in prop::collection::vec((0..2_u32, 0..40_u32, 0..5_u64, 0..4_u32, any::<bool>()), 1..300)
        ) {
            let (table, mut model) = (AffinityTable::new(32, 7), HashMap::new());
            let (mut now_s, mut evictions) = (0, 0);
            for (space, session, worker, later_s, binds) in steps {
                now_s += later_s;
                let (space, name) = (SpaceId(space), session.to_string());
                let known = model.get(&(space, session)).filter(|(_, used)| now_s - used <= TTL_S).map(|(of, _)| *of);
                let said = table.worker_of(space, &name, now_s, TTL_S);
                if said.is_some() {
                    prop_assert_eq!(said, known);
                }
                let living = model.iter().filter(|((space, session), (_, used))| {
                    now_s - used <= TTL_S
                        && table.worker_of(*space, &session.to_string(), now_s, TTL_S).is_none()
                });
                prop_assert!(living.count() <= evictions, "nothing is lost but what was given up");
                if binds {
                    let worker = Worker::new(worker, session);
                    let bound = table.bind(space, &name, (worker, session % 3), now_s, TTL_S);
                    evictions += usize::from(bound == BindOutcome::Evicted);
                    prop_assert_eq!(table.worker_of(space, &name, now_s, TTL_S), Some(worker));
                    model.insert((space, session), (worker, now_s));
                }
            }
        }
    }

    #[test]
    fn a_full_bucket_evicts_the_least_recently_used_binding() {
        let table = AffinityTable::new(1, 0);
        let worker = Worker::new(3, 1);
        let names: Vec<String> = (0..=WAYS as u32).map(|n| n.to_string()).collect();
        for (now_s, name) in names[..WAYS].iter().enumerate() {
            assert_eq!(table.bind(SPACE, name, (worker, 0), now_s as u32, 100), BindOutcome::Done);
        }
        assert_eq!(table.bind(SPACE, &names[0], (worker, 0), 50, 100), BindOutcome::Done);
        assert_eq!(table.bind(SPACE, &names[WAYS], (worker, 0), 51, 100), BindOutcome::Evicted);
        let is_bound = |name: &String| table.worker_of(SPACE, name, 51, 100).is_some();
        assert_eq!(names.iter().filter(|name| !is_bound(name)).collect::<Vec<_>>(), [&names[1]]);
        assert_eq!(table.bind(SPACE, "late", (worker, 0), 200, 100), BindOutcome::Done, "it took an expired place");
    }

    #[test]
    fn a_user_cannot_evict_the_sessions_of_others() {
        let table = AffinityTable::new(1, 0).shared_by(75);
        let (worker, held) = (Worker::new(3, 1), |table: &AffinityTable, name: &str| {
            table.worker_of(SPACE, name, 5_000, 10_000).is_some()
        });
        let flood = |from: u32| {
            for n in from..from + 1000 {
                table.bind(SPACE, &format!("greedy{n}"), (worker, 7), n, 10_000);
            }
        };
        // Alone, the user may hold the whole bucket.
        flood(0);
        assert_eq!((0..1000).filter(|n| held(&table, &format!("greedy{n}"))).count(), WAYS);
        for name in ["a", "b"] {
            table.bind(SPACE, name, (worker, 8), 1000, 10_000);
        }
        flood(1001);
        assert!(held(&table, "a") && held(&table, "b"), "a quarter of the bucket");
        let all = AffinityTable::new(1, 0);
        all.bind(SPACE, "a", (worker, 8), 0, 10_000);
        for n in 1..1000 {
            all.bind(SPACE, &n.to_string(), (worker, 7), n, 10_000);
        }
        assert!(!held(&all, "a"), "where one may have everything");
    }

    #[test]
    fn each_bind_is_a_change_and_no_read_is() {
        let table = AffinityTable::new(64, 9);
        let mut seen = vec![table.changes()];
        for (session, now_s) in [("a", 1), ("b", 1), ("a", 2)] {
            table.bind(SPACE, session, (Worker::new(1, 0), 0), now_s, TTL_S);
            assert!(table.worker_of(SPACE, "a", now_s, TTL_S).is_some());
            table.keep((0, 64), (now_s, TTL_S), &mut Vec::new());
            assert!(!seen.contains(&table.changes()));
            seen.push(table.changes());
        }
        assert_eq!(seen.last(), Some(&table.changes()));
    }

    #[test]
    fn spaces_share_nothing_and_memory_is_as_stated() {
        let table = AffinityTable::new(65_536, 9);
        table.bind(SPACE, "s", (Worker::new(1, 0), 0), 0, TTL_S);
        assert_eq!(table.worker_of(SpaceId(1), "s", 0, TTL_S), None);
        assert_eq!(table.worker_of(SPACE, "t", 0, TTL_S), None);
        assert!(table.bytes() <= 65_536 * 40, "{}", table.bytes());
    }

    #[test]
    fn readers_never_see_half_a_binding() {
        let table = AffinityTable::new(8, 1);
        std::thread::scope(|scope| {
            for thread in 0..2_u64 {
                let table = &table;
                scope.spawn(move || {
                    for n in 0..20_000_u64 {
                        let worker = Worker::new(n * 2 + thread, (n * 2 + thread) as u32);
                        let session = (n % 3).to_string();
                        table.bind(SPACE, &session, (worker, 0), 0, TTL_S);
                    }
                });
            }
            for n in 0..60_000_u64 {
                if let Some(worker) = table.worker_of(SPACE, &(n % 3).to_string(), 0, TTL_S) {
                    assert_eq!(worker.id.0 as u32, worker.rank.0);
                }
            }
        });
    }
}
