//! Watches: connections that receive the fleet whenever it changes.
//!
//! A core checks the fleet's version every [`WATCH_CHECK_MS`] while one of its connections watches, and not at all
//! otherwise. A connection that has not read its last page gets no other: its next page shows the fleet as it is by
//! then.
//!
//! A gateway that asks for pages gets one after the other. Each is made once the one before is written, and all other
//! connections have their quantum in between. Each page shows the fleet as it is when the page is made, and begins
//! where the one before ended. All pages bear the fleet version of the first, so that a change meanwhile is sent anew.
//!
//! No fleet table is held between two pages, because a gateway reads as slowly as it likes: the place of a worker that
//! has left is free again only once nothing holds a table with it. A gateway that knows of no pages asks for the whole
//! fleet in one reply, which fills a quantum.

use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use rustc_hash::FxHashMap;
use tokio::sync::Notify;

use super::core::CoreState;
use super::io_backend::Stream;
use super::responder::{Answer, Encoded, RoutingResponder, require_space};
use crate::error::Result;
use crate::ids::{CorrelationId, SpaceId};
use crate::limits::{WATCH_CHECK_MS, WATCH_PAGE_PAUSE_MS, WORKERS_PAGE_MAX};
use crate::metrics::CoreCounter;
use crate::requests::Service;
use crate::wire::WatchCursor;

/// The watches of a core's connections.
#[derive(Debug, Default)]
pub(super) struct Watches {
    /// By connection: one each.
    open: FxHashMap<u64, Watch>,
    /// Wakes the task that sends pages when a watch begins.
    begun: Arc<Notify>,
}

#[derive(Debug)]
struct Watch {
    id: CorrelationId,
    /// `None` = every space.
    space: Option<SpaceId>,
    /// Workers of one page; `None` = all.
    page_limit: Option<usize>,
    /// The version that the gateway has, or whose pages it is being sent.
    fleet_version: u64,
    /// The start of the next page; `None` = all pages of `fleet_version` are sent.
    next_page: Option<WatchCursor>,
}

impl Watches {
    pub(super) fn end(&mut self, connection: u64) {
        self.open.remove(&connection);
    }
}

impl<S: Service> RoutingResponder<S> {
    /// Begins a watch, in place of the one that the connection may have. The answer is the first page, unless the
    /// gateway has the fleet's present version (0 = it has none).
    pub(super) fn watch(
        &mut self,
        connection: u64,
        id: CorrelationId,
        (space, page_limit): (Option<SpaceId>, u32),
        fleet_version_seen: u64,
        out: &mut Vec<u8>,
    ) -> Result<Answer> {
        let fleet = self.requests.service().fleet();
        require_space(&fleet, space)?;
        let fleet_version = fleet.version;
        drop(fleet);
        let page_limit = (page_limit > 0).then(|| (page_limit as usize).min(WORKERS_PAGE_MAX));
        let is_seen = fleet_version_seen != 0 && fleet_version_seen == fleet_version;
        let next_page = (!is_seen).then_some(WatchCursor { fleet_version, place: 0 });
        let mut watch = Watch { id, space, page_limit, fleet_version, next_page };
        let answer = if is_seen { Answer::Watching } else { Answer::Reply(self.append_page(&mut watch, out)) };
        self.watches.open.insert(connection, watch);
        self.watches.begun.notify_one();
        Ok(answer)
    }

    /// Appends the next page of a watch. After the last page of one version, this is the first page of the present one.
    fn append_page(&mut self, watch: &mut Watch, out: &mut Vec<u8>) -> Encoded {
        let fleet = self.requests.service().fleet();
        let from = watch.next_page.take().unwrap_or(WatchCursor { fleet_version: fleet.version, place: 0 });
        watch.fleet_version = from.fleet_version;
        if from.place > 0 {
            self.counters().bump(CoreCounter::WatchPages);
        }
        Encoded::reply(out, |out| {
            watch.next_page = self.encoder.watch(watch.id, (&fleet, watch.space), (from, watch.page_limit), out);
        })
    }

    /// The connections that have not been sent all of the present fleet.
    fn watches_due(&self) -> Vec<u64> {
        let version = self.requests.service().fleet().version;
        let is_due = |watch: &Watch| watch.next_page.is_some() || watch.fleet_version != version;
        self.watches.open.iter().filter(|(_, watch)| is_due(watch)).map(|(connection, _)| *connection).collect()
    }

    /// Whether a connection has been sent some pages of a version, and not all.
    fn is_mid_fleet(&self) -> bool {
        self.watches.open.values().any(|watch| watch.next_page.is_some())
    }

    /// The next page for a connection, if it still watches.
    fn next_page(&mut self, connection: u64) -> Option<Vec<u8>> {
        let mut watch = self.watches.open.remove(&connection)?;
        if watch.next_page.is_none() {
            self.counters().bump(CoreCounter::WatchesTold);
        }
        let mut frame = Vec::new();
        let _: Encoded = self.append_page(&mut watch, &mut frame);
        self.watches.open.insert(connection, watch);
        Some(frame)
    }
}

/// Sends every change of the fleet to the watches of a core, for ever.
pub(super) async fn push_changes<T: Stream, S: Service + 'static>(core: Rc<CoreState<T, S>>) {
    let begun = Arc::clone(&core.responder.borrow().watches.begun);
    loop {
        begun.notified().await;
        while !core.responder.borrow().watches.open.is_empty() {
            let due = core.responder.borrow().watches_due();
            let mut sent_any = false;
            for connection in due {
                sent_any |= push_page(&core, connection);
                // A fleet may be large, and other connections have their quantum between two pages.
                tokio::task::yield_now().await;
            }
            // A connection that has not read its last page is checked no more often than the fleet's version.
            let goes_on = sent_any && core.responder.borrow().is_mid_fleet();
            let pause_ms = if goes_on { WATCH_PAGE_PAUSE_MS } else { WATCH_CHECK_MS };
            // A watch that begins meanwhile ends the pause.
            drop(tokio::time::timeout(Duration::from_millis(pause_ms), begun.notified()).await);
        }
    }
}

/// Sends a connection its next page if it has read the last one. `true` = sent.
fn push_page<T: Stream, S: Service + 'static>(core: &Rc<CoreState<T, S>>, connection: u64) -> bool {
    let Some(handle) = core.open.borrow().get(&connection).map(Rc::clone) else { return false };
    if handle.writer.is_flushing() {
        return false;
    }
    let frame = core.responder.borrow_mut().next_page(connection);
    if let Some(frame) = &frame {
        core.deliver(handle, frame);
    }
    frame.is_some()
}
