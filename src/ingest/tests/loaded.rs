//! Dumps loaded into workers of another index, and what follows there.

use std::collections::BTreeSet;

use crossbeam::channel::bounded;
use proptest::prelude::*;

use super::contradictions::{Shape, stored_raw};
use super::dump::{begin_of, ended, many};
use super::vllm::{self, BLOCK_SIZE, Batch};
use super::{C, Options, R, Rig, chain};
use crate::event::flat::Encoder;
use crate::event::{BatchInfo, SourceTrust};
use crate::ids::{EngineHash, EventSeq, GroupId, Tier, TierBlocks};
use crate::ingest::dump::{Loading, Step};
use crate::ingest::stream::ReplayEnd;
use crate::ingest::{AbortReason, DumpPart, References};
use crate::limits::{DUMP_SLICE_BLOCKS, HELD_MESSAGES_MAX, TRANSFER_STALL_MS_MAX};
use crate::trust::TrustLevel;

#[test]
fn a_loaded_worker_goes_on_behind_the_watermark() {
    let mut there = Rig::new(&Options::default());
    there.send(0, &chain(0));
    there.send(1, &Batch::new(1).stored(Some(13), &[14], &[4]).removed(&[12]));
    let parts = there.dump();
    let mut here = Rig::new(&Options::default());
    let (sender, received) = bounded(parts.len());
    let (mut loading, answers) = Loading::new(received);
    assert_eq!(here.loading(&mut loading), Step::Waits);
    // One that the dump contains, and one that it does not.
    here.send(1, &Batch::new(1).stored(Some(13), &[14], &[4]).removed(&[12]));
    here.send(2, &Batch::new(2).stored(Some(11), &[12], &[2]));
    parts.into_iter().for_each(|part| sender.try_send(part).expect("room"));
    while here.loading(&mut loading) != Step::Over {
        assert_eq!(here.trust().level, TrustLevel::Unproven);
    }
    assert!(ended(&answers).is_ok());
    here.expect(TrustLevel::Exact, &[], 1);
    assert_eq!(here.device(&[1, 2, 3, 4]), 1);
    here.release();
    here.expect(TrustLevel::Exact, &[], 2);
    assert_eq!((here.device(&[1, 2, 3, 4]), here.count(C::Duplicates), here.count(C::Restarts)), (4, 1, 0));
    here.send(1, &Batch::new(77));
    assert_eq!((here.device(&[1]), here.count(C::Restarts)), (0, 1), "other bytes are another incarnation's");
}

#[test]
fn a_dump_that_does_not_follow_the_applied_batches_changes_nothing() {
    let mut there = Rig::new(&Options::default());
    there.send(0, &chain(0));
    there.send(1, &Batch::new(1));
    let parts = there.dump();
    let cases: [(&[(u64, u32)], AbortReason); 3] = [
        (&[(0, 9)], AbortReason::OtherIncarnation),
        (&[(0, 0), (1, 1), (2, 2)], AbortReason::Outdated),
        (&[(0, 0)], AbortReason::SchemeMismatch),
    ];
    for (seen, reason) in cases {
        let mut here = Rig::new(&Options::default());
        for (seq, stamp) in seen {
            here.send(*seq, &if *seq == 0 { chain(*stamp) } else { Batch::new(*stamp) });
        }
        if reason == AbortReason::SchemeMismatch {
            here.space.scheme.forget();
            here.space.scheme.learn(crate::ids::Scheme { block_size: 2 * BLOCK_SIZE as u32, ..super::SCHEME });
        }
        let as_of = here.trust().as_of_seq;
        assert_eq!(here.load(parts.clone()), Err(reason));
        assert_eq!((here.trust().level, here.trust().as_of_seq), (TrustLevel::Exact, as_of), "{reason:?}");
        assert_eq!((here.space.writer.held(here.streams[0].slot).bound, here.aborted()), (3, vec![(reason.name(), 1)]));
    }
    let mut here = Rig::new(&Options::default());
    let empty = Rig::new(&Options::default()).dump();
    assert_eq!(begin_of(&empty).watermark, None);
    assert_eq!(here.load(empty), Err(AbortReason::NoWatermark));
}

#[test]
fn a_stream_behind_the_watermark_is_known_by_the_first_payload_that_is_remembered() {
    let mut there = Rig::new(&Options::default());
    let block = |seq: u64| Batch::new(seq as u32).stored((seq > 0).then(|| seq + 9), &[seq + 10], &[seq as u32]);
    (0..300).for_each(|seq| there.send(seq, &block(seq)));
    let parts = there.dump();
    let everything: Vec<u32> = (0..310).collect();
    for (heard, is_the_same) in [(None, true), (Some(4), true), (Some(4), false)] {
        let mut here = Rig::new(&Options::default());
        (0..=heard.unwrap_or_default()).filter(|_| heard.is_some()).for_each(|seq| here.send(seq, &block(seq)));
        let (sender, received) = bounded(parts.len());
        let (mut loading, answers) = Loading::new(received);
        here.loading(&mut loading);
        parts.iter().for_each(|part| sender.try_send(part.clone()).expect("room"));
        let first = heard.map_or(0, |heard| heard + 1);
        (first..first + 9).for_each(|seq| here.send(seq, &block(seq)));
        while here.loading(&mut loading) == Step::Moved {}
        assert!(!here.streams[0].is_releasing(), "it has not come to what is remembered");
        if is_the_same {
            (first + 9..310).for_each(|seq| here.send(seq, &block(seq)));
        } else {
            here.now.uptime_ms += TRANSFER_STALL_MS_MAX;
        }
        assert_eq!(here.loading(&mut loading), Step::Over);
        here.release();
        let (depth, restarts) = (here.device(&everything), here.count(C::Restarts));
        if is_the_same {
            assert!(ended(&answers).is_ok());
            here.expect(TrustLevel::Exact, &[], 309);
            assert_eq!((depth, restarts, here.count(C::Duplicates)), (310, 0, 300 - first));
        } else {
            assert_eq!((ended(&answers), depth, restarts), (Err(AbortReason::OtherIncarnation), 0, 0));
            here.expect(TrustLevel::LowerBound, &[R::JoinedLate, R::UnknownRoot], first + 8);
        }
    }
}

#[test]
fn a_relays_lower_word_outlives_a_restart_of_the_daemon() {
    let words: [(TrustLevel, &[R]); 5] = [
        (TrustLevel::LowerBound, &[]),
        (TrustLevel::LowerBound, &[R::Gap]),
        (TrustLevel::Unproven, &[R::Silent]),
        (TrustLevel::Unproven, &[R::Disconnected]),
        (TrustLevel::Unproven, &[R::Recovering]),
    ];
    for (level, reasons) in words {
        let source = SourceTrust { level, reasons: reasons.iter().copied().collect() };
        let info = BatchInfo { source: Some(source), scheme: Some(super::SCHEME), ..BatchInfo::default() };
        let said = Encoder::new().encode(&BatchInfo { generation: Some(7), ..info }, []).to_vec();
        let mut there = Rig::new(&Options::default());
        there.send_bytes(0, 0, &said);
        assert_eq!(there.trust().level, level);
        let mut parts = there.dump();
        let DumpPart::Begin(begin) = &mut parts[0] else { panic!("{parts:?}") };
        // As a daemon loads it that has no connection yet.
        begin.trust.reasons.insert(R::Disconnected);
        let mut here = Rig::new(&Options::default());
        here.streams[0].set_replays(true, here.now);
        here.load(parts).expect("loaded");
        let now = here.now;
        here.streams[0].connected(&mut here.space, now);
        assert_eq!(here.streams[0].ask_replay(now), Some(EventSeq(0)));
        here.streams[0].replayed(&mut here.space, &mut here.scratch, EventSeq(0), &said, now);
        here.streams[0].replay_ended(&mut here.space, ReplayEnd::Marker, now);
        here.release();
        assert!(!here.trust().reasons.contains(R::Recovering), "{:?}", here.trust());
        assert_eq!(here.trust().level, level, "{reasons:?}");
    }
}

#[test]
fn a_load_that_fails_leaves_nothing_and_says_so() {
    let mut there = Rig::new(&Options::default());
    there.send(0, &many());
    let parts = there.dump();
    let cut = |len: usize| parts[..len].to_vec();
    let wrong_end = |blocks| {
        let mut parts = cut(parts.len() - 1);
        parts.push(DumpPart::End(References { blocks, digest: 0 }));
        parts
    };
    let aborted = [cut(2), vec![DumpPart::Aborted(AbortReason::Gap)]].concat();
    let twice = [cut(1), cut(1)].concat();
    let cases = [
        (cut(2), AbortReason::PeerGone),
        (wrong_end(2 * DUMP_SLICE_BLOCKS as u64 + 8), AbortReason::Corrupt),
        (twice, AbortReason::Corrupt),
        (aborted, AbortReason::SourceAborted),
    ];
    for (parts, reason) in cases {
        let mut here = Rig::new(&Options::default());
        here.send(0, &many());
        assert_eq!(here.load(parts), Err(reason));
        here.expect(TrustLevel::LowerBound, &[R::JoinedLate], 0);
        assert_eq!((here.streams[0].view.gauges.bound(), here.aborted()), (0, vec![(reason.name(), 1)]));
        here.send(1, &Batch::new(1).stored(None, &[1], &[1]));
        here.expect(TrustLevel::LowerBound, &[R::JoinedLate], 1);
    }
    let mut here = Rig::new(&Options::default());
    assert_eq!(here.load(parts[1..].to_vec()), Err(AbortReason::Corrupt), "before the worker changes");
    assert_eq!(here.streams[0].reasons(), [R::Joining].into_iter().collect());
}

/// Enough memory for a part of [`many`], but not for all of it.
const FEW_BLOCKS_BYTES: u64 = (2 << 20) + (300 << 10);

#[test]
fn a_load_ends_by_overflow_a_break_a_sender_that_sleeps_and_a_full_space() {
    let many_blocks = 2 * DUMP_SLICE_BLOCKS as u64 + 8;
    for reason in [AbortReason::Overflow, AbortReason::Disconnected, AbortReason::Stalled, AbortReason::Refused] {
        let mut there = Rig::new(&Options::default());
        there.send(0, &many());
        let (sender, received) = bounded(64);
        let mut parts = there.dump().into_iter();
        // Where it is to be full, some of the blocks fit.
        let memory_bytes_more = if reason == AbortReason::Refused { FEW_BLOCKS_BYTES } else { u64::MAX };
        let mut here = Rig::new(&Options { memory_bytes_more, ..Options::default() });
        let (mut loading, answers) = Loading::new(received);
        parts.by_ref().take(2).for_each(|part| sender.try_send(part).expect("room"));
        let mut step = here.loading(&mut loading);
        while step == Step::Moved {
            step = here.loading(&mut loading);
        }
        assert_eq!(step == Step::Over, reason == AbortReason::Refused);
        assert!((1..many_blocks).contains(&here.count(C::BlocksStored)), "a part was stored");
        let mut next = 1;
        match reason {
            AbortReason::Overflow => {
                next = HELD_MESSAGES_MAX as u64 + 2;
                (1..next).for_each(|seq| here.take(0, seq, &Batch::new(seq as u32).payload()));
            }
            AbortReason::Disconnected => {
                let now = here.now;
                here.streams[0].break_hold(&mut here.space, reason, now);
            }
            _ => here.now.uptime_ms += TRANSFER_STALL_MS_MAX,
        }
        if step == Step::Waits {
            assert_eq!(here.loading(&mut loading), Step::Over);
        }
        here.release();
        assert_eq!(ended(&answers), Err(reason));
        assert_eq!((here.streams[0].view.gauges.bound(), here.aborted()), (0, vec![(reason.name(), 1)]));
        here.settle();
        here.send(next, &Batch::new(0).stored(None, &[1], &[1]));
        here.expect(TrustLevel::LowerBound, &[R::JoinedLate], next);
        assert_eq!(here.device(&[1]), 1);
    }
}

#[test]
fn a_contradicted_hash_stays_contradicted_in_another_index() {
    let mut there = Rig::new(&Options::default());
    there.send(0, &chain(0).stored(None, &[21], &[8]));
    there.send(1, &Batch::new(1).stored(Some(21), &[12], &[9]));
    let mut here = Rig::new(&Options::default());
    assert!(here.load(there.dump()).is_ok());
    here.expect(TrustLevel::LowerBound, &[R::HashConflict], 1);
    here.send(2, &Batch::new(2).stored(Some(12), &[24], &[6]));
    assert_eq!(here.device(&[1, 2, 6]), 2, "12 may be either");
}

#[test]
fn a_group_without_a_block_left_is_one_that_no_block_has() {
    let mut there = Rig::new(&Options::default());
    there.send(0, &chain(0));
    there.send(1, &Batch::new(1).raw(stored_raw(21, 7, &Shape::Map("group_idx", &[1]))));
    let slot = there.streams[0].slot;
    there.space.writer.remove(slot, Tier::Device, GroupId(1), &[EngineHash(21)]);
    there.space.writer.publish();
    assert_eq!(there.device(&[1]), 0, "the second group holds none of them");
    let mut here = Rig::new(&Options::default());
    let parts = there.dump();
    assert_eq!(begin_of(&parts).groups, [(Tier::Device, GroupId(0)), (Tier::Device, GroupId(1))]);
    assert!(here.load(parts).is_ok());
    assert_eq!((here.device(&[1]), here.space.writer.held(slot).bound), (0, 3));
    here.send(2, &Batch::new(2).cleared().stored(None, &[11], &[1]));
    assert_eq!(here.device(&[1]), 1);
    assert_eq!(begin_of(&here.dump()).groups, [(Tier::Device, GroupId(0))]);
}

/// A change of one block in one tier of an engine. A block is a path of contents.
#[derive(Clone, Debug)]
enum Work {
    Store(Vec<u32>, usize, bool),
    Remove(Vec<u32>, bool),
    ClearHost,
}

fn path() -> impl Strategy<Value = Vec<u32>> {
    prop::collection::vec(1_u32..=2, 1..=4)
}

fn work() -> impl Strategy<Value = Work> {
    prop_oneof![
        8 => (path(), 0_usize..4, any::<bool>()).prop_map(|(path, from, host)| Work::Store(path, from, host)),
        6 => (path(), any::<bool>()).prop_map(|(path, host)| Work::Remove(path, host)),
        1 => Just(Work::ClearHost),
    ]
}

fn name(path: &[u32]) -> u64 {
    path.iter().fold(1, |name, content| name * 10 + u64::from(*content))
}

fn medium(host: bool) -> Option<&'static str> {
    Some(if host { "CPU_PINNED" } else { "GPU" })
}

/// A batch of one thing, which may name parents that are not held.
fn batch(seq: u64, work: &Work) -> Batch {
    let batch = Batch::new(seq as u32);
    match work {
        Work::Store(path, from, host) => {
            let from = (*from).min(path.len() - 1);
            let hashes: Vec<u64> = (from..path.len()).map(|at| name(&path[..=at])).collect();
            let parent = (from > 0).then(|| name(&path[..from]));
            batch.stored_with(parent, &hashes, &vllm::tokens(&path[from..]), BLOCK_SIZE, medium(*host), &[])
        }
        Work::Remove(path, host) => batch.removed_from(&[name(path)], medium(*host)),
        Work::ClearHost => batch,
    }
}

fn apply(rig: &mut Rig, seq: u64, work: &Work) {
    rig.send(seq, &batch(seq, work));
    if matches!(work, Work::ClearHost) {
        rig.space.writer.clear(rig.streams[0].slot, Some(Tier::Host));
        rig.streams[0].tier_groups.retain(|(tier, _)| *tier != Tier::Host);
        rig.space.writer.publish();
    }
}

/// The overlaps of the first worker with every possible prompt.
fn answers(rig: &Rig) -> Vec<TierBlocks> {
    let mut paths: BTreeSet<Vec<u32>> = BTreeSet::from([Vec::new()]);
    for _ in 0..4 {
        let longer: Vec<_> =
            paths.iter().flat_map(|path| [1, 2].map(|next| [path.as_slice(), &[next]].concat())).collect();
        paths.extend(longer);
    }
    paths.iter().map(|path| rig.depth(0, path)).collect()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]
    #[test]
    fn a_loaded_worker_is_the_one_that_was_dumped(
        before in prop::collection::vec(work(), 1..40),
        after in prop::collection::vec(work(), 0..20),
    ) {
        let options = Options { scheme: Some(super::SCHEME), salts_possible: false, ..Options::default() };
        let (mut there, mut here) = (Rig::new(&options), Rig::new(&options));
        before.iter().enumerate().for_each(|(seq, work)| apply(&mut there, seq as u64, work));
        let parts = there.dump();
        let held = |rig: &Rig| {
            let held = rig.space.writer.held(rig.streams[0].slot);
            (held.bound, held.by_tier, held.references)
        };
        let end = here.load(parts.clone()).expect("loaded");
        prop_assert_eq!(end.blocks, held(&there).2.iter().sum::<u64>());
        let again = here.dump();
        prop_assert_eq!(again.last(), parts.last(), "a dump of it ends the same");
        for (seq, work) in after.iter().enumerate() {
            prop_assert_eq!(held(&here), held(&there));
            prop_assert_eq!(answers(&here), answers(&there));
            prop_assert_eq!((here.trust().level, here.trust().reasons), (there.trust().level, there.trust().reasons));
            let seq = (before.len() + seq) as u64;
            apply(&mut there, seq, work);
            apply(&mut here, seq, work);
        }
        prop_assert_eq!(held(&here), held(&there));
        prop_assert_eq!(answers(&here), answers(&there));
    }
}
