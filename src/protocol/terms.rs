//! The cost of a candidate, as one record of named terms.

/// The terms of a cost, in the order of their computation. The unit is blocks unless a term says otherwise.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct CostTerms {
    /// Blocks of the prompt, including a partial last block.
    pub request_blocks: f64,
    /// Tokens of the prompt that need no computation, each tier at its weight.
    pub cached_tokens: f64,
    /// The same in blocks.
    pub effective_overlap: f64,
    /// Tokens in the worker's prefill backlog.
    pub active_prefill_tokens: f64,
    /// Factor in (0, 1] by which a backlog reduces the device credit.
    pub decay: f64,
    /// Credit for blocks in device memory.
    pub device_credit: f64,
    /// Credit for blocks in host memory.
    pub host_credit: f64,
    /// Credit for blocks on disk or in an external store.
    pub disk_credit: f64,
    /// Credit for blocks in a cache that all workers share.
    pub shared_credit: f64,
    /// The prefill term: blocks to compute, minus all credits, times the scale.
    pub prefill: f64,
    /// Active decode blocks of the worker.
    pub active_decode_blocks: f64,
    /// Decode blocks that the prompt would add.
    pub additional_decode_blocks: f64,
    /// The decode term: the sum of both.
    pub decode: f64,
    /// Requests in flight on the worker.
    pub active_requests: f64,
    /// The cost of these requests.
    pub active_requests_cost: f64,
    /// The worker's weight, which divides the sum; 1 = not applied.
    pub capability_weight: f64,
    /// Factor of the preferred labels; 1 = none.
    pub taint_factor: f64,
    /// Factor of a session that is bound to the worker; 1 = none.
    pub affinity_factor: f64,
    /// The cost that decides. In `kv` it is the sum in blocks; other modes count something else.
    pub cost: f64,
}
