//! Journals as seeds.

use kvrouted::fleet::{DeviceClass, WorkerState};
use kvrouted::ids::{EventSeq, SpaceId, TierBlocks, Worker, WorkerIndex};
use kvrouted::journal::{DecisionRecord, Encoder, Origin, RequestIdentity, SpaceLabel};
use kvrouted::load::{EndedBooking, Load};
use kvrouted::route::{Decision, Draws, Mode, Observation, Policy, RequestFacts, WorkerFacts, judge};
use kvrouted::trust::{Trust, TrustLevel};
use rand::{RngExt, SeedableRng};
use rand_xoshiro::Xoshiro256PlusPlus;

/// Journals of random fleets that were judged, by policies that change.
pub(super) fn journals() -> Vec<Vec<u8>> {
    let mut rng = Xoshiro256PlusPlus::seed_from_u64(5);
    (0..6).map(|at| journal(&mut rng, at)).collect()
}

fn journal(rng: &mut Xoshiro256PlusPlus, at: u64) -> Vec<u8> {
    let space = SpaceLabel { model: "m".into(), namespace: String::new(), role: "both".into() };
    let origin = Origin {
        release: "0.1.0".into(),
        instance_id: at,
        started_unix_ms: 1,
        sample: 1.0,
        spaces: vec![space],
        classes: vec!["class".into()],
    };
    let mut bytes = Vec::new();
    let mut encoder = Encoder::begin(&origin, &mut bytes);
    let (mut record, mut decision) = (DecisionRecord::default(), Decision::default());
    let mut policy = Policy::default();
    for step in 0..3 * at {
        if step % 4 == 1 {
            let mode = Mode::ALL[rng.random_range(0..Mode::ALL.len())];
            policy = Policy { version: step, mode, temperature: rng.random(), capability: rng.random(), ..policy };
        }
        let observation = observation(rng);
        judge(&policy, &observation, Draws::new(rng.random()), &mut decision);
        record.copy_from((step, SpaceId(0)), &policy, &observation, &decision);
        let prefix = (0..rng.random_range(0..9)).map(|depth| (step % 3) << 32 | depth).collect();
        record.identity =
            RequestIdentity { booking: Some(step), session: Some(7), prefix_tokens: 64, prefix, ..Default::default() };
        encoder.decision(step as u32 % 3, &record, &mut bytes);
        if step % 5 == 0 {
            encoder.gap(0, step, &mut bytes);
            encoder.ends_lost(step, &mut bytes);
        }
        let ended = EndedBooking { booking: step, first_token_ns: Some(9), end_ns: 99, ..EndedBooking::default() };
        encoder.ended(&ended, &mut bytes);
    }
    if at.is_multiple_of(2) {
        encoder.end(&mut bytes);
    }
    bytes
}

fn observation(rng: &mut Xoshiro256PlusPlus) -> Observation {
    let states = [WorkerState::Ready, WorkerState::Ready, WorkerState::Draining, WorkerState::Down];
    let mut facts = |place: u16| WorkerFacts {
        index: WorkerIndex::at(place, rng.random_range(0..3)),
        worker: Worker::new(u64::from(place), rng.random_range(0..2)),
        overlap: TierBlocks { device: rng.random_range(0..20), host: rng.random_range(0..3), disk: 0, external: 1 },
        active_depth_blocks: rng.random_range(0..5),
        shared_blocks: rng.random_range(0..2),
        load: Load {
            prefill_tokens: rng.random_range(0..5000),
            decode_blocks: rng.random_range(0..500),
            requests: rng.random_range(0..50),
            version: rng.random_range(0..1000),
            ..Load::default()
        },
        trust: Trust { level: TrustLevel::Exact, as_of_seq: Some(EventSeq(7)), ..Trust::default() },
        state: states[rng.random_range(0..4)],
        device_class: DeviceClass::Gpu,
        weight: 1.5,
        capacity_blocks: 1000,
        batched_tokens_max: 8192,
        allowed: rng.random_range(0..4) > 0,
        backing_off: false,
        is_pinned: true,
        has_adapter: false,
        has_required_taints: true,
        taint_weight: rng.random(),
    };
    let workers = (0..6).map(&mut facts).collect();
    let request = RequestFacts {
        prompt_tokens: 321,
        block_size: 16,
        whole_blocks: 20,
        candidates_max: 4,
        ..RequestFacts::default()
    };
    Observation { request, workers, request_blocks: 20, fleet_version: 3, index_epoch: 99, ..Observation::default() }
}
