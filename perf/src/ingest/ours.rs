//! kvrouted's ingest thread, as the daemon starts it.

use std::sync::Arc;
use std::time::{Duration, Instant};

use kvrouted::endpoint::Endpoint;
use kvrouted::fleet::{EventSource, Fleet, FleetTable, SchemeCell, TrustCell, WorkerRecord, WorkerState};
use kvrouted::ids::{ShardId, SpaceId, Worker, WorkerIndex, WorkerSlot};
use kvrouted::index::{IndexReader, ShardLimits, shard};
use kvrouted::ingest::{self, IngestConfig, IngestHandle, PublisherPlan, ShardPlan, WorkerView};
use kvrouted::metrics::WorkerCounter;
use kvrouted::trust::Trust;

use super::floor::Taken;
use super::sender::Sender;
use super::threads::cpu_ns;
use crate::failure::Failure;

/// Its only shard.
pub(crate) const SHARD: ShardId = ShardId(0);
/// How the ingest thread of that shard is called.
const THREAD: &str = "ingest-0";
/// How often it is looked whether all is applied.
const CHECK_EVERY: Duration = Duration::from_micros(500);
/// How long nothing may happen before what is missing counts as lost.
const PATIENCE: Duration = Duration::from_secs(3);

/// An ingest thread with one worker.
pub(crate) struct Ours {
    // Ends with it.
    _handle: IngestHandle,
    pub(crate) reader: IndexReader,
    pub(crate) slot: WorkerSlot,
    view: Arc<WorkerView>,
}

impl Ours {
    /// Starts the thread, which connects to a publisher.
    ///
    /// # Errors
    /// The thread cannot be started.
    pub(crate) fn start(endpoint: &str) -> Result<Self, Failure> {
        let (mut writer, reader) = shard(SHARD, ShardLimits::default());
        let slot = writer.add_worker().ok_or_else(|| Failure::Contract("no room for a worker".to_owned()))?;
        let view = Arc::new(WorkerView::new(Arc::new(TrustCell::new(Trust::default()))));
        let parsed = Endpoint::parse(endpoint).map_err(|fault| Failure::Contract(format!("{endpoint}: {fault}")))?;
        let publisher = PublisherPlan {
            index: WorkerIndex(0),
            worker: Worker::new(1, 0),
            space: SpaceId(0),
            slot,
            source: EventSource { endpoint: parsed, replay: None, topic: String::new(), snapshots: None },
            scheme: Arc::new(SchemeCell::default()),
            scheme_configured: false,
            salts_possible: true,
            capacity_blocks: 0,
            view: Arc::clone(&view),
            loads: None,
        };
        let workers = vec![record(&publisher)];
        let fleet = Arc::new(Fleet::new(FleetTable { workers, ..FleetTable::default() }));
        let plan = ShardPlan { shard: SHARD, writers: vec![(SpaceId(0), writer)], publishers: vec![publisher] };
        let handle = ingest::spawn(plan, IngestConfig::default(), fleet)
            .map_err(|error| Failure::Contract(error.to_string()))?;
        Ok(Self { _handle: handle, reader: IndexReader::new(vec![reader]), slot, view })
    }

    /// Batches applied so far.
    #[must_use]
    pub(crate) fn batches(&self) -> u64 {
        self.view.counters.get(WorkerCounter::Batches)
    }

    /// Batches that were missed, or not taken for whatever reason.
    #[must_use]
    pub(crate) fn missed(&self) -> u64 {
        use WorkerCounter::{BatchesMissed, BatchesUndecodable, MessagesMisframed};
        [BatchesMissed, BatchesUndecodable, MessagesMisframed].map(|of| self.view.counters.get(of)).iter().sum()
    }

    /// Processor time of its thread so far, nanoseconds.
    ///
    /// # Errors
    /// The system does not say.
    pub(crate) fn cpu_ns() -> Result<u64, Failure> {
        cpu_ns(THREAD)
    }

    /// Waits until so many batches are applied, or none any more.
    pub(crate) fn wait_for(&self, batches: u64) -> Taken {
        let (mut first, mut last, mut seen) = (None, Instant::now(), 0);
        while seen < batches && last.elapsed() < PATIENCE {
            let now = self.batches();
            if now > seen {
                (seen, last) = (now, Instant::now());
                first.get_or_insert((last, now));
            }
            std::thread::sleep(CHECK_EVERY);
        }
        let Some((began, before)) = first else { return Taken { missed: batches, ..Taken::default() } };
        let seconds = last.saturating_duration_since(began).as_secs_f64();
        Taken { messages: seen - before, missed: self.missed().max(batches - seen), seconds, thread_cpu_ns: 0 }
    }
}

fn record(publisher: &PublisherPlan) -> WorkerRecord {
    WorkerRecord {
        space: publisher.space,
        name: "worker".to_owned(),
        shard: SHARD,
        batched_tokens_max: 8192,
        state: WorkerState::Joining,
        trust: Arc::clone(&publisher.view.trust),
        events: Some(publisher.source.clone()),
        ..WorkerRecord::new(publisher.index, publisher.worker, publisher.slot)
    }
}

/// Takes everything in.
///
/// # Errors
/// Those of the sender.
pub(crate) fn measure(mut sender: Sender, messages: u64) -> Result<Taken, Failure> {
    let ours = Ours::start(&sender.endpoint)?;
    let before = Ours::cpu_ns()?;
    sender.go()?;
    let taken = ours.wait_for(messages);
    Ok(Taken { thread_cpu_ns: Ours::cpu_ns()?.saturating_sub(before), ..taken })
}
