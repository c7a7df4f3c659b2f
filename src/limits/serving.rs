//! Limits of clients and connections: access, receive buffers, descriptors, fairness quanta, shm lanes, and the clients
//! of this package.

use super::{ADMIN_CONNECTIONS_MAX, HTTP_CONNECTIONS_MAX, METRICS_CONNECTIONS_MAX, SERVERS_ASKED_MAX};

// ---- Access to sockets -----------------------------------------------------------------------------------

/// Entries of `allow_uids`, and of `allow_gids`.
pub const ALLOWED_ACCOUNTS_MAX: usize = 256;
/// Groups of a peer's process: the kernel's limit.
pub const PEER_GROUPS_MAX: usize = 1 << 16;
/// Longest configurable wait for the rest of a frame, milliseconds.
pub const FRAME_TIMEOUT_MS_CEILING: u64 = 3_600_000;
/// Checks for stalled frames in each `frame_timeout_ms`.
pub const FRAME_TIMEOUT_CHECKS: u32 = 8;

/// Bytes of all receive buffers of one serving thread, each beyond its minimum. More only if two frames of the
/// configured size need it.
pub const CORE_RECEIVE_BYTES_MAX: usize = 256 << 20;

/// Largest body answered on the admin socket, whose requests are small. It limits the bytes that all its connections
/// can send at once.
pub const ADMIN_FRAME_BODY_BYTES_MAX: u32 = 1 << 20;

const _: () = assert!(FRAME_TIMEOUT_CHECKS > 0);
const _: () = assert!(super::FRAME_BODY_BYTES_MAX_DEFAULT as usize * 16 <= CORE_RECEIVE_BYTES_MAX);

// ---- File descriptors ------------------------------------------------------------------------------------

/// A publisher takes one for its connection and one for a replay.
pub const DESCRIPTORS_PER_PUBLISHER: u64 = 2;
/// Another router takes one for the connection to it, one for its own, and two while its name is looked up.
pub const DESCRIPTORS_PER_ROUTER: u64 = 4;
/// A gateway's connection takes one for its socket, and one more while it waits for room to write.
pub const DESCRIPTORS_PER_CONNECTION: u64 = 2;
/// A lane takes its memory and its bell, and the gateway's ends of both until they are sent.
pub const DESCRIPTORS_PER_LANE: u64 = 4;
/// A serving thread takes these for its event loop and its wake-ups.
pub const DESCRIPTORS_PER_CORE: u64 = 8;
/// An ingest thread takes these for its event loop (twice: accepted connections have a handle of their own), its
/// wake-ups and its name lookups.
pub const DESCRIPTORS_PER_SHARD: u64 = 16;
/// Reserved for the daemon itself: listeners, files, the connections of other ports (admin connections twice, as
/// above), and descriptors about to be closed.
pub const DESCRIPTORS_RESERVED: u64 =
    128 + (HTTP_CONNECTIONS_MAX + METRICS_CONNECTIONS_MAX + 2 * ADMIN_CONNECTIONS_MAX + SERVERS_ASKED_MAX) as u64;
/// Most descriptors requested from the kernel, however high the hard limit is.
pub const DESCRIPTORS_WANTED_MAX: u64 = 1 << 20;
/// Fewest connections with which a daemon starts.
pub const CONNECTIONS_MIN: usize = 64;

const _: () = assert!(CONNECTIONS_MIN <= super::CONNECTIONS_MAX);
// Everything at its maximum fits. Events and load reports of a worker come from one publisher each.
const _: () = assert!(
    DESCRIPTORS_RESERVED
        + super::CORES_MAX as u64 * DESCRIPTORS_PER_CORE
        + super::SHARDS_MAX as u64 * DESCRIPTORS_PER_SHARD
        + super::CONNECTIONS_MAX as u64 * DESCRIPTORS_PER_CONNECTION
        + super::LANES_CEILING * DESCRIPTORS_PER_LANE
        + (super::REMOTE_CONNECTIONS_CEILING + super::REMOTE_HALF_OPEN_MAX as u64)
            * super::DESCRIPTORS_PER_REMOTE_CONNECTION
        + 2 * super::WORKERS_MAX as u64 * DESCRIPTORS_PER_PUBLISHER
        <= DESCRIPTORS_WANTED_MAX
);

// ---- Fairness quanta of connections ----------------------------------------------------------------------

/// Reads of one connection in a row before the others of its serving thread.
pub const READS_PER_QUANTUM_MAX: u32 = 16;
/// Writes of the rest of a reply of one connection in a row before the others of its serving thread.
pub const WRITES_PER_QUANTUM_MAX: u32 = 16;
/// Frames of one connection answered in a row before the others of its serving thread.
pub const FRAMES_PER_QUANTUM_MAX: u32 = 32;
/// Frames of one connection whose replies wait for one write. A write costs as much as a few frames, so that less would
/// cost more; with more, gateway and daemon wait for each other in turns.
pub const FRAMES_PER_WRITE_MAX: u32 = 16;
/// A connection that sent this many frames at once has probably sent more by the time when they are answered.
pub const FRAMES_OF_BUSY_PEER_MIN: u64 = 8;
/// Bytes of such frames, except the last.
pub const REQUEST_BYTES_PER_QUANTUM_MAX: usize = 256 << 10;
/// Bytes of the replies to them, except the last.
pub const REPLY_BYTES_PER_QUANTUM_MAX: usize = 128 << 10;
/// Work of such frames, except the last, in blocks of a prompt hashed and looked up: about 10 ns each.
pub const WORK_PER_QUANTUM_MAX: u64 = 1 << 15;
/// Work of checking one worker, in blocks.
pub const WORKER_WORK: u64 = 4;
/// Bytes of pending replies that a connection may leave unread. With more it is closed.
pub const REPLY_BUFFER_BYTES_MAX: usize = 4 << 20;
/// Default of the time that a peer may leave its replies unread, milliseconds.
pub const UNREAD_MS_MAX_DEFAULT: u64 = 30_000;
/// Longest configurable time for that, milliseconds.
pub const UNREAD_MS_CEILING: u64 = 3_600_000;
/// Longest configurable busy-poll of a serving thread, microseconds.
pub const SPIN_US_CEILING: u32 = 1_000_000;
/// A sleeping serving thread busy-polls once in this many times, to learn whether work would arrive soon.
pub const SPIN_PROBE_EVERY: u32 = 64;
/// Pause before a write is retried if no descriptor is free to wait for the socket, milliseconds.
pub const WRITE_RETRY_MS: u64 = 1;
/// Bytes that a connection's reply buffer keeps once its replies are written, while more requests have arrived.
pub const REPLY_BUFFER_BYTES_KEPT: usize = 256 << 10;
/// Bytes that it keeps while the connection waits for requests. [`CONNECTION_BYTES`](super::CONNECTION_BYTES) counts them.
/// Usual replies are smaller.
pub const REPLY_BUFFER_BYTES_IDLE: usize = 4 << 10;
/// How often a serving thread checks the fleet for its watching connections, milliseconds.
pub const WATCH_CHECK_MS: u64 = 50;

/// Pause between two pages of a fleet sent to a watching connection, milliseconds.
pub const WATCH_PAGE_PAUSE_MS: u64 = 1;

const _: () = assert!(WATCH_PAGE_PAUSE_MS <= WATCH_CHECK_MS);
const _: () = assert!(REPLY_BYTES_PER_QUANTUM_MAX <= REPLY_BUFFER_BYTES_KEPT);
const _: () = assert!(
    FRAMES_PER_QUANTUM_MAX as u64 * (720 + 64 * WORKER_WORK) <= WORK_PER_QUANTUM_MAX,
    "for usual prompts and fleets the limit on frames applies first"
);
const _: () = assert!(REPLY_BUFFER_BYTES_KEPT <= REPLY_BUFFER_BYTES_MAX);
const _: () = assert!(REPLY_BUFFER_BYTES_IDLE <= REPLY_BUFFER_BYTES_KEPT);
const _: () = assert!(UNREAD_MS_MAX_DEFAULT <= UNREAD_MS_CEILING);

// ---- Shm lanes -------------------------------------------------------------------------------------------

/// Most configurable lanes of one daemon.
pub const LANES_CEILING: u64 = 4096;
/// Smallest ring, bytes: a page.
pub const LANE_RING_BYTES_MIN: u32 = 4 << 10;
/// Default size of each ring of a lane, bytes; less if the configuration allows less.
pub const LANE_RING_BYTES_DEFAULT: u32 = 256 << 10;
/// Largest configurable ring, bytes.
pub const LANE_RING_BYTES_CEILING: u32 = 64 << 20;
/// Bytes of a long frame written into a ring before they are published to the other side.
pub const LANE_PUBLISHED_BYTES: usize = 4 << 10;
/// Bytes after the last written word whose cache lines a side takes while it busy-polls, at most half a ring. The other
/// lines of a longer frame are taken when it is written.
pub const LANE_OWNED_BYTES: usize = 64 << 10;
/// Cache lines taken at once while a side busy-polls, by a gateway after each poll that found nothing and by the daemon
/// after each round of polls: a third of a microsecond.
pub const LANE_LINES_PER_POLL: usize = 16;
/// Bytes before a lane's rings: positions and wait flags, each on cache lines of its own.
pub const LANE_CONTROL_BYTES: usize = 4 << 10;
/// Polls of silent lanes in one round, over all busy-polled lanes of a core, before the core serves its connections: a
/// microsecond.
pub const POLLS_PER_ROUND: u32 = 64;
/// The same if one lane or socket had all of the last work: five microseconds.
pub const POLLS_PER_ROUND_ALONE: u32 = 256;
/// Pieces of work in a row from one lane or socket before it is polled longer.
pub const POLLS_ALONE_AFTER: u32 = 8;
/// Polls of a lane that cost as much as one try to read from a socket.
pub const SOCKET_POLL_COST: u32 = 16;
/// Polls of a silent lane between two reads of the clock.
pub const LANE_POLLS_PER_CLOCK: u32 = 16;
/// How long a gateway may not read its socket while the daemon sends it a lane, milliseconds.
pub const LANE_HAND_OVER_MS_MAX: u64 = 1_000;
/// Pause before that is retried, milliseconds.
pub const LANE_HAND_OVER_RETRY_MS: u64 = 1;
/// First back-off before the daemon tries again to free the memory of ended lanes that gateways still hold,
/// milliseconds. Doubles up to [`LANE_RECLAIM_BACK_OFF_MS_MAX`].
pub const LANE_RECLAIM_BACK_OFF_MS_MIN: u64 = 1;
/// See [`LANE_RECLAIM_BACK_OFF_MS_MIN`].
pub const LANE_RECLAIM_BACK_OFF_MS_MAX: u64 = 250;
/// Bytes of a bell taken by one read; all mean the same.
pub const LANE_BELL_BYTES: usize = 256;

const _: () = assert!(LANE_RING_BYTES_MIN.is_power_of_two() && LANE_RING_BYTES_CEILING.is_power_of_two());
const _: () = assert!(LANE_RING_BYTES_DEFAULT.is_power_of_two());
const _: () =
    assert!(LANE_RING_BYTES_MIN <= LANE_RING_BYTES_DEFAULT && LANE_RING_BYTES_DEFAULT <= LANE_RING_BYTES_CEILING);
// Whole pages, so that a ring can be mapped apart from the words before it.
const _: () = assert!(LANE_CONTROL_BYTES.is_multiple_of(4 << 10) && LANE_RING_BYTES_MIN.is_multiple_of(4 << 10));
const _: () = assert!(LANE_RING_BYTES_MIN as usize > super::FRAME_HEADER_BYTES, "a ring holds at least a header");
const _: () = assert!(LANE_POLLS_PER_CLOCK <= POLLS_PER_ROUND && POLLS_PER_ROUND <= POLLS_PER_ROUND_ALONE);
const _: () = assert!(LANE_PUBLISHED_BYTES > 0 && LANE_PUBLISHED_BYTES.is_multiple_of(8));
const _: () = assert!(SOCKET_POLL_COST < POLLS_PER_ROUND_ALONE);
const _: () = assert!(LANES_CEILING <= super::CONNECTIONS_MAX as u64, "every lane has a connection");

// ---- Clients ---------------------------------------------------------------------------------------------

/// Default number of requests in flight on one connection. Further ones wait within their own deadlines.
pub const CLIENT_IN_FLIGHT_MAX_DEFAULT: usize = 1024;
/// Reports that wait until the daemon is back. Beyond it the oldest are forgotten and counted; their bookings end by
/// age.
pub const CLIENT_REPORTS_STORED_MAX: usize = 1 << 16;
/// How long a client remembers what it has freed, to free it once more at a daemon that crashed, milliseconds. It exceeds
/// [`BOOKINGS_FOLDER_IMAGE_MS`](super::BOOKINGS_FOLDER_IMAGE_MS), and with it the default of `bookings_image_ms`.
pub const CLIENT_FREES_KEPT_MS: u64 = 15_000;
/// Freed bookings that a client remembers. Of more, the oldest are forgotten.
pub const CLIENT_FREES_KEPT_MAX: usize = 1 << 14;
/// Default timeout of a call, connecting included, milliseconds.
pub const CLIENT_TIMEOUT_MS_DEFAULT: u64 = 1_000;
/// First back-off after a daemon did not answer, milliseconds. Doubles each time.
pub const CLIENT_BACK_OFF_MS_MIN: u64 = 50;
/// Longest back-off after a daemon did not answer, milliseconds.
pub const CLIENT_BACK_OFF_MS_MAX: u64 = 2_000;
/// Spaces that a client reads in a hello, and those that it remembers of all daemons so far: far more than any daemon has.
pub const CLIENT_SPACES_MAX: usize = 4096;
/// Bytes of the pages of one fleet: more than the largest fleet has.
pub const CLIENT_FLEET_BYTES_MAX: usize = 2 * super::FRAME_BODY_BYTES_CEILING as usize;
/// Shortest time between two checks of the connection by the blocking client, milliseconds.
pub const CLIENT_CHECK_AFTER_MS: u64 = 1;
/// Share of a call's timeout that its booking may wait in the daemon's queue, percent: the daemon must refuse before
/// the client takes its silence for a failure.
pub const CLIENT_QUEUE_SHARE_PERCENT: u32 = 80;
/// Default number of leading tokens by which the fallback chooses a worker.
pub const FALLBACK_PREFIX_TOKENS_DEFAULT: usize = 4096;

const _: () = assert!(CLIENT_BACK_OFF_MS_MIN <= CLIENT_BACK_OFF_MS_MAX);
const _: () = assert!(CLIENT_QUEUE_SHARE_PERCENT < 100);
const _: () = assert!(CLIENT_SPACES_MAX >= 16 * super::SPACES_MAX);
const _: () = assert!(FALLBACK_PREFIX_TOKENS_DEFAULT <= super::PROMPT_TOKENS_MAX);
const _: () = assert!(CLIENT_IN_FLIGHT_MAX_DEFAULT <= CLIENT_REPORTS_STORED_MAX);
