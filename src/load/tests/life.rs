//! Bookings through everything that can happen to them, against a plain model: nothing is left when they have ended.

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;

use super::super::*;
use super::kept::keep_all;
use super::{MS, by_id};
use crate::ids::{LocalHash, SpaceId, Worker, WorkerIndex};

const SPACE: SpaceId = SpaceId(1);
const PLACES: u16 = 4;
const SESSIONS: usize = 2;
const AGE_MS: u64 = 1000;
const GRACE_MS: u64 = 50;

/// One thing that happens; requests are named by a small number, sessions and places too.
#[derive(Clone, Debug)]
enum Step {
    Book {
        session: usize,
        request: u8,
        attempt: u32,
        place: u16,
        blocks: Vec<u64>,
        shared: bool,
        tokens: u64,
    },
    PrefillComplete {
        session: usize,
        request: u8,
        attempt: u32,
        us: u64,
    },
    Progress {
        session: usize,
        request: u8,
        attempt: u32,
        tokens: u32,
    },
    Served {
        session: usize,
        request: u8,
        attempt: u32,
        place: u16,
    },
    Free {
        session: usize,
        request: u8,
        attempt: u32,
    },
    /// The worker at a place leaves, and another comes.
    Replace {
        place: u16,
    },
    /// A session's connection goes, time passes, and it comes again.
    Reconnect {
        session: usize,
        ms: u64,
    },
    Pass {
        ms: u64,
    },
    /// The daemon restarts; the worker at a place comes late.
    Restart {
        late: u16,
        ms: u64,
    },
}

fn step() -> impl Strategy<Value = Step> {
    let named = || (0..SESSIONS, 0..12_u8, 0..3_u32);
    let blocks = prop::collection::vec((0..2_u64, 1..6_usize), 0..4);
    let blocks = blocks.prop_map(|runs| runs.into_iter().flat_map(|(block, len)| vec![block; len]).collect());
    let book = (named(), 0..PLACES, blocks, any::<bool>(), 0..200_u64);
    prop_oneof![
        8 => book.prop_map(|((session, request, attempt), place, blocks, shared, tokens)| {
            Step::Book { session, request, attempt, place, blocks, shared, tokens }
        }),
        3 => (named(), 0..5000_u64).prop_map(|((session, request, attempt), us)| {
            Step::PrefillComplete { session, request, attempt, us }
        }),
        4 => (named(), 0..300_u32).prop_map(|((session, request, attempt), tokens)| {
            Step::Progress { session, request, attempt, tokens }
        }),
        3 => (named(), 0..PLACES).prop_map(|((session, request, attempt), place)| {
            Step::Served { session, request, attempt, place }
        }),
        4 => named().prop_map(|(session, request, attempt)| Step::Free { session, request, attempt }),
        1 => (0..PLACES).prop_map(|place| Step::Replace { place }),
        1 => (0..SESSIONS, 0..100_u64).prop_map(|(session, ms)| Step::Reconnect { session, ms }),
        2 => (0..400_u64).prop_map(|ms| Step::Pass { ms }),
        1 => (0..PLACES, 0..200_u64).prop_map(|(late, ms)| Step::Restart { late, ms }),
    ]
}

/// A live booking as it should be.
#[derive(Clone, Debug)]
struct Live {
    attempt: u32,
    worker: WorkerIndex,
    blocks: Vec<u64>,
    shared: bool,
    tokens: u64,
    prefilling: bool,
    booked_ms: u64,
}

struct Model {
    loads: Loads,
    sessions: Vec<SessionId>,
    workers: Vec<WorkerIndex>,
    live: BTreeMap<(usize, u8), Live>,
    now_ms: u64,
    config: LoadsConfig,
    /// Whether blocks weigh whole ones, so that they can be counted here.
    counts_blocks: bool,
}

fn token(session: usize) -> Option<SessionToken> {
    Some(SessionToken { hi: 1, lo: session as u64 })
}

impl Model {
    fn new(prefill: PrefillModel, track_output_blocks: bool) -> Self {
        let config = LoadsConfig {
            age_ms_max: AGE_MS,
            session_grace_ms: GRACE_MS,
            prefill,
            track_output_blocks,
            ..LoadsConfig::default()
        };
        let loads = Loads::new(usize::from(PLACES), config);
        let sessions = (0..SESSIONS).map(|at| loads.open_session(token(at), 7).expect("room")).collect();
        let workers = (0..PLACES).map(|place| WorkerIndex::at(place, 0)).collect();
        Self { loads, sessions, workers, live: BTreeMap::new(), now_ms: 0, config, counts_blocks: !track_output_blocks }
    }

    fn now_ns(&self) -> u64 {
        self.now_ms * MS
    }

    fn apply(&mut self, step: &Step) {
        let now_ns = self.now_ns();
        match step {
            Step::Book { .. } => self.book(step),
            Step::PrefillComplete { session, request, attempt, us } => {
                let (id, of) = (format!("r{request}"), self.sessions[*session]);
                let outcome = self.loads.prefill_complete(of, by_id(&id, *attempt), *us, now_ns);
                if let Some(live) = self.named(*session, *request, *attempt) {
                    assert_eq!(outcome == BookingOutcome::Applied, live.prefilling);
                    live.prefilling = false;
                }
            }
            Step::Progress { session, request, attempt, tokens } => {
                let (id, of) = (format!("r{request}"), self.sessions[*session]);
                let outcome = self.loads.output_progress(of, by_id(&id, *attempt), *tokens);
                let is_live = self.named(*session, *request, *attempt).is_some();
                let is_known = [BookingOutcome::Applied, BookingOutcome::AlreadyApplied].contains(&outcome);
                assert!(if is_live { is_known } else { outcome != BookingOutcome::Applied }, "{outcome:?}");
                assert_ne!(self.loads.output_progress(of, by_id(&id, *attempt), *tokens), BookingOutcome::Applied);
            }
            Step::Served { session, request, attempt, place } => {
                let (id, of, to) = (format!("r{request}"), self.sessions[*session], self.workers[usize::from(*place)]);
                let moved = self.loads.served(of, by_id(&id, *attempt), (SPACE, to), now_ns).expect("it is there");
                if let Some(live) = self.named(*session, *request, *attempt) {
                    assert_eq!(moved.outcome == BookingOutcome::AlreadyApplied, live.worker == to);
                    live.worker = to;
                }
            }
            Step::Free { session, request, attempt } => {
                let (id, of) = (format!("r{request}"), self.sessions[*session]);
                let outcome = self.loads.free(of, by_id(&id, *attempt), now_ns);
                let was_there = self.named(*session, *request, *attempt).is_some();
                assert_eq!(outcome == BookingOutcome::Applied, was_there);
                if was_there {
                    self.live.remove(&(*session, *request));
                }
            }
            Step::Replace { place } => self.replace(*place),
            Step::Reconnect { session, ms } => {
                self.loads.close_session(self.sessions[*session], now_ns);
                self.pass(*ms);
                self.sessions[*session] = self.loads.open_session(token(*session), 7).expect("room");
                if *ms >= GRACE_MS {
                    self.live.retain(|(of, _), _| of != session);
                }
            }
            Step::Pass { ms } => self.pass(*ms),
            Step::Restart { late, ms } => self.restart(*late, *ms),
        }
    }

    /// Workers are named by their places.
    fn restart(&mut self, late: u16, ms: u64) {
        self.sessions.iter().for_each(|session| self.loads.close_session(*session, self.now_ns()));
        let kept = keep_all(&self.loads, self.now_ns(), |index| {
            self.workers.contains(&index).then(|| Worker::new(index.place() as u64, 0))
        });
        self.now_ms += ms;
        let index = |worker: Worker| WorkerIndex::at(worker.id.0 as u16, 0);
        let before = std::mem::replace(&mut self.loads, Loads::new(usize::from(PLACES), self.config));
        let at = RestoredAt { since_ns: ms * MS, now_ns: self.now_ns() };
        let is_there = |worker: Worker| worker.id.0 != u64::from(late);
        let found = |worker: Worker| is_there(worker).then(|| (index(worker), SPACE));
        let restored = self.loads.restore(&kept, at, Skipped::default(), found);
        let now_ms = self.now_ms;
        self.live.retain(|_, live| now_ms - live.booked_ms < AGE_MS);
        assert_eq!(restored.bookings as usize, self.live.len(), "{restored:?}");
        assert_eq!(restored.bookings + restored.too_old, before.live() as u64, "{restored:?}");
        let latecomer = Worker::new(u64::from(late), 0);
        while self.loads.place_absent(latecomer, (index(latecomer), SPACE), 2) == 2 {}
        for live in self.live.values_mut() {
            live.worker = WorkerIndex::at(live.worker.place() as u16, 0);
        }
        self.workers = (0..PLACES).map(|place| WorkerIndex::at(place, 0)).collect();
        for (at, session) in self.sessions.iter_mut().enumerate() {
            let reopened = self.loads.open_session(token(at), 7).expect("room");
            let has_bookings = self.live.keys().any(|(of, _)| *of == at);
            assert!(reopened == *session || !has_bookings, "a session with bookings is found by its token");
            *session = reopened;
        }
    }

    fn named(&mut self, session: usize, request: u8, attempt: u32) -> Option<&mut Live> {
        self.live.get_mut(&(session, request)).filter(|live| live.attempt == attempt)
    }

    fn book(&mut self, step: &Step) {
        let Step::Book { session, request, attempt, place, blocks, shared, tokens } = step else { return };
        let locals: Vec<LocalHash> = blocks.iter().map(|block| LocalHash(*block)).collect();
        let demand = Demand {
            space: SPACE,
            prefill_tokens: *tokens,
            cached_tokens: 3,
            blocks: if *shared { PromptBlocks::Shared(&locals) } else { PromptBlocks::Alone(blocks.len() as u64) },
            divergence: None,
            block_size: 16,
            expected_output_tokens: if tokens.is_multiple_of(2) { 100 } else { 0 },
            is_recorded: false,
            is_traced: false,
        };
        let (id, worker) = (format!("r{request}"), self.workers[usize::from(*place)]);
        let booked = self.loads.book(self.sessions[*session], &id, *attempt, worker, demand, self.now_ns());
        let before = self.live.get(&(*session, *request));
        assert_eq!(booked.is_ok(), before.is_none_or(|live| live.attempt < *attempt), "{booked:?}");
        if booked.is_ok() {
            let live = Live {
                attempt: *attempt,
                worker,
                blocks: blocks.clone(),
                shared: *shared,
                tokens: *tokens,
                prefilling: true,
                booked_ms: self.now_ms,
            };
            self.live.insert((*session, *request), live);
        }
    }

    fn replace(&mut self, place: u16) {
        let leaver = self.workers[usize::from(place)];
        self.loads.leave(leaver);
        let next = WorkerIndex::at(place, leaver.generation() + 1);
        // Who comes has the place before the leaver's bookings have ended.
        self.loads.admit(next);
        let mut from = Some(0);
        while let Some(at) = from {
            from = self.loads.end_of(leaver, at, 3).next;
        }
        self.live.retain(|_, live| live.worker != leaver);
        self.workers[usize::from(place)] = next;
    }

    fn pass(&mut self, ms: u64) {
        self.now_ms += ms;
        while self.loads.expire(self.now_ns(), 2).bookings() > 0 {}
        let now_ms = self.now_ms;
        self.live.retain(|_, live| now_ms - live.booked_ms < AGE_MS);
    }

    fn check(&self) {
        for worker in &self.workers {
            let of_worker: Vec<_> = self.live.values().filter(|live| live.worker == *worker).collect();
            let load = self.loads.read(*worker);
            assert_eq!(load.requests, of_worker.len() as u64);
            let prefill: u64 = of_worker.iter().filter(|live| live.prefilling).map(|live| live.tokens).sum();
            assert_eq!(load.prefill_tokens, prefill);
            assert!(self.loads.read_at(*worker, self.now_ns() + 77).prefill_tokens <= prefill);
            let shared = of_worker.iter().filter(|live| live.shared);
            let prefixes = shared.flat_map(|live| (1..=live.blocks.len()).map(|to| &live.blocks[..to]));
            let distinct = prefixes.collect::<BTreeSet<_>>().len();
            let alone: usize = of_worker.iter().filter(|live| !live.shared).map(|live| live.blocks.len()).sum();
            if self.counts_blocks {
                assert_eq!(load.decode_blocks as usize, distinct + alone);
            }
        }
        assert_eq!(self.loads.live(), self.live.len());
    }

    fn end_all(&mut self) {
        self.sessions.iter().for_each(|session| self.loads.close_session(*session, self.now_ns()));
        self.pass(GRACE_MS);
        assert!(self.loads.live() == 0 && self.loads.active_bytes() == 0);
        for worker in &self.workers {
            let load = self.loads.read_at(*worker, self.now_ns());
            assert_eq!((load.prefill_tokens, load.decode_blocks, load.requests), (0, 0, 0));
            assert_eq!(self.loads.decode_parts(*worker), 0, "not a part of a block is left");
        }
        assert!(self.loads.is_idle());
    }
}

proptest! {
    #[test]
    fn loads_are_those_of_the_live_bookings_whatever_happens(
        steps in prop::collection::vec(step(), 1..150), tracks in any::<bool>(), model in 0..3_usize,
    ) {
        let fixed = PrefillModel::Fixed { base_ns: 1000, token_ns: 1_000_000, cached_token_ns: 10 };
        let mut model = Model::new([PrefillModel::Off, fixed, PrefillModel::Learnt][model], tracks);
        for step in &steps {
            model.apply(step);
            model.check();
        }
        model.end_all();
    }
}

#[test]
fn output_becomes_blocks_that_weigh_less_towards_the_expected_end() {
    let config = LoadsConfig { track_output_blocks: true, ..LoadsConfig::default() };
    let loads = Loads::new(2, config);
    let session = loads.open_session(None, 7).expect("room");
    let locals: Vec<LocalHash> = (0..6).map(LocalHash).collect();
    let demand = Demand {
        space: SPACE,
        prefill_tokens: 100,
        blocks: PromptBlocks::Shared(&locals),
        block_size: 16,
        expected_output_tokens: 40,
        ..Demand::default()
    };
    let here = WorkerIndex(0);
    loads.book(session, "a", 0, here, demand, 0).expect("room");
    let said = |tokens| (loads.output_progress(session, by_id("a", 0), tokens), loads.read(here).decode_blocks);
    // The prompt's partial block takes 12 tokens; each further one begins a block.
    assert_eq!(said(10), (BookingOutcome::Applied, 5), "six blocks at three quarters, 4.5");
    assert_eq!(said(20), (BookingOutcome::Applied, 4), "seven at a half, 3.5");
    assert_eq!(said(20), (BookingOutcome::AlreadyApplied, 4));
    assert_eq!(said(50), (BookingOutcome::Applied, 0), "it should have ended");
    let share = Demand { expected_output_tokens: 0, ..demand };
    loads.book(session, "b", 0, here, share, 0).expect("room");
    assert_eq!(loads.read(here).decode_blocks, 6, "what another shares is whole again");
    let moved = loads.served(session, by_id("a", 0), (SPACE, WorkerIndex(1)), 0).expect("it is there");
    assert_eq!((moved.outcome, moved.unshared), (BookingOutcome::Applied, false));
    assert_eq!([here, WorkerIndex(1)].map(|worker| loads.read(worker).decode_blocks), [6, 6]);
    let other_space = loads.served(session, by_id("a", 0), (SpaceId(0), here), 0);
    assert!(other_space.is_err(), "{other_space:?}");
    loads.free(session, by_id("a", 0), 0);
    loads.free(session, by_id("b", 0), 0);
    assert_eq!([here, WorkerIndex(1)].map(|worker| loads.decode_parts(worker)), [0, 0]);
}
