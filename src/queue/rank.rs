//! The order of waiting requests.

use std::cmp::Ordering;

const NS_PER_S: f64 = 1e9;

/// The order of requests of one priority without a deadline.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Discipline {
    /// First come, first served. A jump counts as an arrival earlier by this many seconds.
    #[default]
    Fcfs,
    /// Last come, first served. A jump counts as an arrival later by this many seconds.
    Lcfs,
    /// Weighted shortest processing time: `(1 + jump) / tokens to prefill`, the highest first.
    Wspt,
}

impl Discipline {
    /// The names used in the configuration.
    pub const NAMES: [&'static str; 3] = ["fcfs", "lcfs", "wspt"];
    /// Every discipline, in the order of [`Discipline::NAMES`].
    pub const ALL: [Self; 3] = [Self::Fcfs, Self::Lcfs, Self::Wspt];

    /// The score of a request that came at `now_ns`; the highest is first.
    fn score(self, claim: &Claim, now_ns: u64) -> f64 {
        let arrival_s = now_ns as f64 / NS_PER_S;
        match self {
            Self::Fcfs => claim.jump - arrival_s,
            Self::Lcfs => claim.jump + arrival_s,
            Self::Wspt => (1.0 + claim.jump) / claim.prefill_tokens.max(1) as f64,
        }
    }
}

/// What decides the order of a request, and what it costs the queue.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Claim {
    /// The order among requests of its priority.
    pub discipline: Discipline,
    /// Requests of a higher priority come first.
    pub priority: i32,
    /// See [`Discipline`]; finite.
    pub jump: f64,
    /// The requested time of the answer, nanoseconds. Within a priority the earliest is first, `None` last.
    pub deadline_ns: Option<u64>,
    /// The end of the wait, nanoseconds; at most the deadline.
    pub ends_ns: u64,
    /// Tokens to prefill on the worker with the largest overlap.
    pub prefill_tokens: u64,
    /// Memory of the queued value.
    pub bytes: usize,
    /// The user of the request.
    pub user: u32,
}

/// A position in the order: the smallest is first. No two requests have the same.
#[derive(Clone, Copy, Debug)]
pub struct Rank {
    priority: i32,
    deadline_ns: u64,
    score: f64,
    /// Counts requests, so that equals are served in order of arrival.
    sequence: u64,
}

impl Rank {
    pub(super) fn new(claim: &Claim, now_ns: u64, sequence: u64) -> Self {
        let (priority, deadline_ns) = (claim.priority, claim.deadline_ns.unwrap_or(u64::MAX));
        Self { priority, deadline_ns, score: claim.discipline.score(claim, now_ns), sequence }
    }
}

impl Ord for Rank {
    fn cmp(&self, other: &Self) -> Ordering {
        (other.priority.cmp(&self.priority))
            .then(self.deadline_ns.cmp(&other.deadline_ns))
            .then(other.score.total_cmp(&self.score))
            .then(self.sequence.cmp(&other.sequence))
    }
}

impl PartialOrd for Rank {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Rank {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other).is_eq()
    }
}

impl Eq for Rank {}

#[cfg(test)]
mod tests {
    use super::*;

    const CLAIM: Claim = Claim {
        discipline: Discipline::Fcfs,
        priority: 0,
        jump: 0.0,
        deadline_ns: None,
        ends_ns: u64::MAX,
        prefill_tokens: 100,
        bytes: 0,
        user: 0,
    };

    /// The order in which claims are served that come one second apart.
    fn served(claims: &[Claim]) -> Vec<usize> {
        let rank = |(at, claim): (usize, &Claim)| (Rank::new(claim, at as u64 * 1_000_000_000, at as u64), at);
        let mut ranks: Vec<_> = claims.iter().enumerate().map(rank).collect();
        ranks.sort();
        ranks.into_iter().map(|(_, at)| at).collect()
    }

    #[test]
    fn disciplines_order_as_their_names_say() {
        let of = |discipline| {
            let long = Claim { discipline, prefill_tokens: 1000, ..CLAIM };
            served(&[long, Claim { prefill_tokens: 10, ..long }, Claim { prefill_tokens: 100, ..long }])
        };
        assert_eq!(of(Discipline::Fcfs), [0, 1, 2]);
        assert_eq!(of(Discipline::Lcfs), [2, 1, 0]);
        assert_eq!(of(Discipline::Wspt), [1, 2, 0]);
    }

    #[test]
    fn a_jump_is_worth_as_many_seconds() {
        assert_eq!(served(&[CLAIM, CLAIM, Claim { jump: 1.5, ..CLAIM }]), [0, 2, 1]);
        let lcfs = Claim { discipline: Discipline::Lcfs, ..CLAIM };
        assert_eq!(served(&[Claim { jump: 1.5, ..lcfs }, lcfs, lcfs]), [2, 0, 1]);
        let wspt = Claim { discipline: Discipline::Wspt, ..CLAIM };
        assert_eq!(served(&[wspt, Claim { jump: 9.0, prefill_tokens: 900, ..wspt }]), [1, 0]);
    }

    #[test]
    fn priority_comes_before_deadline_and_deadline_before_score() {
        let urgent = Claim { deadline_ns: Some(9_000_000_000), ..CLAIM };
        let sooner = Claim { deadline_ns: Some(8_000_000_000), ..CLAIM };
        let first = Claim { priority: 1, ..CLAIM };
        let last = Claim { priority: -1, deadline_ns: Some(1), jump: 1e9, ..CLAIM };
        assert_eq!(served(&[last, CLAIM, urgent, sooner, first]), [4, 3, 2, 1, 0]);
    }

    #[test]
    fn equals_are_served_in_order_of_arrival_and_scores_may_be_infinite() {
        let wspt = Claim { discipline: Discipline::Wspt, ..CLAIM };
        let huge = Claim { jump: f64::MAX, prefill_tokens: 0, ..wspt };
        assert_eq!(served(&[wspt, wspt, huge, huge, wspt]), [2, 3, 0, 1, 4]);
    }
}
