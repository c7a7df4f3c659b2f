//! Bounds of the clients that outlive their daemon.

/// Requests in flight on one connection, unless its options say otherwise; more wait within their own deadlines.
pub const CLIENT_IN_FLIGHT_MAX_DEFAULT: usize = 1024;
/// Reports that wait for the daemon's return. Beyond it the oldest are forgotten and counted: their bookings end by age.
pub const CLIENT_REPORTS_OWED_MAX: usize = 1 << 16;
/// How long a call may take, connecting included, unless its options say otherwise, milliseconds.
pub const CLIENT_TIMEOUT_MS_DEFAULT: u64 = 1_000;
/// How long a daemon is left alone that did not answer, at first, milliseconds; twice as long after each time.
pub const CLIENT_BACK_OFF_MS_MIN: u64 = 50;
/// The longest that a daemon is left alone, milliseconds.
pub const CLIENT_BACK_OFF_MS_MAX: u64 = 2_000;
/// How often a client for a thread that blocks looks after its connection before a call, at most, milliseconds.
pub const CLIENT_LOOK_AFTER_MS: u64 = 1;
/// Of a call's time, how much a request that books may wait in the daemon's queue, in hundredths: the daemon is to say
/// that nobody had room before its silence is taken for its end.
pub const CLIENT_QUEUE_SHARE_PERCENT: u32 = 80;
/// Tokens of a prompt's beginning by which a worker is chosen without the daemon, unless the options say otherwise.
pub const FALLBACK_PREFIX_TOKENS_DEFAULT: usize = 4096;

const _: () = assert!(CLIENT_BACK_OFF_MS_MIN <= CLIENT_BACK_OFF_MS_MAX);
const _: () = assert!(CLIENT_QUEUE_SHARE_PERCENT < 100);
const _: () = assert!(FALLBACK_PREFIX_TOKENS_DEFAULT <= super::PROMPT_TOKENS_MAX);
const _: () = assert!(CLIENT_IN_FLIGHT_MAX_DEFAULT <= CLIENT_REPORTS_OWED_MAX);
