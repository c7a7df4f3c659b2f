//! A simulated engine: what it caches, and how long its steps take by an [engine law](crate::engine_law). Pure: the
//! caller's clock says what time it is, so that `simulate` runs it in virtual time and the demo in real time.

mod engine;
mod kv_pool;
mod spec;
mod tier_store;

pub use engine::{Engine, EngineRequest, KvEvent, Part, Progress, RequestId};
pub use spec::{EngineSpec, SEQUENCES_MAX, STEP_TOKENS_MAX, TierSpec};

/// One whole block of a request's tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Block {
    /// The hash of the block's own tokens: a router's local hash. The engine does not use it.
    pub local: u64,
    /// The hash of all tokens up to the end of the block: the engine's name for it.
    pub chain: u64,
}
