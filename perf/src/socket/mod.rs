//! Requests over sockets: what the daemon's answer costs beside a server that answers without thinking, and beside the
//! peer's selection service over HTTP.
//!
//! `contents` says what workers hold and what is asked, `dialect` how it is put; `server` starts each side as a process
//! of its own (`floor` is the one that does not think), `load` asks it, `run` takes the sides in turns, `report` says it.

mod contents;
mod dialect;
mod floor;
mod lane;
mod load;
mod report;
mod run;
mod server;

pub(crate) use lane::run as run_lane;
pub(crate) use run::run;
pub(crate) use server::serve;
