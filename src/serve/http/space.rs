//! Which space a model and a routing group mean, and what a space is called here.

use axum::http::StatusCode;

use super::fields::GROUP_DEFAULT;
use super::refusal::Refusal;
use crate::error::{Error, Kind};
use crate::fleet::{FleetTable, PoolRole, Space};
use crate::ids::{Scheme, Window};
use crate::limits::NOMINAL_BLOCK_SIZE_TOKENS;

/// The routing group that a space is. The default namespace has a name here.
pub(super) fn group_of(space: &Space) -> &str {
    if space.namespace.is_empty() { GROUP_DEFAULT } else { &space.namespace }
}

/// The space of a model and a routing group. Of several pools the one that does both is meant, else that which decodes.
pub(super) fn find<'a>(fleet: &'a FleetTable, model: &str, group: &str) -> Option<&'a Space> {
    let rank = |space: &&Space| match space.role {
        PoolRole::Both => 0,
        PoolRole::Decode => 1,
        PoolRole::Prefill => 2,
    };
    fleet.spaces.iter().filter(|space| space.model == model && group_of(space) == group).min_by_key(rank)
}

/// The same, or why there is none: the spaces are the configuration's.
pub(super) fn of<'a>(fleet: &'a FleetTable, model: &str, group: &str) -> Result<&'a Space, Error> {
    find(fleet, model, group).ok_or_else(|| {
        let message = format!("there is no space for model={model} routing_group={group}");
        let remedy = "add a [[space]] with that model and the group as its namespace to the configuration, and restart";
        Error::new(Kind::UnknownSpace, message, remedy)
    })
}

/// The same for who wants a worker: as long as there is no space there is none.
pub(super) fn to_select<'a>(fleet: &'a FleetTable, model: &str, group: &str) -> Result<&'a Space, Refusal> {
    of(fleet, model, group).map_err(|error| Refusal::new(StatusCode::SERVICE_UNAVAILABLE, error))
}

/// How a space's prompts are cut; as nothing is known of it yet, as its workers were registered.
pub(super) fn scheme_of(space: &Space, registered: Option<u32>) -> Scheme {
    let block_size = registered.unwrap_or(NOMINAL_BLOCK_SIZE_TOKENS);
    space.scheme.get().unwrap_or(Scheme { block_size, window: Window::Plain })
}
