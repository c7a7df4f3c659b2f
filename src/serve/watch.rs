//! Connections that are told of the fleet whenever it changes.
//!
//! A core looks at the fleet's version once in [`WATCH_LOOK_MS`] while somebody watches, and not at all otherwise. Whoever
//! has not read what was sent last is not sent more: the next reply is of the fleet as it is by then.
//!
//! A gateway that asks for pages is sent one after the other, each once the one before is written, with a turn of all others
//! in between. Each page is of the fleet as it is when the page is made, and begins at the place where the one before ended; all
//! bear the version that the first was of, so that a change meanwhile is told of anew. No table is kept between two pages: the
//! place of a worker that has left is free again only once nobody holds a table with it, and a gateway reads as slowly as it
//! likes. One that asks for the whole in one reply, as gateways do that know of no pages, has a turn filled by it.

use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use rustc_hash::FxHashMap;
use tokio::sync::Notify;

use super::core::Shared;
use super::io_backend::Stream;
use super::responder::{Replied, RoutingResponder, require_space};
use super::service::Service;
use crate::error::Result;
use crate::ids::{CorrelationId, SpaceId};
use crate::limits::{WATCH_LOOK_MS, WATCH_PAGE_REST_MS, WORKERS_PAGE_MAX};
use crate::metrics::CoreCounter;
use crate::wire::WatchCursor;

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
    /// Workers of one reply; `None` = all.
    page_limit: Option<usize>,
    /// What the gateway has, or is being sent.
    fleet_version: u64,
    /// Where the next page begins of what it is being sent.
    rest: Option<WatchCursor>,
}

impl Watches {
    pub(super) fn end(&mut self, connection: u64) {
        self.open.remove(&connection);
    }
}

impl<S: Service> RoutingResponder<S> {
    /// Begins a watch, in place of the one that the connection may have had. Answered at once, by the first page, unless the
    /// gateway has the fleet's present version (0 = it has none).
    pub(super) fn watch(
        &mut self,
        connection: u64,
        id: CorrelationId,
        (space, page_limit): (Option<SpaceId>, u32),
        fleet_version_seen: u64,
        out: &mut Vec<u8>,
    ) -> Result<Replied> {
        let fleet = self.service.fleet();
        require_space(&fleet, space)?;
        let fleet_version = fleet.version;
        drop(fleet);
        let page_limit = (page_limit > 0).then(|| (page_limit as usize).min(WORKERS_PAGE_MAX));
        let is_seen = fleet_version_seen != 0 && fleet_version_seen == fleet_version;
        let rest = (!is_seen).then_some(WatchCursor { fleet_version, place: 0 });
        self.watches.open.insert(connection, Watch { id, space, page_limit, fleet_version, rest });
        if is_seen {
            self.counters().bump(CoreCounter::Requests);
        } else {
            self.next_page(connection, out);
        }
        self.watches.begun.notify_one();
        Ok(if is_seen { Replied::Later } else { Replied::Now })
    }

    /// Appends the next page of what a connection is being sent; begins with the present fleet where all of another was sent.
    /// Nothing, if it watches no more.
    fn next_page(&mut self, connection: u64, out: &mut Vec<u8>) {
        let Some(watch) = self.watches.open.get_mut(&connection) else { return };
        let fleet = self.service.fleet();
        let from = watch.rest.take().unwrap_or(WatchCursor { fleet_version: fleet.version, place: 0 });
        watch.fleet_version = from.fleet_version;
        watch.rest = self.encoder.watch(watch.id, (&fleet, watch.space), (from, watch.page_limit), out);
        if from.place > 0 {
            self.counters().bump(CoreCounter::WatchPages);
        }
    }

    /// The connections that have not been sent all of the present fleet.
    fn watches_due(&self) -> Vec<u64> {
        let version = self.service.fleet().version;
        let is_due = |watch: &Watch| watch.rest.is_some() || watch.fleet_version != version;
        self.watches.open.iter().filter(|(_, watch)| is_due(watch)).map(|(connection, _)| *connection).collect()
    }

    /// Whether a page is yet to be sent to somebody of a fleet that has been begun.
    fn is_mid_fleet(&self) -> bool {
        self.watches.open.values().any(|watch| watch.rest.is_some())
    }

    /// The next page for a connection, if it still watches.
    fn watched(&mut self, connection: u64) -> Option<Vec<u8>> {
        let watch = self.watches.open.get(&connection)?;
        if watch.rest.is_none() {
            self.counters().bump(CoreCounter::WatchesTold);
        }
        let mut frame = Vec::new();
        self.next_page(connection, &mut frame);
        Some(frame)
    }
}

/// Tells the watchers of a core of every change, for ever.
pub(super) async fn tell_of_changes<T: Stream, S: Service + 'static>(core: Rc<Shared<T, S>>) {
    let begun = Arc::clone(&core.responder.borrow().watches.begun);
    loop {
        begun.notified().await;
        while !core.responder.borrow().watches.open.is_empty() {
            let due = core.responder.borrow().watches_due();
            let mut told_any = false;
            for connection in due {
                told_any |= tell(&core, connection);
                // A fleet may be large, and others have their turn between two pages.
                tokio::task::yield_now().await;
            }
            // Those who have not read their last page are not waited for more often than a change is looked for.
            let goes_on = told_any && core.responder.borrow().is_mid_fleet();
            let rest_ms = if goes_on { WATCH_PAGE_REST_MS } else { WATCH_LOOK_MS };
            // Whoever begins meanwhile is looked at at once.
            let rest = Duration::from_millis(rest_ms);
            drop(tokio::time::timeout(rest, begun.notified()).await);
        }
    }
}

/// Sends a connection its next page, if it has read the last; says whether it did.
fn tell<T: Stream, S: Service + 'static>(core: &Rc<Shared<T, S>>, connection: u64) -> bool {
    let Some(link) = core.open.borrow().get(&connection).map(Rc::clone) else { return false };
    if link.outlet.is_flushing() {
        return false;
    }
    let frame = core.responder.borrow_mut().watched(connection);
    if let Some(frame) = &frame {
        core.deliver(link, frame);
    }
    frame.is_some()
}
