//! The load of every worker if it took a prompt, for gateways that choose by a rule of their own.

use super::cost::{PoolFacts, cost};
use super::decide::Scratch;
use super::observation::Observation;
use super::policy::Policy;
use super::read_observation::View;
use crate::error::Result;
use crate::protocol::{PotentialLoad, PotentialLoads, RouteRequest};

impl PotentialLoads {
    /// Overwrites all values with those of an observation: the terms of a cost, before they are weighted. A load that
    /// the policy does not track is 0.
    pub fn of(&mut self, policy: &Policy, observation: &Observation) {
        let (policy, request) = (&policy.under(&observation.request.overrides), &observation.request);
        (self.matched, self.request_blocks) = (observation.matched, observation.request_blocks);
        self.notes = observation.notes;
        self.workers.clear();
        // No cost term here depends on other workers: only the decay of credits does, and no credit is subtracted.
        let alone = PoolFacts::default();
        self.workers.extend(observation.workers.iter().map(|facts| {
            let terms = cost(policy, request, &facts, &alone, 0);
            let uncached_tokens = request.prompt_tokens.saturating_sub(terms.cached_tokens as u64);
            let prefill_tokens = facts.load.prefill_tokens.saturating_add(uncached_tokens);
            PotentialLoad {
                worker: facts.worker,
                active_requests: facts.load.requests,
                prefill_tokens: if policy.track_prefill_tokens { prefill_tokens } else { 0 },
                decode_blocks: terms.decode as u64,
            }
        }));
    }
}

/// Overwrites `potential` with the load of every worker of the space if it took the prompt. Decides nothing and does
/// not advance the round-robin counter.
///
/// # Errors
/// As [`decide`](super::decide).
pub fn potential_loads(
    view: &View<'_>,
    request: &RouteRequest<'_>,
    scratch: &mut Scratch,
    potential: &mut PotentialLoads,
) -> Result<()> {
    potential.of(view.policy, scratch.observe(view, &request.of_every_worker(view.policy))?.observation());
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ids::{TierBlocks, Worker, WorkerIndex};
    use crate::load::Load;
    use crate::protocol::{DeviceClass, MatchStatus, WorkerState};
    use crate::route::{RequestFacts, WorkerFacts};
    use crate::trust::{Trust, TrustLevel};

    /// A prompt of 100 tokens in blocks of 16, and workers with these requests, prefill tokens, decode blocks, device
    /// blocks of the prompt, and active leading blocks.
    fn observation(workers: &[(u64, u64, u64, u32, u32)]) -> Observation {
        let facts = |(place, &(requests, prefill_tokens, decode_blocks, device, active_depth_blocks))| WorkerFacts {
            index: WorkerIndex(place as u32),
            worker: Worker::new(place as u64, 0),
            overlap: TierBlocks { device, host: 1, ..TierBlocks::default() },
            active_depth_blocks,
            shared_blocks: 0,
            load: Load { requests, prefill_tokens, decode_blocks, ..Load::default() },
            trust: Trust { level: TrustLevel::Exact, ..Trust::default() },
            state: WorkerState::Draining,
            device_class: DeviceClass::Gpu,
            weight: 2.0,
            capacity_blocks: 0,
            batched_tokens_max: 8192,
            allowed: true,
            backing_off: true,
            is_pinned: true,
            has_adapter: true,
            has_required_taints: true,
            taint_weight: 0.0,
        };
        Observation {
            request: RequestFacts { prompt_tokens: 100, block_size: 16, whole_blocks: 6, ..RequestFacts::default() },
            workers: workers.iter().enumerate().map(facts).collect(),
            request_blocks: 6,
            ..Observation::default()
        }
    }

    fn loads(policy: &Policy, observation: &Observation) -> Vec<(u64, u64, u64)> {
        let mut potential = PotentialLoads { matched: MatchStatus::Unmatchable, ..PotentialLoads::default() };
        potential.of(policy, observation);
        assert_eq!((potential.matched, potential.request_blocks), (MatchStatus::Matched, 6));
        let values = |load: &PotentialLoad| (load.active_requests, load.prefill_tokens, load.decode_blocks);
        potential.workers.iter().map(values).collect()
    }

    #[test]
    fn a_prompt_adds_uncached_tokens_and_inactive_blocks() {
        let observation = observation(&[(0, 0, 0, 0, 0), (3, 500, 40, 2, 1), (1, u64::MAX, 7, 6, 6)]);
        // A block in host memory saves three quarters of its tokens.
        let expected = [(0, 100 - 12, 6), (3, 500 + 100 - 44, 40 + 5), (1, u64::MAX, 7)];
        assert_eq!(loads(&Policy::default(), &observation), expected);
    }

    #[test]
    fn untracked_loads_are_zero() {
        let observation = observation(&[(3, 500, 40, 2, 1)]);
        let prefill = Policy { track_prefill_tokens: false, ..Policy::default() };
        assert_eq!(loads(&prefill, &observation), [(3, 0, 45)]);
        let decode = Policy { track_active_blocks: false, ..Policy::default() };
        assert_eq!(loads(&decode, &observation), [(3, 556, 0)]);
        let alone = Policy { assume_kv_reuse: false, ..Policy::default() };
        assert_eq!(loads(&alone, &observation), [(3, 556, 46)]);
    }
}
