//! The memory that is left when every block is gone.

use crate::oracle::event::{Event, add_worker, remove_worker};
use crate::oracle::replay::for_seeds;
use crate::oracle::stream::{Alphabet, Rates, Shape, Stream, Style};
use crate::oracle::twin::Twin;
use kvrouted::ids::{GroupId, Tier};
use kvrouted::index::{ShardLimits, ShardMemory, ShardWriter, WorkerBlocks};
use std::time::Duration;

const FLEET: Alphabet = Alphabet { workers: 4, hashes: 2000, locals: 3, groups: 1, seeds: 1, tiers: 2 };
const STYLE: Style = Style {
    of: FLEET,
    shape: Shape::Prompts { prompts: 16, blocks_max: 64, step_blocks_max: 24, aliases: true },
    rates: Rates::REMOVING,
};
/// What an empty shard may keep beyond its first size: memory comes from the system in pieces, and the last one is
/// kept.
const KEPT_BYTES_MAX: u64 = 4 << 20;
/// Publishes after which no garbage waits, if there are no readers.
const SETTLE_PUBLISHES: usize = 8;

fn settle(writer: &mut ShardWriter) {
    for _ in 0..SETTLE_PUBLISHES {
        while writer.sweep(4096) {}
        writer.publish();
        writer.reclaim();
    }
}

fn twin(seed: u64, events: usize) -> (Twin, Vec<Event>) {
    let node_blocks_max = [8, 1024][seed as usize % 2];
    let limits = ShardLimits { workers_max: FLEET.workers, node_blocks_max, ..ShardLimits::default() };
    let stream = Stream::new(STYLE, limits, seed);
    let queries = stream.queries().to_vec();
    (Twin::new(limits, FLEET.workers, &queries), stream.events(events))
}

/// Asserts that the shard counts little memory, and that no garbage waits.
fn assert_empty(writer: &ShardWriter, at_first: ShardMemory) {
    let now = writer.memory();
    assert_eq!(now.garbage_bytes, 0, "nobody reads: {now:?}");
    assert!(now.bytes() <= at_first.bytes() + KEPT_BYTES_MAX, "{now:?} is left, at first it was {at_first:?}");
}

#[test]
fn nothing_is_left_after_every_block_is_removed() {
    for_seeds("index::stress::leftovers::nothing_is_left_after_every_block_is_removed", 4, Duration::ZERO, |seed| {
        let (mut twin, events) = twin(seed, 400);
        let at_first = twin.writer.memory();
        events.iter().for_each(|event| twin.apply(event));
        for worker in 0..FLEET.workers {
            let (_, oracle) = twin.worker(worker);
            let counts: Vec<_> = oracle.counts.iter().map(|(key, (count, _))| (*key, *count)).collect();
            for ((hash, tier, group), count) in counts {
                for _ in 0..count {
                    twin.apply(&Event::Remove { worker, tier, group, hashes: vec![hash] });
                }
            }
        }
        settle_twin(&mut twin);
        assert_empty(&twin.writer, at_first);
    });
}

/// Publishes until no garbage waits, and checks everything.
fn settle_twin(twin: &mut Twin) {
    for _ in 0..SETTLE_PUBLISHES {
        while twin.writer.sweep(4096) {}
        twin.publish();
        twin.writer.reclaim();
    }
    twin.check();
}

#[test]
fn nothing_is_left_after_clears() {
    for_seeds("index::stress::leftovers::nothing_is_left_after_clears", 4, Duration::ZERO, |seed| {
        let (mut twin, events) = twin(seed, 400);
        let at_first = twin.writer.memory();
        events.iter().for_each(|event| twin.apply(event));
        (0..FLEET.workers).for_each(|worker| twin.apply(&Event::Clear { worker, tier: None }));
        twin.check();
        settle_twin(&mut twin);
        assert_empty(&twin.writer, at_first);
    });
}

/// Workers come and go for longer than the shard has slots; each finds an empty slot.
#[test]
fn slots_are_used_again() {
    let (mut twin, _) = twin(1, 0);
    let at_first = twin.writer.memory();
    for round in 0..40 {
        for event in
            Stream::new(Style { rates: Rates { replace: 0, ..STYLE.rates }, ..STYLE }, ShardLimits::default(), round)
                .events(20)
        {
            twin.apply(&event);
        }
        let worker = round as usize % FLEET.workers;
        twin.apply(&remove_worker(worker));
        twin.check();
        twin.apply(&add_worker(worker));
        let (slot, _) = twin.worker(worker);
        assert_eq!(twin.writer.held(slot), WorkerBlocks::default());
        assert_eq!(twin.writer.remove(slot, Tier::Device, GroupId(0), &[]).removed, 0);
        twin.check();
    }
    for worker in 0..FLEET.workers {
        twin.apply(&remove_worker(worker));
    }
    settle(&mut twin.writer);
    assert_empty(&twin.writer, at_first);
}
