//! The index over long streams: small capacities, long prompts, digests, and removal of everything.
//!
//! `KVROUTED_STRESS_SECONDS` says for how long each test takes one seed after another; `KVROUTED_SEED` takes one seed.

mod digests;
mod leftovers;
mod streams;
