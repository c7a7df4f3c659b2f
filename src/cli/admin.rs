//! Connections to a daemon, and requests to its admin socket.

use std::path::Path;
use std::time::Duration;

use super::exit::{Exit, Failure};
use crate::client::{Client, ClientOptions};
use crate::error::Error;
use crate::wire;

/// How long a person at a terminal waits for a daemon that says nothing.
const ANSWER_S_MAX: u64 = 10;

pub(super) fn options() -> ClientOptions {
    let timeout = Some(Duration::from_secs(ANSWER_S_MAX));
    ClientOptions { name: "kvrouted command line".to_owned(), timeout, ..ClientOptions::default() }
}

/// Connection failures end with their own code, whatever went wrong underneath.
pub(super) fn unavailable(socket: &Path, error: &Error) -> Failure {
    let exit = match Exit::of(error) {
        Exit::System => Exit::Unavailable,
        exit => exit,
    };
    let (shown, said) = (socket.display().to_string(), error.to_string());
    Failure::new(exit, if said.contains(&shown) { said } else { format!("{shown}: {said}") })
}

/// Asks a daemon about every worker, and who names them. `socket` is its administration socket, or its routing socket, which then
/// says where the other is.
pub(super) fn status(socket: &Path) -> Result<wire::StatusPage, Failure> {
    examination(socket).map(|(_, page)| page)
}

/// As [`status`], with the spaces that the daemon says it has.
pub(super) fn examination(socket: &Path) -> Result<(Vec<wire::SpaceInfo>, wire::StatusPage), Failure> {
    let mut client = Client::connect_admin(socket, &options()).map_err(|error| unavailable(socket, &error))?;
    let page = client.status_all()?;
    Ok((client.hello().spaces.clone(), page))
}

/// Asks a daemon to add, remove or change a worker. `socket` is as for [`status`].
pub(super) fn change_worker(socket: &Path, change: &wire::WorkerChange<'_>) -> Result<u32, Failure> {
    let mut client = Client::connect_admin(socket, &options()).map_err(|error| unavailable(socket, &error))?;
    Ok(client.change_worker(change)?)
}

/// Asks a daemon to forget the blocks of a worker, or of all. `socket` is as for [`workers`].
pub(super) fn reset(socket: &Path, order: wire::ResetOrder) -> Result<wire::ResetDone, Failure> {
    let mut client = Client::connect_admin(socket, &options()).map_err(|error| unavailable(socket, &error))?;
    Ok(client.reset(order)?)
}

/// Gives a daemon an order about its policy. `socket` is as for [`status`].
pub(super) fn set_policy(socket: &Path, order: &wire::PolicyOrder<'_>) -> Result<wire::PolicyDone, Failure> {
    let mut client = Client::connect_admin(socket, &options()).map_err(|error| unavailable(socket, &error))?;
    Ok(client.set_policy(order)?)
}
