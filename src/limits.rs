//! Every bound of the daemon, units last. What an operator may change lives in `config` and is checked
//! against these.

mod client;
mod connections;
mod descriptors;
mod http;
mod journal;
mod lane;
mod recovery;
mod turns;
mod zmtp;

pub use client::*;
pub use connections::*;
pub use descriptors::*;
pub use http::*;
pub use journal::*;
pub use lane::*;
pub use recovery::*;
pub use turns::*;
pub use zmtp::*;

/// Bytes of the frame header.
pub const FRAME_HEADER_BYTES: usize = 16;
/// Frames and flatbuffers are padded to this, so that the next header is aligned too.
pub const FRAME_ALIGN_BYTES: usize = 8;
/// A body beyond this cannot be meant: the connection is closed instead of skipping that much.
pub const FRAME_BODY_BYTES_CEILING: u32 = 256 << 20;
/// Largest body answered, unless configured lower or higher (below the ceiling).
pub const FRAME_BODY_BYTES_MAX_DEFAULT: u32 = 8 << 20;
/// What a connection's receive buffer starts with; it grows to one frame of the configured maximum.
pub const RECEIVE_BUFFER_BYTES_MIN: usize = 64 << 10;
/// What the receive buffer of a connection grows to whose peer always has more to be read than fits: what a socket holds,
/// so that many requests in flight are read, and answered, by few system calls.
pub const RECEIVE_BUFFER_BYTES_FILLED: usize = 256 << 10;
/// What a connection's receive buffer keeps between large frames; what is beyond is given back at once.
pub const RECEIVE_BUFFER_BYTES_KEPT: usize = 1 << 20;
/// Reads without a large frame after which a receive buffer shrinks to its minimum.
pub const RECEIVE_BUFFER_READS_KEPT: u32 = 64;
/// Bytes of an error's message or remedy on the wire; what is longer is cut.
pub const ERROR_TEXT_BYTES_MAX: usize = 1 << 10;
/// Bytes of a request beside its prompt, allow-list and multimodal hashes apart.
pub const REQUEST_OVERHEAD_BYTES_MAX: u32 = 64 << 10;
/// Nesting of a frame's tables.
pub const FRAME_TABLE_DEPTH_MAX: usize = 8;
/// Tables in one request.
pub const REQUEST_TABLES_MAX: usize = 1 << 12;
/// Connections of one daemon, over all cores.
pub const CONNECTIONS_MAX: usize = 4096;
/// Connections of the admin socket.
pub const ADMIN_CONNECTIONS_MAX: usize = 64;
/// Connections the kernel keeps waiting for the acceptor.
pub const LISTEN_BACKLOG: i32 = 1024;
/// Entries of a core's submission queue; its completion queue is twice that.
pub const URING_ENTRIES: u32 = 4096;
/// How long the io_uring probe may take, milliseconds.
pub const IO_PROBE_MS_MAX: u64 = 500;
/// How long a core waits for connections that were cut at the drain deadline, milliseconds.
pub const DRAIN_GRACE_MS: u64 = 200;
/// How long the acceptor rests after a failed accept, milliseconds.
pub const ACCEPT_REST_MS: u64 = 100;
/// Log lines of one sort that peers may cause within [`LOG_WINDOW_MS`].
pub const LOG_LINES_PER_WINDOW_MAX: u32 = 10;
/// Length of the window in which such lines are counted, milliseconds.
pub const LOG_WINDOW_MS: u64 = 10_000;
/// Longest wait for another daemon that is binding a socket in the same directory, milliseconds.
pub const BIND_LOCK_MS_MAX: u64 = 2_000;
/// How long to rest before asking for that lock again, milliseconds.
pub const BIND_LOCK_REST_MS: u64 = 10;
/// Open connections to the metrics port. Beyond it a new one takes the place of the one whose peer has been waited for longest.
pub const METRICS_CONNECTIONS_MAX: usize = 64;
/// How long a connection to the metrics port may stay, milliseconds: it holds one of the few places.
pub const METRICS_CONNECTION_MS_MAX: u64 = 10_000;
/// Metrics pages in memory: the newest, and older ones that are still being read. While there are as many, the newest is
/// served and no other is made.
pub const METRICS_PAGES_MAX: usize = 4;
/// How long a metrics page is served before another is made, milliseconds.
pub const METRICS_PAGE_MS_MIN: u64 = 250;
/// A page is also served for this many times the time it took to make: a flood of scrapes takes a quarter of one processor.
pub const METRICS_PAGE_REST_FACTOR: u32 = 3;
/// How long a page that nobody asks for is kept, milliseconds.
pub const METRICS_PAGE_KEPT_MS: u64 = 10_000;
/// Scrapes that may wait for a page, of both ports.
pub const METRICS_SCRAPES_WAITING_MAX: usize = 512;
/// Names by which the metrics port may be asked.
pub const METRICS_HOSTS_MAX: usize = 64;
/// Messages (connections, drain) that may wait in one core's mailbox.
pub const MAILBOX_MESSAGES_MAX: usize = 1024;
/// Bytes of a Unix socket's path: `sun_path` holds 108 with its terminator.
pub const SOCKET_PATH_BYTES_MAX: usize = 107;
/// Bytes of a host's name.
pub const HOST_BYTES_MAX: usize = 253;
/// Bytes between two dots of a host's name.
pub const HOST_LABEL_BYTES_MAX: usize = 63;
/// Characters that a message quotes of a text that is no endpoint.
pub const ENDPOINT_SHOWN_CHARS_MAX: usize = 120;
/// Serving threads of one daemon.
pub const CORES_MAX: usize = 256;
/// Longest configurable wait for replies under way when the daemon stops, milliseconds.
pub const DRAIN_MS_CEILING: u64 = 600_000;

/// Tokens of one prompt.
pub const PROMPT_TOKENS_MAX: usize = 1 << 21;
/// Blocks of one prompt.
pub const PROMPT_BLOCKS_MAX: usize = PROMPT_TOKENS_MAX;
/// Bytes of a LoRA name, salt, request id, model, namespace or client name.
pub const NAME_BYTES_MAX: usize = 256;
/// Bytes of blocks with multimodal objects that a thread copies together, to hash them side by side.
pub const HASH_STAGE_BYTES_MAX: usize = 16 << 10;
/// Multimodal hashes of one prompt.
pub const MEDIA_HASHES_MAX: usize = 1 << 16;
/// Candidates listed in one reply.
pub const CANDIDATES_MAX: usize = WORKERS_MAX;
/// Entries of an allow-list.
pub const ALLOW_LIST_MAX: usize = WORKERS_MAX;
/// Workers in one page of a workers or status reply.
pub const WORKERS_PAGE_MAX: usize = 256;

/// Tokens per block.
pub const BLOCK_SIZE_TOKENS_MAX: u32 = 1 << 16;
/// What a decision by load alone counts as a block while the space's scheme is unknown.
pub const NOMINAL_BLOCK_SIZE_TOKENS: u32 = 16;
/// Workers (ranks) of one daemon.
pub const WORKERS_MAX: usize = 4096;
/// Spaces of one daemon.
pub const SPACES_MAX: usize = 256;
/// Ingest shards of one daemon.
pub const SHARDS_MAX: usize = 64;
/// Blocks bound for one worker over all tiers, unless its record says otherwise. A block that no other worker holds
/// takes about 30 bytes of the index (perf/results): its two hashes, the way from its name to it, slack and nodes.
pub const WORKER_BLOCKS_MAX_DEFAULT: u64 = 16 << 20;
/// Memory of the index that a worker's blocks may take for each of the blocks it is allowed, bytes: about twice what
/// blocks take in chains of usual lengths. Blocks without any chain take some 500 bytes each.
pub const WORKER_BYTES_PER_BLOCK_MAX: u64 = 64;
/// Memory of the index that the blocks of one worker may take, bytes, unless its record allows more blocks than usual.
pub const WORKER_BYTES_MAX_DEFAULT: u64 = WORKER_BLOCKS_MAX_DEFAULT * WORKER_BYTES_PER_BLOCK_MAX;
/// What a block is reckoned to take of the index, bytes: its two hashes, the way from its name to it, and slack.
pub const INDEX_BLOCK_BYTES: u64 = 32;
/// What a node of the index is reckoned to take beside its blocks, bytes: its record, its line with the room that goes
/// with it, and what is left of the two cache lines in which its hashes end.
pub const INDEX_NODE_BYTES: u64 = 480;
/// Blocks that a worker's record may claim or allow.
pub const WORKER_BLOCKS_CEILING: u64 = 1 << 32;
/// Tokens one worker may batch in a step.
pub const BATCHED_TOKENS_CEILING: u64 = 1 << 32;
/// Taints of one worker.
pub const TAINTS_MAX: usize = 64;
/// LoRA adapters of one worker.
pub const LORAS_MAX: usize = 256;
/// Labels that one request requires, and as many that it prefers.
pub const REQUEST_TAINTS_MAX: usize = 32;
/// Ranges of blocks that one request says a shared cache holds.
pub const SHARED_HITS_MAX: usize = 1024;
/// Blocks of one worker that wait for a parent. Also the blocks below
/// removed ones that a worker may have before stores of new blocks are refused.
pub const WORKER_DORMANT_BLOCKS_MAX: usize = 1 << 20;
/// Blocks of one worker that one event, or one slice of a sweep, may move in the index: out of places whose chain is
/// broken, or to places that they waited for.
pub const INDEX_EVENT_MOVES_MAX: usize = 1 << 15;
/// Blocks of one store that the index takes block by block, as it does wherever a worker has several groups, or blocks
/// that wait for a parent. A larger store of this kind is refused. Stores of usual workers are taken in runs, at any size.
pub const INDEX_CAREFUL_BLOCKS_MAX: usize = 1 << 16;
/// Nodes that a clear sweeps itself where more lanes wait for the sweep than [`RETIRED_LANES_MAX`].
pub const INDEX_EVENT_SWEEP_MAX: usize = 1 << 12;
/// Segments of a shard's tables that are made smaller at once while nothing else is going on.
pub const INDEX_IDLE_SHRINKS_MAX: usize = 16;
/// Blocks of one node of the index: what is copied at most when a node grows or two are joined.
pub const NODE_BLOCKS_MAX: usize = 1024;
/// Blocks that may be copied to join two nodes that do not lie side by side.
pub const JOIN_BLOCKS_MAX: usize = 128;
/// Times that a lookup walks before it gives the answer of a walk under which something changed.
pub const LOOKUP_TRIES_MAX: usize = 16;
/// Garbage of one shard that waits for readers, bytes, beyond which nodes are no longer joined.
pub const INDEX_GARBAGE_BYTES_STRAINED: u64 = 16 << 20;
/// Garbage of one shard that waits for readers, bytes, beyond which its ingest thread takes no more batches. What one
/// event leaves comes on top: at most the blocks of a worker, or the table of headers when that grows.
pub const INDEX_GARBAGE_BYTES_CHOKED: u64 = 64 << 20;
/// KV groups of one worker's tier.
pub const GROUPS_MAX: usize = 32;
/// Engine hashes of one worker that may name the same content after the same parent.
pub const ALIASES_MAX: usize = 8;
/// Lanes of one shard that were cleared and not yet swept; beyond it each clear sweeps up to [`INDEX_EVENT_SWEEP_MAX`]
/// nodes itself.
pub const RETIRED_LANES_MAX: usize = 256;

/// Bytes of one event message; what is larger is skipped and counted.
pub const EVENT_MESSAGE_BYTES_MAX: usize = 64 << 20;
/// Blocks of one event batch.
pub const EVENT_BATCH_BLOCKS_MAX: usize = 1 << 20;
/// Tokens of one event batch.
pub const EVENT_BATCH_TOKENS_MAX: usize = 1 << 24;
/// Events of one event batch.
pub const EVENT_BATCH_EVENTS_MAX: usize = 1 << 18;
/// Multimodal objects of one event batch.
pub const EVENT_BATCH_MEDIA_MAX: usize = 1 << 18;
/// Blocks of a repeated root chain that an engine which evicts can have had free without an eviction: the blocks of
/// finished requests that were not full. More, and nothing evicted in its batch: a full report.
pub const REPORT_FREE_BLOCKS_MAX: usize = 8;
/// Bytes of the LoRA names and salts of one event batch.
pub const EVENT_BATCH_TEXT_BYTES_MAX: usize = 16 << 20;
/// Nesting of a msgpack value that is skipped.
pub const MSGPACK_DEPTH_MAX: usize = 16;
/// Payload hashes remembered per stream, to tell a duplicate from another incarnation.
pub const GATE_PAYLOADS_REMEMBERED: usize = 64;
/// Payload hashes of replayed batches remembered per stream until the live stream, which is behind, has passed them.
pub const GATE_REPLAYED_REMEMBERED_MAX: usize = 1 << 14;
/// References of one worker's sliding-window groups to blocks of which no event has said yet what they are, each as often
/// as it was announced: one event may place all of them. Such an event comes in the same batch.
pub const WINDOW_REFERENCES_UNPLACED_MAX: usize = 1 << 16;
/// Blocks of one worker of which it is remembered that a removal left copies of blocks behind them.
pub const COPIES_LEFT_MAX: usize = 1 << 12;
/// Blocks behind one block of which it is remembered that a removal left copies.
pub const COPIES_LEFT_OF_ONE_MAX: usize = 8;
/// KV groups of one worker of which it is remembered what they serve.
pub const GROUP_KINDS_MAX: usize = 256;
/// Names that no rule covers, of one event batch; the others of it are counted together.
pub const UNRULED_NAMES_BATCH_MAX: usize = 16;
/// Names that no rule covers, of one worker; the others are counted together.
pub const UNRULED_NAMES_WORKER_MAX: usize = 32;
/// Bytes kept of a name that no rule covers.
pub const UNRULED_NAME_BYTES_MAX: usize = 48;
/// Engine hashes of one worker that are remembered as contradicted; beyond it every parent counts as one.
pub const CONFLICTED_HASHES_MAX: usize = 1 << 16;
/// References of one worker to offloaded blocks of which only the hash is known, each as often as it was announced: one
/// event may place all of them. Beyond it they are forgotten.
pub const OFFLOADED_UNBOUND_REFERENCES_MAX: usize = 1 << 16;
/// Tiers and groups in which one such block waits. Each announcement looks through them.
pub const OFFLOADED_PLACES_PER_HASH_MAX: usize = 64;
/// Payload bytes taken from one publisher before the next has its turn.
pub const INGEST_TURN_BYTES_MAX: usize = 8 << 20;
/// Messages taken from one publisher before the next has its turn.
pub const INGEST_TURN_MESSAGES_MAX: usize = 256;
/// Turns of publishers in one round of an ingest thread. The others keep their order and have theirs in the next round,
/// after commands, transfers and deadlines.
pub const INGEST_ROUND_TURNS_MAX: usize = 64;
/// Messages of all publishers in one round, but for those of its last turn.
pub const INGEST_ROUND_MESSAGES_MAX: usize = 4096;
/// Messages fetched from a publisher's socket before it is asked what became of the connection, and then taken.
pub const INGEST_FETCH_MESSAGES_MAX: usize = 16;
/// Payload bytes of those messages, but for the last.
pub const INGEST_FETCH_BYTES_MAX: usize = 256 << 10;
/// Messages received from one publisher and not yet applied, unless it is configured otherwise; the bound on what is
/// fetched at once is lower. Engines drop beyond the same number.
pub const ZMQ_RECEIVE_MESSAGES_MAX: i32 = 100_000;
/// Commands that may wait for one ingest thread.
pub const INGEST_COMMANDS_MAX: usize = 64;
/// Events of one batch between the one in hand and the one whose memory is asked for.
pub const LOOK_AHEAD_EVENTS: usize = 12;
/// Blocks that an ingest thread sweeps for each space between two turns.
pub const INGEST_SWEEP_BLOCKS: usize = 8192;
/// Blocks that a dump walks between two turns of a shard; what a load applies is cut the same.
pub const DUMP_SLICE_BLOCKS: usize = 4096;
/// Parts of a dump that may wait for whoever receives it; one place more is kept for its end.
pub const DUMP_PARTS_MAX: usize = 16;
/// Dumps and loads of one shard that wait for the one that runs.
pub const TRANSFERS_WAITING_MAX: usize = 16;
/// How long a dump or load may wait for its other side, milliseconds: its worker stands still meanwhile.
pub const TRANSFER_STALL_MS_MAX: u64 = 5_000;
/// How long an ingest thread rests before it looks again whether that side has moved, milliseconds.
pub const TRANSFER_REST_MS: u64 = 1;
/// How long an ingest thread rests before it asks again whether somebody may still meet a worker that left,
/// milliseconds.
pub const LEAVING_REST_MS: u64 = 1;
/// Blocks, and stores, of one section of a snapshot.
pub const SNAPSHOT_SECTION_BLOCKS_MAX: usize = DUMP_SLICE_BLOCKS;
/// Bytes of one section of a snapshot.
pub const SNAPSHOT_SECTION_BYTES_MAX: usize = 1 << 20;
/// Bytes of a snapshot that are gathered before they are written, and read ahead.
pub const SNAPSHOT_BUFFER_BYTES: usize = 256 << 10;
/// Snapshots of workers that come while the daemon runs, loaded at once; the next worker with one waits.
pub const SNAPSHOT_LOADS_AT_ONCE_MAX: usize = 8;
/// Longest configurable time between two snapshots, and for which one is kept, seconds.
pub const SNAPSHOT_S_CEILING: u64 = 366 * 86_400;
/// How often a relay logs what it has counted, seconds.
pub const RELAY_REPORT_EVERY_S: u64 = 60;
/// How often a relay that has nothing else to say says that, milliseconds.
pub const RELAY_HEARTBEAT_MS: u64 = 1_000;
/// How long a relay may be silent before its worker is no longer believed, milliseconds: some heartbeats.
pub const RELAY_SILENT_MS_MAX: u64 = 5_000;
/// How long a worker believed less than its relay believes itself waits before everything is asked for, milliseconds;
/// twice as long after each time, up to [`RELAY_RESYNC_DOUBLINGS_MAX`] doublings.
pub const RELAY_RESYNC_MS_MIN: u64 = 5_000;
/// See [`RELAY_RESYNC_MS_MIN`].
pub const RELAY_RESYNC_DOUBLINGS_MAX: u32 = 6;
/// Batches that a relay keeps for replays, unless it is configured otherwise.
pub const RELAY_BUFFER_BATCHES_DEFAULT: usize = 1 << 14;
/// Bytes of those batches.
pub const RELAY_BUFFER_BYTES_DEFAULT: usize = 256 << 20;
/// Questions that a relay answers at once; more are not answered, and asked again.
pub const RELAY_ANSWERS_MAX: usize = 64;
/// Messages of one answer sent before the next has its turn.
pub const RELAY_ANSWER_TURN_MESSAGES_MAX: usize = 64;
/// Pieces of one answer that wait for whoever asked; a message is two.
pub const RELAY_ANSWER_MESSAGES_MAX: usize = 512;
/// How long whoever asked may take nothing before the answer is given up, milliseconds.
pub const RELAY_ANSWER_STALL_MS_MAX: u64 = 10_000;
/// Bytes of one snapshot; a worker that holds more has none.
pub const RELAY_SNAPSHOT_BYTES_MAX: usize = 2 << 30;
/// How long a snapshot that nobody asks for any more is kept, milliseconds.
pub const RELAY_SNAPSHOT_KEPT_MS: u64 = 10_000;
/// How long a relay rests after a snapshot that failed before it takes another, milliseconds.
pub const RELAY_SNAPSHOT_REST_MS: u64 = 200;
/// How long a relay rests before it looks again whether an answer can go on, milliseconds.
pub const RELAY_REST_MS: u64 = 2;
/// How long a relay waits for a question before it looks whether it is to end, milliseconds.
pub const RELAY_WAIT_MS: u64 = 50;
/// How long an ingest thread rests before it asks again whether the index takes events, milliseconds.
pub const CHOKED_REST_MS: u64 = 1;
/// The lowest memory ceiling that a space can be given for each of its shards: below it nothing would fit.
pub const SHARD_MEMORY_BYTES_MIN: u64 = 4 << 20;
/// The highest memory ceiling that a space can be given.
pub const SPACE_MEMORY_BYTES_CEILING: u64 = 1 << 46;

/// Messages of an engine's load that are read in one turn: only the newest counts.
pub const LOAD_REPORT_MESSAGES_MAX: i32 = 64;
/// An engine whose load is listened to says it each second; so long without, and it is called silent.
pub const LOAD_REPORT_SILENT_MS: u64 = 10_000;
/// How often it is looked who has fallen silent.
pub const LOAD_REPORT_TICK_MS: u64 = 1_000;

/// Bookings that may wait for the predictor, over all cores; what finds no room is dropped and counted.
pub const PREDICTED_BOOKINGS_WAITING_MAX: usize = 512;
/// Prompt blocks of those bookings.
pub const PREDICTED_WAITING_BLOCKS_MAX: usize = 2 * PROMPT_BLOCKS_MAX;
/// What a buffer of such a booking keeps for the next one, blocks.
pub const PREDICTED_BUFFER_BLOCKS_KEPT: usize = 8192;
/// How often predictions are looked through for what has expired, and the fleet for who left, milliseconds.
pub const PREDICTIONS_EXPIRY_EVERY_MS: u64 = 100;
/// Bookings taken over before the predictor looks at the rest of its work.
pub const PREDICTED_BOOKINGS_PER_TURN_MAX: usize = 64;
/// Predicted blocks expired, or swept out of the index, before bookings have their turn.
pub const PREDICTED_BLOCKS_PER_TURN: usize = 8192;
/// Longest configurable life of a prediction, seconds.
pub const PREDICTED_TTL_S_CEILING: u64 = 86_400;
/// The lowest memory ceiling of a space's predictions: half of it is for their index, one shard.
pub const PREDICTED_MEMORY_BYTES_MIN: u64 = 2 * SHARD_MEMORY_BYTES_MIN;

/// Bookings of one session.
pub const BOOKINGS_PER_SESSION_MAX: usize = 1 << 16;
/// Bookings of one daemon.
pub const BOOKINGS_MAX: usize = 1 << 20;
/// Changes of loads of which it is known whose they were: a core that has missed more reads every load again.
pub const LOAD_CHANGES_KEPT: u64 = 1024;
/// Words of 8 bytes for the prompts in flight, so that blocks that requests share are counted once; a prompt that finds
/// no room is counted in full. A block that is on no other prompt takes one, a prompt eight more and a few for its ways, in whole cache lines.
pub const ACTIVE_WORDS_MAX: usize = 1 << 24;
/// Blocks of one node of the tree of prompts in flight.
pub const ACTIVE_NODE_BLOCKS_MAX: usize = 1 << 14;
/// Blocks that may be copied, when a prompt ends, to join two nodes of that tree that do not lie side by side.
pub const ACTIVE_JOIN_BLOCKS_MAX: usize = 1 << 10;
/// Times that a look-up of active blocks walks before it asks for the bookings' lock.
pub const ACTIVE_READ_TRIES_MAX: usize = 16;
/// Doublings of a worker's back-off after failures.
pub const BACK_OFF_DOUBLINGS_MAX: u32 = 30;
/// Longest configurable back-off, and age of a reported load, milliseconds.
pub const REPORT_MS_CEILING: u64 = 3_600_000;
/// Prefills of a worker that are learnt from before it is said how long the next takes.
pub const PREFILL_SAMPLES_MIN: u32 = 4;
/// Weight of a worker's last prefill in the averages that are learnt, 0 to 1.
pub const PREFILL_SAMPLE_WEIGHT: f64 = 0.125;
/// Longest configurable time of a token's prefill, nanoseconds: a second.
pub const PREFILL_NS_CEILING: u64 = 1_000_000_000;
/// What stands behind a request's name in the name of what its prefill half is booked under.
pub const PREFILL_BOOKING_SUFFIX: &str = "/prefill";
/// Sessions that can be configured to be bound to workers; each takes 40 bytes, bound or not.
pub const AFFINITY_SESSIONS_CEILING: usize = 1 << 24;
/// Longest configurable life of a binding that is not used, seconds: a year.
pub const AFFINITY_TTL_S_CEILING: u64 = 31_536_000;
/// Requests that may wait for a worker, unless it is configured otherwise.
pub const QUEUE_REQUESTS_MAX_DEFAULT: usize = 4096;
/// Requests that can be configured to wait.
pub const QUEUE_REQUESTS_CEILING: usize = 1 << 16;
/// Bytes of the requests that wait.
pub const QUEUE_BYTES_MAX: usize = 256 << 20;
/// Different sets of workers that requests wait for: what is looked at when a worker has room again.
pub const QUEUE_SETS_MAX: usize = 1024;
/// The shortest and the longest time after which a request that found the queue full is told to come again, nanoseconds.
pub const QUEUE_RETRY_NS_MIN: u64 = 1_000_000;
/// See [`QUEUE_RETRY_NS_MIN`].
pub const QUEUE_RETRY_NS_MAX: u64 = 1_000_000_000;
/// Requests that waited and are decided in a row before the connections of the core have their turn.
pub const QUEUE_SERVED_PER_TURN_MAX: usize = 64;
/// Times that a request which finds every worker busy looks at their loads again before it is left to wait.
pub const QUEUE_LOOKS_MAX: usize = 4;
/// How often somebody looks whether requests that wait find room that nobody told of, milliseconds.
pub const QUEUE_RECHECK_MS: u64 = 100;
/// Longest configurable wait of a request for a worker, milliseconds.
pub const QUEUE_WAIT_MS_CEILING: u64 = 3_600_000;
/// How often the control thread looks whether the others still run.
pub const THREADS_WATCH_EVERY_MS: u64 = 500;
/// How often bookings are looked through for what has to end.
pub const BOOKINGS_EXPIRY_EVERY_MS: u64 = 1000;
/// Bookings dropped for their age before others are let in between.
pub const BOOKINGS_EXPIRED_PER_TURN_MAX: usize = 256;
/// How often the daemon looks for what is wrong, milliseconds.
pub const DIAGNOSIS_EVERY_MS: u64 = 1000;
/// How old a diagnosis may be that status tells, milliseconds: the pages of one status share one.
pub const DIAGNOSIS_AGE_MS_MAX: u64 = 100;
/// What counts as recent in a finding: between half of this and all of it, milliseconds.
pub const RECENT_MS: u64 = 600_000;
/// Findings name at most so many workers each on the wire.
pub const FINDING_WORKERS_MAX: usize = 64;
/// Prompts that a core remembers the worker of.
pub const REPEATS_REMEMBERED: usize = 1024;
/// Blocks of a prompt by which it is told from others; shorter prompts are no evidence.
pub const REPEAT_BLOCKS: usize = 4;
/// A prompt that comes again sooner may not have been computed yet, milliseconds.
pub const REPEAT_AGE_MS_MIN: u64 = 3_000;
/// A prompt that comes again later may have been evicted, milliseconds.
pub const REPEAT_AGE_MS_MAX: u64 = 60_000;
/// Recent prompts sent again in vain before a worker's or space's hashes are called foreign.
pub const FOREIGN_REPEATS_MIN: u64 = 32;
/// Blocks that must be held before hashes are called foreign: a nearly empty cache finds nothing either.
pub const FOREIGN_BLOCKS_HELD_MIN: u64 = 256;
/// Decisions for a worker that publishes nothing before its events are called off.
pub const EVENTS_OFF_DECISIONS_MIN: u64 = 32;
/// For how long that must be so, milliseconds: an engine may be at its first prefill.
pub const EVENTS_OFF_MS_MIN: u64 = 5_000;
/// Recent duplicate batches, or root chains announced again, before they are called a storm.
pub const DUPLICATES_RECENT_MIN: u64 = 64;
/// Recent restarts of one publisher that are called a loop.
pub const RESTARTS_RECENT_MIN: u64 = 3;
/// Recent breaks of one publisher's connection that are called a loop.
pub const DISCONNECTS_RECENT_MIN: u64 = 5;
/// Recent replays of one publisher that did not come, where none did, before it is said to replay nothing.
pub const REPLAYS_SILENT_RECENT_MIN: u64 = REPLAY_SILENT_TRIES_MAX as u64;
/// Recent times that one publisher's lost batches could not be had before they are spoken of.
pub const RECOVERIES_FAILED_RECENT_MIN: u64 = 2;
/// Recent contended decisions before they are spoken of, where they are also one in a hundred.
pub const CONTENDED_RECENT_MIN: u64 = 16;
/// Recent bookings ended by age before they are spoken of, where they are also one in a hundred.
pub const BOOKINGS_LEAKED_RECENT_MIN: u64 = 16;
/// A jump of the wall clock between two looks that is spoken of, milliseconds.
pub const CLOCK_STEP_MS_MIN: u64 = 1_000;
/// Sessions of one daemon.
pub const SESSIONS_MAX: usize = 1 << 16;
/// Abandoned sessions ended before others are let in between.
pub const SESSIONS_ENDED_PER_TURN_MAX: usize = 4096;

/// Longest configurable grace or interval of discovery, milliseconds.
pub const DISCOVERY_MS_CEILING: u64 = 86_400_000;
/// Bytes of one file of workers.
pub const DISCOVERY_FILE_BYTES_MAX: u64 = 16 << 20;
/// Characters of one file of workers that begin or part entries (`=`, `:`, `,`, `.`, `[` and `{`): what a parser makes of
/// each takes some hundred bytes. `WORKERS_MAX` workers of about ten fields have as many.
pub const DISCOVERY_FILE_MARKS_MAX: usize = 1 << 17;
/// Problems of one configuration or file of workers that are listed.
pub const PROBLEMS_MAX: usize = 256;
/// Times that the index of a shard is built anew after a panic of its thread, within [`INGEST_REBUILD_PERIOD_MS`].
pub const INGEST_REBUILDS_MAX: usize = 8;
/// The period in which rebuilds of a shard are counted, milliseconds.
pub const INGEST_REBUILD_PERIOD_MS: u64 = 600_000;
/// Panics of an ingest thread over one worker's events before the worker is left out.
pub const INGEST_PANICS_PER_WORKER_MAX: u32 = 3;
/// How long the reading of a file of workers is waited for before the others have their turn, milliseconds.
pub const DISCOVERY_READ_MS_MAX: u64 = 2_000;
/// Readings of files of workers that may hang at once: each holds a thread.
pub const DISCOVERY_READS_HELD_MAX: usize = 16;
/// Files of workers in one folder.
pub const DISCOVERY_FILES_MAX: usize = 4096;
/// Bytes of an engine's answer about where it publishes.
pub const SERVER_INFO_BYTES_MAX: u64 = 4 << 20;
/// How long an engine may take to say where it publishes, milliseconds.
pub const SERVER_INFO_MS_MAX: u64 = 5_000;
/// How long to wait before an engine that did not say is asked again: at first, and at most, milliseconds.
pub const SERVER_INFO_REST_MS: [u64; 2] = [250, 30_000];
/// How long an engine that has said where it publishes is left before it is looked at again, milliseconds.
pub const SERVER_LOOK_REST_MS: u64 = 2_000;
/// How long an engine may take to answer a look, milliseconds.
pub const SERVER_LOOK_MS_MAX: u64 = 2_000;
/// Looks at an engine that fail in a row before its workers are left alone.
pub const SERVER_LOOKS_FAILED_MAX: u32 = 3;
/// Engines that are asked at once, and engines that are looked at at once.
pub const SERVERS_ASKED_MAX: usize = 8;
/// How long to wait after a file of workers changed before it is looked at: often more follows, milliseconds.
pub const DISCOVERY_SETTLE_MS: u64 = 20;
/// How long to rest before asking again whether a worker that left is gone from the index, milliseconds.
pub const RECONCILE_RETRY_MS: u64 = 2;
/// Fields of one request to add or change a worker.
pub const WORKER_FIELDS_MAX: usize = 64;
/// Bookings looked at, when a worker is removed, before others are let in between.
pub const BOOKINGS_LEAVING_PER_TURN_MAX: usize = 4096;

/// Longest configurable time of a booking or a session, seconds.
pub const BOOKING_S_CEILING: u64 = 86_400;
/// Longest configurable wait for a worker's events, milliseconds.
pub const EVENTS_MS_CEILING: u64 = 86_400_000;

const _: () = assert!(FRAME_HEADER_BYTES.is_multiple_of(FRAME_ALIGN_BYTES));
const _: () = assert!(FRAME_BODY_BYTES_MAX_DEFAULT < FRAME_BODY_BYTES_CEILING);
const _: () = assert!(RECEIVE_BUFFER_BYTES_MIN > FRAME_HEADER_BYTES);
// A connection has a read and a write in flight at most, so its core's completion queue never overflows.
const _: () = assert!(CONNECTIONS_MAX * 2 <= URING_ENTRIES as usize * 2);
const _: () = assert!(RECEIVE_BUFFER_BYTES_MIN <= RECEIVE_BUFFER_BYTES_FILLED);
const _: () = assert!(RECEIVE_BUFFER_BYTES_FILLED <= RECEIVE_BUFFER_BYTES_KEPT);
// A prompt of the largest size fits a frame: 4 bytes a token and 64 KiB for the rest.
const _: () = assert!(PROMPT_TOKENS_MAX * 4 + (64 << 10) <= FRAME_BODY_BYTES_CEILING as usize);
// The arenas of a batch are addressed by u32.
const _: () = assert!(EVENT_BATCH_TOKENS_MAX <= u32::MAX as usize && EVENT_BATCH_TEXT_BYTES_MAX <= u32::MAX as usize);
// Labels with their weights and lengths, shared ranges and names of a request fit beside its prompt.
const _: () = assert!(
    REQUEST_TAINTS_MAX * 2 * (NAME_BYTES_MAX + 64) + SHARED_HITS_MAX * 8 + NAME_BYTES_MAX * 8
        <= REQUEST_OVERHEAD_BYTES_MAX as usize
);
// A section of the most blocks: 16 bytes each, and each a store of its own with 32 more.
const _: () = assert!(SNAPSHOT_SECTION_BLOCKS_MAX * (16 + 32) + (4 << 10) <= SNAPSHOT_SECTION_BYTES_MAX);
const _: () = assert!(SNAPSHOT_LOADS_AT_ONCE_MAX < TRANSFERS_WAITING_MAX, "loads of newcomers leave room for dumps");
const _: () = assert!(EVENT_MESSAGE_BYTES_MAX <= HELD_BYTES_MAX, "one message alone never ends a dump");
const _: () = assert!(EVENT_MESSAGE_BYTES_MAX <= RECOVERY_HELD_BYTES_MAX, "one message alone is never dropped");
const _: () = assert!(SHARD_MEMORY_BYTES_MIN * SHARDS_MAX as u64 <= SPACE_MEMORY_BYTES_CEILING);
const _: () = assert!(WORKER_BLOCKS_MAX_DEFAULT <= WORKER_BLOCKS_CEILING);
const _: () = assert!(SHARDS_MAX <= u16::MAX as usize, "a shard's number is a u16");
const _: () = assert!(CORES_MAX <= u16::MAX as usize, "the configured number of cores is a u16");
const _: () = assert!(BOOKINGS_PER_SESSION_MAX <= BOOKINGS_MAX);
const _: () = assert!(LOAD_CHANGES_KEPT.is_power_of_two());
const _: () = assert!(QUEUE_REQUESTS_MAX_DEFAULT <= QUEUE_REQUESTS_CEILING);
const _: () =
    assert!(ACTIVE_WORDS_MAX < 1 << 31, "a node of the tree of prompts in flight is told from a root by its number");
const _: () = assert!(REPEATS_REMEMBERED.is_power_of_two() && REPEAT_AGE_MS_MIN < REPEAT_AGE_MS_MAX);
const _: () = assert!(REPEAT_AGE_MS_MAX < RECENT_MS / 2, "a prompt is judged within what is recent");
const _: () = assert!(WORKERS_MAX <= 1 << 16, "a worker's slot is a u16");
const _: () = assert!(WORKERS_MAX <= 1 << crate::ids::WORKER_PLACE_BITS, "a worker's index holds its place");
