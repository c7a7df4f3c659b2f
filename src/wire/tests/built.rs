//! The frequent replies as flatbuffers' builder makes them. Tests compare those that are written in one pass with these.

use flatbuffers::{ForwardsUOffset, Vector, WIPOffset};

use super::*;
use crate::wire::encode_reply::retry_after_us;
use crate::wire::schema_conversions::{
    match_to_wire, mode_to_wire, other_to_wire, outcome_to_wire, state_to_wire, terms_args, tiers_to_wire,
    trust_to_wire, worker_to_wire,
};

type Builder = FlatBufferBuilder<'static>;
type Tables<T> = WIPOffset<Vector<'static, ForwardsUOffset<T>>>;

fn finished<T>(mut builder: Builder, root: WIPOffset<T>) -> Vec<u8> {
    builder.finish(root, Some(FRAME_IDENTIFIER));
    builder.finished_data().to_vec()
}

/// The body that answers a route.
pub(super) fn route(decision: &Decision, explain: bool, fleet: &FleetTable) -> Vec<u8> {
    let mut builder = Builder::new();
    let candidates = candidates(&mut builder, decision, explain, fleet);
    let prefill = decision.prefill.as_deref();
    let prefill_candidates = prefill.map(|prefill| self::candidates(&mut builder, prefill, explain, fleet));
    let removed = (explain || decision.candidates.is_empty()).then(|| removed(&mut builder, decision));
    let others: Vec<_> = decision.others.iter().map(other_to_wire).collect();
    let others = (!others.is_empty()).then(|| builder.create_vector(&others));
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
        nobody: decision.no_worker.map_or(0, |kind| kind as u16),
        retry_after_us: decision.no_worker.map_or(0, retry_after_us),
        mode: mode_to_wire(decision.mode),
        prefill: prefill_candidates,
        prefill_booking: prefill_booking.as_ref(),
        others,
    };
    let root = fb::RouteReply::create(&mut builder, &args);
    finished(builder, root)
}

fn candidates(
    builder: &mut Builder,
    decision: &Decision,
    explain: bool,
    fleet: &FleetTable,
) -> Tables<fb::Candidate<'static>> {
    let candidate = |scored: &Scored| {
        let name = fleet.worker(scored.index).map(|record| builder.create_string(&record.name));
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
    };
    let candidates: Vec<_> = decision.candidates.iter().map(candidate).collect();
    builder.create_vector(&candidates)
}

fn removed(builder: &mut Builder, decision: &Decision) -> Tables<fb::Removal<'static>> {
    let mut removals = Vec::new();
    for rule in Rule::ALL {
        let removed = decision.removed.iter().filter(|(by, _)| by == rule);
        let workers: Vec<_> = removed.map(|(_, worker)| worker_to_wire(*worker)).collect();
        if workers.is_empty() {
            continue;
        }
        let workers = builder.create_vector(&workers);
        let name = builder.create_string(rule.name());
        let args = fb::RemovalArgs { rule: Some(name), workers: Some(workers) };
        removals.push(fb::Removal::create(builder, &args));
    }
    builder.create_vector(&removals)
}

/// The body that answers an overlap.
pub(super) fn overlap(decision: &Decision) -> Vec<u8> {
    let mut builder = Builder::new();
    let entry = |scored: &Scored| {
        let args = fb::OverlapEntryArgs {
            worker_id: scored.worker.id.0,
            dp_rank: scored.worker.rank.0,
            overlap: Some(&tiers_to_wire(scored.overlap)),
            trust: Some(&trust_to_wire(scored.trust)),
        };
        fb::OverlapEntry::create(&mut builder, &args)
    };
    let entries: Vec<_> = decision.candidates.iter().map(entry).collect();
    let workers = builder.create_vector(&entries);
    let args = fb::OverlapReplyArgs {
        workers: Some(workers),
        match_: match_to_wire(decision.matched),
        request_blocks: decision.request_blocks,
        notes: decision.notes.0,
    };
    let root = fb::OverlapReply::create(&mut builder, &args);
    finished(builder, root)
}

/// The body that says what became of a booking.
pub(super) fn outcome(outcome: BookingOutcome, instance_id: u64) -> Vec<u8> {
    let mut builder = Builder::new();
    let args = fb::FreeReplyArgs { outcome: outcome_to_wire(outcome), instance_id };
    let root = fb::FreeReply::create(&mut builder, &args);
    finished(builder, root)
}
