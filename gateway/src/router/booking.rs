//! A booking that ends with its request.

use std::sync::Arc;
use std::time::Instant;

use kvrouted::client::Booking;
use kvrouted::ids::Worker;

use super::reports::{Report, Reports};
use crate::limits::OUTPUT_REPORT_TOKENS;

/// A booking of the daemon. It is freed when the guard is dropped, however the request ends. No method waits: reports
/// go to one task in the background, in the order of the calls.
#[derive(Debug)]
pub struct BookingGuard {
    reports: Arc<Reports>,
    booking: Booking,
    worker: Worker,
    booked_at: Instant,
    is_prefilled: bool,
    /// Output tokens so far, and those that the daemon was told of.
    tokens: u32,
    reported_tokens: u32,
}

impl BookingGuard {
    pub(super) fn new(reports: Arc<Reports>, booking: Booking, worker: Worker) -> Self {
        let booked_at = Instant::now();
        Self { reports, booking, worker, booked_at, is_prefilled: false, tokens: 0, reported_tokens: 0 }
    }

    /// The worker that the daemon believes to run the request.
    #[must_use]
    pub const fn worker(&self) -> Worker {
        self.worker
    }

    /// Says that the first token came. Only the first call counts.
    pub fn prefill_complete(&mut self) {
        if self.is_prefilled {
            return;
        }
        self.is_prefilled = true;
        let prefill_us = u64::try_from(self.booked_at.elapsed().as_micros()).unwrap_or(u64::MAX);
        self.reports.send(Report::PrefillComplete { booking: self.booking, prefill_us });
    }

    /// Says how many tokens have been generated since the start. Most calls send nothing, because the daemon counts blocks;
    /// the last number is sent when the request ends.
    pub fn output_progress(&mut self, tokens: u32) {
        self.tokens = self.tokens.max(tokens);
        if self.tokens - self.reported_tokens >= OUTPUT_REPORT_TOKENS {
            self.report_output();
        }
    }

    fn report_output(&mut self) {
        self.reported_tokens = self.tokens;
        self.reports.send(Report::OutputProgress { booking: self.booking, tokens: self.tokens });
    }

    /// Says which worker runs the request. If it is another than the booked one, the booking moves there.
    pub fn served(&mut self, worker: Worker) {
        if worker == self.worker {
            return;
        }
        self.worker = worker;
        self.reports.send(Report::Served { booking: self.booking, worker });
    }
}

impl Drop for BookingGuard {
    fn drop(&mut self) {
        // From this number the daemon learns how long outputs are and take.
        if self.tokens > self.reported_tokens {
            self.report_output();
        }
        self.reports.send(Report::Free { booking: self.booking });
    }
}
