//! File descriptors: a thread that gets none cannot go on, so they are divided at boot among everything that takes any.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use crate::error::{Error, Kind, Result};
use crate::limits::{
    CONNECTIONS_MAX, CONNECTIONS_MIN, DESCRIPTORS_PER_CONNECTION, DESCRIPTORS_PER_CORE, DESCRIPTORS_PER_LANE,
    DESCRIPTORS_PER_PUBLISHER, DESCRIPTORS_PER_SHARD, DESCRIPTORS_RESERVED, DESCRIPTORS_WANTED_MAX,
};

/// Who is to have descriptors.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Takers {
    /// Serving threads.
    pub cores: usize,
    /// Ingest threads.
    pub shards: usize,
    /// Publishers of the workers that are configured: of their events and of their loads.
    pub publishers: usize,
    /// Lanes that may be open.
    pub lanes: usize,
}

/// How many of each fit under the limit of open files. What is beyond is refused by name before anything is opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Descriptors {
    /// The limit.
    pub limit: u64,
    /// Connections to the routing socket.
    pub connections_max: usize,
    /// Lanes.
    pub lanes_max: usize,
    /// Publishers, those of workers that come later among them.
    pub publishers_max: usize,
}

/// Raises this process's soft limit to its hard one, as far as that can be of use. Never lowers it. Gives the limit.
#[must_use]
pub fn raise() -> u64 {
    let held = getrlimit(Resource::Nofile);
    let limit = target(held.current, held.maximum);
    let is_held = held.current.is_none_or(|current| current >= limit);
    let raised = is_held || setrlimit(Resource::Nofile, Rlimit { current: Some(limit), ..held }).is_ok();
    if raised { limit } else { held.current.unwrap_or(limit) }
}

/// Divides `limit` descriptors. Where they do not suffice for everything, the configured workers come first, as one that is
/// not heard costs every gateway; of the rest connections may have a half, lanes a quarter, and workers that come later
/// what is left.
///
/// # Errors
/// [`Kind::System`] where the daemon itself and the fewest connections that make sense do not fit.
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

/// Open files that a daemon needs for these and the fewest connections.
#[must_use]
pub fn needed(takers: Takers) -> u64 {
    own(takers)
        + CONNECTIONS_MIN as u64 * DESCRIPTORS_PER_CONNECTION
        + takers.publishers as u64 * DESCRIPTORS_PER_PUBLISHER
}

/// What the daemon has open before anybody connects, and keeps for everybody whose number is fixed.
const fn own(takers: Takers) -> u64 {
    DESCRIPTORS_RESERVED + takers.cores as u64 * DESCRIPTORS_PER_CORE + takers.shards as u64 * DESCRIPTORS_PER_SHARD
}

/// The soft limit to ask for; `None` = unlimited.
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

    const TAKERS: Takers = Takers { cores: 2, shards: 1, publishers: 10, lanes: 64 };

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
    fn everybody_has_all_where_there_is_enough_and_too_few_are_refused_by_name() {
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
        fn what_is_divided_is_never_more_than_there_is(
            limit in 0_u64..100_000, cores in 1_usize..300, shards in 1_usize..65, publishers in 0_usize..9000, lanes in 0_usize..5000,
        ) {
            let takers = Takers { cores, shards, publishers, lanes };
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
