//! Daemons on a large fleet: what one machine keeps up with, and what a rank, a batch and a route cost.
//!
//! `contents` says what prompts are made of, `cache` what a rank holds, `engine` is a rank with its sockets, `engines` a
//! process of them, which carries out `orders` that `children` gives. `router` is a daemon, `gateways` ask it, `verify`
//! compares what it says with the caches. `run` puts it together, `report` says it.

mod cache;
mod children;
pub(crate) mod contents;
pub(crate) mod engine;
mod engines;
mod gateways;
mod orders;
mod report;
mod router;
mod run;
mod verify;

pub(crate) use engines::serve as serve_engines;
pub(crate) use run::run;
