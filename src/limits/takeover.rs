//! Limits of a daemon that takes over from another one.

use super::WORKERS_MAX;

// ---- What passes between the two --------------------------------------------------------------------------

/// The largest message, bytes. Everything long goes in a file.
pub const TAKEOVER_MESSAGE_BYTES_MAX: usize = 8 << 10;
/// The most descriptors beside one message: listening sockets, locks of folders, and files.
pub const TAKEOVER_DESCRIPTORS_MAX: usize = 32;
/// The bytes of one worker in the list of workers: its two numbers, the last batch that was applied, and its trust.
pub const TAKEOVER_WORKER_BYTES: usize = 32;
/// The largest list of workers, bytes.
pub const TAKEOVER_WORKERS_BYTES_MAX: usize = WORKERS_MAX * TAKEOVER_WORKER_BYTES;
/// Daemons that may wait to take over while another one does.
pub const TAKEOVER_BACKLOG: i32 = 4;

// ---- Time ---------------------------------------------------------------------------------------------------

/// How long a daemon that connects has for its first message, milliseconds.
pub const TAKEOVER_HELLO_MS_MAX: u64 = 5_000;
/// How long each next message may take, milliseconds: the other daemon starts its threads in between, or loads a worker.
pub const TAKEOVER_STEP_MS_MAX: u64 = 120_000;
/// How long an answer may take, milliseconds. It contains the dump of a worker.
pub const TAKEOVER_ANSWER_MS_MAX: u64 = 60_000;
/// How long one dump may take, milliseconds.
pub const TAKEOVER_DUMP_MS_MAX: u64 = 50_000;
/// How long the threads that decide have to stand still, milliseconds.
pub const TAKEOVER_STAND_MS_MAX: u64 = 500;
/// How long neither daemon decides until the other daemon has taken up the bookings, milliseconds. Then the old one goes on.
pub const TAKEOVER_PAUSE_MS_MAX: u64 = 3_000;
/// How long the old daemon waits for the new one to serve once that may decide, milliseconds. Then it ends all the same.
pub const TAKEOVER_SERVING_MS_MAX: u64 = 10_000;
/// How long the new daemon waits for its connections to engines, and for its sources of workers to name the workers that the
/// old one knows, milliseconds.
pub const TAKEOVER_CONNECT_MS_MAX: u64 = 5_000;
/// How long a subscription takes effect at the engine once it is connected, milliseconds. If it takes longer, the next batch
/// shows a gap, and the worker is taken once more.
pub const TAKEOVER_SUBSCRIBED_MS: u64 = 50;
/// How long the new daemon may be behind the old one before the pause, milliseconds.
pub const TAKEOVER_CATCH_UP_MS_MAX: u64 = 30_000;
/// How long a worker may be trusted less here than at the old daemon before it is taken once more, milliseconds: a replay may
/// prove its blocks meanwhile.
pub const TAKEOVER_PROOF_MS_MAX: u64 = 2_000;
/// The same in the pause, milliseconds. Then the old one goes on, and the pause is tried again.
pub const TAKEOVER_BEHIND_MS_MAX: u64 = 100;
/// How often the new daemon looks whether it has caught up, milliseconds.
pub const TAKEOVER_LOOK_EVERY_MS: u64 = 5;
/// How often a thread that blocks looks whether its daemon's turn has come, milliseconds.
pub const TURN_LOOK_EVERY_MS: u64 = 5;

// ---- Tries --------------------------------------------------------------------------------------------------

/// How often one worker's blocks are tried. Then it begins as after a restart.
pub const TAKEOVER_DUMP_TRIES: u32 = 10;
/// The longest pause between two of these tries, milliseconds. The first is [`TAKEOVER_LOOK_EVERY_MS`], and each next one twice
/// as long: a reason that passes, such as a full queue, has about 1.6 s for it.
pub const TAKEOVER_DUMP_PAUSE_MS_MAX: u64 = 500;
/// How often a worker that is trusted less here is taken once more.
pub const TAKEOVER_RETAKES_MAX: u32 = 2;
/// How often the pause is tried.
pub const TAKEOVER_SWITCH_TRIES: u32 = 5;

const _: () = assert!(TAKEOVER_DUMP_MS_MAX < TAKEOVER_ANSWER_MS_MAX);
const _: () = assert!(TAKEOVER_BEHIND_MS_MAX < TAKEOVER_PAUSE_MS_MAX);
