//! Events over ZeroMQ into the index: how many a second, how soon they are seen, and what decoding takes.
//!
//! `frames` makes the messages, `sender` publishes them from a process of its own; `floor`, `ours` and `peer` receive
//! them, in turns; `seen` asks for what was just sent; `decode` has no socket. `run` puts it together, `report` says
//! it.

mod decode;
mod floor;
mod frames;
mod ours;
mod peer;
mod report;
mod run;
mod seen;
mod sender;
mod threads;

pub(crate) use frames::{BLOCK_SIZE, SCHEME, Shape, continued, name, stored, tokens, turned_over};
pub(crate) use run::run;
pub(crate) use sender::serve;
pub(crate) use threads::{clock_ns, nap, nap_exactly};
