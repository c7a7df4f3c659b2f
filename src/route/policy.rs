//! The routing policy: weights, modes and thresholds as one versioned value.

use super::affinity::AffinityPolicy;
use super::disaggregate::DisaggregationPolicy;
use crate::ids::SpaceId;
use crate::queue::Discipline;
use crate::trust::TrustLevel;

/// How workers of a space are chosen. Defaults are those of Dynamo 1.6.1's router, so that its users
/// get the same decisions.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Policy {
    /// Counts changes of all policies of a daemon; part of every reply.
    pub version: u64,
    /// How a worker is chosen.
    pub mode: Mode,
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
    /// Credit of a block in a cache shared by all workers, beyond what the worker has in device memory, 0 to 1.
    pub shared_multiplier: f64,
    /// How much chance there is in the choice; 0 = none but among equals.
    pub temperature: f64,
    /// Whether the prefill term counts at all.
    pub track_prefill_tokens: bool,
    /// Whether the decode term counts at all.
    pub track_active_blocks: bool,
    /// Whether requests with a prefix in common are taken to share its blocks while they run.
    pub assume_kv_reuse: bool,
    /// Whether a worker's weight divides its cost.
    pub capability: bool,
    /// Workers that are believed less are out of the running.
    pub trust_min: TrustLevel,
    /// What workers that are believed less hold is not counted.
    pub credit_trust_min: TrustLevel,
    /// When a worker is too busy to be in the running.
    pub busy: BusyThresholds,
    /// When a request waits for a worker, and for how long.
    pub queue: QueuePolicy,
    /// How sessions are kept with their workers.
    pub affinity: AffinityPolicy,
    /// When the pool that prefills is passed by.
    pub disaggregation: DisaggregationPolicy,
}

/// When requests that are booked wait for a worker.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct QueuePolicy {
    /// A worker with more tokens to prefill than so many times those of its batch has no room; where nobody has, a
    /// request waits. `None` = nobody waits.
    pub threshold: Option<f64>,
    /// Who comes first among those of one priority without a deadline.
    pub discipline: Discipline,
    /// How long a request waits that does not say it, milliseconds.
    pub wait_ms_max: u64,
}

impl Default for QueuePolicy {
    fn default() -> Self {
        Self { threshold: None, discipline: Discipline::Fcfs, wait_ms_max: 30_000 }
    }
}

/// When a rank is busy: where any of them is exceeded. `None` = never. An engine is out of the running when all of its
/// ranks are.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct BusyThresholds {
    /// Active decode blocks, as a share of the worker's capacity, 0 to 1. Not applied where the capacity is not known.
    pub decode_blocks_share: Option<f64>,
    /// Active prefill tokens.
    pub prefill_tokens: Option<u64>,
    /// Active prefill tokens, in steps of the worker's batch.
    pub prefill_steps: Option<f64>,
}

impl BusyThresholds {
    /// Whether there is any.
    #[must_use]
    pub const fn any(&self) -> bool {
        self.decode_blocks_share.is_some() || self.prefill_tokens.is_some() || self.prefill_steps.is_some()
    }
}

impl Default for Policy {
    fn default() -> Self {
        Self {
            version: 1,
            mode: Mode::Kv,
            device_credit: 1.0,
            credit_decay: 0.0,
            prefill_load_scale: 1.0,
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

/// What a request sets in place of its space's policy.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Overrides {
    /// How the worker is chosen.
    pub mode: Option<Mode>,
    /// Credit of a block in device memory.
    pub device_credit: Option<f64>,
    /// Factor of the prefill term.
    pub prefill_load_scale: Option<f64>,
    /// How much chance there is in the choice.
    pub temperature: Option<f64>,
    /// Credit of a block in a cache shared by all workers.
    pub shared_multiplier: Option<f64>,
    /// Whether requests with a prefix in common are taken to share its blocks.
    pub assume_kv_reuse: Option<bool>,
    /// Whether the prefill term counts.
    pub track_prefill_tokens: Option<bool>,
}

impl Overrides {
    /// Nothing.
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

impl Policy {
    /// The policy that one request is judged by: the mode first with what it implies, then what the request sets.
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
    /// Of spaces that are not listed.
    fallback: Policy,
    /// By [`SpaceId`].
    spaces: Vec<Policy>,
}

impl PolicyTable {
    /// The policies by space, and that of spaces that are not listed, as version `version`.
    #[must_use]
    pub fn new(version: u64, fallback: &Policy, spaces: &[Policy]) -> Self {
        let versioned = |policy: &Policy| Policy { version, ..*policy };
        Self { fallback: versioned(fallback), spaces: spaces.iter().map(versioned).collect() }
    }

    /// The policies with something changed, as the next version.
    #[must_use]
    pub fn map(&self, change: impl Fn(&Policy) -> Policy) -> Self {
        let spaces: Vec<_> = self.spaces.iter().map(&change).collect();
        Self::new(self.version() + 1, &change(&self.fallback), &spaces)
    }

    /// Whether it says the same, whatever the versions.
    #[must_use]
    pub fn says_the_same(&self, other: &Self) -> bool {
        let this = Self::new(other.version(), &self.fallback, &self.spaces);
        this == *other
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
}

/// How a worker is chosen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Mode {
    /// By the blocks that would have to be computed and those that are run already, less what the worker holds.
    #[default]
    Kv,
    /// As `kv`, without any regard to what workers hold.
    LoadAware,
    /// As `kv`, on what is predicted of workers alone: nothing that events say counts.
    Approximate,
    /// The fewest requests in flight.
    LeastLoaded,
    /// Two workers are drawn, and the one with fewer requests in flight is taken.
    PowerOfTwo,
    /// Each in its turn.
    RoundRobin,
    /// Any.
    Random,
    /// The one that the request is pinned to.
    Direct,
    /// The device class with the fewest requests in flight for its weight, and the fewest within it.
    DeviceAwareWeighted,
    /// The fewest tokens to compute, times the requests that would then be in flight.
    Lmetric,
}

impl Mode {
    /// Every mode, in the order of the wire's numbers, which begin at 1.
    pub const ALL: [Self; 10] = [
        Self::Kv,
        Self::LoadAware,
        Self::Approximate,
        Self::LeastLoaded,
        Self::PowerOfTwo,
        Self::RoundRobin,
        Self::Random,
        Self::Direct,
        Self::DeviceAwareWeighted,
        Self::Lmetric,
    ];

    /// The names used in the configuration, on the command line and in JSON, in the order of [`Mode::ALL`].
    pub const NAMES: [&'static str; 10] = [
        "kv",
        "load-aware",
        "approximate",
        "least-loaded",
        "power-of-two",
        "round-robin",
        "random",
        "direct",
        "device-aware-weighted",
        "lmetric",
    ];

    /// Its name.
    #[must_use]
    pub const fn name(self) -> &'static str {
        Self::NAMES[self as usize]
    }

    /// Whether a load that moves while a worker is chosen can change who is.
    #[must_use]
    pub const fn heeds_load(self) -> bool {
        !matches!(self, Self::RoundRobin | Self::Random | Self::Direct)
    }

    /// What its candidates cost.
    pub(super) const fn cost_model(self) -> CostModel {
        match self {
            Self::Kv | Self::LoadAware | Self::Approximate | Self::Direct => CostModel::Blocks,
            Self::LeastLoaded | Self::PowerOfTwo => CostModel::InFlight,
            Self::RoundRobin => CostModel::RoundRobin,
            Self::Random => CostModel::Nothing,
            Self::DeviceAwareWeighted => CostModel::PoolLoad,
            Self::Lmetric => CostModel::UncachedTimesInFlight,
        }
    }

    /// Who is picked by that cost, at this temperature.
    pub(super) fn pick(self, temperature: f64) -> Pick {
        match self {
            Self::PowerOfTwo => Pick::BetterOfTwo,
            Self::DeviceAwareWeighted => Pick::LowestThenIdlest,
            Self::Kv | Self::LoadAware | Self::Approximate | Self::Lmetric if temperature > 0.0 => {
                Pick::Sampled { temperature }
            }
            _ => Pick::Lowest,
        }
    }
}

/// What a candidate costs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum CostModel {
    /// Blocks to prefill, scaled, and to decode, less credits.
    Blocks,
    /// Tokens that it would have to compute, times the requests it would then run.
    UncachedTimesInFlight,
    /// Requests in flight.
    InFlight,
    /// Requests in flight on workers of its device class, for each unit of their weight.
    PoolLoad,
    /// How many others have their turn before it.
    RoundRobin,
    /// 0: all are equal.
    Nothing,
}

/// Who is picked by the costs.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Pick {
    /// The lowest, any of equals.
    Lowest,
    /// The lowest, of equals the one with the fewest requests in flight, any of equals in both.
    LowestThenIdlest,
    /// Each with a probability that falls with its cost.
    Sampled {
        /// Above 0; the higher, the less the cost matters.
        temperature: f64,
    },
    /// The lower of two that are drawn, of equals the first.
    BetterOfTwo,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_request_sets_comes_after_what_its_mode_implies() {
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
        assert!(later.says_the_same(&table) && later != table);
        let decayed = table.map(|policy| Policy { credit_decay: 0.5, ..*policy });
        assert_eq!(decayed.version(), 8);
        assert_eq!([0, 1, 2].map(|id| decayed.of(SpaceId(id)).credit_decay), [0.5; 3]);
        assert_eq!(decayed.of(SpaceId(1)).device_credit, 3.0);
        assert!(!later.says_the_same(&PolicyTable::new(8, &table.fallback, &[])));
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
