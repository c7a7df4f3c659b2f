//! The admin socket: the frames of the routing protocol on the control thread, for administration.
//!
//! An answer that other threads must work on comes later: the control thread goes on meanwhile, also with the other
//! requests of the same connection. The answers that come later keep their order among each other.

use std::cell::{Cell, RefCell};
use std::fmt;
use std::path::Path;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use arc_swap::{ArcSwap, Guard};
use tokio::net::UnixListener;
use tokio::sync::mpsc;

use super::accept::{Admission, turn_away};
use super::connection::{Connection, Ended, Peer, Phase, Respond, drive};
use super::deadlines::{PeerWait, timed_out};
use super::io_backend::{EpollStream, Stream};
use super::reply_writer::ReplyWriter;
use super::responder::{Answer, Encoded, hello_again, hello_facts, require_hello};
use super::socket_file::BoundSocket;
use crate::error::{Error, Kind, Result};
use crate::fleet::FleetTable;
use crate::ids::CorrelationId;
use crate::limits::{
    ACCEPT_PAUSE_MS, ADMIN_ANSWERS_WAITING_MAX, ADMIN_CONNECTIONS_MAX, ADMIN_FRAME_BODY_BYTES_MAX, WORKERS_PAGE_MAX,
};
use crate::log_quota::LogQuota;
use crate::metrics::{CounterSet, DaemonCounter};
use crate::requests::HelloInfo;
use crate::wire::{AdminReply, AdminRequest, FrameHeader, ReplyEncoder, Request, RequestScratch, decode_request};

/// An answer to a request.
pub enum AdminAnswer {
    /// The reply.
    Now(AdminReply),
    /// The reply comes when other threads have done their part. The future may be dropped at any await; what other
    /// threads do then goes on.
    Later(Pin<Box<dyn Future<Output = Result<AdminReply>>>>),
}

/// The process that sends requests of administration, as the kernel saw it when it connected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AdminCaller {
    /// Its user.
    pub uid: u32,
    /// Its process; `None` = it has none in the daemon's namespace.
    pub pid: Option<i32>,
}

impl fmt::Display for AdminCaller {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "uid={} pid=", self.uid)?;
        match self.pid {
            Some(pid) => write!(f, "{pid}"),
            None => f.write_str("unknown"),
        }
    }
}

/// Answers the requests of the admin socket.
pub trait AdminService {
    /// The daemon's identity, for the hello reply.
    fn hello(&self) -> HelloInfo<'_>;

    /// The current fleet table, for the hello reply.
    fn fleet(&self) -> Guard<Arc<FleetTable>>;

    /// Answers a request of `caller`; the reply is the one of its name.
    ///
    /// * A status of at most `limit` workers starts at `cursor`: 0 for the first page, then `next_cursor` of the page
    ///   before. A cursor beyond the end gives an empty last page.
    /// * A change of workers is decided at once and takes effect soon.
    ///
    /// # Errors
    /// The reason for the refusal: [`Kind::InvalidArgument`] if there is no such worker, a setting is invalid, or there
    /// is no shadow policy to promote (nothing changes then); [`Kind::Overloaded`] if the ingest thread takes no command
    /// now, or an earlier request of this kind is still at work; [`Kind::System`] if a snapshot cannot be removed.
    fn answer(self: Rc<Self>, caller: AdminCaller, request: &AdminRequest<'_>) -> Result<AdminAnswer>;
}

/// A request whose answer comes later.
type Waiting = (CorrelationId, Pin<Box<dyn Future<Output = Result<AdminReply>>>>);

/// Answers the frames of one admin connection.
struct AdminResponder {
    service: Rc<dyn AdminService>,
    caller: AdminCaller,
    scratch: RequestScratch,
    encoder: ReplyEncoder,
    waiting: mpsc::Sender<Waiting>,
}

impl AdminResponder {
    /// Also the receiver of the requests whose answers come later.
    fn new(service: Rc<dyn AdminService>, caller: AdminCaller) -> (Self, mpsc::Receiver<Waiting>) {
        let (waiting, later) = mpsc::channel(ADMIN_ANSWERS_WAITING_MAX);
        (Self { service, caller, scratch: RequestScratch::default(), encoder: ReplyEncoder::default(), waiting }, later)
    }

    /// Answers one request. As in the routing socket's dispatcher, a request that no arm answers does not compile.
    fn answer(&mut self, peer: &mut Peer, header: &FrameHeader, body: &[u8], out: &mut Vec<u8>) -> Result<Answer> {
        let id = header.correlation_id;
        require_hello(peer, header)?;
        let request = decode_request(header.kind, body, &mut self.scratch)?;
        match request {
            Request::Hello(hello) => {
                if peer.phase != Phase::HelloAwaited {
                    return Err(hello_again());
                }
                let version = hello.negotiate()?;
                peer.phase = Phase::Open(None);
                let facts = hello_facts(version, &self.service.hello(), ADMIN_FRAME_BODY_BYTES_MAX);
                Ok(Answer::Reply(Encoded::reply(out, |out| self.encoder.hello(id, &facts, &self.service.fleet(), out))))
            }
            Request::Admin(request) => {
                // Before the request is carried out.
                let slot = self.waiting.try_reserve().map_err(|_| too_many_waiting())?;
                match Rc::clone(&self.service).answer(self.caller, &within_a_page(request))? {
                    AdminAnswer::Now(reply) => {
                        debug_assert_eq!(reply.kind() as u8, header.kind + 1, "the reply is the one of the request");
                        Ok(Answer::Reply(Encoded::reply(out, |out| self.encoder.admin(id, &reply, out))))
                    }
                    AdminAnswer::Later(answer) => {
                        slot.send((id, answer));
                        Ok(Answer::Queued)
                    }
                }
            }
            Request::Route(_)
            | Request::Overlap(_)
            | Request::PotentialLoads(_)
            | Request::Workers { .. }
            | Request::Watch { .. }
            | Request::OpenLane(_)
            | Request::PrefillComplete { .. }
            | Request::OutputProgress { .. }
            | Request::Served { .. }
            | Request::ReportLoad { .. }
            | Request::ReportFailure { .. }
            | Request::Free(_) => {
                let remedy = "send it to the routing socket";
                Err(Error::new(Kind::Unsupported, "the admin socket answers administration only", remedy))
            }
        }
    }
}

fn too_many_waiting() -> Error {
    let problem = format!("{ADMIN_ANSWERS_WAITING_MAX} requests of this connection wait for their answers");
    Error::new(Kind::Overloaded, problem, "read their answers first")
}

/// Writes the answers that come later, each when it is there. Returns only if the connection fails, or if its peer has
/// not taken an answer within the timeout (zero = for ever).
async fn answer_later<S: Stream>(
    (stream, timeout): (&S, Duration),
    responder: &RefCell<AdminResponder>,
    later: &mut mpsc::Receiver<Waiting>,
    writer: &ReplyWriter,
) -> Ended {
    while let Some((id, answer)) = later.recv().await {
        let answer = answer.await;
        let mut out = Vec::new();
        match answer {
            Ok(reply) => responder.borrow_mut().encoder.admin(id, &reply, &mut out),
            Err(error) => responder.borrow_mut().refuse(id, &error, &mut out),
        }
        let write = writer.write_all(stream, out);
        let written = match timeout.is_zero() {
            true => Ok(write.await),
            false => tokio::time::timeout(timeout, write).await,
        };
        match written {
            Ok((Ok(()), _)) => {}
            Ok((Err(error), _)) => return Ended::Failed(error),
            Err(_) => return Ended::Unread,
        }
    }
    // Never: the responder holds the sender.
    std::future::pending().await
}

/// The same request; a status for at most one page of workers.
fn within_a_page(request: AdminRequest<'_>) -> AdminRequest<'_> {
    match request {
        AdminRequest::Status { cursor, limit } => {
            let most = WORKERS_PAGE_MAX as u32;
            AdminRequest::Status { cursor, limit: if limit == 0 { most } else { limit.min(most) } }
        }
        other => other,
    }
}

impl Respond for AdminResponder {
    fn respond(&mut self, peer: &mut Peer, header: &FrameHeader, body: &[u8], out: &mut Vec<u8>) {
        match self.answer(peer, header, body, out) {
            Ok(_) => {}
            Err(error) => self.refuse(header.correlation_id, &error, out),
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
    service: Rc<dyn AdminService>,
    /// Of the errors for connections that are refused.
    encoder: RefCell<ReplyEncoder>,
    open: Rc<Cell<usize>>,
    admission: Arc<ArcSwap<Admission>>,
    /// The longest wait for input of a peer, or for space for its replies; zero = for ever.
    frame_timeout: Duration,
    counters: Arc<CounterSet<DaemonCounter>>,
    log_quota: Rc<LogQuota>,
    // Last: the file goes after the listener.
    socket: BoundSocket,
}

impl AdminServer {
    /// A server on `socket`. Call it inside a tokio runtime.
    ///
    /// # Errors
    /// [`Kind::System`] if the runtime cannot watch the socket.
    pub fn new(
        socket: BoundSocket,
        service: Rc<dyn AdminService>,
        counters: Arc<CounterSet<DaemonCounter>>,
    ) -> Result<Self> {
        let listener = socket.listen_async()?;
        Ok(Self {
            listener,
            service,
            encoder: RefCell::default(),
            open: Rc::default(),
            admission: Arc::new(ArcSwap::from_pointee(Admission::by_mode("admin"))),
            frame_timeout: Duration::ZERO,
            counters,
            log_quota: Rc::default(),
            socket,
        })
    }

    /// The same for the users that `admission` lists at the time of each connection. A peer has `frame_timeout_ms` for
    /// hello, for the rest of a frame, and to take a reply; 0 = for ever.
    #[must_use]
    pub fn admitting(mut self, admission: Arc<ArcSwap<Admission>>, frame_timeout_ms: u64) -> Self {
        self.admission = admission;
        self.frame_timeout = Duration::from_millis(frame_timeout_ms);
        self
    }

    /// The path of its socket file.
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
                    tokio::time::sleep(Duration::from_millis(ACCEPT_PAUSE_MS)).await;
                }
            }
        }
    }

    fn admit(&self, stream: tokio::net::UnixStream) {
        let credentials = match stream.peer_cred() {
            Ok(credentials) => credentials,
            Err(error) => return self.fail(&error),
        };
        let (uid, pid) = (credentials.uid(), credentials.pid().filter(|pid| *pid > 0));
        if let Err(error) = self.admission.load().admit(&stream, &credentials) {
            return self.refuse(&stream, &error, DaemonCounter::AdminConnectionsNotPermitted, uid);
        }
        if self.open.get() >= ADMIN_CONNECTIONS_MAX {
            let remedy = "close idle admin connections";
            let error = Error::new(Kind::Overloaded, "too many admin connections are open", remedy);
            return self.refuse(&stream, &error, DaemonCounter::AdminConnectionsRefused, uid);
        }
        match stream.into_std().and_then(EpollStream::from_std) {
            Ok(stream) => self.serve(stream, AdminCaller { uid, pid }),
            Err(error) => self.fail(&error),
        }
    }

    fn fail(&self, error: &std::io::Error) {
        self.counters.bump(DaemonCounter::AdminConnectionsRefused);
        if let Some(withheld) = self.log_quota.take(Instant::now()) {
            tracing::warn!(%error, withheld, "cannot serve an admin connection");
        }
    }

    fn refuse(&self, stream: &tokio::net::UnixStream, error: &Error, counter: DaemonCounter, uid: u32) {
        self.counters.bump(counter);
        if let Some(withheld) = self.log_quota.take(Instant::now()) {
            tracing::warn!(uid, %error, withheld, "an admin connection is refused");
        }
        turn_away(stream, error, &mut self.encoder.borrow_mut());
    }

    /// Answers a connection in a task of its own.
    fn serve(&self, stream: EpollStream, caller: AdminCaller) {
        let uid = caller.uid;
        self.open.set(self.open.get() + 1);
        let counted = OpenConnectionGuard(Rc::clone(&self.open));
        let (responder, mut later) = AdminResponder::new(Rc::clone(&self.service), caller);
        let (responder, log_quota) = (RefCell::new(responder), Rc::clone(&self.log_quota));
        let (frame_timeout, counters) = (self.frame_timeout, Arc::clone(&self.counters));
        tokio::task::spawn_local(async move {
            let _counted = counted;
            let connection = RefCell::new(Connection::new(uid, ADMIN_FRAME_BODY_BYTES_MAX));
            let (peer_wait, writer) = (connection.borrow().peer_wait(), ReplyWriter::default());
            // A read or write on epoll may be dropped.
            let ended = tokio::select! {
                ended = drive(&stream, &responder, &connection, &writer, None) => ended,
                ended = answer_later((&stream, frame_timeout), &responder, &mut later, &writer) => ended,
                peer_wait = timed_out(&peer_wait, frame_timeout), if !frame_timeout.is_zero() => {
                    counters.bump(DaemonCounter::AdminConnectionsOverdue);
                    if let Some(withheld) = log_quota.take(Instant::now()) {
                        tracing::warn!(uid, ?peer_wait, withheld, "an admin connection is closed: its peer has timed out");
                    }
                    return send_timeout_error(&stream, peer_wait, frame_timeout, &mut responder.borrow_mut().encoder);
                }
            };
            if matches!(ended, Ended::Unread) {
                counters.bump(DaemonCounter::AdminConnectionsOverdue);
            }
            if ended.is_peer_leaving() {
                tracing::debug!(uid, %ended, "an admin connection has ended");
            } else if let Some(withheld) = log_quota.take(Instant::now()) {
                tracing::warn!(uid, %ended, withheld, "an admin connection is closed");
            }
        });
    }
}

/// Sends a peer the timeout error, unless a half-written reply precedes it.
fn send_timeout_error(stream: &EpollStream, peer_wait: PeerWait, frame_timeout: Duration, encoder: &mut ReplyEncoder) {
    if let Some(error) = peer_wait.timeout_error(frame_timeout) {
        turn_away(stream, &error, encoder);
    }
}

/// One of the open connections.
struct OpenConnectionGuard(Rc<Cell<usize>>);

impl Drop for OpenConnectionGuard {
    fn drop(&mut self) {
        self.0.set(self.0.get() - 1);
    }
}
