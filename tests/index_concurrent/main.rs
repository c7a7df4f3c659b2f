//! Readers beside a writer: the answer for all workers is the oracle's at one boundary between two events, between the
//! query's start and its end. No reader ever goes back behind such a boundary.
//!
//! `KVROUTED_STRESS_SECONDS` is how long each test searches for a failure, seed after seed; `KVROUTED_SEED` runs a
//! single one. Threads are not replayed, so a seed that failed once may need many runs.

#![cfg(feature = "daemon")]

#[path = "../oracle/mod.rs"]
mod oracle;
mod player;
mod script;
mod watcher;
mod wide;

use kvrouted::ids::{ShardId, WorkerSlot};
use kvrouted::index::{IndexReader, Reclaimer, ShardLimits, ShardReader, ShardWriter, shard_in};
use oracle::seeds::for_seeds;
use oracle::stream::{Alphabet, Rates, Shape, Style};
use player::{Progress, play};
use script::Script;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;
use watcher::{SHARD, Seen, watch};

/// Seeds of each test, at least, and for how long it continues with more.
const SEEDS: u64 = 3;
const TIME: Duration = Duration::from_secs(2);
/// The threads of one test get all the cores. That is why these tests are a binary of their own.
static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
/// Shards that every second reader walks beside the changing one.
const QUIET: u16 = 3;
/// Events of one script.
const EVENTS: usize = 2000;

/// Prompts of several workers, in the device tier alone.
const FLEET: Alphabet = Alphabet { workers: 4, hashes: 400, locals: 3, groups: 1, seeds: 1, tiers: 1 };
const PROMPTS: Shape = Shape::Prompts { prompts: 6, blocks_max: 40, step_blocks_max: 16, aliases: false };

/// An unchanging shard with the blocks that the script's events leave: its walks take the paths of the changing one.
fn quiet_shard(id: ShardId, script: &Script, reclaimer: &Reclaimer) -> (ShardWriter, ShardReader) {
    let (mut writer, reader) = shard_in(id, script.limits, reclaimer);
    let slots: Vec<_> = (0..script.workers).map(|_| writer.add_worker().expect("room")).collect();
    for event in &script.events {
        if let Some(worker) = event.worker() {
            event.apply_to_writer(&mut writer, slots[worker]);
        }
    }
    (writer, reader)
}

/// Plays one script to readers on other threads.
fn run(script: &Script, seed: u64) -> Seen {
    let reclaimer = Reclaimer::new();
    let (mut writer, reader) = shard_in(SHARD, script.limits, &reclaimer);
    let (_writers, quiet): (Vec<_>, Vec<_>) =
        (1..=QUIET).map(|id| quiet_shard(ShardId(id), script, &reclaimer)).unzip();
    for worker in 0..script.workers {
        assert_eq!(writer.add_worker(), Some(WorkerSlot(worker as u16)));
    }
    let threads = std::thread::available_parallelism().map_or(2, |cores| cores.get().clamp(2, 6));
    let progress = Progress::default();
    std::thread::scope(|scope| {
        let watchers: Vec<_> = (0..threads)
            .map(|thread| {
                let beside = if thread % 2 == 0 { &[][..] } else { &quiet[..] };
                IndexReader::new(beside.iter().chain([&reader]).cloned().collect())
            })
            .map(|reader| {
                scope.spawn(|| {
                    let reader = reader;
                    watch(script, &reader, &progress)
                })
            })
            .collect();
        play(script, &mut writer, &progress, seed);
        let seen = watchers.into_iter().map(|watcher| watcher.join().expect("every answer is right"));
        seen.fold(Seen::default(), Seen::plus)
    })
}

fn check(test: &'static str, style: Style, node_blocks_max: &[usize]) -> Seen {
    check_scripts(test, node_blocks_max, |limits, seed| Script::new(style, limits, seed, EVENTS))
}

#[allow(clippy::print_stdout, reason = "figures that no assertion is about")]
fn check_scripts(test: &'static str, node_blocks_max: &[usize], script: impl Fn(ShardLimits, u64) -> Script) -> Seen {
    let _alone = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    let mut seen = Seen::default();
    for_seeds(test, SEEDS, TIME, |seed| {
        let node_blocks_max = node_blocks_max[seed as usize % node_blocks_max.len()];
        let limits = ShardLimits { node_blocks_max, ..ShardLimits::default() };
        let script = script(limits, seed);
        seen = seen.plus(run(&script, seed));
    });
    println!("{test}: {seen:?}");
    assert!(seen.changed > 0, "no reader ever saw a change: {seen:?}");
    seen
}

#[test]
fn plain_streams() {
    let seen =
        check("index_concurrent::plain_streams", Style { of: FLEET, shape: PROMPTS, rates: Rates::USUAL }, &[8, 1024]);
    // Their number depends on how often the system stops the writer in the middle of a change.
    assert!(seen.contended * 2 < seen.reads, "most reads are contended: {seen:?}");
}

#[test]
fn splits_and_joins() {
    let style = Style { of: FLEET, shape: PROMPTS, rates: Rates::REMOVING };
    check("index_concurrent::splits_and_joins", style, &[2, 8, 1024]);
}

/// Nodes that are long enough to be compared by fingerprints.
#[test]
fn long_prompts() {
    let shape = Shape::Prompts { prompts: 4, blocks_max: 240, step_blocks_max: 90, aliases: false };
    check("index_concurrent::long_prompts", Style { of: FLEET, shape, rates: Rates::REMOVING }, &[1024]);
}

#[test]
fn removals_of_many_chains_at_once() {
    check_scripts("index_concurrent::removals_of_many_chains_at_once", &[4, 1024], wide::script);
}

#[test]
fn growth_block_by_block() {
    let shape = Shape::Prompts { prompts: 4, blocks_max: 40, step_blocks_max: 1, aliases: false };
    check("index_concurrent::growth_block_by_block", Style { of: FLEET, shape, rates: Rates::USUAL }, &[8, 1024]);
}

#[test]
fn tiers_and_groups() {
    let of = Alphabet { workers: 3, groups: 2, seeds: 2, tiers: 4, ..FLEET };
    check("index_concurrent::tiers_and_groups", Style { of, shape: PROMPTS, rates: Rates::USUAL }, &[8, 1024]);
}

#[test]
fn clears_and_workers_that_come_and_go() {
    let of = Alphabet { tiers: 2, ..FLEET };
    let style = Style { of, shape: PROMPTS, rates: Rates::CLEARING };
    check("index_concurrent::clears_and_workers_that_come_and_go", style, &[8, 1024]);
}

#[test]
fn several_names_for_one_content() {
    let shape = Shape::Prompts { prompts: 6, blocks_max: 24, step_blocks_max: 12, aliases: true };
    let of = Alphabet { tiers: 2, ..FLEET };
    check("index_concurrent::several_names_for_one_content", Style { of, shape, rates: Rates::REMOVING }, &[8, 1024]);
}

#[test]
fn sliding_windows() {
    let of = Alphabet { workers: 3, groups: 2, ..FLEET };
    for (test, windows, rates) in [
        ("index_concurrent::sliding_windows", (&[1][..], 1), Rates::REMOVING),
        ("index_concurrent::sliding_windows", (&[1][..], 5), Rates::CLEARING),
    ] {
        let style = Style { of, shape: PROMPTS, rates };
        check_scripts(test, &[8, 1024], |limits, seed| Script::windowed(style, limits, seed, EVENTS, windows));
    }
}

#[test]
fn any_block_under_any_other() {
    let of = Alphabet { workers: 3, hashes: 10, locals: 2, groups: 2, seeds: 2, tiers: 3 };
    check(
        "index_concurrent::any_block_under_any_other",
        Style { of, shape: Shape::Unstructured, rates: Rates::USUAL },
        &[2, 1024],
    );
}
