//! Random policies and observations, small enough that ties and empty candidate lists are common.

use kvrouted::fleet::{DeviceClass, PoolRole, WorkerState};
use kvrouted::ids::{TierBlocks, Worker, WorkerIndex};
use kvrouted::load::{EngineLoad, Load};
use kvrouted::route::{BusyThresholds, Mode, Observation, Overrides, Policy, RequestFacts, WorkerFacts};
use kvrouted::trust::{Trust, TrustLevel};
use proptest::prelude::*;
use proptest::sample::select;

/// What loads and thresholds are multiples of, so that they meet.
const LOAD_STEP_TOKENS: u64 = 50;
const WEIGHTS: [f64; 5] = [0.0, 0.25, 0.5, 1.0, 2.5];

fn level() -> impl Strategy<Value = TrustLevel> {
    // Mostly no floor: a floor empties most runnings.
    prop_oneof![4 => Just(TrustLevel::None), 1 => (0_u8..5).prop_map(|it| TrustLevel::from_u8(it).unwrap())]
}

fn busy() -> impl Strategy<Value = BusyThresholds> {
    let some = |range: std::ops::Range<u64>| prop_oneof![3 => Just(None), 1 => range.prop_map(Some)];
    (some(0..10), some(0..8), some(0..4)).prop_map(|(share, tokens, steps)| BusyThresholds {
        decode_blocks_share: share.map(|tenths| tenths as f64 / 10.0),
        prefill_tokens: tokens.map(|steps| steps * LOAD_STEP_TOKENS),
        prefill_steps: steps.map(|steps| steps as f64),
    })
}

pub(crate) fn policy() -> impl Strategy<Value = Policy> {
    let weight = || select(&WEIGHTS[..]);
    let share = || select(&WEIGHTS[..4]);
    let flags = (any::<bool>(), any::<bool>(), any::<bool>(), any::<bool>());
    let weights = (weight(), weight(), weight(), weight(), share(), share(), share(), weight());
    (select(&Mode::ALL[..]), weights, flags, (level(), level()), busy()).prop_map(
        |(mode, weights, flags, (trust_min, credit_trust_min), busy)| Policy {
            version: 3,
            mode,
            device_credit: weights.0,
            credit_decay: weights.1,
            prefill_load_scale: weights.2,
            active_request_weight: weights.3,
            host_hit_weight: weights.4,
            disk_hit_weight: weights.5,
            shared_multiplier: weights.6,
            temperature: weights.7,
            track_prefill_tokens: flags.0,
            track_active_blocks: flags.1,
            assume_kv_reuse: flags.2,
            capability: flags.3,
            trust_min,
            credit_trust_min,
            busy,
            ..Policy::default()
        },
    )
}

fn overrides() -> impl Strategy<Value = Overrides> {
    let weight = || proptest::option::weighted(0.2, select(&WEIGHTS[..]));
    let flag = || proptest::option::weighted(0.2, any::<bool>());
    (proptest::option::weighted(0.2, select(&Mode::ALL[..])), weight(), weight(), weight(), weight(), flag(), flag())
        .prop_map(|(mode, device, scale, temperature, shared, reuse, track)| Overrides {
            mode,
            device_credit: device,
            prefill_load_scale: scale,
            temperature,
            shared_multiplier: shared,
            assume_kv_reuse: reuse,
            track_prefill_tokens: track,
        })
}

fn request_facts() -> impl Strategy<Value = RequestFacts> {
    let role = select(&[PoolRole::Both, PoolRole::Prefill, PoolRole::Decode][..]);
    let pin = proptest::option::weighted(0.2, (0_u64..4, select(&[0, 1, u32::MAX][..])));
    (0_u64..400, role, 1_u32..6, pin, any::<bool>(), overrides(), 0_u64..40).prop_map(
        |(prompt_tokens, role, candidates_max, pin, prefers_taints, overrides, round_robin_counter)| RequestFacts {
            prompt_tokens,
            block_size: 16,
            whole_blocks: (prompt_tokens / 16) as u32,
            role,
            candidates_max,
            pin: pin.map(|(id, rank)| Worker::new(id, rank)),
            prefers_taints,
            shared_blocks: (prompt_tokens / 32) as u32,
            overrides,
            round_robin_counter,
            ..RequestFacts::default()
        },
    )
}

fn worker(request: RequestFacts) -> impl Strategy<Value = WorkerFacts> {
    let blocks = request.whole_blocks;
    let overlap = (0..=blocks, 0_u32..4, 0_u32..3, 0_u32..3);
    let load = (0_u64..12, 0_u64..60, 0_u64..5);
    let said = proptest::option::weighted(0.3, (0_u64..12, 0_u64..60, 0_u32..=1_000_000));
    let states =
        [WorkerState::Ready, WorkerState::Ready, WorkerState::Joining, WorkerState::Draining, WorkerState::Down];
    let what = (select(&[DeviceClass::Gpu, DeviceClass::Cpu][..]), select(&[1.0, 8.0, 0.5][..]), 0_u64..3);
    let usually = || proptest::bool::weighted(0.85);
    let flags = (usually(), usually(), any::<bool>(), usually());
    (
        overlap,
        0..=blocks + 1,
        0..=request.shared_blocks,
        (load, said),
        0_u8..5,
        select(states.to_vec()),
        what,
        flags,
        -3..4_i32,
    )
        .prop_map(move |(overlap, depth, shared, (load, said), level, state, what, flags, taint)| WorkerFacts {
            index: WorkerIndex(0),
            worker: Worker::new(0, 0),
            overlap: TierBlocks { device: overlap.0, host: overlap.1, disk: overlap.2, external: overlap.3 },
            active_depth_blocks: depth,
            shared_blocks: shared,
            load: Load {
                prefill_tokens: load.0 * LOAD_STEP_TOKENS,
                decode_blocks: load.1,
                requests: load.2,
                engine: said.map(|(prefill, decode_blocks, kv_usage_millionths)| EngineLoad {
                    prefill_tokens: prefill * LOAD_STEP_TOKENS,
                    decode_blocks,
                    kv_usage_millionths,
                    ..EngineLoad::default()
                }),
                ..Load::default()
            },
            trust: Trust { level: TrustLevel::from_u8(level).unwrap(), ..Trust::default() },
            state,
            device_class: what.0,
            weight: what.1,
            capacity_blocks: what.2 * 40,
            batched_tokens_max: 2 * LOAD_STEP_TOKENS,
            allowed: flags.0,
            backing_off: !flags.1,
            is_pinned: true,
            has_adapter: flags.2,
            has_required_taints: flags.3,
            taint_weight: f64::from(taint) / 2.0,
        })
}

/// Up to eight workers, two ranks an engine.
pub(crate) fn observation() -> impl Strategy<Value = Observation> {
    request_facts().prop_flat_map(|request| {
        proptest::collection::vec(worker(request), 0..9).prop_map(move |mut workers| {
            for (place, facts) in workers.iter_mut().enumerate() {
                facts.index = WorkerIndex(place as u32 * 2);
                facts.worker = Worker::new(place as u64 / 2, place as u32 % 2);
                facts.is_pinned = request.pin.is_none_or(|pin| {
                    pin.id == facts.worker.id && (pin.rank.0 == u32::MAX || pin.rank == facts.worker.rank)
                });
            }
            Observation { request, workers: workers.into_iter().collect(), fleet_version: 1, ..Observation::default() }
        })
    })
}
