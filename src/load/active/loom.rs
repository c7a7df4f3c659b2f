//! Readers beside the writer, under every order of accesses that the memory model allows (up to a number of
//! preemptions). The real tree in a small world: one root, small chunks, prompts of one or two blocks.
//!
//! `RUSTFLAGS="--cfg kvrouted_loom" cargo test --lib --release load::active::loom`
//!
//! What a reader may see during a change grows with each word that the change writes and the reader reads. So each
//! model is of one step of the writer, in which few are: a node is split, a prompt ends, its words are another's, a
//! table grows. The longest takes some seconds.
//!
//! Each model lists the possible answers, and checks that each of them occurs. Each model with a middle state has a
//! mutant, which must fail: its reader omits the second read, or its writer omits a fence.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::AtomicU64 as Counter;

use super::*;
use crate::ids::WorkerIndex;

const SPACE: SpaceId = SpaceId(0);
/// Preemptions of a model.
const PREEMPTIONS: usize = 2;

fn locals(blocks: &[u64]) -> Vec<LocalHash> {
    blocks.iter().map(|block| LocalHash(*block)).collect()
}

/// One writer, one reader, one look-up of one worker's depth.
struct Model {
    /// What is there before the reader begins, and the node to pass to `change`.
    before: fn(&ActiveTree, &mut ActiveWriter) -> u32,
    change: fn(&Arc<ActiveTree>, ActiveWriter, u32),
    query: &'static [u64],
    /// The answers there may be, as a set of bits; a look-up that gives up has none.
    answers: u64,
    /// Reads without asking whether anything changed.
    is_mutant: bool,
}

impl Model {
    fn check(self) {
        let seen = Arc::new(Counter::new(0));
        let noted = Arc::clone(&seen);
        let mut builder = ::loom::model::Builder::new();
        builder.preemption_bound = Some(PREEMPTIONS);
        builder.max_branches = 100_000;
        builder.check(move || {
            let (tree, mut writer) =
                (Arc::new(ActiveTree::new(0, crate::limits::ACTIVE_WORDS_MAX)), ActiveWriter::default());
            let node = (self.before)(&tree, &mut writer);
            let (shared, query, is_mutant) = (Arc::clone(&tree), self.query, self.is_mutant);
            let reader = ::loom::thread::spawn(move || {
                let mut depths = BTreeMap::new();
                let known = if is_mutant {
                    shared.read_alone(SPACE, &locals(query), &mut depths);
                    true
                } else {
                    shared.read(SPACE, &locals(query), &mut depths).is_some()
                };
                known.then(|| depths.get(&WorkerIndex(1)).copied().unwrap_or(0))
            });
            (self.change)(&tree, writer, node);
            if let Some(answer) = reader.join().expect("the reader ended") {
                assert!(self.answers & 1 << answer != 0, "a middle state: {answer}");
                // Relaxed: one real thread runs all of the model.
                noted.fetch_or(1 << answer, std::sync::atomic::Ordering::Relaxed);
            }
        });
        assert_eq!(seen.load(std::sync::atomic::Ordering::Relaxed), self.answers, "every answer occurs");
    }
}

/// A prompt that was not looked up.
fn unseen(locals: &[LocalHash], worker: u32) -> NewPrompt<'_> {
    NewPrompt { space: SPACE, locals, worker: WorkerIndex(worker), seen: None }
}

fn add(tree: &ActiveTree, writer: &mut ActiveWriter, blocks: &[u64], worker: u32) -> u32 {
    writer.add(tree, &unseen(&locals(blocks), worker), None).expect("there is room").node
}

/// A node splits, as when a prompt diverges within it. Its worker is unaffected.
const SPLIT: Model = Model {
    before: |tree, writer| add(tree, writer, &[10, 12], 1),
    change: |tree, mut writer, node| {
        tree.roots[0].open();
        writer.split(tree, 0, node, 1).expect("there is room");
        tree.roots[0].close();
    },
    query: &[10, 20],
    answers: 1 << 1,
    is_mutant: false,
};

#[test]
fn a_node_is_split() {
    SPLIT.check();
}

#[test]
#[should_panic(expected = "a middle state")]
fn a_node_is_split_without_a_second_look() {
    Model { is_mutant: true, ..SPLIT }.check();
}

/// A prompt ends that shares a block with another.
const END: Model = Model {
    before: |tree, writer| {
        add(tree, writer, &[10], 2);
        add(tree, writer, &[10, 20], 1)
    },
    change: |tree, mut writer, node| {
        writer.remove(tree, node, WorkerIndex(1));
    },
    query: &[10, 20],
    answers: 1 | 1 << 2,
    is_mutant: false,
};

#[test]
fn a_prompt_ends() {
    END.check();
}

#[test]
#[should_panic(expected = "a middle state")]
fn a_prompt_ends_without_a_second_look() {
    Model { is_mutant: true, ..END }.check();
}

/// A prompt ends, and its words are reused by a prompt of another worker with another first block.
const REUSE: Model = Model {
    before: |tree, writer| add(tree, writer, &[10], 2),
    change: |tree, mut writer, node| {
        writer.remove(tree, node, WorkerIndex(2));
        add(tree, &mut writer, &[30], 1);
    },
    query: &[10],
    answers: 1,
    is_mutant: false,
};

#[test]
fn words_used_again() {
    REUSE.check();
}

#[test]
#[should_panic(expected = "a middle state")]
fn words_used_again_without_a_second_look() {
    Model { is_mutant: true, ..REUSE }.check();
}

/// As [`REUSE`], by another thread than the one that freed the words.
fn reuse_elsewhere(tree: &Arc<ActiveTree>, mut writer: ActiveWriter, node: u32, add: fn(&ActiveTree, ActiveWriter)) {
    writer.remove(tree, node, WorkerIndex(2));
    let tree = Arc::clone(tree);
    ::loom::thread::spawn(move || add(&tree, writer)).join().expect("the other writer ended");
}

#[test]
fn words_used_again_by_another_thread() {
    let change: fn(&Arc<ActiveTree>, ActiveWriter, u32) = |tree, writer, node| {
        reuse_elsewhere(tree, writer, node, |tree, mut writer| {
            add(tree, &mut writer, &[30], 1);
        });
    };
    Model { change, ..REUSE }.check();
}

#[test]
#[should_panic(expected = "a middle state")]
fn words_used_again_by_another_thread_without_its_fence() {
    let change: fn(&Arc<ActiveTree>, ActiveWriter, u32) = |tree, writer, node| {
        reuse_elsewhere(tree, writer, node, |tree, mut writer| {
            writer.place(tree, &unseen(&locals(&[30]), 1), None).expect("there is room");
        });
    };
    Model { change, ..REUSE }.check();
}

/// As [`REUSE`], by another thread that writes the prompt's blocks ahead, into words that it was given.
fn reuse_ahead(
    tree: &Arc<ActiveTree>,
    mut writer: ActiveWriter,
    node: u32,
    prepare: fn(&ActiveTree, &mut SpareRun, &NewPrompt<'_>),
) {
    writer.remove(tree, node, WorkerIndex(2));
    let mut spare = SpareRun::default();
    writer.refill(tree, &mut spare);
    assert_eq!(spare.at, node, "the words that were freed");
    let tree = Arc::clone(tree);
    let other = ::loom::thread::spawn(move || {
        let asked = locals(&[30]);
        let seen = tree.read(SPACE, &asked, &mut BTreeMap::new());
        prepare(&tree, &mut spare, &NewPrompt { seen: seen.as_ref(), ..unseen(&asked, 1) });
        // Nothing is linked: the writes alone are to be noticed.
    });
    other.join().expect("the other writer ended");
}

#[test]
fn words_written_ahead() {
    let change: fn(&Arc<ActiveTree>, ActiveWriter, u32) =
        |tree, writer, node| reuse_ahead(tree, writer, node, ActiveTree::prepare);
    Model { change, ..REUSE }.check();
}

#[test]
#[should_panic(expected = "a middle state")]
fn words_written_ahead_without_its_fence() {
    let change: fn(&Arc<ActiveTree>, ActiveWriter, u32) =
        |tree, writer, node| reuse_ahead(tree, writer, node, ActiveTree::prepare_behind_fence);
    Model { change, ..REUSE }.check();
}

/// A prompt ends whose worker runs another one through the same blocks: readers may look before, after and meanwhile.
const ONE_OF_TWO: Model = Model {
    before: |tree, writer| {
        add(tree, writer, &[10], 1);
        add(tree, writer, &[10], 1)
    },
    change: |tree, mut writer, node| {
        writer.remove(tree, node, WorkerIndex(1));
    },
    query: &[10],
    answers: 1 << 1,
    is_mutant: false,
};

#[test]
fn one_of_two_prompts_ends() {
    ONE_OF_TWO.check();
}

/// A table grows: its edges move to another one, and its words are freed.
const GROWTH: Model = Model {
    before: |tree, writer| {
        // The inline edges.
        add(tree, writer, &[10], 2);
        add(tree, writer, &[20], 2);
        add(tree, writer, &[30], 1)
    },
    change: |tree, mut writer, _| {
        add(tree, &mut writer, &[40], 2);
    },
    query: &[30],
    answers: 1 << 1,
    is_mutant: false,
};

#[test]
fn a_table_grows() {
    GROWTH.check();
}

#[test]
#[should_panic(expected = "a middle state")]
fn a_table_grows_without_a_second_look() {
    Model { is_mutant: true, ..GROWTH }.check();
}
