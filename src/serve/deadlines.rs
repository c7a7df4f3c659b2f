//! Connections whose peer owes something and does not give it: hello, or the rest of a frame that has begun. A peer that
//! sends a byte now and then would hold its place and its buffer for as long as it likes.
//!
//! What is owed is noted by the connection and looked at now and then: a request in time costs no clock.

use std::cell::Cell;
use std::net::Shutdown;
use std::rc::Rc;
use std::time::{Duration, Instant};

use rustc_hash::FxHashMap;

use super::core::Shared;
use super::io_backend::Stream;
use super::service::Service;
use crate::error::{Error, Kind};
use crate::ids::CorrelationId;
use crate::limits::OVERDUE_LOOKS;
use crate::metrics::CoreCounter;

/// What a connection waits for from its peer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Owed {
    /// Nothing that was begun.
    #[default]
    Nothing,
    /// Hello.
    Hello,
    /// The rest of the frame behind so many that were whole.
    Frame(u64),
    /// Room for the replies to so many frames.
    Room(u64),
}

impl Owed {
    /// Whether the peer is to send something. While requests are answered in time nothing is, and looking costs no memory.
    const fn is_awaited(self) -> bool {
        matches!(self, Self::Hello | Self::Frame(_))
    }

    /// What to tell a peer that has not given it for `patience`.
    pub(super) fn reproach(self, patience: Duration) -> Option<Error> {
        let ms = patience.as_millis();
        match self {
            Self::Nothing | Self::Room(_) => None,
            Self::Hello => Some(Error::new(
                Kind::HelloRequired,
                format!("no hello has come within {ms} ms"),
                "say hello as soon as the connection is there, or raise serve.frame_timeout_ms",
            )),
            Self::Frame(_) => Some(Error::new(
                Kind::Malformed,
                format!("the rest of a frame has not come within {ms} ms"),
                "send frames whole, or raise serve.frame_timeout_ms",
            )),
        }
    }
}

/// How often to look for who is overdue.
pub(super) fn look_every(patience: Duration) -> Duration {
    (patience / OVERDUE_LOOKS).max(Duration::from_millis(1))
}

/// Since when a connection owes the same.
#[derive(Clone, Copy, Debug)]
struct Debt {
    owed: Owed,
    since: Instant,
}

impl Debt {
    /// The same debt if it is still that, else a new one.
    fn of(before: Option<Self>, owed: Owed, now: Instant) -> Self {
        before.filter(|debt| debt.owed == owed).unwrap_or(Self { owed, since: now })
    }

    fn is_overdue(&self, patience: Duration, now: Instant) -> bool {
        self.owed != Owed::Nothing && now.saturating_duration_since(self.since) >= patience
    }
}

/// Returns what a connection has owed for `patience`.
pub(super) async fn overdue(owed: &Cell<Owed>, patience: Duration) -> Owed {
    let mut debt = Debt::of(None, owed.get(), Instant::now());
    loop {
        tokio::time::sleep(look_every(patience)).await;
        let now = Instant::now();
        debt = Debt::of(Some(debt), owed.get(), now);
        if debt.is_overdue(patience, now) {
            return debt.owed;
        }
    }
}

/// What is to be done about a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    /// Tell the peer, and read no more.
    Tell(Owed),
    /// It was told and does not even take that: cut it.
    Cut,
}

/// The connections of a core that owe something.
#[derive(Debug, Default)]
struct Overdue {
    /// By connection; with the debt, whether the peer was told.
    debts: FxHashMap<u64, (Debt, bool)>,
}

impl Overdue {
    /// Looks at all `open` connections and what they owe; answers what is to be done now. Who has no room for replies
    /// is not meant: what that may hold is bounded, and it ends by other rules.
    fn look(&mut self, open: impl Iterator<Item = (u64, Owed)>, patience: Duration, now: Instant) -> Vec<(u64, Step)> {
        let before = std::mem::take(&mut self.debts);
        let mut steps = Vec::new();
        for (connection, owed) in open {
            let (debt, is_told) = before.get(&connection).copied().unzip();
            let (debt, mut is_told) = (Debt::of(debt, owed, now), is_told.unwrap_or(false));
            if is_told {
                steps.push((connection, Step::Cut));
            } else if owed.is_awaited() && debt.is_overdue(patience, now) {
                steps.push((connection, Step::Tell(owed)));
                is_told = true;
            }
            if is_told || owed.is_awaited() {
                self.debts.insert(connection, (debt, is_told));
            }
        }
        steps
    }
}

/// Closes, for ever, those connections of a core that owe something for as long as they may.
pub(super) async fn close_overdue<T: Stream, S: Service + 'static>(core: Rc<Shared<T, S>>) {
    let patience = Duration::from_millis(core.options.frame_timeout_ms);
    if patience.is_zero() {
        return;
    }
    let mut overdue = Overdue::default();
    loop {
        tokio::time::sleep(look_every(patience)).await;
        let steps = {
            let open = core.open.borrow();
            overdue.look(open.iter().map(|(id, link)| (*id, link.owed.get())), patience, Instant::now())
        };
        for (connection, step) in steps {
            close(&core, connection, step, patience);
        }
    }
}

fn close<T: Stream, S: Service + 'static>(core: &Rc<Shared<T, S>>, connection: u64, step: Step, patience: Duration) {
    let Some(link) = core.open.borrow().get(&connection).map(Rc::clone) else { return };
    let Step::Tell(owed) = step else {
        // An error says that the peer is gone, which is what is wanted.
        let _ = link.stream.shutdown(Shutdown::Both);
        return;
    };
    let Some(error) = owed.reproach(patience) else { return };
    core.count_overdue(owed, &error);
    let mut frame = Vec::new();
    core.responder.borrow_mut().encoder.error(CorrelationId(0), &error, &mut frame);
    // The rings of a lane end with it: its gateway is told by the connection's socket.
    core.deliver(core.owner_of(connection).unwrap_or_else(|| Rc::clone(&link)), &frame);
    // The connection's task finds the end of what it reads, waits until the frame above is written, and closes.
    let _ = link.stream.shutdown(Shutdown::Read);
}

impl<T: Stream, S: Service + 'static> Shared<T, S> {
    fn count_overdue(&self, owed: Owed, error: &Error) {
        let counter = match owed {
            Owed::Hello => CoreCounter::ConnectionsHelloOverdue,
            _ => CoreCounter::ConnectionsFrameOverdue,
        };
        self.counters.bump(counter);
        if let Some(withheld) = self.log_quota.take(Instant::now()) {
            tracing::warn!(core = self.options.index, %error, withheld, "a connection is closed");
        }
    }
}

// Connections whose peer asks and does not read.
//
// Such a peer is held back first: while a write waits nothing more is read from it, so that what it holds here is one
// receive buffer and the replies of one turn. It keeps a place, though, and bookings: after a time it is closed.

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

#[cfg(test)]
mod tests {
    use super::*;

    const PATIENCE: Duration = Duration::from_secs(8);

    fn seconds(start: Instant, seconds: u64) -> Instant {
        start + Duration::from_secs(seconds)
    }

    #[test]
    fn only_what_is_owed_all_the_while_is_overdue() {
        let (mut overdue, start) = (Overdue::default(), Instant::now());
        let mut look = |at, open: &[(u64, Owed)]| overdue.look(open.iter().copied(), PATIENCE, seconds(start, at));
        let open = |idle, hello, slow, busy, mute| {
            [(1, idle), (2, hello), (3, slow), (4, Owed::Frame(busy)), (5, Owed::Room(mute))]
        };
        assert_eq!(look(0, &open(Owed::Nothing, Owed::Hello, Owed::Frame(3), 0, 7)), []);
        assert_eq!(look(7, &open(Owed::Nothing, Owed::Nothing, Owed::Frame(3), 1, 7)), []);
        let told = [(3, Step::Tell(Owed::Frame(3)))];
        assert_eq!(look(8, &open(Owed::Nothing, Owed::Hello, Owed::Frame(3), 2, 7)), told);
        assert_eq!(look(9, &open(Owed::Nothing, Owed::Hello, Owed::Frame(4), 3, 7)), [(3, Step::Cut)]);
        assert_eq!(look(16, &[(2, Owed::Hello), (4, Owed::Frame(4))]), [(2, Step::Tell(Owed::Hello))]);
        assert_eq!(look(17, &[(4, Owed::Nothing)]), []);
        assert!(overdue.debts.is_empty(), "nothing is kept of those who have gone or owe nothing");
    }

    #[test]
    fn a_peer_is_told_what_it_owes() {
        assert_eq!(Owed::Hello.reproach(PATIENCE).map(|error| error.kind()), Some(Kind::HelloRequired));
        let rest = Owed::Frame(1).reproach(PATIENCE).unwrap();
        assert!(rest.kind() == Kind::Malformed && rest.message().contains("8000 ms"), "{rest}");
        assert!(Owed::Nothing.reproach(PATIENCE).is_none() && Owed::Room(1).reproach(PATIENCE).is_none());
    }
}
