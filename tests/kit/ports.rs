//! Ports for servers that a test starts.

use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::sync::atomic::{AtomicU32, Ordering};

/// Ports below this one are for known services.
const LOWEST: u32 = 10_000;

/// A port that nobody listens on, and that no connection out of this machine is given: one that is would fail the
/// server's bind. A process gives each port once.
pub(crate) fn free_port() -> u16 {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let count = lowest_of_outgoing().saturating_sub(LOWEST).max(1);
    for _ in 0..count {
        // Processes start at places of their own.
        // Relaxed: only the number itself is shared.
        let place = NEXT.fetch_add(1, Ordering::Relaxed).wrapping_add(std::process::id().wrapping_mul(97));
        let port = u16::try_from(LOWEST + place % count).expect("a port");
        if TcpListener::bind((Ipv4Addr::UNSPECIFIED, port)).is_ok() {
            return port;
        }
    }
    panic!("no port from {LOWEST} to {} is free", LOWEST + count - 1);
}

/// Such a port on the loopback interface.
pub(crate) fn free_address() -> SocketAddr {
    (Ipv4Addr::LOCALHOST, free_port()).into()
}

/// The first port that the kernel gives to connections out of this machine.
fn lowest_of_outgoing() -> u32 {
    let range = std::fs::read_to_string("/proc/sys/net/ipv4/ip_local_port_range").unwrap_or_default();
    range.split_whitespace().next().and_then(|low| low.parse().ok()).filter(|low| *low > LOWEST).unwrap_or(32_768)
}
