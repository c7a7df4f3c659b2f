//! The table about the port for gateways on other hosts.

use std::path::PathBuf;

use crate::config::RemoteConfig;
use crate::config::field::{Kind, Preset, Section, ValueError};
use crate::limits;

use Kind::{Integer, Parsed, Text};
use Preset::{Absent, Value};

/// Bytes of a path.
const PATH_BYTES_MAX: usize = 4096;

pub(in crate::config) static REMOTE: Section<RemoteConfig> = Section {
    name: "remote",
    repeated: false,
    doc: "A port for gateways on other hosts, which reach it by `kvrouted connect`: the frames of the routing socket over TLS 1.3, with\n\
          a token. The three files are also read again on SIGHUP.",
    fields: &[
        restart!(
            remote.listen,
            "",
            Absent("10.0.0.5:7443"),
            Parsed {
                what: "an IP address and a TCP port in quotes, such as \"10.0.0.5:7443\" or \"[::1]:7443\"",
                set: |c, text| {
                    let address = text.parse().ok();
                    let refused = || ValueError::new(format!("`{text}` is no IP address with a port"));
                    c.listen = Some(address.ok_or_else(refused)?);
                    Ok(())
                },
            },
            "The address and port to bind. \"0.0.0.0:PORT\" binds all IPv4 addresses. Absent: no port.",
        ),
        restart!(
            remote.certificate_file,
            "",
            Absent("/etc/kvrouted/tls.crt"),
            Text { bytes_min: 1, bytes_max: PATH_BYTES_MAX, set: |c, text| c.certificate_file = PathBuf::from(text) },
            "The daemon's certificate, then those between it and an authority that callers trust, in PEM form. Required with listen.",
        ),
        restart!(
            remote.key_file,
            "",
            Absent("/etc/kvrouted/tls.key"),
            Text { bytes_min: 1, bytes_max: PATH_BYTES_MAX, set: |c, text| c.key_file = PathBuf::from(text) },
            "The certificate's private key, in PEM form. Its mode must keep it from users outside its group. Required with listen.",
        ),
        restart!(
            remote.principals_file,
            "",
            Absent("/etc/kvrouted/principals"),
            Text { bytes_min: 1, bytes_max: PATH_BYTES_MAX, set: |c, text| c.principals_file = PathBuf::from(text) },
            "Who may connect: on each line a name and a token of 32 to 256 visible characters; # begins a comment. A principal may have\n\
             two lines while its token is replaced. A connection whose token has gone is closed at the reload. Mode as of key_file.\n\
             Required with listen.",
        ),
        restart!(
            remote.connections_max,
            "connections",
            Value("256"),
            Integer { min: 1, max: limits::REMOTE_CONNECTIONS_CEILING, set: |c, v| c.connections_max = v as usize },
            "Most open connections of the port. A principal may have serve.user_share_percent of them. Each takes 128 KiB.",
        ),
    ],
};
