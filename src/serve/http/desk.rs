//! Where HTTP requests become requests of the routing protocol: one more gateway, in the daemon itself. It says hello,
//! has a session in which everything is booked, and is answered, at once or late, by the code that answers sockets.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;
use rustc_hash::FxHashMap;
use tokio::sync::oneshot;

use crate::error::{Error, Kind, Result};
use crate::ids::CorrelationId;
use crate::limits::{FRAME_BODY_BYTES_CEILING, FRAME_HEADER_BYTES};
use crate::load::{BookingRef, SessionId};
use crate::metrics::{CoreCounter, CounterSet, HttpCounter};
use crate::queue::Ticket;
use crate::serve::connection::{Peer, Phase, Respond, TransportKind};
use crate::serve::request_queue::{Booked, QueueInbox, QueueMessage};
use crate::serve::responder::RoutingResponder;
use crate::serve::service::Service;
use crate::shares::HTTP_USER;
use crate::wire::{FrameHeader, Reply, RequestEncoder, decode_reply};

/// What answers, beside frames.
trait Answering: Respond + Send {
    fn forget_queued(&mut self, connection: u64, ticket: Ticket);
    fn free_undelivered(&mut self, session: SessionId, booked: Booked);
    fn dispatch_queued(&mut self);
    fn recheck_queue(&mut self);
    fn drain_queue(&self);
    fn output(&self, session: SessionId, booking: &BookingRef<'_>) -> Option<(u32, u32)>;
}

impl<S: Service + Send> Answering for RoutingResponder<S> {
    fn forget_queued(&mut self, connection: u64, ticket: Ticket) {
        Self::forget_queued(self, connection, ticket);
    }

    fn free_undelivered(&mut self, session: SessionId, booked: Booked) {
        Self::free_undelivered(self, session, booked);
    }

    fn dispatch_queued(&mut self) {
        Self::dispatch_queued(self, None);
    }

    fn recheck_queue(&mut self) {
        Self::recheck_queue(self);
    }

    fn drain_queue(&self) {
        Self::drain_queue(self);
    }

    fn output(&self, session: SessionId, booking: &BookingRef<'_>) -> Option<(u32, u32)> {
        self.service.booked_output(session, booking)
    }
}

/// The gateway of one HTTP port. Used by one thread, so nobody ever waits for its locks, which are held for no await.
pub(super) struct Desk {
    answering: Mutex<Box<dyn Answering>>,
    late: Arc<QueueInbox>,
    /// Who waits for a late reply, by the number of its connection: each request is a connection of its own.
    waiting: Mutex<FxHashMap<u64, oneshot::Sender<Vec<u8>>>>,
    next_connection: AtomicU64,
    peer: Mutex<Peer>,
    session: SessionId,
    core_counters: Arc<CounterSet<CoreCounter>>,
    counters: Arc<CounterSet<HttpCounter>>,
}

impl Desk {
    /// Opens a session with `service`, as core number `core`.
    ///
    /// # Errors
    /// Why the service opens none.
    pub(super) fn open<S: Service + Send + 'static>(
        service: S,
        core: usize,
        core_counters: Arc<CounterSet<CoreCounter>>,
        counters: Arc<CounterSet<HttpCounter>>,
    ) -> Result<Self> {
        let late = Arc::<QueueInbox>::default();
        let responder = RoutingResponder::new(service, Arc::clone(&core_counters), FRAME_BODY_BYTES_CEILING);
        let mut answering: Box<dyn Answering> = Box::new(responder.on_core(core, &late));
        let mut peer = peer_of(0, HTTP_USER, Phase::HelloAwaited);
        let mut frame = Vec::new();
        RequestEncoder::default().hello(CorrelationId(0), "http", None, &mut frame);
        let (header, body) = split(&frame)?;
        let mut reply = Vec::new();
        answering.respond(&mut peer, &header, body, &mut reply);
        decoded(&reply)?;
        let Phase::Open(Some(session)) = peer.phase else { return Err(broken()) };
        Ok(Self {
            answering: Mutex::new(answering),
            late,
            waiting: Mutex::default(),
            next_connection: AtomicU64::new(1),
            peer: Mutex::new(peer),
            session,
            core_counters,
            counters,
        })
    }

    /// Asks one thing, and waits for the reply. Whoever drops this has nothing booked.
    pub(super) async fn ask(
        &self,
        encode: impl FnOnce(&mut RequestEncoder, &mut Vec<u8>) -> Result<()>,
    ) -> Result<Reply> {
        let mut frame = Vec::new();
        encode(&mut RequestEncoder::default(), &mut frame)?;
        let (header, body) = split(&frame)?;
        // Relaxed: the number is all there is.
        let connection = self.next_connection.fetch_add(1, Ordering::Relaxed);
        let (send, late) = oneshot::channel();
        self.waiting.lock().insert(connection, send);
        let mut asking = Asking { desk: self, connection, late, is_answered: false };
        let mut reply = Vec::new();
        let mut peer = self.peer_of(connection, Phase::Open(Some(self.session)));
        self.answering.lock().respond(&mut peer, &header, body, &mut reply);
        if reply.is_empty() {
            reply = (&mut asking.late).await.map_err(|_| broken())?;
        }
        asking.is_answered = true;
        decoded(&reply)
    }

    /// How many tokens a live booking is known to have put out, and how many make a block; 0 = output is not counted.
    pub(super) fn output(&self, booking: &BookingRef<'_>) -> Option<(u32, u32)> {
        self.answering.lock().output(self.session, booking)
    }

    /// Passes on late replies, and serves who waits where it is told to, for ever.
    pub(super) async fn serve_late(&self) {
        loop {
            while let Some(late) = self.late.pop() {
                self.take(late);
                tokio::task::yield_now().await;
            }
            self.late.arrived.notified().await;
        }
    }

    /// Nobody waits any more, here or on a core.
    pub(super) fn drain(&self) {
        self.answering.lock().drain_queue();
    }

    fn take(&self, late: QueueMessage) {
        let mut answering = self.answering.lock();
        match late {
            QueueMessage::Dispatch => answering.dispatch_queued(),
            QueueMessage::Recheck => answering.recheck_queue(),
            QueueMessage::Reply { connection, ticket, frame, session, booked } => {
                answering.forget_queued(connection, ticket);
                let waiting = self.waiting.lock().remove(&connection);
                match waiting.map(|waiting| waiting.send(frame)) {
                    Some(Ok(())) => self.core_counters.bump(CoreCounter::Requests),
                    Some(Err(_)) | None => answering.free_undelivered(session, booked),
                }
            }
        }
    }

    fn peer_of(&self, connection: u64, phase: Phase) -> Peer {
        peer_of(connection, self.peer.lock().uid, phase)
    }
}

impl Drop for Desk {
    fn drop(&mut self) {
        self.answering.get_mut().closed(self.peer.get_mut());
    }
}

/// A request that is not answered yet.
struct Asking<'a> {
    desk: &'a Desk,
    connection: u64,
    late: oneshot::Receiver<Vec<u8>>,
    is_answered: bool,
}

impl Drop for Asking<'_> {
    fn drop(&mut self) {
        self.desk.waiting.lock().remove(&self.connection);
        if self.is_answered {
            return;
        }
        // Not the session's end: that is the desk's own peer's.
        let mut peer = self.desk.peer_of(self.connection, Phase::HelloAwaited);
        self.desk.answering.lock().closed(&mut peer);
        self.desk.counters.bump(HttpCounter::Unwanted);
        // Decided, and nobody is there to be told.
        if let Ok(Ok(Reply::Route(route))) = self.late.try_recv().map(|frame| decoded(&frame)) {
            let booked = [route.booking, route.prefill_booking];
            self.desk.answering.lock().free_undelivered(self.desk.session, booked);
        }
    }
}

/// Nothing is ever opened beside a request that comes by HTTP.
const fn peer_of(connection: u64, uid: u32, phase: Phase) -> Peer {
    Peer { connection, uid, phase, transport: TransportKind::Socket, descriptors: None }
}

fn split(frame: &[u8]) -> Result<(FrameHeader, &[u8])> {
    let (header, body) = frame.split_first_chunk::<FRAME_HEADER_BYTES>().ok_or_else(broken)?;
    let header = FrameHeader::parse(header).map_err(|_| broken())?;
    Ok((header, body))
}

fn decoded(frame: &[u8]) -> Result<Reply> {
    let (header, body) = split(frame)?;
    match decode_reply(header.kind, body)? {
        Reply::Error(remote) => {
            let retry_after_us = remote.retry_after_us;
            let error = Error::from(remote);
            Err(if retry_after_us == 0 { error } else { error.retry_after_us(retry_after_us) })
        }
        reply => Ok(reply),
    }
}

/// The daemon does not speak its own protocol.
pub(super) fn broken() -> Error {
    Error::new(Kind::Internal, "the request was not answered as it should be", "report it with the log's last lines")
}
