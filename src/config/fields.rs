//! The field table: every field's name, unit, default, bounds, description, and whether a running daemon takes over a
//! change. The example file, suggestions, checks, defaults and the list of fields that need a restart all come from
//! here.

/// A field that waits for the next start: its table and its name, as in the file and in [`Config`](super::Config), then
/// unit, default, kind and description.
macro_rules! restart {
    ($table:ident.$name:ident, $unit:expr, $preset:expr, $kind:expr, $doc:expr $(,)?) => {
        $crate::config::field::Field {
            name: stringify!($name),
            unit: $unit,
            preset: $preset,
            kind: $kind,
            reload: $crate::config::field::Reload::Restart {
                path: concat!(stringify!($table), ".", stringify!($name)),
                differs: |was, is| was.$name != is.$name,
            },
            doc: $doc,
        }
    };
}

/// A field of the login to NATS servers, and of what TLS trusts there, which two tables have.
macro_rules! nats_login {
    (user of $table:ident) => {
        restart!(
            $table.nats_user,
            "",
            $crate::config::field::Preset::Absent("kvrouted"),
            $crate::config::field::Kind::Text {
                bytes_min: 1,
                bytes_max: $crate::limits::NAME_BYTES_MAX,
                set: |c, text| c.nats_user = Some(text.to_owned())
            },
            "A user of the NATS servers, whose password is in nats_secret_file.",
        )
    };
    (secret_file of $table:ident) => {
        nats_login!(
            $table.nats_secret_file, "/etc/kvrouted/nats.secret",
            "A file with the password of nats_user, or without nats_user with a token of the NATS servers."
        )
    };
    (credentials_file of $table:ident) => {
        nats_login!(
            $table.nats_credentials_file, "/etc/kvrouted/nats.creds",
            "A file with credentials as NATS's tools write it, in place of nats_secret_file: a JWT and a seed, or a seed alone."
        )
    };
    (ca_file of $table:ident) => {
        nats_login!(
            $table.nats_ca_file, "/etc/ssl/certs/ca-certificates.crt",
            "A file with the certificates of the authorities that may vouch for the NATS servers. Only TLS 1.3 is spoken."
        )
    };
    ($table:ident.$name:ident, $example:literal, $doc:literal) => {
        restart!(
            $table.$name,
            "",
            $crate::config::field::Preset::Absent($example),
            $crate::config::field::Kind::Text {
                bytes_min: 1,
                bytes_max: 4096,
                set: |c, text| c.$name = Some(std::path::PathBuf::from(text))
            },
            $doc,
        )
    };
}

mod daemon;
mod fleet;
mod policy;
mod remote;
mod routers;
mod serving;
#[cfg(feature = "simulate")]
mod simulated_fleet;

use super::field::{Field, Kind, Preset, Reload, Section};

pub(super) use daemon::{BOOKING, DISCOVERY, INGEST, JOURNAL, LOG, PROCESS, RELAY, SANDBOX, SHADOW, SNAPSHOT, TRACES};
pub(super) use fleet::{SPACE, WORKER, WorkerDraft, snapshot_name};
pub(super) use policy::POLICY;
pub(super) use remote::REMOTE;
pub(super) use routers::{ROUTERS, nats_fault, peer_fault};
pub(super) use serving::{ADMIN, ADMIN_SOCKET_MODE_PRESET, HTTP, METRICS, SERVE};
#[cfg(feature = "simulate")]
pub(super) use simulated_fleet::{CHANGE, ENGINES, FLEET, FLEET_ROUTERS, POOLS};

/// Does the same with every table of the configuration.
pub(super) trait EachSection {
    /// Gets each table.
    fn section<T: Default>(&mut self, section: &'static Section<T>);
}

/// Gives every table to `each`, in the order of the example file.
pub(super) fn each_section(each: &mut impl EachSection) {
    each.section(&SERVE);
    each.section(&ADMIN);
    each.section(&METRICS);
    each.section(&HTTP);
    each.section(&REMOTE);
    each.section(&LOG);
    each.section(&PROCESS);
    each.section(&SANDBOX);
    each.section(&INGEST);
    each.section(&BOOKING);
    each.section(&SNAPSHOT);
    each.section(&JOURNAL);
    each.section(&SHADOW);
    each.section(&TRACES);
    each.section(&POLICY);
    each.section(&DISCOVERY);
    each.section(&ROUTERS);
    each.section(&RELAY);
    each.section(&SPACE);
    each.section(&WORKER);
}

/// A field that a running daemon takes over.
const fn live<T>(name: &'static str, unit: &'static str, preset: Preset, kind: Kind<T>, doc: &'static str) -> Field<T> {
    Field { name, unit, preset, kind, reload: Reload::Live, doc }
}

/// A field of a table that the daemon compares as a whole, or not at all.
const fn at_start<T>(
    name: &'static str,
    unit: &'static str,
    preset: Preset,
    kind: Kind<T>,
    doc: &'static str,
) -> Field<T> {
    Field { name, unit, preset, kind, reload: Reload::AtStart, doc }
}
