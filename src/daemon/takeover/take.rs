//! The new daemon's side: it begins with what the old one welcomes it with, then takes each worker's blocks, and at last
//! the bookings.

use std::collections::BTreeMap;
use std::fs::File;
use std::os::fd::OwnedFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::{Arc, Weak};
use std::thread;
use std::time::{Duration, Instant};

use arc_swap::Guard;
use crossbeam::channel::{Receiver, bounded};
use tokio::sync::oneshot;

use super::channel::{Channel, Silence, after_ms};
use super::messages::{Answer, Request};
use super::workers::{self, Position, read_bytes};
use super::{FORMAT, failed};
use crate::config::Config;
use crate::daemon::ingest_threads::IngestThreads;
use crate::daemon::kept_bookings::{KeptImage, SharedWriter};
use crate::daemon::{service_manager, snapshots};
use crate::error::{Error, Kind, Result};
use crate::fleet::{FleetTable, WorkerRecord, WorkerState};
use crate::ids::{EventSeq, Worker};
use crate::ingest::{AbortReason, DumpPart, LoadAnswer};
use crate::limits::{
    DUMP_PARTS_MAX, LAWS_FILE_BYTES_MAX, TAKEOVER_ANSWER_MS_MAX, TAKEOVER_BEHIND_MS_MAX, TAKEOVER_CATCH_UP_MS_MAX,
    TAKEOVER_CONNECT_MS_MAX, TAKEOVER_DUMP_MS_MAX, TAKEOVER_DUMP_PAUSE_MS_MAX, TAKEOVER_DUMP_TRIES,
    TAKEOVER_LOOK_EVERY_MS, TAKEOVER_PAUSE_MS_MAX, TAKEOVER_PROOF_MS_MAX, TAKEOVER_RETAKES_MAX,
    TAKEOVER_SERVING_MS_MAX, TAKEOVER_STEP_MS_MAX, TAKEOVER_SUBSCRIBED_MS, TAKEOVER_SWITCH_TRIES,
};
use crate::load::LearntLaws;
use crate::owned_directory;
use crate::requests::RequestTables;
use crate::sandbox::{self, ThreadKind};
use crate::serve::{NamedSocket, Turns, next_path};
use crate::snapshot::{BookingsImage, SnapshotStats, decode_laws, feed_dump, read_bookings};

/// A conversation with the old daemon, which still decides.
#[derive(Debug)]
pub(in crate::daemon) struct Takeover {
    channel: Channel,
    began: Instant,
}

/// What the old daemon welcomed this one with.
pub(in crate::daemon) struct Welcomed {
    pub(in crate::daemon) sockets: Vec<NamedSocket>,
    /// The files that the service manager keeps for both.
    pub(in crate::daemon) memory: Option<[File; 2]>,
    /// An image of its bookings, for its identity and the age of the oldest booking.
    pub(in crate::daemon) image: BookingsImage,
    pub(in crate::daemon) laws: LearntLaws,
}

/// The parts of this daemon that get what the old one has.
pub(in crate::daemon) struct TakenParts {
    pub(in crate::daemon) config: Config,
    pub(in crate::daemon) tables: RequestTables,
    pub(in crate::daemon) ingest_threads: Weak<IngestThreads>,
    pub(in crate::daemon) writer: SharedWriter,
    pub(in crate::daemon) stats: Arc<SnapshotStats>,
    pub(in crate::daemon) turns: Turns,
}

/// How the taking of one worker ended.
enum Taken {
    /// It has the old daemon's blocks, and its events go on behind them.
    Live,
    /// Its engine cannot be reached: it is as after a restart.
    Unproven,
    /// The old daemon has nothing to pass, or it could not be loaded, with the reason. The worker has what comes from now on.
    Nothing(String),
}

impl Takeover {
    /// Asks the daemon that serves `socket` whether this one may take over, and takes its sockets and locks. Call it before
    /// a socket is bound or a folder is locked.
    ///
    /// # Errors
    /// `Config` if no daemon can be taken over; the reason of its refusal.
    pub(in crate::daemon) fn begin(socket: &Path, config: &Config, spaces: String) -> Result<(Self, Welcomed)> {
        let (own, other) = (std::path::absolute(&config.serve.socket), std::path::absolute(socket));
        if own.ok() != other.ok() {
            let what =
                format!("--take-over names {}, and serve.socket {}", socket.display(), config.serve.socket.display());
            return Err(Error::new(Kind::Config, what, "take over from the daemon that serves the same socket"));
        }
        let this = Self { channel: Channel::connect(&next_path(socket))?, began: Instant::now() };
        let (answer, descriptors) = this.ask(&Request::Hello { format: FORMAT, spaces })?;
        let Answer::Welcome { sockets, locks, memory } = answer else { return Err(out_of_order()) };
        let expected = sockets.len().saturating_add(locks).saturating_add(memory).saturating_add(2);
        if descriptors.len() != expected {
            return Err(failed("the other daemon sent other descriptors than it names"));
        }
        let mut descriptors = descriptors.into_iter();
        let sockets = sockets.into_iter().zip(descriptors.by_ref()).collect();
        owned_directory::receive_locks(descriptors.by_ref().take(locks).map(File::from).collect());
        let memory: Vec<File> = descriptors.by_ref().take(memory).map(File::from).collect();
        let (Some(image), Some(laws)) = (descriptors.next(), descriptors.next()) else { return Err(out_of_order()) };
        let laws = decode_laws(&read_bytes(File::from(laws), LAWS_FILE_BYTES_MAX)?);
        let laws = laws.map_err(|fault| {
            failed(format!("what the other daemon learnt cannot be used: {}", fault.refusal.name()))
        })?;
        Ok((this, Welcomed { sockets, memory: memory.try_into().ok(), image: read_image(image)?, laws }))
    }

    /// Starts the thread that takes the rest. The receiver gets the error with which the takeover ended; if it has
    /// succeeded, it gets nothing.
    ///
    /// # Errors
    /// `System` if the thread cannot be started.
    pub(in crate::daemon) fn start(self, parts: TakenParts) -> Result<oneshot::Receiver<Error>> {
        let (fail, failure) = oneshot::channel();
        let run = move || {
            sandbox::enter(ThreadKind::Takeover);
            let turns = parts.turns.clone();
            let taken =
                catch_unwind(AssertUnwindSafe(|| Taker { takeover: &self, parts, empty: BTreeMap::new() }.take()));
            let taken = taken.unwrap_or_else(|_| {
                // Half of a takeover is none: this daemon never decides.
                turns.end();
                let what = "the thread that takes over from another daemon panicked";
                Err(Error::new(Kind::Internal, what, "report it with the log around it"))
            });
            if let Err(error) = taken {
                let why = error.to_string();
                // The end of this process says the same.
                drop(self.channel.send(&Request::GiveUp { why }, &[], after_ms(TAKEOVER_LOOK_EVERY_MS)));
                // The control thread has gone if the daemon ends.
                drop(fail.send(error));
            }
        };
        thread::Builder::new().name("takeover".into()).spawn(run).map_err(|cause| {
            let what = "cannot start the thread that takes over";
            Error::new(Kind::System, what, "raise the limit of threads").caused_by(cause)
        })?;
        Ok(failure)
    }

    fn send(&self, request: &Request) -> Result<()> {
        let sent = self.channel.send(request, &[], after_ms(TAKEOVER_ANSWER_MS_MAX));
        sent.map_err(|cause| self.lost().caused_by(cause))
    }

    fn receive(&self, deadline: Instant) -> Result<(Answer, Vec<OwnedFd>)> {
        match self.channel.receive(deadline, None) {
            Ok((Answer::Refused { why, remedy }, _)) => {
                Err(Error::new(Kind::Config, format!("the running daemon does not hand over: {why}"), remedy))
            }
            Ok(answer) => Ok(answer),
            Err(Silence::Late) => Err(failed("the running daemon does not answer in time")),
            Err(Silence::Nonsense(error)) => Err(error),
            Err(Silence::Ended | Silence::Stopped) => Err(self.lost()),
        }
    }

    fn ask(&self, request: &Request) -> Result<(Answer, Vec<OwnedFd>)> {
        self.send(request)?;
        self.receive(after_ms(TAKEOVER_ANSWER_MS_MAX))
    }

    fn lost(&self) -> Error {
        let what = "the running daemon ended before it had handed over its bookings";
        Error::new(Kind::Connection, what, "start the daemon again without --take-over: it restores what a crash keeps")
    }
}

/// The thread's state.
struct Taker<'a> {
    takeover: &'a Takeover,
    parts: TakenParts,
    /// Workers of which nothing was taken, with the last batch of each at the old daemon then. Until the engine sends a
    /// further one, which both hear, they cannot come closer to the old daemon.
    empty: BTreeMap<Worker, Option<EventSeq>>,
}

impl Taker<'_> {
    fn take(mut self) -> Result<()> {
        self.wait_for_workers(&self.their_positions()?);
        self.take_workers()?;
        self.catch_up()?;
        for _ in 0..TAKEOVER_SWITCH_TRIES {
            if self.switch()? {
                return Ok(());
            }
            self.catch_up()?;
        }
        Err(failed("in each pause some worker was not as far as at the running daemon"))
    }

    fn table(&self) -> Arc<FleetTable> {
        Guard::into_inner(self.parts.tables.fleet.load())
    }

    fn their_positions(&self) -> Result<Vec<Position>> {
        let (answer, mut files) = self.takeover.ask(&Request::Workers)?;
        match (answer, files.pop()) {
            (Answer::Workers, Some(file)) => workers::read(File::from(file)),
            _ => Err(out_of_order()),
        }
    }

    /// Waits until the workers that the old daemon knows are here and connected, but not for long: some engines may be gone.
    fn wait_for_workers(&self, theirs: &[Position]) {
        let deadline = after_ms(TAKEOVER_CONNECT_MS_MAX);
        let is_there = |table: &FleetTable, position: &Position| {
            find(table, &position.worker).is_some_and(|record| record.events.is_none() || is_live(record))
        };
        while Instant::now() < deadline && !theirs.iter().all(|position| is_there(&self.table(), position)) {
            pause();
        }
        let table = self.table();
        for unknown in theirs.iter().filter(|position| find(&table, &position.worker).is_none()) {
            let remedy = "name it in the configuration, or add it once more";
            tracing::warn!(worker = %unknown.worker, remedy, "the running daemon has a worker that this one does not know");
        }
        thread::sleep(Duration::from_millis(TAKEOVER_SUBSCRIBED_MS));
    }

    fn take_workers(&mut self) -> Result<()> {
        let (mut live, mut unproven, mut empty) = (0, 0, Vec::new());
        let table = self.table();
        for record in table.workers.iter().filter(|record| record.events.is_some()) {
            match self.take_worker(&table, record)? {
                Taken::Live => live += 1,
                Taken::Unproven => unproven += 1,
                Taken::Nothing(_) => empty.push(record.worker),
            }
        }
        tracing::info!(live, unproven, nothing = empty.len(), "the workers' blocks are taken over");
        if !empty.is_empty() {
            self.note_empty(&empty, &self.their_positions()?);
        }
        Ok(())
    }

    fn note_empty(&mut self, workers: &[Worker], theirs: &[Position]) {
        let noted = theirs.iter().filter(|position| workers.contains(&position.worker));
        self.empty.extend(noted.map(|position| (position.worker, position.last)));
    }

    /// Whether nothing was taken of a worker that is at the old daemon where it was then.
    fn is_empty_at(&self, position: &Position) -> bool {
        self.empty.get(&position.worker) == Some(&position.last)
    }

    fn take_worker(&self, table: &FleetTable, record: &WorkerRecord) -> Result<Taken> {
        let (worker, mut why, mut pause_ms) = (record.worker, String::new(), TAKEOVER_LOOK_EVERY_MS);
        for _ in 0..TAKEOVER_DUMP_TRIES {
            match self.try_worker(table, record)? {
                Ok(Taken::Nothing(why)) => {
                    tracing::info!(%worker, why, "the running daemon passes no blocks of the worker");
                    return Ok(Taken::Nothing(why));
                }
                Ok(taken) => return Ok(taken),
                Err(fault) => why = fault,
            }
            thread::sleep(Duration::from_millis(pause_ms));
            pause_ms = (2 * pause_ms).min(TAKEOVER_DUMP_PAUSE_MS_MAX);
        }
        let remedy = "none needed; it is known again as its engine sends events";
        tracing::warn!(%worker, why, remedy, "the worker's blocks cannot be taken over, so it begins as after a restart");
        Ok(Taken::Nothing(why))
    }

    /// Loads a worker from the old daemon. The inner error says why it may go better next time.
    fn try_worker(&self, table: &FleetTable, record: &WorkerRecord) -> Result<std::result::Result<Taken, String>> {
        let is_live = find(&self.table(), &record.worker).is_some_and(is_live);
        let Some(expected) = snapshots::expected(table, record) else {
            return Ok(Ok(Taken::Nothing("no_events".into())));
        };
        if !is_live && !expected.is_provable {
            return Ok(Ok(Taken::Unproven));
        }
        let (parts, received) = bounded(DUMP_PARTS_MAX);
        let ending = || Error::new(Kind::Draining, "the ingest threads have ended", "take over once more");
        let ingest_threads = self.parts.ingest_threads.upgrade().ok_or_else(ending)?;
        let asked = ingest_threads.load(record.shard, record.worker, received);
        drop(ingest_threads);
        let answers = match asked {
            Err(error) if error.kind() == Kind::Overloaded => return Ok(Err(error.kind().name().to_owned())),
            asked => asked?,
        };
        match answer_of(&answers) {
            // The events wait from now on, so the dump contains all that was applied here.
            Some(LoadAnswer::Held { .. }) => {}
            Some(LoadAnswer::Failed(AbortReason::UnknownWorker)) => return Ok(Ok(Taken::Nothing("no_sockets".into()))),
            Some(LoadAnswer::Failed(reason)) => return Ok(Err(reason.name().to_owned())),
            _ => return Ok(Err("late".to_owned())),
        }
        let Worker { id, rank } = record.worker;
        let (answer, mut files) = self.takeover.ask(&Request::Dump { id: id.0, rank: rank.0 })?;
        let file = match (answer, files.pop()) {
            (Answer::Dumped, Some(file)) => File::from(file),
            (Answer::NotDumped { why }, _) => {
                drop(parts.send(DumpPart::Aborted(AbortReason::SourceAborted)));
                // The load has not begun to change the worker. Its end is awaited, so that the next one can begin.
                answer_of(&answers);
                return Ok(if is_final(&why) { Ok(Taken::Nothing(why)) } else { Err(format!("not_dumped: {why}")) });
            }
            _ => return Err(out_of_order()),
        };
        let fed = feed_dump(file, &expected, is_live, &parts);
        drop(parts);
        match (fed, answer_of(&answers)) {
            (Ok(_), Some(LoadAnswer::Loaded(_))) if is_live => Ok(Ok(Taken::Live)),
            (Ok(_), Some(LoadAnswer::Loaded(_))) => Ok(Ok(Taken::Unproven)),
            (Err(fault), _) => Ok(Err(fault.refusal.name().to_owned())),
            (_, Some(LoadAnswer::Failed(reason))) => Ok(Err(reason.name().to_owned())),
            _ => Ok(Err("late".to_owned())),
        }
    }

    /// Waits until every worker has applied what it has applied at the old daemon, and is trusted as much.
    fn catch_up(&mut self) -> Result<()> {
        let deadline = after_ms(TAKEOVER_CATCH_UP_MS_MAX);
        let (mut proof_by, mut retakes_left) = (after_ms(TAKEOVER_PROOF_MS_MAX), TAKEOVER_RETAKES_MAX);
        loop {
            let theirs = self.their_positions()?;
            if let Some((worker, why)) = self.behind(&theirs) {
                if Instant::now() >= deadline {
                    return Err(failed(format!("worker {worker} does not catch up with the running daemon: {why}")));
                }
            } else {
                let table = self.table();
                let Some(record) = self.less_trusted(&table, &theirs) else { return Ok(()) };
                if Instant::now() >= proof_by {
                    let (worker, trust) = (record.worker, record.trust.load().level);
                    tracing::warn!(%worker, ?trust, retakes_left, "the worker is trusted less here than at the running daemon");
                    if retakes_left == 0 {
                        // It is as after a restart, and replies say so.
                        return Ok(());
                    }
                    if matches!(self.take_worker(&table, record)?, Taken::Nothing(_)) {
                        self.note_empty(&[record.worker], &theirs);
                    }
                    (proof_by, retakes_left) = (after_ms(TAKEOVER_PROOF_MS_MAX), retakes_left - 1);
                }
            }
            pause();
        }
    }

    /// A worker that is connected, and has applied less than at the old daemon.
    fn behind(&self, theirs: &[Position]) -> Option<(Worker, String)> {
        let table = self.table();
        theirs.iter().filter(|position| !self.is_empty_at(position)).find_map(|Position { worker, last, .. }| {
            let record = find(&table, worker).filter(|record| is_live(record))?;
            let ours = record.trust.load().as_of_seq;
            (ours < *last).then(|| (*worker, format!("it is at {ours:?}, and not at {last:?}")))
        })
    }

    /// A connected worker that is trusted less here than at the old daemon.
    fn less_trusted<'t>(&self, table: &'t FleetTable, theirs: &[Position]) -> Option<&'t WorkerRecord> {
        theirs.iter().filter(|position| !self.empty.contains_key(&position.worker)).find_map(|position| {
            let record = find(table, &position.worker).filter(|record| is_live(record))?;
            (Position::of(record).trust < position.trust).then_some(record)
        })
    }

    /// Takes the bookings in a pause. `false` = some worker was behind, and the old daemon decides again.
    fn switch(&self) -> Result<bool> {
        let asked = Instant::now();
        let (answer, files) = self.takeover.ask(&Request::Switch)?;
        let (Answer::Image, Ok([image, list])) = (answer, <[OwnedFd; 2]>::try_from(files)) else {
            return Err(out_of_order());
        };
        let image_us = asked.elapsed().as_micros() as u64;
        let image = KeptImage::of(read_image(image)?, &self.parts.config);
        let (theirs, until) = (workers::read(File::from(list))?, after_ms(TAKEOVER_BEHIND_MS_MAX));
        while let Some((worker, why)) = self.behind(&theirs) {
            if Instant::now() >= until {
                tracing::info!(%worker, why, "a worker is behind, so the running daemon goes on for now");
                if self.resumed()? {
                    return Ok(false);
                }
                break;
            }
            thread::yield_now();
        }
        let TakenParts { tables, stats, writer, turns, .. } = &self.parts;
        let caught_up_us = asked.elapsed().as_micros() as u64;
        image.restore(tables, stats);
        let restored_us = asked.elapsed().as_micros() as u64;
        writer.lock().continue_from(image.number());
        self.agree()?;
        if !turns.claim() {
            return Err(failed("this daemon ends"));
        }
        service_manager::become_main();
        // No process hears it if the old daemon has died.
        drop(self.takeover.channel.send(&Request::Serving, &[], after_ms(TAKEOVER_LOOK_EVERY_MS)));
        turns.resume();
        let (pause_us, took_ms) =
            (asked.elapsed().as_micros() as u64, self.takeover.began.elapsed().as_millis() as u64);
        tracing::info!(pause_us, image_us, caught_up_us, restored_us, took_ms, "this daemon has taken over");
        Ok(true)
    }

    /// Lets the old daemon go on. `false` = it has died in the pause.
    fn resumed(&self) -> Result<bool> {
        let (channel, until) = (&self.takeover.channel, after_ms(TAKEOVER_STEP_MS_MAX));
        if channel.send(&Request::Behind, &[], until).is_err() && !channel.has_ended() {
            return Err(self.takeover.lost());
        }
        match channel.receive::<Answer>(until, None) {
            Ok((Answer::Resumed, _)) => Ok(true),
            Err(Silence::Ended) => Ok(false),
            _ => Err(out_of_order()),
        }
    }

    /// Says that everything is taken, and waits for the word that this daemon may decide. If the old one has died instead,
    /// this one decides too: it has all that the old one had.
    fn agree(&self) -> Result<()> {
        let died = || tracing::warn!("the daemon before this one has died in the pause; this one has all that it had");
        let wait_ms = TAKEOVER_PAUSE_MS_MAX + TAKEOVER_SERVING_MS_MAX;
        if self.takeover.channel.send(&Request::Taken, &[], after_ms(wait_ms)).is_err()
            && !self.takeover.channel.has_ended()
        {
            return Err(self.takeover.lost());
        }
        match self.takeover.channel.receive::<Answer>(after_ms(wait_ms), None) {
            Ok((Answer::Yours, _)) => Ok(()),
            Err(Silence::Ended) => {
                died();
                Ok(())
            }
            Ok((Answer::Refused { why, remedy }, _)) => {
                Err(Error::new(Kind::Config, format!("the running daemon does not hand over: {why}"), remedy))
            }
            _ => Err(failed("the running daemon does not say that this one may decide")),
        }
    }
}

fn find<'a>(table: &'a FleetTable, worker: &Worker) -> Option<&'a WorkerRecord> {
    table.workers.iter().find(|record| record.worker == *worker)
}

/// Whether the worker's events arrive here.
fn is_live(record: &WorkerRecord) -> bool {
    record.events.is_some() && record.state == WorkerState::Ready
}

/// Whether another try would find the same.
fn is_final(why: &str) -> bool {
    matches!(why, "no_batch" | "hybrid" | "unknown_worker")
}

/// The next answer of a load.
fn answer_of(answers: &Receiver<LoadAnswer>) -> Option<LoadAnswer> {
    answers.recv_timeout(Duration::from_millis(TAKEOVER_DUMP_MS_MAX)).ok()
}

fn read_image(file: OwnedFd) -> Result<BookingsImage> {
    let unusable = |why: &str| failed(format!("the image of the other daemon's bookings cannot be used: {why}"));
    let image = read_bookings(&mut File::from(file)).map_err(|fault| unusable(fault.refusal.name()))?;
    image.ok_or_else(|| unusable("it is empty"))
}

fn pause() {
    thread::sleep(Duration::from_millis(TAKEOVER_LOOK_EVERY_MS));
}

fn out_of_order() -> Error {
    failed("the running daemon answered out of order")
}
