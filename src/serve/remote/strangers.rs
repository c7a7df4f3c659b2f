//! What peers may cost the daemon before they have shown a token. Pure: time and the key of the hash are arguments.
//!
//! A TLS handshake is the most expensive thing that a stranger can ask for. So each address may begin a number of
//! connections, and the handshakes of all strangers have a share of one processor. An address with an open connection is a
//! caller's, and stays one for a while after the last. Its handshakes do not count as those of strangers, so that a flood
//! of strangers does not keep it out.
//!
//! Addresses are hashed with a secret key onto a fixed number of places. Two addresses of one place share what it has.

use std::hash::BuildHasher;
use std::net::{IpAddr, Ipv6Addr};
use std::time::{Duration, Instant};

use crate::limits::{
    REMOTE_ADDRESS_CONNECTIONS_AT_ONCE, REMOTE_ADDRESS_CONNECTIONS_PER_S, REMOTE_ADDRESS_PLACES, REMOTE_CALLER_KNOWN_S,
    REMOTE_STRANGERS_MS_AT_ONCE, REMOTE_STRANGERS_PERCENT,
};

/// Host bits of an IPv6 address: one site or host has as many of these addresses as it likes.
const HOST_BITS: u32 = 64;
/// What one connection takes of its address's allowance.
const PER_CONNECTION: Duration = Duration::from_millis(1000 / REMOTE_ADDRESS_CONNECTIONS_PER_S as u64);
/// How many seconds an allowance of all strangers takes to come, for each second of a processor.
const PER_PROCESSOR_SECOND: u32 = 100 / REMOTE_STRANGERS_PERCENT;

/// What stands for an address in limits: an IPv4 address itself, the network of an IPv6 address.
pub(super) fn network_of(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(address) => Ipv6Addr::from_bits(address.to_bits() >> HOST_BITS << HOST_BITS).into(),
        address @ IpAddr::V4(_) => address,
    }
}

/// What was taken of an allowance that comes evenly over time.
#[derive(Clone, Copy, Debug)]
struct Taken {
    /// When all of it will have come again.
    whole_at: Instant,
}

impl Taken {
    fn has_left(self, at_once: Duration, now: Instant) -> bool {
        self.whole_at.saturating_duration_since(now) < at_once
    }

    fn take(&mut self, part: Duration, now: Instant) {
        self.whole_at = self.whole_at.max(now) + part;
    }
}

/// The addresses of one place.
#[derive(Clone, Copy, Debug)]
struct Addresses {
    connections: Taken,
    /// Connections of principals that are open.
    open: u32,
    /// Until when they are a caller's without an open connection.
    known_until: Instant,
}

/// What strangers have taken. `S` hashes addresses.
#[derive(Debug)]
pub(super) struct Strangers<S> {
    hash: S,
    places: Box<[Addresses]>,
    processor: Taken,
}

impl<S: BuildHasher> Strangers<S> {
    /// Nothing was taken yet, and no address is a caller's.
    pub(super) fn new(hash: S, now: Instant) -> Self {
        let unused = Taken { whole_at: now };
        let places = vec![Addresses { connections: unused, open: 0, known_until: now }; REMOTE_ADDRESS_PLACES];
        Self { hash, places: places.into(), processor: unused }
    }

    fn place(&self, address: IpAddr) -> usize {
        (self.hash.hash_one(network_of(address)) % REMOTE_ADDRESS_PLACES as u64) as usize
    }

    /// Counts a connection of an address. Whether it may begin.
    pub(super) fn begin(&mut self, address: IpAddr, now: Instant) -> bool {
        let place = self.place(address);
        let connections = &mut self.places[place].connections;
        let may_begin = connections.has_left(PER_CONNECTION * REMOTE_ADDRESS_CONNECTIONS_AT_ONCE, now);
        if may_begin {
            connections.take(PER_CONNECTION, now);
        }
        may_begin
    }

    /// Whether an address is that of no caller, now or lately.
    pub(super) fn is_stranger(&self, address: IpAddr, now: Instant) -> bool {
        let addresses = &self.places[self.place(address)];
        addresses.open == 0 && addresses.known_until <= now
    }

    /// Whether a stranger may shake hands.
    pub(super) fn have_processor_left(&self, now: Instant) -> bool {
        let at_once = Duration::from_millis(REMOTE_STRANGERS_MS_AT_ONCE) * PER_PROCESSOR_SECOND;
        self.processor.has_left(at_once, now)
    }

    /// A stranger has taken this much time of a processor.
    pub(super) fn take_processor(&mut self, time: Duration, now: Instant) {
        self.processor.take(time * PER_PROCESSOR_SECOND, now);
    }

    /// A principal has opened a connection from an address.
    pub(super) fn opened(&mut self, address: IpAddr) {
        let place = self.place(address);
        self.places[place].open += 1;
    }

    /// That connection has ended.
    pub(super) fn ended(&mut self, address: IpAddr, now: Instant) {
        let place = self.place(address);
        let addresses = &mut self.places[place];
        addresses.open = addresses.open.saturating_sub(1);
        addresses.known_until = now + Duration::from_secs(REMOTE_CALLER_KNOWN_S);
    }
}

#[cfg(test)]
mod tests {
    use std::hash::{BuildHasherDefault, DefaultHasher};

    use super::*;

    fn strangers() -> (Strangers<BuildHasherDefault<DefaultHasher>>, Instant) {
        let now = Instant::now();
        (Strangers::new(BuildHasherDefault::default(), now), now)
    }

    fn address(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    #[test]
    fn an_address_may_begin_many_connections_at_once_and_then_a_few_a_second() {
        let (mut strangers, now) = strangers();
        let (flooding, other) = (address("192.0.2.1"), address("192.0.2.2"));
        let begun = |strangers: &mut Strangers<_>, now| (0..10_000).filter(|_| strangers.begin(flooding, now)).count();
        assert_eq!(begun(&mut strangers, now), REMOTE_ADDRESS_CONNECTIONS_AT_ONCE as usize);
        assert!(strangers.begin(other, now), "another address has its own");
        let later = now + Duration::from_secs(3);
        assert_eq!(begun(&mut strangers, later), 3 * REMOTE_ADDRESS_CONNECTIONS_PER_S as usize);
        let much_later = later + Duration::from_secs(3600);
        assert_eq!(begun(&mut strangers, much_later), REMOTE_ADDRESS_CONNECTIONS_AT_ONCE as usize);
    }

    #[test]
    fn a_network_of_ipv6_counts_as_one_address_and_a_mapped_address_as_what_it_maps() {
        let same = |one: &str, other: &str| network_of(address(one)) == network_of(address(other));
        assert!(same("2001:db8:1:2::1", "2001:db8:1:2:ffff:ffff:ffff:ffff"));
        assert!(!same("2001:db8:1:2::1", "2001:db8:1:3::1"));
        assert!(same("::ffff:192.0.2.1", "192.0.2.1") && !same("192.0.2.1", "192.0.2.2"));
    }

    #[test]
    fn strangers_have_their_share_of_a_processor_over_time() {
        let (mut strangers, mut now) = strangers();
        let step = Duration::from_millis(1);
        let (mut taken, mut elapsed) = (Duration::ZERO, Duration::ZERO);
        // They take what they get: half a processor, while they may.
        while elapsed < Duration::from_secs(60) {
            if strangers.have_processor_left(now) {
                strangers.take_processor(step / 2, now);
                taken += step / 2;
            }
            (now, elapsed) = (now + step, elapsed + step);
        }
        let share = elapsed * REMOTE_STRANGERS_PERCENT / 100 + Duration::from_millis(REMOTE_STRANGERS_MS_AT_ONCE);
        assert!(taken <= share + step && taken + step * 10 >= share, "{taken:?} of {share:?}");
    }

    #[test]
    fn an_address_with_a_connection_is_a_callers_and_stays_one_for_a_while() {
        let (mut strangers, now) = strangers();
        let (caller, other) = (address("192.0.2.1"), address("192.0.2.2"));
        assert!(strangers.is_stranger(caller, now));
        strangers.opened(caller);
        strangers.opened(caller);
        let later = now + Duration::from_secs(10 * REMOTE_CALLER_KNOWN_S);
        assert!(!strangers.is_stranger(caller, later) && strangers.is_stranger(other, later));
        strangers.ended(caller, later);
        assert!(!strangers.is_stranger(caller, later + Duration::from_secs(2 * REMOTE_CALLER_KNOWN_S)), "one is open");
        strangers.ended(caller, later);
        let known = later + Duration::from_secs(REMOTE_CALLER_KNOWN_S);
        assert!(!strangers.is_stranger(caller, known - Duration::from_millis(1)));
        assert!(strangers.is_stranger(caller, known));
    }
}
