//! Decisions against a plain reference: the published formulas and rules, written a second time and in another way.

// clippy.toml allows it in #[test] functions; all of this folder is test.
#![allow(clippy::unwrap_used)]

mod chance;

use kvrouted::route::{CostTerms, Decision, Draws, judge};
use proptest::prelude::*;

/// As near as two ways of adding the same numbers come.
fn near(a: f64, b: f64) -> bool {
    a == b || (a - b).abs() <= 1e-9 * a.abs().max(b.abs()).max(1.0)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, ..ProptestConfig::default() })]

    #[test]
    fn rules_remove_whom_the_reference_removes(
        (policy, observation) in (invent::policy(), invent::observation()), seed: u64,
    ) {
        let mut decision = Decision::default();
        judge(&policy, &observation, Draws::new(seed), &mut decision);
        let expected = reference::sift(&policy, &observation);
        let running: Vec<_> = decision.eligible_rows.iter().map(|place| *place as usize).collect();
        prop_assert_eq!(&running, &expected.running);
        let removed: Vec<_> = decision.removed.iter().map(|(rule, worker)| (rule.name(), *worker)).collect();
        prop_assert_eq!(removed, expected.removed);
        prop_assert_eq!(decision.no_worker.map(|kind| kind.name()), expected.no_worker);
        prop_assert_eq!(decision.eligible as usize, running.len());
        let listed = running.len().min(observation.request.candidates_max.max(1) as usize);
        prop_assert_eq!(decision.candidates.len(), listed);
    }

    #[test]
    fn costs_are_those_of_the_reference_and_explain_themselves(
        (policy, observation) in (invent::policy(), invent::observation()), seed: u64,
    ) {
        let mut decision = Decision::default();
        judge(&policy, &observation, Draws::new(seed), &mut decision);
        let policy = policy.under(&observation.request.overrides);
        let running = reference::sift(&policy, &observation).running;
        for scored in &decision.candidates {
            let place = running.iter().position(|at| observation.workers.row(*at).index == scored.index).unwrap();
            let expected = reference::cost(&policy, &observation, &running, place);
            let terms = &scored.terms;
            prop_assert!(near(terms.cost, expected), "{} against {expected}: {terms:?}", terms.cost);
            if reference::is_sum_of_terms(&policy, &observation) {
                let sum = terms.prefill + terms.decode + terms.active_requests_cost;
                prop_assert!(near(sum / terms.capability_weight * terms.taint_factor, terms.cost), "{terms:?}");
            }
        }
        let behind: Vec<_> = decision.candidates.iter().skip(1).map(|scored| scored.terms.cost).collect();
        prop_assert!(behind.is_sorted(), "behind the first by cost: {behind:?}");
    }

    #[test]
    fn who_is_chosen_is_one_that_the_mode_may_choose(
        (policy, observation) in (invent::policy(), invent::observation()), seed: u64,
    ) {
        let mut decision = Decision::default();
        judge(&policy, &observation, Draws::new(seed), &mut decision);
        let policy = policy.under(&observation.request.overrides);
        let running = reference::sift(&policy, &observation).running;
        let Some(chosen) = decision.candidates.first() else { return Ok(()) };
        let place = running.iter().position(|at| observation.workers.row(*at).index == chosen.index).unwrap();
        let fit = reference::may_be_chosen(&policy, &observation, &running);
        prop_assert!(fit.contains(&place), "{place} of {fit:?} in {:?}", policy.mode);
    }

    #[test]
    fn without_the_terms_of_others_everything_else_is_the_same(
        (policy, observation) in (invent::policy(), invent::observation()), seed: u64,
    ) {
        let (mut whole, mut costs) = (Decision::default(), Decision { only_costs: true, ..Decision::default() });
        judge(&policy, &observation, Draws::new(seed), &mut whole);
        judge(&policy, &observation, Draws::new(seed), &mut costs);
        for scored in whole.candidates.iter_mut().skip(1) {
            scored.terms = CostTerms { cost: scored.terms.cost, ..CostTerms::default() };
        }
        whole.only_costs = true;
        prop_assert_eq!(format!("{:?}", whole), format!("{:?}", costs));
    }

    #[test]
    fn the_same_is_judged_to_the_same_bits(
        (policy, observation) in (invent::policy(), invent::observation()), seed: u64,
    ) {
        let (mut once, mut again) = (Decision::default(), Decision::default());
        judge(&policy, &observation, Draws::new(seed), &mut once);
        // Also in buffers that something else was judged in.
        judge(&policy, &observation, Draws::new(!seed), &mut again);
        judge(&policy, &observation.clone(), Draws::new(once.seed), &mut again);
        let bits = |decision: &Decision| {
            let costs: Vec<_> = decision.candidates.iter().map(|scored| scored.terms.cost.to_bits()).collect();
            (format!("{decision:?}"), costs)
        };
        prop_assert_eq!(bits(&once), bits(&again));
    }
}

mod reference {
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
        let count =
            |sifted: &Sifted, names: &[&str]| sifted.removed.iter().filter(|(by, _)| names.contains(by)).count();
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
            Mode::Latency if policy.track_prefill_tokens => latency(policy, observation, running, facts),
            // The decode half of a pair.
            Mode::Latency => kv(policy, observation, running, facts),
            Mode::Kv | Mode::LoadAware | Mode::Approximate | Mode::Direct => kv(policy, observation, running, facts),
        }
    }

    /// The share of a worker's time that prefills took lately, as it is at the time of the request.
    fn recent_share(observation: &Observation, facts: &WorkerFacts) -> f64 {
        let now_ms = (observation.request.now_ns / 1_000_000) as u32;
        let since_s = f64::from((now_ms.wrapping_sub(facts.load.recent.at_ms) as i32).max(0)) / 1000.0;
        let windows = since_s / 30.0;
        f64::from(facts.load.recent.prefill_share) / (1.0 + windows * (1.0 + windows / 2.0))
    }

    /// Seconds until the first token: of the prefills before this one, of this one, and of fetching. With those of this
    /// prefill alone.
    fn first_token(policy: &Policy, observation: &Observation, facts: &WorkerFacts) -> (f64, f64) {
        let request = &observation.request;
        let (tokens, load) = (request.prompt_tokens as f64, &facts.load);
        let [device, host, disk, external] = blocks(policy, facts);
        let held = device + host + disk + external;
        let cached = (held.max(f64::from(facts.active_depth_blocks)) * 16.0).min(tokens - 1.0).max(0.0);
        let uncached = tokens - cached;
        // Every new token attends to all before it: the sum of an arithmetic series.
        let attended = (cached + (cached + uncached)) / 2.0 * uncached;
        let prefill = load.law.base_s + load.law.token_s * uncached + load.law.attention_s * attended;
        let running = request.now_ns.saturating_sub(load.work.since_ns).min(load.work.running_ns);
        let queue = load.work.queued_ns.saturating_sub(running) as f64 / 1e9;
        let saved = host * policy.host_hit_weight + (disk + external) * policy.disk_hit_weight;
        let fetch = (host + disk + external - saved) * 16.0 * load.law.token_s;
        (queue + prefill + fetch, prefill)
    }

    /// The seconds until the first token, what this prefill costs those that run and those that come, and what others
    /// cost its output.
    fn latency(policy: &Policy, observation: &Observation, running: &[usize], facts: &WorkerFacts) -> f64 {
        let request = &observation.request;
        let (first_token, prefill) = first_token(policy, observation, facts);
        let all = || running.iter().map(|at| observation.workers.row(*at));
        let busy = (all().map(|other| recent_share(observation, &other)).sum::<f64>() / running.len() as f64).min(0.8);
        let ended: Vec<f64> = all()
            .filter(|other| other.load.recent.decodes > 0)
            .map(|other| f64::from(other.load.recent.decode_s))
            .collect();
        let decode = if ended.is_empty() { 8.0 } else { ended.iter().sum::<f64>() / ended.len() as f64 };
        let cost = first_token
            + policy.delay_weight * facts.load.requests as f64 * prefill
            + policy.later_delay_weight * busy / (1.0 - busy) * prefill
            + policy.output_delay_weight * recent_share(observation, facts) * decode;
        if request.prefers_taints && request.pin.is_none() {
            return cost * (-facts.taint_weight.tanh()).exp();
        }
        cost
    }

    fn pool_load(observation: &Observation, running: &[usize], class: DeviceClass) -> f64 {
        let pool = || running.iter().map(|at| observation.workers.row(*at)).filter(|other| other.device_class == class);
        let (requests, weight) =
            (pool().map(|other| other.load.requests).sum::<u64>(), pool().map(|other| other.weight));
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
        let only_decodes =
            request.role == PoolRole::Decode && !policy.track_prefill_tokens && policy.device_credit > 0.0;
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
            Mode::Kv | Mode::LoadAware | Mode::Approximate | Mode::Lmetric | Mode::Latency
                if policy.temperature > 0.0 =>
            {
                places.collect()
            }
            Mode::DeviceAwareWeighted => {
                let requests = |place: usize| observation.workers.row(running[place]).load.requests;
                let idlest = places.clone().filter(lowest).map(requests).min();
                places.filter(lowest).filter(|place| Some(requests(*place)) == idlest).collect()
            }
            Mode::Latency if policy.near_cost_s > 0.0 => {
                let promise = |place: usize| {
                    let facts = observation.workers.row(running[place]);
                    first_token(policy, observation, &facts).0
                };
                let latest = places.clone().filter(lowest).map(promise).fold(f64::NEG_INFINITY, f64::max);
                let at_most = |a: f64, b: f64| a <= b || super::near(a, b);
                let (cost, promised) = (low + policy.near_cost_s, latest + policy.near_cost_s / 16.0);
                places.filter(|place| at_most(costs[*place], cost) && at_most(promise(*place), promised)).collect()
            }
            _ => places.filter(lowest).collect(),
        }
    }
}

mod invent {
    //! Random policies and observations, small enough that ties and empty candidate lists are common.

    use kvrouted::engine_law::PrefillLaw;
    use kvrouted::fleet::{DeviceClass, PoolRole, WorkerState};
    use kvrouted::ids::{TierBlocks, Worker, WorkerIndex};
    use kvrouted::load::{EngineLoad, Load, PrefillWork, RecentWork};
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
                delay_weight: weights.3,
                later_delay_weight: weights.0,
                output_delay_weight: weights.1,
                near_cost_s: weights.1,
                router_id: weights.0.to_bits(),
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
        (
            proptest::option::weighted(0.2, select(&Mode::ALL[..])),
            weight(),
            weight(),
            weight(),
            weight(),
            flag(),
            flag(),
        )
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
                now_ns: 1_000_000 * round_robin_counter,
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
            .prop_map(move |(overlap, depth, shared, (load, said), level, state, what, flags, taint)| {
                WorkerFacts {
                    index: WorkerIndex(0),
                    worker: Worker::new(0, 0),
                    overlap: TierBlocks { device: overlap.0, host: overlap.1, disk: overlap.2, external: overlap.3 },
                    active_depth_blocks: depth,
                    shared_blocks: shared,
                    load: Load {
                        work: PrefillWork {
                            queued_ns: 3_000_000 * load.0,
                            running_ns: 1_000_000 * load.0,
                            since_ns: 1_000_000 * load.1,
                        },
                        law: PrefillLaw::default().slowed(load.2 as f64 + 0.5),
                        recent: RecentWork {
                            prefill_share: load.0 as f32 / 4.0,
                            at_ms: 900 * load.1 as u32,
                            decode_s: if load.2 > 0 { load.2 as f32 + 0.5 } else { 0.0 },
                            decodes: load.2 as u32,
                        },
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
                }
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
                Observation {
                    request,
                    workers: workers.into_iter().collect(),
                    fleet_version: 1,
                    ..Observation::default()
                }
            })
        })
    }
}
