//! Whether a request has to wait for a worker with room.

use super::decision::Decision;
use super::observation::{Observation, WorkerFacts};
use super::policy::QueuePolicy;
use crate::ids::WorkerIndex;
use crate::protocol::RouteRequest;
use crate::queue::Claim;

/// The queue entry of a request that has to wait.
#[derive(Clone, Debug, PartialEq)]
pub struct Wait {
    /// Its position in the queue; its memory is not counted yet.
    pub claim: Claim,
    /// The workers that may take the request.
    pub workers: Vec<WorkerIndex>,
}

impl QueuePolicy {
    /// Whether a worker with this prefill backlog has room for another request.
    #[must_use]
    pub fn has_room(&self, prefill_tokens: u64, batched_tokens_max: u64) -> bool {
        self.threshold.is_none_or(|threshold| prefill_tokens as f64 <= threshold * batched_tokens_max as f64)
    }

    /// The queue entry of a request that was just decided, if workers are eligible and none of them has room. Requests
    /// without a booking never wait.
    #[must_use]
    pub fn wait(
        &self,
        request: &RouteRequest<'_>,
        observation: &Observation,
        decision: &Decision,
        now_ns: u64,
    ) -> Option<Wait> {
        if self.threshold.is_none() || request.book.is_none() || decision.eligible_rows.is_empty() {
            return None;
        }
        let eligible = || decision.eligible_rows.iter().map(|row| observation.workers.row(*row as usize));
        let has_room = |facts: WorkerFacts| self.has_room(facts.load.prefill_tokens, facts.batched_tokens_max);
        if eligible().any(has_room) {
            return None;
        }
        let wait_ns = match request.deadline_us {
            0 => self.wait_ms_max.saturating_mul(1_000_000),
            us => u64::from(us) * 1000,
        };
        let ends_ns = now_ns.saturating_add(wait_ns);
        let held_blocks = eligible().map(|facts| u64::from(facts.overlap.total())).max().unwrap_or(0);
        let held_tokens = held_blocks * u64::from(observation.request.block_size);
        let claim = Claim {
            discipline: self.discipline,
            priority: request.priority,
            jump: request.priority_jump,
            deadline_ns: (request.deadline_us != 0).then_some(ends_ns),
            ends_ns,
            prefill_tokens: observation.request.prompt_tokens.saturating_sub(held_tokens),
            bytes: 0,
            user: 0,
        };
        Some(Wait { claim, workers: eligible().map(|facts| facts.index).collect() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ids::{SpaceId, TierBlocks, Worker};
    use crate::load::Load;
    use crate::protocol::{BookingRequest, DeviceClass, Prompt, WorkerState};
    use crate::queue::Discipline;
    use crate::trust::Trust;

    const QUEUE: QueuePolicy = QueuePolicy { threshold: Some(0.5), discipline: Discipline::Wspt, wait_ms_max: 2 };

    /// A space whose workers have these prefill tokens, in batches of 100, and hold these blocks of 10.
    fn facts(workers: &[(u64, u32)]) -> (Observation, Decision) {
        let mut observation = Observation::default();
        (observation.request.prompt_tokens, observation.request.block_size) = (165, 16);
        for (place, (prefill_tokens, held)) in workers.iter().enumerate() {
            observation.workers.push(&WorkerFacts {
                index: WorkerIndex(place as u32),
                worker: Worker::new(place as u64, 0),
                overlap: TierBlocks { device: *held, ..TierBlocks::default() },
                active_depth_blocks: 0,
                shared_blocks: 0,
                load: Load { prefill_tokens: *prefill_tokens, ..Load::default() },
                trust: Trust::default(),
                state: WorkerState::Ready,
                device_class: DeviceClass::Gpu,
                weight: 1.0,
                capacity_blocks: 0,
                batched_tokens_max: 100,
                allowed: true,
                backing_off: false,
                is_pinned: true,
                has_adapter: true,
                has_required_taints: true,
                taint_weight: 0.0,
            });
        }
        let running = (0..workers.len() as u32).collect();
        (observation, Decision { eligible_rows: running, ..Decision::default() })
    }

    fn booked() -> RouteRequest<'static> {
        let book = Some(BookingRequest { request_id: "r", attempt: 0 });
        RouteRequest { book, ..RouteRequest::new(SpaceId(0), Prompt::Tokens(&[])) }
    }

    #[test]
    fn a_request_waits_while_no_eligible_worker_has_room() {
        let (observation, mut decision) = facts(&[(51, 2), (80, 3), (0, 9)]);
        assert_eq!(QUEUE.wait(&booked(), &observation, &decision, 7), None);
        decision.eligible_rows.pop();
        let wait = QUEUE.wait(&booked(), &observation, &decision, 7).expect("it waits");
        assert_eq!(wait.workers, [WorkerIndex(0), WorkerIndex(1)]);
        let Claim { discipline, deadline_ns, ends_ns, prefill_tokens, .. } = wait.claim;
        assert_eq!((discipline, deadline_ns, ends_ns), (Discipline::Wspt, None, 2_000_007));
        assert_eq!(prefill_tokens, 165 - 3 * 16, "of the eligible worker that holds most");
        let (at_the_mark, decision) = facts(&[(50, 0)]);
        assert_eq!(QUEUE.wait(&booked(), &at_the_mark, &decision, 7), None);
    }

    #[test]
    fn a_request_brings_its_deadline_and_questions_never_wait() {
        let (observation, decision) = facts(&[(100, 0)]);
        let urgent = RouteRequest { deadline_us: 3, priority: 2, priority_jump: 0.5, ..booked() };
        let claim = QUEUE.wait(&urgent, &observation, &decision, 7).expect("it waits").claim;
        assert_eq!((claim.deadline_ns, claim.ends_ns, claim.priority, claim.jump), (Some(3007), 3007, 2, 0.5));
        let question = RouteRequest { book: None, ..booked() };
        assert_eq!(QUEUE.wait(&question, &observation, &decision, 7), None);
        assert_eq!(QueuePolicy::default().wait(&booked(), &observation, &decision, 7), None);
        assert_eq!(QUEUE.wait(&booked(), &observation, &Decision::default(), 7), None, "no worker at all");
    }
}
