//! The bounds of a shard: its memory, its workers, the cost of a clear for readers, and the garbage that a reader can
//! delay.

use crate::oracle::checked_shard::publish_until_unchoked;
use kvrouted::budget::{Gauge, MemoryPool};
use kvrouted::ids::{EngineHash, GroupId, LocalHash, Seed, ShardId, Tier, TierBlocks, WorkerSlot};
use kvrouted::index::{
    Depths, IndexReader, Refusal, ShardLimits, ShardWriter, StoreBlocks, StoreOutcome, WorkerBlocks, shard,
};
use kvrouted::limits::{MEMORY_MARGIN_PERCENT, WORKERS_MAX};
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

const SHARD: ShardId = ShardId(0);
const GROUP: GroupId = GroupId(0);
/// Blocks of one prompt.
const PROMPT: u64 = 64;

/// A shard with one reader, and short calls for its events.
struct Index {
    writer: ShardWriter,
    reader: IndexReader,
    depths: Depths,
}

impl Index {
    fn new(limits: ShardLimits) -> Self {
        let (writer, reader) = shard(SHARD, limits);
        Self { writer, reader: IndexReader::new(vec![reader]), depths: Depths::new() }
    }

    fn worker(&mut self) -> WorkerSlot {
        self.writer.add_worker().expect("room for a worker")
    }

    /// Stores the first blocks of a prompt.
    fn store(&mut self, slot: WorkerSlot, prompt: u64, blocks: u64, tier: Tier) -> StoreOutcome {
        let (hashes, locals) = (names(prompt, blocks), contents(prompt, blocks));
        let store = StoreBlocks { parent: None, hashes: &hashes, locals: &locals, tier, group: GROUP, seed: Seed(0) };
        self.writer.store(slot, &store)
    }

    /// Removes the last `blocks` of the first `of` blocks of a prompt, the last block first.
    fn remove(&mut self, slot: WorkerSlot, prompt: u64, of: u64, blocks: u64) {
        let mut hashes = names(prompt, of).split_off((of - blocks) as usize);
        hashes.reverse();
        assert_eq!(self.writer.remove(slot, Tier::Device, GROUP, &hashes).unknown, 0);
    }

    fn ask(&mut self, prompt: u64) {
        let lookup = self.reader.lookup(&contents(prompt, PROMPT), &mut self.depths);
        assert!(!lookup.contended);
    }

    fn device(&mut self, slot: WorkerSlot, prompt: u64) -> u32 {
        self.ask(prompt);
        self.depths.of(SHARD, slot).device
    }

    /// Sweeps and reclaims until nothing is left to do.
    fn reclaim_all(&mut self) {
        for _ in 0..8 {
            while self.writer.sweep(8192) {}
            self.writer.publish();
            self.writer.reclaim();
        }
    }
}

/// Memory comes from the system in pieces, so the count may grow by one piece without a leak.
const PIECE_BYTES: u64 = 2 << 20;

/// No two prompts share a block.
fn names(prompt: u64, blocks: u64) -> Vec<EngineHash> {
    (0..blocks).map(|at| EngineHash(mixed(prompt * PROMPT + at))).collect()
}

fn contents(prompt: u64, blocks: u64) -> Vec<LocalHash> {
    (0..blocks).map(|at| LocalHash(mixed(!(prompt * PROMPT + at)))).collect()
}

/// A number that looks like a hash, another for each `of` (the last step of SplitMix64).
const fn mixed(of: u64) -> u64 {
    let a = of.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let b = (a ^ (a >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let c = (b ^ (b >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    c ^ (c >> 31)
}

#[test]
fn a_store_beyond_the_memory_ceiling_is_refused_and_answers_stay_right() {
    const MORE_BYTES: u64 = 24 << 20;
    const PROMPTS_MAX: u64 = 200_000;
    let at_first = Index::new(ShardLimits::default()).writer.memory().bytes();
    let memory_bytes_max = at_first + MORE_BYTES;
    let mut index = Index::new(ShardLimits { memory_bytes_max, ..ShardLimits::default() });
    let slot = index.worker();
    let mut accepted = Vec::new();
    let mut refused = Vec::new();
    while refused.len() < 100 {
        let prompt = (accepted.len() + refused.len()) as u64;
        assert!(prompt < PROMPTS_MAX, "{} bytes took {prompt} prompts", MORE_BYTES);
        let outcome = index.store(slot, prompt, PROMPT, Tier::Device);
        match outcome.refused {
            None => accepted.push(prompt),
            Some(refusal) => {
                assert_eq!(refusal, Refusal::MemoryBound);
                assert_eq!(outcome, StoreOutcome { refused: outcome.refused, ..StoreOutcome::default() });
                refused.push(prompt);
            }
        }
        let bytes = index.writer.memory().bytes();
        assert!(bytes <= memory_bytes_max, "{bytes} bytes after {prompt} prompts, more than {memory_bytes_max}");
    }
    assert!(accepted.len() as u64 * PROMPT * 100 > MORE_BYTES, "only {} prompts fit", accepted.len());
    assert_eq!(index.writer.held(slot).bound, accepted.len() as u64 * PROMPT);
    for prompt in &accepted {
        assert_eq!(index.device(slot, *prompt), PROMPT as u32);
    }
    for prompt in &refused {
        assert_eq!(index.device(slot, *prompt), 0);
    }
    let half = accepted.len() / 2;
    for prompt in accepted.drain(..half) {
        index.remove(slot, prompt, PROMPT, PROMPT);
    }
    index.reclaim_all();
    for prompt in &refused {
        let outcome = index.store(slot, *prompt, PROMPT, Tier::Device);
        assert_eq!(outcome.refused, None, "there is room again");
        assert_eq!(index.device(slot, *prompt), PROMPT as u32);
    }
}

#[test]
fn two_shards_share_their_memory_and_a_worker_that_is_held_back_leaves_the_rest_to_others() {
    const PROMPTS_MAX: u64 = 200_000;
    let mut shards = [0, 1].map(|_| Index::new(ShardLimits::default()));
    let at_first: u64 = shards.iter().map(|index| index.writer.memory().bytes()).sum();
    let bytes_max = at_first + (48 << 20);
    let (pool, gauge) = (Arc::new(MemoryPool::new(bytes_max)), Gauge::default());
    shards.iter_mut().for_each(|index| index.writer.draw_from(Arc::clone(&pool), gauge.clone()));
    let [full, other] = &mut shards;
    let [large, small] = [full.worker(), full.worker()];
    // One shard takes all that there is, but for what the other has drawn.
    let mut stored = 0;
    // Each prompt is a batch: a worker remembers the blocks of its latest one.
    while full.store(large, stored, PROMPT, Tier::Device).refused.is_none() {
        stored += 1;
        full.writer.begin_batch(large);
        let (drawn, bytes) = (pool.drawn(), full.writer.memory().bytes());
        let margin = bytes_max / 100 * MEMORY_MARGIN_PERCENT;
        assert!(stored < PROMPTS_MAX && drawn <= bytes_max, "{stored}: {drawn} of {bytes_max}");
        assert!(bytes <= drawn + margin, "{stored}: {bytes} of {drawn}");
    }
    let slot = other.worker();
    let refused = (0..PROMPTS_MAX).find_map(|prompt| other.store(slot, prompt, PROMPT, Tier::Device).refused);
    assert_eq!(refused, Some(Refusal::BudgetBound), "not the shard's own ceiling");
    assert_eq!(full.device(large, stored - 1), PROMPT as u32, "what is held stays");
    // What the large worker holds already needs no memory; new blocks are refused, and those of others are not.
    full.writer.hold_back(large, true);
    for prompt in (0..stored).rev().take(stored as usize / 2) {
        full.remove(large, prompt, PROMPT, PROMPT);
    }
    full.reclaim_all();
    assert!(pool.drawn() < bytes_max, "a shard gives back what it does not need");
    assert_eq!(full.store(large, 0, PROMPT, Tier::Device).refused, None);
    let new = full.store(large, PROMPTS_MAX, PROMPT, Tier::Device);
    assert_eq!(new, StoreOutcome { refused: Some(Refusal::BudgetBound), ..StoreOutcome::default() });
    assert_eq!(full.store(small, PROMPTS_MAX, PROMPT, Tier::Device).refused, None);
    full.writer.hold_back(large, false);
    assert_eq!(full.store(large, PROMPTS_MAX, PROMPT, Tier::Device).refused, None);
    assert_eq!(full.device(large, PROMPTS_MAX), PROMPT as u32);
    drop(shards);
    assert_eq!(pool.drawn(), 0);
}

/// Blocks of the shared prompt that worker `at` holds in the test of many workers.
const fn holdings(at: u32) -> TierBlocks {
    let device = at % 33;
    TierBlocks { device, host: at % 7, disk: at % 3, external: at % 2 }
}

#[test]
fn as_many_workers_as_a_daemon_has_with_holder_bits_in_every_tier() {
    let mut index = Index::new(ShardLimits::default());
    let slots: Vec<WorkerSlot> = (0..WORKERS_MAX).map(|_| index.worker()).collect();
    assert_eq!(index.writer.add_worker(), None, "the shard is full");
    let (hashes, locals) = (names(0, PROMPT), contents(0, PROMPT));
    for (at, slot) in (0..).zip(&slots) {
        let TierBlocks { device, host, disk, external } = holdings(at);
        let mut from = 0;
        for (tier, blocks) in Tier::ALL.into_iter().zip([device, host, disk, external]) {
            let part = from..from + blocks as usize;
            let parent = from.checked_sub(1).map(|at| hashes[at]);
            from = part.end;
            let (hashes, locals) = (&hashes[part.clone()], &locals[part]);
            let store = StoreBlocks { parent, hashes, locals, tier, group: GROUP, seed: Seed(0) };
            assert_eq!(index.writer.store(*slot, &store).stored, blocks);
        }
    }
    index.ask(0);
    for (at, slot) in (0..).zip(&slots) {
        assert_eq!(index.depths.of(SHARD, *slot), holdings(at), "worker {at}");
    }
    for slot in slots.iter().step_by(2) {
        index.writer.remove_worker(*slot);
    }
    index.ask(0);
    for (at, slot) in (0..).zip(&slots) {
        let expected = if at % 2 == 0 { TierBlocks::default() } else { holdings(at) };
        assert_eq!(index.depths.of(SHARD, *slot), expected, "worker {at}");
    }
    index.reclaim_all();
    for _ in slots.iter().step_by(2) {
        let slot = index.worker();
        assert_eq!(index.writer.held(slot), WorkerBlocks::default());
        assert_eq!(index.store(slot, 0, 3, Tier::External).stored, 3);
    }
    index.ask(0);
    for (at, slot) in (0..).zip(&slots) {
        let again = TierBlocks { external: 3, ..TierBlocks::default() };
        assert_eq!(index.depths.of(SHARD, *slot), if at % 2 == 0 { again } else { holdings(at) }, "worker {at}");
    }
}

#[test]
fn a_clear_is_immediate_and_what_follows_it_counts() {
    const PROMPTS: u64 = 800;
    let mut index = Index::new(ShardLimits::default());
    let (slot, other) = (index.worker(), index.worker());
    for prompt in 0..PROMPTS {
        index.store(slot, prompt, PROMPT, Tier::Device);
        index.store(slot, prompt, PROMPT / 2, Tier::Host);
        index.store(other, prompt, PROMPT / 4, Tier::Device);
    }
    index.writer.clear(slot, Some(Tier::Device));
    for prompt in (0..PROMPTS).step_by(7) {
        index.ask(prompt);
        let of_host = TierBlocks { host: PROMPT as u32 / 2, ..TierBlocks::default() };
        assert_eq!(index.depths.of(SHARD, slot), of_host);
        assert_eq!(index.depths.of(SHARD, other).device, PROMPT as u32 / 4);
    }
    index.writer.clear(slot, None);
    assert_eq!(index.writer.held(slot), WorkerBlocks::default());
    for prompt in 0..PROMPTS {
        index.ask(prompt);
        assert_eq!(index.depths.of(SHARD, slot), TierBlocks::default());
        // The rest of the cleared blocks has not been swept yet.
        index.store(slot, prompt, 1 + prompt % PROMPT, Tier::Device);
        assert_eq!(index.device(slot, prompt), 1 + (prompt % PROMPT) as u32);
        index.writer.sweep(16);
    }
    index.reclaim_all();
    for prompt in 0..PROMPTS {
        assert_eq!(index.device(slot, prompt), 1 + (prompt % PROMPT) as u32);
        assert_eq!(index.depths.of(SHARD, other).device, PROMPT as u32 / 4);
    }
}

/// Stores prompts and evicts others, at a fixed number of blocks. Checks the answers on the way.
struct Churn {
    held: VecDeque<u64>,
    next: u64,
}

impl Churn {
    const PROMPTS: usize = 512;

    fn round(&mut self, index: &mut Index, slot: WorkerSlot) {
        // One prompt of the older half in two parts, so that gaps remain, and the oldest prompt whole.
        if self.held.len() > Self::PROMPTS {
            let any = (mixed(self.next) % (self.held.len() as u64 / 2)) as usize;
            if let Some(prompt) = self.held.remove(any) {
                index.remove(slot, prompt, PROMPT, PROMPT / 2);
                index.remove(slot, prompt, PROMPT / 2, PROMPT / 2);
            }
            if let Some(oldest) = self.held.pop_front() {
                index.remove(slot, oldest, PROMPT, PROMPT);
            }
        }
        for _ in 0..2 {
            let outcome = index.store(slot, self.next, PROMPT, Tier::Device);
            assert_eq!(outcome.refused, None);
            self.held.push_back(self.next);
            self.next += 1;
        }
        index.writer.publish();
        publish_until_unchoked(&mut index.writer);
    }
}

#[test]
fn memory_is_flat_under_churn() {
    const ROUNDS: usize = 4000;
    let mut index = Index::new(ShardLimits::default());
    let slot = index.worker();
    let mut churn = Churn { held: VecDeque::new(), next: 0 };
    let (mut early, mut late) = (0, 0);
    for round in 0..ROUNDS {
        churn.round(&mut index, slot);
        let most = if round < ROUNDS / 2 { &mut early } else { &mut late };
        *most = index.writer.memory().bytes().max(*most);
        if round % 64 == 0 {
            let newest = *churn.held.back().expect("it was just stored");
            assert_eq!(index.device(slot, newest), PROMPT as u32);
        }
    }
    assert!(late <= early + early / 10 + PIECE_BYTES, "it grows: {early} bytes, then {late}");
}

#[test]
fn a_reader_that_never_rests_cannot_make_garbage_grow() {
    const ROUNDS: usize = 6000;
    /// More than the largest batches that wait, and far less than these iterations discard.
    const GARBAGE_BYTES_MAX: u64 = 64 << 20;
    let mut index = Index::new(ShardLimits::default());
    let slot = index.worker();
    let (stop, lookups) = (AtomicBool::new(false), AtomicU64::new(0));
    let mut churn = Churn { held: VecDeque::new(), next: 0 };
    let mut most = 0;
    let reader = index.reader.clone();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let (reader, mut depths) = (reader, Depths::new());
            let query = contents(0, PROMPT);
            while !stop.load(Ordering::Relaxed) {
                reader.lookup(&query, &mut depths);
                lookups.fetch_add(1, Ordering::Relaxed);
            }
        });
        let end = End(&stop);
        for round in 0..ROUNDS {
            churn.round(&mut index, slot);
            if round % 500 == 499 {
                index.writer.clear(slot, None);
                churn.held.clear();
            }
            index.writer.sweep(512);
            most = most.max(index.writer.memory().garbage_bytes);
        }
        drop(end);
    });
    assert!(lookups.into_inner() > 0);
    assert!(most <= GARBAGE_BYTES_MAX, "{most} bytes waited for a reader");
    index.reclaim_all();
    assert_eq!(index.writer.memory().garbage_bytes, 0, "no reader is left");
    assert!(!index.writer.is_choked());
}

/// Stops the other thread, also when this one panics.
struct End<'a>(&'a AtomicBool);

impl Drop for End<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}
