//! Places of a port's connections, and which connection gives its place to a new one.
//!
//! A connection gives way only while the daemon waits for its peer: between two requests, or, after
//! `HTTP_DISPLACE_AFTER_MS`, within the body of a request or a reply that is not read. The connection that has been waited
//! for longest goes first. A connection whose request the daemon works on keeps its place.

use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore};
use tokio::time::Instant;

use crate::limits::{ACCEPT_REST_MS, HTTP_DISPLACE_AFTER_MS};

/// What a connection is at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// Its next request, up to the end of the head, is waited for.
    Head,
    /// More of a request's body is waited for.
    Body,
    /// The daemon works on its request, or writes the reply.
    Answer,
}

#[derive(Debug)]
struct State {
    phase: Phase,
    /// When the connection came, its last reply ended, or its request began.
    since: Instant,
    /// Since when the reader is behind, while something is not taken.
    behind_since: Option<Instant>,
    /// When the reply has to be read.
    reply_deadline: Option<Instant>,
    is_displaced: bool,
}

/// What one connection does, as its own task says and the port looks at.
#[derive(Debug)]
pub(super) struct Activity {
    state: Mutex<State>,
    displaced: Notify,
    /// Whether its place is one of those that are kept for who watches the daemon.
    pub(super) is_reserved: bool,
}

impl Default for Activity {
    fn default() -> Self {
        let state = State {
            phase: Phase::Head,
            since: Instant::now(),
            behind_since: None,
            reply_deadline: None,
            is_displaced: false,
        };
        Self { state: Mutex::new(state), displaced: Notify::new(), is_reserved: false }
    }
}

impl Activity {
    /// The head of a request is there.
    pub(super) fn began(&self) {
        let mut state = self.state.lock();
        (state.phase, state.since, state.reply_deadline) = (Phase::Answer, Instant::now(), None);
    }

    /// Whether more of the request's body is waited for now.
    pub(super) fn awaits_body(&self, awaits: bool) {
        self.state.lock().phase = if awaits { Phase::Body } else { Phase::Answer };
    }

    /// There is a reply, which has to be read within `whole` if that is said.
    pub(super) fn answered(&self, whole: Option<Duration>) {
        let mut state = self.state.lock();
        (state.phase, state.reply_deadline) = (Phase::Answer, whole.map(|whole| Instant::now() + whole));
    }

    /// All of the reply was handed over to be written.
    pub(super) fn handed_over(&self) {
        let mut state = self.state.lock();
        (state.phase, state.since) = (Phase::Head, Instant::now());
    }

    /// The reader has been behind since then, or is not.
    pub(super) fn reader_is_behind(&self, since: Option<Instant>) {
        self.state.lock().behind_since = since;
    }

    pub(super) fn reply_deadline(&self) -> Option<Instant> {
        self.state.lock().reply_deadline
    }

    /// Returns when the connection is to end in favour of another.
    pub(super) async fn displaced(&self) {
        self.displaced.notified().await;
    }

    /// Since when the peer has been waited for, if another connection may have its place.
    fn may_go_since(&self, now: Instant) -> Option<Instant> {
        let state = self.state.lock();
        let held_up = |since: &Instant| now.duration_since(*since) >= Duration::from_millis(HTTP_DISPLACE_AFTER_MS);
        match (state.behind_since, state.phase) {
            _ if state.is_displaced => None,
            (Some(since), _) => Some(since).filter(held_up),
            (None, Phase::Head) => Some(state.since),
            (None, Phase::Body) => Some(state.since).filter(held_up),
            (None, Phase::Answer) => None,
        }
    }
}

/// All places of one port.
#[derive(Debug)]
pub(super) struct Places {
    free: Arc<Semaphore>,
    reserve: Arc<Semaphore>,
    open: Arc<Mutex<Vec<Arc<Activity>>>>,
}

/// The place of one connection, until dropped.
#[derive(Debug)]
pub(super) struct Place {
    pub(super) activity: Arc<Activity>,
    open: Arc<Mutex<Vec<Arc<Activity>>>>,
    _permit: OwnedSemaphorePermit,
}

impl Drop for Place {
    fn drop(&mut self) {
        self.open.lock().retain(|other| !Arc::ptr_eq(other, &self.activity));
    }
}

impl Places {
    pub(super) fn new(places: usize, reserved: usize) -> Self {
        let [free, reserve] = [places, reserved].map(|places| Arc::new(Semaphore::new(places)));
        Self { free, reserve, open: Arc::default() }
    }

    /// A place for a new connection. `displaced` is called for each connection that gives way to it.
    pub(super) async fn take(&self, displaced: impl Fn()) -> Place {
        loop {
            if let Ok(permit) = Arc::clone(&self.free).try_acquire_owned() {
                return self.place(permit, false);
            }
            if let Some(is_reserved) = self.displace(Instant::now()) {
                displaced();
                let places = if is_reserved { &self.reserve } else { &self.free };
                // The semaphores are never closed.
                if let Ok(permit) = Arc::clone(places).acquire_owned().await {
                    return self.place(permit, is_reserved);
                }
            }
            if let Ok(permit) = Arc::clone(&self.reserve).try_acquire_owned() {
                return self.place(permit, true);
            }
            // The daemon works for all of them.
            tokio::time::sleep(Duration::from_millis(ACCEPT_REST_MS)).await;
        }
    }

    fn place(&self, permit: OwnedSemaphorePermit, is_reserved: bool) -> Place {
        let activity = Arc::new(Activity { is_reserved, ..Activity::default() });
        self.open.lock().push(Arc::clone(&activity));
        Place { activity, open: Arc::clone(&self.open), _permit: permit }
    }

    /// Ends the connection whose peer has been waited for longest, if there is one. Answers whether its place is reserved.
    fn displace(&self, now: Instant) -> Option<bool> {
        let open = self.open.lock();
        let waited = open.iter().filter_map(|activity| Some((activity.may_go_since(now)?, activity)));
        let (_, longest) = waited.min_by_key(|(since, _)| *since)?;
        longest.state.lock().is_displaced = true;
        longest.displaced.notify_one();
        Some(longest.is_reserved)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HELD_UP: Duration = Duration::from_millis(HTTP_DISPLACE_AFTER_MS);

    #[tokio::test(flavor = "current_thread")]
    async fn the_daemon_gives_up_no_request_that_it_works_on() {
        let places = Places::new(3, 1);
        let [working, sending, idle] = [places.take(|| {}).await, places.take(|| {}).await, places.take(|| {}).await];
        working.activity.began();
        sending.activity.began();
        sending.activity.awaits_body(true);
        idle.activity.began();
        idle.activity.handed_over();
        let later = Instant::now() + HELD_UP;
        assert_eq!(places.displace(later), Some(false), "the body that does not come has been waited for longest");
        sending.activity.displaced().await;
        assert_eq!(places.displace(later), Some(false), "then the connection that is idle");
        idle.activity.displaced().await;
        assert_eq!(places.displace(later), None, "and nobody is told twice");
        let reserved = places.take(|| panic!("nobody gives way")).await;
        assert!(reserved.activity.is_reserved);
        drop(idle);
        assert!(!places.take(|| panic!("there is a place")).await.activity.is_reserved);
        assert_eq!(places.displace(later), Some(true), "who came to a reserved place gives way, too");
    }

    #[tokio::test(flavor = "current_thread")]
    async fn a_reader_and_a_sender_have_a_moment() {
        let (places, now) = (Places::new(2, 0), Instant::now());
        let [reading, sending] = [places.take(|| {}).await, places.take(|| {}).await];
        reading.activity.began();
        reading.activity.answered(None);
        reading.activity.reader_is_behind(Some(Instant::now()));
        sending.activity.began();
        sending.activity.awaits_body(true);
        assert_eq!(places.displace(now), None);
        let later = Instant::now() + HELD_UP;
        assert!(places.displace(later).is_some() && places.displace(later).is_some());
        assert_eq!(places.displace(later), None);
    }

    #[tokio::test(flavor = "current_thread")]
    async fn who_comes_gets_the_place_of_who_gives_way_and_not_a_reserved_one() {
        let places = Places::new(1, 1);
        let idle = places.take(|| {}).await;
        let ending = tokio::spawn(async move {
            let held = idle;
            held.activity.displaced().await;
        });
        let next = places.take(|| {}).await;
        assert!(!next.activity.is_reserved);
        ending.await.unwrap();
    }
}
