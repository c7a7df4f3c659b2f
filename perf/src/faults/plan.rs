//! Which faults come when: a sequence of rounds that the seed fixes.

use std::collections::BTreeSet;
use std::time::Duration;

use rand::{Rng, RngExt};

use super::network::Weather;

/// What the network always does: few packets are lost, each takes about as long as within one building.
pub(super) const FINE: Weather =
    Weather { loss: 0.0, delay: Duration::from_micros(100), spread: Duration::from_micros(100), cut: BTreeSet::new() };

/// How many routers and engines there are. Routers have the first places of the network.
#[derive(Clone, Copy, Debug)]
pub(super) struct Places {
    /// Routers.
    pub(super) routers: u8,
    /// Engines.
    pub(super) engines: u8,
    /// Brokers: 1 if routers hear each other over NATS, else 0.
    pub(super) brokers: u8,
}

impl Places {
    /// All places.
    pub(super) const fn all(self) -> u8 {
        self.routers + self.engines + self.brokers
    }

    /// The place of an engine.
    pub(super) const fn engine(self, engine: u8) -> u8 {
        self.routers + engine
    }

    /// The place of the broker, if there is one.
    pub(super) fn broker(self) -> Option<u8> {
        (self.brokers > 0).then_some(self.routers + self.engines)
    }
}

/// A fault of the network.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum NetworkFault {
    /// Packets are lost.
    Loss(f64),
    /// Packets take longer, and not all equally long.
    Delay(Duration),
    /// Two routers do not reach each other.
    CutRouters(u8, u8),
    /// A router does not reach some engines.
    CutEngines(u8, EngineBits),
    /// A router is cut from all other places.
    Isolate(u8),
}

/// Engines, a bit for each.
pub(super) type EngineBits = u64;

impl NetworkFault {
    /// Its name in the report.
    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::Loss(_) => "packets lost",
            Self::Delay(_) => "packets delayed",
            Self::CutRouters(..) => "two routers cut from each other",
            Self::CutEngines(..) => "a router cut from engines",
            Self::Isolate(_) => "a router cut from all",
        }
    }

    fn draw(random: &mut impl Rng, places: Places) -> Self {
        let router = random.random_range(0..places.routers);
        match random.random_range(0..5) {
            0 => Self::Loss(random.random_range(0.005..0.05)),
            1 => Self::Delay(Duration::from_millis(random.random_range(1..40))),
            2 => Self::CutRouters(router, (router + random.random_range(1..places.routers)) % places.routers),
            3 => Self::CutEngines(router, random.random_range(1..1 << places.engines)),
            _ => Self::Isolate(router),
        }
    }

    /// What the network does meanwhile.
    pub(super) fn weather(self, places: Places) -> Weather {
        let pair = |a: u8, b: u8| (a.min(b), a.max(b));
        match self {
            Self::Loss(loss) => Weather { loss, ..FINE },
            Self::Delay(delay) => Weather { delay, spread: delay / 2, ..FINE },
            Self::CutRouters(a, b) => Weather { cut: BTreeSet::from([pair(a, b)]), ..FINE },
            Self::CutEngines(router, engines) => {
                let cut = (0..places.engines).filter(|engine| engines >> engine & 1 == 1);
                Weather { cut: cut.map(|engine| pair(router, places.engine(engine))).collect(), ..FINE }
            }
            Self::Isolate(router) => {
                let others = (0..places.all()).filter(|place| *place != router);
                Weather { cut: others.map(|place| pair(router, place)).collect(), ..FINE }
            }
        }
    }
}

/// A fault of a process.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum ProcessFault {
    /// SIGKILL to a router, which starts again after a while.
    KillRouter(u8, Duration),
    /// SIGTERM to a router, which starts again at once.
    RestartRouter(u8),
    /// An engine ends with its sockets, and begins anew after a while.
    KillEngine(u8, Duration),
    /// An engine drops this share of its batches, as at its high-water mark.
    DropBatches(u8, f64),
    /// SIGKILL to the broker, which starts again after a while.
    KillBroker(Duration),
}

impl ProcessFault {
    /// Its name in the report.
    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::KillRouter(..) => "a router killed",
            Self::RestartRouter(_) => "a router restarted",
            Self::KillEngine(..) => "an engine killed",
            Self::DropBatches(..) => "an engine dropped batches",
            Self::KillBroker(_) => "the broker killed",
        }
    }

    fn draw(random: &mut impl Rng, places: Places) -> Self {
        let (router, engine) = (random.random_range(0..places.routers), random.random_range(0..places.engines));
        let pause = Duration::from_millis(random.random_range(100..4000));
        match random.random_range(0..4 + places.brokers) {
            0 => Self::KillRouter(router, pause),
            1 => Self::RestartRouter(router),
            2 => Self::KillEngine(engine, pause),
            3 => Self::DropBatches(engine, random.random_range(0.01..0.3)),
            _ => Self::KillBroker(pause),
        }
    }
}

/// One round: both faults begin together. The network's ends after `lasts`, then there is a pause.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Round {
    /// What the network does.
    pub(super) network: Option<NetworkFault>,
    /// What a process does.
    pub(super) process: Option<ProcessFault>,
    /// How long the network does it. Some last longer than a router may be silent, some do not.
    pub(super) lasts: Duration,
    /// How long nothing happens then.
    pub(super) pause: Duration,
}

impl Round {
    /// The next round.
    pub(super) fn draw(random: &mut impl Rng, places: Places) -> Self {
        let (has_network, has_process) = match random.random_range(0..4) {
            0 => (true, true),
            1 => (true, false),
            _ => (false, true),
        };
        Self {
            network: has_network.then(|| NetworkFault::draw(random, places)),
            process: has_process.then(|| ProcessFault::draw(random, places)),
            lasts: Duration::from_millis(random.random_range(500..8000)),
            pause: Duration::from_millis(random.random_range(200..4000)),
        }
    }

    /// The last round: nothing but a cut between two routers, or between a router and all others if there is a broker between
    /// them. TCP alone needs longest after such a fault, and there is no pause in which it could be over before it is measured.
    pub(super) fn last(random: &mut impl Rng, places: Places) -> Self {
        let router = random.random_range(0..places.routers);
        let other = (router + random.random_range(1..places.routers)) % places.routers;
        let is_direct = places.broker().is_none();
        let cut = if is_direct { NetworkFault::CutRouters(router, other) } else { NetworkFault::Isolate(router) };
        let lasts = Duration::from_millis(random.random_range(500..8000));
        Self { network: Some(cut), process: None, lasts, pause: Duration::ZERO }
    }
}

#[cfg(test)]
mod tests {
    use rand::SeedableRng;
    use rand_xoshiro::Xoshiro256PlusPlus;

    use super::*;

    #[test]
    fn a_seed_fixes_the_plan_and_every_fault_comes() {
        let places = Places { routers: 3, engines: 8, brokers: 1 };
        let plan = || {
            let mut random = Xoshiro256PlusPlus::seed_from_u64(5);
            (0..200).map(|_| Round::draw(&mut random, places)).collect::<Vec<_>>()
        };
        let rounds = plan();
        assert_eq!(rounds, plan());
        let network: BTreeSet<_> = rounds.iter().filter_map(|round| round.network).map(NetworkFault::name).collect();
        let process: BTreeSet<_> = rounds.iter().filter_map(|round| round.process).map(ProcessFault::name).collect();
        assert_eq!((network.len(), process.len()), (5, 5));
    }

    #[test]
    fn a_cut_names_the_lower_place_first_and_no_place_with_itself() {
        let places = Places { routers: 3, engines: 2, brokers: 0 };
        let cut = |fault: NetworkFault| fault.weather(places).cut.into_iter().collect::<Vec<_>>();
        assert_eq!(cut(NetworkFault::CutRouters(2, 0)), [(0, 2)]);
        assert_eq!(cut(NetworkFault::CutEngines(1, 0b10)), [(1, 4)]);
        assert_eq!(cut(NetworkFault::Isolate(1)), [(0, 1), (1, 2), (1, 3), (1, 4)]);
    }
}
