//! The replies of the daemon, as owned values.

use std::path::PathBuf;

use super::admin::AdminReply;
use super::decode_request::LaneOpened;
use crate::error::{Error, Kind, Result, Side};
use crate::ids::{Scheme, SpaceId, TierBlocks, Worker};
use crate::protocol::{
    BookingHandle, BookingOutcome, CostTerms, DeviceClass, MatchStatus, Mode, OtherLoad, PoolRole, PotentialLoads,
    ReplyNotes, WorkerState,
};
use crate::trust::Trust;

/// Any reply of the daemon, by the request that it answers.
#[derive(Clone, Debug, PartialEq)]
pub enum Reply {
    /// Answers hello.
    Hello(HelloReply),
    /// Answers route.
    Route(RouteReply),
    /// Answers prefill-complete.
    PrefillComplete(BookingOutcome),
    /// Answers free.
    Free(BookingOutcome),
    /// Answers output-progress.
    OutputProgress(BookingOutcome),
    /// Answers served.
    Served(BookingOutcome),
    /// Answers report-load: whether the report was accepted.
    ReportLoad(bool),
    /// Answers report-failure: how long requests avoid the worker, milliseconds.
    ReportFailure(u32),
    /// Answers overlap.
    Overlap(OverlapReply),
    /// Answers potential-loads.
    PotentialLoads(PotentialLoads),
    /// Answers workers.
    Workers(WorkersPage),
    /// Answers watch, at once and after each change.
    Watch(WatchReply),
    /// Answers a request of administration.
    Admin(AdminReply),
    /// Answers open-lane; descriptors come with it.
    OpenLane(LaneOpened),
    /// Answers a request that failed.
    Error(RemoteError),
}

/// The daemon's limits for gateways.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ServerLimits {
    /// Bytes of a request's body.
    pub frame_body_bytes_max: u32,
    /// Tokens of a prompt.
    pub prompt_tokens_max: u32,
    /// Candidates in a reply.
    pub candidates_max: u32,
    /// Workers in a page.
    pub workers_page_max: u32,
    /// Bookings of a session.
    pub bookings_per_session_max: u32,
}

/// A space: a model, a namespace and a pool.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SpaceInfo {
    /// The id for requests.
    pub id: SpaceId,
    /// The model.
    pub model: String,
    /// The namespace; empty = the default one.
    pub namespace: String,
    /// The pool.
    pub role: PoolRole,
    /// The scheme of its block hashes; `None` = not known yet.
    pub scheme: Option<Scheme>,
}

/// The reply to hello.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HelloReply {
    /// The protocol version of this connection.
    pub version: u16,
    /// The daemon: a number that it draws when it starts, unless it continues with the bookings of an earlier run.
    pub instance_id: u64,
    /// The daemon's limits.
    pub limits: ServerLimits,
    /// The features that the daemon serves: bits of [`features`](super::features).
    pub features: u64,
    /// The daemon's spaces.
    pub spaces: Vec<SpaceInfo>,
    /// The path of the admin socket.
    pub admin_socket: Option<PathBuf>,
}

/// One candidate of a decision.
#[derive(Clone, Debug, PartialEq)]
pub struct Candidate {
    /// The worker.
    pub worker: Worker,
    /// The worker's short name.
    pub name: String,
    /// The blocks of the prompt that it holds, by tier.
    pub overlap: TierBlocks,
    /// The trust in that overlap.
    pub trust: Trust,
    /// The cost; the lowest is chosen.
    pub cost: f64,
    /// The worker's state.
    pub state: WorkerState,
    /// The terms of the cost, if the request asked to explain.
    pub terms: Option<CostTerms>,
}

/// A decision.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RouteReply {
    /// The chosen worker first, then by ascending cost; empty = no worker was eligible.
    pub candidates: Vec<Candidate>,
    /// The number of eligible workers, however many are listed.
    pub eligible: u32,
    /// The number of workers with the lowest cost.
    pub ties: u32,
    /// Whether the overlaps are valid.
    pub matched: MatchStatus,
    /// Notes on the reply.
    pub notes: ReplyNotes,
    /// Whole blocks of the prompt that were looked up.
    pub request_blocks: u32,
    /// The version of the policy that decided.
    pub policy_version: u64,
    /// The version of the fleet table that was used.
    pub fleet_version: u64,
    /// The batches that the index had applied, summed over shards.
    pub index_epoch: u64,
    /// The booking, if the request asked for one and a worker was eligible.
    pub booking: Option<BookingHandle>,
    /// The excluded workers by rule, if no worker was eligible or the request asked to explain.
    pub removed: Vec<(String, Vec<Worker>)>,
    /// The error code that says why no worker was eligible; 0 = some were, or an older daemon.
    pub nobody: u16,
    /// The pause before a retry if no worker was eligible, microseconds; 0 = any time, or never.
    pub retry_after_us: u32,
    /// The mode that chose; `None` = an older daemon, or a mode that this version does not know.
    pub mode: Option<Mode>,
    /// The workers to prefill, the chosen one first; empty = the worker chosen above does both.
    pub prefill: Vec<Candidate>,
    /// The booking of the worker that prefills, if there is one.
    pub prefill_booking: Option<BookingHandle>,
    /// What the bookings of other routers add to the candidates, if the request asked to explain.
    pub others: Vec<OtherLoad>,
}

impl RouteReply {
    /// The chosen worker.
    ///
    /// # Errors
    /// No worker was eligible: `PinnedNotAllowed`, `PinnedBusy`, `AllBusy`, `AllFiltered` or `NobodyAvailable`, with the
    /// workers that each rule excluded.
    pub fn chosen(&self) -> Result<&Candidate> {
        self.candidates.first().ok_or_else(|| {
            // An older or newer daemon may send another code. `NobodyAvailable` is always true.
            let kind = Some(self.nobody).filter(|code| *code != 0).and_then(Kind::from_code);
            let kind = kind.unwrap_or(Kind::NobodyAvailable);
            let rule = |(rule, workers): &(String, Vec<Worker>)| format!("{} {rule}", workers.len());
            let removed: Vec<_> = self.removed.iter().map(rule).collect();
            let removed = if removed.is_empty() { "the space has no workers".to_owned() } else { removed.join(", ") };
            let remedy = match kind {
                Kind::PinnedNotAllowed => "allow the worker, or do not pin the request to it",
                Kind::PinnedBusy => "wait, or do not pin the request",
                Kind::AllBusy => "wait, or raise the busy thresholds in [policy]",
                Kind::AllFiltered => {
                    "relax the request's constraints; `kvrouted query` shows the workers that each rule excludes"
                }
                _ => "wait, or see `kvrouted status` for where the workers are",
            };
            Error::new(kind, format!("no worker is eligible: {removed}"), remedy)
        })
    }
}

/// How much of a prompt one worker holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OverlapEntry {
    /// The worker.
    pub worker: Worker,
    /// The blocks that it holds, by tier.
    pub overlap: TierBlocks,
    /// The trust in that overlap.
    pub trust: Trust,
}

/// How much of a prompt each worker holds.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct OverlapReply {
    /// Every eligible worker.
    pub workers: Vec<OverlapEntry>,
    /// Whether the overlaps are valid.
    pub matched: MatchStatus,
    /// Whole blocks of the prompt that were looked up.
    pub request_blocks: u32,
    /// Notes on the reply.
    pub notes: ReplyNotes,
}

/// The record of one worker.
#[derive(Clone, Debug, PartialEq)]
pub struct WorkerInfo {
    /// The worker.
    pub worker: Worker,
    /// The worker's space.
    pub space: SpaceId,
    /// The worker's short name.
    pub name: String,
    /// The worker's state.
    pub state: WorkerState,
    /// The class of its device.
    pub device_class: DeviceClass,
    /// Its throughput, relative to 1 of a CPU worker.
    pub weight: f64,
    /// KV blocks in its device memory; 0 = not known.
    pub capacity_blocks: u64,
    /// The most tokens of one step.
    pub batched_tokens_max: u64,
    /// Labels that constraints match.
    pub taints: Vec<String>,
    /// The trust in its overlaps.
    pub trust: Trust,
}

/// A page of workers.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct WorkersPage {
    /// The workers.
    pub workers: Vec<WorkerInfo>,
    /// The cursor of the next page; `None` = this is the last.
    pub next_cursor: Option<u32>,
    /// The version of the fleet table.
    pub fleet_version: u64,
}

/// The fleet, or a page of it, as a watch sends it.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct WatchReply {
    /// Every watched worker, or a page of them, with its present trust.
    pub workers: Vec<WorkerInfo>,
    /// The version of the fleet table; of several pages, that of the first. A later page is of the fleet at its time: a worker
    /// that has left is not in it. For a worker that is in two pages, the later page counts.
    pub fleet_version: u64,
    /// The cursor of the next page; 0 = this is the last.
    pub next_cursor: u32,
}

/// The beginning of the next page that a watch sends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WatchCursor {
    /// The version of the fleet table of the first page.
    pub fleet_version: u64,
    /// The place of the first worker of the page. If that worker has left, the page begins with the next one.
    pub place: usize,
}

/// An error that the daemon sent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RemoteError {
    /// The code on the wire.
    pub code: u16,
    /// The kind of error; `None` = this version does not know the code.
    pub kind: Option<Kind>,
    /// The side that has to act.
    pub side: Side,
    /// Whether the same request may succeed later.
    pub retryable: bool,
    /// The pause before a retry, microseconds; 0 = any time.
    pub retry_after_us: u32,
    /// The message.
    pub message: String,
    /// The remedy.
    pub remedy: String,
}

impl From<RemoteError> for Error {
    /// Keeps kind, message and remedy. A code that this version does not know becomes [`Kind::Internal`], with the code in
    /// the message.
    fn from(remote: RemoteError) -> Self {
        match remote.kind {
            Some(kind) => Self::new(kind, remote.message, remote.remedy),
            None => Self::new(Kind::Internal, format!("error code {}: {}", remote.code, remote.message), remote.remedy),
        }
    }
}
