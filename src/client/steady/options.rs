//! How a client that outlives its daemon behaves.

use std::time::Duration;

use crate::client::connection::LaneUse;
use crate::client::conversation::BackOff;
use crate::limits::{CLIENT_IN_FLIGHT_MAX_DEFAULT, CLIENT_TIMEOUT_MS_DEFAULT, FALLBACK_PREFIX_TOKENS_DEFAULT};
use crate::protocol::SessionToken;

/// How a client behaves. The defaults suit a gateway on the daemon's host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SteadyOptions {
    /// What the client calls itself in the daemon's logs.
    pub name: String,
    /// The session whose bookings it shares with other clients; `None` = one is drawn.
    pub session: Option<SessionToken>,
    /// How long a call may take, connecting included. Where the daemon lets bookings wait for a worker, a request that
    /// names no deadline of its own is given four fifths of this.
    pub timeout: Duration,
    /// How long to leave a daemon alone that does not answer.
    pub back_off: BackOff,
    /// Requests in flight; more wait, each within its own time.
    pub in_flight_max: usize,
    /// Where no daemon answers, decide by rendezvous over the workers that it last called healthy.
    pub fallback: bool,
    /// By how many tokens of a prompt's beginning that is done, where the request names no session; 0 = all of it.
    /// More than what every prompt begins with, else that sends them all to one worker; the same in every client.
    pub fallback_prefix_tokens: usize,
    /// Send 8 bytes a block instead of 4 a token, where the space's scheme is known.
    pub hash_locally: bool,
    /// Whether to share memory with the daemon instead of writing to its socket; asked for anew on each connection. Where
    /// [`LaneUse::Try`] is given none, [`AsyncClient::lane_refusal`](super::AsyncClient::lane_refusal) says why.
    pub lane: LaneUse,
    /// How long to look for a reply before sleeping, while one is due. Costs a processor meanwhile; zero = not at all. Other
    /// tasks have their turns in between. A lane pays where both sides look: see `spin_us_max` in the daemon's configuration.
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
