//! The sockets that gateways and administrators use, and the threads that serve them.
//!
//! ```text
//! Acceptor (control thread) ─ mailbox ─▶ Core thread ─ Stream (epoll | io_uring | lane) ─▶ Connection ─▶ RoutingResponder ─▶ Service
//! HttpPort (its own thread) ─ JSON ─ frames in memory ────────────────────────────────────────────────▶ RoutingResponder ─▶ Service
//! AdminServer (control thread) ────────────────────── Stream (epoll) ────────────────────▶ Connection ─▶ AdminResponder ──▶ AdminService
//! ```
//!
//! A [`Connection`] turns bytes into frames and frames into replies, and knows nothing of I/O backends. A [`Service`]
//! answers requests, and knows nothing of bytes. Between them the responder dispatches each request to the service.
//!
//! A request that finds every worker busy waits in the [`RequestQueue`], which all cores share. Its reply comes back by
//! the mailbox of its connection's core.
//!
//! # Fairness
//!
//! The connections of a core are served in turn. Each has a *fairness quantum*, whose limits are in
//! [`limits`](crate::limits): a number of requests, bytes of requests, bytes of replies, or work. At the end of a quantum
//! its replies are written, and every other connection with something to do has its quantum. So a request waits for at
//! most one quantum of each other connection of its core, and for the earlier requests of its own connection. Nothing
//! interrupts a quantum: the longest is that of the requests that take longest to decide. A reply with the whole fleet,
//! as to a watch, fills a quantum where the fleet is large.
//!
//! A core that has nothing to do sleeps, or busy-polls for a while where that pays: see `busy_poll`.
//!
//! # Where to look
//!
//! | file | subject |
//! |---|---|
//! | `accept` | who may connect, the users' quotas, the choice of a core |
//! | `core` | a serving thread, its mailbox, its drain |
//! | `io_backend` | epoll and io_uring |
//! | `connection`, `receive`, `reply_writer` | a connection: its frames, its receive buffer, its writes |
//! | `deadlines` | connections that are too slow |
//! | `responder` | the dispatcher of the routing socket |
//! | `request_queue`, `wait_flag` | requests that wait for a worker |
//! | `watch` | connections that follow the fleet |
//! | `busy_poll` | polling instead of sleeping |
//! | `lane` | shm lanes |
//! | `admin`, `metrics_page`, `http` | the other ways in |

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

pub use accept::{Acceptor, Admission, Admissions, UserQuotas};
pub use admin::{AdminServer, AdminService};
pub use connection::{Connection, Flow, Peer, Phase, Respond};
pub use core::{Core, CoreHandle, CoreOptions};
pub use http::{HttpBackend, HttpMetrics, HttpPort, HttpThread, WorkerOrder};
pub use io_backend::{IoBackend, IoChoice, choose_io_backend, probe_uring};
pub use lane::Lanes;
pub(crate) use log_quota::LogQuota;
pub use metrics_page::{MetricsPages, MetricsPort, MetricsThread};
pub use request_queue::RequestQueue;
pub use responder::RoutingResponder;
pub use service::{HelloInfo, Routed, Service};
pub use socket_file::{BoundSocket, admin_path};
