//! Events of engines and what the daemon makes of them: recorded messages, real sockets, the relay, and the engines'
//! own publishers.
#![cfg(feature = "daemon")]

mod captures;
mod engines;
#[path = "../kit/mod.rs"]
mod kit;
mod relay;
mod scoreboard;
mod sockets;
#[allow(dead_code, reason = "each user of the encoder needs a part of it")]
#[path = "../../src/ingest/tests/vllm.rs"]
mod vllm;
