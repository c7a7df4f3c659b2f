//! Limits of what a restart keeps of bookings.

use super::{BOOKINGS_MAX, PROMPT_BLOCKS_MAX};

// ---- Taking them, under the bookings' lock ----------------------------------------------------------------

/// Slots of bookings that are checked before the lock is released for others.
pub const KEPT_SLOTS_PER_LOCK_MAX: usize = 4096;
/// Bookings that are copied before the lock is released for others.
pub const KEPT_BOOKINGS_PER_LOCK_MAX: usize = 64;
/// Blocks of prompts after which the lock is released for others. One prompt may have more.
pub const KEPT_BLOCKS_PER_LOCK_MAX: usize = 4096;
/// Workers whose loads are copied before the lock is released for others.
pub const KEPT_WORKERS_PER_LOCK_MAX: usize = 64;
/// Buckets of session bindings that are copied at once. They have no lock.
pub const KEPT_BUCKETS_AT_ONCE: usize = 1024;

// ---- The image --------------------------------------------------------------------------------------------

/// Blocks of prompts in one image. Prompts beyond are kept as a number of blocks.
pub const KEPT_BLOCKS_MAX: usize = 1 << 25;
/// Bindings of sessions in one image. Further ones are not kept.
pub const KEPT_BINDINGS_MAX: usize = 1 << 20;
/// Workers in one image: those of a run, and absent ones.
pub const KEPT_WORKERS_MAX: usize = 2 * super::WORKERS_MAX;
/// The largest section of an image, bytes: the longest prompt behind a full slice.
pub const KEPT_SECTION_BYTES_MAX: usize = (PROMPT_BLOCKS_MAX + KEPT_BLOCKS_PER_LOCK_MAX) * 16 + (64 << 10);
/// The largest image, bytes.
pub const BOOKINGS_IMAGE_BYTES_MAX: usize = 768 << 20;
/// Blocks of prompts that a start compares with others, so that shared ones count once. Prompts beyond count in full.
pub const KEPT_PLACED_BLOCKS_MAX: u64 = 1 << 27;
/// Generations of bookings that a restart skips: an earlier run may have given them out after its last image.
pub const KEPT_GENERATIONS_GAP: u64 = 1 << 40;
/// Ranges of generations in an image that earlier runs may have given out to bookings that no image has: of the last
/// restarts. Older ranges are joined.
pub const KEPT_LOST_RANGES_MAX: usize = 64;
/// Numbers of sessions that a restart skips.
pub const KEPT_SESSIONS_GAP: u32 = 1 << 20;
/// Versions of the fleet that a restart skips.
pub const KEPT_FLEET_VERSIONS_GAP: u64 = 1 << 32;
/// How long the daemon waits for its last image when it stops, milliseconds.
pub const BOOKINGS_LAST_IMAGE_MS_MAX: u64 = 5_000;
/// Longest configurable time between two images, milliseconds.
pub const BOOKINGS_IMAGE_MS_CEILING: u64 = 3_600_000;
/// While the service manager keeps images, the folder of snapshots gets one this long after the last one at the earliest,
/// milliseconds: nothing tells the daemon whether the service manager has stored what it was given.
pub const BOOKINGS_FOLDER_IMAGE_MS: u64 = 10_000;
/// The pause between two images is at least this many times the processor time of the last one, so that images take a
/// bounded share of a processor. Waits for the disk do not count: a longer pause would cost more bookings in a crash.
pub const BOOKINGS_IMAGE_PAUSE_TIMES: u32 = 20;

const _: () = assert!(KEPT_SECTION_BYTES_MAX <= u32::MAX as usize);
// A block takes 16 bytes at most, with a run of its own; a booking 160, with a session of its own; a binding 48.
const _: () = assert!(
    KEPT_BLOCKS_MAX * 16 + BOOKINGS_MAX * 160 + KEPT_BINDINGS_MAX * 48 <= BOOKINGS_IMAGE_BYTES_MAX,
    "the largest image can be read"
);
