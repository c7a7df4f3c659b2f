//! The old daemon's side: a thread that waits for a daemon that takes over, and answers it. One at a time.

use std::fs::File;
use std::io::{self, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use arc_swap::Guard;
use rustix::event::{PollFd, PollFlags};
use rustix::io::Errno;
use rustix::net::{SocketFlags, accept_with};

use super::channel::{Channel, Silence, after_ms, memory_file, wait};
use super::messages::{Answer, Request};
use super::{FORMAT, workers};
use crate::audit;
use crate::daemon::ingest_threads::IngestThreads;
use crate::daemon::kept_bookings::SharedWriter;
use crate::error::{Error, Kind, Result};
use crate::ids::Worker;
use crate::limits::{
    ACCEPT_PAUSE_MS, TAKEOVER_ANSWER_MS_MAX, TAKEOVER_DESCRIPTORS_MAX, TAKEOVER_DUMP_MS_MAX, TAKEOVER_HELLO_MS_MAX,
    TAKEOVER_PAUSE_MS_MAX, TAKEOVER_SERVING_MS_MAX, TAKEOVER_STAND_MS_MAX, TAKEOVER_STEP_MS_MAX, TURN_LOOK_EVERY_MS,
};
use crate::metrics::{CounterSet, DaemonCounter};
use crate::owned_directory;
use crate::requests::RequestTables;
use crate::sandbox::{self, ThreadKind};
use crate::serve::{BoundSocket, NamedSocket, Turn, Turns};
use crate::snapshot::{BookingsWriter, encode_laws, write_dump};

/// How long the thread waits for a connection before it looks again, when nothing wakes it.
const IDLE_MS: u64 = 3_600_000;

/// What the daemon gives to the one that takes over.
pub(in crate::daemon) struct Given {
    /// Names the spaces by all that both daemons need to have in common.
    pub(in crate::daemon) spaces: String,
    /// Its listening sockets, this thread's own among them.
    pub(in crate::daemon) sockets: Vec<NamedSocket>,
    pub(in crate::daemon) writer: SharedWriter,
    pub(in crate::daemon) tables: RequestTables,
    /// A weak reference: a dump in progress must not keep the ingest threads from ending.
    pub(in crate::daemon) ingest_threads: Weak<IngestThreads>,
    /// How long what was learnt of classes and workers that are gone is kept, milliseconds.
    pub(in crate::daemon) keep_ms: u64,
    pub(in crate::daemon) turns: Turns,
    pub(in crate::daemon) counters: Arc<CounterSet<DaemonCounter>>,
}

/// The running thread.
#[derive(Debug)]
pub(in crate::daemon) struct GivingThread {
    thread: JoinHandle<()>,
    /// The thread ends when this closes.
    stop: UnixStream,
}

impl GivingThread {
    /// Starts it. It begins in this daemon's turn.
    ///
    /// # Errors
    /// `System` if it cannot be started.
    pub(in crate::daemon) fn start(socket: BoundSocket, given: Given) -> Result<Self> {
        let unavailable = |cause: io::Error| {
            let what = "cannot start the thread that waits for a daemon that takes over";
            Error::new(Kind::System, what, "raise the limits of threads and of open files").caused_by(cause)
        };
        let (stop, stopped) = UnixStream::pair().map_err(unavailable)?;
        let run = move || {
            sandbox::enter(ThreadKind::Takeover);
            Giver { given, socket, stopped, untold: Vec::new() }.run();
        };
        let thread = std::thread::Builder::new().name("takeover".into()).spawn(run).map_err(unavailable)?;
        Ok(Self { thread, stop })
    }

    /// Ends it, and closes its copies of the listening sockets.
    ///
    /// # Errors
    /// `Internal` if it panicked.
    pub(in crate::daemon) fn stop(self) -> Result<()> {
        drop(self.stop);
        self.thread.join().map_err(|_| {
            let what = "the thread that waits for a daemon that takes over panicked";
            Error::new(Kind::Internal, what, "report it with the log around it")
        })
    }
}

/// Why a conversation ended and this daemon goes on.
struct Refusal {
    counter: DaemonCounter,
    why: String,
    remedy: &'static str,
}

impl Refusal {
    fn failed(why: impl Into<String>) -> Self {
        let remedy = "see the log of the daemon that tried to take over";
        Self { counter: DaemonCounter::TakeoversFailed, why: why.into(), remedy }
    }

    fn panicked() -> Self {
        let remedy = "report the panic in the log of the running daemon";
        Self { remedy, ..Self::failed("its thread that hands over panicked") }
    }

    fn unfit(why: impl Into<String>, remedy: &'static str) -> Self {
        Self { counter: DaemonCounter::TakeoversRefused, why: why.into(), remedy }
    }

    #[expect(clippy::needless_pass_by_value, reason = "as `map_err` gives it")]
    fn system(cause: io::Error) -> Self {
        Self::failed(format!("the system refuses: {cause}"))
    }

    fn silence(silence: Silence) -> Self {
        Self::failed(match silence {
            Silence::Ended => "it has ended".to_owned(),
            Silence::Late => "it said nothing in time".to_owned(),
            Silence::Nonsense(error) => error.to_string(),
            Silence::Stopped => "this daemon ends".to_owned(),
        })
    }
}

/// A pause. At its end, also by a panic, this daemon decides again unless it has given its turn away.
struct Paused<'a> {
    turns: &'a Turns,
    is_given: bool,
}

impl Drop for Paused<'_> {
    fn drop(&mut self) {
        if self.is_given {
            self.turns.end();
        } else {
            self.turns.resume();
        }
    }
}

/// What the end of a pause is.
enum AfterPause {
    /// The other daemon is not as far as this one, and tries again.
    Behind,
    /// The other daemon has everything.
    Over,
}

/// The thread's state.
struct Giver {
    given: Given,
    socket: BoundSocket,
    stopped: UnixStream,
    /// Connections whose other ends could not be told that this daemon goes on. They stay open, because a connection that
    /// ends without a word says that this daemon has died.
    untold: Vec<Channel>,
}

impl Giver {
    fn run(mut self) {
        while self.given.turns.turn() == Turn::Theirs {
            let stop = [PollFd::new(&self.stopped, PollFlags::IN)];
            if wait(&stop, after_ms(TURN_LOOK_EVERY_MS)).is_ok_and(|ready| ready[0]) {
                return;
            }
        }
        while self.given.turns.turn() != Turn::Over {
            let listener = self.socket.descriptor();
            let polled = [PollFd::new(&listener, PollFlags::IN), PollFd::new(&self.stopped, PollFlags::IN)];
            match wait(&polled, after_ms(IDLE_MS)).as_deref() {
                Ok([_, true]) => return,
                Ok([true, _]) => self.accept(),
                _ => {}
            }
        }
    }

    fn accept(&mut self) {
        match accept_with(self.socket.descriptor(), SocketFlags::CLOEXEC | SocketFlags::NONBLOCK) {
            Ok(connection) => self.converse(connection),
            Err(Errno::AGAIN | Errno::INTR) => {}
            Err(error) => {
                tracing::error!(%error, "a daemon that takes over cannot be accepted; it waits");
                std::thread::sleep(Duration::from_millis(ACCEPT_PAUSE_MS));
            }
        }
    }

    fn converse(&mut self, connection: OwnedFd) {
        self.untold.retain(|channel| !channel.has_ended());
        let channel = match Channel::of(connection) {
            Ok(channel) => channel,
            Err(error) => {
                self.given.counters.bump(DaemonCounter::TakeoversRefused);
                return tracing::warn!(%error, "a daemon may not take over");
            }
        };
        tracing::info!("another daemon wants to take over");
        // The channel outlives a panic: a connection that ends without a word says that this daemon has died.
        let answered = catch_unwind(AssertUnwindSafe(|| self.answer_all(&channel)));
        let Err(refusal) = answered.unwrap_or_else(|_| Err(Refusal::panicked())) else { return };
        self.given.counters.bump(refusal.counter);
        let Refusal { why, remedy, .. } = refusal;
        tracing::warn!(why, "another daemon does not take over; this one goes on");
        let refused = Answer::Refused { why, remedy: remedy.to_owned() };
        let told = channel.send(&refused, &[], after_ms(TAKEOVER_HELLO_MS_MAX));
        if told.is_err() && !channel.has_ended() {
            self.untold.push(channel);
        }
    }

    /// Answers until the other daemon has everything, or the conversation fails.
    fn answer_all(&self, channel: &Channel) -> std::result::Result<(), Refusal> {
        let hello = self.receive(channel, after_ms(TAKEOVER_HELLO_MS_MAX))?;
        let Request::Hello { format, spaces } = hello else { return Err(out_of_order()) };
        if format != FORMAT {
            let why = format!("it speaks version {format} of the takeover, and this one {FORMAT}");
            return Err(Refusal::unfit(why, "stop the old daemon, and start the new one with the same snapshot.dir"));
        }
        if spaces != self.given.spaces {
            let why = "its spaces are not those of this daemon";
            return Err(Refusal::unfit(why, "configure the same spaces in the same order, or restart the daemon"));
        }
        self.welcome(channel).map_err(Refusal::system)?;
        loop {
            match self.receive(channel, after_ms(TAKEOVER_STEP_MS_MAX))? {
                Request::Workers => self.send_workers(channel).map_err(Refusal::system)?,
                Request::Dump { id, rank } => {
                    self.send_dump(channel, Worker::new(id, rank)).map_err(Refusal::system)?
                }
                Request::Switch => match self.switch(channel)? {
                    AfterPause::Over => return Ok(()),
                    AfterPause::Behind => {
                        send(channel, &Answer::Resumed, &[]).map_err(Refusal::system)?;
                    }
                },
                Request::GiveUp { why } => return Err(Refusal::failed(format!("it gave up: {why}"))),
                Request::Hello { .. } | Request::Behind | Request::Taken | Request::Serving => {
                    return Err(out_of_order());
                }
            }
        }
    }

    fn receive(&self, channel: &Channel, deadline: Instant) -> std::result::Result<Request, Refusal> {
        let received = channel.receive(deadline, Some(self.stopped.as_fd())).map_err(Refusal::silence)?;
        // A request comes without descriptors. Others close here.
        Ok(received.0)
    }

    fn welcome(&self, channel: &Channel) -> io::Result<()> {
        let Given { sockets, writer, tables, keep_ms, .. } = &self.given;
        let (image, learnt) = (memory_file()?, memory_file()?);
        let memory = {
            let mut writer = writer.lock();
            writer.write_for_other(&image)?;
            writer.memory_files()?
        };
        let now_unix_ms = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_millis() as u64);
        let laws = tables.loads.learnt_laws(tables.now_ns(), now_unix_ms, *keep_ms);
        (&learnt).write_all(&encode_laws(&laws)?)?;
        let locks = owned_directory::held_locks()?;
        let names = sockets.iter().map(|(name, _)| name.clone()).collect();
        let mut descriptors: Vec<BorrowedFd<'_>> = sockets.iter().map(|(_, socket)| socket.as_fd()).collect();
        descriptors.extend(locks.iter().map(AsFd::as_fd));
        descriptors.extend(memory.iter().map(AsFd::as_fd));
        descriptors.extend([image.as_fd(), learnt.as_fd()]);
        if descriptors.len() > TAKEOVER_DESCRIPTORS_MAX {
            return Err(io::Error::other("there are too many descriptors to pass"));
        }
        send(channel, &Answer::Welcome { sockets: names, locks: locks.len(), memory: memory.len() }, &descriptors)
    }

    fn send_workers(&self, channel: &Channel) -> io::Result<()> {
        let file = memory_file()?;
        workers::write(&file, &self.given.tables.fleet.load())?;
        send(channel, &Answer::Workers, &[file.as_fd()])
    }

    fn send_dump(&self, channel: &Channel, worker: Worker) -> io::Result<()> {
        let file = memory_file()?;
        match self.dump(&file, worker) {
            Ok(references) => {
                tracing::debug!(%worker, references, "the worker's blocks are passed on");
                send(channel, &Answer::Dumped, &[file.as_fd()])
            }
            Err(why) => send(channel, &Answer::NotDumped { why: why.to_owned() }, &[]),
        }
    }

    fn dump(&self, file: &File, worker: Worker) -> std::result::Result<u64, &'static str> {
        let table = Guard::into_inner(self.given.tables.fleet.load());
        let record = table.workers.iter().find(|record| record.worker == worker).ok_or("unknown_worker")?;
        let ingest_threads = self.given.ingest_threads.upgrade().ok_or("draining")?;
        let parts = ingest_threads.dump(record.shard, worker).map_err(|error| error.kind().name())?;
        drop(ingest_threads);
        write_dump(file, (&table, record), &parts, after_ms(TAKEOVER_DUMP_MS_MAX))
    }

    /// Has all threads stand still and hands the bookings over. If that fails, all go on.
    fn switch(&self, channel: &Channel) -> std::result::Result<AfterPause, Refusal> {
        let Given { writer, turns, counters, .. } = &self.given;
        // Held until it is known which daemon decides, so that no image of this daemon replaces a newer one.
        let mut writer = writer.lock();
        let began = Instant::now();
        counters.bump(DaemonCounter::TakeoverPauses);
        if !turns.pause(Duration::from_millis(TAKEOVER_STAND_MS_MAX)) {
            return Err(Refusal::failed("a thread of this daemon did not stand still in time"));
        }
        let stood_us = micros_since(began);
        let mut paused = Paused { turns, is_given: false };
        let handed = self.hand_over(channel, &mut writer, &mut paused);
        let (pause_us, is_given) = (micros_since(began), paused.is_given);
        drop(paused);
        if is_given {
            audit::changed(&channel.peer(), "takeover", &"the daemon", ("serves", "ends"));
            tracing::info!(pause_us, stood_us, "another daemon has taken over; this one ends");
        } else {
            tracing::info!(pause_us, stood_us, "this daemon decides again after a pause");
        }
        handed
    }

    fn hand_over(
        &self,
        channel: &Channel,
        writer: &mut BookingsWriter,
        paused: &mut Paused<'_>,
    ) -> std::result::Result<AfterPause, Refusal> {
        let until = after_ms(TAKEOVER_PAUSE_MS_MAX);
        let (image, list) = (memory_file().map_err(Refusal::system)?, memory_file().map_err(Refusal::system)?);
        writer.write_for_other(&image).map_err(Refusal::system)?;
        workers::write(&list, &self.given.tables.fleet.load()).map_err(Refusal::system)?;
        channel.send(&Answer::Image, &[image.as_fd(), list.as_fd()], until).map_err(Refusal::system)?;
        match self.receive(channel, until)? {
            Request::Taken => {}
            Request::Behind => return Ok(AfterPause::Behind),
            Request::GiveUp { why } => return Err(Refusal::failed(format!("it gave up: {why}"))),
            _ => return Err(out_of_order()),
        }
        channel.send(&Answer::Yours, &[], until).map_err(Refusal::system)?;
        // From here on only the end of the other daemon, before it has decided anything, gives the turn back.
        paused.is_given = true;
        match channel.receive::<Request>(after_ms(TAKEOVER_SERVING_MS_MAX), None) {
            Ok((Request::Serving, _)) => {}
            Err(Silence::Ended) | Ok((Request::GiveUp { .. }, _)) => {
                paused.is_given = false;
                return Err(Refusal::failed("it ended before it served"));
            }
            other => {
                tracing::error!(?other, "the daemon that takes over does not say that it serves; it has everything")
            }
        }
        Ok(AfterPause::Over)
    }
}

fn micros_since(began: Instant) -> u64 {
    began.elapsed().as_micros() as u64
}

fn send(channel: &Channel, answer: &Answer, descriptors: &[BorrowedFd<'_>]) -> io::Result<()> {
    channel.send(answer, descriptors, after_ms(TAKEOVER_ANSWER_MS_MAX))
}

fn out_of_order() -> Refusal {
    Refusal::failed("it sent a message out of order")
}
