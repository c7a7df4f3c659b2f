//! Streams whose publisher replays. Whatever the live stream and the answers lose, a worker holds only blocks that the
//! engine held when it sent the last applied batch. Once an answer is whole, the worker holds all of them.

mod cases;

use std::collections::BTreeMap;

use proptest::prelude::*;
use xxhash_rust::xxh3::xxh3_64;

use super::{Engine, Work, paths, work};
use crate::ids::EventSeq;
use crate::ingest::stream::ReplayEnd;
use crate::ingest::tests::{C, Options, Rig, SCHEME};
use crate::limits::{RENEWAL_AFTER_MS_MIN, RENEWAL_DOUBLINGS_MAX, REPLAY_FIRST_MS_MAX, REPLAY_NEXT_MS_MAX};
use crate::trust::TrustLevel;

/// How a publisher answers.
#[derive(Clone, Debug)]
enum Fault {
    None,
    /// Every so manieth batch is lost.
    Holes(usize),
    /// The first are lost.
    Late(usize),
    Twice,
    /// The last are lost.
    Short(usize),
    NoMarker,
    Silence,
    /// It publishes more before it is done.
    Meanwhile(usize),
    /// It dies after this number of batches.
    Dies(usize),
}

/// An engine with a replay buffer, and a worker that follows it.
struct World {
    rig: Rig,
    engine: Engine,
    buffer: Vec<(u64, Vec<u8>)>,
    /// The blocks that the engine held after each batch, by the hash of the batch.
    truths: BTreeMap<u64, Engine>,
    is_connected: bool,
    paths: Vec<Vec<u32>>,
}

impl World {
    fn new() -> Self {
        let mut rig = Rig::new(&Options { scheme: Some(SCHEME), ..Options::default() });
        rig.streams[0].set_replays(true, rig.now);
        let (engine, truths) = (Engine::default(), BTreeMap::new());
        Self { rig, engine, buffer: Vec::new(), truths, is_connected: false, paths: paths() }
    }

    fn connect(&mut self) {
        if !std::mem::replace(&mut self.is_connected, true) {
            self.rig.streams[0].connected(&mut self.rig.space, self.rig.now);
        }
    }

    fn disconnect(&mut self) {
        if std::mem::take(&mut self.is_connected) {
            self.rig.streams[0].disconnected(&mut self.rig.space, self.rig.now);
        }
    }

    /// Its events come from another source from now on, which is the same engine.
    fn change_source(&mut self, replays: bool) {
        let Rig { streams, space, scratch, now, .. } = &mut self.rig;
        streams[0].set_replays(replays, *now);
        streams[0].release_all(space, scratch, *now);
        streams[0].disconnected(space, *now);
        streams[0].show(space);
        self.is_connected = false;
    }

    fn restart(&mut self) {
        self.engine.restart();
        self.buffer.clear();
        self.disconnect();
    }

    fn publish(&mut self, work: &Work, arrives: bool) {
        let batch = self.engine.work(work);
        let (seq, payload) = (self.engine.seq, batch.payload());
        self.engine.seq += 1;
        self.truths.insert(xxh3_64(&payload), self.engine.clone());
        self.buffer.push((seq, payload.clone()));
        if arrives && self.is_connected {
            self.rig.send_bytes(0, seq, &payload);
            self.release();
        }
    }

    fn release(&mut self) {
        while self.rig.streams[0].is_releasing() {
            self.rig.streams[0].release(&mut self.rig.space, &mut self.rig.scratch, self.rig.now);
        }
        self.rig.streams[0].show(&mut self.rig.space);
    }

    fn pass(&mut self, ms: u64) {
        self.rig.now.uptime_ms += ms;
        self.rig.now.unix_ms += ms;
        let now = self.rig.now;
        self.rig.streams[0].probe(5_000, now);
    }

    fn end(&mut self, end: ReplayEnd) {
        let now = self.rig.now;
        self.rig.streams[0].replay_ended(&mut self.rig.space, end, now);
    }

    /// Asks for a replay if one is wanted, and has it answered; `true` = it was.
    fn replay(&mut self, fault: &Fault) -> bool {
        let now = self.rig.now;
        if self.rig.streams[0].wants_replay(now).is_none() {
            return false;
        }
        let from = self.rig.streams[0].ask_replay(now).expect("wanted").0;
        let mut answer: Vec<_> = self.buffer.iter().filter(|(seq, _)| *seq >= from).cloned().collect();
        let (len, mut end) = (answer.len(), Some(ReplayEnd::Marker));
        match fault {
            Fault::None => {}
            Fault::Holes(every) => {
                let kept = |(at, _): &(usize, _)| at % (every + 2) != every + 1;
                answer = answer.into_iter().enumerate().filter(kept).map(|(_, batch)| batch).collect();
            }
            Fault::Late(first) => drop(answer.drain(..(*first).min(len))),
            Fault::Twice => answer = answer.iter().flat_map(|batch| [batch.clone(), batch.clone()]).collect(),
            Fault::Short(last) => answer.truncate(len.saturating_sub(*last)),
            Fault::NoMarker => end = None,
            Fault::Silence => {
                answer.clear();
                end = None;
            }
            Fault::Meanwhile(more) => {
                for at in 0..*more {
                    self.publish(&Work::Compute(vec![1 + at as u32 % 3, 2]), at % 2 == 0);
                }
                let last = answer.last().map_or(from, |(seq, _)| seq + 1);
                answer.extend(self.buffer.iter().filter(|(seq, _)| *seq >= last).cloned());
            }
            Fault::Dies(after) => {
                answer.truncate(*after);
                end = None;
            }
        }
        for (seq, payload) in answer {
            if !self.rig.streams[0].awaits_replay() {
                break;
            }
            let now = self.rig.now;
            self.rig.streams[0].replayed(&mut self.rig.space, &mut self.rig.scratch, EventSeq(seq), &payload, now);
        }
        if matches!(fault, Fault::Dies(_)) {
            self.restart();
        } else if self.rig.streams[0].awaits_replay() {
            if end.is_none() {
                self.pass(REPLAY_FIRST_MS_MAX.max(REPLAY_NEXT_MS_MAX));
                assert!(self.rig.streams[0].replay_has_timed_out(self.rig.now));
            }
            self.end(end.unwrap_or(ReplayEnd::Missing));
        }
        self.release();
        true
    }

    /// Gives whole answers until no more replay is wanted.
    fn heal(&mut self) {
        self.connect();
        for _ in 0..20 {
            self.pass(10_000);
            self.replay(&Fault::None);
        }
    }

    /// The overlaps are those of the engine when it sent the last applied batch, or lower.
    fn check(&self) -> Result<(), TestCaseError> {
        let gate = self.rig.streams[0].gate();
        let truth = gate.last().and_then(|last| gate.payload_hash(last)).map(|hash| &self.truths[&hash]);
        let trust = self.rig.trust();
        for path in &self.paths {
            let (held, said) = (truth.map_or(0, |truth| truth.depth(path)), self.rig.device(path) as usize);
            prop_assert!(said <= held, "{path:?}: {said} said, {held} held, {trust:?}");
            if trust.level == TrustLevel::Exact {
                prop_assert_eq!(said, held, "{:?}: {:?}", path, trust);
            }
        }
        Ok(())
    }

    fn equals_engine(&self) -> Result<(), TestCaseError> {
        prop_assert_eq!(self.rig.streams[0].waiting(), 0);
        for path in &self.paths {
            prop_assert_eq!(self.rig.device(path) as usize, self.engine.depth(path), "{:?}", path);
        }
        Ok(())
    }
}

#[derive(Clone, Debug)]
enum Step {
    Publish(Work, bool),
    Break,
    Connect,
    Restart,
    /// Its record has no replay socket any more, or has one again.
    Source(bool),
    Replay(Fault),
    Pass(u64),
    Evict(usize),
}

fn fault() -> impl Strategy<Value = Fault> {
    prop_oneof![
        4 => Just(Fault::None),
        2 => (0_usize..6).prop_map(Fault::Holes),
        1 => (1_usize..4).prop_map(Fault::Late),
        1 => Just(Fault::Twice),
        1 => (1_usize..4).prop_map(Fault::Short),
        1 => Just(Fault::NoMarker),
        1 => Just(Fault::Silence),
        2 => (1_usize..6).prop_map(Fault::Meanwhile),
        1 => (0_usize..6).prop_map(Fault::Dies),
    ]
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        30 => (work(), prop::bool::weighted(0.85)).prop_map(|(work, arrives)| Step::Publish(work, arrives)),
        1 => Just(Step::Break),
        3 => Just(Step::Connect),
        1 => Just(Step::Restart),
        1 => any::<bool>().prop_map(Step::Source),
        12 => fault().prop_map(Step::Replay),
        4 => (0_u64..6_000).prop_map(Step::Pass),
        1 => (0_usize..30).prop_map(Step::Evict),
    ]
}

fn play(world: &mut World, step: &Step, is_kind: bool) {
    match step {
        Step::Publish(work, arrives) => world.publish(work, *arrives),
        Step::Break => world.disconnect(),
        Step::Connect => world.connect(),
        Step::Restart => world.restart(),
        Step::Source(replays) if !is_kind => world.change_source(*replays),
        Step::Replay(fault) => {
            // A whole answer follows each incomplete one.
            if world.replay(fault) && is_kind {
                world.pass(10_000);
                world.replay(&Fault::None);
            }
        }
        Step::Pass(ms) => world.pass(*ms),
        Step::Evict(keep) if !is_kind => drop(world.buffer.drain(..world.buffer.len().saturating_sub(*keep))),
        Step::Evict(_) | Step::Source(_) => {}
    }
}

proptest! {
    #[test]
    fn no_loss_makes_a_worker_hold_a_block_that_its_engine_does_not(steps in prop::collection::vec(step(), 1..150)) {
        let mut world = World::new();
        for step in steps {
            play(&mut world, &step, false);
            world.check()?;
        }
        world.heal();
        world.check()?;
        prop_assert!(!world.rig.streams[0].is_recovering(), "every recovery ends");
    }

    #[test]
    fn a_whole_answer_brings_every_block(steps in prop::collection::vec(step(), 1..150)) {
        let mut world = World::new();
        for step in steps {
            play(&mut world, &step, true);
            world.check()?;
        }
        world.publish(&Work::Compute(vec![1, 2, 3]), false);
        world.heal();
        world.check()?;
        world.equals_engine()?;
        prop_assert_eq!(world.rig.trust().level, TrustLevel::Exact, "{:?}", world.rig.trust());
        prop_assert_eq!(world.rig.count(C::ReplaysUnfillable), 0);
    }

    #[test]
    fn batches_lost_for_good_are_fetched_if_the_publisher_still_has_them(
        steps in prop::collection::vec(step().prop_filter("it keeps all", keeps_all), 1..150),
    ) {
        let mut world = World::new();
        for step in steps {
            play(&mut world, &step, false);
            world.check()?;
        }
        world.publish(&Work::Compute(vec![1, 2, 3]), false);
        world.connect();
        for _ in 0..20 {
            world.pass(RENEWAL_AFTER_MS_MIN << RENEWAL_DOUBLINGS_MAX);
            world.replay(&Fault::None);
            world.check()?;
        }
        world.equals_engine()?;
        prop_assert_eq!(world.rig.trust().level, TrustLevel::Exact, "{:?}", world.rig.trust());
    }
}

/// An answer that begins late shows that the publisher no longer has the beginning, and one that cannot replay has none.
const fn keeps_all(step: &Step) -> bool {
    !matches!(step, Step::Evict(_) | Step::Source(_) | Step::Replay(Fault::Late(_)))
}
