//! The field table: every field's name, unit, default, bounds, meaning and place. The example file, the
//! suggestions, the checks and the defaults of [`Config`](super::Config) are all read from here.

mod daemon;
mod fleet;
mod policy;
mod serving;

use super::field::{Field, Kind, Preset};

pub(super) use daemon::{BOOKING, DISCOVERY, INGEST, JOURNAL, LOG, RELAY, SHADOW, SNAPSHOT};
pub(super) use fleet::{SPACE, WORKER, WorkerDraft};
pub(super) use policy::POLICY;
pub(super) use serving::{ADMIN, ADMIN_SOCKET_MODE_PRESET, HTTP, METRICS, SERVE};

const fn field<T>(
    name: &'static str,
    unit: &'static str,
    preset: Preset,
    kind: Kind<T>,
    doc: &'static str,
) -> Field<T> {
    Field { name, unit, preset, kind, doc }
}
