//! The index contract case by case: the streams for which radix trees of other routers give another answer, ambiguity,
//! groups, tiers, and several shards.

use kvrouted::ids::{EngineHash, GroupId, LocalHash, Seed, ShardId, Tier, TierBlocks, WorkerSlot};
use kvrouted::index::{Depths, IndexReader, RemoveOutcome, ShardLimits, ShardWriter, StoreBlocks, StoreOutcome, shard};

const SHARD: ShardId = ShardId(0);
const W1: WorkerSlot = WorkerSlot(0);
const W2: WorkerSlot = WorkerSlot(1);
const W3: WorkerSlot = WorkerSlot(2);
/// The chain of the table: engine hashes 101..104, local hashes 11..14.
const FOUR: [(u64, u64); 4] = [(101, 11), (102, 12), (103, 13), (104, 14)];

struct Index {
    writer: ShardWriter,
    reader: IndexReader,
    depths: Depths,
}

impl Index {
    fn new(workers: u16) -> Self {
        let (mut writer, reader) = shard(SHARD, ShardLimits::default());
        for slot in 0..workers {
            assert_eq!(writer.add_worker(), Some(WorkerSlot(slot)));
        }
        Self { writer, reader: IndexReader::new(vec![reader]), depths: Depths::new() }
    }

    fn store(&mut self, slot: WorkerSlot, parent: Option<u64>, blocks: &[(u64, u64)]) -> StoreOutcome {
        self.store_in(slot, parent, blocks, Tier::Device, 0)
    }

    fn store_in(
        &mut self,
        slot: WorkerSlot,
        parent: Option<u64>,
        blocks: &[(u64, u64)],
        tier: Tier,
        group: u32,
    ) -> StoreOutcome {
        let hashes: Vec<EngineHash> = blocks.iter().map(|(hash, _)| EngineHash(*hash)).collect();
        let locals: Vec<LocalHash> = blocks.iter().map(|(_, local)| LocalHash(*local)).collect();
        let parent = parent.map(EngineHash);
        let (hashes, locals, seed) = (&hashes[..], &locals[..], Seed(1337));
        self.writer.store(slot, &StoreBlocks { parent, hashes, locals, tier, group: GroupId(group), seed })
    }

    fn remove(&mut self, slot: WorkerSlot, hashes: &[u64]) -> RemoveOutcome {
        let hashes: Vec<EngineHash> = hashes.iter().map(|hash| EngineHash(*hash)).collect();
        self.writer.remove(slot, Tier::Device, GroupId(0), &hashes)
    }

    fn held(&mut self, slot: WorkerSlot, query: impl IntoIterator<Item = u64>) -> TierBlocks {
        let query: Vec<LocalHash> = query.into_iter().map(LocalHash).collect();
        self.reader.lookup(&query, &mut self.depths);
        self.depths.of(SHARD, slot)
    }

    fn device(&mut self, slot: WorkerSlot, query: impl IntoIterator<Item = u64>) -> u32 {
        self.held(slot, query).device
    }
}

#[test]
fn a_removed_middle_ends_the_prefix_there() {
    let mut index = Index::new(1);
    index.store(W1, None, &FOUR);
    index.remove(W1, &[102]);
    assert_eq!((index.device(W1, 11..=14), index.device(W1, 11..=13)), (1, 1));
}

#[test]
fn a_middle_that_is_stored_again_brings_back_what_is_below_it() {
    let mut index = Index::new(1);
    index.store(W1, None, &FOUR);
    index.remove(W1, &[102]);
    assert_eq!(index.device(W1, 11..=14), 1);
    index.store(W1, Some(101), &[(102, 12)]);
    assert_eq!(index.device(W1, 11..=14), 4);
}

#[test]
fn a_child_stored_below_a_missing_middle_counts_when_the_middle_is_back() {
    let mut index = Index::new(1);
    index.store(W1, None, &FOUR);
    index.remove(W1, &[102]);
    assert_eq!(index.store(W1, Some(104), &[(105, 15)]).stored, 1);
    assert_eq!(index.device(W1, 11..=15), 1);
    index.store(W1, Some(101), &[(102, 12), (103, 13), (104, 14)]);
    assert_eq!(index.device(W1, 11..=15), 5);
}

#[test]
fn another_workers_prefix_changes_no_answer() {
    let mut index = Index::new(2);
    index.store(W2, None, &[(101, 11), (102, 12), (203, 23)]);
    index.store(W1, None, &FOUR);
    index.remove(W1, &[102]);
    index.store(W1, Some(104), &[(105, 15)]);
    assert_eq!((index.device(W1, 11..=15), index.device(W2, 11..=15)), (1, 2));
    index.store(W1, Some(101), &[(102, 12)]);
    assert_eq!((index.device(W1, 11..=14), index.device(W1, 11..=15)), (4, 5));
}

#[test]
fn a_block_stored_twice_and_removed_once_is_still_held() {
    let mut index = Index::new(1);
    index.writer.begin_batch(W1);
    assert_eq!(index.store(W1, None, &FOUR).already, 0);
    assert_eq!(index.store(W1, None, &FOUR), StoreOutcome { stored: 4, already: 4, ..StoreOutcome::default() });
    index.remove(W1, &[104]);
    assert_eq!(index.device(W1, 11..=14), 4);
    index.remove(W1, &[104]);
    assert_eq!(index.device(W1, 11..=14), 3);
}

#[test]
fn a_store_at_the_root_of_what_was_held_before_its_batch_is_not_counted() {
    let mut index = Index::new(1);
    index.writer.begin_batch(W1);
    index.store(W1, None, &FOUR);
    index.writer.begin_batch(W1);
    let again = index.store(W1, None, &FOUR);
    assert_eq!(again, StoreOutcome { ambiguous: true, already: 4, ..StoreOutcome::default() });
    let partly = index.store(W1, None, &[(101, 11), (102, 12), (103, 13), (104, 14), (105, 15)]);
    assert!(!partly.ambiguous && partly.already == 4 && partly.stored == 5);
    let below = index.store(W1, Some(101), &[(102, 12)]);
    assert!(!below.ambiguous && below.stored == 1, "only at the root");
    let elsewhere = index.store_in(W1, None, &FOUR, Tier::Host, 0);
    assert!(!elsewhere.ambiguous && elsewhere.stored == 4, "another tier");
    // A block removed and stored again within a batch is no second copy.
    let mut index = Index::new(1);
    index.store(W1, None, &[(101, 11)]);
    index.writer.begin_batch(W1);
    index.remove(W1, &[101]);
    assert_eq!(index.store(W1, None, &[(101, 11)]).stored, 1);
    assert_eq!(index.device(W1, [11]), 1);
}

#[test]
fn sets_of_equal_size_are_not_equal() {
    let mut index = Index::new(3);
    for (slot, blocks) in [(W1, &FOUR[..]), (W2, &FOUR[..]), (W3, &FOUR[..2])] {
        index.store(slot, None, blocks);
    }
    index.remove(W1, &[101]);
    assert_eq!(index.device(W3, 11..=14), 2);
    assert_eq!((index.device(W2, 11..=14), index.device(W1, 11..=14)), (4, 0));
}

#[test]
fn workers_that_name_the_same_content_differently_are_independent() {
    let mut index = Index::new(2);
    index.store(W1, None, &FOUR);
    index.store(W2, None, &[(901, 11), (902, 12), (101, 13), (102, 14)]);
    assert_eq!(index.device(W2, 11..=14), 4);
    assert_eq!(index.remove(W2, &[101, 102, 103]), RemoveOutcome { removed: 2, unknown: 1 });
    assert_eq!((index.device(W2, 11..=14), index.device(W1, 11..=14)), (2, 4));
}

#[test]
fn a_hash_that_takes_a_vacated_place_does_not_inherit_what_was_below() {
    let mut index = Index::new(1);
    index.store(W1, None, &FOUR);
    index.remove(W1, &[102]);
    index.store(W1, Some(101), &[(502, 12)]);
    assert_eq!(index.device(W1, 11..=14), 2);
    index.store(W1, Some(502), &[(503, 13)]);
    assert_eq!(index.device(W1, 11..=14), 3);
    index.store(W1, Some(101), &[(102, 12)]);
    assert_eq!(index.device(W1, 11..=14), 4, "the longer of two chains of the same content");
    index.remove(W1, &[102]);
    // The old hash comes back elsewhere, and its children with it.
    index.store(W1, None, &[(102, 42)]);
    assert_eq!((index.device(W1, 11..=14), index.device(W1, [42, 13, 14])), (3, 3));
}

#[test]
fn each_tier_extends_the_one_above() {
    let mut index = Index::new(2);
    index.store(W1, None, &FOUR[..2]);
    index.store_in(W1, Some(101), &[(102, 12), (103, 13)], Tier::Host, 0);
    index.store_in(W1, Some(103), &[(104, 14), (105, 15)], Tier::External, 0);
    let expected = TierBlocks { device: 2, host: 1, disk: 0, external: 2 };
    assert_eq!(index.held(W1, 11..=16), expected);
    index.remove(W1, &[101]);
    assert_eq!(index.held(W1, 11..=16), TierBlocks::default(), "no tier holds the first block");
    index.store_in(W1, None, &[(101, 11)], Tier::Disk, 0);
    assert_eq!(
        index.held(W1, 11..=16),
        TierBlocks { disk: 1, ..TierBlocks::default() },
        "then neither device nor host"
    );
    index.store_in(W2, None, &FOUR[..1], Tier::Host, 0);
    assert_eq!(index.held(W2, 11..=16), TierBlocks { host: 1, ..TierBlocks::default() });
}

#[test]
fn a_clear_of_one_tier_leaves_the_others() {
    let mut index = Index::new(1);
    index.store(W1, None, &FOUR[..2]);
    index.store_in(W1, None, &FOUR, Tier::Host, 0);
    index.writer.clear(W1, Some(Tier::Device));
    assert_eq!(index.held(W1, 11..=14), TierBlocks { host: 4, ..TierBlocks::default() });
    assert_eq!(index.remove(W1, &[101]).unknown, 1);
    index.writer.clear(W1, None);
    assert_eq!(index.held(W1, 11..=14), TierBlocks::default());
    assert_eq!(index.store(W1, Some(101), &[(999, 12)]).dormant, 1, "its parent is gone, the hash is free");
}

#[test]
fn every_announced_group_must_have_a_block() {
    let mut index = Index::new(1);
    index.store(W1, None, &FOUR);
    assert_eq!(index.device(W1, 11..=14), 4);
    index.store_in(W1, None, &FOUR[..2], Tier::Device, 7);
    assert_eq!(index.device(W1, 11..=14), 2);
    assert_eq!(index.writer.held(W1).by_tier, [2, 0, 0, 0]);
    index.remove(W1, &[101]);
    assert_eq!(index.device(W1, 11..=14), 0);
    index.store(W1, None, &FOUR[..1]);
    assert_eq!(index.device(W1, 11..=14), 2);
}

#[test]
fn every_event_is_seen_when_its_call_returns_and_a_publish_counts_batches() {
    let mut index = Index::new(2);
    assert_eq!(index.device(W1, 11..=14), 0);
    index.store(W1, None, &FOUR);
    assert_eq!(index.device(W1, 11..=14), 4);
    index.remove(W1, &[103, 104]);
    assert_eq!(index.device(W1, 11..=14), 2);
    index.store(W2, None, &FOUR[..1]);
    index.writer.clear(W1, Some(Tier::Device));
    assert_eq!((index.device(W1, 11..=14), index.device(W2, 11..=14)), (0, 1));
    index.writer.remove_worker(W2);
    assert_eq!(index.device(W2, 11..=14), 0);
    let epoch = |index: &mut Index| index.reader.lookup(&[], &mut index.depths).epoch;
    assert_eq!(epoch(&mut index), 0);
    index.writer.publish();
    index.writer.publish();
    assert_eq!(epoch(&mut index), 2);
}

#[test]
fn a_reader_of_several_shards_answers_for_each() {
    let ends = [ShardId(3), ShardId(0), ShardId(1)].map(|id| (id, shard(id, ShardLimits::default())));
    let readers = ends.iter().map(|(_, (_, reader))| reader.clone()).collect();
    let (reader, mut depths) = (IndexReader::new(readers), Depths::new());
    let mut writers = ends.map(|(id, (writer, _))| (id, writer));
    for (blocks, (_, writer)) in (1..).zip(&mut writers) {
        let slot = writer.add_worker().expect("room");
        let (hashes, locals) = ([1, 2, 3].map(EngineHash), [11, 12, 13].map(LocalHash));
        let (hashes, locals) = (&hashes[..blocks], &locals[..blocks]);
        let (tier, group, seed) = (Tier::Device, GroupId(0), Seed(0));
        writer.store(slot, &StoreBlocks { parent: None, hashes, locals, tier, group, seed });
        writer.publish();
    }
    let query = [11, 12, 13].map(LocalHash);
    assert_eq!(reader.lookup(&query, &mut depths).epoch, 3);
    let found = [ShardId(3), ShardId(0), ShardId(1), ShardId(2)].map(|id| depths.of(id, W1).device);
    assert_eq!(found, [1, 2, 3, 0]);
    assert_eq!(depths.of(ShardId(3), W2), TierBlocks::default());
    let [gone, ..] = writers;
    drop(gone);
    reader.lookup(&query, &mut depths);
    assert_eq!(depths.of(ShardId(3), W1).device, 0, "a shard without a writer holds nothing");
    assert_eq!(reader.lookup(&[], &mut depths).contended, depths.of(ShardId(0), W1).device > 0);
}
