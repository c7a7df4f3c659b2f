//! Panics on purpose, in the middle of changes, for tests. The content of an event chooses where.

use crate::ids::{EngineHash, LocalHash};

/// A slow-path store of this block panics in its multi-write.
pub(crate) const IN_MULTI_WRITE: EngineHash = EngineHash(0x6d69_7368_6170_0001);
/// The header of a node that begins with this content is left at an odd version.
pub(crate) const OPEN_HEADER: LocalHash = LocalHash(0x6d69_7368_6170_0002);

/// Called when the slow path begins to store a block.
pub(super) fn at_block(name: EngineHash) {
    assert!(name != IN_MULTI_WRITE, "on purpose, in a multi-write");
}

/// Called before a node's line is written.
pub(super) fn at_line(first: u64, open: impl FnOnce()) {
    if first == OPEN_HEADER.0 {
        open();
        panic!("on purpose, while a header is open");
    }
}
