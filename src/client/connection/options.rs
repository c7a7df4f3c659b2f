//! How a client is to connect.

use std::time::Duration;

use crate::protocol::SessionToken;

/// How to connect.
#[derive(Clone, Debug, Default)]
pub struct ClientOptions {
    /// What the client calls itself in the daemon's logs.
    pub name: String,
    /// The session that this connection shares with others; `None` = one of its own.
    pub session: Option<SessionToken>,
    /// How long to wait for the daemon, at each call; `None` = as long as it takes.
    pub timeout: Option<Duration>,
    /// Whether to share memory with the daemon instead of writing to its socket.
    pub lane: LaneUse,
    /// How long to look for a reply before sleeping, on the socket or a lane. Costs a processor meanwhile; zero = not at
    /// all. A lane pays where both sides look: see `spin_us_max` in the daemon's configuration.
    pub spin: Duration,
}

/// Whether a client is to use a lane.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LaneUse {
    /// It uses the socket.
    #[default]
    Off,
    /// It uses a lane if it is given one, and the socket otherwise;
    /// [`Client::lane_refusal`](super::Client::lane_refusal) says why.
    Try,
    /// It uses a lane or does not connect.
    Require,
}
