//! Endpoints as addresses.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::PathBuf;

use crate::error::{Error, Kind, Result};

/// Where a peer is, or where a server listens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Address {
    /// An IP address with its port.
    Ip(SocketAddr),
    /// A host name that has to be resolved.
    Name { host: String, port: u16 },
    /// A Unix socket's file.
    Path(PathBuf),
    /// A Unix socket's name in the abstract namespace of Linux.
    Abstract(Vec<u8>),
}

impl Address {
    /// Reads `tcp://HOST:PORT`, `ipc://PATH` or `ipc://@NAME`. `*` as host means every IPv4 address, `*` as port means
    /// any free one; both only make sense for a server.
    ///
    /// # Errors
    /// [`Kind::Config`] for anything else.
    pub(super) fn parse(endpoint: &str) -> Result<Self> {
        let wrong = || {
            let remedy = "write it as tcp://HOST:PORT or ipc:///PATH";
            Error::new(Kind::Config, format!("cannot use the endpoint {endpoint:?}"), remedy)
        };
        if endpoint.contains('\0') {
            return Err(wrong());
        }
        if let Some(path) = endpoint.strip_prefix("ipc://") {
            return match path.strip_prefix('@') {
                Some("") => Err(wrong()),
                Some(name) => Ok(Self::Abstract(name.as_bytes().to_vec())),
                None if path.is_empty() => Err(wrong()),
                None => Ok(Self::Path(path.into())),
            };
        }
        let (host, port) = endpoint.strip_prefix("tcp://").and_then(|rest| rest.rsplit_once(':')).ok_or_else(wrong)?;
        let port = if port == "*" { 0 } else { port.parse().map_err(|_| wrong())? };
        let host = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
        match (host, host.parse::<IpAddr>()) {
            ("", _) => Err(wrong()),
            ("*", _) => Ok(Self::Ip((Ipv4Addr::UNSPECIFIED, port).into())),
            (_, Ok(ip)) => Ok(Self::Ip((ip, port).into())),
            (name, Err(_)) => Ok(Self::Name { host: name.to_owned(), port }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn endpoints_become_addresses() {
        let ip = |text: &str| Address::Ip(text.parse().expect("an address"));
        for (endpoint, address) in [
            ("tcp://127.0.0.1:5557", ip("127.0.0.1:5557")),
            ("tcp://[::1]:5557", ip("[::1]:5557")),
            ("tcp://*:*", ip("0.0.0.0:0")),
            ("tcp://engine-3.local:1", Address::Name { host: "engine-3.local".into(), port: 1 }),
            ("ipc:///run/e", Address::Path("/run/e".into())),
            ("ipc://@e", Address::Abstract(b"e".to_vec())),
        ] {
            assert_eq!(Address::parse(endpoint).expect(endpoint), address);
        }
    }

    #[test]
    fn anything_else_is_a_mistake_of_the_configuration() {
        for wrong in
            ["", "tcp://h", "tcp://:1", "tcp://h:70000", "ipc://", "ipc://@", "udp://h:1", "ipc:///a\0b", "tcp://a\0:1"]
        {
            assert_eq!(Address::parse(wrong).expect_err(wrong).kind(), Kind::Config, "{wrong:?}");
        }
    }
}
