//! What all connections of one part of the program to NATS have in common.

use std::fmt;
use std::path::Path;
use std::sync::Arc;

use rustls::ClientConfig;

use super::link::LinkPlan;
use super::login::Login;
use crate::endpoint::NatsServer;
use crate::error::{Error, Kind, Result};
use crate::limits::NATS_WAITING_BYTES_MAX;
use crate::remote::tls;

/// The files that access needs, as a table of the configuration names them.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct AccessFiles<'a> {
    /// The user whose password is in `secret`; without one it is a token.
    pub(crate) user: Option<&'a str>,
    pub(crate) secret: Option<&'a Path>,
    /// Credentials as NATS's tools write them, in place of a secret.
    pub(crate) credentials: Option<&'a Path>,
    /// Certificates of the authorities that TLS trusts.
    pub(crate) authorities: Option<&'a Path>,
}

/// Whom servers are shown, what TLS trusts, and what subjects begin with.
pub(crate) struct Access {
    login: Arc<Login>,
    tls: Option<Arc<ClientConfig>>,
    prefix: String,
}

impl fmt::Debug for Access {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Access").field("login", &self.login).field("prefix", &self.prefix).finish_non_exhaustive()
    }
}

impl Access {
    /// Reads the files.
    ///
    /// # Errors
    /// [`Kind::Config`] if one cannot be used.
    pub(crate) fn read(prefix: &str, files: &AccessFiles<'_>) -> Result<Self> {
        let text = |path: &Path| {
            let text = String::from_utf8(tls::read_secret(path)?);
            text.map(|text| text.trim_ascii_end().to_owned())
                .map_err(|error| tls::unusable(path, error, "write it as text"))
        };
        let login = match (files.credentials, files.secret) {
            (Some(path), _) => Login::of_credentials(&text(path)?).map_err(|fault| {
                let remedy = "name a file as NATS's tools write it, with a JWT and a seed";
                Error::new(Kind::Config, "NATS credentials cannot be used", remedy).caused_by(fault)
            })?,
            (None, Some(path)) => {
                let secret = text(path)?;
                match files.user {
                    Some(user) => Login::Password { user: user.to_owned(), password: secret },
                    None => Login::Token(secret),
                }
            }
            (None, None) => Login::Anonymous,
        };
        let tls = files.authorities.map(tls::trusting).transpose()?.map(Arc::new);
        Ok(Self { login: Arc::new(login), tls, prefix: prefix.to_owned() })
    }

    /// What all subjects begin with.
    pub(crate) fn prefix(&self) -> &str {
        &self.prefix
    }

    /// A connection that asks for no headers.
    pub(crate) fn plan(&self, servers: Vec<NatsServer>, name: String, subjects: Vec<String>) -> LinkPlan {
        LinkPlan {
            servers,
            login: Arc::clone(&self.login),
            tls: self.tls.clone(),
            name,
            headers: false,
            subjects,
            payload_bytes_max: 0,
            waiting_bytes_max: NATS_WAITING_BYTES_MAX,
        }
    }
}
