//! What gateways tell of bookings: that a prefill is done, what was put out, where it ran, that it is over.

use super::convert::worker_from_wire;
use super::request::{Request, invalid, name, understood};
use super::table::{Field, HotTable, TableReader, hot_tables};
use crate::error::Result;
use crate::protocol::{BookingHandle, BookingRef};
use crate::schema_generated::routing as fb;

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

pub(super) fn prefill_complete<'a>(told: &PrefillComplete<'a>) -> Result<Request<'a>> {
    understood(told.must_understand)?;
    let booking = booking_ref(told.booking, told.request_id, told.attempt)?;
    Ok(Request::PrefillComplete { booking, prefill_us: told.prefill_us })
}

pub(super) fn free<'a>(told: &Free<'a>) -> Result<Request<'a>> {
    understood(told.must_understand)?;
    Ok(Request::Free(booking_ref(told.booking, told.request_id, told.attempt)?))
}

pub(super) fn output_progress<'a>(told: &OutputProgress<'a>) -> Result<Request<'a>> {
    understood(told.must_understand)?;
    let booking = booking_ref(told.booking, told.request_id, told.attempt)?;
    Ok(Request::OutputProgress { booking, output_tokens: told.output_tokens })
}

pub(super) fn served<'a>(told: &Served<'a>) -> Result<Request<'a>> {
    understood(told.must_understand)?;
    let booking = booking_ref(told.booking, told.request_id, told.attempt)?;
    let Some(worker) = &told.worker else {
        return Err(invalid("served without a worker", "name the worker that runs the request"));
    };
    Ok(Request::Served { booking, worker: worker_from_wire(worker) })
}

fn booking_ref(handle: Option<fb::BookingHandle>, request_id: Option<&str>, attempt: u32) -> Result<BookingRef<'_>> {
    let handle = handle.filter(|handle| handle.slot() != 0 || handle.generation() != 0);
    if let Some(handle) = handle {
        return Ok(BookingRef::Handle(BookingHandle { slot: handle.slot(), generation: handle.generation() }));
    }
    match name("request_id", request_id)? {
        Some(request_id) => Ok(BookingRef::Request { request_id, attempt }),
        None => {
            Err(invalid("no booking is named", "give the handle of the route reply, or the request_id and attempt"))
        }
    }
}
