//! Requests over sockets: what the daemon's answer costs beside a server that answers without thinking, and beside the
//! peer's selection service over HTTP.
//!
//! `contents` says what workers hold and what is asked, `dialect` how it is put; `server` starts each side as a process
//! of its own (`floor` is the one that does not think), `known` says what it holds, `beside` what engines say
//! meanwhile, `load` asks it, `run` takes the sides in turns, `report` says it. `scaling` asks more cores from more
//! processes.

mod beside;
mod contents;
mod dialect;
mod floor;
mod known;
mod lane;
mod load;
mod processors;
mod report;
mod rows;
mod run;
mod scaling;
mod server;

pub(crate) use dialect::Frames;
pub(crate) use known::framed;
pub(crate) use lane::run as run_lane;
pub(crate) use load::{Measured, Pace, Wire, run as ask_wires};
pub(crate) use report::load_average;
pub(crate) use run::run;
pub(crate) use scaling::{ask, run as scale};
pub(crate) use server::{Server, daemon_command, serve};
