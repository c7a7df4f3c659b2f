//! Every fuzz target over its seeds and some thousand mutations of them, the same ones in each run.
//!
//! `KVROUTED_MUTATIONS` sets their number (3000), `KVROUTED_RECORDINGS` names a folder with more recordings of engines.
//! libFuzzer goes further (`scripts/fuzz`); it begins with the seeds that a test writes to `KVROUTED_SEEDS_FOLDER`.

#![cfg(feature = "daemon")]

mod mutator;
mod seeds;
mod targets;
#[allow(dead_code, reason = "seeds need a part of it")]
#[path = "../../src/ingest/tests/vllm.rs"]
mod vllm;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};

use mutator::Mutator;
use vllm::Batch;

const MUTATIONS: u64 = 3000;

fn mutations() -> u64 {
    let set = std::env::var("KVROUTED_MUTATIONS").ok();
    set.map_or(MUTATIONS, |number| number.parse().expect("KVROUTED_MUTATIONS is a number"))
}

fn recordings() -> Vec<PathBuf> {
    let own = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/events");
    std::iter::once(own).chain(std::env::var_os("KVROUTED_RECORDINGS").map(PathBuf::from)).collect()
}

fn run(target: targets::Target, data: &[u8], what: &str) {
    // What is wrong has been said by then; this says with what.
    if catch_unwind(AssertUnwindSafe(|| target(data))).is_err() {
        let hex: String = data.iter().map(|byte| format!("{byte:02x}")).collect();
        panic!("{what}, {} bytes: {hex}", data.len());
    }
}

fn fuzz(name: &str) {
    let (_, target) = targets::ALL.iter().find(|(of, _)| *of == name).expect("a target");
    let seeds = seeds::of(name, &recordings());
    for (at, seed) in seeds.iter().enumerate() {
        run(*target, seed, &format!("{name}: seed {at}"));
    }
    let mut mutator = Mutator::new(&seeds, 1);
    for at in 0..mutations() {
        run(*target, &mutator.next(), &format!("{name}: mutation {at}"));
    }
}

macro_rules! fuzzed {
    ($($name:ident)*) => {
        $(#[test]
        fn $name() {
            fuzz(stringify!($name));
        })*

        #[test]
        fn no_target_is_left_out() {
            let names: Vec<_> = targets::ALL.iter().map(|(name, _)| *name).collect();
            assert_eq!(names, [$(stringify!($name)),*]);
        }
    };
}

fuzzed!(msgpack flatbuffer gate recovery apply request reply frames snapshot journal config endpoint load_stat lane zmtp);

#[test]
fn seeds() {
    let folder = std::env::var_os("KVROUTED_SEEDS_FOLDER").map(PathBuf::from);
    for (name, _) in targets::ALL {
        let seeds = seeds::of(name, &recordings());
        assert!(seeds.len() >= 4 && seeds.iter().all(|seed| !seed.is_empty()), "{name}: {} seeds", seeds.len());
        let Some(folder) = folder.as_deref().map(|folder| folder.join(name)) else { continue };
        std::fs::create_dir_all(&folder).expect("a folder for seeds");
        for (at, seed) in seeds.iter().enumerate() {
            std::fs::write(folder.join(format!("seed-{at:03}")), seed).expect("a seed is written");
        }
    }
}

/// The bound of `apply` is near: of streams that nothing happened to, all of it is found.
#[test]
fn what_engines_mean_is_counted() {
    let (mut counted, mut meant) = (0, 0);
    for seed in seeds::of("apply", &recordings()).iter().step_by(2) {
        let (of_seed, could_be) = targets::apply::overlap(seed);
        (counted, meant) = (counted + of_seed, meant + could_be);
    }
    assert!(counted > 100 && counted * 10 >= meant * 8, "{counted} of {meant} blocks");
}

/// A connector's copy counts from when device memory says what it is, and not once it is dropped.
#[test]
fn copies_of_a_connector_are_what_engines_mean() {
    let described = |batch: Batch, medium| {
        batch.stored_with(None, &[11, 12], &vllm::tokens(&[1, 2]), vllm::BLOCK_SIZE, Some(medium), &[])
    };
    for offloaded_first in [true, false] {
        let media = if offloaded_first { ["CPU", "GPU"] } else { ["GPU", "CPU"] };
        let batches = [
            described(Batch::new(0), media[0]),
            described(Batch::new(1), media[1]),
            Batch::new(2).removed(&[12]),
            Batch::new(3).removed_from(&[12], Some("CPU")),
            described(Batch::new(4), "FS"),
        ];
        let payloads = batches.map(|batch| (targets::apply::Step::Next, batch.payload()));
        let (counted, meant) = targets::apply::overlap(&targets::apply::messages(&payloads));
        assert!(counted > 0 && counted == meant, "{counted} of {meant} blocks");
    }
}
