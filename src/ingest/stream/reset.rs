//! A worker that is emptied because somebody asked for it.

use super::{Home, Now, Stream};
use crate::event::trust::TrustInput;
use crate::ids::Tier;
use crate::ingest::dump::AbortReason;
use crate::metrics::WorkerCounter;

impl Stream {
    /// Drops every block. Its engine still holds them, so it is believed as one that was joined late; its stream goes
    /// on where it stands.
    pub(in crate::ingest) fn reset(&mut self, home: &mut Home, now: Now) {
        self.break_hold(home, AbortReason::Reset, now);
        self.changed = true;
        self.count(WorkerCounter::Resets, 1);
        tracing::info!(worker = %self.worker, "the worker is emptied, as was asked for");
        self.empty(home, TrustInput::Reset, now);
        self.show(home);
    }

    /// Drops what the device holds, because somebody says that its engine's cache was cleared. The engine publishes that
    /// with its next step only; until then batches from before may come. The stream goes on where it stands.
    pub(in crate::ingest) fn device_cleared(&mut self, home: &mut Home, now: Now) {
        self.break_hold(home, AbortReason::Reset, now);
        self.changed = true;
        self.count(WorkerCounter::Resets, 1);
        tracing::info!(worker = %self.worker, "the worker's device is emptied: its engine's cache was cleared, as somebody says");
        self.input(TrustInput::ClearTold, now);
        home.writer.clear(self.slot, Some(Tier::Device));
        self.said(|republisher| republisher.cleared(Some(Tier::Device)));
        self.groups.retain(|(tier, _)| *tier != Tier::Device);
        self.copies.cleared();
        self.last_copies.cleared();
        self.show(home);
    }
}
