//! The one acceptor: several on one Unix listener would not balance.

use std::os::fd::AsFd;
use std::os::unix::net::UnixStream as StdStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use arc_swap::ArcSwap;
use rustix::net::SendFlags;
use tokio::net::{UnixListener, UnixStream};

use super::admission::Admission;
use super::log_quota::LogQuota;
use super::mailbox::CoreHandle;
use super::socket_file::BoundSocket;
use super::users::Users;
use crate::error::{Error, Kind};
use crate::ids::CorrelationId;
use crate::limits::ACCEPT_REST_MS;
use crate::metrics::{CounterSet, DaemonCounter};
use crate::shares::Scarce;
use crate::wire::ReplyEncoder;

/// Accepts on the routing socket and hands every connection to the core that has fewest.
pub struct Acceptor {
    listener: UnixListener,
    cores: Vec<CoreHandle>,
    connections_max: usize,
    admission: Arc<ArcSwap<Admission>>,
    users: Arc<Users>,
    counters: Arc<CounterSet<DaemonCounter>>,
    encoder: ReplyEncoder,
    log_quota: LogQuota,
    // Last: the file goes once nobody listens.
    _socket: BoundSocket,
}

impl Acceptor {
    /// An acceptor on `socket` for `cores`. Call it inside a tokio runtime.
    ///
    /// # Errors
    /// [`Kind::System`] if the socket cannot be waited on.
    pub fn new(
        socket: BoundSocket,
        cores: Vec<CoreHandle>,
        connections_max: usize,
        counters: Arc<CounterSet<DaemonCounter>>,
    ) -> crate::error::Result<Self> {
        let listener = socket.listen_async()?;
        let (encoder, log_quota) = (ReplyEncoder::default(), LogQuota::default());
        let admission = Arc::new(ArcSwap::from_pointee(Admission::by_mode("serve")));
        let users = Arc::default();
        Ok(Self { listener, cores, connections_max, admission, users, counters, encoder, log_quota, _socket: socket })
    }

    /// The same for those whom `admission` admits at the time.
    #[must_use]
    pub fn admitting(mut self, admission: Arc<ArcSwap<Admission>>) -> Self {
        self.admission = admission;
        self
    }

    /// The same with so much of the connections for each user as `users` say.
    #[must_use]
    pub fn shared_by(mut self, users: Arc<Users>) -> Self {
        self.users = users;
        self
    }

    /// Accepts until dropped, at any await. Dropping the acceptor closes the socket and removes its file.
    pub async fn run(&mut self) {
        loop {
            match self.listener.accept().await {
                Ok((stream, _)) => self.place(stream),
                Err(error) => {
                    // Out of descriptors, most likely: the connection keeps waiting, and asking again at
                    // once would only burn the processor.
                    if let Some(withheld) = self.log_quota.take(Instant::now()) {
                        tracing::error!(%error, withheld, "cannot accept connections; they wait");
                    }
                    tokio::time::sleep(Duration::from_millis(ACCEPT_REST_MS)).await;
                }
            }
        }
    }

    fn place(&mut self, stream: UnixStream) {
        let (credentials, stream) = match stream.peer_cred().and_then(|peer| Ok((peer, stream.into_std()?))) {
            Ok(taken) => taken,
            Err(error) => {
                self.counters.bump(DaemonCounter::ConnectionsRefused);
                if let Some(withheld) = self.log_quota.take(Instant::now()) {
                    tracing::warn!(%error, withheld, "a connection whose user cannot be told is refused");
                }
                return;
            }
        };
        let uid = credentials.uid();
        if let Err(error) = self.admission.load().admit(&stream, &credentials) {
            self.counters.bump(DaemonCounter::ConnectionsNotPermitted);
            if let Some(withheld) = self.log_quota.take(Instant::now()) {
                tracing::warn!(uid, gid = credentials.gid(), pid = credentials.pid(), %error, withheld, "a connection is refused");
            }
            turn_away(&stream, &error, &mut self.encoder);
            return;
        }
        if let Err((stream, counter, why)) = self.hand_over(stream, uid) {
            self.refuse(&stream, counter, why, uid);
        }
    }

    /// Hands a connection to the core that has fewest; else gives it back with what is to be counted and said.
    fn hand_over(&self, stream: StdStream, uid: u32) -> Result<(), (StdStream, DaemonCounter, &'static str)> {
        let alive = || self.cores.iter().filter(|core| core.is_alive());
        let open: usize = alive().map(CoreHandle::connections).sum();
        let Some(least) = alive().min_by_key(|core| core.connections()) else {
            return Err((stream, DaemonCounter::ConnectionsRefused, "no core is serving"));
        };
        if open >= self.connections_max {
            return Err((stream, DaemonCounter::ConnectionsRefused, "too many connections are open"));
        }
        let Some(place) = self.users.take(uid, Scarce::Connections, 1, self.connections_max) else {
            let why = "too many connections of this user are open";
            return Err((stream, DaemonCounter::ConnectionsRefusedUser, why));
        };
        let handed = least.hand_over(stream, uid, place);
        handed.map_err(|stream| (stream, DaemonCounter::MailboxFull, "the core's mailbox is full"))
    }

    /// Tells the peer why, if it can be done without waiting, and closes.
    fn refuse(&mut self, stream: &StdStream, counter: DaemonCounter, why: &str, uid: u32) {
        self.counters.bump(counter);
        if let Some(withheld) = self.log_quota.take(Instant::now()) {
            tracing::warn!(uid, why, withheld, "a connection is refused");
        }
        let error =
            Error::new(Kind::Overloaded, why, "share connections: any number of requests may be in flight on one");
        turn_away(stream, &error, &mut self.encoder);
    }
}

/// Tells a peer that is not admitted why, if it can be done without waiting.
pub(super) fn turn_away(stream: impl AsFd, error: &Error, encoder: &mut ReplyEncoder) {
    let mut out = Vec::new();
    // Nothing was asked yet: the answer is to nobody in particular.
    encoder.error(CorrelationId(0), error, &mut out);
    if let Err(error) = rustix::net::send(stream, &out, SendFlags::DONTWAIT | SendFlags::NOSIGNAL) {
        tracing::debug!(%error, "the refused peer was gone already");
    }
}
