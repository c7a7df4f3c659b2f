//! The resources that clients share, and one user's share of them.

mod users;

pub use users::UserQuotas;
pub(crate) use users::UserReservation;

/// A resource of which there is a bounded amount for all clients together. One user may have `serve.user_share_percent`
/// of each.
///
/// Everything else that a client can hold depends on one of these. A connection has one watch, one receive buffer of
/// the smallest size, and bounded replies. A lane belongs to a connection. A selection of the HTTP port belongs to its
/// callers, who count as one user together ([`HTTP_USER`]). The one dump that may be in progress belongs to them too.
/// The names of ended bookings, predictions and journal records are not held: newer ones displace older ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SharedResource {
    /// Connections to the routing socket.
    Connections,
    /// Bytes of large frames that are being received, for each core.
    ReceiveBytes,
    /// Shm lanes.
    Lanes,
    /// Queued requests.
    WaitingRequests,
    /// Bytes of queued requests.
    WaitingBytes,
    /// Different sets of workers for which requests are queued.
    WaitingSets,
    /// Sessions of gateways.
    Sessions,
    /// Bookings of requests.
    Bookings,
    /// Memory for the prompts of bookings, which counts blocks that requests share once.
    PromptMemory,
    /// Bindings of affinity sessions to workers, for each bucket of their table.
    AffinityBindings,
    /// Workers of a space from which reports of failure keep requests away.
    WorkersKeptAway,
    /// Workers of a space whose load is the report of a gateway.
    WorkersWithReportedLoads,
}

impl SharedResource {
    /// All resources.
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

/// The first number of principals, who call from other hosts: half of all numbers, which systems give to no account.
pub const PRINCIPALS_FROM: u32 = 1 << 31;

/// The user that counts for all callers of the HTTP port: a number that the kernel gives to no user.
pub const HTTP_USER: u32 = u32::MAX;

/// `percent` of `all`, rounded up.
#[must_use]
pub const fn share(percent: u8, all: usize) -> usize {
    (all as u128 * percent as u128).div_ceil(100) as usize
}

/// `percent` of `all`, rounded down, and at least one. For workers: one user must not steer all that others use.
#[must_use]
pub const fn share_rounded_down(percent: u8, all: usize) -> usize {
    let rounded_down = (all as u128 * percent as u128 / 100) as usize;
    if rounded_down == 0 { 1 } else { rounded_down }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_share_of_workers_is_at_least_one_and_all_only_at_100_percent() {
        let workers = [0, 1, 2, 3, 4, 4096];
        assert_eq!(workers.map(|all| share_rounded_down(75, all)), [1, 1, 1, 2, 3, 3072]);
        assert_eq!(workers.map(|all| share_rounded_down(100, all)), [1, 1, 2, 3, 4, 4096]);
    }
}
