//! A worker behind a relay: a reader that applies the relay's batches holds the relay's blocks.

mod converges;

use std::sync::Arc;

use parking_lot::Mutex;
use proptest::prelude::*;

use super::{Engine, Fate, Work, fate, work};
use crate::event::{EventBatch, KvEvent, flat};
use crate::ids::EventSeq;
use crate::ingest::republish::{Outlet, RelayName, Republisher};
use crate::ingest::tests::dump::begin_of;
use crate::ingest::tests::vllm::Batch;
use crate::ingest::tests::{Options, Rig, SCHEME, formats, windows};
use crate::ingest::{DumpPart, References};
use crate::limits::RELAY_HEARTBEAT_MS;
use crate::relay::ReplayBuffer;
use crate::trust::{TrustLevel, TrustReason};
use serde_json::json;

const NAME: RelayName = RelayName { generation: 7, worker_id: None, dp_rank: None };

/// The messages that a relay has sent.
#[derive(Debug)]
struct Sent {
    buffer: ReplayBuffer,
    live: Vec<(EventSeq, Arc<[u8]>)>,
    heartbeats: Vec<Arc<[u8]>>,
    forgotten: u64,
}

/// An outlet that keeps everything.
#[derive(Clone, Debug)]
struct Keep(Arc<Mutex<Sent>>);

impl Outlet for Keep {
    fn batch(&mut self, seq: EventSeq, payload: &[u8]) {
        let (mut sent, payload) = (self.0.lock(), Arc::<[u8]>::from(payload));
        sent.buffer.push(seq, Arc::clone(&payload));
        sent.live.push((seq, payload));
    }

    fn heartbeat(&mut self, payload: &[u8]) {
        self.0.lock().heartbeats.push(payload.into());
    }

    fn forget(&mut self) {
        let mut sent = self.0.lock();
        sent.buffer.forget();
        sent.forgotten += 1;
    }
}

/// An ingest whose first worker is relayed.
struct RelayRig {
    rig: Rig,
    sent: Arc<Mutex<Sent>>,
}

impl RelayRig {
    fn new(name: RelayName, buffer_batches_max: usize) -> Self {
        Self::with(name, buffer_batches_max, &Options::default())
    }

    fn with(name: RelayName, buffer_batches_max: usize, options: &Options) -> Self {
        let mut rig = Rig::new(options);
        let sent = Arc::new(Mutex::new(Sent {
            buffer: ReplayBuffer::new(buffer_batches_max, usize::MAX),
            live: Vec::new(),
            heartbeats: Vec::new(),
            forgotten: 0,
        }));
        let republisher = Republisher::new(name, RELAY_HEARTBEAT_MS, Box::new(Keep(Arc::clone(&sent))));
        rig.streams[0].set_republisher(republisher, &rig.space, rig.now);
        Self { rig, sent }
    }

    fn take_live(&self) -> Vec<(EventSeq, Arc<[u8]>)> {
        std::mem::take(&mut self.sent.lock().live)
    }
}

/// The blocks of the first worker of a rig.
fn held(rig: &mut Rig) -> References {
    match rig.dump().last() {
        Some(DumpPart::End(references)) => *references,
        other => panic!("{other:?}"),
    }
}

fn decoded(payload: &[u8]) -> EventBatch {
    let mut batch = EventBatch::new();
    flat::decode(payload, &mut batch).expect("our own wire");
    batch
}

#[test]
fn a_relay_says_that_the_index_has_emptied_its_worker_in_a_slice() {
    let mut relay = RelayRig::with(NAME, 100, &Options { salts_possible: false, ..Options::default() });
    crate::ingest::tests::bounds::overwhelm_later(&mut relay.rig);
    relay.take_live();
    relay.rig.settle();
    let live = relay.take_live();
    let said: Vec<_> = live.iter().map(|(_, payload)| decoded(payload)).collect();
    let clears = said.iter().flat_map(|batch| batch.events()).filter(|event| matches!(event, KvEvent::Cleared(_)));
    assert_eq!((said.len(), clears.count()), (1, 1));
    assert_eq!(said[0].info().source.map(|source| source.level), Some(TrustLevel::LowerBound));
}

#[test]
fn a_relay_publishes_its_trust_and_changes_and_then_heartbeats() {
    let mut relay = RelayRig::new(NAME, 100);
    relay.rig.send(0, &Batch::new(0).stored(None, &[11, 12], &[1, 2]).removed(&[12]));
    relay.rig.send(0, &Batch::new(0).stored(None, &[11, 12], &[1, 2]).removed(&[12]));
    let now = relay.rig.now;
    relay.rig.streams[0].disconnected(&mut relay.rig.space, now);
    relay.rig.streams[0].show(&mut relay.rig.space);
    let live = relay.take_live();
    let said: Vec<_> = live
        .iter()
        .map(|(seq, payload)| {
            let batch = decoded(payload);
            let source = batch.info().source.expect("its own trust");
            (seq.0, batch.len(), source.level)
        })
        .collect();
    let levels = (TrustLevel::Unproven, TrustLevel::Exact);
    assert_eq!(said, [(0, 0, levels.0), (1, 2, levels.1), (2, 1, levels.0)], "a duplicate is not said again");
    let batch = decoded(&live[1].1);
    assert_eq!((batch.info().generation, batch.info().scheme), (Some(7), Some(SCHEME)));
    assert!(matches!(decoded(&live[2].1).events().next(), Some(KvEvent::Cleared(cleared)) if cleared.tier.is_none()));

    let mut later = relay.rig.now;
    later.uptime_ms += RELAY_HEARTBEAT_MS;
    relay.rig.streams[0].republish(|republisher| republisher.tick(later));
    relay.rig.streams[0].republish(|republisher| republisher.tick(later));
    let heartbeats = std::mem::take(&mut relay.sent.lock().heartbeats);
    let beat = decoded(&heartbeats[0]);
    assert_eq!((heartbeats.len(), beat.info().heartbeat_last_seq, beat.len()), (1, Some(EventSeq(2)), 0));
}

#[test]
fn a_relay_says_of_a_worker_with_windows_that_it_is_unproven() {
    let mut relay = RelayRig::new(NAME, 100);
    let events = json!([windows::window(0, None, &windows::PROMPT), windows::full(None, &windows::PROMPT)]);
    formats::say(&mut relay.rig, 0, &events);
    relay.rig.expect(TrustLevel::Exact, &[], 0);
    let live = relay.take_live();
    let batch = decoded(&live.last().expect("a batch").1);
    let source = batch.info().source.expect("its own trust");
    assert_eq!((source.level, batch.len()), (TrustLevel::Unproven, 1), "the window's blocks are not relayed");
    assert!(source.reasons.contains(TrustReason::Hybrid), "{source:?}");
    let mut follower = Rig::new(&Options { scheme: Some(SCHEME), ..Options::default() });
    for (seq, payload) in &live {
        follower.send_bytes(0, seq.0, payload);
    }
    assert_eq!(follower.trust().level, TrustLevel::Unproven);
    assert!(follower.trust().reasons.contains(TrustReason::Hybrid), "{:?}", follower.trust());
}

#[test]
fn a_change_that_no_batch_can_express_begins_a_generation() {
    let mut relay = RelayRig::new(NAME, 100);
    relay.rig.send(0, &Batch::new(0).stored(None, &[11, 12], &[1, 2]));
    let dump = relay.rig.dump();
    assert_eq!(begin_of(&dump).republished.map(|last| (last.seq, last.generation)), Some((EventSeq(1), 7)));
    relay.rig.load(dump).expect("loaded");
    let (live, sent) = (relay.take_live(), relay.sent.lock());
    let last = decoded(&live.last().expect("a batch").1);
    assert_eq!((last.info().generation, last.len(), sent.forgotten), (Some(8), 0, 1));
    assert!(sent.buffer.first() > EventSeq(1), "what was before leads nowhere");
}

/// One step of an engine beside a relay.
fn step(relay: &mut RelayRig, engine: &mut Engine, work: &Work, fate: Fate) {
    super::step(&mut relay.rig, engine, work, fate);
    relay.rig.streams[0].show(&mut relay.rig.space);
}

proptest! {
    #[test]
    fn a_reader_of_all_batches_holds_the_relays_blocks_with_its_trust(
        steps in prop::collection::vec((work(), fate()), 1..80),
    ) {
        let (mut relay, mut engine) = (RelayRig::new(NAME, usize::MAX), Engine::default());
        let mut router = Rig::new(&Options::default());
        for (work, fate) in steps {
            step(&mut relay, &mut engine, &work, fate);
            for (seq, payload) in relay.take_live() {
                router.send_bytes(0, seq.0, &payload);
            }
            prop_assert_eq!(held(&mut router), held(&mut relay.rig), "after {:?} {:?}", work, fate);
            let (here, there) = (router.trust(), relay.rig.trust());
            prop_assert_eq!((here.level, here.reasons), (there.level, there.reasons));
        }
    }
}
