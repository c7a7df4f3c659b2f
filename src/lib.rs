//! **Which worker should run this prompt?** A gateway asks over a Unix socket; kvrouted answers from two
//! pictures it keeps up to date: an index of the KV-cache blocks in every engine, fed by the events that
//! engines publish over ZeroMQ, and a load per worker, fed by what gateways book and free.
//!
//! The feature `client` builds the gateway's side alone, without the daemon's dependencies; the default feature
//! `daemon` builds everything.
#![cfg_attr(feature = "daemon", doc = include_str!("flows.md"))]
#![cfg_attr(not(feature = "daemon"), doc = include_str!("client/first_request.md"))]

#[cfg(not(feature = "client"))]
compile_error!("enable the feature `client`, or `daemon`, which includes it");

// What everything is named and bounded by.
pub mod error;
pub mod ids;

// Values and bytes that gateways and the daemon exchange. A gateway finds the values in `client`.
#[cfg_attr(not(feature = "daemon"), doc(hidden))]
pub mod finding;
pub mod hash;
#[cfg_attr(not(feature = "daemon"), doc(hidden))]
pub mod lane;
#[cfg_attr(not(feature = "daemon"), doc(hidden))]
pub mod limits;
// the gateway's log is written by it too
#[cfg_attr(not(feature = "daemon"), doc(hidden))]
pub mod log_writer;
#[cfg_attr(not(feature = "daemon"), doc(hidden))]
pub mod machine;
mod protocol;
mod reasons;
#[cfg_attr(not(feature = "daemon"), doc(hidden))]
pub mod schema_generated;
#[cfg(target_arch = "x86_64")]
mod simd;
#[cfg_attr(not(feature = "daemon"), doc(hidden))]
pub mod trust;
#[cfg_attr(not(feature = "daemon"), doc(hidden))]
pub mod wire;

// A gateway's side.
pub mod client;

// What a process may do.
#[cfg(feature = "sandbox")]
pub mod sandbox;

// What the daemon is built on.
#[cfg(feature = "daemon")]
mod audit;
#[cfg(feature = "daemon")]
pub mod budget;
#[cfg(feature = "daemon")]
mod columns;
#[cfg(feature = "daemon")]
pub mod endpoint;
#[cfg(feature = "daemon")]
pub mod engine_law;
#[cfg(feature = "daemon")]
mod framed_file;
#[cfg(feature = "daemon")]
mod log_quota;
#[cfg(feature = "daemon")]
pub mod masking;
#[cfg(feature = "daemon")]
pub mod metrics;
#[cfg(feature = "nats")]
mod nats;
#[cfg(feature = "daemon")]
mod owned_directory;
#[cfg(feature = "daemon")]
mod prefetch;
#[cfg(feature = "daemon")]
mod recycling_queue;
#[cfg(feature = "daemon")]
mod sync;
#[cfg(feature = "daemon")]
pub mod watchdog;
#[cfg(feature = "daemon")]
pub mod zmtp;

// The write flow, in its order.
#[cfg(feature = "daemon")]
pub mod event;
#[cfg(feature = "daemon")]
pub mod index;
#[cfg(feature = "daemon")]
pub mod ingest;
#[cfg(feature = "daemon")]
pub mod snapshot;

// The read flow, from the decision outwards.
#[cfg(feature = "daemon")]
pub mod fleet;
#[cfg(feature = "daemon")]
pub mod journal;
#[cfg(feature = "daemon")]
pub mod load;
#[cfg(feature = "daemon")]
pub mod predict;
#[cfg(feature = "daemon")]
pub mod queue;
#[cfg(feature = "daemon")]
pub mod requests;
#[cfg(feature = "daemon")]
pub mod route;
#[cfg(feature = "daemon")]
pub mod routers;
#[cfg(feature = "daemon")]
pub mod serve;
#[cfg(feature = "daemon")]
pub mod shadow;
#[cfg(feature = "daemon")]
pub mod shares;
#[cfg(feature = "daemon")]
pub mod traces;

// The process, and those who talk to it.
#[cfg(feature = "daemon")]
pub mod cli;
#[cfg(feature = "daemon")]
pub mod config;
#[cfg(feature = "daemon")]
pub mod connect;
#[cfg(feature = "daemon")]
pub mod daemon;
#[cfg(feature = "daemon")]
pub mod demo;
#[cfg(feature = "daemon")]
pub mod discovery;
#[cfg(feature = "daemon")]
pub mod relay;
#[cfg(feature = "daemon")]
pub mod remote;
#[cfg(feature = "simulate")]
pub mod simulate;
#[cfg(feature = "daemon")]
pub mod simulated_engine;
