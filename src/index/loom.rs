//! The publication protocol in miniature, under every order of accesses that the memory model allows (up to a number of
//! preemptions). The models use the real lines, the real table and the real stack. Their reader walks as readers do,
//! and the grace period is a model, because `seize` does not run under the model checker.
//!
//! `RUSTFLAGS="--cfg kvrouted_loom" cargo test --lib --release index::loom`
//!
//! Each model states the possible answers, and checks that each occurs: a model in which the reader always comes too
//! late would prove nothing. Beside it stand mutants, the same protocol with one wrong step, that the model must catch.
//!
//! The models cover the order in which the lines of one change are published, the reuse of words of the arena after the
//! last reader of them has left, and the stack on which garbage comes back.

#![expect(unsafe_code, reason = "the model's arena is what the model checker watches for races")]

use super::header::{Header, LEAF, Line};
use super::reclaim::{Stack, StackNode};
use super::table::{Found, MODEL_SECRET, Retired, Table, TableHead, TableWriter, keys_of_one_home};
use crate::sync::{Arc, AtomicU64, Ordering, fence};
use ::loom::cell::UnsafeCell;
use std::sync::atomic::AtomicU64 as Counter;

const ROOT: u32 = 0;
/// Preemptions of most models.
const PREEMPTIONS: usize = 2;
const ARENA_WORDS: usize = 4;

/// What reader and writer share.
struct World {
    head: Arc<TableHead>,
    arena: [UnsafeCell<u64>; ARENA_WORDS],
    /// 1 while the reader is inside.
    inside: AtomicU64,
}

// SAFETY: the arena's words are plain memory that several threads access; the model checker checks that none writes
// while another reads.
unsafe impl Sync for World {}
// SAFETY: no part of it belongs to a thread.
unsafe impl Send for World {}

impl World {
    fn local(&self, at: u32) -> u64 {
        // SAFETY: the pointer is good while the closure runs; races are reported.
        self.arena[at as usize].with(|word| unsafe { *word })
    }

    /// As `seize` where it has no process-wide barrier; a barrier has the same effect.
    fn enter(&self) {
        // Relaxed: the fence pairs with the one in `has_passed`.
        self.inside.store(1, Ordering::Relaxed);
        fence(Ordering::SeqCst);
    }

    fn leave(&self) {
        // Release: pairs with the load in `has_passed`.
        self.inside.store(0, Ordering::Release);
    }

    /// Whether no reader is inside that might have seen the parts unlinked before this call.
    fn has_passed(&self) -> bool {
        fence(Ordering::SeqCst);
        // Acquire: pairs with the store in `leave`.
        self.inside.load(Ordering::Acquire) == 0
    }
}

/// The writer, and the lines that it must keep until the reader is gone.
struct Writer {
    table: TableWriter,
    world: Arc<World>,
    retired: Vec<Retired>,
}

impl Writer {
    fn new() -> Self {
        let table = TableWriter::new(0, MODEL_SECRET);
        let arena = std::array::from_fn(|_| UnsafeCell::new(0));
        let world = Arc::new(World { head: Arc::clone(table.head()), arena, inside: AtomicU64::new(0) });
        Self { table, world, retired: Vec::new() }
    }

    fn set_locals(&self, from: usize, locals: &[u64]) {
        for (at, local) in (from..).zip(locals) {
            // SAFETY: the pointer is good while the closure runs; races are reported.
            self.world.arena[at].with_mut(|word| unsafe { *word = *local });
        }
    }

    fn insert(&mut self, header: &Header) {
        let (_, retired) = self.table.insert(header);
        self.retired.extend(retired);
    }

    fn index(&self, parent: u32, first: u64) -> usize {
        self.table.find(parent, first, 0).expect("the model put it there")
    }

    fn update(&mut self, parent: u32, first: u64, change: impl FnOnce(&mut Header)) {
        let index = self.index(parent, first);
        let mut header = self.table.header(index);
        change(&mut header);
        self.table.update(index, &header);
    }

    fn remove(&mut self, parent: u32, first: u64) {
        let index = self.index(parent, first);
        self.table.remove(index);
    }
}

fn node(parent: u32, first: u64, id: u32, base: u32, len: u16) -> Header {
    Header { parent, first, id, base, len, flags: LEAF, ..Header::default() }
}

/// Follows `query` from the root: the number of hashes found, and the lines of the path. `None`: it met a change.
fn hops<'a>(world: &World, table: Table<'a>, query: &[u64]) -> Option<(usize, Vec<(&'a Line, u32)>)> {
    let (mut parent, mut depth, mut lines) = (ROOT, 0, Vec::new());
    while depth < query.len() {
        let (line, version, header) = match world.head.find(table, parent, query[depth], 0) {
            Found::Here(line, version, header) => (line, version, header),
            Found::Missing => break,
            Found::Busy => return None,
        };
        lines.push((line, version));
        let locals = (header.base..header.base + u32::from(header.len)).map(|at| world.local(at));
        let equal = locals.zip(&query[depth..]).take_while(|(ours, theirs)| ours == *theirs).count();
        depth += equal;
        if equal < usize::from(header.len) {
            break;
        }
        parent = header.id;
    }
    Some((depth, lines))
}

/// One try of a lookup, as readers do it.
fn walk(world: &World, query: &[u64]) -> Option<usize> {
    world.enter();
    let generation = world.head.generation()?;
    // SAFETY: retired tables live until the reader has joined.
    let table = unsafe { world.head.table() };
    let answer = hops(world, table, query).filter(|(_, lines)| lines.iter().all(|(line, v)| line.version() == *v));
    let answer = answer.filter(|_| world.head.generation() == Some(generation));
    world.leave();
    answer.map(|(depth, _)| depth)
}

/// A mutant of [`walk`] that does not check the versions.
fn walk_once(world: &World, query: &[u64]) -> Option<usize> {
    world.enter();
    // SAFETY: retired tables live until the reader has joined.
    let table = unsafe { world.head.table() };
    let answer = hops(world, table, query);
    world.leave();
    answer.map(|(depth, _)| depth)
}

/// One writer, one reader, one lookup.
#[derive(Clone, Copy)]
struct Model {
    /// Runs before the reader begins.
    before: fn(&mut Writer),
    /// Runs beside the reader.
    change: fn(&mut Writer),
    query: &'static [u64],
    walk: fn(&World, &[u64]) -> Option<usize>,
    /// The possible answers, as a set of bits.
    answers: u64,
    /// Preemptions in one run, at most.
    preemptions: usize,
}

impl Model {
    fn check(self) {
        let seen = std::sync::Arc::new(Counter::new(0));
        let noted = std::sync::Arc::clone(&seen);
        explore(self.preemptions, move || {
            let mut writer = Writer::new();
            (self.before)(&mut writer);
            let world = Arc::clone(&writer.world);
            let reader = ::loom::thread::spawn(move || (self.walk)(&world, self.query));
            (self.change)(&mut writer);
            if let Some(answer) = reader.join().expect("the reader ended") {
                assert!(self.answers & 1 << answer != 0, "a middle state: {answer}");
                // Relaxed: one real thread runs all of the model.
                noted.fetch_or(1 << answer, Ordering::Relaxed);
            }
        });
        assert_eq!(seen.load(Ordering::Relaxed), self.answers, "every answer occurs");
    }
}

/// Runs `model` in every order with up to this many preemptions.
fn explore(preemptions: usize, model: impl Fn() + Send + Sync + 'static) {
    let mut builder = ::loom::model::Builder::new();
    builder.preemption_bound = Some(preemptions);
    builder.max_branches = 100_000;
    builder.check(model);
}

/// A set of answers.
const fn set<const N: usize>(answers: [usize; N]) -> u64 {
    let (mut bits, mut at) = (0, 0);
    while at < N {
        bits |= 1 << answers[at];
        at += 1;
    }
    bits
}

/// A second block is appended to a node of one block.
const APPEND: Model = Model {
    before: |writer| {
        writer.set_locals(0, &[10]);
        writer.insert(&node(ROOT, 10, 1, 0, 1));
    },
    change: |writer| {
        writer.set_locals(1, &[11]);
        writer.update(ROOT, 10, |header| header.len = 2);
    },
    query: &[10, 11],
    walk,
    answers: set([1, 2]),
    preemptions: PREEMPTIONS,
};

#[test]
fn append() {
    APPEND.check();
}

#[test]
#[should_panic(expected = "Causality violation")]
fn append_that_shows_the_length_first() {
    let change = |writer: &mut Writer| {
        writer.update(ROOT, 10, |header| header.len = 2);
        writer.set_locals(1, &[11]);
    };
    Model { change, ..APPEND }.check();
}

/// A node of two blocks is split: the suffix keeps the id, the prefix gets a new one.
const SPLIT: Model = Model {
    before: |writer| {
        writer.set_locals(0, &[10, 11]);
        writer.insert(&node(ROOT, 10, 7, 0, 2));
    },
    change: |writer| {
        suffix(writer);
        prefix(writer);
    },
    query: &[10, 11],
    walk,
    answers: set([2]),
    preemptions: PREEMPTIONS,
};

fn suffix(writer: &mut Writer) {
    writer.insert(&node(9, 11, 7, 1, 1));
}

fn prefix(writer: &mut Writer) {
    writer.update(ROOT, 10, |header| (header.id, header.len) = (9, 1));
}

#[test]
fn split() {
    SPLIT.check();
}

#[test]
#[should_panic(expected = "a middle state: 1")]
fn split_that_shows_the_prefix_first() {
    let change = |writer: &mut Writer| {
        prefix(writer);
        suffix(writer);
    };
    Model { change, ..SPLIT }.check();
}

/// A node is removed, and its id is reused for another that has a child like the query's second block.
const REUSED_ID: Model = Model {
    before: |writer| {
        writer.set_locals(0, &[10, 20, 11]);
        writer.insert(&node(ROOT, 10, 5, 0, 1));
    },
    change: |writer| {
        writer.remove(ROOT, 10);
        writer.insert(&node(5, 11, 6, 2, 1));
        writer.insert(&node(ROOT, 20, 5, 1, 1));
    },
    query: &[10, 11],
    walk,
    answers: set([0, 1]),
    preemptions: PREEMPTIONS,
};

#[test]
fn reused_id() {
    REUSED_ID.check();
}

#[test]
#[should_panic(expected = "a middle state: 2")]
fn reused_id_without_a_second_look() {
    Model { walk: walk_once, ..REUSED_ID }.check();
}

/// Three keys have one home. The node of the first goes and leaves a tombstone, and that of the third gets its line and its
/// tag. A search for the second, in the line behind, passes them at each moment.
const REUSED_LINE: Model = Model {
    before: |writer| {
        let [first, second, _] = keys_of_one_home();
        writer.set_locals(0, &[first, second]);
        writer.insert(&node(ROOT, first, 1, 0, 1));
        writer.insert(&node(ROOT, second, 2, 1, 1));
    },
    change: |writer| {
        let [first, _, third] = keys_of_one_home();
        let line = writer.index(ROOT, first);
        writer.remove(ROOT, first);
        writer.set_locals(2, &[third]);
        writer.insert(&node(ROOT, third, 3, 2, 1));
        assert_eq!(writer.index(ROOT, third), line, "the tombstone's line");
    },
    query: &[],
    walk: |world, _| walk(world, &keys_of_one_home()[1..2]),
    answers: set([1]),
    preemptions: PREEMPTIONS,
};

#[test]
fn a_node_behind_a_reused_line() {
    REUSED_LINE.check();
}

#[test]
fn the_node_before_and_the_node_after_in_a_reused_line() {
    Model { walk: |world, _| walk(world, &keys_of_one_home()[..1]), answers: set([0, 1]), ..REUSED_LINE }.check();
    Model { walk: |world, _| walk(world, &keys_of_one_home()[2..]), answers: set([0, 1]), ..REUSED_LINE }.check();
}

#[test]
#[should_panic(expected = "a middle state: 0")]
fn a_line_that_becomes_empty_before_a_used_one() {
    let change = |writer: &mut Writer| {
        let line = writer.index(ROOT, keys_of_one_home()[0]);
        writer.table.remove_without_a_tombstone(line);
    };
    Model { change, ..REUSED_LINE }.check();
}

/// A store of two nodes: the one nearest the root is published last.
const STORE: Model = Model {
    before: |writer| writer.set_locals(0, &[10, 11]),
    change: |writer| {
        writer.insert(&node(1, 11, 2, 1, 1));
        writer.insert(&node(ROOT, 10, 1, 0, 1));
    },
    query: &[10, 11],
    walk,
    answers: set([0, 2]),
    preemptions: PREEMPTIONS,
};

#[test]
fn store_of_two_nodes() {
    STORE.check();
}

#[test]
#[should_panic(expected = "a middle state: 1")]
fn store_nearest_the_root_first() {
    let change = |writer: &mut Writer| {
        writer.insert(&node(ROOT, 10, 1, 0, 1));
        writer.insert(&node(1, 11, 2, 1, 1));
    };
    Model { change, ..STORE }.check();
}

/// A removal of two nodes: the one nearest the root goes first.
const REMOVE: Model = Model {
    before: |writer| {
        writer.set_locals(0, &[10, 11]);
        writer.insert(&node(ROOT, 10, 1, 0, 1));
        writer.insert(&node(1, 11, 2, 1, 1));
    },
    change: |writer| {
        writer.remove(ROOT, 10);
        writer.remove(1, 11);
    },
    query: &[10, 11],
    walk,
    answers: set([0, 2]),
    preemptions: PREEMPTIONS,
};

#[test]
fn remove_of_two_nodes() {
    REMOVE.check();
}

#[test]
#[should_panic(expected = "a middle state: 1")]
fn remove_deepest_first() {
    let change = |writer: &mut Writer| {
        writer.remove(1, 11);
        writer.remove(ROOT, 10);
    };
    Model { change, ..REMOVE }.check();
}

/// The table is replaced, then a node is changed and another inserted. The reader loads the table for each of them. Its
/// answers: 0 it sees neither change, 1 the first, 3 both; 2 would be the second without the first.
const GROWTH: Model = Model {
    before: |writer| writer.insert(&node(ROOT, 10, 1, 0, 1)),
    change: |writer| {
        let retired = writer.table.reserve(5);
        writer.retired.extend(retired);
        writer.update(ROOT, 10, |header| header.len = 2);
        writer.insert(&node(ROOT, 20, 2, 0, 1));
    },
    query: &[],
    walk: |world, _| walk_two_tables(world, true),
    answers: set([0, 1, 3]),
    // Two take more than a minute; one suffices to catch the mutant below.
    preemptions: 1,
};

fn walk_two_tables(world: &World, looks_at_the_generation: bool) -> Option<usize> {
    let generation = world.head.generation()?;
    // SAFETY: retired tables live until the reader has joined.
    let find = |first| world.head.find(unsafe { world.head.table() }, ROOT, first, 0);
    let (first, second) = (find(10), find(20));
    let Found::Here(line, version, header) = first else { return None };
    let both = match second {
        Found::Here(..) => 2,
        Found::Missing => 0,
        Found::Busy => return None,
    };
    let is_same = line.version() == version;
    let is_same = is_same && (!looks_at_the_generation || world.head.generation() == Some(generation));
    is_same.then(|| both + usize::from(header.len == 2))
}

#[test]
fn growth() {
    GROWTH.check();
}

#[test]
#[should_panic(expected = "a middle state: 2")]
fn growth_without_the_generation() {
    Model { walk: |world, _| walk_two_tables(world, false), ..GROWTH }.check();
}

/// A miss in the old table beside the store that made it grow: the reader sees nothing or all of the store.
#[test]
fn growth_beside_a_walk() {
    let before = |writer: &mut Writer| {
        writer.set_locals(0, &[10, 11]);
        (30..33).for_each(|first| writer.insert(&node(ROOT, first, 3, 0, 1)));
    };
    Model { before, ..STORE }.check();
}

/// A node is cut short, and its freed words are written again for another node.
const TRIM: Model = Model {
    before: |writer| {
        writer.set_locals(0, &[10, 11]);
        writer.insert(&node(ROOT, 10, 1, 0, 2));
    },
    change: |writer| {
        trim(writer);
        if writer.world.has_passed() {
            reuse(writer);
        }
    },
    query: &[10, 11],
    walk,
    answers: 1 << 1 | 1 << 2,
    preemptions: PREEMPTIONS,
};

fn trim(writer: &mut Writer) {
    writer.update(ROOT, 10, |header| header.len = 1);
}

fn reuse(writer: &mut Writer) {
    writer.set_locals(1, &[20]);
    writer.insert(&node(ROOT, 20, 2, 1, 1));
}

#[test]
fn trim_and_reuse() {
    TRIM.check();
}

#[test]
#[should_panic(expected = "Causality violation")]
fn trim_and_reuse_at_once() {
    let change = |writer: &mut Writer| {
        trim(writer);
        reuse(writer);
    };
    Model { change, ..TRIM }.check();
}

#[test]
#[should_panic(expected = "Causality violation")]
fn a_grace_period_that_begins_before_the_trim() {
    let change = |writer: &mut Writer| {
        let has_passed = writer.world.has_passed();
        trim(writer);
        if has_passed {
            reuse(writer);
        }
    };
    Model { change, ..TRIM }.check();
}

/// A reader sees the words of their new node whole or not at all, whichever node had them before.
#[test]
fn the_next_owner_is_read_whole() {
    Model { query: &[20], answers: 1 << 0 | 1 << 1, ..TRIM }.check();
}

/// The taker can read what a pusher wrote, and each node comes back once.
#[test]
fn two_push_and_one_takes() {
    explore(PREEMPTIONS, || {
        let stack = Arc::new(Stack::new());
        let pushers: Vec<_> = (1..3_u32)
            .map(|item| {
                let stack = Arc::clone(&stack);
                ::loom::thread::spawn(move || {
                    let value = Box::new(UnsafeCell::new(0));
                    // SAFETY: the pointer is good while the closure runs.
                    value.with_mut(|word| unsafe { *word = item });
                    // SAFETY: fresh from `Box::into_raw`.
                    unsafe { stack.push(Box::into_raw(Box::new(StackNode::new(value)))) };
                })
            })
            .collect();
        let read = |value: Box<UnsafeCell<u32>>| {
            // SAFETY: the pointer is good while the closure runs; races are reported.
            value.with(|word| unsafe { *word })
        };
        let mut items: Vec<u32> = stack.take().map(read).collect();
        pushers.into_iter().for_each(|pusher| pusher.join().expect("the pusher ended"));
        items.extend(stack.take().map(read));
        items.sort_unstable();
        assert_eq!(items, [1, 2]);
    });
}
