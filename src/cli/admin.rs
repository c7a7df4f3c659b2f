//! Connections to a daemon, and requests to its admin socket.

use std::path::{Path, PathBuf};
use std::time::Duration;

use super::exit::{Exit, Failure};
use crate::client::{Client, ClientOptions};
use crate::config::{Config, socket_default};
use crate::error::Error;
use crate::wire;

/// Timeout of a daemon's answer, for a person at a terminal.
const ANSWER_S_MAX: u64 = 10;

/// The sockets of a daemon, for commands that may also know its configuration.
#[derive(Clone, Debug, clap::Args)]
pub struct DaemonSockets {
    /// The daemon's Unix socket [default: that of --config, else the daemon's default]
    #[arg(long, value_name = "PATH")]
    pub socket: Option<PathBuf>,
    /// The daemon's admin socket [default: as the daemon says on its socket]
    #[arg(long, value_name = "PATH")]
    pub admin_socket: Option<PathBuf>,
}

impl DaemonSockets {
    /// The routing socket, with the configuration if it is known.
    pub(super) fn socket(&self, config: Option<&Config>) -> PathBuf {
        let given = self.socket.clone().or_else(|| config.map(|config| config.serve.socket.clone()));
        given.unwrap_or_else(socket_default)
    }
}

pub(super) fn client_options() -> ClientOptions {
    let timeout = Some(Duration::from_secs(ANSWER_S_MAX));
    ClientOptions { name: "kvrouted command line".to_owned(), timeout, ..ClientOptions::default() }
}

/// The failure of a connection: always [`Exit::Unavailable`] in place of [`Exit::System`].
pub(super) fn unavailable(socket: &Path, error: &Error) -> Failure {
    let exit = match Exit::of(error) {
        Exit::System => Exit::Unavailable,
        exit => exit,
    };
    let (path, message) = (socket.display().to_string(), error.to_string());
    Failure::new(exit, if message.contains(&path) { message } else { format!("{path}: {message}") })
}

/// A connection to a daemon's admin socket. `socket` is that socket, or the routing socket, whose hello reply names it.
pub(super) fn connect(socket: &Path) -> Result<Client, Failure> {
    Client::connect_admin(socket, &client_options()).map_err(|error| unavailable(socket, &error))
}

/// A daemon's spaces and its whole status. For `socket` see [`connect`].
pub(super) fn examination(socket: &Path) -> Result<(Vec<wire::SpaceInfo>, wire::StatusPage), Failure> {
    let mut client = connect(socket)?;
    let page = client.status_all()?;
    Ok((client.hello().spaces.clone(), page))
}
