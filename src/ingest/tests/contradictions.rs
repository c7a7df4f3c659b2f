//! Events that an engine may not mean as it sends them: contradictions, repetitions, reported clears.

use super::vllm::{self, BLOCK_SIZE, Batch};
use super::{C, Options, R, Rig, chain};
use crate::trust::{TrustLevel, TrustReasons};

/// A stored event of one block in short msgpack: a map with one more key, or an array of a number of fields.
pub(super) enum Shape {
    Map(&'static str, &'static [u8]),
    Array(usize),
}

pub(super) fn stored_raw(hash: u8, content: u32, shape: &Shape) -> Vec<u8> {
    let text = |text: &str| [&[0xa0 | text.len() as u8], text.as_bytes()].concat();
    let mut tokens = vec![0x90 | BLOCK_SIZE as u8];
    vllm::tokens(&[content]).iter().for_each(|token| {
        tokens.push(0xce);
        tokens.extend(token.to_be_bytes());
    });
    let nil = vec![0xc0];
    let fields = [
        ("block_hashes", vec![0x91, hash]),
        ("parent_block_hash", nil.clone()),
        ("token_ids", tokens),
        ("block_size", vec![BLOCK_SIZE as u8]),
        ("lora_id", nil.clone()),
        ("medium", nil.clone()),
        ("lora_name", nil.clone()),
        ("extra_keys", nil),
    ];
    match shape {
        Shape::Map(key, value) => {
            let mut event = vec![0x80 | (fields.len() + 2) as u8];
            event.extend([text("type"), text("BlockStored")].concat());
            fields.iter().for_each(|(key, value)| event.extend([text(key).as_slice(), value].concat()));
            event.extend([text(key).as_slice(), value].concat());
            event
        }
        Shape::Array(len) => {
            let mut event = vec![0x90 | (len + 1) as u8];
            event.extend(text("BlockStored"));
            fields.iter().take(*len).for_each(|(_, value)| event.extend(value));
            event
        }
    }
}

#[test]
fn a_block_whose_parent_is_a_contradicted_hash_is_not_placed() {
    let mut rig = Rig::new(&Options { salts_possible: false, ..Options::default() });
    rig.send(0, &chain(0).stored(None, &[21], &[8]));
    // 12 after 21, with 22 after it: neither is where 12 is held, and 13 may be either's.
    rig.send(1, &Batch::new(1).stored(Some(21), &[12, 22], &[9, 4]).stored(Some(22), &[23], &[5]));
    rig.send(2, &Batch::new(2).stored(Some(12), &[24], &[6]));
    rig.expect(TrustLevel::LowerBound, &[R::HashConflict], 2);
    assert_eq!((rig.device(&[1, 2, 6]), rig.device(&[1, 2, 3]), rig.device(&[8, 9])), (2, 3, 1));
    assert_eq!(rig.count(C::StoresHashConflict), 3);
    // Waiting for 12 would be no better: it may come back at either place.
    rig.send(3, &Batch::new(3).removed(&[13, 12]).stored(Some(12), &[24], &[6]).stored(Some(11), &[12], &[2]));
    assert_eq!(rig.device(&[1, 2, 6]), 2);
    rig.send(4, &Batch::new(4).cleared().stored(None, &[12], &[9]).stored(Some(12), &[24], &[6]));
    rig.expect(TrustLevel::Exact, &[], 4);
    assert_eq!(rig.device(&[9, 6]), 2, "after a clear the hash means one thing again");
}

#[test]
fn contradicted_hashes_beyond_the_bound_are_all_hashes() {
    use crate::ids::EngineHash;
    use crate::ingest::stream::Conflicted;
    use crate::limits::CONFLICTED_HASHES_MAX;
    let hashes: Vec<_> = (0..CONFLICTED_HASHES_MAX as u64).map(EngineHash).collect();
    let mut conflicted = Conflicted::default();
    conflicted.extend(&hashes);
    assert!(conflicted.contains(EngineHash(7)) && !conflicted.contains(EngineHash(u64::MAX)));
    conflicted.extend(&[EngineHash(u64::MAX - 1)]);
    assert!(conflicted.contains(EngineHash(u64::MAX)));
}

#[test]
fn a_group_without_a_kind_is_not_believed() {
    let mut rig = Rig::new(&Options::default());
    rig.send(0, &chain(0));
    rig.send(1, &Batch::new(1).raw(stored_raw(21, 7, &Shape::Map("group_idx", &[0]))));
    rig.expect(TrustLevel::Exact, &[], 1);
    rig.send(2, &Batch::new(2).raw(stored_raw(22, 8, &Shape::Map("group_idx", &[1]))));
    rig.expect(TrustLevel::Unproven, &[R::Hybrid], 2);
}

#[test]
fn hashes_that_cover_more_than_the_block_are_not_believed() {
    let mut rig = Rig::new(&Options::default());
    rig.send(0, &Batch::new(0).raw(stored_raw(11, 1, &Shape::Map("lookahead_token_ids", &[0x91, 0x91, 7]))));
    rig.expect(TrustLevel::Unproven, &[R::LookaheadHash], 0);
    assert_eq!(rig.device(&[1]), 1);
    rig.send(1, &Batch::new(1).cleared());
    rig.expect(TrustLevel::Unproven, &[R::LookaheadHash], 1);
}

#[test]
fn a_wire_without_a_place_for_salts_is_believed_only_where_there_are_none() {
    for salts_possible in [true, false] {
        let mut rig = Rig::new(&Options { salts_possible, ..Options::default() });
        rig.send(0, &Batch::new(0).raw(stored_raw(11, 1, &Shape::Array(6))));
        let (level, reasons): (_, &[R]) =
            if salts_possible { (TrustLevel::Unproven, &[R::IsolationUnknown]) } else { (TrustLevel::Exact, &[]) };
        rig.expect(level, reasons, 0);
        assert_eq!(rig.device(&[1]), 1);
    }
    let mut rig = Rig::new(&Options::default());
    rig.send(0, &Batch::new(0).raw(stored_raw(11, 1, &Shape::Array(8))));
    rig.expect(TrustLevel::Exact, &[], 0);
}

#[test]
fn a_salt_with_and_without_the_prefix_of_a_gateway_is_not_believed() {
    use super::formats::{say, stored};
    use serde_json::json;
    let salted = |hash: u64, content: u32, salt: &str| stored(None, &[hash], &[content], &json!({"cache_salt": salt}));
    let mut rig = Rig::new(&Options::default());
    say(&mut rig, 0, &json!([salted(11, 1, "dynamo-cache-salt:x"), salted(12, 2, "dynamo-cache-salt:y")]));
    rig.expect(TrustLevel::Exact, &[], 0);
    // To the engine `x` and `dynamo-cache-salt:x` are two salts, to a gateway they may be one.
    say(&mut rig, 1, &json!([salted(13, 3, "x")]));
    rig.expect(TrustLevel::Unproven, &[R::IsolationUnknown], 1);
    let mut rig = Rig::new(&Options::default());
    say(&mut rig, 0, &json!([salted(11, 1, "x"), salted(12, 2, "y")]));
    rig.expect(TrustLevel::Exact, &[], 0);
    say(&mut rig, 1, &json!([salted(13, 3, "dynamo-cache-salt:y")]));
    rig.expect(TrustLevel::Unproven, &[R::IsolationUnknown], 1);
}

#[test]
fn salts_of_two_forms_are_seen_over_all_workers_of_a_space() {
    use super::formats::stored;
    use crate::event::msgpack::tests::packed;
    use serde_json::json;
    let told = |hash: u64, salt: &str| {
        let event = stored(None, &[hash], &[hash as u32], &json!({"cache_salt": salt}));
        packed(&json!([0.5, [event], 0]))
    };
    let mut rig = Rig::new(&Options { workers: 3, ..Options::default() });
    rig.send_bytes(0, 0, &told(11, "x"));
    rig.send_bytes(2, 0, &chain(0).payload());
    rig.expect(TrustLevel::Exact, &[], 0);
    rig.send_bytes(1, 0, &told(12, "dynamo-cache-salt:x"));
    // The first worker may hold blocks that a prompt with the second salt must not match.
    let now = rig.now;
    for worker in 0..3 {
        rig.streams[worker].tick(0, now);
        rig.streams[worker].show(&mut rig.space);
        let trust = rig.streams[worker].view.trust.load();
        let reasons = if worker == 2 { TrustReasons::NONE } else { [R::IsolationUnknown].into_iter().collect() };
        assert_eq!(trust.reasons, reasons, "worker {worker}");
    }
}

#[test]
fn a_connection_that_breaks_is_not_believed_while_its_rest_is_taken() {
    let mut rig = Rig::new(&Options::default());
    rig.send(0, &chain(0));
    let now = rig.now;
    rig.streams[0].breaking(now);
    assert_eq!(rig.trust().level, TrustLevel::Unproven, "at once");
    rig.send(1, &Batch::new(1).stored(Some(13), &[14], &[4]));
    rig.expect(TrustLevel::Unproven, &[R::Disconnected], 1);
    let now = rig.now;
    rig.streams[0].disconnected(&mut rig.space, now);
    rig.send(0, &chain(9));
    rig.expect(TrustLevel::Exact, &[], 0);
}

#[test]
fn a_chain_repeated_in_the_batch_of_its_first_store_is_not_a_second_copy() {
    let mut rig = Rig::new(&Options::default());
    // One request stores its prompt; another of the same step finds it cached, and its cached prefix is reported.
    rig.send(0, &chain(0).stored(None, &[11, 12], &[1, 2]));
    rig.expect(TrustLevel::LowerBound, &[R::AmbiguousStore], 0);
    assert_eq!((rig.device(&[1, 2, 3]), rig.count(C::StoresAmbiguous), rig.count(C::BlocksStored)), (3, 1, 3));
    rig.send(1, &Batch::new(1).removed(&[12]));
    assert_eq!(rig.device(&[1, 2, 3]), 1, "the engine holds no other");

    // Below a root it is a second copy of a block, and so it is in the tiers of connectors.
    rig.send(
        2,
        &chain(2).cleared().stored(None, &[11], &[1]).stored(Some(11), &[12], &[2]).stored(Some(11), &[12], &[2]),
    );
    rig.send(3, &Batch::new(3).removed(&[12]));
    rig.expect(TrustLevel::Exact, &[], 3);
    assert_eq!(rig.device(&[1, 2]), 2);
    let host = |batch: Batch| batch.stored_with(None, &[11], &vllm::tokens(&[1]), vllm::BLOCK_SIZE, Some("CPU"), &[]);
    rig.send(4, &host(host(Batch::new(4))).removed(&[11]).removed_from(&[11], Some("CPU")));
    rig.expect(TrustLevel::Exact, &[], 4);
    assert_eq!(rig.depth(0, &[1]).host, 1);
}

#[test]
fn a_reported_clear_empties_the_device_at_once_and_the_published_one_proves_it() {
    let mut rig = Rig::new(&Options::default());
    let host = |batch: Batch| batch.stored_with(None, &[11], &vllm::tokens(&[1]), vllm::BLOCK_SIZE, Some("CPU"), &[]);
    rig.send(0, &host(chain(0)));
    let now = rig.now;
    rig.streams[0].device_cleared(&mut rig.space, now);
    rig.expect(TrustLevel::Unproven, &[R::ClearAwaited], 0);
    assert_eq!((rig.device(&[1, 2, 3]), rig.depth(0, &[1]).host), (0, 1), "other tiers are not of the device's cache");
    // A batch of before the clear, and then the clear, with the step after it.
    rig.send(1, &Batch::new(1).stored(None, &[21], &[7]));
    assert_eq!(rig.trust().level, TrustLevel::Unproven, "the engine does not hold it");
    rig.send(2, &Batch::new(2).cleared().stored(None, &[31], &[8]));
    rig.expect(TrustLevel::LowerBound, &[R::LowerTiersUnknown], 2);
    assert_eq!((rig.device(&[7]), rig.device(&[8]), rig.device(&[1])), (0, 1, 0));
    assert_eq!((rig.count(C::Gaps), rig.count(C::Restarts), rig.count(C::Resets)), (0, 0, 1));
    // A second report is as harmless.
    let now = rig.now;
    rig.streams[0].device_cleared(&mut rig.space, now);
    rig.streams[0].device_cleared(&mut rig.space, now);
    rig.send(3, &Batch::new(3).cleared().cleared());
    rig.expect(TrustLevel::LowerBound, &[R::LowerTiersUnknown], 3);
}
