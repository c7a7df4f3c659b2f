//! Bounds of shared-memory lanes.

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
