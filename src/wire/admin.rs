//! The messages of administration, in both directions: their values, and the frames that carry them. The admin socket
//! alone answers them.
//!
//! A new message is written here: a variant of [`AdminRequest`] and one of [`AdminReply`], and the arms that the compiler
//! asks for. Its kinds are in `header.rs`.

use flatbuffers::{FlatBufferBuilder, WIPOffset};

use super::decode_reply::{self, state};
use super::decode_request::{self, bounded, understood, unsupported};
use super::encode_reply::{Builder, ReplyEncoder, cut};
use super::encode_request::RequestEncoder;
use super::header::FrameKind;
use super::running_config::{self, RunningConfigPage};
use super::schema_conversions::{
    op_from_wire, op_to_wire, state_to_wire, tiers_from_wire, tiers_to_wire, trust_from_wire, trust_to_wire,
    worker_from_wire, worker_to_wire,
};
use crate::error::{Error, Kind, Result};
use crate::finding::{Finding, Harm};
use crate::ids::{CorrelationId, SpaceId, TierBlocks, Worker};
use crate::limits::{POLICY_SETTINGS_MAX, WORKER_FIELDS_MAX};
use crate::protocol::WorkerState;
use crate::schema_generated::routing as fb;
use crate::trust::Trust;

/// A request of administration.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum AdminRequest<'a> {
    /// Asks for the status of the daemon and its workers.
    Status {
        /// The cursor of the page; 0 = the first page.
        cursor: u32,
        /// The most workers of the page; 0 = the daemon's limit.
        limit: u32,
    },
    /// Adds, removes or changes workers.
    ChangeWorker(WorkerChange<'a>),
    /// Makes the daemon forget the blocks of a worker, or of every worker.
    Reset(ResetOrder),
    /// Sets, promotes or ends a shadow policy.
    SetPolicy(PolicyOrder<'a>),
    /// Asks for the configuration that the daemon runs with.
    RunningConfig {
        /// The cursor of the page; 0 = the first page.
        cursor: u32,
    },
}

/// The reply to a request of administration, by the request.
#[derive(Clone, Debug, PartialEq)]
pub enum AdminReply {
    /// A page of the status.
    Status(StatusPage),
    /// The number of workers that a change concerns.
    ChangeWorker(u32),
    /// The result of a reset.
    Reset(ResetDone),
    /// The result of an order about the policy.
    SetPolicy(PolicyDone),
    /// A page of the configuration.
    RunningConfig(RunningConfigPage),
}

/// The status of one worker.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WorkerStatus {
    /// The worker.
    pub worker: Worker,
    /// The worker's space.
    pub space: SpaceId,
    /// The model of the space.
    pub model: String,
    /// The worker's short name.
    pub name: String,
    /// The worker's state.
    pub state: WorkerState,
    /// The trust in its overlaps.
    pub trust: Trust,
    /// Blocks held, in any tier.
    pub blocks_held: u64,
    /// Blocks held by tier, by [`Tier::index`](crate::ids::Tier::index); at most 2³² - 1 on the wire.
    pub blocks_by_tier: [u64; 4],
    /// Its counters by name.
    pub counters: Vec<(String, u64)>,
    /// The remedy for the worst reason.
    pub remedy: Option<String>,
    /// The source that named it; empty from an older daemon.
    pub source: String,
}

/// One source of workers, or an engine that is named by its URL and has not answered.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SourceStatus {
    /// Its name: `config`, `file PATH`, `admin`, or the URL.
    pub name: String,
    /// The number of its workers.
    pub workers: u32,
    /// Why its contents cannot be used, or the workers that it names without effect.
    pub problem: Option<String>,
}

/// This router, another router that shares its load, or an address from which none was heard.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RouterStatus {
    /// Where it is heard; empty = not by an address of the configuration.
    pub address: String,
    /// `self`, `unreached`, or how far it is believed: `live`, `silent`, and so on.
    pub state: String,
    /// Its number; 0 = no router was heard there.
    pub origin: u64,
    /// Its run; 0 = none counts.
    pub incarnation: u64,
    /// Its last batch that counts.
    pub sequence: u64,
    /// The digest of its gauges that count.
    pub digest: u64,
    /// The number of those gauges.
    pub workers: u32,
    /// Requests in flight that they add to all workers.
    pub requests: u64,
    /// Tokens to prefill that they add.
    pub prefill_tokens: u64,
    /// Decode blocks that they add.
    pub decode_blocks: u64,
    /// The time since it last said something that counts, or anything if nothing counts, milliseconds.
    pub age_ms: u64,
    /// Why it does not count, with the remedy.
    pub problem: Option<String>,
    /// Its counters by name.
    pub counters: Vec<(String, u64)>,
}

/// A page of status.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StatusPage {
    /// The workers.
    pub workers: Vec<WorkerStatus>,
    /// The cursor of the next page, never 0; `None` = this is the last.
    pub next_cursor: Option<u32>,
    /// The version of the fleet table.
    pub fleet_version: u64,
    /// The daemon run: a number that the daemon draws when it starts.
    pub instance_id: u64,
    /// The time since the daemon started, milliseconds.
    pub uptime_ms: u64,
    /// The daemon's own counters by name.
    pub counters: Vec<(String, u64)>,
    /// The sources of workers, on the first page.
    pub sources: Vec<SourceStatus>,
    /// The findings, the worst first, on the last page.
    pub findings: Vec<Finding>,
    /// The daemon's release; empty from an older daemon.
    pub daemon_version: String,
    /// The port of the metrics page at 127.0.0.1; 0 = none.
    pub metrics_port: u16,
    /// The routers, this one among them, on the first page; none = it shares no load.
    pub routers: Vec<RouterStatus>,
}

/// The kinds of changes of workers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WorkerOp {
    /// Adds a worker, or replaces one that a request added before.
    Add,
    /// Removes a worker that a request added.
    Remove,
    /// Sets fields of a worker of any source.
    Set,
}

/// A request to add, remove or change a worker.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct WorkerChange<'a> {
    /// The kind of change.
    pub op: WorkerOp,
    /// The worker; rank 2³² - 1 = every rank. `None` = the fields name it.
    pub worker: Option<Worker>,
    /// Names and values, as on the command line.
    pub fields: &'a [(String, String)],
}

/// The blocks that the daemon is to forget.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ResetOrder {
    /// The worker; `None` = every worker.
    pub worker: Option<Worker>,
    /// Whether only blocks in device memory are forgotten: the engine's cache was cleared, which the engine publishes with its
    /// next step.
    pub engine_cleared: bool,
}

/// The result of a reset.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ResetDone {
    /// The number of workers that their ingest threads empty next.
    pub workers: u32,
    /// The number of removed snapshots.
    pub snapshots: u32,
}

/// An order about the policy.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum PolicyOrder<'a> {
    /// A shadow policy judges a share of the decisions from now on.
    Shadow {
        /// The differences from each space's policy: fields of `[policy]` and their values.
        settings: &'a [(String, String)],
        /// The share of the decisions, 0 to 1.
        share: f64,
    },
    /// The shadow policy becomes the policy that decides.
    Promote,
    /// No shadow policy judges from now on.
    EndShadow,
}

/// The result of an order about the policy.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct PolicyDone {
    /// The version of the policies that decide now.
    pub policy_version: u64,
    /// The share of decisions that a shadow policy judges now, 0 to 1.
    pub shadow_share: f64,
}

// ---- requests ----

impl<'a> AdminRequest<'a> {
    /// The kind of its frame.
    #[must_use]
    pub const fn kind(&self) -> FrameKind {
        match self {
            Self::Status { .. } => FrameKind::Status,
            Self::ChangeWorker(_) => FrameKind::ChangeWorker,
            Self::Reset(_) => FrameKind::Reset,
            Self::SetPolicy(_) => FrameKind::SetPolicy,
            Self::RunningConfig { .. } => FrameKind::RunningConfig,
        }
    }

    /// Decodes a body; `None` if its kind is not one of administration.
    pub(super) fn decode(
        kind: FrameKind,
        body: &'a [u8],
        fields: &'a mut Vec<(String, String)>,
    ) -> Result<Option<Self>> {
        Ok(Some(match kind {
            FrameKind::Status => {
                let table = decode_request::root::<fb::Status<'a>>(body)?;
                understood(table.must_understand())?;
                Self::Status { cursor: table.cursor(), limit: table.limit() }
            }
            FrameKind::ChangeWorker => {
                Self::ChangeWorker(change_worker(decode_request::root::<fb::ChangeWorker<'a>>(body)?, fields)?)
            }
            FrameKind::Reset => {
                let table = decode_request::root::<fb::Reset<'a>>(body)?;
                understood(table.must_understand())?;
                let worker = table.worker().map(worker_from_wire);
                Self::Reset(ResetOrder { worker, engine_cleared: table.engine_cleared() })
            }
            FrameKind::SetPolicy => {
                let table = decode_request::root::<fb::SetPolicy<'a>>(body)?;
                understood(table.must_understand())?;
                Self::SetPolicy(policy_order(&table, fields)?)
            }
            FrameKind::RunningConfig => {
                let table = decode_request::root::<fb::RunningConfig<'a>>(body)?;
                understood(table.must_understand())?;
                Self::RunningConfig { cursor: table.cursor() }
            }
            _ => return Ok(None),
        }))
    }
}

impl RequestEncoder {
    /// Appends a request of administration.
    pub fn admin(&mut self, id: CorrelationId, request: &AdminRequest<'_>, out: &mut Vec<u8>) {
        let builder = &mut self.builder;
        let root = match request {
            AdminRequest::Status { cursor, limit } => {
                let args = fb::StatusArgs { cursor: *cursor, limit: *limit, ..fb::StatusArgs::default() };
                fb::Status::create(builder, &args).as_union_value()
            }
            AdminRequest::ChangeWorker(change) => encode_change(builder, change).as_union_value(),
            AdminRequest::Reset(order) => {
                let worker = order.worker.map(worker_to_wire);
                let engine_cleared = order.engine_cleared;
                let args = fb::ResetArgs { worker: worker.as_ref(), engine_cleared, ..fb::ResetArgs::default() };
                fb::Reset::create(builder, &args).as_union_value()
            }
            AdminRequest::SetPolicy(order) => encode_policy_order(builder, order).as_union_value(),
            AdminRequest::RunningConfig { cursor } => {
                let args = fb::RunningConfigArgs { cursor: *cursor, ..fb::RunningConfigArgs::default() };
                fb::RunningConfig::create(builder, &args).as_union_value()
            }
        };
        self.finish(request.kind(), id, root, out);
    }
}

fn encode_change<'b>(
    builder: &mut FlatBufferBuilder<'b>,
    change: &WorkerChange<'_>,
) -> WIPOffset<fb::ChangeWorker<'b>> {
    let field = |(name, value): &(String, String)| {
        let (name, value) = (builder.create_string(name), builder.create_string(value));
        fb::WorkerField::create(builder, &fb::WorkerFieldArgs { name: Some(name), value: Some(value) })
    };
    let fields: Vec<_> = change.fields.iter().map(field).collect();
    let fields = builder.create_vector(&fields);
    let worker = change.worker.map(worker_to_wire);
    let args = fb::ChangeWorkerArgs {
        op: op_to_wire(change.op),
        worker: worker.as_ref(),
        fields: Some(fields),
        ..fb::ChangeWorkerArgs::default()
    };
    fb::ChangeWorker::create(builder, &args)
}

fn change_worker<'a>(table: fb::ChangeWorker<'_>, scratch: &'a mut Vec<(String, String)>) -> Result<WorkerChange<'a>> {
    understood(table.must_understand())?;
    let op = op_from_wire(table.op()).ok_or_else(|| unsupported(format!("change_worker.op {}", table.op().0)))?;
    scratch.clear();
    if let Some(fields) = table.fields() {
        bounded("fields", fields.len(), WORKER_FIELDS_MAX)?;
        scratch.extend(fields.iter().map(|field| (field.name().to_owned(), field.value().to_owned())));
    }
    Ok(WorkerChange { op, worker: table.worker().map(worker_from_wire), fields: scratch })
}

fn encode_policy_order<'b>(
    builder: &mut FlatBufferBuilder<'b>,
    order: &PolicyOrder<'_>,
) -> WIPOffset<fb::SetPolicy<'b>> {
    let (op, settings, share) = match *order {
        PolicyOrder::Shadow { settings, share } => (fb::PolicyOp::Shadow, settings, share),
        PolicyOrder::Promote => (fb::PolicyOp::Promote, &[][..], 0.0),
        PolicyOrder::EndShadow => (fb::PolicyOp::EndShadow, &[][..], 0.0),
    };
    let setting = |(name, value): &(String, String)| {
        let (name, value) = (builder.create_string(name), builder.create_string(value));
        fb::PolicyField::create(builder, &fb::PolicyFieldArgs { name: Some(name), value: Some(value) })
    };
    let settings: Vec<_> = settings.iter().map(setting).collect();
    let settings = builder.create_vector(&settings);
    let args = fb::SetPolicyArgs { op, settings: Some(settings), share, ..fb::SetPolicyArgs::default() };
    fb::SetPolicy::create(builder, &args)
}

/// Decodes an order about the policy. The caller has checked `must_understand`.
fn policy_order<'a>(table: &fb::SetPolicy<'_>, scratch: &'a mut Vec<(String, String)>) -> Result<PolicyOrder<'a>> {
    scratch.clear();
    let settings = table.settings().into_iter().flatten();
    scratch.extend(settings.take(POLICY_SETTINGS_MAX + 1).map(|of| (of.name().to_owned(), of.value().to_owned())));
    if scratch.len() > POLICY_SETTINGS_MAX {
        let what = format!("there are more than {POLICY_SETTINGS_MAX} settings of a policy");
        return Err(Error::new(Kind::InvalidArgument, what, "name each field once"));
    }
    match table.op() {
        fb::PolicyOp::Shadow if !(0.0..=1.0).contains(&table.share()) => {
            let what = format!("a share of {}", table.share());
            Err(Error::new(Kind::InvalidArgument, what, "name a share from 0 to 1"))
        }
        fb::PolicyOp::Shadow => Ok(PolicyOrder::Shadow { settings: scratch, share: table.share() }),
        fb::PolicyOp::Promote => Ok(PolicyOrder::Promote),
        fb::PolicyOp::EndShadow => Ok(PolicyOrder::EndShadow),
        other => {
            let what = format!("set_policy.op {} is not served here", other.0);
            Err(Error::new(Kind::Unsupported, what, "ask a daemon of a later release"))
        }
    }
}

// ---- replies ----

impl AdminReply {
    /// The kind of its frame.
    #[must_use]
    pub const fn kind(&self) -> FrameKind {
        match self {
            Self::Status(_) => FrameKind::StatusReply,
            Self::ChangeWorker(_) => FrameKind::ChangeWorkerReply,
            Self::Reset(_) => FrameKind::ResetReply,
            Self::SetPolicy(_) => FrameKind::SetPolicyReply,
            Self::RunningConfig(_) => FrameKind::RunningConfigReply,
        }
    }

    /// Decodes a body; `None` if its kind is not one of administration.
    pub(super) fn decode(kind: FrameKind, body: &[u8]) -> Result<Option<Self>> {
        Ok(Some(match kind {
            FrameKind::StatusReply => Self::Status(status(decode_reply::root::<fb::StatusReply<'_>>(body)?)?),
            FrameKind::ChangeWorkerReply => {
                Self::ChangeWorker(decode_reply::root::<fb::ChangeWorkerReply<'_>>(body)?.workers())
            }
            FrameKind::ResetReply => {
                let table = decode_reply::root::<fb::ResetReply<'_>>(body)?;
                Self::Reset(ResetDone { workers: table.workers(), snapshots: table.snapshots() })
            }
            FrameKind::SetPolicyReply => {
                let table = decode_reply::root::<fb::SetPolicyReply<'_>>(body)?;
                let (policy_version, shadow_share) = (table.policy_version(), table.shadow_share());
                Self::SetPolicy(PolicyDone { policy_version, shadow_share })
            }
            FrameKind::RunningConfigReply => {
                Self::RunningConfig(running_config::decode(decode_reply::root::<fb::RunningConfigReply<'_>>(body)?))
            }
            _ => return Ok(None),
        }))
    }
}

impl ReplyEncoder {
    /// Answers a request of administration.
    pub fn admin(&mut self, id: CorrelationId, reply: &AdminReply, out: &mut Vec<u8>) {
        let builder = &mut self.builder;
        let root = match reply {
            AdminReply::Status(page) => encode_page(builder, page).as_union_value(),
            AdminReply::ChangeWorker(workers) => {
                let args = fb::ChangeWorkerReplyArgs { workers: *workers };
                fb::ChangeWorkerReply::create(builder, &args).as_union_value()
            }
            AdminReply::Reset(done) => {
                let args = fb::ResetReplyArgs { workers: done.workers, snapshots: done.snapshots };
                fb::ResetReply::create(builder, &args).as_union_value()
            }
            AdminReply::SetPolicy(PolicyDone { policy_version, shadow_share }) => {
                let args = fb::SetPolicyReplyArgs { policy_version: *policy_version, shadow_share: *shadow_share };
                fb::SetPolicyReply::create(builder, &args).as_union_value()
            }
            AdminReply::RunningConfig(page) => running_config::encode(builder, page).as_union_value(),
        };
        self.finish(reply.kind(), id, root, out);
    }
}

fn encode_page(builder: &mut Builder, page: &StatusPage) -> WIPOffset<fb::StatusReply<'static>> {
    let workers: Vec<_> = page.workers.iter().map(|worker| encode_status(builder, worker)).collect();
    let workers = builder.create_vector(&workers);
    let counters = encode_counters(builder, &page.counters);
    let sources: Vec<_> = page.sources.iter().map(|source| encode_source(builder, source)).collect();
    let sources = builder.create_vector(&sources);
    let findings: Vec<_> = page.findings.iter().map(|finding| encode_finding(builder, finding)).collect();
    let findings = builder.create_vector(&findings);
    let routers: Vec<_> = page.routers.iter().map(|router| encode_router(builder, router)).collect();
    let routers = (!routers.is_empty()).then(|| builder.create_vector(&routers));
    let daemon_version = builder.create_string(&page.daemon_version);
    let args = fb::StatusReplyArgs {
        workers: Some(workers),
        next_cursor: page.next_cursor.unwrap_or(0),
        fleet_version: page.fleet_version,
        instance_id: page.instance_id,
        uptime_ms: page.uptime_ms,
        counters: Some(counters),
        sources: Some(sources),
        findings: Some(findings),
        daemon_version: Some(daemon_version),
        metrics_port: page.metrics_port,
        routers,
    };
    fb::StatusReply::create(builder, &args)
}

fn encode_status(builder: &mut Builder, status: &WorkerStatus) -> WIPOffset<fb::WorkerStatus<'static>> {
    let model = builder.create_string(&status.model);
    let name = builder.create_string(&status.name);
    let counters = encode_counters(builder, &status.counters);
    let remedy = status.remedy.as_ref().map(|remedy| builder.create_string(remedy));
    let source = builder.create_shared_string(&status.source);
    let [device, host, disk, external] = status.blocks_by_tier.map(|blocks| u32::try_from(blocks).unwrap_or(u32::MAX));
    let args = fb::WorkerStatusArgs {
        worker_id: status.worker.id.0,
        dp_rank: status.worker.rank.0,
        space_id: status.space.0,
        model: Some(model),
        name: Some(name),
        state: state_to_wire(status.state),
        trust: Some(&trust_to_wire(status.trust)),
        blocks_held: status.blocks_held,
        blocks_by_tier: Some(&tiers_to_wire(TierBlocks { device, host, disk, external })),
        counters: Some(counters),
        remedy,
        source: Some(source),
    };
    fb::WorkerStatus::create(builder, &args)
}

fn encode_source(builder: &mut Builder, source: &SourceStatus) -> WIPOffset<fb::SourceStatus<'static>> {
    let name = builder.create_string(&source.name);
    let problem = source.problem.as_deref().map(|problem| builder.create_string(cut(problem)));
    let args = fb::SourceStatusArgs { name: Some(name), workers: source.workers, problem };
    fb::SourceStatus::create(builder, &args)
}

fn encode_router(builder: &mut Builder, router: &RouterStatus) -> WIPOffset<fb::RouterStatus<'static>> {
    let args = fb::RouterStatusArgs {
        address: Some(builder.create_string(&router.address)),
        state: Some(builder.create_string(&router.state)),
        origin: router.origin,
        incarnation: router.incarnation,
        sequence: router.sequence,
        digest: router.digest,
        workers: router.workers,
        requests: router.requests,
        prefill_tokens: router.prefill_tokens,
        decode_blocks: router.decode_blocks,
        age_ms: router.age_ms,
        problem: router.problem.as_deref().map(|problem| builder.create_string(cut(problem))),
        counters: Some(encode_counters(builder, &router.counters)),
    };
    fb::RouterStatus::create(builder, &args)
}

fn encode_finding(builder: &mut Builder, finding: &Finding) -> WIPOffset<fb::Finding<'static>> {
    let workers = finding.workers.iter().map(|worker| fb::WorkerRef::new(worker.id.0, worker.rank.0));
    let workers = builder.create_vector_from_iter(workers);
    let args = fb::FindingArgs {
        name: Some(builder.create_string(&finding.name)),
        harm: fb::Harm(finding.harm as u8),
        since_unix_ms: finding.since_unix_ms,
        workers: Some(workers),
        workers_total: finding.workers_total,
        what: Some(builder.create_string(cut(&finding.what))),
        why: Some(builder.create_string(cut(&finding.why))),
        remedy: Some(builder.create_string(cut(&finding.remedy))),
    };
    fb::Finding::create(builder, &args)
}

fn encode_counters(
    builder: &mut Builder,
    counters: &[(String, u64)],
) -> WIPOffset<flatbuffers::Vector<'static, flatbuffers::ForwardsUOffset<fb::Counter<'static>>>> {
    let counters: Vec<_> = counters
        .iter()
        .map(|(name, value)| {
            let name = builder.create_shared_string(name);
            fb::Counter::create(builder, &fb::CounterArgs { name: Some(name), value: *value })
        })
        .collect();
    builder.create_vector(&counters)
}

fn status(table: fb::StatusReply<'_>) -> Result<StatusPage> {
    Ok(StatusPage {
        workers: table.workers().iter().map(worker_status).collect::<Result<_>>()?,
        next_cursor: Some(table.next_cursor()).filter(|cursor| *cursor != 0),
        fleet_version: table.fleet_version(),
        instance_id: table.instance_id(),
        uptime_ms: table.uptime_ms(),
        counters: counters(table.counters()),
        sources: table.sources().map(|sources| sources.iter().map(source).collect()).unwrap_or_default(),
        findings: table.findings().map(|list| list.iter().map(finding).collect()).unwrap_or_default(),
        daemon_version: table.daemon_version().unwrap_or_default().to_owned(),
        metrics_port: table.metrics_port(),
        routers: table.routers().map(|routers| routers.iter().map(router).collect()).unwrap_or_default(),
    })
}

fn source(table: fb::SourceStatus<'_>) -> SourceStatus {
    let problem = table.problem().map(str::to_owned);
    SourceStatus { name: table.name().to_owned(), workers: table.workers(), problem }
}

fn router(table: fb::RouterStatus<'_>) -> RouterStatus {
    RouterStatus {
        address: table.address().to_owned(),
        state: table.state().to_owned(),
        origin: table.origin(),
        incarnation: table.incarnation(),
        sequence: table.sequence(),
        digest: table.digest(),
        workers: table.workers(),
        requests: table.requests(),
        prefill_tokens: table.prefill_tokens(),
        decode_blocks: table.decode_blocks(),
        age_ms: table.age_ms(),
        problem: table.problem().map(str::to_owned),
        counters: counters(table.counters()),
    }
}

fn finding(table: fb::Finding<'_>) -> Finding {
    let workers = table.workers().map(|list| list.iter().map(|at| Worker::new(at.worker_id(), at.dp_rank())).collect());
    let text = |text: Option<&str>| text.unwrap_or_default().to_owned();
    Finding {
        name: table.name().to_owned(),
        harm: Harm::from_u8(table.harm().0),
        since_unix_ms: table.since_unix_ms(),
        workers: workers.unwrap_or_default(),
        workers_total: table.workers_total(),
        what: text(table.what()),
        why: text(table.why()),
        remedy: text(table.remedy()),
    }
}

fn worker_status(table: fb::WorkerStatus<'_>) -> Result<WorkerStatus> {
    let tiers = tiers_from_wire(table.blocks_by_tier());
    Ok(WorkerStatus {
        worker: Worker::new(table.worker_id(), table.dp_rank()),
        space: SpaceId(table.space_id()),
        model: table.model().unwrap_or_default().to_owned(),
        name: table.name().unwrap_or_default().to_owned(),
        state: state(table.state())?,
        trust: trust_from_wire(table.trust())?,
        blocks_held: table.blocks_held(),
        blocks_by_tier: [tiers.device, tiers.host, tiers.disk, tiers.external].map(u64::from),
        counters: counters(table.counters()),
        remedy: table.remedy().map(str::to_owned),
        source: table.source().unwrap_or_default().to_owned(),
    })
}

fn counters(
    list: Option<flatbuffers::Vector<'_, flatbuffers::ForwardsUOffset<fb::Counter<'_>>>>,
) -> Vec<(String, u64)> {
    list.map(|list| list.iter().map(|counter| (counter.name().to_owned(), counter.value())).collect())
        .unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::finding::Symptom;
    use crate::limits::FRAME_HEADER_BYTES;
    use crate::wire::ConfigField;
    use crate::wire::{FRAME_IDENTIFIER, FrameHeader, Reply, Request, RequestScratch, decode_reply, decode_request};

    const ID: CorrelationId = CorrelationId(7);

    /// The kind and the body of a frame.
    fn frame(encode: impl FnOnce(&mut Vec<u8>)) -> (u8, Vec<u8>) {
        let mut out = Vec::new();
        encode(&mut out);
        let header = FrameHeader::parse(out.first_chunk().unwrap()).unwrap();
        assert_eq!(header.correlation_id, ID);
        (header.kind, out.split_off(FRAME_HEADER_BYTES))
    }

    #[test]
    fn requests_round_trip() {
        let fields = [("id".to_owned(), "7".to_owned()), ("url".to_owned(), "http://h:1".to_owned())];
        let settings = [("mode".to_owned(), "kv".to_owned())];
        let requests = [
            AdminRequest::Status { cursor: 6, limit: 7 },
            AdminRequest::ChangeWorker(WorkerChange { op: WorkerOp::Add, worker: None, fields: &fields }),
            AdminRequest::ChangeWorker(WorkerChange {
                op: WorkerOp::Remove,
                worker: Some(Worker::new(7, u32::MAX)),
                fields: &[],
            }),
            AdminRequest::Reset(ResetOrder::default()),
            AdminRequest::Reset(ResetOrder { worker: Some(Worker::new(9, 2)), engine_cleared: true }),
            AdminRequest::SetPolicy(PolicyOrder::Shadow { settings: &settings, share: 0.25 }),
            AdminRequest::SetPolicy(PolicyOrder::Promote),
            AdminRequest::SetPolicy(PolicyOrder::EndShadow),
            AdminRequest::RunningConfig { cursor: 9 },
        ];
        for request in requests {
            let (kind, body) = frame(|out| RequestEncoder::default().admin(ID, &request, out));
            assert_eq!(kind, request.kind() as u8);
            let mut scratch = RequestScratch::default();
            assert_eq!(decode_request(kind, &body, &mut scratch).unwrap(), Request::Admin(request));
        }
    }

    #[test]
    fn a_request_with_an_unknown_feature_bit_is_refused() {
        macro_rules! body {
            ($table:ident, $args:ident) => {{
                let mut builder = FlatBufferBuilder::new();
                let args = fb::$args { must_understand: 1 << 63, ..fb::$args::default() };
                let root = fb::$table::create(&mut builder, &args);
                builder.finish(root, Some(FRAME_IDENTIFIER));
                (FrameKind::$table, builder.finished_data().to_vec())
            }};
        }
        let bodies = [
            body!(Status, StatusArgs),
            body!(ChangeWorker, ChangeWorkerArgs),
            body!(Reset, ResetArgs),
            body!(SetPolicy, SetPolicyArgs),
            body!(RunningConfig, RunningConfigArgs),
        ];
        for (kind, body) in bodies {
            let error = decode_request(kind as u8, &body, &mut RequestScratch::default()).unwrap_err();
            assert_eq!(error.kind(), Kind::Unsupported, "{}", kind.name());
            assert!(error.message().contains("must_understand bit 63"), "{error}");
        }
    }

    /// A page with every field of its own.
    fn status_page() -> StatusPage {
        let status = WorkerStatus {
            worker: Worker::new(1, 2),
            space: SpaceId(0),
            model: "m".into(),
            name: "w".into(),
            state: WorkerState::Down,
            trust: Trust::default(),
            blocks_held: u64::MAX,
            blocks_by_tier: [1, 2, 3, u64::from(u32::MAX)],
            counters: vec![("gaps".into(), 3)],
            remedy: Some("do".into()),
            source: "config".into(),
        };
        let sources = vec![SourceStatus { name: "admin".into(), workers: 3, problem: Some("torn".into()) }];
        let found = Finding {
            since_unix_ms: 7,
            workers: vec![Worker::new(1, 2)],
            workers_total: 9,
            ..Symptom::ForeignHashes.finding()
        };
        StatusPage {
            workers: vec![status.clone(), status],
            next_cursor: Some(2),
            uptime_ms: 5,
            sources,
            findings: vec![found, Symptom::ClockStepped.finding()],
            daemon_version: "1.2.3".into(),
            metrics_port: 9100,
            routers: vec![RouterStatus {
                address: "tcp://r".into(),
                state: "live".into(),
                origin: u64::MAX,
                incarnation: 1,
                sequence: 2,
                digest: 3,
                workers: 4,
                requests: 5,
                prefill_tokens: 6,
                decode_blocks: 7,
                age_ms: 8,
                problem: Some("none".into()),
                counters: vec![("gaps".into(), 9)],
            }],
            ..Default::default()
        }
    }

    /// A page with every field of its own.
    fn running_config_page() -> RunningConfigPage {
        let field = |source: Option<&str>| ConfigField {
            table: "space[0].policy".into(),
            name: "mode".into(),
            value: "\"kv\"".into(),
            source: source.map(str::to_owned),
        };
        RunningConfigPage {
            fields: vec![field(None), field(None)],
            overrides: vec![field(Some("--mode"))],
            next_cursor: Some(3),
            version: 4,
            file: Some("/etc/k.toml".into()),
            daemon_version: "1.2.3".into(),
        }
    }

    #[test]
    fn replies_round_trip() {
        let replies = [
            AdminReply::Status(status_page()),
            AdminReply::ChangeWorker(4),
            AdminReply::Reset(ResetDone { workers: 3, snapshots: 2 }),
            AdminReply::SetPolicy(PolicyDone { policy_version: 9, shadow_share: 0.5 }),
            AdminReply::RunningConfig(running_config_page()),
        ];
        for reply in replies {
            let (kind, body) = frame(|out| ReplyEncoder::default().admin(ID, &reply, out));
            assert_eq!(kind, reply.kind() as u8);
            assert_eq!(decode_reply(kind, &body).unwrap(), Reply::Admin(reply));
        }
    }
}
