//! The daemon's side of shm lanes: requests and replies in memory shared with a gateway, for gateways that busy-poll.
//!
//! A gateway that has said hello asks for a lane on its socket (`open_lane`). With the reply it receives two
//! descriptors: the memory, and its end of a bell. From then on the lane is one more connection of the core. Its bytes
//! come from a ring instead of a socket ([`LaneStream`]); the code that reads and answers them is the same. The socket
//! stays open, for gateways that use both, and because the lane ends with it: the kernel closes the socket of a process
//! that dies.
//!
//! A reply goes where its request came from; this holds for pending replies and for the pages of a watch too. When the
//! ring of replies is full, the daemon reads nothing more from the ring of requests. A gateway that leaves the ring
//! full is closed, as on a socket. [`crate::lane`] says what a gateway can do to the memory, and why it does not
//! matter.

mod lifecycle;
mod stream;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::error::{Error, Kind};
use crate::lane::Reclaimer;
use crate::limits::{LANE_CONTROL_BYTES, LANE_RING_BYTES_CEILING, LANE_RING_BYTES_MIN};
use crate::metrics::{CounterSet, LaneCounter};
use crate::shares::{SharedResource, UserQuotas, UserReservation};

pub(crate) use lifecycle::LaneDescriptors;
pub(super) use lifecycle::{CoreLanes, send_descriptors, serve_lanes};
#[cfg(doc)]
use stream::LaneStream;
pub(super) use stream::Transport;

/// The lanes of a daemon: their limits, which all cores share.
#[derive(Debug)]
pub struct Lanes {
    lanes_max: usize,
    ring_bytes_max: u32,
    /// Lanes that are open, or have ended while their gateways still hold the memory. Relaxed everywhere: a number that
    /// only bounds orders nothing.
    open: AtomicUsize,
    users: Arc<UserQuotas>,
    reclaimer: Arc<Reclaimer>,
    counters: CounterSet<LaneCounter>,
}

impl Lanes {
    /// Up to `lanes_max` lanes, 0 = none, with rings of up to `ring_bytes_max` bytes each.
    #[must_use]
    pub fn new(lanes_max: usize, ring_bytes_max: u32) -> Self {
        // The largest power of two up to this.
        let ring_bytes_max = ring_bytes_max.clamp(LANE_RING_BYTES_MIN, LANE_RING_BYTES_CEILING);
        let ring_bytes_max = 1 << ring_bytes_max.ilog2();
        let (open, users, reclaimer) = (AtomicUsize::new(0), Arc::default(), Arc::default());
        Self { lanes_max, ring_bytes_max, open, users, reclaimer, counters: CounterSet::default() }
    }

    /// The same with the users' quotas.
    #[must_use]
    pub(crate) fn shared_by(self, users: Arc<UserQuotas>) -> Self {
        Self { users, ..self }
    }

    /// Whether the daemon allows any.
    const fn are_on(&self) -> bool {
        self.lanes_max > 0
    }

    /// Bytes of the largest lane.
    pub(crate) const fn lane_bytes_max(&self) -> u64 {
        2 * self.ring_bytes_max as u64 + LANE_CONTROL_BYTES as u64
    }

    /// Lanes that count against the limit: open ones, and ended ones whose memory their gateways still hold.
    pub(crate) fn open(&self) -> usize {
        self.open.load(Ordering::Relaxed)
    }

    /// Ended lanes whose memory their gateways still hold.
    pub(crate) fn ended_and_held(&self) -> usize {
        self.reclaimer.waiting()
    }

    /// The daemon's counters of lanes.
    pub(crate) const fn counters(&self) -> &CounterSet<LaneCounter> {
        &self.counters
    }

    /// Reserves one lane for a user.
    ///
    /// # Errors
    /// The limit that is reached, with its counter.
    fn reserve(self: &Arc<Self>, uid: u32) -> Result<LaneReservation, (LaneCounter, Error)> {
        let refused = |counter, problem| {
            let remedy = "unmap and close the memory of lanes that have ended, raise serve.lanes_max or serve.user_share_percent, or use the socket";
            (counter, Error::new(Kind::Overloaded, problem, remedy))
        };
        let full = || {
            let problem = format!("{} lanes are open, or ended and still held by their gateways", self.lanes_max);
            refused(LaneCounter::RefusedFull, problem)
        };
        if self.open() >= self.lanes_max {
            return Err(full());
        }
        let of_user = self.users.reserve(uid, SharedResource::Lanes, 1, self.lanes_max).ok_or_else(|| {
            let lanes = self.users.share_of(self.lanes_max);
            let problem = format!("{lanes} lanes of this user are open, or ended and still held by it");
            refused(LaneCounter::RefusedUser, problem)
        })?;
        let more = |open| (open < self.lanes_max).then_some(open + 1);
        self.open.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more).map_err(|_| full())?;
        Ok(LaneReservation { lanes: Arc::clone(self), _of_user: of_user })
    }
}

/// One lane of the daemon's limit, given back on drop.
#[derive(Debug)]
struct LaneReservation {
    lanes: Arc<Lanes>,
    _of_user: UserReservation,
}

impl Drop for LaneReservation {
    fn drop(&mut self) {
        self.lanes.open.fetch_sub(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reservations_stay_within_the_limits_and_are_given_back() {
        let lanes = Arc::new(Lanes::new(2, 10_000));
        assert_eq!((lanes.ring_bytes_max, lanes.open()), (8192, 0));
        let refused = |lanes: &Arc<Lanes>, uid| lanes.reserve(uid).err().map(|(counter, _)| counter);
        let (first, second) = (lanes.reserve(7), lanes.reserve(7));
        assert!(first.is_ok() && second.is_ok());
        assert_eq!((refused(&lanes, 8), lanes.open()), (Some(LaneCounter::RefusedFull), 2));
        drop(first);
        assert_eq!(lanes.open(), 1);
        assert!(lanes.reserve(8).is_ok());
        let shared = Arc::new(Lanes::new(4, 8192).shared_by(Arc::new(UserQuotas::new(50))));
        let held = [shared.reserve(7), shared.reserve(7)];
        assert!(held.iter().all(Result::is_ok));
        assert_eq!((refused(&shared, 7), refused(&shared, 8)), (Some(LaneCounter::RefusedUser), None));
    }
}
