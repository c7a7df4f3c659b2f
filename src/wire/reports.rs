//! What gateways report of bookings that are under way and of workers, both directions.

use super::convert::{worker_from_wire, worker_to_wire};
use super::encode_reply::ReplyEncoder;
use super::encode_request::RequestEncoder;
use super::header::FrameKind;
use super::request::{Request, invalid, name, understood};
use crate::error::Result;
use crate::ids::{CorrelationId, SpaceId, Worker};
use crate::protocol::{BookingRef, EngineLoad};
use crate::schema_generated::routing as fb;

/// Shares on the wire are of 1, here of a million.
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

    /// Appends an output-progress: the tokens put out so far, all of them.
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

    /// Appends a served: which worker runs a booked request.
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
