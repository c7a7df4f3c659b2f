//! What became of bookings, for the journal.

use std::sync::atomic::{AtomicU64, Ordering};

use crossbeam::queue::ArrayQueue;

use crate::columns::{Column, columns, numbered};
use crate::ids::WorkerIndex;
use crate::limits::ENDED_BOOKING_BYTES;

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

/// Ended bookings on their way to the journal's writer. A thread that ends a booking never waits: without room, the
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
