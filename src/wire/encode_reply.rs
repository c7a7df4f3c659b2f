//! Encodes the daemon's other replies, in one reused buffer, and appends them to the send buffer.

use flatbuffers::{FlatBufferBuilder, WIPOffset};

use super::decode_request::PolicyDone;
use super::header::{FRAME_IDENTIFIER, FrameKind, append_frame};
use super::message::{ResetDone, SourceStatus, StatusPage, WorkerStatus};
use super::schema_conversions::{side_to_wire, state_to_wire, tiers_to_wire, trust_to_wire};
use crate::error::{Error, Kind};
use crate::finding::Finding;
use crate::ids::{CorrelationId, TierBlocks};
use crate::limits::ERROR_TEXT_BYTES_MAX;
use crate::schema_generated::routing as fb;

pub(super) type Builder = FlatBufferBuilder<'static>;

/// Encodes replies. Its buffers are reused: once they have grown, it allocates only when `out` must grow.
#[derive(Default)]
pub struct ReplyEncoder {
    pub(super) builder: Builder,
    pub(super) loads: Vec<WIPOffset<fb::PotentialLoad<'static>>>,
}

impl std::fmt::Debug for ReplyEncoder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ReplyEncoder").finish_non_exhaustive()
    }
}

impl ReplyEncoder {
    /// Answers a status request.
    pub fn status(&mut self, id: CorrelationId, page: &StatusPage, out: &mut Vec<u8>) {
        let builder = &mut self.builder;
        let workers: Vec<_> = page.workers.iter().map(|worker| encode_status(builder, worker)).collect();
        let workers = builder.create_vector(&workers);
        let counters = encode_counters(builder, &page.counters);
        let sources: Vec<_> = page.sources.iter().map(|source| encode_source(builder, source)).collect();
        let sources = builder.create_vector(&sources);
        let findings: Vec<_> = page.findings.iter().map(|finding| encode_finding(builder, finding)).collect();
        let findings = builder.create_vector(&findings);
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
        };
        let root = fb::StatusReply::create(builder, &args);
        self.finish(FrameKind::StatusReply, id, root, out);
    }

    /// Answers a change of workers.
    pub fn change_worker(&mut self, id: CorrelationId, workers: u32, out: &mut Vec<u8>) {
        let root = fb::ChangeWorkerReply::create(&mut self.builder, &fb::ChangeWorkerReplyArgs { workers });
        self.finish(FrameKind::ChangeWorkerReply, id, root, out);
    }

    /// Answers a reset.
    pub fn reset(&mut self, id: CorrelationId, done: ResetDone, out: &mut Vec<u8>) {
        let args = fb::ResetReplyArgs { workers: done.workers, snapshots: done.snapshots };
        let root = fb::ResetReply::create(&mut self.builder, &args);
        self.finish(FrameKind::ResetReply, id, root, out);
    }

    /// Answers an order about the policy.
    pub fn set_policy(&mut self, id: CorrelationId, done: PolicyDone, out: &mut Vec<u8>) {
        let args = fb::SetPolicyReplyArgs { policy_version: done.policy_version, shadow_share: done.shadow_share };
        let root = fb::SetPolicyReply::create(&mut self.builder, &args);
        self.finish(FrameKind::SetPolicyReply, id, root, out);
    }

    /// Answers any request with an error.
    pub fn error(&mut self, id: CorrelationId, error: &Error, out: &mut Vec<u8>) {
        let builder = &mut self.builder;
        let message = builder.create_string(cut(error.message()));
        let remedy = builder.create_string(cut(error.remedy()));
        let args = fb::ErrorArgs {
            code: error.kind() as u16,
            side: side_to_wire(error.side()),
            retryable: error.is_retryable(),
            retry_after_us: error.retry_after().unwrap_or_else(|| retry_after_us(error.kind())),
            message: Some(message),
            remedy: Some(remedy),
        };
        let root = fb::Error::create(builder, &args);
        self.finish(FrameKind::Error, id, root, out);
    }

    pub(super) fn finish<T>(&mut self, kind: FrameKind, id: CorrelationId, root: WIPOffset<T>, out: &mut Vec<u8>) {
        self.builder.finish(root, Some(FRAME_IDENTIFIER));
        append_frame(out, kind, id, self.builder.finished_data());
        self.builder.reset();
    }
}

/// The pause before a retry, microseconds; 0 = any time, or never.
pub(crate) const fn retry_after_us(kind: Kind) -> u32 {
    match kind {
        // Bookings and slots are freed at the rate at which requests end.
        Kind::TooManyBookings | Kind::Overloaded | Kind::PinnedBusy | Kind::AllBusy => 10_000,
        // Workers return as fast as their publishers connect.
        Kind::NobodyAvailable => 100_000,
        // After a restart, the next daemon runs by then.
        Kind::Draining => 1_000_000,
        _ => 0,
    }
}

fn cut(text: &str) -> &str {
    &text[..text.floor_char_boundary(ERROR_TEXT_BYTES_MAX)]
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
