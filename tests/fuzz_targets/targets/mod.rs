//! What is fuzzed: functions of bytes that panic when a promise is broken. libFuzzer calls them through the package
//! in `fuzz/`, `cargo test` with seeded mutations.

pub(crate) mod apply;
mod config;
mod engine;
mod events;
mod gate;
mod recovery;
mod routing;
mod snapshot;

/// A target by its name.
pub(crate) const ALL: &[(&str, fn(&[u8]))] = &[
    ("msgpack", events::msgpack),
    ("flatbuffer", events::flatbuffer),
    ("gate", gate::gate),
    ("recovery", recovery::recovery),
    ("apply", apply::apply),
    ("request", routing::request),
    ("reply", routing::reply),
    ("frames", routing::frames),
    ("snapshot", snapshot::snapshot),
    ("config", config::config),
];
