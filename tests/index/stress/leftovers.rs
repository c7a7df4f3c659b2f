//! The memory of a shard after every block is gone.

use crate::oracle::checked_shard::CheckedShard;
use crate::oracle::event::{Event, add_worker, remove_worker};
use crate::oracle::seeds::for_seeds;
use crate::oracle::stream::{Alphabet, Rates, Shape, Stream, Style};
use kvrouted::ids::{GroupId, Tier};
use kvrouted::index::{ShardLimits, ShardMemory, ShardWriter, WorkerBlocks};
use std::time::Duration;

const FLEET: Alphabet = Alphabet { workers: 4, hashes: 2000, locals: 3, groups: 1, seeds: 1, tiers: 2 };
const STYLE: Style = Style {
    of: FLEET,
    shape: Shape::Prompts { prompts: 16, blocks_max: 64, step_blocks_max: 24, aliases: true },
    rates: Rates::REMOVING,
};
/// Memory of an empty shard beyond its first size: memory comes from the system in pieces, and the last one stays.
const LEFT_BYTES_MAX: u64 = 4 << 20;
/// Publishes after which no garbage waits, if there are no readers.
const RECLAIM_PUBLISHES: usize = 8;

fn reclaim_all(writer: &mut ShardWriter) {
    for _ in 0..RECLAIM_PUBLISHES {
        while writer.sweep(4096) {}
        writer.publish();
        writer.reclaim();
    }
}

fn checked_shard(seed: u64, events: usize) -> (CheckedShard, Vec<Event>) {
    let node_blocks_max = [8, 1024][seed as usize % 2];
    let limits = ShardLimits { workers_max: FLEET.workers, node_blocks_max, ..ShardLimits::default() };
    let stream = Stream::new(STYLE, limits, seed);
    let queries = stream.queries().to_vec();
    (CheckedShard::new(limits, FLEET.workers, &queries), stream.events(events))
}

/// Asserts that the shard counts little memory, and that no garbage waits.
fn assert_empty(writer: &ShardWriter, at_first: ShardMemory) {
    let now = writer.memory();
    assert_eq!(now.garbage_bytes, 0, "there is no reader: {now:?}");
    assert!(now.bytes() <= at_first.bytes() + LEFT_BYTES_MAX, "{now:?} is left, at first it was {at_first:?}");
}

#[test]
fn nothing_is_left_after_every_block_is_removed() {
    for_seeds("index::stress::leftovers::nothing_is_left_after_every_block_is_removed", 4, Duration::ZERO, |seed| {
        let (mut checked, events) = checked_shard(seed, 400);
        let at_first = checked.writer.memory();
        events.iter().for_each(|event| checked.apply(event));
        for worker in 0..FLEET.workers {
            let (_, oracle) = checked.worker(worker);
            let counts: Vec<_> = oracle.counts.iter().map(|(key, (count, _))| (*key, *count)).collect();
            for ((hash, tier, group), count) in counts {
                for _ in 0..count {
                    checked.apply(&Event::Remove { worker, tier, group, hashes: vec![hash] });
                }
            }
        }
        reclaim_all_and_check(&mut checked);
        assert_empty(&checked.writer, at_first);
    });
}

/// Publishes and reclaims until no garbage waits, and checks everything.
fn reclaim_all_and_check(checked: &mut CheckedShard) {
    for _ in 0..RECLAIM_PUBLISHES {
        while checked.writer.sweep(4096) {}
        checked.publish();
        checked.writer.reclaim();
    }
    checked.check();
}

#[test]
fn nothing_is_left_after_clears() {
    for_seeds("index::stress::leftovers::nothing_is_left_after_clears", 4, Duration::ZERO, |seed| {
        let (mut checked, events) = checked_shard(seed, 400);
        let at_first = checked.writer.memory();
        events.iter().for_each(|event| checked.apply(event));
        (0..FLEET.workers).for_each(|worker| checked.apply(&Event::Clear { worker, tier: None }));
        checked.check();
        reclaim_all_and_check(&mut checked);
        assert_empty(&checked.writer, at_first);
    });
}

/// Workers come and go for longer than the shard has slots; each finds an empty slot.
#[test]
fn slots_are_used_again() {
    let (mut checked, _) = checked_shard(1, 0);
    let at_first = checked.writer.memory();
    for round in 0..40 {
        for event in
            Stream::new(Style { rates: Rates { replace: 0, ..STYLE.rates }, ..STYLE }, ShardLimits::default(), round)
                .events(20)
        {
            checked.apply(&event);
        }
        let worker = round as usize % FLEET.workers;
        checked.apply(&remove_worker(worker));
        checked.check();
        checked.apply(&add_worker(worker));
        let (slot, _) = checked.worker(worker);
        assert_eq!(checked.writer.held(slot), WorkerBlocks::default());
        assert_eq!(checked.writer.remove(slot, Tier::Device, GroupId(0), &[]).removed, 0);
        checked.check();
    }
    for worker in 0..FLEET.workers {
        checked.apply(&remove_worker(worker));
    }
    reclaim_all(&mut checked.writer);
    assert_empty(&checked.writer, at_first);
}
