//! What status, metrics and the doctor show of the other routers.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use arc_swap::ArcSwap;

use super::carrier::Link;
use super::digest::Digest;
use super::effects::Notice;
use super::origins::{OriginLoad, OriginStatus};
use super::protocol::Fault;
use super::values::{OriginId, Sender};
use crate::metrics::{CounterSet, RouterCounter};

/// Whether the load of the other routers is known since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Joining {
    /// The load of some peers is not known yet. The daemon is not ready.
    Waiting {
        /// Peers whose load is not known.
        missing: usize,
    },
    /// The load of all configured peers has been known, or there are none.
    #[default]
    Joined,
    /// The load of some peers was not known in time.
    Overdue {
        /// Peers whose load was not known then.
        missing: usize,
    },
}

impl Joining {
    /// The name used in status.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Waiting { .. } => "joining",
            Self::Joined => "joined",
            Self::Overdue { .. } => "overdue",
        }
    }
}

/// What this router says of itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OwnShown {
    /// The router.
    pub sender: Sender,
    /// Where others hear it.
    pub address: String,
    /// The last batch; 0 = none.
    pub sequence: u64,
    /// Of its gauges as of that batch.
    pub digest: Digest,
    /// Their sum.
    pub load: OriginLoad,
}

/// The link to a peer, and why its last messages were refused.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LinkShown {
    /// The link.
    pub link: Link,
    /// Why the latest message by it was refused, if it was refused after the latest one that was read.
    pub refused: Option<Fault>,
}

/// The other routers at one moment.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RoutersShown {
    /// This router; `None` = it shares no load.
    pub own: Option<OwnShown>,
    /// Whether their load is known.
    pub joining: Joining,
    /// The configured peers.
    pub links: Vec<LinkShown>,
    /// The routers that were heard.
    pub origins: Vec<OriginStatus>,
    /// Routers that listen to this one, but are none of its configured peers.
    pub unlisted: Vec<OriginId>,
    /// What was noticed not long ago, and of which router; 0 = nothing proves of which.
    pub recent: Vec<(OriginId, Notice)>,
}

/// What the thread of the other routers shows. Any thread may read it.
#[derive(Debug, Default)]
pub struct RoutersView {
    /// Counters since the start.
    pub counters: CounterSet<RouterCounter>,
    shown: ArcSwap<RoutersShown>,
    is_joining: AtomicBool,
}

impl RoutersView {
    /// A router that begins to join others.
    #[must_use]
    pub fn joining() -> Self {
        Self { is_joining: AtomicBool::new(true), ..Self::default() }
    }

    /// Whether the load of other routers is still awaited, so that the daemon is not ready.
    #[must_use]
    pub fn is_joining(&self) -> bool {
        // Relaxed: nothing else hangs on it.
        self.is_joining.load(Ordering::Relaxed)
    }

    /// The latest state.
    #[must_use]
    pub fn shown(&self) -> Arc<RoutersShown> {
        self.shown.load_full()
    }

    pub(super) fn show(&self, shown: RoutersShown) {
        // Relaxed: as above.
        self.is_joining.store(matches!(shown.joining, Joining::Waiting { .. }), Ordering::Relaxed);
        self.shown.store(Arc::new(shown));
    }
}
