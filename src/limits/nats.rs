//! Limits of the connection to a NATS server. The server is not believed more than any other peer.

use super::RELAY_SILENT_MS_MAX;

/// Servers of one cluster in the configuration.
pub const NATS_SERVERS_MAX: usize = 8;
/// Bytes of the subjects' prefix in the configuration.
pub const NATS_PREFIX_BYTES_MAX: usize = 64;
/// Bytes of one control line of a server, such as what it tells of itself and of its cluster.
pub const NATS_LINE_BYTES_MAX: usize = 64 << 10;
/// Bytes of one read.
pub const NATS_READ_BYTES: usize = 16 << 10;
/// Bytes read from a server before other work is done.
pub const NATS_QUANTUM_BYTES_MAX: usize = 16 * NATS_READ_BYTES;
/// Time for a connection: TCP, TLS and the login, milliseconds.
pub const NATS_OPEN_MS_MAX: u64 = 5_000;
/// Of it, time for the server's greeting, milliseconds. Without an answer, TCP asks again after 1 s.
pub const NATS_CONNECT_MS_MAX: u64 = 1_500;
/// First pause after a failed connection, milliseconds. Doubles after each.
pub const NATS_RECONNECT_MS_MIN: u64 = 25;
/// Longest such pause, milliseconds. Load is known again soon after a server is back.
pub const NATS_RECONNECT_MS_MAX: u64 = 500;
/// Pause after a server has refused the login, or has broken the protocol, milliseconds.
pub const NATS_REFUSED_MS: u64 = 5_000;
/// Silence of a server after which it is asked for a sign of life, milliseconds.
pub const NATS_HEARTBEAT_MS: u64 = 1_000;
/// How long its answer may take, milliseconds.
pub const NATS_HEARTBEAT_TIMEOUT_MS: u64 = 2_000;
/// How long other routers have to answer a greeting before their number is taken as known, milliseconds.
pub const NATS_GREETED_MS: u64 = 250;
/// Greetings and requests of other routers that are taken in one tick. Further ones are dropped and counted.
pub const NATS_ASKED_PER_TICK_MAX: u32 = 256;
/// Time without a message after which a router is no longer expected, milliseconds.
pub const NATS_ROUTER_FORGOTTEN_MS: u64 = 60_000;
/// Bytes that wait for a server which is asked only a little.
pub const NATS_WAITING_BYTES_MAX: usize = 64 << 10;

// ---- events of workers in a JetStream stream ----

/// Bytes of a stored message, the headers of a stranger included. Servers allow 1 MiB unless told otherwise.
pub const NATS_EVENT_BYTES_MAX: usize = 8 << 20;
/// Bytes of all workers of a prefix in a stream that a relay makes. The oldest messages go first.
pub const NATS_STREAM_BYTES_MAX: u64 = 1 << 30;
/// Messages of one worker on one subject of such a stream, so that no worker takes the room of others.
pub const NATS_STREAM_SUBJECT_MESSAGES_MAX: u64 = 1 << 18;
/// How long a stream remembers the names of messages, so that none that is sent again is stored twice, seconds.
pub const NATS_TWICE_S_MAX: u64 = 120;
/// How long a server keeps a consumer without a reader, seconds.
pub const NATS_CONSUMER_IDLE_S: u64 = 10;
/// Messages of a replay that are asked for at once. Twice as many are under way.
pub const NATS_PULL_MESSAGES: u32 = 32;
/// How long an answer of JetStream may take before the question is asked again, milliseconds.
pub const NATS_ANSWER_MS_MAX: u64 = 1_000;
/// Pause before a reader that found no beginning looks again, milliseconds.
pub const NATS_LOOK_AGAIN_MS: u64 = 100;
/// Messages of strangers that a subscription skips before other work is done.
pub const NATS_SKIPPED_PER_QUANTUM_MAX: u32 = 64;
/// Silence of a worker's relay after which it counts as disconnected, milliseconds. It sends heartbeats.
pub const NATS_RELAY_SILENT_MS_MAX: u64 = RELAY_SILENT_MS_MAX;
/// Messages of a relay that wait for the stream's acknowledgement.
pub const NATS_UNSTORED_MESSAGES_MAX: usize = 256;
/// Bytes of these.
pub const NATS_UNSTORED_BYTES_MAX: usize = 4 << 20;
/// How long an acknowledgement may take before all messages that wait are sent again, milliseconds.
pub const NATS_STORED_MS_MAX: u64 = 2_000;
/// Pause after a refusal before a relay begins anew, milliseconds.
pub const NATS_REFUSED_STORE_MS: u64 = 1_000;
/// How often a relay looks whether what a reader begins with is still there, milliseconds.
pub const NATS_START_LOOK_MS: u64 = 5_000;
/// How long a relay's thread for NATS waits for something to do, milliseconds.
pub const NATS_RELAY_WAIT_MS: u64 = 50;
