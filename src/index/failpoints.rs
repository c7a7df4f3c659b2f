//! Panics on purpose, in the middle of changes: which one is decided by what an event names. Tests only.

use crate::ids::{EngineHash, LocalHash};

/// A block whose careful store ends while the shard is torn.
pub(crate) const IN_MULTI_WRITE: EngineHash = EngineHash(0x6d69_7368_6170_0001);
/// A node that begins with this content is left with an odd version.
pub(crate) const OPEN_HEADER: LocalHash = LocalHash(0x6d69_7368_6170_0002);

/// The careful store of a block begins.
pub(super) fn at_block(name: EngineHash) {
    assert!(name != IN_MULTI_WRITE, "on purpose, while the shard is torn");
}

/// A node's line is about to be written.
pub(super) fn at_line(first: u64, open: impl FnOnce()) {
    if first == OPEN_HEADER.0 {
        open();
        panic!("on purpose, while a header is open");
    }
}
