//! A bare connection: requests are written to a socket or a lane, and replies are read from it.
//!
//! ```text
//! Client ─▶ link (a socket, and how it is waited for) ─▶ inbox (bytes into replies)
//!               └▶ lane (shared memory in place of it)
//! ```

mod administration;
mod inbox;
mod lane;
mod link;
mod options;
mod questions;
mod reports;
mod watch;

use std::collections::VecDeque;
use std::path::{Path, PathBuf};

use link::Link;

use super::{no_progress, spaces, unexpected};
use crate::error::{Error, Kind, Result};
use crate::ids::{CorrelationId, SpaceId};
use crate::protocol::{BookingOutcome, BookingRef, PoolRole, RouteRequest};
use crate::wire::{
    HelloReply, OverlapReply, PROTOCOL_VERSION, Reply, RequestEncoder, RouteReply, SpaceInfo, WorkerInfo, WorkersPage,
};
pub use options::{ClientOptions, LaneUse};
pub use watch::Watch;

/// Bytes of queued requests that are sent without waiting for [`Client::flush`].
const SEND_BUFFER_BYTES: usize = 64 << 10;

/// A connection to a daemon.
#[derive(Debug)]
pub struct Client {
    link: Link,
    encoder: RequestEncoder,
    /// Encoded and not yet sent.
    unsent: Vec<u8>,
    /// Came while another reply was waited for.
    early: VecDeque<(CorrelationId, Reply)>,
    next_id: u64,
    hello: HelloReply,
    lane_refusal: Option<Error>,
}

impl Client {
    /// Connects to the socket at `path` and says hello.
    ///
    /// # Errors
    /// [`Kind::Connection`] if nobody answers there, or the daemon's own error.
    pub fn connect(path: &Path, options: &ClientOptions) -> Result<Self> {
        let link = Link::connect(path, options.timeout, options.spin)?;
        let hello = HelloReply {
            version: 0,
            instance_id: 0,
            limits: crate::wire::ServerLimits::default(),
            features: 0,
            spaces: Vec::new(),
            admin_socket: None,
        };
        let (encoder, unsent, early) = (RequestEncoder::default(), Vec::new(), VecDeque::new());
        let mut client = Self { link, encoder, unsent, early, next_id: 1, hello, lane_refusal: None };
        let id = client.take_id();
        client.encoder.hello(id, &options.name, options.session, &mut client.unsent);
        client.flush()?;
        // The first reply answers hello, or says why the connection is refused (then with id 0).
        client.hello = match client.recv()?.1 {
            Reply::Hello(hello) if hello.version == PROTOCOL_VERSION => hello,
            Reply::Error(error) => return Err(error.into()),
            other => return Err(unexpected("hello", &other)),
        };
        client.begin_lane(options.lane, options.spin)?;
        Ok(client)
    }

    /// Connects to the admin socket: `path` may be it or the routing socket, which then says where it is.
    ///
    /// # Errors
    /// As [`Client::connect`]; [`Kind::Unsupported`] if the daemon has no admin socket.
    pub fn connect_admin(path: &Path, options: &ClientOptions) -> Result<Self> {
        // A session is the routing socket's affair; none is opened to ask a question.
        let options = ClientOptions { session: None, lane: LaneUse::Off, ..options.clone() };
        let client = Self::connect(path, &options)?;
        let Some(admin) = client.hello.admin_socket.clone() else {
            return Err(Error::new(Kind::Unsupported, "the daemon has no admin socket", "start it with one"));
        };
        if is_same_file(path, &admin) {
            return Ok(client);
        }
        Self::connect(&beside(path, admin), &options)
    }

    /// What the daemon said of itself.
    #[must_use]
    pub fn hello(&self) -> &HelloReply {
        &self.hello
    }

    /// The space of `model`, in `namespace` if given.
    ///
    /// # Errors
    /// [`Kind::UnknownSpace`] with the models there are, or if more than one space fits.
    pub fn space(&self, model: &str, namespace: Option<&str>) -> Result<&SpaceInfo> {
        self.pool(model, namespace, None)
    }

    /// The same of one pool of the model, where it has several.
    ///
    /// # Errors
    /// As [`Client::space`].
    pub fn pool(&self, model: &str, namespace: Option<&str>, role: Option<PoolRole>) -> Result<&SpaceInfo> {
        spaces::find(self.hello.spaces.iter(), model, namespace, role)
    }

    /// Queues a route; its reply comes by [`Client::recv`].
    ///
    /// # Errors
    /// [`Kind::InvalidArgument`] if no frame can hold it; [`Kind::Connection`].
    pub fn send_route(&mut self, request: &RouteRequest<'_>) -> Result<CorrelationId> {
        let id = self.take_id();
        self.encoder.route(id, request, &mut self.unsent)?;
        if self.unsent.len() >= SEND_BUFFER_BYTES {
            self.flush()?;
        }
        Ok(id)
    }

    /// Sends what is queued.
    ///
    /// # Errors
    /// [`Kind::Connection`].
    pub fn flush(&mut self) -> Result<()> {
        let sent = self.link.send(&self.unsent);
        self.unsent.clear();
        sent
    }

    /// Sends what is queued and waits for the next reply. An error of the daemon is a reply.
    ///
    /// # Errors
    /// [`Kind::Connection`] if the daemon is gone or silent for too long; [`Kind::Malformed`] if it sends
    /// what cannot be read.
    pub fn recv(&mut self) -> Result<(CorrelationId, Reply)> {
        if let Some(reply) = self.early.pop_front() {
            return Ok(reply);
        }
        self.flush()?;
        self.link.recv()
    }

    /// Asks which worker should run a prompt.
    ///
    /// # Errors
    /// The daemon's, or the connection's.
    pub fn route(&mut self, request: &RouteRequest<'_>) -> Result<RouteReply> {
        let id = self.send_route(request)?;
        match self.reply_to(id)? {
            Reply::Route(reply) => Ok(reply),
            other => Err(unexpected("route", &other)),
        }
    }

    /// Asks who holds how much of a prompt; only what says which prompt in which space matters.
    ///
    /// # Errors
    /// The daemon's, or the connection's.
    pub fn overlap(&mut self, request: &RouteRequest<'_>) -> Result<OverlapReply> {
        let id = self.take_id();
        self.encoder.overlap(id, request, &mut self.unsent)?;
        match self.reply_to(id)? {
            Reply::Overlap(reply) => Ok(reply),
            other => Err(unexpected("overlap", &other)),
        }
    }

    /// Reports that a booked request's prefill is done.
    ///
    /// # Errors
    /// The daemon's, or the connection's.
    pub fn prefill_complete(&mut self, booking: &BookingRef<'_>) -> Result<BookingOutcome> {
        let id = self.take_id();
        self.encoder.prefill_complete(id, booking, 0, &mut self.unsent);
        match self.reply_to(id)? {
            Reply::PrefillComplete(outcome) => Ok(outcome),
            other => Err(unexpected("prefill_complete", &other)),
        }
    }

    /// Reports that a booked request is done.
    ///
    /// # Errors
    /// The daemon's, or the connection's.
    pub fn free(&mut self, booking: &BookingRef<'_>) -> Result<BookingOutcome> {
        let id = self.send_free(booking)?;
        match self.reply_to(id)? {
            Reply::Free(outcome) => Ok(outcome),
            other => Err(unexpected("free", &other)),
        }
    }

    /// Queues a prefill-complete; its reply comes by [`Client::recv`].
    ///
    /// # Errors
    /// [`Kind::Connection`].
    pub fn send_prefill_complete(&mut self, booking: &BookingRef<'_>) -> Result<CorrelationId> {
        let id = self.take_id();
        self.encoder.prefill_complete(id, booking, 0, &mut self.unsent);
        if self.unsent.len() >= SEND_BUFFER_BYTES {
            self.flush()?;
        }
        Ok(id)
    }

    /// Queues a free; its reply comes by [`Client::recv`].
    ///
    /// # Errors
    /// [`Kind::Connection`].
    pub fn send_free(&mut self, booking: &BookingRef<'_>) -> Result<CorrelationId> {
        let id = self.take_id();
        self.encoder.free(id, booking, &mut self.unsent);
        if self.unsent.len() >= SEND_BUFFER_BYTES {
            self.flush()?;
        }
        Ok(id)
    }

    /// Every worker's record, of one space or of all.
    ///
    /// # Errors
    /// The daemon's, or the connection's.
    pub fn workers(&mut self, space: Option<SpaceId>) -> Result<Vec<WorkerInfo>> {
        let (mut all, mut cursor) = (Vec::new(), 0);
        loop {
            let id = self.take_id();
            self.encoder.workers(id, space, cursor, 0, &mut self.unsent);
            let WorkersPage { workers, next_cursor, .. } = match self.reply_to(id)? {
                Reply::Workers(page) => page,
                other => return Err(unexpected("workers", &other)),
            };
            all.extend(workers);
            match next_cursor {
                Some(next) if next > cursor => cursor = next,
                Some(_) => return Err(no_progress()),
                None => return Ok(all),
            }
        }
    }

    fn take_id(&mut self) -> CorrelationId {
        let id = CorrelationId(self.next_id);
        self.next_id += 1;
        id
    }

    /// Waits for the reply with this id and keeps the others for [`Client::recv`].
    fn reply_to(&mut self, wanted: CorrelationId) -> Result<Reply> {
        self.flush()?;
        loop {
            let (id, reply) = self.link.recv()?;
            if id != wanted {
                if let (CorrelationId(0), Reply::Error(error)) = (id, &reply) {
                    // It answers nothing that was asked: the daemon says why it is about to close.
                    return Err(error.clone().into());
                }
                self.early.push_back((id, reply));
                continue;
            }
            return match reply {
                Reply::Error(error) => Err(error.into()),
                reply => Ok(reply),
            };
        }
    }
}

fn is_same_file(one: &Path, other: &Path) -> bool {
    match (one.canonicalize(), beside(one, other.to_owned()).canonicalize()) {
        (Ok(one), Ok(other)) => one == other,
        _ => one == other,
    }
}

/// Where `told` lies: a relative path is the daemon's, whose directory is not ours, so it is looked for
/// beside `path` first.
fn beside(path: &Path, told: PathBuf) -> PathBuf {
    match (path.parent(), told.file_name()) {
        (Some(directory), Some(name)) if told.is_relative() && directory.join(name).exists() => directory.join(name),
        _ => told,
    }
}
