//! The facts of a sampled decision, and the queue to the thread that makes spans of them.

use crossbeam::queue::ArrayQueue;

use crate::error::Kind;
use crate::ids::{SpaceId, TierBlocks, Worker};
use crate::protocol::{BookingHandle, Mode, TraceContext};
use crate::route::Scored;
use crate::trust::TrustLevel;

/// How a request ended in the daemon.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TracedOutcome {
    /// A worker was chosen and booked.
    Booked,
    /// A worker was chosen; the request asked for no booking.
    Chosen,
    /// No worker was eligible, for this reason.
    NoWorker(Kind),
    /// The request got this error.
    Refused(Kind),
}

/// A chosen worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct TracedWorker {
    pub(crate) worker: Worker,
    /// Blocks of the prompt that it held.
    pub(crate) overlap: TierBlocks,
    /// Trust in that.
    pub(crate) trust: TrustLevel,
}

impl TracedWorker {
    pub(crate) const fn of(chosen: &Scored) -> Self {
        Self { worker: chosen.worker, overlap: chosen.overlap, trust: chosen.trust.level }
    }
}

/// A decision about a sampled request, or the error in its place. Times are nanoseconds of the bookings' clock.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TracedDecision {
    /// The caller's context, which is valid; `None` = the trace begins here.
    pub(crate) context: Option<TraceContext>,
    pub(crate) space: SpaceId,
    /// When the decision began. Before that the request waited in the queue for `waited_ns`.
    pub(crate) began_ns: u64,
    pub(crate) waited_ns: u64,
    pub(crate) ended_ns: u64,
    pub(crate) outcome: TracedOutcome,
    pub(crate) mode: Mode,
    pub(crate) prompt_tokens: u64,
    /// Whole blocks of the prompt that were looked up.
    pub(crate) prompt_blocks: u32,
    /// Eligible workers.
    pub(crate) eligible: u32,
    pub(crate) chosen: Option<TracedWorker>,
    /// The worker that prefills, if that is another one.
    pub(crate) prefill: Option<TracedWorker>,
    pub(crate) booking: Option<BookingHandle>,
}

impl TracedDecision {
    /// The refusal of a request in `space`, with a prompt of this many tokens.
    pub(crate) fn refused(
        context: Option<TraceContext>,
        (space, prompt_tokens): (SpaceId, u64),
        (began_ns, ended_ns): (u64, u64),
        kind: Kind,
    ) -> Self {
        Self {
            context,
            space,
            began_ns,
            waited_ns: 0,
            ended_ns,
            outcome: TracedOutcome::Refused(kind),
            mode: Mode::default(),
            prompt_tokens,
            prompt_blocks: 0,
            eligible: 0,
            chosen: None,
            prefill: None,
            booking: None,
        }
    }
}

/// Sampled decisions of all threads on their way to the exporting thread.
#[derive(Debug)]
pub(crate) struct TraceQueue(ArrayQueue<TracedDecision>);

impl TraceQueue {
    /// A queue with room for `decisions_max`, at least one.
    pub(crate) fn new(decisions_max: usize) -> Self {
        Self(ArrayQueue::new(decisions_max.max(1)))
    }

    /// Queues a decision; `false` = there is no room, and it is lost.
    #[must_use]
    pub(crate) fn push(&self, decision: TracedDecision) -> bool {
        self.0.push(decision).is_ok()
    }

    /// The decision that has waited longest.
    pub(crate) fn pop(&self) -> Option<TracedDecision> {
        self.0.pop()
    }
}
