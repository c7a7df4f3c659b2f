//! The counters of a client, so that no failure is silent.

/// The counters of [`AsyncClient::counter`](crate::client::AsyncClient::counter).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(usize)]
pub enum ClientCounter {
    /// Connections that were made.
    Connected,
    /// Connections that could not be made, or were refused.
    ConnectsFailed,
    /// Connections that ended after they had been made.
    ConnectionsLost,
    /// Calls that ended without a reply in time.
    DeadlinesPassed,
    /// Bookings that the client freed because no call waited for their reply any more.
    BookingsGivenBack,
    /// Reports stored for the next connection.
    ReportsOwed,
    /// Stored reports dropped because there were too many. The daemon ends their bookings by age.
    ReportsForgotten,
    /// Decisions without the daemon: it cannot be reached.
    FallbackUnreachable,
    /// Decisions without the daemon: the connection ended.
    FallbackConnectionLost,
    /// Decisions without the daemon: it did not answer.
    FallbackSilent,
    /// Decisions without the daemon: it is draining.
    FallbackDraining,
    /// Prompts sent as tokens because the daemon refused their hashes.
    HashesRefused,
    /// Shm lanes that were opened.
    LanesOpened,
    /// Connections without a lane, though one was requested.
    LanesRefused,
}

impl ClientCounter {
    /// Every counter.
    pub const ALL: [Self; 14] = [
        Self::Connected,
        Self::ConnectsFailed,
        Self::ConnectionsLost,
        Self::DeadlinesPassed,
        Self::BookingsGivenBack,
        Self::ReportsOwed,
        Self::ReportsForgotten,
        Self::FallbackUnreachable,
        Self::FallbackConnectionLost,
        Self::FallbackSilent,
        Self::FallbackDraining,
        Self::HashesRefused,
        Self::LanesOpened,
        Self::LanesRefused,
    ];

    /// The name for a gateway's own metrics.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Connected => "connected",
            Self::ConnectsFailed => "connects_failed",
            Self::ConnectionsLost => "connections_lost",
            Self::DeadlinesPassed => "deadlines_passed",
            Self::BookingsGivenBack => "bookings_given_back",
            Self::ReportsOwed => "reports_owed",
            Self::ReportsForgotten => "reports_forgotten",
            Self::FallbackUnreachable => "fallback_unreachable",
            Self::FallbackConnectionLost => "fallback_connection_lost",
            Self::FallbackSilent => "fallback_silent",
            Self::FallbackDraining => "fallback_draining",
            Self::HashesRefused => "hashes_refused",
            Self::LanesOpened => "lanes_opened",
            Self::LanesRefused => "lanes_refused",
        }
    }
}
