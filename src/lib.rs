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
//! * **Write.** A worker's shard follows from its id and rank alone. Each shard has one ingest thread, which
//!   reads the publishers' sockets and is the only one to change its part of every index: an event stays on
//!   one thread from the socket to the index.
//! * **Read.** A connection belongs to one serving thread, which answers what it read before it reads on. No
//!   lock is taken until something is booked, but where what is in flight changes under the look again and again.
//! * **HTTP.** A port for clients of Dynamo's services has a thread of its own, which is one more gateway: it decides by the
//!   same code as a core, and no core waits for it.
//! * **Control.** The main thread accepts connections and hands them to cores, answers the admin socket and
//!   `/metrics`, expires bookings, and drains on SIGTERM.
//!
//! # Who may depend on whom
//!
//! ```text
//! main → cli → {daemon, demo, relay, trial} → {snapshot, journal} → {serve, ingest, client, discovery} → {wire, config, shadow} → route
//!      → predict → {fleet, load, index, event, hash, queue, lane} → {ids, limits, endpoint, error, directory_lock, trust, finding, metrics, reasons, zmtp}
//! ```
//!
//! `route` and everything right of it is pure: time, randomness and bytes are arguments. `tests/tidy.rs`
//! holds the arrows to what is written here.
//!
//! A newcomer reads [`route`] (the decision), then [`index`] (what is promised about it), then
//! [`event::gate`] (why a gap cannot make the index lie).

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
