//! Endpoints: every text that names one is parsed here before anything connects or binds.
//!
//! Endpoints come from untrusted sources: HTTP clients, engines' answers, files of workers, administration requests.
//! They end in sockets and in the resolver, which do not expect hostile input. So an [`Endpoint`] exists only after
//! [`Endpoint::parse`] has accepted it, and sockets take nothing else.
//!
//! # Calls into dependencies that can panic, and the guard of each
//!
//! | call | panics on | guard |
//! |---|---|---|
//! | `zmq::Socket::connect`, `bind` | a NUL byte (`CString::new().unwrap()`) | only the demo and tests use them, with names of their own |
//! | sockets of [`crate::zmtp`] | nothing: a failure to open is an error, and is retried | |
//! | `std::time::Instant` + a duration | a sum out of range | configured durations are at most about a year (`limits`) |
//! | `core_affinity`, `notify`, `ureq`, `toml_edit`, `serde_json` | no input, according to their sources and the fuzz targets | parsers and requests run on threads whose panic is an error (`spawn_blocking`) |
//! | `flatbuffers` readers | offsets of a buffer that was not verified | every buffer is verified before it is read |
//! | `mio::Registry::register` | nothing; a closed descriptor is an error | |
//!
//! If a panic happens all the same: a panic of an ingest thread costs its shard's index and not the daemon (see the
//! rebuild of a shard in `ingest`); a panic of a thread that cannot be rebuilt drains the daemon (see `daemon`).

use std::fmt;
use std::net::{Ipv4Addr, Ipv6Addr};
use std::ops::Deref;
use std::str::FromStr;

use crate::limits::{
    ENDPOINT_SHOWN_CHARS_MAX, HOST_BYTES_MAX, HOST_LABEL_BYTES_MAX, NAME_BYTES_MAX, NATS_PREFIX_BYTES_MAX,
    SOCKET_PATH_BYTES_MAX,
};

const TRANSPORTS: [&str; 2] = ["tcp", "ipc"];
/// Hosts where a server binds, which no client can connect to.
const WILDCARD_HOSTS: [&str; 3] = ["*", "0.0.0.0", "[::]"];

/// Why a text is not an endpoint.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EndpointError {
    /// What is wrong. Safe for a log line: characters that control a terminal are escaped.
    pub message: String,
    /// What was probably meant.
    pub nearest: Option<String>,
}

impl EndpointError {
    fn new(message: impl Into<String>) -> Self {
        Self { message: message.into(), nearest: None }
    }
}

impl fmt::Display for EndpointError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for EndpointError {}

type Parsed<T> = Result<T, EndpointError>;

/// An endpoint that can be connected to: `tcp://host:port` or `ipc://path` for ZeroMQ, or a NATS server of a worker's events.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Endpoint(String);

impl Endpoint {
    /// Parses an endpoint.
    ///
    /// # Errors
    /// What is wrong with the text.
    pub fn parse(text: &str) -> Parsed<Self> {
        match transport(text)? {
            ("tcp", address) => check_tcp(text, address)?,
            (_, path) => check_ipc(path)?,
        }
        Ok(Self(text.to_owned()))
    }

    /// Parses an endpoint of a worker's events, which may also be a NATS server: `nats://host:port`, or `tls://host:port`.
    ///
    /// # Errors
    /// What is wrong with the text.
    pub fn parse_publisher(text: &str) -> Parsed<Self> {
        match text.split_once("://") {
            Some(("nats" | "tls", _)) => Ok(Self(NatsServer::parse(text)?.to_string())),
            _ => Self::parse(text),
        }
    }

    /// The NATS server that it is, if it is one.
    #[must_use]
    pub fn nats_server(&self) -> Option<NatsServer> {
        NatsServer::parse(&self.0).ok()
    }

    /// The endpoint as text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// The endpoint `ranks` ranks later: the port plus `ranks`, or the same server. `None` if it has no port, or if the sum
    /// is not a port.
    #[must_use]
    pub fn of_rank(&self, ranks: u32) -> Option<Self> {
        if ranks == 0 || self.nats_server().is_some() {
            return Some(self.clone());
        }
        let Parts::Tcp { host, port } = split(&self.0)? else { return None };
        let port = u32::from(port.parse::<u16>().ok()?).checked_add(ranks)?;
        u16::try_from(port).ok().map(|port| Self(format!("tcp://{host}:{port}")))
    }

    /// An endpoint without a peer, for a worker whose events come from a file or a test and that opens no socket.
    pub(crate) fn nowhere() -> Self {
        Self("ipc://@nowhere".to_owned())
    }

    /// An endpoint that no operator may configure, such as `inproc://`.
    #[cfg(test)]
    pub(crate) fn unparsed(text: &str) -> Self {
        Self(text.to_owned())
    }
}

impl FromStr for Endpoint {
    type Err = EndpointError;

    fn from_str(text: &str) -> Parsed<Self> {
        Self::parse(text)
    }
}

impl Deref for Endpoint {
    type Target = str;

    fn deref(&self) -> &str {
        &self.0
    }
}

impl PartialEq<str> for Endpoint {
    fn eq(&self, other: &str) -> bool {
        self.0 == other
    }
}

impl PartialEq<&str> for Endpoint {
    fn eq(&self, other: &&str) -> bool {
        self.0 == *other
    }
}

impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// A ZeroMQ endpoint to bind: an [`Endpoint`], one on all addresses, or one on a free port.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BoundEndpoint(String);

impl BoundEndpoint {
    /// Parses an endpoint to bind. Port `0` or `*` means a free port.
    ///
    /// # Errors
    /// What is wrong with the text.
    pub fn parse(text: &str) -> Parsed<Self> {
        transport(text)?;
        if let Some(Parts::Tcp { host, port }) = split(text) {
            let host = if WILDCARD_HOSTS.contains(&host) { "127.0.0.1" } else { host };
            let port = if matches!(port, "0" | "*") { "1" } else { port };
            check_tcp(text, &format!("{host}:{port}"))?;
            return Ok(Self(text.to_owned()));
        }
        Endpoint::parse(text).map(|endpoint| Self(endpoint.0))
    }

    /// The endpoint as text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

/// A NATS server: `nats://host:port`, or `tls://host:port` for one to which only TLS is spoken.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct NatsServer {
    /// Its host and port, as an endpoint to connect to.
    pub endpoint: Endpoint,
    /// Its host, as its certificate names it.
    pub host: String,
    /// Whether TLS is spoken.
    pub is_tls: bool,
}

impl NatsServer {
    /// Parses the address of a server. Without a port it is 4222.
    ///
    /// # Errors
    /// What is wrong with the text. A password in it is not repeated.
    pub fn parse(text: &str) -> Parsed<Self> {
        refuse_control(text)?;
        let Some((scheme @ ("nats" | "tls"), address)) = text.split_once("://") else {
            return Err(EndpointError::new("is neither nats://host:port nor tls://host:port"));
        };
        let address = address.strip_suffix('/').unwrap_or(address);
        if address.contains('@') {
            return Err(EndpointError::new(
                "has a user in it: use nats_user and nats_secret_file, which no log repeats",
            ));
        }
        let has_port = address.rsplit_once(':').is_some_and(|(_, port)| !port.contains(']'));
        let address = if has_port { address.to_owned() } else { format!("{address}:4222") };
        let endpoint = Endpoint::parse(&format!("tcp://{address}"))?;
        let host = address.rsplit_once(':').map_or("", |(host, _)| host);
        let host = host.trim_start_matches('[').trim_end_matches(']').to_owned();
        Ok(Self { endpoint, host, is_tls: scheme == "tls" })
    }
}

impl fmt::Display for NatsServer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let address = self.endpoint.strip_prefix("tcp://").unwrap_or(&self.endpoint);
        write!(f, "{}://{address}", if self.is_tls { "tls" } else { "nats" })
    }
}

/// Checks the prefix of NATS subjects: words of letters, digits, `-` and `_`, with dots between them.
///
/// # Errors
/// What is wrong with it.
pub fn check_subject_prefix(text: &str) -> Parsed<()> {
    let is_word =
        |word: &str| !word.is_empty() && word.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_".contains(&byte));
    if text.len() > NATS_PREFIX_BYTES_MAX || !text.split('.').all(is_word) {
        let message = format!(
            "must be at most {NATS_PREFIX_BYTES_MAX} letters, digits, `-` and `_`, with dots between words, such as kvrouted.blue"
        );
        return Err(EndpointError::new(message));
    }
    Ok(())
}

/// Parses the address of an engine's HTTP server, `http://host:port`. Returns it without slashes at the end.
///
/// # Errors
/// What is wrong with the text.
pub fn server_url(text: &str) -> Parsed<String> {
    refuse_control(text)?;
    refuse_user(text)?;
    let Some((scheme, rest)) = text.split_once("://") else {
        let nearest = Some(format!("http://{}", shown(text)));
        return Err(EndpointError { message: format!("`{}` is not http://host:port", shown(text)), nearest });
    };
    if scheme != "http" {
        let message = format!("`{}` is not supported, only http is", shown(scheme));
        return Err(EndpointError { message, nearest: Some(format!("http://{}", shown(rest))) });
    }
    let address = rest.trim_end_matches('/');
    check_tcp(text, address)?;
    Ok(format!("http://{address}"))
}

/// Parses the URL to which a collector takes traces by OTLP/HTTP, `http://host:port` with a path. Without a path it is
/// `/v1/traces`.
///
/// # Errors
/// What is wrong with the text.
pub fn collector_url(text: &str) -> Parsed<String> {
    refuse_control(text)?;
    refuse_user(text)?;
    let (scheme, rest) = text.split_once("://").unwrap_or(("http", text));
    if scheme != "http" {
        let message = format!("`{}` is not supported, only http is: run a collector beside the daemon", shown(scheme));
        return Err(EndpointError { message, nearest: Some(format!("http://{}", shown(rest))) });
    }
    let (address, path) = rest.split_once('/').unwrap_or((rest, ""));
    check_tcp(text, address)?;
    if !path.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-._~/".contains(&byte)) {
        let message =
            format!("the path `/{}` has other characters than letters, digits, -, ., _, ~ and /", shown(path));
        return Err(EndpointError::new(message));
    }
    let path = if path.is_empty() { "v1/traces" } else { path };
    Ok(format!("http://{address}/{path}"))
}

/// Checks the prefix of a subscription.
///
/// # Errors
/// If it is too long or has control characters.
pub fn check_topic(text: &str) -> Parsed<()> {
    if text.len() > NAME_BYTES_MAX {
        let message = format!("is {} bytes, at most {NAME_BYTES_MAX} are allowed", text.len());
        return Err(EndpointError::new(message));
    }
    refuse_control(text)
}

/// Checks the path of a Unix socket to bind.
///
/// # Errors
/// If no socket can have this path.
pub fn check_socket_path(path: &str) -> Parsed<()> {
    refuse_control(path)?;
    if path.is_empty() || path.ends_with('/') {
        return Err(EndpointError::new(format!("`{}` does not name a file", shown(path))));
    }
    check_path_length(path)
}

/// An endpoint in its parts. An IPv6 host keeps its brackets.
pub(crate) enum Parts<'a> {
    Tcp { host: &'a str, port: &'a str },
    Ipc(&'a str),
}

/// Splits an endpoint; `None` = it has another form. Checks nothing else.
pub(crate) fn split(text: &str) -> Option<Parts<'_>> {
    match text.split_once("://")? {
        ("tcp", address) => address.rsplit_once(':').map(|(host, port)| Parts::Tcp { host, port }),
        ("ipc", path) => Some(Parts::Ipc(path)),
        _ => None,
    }
}

/// The transport and the address.
fn transport(text: &str) -> Parsed<(&str, &str)> {
    refuse_control(text)?;
    let Some((transport, address)) = text.split_once("://") else {
        return Err(EndpointError::new(format!("`{}` is neither tcp://host:port nor ipc://path", shown(text))));
    };
    if TRANSPORTS.contains(&transport) {
        return Ok((transport, address));
    }
    let near = TRANSPORTS.into_iter().find(|known| strsim::damerau_levenshtein(known, transport) <= 1);
    let message = format!("transport `{}` is not supported, only tcp and ipc are", shown(transport));
    Err(EndpointError { message, nearest: near.map(str::to_owned) })
}

/// A NUL byte ends a C string early, or panics in the conversion to one; other control characters forge log lines.
fn refuse_control(text: &str) -> Parsed<()> {
    match text.chars().find(|c| c.is_control()) {
        Some('\0') => Err(EndpointError::new(format!("`{}` has a zero byte in it", shown(text)))),
        Some(_) => Err(EndpointError::new(format!("`{}` has a control character in it", shown(text)))),
        None => Ok(()),
    }
}

/// Refuses the address of a user, `user:password@host`. The text is not repeated: a log or a status page would keep the
/// password.
fn refuse_user(text: &str) -> Parsed<()> {
    match text.contains('@') {
        true => Err(EndpointError::new("has a user in it: name only host and port, no login is sent there")),
        false => Ok(()),
    }
}

fn check_tcp(text: &str, address: &str) -> Parsed<()> {
    refuse_user(address)?;
    let Some((host, port)) = address.rsplit_once(':') else {
        return Err(EndpointError::new(format!("`{}` has no port", shown(text))));
    };
    if WILDCARD_HOSTS.contains(&host) {
        let message = format!("`{host}` is where an engine binds, not where it can be reached; name its host");
        return Err(EndpointError { message, nearest: Some(format!("tcp://127.0.0.1:{}", shown(port))) });
    }
    if !is_host(host) {
        let message = format!("`{}` is not a host name or address (IPv6 goes in brackets)", shown(host));
        return Err(EndpointError::new(message));
    }
    match port.parse::<u16>() {
        Ok(1..) if port.bytes().all(|byte| byte.is_ascii_digit()) => Ok(()),
        _ => Err(EndpointError::new(format!("port `{}` is not in 1 to 65535", shown(port)))),
    }
}

/// Whether the text may be passed to a resolver.
fn is_host(host: &str) -> bool {
    if let Some(bracketed) = host.strip_prefix('[') {
        let Some(address) = bracketed.strip_suffix(']') else { return false };
        let (address, zone) = address.split_once('%').map_or((address, None), |(address, zone)| (address, Some(zone)));
        return address.parse::<Ipv6Addr>().is_ok() && zone.is_none_or(is_label);
    }
    if host.bytes().all(|byte| byte.is_ascii_digit() || byte == b'.') {
        return host.parse::<Ipv4Addr>().is_ok();
    }
    // A dot at the end marks a fully qualified name.
    let name = host.strip_suffix('.').unwrap_or(host);
    host.len() <= HOST_BYTES_MAX && name.split('.').all(is_label)
}

fn is_label(label: &str) -> bool {
    let is_known = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'_';
    (1..=HOST_LABEL_BYTES_MAX).contains(&label.len()) && label.bytes().all(is_known)
}

fn check_ipc(path: &str) -> Parsed<()> {
    match path {
        "" | "@" => Err(EndpointError::new("ipc:// needs a path")),
        "*" => Err(EndpointError::new("`*` is where an engine binds, not where it can be reached; name the path")),
        _ => check_path_length(path),
    }
}

fn check_path_length(path: &str) -> Parsed<()> {
    if path.len() > SOCKET_PATH_BYTES_MAX {
        let message = format!("the path is {} bytes, a Unix socket's has at most {SOCKET_PATH_BYTES_MAX}", path.len());
        return Err(EndpointError::new(message));
    }
    Ok(())
}

/// Untrusted text for a message: escaped, and cut to a line.
fn shown(text: &str) -> String {
    let mut shown: String = text.chars().take(ENDPOINT_SHOWN_CHARS_MAX).flat_map(char::escape_debug).collect();
    if text.chars().nth(ENDPOINT_SHOWN_CHARS_MAX).is_some() {
        shown.push('…');
    }
    shown
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn valid_endpoints_are_accepted() {
        for good in [
            "tcp://127.0.0.1:5557",
            "tcp://engine-3.local:1",
            "tcp://engine_3.local.:1",
            "tcp://[::1]:65535",
            "tcp://[fe80::1%eth0]:1",
            "ipc:///run/e",
            "ipc:///run/a folder/é",
            "ipc://@e",
        ] {
            assert_eq!(Endpoint::parse(good).as_deref(), Ok(good));
        }
    }

    #[test]
    fn invalid_endpoints_are_refused() {
        let label = "x".repeat(HOST_LABEL_BYTES_MAX + 1);
        let (long_label, long_host) = (format!("tcp://{label}:1"), format!("tcp://{}x:1", "a.".repeat(150)));
        for (bad, word) in [
            ("127.0.0.1:5557", "neither"),
            ("tcp://127.0.0.1", "no port"),
            ("tcp://*:5557", "binds"),
            ("tcp://0.0.0.0:5557", "binds"),
            ("tcp://[::]:5557", "binds"),
            ("tcp://host:0", "1 to 65535"),
            ("tcp://host:65536", "1 to 65535"),
            ("tcp://host:+1", "1 to 65535"),
            ("tcp://host:", "1 to 65535"),
            ("tcp://::1:5557", "brackets"),
            ("tcp://[::1:5557", "brackets"),
            ("tcp://[host]:5557", "brackets"),
            ("tcp://[::1%]:5557", "brackets"),
            ("tcp://:5557", "host name"),
            ("tcp://a..b:5557", "host name"),
            ("tcp://999.1.1.1:5557", "host name"),
            ("tcp://1:5557", "host name"),
            ("tcp://127.0.0.1:1;127.0.0.1:2", "host name"),
            ("tcp://eth0;host:1", "host name"),
            ("tcp://user@host:1", "has a user"),
            ("tcp://host/path:1", "host name"),
            ("tcp://hé:1", "host name"),
            (long_label.as_str(), "host name"),
            (long_host.as_str(), "host name"),
            ("ipc://", "path"),
            ("ipc://@", "path"),
            ("ipc://*", "binds"),
            ("udp://host:1", "transport"),
            ("inproc://x", "transport"),
            ("TCP://host:1", "transport"),
            ("", "neither"),
            ("ipc:///tmp/x\0y", "zero byte"),
            ("tcp://127.0.0.1\0:1", "zero byte"),
            ("tcp://127.0.0.1:1\0", "zero byte"),
            ("tcp\0://127.0.0.1:1", "zero byte"),
            ("ipc:///tmp/x\ny", "control"),
            ("tcp://host\u{7f}:1", "control"),
            ("ipc:///tmp/\u{9b}31m", "control"),
        ] {
            let fault = Endpoint::parse(bad).expect_err(bad);
            assert!(fault.message.contains(word), "{bad:?}: {}", fault.message);
            assert!(!fault.message.chars().any(char::is_control), "{bad:?}: the message has control characters");
        }
        assert_eq!(Endpoint::parse("tpc://h:1").expect_err("transport").nearest.as_deref(), Some("tcp"));
        let long = format!("ipc://{}", "x".repeat(SOCKET_PATH_BYTES_MAX + 1));
        assert!(Endpoint::parse(&long).is_err());
        let huge = Endpoint::parse(&"x".repeat(1 << 20)).expect_err("huge").message;
        assert!(huge.len() < 1 << 10, "{} bytes of a message", huge.len());
    }

    #[test]
    fn an_endpoint_to_bind_may_have_wildcards() {
        for good in ["tcp://*:5567", "tcp://0.0.0.0:0", "tcp://[::]:1", "tcp://eth0:1", "tcp://127.0.0.1:*", "ipc:///r"]
        {
            assert_eq!(BoundEndpoint::parse(good).as_ref().map(BoundEndpoint::as_str), Ok(good));
        }
        for bad in ["tcp://*", "tcp://*:x", "tcp://*:70000", "ipc://*", "tcp://a\0:1", "inproc://x", "*:1"] {
            assert!(BoundEndpoint::parse(bad).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn no_password_in_an_address_is_repeated() {
        for text in ["http://bob:hunter2@h:1", "https://bob:hunter2@h:1", "bob:hunter2@h:1", "http://bob:hunter2@h"] {
            for fault in [server_url(text).map(drop), collector_url(text).map(drop)] {
                let fault = fault.expect_err(text);
                assert!(!format!("{fault:?}").contains("hunter2"), "{fault:?}");
            }
        }
        let fault = Endpoint::parse("tcp://bob:hunter2@h:1").expect_err("a user");
        assert!(!format!("{fault:?}").contains("hunter2"), "{fault:?}");
    }

    #[test]
    fn urls_of_servers_are_checked() {
        for good in ["http://10.0.0.1:30000", "http://10.0.0.1:30000/", "http://10.0.0.1:30000//"] {
            assert_eq!(server_url(good).as_deref(), Ok("http://10.0.0.1:30000"));
        }
        assert_eq!(server_url("http://[::1]:80").as_deref(), Ok("http://[::1]:80"));
        let bad = [
            "10.0.0.1:1",
            "https://h:1",
            "http://h",
            "http://h:1/v1",
            "http://*:1",
            "http://",
            "http://h\0:1",
            "http://h\r\nHost: x:1",
            "http://a@b:1",
            "http://h?x:1",
        ];
        for bad in bad {
            assert!(server_url(bad).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn topics_are_checked() {
        assert_eq!(check_topic("kv-events/é"), Ok(()));
        for bad in ["a\0b", "a\nb", "\u{1b}[31m"] {
            assert!(check_topic(bad).is_err(), "{bad:?}");
        }
        assert!(check_topic(&"x".repeat(NAME_BYTES_MAX + 1)).is_err());
    }

    #[test]
    fn ports_count_up_with_ranks() {
        let of_rank = |text: &str, ranks| Endpoint::parse(text).expect(text).of_rank(ranks);
        assert_eq!(of_rank("tcp://h:5557", 3).as_deref(), Some("tcp://h:5560"));
        assert_eq!(of_rank("tcp://[::1]:1", 1).as_deref(), Some("tcp://[::1]:2"));
        assert_eq!(of_rank("ipc:///e", 0).as_deref(), Some("ipc:///e"));
        assert_eq!(of_rank("ipc:///e", 1), None);
        assert_eq!(of_rank("tcp://h:65535", 1), None);
        assert_eq!(of_rank("tcp://h:1", u32::MAX), None);
    }

    #[test]
    fn nats_servers_have_a_scheme_and_no_password() {
        for (text, shown, host) in [
            ("nats://127.0.0.1:4222", "nats://127.0.0.1:4222", "127.0.0.1"),
            ("nats://broker", "nats://broker:4222", "broker"),
            ("tls://broker.local:443/", "tls://broker.local:443", "broker.local"),
            ("tls://[::1]", "tls://[::1]:4222", "::1"),
            ("nats://[::1]:9", "nats://[::1]:9", "::1"),
        ] {
            let server = NatsServer::parse(text).expect(text);
            assert_eq!((server.to_string().as_str(), server.host.as_str()), (shown, host));
            assert_eq!(server.is_tls, text.starts_with("tls"));
        }
        let refused = NatsServer::parse("nats://me:hush@broker:4222").expect_err("refused");
        assert!(refused.message.contains("nats_secret_file") && !refused.message.contains("hush"), "{refused}");
        for wrong in
            ["", "broker:4222", "ws://broker", "nats://", "nats://*:4222", "nats://a b", "nats://a:0", "nats://a\n"]
        {
            assert!(NatsServer::parse(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn events_may_come_from_a_nats_server_and_nothing_else_may() {
        let endpoint = Endpoint::parse_publisher("nats://broker").expect("a server");
        assert_eq!(endpoint, "nats://broker:4222");
        assert_eq!(endpoint.of_rank(3), Some(endpoint.clone()), "the rank is in its subjects");
        assert_eq!(endpoint.nats_server().map(|server| server.host), Some("broker".into()));
        assert!(Endpoint::parse("nats://broker:4222").is_err() && Endpoint::parse_publisher("nats://a@b").is_err());
        let zeromq = Endpoint::parse_publisher("tcp://h:1").expect("as before");
        assert_eq!(zeromq.nats_server(), None);
    }

    #[test]
    fn a_subject_prefix_has_no_wildcard_and_no_empty_word() {
        ["kvrouted", "a.b-c.D_9"].into_iter().for_each(|good| check_subject_prefix(good).expect(good));
        let long = "a".repeat(NATS_PREFIX_BYTES_MAX + 1);
        for wrong in ["", ".", "a.", ".a", "a..b", "a.*", ">", "a b", "a\r\nPUB x", "$SYS", &long] {
            assert!(check_subject_prefix(wrong).is_err(), "{wrong}");
        }
    }
}
