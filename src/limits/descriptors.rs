//! File descriptors: how many everybody takes.

use super::{ADMIN_CONNECTIONS_MAX, HTTP_CONNECTIONS_MAX, METRICS_CONNECTIONS_MAX, SERVERS_ASKED_MAX};

/// A publisher takes its connection and that of a replay.
pub const DESCRIPTORS_PER_PUBLISHER: u64 = 2;
/// A gateway's connection takes its socket, and the same once more while it waits for room to write.
pub const DESCRIPTORS_PER_CONNECTION: u64 = 2;
/// A lane takes its memory and its bell, and the gateway's ends of both until the gateway has them.
pub const DESCRIPTORS_PER_LANE: u64 = 4;
/// A serving thread takes so many: what it waits with, and what wakes it.
pub const DESCRIPTORS_PER_CORE: u64 = 8;
/// An ingest thread takes its event loop (twice: connections that come by themselves have their own handle), what wakes it,
/// and the names that it looks up.
pub const DESCRIPTORS_PER_SHARD: u64 = 16;
/// Kept for the daemon itself: listeners, files, the connections of the other ports (those of administration twice, as
/// above), and descriptors that are about to be closed.
pub const DESCRIPTORS_RESERVED: u64 =
    128 + (HTTP_CONNECTIONS_MAX + METRICS_CONNECTIONS_MAX + 2 * ADMIN_CONNECTIONS_MAX + SERVERS_ASKED_MAX) as u64;
/// More are not asked for, however high the hard limit is.
pub const DESCRIPTORS_WANTED_MAX: u64 = 1 << 20;
/// Connections that a daemon has room for, or does not start.
pub const CONNECTIONS_MIN: usize = 64;

const _: () = assert!(CONNECTIONS_MIN <= super::CONNECTIONS_MAX);
// Everything at its most fits under what is asked for; events and loads of a worker come by a publisher each.
const _: () = assert!(
    DESCRIPTORS_RESERVED
        + super::CORES_MAX as u64 * DESCRIPTORS_PER_CORE
        + super::SHARDS_MAX as u64 * DESCRIPTORS_PER_SHARD
        + super::CONNECTIONS_MAX as u64 * DESCRIPTORS_PER_CONNECTION
        + super::LANES_CEILING * DESCRIPTORS_PER_LANE
        + 2 * super::WORKERS_MAX as u64 * DESCRIPTORS_PER_PUBLISHER
        <= DESCRIPTORS_WANTED_MAX
);
