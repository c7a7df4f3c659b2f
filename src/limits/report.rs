//! The archive that `kvrouted report` writes.

use super::JOURNAL_FILE_BYTES_CEILING;

/// Minutes of the journal, unless the command line names others.
pub const REPORT_MINUTES_DEFAULT: u64 = 15;
/// Most minutes of the journal.
pub const REPORT_MINUTES_MAX: u64 = 7 * 24 * 60;
/// Bytes of one file of the archive, before it is compressed. A larger one is left out.
pub const REPORT_FILE_BYTES_MAX: usize = 64 << 20;
/// Bytes of all files of the journal in the archive, before they are compressed. If the minutes take more, there are fewer.
pub const REPORT_JOURNAL_BYTES_MAX: usize = 64 << 20;
/// Bytes of a journal file that is read.
pub const REPORT_JOURNAL_FILE_BYTES_MAX: u64 = JOURNAL_FILE_BYTES_CEILING / 4;
/// Bytes of a configuration file that is read.
pub const REPORT_CONFIG_BYTES_MAX: u64 = 16 << 20;
/// Bytes of one file below /proc or /sys that is read.
pub const REPORT_FACT_BYTES_MAX: u64 = 64 << 10;
