//! What comes to the daemon's sockets: the protocol, shm lanes, HTTP, and clients that attack.
#![cfg(feature = "daemon")]

mod http;
#[path = "../kit/mod.rs"]
mod kit;
mod lane;
mod remote;
mod security;
mod serving;
