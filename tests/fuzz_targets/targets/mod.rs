//! The fuzz targets: functions of bytes that panic when a promise is broken. libFuzzer calls them through the package
//! in `fuzz/`, `cargo test` calls them with seeded mutations.

pub(crate) mod apply;
mod bookings;
mod config;
mod endpoint;
mod engine;
mod engine_snapshot;
mod events;
mod gate;
mod journal;
pub(crate) mod lane;
pub(crate) mod load_events;
mod load_stat;
mod opening;
mod recovery;
mod routing;
mod snapshot;
mod zmtp;

/// Takes any bytes.
pub(crate) type Target = fn(&[u8]);

/// Targets by their names.
pub(crate) const ALL: &[(&str, Target)] = &[
    ("msgpack", events::msgpack),
    ("flatbuffer", events::flatbuffer),
    ("gate", gate::gate),
    ("recovery", recovery::recovery),
    ("apply", apply::apply),
    ("request", routing::request),
    ("reply", routing::reply),
    ("frames", routing::frames),
    ("snapshot", snapshot::snapshot),
    ("bookings", bookings::bookings),
    ("journal", journal::journal),
    ("config", config::config),
    ("endpoint", endpoint::endpoint),
    ("load_stat", load_stat::load_stat),
    ("load_events", load_events::load_events),
    ("lane", lane::lane),
    ("zmtp", zmtp::zmtp),
    ("opening", opening::opening),
    ("engine_snapshot", engine_snapshot::engine_snapshot),
];
