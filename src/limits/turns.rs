//! What one connection may take of its core, and a core of its processor.

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
