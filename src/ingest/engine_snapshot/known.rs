//! A snapshot of hashes without tokens, and the blocks of the worker that give them content.
//!
//! No prompt can be compared with a hash alone. Such a snapshot therefore adds no block. It says which blocks the engine
//! holds: if the daemon knows all of them, nothing is missing any more, and those that it does not name are dropped. If
//! it names a block that the daemon does not know, the worker stays as it is.

use std::time::Duration;

use crossbeam::channel::RecvTimeoutError;
use rustc_hash::{FxHashMap, FxHashSet};

use super::build::begin;
use super::{OwnBlocks, ended};
use crate::event::SourceTrust;
use crate::event::engine_snapshot::Cut;
use crate::event::msgpack::Placed;
use crate::ids::{EngineHash, GroupId, LocalHash, Scheme, Seed, Tier};
use crate::index::StoreBlocks;
use crate::ingest::dump::{AbortReason, DumpChunk, DumpPart};
use crate::limits::{DUMP_SLICE_BLOCKS, TRANSFER_STALL_MS_MAX};
use crate::trust::{TrustLevel, TrustReason, TrustReasons};

/// Reasons that mean that the engine may hold blocks that are not counted. A snapshot that names only known blocks removes
/// them.
const MAY_MISS: [TrustReason; 4] =
    [TrustReason::JoinedLate, TrustReason::Gap, TrustReason::Undecodable, TrustReason::UnknownRoot];

/// One block as the daemon knows it.
#[derive(Clone, Copy)]
struct Block {
    parent: Option<EngineHash>,
    local: LocalHash,
    group: GroupId,
    seed: Seed,
}

/// The blocks of a worker.
pub(in crate::ingest) struct Known {
    blocks: FxHashMap<EngineHash, Block>,
    scheme: Option<Scheme>,
    groups: Vec<(Tier, GroupId)>,
    view: SourceTrust,
}

impl Known {
    /// Reads a dump of the worker.
    ///
    /// # Errors
    /// Why it was aborted; or it has blocks below device memory, in several groups or twice, which a snapshot of hashes
    /// does not tell apart.
    pub(in crate::ingest) fn read(own_blocks: &OwnBlocks) -> Result<Self, AbortReason> {
        let mut known: Option<Self> = None;
        loop {
            let part = own_blocks.recv_timeout(Duration::from_millis(2 * TRANSFER_STALL_MS_MAX));
            match (part, &mut known) {
                (Ok(DumpPart::Begin(begin)), None) => {
                    let view = without_missing(begin.view.reasons);
                    let (scheme, groups) = (begin.scheme, begin.groups);
                    known = Some(Self { blocks: FxHashMap::default(), scheme, groups, view });
                }
                (Ok(DumpPart::Chunk(chunk)), Some(known)) => known.add(&chunk)?,
                (Ok(DumpPart::End(_)), Some(_)) => return known.ok_or(AbortReason::PeerGone),
                (Ok(DumpPart::Aborted(reason)), _) => return Err(reason),
                (Ok(_), _) => return Err(AbortReason::Corrupt),
                (Err(RecvTimeoutError::Timeout), _) => return Err(AbortReason::Stalled),
                (Err(RecvTimeoutError::Disconnected), _) => return Err(AbortReason::PeerGone),
            }
        }
    }

    fn add(&mut self, chunk: &DumpChunk) -> Result<(), AbortReason> {
        for store in (0..chunk.stores()).filter_map(|number| chunk.store(number)) {
            let mut parent = store.parent;
            for (hash, local) in store.hashes.iter().zip(store.locals) {
                let block = Block { parent, local: *local, group: store.group, seed: store.seed };
                if store.tier != Tier::Device || self.blocks.insert(*hash, block).is_some() {
                    return Err(AbortReason::Unsupported);
                }
                parent = Some(*hash);
            }
        }
        Ok(())
    }

    /// The parts of a dump of those blocks that the snapshot names.
    ///
    /// # Errors
    /// It names a block that is not known, or a known one elsewhere in its chain.
    pub(super) fn parts(self, cut: Cut, placed: &[Placed]) -> Result<Vec<DumpPart>, AbortReason> {
        if self.groups.iter().any(|(tier, group)| (*tier, *group) != (Tier::Device, GroupId(0))) {
            return Err(AbortReason::Unsupported);
        }
        let named: FxHashSet<EngineHash> = placed.iter().map(|block| block.hash).collect();
        let mut children: FxHashMap<EngineHash, Vec<EngineHash>> = FxHashMap::default();
        let mut first = Vec::new();
        for block in placed {
            let known = self.blocks.get(&block.hash).ok_or(AbortReason::UnknownContent)?;
            match block.parent {
                parent if parent != known.parent => return Err(AbortReason::Corrupt),
                Some(parent) if named.contains(&parent) => children.entry(parent).or_default().push(block.hash),
                _ => first.push(block.hash),
            }
        }
        if named.len() != placed.len() {
            return Err(AbortReason::Corrupt);
        }
        let mut parts = vec![begin(cut, self.scheme, self.groups.clone(), self.view)];
        let mut chunk = DumpChunk::default();
        let mut stored = 0;
        while let Some(hash) = first.pop() {
            // In a ring of blocks none is the first, so none is stored.
            let Some(Block { parent, local, group, seed }) = self.blocks.get(&hash).copied() else { continue };
            let (hashes, locals) = (&[hash], &[local]);
            chunk.push(&StoreBlocks { parent, hashes, locals, tier: Tier::Device, group, seed });
            stored += 1;
            if chunk.blocks() >= DUMP_SLICE_BLOCKS {
                parts.push(DumpPart::Chunk(std::mem::take(&mut chunk)));
            }
            first.extend(children.remove(&hash).unwrap_or_default());
        }
        if stored != placed.len() {
            return Err(AbortReason::Corrupt);
        }
        if chunk.stores() > 0 {
            parts.push(DumpPart::Chunk(chunk));
        }
        Ok(ended(parts))
    }
}

/// The trust of the blocks once nothing is missing any more.
fn without_missing(reasons: TrustReasons) -> SourceTrust {
    let reasons: TrustReasons = reasons.iter().filter(|reason| !MAY_MISS.contains(reason)).collect();
    let level = reasons.iter().map(TrustReason::cap).min().unwrap_or(TrustLevel::Exact);
    SourceTrust { level, reasons }
}
