//! What is behind the bookings' lock.

use xxhash_rust::xxh3::xxh3_64_with_seed;

use super::active::ActiveWriter;
use super::booking::{Booking, BookingHandle, BookingOutcome, BookingRef, Bookings, Named};
use super::failures::Failures;
use super::names::Name;
use super::prefill::{Prefill, PrefillId, Prefills};
use super::session::{SessionId, Sessions};
use crate::error::{Error, Kind, Result};
use crate::ids::WorkerIndex;
use crate::limits::{BOOKINGS_MAX, BOOKINGS_PER_SESSION_MAX};

/// Everything that only one thread at a time may change.
#[derive(Debug, Default)]
pub(super) struct Books {
    pub(super) sessions: Sessions,
    pub(super) bookings: Bookings,
    pub(super) active: ActiveWriter,
    pub(super) prefills: Prefills,
    pub(super) failures: Failures,
    /// What names are hashed by.
    pub(super) secret: u64,
}

/// Milliseconds of the configuration as nanoseconds of the bookings' clock.
pub(super) const fn ns(ms: u64) -> u64 {
    ms.saturating_mul(1_000_000)
}

impl Books {
    /// Adds what a booking has to prefill, the tokens to compute and the cached ones, to its worker's; `None` if
    /// there is nothing.
    pub(super) fn begin_prefill(
        &mut self,
        worker: WorkerIndex,
        [tokens, cached]: [u64; 2],
        now_ns: u64,
    ) -> Option<PrefillId> {
        if tokens == 0 {
            return None;
        }
        let duration_ns = self.prefills.duration_ns(worker, tokens, cached);
        Some(self.prefills.add(worker, Prefill { tokens, duration_ns }, now_ns))
    }

    /// Whether one more booking of `session` fits; one that takes another's place always does.
    pub(super) fn admit(&mut self, session: SessionId, replaces: bool) -> Result<()> {
        let held = self.sessions.get_mut(session).map_or(0, |held| held.bookings.len());
        if !replaces && held >= BOOKINGS_PER_SESSION_MAX {
            return Err(Error::new(
                Kind::TooManyBookings,
                format!("the session holds {BOOKINGS_PER_SESSION_MAX} bookings"),
                "free requests when they end",
            ));
        }
        if !replaces && self.bookings.live() >= BOOKINGS_MAX {
            return Err(Error::new(
                Kind::Overloaded,
                format!("{BOOKINGS_MAX} bookings are live"),
                "free requests when they end, or lower the booking age",
            ));
        }
        Ok(())
    }

    /// The handle of a booking of `session`. Its upper half shows whom it was given to, long after the booking has
    /// ended: to others it names nothing, so that nobody learns what became of it.
    pub(super) fn handle(&self, session: SessionId, slot: u32, generation: u64) -> BookingHandle {
        let mut whose = [0; 16];
        whose[..8].copy_from_slice(&generation.to_le_bytes());
        whose[8..12].copy_from_slice(&session.0.to_le_bytes());
        whose[12..].copy_from_slice(&slot.to_le_bytes());
        let shown = xxh3_64_with_seed(&whose, self.secret) as u32;
        BookingHandle { slot: u64::from(shown) << 32 | u64::from(slot), generation }
    }

    /// The slot of a live booking of `session`, or what to answer instead.
    pub(super) fn find(&self, session: SessionId, booking: BookingRef<'_>) -> Result<u32, BookingOutcome> {
        match booking {
            BookingRef::Handle(handle) => {
                let slot = handle.slot as u32;
                if self.handle(session, slot, handle.generation) != handle {
                    return Err(BookingOutcome::Unknown);
                }
                match self.bookings.get(slot) {
                    Some(live) if live.generation == handle.generation && live.name.session() == session => Ok(slot),
                    // A generation that was handed out to this session and is gone has ended.
                    _ if handle.generation <= self.bookings.generations() => Err(BookingOutcome::AlreadyApplied),
                    _ => Err(BookingOutcome::Unknown),
                }
            }
            BookingRef::Request { request_id, attempt } => {
                match self.bookings.named(Name::new(self.secret, session, request_id)) {
                    Some(Named::Live(slot)) => match self.bookings.get(slot) {
                        Some(live) if live.attempt == attempt => Ok(slot),
                        Some(live) if live.attempt > attempt => Err(BookingOutcome::Superseded),
                        _ => Err(BookingOutcome::Unknown),
                    },
                    Some(Named::Ended { attempt: ended }) if ended == attempt => Err(BookingOutcome::AlreadyApplied),
                    Some(Named::Ended { attempt: ended }) if ended > attempt => Err(BookingOutcome::Superseded),
                    _ => Err(BookingOutcome::Unknown),
                }
            }
        }
    }

    /// Keeps a new booking, in its session's list too. Answers with its slot and generation.
    #[inline]
    pub(super) fn keep(&mut self, booking: Booking) -> (u32, u64) {
        let (session, is_prefill_half) = (self.sessions.get_mut(booking.name.session()), booking.is_prefill_half);
        let place = session.as_ref().map_or(0, |session| session.bookings.len() as u32);
        let (slot, generation) = self.bookings.insert(booking, place);
        if let Some(session) = session {
            session.bookings.push(slot);
            session.prefill_halves += u32::from(is_prefill_half);
        }
        (slot, generation)
    }

    /// Ends a booking and takes it out of its session's list.
    #[inline]
    pub(super) fn end(&mut self, slot: u32) -> Option<Booking> {
        let booking = self.bookings.end(slot)?;
        if let Some(session) = self.sessions.get_mut(booking.name.session()) {
            session.prefill_halves -= u32::from(booking.is_prefill_half);
            let place = self.bookings.session_place(slot);
            // A session that is abandoned has let go of it already.
            if (place as usize) < session.bookings.len() {
                session.bookings.swap_remove(place as usize);
                if let Some(&moved) = session.bookings.get(place as usize) {
                    self.bookings.move_in_session(moved, place);
                }
            }
        }
        Some(booking)
    }
}
