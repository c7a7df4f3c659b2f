//! Endpoints as addresses, and the resolution of host names.
//!
//! The system's resolver blocks, for seconds if a name server does not answer. Each lookup therefore has a thread of
//! its own, and only a few run at once. One thread starts them all: a thread in the [sandbox](crate::sandbox) can start
//! only threads that may do no more than itself, and no thread that reads an engine's bytes may open files.

use std::net::{IpAddr, Ipv4Addr, SocketAddr, ToSocketAddrs as _};
use std::path::PathBuf;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};

use crossbeam::channel::{Receiver, Sender, TryRecvError, bounded, unbounded};
use mio::unix::pipe;
use mio::{Interest, Registry, Token};

use crate::endpoint::{Parts, split};
use crate::error::{Error, Kind, Result};
use crate::limits::NAME_LOOKUPS_MAX;
use crate::sandbox::{self, ThreadKind};

/// Where a peer is, or where a server listens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Address {
    /// An IP address with its port.
    Ip(SocketAddr),
    /// A host name that has to be resolved.
    Name { host: String, port: u16 },
    /// A Unix socket's file.
    Path(PathBuf),
    /// A Unix socket's name in the abstract namespace of Linux.
    Abstract(Vec<u8>),
}

impl Address {
    /// Reads `tcp://HOST:PORT`, `ipc://PATH` or `ipc://@NAME`. `*` as host means every IPv4 address, `*` as port means
    /// any free one; both only make sense for a server.
    ///
    /// # Errors
    /// [`Kind::Config`] for anything else.
    pub(super) fn parse(endpoint: &str) -> Result<Self> {
        let wrong = || {
            let remedy = "write it as tcp://HOST:PORT or ipc:///PATH";
            Error::new(Kind::Config, format!("cannot use the endpoint {endpoint:?}"), remedy)
        };
        if endpoint.contains('\0') {
            return Err(wrong());
        }
        let (host, port) = match split(endpoint).ok_or_else(wrong)? {
            Parts::Ipc(path) => {
                return match path.strip_prefix('@') {
                    Some("") => Err(wrong()),
                    Some(name) => Ok(Self::Abstract(name.as_bytes().to_vec())),
                    None if path.is_empty() => Err(wrong()),
                    None => Ok(Self::Path(path.into())),
                };
            }
            Parts::Tcp { host, port } => (host, port),
        };
        let port = if port == "*" { 0 } else { port.parse().map_err(|_| wrong())? };
        let host = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
        match (host, host.parse::<IpAddr>()) {
            ("", _) => Err(wrong()),
            ("*", _) => Ok(Self::Ip((Ipv4Addr::UNSPECIFIED, port).into())),
            (_, Ok(ip)) => Ok(Self::Ip((ip, port).into())),
            (name, Err(_)) => Ok(Self::Name { host: name.to_owned(), port }),
        }
    }
}

/// The stack of a lookup's thread: ample for a system's resolver.
const STACK_BYTES: usize = 512 << 10;

/// Lookups of this process that run now.
static RUNNING: AtomicUsize = AtomicUsize::new(0);

/// A running lookup's share of [`RUNNING`].
struct Place;

impl Place {
    fn take() -> Option<Self> {
        // Relaxed: only the number counts.
        let taken = RUNNING.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |running| {
            (running < NAME_LOOKUPS_MAX).then_some(running + 1)
        });
        taken.ok().map(|_| Self)
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        // Relaxed: only the number counts.
        RUNNING.fetch_sub(1, Ordering::Relaxed);
    }
}

/// The body of a lookup's thread. Dropped without a call, it counts as failed.
type Look = Box<dyn FnOnce() + Send>;

/// The way to the thread that starts lookups; `None` = it could not be started. At most [`NAME_LOOKUPS_MAX`] wait.
static LOOKUPS: OnceLock<Option<Sender<Look>>> = OnceLock::new();

/// Starts the thread that starts lookups, once for the process. A process with a sandbox calls it before its threads
/// enter their kinds.
pub(crate) fn prepare_lookups() {
    let _ = lookups();
}

fn lookups() -> Option<&'static Sender<Look>> {
    let start = || {
        let (send, asked) = unbounded::<Look>();
        let run = move || {
            sandbox::enter(ThreadKind::Names);
            for look in asked {
                let thread = std::thread::Builder::new().name("name-lookup".into()).stack_size(STACK_BYTES);
                if let Err(error) = thread.spawn(look) {
                    tracing::warn!(%error, "a host name cannot be looked up: no thread can be started");
                }
            }
        };
        std::thread::Builder::new().name("names".into()).spawn(run).ok().map(|_| send)
    };
    LOOKUPS.get_or_init(start).as_ref()
}

/// The state of a lookup.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Looked {
    /// It runs.
    Pending,
    /// The name's addresses, at least one.
    Found(Vec<SocketAddr>),
    /// The name has none.
    Failed,
}

/// One lookup. If it is dropped, its thread ends by itself.
pub(crate) struct Lookup {
    found: Receiver<Vec<SocketAddr>>,
    /// The thread closes the other end when it ends, which wakes the caller's event loop.
    bell: pipe::Receiver,
}

impl Lookup {
    /// Starts a lookup of at most `addresses_max` addresses; `None` = too many run, or no thread or descriptor is left.
    pub(crate) fn start(
        (host, port): (&str, u16),
        addresses_max: usize,
        registry: &Registry,
        token: Token,
    ) -> Option<Self> {
        let place = Place::take()?;
        let (rings, mut bell) = pipe::new().ok()?;
        registry.register(&mut bell, token, Interest::READABLE).ok()?;
        let (tell, found) = bounded(1);
        let host = host.to_owned();
        let look = move || {
            sandbox::count_as(ThreadKind::Names);
            let addresses = (host.as_str(), port).to_socket_addrs();
            let addresses = addresses.map(|found| found.take(addresses_max).collect()).unwrap_or_default();
            // The caller may have dropped the lookup.
            drop(tell.send(addresses));
            drop(place);
            drop(rings);
        };
        lookups()?.send(Box::new(look)).ok()?;
        Some(Self { found, bell })
    }

    pub(crate) fn look(&self) -> Looked {
        match self.found.try_recv() {
            Ok(addresses) if !addresses.is_empty() => Looked::Found(addresses),
            Ok(_) | Err(TryRecvError::Disconnected) => Looked::Failed,
            Err(TryRecvError::Empty) => Looked::Pending,
        }
    }

    pub(crate) fn reregister(&mut self, registry: &Registry, token: Token) -> std::io::Result<()> {
        registry.reregister(&mut self.bell, token, Interest::READABLE)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn endpoints_become_addresses() {
        let ip = |text: &str| Address::Ip(text.parse().expect("an address"));
        for (endpoint, address) in [
            ("tcp://127.0.0.1:5557", ip("127.0.0.1:5557")),
            ("tcp://[::1]:5557", ip("[::1]:5557")),
            ("tcp://*:*", ip("0.0.0.0:0")),
            ("tcp://engine-3.local:1", Address::Name { host: "engine-3.local".into(), port: 1 }),
            ("ipc:///run/e", Address::Path("/run/e".into())),
            ("ipc://@e", Address::Abstract(b"e".to_vec())),
        ] {
            assert_eq!(Address::parse(endpoint).expect(endpoint), address);
        }
    }

    #[test]
    fn anything_else_is_a_mistake_of_the_configuration() {
        for wrong in
            ["", "tcp://h", "tcp://:1", "tcp://h:70000", "ipc://", "ipc://@", "udp://h:1", "ipc:///a\0b", "tcp://a\0:1"]
        {
            assert_eq!(Address::parse(wrong).expect_err(wrong).kind(), Kind::Config, "{wrong:?}");
        }
    }
}
