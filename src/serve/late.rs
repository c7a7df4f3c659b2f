//! What a core is told about requests that wait, from any thread: replies, and that it is to serve or to look.

use crossbeam::queue::SegQueue;
use tokio::sync::Notify;

use super::awaited::Told;
use crate::load::{BookingHandle, SessionId};
use crate::queue::Ticket;

/// What was booked for a request: where it is decoded, or both, and where it is prefilled.
pub(super) type Booked = [Option<BookingHandle>; 2];

/// What a core is told about requests that wait.
#[derive(Debug)]
pub(super) enum Late {
    /// The reply to a request of one of its connections.
    Reply {
        connection: u64,
        ticket: Ticket,
        frame: Vec<u8>,
        session: SessionId,
        /// What was booked for it, to be undone if nobody can be told.
        booked: Booked,
    },
    /// Somebody who waits may find room.
    Serve,
    /// It is time to look whether somebody who waits finds room that nobody told of.
    Look,
}

/// What other threads put before a core. Not bounded by itself: a reply is there for each request that waited, whose
/// number is, and `Serve` and `Look` at most once each.
#[derive(Debug, Default)]
pub(super) struct LateBox {
    pub(super) queue: SegQueue<Late>,
    pub(super) arrived: Notify,
    serve_told: Told,
    look_told: Told,
}

impl LateBox {
    pub(super) fn pop(&self) -> Option<Late> {
        let late = self.queue.pop()?;
        match late {
            Late::Serve => self.serve_told.take(),
            Late::Look => self.look_told.take(),
            Late::Reply { .. } => {}
        }
        Some(late)
    }

    pub(super) fn put(&self, late: Late) {
        self.queue.push(late);
        self.arrived.notify_one();
    }

    /// Tells it to serve who waits, unless it is told already.
    pub(super) fn serve(&self) {
        if self.serve_told.tell() {
            self.put(Late::Serve);
        }
    }

    /// Tells it to look for those whose room nobody tells of, unless it is told already.
    pub(super) fn look(&self) {
        if self.look_told.tell() {
            self.put(Late::Look);
        }
    }
}
