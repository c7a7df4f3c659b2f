//! Bounds of who may connect, and of how long a client may take.

/// Users, and as many groups, that may be named as those who may connect to a socket.
pub const ALLOWED_ACCOUNTS_MAX: usize = 256;
/// Groups of a peer's process: what the kernel allows.
pub const PEER_GROUPS_MAX: usize = 1 << 16;
/// Longest configurable wait for the rest of a frame, milliseconds.
pub const FRAME_TIMEOUT_MS_CEILING: u64 = 3_600_000;
/// How often is looked for connections that owe the rest of a frame: so many times within the time they have for it.
pub const OVERDUE_LOOKS: u32 = 8;

/// Bytes that the receive buffers of one core's connections may take together, each beyond its minimum. More only where
/// two frames of the configured size need it.
pub const CORE_RECEIVE_BYTES_MAX: usize = 256 << 20;

/// Largest body answered on the admin socket, whose requests are small: what all its connections may send at once is
/// bounded by that.
pub const ADMIN_FRAME_BODY_BYTES_MAX: u32 = 1 << 20;

const _: () = assert!(OVERDUE_LOOKS > 0);
const _: () = assert!(super::FRAME_BODY_BYTES_MAX_DEFAULT as usize * 16 <= CORE_RECEIVE_BYTES_MAX);
