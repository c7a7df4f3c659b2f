//! Open files: the limit is raised to what the system allows, and divided at the start.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use crate::config::Bounds;
use crate::limits::{DESCRIPTORS_LEAST, DESCRIPTORS_PER_REQUEST, DESCRIPTORS_RESERVED};

/// Raises the soft limit to the hard one. Returns the limit.
pub(crate) fn raise() -> u64 {
    let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
    let raised = setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum }).is_ok();
    (if raised { maximum } else { current }).unwrap_or(u64::MAX)
}

/// Lowers the bounds to what fits into a limit of open files: each connection of a caller takes one, and each request
/// takes the connections to engines and renderers that it may need at once. Returns whether anything was lowered.
///
/// # Errors
/// The limit is too low for a gateway, with the remedy.
pub(crate) fn divide(limit: u64, bounds: &mut Bounds) -> Result<bool, String> {
    if limit < DESCRIPTORS_LEAST {
        return Err(format!(
            "{limit} open files are too few, {DESCRIPTORS_LEAST} are needed; raise the limit (ulimit -n, LimitNOFILE=)"
        ));
    }
    let left = limit - DESCRIPTORS_RESERVED;
    let (connections, requests) = (bounds.connections_max as u64, bounds.requests_max as u64);
    let needed = connections + requests * DESCRIPTORS_PER_REQUEST;
    if needed <= left {
        return Ok(false);
    }
    // In proportion. A request without a connection cannot be, so both keep their relation.
    let scaled = |number: u64| (u128::from(number) * u128::from(left) / u128::from(needed)).max(1) as usize;
    (bounds.connections_max, bounds.requests_max) = (scaled(connections), scaled(requests));
    Ok(true)
}

/// Raises the limit, divides it, and says what was lowered.
///
/// # Errors
/// As [`divide`].
pub(crate) fn apply(bounds: &mut Bounds) -> Result<u64, String> {
    let limit = raise();
    if divide(limit, bounds)? {
        let Bounds { connections_max, requests_max, .. } = *bounds;
        tracing::warn!(
            limit,
            connections_max,
            requests_max,
            "too few open files: the gateway allows fewer connections and requests than configured; raise the hard limit"
        );
    }
    Ok(limit)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Flags;

    #[test]
    fn bounds_fit_into_the_limit_or_are_lowered_in_proportion() {
        let flags = Flags { engines: vec!["http://h:1".to_owned()], ..Flags::default() };
        let config = crate::config::load(None, &flags).expect("the defaults");
        let bounds = Bounds { connections_max: 8000, requests_max: 4000, ..config.bounds };
        let after = |limit| {
            let mut bounds = bounds;
            divide(limit, &mut bounds).map(|lowered| (lowered, bounds.connections_max, bounds.requests_max))
        };
        let needed = 8000 + 4000 * DESCRIPTORS_PER_REQUEST;
        assert_eq!(after(needed + DESCRIPTORS_RESERVED), Ok((false, 8000, 4000)));
        assert_eq!(after(u64::MAX), Ok((false, 8000, 4000)));
        assert_eq!(after(needed / 2 + DESCRIPTORS_RESERVED), Ok((true, 4000, 2000)));
        let (lowered, connections, requests) = after(DESCRIPTORS_LEAST).expect("enough");
        assert!(lowered && connections >= 1 && requests >= 1);
        assert!(after(DESCRIPTORS_LEAST - 1).expect_err("too few").contains("ulimit"));
    }
}
