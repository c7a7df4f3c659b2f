//! The daemon's threads: which of them run, and what a panic of each costs.
//!
//! | thread | after its panic |
//! |---|---|
//! | ingest | its shard's index is rebuilt (`ingest::rebuild`); the daemon goes on |
//! | control | the daemon drains as on SIGTERM, and exits with the code of an internal error (70) |
//! | serving threads, the predictor, snapshots, kept bookings, the journal's writer, loads, the other routers, the ports, memory, the watchdog | the same, within half a second |
//! | a task that reads a file of workers or asks an engine | the daemon repeats the reading or the request |
//!
//! A drain takes no new connections, answers what has been read, and writes the last snapshots. A panic must therefore
//! never leave the control thread: unwinding beyond it would end the process without a drain.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use super::endable_thread::EndableThread;
use super::ingest_threads::IngestThreads;
use crate::ingest::LoadListener;
use crate::journal::WriterThread;
use crate::limits::THREADS_WATCH_EVERY_MS;
use crate::sandbox::RefusalLog;
use crate::serve::{CoreHandle, MetricsThread, PortThread};
use crate::snapshot::Keeper;

/// The threads that write down what was decided.
pub(super) struct Writers {
    pub(super) journal: WriterThread,
    /// `None` = nothing is traced.
    pub(super) traces: Option<EndableThread>,
}

/// The threads beside the serving threads and the ingest threads.
pub(super) struct OtherThreads {
    pub(super) predictor: Option<EndableThread>,
    pub(super) keeper: Option<Keeper>,
    pub(super) bookings: Option<EndableThread>,
    pub(super) writers: Writers,
    /// The fleet reconciler tells it which workers publish loads.
    pub(super) listener: Arc<LoadListener>,
    pub(super) routers: Option<EndableThread>,
    /// The HTTP port's and the remote port's, where there are such ports.
    pub(super) ports: Vec<PortThread>,
    pub(super) metrics: MetricsThread,
    pub(super) memory: EndableThread,
    pub(super) watchdog: EndableThread,
}

impl OtherThreads {
    /// The name of a thread that has ended although nothing asked it to.
    fn ended(&self) -> Option<&'static str> {
        let optional = [&self.predictor, &self.bookings, &self.routers, &self.writers.traces].map(Option::as_ref);
        let endable = optional.into_iter().chain([Some(&self.memory), Some(&self.watchdog)]);
        if let Some(ended) = endable.flatten().find(|thread| !thread.is_running()) {
            return Some(ended.subject());
        }
        if !self.keeper.as_ref().is_none_or(Keeper::is_running) {
            return Some("the snapshot thread");
        }
        if !self.listener.is_running() {
            return Some("the thread of the engines' loads");
        }
        if let Some(ended) = self.ports.iter().find(|port| !port.is_running()) {
            return Some(ended.port());
        }
        if !self.metrics.is_running() {
            return Some("the metrics page");
        }
        (!self.writers.journal.is_running()).then_some("the journal's writer")
    }
}

/// Logs what the sandbox refuses. Returns when a thread has ended although nothing asked it to. Without it the daemon's answers would get ever older.
pub(super) async fn watch(cores: &[CoreHandle], ingest_threads: &IngestThreads, others: &OtherThreads) -> &'static str {
    let mut every = tokio::time::interval(Duration::from_millis(THREADS_WATCH_EVERY_MS));
    let mut refusals = RefusalLog::default();
    loop {
        every.tick().await;
        refusals.note();
        if !cores.iter().all(CoreHandle::is_alive) {
            return "a serving thread";
        }
        if !ingest_threads.are_running() {
            return "an ingest thread";
        }
        if let Some(ended) = others.ended() {
            return ended;
        }
    }
}

/// The control thread's future; a panic becomes an error with the thread's name. It is not polled again then.
pub(super) async fn catch_panic<T>(future: impl Future<Output = Result<T, &'static str>>) -> Result<T, &'static str> {
    let mut future = pin!(future);
    std::future::poll_fn(|context| {
        // The future and the drain share only cells and channels, each of them whole after every call.
        match catch_unwind(AssertUnwindSafe(|| future.as_mut().poll(context))) {
            Ok(polled) => polled,
            Err(_) => std::task::Poll::Ready(Err("the control thread")),
        }
    })
    .await
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_panic_becomes_an_error_and_goes_no_further() {
        assert_eq!(catch_panic(async { Ok(7) }).await, Ok(7));
        let late = async {
            tokio::task::yield_now().await;
            panic!("on purpose");
        };
        assert_eq!(catch_panic::<u8>(late).await, Err("the control thread"));
    }
}
