//! The remote port: connections from other hosts, over TCP with TLS and a token.
//!
//! ```text
//! TCP ─▶ half open: TLS, token ─▶ admitted: the principal's share ─▶ carried ─ socket pair ─▶ Acceptor ─▶ serving thread
//! ```
//!
//! One thread of its own serves the port. It opens connections and carries their bytes; it reads no frame. A serving
//! thread gets one end of a socket pair, and the principal's number in place of a user's. So frames, shares, time limits
//! and the ownership of sessions and bookings are those of the routing socket.
//!
//! * Half-open connections are bounded. A further one displaces the oldest of the address that has the most, so that a
//!   flood from one host displaces its own.
//! * An address may begin a number of connections, and handshakes of strangers have a share of one processor.
//! * Open connections are bounded, and each principal has its share of them, besides its share of all connections.
//! * Certificate, key and principals are read again with the configuration. A connection whose token is no longer listed
//!   ends then.

mod half_open;
mod open;
mod strangers;

use std::collections::BTreeMap;
use std::future::poll_fn;
use std::hash::RandomState;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::unix::net::UnixStream as StdStream;
use std::pin::pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use rustls::ServerConfig;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, mpsc, watch};
use tokio::task::JoinSet;

use super::http::port_thread::{self, PortThread};
use super::listening::ListeningSockets;
use super::turns::Turns;
use crate::config::RemoteConfig;
use crate::error::Result;
use crate::limits::{ACCEPT_PAUSE_MS, REMOTE_END_MS_MAX, REMOTE_OPEN_MS_MAX, REMOTE_WAITING_MAX};
use crate::log_quota::LogQuota;
use crate::machine::processor_time;
use crate::metrics::{CounterSet, RemoteCounter};
use crate::remote::principals::{Holder, Principal, Principals};
use crate::remote::tls;
use crate::sandbox::ThreadKind;
use crate::shares::UserQuotas;
use crate::watchdog::{Activity, ThreadMark, watched};
use half_open::{HalfOpen, Place};
use open::{Open, Refused};
use strangers::Strangers;

/// The port's name in errors.
const PORT: &str = "remote port";

/// What the port's files say: the daemon's certificate and key, and who may call.
#[derive(Debug)]
pub(crate) struct RemoteAccess {
    tls: Arc<ServerConfig>,
    principals: Principals,
}

impl RemoteAccess {
    /// Reads the files of a configured port; `None` = no port is configured.
    ///
    /// # Errors
    /// `Config` with the file that cannot be used.
    pub(crate) fn read(config: &RemoteConfig) -> Result<Option<Self>> {
        let read = || {
            let tls = tls::of_server(&config.certificate_file, &config.key_file)?;
            Ok(Self { tls, principals: Principals::read(&config.principals_file)? })
        };
        config.listen.map(|_| read()).transpose()
    }
}

/// A connection from another host whose token is that of a principal, for the acceptor.
#[derive(Debug)]
pub(crate) struct RemoteConnection {
    pub(super) stream: StdStream,
    pub(super) principal: Principal,
}

/// What is shown of the port.
#[derive(Debug, Default)]
pub(crate) struct RemoteStats {
    pub(crate) counters: CounterSet<RemoteCounter>,
    /// Open connections by principal; principals without any are left out.
    open: Mutex<BTreeMap<Arc<str>, u64>>,
}

impl RemoteStats {
    /// Open connections, by the name of their principal.
    pub(crate) fn open(&self) -> Vec<(Arc<str>, u64)> {
        self.open.lock().iter().map(|(name, open)| (Arc::clone(name), *open)).collect()
    }
}

/// The port, bound, with what its files said.
#[derive(Debug)]
pub(crate) struct RemotePort {
    listener: std::net::TcpListener,
    turns: Turns,
    connections_max: usize,
    access: RemoteAccess,
}

/// The port's thread, and what it shares with the control thread.
#[derive(Debug)]
pub(crate) struct RunningRemotePort {
    pub(crate) thread: PortThread,
    /// Replaces what the files say.
    pub(crate) access: watch::Sender<Arc<RemoteAccess>>,
    /// For the acceptor.
    pub(crate) opened: mpsc::Receiver<RemoteConnection>,
}

impl RemotePort {
    /// Binds the configured port and reads its files; `None` = no port is configured.
    ///
    /// # Errors
    /// `System` if the port is in use or may not be bound, `Config` if a file cannot be used.
    pub(crate) fn bind(config: &RemoteConfig, sockets: &mut ListeningSockets) -> Result<Option<Self>> {
        let (Some(address), Some(access)) = (config.listen, RemoteAccess::read(config)?) else { return Ok(None) };
        let listener = sockets.tcp(address, PORT, "choose another remote.listen")?;
        tracing::info!(%address, principals = access.principals.count(), "the remote port is bound");
        let turns = sockets.turns().clone();
        Ok(Some(Self { listener, turns, connections_max: config.connections_max, access }))
    }

    /// Serves the port by a thread of its own. One principal gets `share_percent` of its connections.
    ///
    /// # Errors
    /// `System` if the thread or its runtime cannot be started.
    pub(crate) fn start(
        self,
        share_percent: u8,
        (stats, mark): (Arc<RemoteStats>, Arc<ThreadMark>),
    ) -> Result<RunningRemotePort> {
        let Self { listener, turns, connections_max, access } = self;
        let ((access, followed), (send, opened)) =
            (watch::channel(Arc::new(access)), mpsc::channel(REMOTE_WAITING_MAX));
        let port = Port {
            access: followed,
            connections_max,
            places: Arc::new(Semaphore::new(connections_max)),
            shares: Arc::new(UserQuotas::new(share_percent)),
            half_open: Arc::default(),
            strangers: Mutex::new(Strangers::new(RandomState::new(), Instant::now())),
            acceptor: send,
            stats,
            of_callers: Mutex::default(),
            of_refusals: Mutex::default(),
        };
        let (named, of_tasks) = (("kvrouted-remote", ThreadKind::RemotePort), Arc::clone(&mark));
        let thread = PortThread::start(named, (PORT, &turns), (mark, Activity::CarryingRemote), move |ending| {
            let listener = port_thread::register(listener, PORT)?;
            Ok(run(listener, Arc::new(port), of_tasks, ending))
        })?;
        Ok(RunningRemotePort { thread, access, opened })
    }
}

/// The port as its connections see it.
struct Port {
    access: watch::Receiver<Arc<RemoteAccess>>,
    connections_max: usize,
    /// Open connections that may still be admitted.
    places: Arc<Semaphore>,
    /// The principals' shares of the port's connections.
    shares: Arc<UserQuotas>,
    half_open: Arc<HalfOpen>,
    strangers: Mutex<Strangers<RandomState>>,
    acceptor: mpsc::Sender<RemoteConnection>,
    stats: Arc<RemoteStats>,
    /// Log lines about connections of principals, which no flood of refusals hides.
    of_callers: Mutex<LogQuota>,
    of_refusals: Mutex<LogQuota>,
}

/// Accepts and carries connections until `ending` is true. Open connections then have [`REMOTE_END_MS_MAX`] to finish.
async fn run(listener: TcpListener, port: Arc<Port>, mark: Arc<ThreadMark>, mut ending: watch::Receiver<bool>) {
    let mut tasks = JoinSet::new();
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            // An error means that the sender has gone: the daemon ends.
            _ = ending.wait_for(|ending| *ending) => break,
        };
        match accepted {
            Ok((_, peer)) if !port.begins(peer.ip()) => port.note_refused(peer, &Refused::frequent()),
            Ok((stream, peer)) => {
                let place = HalfOpen::enter(&port.half_open, peer.ip());
                let task = Arc::clone(&port).serve(stream, peer, place);
                tasks.spawn(watched(Arc::clone(&mark), Activity::CarryingRemote, task));
            }
            Err(error) => {
                log(
                    &port.of_callers,
                    |withheld| tracing::error!(%error, withheld, "the remote port cannot accept connections; they wait"),
                );
                tokio::time::sleep(Duration::from_millis(ACCEPT_PAUSE_MS)).await;
            }
        }
        while let Some(ended) = tasks.try_join_next() {
            if let Err(error) = ended {
                port.stats.counters.bump(RemoteCounter::Broken);
                tracing::error!(%error, "carrying a remote connection panicked; it is closed, the others go on");
            }
        }
    }
    drop(listener);
    let all_ended = async { while tasks.join_next().await.is_some() {} };
    if tokio::time::timeout(Duration::from_millis(REMOTE_END_MS_MAX), all_ended).await.is_err() {
        tracing::warn!("remote connections are cut");
    }
}

impl Port {
    async fn serve(self: Arc<Self>, stream: TcpStream, peer: SocketAddr, place: Place) {
        let time = Duration::from_millis(REMOTE_OPEN_MS_MAX);
        let opening = open::open(&self, stream, peer.ip());
        let opened = tokio::select! {
            opened = tokio::time::timeout(time, opening) => opened.unwrap_or_else(|_| Err(Refused::slow())),
            () = place.displaced() => Err(Refused::displaced()),
        };
        drop(place);
        match opened {
            Ok(open) => {
                self.strangers.lock().opened(peer.ip());
                self.carry(open, peer).await;
                self.strangers.lock().ended(peer.ip(), Instant::now());
            }
            Err(refused) => self.note_refused(peer, &refused),
        }
    }

    /// Whether a connection of this address may begin. Counts it.
    fn begins(&self, address: IpAddr) -> bool {
        self.strangers.lock().begin(address, Instant::now())
    }

    /// Whether the handshake with this address may take processor time.
    fn may_shake_hands(&self, address: IpAddr) -> bool {
        let (strangers, now) = (self.strangers.lock(), Instant::now());
        !strangers.is_stranger(address, now) || strangers.have_processor_left(now)
    }

    /// Counts the processor time that the handshake and the token of a stranger take, poll by poll.
    async fn measured<F: Future>(&self, address: IpAddr, opening: F) -> F::Output {
        let mut opening = pin!(opening);
        poll_fn(|context| {
            let began = processor_time();
            let polled = opening.as_mut().poll(context);
            let (taken, now) = (processor_time().saturating_sub(began), Instant::now());
            let mut strangers = self.strangers.lock();
            if strangers.is_stranger(address, now) {
                strangers.take_processor(taken, now);
                self.stats.counters.add(RemoteCounter::StrangersUs, taken.as_micros() as u64);
            }
            polled
        })
        .await
    }

    fn note_refused(&self, peer: SocketAddr, Refused { counter, why, principal }: &Refused) {
        self.stats.counters.bump(*counter);
        log(
            &self.of_refusals,
            |withheld| tracing::warn!(%peer, principal, why, withheld, "a remote connection is refused"),
        );
    }

    async fn carry(&self, open: Open, peer: SocketAddr) {
        let holder = open.holder.clone();
        let Principal { name, user } = holder.principal.clone();
        self.stats.counters.bump(RemoteCounter::Connections);
        let _shown = Shown::new(&self.stats, &name);
        log(
            &self.of_callers,
            |withheld| tracing::info!(%peer, principal = %name, user, withheld, "a remote connection is open"),
        );
        let ended = tokio::select! {
            ended = open.carry() => ended,
            () = self.revoked(&holder) => {
                self.stats.counters.bump(RemoteCounter::Revoked);
                log(&self.of_callers, |withheld| tracing::warn!(%peer, principal = %name, withheld, "a remote connection is closed: its token is no longer listed"));
                return;
            }
        };
        if let Err(error) = ended {
            self.note_broken(&error, peer, &name);
        }
    }

    fn note_broken(&self, error: &io::Error, peer: SocketAddr, principal: &str) {
        self.stats.counters.bump(RemoteCounter::Broken);
        log(
            &self.of_callers,
            |withheld| tracing::warn!(%peer, principal, %error, withheld, "a remote connection broke"),
        );
    }

    /// Waits until the token of a connection is no longer listed.
    async fn revoked(&self, holder: &Holder) {
        let mut access = self.access.clone();
        let is_revoked = |access: &Arc<RemoteAccess>| !access.principals.still_lists(holder);
        if access.wait_for(is_revoked).await.is_err() {
            // The control thread ends, and this thread soon.
            std::future::pending::<()>().await;
        }
    }
}

fn log(quota: &Mutex<LogQuota>, line: impl FnOnce(u64)) {
    let granted = quota.lock().take(Instant::now());
    if let Some(withheld) = granted {
        line(withheld);
    }
}

/// One connection of a principal in the statistics, until it is dropped.
struct Shown<'a> {
    stats: &'a RemoteStats,
    name: Arc<str>,
}

impl<'a> Shown<'a> {
    fn new(stats: &'a RemoteStats, name: &Arc<str>) -> Self {
        *stats.open.lock().entry(Arc::clone(name)).or_default() += 1;
        Self { stats, name: Arc::clone(name) }
    }
}

impl Drop for Shown<'_> {
    fn drop(&mut self) {
        let mut open = self.stats.open.lock();
        if let Some(count) = open.get_mut(&self.name) {
            *count -= 1;
            if *count == 0 {
                open.remove(&self.name);
            }
        }
    }
}
