//! Bookings one by one, and many threads against a model.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};

use rand::{RngExt, SeedableRng};
use rand_xoshiro::Xoshiro256PlusPlus;

use super::*;
use crate::error::Kind;
use crate::ids::{SpaceId, WorkerIndex};
use crate::limits::{NAME_BYTES_MAX, SESSIONS_MAX};

mod kept;
mod life;
mod others;

const W: WorkerIndex = WorkerIndex(0);
const NOTHING: Demand<'static> = Demand {
    space: SpaceId(0),
    prefill_tokens: 0,
    cached_tokens: 0,
    blocks: PromptBlocks::Alone(0),
    divergence: None,
    block_size: 16,
    expected_output_tokens: 0,
    is_recorded: false,
    is_traced: false,
};
const DEMAND: Demand<'static> =
    Demand { prefill_tokens: 100, cached_tokens: 0, blocks: PromptBlocks::Alone(10), ..NOTHING };

fn loads() -> (Loads, SessionId) {
    let loads = Loads::new(2, LoadsConfig { age_ms_max: 1000, session_grace_ms: 50, ..LoadsConfig::default() });
    let session = loads.open_session(Some(SessionToken { hi: 1, lo: 2 }), 7).unwrap();
    (loads, session)
}

fn scalars(loads: &Loads, worker: WorkerIndex) -> (u64, u64, u64) {
    let load = loads.read(worker);
    (load.prefill_tokens, load.decode_blocks, load.requests)
}

fn by_id(request_id: &str, attempt: u32) -> BookingRef<'_> {
    BookingRef::Request { request_id, attempt }
}

#[test]
fn a_booking_lives_from_book_to_free() {
    let (loads, session) = loads();
    let booked = loads.book(session, "r1", 0, W, DEMAND, 0).unwrap();
    assert_eq!(scalars(&loads, W), (100, 10, 1));
    let handle = BookingRef::Handle(booked.handle);
    assert_eq!(loads.prefill_complete(session, handle, 0, 0), BookingOutcome::Applied);
    assert_eq!(loads.prefill_complete(session, handle, 0, 0), BookingOutcome::AlreadyApplied);
    assert_eq!(scalars(&loads, W), (0, 10, 1));
    assert_eq!(loads.free(session, by_id("r1", 0), 0), BookingOutcome::Applied);
    assert_eq!(scalars(&loads, W), (0, 0, 0));
    assert_eq!(loads.free(session, handle, 0), BookingOutcome::AlreadyApplied);
    assert_eq!(loads.free(session, by_id("r1", 0), 0), BookingOutcome::AlreadyApplied);
    assert_eq!(loads.free(session, by_id("r2", 0), 0), BookingOutcome::Unknown);
}

#[test]
fn the_journal_gets_what_became_of_recorded_bookings() {
    let config = LoadsConfig { age_ms_max: 1000, ended_waiting_max: 2, ..LoadsConfig::default() };
    let loads = Loads::new(2, config);
    let session = loads.open_session(None, 7).unwrap();
    let recorded = Demand { is_recorded: true, cached_tokens: 30, ..DEMAND };
    let book = |name, demand, now_ns| loads.book(session, name, 0, W, demand, now_ns).unwrap().handle.generation;
    let first = book("a", recorded, 1_000);
    book("not recorded", DEMAND, 1_500);
    let second = book("b", recorded, 2_000);
    loads.prefill_complete(session, by_id("a", 0), 0, 5_000);
    loads.prefill_complete(session, by_id("b", 0), 0, 6_000);
    loads.output_progress(session, by_id("a", 0), 12);
    loads.free(session, by_id("not recorded", 0), 7_000);
    loads.free(session, by_id("a", 0), 9_000);
    let ended = loads.take_ended().unwrap();
    assert_eq!((ended.booking, ended.reason, ended.worker), (first, EndReason::Freed, W));
    assert_eq!((ended.prefill_tokens, ended.cached_tokens, ended.output_tokens), (100, 30, 12));
    assert_eq!((ended.first_token_ns, ended.end_ns, ended.requests), (Some(4_000), 8_000, 2));
    assert!(ended.began_alone && ended.prefilled_us > 0, "the prefill of b ended while a decoded: {ended:?}");
    assert_eq!(loads.take_ended(), None);

    loads.expire(2_000_000_000, 10);
    let ended = loads.take_ended().unwrap();
    assert_eq!((ended.booking, ended.reason, ended.began_alone), (second, EndReason::TooOld, false));
    // Nothing waits for the journal: a record without room is lost and counted.
    for name in ["c", "d", "e"] {
        book(name, recorded, 3_000_000_000);
        loads.free(session, by_id(name, 0), 3_000_000_001);
    }
    assert_eq!((loads.take_ended_lost(), loads.take_ended_lost()), (1, 0));
    let ended = loads.take_ended().unwrap();
    assert_eq!((ended.first_token_ns, ended.end_ns), (None, 1));
}

#[test]
fn ended_bookings_are_known_from_live_ones_even_if_their_slot_is_taken_again() {
    let (loads, session) = loads();
    let book = |name: &str| loads.book(session, name, 0, W, DEMAND, 0).unwrap().handle;
    let [first, second] = ["a", "b"].map(book);
    assert!(loads.ended_of(&[first, second]).is_empty());
    loads.free(session, by_id("a", 0), 1);
    let third = book("c");
    assert_eq!(third.slot as u32, first.slot as u32, "it has the slot of the first");
    assert_eq!(loads.ended_of(&[first, second, third]), [first.generation]);
}

#[test]
fn freeing_a_request_by_name_ends_its_prefill_half() {
    let (loads, session) = loads();
    let other = loads.open_session(None, 7).unwrap();
    let freed = |outcome, prefill_half| Freed { outcome, prefill_half };
    for (session, name, attempt) in
        [(session, "r", 0), (session, "r/prefill", 0), (session, "s/prefill", 1), (other, "r", 0)]
    {
        loads.book(session, name, attempt, W, DEMAND, 0).unwrap();
    }
    assert_eq!(loads.free_request(other, "r", 0, 0), freed(BookingOutcome::Applied, false), "another session's half");
    assert_eq!(loads.free_request(session, "r", 0, 0), freed(BookingOutcome::Applied, true));
    assert_eq!(loads.free_request(session, "r", 0, 0), freed(BookingOutcome::AlreadyApplied, false));
    assert_eq!(loads.free_request(session, "s", 0, 0), freed(BookingOutcome::Unknown, false), "of another attempt");
    assert_eq!(loads.free_request(session, "s", 1, 0), freed(BookingOutcome::Unknown, true));
    assert_eq!(scalars(&loads, W), (0, 0, 0));
}

#[test]
fn free_implies_that_the_prefill_is_over() {
    let (loads, session) = loads();
    let booked = loads.book(session, "r1", 0, W, DEMAND, 0).unwrap();
    assert_eq!(loads.free(session, BookingRef::Handle(booked.handle), 0), BookingOutcome::Applied);
    assert_eq!(scalars(&loads, W), (0, 0, 0));
}

#[test]
fn a_later_attempt_takes_over_and_fences_the_earlier() {
    let (loads, session) = loads();
    let first = loads.book(session, "r1", 0, W, DEMAND, 0).unwrap();
    assert_eq!(loads.book(session, "r1", 0, W, DEMAND, 0).unwrap_err().kind(), Kind::BookingExists);
    let second = loads.book(session, "r1", 1, WorkerIndex(1), DEMAND, 0).unwrap();
    assert!(second.superseded);
    assert_eq!((scalars(&loads, W), scalars(&loads, WorkerIndex(1))), ((0, 0, 0), (100, 10, 1)));
    assert_eq!(loads.free(session, by_id("r1", 0), 0), BookingOutcome::Superseded);
    assert_eq!(loads.free(session, BookingRef::Handle(first.handle), 0), BookingOutcome::AlreadyApplied);
    assert_eq!(scalars(&loads, WorkerIndex(1)), (100, 10, 1));
    assert_eq!(loads.free(session, by_id("r1", 1), 0), BookingOutcome::Applied);
}

#[test]
fn sessions_do_not_touch_each_others_bookings() {
    let (loads, session) = loads();
    let other = loads.open_session(None, 7).unwrap();
    let booked = loads.book(session, "r1", 0, W, DEMAND, 0).unwrap();
    assert_eq!(loads.free(other, BookingRef::Handle(booked.handle), 0), BookingOutcome::Unknown);
    assert_eq!(loads.free(other, by_id("r1", 0), 0), BookingOutcome::Unknown);
    loads.book(other, "r1", 0, W, DEMAND, 0).unwrap();
    assert_eq!(scalars(&loads, W), (200, 20, 2));
    let stolen = loads.open_session(Some(SessionToken { hi: 1, lo: 2 }), 8);
    assert_eq!(stolen.unwrap_err().kind(), Kind::NotPermitted);
}

#[test]
fn bookings_end_by_age_and_with_their_session() {
    let (loads, session) = loads();
    let lonely = loads.open_session(None, 7).unwrap();
    for n in 0..3 {
        loads.book(lonely, &format!("l{n}"), 0, W, DEMAND, 0).unwrap();
    }
    let again = loads.open_session(Some(SessionToken { hi: 1, lo: 2 }), 7).unwrap();
    assert_eq!(again, session, "a token names one session");
    loads.book(session, "old", 0, W, DEMAND, 0).unwrap();
    loads.book(session, "young", 0, W, DEMAND, 900 * MS).unwrap();
    loads.close_session(session, 10 * MS);
    loads.close_session(lonely, 10 * MS);
    assert_eq!(loads.expire(40 * MS, 100), Expired::default());
    assert_eq!(loads.expire(60 * MS, 100), Expired { by_age: 0, by_session: 3 });
    assert_eq!(loads.expire(1000 * MS, 100), Expired { by_age: 1, by_session: 0 });
    assert_eq!(loads.free(session, by_id("old", 0), 0), BookingOutcome::AlreadyApplied);
    assert_eq!((scalars(&loads, W), loads.live()), ((100, 10, 1), 1));
    loads.close_session(session, 1000 * MS);
    assert_eq!(loads.expire(1050 * MS, 100).by_session, 1);
    assert_eq!((scalars(&loads, W), loads.live()), ((0, 0, 0), 0));
}

#[test]
fn a_large_session_expires_in_slices() {
    let (loads, session) = loads();
    for n in 0..10 {
        loads.book(session, &format!("r{n}"), 0, W, DEMAND, 0).unwrap();
    }
    loads.close_session(session, 0);
    for (by_session, left) in [(4, 6), (4, 2), (2, 0), (0, 0)] {
        assert_eq!(loads.expire(60 * MS, 4), Expired { by_age: 0, by_session });
        assert_eq!((loads.live(), scalars(&loads, W)), (left, (left as u64 * 100, left as u64 * 10, left as u64)));
    }
    let again = loads.open_session(Some(SessionToken { hi: 1, lo: 2 }), 8).unwrap();
    assert_ne!(again, session, "any client may draw a free token");
}

#[test]
fn sessions_that_come_and_go_do_not_fill_the_table() {
    let (loads, session) = loads();
    let held = loads.open_session(None, 7).unwrap();
    loads.book(held, "r", 0, W, DEMAND, 0).unwrap();
    loads.close_session(held, 0);
    for n in 0..3 * SESSIONS_MAX as u64 {
        let token = (n % 2 == 0).then_some(SessionToken { hi: 9, lo: n });
        let passing = loads.open_session(token, 7).unwrap();
        loads.close_session(passing, 0);
    }
    assert_eq!(loads.open_session(Some(SessionToken { hi: 1, lo: 2 }), 7).unwrap(), session);
    assert_eq!((scalars(&loads, W), loads.expire(50 * MS, 100).by_session), ((100, 10, 1), 1));
}

#[test]
fn a_request_id_is_needed() {
    let (loads, session) = loads();
    assert_eq!(loads.book(session, "", 0, W, DEMAND, 0).unwrap_err().kind(), Kind::InvalidArgument);
    let long = "x".repeat(NAME_BYTES_MAX + 1);
    assert_eq!(loads.book(session, &long, 0, W, DEMAND, 0).unwrap_err().kind(), Kind::InvalidArgument);
    let error = loads.book(session, &format!("{long}/prefill"), 0, W, DEMAND, 0).unwrap_err();
    assert!(error.message().ends_with("not 257"), "the id as sent: {error}");
    loads.book(session, &format!("{}/prefill", &long[1..]), 0, W, DEMAND, 0).unwrap();
}

const WORKERS: u32 = 3;
const THREADS: u64 = 4;
const STEPS: usize = 20_000;
/// When the bookings of the model are made; what is made at 0 is older than any age by then.
const NOON: u64 = 1 << 60;
/// A millisecond of the bookings' clock.
const MS: u64 = 1_000_000;

/// What one gateway knows of its bookings by request id: attempt, handle, worker, still prefilling.
type Model = HashMap<String, (u32, BookingHandle, WorkerIndex, bool)>;

/// One gateway's random reports, each outcome held to its model.
fn report(loads: &Loads, session: SessionId, seed: u64) -> Model {
    let mut rng = Xoshiro256PlusPlus::seed_from_u64(seed);
    let (mut model, mut ended) = (Model::new(), None);
    for _ in 0..STEPS {
        let id = format!("r{}", rng.random_range(0..40));
        let live = model.get(&id).copied();
        let by_handle = rng.random_bool(0.5);
        let name = |(attempt, handle, _, _): (u32, BookingHandle, WorkerIndex, bool)| {
            if by_handle { BookingRef::Handle(handle) } else { by_id(&id, attempt) }
        };
        match (rng.random_range(0..4), live) {
            (0 | 1, _) => {
                let (attempt, worker) = (rng.random_range(0..6), WorkerIndex(rng.random_range(0..WORKERS)));
                match (loads.book(session, &id, attempt, worker, DEMAND, NOON), live) {
                    (Ok(booked), live) => {
                        assert_eq!(booked.superseded, live.is_some());
                        assert!(live.is_none_or(|live| live.0 < attempt));
                        model.insert(id, (attempt, booked.handle, worker, true));
                    }
                    (Err(error), Some(live)) => {
                        assert!(error.kind() == Kind::BookingExists && live.0 >= attempt);
                    }
                    (Err(error), None) => panic!("{error}"),
                }
            }
            (2, Some(mut live)) => {
                let outcome = if live.3 { BookingOutcome::Applied } else { BookingOutcome::AlreadyApplied };
                assert_eq!(loads.prefill_complete(session, name(live), 0, 0), outcome);
                live.3 = false;
                model.insert(id, live);
            }
            (3, Some(live)) => {
                assert_eq!(loads.free(session, name(live), 0), BookingOutcome::Applied);
                ended = Some(live.1);
                model.remove(&id);
            }
            _ => {
                if let Some(handle) = ended {
                    assert_eq!(loads.free(session, BookingRef::Handle(handle), 0), BookingOutcome::AlreadyApplied);
                }
            }
        }
    }
    model
}

/// Sessions that book and leave, for the expiry to find.
fn abandon(loads: &Loads, seed: u64) {
    let mut rng = Xoshiro256PlusPlus::seed_from_u64(seed);
    for n in 0..STEPS as u64 / 20 {
        let session = loads.open_session((n % 2 == 0).then_some(SessionToken { hi: seed, lo: n }), 7).unwrap();
        for booking in 0..rng.random_range(0..20) {
            let worker = WorkerIndex(rng.random_range(0..WORKERS));
            loads.book(session, &format!("a{booking}"), 0, worker, DEMAND, NOON).unwrap();
        }
        loads.close_session(session, 0);
    }
}

#[test]
fn loads_are_the_sum_of_the_live_bookings_whatever_the_threads_do() {
    let loads =
        Loads::new(WORKERS as usize, LoadsConfig { age_ms_max: 1000, session_grace_ms: 50, ..LoadsConfig::default() });
    let sessions: Vec<_> = (0..THREADS).map(|_| loads.open_session(None, 7).unwrap()).collect();
    let stop = AtomicBool::new(false);
    let models: Vec<Model> = std::thread::scope(|scope| {
        scope.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                assert_eq!(loads.expire(NOON, 64).by_age, 0);
                for worker in 0..WORKERS {
                    let load = loads.read(WorkerIndex(worker));
                    let whole = load.decode_blocks == load.requests * 10 && load.prefill_tokens <= load.requests * 100;
                    assert!(whole || !load.version.is_multiple_of(2), "{load:?}");
                }
            }
        });
        let gateways: Vec<_> = (0..)
            .zip(&sessions)
            .map(|(seed, session)| {
                scope.spawn({
                    let loads = &loads;
                    move || report(loads, *session, seed)
                })
            })
            .collect();
        let passing: Vec<_> = (0..2)
            .map(|seed| {
                scope.spawn({
                    let loads = &loads;
                    move || abandon(loads, 100 + seed)
                })
            })
            .collect();
        let passed: Vec<_> = passing.into_iter().map(|thread| thread.join()).collect();
        let models: Vec<_> = gateways.into_iter().map(|gateway| gateway.join()).collect();
        // Before anything fails here: the expiry would go on for ever.
        stop.store(true, Ordering::Relaxed);
        passed.into_iter().for_each(|passed| passed.unwrap());
        models.into_iter().map(|model| model.unwrap()).collect()
    });
    while loads.expire(NOON, 64).bookings() > 0 {}
    for worker in (0..WORKERS).map(WorkerIndex) {
        let live = models.iter().flat_map(Model::values).filter(|booking| booking.2 == worker);
        let (requests, prefilling) = live.fold((0, 0), |(all, busy), live| (all + 1, busy + u64::from(live.3)));
        assert_eq!(scalars(&loads, worker), (prefilling * 100, requests * 10, requests));
    }
    assert_eq!(loads.live(), models.iter().map(Model::len).sum::<usize>());
    sessions.iter().skip(1).for_each(|session| loads.close_session(*session, NOON));
    while loads.expire(NOON + 50 * MS, 7).bookings() > 0 {}
    assert_eq!(loads.live(), models[0].len());
    while loads.expire(NOON + 1000 * MS, 7).bookings() > 0 {}
    assert!((0..WORKERS).all(|worker| scalars(&loads, WorkerIndex(worker)) == (0, 0, 0)) && loads.live() == 0);
}

#[test]
fn bookings_end_with_their_worker_and_its_successor_has_none() {
    let loads = Loads::new(2, LoadsConfig::default());
    let session = loads.open_session(None, 7).unwrap();
    let [leaver, other, next] = [WorkerIndex(0), WorkerIndex(1), WorkerIndex::at(0, 1)];
    let book = |name: &str, worker| loads.book(session, name, 0, worker, DEMAND, NOON);
    let handles: Vec<_> = (0..5).map(|n| book(&format!("l{n}"), leaver).unwrap().handle).collect();
    book("o", other).unwrap();
    loads.leave(leaver);
    assert_eq!(scalars(&loads, leaver), (0, 0, 0), "at once");
    assert_eq!(book("late", leaver).unwrap_err().kind(), Kind::Overloaded);
    let (mut from, mut ended) = (0, 0);
    loop {
        let leaving = loads.end_of(leaver, from, 2);
        ended += leaving.ended;
        let Some(next) = leaving.next else { break };
        from = next;
    }
    assert_eq!((ended, loads.live()), (5, 1));
    loads.admit(next);
    assert_eq!(book("late", leaver).unwrap_err().kind(), Kind::Overloaded);
    book("n", next).unwrap();
    for handle in handles {
        assert_eq!(loads.free(session, BookingRef::Handle(handle), 0), BookingOutcome::AlreadyApplied);
    }
    assert_eq!((scalars(&loads, next), scalars(&loads, leaver)), ((100, 10, 1), (0, 0, 0)));
    assert_eq!(scalars(&loads, other), (100, 10, 1));
    loads.leave(leaver);
    assert!(loads.is_admitted(next) && !loads.is_admitted(leaver));
}

/// The session of a user, reporting on a worker of a space of four.
fn reporter(session: SessionId) -> Reporter {
    Reporter { session, space: SpaceId(0), workers: 4 }
}

#[test]
fn a_lone_user_may_report_on_all_workers_and_otherwise_on_its_share() {
    let config = LoadsConfig { user_share_percent: 75, reported_load_ms_max: 1, ..LoadsConfig::default() };
    let loads = Loads::new(4, config);
    let workers = [0, 1, 2, 3].map(WorkerIndex);
    let first = loads.open_session(None, 7).unwrap();
    let fail = |session, worker, now_ns| loads.report_failure(reporter(session), worker, now_ns);
    let load = |session, worker, now_ns| loads.report_load_by(reporter(session), worker, EngineLoad::default(), now_ns);
    let second_ns = 1_000_000_000;
    // Alone, also with a session more.
    let more = loads.open_session(None, 7).unwrap();
    assert_eq!(workers.map(|worker| fail(first, worker, 0)), [Ok(second_ns / 2); 4]);
    assert_eq!(workers.map(|worker| load(more, worker, 0)), [Ok(true); 4]);
    // Beside another user, once those have ended: three of four, whichever session reports.
    let other = loads.open_session(None, 8).unwrap();
    assert_eq!(load(first, workers[0], 1), Err(BeyondShare), "what it reported alone, it renews no more");
    let later_ns = 100 * second_ns;
    let told = [first, more, first, more].into_iter().zip(workers);
    let told: Vec<_> = told.map(|(session, worker)| fail(session, worker, later_ns)).collect();
    let back_off = Ok(second_ns / 2);
    assert_eq!(told, [back_off, back_off, back_off, Err(BeyondShare)]);
    assert_eq!(workers.map(|worker| load(first, worker, later_ns)), [Ok(true), Ok(true), Ok(true), Err(BeyondShare)]);
    assert_eq!(loads.read_at(workers[3], later_ns).engine, None);
    assert_eq!(loads.read_at(workers[3], later_ns).back_off_until_ns, second_ns / 2, "of before");
    // A back-off holds for reports of every user; this one comes from the other user's report.
    assert_eq!(fail(other, workers[3], later_ns), back_off);
    assert_eq!(fail(first, workers[3], later_ns), back_off);
    // A worker's own report belongs to no user, and a worker that has left does not count.
    assert!(loads.report_load(workers[0], EngineLoad::default(), later_ns));
    loads.leave(workers[1]);
    assert_eq!(load(first, workers[3], later_ns), Ok(true));
    assert_eq!(load(first, workers[0], later_ns), Ok(true));
    assert_eq!((fail(first, workers[1], later_ns), load(first, workers[1], later_ns)), (Ok(0), Ok(false)));
    // The other user has gone.
    loads.close_session(other, later_ns);
    loads.leave(workers[3]);
    loads.admit(workers[3]);
    assert_eq!((fail(first, workers[3], later_ns), load(first, workers[3], later_ns)), (back_off, Ok(true)));
}
