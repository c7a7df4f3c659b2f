//! What became of bookings, for the journal and for traces.

use std::sync::atomic::{AtomicU64, Ordering};

use crossbeam::queue::ArrayQueue;

use super::booking::Booking;
use super::ledger::Ledger;
use super::loads::Loads;
use crate::columns::{Column, columns, numbered};
use crate::ids::WorkerIndex;
use crate::limits::{ENDED_BOOKING_BYTES, TRACE_LOOKED_UP_PER_LOCK_MAX};
use crate::protocol::BookingHandle;

/// Why a booking ended.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum EndReason {
    /// Its gateway freed it.
    #[default]
    Freed,
    /// A later attempt of the same request took over.
    Superseded,
    /// It was too old.
    TooOld,
    /// Its session was gone.
    SessionGone,
    /// Its worker left.
    WorkerLeft,
}

numbered! {
    EndReason { Freed = 0, Superseded = 1, TooOld = 2, SessionGone = 3, WorkerLeft = 4 }
}

/// What became of a booking that the journal records. Times count from the booking.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EndedBooking {
    /// The generation of its handle, which no other booking of the daemon's run has.
    pub booking: u64,
    /// Why it ended.
    pub reason: EndReason,
    /// The worker that ran it in the end.
    pub worker: WorkerIndex,
    /// The class of that worker, by its place among all.
    pub class: u32,
    /// Tokens of the prompt to compute, as booked.
    pub prefill_tokens: u64,
    /// The other tokens of the prompt.
    pub cached_tokens: u64,
    /// When its first token was reported, nanoseconds; `None` = never.
    pub first_token_ns: Option<u64>,
    /// When it ended, nanoseconds.
    pub end_ns: u64,
    /// Output tokens, as reported; 0 = none were.
    pub output_tokens: u32,
    /// Whether the worker had no other prefill, of any router, when this one was booked.
    pub began_alone: bool,
    /// Requests in flight on the worker when it ended, itself and those of other routers among them.
    pub requests: u64,
    /// Blocks of those requests.
    pub decode_blocks: u64,
    /// Predicted time of this router's prefills that ended on the worker between the first token and the end,
    /// microseconds.
    pub prefilled_us: u32,
}

// What waits in the queue's slots, each with its stamp.
const _: () = assert!(size_of::<EndedBooking>() + size_of::<usize>() <= ENDED_BOOKING_BYTES as usize);

impl EndedBooking {
    /// The values that a journal records.
    pub(crate) const COLUMNS: &'static [Column<Self>] = columns! {
        "booking": booking;
        "reason": reason;
        "index": worker;
        "class": class;
        "prefill_tokens": prefill_tokens;
        "cached_tokens": cached_tokens;
        "first_token_ns": first_token_ns;
        "end_ns": end_ns;
        "output_tokens": output_tokens;
        "began_alone": began_alone;
        "requests": requests;
        "decode_blocks": decode_blocks;
        "prefilled_us": prefilled_us;
    };
}

/// Ended bookings on their way to the journal's writer, or to who makes spans. A thread that ends a booking never waits: without room, the
/// record is lost and counted.
#[derive(Debug)]
pub(super) struct EndedQueue {
    waiting: ArrayQueue<EndedBooking>,
    /// Relaxed everywhere: a count, which orders nothing.
    lost: AtomicU64,
}

impl EndedQueue {
    /// A queue with room for `bookings_max`, at least one.
    pub(super) fn new(bookings_max: usize) -> Self {
        Self { waiting: ArrayQueue::new(bookings_max.max(1)), lost: AtomicU64::new(0) }
    }

    pub(super) fn push(&self, ended: EndedBooking) {
        if self.waiting.push(ended).is_err() {
            self.lost.fetch_add(1, Ordering::Relaxed);
        }
    }

    pub(super) fn pop(&self) -> Option<EndedBooking> {
        self.waiting.pop()
    }

    /// Takes the number of bookings that were lost since the last call.
    pub(super) fn take_lost(&self) -> u64 {
        self.lost.swap(0, Ordering::Relaxed)
    }
}

impl Loads {
    /// The recorded booking that ended first of those that [`Loads::take_ended`] has not returned. For one thread.
    #[must_use]
    pub fn take_ended(&self) -> Option<EndedBooking> {
        self.ended.as_ref()?.pop()
    }

    /// Takes the number of recorded bookings whose end was lost since the last call, because too many waited.
    #[must_use]
    pub fn take_ended_lost(&self) -> u64 {
        self.ended.as_ref().map_or(0, EndedQueue::take_lost)
    }

    /// The booking of a traced request that ended first of those that this has not returned. For one thread.
    #[must_use]
    pub fn take_traced_end(&self) -> Option<EndedBooking> {
        self.traced.as_ref()?.pop()
    }

    /// Takes the number of bookings of traced requests whose end was lost since the last call, because too many waited.
    #[must_use]
    pub fn take_traced_ends_lost(&self) -> u64 {
        self.traced.as_ref().map_or(0, EndedQueue::take_lost)
    }

    /// The generations of those of these bookings that have ended. Their ends wait in the queues, or were lost.
    #[must_use]
    pub(crate) fn ended_of(&self, bookings: &[BookingHandle]) -> Vec<u64> {
        let mut ended = Vec::new();
        for some in bookings.chunks(TRACE_LOOKED_UP_PER_LOCK_MAX) {
            let ledger = self.ledger.lock();
            let is_live = |handle: &&BookingHandle| {
                ledger.bookings.get(handle.slot as u32).is_some_and(|live| live.generation == handle.generation)
            };
            ended.extend(some.iter().filter(|handle| !is_live(handle)).map(|handle| handle.generation));
        }
        ended
    }

    /// Tells the journal, and who makes spans, what became of a booking that is about to end.
    pub(super) fn record_end(&self, ledger: &Ledger, booking: &Booking, reason: EndReason, now_ns: u64) {
        let journal = self.ended.as_ref().filter(|_| booking.is_recorded);
        let traces = self.traced.as_ref().filter(|_| booking.is_traced);
        if journal.is_none() && traces.is_none() {
            return;
        }
        let (worker, since_ns) = (booking.worker, booking.booked_at_ns);
        let load = self.cells.read(worker);
        let [prefill_tokens, cached_tokens] = booking.tokens();
        let first_token_ns = (!booking.prefilling).then(|| booking.first_token_at_ns.saturating_sub(since_ns));
        let ended = EndedBooking {
            booking: booking.generation,
            reason,
            worker,
            class: ledger.prefills.laws.class_of(worker),
            prefill_tokens,
            cached_tokens,
            first_token_ns,
            // Another serving thread may have read its clock later for the first token than this one for the end.
            end_ns: now_ns.saturating_sub(since_ns).max(first_token_ns.unwrap_or(0)),
            output_tokens: booking.output.tokens,
            began_alone: booking.began_alone,
            requests: load.requests,
            decode_blocks: load.decode_blocks,
            prefilled_us: ledger.prefills.done_us(worker).wrapping_sub(booking.prefilled_us),
        };
        [journal, traces].into_iter().flatten().for_each(|queue| queue.push(ended));
    }
}
