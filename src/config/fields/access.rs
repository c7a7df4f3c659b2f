//! The fields that say who may connect to a socket, the same of either.

use super::field;
use crate::config::field::{Field, Kind, Preset};
use crate::config::{AccessConfig, AdminConfig, ServeConfig};
use crate::limits;

/// Their names: a running daemon takes them over.
pub(super) const ACCESS_FIELDS: &[&str] = &["allow_uids", "allow_gids"];

/// A table with lists of those who may connect.
pub(super) trait Admits {
    /// The lists.
    fn access(&mut self) -> &mut AccessConfig;
}

impl Admits for ServeConfig {
    fn access(&mut self) -> &mut AccessConfig {
        &mut self.access
    }
}

impl Admits for AdminConfig {
    fn access(&mut self) -> &mut AccessConfig {
        &mut self.access
    }
}

/// The users that may connect.
pub(super) const fn allow_uids<T: Admits>(doc: &'static str) -> Field<T> {
    accounts(ACCESS_FIELDS[0], |c, v| c.access().uids = v, doc)
}

/// The groups that may connect.
pub(super) const fn allow_gids<T: Admits>(doc: &'static str) -> Field<T> {
    accounts(ACCESS_FIELDS[1], |c, v| c.access().gids = v, doc)
}

const fn accounts<T>(name: &'static str, set: fn(&mut T, Vec<String>), doc: &'static str) -> Field<T> {
    let kind = Kind::List { items_max: limits::ALLOWED_ACCOUNTS_MAX, bytes_max: limits::NAME_BYTES_MAX, set };
    field(name, "", Preset::Value(""), kind, doc)
}
