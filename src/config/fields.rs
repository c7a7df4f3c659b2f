//! The field table: every field's name, unit, default, bounds, meaning and place. The example file, the
//! suggestions, the checks and the defaults of [`Config`](super::Config) are all read from here.

mod access;
mod admin;
mod daemon;
mod fleet;
mod http;
mod journal;
mod policy;
mod relay;

use super::field::{Field, Kind, Preset};

pub(super) use admin::{ADMIN, ADMIN_SOCKET_MODE_PRESET};
pub(super) use daemon::{BOOKING, DISCOVERY, INGEST, LOG, METRICS, SERVE, SNAPSHOT};
pub(super) use fleet::{SPACE, WORKER, WorkerDraft};
pub(super) use http::HTTP;
pub(super) use journal::{JOURNAL, SHADOW};
pub(super) use policy::POLICY;
pub(super) use relay::RELAY;

const fn field<T>(
    name: &'static str,
    unit: &'static str,
    preset: Preset,
    kind: Kind<T>,
    doc: &'static str,
) -> Field<T> {
    Field { name, unit, preset, kind, doc }
}
