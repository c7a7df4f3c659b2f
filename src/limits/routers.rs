//! Limits of what routers say to each other about their load.

use super::WORKERS_MAX;

/// Shortest secret that routers authenticate each other with, bytes.
pub const ROUTER_SECRET_BYTES_MIN: usize = 32;
/// Largest file of such a secret, bytes.
pub const ROUTER_SECRET_BYTES_CEILING: u64 = 64 << 10;
/// Addresses of other routers.
pub const ROUTER_PEERS_MAX: usize = ORIGINS_MAX;
/// Other routers whose load one router adds to its own.
pub const ORIGINS_MAX: usize = 64;
/// Other routers for which any router that shares its load has places.
pub const ORIGINS_MIN: usize = 8;
/// Workers with a gauge of one origin, also those that this router does not know.
pub const ORIGIN_WORKERS_MAX: usize = WORKERS_MAX;
/// Bindings accepted from one origin within [`ORIGIN_BINDINGS_WINDOW_MS`]: those of two snapshots.
pub const ORIGIN_BINDINGS_MAX: usize = 2 * LOAD_SNAPSHOT_BINDINGS_MAX;
/// Length of the window in which bindings are counted, milliseconds.
pub const ORIGIN_BINDINGS_WINDOW_MS: u64 = 10_000;

/// Bytes of one message between routers. A larger one is refused before its MAC is computed.
pub const LOAD_MESSAGE_BYTES_MAX: usize = 128 << 10;
/// Gauges of one message: some 35 KiB.
pub const LOAD_MESSAGE_GAUGES_MAX: usize = 512;
/// Bindings of one message: some 19 KiB.
pub const LOAD_MESSAGE_BINDINGS_MAX: usize = 512;
/// Parts of one snapshot.
pub const LOAD_SNAPSHOT_PARTS_MAX: u32 = 128;
/// Bindings of one snapshot.
pub const LOAD_SNAPSHOT_BINDINGS_MAX: usize = LOAD_SNAPSHOT_PARTS_MAX as usize * LOAD_MESSAGE_BINDINGS_MAX;
/// Changed bindings that wait for a batch. Further ones are dropped and counted.
pub const LOAD_BINDINGS_PENDING_MAX: usize = 1 << 14;
/// Time between two batches of a router while its load changes, milliseconds, unless configured.
pub const LOAD_BATCH_MS_DEFAULT: u64 = 2;
/// The shortest configurable time, milliseconds.
pub const LOAD_BATCH_MS_MIN: u64 = 1;
/// The longest configurable time, and the time while no load has changed for [`LOAD_IDLE_MS`], milliseconds.
pub const LOAD_BATCH_MS_CEILING: u64 = 5;
/// How long no load must have changed before a router looks for changes less often, milliseconds.
pub const LOAD_IDLE_MS: u64 = 1_000;
/// Time between two heartbeats of a router, milliseconds.
pub const LOAD_HEARTBEAT_MS: u64 = 1000;
/// Shortest time between two heartbeats, one of which comes sooner because a router has connected, milliseconds.
pub const LOAD_BEAT_PAUSE_MS: u64 = 100;
/// Silence of a router after which its link gets a PING, milliseconds. Its heartbeat is late by then.
pub const ROUTER_LINK_HEARTBEAT_MS: u64 = LOAD_HEARTBEAT_MS + 250;
/// Time for the answer, milliseconds. Then the link is made anew: TCP would be silent after a cut for as long as the cut lasted.
pub const ROUTER_LINK_TIMEOUT_MS: u64 = 750;
/// Time for any answer from the address of a router, milliseconds. Without one, TCP asks again after 1 s.
pub const ROUTER_CONNECT_MS_MAX: u64 = 1_500;
/// Time for an attempt to reach a router, to the end of the handshake, milliseconds.
pub const ROUTER_HANDSHAKE_MS_MAX: u64 = 2_500;
/// Longest pause between two attempts to reach a router, milliseconds. Load is known again soon after a cut.
pub const ROUTER_RECONNECT_MS_MAX: u64 = 500;
/// Silence after which the load of an origin is dropped, milliseconds, unless configured.
pub const LOAD_SILENT_MS_MAX_DEFAULT: u64 = 3_000;
/// The shortest configurable time, milliseconds.
pub const LOAD_SILENT_MS_MIN: u64 = 2 * LOAD_HEARTBEAT_MS + 500;
/// The longest configurable time, milliseconds.
pub const LOAD_SILENT_MS_CEILING: u64 = 600_000;
/// The longest configurable time that a daemon waits for the load of others before it is ready, milliseconds.
pub const LOAD_JOIN_MS_CEILING: u64 = 600_000;
/// Timeout of the first request for a snapshot, milliseconds. Doubles after each request.
pub const LOAD_ASK_MS_MIN: u64 = 100;
/// Longest timeout of such a request, and longest time between two of them, milliseconds.
pub const LOAD_ASK_MS_MAX: u64 = 5_000;
/// Shortest time between two snapshots for one asking router, milliseconds. Honest ones ask less often.
pub const LOAD_ANSWER_PAUSE_MS: u64 = LOAD_ASK_MS_MIN / 2;
/// A running prefill that began later than the one before by this is another one, which others must learn, milliseconds.
pub const LOAD_BEGAN_LATER_MS: u64 = 50;
/// How often silence and due requests are looked for, milliseconds.
pub const LOAD_TICK_MS: u64 = 50;
/// How often what status shows of the other routers is made, milliseconds.
pub const LOAD_SHOWN_EVERY_MS: u64 = 250;
/// How long something that was noticed of a router stays a finding, milliseconds.
pub const ROUTER_NOTICED_MS: u64 = 60_000;
/// How long a peer must not be heard before that is a finding, milliseconds.
pub const ROUTER_MISSING_MS_MIN: u64 = 5_000;
/// Time between two readings of the table of affinity sessions for bindings to tell others, milliseconds.
pub const BINDINGS_TOLD_EVERY_MS: u64 = 1_000;
/// Buckets of that table read in one round.
pub const SHARED_BUCKETS_AT_ONCE: usize = 256;
/// Messages taken from one peer before the next one.
pub const ROUTER_QUANTUM_MESSAGES_MAX: usize = 64;
/// Bytes that wait for one router that reads slowly. One that needs more misses messages, and asks for a snapshot.
pub const ROUTER_WAITING_BYTES_MAX: usize = 16 << 20;
/// Messages that wait for one such router.
pub const ROUTER_WAITING_MESSAGES_MAX: usize = 1 << 14;
/// Time between two lookups of the host name of other routers, milliseconds.
pub const ROUTER_NAME_EVERY_MS: u64 = 5_000;
/// Time between two readings of the file of other routers' addresses, milliseconds.
pub const ROUTER_FILE_EVERY_MS: u64 = 1_000;
/// Parts of one message between routers.
pub const ROUTER_PARTS_MAX: usize = 2;
/// Times in a row that an origin is taken anew because its digest differs, before it is quarantined.
pub const LOAD_REPAIRS_MAX: u32 = 4;
/// First quarantine of an origin, milliseconds. Doubles each time.
pub const LOAD_QUARANTINE_MS_MIN: u64 = 5_000;
/// Longest quarantine, milliseconds.
pub const LOAD_QUARANTINE_MS_MAX: u64 = 60_000;

/// Tokens in one gauge.
pub const GAUGE_TOKENS_MAX: u64 = 1 << 40;
/// Parts of decode blocks in one gauge.
pub const GAUGE_DECODE_PARTS_MAX: u64 = 1 << 48;
/// Longest time in one gauge, nanoseconds: some days.
pub const GAUGE_NS_MAX: u64 = 1 << 49;
/// Largest share of a worker's time in one gauge.
pub const GAUGE_SHARE_MAX: f32 = 1024.0;

const _: () = assert!(LOAD_SILENT_MS_MAX_DEFAULT > 2 * LOAD_HEARTBEAT_MS, "one lost heartbeat is no silence");
const _: () = assert!(
    ROUTER_LINK_HEARTBEAT_MS + ROUTER_LINK_TIMEOUT_MS + LOAD_TICK_MS < LOAD_SILENT_MS_MIN,
    "a lost link is made anew before its router counts as silent"
);
const _: () = assert!(WORKERS_MAX <= LOAD_SNAPSHOT_PARTS_MAX as usize * LOAD_MESSAGE_GAUGES_MAX);
const _: () = assert!(LOAD_MESSAGE_GAUGES_MAX * 68 + LOAD_MESSAGE_BINDINGS_MAX * 37 < LOAD_MESSAGE_BYTES_MAX / 2);
const _: () = assert!(LOAD_SNAPSHOT_PARTS_MAX <= u128::BITS, "received parts are bits of a word");
const _: () = assert!(ORIGINS_MAX <= u8::MAX as usize, "a place is a byte");
