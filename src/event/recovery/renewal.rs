//! When to ask once more for batches that were lost for good: a publisher that was slow, unreachable or badly connected
//! may still be able to replay its whole stream.

use crate::limits::{RENEWAL_AFTER_MS_MIN, RENEWAL_DOUBLINGS_MAX, REPLAY_LATE_TRIES_MAX};

/// The next replay from 0 of a stream that has lost batches.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Renewal {
    due_ms: Option<u64>,
    /// Replays from 0 since batches were lost.
    tries: u32,
    /// Answers that began behind batch 0.
    late: u32,
}

impl Renewal {
    /// Notes that batches are lost and the worker goes on without them.
    pub(super) const fn lost(&mut self, now_ms: u64) {
        if self.late < REPLAY_LATE_TRIES_MAX {
            self.due_ms = Some(now_ms.saturating_add(self.wait_ms()));
        }
    }

    /// Notes that no batch is lost any more.
    pub(super) const fn forget(&mut self) {
        (self.due_ms, self.tries, self.late) = (None, 0, 0);
    }

    pub(super) fn is_due(&self, now_ms: u64) -> bool {
        self.due_ms.is_some_and(|due_ms| due_ms <= now_ms)
    }

    /// Notes that the replay is asked for, and schedules the next one in case this one fails.
    pub(super) const fn asked(&mut self, now_ms: u64) {
        self.tries = self.tries.saturating_add(1);
        self.due_ms = Some(now_ms.saturating_add(self.wait_ms()));
    }

    /// Notes an answer that begins behind batch 0: it was lost on the way, or the publisher no longer has it.
    pub(super) const fn began_late(&mut self) {
        self.late += 1;
        if self.late >= REPLAY_LATE_TRIES_MAX {
            self.due_ms = None;
        }
    }

    const fn wait_ms(&self) -> u64 {
        let doublings = if self.tries < RENEWAL_DOUBLINGS_MAX { self.tries } else { RENEWAL_DOUBLINGS_MAX };
        RENEWAL_AFTER_MS_MIN << doublings
    }
}
