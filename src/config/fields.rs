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

mod daemon;
mod fleet;
mod policy;
mod remote;
mod routers;
mod serving;
#[cfg(feature = "simulate")]
mod simulated_fleet;

use super::field::{Field, Kind, Preset, Reload};

pub(super) use daemon::{BOOKING, DISCOVERY, INGEST, JOURNAL, LOG, PROCESS, RELAY, SANDBOX, SHADOW, SNAPSHOT};
pub(super) use fleet::{SPACE, WORKER, WorkerDraft};
pub(super) use policy::POLICY;
pub(super) use remote::REMOTE;
pub(super) use routers::{ROUTERS, nats_fault, peer_fault};
pub(super) use serving::{ADMIN, ADMIN_SOCKET_MODE_PRESET, HTTP, METRICS, SERVE};
#[cfg(feature = "simulate")]
pub(super) use simulated_fleet::{CHANGE, ENGINES, FLEET, FLEET_ROUTERS, POOLS};

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
