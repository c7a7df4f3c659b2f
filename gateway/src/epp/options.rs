//! The picker's options on the command line.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use super::endpoints::EndpointConfig;
use super::exchange::ExchangeLimits;
use super::server::Listen;
use super::tls::Certificate;
use crate::limits::{
    EPP_BODIES_BYTES_CEILING, EPP_BODIES_BYTES_MAX, EPP_BODY_BYTES_MAX, EPP_BODY_TIMEOUT, EPP_DECISION_TIMEOUT,
    EPP_DRAIN, EPP_LIST_MAX,
};

/// The options that only the picker has.
#[derive(Clone, Debug, clap::Args)]
pub struct EppOptions {
    /// Where Envoy finds the picker: ADDRESS:PORT, or unix:PATH
    #[arg(long, value_name = "WHERE", default_value = "0.0.0.0:9002")]
    pub listen: Listen,

    /// Serve without TLS. Without this option and without --tls-cert, the certificate is self-signed, which Envoy
    /// accepts unless it is configured to verify
    #[arg(long, conflicts_with_all = ["tls_cert", "tls_key"])]
    pub plaintext: bool,

    /// A PEM file with the certificate chain, read again after changes
    #[arg(long, value_name = "FILE", requires = "tls_key")]
    pub tls_cert: Option<PathBuf>,

    /// A PEM file with the certificate's private key
    #[arg(long, value_name = "FILE", requires = "tls_cert")]
    pub tls_key: Option<PathBuf>,

    /// An engine's address as Envoy knows it: the worker's id, its host, and a port for each rank. May be repeated.
    /// Without this option and --endpoints, each engine answers at the address of its URL
    #[arg(long = "endpoint", value_name = "ID=HOST:PORT[,PORT…]")]
    pub endpoints: Vec<EndpointConfig>,

    /// A TOML file with `[[endpoint]]` tables (worker, host, ports), read again after changes
    #[arg(long = "endpoints", value_name = "FILE")]
    pub endpoints_file: Option<PathBuf>,

    /// Name one endpoint instead of an ordered list: for ORIGINAL_DST clusters, which answer 503 to a list
    #[arg(long)]
    pub one_endpoint: bool,

    /// The most endpoints in a list. Envoy uses one more for each retry of its route
    #[arg(long, value_name = "NUMBER", default_value_t = EPP_LIST_MAX)]
    pub list_max: usize,

    /// The largest request body in bytes; larger ones get 413
    #[arg(long, value_name = "BYTES", default_value_t = EPP_BODY_BYTES_MAX)]
    pub body_bytes_max: usize,

    /// Memory in bytes for the requests that wait for their decision, headers and bodies, beside 64 KiB for each stream;
    /// beyond it a request gets 503
    #[arg(long, value_name = "BYTES", default_value_t = EPP_BODIES_BYTES_MAX)]
    pub bodies_bytes_max: usize,

    /// How long a decision may take; then the request gets 504. Envoy has no deadline here
    #[arg(long, value_name = "MS", default_value_t = EPP_DECISION_TIMEOUT.as_millis() as u64)]
    pub decision_timeout_ms: u64,

    /// How long a caller may take for the next piece of its body; then the request gets 408
    #[arg(long, value_name = "MS", default_value_t = EPP_BODY_TIMEOUT.as_millis() as u64)]
    pub body_timeout_ms: u64,

    /// How long answers under way may go on once the picker was told to end; then they are cut
    #[arg(long, value_name = "MS", default_value_t = EPP_DRAIN.as_millis() as u64)]
    pub drain_ms: u64,
}

/// An option that cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum OptionError {
    /// Not `ADDRESS:PORT` and not `unix:PATH`.
    #[error("'{0}' is neither ADDRESS:PORT nor unix:PATH")]
    Listen(String),
    /// A number outside of its range.
    #[error("--{option} must be from {min} to {max}")]
    Range {
        /// The option.
        option: &'static str,
        /// The least value.
        min: u64,
        /// The greatest value.
        max: u64,
    },
}

impl FromStr for Listen {
    type Err = OptionError;

    fn from_str(text: &str) -> Result<Self, OptionError> {
        match text.strip_prefix("unix:") {
            Some("") => Err(OptionError::Listen(text.to_owned())),
            Some(path) => Ok(Self::Unix(path.into())),
            None => text.parse::<SocketAddr>().map(Self::Tcp).map_err(|_| OptionError::Listen(text.to_owned())),
        }
    }
}

impl EppOptions {
    /// Checks what the command line cannot.
    ///
    /// # Errors
    /// [`OptionError`] names the option and its range.
    pub fn check(&self) -> Result<(), OptionError> {
        const DAY_MS: u64 = 86_400_000;
        for (option, value, min, max) in [
            ("list-max", self.list_max as u64, 1, 64),
            ("bodies-bytes-max", self.bodies_bytes_max as u64, 1, EPP_BODIES_BYTES_CEILING as u64),
            ("body-bytes-max", self.body_bytes_max as u64, 1, self.bodies_bytes_max as u64),
            ("decision-timeout-ms", self.decision_timeout_ms, 1, DAY_MS),
            ("body-timeout-ms", self.body_timeout_ms, 1, DAY_MS),
            ("drain-ms", self.drain_ms, 0, DAY_MS),
        ] {
            if !(min..=max).contains(&value) {
                return Err(OptionError::Range { option, min, max });
            }
        }
        Ok(())
    }

    /// What an exchange is allowed.
    #[must_use]
    pub fn limits(&self) -> ExchangeLimits {
        ExchangeLimits {
            body_bytes_max: self.body_bytes_max,
            bodies_bytes_max: self.bodies_bytes_max,
            body_timeout: Duration::from_millis(self.body_timeout_ms),
            decision_timeout: Duration::from_millis(self.decision_timeout_ms),
        }
    }

    /// The certificate; `None` = without TLS. A Unix socket has none unless files are named.
    #[must_use]
    pub fn certificate(&self) -> Option<Certificate> {
        match (&self.tls_cert, &self.tls_key) {
            (Some(certificate), Some(key)) => {
                Some(Certificate::Files { certificate: certificate.clone(), key: key.clone() })
            }
            _ if self.plaintext || matches!(self.listen, Listen::Unix(_)) => None,
            _ => Some(Certificate::SelfSigned),
        }
    }

    /// The most endpoints in a list.
    #[must_use]
    pub fn list_length(&self) -> usize {
        if self.one_endpoint { 1 } else { self.list_max }
    }

    /// How long answers under way may go on at the end.
    #[must_use]
    pub fn drain(&self) -> Duration {
        Duration::from_millis(self.drain_ms)
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Debug, Parser)]
    struct Command {
        #[command(flatten)]
        options: EppOptions,
    }

    fn options(arguments: &[&str]) -> Result<EppOptions, clap::Error> {
        Command::try_parse_from([&["epp"], arguments].concat()).map(|command| command.options)
    }

    #[test]
    fn tls_is_on_unless_it_is_turned_off_or_the_listener_is_a_unix_socket() {
        let certificate = |arguments: &[&str]| options(arguments).expect("options").certificate();
        assert_eq!(certificate(&[]), Some(Certificate::SelfSigned));
        assert_eq!(certificate(&["--plaintext"]), None);
        assert_eq!(certificate(&["--listen", "unix:/run/epp.sock"]), None);
        let files = Certificate::Files { certificate: "a.pem".into(), key: "b.pem".into() };
        assert_eq!(certificate(&["--tls-cert", "a.pem", "--tls-key", "b.pem"]), Some(files));
        assert!(options(&["--tls-cert", "a.pem"]).is_err(), "a certificate needs its key");
        assert!(options(&["--plaintext", "--tls-cert", "a.pem", "--tls-key", "b.pem"]).is_err());
    }

    #[test]
    fn one_endpoint_makes_the_list_one_long() {
        assert_eq!(options(&[]).expect("options").list_length(), EPP_LIST_MAX);
        assert_eq!(options(&["--list-max", "5"]).expect("options").list_length(), 5);
        assert_eq!(options(&["--list-max", "5", "--one-endpoint"]).expect("options").list_length(), 1);
    }

    #[test]
    fn numbers_outside_their_range_are_refused_by_name() {
        for (arguments, option) in [
            (["--list-max", "0"], "list-max"),
            (["--body-bytes-max", "0"], "body-bytes-max"),
            (["--bodies-bytes-max", "1000"], "body-bytes-max"),
            (["--decision-timeout-ms", "0"], "decision-timeout-ms"),
        ] {
            let error = options(&arguments).expect("options").check().expect_err("out of range");
            assert!(matches!(error, OptionError::Range { option: named, .. } if named == option), "{error}");
        }
        assert_eq!(options(&[]).expect("options").check(), Ok(()));
    }

    #[test]
    fn a_listener_is_an_address_or_a_path() {
        assert_eq!("[::]:9002".parse(), Ok(Listen::Tcp("[::]:9002".parse().expect("an address"))));
        assert_eq!("unix:/run/epp.sock".parse(), Ok(Listen::Unix("/run/epp.sock".into())));
        for text in ["", "9002", "localhost:9002", "unix:"] {
            assert_eq!(text.parse::<Listen>(), Err(OptionError::Listen(text.to_owned())), "{text}");
        }
    }
}
