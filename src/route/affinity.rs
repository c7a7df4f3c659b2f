//! Which worker a session is bound to.
//!
//! A gateway names a session with a request, so that the requests of one conversation come to one worker. The binding
//! is kept in a table of fixed size that all cores share: buckets of eight entries, 32 bytes each, a session's bucket
//! following from its name. A full bucket gives up the binding that was used least recently. Names are not kept but
//! their 128-bit hashes under a secret.
//!
//! Readers take no lock: a bucket has a sequence, odd while it is written, and who finds it moved reads again. A writer
//! that finds another one at work for too long leaves the binding as it was, and says so: nothing here waits for a
//! thread that was put aside.

use xxhash_rust::xxh3::xxh3_128_with_seed;

use crate::ids::{DpRank, SpaceId, Worker, WorkerId};
use crate::shares::share;
use crate::sync::{AtomicU32, AtomicU64, Ordering, fence, spin};

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
mod tests {
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
