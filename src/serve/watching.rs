//! Connections that are told of the fleet whenever it changes.
//!
//! A core looks at the fleet's version once in [`WATCH_LOOK_MS`] while somebody watches, and not at all otherwise. Whoever
//! has not read what was sent last is not sent more: the next reply is of the fleet as it is by then.

use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use rustc_hash::FxHashMap;
use tokio::sync::Notify;

use super::core::Shared;
use super::engine::Stream;
use super::responder::{Replied, RoutingResponder, require_space};
use super::service::Service;
use crate::error::Result;
use crate::ids::{CorrelationId, SpaceId};
use crate::limits::WATCH_LOOK_MS;
use crate::metrics::CoreCounter;

/// The watches of a core's connections.
#[derive(Debug, Default)]
pub(super) struct Watches {
    /// By connection: one each.
    open: FxHashMap<u64, Watch>,
    /// Rings when one begins.
    begun: Arc<Notify>,
}

#[derive(Debug)]
struct Watch {
    id: CorrelationId,
    /// `None` = of every space.
    space: Option<SpaceId>,
    /// What the gateway has, or is being sent.
    fleet_version: u64,
}

impl Watches {
    pub(super) fn end(&mut self, connection: u64) {
        self.open.remove(&connection);
    }
}

impl<S: Service> RoutingResponder<S> {
    /// Begins a watch, in place of the one that the connection may have had. Answered at once, unless the gateway has the
    /// fleet's present version (0 = it has none).
    pub(super) fn watch(
        &mut self,
        connection: u64,
        id: CorrelationId,
        (space, fleet_version_seen): (Option<SpaceId>, u64),
        out: &mut Vec<u8>,
    ) -> Result<Replied> {
        let fleet = self.service.fleet();
        require_space(&fleet, space)?;
        let fleet_version = fleet.version;
        self.watches.open.insert(connection, Watch { id, space, fleet_version });
        self.watches.begun.notify_one();
        if fleet_version_seen != 0 && fleet_version_seen == fleet_version {
            self.counters().bump(CoreCounter::Requests);
            return Ok(Replied::Later);
        }
        self.encoder.watch(id, &fleet, space, out);
        Ok(Replied::Now)
    }

    /// The connections that have not been sent the present fleet.
    fn watches_due(&self) -> Vec<u64> {
        let version = self.service.fleet().version;
        let due = self.watches.open.iter().filter(|(_, watch)| watch.fleet_version != version);
        due.map(|(connection, _)| *connection).collect()
    }

    /// The present fleet for a connection, if it still watches.
    fn watched(&mut self, connection: u64) -> Option<Vec<u8>> {
        let watch = self.watches.open.get_mut(&connection)?;
        let fleet = self.service.fleet();
        watch.fleet_version = fleet.version;
        let mut frame = Vec::new();
        self.encoder.watch(watch.id, &fleet, watch.space, &mut frame);
        self.counters().bump(CoreCounter::WatchesTold);
        Some(frame)
    }
}

/// Tells the watchers of a core of every change, for ever.
pub(super) async fn tell_of_changes<T: Stream, S: Service + 'static>(core: Rc<Shared<T, S>>) {
    let begun = Arc::clone(&core.responder.borrow().watches.begun);
    loop {
        begun.notified().await;
        while !core.responder.borrow().watches.open.is_empty() {
            tokio::time::sleep(Duration::from_millis(WATCH_LOOK_MS)).await;
            let due = core.responder.borrow().watches_due();
            for connection in due {
                tell(&core, connection);
                // A fleet may be large, and others have their turn between two watchers.
                tokio::task::yield_now().await;
            }
        }
    }
}

fn tell<T: Stream, S: Service + 'static>(core: &Rc<Shared<T, S>>, connection: u64) {
    let Some(link) = core.open.borrow().get(&connection).map(Rc::clone) else { return };
    if link.outlet.is_flushing() {
        return;
    }
    let frame = core.responder.borrow_mut().watched(connection);
    if let Some(frame) = frame {
        core.deliver(link, &frame);
    }
}
