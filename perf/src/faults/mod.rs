//! Several routers under faults: each router and each engine in a network namespace of its own, between them a network that
//! loses, delays and cuts, and gateways that route all the time. No overlap may be wrong meanwhile. After the last fault
//! the routers must agree, and nothing may stay booked.
//!
//! `namespace` is a place of the network, `network` carries packets between places, `plan` says which faults come when.
//! `engine` runs a simulated engine and notes what it held (`truth`), `router` a daemon, `broker` a
//! nats-server, `gateways` ask. `check` compares
//! what daemons say with the truth. `run` puts it together, `report` says it.

mod broker;
mod check;
mod engine;
mod gateways;
mod namespace;
mod network;
mod plan;
mod report;
mod router;
mod run;
mod truth;

pub(crate) use run::run;
