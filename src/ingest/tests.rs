//! A stream from payloads to the index, without a socket.

use std::sync::Arc;

use super::space_shard::SpaceShard;
use super::stream::{Now, Scratch, Stream};
use super::{PublisherPlan, WorkerView};
use crate::event::{DecodeWarning, Reason};
use crate::fleet::{EventSource, SchemeCell, TrustCell};
use crate::hash;
use crate::ids::{EventSeq, Scheme, ShardId, SpaceId, TierBlocks, Window, Worker, WorkerIndex, WorkerSlot};
use crate::index::{self, Depths, IndexReader, ShardLimits};
use crate::limits::{EVENT_MESSAGE_BYTES_MAX, INGEST_SWEEP_BLOCKS};
use crate::metrics::WorkerCounter as C;
use crate::trust::{Trust, TrustLevel, TrustReason as R, TrustReasons};

mod bounds;
mod contradictions;
mod copies;
mod dump;
mod engine_snapshots;
mod formats;
mod loaded;
mod lossy;
mod offload_property;
mod offloaded;
mod replayed;
pub(super) mod sidecar;
pub(super) mod vllm;
mod window_copies;
mod windows;
use vllm::{BLOCK_SIZE, Batch};

const SCHEME: Scheme = Scheme { block_size: BLOCK_SIZE as u32, window: Window::Plain };

impl PublisherPlan {
    /// A publisher of the first space, of which nothing is known but where it is.
    pub(in crate::ingest) fn at(endpoint: &str, index: WorkerIndex, worker: Worker, slot: WorkerSlot) -> Self {
        let endpoint = endpoint.parse().expect("an endpoint");
        Self {
            index,
            worker,
            space: SpaceId(0),
            slot,
            source: EventSource { endpoint, replay: None, topic: String::new(), snapshots: None },
            scheme: Arc::default(),
            scheme_configured: false,
            salts_possible: true,
            capacity_blocks: 0,
            view: Arc::new(WorkerView::new(Arc::new(TrustCell::new(Trust::default())))),
            loads: None,
        }
    }
}

/// One space with its workers, as a shard holds them.
struct Rig {
    space: SpaceShard,
    reader: IndexReader,
    streams: Vec<Stream>,
    scratch: Scratch,
    now: Now,
}

struct Options {
    workers: u64,
    scheme: Option<Scheme>,
    salts_possible: bool,
    capacity_blocks: u64,
    counts_copies: bool,
    /// Memory beyond that of an empty index.
    memory_bytes_more: u64,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            workers: 1,
            scheme: None,
            salts_possible: true,
            capacity_blocks: 0,
            counts_copies: false,
            memory_bytes_more: u64::MAX,
        }
    }
}

impl Rig {
    fn new(options: &Options) -> Self {
        let empty_bytes = index::shard(ShardId(0), ShardLimits::default()).0.memory().bytes();
        let memory_bytes_max = empty_bytes.saturating_add(options.memory_bytes_more);
        let limits = ShardLimits { memory_bytes_max, counts_copies: options.counts_copies, ..ShardLimits::default() };
        let (mut writer, reader) = index::shard(ShardId(0), limits);
        let scheme = Arc::new(SchemeCell::new(options.scheme));
        let slots: Vec<WorkerSlot> =
            (0..options.workers).map(|_| writer.add_worker().expect("room for a worker")).collect();
        let streams = slots
            .iter()
            .enumerate()
            .map(|(at, slot)| {
                let (index, worker) = (WorkerIndex(at as u32), Worker::new(at as u64 + 1, 0));
                let publisher = PublisherPlan {
                    scheme: Arc::clone(&scheme),
                    scheme_configured: options.scheme.is_some(),
                    salts_possible: options.salts_possible,
                    capacity_blocks: options.capacity_blocks,
                    ..PublisherPlan::at("ipc://@absent", index, worker, *slot)
                };
                Stream::new(&publisher, Now::default())
            })
            .collect();
        let relearns = options.scheme.is_none();
        let space = SpaceShard { scheme, relearns, slots, ..SpaceShard::new(SpaceId(0), writer) };
        Self {
            space,
            reader: IndexReader::new(vec![reader]),
            streams,
            scratch: Scratch::default(),
            now: Now::default(),
        }
    }

    fn send(&mut self, seq: u64, batch: &Batch) {
        self.send_bytes(0, seq, &batch.payload());
    }

    fn send_bytes(&mut self, worker: usize, seq: u64, payload: &[u8]) {
        self.take(worker, seq, payload);
        self.streams[worker].show(&mut self.space);
    }

    /// Takes a message and does not show it yet.
    fn take(&mut self, worker: usize, seq: u64, payload: &[u8]) {
        self.now.unix_ms += 1;
        self.now.uptime_ms += 1;
        let now = self.now;
        self.streams[worker].message(&mut self.space, &mut self.scratch, EventSeq(seq), payload, now);
    }

    /// Sweeps until nothing is left to sweep, as an idle shard does.
    fn settle(&mut self) {
        while self.space.writer.sweep(INGEST_SWEEP_BLOCKS) {}
        for stream in &mut self.streams {
            stream.swept(&mut self.space, self.now);
        }
        self.space.writer.reclaim();
        self.space.writer.publish();
    }

    fn depth(&self, worker: usize, contents: &[u32]) -> TierBlocks {
        self.depth_under(worker, contents, None, None)
    }

    fn depth_under(&self, worker: usize, contents: &[u32], lora: Option<&str>, salt: Option<&str>) -> TierBlocks {
        let mut locals = Vec::new();
        let tokens = vllm::tokens(contents);
        hash::local_hashes(SCHEME, hash::seed(lora, salt), hash::token_bytes(&tokens), &[], &mut locals);
        let mut depths = Depths::new();
        self.reader.lookup(&locals, &mut depths);
        depths.of(ShardId(0), self.streams[worker].slot)
    }

    fn device(&self, contents: &[u32]) -> u32 {
        self.depth(0, contents).device
    }

    fn trust(&self) -> Trust {
        self.streams[0].view.trust.load()
    }

    fn count(&self, counter: C) -> u64 {
        self.streams[0].view.counters.get(counter)
    }

    #[track_caller]
    fn expect(&self, level: TrustLevel, reasons: &[R], as_of: u64) {
        let trust = self.trust();
        let names = |reasons: TrustReasons| reasons.iter().map(R::name).collect::<Vec<_>>();
        assert_eq!(names(trust.reasons), names(reasons.iter().copied().collect()));
        assert_eq!((trust.level, trust.as_of_seq), (level, Some(EventSeq(as_of))));
        assert_eq!(self.streams[0].reasons(), trust.reasons, "what is shown is what is known");
    }
}

impl Rig {
    /// As [`Rig::expect`], if no batch of the current connection has been applied.
    #[track_caller]
    fn expect_without_batch(&mut self, level: TrustLevel, reasons: &[R]) {
        self.streams[0].show(&mut self.space);
        let trust = self.trust();
        assert_eq!((trust.level, trust.as_of_seq), (level, None));
        assert_eq!(trust.reasons, reasons.iter().copied().collect());
    }
}

fn chain(stamp: u32) -> Batch {
    Batch::new(stamp).stored(None, &[11, 12, 13], &[1, 2, 3])
}

#[test]
fn blocks_stored_are_found_and_blocks_removed_are_not() {
    let mut rig = Rig::new(&Options::default());
    rig.send(0, &chain(0).stored(Some(13), &[14], &[4]));
    rig.expect(TrustLevel::Exact, &[], 0);
    assert_eq!(rig.space.scheme.get(), Some(SCHEME), "learnt from the first root");
    assert_eq!(rig.device(&[1, 2, 3, 4, 5]), 4);
    assert_eq!(rig.device(&[2, 3]), 0);
    rig.send(1, &Batch::new(1).removed(&[12]));
    assert_eq!(rig.device(&[1, 2, 3, 4]), 1);
    rig.send(2, &Batch::new(2).stored(Some(11), &[12], &[2]).removed(&[14, 99]));
    assert_eq!(rig.device(&[1, 2, 3, 4]), 3);
    rig.expect(TrustLevel::Exact, &[], 2);
    assert_eq!((rig.count(C::Batches), rig.count(C::BlocksStored)), (3, 5));
    assert_eq!((rig.count(C::BlocksRemoved), rig.count(C::RemovesUnknown)), (2, 1));
    let gauges = &rig.streams[0].view.gauges;
    assert_eq!((gauges.bound(), gauges.by_tier()), (3, [3, 0, 0, 0]));
}

#[test]
fn a_gap_empties_and_only_a_clear_or_a_restart_from_0_proves_again() {
    let mut rig = Rig::new(&Options::default());
    rig.send(0, &chain(0));
    rig.send(4, &Batch::new(4).stored(Some(13), &[14], &[4]).stored(None, &[21], &[7]));
    rig.expect(TrustLevel::LowerBound, &[R::Gap, R::UnknownRoot], 4);
    assert_eq!((rig.device(&[1, 2, 3, 4]), rig.device(&[7])), (0, 1));
    assert_eq!((rig.count(C::Gaps), rig.count(C::BatchesMissed), rig.count(C::Emptied)), (1, 3, 1));
    assert_eq!(rig.count(C::StoresUnknownRoot), 1);
    rig.send(5, &Batch::new(5).cleared().stored(None, &[11], &[1]));
    rig.expect(TrustLevel::Exact, &[], 5);
    assert_eq!((rig.device(&[7]), rig.device(&[1]), rig.count(C::Cleared)), (0, 1, 1));
    rig.send(9, &Batch::new(9));
    rig.send(0, &chain(100));
    rig.expect(TrustLevel::Exact, &[], 0);
    assert_eq!((rig.device(&[1, 2, 3]), rig.count(C::Restarts)), (3, 1));
}

#[test]
fn a_restart_seen_late_is_a_lower_bound_of_the_new_incarnation_only() {
    let mut rig = Rig::new(&Options::default());
    for seq in 0..5 {
        rig.send(seq, &Batch::new(seq as u32).stored(None, &[seq + 1], &[seq as u32 + 1]));
    }
    rig.send(2, &Batch::new(77).stored(None, &[50], &[50]));
    rig.expect(TrustLevel::LowerBound, &[R::JoinedLate], 2);
    assert_eq!((rig.device(&[1]), rig.device(&[50])), (0, 1));
}

#[test]
fn a_duplicate_changes_nothing() {
    let mut rig = Rig::new(&Options::default());
    let batch = Batch::new(0).stored(None, &[1], &[1]);
    rig.send(0, &batch);
    rig.send(1, &Batch::new(1).stored(None, &[2], &[2]));
    rig.send(0, &batch);
    rig.expect(TrustLevel::Exact, &[], 1);
    assert_eq!((rig.count(C::Duplicates), rig.count(C::BlocksStored)), (1, 2));
}

#[test]
fn joined_late_can_only_under_count() {
    let mut rig = Rig::new(&Options { scheme: Some(SCHEME), ..Options::default() });
    rig.send(7, &Batch::new(0).stored(Some(99), &[11], &[1]).stored(None, &[12], &[2]));
    rig.expect(TrustLevel::LowerBound, &[R::JoinedLate, R::UnknownRoot], 7);
    assert_eq!((rig.device(&[1]), rig.device(&[2])), (0, 1));
}

#[test]
fn without_salts_a_chain_waits_for_its_unknown_parent() {
    let mut rig = Rig::new(&Options { scheme: Some(SCHEME), salts_possible: false, ..Options::default() });
    rig.send(7, &Batch::new(0).stored(Some(11), &[12], &[2]));
    assert_eq!((rig.device(&[1, 2]), rig.count(C::BlocksDormant)), (0, 1));
    rig.send(8, &Batch::new(1).stored(None, &[11], &[1]));
    assert_eq!(rig.device(&[1, 2]), 2);
    rig.expect(TrustLevel::LowerBound, &[R::JoinedLate], 8);
}

#[test]
fn a_broken_connection_empties_the_worker_until_the_next_batch() {
    let mut rig = Rig::new(&Options::default());
    rig.send(0, &chain(0));
    rig.streams[0].disconnected(&mut rig.space, rig.now);
    rig.streams[0].show(&mut rig.space);
    rig.expect(TrustLevel::Unproven, &[R::Disconnected], 0);
    assert_eq!((rig.device(&[1]), rig.count(C::Disconnects), rig.count(C::Emptied)), (0, 1, 1));
    rig.send(1, &Batch::new(1).stored(None, &[21], &[7]));
    rig.expect(TrustLevel::LowerBound, &[R::JoinedLate], 1);
    rig.streams[0].disconnected(&mut rig.space, rig.now);
    rig.send(0, &chain(9));
    rig.expect(TrustLevel::Exact, &[], 0);
    assert_eq!((rig.device(&[1, 2, 3]), rig.device(&[7])), (3, 0));
}

#[test]
fn an_undecodable_batch_is_a_gap_of_one() {
    let mut rig = Rig::new(&Options::default());
    rig.send(0, &chain(0));
    let mut cut = Batch::new(1).removed(&[11]).payload();
    cut.truncate(cut.len() - 3);
    rig.send_bytes(0, 1, &cut);
    rig.expect(TrustLevel::LowerBound, &[R::Undecodable], 1);
    assert_eq!(rig.device(&[1, 2, 3]), 0, "the removal it held may have been of these");
    assert_eq!((rig.count(C::BatchesUndecodable), rig.count(C::Batches)), (1, 1));
    assert_eq!(rig.streams[0].view.undecodable_by_reason().collect::<Vec<_>>(), [(Reason::Truncated.name(), 1)]);
    rig.send(2, &chain(2));
    rig.expect(TrustLevel::LowerBound, &[R::Undecodable], 2);
    assert_eq!((rig.device(&[1, 2, 3]), rig.count(C::Gaps)), (3, 0), "the stream goes on");
}

#[test]
fn unknown_kinds_of_events_are_skipped_and_lower_trust() {
    let mut rig = Rig::new(&Options::default());
    rig.send(0, &chain(0).other("BlockTeleported").stored(Some(13), &[14], &[4]));
    rig.expect(TrustLevel::Unproven, &[R::UnknownEvents], 0);
    assert_eq!((rig.device(&[1, 2, 3, 4]), rig.count(C::UnknownTags)), (4, 1));
    let view = &rig.streams[0].view;
    assert_eq!(view.warnings_by_name().collect::<Vec<_>>(), [(DecodeWarning::UnknownTag.name(), 1)]);
    rig.send(1, &Batch::new(1).cleared().stored(None, &[11], &[1]));
    rig.expect(TrustLevel::Exact, &[], 1);
    rig.send(2, &Batch::new(2).cleared().other("BlockTeleported"));
    rig.expect(TrustLevel::Unproven, &[R::UnknownEvents], 2);
}

#[test]
fn a_batch_of_another_rank_empties_the_worker_and_the_stream_goes_on() {
    let mut rig = Rig::new(&Options::default());
    rig.send(0, &chain(0).rank(None));
    rig.send(1, &Batch::new(1).rank(Some(3)).stored(None, &[21], &[7]).removed(&[11]));
    rig.send(2, &Batch::new(2).stored(Some(13), &[14], &[4]));
    rig.expect(TrustLevel::LowerBound, &[R::RankConflict, R::UnknownRoot], 2);
    // The refused batch may have held removals of held blocks, so none of them counts any more.
    assert_eq!((rig.device(&[1, 2, 3, 4]), rig.device(&[7]), rig.count(C::RankConflicts)), (0, 0, 1));
    assert_eq!(rig.count(C::Emptied), 1);
}

#[test]
fn another_scheme_is_refused_until_no_worker_holds_a_block() {
    let mut rig = Rig::new(&Options { workers: 2, ..Options::default() });
    rig.send(0, &chain(0));
    let wide = Batch::new(0).stored_with(None, &[31], &[1; 8], 8, None, &[]);
    rig.send_bytes(1, 0, &wide.payload());
    let second = Arc::clone(&rig.streams[1].view);
    assert_eq!(second.counters.get(C::StoresSchemeMismatch), 1);
    assert!(second.trust.load().reasons.contains(R::SchemeMismatch));
    rig.send(1, &Batch::new(1).cleared());
    rig.send_bytes(1, 1, &Batch::new(1).stored_with(None, &[31], &[1; 8], 8, None, &[]).payload());
    assert_eq!(rig.space.scheme.get().map(|scheme| scheme.block_size), Some(8));
    assert_eq!(second.counters.get(C::BlocksStored), 1);

    let mut fixed = Rig::new(&Options { scheme: Some(SCHEME), ..Options::default() });
    fixed.send(0, &wide);
    assert_eq!(fixed.space.scheme.get(), Some(SCHEME), "the operator's word is not forgotten");
    fixed.expect(TrustLevel::LowerBound, &[R::SchemeMismatch], 0);
}

#[test]
fn stores_before_the_scheme_is_known_are_counted_not_bound() {
    let mut rig = Rig::new(&Options::default());
    rig.send(0, &Batch::new(0).stored_with(None, &[1], &vllm::tokens(&[1]), BLOCK_SIZE, Some("CPU_PINNED"), &[]));
    rig.expect(TrustLevel::LowerBound, &[R::UnknownRoot], 0);
    assert_eq!((rig.count(C::StoresSchemeUnknown), rig.space.scheme.get()), (1, None));
}

#[test]
fn tiers_media_and_placeholders() {
    let mut rig = Rig::new(&Options::default());
    let on = |medium| Batch::new(0).stored_with(Some(13), &[14], &vllm::tokens(&[4]), BLOCK_SIZE, medium, &[]);
    rig.send(0, &chain(0));
    rig.send(1, &on(Some("CPU_PINNED")));
    assert_eq!(rig.depth(0, &[1, 2, 3, 4]), TierBlocks { device: 3, host: 1, ..TierBlocks::default() });
    rig.expect(TrustLevel::Exact, &[], 1);
    rig.send(2, &on(Some("GPU")).removed_from(&[14], Some("CPU_PINNED")));
    assert_eq!(rig.depth(0, &[1, 2, 3, 4]), TierBlocks { device: 4, ..TierBlocks::default() });
    rig.send(3, &on(Some("PUNCHCARD")));
    rig.expect(TrustLevel::LowerBound, &[R::UnknownMedium], 3);
    assert_eq!(rig.count(C::EventsUnknownMedium), 1);
    let remote = [("locality", "REMOTE")];
    rig.send(4, &Batch::new(4).stored_with(Some(14), &[15], &vllm::tokens(&[5]), BLOCK_SIZE, Some("CPU"), &remote));
    assert_eq!((rig.count(C::EventsRemote), rig.depth(0, &[1, 2, 3, 4, 5]).total()), (1, 4));
    rig.send(5, &Batch::new(5).stored_with(None, &[99], &[], 0, Some("CPU"), &[]));
    rig.expect(TrustLevel::LowerBound, &[R::UnknownMedium, R::OffloadUnbound], 5);
    assert_eq!(rig.count(C::StoresUnusable), 1);
}

#[test]
fn lora_is_part_of_the_chain_and_contradictions_are_refused() {
    let mut rig = Rig::new(&Options::default());
    let lora = [("lora_name", "alpha")];
    rig.send(
        0,
        &Batch::new(0).stored_with(None, &[1], &vllm::tokens(&[1]), BLOCK_SIZE, None, &lora).stored(None, &[2], &[2]),
    );
    rig.send(1, &Batch::new(1).stored_with(Some(1), &[3], &vllm::tokens(&[3]), BLOCK_SIZE, None, &lora));
    assert_eq!(rig.depth_under(0, &[1, 3], Some("alpha"), None).device, 2);
    assert_eq!(rig.device(&[1, 3]), 0);
    rig.expect(TrustLevel::Exact, &[], 1);
    rig.send(2, &Batch::new(2).stored_with(Some(2), &[4], &vllm::tokens(&[4]), BLOCK_SIZE, None, &lora));
    rig.expect(TrustLevel::LowerBound, &[R::HashConflict], 2);
    assert_eq!((rig.device(&[2, 4]), rig.count(C::StoresHashConflict)), (1, 1));
}

#[test]
fn conflicts_and_repetitions_lower_trust() {
    let mut rig = Rig::new(&Options::default());
    rig.send(0, &chain(0));
    rig.send(1, &chain(1));
    rig.expect(TrustLevel::LowerBound, &[R::AmbiguousStore], 1);
    assert_eq!(rig.count(C::StoresAmbiguous), 1);
    rig.send(2, &Batch::new(2).stored(None, &[12], &[9]));
    rig.expect(TrustLevel::LowerBound, &[R::HashConflict, R::AmbiguousStore], 2);
    assert_eq!((rig.device(&[9]), rig.device(&[1, 2, 3])), (0, 3));
}

#[test]
fn more_blocks_than_the_device_has_are_not_believed() {
    let mut rig = Rig::new(&Options { capacity_blocks: 3, ..Options::default() });
    rig.send(0, &chain(0));
    rig.expect(TrustLevel::Exact, &[], 0);
    rig.send(1, &Batch::new(1).stored(Some(13), &[14], &[4]));
    rig.expect(TrustLevel::LowerBound, &[R::CapacityBound], 1);
    assert_eq!((rig.device(&[1, 2, 3, 4]), rig.count(C::Emptied)), (0, 1));
}

#[test]
fn silence_lowers_trust_once_until_the_next_batch() {
    let mut rig = Rig::new(&Options::default());
    let tick = |rig: &mut Rig, uptime_ms| {
        rig.now.uptime_ms = uptime_ms;
        let now = rig.now;
        rig.streams[0].tick(1000, now);
        rig.streams[0].show(&mut rig.space);
    };
    tick(&mut rig, 5000);
    assert_eq!(rig.trust().reasons, [R::Joining].into_iter().collect(), "never heard is joining, not silent");
    rig.send(0, &chain(0));
    tick(&mut rig, 5500);
    rig.expect(TrustLevel::Exact, &[], 0);
    tick(&mut rig, 6500);
    rig.expect(TrustLevel::Unproven, &[R::Silent], 0);
    rig.send(1, &Batch::new(1));
    rig.expect(TrustLevel::Exact, &[], 1);
}

#[test]
fn trust_falls_before_the_index_changes_and_rises_after() {
    let mut rig = Rig::new(&Options::default());
    rig.send(0, &chain(0));
    rig.take(0, 5, &Batch::new(5).payload());
    let trust = rig.trust();
    assert_eq!((trust.level, trust.as_of_seq), (TrustLevel::LowerBound, Some(EventSeq(0))));
    assert_eq!(rig.device(&[1, 2, 3]), 0, "an event is visible when it has been applied");
    rig.streams[0].show(&mut rig.space);
    rig.expect(TrustLevel::LowerBound, &[R::Gap], 5);
    rig.take(0, 6, &Batch::new(6).cleared().stored(None, &[1], &[1]).payload());
    assert_eq!((rig.trust().level, rig.device(&[1])), (TrustLevel::LowerBound, 1));
    rig.streams[0].show(&mut rig.space);
    rig.expect(TrustLevel::Exact, &[], 6);
}

#[test]
fn a_message_over_the_bound_is_skipped_and_named() {
    let mut rig = Rig::new(&Options::default());
    rig.send_bytes(0, 0, &vec![0x93; EVENT_MESSAGE_BYTES_MAX + 1]);
    rig.expect(TrustLevel::LowerBound, &[R::Undecodable], 0);
    assert_eq!((rig.count(C::MessagesOversized), rig.count(C::BatchesUndecodable)), (1, 1));
    let reasons: Vec<_> = rig.streams[0].view.undecodable_by_reason().collect();
    assert_eq!(reasons, [(Reason::MessageTooLarge.name(), 1)]);
}

#[test]
fn frames_that_are_no_batch_are_counted() {
    let mut rig = Rig::new(&Options::default());
    let now = rig.now;
    rig.streams[0].misframed(&mut rig.space, 1, now);
    assert_eq!(rig.count(C::MessagesMisframed), 1);
    rig.send(0, &chain(0));
    rig.expect(TrustLevel::Exact, &[], 0);
    let now = rig.now;
    rig.streams[0].misframed(&mut rig.space, 1, now);
    rig.send(0, &chain(0));
    rig.expect(TrustLevel::Unproven, &[R::Misframed], 0);
    rig.send(1, &Batch::new(1));
    rig.expect(TrustLevel::Exact, &[], 1);
}
