//! Starts and ends an ingest thread. `shard::commands` has the commands that a running thread handles.

use std::any::Any;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;
use std::thread::JoinHandle;

use crossbeam::channel;
use parking_lot::Mutex;

use super::dump::FirstLoad;
use super::republish::Republisher;
use super::shard::{Command, Inbox, Shard};
use super::{EventMemory, IngestConfig, ShardPlan, system};
use crate::error::{Error, Kind, Result};
use crate::fleet::Fleet;
use crate::ids::Worker;
use crate::sandbox::{self, ThreadKind};
use crate::watchdog::ThreadMark;

/// A running ingest thread. Dropping the handle ends the thread too.
pub struct IngestHandle {
    pub(super) inbox: Arc<Inbox>,
    thread: Arc<Running>,
    refused: Vec<RefusedPublisher>,
}

/// The thread that has the shard now. A thread that panics puts its successor in its place.
type Running = Mutex<Option<JoinHandle<()>>>;

impl fmt::Debug for IngestHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("IngestHandle").field("running", &self.is_running()).field("refused", &self.refused).finish()
    }
}

/// Starts the thread of a shard and waits until its publishers are being connected.
///
/// The worker's state in `fleet` follows its publisher: ready on a handshake, down when the publisher has been
/// disconnected, or not reached, for [`IngestConfig::down_after_ms`].
///
/// # Errors
/// [`Kind::System`] if the thread or its event loop cannot be made. A publisher that cannot be opened is not an
/// error: see [`IngestHandle::refused`].
pub fn spawn(plan: ShardPlan, config: IngestConfig, fleet: Arc<Fleet>) -> Result<IngestHandle> {
    start(plan, config, fleet, |_| {})
}

/// As [`spawn`], for the shard of a relay: `republisher` publishes again every change of its only worker.
///
/// # Errors
/// As [`spawn`].
pub(crate) fn spawn_republishing(
    plan: ShardPlan,
    config: IngestConfig,
    fleet: Arc<Fleet>,
    republisher: Republisher,
) -> Result<IngestHandle> {
    start(plan, config, fleet, |shard| shard.republish(republisher))
}

/// As [`spawn`], with loads that come before the first message, on a thread with this mark and memory. Until the loads
/// have ended, or failed, all messages wait in their sockets. Send the parts of each load soon: the other loads wait behind it.
///
/// # Errors
/// As [`spawn`].
pub(crate) fn spawn_loading(
    plan: ShardPlan,
    config: IngestConfig,
    fleet: Arc<Fleet>,
    loads: Vec<FirstLoad>,
    (mark, memory): (Arc<ThreadMark>, EventMemory),
) -> Result<IngestHandle> {
    start(plan, config, fleet, |shard| {
        shard.set_surroundings(mark, memory);
        shard.load_first(loads);
    })
}

/// Starts the thread. `prepare` runs before the first message.
fn start(
    plan: ShardPlan,
    config: IngestConfig,
    fleet: Arc<Fleet>,
    prepare: impl FnOnce(&mut Shard) + Send + 'static,
) -> Result<IngestHandle> {
    let (started, start) = channel::bounded(1);
    let running: Arc<Running> = Arc::default();
    let of_thread = Arc::clone(&running);
    // Locked until the handle is stored: a thread that panics at once must not overwrite its successor.
    let mut handle = running.lock();
    let thread = std::thread::Builder::new()
        .name(format!("ingest-{}", plan.shard))
        .spawn(move || {
            pin(config.core);
            sandbox::enter(ThreadKind::Ingest);
            match Shard::open(plan, config, fleet) {
                Err(error) => drop(started.send(Err(error))),
                Ok((mut shard, refused)) => {
                    prepare(&mut shard);
                    if started.send(Ok((shard.inbox(), refused))).is_ok() {
                        run_shard(shard, &of_thread, Shard::run);
                    }
                }
            }
        })
        .map_err(|error| system("cannot start an ingest thread").caused_by(error))?;
    *handle = Some(thread);
    drop(handle);
    let (inbox, refused) = start.recv().map_err(|_| system("an ingest thread ended before it began"))??;
    Ok(IngestHandle { inbox, thread: running, refused })
}

/// Runs a shard on its thread. After a panic the thread discards the shard's index and leaves the shard to another
/// thread, which opens its sockets again. A shard that cannot be rebuilt ends with its thread; the daemon watches that.
fn run_shard(mut shard: Shard, running: &Arc<Running>, run: fn(&mut Shard)) {
    let Err(panic) = catch_unwind(AssertUnwindSafe(|| run(&mut shard))) else { return };
    let id = shard.id();
    tracing::error!(shard = %id, panic = message(&*panic), "an ingest thread panicked; the trust of its workers falls to none");
    let discarded = catch_unwind(AssertUnwindSafe(|| {
        let can_be_rebuilt = shard.can_be_rebuilt();
        shard.discard();
        can_be_rebuilt
    }));
    if discarded.as_ref().is_ok_and(|can_be_rebuilt| *can_be_rebuilt) {
        let next = Arc::clone(running);
        let go_on = move || {
            pin(shard.core());
            run_shard(shard, &next, |shard| {
                shard.reopen();
                shard.run();
            });
        };
        let mut handle = running.lock();
        match std::thread::Builder::new().name(format!("ingest-{id}")).spawn(go_on) {
            Ok(thread) => *handle = Some(thread),
            Err(error) => tracing::error!(shard = %id, %error, "no other thread can be started; the shard ends"),
        }
        return;
    }
    if discarded.is_err() {
        // Dropping a shard that could not be taken down might panic again. During this unwind that would abort the
        // process.
        std::mem::forget(shard);
    }
    resume_unwind(panic);
}

/// The message of a panic.
fn message(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("no message")
}

fn pin(core: Option<usize>) {
    if let Some(id) = core
        && !core_affinity::set_for_current(core_affinity::CoreId { id })
    {
        tracing::warn!(core = id, "the ingest thread cannot be pinned to its core; it runs on any core");
    }
}

impl IngestHandle {
    /// The workers whose publishers could not be opened. Their trust says `no_events`.
    #[must_use]
    pub fn refused(&self) -> &[RefusedPublisher] {
        &self.refused
    }

    /// Whether the thread or its successor still runs. The last one ends by itself only after a fault that cannot be
    /// repaired, which it has logged.
    #[must_use]
    pub fn is_running(&self) -> bool {
        self.thread.lock().as_ref().is_some_and(|thread| !thread.is_finished())
    }

    /// Ends the thread and waits for it. Its index writers and all blocks go with it. The workers' trust then says
    /// `disconnected`.
    ///
    /// # Errors
    /// [`Kind::Internal`] if the thread had panicked.
    pub fn stop(self) -> Result<()> {
        self.end()
    }

    fn end(&self) -> Result<()> {
        if self.thread.lock().is_none() {
            return Ok(());
        }
        // If the queue is full, this command replaces the oldest one.
        self.inbox.commands.force_push(Command::Stop);
        self.inbox.waker.wake().map_err(|error| system("cannot wake an ingest thread").caused_by(error))?;
        let mut panicked = false;
        loop {
            // The lock is free while the thread ends: the thread may have to store its successor.
            let Some(thread) = self.thread.lock().take() else { break };
            panicked |= thread.join().is_err();
        }
        let error = || Error::new(Kind::Internal, "an ingest thread panicked", "report it with the log around it");
        if panicked { Err(error()) } else { Ok(()) }
    }
}

impl Drop for IngestHandle {
    fn drop(&mut self) {
        if let Err(error) = self.end() {
            tracing::error!(%error, "an ingest thread did not end cleanly");
        }
    }
}

/// A worker whose publisher could not be opened. The other workers are not affected.
#[derive(Debug)]
pub struct RefusedPublisher {
    /// The worker.
    pub worker: Worker,
    /// Why its publisher cannot be opened.
    pub error: Error,
}
