//! A daemon takes over from the one that serves the same socket: `kvrouted serve --take-over SOCKET`.
//!
//! The new daemon connects to the old one's socket `SOCKET.next`, and asks. The old one answers on a thread of its own
//! ([`give`]), so it serves gateways meanwhile. Messages are small ([`messages`]); descriptors go beside them, of
//! listening sockets, of locks, and of memory files with everything long ([`channel`]).
//!
//! | step | the new daemon says | the old daemon answers | who may decide | the new one dies | the old one dies |
//! |---|---|---|---|---|---|
//! | greeting | `Hello` | `Welcome`: sockets, locks, what it has learnt, an image | the old one | the old one goes on | the new one ends |
//! | open | `Workers`, `Dump`, again and again | `Workers`, `Dumped` | the old one | the old one goes on | the new one ends |
//! | paused | `Switch` | stands still; `Image`: the bookings | neither | the old one goes on | the new one decides |
//! | paused | `Behind` | goes on; `Resumed` | the old one | the old one goes on | the new one ends |
//! | given | `Taken` | `Yours` | the new one | the old one goes on | the new one decides |
//! | over | `Serving`, then it decides | ends | the new one | as a crash | nothing |
//!
//! So never do both decide, and one of them goes on whichever dies:
//!
//! * The new daemon decides once it has said `Serving`. It says so only after `Yours`, or after the old one has died in a
//!   pause.
//! * The old daemon decides again after a pause only if it has not said `Yours`, or if the new one has died before it said
//!   `Serving`.
//! * A daemon that goes on says so before it closes the connection (`Resumed`, `Refused`). A connection that ends without
//!   this has ended with its process: the kernel delivers first what was sent, and closes only when all threads are gone.
//!
//! Each worker's blocks pass in three steps. The new daemon's subscription is connected first; its load makes the worker's
//! events wait; then the old daemon dumps the worker at a batch. So the events that waited begin at that batch or before
//! it, or the first one behind it shows a gap, and the worker is taken once more. At the end the load compares number and
//! digest of the blocks with those of the old daemon at that batch. The switch waits until every worker has applied what
//! it has applied at the old daemon.

mod channel;
mod give;
mod messages;
mod take;
mod workers;

pub(super) use take::{Takeover, Welcomed};

use std::sync::Arc;

use tokio::sync::oneshot;

use super::ingest_threads::IngestThreads;
use super::kept_bookings::SharedWriter;
use super::routers_thread;
use super::statistics::Statistics;
use crate::config::Config;
use crate::error::{Error, Kind, Result};
use crate::requests::RequestTables;
use crate::serve::{BoundSocket, ListeningSockets, Turns};
use give::{Given, GivingThread};
use take::TakenParts;

/// The version of the messages. Daemons of another one take nothing over.
const FORMAT: u32 = 1;

/// The thread that hands over to a later daemon, and the conversation with an earlier one.
pub(super) struct Takeovers {
    turns: Turns,
    giving: GivingThread,
    /// Gets the error with which the takeover from the earlier daemon ended; `None` = there is none.
    failure: Option<oneshot::Receiver<Error>>,
}

impl Takeovers {
    /// Starts the threads.
    ///
    /// # Errors
    /// `System` if one cannot be started.
    pub(super) fn start(
        config: &Config,
        (next, sockets): (BoundSocket, ListeningSockets),
        taking: Option<Takeover>,
        (statistics, tables): (&Statistics, &RequestTables),
        (ingest_threads, writer): (&Arc<IngestThreads>, &SharedWriter),
    ) -> Result<Self> {
        let turns = sockets.turns().clone();
        let given = Given {
            spaces: routers_thread::fingerprint(&config.spaces).to_string(),
            sockets: sockets.into_shared(),
            writer: Arc::clone(writer),
            tables: tables.clone(),
            ingest_threads: Arc::downgrade(ingest_threads),
            keep_ms: config.snapshot.keep_s * 1000,
            turns: turns.clone(),
            counters: Arc::clone(&statistics.daemon),
        };
        let parts = || TakenParts {
            config: config.clone(),
            tables: tables.clone(),
            ingest_threads: Arc::downgrade(ingest_threads),
            writer: Arc::clone(writer),
            stats: Arc::clone(&statistics.snapshots),
            turns: turns.clone(),
        };
        let failure = taking.map(|taking| taking.start(parts())).transpose()?;
        let giving = GivingThread::start(next, given)?;
        Ok(Self { turns, giving, failure })
    }

    /// The turns of this process.
    pub(super) const fn turns(&self) -> &Turns {
        &self.turns
    }

    /// Waits for the error with which the takeover from an earlier daemon ends; for ever if there is none.
    pub(super) async fn fail(&mut self) -> Error {
        if let Some(failure) = self.failure.take()
            && let Ok(error) = failure.await
        {
            return error;
        }
        std::future::pending().await
    }

    /// Leaves the turn to an earlier daemon that still has it, and ends the thread that hands over.
    ///
    /// # Errors
    /// `Internal` if it panicked.
    pub(super) fn stop(self) -> Result<()> {
        self.turns.withdraw();
        self.giving.stop()
    }
}

/// A takeover that ends with the other daemon as it was.
fn failed(what: impl Into<String>) -> Error {
    Error::new(Kind::System, what, "the daemon before this one goes on; see its log, and try again")
}
