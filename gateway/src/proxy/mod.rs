//! The reverse proxy: OpenAI-compatible HTTP in, the right engine out.
//!
//! ```text
//!  listener ─▶ handle ─▶ body (bounds, deadline) ─▶ api (what routing needs) ─▶ choose (router, booking)
//!  (tls, h1, h2)  │                                                                │ candidates, best first
//!                 │ keys (who may, how much)                                       ▼
//!                 └────────────◀── relay (parts, usage, hang-ups) ◀── attempt (engine by engine, until a first byte)
//!
//!  disaggregate   the same for two engines: one computes the prompt, the other one generates
//!
//!  pick    the same question for other proxies: body in, list out
//!  admin   /metrics, /health, /ready, /findings
//! ```
//!
//! A request is sent to another engine only before the first byte of a reply, and only where its connection was refused
//! or broke, or its engine answered 503. The booking ends with the request, however that ends, because the task that
//! relays the reply owns it.

mod access_log;
mod admin;
mod attempt;
mod body;
mod choose;
mod disaggregate;
mod error_reply;
mod handle;
mod headers;
mod keys;
mod listener;
mod log_line;
mod open_picks;
mod pick;
mod prepared;
mod relay;
mod tls;

pub use access_log::{LogSocket, read_log};
pub use admin::Admin;
pub use body::{ReplyBody, ReplyError};
pub use choose::{Asked, Booking, BoxFuture, Candidate, Choice, Choose, Finding, Observer, PrefillChoice};
pub use handle::{Proxy, Settings};
pub(crate) use headers::{Hints, OVERLAP_TOKENS, WORKER};
pub use keys::CallerKeys;
pub use listener::{ConnectionBounds, ConnectionState, Handle, Socket, serve};
#[doc(hidden)]
pub use log_line::read_log_line;
pub use pick::PickServer;
pub use tls::ServerTls;
