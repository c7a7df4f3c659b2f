//! What a gateway gets back, owned.

use std::path::PathBuf;

use super::lanes::LaneOpened;
use super::policy::PolicyDone;
use crate::error::{Error, Kind, Result, Side};
use crate::finding::Finding;
use crate::ids::{Scheme, SpaceId, TierBlocks, Worker};
use crate::protocol::{
    BookingHandle, BookingOutcome, CostTerms, DeviceClass, MatchStatus, Mode, PoolRole, PotentialLoads, ReplyNotes,
    WorkerState,
};
use crate::trust::Trust;

/// Any frame a daemon sends.
#[derive(Clone, Debug, PartialEq)]
pub enum Reply {
    /// To hello.
    Hello(HelloReply),
    /// To route.
    Route(RouteReply),
    /// To prefill-complete.
    PrefillComplete(BookingOutcome),
    /// To free.
    Free(BookingOutcome),
    /// To output-progress.
    OutputProgress(BookingOutcome),
    /// To served.
    Served(BookingOutcome),
    /// To report-load: whether it was taken.
    ReportLoad(bool),
    /// To report-failure: for how long the worker is left alone, milliseconds.
    ReportFailure(u32),
    /// To overlap.
    Overlap(OverlapReply),
    /// To potential loads.
    PotentialLoads(PotentialLoads),
    /// To workers.
    Workers(WorkersPage),
    /// To watch, each time.
    Watch(WatchReply),
    /// To status.
    Status(StatusPage),
    /// To a change of workers: how many it is about.
    ChangeWorker(u32),
    /// To reset.
    Reset(ResetDone),
    /// What decides and what judges now.
    SetPolicy(PolicyDone),
    /// To open-lane; descriptors come with it.
    OpenLane(LaneOpened),
    /// To anything that failed.
    Error(RemoteError),
}

/// The bounds a daemon holds its gateways to.
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

/// A model, namespace and pool that can be asked about.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SpaceInfo {
    /// What requests call it.
    pub id: SpaceId,
    /// The model's name.
    pub model: String,
    /// What else separates it; empty = the default namespace.
    pub namespace: String,
    /// Which pool it is.
    pub role: PoolRole,
    /// How its tokens become hashes, once that is known.
    pub scheme: Option<Scheme>,
}

/// The daemon's side of the first exchange.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HelloReply {
    /// The protocol version both speak.
    pub version: u16,
    /// Drawn when the daemon started.
    pub instance_id: u64,
    /// Its bounds.
    pub limits: ServerLimits,
    /// What it serves: bits of [`features`](super::features).
    pub features: u64,
    /// What can be asked about.
    pub spaces: Vec<SpaceInfo>,
    /// Where status is answered.
    pub admin_socket: Option<PathBuf>,
}

/// One candidate of a decision.
#[derive(Clone, Debug, PartialEq)]
pub struct Candidate {
    /// Who it is.
    pub worker: Worker,
    /// Its short name.
    pub name: String,
    /// What it holds of the prompt.
    pub overlap: TierBlocks,
    /// How far that may be believed.
    pub trust: Trust,
    /// What it would cost; the least is chosen.
    pub cost: f64,
    /// Where it is in its life.
    pub state: WorkerState,
    /// What the cost is made of, when asked to explain.
    pub terms: Option<CostTerms>,
}

/// A decision.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RouteReply {
    /// The chosen one first, then by ascending cost; empty = nobody was eligible.
    pub candidates: Vec<Candidate>,
    /// How many were in the running, however many are listed.
    pub eligible: u32,
    /// How many shared the lowest cost.
    pub ties: u32,
    /// Whether overlaps mean anything.
    pub matched: MatchStatus,
    /// Remarks.
    pub notes: ReplyNotes,
    /// Whole blocks of the prompt that were looked up.
    pub request_blocks: u32,
    /// Which weights were used.
    pub policy_version: u64,
    /// Which fleet table was used.
    pub fleet_version: u64,
    /// How many batches the index had applied, summed over shards.
    pub index_epoch: u64,
    /// The booking, if one was asked for and somebody was eligible.
    pub booking: Option<BookingHandle>,
    /// Rules and whom they took out of the running; when nobody was eligible, or when asked to explain.
    pub removed: Vec<(String, Vec<Worker>)>,
    /// Why nobody was eligible: an error code; 0 = somebody was, or the daemon does not say.
    pub nobody: u16,
    /// When to ask again where nobody was, microseconds; 0 = at will or never.
    pub retry_after_us: u32,
    /// How the first was chosen; `None` = the daemon does not say, or knows modes that this version does not.
    pub mode: Option<Mode>,
    /// Who prefills, the chosen one first; empty = who is chosen above does both.
    pub prefill: Vec<Candidate>,
    /// What the prefill half is booked as, if it is.
    pub prefill_booking: Option<BookingHandle>,
}

impl RouteReply {
    /// The chosen worker.
    ///
    /// # Errors
    /// Why there is none: `PinnedNotAllowed`, `PinnedBusy`, `AllBusy`, `AllFiltered` or `NobodyAvailable`, with whom
    /// each rule removed.
    pub fn chosen(&self) -> Result<&Candidate> {
        self.candidates.first().ok_or_else(|| {
            // From a daemon that says less, or more than is known here: that somebody may come is always true.
            let kind = Some(self.nobody).filter(|code| *code != 0).and_then(Kind::from_code);
            let kind = kind.unwrap_or(Kind::NobodyAvailable);
            let rule = |(rule, workers): &(String, Vec<Worker>)| format!("{} {rule}", workers.len());
            let removed: Vec<_> = self.removed.iter().map(rule).collect();
            let removed = if removed.is_empty() { "the space has no workers".to_owned() } else { removed.join(", ") };
            let remedy = match kind {
                Kind::PinnedNotAllowed => "allow the worker, or do not pin the request to it",
                Kind::PinnedBusy => "wait, or do not pin the request",
                Kind::AllBusy => "wait, or raise the busy thresholds in [policy]",
                Kind::AllFiltered => "ask for less, or see `kvrouted query` for whom each rule removes",
                _ => "wait, or see `kvrouted status` for where the workers are",
            };
            Error::new(kind, format!("nobody is eligible: {removed}"), remedy)
        })
    }
}

/// What one worker holds of a prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OverlapEntry {
    /// Who.
    pub worker: Worker,
    /// How much.
    pub overlap: TierBlocks,
    /// How far that may be believed.
    pub trust: Trust,
}

/// Who holds how much of a prompt.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct OverlapReply {
    /// Every eligible worker.
    pub workers: Vec<OverlapEntry>,
    /// Whether overlaps mean anything.
    pub matched: MatchStatus,
    /// Whole blocks of the prompt that were looked up.
    pub request_blocks: u32,
    /// Remarks.
    pub notes: ReplyNotes,
}

/// One worker's record.
#[derive(Clone, Debug, PartialEq)]
pub struct WorkerInfo {
    /// Who it is.
    pub worker: Worker,
    /// The space it serves.
    pub space: SpaceId,
    /// Its short name.
    pub name: String,
    /// Where it is in its life.
    pub state: WorkerState,
    /// What it computes on.
    pub device_class: DeviceClass,
    /// Its throughput relative to a CPU worker's 1.
    pub weight: f64,
    /// KV blocks its device holds; 0 = not known.
    pub capacity_blocks: u64,
    /// Tokens it batches in one step.
    pub batched_tokens_max: u64,
    /// Labels that constraints match.
    pub taints: Vec<String>,
    /// How much the index's word about it may be believed.
    pub trust: Trust,
}

/// A page of workers.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct WorkersPage {
    /// The workers.
    pub workers: Vec<WorkerInfo>,
    /// Where the next page starts; `None` = this is the last.
    pub next_cursor: Option<u32>,
    /// Which fleet table it is from.
    pub fleet_version: u64,
}

/// Who there is, as a watch tells it.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct WatchReply {
    /// Every worker of what is watched, or a page of them, with its trust of that moment.
    pub workers: Vec<WorkerInfo>,
    /// Which fleet table it is from; with pages, which one the first is from. A later page is of the fleet as it is by then:
    /// who has left is not in it, and who has come back elsewhere is as the last page that names it says.
    pub fleet_version: u64,
    /// Another page of the same telling follows; 0 = it was the last.
    pub next_cursor: u32,
}

/// Where the next page of a fleet begins that a watch is being told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WatchCursor {
    /// Of the table that the first page is from.
    pub fleet_version: u64,
    /// The place of the worker that it begins with; of one behind it, if that one has left.
    pub place: usize,
}

/// How one worker is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WorkerStatus {
    /// Who it is.
    pub worker: Worker,
    /// The space it serves.
    pub space: SpaceId,
    /// That space's model.
    pub model: String,
    /// Its short name.
    pub name: String,
    /// Where it is in its life.
    pub state: WorkerState,
    /// How much the index's word about it may be believed.
    pub trust: Trust,
    /// Blocks bound, whichever tier holds them.
    pub blocks_held: u64,
    /// Blocks held by tier, by [`Tier::index`](crate::ids::Tier::index); at most 2³² - 1 on the wire.
    pub blocks_by_tier: [u64; 4],
    /// Its counters by name.
    pub counters: Vec<(String, u64)>,
    /// What an operator can do about the worst reason.
    pub remedy: Option<String>,
    /// Who named it; empty from a daemon that does not say.
    pub source: String,
}

/// One source of workers, or an engine that is named by its URL and has not answered.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SourceStatus {
    /// Its name: `config`, `file PATH`, `admin`, or the URL.
    pub name: String,
    /// Workers that it owns.
    pub workers: u32,
    /// Why what it says cannot be used, or whom it names in vain.
    pub problem: Option<String>,
}

/// What to do with a worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WorkerOp {
    /// Add it, or replace one that a request added before.
    Add,
    /// Remove one that a request added.
    Remove,
    /// Set fields of it, whoever named it.
    Set,
}

/// A request to add, remove or change a worker.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct WorkerChange<'a> {
    /// What to do.
    pub op: WorkerOp,
    /// Which worker; rank 2³² - 1 = every rank. `None` where the fields say it.
    pub worker: Option<Worker>,
    /// Names and values, as on the command line.
    pub fields: &'a [(String, String)],
}

/// A page of status.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StatusPage {
    /// The workers.
    pub workers: Vec<WorkerStatus>,
    /// Where the next page starts, never 0; `None` = this is the last.
    pub next_cursor: Option<u32>,
    /// Which fleet table it is from.
    pub fleet_version: u64,
    /// Drawn when the daemon started.
    pub instance_id: u64,
    /// How long the daemon has been up, milliseconds.
    pub uptime_ms: u64,
    /// The daemon's own counters by name.
    pub counters: Vec<(String, u64)>,
    /// Who names workers, on the first page.
    pub sources: Vec<SourceStatus>,
    /// What is wrong, the worst first; with the last page only.
    pub findings: Vec<Finding>,
    /// The daemon's release; empty = one that does not say.
    pub daemon_version: String,
    /// Where metrics are served on the loopback interface; 0 = nowhere.
    pub metrics_port: u16,
}

/// What of its workers' blocks a daemon is to forget.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ResetOrder {
    /// Whose; `None` = every worker's.
    pub worker: Option<Worker>,
    /// Only what devices held, because the engine's cache was cleared, which the engine publishes with its next step.
    pub engine_cleared: bool,
}

/// What a reset did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ResetDone {
    /// Workers that are emptied, in the next turn of their ingest threads.
    pub workers: u32,
    /// Snapshots that were removed.
    pub snapshots: u32,
}

/// An error the daemon answered with.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RemoteError {
    /// The number on the wire.
    pub code: u16,
    /// What it means, if this version knows.
    pub kind: Option<Kind>,
    /// Who has to act.
    pub side: Side,
    /// Whether the same request may succeed later.
    pub retryable: bool,
    /// When to try again, microseconds; 0 = at will.
    pub retry_after_us: u32,
    /// What happened.
    pub message: String,
    /// What to do about it.
    pub remedy: String,
}

impl From<RemoteError> for Error {
    /// Keeps kind, message and remedy. A code that this version does not know becomes
    /// [`Kind::Internal`], its number in the message.
    fn from(remote: RemoteError) -> Self {
        match remote.kind {
            Some(kind) => Self::new(kind, remote.message, remote.remedy),
            None => Self::new(Kind::Internal, format!("error code {}: {}", remote.code, remote.message), remote.remedy),
        }
    }
}
