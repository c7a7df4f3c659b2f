//! Session affinity: the policy, its effect on a decision, and the table of sessions and their workers.
//!
//! A gateway names a session with a request so that the requests of one conversation go to one worker. All serving
//! threads share one [`AffinityTable`] of fixed size: buckets of eight entries, 32 bytes each. The hash of the session's name
//! selects the bucket. A full bucket evicts its least recently used entry. The table stores 128-bit hashes of the names, made
//! with a secret, and no names.
//!
//! Readers take no lock. Each bucket has a sequence number, odd while a writer is in it; a reader that sees the number change
//! reads again. A writer that cannot enter a bucket within a bounded number of tries leaves the entry as it was and reports
//! that, so no thread here waits for a descheduled one.

use xxhash_rust::xxh3::xxh3_128_with_seed;

use super::cost::CostTerms;
use super::decision::Decision;
use super::observation::Observation;
use super::policy::Mode;
use super::policy::Policy;
use super::rules::Rule;
use crate::ids::{DpRank, SpaceId, Worker, WorkerId};
use crate::shares::share;
use crate::sync::{AtomicU32, AtomicU64, Ordering, fence, spin};

/// How far a session is kept with its worker.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum AffinityMode {
    /// Not at all.
    #[default]
    Off,
    /// Its worker's cost is lessened by a factor.
    Soft,
    /// Its worker is taken, as long as it may be chosen and is not overloaded.
    Hard,
}

impl AffinityMode {
    /// The names used in the configuration.
    pub const NAMES: [&'static str; 3] = ["off", "soft", "hard"];
    /// Every mode, in the order of [`AffinityMode::NAMES`].
    pub const ALL: [Self; 3] = [Self::Off, Self::Soft, Self::Hard];
}

/// How sessions are kept with their workers.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AffinityPolicy {
    /// How far.
    pub mode: AffinityMode,
    /// How long a session is bound that nothing is booked for, seconds.
    pub ttl_s: u32,
    /// Factor of the bound worker's cost where that is only lessened, 0 to 1.
    pub factor: f64,
    /// A worker is overloaded beyond so many times the average of requests in flight, this one included; at least 1.
    pub load_max: f64,
}

impl Default for AffinityPolicy {
    fn default() -> Self {
        Self { mode: AffinityMode::Off, ttl_s: 3600, factor: 0.5, load_max: 1.25 }
    }
}

/// What is known of the session that a request names.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum AffinitySession {
    /// It names none, or sessions are not kept.
    #[default]
    None,
    /// It is bound to nobody yet, or no more.
    Unbound,
    /// It is bound to this worker.
    Bound(Worker),
}

/// What became of a session's binding in a decision.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum AffinityOutcome {
    /// There is no session to keep.
    #[default]
    None,
    /// It was bound to nobody.
    New,
    /// It stays with its worker.
    Kept,
    /// Its worker is not in the running.
    Ineligible,
    /// Its worker has more in flight than the average allows.
    Overloaded,
    /// Another was cheaper in spite of the factor.
    Outweighed,
    /// The request is pinned to another.
    Pinned,
}

/// Whether the worker that a session is bound to is preferred.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum AffinityEffect {
    /// Nobody is.
    None,
    /// It may not be chosen, or is overloaded.
    Lost(AffinityOutcome),
    /// The one at this place of the observation is cheaper.
    Discounted(u32),
    /// Only it stays in the running.
    Only(u32),
}

impl AffinityEffect {
    /// Who is preferred among those in the running.
    pub(super) fn of(policy: &Policy, observation: &Observation, decision: &Decision) -> Self {
        let affinity = &policy.affinity;
        let AffinitySession::Bound(worker) = observation.request.session else { return Self::None };
        // A pin says more than a habit.
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

    /// The place of the worker that is cheaper, if one is.
    pub(super) const fn discounted_row(self) -> Option<u32> {
        if let Self::Discounted(place) = self { Some(place) } else { None }
    }

    /// What the worker at a place costs, if it is preferred.
    #[inline]
    pub(super) fn discount(self, policy: &Policy, place: u32, terms: CostTerms) -> CostTerms {
        if self != Self::Discounted(place) {
            return terms;
        }
        let affinity_factor = factor(&policy.affinity, terms.cost);
        CostTerms { affinity_factor, cost: terms.cost * affinity_factor, ..terms }
    }

    /// Takes the others out of the running, where only one may stay.
    pub(super) fn apply(self, observation: &Observation, decision: &mut Decision) {
        let Self::Only(only) = self else { return };
        let others = decision.eligible_rows.iter().filter(|place| **place != only);
        let others = others.map(|row| observation.workers.worker(*row as usize));
        decision.removed.extend(others.map(|worker| (Rule::BoundElsewhere, worker)));
        decision.eligible_rows.clear();
        decision.eligible_rows.push(only);
    }

    /// What became of the binding, once somebody is chosen.
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

/// By what the cost of the bound worker is lessened. One below nothing cannot be lessened by a factor, nor can one without
/// end: nothing times it is no number.
pub(super) fn factor(affinity: &AffinityPolicy, cost: f64) -> f64 {
    let is_weighable = cost > 0.0 && cost.is_finite();
    if is_weighable { affinity.factor } else { 1.0 }
}

/// Whether one more request is more than `load_max` times the average of all in the running with it: consistent hashing
/// with bounded loads (Mirrokni, Thorup, Zadimoghaddam 2016) has the same bound.
fn is_overloaded(load_max: f64, bound_requests: u64, eligible_requests: impl Iterator<Item = u64>) -> bool {
    let (mut requests, mut workers) = (1_u64, 0_u64);
    for of_worker in eligible_requests {
        requests += of_worker;
        workers += 1;
    }
    let allowed = (load_max * requests as f64 / workers.max(1) as f64).ceil();
    (bound_requests + 1) as f64 > allowed
}

/// Whether a lower cost is what a mode chooses by, so that a factor of it says something. Elsewhere a preference is to
/// be chosen.
const fn chooses_by_lowest_cost(mode: Mode) -> bool {
    matches!(mode, Mode::Kv | Mode::LoadAware | Mode::Approximate | Mode::LeastLoaded | Mode::Lmetric)
}

/// Entries of one bucket. The model checker gets a small world.
const WAYS: usize = if cfg!(all(test, kvrouted_loom)) { 1 } else { 8 };
/// Times that a reader or a writer finds a bucket being written before it goes without.
const TRIES_MAX: usize = if cfg!(all(test, kvrouted_loom)) { 1 } else { 256 };

/// What binding a session did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BindOutcome {
    /// It is bound; whether for the first time, again or to another worker.
    Done,
    /// It is bound, in place of a session that was used less recently and still bound.
    Evicted,
    /// It is bound as it was: others were at work for too long.
    Skipped,
}

/// The bindings of all spaces.
#[derive(Debug)]
pub struct AffinityTable {
    buckets: Box<[Bucket]>,
    secret: u64,
    /// Entries of a bucket that one user does not lose to others.
    user_ways: usize,
}

#[derive(Debug, Default)]
#[repr(align(64))]
struct Bucket {
    /// Odd while an entry is written.
    sequence: AtomicU64,
    entries: [Entry; WAYS],
    /// Who bound each entry last.
    users: [AtomicU32; WAYS],
}

#[derive(Debug, Default)]
struct Entry {
    key: [AtomicU64; 2],
    worker_id: AtomicU64,
    /// The rank above, and below when it was last used: seconds of the caller's clock plus one; 0 = nobody's.
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
    /// Whether it holds at a time, seconds plus one, where an unused one lasts so many seconds.
    const fn holds(&self, now: u32, ttl_s: u32) -> bool {
        self.used != 0 && now.saturating_sub(self.used) <= ttl_s
    }
}

impl Entry {
    fn read(&self) -> Binding {
        // Relaxed everywhere: the bucket's sequence says whether it is whole.
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
    /// All entries as they were at one moment; `None` = it is written all the time.
    fn read(&self) -> Option<[Binding; WAYS]> {
        for _ in 0..TRIES_MAX {
            // Acquire: pairs with DONE.
            let before = self.sequence.load(Ordering::Acquire);
            let entries = std::array::from_fn(|way| self.entries[way].read());
            // Acquire fence: pairs with OPEN; an entry of a later write makes the later sequence visible.
            fence(Ordering::Acquire);
            if before.is_multiple_of(2) && self.sequence.load(Ordering::Relaxed) == before {
                return Some(entries);
            }
            spin();
        }
        None
    }

    /// Keeps other writers out until [`Bucket::close`]; `None` = another is in.
    fn open(&self) -> Option<u64> {
        for _ in 0..TRIES_MAX {
            let sequence = self.sequence.load(Ordering::Relaxed);
            // Acquire: pairs with DONE, so that what the writer before wrote is seen.
            let opened = sequence.is_multiple_of(2)
                && self
                    .sequence
                    .compare_exchange_weak(sequence, sequence + 1, Ordering::Acquire, Ordering::Relaxed)
                    .is_ok();
            if opened {
                // OPEN: no entry may be seen changed before the odd sequence.
                fence(Ordering::Release);
                return Some(sequence);
            }
            spin();
        }
        None
    }

    fn close(&self, opened: u64) {
        // DONE.
        self.sequence.store(opened + 2, Ordering::Release);
    }
}

impl AffinityTable {
    /// Room for about `sessions_max` sessions. `secret` is not to be known to those who name sessions, who could have
    /// them collide.
    #[must_use]
    pub fn new(sessions_max: usize, secret: u64) -> Self {
        let buckets = sessions_max.div_ceil(WAYS).max(1);
        Self { buckets: (0..buckets).map(|_| Bucket::default()).collect(), secret, user_ways: WAYS }
    }

    /// The same where the sessions of one user leave the others' bound beyond so many percent of a bucket.
    #[must_use]
    pub fn shared_by(self, user_share_percent: u8) -> Self {
        Self { user_ways: share(user_share_percent, WAYS), ..self }
    }

    fn place(&self, space: SpaceId, session: &str) -> ([u64; 2], &Bucket) {
        let hash = xxh3_128_with_seed(session.as_bytes(), self.secret.wrapping_add(u64::from(space.0) << 32));
        let key = [hash as u64, (hash >> 64) as u64];
        // The upper half of a product: every bucket for as many keys as any other.
        let bucket = (u128::from(key[0]) * self.buckets.len() as u128) >> 64;
        (key, &self.buckets[bucket as usize])
    }

    /// The worker of a session of a space that was used within `ttl_s` seconds. No lock is taken. A bucket that is
    /// written all the time looks as if the session were not bound.
    #[must_use]
    pub fn worker_of(&self, space: SpaceId, session: &str, now_s: u32, ttl_s: u32) -> Option<Worker> {
        let (key, bucket) = self.place(space, session);
        let entries = bucket.read()?;
        let found = entries.iter().find(|entry| entry.key == key && entry.holds(now_s.saturating_add(1), ttl_s));
        found.map(|entry| entry.worker)
    }

    /// Binds a session to a worker for a user, or notes that it is used.
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
        let Some(opened) = bucket.open() else { return BindOutcome::Skipped };
        let entries: [Binding; WAYS] = std::array::from_fn(|way| bucket.entries[way].read());
        let own = entries.iter().position(|entry| entry.used != 0 && entry.key == key);
        // Relaxed: only who has opened the bucket looks at its users.
        let users: [u32; WAYS] = std::array::from_fn(|way| bucket.users[way].load(Ordering::Relaxed));
        let holds = |way: usize| entries[way].holds(now, ttl_s);
        let way = own.unwrap_or_else(|| self.given_up((&entries, &users), holds, user));
        bucket.entries[way].write(&Binding { key, worker, used: now });
        bucket.users[way].store(user, Ordering::Relaxed);
        bucket.close(opened);
        if own.is_none() && holds(way) { BindOutcome::Evicted } else { BindOutcome::Done }
    }

    /// Which entry of a bucket makes way for a new one of `user`: one that holds no more; else, where the user has its
    /// share, its own that was used least recently; else that of a user who has more; else that of anybody.
    fn given_up(
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

    /// Bytes that it takes, however many are bound.
    #[must_use]
    pub const fn bytes(&self) -> usize {
        self.buckets.len() * size_of::<Bucket>()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fleet::WorkerState;
    use crate::ids::WorkerIndex;
    use crate::load::Load;
    use crate::route::{Draws, Overrides, RequestFacts, WorkerFacts, judge};

    /// Workers 0, 1 and so on with so many requests in flight each, and a session that is bound to worker 0.
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
        Policy { affinity: AffinityPolicy { mode, load_max, ..AffinityPolicy::default() }, ..Policy::default() }
    }

    fn judged(policy: &Policy, observation: &Observation) -> (u64, AffinityOutcome, u32) {
        let mut decision = Decision::default();
        judge(policy, observation, Draws::new(1), &mut decision);
        (decision.candidates[0].worker.id.0, decision.affinity, decision.eligible)
    }

    #[test]
    fn a_hard_session_stays_until_its_worker_is_overloaded_or_out_of_the_running() {
        let hard = policy(AffinityMode::Hard, 2.0);
        // 4 requests, the next one included, on 2 workers: 4 are allowed on one.
        assert_eq!(judged(&hard, &facts(&[3, 0])), (0, AffinityOutcome::Kept, 1));
        // On 3 workers 3 are.
        let (chosen, affinity, eligible) = judged(&hard, &facts(&[3, 0, 0]));
        assert!(chosen != 0 && (affinity, eligible) == (AffinityOutcome::Overloaded, 3));
        let mut drains = facts(&[0, 9]);
        drains.workers.update(0, |facts| facts.state = WorkerState::Draining);
        assert_eq!(judged(&hard, &drains), (1, AffinityOutcome::Ineligible, 1));
        let mut pinned = facts(&[0, 9]);
        pinned.request.pin = Some(Worker::new(1, 0));
        pinned.workers.update(0, |facts| facts.is_pinned = false);
        assert_eq!(judged(&hard, &pinned), (1, AffinityOutcome::Pinned, 1));
        assert_eq!(judged(&policy(AffinityMode::Off, 1.0), &facts(&[3, 0])).0, 1, "nobody is preferred");
    }

    #[test]
    fn a_soft_session_stays_while_its_worker_is_cheap_enough() {
        let soft = policy(AffinityMode::Soft, f64::MAX);
        // 10 to prefill and 10 to decode, 20 in all; half of 20 + 10 is less, half of 20 + 30 is not.
        assert_eq!(judged(&soft, &facts(&[1, 0])), (0, AffinityOutcome::Kept, 2));
        assert_eq!(judged(&soft, &facts(&[3, 0])), (1, AffinityOutcome::Outweighed, 2));
        // Where a cost is nothing that can be weighed, it stays as a hard one does.
        for mode in [Mode::Random, Mode::RoundRobin, Mode::PowerOfTwo, Mode::DeviceAwareWeighted] {
            let mut observation = facts(&[3, 0]);
            observation.request.overrides = Overrides { mode: Some(mode), ..Overrides::default() };
            assert_eq!(judged(&soft, &observation), (0, AffinityOutcome::Kept, 1), "{mode:?}");
        }
    }

    #[test]
    fn a_cost_without_end_stays_so_whatever_the_factor() {
        let affinity = AffinityPolicy { factor: 0.0, ..AffinityPolicy::default() };
        let free = Policy { affinity, ..Policy::default() };
        let discount =
            |cost| AffinityEffect::Discounted(0).discount(&free, 0, CostTerms { cost, ..CostTerms::default() }).cost;
        assert_eq!([30.0, f64::INFINITY, -3.0].map(discount), [0.0, f64::INFINITY, -3.0]);
    }

    #[test]
    fn a_session_that_is_new_says_so() {
        let mut observation = facts(&[0, 0]);
        observation.request.session = AffinitySession::Unbound;
        assert_eq!(judged(&policy(AffinityMode::Hard, 1.0), &observation).1, AffinityOutcome::New);
        observation.request.session = AffinitySession::None;
        assert_eq!(judged(&policy(AffinityMode::Hard, 1.0), &observation).1, AffinityOutcome::None);
    }
}

/// Every order of accesses that the memory model allows, tried by the model checker:
/// `RUSTFLAGS="--cfg kvrouted_loom" cargo test --lib --release route::affinity`
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
    fn a_reader_beside_a_writer_sees_a_whole_binding_or_none() {
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
    fn of_two_writers_one_follows_the_other_or_goes_without() {
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
        fn it_says_what_a_map_would_of_all_it_has_not_given_up(
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
                    evictions += usize::from(table.bind(space, &name, (worker, session % 3), now_s, TTL_S) == BindOutcome::Evicted);
                    prop_assert_eq!(table.worker_of(space, &name, now_s, TTL_S), Some(worker));
                    model.insert((space, session), (worker, now_s));
                }
            }
        }
    }

    #[test]
    fn a_full_bucket_gives_up_what_was_used_least_recently() {
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
        assert_eq!(table.bind(SPACE, "late", (worker, 0), 200, 100), BindOutcome::Done, "what is over was nobody's");
    }

    #[test]
    fn a_user_who_binds_without_end_leaves_the_sessions_of_others_bound() {
        let table = AffinityTable::new(1, 0).shared_by(75);
        let (worker, held) = (Worker::new(3, 1), |table: &AffinityTable, name: &str| {
            table.worker_of(SPACE, name, 5_000, 10_000).is_some()
        });
        let flood = |from: u32| {
            for n in from..from + 1000 {
                table.bind(SPACE, &format!("greedy{n}"), (worker, 7), n, 10_000);
            }
        };
        // Alone it has all there is.
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
