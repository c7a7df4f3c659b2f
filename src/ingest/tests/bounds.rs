//! The ceiling on a space's memory.

use super::vllm::Batch;
use super::{C, Options, R, Rig, SCHEME, chain};
use crate::event::{BatchInfo, Cleared, Content, GroupKind, KvEvent, Medium, Salt, Stored, flat};
use crate::ids::{EngineHash, GroupId, LocalHash, Seed, ShardId, Tier};
use crate::index::{self, ShardLimits, StoreBlocks};
use crate::limits::{INDEX_EVENT_MOVES_MAX, SHARD_MEMORY_BYTES_MIN};
use crate::trust::TrustLevel;

/// Room for some hundreds of small chains.
const MEMORY_BYTES_MORE: u64 = 3 << 20;

/// Stores chains for the second worker until one is refused. Returns the next sequence number.
fn fill(rig: &mut Rig, from: u64, blocks: u64) -> u64 {
    let refused = |rig: &Rig| rig.streams[1].view.counters.get(C::StoresMemoryBound);
    let before = refused(rig);
    for seq in from.. {
        let hashes: Vec<u64> = (1..=blocks).map(|at| seq << 16 | at).collect();
        let contents: Vec<u32> = hashes.iter().map(|hash| *hash as u32).collect();
        rig.send_bytes(1, seq, &Batch::new(seq as u32).stored(None, &hashes, &contents).payload());
        if refused(rig) > before {
            return seq + 1;
        }
    }
    unreachable!("something is refused")
}

#[test]
fn the_lowest_ceiling_has_room_for_ten_thousand_blocks() {
    let limits = ShardLimits { memory_bytes_max: SHARD_MEMORY_BYTES_MIN, ..ShardLimits::default() };
    let (mut writer, _) = index::shard(ShardId(0), limits);
    let slot = writer.add_worker().expect("room for a worker");
    for at in 0..10_000 {
        let (hashes, locals) = (&[EngineHash(at)], &[LocalHash(at)]);
        let parent = at.checked_sub(1).map(EngineHash);
        let blocks = StoreBlocks { parent, hashes, locals, tier: Tier::Device, group: GroupId(0), seed: Seed(0) };
        assert_eq!(writer.store(slot, &blocks).stored, 1, "block {at}: {:?}", writer.memory());
    }
}

#[test]
fn a_full_space_refuses_new_blocks_and_lowers_trust_until_a_clear() {
    let mut rig = Rig::new(&Options { workers: 2, memory_bytes_more: MEMORY_BYTES_MORE, ..Options::default() });
    rig.send(0, &chain(0));
    let next = [1000, 100, 10, 1].into_iter().fold(0, |next, blocks| fill(&mut rig, next, blocks));
    // One block may fit although the other worker's did not: the memory of a worker grows in steps.
    let (hashes, contents): (Vec<u64>, Vec<u32>) = (14..5014).map(|hash| (hash, hash as u32 - 10)).unzip();
    rig.send(1, &Batch::new(1).stored(Some(13), &hashes, &contents).removed(&[12]));
    rig.expect(TrustLevel::LowerBound, &[R::MemoryBound], 1);
    assert_eq!((rig.count(C::StoresMemoryBound), rig.count(C::StoresBounded), rig.count(C::Emptied)), (1, 0, 0));
    assert_eq!(rig.device(&[1, 2, 3, 4]), 1, "what is held stays, and what is removed goes");
    assert_eq!(rig.trust().reasons.iter().map(R::remedy).collect::<Vec<_>>(), [R::MemoryBound.remedy()]);
    rig.send_bytes(1, next, &Batch::new(next as u32).cleared().payload());
    rig.settle();
    rig.send(2, &Batch::new(2).stored(Some(11), &[12], &[2]));
    rig.expect(TrustLevel::LowerBound, &[R::MemoryBound], 2);
    assert_eq!((rig.device(&[1, 2, 3]), rig.count(C::StoresMemoryBound)), (3, 1), "there is room again");
    rig.send(3, &Batch::new(3).cleared().stored(None, &[11], &[1]));
    rig.expect(TrustLevel::Exact, &[], 3);
    assert_eq!(rig.device(&[1]), 1);
}

#[test]
fn a_worker_whose_event_would_move_too_much_is_emptied_and_has_lower_trust_until_a_clear() {
    let mut rig = Rig::new(&Options::default());
    rig.send(0, &chain(0));
    let below = 14..14 + INDEX_EVENT_MOVES_MAX as u64 + 1000;
    let (hashes, contents): (Vec<u64>, Vec<u32>) = below.map(|hash| (hash, hash as u32 - 10)).unzip();
    rig.send(1, &Batch::new(1).stored(Some(13), &hashes, &contents));
    assert_eq!(rig.device(&[1, 2, 3, 4, 5, 6]), 6);
    // Another block takes the place of the first one, and the blocks below the first would have to move.
    rig.send(2, &Batch::new(2).removed(&[11]).stored(None, &[9], &[1]));
    rig.expect(TrustLevel::LowerBound, &[R::CapacityBound], 2);
    assert_eq!((rig.count(C::StoresBounded), rig.count(C::Emptied), rig.device(&[1, 2, 3])), (1, 1, 0));
    rig.send(3, &Batch::new(3).stored(None, &[9], &[1]));
    rig.expect(TrustLevel::LowerBound, &[R::CapacityBound], 3);
    rig.send(4, &Batch::new(4).cleared().stored(None, &[11], &[1]));
    rig.expect(TrustLevel::Exact, &[], 4);
    assert_eq!(rig.device(&[1]), 1);
}

/// Stores a long chain that waits for its parent, and then the parent: the index gives places to a part of the chain,
/// and to the rest in slices. Returns the hashes and contents of the chain.
fn defer(rig: &mut Rig, first: u64, last: &[u64]) -> (Vec<u64>, Vec<u32>) {
    let blocks = first + 1..first + INDEX_EVENT_MOVES_MAX as u64 + 1000;
    let hashes: Vec<u64> = blocks.chain(last.iter().copied()).collect();
    let contents: Vec<u32> = hashes.iter().map(|hash| *hash as u32).collect();
    let seq = rig.trust().as_of_seq.map_or(0, |seq| seq.0 + 1);
    rig.send(seq, &Batch::new(seq as u32).stored(Some(first), &hashes, &contents));
    rig.send(seq + 1, &Batch::new(seq as u32 + 1).stored(None, &[first], &[first as u32]));
    (hashes, contents)
}

#[test]
fn a_worker_is_exact_again_once_all_that_waited_has_its_place() {
    let mut rig = Rig::new(&Options { salts_possible: false, ..Options::default() });
    rig.send(0, &chain(0));
    let (_, contents) = defer(&mut rig, 1000, &[]);
    let whole: Vec<u32> = std::iter::once(1000).chain(contents).collect();
    rig.expect(TrustLevel::LowerBound, &[R::CapacityBound], 2);
    assert!((1..whole.len() as u32).contains(&rig.device(&whole)), "{} have their place", rig.device(&whole));
    rig.settle();
    assert_eq!(rig.device(&whole), whole.len() as u32);
    rig.expect(TrustLevel::Exact, &[], 2);
    // A bound that was reached meanwhile stays.
    let mut rig = Rig::new(&Options { salts_possible: false, ..Options::default() });
    rig.send(0, &chain(0));
    defer(&mut rig, 1000, &[]);
    rig.space.writer.bound_worker(rig.streams[0].slot, 1);
    rig.send(3, &Batch::new(3).stored(None, &[9], &[9]));
    rig.settle();
    rig.expect(TrustLevel::LowerBound, &[R::CapacityBound], 3);
}

/// A worker that the index empties in a slice of its sweep: a block that waits gets its place, and more hangs where it
/// was before than one slice may move.
pub(super) fn overwhelm_later(rig: &mut Rig) {
    let below: Vec<u64> = (100_000..100_000 + INDEX_EVENT_MOVES_MAX as u64 + 1000).collect();
    let contents: Vec<u32> = below.iter().map(|hash| *hash as u32).collect();
    rig.send(0, &chain(0).stored(None, &[99], &[99]).stored(Some(99), &below, &contents).removed(&[99]));
    rig.expect(TrustLevel::Exact, &[], 0);
    defer(rig, 1000, &[99]);
}

#[test]
fn a_worker_that_the_index_empties_in_a_slice_says_so_until_a_clear() {
    let mut rig = Rig::new(&Options { salts_possible: false, ..Options::default() });
    overwhelm_later(&mut rig);
    assert_eq!((rig.device(&[1, 2, 3]), rig.count(C::Emptied)), (3, 0));
    rig.settle();
    assert_eq!((rig.device(&[1, 2, 3]), rig.count(C::Emptied), rig.count(C::StoresBounded)), (0, 1, 1));
    rig.expect(TrustLevel::LowerBound, &[R::CapacityBound], 2);
    rig.send(3, &Batch::new(3).stored(None, &[9], &[9]));
    rig.settle();
    rig.expect(TrustLevel::LowerBound, &[R::CapacityBound], 3);
    rig.send(4, &Batch::new(4).cleared().stored(None, &[9], &[9]));
    rig.expect(TrustLevel::Exact, &[], 4);
}

/// A worker of which the index empties a store that would move too much.
fn overwhelm(rig: &mut Rig) {
    rig.send(0, &chain(0));
    let below = 14..14 + INDEX_EVENT_MOVES_MAX as u64 + 1000;
    let (hashes, contents): (Vec<u64>, Vec<u32>) = below.map(|hash| (hash, hash as u32 - 10)).unzip();
    rig.send(1, &Batch::new(1).stored(Some(13), &hashes, &contents));
    rig.expect(TrustLevel::Exact, &[], 1);
    rig.take(0, 2, &Batch::new(2).removed(&[11]).stored(None, &[9], &[1]).payload());
}

#[test]
fn trust_has_fallen_when_readers_see_that_the_index_has_emptied_a_worker() {
    let mut rig = Rig::new(&Options::default());
    overwhelm(&mut rig);
    assert_eq!(rig.count(C::Emptied), 1);
    let levels: Vec<_> = rig.streams[0].emptied_under.iter().map(|trust| trust.level).collect();
    assert_eq!(levels, [TrustLevel::LowerBound], "what readers see once the index is empty");
}

#[test]
fn a_clear_of_one_tier_that_empties_the_worker_lowers_trust() {
    let mut rig = Rig::new(&Options::default());
    let mut encoder = flat::Encoder::new();
    let mut send = |rig: &mut Rig, seq, event: KvEvent<'_>| {
        let info = BatchInfo { scheme: Some(SCHEME), ..BatchInfo::default() };
        rig.send_bytes(0, seq, encoder.encode(&info, std::iter::once(event)));
    };
    let numbers = 100..101 + INDEX_EVENT_MOVES_MAX as u64;
    let (hashes, locals): (Vec<_>, Vec<_>) = numbers.map(|number| (EngineHash(number), LocalHash(number))).unzip();
    let late: (Vec<_>, Vec<_>) = (1..5).map(|number| (EngineHash(number), LocalHash(number))).unzip();
    let stored = |parent, hashes, locals, tier| {
        KvEvent::Stored(Stored {
            hashes,
            parent,
            content: Content::LocalHashes(locals),
            block_size: SCHEME.block_size,
            medium: Medium::Tier(tier),
            group: GroupId(0),
            group_kind: GroupKind::Main,
            lora: None,
            salt: Salt::Seed(Seed(0)),
            media: &[],
        })
    };
    send(&mut rig, 0, stored(None, &hashes[..3], &locals[..3], Tier::Host));
    send(&mut rig, 1, stored(Some(EngineHash(99)), &hashes[3..], &locals[3..], Tier::Device));
    send(&mut rig, 2, KvEvent::Cleared(Cleared { tier: Some(Tier::Disk) }));
    assert_eq!((rig.count(C::Emptied), rig.count(C::BlocksDormant)), (0, hashes.len() as u64 - 3), "as many as may be");
    for (at, seq) in (3..7).enumerate() {
        let parent = Some(EngineHash(7));
        send(&mut rig, seq, stored(parent, &late.0[at..=at], &late.1[at..=at], Tier::Device));
    }
    send(&mut rig, 7, KvEvent::Cleared(Cleared { tier: Some(Tier::Disk) }));
    assert_eq!(rig.count(C::Emptied), 1);
    assert!(rig.trust().reasons.contains(R::CapacityBound), "{:?}", rig.trust());
}
