//! The replies that gateways wait for most: decisions, overlaps, and what became of a booking.

use super::compose::{FrameWriter, Layout, PADDING, REFERENCE, element};
use super::convert::{
    COST_TERMS, match_to_wire, mode_to_wire, outcome_to_wire, state_to_wire, terms_to_wire, tiers_to_wire,
    trust_to_wire, worker_to_wire,
};
use super::encode_reply::{ReplyEncoder, retry_after_us};
use super::header::FrameKind;
use crate::fleet::FleetTable;
use crate::ids::CorrelationId;
use crate::protocol::{BookingHandle, BookingOutcome};
use crate::route::{Decision, Rule, Scored};
use crate::schema_generated::routing as fb;

use fb::{Candidate, OverlapEntry, OverlapReply, Removal};

const ROUTE_REPLY: Layout<104, 36> = Layout::of(&[
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
    (PADDING, 4),
]);

const CANDIDATE: Layout<96, 20> = Layout::of(&[
    (Candidate::VT_DP_RANK, 4),
    (Candidate::VT_WORKER_ID, 8),
    (Candidate::VT_COST, 8),
    (Candidate::VT_OVERLAP, 16),
    (Candidate::VT_TRUST, 40),
    (Candidate::VT_NAME, REFERENCE),
    (Candidate::VT_TERMS, REFERENCE),
    (Candidate::VT_STATE, 1),
    (PADDING, 7),
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

/// What became of a booking: four tables that are alike.
const OUTCOME: Layout<16, 8> =
    Layout::of(&[(fb::FreeReply::VT_OUTCOME, 1), (PADDING, 3), (fb::FreeReply::VT_INSTANCE_ID, 8)]);
const _: () = {
    use fb::{FreeReply as F, OutputProgressReply as O, PrefillCompleteReply as P, ServedReply as S};
    let outcome = F::VT_OUTCOME;
    assert!(P::VT_OUTCOME == outcome && O::VT_OUTCOME == outcome && S::VT_OUTCOME == outcome);
    let instance = F::VT_INSTANCE_ID;
    assert!(P::VT_INSTANCE_ID == instance && O::VT_INSTANCE_ID == instance && S::VT_INSTANCE_ID == instance);
};

/// What is reserved for a reply, bytes: more than most take.
const REPLY_BYTES: usize = 256;
/// And for each candidate, its name included.
const CANDIDATE_BYTES: usize = 160;

impl ReplyEncoder {
    /// Answers a route with `decision`; `fleet` names the candidates.
    pub fn route(
        &mut self,
        id: CorrelationId,
        decision: &Decision,
        explain: bool,
        fleet: &FleetTable,
        out: &mut Vec<u8>,
    ) {
        let prefill = decision.prefill.as_deref();
        let is_removed_told = explain || decision.candidates.is_empty();
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
        reply.leave_out(fb::RouteReply::VT_REMOVED, !is_removed_told);
        reply.set(fb::RouteReply::VT_TIES, decision.ties.to_le_bytes());
        let (nobody, retry_after_us) = decision.no_worker.map_or((0, 0), |kind| (kind as u16, retry_after_us(kind)));
        reply.set(fb::RouteReply::VT_NOBODY, nobody.to_le_bytes());
        reply.set(fb::RouteReply::VT_RETRY_AFTER_US, retry_after_us.to_le_bytes());
        reply.set(fb::RouteReply::VT_MODE, [mode_to_wire(decision.mode).0]);
        reply.leave_out(fb::RouteReply::VT_PREFILL, prefill.is_none());
        reply.set_if(fb::RouteReply::VT_PREFILL_BOOKING, prefill.and_then(|prefill| prefill.booking).map(handle));

        let listed = decision.candidates.len() + prefill.map_or(0, |prefill| prefill.candidates.len());
        let bytes = REPLY_BYTES + listed * CANDIDATE_BYTES;
        let mut frame = FrameWriter::begin(out, FrameKind::RouteReply, id, bytes);
        let root = frame.table(reply);
        let mut candidates = Candidates::begin(&mut frame, explain, fleet);
        let place = candidates.write(&decision.candidates);
        let prefill = prefill.map(|prefill| candidates.write(&prefill.candidates));
        frame.refer_field((&ROUTE_REPLY, root), fb::RouteReply::VT_CANDIDATES, place);
        if let Some(place) = prefill {
            frame.refer_field((&ROUTE_REPLY, root), fb::RouteReply::VT_PREFILL, place);
        }
        if is_removed_told {
            let place = write_removed(&mut frame, decision);
            frame.refer_field((&ROUTE_REPLY, root), fb::RouteReply::VT_REMOVED, place);
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
        let layout = frame.vtable(OVERLAP_ENTRY.told());
        let workers = frame.references(decision.candidates.len());
        for (n, scored) in decision.candidates.iter().enumerate() {
            let mut entry = OVERLAP_ENTRY.blank();
            entry.set(OverlapEntry::VT_WORKER_ID, scored.worker.id.0.to_le_bytes());
            entry.set(OverlapEntry::VT_DP_RANK, scored.worker.rank.0.to_le_bytes());
            entry.set(OverlapEntry::VT_OVERLAP, tiers_to_wire(scored.overlap).0);
            entry.set(OverlapEntry::VT_TRUST, trust_to_wire(scored.trust).0);
            let place = frame.table_told_at(layout, entry);
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
}

fn write_outcome(kind: FrameKind, id: CorrelationId, (outcome, instance_id): (BookingOutcome, u64), out: &mut Vec<u8>) {
    let mut reply = OUTCOME.blank();
    reply.set(fb::FreeReply::VT_OUTCOME, [outcome_to_wire(outcome).0]);
    reply.set(fb::FreeReply::VT_INSTANCE_ID, instance_id.to_le_bytes());
    let mut frame = FrameWriter::begin(out, kind, id, REPLY_BYTES);
    let root = frame.table(reply);
    frame.end(root);
}

/// Writes candidates; what tells of their tables is written once for all of them.
struct Candidates<'f, 'o> {
    frame: &'f mut FrameWriter<'o>,
    fleet: &'f FleetTable,
    layout: usize,
    /// What tells of the tables of their terms, where they are explained.
    terms_layout: Option<usize>,
}

impl<'f, 'o> Candidates<'f, 'o> {
    fn begin(frame: &'f mut FrameWriter<'o>, explain: bool, fleet: &'f FleetTable) -> Self {
        let mut candidate = CANDIDATE.blank();
        candidate.leave_out(Candidate::VT_TERMS, !explain);
        let layout = frame.vtable(candidate.told());
        let terms_layout = explain.then(|| frame.vtable(COST_TERMS.told()));
        Self { frame, fleet, layout, terms_layout }
    }

    /// Writes a vector of them, each with its terms and its name behind it. Returns its place.
    fn write(&mut self, listed: &[Scored]) -> usize {
        let vector = self.frame.references(listed.len());
        for (n, scored) in listed.iter().enumerate() {
            let name = self.fleet.worker(scored.index).map(|record| record.name.as_str());
            let place = self.write_one(scored, name);
            self.frame.refer(element(vector, n), place);
        }
        vector
    }

    fn write_one(&mut self, scored: &Scored, name: Option<&str>) -> usize {
        let frame = &mut *self.frame;
        let mut candidate = CANDIDATE.blank();
        candidate.set(Candidate::VT_WORKER_ID, scored.worker.id.0.to_le_bytes());
        candidate.set(Candidate::VT_DP_RANK, scored.worker.rank.0.to_le_bytes());
        candidate.set(Candidate::VT_OVERLAP, tiers_to_wire(scored.overlap).0);
        candidate.set(Candidate::VT_TRUST, trust_to_wire(scored.trust).0);
        candidate.set(Candidate::VT_COST, scored.terms.cost.to_le_bytes());
        candidate.set(Candidate::VT_STATE, [state_to_wire(scored.state).0]);
        let place = if name.is_some() {
            frame.table_told_at(self.layout, candidate)
        } else {
            // Who has just left has no name, and a layout of its own.
            candidate.leave_out(Candidate::VT_NAME, true);
            candidate.leave_out(Candidate::VT_TERMS, self.terms_layout.is_none());
            frame.table(candidate)
        };
        if let Some(layout) = self.terms_layout {
            let terms = frame.table_told_at(layout, terms_to_wire(&scored.terms));
            frame.refer_field((&CANDIDATE, place), Candidate::VT_TERMS, terms);
        }
        if let Some(name) = name {
            let name = frame.string(name);
            frame.refer_field((&CANDIDATE, place), Candidate::VT_NAME, name);
        }
        place
    }
}

/// One entry per rule that removed somebody, in the rules' order. Returns the vector's place.
fn write_removed(frame: &mut FrameWriter<'_>, decision: &Decision) -> usize {
    let removed_by = |rule: Rule| decision.removed.iter().filter(move |(by, _)| *by == rule).map(|(_, worker)| *worker);
    let rules = || Rule::ALL.iter().copied().filter(|rule| removed_by(*rule).next().is_some());
    let layout = frame.vtable(REMOVAL.told());
    let vector = frame.references(rules().count());
    for (n, rule) in rules().enumerate() {
        let place = frame.table_told_at(layout, REMOVAL.blank());
        frame.refer(element(vector, n), place);
        let name = frame.string(rule.name());
        frame.refer_field((&REMOVAL, place), Removal::VT_RULE, name);
        let workers = frame.begin_vector(removed_by(rule).count(), 8);
        removed_by(rule).for_each(|worker| frame.bytes(&worker_to_wire(worker).0));
        frame.refer_field((&REMOVAL, place), Removal::VT_WORKERS, workers);
    }
    vector
}
