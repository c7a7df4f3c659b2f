//! Bounds of who may connect, and of how long a client may take.

/// Users, and as many groups, that may be named as those who may connect to a socket.
pub const ALLOWED_ACCOUNTS_MAX: usize = 256;
/// Groups of a peer's process: what the kernel allows.
pub const PEER_GROUPS_MAX: usize = 1 << 16;
/// Longest configurable wait for the rest of a frame, milliseconds.
pub const FRAME_TIMEOUT_MS_CEILING: u64 = 3_600_000;
/// How often is looked for connections that owe the rest of a frame: so many times within the time they have for it.
pub const OVERDUE_LOOKS: u32 = 8;

const _: () = assert!(OVERDUE_LOOKS > 0);
