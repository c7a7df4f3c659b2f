//! The formulas and rules as published, one worker after the other, without a thought for speed.

use std::collections::BTreeMap;

use kvrouted::fleet::{DeviceClass, PoolRole, WorkerState};
use kvrouted::ids::Worker;
use kvrouted::route::{Mode, Observation, Policy, WorkerFacts};

/// Who is in the running, and why the others are not.
pub(crate) struct Sifted {
    /// Places in the observation.
    pub(crate) running: Vec<usize>,
    pub(crate) removed: Vec<(&'static str, Worker)>,
    pub(crate) no_worker: Option<&'static str>,
}

/// Applies the rules in their order.
pub(crate) fn sift(policy: &Policy, observation: &Observation) -> Sifted {
    let mut sifted = sift_once(policy, observation, false);
    let count = |sifted: &Sifted, names: &[&str]| sifted.removed.iter().filter(|(by, _)| names.contains(by)).count();
    let doubted = count(&sifted, &["down", "backing_off"]) > 0 && count(&sifted, &["busy", "trust"]) == 0;
    if sifted.running.is_empty() && doubted {
        sifted = sift_once(policy, observation, true);
    }
    sifted.no_worker = sifted.running.is_empty().then(|| no_worker(observation, &sifted.removed));
    sifted
}

fn sift_once(policy: &Policy, observation: &Observation, lenient: bool) -> Sifted {
    // An engine is busy when each of its ranks is.
    let mut engines: BTreeMap<u64, bool> = BTreeMap::new();
    for facts in observation.workers.iter() {
        *engines.entry(facts.worker.id.0).or_insert(true) &= is_rank_busy(policy, &facts);
    }
    let allowed = || observation.workers.iter().filter(|facts| facts.allowed);
    let adapters_count = observation.request.pin.is_none() && allowed().any(|facts| facts.has_adapter);
    let mut sifted = Sifted { running: Vec::new(), removed: Vec::new(), no_worker: None };
    for (place, facts) in observation.workers.iter().enumerate() {
        let rule = if !facts.allowed {
            "not_allowed"
        } else if adapters_count && !facts.has_adapter {
            "no_adapter"
        } else if facts.state == WorkerState::Draining {
            "draining"
        } else if facts.state == WorkerState::Down && !lenient {
            "down"
        } else if facts.backing_off && !lenient {
            "backing_off"
        } else if !facts.is_pinned {
            "not_pinned"
        } else if !facts.has_required_taints {
            "taints"
        } else if engines[&facts.worker.id.0] {
            "busy"
        } else if facts.trust.level < policy.trust_min {
            "trust"
        } else {
            sifted.running.push(place);
            continue;
        };
        sifted.removed.push((rule, facts.worker));
    }
    sifted
}

/// What is booked on a rank and what it says itself are judged apart: either makes it busy.
fn is_rank_busy(policy: &Policy, facts: &WorkerFacts) -> bool {
    let mut loads = vec![(facts.load.prefill_tokens, facts.load.decode_blocks)];
    let mut busy = false;
    if let Some(said) = facts.load.engine {
        loads.push((said.prefill_tokens, said.decode_blocks));
        if let Some(share) = policy.busy.decode_blocks_share {
            busy |= f64::from(said.kv_usage_millionths) / 1e6 > share;
        }
    }
    for (tokens, blocks) in loads {
        if let (Some(share), true) = (policy.busy.decode_blocks_share, facts.capacity_blocks > 0) {
            busy |= blocks as f64 > share * facts.capacity_blocks as f64;
        }
        if let Some(most) = policy.busy.prefill_tokens {
            busy |= tokens > most;
        }
        if let Some(steps) = policy.busy.prefill_steps {
            busy |= tokens as f64 > steps * facts.batched_tokens_max as f64;
        }
    }
    busy
}

fn no_worker(observation: &Observation, removed: &[(&'static str, Worker)]) -> &'static str {
    let pin = observation.request.pin;
    let of_pinned = |worker: &Worker| match pin {
        Some(pin) => worker.id == pin.id && (pin.rank.0 == u32::MAX || pin.rank == worker.rank),
        None => true,
    };
    let rules: Vec<_> = removed.iter().filter(|(_, worker)| of_pinned(worker)).map(|(rule, _)| *rule).collect();
    if pin.is_some() && rules.contains(&"not_allowed") {
        "pinned_not_allowed"
    } else if rules.contains(&"busy") {
        if pin.is_some() { "pinned_busy" } else { "all_busy" }
    } else if observation.workers.is_empty()
        || ["draining", "down", "backing_off"].iter().any(|rule| rules.contains(rule))
    {
        "nobody_available"
    } else {
        "all_filtered"
    }
}

/// What the worker at a place among those in the running costs. `policy` has the request's overrides.
pub(crate) fn cost(policy: &Policy, observation: &Observation, running: &[usize], place: usize) -> f64 {
    let facts = &observation.workers.row(running[place]);
    let requests = facts.load.requests as f64;
    match policy.mode {
        Mode::LeastLoaded | Mode::PowerOfTwo => requests,
        Mode::Random => 0.0,
        Mode::RoundRobin => {
            let first = (observation.request.round_robin_counter % running.len() as u64) as usize;
            ((place + running.len() - first) % running.len()) as f64
        }
        Mode::DeviceAwareWeighted => pool_load(observation, running, facts.device_class),
        Mode::Lmetric => {
            let cached = cached_tokens(policy, facts);
            (observation.request.prompt_tokens as f64 - cached).max(0.0) * (requests + 1.0)
        }
        Mode::Kv | Mode::LoadAware | Mode::Approximate | Mode::Direct => kv(policy, observation, running, facts),
    }
}

fn pool_load(observation: &Observation, running: &[usize], class: DeviceClass) -> f64 {
    let pool = || running.iter().map(|at| observation.workers.row(*at)).filter(|other| other.device_class == class);
    let (requests, weight) = (pool().map(|other| other.load.requests).sum::<u64>(), pool().map(|other| other.weight));
    requests as f64 / weight.sum::<f64>()
}

/// Device, host, disk and external blocks, as far as they are believed.
fn blocks(policy: &Policy, facts: &WorkerFacts) -> [f64; 4] {
    let held = facts.overlap;
    let believed = if facts.trust.level >= policy.credit_trust_min { 1.0 } else { 0.0 };
    [held.device, held.host, held.disk, held.external].map(|blocks| f64::from(blocks) * believed)
}

fn effective_overlap(policy: &Policy, facts: &WorkerFacts) -> f64 {
    let [device, host, disk, external] = blocks(policy, facts);
    device + host * policy.host_hit_weight + (disk + external) * policy.disk_hit_weight
}

fn cached_tokens(policy: &Policy, facts: &WorkerFacts) -> f64 {
    // The block size is the same for all, and 16 in every invented observation.
    (effective_overlap(policy, facts) * 16.0).round()
}

fn kv(policy: &Policy, observation: &Observation, running: &[usize], facts: &WorkerFacts) -> f64 {
    let request = &observation.request;
    let (bs, isl) = (f64::from(request.block_size), request.prompt_tokens as f64);
    assert_eq!(bs, 16.0);
    let load = &facts.load;
    let active = load.prefill_tokens as f64;
    let request_blocks = (isl / bs).ceil();
    let mut d = 1.0;
    if policy.track_prefill_tokens && policy.credit_decay > 0.0 {
        let min = running.iter().map(|at| observation.workers.row(*at).load.prefill_tokens).min().unwrap() as f64;
        let excess = (active - min).max(0.0) / bs;
        d = 1.0 / (1.0 + policy.credit_decay * excess / request_blocks.max(1.0));
    }
    let [device, host, disk, external] = blocks(policy, facts);
    let believed = facts.trust.level >= policy.credit_trust_min;
    let shared = f64::from(if believed { facts.shared_blocks } else { request.shared_blocks });
    let credit = policy.device_credit * d * device
        + policy.host_hit_weight * host
        + policy.disk_hit_weight * (disk + external)
        + policy.shared_multiplier * shared;
    let cached = cached_tokens(policy, facts);
    let raw = if policy.track_prefill_tokens { active + (isl - cached).max(0.0) + cached } else { 0.0 };
    let prefill = policy.prefill_load_scale * (raw / bs - credit).max(0.0);
    let decode = if policy.track_active_blocks {
        let depth = if policy.assume_kv_reuse { facts.active_depth_blocks.min(request.whole_blocks) } else { 0 };
        load.decode_blocks as f64 + f64::from(request.whole_blocks) - f64::from(depth)
    } else {
        0.0
    };
    let in_flight = policy.active_request_weight * load.requests as f64;
    let only_decodes = request.role == PoolRole::Decode && !policy.track_prefill_tokens && policy.device_credit > 0.0;
    let mut cost = if only_decodes { (decode - credit).max(0.0) + in_flight } else { prefill + decode + in_flight };
    if policy.capability {
        cost /= facts.weight;
    }
    if request.prefers_taints && request.pin.is_none() {
        cost *= (-facts.taint_weight.tanh()).exp();
    }
    cost
}

/// Whether the cost is the sum of its terms, weighed: not in modes that count something else, nor where a pool only
/// decodes.
pub(crate) fn is_sum_of_terms(policy: &Policy, observation: &Observation) -> bool {
    let is_kv = matches!(policy.mode, Mode::Kv | Mode::LoadAware | Mode::Approximate | Mode::Direct);
    is_kv && (observation.request.role != PoolRole::Decode || policy.track_prefill_tokens)
}

/// The places among those in the running that the mode may choose.
pub(crate) fn may_be_chosen(policy: &Policy, observation: &Observation, running: &[usize]) -> Vec<usize> {
    let costs: Vec<f64> = (0..running.len()).map(|place| cost(policy, observation, running, place)).collect();
    let low = costs.iter().copied().fold(f64::INFINITY, f64::min);
    let places = 0..running.len();
    let lowest = |place: &usize| super::near(costs[*place], low);
    match policy.mode {
        Mode::Random => places.collect(),
        // Only the worst worker of all is never the better of two.
        Mode::PowerOfTwo if running.len() > 1 => {
            let better_than_one =
                |place: &usize| (0..running.len()).any(|it| it != *place && costs[*place] <= costs[it]);
            places.filter(better_than_one).collect()
        }
        Mode::Kv | Mode::LoadAware | Mode::Approximate | Mode::Lmetric if policy.temperature > 0.0 => places.collect(),
        Mode::DeviceAwareWeighted => {
            let requests = |place: usize| observation.workers.row(running[place]).load.requests;
            let idlest = places.clone().filter(lowest).map(requests).min();
            places.filter(lowest).filter(|place| Some(requests(*place)) == idlest).collect()
        }
        _ => places.filter(lowest).collect(),
    }
}
