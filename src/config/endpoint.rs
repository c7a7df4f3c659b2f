//! What a field that names an endpoint, a socket or its mode may say.

use super::field::Fault;
use crate::endpoint::{self, BoundEndpoint, Endpoint, EndpointFault};

impl From<EndpointFault> for Fault {
    fn from(fault: EndpointFault) -> Self {
        Self { message: fault.message, nearest: fault.nearest }
    }
}

/// Reads an endpoint that we connect to.
pub(super) fn endpoint(text: &str) -> Result<Endpoint, Fault> {
    Ok(Endpoint::parse(text)?)
}

/// Checks an endpoint that we bind.
pub(super) fn check_bound(text: &str) -> Result<(), Fault> {
    BoundEndpoint::parse(text)?;
    Ok(())
}

/// Reads the address of an engine's HTTP server.
pub(super) fn url(text: &str) -> Result<String, Fault> {
    Ok(endpoint::server_url(text)?)
}

/// Checks the prefix of a subscription.
pub(super) fn check_topic(text: &str) -> Result<(), Fault> {
    Ok(endpoint::check_topic(text)?)
}

/// Checks the path of a Unix socket that we bind.
pub(super) fn check_socket(path: &str) -> Result<(), Fault> {
    Ok(endpoint::check_socket_path(path)?)
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
    fn modes_are_octal() {
        assert_eq!(socket_mode("0660"), Ok(0o660));
        assert_eq!(socket_mode("600"), Ok(0o600));
        assert_eq!(socket_mode("0o777"), Ok(0o777));
        for bad in ["", "rw", "0888", "1777", "-1", "+7"] {
            assert!(socket_mode(bad).is_err(), "{bad}");
        }
    }
}
