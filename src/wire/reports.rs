//! What gateways report of bookings that are under way, both directions.

use super::convert::{outcome_to_wire, worker_from_wire, worker_to_wire};
use super::encode_reply::ReplyEncoder;
use super::encode_request::RequestEncoder;
use super::header::FrameKind;
use super::request::{Request, booking_ref, invalid, understood};
use crate::error::Result;
use crate::ids::{CorrelationId, Worker};
use crate::load::{BookingOutcome, BookingRef};
use crate::schema_generated::routing as fb;

pub(super) fn output_progress(table: fb::OutputProgress<'_>) -> Result<Request<'_>> {
    understood(table.must_understand())?;
    let booking = booking_ref(table.booking(), table.request_id(), table.attempt())?;
    Ok(Request::OutputProgress { booking, output_tokens: table.output_tokens() })
}

pub(super) fn served(table: fb::Served<'_>) -> Result<Request<'_>> {
    understood(table.must_understand())?;
    let booking = booking_ref(table.booking(), table.request_id(), table.attempt())?;
    let Some(worker) = table.worker() else {
        return Err(invalid("served without a worker", "name the worker that runs the request"));
    };
    Ok(Request::Served { booking, worker: worker_from_wire(worker) })
}

impl RequestEncoder {
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
    /// Answers an output-progress.
    pub fn output_progress(&mut self, id: CorrelationId, outcome: BookingOutcome, instance_id: u64, out: &mut Vec<u8>) {
        let args = fb::OutputProgressReplyArgs { outcome: outcome_to_wire(outcome), instance_id };
        let root = fb::OutputProgressReply::create(&mut self.builder, &args);
        self.finish(FrameKind::OutputProgressReply, id, root, out);
    }

    /// Answers a served.
    pub fn served(&mut self, id: CorrelationId, outcome: BookingOutcome, instance_id: u64, out: &mut Vec<u8>) {
        let args = fb::ServedReplyArgs { outcome: outcome_to_wire(outcome), instance_id };
        let root = fb::ServedReply::create(&mut self.builder, &args);
        self.finish(FrameKind::ServedReply, id, root, out);
    }
}
