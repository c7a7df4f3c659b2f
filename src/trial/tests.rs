//! Trials on decisions of a small fleet.

use super::*;
use crate::ids::{SpaceId, TierBlocks, Worker, WorkerIndex};
use crate::journal::Record;
use crate::load::Load;
use crate::route::{Decision, Draws, Observation, Policy, RequestFacts, WorkerFacts, judge};
use crate::shadow::PolicyComparison;

const WORKERS: u32 = 4;

fn facts(index: u32, device: u32, prefill_tokens: u64) -> WorkerFacts {
    WorkerFacts {
        index: WorkerIndex(index),
        worker: Worker::new(u64::from(index), 0),
        overlap: TierBlocks { device, ..TierBlocks::default() },
        load: Load { prefill_tokens, requests: prefill_tokens / 100, ..Load::default() },
        ..WorkerFacts::default()
    }
}

/// Decisions that pay no heed to caches, though one worker holds most of each prompt.
fn records() -> (Vec<Record>, Policy) {
    let policy = Policy { device_credit: 0.0, ..Policy::default() };
    let mut decision = Decision::default();
    let record = |at: u32| {
        let request = RequestFacts { prompt_tokens: 320, block_size: 16, whole_blocks: 20, ..RequestFacts::default() };
        let worker = |index| facts(index, if at % WORKERS == index { 16 } else { 0 }, u64::from(index) * 32);
        let workers = (0..WORKERS).map(worker).collect();
        let observation = Observation { request, workers, ..Observation::default() };
        judge(&policy, &observation, Draws::new(u64::from(at)), &mut decision);
        let mut record = Record::default();
        record.copy_from((u64::from(at), SpaceId(0)), &policy, &observation, &decision);
        record
    };
    ((0..200).map(record).collect(), policy)
}

#[test]
fn a_search_finds_that_caches_are_worth_something() {
    let (mut records, policy) = records();
    let before = records.clone();
    let tuned = Search::run(&mut records, &policy, Objective::default(), 1, 120);
    assert!(tuned.best.policy.device_credit > 0.0, "{tuned:?}");
    assert!(tuned.best.tokens < tuned.before.tokens / 2.0, "{tuned:?}");
    assert_eq!((tuned.trials, tuned.before.policy), (120, policy));
    assert!(tuned.steps.is_sorted_by(|a, b| a.tokens > b.tokens), "each is better than all before");
    assert_eq!(tuned.steps.last(), Some(&tuned.best));
    assert!(tuned.best_spread.hit_rate() > tuned.before_spread.hit_rate());
    assert_eq!(records, before, "the records are as they were");
    assert_eq!(Search::run(&mut records, &policy, Objective::default(), 1, 120), tuned, "and again the same");
}

#[test]
fn the_policy_that_was_recorded_is_tried_even_if_nothing_else_may_be() {
    let (mut records, policy) = records();
    let tuned = Search::run(&mut records, &policy, Objective::default(), 1, 1);
    assert_eq!((tuned.trials, &tuned.best), (1, &tuned.before));
    let empty = Search::run(&mut [], &policy, Objective::default(), 1, 10);
    assert_eq!((empty.best.tokens, empty.best.policy), (0.0, policy));
}

#[test]
fn a_spread_says_where_prompts_go_and_what_they_find() {
    let (mut records, policy) = records();
    let (mut spread, mut comparison) = (Spread::default(), PolicyComparison::default());
    for record in &mut records {
        let pick = comparison.pick(&policy, &mut record.observation, record.outcome.seed);
        assert_eq!(pick.map(|pick| pick.index), record.outcome.chosen());
        spread.add(record.space, &record.observation, pick);
    }
    spread.add(SpaceId(0), &records[0].observation, None);
    // Worker 0 is the idlest: without credit everything goes there, and a quarter is found.
    assert_eq!((spread.picks, spread.nobody, spread.workers.len()), (200, 1, 4));
    assert_eq!((spread.overlap_blocks, spread.prefill_tokens), (50 * 16, 50 * 64 + 150 * 320));
    assert_eq!((spread.hit_rate(), spread.overlap_mean()), (0.2, 4.0));
    assert_eq!((spread.prompts_imbalance(), spread.prefill_imbalance(), spread.waiting_tokens), (4.0, 4.0, 0));
    let tokens = Objective { waiting_weight: 2.0, imbalance_weight: 0.5 }.of(&spread);
    assert_eq!(tokens, 51_200.0 + 0.5 * 3.0 * 12_800.0);
    assert_eq!((Spread::default().hit_rate(), Spread::default().prompts_imbalance()), (0.0, 1.0));
}
