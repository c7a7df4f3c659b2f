//! Bounds of the journal of decisions, and of what judges them.

use super::WORKERS_MAX;

/// Decisions of one core that may be configured to wait for the journal.
pub const JOURNAL_RING_RECORDS_CEILING: u64 = 1 << 20;
/// Workers that the decisions of one core speak of that wait for the journal.
pub const JOURNAL_WAITING_WORKERS_MAX: usize = 1 << 17;
/// Workers that a buffer of the journal keeps room for once it has been written.
pub const JOURNAL_BUFFER_WORKERS_KEPT: usize = 512;
/// Smallest configurable size at which a file of the journal is ended, bytes.
pub const JOURNAL_FILE_BYTES_MIN: u64 = 4 << 10;
/// Largest configurable size at which a file of the journal is ended, bytes: it is read as a whole.
pub const JOURNAL_FILE_BYTES_CEILING: u64 = 1 << 30;
/// Files of the journal that may be configured.
pub const JOURNAL_FILES_CEILING: u64 = 1 << 16;
/// Decisions of one core taken for the journal before the next core's are looked at.
pub const JOURNAL_RECORDS_PER_TURN_MAX: usize = 256;
/// Bytes of the journal that are written at once.
pub const JOURNAL_WRITE_BYTES: usize = 256 << 10;
/// How long the journal's writer rests when it has seen all, milliseconds.
pub const JOURNAL_REST_MS: u64 = 10;
/// How long it rests while nothing is noted, milliseconds.
pub const JOURNAL_OFF_REST_MS: u64 = 1_000;
/// Turns of the journal's writer until it tries again to write after that failed.
pub const JOURNAL_RETRY_TURNS: u32 = 100;
/// Fields of a policy that may be set otherwise for a shadow policy.
pub const POLICY_SETTINGS_MAX: usize = 64;
/// Largest load that a journal is believed: sums over a fleet stay exact.
pub const JOURNAL_NUMBER_MAX: u64 = 1 << 40;

const _: () = assert!(JOURNAL_NUMBER_MAX * WORKERS_MAX as u64 <= 1 << 53, "a sum is exact as a fraction");
const _: () = assert!(JOURNAL_WAITING_WORKERS_MAX >= WORKERS_MAX, "a decision about all workers can wait");
