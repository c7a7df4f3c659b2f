//! Everything countable that a client can hold, and how much of it one user may have.

/// What there is a bounded amount of for all clients together. Of each, one user may have `serve.user_share_percent`.
///
/// All else that a client can hold hangs on one of these: a connection has one watch, one receive buffer of the smallest
/// size and bounded replies; a lane is its connection's; a selection of the HTTP port belongs to its callers, who are one
/// user together ([`HTTP_USER`]), as does the one dump that may be under way. What is not held is not listed: names of
/// bookings that ended, predictions and notes for the journal are kept for whoever came last.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scarce {
    /// Connections to the routing socket.
    Connections,
    /// Bytes of large frames that are being received, by core.
    ReceiveBytes,
    /// Lanes.
    Lanes,
    /// Requests that wait for a worker.
    WaitingRequests,
    /// Bytes of those requests.
    WaitingBytes,
    /// Different sets of workers that they wait for.
    WaitingSets,
    /// Sessions.
    Sessions,
    /// Bookings.
    Bookings,
    /// Memory for the prompts of bookings, by which blocks that requests share are counted once.
    PromptMemory,
    /// Bindings of sessions to workers, by bucket of their table.
    AffinityBindings,
    /// Workers of a space that reports of failure keep requests away from.
    WorkersKeptAway,
    /// Workers of a space whose load is what a gateway reports.
    WorkersWithReportedLoads,
}

impl Scarce {
    /// All of them.
    pub const ALL: [Self; 12] = [
        Self::Connections,
        Self::ReceiveBytes,
        Self::Lanes,
        Self::WaitingRequests,
        Self::WaitingBytes,
        Self::WaitingSets,
        Self::Sessions,
        Self::Bookings,
        Self::PromptMemory,
        Self::AffinityBindings,
        Self::WorkersKeptAway,
        Self::WorkersWithReportedLoads,
    ];
}

/// The user that callers of the HTTP port are together: a number that the kernel gives to nobody.
pub const HTTP_USER: u32 = u32::MAX;

/// So many percent of `all`, rounded up.
#[must_use]
pub const fn share(percent: u8, all: usize) -> usize {
    (all as u128 * percent as u128).div_ceil(100) as usize
}

/// `percent` of `all`, rounded down, and at least one: of workers, of which nobody may steer all that others use.
#[must_use]
pub const fn share_rounded_down(percent: u8, all: usize) -> usize {
    let rounded_down = (all as u128 * percent as u128 / 100) as usize;
    if rounded_down == 0 { 1 } else { rounded_down }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_workers_a_user_has_at_least_one_and_not_all_unless_the_share_is_all() {
        let workers = [0, 1, 2, 3, 4, 4096];
        assert_eq!(workers.map(|all| share_rounded_down(75, all)), [1, 1, 1, 2, 3, 3072]);
        assert_eq!(workers.map(|all| share_rounded_down(100, all)), [1, 1, 2, 3, 4, 4096]);
    }
}
