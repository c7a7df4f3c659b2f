//! What a simulated engine is.

use crate::engine_law::EngineLaw;
use crate::ids::Tier;

/// A store below an engine's device memory.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TierSpec {
    /// Host, disk or external.
    pub tier: Tier,
    /// Tokens that it holds.
    pub tokens: u64,
    /// Seconds to bring the KV of one token to the device.
    pub token_s: f64,
}

/// An engine: its speed, its memory and the bounds of its batches.
#[derive(Clone, Debug, PartialEq)]
pub struct EngineSpec {
    /// Engines of one class are alike; constants are learnt for each class.
    pub class: String,
    /// The time of a step.
    pub law: EngineLaw,
    /// Tokens that the KV memory holds.
    pub kv_tokens: u64,
    /// Tokens of a block.
    pub block_size: u32,
    /// Tokens of one step, decoding requests among them.
    pub step_tokens_max: u32,
    /// Requests of one batch.
    pub sequences_max: u32,
    /// Stores below the device, from the fastest to the slowest.
    pub tiers: Vec<TierSpec>,
}
