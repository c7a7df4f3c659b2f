//! The sockets that gateways and administrators use, and the threads that serve them.
//!
//! ```text
//! Acceptor (control thread) ─ mailbox ─▶ Core thread ─ Stream (epoll | io_uring | lane) ─▶ Connection ─▶ RoutingResponder ─▶ RequestHandler
//! HttpPort (its own thread) ─ JSON ──────────────────────────────────────────────────────────────────────────────────────▶ RequestHandler
//! AdminServer (control thread) ────────────────────── Stream (epoll) ────────────────────▶ Connection ─▶ AdminResponder ──▶ AdminService
//! ```
//!
//! A [`Connection`] turns bytes into frames and frames into replies, and knows nothing of I/O backends. The module
//! [`requests`](crate::requests) does what requests ask for, and knows nothing of bytes. Between them the responder
//! dispatches each request.
//!
//! A request that finds every worker busy waits in the [`RequestQueue`](crate::requests::RequestQueue), which all cores
//! share. Its reply comes back by the mailbox of its connection's core.
//!
//! # Fairness
//!
//! The connections of a core are served in turn. Each has a *fairness quantum*, whose limits are in
//! [`limits`](crate::limits): a number of requests, bytes of requests, bytes of replies, or work. At the end of a
//! quantum its replies are written, and every other connection with something to do has its quantum. So a request waits
//! for at most one quantum of each other connection of its core, and for the earlier requests of its own connection.
//! Nothing interrupts a quantum: the longest is that of the requests that take longest to decide. A reply with the
//! whole fleet, as to a watch, fills a quantum where the fleet is large.
//!
//! A core that has nothing to do sleeps, or busy-polls for a while where that pays: see `busy_poll`.
//!
//! # Where to look
//!
//! | file | subject |
//! |---|---|
//! | `accept` | the users that may connect, the choice of a core |
//! | `socket_file` | the socket files: bound, taken over, removed |
//! | `core` | a serving thread, its mailbox, its drain |
//! | `io_backend` | epoll and io_uring |
//! | `connection`, `receive`, `reply_writer` | a connection: its frames, its receive buffer, its writes |
//! | `deadlines` | connections that are too slow |
//! | `responder` | the dispatcher of the routing socket |
//! | `watch` | connections that follow the fleet |
//! | `busy_poll` | polling instead of sleeping |
//! | `lane` | shm lanes |
//! | `remote` | connections from other hosts |
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
mod listening;
mod metrics_page;
mod receive;
mod remote;
mod reply_writer;
mod responder;
mod socket_file;
mod turns;
mod watch;

pub(crate) use accept::turn_away;
pub use accept::{Acceptor, Admission, Admissions};
pub use admin::{AdminAnswer, AdminCaller, AdminServer, AdminService};
pub use connection::{Connection, Flow, Peer, Phase, Respond};
pub use core::{Core, CoreHandle, CoreMemory, CoreOptions};
pub(crate) use http::{HttpBackend, HttpMemory, HttpMetrics, HttpPort, PortThread, WorkerChangeOrder, draining};
pub use io_backend::{IoBackend, choose_io_backend, probe_uring};
pub use lane::Lanes;
pub use listening::{ListeningSockets, NamedSocket, kept_socket};
pub use metrics_page::{MetricsPages, MetricsPort, MetricsThread, PageForm};
pub(crate) use remote::{RemoteAccess, RemoteConnection, RemotePort, RemoteStats, RunningRemotePort};
pub use responder::RoutingResponder;
pub use socket_file::{BoundSocket, admin_path, next_path};
pub use turns::{Member, Turn, Turns};
