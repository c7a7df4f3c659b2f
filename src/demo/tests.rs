//! What the demo shows, without its processes.

use std::collections::VecDeque;

use super::engine::PrefixCache;
use super::*;

/// Hit rate of a workload on caches of the demo's size. `pick` sees the place in the workload, what the
/// prompt would cost each engine to compute, and how many blocks the last five requests keep busy on each.
fn hit_rate(workload: &Workload, workers: usize, pick: impl Fn(usize, &[usize], &[usize]) -> usize) -> f64 {
    let capacity_blocks = workload.capacity_blocks(workers);
    let mut caches: Vec<PrefixCache> = (0..workers).map(|_| PrefixCache::new(capacity_blocks)).collect();
    let (mut cached, mut asked, mut evicted) = (0, 0, Vec::new());
    let mut running: VecDeque<(usize, usize)> = VecDeque::new();
    for index in 0..workload.requests.len() {
        let mut tokens = workload.prompt(index);
        let prompt_blocks = tokens.len() / BLOCK_TOKENS;
        tokens.extend(workload.output(index));
        let names = chain::of_tokens(&tokens);
        let missing: Vec<usize> =
            caches.iter().map(|cache| prompt_blocks - cache.depth(&names[..prompt_blocks])).collect();
        let mut busy = vec![0; workers];
        running.iter().for_each(|(place, blocks)| busy[*place] += blocks);
        let chosen = pick(index, &missing, &busy);
        running.push_back((chosen, prompt_blocks));
        if running.len() >= 5 {
            running.pop_front();
        }
        cached += prompt_blocks - missing[chosen];
        asked += prompt_blocks;
        caches[chosen].admit(&names, 0, &mut evicted).unwrap();
        caches[chosen].release(&names);
    }
    assert!(!evicted.is_empty(), "everything fits: there is nothing to show");
    cached as f64 / asked as f64
}

#[test]
fn the_workload_rewards_knowing_who_holds_what() {
    let workload = Workload::generate(1, REQUESTS_DEFAULT as usize);
    let in_turn = hit_rate(&workload, 8, |index, _, _| index % 8);
    let by_cost =
        hit_rate(&workload, 8, |_, missing, busy| (0..8).min_by_key(|place| missing[*place] + busy[*place]).unwrap());
    assert!((0.2..0.5).contains(&in_turn), "{in_turn}");
    assert!((0.55..0.95).contains(&by_cost), "{by_cost}");
}

fn fine() -> (Report, Verdict) {
    let events = EventTotals { batches: 5, blocks: 9, gaps: 0 };
    let verdict = Verdict { checked: 10, published: 5, ..Verdict::default() };
    (Report { events, ..Report::default() }, verdict)
}

#[test]
fn a_run_that_shows_something_else_is_a_failure_and_says_why() {
    let (report, verdict) = fine();
    assert!(judge(&report, &verdict).is_ok());

    let wrong = Verdict { wrong: 2, examples: vec!["request 7".to_owned()], ..verdict.clone() };
    let error = judge(&report, &wrong).unwrap_err();
    assert!(error.message().contains("2 of 10 overlaps were wrong:\n  request 7"), "{}", error.message());

    let gaps = Report { events: EventTotals { gaps: 1, ..report.events }, ..report.clone() };
    assert!(judge(&gaps, &verdict).unwrap_err().message().contains("1 gaps"));
    let lost = Report { events: EventTotals { batches: 4, ..report.events }, ..report.clone() };
    assert!(judge(&lost, &verdict).unwrap_err().message().contains("published 5 batches, the daemon applied 4"));
    assert!(judge(&report, &Verdict { published: 5, ..Verdict::default() }).is_err(), "nothing was checked");
}
