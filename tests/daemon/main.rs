//! The daemon as its operators meet it: configuration, commands, changes of the fleet, snapshots, journal, findings,
//! demo, and a soak.
#![cfg(feature = "daemon")]

mod bookings;
mod cli;
mod config;
mod cores;
mod demo;
mod discovery;
mod doctor;
mod journal;
#[path = "../kit/mod.rs"]
mod kit;
mod laws;
mod memory;
/// Events of workers that a relay stores at a NATS server.
#[cfg(feature = "nats")]
mod nats_events;
mod previous;
mod routers;
mod serve;
mod snapshot;
mod soak;
mod stalls;
mod takeover;
