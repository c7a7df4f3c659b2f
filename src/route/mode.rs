//! Ways to choose a worker, as values: what a candidate costs, and who is picked by that.

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
    fn names_and_modes_are_in_one_order() {
        for (at, mode) in Mode::ALL.into_iter().enumerate() {
            assert_eq!(mode as usize, at);
            assert_eq!(mode.name(), Mode::NAMES[at]);
        }
        assert_eq!(format!("{:?}", Mode::DeviceAwareWeighted), "DeviceAwareWeighted");
        assert_eq!(Mode::DeviceAwareWeighted.name(), "device-aware-weighted");
    }
}
