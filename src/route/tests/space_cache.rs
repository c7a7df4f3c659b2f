//! The space cache: a cached decision equals one that reads everything anew, and contended look-ups lower trust.

use std::collections::BTreeMap;

use rand::{RngExt, SeedableRng};
use rand_xoshiro::Xoshiro256PlusPlus;

use super::*;
use crate::engine_law::PrefillLaw;
use crate::ids::EventSeq;
use crate::load::{Demand, Load, PrefillModel, PrefillWork, RecentWork, Reporter, SessionId};
use crate::predict::{self, PredictionLimits, Predictor};
use crate::protocol::{BookingHandle, DeviceClass, EngineLoad};
use crate::route::judge::{judge_at, levels};
use crate::route::space_cache::SpaceCache;
use crate::trust::{TrustLevel, TrustReason};

const WORKERS: u32 = 9;
const STEP_NS: u64 = 100_000_000;

fn locals(prompt: &[u32]) -> Vec<LocalHash> {
    locals_of(prompt, None)
}

fn locals_of(prompt: &[u32], lora: Option<&str>) -> Vec<LocalHash> {
    let mut locals = Vec::new();
    hash::local_hashes(SCHEME, hash::seed(lora, None), bytemuck::cast_slice(prompt), &[], &mut locals);
    locals
}

/// Gives a worker's record random values of every fact that a decision reads from it.
fn randomize(record: &mut WorkerRecord, rng: &mut Xoshiro256PlusPlus) {
    record.device_class = [DeviceClass::Gpu, DeviceClass::Cpu][rng.random_range(0..2_usize)];
    record.weight = f64::from(rng.random_range(1..4));
    record.capacity_blocks = [0, 10, 40][rng.random_range(0..3_usize)];
    record.batched_tokens_max = [10, 50][rng.random_range(0..2_usize)];
    let some = |names: &[&str], rng: &mut Xoshiro256PlusPlus| {
        names.iter().filter(|_| rng.random::<bool>()).map(|name| (*name).to_string()).collect()
    };
    record.taints = some(&["fast", "spot"], rng);
    record.loras = some(&["x"], rng);
}

/// The load that a prompt adds which no worker holds.
fn demand_of(space: SpaceId, prefill_tokens: usize, blocks: PromptBlocks<'_>) -> Demand<'_> {
    Demand {
        space,
        prefill_tokens: prefill_tokens as u64,
        cached_tokens: 0,
        blocks,
        divergence: None,
        block_size: SCHEME.block_size,
        expected_output_tokens: 0,
        is_recorded: false,
        is_traced: false,
    }
}

/// A world in which random changes happen between two decisions.
struct RandomWorld {
    world: World,
    predictor: Option<Predictor>,
    rng: Xoshiro256PlusPlus,
    session: SessionId,
    live: Vec<BookingHandle>,
    affinities: AffinityTable,
    names: u64,
    now_ns: u64,
}

impl RandomWorld {
    fn new(seed: u64, prefill: PrefillModel) -> Self {
        let mut world = World::new(WORKERS, Some(SCHEME));
        world.loads = Loads::new(WORKERS as usize, LoadsConfig { prefill, ..LoadsConfig::default() });
        let session = world.loads.open_session(None, 0).unwrap();
        let mut rng = Xoshiro256PlusPlus::seed_from_u64(seed);
        world.change(|workers| workers.iter_mut().for_each(|record| randomize(record, &mut rng)));
        let affinities = AffinityTable::new(8, 0);
        Self { world, predictor: None, rng, session, live: Vec::new(), affinities, names: 0, now_ns: 0 }
    }

    /// Predicts what workers hold, except every third one, which publishes events.
    fn predicting(mut self) -> Self {
        let limits = PredictionLimits { ttl_ms: 20_000, worker_blocks_max: 30, memory_bytes_max: 16 << 20, secret: 1 };
        let predictor = Predictor::new(&[Some(limits)]);
        self.world.predictions = predictor.readers();
        self.predictor = Some(predictor);
        let events = crate::fleet::EventSource {
            endpoint: "tcp://127.0.0.1:1".parse().expect("an endpoint"),
            replay: None,
            topic: String::new(),
            snapshots: None,
        };
        self.world.change(|workers| workers.iter_mut().step_by(3).for_each(|of| of.events = Some(events.clone())));
        self
    }

    fn one_in(&mut self, many: u32) -> bool {
        self.rng.random_range(0..many) == 0
    }

    fn prompt(&mut self) -> Vec<u32> {
        let (conversation, length) = (self.rng.random_range(0..3_u32), self.rng.random_range(1..40));
        (0..length).map(|token| token * 31 + conversation).collect()
    }

    fn book(&mut self) {
        let (place, prompt) = (self.rng.random_range(0..WORKERS), self.prompt());
        let (index, locals) = (self.world.fleet.workers[place as usize].index, locals(&prompt));
        let demand = demand_of(SpaceId(0), prompt.len(), PromptBlocks::Shared(&locals));
        self.names += 1;
        let name = format!("r{}", self.names);
        let booked = self.world.loads.book(self.session, &name, 0, index, demand, self.now_ns);
        self.live.push(booked.unwrap().handle);
    }

    fn free(&mut self) {
        if self.live.is_empty() {
            return;
        }
        let at = self.rng.random_range(0..self.live.len());
        let booking = BookingRef::Handle(self.live.swap_remove(at));
        if self.one_in(2) {
            self.world.loads.prefill_complete(self.session, booking, 0, self.now_ns);
        }
        self.world.loads.free(self.session, booking, self.now_ns);
    }

    /// Another worker takes the place of one that leaves, whose bookings may end later.
    fn replace(&mut self, place: u32) {
        let all_ended = self.one_in(2);
        let World { fleet, writer, loads, .. } = &mut self.world;
        let left = &fleet.workers[place as usize];
        loads.leave(left.index);
        if all_ended {
            loads.end_of(left.index, 0, usize::MAX);
        }
        let index = WorkerIndex::at(place as u16, left.index.generation() + 1);
        loads.admit(index);
        writer.remove_worker(left.slot);
        writer.publish();
        writer.sweep(usize::MAX);
        let (slot, trust) = (writer.add_worker().unwrap(), Arc::new(TrustCell::new(Trust::default())));
        // Requests name one or the other.
        let worker = Worker::new(u64::from(place) + 1, index.generation() % 2);
        self.world.change(|workers| {
            let record = &mut workers[place as usize];
            *record = WorkerRecord { index, worker, slot, trust, ..record.clone() };
        });
    }

    /// The predictor follows the fleet and takes a booking.
    fn predict(&mut self, place: u32) {
        let prompt = self.prompt();
        let Some(predictor) = &mut self.predictor else { return };
        predictor.follow(&self.world.fleet);
        let (record, now_ms) = (&self.world.fleet.workers[place as usize], self.now_ns / 1_000_000);
        let (index, worker) = (record.index, record.worker);
        predictor.book(&predict::Booked { space: SpaceId(0), index, worker, now_ms, locals: locals(&prompt) });
        predictor.pass_time(now_ms);
    }

    fn pass(&mut self) {
        let place = self.rng.random_range(0..WORKERS);
        let index = self.world.fleet.workers[place as usize].index;
        match self.rng.random_range(0..28) {
            0..6 => self.book(),
            6..11 => self.free(),
            11 => self.now_ns += STEP_NS * self.rng.random_range(0..40),
            12 => {
                let load = EngineLoad { prefill_tokens: 5, decode_blocks: self.names, ..EngineLoad::default() };
                self.world.loads.report_load(index, load, self.now_ns);
            }
            13 => {
                let reporter = Reporter { session: self.session, space: SpaceId(0), workers: WORKERS as usize };
                self.world.loads.report_failure(reporter, index, self.now_ns).unwrap();
            }
            14 => {
                let level = TrustLevel::from_u8(self.rng.random_range(0..5)).unwrap();
                let reasons = [TrustReason::Gap].into_iter().collect();
                let trust = Trust { level, reasons, since_unix_ms: self.names, ..Trust::default() };
                self.world.fleet.workers[place as usize].trust.store(trust);
            }
            15 => {
                let trust = &self.world.fleet.workers[place as usize].trust;
                trust.store(Trust { as_of_seq: Some(crate::ids::EventSeq(self.names)), ..trust.load() });
            }
            16..19 => {
                let prompt = self.prompt();
                let tiers = [Tier::Device, Tier::Host, Tier::Disk, Tier::External];
                let tier = if self.one_in(40) { tiers[self.rng.random_range(1..4_usize)] } else { Tier::Device };
                self.world.hold(place as usize, &prompt, tier);
            }
            19 => {
                let states = [WorkerState::Ready, WorkerState::Ready, WorkerState::Draining, WorkerState::Down];
                let state = states[self.rng.random_range(0..4_usize)];
                self.world.change(|workers| workers[place as usize].state = state);
            }
            20 => {
                let Self { world, rng, .. } = self;
                world.change(|workers| randomize(&mut workers[place as usize], rng));
            }
            // More changes than the change log holds.
            21 if self.one_in(20) => (0..700).for_each(|_| {
                self.book();
                self.free();
            }),
            22 => self.replace(place),
            23..25 => self.predict(place),
            25 => {
                let exact = Trust { level: TrustLevel::Exact, ..Trust::default() };
                self.world.fleet.workers.iter().for_each(|record| record.trust.store(exact));
            }
            26 => {
                let (index, name) = (self.world.fleet.workers[place as usize].worker, self.rng.random_range(0..3_u32));
                self.affinities.bind(SpaceId(0), &name.to_string(), (index, 0), seconds(self.now_ns), 100);
            }
            _ => {}
        }
    }

    fn policy(&mut self) -> Policy {
        let any = |rng: &mut Xoshiro256PlusPlus| rng.random::<bool>();
        let mut policy = Policy::default();
        if self.one_in(2) {
            return policy;
        }
        let modes: Vec<_> =
            Mode::ALL.into_iter().filter(|mode| !matches!(mode, Mode::Direct | Mode::Approximate)).collect();
        policy.mode = if self.one_in(2) { Mode::Kv } else { modes[self.rng.random_range(0..modes.len())] };
        policy.device_credit = f64::from(self.rng.random_range(0..5)) / 2.0;
        policy.active_request_weight = f64::from(self.rng.random_range(0..2));
        (policy.track_prefill_tokens, policy.assume_kv_reuse) = (any(&mut self.rng), any(&mut self.rng));
        policy.capability = self.one_in(6);
        policy.credit_decay = if self.one_in(6) { 0.3 } else { 0.0 };
        policy.temperature = if self.one_in(6) { 0.3 } else { 0.0 };
        policy.trust_min = if self.one_in(6) { TrustLevel::LowerBound } else { TrustLevel::None };
        policy.credit_trust_min = if self.one_in(6) { TrustLevel::LowerBound } else { TrustLevel::None };
        policy.track_active_blocks = !self.one_in(6);
        policy.shared_multiplier = if self.one_in(2) { 0.5 } else { 0.0 };
        policy.busy.prefill_tokens = self.one_in(6).then_some(40);
        policy.busy.decode_blocks_share = self.one_in(6).then_some(0.5);
        policy.busy.prefill_steps = self.one_in(6).then_some(1.0);
        policy.affinity.mode = AffinityMode::ALL[self.rng.random_range(0..3_usize)];
        policy
    }

    /// Decides with the cache and without one; returns both decisions and observations.
    fn decide(&mut self) -> [(String, Observation); 2] {
        self.world.policy = self.policy();
        let prompt = self.prompt();
        let allow = [Worker::new(1, 0), Worker::new(3, 0), Worker::new(4, u32::MAX)];
        let session = self.rng.random_range(0..3_u32).to_string();
        let lora = self.one_in(9).then_some("x");
        let request = RouteRequest {
            lora,
            required_taints: if self.one_in(9) { Names::Listed(&["fast"]) } else { Names::NONE },
            preferred_taints: Preferences {
                names: if self.one_in(9) { Names::Listed(&["fast", "spot"]) } else { Names::NONE },
                weights: &[0.5, -1.0],
            },
            affinity_session: self.one_in(3).then_some(&session),
            allow: self.one_in(9).then_some(&allow),
            pin: self.one_in(9).then_some(allow[1]),
            shared_hits: if self.one_in(9) { &[(1, 3)] } else { &[] },
            candidates_max: self.rng.random_range(1..12),
            ..ask(&prompt)
        };
        // The time of a decision may lie before that of the previous one.
        let ago_ns = if self.one_in(8) { STEP_NS * self.rng.random_range(0..40) } else { 0 };
        let World { fleet, indexes, predictions, loads, policy, scratch, .. } = &mut self.world;
        let (affinities, now_ns) = (&self.affinities, self.now_ns.saturating_sub(ago_ns));
        let mut active = BTreeMap::new();
        loads.active(SpaceId(0), &locals_of(&prompt, lora), &mut active);
        let view = View { fleet, indexes, predictions, loads, policy, round_robin_counters: &[], affinities, now_ns };
        let draws = Draws::new(self.names);
        let found = [&mut *scratch, &mut Scratch::default()].map(|scratch| {
            let mut decision = Decision::default();
            decide(&view, &request, scratch, draws, &mut decision).unwrap();
            let observation = scratch.observation().clone();
            for facts in observation.workers.iter() {
                let expected = active.get(&facts.index).copied().unwrap_or(0);
                assert_eq!(facts.active_depth_blocks, expected, "what runs on it, and on no other");
            }
            let mut again = Decision::default();
            judge(policy, &observation, draws, &mut again);
            let decided = format!("{decision:?}");
            assert_eq!(decided, format!("{again:?}"), "judged once more");
            (decided, observation)
        });
        // Of bookings that come meanwhile, a second look sees as much as a new decision.
        for _ in 0..self.rng.random_range(0..3) {
            let index = fleet.workers[self.rng.random_range(0..WORKERS) as usize].index;
            let run = locals_of(&prompt[..self.rng.random_range(0..=prompt.len())], lora);
            let demand = demand_of(SpaceId(0), prompt.len(), PromptBlocks::Shared(&run));
            self.names += 1;
            let booked = loads.book(self.session, &format!("r{}", self.names), 0, index, demand, now_ns);
            self.live.push(booked.unwrap().handle);
        }
        let [mut again, mut anew] = [Decision::default(), Decision::default()];
        propose_again(&view, &request, scratch, draws, &mut again).unwrap();
        let mut fresh = Scratch::default();
        propose(&view, &request, &mut fresh, draws, &mut anew).unwrap();
        assert_eq!(scratch.observation(), fresh.observation(), "observed again");
        assert_eq!(format!("{again:?}"), format!("{anew:?}"), "decided again");
        found
    }
}

#[test]
fn a_cached_decision_equals_a_fresh_one() {
    let fixed = PrefillModel::Fixed { base_ns: STEP_NS, token_ns: STEP_NS / 10, cached_token_ns: 0 };
    let worlds = [(1, PrefillModel::Off), (2, fixed), (3, PrefillModel::Learnt)];
    let worlds = worlds.map(|(seed, prefill)| (seed, RandomWorld::new(seed, prefill)));
    let predicted = (4, RandomWorld::new(4, PrefillModel::Off).predicting());
    for (seed, mut random) in worlds.into_iter().chain([predicted]) {
        for step in 0..1500 {
            for _ in 0..random.rng.random_range(0..4) {
                random.pass();
            }
            let [kept, fresh] = random.decide();
            assert_eq!(kept.1, fresh.1, "observed at step {step} of seed {seed}");
            assert_eq!(kept.0, fresh.0, "decided at step {step} of seed {seed}");
        }
    }
}

#[test]
fn concurrent_changes_are_visible_once_they_stop() {
    let mut random = RandomWorld::new(5, PrefillModel::Off);
    let (other, prompt) = (random.world.loads.open_session(None, 0).unwrap(), tokens(16));
    let World { fleet, indexes, predictions, loads, policy, scratch, .. } = &mut random.world;
    let (loads, trust, affinities) = (&*loads, &fleet.workers[2].trust, &AffinityTable::new(8, 0));
    let view = View { fleet, indexes, predictions, loads, policy, round_robin_counters: &[], affinities, now_ns: 0 };
    let decide_once = |scratch: &mut Scratch| {
        let mut decision = Decision::default();
        decide(&view, &ask(&prompt), scratch, Draws::new(1), &mut decision).unwrap();
        (format!("{decision:?}"), scratch.observation().clone())
    };
    for _ in 0..40 {
        std::thread::scope(|scope| {
            let changing = scope.spawn(|| {
                for number in 0..200 {
                    let demand = demand_of(SpaceId(0), 7, PromptBlocks::Alone(3));
                    let (name, worker) = (format!("r{number}"), WorkerIndex(number % WORKERS));
                    let booked = loads.book(other, &name, 0, worker, demand, 0).unwrap();
                    if number % 7 != 0 {
                        loads.free(other, BookingRef::Handle(booked.handle), 0);
                    }
                    let level = TrustLevel::from_u8((number % 5) as u8).unwrap();
                    trust.store(Trust { level, since_unix_ms: u64::from(number), ..Trust::default() });
                }
            });
            while !changing.is_finished() {
                decide_once(scratch);
            }
        });
        assert_eq!(decide_once(scratch), decide_once(&mut Scratch::default()));
        (0..200).for_each(|number| {
            loads.free(other, BookingRef::Request { request_id: &format!("r{number}"), attempt: 0 }, 0);
        });
    }
}

#[test]
fn spaces_have_separate_caches() {
    let mut world = World::new(4, Some(SCHEME));
    let second = Space { id: SpaceId(1), ..world.fleet.spaces[0].clone() };
    world.fleet.spaces.push(second);
    world.indexes.push(world.indexes[0].clone());
    world.change(|workers| workers[2..].iter_mut().for_each(|record| record.space = SpaceId(1)));
    let session = world.loads.open_session(None, 0).unwrap();
    let prompt = tokens(64);
    for round in 1..5_u32 {
        // Each round adds blocks, bookings and trust; the two spaces get different numbers.
        for (index, held) in [(1, round), (3, 2 * round)] {
            let trust = &world.fleet.workers[index].trust;
            trust.store(Trust { since_unix_ms: u64::from(held), level: TrustLevel::Exact, ..Trust::default() });
            world.hold(index, &prompt[..held as usize * 4], Tier::Device);
        }
        for (space, place, blocks) in [(0, 0, round), (1, 2, 3 * round)] {
            let run = locals(&prompt[..blocks as usize * 4]);
            let demand = demand_of(SpaceId(space), 5, PromptBlocks::Shared(&run));
            world.loads.book(session, &format!("r{round}.{space}"), 0, WorkerIndex(place), demand, 0).unwrap();
        }
        for (space, ids, held, run) in [(0, [1, 2], round, round), (1, [3, 4], 2 * round, 3 * round)] {
            world.decide(&RouteRequest { space: SpaceId(space), ..ask(&prompt) }).unwrap();
            let facts = |of: WorkerFacts| {
                let (id, since) = (of.worker.id.0, of.trust.since_unix_ms);
                (id, of.overlap.device, since, of.active_depth_blocks, of.load.requests)
            };
            let found: Vec<_> = world.scratch.observation().workers.iter().map(facts).collect();
            let [booked, holder] = ids;
            let expected = [(booked, 0, 0, run, u64::from(round)), (holder, held, u64::from(held), 0, 0)];
            assert_eq!(found, expected, "round {round}, space {space}");
            assert_eq!(world.order(), [holder, booked]);
        }
    }
}

const BEFORE: EventSeq = EventSeq(7);

fn trust(level: TrustLevel, reasons: &[TrustReason], since_unix_ms: u64) -> Trust {
    let reasons = reasons.iter().copied().collect();
    Trust { level, reasons, since_unix_ms, as_of_seq: Some(BEFORE), as_of_unix_ms: 70 }
}

/// A space whose workers have this trust.
fn believed(trusts: &[Trust]) -> World {
    let world = World::new(trusts.len() as u32, Some(SCHEME));
    world.fleet.workers.iter().zip(trusts).for_each(|(record, trust)| record.trust.store(*trust));
    world
}

/// Refreshes the cache, as a decision does first.
fn refresh(cache: &mut SpaceCache, world: &World) {
    let World { fleet, indexes, predictions, loads, policy, .. } = world;
    let affinities = &AffinityTable::new(8, 0);
    cache.refresh(
        &View { fleet, indexes, predictions, loads, policy, round_robin_counters: &[], affinities, now_ns: 0 },
        SpaceId(0),
    );
}

fn found(cache: &SpaceCache) -> Vec<Trust> {
    cache.observation().workers.iter().map(|facts| facts.trust).collect()
}

/// Whether the trust rule keeps all workers, and all overlaps are credited, at this level.
fn passes(cache: &SpaceCache, level: TrustLevel) -> bool {
    let workers = &cache.observation().workers;
    let stay = workers.admits_all(&Policy { trust_min: level, ..Policy::default() });
    assert_eq!(stay, workers.plain(&Policy { credit_trust_min: level, ..Policy::default() }).is_some());
    stay
}

#[test]
fn trust_that_falls_during_a_look_up_counts_and_a_rise_does_not() {
    let (exact, low) = (trust(TrustLevel::Exact, &[], 1), trust(TrustLevel::LowerBound, &[TrustReason::Gap], 1));
    let (world, mut cache) = (believed(&[exact, exact, low]), SpaceCache::default());
    refresh(&mut cache, &world);
    assert!(passes(&cache, TrustLevel::LowerBound) && !passes(&cache, TrustLevel::Exact));
    assert!(!cache.mark_contended(false), "nothing changed");
    assert_eq!(found(&cache), [exact, exact, low]);

    let later = |trust| Trust { since_unix_ms: 2, as_of_seq: Some(EventSeq(8)), as_of_unix_ms: 80, ..trust };
    let fallen = trust(TrustLevel::Unproven, &[TrustReason::Recovering], 1);
    world.fleet.workers[1].trust.store(later(fallen));
    world.fleet.workers[2].trust.store(later(exact));
    assert!(!cache.mark_contended(false), "the lower of two holds for all states between them: none are mixed");
    let met = Trust { since_unix_ms: 2, ..fallen };
    assert_eq!(found(&cache), [exact, met, low], "and as of what was known before");
    assert!(!passes(&cache, TrustLevel::LowerBound));
    refresh(&mut cache, &world);
    assert_eq!(found(&cache), [exact, later(fallen), later(exact)]);
    assert!(passes(&cache, TrustLevel::Unproven) && !passes(&cache, TrustLevel::LowerBound));
}

#[test]
fn a_fall_and_a_rise_during_a_look_up_are_noticed() {
    let exact = trust(TrustLevel::Exact, &[], 1);
    let (world, mut cache) = (believed(&[exact, exact]), SpaceCache::default());
    refresh(&mut cache, &world);
    let again = Trust { since_unix_ms: 3, ..exact };
    world.fleet.workers[1].trust.store(trust(TrustLevel::LowerBound, &[TrustReason::Gap], 2));
    world.fleet.workers[1].trust.store(again);
    assert!(cache.mark_contended(false));
    let contended = trust(TrustLevel::Unproven, &[TrustReason::ReadContended], 3);
    assert_eq!(found(&cache), [exact, contended]);
    assert!(!passes(&cache, TrustLevel::LowerBound));
    refresh(&mut cache, &world);
    assert_eq!(found(&cache), [exact, again]);
    assert!(passes(&cache, TrustLevel::Exact) && !cache.mark_contended(false));
}

#[test]
fn a_contended_look_up_lowers_all_trust_for_one_decision() {
    let none = trust(TrustLevel::None, &[TrustReason::NoEvents], 1);
    for lowest in [trust(TrustLevel::Exact, &[], 1), none] {
        let trusts = [trust(TrustLevel::Exact, &[], 1), trust(TrustLevel::LowerBound, &[TrustReason::Gap], 1), lowest];
        let (world, mut cache) = (believed(&trusts), SpaceCache::default());
        refresh(&mut cache, &world);
        let passed = passes(&cache, TrustLevel::LowerBound);
        assert_eq!(passed, lowest.level >= TrustLevel::LowerBound);
        assert!(cache.mark_contended(true));
        let contended = trusts.map(|trust| {
            let mut reasons = trust.reasons;
            reasons.insert(TrustReason::ReadContended);
            Trust { level: trust.level.min(TrustLevel::Unproven), reasons, ..trust }
        });
        assert_eq!(found(&cache), contended);
        assert!(!passes(&cache, TrustLevel::LowerBound));
        refresh(&mut cache, &world);
        assert_eq!(found(&cache), trusts, "nothing of it is cached");
        assert_eq!(passes(&cache, TrustLevel::LowerBound), passed);
    }
}

/// Draws random numbers.
struct Dice<'a>(&'a mut Xoshiro256PlusPlus);

impl Dice<'_> {
    /// From 0 to `most`.
    fn up_to(&mut self, most: u32) -> u32 {
        self.0.random_range(0..=most)
    }

    /// From 0 to `most`; 0 unless `varies`.
    fn some(&mut self, most: u32, varies: bool) -> u32 {
        if varies { self.up_to(most) } else { 0 }
    }

    /// `usual`, or now and then the other if it `varies`.
    fn flag(&mut self, usual: bool, varies: bool) -> bool {
        usual != (varies && self.up_to(4) == 0)
    }
}

/// Random values of every fact. Constraints, lower tiers, shared blocks, and what rules go by, have their usual values
/// unless `varied` says so.
fn random_facts(rng: &mut Xoshiro256PlusPlus, place: u16, varied: [bool; 4]) -> WorkerFacts {
    let [constraints, lower_tiers, shared, states] = varied;
    let mut dice = Dice(rng);
    let all_states = [WorkerState::Ready, WorkerState::Joining, WorkerState::Draining, WorkerState::Down];
    let engine = dice.flag(false, true).then(|| EngineLoad {
        prefill_tokens: u64::from(dice.up_to(90)),
        decode_blocks: u64::from(dice.up_to(9)),
        running: dice.up_to(9),
        waiting: dice.up_to(9),
        kv_usage_millionths: dice.up_to(1_000_000),
    });
    // Without `..`: a new fact has to be given random values here.
    WorkerFacts {
        index: WorkerIndex::at(place, dice.up_to(9)),
        worker: Worker::new(u64::from(place / 2), u32::from(place % 2)),
        overlap: TierBlocks {
            device: dice.up_to(6),
            host: dice.some(3, lower_tiers),
            disk: dice.some(2, lower_tiers),
            external: dice.some(2, lower_tiers),
        },
        active_depth_blocks: dice.up_to(6),
        shared_blocks: dice.some(3, shared),
        load: Load {
            prefill_tokens: u64::from(dice.up_to(90)),
            decode_blocks: u64::from(dice.up_to(9)),
            requests: u64::from(dice.up_to(4)),
            work: PrefillWork {
                queued_ns: u64::from(dice.up_to(900)),
                running_ns: u64::from(dice.up_to(90)),
                since_ns: u64::from(dice.up_to(99)),
            },
            law: PrefillLaw::default().slowed(f64::from(dice.up_to(9))),
            recent: RecentWork {
                prefill_share: f32::from(dice.up_to(9) as u8) / 7.0,
                at_ms: dice.up_to(99_999),
                decode_s: f32::from(dice.up_to(20) as u8) / 3.0,
                decodes: dice.up_to(3),
            },
            back_off_until_ns: u64::from(dice.up_to(99)),
            engine,
            version: u64::from(dice.up_to(99)),
        },
        trust: Trust {
            level: TrustLevel::from_u8(if states { dice.up_to(4) as u8 } else { 4 }).unwrap(),
            reasons: dice.flag(false, true).then_some(TrustReason::Gap).into_iter().collect(),
            since_unix_ms: u64::from(dice.up_to(99)),
            as_of_seq: Some(EventSeq(u64::from(dice.up_to(99)))).filter(|seq| seq.0 > 9),
            as_of_unix_ms: u64::from(dice.up_to(99)),
        },
        state: all_states[dice.up_to(if states { 3 } else { 1 }) as usize],
        device_class: if dice.flag(true, true) { DeviceClass::Gpu } else { DeviceClass::Cpu },
        weight: f64::from(1 + dice.up_to(3)),
        capacity_blocks: u64::from(dice.up_to(20)),
        batched_tokens_max: u64::from(dice.up_to(60)),
        allowed: dice.flag(true, constraints),
        backing_off: dice.flag(false, states),
        is_pinned: dice.flag(true, constraints),
        has_adapter: dice.flag(false, constraints),
        has_required_taints: dice.flag(true, constraints),
        taint_weight: f64::from(dice.some(4, constraints)),
    }
}

#[test]
fn columns_return_every_fact_that_was_written() {
    let mut rng = Xoshiro256PlusPlus::seed_from_u64(6);
    for round in 0..200 {
        let varied = std::array::from_fn(|_| rng.random::<bool>());
        let mut rows: Vec<_> = (0..rng.random_range(0..20)).map(|at| random_facts(&mut rng, at, varied)).collect();
        let mut columns: WorkerColumns = rows.iter().copied().collect();
        for _ in 0..rng.random_range(0..10) {
            let Some(row) = rows.len().checked_sub(1).map(|last| rng.random_range(0..=last)) else { break };
            let varied = [rng.random::<bool>(); 4];
            rows[row] = random_facts(&mut rng, row as u16, varied);
            columns.set(row, &rows[row]);
        }
        assert_eq!(columns.iter().collect::<Vec<_>>(), rows, "round {round}");
        let mut copy: WorkerColumns = (0..3).map(|at| random_facts(&mut rng, at, [true; 4])).collect();
        copy.copy_from(&columns);
        assert_eq!(copy, columns);
        columns.fill_sparse();
        assert_eq!(copy, columns, "an empty sparse column stands for its defaults");
    }
}

#[test]
fn columns_and_rows_decide_to_the_same_bits() {
    let mut random = RandomWorld::new(7, PrefillModel::Off);
    let mut plain = 0;
    for seed in 0..6000 {
        let varied = std::array::from_fn(|_| random.one_in(4));
        let count = random.rng.random_range(0..40);
        let workers = (0..count).map(|at| random_facts(&mut random.rng, at, varied)).collect();
        let request = RequestFacts {
            prompt_tokens: random.rng.random_range(0..120),
            block_size: [16, 24][random.rng.random_range(0..2_usize)],
            whole_blocks: random.rng.random_range(0..8),
            role: [PoolRole::Both, PoolRole::Prefill, PoolRole::Decode][random.rng.random_range(0..3_usize)],
            candidates_max: random.rng.random_range(1..12),
            pin: random.one_in(9).then_some(Worker::new(1, 0)),
            prefers_taints: random.one_in(4),
            shared_blocks: random.rng.random_range(0..4),
            round_robin_counter: random.rng.random_range(0..50),
            session: if random.one_in(3) { AffinitySession::Bound(Worker::new(2, 1)) } else { AffinitySession::None },
            now_ns: random.rng.random_range(0..200_000_000_000),
            ..RequestFacts::default()
        };
        let mut observation = Observation { request, workers, ..Observation::default() };
        let (policy, draws) = (random.policy(), Draws::new(seed));
        plain += usize::from(observation.workers.plain(&policy).is_some());
        let [mut at_once, mut by_rows] = [Decision::default(), Decision::default()];
        judge(&policy, &observation, draws, &mut at_once);
        let bits = |costs: &[f64]| costs.iter().map(|cost| cost.to_bits()).collect::<Vec<_>>();
        for level in levels() {
            let mut again = Decision::default();
            judge_at(level, &policy, &observation, draws, &mut again);
            assert_eq!(format!("{at_once:?}"), format!("{again:?}"), "seed {seed}, {level:?}");
            assert_eq!(bits(&at_once.costs), bits(&again.costs), "seed {seed}, {level:?}");
        }
        observation.workers.fill_sparse();
        assert!(observation.workers.is_empty() || observation.workers.plain(&policy).is_none());
        judge(&policy, &observation, draws, &mut by_rows);
        assert_eq!(format!("{at_once:?}"), format!("{by_rows:?}"), "seed {seed}");
    }
    assert!((1000..5000).contains(&plain), "both ways are taken: {plain}");
}
