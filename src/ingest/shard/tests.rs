//! What a shard makes of a socket that fails.

use super::*;
use crate::fleet::{DeviceClass, EventSource, FleetTable, SchemeCell, TrustCell, WorkerRecord, WorkerState};
use crate::ids::Worker;
use crate::index::{self, ShardLimits};
use crate::ingest::WorkerView;
use crate::trust::Trust;

const DOWN_AFTER_MS: u64 = 1_000;

/// A shard whose worker has the state, and whose publisher is nowhere.
fn shard(state: WorkerState, endpoint: String) -> Shard {
    let (mut writer, _) = index::shard(ShardId(0), ShardLimits::default());
    let trust = Arc::new(TrustCell::new(Trust::default()));
    let publisher = Publisher {
        index: WorkerIndex(0),
        worker: Worker::new(1, 0),
        space: SpaceId(0),
        slot: writer.add_worker().expect("room for a worker"),
        source: EventSource { endpoint, replay: None, topic: String::new() },
        scheme: Arc::new(SchemeCell::default()),
        scheme_configured: false,
        salts_possible: true,
        capacity_blocks: 0,
        view: Arc::new(WorkerView::new(Arc::clone(&trust))),
    };
    let record = WorkerRecord {
        index: publisher.index,
        worker: publisher.worker,
        space: publisher.space,
        name: String::from("w"),
        shard: ShardId(0),
        slot: publisher.slot,
        capacity_blocks: 0,
        batched_tokens_max: 8192,
        device_class: DeviceClass::Gpu,
        weight: 1.0,
        taints: Vec::new(),
        state,
        trust,
        events: Some(publisher.source.clone()),
    };
    let fleet = Arc::new(Fleet::new(FleetTable { workers: vec![record], ..FleetTable::default() }));
    let plan = ShardPlan { shard: ShardId(0), writers: vec![(SpaceId(0), writer)], publishers: vec![publisher] };
    let config = IngestConfig { down_after_ms: DOWN_AFTER_MS, ..IngestConfig::default() };
    let (shard, refused) = Shard::open(plan, config, fleet).expect("an event loop");
    assert!(refused.is_empty());
    shard
}

/// The worker's state once its socket failed while its link was so, just before and just after the time is up.
fn states_after_failure(state: WorkerState, link: Link) -> [WorkerState; 2] {
    let folder = tempfile::tempdir().expect("a folder");
    let mut shard = shard(state, format!("ipc://{}/nobody", folder.path().display()));
    shard.members[0].link = link;
    shard.members[0].subscription.sabotage().expect("another socket");
    shard.enqueue(0);
    let failed_at_ms = 5_000;
    shard.round(Now { unix_ms: 1, uptime_ms: failed_at_ms });
    assert!(shard.members[0].stream.reasons().contains(TrustReason::Disconnected));
    [DOWN_AFTER_MS - 1, DOWN_AFTER_MS].map(|later_ms| {
        shard.tick(Now { unix_ms: 1, uptime_ms: failed_at_ms + later_ms });
        shard.tell_fleet();
        shard.fleet.load().workers[0].state
    })
}

#[test]
fn a_socket_that_fails_is_a_connection_that_broke() {
    use WorkerState::{Down, Draining, Joining, Ready};
    assert_eq!(states_after_failure(Ready, Link::Up), [Ready, Down]);
    assert_eq!(states_after_failure(Draining, Link::Up), [Draining, Draining]);
    assert_eq!(states_after_failure(Joining, Link::new(5_000)), [Joining, Down]);
}
