//! The index over long streams: small capacities, long prompts, digests, and the memory that is left at the end.
//!
//! `KVROUTED_STRESS_SECONDS` is how long each test runs, seed after seed; `KVROUTED_SEED` runs a single one.

mod digests;
mod leftovers;
mod streams;
