//! The way into an ingest thread, and what it tells whoever starts it.

use crossbeam::queue::ArrayQueue;
use mio::Waker;

use super::dump::{Loading, Sending};
use super::roll::Roll;
use crate::error::{Error, Kind};
use crate::ids::Worker;

/// What an ingest thread can be asked to do.
#[derive(Debug)]
pub(super) enum Command {
    /// Close every socket and end.
    Stop,
    /// Dump a worker.
    Dump(Worker, Box<Sending>),
    /// Take a worker in, change it, or let it go.
    Roll(Box<Roll>),
    /// Load a dump into a worker.
    Load(Worker, Box<Loading>),
    /// Empty a worker, or every worker.
    Reset(Option<Worker>, ResetScope),
}

/// What of a worker is forgotten because somebody asks for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ResetScope {
    /// Everything, although its engine still holds it.
    Everything,
    /// What its device held: the engine's cache was cleared, which the engine publishes with its next step only.
    ClearedDevice,
}

/// The way into a thread that waits in its event loop.
#[derive(Debug)]
pub(super) struct Inbox {
    pub(super) commands: ArrayQueue<Command>,
    pub(super) waker: Waker,
}

/// A worker whose publisher could not be opened. The others go on.
#[derive(Debug)]
pub struct RefusedPublisher {
    /// Which worker.
    pub worker: Worker,
    /// Why.
    pub error: Error,
}

pub(super) fn system(message: &str) -> Error {
    Error::new(Kind::System, message, "check the limits of threads and open files of this user")
}
