//! Clients that outlive their daemon.
//!
//! ```text
//! async_client (the calls) ─▶ calls (deadlines, one retry) ─▶ state ◀─ driver (one task) ─▶ the socket, or shm
//!
//! state            what a client keeps across connections: reports, pauses, spaces, the fleet; no I/O
//! blocking_client  the same calls, for a thread that blocks
//! ```

mod async_client;
mod blocking_client;
mod calls;
mod driver;
mod state;

use std::time::Duration;

use crate::client::LaneUse;
use crate::client::fallback::Fallback;
use crate::ids::Worker;
use crate::limits::{CLIENT_IN_FLIGHT_MAX_DEFAULT, CLIENT_TIMEOUT_MS_DEFAULT, FALLBACK_PREFIX_TOKENS_DEFAULT};
use crate::protocol::{BookingHandle, SessionToken};
use crate::wire::RouteReply;

pub use async_client::AsyncClient;
pub use blocking_client::SteadyClient;
pub use state::{BackOff, Booking, ClientCounter};

/// The options of an [`AsyncClient`] or a [`SteadyClient`]. The defaults suit a gateway on the daemon's host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SteadyOptions {
    /// The client's name in the daemon's logs.
    pub name: String,
    /// A session whose bookings it shares with other clients; `None` = a random one.
    pub session: Option<SessionToken>,
    /// The timeout of a call, connecting included. If the daemon lets bookings wait for a worker, a request without a deadline
    /// of its own gets four fifths of this.
    pub timeout: Duration,
    /// The pauses between tries of a daemon that does not answer.
    pub back_off: BackOff,
    /// The most requests in flight. Further calls wait, each within its own timeout.
    pub in_flight_max: usize,
    /// Whether to decide without the daemon while it does not answer: by rendezvous hashing over the workers that it last
    /// reported as healthy.
    pub fallback: bool,
    /// How many tokens of a prompt's beginning such a decision hashes if the request names no session; 0 = all of them. It must
    /// exceed the beginning that all prompts share, or one worker gets all of them. Every client needs the same value.
    pub fallback_prefix_tokens: usize,
    /// Whether to send 8 bytes a block instead of 4 a token, if the space's scheme is known.
    pub hash_locally: bool,
    /// Whether to use a shm lane, memory shared with the daemon in place of the socket. It is requested anew on each connection.
    /// If the daemon refuses [`LaneUse::Try`], [`AsyncClient::lane_refusal`] says why.
    pub lane: LaneUse,
    /// How long to busy-poll for a due reply before sleeping, which occupies a processor; zero = not at all. Other tasks run
    /// between polls. A lane pays if both sides busy-poll: see `spin_us_max` in the daemon's configuration.
    pub spin: Duration,
}

impl Default for SteadyOptions {
    fn default() -> Self {
        Self {
            name: "rust".to_owned(),
            session: None,
            timeout: Duration::from_millis(CLIENT_TIMEOUT_MS_DEFAULT),
            back_off: BackOff::default(),
            in_flight_max: CLIENT_IN_FLIGHT_MAX_DEFAULT,
            fallback: true,
            fallback_prefix_tokens: FALLBACK_PREFIX_TOKENS_DEFAULT,
            hash_locally: false,
            lane: LaneUse::Off,
            spin: Duration::ZERO,
        }
    }
}

/// A decision, and whether the daemon or the client made it.
#[derive(Clone, Debug, PartialEq)]
pub enum Answer {
    /// The daemon decided.
    Daemon {
        /// The daemon's reply.
        reply: Box<RouteReply>,
        /// The daemon run that replied.
        instance_id: u64,
    },
    /// The client decided without the daemon.
    Fallback(Fallback),
}

impl Answer {
    /// The worker that should run the prompt; `None` = no worker is eligible.
    #[must_use]
    pub fn best(&self) -> Option<Worker> {
        self.workers().next()
    }

    /// The candidates, the best first.
    pub fn workers(&self) -> impl Iterator<Item = Worker> {
        let (listed, alone) = match self {
            Self::Daemon { reply, .. } => (reply.candidates.as_slice(), &[][..]),
            Self::Fallback(fallback) => (&[][..], fallback.workers.as_slice()),
        };
        listed.iter().map(|candidate| candidate.worker).chain(alone.iter().copied())
    }

    /// The booking to free when the request ends; `None` = nothing was booked.
    #[must_use]
    pub fn booking(&self) -> Option<Booking> {
        self.booked(|reply| reply.booking)
    }

    /// The booking of the worker that prefills, if two workers share the request.
    #[must_use]
    pub fn prefill_booking(&self) -> Option<Booking> {
        self.booked(|reply| reply.prefill_booking)
    }

    /// Whether the client decided without the daemon.
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
