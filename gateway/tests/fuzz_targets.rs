//! Every fuzz target of the gateway over its seeds and some thousand mutations of them, the same ones in each run.
//!
//! `KVROUTED_MUTATIONS` sets their number. libFuzzer goes further (`scripts/fuzz`); it begins with the seeds that a
//! test writes to `KVROUTED_SEEDS_FOLDER`.

#[path = "../../tests/fuzz_targets/mutator.rs"]
mod mutator;
#[path = "epp/kit.rs"]
mod player;
#[path = "../../tests/fuzz_targets/runner.rs"]
mod runner;
#[path = "fuzz_targets/seeds.rs"]
mod seeds;
#[path = "fuzz_targets/targets/mod.rs"]
mod targets;

use runner::fuzzed;

fuzzed!(seeds::of; openai_body openai_reply engine_replies renders watch ext_proc chat_template log_line gateway_config);
