//! Contrasts of small fleets.

use super::*;
use crate::fleet::WorkerState;
use crate::ids::{TierBlocks, Worker, WorkerIndex};
use crate::load::Load;
use crate::route::{Mode, Observation, Policy, RequestFacts, WorkerFacts};

fn facts(index: u32, device: u32, prefill_tokens: u64) -> WorkerFacts {
    WorkerFacts {
        index: WorkerIndex(index),
        worker: Worker::new(u64::from(index), 0),
        overlap: TierBlocks { device, ..TierBlocks::default() },
        load: Load { prefill_tokens, requests: prefill_tokens / 100, ..Load::default() },
        ..WorkerFacts::default()
    }
}

/// Worker 0 holds 8 of the 10 blocks and is busy with 5; worker 1 holds 2 and is idle; worker 2 holds none.
fn observation() -> Observation {
    let request = RequestFacts {
        prompt_tokens: 160,
        block_size: 16,
        whole_blocks: 10,
        candidates_max: 1,
        ..RequestFacts::default()
    };
    let workers = vec![facts(0, 8, 80), facts(1, 2, 0), facts(2, 0, 0)];
    Observation { request, workers, ..Observation::default() }
}

#[test]
fn a_policy_that_chooses_otherwise_is_held_to_the_choice_that_was_made() {
    let mut comparison = PolicyComparison::default();
    let (mut seen, before) = (observation(), observation());
    let mut compare = |policy: &Policy, chosen| comparison.compare(policy, &mut seen, 1, chosen);
    let kv = Policy::default();
    // 10 + 5 blocks of backlog less 8 of credit are 7, 10 less 2 are 8.
    assert_eq!(compare(&kv, Some(WorkerIndex(0))), PolicyDifference::Same);
    assert_eq!(compare(&kv, Some(WorkerIndex(1))), PolicyDifference::Other { overlap_blocks: 6, cost_regret: 1.0 });
    let less = Policy { device_credit: 0.5, ..kv };
    assert_eq!(compare(&less, Some(WorkerIndex(0))), PolicyDifference::Other { overlap_blocks: -6, cost_regret: 2.0 });
    assert_eq!(compare(&kv, None), PolicyDifference::Nobody);
    assert_eq!(seen, before, "it is as it was");
}

#[test]
fn who_is_out_of_the_running_costs_nothing_that_could_be_named() {
    let mut seen = observation();
    seen.workers[1].state = WorkerState::Draining;
    let compare = PolicyComparison::default().compare(&Policy::default(), &mut seen, 1, Some(WorkerIndex(1)));
    assert_eq!(compare, PolicyDifference::Excluded { overlap_blocks: 6 });
    seen.workers.iter_mut().for_each(|facts| facts.allowed = false);
    assert_eq!(PolicyComparison::default().compare(&Policy::default(), &mut seen, 1, None), PolicyDifference::Same);
}

#[test]
fn a_pick_says_what_is_left_to_compute() {
    let mut seen = observation();
    let pick = PolicyComparison::default().pick(&Policy::default(), &mut seen, 1).expect("somebody");
    assert_eq!((pick.index, pick.overlap_blocks, pick.prefill_tokens, pick.busy), (WorkerIndex(0), 8, 32, (80, 0)));
}

#[test]
fn workers_take_turns_under_a_policy_that_says_so() {
    let (mut seen, mut comparison) = (observation(), PolicyComparison::default());
    let policy = Policy { mode: Mode::RoundRobin, ..Policy::default() };
    let picks = [1, 2, 3, 4].map(|seed| comparison.pick(&policy, &mut seen, seed).expect("somebody").index.0);
    assert_eq!(picks, [0, 1, 2, 0]);
    assert_eq!(seen, observation());
}

#[test]
fn contrasts_add_up() {
    let mut tally = ShadowTally::default();
    for compare in [
        PolicyDifference::Same,
        PolicyDifference::Other { overlap_blocks: 6, cost_regret: 1.5 },
        PolicyDifference::Other { overlap_blocks: -2, cost_regret: 0.25 },
        PolicyDifference::Excluded { overlap_blocks: -1 },
        PolicyDifference::Nobody,
    ] {
        tally.add(compare);
    }
    assert_eq!((tally.decisions, tally.agreements, tally.disagreements, tally.excluded, tally.nobody), (5, 1, 3, 1, 1));
    assert_eq!((tally.blocks_saved, tally.blocks_lost, tally.cost_regret), (6, 3, 1.75));
    let mut twice = tally;
    twice.merge(&tally);
    assert_eq!((twice.decisions, twice.blocks_saved, twice.cost_regret), (10, 12, 3.5));
    assert_eq!(tally.counts().iter().map(|(_, _, count)| count).sum::<u64>(), 5 + 1 + 3 + 1 + 1 + 6 + 3);
}
