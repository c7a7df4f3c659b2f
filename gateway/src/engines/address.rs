//! Addresses: an engine's URL, the endpoints of its publishers, and names that stand for several engines.

use std::net::{IpAddr, SocketAddr};

use hyper::Uri;

use super::engine::{EngineConfig, EngineError};
use crate::limits::{ADDRESSES_MAX, NAME_BYTES_MAX};

/// Hosts where a server binds, which no client can connect to.
const WILDCARDS: [&str; 5] = ["", "*", "0.0.0.0", "::", "[::]"];
/// The prefix of a URL whose name stands for several engines.
const DNS_PREFIX: &str = "dns+";

/// Reads an engine's URL: `http://host:port` or `https://host:port`, nothing after it.
pub(super) fn parse_base(url: &str) -> Result<Uri, EngineError> {
    let bad = |why: &str| EngineError::BadUrl { url: without_credentials(url), why: why.to_owned() };
    let uri: Uri = url.parse().map_err(|_| bad("it is not a URL"))?;
    match uri.scheme_str() {
        Some("http" | "https") => {}
        _ => return Err(bad("it begins with neither http:// nor https://")),
    }
    let authority = uri.authority().ok_or_else(|| bad("it names no host"))?;
    if authority.as_str().contains('@') {
        return Err(bad("it has a user name; set the engine's API key instead"));
    }
    if authority.host().is_empty() {
        return Err(bad("it names no host"));
    }
    if !matches!(uri.path(), "" | "/") || uri.query().is_some() {
        return Err(bad("it has a path; name only scheme, host and port"));
    }
    Ok(uri)
}

/// The URL without what stands before an `@`: that may be a password.
fn without_credentials(url: &str) -> String {
    let text: String = match url.rsplit_once('@') {
        Some((_, rest)) => format!("…@{rest}"),
        None => url.to_owned(),
    };
    text.chars().filter(|char| !char.is_control()).take(NAME_BYTES_MAX).collect()
}

/// The endpoint of a publisher as a client reaches it: `tcp://host:port` with the URL's host in place of a wildcard, or
/// `ipc://path` of an engine on this machine. `None` = it is no such endpoint.
pub(super) fn reached(endpoint: &str, host: &str) -> Option<String> {
    if endpoint.len() > NAME_BYTES_MAX || endpoint.chars().any(|char| char.is_control() || char.is_whitespace()) {
        return None;
    }
    if let Some(path) = endpoint.strip_prefix("ipc://") {
        // A socket's path is of this machine: an engine elsewhere must not name one.
        return (!path.is_empty() && is_of_this_machine(host)).then(|| endpoint.to_owned());
    }
    let (bound, port) = endpoint.strip_prefix("tcp://")?.rsplit_once(':')?;
    port.parse::<u16>().ok().filter(|port| *port > 0)?;
    if WILDCARDS.contains(&bound) {
        return Some(format!("tcp://{host}:{port}"));
    }
    let is_bracketed = bound.starts_with('[') && bound.ends_with(']');
    let is_host = is_bracketed || !bound.contains([':', '/', '[', ']', ';', '@']);
    is_host.then(|| endpoint.to_owned())
}

/// Whether a URL's host is the loopback interface.
fn is_of_this_machine(host: &str) -> bool {
    let bare = host.trim_matches(['[', ']']);
    bare == "localhost" || bare.parse::<IpAddr>().is_ok_and(|address| address.is_loopback())
}

/// The host of a publisher's base port: `bound`, or the URL's host in place of a wildcard. IPv6 gets its brackets.
pub(super) fn publisher_host(bound: &str, host: &str) -> String {
    if WILDCARDS.contains(&bound) {
        return host.to_owned();
    }
    let bare = bound.trim_matches(['[', ']']);
    if bare.contains(':') { format!("[{bare}]") } else { bare.to_owned() }
}

/// Makes one engine of each address of a name, if the URL asks for it: `dns+http://name:port`. Any other URL is one
/// engine. Addresses are sorted; engine k gets the worker id of `config` plus k. Certificates are still checked against
/// the name.
///
/// # Errors
/// A name without addresses, with more than 256, or one that cannot be resolved.
pub async fn expand_addresses(config: EngineConfig) -> Result<Vec<EngineConfig>, EngineError> {
    let Some(url) = config.url.strip_prefix(DNS_PREFIX) else { return Ok(vec![config]) };
    let base = parse_base(url)?;
    let scheme = base.scheme_str().unwrap_or("http");
    let host = base.host().unwrap_or_default().trim_matches(['[', ']']);
    let port = base.port_u16().unwrap_or(if scheme == "https" { 443 } else { 80 });
    let failed = |why: String| EngineError::BadUrl { url: without_credentials(&config.url), why };
    let found = tokio::net::lookup_host((host, port)).await;
    let found = found.map_err(|error| failed(format!("its name cannot be resolved: {error}")))?;
    let urls = address_urls(scheme, found).map_err(failed)?;
    let tls_name = config.tls_name.clone().or_else(|| host.parse::<IpAddr>().is_err().then(|| host.to_owned()));
    let engine = |(index, url): (usize, String)| EngineConfig {
        worker: config.worker.saturating_add(index as u64),
        url,
        tls_name: tls_name.clone(),
        ..config.clone()
    };
    Ok(urls.into_iter().enumerate().map(engine).collect())
}

/// A URL for each address, sorted, each once.
fn address_urls(scheme: &str, found: impl Iterator<Item = SocketAddr>) -> Result<Vec<String>, String> {
    let mut addresses: Vec<_> = found.take(4 * ADDRESSES_MAX).collect();
    addresses.sort_unstable();
    addresses.dedup();
    match addresses.len() {
        0 => Err("its name has no address".to_owned()),
        count if count > ADDRESSES_MAX => Err(format!("its name has more than {ADDRESSES_MAX} addresses")),
        _ => Ok(addresses.into_iter().map(|address| format!("{scheme}://{address}")).collect()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_url_is_scheme_host_and_port() {
        for url in ["http://a:8000", "https://a", "http://10.0.0.1:1/", "http://[fd00::1]:8000"] {
            assert!(parse_base(url).is_ok(), "{url}");
        }
        for (url, words) in [
            ("a:8000", "begins with"),
            ("ftp://a", "begins with"),
            ("http://a/v1", "path"),
            ("http://a?b=c", "path"),
            ("http://me:secret@a:1", "user name"),
            ("http:// a", "not a URL"),
            ("", "URL"),
        ] {
            let error = parse_base(url).expect_err(url).to_string();
            assert!(error.contains(words) && !error.contains("secret"), "{url}: {error}");
        }
    }

    #[test]
    fn wildcards_become_the_urls_host() {
        for (endpoint, expected) in [
            ("tcp://*:5557", Some("tcp://host-1:5557")),
            ("tcp://0.0.0.0:5557", Some("tcp://host-1:5557")),
            ("tcp://[::]:5557", Some("tcp://host-1:5557")),
            ("tcp://10.0.0.9:5557", Some("tcp://10.0.0.9:5557")),
            ("tcp://[fd00::1]:5557", Some("tcp://[fd00::1]:5557")),
            ("ipc:///run/events", None),
            ("tcp://*:0", None),
            ("tcp://*:70000", None),
            ("tcp://a b:1", None),
            ("tcp://a\u{0}:1", None),
            ("tcp://a:1;b:2", None),
            ("inproc://x", None),
            ("ipc://", None),
            ("", None),
        ] {
            assert_eq!(reached(endpoint, "host-1").as_deref(), expected, "{endpoint}");
        }
        for (host, expected) in [("127.0.0.1", true), ("localhost", true), ("[::1]", true), ("10.0.0.8", false)] {
            assert_eq!(reached("ipc:///run/events", host).is_some(), expected, "{host}");
        }
        assert_eq!(publisher_host("*", "[fd00::2]"), "[fd00::2]");
        assert_eq!(publisher_host("fd00::1", "x"), "[fd00::1]");
    }

    #[test]
    fn each_address_is_one_engine_whatever_the_resolvers_order() {
        let address = |last: u8| SocketAddr::from(([10, 0, 0, last], 8000));
        let urls = address_urls("http", [address(3), address(1), address(3)].into_iter()).expect("addresses");
        assert_eq!(urls, ["http://10.0.0.1:8000", "http://10.0.0.3:8000"]);
        assert!(address_urls("http", std::iter::empty()).is_err());
        let many = (0..=ADDRESSES_MAX).map(|at| SocketAddr::from(([10, 0, (at >> 8) as u8, at as u8], 1)));
        assert!(address_urls("http", many).is_err());
    }

    proptest! {
        #[test]
        fn an_endpoint_that_is_taken_has_no_wildcard_and_no_space(text in "\\PC{0,40}", port in 0_u32..70_000) {
            for endpoint in [text.clone(), format!("tcp://{text}:{port}")] {
                if let Some(reached) = reached(&endpoint, "h") {
                    prop_assert!(!reached.contains(char::is_whitespace));
                    prop_assert!(!reached.starts_with("tcp://*:") && !reached.starts_with("tcp://:"));
                }
            }
        }
    }
}
