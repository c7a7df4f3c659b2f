//! A blocking connection: the driver of a conversation for one thread.

mod transport;

use std::collections::VecDeque;
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::conversation::{Conversation, Incoming, next_page};
use super::{spaces, unexpected};
use crate::error::{Error, Kind, Result};
use crate::ids::{CorrelationId, SpaceId, Worker};
use crate::protocol::{BookingOutcome, BookingRef, EngineLoad, PoolRole, PotentialLoads, RouteRequest, SessionToken};
use crate::wire::{
    ADMIN_SOCKET_SUFFIX, AdminReply, AdminRequest, HelloReply, OverlapReply, PolicyDone, PolicyOrder, Reply,
    RequestEncoder, ResetDone, ResetOrder, RouteReply, RunningConfigPage, SpaceInfo, StatusPage, WatchReply,
    WorkerChange, WorkerInfo, WorkerStatus,
};
use transport::Transport;

/// Queued requests of this many bytes are sent without [`Client::flush`].
const SEND_BUFFER_BYTES: usize = 64 << 10;

/// A connection to a daemon.
#[derive(Debug)]
pub struct Client {
    transport: Transport,
    conversation: Conversation<()>,
    /// Replies that arrived while a call waited for another.
    early: VecDeque<(CorrelationId, Result<Reply>)>,
    hello: HelloReply,
    lane_refusal: Option<Error>,
}

impl Client {
    /// Connects to the socket at `path` and sends hello.
    ///
    /// # Errors
    /// [`Kind::Connection`] if no daemon answers there, or the daemon's own error.
    pub fn connect(path: &Path, options: &ClientOptions) -> Result<Self> {
        let mut transport = Transport::connect(path, options.timeout, options.spin)?;
        let mut conversation = Conversation::default();
        conversation.begin(&options.name, options.session, options.lane);
        let (hello, lane_refusal) = transport.open(&mut conversation)?;
        Ok(Self { transport, conversation, early: VecDeque::new(), hello, lane_refusal })
    }

    /// Connects to the admin socket. `path` may be the admin socket, or the routing socket, whose hello names it. If the
    /// routing socket takes no connections now, the admin socket's default path is tried: an overload is what
    /// administrators ask about.
    ///
    /// # Errors
    /// As [`Client::connect`]; [`Kind::Unsupported`] if the daemon has no admin socket.
    pub fn connect_admin(path: &Path, options: &ClientOptions) -> Result<Self> {
        // Only the routing socket has sessions.
        let options = ClientOptions { session: None, lane: LaneUse::Off, ..options.clone() };
        let client = match Self::connect(path, &options) {
            Err(error) if error.kind() == Kind::Overloaded => {
                let mut admin = path.as_os_str().to_owned();
                admin.push(ADMIN_SOCKET_SUFFIX);
                return Self::connect(Path::new(&admin), &options).map_err(|_| error);
            }
            connected => connected?,
        };
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

    /// Whether the connection uses a shm lane.
    #[must_use]
    pub const fn has_lane(&self) -> bool {
        self.transport.has_lane()
    }

    /// Why the connection has no lane, though one was requested.
    #[must_use]
    pub const fn lane_refusal(&self) -> Option<&Error> {
        self.lane_refusal.as_ref()
    }

    /// Queues a route. [`Client::recv`] returns its reply.
    ///
    /// # Errors
    /// [`Kind::InvalidArgument`] if the request fits in no frame; [`Kind::Connection`].
    pub fn send_route(&mut self, request: &RouteRequest<'_>) -> Result<CorrelationId> {
        self.queue(|encoder, id, out| encoder.route(id, request, out))
    }

    /// Sends the queued requests.
    ///
    /// # Errors
    /// [`Kind::Connection`].
    pub fn flush(&mut self) -> Result<()> {
        // Every call begins with a flush.
        self.transport.begin_call();
        self.transport.send(&mut self.conversation)
    }

    /// Sends the queued requests and waits for the next reply. An error of the daemon is a reply.
    ///
    /// # Errors
    /// [`Kind::Connection`] if the connection ended or the timeout passed; [`Kind::Malformed`] if the reply cannot be read.
    pub fn recv(&mut self) -> Result<(CorrelationId, Reply)> {
        if let Some((id, reply)) = self.early.pop_front() {
            return Ok((id, reply?));
        }
        self.flush()?;
        loop {
            match self.next()? {
                Incoming::Reply { id, reply, .. } => return Ok((id, reply?)),
                Incoming::Closing(error) => return Ok((CorrelationId(0), Reply::Error(error))),
                // Only a `Watch` watches.
                Incoming::Fleet(_) | Incoming::WatchEnded(_) | Incoming::Other => {}
            }
        }
    }

    /// Asks which worker should run a prompt, and books it if the request says so.
    ///
    /// # Errors
    /// The daemon's, or the connection's.
    pub fn route(&mut self, request: &RouteRequest<'_>) -> Result<RouteReply> {
        let id = self.send_route(request)?;
        expect!(self.reply_to(id)?, Route, "route")
    }

    /// Asks how much of a prompt each worker holds. Only the request's prompt and space matter.
    ///
    /// # Errors
    /// The daemon's, or the connection's.
    pub fn overlap(&mut self, request: &RouteRequest<'_>) -> Result<OverlapReply> {
        let id = self.queue(|encoder, id, out| encoder.overlap(id, request, out))?;
        expect!(self.reply_to(id)?, Overlap, "overlap")
    }

    /// Reports that the prefill of a booked request is complete.
    ///
    /// # Errors
    /// The daemon's, or the connection's.
    pub fn prefill_complete(&mut self, booking: &BookingRef<'_>) -> Result<BookingOutcome> {
        expect!(
            self.ask(|encoder, id, out| encoder.prefill_complete(id, booking, 0, out))?,
            PrefillComplete,
            "prefill_complete"
        )
    }

    /// Frees a booking: its request has ended, however it ended.
    ///
    /// # Errors
    /// The daemon's, or the connection's.
    pub fn free(&mut self, booking: &BookingRef<'_>) -> Result<BookingOutcome> {
        expect!(self.ask(|encoder, id, out| encoder.free(id, booking, out))?, Free, "free")
    }

    /// Queues a prefill-complete. [`Client::recv`] returns its reply.
    ///
    /// # Errors
    /// [`Kind::Connection`].
    pub fn send_prefill_complete(&mut self, booking: &BookingRef<'_>) -> Result<CorrelationId> {
        self.queue(|encoder, id, out| {
            encoder.prefill_complete(id, booking, 0, out);
            Ok(())
        })
    }

    /// Queues a free. [`Client::recv`] returns its reply.
    ///
    /// # Errors
    /// [`Kind::Connection`].
    pub fn send_free(&mut self, booking: &BookingRef<'_>) -> Result<CorrelationId> {
        self.queue(|encoder, id, out| {
            encoder.free(id, booking, out);
            Ok(())
        })
    }

    /// The record of every worker, of one space or of all.
    ///
    /// # Errors
    /// The daemon's, or the connection's.
    pub fn workers(&mut self, space: Option<SpaceId>) -> Result<Vec<WorkerInfo>> {
        let (mut all, mut cursor) = (Vec::new(), Some(0));
        while let Some(at) = cursor {
            let reply = self.ask(|encoder, id, out| encoder.workers(id, space, at, 0, out))?;
            let page = expect!(reply, Workers, "workers")?;
            all.extend(page.workers);
            cursor = next_page(at, page.next_cursor)?;
        }
        Ok(all)
    }

    /// Queues a request that `encode` appends.
    fn queue(
        &mut self,
        encode: impl FnOnce(&mut RequestEncoder, CorrelationId, &mut Vec<u8>) -> Result<()>,
    ) -> Result<CorrelationId> {
        let id = self.conversation.ask((), encode)?;
        if self.conversation.unsent.len() >= SEND_BUFFER_BYTES {
            self.flush()?;
        }
        Ok(id)
    }

    /// Sends a request that `encode` appends, and waits for its reply.
    fn ask(&mut self, encode: impl FnOnce(&mut RequestEncoder, CorrelationId, &mut Vec<u8>)) -> Result<Reply> {
        let id = self.queue(|encoder, id, out| {
            encode(encoder, id, out);
            Ok(())
        })?;
        self.reply_to(id)
    }

    /// Waits for the reply with this id, and stores others for [`Client::recv`].
    fn reply_to(&mut self, wanted: CorrelationId) -> Result<Reply> {
        self.flush()?;
        loop {
            match self.next()? {
                Incoming::Reply { id, reply, .. } if id == wanted => return reply,
                Incoming::Reply { id, reply, .. } => self.early.push_back((id, reply)),
                Incoming::Closing(error) => return Err(error.into()),
                Incoming::Fleet(_) | Incoming::WatchEnded(_) | Incoming::Other => {}
            }
        }
    }

    /// Waits for the next frame.
    fn next(&mut self) -> Result<Incoming<()>> {
        loop {
            if let Some(incoming) = self.conversation.next()? {
                return Ok(incoming);
            }
            if let Err(ended) = self.transport.receive(&mut self.conversation) {
                // The daemon may have sent a reason before the end.
                return self.conversation.next()?.ok_or(ended);
            }
        }
    }

    /// Asks for the work of every worker if it took a prompt, for a gateway that chooses by itself. Only the request's prompt
    /// and space matter.
    ///
    /// # Errors
    /// The daemon's, or the connection's. [`Kind::Unsupported`](crate::error::Kind::Unsupported) from a daemon without
    /// [`features::POTENTIAL_LOADS`](crate::wire::features::POTENTIAL_LOADS).
    pub fn potential_loads(&mut self, request: &RouteRequest<'_>) -> Result<PotentialLoads> {
        let id = self.queue(|encoder, id, out| encoder.potential_loads(id, request, out))?;
        expect!(self.reply_to(id)?, PotentialLoads, "potential_loads")
    }

    /// Reports how many tokens a booked request has generated since its start.
    ///
    /// # Errors
    /// The daemon's, or the connection's.
    pub fn output_progress(&mut self, booking: &BookingRef<'_>, output_tokens: u32) -> Result<BookingOutcome> {
        expect!(
            self.ask(|encoder, id, out| encoder.output_progress(id, booking, output_tokens, out))?,
            OutputProgress,
            "output_progress"
        )
    }

    /// Reports that another worker of the space runs a booked request than the booked one.
    ///
    /// # Errors
    /// The daemon's, or the connection's.
    pub fn served(&mut self, booking: &BookingRef<'_>, worker: Worker) -> Result<BookingOutcome> {
        expect!(self.ask(|encoder, id, out| encoder.served(id, booking, worker, out))?, Served, "served")
    }

    /// Passes on an engine's own report of its load. `false` = the worker has just left, or reports of this user are in force
    /// for as many workers as `serve.user_share_percent` allows.
    ///
    /// # Errors
    /// The daemon's, or the connection's.
    pub fn report_load(&mut self, space: SpaceId, worker: Worker, load: &EngineLoad) -> Result<bool> {
        expect!(
            self.ask(|encoder, id, out| encoder.report_load(id, (space, worker), load, out))?,
            ReportLoad,
            "report_load"
        )
    }

    /// Reports that a worker failed a request; rank 2³² - 1 = every rank of it. Answers with how long requests avoid the worker
    /// while others can run them, milliseconds. It is 0 if reports of this user already keep requests away from as many
    /// workers as `serve.user_share_percent` allows.
    ///
    /// # Errors
    /// The daemon's, or the connection's.
    pub fn report_failure(&mut self, space: SpaceId, worker: Worker, reason: &str) -> Result<u32> {
        expect!(
            self.ask(|encoder, id, out| encoder.report_failure(id, (space, worker), reason, out))?,
            ReportFailure,
            "report_failure"
        )
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
        let mut all = self.status_page(0, 0)?;
        let mut at = 0;
        while let Some(cursor) = next_page(at, all.next_cursor)? {
            let mut page = self.status_page(cursor, 0)?;
            all.workers.append(&mut page.workers);
            all.sources.append(&mut page.sources);
            all = StatusPage { workers: all.workers, sources: all.sources, routers: all.routers, ..page };
            at = cursor;
        }
        Ok(all)
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
        expect!(self.ask(|encoder, id, out| encoder.admin(id, request, out))?, Admin, request.kind().name())
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

    /// The configuration that the daemon runs with, all pages as one. Only on the admin socket.
    ///
    /// # Errors
    /// The daemon's, or the connection's. [`Kind::Unsupported`](crate::error::Kind::Unsupported) from a daemon without this
    /// request, and [`Kind::Overloaded`](crate::error::Kind::Overloaded) if the configuration changed between two pages.
    pub fn running_config(&mut self) -> Result<RunningConfigPage> {
        let mut all = self.running_config_page(0)?;
        let mut at = 0;
        while let Some(cursor) = next_page(at, all.next_cursor)? {
            let mut page = self.running_config_page(cursor)?;
            if page.version != all.version {
                let remedy = "ask again";
                return Err(Error::new(Kind::Overloaded, "the configuration changed while it was read", remedy));
            }
            all.fields.append(&mut page.fields);
            (all.next_cursor, at) = (page.next_cursor, cursor);
        }
        Ok(all)
    }

    fn running_config_page(&mut self, cursor: u32) -> Result<RunningConfigPage> {
        match self.administer(&AdminRequest::RunningConfig { cursor })? {
            AdminReply::RunningConfig(page) => Ok(page),
            other => Err(unexpected("running_config", &Reply::Admin(other))),
        }
    }

    /// Watches a space, or the whole fleet. The watch takes over the connection. Its timeout applies only to the first reply,
    /// because a fleet may never change.
    ///
    /// # Errors
    /// The daemon's, or the connection's. [`Kind::Unsupported`](crate::error::Kind::Unsupported) from a daemon without
    /// [`features::WATCH`](crate::wire::features::WATCH).
    pub fn watch(mut self, space: Option<SpaceId>) -> Result<Watch> {
        self.conversation.watch(space);
        self.flush()?;
        let first = loop {
            match self.next()? {
                Incoming::Fleet(fleet) => break fleet,
                Incoming::WatchEnded(reply) => return Err(unexpected("watch", &reply?)),
                Incoming::Closing(error) => return Err(error.into()),
                // A reply to a request before the watch.
                Incoming::Reply { .. } | Incoming::Other => {}
            }
        };
        self.transport.wait_for_ever();
        let fleet_version = first.fleet_version;
        Ok(Watch { client: self, first: Some(first), fleet_version, is_over: false })
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
    /// The timeout of each call, and of each page of a list; `None` = no timeout.
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
    /// The fleet at the beginning.
    first: Option<WatchReply>,
    fleet_version: u64,
    is_over: bool,
}

impl Watch {
    fn changed(&mut self) -> Result<WatchReply> {
        loop {
            match self.client.next()? {
                Incoming::Fleet(fleet) if fleet.fleet_version > self.fleet_version => return Ok(fleet),
                Incoming::WatchEnded(reply) => return Err(unexpected("watch", &reply?)),
                // A fleet that a newer one has overtaken, or a reply to a request before the watch.
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

#[cfg(test)]
mod tests;
