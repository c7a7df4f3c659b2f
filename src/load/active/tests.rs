//! The tree against a plain model, alone and beside readers.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::AtomicBool;

use proptest::prelude::*;
use rand::{RngExt, SeedableRng};
use rand_xoshiro::Xoshiro256PlusPlus;

use super::*;
use crate::ids::WorkerIndex;
use crate::limits::{ACTIVE_JOIN_BLOCKS_MAX, ACTIVE_NODE_BLOCKS_MAX, ACTIVE_PATH_NODES_MAX, ACTIVE_WORDS_MAX};

/// A prompt in flight: its space, blocks and worker, and the node it ends with.
type Prompt = (SpaceId, Vec<LocalHash>, WorkerIndex, u32);

/// Whole blocks.
fn whole(parts: u64) -> usize {
    assert!(parts.is_multiple_of(BLOCK_PARTS), "nothing weighs less");
    (parts / BLOCK_PARTS) as usize
}

/// The tree, and the prompts that it should hold.
struct CheckedTree {
    tree: ActiveTree,
    writer: ActiveWriter,
    prompts: BTreeMap<u32, Prompt>,
    next: u32,
    depths: BTreeMap<WorkerIndex, u32>,
    spare: SpareRun,
    /// Prompts whose new blocks were written before they were added.
    prepared: usize,
    /// What was asked for last, and what was seen.
    asked: Option<(SpaceId, Vec<LocalHash>, SeenDivergence)>,
}

impl CheckedTree {
    fn new() -> Self {
        let (tree, writer) = (ActiveTree::new(7, ACTIVE_WORDS_MAX), ActiveWriter::default());
        let (prompts, depths) = (BTreeMap::new(), BTreeMap::new());
        Self { tree, writer, prompts, next: 0, depths, spare: SpareRun::default(), prepared: 0, asked: None }
    }

    /// The distinct prefixes of a worker.
    fn prefixes(&self, worker: WorkerIndex) -> BTreeSet<(SpaceId, &[LocalHash])> {
        let of_worker = self.prompts.values().filter(|prompt| prompt.2 == worker);
        of_worker.flat_map(|(space, blocks, ..)| (1..=blocks.len()).map(|to| (*space, &blocks[..to]))).collect()
    }

    fn add(&mut self, space: SpaceId, blocks: Vec<LocalHash>, worker: WorkerIndex) {
        self.add_seen(space, blocks, worker, None);
    }

    fn add_seen(&mut self, space: SpaceId, blocks: Vec<LocalHash>, worker: WorkerIndex, seen: Option<&SeenDivergence>) {
        let before = self.prefixes(worker).len();
        let added = self.put_seen(space, blocks, worker, seen);
        assert_eq!(before + whole(added), self.prefixes(worker).len());
    }

    /// Adds the prompt that was asked for last, with what was seen then. Other prompts may have come and gone.
    fn add_asked(&mut self, worker: WorkerIndex) {
        if let Some((space, blocks, seen)) = self.asked.clone() {
            self.add_seen(space, blocks, worker, Some(&seen));
        }
    }

    /// As `add`, without counting the blocks of the model, which is slow if they are many.
    fn put(&mut self, space: SpaceId, blocks: Vec<LocalHash>, worker: WorkerIndex) -> u64 {
        self.put_seen(space, blocks, worker, None)
    }

    fn put_seen(
        &mut self,
        space: SpaceId,
        blocks: Vec<LocalHash>,
        worker: WorkerIndex,
        seen: Option<&SeenDivergence>,
    ) -> u64 {
        let prompt = NewPrompt { space, locals: &blocks, worker, seen };
        self.tree.prepare(&mut self.spare, &prompt);
        let before = self.spare.len;
        let placed = self.writer.add(&self.tree, &prompt, Some(&mut self.spare)).expect("there is room");
        self.prepared += usize::from(self.spare.len < before);
        self.prompts.insert(self.next, (space, blocks, worker, placed.node));
        self.next += 1;
        placed.added_parts
    }

    /// Ends the prompt that is `nth` among those in flight.
    fn end(&mut self, nth: usize) {
        let Some(&key) = self.prompts.keys().nth(nth % self.prompts.len().max(1)) else { return };
        let worker = self.prompts[&key].2;
        let before = self.prefixes(worker).len();
        let (.., node) = self.prompts.remove(&key).expect("it is there");
        let freed = self.writer.remove(&self.tree, node, worker);
        assert_eq!(before, self.prefixes(worker).len() + whole(freed));
    }

    fn transfer(&mut self, nth: usize, to: WorkerIndex) {
        let Some(&key) = self.prompts.keys().nth(nth % self.prompts.len().max(1)) else { return };
        let (.., from, node) = self.prompts[&key];
        if from == to {
            return;
        }
        let before = [from, to].map(|worker| self.prefixes(worker).len());
        let (added, freed) = self.writer.transfer(&self.tree, node, from, to).expect("there is room");
        self.prompts.entry(key).and_modify(|prompt| prompt.2 = to);
        let after = [from, to].map(|worker| self.prefixes(worker).len());
        assert_eq!(after, [before[0] - whole(freed), before[1] + whole(added)]);
    }

    /// Looks up the depth of every worker.
    fn check(&mut self, space: SpaceId, query: &[LocalHash], workers: u32) {
        let seen = self.tree.read(space, query, &mut self.depths).expect("no writer is at work");
        self.asked = Some((space, query.to_vec(), seen));
        for worker in (0..workers).map(WorkerIndex) {
            let of_worker = self.prompts.values().filter(|prompt| prompt.0 == space && prompt.2 == worker);
            let common = |blocks: &[LocalHash]| blocks.iter().zip(query).take_while(|(a, b)| a == b).count();
            let depth = of_worker.map(|(_, blocks, ..)| common(blocks)).max().unwrap_or(0);
            assert_eq!(self.depths.get(&worker).map_or(0, |blocks| *blocks as usize), depth, "{worker}");
        }
    }

    /// Every node is at least as high as the prompts below it need, and exactly so high where nothing branches.
    fn check_heights(&self) {
        for (.., node) in self.prompts.values() {
            for (nodes, (at, _)) in (1..).zip(nodes_to(&self.tree, *node)) {
                let node = self.tree.node(at);
                assert!((nodes..=ACTIVE_PATH_NODES_MAX).contains(&node.height()), "{nodes} of {}", node.height());
                match node.children() {
                    0 => assert_eq!(node.height(), 1),
                    1 => assert_eq!(node.height(), self.tree.node(node.only()).height() + 1),
                    _ => {}
                }
            }
        }
    }

    fn end_all(&mut self) {
        while let Some(&key) = self.prompts.keys().nth(self.prompts.len() / 2) {
            let Some((.., worker, node)) = self.prompts.remove(&key) else { break };
            self.writer.remove(&self.tree, node, worker);
        }
        assert_eq!(self.writer.words_used(), 0, "an empty tree takes no memory");
    }
}

#[derive(Clone, Debug)]
enum Step {
    /// Space, blocks, worker.
    Add(u32, Vec<u64>, u32),
    End(usize),
    Transfer(usize, u32),
    Ask(u32, Vec<u64>),
    AddAsked(u32),
}

const WORKERS: u32 = 6;

/// Prompts of few different runs, so that they share prefixes and diverge anywhere.
fn prompt() -> impl Strategy<Value = Vec<u64>> {
    let run = (0..3_u64, 1..12_usize).prop_map(|(block, len)| vec![block; len]);
    prop::collection::vec(run, 1..5).prop_map(|runs| runs.concat())
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        4 => (0..2_u32, prompt(), 0..WORKERS).prop_map(|(space, blocks, worker)| Step::Add(space, blocks, worker)),
        3 => any::<usize>().prop_map(Step::End),
        1 => (any::<usize>(), 0..WORKERS).prop_map(|(nth, to)| Step::Transfer(nth, to)),
        2 => (0..2_u32, prompt()).prop_map(|(space, blocks)| Step::Ask(space, blocks)),
        2 => (0..WORKERS).prop_map(Step::AddAsked),
    ]
}

fn locals(blocks: &[u64]) -> Vec<LocalHash> {
    blocks.iter().map(|block| LocalHash(*block)).collect()
}

proptest! {
    #[test]
    fn every_distinct_block_of_a_worker_counts_once(steps in prop::collection::vec(step(), 1..120)) {
        let mut checked = CheckedTree::new();
        for step in steps {
            match step {
                Step::Add(space, blocks, worker) => checked.add(SpaceId(space), locals(&blocks), WorkerIndex(worker)),
                Step::End(nth) => checked.end(nth),
                Step::Transfer(nth, to) => checked.transfer(nth, WorkerIndex(to)),
                Step::Ask(space, query) => checked.check(SpaceId(space), &locals(&query), WORKERS),
                Step::AddAsked(worker) => checked.add_asked(WorkerIndex(worker)),
            }
            checked.check_heights();
        }
        checked.end_all();
    }
}

/// Blocks `from..to` of a conversation.
/// A prompt that was not looked up.
fn unseen(locals: &[LocalHash], worker: WorkerIndex) -> NewPrompt<'_> {
    NewPrompt { space: SpaceId(0), locals, worker, seen: None }
}

fn run(conversation: u64, from: u64, to: u64) -> Vec<LocalHash> {
    (from..to).map(|block| LocalHash((conversation << 32 | block).wrapping_mul(0x9e37_79b9_7f4a_7c15))).collect()
}

#[test]
fn long_prompts_many_branches_and_many_workers() {
    let mut checked = CheckedTree::new();
    let long = ACTIVE_NODE_BLOCKS_MAX as u64 * 2 + 100;
    for (worker, to) in [(0, long), (1, long), (1, long - 200), (2, ACTIVE_JOIN_BLOCKS_MAX as u64 + 1)] {
        checked.put(SpaceId(0), run(1, 0, to), WorkerIndex(worker));
    }
    // Many prompts below one block, as below a system prompt, so that the tables grow.
    for branch in 0..300 {
        let blocks = [run(1, 0, 1), run(2 + branch, 0, 3)].concat();
        checked.put(SpaceId(0), blocks, WorkerIndex(branch as u32));
    }
    checked.check(SpaceId(0), &run(1, 0, long + 5), 300);
    checked.check(SpaceId(0), &[run(1, 0, 1), run(250, 0, 2)].concat(), 300);
    checked.check(SpaceId(1), &run(1, 0, 9), 3);
    checked.end_all();
}

#[test]
fn prompts_that_are_prefixes_of_each_other_make_a_path_of_bounded_length() {
    let prefixes = 3 * ACTIVE_PATH_NODES_MAX as u64;
    let shuffled = |seed| {
        let (mut order, mut rng) = ((1..=prefixes).collect::<Vec<_>>(), Xoshiro256PlusPlus::seed_from_u64(seed));
        (0..order.len()).for_each(|at| order.swap(at, rng.random_range(at..prefixes as usize)));
        order
    };
    // Each longer than the one before, each shorter, and in any order.
    for order in [(1..=prefixes).collect(), (1..=prefixes).rev().collect(), shuffled(1), shuffled(2)] {
        let (mut checked, worker) = (CheckedTree::new(), WorkerIndex(0));
        let add = |checked: &mut CheckedTree, prompt: &[LocalHash]| {
            checked.writer.add(&checked.tree, &unseen(prompt, worker), None)
        };
        for (key, blocks) in (0..).zip(order) {
            let prompt = run(1, 0, blocks);
            if let Some(placed) = add(&mut checked, &prompt) {
                checked.prompts.insert(key, (SpaceId(0), prompt, worker, placed.node));
            }
            if key % 64 == 0 {
                checked.check_heights();
            }
        }
        assert_eq!(checked.prompts.len(), ACTIVE_PATH_NODES_MAX, "the others count in full");
        // A prompt that ends the same way needs no more nodes, and where others have ended there is room again.
        let same = checked.prompts.values().next_back().map(|prompt| prompt.1.clone()).expect("there are some");
        let one_more = run(1, 0, prefixes + 1);
        assert_eq!([&same, &one_more].map(|prompt| add(&mut checked, prompt).is_some()), [true, false]);
        checked.end(7);
        checked.check_heights();
        assert!(add(&mut checked, &one_more).is_some());
    }
}

#[test]
fn a_worker_and_its_predecessor_in_a_place_have_depths_of_their_own() {
    let mut checked = CheckedTree::new();
    let (left, here) = (WorkerIndex::at(3, 0), WorkerIndex::at(3, 1));
    checked.add(SpaceId(0), run(1, 0, 9), left);
    checked.add(SpaceId(0), run(1, 0, 4), here);
    let mut depths = BTreeMap::new();
    assert!(checked.tree.read(SpaceId(0), &run(1, 0, 9), &mut depths).is_some());
    assert_eq!(depths, BTreeMap::from([(left, 9), (here, 4)]));
    checked.end_all();
}

#[test]
fn blocks_that_were_written_before_count_where_the_prompt_still_diverges_there() {
    let (mut checked, worker) = (CheckedTree::new(), WorkerIndex(1));
    checked.add(SpaceId(0), run(1, 0, 9), WorkerIndex(0));
    // Nothing changed since the look-up; a prompt came that diverges at the same block; one came that shares all.
    let asked = |tail: u64| [run(1, 0, 9), run(tail, 0, 20)].concat();
    let others = [None, Some([run(1, 0, 9), run(5, 0, 3)].concat()), Some([asked(3), run(6, 0, 2)].concat())];
    for (tail, (other, is_used)) in (1..).zip(others.into_iter().zip([true, true, false])) {
        checked.check(SpaceId(0), &asked(tail), 2);
        if let Some(other) = other {
            checked.add(SpaceId(0), other, WorkerIndex(0));
        }
        let (before, used) = (checked.prepared, checked.writer.words_used());
        checked.add_asked(worker);
        assert_eq!(checked.prepared - before, usize::from(is_used), "{tail}");
        assert!(!is_used || checked.writer.words_used() > used, "they count as the prompt's");
        checked.check(SpaceId(0), &asked(tail), 2);
    }
    // A run of a prompt that is longer than what is left is made under the lock.
    let long = [run(1, 0, 9), run(9, 0, u64::from(crate::limits::ACTIVE_SPARE_WORDS))].concat();
    checked.check(SpaceId(0), &long, 2);
    let before = checked.prepared;
    let seen = checked.asked.clone().map(|(.., seen)| seen);
    checked.put_seen(SpaceId(0), long, worker, seen.as_ref());
    assert_eq!(checked.prepared, before);
    checked.end_all();
}

#[test]
fn a_spare_run_leaves_half_of_all_words_to_prompts() {
    let (tree, mut writer) = (ActiveTree::new(1, memory::CHUNK_WORDS as usize), ActiveWriter::default());
    let (mut spare, mut prompts) = (SpareRun::default(), Vec::new());
    let mut add = |writer: &mut ActiveWriter, first: u64, spare: &mut SpareRun| {
        let placed = writer.add(&tree, &unseen(&run(first, 0, 1000), WorkerIndex(0)), Some(spare));
        prompts.push(placed.expect("there is room").node);
    };
    let mut first = 0;
    while writer.words_used() <= memory::CHUNK_WORDS / 2 {
        add(&mut writer, first, &mut spare);
        assert_eq!(spare.len, crate::limits::ACTIVE_SPARE_WORDS, "it is not used");
        first += 1;
    }
    // As if it was used: it is not exchanged for a full one any more.
    writer.give_back_spare(&std::mem::take(&mut spare));
    add(&mut writer, first, &mut spare);
    assert_eq!(spare.len, 0);
    for node in prompts {
        writer.remove(&tree, node, WorkerIndex(0));
    }
    assert_eq!(writer.words_used(), 0);
}

#[test]
fn the_last_words_are_those_of_the_spare_run() {
    let (tree, mut writer) = (ActiveTree::new(1, memory::CHUNK_WORDS as usize), ActiveWriter::default());
    let mut spare = SpareRun::default();
    let mut add = |first| {
        let blocks = run(first, 0, 1000);
        writer.add(&tree, &unseen(&blocks, WorkerIndex(0)), Some(&mut spare)).is_some()
    };
    let prompts = (0..).take_while(|first| add(*first)).count();
    assert_eq!(spare.len, 0, "after {prompts} prompts");
    assert!(writer.words_used() > memory::CHUNK_WORDS - 2 * 1024, "{} words are used", writer.words_used());
}

#[test]
fn a_tree_with_much_free_memory_does_not_grow_for_a_spare_run() {
    let (tree, mut writer) = (ActiveTree::new(1, 8 * memory::CHUNK_WORDS as usize), ActiveWriter::default());
    // Every second prompt ends. Each leaves a run in which another like it fits, and none is as long as a spare one.
    let blocks = |first| run(first, 0, 3832);
    let add = |first| writer.add(&tree, &unseen(&blocks(first), WorkerIndex(0)), None);
    let prompts: Vec<u32> = (0..32).map(add).map(|placed| placed.expect("there is room").node).collect();
    for node in prompts.iter().step_by(2) {
        writer.remove(&tree, *node, WorkerIndex(0));
    }
    let (before, mut spare) = (tree.bytes(), SpareRun::default());
    for first in 100..104 {
        let placed = writer.add(&tree, &unseen(&blocks(first), WorkerIndex(0)), Some(&mut spare));
        assert!(placed.is_some() && spare.len == 0);
    }
    assert_eq!(tree.bytes(), before);
}

#[test]
fn what_was_seen_of_one_prompt_is_not_used_for_another() {
    let mut checked = CheckedTree::new();
    checked.add(SpaceId(0), run(1, 0, 9), WorkerIndex(0));
    checked.check(SpaceId(0), &run(1, 0, 12), 1);
    let (space, asked, seen) = checked.asked.clone().expect("it was asked for");
    let others = [
        (space, run(1, 0, 14)),
        (space, [run(1, 0, 4), run(2, 0, 8)].concat()),
        (space, run(3, 0, 12)),
        (SpaceId(1), asked),
    ];
    for (space, blocks) in others {
        checked.add_seen(space, blocks.clone(), WorkerIndex(1), Some(&seen));
        checked.check(space, &blocks, 2);
        checked.end(1);
    }
    checked.end_all();
}

#[test]
fn a_prompt_without_room_changes_nothing() {
    let mut checked = CheckedTree::new();
    let mut refused = 0;
    for at in 0.. {
        let blocks = [run(0, 0, 10 + at % 7), run(1 + at, 0, 9_000)].concat();
        let before = checked.writer.words_used();
        let Some(placed) = checked.writer.add(&checked.tree, &unseen(&blocks, WorkerIndex(at as u32 % 50)), None)
        else {
            refused += 1;
            assert_eq!(checked.writer.words_used(), before);
            if refused == 20 {
                break;
            }
            continue;
        };
        checked.prompts.insert(at as u32, (SpaceId(0), Vec::new(), WorkerIndex(at as u32 % 50), placed.node));
    }
    for (_, (.., worker, node)) in std::mem::take(&mut checked.prompts) {
        checked.writer.remove(&checked.tree, node, worker);
    }
    checked.end_all();
}

#[test]
fn readers_beside_the_writer_see_whole_prompts() {
    let (tree, mut writer) = (ActiveTree::new(1, ACTIVE_WORDS_MAX), ActiveWriter::default());
    let done = AtomicBool::new(false);
    let (always, query) = (WorkerIndex(0), run(1, 0, 64));
    writer.add(&tree, &unseen(&run(1, 0, 40), always), None).expect("there is room");
    std::thread::scope(|scope| {
        for reader in 0..2 {
            let (tree, done, query) = (&tree, &done, &query);
            scope.spawn(move || {
                let mut depths = BTreeMap::new();
                let (mut known, mut some) = (0, 0);
                while !done.load(Ordering::Relaxed) || known == 0 {
                    if tree.read(SpaceId(0), query, &mut depths).is_none() {
                        continue;
                    }
                    known += 1;
                    assert_eq!(depths.get(&WorkerIndex(0)), Some(&40));
                    for worker in 1..8 {
                        // Worker `w` runs nothing, or 8 `w` blocks.
                        let depth = depths.get(&WorkerIndex(worker)).copied().unwrap_or(0);
                        assert!(depth == 0 || depth == 8 * worker, "{reader}: {worker} runs {depth}");
                        some += u64::from(depth > 0);
                    }
                }
                assert!(some > 0 || known < 1000, "it saw the writer's prompts");
            });
        }
        let (mut rng, mut nodes) = (Xoshiro256PlusPlus::seed_from_u64(3), [None; 8]);
        let (mut depths, mut spare) = (BTreeMap::new(), SpareRun::default());
        for _ in 0..200_000 {
            let worker = rng.random_range(1..8_usize);
            let index = WorkerIndex(worker as u32);
            nodes[worker] = match nodes[worker].take() {
                Some(node) => {
                    writer.remove(&tree, node, index);
                    None
                }
                None => {
                    // The last workers run further blocks, so that nodes split and join.
                    let tail = if worker > 5 { run(9, 0, rng.random_range(1..30)) } else { Vec::new() };
                    let blocks = [run(1, 0, 8 * worker as u64), tail].concat();
                    // Most of its blocks are written before it is added.
                    let seen = tree.read(SpaceId(0), &blocks, &mut depths);
                    let prompt = NewPrompt { seen: seen.as_ref(), ..unseen(&blocks, index) };
                    tree.prepare(&mut spare, &prompt);
                    writer.add(&tree, &prompt, Some(&mut spare)).map(|placed| placed.node)
                }
            };
        }
        done.store(true, Ordering::Relaxed);
    });
}

#[test]
fn blocks_of_one_prompt_have_its_weight_until_another_shares_them() {
    let (mut checked, worker) = (CheckedTree::new(), WorkerIndex(1));
    let half = BLOCK_PARTS / 2;
    checked.add(SpaceId(0), run(1, 0, 10), worker);
    checked.add(SpaceId(0), [run(1, 0, 4), run(2, 0, 5)].concat(), worker);
    checked.add(SpaceId(0), run(1, 0, 10), WorkerIndex(2));
    let node = checked.prompts[&1].3;
    assert_eq!(checked.writer.weigh(&checked.tree, node, worker, half), (5 * half) as i64, "four are shared");
    assert_eq!(checked.writer.weigh(&checked.tree, node, worker, half), 0, "said before");
    // When the first ends, the four shared blocks are the second's alone, and weigh less with its next report.
    assert_eq!(checked.writer.remove(&checked.tree, checked.prompts[&0].3, worker), 6 * BLOCK_PARTS);
    assert_eq!(checked.writer.weigh(&checked.tree, node, worker, half), (4 * half) as i64);
    // A third shares six blocks with the second, which get their full weight back.
    let third = [run(1, 0, 4), run(2, 0, 2), run(3, 0, 1)].concat();
    let placed = checked.writer.add(&checked.tree, &unseen(&third, worker), None).expect("there is room");
    assert_eq!(placed.added_parts, 6 * half + BLOCK_PARTS);
    assert_eq!(checked.writer.remove(&checked.tree, node, worker), 3 * half);
    assert_eq!(checked.writer.remove(&checked.tree, placed.node, worker), 7 * BLOCK_PARTS);
    assert_eq!(checked.writer.remove(&checked.tree, checked.prompts[&2].3, WorkerIndex(2)), 10 * BLOCK_PARTS);
    assert_eq!(checked.writer.words_used(), 0);
}

#[test]
fn runs_at_the_border_of_two_chunks_are_not_joined() {
    let mut checked = CheckedTree::new();
    let prompt = |blocks: u64| (1..=blocks).map(LocalHash).collect::<Vec<_>>();
    // Leaves only the last line of the first chunk free, and the lines for nodes and tables.
    let (words, room) = (&checked.tree.words, &mut checked.writer.allocator);
    let spare = room.take(words, 64).expect("room");
    let lines = memory::CHUNK_WORDS / memory::LINE_WORDS;
    for _ in 0..lines - 10 {
        room.take(words, memory::LINE_WORDS).expect("room");
    }
    room.give_back(spare, 64);
    checked.add(SpaceId(0), prompt(8), WorkerIndex(0));
    checked.add(SpaceId(0), prompt(520), WorkerIndex(0));
    checked.end(0);
    checked.check(SpaceId(0), &prompt(520), 1);
    checked.end(0);
    checked.check(SpaceId(0), &prompt(520), 1);
}
