//! The admin socket: the same frames on plain tokio, on the control thread, for administration.

use std::cell::{Cell, RefCell};
use std::path::Path;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use arc_swap::Guard;
use tokio::net::UnixListener;

use super::acceptor::turn_away;
use super::connection::{Connection, Peer, Phase, Respond};
use super::engine::{Stream, drive};
use super::epoll::EpollStream;
use super::log_quota::LogQuota;
use super::outlet::Outlet;
use super::responder::{hello_again, hello_facts, require_hello};
use super::service::HelloInfo;
use super::socket_file::BoundSocket;
use crate::error::{Error, Kind, Result};
use crate::fleet::FleetTable;
use crate::ids::{CorrelationId, Worker};
use crate::limits::{ACCEPT_REST_MS, ADMIN_CONNECTIONS_MAX, FRAME_BODY_BYTES_MAX_DEFAULT, WORKERS_PAGE_MAX};
use crate::metrics::{CounterSet, DaemonCounter};
use crate::wire::{
    FrameHeader, PolicyDone, PolicyOrder, ReplyEncoder, Request, RequestScratch, ResetDone, StatusPage, WorkerChange,
    decode_request,
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
    fn reset(&self, worker: Option<Worker>) -> Result<ResetDone>;

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
                let facts = hello_facts(version, &self.service.hello(), FRAME_BODY_BYTES_MAX_DEFAULT);
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
            Request::Reset(worker) => {
                let done = self.service.reset(worker)?;
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
        Ok(Self { listener, responder, open: Rc::default(), counters, log_quota: Rc::default(), socket })
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
        if self.open.get() >= ADMIN_CONNECTIONS_MAX {
            self.counters.bump(DaemonCounter::AdminConnectionsRefused);
            if let Some(withheld) = self.log_quota.take(Instant::now()) {
                tracing::warn!(withheld, "an admin connection is refused: too many are open");
            }
            let remedy = "close those that are done";
            let error = Error::new(Kind::Overloaded, "too many admin connections are open", remedy);
            turn_away(&stream, &error, &mut self.responder.borrow_mut().encoder);
            return;
        }
        let taken = stream.peer_cred().and_then(|peer| Ok((peer.uid(), EpollStream::from_std(stream.into_std()?)?)));
        let (uid, stream) = match taken {
            Ok(taken) => taken,
            Err(error) => {
                self.counters.bump(DaemonCounter::AdminConnectionsRefused);
                if let Some(withheld) = self.log_quota.take(Instant::now()) {
                    tracing::warn!(%error, withheld, "an admin connection cannot be taken over");
                }
                return;
            }
        };
        self.open.set(self.open.get() + 1);
        let counted = CountedUntilDrop(Rc::clone(&self.open));
        let (responder, log_quota) = (Rc::clone(&self.responder), Rc::clone(&self.log_quota));
        tokio::task::spawn_local(async move {
            let _counted = counted;
            let connection = RefCell::new(Connection::new(uid, FRAME_BODY_BYTES_MAX_DEFAULT));
            let ended = drive(&stream, &responder, &connection, &Outlet::default(), None).await;
            if ended.is_peer_leaving() {
                tracing::debug!(uid, %ended, "an admin connection has ended");
            } else if let Some(withheld) = log_quota.take(Instant::now()) {
                tracing::warn!(uid, %ended, withheld, "an admin connection is closed");
            }
        });
    }
}

struct CountedUntilDrop(Rc<Cell<usize>>);

impl Drop for CountedUntilDrop {
    fn drop(&mut self) {
        self.0.set(self.0.get() - 1);
    }
}
