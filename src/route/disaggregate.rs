//! Disaggregated serving: the pool that prefills for another, and when to bypass it.

use super::decision::Decision;
use super::observation::Observation;
use crate::error::{Error, Kind, Result};
use crate::fleet::FleetTable;
use crate::ids::SpaceId;
use crate::load::Load;
use crate::protocol::{BookingRequest, Mode, Overrides, PoolRole, RouteRequest};

/// When a prompt is prefilled by the worker that decodes it, although a prefill pool exists.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Bypass {
    /// Never.
    #[default]
    Off,
    /// When few of its tokens are new to the decode worker.
    IslBounding,
    /// When the prefill worker is busy.
    PrefillLoad,
    /// When either applies.
    IslOrLoad,
}

impl Bypass {
    /// The names used in the configuration.
    pub const NAMES: [&'static str; 4] = ["off", "isl_bounding", "prefill_load", "isl_or_load"];
    /// Every variant, in the order of [`Bypass::NAMES`].
    pub const ALL: [Self; 4] = [Self::Off, Self::IslBounding, Self::PrefillLoad, Self::IslOrLoad];
}

/// When the prefill pool is bypassed. The defaults are those of the router of Dynamo 1.6.1.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DisaggregationPolicy {
    /// The condition.
    pub bypass: Bypass,
    /// "Few" is fewer new tokens than this,
    pub new_tokens_max: u64,
    /// and a smaller share of the prompt than this.
    pub new_share_max: f64,
    /// A prefill worker is busy with a backlog of more than this many of its batches; `None` = never.
    pub prefill_busy_steps: Option<f64>,
    /// The pool is never bypassed while more than this share of the decode worker's blocks is active, 0 to 1; `None` =
    /// no such limit.
    pub decode_busy_share: Option<f64>,
}

impl Default for DisaggregationPolicy {
    fn default() -> Self {
        Self {
            bypass: Bypass::Off,
            new_tokens_max: 2048,
            new_share_max: 0.7,
            prefill_busy_steps: None,
            decode_busy_share: None,
        }
    }
}

/// The facts of a chosen worker that a bypass depends on.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Half {
    /// Tokens of the prompt.
    pub prompt_tokens: u64,
    /// Tokens that the worker would have to compute.
    pub new_tokens: u64,
    /// The worker's load.
    pub load: Load,
    /// Tokens that it batches in one step.
    pub batched_tokens_max: u64,
    /// KV blocks that its device can hold; 0 = unknown.
    pub capacity_blocks: u64,
}

impl Half {
    /// The worker that a decision chose; `None` = none was eligible.
    #[must_use]
    pub fn chosen(observation: &Observation, decision: &Decision) -> Option<Self> {
        let chosen = decision.candidates.first()?;
        let facts = observation.worker(chosen.index)?;
        let prompt_tokens = observation.request.prompt_tokens;
        Some(Self {
            prompt_tokens,
            new_tokens: prompt_tokens - prompt_tokens.min(chosen.terms.cached_tokens as u64),
            load: facts.load,
            batched_tokens_max: facts.batched_tokens_max,
            capacity_blocks: facts.capacity_blocks,
        })
    }
}

impl DisaggregationPolicy {
    /// Whether the decode worker should prefill the prompt too.
    #[must_use]
    pub fn bypasses(&self, decode: &Half, prefill: &Half) -> bool {
        let decode_busy = self.decode_busy_share.is_some_and(|share| {
            decode.capacity_blocks > 0 && decode.load.decode_blocks as f64 > share * decode.capacity_blocks as f64
        });
        if decode_busy {
            return false;
        }
        let new_share = decode.new_tokens as f64 / decode.prompt_tokens.max(1) as f64;
        let is_short = decode.new_tokens < self.new_tokens_max && new_share < self.new_share_max;
        let is_busy = self
            .prefill_busy_steps
            .is_some_and(|steps| prefill.load.prefill_tokens as f64 > steps * prefill.batched_tokens_max as f64);
        match self.bypass {
            Bypass::Off => false,
            Bypass::IslBounding => is_short,
            Bypass::PrefillLoad => is_busy,
            Bypass::IslOrLoad => is_short || is_busy,
        }
    }
}

/// The overrides for the half that only decodes. Its blocks come from the prefill worker, so overlap has no credit,
/// nothing is shared yet, and there is nothing to prefill.
#[must_use]
pub const fn decode_overrides(overrides: &Overrides) -> Overrides {
    Overrides {
        device_credit: Some(0.0),
        assume_kv_reuse: Some(false),
        track_prefill_tokens: Some(false),
        ..*overrides
    }
}

/// The request for the prefill pool, booked under `name`. Pins and allow lists of the original name workers that decode,
/// so they go.
#[must_use]
pub fn prefill_request<'a>(alone: &RouteRequest<'a>, pool: SpaceId, name: Option<&'a str>) -> RouteRequest<'a> {
    let book = alone.book.zip(name).map(|(book, request_id)| BookingRequest { request_id, ..book });
    // Mode `direct` needs the pin, which belongs to the decode half.
    let mode = alone.overrides.mode.filter(|mode| *mode != Mode::Direct);
    let overrides = Overrides { mode, ..alone.overrides };
    RouteRequest { space: pool, book, overrides, pin: None, allow: None, ..*alone }
}

/// The space that prefills for `space`: the prefill pool of the same model and namespace.
///
/// # Errors
/// `InvalidArgument` if `space` only prefills itself.
pub fn prefill_pool(fleet: &FleetTable, space: SpaceId) -> Result<Option<SpaceId>> {
    let Some(decodes) = fleet.space(space) else { return Ok(None) };
    if decodes.role == PoolRole::Prefill {
        let remedy = "name the space of the pool that decodes: the one that prefills is found by model and namespace";
        return Err(Error::new(Kind::InvalidArgument, "disaggregate in a space that only prefills", remedy));
    }
    let pairs_with = |other: &&crate::fleet::Space| {
        other.role == PoolRole::Prefill && (&other.model, &other.namespace) == (&decodes.model, &decodes.namespace)
    };
    Ok(fleet.spaces.iter().find(pairs_with).map(|pool| pool.id))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn idle() -> Half {
        let load = Load::default();
        Half { prompt_tokens: 4000, new_tokens: 4000, load, batched_tokens_max: 100, capacity_blocks: 0 }
    }

    fn policy(bypass: Bypass) -> DisaggregationPolicy {
        DisaggregationPolicy {
            bypass,
            prefill_busy_steps: Some(2.0),
            decode_busy_share: Some(0.5),
            ..Default::default()
        }
    }

    #[test]
    fn a_prompt_with_few_new_tokens_bypasses_the_prefill_pool() {
        let isl = policy(Bypass::IslBounding);
        let new = |prompt_tokens, new_tokens| isl.bypasses(&Half { prompt_tokens, new_tokens, ..idle() }, &idle());
        assert!(new(4000, 2047) && !new(4000, 2048), "fewer than 2048");
        assert!(new(1000, 699) && !new(1000, 700), "and less than 0.7 of it");
        assert!(new(0, 0) && !policy(Bypass::Off).bypasses(&Half { new_tokens: 0, ..idle() }, &idle()));
        assert!(!policy(Bypass::PrefillLoad).bypasses(&Half { new_tokens: 0, ..idle() }, &idle()));
    }

    #[test]
    fn a_busy_prefill_worker_is_bypassed_unless_decode_is_busy_too() {
        let busy = |prefill_tokens| Half { load: Load { prefill_tokens, ..Load::default() }, ..idle() };
        for bypass in [Bypass::PrefillLoad, Bypass::IslOrLoad] {
            assert!(policy(bypass).bypasses(&idle(), &busy(201)) && !policy(bypass).bypasses(&idle(), &busy(200)));
            let full = Half { load: Load { decode_blocks: 51, ..Load::default() }, capacity_blocks: 100, ..idle() };
            assert!(!policy(bypass).bypasses(&full, &busy(201)));
            assert!(policy(bypass).bypasses(&Half { capacity_blocks: 0, ..full }, &busy(201)), "capacity unknown");
        }
        assert!(!policy(Bypass::IslBounding).bypasses(&idle(), &busy(999)));
        assert!(policy(Bypass::IslOrLoad).bypasses(&Half { new_tokens: 1, ..idle() }, &idle()));
    }
}
