//! The routing policy: weights, modes and thresholds as one versioned value.

use super::affinity::AffinityPolicy;
use super::disaggregate::DisaggregationPolicy;
use crate::columns::{Column, columns};
use crate::ids::SpaceId;
use crate::protocol::{Mode, Overrides};
use crate::queue::Discipline;
use crate::trust::TrustLevel;

/// How a space chooses its workers. The weights of `kv` are by default those of the router of Dynamo 1.6.1; see
/// [`Policy::kv`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Policy {
    /// Counts changes of the daemon's policies; part of every reply.
    pub version: u64,
    /// The mode of choosing.
    pub mode: Mode,
    /// Credit of a block in device memory.
    pub device_credit: f64,
    /// How fast a prefill backlog reduces the device credit; 0 = not at all.
    pub credit_decay: f64,
    /// Factor of the prefill term.
    pub prefill_load_scale: f64,
    /// Mode `latency`: the weight of a second by which a prefill delays another request of its worker.
    pub delay_weight: f64,
    /// Mode `latency`: the weight of a second by which a prefill delays requests that come later.
    pub later_delay_weight: f64,
    /// Mode `latency`: the weight of a second by which a worker's prefills delay this request's output.
    pub output_delay_weight: f64,
    /// Mode `latency`: costs within this many seconds of the lowest count as equal, if the first token comes about as
    /// early. Among them the router's own order of workers decides. 0 = the lowest cost wins.
    pub near_cost_s: f64,
    /// A number of this router's own among those of the same workers. Its order of workers follows from it.
    pub router_id: u64,
    /// Cost of a request in flight, in blocks.
    pub active_request_weight: f64,
    /// Weight of a block in host memory, 0 to 1.
    pub host_hit_weight: f64,
    /// Weight of a block on disk or in an external store, 0 to 1.
    pub disk_hit_weight: f64,
    /// Credit of a block in a cache that all workers share, beyond those in device memory, 0 to 1.
    pub shared_multiplier: f64,
    /// Randomness of the choice; 0 = random only among equal costs.
    pub temperature: f64,
    /// Whether costs include the prefill term.
    pub track_prefill_tokens: bool,
    /// Whether costs include the decode term.
    pub track_active_blocks: bool,
    /// Whether requests with a common prefix share its blocks while they run.
    pub assume_kv_reuse: bool,
    /// Whether a worker's weight divides its cost.
    pub capability: bool,
    /// The minimum trust of an eligible worker.
    pub trust_min: TrustLevel,
    /// The minimum trust at which a worker's overlap is credited.
    pub credit_trust_min: TrustLevel,
    /// When a worker is too busy to be eligible.
    pub busy: BusyThresholds,
    /// When a request is queued, and for how long.
    pub queue: QueuePolicy,
    /// Session affinity.
    pub affinity: AffinityPolicy,
    /// When the prefill pool is bypassed.
    pub disaggregation: DisaggregationPolicy,
}

/// When requests with a booking wait for a worker.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct QueuePolicy {
    /// A worker has room while its prefill backlog is at most this many times its batch size. If no eligible worker has
    /// room, the request waits. `None` = no request waits.
    pub threshold: Option<f64>,
    /// The order of requests of one priority without a deadline.
    pub discipline: Discipline,
    /// The longest wait of a request that names no deadline, milliseconds.
    pub wait_ms_max: u64,
}

impl Default for QueuePolicy {
    fn default() -> Self {
        Self { threshold: None, discipline: Discipline::Fcfs, wait_ms_max: 30_000 }
    }
}

/// When a rank is busy: above any of these. `None` = never. An engine is removed when all its ranks are busy.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct BusyThresholds {
    /// Active decode blocks, as a share of the worker's capacity, 0 to 1. Ignored if the capacity is unknown.
    pub decode_blocks_share: Option<f64>,
    /// Prefill backlog, tokens.
    pub prefill_tokens: Option<u64>,
    /// Prefill backlog, in batches of the worker.
    pub prefill_steps: Option<f64>,
}

impl BusyThresholds {
    /// Whether any threshold is set.
    #[must_use]
    pub const fn any(&self) -> bool {
        self.decode_blocks_share.is_some() || self.prefill_tokens.is_some() || self.prefill_steps.is_some()
    }
}

impl Default for Policy {
    fn default() -> Self {
        Self {
            version: 1,
            mode: Mode::Latency,
            device_credit: 1.0,
            credit_decay: 0.0,
            prefill_load_scale: 1.0,
            delay_weight: 0.2,
            later_delay_weight: 1.0,
            output_delay_weight: 1.0,
            near_cost_s: 0.0,
            router_id: 0,
            active_request_weight: 0.0,
            host_hit_weight: 0.75,
            disk_hit_weight: 0.25,
            shared_multiplier: 0.0,
            temperature: 0.0,
            track_prefill_tokens: true,
            track_active_blocks: true,
            assume_kv_reuse: true,
            capability: false,
            trust_min: TrustLevel::None,
            credit_trust_min: TrustLevel::None,
            busy: BusyThresholds::default(),
            queue: QueuePolicy::default(),
            affinity: AffinityPolicy::default(),
            disaggregation: DisaggregationPolicy::default(),
        }
    }
}

impl Policy {
    /// The values that a journal records. No recorded decision depends on the others.
    pub(crate) const COLUMNS: &'static [Column<Self>] = columns! {
        "version": version;
        "mode": mode;
        "device_credit": device_credit;
        "credit_decay": credit_decay;
        "prefill_load_scale": prefill_load_scale;
        "delay_weight": delay_weight;
        "later_delay_weight": later_delay_weight;
        "output_delay_weight": output_delay_weight;
        "near_cost_s": near_cost_s;
        "router_id": router_id;
        "active_request_weight": active_request_weight;
        "host_hit_weight": host_hit_weight;
        "disk_hit_weight": disk_hit_weight;
        "shared_multiplier": shared_multiplier;
        "temperature": temperature;
        "track_prefill_tokens": track_prefill_tokens;
        "track_active_blocks": track_active_blocks;
        "assume_kv_reuse": assume_kv_reuse;
        "capability": capability;
        "trust_min": trust_min;
        "credit_trust_min": credit_trust_min;
        "busy_decode_blocks_share": busy.decode_blocks_share;
        "busy_prefill_tokens": busy.prefill_tokens;
        "busy_prefill_steps": busy.prefill_steps;
        "affinity": affinity.mode;
        "affinity_ttl_s": affinity.ttl_s;
        "affinity_factor": affinity.factor;
        "affinity_load_max": affinity.load_max;
    };

    /// The rule and the weights of the router of Dynamo 1.6.1, so that its users get the same decisions.
    #[must_use]
    pub fn kv() -> Self {
        Self { mode: Mode::Kv, ..Self::default() }
    }

    /// Weights that were changed although mode `latency` does not use them, by their names in the configuration.
    #[must_use]
    pub fn weights_without_effect(&self) -> Vec<&'static str> {
        let usual = Self::default();
        let weights = [
            ("device_credit", self.device_credit == usual.device_credit),
            ("credit_decay", self.credit_decay == usual.credit_decay),
            ("prefill_load_scale", self.prefill_load_scale == usual.prefill_load_scale),
            ("active_request_weight", self.active_request_weight == usual.active_request_weight),
            ("shared_multiplier", self.shared_multiplier == usual.shared_multiplier),
            ("track_active_blocks", self.track_active_blocks == usual.track_active_blocks),
            ("assume_kv_reuse", self.assume_kv_reuse == usual.assume_kv_reuse),
            ("capability", self.capability == usual.capability),
        ];
        let changed = weights.into_iter().filter(|(_, is_usual)| !is_usual && self.mode == Mode::Latency);
        changed.map(|(name, _)| name).collect()
    }

    /// Whether the policy of a request with these overrides is this one, as it is of most requests.
    #[must_use]
    #[inline]
    pub fn is_unchanged_by(&self, overrides: &Overrides) -> bool {
        self.mode != Mode::LoadAware && *overrides == Overrides::NONE
    }

    /// The policy of one request: first the request's mode and what it implies, then the other overrides.
    #[must_use]
    pub fn under(&self, overrides: &Overrides) -> Self {
        let mut policy = Self { mode: overrides.mode.unwrap_or(self.mode), ..*self };
        if policy.mode == Mode::LoadAware {
            (policy.device_credit, policy.host_hit_weight, policy.disk_hit_weight) = (0.0, 0.0, 0.0);
            (policy.shared_multiplier, policy.assume_kv_reuse) = (0.0, false);
            (policy.track_prefill_tokens, policy.track_active_blocks) = (true, true);
        }
        policy.device_credit = overrides.device_credit.unwrap_or(policy.device_credit);
        policy.prefill_load_scale = overrides.prefill_load_scale.unwrap_or(policy.prefill_load_scale);
        policy.temperature = overrides.temperature.unwrap_or(policy.temperature);
        policy.shared_multiplier = overrides.shared_multiplier.unwrap_or(policy.shared_multiplier);
        policy.assume_kv_reuse = overrides.assume_kv_reuse.unwrap_or(policy.assume_kv_reuse);
        policy.track_prefill_tokens = overrides.track_prefill_tokens.unwrap_or(policy.track_prefill_tokens);
        policy
    }
}

/// The policies of all spaces at one version.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct PolicyTable {
    /// For spaces without an entry.
    fallback: Policy,
    /// By [`SpaceId`].
    spaces: Vec<Policy>,
}

impl PolicyTable {
    /// The policies by space, with `fallback` for all other spaces, at this version.
    #[must_use]
    pub fn new(version: u64, fallback: &Policy, spaces: &[Policy]) -> Self {
        let versioned = |policy: &Policy| Policy { version, ..*policy };
        Self { fallback: versioned(fallback), spaces: spaces.iter().map(versioned).collect() }
    }

    /// The same policies with a change, at the next version.
    #[must_use]
    pub fn map(&self, change: impl Fn(&Policy) -> Policy) -> Self {
        let spaces: Vec<_> = self.spaces.iter().map(&change).collect();
        Self::new(self.version() + 1, &change(&self.fallback), &spaces)
    }

    /// Whether both tables have the same policies, whatever their versions.
    #[must_use]
    pub fn equals_but_for_version(&self, other: &Self) -> bool {
        let this = Self::new(other.version(), &self.fallback, &self.spaces);
        this == *other
    }

    /// Whether a mode decides in any space, before overrides.
    #[must_use]
    pub fn has_mode(&self, mode: Mode) -> bool {
        self.spaces.iter().any(|policy| policy.mode == mode)
    }

    /// Counts changes, from 1.
    #[must_use]
    pub const fn version(&self) -> u64 {
        self.fallback.version
    }

    /// The policy of a space.
    #[must_use]
    pub fn of(&self, space: SpaceId) -> &Policy {
        self.spaces.get(space.0 as usize).unwrap_or(&self.fallback)
    }

    /// The longest time to live of an affinity binding in any space, seconds.
    #[must_use]
    pub fn affinity_ttl_s_max(&self) -> u32 {
        let policies = self.spaces.iter().chain([&self.fallback]);
        policies.map(|policy| policy.affinity.ttl_s).max().unwrap_or_default()
    }
}

impl Mode {
    /// Whether the choice depends on load, so that a load that changes meanwhile matters.
    #[must_use]
    pub const fn depends_on_load(self) -> bool {
        !matches!(self, Self::RoundRobin | Self::Random | Self::Direct)
    }

    /// What the costs of the mode count.
    pub(super) const fn cost_model(self) -> CostModel {
        match self {
            Self::Kv | Self::LoadAware | Self::Approximate | Self::Direct => CostModel::Blocks,
            Self::LeastLoaded | Self::PowerOfTwo => CostModel::InFlight,
            Self::RoundRobin => CostModel::RoundRobin,
            Self::Random => CostModel::Nothing,
            Self::DeviceAwareWeighted => CostModel::PoolLoad,
            Self::Lmetric => CostModel::UncachedTimesInFlight,
            Self::Latency => CostModel::Seconds,
        }
    }
}

impl Policy {
    /// How a worker is picked by cost.
    pub(super) fn pick(&self) -> Pick {
        let Self { temperature, near_cost_s, router_id, .. } = *self;
        match self.mode {
            Mode::PowerOfTwo => Pick::BetterOfTwo,
            Mode::DeviceAwareWeighted => Pick::LowestThenIdlest,
            Mode::Kv | Mode::LoadAware | Mode::Approximate | Mode::Lmetric | Mode::Latency if temperature > 0.0 => {
                Pick::Sampled { temperature }
            }
            Mode::Latency if near_cost_s > 0.0 => Pick::OwnOrder { near_cost_s, router_id },
            _ => Pick::Lowest,
        }
    }
}

/// The quantity that a cost counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum CostModel {
    /// Blocks to prefill, scaled, plus blocks to decode, minus credits.
    Blocks,
    /// Tokens to compute, times the requests that would then be in flight.
    UncachedTimesInFlight,
    /// Seconds until the first token, plus those by which the prefill delays others and by which others delay its output.
    Seconds,
    /// Requests in flight.
    InFlight,
    /// Requests in flight on the worker's device class, per unit of weight.
    PoolLoad,
    /// Workers that come before it in round-robin order.
    RoundRobin,
    /// Nothing: all costs are 0.
    Nothing,
}

/// How a worker is picked by cost.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Pick {
    /// The lowest cost; a random one of equals.
    Lowest,
    /// The lowest cost, then the fewest requests in flight, then a random one of equals.
    LowestThenIdlest,
    /// Random, with a probability that falls with the cost.
    Sampled {
        /// Above 0; the higher, the less the cost matters.
        temperature: f64,
    },
    /// The lower of two random costs, of equals the first.
    BetterOfTwo,
    /// Of the costs that are nearly the lowest, that of the worker which is first in the order of the router.
    OwnOrder {
        /// Seconds above the lowest cost; above 0.
        near_cost_s: f64,
        /// The order follows from it.
        router_id: u64,
    },
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn overrides_come_after_what_the_mode_implies() {
        let policy = Policy { device_credit: 2.0, track_prefill_tokens: false, ..Policy::default() };
        assert_eq!(policy.under(&Overrides::default()), policy);
        let load_aware = policy.under(&Overrides { mode: Some(Mode::LoadAware), ..Overrides::default() });
        assert_eq!((load_aware.device_credit, load_aware.host_hit_weight, load_aware.disk_hit_weight), (0.0, 0.0, 0.0));
        assert!(!load_aware.assume_kv_reuse && load_aware.track_prefill_tokens && load_aware.track_active_blocks);
        let both = Overrides {
            mode: Some(Mode::LoadAware),
            device_credit: Some(0.5),
            track_prefill_tokens: Some(false),
            ..Overrides::default()
        };
        let both = policy.under(&both);
        assert_eq!((both.device_credit, both.track_prefill_tokens), (0.5, false));
    }

    #[test]
    fn a_policy_that_nothing_changes_is_used_as_it_is() {
        let some = [Overrides::NONE, Overrides { temperature: Some(0.5), ..Overrides::NONE }];
        for (mode, overrides) in
            [Mode::Latency, Mode::Kv, Mode::LoadAware].into_iter().flat_map(|mode| some.map(|set| (mode, set)))
        {
            let policy = Policy { mode, ..Policy::default() };
            assert_eq!(
                policy.is_unchanged_by(&overrides),
                policy.under(&overrides) == policy,
                "{mode:?} {overrides:?}"
            );
        }
    }

    #[test]
    fn weights_of_another_mode_are_named() {
        let changed = Policy { credit_decay: 0.5, capability: true, delay_weight: 1.0, ..Policy::default() };
        assert_eq!(changed.weights_without_effect(), ["credit_decay", "capability"]);
        assert!(Policy { mode: Mode::Kv, ..changed }.weights_without_effect().is_empty());
        assert!(Policy::default().weights_without_effect().is_empty());
    }

    #[test]
    fn a_table_has_one_version_and_a_policy_for_each_space() {
        let table = PolicyTable::new(
            7,
            &Policy::default(),
            &[Policy::default(), Policy { device_credit: 3.0, ..Policy::default() }],
        );
        assert_eq!(table.version(), 7);
        assert_eq!([0, 1, 2].map(|id| table.of(SpaceId(id)).device_credit), [1.0, 3.0, 1.0]);
        assert!([0, 1, 2].iter().all(|id| table.of(SpaceId(*id)).version == 7));
        let later = PolicyTable::new(8, &table.fallback, &table.spaces);
        assert!(later.equals_but_for_version(&table) && later != table);
        let decayed = table.map(|policy| Policy { credit_decay: 0.5, ..*policy });
        assert_eq!(decayed.version(), 8);
        assert_eq!([0, 1, 2].map(|id| decayed.of(SpaceId(id)).credit_decay), [0.5; 3]);
        assert_eq!(decayed.of(SpaceId(1)).device_credit, 3.0);
        assert!(!later.equals_but_for_version(&PolicyTable::new(8, &table.fallback, &[])));
        assert!(table.has_mode(Mode::Latency) && !table.has_mode(Mode::Kv));
    }

    #[test]
    fn names_and_modes_are_in_one_order() {
        for (at, mode) in Mode::ALL.into_iter().enumerate() {
            assert_eq!(mode as usize, at);
            assert_eq!(mode.name(), Mode::NAMES[at]);
        }
        assert_eq!(format!("{:?}", Mode::DeviceAwareWeighted), "DeviceAwareWeighted");
        assert_eq!(Mode::DeviceAwareWeighted.name(), "device-aware-weighted");
    }
}
