//! The routing and admin sockets: raw bytes and the client against real serving threads, on every I/O back end that
//! works here, with a service whose answers are fixed.
#![allow(clippy::unwrap_used, reason = "a test may fail by a panic")]

mod client;
mod daemon;
mod fairness;
mod frames;
mod io_denied;
mod lifecycle;
mod service;
mod watch;
