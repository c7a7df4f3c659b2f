//! An endpoint picker for Envoy: the external processing protocol (`ext_proc`) as gateways of the Gateway API Inference
//! Extension use it.
//!
//! ```text
//!  Envoy ──gRPC──▶ server ─▶ service ──messages──▶ exchange (state machine, no I/O) ──question──▶ chooser ─▶ router
//!                              ◀──────actions───────┘                     ◀──────list, lease──────┘
//!                  health      observers: streams that only hear a response    endpoints ◀─ sources: file, DNS
//! ```
//!
//! # What Envoy must be configured to do
//!
//! | processing mode | value | otherwise |
//! |---|---|---|
//! | request headers | `SEND` | 500 for each request with a body |
//! | request body | `FULL_DUPLEX_STREAMED` | 500 for each request with a body, with the remedy |
//! | request trailers | `SEND` | Envoy refuses its configuration |
//! | response headers | `SEND` | the picker does not hear who served |
//! | response body | `FULL_DUPLEX_STREAMED`; `NONE` where a second filter observes, see below | |
//!
//! # What the picker's death costs
//!
//! Envoy cuts every answer that passes through the picker, or whose end the picker waits for. Two filters avoid that
//! from Envoy 1.37 on: the picker's own, with `response_body_mode: NONE` and `response_trailer_mode: SKIP`, whose
//! stream ends at the response's headers; and before it one with `observability_mode: true`, on the same picker, which
//! hears the end. The picker joins the two by `x-request-id` (`observers.rs`). `gateway/recipes/envoy-observed.yaml`
//! is such a configuration.
//!
//! Without the second filter the booking would end with the response's headers, and the picker would choose without
//! knowing which requests run.

mod answer;
mod budget;
mod chooser;
mod endpoints;
mod exchange;
mod health;
pub mod messages;
pub mod names;
mod observers;
mod options;
mod server;
mod service;
mod sources;
mod subset;
mod tls;
mod unread;

pub use budget::BodyBudget;
pub use chooser::{Choice, Chooser, Lease};
pub use endpoints::{Endpoint, EndpointConfig, EndpointError, EndpointTable, Endpoints, Place};
pub(crate) use exchange::nobody;
pub use exchange::{Action, Decision, Exchange, ExchangeLimits, Question, ResponseStart};
pub use health::Health;
pub use options::{EppOptions, OptionError};
pub use server::{EppServer, Listen, ListenError};
pub use service::{EppCounters, Services};
pub use sources::{ConfiguredEndpoints, EndpointSource, Resolve, SystemResolver, follow};
pub use subset::Subset;
pub use tls::{Certificate, CertificateError};
