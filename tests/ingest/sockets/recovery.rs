//! Lost batches are fetched over real replay sockets that misbehave.

use kvrouted::fleet::EventSource;
use kvrouted::ids::WorkerIndex;
use kvrouted::ingest::UpdateWorker;

use super::*;
use crate::kit::replayer::{Fault, Replayer};

/// An engine that publishes and replays.
struct Replaying {
    engine: Option<Engine>,
    endpoint: String,
    replayer: Replayer,
    next: u64,
    stamp: u32,
}

impl Replaying {
    fn new(has_topic: bool) -> Self {
        let engine = Engine::new();
        let endpoint = engine.endpoint();
        Self {
            engine: Some(engine),
            endpoint,
            replayer: Replayer::start("tcp://127.0.0.1:*", has_topic),
            next: 0,
            stamp: 0,
        }
    }

    fn subscribed(mut self) -> Self {
        self.engine = self.engine.map(Engine::subscribed);
        self
    }

    /// One block more in a chain, sent or lost.
    fn publish(&mut self, arrives: bool) {
        let seq = self.next;
        let batch = Batch::new(self.stamp + seq as u32).stored((seq > 0).then_some(seq), &[seq + 1], &[seq as u32]);
        self.replayer.keep(seq, batch.payload());
        if let Some(engine) = self.engine.as_ref().filter(|_| arrives) {
            engine.send_batch(seq, &batch.payload());
        }
        self.next += 1;
    }

    fn kill(&mut self) {
        self.engine = None;
    }

    /// The same engine is reachable again.
    fn reconnect(&mut self) {
        self.engine = Some(Engine::start(&self.endpoint).subscribed());
    }

    /// Another one, with an empty cache.
    fn restart(&mut self) {
        self.kill();
        self.replayer.forget();
        (self.next, self.stamp) = (0, self.stamp + 100_000);
    }

    fn expect_all(&self, shard: &Shard) {
        let contents: Vec<u32> = (0..self.next as u32).collect();
        assert_eq!(u64::from(shard.device(0, &contents)), self.next);
    }
}

fn follow(engine: &Replaying, probe_after_ms: u64) -> Shard {
    let config = IngestConfig { probe_after_ms, ..IngestConfig::default() };
    Shard::recovering(&[(&engine.endpoint, Some(&engine.replayer.endpoint))], "", config)
}

#[track_caller]
fn until_exact(shard: &Shard, engine: &Replaying) {
    let last = Some(EventSeq(engine.next - 1));
    until("everything is applied and believed", || {
        let trust = shard.trust(0);
        trust.as_of_seq == last && trust.level == TrustLevel::Exact
    });
    engine.expect_all(shard);
}

#[test]
fn an_idle_engine_joined_late_is_exact_in_either_form_of_answers() {
    for has_topic in [false, true] {
        let mut engine = Replaying::new(has_topic);
        (0..3000).for_each(|_| engine.publish(false));
        let shard = follow(&engine, 0);
        until_exact(&shard, &engine);
        assert_eq!((shard.count(0, C::BatchesReplayed), engine.replayer.asked()), (3000, vec![0]));
    }
}

#[test]
fn gaps_are_filled_whatever_the_answers_lack() {
    let faults = [
        Fault::Without(vec![7, 9]),
        Fault::Late(8),
        Fault::Twice,
        Fault::Short(6),
        Fault::NoMarker,
        Fault::Silence,
        Fault::Misframed,
    ];
    for (at, fault) in faults.into_iter().enumerate() {
        let mut engine = Replaying::new(at % 2 == 0);
        let shard = follow(&engine, 0);
        engine = engine.subscribed();
        (0..5).for_each(|_| engine.publish(true));
        until_exact(&shard, &engine);
        until("the first recovery is over", || shard.count(0, C::Recoveries) >= 1);
        let emptied = shard.count(0, C::Emptied);
        engine.replayer.misbehave([fault.clone()]);
        (0..6).for_each(|_| engine.publish(false));
        engine.publish(true);
        until_exact(&shard, &engine);
        assert_eq!((shard.count(0, C::Gaps), shard.count(0, C::Emptied)), (1, emptied), "{fault:?}");
        let asked = engine.replayer.asked();
        assert!(asked.contains(&4), "{fault:?}: {asked:?}");
    }
}

#[test]
fn what_no_answer_brings_empties_the_worker_and_it_goes_on() {
    let mut engine = Replaying::new(true);
    let shard = follow(&engine, 0);
    engine = engine.subscribed();
    (0..5).for_each(|_| engine.publish(true));
    until_exact(&shard, &engine);
    engine.replayer.misbehave(std::iter::repeat_n(Fault::Without(vec![6]), 8));
    (0..3).for_each(|_| engine.publish(false));
    engine.publish(true);
    until("the last batch is applied", || shard.trust(0).as_of_seq == Some(EventSeq(8)));
    until("it goes on", || shard.trust(0).level == TrustLevel::LowerBound);
    assert!(shard.trust(0).reasons.contains(R::Gap), "{:?}", shard.trust(0));
    assert_eq!((shard.device(0, &[0]), shard.count(0, C::ReplaysUnfillable)), (0, 1));
    assert!(shard.count(0, C::ReplayHoles) >= 1);
}

#[test]
fn a_broken_connection_is_proven_by_the_next() {
    let mut engine = Replaying::new(true);
    let shard = follow(&engine, 0);
    engine = engine.subscribed();
    (0..5).for_each(|_| engine.publish(true));
    until_exact(&shard, &engine);
    engine.kill();
    until("the break is noticed", || shard.trust(0).reasons.contains(R::Disconnected));
    engine.expect_all(&shard);
    (0..4).for_each(|_| engine.publish(false));
    engine.reconnect();
    until_exact(&shard, &engine);
    assert_eq!(shard.count(0, C::Emptied), 0);

    engine.restart();
    (0..3).for_each(|_| engine.publish(false));
    engine.reconnect();
    until_exact(&shard, &engine);
    assert_eq!((shard.count(0, C::Emptied), shard.count(0, C::Restarts)), (1, 1));

    // Longer than what was known of the one before.
    engine.restart();
    (0..30).for_each(|_| engine.publish(false));
    engine.reconnect();
    until_exact(&shard, &engine);
    assert_eq!((shard.count(0, C::Emptied), shard.count(0, C::Restarts)), (2, 2));
}

#[test]
fn a_lost_tail_is_found_by_a_probe() {
    let mut engine = Replaying::new(false);
    let shard = follow(&engine, 300);
    engine = engine.subscribed();
    (0..5).for_each(|_| engine.publish(true));
    until_exact(&shard, &engine);
    (0..3).for_each(|_| engine.publish(false));
    until_exact(&shard, &engine);
    assert_eq!((shard.count(0, C::Gaps), shard.count(0, C::Emptied)), (0, 0));
    until("the tail is counted", || shard.count(0, C::TailsFound) == 1);
    assert!(shard.count(0, C::Probes) >= 1);
}

#[test]
fn a_replay_socket_that_never_answers_delays_nobody_else() {
    let (mut mute, mut good) = (Replaying::new(true), Replaying::new(true));
    mute.replayer.misbehave(std::iter::repeat_n(Fault::Silence, 1000));
    let publishers = [
        (mute.endpoint.as_str(), Some(mute.replayer.endpoint.as_str())),
        (good.endpoint.as_str(), Some(good.replayer.endpoint.as_str())),
    ];
    let shard = Shard::recovering(&publishers, "", IngestConfig { probe_after_ms: 0, ..IngestConfig::default() });
    (mute, good) = (mute.subscribed(), good.subscribed());
    mute.publish(false);
    mute.publish(true);
    for _ in 0..20 {
        good.publish(false);
        good.publish(true);
    }
    until("the good one is whole", || {
        let trust = shard.trust(1);
        trust.as_of_seq == Some(EventSeq(39)) && trust.level == TrustLevel::Exact
    });
    assert!(shard.trust(0).reasons.contains(R::Recovering), "the other one waits still");
    until("the other one goes on", || shard.trust(0).level == TrustLevel::LowerBound);
    assert!(shard.count(0, C::ReplaysTimedOut) >= 1);
    assert_eq!(shard.fleet.load().worker(WorkerIndex(0)).map(|record| record.state), Some(WorkerState::Ready));
}

#[test]
fn many_publishers_that_connect_at_once_are_all_recovered() {
    let engines: Vec<Replaying> = (0..60)
        .map(|at| {
            let mut engine = Replaying::new(at % 2 == 0);
            (0..50).for_each(|_| engine.publish(false));
            engine
        })
        .collect();
    let publishers: Vec<_> =
        engines.iter().map(|engine| (engine.endpoint.as_str(), Some(engine.replayer.endpoint.as_str()))).collect();
    let shard = Shard::recovering(&publishers, "", IngestConfig { probe_after_ms: 0, ..IngestConfig::default() });
    for worker in 0..engines.len() {
        until("each is whole", || {
            let trust = shard.trust(worker);
            trust.as_of_seq == Some(EventSeq(49)) && trust.level == TrustLevel::Exact
        });
        assert_eq!(shard.count(worker, C::ReplaysAsked), 1, "no publisher is asked twice");
    }
}

/// Lets the shard's worker be heard at another engine's sockets.
fn move_to(shard: &Shard, engine: &Replaying) {
    let mut record = shard.fleet.load().workers[0].clone();
    let source = EventSource {
        endpoint: engine.endpoint.parse().expect("an endpoint"),
        replay: Some(engine.replayer.endpoint.parse().expect("an endpoint")),
        topic: String::new(),
        snapshots: None,
    };
    record.events = Some(source);
    let amendment = UpdateWorker { record, blocks_max: u64::MAX, resubscribe: true };
    let answer = shard.handle.update_worker(amendment).expect("a command waits").blocking_recv().expect("an answer");
    assert!(answer.expect("amended").no_events.is_none());
}

#[test]
fn a_worker_that_moves_goes_on_where_a_replay_shows_the_same_stream_and_is_emptied_otherwise() {
    let mut engine = Replaying::new(true);
    let shard = follow(&engine, 0);
    engine = engine.subscribed();
    (0..5).for_each(|_| engine.publish(true));
    until_exact(&shard, &engine);
    // The same engine under another address.
    let moved = Engine::new();
    engine.endpoint = moved.endpoint();
    engine.engine = Some(moved);
    move_to(&shard, &engine);
    engine = engine.subscribed();
    (0..2).for_each(|_| engine.publish(true));
    until_exact(&shard, &engine);
    assert_eq!((shard.count(0, C::Emptied), engine.replayer.asked().last()), (0, Some(&4)));
    // Another engine.
    let mut other = Replaying { stamp: 100_000, ..Replaying::new(true) };
    (0..3).for_each(|_| other.publish(false));
    move_to(&shard, &other);
    until_exact(&shard, &other);
    assert_eq!(shard.device(0, &[0, 1, 2, 3]), 3, "nothing is left of the engine before");
    assert_eq!(shard.count(0, C::Emptied), 1);
}
