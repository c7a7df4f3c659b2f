//! Engines' own forms of events, from bytes to overlaps.

use super::{C, Options, R, Rig, SCHEME, vllm};
use crate::event::UnknownName;
use crate::event::msgpack::tests::packed;
use crate::hash;
use crate::ids::{Scheme, ShardId, TierBlocks, Window};
use crate::index::Depths;
use crate::trust::TrustLevel;
use serde_json::{Value, json};

pub(super) fn say(rig: &mut Rig, seq: u64, events: &Value) {
    rig.send_bytes(0, seq, &packed(&json!([seq as f64 + 0.5, events, 0])));
}

/// A stored event in device memory, with these fields on top.
pub(super) fn stored(parent: Option<u64>, hashes: &[u64], contents: &[u32], more: &Value) -> Value {
    let mut event = json!({"type": "BlockStored", "block_hashes": hashes, "parent_block_hash": parent,
        "token_ids": vllm::tokens(contents), "block_size": SCHEME.block_size, "lora_id": null, "medium": "GPU",
        "lora_name": null});
    for (key, value) in more.as_object().unwrap() {
        event[key] = value.clone();
    }
    event
}

pub(super) fn removed(hashes: &[u64], more: &Value) -> Value {
    let mut event = json!({"type": "BlockRemoved", "block_hashes": hashes, "medium": "GPU"});
    for (key, value) in more.as_object().unwrap() {
        event[key] = value.clone();
    }
    event
}

/// A store of an offloading connector that knows only the hashes.
pub(super) fn placeholder(hashes: &[u64], medium: &str) -> Value {
    stored(None, hashes, &[], &json!({"block_size": 0, "medium": medium}))
}

pub(super) fn tiers(device: u32, host: u32, disk: u32) -> TierBlocks {
    TierBlocks { device, host, disk, external: 0 }
}

fn depth_with(rig: &Rig, scheme: Scheme, tokens: &[u32], media: &[(u32, u64)]) -> u32 {
    let mut locals = Vec::new();
    hash::local_hashes(scheme, hash::seed(None, None), hash::token_bytes(tokens), media, &mut locals);
    let mut depths = Depths::new();
    rig.reader.lookup(&locals, &mut depths);
    depths.of(ShardId(0), rig.streams[0].slot).device
}

#[test]
fn offloaded_blocks_known_by_hash_alone_are_the_blocks_held_under_it() {
    let mut rig = Rig::new(&Options::default());
    say(&mut rig, 0, &json!([stored(None, &[11, 12, 13], &[1, 2, 3], &json!({}))]));
    say(&mut rig, 1, &json!([placeholder(&[11, 12], "CPU"), placeholder(&[11, 12, 13], "DISK")]));
    rig.expect(TrustLevel::Exact, &[], 1);
    assert_eq!((rig.count(C::BlocksResolved), rig.count(C::BlocksUnresolved), rig.count(C::StoresUnusable)), (5, 0, 0));
    say(&mut rig, 2, &json!([removed(&[11, 12, 13], &json!({}))]));
    assert_eq!(rig.depth(0, &[1, 2, 3]), tiers(0, 2, 1));
    say(&mut rig, 3, &json!([removed(&[12], &json!({"medium": "CPU"}))]));
    assert_eq!(rig.depth(0, &[1, 2, 3]), tiers(0, 1, 2));
    rig.expect(TrustLevel::Exact, &[], 3);
    say(&mut rig, 4, &json!([removed(&[12], &json!({"medium": "DISK"}))]));
    // Nothing holds 12 any more, and nothing ever held 99.
    say(&mut rig, 5, &json!([placeholder(&[12, 13, 99], "CPU")]));
    rig.expect(TrustLevel::LowerBound, &[R::OffloadUnbound], 5);
    assert_eq!((rig.count(C::BlocksResolved), rig.count(C::BlocksUnresolved), rig.count(C::StoresUnusable)), (6, 2, 1));
    assert_eq!(rig.depth(0, &[1, 2, 3]), tiers(0, 1, 0));
}

#[test]
fn a_placeholder_in_any_order_keeps_salt_and_references() {
    let mut rig = Rig::new(&Options::default());
    let salted = json!({"extra_keys": [["s"], null, null]});
    say(&mut rig, 0, &json!([stored(None, &[11, 12, 13], &[1, 2, 3], &salted)]));
    say(&mut rig, 1, &json!([placeholder(&[11, 13, 12], "CPU"), placeholder(&[12], "CPU")]));
    say(&mut rig, 2, &json!([removed(&[13, 12, 11], &json!({})), removed(&[12], &json!({"medium": "CPU"}))]));
    assert_eq!(rig.depth_under(0, &[1, 2, 3], None, Some("s")), tiers(0, 3, 0), "12 was there twice");
    assert_eq!(rig.depth(0, &[1, 2, 3]), TierBlocks::default());
    rig.expect(TrustLevel::Exact, &[], 2);
}

#[test]
fn blocks_that_are_left_out_of_a_chain_are_not_guessed_from_their_place() {
    let mut rig = Rig::new(&Options::default());
    let masked = |medium: &str| json!({"token_ids": vllm::tokens(&[1, 2, 3]), "medium": medium});
    say(&mut rig, 0, &json!([stored(None, &[11], &[1], &json!({})), stored(None, &[11, 13], &[], &masked("CPU"))]));
    rig.expect(TrustLevel::LowerBound, &[R::OffloadUnbound], 0);
    assert_eq!((rig.count(C::BlocksResolved), rig.count(C::BlocksUnresolved)), (1, 1));
    say(&mut rig, 1, &json!([stored(Some(11), &[], &[2], &json!({})), removed(&[11], &json!({}))]));
    assert_eq!(rig.depth(0, &[1, 2, 3]), tiers(0, 1, 0));
}

#[test]
fn every_group_of_main_attention_must_have_a_block_and_the_others_need_not() {
    let mut rig = Rig::new(&Options::default());
    let group = |group: u32, kind: &str| json!({"group_idx": group, "kv_cache_spec_kind": kind});
    let all = |group: &Value| stored(None, &[11, 12, 13], &[1, 2, 3], group);
    say(&mut rig, 0, &json!([all(&group(1, "full_attention"))]));
    rig.expect(TrustLevel::Exact, &[], 0);
    say(&mut rig, 1, &json!([stored(None, &[11, 12], &[1, 2], &group(0, "mla_attention"))]));
    assert_eq!(rig.device(&[1, 2, 3]), 2);
    rig.expect(TrustLevel::Exact, &[], 1);
    say(&mut rig, 2, &json!([all(&group(2, "cross_attention")), all(&group(3, "sliding_window"))]));
    rig.expect(TrustLevel::Unproven, &[R::Hybrid], 2);
    say(&mut rig, 3, &json!([removed(&[11], &json!({"group_idx": 2})), removed(&[12], &json!({"group_idx": 0}))]));
    assert_eq!(rig.device(&[1, 2, 3]), 1);
    assert_eq!(rig.count(C::EventsOtherGroup), 3, "a removal does not say what its group serves; it is remembered");
    let names: Vec<_> = rig.streams[0].view.unknown_names.iter().collect();
    assert_eq!(names, [(UnknownName::GroupKind, "cross_attention", 1), (UnknownName::GroupKind, "sliding_window", 1)]);
}

#[test]
fn counted_blocks_of_a_group_can_be_removed_whatever_its_later_kind() {
    let mut rig = Rig::new(&Options::default());
    say(&mut rig, 0, &json!([stored(None, &[11, 12, 13], &[1, 2, 3], &json!({}))]));
    let window = json!({"kv_cache_spec_kind": "sliding_window"});
    say(&mut rig, 1, &json!([stored(Some(13), &[14], &[4], &window)]));
    rig.expect(TrustLevel::Unproven, &[R::Hybrid], 1);
    assert_eq!((rig.device(&[1, 2, 3, 4]), rig.count(C::EventsOtherGroup)), (3, 1));
    say(&mut rig, 2, &json!([removed(&[12], &json!({}))]));
    assert_eq!(rig.device(&[1, 2, 3, 4]), 1);
}

#[test]
fn a_group_of_an_unknown_kind_can_only_lower_an_overlap() {
    let mut rig = Rig::new(&Options::default());
    let group = |group: u32, kind: &str| json!({"group_idx": group, "kv_cache_spec_kind": kind});
    say(&mut rig, 0, &json!([stored(None, &[11, 12], &[1, 2], &group(0, "full_attention"))]));
    say(&mut rig, 1, &json!([stored(None, &[11], &[1], &group(1, "unknown"))]));
    rig.expect(TrustLevel::Unproven, &[R::Hybrid], 1);
    assert_eq!(rig.device(&[1, 2]), 1);
}

#[test]
fn a_group_of_another_block_size_is_refused_and_the_worker_is_hybrid() {
    let mut rig = Rig::new(&Options::default());
    let group = |group: u32| json!({"group_idx": group, "kv_cache_spec_kind": "full_attention"});
    say(&mut rig, 0, &json!([stored(None, &[11, 12], &[1, 2], &group(0))]));
    let mut wide = stored(None, &[12], &[1, 2], &group(1));
    wide["block_size"] = 8.into();
    say(&mut rig, 1, &json!([wide]));
    rig.expect(TrustLevel::Unproven, &[R::Hybrid, R::SchemeMismatch], 1);
    assert_eq!(rig.device(&[1, 2]), 2);
}

#[test]
fn a_block_that_is_not_full_yet_is_counted_and_lowers_nothing() {
    let mut rig = Rig::new(&Options::default());
    say(&mut rig, 0, &json!([stored(None, &[11], &[1], &json!({}))]));
    let part = |tokens: usize| json!({"token_ids": vllm::tokens(&[2])[..tokens], "block_size": tokens});
    say(&mut rig, 1, &json!([stored(Some(11), &[91], &[], &part(2)), stored(Some(11), &[92], &[], &part(3))]));
    rig.expect(TrustLevel::Exact, &[], 1);
    assert_eq!((rig.count(C::BlocksPartial), rig.count(C::StoresSchemeMismatch), rig.device(&[1, 2])), (2, 0, 1));
    say(&mut rig, 2, &json!([removed(&[91, 92], &json!({})), stored(Some(11), &[12], &[2], &json!({}))]));
    rig.expect(TrustLevel::Exact, &[], 2);
    assert_eq!(rig.device(&[1, 2]), 2);
    say(&mut rig, 3, &json!([{"type": "AllBlocksCleared"}, stored(None, &[93], &[], &part(2))]));
    rig.expect(TrustLevel::Exact, &[], 3);

    let mut other = Rig::new(&Options { scheme: Some(SCHEME), ..Options::default() });
    say(&mut other, 0, &json!([stored(None, &[91], &[], &part(2))]));
    other.expect(TrustLevel::LowerBound, &[R::SchemeMismatch], 0);
}

#[test]
fn a_first_block_that_is_not_full_teaches_its_size_only_until_a_larger_one_comes() {
    let part = |tokens: usize| json!({"token_ids": vllm::tokens(&[9])[..tokens], "block_size": tokens});
    let size = |rig: &Rig| rig.space.scheme.get().map(|scheme| scheme.block_size);
    let mut rig = Rig::new(&Options::default());
    say(&mut rig, 0, &json!([stored(None, &[91], &[], &part(2))]));
    assert_eq!((size(&rig), rig.count(C::BlocksPartial)), (Some(2), 0));
    say(&mut rig, 1, &json!([stored(None, &[92], &[], &part(1)), stored(None, &[93], &[], &part(3))]));
    assert_eq!((size(&rig), rig.count(C::BlocksPartial)), (Some(3), 2));
    say(&mut rig, 2, &json!([stored(None, &[11, 12], &[1, 2], &json!({})), removed(&[91, 92, 93], &json!({}))]));
    rig.expect(TrustLevel::Exact, &[], 2);
    assert_eq!((size(&rig), rig.count(C::BlocksPartial), rig.device(&[1, 2])), (Some(SCHEME.block_size), 3, 2));
    assert_eq!((rig.count(C::StoresSchemeMismatch), rig.count(C::Emptied)), (0, 0));

    // A block of some size below another, or several at once, leave no doubt; nor does the operator's word.
    let wide = json!({"token_ids": vllm::tokens(&[5, 6]), "block_size": 2 * SCHEME.block_size});
    for sure in [
        json!([stored(None, &[11], &[1], &json!({})), stored(Some(11), &[12], &[2], &json!({}))]),
        json!([stored(None, &[11, 12], &[1, 2], &json!({}))]),
    ] {
        let mut rig = Rig::new(&Options::default());
        say(&mut rig, 0, &sure);
        say(&mut rig, 1, &json!([stored(None, &[31], &[], &wide)]));
        rig.expect(TrustLevel::LowerBound, &[R::SchemeMismatch], 1);
        assert_eq!((size(&rig), rig.device(&[1, 2])), (Some(SCHEME.block_size), 2));
    }
    let mut told = Rig::new(&Options { scheme: Some(SCHEME), ..Options::default() });
    say(&mut told, 0, &json!([stored(None, &[11], &[1], &json!({})), stored(None, &[31], &[], &wide)]));
    told.expect(TrustLevel::LowerBound, &[R::SchemeMismatch], 0);
}

#[test]
fn hashes_of_the_tokens_alone_are_no_places() {
    // `hash((100, 101, 102, 103))` and `hash((200, 201, 202, 203))` of CPython.
    let (first, second) = (8_987_997_706_594_399_559, 3_855_858_779_981_939_668);
    let page = |hash: i64, parent: Option<i64>, content: u32| {
        json!(["BlockStored", [hash], parent, vllm::tokens(&[content]), SCHEME.block_size, null])
    };
    let mut rig = Rig::new(&Options { salts_possible: false, ..Options::default() });
    // The second follows the first, and is announced as if it were a root.
    say(&mut rig, 0, &json!([["AllBlocksCleared"], page(first, None, 1), page(second, None, 2)]));
    rig.expect(TrustLevel::LowerBound, &[R::UnchainedHashes], 0);
    assert_eq!((rig.device(&[1]), rig.device(&[2]), rig.count(C::StoresUnchained)), (0, 0, 2));
    say(&mut rig, 1, &json!([["AllBlocksCleared"], page(77, None, 3)]));
    rig.expect(TrustLevel::LowerBound, &[R::UnchainedHashes], 1);
    assert_eq!((rig.device(&[3]), rig.count(C::StoresUnchained)), (0, 3), "for as long as the engine runs");
    rig.send_bytes(0, 0, &packed(&json!([9.5, [["AllBlocksCleared"], page(77, None, 3)], 0])));
    rig.expect(TrustLevel::Exact, &[], 0);
    assert_eq!(rig.device(&[3]), 1, "another engine runs");
}

#[test]
fn unknown_names_are_listed_one_by_one() {
    let mut rig = Rig::new(&Options::default());
    let on = |medium: &str| stored(None, &[21], &[7], &json!({"medium": medium}));
    say(
        &mut rig,
        0,
        &json!([on("TAPE"), on("tape"), on("TAPE"), ["BlockUpdateEvent", "key", []], {"type": "RemoveAllEvent"}]),
    );
    rig.expect(TrustLevel::Unproven, &[R::UnknownMedium, R::UnknownEvents], 0);
    let names: Vec<_> = rig.streams[0].view.unknown_names.iter().collect();
    let expected = [
        (UnknownName::Medium, "TAPE", 2),
        (UnknownName::Medium, "tape", 1),
        (UnknownName::Tag, "BlockUpdateEvent", 1),
        (UnknownName::Tag, "RemoveAllEvent", 1),
    ];
    assert_eq!(names, expected);
    assert_eq!((rig.count(C::EventsUnknownMedium), rig.count(C::UnknownTags)), (3, 2));
}

#[test]
fn blocks_with_media_match_only_prompts_with_the_same_media() {
    let mut rig = Rig::new(&Options::default());
    let relayed = |parent: Option<i64>, hashes: &[i64], contents: &[u32], infos: Value| {
        json!({"type": "BlockStored", "block_hashes": hashes, "parent_block_hash": parent,
            "token_ids": vllm::tokens(contents), "block_size": SCHEME.block_size, "block_mm_infos": infos})
    };
    let image = json!([null, {"mm_objects": [{"mm_hash": 123, "offsets": []}]}]);
    say(&mut rig, 0, &json!([relayed(None, &[-1, 5], &[1, 2], image)]));
    rig.expect(TrustLevel::Exact, &[], 0);
    let tokens = vllm::tokens(&[1, 2]);
    assert_eq!(depth_with(&rig, SCHEME, &tokens, &[(1, 123)]), 2);
    assert_eq!(depth_with(&rig, SCHEME, &tokens, &[]), 1);
    assert_eq!(depth_with(&rig, SCHEME, &tokens, &[(1, 124)]), 1);
    // Objects in a form without an agreed hash, and tokens that are digests: not bound, so no prompt matches.
    let native =
        stored(Some(5), &[6], &[3], &json!({"mm_keys": [[{"type": "mm_key", "hash": "00", "start_offset": 0}]]}));
    let digests = stored(Some(5), &[7], &[], &json!({"token_ids": [1, "00ff", 3, 4]}));
    say(&mut rig, 1, &json!([native, digests]));
    rig.expect(TrustLevel::LowerBound, &[R::UnknownRoot], 1);
    assert_eq!(depth_with(&rig, SCHEME, &vllm::tokens(&[1, 2, 3]), &[(1, 123)]), 2);
    assert_eq!(rig.count(C::StoresUnusable), 2);
}

#[test]
fn a_prefix_that_is_announced_again_is_not_a_second_copy_whatever_the_session() {
    let mut rig = Rig::new(&Options::default());
    let more = json!({"ownership": "fs:0", "session_id": "s-1", "locality": "LOCAL"});
    say(&mut rig, 0, &json!([stored(None, &[11, 12], &[1, 2], &more)]));
    rig.expect(TrustLevel::Exact, &[], 0);
    say(&mut rig, 1, &json!([stored(None, &[11, 12], &[1, 2], &more)]));
    rig.expect(TrustLevel::LowerBound, &[R::AmbiguousStore], 1);
    say(&mut rig, 2, &json!([removed(&[12], &more)]));
    assert_eq!(rig.device(&[1, 2]), 1);
    assert_eq!(rig.count(C::UnknownKeys), 0);
}

#[test]
fn an_adapter_without_a_name_matches_no_prompt() {
    let mut rig = Rig::new(&Options::default());
    say(
        &mut rig,
        0,
        &json!([stored(None, &[11], &[1], &json!({})), stored(None, &[12], &[2], &json!({"lora_id": 1}))]),
    );
    rig.expect(TrustLevel::LowerBound, &[R::UnknownRoot], 0);
    assert_eq!((rig.device(&[1]), rig.device(&[2]), rig.count(C::StoresUnknownRoot)), (1, 0, 1));
}

#[test]
fn pairs_are_matched_by_prompts_cut_in_pairs() {
    let mut rig = Rig::new(&Options::default());
    let tokens = [vllm::tokens(&[1, 2]), vec![900]].concat();
    let pairs: Vec<&[u32]> = tokens.windows(2).collect();
    let event = json!({"type": "BlockStored", "block_hashes": [11, 12], "parent_block_hash": null, "lora_id": null,
        "token_ids": pairs, "block_size": SCHEME.block_size, "medium": "GPU", "cache_salt": null});
    say(&mut rig, 0, &json!([event]));
    rig.expect(TrustLevel::Exact, &[], 0);
    let bigram = Scheme { window: Window::Bigram, ..SCHEME };
    assert_eq!(rig.space.scheme.get(), Some(bigram));
    assert_eq!(depth_with(&rig, bigram, &tokens, &[]), 2);
    assert_eq!(depth_with(&rig, bigram, &[&tokens[..8], &[901]].concat(), &[]), 1);
}
