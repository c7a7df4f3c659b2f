//! The table that says who may administer.

use super::access::{ACCESS_FIELDS, allow_gids, allow_uids};
use super::field;
use crate::config::AdminConfig;
use crate::config::endpoint;
use crate::config::field::{Kind, Preset, Reload, Section};

use Kind::Parsed;
use Preset::Value;

/// The preset of the admin socket's mode, as a number.
pub(in crate::config) const ADMIN_SOCKET_MODE_PRESET: u32 = 0o600;

pub(in crate::config) static ADMIN: Section<AdminConfig> = Section {
    name: "admin",
    reload: Reload::Only(ACCESS_FIELDS),
    repeated: false,
    doc: "Who may administer: status, adding and removing workers, resets, policies.",
    fields: &[
        field(
            "socket_mode",
            "octal",
            Value("0600"),
            Parsed {
                what: "an octal mode in quotes, such as \"0660\"",
                set: |c, text| {
                    c.socket_mode = endpoint::socket_mode(text)?;
                    Ok(())
                },
            },
            "Permission bits of the admin socket. 0600: only the daemon's own user, and root, whatever the lists say.",
        ),
        allow_uids("As serve.allow_uids, for those who administer. The two lists know nothing of each other."),
        allow_gids("As serve.allow_gids, for those who administer."),
    ],
};
