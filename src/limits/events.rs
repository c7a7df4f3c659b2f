//! Limits of event streams: recovery of lost batches, ZeroMQ connections, and the peers of a relay.

use super::EVENT_MESSAGE_BYTES_MAX;

// ---- Recovery --------------------------------------------------------------------------------------------

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

// ---- ZeroMQ connections and relays -----------------------------------------------------------------------

/// Bytes of one message from a publisher or a replay; one more cuts the connection. Messages between
/// [`EVENT_MESSAGE_BYTES_MAX`] and this are received, skipped and counted.
pub const ZMQ_MESSAGE_BYTES_MAX: usize = 2 * EVENT_MESSAGE_BYTES_MAX;
/// Parts of such a message; engines send three or four.
pub const ZMQ_PARTS_MAX: usize = 64;
/// Bytes of one ZMTP command (READY, PING, SUBSCRIBE, …).
pub const ZMQ_COMMAND_BYTES_MAX: usize = 4 << 10;
/// Bytes that one read asks the kernel for; a larger message gets a buffer that doubles as its bytes arrive.
pub const ZMQ_READ_BYTES: usize = 64 << 10;
/// Bytes that are read from one publisher in a row before the others have their turn.
pub const ZMQ_TURN_BYTES_MAX: usize = 1 << 20;
/// The shortest wait before a publisher is connected to again, milliseconds; doubled after each failure.
pub const ZMQ_RECONNECT_MS_MIN: u64 = 100;
/// The longest such wait, milliseconds. Also the wait after a message that breaks a bound.
pub const ZMQ_RECONNECT_MS_MAX: u64 = 2_000;
/// A publisher that has sent nothing for this long gets a PING, milliseconds.
pub const ZMQ_HEARTBEAT_MS: u64 = 5_000;
/// How long the answer to a PING may take before the connection counts as lost, milliseconds.
pub const ZMQ_HEARTBEAT_TIMEOUT_MS: u64 = 15_000;
/// How long a publisher may take from the first connection attempt to the end of the handshake, milliseconds.
pub const ZMQ_HANDSHAKE_MS_MAX: u64 = 10_000;
/// Host names that are resolved at once, each on a thread of its own; further look-ups wait for one that ends.
pub const NAME_LOOKUPS_MAX: usize = 128;
/// Addresses of one host name that are tried, in the resolver's order.
pub const NAME_ADDRESSES_MAX: usize = 8;
/// Bytes that one replay may have received and not yet applied, [`ZMQ_HELD_MESSAGE_BYTES`] for each message on top.
/// With more, its bytes wait in the kernel and then in the engine.
pub const REPLAY_READ_AHEAD_BYTES_MAX: usize = 32 << 20;
/// Bytes of one replay that are received in a row before the others have their turn.
pub const REPLAY_RECEIVE_BYTES_MAX: usize = 4 << 20;
/// What a message that waits counts for beside its payload, bytes.
pub const ZMQ_HELD_MESSAGE_BYTES: usize = 128;
/// How often replays are received between the turns of publishers, milliseconds: an engine drops what its socket
/// cannot take at once.
pub const REPLAY_RECEIVE_EVERY_MS: u64 = 1;

/// Peers of each of a relay's two ports.
pub const RELAY_PEERS_MAX: usize = 512;
/// Peers of one port that may come from one address.
pub const RELAY_PEERS_PER_ADDRESS_MAX: usize = 128;
/// Bytes of one message to a relay: a subscription or a question takes a few.
pub const RELAY_REQUEST_BYTES_MAX: usize = 1 << 10;
/// Parts of one message to a relay.
pub const RELAY_REQUEST_PARTS_MAX: usize = 4;
/// Bytes read from one peer of a relay before the next has its turn.
pub const RELAY_PEER_TURN_BYTES_MAX: usize = 64 << 10;
/// Messages taken from one peer of a relay before the next has its turn.
pub const RELAY_PEER_TURN_MESSAGES_MAX: usize = 256;
/// How long a peer of a relay may take for the handshake, milliseconds.
pub const RELAY_HANDSHAKE_MS_MAX: u64 = 5_000;
/// How long a peer of a relay may leave everything that waits for it unread, milliseconds.
pub const RELAY_PEER_STALL_MS_MAX: u64 = 30_000;
/// Bytes of the stream that wait for one subscriber; what does not fit is dropped for it, and it asks for a replay.
/// One message always fits where nothing waits. Subscribers share the bytes of one message.
pub const RELAY_SUBSCRIBER_BYTES_MAX: usize = 64 << 20;
/// A subscriber for which something waits that is older than this many times [`RELAY_SUBSCRIBER_BYTES_MAX`] of the stream
/// is disconnected: it misses messages anyway, and subscribers share the bytes of a message only while it is in memory.
pub const RELAY_SUBSCRIBER_LAG_FACTOR_MAX: u64 = 4;
/// Messages that wait for one subscriber.
pub const RELAY_SUBSCRIBER_MESSAGES_MAX: usize = 1 << 14;
/// Messages between the thread that makes the stream and the one that sends it.
pub const RELAY_STREAM_MESSAGES_MAX: usize = 1 << 14;
/// Bytes of those messages.
pub const RELAY_STREAM_BYTES_MAX: usize = 64 << 20;
/// Bytes of an answer that wait for whoever asked; one message always fits where nothing waits.
pub const RELAY_ANSWER_BYTES_MAX: usize = 4 << 20;

const _: () = assert!(ZMQ_RECONNECT_MS_MIN <= ZMQ_RECONNECT_MS_MAX);
const _: () = assert!(RELAY_PEERS_PER_ADDRESS_MAX < RELAY_PEERS_MAX, "one address never takes every place");
const _: () = assert!(REPLAY_RECEIVE_BYTES_MAX <= REPLAY_READ_AHEAD_BYTES_MAX);
