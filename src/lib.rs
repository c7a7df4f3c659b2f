//! **Which worker should run this prompt?** A gateway asks over a Unix socket; kvrouted answers from two
//! pictures it keeps up to date: an index of the KV-cache blocks in every engine, fed by the events that
//! engines publish over ZeroMQ, and a load per worker, fed by what gateways book and free.
//!
//! # The two flows
//!
//! ```text
//! write   ZMQ frames → ingest → event (decode, sequence gate) → hash → index, seen by readers at once
//! read    socket frame → serve → wire → hash → index + load + fleet → route (observe, judge, book) → reply
//! ```
//!
//! * **Write.** A worker's id and rank fix its shard. Each shard has one ingest thread, which reads the publishers'
//!   sockets and is the only writer of its part of every index: an event stays on one thread from the socket to the
//!   index.
//! * **Read.** A connection belongs to one serving thread, which answers what it read before it reads on. A decision
//!   takes no lock before it books, unless bookings change what it reads faster than it can retry.
//! * **HTTP.** The port for clients of Dynamo's services has a thread of its own. It decides by the same code as a
//!   serving thread, and no serving thread waits for it.
//! * **Control.** The main thread accepts connections and hands them to serving threads, answers the admin socket,
//!   expires bookings, and drains on SIGTERM. A thread of its own makes and serves the metrics page.
//!
//! `docs/architecture.md` draws the flows and says in which order to read the modules; `docs/glossary.md` has the terms.
//!
//! # Who may depend on whom
//!
//! ```text
//! main → cli → {daemon, demo, relay, trial} → {snapshot, journal} → {serve, ingest, client, discovery} → {wire, config, shadow} → route
//!      → predict → {fleet, load, index, event, hash, queue, lane} → {ids, limits, endpoint, error, directory_lock, trust, finding, metrics, reasons, zmtp}
//! ```
//!
//! `route` and everything right of it is pure: time, randomness and bytes are arguments. `tests/tidy.rs` checks the
//! arrows.

// What everything is named and bounded by.
mod directory_lock;
pub mod endpoint;
pub mod error;
pub mod finding;
pub mod ids;
pub mod limits;
pub mod metrics;
mod reasons;
mod sync;
pub mod trust;
pub mod zmtp;

// The write flow, in its order.
pub mod event;
pub mod hash;
pub mod index;
pub mod ingest;
pub mod snapshot;

// The read flow, from the decision outwards.
pub mod fleet;
pub mod journal;
pub mod lane;
pub mod load;
pub mod predict;
pub mod queue;
pub mod route;
pub mod schema_generated;
pub mod serve;
pub mod shadow;
pub mod shares;
pub mod wire;

// The process, and those who talk to it.
pub mod cli;
pub mod client;
pub mod config;
pub mod daemon;
pub mod demo;
pub mod discovery;
pub mod relay;
pub mod trial;
