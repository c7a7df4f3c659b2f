//! The traces that the daemon exports.

/// Most configurable decisions that wait for a span.
pub const TRACE_QUEUE_CEILING: u64 = 1 << 16;
/// Longest configurable time for one request to the collector, milliseconds.
pub const TRACE_TIMEOUT_MS_CEILING: u64 = 30_000;
/// Spans of one request to the collector.
pub const TRACE_BATCH_SPANS_MAX: usize = 512;
/// How long a span waits for others of its batch, milliseconds.
pub const TRACE_EXPORT_EVERY_MS: u64 = 1_000;
/// Attempts to send one batch.
pub const TRACE_ATTEMPTS_MAX: u32 = 5;
/// The pause after the first failed attempt, milliseconds. It doubles with each further one.
pub const TRACE_BACK_OFF_MS: u64 = 1_000;
/// The longest pause, also if the collector asks for a longer one, milliseconds.
pub const TRACE_BACK_OFF_MS_MAX: u64 = 30_000;
/// Bytes of a collector's reply that are read.
pub const TRACE_REPLY_BYTES_MAX: u64 = 64 << 10;
/// Fairness quantum of the exporting thread: decisions, and as many ends of bookings, before it looks at the clock.
pub const TRACE_RECORDS_PER_QUANTUM_MAX: usize = 1024;
/// How long after the end of a traced booking was lost the exporting thread looks for open bookings that have ended, and how
/// often at most it looks for such that are too old, milliseconds.
pub const TRACE_PURGE_EVERY_MS: u64 = 1_000;
/// Open bookings that it looks up before it lets serving threads in between.
pub const TRACE_LOOKED_UP_PER_LOCK_MAX: usize = 64;
/// Pause of the exporting thread when no decision waits, milliseconds.
pub const TRACE_PAUSE_MS: u64 = 50;
/// How long a stopping daemon waits for the last spans to be sent, milliseconds.
pub const TRACE_END_MS_MAX: u64 = 1_000;
/// Spans that wait for the collector, for each decision that may wait for a span.
pub const TRACE_SPANS_PER_RECORD: usize = 2;
/// Open bookings that get a span when they end, for each decision that may wait for a span.
pub const TRACE_BOOKINGS_PER_RECORD: usize = 8;
/// Memory for each decision that may wait for a span, bytes: its facts, the end of a booking, open bookings, and the spans
/// that wait for the collector, of 3 KiB each.
pub const TRACE_RECORD_BYTES: u64 = 256
    + super::ENDED_BOOKING_BYTES
    + TRACE_BOOKINGS_PER_RECORD as u64 * 96
    + TRACE_SPANS_PER_RECORD as u64 * (3 << 10);
