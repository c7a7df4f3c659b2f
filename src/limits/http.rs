//! Limits of the HTTP port. Its clients are not authenticated, so all limits apply before anything is allocated.

use super::{
    FRAME_BODY_BYTES_CEILING, HTTP_BYTES_MIN, METRICS_CONNECTIONS_MAX, METRICS_SCRAPES_WAITING_MAX, PROMPT_TOKENS_MAX,
    WORKERS_MAX,
};

/// Connections to the HTTP port. A further one replaces the connection that has waited longest for its peer.
pub const HTTP_CONNECTIONS_MAX: usize = 256;
/// Connections beyond that number while no connection waits for its peer: one request each, for monitoring.
pub const HTTP_CONNECTIONS_RESERVED: usize = 16;
/// How long a peer may delay its own request, by body or response, before a new connection may replace its connection,
/// milliseconds. A connection between two requests may be replaced at once.
pub const HTTP_DISPLACE_AFTER_MS: u64 = 1_000;
/// Timeout of the head of a request, milliseconds; also of the idle time between two requests.
pub const HTTP_HEAD_MS_MAX: u64 = 30_000;
/// Timeout of a request's body, from its first byte to its last, milliseconds.
pub const HTTP_BODY_MS_MAX: u64 = 30_000;
/// How long a response may wait for its reader beyond the time at the rate below, milliseconds.
pub const HTTP_WRITE_STALL_MS_MAX: u64 = 10_000;
/// Rate at which a response must be read, bytes in a second. A slower reader uses up the time above.
pub const HTTP_REPLY_BYTES_PER_S_MIN: u64 = 128 << 10;
/// Bytes of all unread responses, over all connections. A response that does not fit is refused. A single response
/// always fits.
pub const HTTP_REPLIES_BYTES_MAX: usize = 64 << 20;
/// Responses of up to this many bytes do not count there: all connections together have at most 26 MiB of them. The
/// response about one worker is such a response.
pub const HTTP_REPLY_SMALL_BYTES: usize = 96 << 10;
/// Retry time for a client whose response or body did not fit, microseconds.
pub const HTTP_REPLIES_RETRY_US: u32 = 1_000_000;
/// Send buffer of a connection to the HTTP or metrics port, bytes. The kernel takes twice that number.
pub const HTTP_SEND_BUFFER_BYTES: usize = 128 << 10;
/// Headers of one request.
pub const HTTP_HEADERS_MAX: usize = 64;
/// Bytes of a request's head. Bytes from the same read may come on top.
pub const HTTP_HEAD_BYTES_MAX: usize = 32 << 10;
/// Default of the largest body answered. A token takes about 7 bytes of JSON.
pub const HTTP_BODY_BYTES_MAX_DEFAULT: u64 = 8 << 20;
/// Highest configurable body size.
pub const HTTP_BODY_BYTES_CEILING: u64 = 128 << 20;
/// Bytes of all bodies being received, beyond the first [`HTTP_BODY_SMALL_BYTES`] of each. A body takes them as its bytes
/// arrive.
pub const HTTP_BODIES_BYTES_MAX: u64 = 256 << 20;
/// Bytes of each body that do not count there: all connections together have at most 17 MiB of them. No caller can keep
/// another caller's small body out.
pub const HTTP_BODY_SMALL_BYTES: usize = 64 << 10;
/// The least of it, where the memory budget is small, bytes.
pub const HTTP_BODY_SMALL_BYTES_MIN: usize = 4 << 10;
/// How long a body waits for memory that other bodies have, milliseconds. Then it is refused, which frees its own.
pub const HTTP_BODY_ROOM_MS_MAX: u64 = 1_000;
/// Nesting of the JSON in a body. Valid bodies need six levels.
pub const HTTP_JSON_DEPTH_MAX: usize = 32;
/// Selections that are not booked yet.
pub const HTTP_SELECTIONS_MAX: usize = 4096;
/// Memory of their prompts, bytes.
pub const HTTP_SELECTIONS_BYTES_MAX: usize = 256 << 20;
/// How long a selection can be booked, milliseconds.
pub const HTTP_SELECTION_MS_MAX: u64 = 120_000;
/// Workers for which fields of HTTP clients are remembered.
pub const HTTP_RECORDS_MAX: usize = WORKERS_MAX;
/// Bytes of one such record as JSON. 256 ranks with two endpoints each take about 30 KiB.
pub const HTTP_RECORD_BYTES_MAX: usize = 64 << 10;
/// Data-parallel ranks that one request may register.
pub const HTTP_RANKS_MAX: u32 = 256;
/// Requests to change workers that may wait for the control thread.
pub const HTTP_CHANGES_WAITING_MAX: usize = 64;
/// How long a request waits until the fleet shows its change of workers, milliseconds.
pub const HTTP_SETTLE_MS_MAX: u64 = 5_000;
/// Pause before the fleet is checked again, milliseconds.
pub const HTTP_SETTLE_PAUSE_MS: u64 = 2;
/// Dumps of the index at once.
pub const HTTP_DUMPS_MAX: usize = 1;
/// Bytes of one piece of a dump.
pub const HTTP_DUMP_CHUNK_BYTES: usize = 64 << 10;
/// Pieces of a dump that wait for its reader.
pub const HTTP_DUMP_CHUNKS_MAX: usize = 16;
/// Highest configurable time of one worker's dump, milliseconds. For that long its reader can delay the worker's
/// events.
pub const HTTP_DUMP_WORKER_MS_CEILING: u64 = 600_000;
/// Rate at which a dump must be read, bytes in a second. A slower reader uses up the time below.
pub const HTTP_DUMP_BYTES_PER_S_MIN: u64 = 128 << 10;
/// How long a dump may wait for its reader beyond the time at that rate, milliseconds: there is only one dump at a
/// time.
pub const HTTP_DUMP_LAG_MS_MAX: u64 = 5_000;
/// Entries of `[http] worker_hosts`.
pub const HTTP_WORKER_HOSTS_MAX: usize = 256;
/// Host names in `[http] hosts`.
pub const HTTP_HOSTS_MAX: usize = 64;
/// How long a stop waits for pending responses after all other threads have ended, milliseconds.
pub const HTTP_END_MS_MAX: u64 = 500;

const _: () = assert!(HTTP_CONNECTIONS_MAX >= METRICS_CONNECTIONS_MAX);
const _: () = assert!(
    METRICS_SCRAPES_WAITING_MAX >= METRICS_CONNECTIONS_MAX + HTTP_CONNECTIONS_MAX + HTTP_CONNECTIONS_RESERVED,
    "every connection may wait for a page"
);
const _: () = assert!(HTTP_BODY_BYTES_MAX_DEFAULT <= HTTP_BODY_BYTES_CEILING);
const _: () = assert!(HTTP_BODY_BYTES_CEILING <= HTTP_BODIES_BYTES_MAX, "a single body always fits");
// The prompt of the largest body fits a frame, or is refused.
const _: () = assert!(PROMPT_TOKENS_MAX * 4 < FRAME_BODY_BYTES_CEILING as usize);
const _: () = assert!(
    HTTP_RECORDS_MAX * HTTP_RECORD_BYTES_MAX <= 256 << 20,
    "the records of all workers together are limited too"
);
const _: () = assert!(HTTP_RECORD_BYTES_MAX as u64 <= HTTP_BODY_BYTES_MAX_DEFAULT);
const _: () = assert!(HTTP_DUMP_LAG_MS_MAX < HTTP_WRITE_STALL_MS_MAX, "a slow dump ends before its connection");
const _: () = assert!(HTTP_DUMP_CHUNK_BYTES as u64 * 1000 / HTTP_DUMP_BYTES_PER_S_MIN <= HTTP_DUMP_LAG_MS_MAX);
const _: () = assert!(HTTP_RANKS_MAX as usize <= WORKERS_MAX);
const _: () = assert!(HTTP_DISPLACE_AFTER_MS < HTTP_WRITE_STALL_MS_MAX && HTTP_DISPLACE_AFTER_MS < HTTP_BODY_MS_MAX);
const _: () = assert!((HTTP_CONNECTIONS_MAX + HTTP_CONNECTIONS_RESERVED) * HTTP_REPLY_SMALL_BYTES <= 26 << 20);
const _: () = assert!((HTTP_CONNECTIONS_MAX + HTTP_CONNECTIONS_RESERVED) * HTTP_BODY_SMALL_BYTES <= 17 << 20);
const _: () = assert!(
    ((HTTP_CONNECTIONS_MAX + HTTP_CONNECTIONS_RESERVED) * HTTP_BODY_SMALL_BYTES_MIN) as u64 <= HTTP_BYTES_MIN / 4,
    "they fit any budget"
);
const _: () = assert!(HTTP_BODY_ROOM_MS_MAX < HTTP_BODY_MS_MAX);
const _: () = assert!(
    HTTP_RECORD_BYTES_MAX + (32 << 10) <= HTTP_REPLY_SMALL_BYTES,
    "the response about one worker is a small one"
);
