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

mod accept;
mod admin;
mod busy_poll;
mod connection;
mod core;
mod deadlines;
mod http;
mod io_backend;
mod lane;
mod log_quota;
mod metrics_page;
mod receive;
mod reply_writer;
mod request_queue;
mod responder;
mod service;
mod socket_file;
mod wait_flag;
mod watch;

pub use accept::Acceptor;
pub use accept::Users;
pub use accept::{Admission, Admissions};
pub use admin::{AdminResponder, AdminServer, AdminService};
pub use connection::{Carried, Connection, Flow, Peer, Phase, Respond};
pub use core::CoreHandle;
pub use core::{Core, CoreOptions};
pub use deadlines::Owed;
pub use http::{HttpBackend, HttpMetrics, HttpPort, HttpThread, WorkerOrder};
pub use io_backend::{Engine, IoChoice, choose_engine, probe_uring};
pub use lane::{Handed, Lanes};
pub(crate) use log_quota::LogQuota;
pub use metrics_page::{MetricsPages, MetricsPort, MetricsThread};
pub use receive::ReceiveRoom;
pub use request_queue::WaitingRoom;
pub use responder::RoutingResponder;
pub use service::{HelloInfo, Routed, Service};
pub use socket_file::{BoundSocket, admin_path};
