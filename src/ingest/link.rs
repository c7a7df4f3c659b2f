//! The life of one publisher's connection: pure.
//!
//! | state | handshake | disconnected | tick |
//! |---|---|---|---|
//! | Connecting since `t` | Up, ready | Connecting since `t` | Down once `down_after` has passed, unreached |
//! | Up | Up | Lost since now | – |
//! | Lost since `t` | Up, ready | Lost since `t` | Down once `down_after` has passed, gone |
//! | Down | Up, ready | Down | – |
//!
//! With a `down_after` of 0 nothing is ever Down.

use crate::fleet::{FleetTable, WorkerState};
use crate::ids::WorkerIndex;

/// What the rest of the daemon is to be told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum LinkChange {
    /// The publisher is connected.
    Ready,
    /// It has been gone for too long.
    Gone,
    /// It has not been reached once, for too long.
    Unreached,
}

/// A connection's state. Times are milliseconds of one monotonic clock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Link {
    /// Never reached yet, and tried since then.
    Connecting { since_ms: u64 },
    /// Connected.
    Up,
    /// Was connected, until then.
    Lost { since_ms: u64 },
    /// Not there for longer than is tolerated.
    Down,
}

impl Link {
    /// A connection that is tried from now on.
    pub(super) const fn new(now_ms: u64) -> Self {
        Self::Connecting { since_ms: now_ms }
    }

    /// The publisher shook hands.
    pub(super) fn handshake(&mut self) -> Option<LinkChange> {
        let was = std::mem::replace(self, Self::Up);
        (was != Self::Up).then_some(LinkChange::Ready)
    }

    /// A connection ended. Answers whether it was one that had shaken hands: an attempt that fails, by a
    /// peer that does not speak the protocol, ends too.
    pub(super) fn disconnected(&mut self, now_ms: u64) -> bool {
        let was_up = *self == Self::Up;
        if was_up {
            *self = Self::Lost { since_ms: now_ms };
        }
        was_up
    }

    /// Time has passed. `down_after_ms` 0 = for ever.
    pub(super) fn tick(&mut self, now_ms: u64, down_after_ms: u64) -> Option<LinkChange> {
        let (since_ms, change) = match *self {
            Self::Connecting { since_ms } => (since_ms, LinkChange::Unreached),
            Self::Lost { since_ms } => (since_ms, LinkChange::Gone),
            Self::Up | Self::Down => return None,
        };
        if down_after_ms == 0 || now_ms.saturating_sub(since_ms) < down_after_ms {
            return None;
        }
        *self = Self::Down;
        Some(change)
    }
}

/// Moves a worker's state as its publisher says; `true` = it changed. A worker that an operator drains stays so.
pub(super) fn move_state(table: &mut FleetTable, (index, change): (WorkerIndex, LinkChange)) -> bool {
    let Some(record) = table.worker_mut(index) else { return false };
    let state = match (change, record.state) {
        (LinkChange::Ready, WorkerState::Joining | WorkerState::Down) => WorkerState::Ready,
        (LinkChange::Gone | LinkChange::Unreached, WorkerState::Joining | WorkerState::Ready) => WorkerState::Down,
        _ => return false,
    };
    record.state = state;
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_cell_of_the_table() {
        use Link::{Connecting, Down, Lost, Up};
        let (connecting, lost) = (Connecting { since_ms: 100 }, Lost { since_ms: 100 });
        let ready = Some(LinkChange::Ready);
        let rows = [
            (connecting, (Up, ready), connecting, (Down, Some(LinkChange::Unreached))),
            (Up, (Up, None), Lost { since_ms: 150 }, (Up, None)),
            (lost, (Up, ready), lost, (Down, Some(LinkChange::Gone))),
            (Down, (Up, ready), Down, (Down, None)),
        ];
        for (state, (after_handshake, change), after_break, (after_tick, tick)) in rows {
            let mut link = state;
            assert_eq!((link.handshake(), link), (change, after_handshake), "{state:?}");
            link = state;
            assert_eq!(link.disconnected(150), state == Up, "{state:?}");
            assert_eq!(link, after_break, "{state:?}");
            link = state;
            assert_eq!((link.tick(199, 100), link), (None, state), "{state:?}: not yet");
            assert_eq!((link.tick(200, 100), link), (tick, after_tick), "{state:?}");
            assert_eq!(link.tick(u64::MAX, 100), None, "{state:?}: said once");
            link = state;
            assert_eq!((link.tick(u64::MAX, 0), link), (None, state), "{state:?}: never, if 0");
        }
    }

    #[test]
    fn an_attempt_that_fails_does_not_put_off_being_down() {
        let mut link = Link::new(7);
        assert!(!link.disconnected(100));
        assert_eq!(link.tick(107, 100), Some(LinkChange::Unreached));
        assert_eq!(link.handshake(), Some(LinkChange::Ready));
    }
}
