//! The peer's index, as this package uses it: the only file that knows its interface.

use std::hint::black_box;
use std::ops::Range;
use std::time::{Duration, Instant};

use dynamo_kv_router::ConcurrentRadixTreeCompressed;
use dynamo_kv_router::indexer::{KvIndexerInterface, LowerTierIndexer, SyncIndexer, ThreadPoolIndexer, WorkerTask};
use dynamo_kv_router::protocols::{
    ExternalSequenceBlockHash, KvCacheEvent, KvCacheEventData, KvCacheRemoveData, KvCacheStoreData,
    KvCacheStoredBlockData, LocalBlockHash, OverlapScores, RouterEvent, StorageTier, WorkerWithDpRank,
};
use kvrouted::ids::Tier;
use tokio::runtime::Runtime;
use tokio::sync::oneshot;

use crate::failure::Failure;
use crate::measure::Lookups;
use crate::nodes::{NodeId, Nodes};
use crate::script::{Action, Op, Script};

/// Events from which the cost of the channel between the caller and the peer's loop is taken.
const CHANNEL_EVENTS: usize = 200_000;
/// Events on their way while memory is measured.
const HELD_EVENTS_MAX: usize = 16;

/// An event of the device tier goes to one structure, one of a lower tier to another.
#[derive(Debug)]
pub(crate) enum PeerEvent {
    /// For the radix tree.
    Device(RouterEvent),
    /// For the lower tiers' map.
    Host(RouterEvent),
}

/// Some batches of a script in the peer's types.
#[must_use]
pub(crate) fn events(nodes: &Nodes, script: &Script, batches: Range<usize>) -> Vec<PeerEvent> {
    batches.flat_map(|batch| script.batch(batch)).enumerate().map(|(id, op)| event(nodes, script, op, id)).collect()
}

fn event(nodes: &Nodes, script: &Script, op: &Op, id: usize) -> PeerEvent {
    let name = |node: NodeId| ExternalSequenceBlockHash(nodes.engine_hash(node, op.worker));
    let blocks = script.blocks_of(op);
    let data = match op.action {
        Action::Store => KvCacheEventData::Stored(KvCacheStoreData {
            parent_hash: nodes.parent(blocks[0]).map(name),
            start_position: None,
            blocks: blocks.iter().map(|node| stored(name(*node), nodes.local(*node))).collect(),
        }),
        Action::Remove => {
            KvCacheEventData::Removed(KvCacheRemoveData { block_hashes: blocks.iter().copied().map(name).collect() })
        }
    };
    let event = KvCacheEvent { event_id: id as u64, data, dp_rank: 0 };
    match op.tier {
        Tier::Device => PeerEvent::Device(RouterEvent::new(u64::from(op.worker), event)),
        _ => {
            let tier = StorageTier::HostPinned;
            PeerEvent::Host(RouterEvent::with_storage_tier(u64::from(op.worker), event, tier))
        }
    }
}

const fn stored(block_hash: ExternalSequenceBlockHash, local: u64) -> KvCacheStoredBlockData {
    KvCacheStoredBlockData { block_hash, tokens_hash: LocalBlockHash(local), mm_extra_info: None }
}

/// What taking one task out of the peer's channel costs, without what is done for it.
///
/// # Errors
/// The channel is gone, which cannot be.
pub(crate) fn channel_ns() -> Result<f64, Failure> {
    let (sender, receiver) = flume::unbounded::<WorkerTask>();
    for id in 0..CHANNEL_EVENTS {
        let data = KvCacheEventData::Removed(KvCacheRemoveData { block_hashes: Vec::new() });
        let event = RouterEvent::new(1, KvCacheEvent { event_id: id as u64, data, dp_rank: 0 });
        sender.send(WorkerTask::Event(event)).map_err(|_| offline())?;
    }
    drop(sender);
    let start = Instant::now();
    while let Ok(task) = receiver.recv() {
        drop(black_box(task));
    }
    Ok(start.elapsed().as_nanos() as f64 / CHANNEL_EVENTS as f64)
}

/// The index without threads of its own: the radix tree for the device, a map for the tiers below.
#[derive(Default)]
pub(crate) struct Peer {
    device: ConcurrentRadixTreeCompressed,
    host: LowerTierIndexer,
}

impl Peer {
    /// Applies events on the calling thread and returns the time that took.
    ///
    /// `apply_event` itself is private. The way to it without another thread is the trait's `worker` loop
    /// over a channel that is full before the time begins; what taking tasks out of a channel costs is
    /// taken off.
    ///
    /// # Errors
    /// The loop failed.
    pub(crate) fn apply(&self, events: Vec<PeerEvent>, channel_ns: f64) -> Result<Duration, Failure> {
        let count = events.len();
        let (device, for_device) = flume::unbounded();
        let (host, for_host) = flume::unbounded();
        for event in events {
            match event {
                PeerEvent::Device(event) => device.send(WorkerTask::Event(event)),
                PeerEvent::Host(event) => host.send(WorkerTask::Event(event)),
            }
            .map_err(|_| offline())?;
        }
        drop((device, host));
        let start = Instant::now();
        self.device.worker(for_device, None).map_err(|error| Failure::Peer(error.to_string()))?;
        self.host.worker(for_host, None).map_err(|error| Failure::Peer(error.to_string()))?;
        let channel = Duration::from_secs_f64(channel_ns * 1e-9 * count as f64);
        Ok(start.elapsed().saturating_sub(channel))
    }

    /// A way to read.
    #[must_use]
    pub(crate) const fn reader(&self) -> PeerReader<'_> {
        PeerReader { device: &self.device }
    }
}

/// The index behind its own queue, with one thread for each structure.
pub(crate) struct PeerQueued {
    device: ThreadPoolIndexer<ConcurrentRadixTreeCompressed>,
    host: Option<ThreadPoolIndexer<LowerTierIndexer>>,
    runtime: Runtime,
}

impl PeerQueued {
    /// Starts the threads: one, and another if there are lower tiers.
    ///
    /// # Errors
    /// There is no runtime for the peer's async interface.
    pub(crate) fn start(block_size: u32, with_host: bool) -> Result<Self, Failure> {
        let runtime = tokio::runtime::Builder::new_current_thread().build();
        Ok(Self {
            device: ThreadPoolIndexer::new(ConcurrentRadixTreeCompressed::new(), 1, block_size),
            host: with_host.then(|| ThreadPoolIndexer::new(LowerTierIndexer::new(), 1, block_size)),
            runtime: runtime.map_err(Failure::system("start a runtime for the peer"))?,
        })
    }

    /// Queues events and waits until all are applied; returns the time from the first to the last.
    ///
    /// # Errors
    /// A thread of the peer has ended.
    pub(crate) fn apply(&self, events: Vec<PeerEvent>) -> Result<Duration, Failure> {
        let start = Instant::now();
        self.runtime.block_on(async {
            for event in events {
                match (event, &self.host) {
                    (PeerEvent::Device(event), _) => self.device.apply_event(event).await,
                    (PeerEvent::Host(event), Some(host)) => host.apply_event(event).await,
                    (PeerEvent::Host(_), None) => return Err(Failure::Peer("a host event without tiers".to_owned())),
                }
            }
            self.device.flush_and_wait().await.map_err(|error| Failure::Peer(error.to_string()))?;
            match &self.host {
                Some(host) => host.flush_and_wait().await.map_err(|error| Failure::Peer(error.to_string())),
                None => Ok(()),
            }
        })?;
        Ok(start.elapsed())
    }

    /// A way to read.
    #[must_use]
    pub(crate) fn reader(&self) -> PeerReader<'_> {
        PeerReader { device: self.device.backend() }
    }
}

/// Applies events on threads of the two structures, a few in the queue at a time; then lets the radix tree drop
/// what nobody holds any more, which it otherwise does every five minutes, and looks at what is left.
///
/// Everything is freed by the thread that allocated it, so that the allocator keeps nothing back.
///
/// # Errors
/// A structure's loop has ended early.
pub(crate) fn hold<T>(
    events: impl Iterator<Item = PeerEvent>,
    look: impl FnOnce() -> Result<T, Failure>,
) -> Result<T, Failure> {
    let index = Peer::default();
    let (device, for_device) = flume::bounded(HELD_EVENTS_MAX);
    let (host, for_host) = flume::bounded(HELD_EVENTS_MAX);
    std::thread::scope(|threads| {
        // The queues end when this closure does: only then do the loops give up what they know.
        let (device, host) = (device, host);
        threads.spawn(|| index.device.worker(for_device, None).is_ok());
        threads.spawn(|| index.host.worker(for_host, None).is_ok());
        for event in events {
            match event {
                PeerEvent::Device(event) => device.send(WorkerTask::Event(event)),
                PeerEvent::Host(event) => host.send(WorkerTask::Event(event)),
            }
            .map_err(|_| offline())?;
        }
        for queue in [&device, &host] {
            let (done, waiting) = oneshot::channel();
            queue.send(WorkerTask::CleanupStaleChildren).map_err(|_| offline())?;
            queue.send(WorkerTask::Flush(done)).map_err(|_| offline())?;
            waiting.blocking_recv().map_err(|_| offline())?;
        }
        look()
    })
}

/// A way to read the device tier.
pub(crate) struct PeerReader<'a> {
    device: &'a ConcurrentRadixTreeCompressed,
}

impl PeerReader<'_> {
    /// Every worker's depth in an answer.
    pub(crate) fn depths(answer: &OverlapScores, workers: u16) -> impl Iterator<Item = u32> {
        let of = |worker: u16| WorkerWithDpRank::new(u64::from(worker), 0);
        (0..workers).map(move |worker| answer.scores.get(&of(worker)).copied().unwrap_or(0))
    }
}

impl Lookups for PeerReader<'_> {
    type Block = LocalBlockHash;
    type Answer = OverlapScores;

    fn look(&mut self, blocks: &[LocalBlockHash]) -> OverlapScores {
        self.device.find_matches(blocks, false)
    }

    fn sum(&mut self, answer: OverlapScores) -> u64 {
        answer.scores.values().map(|depth| u64::from(*depth)).sum()
    }
}

fn offline() -> Failure {
    Failure::Peer("its channel is closed".to_owned())
}
