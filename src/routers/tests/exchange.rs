//! Routers with real loads over a carrier in memory, in virtual time.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::io;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use bytes::Bytes;

use super::super::{
    Arrived, Asker, Carrier, CarrierCounts, Exchange, ExchangeSettings, Joining, Link, OriginPhase, OriginSettings,
    PublisherSettings, RoutersView, SharedTables, Source, opening,
};
use super::*;
use crate::fleet::{Fleet, FleetTable, WorkerRecord};
use crate::ids::{SpaceId, WorkerIndex, WorkerSlot};
use crate::load::{BookingRef, Demand, Loads, LoadsConfig, PromptBlocks, SessionId};
use crate::metrics::RouterCounter;
use crate::requests::{OthersLoads, RequestQueue};
use crate::route::AffinityTable;

const STEP_NS: u64 = 1_000_000;

/// What is under way between all routers.
#[derive(Debug, Default)]
struct Hub {
    inboxes: BTreeMap<usize, VecDeque<Arrived>>,
    /// Who gets what whom publishes: (publisher, listener).
    admitted: BTreeSet<(usize, usize)>,
    /// Routers of which nothing arrives and to which nothing arrives.
    parted: BTreeSet<usize>,
}

impl Hub {
    fn put(&mut self, from: usize, to: usize, source: Source, message: &[u8]) -> bool {
        let is_open = !self.parted.contains(&from) && !self.parted.contains(&to);
        if is_open {
            // What is sent to a router that has not started waits for it.
            let arrived = Arrived { from: source, bytes: Bytes::copy_from_slice(message) };
            self.inboxes.entry(to).or_default().push_back(arrived);
        }
        is_open
    }
}

/// The way of one router to all others, whose numbers are those of its links.
#[derive(Debug)]
struct InMemory {
    hub: Arc<Mutex<Hub>>,
    at: usize,
    origins: BTreeMap<usize, OriginId>,
    routers: usize,
}

impl InMemory {
    fn connect(hub: &Arc<Mutex<Hub>>, at: usize, routers: usize, opening: &[u8]) -> Self {
        let mut open = hub.lock().expect("whole");
        for to in (0..routers).filter(|to| *to != at) {
            open.put(at, to, Source::Asker(Asker { place: at, number: 0 }), opening);
        }
        Self { hub: Arc::clone(hub), at, origins: BTreeMap::new(), routers }
    }
}

impl Carrier for InMemory {
    fn receive(&mut self, _: Duration, _: u64, arrived: &mut Vec<Arrived>) -> io::Result<()> {
        let mut hub = self.hub.lock().expect("whole");
        arrived.extend(hub.inboxes.entry(self.at).or_default().drain(..));
        Ok(())
    }

    fn publish(&mut self, message: &[u8]) {
        let mut hub = self.hub.lock().expect("whole");
        for to in 0..self.routers {
            if hub.admitted.contains(&(self.at, to)) {
                hub.put(self.at, to, Source::Link(self.at), message);
            }
        }
    }

    fn ask(&mut self, origin: OriginId, message: &[u8]) -> bool {
        let Some((to, _)) = self.origins.iter().find(|(_, of)| **of == origin) else { return false };
        self.hub.lock().expect("whole").put(self.at, *to, Source::Asker(Asker { place: self.at, number: 0 }), message)
    }

    fn answer(&mut self, asker: Asker, message: &[u8]) -> bool {
        self.hub.lock().expect("whole").put(self.at, asker.place, Source::Link(self.at), message)
    }

    fn admit(&mut self, asker: Asker) {
        self.hub.lock().expect("whole").admitted.insert((self.at, asker.place));
    }

    fn is_admitted(&self, asker: Asker) -> bool {
        self.hub.lock().expect("whole").admitted.contains(&(self.at, asker.place))
    }

    fn identify(&mut self, link: usize, origin: OriginId) {
        self.origins.insert(link, origin);
    }

    fn links(&self) -> Vec<(usize, Link)> {
        // The list names the router itself too.
        let own = |to| (to == self.at).then_some(OriginId(to as u64 + 1));
        let origin = |to: usize| own(to).or_else(|| self.origins.get(&to).copied());
        let link = |to| Link { address: format!("{to}"), is_up: true, origin: origin(to), is_broker: false };
        (0..self.routers).map(|to| (to, link(to))).collect()
    }

    fn address(&self) -> &str {
        "memory"
    }

    fn counts(&mut self) -> CarrierCounts {
        CarrierCounts::default()
    }
}

/// A router with loads of its own.
struct Daemon {
    loads: Arc<Loads>,
    fleet: Arc<Fleet>,
    affinities: Arc<AffinityTable>,
    session: SessionId,
    view: Arc<RoutersView>,
    exchange: Exchange<InMemory>,
    now_ns: u64,
}

impl Daemon {
    /// A router of workers, by their ids in the order of their places.
    fn start(hub: &Arc<Mutex<Hub>>, at: usize, routers: usize, workers: &[u64]) -> Self {
        let loads = Arc::new(Loads::new(workers.len(), LoadsConfig::default()));
        let records = (0..).zip(workers).map(|(place, id)| record(place, *id)).collect();
        let fleet = Arc::new(Fleet::new(FleetTable { workers: records, ..FleetTable::default() }));
        let session = loads.open_session(None, 7).expect("a session");
        let (own, view) = (sender(at as u64 + 1, 1), Arc::new(RoutersView::joining()));
        let settings = ExchangeSettings {
            publisher: PublisherSettings { batch_ms: 2, heartbeat_ms: 1000 },
            origins: OriginSettings { silent_ms_max: 3000, ..OriginSettings::default() },
            join_ms_max: 500,
        };
        let keys = keys();
        let affinities = Arc::new(AffinityTable::new(1 << 12, keys.affinity_secret()));
        let policies = Arc::default();
        let queue = Arc::new(RequestQueue::new(1, (1, 1), Instant::now()));
        let others = &OthersLoads::new(Arc::clone(&loads), queue);
        let (loads_of, fleet_of) = (&loads, &fleet);
        let shared =
            SharedTables { loads: loads_of, others, fleet: fleet_of, affinities: &affinities, policies: &policies };
        let carrier = InMemory::connect(hub, at, routers, &opening(&own, &keys));
        // Clocks of two machines have nothing to do with each other.
        let now_ns = at as u64 * 3_600_000_000_000;
        let mut last = 0;
        let nonces = Box::new(move || {
            last += 1;
            Nonce(last)
        });
        let exchange = Exchange::new((carrier, keys), own, settings, shared, (&view, now_ns), nonces);
        Self { loads, fleet, affinities, session, view, exchange, now_ns }
    }

    fn round(&mut self) {
        self.now_ns += STEP_NS;
        let now_ns = self.now_ns;
        self.exchange.round(|| now_ns).expect("the carrier works");
    }

    fn book(&self, request_id: &str, place: u16) {
        let demand = Demand {
            space: SpaceId(0),
            prefill_tokens: 100,
            cached_tokens: 0,
            blocks: PromptBlocks::Alone(10),
            divergence: None,
            block_size: 16,
            expected_output_tokens: 0,
            is_recorded: false,
            is_traced: false,
        };
        self.loads.book(self.session, request_id, 0, at(place), demand, self.now_ns).expect("booked");
    }

    fn free(&self, request_id: &str) {
        self.loads.free(self.session, BookingRef::Request { request_id, attempt: 0 }, self.now_ns);
    }

    fn requests(&self, place: u16) -> u64 {
        self.loads.read(at(place)).requests
    }

    fn count(&self, counter: RouterCounter) -> u64 {
        self.view.counters.get(counter)
    }
}

fn at(place: u16) -> WorkerIndex {
    WorkerIndex::at(place, 0)
}

fn record(place: u16, id: u64) -> WorkerRecord {
    WorkerRecord::new(at(place), worker(id), WorkerSlot(place))
}

fn pass(ms: u64, daemons: &mut [&mut Daemon]) {
    for _ in 0..ms {
        for daemon in daemons.iter_mut() {
            daemon.round();
        }
    }
}

#[test]
fn what_one_router_books_counts_at_the_other_wherever_it_has_the_worker() {
    let hub = Arc::default();
    let (mut a, mut b) = (Daemon::start(&hub, 0, 2, &[5, 6]), Daemon::start(&hub, 1, 2, &[6, 5]));
    pass(60, &mut [&mut a, &mut b]);
    assert!(!a.view.is_joining() && !b.view.is_joining(), "{:?}", b.view.shown());
    a.book("r", 0);
    pass(3, &mut [&mut a, &mut b]);
    assert_eq!((b.requests(1), b.requests(0), a.requests(0)), (1, 0, 1));
    b.book("s", 1);
    pass(10, &mut [&mut a, &mut b]);
    assert_eq!((b.requests(1), a.requests(0)), (2, 2));
    let sent = a.count(RouterCounter::Batches);
    pass(50, &mut [&mut a, &mut b]);
    assert_eq!(a.count(RouterCounter::Batches), sent, "neither tells the other what that one said");
    a.free("r");
    b.free("s");
    pass(10, &mut [&mut a, &mut b]);
    assert_eq!((b.requests(1), a.requests(0)), (0, 0));
    for daemon in [&a, &b] {
        let counts = [RouterCounter::Gaps, RouterCounter::DigestsDiffer, RouterCounter::MessagesUnreadable];
        assert_eq!(counts.map(|counter| daemon.count(counter)), [0; 3]);
    }
}

#[test]
fn a_worker_that_joins_gets_what_others_add_to_it_and_one_that_leaves_is_no_longer_told() {
    let hub = Arc::default();
    let (mut a, mut b) = (Daemon::start(&hub, 0, 2, &[5, 6]), Daemon::start(&hub, 1, 2, &[5]));
    a.book("r", 1);
    pass(60, &mut [&mut a, &mut b]);
    assert_eq!(b.count(RouterCounter::GaugesUnknownWorker), 1);
    let table = |change: fn(&mut FleetTable)| {
        move |table: &mut FleetTable| {
            change(table);
            true
        }
    };
    b.loads.admit(at(1));
    b.fleet.update(table(|table| table.put(record(1, 6))));
    pass(3, &mut [&mut a, &mut b]);
    assert_eq!(b.requests(1), 1);
    a.fleet.update(table(|table| drop(table.take(at(1)))));
    pass(5, &mut [&mut a, &mut b]);
    assert_eq!(b.requests(1), 0);
}

#[test]
fn a_router_that_is_parted_no_longer_counts_and_counts_again_later() {
    let hub: Arc<Mutex<Hub>> = Arc::default();
    let (mut a, mut b) = (Daemon::start(&hub, 0, 2, &[5]), Daemon::start(&hub, 1, 2, &[5]));
    a.book("r", 0);
    pass(1500, &mut [&mut a, &mut b]);
    assert_eq!(b.requests(0), 1);
    hub.lock().expect("whole").parted.insert(0);
    pass(2400, &mut [&mut a, &mut b]);
    assert_eq!(b.requests(0), 1, "not yet");
    pass(1200, &mut [&mut a, &mut b]);
    assert_eq!((b.requests(0), b.count(RouterCounter::Silences)), (0, 1));
    hub.lock().expect("whole").parted.clear();
    pass(1500, &mut [&mut a, &mut b]);
    assert_eq!(b.requests(0), 1);
    let shown = b.view.shown();
    assert!(shown.origins[0].phase == OriginPhase::Live && shown.origins[0].load.requests == 1, "{shown:?}");
}

#[test]
fn a_router_is_joining_until_all_peers_are_known_or_the_time_is_over() {
    let hub = Arc::default();
    let (mut a, mut b) = (Daemon::start(&hub, 0, 3, &[5]), Daemon::start(&hub, 1, 3, &[5]));
    pass(400, &mut [&mut a, &mut b]);
    assert!(a.view.is_joining() && a.view.shown().joining == Joining::Waiting { missing: 1 });
    let mut c = Daemon::start(&hub, 2, 3, &[5]);
    pass(60, &mut [&mut a, &mut b, &mut c]);
    assert!(!a.view.is_joining() && a.view.shown().joining == Joining::Joined, "{:?}", a.view.shown());
    let mut alone = Daemon::start(&Arc::default(), 0, 2, &[5]);
    pass(600, &mut [&mut alone]);
    assert!(!alone.view.is_joining() && alone.view.shown().joining == Joining::Overdue { missing: 1 });
}

#[test]
fn bindings_reach_every_router_once_and_the_later_use_wins() {
    const SPACE: SpaceId = SpaceId(0);
    const TTL_S: u32 = 3600;
    let hub = Arc::default();
    let (mut a, mut b) = (Daemon::start(&hub, 0, 3, &[5, 6]), Daemon::start(&hub, 1, 3, &[5, 6]));
    let bind = |daemon: &Daemon, name: &str, id: u64| {
        let now_s = (daemon.now_ns / 1_000_000_000) as u32;
        daemon.affinities.bind(SPACE, name, (worker(id), 7), now_s, TTL_S);
    };
    let bound = |daemon: &Daemon, name: &str| {
        daemon.affinities.worker_of(SPACE, name, (daemon.now_ns / 1_000_000_000) as u32, TTL_S)
    };
    pass(100, &mut [&mut a, &mut b]);
    bind(&a, "s", 5);
    pass(2500, &mut [&mut a, &mut b]);
    assert_eq!(bound(&b, "s"), Some(worker(5)));
    bind(&b, "s", 6);
    bind(&b, "t", 5);
    pass(3500, &mut [&mut a, &mut b]);
    assert_eq!((bound(&a, "s"), bound(&a, "t")), (Some(worker(6)), Some(worker(5))));
    assert_eq!(bound(&b, "s"), Some(worker(6)), "the earlier use does not come back");
    let heard = [&a, &b].map(|daemon| daemon.count(RouterCounter::BindingsHeard));
    pass(5000, &mut [&mut a, &mut b]);
    assert_eq!([&a, &b].map(|daemon| daemon.count(RouterCounter::BindingsHeard)), heard, "no echo");
    // One that comes later has them from a snapshot.
    let mut c = Daemon::start(&hub, 2, 3, &[5, 6]);
    pass(200, &mut [&mut a, &mut b, &mut c]);
    assert_eq!((bound(&c, "s"), bound(&c, "t")), (Some(worker(6)), Some(worker(5))));
}
