//! The predictions of one space, tested against a plain list of bookings.

use std::collections::BTreeMap;
use std::sync::Arc;

use proptest::prelude::*;

use super::*;
use crate::fleet::{EventSource, FleetTable, WorkerRecord, WorkerState};
use crate::ids::{LocalHash, SpaceId, Worker, WorkerIndex, WorkerSlot};
use crate::index::Depths;
use crate::limits::PREDICTED_MEMORY_BYTES_MIN;
use crate::metrics::{CounterSet, PredictorCounter};

const TTL_MS: u64 = 100;
const BLOCKS_MAX: usize = 9;
/// Capacities of the workers; 0 = not known.
const CAPACITIES: [u64; 3] = [0, 6, 30];

fn record(index: u32, capacity_blocks: u64) -> WorkerRecord {
    WorkerRecord {
        name: format!("w{index}"),
        capacity_blocks,
        batched_tokens_max: 1,
        ..WorkerRecord::new(WorkerIndex(index), Worker::new(u64::from(index) + 10, 0), WorkerSlot(0))
    }
}

fn table(capacities: &[u64]) -> FleetTable {
    let workers = capacities.iter().zip(0..).map(|(capacity, index)| record(index, *capacity)).collect();
    FleetTable { version: 1, spaces: Vec::new(), workers }
}

fn limits(memory_bytes_max: u64) -> PredictionLimits {
    PredictionLimits { ttl_ms: TTL_MS, worker_blocks_max: BLOCKS_MAX as u64, memory_bytes_max, secret: 7 }
}

struct World {
    table: FleetTable,
    predictions: SpacePredictions,
    counters: Arc<CounterSet<PredictorCounter>>,
    depths: Depths,
}

impl World {
    fn new(capacities: &[u64], limits: PredictionLimits) -> Self {
        let counters = Arc::default();
        let mut predictions = SpacePredictions::new(limits, Arc::clone(&counters));
        let table = table(capacities);
        predictions.follow(&table, SpaceId(0));
        Self { table, predictions, counters, depths: Depths::new() }
    }

    fn book(&mut self, index: usize, locals: &[LocalHash], now_ms: u64) {
        let record = &self.table.workers[index];
        self.predictions.book(record.index, record.worker, locals, now_ms);
    }

    /// The leading blocks predicted for a worker; `None` if it has no predictions.
    fn predicted(&mut self, index: usize, locals: &[LocalHash]) -> Option<u32> {
        let record = &self.table.workers[index];
        self.predictions.reader().look_up(locals, &mut self.depths).blocks(record.index, record.worker)
    }

    fn follow(&mut self) {
        self.predictions.follow(&self.table, SpaceId(0));
    }

    fn count(&self, counter: PredictorCounter) -> u64 {
        self.counters.get(counter)
    }
}

fn chain(locals: impl IntoIterator<Item = u64>) -> Vec<LocalHash> {
    locals.into_iter().map(LocalHash).collect()
}

/// Every predicted block by its worker and its whole chain, with the time and the number of its last renewal.
#[derive(Debug, Default)]
struct Model {
    blocks: BTreeMap<(usize, Vec<LocalHash>), (u64, u64)>,
    renewals: u64,
    now_ms: u64,
}

impl Model {
    fn of(&self, worker: usize) -> usize {
        self.blocks.keys().filter(|(of, _)| *of == worker).count()
    }

    fn book(&mut self, worker: usize, locals: &[LocalHash], now_ms: u64) {
        self.now_ms = self.now_ms.max(now_ms);
        let bound = if CAPACITIES[worker] > 0 { CAPACITIES[worker] as usize } else { BLOCKS_MAX };
        let locals = &locals[..locals.len().min(bound)];
        for len in (1..=locals.len()).rev() {
            self.renewals += 1;
            self.blocks.insert((worker, locals[..len].to_vec()), (self.now_ms, self.renewals));
        }
        while self.of(worker) > bound {
            let oldest = self.blocks.iter().filter(|((of, _), _)| *of == worker).min_by_key(|(_, (_, nth))| *nth);
            let oldest = oldest.expect("more than the bound").0.clone();
            self.blocks.remove(&oldest);
        }
    }

    fn pass_time(&mut self, now_ms: u64) {
        self.now_ms = self.now_ms.max(now_ms);
        self.blocks.retain(|_, (renewed_at_ms, _)| *renewed_at_ms + TTL_MS > self.now_ms);
    }

    fn forget(&mut self, worker: usize) {
        self.blocks.retain(|(of, _), _| *of != worker);
    }

    fn depth(&self, worker: usize, locals: &[LocalHash]) -> usize {
        (1..=locals.len()).take_while(|len| self.blocks.contains_key(&(worker, locals[..*len].to_vec()))).count()
    }

    fn is_closed(&self) -> bool {
        let with_parent = |(worker, chain): &(usize, Vec<LocalHash>)| {
            chain.len() == 1 || self.blocks.contains_key(&(*worker, chain[..chain.len() - 1].to_vec()))
        };
        self.blocks.keys().all(with_parent)
    }
}

#[derive(Clone, Debug)]
enum Step {
    Book {
        worker: usize,
        locals: Vec<LocalHash>,
        after_ms: u64,
    },
    /// A booking of a thread that read its clock earlier.
    Late {
        worker: usize,
        locals: Vec<LocalHash>,
    },
    PassTime {
        after_ms: u64,
    },
    Forget {
        worker: usize,
    },
    Leave {
        worker: usize,
    },
}

fn step() -> impl Strategy<Value = Step> {
    let worker = || 0..CAPACITIES.len();
    // Few hashes, and repeated ones, so that prompts share prefixes and repeat blocks.
    let locals = || prop::collection::vec((1_u64..4).prop_map(LocalHash), 0..14);
    prop_oneof![
        8 => (worker(), locals(), 0_u64..30).prop_map(|(worker, locals, after_ms)| Step::Book { worker, locals, after_ms }),
        1 => (worker(), locals()).prop_map(|(worker, locals)| Step::Late { worker, locals }),
        2 => (0_u64..120).prop_map(|after_ms| Step::PassTime { after_ms }),
        1 => worker().prop_map(|worker| Step::Forget { worker }),
        1 => worker().prop_map(|worker| Step::Leave { worker }),
    ]
}

fn play(steps: &[Step]) {
    let (mut world, mut model) = (World::new(&CAPACITIES, limits(64 << 20)), Model::default());
    let (mut now_ms, mut prompts) = (0, Vec::new());
    for step in steps {
        match step {
            Step::Book { worker, locals, after_ms } => {
                now_ms += after_ms;
                world.book(*worker, locals, now_ms);
                model.book(*worker, locals, now_ms);
                prompts.push(locals.clone());
            }
            Step::Late { worker, locals } => {
                world.book(*worker, locals, now_ms.saturating_sub(5));
                model.book(*worker, locals, now_ms.saturating_sub(5));
                prompts.push(locals.clone());
            }
            Step::PassTime { after_ms } => {
                now_ms += after_ms;
                // In slices, as the predictor does.
                while world.predictions.pass_time(now_ms, 2) {}
                model.pass_time(now_ms);
                while world.predictions.tidy(3) {}
            }
            Step::Forget { worker } => {
                let record = &world.table.workers[*worker];
                world.predictions.forget(record.index, record.worker);
                model.forget(*worker);
            }
            Step::Leave { worker } => {
                world.table.workers[*worker].state = WorkerState::Down;
                world.follow();
                assert_eq!(world.predicted(*worker, &chain([1])), None);
                world.table.workers[*worker].state = WorkerState::Ready;
                world.follow();
                model.forget(*worker);
            }
        }
        assert!(model.is_closed());
        assert_eq!(world.predictions.len(), model.blocks.len(), "after {step:?}");
        for (worker, record) in table(&CAPACITIES).workers.iter().enumerate() {
            for locals in &prompts {
                let expected = model.depth(worker, locals) as u32;
                assert_eq!(
                    world.predicted(worker, locals),
                    Some(expected),
                    "worker {worker}, {locals:?} after {step:?}"
                );
            }
            // Updates the displayed numbers, and drops nothing.
            world.predictions.pass_time(0, 0);
            let noted = world.predictions.reader().blocks_of(record.index, record.worker);
            assert_eq!(noted, Some(model.of(worker) as u64));
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 256, ..ProptestConfig::default() })]
    #[test]
    fn predictions_equal_a_plain_list(steps in prop::collection::vec(step(), 1..40)) {
        play(&steps);
    }
}

#[test]
fn a_prompt_booked_again_stays_and_longer_prompts_expire() {
    let mut world = World::new(&[0], limits(64 << 20));
    world.book(0, &chain(1..=6), 0);
    world.book(0, &chain(1..=4), 60);
    world.predictions.pass_time(TTL_MS - 1, usize::MAX);
    assert_eq!(world.predicted(0, &chain(1..=6)), Some(6));
    world.predictions.pass_time(TTL_MS, usize::MAX);
    assert_eq!(world.predicted(0, &chain(1..=6)), Some(4));
    world.predictions.pass_time(60 + TTL_MS, usize::MAX);
    assert_eq!((world.predicted(0, &chain(1..=6)), world.predictions.is_empty()), (Some(0), true));
    assert_eq!(world.count(PredictorCounter::BlocksExpired), 6);
    assert_eq!(world.count(PredictorCounter::BlocksRenewed), 4);
}

#[test]
fn a_worker_that_gets_events_or_another_workers_place_loses_its_predictions() {
    let mut world = World::new(&[0, 0], limits(64 << 20));
    let prompt = chain(1..=5);
    world.book(0, &prompt, 0);
    world.book(1, &prompt, 0);
    let events = EventSource {
        endpoint: "tcp://127.0.0.1:1".parse().expect("an endpoint"),
        replay: None,
        topic: String::new(),
        snapshots: None,
    };
    world.table.workers[0].events = Some(events);
    world.follow();
    assert_eq!((world.predicted(0, &prompt), world.predicted(1, &prompt)), (None, Some(5)));
    world.book(0, &prompt, 1);
    assert_eq!(world.count(PredictorCounter::BookingsOfOthers), 1);
    world.table.workers[1].worker = Worker::new(99, 0);
    assert_eq!(world.predicted(1, &prompt), None, "another worker, before the predictor has heard of it");
    world.follow();
    assert_eq!((world.predicted(1, &prompt), world.predictions.len()), (Some(0), 0));
    assert_eq!(world.count(PredictorCounter::BlocksForgotten), 10);
}

#[test]
fn memory_stays_below_its_ceiling_whatever_is_booked() {
    const PROMPT_BLOCKS: u64 = 700;
    let wide = PredictionLimits { worker_blocks_max: 1 << 30, ..limits(PREDICTED_MEMORY_BYTES_MIN) };
    let mut world = World::new(&[0; 4], wide);
    let prompt = |nth: u64| chain((0..PROMPT_BLOCKS).map(move |block| 1 + nth * PROMPT_BLOCKS + block));
    for nth in 0..400 {
        world.book(nth as usize % 4, &prompt(nth), 0);
        let bytes = world.predictions.memory_bytes();
        assert!(bytes <= PREDICTED_MEMORY_BYTES_MIN, "{bytes} bytes after {nth}");
        assert_eq!(world.predicted(nth as usize % 4, &prompt(nth)), Some(PROMPT_BLOCKS as u32), "prompt {nth}");
        world.predictions.tidy(usize::MAX);
    }
    assert_eq!(world.predicted(0, &prompt(0)), Some(0), "the oldest is gone");
    assert!(world.predictions.len() >= 20_000, "{}", world.predictions.len());
    assert!(world.count(PredictorCounter::BlocksEvictedMemory) > 0);
    assert_eq!(world.count(PredictorCounter::BookingsMemoryBound), 0);
}

#[test]
fn no_worker_keeps_the_names_of_its_last_booking() {
    let mut world = World::new(&[1000; 20], limits(1 << 30));
    let before = world.predictions.workers_bytes();
    for booking in 0..3 {
        (0..20).for_each(|index| world.book(index, &chain(booking * 1000..booking * 1000 + 500), 0));
        let kept = world.predictions.workers_bytes() - before;
        assert!(kept < 20 * 500, "{kept} bytes, where names take 8 each");
    }
}

#[test]
fn a_full_queue_refuses_a_booking_and_says_so() {
    use crate::limits::{PREDICTED_BOOKINGS_WAITING_MAX, PREDICTED_WAITING_BLOCKS_MAX};
    let worker = (WorkerIndex(0), Worker::new(1, 0));
    let bookings = BookedQueue::default();
    for _ in 0..PREDICTED_BOOKINGS_WAITING_MAX {
        assert!(bookings.push(SpaceId(0), worker, &chain([1]), 0));
    }
    assert!(!bookings.push(SpaceId(0), worker, &chain([1]), 0));
    while let Some(booked) = bookings.pop() {
        bookings.recycle(booked);
    }
    assert!(bookings.is_empty());
    let half = vec![LocalHash(1); PREDICTED_WAITING_BLOCKS_MAX / 2 + 1];
    assert!(bookings.push(SpaceId(0), worker, &half, 0));
    assert!(!bookings.push(SpaceId(0), worker, &half, 0));
    bookings.recycle(bookings.pop().expect("the first"));
    assert!(bookings.push(SpaceId(0), worker, &half, 0), "room again");
}
