//! A snapshot of a worker's blocks as messages: `schemas/kv_events.fbs`, `Snapshot`. Pure.

use std::sync::Arc;

use crate::event::flat::Encoder;
use crate::event::{BatchInfo, KvEvent, Snapshot, SnapshotPhase, SourceTrust};
use crate::ids::{EngineHash, EventSeq, LocalHash, Seed};
use crate::index::StoreBlocks;
use crate::ingest::{AbortReason, DumpPart, RelayName, Republished, stored_event};
use crate::limits::RELAY_SNAPSHOT_BYTES_MAX;

/// The progress of a snapshot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Progress {
    /// More parts will come.
    Taking,
    /// It is complete.
    Whole,
    /// It failed; no further part will come.
    Failed(Failure),
}

/// Why a snapshot failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Failure {
    /// Its dump was aborted.
    Aborted(AbortReason),
    /// It would exceed its size limit.
    TooLarge,
}

/// A snapshot: its messages so far, in their order.
#[derive(Debug)]
pub struct TakenSnapshot {
    id: u64,
    name: RelayName,
    head: Option<PartHead>,
    encoder: Encoder,
    parts: Vec<Arc<[u8]>>,
    bytes: usize,
    chunks: u32,
    progress: Progress,
}

/// The facts that every part repeats.
#[derive(Clone, Copy, Debug)]
struct PartHead {
    last: Republished,
    info: BatchInfo,
}

impl TakenSnapshot {
    /// A snapshot without parts yet. `id` distinguishes it from others of the same relay.
    #[must_use]
    pub fn new(id: u64, name: RelayName) -> Self {
        let (parts, progress) = (Vec::new(), Progress::Taking);
        Self { id, name, head: None, encoder: Encoder::new(), parts, bytes: 0, chunks: 0, progress }
    }

    /// What distinguishes it from others of the same relay.
    #[must_use]
    pub const fn id(&self) -> u64 {
        self.id
    }

    /// Its watermark: the last batch that it covers; `None` before its first part.
    #[must_use]
    pub fn watermark(&self) -> Option<EventSeq> {
        self.head.map(|head| head.last.seq)
    }

    /// Its progress.
    #[must_use]
    pub const fn progress(&self) -> Progress {
        self.progress
    }

    /// A part, if it has arrived.
    #[must_use]
    pub fn part(&self, number: usize) -> Option<&Arc<[u8]>> {
        self.parts.get(number)
    }

    /// Marks it as failed.
    pub fn fail(&mut self, failure: Failure) {
        self.parts = Vec::new();
        self.progress = Progress::Failed(failure);
    }

    /// Adds the next part of a dump.
    pub fn take(&mut self, part: &DumpPart) {
        match part {
            DumpPart::Begin(begin) => {
                let Some(last) = begin.republished else {
                    return self.fail(Failure::Aborted(AbortReason::NoWatermark));
                };
                let source = SourceTrust { level: begin.trust.level, reasons: begin.trust.reasons };
                let info = BatchInfo {
                    worker_id: self.name.worker_id,
                    dp_rank: self.name.dp_rank,
                    generation: Some(last.generation),
                    source: Some(source),
                    scheme: begin.scheme,
                    ..BatchInfo::default()
                };
                self.head = Some(PartHead { last, info });
                let groups: Vec<StoreBlocks<'_>> = begin.groups.iter().map(|place| without_blocks(*place)).collect();
                self.push(SnapshotPhase::Begin, (0, 0), groups.into_iter());
            }
            DumpPart::Chunk(chunk) => {
                let stores = (0..chunk.stores()).filter_map(|number| chunk.store(number));
                self.push(SnapshotPhase::Chunk, (0, 0), stores);
                self.chunks += 1;
            }
            DumpPart::End(references) => {
                self.push(SnapshotPhase::End, (references.blocks, references.digest), std::iter::empty());
                if self.progress == Progress::Taking {
                    self.progress = Progress::Whole;
                }
            }
            DumpPart::Aborted(reason) => self.fail(Failure::Aborted(*reason)),
        }
    }

    fn push<'a>(
        &mut self,
        phase: SnapshotPhase,
        (blocks, digest): (u64, u64),
        stores: impl Iterator<Item = StoreBlocks<'a>>,
    ) {
        let Some(PartHead { last, info }) = self.head else {
            return self.fail(Failure::Aborted(AbortReason::Corrupt));
        };
        let is_end = phase == SnapshotPhase::End;
        let snapshot = Some(Snapshot {
            id: self.id,
            phase,
            watermark: last.seq,
            chunk: self.chunks,
            chunks: if is_end { self.chunks } else { 0 },
            blocks,
            digest,
            watermark_hash: last.payload_hash,
        });
        let events = stores.map(|store| KvEvent::Stored(stored_event(&store)));
        let payload = self.encoder.encode(&BatchInfo { snapshot, ..info }, events);
        self.bytes += payload.len();
        if self.bytes > RELAY_SNAPSHOT_BYTES_MAX {
            return self.fail(Failure::TooLarge);
        }
        self.parts.push(payload.into());
    }
}

/// A KV group of a tier.
fn without_blocks((tier, group): (crate::ids::Tier, crate::ids::GroupId)) -> StoreBlocks<'static> {
    let (hashes, locals): (&[EngineHash], &[LocalHash]) = (&[], &[]);
    StoreBlocks { parent: None, hashes, locals, tier, group, seed: Seed::default() }
}
