//! The ports of a service's pods.

use std::fmt;
use std::str::FromStr;

use super::objects::{SlicePort, is_name};
use crate::limits::KUBERNETES_PORTS_MAX;

/// A port of a service: its name or its number.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PortName {
    /// The name of a port of the service.
    Name(String),
    /// A port of the pods.
    Number(u16),
}

impl FromStr for PortName {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text.parse::<u16>() {
            Ok(0) => Err("a port is a number from 1 to 65535, or a name"),
            Ok(number) => Ok(Self::Number(number)),
            Err(_) if text.is_empty() || !is_name(text) || text.bytes().all(|byte| byte.is_ascii_digit()) => {
                Err("a port is a number from 1 to 65535, or a name")
            }
            Err(_) => Ok(Self::Name(text.to_owned())),
        }
    }
}

impl fmt::Display for PortName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Name(name) => f.write_str(name),
            Self::Number(number) => number.fmt(f),
        }
    }
}

/// The port of each rank, among the ports of a slice.
///
/// # Errors
/// What is wrong, and the remedy.
pub(super) fn slice_ports(listed: &[SlicePort], wanted: &[PortName]) -> Result<Vec<u16>, (String, &'static str)> {
    let is_tcp = |port: &&SlicePort| port.protocol.as_deref().is_none_or(|protocol| protocol == "TCP");
    let tcp: Vec<&SlicePort> = listed.iter().filter(is_tcp).collect();
    if wanted.is_empty() {
        return match tcp.as_slice() {
            [only] => match only.port {
                Some(port) if port != 0 => Ok(vec![port]),
                _ => Err(("has a port without a number".to_owned(), "name the number with --kubernetes-port")),
            },
            [] => Err(("has no TCP port".to_owned(), "give the service the port of the engines")),
            several => {
                let names: Vec<&str> =
                    several.iter().take(KUBERNETES_PORTS_MAX).map(|port| port.name.as_str()).collect();
                let what = format!("has several ports ({})", names.join(", "));
                Err((what, "name that of the engines with --kubernetes-port, or that of each rank"))
            }
        };
    }
    let number = |wanted: &PortName| match wanted {
        // A pod's port can be asked though the service does not name it.
        PortName::Number(number) => Some(*number),
        PortName::Name(name) => {
            tcp.iter().find(|port| port.name == *name).and_then(|port| port.port).filter(|port| *port != 0)
        }
    };
    let found = wanted.iter().map(|wanted| number(wanted).ok_or(wanted)).collect::<Result<Vec<u16>, _>>();
    found.map_err(|name| (format!("has no port {name}"), "correct --kubernetes-port"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_port_is_found_by_name_or_number() {
        let port = |name: &str, port: Option<u16>, protocol: Option<&str>| SlicePort {
            name: name.to_owned(),
            port,
            protocol: protocol.map(str::to_owned),
        };
        let listed =
            [port("http", Some(8000), Some("TCP")), port("dns", Some(53), Some("UDP")), port("", Some(9090), None)];
        let of = |wanted: &[&str]| {
            let wanted: Vec<PortName> = wanted.iter().map(|text| text.parse().expect("a port")).collect();
            slice_ports(&listed, &wanted).map_err(|(what, _)| what)
        };
        assert_eq!(of(&["http"]), Ok(vec![8000]));
        assert_eq!(of(&["8001", "http"]), Ok(vec![8001, 8000]));
        assert!(of(&[]).expect_err("two TCP ports").contains("several ports"));
        assert!(of(&["dns"]).expect_err("UDP").contains("no port dns"));
        assert_eq!(slice_ports(&listed[..2], &[]).ok(), Some(vec![8000]), "only one is TCP");
        assert!(slice_ports(&[port("", None, None)], &[]).is_err(), "all ports");
        for text in ["", "0", "65536", "a b"] {
            assert!(text.parse::<PortName>().is_err(), "{text}");
        }
    }
}
