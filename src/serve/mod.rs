//! HOW gateways ask: sockets, threads and the io engines under them.
//!
//! ```text
//! Acceptor (control thread) ─ mailbox ─▶ Core thread ─ Stream (io_uring | epoll) ─▶ Connection ─▶ RoutingResponder ─▶ Service
//! HttpPort (its own thread) ─ JSON ─ frames in memory ───────────────────────────────────────▶ RoutingResponder ─▶ Service
//! AdminServer (control thread) ───────────────────────── Stream (epoll) ──────────▶ Connection ─▶ AdminResponder ──▶ AdminService
//! ```
//!
//! A request that finds every worker busy is left in the [`WaitingRoom`], which all cores share; its reply comes back by the
//! mailbox of its connection's core.
//!
//! A [`Connection`] turns bytes into frames and frames into replies and knows nothing of engines; a
//! [`Service`] answers and knows nothing of bytes.
//!
//! # Turns
//!
//! The connections of a core take turns, whose bounds are in [`limits`](crate::limits): so many requests, bytes of requests,
//! bytes of replies, or work. When a turn is over its replies are written and every other connection with something to do has one.
//! A request so waits for at most one turn of each other connection of its core, and for its own connection's requests
//! before it. Within a turn nothing is preempted: the longest is that of the requests that take longest to decide, and a
//! reply of the whole fleet, as to a watch, fills a turn of its own where the fleet is large.
//!
//! A core that has nothing to do sleeps, or looks for work for a while where that pays: see `spin`, and `looks` for what it
//! looks at and for how long before the others have their turn.

mod acceptor;
mod admin;
mod admission;
mod awaited;
mod connection;
mod core;
mod engine;
mod epoll;
mod frames;
mod http;
mod lane;
mod late;
mod log_quota;
mod looks;
mod mailbox;
mod metrics_page;
mod outlet;
mod overdue;
mod parking;
mod probe;
mod receive_room;
mod responder;
mod room;
mod service;
mod socket_file;
mod spin;
mod unread;
mod uring;
mod users;
mod watching;

pub use acceptor::Acceptor;
pub use admin::{AdminResponder, AdminServer, AdminService};
pub use admission::{Admission, Admissions};
pub use connection::{Carried, Connection, Flow, Peer, Phase, Respond};
pub use core::{Core, CoreOptions};
pub use http::{HttpBackend, HttpMetrics, HttpPort, HttpThread, WorkerOrder};
pub use lane::{Handed, Lanes};
pub(crate) use log_quota::LogQuota;
pub use mailbox::CoreHandle;
pub use metrics_page::{MetricsPages, MetricsPort, MetricsThread};
pub use overdue::Owed;
pub use probe::{Engine, IoChoice, choose_engine, probe_uring};
pub use receive_room::ReceiveRoom;
pub use responder::RoutingResponder;
pub use room::WaitingRoom;
pub use service::{HelloInfo, Routed, Service};
pub use socket_file::{BoundSocket, admin_path};
pub use users::Users;
