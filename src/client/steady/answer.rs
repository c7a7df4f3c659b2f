//! A decision, and who made it.

use crate::client::conversation::Booking;
use crate::client::fallback::Fallback;
use crate::ids::Worker;
use crate::protocol::BookingHandle;
use crate::wire::RouteReply;

/// Who decided, and what.
#[derive(Clone, Debug, PartialEq)]
pub enum Answer {
    /// The daemon did.
    Daemon {
        /// Its reply.
        reply: Box<RouteReply>,
        /// Which run of it.
        instance_id: u64,
    },
    /// The client did, alone.
    Fallback(Fallback),
}

impl Answer {
    /// Who should run the prompt; `None` = nobody is eligible.
    #[must_use]
    pub fn best(&self) -> Option<Worker> {
        self.workers().next()
    }

    /// Who should run the prompt, and whom to turn to next.
    pub fn workers(&self) -> impl Iterator<Item = Worker> {
        let (listed, alone) = match self {
            Self::Daemon { reply, .. } => (reply.candidates.as_slice(), &[][..]),
            Self::Fallback(fallback) => (&[][..], fallback.workers.as_slice()),
        };
        listed.iter().map(|candidate| candidate.worker).chain(alone.iter().copied())
    }

    /// What is to be freed when the request ends; `None` = nothing was booked.
    #[must_use]
    pub fn booking(&self) -> Option<Booking> {
        self.booked(|reply| reply.booking)
    }

    /// The booking of the half that prefills, where two workers share the request.
    #[must_use]
    pub fn prefill_booking(&self) -> Option<Booking> {
        self.booked(|reply| reply.prefill_booking)
    }

    /// Whether the client decided alone.
    #[must_use]
    pub const fn is_fallback(&self) -> bool {
        matches!(self, Self::Fallback(_))
    }

    fn booked(&self, half: impl FnOnce(&RouteReply) -> Option<BookingHandle>) -> Option<Booking> {
        match self {
            Self::Daemon { reply, instance_id } => {
                half(reply).map(|handle| Booking { handle, instance_id: *instance_id })
            }
            Self::Fallback(_) => None,
        }
    }
}
