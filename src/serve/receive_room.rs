//! What the receive buffers of a core's connections may take together, beyond what each has anyway. One frame is bounded
//! by its length; a flood of connections with a large frame each, none of which ever ends, is bounded here.

use std::cell::Cell;
use std::sync::Arc;

use crate::limits::CORE_RECEIVE_BYTES_MAX;
use crate::metrics::{CoreCounter, CounterSet};

/// The room that is left.
#[derive(Debug)]
pub struct ReceiveRoom {
    /// All of it.
    bytes: usize,
    left_bytes: Cell<usize>,
    /// Whose refusals are counted.
    counters: Option<Arc<CounterSet<CoreCounter>>>,
}

impl Default for ReceiveRoom {
    /// Room that does not end, for one connection by itself.
    fn default() -> Self {
        Self { bytes: usize::MAX, left_bytes: Cell::new(usize::MAX), counters: None }
    }
}

impl ReceiveRoom {
    /// Room for the connections of one core, for at least one frame of the largest size; what is refused is counted.
    #[must_use]
    pub fn new(frame_body_bytes_max: u32, counters: Arc<CounterSet<CoreCounter>>) -> Self {
        // Beside a frame's body there are its header and what the next read is given.
        let bytes = CORE_RECEIVE_BYTES_MAX.max(2 * frame_body_bytes_max as usize);
        Self { bytes, left_bytes: Cell::new(bytes), counters: Some(counters) }
    }

    /// Whether so many bytes are left, for what can go without.
    pub(super) fn has(&self, bytes: usize) -> bool {
        self.left_bytes.get() >= bytes
    }

    /// Whether so much is left that idle connections may keep what they have for their next large frame.
    pub(super) fn is_ample(&self) -> bool {
        self.left_bytes.get() >= self.bytes / 2
    }

    /// Takes so many bytes of it, if they are there.
    pub(super) fn take(&self, bytes: usize) -> bool {
        let left = self.left_bytes.get().checked_sub(bytes);
        match (left, &self.counters) {
            (Some(left), _) => self.left_bytes.set(left),
            (None, Some(counters)) => counters.bump(CoreCounter::FramesNoRoom),
            (None, None) => {}
        }
        left.is_some()
    }

    /// Gives so many bytes back.
    pub(super) fn give_back(&self, bytes: usize) {
        self.left_bytes.set(self.left_bytes.get().saturating_add(bytes));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_there_is_not_given_and_is_counted() {
        let counters: Arc<CounterSet<CoreCounter>> = Arc::default();
        let room = ReceiveRoom::new(8, Arc::clone(&counters));
        assert!(room.take(CORE_RECEIVE_BYTES_MAX - 1) && room.take(1));
        assert!(!room.take(1) && room.take(0));
        assert_eq!(counters.get(CoreCounter::FramesNoRoom), 1);
        room.give_back(5);
        assert!(room.take(5) && !room.take(1));
        assert!(ReceiveRoom::new(u32::MAX, counters).take(u32::MAX as usize), "one largest frame always fits");
    }
}
