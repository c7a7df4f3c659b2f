//! One loss at a time, and the worker's trust meanwhile.

use super::{Fault, World};
use crate::event::recovery::Aim;
use crate::ids::EventSeq;
use crate::ingest::dump::AbortReason;
use crate::ingest::stream::ReplayEnd;
use crate::ingest::tests::lossy::Work;
use crate::ingest::tests::vllm::Batch;
use crate::ingest::tests::{C, Options, R, Rig, chain};
use crate::limits::{HELD_MESSAGES_MAX, RENEWAL_AFTER_MS_MIN, REPLAY_LATE_TRIES_MAX, REPLAY_TRIES_MAX};
use crate::trust::TrustLevel;

fn stored(world: &mut World, arrives: bool) {
    let path = vec![1 + (world.engine.seq % 3) as u32, 1 + (world.engine.seq / 3 % 3) as u32];
    world.publish(&Work::Compute(path), arrives);
}

#[test]
fn an_idle_engine_joined_late_is_exact_after_a_replay_from_0() {
    let mut world = World::new();
    (0..100).for_each(|_| stored(&mut world, false));
    world.connect();
    world.rig.streams[0].show(&mut world.rig.space);
    assert_eq!(world.rig.trust().reasons, [R::Joining, R::Recovering].into_iter().collect());
    assert_eq!(world.rig.streams[0].wants_replay(world.rig.now), Some(Aim::Prove));
    assert!(world.replay(&Fault::None));
    world.rig.expect(TrustLevel::Exact, &[], 99);
    assert!(world.equals_engine().is_ok());
    assert_eq!((world.rig.count(C::ReplaysAnswered), world.rig.count(C::BatchesReplayed)), (1, 100));
}

#[test]
fn a_gap_is_filled_without_emptying_and_waiting_batches_are_compared_with_the_replay() {
    let mut world = World::new();
    world.connect();
    stored(&mut world, true);
    (0..200).for_each(|_| stored(&mut world, false));
    (0..150).for_each(|_| stored(&mut world, true));
    assert_eq!((world.rig.count(C::Gaps), world.rig.count(C::MessagesHeld)), (1, 151));
    world.rig.expect(TrustLevel::Unproven, &[R::Recovering], 0);
    assert!(world.replay(&Fault::None));
    world.rig.expect(TrustLevel::Exact, &[], 350);
    assert_eq!(
        (world.rig.count(C::Emptied), world.rig.count(C::Restarts), world.rig.count(C::Duplicates)),
        (0, 0, 150)
    );
    assert!(world.equals_engine().is_ok());
}

#[test]
fn batches_that_cannot_be_fetched_empty_the_worker_after_a_bounded_number_of_tries() {
    for fault in [Fault::Silence, Fault::Short(100)] {
        let mut world = World::new();
        world.connect();
        stored(&mut world, true);
        stored(&mut world, false);
        stored(&mut world, true);
        let mut asked = 0;
        while world.rig.streams[0].is_recovering() {
            world.pass(10_000);
            asked += u32::from(world.replay(&fault));
        }
        assert!((REPLAY_TRIES_MAX..=2 * REPLAY_TRIES_MAX).contains(&asked), "{fault:?}: {asked}");
        assert!(world.check().is_ok());
        assert_eq!(world.rig.trust().level, TrustLevel::LowerBound, "{fault:?}: {:?}", world.rig.trust());
    }
}

#[test]
fn waiting_batches_from_before_the_publishers_buffer_are_not_another_incarnation() {
    let mut world = World::new();
    world.connect();
    stored(&mut world, true);
    (0..100).for_each(|_| stored(&mut world, false));
    (0..200).for_each(|_| stored(&mut world, true));
    world.buffer.drain(..world.buffer.len() - 20);
    for _ in 0..2 * REPLAY_TRIES_MAX {
        world.pass(10_000);
        world.replay(&Fault::None);
    }
    world.rig.expect(TrustLevel::LowerBound, &[R::Gap], 300);
    assert_eq!((world.rig.count(C::Restarts), world.rig.count(C::Emptied), world.rig.streams[0].waiting()), (0, 1, 0));
    assert_eq!(world.rig.count(C::MessagesPassedOver), 180);
    assert!(world.check().is_ok());
}

#[test]
fn a_break_keeps_the_worker_until_the_next_connection_has_answered() {
    let mut world = World::new();
    world.connect();
    (0..5).for_each(|_| stored(&mut world, true));
    world.disconnect();
    (0..5).for_each(|_| stored(&mut world, false));
    world.rig.streams[0].show(&mut world.rig.space);
    world.rig.expect(TrustLevel::Unproven, &[R::Disconnected], 4);
    assert!(world.rig.device(&[1, 1]) > 0, "it is not emptied");
    world.connect();
    assert!(world.replay(&Fault::None));
    world.rig.expect(TrustLevel::Exact, &[], 9);
    assert_eq!((world.rig.count(C::Emptied), world.rig.count(C::Recoveries)), (0, 2));
    world.disconnect();
    world.restart();
    stored(&mut world, false);
    world.connect();
    assert!(world.replay(&Fault::None), "from the last: it is not there");
    assert_eq!(world.rig.device(&[1, 1]), 0, "emptied");
    assert!(world.replay(&Fault::None), "from 0");
    world.rig.expect(TrustLevel::Exact, &[], 0);
    assert!(world.equals_engine().is_ok());
}

/// What the worker is in when its publisher can no longer replay.
#[derive(Clone, Copy, Debug)]
enum Meanwhile {
    Recovering,
    Broken,
    Dumped,
    Live,
}

#[test]
fn a_publisher_that_can_no_longer_replay_is_heard_from_its_next_batch_on() {
    for meanwhile in [Meanwhile::Recovering, Meanwhile::Broken, Meanwhile::Dumped, Meanwhile::Live] {
        let mut world = World::new();
        world.connect();
        stored(&mut world, true);
        if matches!(meanwhile, Meanwhile::Dumped) {
            world.rig.streams[0].hold_for_dump();
            world.rig.streams[0].connected(&mut world.rig.space, world.rig.now);
        } else if !matches!(meanwhile, Meanwhile::Live) {
            stored(&mut world, false);
            stored(&mut world, true);
            assert!(world.rig.streams[0].is_recovering(), "{meanwhile:?}");
        }
        if matches!(meanwhile, Meanwhile::Broken) {
            world.disconnect();
        }
        let Rig { streams, space, scratch, now, .. } = &mut world.rig;
        // As a shard does for a worker's new record.
        streams[0].set_replays(false, *now);
        streams[0].break_hold(space, AbortReason::Disconnected, *now);
        streams[0].release_all(space, scratch, *now);
        streams[0].disconnected(space, *now);
        streams[0].show(space);
        assert_eq!(streams[0].reasons(), [R::Disconnected].into_iter().collect(), "{meanwhile:?}");
        assert!(!streams[0].is_held() && streams[0].waiting() == 0, "{meanwhile:?}");
        streams[0].connected(space, *now);
        world.is_connected = true;
        world.publish(&Work::Compute(vec![7, 7]), true);
        let last = world.engine.seq - 1;
        world.rig.expect(TrustLevel::LowerBound, &[R::JoinedLate], last);
        assert!(world.check().is_ok(), "{meanwhile:?}");
    }
}

#[test]
fn a_probe_finds_a_lost_tail_and_a_live_batch_makes_it_needless() {
    let mut world = World::new();
    world.connect();
    (0..5).for_each(|_| stored(&mut world, true));
    world.pass(4_000);
    assert_eq!(world.rig.streams[0].wants_replay(world.rig.now), None);
    world.pass(2_000);
    assert_eq!(world.rig.streams[0].wants_replay(world.rig.now), Some(Aim::Probe));
    stored(&mut world, true);
    assert_eq!(world.rig.streams[0].wants_replay(world.rig.now), None);
    (0..3).for_each(|_| stored(&mut world, false));
    world.pass(6_000);
    world.rig.expect(TrustLevel::Exact, &[], 5);
    assert!(world.replay(&Fault::None));
    world.rig.expect(TrustLevel::Exact, &[], 8);
    assert_eq!((world.rig.count(C::Probes), world.rig.count(C::TailsFound)), (1, 1));
    world.pass(6_000);
    assert!(world.rig.streams[0].wants_replay(world.rig.now).is_none(), "it waits longer after each");
    world.pass(6_000);
    assert!(world.replay(&Fault::Silence));
    world.rig.expect(TrustLevel::Exact, &[], 8);
    assert_eq!(world.rig.count(C::TailsFound), 1);
}

#[test]
fn a_dump_is_of_its_watermark_though_a_probe_is_under_way() {
    let mut world = World::new();
    world.connect();
    (0..5).for_each(|_| stored(&mut world, true));
    stored(&mut world, false);
    world.pass(6_000);
    let now = world.rig.now;
    assert_eq!(world.rig.streams[0].ask_replay(now), Some(EventSeq(4)));
    let (watermark, _) = world.rig.streams[0].hold_for_dump();
    let (seq, payload) = world.buffer[5].clone();
    world.rig.streams[0].replayed(&mut world.rig.space, &mut world.rig.scratch, EventSeq(seq), &payload, now);
    assert_eq!((watermark, world.rig.streams[0].gate().last()), (Some(EventSeq(4)), Some(EventSeq(4))));
    world.rig.streams[0].finish_hold(now);
    world.release();
    world.heal();
    world.rig.expect(TrustLevel::Exact, &[], 5);
}

#[test]
fn waiting_batches_are_bounded_and_the_oldest_are_replayed() {
    let mut world = World::new();
    world.connect();
    let more = HELD_MESSAGES_MAX as u64 + 100;
    (0..2).for_each(|_| stored(&mut world, false));
    (0..more).for_each(|_| stored(&mut world, true));
    assert_eq!((world.rig.count(C::MessagesDropped), world.rig.streams[0].waiting()), (100, HELD_MESSAGES_MAX));
    assert!(world.replay(&Fault::None));
    world.rig.expect(TrustLevel::Exact, &[], more + 1);
    assert_eq!((world.rig.count(C::Restarts), world.rig.count(C::Emptied)), (0, 0));
}

#[test]
fn a_live_restart_empties_at_once() {
    let mut world = World::new();
    world.connect();
    (0..5).for_each(|_| stored(&mut world, true));
    world.engine.restart();
    world.buffer.clear();
    (0..3).for_each(|_| world.publish(&Work::Compute(vec![3, 3]), false));
    world.publish(&Work::Compute(vec![3, 2, 1]), true);
    assert_eq!((world.rig.device(&[1, 1]), world.rig.count(C::Restarts)), (0, 1));
    world.rig.expect_without_batch(TrustLevel::Unproven, &[R::Joining, R::Recovering]);
    assert!(world.replay(&Fault::None));
    world.rig.expect(TrustLevel::Exact, &[], 3);
    assert!(world.equals_engine().is_ok());
}

#[test]
fn a_load_is_proven_on_connect_or_emptied() {
    for replays in [true, false] {
        let mut there = Rig::new(&Options::default());
        there.send(0, &chain(0));
        let mut here = Rig::new(&Options::default());
        if replays {
            here.streams[0].set_replays(true, here.now);
        }
        assert!(here.load(there.dump()).is_ok());
        assert_eq!(here.device(&[1, 2, 3]), 3);
        let now = here.now;
        here.streams[0].connected(&mut here.space, now);
        here.streams[0].show(&mut here.space);
        if !replays {
            here.expect(TrustLevel::Unproven, &[R::Disconnected], 0);
            assert_eq!(here.device(&[1, 2, 3]), 0);
            continue;
        }
        here.expect(TrustLevel::Unproven, &[R::Recovering], 0);
        assert_eq!(here.streams[0].ask_replay(now), Some(EventSeq(0)));
        for (seq, batch) in [(0, chain(0)), (1, Batch::new(1).stored(Some(13), &[14], &[4]))] {
            here.streams[0].replayed(&mut here.space, &mut here.scratch, EventSeq(seq), &batch.payload(), now);
        }
        here.streams[0].replay_ended(&mut here.space, ReplayEnd::Marker, now);
        here.streams[0].show(&mut here.space);
        here.release();
        here.expect(TrustLevel::Exact, &[], 1);
        assert_eq!((here.device(&[1, 2, 3, 4]), here.count(C::Emptied)), (4, 0));
    }
}

#[test]
fn tries_for_one_incarnation_do_not_count_for_the_next() {
    let mut world = World::new();
    world.connect();
    (0..2).for_each(|_| stored(&mut world, true));
    world.restart();
    (0..2).for_each(|_| stored(&mut world, false));
    world.connect();
    for fault in [Fault::Silence, Fault::None, Fault::Late(1), Fault::None] {
        world.pass(10_000);
        assert!(world.replay(&fault), "{fault:?}");
    }
    world.rig.expect(TrustLevel::Exact, &[], 1);
    assert!(world.equals_engine().is_ok());
}

/// A worker that has lost two batches for good: its publisher did not answer.
fn with_losses() -> World {
    let mut world = World::new();
    world.connect();
    stored(&mut world, true);
    (0..2).for_each(|_| stored(&mut world, false));
    stored(&mut world, true);
    while world.rig.streams[0].is_recovering() {
        world.pass(1_000);
        world.replay(&Fault::Silence);
    }
    world.rig.expect(TrustLevel::LowerBound, &[R::Gap, R::UnknownRoot], 3);
    world
}

#[test]
fn batches_lost_for_good_are_fetched_when_the_publisher_answers_again() {
    let mut world = with_losses();
    let asked_at = |world: &World| world.rig.streams[0].wants_replay(world.rig.now);
    assert_eq!(asked_at(&world), None);
    world.pass(RENEWAL_AFTER_MS_MIN);
    assert_eq!(asked_at(&world), Some(Aim::Renew));
    stored(&mut world, true);
    assert_eq!(asked_at(&world), Some(Aim::Renew), "live batches go on, and it is still wanted");
    assert!(world.replay(&Fault::Silence));
    assert_eq!(world.rig.trust().level, TrustLevel::LowerBound, "no worse than before");
    world.pass(RENEWAL_AFTER_MS_MIN);
    assert_eq!(world.rig.count(C::Renewals), 1);
    assert_ne!(asked_at(&world), Some(Aim::Renew), "it waits longer after each");
    world.pass(RENEWAL_AFTER_MS_MIN);
    assert!(world.replay(&Fault::None));
    assert_eq!((world.rig.count(C::Renewals), world.rig.count(C::Renewed)), (2, 1));
    assert_eq!(world.rig.trust().level, TrustLevel::Exact);
    assert!(world.equals_engine().is_ok());
    world.pass(u64::from(u32::MAX));
    assert_ne!(asked_at(&world), Some(Aim::Renew), "nothing is lost any more");
}

#[test]
fn a_publisher_that_has_its_beginning_no_more_is_left_alone() {
    let mut world = with_losses();
    world.buffer.remove(0);
    for _ in 0..REPLAY_LATE_TRIES_MAX {
        world.pass(RENEWAL_AFTER_MS_MIN << 2);
        assert_eq!(world.rig.streams[0].wants_replay(world.rig.now), Some(Aim::Renew));
        assert!(world.replay(&Fault::None));
        assert_eq!(world.rig.trust().level, TrustLevel::LowerBound);
    }
    world.pass(u64::from(u32::MAX));
    assert_ne!(world.rig.streams[0].wants_replay(world.rig.now), Some(Aim::Renew));
    assert_eq!(world.rig.count(C::Renewed), 0);
    world.restart();
    world.connect();
    stored(&mut world, true);
    assert!(world.replay(&Fault::None));
    assert!(world.replay(&Fault::None));
    world.rig.expect(TrustLevel::Exact, &[], 0);
}

#[test]
fn a_batch_between_the_question_and_its_answer_is_replayed_too() {
    let mut world = with_losses();
    world.pass(RENEWAL_AFTER_MS_MIN);
    world.rig.streams[0].ask_replay(world.rig.now);
    let answer = world.buffer.clone();
    stored(&mut world, true);
    for (seq, payload) in answer {
        let now = world.rig.now;
        world.rig.streams[0].replayed(&mut world.rig.space, &mut world.rig.scratch, EventSeq(seq), &payload, now);
    }
    world.end(ReplayEnd::Marker);
    world.release();
    assert_eq!(world.rig.trust().level, TrustLevel::Unproven, "the last is missing");
    world.pass(1_000);
    assert!(world.replay(&Fault::None));
    world.rig.expect(TrustLevel::Exact, &[], 4);
    assert!(world.equals_engine().is_ok());
}

#[test]
fn a_worker_that_begins_anew_is_not_exact_when_it_is_emptied() {
    let mut world = with_losses();
    world.pass(RENEWAL_AFTER_MS_MIN);
    world.rig.streams[0].ask_replay(world.rig.now);
    let answer = world.buffer.clone();
    // Exact again, and then the answer comes that was asked for before.
    world.publish(&Work::Clear, true);
    stored(&mut world, true);
    world.rig.expect(TrustLevel::Exact, &[], 5);
    world.rig.streams[0].emptied_under.clear();
    let (seq, payload) = &answer[0];
    let now = world.rig.now;
    world.rig.streams[0].replayed(&mut world.rig.space, &mut world.rig.scratch, EventSeq(*seq), payload, now);
    assert_eq!(world.rig.count(C::Renewed), 1);
    let levels: Vec<_> = world.rig.streams[0].emptied_under.iter().map(|trust| trust.level).collect();
    assert_eq!(levels, [TrustLevel::Unproven], "what readers see once the index is empty");
}

#[test]
fn a_restarted_publisher_that_has_sent_nothing_is_exact_and_holds_nothing() {
    let mut world = World::new();
    world.connect();
    (0..5).for_each(|_| stored(&mut world, true));
    world.restart();
    world.connect();
    assert!(world.replay(&Fault::None), "from the last: it is not there");
    world.rig.expect_without_batch(TrustLevel::Unproven, &[R::Joining, R::Recovering]);
    assert!(world.replay(&Fault::None), "from 0: nothing was sent");
    world.rig.expect_without_batch(TrustLevel::Exact, &[]);
    assert_eq!(world.rig.device(&[1, 1]), 0);
    stored(&mut world, true);
    world.rig.expect(TrustLevel::Exact, &[], 0);
    assert!(world.equals_engine().is_ok());
}

#[test]
fn a_publisher_that_has_sent_nothing_is_exact() {
    let mut world = World::new();
    world.connect();
    assert!(world.replay(&Fault::None));
    world.rig.expect_without_batch(TrustLevel::Exact, &[]);
    // Batches before the first one received are missing, and fetched.
    (0..3).for_each(|_| stored(&mut world, false));
    stored(&mut world, true);
    world.rig.expect_without_batch(TrustLevel::Unproven, &[R::Recovering]);
    assert!(world.replay(&Fault::None));
    world.rig.expect(TrustLevel::Exact, &[], 3);
    assert!(world.equals_engine().is_ok());
}

#[test]
fn a_publisher_without_a_buffer_is_not_mistaken_for_one_that_has_sent_nothing() {
    let mut world = World::new();
    world.connect();
    stored(&mut world, false);
    stored(&mut world, true);
    while world.rig.streams[0].is_recovering() {
        world.pass(10_000);
        world.buffer.clear();
        world.replay(&Fault::None);
    }
    world.rig.expect(TrustLevel::LowerBound, &[R::JoinedLate], 1);
    world.disconnect();
    world.connect();
    for _ in 0..3 {
        world.pass(10_000);
        world.replay(&Fault::None);
    }
    world.rig.expect_without_batch(TrustLevel::Unproven, &[R::Joining]);
}
