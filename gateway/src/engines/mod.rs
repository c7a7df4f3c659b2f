//! Engines by their URL: what each can do, whether it answers, and the connections to it.
//!
//! ```text
//!  EngineConfig ──▶ Engine ── send ──▶ connection pool ──▶ vLLM or SGLang
//!                     ▲ facts (models, block size, where its ranks publish, renderers), replaced as a whole
//!                     │
//!                  learn: asks the engine about itself, at the start and then at an interval
//! ```
//!
//! An engine is not trusted: its replies are bounded in bytes and time, redirects are refused, and every field is
//! checked before anything uses it. Facts that an engine does not tell are listed in [`EngineFacts::problems`], with
//! what to name by hand.

mod address;
mod engine;
mod facts;
mod health;
mod learn;
mod replies;
mod set;
mod transport;

pub use address::expand_addresses;
pub(crate) use engine::causes;
pub use engine::{Engine, EngineConfig, EngineError, EngineRole, InflightGuard, Secret};
pub use facts::{Dialect, EngineFacts, ModelFacts, NamedFacts, RankSource, RenderPath, RenderSupport};
pub use health::{Health, HealthState, back_off};
pub use learn::LearnError;
#[doc(hidden)]
pub use replies::read_replies;
pub use set::{EngineSet, ServedModel, WantedEngine, keep_learning};
pub(crate) use transport::DATA_PARALLEL_RANK;
pub use transport::{BoxBody, BoxError, ClientTls, ReadError, body_of, read_bounded};
