//! Values with a syntax of their own: endpoints, socket paths and modes, and the hosts that registered workers may
//! have.

use std::net::IpAddr;

use super::field::ValueError;
use crate::endpoint::{self, BoundEndpoint, Endpoint, EndpointError, NatsServer};

impl From<EndpointError> for ValueError {
    fn from(fault: EndpointError) -> Self {
        Self { message: fault.message, nearest: fault.nearest }
    }
}

pub(super) fn endpoint(text: &str) -> Result<Endpoint, ValueError> {
    Ok(Endpoint::parse(text)?)
}

/// Reads an IP address without a port.
pub(super) fn address(text: &str) -> Result<IpAddr, ValueError> {
    text.parse().map_err(|_| ValueError::new(format!("`{text}` is no IP address")))
}

pub(super) fn publisher(text: &str) -> Result<Endpoint, ValueError> {
    Ok(Endpoint::parse_publisher(text)?)
}

pub(super) fn nats_server(text: &str) -> Result<NatsServer, ValueError> {
    Ok(NatsServer::parse(text)?)
}

pub(super) fn check_subject_prefix(text: &str) -> Result<(), ValueError> {
    Ok(endpoint::check_subject_prefix(text)?)
}

pub(super) fn check_bound(text: &str) -> Result<(), ValueError> {
    BoundEndpoint::parse(text)?;
    Ok(())
}

pub(super) fn url(text: &str) -> Result<String, ValueError> {
    Ok(endpoint::server_url(text)?)
}

pub(super) fn collector_url(text: &str) -> Result<String, ValueError> {
    Ok(endpoint::collector_url(text)?)
}

pub(super) fn check_topic(text: &str) -> Result<(), ValueError> {
    Ok(endpoint::check_topic(text)?)
}

pub(super) fn check_socket(path: &str) -> Result<(), ValueError> {
    Ok(endpoint::check_socket_path(path)?)
}

/// Reads permission bits written in octal.
pub(super) fn socket_mode(text: &str) -> Result<u32, ValueError> {
    let octal = text.strip_prefix("0o").unwrap_or(text);
    match u32::from_str_radix(octal, 8) {
        Ok(mode @ 0..=0o777) if octal.bytes().all(|byte| byte.is_ascii_digit()) => Ok(mode),
        _ => Err(ValueError::new(format!("`{text}` is not an octal mode such as 0660"))),
    }
}

/// One entry of `worker_hosts` in `[http]`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum HostRule {
    /// Every host, `*`.
    Any,
    /// Unix sockets, `ipc`.
    Ipc,
    /// An address, or a network such as `10.0.0.0/8`.
    Network(IpAddr, u8),
    /// A host name in lower case, whatever its address.
    Name(String),
}

impl HostRule {
    /// Parses a rule; `None` if the text is none.
    #[must_use]
    pub(crate) fn parse(text: &str) -> Option<Self> {
        match text {
            "*" => return Some(Self::Any),
            "ipc" => return Some(Self::Ipc),
            _ => {}
        }
        let (address, bits) = text.split_once('/').map_or((text, None), |(address, bits)| (address, Some(bits)));
        if let Ok(address) = address.parse::<IpAddr>() {
            let widest = if address.is_ipv4() { 32 } else { 128 };
            let bits = bits.map_or(Some(widest), |bits| bits.parse().ok().filter(|bits| *bits <= widest))?;
            return Some(Self::Network(address, bits));
        }
        let is_name = !text.is_empty() && text.bytes().all(|b| b.is_ascii_alphanumeric() || b"-._".contains(&b));
        is_name.then(|| Self::Name(text.to_ascii_lowercase()))
    }

    /// Whether the rule allows an endpoint. A host name must match a rule by name: its owner can choose any address, so
    /// address rules never match it.
    #[must_use]
    pub(crate) fn allows(&self, endpoint: &str) -> bool {
        match (self, host_of(endpoint)) {
            (Self::Any, Some(_)) => true,
            (Self::Ipc, None) => endpoint.starts_with("ipc://"),
            (Self::Network(network, bits), Some(host)) => {
                address_of(host).is_some_and(|address| is_within(address, *network, *bits))
            }
            (Self::Name(name), Some(host)) => host.eq_ignore_ascii_case(name),
            _ => false,
        }
    }

    /// Whether an endpoint is at the caller's own address.
    #[must_use]
    pub(crate) fn is_at(endpoint: &str, caller: IpAddr) -> bool {
        let address = host_of(endpoint).and_then(address_of);
        address.is_some_and(|address| address == caller.to_canonical())
    }
}

/// The host of a `tcp://host:port`.
fn host_of(endpoint: &str) -> Option<&str> {
    endpoint.strip_prefix("tcp://")?.rsplit_once(':').map(|(host, _)| host)
}

fn address_of(host: &str) -> Option<IpAddr> {
    let plain = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
    plain.parse::<IpAddr>().ok().map(|address| address.to_canonical())
}

fn is_within(address: IpAddr, network: IpAddr, bits: u8) -> bool {
    let same = |a: u128, b: u128, width: u8| {
        // A shift by the whole width would overflow; it leaves nothing to compare.
        let shift = u32::from(width - bits);
        shift >= u32::from(width) || a >> shift == b >> shift
    };
    match (address, network) {
        (IpAddr::V4(a), IpAddr::V4(b)) => same(a.to_bits().into(), b.to_bits().into(), 32),
        (IpAddr::V6(a), IpAddr::V6(b)) => same(a.to_bits(), b.to_bits(), 128),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn modes_are_octal() {
        assert_eq!(socket_mode("0660"), Ok(0o660));
        assert_eq!(socket_mode("600"), Ok(0o600));
        assert_eq!(socket_mode("0o777"), Ok(0o777));
        for bad in ["", "rw", "0888", "1777", "-1", "+7"] {
            assert!(socket_mode(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn a_rule_allows_only_matching_endpoints() {
        for (rule, endpoint, expected) in [
            ("*", "tcp://anywhere.example:1", true),
            ("*", "ipc:///run/x", false),
            ("ipc", "ipc:///run/x", true),
            ("ipc", "tcp://10.0.0.1:1", false),
            ("10.0.0.0/8", "tcp://10.200.3.4:5557", true),
            ("10.0.0.0/8", "tcp://11.0.0.1:5557", false),
            ("10.0.0.0/8", "tcp://[::ffff:10.0.0.1]:5557", true),
            ("10.0.0.7", "tcp://10.0.0.7:1", true),
            ("10.0.0.7", "tcp://10.0.0.8:1", false),
            ("0.0.0.0/0", "tcp://8.8.8.8:1", true),
            ("0.0.0.0/0", "tcp://[2001:db8::1]:1", false),
            ("fd00::/8", "tcp://[fd12::1]:1", true),
            ("fd00::/8", "tcp://[fe80::1]:1", false),
            // A resolver would read these names as addresses; rules for addresses do not match them.
            ("127.0.0.0/8", "tcp://2130706433:1", false),
            ("127.0.0.0/8", "tcp://localhost:1", false),
            ("127.0.0.0/8", "tcp://127.0.0.1;evil.example:1", false),
            ("Engine-1.example", "tcp://engine-1.EXAMPLE:1", true),
            ("engine-1.example", "tcp://engine-2.example:1", false),
        ] {
            let parsed = HostRule::parse(rule).unwrap_or_else(|| panic!("{rule}"));
            assert_eq!(parsed.allows(endpoint), expected, "{rule} {endpoint}");
        }
        for nothing in ["", "10.0.0.0/33", "10.0.0.0/x", "tcp://10.0.0.1:1", "a b", "[::1]"] {
            assert_eq!(HostRule::parse(nothing), None, "{nothing}");
        }
    }

    #[test]
    fn a_caller_is_at_its_own_address_and_never_at_a_name() {
        let caller: IpAddr = [10, 0, 0, 7].into();
        assert!(HostRule::is_at("tcp://10.0.0.7:5557", caller));
        assert!(HostRule::is_at("tcp://10.0.0.7:5557", "::ffff:10.0.0.7".parse().unwrap()));
        for elsewhere in ["tcp://10.0.0.8:5557", "tcp://host:5557", "ipc:///run/x"] {
            assert!(!HostRule::is_at(elsewhere, caller), "{elsewhere}");
        }
    }
}
