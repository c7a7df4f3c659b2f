//! Limits of event streams: recovery of lost batches, ZeroMQ connections, and the peers of a relay.

use super::EVENT_MESSAGE_BYTES_MAX;

// ---- Recovery --------------------------------------------------------------------------------------------

/// Messages of a worker that wait during a dump, load or recovery. One more aborts the dump or load. In a recovery the
/// oldest is dropped, because the replay brings it again.
pub const HELD_MESSAGES_MAX: usize = 1 << 14;
/// Payload bytes of those messages.
pub const HELD_BYTES_MAX: usize = 64 << 20;
/// Payload bytes that wait for the recovery of all workers of a shard.
pub const RECOVERY_HELD_BYTES_MAX: usize = 256 << 20;
/// Replays requested by a shard and not yet received, each over a socket of its own. An idle engine takes up to 100 ms
/// to answer, so a thousand workers need this many to reconnect within seconds.
pub const REPLAYS_AT_ONCE_MAX: usize = 16;
/// Estimated bytes in flight in the replays of one shard. Beyond it no replay begins.
pub const REPLAYS_UNDER_WAY_BYTES_MAX: usize = 256 << 20;
/// Estimated bytes of a worker's first replay.
pub const REPLAY_BYTES_GUESSED: usize = 16 << 20;
/// Bytes of one replay. At this limit it is cut and requested again from where it stands.
pub const REPLAY_BYTES_MAX: usize = 256 << 20;
/// Longest replay, with its snapshot, from request to end, milliseconds. Then it is cut and requested again, as if it
/// had not been answered.
pub const REPLAY_WHOLE_MS_MAX: u64 = 600_000;
/// Bytes of a replay with a snapshot: the largest snapshot and the batches after it.
pub const REPLAY_SNAPSHOT_BYTES_MAX: usize = super::RELAY_SNAPSHOT_BYTES_MAX + REPLAY_BYTES_MAX;
/// Fairness quantum of a replay: batches of one worker before the next.
pub const REPLAY_QUANTUM_BATCHES_MAX: usize = 64;
/// Bytes of those batches.
pub const REPLAY_QUANTUM_BYTES_MAX: usize = 1 << 20;
/// Time for an engine to begin its answer, milliseconds. It answers between two batches of its own.
pub const REPLAY_FIRST_MS_MAX: u64 = 3_000;
/// Time from one batch of an answer to the next or to the end, milliseconds.
pub const REPLAY_NEXT_MS_MAX: u64 = 2_000;
/// Replays in a row without a new batch before the missing batches count as lost.
pub const REPLAY_TRIES_MAX: u32 = 4;
/// The same for a publisher that has never answered and of which no block is held: going on with live batches loses
/// nothing, and a later replay starts from 0 again.
pub const REPLAY_SILENT_TRIES_MAX: u32 = 2;
/// The same if an answer begins after the requested batch, which has then left the engine's buffer.
pub const REPLAY_LATE_TRIES_MAX: u32 = 2;
/// Replays of one recovery, even if each brings a new batch.
pub const REPLAYS_PER_RECOVERY_MAX: u32 = 64;
/// First back-off between replays, milliseconds. Four times as long after each replay without a new batch.
pub const REPLAY_BACK_OFF_MS_MIN: u64 = 50;
/// After batches were lost for good: the wait before a replay of the publisher's whole life is requested, milliseconds.
/// Doubles after each try without success. An answer makes the engine send its whole buffer.
pub const RENEWAL_AFTER_MS_MIN: u64 = 10_000;
/// Most doublings of that wait: to about eleven minutes.
pub const RENEWAL_DOUBLINGS_MAX: u32 = 6;
/// How long a worker's live messages wait for a publisher that never answers, milliseconds: all tries and the back-off
/// between them. The wait for a free replay socket comes on top.
pub const REPLAY_UNANSWERED_MS_MAX: u64 = unanswered_ms(REPLAY_TRIES_MAX);
/// The same for a publisher that has never answered and of which no block is held.
pub const REPLAY_SILENT_MS_MAX: u64 = unanswered_ms(REPLAY_SILENT_TRIES_MAX);

/// The time of `tries` unanswered tries, and of the back-off between them, which quadruples.
const fn unanswered_ms(tries: u32) -> u64 {
    tries as u64 * REPLAY_FIRST_MS_MAX + REPLAY_BACK_OFF_MS_MIN * ((1 << (2 * tries)) - 4) / 3
}

/// Most doublings of the time between probes of a quiet worker.
pub const PROBE_DOUBLINGS_MAX: u32 = 3;

const _: () = assert!(HELD_BYTES_MAX * 4 == RECOVERY_HELD_BYTES_MAX, "a worker's part is a quarter");
const _: () = assert!(REPLAY_SILENT_TRIES_MAX <= REPLAY_TRIES_MAX);
const _: () = assert!(REPLAY_BYTES_GUESSED <= REPLAYS_UNDER_WAY_BYTES_MAX);

// ---- ZeroMQ connections and relays -----------------------------------------------------------------------

/// Bytes of one message from a publisher or a replay. A larger one cuts the connection. Messages between
/// [`EVENT_MESSAGE_BYTES_MAX`] and this are received, skipped and counted.
pub const ZMQ_MESSAGE_BYTES_MAX: usize = 2 * EVENT_MESSAGE_BYTES_MAX;
/// Parts of such a message; engines send three or four.
pub const ZMQ_PARTS_MAX: usize = 64;
/// Bytes of one ZMTP command (READY, PING, SUBSCRIBE, …).
pub const ZMQ_COMMAND_BYTES_MAX: usize = 4 << 10;
/// Bytes of one read. A larger message gets a buffer that doubles as its bytes arrive.
pub const ZMQ_READ_BYTES: usize = 64 << 10;
/// Bytes of large messages that each connection may hold, whatever the others hold. Beyond it they share
/// [`SHARD_MESSAGES_BYTES_MAX`](super::SHARD_MESSAGES_BYTES_MAX). Engines send a few hundred KiB at most.
pub const ZMQ_MESSAGE_BYTES_FREE: usize = 1 << 20;
/// Fairness quantum of a publisher: bytes read before the next.
pub const ZMQ_QUANTUM_BYTES_MAX: usize = 1 << 20;
/// First back-off before reconnecting to a publisher, milliseconds. Doubles after each failure.
pub const ZMQ_RECONNECT_MS_MIN: u64 = 100;
/// Longest back-off before reconnecting, milliseconds. Also the wait after a message that exceeds a limit.
pub const ZMQ_RECONNECT_MS_MAX: u64 = 2_000;
/// A publisher that sends nothing for this long gets a PING, milliseconds.
pub const ZMQ_HEARTBEAT_MS: u64 = 2_000;
/// Timeout of the answer to a PING, after which the connection counts as lost, milliseconds.
pub const ZMQ_HEARTBEAT_TIMEOUT_MS: u64 = 5_000;
/// Time for any answer from an address that a connection is tried to, milliseconds. Without one, TCP asks again after 1 s.
pub const ZMQ_CONNECT_MS_MAX: u64 = 3_000;
/// Time for a publisher from the first connection attempt to the end of the handshake, milliseconds.
pub const ZMQ_HANDSHAKE_MS_MAX: u64 = 10_000;
/// Host names resolved at once, each on a thread of its own. Further ones wait.
pub const NAME_LOOKUPS_MAX: usize = 128;
/// Addresses tried for one host name, in the resolver's order.
pub const NAME_ADDRESSES_MAX: usize = 8;
/// Most bytes of one replay that are received and not yet applied. A message counts as all that was received for it plus
/// [`ZMQ_HELD_MESSAGE_BYTES`]. Further bytes wait in the kernel and then in the engine.
pub const REPLAY_READ_AHEAD_BYTES_MAX: usize = 32 << 20;
/// Fairness quantum of a replay: bytes received before the next.
pub const REPLAY_RECEIVE_BYTES_MAX: usize = 4 << 20;
/// Bytes counted for a waiting message besides those that were received for it.
pub const ZMQ_HELD_MESSAGE_BYTES: usize = 128;
/// How often replays are received between the quanta of publishers, milliseconds: an engine drops messages that its
/// socket cannot take at once.
pub const REPLAY_RECEIVE_EVERY_MS: u64 = 1;

/// Peers on each of a relay's two ports.
pub const RELAY_PEERS_MAX: usize = 512;
/// Peers on one port from one address.
pub const RELAY_PEERS_PER_ADDRESS_MAX: usize = 128;
/// Bytes of one message to a relay. Subscriptions and replay requests have a few bytes.
pub const RELAY_REQUEST_BYTES_MAX: usize = 1 << 10;
/// Parts of one message to a relay.
pub const RELAY_REQUEST_PARTS_MAX: usize = 4;
/// Fairness quantum of a relay's peer: bytes read before the next.
pub const RELAY_PEER_QUANTUM_BYTES_MAX: usize = 64 << 10;
/// Fairness quantum of a relay's peer: messages taken before the next.
pub const RELAY_PEER_QUANTUM_MESSAGES_MAX: usize = 256;
/// Timeout of the handshake of a relay's peer, milliseconds.
pub const RELAY_HANDSHAKE_MS_MAX: u64 = 5_000;
/// How long a relay's peer may read nothing while messages wait for it, milliseconds.
pub const RELAY_PEER_STALL_MS_MAX: u64 = 30_000;
/// Bytes of the stream that wait for one subscriber. Messages beyond are dropped for it, and it requests a replay. A
/// single message always fits if none waits. Subscribers share the bytes of one message.
pub const RELAY_SUBSCRIBER_BYTES_MAX: usize = 64 << 20;
/// A subscriber with a waiting message that is older than this many times [`RELAY_SUBSCRIBER_BYTES_MAX`] of the stream
/// is disconnected: it has missed messages anyway, and old messages would stay in memory for it alone.
pub const RELAY_SUBSCRIBER_LAG_FACTOR_MAX: u64 = 4;
/// Messages that wait for one subscriber.
pub const RELAY_SUBSCRIBER_MESSAGES_MAX: usize = 1 << 14;
/// Messages between the thread that makes the stream and the thread that sends it.
pub const RELAY_STREAM_MESSAGES_MAX: usize = 1 << 14;
/// Bytes of those messages.
pub const RELAY_STREAM_BYTES_MAX: usize = 64 << 20;
/// Bytes of an answer that wait for its receiver. A single message always fits if none waits.
pub const RELAY_ANSWER_BYTES_MAX: usize = 4 << 20;

const _: () = assert!(ZMQ_RECONNECT_MS_MIN <= ZMQ_RECONNECT_MS_MAX);
const _: () = assert!(ZMQ_CONNECT_MS_MAX <= ZMQ_HANDSHAKE_MS_MAX);
const _: () = assert!(ZMQ_READ_BYTES <= ZMQ_MESSAGE_BYTES_FREE);
const _: () = assert!(RELAY_PEERS_PER_ADDRESS_MAX < RELAY_PEERS_MAX, "one address never takes all connections");
const _: () = assert!(REPLAY_RECEIVE_BYTES_MAX <= REPLAY_READ_AHEAD_BYTES_MAX);
