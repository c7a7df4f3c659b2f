//! Resolves host names without holding up the thread that asks: the system's resolver blocks, for seconds where a name
//! server does not answer, so each look-up has a thread of its own, and only a few run at once.

use std::net::{SocketAddr, ToSocketAddrs as _};
use std::sync::atomic::{AtomicUsize, Ordering};

use crossbeam::channel::{Receiver, TryRecvError, bounded};
use mio::unix::pipe;
use mio::{Interest, Registry, Token};

use crate::limits::{NAME_ADDRESSES_MAX, NAME_LOOKUPS_MAX};

/// What a system's resolver needs, with room to spare.
const STACK_BYTES: usize = 512 << 10;

/// Look-ups of this process that run now.
static RUNNING: AtomicUsize = AtomicUsize::new(0);

/// One of the places of [`RUNNING`].
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

/// What came of a look-up so far.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Looked {
    /// It runs.
    Pending,
    /// The name's addresses, at least one.
    Found(Vec<SocketAddr>),
    /// The name has none.
    Failed,
}

/// One look-up. Dropping it leaves its thread alone, which ends by itself.
pub(super) struct Lookup {
    found: Receiver<Vec<SocketAddr>>,
    /// Its other end is closed by the thread when it ends, which wakes the caller's event loop.
    bell: pipe::Receiver,
}

impl Lookup {
    /// Starts one; `None` = too many run, or there is no thread or descriptor left for it.
    pub(super) fn start(host: &str, port: u16, registry: &Registry, token: Token) -> Option<Self> {
        let place = Place::take()?;
        let (rings, mut bell) = pipe::new().ok()?;
        registry.register(&mut bell, token, Interest::READABLE).ok()?;
        let (tell, found) = bounded(1);
        let host = host.to_owned();
        let look = move || {
            let addresses = (host.as_str(), port).to_socket_addrs();
            let addresses = addresses.map(|found| found.take(NAME_ADDRESSES_MAX).collect()).unwrap_or_default();
            // Whoever asked may have gone.
            drop(tell.send(addresses));
            drop(place);
            drop(rings);
        };
        std::thread::Builder::new().name("name-lookup".into()).stack_size(STACK_BYTES).spawn(look).ok()?;
        Some(Self { found, bell })
    }

    pub(super) fn look(&self) -> Looked {
        match self.found.try_recv() {
            Ok(addresses) if !addresses.is_empty() => Looked::Found(addresses),
            Ok(_) | Err(TryRecvError::Disconnected) => Looked::Failed,
            Err(TryRecvError::Empty) => Looked::Pending,
        }
    }

    pub(super) fn reregister(&mut self, registry: &Registry, token: Token) -> std::io::Result<()> {
        registry.reregister(&mut self.bell, token, Interest::READABLE)
    }
}
