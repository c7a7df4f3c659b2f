//! A relay and a router behind it, over real sockets. A proxy between them loses, repeats and delays messages, and cuts
//! connections. When it stops, the router holds exactly what the engine holds, and knows it.

use kvrouted::fleet::EventSource;
use kvrouted::ingest::{DumpPart, References};
use kvrouted::relay::{Relay, RelayPlan};
use rand::{RngExt, SeedableRng};
use rand_xoshiro::Xoshiro256PlusPlus;

use super::seeds::for_seeds;
use super::*;
use crate::kit::proxy::{FINE, Proxy, Weather};
use crate::kit::replayer::Replayer;

/// Batches sent in bad weather.
const BATCHES: u64 = 150;
/// Between two of them.
const PACE: Duration = Duration::from_millis(8);

/// An engine with work of its own: chains grow, and what is at their ends is evicted.
struct Working {
    engine: Engine,
    replayer: Replayer,
    chance: Xoshiro256PlusPlus,
    /// What it holds: names, and what is in a block that is at a root.
    held: Vec<(u64, Option<u32>)>,
    named: u64,
    next: u64,
}

impl Working {
    fn new(seed: u64) -> Self {
        Self {
            engine: Engine::new(),
            replayer: Replayer::start("tcp://127.0.0.1:*", true),
            chance: Xoshiro256PlusPlus::seed_from_u64(seed),
            held: Vec::new(),
            named: 0,
            next: 0,
        }
    }

    fn source(&self) -> EventSource {
        EventSource {
            endpoint: self.engine.endpoint().parse().expect("an endpoint"),
            replay: Some(self.replayer.endpoint.parse().expect("an endpoint")),
            topic: String::new(),
            snapshots: None,
        }
    }

    fn one_of_held(&mut self) -> usize {
        self.chance.random_range(0..self.held.len())
    }

    fn work(&mut self, batch: Batch) -> Batch {
        if self.chance.random_bool(0.005) {
            self.held.clear();
            return batch.cleared();
        }
        if !self.held.is_empty() && self.chance.random_bool(0.3) {
            let at = self.one_of_held();
            return batch.removed(&[self.held.swap_remove(at).0]);
        }
        let is_root = self.held.is_empty() || self.chance.random_bool(0.2);
        let parent = if is_root { None } else { Some(self.one_of_held()) }.map(|at| self.held[at].0);
        self.named += 1;
        // No two blocks after the same parent are the same: that would be one block under two names.
        let (name, content) = (self.named, self.named as u32);
        self.held.push((name, is_root.then_some(content)));
        batch.stored(parent, &[name], &[content])
    }

    fn publish(&mut self) {
        let mut batch = Batch::new(self.next as u32);
        for _ in 0..self.chance.random_range(1..=3) {
            batch = self.work(batch);
        }
        self.replayer.keep(self.next, batch.payload());
        self.engine.send_batch(self.next, &batch.payload());
        self.next += 1;
    }
}

/// What the shard's worker holds, as a sum over all of it.
fn references(shard: &Shard) -> Option<References> {
    let parts = shard.handle.dump(Worker::new(1, 0)).ok()?;
    parts.iter().find_map(|part| match part {
        DumpPart::End(references) => Some(references),
        _ => None,
    })
}

fn follow(endpoint: &str, replay: &str) -> Shard {
    Shard::recovering(&[(endpoint, Some(replay))], "", IngestConfig::default())
}

/// Bad weather while the engine works: cut in the middle, and parted for a while.
fn storm(engine: &mut Working, [live, replay]: [&Proxy; 2], chance: &mut Xoshiro256PlusPlus) {
    live.set_weather(Weather { lost: 0.1, repeated: 0.1, delay_ms_max: 4 });
    replay.set_weather(Weather { lost: 0.02, repeated: 0.1, delay_ms_max: 1 });
    let [cut, parted] = [chance.random_range(20..60), chance.random_range(70..110)];
    let joined = parted + chance.random_range(1..30);
    for at in 0..BATCHES {
        engine.publish();
        std::thread::sleep(PACE);
        if at == cut || at == parted {
            [live, replay].iter().for_each(|proxy| proxy.part(at == parted));
            [live, replay].iter().for_each(|proxy| proxy.cut());
        }
        if at == joined {
            [live, replay].iter().for_each(|proxy| proxy.part(false));
        }
    }
    [live, replay].iter().for_each(|proxy| proxy.set_weather(FINE));
}

/// One seed; answers whether the router was sent a snapshot.
fn converges(seed: u64) -> bool {
    let mut chance = Xoshiro256PlusPlus::seed_from_u64(seed);
    let mut engine = Working::new(chance.random());
    let mut plan = RelayPlan::new("tcp://127.0.0.1:*", "tcp://127.0.0.1:*", engine.source());
    // A relay that keeps little has to send a snapshot where one that keeps much sends what was lost.
    plan.buffer_batches_max = if seed.is_multiple_of(2) { 1 << 14 } else { 4 };
    plan.heartbeat_ms = 100;
    let relay = Relay::start(&plan).expect("a relay");
    let [live, replay] = [relay.endpoint(), relay.replay()].map(|endpoint| Proxy::start(endpoint, chance.random()));
    // Who hears the engine itself, and loses nothing.
    let witness = follow(&engine.engine.endpoint(), &engine.replayer.endpoint);
    let router = follow(&live.endpoint(), &replay.endpoint());
    (0..10).for_each(|_| engine.publish());
    until("the relay is heard", || router.trust(0).level == TrustLevel::Exact);
    storm(&mut engine, [&live, &replay], &mut chance);

    let last = Some(EventSeq(engine.next - 1));
    until("the witness has it all", || witness.trust(0).as_of_seq == last);
    assert_trust(witness.trust(0), TrustLevel::Exact, &[]);
    let truth = references(&witness).expect("a dump");
    assert_eq!(truth.blocks, engine.held.len() as u64);
    until("the router holds what the engine does", || {
        router.trust(0).level == TrustLevel::Exact && references(&router) == Some(truth)
    });
    assert_trust(router.trust(0), TrustLevel::Exact, &[]);
    for root in engine.held.iter().filter_map(|(_, root)| *root) {
        assert_eq!(router.device(0, &[root]), 1);
    }
    let count = |proxy: &Proxy| [&proxy.done().lost, &proxy.done().repeated, &proxy.done().cut].map(load);
    assert!(count(&live).iter().all(|times| *times > 0), "the weather was bad: {:?}", live.done());
    assert!(router.count(0, C::Disconnects) > 0 && router.count(0, C::ReplaysAsked) > 1);
    router.count(0, C::SnapshotsTaken) > 0
}

fn load(count: &std::sync::atomic::AtomicU64) -> u64 {
    count.load(std::sync::atomic::Ordering::Relaxed)
}

#[test]
fn a_router_behind_a_bad_link_to_a_relay_holds_what_the_engine_does_once_the_link_is_good() {
    let mut snapshots = Vec::new();
    for_seeds("ingest::sockets::relayed", 2, Duration::ZERO, |seed| snapshots.push((seed, converges(seed))));
    for (seed, was_sent) in snapshots {
        assert!(was_sent || seed.is_multiple_of(2), "seed {seed}: a relay that keeps 4 batches sends snapshots");
    }
}
