//! Limits of the connection to a NATS server. The server is not believed more than any other peer.

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
