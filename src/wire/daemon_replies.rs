//! Replies that the daemon encodes from its own tables: decisions, overlaps, outcomes of bookings, and the fleet.

use fb::{OverlapEntry, OverlapReply, Removal};
use flatbuffers::WIPOffset;

use super::candidates::{CANDIDATE_BYTES, Candidates};
use super::encode_reply::{Builder, ReplyEncoder, retry_after_us};
use super::frame_composer::{FrameWriter, Layout, PADDING, REFERENCE, element};
use super::header::FrameKind;
use super::message::{ServerLimits, WatchCursor};
use super::schema_conversions::{
    device_to_wire, match_to_wire, mode_to_wire, other_to_wire, outcome_to_wire, role_to_wire, scheme_args,
    state_to_wire, tiers_to_wire, trust_to_wire, worker_to_wire,
};
use crate::fleet::{FleetTable, Space, WorkerRecord};
use crate::ids::{CorrelationId, SpaceId};
use crate::limits::{REPLY_BYTES_PER_QUANTUM_MAX, WORKERS_PAGE_MAX};
use crate::protocol::{BookingHandle, BookingOutcome};
use crate::route::{Decision, Rule};
use crate::schema_generated::routing as fb;

const ROUTE_REPLY: Layout<104, 38> = Layout::of(&[
    (fb::RouteReply::VT_CANDIDATES, REFERENCE),
    (fb::RouteReply::VT_ELIGIBLE, 4),
    (fb::RouteReply::VT_REQUEST_BLOCKS, 4),
    (fb::RouteReply::VT_NOTES, 8),
    (fb::RouteReply::VT_POLICY_VERSION, 8),
    (fb::RouteReply::VT_FLEET_VERSION, 8),
    (fb::RouteReply::VT_INDEX_EPOCH, 8),
    (fb::RouteReply::VT_BOOKING, 16),
    (fb::RouteReply::VT_PREFILL_BOOKING, 16),
    (fb::RouteReply::VT_REMOVED, REFERENCE),
    (fb::RouteReply::VT_PREFILL, REFERENCE),
    (fb::RouteReply::VT_TIES, 4),
    (fb::RouteReply::VT_RETRY_AFTER_US, 4),
    (fb::RouteReply::VT_NOBODY, 2),
    (fb::RouteReply::VT_MATCH_, 1),
    (fb::RouteReply::VT_MODE, 1),
    (fb::RouteReply::VT_OTHERS, REFERENCE),
]);

const REMOVAL: Layout<12, 8> = Layout::of(&[(Removal::VT_RULE, REFERENCE), (Removal::VT_WORKERS, REFERENCE)]);

const OVERLAP_REPLY: Layout<24, 12> = Layout::of(&[
    (OverlapReply::VT_WORKERS, REFERENCE),
    (OverlapReply::VT_NOTES, 8),
    (OverlapReply::VT_REQUEST_BLOCKS, 4),
    (OverlapReply::VT_MATCH_, 1),
    (PADDING, 3),
]);

const OVERLAP_ENTRY: Layout<72, 12> = Layout::of(&[
    (OverlapEntry::VT_DP_RANK, 4),
    (OverlapEntry::VT_WORKER_ID, 8),
    (OverlapEntry::VT_OVERLAP, 16),
    (OverlapEntry::VT_TRUST, 40),
]);

/// The outcome of a report about a booking: four tables with the same fields.
const OUTCOME: Layout<16, 8> =
    Layout::of(&[(fb::FreeReply::VT_OUTCOME, 1), (PADDING, 3), (fb::FreeReply::VT_INSTANCE_ID, 8)]);
const _: () = {
    use fb::{FreeReply as F, OutputProgressReply as O, PrefillCompleteReply as P, ServedReply as S};
    let outcome = F::VT_OUTCOME;
    assert!(P::VT_OUTCOME == outcome && O::VT_OUTCOME == outcome && S::VT_OUTCOME == outcome);
    let instance = F::VT_INSTANCE_ID;
    assert!(P::VT_INSTANCE_ID == instance && O::VT_INSTANCE_ID == instance && S::VT_INSTANCE_ID == instance);
};

/// Bytes reserved for a reply: more than most take.
const REPLY_BYTES: usize = 256;

impl ReplyEncoder {
    /// Answers a route with `decision`; `fleet` names the candidates. Of all tables that one encoder gets, those of one
    /// version are equal.
    pub fn route(
        &mut self,
        id: CorrelationId,
        decision: &Decision,
        explain: bool,
        fleet: &FleetTable,
        out: &mut Vec<u8>,
    ) {
        let prefill = decision.prefill.as_deref();
        let lists_removed = explain || decision.candidates.is_empty();
        let handle = |handle: BookingHandle| fb::BookingHandle::new(handle.slot, handle.generation).0;
        let mut reply = ROUTE_REPLY.blank();
        reply.set(fb::RouteReply::VT_ELIGIBLE, decision.eligible.to_le_bytes());
        reply.set(fb::RouteReply::VT_MATCH_, [match_to_wire(decision.matched).0]);
        reply.set(fb::RouteReply::VT_NOTES, decision.notes.0.to_le_bytes());
        reply.set(fb::RouteReply::VT_REQUEST_BLOCKS, decision.request_blocks.to_le_bytes());
        reply.set(fb::RouteReply::VT_POLICY_VERSION, decision.policy_version.to_le_bytes());
        reply.set(fb::RouteReply::VT_FLEET_VERSION, decision.fleet_version.to_le_bytes());
        reply.set(fb::RouteReply::VT_INDEX_EPOCH, decision.index_epoch.to_le_bytes());
        reply.set_if(fb::RouteReply::VT_BOOKING, decision.booking.map(handle));
        reply.leave_out(fb::RouteReply::VT_REMOVED, !lists_removed);
        reply.set(fb::RouteReply::VT_TIES, decision.ties.to_le_bytes());
        let (no_worker_code, retry_after_us) =
            decision.no_worker.map_or((0, 0), |kind| (kind as u16, retry_after_us(kind)));
        reply.set(fb::RouteReply::VT_NOBODY, no_worker_code.to_le_bytes());
        reply.set(fb::RouteReply::VT_RETRY_AFTER_US, retry_after_us.to_le_bytes());
        reply.set(fb::RouteReply::VT_MODE, [mode_to_wire(decision.mode).0]);
        reply.leave_out(fb::RouteReply::VT_PREFILL, prefill.is_none());
        reply.leave_out(fb::RouteReply::VT_OTHERS, decision.others.is_empty());
        reply.set_if(fb::RouteReply::VT_PREFILL_BOOKING, prefill.and_then(|prefill| prefill.booking).map(handle));

        let listed = decision.candidates.len() + prefill.map_or(0, |prefill| prefill.candidates.len());
        let bytes = REPLY_BYTES + listed * CANDIDATE_BYTES;
        let mut frame = FrameWriter::begin(out, FrameKind::RouteReply, id, bytes);
        let root = frame.table(reply);
        let mut candidates = Candidates::begin(&mut frame, explain, (fleet, &mut self.candidates));
        let place = candidates.write(&decision.candidates);
        let prefill = prefill.map(|prefill| candidates.write(&prefill.candidates));
        frame.refer_field((&ROUTE_REPLY, root), fb::RouteReply::VT_CANDIDATES, place);
        if let Some(place) = prefill {
            frame.refer_field((&ROUTE_REPLY, root), fb::RouteReply::VT_PREFILL, place);
        }
        if lists_removed {
            let place = write_removed(&mut frame, decision);
            frame.refer_field((&ROUTE_REPLY, root), fb::RouteReply::VT_REMOVED, place);
        }
        if !decision.others.is_empty() {
            let place = frame.begin_vector(decision.others.len(), 8);
            decision.others.iter().for_each(|other| frame.bytes(&other_to_wire(other).0));
            frame.refer_field((&ROUTE_REPLY, root), fb::RouteReply::VT_OTHERS, place);
        }
        frame.end(root);
    }

    /// Answers an overlap with the overlaps of `decision`'s candidates.
    pub fn overlap(&mut self, id: CorrelationId, decision: &Decision, out: &mut Vec<u8>) {
        let mut reply = OVERLAP_REPLY.blank();
        reply.set(OverlapReply::VT_MATCH_, [match_to_wire(decision.matched).0]);
        reply.set(OverlapReply::VT_REQUEST_BLOCKS, decision.request_blocks.to_le_bytes());
        reply.set(OverlapReply::VT_NOTES, decision.notes.0.to_le_bytes());
        let bytes = REPLY_BYTES + decision.candidates.len() * CANDIDATE_BYTES;
        let mut frame = FrameWriter::begin(out, FrameKind::OverlapReply, id, bytes);
        let root = frame.table(reply);
        let layout = frame.vtable(OVERLAP_ENTRY.vtable_bytes());
        let workers = frame.references(decision.candidates.len());
        for (n, scored) in decision.candidates.iter().enumerate() {
            let mut entry = OVERLAP_ENTRY.blank();
            entry.set(OverlapEntry::VT_WORKER_ID, scored.worker.id.0.to_le_bytes());
            entry.set(OverlapEntry::VT_DP_RANK, scored.worker.rank.0.to_le_bytes());
            entry.set(OverlapEntry::VT_OVERLAP, tiers_to_wire(scored.overlap).0);
            entry.set(OverlapEntry::VT_TRUST, trust_to_wire(scored.trust).0);
            let place = frame.table_with_vtable(layout, &mut entry);
            frame.refer(element(workers, n), place);
        }
        frame.refer_field((&OVERLAP_REPLY, root), OverlapReply::VT_WORKERS, workers);
        frame.end(root);
    }

    /// Answers a prefill-complete.
    pub fn prefill_complete(
        &mut self,
        id: CorrelationId,
        outcome: BookingOutcome,
        instance_id: u64,
        out: &mut Vec<u8>,
    ) {
        write_outcome(FrameKind::PrefillCompleteReply, id, (outcome, instance_id), out);
    }

    /// Answers a free.
    pub fn free(&mut self, id: CorrelationId, outcome: BookingOutcome, instance_id: u64, out: &mut Vec<u8>) {
        write_outcome(FrameKind::FreeReply, id, (outcome, instance_id), out);
    }

    /// Answers an output-progress.
    pub fn output_progress(&mut self, id: CorrelationId, outcome: BookingOutcome, instance_id: u64, out: &mut Vec<u8>) {
        write_outcome(FrameKind::OutputProgressReply, id, (outcome, instance_id), out);
    }

    /// Answers a served.
    pub fn served(&mut self, id: CorrelationId, outcome: BookingOutcome, instance_id: u64, out: &mut Vec<u8>) {
        write_outcome(FrameKind::ServedReply, id, (outcome, instance_id), out);
    }

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

    /// Answers a watch with a page of a space, or of the fleet. The page begins at the worker in place `from.place` or after it,
    /// and has the version of `from`. Without a limit it has all workers. Returns the cursor of the next page.
    pub fn watch(
        &mut self,
        id: CorrelationId,
        (fleet, space): (&FleetTable, Option<SpaceId>),
        (from, limit): (WatchCursor, Option<usize>),
        out: &mut Vec<u8>,
    ) -> Option<WatchCursor> {
        let builder = &mut self.builder;
        let is_watched = |record: &WorkerRecord| space.is_none_or(|space| record.space == space);
        let (mut page, mut next) = (Vec::new(), None);
        let first = fleet.workers.partition_point(|record| record.index.place() < from.place);
        for record in fleet.workers[first..].iter().filter(|record| is_watched(record)) {
            // Names, labels and adapters may be long, so a page is bounded by bytes too.
            let is_full = |limit| page.len() >= limit || builder.unfinished_data().len() >= REPLY_BYTES_PER_QUANTUM_MAX;
            if !page.is_empty() && limit.is_some_and(is_full) {
                next = Some(WatchCursor { place: record.index.place(), ..from });
                break;
            }
            page.push(encode_worker(builder, record));
        }
        let workers = Some(builder.create_vector(&page));
        let next_cursor = next.map_or(0, |next| next.place as u32);
        let args = fb::WatchReplyArgs { workers, fleet_version: from.fleet_version, next_cursor };
        let root = fb::WatchReply::create(builder, &args);
        self.finish(FrameKind::WatchReply, id, root, out);
        next
    }
}

fn write_outcome(kind: FrameKind, id: CorrelationId, (outcome, instance_id): (BookingOutcome, u64), out: &mut Vec<u8>) {
    let mut reply = OUTCOME.blank();
    reply.set(fb::FreeReply::VT_OUTCOME, [outcome_to_wire(outcome).0]);
    reply.set(fb::FreeReply::VT_INSTANCE_ID, instance_id.to_le_bytes());
    let mut frame = FrameWriter::begin(out, kind, id, REPLY_BYTES);
    let root = frame.table(reply);
    frame.end(root);
}

/// Writes one entry for each rule that excluded workers, in the rules' order. Returns the vector's place.
fn write_removed(frame: &mut FrameWriter<'_>, decision: &Decision) -> usize {
    let removed_by = |rule: Rule| decision.removed.iter().filter(move |(by, _)| *by == rule).map(|(_, worker)| *worker);
    let rules = || Rule::ALL.iter().copied().filter(|rule| removed_by(*rule).next().is_some());
    let layout = frame.vtable(REMOVAL.vtable_bytes());
    let vector = frame.references(rules().count());
    for (n, rule) in rules().enumerate() {
        let place = frame.table_with_vtable(layout, &mut REMOVAL.blank());
        frame.refer(element(vector, n), place);
        let name = frame.string(rule.name());
        frame.refer_field((&REMOVAL, place), Removal::VT_RULE, name);
        let workers = frame.begin_vector(removed_by(rule).count(), 8);
        removed_by(rule).for_each(|worker| frame.bytes(&worker_to_wire(worker).0));
        frame.refer_field((&REMOVAL, place), Removal::VT_WORKERS, workers);
    }
    vector
}

/// The contents of a hello reply, without the spaces.
#[derive(Clone, Copy, Debug)]
pub struct HelloFacts<'a> {
    /// The protocol version of the connection.
    pub version: u16,
    /// A number that the daemon draws when it starts.
    pub instance_id: u64,
    /// The daemon's limits.
    pub limits: ServerLimits,
    /// The features that the daemon serves: bits of [`features`](super::features).
    pub features: u64,
    /// The path of the admin socket.
    pub admin_socket: Option<&'a str>,
}

fn encode_space(builder: &mut Builder, space: &Space) -> WIPOffset<fb::Space<'static>> {
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

fn encode_worker(builder: &mut Builder, record: &WorkerRecord) -> WIPOffset<fb::WorkerInfo<'static>> {
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
