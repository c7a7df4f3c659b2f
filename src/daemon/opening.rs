//! What the daemon needs of the system, opened before its first thread: signals, listening sockets, folders, and what
//! earlier runs or a daemon that still runs have left.

use std::path::Path;

use rustix::net::SocketType;
use tokio::signal::unix::{Signal, SignalKind, signal};

use super::kept_bookings::KeptBookings;
use super::resources::Resources;
use super::routers_thread::{self, RoutersPort};
use super::sandboxed;
use super::service_manager::{self, Notifier};
use super::snapshots::Snapshots;
use super::takeover::{Takeover, Welcomed};
use crate::config::Config;
use crate::error::{Error, Kind, Result};
use crate::serve::{Admissions, BoundSocket, HttpPort, ListeningSockets, MetricsPort, RemotePort, next_path};

/// What earlier runs left, and the conversations with a daemon that still runs and with the service manager.
pub(super) type Kept = (Snapshots, KeptBookings, Option<Takeover>, Option<Notifier>);

/// Opens what the process needs of the system, and then gives up the rest: no other thread runs yet.
pub(super) async fn open(
    before: Option<&Path>,
    config: &Config,
    resources: &Resources,
) -> Result<(Signals, Listeners, Kept)> {
    // Before a socket file exists: a signal that arrives from now on is handled after the start, and drains.
    let signals = Signals::listen()?;
    let received = |sockets| ListeningSockets::new(sockets, resources.turns.clone());
    let (mut listeners, snapshots, mut kept, taking) = match before {
        None => {
            let passed = service_manager::passed_sockets()?;
            let listeners = Listeners::bind(config, received(passed)).await?;
            let snapshots = Snapshots::open(config, None)?;
            let kept = KeptBookings::open(config, &snapshots)?;
            (listeners, snapshots, kept, None)
        }
        Some(socket) => {
            let (taking, welcomed) =
                Takeover::begin(socket, config, routers_thread::fingerprint(&config.spaces).to_string())?;
            let Welcomed { sockets, memory, image, laws } = welcomed;
            let listeners = Listeners::bind(config, received(sockets)).await?;
            let snapshots = Snapshots::open(config, Some(laws))?;
            let kept = KeptBookings::beside(image, memory, (config, &snapshots));
            (listeners, snapshots, kept, Some(taking))
        }
    };
    if let Some(routers) = &mut listeners.routers {
        // Routers that share bindings have one hash for each session's name.
        kept.identity.affinity_secret = routers.affinity_secret();
    }
    let notifier = Notifier::connect();
    sandboxed::start(config)?;
    Ok((signals, listeners, (snapshots, kept, taking, notifier)))
}

/// The mode of the socket for a daemon that takes over.
const NEXT_SOCKET_MODE: u32 = 0o600;

/// The daemon's listening sockets, and the users that may connect. All of them are bound before any thread runs.
pub(super) struct Listeners {
    pub(super) routing: BoundSocket,
    pub(super) admin: BoundSocket,
    /// For a daemon that takes over.
    pub(super) next: BoundSocket,
    pub(super) admissions: Admissions,
    pub(super) scrapes: Option<MetricsPort>,
    pub(super) http: Option<HttpPort>,
    pub(super) routers: Option<RoutersPort>,
    pub(super) remote: Option<RemotePort>,
    /// Copies of all of them.
    pub(super) sockets: ListeningSockets,
}

impl Listeners {
    async fn bind(config: &Config, mut sockets: ListeningSockets) -> Result<Self> {
        let (admissions, of) = (Admissions::resolve(config)?, &mut sockets);
        let routing = of.unix(&config.serve.socket, SocketType::STREAM, config.serve.socket_mode)?;
        let admin = of.unix(&config.serve.admin_socket, SocketType::STREAM, config.admin.socket_mode)?;
        let next = of.unix(&next_path(&config.serve.socket), SocketType::SEQPACKET, NEXT_SOCKET_MODE)?;
        let scrapes = MetricsPort::bind(config.metrics.address(), &config.metrics.hosts, of)?;
        let (http, remote) = (HttpPort::bind(&config.http, of)?, RemotePort::bind(&config.remote, of)?);
        let routers = RoutersPort::open(config, of)?;
        Ok(Self { routing, admin, next, admissions, scrapes, http, remote, routers, sockets })
    }
}

/// The signals that the daemon handles: two end it, one reloads the configuration.
pub(super) struct Signals {
    pub(super) terminate: Signal,
    pub(super) interrupt: Signal,
    pub(super) hangup: Signal,
}

impl Signals {
    /// From now on the signals do not end the process by themselves.
    fn listen() -> Result<Self> {
        let listen = |kind| {
            signal(kind).map_err(|cause| {
                Error::new(Kind::System, "cannot listen for signals", "see the cause").caused_by(cause)
            })
        };
        // A write beyond the limit on a file's size then fails, as on a full disk, and does not end the daemon.
        drop(listen(SignalKind::from_raw(libc::SIGXFSZ))?);
        Ok(Self {
            terminate: listen(SignalKind::terminate())?,
            interrupt: listen(SignalKind::interrupt())?,
            hangup: listen(SignalKind::hangup())?,
        })
    }
}
