//! Limits of connections from other hosts, at the daemon's remote port and in `kvrouted connect`. Peers of the port are
//! not authenticated until their token is checked, so these limits apply before.

use super::{CONNECTIONS_MAX, UNREAD_MS_MAX_DEFAULT};

// ---- Principals --------------------------------------------------------------------------------------------

/// Principals of one file.
pub const PRINCIPALS_MAX: usize = 256;
/// Bytes of a principal's name.
pub const PRINCIPAL_NAME_BYTES_MAX: usize = 64;
/// Tokens that a principal may have at once: the old one and the new one while they are rotated.
pub const PRINCIPAL_TOKENS_MAX: usize = 2;
/// Shortest token, bytes.
pub const TOKEN_BYTES_MIN: usize = 32;
/// Longest token, bytes.
pub const TOKEN_BYTES_MAX: usize = 256;
/// Largest file of principals, certificates or a key, bytes.
pub const REMOTE_FILE_BYTES_MAX: u64 = 1 << 20;

// ---- Opening a connection ----------------------------------------------------------------------------------

/// Time for the TLS handshake and the token, milliseconds. For a caller, also for its lookup of the host and the TCP
/// connection.
pub const REMOTE_OPEN_MS_MAX: u64 = 5_000;
/// Connections whose peers have not sent their token yet. A further one displaces one of them.
pub const REMOTE_HALF_OPEN_MAX: usize = 128;
/// Connections that an address may begin at once, after it has begun none for a while. An IPv6 address counts as its
/// network of 64 bits. Clients of one host that reconnect together, as after a restart of the daemon, need as many.
pub const REMOTE_ADDRESS_CONNECTIONS_AT_ONCE: u32 = 512;
/// Connections that an address may begin each second after those.
pub const REMOTE_ADDRESS_CONNECTIONS_PER_S: u32 = 20;
/// Places for addresses. What an address takes is counted at one of them.
pub const REMOTE_ADDRESS_PLACES: usize = 4096;
/// For how long an address stays a caller's after its last open connection has ended, seconds.
pub const REMOTE_CALLER_KNOWN_S: u64 = 600;
/// Share of one processor that all strangers may take for handshakes and tokens, percent. A stranger is a peer whose
/// address is no caller's. A handshake takes 0.2 ms with a P-256 key, 1 ms with an RSA key of 2048 bits.
pub const REMOTE_STRANGERS_PERCENT: u32 = 10;
/// Time of a processor that strangers may take at once, after they have taken none for a while, milliseconds.
pub const REMOTE_STRANGERS_MS_AT_ONCE: u64 = 500;
/// Bytes that a peer may send before its token is checked: two greetings of TLS, the end of the handshake, the token.
pub const REMOTE_OPENING_BYTES_MAX: u64 = 16 << 10;
/// Bytes of the error frame of a refused connection.
pub const REMOTE_REFUSAL_BYTES_MAX: u32 = 16 << 10;
/// Opened connections that wait for the control thread.
pub const REMOTE_WAITING_MAX: usize = 64;

// ---- Open connections --------------------------------------------------------------------------------------

/// Default of the most open connections of the port.
pub const REMOTE_CONNECTIONS_MAX_DEFAULT: usize = 256;
/// Highest configurable number of them.
pub const REMOTE_CONNECTIONS_CEILING: u64 = CONNECTIONS_MAX as u64;
/// Bytes carried at once in one direction: the content of the largest TLS record.
pub const REMOTE_CARRIED_BYTES: usize = 16 << 10;
/// Bytes that TLS holds back for a peer that does not read.
pub const REMOTE_TLS_BUFFER_BYTES: usize = 32 << 10;
/// Memory of one connection: what is carried, TLS both ways, and its task, bytes.
pub const REMOTE_CONNECTION_BYTES: u64 = (2 * REMOTE_CARRIED_BYTES + 2 * REMOTE_TLS_BUFFER_BYTES + (32 << 10)) as u64;
/// How long a peer may leave bytes unread, milliseconds.
pub const REMOTE_WRITE_MS_MAX: u64 = UNREAD_MS_MAX_DEFAULT;
/// How long one direction may go on after the other has ended, milliseconds.
pub const REMOTE_END_MS_MAX: u64 = 2_000;
/// How long a peer may leave bytes unacknowledged before the kernel gives it up, milliseconds.
pub const REMOTE_UNACKNOWLEDGED_MS_MAX: u32 = 15_000;
/// Silence after which the kernel probes a peer, seconds; also the pause between two probes.
pub const REMOTE_PROBE_AFTER_S: u64 = 5;
/// Probes without an answer before the kernel gives a peer up.
pub const REMOTE_PROBES_MAX: u32 = 2;
/// A connection takes these descriptors besides those of its serving thread: its TCP socket, and one end of a pair.
pub const DESCRIPTORS_PER_REMOTE_CONNECTION: u64 = 2;

// ---- `kvrouted connect` ------------------------------------------------------------------------------------

/// Connections of local clients.
pub const CONNECT_CONNECTIONS_MAX: usize = 1024;
/// Lookups of the host's name at once. The system's resolver blocks a thread for each.
pub const CONNECT_LOOKUPS_MAX: usize = 4;
/// How often the counters are logged, seconds.
pub const CONNECT_REPORT_EVERY_S: u64 = 60;

const _: () = assert!(TOKEN_BYTES_MIN <= TOKEN_BYTES_MAX && TOKEN_BYTES_MAX <= u16::MAX as usize);
const _: () = assert!(1000 % REMOTE_ADDRESS_CONNECTIONS_PER_S == 0 && 100 % REMOTE_STRANGERS_PERCENT == 0);
const _: () = assert!(REMOTE_CONNECTIONS_MAX_DEFAULT as u64 <= REMOTE_CONNECTIONS_CEILING);
const _: () = assert!(
    PRINCIPALS_MAX * PRINCIPAL_TOKENS_MAX * (PRINCIPAL_NAME_BYTES_MAX + TOKEN_BYTES_MAX + 2)
        <= REMOTE_FILE_BYTES_MAX as usize
);
