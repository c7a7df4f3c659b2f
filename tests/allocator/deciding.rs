//! A warm router allocates nothing to decide, book and free.

use std::sync::Arc;

use kvrouted::fleet::{FleetTable, PoolRole, SchemeCell, Space, WorkerRecord};
use kvrouted::hash;
use kvrouted::ids::{EngineHash, GroupId, Scheme, ShardId, SpaceId, Tier, Window, Worker, WorkerIndex, WorkerSlot};
use kvrouted::index::{IndexReader, ShardLimits, ShardWriter, StoreBlocks, shard};
use kvrouted::load::{BookingRef, Loads, LoadsConfig, SessionId};
use kvrouted::route::{AffinityTable, Decision, Draws, Policy, Prompt, RouteRequest, Scratch, View, decide};

/// How often this thread asks for memory within `run`.
fn allocations(run: impl FnOnce()) -> u64 {
    crate::allocations(crate::this_thread(), run)
}

const SCHEME: Scheme = Scheme { block_size: 16, window: Window::Plain };
const WORKERS: u32 = 64;
const PROMPTS: u32 = 48;
const BLOCKS: u32 = 96;

struct World {
    fleet: FleetTable,
    indexes: [IndexReader; 1],
    loads: Loads,
    session: SessionId,
    prompts: Vec<Vec<u32>>,
    affinities: AffinityTable,
    scratch: Scratch,
    decision: Decision,
    asked: u64,
    _writer: ShardWriter,
}

fn record(index: u32, slot: WorkerSlot) -> WorkerRecord {
    WorkerRecord {
        name: format!("w{index}"),
        batched_tokens_max: 8192,
        ..WorkerRecord::new(WorkerIndex(index), Worker::new(u64::from(index) + 1, 0), slot)
    }
}

impl World {
    /// Workers that hold parts of prompts, every third of which begins like the first.
    fn new() -> Self {
        let (mut writer, reader) = shard(ShardId(0), ShardLimits::default());
        let workers: Vec<_> =
            (0..WORKERS).map(|index| record(index, writer.add_worker().expect("there is room"))).collect();
        let token = |prompt: u32, at: u32| match prompt.is_multiple_of(3) && at < BLOCKS * 8 {
            true => at,
            false => prompt * 100_000 + at,
        };
        let prompts: Vec<Vec<u32>> =
            (0..PROMPTS).map(|prompt| (0..BLOCKS * 16 + prompt).map(|at| token(prompt, at)).collect()).collect();
        for (place, tokens) in prompts.iter().enumerate() {
            let (seed, mut locals) = (hash::seed(None, None), Vec::new());
            hash::local_hashes(SCHEME, seed, hash::token_bytes(tokens), &[], &mut locals);
            let held = place * 2;
            let hashes: Vec<_> = (0..held).map(|block| EngineHash((place * 1000 + block + 1) as u64)).collect();
            let blocks = StoreBlocks {
                parent: None,
                hashes: &hashes,
                locals: &locals[..held],
                tier: Tier::Device,
                group: GroupId(0),
                seed,
            };
            writer.begin_batch(workers[place].slot);
            writer.store(workers[place].slot, &blocks);
        }
        writer.publish();
        let space = Space {
            id: SpaceId(0),
            model: "m".into(),
            namespace: String::new(),
            role: PoolRole::Both,
            scheme: Arc::new(SchemeCell::new(Some(SCHEME))),
        };
        let loads = Loads::new(WORKERS as usize, LoadsConfig::default());
        let session = loads.open_session(None, 0).expect("a session");
        Self {
            fleet: FleetTable { version: 1, spaces: vec![space], workers },
            indexes: [IndexReader::new(vec![reader])],
            loads,
            session,
            prompts,
            affinities: AffinityTable::new(8, 0),
            scratch: Scratch::default(),
            decision: Decision::default(),
            asked: 0,
            _writer: writer,
        }
    }

    fn decide(&mut self, prompt: usize) {
        self.asked += 1;
        let request = RouteRequest::new(SpaceId(0), Prompt::of_tokens(&self.prompts[prompt]));
        let policy = Policy::default();
        let view = View {
            fleet: &self.fleet,
            indexes: &self.indexes,
            predictions: &[],
            loads: &self.loads,
            policy: &policy,
            round_robin_counters: &[],
            affinities: &self.affinities,
            now_ns: self.asked,
        };
        decide(&view, &request, &mut self.scratch, Draws::new(self.asked), &mut self.decision).expect("a decision");
    }

    fn book(&self, prompt: usize, request_id: &str) {
        let request = RouteRequest::new(SpaceId(0), Prompt::of_tokens(&self.prompts[prompt]));
        let chosen = &self.decision.candidates[0];
        let demand = self.scratch.demand(&request, &self.decision, chosen);
        let booked = self.loads.book(self.session, request_id, 0, chosen.index, demand, self.asked);
        assert!(booked.is_ok(), "{booked:?}");
    }

    fn end(&self, request_id: &str) {
        let named = || BookingRef::Request { request_id, attempt: 0 };
        self.loads.prefill_complete(self.session, named(), 0, self.asked);
        self.loads.free(self.session, named(), self.asked);
    }
}

/// Requests in flight at once.
const IN_FLIGHT: usize = 16;

/// Asks for every prompt once, and counts what deciding and what booking and ending ask for.
fn round(world: &mut World, names: &[String]) -> [u64; 3] {
    let mut counts = [0; 3];
    for (place, name) in names.iter().enumerate() {
        let prompt = place % world.prompts.len();
        counts[0] += allocations(|| world.decide(prompt));
        counts[1] += allocations(|| world.book(prompt, name));
        if let Some(oldest) = place.checked_sub(IN_FLIGHT) {
            counts[2] += allocations(|| world.end(&names[oldest]));
        }
    }
    names[names.len() - IN_FLIGHT..].iter().for_each(|name| world.end(name));
    counts
}

#[test]
fn deciding_booking_and_ending_allocate_nothing_once_they_are_warm() {
    let _alone = crate::ONE_AT_A_TIME.lock();
    let mut world = World::new();
    let names = |round: usize| (0..192).map(|at| format!("request-{round}-{at}")).collect::<Vec<_>>();
    for warm in 0..8 {
        round(&mut world, &names(warm));
    }
    let [decide, book, end] = round(&mut world, &names(8));
    assert_eq!(decide, 0);
    assert_eq!([book, end], [0, 0], "bookings and their ends");
}
