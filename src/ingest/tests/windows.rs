//! Engines whose models have sliding windows beside full attention, from their events to overlaps.

use super::dump::begin_of;
use super::formats::say;
use super::{C, Options, R, Rig, SCHEME, vllm};
use crate::trust::TrustLevel;
use serde_json::{Value, json};

pub(super) const FULL: u32 = 2;

/// Tokens that a window reaches back from the next one: two blocks, and the token itself.
pub(super) const WINDOW_TOKENS: usize = 2 * vllm::BLOCK_SIZE + 1;

/// A store of a group that states its kind of attention.
pub(super) fn stored(
    group: u32,
    kind: &str,
    window: Option<usize>,
    parent: Option<u64>,
    blocks: &[(u64, u32)],
) -> Value {
    let hashes: Vec<u64> = blocks.iter().map(|(hash, _)| *hash).collect();
    let contents: Vec<u32> = blocks.iter().map(|(_, content)| *content).collect();
    json!({"type": "BlockStored", "block_hashes": hashes, "parent_block_hash": parent,
        "token_ids": vllm::tokens(&contents), "block_size": SCHEME.block_size, "lora_id": null, "medium": "GPU",
        "lora_name": null, "group_idx": group, "kv_cache_spec_kind": kind, "kv_cache_spec_sliding_window": window})
}

pub(super) fn full(parent: Option<u64>, blocks: &[(u64, u32)]) -> Value {
    stored(FULL, "full_attention", None, parent, blocks)
}

pub(super) fn window(group: u32, parent: Option<u64>, blocks: &[(u64, u32)]) -> Value {
    stored(group, "sliding_window", Some(WINDOW_TOKENS), parent, blocks)
}

pub(super) fn removed(group: u32, hashes: &[u64]) -> Value {
    json!({"type": "BlockRemoved", "block_hashes": hashes, "medium": "GPU", "group_idx": group})
}

pub(super) const PROMPT: [(u64, u32); 5] = [(11, 1), (12, 2), (13, 3), (14, 4), (15, 5)];
const QUERY: [u32; 5] = [1, 2, 3, 4, 5];

/// A worker that holds the prompt in two window groups, which speak first, and one of full attention.
fn holding() -> Rig {
    let mut rig = Rig::new(&Options::default());
    say(&mut rig, 0, &json!([window(0, None, &PROMPT), window(1, None, &PROMPT), full(None, &PROMPT)]));
    rig
}

#[test]
fn a_prompt_needs_of_a_window_group_only_the_last_blocks() {
    let mut rig = holding();
    rig.expect(TrustLevel::Exact, &[], 0);
    assert_eq!(rig.device(&QUERY), 5);
    say(&mut rig, 1, &json!([removed(0, &[11, 12])]));
    assert_eq!(rig.device(&QUERY), 5, "the window has left these behind");
    say(&mut rig, 2, &json!([removed(1, &[14])]));
    assert_eq!(rig.device(&QUERY), 0, "13 lacks 12 in group 0, and 11 is not there for the shorter ones");
    say(&mut rig, 3, &json!([window(1, Some(13), &[(14, 4)]), removed(1, &[15])]));
    assert_eq!(rig.device(&QUERY), 4);
    say(&mut rig, 4, &json!([removed(FULL, &[13])]));
    assert_eq!(rig.device(&QUERY), 0, "full attention has 2, which group 0 has not");
    say(&mut rig, 5, &json!([window(0, None, &[(11, 1), (12, 2)])]));
    assert_eq!(rig.device(&QUERY), 2);
    rig.expect(TrustLevel::Exact, &[], 5);
}

#[test]
fn blocks_that_a_window_leaves_out_are_known_by_their_hashes() {
    let mut rig = Rig::new(&Options::default());
    let mut masked = window(0, None, &PROMPT);
    masked["block_hashes"] = json!([14, 15]);
    // Before an event defines 14 and 15.
    say(&mut rig, 0, &json!([masked.clone(), full(None, &PROMPT)]));
    assert_eq!((rig.device(&QUERY), rig.device(&QUERY[..4])), (5, 0));
    rig.expect(TrustLevel::Exact, &[], 0);
    let mut more = window(0, Some(15), &[(16, 6), (17, 7), (18, 8)]);
    more["block_hashes"] = json!([17, 18]);
    say(&mut rig, 1, &json!([full(Some(15), &[(16, 6), (17, 7), (18, 8)]), more, removed(0, &[15])]));
    assert_eq!(rig.device(&[1, 2, 3, 4, 5, 6, 7, 8]), 8);
    assert_eq!(rig.device(&QUERY), 0);
    // Nothing of it is there: the group is known all the same.
    let mut nothing = window(1, None, &PROMPT);
    nothing["block_hashes"] = json!([]);
    say(&mut rig, 2, &json!([nothing]));
    assert_eq!(rig.device(&[1, 2, 3, 4, 5, 6, 7, 8]), 0);
    rig.expect(TrustLevel::Exact, &[], 2);
}

#[test]
fn a_block_removed_before_it_is_known_is_not_held() {
    let mut rig = Rig::new(&Options::default());
    let mut masked = window(0, None, &PROMPT);
    masked["block_hashes"] = json!([14, 15]);
    say(&mut rig, 0, &json!([masked.clone(), removed(0, &[14]), full(None, &PROMPT)]));
    assert_eq!((rig.device(&QUERY), rig.count(C::RemovesUnknown)), (0, 0));
    say(&mut rig, 1, &json!([{"type": "AllBlocksCleared"}, masked, {"type": "AllBlocksCleared"}, full(None, &PROMPT)]));
    assert_eq!(rig.device(&QUERY), 0, "a clear forgets what waits, and not which groups there are");
    rig.expect(TrustLevel::Exact, &[], 1);
}

#[test]
fn a_cleared_worker_still_has_its_windows() {
    let mut rig = holding();
    say(&mut rig, 1, &json!([{"type": "AllBlocksCleared"}, full(None, &PROMPT)]));
    assert_eq!(rig.device(&QUERY), 0);
    say(&mut rig, 2, &json!([window(0, None, &PROMPT), window(1, None, &PROMPT)]));
    assert_eq!(rig.device(&QUERY), 5);
    rig.expect(TrustLevel::Exact, &[], 2);
}

#[test]
fn only_kinds_that_were_tried_against_an_engine_are_exact() {
    for (kind, window, held) in [
        ("mamba", None, 3),
        ("sliding_window_mla", Some(WINDOW_TOKENS), 3),
        ("sliding_window", None, 5),
        ("sliding_window", Some(1), 5),
        ("chunked_local_attention", None, 5),
    ] {
        let mut rig = Rig::new(&Options::default());
        let other = stored(0, kind, window, None, &PROMPT);
        say(&mut rig, 0, &json!([full(None, &PROMPT), other, removed(0, &[14, 15])]));
        say(&mut rig, 1, &json!([stored(0, kind, window, Some(14), &[(15, 5)]), removed(0, &[15, 11])]));
        assert_eq!(rig.device(&QUERY), held, "{kind} {window:?}");
        rig.expect(TrustLevel::Unproven, &[R::Hybrid], 1);
    }
}

#[test]
fn windows_of_different_reach_must_all_have_the_most() {
    let mut rig = holding();
    let far = 3 * vllm::BLOCK_SIZE + 1;
    say(&mut rig, 1, &json!([stored(3, "sliding_window", Some(far), None, &PROMPT), removed(0, &[11, 12])]));
    rig.expect(TrustLevel::Unproven, &[R::Hybrid], 1);
    assert_eq!(rig.device(&QUERY), 5);
    say(&mut rig, 2, &json!([removed(1, &[13])]));
    assert_eq!(rig.device(&QUERY), 0);
}

#[test]
fn windows_without_full_attention_hold_nothing_and_say_so() {
    let mut rig = Rig::new(&Options::default());
    say(&mut rig, 0, &json!([window(0, None, &PROMPT)]));
    assert_eq!(rig.device(&QUERY), 0);
    rig.expect(TrustLevel::Unproven, &[R::Hybrid], 0);
}

#[test]
fn a_prefix_that_a_window_says_again_is_not_counted() {
    let mut rig = holding();
    say(&mut rig, 1, &json!([removed(0, &[11, 12, 13]), removed(1, &[11, 12, 13])]));
    assert_eq!(rig.device(&QUERY), 5);
    // A report of all blocks of a request also names those that the windows have left behind.
    say(&mut rig, 2, &json!([full(None, &PROMPT), window(0, None, &PROMPT), window(1, None, &PROMPT)]));
    rig.expect(TrustLevel::LowerBound, &[R::AmbiguousStore], 2);
    assert_eq!(rig.device(&QUERY[..3]), 0);
    assert_eq!(rig.device(&QUERY), 5);
}

#[test]
fn a_window_of_another_block_size_is_refused_and_the_worker_is_hybrid() {
    let mut rig = Rig::new(&Options::default());
    let mut wide = window(0, None, &[(12, 1), (13, 2)]);
    (wide["block_hashes"], wide["block_size"]) = (json!([13]), json!(2 * vllm::BLOCK_SIZE));
    say(&mut rig, 0, &json!([full(None, &PROMPT), wide]));
    rig.expect(TrustLevel::Unproven, &[R::Hybrid, R::SchemeMismatch], 0);
}

#[test]
fn another_engine_at_the_same_address_need_not_have_windows() {
    let mut rig = holding();
    say(&mut rig, 1, &json!([removed(0, &[11, 12, 13, 14, 15])]));
    assert_eq!(rig.device(&QUERY), 0);
    let mut plain = full(None, &PROMPT);
    plain["group_idx"] = json!(0);
    say(&mut rig, 0, &json!([plain]));
    assert_eq!(rig.device(&QUERY), 5);
    rig.expect(TrustLevel::Exact, &[], 0);
}

#[test]
fn a_copy_of_a_worker_with_windows_is_unproven_and_the_worker_stays_exact() {
    let mut rig = holding();
    let parts = rig.dump();
    let begin = begin_of(&parts);
    assert_eq!(begin.trust.level, TrustLevel::Unproven);
    assert!(begin.trust.reasons.iter().eq([R::Hybrid]), "{:?}", begin.trust);
    rig.expect(TrustLevel::Exact, &[], 0);
    // The engine's removals go on to be known in the worker that was dumped.
    say(&mut rig, 1, &json!([removed(1, &[15])]));
    assert_eq!(rig.device(&QUERY), 4);
    rig.expect(TrustLevel::Exact, &[], 1);
}

#[test]
fn a_loaded_copy_of_a_worker_with_windows_is_never_exact() {
    let mut rig = holding();
    let mut reader = Rig::new(&Options::default());
    reader.load(rig.dump()).expect("the dump is whole");
    assert_eq!(reader.trust().level, TrustLevel::Unproven);
    assert!(reader.trust().reasons.contains(R::Hybrid), "{:?}", reader.trust());
    say(&mut reader, 1, &json!([removed(0, &[15]), removed(1, &[15])]));
    assert_eq!(reader.trust().level, TrustLevel::Unproven);
    assert!(reader.trust().reasons.contains(R::Hybrid), "{:?}", reader.trust());
}

#[test]
fn references_that_one_store_places_are_bounded() {
    use crate::limits::WINDOW_REFERENCES_UNPLACED_MAX;
    let mut rig = Rig::new(&Options::default());
    say(&mut rig, 0, &json!([window(0, None, &[(11, 1)]), full(None, &[(11, 1)])]));
    let mut again = window(0, Some(11), &[(12, 2)]);
    again["block_hashes"] = json!(vec![12; 2 * WINDOW_REFERENCES_UNPLACED_MAX]);
    say(&mut rig, 1, &json!([again]));
    let before = rig.count(C::BlocksStored);
    say(&mut rig, 2, &json!([full(Some(11), &[(12, 2)])]));
    assert_eq!(rig.count(C::BlocksStored) - before, 1 + WINDOW_REFERENCES_UNPLACED_MAX as u64);
    rig.expect(TrustLevel::Unproven, &[R::Hybrid], 2);
}

/// As in vLLM 0.32: a copy takes the blocks that the windows of other requests have left behind, and evicts none.
#[test]
fn a_copy_that_evicts_nothing_is_no_report_where_windows_leave_blocks_behind() {
    let prompt: Vec<(u64, u32)> = (1..=12).map(|at| (u64::from(at), at)).collect();
    let names: Vec<u64> = prompt.iter().map(|(name, _)| *name).collect();
    let contents: Vec<u32> = prompt.iter().map(|(_, content)| *content).collect();
    let mut rig = Rig::new(&Options { counts_copies: true, ..Options::default() });
    let step = json!([window(0, None, &prompt[10..]), full(None, &prompt)]);
    say(&mut rig, 0, &step);
    say(&mut rig, 1, &json!([window(0, None, &[(90, 90)]), full(None, &[(90, 90)])]));
    say(&mut rig, 2, &json!([removed(0, &[90]), removed(FULL, &[90])]));
    say(&mut rig, 3, &step);
    rig.expect(TrustLevel::Exact, &[], 3);
    say(&mut rig, 4, &json!([removed(FULL, &names), removed(0, &names[10..])]));
    assert_eq!(rig.device(&contents), 12, "the first copy is still there");
    rig.expect(TrustLevel::Exact, &[], 4);
}
