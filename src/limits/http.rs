//! Bounds of the HTTP port. Whoever may connect to it is not known, so all of them hold before anything is allocated.

use super::{
    FRAME_BODY_BYTES_CEILING, METRICS_CONNECTIONS_MAX, METRICS_SCRAPES_WAITING_MAX, PROMPT_TOKENS_MAX, WORKERS_MAX,
};

/// Open connections to the HTTP port. Beyond it a new one takes the place of the one whose peer has been waited for longest.
pub const HTTP_CONNECTIONS_MAX: usize = 256;
/// Connections beyond that number while no peer is waited for: one request each, of those that watch a daemon.
pub const HTTP_CONNECTIONS_RESERVED: usize = 16;
/// How long a peer may hold up a request of its own, in its body or its reply, before its connection may be closed in favour
/// of a new one, milliseconds. A connection between two requests may be closed at once.
pub const HTTP_DISPLACE_AFTER_MS: u64 = 1_000;
/// How long a connection may take to send the head of a request, milliseconds; also how long it may be idle between two.
pub const HTTP_HEAD_MS_MAX: u64 = 30_000;
/// How long a request's body may take from its first byte to its last, milliseconds.
pub const HTTP_BODY_MS_MAX: u64 = 30_000;
/// How long a response may wait for its reader beyond what the rate below allows, milliseconds.
pub const HTTP_WRITE_STALL_MS_MAX: u64 = 10_000;
/// How fast a response is to be read, bytes each second. A slower reader uses up the time above.
pub const HTTP_REPLY_BYTES_PER_S_MIN: u64 = 128 << 10;
/// Bytes of all replies that were made and not yet read, over all connections. A reply that finds no room is refused. One
/// reply alone always has room.
pub const HTTP_REPLIES_BYTES_MAX: usize = 64 << 20;
/// Replies of up to this many bytes are not counted there: all connections together have 26 MiB of them at most. What is
/// said of one worker is such a reply.
pub const HTTP_REPLY_SMALL_BYTES: usize = 96 << 10;
/// When a client whose reply found no room is told to come again, microseconds.
pub const HTTP_REPLIES_RETRY_US: u32 = 1_000_000;
/// Bytes that the kernel is asked to buffer of what a connection to the HTTP or metrics port has not read. It takes twice
/// that number.
pub const HTTP_SEND_BUFFER_BYTES: usize = 128 << 10;
/// Headers of one request.
pub const HTTP_HEADERS_MAX: usize = 64;
/// Bytes of a request's head; what came with them in one read may come on top.
pub const HTTP_HEAD_BYTES_MAX: usize = 32 << 10;
/// Largest body answered, unless configured otherwise; a token takes some 7 bytes of JSON.
pub const HTTP_BODY_BYTES_MAX_DEFAULT: u64 = 8 << 20;
/// Largest body that may be configured.
pub const HTTP_BODY_BYTES_CEILING: u64 = 128 << 20;
/// Bytes of all bodies that are being received; who comes beyond waits.
pub const HTTP_BODIES_BYTES_MAX: u64 = 256 << 20;
/// Nesting of the JSON in a body; what is meant needs six.
pub const HTTP_JSON_DEPTH_MAX: usize = 32;
/// Selections that wait for somebody to book them.
pub const HTTP_SELECTIONS_MAX: usize = 4096;
/// Memory of their prompts, bytes.
pub const HTTP_SELECTIONS_BYTES_MAX: usize = 256 << 20;
/// How long one waits, milliseconds.
pub const HTTP_SELECTION_MS_MAX: u64 = 120_000;
/// Workers about which it is remembered what only HTTP clients want to know.
pub const HTTP_RECORDS_MAX: usize = WORKERS_MAX;
/// Bytes of what is said of one of them, as JSON; 256 ranks with two endpoints each take some 30 KiB.
pub const HTTP_RECORD_BYTES_MAX: usize = 64 << 10;
/// Data-parallel ranks that one request may register.
pub const HTTP_RANKS_MAX: u32 = 256;
/// Requests to change workers that may wait for the control thread.
pub const HTTP_CHANGES_WAITING_MAX: usize = 64;
/// How long a change of workers is waited for until the fleet shows it, milliseconds.
pub const HTTP_SETTLE_MS_MAX: u64 = 5_000;
/// How long to rest before the fleet is looked at again, milliseconds.
pub const HTTP_SETTLE_REST_MS: u64 = 2;
/// Dumps of the index that may be under way.
pub const HTTP_DUMPS_MAX: usize = 1;
/// Bytes of a dump that are gathered before they are sent.
pub const HTTP_DUMP_CHUNK_BYTES: usize = 64 << 10;
/// Such pieces that may wait for whoever reads them.
pub const HTTP_DUMP_CHUNKS_MAX: usize = 16;
/// How long the dump of one worker may be configured to take, milliseconds: that long its reader can hold back the
/// worker's own events.
pub const HTTP_DUMP_WORKER_MS_CEILING: u64 = 600_000;
/// How fast a dump is to be read, bytes each second. Who is slower uses up the time below.
pub const HTTP_DUMP_BYTES_PER_S_MIN: u64 = 128 << 10;
/// How long a dump may wait for its reader beyond what that rate allows, milliseconds: it has the one place there is.
pub const HTTP_DUMP_LAG_MS_MAX: u64 = 5_000;
/// Hosts and networks, in a list, at which workers may be registered by HTTP.
pub const HTTP_WORKER_HOSTS_MAX: usize = 256;
/// Names by which the port may be asked.
pub const HTTP_HOSTS_MAX: usize = 64;
/// How long a stop waits for the responses under way once everybody else has ended, milliseconds.
pub const HTTP_END_MS_MAX: u64 = 500;

const _: () = assert!(HTTP_CONNECTIONS_MAX >= METRICS_CONNECTIONS_MAX);
const _: () = assert!(
    METRICS_SCRAPES_WAITING_MAX >= METRICS_CONNECTIONS_MAX + HTTP_CONNECTIONS_MAX + HTTP_CONNECTIONS_RESERVED,
    "every connection may wait for a page"
);
const _: () = assert!(HTTP_BODY_BYTES_MAX_DEFAULT <= HTTP_BODY_BYTES_CEILING);
const _: () =
    assert!(HTTP_BODY_BYTES_CEILING <= HTTP_BODIES_BYTES_MAX, "one body alone is never refused for the others");
// A body of the largest size makes a prompt that the protocol between core and gateway can carry, or is refused by it.
const _: () = assert!(PROMPT_TOKENS_MAX * 4 < FRAME_BODY_BYTES_CEILING as usize);
const _: () =
    assert!(HTTP_RECORDS_MAX * HTTP_RECORD_BYTES_MAX <= 256 << 20, "what is said of all workers is bounded, too");
const _: () = assert!(HTTP_RECORD_BYTES_MAX as u64 <= HTTP_BODY_BYTES_MAX_DEFAULT);
const _: () =
    assert!(HTTP_DUMP_LAG_MS_MAX < HTTP_WRITE_STALL_MS_MAX, "a dump's place is free before its connection is");
const _: () = assert!(HTTP_DUMP_CHUNK_BYTES as u64 * 1000 / HTTP_DUMP_BYTES_PER_S_MIN <= HTTP_DUMP_LAG_MS_MAX);
const _: () = assert!(HTTP_RANKS_MAX as usize <= WORKERS_MAX);
const _: () = assert!(HTTP_DISPLACE_AFTER_MS < HTTP_WRITE_STALL_MS_MAX && HTTP_DISPLACE_AFTER_MS < HTTP_BODY_MS_MAX);
const _: () = assert!((HTTP_CONNECTIONS_MAX + HTTP_CONNECTIONS_RESERVED) * HTTP_REPLY_SMALL_BYTES <= 26 << 20);
const _: () =
    assert!(HTTP_RECORD_BYTES_MAX + (32 << 10) <= HTTP_REPLY_SMALL_BYTES, "a change of a worker is always told");
