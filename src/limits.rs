//! Every limit of the daemon, with its unit last in the name. Operators change some of them by `config`, within the
//! limits here: `*_DEFAULT` is a default, `*_CEILING` the highest configurable value.

mod engine_snapshots;
mod events;
mod http;
mod nats;
mod process;
mod remote;
mod report;
mod restart;
mod routers;
mod serving;
mod takeover;
mod traces;

pub use engine_snapshots::*;
pub use events::*;
pub use http::*;
pub use nats::*;
pub use process::*;
pub use remote::*;
pub use report::*;
pub use restart::*;
pub use routers::*;
pub use serving::*;
pub use takeover::*;
pub use traces::*;

/// Bytes of the frame header.
pub const FRAME_HEADER_BYTES: usize = 16;
/// Frames and flatbuffers are padded to this, so that the next header is aligned too.
pub const FRAME_ALIGN_BYTES: usize = 8;
/// A header with a larger body is invalid: the connection is closed, because skipping that much is no use.
pub const FRAME_BODY_BYTES_CEILING: u32 = 256 << 20;
/// Largest body answered, unless configured.
pub const FRAME_BODY_BYTES_MAX_DEFAULT: u32 = 8 << 20;
/// Initial size of a connection's receive buffer. It grows up to one frame of the configured maximum.
pub const RECEIVE_BUFFER_BYTES_MIN: usize = 64 << 10;
/// Size to which the receive buffer of a connection grows if its peer always has more to read than fits: the size of a
/// socket's buffer, so that many requests in flight are read and answered with few system calls.
pub const RECEIVE_BUFFER_BYTES_FILLED: usize = 256 << 10;
/// Size that a receive buffer keeps between large frames. The rest is freed at once.
pub const RECEIVE_BUFFER_BYTES_KEPT: usize = 1 << 20;
/// Reads without a large frame after which a receive buffer shrinks to its minimum.
pub const RECEIVE_BUFFER_READS_KEPT: u32 = 64;
/// Bytes of an error's message or remedy on the wire. Longer texts are cut.
pub const ERROR_TEXT_BYTES_MAX: usize = 1 << 10;
/// Bytes of a request besides its prompt, allow-list and multimodal hashes.
pub const REQUEST_OVERHEAD_BYTES_MAX: u32 = 64 << 10;
/// Nesting of a frame's tables.
pub const FRAME_TABLE_DEPTH_MAX: usize = 8;
/// Tables in one request.
pub const REQUEST_TABLES_MAX: usize = 1 << 12;
/// Connections of one daemon, over all cores.
pub const CONNECTIONS_MAX: usize = 4096;
/// Connections of the admin socket.
pub const ADMIN_CONNECTIONS_MAX: usize = 64;
/// Connections that wait in the kernel for the acceptor.
pub const LISTEN_BACKLOG: i32 = 1024;
/// Entries of a core's submission queue; its completion queue is twice that.
pub const URING_ENTRIES: u32 = 4096;
/// How long the io_uring probe may take, milliseconds.
pub const IO_PROBE_MS_MAX: u64 = 500;
/// How long a serving thread waits for connections that it cut at the drain deadline, milliseconds.
pub const DRAIN_GRACE_MS: u64 = 200;
/// How long the acceptor pauses after a failed accept, milliseconds.
pub const ACCEPT_PAUSE_MS: u64 = 100;
/// Most log lines of one kind that peers can cause within [`LOG_WINDOW_MS`].
pub const LOG_LINES_PER_WINDOW_MAX: u32 = 10;
/// Length of the window in which such lines are counted, milliseconds.
pub const LOG_WINDOW_MS: u64 = 10_000;
/// Bytes of the log written at once: a pipe that has room takes this many without a wait (`PIPE_BUF`).
pub const LOG_WRITE_BYTES: usize = 4096;
/// Longest wait for another daemon that is binding a socket in the same directory, milliseconds.
pub const BIND_LOCK_MS_MAX: u64 = 2_000;
/// Pause before the next try for that lock, milliseconds.
pub const BIND_LOCK_RETRY_MS: u64 = 10;
/// Connections to the metrics port. A further one replaces the connection that has waited longest for its peer.
pub const METRICS_CONNECTIONS_MAX: usize = 64;
/// Longest life of a connection to the metrics port, milliseconds, because there are few of them.
pub const METRICS_CONNECTION_MS_MAX: u64 = 10_000;
/// Metrics pages in memory: the newest, and older ones still being read. At this limit the newest is served again and
/// no other is made.
pub const METRICS_PAGES_MAX: usize = 4;
/// Shortest time that a metrics page is served before another is made, milliseconds.
pub const METRICS_PAGE_MS_MIN: u64 = 250;
/// A page is also served for this many times the time it took to make, so that a flood of scrapes takes at most a
/// quarter of one processor.
pub const METRICS_PAGE_REUSE_FACTOR: u32 = 3;
/// How long a page is kept without a request for it, milliseconds.
pub const METRICS_PAGE_KEPT_MS: u64 = 10_000;
/// Scrapes that may wait for a page, over both ports.
pub const METRICS_SCRAPES_WAITING_MAX: usize = 512;
/// Host names in `[metrics] hosts`.
pub const METRICS_HOSTS_MAX: usize = 64;
/// Messages (connections, drain) that may wait in one core's mailbox.
pub const MAILBOX_MESSAGES_MAX: usize = 1024;
/// Bytes of a Unix socket's path: `sun_path` has 108 with its terminator.
pub const SOCKET_PATH_BYTES_MAX: usize = 107;
/// Bytes of a host's name.
pub const HOST_BYTES_MAX: usize = 253;
/// Bytes between two dots of a host's name.
pub const HOST_LABEL_BYTES_MAX: usize = 63;
/// Characters of an invalid endpoint that a message quotes.
pub const ENDPOINT_SHOWN_CHARS_MAX: usize = 120;
/// Serving threads of one daemon.
pub const CORES_MAX: usize = 256;
/// Longest configurable wait for pending replies when the daemon stops, milliseconds.
pub const DRAIN_MS_CEILING: u64 = 600_000;

/// Tokens of one prompt.
pub const PROMPT_TOKENS_MAX: usize = 1 << 21;
/// Blocks of one prompt.
pub const PROMPT_BLOCKS_MAX: usize = PROMPT_TOKENS_MAX;
/// Bytes of a LoRA name, salt, request id, model, namespace or client name.
pub const NAME_BYTES_MAX: usize = 256;
/// Bytes of blocks with multimodal objects that a thread copies together, to hash them in parallel.
pub const HASH_STAGE_BYTES_MAX: usize = 16 << 10;
/// Multimodal hashes of one prompt.
pub const MEDIA_HASHES_MAX: usize = 1 << 16;
/// Candidates listed in one reply.
pub const CANDIDATES_MAX: usize = WORKERS_MAX;
/// Entries of an allow-list.
pub const ALLOW_LIST_MAX: usize = WORKERS_MAX;
/// Workers in one page of a workers or status reply.
pub const WORKERS_PAGE_MAX: usize = 256;

/// Engines of a simulated fleet.
pub const SIMULATED_ENGINES_MAX: usize = 1024;
/// Routers of a simulated fleet. Each has bookings of its own.
pub const SIMULATED_ROUTERS_MAX: usize = 64;
/// Tokens of one KV memory or store of a simulated engine.
pub const SIMULATED_KV_TOKENS_MAX: u64 = 1 << 40;
/// Tokens of one step of a simulated engine.
pub const SIMULATED_STEP_TOKENS_MAX: u64 = 1 << 24;

/// Tokens per block.
pub const BLOCK_SIZE_TOKENS_MAX: u32 = 1 << 16;
/// Block size assumed by a decision by load alone while the space's scheme is unknown.
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
/// Memory of the index that the blocks of one worker may take, bytes, unless its record allows more blocks than the
/// default.
pub const WORKER_BYTES_MAX_DEFAULT: u64 = WORKER_BLOCKS_MAX_DEFAULT * WORKER_BYTES_PER_BLOCK_MAX;
/// Estimated bytes of a block in the index: its two hashes, the way from its name to it, and slack.
pub const INDEX_BLOCK_BYTES: u64 = 32;
/// Estimated bytes of a node in the index besides its blocks: its record, its line with reserved room, and the rest of
/// the two cache lines in which its hashes end.
pub const INDEX_NODE_BYTES: u64 = 480;
/// Blocks that a worker's record may claim or allow.
pub const WORKER_BLOCKS_CEILING: u64 = 1 << 32;
/// Tokens one worker may batch in a step.
pub const BATCHED_TOKENS_CEILING: u64 = 1 << 32;
/// Taints of one worker.
pub const TAINTS_MAX: usize = 64;
/// LoRA adapters of one worker.
pub const LORAS_MAX: usize = 256;
/// Labels that one request requires; also labels that it prefers.
pub const REQUEST_TAINTS_MAX: usize = 32;
/// Ranges of blocks in a shared cache that one request names.
pub const SHARED_HITS_MAX: usize = 1024;
/// Blocks of one worker that wait for a parent. Also a limit on the worker's removed blocks that stay in the index
/// because other blocks are below them: beyond it, stores of new blocks are refused.
pub const WORKER_DORMANT_BLOCKS_MAX: usize = 1 << 20;
/// Blocks of one worker that one event, or one slice of a sweep, may move in the index: out of places whose chain is
/// broken, or to places that they waited for.
pub const INDEX_EVENT_MOVES_MAX: usize = 1 << 15;
/// Blocks of one store that the index takes block by block, as it does wherever a worker has several groups, or blocks
/// that wait for a parent. A larger store of this kind is refused. Stores of usual workers are taken in runs, at any
/// size.
pub const INDEX_SLOW_PATH_BLOCKS_MAX: usize = 1 << 16;
/// Nodes that a clear sweeps itself if more cleared holder bits wait for the sweep than [`RETIRED_HOLDERS_MAX`].
pub const INDEX_EVENT_SWEEP_MAX: usize = 1 << 12;
/// Segments of a shard's tables that are shrunk in one go while the shard is idle.
pub const INDEX_IDLE_SHRINKS_MAX: usize = 16;
/// Blocks of one node of the index. A node that grows, or two that are joined, copy at most this many.
pub const NODE_BLOCKS_MAX: usize = 1024;
/// Blocks that may be copied to join two nodes that do not lie side by side.
pub const JOIN_BLOCKS_MAX: usize = 128;
/// Tries of a lookup. After them it returns the answer of a try during which the index changed.
pub const LOOKUP_TRIES_MAX: usize = 16;
/// Garbage of one shard that waits for readers, bytes, beyond which nodes are no longer joined.
pub const INDEX_GARBAGE_BYTES_STRAINED: u64 = 16 << 20;
/// Garbage of one shard that waits for readers, bytes, beyond which its ingest thread takes no more batches. The
/// garbage of one event comes on top: at most the blocks of a worker, or the table of headers when that grows.
pub const INDEX_GARBAGE_BYTES_CHOKED: u64 = 64 << 20;
/// KV groups of one worker's tier.
pub const GROUPS_MAX: usize = 32;
/// Engine hashes of one worker that may name the same content after the same parent.
pub const ALIASES_MAX: usize = 8;
/// Holder bits of one shard that were cleared and are not yet swept. Beyond it each clear sweeps up to
/// [`INDEX_EVENT_SWEEP_MAX`] nodes itself.
pub const RETIRED_HOLDERS_MAX: usize = 256;

/// Bytes of one event message. Larger messages are skipped and counted.
pub const EVENT_MESSAGE_BYTES_MAX: usize = 64 << 20;
/// Blocks of one event batch.
pub const EVENT_BATCH_BLOCKS_MAX: usize = 1 << 20;
/// Tokens of one event batch.
pub const EVENT_BATCH_TOKENS_MAX: usize = 1 << 24;
/// Events of one event batch.
pub const EVENT_BATCH_EVENTS_MAX: usize = 1 << 18;
/// Multimodal objects of one event batch.
pub const EVENT_BATCH_MEDIA_MAX: usize = 1 << 18;
/// Blocks of a repeated root chain that an engine at its capacity can have had free without an eviction: those of
/// finished requests that were not full. A repetition of more blocks without an eviction in its batch is a full report.
pub const REPORT_FREE_BLOCKS_MAX: usize = 8;
/// Bytes of the LoRA names and salts of one event batch.
pub const EVENT_BATCH_TEXT_BYTES_MAX: usize = 16 << 20;
/// Nesting of a skipped msgpack value.
pub const MSGPACK_DEPTH_MAX: usize = 16;
/// Payload hashes remembered for each stream, to tell a duplicate from a restarted publisher.
pub const GATE_PAYLOADS_REMEMBERED: usize = 64;
/// Payload hashes of replayed batches remembered for each stream until the live stream, which is behind, has passed
/// them.
pub const GATE_REPLAYED_REMEMBERED_MAX: usize = 1 << 14;
/// References of one worker's sliding-window groups to blocks whose content no event has shown yet, counted as often as
/// announced: one event may place all of them. Such an event comes in the same batch.
pub const WINDOW_REFERENCES_UNPLACED_MAX: usize = 1 << 16;
/// Blocks of one worker for which the daemon remembers that a removal left copies of blocks after them.
pub const COPIES_LEFT_MAX: usize = 1 << 12;
/// Blocks after one block for which the daemon remembers that a removal left copies.
pub const COPIES_LEFT_OF_ONE_MAX: usize = 8;
/// KV groups of one worker whose kind is remembered.
pub const GROUP_KINDS_MAX: usize = 256;
/// Names that this version does not know, of one event batch; the others of it are counted together.
pub const UNKNOWN_NAMES_BATCH_MAX: usize = 16;
/// Names that this version does not know, of one worker; the others are counted together.
pub const UNKNOWN_NAMES_WORKER_MAX: usize = 32;
/// Bytes kept of a name that this version does not know.
pub const UNKNOWN_NAME_BYTES_MAX: usize = 48;
/// Engine hashes of one worker remembered as contradicted. Beyond it every parent counts as contradicted.
pub const CONFLICTED_HASHES_MAX: usize = 1 << 16;
/// References of one worker to offloaded blocks known only by hash, counted as often as announced: one event may place
/// all of them. Beyond it they are forgotten.
pub const OFFLOADED_UNBOUND_REFERENCES_MAX: usize = 1 << 16;
/// Tiers and groups in which one such block waits. Each announcement searches them.
pub const OFFLOADED_PLACES_PER_HASH_MAX: usize = 64;
/// Hashes of one worker whose references in lower tiers were bound to another block. Beyond it such references are
/// forgotten.
pub const REBOUND_HASHES_MAX: usize = 1 << 14;
/// Fairness quantum of a publisher: payload bytes taken before the next publisher.
pub const INGEST_QUANTUM_BYTES_MAX: usize = 8 << 20;
/// Fairness quantum of a publisher: messages taken before the next publisher.
pub const INGEST_QUANTUM_MESSAGES_MAX: usize = 256;
/// Fairness quanta in one round of an ingest thread. The other publishers keep their order and follow in the next
/// round, after commands, transfers and deadlines.
pub const INGEST_ROUND_QUANTA_MAX: usize = 64;
/// Messages of all publishers in one round, except those of its last quantum.
pub const INGEST_ROUND_MESSAGES_MAX: usize = 4096;
/// The shortest time between the beginnings of two rounds of an ingest thread while messages arrive often, microseconds.
pub const INGEST_ROUND_INTERVAL_US: u64 = 50;
/// Messages fetched from a publisher's socket before the state of its connection is checked, and they are applied.
pub const INGEST_FETCH_MESSAGES_MAX: usize = 16;
/// Payload bytes of those messages, except the last.
pub const INGEST_FETCH_BYTES_MAX: usize = 256 << 10;
/// Default of `ingest.receive_messages_max`. The limit on messages fetched at once is lower. Engines drop messages
/// beyond the same number.
pub const ZMQ_RECEIVE_MESSAGES_MAX: i32 = 100_000;
/// Commands that may wait for one ingest thread.
pub const INGEST_COMMANDS_MAX: usize = 64;
/// Events of one batch between the current event and the one that is prefetched.
pub const LOOK_AHEAD_EVENTS: usize = 12;
/// Blocks that an ingest thread sweeps for each space between two fairness quanta.
pub const INGEST_SWEEP_BLOCKS: usize = 8192;
/// Blocks that a dump visits, or a load applies, between two fairness quanta of a shard.
pub const DUMP_SLICE_BLOCKS: usize = 4096;
/// Parts of a dump that may wait for its receiver. One more place is reserved for the end of the dump.
pub const DUMP_PARTS_MAX: usize = 16;
/// Dumps and loads of one shard that wait for the one that runs.
pub const TRANSFERS_WAITING_MAX: usize = 16;
/// How long a dump or load may wait for its peer, milliseconds: the worker's events wait meanwhile.
pub const TRANSFER_STALL_MS_MAX: u64 = 5_000;
/// How long a dump or load waits, once it is its turn, for the end of its worker's recovery, milliseconds. Dumps and loads
/// of other workers run meanwhile.
pub const TRANSFER_BEGIN_MS_MAX: u64 = 30_000;
/// Pause of an ingest thread before it checks that peer again, milliseconds.
pub const TRANSFER_PAUSE_MS: u64 = 1;
/// Pause of an ingest thread before it checks again whether a reader may still see a removed worker, milliseconds.
pub const REMOVAL_PAUSE_MS: u64 = 1;
/// Blocks, and stores, of one section of a snapshot.
pub const SNAPSHOT_SECTION_BLOCKS_MAX: usize = DUMP_SLICE_BLOCKS;
/// Bytes of one section of a snapshot.
pub const SNAPSHOT_SECTION_BYTES_MAX: usize = 1 << 20;
/// Bytes of a snapshot collected before a write, and read ahead.
pub const SNAPSHOT_BUFFER_BYTES: usize = 256 << 10;
/// Snapshots of workers added while the daemon runs that are loaded at once. Further ones wait.
pub const SNAPSHOT_LOADS_AT_ONCE_MAX: usize = 8;
/// How long a worker that is added while the daemon runs waits for its snapshot to be checked, milliseconds. Then it begins
/// empty, because all other changes of the fleet wait with it.
pub const SNAPSHOT_NEWCOMER_MS_MAX: u64 = 10_000;
/// Requests whose snapshots are removed at once. Each may hold a thread while the file system does not respond.
pub const SNAPSHOT_REMOVALS_AT_ONCE_MAX: usize = 4;
/// Longest configurable time between two snapshots, and of keeping one, seconds.
pub const SNAPSHOT_S_CEILING: u64 = 366 * 86_400;
/// How often a relay logs its counters, seconds.
pub const RELAY_REPORT_EVERY_S: u64 = 60;
/// Interval of a relay's heartbeats without events, milliseconds.
pub const RELAY_HEARTBEAT_MS: u64 = 1_000;
/// How long a relay may be silent before its worker loses trust, milliseconds: several heartbeats.
pub const RELAY_SILENT_MS_MAX: u64 = 5_000;
/// How long a worker may have less trust here than at its relay before a full resynchronisation, milliseconds. Doubles
/// after each one, up to [`RELAY_RESYNC_DOUBLINGS_MAX`] times.
pub const RELAY_RESYNC_MS_MIN: u64 = 5_000;
/// See [`RELAY_RESYNC_MS_MIN`].
pub const RELAY_RESYNC_DOUBLINGS_MAX: u32 = 6;
/// Default number of batches that a relay keeps for replays.
pub const RELAY_BUFFER_BATCHES_DEFAULT: usize = 1 << 14;
/// Bytes of those batches.
pub const RELAY_BUFFER_BYTES_DEFAULT: usize = 256 << 20;
/// Replay requests that a relay answers at once. Further ones get no answer, and are sent again.
pub const RELAY_ANSWERS_MAX: usize = 64;
/// Fairness quantum of an answer: messages sent before the next answer.
pub const RELAY_ANSWER_QUANTUM_MESSAGES_MAX: usize = 64;
/// Pieces of one answer that wait for its receiver. A message has two.
pub const RELAY_ANSWER_MESSAGES_MAX: usize = 512;
/// How long the receiver of an answer may read nothing before the answer is given up, milliseconds.
pub const RELAY_ANSWER_STALL_MS_MAX: u64 = 10_000;
/// Bytes a second of the slowest answer that keeps its place while others wait, once it has moved for that long.
pub const RELAY_ANSWER_BYTES_PER_S_MIN: u64 = 256 << 10;
/// Bytes of one snapshot of a relay. A worker with more has none.
pub const RELAY_SNAPSHOT_BYTES_MAX: usize = 2 << 30;
/// How long a snapshot is kept without a request for it, milliseconds.
pub const RELAY_SNAPSHOT_KEPT_MS: u64 = 10_000;
/// Pause of a relay after a failed snapshot, milliseconds.
pub const RELAY_SNAPSHOT_PAUSE_MS: u64 = 200;
/// Pause of a relay before it checks again whether an answer can go on, milliseconds.
pub const RELAY_PAUSE_MS: u64 = 2;
/// How long a relay waits for a replay request before it checks whether it must stop, milliseconds.
pub const RELAY_WAIT_MS: u64 = 50;
/// Pause of an ingest thread before it checks again whether the index accepts events, milliseconds.
pub const CHOKED_PAUSE_MS: u64 = 1;
/// Lowest configurable memory of a space for each of its shards: below it nothing would fit.
pub const SHARD_MEMORY_BYTES_MIN: u64 = 4 << 20;
/// Highest configurable memory of a space.
pub const SPACE_MEMORY_BYTES_CEILING: u64 = 1 << 46;

/// Load reports of an engine read in one go: only the newest counts.
pub const LOAD_REPORT_MESSAGES_MAX: i32 = 64;
/// An engine reports its load each second. After this long without a report it counts as silent, milliseconds.
pub const LOAD_REPORT_SILENT_MS: u64 = 10_000;
/// How often silent engines are looked for, milliseconds.
pub const LOAD_REPORT_TICK_MS: u64 = 1_000;

/// Bookings that may wait for the predictor, over all serving threads. Further ones are dropped and counted.
pub const PREDICTED_BOOKINGS_WAITING_MAX: usize = 512;
/// Prompt blocks of those bookings.
pub const PREDICTED_WAITING_BLOCKS_MAX: usize = 2 * PROMPT_BLOCKS_MAX;
/// Capacity that the buffer of such a booking keeps for the next one, blocks.
pub const PREDICTED_BUFFER_BLOCKS_KEPT: usize = 8192;
/// How often expired predictions and removed workers are looked for, milliseconds.
pub const PREDICTIONS_EXPIRY_EVERY_MS: u64 = 100;
/// Fairness quantum of the predictor: bookings before its other work.
pub const PREDICTED_BOOKINGS_PER_QUANTUM_MAX: usize = 64;
/// Predicted blocks expired, or swept out of the index, before the next bookings.
pub const PREDICTED_BLOCKS_PER_QUANTUM: usize = 8192;
/// Longest configurable life of a prediction, seconds.
pub const PREDICTED_TTL_S_CEILING: u64 = 86_400;
/// Lowest configurable memory of a space's predictions. Half of it is for their index, one shard.
pub const PREDICTED_MEMORY_BYTES_MIN: u64 = 2 * SHARD_MEMORY_BYTES_MIN;

/// Bookings of one session.
pub const BOOKINGS_PER_SESSION_MAX: usize = 1 << 16;
/// Bookings of one daemon.
pub const BOOKINGS_MAX: usize = 1 << 20;
/// Parts of the bookings whose names and slots share no cache lines; a session belongs to one of them.
pub const BOOKING_STRIPES: usize = 4;
/// Changes of loads remembered with their worker. A serving thread that has missed more reads every load again.
pub const LOAD_CHANGES_KEPT: u64 = 1024;
/// Workers whose recent prefills are checked each second, and forgotten if they are of long ago, before the bookings' lock
/// is released for others.
pub const RECENT_SWEPT_PER_LOCK_MAX: usize = 64;
/// Workers of which a router's gauges are dropped before the bookings' lock is released for others.
pub const GAUGES_DROPPED_PER_LOCK_MAX: usize = 64;
/// Largest number of tokens, or of decode blocks, in a gauge of another router. More counts as this.
pub const GAUGE_NUMBER_MAX: u64 = 1 << 33;
/// Largest predicted prefill time in a gauge of another router, nanoseconds: 52 days. More counts as this.
pub const GAUGE_WORK_NS_MAX: u64 = 1 << 52;
/// Words of 8 bytes for the prompts in flight, so that shared blocks count once. A prompt that does not fit counts in
/// full. A block of one prompt only takes one word; a prompt takes eight more and a few for its ways, in whole cache
/// lines.
pub const ACTIVE_WORDS_MAX: usize = 1 << 24;
/// Blocks of one node of the tree of prompts in flight.
pub const ACTIVE_NODE_BLOCKS_MAX: usize = 1 << 14;
/// Nodes of that tree from a first block down to any last one. A booking, its end and its move walk them under the lock of the
/// bookings. Prompts that are prefixes of each other, or that leave a long one each at another block, have a node each. A
/// prompt that would make a path longer counts in full.
pub const ACTIVE_PATH_NODES_MAX: usize = 256;
/// Blocks that may be copied, when a prompt ends, to join two nodes of that tree that do not lie side by side.
pub const ACTIVE_JOIN_BLOCKS_MAX: usize = 1 << 10;
/// Words that a booking may write before it takes the lock of the bookings, taken ahead for each part of them
/// ([`BOOKING_STRIPES`]) while prompts use less than half of all words. Once half of them are written, others are taken.
pub const ACTIVE_SPARE_WORDS: u32 = 1 << 14;
/// Tries of a lookup of active blocks before it takes the lock of the bookings.
pub const ACTIVE_READ_TRIES_MAX: usize = 16;
/// Pauses of such a lookup, about 15 ns each, while bookings of prompts with the same first block change what it reads.
/// Most changes take less than 20 of them.
pub const ACTIVE_READ_PAUSES_MAX: usize = 256;
/// Doublings of a worker's back-off after failures.
pub const BACK_OFF_DOUBLINGS_MAX: u32 = 30;
/// Longest configurable back-off, and age of a reported load, milliseconds.
pub const REPORT_MS_CEILING: u64 = 3_600_000;
/// Prefills of a class of workers from which its law counts as known, if no preset was given.
pub const PREFILL_SAMPLES_MIN: u64 = 4;
/// Bookings freed recently from which on missing first tokens are a finding.
pub const FIRST_TOKENS_RECENT_MIN: u64 = 100;
/// First tokens are missing if they were reported of fewer than one in this many freed bookings.
pub const FIRST_TOKENS_SHARE: u64 = 10;
/// Predicted times to the first token after which their mean error can be a finding.
pub const TTFT_PREDICTIONS_MIN: u64 = 200;
/// The mean relative error of predicted times to the first token beyond which it is a finding.
pub const TTFT_ERROR_MAX: f64 = 0.3;
/// Largest configurable weight of a delay. With a far larger one, a second of delay could have an infinite cost, and infinity
/// times 0 delayed requests is not a number.
pub const DELAY_WEIGHT_CEILING: f64 = 1e6;
/// The longest predicted time of one prefill, nanoseconds: an hour. The sum over all bookings is below 2^64.
pub const PREFILL_WORK_NS_MAX: u64 = 3_600_000_000_000;
/// Largest file of learnt prefill times. That of twice as many classes and workers as there can be is smaller.
pub const LAWS_FILE_BYTES_MAX: usize = 4 << 20;
/// Classes of workers whose prefill times are learnt apart.
pub const PREFILL_CLASSES_MAX: usize = 256;
/// Longest configurable time of a token's prefill, nanoseconds: a second.
pub const PREFILL_NS_CEILING: u64 = 1_000_000_000;
/// Appended to a request id for the booking of its prefill worker.
pub const PREFILL_BOOKING_SUFFIX: &str = "/prefill";
/// Bytes of the name of a booking: a request id, and that suffix.
pub const BOOKING_NAME_BYTES_MAX: usize = NAME_BYTES_MAX + PREFILL_BOOKING_SUFFIX.len();
/// Most configurable sessions bound to workers. Each takes 40 bytes, bound or not.
pub const AFFINITY_SESSIONS_CEILING: usize = 1 << 24;
/// Longest configurable life of an unused binding, seconds: a year.
pub const AFFINITY_TTL_S_CEILING: u64 = 31_536_000;
/// Default number of requests that may wait for a worker.
pub const QUEUE_REQUESTS_MAX_DEFAULT: usize = 4096;
/// Most configurable requests that may wait for a worker.
pub const QUEUE_REQUESTS_CEILING: usize = 1 << 16;
/// Bytes of waiting requests.
pub const QUEUE_BYTES_MAX: usize = 256 << 20;
/// Different sets of workers for which requests wait. All are checked when a worker becomes free.
pub const QUEUE_SETS_MAX: usize = 1024;
/// Shortest and longest retry time for a request that found the queue full, nanoseconds.
pub const QUEUE_RETRY_NS_MIN: u64 = 1_000_000;
/// See [`QUEUE_RETRY_NS_MIN`].
pub const QUEUE_RETRY_NS_MAX: u64 = 1_000_000_000;
/// Fairness quantum of the queue: waiting requests decided before the connections of the serving thread.
pub const QUEUE_SERVED_PER_QUANTUM_MAX: usize = 64;
/// How often a request that finds every worker busy reads their loads again before it waits.
pub const QUEUE_RECHECKS_MAX: usize = 4;
/// How often waiting requests are rechecked for capacity that was freed without a report, milliseconds.
pub const QUEUE_RECHECK_MS: u64 = 100;
/// Longest configurable wait of a request for a worker, milliseconds.
pub const QUEUE_WAIT_MS_CEILING: u64 = 3_600_000;
/// How often the control thread checks that the other threads run, milliseconds.
pub const THREADS_WATCH_EVERY_MS: u64 = 500;
/// How often expired bookings are looked for, milliseconds.
pub const BOOKINGS_EXPIRY_EVERY_MS: u64 = 1000;
/// How often the daemon publishes the prefill laws that reports have changed, milliseconds.
pub const LAWS_PUBLISH_EVERY_MS: u64 = 100;
/// Places of workers that a new law is given to before the lock of the bookings is released for others.
pub const LAWS_PUBLISHED_PER_LOCK_MAX: usize = 64;
/// Bookings dropped for their age before the lock is released for others.
pub const BOOKINGS_EXPIRED_PER_LOCK_MAX: usize = 256;
/// How often the daemon looks for findings, milliseconds.
pub const DIAGNOSIS_EVERY_MS: u64 = 1000;
/// Highest age of the findings in a status reply, milliseconds: the pages of one status share them.
pub const DIAGNOSIS_AGE_MS_MAX: u64 = 100;
/// What *recent* means in a finding: between half of this and all of it, milliseconds.
pub const RECENT_MS: u64 = 600_000;
/// Workers named by one finding on the wire.
pub const FINDING_WORKERS_MAX: usize = 64;
/// Prompts for which a serving thread remembers the worker.
pub const REPEATS_REMEMBERED: usize = 1024;
/// Leading blocks that identify a prompt. Shorter prompts are ignored.
pub const REPEAT_BLOCKS: usize = 4;
/// A prompt repeated sooner may not have been computed yet, milliseconds.
pub const REPEAT_AGE_MS_MIN: u64 = 3_000;
/// A prompt repeated later may have been evicted, milliseconds.
pub const REPEAT_AGE_MS_MAX: u64 = 60_000;
/// Recent repeated prompts without a hit before the finding `foreign_hashes`.
pub const FOREIGN_REPEATS_MIN: u64 = 32;
/// Blocks that a worker must hold before the finding `foreign_hashes`: a nearly empty cache has no hits either.
pub const FOREIGN_BLOCKS_HELD_MIN: u64 = 256;
/// Decisions for a worker without events before the finding `events_off`.
pub const EVENTS_OFF_DECISIONS_MIN: u64 = 32;
/// How long that must last, milliseconds: an engine may be busy with its first prefill.
pub const EVENTS_OFF_MS_MIN: u64 = 5_000;
/// Recent duplicate batches, or root chains announced again, before the finding `duplicate_storm`.
pub const DUPLICATES_RECENT_MIN: u64 = 64;
/// Recent restarts of one publisher before the finding `restart_loop`.
pub const RESTARTS_RECENT_MIN: u64 = 3;
/// Recent breaks of one publisher's connection before the finding `restart_loop`.
pub const DISCONNECTS_RECENT_MIN: u64 = 5;
/// Recent failed replays of one publisher, without a successful one, before the finding `replay_silent`.
pub const REPLAYS_SILENT_RECENT_MIN: u64 = REPLAY_SILENT_TRIES_MAX as u64;
/// Recent failed recoveries of one publisher before the finding `recovery_fails`.
pub const RECOVERIES_FAILED_RECENT_MIN: u64 = 2;
/// Recent contended decisions, if also one in a hundred, before the finding `read_contended`.
pub const CONTENDED_RECENT_MIN: u64 = 16;
/// Recent bookings ended by age, if also one in a hundred, before the finding `bookings_leak`.
pub const BOOKINGS_LEAKED_RECENT_MIN: u64 = 16;
/// A jump of the wall clock that raises the finding `clock_stepped`, milliseconds.
pub const CLOCK_STEP_MS_MIN: u64 = 1_000;
/// Sessions of one daemon.
pub const SESSIONS_MAX: usize = 1 << 16;
/// Abandoned sessions ended before the lock is released for others.
pub const SESSIONS_ENDED_PER_LOCK_MAX: usize = 4096;

/// Longest configurable grace or interval of discovery, milliseconds.
pub const DISCOVERY_MS_CEILING: u64 = 86_400_000;
/// Bytes of one file of workers.
pub const DISCOVERY_FILE_BYTES_MAX: u64 = 16 << 20;
/// Characters of one file of workers that begin or separate entries (`=`, `:`, `,`, `.`, `[` and `{`). A parser makes
/// about a hundred bytes of each. `WORKERS_MAX` workers of about ten fields have this many.
pub const DISCOVERY_FILE_MARKS_MAX: usize = 1 << 17;
/// Problems listed for one configuration or file of workers.
pub const PROBLEMS_MAX: usize = 256;
/// Rebuilds of a shard's index after a panic of its thread, within [`INGEST_REBUILD_PERIOD_MS`].
pub const INGEST_REBUILDS_MAX: usize = 8;
/// The period in which the rebuilds of a shard count, milliseconds.
pub const INGEST_REBUILD_PERIOD_MS: u64 = 600_000;
/// Panics of an ingest thread because of one worker's events before the worker is left out.
pub const INGEST_PANICS_PER_WORKER_MAX: u32 = 3;
/// How long the daemon waits for reading one file of workers before it goes on with the others, and for reading its
/// configuration again, milliseconds.
pub const DISCOVERY_READ_MS_MAX: u64 = 2_000;
/// Reads of the configuration for SIGHUP that may hang at once, each with a thread.
pub const CONFIG_READS_HELD_MAX: usize = 4;
/// Reads of files of workers that may hang at once, each with a thread.
pub const DISCOVERY_READS_HELD_MAX: usize = 16;
/// Workers and engines that all files of workers name together. A file that would exceed it is refused.
pub const DISCOVERY_ENTRIES_MAX: usize = 4 * WORKERS_MAX;
/// Ranks of all engines that are named by their URL, the same engine as often as it is named. The control thread merges
/// them on every change.
pub const RANKS_ASKED_MAX: usize = 4 * WORKERS_MAX;
/// Answers of one admin connection that other threads still work on.
pub const ADMIN_ANSWERS_WAITING_MAX: usize = 16;
/// Files of workers in one folder.
pub const DISCOVERY_FILES_MAX: usize = 4096;
/// Bytes of an engine's answer about its event endpoints.
pub const SERVER_INFO_BYTES_MAX: u64 = 4 << 20;
/// Timeout of an engine's answer about its event endpoints, milliseconds.
pub const SERVER_INFO_MS_MAX: u64 = 5_000;
/// First and longest back-off before an engine without an answer is asked again, milliseconds.
pub const SERVER_INFO_BACK_OFF_MS: [u64; 2] = [250, 30_000];
/// Interval of the checks of an engine that has answered, milliseconds.
pub const SERVER_CHECK_EVERY_MS: u64 = 2_000;
/// Timeout of a check of an engine, milliseconds.
pub const SERVER_CHECK_MS_MAX: u64 = 2_000;
/// Failed checks of an engine in a row before its workers get a back-off.
pub const SERVER_CHECKS_FAILED_MAX: u32 = 3;
/// Engines asked at once, and engines checked at once.
pub const SERVERS_ASKED_MAX: usize = 8;
/// Pause after a change of a file of workers before it is read, because more changes often follow, milliseconds.
pub const DISCOVERY_SETTLE_MS: u64 = 20;
/// Pause before the reconciler checks again whether a worker that left is gone from the index, milliseconds.
pub const RECONCILE_RETRY_MS: u64 = 2;
/// Fields of one request to add or change a worker.
pub const WORKER_FIELDS_MAX: usize = 64;
/// Bookings checked, when a worker is removed, before the lock is released for others.
pub const BOOKINGS_LEAVING_PER_LOCK_MAX: usize = 4096;

/// Longest configurable time of a booking or a session, seconds.
pub const BOOKING_S_CEILING: u64 = 86_400;
/// Longest configurable wait for a worker's events, milliseconds.
pub const EVENTS_MS_CEILING: u64 = 86_400_000;

/// Most configurable decisions of one serving thread that wait for the journal.
pub const JOURNAL_RING_RECORDS_CEILING: u64 = 1 << 20;
/// Workers in all decisions of one serving thread that wait for the journal.
pub const JOURNAL_WAITING_WORKERS_MAX: usize = 1 << 17;
/// Capacity, in workers, that a written buffer of the journal keeps.
pub const JOURNAL_BUFFER_WORKERS_KEPT: usize = 512;
/// Identities of one prompt's prefixes in the journal. Tokens beyond them have none.
pub const JOURNAL_PREFIX_IDENTITIES_MAX: usize = 4096;
/// Identities that weigh as much as one worker while a decision waits for the journal.
pub const JOURNAL_IDENTITIES_PER_WORKER: usize = 32;
/// Identities that the writer or a reader of a journal file remembers before it begins anew.
pub const JOURNAL_KNOWN_IDENTITIES_MAX: usize = 1 << 18;
/// Most configurable tokens for each identity.
pub const JOURNAL_PREFIX_TOKENS_CEILING: u64 = 1 << 16;
/// Ended requests of all threads that may wait for the journal, for each decision of one thread that may.
pub const JOURNAL_ENDS_PER_RECORD: usize = 4;
/// Smallest configurable size of a journal file, bytes.
pub const JOURNAL_FILE_BYTES_MIN: u64 = 4 << 10;
/// Largest configurable size of a journal file, bytes: readers load a file as a whole.
pub const JOURNAL_FILE_BYTES_CEILING: u64 = 1 << 30;
/// Most configurable journal files.
pub const JOURNAL_FILES_CEILING: u64 = 1 << 16;
/// Fairness quantum of the journal: decisions of one serving thread before the next.
pub const JOURNAL_RECORDS_PER_QUANTUM_MAX: usize = 256;
/// Bytes of one write to the journal.
pub const JOURNAL_WRITE_BYTES: usize = 256 << 10;
/// Pause of the journal's writer when no decision waits, milliseconds.
pub const JOURNAL_PAUSE_MS: u64 = 10;
/// Pause of the journal's writer while the journal is off, milliseconds.
pub const JOURNAL_OFF_PAUSE_MS: u64 = 1_000;
/// Rounds of the journal's writer after a failed write before it tries again.
pub const JOURNAL_RETRY_ROUNDS: u32 = 100;
/// Settings of a shadow policy.
pub const POLICY_SETTINGS_MAX: usize = 64;
/// Largest load accepted from a journal, so that sums over a fleet stay exact.
pub const JOURNAL_NUMBER_MAX: u64 = 1 << 40;

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
const _: () = assert!(TRANSFER_BEGIN_MS_MAX > REPLAY_UNANSWERED_MS_MAX, "a replay without an answer ends no dump");
const _: () = assert!(TRANSFER_BEGIN_MS_MAX < TAKEOVER_DUMP_MS_MAX, "a daemon that takes over hears why there is none");
const _: () = assert!(SNAPSHOT_LOADS_AT_ONCE_MAX < TRANSFERS_WAITING_MAX, "loads of newcomers leave room for dumps");
const _: () = assert!(EVENT_MESSAGE_BYTES_MAX <= HELD_BYTES_MAX, "one message alone never ends a dump");
const _: () = assert!(EVENT_MESSAGE_BYTES_MAX <= RECOVERY_HELD_BYTES_MAX, "one message alone is never dropped");
const _: () = assert!(SHARD_MEMORY_BYTES_MIN * SHARDS_MAX as u64 <= SPACE_MEMORY_BYTES_CEILING);
const _: () = assert!(WORKER_BLOCKS_MAX_DEFAULT <= WORKER_BLOCKS_CEILING);
const _: () = assert!(SHARDS_MAX <= u16::MAX as usize, "a shard's number is a u16");
const _: () = assert!(CORES_MAX <= u16::MAX as usize, "the configured number of cores is a u16");
const _: () = assert!(BOOKINGS_PER_SESSION_MAX <= BOOKINGS_MAX);
const _: () = assert!(LOAD_CHANGES_KEPT.is_power_of_two());
const _: () =
    assert!(GAUGE_NUMBER_MAX * ORIGINS_MAX as u64 <= JOURNAL_NUMBER_MAX / 2, "others leave room for own load");
const _: () = assert!(
    GAUGE_WORK_NS_MAX * ORIGINS_MAX as u64 <= u64::MAX - PREFILL_WORK_NS_MAX * BOOKINGS_MAX as u64,
    "a worker's work is a u64, with that of other routers too"
);
const _: () = assert!(QUEUE_REQUESTS_MAX_DEFAULT <= QUEUE_REQUESTS_CEILING);
const _: () = assert!(
    ACTIVE_WORDS_MAX < 1 << 31,
    "the number of a node of the tree of prompts in flight differs from that of a root"
);
const _: () = assert!(REPEATS_REMEMBERED.is_power_of_two() && REPEAT_AGE_MS_MIN < REPEAT_AGE_MS_MAX);
const _: () = assert!(REPEAT_AGE_MS_MAX < RECENT_MS / 2, "a prompt is judged within what is recent");
const _: () = assert!(WORKERS_MAX <= 1 << 16, "a worker's slot is a u16");
const _: () = assert!(WORKERS_MAX <= 1 << crate::ids::WORKER_PLACE_BITS, "a worker's index holds its place");
const _: () = assert!(JOURNAL_NUMBER_MAX * WORKERS_MAX as u64 <= 1 << 53, "a sum is exact as a fraction");
const _: () = assert!(JOURNAL_WAITING_WORKERS_MAX >= WORKERS_MAX, "a decision about all workers can wait");
const _: () = assert!(PREFILL_WORK_NS_MAX.checked_mul(BOOKINGS_MAX as u64).is_some(), "a worker's work is a u64");
