//! The admin socket: the same frames on plain tokio, on the control thread, for administration.

use std::cell::{Cell, RefCell};
use std::path::Path;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use arc_swap::{ArcSwap, Guard};
use tokio::net::UnixListener;

use super::accept::Admission;
use super::accept::turn_away;
use super::connection::drive;
use super::connection::{Connection, Peer, Phase, Respond};
use super::deadlines::{Owed, overdue};
use super::io_backend::EpollStream;
use super::io_backend::Stream;
use super::log_quota::LogQuota;
use super::reply_writer::Outlet;
use super::responder::{hello_again, hello_facts, require_hello};
use super::service::HelloInfo;
use super::socket_file::BoundSocket;
use crate::error::{Error, Kind, Result};
use crate::fleet::FleetTable;
use crate::ids::CorrelationId;
use crate::limits::{ACCEPT_REST_MS, ADMIN_CONNECTIONS_MAX, ADMIN_FRAME_BODY_BYTES_MAX, WORKERS_PAGE_MAX};
use crate::metrics::{CounterSet, DaemonCounter};
use crate::wire::{
    FrameHeader, PolicyDone, PolicyOrder, ReplyEncoder, Request, RequestScratch, ResetDone, ResetOrder, StatusPage,
    WorkerChange, decode_request,
};

/// What answers on the admin socket.
pub trait AdminService {
    /// The daemon's identity, for the hello reply.
    fn hello(&self) -> HelloInfo<'_>;

    /// The current fleet table, for the hello reply.
    fn fleet(&self) -> Guard<Arc<FleetTable>>;

    /// The page of at most `limit` workers that starts at `cursor`: 0 at first, then what the page before
    /// gave as its `next_cursor`. A cursor beyond the end gives an empty last page.
    fn status_page(&self, cursor: u32, limit: usize) -> StatusPage;

    /// Adds, removes or changes a worker; answers with how many. It is decided at once and done soon.
    ///
    /// # Errors
    /// Why not, by name.
    fn change_worker(&self, change: &WorkerChange<'_>) -> Result<u32>;

    /// Forgets the blocks of a worker, or of every worker, and removes their snapshots.
    ///
    /// # Errors
    /// [`Kind::InvalidArgument`] if there is no such worker, [`Kind::Overloaded`] if it cannot be asked for now,
    /// [`Kind::System`] if a snapshot cannot be removed.
    fn reset(&self, order: ResetOrder) -> Result<ResetDone>;

    /// Sets, promotes or ends a shadow policy.
    ///
    /// # Errors
    /// [`Kind::InvalidArgument`] if a setting is refused, or there is no shadow policy to promote; nothing changes then.
    fn set_policy(&self, order: &PolicyOrder<'_>) -> Result<PolicyDone>;
}

/// Answers the frames of admin connections.
pub struct AdminResponder {
    service: Rc<dyn AdminService>,
    scratch: RequestScratch,
    encoder: ReplyEncoder,
}

impl AdminResponder {
    /// Answers by `service`.
    #[must_use]
    pub fn new(service: Rc<dyn AdminService>) -> Self {
        Self { service, scratch: RequestScratch::default(), encoder: ReplyEncoder::default() }
    }

    fn answer(&mut self, peer: &mut Peer, header: &FrameHeader, body: &[u8], out: &mut Vec<u8>) -> Result<()> {
        let id = header.correlation_id;
        require_hello(peer, header)?;
        let request = decode_request(header.kind, body, &mut self.scratch)?;
        match request {
            Request::Hello(_) if peer.phase != Phase::HelloAwaited => return Err(hello_again()),
            Request::Hello(hello) => {
                let version = hello.negotiate()?;
                peer.phase = Phase::Open(None);
                let facts = hello_facts(version, &self.service.hello(), ADMIN_FRAME_BODY_BYTES_MAX);
                self.encoder.hello(id, &facts, &self.service.fleet(), out);
            }
            Request::Status { cursor, limit } => {
                let limit = if limit == 0 { WORKERS_PAGE_MAX } else { (limit as usize).min(WORKERS_PAGE_MAX) };
                self.encoder.status(id, &self.service.status_page(cursor, limit), out);
            }
            Request::ChangeWorker(change) => {
                let workers = self.service.change_worker(&change)?;
                self.encoder.change_worker(id, workers, out);
            }
            Request::Reset(order) => {
                let done = self.service.reset(order)?;
                self.encoder.reset(id, done, out);
            }
            Request::SetPolicy(order) => {
                let done = self.service.set_policy(&order)?;
                self.encoder.set_policy(id, done, out);
            }
            _ => {
                let remedy = "ask on the routing socket";
                return Err(Error::new(Kind::Unsupported, "the admin socket answers administration only", remedy));
            }
        }
        Ok(())
    }
}

impl Respond for AdminResponder {
    fn respond(&mut self, peer: &mut Peer, header: &FrameHeader, body: &[u8], out: &mut Vec<u8>) {
        if let Err(error) = self.answer(peer, header, body, out) {
            self.refuse(header.correlation_id, &error, out);
        }
    }

    fn refuse(&mut self, id: CorrelationId, error: &Error, out: &mut Vec<u8>) {
        tracing::debug!(%error, "an admin request is refused");
        self.encoder.error(id, error, out);
    }

    fn closed(&mut self, peer: &mut Peer) {
        peer.phase = Phase::HelloAwaited;
    }
}

/// The admin socket and its connections.
pub struct AdminServer {
    listener: UnixListener,
    responder: Rc<RefCell<AdminResponder>>,
    open: Rc<Cell<usize>>,
    admission: Arc<ArcSwap<Admission>>,
    /// How long a peer may owe something; zero = for ever.
    patience: Duration,
    counters: Arc<CounterSet<DaemonCounter>>,
    log_quota: Rc<LogQuota>,
    // Last: the file goes once nobody listens.
    socket: BoundSocket,
}

impl AdminServer {
    /// A server on `socket`. Call it inside a tokio runtime.
    ///
    /// # Errors
    /// [`Kind::System`] if the socket cannot be waited on.
    pub fn new(
        socket: BoundSocket,
        service: Rc<dyn AdminService>,
        counters: Arc<CounterSet<DaemonCounter>>,
    ) -> Result<Self> {
        let listener = socket.listen_async()?;
        let responder = Rc::new(RefCell::new(AdminResponder::new(service)));
        Ok(Self {
            listener,
            responder,
            open: Rc::default(),
            admission: Arc::new(ArcSwap::from_pointee(Admission::by_mode("admin"))),
            patience: Duration::ZERO,
            counters,
            log_quota: Rc::default(),
            socket,
        })
    }

    /// The same for those whom `admission` admits at the time, and who are not late by `frame_timeout_ms` with a frame,
    /// with hello or with taking a reply; 0 = whenever they are done.
    #[must_use]
    pub fn admitting(mut self, admission: Arc<ArcSwap<Admission>>, frame_timeout_ms: u64) -> Self {
        self.admission = admission;
        self.patience = Duration::from_millis(frame_timeout_ms);
        self
    }

    /// Where it listens.
    #[must_use]
    pub fn path(&self) -> &Path {
        self.socket.path()
    }

    /// Serves until dropped, at any await, which also ends its connections.
    pub async fn run(&self) {
        tokio::task::LocalSet::new().run_until(self.accept()).await;
    }

    async fn accept(&self) {
        loop {
            match self.listener.accept().await {
                Ok((stream, _)) => self.admit(stream),
                Err(error) => {
                    if let Some(withheld) = self.log_quota.take(Instant::now()) {
                        tracing::error!(%error, withheld, "cannot accept admin connections; they wait");
                    }
                    tokio::time::sleep(Duration::from_millis(ACCEPT_REST_MS)).await;
                }
            }
        }
    }

    fn admit(&self, stream: tokio::net::UnixStream) {
        let credentials = match stream.peer_cred() {
            Ok(credentials) => credentials,
            Err(error) => return self.fail(&error),
        };
        let uid = credentials.uid();
        if let Err(error) = self.admission.load().admit(&stream, &credentials) {
            return self.refuse(&stream, &error, DaemonCounter::AdminConnectionsNotPermitted, uid);
        }
        if self.open.get() >= ADMIN_CONNECTIONS_MAX {
            let remedy = "close those that are done";
            let error = Error::new(Kind::Overloaded, "too many admin connections are open", remedy);
            return self.refuse(&stream, &error, DaemonCounter::AdminConnectionsRefused, uid);
        }
        match stream.into_std().and_then(EpollStream::from_std) {
            Ok(stream) => self.serve(stream, uid),
            Err(error) => self.fail(&error),
        }
    }

    fn fail(&self, error: &std::io::Error) {
        self.counters.bump(DaemonCounter::AdminConnectionsRefused);
        if let Some(withheld) = self.log_quota.take(Instant::now()) {
            tracing::warn!(%error, withheld, "an admin connection cannot be taken over");
        }
    }

    fn refuse(&self, stream: &tokio::net::UnixStream, error: &Error, counter: DaemonCounter, uid: u32) {
        self.counters.bump(counter);
        if let Some(withheld) = self.log_quota.take(Instant::now()) {
            tracing::warn!(uid, %error, withheld, "an admin connection is refused");
        }
        turn_away(stream, error, &mut self.responder.borrow_mut().encoder);
    }

    /// Answers a connection in a task of its own.
    fn serve(&self, stream: EpollStream, uid: u32) {
        self.open.set(self.open.get() + 1);
        let counted = CountedUntilDrop(Rc::clone(&self.open));
        let (responder, log_quota) = (Rc::clone(&self.responder), Rc::clone(&self.log_quota));
        let (patience, counters) = (self.patience, Arc::clone(&self.counters));
        tokio::task::spawn_local(async move {
            let _counted = counted;
            let connection = RefCell::new(Connection::new(uid, ADMIN_FRAME_BODY_BYTES_MAX));
            let (owed, outlet) = (connection.borrow().owed(), Outlet::default());
            // A read or write of this engine may be given up.
            let ended = tokio::select! {
                ended = drive(&stream, &responder, &connection, &outlet, None) => ended,
                owed = overdue(&owed, patience), if !patience.is_zero() => {
                    counters.bump(DaemonCounter::AdminConnectionsOverdue);
                    if let Some(withheld) = log_quota.take(Instant::now()) {
                        tracing::warn!(uid, ?owed, withheld, "an admin connection is closed: its peer is late");
                    }
                    return say_overdue(&stream, owed, patience, &mut responder.borrow_mut().encoder);
                }
            };
            if ended.is_peer_leaving() {
                tracing::debug!(uid, %ended, "an admin connection has ended");
            } else if let Some(withheld) = log_quota.take(Instant::now()) {
                tracing::warn!(uid, %ended, withheld, "an admin connection is closed");
            }
        });
    }
}

/// Tells a peer why it is left, unless a reply lies half written before it.
fn say_overdue(stream: &EpollStream, owed: Owed, patience: Duration, encoder: &mut ReplyEncoder) {
    if let Some(error) = owed.reproach(patience) {
        turn_away(stream, &error, encoder);
    }
}

struct CountedUntilDrop(Rc<Cell<usize>>);

impl Drop for CountedUntilDrop {
    fn drop(&mut self) {
        self.0.set(self.0.get() - 1);
    }
}
