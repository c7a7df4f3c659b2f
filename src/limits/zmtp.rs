//! Bounds of ZeroMQ connections, counted as bytes arrive and not once a message is whole.

use super::EVENT_MESSAGE_BYTES_MAX;

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
