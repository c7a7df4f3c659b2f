//! Decisions over a small fleet with a real index.

mod space_cache;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::*;
use crate::error::Kind;
use crate::fleet::{FleetTable, SchemeCell, Space, TrustCell, WorkerRecord};
use crate::hash;
use crate::ids::{
    EngineHash, GroupId, LocalHash, Scheme, ShardId, SpaceId, Tier, TierBlocks, Window, Worker, WorkerIndex,
};
use crate::index::{IndexReader, ShardLimits, ShardWriter, StoreBlocks, shard};
use crate::load::{Demand, Loads, LoadsConfig, PromptBlocks};
use crate::predict::PredictionReader;
use crate::protocol::{BookingRef, PoolRole, WorkerState};
use crate::trust::Trust;

const SCHEME: Scheme = Scheme { block_size: 4, window: Window::Plain };

struct World {
    fleet: FleetTable,
    writer: ShardWriter,
    indexes: Vec<IndexReader>,
    predictions: Vec<Option<PredictionReader>>,
    loads: Loads,
    policy: Policy,
    draw: u64,
    scratch: Scratch,
    decision: Decision,
}

impl World {
    /// Workers 1..=`workers` of rank 0 in one space.
    fn new(workers: u32, scheme: Option<Scheme>) -> Self {
        let (mut writer, reader) = shard(ShardId(0), ShardLimits::default());
        let records = (0..workers)
            .map(|index| WorkerRecord {
                name: format!("w{}", index + 1),
                batched_tokens_max: 8192,
                ..WorkerRecord::new(
                    WorkerIndex(index),
                    Worker::new(u64::from(index) + 1, 0),
                    writer.add_worker().unwrap(),
                )
            })
            .collect();
        let space = Space {
            id: SpaceId(0),
            model: "m".into(),
            namespace: String::new(),
            role: PoolRole::Both,
            scheme: Arc::new(SchemeCell::new(scheme)),
        };
        Self {
            fleet: FleetTable { version: 1, spaces: vec![space], workers: records },
            writer,
            indexes: vec![IndexReader::new(vec![reader])],
            predictions: Vec::new(),
            loads: Loads::new(workers as usize, LoadsConfig::default()),
            policy: Policy::default(),
            draw: 5,
            scratch: Scratch::default(),
            decision: Decision::default(),
        }
    }

    /// Worker `index` holds the leading blocks of `tokens` in `tier`.
    fn hold(&mut self, index: usize, tokens: &[u32], tier: Tier) {
        let mut locals = Vec::new();
        let seed = hash::seed(None, None);
        hash::local_hashes(SCHEME, seed, bytemuck::cast_slice(tokens), &[], &mut locals);
        let hashes: Vec<_> = (1..=locals.len() as u64).map(EngineHash).collect();
        let slot = self.fleet.workers[index].slot;
        self.writer.begin_batch(slot);
        let blocks = StoreBlocks { parent: None, hashes: &hashes, locals: &locals, tier, group: GroupId(0), seed };
        self.writer.store(slot, &blocks);
        self.writer.publish();
    }

    fn decide(&mut self, request: &RouteRequest<'_>) -> crate::error::Result<()> {
        let view = View {
            fleet: &self.fleet,
            indexes: &self.indexes,
            predictions: &self.predictions,
            loads: &self.loads,
            policy: &self.policy,
            round_robin_counters: &[],
            affinities: &AffinityTable::new(8, 0),
            now_ns: 0,
        };
        self.draw += 1;
        decide(&view, request, &mut self.scratch, Draws::new(self.draw), &mut self.decision)
    }

    /// Changes the fleet table.
    fn change(&mut self, change: impl FnOnce(&mut Vec<WorkerRecord>)) {
        change(&mut self.fleet.workers);
        self.fleet.version += 1;
    }

    fn order(&self) -> Vec<u64> {
        self.decision.candidates.iter().map(|scored| scored.worker.id.0).collect()
    }
}

fn tokens(count: u32) -> Vec<u32> {
    (0..count).map(|token| token * 31 + 7).collect()
}

fn ask(tokens: &[u32]) -> RouteRequest<'_> {
    RouteRequest::new(SpaceId(0), Prompt::of_tokens(tokens))
}

#[test]
fn the_longest_prefix_wins_on_an_idle_fleet() {
    let mut world = World::new(3, Some(SCHEME));
    let prompt = tokens(18);
    world.hold(0, &prompt[..8], Tier::Device);
    world.hold(2, &prompt[..16], Tier::Device);
    world.decide(&ask(&prompt)).unwrap();
    assert_eq!(world.order(), [3, 1, 2]);
    assert_eq!((world.decision.request_blocks, world.decision.eligible, world.decision.ties), (4, 3, 1));
    let device: Vec<_> = world.decision.candidates.iter().map(|scored| scored.overlap.device).collect();
    assert_eq!(device, [4, 2, 0]);
}

#[test]
fn untracked_prefill_adds_no_load() {
    let mut world = World::new(1, Some(SCHEME));
    let prompt = tokens(16);
    let untracked = Overrides { track_prefill_tokens: Some(false), ..Overrides::default() };
    for (overrides, demanded) in [(Overrides::default(), (16, 0)), (untracked, (0, 16))] {
        let request = RouteRequest { overrides, ..ask(&prompt) };
        world.decide(&request).unwrap();
        let demand = world.scratch.demand(&request, &world.decision, &world.decision.candidates[0]);
        assert_eq!((demand.prefill_tokens, demand.cached_tokens), demanded, "together they are the prompt");
    }
}

#[test]
fn an_idle_worker_wins_when_the_backlog_costs_more_than_the_prefix() {
    let mut world = World::new(2, Some(SCHEME));
    let prompt = tokens(16);
    world.hold(0, &prompt, Tier::Device);
    let session = world.loads.open_session(None, 0).unwrap();
    world.decide(&ask(&prompt)).unwrap();
    assert_eq!(world.order()[0], 1);
    let chosen = world.decision.candidates[0];
    let cold = Scored { terms: CostTerms { cached_tokens: 0.0, ..chosen.terms }, ..chosen };
    let request = ask(&prompt);
    let cold = world.scratch.demand(&request, &world.decision, &cold);
    assert_eq!(world.scratch.demand(&request, &world.decision, &chosen).prefill_tokens, 0);
    assert_eq!(cold.prefill_tokens, 16);
    let cold = Demand { blocks: PromptBlocks::Alone(4), ..cold };
    world.loads.book(session, "a", 0, chosen.index, cold, 0).unwrap();
    world.decide(&ask(&prompt)).unwrap();
    assert_eq!(world.order()[0], 2, "4 blocks of prefix against 4 of backlog and 4 of decode");
}

#[test]
fn active_blocks_of_a_worker_are_not_added_to_its_decode() {
    let mut world = World::new(2, Some(SCHEME));
    let (prompt, longer) = (tokens(16), tokens(26));
    let session = world.loads.open_session(None, 0).unwrap();
    world.decide(&ask(&prompt)).unwrap();
    let chosen = world.decision.candidates[0];
    let request = ask(&prompt);
    let demand = world.scratch.demand(&request, &world.decision, &chosen);
    let booked = world.loads.book(session, "a", 0, chosen.index, demand, 0).unwrap();
    world.loads.prefill_complete(session, BookingRef::Handle(booked.handle), 0, 0);
    let decode = |world: &World| {
        let mut terms: Vec<_> = world.decision.candidates.iter().map(|scored| (scored.worker, scored.terms)).collect();
        terms.sort_by_key(|(worker, _)| *worker != chosen.worker);
        [0, 1].map(|at: usize| (terms[at].1.active_decode_blocks, terms[at].1.additional_decode_blocks))
    };
    world.decide(&ask(&longer)).unwrap();
    assert_eq!(decode(&world), [(4.0, 2.0), (0.0, 6.0)], "the same in the end, wherever it runs");
    world.policy.track_active_blocks = false;
    world.decide(&ask(&longer)).unwrap();
    assert_eq!(decode(&world), [(0.0, 0.0), (0.0, 0.0)]);
}

#[test]
fn a_booking_between_reading_and_choosing_is_noticed() {
    let mut world = World::new(1, Some(SCHEME));
    let prompt = tokens(16);
    let session = world.loads.open_session(None, 0).unwrap();
    world.decide(&ask(&prompt)).unwrap();
    assert!(!world.scratch.chosen_moved(&world.decision, &world.loads));
    let chosen = world.decision.candidates[0];
    let request = ask(&prompt);
    let demand = world.scratch.demand(&request, &world.decision, &chosen);
    world.loads.book(session, "a", 0, chosen.index, demand, 0).unwrap();
    assert!(world.scratch.chosen_moved(&world.decision, &world.loads));
}

#[test]
fn a_recorded_observation_is_judged_to_the_same_bits() {
    let mut world = World::new(5, Some(SCHEME));
    let prompt = tokens(16);
    world.hold(3, &prompt[..8], Tier::Host);
    world.change(|workers| workers[1].state = WorkerState::Draining);
    world.decide(&ask(&prompt)).unwrap();
    let (kept, was) = (world.scratch.observation().clone(), world.decision.clone());
    world.change(|workers| workers.truncate(1));
    world.decide(&ask(&tokens(3))).unwrap();
    judge(&world.policy, &kept, Draws::new(was.seed), &mut world.decision);
    assert_eq!(format!("{:?}", world.decision), format!("{was:?}"));
    assert_eq!(kept.workers.len(), 5, "removed workers are observed too");
    assert_eq!(was.eligible_rows, [0, 2, 3, 4]);
}

#[test]
fn rules_remove_workers_and_name_themselves() {
    let mut world = World::new(4, Some(SCHEME));
    world.change(|workers| workers[1].state = WorkerState::Draining);
    world.change(|workers| workers[2].state = WorkerState::Down);
    let prompt = tokens(4);
    let allow = [Worker::new(4, u32::MAX), Worker::new(3, 0), Worker::new(2, 0)];
    world.decide(&RouteRequest { allow: Some(&allow), ..ask(&prompt) }).unwrap();
    assert_eq!(world.order(), [4]);
    let removed: Vec<_> = world.decision.removed.iter().map(|(rule, worker)| (rule.name(), worker.id.0)).collect();
    assert_eq!(removed, [("not_allowed", 1), ("draining", 2), ("down", 3)]);
    assert!(!world.decision.notes.contains(ReplyNotes::ALL_DOWN));
    world.decide(&RouteRequest { allow: Some(&[Worker::new(3, 0), Worker::new(2, 0)]), ..ask(&prompt) }).unwrap();
    assert_eq!(world.order(), [3], "a worker that is down is better than none; draining is an order");
    assert!(world.decision.notes.contains(ReplyNotes::ALL_DOWN));
    let removed: Vec<_> = world.decision.removed.iter().map(|(rule, worker)| (rule.name(), worker.id.0)).collect();
    assert_eq!(removed, [("not_allowed", 1), ("draining", 2), ("not_allowed", 4)]);
    let view = View {
        fleet: &world.fleet,
        indexes: &world.indexes,
        predictions: &world.predictions,
        loads: &world.loads,
        policy: &world.policy,
        round_robin_counters: &[],
        affinities: &AffinityTable::new(8, 0),
        now_ns: 0,
    };
    overlaps(&view, &ask(&prompt), &mut world.scratch, &mut world.decision).unwrap();
    assert_eq!(world.order(), [1, 2, 3, 4], "overlaps can be asked of every worker");
    let (round_robin_counters, direct) = ([AtomicU64::new(7)], Policy { mode: Mode::Direct, ..world.policy });
    let view = View { round_robin_counters: &round_robin_counters, policy: &direct, ..view };
    overlaps(&view, &ask(&prompt), &mut world.scratch, &mut world.decision).unwrap();
    assert_eq!(world.order(), [1, 2, 3, 4], "without a pin");
    assert_eq!(round_robin_counters[0].load(Ordering::Relaxed), 7, "a question does not advance the counter");
    world.decide(&RouteRequest { allow: Some(&[]), ..ask(&prompt) }).unwrap();
    assert_eq!((world.order().len(), world.decision.eligible, world.decision.ties), (0, 0, 0));
}

#[test]
fn lora_and_salt_separate_equal_tokens() {
    let mut world = World::new(1, Some(SCHEME));
    let prompt = tokens(8);
    world.hold(0, &prompt, Tier::Device);
    for (lora, salt, expected) in [(None, None, 2), (Some("a"), None, 0), (None, Some("t"), 0), (Some(""), Some(""), 2)]
    {
        world.decide(&RouteRequest { lora, salt, ..ask(&prompt) }).unwrap();
        assert_eq!(world.decision.candidates[0].overlap.device, expected, "{lora:?} {salt:?}");
    }
}

#[test]
fn hashes_need_the_scheme_of_the_space() {
    let mut world = World::new(1, Some(SCHEME));
    let prompt = tokens(10);
    world.hold(0, &prompt, Tier::Host);
    let mut locals: Vec<LocalHash> = Vec::new();
    hash::local_hashes(SCHEME, hash::seed(None, None), bytemuck::cast_slice(&prompt), &[], &mut locals);
    let bytes: Vec<u8> = locals.iter().flat_map(|local| local.0.to_le_bytes()).collect();
    let by_hash = |hashes, scheme, token_count| RouteRequest {
        prompt: Prompt::LocalHashes { hashes, scheme, token_count },
        ..ask(&[])
    };
    world.decide(&by_hash(&bytes, SCHEME, 10)).unwrap();
    assert_eq!(world.decision.candidates[0].overlap, TierBlocks { host: 2, ..TierBlocks::default() });
    let other = Scheme { block_size: 16, ..SCHEME };
    assert_eq!(world.decide(&by_hash(&bytes, other, 10)).unwrap_err().kind(), Kind::SchemeMismatch);
    assert_eq!(world.decide(&by_hash(&bytes, SCHEME, 30)).unwrap_err().kind(), Kind::InvalidArgument);
}

#[test]
fn without_a_scheme_load_decides_and_the_reply_notes_it() {
    let mut world = World::new(2, None);
    let prompt = tokens(16);
    let session = world.loads.open_session(None, 0).unwrap();
    world.decide(&ask(&prompt)).unwrap();
    assert_eq!(world.decision.matched, MatchStatus::Unmatchable);
    assert!(world.decision.notes.contains(ReplyNotes::SCHEME_UNKNOWN));
    assert_eq!(world.decision.ties, 2);
    let chosen = world.decision.candidates[0];
    let request = ask(&prompt);
    let demand = world.scratch.demand(&request, &world.decision, &chosen);
    world.loads.book(session, "a", 0, chosen.index, demand, 0).unwrap();
    world.decide(&ask(&prompt)).unwrap();
    assert_ne!(world.order()[0], chosen.worker.id.0);
}

#[test]
fn bookings_predict_the_overlap_of_a_worker_without_events_for_a_while() {
    use crate::predict::{PredictionLimits, Predictor};
    use crate::trust::{TrustLevel, TrustReason};
    const TTL_MS: u64 = 1000;
    let mut world = World::new(2, Some(SCHEME));
    let prompt = tokens(64);
    let no_events = [TrustReason::NoEvents].into_iter().collect();
    for record in &world.fleet.workers {
        record.trust.store(Trust { reasons: no_events, ..Trust::default() });
    }
    world.decide(&ask(&prompt)).unwrap();
    assert_eq!(world.decision.ties, 2, "nothing is known of either");
    assert!(world.decision.candidates.iter().all(|scored| scored.trust.reasons == no_events));

    let limits = PredictionLimits { ttl_ms: TTL_MS, worker_blocks_max: 100, memory_bytes_max: 16 << 20, secret: 1 };
    let mut predictor = Predictor::new(&[Some(limits)]);
    predictor.follow(&world.fleet);
    world.predictions = predictor.readers();
    let book = |world: &World, predictor: &mut Predictor, now_ms| {
        let chosen = world.decision.candidates[0];
        let locals = world.scratch.locals(&ask(&prompt), &world.decision).to_vec();
        let (index, worker) = (chosen.index, chosen.worker);
        predictor.book(&crate::predict::Booked { space: SpaceId(0), index, worker, now_ms, locals });
    };
    world.decide(&ask(&prompt)).unwrap();
    let first = world.decision.candidates[0].worker;
    book(&world, &mut predictor, 10);
    for _ in 0..16 {
        world.decide(&ask(&prompt)).unwrap();
        let chosen = world.decision.candidates[0];
        assert_eq!((chosen.worker, chosen.overlap.device, world.decision.ties), (first, 16, 1));
        assert_eq!(chosen.trust.level, TrustLevel::Predicted);
        assert_eq!(chosen.trust.reasons, [TrustReason::OwnDecisions].into_iter().collect());
        assert_eq!(world.decision.candidates[1].overlap.device, 0);
    }
    predictor.pass_time(10 + TTL_MS);
    world.decide(&ask(&prompt)).unwrap();
    assert_eq!((world.decision.candidates[0].overlap.device, world.decision.ties), (0, 2));

    // An observed overlap never mixes with a prediction from before the worker published events.
    book(&world, &mut predictor, 2000);
    let index = world.decision.candidates[0].index.0 as usize;
    let events = crate::fleet::EventSource {
        endpoint: "tcp://127.0.0.1:1".parse().expect("an endpoint"),
        replay: None,
        topic: String::new(),
        snapshots: None,
    };
    world.decide(&ask(&prompt)).unwrap();
    assert_eq!(world.decision.candidates[0].overlap.device, 16);
    world.change(|workers| workers[index].events = Some(events));
    world.fleet.workers[index].trust.store(Trust { level: TrustLevel::Exact, ..Trust::default() });
    world.hold(index, &prompt[..8], Tier::Device);
    world.decide(&ask(&prompt)).unwrap();
    let facts = world.decision.candidates.iter().find(|scored| scored.index.0 as usize == index).unwrap();
    assert_eq!((facts.overlap.device, facts.trust.level), (2, TrustLevel::Exact));
}

#[test]
fn invalid_requests_are_refused() {
    let mut world = World::new(1, Some(SCHEME));
    let prompt = tokens(8);
    let elsewhere = RouteRequest { space: SpaceId(9), ..ask(&prompt) };
    assert_eq!(world.decide(&elsewhere).unwrap_err().kind(), Kind::UnknownSpace);
    let media = RouteRequest { media: &[(2, 1)], ..ask(&prompt) };
    assert_eq!(world.decide(&media).unwrap_err().kind(), Kind::InvalidArgument);
    let huge = vec![0_u32; crate::limits::PROMPT_TOKENS_MAX + 1];
    assert_eq!(world.decide(&ask(&huge)).unwrap_err().kind(), Kind::Oversized);
}

#[test]
fn an_overlap_is_not_exact_if_the_index_lost_blocks_meanwhile() {
    use crate::trust::{TrustLevel, TrustReason, TrustReasons};
    use std::sync::atomic::{AtomicBool, Ordering};
    const DECISIONS: usize = 200;
    let mut world = World::new(1, Some(SCHEME));
    // A long prompt: hashing it gives the writer time between the reading of trust and of the index.
    let prompt = tokens(1 << 14);
    let held = &prompt[..64];
    world.hold(0, held, Tier::Device);
    let trust = |level, reasons, since_unix_ms| Trust { level, reasons, since_unix_ms, ..Trust::default() };
    let cell = Arc::clone(&world.fleet.workers[0].trust);
    cell.store(trust(TrustLevel::Exact, TrustReasons::NONE, 0));
    let World { fleet, writer, indexes, predictions, loads, policy, draw, scratch, decision } = &mut world;
    let slot = fleet.workers[0].slot;
    let (mut locals, seed, ended) = (Vec::new(), hash::seed(None, None), AtomicBool::new(false));
    hash::local_hashes(SCHEME, seed, bytemuck::cast_slice(held), &[], &mut locals);
    let hashes: Vec<_> = (1..=locals.len() as u64).map(EngineHash).collect();
    let blocks =
        StoreBlocks { parent: None, hashes: &hashes, locals: &locals, tier: Tier::Device, group: GroupId(0), seed };
    let mut wrong = 0;
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut now = 0;
            while !ended.load(Ordering::Relaxed) {
                now += 2;
                let gap = [TrustReason::Gap].into_iter().collect();
                cell.store(trust(TrustLevel::LowerBound, gap, now));
                writer.clear(slot, None);
                writer.publish();
                writer.store(slot, &blocks);
                writer.publish();
                cell.store(trust(TrustLevel::Exact, TrustReasons::NONE, now + 1));
                writer.sweep(usize::MAX);
            }
        });
        for _ in 0..DECISIONS {
            let view = View {
                fleet,
                indexes,
                predictions,
                loads,
                policy,
                round_robin_counters: &[],
                affinities: &AffinityTable::new(8, 0),
                now_ns: 0,
            };
            decide(&view, &ask(&prompt), scratch, Draws::new(*draw), decision).unwrap();
            let worker = &decision.candidates[0];
            if worker.trust.level == TrustLevel::Exact {
                wrong += usize::from(worker.overlap.device as usize != hashes.len());
            }
        }
        ended.store(true, Ordering::Relaxed);
    });
    assert_eq!(wrong, 0, "emptied, and said to be exact");
    world.decide(&ask(&prompt)).unwrap();
    let worker = &world.decision.candidates[0];
    assert_eq!((worker.trust.level, worker.overlap.device), (TrustLevel::Exact, 16));
}
