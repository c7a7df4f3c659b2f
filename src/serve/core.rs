//! A core thread: one runtime, one service, its own connections, and a mailbox as the only way in.

use std::cell::{Cell, RefCell};
use std::os::unix::net::UnixStream;
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use crossbeam::queue::ArrayQueue;
use rustc_hash::FxHashMap;
use tokio::sync::Notify;

use super::accept::UserPlace;
use super::busy_poll::Spin;
use super::busy_poll::{Looker, Looks};
use super::connection::{Connection, Respond as _};
use super::connection::{Ended, drive};
use super::deadlines::cut_unread;
use super::deadlines::{Owed, close_overdue};
use super::io_backend::Engine;
use super::io_backend::Stream;
use super::io_backend::{EpollStream, UringStream, block_on_epoll, block_on_uring};
use super::lane::{Carrier, attend};
use super::log_quota::LogQuota;
use super::receive::ReceiveRoom;
use super::reply_writer::{Outlet, Pushed};
use super::request_queue::{Late, LateBox};
use super::responder::RoutingResponder;
use super::service::Service;
use super::watch::tell_of_changes;
use crate::error::{Error, Kind, Result};
use crate::limits::{DRAIN_GRACE_MS, FRAME_BODY_BYTES_MAX_DEFAULT, MAILBOX_MESSAGES_MAX, UNREAD_MS_MAX_DEFAULT};
use crate::metrics::{CoreCounter, CounterSet};

/// How a core is to run.
#[derive(Clone, Copy, Debug)]
pub struct CoreOptions {
    /// Its number, from 0; its thread is called `kvrouted-core-N`.
    pub index: usize,
    /// The processor it is bound to; `None` = the scheduler decides.
    pub pin: Option<core_affinity::CoreId>,
    /// What its connections run on.
    pub engine: Engine,
    /// Largest body it answers.
    pub frame_body_bytes_max: u32,
    /// How long it looks for work before it sleeps, microseconds; 0 = not at all. Only on [`Engine::Epoll`].
    pub spin_us_max: u32,
    /// How long a peer may leave its replies unread, milliseconds; 0 = for ever.
    pub unread_ms_max: u64,
    /// How long a frame that has begun, or hello, may take, milliseconds; 0 = for ever.
    pub frame_timeout_ms: u64,
    /// How much of the memory for large frames those of one user may take, percent.
    pub user_share_percent: u8,
}

impl CoreOptions {
    /// Core number `index` as it is unless something else is configured: not pinned, sleeping at once.
    #[must_use]
    pub const fn new(index: usize, engine: Engine) -> Self {
        Self {
            index,
            pin: None,
            engine,
            frame_body_bytes_max: FRAME_BODY_BYTES_MAX_DEFAULT,
            spin_us_max: 0,
            unread_ms_max: UNREAD_MS_MAX_DEFAULT,
            frame_timeout_ms: 0,
            user_share_percent: 100,
        }
    }
}

/// A running core thread.
pub struct Core {
    index: usize,
    handle: CoreHandle,
    thread: thread::JoinHandle<()>,
}

impl Core {
    /// Starts a core: `make` builds its service on the new thread. Returns once it can take connections.
    ///
    /// # Errors
    /// What `make` failed with; [`Kind::System`] if the thread or its runtime cannot be had.
    pub fn start<S, F>(options: CoreOptions, counters: Arc<CounterSet<CoreCounter>>, make: F) -> Result<Self>
    where
        S: Service + 'static,
        F: FnOnce() -> Result<S> + Send + 'static,
    {
        let mailbox = Arc::new(Mailbox::new());
        let handle = CoreHandle { mailbox: Arc::clone(&mailbox) };
        let (send, started) = mpsc::sync_channel(1);
        let report = move |outcome| {
            // The receiver waits for exactly this.
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
        let thread =
            thread::Builder::new().name(format!("kvrouted-core-{}", options.index)).spawn(body).map_err(|error| {
                Error::new(Kind::System, "cannot start a core thread", "raise the limit of processes").caused_by(error)
            })?;
        match started.recv() {
            Ok(Ok(())) => Ok(Self { index: options.index, handle, thread }),
            Ok(Err(error)) => Err(error),
            Err(_) => Err(ended_by_panic(options.index)),
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
    Error::new(Kind::Internal, format!("core {index} ended by a panic"), "report it with the log's last lines")
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
        tracing::warn!(core = options.index, processor = processor.id, "cannot pin the core; it runs unpinned");
    }
}

/// The thread's life once its service is there.
fn serve<S: Service + 'static>(
    options: CoreOptions,
    mailbox: Arc<Mailbox>,
    counters: Arc<CounterSet<CoreCounter>>,
    service: S,
    report: impl FnOnce(Result<()>),
) {
    let responder = RoutingResponder::new(service, Arc::clone(&counters), options.frame_body_bytes_max);
    let responder = RefCell::new(responder.on_core(options.index, &mailbox.late));
    match options.engine {
        Engine::Uring => block_on_uring(report, run::<UringStream, S>(options, mailbox, counters, responder)),
        Engine::Epoll => block_on_epoll(report, run::<EpollStream, S>(options, mailbox, counters, responder)),
    }
}

/// What the tasks of one core share.
pub(super) struct Shared<T, S: Service> {
    pub(super) options: CoreOptions,
    mailbox: Arc<Mailbox>,
    pub(super) counters: Arc<CounterSet<CoreCounter>>,
    pub(super) responder: RefCell<RoutingResponder<S>>,
    /// Open connections by a number that is never used again.
    pub(super) open: RefCell<FxHashMap<u64, Rc<Link<T>>>>,
    ended: Notify,
    pub(super) receive_room: Rc<ReceiveRoom>,
    pub(super) log_quota: LogQuota,
    /// What it looks at instead of sleeping.
    pub(super) looks: Rc<Looks>,
    /// The number of the next connection or lane.
    next_id: Cell<u64>,
}

/// An open connection: its socket, and what is written to it.
pub(super) struct Link<T> {
    pub(super) stream: Carrier<T>,
    pub(super) outlet: Outlet,
    /// It is closed because its peer leaves replies unread.
    is_unread: Cell<bool>,
    /// What its peer owes.
    pub(super) owed: Rc<Cell<Owed>>,
}

impl<T: Stream> Link<T> {
    pub(super) fn new(stream: Carrier<T>, owed: Rc<Cell<Owed>>) -> Self {
        Self { stream, outlet: Outlet::default(), is_unread: Cell::new(false), owed }
    }

    pub(super) fn is_unread(&self) -> bool {
        self.is_unread.get()
    }

    /// Closes it: its peer leaves replies unread. Whoever reads from it or writes to it is told so by the socket.
    pub(super) fn cut_unread(&self) {
        self.is_unread.set(true);
        // An error says that the peer has gone by itself.
        let _ = self.stream.shutdown(std::net::Shutdown::Both);
    }
}

async fn run<T: Stream, S: Service + 'static>(
    options: CoreOptions,
    mailbox: Arc<Mailbox>,
    counters: Arc<CounterSet<CoreCounter>>,
    responder: RefCell<RoutingResponder<S>>,
) {
    let (open, ended, log_quota) = (RefCell::default(), Notify::new(), LogQuota::default());
    let CoreOptions { frame_body_bytes_max, user_share_percent, .. } = options;
    let receive_room = Rc::new(ReceiveRoom::new(frame_body_bytes_max, user_share_percent, Arc::clone(&counters)));
    let spin = Rc::new(Spin::new(options.spin_us_max, Arc::clone(&counters)));
    let (looks, next_id) = (Looks::new(&spin, options.spin_us_max), Cell::new(0));
    let core: Rc<Shared<T, S>> =
        Rc::new(Shared { options, mailbox, counters, responder, open, ended, receive_room, log_quota, looks, next_id });
    let beside = [
        tokio::task::spawn_local(tell_of_changes(Rc::clone(&core))),
        tokio::task::spawn_local(cut_unread(Rc::clone(&core))),
        tokio::task::spawn_local(close_overdue(Rc::clone(&core))),
        tokio::task::spawn_local(attend(Rc::clone(&core))),
        tokio::task::spawn_local(async move { spin.run().await }),
    ];
    let deadline = loop {
        match core.mailbox.next().await {
            Message::Connection { stream, uid, place } => core.admit(stream, uid, place),
            Message::Late(late) => core.late(late),
            Message::Drain { deadline } => break deadline,
        }
    };
    core.drain(deadline).await;
    beside.iter().for_each(tokio::task::JoinHandle::abort);
}

impl<T: Stream, S: Service + 'static> Shared<T, S> {
    /// A number for a connection or lane, never used again.
    pub(super) fn take_id(&self) -> u64 {
        self.next_id.replace(self.next_id.get() + 1)
    }

    /// Whoever waits for connections and lanes to end looks again.
    pub(super) fn one_ended(&self) {
        self.ended.notify_one();
    }

    fn connection(&self, id: u64, uid: u32) -> Connection {
        Connection::new(uid, self.options.frame_body_bytes_max).within(&self.receive_room).numbered(id)
    }

    /// Starts the one task that reads, answers and writes a connection.
    fn admit(self: &Rc<Self>, stream: UnixStream, uid: u32, place: UserPlace) {
        let id = self.take_id();
        self.counters.bump(CoreCounter::Connections);
        let connection = RefCell::new(self.connection(id, uid));
        let owed = connection.borrow().owed();
        let open = OpenConnection { core: Rc::clone(self), id, connection, _place: place };
        let link = match Carrier::from_std(stream) {
            Ok(stream) => Rc::new(Link::new(stream, owed)),
            Err(error) => {
                self.counters.bump(CoreCounter::ConnectionsFailed);
                if let Some(withheld) = self.log_quota.take(Instant::now()) {
                    tracing::warn!(core = self.options.index, uid, %error, withheld, "a connection cannot be taken over");
                }
                return;
            }
        };
        self.open.borrow_mut().insert(id, Rc::clone(&link));
        tokio::task::spawn_local(async move {
            let Link { stream, outlet, is_unread, .. } = &*link;
            let looker = Looker::new(&open.core.looks, id);
            let ended = drive(stream, &open.core.responder, &open.connection, outlet, Some(&looker)).await;
            let ended = if is_unread.get() { Ended::Unread } else { ended };
            open.core.count_end(uid, &ended);
            open.core.end_lane_of(open.id).await;
            outlet.flushed().await;
            // What the peer has not read stays readable; it just sees the end at once. An error says that
            // the peer is gone, which is what is wanted.
            let _ = stream.shutdown(std::net::Shutdown::Both);
        });
    }

    /// Passes on what another thread, or a turn before, has put before this core.
    fn late(self: &Rc<Self>, late: Late) {
        match late {
            // Tasks of their own: if deciding panics, the core goes on.
            Late::Serve => {
                let core = Rc::clone(self);
                tokio::task::spawn_local(async move {
                    let mut responder = core.responder.borrow_mut();
                    responder.serve_waiting(None);
                    // No connection's turn.
                    responder.take_work();
                });
            }
            Late::Look => {
                let core = Rc::clone(self);
                tokio::task::spawn_local(async move {
                    let mut responder = core.responder.borrow_mut();
                    responder.look_for_room();
                    responder.take_work();
                });
            }
            Late::Reply { connection, ticket, frame, session, booked } => {
                self.responder.borrow_mut().unpark(connection, ticket);
                let link = self.open.borrow().get(&connection).map(Rc::clone);
                match link {
                    Some(link) => {
                        self.counters.bump(CoreCounter::Requests);
                        self.deliver(link, &frame);
                    }
                    None => self.responder.borrow_mut().undo(session, booked),
                }
            }
        }
    }

    /// Writes a reply that comes late.
    pub(super) fn deliver(self: &Rc<Self>, link: Rc<Link<T>>, frame: &[u8]) {
        match link.outlet.push(frame) {
            Pushed::Queued => {}
            Pushed::ToFlush => {
                tokio::task::spawn_local(async move {
                    let Link { stream, outlet, .. } = &*link;
                    if outlet.flush(stream).await.is_err() {
                        // Whoever reads from it is told so.
                        let _ = stream.shutdown(std::net::Shutdown::Both);
                    }
                });
            }
            Pushed::TooMuch => {
                self.responder.borrow().count_unread();
                link.cut_unread();
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

    /// Ends every connection: what the kernel holds already is still read and answered.
    async fn drain(self: &Rc<Self>, deadline: Instant) {
        let core = self.options.index;
        tracing::info!(core, connections = self.open.borrow().len(), "the core drains");
        self.drain_waiting(deadline).await;
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
            std::iter::from_fn(|| self.mailbox.queue.pop()).filter(|m| matches!(m, Message::Connection { .. })).count();
        if late > 0 {
            self.mailbox.connections.fetch_sub(late, Ordering::Relaxed);
            tracing::warn!(core, connections = late, "connections that came after the drain are dropped");
        }
    }

    /// Tells those who wait that nobody does any more, and passes on the replies of other cores that come before that.
    async fn drain_waiting(self: &Rc<Self>, deadline: Instant) {
        self.responder.borrow().drain_waiting();
        while self.responder.borrow().has_parked() {
            match tokio::time::timeout_at(deadline.into(), self.mailbox.next_late()).await {
                Ok(late) => self.late(late),
                Err(_) => return,
            }
        }
    }

    fn shutdown_all(&self, how: std::net::Shutdown) {
        for link in self.open.borrow().values() {
            if let Err(error) = link.stream.shutdown(how) {
                // The peer went first; its task is about to see that.
                tracing::debug!(core = self.options.index, %error, "a connection was gone already");
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

/// A connection's entry in its core, undone when its task ends, however it ends.
struct OpenConnection<T: Stream, S: Service + 'static> {
    core: Rc<Shared<T, S>>,
    id: u64,
    connection: RefCell<Connection>,
    /// Of its user's connections.
    _place: UserPlace,
}

impl<T: Stream, S: Service + 'static> Drop for OpenConnection<T, S> {
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

// The only way into a core: connections, replies that come late, and the drain.

/// What other threads hand to a core.
pub(super) enum Message {
    Connection { stream: UnixStream, uid: u32, place: UserPlace },
    Drain { deadline: Instant },
    Late(Late),
}

/// What other threads may touch of a core.
pub(super) struct Mailbox {
    pub(super) queue: ArrayQueue<Message>,
    /// Replies to requests that waited, and word that some may find room. Its bell rings for `queue` too.
    pub(super) late: Arc<LateBox>,
    /// Connections handed over and not yet ended. Relaxed everywhere: it only guides the acceptor's choice.
    pub(super) connections: AtomicUsize,
    /// Cleared, for good, when the thread no longer takes messages.
    pub(super) alive: AtomicBool,
}

impl Mailbox {
    pub(super) fn new() -> Self {
        Self {
            // One place more than connections may take, so that a drain always finds room.
            queue: ArrayQueue::new(MAILBOX_MESSAGES_MAX + 1),
            late: Arc::default(),
            connections: AtomicUsize::new(0),
            alive: AtomicBool::new(true),
        }
    }

    /// The next message.
    pub(super) async fn next(&self) -> Message {
        loop {
            if let Some(message) = self.queue.pop() {
                return message;
            }
            if let Some(late) = self.late.pop() {
                return Message::Late(late);
            }
            // A message that arrives here leaves a permit: `notified` returns at once.
            self.late.arrived.notified().await;
        }
    }

    /// What comes late, without what else waits.
    pub(super) async fn next_late(&self) -> Late {
        loop {
            if let Some(late) = self.late.pop() {
                return late;
            }
            self.late.arrived.notified().await;
        }
    }
}

/// The sending side of a core's mailbox.
#[derive(Clone)]
pub struct CoreHandle {
    pub(super) mailbox: Arc<Mailbox>,
}

impl CoreHandle {
    /// Connections it has, those on their way to it included.
    #[must_use]
    pub fn connections(&self) -> usize {
        self.mailbox.connections.load(Ordering::Relaxed)
    }

    /// Whether it still takes connections.
    #[must_use]
    pub fn is_alive(&self) -> bool {
        // Relaxed: a connection handed to a core that is just ending is dropped by whoever finds it.
        self.mailbox.alive.load(Ordering::Relaxed)
    }

    /// Hands over a connection of user `uid`, with its place among that user's. Only one thread may call it.
    ///
    /// # Errors
    /// Gives the stream back if the mailbox is full.
    pub(super) fn hand_over(&self, stream: UnixStream, uid: u32, place: UserPlace) -> Result<(), UnixStream> {
        if self.mailbox.queue.len() >= MAILBOX_MESSAGES_MAX {
            return Err(stream);
        }
        self.mailbox.connections.fetch_add(1, Ordering::Relaxed);
        match self.mailbox.queue.push(Message::Connection { stream, uid, place }) {
            Ok(()) => self.mailbox.late.arrived.notify_one(),
            Err(Message::Connection { stream, .. }) => {
                self.mailbox.connections.fetch_sub(1, Ordering::Relaxed);
                return Err(stream);
            }
            // The queue gives back what was pushed.
            Err(Message::Drain { .. } | Message::Late(_)) => {}
        }
        Ok(())
    }

    /// Asks it to end: to answer what has come in, and to cut what is still open at `deadline`. Stop the
    /// acceptor first. A second call changes nothing.
    pub fn drain(&self, deadline: Instant) {
        if self.mailbox.queue.push(Message::Drain { deadline }).is_err() {
            tracing::warn!("the core is draining already");
        }
        self.mailbox.late.arrived.notify_one();
    }
}
