//! What a simulated engine is.

use crate::engine_law::{EngineLaw, EnginePreset};
use crate::ids::Tier;
use crate::protocol::PoolRole;

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
    /// The part of requests that it runs.
    pub role: PoolRole,
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
    /// Of an engine that decodes for others: seconds to receive the KV of one token from the engine that computed it. Its
    /// link carries one request after the other.
    pub receive_token_s: f64,
}

/// Tokens of a step, unless an engine's description has another number.
pub const STEP_TOKENS_MAX: u32 = 8192;
/// Requests of a batch, unless an engine's description has another number.
pub const SEQUENCES_MAX: u32 = 256;

impl EngineSpec {
    /// An engine of a preset that runs whole requests, without lower tiers.
    #[must_use]
    pub fn of(preset: &EnginePreset, block_size: u32) -> Self {
        Self {
            class: preset.name.into(),
            role: PoolRole::Both,
            law: preset.law,
            kv_tokens: preset.kv_tokens,
            block_size,
            step_tokens_max: STEP_TOKENS_MAX,
            sequences_max: SEQUENCES_MAX,
            tiers: Vec::new(),
            receive_token_s: 0.0,
        }
    }
}
