//! A router behind a relay, over links that lose, repeat, delay and break. Its trust is never too high. Once the links
//! are good again, it has exactly the relay's blocks and trust.

use std::collections::{BTreeMap, VecDeque};

use rand::{RngExt, SeedableRng};
use rand_xoshiro::Xoshiro256PlusPlus;

use super::super::paths;
use super::*;
use crate::event::flat::UNNUMBERED;
use crate::index::DumpCursor;
use crate::ingest::stream::ReplayEnd;
use crate::ingest::tests::C;
use crate::limits::{REPLAY_FIRST_MS_MAX, REPLAY_NEXT_MS_MAX};
use crate::relay::{Answer, Message, Step as AnswerStep, TakenSnapshot};
use crate::trust::TrustReason;

/// The faults of a link between relay and router: the share of messages for each.
#[derive(Clone, Copy, Debug)]
struct Weather {
    lost: f64,
    twice: f64,
    /// A moment in which nothing arrives, until the next.
    delayed: f64,
}

const FINE: Weather = Weather { lost: 0.0, twice: 0.0, delayed: 0.0 };

/// The way from relay to router: in order, as any connection is.
struct Link {
    chance: Xoshiro256PlusPlus,
    weather: Weather,
    is_parted: bool,
    under_way: VecDeque<(EventSeq, Arc<[u8]>)>,
}

impl Link {
    fn happens(&mut self, share: f64) -> bool {
        self.chance.random_bool(share)
    }

    fn loses(&mut self) -> bool {
        self.is_parted || self.happens(self.weather.lost)
    }

    /// Takes a message, and returns the messages that arrive now.
    fn carry(&mut self, message: Option<(EventSeq, Arc<[u8]>)>) -> Vec<(EventSeq, Arc<[u8]>)> {
        if let Some(message) = message
            && !self.loses()
        {
            if self.happens(self.weather.twice) {
                self.under_way.push_back(message.clone());
            }
            self.under_way.push_back(message);
        }
        if self.happens(self.weather.delayed) { Vec::new() } else { self.under_way.drain(..).collect() }
    }
}

/// The sum of a worker's references in an index.
fn references(rig: &Rig) -> References {
    let (mut sum, mut cursor) = (References::default(), DumpCursor::default());
    while rig.space.writer.dump(rig.streams[0].slot, &mut cursor, usize::MAX, &mut |store| sum.add(&store)) {}
    sum
}

/// An engine, its relay, a link and a router.
struct World {
    engine: Engine,
    relay: RelayRig,
    generation: u64,
    buffer_batches_max: usize,
    link: Link,
    router: Rig,
    /// The relay's blocks and trust after each batch.
    truths: BTreeMap<(u64, EventSeq), (References, TrustLevel)>,
    snapshots: u64,
}

impl World {
    fn new(seed: u64, weather: Weather, buffer_batches_max: usize) -> Self {
        let generation = 1_000;
        let mut router = Rig::new(&Options::default());
        router.streams[0].set_replays(true, router.now);
        let chance = Xoshiro256PlusPlus::seed_from_u64(seed);
        let relay = RelayRig::new(RelayName { generation, ..NAME }, buffer_batches_max);
        let link = Link { chance, weather, is_parted: false, under_way: VecDeque::new() };
        let engine = Engine::default();
        let truths = BTreeMap::new();
        let mut world = Self { engine, relay, generation, buffer_batches_max, link, router, truths, snapshots: 0 };
        world.send_live();
        world.connect();
        world
    }

    fn connect(&mut self) {
        let now = self.router.now;
        self.router.streams[0].connected(&mut self.router.space, now);
    }

    fn reconnect(&mut self) {
        self.link.under_way.clear();
        let now = self.router.now;
        self.router.streams[0].disconnected(&mut self.router.space, now);
        self.connect();
    }

    /// The relay starts anew beside an engine that goes on, or that starts anew too.
    fn restart_relay(&mut self, with_engine: bool) {
        self.generation += 1_000;
        self.relay = RelayRig::new(RelayName { generation: self.generation, ..NAME }, self.buffer_batches_max);
        if with_engine {
            self.engine.restart();
        }
        self.reconnect();
        self.send_live();
    }

    fn work(&mut self, work: &Work, fate: Fate) {
        step(&mut self.relay, &mut self.engine, work, fate);
        self.send_live();
    }

    /// Sends the relay's new batches. Its blocks now are those after the last of them; the states after the earlier
    /// ones are not recorded.
    fn send_live(&mut self) {
        let live = self.relay.take_live();
        if let Some((last, payload)) = live.last() {
            let generation = decoded(payload).info().generation.expect("a relay's");
            let truth = (references(&self.relay.rig), self.relay.rig.trust().level);
            self.truths.insert((generation, *last), truth);
        }
        for message in live {
            self.carry(Some(message));
        }
    }

    fn carry(&mut self, message: Option<(EventSeq, Arc<[u8]>)>) {
        for (seq, payload) in self.link.carry(message) {
            self.router.send_bytes(0, seq.0, &payload);
            self.release();
        }
    }

    fn release(&mut self) {
        let Rig { space, streams, scratch, now, .. } = &mut self.router;
        while streams[0].is_releasing() {
            streams[0].release(space, scratch, *now);
        }
        streams[0].show(space);
    }

    fn pass(&mut self, ms: u64) {
        self.router.now.uptime_ms += ms;
        self.router.now.unix_ms += ms;
        let mut now = self.relay.rig.now;
        now.uptime_ms += ms;
        self.relay.rig.now = now;
        self.relay.rig.streams[0].republish(|republisher| republisher.tick(now));
        let heartbeats = std::mem::take(&mut self.relay.sent.lock().heartbeats);
        for payload in heartbeats {
            self.carry(Some((UNNUMBERED, payload)));
        }
        self.carry(None);
        let now = self.router.now;
        self.router.streams[0].tick(0, now);
        self.router.streams[0].probe(5_000, now);
        self.router.streams[0].show(&mut self.router.space);
    }

    /// Lets the router ask, if it wants to, and the relay answer. Meanwhile the relay publishes more.
    fn replay(&mut self, meanwhile: &[Work]) {
        let now = self.router.now;
        if self.router.streams[0].wants_replay(now).is_none() {
            return;
        }
        let from = self.router.streams[0].ask_replay(now).expect("wanted");
        let (mut answer, mut meanwhile) = (Answer::new(from), meanwhile.iter());
        let is_heard = !self.link.loses();
        let mut snapshot = None;
        while is_heard && self.router.streams[0].awaits_replay() {
            let next = answer.step(&self.relay.sent.lock().buffer, snapshot.as_ref());
            match next {
                AnswerStep::Send(message) => {
                    answer.sent(&message);
                    let times =
                        if self.link.loses() { 0 } else { 1 + usize::from(self.link.happens(self.link.weather.twice)) };
                    (0..times).for_each(|_| self.answered(&message));
                }
                AnswerStep::NeedsSnapshot => snapshot = Some(self.snapshot()),
                AnswerStep::GiveUp | AnswerStep::Over => break,
            }
            if let Some(work) = meanwhile.next() {
                self.work(work, Fate::Arrives);
            }
        }
        if self.router.streams[0].awaits_replay() {
            // A heartbeat or batch that arrives meanwhile may have ended it.
            self.pass(REPLAY_FIRST_MS_MAX.max(REPLAY_NEXT_MS_MAX));
            let now = self.router.now;
            if self.router.streams[0].replay_has_timed_out(now) {
                self.router.streams[0].replay_ended(&mut self.router.space, ReplayEnd::Missing, now);
            }
        }
        assert!(!self.router.streams[0].awaits_replay());
        self.release();
    }

    fn snapshot(&mut self) -> TakenSnapshot {
        self.snapshots += 1;
        let mut snapshot = TakenSnapshot::new(self.snapshots, NAME);
        let parts = self.relay.rig.dump();
        parts.iter().for_each(|part| snapshot.take(part));
        snapshot
    }

    fn answered(&mut self, message: &Message) {
        let Rig { space, streams, scratch, now, .. } = &mut self.router;
        let (stream, now) = (&mut streams[0], *now);
        if !stream.awaits_replay() {
            return;
        }
        match message {
            Message::Batch(seq, payload) => stream.replayed(space, scratch, *seq, payload, now),
            Message::Part(payload) => stream.replayed_part(space, scratch, payload, now),
            Message::End => stream.replay_ended(space, ReplayEnd::Marker, now),
        }
        stream.show(space);
    }

    /// If the router is exact, it holds the relay's blocks after the last applied batch.
    fn check(&self) -> Result<(), TestCaseError> {
        let trust = self.router.trust();
        if trust.level < TrustLevel::Exact {
            return Ok(());
        }
        let stream = &self.router.streams[0];
        let (generation, last) = (stream.generation(), stream.gate().last());
        let truth = generation.zip(last).and_then(|at| self.truths.get(&at));
        if let Some((held, level)) = truth {
            prop_assert_eq!((references(&self.router), trust.level), (*held, *level), "{:?} {:?}", generation, last);
        }
        Ok(())
    }

    /// The links are good from now on.
    fn heal(&mut self) {
        self.link.weather = FINE;
        self.link.is_parted = false;
        for _ in 0..40 {
            self.pass(1_000);
            self.replay(&[]);
        }
        // A recovery given up is begun again after some time.
        for _ in 0..40 {
            self.pass(10_000);
            self.replay(&[]);
        }
    }

    /// The router has the relay's blocks and trust.
    fn is_equal(&mut self) -> Result<(), TestCaseError> {
        let (here, there) = (self.router.trust(), self.relay.rig.trust());
        prop_assert_eq!((here.level, here.reasons), (there.level, there.reasons));
        prop_assert_eq!(references(&self.router), references(&self.relay.rig));
        for path in paths() {
            prop_assert_eq!(self.router.device(&path), self.relay.rig.device(&path), "{:?}", path);
        }
        Ok(())
    }
}

#[derive(Clone, Debug)]
enum Happening {
    Work(Work, Fate),
    Pass(u64),
    Replay(Vec<Work>),
    /// The connection breaks and is made again.
    Reconnect,
    Part,
    Mend,
    RestartRelay(bool),
}

fn happening() -> impl Strategy<Value = Happening> {
    prop_oneof![
        30 => (work(), fate()).prop_map(|(work, fate)| Happening::Work(work, fate)),
        8 => (0_u64..3_000).prop_map(Happening::Pass),
        12 => prop::collection::vec(work(), 0..4).prop_map(Happening::Replay),
        1 => Just(Happening::Reconnect),
        1 => Just(Happening::Part),
        2 => Just(Happening::Mend),
        1 => any::<bool>().prop_map(Happening::RestartRelay),
    ]
}

fn weather() -> impl Strategy<Value = Weather> {
    (0.0..0.5, 0.0..0.3, 0.0..0.5).prop_map(|(lost, twice, delayed)| Weather { lost, twice, delayed })
}

impl World {
    fn happens(&mut self, happening: &Happening) {
        match happening {
            Happening::Work(work, fate) => self.work(work, *fate),
            Happening::Pass(ms) => self.pass(*ms),
            Happening::Replay(meanwhile) => self.replay(meanwhile),
            Happening::Reconnect => self.reconnect(),
            Happening::Part => self.link.is_parted = true,
            Happening::Mend => self.link.is_parted = false,
            Happening::RestartRelay(with_engine) => self.restart_relay(*with_engine),
        }
    }
}

proptest! {
    #[test]
    fn a_router_behind_a_bad_link_converges_to_its_relay(
        (seed, weather, buffer_batches_max) in (any::<u64>(), weather(), prop_oneof![Just(2), Just(8), Just(1000)]),
        happenings in prop::collection::vec(happening(), 1..120),
    ) {
        let mut world = World::new(seed, weather, buffer_batches_max);
        for happening in &happenings {
            world.happens(happening);
            world.check()?;
        }
        world.heal();
        world.is_equal()?;
        world.engine.restart();
        world.work(&Work::Compute(vec![1, 2, 3]), Fate::Restarts);
        world.heal();
        world.is_equal()?;
        prop_assert_eq!(world.router.trust().level, TrustLevel::Exact, "an engine seen from its first batch");
    }
}

#[test]
fn a_late_reader_becomes_exact_through_a_snapshot() {
    let mut world = World::new(1, FINE, 3);
    world.link.is_parted = true;
    for at in 0..40 {
        world.work(&Work::Compute(vec![1 + at % 3, 1 + at / 3 % 3, 1 + at / 9 % 3]), Fate::Arrives);
    }
    world.link.is_parted = false;
    let more = [Work::Compute(vec![3, 3, 3, 3]), Work::Compute(vec![2, 2, 2, 2])];
    world.replay(&more);
    world.is_equal().expect("equal");
    let trust = world.router.trust();
    assert_eq!((trust.level, trust.reasons.is_empty()), (TrustLevel::Exact, true));
    assert_eq!(
        (world.snapshots, world.router.count(C::SnapshotsTaken), world.router.count(C::SnapshotsFailed)),
        (1, 1, 0)
    );
    assert!(references(&world.router).blocks > 0);
}

#[test]
fn a_heartbeat_shows_a_lost_tail_and_its_absence_silence() {
    let mut world = World::new(1, FINE, 100);
    world.replay(&[]);
    world.work(&Work::Compute(vec![1, 2]), Fate::Arrives);
    assert_eq!(world.router.trust().level, TrustLevel::Exact);
    world.link.is_parted = true;
    world.work(&Work::Compute(vec![1, 3]), Fate::Arrives);
    world.link.is_parted = false;
    world.pass(RELAY_HEARTBEAT_MS);
    assert!(world.router.trust().reasons.contains(TrustReason::Recovering), "{:?}", world.router.trust());
    world.replay(&[]);
    world.is_equal().expect("equal");
    assert_eq!((world.router.count(C::Gaps), world.router.count(C::Probes)), (1, 0));
    world.pass(RELAY_HEARTBEAT_MS);
    world.link.is_parted = true;
    for _ in 0..10 {
        world.pass(RELAY_HEARTBEAT_MS);
    }
    assert!(world.router.trust().reasons.contains(TrustReason::Silent));
    world.link.is_parted = false;
    world.pass(RELAY_HEARTBEAT_MS);
    assert_eq!(world.router.trust().level, TrustLevel::Exact);
}

#[test]
fn another_generation_is_a_restart_though_sequences_go_on() {
    let mut world = World::new(1, FINE, 100);
    world.replay(&[]);
    world.work(&Work::Compute(vec![1, 2]), Fate::Arrives);
    assert_eq!(world.router.count(C::Restarts), 0);
    let dump = world.relay.rig.dump();
    world.relay.rig.load(dump).expect("loaded");
    world.send_live();
    assert_eq!(world.router.count(C::Restarts), 1);
    assert!(world.router.trust().reasons.contains(TrustReason::Recovering));
    world.replay(&[]);
    world.is_equal().expect("equal");
    assert_eq!((world.router.count(C::SnapshotsTaken), world.router.count(C::Gaps)), (1, 0));
    assert_eq!(world.router.trust().level, TrustLevel::Exact);
}

#[test]
fn a_snapshot_that_has_begun_is_taken_though_the_whole_stream_arrives_meanwhile() {
    let late = Weather { delayed: 0.8, ..FINE };
    for seed in 0..200 {
        let mut world = World::new(seed, late, 2);
        (1..4).for_each(|block| world.work(&Work::Compute(vec![block]), Fate::Arrives));
        world.replay(&[1, 2, 3, 1, 2, 3].map(|block| Work::Compute(vec![block, block])));
        world.heal();
        let trust = world.router.trust();
        assert_eq!((trust.level, trust.reasons.is_empty()), (TrustLevel::Exact, true), "seed {seed}: {trust:?}");
        world.is_equal().expect("equal");
    }
}
