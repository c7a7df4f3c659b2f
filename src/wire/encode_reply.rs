//! The daemon's frames, built in one reused buffer and appended to whatever is to be written.

use flatbuffers::{FlatBufferBuilder, WIPOffset};

use super::convert::{
    device_to_wire, match_to_wire, mode_to_wire, outcome_to_wire, role_to_wire, scheme_args, side_to_wire,
    state_to_wire, terms_args, tiers_to_wire, trust_to_wire, worker_to_wire,
};
use super::header::{FRAME_IDENTIFIER, FrameKind, append_frame};
use super::message::{ResetDone, ServerLimits, SourceStatus, StatusPage, WorkerStatus};
use super::policy::PolicyDone;
use crate::error::{Error, Kind};
use crate::finding::Finding;
use crate::fleet::{FleetTable, WorkerRecord};
use crate::ids::{CorrelationId, SpaceId, TierBlocks};
use crate::limits::{ERROR_TEXT_BYTES_MAX, WORKERS_PAGE_MAX};
use crate::load::{BookingHandle, BookingOutcome};
use crate::route::{Decision, Rule, Scored};
use crate::schema_generated::routing as fb;

type Builder = FlatBufferBuilder<'static>;
type Candidates = WIPOffset<flatbuffers::Vector<'static, flatbuffers::ForwardsUOffset<fb::Candidate<'static>>>>;

/// What a hello reply says besides the spaces.
#[derive(Clone, Copy, Debug)]
pub struct HelloFacts<'a> {
    /// The version both speak.
    pub version: u16,
    /// Drawn when the daemon started.
    pub instance_id: u64,
    /// The daemon's bounds.
    pub limits: ServerLimits,
    /// What the daemon serves: bits of [`features`](super::features).
    pub features: u64,
    /// Where status is answered.
    pub admin_socket: Option<&'a str>,
}

/// Encodes replies. Everything it needs is kept from one reply to the next: once warm it allocates only
/// when `out` must grow.
#[derive(Default)]
pub struct ReplyEncoder {
    pub(super) builder: Builder,
    candidates: Vec<WIPOffset<fb::Candidate<'static>>>,
    entries: Vec<WIPOffset<fb::OverlapEntry<'static>>>,
    pub(super) loads: Vec<WIPOffset<fb::PotentialLoad<'static>>>,
    removals: Vec<WIPOffset<fb::Removal<'static>>>,
    workers: Vec<fb::WorkerRef>,
}

impl std::fmt::Debug for ReplyEncoder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ReplyEncoder").finish_non_exhaustive()
    }
}

impl ReplyEncoder {
    /// Answers hello with `facts` and the spaces of `fleet`.
    pub fn hello(&mut self, id: CorrelationId, facts: &HelloFacts<'_>, fleet: &FleetTable, out: &mut Vec<u8>) {
        let builder = &mut self.builder;
        let spaces: Vec<_> = fleet.spaces.iter().map(|space| encode_space(builder, space)).collect();
        let spaces = builder.create_vector(&spaces);
        let limits = facts.limits;
        let limits = fb::Limits::create(
            builder,
            &fb::LimitsArgs {
                frame_body_bytes_max: limits.frame_body_bytes_max,
                prompt_tokens_max: limits.prompt_tokens_max,
                candidates_max: limits.candidates_max,
                workers_page_max: limits.workers_page_max,
                bookings_per_session_max: limits.bookings_per_session_max,
            },
        );
        let admin_socket = facts.admin_socket.map(|path| builder.create_string(path));
        let args = fb::HelloReplyArgs {
            version: facts.version,
            instance_id: facts.instance_id,
            limits: Some(limits),
            features: facts.features,
            spaces: Some(spaces),
            admin_socket,
        };
        let root = fb::HelloReply::create(builder, &args);
        self.finish(FrameKind::HelloReply, id, root, out);
    }

    /// Answers a route with `decision`; `fleet` names the candidates.
    pub fn route(
        &mut self,
        id: CorrelationId,
        decision: &Decision,
        explain: bool,
        fleet: &FleetTable,
        out: &mut Vec<u8>,
    ) {
        let candidates = self.encode_candidates(decision, explain, fleet);
        let prefill = decision.prefill.as_deref();
        let prefill_candidates = prefill.map(|prefill| self.encode_candidates(prefill, explain, fleet));
        let removed = (explain || decision.candidates.is_empty()).then(|| self.encode_removed(decision));
        let builder = &mut self.builder;
        let handle = |handle: BookingHandle| fb::BookingHandle::new(handle.slot, handle.generation);
        let booking = decision.booking.map(handle);
        let prefill_booking = prefill.and_then(|prefill| prefill.booking).map(handle);
        let args = fb::RouteReplyArgs {
            candidates: Some(candidates),
            eligible: decision.eligible,
            match_: match_to_wire(decision.matched),
            notes: decision.notes.0,
            request_blocks: decision.request_blocks,
            policy_version: decision.policy_version,
            fleet_version: decision.fleet_version,
            index_epoch: decision.index_epoch,
            booking: booking.as_ref(),
            removed,
            ties: decision.ties,
            nobody: decision.nobody.map_or(0, |kind| kind as u16),
            retry_after_us: decision.nobody.map_or(0, retry_after_us),
            mode: mode_to_wire(decision.mode),
            prefill: prefill_candidates,
            prefill_booking: prefill_booking.as_ref(),
        };
        let root = fb::RouteReply::create(builder, &args);
        self.finish(FrameKind::RouteReply, id, root, out);
    }

    fn encode_candidates(&mut self, decision: &Decision, explain: bool, fleet: &FleetTable) -> Candidates {
        self.candidates.clear();
        for scored in &decision.candidates {
            let name = fleet.worker(scored.index).map(|record| record.name.as_str());
            let candidate = encode_candidate(&mut self.builder, scored, name, explain);
            self.candidates.push(candidate);
        }
        self.builder.create_vector(&self.candidates)
    }

    /// One entry per rule that removed somebody, in the rules' order.
    fn encode_removed(
        &mut self,
        decision: &Decision,
    ) -> WIPOffset<flatbuffers::Vector<'static, flatbuffers::ForwardsUOffset<fb::Removal<'static>>>> {
        self.removals.clear();
        for rule in Rule::ALL {
            self.workers.clear();
            let removed = decision.removed.iter().filter(|(by, _)| by == rule);
            self.workers.extend(removed.map(|(_, worker)| worker_to_wire(*worker)));
            if self.workers.is_empty() {
                continue;
            }
            let workers = self.builder.create_vector(&self.workers);
            let name = self.builder.create_string(rule.name());
            let args = fb::RemovalArgs { rule: Some(name), workers: Some(workers) };
            self.removals.push(fb::Removal::create(&mut self.builder, &args));
        }
        self.builder.create_vector(&self.removals)
    }

    /// Answers a prefill-complete.
    pub fn prefill_complete(
        &mut self,
        id: CorrelationId,
        outcome: BookingOutcome,
        instance_id: u64,
        out: &mut Vec<u8>,
    ) {
        let args = fb::PrefillCompleteReplyArgs { outcome: outcome_to_wire(outcome), instance_id };
        let root = fb::PrefillCompleteReply::create(&mut self.builder, &args);
        self.finish(FrameKind::PrefillCompleteReply, id, root, out);
    }

    /// Answers a free.
    pub fn free(&mut self, id: CorrelationId, outcome: BookingOutcome, instance_id: u64, out: &mut Vec<u8>) {
        let args = fb::FreeReplyArgs { outcome: outcome_to_wire(outcome), instance_id };
        let root = fb::FreeReply::create(&mut self.builder, &args);
        self.finish(FrameKind::FreeReply, id, root, out);
    }

    /// Answers an overlap with the overlaps of `decision`'s candidates.
    pub fn overlap(&mut self, id: CorrelationId, decision: &Decision, out: &mut Vec<u8>) {
        let builder = &mut self.builder;
        self.entries.clear();
        for scored in &decision.candidates {
            let args = fb::OverlapEntryArgs {
                worker_id: scored.worker.id.0,
                dp_rank: scored.worker.rank.0,
                overlap: Some(&tiers_to_wire(scored.overlap)),
                trust: Some(&trust_to_wire(scored.trust)),
            };
            self.entries.push(fb::OverlapEntry::create(builder, &args));
        }
        let workers = builder.create_vector(&self.entries);
        let args = fb::OverlapReplyArgs {
            workers: Some(workers),
            match_: match_to_wire(decision.matched),
            request_blocks: decision.request_blocks,
            notes: decision.notes.0,
        };
        let root = fb::OverlapReply::create(builder, &args);
        self.finish(FrameKind::OverlapReply, id, root, out);
    }

    /// Answers a workers request with the page of `fleet` that starts at `cursor`.
    pub fn workers(
        &mut self,
        id: CorrelationId,
        fleet: &FleetTable,
        space: Option<SpaceId>,
        (cursor, limit): (u32, u32),
        out: &mut Vec<u8>,
    ) {
        let builder = &mut self.builder;
        let limit = if limit == 0 { WORKERS_PAGE_MAX } else { (limit as usize).min(WORKERS_PAGE_MAX) };
        let from = fleet.workers.partition_point(|record| record.index.place() < cursor as usize);
        let rest = &fleet.workers[from..];
        let mut listed = rest.iter().filter(|record| space.is_none_or(|space| record.space == space));
        let page: Vec<_> = listed.by_ref().take(limit).map(|record| encode_worker(builder, record)).collect();
        let next_cursor = listed.next().map_or(0, |record| record.index.place() as u32);
        let workers = builder.create_vector(&page);
        let args = fb::WorkersReplyArgs { workers: Some(workers), next_cursor, fleet_version: fleet.version };
        let root = fb::WorkersReply::create(builder, &args);
        self.finish(FrameKind::WorkersReply, id, root, out);
    }

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

    /// Answers anything with an error.
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

/// When it makes sense to ask again, microseconds; 0 = at will or never.
const fn retry_after_us(kind: Kind) -> u32 {
    match kind {
        // Bookings and slots are given back at the rate requests end.
        Kind::TooManyBookings | Kind::Overloaded | Kind::PinnedBusy | Kind::AllBusy => 10_000,
        // Workers come back as fast as their publishers connect.
        Kind::NobodyAvailable => 100_000,
        // The next instance is up by then, or it is not a restart.
        Kind::Draining => 1_000_000,
        _ => 0,
    }
}

fn cut(text: &str) -> &str {
    &text[..text.floor_char_boundary(ERROR_TEXT_BYTES_MAX)]
}

fn encode_space(builder: &mut Builder, space: &crate::fleet::Space) -> WIPOffset<fb::Space<'static>> {
    let scheme = fb::Scheme::create(builder, &scheme_args(space.scheme.get()));
    let model = builder.create_string(&space.model);
    let namespace = builder.create_string(&space.namespace);
    let args = fb::SpaceArgs {
        space_id: space.id.0,
        model: Some(model),
        namespace: Some(namespace),
        role: role_to_wire(space.role),
        scheme: Some(scheme),
    };
    fb::Space::create(builder, &args)
}

fn encode_candidate(
    builder: &mut Builder,
    scored: &Scored,
    name: Option<&str>,
    explain: bool,
) -> WIPOffset<fb::Candidate<'static>> {
    let name = name.map(|name| builder.create_string(name));
    let terms = explain.then(|| fb::CostTerms::create(builder, &terms_args(&scored.terms)));
    let args = fb::CandidateArgs {
        worker_id: scored.worker.id.0,
        dp_rank: scored.worker.rank.0,
        name,
        overlap: Some(&tiers_to_wire(scored.overlap)),
        trust: Some(&trust_to_wire(scored.trust)),
        cost: scored.terms.cost,
        state: state_to_wire(scored.state),
        terms,
    };
    fb::Candidate::create(builder, &args)
}

pub(super) fn encode_worker(builder: &mut Builder, record: &WorkerRecord) -> WIPOffset<fb::WorkerInfo<'static>> {
    let name = builder.create_string(&record.name);
    let taints: Vec<_> = record.taints.iter().map(|taint| builder.create_string(taint)).collect();
    let taints = builder.create_vector(&taints);
    let args = fb::WorkerInfoArgs {
        worker_id: record.worker.id.0,
        dp_rank: record.worker.rank.0,
        space_id: record.space.0,
        name: Some(name),
        state: state_to_wire(record.state),
        device_class: device_to_wire(record.device_class),
        weight: record.weight,
        capacity_blocks: record.capacity_blocks,
        batched_tokens_max: record.batched_tokens_max,
        taints: Some(taints),
        trust: Some(&trust_to_wire(record.trust.load())),
    };
    fb::WorkerInfo::create(builder, &args)
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
