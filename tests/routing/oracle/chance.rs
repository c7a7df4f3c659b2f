//! Random choices have the right frequencies. Seeds are fixed, so that every run draws the same.

use kvrouted::ids::{Worker, WorkerIndex};
use kvrouted::load::Load;
use kvrouted::route::{Decision, Draws, Mode, Observation, Policy, RequestFacts, WorkerFacts, judge};

const DRAWS: u64 = 20_000;
/// Of the sum of squared deviations with up to four degrees of freedom, exceeded by one in a thousand.
const UNLIKELY: f64 = 18.5;

/// Workers by their requests in flight, with as many blocks to decode.
fn fleet(requests: &[u64]) -> Observation {
    let worker = |(place, requests): (usize, &u64)| WorkerFacts {
        index: WorkerIndex(place as u32),
        worker: Worker::new(place as u64, 0),
        load: Load { decode_blocks: *requests, requests: *requests, ..Load::default() },
        ..WorkerFacts::default()
    };
    let workers = requests.iter().enumerate().map(worker).collect();
    Observation {
        request: RequestFacts { block_size: 16, ..RequestFacts::default() },
        workers,
        ..Observation::default()
    }
}

/// Asserts that workers are chosen with these probabilities.
#[track_caller]
fn expect(policy: &Policy, requests: &[u64], probabilities: &[f64]) {
    let observation = fleet(requests);
    let mut counts = vec![0.0; requests.len()];
    let mut decision = Decision::default();
    for seed in 0..DRAWS {
        judge(policy, &observation, Draws::new(seed), &mut decision);
        counts[decision.candidates[0].index.0 as usize] += 1.0;
    }
    let mut deviation = 0.0;
    for (count, probability) in counts.iter().zip(probabilities) {
        let expected = probability * DRAWS as f64;
        if *probability == 0.0 {
            assert_eq!(*count, 0.0, "{counts:?}");
        } else {
            deviation += (count - expected) * (count - expected) / expected;
        }
    }
    assert!(deviation < UNLIKELY, "{deviation}: {counts:?} for {probabilities:?}");
}

#[test]
fn a_temperature_draws_by_the_published_formula() {
    for temperature in [0.1, 0.5, 1.0, 3.0] {
        let costs = [18, 10, 11, 14, 10];
        let weight = |cost: &u64| (-((*cost as f64 - 10.0) / (8.0 * temperature))).exp();
        let sum: f64 = costs.iter().map(weight).sum();
        let probabilities: Vec<_> = costs.iter().map(|cost| weight(cost) / sum).collect();
        expect(&Policy { temperature, ..Policy::default() }, &costs, &probabilities);
    }
    expect(&Policy { temperature: 0.5, ..Policy::default() }, &[4, 4, 4, 4], &[0.25; 4]);
}

#[test]
fn equals_are_drawn_alike_and_only_they() {
    for mode in [Mode::Kv, Mode::LoadAware, Mode::LeastLoaded, Mode::DeviceAwareWeighted] {
        let third = 1.0 / 3.0;
        expect(&Policy { mode, ..Policy::default() }, &[3, 2, 2, 9, 2], &[0.0, third, third, 0.0, third]);
    }
}

#[test]
fn any_is_drawn_at_random() {
    expect(&Policy { mode: Mode::Random, ..Policy::default() }, &[9, 0, 3, 1, 1], &[0.2; 5]);
}

#[test]
fn of_two_that_are_drawn_the_better_is_taken() {
    let policy = Policy { mode: Mode::PowerOfTwo, ..Policy::default() };
    // Of the six pairs of four: the best wins three, the next two, the third one.
    expect(&policy, &[5, 1, 2, 9], &[1.0 / 6.0, 3.0 / 6.0, 2.0 / 6.0, 0.0]);
    expect(&policy, &[1, 1], &[0.5, 0.5]);
    expect(&policy, &[7], &[1.0]);
}

#[test]
fn everybody_has_a_turn_whatever_is_drawn() {
    let policy = Policy { mode: Mode::RoundRobin, ..Policy::default() };
    let mut observation = fleet(&[0, 0, 0]);
    let mut decision = Decision::default();
    for turn in 0..30 {
        observation.request.round_robin_counter = turn;
        judge(&policy, &observation, Draws::new(turn * 7), &mut decision);
        assert_eq!(u64::from(decision.candidates[0].index.0), turn % 3);
    }
}
