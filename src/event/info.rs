//! What a batch says about itself.

use super::Oddities;
use crate::ids::{DpRank, EventSeq, Scheme, WorkerId};
use crate::trust::{TrustLevel, TrustReasons};

/// What a batch says beside its events.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct BatchInfo {
    /// When the publisher says it published, seconds of Unix time; 0 where it does not say.
    pub published_at_unix_s: f64,
    /// Which worker the batch says it is of (relays only).
    pub worker_id: Option<WorkerId>,
    /// Which data-parallel rank it is of.
    pub dp_rank: Option<DpRank>,
    /// Drawn anew whenever the publisher starts (relays only).
    pub generation: Option<u64>,
    /// What the relay knows about its own view (relays only).
    pub source: Option<SourceTrust>,
    /// How the relay's blocks are cut and hashed (relays only).
    pub scheme: Option<Scheme>,
    /// The last sequence that carried events, where the batch is a heartbeat (relays only).
    pub heartbeat_last_seq: Option<EventSeq>,
    /// Which part of a snapshot the batch is (relays only).
    pub snapshot: Option<Snapshot>,
    /// A salt came as a gateway's users say it.
    pub has_plain_salts: bool,
    /// A salt came with the prefix that some gateways put before it, which was taken off.
    pub has_prefixed_salts: bool,
    /// What was passed over or could not be used, counted by reason.
    pub oddities: Oddities,
}

/// A relay's trust in the view it publishes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SourceTrust {
    /// How much it believes itself.
    pub level: TrustLevel,
    /// Why not more.
    pub reasons: TrustReasons,
}

/// A part of a worker's whole view, sent as a run of stored events.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Snapshot {
    /// Which snapshot.
    pub id: u64,
    /// Which part of it.
    pub phase: SnapshotPhase,
    /// The events up to and including this sequence are contained.
    pub watermark: EventSeq,
    /// Number of the chunk, from 0.
    pub chunk: u32,
    /// At the end: how many chunks there were.
    pub chunks: u32,
    /// At the end: how many (tier, group, block) references they held.
    pub blocks: u64,
    /// At the end: an order-independent digest of those references.
    pub digest: u64,
    /// At the beginning: XXH3-64 of the payload of the batch that has the watermark's sequence.
    pub watermark_hash: u64,
}

/// Which part of a snapshot a batch is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SnapshotPhase {
    /// It begins.
    Begin,
    /// Some of its blocks.
    Chunk,
    /// It is complete.
    End,
}
