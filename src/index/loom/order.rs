//! In which order the lines of one change are published.

use super::{Model, PREEMPTIONS, ROOT, World, Writer, node, walk, walk_once};
use crate::index::table::Found;

/// A set of answers.
const fn set<const N: usize>(answers: [usize; N]) -> u64 {
    let (mut bits, mut at) = (0, 0);
    while at < N {
        bits |= 1 << answers[at];
        at += 1;
    }
    bits
}

/// A node of one block that a second is appended to.
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

/// A node is removed, and its id given to another that has a child like the query's second block.
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

/// A store that needs two nodes: the one nearest the root is published last.
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

/// The table is replaced, then a node is changed and another comes. The reader loads the table for each of
/// them. Its answers: 0 it knows neither change, 1 the first, 3 both; 2 would be the second without the first.
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
    // Two take more than a minute; the mutant below is caught with one.
    preemptions: 1,
};

fn walk_two_tables(world: &World, looks_at_the_generation: bool) -> Option<usize> {
    let generation = world.head.generation()?;
    // SAFETY: retired tables live until the reader has joined.
    let (first, second) = unsafe { (world.head.table().find(ROOT, 10, 0), world.head.table().find(ROOT, 20, 0)) };
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

/// A miss in the old table beside the store that made it grow: nothing or all of it.
#[test]
fn growth_beside_a_walk() {
    let before = |writer: &mut Writer| {
        writer.set_locals(0, &[10, 11]);
        (30..33).for_each(|first| writer.insert(&node(ROOT, first, 3, 0, 1)));
    };
    Model { before, ..STORE }.check();
}
