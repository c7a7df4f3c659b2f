//! Time limits of connections: for input that a peer has to send, and for replies that a peer does not read.
//!
//! * **Read deadline** (`serve.frame_timeout_ms`). A peer that has not said hello, or has not sent the rest of a frame,
//!   within this time gets an error, and its connection is closed. Otherwise a peer that sends one byte now and then
//!   would occupy its connection slot and its buffer for ever.
//! * **Unread limit** (`serve.unread_ms_max`). A peer that sends requests and does not read replies is first throttled:
//!   while a write waits, the daemon reads nothing more from it. The peer then holds one receive buffer and the replies
//!   of one fairness quantum (at most `limits::FRAMES_PER_QUANTUM_MAX` frames). It still occupies a connection slot and
//!   bookings, so after this time its connection is closed.
//! * **Reply budget.** If the unread replies of all gateways take more memory than they may, connections with the most
//!   unread bytes are closed at once.
//!
//! The connection notes what it waits for, and a task checks the note periodically. A request that arrives in time
//! needs no clock read.

use std::cell::Cell;
use std::net::Shutdown;
use std::rc::Rc;
use std::time::{Duration, Instant};

use rustc_hash::FxHashMap;

use super::core::CoreState;
use super::io_backend::Stream;
use crate::error::{Error, Kind};
use crate::ids::CorrelationId;
use crate::limits::FRAME_TIMEOUT_CHECKS;
use crate::metrics::CoreCounter;
use crate::requests::Service;

/// The input, or the space for replies, that a connection waits for. The connection sets it; the task that checks the
/// deadlines reads it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum PeerWait {
    /// Nothing that has begun.
    #[default]
    Nothing,
    /// The connection's hello.
    Hello,
    /// The rest of a frame, after this number of whole frames.
    Frame(u64),
    /// Space in the socket for the replies to this number of frames.
    ReplySpace(u64),
}

impl PeerWait {
    /// Whether the peer has to send something. While requests are answered in time none has, and a check allocates
    /// nothing.
    const fn is_input(self) -> bool {
        matches!(self, Self::Hello | Self::Frame(_))
    }

    /// The error for a peer that has not sent its input within `timeout`.
    pub(super) fn timeout_error(self, timeout: Duration) -> Option<Error> {
        let ms = timeout.as_millis();
        match self {
            Self::Nothing | Self::ReplySpace(_) => None,
            Self::Hello => Some(Error::new(
                Kind::HelloRequired,
                format!("no hello has come within {ms} ms"),
                "send hello as soon as the connection is open, or raise serve.frame_timeout_ms",
            )),
            Self::Frame(_) => Some(Error::new(
                Kind::Malformed,
                format!("the rest of a frame has not come within {ms} ms"),
                "send whole frames, or raise serve.frame_timeout_ms",
            )),
        }
    }
}

/// The time between two checks of a deadline.
fn check_interval(timeout: Duration) -> Duration {
    (timeout / FRAME_TIMEOUT_CHECKS).max(Duration::from_millis(1))
}

/// A connection's wait, and its start.
#[derive(Clone, Copy, Debug)]
struct WaitSince {
    wait: PeerWait,
    since: Instant,
}

impl WaitSince {
    /// The wait before if the connection still waits for the same, else a new one.
    fn of(before: Option<Self>, wait: PeerWait, now: Instant) -> Self {
        before.filter(|before| before.wait == wait).unwrap_or(Self { wait, since: now })
    }

    fn has_timed_out(&self, timeout: Duration, now: Instant) -> bool {
        self.wait != PeerWait::Nothing && now.saturating_duration_since(self.since) >= timeout
    }
}

/// Returns once a connection has waited for the same input, or for space for its replies, for `timeout`.
pub(super) async fn timed_out(peer_wait: &Cell<PeerWait>, timeout: Duration) -> PeerWait {
    let mut current = WaitSince::of(None, peer_wait.get(), Instant::now());
    loop {
        tokio::time::sleep(check_interval(timeout)).await;
        let now = Instant::now();
        current = WaitSince::of(Some(current), peer_wait.get(), now);
        if current.has_timed_out(timeout, now) {
            return current.wait;
        }
    }
}

/// The next step against a connection whose read deadline has passed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum TimeoutStep {
    /// Send the timeout error, and read no more.
    SendError(PeerWait),
    /// The peer does not even read the error: cut the connection.
    Cut,
}

/// The connections of a core that wait for input.
#[derive(Debug, Default)]
struct ReadDeadlines {
    /// By connection: its wait, and whether the timeout error was sent.
    waits: FxHashMap<u64, (WaitSince, bool)>,
}

impl ReadDeadlines {
    /// Checks all `open` connections, and returns the steps that are due. A connection without space for its replies is
    /// not meant: its memory is bounded, and the unread limit ends it.
    fn check(
        &mut self,
        open: impl Iterator<Item = (u64, PeerWait)>,
        timeout: Duration,
        now: Instant,
    ) -> Vec<(u64, TimeoutStep)> {
        let before = std::mem::take(&mut self.waits);
        let mut steps = Vec::new();
        for (connection, wait) in open {
            let (since, error_sent) = before.get(&connection).copied().unzip();
            let (since, mut error_sent) = (WaitSince::of(since, wait, now), error_sent.unwrap_or(false));
            if error_sent {
                steps.push((connection, TimeoutStep::Cut));
            } else if wait.is_input() && since.has_timed_out(timeout, now) {
                steps.push((connection, TimeoutStep::SendError(wait)));
                error_sent = true;
            }
            if error_sent || wait.is_input() {
                self.waits.insert(connection, (since, error_sent));
            }
        }
        steps
    }
}

/// Closes the connections of a core whose read deadline has passed, for ever.
pub(super) async fn enforce_read_deadlines<T: Stream, S: Service + 'static>(core: Rc<CoreState<T, S>>) {
    let timeout = Duration::from_millis(core.options.frame_timeout_ms);
    if timeout.is_zero() {
        return;
    }
    let mut deadlines = ReadDeadlines::default();
    loop {
        tokio::time::sleep(check_interval(timeout)).await;
        let steps = {
            let open = core.open.borrow();
            deadlines.check(open.iter().map(|(id, handle)| (*id, handle.peer_wait.get())), timeout, Instant::now())
        };
        for (connection, step) in steps {
            close(&core, connection, step, timeout);
        }
    }
}

fn close<T: Stream, S: Service + 'static>(
    core: &Rc<CoreState<T, S>>,
    connection: u64,
    step: TimeoutStep,
    timeout: Duration,
) {
    let Some(handle) = core.open.borrow().get(&connection).map(Rc::clone) else { return };
    let TimeoutStep::SendError(wait) = step else {
        // An error means that the peer has gone, as intended.
        let _ = handle.stream.shutdown(Shutdown::Both);
        return;
    };
    let Some(error) = wait.timeout_error(timeout) else { return };
    core.count_timeout(wait, &error);
    let mut frame = Vec::new();
    core.responder.borrow_mut().encoder.error(CorrelationId(0), &error, &mut frame);
    // A lane's rings end with the lane: its gateway gets the error by the connection's socket.
    core.deliver(core.owner_of(connection).unwrap_or_else(|| Rc::clone(&handle)), &frame);
    // The connection's task reads the end of its input, waits until the frame above is written, and closes.
    let _ = handle.stream.shutdown(Shutdown::Read);
}

/// Closes connections to which a write has waited for longer than the unread limit, for ever.
pub(super) async fn enforce_unread_limit<T: Stream, S: Service + 'static>(core: Rc<CoreState<T, S>>) {
    let limit = Duration::from_millis(core.options.unread_ms_max);
    if limit.is_zero() {
        return;
    }
    loop {
        tokio::time::sleep(limit / 4).await;
        let now = Instant::now();
        let open = core.open.borrow();
        open.values().filter(|handle| handle.writer.is_stalled(now, limit)).for_each(|handle| handle.cut_unread());
    }
}

/// Closes connections while the replies that gateways have not read take more memory than they may, for ever: the one
/// with the most unread bytes first.
pub(super) async fn enforce_reply_budget<T: Stream, S: Service + 'static>(core: Rc<CoreState<T, S>>) {
    loop {
        core.reply_budget.exceeded().await;
        let most = {
            let open = core.open.borrow();
            let unread = open.values().filter(|handle| !handle.is_unread() && handle.writer.held() > 0);
            unread.max_by_key(|handle| handle.writer.held()).map(Rc::clone)
        };
        if let Some(handle) = most {
            core.counters.bump(CoreCounter::ConnectionsUnreadMemory);
            handle.cut_unread();
        }
        // The connection's task gives its memory back when it runs.
        tokio::task::yield_now().await;
    }
}

impl<T: Stream, S: Service + 'static> CoreState<T, S> {
    fn count_timeout(&self, wait: PeerWait, error: &Error) {
        let counter = match wait {
            PeerWait::Hello => CoreCounter::ConnectionsHelloOverdue,
            _ => CoreCounter::ConnectionsFrameOverdue,
        };
        self.counters.bump(counter);
        if let Some(withheld) = self.log_quota.take(Instant::now()) {
            tracing::warn!(core = self.options.index, %error, withheld, "a connection is closed");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TIMEOUT: Duration = Duration::from_secs(8);

    fn seconds(start: Instant, seconds: u64) -> Instant {
        start + Duration::from_secs(seconds)
    }

    #[test]
    fn a_deadline_passes_only_while_the_connection_waits_for_the_same() {
        let (mut deadlines, start) = (ReadDeadlines::default(), Instant::now());
        let mut check =
            |at, open: &[(u64, PeerWait)]| deadlines.check(open.iter().copied(), TIMEOUT, seconds(start, at));
        let open = |idle, hello, slow, busy, mute| {
            [(1, idle), (2, hello), (3, slow), (4, PeerWait::Frame(busy)), (5, PeerWait::ReplySpace(mute))]
        };
        assert_eq!(check(0, &open(PeerWait::Nothing, PeerWait::Hello, PeerWait::Frame(3), 0, 7)), []);
        assert_eq!(check(7, &open(PeerWait::Nothing, PeerWait::Nothing, PeerWait::Frame(3), 1, 7)), []);
        let late = [(3, TimeoutStep::SendError(PeerWait::Frame(3)))];
        assert_eq!(check(8, &open(PeerWait::Nothing, PeerWait::Hello, PeerWait::Frame(3), 2, 7)), late);
        let cut = [(3, TimeoutStep::Cut)];
        assert_eq!(check(9, &open(PeerWait::Nothing, PeerWait::Hello, PeerWait::Frame(4), 3, 7)), cut);
        let late = [(2, TimeoutStep::SendError(PeerWait::Hello))];
        assert_eq!(check(16, &[(2, PeerWait::Hello), (4, PeerWait::Frame(4))]), late);
        assert_eq!(check(17, &[(4, PeerWait::Nothing)]), []);
        assert!(deadlines.waits.is_empty(), "connections that ended or wait for nothing leave no entry");
    }

    #[test]
    fn the_timeout_error_names_the_missing_input() {
        assert_eq!(PeerWait::Hello.timeout_error(TIMEOUT).map(|error| error.kind()), Some(Kind::HelloRequired));
        let rest = PeerWait::Frame(1).timeout_error(TIMEOUT).unwrap();
        assert!(rest.kind() == Kind::Malformed && rest.message().contains("8000 ms"), "{rest}");
        let silent = [PeerWait::Nothing, PeerWait::ReplySpace(1)].map(|wait| wait.timeout_error(TIMEOUT).is_none());
        assert_eq!(silent, [true; 2]);
    }
}
