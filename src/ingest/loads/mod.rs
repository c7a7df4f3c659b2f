//! What engines say of their load, on sockets of its own: gauges, of which only the newest reading counts.
//!
//! One thread for all engines that publish one ([`LoadListener`]), apart from the shards: a reading that comes late
//! or is lost costs nothing but a second, and no event of a cache must wait for it. What is read goes where a
//! gateway's report goes ([`Loads::report_load`]).

mod source;
mod thread;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;

use mio::Waker;
use parking_lot::Mutex;

use super::inbox::system;
use crate::endpoint::Endpoint;
use crate::error::{Error, Kind, Result};
use crate::fleet::SchemeCell;
use crate::ids::{Worker, WorkerIndex};
use crate::load::Loads;
use crate::metrics::{CounterSet, LoadReportCounter};
use thread::Listening;

/// A worker that publishes how busy it is.
#[derive(Clone, Debug)]
pub struct LoadSource {
    /// Its place in the fleet table.
    pub index: WorkerIndex,
    /// Who it is.
    pub worker: Worker,
    /// ZeroMQ endpoint of the PUB socket, as we connect to it.
    pub endpoint: Endpoint,
    /// Its space's scheme: tokens become blocks by it.
    pub scheme: Arc<SchemeCell>,
}

/// What the thread is told, newest only.
#[derive(Debug)]
struct Wanted {
    sources: Mutex<Option<Vec<LoadSource>>>,
    ending: AtomicBool,
    waker: Waker,
}

/// The running thread. Dropping it ends the thread too.
#[derive(Debug)]
pub struct LoadListener {
    wanted: Arc<Wanted>,
    thread: Option<JoinHandle<()>>,
}

impl LoadListener {
    /// Starts to listen to nobody. `now_ns` is the clock of bookings.
    ///
    /// # Errors
    /// [`Kind::System`] where the thread or its event loop cannot be made.
    pub fn start(
        loads: Arc<Loads>,
        counters: Arc<CounterSet<LoadReportCounter>>,
        now_ns: impl Fn() -> u64 + Send + 'static,
    ) -> Result<Self> {
        let (listening, waker) = Listening::new(loads, counters, now_ns)
            .map_err(|error| system("cannot make an event loop").caused_by(error))?;
        let wanted = Arc::new(Wanted { sources: Mutex::new(None), ending: AtomicBool::new(false), waker });
        let told = Arc::clone(&wanted);
        let thread = std::thread::Builder::new()
            .name("engine-loads".into())
            .spawn(move || listening.run(&told))
            .map_err(|error| system("cannot start the thread of the engines' loads").caused_by(error))?;
        Ok(Self { wanted, thread: Some(thread) })
    }

    /// Listens to these and to nobody else; who was listened to before and is named again is not disturbed.
    ///
    /// # Errors
    /// [`Kind::System`] if the thread cannot be woken.
    pub fn follow(&self, sources: Vec<LoadSource>) -> Result<()> {
        *self.wanted.sources.lock() = Some(sources);
        self.wanted
            .waker
            .wake()
            .map_err(|error| system("cannot wake the thread of the engines' loads").caused_by(error))
    }

    /// Whether it runs; it ends by itself only by a fault, which it has logged.
    #[must_use]
    pub fn is_running(&self) -> bool {
        self.thread.as_ref().is_some_and(|thread| !thread.is_finished())
    }

    /// Ends the thread and waits for it.
    ///
    /// # Errors
    /// [`Kind::Internal`] where the thread had panicked.
    pub fn stop(mut self) -> Result<()> {
        self.end()
    }

    fn end(&mut self) -> Result<()> {
        let Some(thread) = self.thread.take() else { return Ok(()) };
        // Release: pairs with the Acquire of the thread's loop.
        self.wanted.ending.store(true, Ordering::Release);
        self.wanted
            .waker
            .wake()
            .map_err(|error| system("cannot wake the thread of the engines' loads").caused_by(error))?;
        let panicked =
            |_| Error::new(Kind::Internal, "the thread of the engines' loads panicked", "report it with the log");
        thread.join().map_err(panicked)
    }
}

impl Drop for LoadListener {
    fn drop(&mut self) {
        if let Err(error) = self.end() {
            tracing::error!(%error, "the thread of the engines' loads did not end cleanly");
        }
    }
}

#[cfg(test)]
mod tests;
