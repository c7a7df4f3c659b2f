//! The daemon as its operators meet it: configuration, commands, changes of the fleet, snapshots, journal, findings,
//! demo, and a soak.
#![cfg(feature = "daemon")]

mod audit;
mod bookings;
mod cli;
mod config;
mod config_command;
mod cores;
mod demo;
mod discovery;
mod doctor;
mod engine_snapshots;
mod environment;
mod journal;
#[path = "../kit/mod.rs"]
mod kit;
mod laws;
mod memory;
mod metrics;
/// Events of workers that a relay stores at a NATS server.
#[cfg(feature = "nats")]
mod nats_events;
mod previous;
mod report;
mod routers;
mod serve;
mod service_manager;
mod snapshot;
mod soak;
mod stalls;
mod takeover;
mod top;
mod traces;
#[allow(dead_code, reason = "the engines of these tests need a part of it")]
#[path = "../../src/ingest/tests/vllm.rs"]
mod vllm;
