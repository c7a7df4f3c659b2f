//! Connections whose peer asks and does not read.
//!
//! Such a peer is held back first: while a write waits nothing more is read from it, so that what it holds here is one
//! receive buffer and the replies of one turn. It keeps a place, though, and bookings: after a time it is closed.

use std::rc::Rc;
use std::time::{Duration, Instant};

use super::core::Shared;
use super::engine::Stream;
use super::service::Service;

/// Looks, for ever, for connections that have been written to in vain for too long, and closes them.
pub(super) async fn cut_unread<T: Stream, S: Service + 'static>(core: Rc<Shared<T, S>>) {
    let limit = Duration::from_millis(core.options.unread_ms_max);
    if limit.is_zero() {
        return;
    }
    loop {
        tokio::time::sleep(limit / 4).await;
        let now = Instant::now();
        core.open.borrow().values().filter(|link| link.outlet.is_stuck(now, limit)).for_each(|link| link.cut_unread());
    }
}
