//! A worker's blocks as a stream of parts, taken out of a running shard ([`IngestHandle::dump`]) and put into
//! a worker of another ([`IngestHandle::load`]).
//!
//! ```text
//! begin{watermark, remembered payloads, scheme, trust}  chunk*  (end{references, digest} | aborted{reason})
//! ```
//!
//! A dump holds what the worker held when its batch `watermark` had been applied, and nothing of what came
//! later, though the shard goes on. For as long as it is walked, slice by slice between the turns of the
//! others, the worker's own messages wait in a bounded buffer; its answers are those of the watermark
//! meanwhile, and say so. When it ends, however it ends, they are applied in order. Nothing is lost by a
//! dump: where the buffer is full, or a message shows that the worker is to be emptied, it is the dump that
//! is broken off.
//!
//! A load is the same the other way. The worker is emptied, believed `unproven` until the end has been
//! seen to agree with what was stored, and then goes on behind the watermark as the stream that was dumped
//! would have: the gate is handed over with the payloads it remembered, so a stream of another incarnation is told
//! from its own. A load that fails leaves the worker empty, and believed as one that was joined late.
//!
//! One dump or load runs in a shard at a time; others wait for it. A worker whose lost batches are being fetched is
//! recovered first, which is bounded in time; batches found missing while it is dumped or loaded are fetched after. What
//! is loaded is shown to go on by a replay, at once or on connecting; without a replay endpoint it is emptied there.
//!
//! [`IngestHandle::dump`]: super::IngestHandle::dump
//! [`IngestHandle::load`]: super::IngestHandle::load

mod chunk;
mod first;
mod loading;
mod sending;

pub use chunk::{DumpChunk, References};
pub use first::FirstLoad;
pub(super) use loading::Loading;
pub(super) use sending::Sending;

use crate::event::SourceTrust;
use crate::ids::{EventSeq, GroupId, Scheme, Tier};
use crate::reasons::reasons;
use crate::trust::Trust;

/// One part of a dump.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DumpPart {
    /// The first part.
    Begin(Box<DumpBegin>),
    /// Some of the blocks; a parent comes before its children.
    Chunk(DumpChunk),
    /// The last part of a dump that is whole: what all chunks hold together.
    End(References),
    /// The last part of a dump that is not. So is the channel's end without a last part.
    Aborted(AbortReason),
}

/// What a dump says of itself before its blocks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DumpBegin {
    /// The last batch whose events are contained; `None` = the stream had none.
    pub watermark: Option<EventSeq>,
    /// Hashes of the last payloads up to the watermark, by which another publisher is told from this one.
    pub remembered: Vec<(EventSeq, u64)>,
    /// How the blocks are cut and hashed, where that is known.
    pub scheme: Option<Scheme>,
    /// The KV groups of each tier, also those without a block: a tier holds what all of its groups have.
    pub groups: Vec<(Tier, GroupId)>,
    /// How much the worker was believed.
    pub trust: Trust,
    /// How much the blocks are to be believed wherever they are loaded: without what speaks of the connection that they
    /// came by, but never more than a relay said of them.
    pub view: SourceTrust,
}

/// What is said of a load, in this order: held, unless nothing can be, and then one of the others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LoadAnswer {
    /// The worker's messages wait from now on. A dump that is taken elsewhere after this, and there beyond `last`,
    /// follows from what was seen here.
    Held {
        /// The last batch applied before.
        last: Option<EventSeq>,
    },
    /// The worker holds these, and its stream goes on.
    Loaded(References),
    /// The worker was left empty, or, where nothing had been stored yet, as it was.
    Failed(AbortReason),
}

reasons! {
    /// Why a dump or a load came to no end.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
    AbortReason {}
    /// The shard has no stream of this worker.
    UnknownWorker = "unknown_worker";
    /// Too many dumps and loads of the shard wait already.
    Busy = "busy";
    /// More messages arrived meanwhile than may wait.
    Overflow = "overflow";
    /// The other side took or sent nothing for too long.
    Stalled = "stalled";
    /// The other side is gone.
    PeerGone = "peer_gone";
    /// Batches are missing, so that the worker is emptied.
    Gap = "gap";
    /// The publisher restarted, so that the worker is emptied.
    Restarted = "restarted";
    /// The publisher's connection broke, so that the worker is emptied.
    Disconnected = "disconnected";
    /// The worker left the shard, or the shard's thread ended.
    WorkerRemoved = "worker_removed";
    /// Somebody asked for the worker to be emptied.
    Reset = "reset";
    /// Loading: the dump itself was broken off where it was taken.
    SourceAborted = "source_aborted";
    /// Loading: parts came in an order that means nothing, or the end does not agree with the chunks.
    Corrupt = "corrupt";
    /// Loading: the dump was taken before its stream had a batch, so nothing can follow it.
    NoWatermark = "no_watermark";
    /// Loading: the worker has applied batches beyond the watermark.
    Outdated = "outdated";
    /// Loading: the worker's batches are not those that the dump remembers, or did not come to them in time.
    OtherIncarnation = "other_incarnation";
    /// Loading: the blocks are cut or hashed otherwise than the space's.
    SchemeMismatch = "scheme_mismatch";
    /// Loading: the index refused blocks; the log names the bound.
    Refused = "refused";
}

/// What became of a step of a dump or load.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Step {
    /// It has come further.
    Moved,
    /// It waits for its other side.
    Waits,
    /// It is over; whatever waited may be applied.
    Over,
}

/// For how long the other side has not moved.
#[derive(Debug, Default)]
struct Patience {
    since_ms: Option<u64>,
}

impl Patience {
    /// The other side moved.
    const fn renew(&mut self) {
        self.since_ms = None;
    }

    /// The other side has not moved; whether that is so for too long.
    fn is_over(&mut self, now_ms: u64) -> bool {
        let since_ms = *self.since_ms.get_or_insert(now_ms);
        now_ms.saturating_sub(since_ms) >= crate::limits::TRANSFER_STALL_MS_MAX
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reasons_are_dense_and_their_names_unique() {
        let mut names: Vec<_> = AbortReason::ALL.iter().map(|reason| reason.name()).collect();
        assert!(AbortReason::ALL.iter().enumerate().all(|(at, reason)| at == *reason as usize));
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), AbortReason::ALL.len());
    }

    #[test]
    fn patience_ends_and_is_renewed() {
        let mut patience = Patience::default();
        let max = crate::limits::TRANSFER_STALL_MS_MAX;
        assert!(!patience.is_over(5) && !patience.is_over(4 + max) && patience.is_over(5 + max));
        patience.renew();
        assert!(!patience.is_over(5 + max));
    }
}
