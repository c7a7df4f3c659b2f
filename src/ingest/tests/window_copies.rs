//! Second copies in a model with sliding windows beside full attention, over a block pool that behaves like vLLM's.

use std::collections::{BTreeMap, VecDeque};

use proptest::prelude::*;
use proptest::strategy::ValueTree;
use proptest::test_runner::TestRunner;
use serde_json::{Value, json};

use super::formats::say;
use super::windows::{FULL, WINDOW_TOKENS, removed, stored};
use super::{C, Options, R, Rig, SCHEME};
use crate::trust::TrustLevel;

/// Blocks of the pool that both groups share.
const POOL_BLOCKS: usize = 44;
/// Blocks of the longest shared prefix.
const PREFIX_BLOCKS: usize = 9;
/// Prompts that share nothing.
const FAMILIES: u32 = 3;
/// The last blocks of a prompt that the window group must have.
const WINDOW_BLOCKS: usize = 2;
const WINDOW: u32 = 0;
const GROUPS: [u32; 2] = [WINDOW, FULL];

/// One request.
#[derive(Clone, Debug)]
struct Request {
    family: u32,
    shared: usize,
    /// Blocks that no other prompt has.
    own: usize,
    /// Blocks computed in one step.
    chunk: usize,
    /// It may not read the cache, as with `prompt_logprobs`.
    computes_anew: bool,
    /// The engine announces the blocks that it found: `kv_cache_report_mode = "full"`.
    reports: bool,
}

/// The physical blocks of one running request, by group; `None`: the window has left the block behind.
type Tables = [Vec<Option<usize>>; 2];

/// `vllm/v1/core`: `block_pool.py` and the managers of two groups, as far as events go.
#[derive(Debug)]
struct Engine {
    names: Vec<Option<(usize, u64)>>,
    users: Vec<u32>,
    free: VecDeque<usize>,
    cached: BTreeMap<(usize, u64), Vec<usize>>,
    running: VecDeque<Tables>,
    unique: u32,
    window_misses: u32,
}

impl Engine {
    fn new() -> Self {
        Self {
            names: vec![None; POOL_BLOCKS],
            users: vec![0; POOL_BLOCKS],
            free: (0..POOL_BLOCKS).collect(),
            cached: BTreeMap::new(),
            running: VecDeque::new(),
            unique: 1000,
            window_misses: 0,
        }
    }

    fn has(&self, group: usize, name: u64) -> bool {
        self.cached.contains_key(&(group, name))
    }

    /// Leading blocks that a request finds: all of them in the group of full attention, the last ones in the window.
    fn found(&self, names: &[u64]) -> usize {
        let full = names.iter().take_while(|name| self.has(1, **name)).count();
        let serves = |len: &usize| names[len.saturating_sub(WINDOW_BLOCKS)..*len].iter().all(|name| self.has(0, *name));
        (0..=full).rev().find(serves).expect("nothing is always found")
    }

    /// The batches of one request, one a step.
    fn run(&mut self, request: &Request) -> Vec<Vec<Value>> {
        let mut path = prefix(request.family, request.shared);
        path.extend((0..request.own as u32).map(|at| self.unique + at));
        self.unique += request.own as u32;
        let names = names(&path);
        // The last token is computed always.
        let findable = &names[..names.len() - 1];
        let found = if request.computes_anew { 0 } else { self.found(findable) };
        let full = findable.iter().take_while(|name| self.has(1, **name)).count();
        self.window_misses += u32::from(!request.computes_anew && found == 0 && full > 0);
        let mut events = Vec::new();
        let mut tables: Tables = std::array::from_fn(|group| {
            let behind = if group == 0 { found.saturating_sub(WINDOW_BLOCKS) } else { 0 };
            let physical = |at: usize| (at >= behind).then(|| self.cached[&(group, names[at])][0]);
            (0..found).map(physical).collect()
        });
        if request.reports && found > 0 {
            // Blocks that the window has left behind are not named.
            for (group, table) in tables.iter().enumerate() {
                let behind = table.iter().take_while(|block| block.is_none()).count();
                events.push(event(group, &names, &path, (0, found), &names[behind..found]));
            }
        }
        for block in tables.iter().flatten().flatten() {
            if self.users[*block] == 0 {
                self.free.retain(|free| free != block);
            }
            self.users[*block] += 1;
        }
        let (mut done, mut batches) = (found, Vec::new());
        while done < path.len() {
            let end = (done + request.chunk).min(path.len());
            self.leave_behind(&mut tables[0], done);
            if self.free.len() < 2 * (end - done) {
                break;
            }
            for (group, table) in tables.iter_mut().enumerate() {
                for name in &names[done..end] {
                    let block = self.take(&mut events);
                    self.names[block] = Some((group, *name));
                    table.push(Some(block));
                }
            }
            for (group, table) in tables.iter().enumerate() {
                for at in done..end {
                    let block = table[at].expect("just taken");
                    self.cached.entry((group, names[at])).or_default().push(block);
                }
                events.push(event(group, &names, &path, (done, end), &names[done..end]));
            }
            batches.push(std::mem::take(&mut events));
            done = end;
        }
        self.running.push_back(tables);
        batches.push(events);
        batches.retain(|events| !events.is_empty());
        batches
    }

    /// Frees blocks of the window group that no later token needs, before the next chunk.
    fn leave_behind(&mut self, table: &mut [Option<usize>], done: usize) {
        let behind = done.saturating_sub(WINDOW_BLOCKS);
        let blocks: Vec<usize> = table[..behind].iter_mut().rev().filter_map(Option::take).collect();
        self.release(blocks);
    }

    /// The block that was not used for longest, and its eviction.
    fn take(&mut self, events: &mut Vec<Value>) -> usize {
        let block = self.free.pop_front().expect("counted before");
        if let Some(of @ (group, name)) = self.names[block].take() {
            let copies = self.cached.get_mut(&of).expect("a name is of a block");
            copies.retain(|copy| *copy != block);
            if copies.is_empty() {
                self.cached.remove(&of);
            }
            events.push(removed(GROUPS[group], &[name]));
        }
        self.users[block] = 1;
        block
    }

    fn release(&mut self, blocks: impl IntoIterator<Item = usize>) {
        for block in blocks {
            self.users[block] -= 1;
            match (self.users[block], self.names[block]) {
                (0, None) => self.free.push_front(block),
                (0, Some(_)) => self.free.push_back(block),
                _ => {}
            }
        }
    }

    fn end_oldest(&mut self) {
        for table in self.running.pop_front().into_iter().flatten() {
            self.release(table.into_iter().rev().flatten());
        }
    }

    fn clear(&mut self) -> Vec<Value> {
        while !self.running.is_empty() {
            self.end_oldest();
        }
        self.names.fill(None);
        self.cached.clear();
        vec![json!({"type": "AllBlocksCleared"})]
    }
}

/// A store of the blocks from `begin` to `end` of a prompt, of which the group holds those that are named.
fn event(group: usize, names: &[u64], path: &[u32], (begin, end): (usize, usize), held: &[u64]) -> Value {
    let parent = begin.checked_sub(1).map(|last| names[last]);
    let blocks: Vec<(u64, u32)> = names.iter().copied().zip(path.iter().copied()).collect();
    let (kind, window) = [("sliding_window", Some(WINDOW_TOKENS)), ("full_attention", None)][group];
    let mut event = stored(GROUPS[group], kind, window, parent, &blocks[begin..end]);
    event["block_hashes"] = json!(held);
    event
}

fn prefix(family: u32, blocks: usize) -> Vec<u32> {
    (0..blocks as u32).map(|at| family * 100 + at + 1).collect()
}

fn names(path: &[u32]) -> Vec<u64> {
    let mut name = 1_u64;
    let next = |content: &u32| {
        name = name.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ u64::from(*content);
        name
    };
    path.iter().map(next).collect()
}

#[derive(Clone, Debug)]
enum Step {
    Run(Request),
    End,
    Clear,
}

fn steps(reports: bool) -> impl Strategy<Value = Vec<Step>> {
    let request = (0..FAMILIES, 1..=PREFIX_BLOCKS, 0_usize..4, 1_usize..8, prop::bool::weighted(0.1))
        .prop_flat_map(move |fields| (Just(fields), prop::bool::weighted(if reports { 0.3 } else { 0.0 })))
        .prop_map(|((family, shared, own, chunk, computes_anew), reports)| Request {
            family,
            shared,
            own,
            chunk,
            computes_anew,
            reports,
        });
    let step = prop_oneof![60 => request.prop_map(Step::Run), 30 => Just(Step::End), 1 => Just(Step::Clear)];
    prop::collection::vec(step, 1..100)
}

/// Runs an engine beside a worker; answers how many window misses there were.
fn run(steps: &[Step], rig: &mut Rig, always_exact: bool) -> Result<u32, TestCaseError> {
    let (mut engine, mut seq) = (Engine::new(), 0);
    for step in steps {
        let batches = match step {
            Step::End => {
                engine.end_oldest();
                continue;
            }
            Step::Clear => vec![engine.clear()],
            Step::Run(request) => {
                while engine.running.len() > 1 {
                    engine.end_oldest();
                }
                engine.run(request)
            }
        };
        for events in &batches {
            say(rig, seq, &json!(events));
            seq += 1;
        }
        let trust = rig.trust();
        for family in 0..FAMILIES {
            let path = prefix(family, PREFIX_BLOCKS);
            let (said, held) = (rig.device(&path) as usize, engine.found(&names(&path)));
            prop_assert!(said <= held, "batch {seq}: {said} said, {held} held, {trust:?}");
            let is_exact = trust.level == TrustLevel::Exact;
            prop_assert!(!is_exact || said == held, "batch {seq}: {said} said, {held} held");
            prop_assert!(is_exact || seq == 0 || !always_exact, "batch {seq}: {trust:?}");
        }
    }
    Ok(engine.window_misses)
}

fn rig(counts_copies: bool) -> Rig {
    Rig::new(&Options { scheme: Some(SCHEME), counts_copies, ..Options::default() })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 128, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn copies_of_windows_are_counted_as_the_pool_has_them(steps in steps(false)) {
        run(&steps, &mut rig(true), true)?;
    }

    #[test]
    fn without_the_setting_nothing_in_a_window_is_over_counted(steps in steps(true)) {
        run(&steps, &mut rig(false), false)?;
    }
}

#[test]
fn the_model_of_the_engine_has_window_misses() {
    let mut runner = TestRunner::deterministic();
    let mut misses = 0;
    for _ in 0..24 {
        let steps = steps(false).new_tree(&mut runner).expect("a sequence of steps").current();
        misses += run(&steps, &mut rig(true), true).expect("no answer is wrong");
    }
    assert!(misses > 0);
}

const PROMPT: [(u64, u32); 4] = [(11, 1), (12, 2), (13, 3), (14, 4)];
const QUERY: [u32; 4] = [1, 2, 3, 4];

fn both(blocks: &[(u64, u32)]) -> Value {
    let window = stored(WINDOW, "sliding_window", Some(WINDOW_TOKENS), None, blocks);
    json!([window, stored(FULL, "full_attention", None, None, blocks)])
}

#[test]
fn a_prompt_in_two_copies_of_a_window_survives_the_eviction_of_one() {
    let mut rig = rig(true);
    say(&mut rig, 0, &both(&PROMPT));
    say(&mut rig, 1, &both(&PROMPT));
    assert_eq!(rig.count(C::StoresCopied), 2);
    let evicted = json!([removed(WINDOW, &[14, 13, 12, 11]), removed(FULL, &[14, 13, 12, 11])]);
    say(&mut rig, 2, &evicted);
    assert_eq!(rig.device(&QUERY), 4);
    rig.expect(TrustLevel::Exact, &[], 2);
    say(&mut rig, 3, &json!([removed(WINDOW, &[13])]));
    assert_eq!(rig.device(&QUERY), 2);
    say(&mut rig, 4, &json!([removed(FULL, &[11])]));
    assert_eq!(rig.device(&QUERY), 0);
    rig.expect(TrustLevel::Exact, &[], 4);
}

#[test]
fn copies_in_a_window_that_wait_for_their_blocks_are_counted_each() {
    let mut rig = rig(true);
    let window = stored(WINDOW, "sliding_window", Some(WINDOW_TOKENS), None, &PROMPT);
    let full = stored(FULL, "full_attention", None, None, &PROMPT);
    say(&mut rig, 0, &json!([window, window, full, removed(WINDOW, &[14])]));
    assert_eq!(rig.device(&QUERY), 4);
    say(&mut rig, 1, &json!([removed(WINDOW, &[14])]));
    assert_eq!((rig.device(&QUERY), rig.device(&QUERY[..3])), (3, 3));
    rig.expect(TrustLevel::Exact, &[], 1);
}

#[test]
fn a_report_with_a_block_that_was_missed_counts_only_that_block_in_a_window() {
    let mut rig = rig(false);
    say(&mut rig, 0, &both(&PROMPT));
    // A copy that is not counted, and its eviction: the engine still holds all of the prompt.
    say(&mut rig, 1, &both(&PROMPT));
    say(&mut rig, 2, &json!([removed(WINDOW, &[14])]));
    rig.expect(TrustLevel::LowerBound, &[R::AmbiguousStore], 2);
    assert_eq!(rig.device(&QUERY), 3);
    say(&mut rig, 3, &both(&PROMPT));
    assert_eq!(rig.device(&QUERY), 4);
    say(&mut rig, 4, &json!([removed(WINDOW, &[13, 12, 11, 14])]));
    assert_eq!(rig.device(&QUERY), 0, "the report was no copy");
}
