//! The gateway's reading of what answers a route.

use super::convert::{mode_from_wire, terms_from_wire, tiers_from_wire, trust_from_wire, worker_from_wire};
use super::message::{Candidate, RouteReply};
use super::reply::{matched, state};
use super::table::{Field, HotTable, Listed, TableReader, hot_tables};
use crate::error::Result;
use crate::ids::Worker;
use crate::protocol::{BookingHandle, ReplyNotes};
use crate::schema_generated::routing as fb;

hot_tables! {
    RouteReplySaid of RouteReply unless rare: VT_REMOVED {
        candidates: Listed<CandidateSaid<'a>> = VT_CANDIDATES or return None,
        eligible: u32 = VT_ELIGIBLE,
        match_: fb::MatchStatus = VT_MATCH_,
        notes: u64 = VT_NOTES,
        request_blocks: u32 = VT_REQUEST_BLOCKS,
        policy_version: u64 = VT_POLICY_VERSION,
        fleet_version: u64 = VT_FLEET_VERSION,
        index_epoch: u64 = VT_INDEX_EPOCH,
        booking: Option<fb::BookingHandle> = VT_BOOKING,
        ties: u32 = VT_TIES,
        nobody: u16 = VT_NOBODY,
        retry_after_us: u32 = VT_RETRY_AFTER_US,
        mode: fb::Mode = VT_MODE,
        prefill: Option<Listed<CandidateSaid<'a>>> = VT_PREFILL,
        prefill_booking: Option<fb::BookingHandle> = VT_PREFILL_BOOKING,
    }

    CandidateSaid of Candidate unless explained: VT_TERMS {
        worker_id: u64 = VT_WORKER_ID,
        dp_rank: u32 = VT_DP_RANK,
        name: Option<&'a str> = VT_NAME,
        overlap: Option<fb::TierBlocks> = VT_OVERLAP,
        trust: Option<fb::Trust> = VT_TRUST,
        cost: f64 = VT_COST,
        state: fb::WorkerState = VT_STATE,
    }
}

pub(super) fn route_reply(said: &RouteReplySaid<'_>) -> Result<RouteReply> {
    let removed = said.rare.and_then(|table| table.removed()).map(|removed| {
        let rule = |removal: fb::Removal<'_>| {
            (removal.rule().to_owned(), removal.workers().iter().map(worker_from_wire).collect::<Vec<_>>())
        };
        removed.iter().map(rule).collect()
    });
    let handle = |handle: fb::BookingHandle| BookingHandle { slot: handle.slot(), generation: handle.generation() };
    Ok(RouteReply {
        candidates: candidates(&said.candidates.0)?,
        eligible: said.eligible,
        ties: said.ties,
        matched: matched(said.match_)?,
        notes: ReplyNotes(said.notes),
        request_blocks: said.request_blocks,
        policy_version: said.policy_version,
        fleet_version: said.fleet_version,
        index_epoch: said.index_epoch,
        booking: said.booking.map(handle),
        removed: removed.unwrap_or_default(),
        nobody: said.nobody,
        retry_after_us: said.retry_after_us,
        mode: mode_from_wire(said.mode),
        prefill: candidates(said.prefill.as_ref().map_or(&[], |prefill| &prefill.0))?,
        prefill_booking: said.prefill_booking.map(handle),
    })
}

fn candidates(listed: &[CandidateSaid<'_>]) -> Result<Vec<Candidate>> {
    listed.iter().map(candidate).collect()
}

fn candidate(said: &CandidateSaid<'_>) -> Result<Candidate> {
    Ok(Candidate {
        worker: Worker::new(said.worker_id, said.dp_rank),
        name: said.name.unwrap_or_default().to_owned(),
        overlap: tiers_from_wire(said.overlap.as_ref()),
        trust: trust_from_wire(said.trust.as_ref())?,
        cost: said.cost,
        state: state(said.state)?,
        terms: said.explained.and_then(|table| table.terms()).map(terms_from_wire),
    })
}
