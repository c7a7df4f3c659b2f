//! A core: one serving thread with its runtime, its service and its connections. Its [`Mailbox`] is the only way in.

use std::cell::{Cell, RefCell};
use std::os::unix::net::UnixStream;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use crossbeam::queue::ArrayQueue;
use rustc_hash::FxHashMap;
use tokio::sync::Notify;

use super::busy_poll::{BusyPoll, PollShares, Poller};
use super::connection::{Connection, Ended, TransportKind, drive};
use super::deadlines::{PeerWait, enforce_read_deadlines, enforce_reply_budget, enforce_unread_limit};
use super::io_backend::{EpollStream, IoBackend, Stream, UringStream, block_on_epoll, block_on_uring};
use super::lane::{Lanes, Transport, serve_lanes};
use super::receive::ReceiveBudget;
use super::reply_writer::{Pushed, ReplyBudget, ReplyWriter};
use super::responder::RoutingResponder;
use super::turns::Turns;
use super::watch::push_changes;
use crate::budget::{Gauge, MemoryAccounts, MemoryPart};
use crate::error::{Error, Kind, Result};
use crate::limits::{
    CORE_RECEIVE_BYTES_MAX, CORE_REPLIES_BYTES_MAX, DRAIN_GRACE_MS, FRAME_BODY_BYTES_MAX_DEFAULT, MAILBOX_MESSAGES_MAX,
    UNREAD_MS_MAX_DEFAULT,
};
use crate::log_quota::LogQuota;
use crate::metrics::{CoreCounter, CounterSet};
use crate::requests::{QueueInbox, QueueMessage, Service};
use crate::shares::UserReservation;
use crate::watchdog::{Activity, ThreadMark, watched};

/// The settings of a core.
#[derive(Clone, Debug)]
pub struct CoreOptions {
    /// The core's number, from 0. Its thread is called `kvrouted-core-N`.
    pub index: usize,
    /// The processor that it is bound to; `None` = the scheduler decides.
    pub pin: Option<core_affinity::CoreId>,
    /// What its sockets run on.
    pub io_backend: IoBackend,
    /// The largest body that it answers.
    pub frame_body_bytes_max: u32,
    /// The longest time that it busy-polls before it sleeps, microseconds; 0 = not at all. Only on
    /// [`IoBackend::Epoll`].
    pub spin_us_max: u32,
    /// The longest time that a peer may leave its replies unread, milliseconds; 0 = for ever.
    pub unread_ms_max: u64,
    /// The longest time that the rest of a frame, or hello, may take, milliseconds; 0 = for ever.
    pub frame_timeout_ms: u64,
    /// The share of the memory for large frames that one user may take, percent.
    pub user_share_percent: u8,
    /// The daemon's shm lanes; `None` = its connections open none.
    pub lanes: Option<Arc<Lanes>>,
    /// The thread's mark; `None` = no watchdog looks at it.
    pub mark: Option<Arc<ThreadMark>>,
    /// The memory of its connections.
    pub memory: CoreMemory,
    /// The turns of its process.
    pub turns: Turns,
}

/// The memory that the connections of one core share: what it may take, and what it takes.
#[derive(Clone, Debug)]
pub struct CoreMemory {
    /// The most bytes of large frames that are being received; more only if the largest frame needs it.
    pub frames_bytes_max: usize,
    /// Shows those bytes.
    pub frames: Gauge,
    /// The most bytes of replies that gateways have not read.
    pub replies_bytes_max: usize,
    /// Shows those bytes.
    pub replies: Gauge,
}

impl Default for CoreMemory {
    /// The bounds of the implementation alone.
    fn default() -> Self {
        let (frames_bytes_max, replies_bytes_max) = (CORE_RECEIVE_BYTES_MAX, CORE_REPLIES_BYTES_MAX as usize);
        Self { frames_bytes_max, frames: Gauge::default(), replies_bytes_max, replies: Gauge::default() }
    }
}

impl CoreMemory {
    /// One of `cores` equal parts.
    #[must_use]
    pub fn of(accounts: &MemoryAccounts, cores: usize) -> Self {
        let of_each = |part| accounts.division().of_each(part, cores);
        Self {
            frames_bytes_max: of_each(MemoryPart::Frames).min(CORE_RECEIVE_BYTES_MAX),
            frames: accounts.gauge(MemoryPart::Frames),
            replies_bytes_max: of_each(MemoryPart::Replies).min(CORE_REPLIES_BYTES_MAX as usize),
            replies: accounts.gauge(MemoryPart::Replies),
        }
    }
}

impl CoreOptions {
    /// Core number `index` with defaults: not pinned, without busy-polling.
    #[must_use]
    pub fn new(index: usize, io_backend: IoBackend) -> Self {
        Self {
            index,
            pin: None,
            io_backend,
            frame_body_bytes_max: FRAME_BODY_BYTES_MAX_DEFAULT,
            spin_us_max: 0,
            unread_ms_max: UNREAD_MS_MAX_DEFAULT,
            frame_timeout_ms: 0,
            user_share_percent: 100,
            lanes: None,
            mark: None,
            memory: CoreMemory::default(),
            turns: Turns::default(),
        }
    }
}

/// A running core.
pub struct Core {
    index: usize,
    handle: CoreHandle,
    thread: thread::JoinHandle<()>,
}

impl Core {
    /// Starts a core: `make` builds its service on the new thread. Returns once the core can take connections.
    ///
    /// # Errors
    /// The error of `make`; [`Kind::System`] if the thread or its runtime cannot be started.
    pub fn start<S, F>(options: CoreOptions, counters: Arc<CounterSet<CoreCounter>>, make: F) -> Result<Self>
    where
        S: Service + 'static,
        F: FnOnce() -> Result<S> + Send + 'static,
    {
        let index = options.index;
        let mailbox = Arc::new(Mailbox::new());
        let handle = CoreHandle { mailbox: Arc::clone(&mailbox) };
        let (send, started) = mpsc::sync_channel(1);
        let report = move |outcome| {
            // The receiver waits for this message.
            let _ = send.send(outcome);
        };
        let body = move || {
            let _alive = AliveUntilDrop(Arc::clone(&mailbox));
            pin(&options);
            match make() {
                Ok(service) => serve(options, mailbox, counters, service, report),
                Err(error) => report(Err(error)),
            }
        };
        let thread = thread::Builder::new().name(format!("kvrouted-core-{index}")).spawn(body).map_err(|error| {
            Error::new(Kind::System, "cannot start a serving thread", "raise the limit of processes").caused_by(error)
        })?;
        match started.recv() {
            Ok(Ok(())) => Ok(Self { index, handle, thread }),
            Ok(Err(error)) => Err(error),
            Err(_) => Err(ended_by_panic(index)),
        }
    }

    /// The sending side of its mailbox.
    #[must_use]
    pub fn handle(&self) -> CoreHandle {
        self.handle.clone()
    }

    /// See [`CoreHandle::drain`].
    pub fn drain(&self, deadline: Instant) {
        self.handle.drain(deadline);
    }

    /// Waits until it has ended.
    ///
    /// # Errors
    /// [`Kind::Internal`] if it panicked.
    pub fn join(self) -> Result<()> {
        self.thread.join().map_err(|_| ended_by_panic(self.index))
    }
}

fn ended_by_panic(index: usize) -> Error {
    Error::new(
        Kind::Internal,
        format!("serving thread {index} ended by a panic"),
        "report it with the log's last lines",
    )
}

struct AliveUntilDrop(Arc<Mailbox>);

impl Drop for AliveUntilDrop {
    fn drop(&mut self) {
        self.0.alive.store(false, Ordering::Relaxed);
    }
}

fn pin(options: &CoreOptions) {
    if let Some(processor) = options.pin
        && !core_affinity::set_for_current(processor)
    {
        tracing::warn!(
            core = options.index,
            processor = processor.id,
            "cannot pin the serving thread; it runs unpinned"
        );
    }
}

/// Runs the thread once its service is built.
fn serve<S: Service + 'static>(
    options: CoreOptions,
    mailbox: Arc<Mailbox>,
    counters: Arc<CounterSet<CoreCounter>>,
    service: S,
    report: impl FnOnce(Result<()>),
) {
    let mark = options.mark.clone().unwrap_or_else(|| Arc::new(ThreadMark::new("core", true)));
    let responder = RoutingResponder::new(service, Arc::clone(&counters), options.frame_body_bytes_max);
    let responder = responder.on_core(options.index, &mailbox.inbox, options.lanes.clone()).marking(&mark);
    let (responder, of_task) = (RefCell::new(responder), Arc::clone(&mark));
    match options.io_backend {
        IoBackend::Uring => {
            let running = run::<UringStream, S>(options, mailbox, (counters, mark), responder);
            block_on_uring(report, watched(of_task, Activity::Accepting, running));
        }
        IoBackend::Epoll => {
            let running = run::<EpollStream, S>(options, mailbox, (counters, mark), responder);
            block_on_epoll(report, watched(of_task, Activity::Accepting, running));
        }
    }
}

/// The state that the tasks of one core share.
pub(super) struct CoreState<T, S: Service> {
    pub(super) options: CoreOptions,
    mailbox: Arc<Mailbox>,
    pub(super) counters: Arc<CounterSet<CoreCounter>>,
    pub(super) responder: RefCell<RoutingResponder<S>>,
    /// Open connections and lanes, by a number that is never reused.
    pub(super) open: RefCell<FxHashMap<u64, Rc<ConnectionHandle<T>>>>,
    ended: Notify,
    pub(super) receive_budget: Rc<ReceiveBudget>,
    pub(super) reply_budget: Rc<ReplyBudget>,
    pub(super) log_quota: LogQuota,
    pub(super) poll_shares: Rc<PollShares>,
    /// The number of the next connection or lane.
    next_id: Cell<u64>,
    mark: Arc<ThreadMark>,
}

/// An open connection: its stream, and the writer of its replies.
pub(super) struct ConnectionHandle<T> {
    pub(super) stream: Transport<T>,
    pub(super) writer: ReplyWriter,
    /// Whether it is closed because its peer leaves replies unread.
    is_unread: Cell<bool>,
    pub(super) peer_wait: Rc<Cell<PeerWait>>,
}

impl<T: Stream> ConnectionHandle<T> {
    pub(super) fn new(stream: Transport<T>, peer_wait: Rc<Cell<PeerWait>>, budget: &Rc<ReplyBudget>) -> Self {
        Self { stream, writer: ReplyWriter::within(budget), is_unread: Cell::new(false), peer_wait }
    }

    pub(super) fn is_unread(&self) -> bool {
        self.is_unread.get()
    }

    /// Closes it because its peer leaves replies unread. Its reader and its writer see that by the socket.
    pub(super) fn cut_unread(&self) {
        self.is_unread.set(true);
        // An error means that the peer has gone by itself.
        let _ = self.stream.shutdown(std::net::Shutdown::Both);
    }
}

async fn run<T: Stream, S: Service + 'static>(
    options: CoreOptions,
    mailbox: Arc<Mailbox>,
    (counters, mark): (Arc<CounterSet<CoreCounter>>, Arc<ThreadMark>),
    responder: RefCell<RoutingResponder<S>>,
) {
    let (open, ended, log_quota) = (RefCell::default(), Notify::new(), LogQuota::default());
    let CoreOptions { frame_body_bytes_max, user_share_percent, .. } = options;
    let CoreMemory { frames_bytes_max, frames, replies_bytes_max, replies } = options.memory.clone();
    let (of_frames, bounds) = ((frames_bytes_max, frames), (frame_body_bytes_max, user_share_percent));
    let receive_budget = Rc::new(ReceiveBudget::new(bounds, of_frames, Arc::clone(&counters)));
    let reply_budget = Rc::new(ReplyBudget::new(replies_bytes_max, replies));
    let busy_poll = Rc::new(BusyPoll::new(options.spin_us_max, Arc::clone(&counters)));
    let (poll_shares, next_id) = (PollShares::new(&busy_poll, options.spin_us_max), Cell::new(0));
    let member = options.turns.join();
    let core: Rc<CoreState<T, S>> = Rc::new(CoreState {
        options,
        mailbox,
        counters,
        responder,
        open,
        ended,
        receive_budget,
        reply_budget,
        log_quota,
        poll_shares,
        next_id,
        mark,
    });
    let tasks = [
        core.spawn(Activity::CheckingConnections, push_changes(Rc::clone(&core))),
        core.spawn(Activity::CheckingConnections, enforce_unread_limit(Rc::clone(&core))),
        core.spawn(Activity::CheckingConnections, enforce_reply_budget(Rc::clone(&core))),
        core.spawn(Activity::CheckingConnections, enforce_read_deadlines(Rc::clone(&core))),
        core.spawn(Activity::CheckingConnections, serve_lanes(Rc::clone(&core))),
        core.spawn(Activity::CheckingConnections, async move { busy_poll.run().await }),
    ];
    let deadline = loop {
        let message = tokio::select! {
            message = core.mailbox.next() => message,
            () = member.stand_by() => break None,
        };
        match message {
            Message::Connection(handed) => core.start_connection(handed),
            Message::Queue(message) => core.on_queue_message(message),
            Message::Drain { deadline } => break Some(deadline),
        }
    };
    match deadline {
        Some(deadline) => core.drain(deadline).await,
        // Another daemon decides. The connections close with this future, and nothing that they sent is read any more.
        None => tracing::info!(core = core.options.index, connections = core.open.borrow().len(), "handed over"),
    }
    tasks.iter().for_each(tokio::task::JoinHandle::abort);
}

impl<T: Stream, S: Service + 'static> CoreState<T, S> {
    /// Starts a task on this core's thread. Each of its polls is a round of the thread.
    pub(super) fn spawn(
        &self,
        activity: Activity,
        task: impl Future<Output = ()> + 'static,
    ) -> tokio::task::JoinHandle<()> {
        tokio::task::spawn_local(watched(Arc::clone(&self.mark), activity, task))
    }

    /// A number for a connection or lane, never reused.
    pub(super) fn take_id(&self) -> u64 {
        self.next_id.replace(self.next_id.get() + 1)
    }

    /// Wakes the drain, which waits for connections and lanes to end.
    pub(super) fn notify_ended(&self) {
        self.ended.notify_one();
    }

    fn connection(&self, id: u64, uid: u32, transport: TransportKind) -> Connection {
        let connection = Connection::new(uid, self.options.frame_body_bytes_max).over(transport);
        connection.within(&self.receive_budget).numbered(id)
    }

    /// Starts the one task that reads, answers and writes a connection.
    fn start_connection(self: &Rc<Self>, handed: HandedConnection) {
        let HandedConnection { stream, uid, transport, reservation } = handed;
        let id = self.take_id();
        self.counters.bump(CoreCounter::Connections);
        let connection = RefCell::new(self.connection(id, uid, transport));
        let peer_wait = connection.borrow().peer_wait();
        let open = ConnectionGuard { core: Rc::clone(self), id, connection, _reservation: reservation };
        let handle = match Transport::from_std(stream) {
            Ok(stream) => Rc::new(ConnectionHandle::new(stream, peer_wait, &self.reply_budget)),
            Err(error) => {
                self.counters.bump(CoreCounter::ConnectionsFailed);
                if let Some(withheld) = self.log_quota.take(Instant::now()) {
                    tracing::warn!(core = self.options.index, uid, %error, withheld, "cannot serve a connection");
                }
                return;
            }
        };
        self.open.borrow_mut().insert(id, Rc::clone(&handle));
        self.spawn(Activity::ReadingFrames, async move {
            let ConnectionHandle { stream, writer, is_unread, .. } = &*handle;
            let poller = Poller::new(&open.core.poll_shares, id);
            let ended = drive(stream, &open.core.responder, &open.connection, writer, Some(&poller)).await;
            let ended = if is_unread.get() { Ended::Unread } else { ended };
            open.core.count_end(uid, &ended);
            open.core.end_lane_of(open.id).await;
            writer.flushed().await;
            // The peer can still read what it has not read; it only sees the end at once. An error means that the peer
            // has gone, as intended.
            let _ = stream.shutdown(std::net::Shutdown::Both);
        });
    }

    /// Handles a message about queued requests.
    fn on_queue_message(self: &Rc<Self>, message: QueueMessage) {
        match message {
            // A task of its own: if a decision panics, the core goes on.
            QueueMessage::Dispatch => {
                let core = Rc::clone(self);
                self.spawn(Activity::DecidingQueued, async move {
                    let mut responder = core.responder.borrow_mut();
                    responder.requests.dispatch_queued(None);
                    // This work belongs to no connection's quantum.
                    responder.requests.take_work();
                });
            }
            QueueMessage::Recheck => {
                let core = Rc::clone(self);
                self.spawn(Activity::DecidingQueued, async move {
                    let mut responder = core.responder.borrow_mut();
                    responder.requests.recheck_queue();
                    responder.requests.take_work();
                });
            }
            QueueMessage::Reply(reply) => {
                self.responder.borrow_mut().requests.forget_queued(&reply);
                let handle = self.open.borrow().get(&reply.connection).map(Rc::clone);
                match handle {
                    Some(handle) => {
                        self.counters.bump(CoreCounter::Requests);
                        // Here and not in a task: the end of the core waits for these messages, not for tasks.
                        let encode = || self.responder.borrow_mut().encode_pending(&reply);
                        match catch_unwind(AssertUnwindSafe(encode)) {
                            Ok(frame) => self.deliver(handle, &frame),
                            // The panic is logged by its hook. A reply that cannot be had ends the connection.
                            Err(_) => drop(handle.stream.shutdown(std::net::Shutdown::Both)),
                        }
                    }
                    None => self.responder.borrow_mut().requests.free_undelivered(reply.session, reply.booked()),
                }
            }
        }
    }

    /// Writes a pending reply.
    pub(super) fn deliver(self: &Rc<Self>, handle: Rc<ConnectionHandle<T>>, frame: &[u8]) {
        match handle.writer.push(frame) {
            Pushed::Queued => {}
            Pushed::NeedsFlush => {
                self.spawn(Activity::ReadingFrames, async move {
                    let ConnectionHandle { stream, writer, .. } = &*handle;
                    if writer.flush(stream).await.is_err() {
                        // The connection's reader sees it.
                        let _ = stream.shutdown(std::net::Shutdown::Both);
                    }
                });
            }
            Pushed::OverLimit => {
                self.responder.borrow().requests.count_unread();
                handle.cut_unread();
            }
        }
    }

    fn count_end(&self, uid: u32, ended: &Ended) {
        let core = self.options.index;
        match ended {
            Ended::Eof { .. } => {}
            Ended::Untrusted(_) => self.counters.bump(CoreCounter::ConnectionsUntrusted),
            Ended::Failed(_) => self.counters.bump(CoreCounter::ConnectionsFailed),
            Ended::Unread => self.counters.bump(CoreCounter::ConnectionsUnread),
        }
        if ended.is_peer_leaving() {
            tracing::debug!(core, uid, %ended, "a connection has ended");
        } else if let Some(withheld) = self.log_quota.take(Instant::now()) {
            tracing::warn!(core, uid, %ended, withheld, "a connection is closed");
        }
    }

    /// Ends every connection. Requests that the kernel holds already are still read and answered.
    async fn drain(self: &Rc<Self>, deadline: Instant) {
        let core = self.options.index;
        tracing::info!(core, connections = self.open.borrow().len(), "the serving thread drains");
        self.drain_queue(deadline).await;
        self.responder.borrow_mut().lanes.draining = true;
        self.shutdown_all(std::net::Shutdown::Read);
        if !self.all_ended(deadline).await {
            tracing::warn!(
                core,
                connections = self.open.borrow().len(),
                "the drain deadline has passed; connections are cut"
            );
            self.shutdown_all(std::net::Shutdown::Both);
            if !self.all_ended(Instant::now() + Duration::from_millis(DRAIN_GRACE_MS)).await {
                tracing::warn!(core, connections = self.open.borrow().len(), "connections are dropped");
            }
        }
        let late =
            std::iter::from_fn(|| self.mailbox.queue.pop()).filter(|m| matches!(m, Message::Connection(_))).count();
        if late > 0 {
            self.mailbox.connections.fetch_sub(late, Ordering::Relaxed);
            tracing::warn!(core, connections = late, "connections that came after the drain began are dropped");
        }
    }

    /// Closes the queue, and delivers the replies to the core's queued requests.
    async fn drain_queue(self: &Rc<Self>, deadline: Instant) {
        self.responder.borrow().requests.drain_queue();
        while self.responder.borrow().requests.has_queued() {
            match tokio::time::timeout_at(deadline.into(), self.mailbox.next_queue_message()).await {
                Ok(message) => self.on_queue_message(message),
                Err(_) => return,
            }
        }
    }

    fn shutdown_all(&self, how: std::net::Shutdown) {
        for handle in self.open.borrow().values() {
            if let Err(error) = handle.stream.shutdown(how) {
                // The peer went first; its task is about to see that.
                tracing::debug!(core = self.options.index, %error, "a connection has gone already");
            }
        }
    }

    async fn all_ended(&self, deadline: Instant) -> bool {
        while !self.open.borrow().is_empty() {
            if tokio::time::timeout_at(deadline.into(), self.ended.notified()).await.is_err() {
                return self.open.borrow().is_empty();
            }
        }
        true
    }
}

/// A connection's entry in its core. It is removed when the connection's task ends, by a panic too.
struct ConnectionGuard<T: Stream, S: Service + 'static> {
    core: Rc<CoreState<T, S>>,
    id: u64,
    connection: RefCell<Connection>,
    /// One connection of its user's quota.
    _reservation: UserReservation,
}

impl<T: Stream, S: Service + 'static> Drop for ConnectionGuard<T, S> {
    fn drop(&mut self) {
        let core = &self.core;
        if thread::panicking() {
            core.counters.bump(CoreCounter::ConnectionsFailed);
            tracing::error!(
                core = core.options.index,
                "answering a request panicked; its connection is closed, the others go on"
            );
        }
        // It has ended by now, unless this is a panic.
        core.shut_lane_of(self.id);
        self.connection.get_mut().on_closed(&mut *core.responder.borrow_mut());
        core.open.borrow_mut().remove(&self.id);
        core.counters.bump(CoreCounter::ConnectionsClosed);
        core.mailbox.connections.fetch_sub(1, Ordering::Relaxed);
        core.ended.notify_one();
    }
}

/// A connection for a core, with its part of its user's quota.
pub(super) struct HandedConnection {
    pub(super) stream: UnixStream,
    /// The user of the peer's process, or a principal's number in its place.
    pub(super) uid: u32,
    pub(super) transport: TransportKind,
    pub(super) reservation: UserReservation,
}

/// A message of another thread to a core.
enum Message {
    Connection(HandedConnection),
    Drain { deadline: Instant },
    Queue(QueueMessage),
}

/// The part of a core that other threads may use.
struct Mailbox {
    queue: ArrayQueue<Message>,
    /// Messages about queued requests. Its `arrived` wakes the core for `queue` too.
    inbox: Arc<QueueInbox>,
    /// Connections handed over and not yet ended. Relaxed everywhere: it only guides the acceptor's choice.
    connections: AtomicUsize,
    /// Cleared, for good, when the thread no longer takes messages.
    alive: AtomicBool,
}

impl Mailbox {
    fn new() -> Self {
        Self {
            // One place more than connections may take, so that a drain always finds one.
            queue: ArrayQueue::new(MAILBOX_MESSAGES_MAX + 1),
            inbox: Arc::default(),
            connections: AtomicUsize::new(0),
            alive: AtomicBool::new(true),
        }
    }

    /// The next message.
    async fn next(&self) -> Message {
        loop {
            if let Some(message) = self.queue.pop() {
                return message;
            }
            if let Some(message) = self.inbox.pop() {
                return Message::Queue(message);
            }
            // A message that arrives now leaves a permit: `notified` returns at once.
            self.inbox.arrived.notified().await;
        }
    }

    /// The next message about queued requests; other messages stay.
    async fn next_queue_message(&self) -> QueueMessage {
        loop {
            if let Some(message) = self.inbox.pop() {
                return message;
            }
            self.inbox.arrived.notified().await;
        }
    }
}

/// The sending side of a core's mailbox.
#[derive(Clone)]
pub struct CoreHandle {
    mailbox: Arc<Mailbox>,
}

impl std::fmt::Debug for CoreHandle {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CoreHandle").field("connections", &self.connections()).finish_non_exhaustive()
    }
}

impl CoreHandle {
    /// Its connections, those on their way to it included.
    #[must_use]
    pub fn connections(&self) -> usize {
        self.mailbox.connections.load(Ordering::Relaxed)
    }

    /// Whether it still takes connections.
    #[must_use]
    pub fn is_alive(&self) -> bool {
        // Relaxed: a core that is just ending drops the connections that still reach it.
        self.mailbox.alive.load(Ordering::Relaxed)
    }

    /// Hands over a connection. Only one thread may call it.
    ///
    /// # Errors
    /// Gives the stream back if the mailbox is full.
    pub(super) fn hand_over(&self, connection: HandedConnection) -> Result<(), UnixStream> {
        if self.mailbox.queue.len() >= MAILBOX_MESSAGES_MAX {
            return Err(connection.stream);
        }
        self.mailbox.connections.fetch_add(1, Ordering::Relaxed);
        match self.mailbox.queue.push(Message::Connection(connection)) {
            Ok(()) => self.mailbox.inbox.arrived.notify_one(),
            Err(Message::Connection(connection)) => {
                self.mailbox.connections.fetch_sub(1, Ordering::Relaxed);
                return Err(connection.stream);
            }
            // The queue gives back the message that was pushed.
            Err(Message::Drain { .. } | Message::Queue(_)) => {}
        }
        Ok(())
    }

    /// Asks the core to end: it answers what it has received, and cuts at `deadline` what is still open. Stop the
    /// acceptor first. A second call changes nothing.
    pub fn drain(&self, deadline: Instant) {
        if self.mailbox.queue.push(Message::Drain { deadline }).is_err() {
            tracing::warn!("the serving thread drains already");
        }
        self.mailbox.inbox.arrived.notify_one();
    }
}
