//! Lanes: requests and replies by memory that is shared with a gateway, for gateways that look instead of sleeping.
//!
//! A gateway that has said hello asks for a lane on its socket (`open_lane`). The reply brings the memory and the
//! gateway's end of a bell as descriptors. From then on the lane is one more connection of the core: its bytes come from
//! a ring instead of a socket ([`LaneStream`]), what drives them and what answers is the same. The socket stays, for
//! those who want to use both, and because its end is the lane's: a process that dies closes it.
//!
//! Replies go where their requests came, late ones and a watch's too. When the ring of replies is full nothing more is
//! read from the ring of requests; a gateway that leaves it full is closed as on a socket. What a gateway can do to the
//! memory, and why it does not matter, is said in [`crate::lane`].

mod lifecycle;
mod stream;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::error::{Error, Kind};
use crate::lane::Reclaimer;
use crate::limits::{LANE_RING_BYTES_CEILING, LANE_RING_BYTES_MIN};
use crate::metrics::{CounterSet, LaneCounter};
use crate::serve::accept::{UserPlace, Users};
use crate::shares::Scarce;

pub use lifecycle::Handed;
pub(in crate::serve) use lifecycle::{CoreLanes, attend, hand_over};
pub(in crate::serve) use stream::Carrier;
#[cfg(doc)]
use stream::LaneStream;

/// The lanes of a daemon.
#[derive(Debug)]
pub struct Lanes {
    lanes_max: usize,
    ring_bytes_max: u32,
    /// Lanes that are open, or have ended and are still held by their gateways. Relaxed everywhere: a number that bounds orders nothing.
    open: AtomicUsize,
    users: Arc<Users>,
    reclaimer: Arc<Reclaimer>,
    counters: CounterSet<LaneCounter>,
}

impl Lanes {
    /// `lanes_max` lanes, 0 = none, with rings of up to `ring_bytes_max` bytes each.
    #[must_use]
    pub fn new(lanes_max: usize, ring_bytes_max: u32) -> Self {
        // The largest power of two that is not beyond it.
        let ring_bytes_max = ring_bytes_max.clamp(LANE_RING_BYTES_MIN, LANE_RING_BYTES_CEILING);
        let ring_bytes_max = 1 << ring_bytes_max.ilog2();
        let (open, users, reclaimer) = (AtomicUsize::new(0), Arc::default(), Arc::default());
        Self { lanes_max, ring_bytes_max, open, users, reclaimer, counters: CounterSet::default() }
    }

    /// The same with so much of them for each user as `users` say.
    #[must_use]
    pub fn shared_by(self, users: Arc<Users>) -> Self {
        Self { users, ..self }
    }

    /// Whether there may be any.
    #[must_use]
    pub const fn are_on(&self) -> bool {
        self.lanes_max > 0
    }

    /// Bytes of a ring at most: a power of two.
    pub(super) const fn ring_bytes_max(&self) -> u32 {
        self.ring_bytes_max
    }

    /// Lanes that have a place now: they are open, or have ended and their gateways still hold their memory.
    #[must_use]
    pub fn open(&self) -> usize {
        self.open.load(Ordering::Relaxed)
    }

    /// Of those, the lanes that have ended and whose memory their gateways still hold.
    #[must_use]
    pub fn ended_and_held(&self) -> usize {
        self.reclaimer.waiting()
    }

    /// What gives the memory of ended lanes back.
    pub(super) const fn reclaimer(&self) -> &Arc<Reclaimer> {
        &self.reclaimer
    }

    /// What is counted.
    #[must_use]
    pub const fn counters(&self) -> &CounterSet<LaneCounter> {
        &self.counters
    }

    /// Takes one of the places for a user.
    ///
    /// # Errors
    /// Why there is none.
    pub(super) fn take(self: &Arc<Self>, uid: u32) -> Result<LanePlace, (LaneCounter, Error)> {
        let refused = |counter, what| {
            (
                counter,
                Error::new(
                    Kind::Overloaded,
                    what,
                    "let go of the memory of lanes that have ended, raise serve.lanes_max or serve.user_share_percent, or go without",
                ),
            )
        };
        let full = || {
            refused(
                LaneCounter::RefusedFull,
                format!("{} lanes are open, or ended and still held by their gateways", self.lanes_max),
            )
        };
        if self.open() >= self.lanes_max {
            return Err(full());
        }
        let of_user = self.users.take(uid, Scarce::Lanes, 1, self.lanes_max).ok_or_else(|| {
            let what = format!(
                "{} lanes of this user are open, or ended and still held by it",
                self.users.share_of(self.lanes_max)
            );
            refused(LaneCounter::RefusedUser, what)
        })?;
        let more = |open| (open < self.lanes_max).then_some(open + 1);
        self.open.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more).map_err(|_| full())?;
        Ok(LanePlace { lanes: Arc::clone(self), _of_user: of_user })
    }
}

/// A place of an open lane, given back when it is dropped.
#[derive(Debug)]
pub(super) struct LanePlace {
    lanes: Arc<Lanes>,
    _of_user: UserPlace,
}

impl Drop for LanePlace {
    fn drop(&mut self) {
        self.lanes.open.fetch_sub(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_are_given_out_once_and_come_back() {
        let lanes = Arc::new(Lanes::new(2, 10_000));
        assert_eq!((lanes.ring_bytes_max(), lanes.open()), (8192, 0));
        let refused = |lanes: &Arc<Lanes>, uid| lanes.take(uid).err().map(|(counter, _)| counter);
        let (first, second) = (lanes.take(7), lanes.take(7));
        assert!(first.is_ok() && second.is_ok());
        assert_eq!((refused(&lanes, 8), lanes.open()), (Some(LaneCounter::RefusedFull), 2));
        drop(first);
        assert_eq!(lanes.open(), 1);
        assert!(lanes.take(8).is_ok());
        let shared = Arc::new(Lanes::new(4, 8192).shared_by(Arc::new(Users::new(50))));
        let held = [shared.take(7), shared.take(7)];
        assert!(held.iter().all(Result::is_ok));
        assert_eq!((refused(&shared, 7), refused(&shared, 8)), (Some(LaneCounter::RefusedUser), None));
    }
}
