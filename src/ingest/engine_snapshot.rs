//! The snapshot that an engine sends itself, from the question to the load into its worker. Experimental: the proposals
//! that it follows are open ([`crate::event::engine_snapshot`]).
//!
//! ```text
//! load: messages wait → question → answer, whole → build in an index of its own → dump of that → load: joins, stores
//! ```
//!
//! It runs on a thread of its own, which the worker's ingest thread never waits for. The ingest thread holds the
//! worker's messages meanwhile, for a bounded time, and takes the finished blocks slice by slice
//! ([`crate::ingest::dump`]). Nothing of a snapshot reaches the worker before the snapshot is whole. An answer that is
//! late, torn, too large or another publisher's leaves the worker as it was.

mod build;
pub(super) mod known;
mod question;

use std::time::{Duration, Instant};

use crossbeam::channel::{Receiver, Sender};

use super::dump::{AbortReason, DumpPart, LoadAnswer, References};
use crate::event::engine_snapshot::{EngineSnapshot, SnapshotContent};
use crate::fleet::SnapshotSource;
use crate::ids::{Scheme, Worker};
use crate::limits::{ENGINE_SNAPSHOT_MS_MAX, ENGINE_SNAPSHOT_TURN_MS_MAX, TRANSFER_STALL_MS_MAX};

/// A snapshot to be fetched.
#[derive(Clone, Debug)]
pub(crate) struct SnapshotOrder {
    /// The worker that it is for.
    pub(crate) worker: Worker,
    /// Where its engine sends snapshots.
    pub(crate) source: SnapshotSource,
    /// The scheme of the worker's space, if it is known.
    pub(crate) scheme: Option<Scheme>,
    /// Whether prompts of the space may be salted.
    pub(crate) salts_possible: bool,
    /// Whether a block that is stored twice is held twice. If not, the second may be a full report's.
    pub(crate) counts_copies: bool,
}

/// The worker's own blocks, for a snapshot that names blocks by their hashes alone.
pub(crate) type OwnBlocks = Receiver<DumpPart>;

impl SnapshotOrder {
    /// Whether the snapshot needs what the daemon knows of the worker's blocks.
    pub(crate) const fn needs_own_blocks(&self) -> bool {
        matches!(self.source.proposal, crate::ids::SnapshotProposal::Sglang34407)
    }

    /// Fetches the snapshot and feeds it to a load, whose channels are `parts` and `answers`. Blocks for a bounded time.
    ///
    /// # Errors
    /// Why the worker has none, as its load says it.
    pub(crate) fn fetch(
        self,
        own_blocks: Option<&OwnBlocks>,
        parts: &Sender<DumpPart>,
        answers: &Receiver<LoadAnswer>,
    ) -> Result<References, AbortReason> {
        let known = own_blocks.map(known::Known::read).transpose();
        let begun = Instant::now();
        match answers.recv_timeout(Duration::from_millis(ENGINE_SNAPSHOT_TURN_MS_MAX)) {
            Ok(LoadAnswer::Held { .. }) => {}
            Ok(LoadAnswer::Failed(reason)) => return Err(reason),
            Ok(LoadAnswer::Loaded(_)) | Err(_) => return Err(AbortReason::Busy),
        }
        tracing::debug!(worker = %self.worker, waited = ?begun.elapsed(), "snapshot asked for");
        let deadline = Instant::now() + Duration::from_millis(ENGINE_SNAPSHOT_MS_MAX);
        let made = known.and_then(|known| {
            let snapshot = question::ask(&self.source, self.worker.rank, deadline)?;
            self.parts(snapshot, known)
        });
        // Longer than the load waits to join: then its end shows here as a closed channel.
        let send = |part| parts.send_timeout(part, Duration::from_millis(2 * TRANSFER_STALL_MS_MAX)).is_ok();
        match made {
            // A load that has ended takes no more parts; its answer says why.
            Ok(made) => drop(made.into_iter().all(send)),
            Err(reason) => drop(send(DumpPart::Aborted(reason))),
        }
        match answers.recv_timeout(Duration::from_millis(2 * TRANSFER_STALL_MS_MAX)) {
            Ok(LoadAnswer::Loaded(references)) => Ok(references),
            Ok(LoadAnswer::Failed(reason)) => Err(reason),
            Ok(LoadAnswer::Held { .. }) | Err(_) => Err(AbortReason::PeerGone),
        }
    }

    /// The parts of a whole snapshot.
    ///
    /// # Errors
    /// It cannot be used.
    pub(super) fn parts(
        &self,
        snapshot: EngineSnapshot,
        known: Option<known::Known>,
    ) -> Result<Vec<DumpPart>, AbortReason> {
        let EngineSnapshot { cut, content } = snapshot;
        match (content, known) {
            (SnapshotContent::Batches(batches), _) => build::from_batches(self, cut, batches),
            (SnapshotContent::Placements(placed), Some(known)) => known.parts(cut, &placed),
            (SnapshotContent::Placements(_), None) => Err(AbortReason::UnknownContent),
        }
    }
}

/// The last part of a dump is the sum of the others.
fn ended(mut parts: Vec<DumpPart>) -> Vec<DumpPart> {
    let mut sum = References::default();
    for part in &parts {
        if let DumpPart::Chunk(chunk) = part {
            (0..chunk.stores()).filter_map(|number| chunk.store(number)).for_each(|store| sum.add(&store));
        }
    }
    parts.push(DumpPart::End(sum));
    parts
}
