//! Proxies in front of one trivial upstream: what each adds to a request, and what it costs in processor time.
//!
//! `bodies` says what is asked and answered, `upstream` answers it in a process of its own. `proxies` starts each way
//! (`envoy` writes its configuration, `programs` finds who is there), `processes` watches what they use, `load` asks,
//! `run` takes the ways in turns, `report` says it.

mod bodies;
mod envoy;
mod load;
mod processes;
mod programs;
mod proxies;
mod report;
mod run;
mod upstream;

pub(crate) use run::run;
pub(crate) use upstream::serve;
