//! Decodes the daemon's replies into owned values.

use super::admin::AdminReply;
use super::decode_request::lane_opened;
use super::header::FrameKind;
use super::message::{
    Candidate, HelloReply, OverlapEntry, OverlapReply, RemoteError, Reply, RouteReply, ServerLimits, SpaceInfo,
    WorkerInfo, WorkersPage,
};
use super::read_only_requests;
use super::schema_conversions::{
    device_from_wire, match_from_wire, mode_from_wire, other_from_wire, outcome_from_wire, role_from_wire,
    scheme_from_wire, side_from_wire, state_from_wire, terms_from_wire, tiers_from_wire, trust_from_wire,
    unknown_value, worker_from_wire,
};
use super::table::{self, malformed};
use super::table::{Field, HotTable, Listed, TableReader, hot_tables};
use crate::error::{Kind, Result, Side};
use crate::ids::{SpaceId, Worker};
use crate::limits::CLIENT_SPACES_MAX;
use crate::protocol::{BookingHandle, BookingOutcome, MatchStatus, ReplyNotes, WorkerState};
use crate::schema_generated::routing as fb;

/// Tables in one reply: a page of status has one per counter.
const REPLY_TABLES_MAX: usize = 1 << 20;

/// The reply in a body, given the kind in its header.
///
/// # Errors
/// [`Kind::Malformed`] if the body does not verify, [`Kind::Unsupported`] if the daemon is newer than
/// this crate and says something that it does not know.
pub fn decode_reply(kind: u8, body: &[u8]) -> Result<Reply> {
    let Some(known) = FrameKind::from_u8(kind) else { return Err(unknown_value("kind", kind)) };
    Ok(match known {
        FrameKind::HelloReply => Reply::Hello(hello(root::<fb::HelloReply<'_>>(body)?)?),
        FrameKind::RouteReply => Reply::Route(route_reply(&RouteReplyFields::of_body(body, REPLY_TABLES_MAX)?)?),
        FrameKind::PrefillCompleteReply => {
            Reply::PrefillComplete(outcome(root::<fb::PrefillCompleteReply<'_>>(body)?.outcome())?)
        }
        FrameKind::FreeReply => Reply::Free(outcome(root::<fb::FreeReply<'_>>(body)?.outcome())?),
        FrameKind::OutputProgressReply => {
            Reply::OutputProgress(outcome(root::<fb::OutputProgressReply<'_>>(body)?.outcome())?)
        }
        FrameKind::ServedReply => Reply::Served(outcome(root::<fb::ServedReply<'_>>(body)?.outcome())?),
        FrameKind::ReportLoadReply => Reply::ReportLoad(root::<fb::ReportLoadReply<'_>>(body)?.accepted()),
        FrameKind::ReportFailureReply => Reply::ReportFailure(root::<fb::ReportFailureReply<'_>>(body)?.back_off_ms()),
        FrameKind::OverlapReply => Reply::Overlap(overlap(root::<fb::OverlapReply<'_>>(body)?)?),
        FrameKind::PotentialLoadsReply => {
            Reply::PotentialLoads(read_only_requests::potential_loads_reply(root::<fb::PotentialLoadsReply<'_>>(
                body,
            )?)?)
        }
        FrameKind::WorkersReply => Reply::Workers(workers(root::<fb::WorkersReply<'_>>(body)?)?),
        FrameKind::WatchReply => Reply::Watch(read_only_requests::watch_reply(root::<fb::WatchReply<'_>>(body)?)?),
        FrameKind::OpenLaneReply => Reply::OpenLane(lane_opened(root::<fb::OpenLaneReply<'_>>(body)?)),
        FrameKind::Error => Reply::Error(error(root::<fb::Error<'_>>(body)?)),
        other => match AdminReply::decode(other, body)? {
            Some(reply) => Reply::Admin(reply),
            None => return Err(malformed(&format!("a daemon does not send {}", other.name()))),
        },
    })
}

pub(super) fn root<'a, T>(body: &'a [u8]) -> Result<T::Inner>
where
    T: flatbuffers::Follow<'a> + flatbuffers::Verifiable + 'a,
{
    table::root::<T>(body, REPLY_TABLES_MAX)
}

fn outcome(value: fb::BookingOutcome) -> Result<BookingOutcome> {
    outcome_from_wire(value).ok_or_else(|| unknown_value("outcome", value.0))
}

pub(super) fn state(value: fb::WorkerState) -> Result<WorkerState> {
    state_from_wire(value).ok_or_else(|| unknown_value("state", value.0))
}

pub(super) fn matched(value: fb::MatchStatus) -> Result<MatchStatus> {
    match_from_wire(value).ok_or_else(|| unknown_value("match", value.0))
}

fn hello(table: fb::HelloReply<'_>) -> Result<HelloReply> {
    let limits = table.limits();
    if table.spaces().len() > CLIENT_SPACES_MAX {
        return Err(malformed("a hello names more spaces than any daemon has"));
    }
    let spaces = table.spaces().iter().map(|space| {
        Ok(SpaceInfo {
            id: SpaceId(space.space_id()),
            model: space.model().to_owned(),
            namespace: space.namespace().unwrap_or_default().to_owned(),
            role: role_from_wire(space.role()).ok_or_else(|| unknown_value("role", space.role().0))?,
            scheme: scheme_from_wire(space.scheme())?,
        })
    });
    Ok(HelloReply {
        version: table.version(),
        instance_id: table.instance_id(),
        limits: ServerLimits {
            frame_body_bytes_max: limits.frame_body_bytes_max(),
            prompt_tokens_max: limits.prompt_tokens_max(),
            candidates_max: limits.candidates_max(),
            workers_page_max: limits.workers_page_max(),
            bookings_per_session_max: limits.bookings_per_session_max(),
        },
        features: table.features(),
        spaces: spaces.collect::<Result<_>>()?,
        admin_socket: table.admin_socket().filter(|path| !path.is_empty()).map(Into::into),
    })
}

fn overlap(table: fb::OverlapReply<'_>) -> Result<OverlapReply> {
    let entry = |entry: fb::OverlapEntry<'_>| {
        Ok(OverlapEntry {
            worker: Worker::new(entry.worker_id(), entry.dp_rank()),
            overlap: tiers_from_wire(entry.overlap()),
            trust: trust_from_wire(entry.trust())?,
        })
    };
    Ok(OverlapReply {
        workers: table.workers().iter().map(entry).collect::<Result<_>>()?,
        matched: matched(table.match_())?,
        request_blocks: table.request_blocks(),
        notes: ReplyNotes(table.notes()),
    })
}

fn workers(table: fb::WorkersReply<'_>) -> Result<WorkersPage> {
    Ok(WorkersPage {
        workers: table.workers().iter().map(worker_info).collect::<Result<_>>()?,
        next_cursor: Some(table.next_cursor()).filter(|cursor| *cursor != 0),
        fleet_version: table.fleet_version(),
    })
}

pub(super) fn worker_info(info: fb::WorkerInfo<'_>) -> Result<WorkerInfo> {
    let device_class = info.device_class();
    Ok(WorkerInfo {
        worker: Worker::new(info.worker_id(), info.dp_rank()),
        space: SpaceId(info.space_id()),
        name: info.name().unwrap_or_default().to_owned(),
        state: state(info.state())?,
        device_class: device_from_wire(device_class).ok_or_else(|| unknown_value("device_class", device_class.0))?,
        weight: info.weight(),
        capacity_blocks: info.capacity_blocks(),
        batched_tokens_max: info.batched_tokens_max(),
        taints: info.taints().map(|taints| taints.iter().map(str::to_owned).collect()).unwrap_or_default(),
        trust: trust_from_wire(info.trust())?,
    })
}

fn error(table: fb::Error<'_>) -> RemoteError {
    RemoteError {
        code: table.code(),
        kind: Kind::from_code(table.code()),
        // An unknown side counts as the daemon's.
        side: side_from_wire(table.side()).unwrap_or(Side::Daemon),
        retryable: table.retryable(),
        retry_after_us: table.retry_after_us(),
        message: table.message().to_owned(),
        remedy: table.remedy().to_owned(),
    }
}

hot_tables! {
    RouteReplyFields of RouteReply unless rare: VT_REMOVED | VT_OTHERS {
        candidates: Listed<CandidateFields<'a>> = VT_CANDIDATES or return None,
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
        prefill: Option<Listed<CandidateFields<'a>>> = VT_PREFILL,
        prefill_booking: Option<fb::BookingHandle> = VT_PREFILL_BOOKING,
    }

    CandidateFields of Candidate unless explained: VT_TERMS {
        worker_id: u64 = VT_WORKER_ID,
        dp_rank: u32 = VT_DP_RANK,
        name: Option<&'a str> = VT_NAME,
        overlap: Option<fb::TierBlocks> = VT_OVERLAP,
        trust: Option<fb::Trust> = VT_TRUST,
        cost: f64 = VT_COST,
        state: fb::WorkerState = VT_STATE,
    }
}

pub(super) fn route_reply(said: &RouteReplyFields<'_>) -> Result<RouteReply> {
    let removed = said.rare.and_then(|table| table.removed()).map(|removed| {
        let rule = |removal: fb::Removal<'_>| {
            (removal.rule().to_owned(), removal.workers().iter().map(worker_from_wire).collect::<Vec<_>>())
        };
        removed.iter().map(rule).collect()
    });
    let others = said.rare.and_then(|table| table.others());
    let others = others.map(|others| others.iter().map(other_from_wire).collect());
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
        others: others.unwrap_or_default(),
    })
}

fn candidates(listed: &[CandidateFields<'_>]) -> Result<Vec<Candidate>> {
    listed.iter().map(candidate).collect()
}

fn candidate(said: &CandidateFields<'_>) -> Result<Candidate> {
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
