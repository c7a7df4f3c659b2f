//! The weights of a decision, as one versioned value.

/// What the cost's terms are weighed by. Defaults are those of Dynamo 1.6.1's router, so that its users
/// get the same decisions.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Policy {
    /// Counts changes; part of every reply.
    pub version: u64,
    /// Credit of a block in device memory.
    pub device_credit: f64,
    /// How fast a backlog lessens that credit; 0 = not at all.
    pub credit_decay: f64,
    /// Factor of the prefill term.
    pub prefill_load_scale: f64,
    /// Cost of a request in flight, in blocks.
    pub active_request_weight: f64,
    /// Weight of a block in host memory, 0 to 1.
    pub host_hit_weight: f64,
    /// Weight of a block on disk or in an external store, 0 to 1.
    pub disk_hit_weight: f64,
    /// Whether the prefill term counts at all.
    pub track_prefill_tokens: bool,
    /// Whether the decode term counts at all.
    pub track_active_blocks: bool,
}

impl Default for Policy {
    fn default() -> Self {
        Self {
            version: 1,
            device_credit: 1.0,
            credit_decay: 0.0,
            prefill_load_scale: 1.0,
            active_request_weight: 0.0,
            host_hit_weight: 0.75,
            disk_hit_weight: 0.25,
            track_prefill_tokens: true,
            track_active_blocks: true,
        }
    }
}
