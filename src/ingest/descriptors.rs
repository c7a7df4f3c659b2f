//! The budget of file descriptors. A thread that gets no descriptor cannot go on, so the daemon divides them at its
//! start.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use crate::error::{Error, Kind, Result};
use crate::limits::{
    CONNECTIONS_MAX, CONNECTIONS_MIN, DESCRIPTORS_PER_CONNECTION, DESCRIPTORS_PER_CORE, DESCRIPTORS_PER_LANE,
    DESCRIPTORS_PER_PUBLISHER, DESCRIPTORS_PER_REMOTE_CONNECTION, DESCRIPTORS_PER_ROUTER, DESCRIPTORS_PER_SHARD,
    DESCRIPTORS_RESERVED, DESCRIPTORS_WANTED_MAX,
};

/// The numbers of everything that takes descriptors.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Takers {
    /// Serving threads.
    pub cores: usize,
    /// Ingest threads.
    pub shards: usize,
    /// Publishers of the configured workers, both of events and of loads.
    pub publishers: usize,
    /// Shared-memory lanes that may be open.
    pub lanes: usize,
    /// Other routers that this one exchanges load with; 0 = it shares none.
    pub routers: usize,
    /// Connections from other hosts, open and half open.
    pub remote: usize,
}

/// How many of each fit under the limit of open files. The daemon refuses anything beyond these numbers, with a message
/// that names it, before it opens anything.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Descriptors {
    /// The limit of open files.
    pub limit: u64,
    /// The most connections to the routing socket.
    pub connections_max: usize,
    /// The most shared-memory lanes.
    pub lanes_max: usize,
    /// The most publishers, including those of workers that are added later.
    pub publishers_max: usize,
}

/// Raises this process's soft limit of open files towards the hard one, up to [`DESCRIPTORS_WANTED_MAX`]. Never lowers
/// it. Returns the limit.
#[must_use]
pub fn raise() -> u64 {
    let held = getrlimit(Resource::Nofile);
    let limit = target(held.current, held.maximum);
    let is_held = held.current.is_none_or(|current| current >= limit);
    let raised = is_held || setrlimit(Resource::Nofile, Rlimit { current: Some(limit), ..held }).is_ok();
    if raised { limit } else { held.current.unwrap_or(limit) }
}

/// Divides `limit` descriptors. If they do not suffice for everything, the configured workers come first, because a
/// worker without events costs every gateway. Of the rest, connections get at most a half, lanes at most a quarter, and
/// workers that are added later get what is left.
///
/// # Errors
/// [`Kind::System`] if the daemon itself and [`CONNECTIONS_MIN`] connections do not fit.
pub fn divide(limit: u64, takers: Takers) -> Result<Descriptors> {
    let (own, fewest) = (own(takers), CONNECTIONS_MIN as u64 * DESCRIPTORS_PER_CONNECTION);
    let Some(spare) = limit.checked_sub(own + fewest) else {
        return Err(Error::new(
            Kind::System,
            format!("{limit} open files are too few: the daemon needs {} before its first worker", own + fewest),
            "raise the hard limit (ulimit -Hn, LimitNOFILE= of the unit, --ulimit nofile= of the container)",
        ));
    };
    let rest = spare.saturating_sub(takers.publishers as u64 * DESCRIPTORS_PER_PUBLISHER);
    let connections = (CONNECTIONS_MAX - CONNECTIONS_MIN) as u64 * DESCRIPTORS_PER_CONNECTION;
    let lanes = takers.lanes as u64 * DESCRIPTORS_PER_LANE;
    let fits = connections + lanes <= rest;
    let [connections, lanes] =
        if fits { [connections, lanes] } else { [connections.min(rest / 2), lanes.min(rest / 4)] };
    let (more, lanes) = (connections / DESCRIPTORS_PER_CONNECTION, lanes / DESCRIPTORS_PER_LANE);
    let left = spare - more * DESCRIPTORS_PER_CONNECTION - lanes * DESCRIPTORS_PER_LANE;
    Ok(Descriptors {
        limit,
        connections_max: CONNECTIONS_MIN + more as usize,
        lanes_max: lanes as usize,
        publishers_max: usize::try_from(left / DESCRIPTORS_PER_PUBLISHER).unwrap_or(usize::MAX),
    })
}

/// Open files that a daemon needs for these and for [`CONNECTIONS_MIN`] connections.
#[must_use]
pub fn needed(takers: Takers) -> u64 {
    own(takers)
        + CONNECTIONS_MIN as u64 * DESCRIPTORS_PER_CONNECTION
        + takers.publishers as u64 * DESCRIPTORS_PER_PUBLISHER
}

/// Open files of the daemon before any connection of its serving threads: reserved ones, those of its threads, and those
/// of the remote port.
#[must_use]
pub const fn own(takers: Takers) -> u64 {
    DESCRIPTORS_RESERVED
        + takers.cores as u64 * DESCRIPTORS_PER_CORE
        + takers.shards as u64 * DESCRIPTORS_PER_SHARD
        + takers.routers as u64 * DESCRIPTORS_PER_ROUTER
        + takers.remote as u64 * DESCRIPTORS_PER_REMOTE_CONNECTION
}

/// The soft limit to set; `None` = unlimited.
fn target(current: Option<u64>, maximum: Option<u64>) -> u64 {
    match current {
        None => u64::MAX,
        Some(current) => maximum.unwrap_or(u64::MAX).min(DESCRIPTORS_WANTED_MAX).max(current),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const TAKERS: Takers = Takers { cores: 2, shards: 1, publishers: 10, lanes: 64, routers: 0, remote: 0 };

    #[test]
    fn the_target_is_the_hard_limit_within_reason() {
        assert_eq!(target(Some(1024), Some(4096)), 4096);
        assert_eq!(target(Some(1024), None), DESCRIPTORS_WANTED_MAX);
        assert_eq!(target(Some(4096), Some(4096)), 4096);
        assert_eq!(target(Some(DESCRIPTORS_WANTED_MAX + 1), None), DESCRIPTORS_WANTED_MAX + 1, "it is never lowered");
        assert_eq!(target(None, None), u64::MAX);
    }

    #[test]
    fn raising_never_lowers() {
        let before = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
        let limit = raise();
        assert!(limit >= before && getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX) >= before);
    }

    #[test]
    fn all_get_everything_if_there_is_enough_and_too_few_are_refused_by_name() {
        let ample = divide(1 << 20, TAKERS).unwrap();
        assert_eq!((ample.connections_max, ample.lanes_max), (CONNECTIONS_MAX, 64));
        assert!(ample.publishers_max >= crate::limits::WORKERS_MAX, "{ample:?}");
        let fewest = needed(Takers { publishers: 0, ..TAKERS });
        let refused = divide(fewest - 1, TAKERS).unwrap_err();
        assert!(refused.kind() == Kind::System && refused.to_string().contains("open files"), "{refused}");
        let poor = divide(fewest, TAKERS).unwrap();
        assert_eq!((poor.connections_max, poor.lanes_max, poor.publishers_max), (CONNECTIONS_MIN, 0, 0));
        assert_eq!(divide(needed(TAKERS), TAKERS).unwrap().publishers_max, 10, "workers come before connections");
    }

    proptest! {
        #[test]
        fn never_more_than_the_limit_is_divided(
            limit in 0_u64..100_000, cores in 1_usize..300, shards in 1_usize..65, publishers in 0_usize..9000, lanes in 0_usize..5000,
            remote in 0_usize..5000,
        ) {
            let takers = Takers { cores, shards, publishers, lanes, routers: 0, remote };
            let Ok(room) = divide(limit, takers) else { return Ok(()) };
            let taken = own(takers)
                + room.connections_max as u64 * DESCRIPTORS_PER_CONNECTION
                + room.lanes_max as u64 * DESCRIPTORS_PER_LANE
                + room.publishers_max as u64 * DESCRIPTORS_PER_PUBLISHER;
            prop_assert!(taken <= limit, "{room:?}");
            prop_assert!((CONNECTIONS_MIN..=CONNECTIONS_MAX).contains(&room.connections_max) && room.lanes_max <= lanes);
            if limit >= needed(takers) {
                prop_assert!(room.publishers_max >= publishers, "{room:?}");
            }
        }
    }
}
