//! Starting an ingest thread, and ending it.

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
use super::{IngestConfig, ShardPlan, system};
use crate::error::{Error, Kind, Result};
use crate::fleet::Fleet;
use crate::ids::Worker;

/// A running ingest thread. Dropping it ends the thread too.
pub struct IngestHandle {
    pub(super) inbox: Arc<Inbox>,
    thread: Arc<Running>,
    refused: Vec<RefusedPublisher>,
}

/// The thread that has the shard now: one that panics puts the one that goes on in its place.
type Running = Mutex<Option<JoinHandle<()>>>;

impl fmt::Debug for IngestHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("IngestHandle").field("running", &self.is_running()).field("refused", &self.refused).finish()
    }
}

/// Starts the thread of a shard and waits until its publishers are being connected.
///
/// The worker's states in `fleet` follow its publisher: ready on a handshake, down when it is gone, or is not
/// reached, for long.
///
/// # Errors
/// [`Kind::System`] where the thread or its event loop cannot be made. A publisher that cannot be opened is no
/// error: see [`IngestHandle::refused`].
pub fn spawn(plan: ShardPlan, config: IngestConfig, fleet: Arc<Fleet>) -> Result<IngestHandle> {
    spawn_loading(plan, config, fleet, Vec::new())
}

/// As [`spawn`], for a shard of one publisher, what is done to whose worker is said once more.
///
/// # Errors
/// As [`spawn`].
pub fn spawn_republishing(
    plan: ShardPlan,
    config: IngestConfig,
    fleet: Arc<Fleet>,
    republisher: Republisher,
) -> Result<IngestHandle> {
    start(plan, config, fleet, |shard| shard.republish(republisher))
}

/// As [`spawn`], with loads that come before the first message: until they are over, however they end, the workers'
/// messages wait in their sockets. Each gets its parts soon: the others wait behind it.
///
/// # Errors
/// As [`spawn`].
pub fn spawn_loading(
    plan: ShardPlan,
    config: IngestConfig,
    fleet: Arc<Fleet>,
    loads: Vec<FirstLoad>,
) -> Result<IngestHandle> {
    start(plan, config, fleet, |shard| shard.load_first(loads))
}

/// Starts the thread; `prepare` sees the shard before the first message.
fn start(
    plan: ShardPlan,
    config: IngestConfig,
    fleet: Arc<Fleet>,
    prepare: impl FnOnce(&mut Shard) + Send + 'static,
) -> Result<IngestHandle> {
    let (started, start) = channel::bounded(1);
    let running: Arc<Running> = Arc::default();
    let told = Arc::clone(&running);
    // Held until the handle is there: a thread that panics at once must not be put in the place of the next.
    let mut held = running.lock();
    let thread = std::thread::Builder::new()
        .name(format!("ingest-{}", plan.shard))
        .spawn(move || {
            pin(config.core);
            match Shard::open(plan, config, fleet) {
                Err(error) => drop(started.send(Err(error))),
                Ok((mut shard, refused)) => {
                    prepare(&mut shard);
                    if started.send(Ok((shard.inbox(), refused))).is_ok() {
                        live(shard, &told, Shard::run);
                    }
                }
            }
        })
        .map_err(|error| system("cannot start an ingest thread").caused_by(error))?;
    *held = Some(thread);
    drop(held);
    let (inbox, refused) = start.recv().map_err(|_| system("an ingest thread ended before it began"))??;
    Ok(IngestHandle { inbox, thread: running, refused })
}

/// The life of an ingest thread. One that panics discards the shard's index and leaves the shard to another thread, which
/// opens its sockets again. What cannot be rebuilt ends with the thread, and whoever watches the threads sees that.
fn live(mut shard: Shard, running: &Arc<Running>, does: fn(&mut Shard)) {
    let Err(panic) = catch_unwind(AssertUnwindSafe(|| does(&mut shard))) else { return };
    let id = shard.id();
    tracing::error!(shard = %id, panic = message(&*panic), "an ingest thread panicked; its workers are not believed any more");
    let discarded = catch_unwind(AssertUnwindSafe(|| {
        let can_be_rebuilt = shard.can_be_rebuilt();
        shard.discard();
        can_be_rebuilt
    }));
    if discarded.as_ref().is_ok_and(|can_be_rebuilt| *can_be_rebuilt) {
        let next = Arc::clone(running);
        let goes_on = move || {
            pin(shard.core());
            live(shard, &next, |shard| {
                shard.reopen();
                shard.run();
            });
        };
        let mut held = running.lock();
        match std::thread::Builder::new().name(format!("ingest-{id}")).spawn(goes_on) {
            Ok(thread) => *held = Some(thread),
            Err(error) => tracing::error!(shard = %id, %error, "no other thread can be started; the shard ends"),
        }
        return;
    }
    if discarded.is_err() {
        // To let go of what could not be taken down might panic again, and while this one unwinds that would abort.
        std::mem::forget(shard);
    }
    resume_unwind(panic);
}

/// What a panic says.
fn message(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("without a word")
}

fn pin(core: Option<usize>) {
    if let Some(id) = core
        && !core_affinity::set_for_current(core_affinity::CoreId { id })
    {
        tracing::warn!(core = id, "cannot pin the ingest thread; it runs on any core");
    }
}

impl IngestHandle {
    /// The workers whose publishers could not be opened, and why. Their trust says `no_events`.
    #[must_use]
    pub fn refused(&self) -> &[RefusedPublisher] {
        &self.refused
    }

    /// Whether the thread still runs, or another in its place; the last ends by itself only by a fault that cannot be
    /// mended, which it has logged.
    #[must_use]
    pub fn is_running(&self) -> bool {
        self.thread.lock().as_ref().is_some_and(|thread| !thread.is_finished())
    }

    /// Ends the thread and waits for it. Its writers go with it, and with them what the index holds; the
    /// workers' trust says `disconnected`.
    ///
    /// # Errors
    /// [`Kind::Internal`] where the thread had panicked.
    pub fn stop(self) -> Result<()> {
        self.end()
    }

    fn end(&self) -> Result<()> {
        if self.thread.lock().is_none() {
            return Ok(());
        }
        // The newest command: where the queue is full it takes the oldest one's place.
        self.inbox.commands.force_push(Command::Stop);
        self.inbox.waker.wake().map_err(|error| system("cannot wake an ingest thread").caused_by(error))?;
        let mut panicked = false;
        loop {
            // Not held while the thread ends: it may have to put the next in its place.
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
            tracing::error!(%error, "ingest thread did not end cleanly");
        }
    }
}

/// A worker whose publisher could not be opened. The others go on.
#[derive(Debug)]
pub struct RefusedPublisher {
    /// Which worker.
    pub worker: Worker,
    /// Why.
    pub error: Error,
}
