//! Reports about bookings and about workers: decoded from frames, and the encoders of the reports about workers.

use super::decode_request::{Request, invalid, name, understood};
use super::encode_reply::ReplyEncoder;
use super::encode_request::RequestEncoder;
use super::header::FrameKind;
use super::schema_conversions::{worker_from_wire, worker_to_wire};
use super::table::{Field, HotTable, TableReader, hot_tables};
use crate::error::Result;
use crate::ids::{CorrelationId, SpaceId, Worker};
use crate::limits::PREFILL_BOOKING_SUFFIX;
use crate::protocol::{BookingHandle, BookingRef, EngineLoad};
use crate::schema_generated::routing as fb;

/// A share is a fraction of 1 on the wire, and a number of millionths here.
const MILLION: f64 = 1e6;

fn named_worker(worker: Option<&fb::WorkerRef>) -> Result<Worker> {
    worker.map(worker_from_wire).ok_or_else(|| invalid("a report of no worker", "name the worker"))
}

pub(super) fn report_load<'a>(table: &fb::ReportLoad<'_>) -> Result<Request<'a>> {
    understood(table.must_understand())?;
    let usage = table.kv_usage();
    if !(0.0..=1.0).contains(&usage) {
        return Err(invalid(format!("kv_usage is {usage}"), "say the share of blocks in use, 0 to 1"));
    }
    let load = EngineLoad {
        prefill_tokens: table.active_prefill_tokens(),
        decode_blocks: table.active_decode_blocks(),
        running: table.running_requests(),
        waiting: table.waiting_requests(),
        kv_usage_millionths: (usage * MILLION).round() as u32,
    };
    Ok(Request::ReportLoad { space: SpaceId(table.space_id()), worker: named_worker(table.worker())?, load })
}

pub(super) fn report_failure(table: fb::ReportFailure<'_>) -> Result<Request<'_>> {
    understood(table.must_understand())?;
    let reason = name("reason", table.reason())?.unwrap_or_default();
    let (space, worker) = (SpaceId(table.space_id()), named_worker(table.worker())?);
    Ok(Request::ReportFailure { space, worker, reason })
}

impl RequestEncoder {
    /// Appends a report-load.
    pub fn report_load(
        &mut self,
        id: CorrelationId,
        (space, worker): (SpaceId, Worker),
        load: &EngineLoad,
        out: &mut Vec<u8>,
    ) {
        let args = fb::ReportLoadArgs {
            worker: Some(&worker_to_wire(worker)),
            space_id: space.0,
            active_prefill_tokens: load.prefill_tokens,
            active_decode_blocks: load.decode_blocks,
            running_requests: load.running,
            waiting_requests: load.waiting,
            kv_usage: f64::from(load.kv_usage_millionths) / MILLION,
            ..Default::default()
        };
        let root = fb::ReportLoad::create(&mut self.builder, &args);
        self.finish(FrameKind::ReportLoad, id, root, out);
    }

    /// Appends a report-failure.
    pub fn report_failure(
        &mut self,
        id: CorrelationId,
        (space, worker): (SpaceId, Worker),
        reason: &str,
        out: &mut Vec<u8>,
    ) {
        let reason = (!reason.is_empty()).then(|| self.builder.create_string(reason));
        let worker = worker_to_wire(worker);
        let args = fb::ReportFailureArgs { worker: Some(&worker), space_id: space.0, reason, ..Default::default() };
        let root = fb::ReportFailure::create(&mut self.builder, &args);
        self.finish(FrameKind::ReportFailure, id, root, out);
    }

    /// Appends an output-progress: the tokens generated since the start of the request.
    pub fn output_progress(
        &mut self,
        id: CorrelationId,
        booking: &BookingRef<'_>,
        output_tokens: u32,
        out: &mut Vec<u8>,
    ) {
        let (handle, request_id, attempt) = self.booking(booking);
        let booking = handle.as_ref();
        let args = fb::OutputProgressArgs { booking, request_id, attempt, output_tokens, ..Default::default() };
        let root = fb::OutputProgress::create(&mut self.builder, &args);
        self.finish(FrameKind::OutputProgress, id, root, out);
    }

    /// Appends a served: the worker that runs a booked request.
    pub fn served(&mut self, id: CorrelationId, booking: &BookingRef<'_>, worker: Worker, out: &mut Vec<u8>) {
        let (handle, request_id, attempt) = self.booking(booking);
        let (booking, worker) = (handle.as_ref(), worker_to_wire(worker));
        let args = fb::ServedArgs { booking, request_id, attempt, worker: Some(&worker), ..Default::default() };
        let root = fb::Served::create(&mut self.builder, &args);
        self.finish(FrameKind::Served, id, root, out);
    }
}

impl ReplyEncoder {
    /// Answers a report-load.
    pub fn report_load(&mut self, id: CorrelationId, accepted: bool, out: &mut Vec<u8>) {
        let root = fb::ReportLoadReply::create(&mut self.builder, &fb::ReportLoadReplyArgs { accepted });
        self.finish(FrameKind::ReportLoadReply, id, root, out);
    }

    /// Answers a report-failure.
    pub fn report_failure(&mut self, id: CorrelationId, back_off_ms: u32, out: &mut Vec<u8>) {
        let root = fb::ReportFailureReply::create(&mut self.builder, &fb::ReportFailureReplyArgs { back_off_ms });
        self.finish(FrameKind::ReportFailureReply, id, root, out);
    }
}

hot_tables! {
    PrefillComplete of PrefillComplete {
        booking: Option<fb::BookingHandle> = VT_BOOKING,
        request_id: Option<&'a str> = VT_REQUEST_ID,
        attempt: u32 = VT_ATTEMPT,
        prefill_us: u64 = VT_PREFILL_US,
        must_understand: u64 = VT_MUST_UNDERSTAND,
    }

    Free of Free {
        booking: Option<fb::BookingHandle> = VT_BOOKING,
        request_id: Option<&'a str> = VT_REQUEST_ID,
        attempt: u32 = VT_ATTEMPT,
        must_understand: u64 = VT_MUST_UNDERSTAND,
    }

    OutputProgress of OutputProgress {
        booking: Option<fb::BookingHandle> = VT_BOOKING,
        request_id: Option<&'a str> = VT_REQUEST_ID,
        attempt: u32 = VT_ATTEMPT,
        output_tokens: u32 = VT_OUTPUT_TOKENS,
        must_understand: u64 = VT_MUST_UNDERSTAND,
    }

    Served of Served {
        booking: Option<fb::BookingHandle> = VT_BOOKING,
        request_id: Option<&'a str> = VT_REQUEST_ID,
        attempt: u32 = VT_ATTEMPT,
        worker: Option<fb::WorkerRef> = VT_WORKER,
        must_understand: u64 = VT_MUST_UNDERSTAND,
    }
}

pub(super) fn prefill_complete<'a>(table: &PrefillComplete<'a>) -> Result<Request<'a>> {
    understood(table.must_understand)?;
    let booking = booking_ref(table.booking, table.request_id, table.attempt)?;
    Ok(Request::PrefillComplete { booking, prefill_us: table.prefill_us })
}

pub(super) fn free<'a>(table: &Free<'a>) -> Result<Request<'a>> {
    understood(table.must_understand)?;
    Ok(Request::Free(booking_ref(table.booking, table.request_id, table.attempt)?))
}

pub(super) fn output_progress<'a>(table: &OutputProgress<'a>) -> Result<Request<'a>> {
    understood(table.must_understand)?;
    let booking = booking_ref(table.booking, table.request_id, table.attempt)?;
    Ok(Request::OutputProgress { booking, output_tokens: table.output_tokens })
}

pub(super) fn served<'a>(table: &Served<'a>) -> Result<Request<'a>> {
    understood(table.must_understand)?;
    let booking = booking_ref(table.booking, table.request_id, table.attempt)?;
    let Some(worker) = &table.worker else {
        return Err(invalid("served without a worker", "name the worker that runs the request"));
    };
    Ok(Request::Served { booking, worker: worker_from_wire(worker) })
}

fn booking_ref(handle: Option<fb::BookingHandle>, request_id: Option<&str>, attempt: u32) -> Result<BookingRef<'_>> {
    let handle = handle.filter(|handle| handle.slot() != 0 || handle.generation() != 0);
    if let Some(handle) = handle {
        return Ok(BookingRef::Handle(BookingHandle { slot: handle.slot(), generation: handle.generation() }));
    }
    // The name of a prefill half has the suffix after the id that was sent.
    name("request_id", request_id.map(|id| id.strip_suffix(PREFILL_BOOKING_SUFFIX).unwrap_or(id)))?;
    match request_id.filter(|id| !id.is_empty()) {
        Some(request_id) => Ok(BookingRef::Request { request_id, attempt }),
        None => {
            Err(invalid("no booking is named", "give the handle of the route reply, or the request_id and attempt"))
        }
    }
}
