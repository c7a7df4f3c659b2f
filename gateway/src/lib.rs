//! Two ways into a fleet of vLLM and SGLang servers that need no gateway of your own: an OpenAI-compatible reverse proxy
//! ([`proxy`]) and an endpoint picker for Envoy ([`epp`]). Both ask the daemon which worker should run a prompt.
//!
//! ```text
//!              ┌──────────── proxy (HTTP: the body goes on to the engine) ─────────────┐
//!  caller ────▶│                                                                      │
//!              └──────────── epp   (gRPC: Envoy sends the body, takes a list) ────────┤
//!                                                                                     ▼
//!   api (paths, bodies, errors) ─▶ tokens (the prompt as the engine's tokens) ─▶ router (daemon, booking)
//!                                        │                                            │
//!                                        └──────────────▶ engines ◀───────────────────┘
//!                                            (who they are, what they can, health)
//! ```
//!
//! Dependencies point down: `api` and `limits` know nobody, `engines` knows `api`, `tokens` and `router` know `engines`,
//! `proxy` and `epp` know all of them, and only `serve` assembles. `kubernetes` says which pods there are, with the HTTP
//! and TLS of `engines`. `memory` divides one budget among all of them.

pub mod api;
pub mod config;
#[doc(hidden)]
pub mod demo;
mod descriptors;
pub mod engines;
pub mod epp;
pub mod kubernetes;
mod limits;
pub mod memory;
pub mod metrics;
pub mod parity;
pub mod proxy;
pub mod router;
pub mod serve;
pub mod tokens;
