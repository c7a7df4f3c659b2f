//! A shard's reaction to a connection that ends, to a choked index, and to time alone.

mod rebuilt;
mod transfers;

use super::*;
use crate::endpoint::Endpoint;
use crate::fleet::{FleetTable, WorkerRecord, WorkerState};
use crate::ids::{EngineHash, GroupId, LocalHash, Seed, Tier, Worker};
use crate::index::{self, Depths, IndexReader, Reclaimer, ShardLimits, StoreBlocks};
use crate::trust::{Trust, TrustReason};

const DOWN_AFTER_MS: u64 = 1_000;

/// A shard whose worker has the state, and whose publisher is nowhere.
fn shard(state: WorkerState, endpoint: &str) -> Shard {
    shard_in(state, endpoint, ShardLimits::default(), &Reclaimer::new()).0
}

/// A fleet of publishers whose workers have the state.
fn fleet_of(publishers: &[PublisherPlan], state: WorkerState) -> Arc<Fleet> {
    let record = |publisher: &PublisherPlan| WorkerRecord {
        state,
        trust: Arc::clone(&publisher.view.trust),
        events: Some(publisher.source.clone()),
        ..WorkerRecord::new(publisher.index, publisher.worker, publisher.slot)
    };
    let workers = publishers.iter().map(record).collect();
    Arc::new(Fleet::new(FleetTable { workers, ..FleetTable::default() }))
}

fn shard_in(state: WorkerState, endpoint: &str, limits: ShardLimits, reclaimer: &Reclaimer) -> (Shard, IndexReader) {
    let (mut writer, reader) = index::shard_in(ShardId(0), limits, reclaimer);
    let slot = writer.add_worker().expect("room for a worker");
    let publisher = PublisherPlan::at(endpoint, WorkerIndex(0), Worker::new(1, 0), slot);
    let fleet = fleet_of(std::slice::from_ref(&publisher), state);
    let plan = ShardPlan { shard: ShardId(0), writers: vec![(SpaceId(0), writer)], publishers: vec![publisher] };
    let config = IngestConfig { down_after_ms: DOWN_AFTER_MS, ..IngestConfig::default() };
    let (shard, refused) = Shard::open(plan, config, fleet).expect("an event loop");
    assert!(refused.is_empty());
    (shard, IndexReader::new(vec![reader]))
}

/// The worker's state just before and just after `down_after_ms`, when a connection in the state `link` has ended.
fn states_after_failure(state: WorkerState, link: Link) -> [WorkerState; 2] {
    let folder = tempfile::tempdir().expect("a folder");
    let mut shard = shard(state, &format!("ipc://{}/absent", folder.path().display()));
    let was_up = link == Link::Up;
    shard.publishers[0].link = link;
    shard.publishers[0].subscription.break_up();
    shard.enqueue(0);
    let failed_at_ms = 5_000;
    shard.round(Now { unix_ms: 1, uptime_ms: failed_at_ms });
    assert_eq!(shard.publishers[0].stream.reasons().contains(TrustReason::Disconnected), was_up);
    [DOWN_AFTER_MS - 1, DOWN_AFTER_MS].map(|later_ms| {
        shard.tick(Now { unix_ms: 1, uptime_ms: failed_at_ms + later_ms });
        shard.update_fleet();
        shard.fleet.load().workers[0].state
    })
}

#[test]
fn a_worker_is_down_once_its_connection_has_been_gone_for_long() {
    use WorkerState::{Down, Draining, Joining, Ready};
    assert_eq!(states_after_failure(Ready, Link::Up), [Ready, Down]);
    assert_eq!(states_after_failure(Draining, Link::Up), [Draining, Draining]);
    assert_eq!(states_after_failure(Joining, Link::new(5_000)), [Joining, Down]);
}

#[test]
fn a_replay_that_goes_on_and_on_is_given_up_by_time_and_by_bytes() {
    use super::replays::Replay;
    use crate::ingest::publisher_socket::ReplayClient;
    use crate::limits::{REPLAY_SNAPSHOT_BYTES_MAX, REPLAY_WHOLE_MS_MAX};
    let folder = tempfile::tempdir().expect("a folder");
    let absent = format!("ipc://{}/absent", folder.path().display());
    for (bytes, later_ms, is_over) in [
        (0, REPLAY_WHOLE_MS_MAX - 1, false),
        (0, REPLAY_WHOLE_MS_MAX, true),
        (REPLAY_SNAPSHOT_BYTES_MAX, 1, false),
        (REPLAY_SNAPSHOT_BYTES_MAX + 1, 1, true),
    ] {
        let mut shard = shard(WorkerState::Ready, &absent);
        let space = shard.publishers[0].space;
        let publisher = &mut shard.publishers[0];
        let asked = Now { unix_ms: 1, uptime_ms: 1_000 };
        publisher.stream.set_replays(true, asked);
        publisher.stream.connected(&mut shard.spaces[space], asked);
        assert!(publisher.stream.ask_replay(asked).is_some() && publisher.stream.awaits_replay());
        let of = (&shard.config.brokers, publisher.stream.worker);
        let question = (&Endpoint::unparsed(&absent), crate::ids::EventSeq(0));
        let client = ReplayClient::ask(question, of, (&shard.registry, Token(0)), 1_000);
        let client = client.expect("well formed");
        publisher.replay = Some(Replay { client, bytes, expected_bytes: 0, asked_ms: asked.uptime_ms });
        shard.replays.open = 1;
        let now = Now { unix_ms: 1, uptime_ms: asked.uptime_ms + later_ms };
        // Its answer comes often enough.
        publisher.stream.excuse_replay(now);
        shard.end_overdue_replay(0, now);
        assert_eq!(shard.publishers[0].replay.is_none(), is_over, "{bytes} bytes after {later_ms} ms");
        assert_eq!(shard.publishers[0].stream.awaits_replay(), !is_over);
    }
}

#[test]
fn a_round_has_a_bounded_number_of_quanta_and_the_other_publishers_keep_their_order() {
    let (_folder, mut shard) = quiet_shard();
    // Publishers that are gone, beyond the limit of a round: their numbers show which ones are left.
    shard.ready.clear();
    shard.ready.extend(1..=INGEST_ROUND_QUANTA_MAX + 3);
    let now = Now { unix_ms: 1, uptime_ms: 5_000 };
    shard.round(now);
    let last = INGEST_ROUND_QUANTA_MAX;
    assert_eq!(shard.ready, [last + 1, last + 2, last + 3]);
    assert_eq!(shard.poll_timeout_ms(u64::MAX), 0, "the next round follows at once");
    shard.round(now);
    assert!(shard.ready.is_empty());
}

fn quiet_shard() -> (tempfile::TempDir, Shard) {
    let folder = tempfile::tempdir().expect("a folder");
    let shard = shard(WorkerState::Joining, &format!("ipc://{}/absent", folder.path().display()));
    (folder, shard)
}

/// A shard that is choked by the least garbage.
fn narrow_shard(reclaimer: &Reclaimer) -> (tempfile::TempDir, Shard, IndexReader) {
    let folder = tempfile::tempdir().expect("a folder");
    let endpoint = format!("ipc://{}/absent", folder.path().display());
    let limits = ShardLimits { garbage_bytes_max: 0, ..ShardLimits::default() };
    let (shard, reader) = shard_in(WorkerState::Joining, &endpoint, limits, reclaimer);
    (folder, shard, reader)
}

/// Makes the shard's index give something up.
fn waste(shard: &mut Shard) {
    let slot = shard.publishers[0].stream.slot;
    let (tier, group, hashes, locals) = (Tier::Device, GroupId(0), &[EngineHash(1)], &[LocalHash(1)]);
    let writer = &mut shard.spaces[0].writer;
    assert_eq!(writer.store(slot, &StoreBlocks { parent: None, hashes, locals, tier, group, seed: Seed(0) }).stored, 1);
    assert_eq!(writer.remove(slot, tier, group, hashes).removed, 1);
    assert!(writer.memory().garbage_bytes > 0);
}

#[test]
fn a_choked_index_takes_no_events_until_its_reader_is_done() {
    let reclaimer = Reclaimer::new();
    let (_folder, mut shard, _reader) = narrow_shard(&reclaimer);
    let now = Now { unix_ms: 1, uptime_ms: 1 };
    shard.ready.clear();
    shard.publishers[0].queued = false;
    assert!(shard.poll_timeout_ms(500) > CHOKED_PAUSE_MS);
    shard.enqueue(0);
    assert_eq!(shard.poll_timeout_ms(500), 0);
    let choked = |shard: &Shard| {
        let view = &shard.publishers[0].stream.view;
        (shard.spaces[0].choked, view.gauges.is_choked(), view.counters.get(WorkerCounter::Chokes))
    };
    index::while_inside(&reclaimer, || {
        waste(&mut shard);
        for _ in 0..2 {
            shard.round(now);
            assert_eq!(shard.ready, [0], "nothing was taken, and it is asked again");
            shard.apply_back_pressure();
            assert!(!shard.spaces[0].sweep(true));
            assert_eq!(choked(&shard), (true, true, 1));
            assert_eq!(shard.poll_timeout_ms(500), CHOKED_PAUSE_MS);
        }
    });
    shard.apply_back_pressure();
    shard.apply_back_pressure();
    assert_eq!(choked(&shard), (false, false, 1));
    shard.round(now);
    assert!(shard.ready.is_empty(), "it was read until nothing was left");
}

#[test]
fn memory_that_was_given_up_is_reclaimed_without_further_events() {
    let (_folder, mut shard, reader) = narrow_shard(&Reclaimer::new());
    let garbage_bytes = |shard: &Shard| shard.spaces[0].writer.memory().garbage_bytes;
    waste(&mut shard);
    assert!(!shard.spaces[0].sweep(false));
    assert!(garbage_bytes(&shard) > 0, "not in every sweep");
    assert!(!shard.spaces[0].sweep(true));
    assert_eq!(garbage_bytes(&shard), 0);
    waste(&mut shard);
    shard.spaces[0].unswept = true;
    assert!(!shard.spaces[0].sweep(false));
    assert_eq!(garbage_bytes(&shard), 0, "also once everything is swept");
    let epoch = || reader.lookup(&[], &mut Depths::new()).epoch;
    let (before, started) = (epoch(), Instant::now());
    let inbox = shard.inbox();
    let runs = std::thread::spawn(move || shard.run());
    std::thread::sleep(Duration::from_millis(3 * TICK_MS));
    inbox.commands.push(Command::Stop).expect("room");
    inbox.waker.wake().expect("woken");
    runs.join().expect("ended");
    let published = epoch() - before;
    let ticks = started.elapsed().as_millis() as u64 / TICK_MS + 2;
    assert!((1..=ticks).contains(&published), "{published} in {ticks} ticks");
}
