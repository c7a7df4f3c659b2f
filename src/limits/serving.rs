//! Limits of clients and connections: access, receive buffers, descriptors, fairness quanta, shm lanes, and the clients of
//! this package.

use super::{ADMIN_CONNECTIONS_MAX, HTTP_CONNECTIONS_MAX, METRICS_CONNECTIONS_MAX, SERVERS_ASKED_MAX};

// ---- Access to sockets -----------------------------------------------------------------------------------

/// Users, and as many groups, that may be named as those who may connect to a socket.
pub const ALLOWED_ACCOUNTS_MAX: usize = 256;
/// Groups of a peer's process: what the kernel allows.
pub const PEER_GROUPS_MAX: usize = 1 << 16;
/// Longest configurable wait for the rest of a frame, milliseconds.
pub const FRAME_TIMEOUT_MS_CEILING: u64 = 3_600_000;
/// How often is looked for connections that owe the rest of a frame: so many times within the time they have for it.
pub const OVERDUE_LOOKS: u32 = 8;

/// Bytes that the receive buffers of one core's connections may take together, each beyond its minimum. More only where
/// two frames of the configured size need it.
pub const CORE_RECEIVE_BYTES_MAX: usize = 256 << 20;

/// Largest body answered on the admin socket, whose requests are small: what all its connections may send at once is
/// bounded by that.
pub const ADMIN_FRAME_BODY_BYTES_MAX: u32 = 1 << 20;

const _: () = assert!(OVERDUE_LOOKS > 0);
const _: () = assert!(super::FRAME_BODY_BYTES_MAX_DEFAULT as usize * 16 <= CORE_RECEIVE_BYTES_MAX);

// ---- File descriptors ------------------------------------------------------------------------------------

/// A publisher takes its connection and that of a replay.
pub const DESCRIPTORS_PER_PUBLISHER: u64 = 2;
/// A gateway's connection takes its socket, and the same once more while it waits for room to write.
pub const DESCRIPTORS_PER_CONNECTION: u64 = 2;
/// A lane takes its memory and its bell, and the gateway's ends of both until the gateway has them.
pub const DESCRIPTORS_PER_LANE: u64 = 4;
/// A serving thread takes so many: what it waits with, and what wakes it.
pub const DESCRIPTORS_PER_CORE: u64 = 8;
/// An ingest thread takes its event loop (twice: connections that come by themselves have their own handle), what wakes it,
/// and the names that it looks up.
pub const DESCRIPTORS_PER_SHARD: u64 = 16;
/// Kept for the daemon itself: listeners, files, the connections of the other ports (those of administration twice, as
/// above), and descriptors that are about to be closed.
pub const DESCRIPTORS_RESERVED: u64 =
    128 + (HTTP_CONNECTIONS_MAX + METRICS_CONNECTIONS_MAX + 2 * ADMIN_CONNECTIONS_MAX + SERVERS_ASKED_MAX) as u64;
/// More are not asked for, however high the hard limit is.
pub const DESCRIPTORS_WANTED_MAX: u64 = 1 << 20;
/// Connections that a daemon has room for, or does not start.
pub const CONNECTIONS_MIN: usize = 64;

const _: () = assert!(CONNECTIONS_MIN <= super::CONNECTIONS_MAX);
// Everything at its most fits under what is asked for; events and loads of a worker come by a publisher each.
const _: () = assert!(
    DESCRIPTORS_RESERVED
        + super::CORES_MAX as u64 * DESCRIPTORS_PER_CORE
        + super::SHARDS_MAX as u64 * DESCRIPTORS_PER_SHARD
        + super::CONNECTIONS_MAX as u64 * DESCRIPTORS_PER_CONNECTION
        + super::LANES_CEILING * DESCRIPTORS_PER_LANE
        + 2 * super::WORKERS_MAX as u64 * DESCRIPTORS_PER_PUBLISHER
        <= DESCRIPTORS_WANTED_MAX
);

// ---- Fairness quanta of connections ----------------------------------------------------------------------

/// Reads that one connection may take in a row before the others of its core have their turn.
pub const READS_PER_TURN_MAX: u32 = 16;
/// Times that one connection may find room for the rest of a reply in a row before the others of its core have their turn.
pub const WRITES_PER_TURN_MAX: u32 = 16;
/// Frames of one connection that may be answered in a row before the others of its core have their turn.
pub const FRAMES_PER_TURN_MAX: u32 = 32;
/// Bytes of such frames, but for the last.
pub const REQUEST_BYTES_PER_TURN_MAX: usize = 256 << 10;
/// Bytes of the replies to them, but for the last.
pub const REPLY_BYTES_PER_TURN_MAX: usize = 128 << 10;
/// Work of such frames, but for the last, in blocks of a prompt that are hashed and looked up: some 10 ns each.
pub const WORK_PER_TURN_MAX: u64 = 1 << 15;
/// What looking at one worker counts in that, in blocks.
pub const WORKER_WORK: u64 = 4;
/// Bytes of late replies that a connection may leave unread; with more it is closed.
pub const REPLY_BUFFER_BYTES_MAX: usize = 4 << 20;
/// How long a peer may leave what is written to it unread, milliseconds, unless it is configured otherwise.
pub const UNREAD_MS_MAX_DEFAULT: u64 = 30_000;
/// The longest that can be configured for that, milliseconds.
pub const UNREAD_MS_CEILING: u64 = 3_600_000;
/// The longest that a core can be configured to look for work instead of sleeping, microseconds.
pub const SPIN_US_CEILING: u32 = 1_000_000;
/// A core that sleeps looks for work every so many times, to see whether it would come soon.
pub const SPIN_PROBE_EVERY: u32 = 64;
/// How long a write that no descriptor is left to wait by rests before it tries again, milliseconds.
pub const WRITE_REST_MS: u64 = 1;
/// What a connection's reply buffer keeps once its replies are written.
pub const REPLY_BUFFER_BYTES_KEPT: usize = 256 << 10;
/// How often a core looks whether the fleet has changed that one of its connections watches, milliseconds.
pub const WATCH_LOOK_MS: u64 = 50;

/// How long it rests between two pages of a fleet that somebody is being sent, milliseconds.
pub const WATCH_PAGE_REST_MS: u64 = 1;

const _: () = assert!(WATCH_PAGE_REST_MS <= WATCH_LOOK_MS);
const _: () = assert!(REPLY_BYTES_PER_TURN_MAX <= REPLY_BUFFER_BYTES_KEPT);
const _: () = assert!(
    FRAMES_PER_TURN_MAX as u64 * (720 + 64 * WORKER_WORK) <= WORK_PER_TURN_MAX,
    "prompts of usual length in a fleet of usual size take a turn of as many frames as there may be"
);
const _: () = assert!(REPLY_BUFFER_BYTES_KEPT <= REPLY_BUFFER_BYTES_MAX);
const _: () = assert!(UNREAD_MS_MAX_DEFAULT <= UNREAD_MS_CEILING);

// ---- Shm lanes -------------------------------------------------------------------------------------------

/// Lanes of one daemon that may be configured, over all cores.
pub const LANES_CEILING: u64 = 4096;
/// Smallest ring, bytes: a page.
pub const LANE_RING_BYTES_MIN: u32 = 4 << 10;
/// What each ring of a lane has when its gateway does not say, bytes; less where less is allowed.
pub const LANE_RING_BYTES_DEFAULT: u32 = 256 << 10;
/// Largest ring that may be configured, bytes.
pub const LANE_RING_BYTES_CEILING: u32 = 64 << 20;
/// Bytes of a long frame that are written into a ring before the other side is told of them.
pub const LANE_PUBLISHED_BYTES: usize = 4 << 10;
/// Bytes before a lane's rings: positions and who waits for what, each on cache lines of its own.
pub const LANE_CONTROL_BYTES: usize = 4 << 10;
/// Looks at silent lanes, over all lanes of a core that are looked at, before the core's connections have their turn: a
/// microsecond.
pub const LOOKS_PER_TURN: u32 = 64;
/// The same where one lane or socket had all of the last work: five microseconds.
pub const LOOKS_PER_TURN_ALONE: u32 = 256;
/// Pieces of work in a row that are one lane's or socket's before that is looked at longer.
pub const LOOKS_ALONE_AFTER: u32 = 8;
/// Looks at a lane that cost as much as one try to read from a socket.
pub const SOCKET_LOOK_COST: u32 = 16;
/// Looks at a silent lane between two looks at the clock.
pub const LANE_LOOKS_PER_CLOCK: u32 = 16;
/// How long a gateway's socket may take nothing while it is to be given its lane, milliseconds.
pub const LANE_HAND_OVER_MS_MAX: u64 = 1_000;
/// How long to rest before trying that again, milliseconds.
pub const LANE_HAND_OVER_REST_MS: u64 = 1;
/// How long to rest before it is tried again to give back the memory of lanes that have ended and that gateways still hold,
/// milliseconds: at first, doubled each time, and at most.
pub const LANE_RECLAIM_REST_MS_MIN: u64 = 1;
/// See [`LANE_RECLAIM_REST_MS_MIN`].
pub const LANE_RECLAIM_REST_MS_MAX: u64 = 250;
/// Rings of a bell that are taken by one read; all mean the same.
pub const LANE_BELL_BYTES: usize = 256;

const _: () = assert!(LANE_RING_BYTES_MIN.is_power_of_two() && LANE_RING_BYTES_CEILING.is_power_of_two());
const _: () = assert!(LANE_RING_BYTES_DEFAULT.is_power_of_two());
const _: () =
    assert!(LANE_RING_BYTES_MIN <= LANE_RING_BYTES_DEFAULT && LANE_RING_BYTES_DEFAULT <= LANE_RING_BYTES_CEILING);
// Pages, so that a ring and what is before it can be mapped apart.
const _: () = assert!(LANE_CONTROL_BYTES.is_multiple_of(4 << 10) && LANE_RING_BYTES_MIN.is_multiple_of(4 << 10));
const _: () = assert!(LANE_RING_BYTES_MIN as usize > super::FRAME_HEADER_BYTES, "a ring holds at least a header");
const _: () = assert!(LANE_LOOKS_PER_CLOCK <= LOOKS_PER_TURN && LOOKS_PER_TURN <= LOOKS_PER_TURN_ALONE);
const _: () = assert!(LANE_PUBLISHED_BYTES > 0 && LANE_PUBLISHED_BYTES.is_multiple_of(8));
const _: () = assert!(SOCKET_LOOK_COST < LOOKS_PER_TURN_ALONE);
const _: () = assert!(LANES_CEILING <= super::CONNECTIONS_MAX as u64, "every lane has a connection");

// ---- Clients ---------------------------------------------------------------------------------------------

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
