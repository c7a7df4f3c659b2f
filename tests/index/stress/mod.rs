//! The index over long streams: small capacities, long prompts, digests, and what is left when all is gone.
//!
//! `KVROUTED_STRESS_SECONDS` says how long each test goes on, seed after seed; `KVROUTED_SEED` takes one.

mod digests;
mod leftovers;
mod streams;
