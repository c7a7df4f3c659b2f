//! Words of the arena that are used again: not before the reader who may compare them has left.

use super::{Model, PREEMPTIONS, ROOT, Writer, node, walk};

/// A node is cut short, and what it gave up is written again for another node.
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

/// The new owner of the words is read whole or not at all, whoever had them before.
#[test]
fn the_next_owner_is_read_whole() {
    Model { query: &[20], answers: 1 << 0 | 1 << 1, ..TRIM }.check();
}
