//! Limits on the snapshots that engines send themselves. Those of llm-d's and vLLM's proposals are not higher.

use super::{RELAY_SILENT_MS_MAX, TRANSFER_STALL_MS_MAX};

/// Snapshots of engines that are fetched at once, over all shards. Further workers wait.
pub const ENGINE_SNAPSHOTS_AT_ONCE_MAX: usize = 4;
/// Bytes of one answer, over all of its messages.
pub const ENGINE_SNAPSHOT_BYTES_MAX: usize = 256 << 20;
/// Parts of one message of an answer. vLLM sends one for each 256 events.
pub const ENGINE_SNAPSHOT_PARTS_MAX: usize = 1 << 16;
/// Messages of one answer. SGLang sends one for each 4096 blocks.
pub const ENGINE_SNAPSHOT_MESSAGES_MAX: usize = 1 << 12;
/// Blocks of one snapshot.
pub const ENGINE_SNAPSHOT_BLOCKS_MAX: usize = 1 << 20;
/// Memory of the index in which one snapshot is built, bytes.
pub const ENGINE_SNAPSHOT_INDEX_BYTES_MAX: u64 = 256 << 20;
/// How long an engine may take for its whole answer, milliseconds. The worker's messages wait meanwhile.
pub const ENGINE_SNAPSHOT_MS_MAX: u64 = 4_000;
/// How long a snapshot waits for its turn among the dumps and loads of a shard, milliseconds.
pub const ENGINE_SNAPSHOT_TURN_MS_MAX: u64 = 30_000;
/// How often the daemon checks which workers need a snapshot, milliseconds.
pub const ENGINE_SNAPSHOT_CHECK_EVERY_MS: u64 = 500;
/// The first and the longest time before the next try after a failure, milliseconds. It doubles with each.
pub const ENGINE_SNAPSHOT_BACK_OFF_MS: [u64; 2] = [1_000, 60_000];
/// How long a publisher that sends heartbeats may be silent before its worker loses trust, milliseconds. vLLM's proposal
/// sends one each second.
pub const ENGINE_HEARTBEAT_SILENT_MS_MAX: u64 = RELAY_SILENT_MS_MAX;

const _: () = assert!(ENGINE_SNAPSHOT_MS_MAX < TRANSFER_STALL_MS_MAX, "an answer in time ends no load as stalled");
