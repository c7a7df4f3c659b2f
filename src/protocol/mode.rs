//! Ways to choose a worker, as a gateway names them.

/// How a worker is chosen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Mode {
    /// By the blocks to compute and the active decode blocks, minus the worker's overlap.
    #[default]
    Kv,
    /// As `kv`, without regard to overlaps.
    LoadAware,
    /// As `kv`, but with predicted overlaps only.
    Approximate,
    /// The worker with the fewest requests in flight.
    LeastLoaded,
    /// Draws two workers and takes the one with fewer requests in flight.
    PowerOfTwo,
    /// One worker after the other.
    RoundRobin,
    /// Any worker.
    Random,
    /// The worker of the request's pin.
    Direct,
    /// The device class with the fewest requests in flight per weight, and its worker with the fewest requests in
    /// flight.
    DeviceAwareWeighted,
    /// The fewest tokens to compute, times the requests that would then be in flight.
    Lmetric,
    /// By the predicted seconds until the first token, and the seconds by which the prefill delays other requests.
    Latency,
}

impl Mode {
    /// Every mode, in the order of the wire's numbers, which begin at 1.
    pub const ALL: [Self; 11] = [
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
        Self::Latency,
    ];

    /// The names used in the configuration, on the command line and in JSON, in the order of [`Mode::ALL`].
    pub const NAMES: [&'static str; 11] = [
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
        "latency",
    ];

    /// Its name.
    #[must_use]
    pub const fn name(self) -> &'static str {
        Self::NAMES[self as usize]
    }
}
