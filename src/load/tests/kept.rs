//! A restart: what one table of loads gives, another one takes.

use super::super::*;
use super::{MS, NOTHING, by_id};
use crate::ids::{LocalHash, SpaceId, Worker, WorkerIndex};
use crate::limits::{KEPT_BOOKINGS_PER_LOCK_MAX, KEPT_GENERATIONS_GAP, KEPT_LOST_RANGES_MAX, KEPT_SESSIONS_GAP};

const SECOND: u64 = 1000 * MS;
const SPACE: SpaceId = SpaceId(0);
const TOKEN: Option<SessionToken> = Some(SessionToken { hi: 1, lo: 2 });

/// Takes everything, as a run does before it ends.
pub(super) fn keep_all(
    loads: &Loads,
    now_ns: u64,
    worker_of: impl Fn(WorkerIndex) -> Option<Worker> + Copy,
) -> KeptLoads {
    let numbers = loads.numbers();
    let (mut slices, mut next) = (Vec::new(), Some(0));
    while let Some(from) = next {
        let mut slice = KeptSlice::default();
        next = loads.keep((from, true), now_ns, worker_of, &mut slice);
        assert!(slice.bookings.len() <= KEPT_BOOKINGS_PER_LOCK_MAX);
        slices.push(slice);
    }
    let places = (0..4).map(|place| WorkerIndex::at(place, 0));
    let workers: Vec<_> = places.filter_map(|index| Some((worker_of(index)?, index))).collect();
    let absent = loads.keep_absent_workers(None, now_ns);
    KeptLoads { numbers, slices, workers: [loads.keep_workers(&workers, now_ns), absent].concat() }
}

fn name(index: WorkerIndex) -> Option<Worker> {
    Some(Worker::new(100 + u64::from(index.0), 0))
}

fn found(worker: Worker) -> Option<(WorkerIndex, SpaceId)> {
    worker.id.0.checked_sub(100).map(|index| (WorkerIndex(index as u32), SPACE))
}

fn config() -> LoadsConfig {
    let prefill = PrefillModel::Fixed { base_ns: 0, token_ns: 10 * MS, cached_token_ns: 0 };
    LoadsConfig { secret: 9, prefill, age_ms_max: 60_000, session_grace_ms: 5_000, ..LoadsConfig::default() }
}

fn locals(of: &[u64]) -> Vec<LocalHash> {
    of.iter().copied().map(LocalHash).collect()
}

fn book(
    loads: &Loads,
    session: SessionId,
    id: &str,
    worker: u32,
    tokens: u64,
    blocks: &[u64],
    now_ns: u64,
) -> BookingHandle {
    let blocks = locals(blocks);
    let demand = Demand { prefill_tokens: tokens, blocks: PromptBlocks::Shared(&blocks), ..NOTHING };
    loads.book(session, id, 0, WorkerIndex(worker), demand, now_ns).expect("booked").handle
}

/// A table with bookings of one session on two workers, as of second 10, and their handles.
fn busy() -> (Loads, SessionId, Vec<BookingHandle>) {
    let loads = Loads::new(2, config());
    let session = loads.open_session(TOKEN, 7).expect("room");
    let mut handles = vec![
        book(&loads, session, "a", 0, 100, &[1, 2, 3], SECOND),
        book(&loads, session, "b", 0, 200, &[1, 2, 4, 5], 9 * SECOND),
        book(&loads, session, "c", 1, 300, &[1, 2], 10 * SECOND),
    ];
    assert_eq!(loads.prefill_complete(session, BookingRef::Handle(handles[0]), 0, 2 * SECOND), BookingOutcome::Applied);
    handles.push(book(&loads, session, "ended", 1, 1, &[9], 10 * SECOND));
    assert_eq!(loads.free(session, by_id("ended", 0), 10 * SECOND), BookingOutcome::Applied);
    (loads, session, handles)
}

fn restore(kept: &KeptLoads, since_s: u64, now_s: u64) -> (Loads, Restored) {
    let loads = Loads::new(2, config());
    let at = RestoredAt { since_ns: since_s * SECOND, now_ns: now_s * SECOND };
    let restored = loads.restore(kept, at, Skipped::default(), found);
    (loads, restored)
}

#[test]
fn a_restart_keeps_loads_handles_names_and_prompts() {
    let (before, session, handles) = busy();
    let kept = keep_all(&before, 10 * SECOND, name);
    assert_eq!(kept.slices[0].runs.len(), 3, "blocks that prompts share are kept once: {:?}", kept.slices[0].runs);
    assert_eq!(kept.oldest_ns(), 9 * SECOND);
    // The process stands still for half a second of its prefills: another clock, on which second 40 is second 10.
    let (after, restored) = restore(&kept, 0, 40);
    assert_eq!((restored.bookings, restored.sessions, restored.too_old), (3, 1, 0));
    for worker in [WorkerIndex(0), WorkerIndex(1)] {
        for later_s in [0, 1, 2] {
            let (old, new) =
                (before.read_at(worker, (10 + later_s) * SECOND), after.read_at(worker, (40 + later_s) * SECOND));
            let scalars = |load: &Load| (load.prefill_tokens, load.decode_blocks, load.requests, load.work.queued_ns);
            assert_eq!(scalars(&new), scalars(&old), "worker {worker:?} {later_s} s later");
        }
    }
    let mut depths = std::collections::BTreeMap::new();
    let read = after.active(SPACE, &locals(&[1, 2, 4, 6]), &mut depths);
    assert!(matches!(read, ActiveRead::LockFree(_)));
    assert_eq!((depths[&WorkerIndex(0)], depths[&WorkerIndex(1)]), (3, 2));
    assert_eq!(after.open_session(TOKEN, 8).unwrap_err().kind(), crate::error::Kind::NotPermitted, "another user");
    assert_eq!(after.open_session(TOKEN, 7).expect("it waits for its gateway"), session);
    let free = |booking| after.free(session, booking, 41 * SECOND);
    assert_eq!(free(BookingRef::Handle(handles[3])), BookingOutcome::AlreadyApplied, "it had ended before");
    assert_eq!(free(BookingRef::Handle(handles[1])), BookingOutcome::Applied);
    assert_eq!(free(by_id("a", 0)), BookingOutcome::Applied);
    assert_eq!(free(by_id("c", 0)), BookingOutcome::Applied);
    assert_eq!((after.live(), after.active_bytes()), (0, 0));
    assert!(after.is_idle());
}

#[test]
fn what_was_booked_after_the_image_is_unknown_and_never_another_booking() {
    let (before, session, _) = busy();
    let kept = keep_all(&before, 10 * SECOND, name);
    let lost = book(&before, session, "lost", 1, 5, &[7], 10 * SECOND);
    let (after, _) = restore(&kept, 1, 40);
    assert_eq!(after.open_session(TOKEN, 7).expect("room"), session);
    let next = book(&after, session, "next", 1, 5, &[8], 40 * SECOND);
    assert_eq!(next.slot as u32, lost.slot as u32, "the slot is given out again");
    assert!(next.generation > lost.generation + KEPT_GENERATIONS_GAP - 10);
    assert_eq!(after.free(session, BookingRef::Handle(lost), 0), BookingOutcome::Unknown);
    assert_eq!(after.free(session, by_id("lost", 0), 0), BookingOutcome::Unknown);
    assert_eq!(after.live(), 4);
    let stranger = after.open_session(None, 7).expect("room");
    assert_ne!(stranger, session);
    assert_eq!(after.free(stranger, BookingRef::Handle(next), 0), BookingOutcome::Unknown);
}

#[test]
fn ages_go_on_and_the_grace_begins_anew() {
    let (before, session, _) = busy();
    before.close_session(session, 10 * SECOND);
    let kept = keep_all(&before, 10 * SECOND, name);
    // The oldest is 9 s old; a minute is the limit.
    let (after, restored) = restore(&kept, 51, 100);
    assert_eq!((restored.bookings, restored.too_old), (2, 1));
    assert_eq!(after.expire(104 * SECOND, 10), Expired::default());
    assert_eq!(after.expire(105 * SECOND, 10), Expired { by_age: 0, by_session: 2 });
    let (after, _) = restore(&kept, 51, 100);
    assert_eq!(after.open_session(TOKEN, 7).expect("in time"), session);
    assert_eq!(after.expire(107 * SECOND, 10), Expired::default());
    assert_eq!(after.expire(108 * SECOND, 10), Expired { by_age: 1, by_session: 0 });
    assert_eq!(after.expire(109 * SECOND, 10), Expired { by_age: 1, by_session: 0 });
    let (_, restored) = restore(&kept, u64::MAX / SECOND, 100);
    assert_eq!((restored.bookings, restored.too_old), (0, 3), "the longest time");
}

#[test]
fn bookings_wait_for_a_worker_that_comes_late() {
    let (before, session, handles) = busy();
    let kept = keep_all(&before, 10 * SECOND, name);
    let after = Loads::new(2, config());
    let at = RestoredAt { since_ns: 0, now_ns: 40 * SECOND };
    let (late, other) = (Worker::new(100, 0), Worker::new(101, 0));
    let restored = after.restore(&kept, at, Skipped::default(), |worker| found(worker).filter(|_| worker != late));
    assert_eq!((restored.bookings, restored.absent), (3, 2));
    assert_eq!(after.read(WorkerIndex(0)).requests, 0);
    // They are kept once more before the worker comes.
    let again = keep_all(&after, 40 * SECOND, name);
    let workers = |kept: &KeptLoads| kept.slices[0].bookings.iter().map(|booking| booking.worker).collect::<Vec<_>>();
    assert_eq!((workers(&again), workers(&kept)), (vec![late, late, other], vec![late, late, other]));
    assert_eq!(after.open_session(TOKEN, 7).expect("room"), session);
    assert_eq!(after.free(session, BookingRef::Handle(handles[0]), 40 * SECOND), BookingOutcome::Applied);
    // The other one, and no more.
    for waited in [1, 0] {
        assert_eq!(after.place_absent(late, (WorkerIndex(0), SPACE), 1), waited);
    }
    assert_eq!(after.place_absent(other, (WorkerIndex(1), SPACE), 1), 0);
    let load = after.read(WorkerIndex(0));
    assert_eq!((load.requests, load.prefill_tokens, load.decode_blocks), (1, 200, 4));
    // Of the second time, none waits: the worker serves another space now.
    let third = Loads::new(2, config());
    third.restore(&again, at, Skipped::default(), |_| None);
    assert_eq!(third.place_absent(late, (WorkerIndex(0), SpaceId(5)), 9), 2);
    assert_eq!((third.live(), third.read(WorkerIndex(0)).requests), (1, 0));
    let elsewhere = |worker| found(worker).map(|(index, _)| (index, SpaceId(5)));
    let restored = Loads::new(2, config()).restore(&again, at, Skipped::default(), elsewhere);
    assert_eq!((restored.bookings, restored.other_space), (0, 3));
}

#[test]
fn a_name_that_is_kept_twice_is_that_of_the_later_booking() {
    let (before, session, _) = busy();
    let mut kept = keep_all(&before, 10 * SECOND, name);
    // Between two slices the first attempt ended and the second one was booked.
    assert_eq!(before.free(session, by_id("a", 0), 10 * SECOND), BookingOutcome::Applied);
    let demand = Demand { prefill_tokens: 1, ..NOTHING };
    before.book(session, "z", 0, WorkerIndex(1), demand, 10 * SECOND).expect("booked");
    before.book(session, "a", 1, WorkerIndex(1), demand, 10 * SECOND).expect("booked");
    let mut later = keep_all(&before, 10 * SECOND, name);
    later.slices[0].bookings.retain(|booking| booking.attempt == 1);
    let (slot, generation) = (later.slices[0].bookings[0].slot, later.slices[0].bookings[0].generation);
    kept.slices.append(&mut later.slices);
    let (after, restored) = restore(&kept, 0, 40);
    assert_eq!((restored.bookings, restored.refused), (3, 1));
    assert_eq!(after.open_session(TOKEN, 7).expect("room"), session);
    assert_eq!(after.free(session, by_id("a", 0), 0), BookingOutcome::Superseded);
    assert_eq!(after.free(session, by_id("a", 1), 0), BookingOutcome::Applied);
    // The same slot, the same generation, and no session, each count once.
    let mut hostile = kept.clone();
    let double = hostile.slices[0].bookings[0];
    hostile.slices[0].bookings.push(KeptBooking { generation: 1 << 50, ..double });
    hostile.slices[0].bookings.push(KeptBooking { slot: slot + 100, generation, ..double });
    hostile.slices[0].bookings.push(KeptBooking { session: SessionId(77), slot: 500, generation: 1 << 51, ..double });
    let (after, restored) = restore(&hostile, 0, 40);
    assert_eq!((restored.bookings, restored.refused), (3, 4));
    assert_eq!(after.live(), 3);
}

#[test]
fn slices_are_bounded_and_complete() {
    let loads = Loads::new(2, config());
    let session = loads.open_session(TOKEN, 7).expect("room");
    let count = 3 * KEPT_BOOKINGS_PER_LOCK_MAX + 1;
    for at in 0..count {
        book(&loads, session, &at.to_string(), (at % 2) as u32, 1, &[1, 2, at as u64 + 10], SECOND);
    }
    let kept = keep_all(&loads, SECOND, name);
    let slots: Vec<u32> = kept.slices.iter().flat_map(|slice| &slice.bookings).map(|booking| booking.slot).collect();
    assert_eq!(slots, (0..count as u32).collect::<Vec<_>>());
    assert!(
        kept.slices.iter().all(|slice| slice.sessions.len() == 1 && slice.hashes.len() == slice.bookings.len() + 2)
    );
    let (after, restored) = restore(&kept, 0, 10);
    assert_eq!(restored.bookings as usize, count);
    for worker in [WorkerIndex(0), WorkerIndex(1)] {
        assert_eq!(after.read(worker).decode_blocks, loads.read(worker).decode_blocks);
    }
    // Without blocks, prompts are numbers.
    let mut slice = KeptSlice::default();
    assert!(loads.keep((0, false), SECOND, name, &mut slice).is_some());
    assert!(slice.runs.is_empty() && slice.bookings.iter().all(|booking| booking.blocks == KeptBlocks::Alone(3)));
}

#[test]
fn a_share_of_bookings_beyond_the_limit_is_refused() {
    let (before, ..) = busy();
    let kept = keep_all(&before, 10 * SECOND, name);
    let after = Loads::new(2, LoadsConfig { bookings_max: 2, ..config() });
    let restored = after.restore(&kept, RestoredAt { since_ns: 0, now_ns: 40 * SECOND }, Skipped::default(), found);
    assert_eq!((restored.bookings, restored.refused, after.live()), (2, 1, 2));
}

const LATE: Worker = Worker::new(100, 0);

/// What these loads keep at a second, restored in a run without worker 100.
fn without_late(kept: &KeptLoads, (since_s, now_s): (u64, u64), config: LoadsConfig) -> (Loads, Restored) {
    let loads = Loads::new(2, config);
    let at = RestoredAt { since_ns: since_s * SECOND, now_ns: now_s * SECOND };
    let restored = loads.restore(kept, at, Skipped::default(), |worker| found(worker).filter(|_| worker != LATE));
    (loads, restored)
}

#[test]
fn bookings_of_a_late_worker_stay_apart_from_what_other_routers_said_of_it() {
    let config = LoadsConfig { track_output_blocks: true, ..config() };
    let before = Loads::new(2, config);
    let session = before.open_session(TOKEN, 7).expect("room");
    let (blocks, w) = (locals(&[1, 2, 3]), WorkerIndex(0));
    let demand = Demand {
        prefill_tokens: 50_000,
        blocks: PromptBlocks::Shared(&blocks),
        expected_output_tokens: 100,
        ..NOTHING
    };
    let handle = before.book(session, "a", 0, w, demand, SECOND).expect("booked").handle;
    assert_eq!(before.output_progress(session, BookingRef::Handle(handle), 50), BookingOutcome::Applied);
    let own = before.own_gauge(w, SECOND);
    let (after, _) = without_late(&keep_all(&before, SECOND, name), (0, 40), config);
    let said = Gauge { requests: 5, decode_parts: 1000, recent_share: 0.1, ..Gauge::default() };
    assert_ne!(after.set_gauge(OriginPlace(0), w, said, 40 * SECOND), GaugeEffect::Refused);
    assert_eq!(after.place_absent(LATE, (w, SPACE), 9), 1);
    let (placed, load) = (after.own_gauge(w, 40 * SECOND), after.read(w));
    assert_eq!((placed.requests, placed.decode_parts, placed.prefill_tokens), (1, own.decode_parts, 50_000));
    assert_eq!((load.requests, after.decode_parts(w)), (6, own.decode_parts + 1000));
    assert!(placed.recent_share > 0.0 && load.recent.prefill_share > placed.recent_share);
    assert_eq!(after.free(session, BookingRef::Handle(handle), 41 * SECOND), BookingOutcome::Applied);
    let left = after.own_gauge(w, 41 * SECOND);
    assert_eq!((left.requests, left.decode_parts, after.read(w).requests), (0, 0, 5));
}

#[test]
fn what_other_routers_said_is_not_kept() {
    let (before, ..) = busy();
    let kept = keep_all(&before, 10 * SECOND, name);
    let said = Gauge {
        requests: 5,
        prefills: 2,
        prefill_tokens: 900,
        queued_ns: 9 * SECOND,
        running_ns: 5 * SECOND,
        elapsed_ns: 4 * SECOND,
        recent_share: 0.9,
        ..Gauge::default()
    };
    for worker in [WorkerIndex(0), WorkerIndex(1)] {
        assert_ne!(before.set_gauge(OriginPlace(1), worker, said, 10 * SECOND), GaugeEffect::Refused);
    }
    assert_eq!(keep_all(&before, 10 * SECOND, name), kept);
}

#[test]
fn what_is_known_of_a_late_worker_waits_for_it() {
    let (before, session, _) = busy();
    let kept = keep_all(&before, 10 * SECOND, name);
    let (in_time, _) = restore(&kept, 1, 40);
    let expected = in_time.read(WorkerIndex(0));
    assert!(expected.recent.prefill_share > 0.0 && expected.work.queued_ns > 0);
    // A run ends before the worker comes.
    let (between, _) = without_late(&kept, (1, 40), config());
    assert_eq!(between.read(WorkerIndex(0)).recent, RecentWork::default());
    let again = keep_all(&between, 40 * SECOND, |index| name(index).filter(|worker| *worker != LATE));
    assert_eq!(again.workers.iter().filter(|kept| kept.worker == LATE).count(), 1);
    let (after, _) = without_late(&again, (0, 40), config());
    assert_eq!(after.place_absent(LATE, (WorkerIndex(0), SPACE), 9), 2);
    let load = after.read(WorkerIndex(0));
    assert_eq!((load.recent, load.work), (expected.recent, expected.work));
    assert!(after.keep_absent_workers(None, 40 * SECOND).is_empty());
    // What is booked between its coming and the call comes on top, and runs first.
    let (after, _) = without_late(&again, (0, 40), config());
    assert_eq!(after.open_session(TOKEN, 7).expect("room"), session);
    book(&after, session, "new", 0, 5000, &[9], 40 * SECOND);
    after.place_absent(LATE, (WorkerIndex(0), SPACE), 9);
    let load = after.read(WorkerIndex(0));
    assert!(load.recent.prefill_share > expected.recent.prefill_share);
    assert_eq!(load.work.since_ns, 40 * SECOND);
    // It never comes.
    let (after, _) = without_late(&again, (0, 40), config());
    after.expire(100 * SECOND, 9);
    assert!(after.keep_absent_workers(None, 100 * SECOND).is_empty());
}

#[test]
fn prompts_that_wait_for_a_worker_are_bounded_and_counted() {
    let before = Loads::new(2, config());
    let session = before.open_session(TOKEN, 7).expect("room");
    let prompt = |of: u64| (0..40).map(|block| 1000 * of + block).collect::<Vec<u64>>();
    for of in 0..3 {
        book(&before, session, &of.to_string(), 0, 10, &prompt(of), SECOND);
    }
    let config = LoadsConfig { active_words_max: 100, ..config() };
    let (after, restored) = without_late(&keep_all(&before, SECOND, name), (0, 40), config);
    assert_eq!(restored.absent, 3);
    let kept = keep_all(&after, 40 * SECOND, |_| None);
    let blocks: Vec<usize> = kept.slices.iter().map(|slice| slice.hashes.len()).collect();
    assert_eq!(blocks, [80], "two prompts; the third is a number");
    assert!(kept.slices[0].bookings.iter().any(|booking| booking.blocks == KeptBlocks::Alone(40)));
    let bytes = || {
        after.expire(40 * SECOND, 1);
        after.bytes()
    };
    let held = bytes();
    assert_eq!(after.open_session(TOKEN, 7).expect("room"), session);
    for name in ["0", "1"] {
        assert_eq!(after.free(session, by_id(name, 0), 40 * SECOND), BookingOutcome::Applied);
    }
    assert_eq!(held - bytes(), 80 * 8);
    assert_eq!(after.place_absent(LATE, (WorkerIndex(0), SPACE), 9), 1);
    assert_eq!(after.read(WorkerIndex(0)).decode_blocks, 40);
}

#[test]
fn a_slot_that_waits_for_another_worker_by_now_goes_on_waiting() {
    let (before, ..) = busy();
    let mut kept = keep_all(&before, 10 * SECOND, name);
    let other = Worker::new(101, 0);
    let [first, second, third] = &mut kept.slices[0].bookings[..] else { panic!("three") };
    // The second attempt of the first one's request frees its slot, and the third one has got that.
    (second.name, second.attempt, second.slot, second.worker) = (first.name, 1, 7, other);
    (third.slot, third.worker) = (first.slot, other);
    let after = Loads::new(2, config());
    let at = RestoredAt { since_ns: 0, now_ns: 40 * SECOND };
    let restored = after.restore(&kept, at, Skipped::default(), |_| None);
    assert_eq!((restored.bookings, restored.absent, restored.refused), (2, 2, 1));
    assert_eq!(after.place_absent(LATE, (WorkerIndex(0), SPACE), 9), 0);
    assert_eq!(after.place_absent(other, (WorkerIndex(1), SPACE), 9), 2);
    assert_eq!(after.read(WorkerIndex(1)).requests, 2);
}

#[test]
fn each_change_of_a_booking_counts_also_where_no_load_changes() {
    let (before, session, handles) = busy();
    let kept = keep_all(&before, 10 * SECOND, name);
    let (after, _) = without_late(&kept, (0, 40), config());
    assert_eq!(after.open_session(TOKEN, 7).expect("room"), session);
    let (mut seen, now_ns) = (after.booking_changes(), 40 * SECOND);
    let mut has_changed = || std::mem::replace(&mut seen, after.booking_changes()) != after.booking_changes();
    let loads = after.changes_seen();
    let of = BookingRef::Handle(handles[1]);
    assert_eq!(after.prefill_complete(session, of, 0, now_ns), BookingOutcome::Applied);
    assert!(has_changed());
    assert_eq!(after.output_progress(session, of, 10), BookingOutcome::Applied);
    assert!(has_changed());
    assert_eq!(after.free(session, of, now_ns), BookingOutcome::Applied);
    assert!(has_changed());
    assert_eq!(after.free(session, of, now_ns), BookingOutcome::AlreadyApplied);
    assert!(!has_changed());
    assert_eq!(after.changes_seen(), loads, "their worker is not there");
    book(&after, session, "n", 1, 1, &[1], now_ns);
    assert!(has_changed());
    assert_eq!(after.place_absent(LATE, (WorkerIndex(0), SPACE), 9), 1);
    assert!(has_changed());
}

#[test]
fn a_booking_that_was_lost_stays_unknown_after_more_restarts() {
    let (before, session, _) = busy();
    let kept = keep_all(&before, 10 * SECOND, name);
    let lost = BookingRef::Handle(book(&before, session, "lost", 1, 5, &[7], 10 * SECOND));
    let (after, _) = restore(&kept, 1, 40);
    assert_eq!(after.open_session(TOKEN, 7).expect("room"), session);
    let ended = book(&after, session, "ended", 1, 5, &[7], 40 * SECOND);
    assert_eq!(after.free(session, BookingRef::Handle(ended), 40 * SECOND), BookingOutcome::Applied);
    let mut kept = keep_all(&after, 40 * SECOND, name);
    let (after, _) = restore(&kept, 0, 40);
    assert_eq!(after.open_session(TOKEN, 7).expect("room"), session);
    assert_eq!(after.free(session, lost, 40 * SECOND), BookingOutcome::Unknown);
    assert_eq!(after.free(session, BookingRef::Handle(ended), 40 * SECOND), BookingOutcome::AlreadyApplied);
    for _ in 0..2 * KEPT_LOST_RANGES_MAX {
        let (next, _) = restore(&kept, 0, 40);
        kept = keep_all(&next, 40 * SECOND, name);
    }
    assert_eq!(kept.numbers.lost.len(), KEPT_LOST_RANGES_MAX);
    assert!(kept.numbers.lost.windows(2).all(|ranges| ranges[0].end() < ranges[1].start()));
    let (after, _) = restore(&kept, 0, 40);
    assert_eq!(after.open_session(TOKEN, 7).expect("room"), session);
    assert_eq!(after.free(session, lost, 40 * SECOND), BookingOutcome::Unknown);
}

#[test]
fn a_restart_skips_the_numbers_that_the_caller_drew() {
    let (before, ..) = busy();
    let kept = keep_all(&before, 10 * SECOND, name);
    let after = Loads::new(2, config());
    let at = RestoredAt { since_ns: 0, now_ns: 40 * SECOND };
    after.restore(&kept, at, Skipped { generations: 11, sessions: 13 }, found);
    let numbers = after.numbers();
    assert_eq!(numbers.generations, kept.numbers.generations + KEPT_GENERATIONS_GAP + 11);
    assert_eq!(numbers.next_session, kept.numbers.next_session + KEPT_SESSIONS_GAP + 13);
}
