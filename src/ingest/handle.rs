//! Starting an ingest thread, and ending it.

use std::fmt;
use std::sync::Arc;
use std::thread::JoinHandle;

use crossbeam::channel::{self, Receiver};

use super::dump::{DumpPart, FirstLoad, LoadAnswer, Loading, Sending};
use super::inbox::{Command, Inbox, RefusedPublisher, ResetScope, system};
use super::republish::Republisher;
use super::shard::Shard;
use super::{IngestConfig, ShardPlan};
use crate::error::{Error, Kind, Result};
use crate::fleet::Fleet;
use crate::ids::Worker;

/// A running ingest thread. Dropping it ends the thread too.
pub struct IngestHandle {
    inbox: Arc<Inbox>,
    thread: Option<JoinHandle<()>>,
    refused: Vec<RefusedPublisher>,
}

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
    let thread = std::thread::Builder::new()
        .name(format!("ingest-{}", plan.shard))
        .spawn(move || {
            pin(config.core);
            match Shard::open(plan, config, fleet) {
                Err(error) => drop(started.send(Err(error))),
                Ok((mut shard, refused)) => {
                    prepare(&mut shard);
                    if started.send(Ok((shard.inbox(), refused))).is_ok() {
                        shard.run();
                    }
                }
            }
        })
        .map_err(|error| system("cannot start an ingest thread").caused_by(error))?;
    let (inbox, refused) = start.recv().map_err(|_| system("an ingest thread ended before it began"))??;
    Ok(IngestHandle { inbox, thread: Some(thread), refused })
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

    /// Whether the thread still runs; it ends by itself only by a fault, which it has logged.
    #[must_use]
    pub fn is_running(&self) -> bool {
        self.thread.as_ref().is_some_and(|thread| !thread.is_finished())
    }

    /// Asks for everything that a worker holds, while it is served. The parts come as they are taken: whoever
    /// asked takes them soon, since the worker's own events wait meanwhile.
    ///
    /// # Errors
    /// [`Kind::Overloaded`] where too many commands wait. What else is in the way is the dump's last part.
    pub fn dump(&self, worker: Worker) -> Result<Receiver<DumpPart>> {
        let (sending, parts) = Sending::new();
        self.command(Command::Dump(worker, Box::new(sending)))?;
        Ok(parts)
    }

    /// Puts a dump into a worker, in place of everything it holds. The dump of a busy worker is best asked for once
    /// the first answer is there: one that was taken before may be behind what was applied meanwhile.
    ///
    /// # Errors
    /// [`Kind::Overloaded`] where too many commands wait.
    pub fn load(&self, worker: Worker, parts: Receiver<DumpPart>) -> Result<Receiver<LoadAnswer>> {
        let (loading, answers) = Loading::new(parts);
        self.command(Command::Load(worker, Box::new(loading)))?;
        Ok(answers)
    }

    /// Empties a worker, or every worker of the shard, in the thread's next turn; a dump or load of it is broken off.
    ///
    /// # Errors
    /// [`Kind::Overloaded`] where too many commands wait.
    pub fn reset(&self, worker: Option<Worker>, scope: ResetScope) -> Result<()> {
        self.command(Command::Reset(worker, scope))
    }

    pub(super) fn command(&self, command: Command) -> Result<()> {
        self.inbox.commands.push(command).map_err(|_| {
            Error::new(Kind::Overloaded, "too many commands wait for an ingest thread", "ask again later")
        })?;
        self.inbox.waker.wake().map_err(|error| system("cannot wake an ingest thread").caused_by(error))
    }

    /// Ends the thread and waits for it. Its writers go with it, and with them what the index holds; the
    /// workers' trust says `disconnected`.
    ///
    /// # Errors
    /// [`Kind::Internal`] where the thread had panicked.
    pub fn stop(mut self) -> Result<()> {
        self.end()
    }

    fn end(&mut self) -> Result<()> {
        let Some(thread) = self.thread.take() else { return Ok(()) };
        // The newest command: where the queue is full it takes the oldest one's place.
        self.inbox.commands.force_push(Command::Stop);
        self.inbox.waker.wake().map_err(|error| system("cannot wake an ingest thread").caused_by(error))?;
        thread
            .join()
            .map_err(|_| Error::new(Kind::Internal, "an ingest thread panicked", "report it with the log around it"))
    }
}

impl Drop for IngestHandle {
    fn drop(&mut self) {
        if let Err(error) = self.end() {
            tracing::error!(%error, "ingest thread did not end cleanly");
        }
    }
}
