//! ZeroMQ endpoints and socket paths, checked before anything is connected or bound.

use super::field::Fault;
use super::problem::nearest;
use crate::limits::SOCKET_PATH_BYTES_MAX;

const TRANSPORTS: [&str; 2] = ["tcp", "ipc"];

/// Checks an endpoint that we connect to: `tcp://host:port` or `ipc://path`.
pub(super) fn check(endpoint: &str) -> Result<(), Fault> {
    let Some((transport, address)) = endpoint.split_once("://") else {
        return Err(Fault::new(format!("`{endpoint}` is neither tcp://host:port nor ipc://path")));
    };
    match transport {
        "tcp" => check_tcp(endpoint, address),
        "ipc" => check_ipc(address),
        other => Err(Fault::near(
            format!("transport `{other}` is not served, only tcp and ipc are"),
            nearest(other, TRANSPORTS),
        )),
    }
}

/// Checks an endpoint that we bind: as one we connect to, or on every address, or on a port that is free.
pub(super) fn check_bound(endpoint: &str) -> Result<(), Fault> {
    let Some((host, port)) = endpoint.strip_prefix("tcp://").and_then(|address| address.rsplit_once(':')) else {
        return check(endpoint);
    };
    let host = if matches!(host, "*" | "0.0.0.0" | "[::]") { "127.0.0.1" } else { host };
    let port = if port == "0" { "1" } else { port };
    check_tcp(endpoint, &format!("{host}:{port}"))
}

fn check_tcp(endpoint: &str, address: &str) -> Result<(), Fault> {
    let Some((host, port)) = address.rsplit_once(':') else {
        return Err(Fault::new(format!("`{endpoint}` has no port")));
    };
    if host == "*" || host == "0.0.0.0" || host == "[::]" {
        return Err(Fault::near(
            format!("`{host}` is where an engine binds, not where it can be reached; name its host"),
            Some(&format!("tcp://127.0.0.1:{port}")),
        ));
    }
    let bracketed = host.starts_with('[') && host.ends_with(']') && host.len() > 2;
    if host.is_empty() || host.contains(|c: char| c.is_whitespace() || c == '/') || (host.contains(':') && !bracketed) {
        return Err(Fault::new(format!("`{host}` is not a host name or address (IPv6 goes in brackets)")));
    }
    match port.parse::<u16>() {
        Ok(1..) if port.bytes().all(|byte| byte.is_ascii_digit()) => Ok(()),
        _ => Err(Fault::new(format!("port `{port}` is not in 1 to 65535"))),
    }
}

/// Checks the address of an engine's HTTP server. Answers with it without what means nothing.
pub(super) fn check_url(url: &str) -> Result<String, Fault> {
    let Some((scheme, rest)) = url.split_once("://") else {
        return Err(Fault::near(format!("`{url}` is not http://host:port"), Some(&format!("http://{url}"))));
    };
    if scheme != "http" {
        return Err(Fault::near(
            format!("`{scheme}` is not spoken here, only http is"),
            Some(&format!("http://{rest}")),
        ));
    }
    let address = rest.trim_end_matches('/');
    check_tcp(url, address)?;
    Ok(format!("http://{address}"))
}

/// The endpoint of another rank: its port counted up. `None` if it has no port, or none that high.
pub(crate) fn of_rank(endpoint: &str, ranks: u32) -> Option<String> {
    if ranks == 0 {
        return Some(endpoint.to_owned());
    }
    let (host, port) = endpoint.strip_prefix("tcp://")?.rsplit_once(':')?;
    let port = u32::from(port.parse::<u16>().ok()?).checked_add(ranks)?;
    u16::try_from(port).ok().map(|port| format!("tcp://{host}:{port}"))
}

fn check_ipc(path: &str) -> Result<(), Fault> {
    match path {
        "" | "@" => Err(Fault::new("ipc:// needs a path")),
        "*" => Err(Fault::new("`*` is where an engine binds, not where it can be reached; name the path")),
        _ if path.len() > SOCKET_PATH_BYTES_MAX => Err(too_long(path)),
        _ => Ok(()),
    }
}

/// Checks the path of a Unix socket that we bind.
pub(super) fn check_socket(path: &str) -> Result<(), Fault> {
    if path.is_empty() || path.ends_with('/') {
        return Err(Fault::new(format!("`{path}` does not name a file")));
    }
    if path.contains('\0') {
        return Err(Fault::new("a path cannot contain a zero byte"));
    }
    if path.len() > SOCKET_PATH_BYTES_MAX {
        return Err(too_long(path));
    }
    Ok(())
}

fn too_long(path: &str) -> Fault {
    Fault::new(format!("the path is {} bytes, a Unix socket's has at most {SOCKET_PATH_BYTES_MAX}", path.len()))
}

/// Reads permission bits written in octal.
pub(super) fn socket_mode(text: &str) -> Result<u32, Fault> {
    let octal = text.strip_prefix("0o").unwrap_or(text);
    match u32::from_str_radix(octal, 8) {
        Ok(mode @ 0..=0o777) if octal.bytes().all(|byte| byte.is_ascii_digit()) => Ok(mode),
        _ => Err(Fault::new(format!("`{text}` is not an octal mode such as 0660"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn endpoints_we_can_connect_to() {
        for good in ["tcp://127.0.0.1:5557", "tcp://engine-3.local:1", "tcp://[::1]:65535", "ipc:///run/e", "ipc://@e"]
        {
            assert_eq!(check(good), Ok(()), "{good}");
        }
    }

    #[test]
    fn endpoints_we_cannot() {
        for (bad, word) in [
            ("127.0.0.1:5557", "neither"),
            ("tcp://127.0.0.1", "no port"),
            ("tcp://*:5557", "binds"),
            ("tcp://0.0.0.0:5557", "binds"),
            ("tcp://host:0", "1 to 65535"),
            ("tcp://host:65536", "1 to 65535"),
            ("tcp://host:+1", "1 to 65535"),
            ("tcp://::1:5557", "brackets"),
            ("tcp://:5557", "host name"),
            ("ipc://", "path"),
            ("ipc://*", "binds"),
            ("udp://host:1", "transport"),
        ] {
            let fault = check(bad).expect_err(bad);
            assert!(fault.message.contains(word), "{bad}: {}", fault.message);
        }
        assert_eq!(check("tpc://h:1").expect_err("transport").nearest.as_deref(), Some("tcp"));
        let long = format!("ipc://{}", "x".repeat(SOCKET_PATH_BYTES_MAX + 1));
        assert!(check(&long).is_err());
    }

    #[test]
    fn urls_are_servers() {
        for good in ["http://10.0.0.1:30000", "http://10.0.0.1:30000/", "http://10.0.0.1:30000//"] {
            assert_eq!(check_url(good).as_deref(), Ok("http://10.0.0.1:30000"));
        }
        assert_eq!(check_url("http://[::1]:80").as_deref(), Ok("http://[::1]:80"));
        for bad in ["10.0.0.1:1", "https://h:1", "http://h", "http://h:1/v1", "http://*:1", "http://"] {
            assert!(check_url(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn ports_count_up_with_ranks() {
        assert_eq!(of_rank("tcp://h:5557", 3).as_deref(), Some("tcp://h:5560"));
        assert_eq!(of_rank("tcp://[::1]:1", 1).as_deref(), Some("tcp://[::1]:2"));
        assert_eq!(of_rank("ipc:///e", 0).as_deref(), Some("ipc:///e"));
        assert_eq!(of_rank("ipc:///e", 1), None);
        assert_eq!(of_rank("tcp://h:65535", 1), None);
    }

    #[test]
    fn modes_are_octal() {
        assert_eq!(socket_mode("0660"), Ok(0o660));
        assert_eq!(socket_mode("600"), Ok(0o600));
        assert_eq!(socket_mode("0o777"), Ok(0o777));
        for bad in ["", "rw", "0888", "1777", "-1", "+7"] {
            assert!(socket_mode(bad).is_err(), "{bad}");
        }
    }
}
