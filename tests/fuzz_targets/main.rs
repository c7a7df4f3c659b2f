//! Every fuzz target over its seeds and some thousand mutations of them, the same ones in each run.
//!
//! `KVROUTED_MUTATIONS` sets their number, `KVROUTED_RECORDINGS` names a folder with more recordings of engines.
//! libFuzzer goes further (`scripts/fuzz`); it begins with the seeds that a test writes to `KVROUTED_SEEDS_FOLDER`.

#![cfg(feature = "daemon")]

mod mutator;
mod runner;
mod seeds;
mod targets;
#[allow(dead_code, reason = "seeds need a part of it")]
#[path = "../../src/ingest/tests/vllm.rs"]
mod vllm;

use std::path::{Path, PathBuf};

use runner::fuzzed;
use vllm::Batch;

fn recordings() -> Vec<PathBuf> {
    let own = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/events");
    std::iter::once(own).chain(std::env::var_os("KVROUTED_RECORDINGS").map(PathBuf::from)).collect()
}

fn seeds_of(target: &str) -> Vec<Vec<u8>> {
    seeds::of(target, &recordings())
}

fuzzed!(seeds_of; msgpack flatbuffer gate recovery apply request reply frames snapshot bookings journal config endpoint load_stat load_events lane zmtp opening engine_snapshot);

/// The bound of `apply` is near: of streams that nothing happened to, all of it is found.
#[test]
fn what_engines_mean_is_counted() {
    let (mut counted, mut meant) = (0, 0);
    for seed in seeds_of("apply").iter().step_by(2) {
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
