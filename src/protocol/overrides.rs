//! What a request sets in place of its space's policy.

use super::mode::Mode;

/// Policy values that a request overrides.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Overrides {
    /// The mode of choosing.
    pub mode: Option<Mode>,
    /// Credit of a block in device memory.
    pub device_credit: Option<f64>,
    /// Factor of the prefill term.
    pub prefill_load_scale: Option<f64>,
    /// Randomness of the choice.
    pub temperature: Option<f64>,
    /// Credit of a block in a cache that all workers share.
    pub shared_multiplier: Option<f64>,
    /// Whether requests with a common prefix share its blocks.
    pub assume_kv_reuse: Option<bool>,
    /// Whether costs include the prefill term.
    pub track_prefill_tokens: Option<bool>,
}

impl Overrides {
    /// No override.
    pub const NONE: Self = Self {
        mode: None,
        device_credit: None,
        prefill_load_scale: None,
        temperature: None,
        shared_multiplier: None,
        assume_kv_reuse: None,
        track_prefill_tokens: None,
    };
}
