//! Connections to a daemon, and requests to its admin socket.

use std::path::Path;
use std::time::Duration;

use super::exit::{Exit, Failure};
use crate::client::{Client, ClientOptions};
use crate::error::Error;
use crate::wire;

/// Timeout of a daemon's answer, for a person at a terminal.
const ANSWER_S_MAX: u64 = 10;

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

/// Asks a daemon about every worker and its source. `socket` is its admin socket, or its routing socket, whose hello
/// reply names the admin socket.
pub(super) fn status(socket: &Path) -> Result<wire::StatusPage, Failure> {
    examination(socket).map(|(_, page)| page)
}

/// As [`status`], with the daemon's spaces.
pub(super) fn examination(socket: &Path) -> Result<(Vec<wire::SpaceInfo>, wire::StatusPage), Failure> {
    let mut client = Client::connect_admin(socket, &client_options()).map_err(|error| unavailable(socket, &error))?;
    let page = client.status_all()?;
    Ok((client.hello().spaces.clone(), page))
}

/// Adds, removes or changes a worker of a daemon. For `socket` see [`status`].
pub(super) fn change_worker(socket: &Path, change: &wire::WorkerChange<'_>) -> Result<u32, Failure> {
    let mut client = Client::connect_admin(socket, &client_options()).map_err(|error| unavailable(socket, &error))?;
    Ok(client.change_worker(change)?)
}

/// Makes a daemon forget the blocks of one worker or of all. For `socket` see [`status`].
pub(super) fn reset(socket: &Path, order: wire::ResetOrder) -> Result<wire::ResetDone, Failure> {
    let mut client = Client::connect_admin(socket, &client_options()).map_err(|error| unavailable(socket, &error))?;
    Ok(client.reset(order)?)
}

/// Sets, promotes or ends a daemon's shadow policy. For `socket` see [`status`].
pub(super) fn set_policy(socket: &Path, order: &wire::PolicyOrder<'_>) -> Result<wire::PolicyDone, Failure> {
    let mut client = Client::connect_admin(socket, &client_options()).map_err(|error| unavailable(socket, &error))?;
    Ok(client.set_policy(order)?)
}
