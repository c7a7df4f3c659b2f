//! A blocking connection: it writes requests to a socket or a shm lane, and reads the replies.
//!
//! ```text
//! Client ─▶ transport (the socket, its waits, bytes into replies)
//!               └▶ shm (a lane in place of the socket)
//! ```

mod shm;
mod transport;

use std::collections::VecDeque;
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::{no_progress, spaces, unexpected};
use crate::client::replies::FleetPages;
use crate::error::{Error, Kind, Result};
use crate::ids::{CorrelationId, SpaceId, Worker};
use crate::limits::WORKERS_PAGE_MAX;
use crate::protocol::{BookingOutcome, BookingRef, EngineLoad, PoolRole, PotentialLoads, RouteRequest, SessionToken};
use crate::wire::{
    AdminReply, AdminRequest, HelloReply, OverlapReply, PROTOCOL_VERSION, PolicyDone, PolicyOrder, Reply,
    RequestEncoder, ResetDone, ResetOrder, RouteReply, SpaceInfo, StatusPage, WatchReply, WorkerChange, WorkerInfo,
    WorkerStatus, WorkersPage,
};
use transport::Transport;

/// Queued requests of this many bytes are sent without [`Client::flush`].
const SEND_BUFFER_BYTES: usize = 64 << 10;

/// A connection to a daemon.
#[derive(Debug)]
pub struct Client {
    transport: Transport,
    encoder: RequestEncoder,
    /// Encoded requests that are not sent yet.
    unsent: Vec<u8>,
    /// Replies that arrived while a call waited for another.
    early: VecDeque<(CorrelationId, Reply)>,
    next_id: u64,
    hello: HelloReply,
    lane_refusal: Option<Error>,
}

impl Client {
    /// Connects to the socket at `path` and sends hello.
    ///
    /// # Errors
    /// [`Kind::Connection`] if no daemon answers there, or the daemon's own error.
    pub fn connect(path: &Path, options: &ClientOptions) -> Result<Self> {
        let transport = Transport::connect(path, options.timeout, options.spin)?;
        let hello = HelloReply {
            version: 0,
            instance_id: 0,
            limits: crate::wire::ServerLimits::default(),
            features: 0,
            spaces: Vec::new(),
            admin_socket: None,
        };
        let (encoder, unsent, early) = (RequestEncoder::default(), Vec::new(), VecDeque::new());
        let mut client = Self { transport, encoder, unsent, early, next_id: 1, hello, lane_refusal: None };
        let id = client.take_id();
        client.encoder.hello(id, &options.name, options.session, &mut client.unsent);
        client.flush()?;
        // The first reply answers hello, or refuses the connection (then with id 0).
        client.hello = match client.recv()?.1 {
            Reply::Hello(hello) if hello.version == PROTOCOL_VERSION => hello,
            Reply::Error(error) => return Err(error.into()),
            other => return Err(unexpected("hello", &other)),
        };
        client.begin_lane(options.lane, options.spin)?;
        Ok(client)
    }

    /// Connects to the admin socket. `path` may be the admin socket, or the routing socket, whose hello names it.
    ///
    /// # Errors
    /// As [`Client::connect`]; [`Kind::Unsupported`] if the daemon has no admin socket.
    pub fn connect_admin(path: &Path, options: &ClientOptions) -> Result<Self> {
        // Only the routing socket has sessions.
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

    /// The daemon's reply to hello: its run, its limits, its features and its spaces.
    #[must_use]
    pub fn hello(&self) -> &HelloReply {
        &self.hello
    }

    /// Finds the space of `model`, in `namespace` if it is given.
    ///
    /// # Errors
    /// [`Kind::UnknownSpace`] if no space fits, with the models of the daemon, or if several fit.
    pub fn space(&self, model: &str, namespace: Option<&str>) -> Result<&SpaceInfo> {
        self.pool(model, namespace, None)
    }

    /// Finds one pool of a model that has several.
    ///
    /// # Errors
    /// As [`Client::space`].
    pub fn pool(&self, model: &str, namespace: Option<&str>, role: Option<PoolRole>) -> Result<&SpaceInfo> {
        spaces::find(self.hello.spaces.iter(), model, namespace, role)
    }

    /// Queues a route. [`Client::recv`] returns its reply.
    ///
    /// # Errors
    /// [`Kind::InvalidArgument`] if the request fits in no frame; [`Kind::Connection`].
    pub fn send_route(&mut self, request: &RouteRequest<'_>) -> Result<CorrelationId> {
        let id = self.take_id();
        self.encoder.route(id, request, &mut self.unsent)?;
        if self.unsent.len() >= SEND_BUFFER_BYTES {
            self.flush()?;
        }
        Ok(id)
    }

    /// Sends the queued requests.
    ///
    /// # Errors
    /// [`Kind::Connection`].
    pub fn flush(&mut self) -> Result<()> {
        let sent = self.transport.send(&self.unsent);
        self.unsent.clear();
        sent
    }

    /// Sends the queued requests and waits for the next reply. An error of the daemon is a reply.
    ///
    /// # Errors
    /// [`Kind::Connection`] if the connection ended or the timeout passed; [`Kind::Malformed`] if the reply cannot be read.
    pub fn recv(&mut self) -> Result<(CorrelationId, Reply)> {
        if let Some(reply) = self.early.pop_front() {
            return Ok(reply);
        }
        self.flush()?;
        self.transport.recv()
    }

    /// Asks which worker should run a prompt, and books it if the request says so.
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

    /// Asks how much of a prompt each worker holds. Only the request's prompt and space matter.
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

    /// Reports that the prefill of a booked request is complete.
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

    /// Frees a booking: its request has ended, however it ended.
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

    /// Queues a prefill-complete. [`Client::recv`] returns its reply.
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

    /// Queues a free. [`Client::recv`] returns its reply.
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

    /// The record of every worker, of one space or of all.
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

    /// Waits for the reply with this id, and stores others for [`Client::recv`].
    fn reply_to(&mut self, wanted: CorrelationId) -> Result<Reply> {
        self.flush()?;
        loop {
            let (id, reply) = self.transport.recv()?;
            if id != wanted {
                if let (CorrelationId(0), Reply::Error(error)) = (id, &reply) {
                    // It answers no request: the daemon says why it is about to close the connection.
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

    /// Asks for the work of every worker if it took a prompt, for a gateway that chooses by itself. Only the request's prompt
    /// and space matter.
    ///
    /// # Errors
    /// The daemon's, or the connection's. [`Kind::Unsupported`](crate::error::Kind::Unsupported) from a daemon without
    /// [`features::POTENTIAL_LOADS`](crate::wire::features::POTENTIAL_LOADS).
    pub fn potential_loads(&mut self, request: &RouteRequest<'_>) -> Result<PotentialLoads> {
        let id = self.take_id();
        self.encoder.potential_loads(id, request, &mut self.unsent)?;
        match self.reply_to(id)? {
            Reply::PotentialLoads(loads) => Ok(loads),
            other => Err(unexpected("potential_loads", &other)),
        }
    }

    /// Reports how many tokens a booked request has generated since its start.
    ///
    /// # Errors
    /// The daemon's, or the connection's.
    pub fn output_progress(&mut self, booking: &BookingRef<'_>, output_tokens: u32) -> Result<BookingOutcome> {
        let id = self.take_id();
        self.encoder.output_progress(id, booking, output_tokens, &mut self.unsent);
        match self.reply_to(id)? {
            Reply::OutputProgress(outcome) => Ok(outcome),
            other => Err(unexpected("output_progress", &other)),
        }
    }

    /// Reports that another worker of the space runs a booked request than the booked one.
    ///
    /// # Errors
    /// The daemon's, or the connection's.
    pub fn served(&mut self, booking: &BookingRef<'_>, worker: Worker) -> Result<BookingOutcome> {
        let id = self.take_id();
        self.encoder.served(id, booking, worker, &mut self.unsent);
        match self.reply_to(id)? {
            Reply::Served(outcome) => Ok(outcome),
            other => Err(unexpected("served", &other)),
        }
    }

    /// Passes on an engine's own report of its load. `false` = the worker has just left, or reports of this user are in force
    /// for as many workers as `serve.user_share_percent` allows.
    ///
    /// # Errors
    /// The daemon's, or the connection's.
    pub fn report_load(&mut self, space: SpaceId, worker: Worker, load: &EngineLoad) -> Result<bool> {
        let id = self.take_id();
        self.encoder.report_load(id, (space, worker), load, &mut self.unsent);
        match self.reply_to(id)? {
            Reply::ReportLoad(accepted) => Ok(accepted),
            other => Err(unexpected("report_load", &other)),
        }
    }

    /// Reports that a worker failed a request; rank 2³² - 1 = every rank of it. Answers with how long requests avoid the worker
    /// while others can run them, milliseconds. It is 0 if reports of this user already keep requests away from as many
    /// workers as `serve.user_share_percent` allows.
    ///
    /// # Errors
    /// The daemon's, or the connection's.
    pub fn report_failure(&mut self, space: SpaceId, worker: Worker, reason: &str) -> Result<u32> {
        let id = self.take_id();
        self.encoder.report_failure(id, (space, worker), reason, &mut self.unsent);
        match self.reply_to(id)? {
            Reply::ReportFailure(back_off_ms) => Ok(back_off_ms),
            other => Err(unexpected("report_failure", &other)),
        }
    }

    /// The status of every worker. Only on the admin socket: see [`Client::connect_admin`].
    ///
    /// # Errors
    /// The daemon's, or the connection's.
    pub fn status(&mut self) -> Result<Vec<WorkerStatus>> {
        self.status_all().map(|page| page.workers)
    }

    /// All pages of the status as one, with the daemon's own counters of the last page.
    ///
    /// # Errors
    /// As [`Client::status`].
    pub fn status_all(&mut self) -> Result<StatusPage> {
        let (mut workers, mut sources, mut cursor) = (Vec::new(), Vec::new(), 0);
        loop {
            let mut page = self.status_page(cursor, 0)?;
            workers.append(&mut page.workers);
            sources.append(&mut page.sources);
            match page.next_cursor {
                Some(next) if next > cursor => cursor = next,
                Some(_) => return Err(no_progress()),
                None => return Ok(StatusPage { workers, sources, ..page }),
            }
        }
    }

    /// One page of the status; `limit` 0 = as many workers as the daemon sends.
    ///
    /// # Errors
    /// As [`Client::status`].
    pub fn status_page(&mut self, cursor: u32, limit: u32) -> Result<StatusPage> {
        match self.administer(&AdminRequest::Status { cursor, limit })? {
            AdminReply::Status(page) => Ok(page),
            other => Err(unexpected("status", &Reply::Admin(other))),
        }
    }

    /// The reply to a request of administration.
    fn administer(&mut self, request: &AdminRequest<'_>) -> Result<AdminReply> {
        let id = self.take_id();
        self.encoder.admin(id, request, &mut self.unsent);
        match self.reply_to(id)? {
            Reply::Admin(reply) => Ok(reply),
            other => Err(unexpected(request.kind().name(), &other)),
        }
    }

    /// Adds, removes or changes workers. Answers with how many. Only on the admin socket.
    ///
    /// # Errors
    /// The daemon's, or the connection's.
    pub fn change_worker(&mut self, change: &WorkerChange<'_>) -> Result<u32> {
        match self.administer(&AdminRequest::ChangeWorker(*change))? {
            AdminReply::ChangeWorker(workers) => Ok(workers),
            other => Err(unexpected("change_worker", &Reply::Admin(other))),
        }
    }

    /// Makes the daemon forget the blocks of a worker, or of every worker. Only on the admin socket.
    ///
    /// # Errors
    /// The daemon's, or the connection's.
    pub fn reset(&mut self, order: ResetOrder) -> Result<ResetDone> {
        match self.administer(&AdminRequest::Reset(order))? {
            AdminReply::Reset(done) => Ok(done),
            other => Err(unexpected("reset", &Reply::Admin(other))),
        }
    }

    /// Sets, promotes or ends a shadow policy. Only on the admin socket.
    ///
    /// # Errors
    /// The daemon's, or the connection's.
    pub fn set_policy(&mut self, order: &PolicyOrder<'_>) -> Result<PolicyDone> {
        match self.administer(&AdminRequest::SetPolicy(*order))? {
            AdminReply::SetPolicy(done) => Ok(done),
            other => Err(unexpected("set_policy", &Reply::Admin(other))),
        }
    }

    /// Watches a space, or the whole fleet. The watch takes over the connection. Its timeout applies only to the first reply,
    /// because a fleet may never change.
    ///
    /// # Errors
    /// The daemon's, or the connection's. [`Kind::Unsupported`](crate::error::Kind::Unsupported) from a daemon without
    /// [`features::WATCH`](crate::wire::features::WATCH).
    pub fn watch(mut self, space: Option<SpaceId>) -> Result<Watch> {
        let id = self.take_id();
        self.encoder.watch(id, space, (0, WORKERS_PAGE_MAX as u32), &mut self.unsent);
        let mut pages = FleetPages::default();
        let first = loop {
            match self.reply_to(id)? {
                Reply::Watch(page) => {
                    if let Some(first) = pages.take(page) {
                        break first;
                    }
                }
                other => return Err(unexpected("watch", &other)),
            }
        };
        self.transport.wait_for_ever();
        let fleet_version = first.fleet_version;
        Ok(Watch { client: self, id, first: Some(first), pages, fleet_version, is_over: false })
    }
}

fn is_same_file(one: &Path, other: &Path) -> bool {
    match (one.canonicalize(), beside(one, other.to_owned()).canonicalize()) {
        (Ok(one), Ok(other)) => one == other,
        _ => one == other,
    }
}

/// Resolves the path of a socket that the daemon named. A relative path is relative to the daemon's directory, which is not
/// ours, so the directory of `path` comes first.
fn beside(path: &Path, named: PathBuf) -> PathBuf {
    match (path.parent(), named.file_name()) {
        (Some(directory), Some(name)) if named.is_relative() && directory.join(name).exists() => directory.join(name),
        _ => named,
    }
}

/// The options of a [`Client`].
#[derive(Clone, Debug, Default)]
pub struct ClientOptions {
    /// The client's name in the daemon's logs.
    pub name: String,
    /// A session that other connections share; `None` = a session of its own.
    pub session: Option<SessionToken>,
    /// The timeout of each call; `None` = no timeout.
    pub timeout: Option<Duration>,
    /// Whether to use a shm lane: memory shared with the daemon in place of the socket.
    pub lane: LaneUse,
    /// How long to busy-poll for a reply before sleeping, which occupies a processor; zero = not at all. A lane pays if both
    /// sides busy-poll: see `spin_us_max` in the daemon's configuration.
    pub spin: Duration,
}

/// Whether a client uses a shm lane.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LaneUse {
    /// The client uses the socket.
    #[default]
    Off,
    /// The client uses a lane, or the socket if the daemon refuses. [`Client::lane_refusal`] says why.
    Try,
    /// The client uses a lane, or does not connect.
    Require,
}

/// A connection that watches the fleet. The iterator returns the fleet at once and again after each change. Changes that
/// follow each other closely are one. It ends after the first error: connect again and watch anew.
#[derive(Debug)]
pub struct Watch {
    client: Client,
    id: CorrelationId,
    /// The fleet at the beginning.
    first: Option<WatchReply>,
    pages: FleetPages,
    fleet_version: u64,
    is_over: bool,
}

impl Watch {
    fn changed(&mut self) -> Result<WatchReply> {
        loop {
            match self.client.transport.recv()? {
                // A newer fleet has overtaken this one.
                (id, Reply::Watch(reply)) if id == self.id && reply.fleet_version <= self.fleet_version => {}
                (id, Reply::Watch(page)) if id == self.id => {
                    if let Some(fleet) = self.pages.take(page) {
                        return Ok(fleet);
                    }
                }
                (id, other) if id == self.id => return Err(unexpected("watch", &other)),
                // A reply to a request before the watch.
                _ => {}
            }
        }
    }
}

impl Iterator for Watch {
    type Item = Result<WatchReply>;

    fn next(&mut self) -> Option<Self::Item> {
        if let Some(first) = self.first.take() {
            return Some(Ok(first));
        }
        if self.is_over {
            return None;
        }
        let changed = self.changed();
        match &changed {
            Ok(reply) => self.fleet_version = reply.fleet_version,
            Err(_) => self.is_over = true,
        }
        Some(changed)
    }
}
