//! How lost batches are fetched again: what may wait meanwhile, how many are asked at once, how often and for how long.

/// Messages of a worker that wait while it is dumped, loaded or recovered. One more ends the dump or load; while it is
/// recovered the oldest is dropped, which the replay brings too.
pub const HELD_MESSAGES_MAX: usize = 1 << 14;
/// Payload bytes of those messages.
pub const HELD_BYTES_MAX: usize = 64 << 20;
/// Payload bytes that wait for the recovery of all workers of a shard.
pub const RECOVERY_HELD_BYTES_MAX: usize = 256 << 20;
/// Replays that a shard has asked for and not yet received, each over a socket of its own. An idle engine takes up to
/// 100 ms to answer, so this many are what lets a thousand workers connect again within seconds.
pub const REPLAYS_AT_ONCE_MAX: usize = 16;
/// Bytes that the replays of one shard are reckoned to have under way; beyond it none is begun.
pub const REPLAYS_UNDER_WAY_BYTES_MAX: usize = 256 << 20;
/// Bytes that a replay is reckoned at before the first of its worker has ended.
pub const REPLAY_BYTES_GUESSED: usize = 16 << 20;
/// Bytes that a replay may bring; it is then broken off and asked for again from where it stands.
pub const REPLAY_BYTES_MAX: usize = 256 << 20;
/// How long one replay, with its snapshot, may take from the question to its end, milliseconds; it is then broken off
/// and asked for again, as one that was not answered.
pub const REPLAY_WHOLE_MS_MAX: u64 = 600_000;
/// Bytes that a replay with a snapshot may bring: the largest snapshot and the batches behind it.
pub const REPLAY_SNAPSHOT_BYTES_MAX: usize = super::RELAY_SNAPSHOT_BYTES_MAX + REPLAY_BYTES_MAX;
/// Replayed batches taken for one worker before the next has its turn.
pub const REPLAY_TURN_BATCHES_MAX: usize = 64;
/// Bytes of those batches.
pub const REPLAY_TURN_BYTES_MAX: usize = 1 << 20;
/// How long an engine may take to begin to answer, milliseconds. It answers between two batches of its own.
pub const REPLAY_FIRST_MS_MAX: u64 = 3_000;
/// How long it may take from one batch to the next or to the end, milliseconds.
pub const REPLAY_NEXT_MS_MAX: u64 = 2_000;
/// Replays in a row that bring nothing, after which what is missing counts as lost.
pub const REPLAY_TRIES_MAX: u32 = 4;
/// The same of a publisher that has never answered and of which nothing is held: nothing is lost by going on with what
/// comes, and it is asked from 0 again later.
pub const REPLAY_SILENT_TRIES_MAX: u32 = 2;
/// The same where an answer begins behind what was asked for: it is gone from the engine's buffer.
pub const REPLAY_LATE_TRIES_MAX: u32 = 2;
/// Replays of one recovery, also where each brings something.
pub const REPLAYS_PER_RECOVERY_MAX: u32 = 64;
/// The shortest wait before a replay is asked for again, milliseconds; four times as long after each that brings nothing.
pub const REPLAY_BACK_OFF_MS_MIN: u64 = 50;
/// How long after batches were lost for good their publisher is asked for all of its life, milliseconds; twice as long
/// after each time that brings nothing. An answer costs the engine its whole buffer.
pub const RENEWAL_AFTER_MS_MIN: u64 = 10_000;
/// Those waits double at most so often: to about eleven minutes.
pub const RENEWAL_DOUBLINGS_MAX: u32 = 6;
/// How long a worker's live messages wait for a publisher that does not answer at all, milliseconds, beside the wait for
/// a place: its tries and what lies between them.
pub const REPLAY_UNANSWERED_MS_MAX: u64 = unanswered_ms(REPLAY_TRIES_MAX);
/// The same for one that has never answered and of which nothing is held.
pub const REPLAY_SILENT_MS_MAX: u64 = unanswered_ms(REPLAY_SILENT_TRIES_MAX);

/// So many tries that nothing comes of, and the waits between them, of which each is four times the one before.
const fn unanswered_ms(tries: u32) -> u64 {
    tries as u64 * REPLAY_FIRST_MS_MAX + REPLAY_BACK_OFF_MS_MIN * ((1 << (2 * tries)) - 4) / 3
}

/// A quiet worker's probes come up to this many doublings apart.
pub const PROBE_DOUBLINGS_MAX: u32 = 3;

const _: () = assert!(REPLAY_SILENT_TRIES_MAX <= REPLAY_TRIES_MAX);
const _: () = assert!(REPLAY_BYTES_GUESSED <= REPLAYS_UNDER_WAY_BYTES_MAX);
