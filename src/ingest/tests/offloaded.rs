//! Copies below device memory, as connectors announce them, and the effect of a clear on them.

use std::path::Path;

use super::formats::{placeholder, removed, say, stored, tiers};
use super::sidecar::messages;
use super::{C, Options, R, Rig, SCHEME};
use crate::hash;
use crate::ids::{ShardId, TierBlocks};
use crate::index::Depths;
use crate::trust::TrustLevel;
use serde_json::{Value, json};

const NOTHING: TierBlocks = TierBlocks { device: 0, host: 0, disk: 0, external: 0 };

/// What vLLM's offloading connector says with `self_describing_kv_events`: tokens, parent and size, and never the
/// extra keys.
fn described(parent: Option<u64>, hashes: &[u64], contents: &[u32]) -> Value {
    stored(parent, hashes, contents, &json!({"medium": "CPU", "group_idx": 0, "kv_cache_spec_kind": "full_attention"}))
}

fn on_device(parent: Option<u64>, hashes: &[u64], contents: &[u32], keys: &Value) -> Value {
    let more = json!({"extra_keys": keys, "group_idx": 0, "kv_cache_spec_kind": "full_attention"});
    stored(parent, hashes, contents, &more)
}

fn evicted(hashes: &[u64]) -> Value {
    removed(hashes, &json!({"group_idx": 0}))
}

fn offloaded_out(hashes: &[u64]) -> Value {
    removed(hashes, &json!({"medium": "CPU", "group_idx": 0}))
}

#[test]
fn an_offloaded_copy_of_a_salted_prompt_is_never_mistaken_for_a_plain_one() {
    let mut rig = Rig::new(&Options { scheme: Some(SCHEME), ..Options::default() });
    // A promotion after the eviction from device memory: the hashes are not held when the connector names them.
    say(&mut rig, 0, &json!([described(None, &[11], &[1]), described(Some(11), &[12], &[2])]));
    assert_eq!(rig.depth(0, &[1, 2]), NOTHING, "the blocks may be salted, and the event cannot say so");
    rig.expect(TrustLevel::LowerBound, &[R::OffloadUnbound], 0);
    assert_eq!(rig.count(C::BlocksUnresolved), 2);
    // Device memory defines them: the copies that were announced before count from then on.
    say(&mut rig, 1, &json!([on_device(None, &[11, 12], &[1, 2], &json!([["s"], null]))]));
    assert_eq!(rig.depth(0, &[1, 2]), NOTHING);
    assert_eq!(rig.depth_under(0, &[1, 2], None, Some("s")), tiers(2, 0, 0));
    rig.expect(TrustLevel::Exact, &[], 1);
    say(&mut rig, 2, &json!([evicted(&[12, 11])]));
    assert_eq!(rig.depth_under(0, &[1, 2], None, Some("s")), tiers(0, 2, 0));
    say(&mut rig, 3, &json!([offloaded_out(&[12])]));
    assert_eq!(rig.depth_under(0, &[1, 2], None, Some("s")), tiers(0, 1, 0));
    rig.expect(TrustLevel::Exact, &[], 3);
}

#[test]
fn device_memory_is_believed_after_its_hashes_were_offloaded() {
    let mut rig = Rig::new(&Options { scheme: Some(SCHEME), ..Options::default() });
    let image = json!([[["aa", 0]], null]);
    let named = [described(None, &[21], &[1]), described(Some(21), &[22], &[2]), described(None, &[31], &[3])];
    say(&mut rig, 0, &json!(named));
    say(
        &mut rig,
        1,
        &json!([on_device(None, &[21, 22], &[1, 2], &image), on_device(None, &[31], &[3], &json!([["t"]]))]),
    );
    assert_eq!((rig.depth(0, &[1, 2]), rig.depth(0, &[3])), (NOTHING, NOTHING));
    assert_eq!(rig.depth_under(0, &[3], None, Some("t")).device, 1, "not refused as a conflict");
    assert_eq!(rig.count(C::StoresHashConflict), 0);
    rig.expect(TrustLevel::Exact, &[], 1);
}

#[test]
fn a_copy_that_goes_before_it_is_known_leaves_nothing_behind() {
    let mut rig = Rig::new(&Options { scheme: Some(SCHEME), ..Options::default() });
    let named = [described(None, &[11], &[1]), described(Some(11), &[12], &[2]), placeholder(&[12], "CPU")];
    say(&mut rig, 0, &json!(named));
    say(&mut rig, 1, &json!([offloaded_out(&[11, 12])]));
    rig.expect(TrustLevel::LowerBound, &[R::OffloadUnbound], 1);
    say(&mut rig, 2, &json!([offloaded_out(&[12])]));
    rig.expect(TrustLevel::Exact, &[], 2);
    assert_eq!(rig.count(C::RemovesUnknown), 0);
    say(&mut rig, 3, &json!([on_device(None, &[11, 12], &[1, 2], &json!(null)), evicted(&[12, 11])]));
    assert_eq!(rig.depth(0, &[1, 2]), NOTHING);
    rig.expect(TrustLevel::Exact, &[], 3);
}

#[test]
fn a_store_that_never_announces_removals_is_left_out() {
    for medium in ["cpu", "STORAGE", "FS", "OBJ"] {
        let mut rig = Rig::new(&Options::default());
        say(&mut rig, 0, &json!([on_device(None, &[11, 12], &[1, 2], &json!(null))]));
        rig.expect(TrustLevel::Exact, &[], 0);
        say(&mut rig, 1, &json!([stored(None, &[11], &[1], &json!({"medium": medium})), evicted(&[12, 11])]));
        assert_eq!(rig.depth(0, &[1, 2]), NOTHING, "{medium}");
        rig.expect(TrustLevel::LowerBound, &[R::LowerTiersUnknown], 1);
        assert_eq!(rig.count(C::EventsNeverRemoved), 1, "{medium}");
    }
    // A tier that names its owner announces removals.
    let mut rig = Rig::new(&Options::default());
    let owned = json!({"medium": "STORAGE", "ownership": "kvcr"});
    say(&mut rig, 0, &json!([on_device(None, &[11], &[1], &json!(null)), stored(None, &[11], &[1], &owned)]));
    say(&mut rig, 1, &json!([evicted(&[11])]));
    assert_eq!(rig.depth(0, &[1]), tiers(0, 0, 1));
    say(&mut rig, 2, &json!([removed(&[11], &owned)]));
    assert_eq!(rig.depth(0, &[1]), NOTHING);
    rig.expect(TrustLevel::Exact, &[], 2);
}

#[test]
fn device_memory_overrides_another_tiers_block_of_a_hash() {
    let mut rig = Rig::new(&Options { scheme: Some(SCHEME), ..Options::default() });
    // A tier that is taken at its word, and was wrong about the salt.
    let host = json!({"medium": "CPU_PINNED"});
    say(&mut rig, 0, &json!([stored(None, &[11, 12], &[1, 2], &host)]));
    assert_eq!(rig.depth(0, &[1, 2]), tiers(0, 2, 0));
    say(&mut rig, 1, &json!([stored(None, &[11, 12], &[1, 2], &json!({"cache_salt": "s"}))]));
    assert_eq!((rig.depth(0, &[1, 2]), rig.count(C::BlocksRebound)), (NOTHING, 2));
    assert_eq!(rig.depth_under(0, &[1, 2], None, Some("s")), tiers(2, 0, 0));
    rig.expect(TrustLevel::LowerBound, &[R::HashConflict], 1);
    say(&mut rig, 2, &json!([removed(&[12, 11], &json!({}))]));
    assert_eq!(rig.depth_under(0, &[1, 2], None, Some("s")), tiers(0, 2, 0), "the copies are of the same blocks");
    say(&mut rig, 3, &json!([stored(None, &[11], &[1], &json!({"cache_salt": "s"}))]));
    say(&mut rig, 4, &json!([stored(None, &[11], &[9], &json!({}))]));
    assert_eq!(rig.depth(0, &[9]), NOTHING, "device memory does not win over itself");
    assert_eq!(rig.count(C::StoresHashConflict), 1);
}

#[test]
fn references_are_bound_to_another_block_once() {
    let mut rig = Rig::new(&Options { scheme: Some(SCHEME), ..Options::default() });
    let copies = 2_000;
    say(&mut rig, 0, &json!([stored(None, &[11], &[1], &json!({})), placeholder(&vec![11; copies], "CPU")]));
    assert_eq!((rig.depth(0, &[1]), rig.count(C::BlocksStored)), (tiers(1, 0, 0), 1 + copies as u64));
    let moved = |contents: u32| [removed(&[11], &json!({})), stored(None, &[11], &[contents], &json!({}))];
    say(&mut rig, 1, &json!(moved(2)));
    rig.expect(TrustLevel::LowerBound, &[R::HashConflict], 1);
    say(&mut rig, 2, &json!([removed(&[11], &json!({}))]));
    assert_eq!((rig.depth(0, &[1]), rig.depth(0, &[2])), (NOTHING, tiers(0, 1, 0)));
    // However often the block changes, the references do not move again.
    let again: Vec<Value> = (3..1_003).flat_map(moved).collect();
    say(&mut rig, 3, &json!(again));
    rig.expect(TrustLevel::LowerBound, &[R::HashConflict, R::LowerTiersUnknown], 3);
    assert_eq!(rig.count(C::BlocksRebound), 2);
    assert_eq!(rig.count(C::BlocksStored), 1 + 2 * copies as u64 + 1 + 1_000);
    assert_eq!(rig.depth(0, &[1_002]), tiers(1, 0, 0));
    say(&mut rig, 4, &json!([removed(&[11], &json!({}))]));
    assert_eq!(rig.depth(0, &[1_002]), NOTHING);
    // New references count, and a clear lets them move once more.
    say(
        &mut rig,
        5,
        &json!([stored(None, &[11], &[7], &json!({})), placeholder(&[11], "CPU"), removed(&[11], &json!({}))]),
    );
    assert_eq!(rig.depth(0, &[7]), tiers(0, 1, 0));
    say(&mut rig, 6, &json!([stored(None, &[11], &[8], &json!({})), removed(&[11], &json!({}))]));
    assert_eq!((rig.depth(0, &[7]), rig.depth(0, &[8])), (NOTHING, NOTHING));
    let clear = json!({"type": "AllBlocksCleared"});
    let host = placeholder(&[11], "CPU");
    say(&mut rig, 7, &json!([clear, stored(None, &[11], &[7], &json!({})), host]));
    say(&mut rig, 8, &json!([moved(8)[0], moved(8)[1], moved(8)[0]]));
    assert_eq!((rig.depth(0, &[7]), rig.depth(0, &[8])), (NOTHING, tiers(0, 1, 0)));
}

#[test]
fn chunks_of_several_blocks_that_name_only_their_last_are_not_exact() {
    let mut rig = Rig::new(&Options::default());
    say(&mut rig, 0, &json!([on_device(None, &[11, 12, 13, 14], &[1, 2, 3, 4], &json!(null))]));
    say(&mut rig, 1, &json!([placeholder(&[12], "CPU"), placeholder(&[14], "CPU")]));
    rig.expect(TrustLevel::LowerBound, &[R::LowerTiersUnknown], 1);
    let mut rig = Rig::new(&Options::default());
    say(&mut rig, 0, &json!([on_device(None, &[11, 12], &[1, 2], &json!(null))]));
    say(&mut rig, 1, &json!([placeholder(&[11], "CPU"), placeholder(&[12], "CPU")]));
    rig.expect(TrustLevel::Exact, &[], 1);
}

#[test]
fn a_connector_may_name_the_blocks_of_a_request_in_any_order() {
    let on_device = on_device(None, &[11, 12, 13], &[1, 2, 3], &json!(null));
    // vLLM keeps the blocks of a transfer in a set.
    let whole = [described(Some(12), &[13], &[3]), described(None, &[11], &[1]), described(Some(11), &[12], &[2])];
    let by_hash = [placeholder(&[13], "CPU"), placeholder(&[11], "CPU"), placeholder(&[12], "CPU")];
    for named in [whole, by_hash] {
        let mut rig = Rig::new(&Options { scheme: Some(SCHEME), ..Options::default() });
        say(&mut rig, 0, &json!([on_device]));
        say(&mut rig, 1, &json!(named));
        rig.expect(TrustLevel::Exact, &[], 1);
        say(&mut rig, 2, &json!([evicted(&[13, 12, 11])]));
        assert_eq!(rig.depth(0, &[1, 2, 3]), tiers(0, 3, 0));
        // The same if device memory defines them only later.
        let mut rig = Rig::new(&Options { scheme: Some(SCHEME), ..Options::default() });
        say(&mut rig, 0, &json!(named));
        say(&mut rig, 1, &json!([on_device]));
        rig.expect(TrustLevel::Exact, &[], 1);
    }
}

/// vLLM's offloading connector with `blocks_per_chunk` above 1 loads a chunk whole or not at all.
#[test]
fn a_chunk_of_several_blocks_may_be_of_no_use_to_a_prompt_that_parts_in_it() {
    let mut rig = Rig::new(&Options { scheme: Some(SCHEME), ..Options::default() });
    say(&mut rig, 0, &json!([on_device(None, &[11, 12, 13, 14], &[1, 2, 3, 4], &json!(null))]));
    rig.expect(TrustLevel::Exact, &[], 0);
    say(&mut rig, 1, &json!([described(None, &[11, 12], &[1, 2]), described(Some(12), &[13, 14], &[3, 4])]));
    say(&mut rig, 2, &json!([evicted(&[14, 13, 12, 11])]));
    assert_eq!(rig.depth(0, &[1, 2, 3, 9]), tiers(0, 3, 0), "the engine finds two");
    rig.expect(TrustLevel::Unproven, &[R::LookaheadHash], 2);
    // Of a chunk without tokens only the last block is named.
    say(&mut rig, 3, &json!([placeholder(&[12], "CPU")]));
    rig.expect(TrustLevel::Unproven, &[R::LookaheadHash, R::LowerTiersUnknown], 3);
}

#[test]
fn references_to_undefined_blocks_are_bounded() {
    use crate::limits::OFFLOADED_UNBOUND_REFERENCES_MAX;
    let mut rig = Rig::new(&Options { scheme: Some(SCHEME), ..Options::default() });
    let hashes: Vec<u64> = (1..=OFFLOADED_UNBOUND_REFERENCES_MAX as u64 + 1).collect();
    say(&mut rig, 0, &json!([placeholder(&hashes, "CPU")]));
    rig.expect(TrustLevel::LowerBound, &[R::OffloadUnbound, R::LowerTiersUnknown], 0);
    say(&mut rig, 1, &json!([offloaded_out(&hashes)]));
    rig.expect(TrustLevel::LowerBound, &[R::LowerTiersUnknown], 1);
}

#[test]
fn references_that_one_store_settles_are_bounded() {
    use crate::limits::OFFLOADED_UNBOUND_REFERENCES_MAX;
    let mut rig = Rig::new(&Options { scheme: Some(SCHEME), ..Options::default() });
    say(&mut rig, 0, &json!([placeholder(&vec![11; 2 * OFFLOADED_UNBOUND_REFERENCES_MAX], "CPU")]));
    rig.expect(TrustLevel::LowerBound, &[R::OffloadUnbound, R::LowerTiersUnknown], 0);
    say(&mut rig, 1, &json!([on_device(None, &[11], &[1], &json!(null)), evicted(&[11])]));
    assert_eq!(rig.count(C::BlocksStored), 1 + OFFLOADED_UNBOUND_REFERENCES_MAX as u64);
    assert_eq!(rig.depth(0, &[1]), tiers(0, 1, 0));
    // References that were forgotten are missed when they are taken back, and not the other way round.
    say(&mut rig, 2, &json!([offloaded_out(&vec![11; OFFLOADED_UNBOUND_REFERENCES_MAX])]));
    assert_eq!(rig.depth(0, &[1]), NOTHING);
    rig.expect(TrustLevel::LowerBound, &[R::LowerTiersUnknown], 2);
}

#[test]
fn a_clear_speaks_of_device_memory_and_not_of_a_connector_s_pool() {
    let mut rig = Rig::new(&Options::default());
    let offloaded = [described(None, &[11], &[1]), described(Some(11), &[12], &[2])];
    let both = json!([on_device(None, &[11, 12], &[1, 2], &json!(null)), offloaded[0], offloaded[1]]);
    say(&mut rig, 0, &both);
    rig.expect(TrustLevel::Exact, &[], 0);
    let clear = json!({"type": "AllBlocksCleared"});
    say(&mut rig, 1, &json!([clear]));
    // The pool may hold them still, and may have been emptied with it: nothing tells.
    assert_eq!(rig.depth(0, &[1, 2]), NOTHING);
    rig.expect(TrustLevel::LowerBound, &[R::LowerTiersUnknown], 1);
    say(&mut rig, 2, &json!([clear, on_device(None, &[11], &[1], &json!(null))]));
    rig.expect(TrustLevel::LowerBound, &[R::LowerTiersUnknown], 2);
    say(&mut rig, 0, &json!([on_device(None, &[21], &[7], &json!(null))]));
    rig.expect(TrustLevel::Exact, &[], 0);
}

#[test]
fn a_clear_after_a_late_join_is_exact_until_another_tier_appears() {
    let mut rig = Rig::new(&Options::default());
    say(&mut rig, 7, &json!([on_device(None, &[11], &[1], &json!(null))]));
    say(&mut rig, 8, &json!([{"type": "AllBlocksCleared"}, on_device(None, &[11], &[1], &json!(null))]));
    rig.expect(TrustLevel::Exact, &[], 8);
    say(&mut rig, 9, &json!([placeholder(&[11], "CPU")]));
    rig.expect(TrustLevel::LowerBound, &[R::LowerTiersUnknown], 9);
}

#[test]
fn a_clear_of_sglang_speaks_of_its_host_tier_too() {
    let mut rig = Rig::new(&Options::default());
    let host = json!({"medium": "CPU_PINNED"});
    say(&mut rig, 3, &json!([stored(None, &[11], &[1], &json!({})), stored(None, &[11], &[1], &host)]));
    rig.expect(TrustLevel::LowerBound, &[R::JoinedLate], 3);
    say(&mut rig, 4, &json!([{"type": "AllBlocksCleared"}, stored(None, &[12], &[2], &host)]));
    rig.expect(TrustLevel::Exact, &[], 4);
    assert_eq!((rig.depth(0, &[1]), rig.depth(0, &[2])), (NOTHING, tiers(0, 1, 0)));
}

/// Events recorded from vLLM's own connector and block pool: `tests/fixtures/events/README.md`.
#[test]
fn of_a_recorded_connector_only_the_hashes_are_used() {
    let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/events");
    let mut rig = Rig::new(&Options { scheme: Some(SCHEME), ..Options::default() });
    let mut seen = Vec::new();
    for message in messages(&fixtures.join("vllm_0_33_offloading.bin")) {
        rig.send_bytes(0, message.seq, &message.payload);
        let of = |lora, salt| {
            let depth = recorded_depth(&rig, lora, salt);
            (depth.device, depth.host)
        };
        seen.push((of(None, None), of(None, Some("tenant")), of(Some("adapter-1"), None), rig.trust().level));
    }
    let (nothing, exact, lower) = ((0, 0), TrustLevel::Exact, TrustLevel::LowerBound);
    let expected = [
        // The salted prompt is offloaded before device memory defines it.
        (nothing, nothing, nothing, lower),
        ((3, 0), nothing, nothing, lower),
        ((3, 0), (3, 0), nothing, exact),
        ((3, 0), (3, 0), (3, 0), exact),
        // All three are in the connector's pool, and device memory evicts them.
        ((3, 0), (3, 0), (3, 0), exact),
        ((0, 3), (0, 3), (0, 3), exact),
        ((0, 2), (0, 3), (0, 3), exact),
        // A copy in storage, and a clear that does not speak of the pool.
        ((0, 2), (0, 3), (0, 3), lower),
    ];
    assert_eq!(seen[..expected.len()], expected);
    assert!(seen.len() == 9 && seen[8].3 != TrustLevel::Exact, "{:?}", seen[8]);
    assert_eq!((rig.count(C::StoresHashConflict), rig.count(C::RemovesUnknown)), (0, 0));
}

fn recorded_depth(rig: &Rig, lora: Option<&str>, salt: Option<&str>) -> TierBlocks {
    let tokens: Vec<u32> = (100..112).collect();
    let mut locals = Vec::new();
    hash::local_hashes(SCHEME, hash::seed(lora, salt), hash::token_bytes(&tokens), &[], &mut locals);
    let mut depths = Depths::new();
    rig.reader.lookup(&locals, &mut depths);
    depths.of(ShardId(0), rig.streams[0].slot)
}
