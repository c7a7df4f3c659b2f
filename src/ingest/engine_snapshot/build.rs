//! A snapshot of event batches, applied to a worker in an index of its own, and dumped from there.
//!
//! The batches are a program for an empty index: stores in their original order, then removals of what is too much. On
//! the way blocks count that the engine has evicted since, so no reader may see it before it is done.

use bytes::Bytes;
use rustc_hash::FxHashSet;

use super::{SnapshotOrder, ended};
use crate::event::engine_snapshot::Cut;
use crate::event::{SourceTrust, Stored};
use crate::ids::{EngineHash, GroupId, Scheme, Tier};
use crate::index::{DumpCursor, ShardLimits, StoreBlocks};
use crate::ingest::dump::{AbortReason, DumpBegin, DumpChunk, DumpPart};
use crate::ingest::in_memory_stream::Feed;
use crate::limits::{
    DUMP_SLICE_BLOCKS, ENGINE_SNAPSHOT_BLOCKS_MAX, ENGINE_SNAPSHOT_INDEX_BYTES_MAX, WORKER_BYTES_PER_BLOCK_MAX,
};
use crate::trust::{Trust, TrustReason};

/// The parts of the dump of a worker that holds what the batches leave.
///
/// # Errors
/// A batch is none of a snapshot; there are too many blocks; or the worker has window groups, which a dump leaves out.
pub(super) fn from_batches(order: &SnapshotOrder, cut: Cut, batches: Vec<Bytes>) -> Result<Vec<DumpPart>, AbortReason> {
    let blocks_max = ENGINE_SNAPSHOT_BLOCKS_MAX as u64;
    let limits = ShardLimits {
        worker_blocks_max: blocks_max,
        worker_bytes_max: blocks_max * WORKER_BYTES_PER_BLOCK_MAX,
        memory_bytes_max: ENGINE_SNAPSHOT_INDEX_BYTES_MAX,
        workers_max: 1,
        counts_copies: true,
        ..ShardLimits::default()
    };
    let (mut feed, _reader) = Feed::new(order.worker, order.scheme, order.salts_possible, limits);
    feed.begin_snapshot();
    let mut copies = Copies { counts: order.counts_copies, ..Copies::default() };
    // Each batch is freed once it is applied.
    for batch in batches {
        feed.snapshot_batch(&batch, &mut |stored| copies.note(stored))?;
    }
    let built = feed.end_snapshot();
    let reasons = built.view.reasons;
    if built.has_windows || reasons.contains(TrustReason::Hybrid) {
        return Err(AbortReason::Unsupported);
    }
    if [TrustReason::CapacityBound, TrustReason::MemoryBound].iter().any(|bound| reasons.contains(*bound)) {
        return Err(AbortReason::Oversized);
    }
    let chunks = copies.chunks(&feed);
    let mut view = built.view;
    if copies.left_out {
        view.reasons.insert(TrustReason::AmbiguousStore);
        view.level = view.level.min(TrustReason::AmbiguousStore.cap());
    }
    let mut parts = vec![begin(cut, built.scheme, built.groups, view)];
    parts.extend(chunks.into_iter().map(DumpPart::Chunk));
    Ok(ended(parts))
}

/// The first part of a snapshot.
pub(super) fn begin(cut: Cut, scheme: Option<Scheme>, groups: Vec<(Tier, GroupId)>, view: SourceTrust) -> DumpPart {
    let (watermark, lifetime) = (Some(cut.watermark), Some(cut.lifetime));
    let trust = Trust { level: view.level, reasons: view.reasons, as_of_seq: watermark, ..Trust::default() };
    let (remembered, republished) = (Vec::new(), None);
    DumpPart::Begin(Box::new(DumpBegin { watermark, remembered, scheme, groups, trust, view, lifetime, republished }))
}

/// What becomes of a block that is held twice. A second copy and a full report look the same, and a snapshot counts both
/// as the engine announced them. A full report begins at the root. Where one is possible, a block that was announced twice
/// from the root is therefore counted once, and trust says so.
#[derive(Default)]
struct Copies {
    counts: bool,
    /// Blocks that were announced in a chain from the root, and those of them that were announced so again.
    announced: FxHashSet<(GroupId, EngineHash)>,
    repeated: FxHashSet<(GroupId, EngineHash)>,
    dumped: FxHashSet<(GroupId, EngineHash)>,
    left_out: bool,
}

impl Copies {
    fn note(&mut self, stored: &Stored<'_>) {
        if self.counts || stored.parent.is_some() {
            return;
        }
        for block in stored.hashes.iter().map(|hash| (stored.group, *hash)) {
            if !self.announced.insert(block) {
                self.repeated.insert(block);
            }
        }
    }

    fn chunks(&mut self, feed: &Feed) -> Vec<DumpChunk> {
        let (mut cursor, mut chunks, mut more) = (DumpCursor::default(), Vec::new(), true);
        while more {
            let mut chunk = DumpChunk::default();
            more = feed.dump(&mut cursor, DUMP_SLICE_BLOCKS, &mut |store| self.push(&mut chunk, &store));
            if chunk.stores() > 0 {
                chunks.push(chunk);
            }
        }
        chunks
    }

    fn push(&mut self, chunk: &mut DumpChunk, store: &StoreBlocks<'_>) {
        if self.counts || store.tier != Tier::Device {
            return chunk.push(store);
        }
        // A further reference to blocks is a store of its own.
        let (mut from, mut parent) = (0, store.parent);
        for at in 0..=store.hashes.len() {
            let block = store.hashes.get(at).map(|hash| (store.group, *hash));
            let counts = block.is_some_and(|block| self.dumped.insert(block) || !self.repeated.contains(&block));
            if counts {
                continue;
            }
            if from < at {
                let (hashes, locals) = (&store.hashes[from..at], &store.locals[from..at]);
                chunk.push(&StoreBlocks { parent, hashes, locals, ..*store });
            }
            if let Some(hash) = store.hashes.get(at) {
                self.left_out = true;
                (from, parent) = (at + 1, Some(*hash));
            }
        }
    }
}
