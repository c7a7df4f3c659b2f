//! The worker of each prompt without the daemon, and the agreement with clients in other languages.

use std::collections::BTreeMap;

use serde_json::Value;

use super::*;
use crate::ids::{Scheme, SpaceId, Window};
use crate::protocol::{DeviceClass, Names, Prompt};
use crate::trust::Trust;

fn info(worker: Worker, weight: f64, state: WorkerState) -> WorkerInfo {
    WorkerInfo {
        worker,
        space: SpaceId(0),
        name: String::new(),
        state,
        device_class: DeviceClass::Gpu,
        weight,
        capacity_blocks: 0,
        batched_tokens_max: 0,
        taints: Vec::new(),
        trust: Trust::default(),
    }
}

fn fleet(workers: impl IntoIterator<Item = WorkerInfo>) -> Fleet {
    Fleet { workers: workers.into_iter().collect(), version: 7, instance_id: 1 }
}

fn chosen(fleet: &Fleet, request: &RouteRequest<'_>) -> Option<Worker> {
    rank(fleet, request, 4096).0.first().copied()
}

fn shares(fleet: &Fleet) -> BTreeMap<u32, u64> {
    let request = |token: &u32| (*token, chosen(fleet, &question(&[*token])).expect("a worker").id.0);
    (0..4000).map(|token| request(&token)).collect()
}

fn question(tokens: &[u32]) -> RouteRequest<'_> {
    RouteRequest::new(SpaceId(0), Prompt::of_tokens(tokens))
}

#[test]
fn a_worker_that_goes_moves_only_its_own_prompts() {
    let all = |without: u64| {
        let named = (0..8).filter(move |id| *id != without);
        fleet(named.map(|id| info(Worker::new(id, 0), 1.0, WorkerState::Ready)))
    };
    let (before, after) = (shares(&all(99)), shares(&all(5)));
    assert!(before.iter().all(|(token, worker)| after[token] == *worker || *worker == 5));
    for id in 0..8 {
        let share = before.values().filter(|worker| **worker == id).count();
        assert!((400..600).contains(&share), "an eighth of 4000 each, not {share}");
    }
}

#[test]
fn workers_are_chosen_in_proportion_to_their_weight() {
    let workers = [(1, 1.0), (2, 3.0)].map(|(id, weight)| info(Worker::new(id, 0), weight, WorkerState::Ready));
    let heavy = shares(&fleet(workers)).values().filter(|worker| **worker == 2).count();
    assert!((2850..3150).contains(&heavy), "three of four, not {heavy} of 4000");
}

#[test]
fn only_healthy_workers_that_the_request_may_have_are_chosen() {
    let mut labelled = info(Worker::new(3, 0), 1.0, WorkerState::Ready);
    labelled.taints.push("fast".into());
    let known = fleet([
        info(Worker::new(1, 0), 1.0, WorkerState::Draining),
        info(Worker::new(2, 0), 1.0, WorkerState::Down),
        labelled,
        info(Worker::new(3, 1), 1.0, WorkerState::Ready),
        info(Worker::new(4, 0), 1.0, WorkerState::Joining),
    ]);
    let plain = question(&[1]);
    let ranked = |request: &RouteRequest<'_>| {
        let (mut workers, all_down) = rank(&known, request, 4096);
        workers.sort();
        (workers, all_down)
    };
    let (a, b, c) = (Worker::new(3, 0), Worker::new(3, 1), Worker::new(4, 0));
    assert_eq!(ranked(&plain), (vec![a, b, c], false));
    let allow = [Worker::new(3, u32::MAX), Worker::new(1, 0)];
    assert_eq!(ranked(&RouteRequest { allow: Some(&allow), ..plain }), (vec![a, b], false));
    assert_eq!(ranked(&RouteRequest { pin: Some(c), ..plain }), (vec![c], false));
    assert_eq!(ranked(&RouteRequest { required_taints: Names::Listed(&["fast"]), ..plain }), (vec![a], false));
    let down = Worker::new(2, 0);
    assert_eq!(ranked(&RouteRequest { pin: Some(down), ..plain }), (vec![down], true), "no other worker is left");
    assert_eq!(ranked(&RouteRequest { pin: Some(Worker::new(1, 0)), ..plain }).0, [], "one that drains is not");
    assert_eq!(ranked(&RouteRequest { space: SpaceId(1), ..plain }).0, []);
    assert_eq!(rank(&known, &RouteRequest { candidates_max: 2, ..plain }, 4096).0.len(), 2);
}

fn numbers(value: &Value) -> Vec<u64> {
    value.as_array().into_iter().flatten().map(|number| number.as_u64().expect("a number")).collect()
}

#[test]
fn every_client_chooses_alike() {
    let vectors = include_str!("../../../tests/fixtures/fallback_vectors.json");
    let vectors: Value = serde_json::from_str(vectors).expect("JSON");
    let listed = |name: &str| vectors[name].as_array().expect("a list").clone();
    for vector in listed("costs") {
        let draw: u64 = vector["draw"].as_str().expect("a text").parse().expect("a number");
        assert_eq!(surprise(draw), vector["units"].as_u64().expect("a number"), "{vector}");
    }
    let worker = |value: &Value| {
        let numbers = numbers(value);
        Worker::new(numbers[0], u32::try_from(numbers[1]).expect("a rank"))
    };
    for vector in listed("choices") {
        let text = |name: &str| vector[name].as_str();
        let tokens: Vec<u32> = numbers(&vector["tokens"]).into_iter().map(|token| token as u32).collect();
        let hashes: Vec<u8> = listed_texts(&vector["local_hashes"]).flat_map(|hash: u64| hash.to_le_bytes()).collect();
        let prompt = match vector["block_size"].as_u64() {
            Some(block_size) => {
                let scheme = Scheme { block_size: block_size as u32, window: Window::Plain };
                let token_count = (hashes.len() / 8) as u32 * scheme.block_size;
                Prompt::LocalHashes { hashes: &hashes, scheme, token_count }
            }
            None => Prompt::of_tokens(&tokens),
        };
        let request = RouteRequest {
            lora: text("lora"),
            salt: text("salt"),
            affinity_session: text("session"),
            candidates_max: 99,
            ..RouteRequest::new(SpaceId(0), prompt)
        };
        let prefix = vector["prefix_tokens"].as_u64().expect("a number") as usize;
        assert_eq!(u64::from(key(&request, prefix)), vector["key"].as_u64().expect("a key"), "{vector}");
        let workers = vector["workers"].as_array().expect("workers").iter();
        let weighted = workers
            .map(|row| info(worker(&row["worker"]), row["weight"].as_f64().expect("a weight"), WorkerState::Ready));
        let ranked: Vec<_> = vector["ranked"].as_array().expect("workers").iter().map(worker).collect();
        assert_eq!(rank(&fleet(weighted), &request, prefix).0, ranked, "{vector}");
    }
}

/// Numbers beyond 2^53, which not every reader of JSON takes, are written as texts.
fn listed_texts(value: &Value) -> impl Iterator<Item = u64> {
    let texts = value.as_array().into_iter().flatten();
    texts.map(|text| text.as_str().expect("a text").parse().expect("a number"))
}

#[test]
fn the_cost_of_a_draw_is_its_negative_logarithm() {
    assert_eq!(surprise(0), 64 << 32);
    assert_eq!(surprise(1 << 63), 1 << 32);
    assert_eq!(surprise(3 << 62), 1_782_572_487, "log2(4/3) = 0.415037...");
    let mut before = 64 << 32;
    for at in 0..4096_u64 {
        let draw = next(at).rotate_left((at % 64) as u32) >> (at % 60);
        let exact = (64.0 - ((draw | 1) as f64).log2()) * (1_u64 << 32) as f64;
        assert!((surprise(draw) as f64 - exact).abs() < 64.0, "{draw:#x}: {} and {exact}", surprise(draw));
        let risen = surprise(at << 52);
        assert!(risen <= before, "it falls");
        before = risen;
    }
    assert_eq!(cost(1 << 63, 2.0), (1_u64 << 31) as f64);
    assert_eq!(cost(1 << 63, f64::NAN), cost(1 << 63, 1.0));
}

#[test]
fn a_key_is_of_the_session_or_of_how_the_prompt_begins() {
    let tokens: Vec<u32> = (0..100).collect();
    let request = RouteRequest::new(SpaceId(0), Prompt::of_tokens(&tokens));
    let named = |request: RouteRequest<'_>, prefix| key(&request, prefix);
    let begun = RouteRequest::new(SpaceId(0), Prompt::of_tokens(&tokens[..10]));
    assert_eq!(named(request, 10), named(begun, 10));
    assert_ne!(named(request, 0), named(begun, 0), "0 = the whole prompt");
    let session = |session| RouteRequest { affinity_session: Some(session), ..request };
    assert_eq!(named(session("123456789"), 10), 0xCBF4_3926, "the check value of CRC-32");
    assert_eq!(named(session(""), 10), named(request, 10), "no name is no session");
    assert_ne!(
        named(RouteRequest { lora: Some("x"), ..request }, 10),
        named(RouteRequest { salt: Some("x"), ..request }, 10)
    );
    let scheme = Scheme { block_size: 16, window: Window::Plain };
    let hashed = |hashes| Prompt::LocalHashes { hashes, scheme, token_count: 48 };
    let of = |hashes, prefix| named(RouteRequest::new(SpaceId(0), hashed(hashes)), prefix);
    assert_eq!(of(&[7; 24], 32), of(&[7; 16], 32));
    assert_eq!(of(&[7; 24], 1), of(&[7; 8], 0), "no less than a block");
}
