//! The limits of the process as a whole: the memory that its parts reserve and take at most, when the daemon sheds, and
//! when a thread counts as stalled. `crate::budget` divides the memory.

use super::{
    CONNECTIONS_MIN, CORE_RECEIVE_BYTES_MAX, DUMP_PARTS_MAX, DUMP_SLICE_BLOCKS, HELD_BYTES_MAX, HTTP_BODIES_BYTES_MAX,
    HTTP_RECORD_BYTES_MAX, HTTP_RECORDS_MAX, HTTP_REPLIES_BYTES_MAX, HTTP_SELECTIONS_BYTES_MAX,
    JOURNAL_IDENTITIES_PER_WORKER, RECEIVE_BUFFER_BYTES_MIN, RECOVERY_HELD_BYTES_MAX, REPLAY_READ_AHEAD_BYTES_MAX,
    REPLAYS_AT_ONCE_MAX, REPLY_BUFFER_BYTES_IDLE, SHARD_MEMORY_BYTES_MIN, SNAPSHOT_BUFFER_BYTES,
    SNAPSHOT_LOADS_AT_ONCE_MAX, SNAPSHOT_SECTION_BYTES_MAX, ZMQ_MESSAGE_BYTES_MAX,
};

// ---- The budget -------------------------------------------------------------------------------------------

/// Share of the memory that the machine or its cgroup allows, unless `process.memory_bytes_max` is configured, percent.
/// The rest is for other processes, the kernel's socket buffers, and the allocator.
pub const MEMORY_SHARE_PERCENT: u64 = 75;
/// Lowest configurable budget, bytes.
pub const MEMORY_BYTES_MIN: u64 = 64 << 20;
/// Highest configurable budget, bytes.
pub const MEMORY_BYTES_CEILING: u64 = 1 << 46;
/// How far the accounts may exceed the budget, percent: a part may exceed its bound by the last thing that it took, and
/// by what it took since it was last counted.
pub const MEMORY_MARGIN_PERCENT: u64 = 5;

// ---- What parts reserve and take at most ------------------------------------------------------------------

/// Code, libraries, what every daemon allocates at its start, and the chunk that is mapped ahead of all shards, bytes.
pub const PROCESS_BYTES: u64 = 24 << 20;
/// Stack and heap that each thread touches, bytes.
pub const THREAD_BYTES: u64 = 256 << 10;
/// Threads beside serving and ingest threads: control, HTTP, metrics, predictor, journal, snapshots, loads, memory,
/// watchdog, and those that wait for files, names and engines.
pub const THREADS_BESIDE: u64 = 32;
/// Bytes of an affinity session's entry, bound or not.
pub const AFFINITY_SESSION_BYTES: u64 = 40;
/// Bytes of the tables' entries about one worker: its record, counters, load and learnt figures.
pub const WORKER_TABLE_BYTES: u64 = 16 << 10;
/// The most memory of a shard's index of one space that holds no block, bytes.
pub const EMPTY_SHARD_BYTES: u64 = 288 << 10;
/// A gateway's connection at rest, bytes: its receive buffer, its reply buffer, and its tasks.
pub const CONNECTION_BYTES: u64 = (RECEIVE_BUFFER_BYTES_MIN + REPLY_BUFFER_BYTES_IDLE + (4 << 10)) as u64;
/// Bytes of replies that gateways have not read, for each serving thread.
pub const CORE_REPLIES_BYTES_MAX: u64 = 256 << 20;
/// The least of it, bytes: replies that are larger than any.
pub const CORE_REPLIES_BYTES_MIN: u64 = 4 << 20;
/// Memory of messages of publishers that are being received, or wait to be applied, for each ingest thread, bytes.
pub const SHARD_MESSAGES_BYTES_MAX: u64 = 4 * ZMQ_MESSAGE_BYTES_MAX as u64;
/// The least of it, bytes. One message may take a quarter.
pub const SHARD_MESSAGES_BYTES_MIN: u64 = 8 << 20;
/// Messages of workers that wait during dumps, loads and recoveries, for each ingest thread, bytes.
pub const SHARD_HELD_BYTES_MAX: u64 = (RECOVERY_HELD_BYTES_MAX + HELD_BYTES_MAX) as u64;
/// The least of it, bytes.
pub const SHARD_HELD_BYTES_MIN: u64 = 4 << 20;
/// Replayed batches that were received and not yet applied, for each ingest thread, bytes.
pub const SHARD_REPLAYS_BYTES_MAX: u64 = (REPLAY_READ_AHEAD_BYTES_MAX * REPLAYS_AT_ONCE_MAX) as u64;
/// The least of it, bytes.
pub const SHARD_REPLAYS_BYTES_MIN: u64 = 4 << 20;
/// One part of a dump, bytes: its blocks, and a store for each of them.
pub const DUMP_PART_BYTES: u64 = DUMP_SLICE_BLOCKS as u64 * (16 + 56);
/// The parts of one dump or load that wait for its receiver, bytes.
pub const DUMP_BYTES: u64 = (DUMP_PARTS_MAX as u64 + 1) * DUMP_PART_BYTES;
/// Memory of queued requests, least, bytes. The most is [`QUEUE_BYTES_MAX`](super::QUEUE_BYTES_MAX).
pub const QUEUE_BYTES_MIN: u64 = 2 << 20;
/// Memory of one booking besides the blocks of its prompt, bytes: its record, its links, its name among live and ended
/// ones, and its place in its session.
pub const BOOKING_BYTES: u64 = 256;
/// Memory of what one other router says of its bookings, bytes: a gauge for each of
/// [`WORKERS_MAX`](super::WORKERS_MAX) workers in the load, and twice as many as they were received.
pub const ROUTER_BYTES: u64 = 4 << 20;
/// Bookings that any budget has room for.
pub const BOOKINGS_MIN: u64 = 1 << 13;
/// Words for prompts in flight that any budget has room for.
pub const ACTIVE_WORDS_MIN: u64 = 1 << 18;
/// Memory of the facts about one worker in a decision that waits for the journal, or of the identities of its prompt that
/// weigh as much, bytes.
pub const JOURNAL_WORKER_BYTES: u64 = 8 * JOURNAL_IDENTITIES_PER_WORKER as u64;
/// Memory of an ended booking that may wait for the journal, bytes.
pub const ENDED_BOOKING_BYTES: u64 = 144;
/// Workers in the waiting decisions of one thread, least: one decision about a fleet of this size.
pub const JOURNAL_WAITING_WORKERS_MIN: u64 = super::WORKERS_MAX as u64;
/// Memory of HTTP bodies, replies, selections and records of workers, most, bytes.
pub const HTTP_BYTES_MAX: u64 = HTTP_BODIES_BYTES_MAX
    + (HTTP_REPLIES_BYTES_MAX + HTTP_SELECTIONS_BYTES_MAX) as u64
    + (26 << 20)
    + (17 << 20)
    + (HTTP_RECORDS_MAX * HTTP_RECORD_BYTES_MAX / 4) as u64;
/// The least of it, bytes, besides the largest body.
pub const HTTP_BYTES_MIN: u64 = 8 << 20;
/// Metrics pages in memory, most, bytes. A page with all metrics of 4096 workers has 27 MB.
pub const METRICS_PAGES_BYTES_MAX: u64 = 256 << 20;
/// The least of it, bytes.
pub const METRICS_PAGES_BYTES_MIN: u64 = 1 << 20;
/// Buffers of the snapshot that is written and of those that are loaded, bytes.
pub const SNAPSHOTS_BYTES: u64 =
    (1 + SNAPSHOT_LOADS_AT_ONCE_MAX as u64) * (SNAPSHOT_BUFFER_BYTES + 2 * SNAPSHOT_SECTION_BYTES_MAX) as u64;
/// The index of all spaces, least, bytes, besides what empty shards take.
pub const INDEX_BYTES_MIN: u64 = 2 * SHARD_MEMORY_BYTES_MIN;
/// Memory that a shard draws ahead of its stores, bytes: blocks of all kinds, each with a node of its own, take less.
pub const INDEX_AHEAD_BYTES: u64 = 8 << 20;
/// The last part of the index's memory, percent: only workers within their equal share of it may take it, so that the
/// largest workers cannot use up what the others need before the daemon sheds.
pub const INDEX_LAST_PERCENT: u64 = 3;
/// Blocks that a shard stores before it counts its memory again.
pub const INDEX_AHEAD_BLOCKS: u64 = 4096;

// ---- Ending threads -----------------------------------------------------------------------------------------

/// How often a stop with a deadline looks whether a thread has ended, milliseconds.
pub const ENDED_LOOK_EVERY_MS: u64 = 1;

// ---- Stalled threads --------------------------------------------------------------------------------------

/// Longest configurable round of a thread, milliseconds.
pub const STALLED_MS_CEILING: u64 = 3_600_000;

// ---- Shedding ---------------------------------------------------------------------------------------------

/// How often the daemon compares its memory with the budget, milliseconds.
pub const MEMORY_LOOK_EVERY_MS: u64 = 100;
/// How often it reads the process's own resident memory, milliseconds.
pub const RESIDENT_READ_EVERY_MS: u64 = 1000;
/// Shares of the budget at which the daemon begins to refuse new connections, to refuse dumps, to drop predictions, and
/// to refuse new blocks of the largest worker, percent.
pub const SHED_AT_PERCENT: [u64; 4] = [85, 88, 91, 94];
/// Shares of the budget below which it takes the same things up again, percent.
pub const RESUME_BELOW_PERCENT: [u64; 4] = [80, 83, 86, 89];
/// Looks in a row below that share before a thing is taken up again.
pub const RESUME_AFTER_LOOKS: u32 = 10;

const _: () = assert!(THREAD_BYTES * THREADS_BESIDE < MEMORY_BYTES_MIN);
const _: () = assert!(MEMORY_SHARE_PERCENT < 100);
const _: () = assert!(CONNECTIONS_MIN as u64 * CONNECTION_BYTES < MEMORY_BYTES_MIN / 4);
const _: () = assert!(CORE_RECEIVE_BYTES_MAX as u64 <= MEMORY_BYTES_CEILING);
const _: () = assert!(RESIDENT_READ_EVERY_MS.is_multiple_of(MEMORY_LOOK_EVERY_MS));
const _: () = {
    let mut at = 0;
    while at < SHED_AT_PERCENT.len() {
        assert!(RESUME_BELOW_PERCENT[at] < SHED_AT_PERCENT[at], "or the daemon would shed and resume in turn");
        assert!(at == 0 || SHED_AT_PERCENT[at - 1] < RESUME_BELOW_PERCENT[at] + 5, "in order");
        at += 1;
    }
};
const _: () = assert!(SHED_AT_PERCENT[3] + MEMORY_MARGIN_PERCENT < 100);
const _: () = assert!(SHED_AT_PERCENT[3] + INDEX_LAST_PERCENT < 100, "or no worker could get so far");

/// How often the daemon tells its service manager how it is, milliseconds; more often if that watches it closely.
pub const SERVICE_STATUS_EVERY_MS: u64 = 500;

// ---- What administration shows ------------------------------------------------------------------------------

/// Names and values in one page of the running configuration, bytes; a page has at least one table, and the first one also
/// the variables of the environment.
pub const CONFIG_PAGE_BYTES_MAX: usize = 256 << 10;
/// The value before a change, and the value after it, in one audit line, bytes.
pub const AUDIT_TEXT_BYTES_MAX: usize = 4096;
