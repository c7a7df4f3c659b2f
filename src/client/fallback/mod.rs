//! Deciding without the daemon, over the workers that it last called healthy. What they hold in their caches and how busy
//! they are is not known here.

mod rendezvous;

use std::cmp::Ordering;
use std::time::Instant;

use crate::ids::Worker;
use crate::protocol::{RouteRequest, WorkerState};
use crate::wire::WorkerInfo;

/// The workers that a daemon last named, all spaces together.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Fleet {
    /// The workers, each under the client's own id of its space.
    pub workers: Vec<WorkerInfo>,
    /// Which fleet table they are from; 0 = nothing was learnt yet.
    pub version: u64,
    /// The daemon that named them.
    pub instance_id: u64,
}

/// Why the daemon did not decide.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum FallbackReason {
    /// It cannot be reached, and is tried again beside requests.
    Unreachable,
    /// The connection ended before the reply came, twice.
    ConnectionLost,
    /// It did not answer within the call's time.
    Silent,
    /// It is about to end and takes no more requests.
    Draining,
}

impl FallbackReason {
    /// Every reason.
    pub const ALL: [Self; 4] = [Self::Unreachable, Self::ConnectionLost, Self::Silent, Self::Draining];

    /// The name used in logs and metrics.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Unreachable => "unreachable",
            Self::ConnectionLost => "connection_lost",
            Self::Silent => "silent",
            Self::Draining => "draining",
        }
    }
}

/// A decision that the client made alone: nothing is booked, and no cache was looked at. Of a request for a pair it names
/// who does both.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fallback {
    /// Who should run it, and whom to turn to next; never empty.
    pub workers: Vec<Worker>,
    /// Every worker that the request may have was called down when the daemon last told.
    pub all_down: bool,
    /// Why the daemon did not decide.
    pub why: FallbackReason,
    /// Since when the daemon has not answered.
    pub since: Instant,
}

/// Ranks the workers of a request's space, best first. Answers with nobody if none is known who may run it, and with
/// whether all of them were called down: that is a doubt, which is set aside where nobody else is left, as the daemon does.
pub(in crate::client) fn rank(
    fleet: &Fleet,
    request: &RouteRequest<'_>,
    prefix_tokens_max: usize,
) -> (Vec<Worker>, bool) {
    let wanted = |state: fn(WorkerState) -> bool| {
        let fits = move |info: &&WorkerInfo| info.space == request.space && state(info.state) && may_run(info, request);
        fleet.workers.iter().filter(fits)
    };
    let healthy = |state| matches!(state, WorkerState::Joining | WorkerState::Ready);
    let mut running: Vec<_> = wanted(healthy).collect();
    let all_down = running.is_empty();
    if all_down {
        running = wanted(|state| state == WorkerState::Down).collect();
    }
    let key = rendezvous::key(request, prefix_tokens_max);
    let drawn = |info: &WorkerInfo| {
        let draw = rendezvous::draw(key, info.worker);
        (rendezvous::cost(draw, info.weight), draw, info.worker)
    };
    let mut ranked: Vec<_> = running.into_iter().map(drawn).collect();
    ranked.sort_unstable_by(by_cost);
    ranked.truncate(request.candidates_max.max(1));
    (ranked.into_iter().map(|(_, _, worker)| worker).collect(), all_down)
}

/// Lowest cost first; equal ones by the higher draw, then by name.
fn by_cost(one: &(f64, u64, Worker), other: &(f64, u64, Worker)) -> Ordering {
    one.0.total_cmp(&other.0).then(other.1.cmp(&one.1)).then(one.2.cmp(&other.2))
}

fn may_run(info: &WorkerInfo, request: &RouteRequest<'_>) -> bool {
    let names = |listed: &Worker| listed.selects(info.worker);
    request.allow.is_none_or(|allow| allow.iter().any(names))
        && request.pin.is_none_or(|pin| names(&pin))
        && request.required_taints.iter().all(|label| info.taints.iter().any(|taint| taint == label))
}

#[cfg(test)]
mod tests;
