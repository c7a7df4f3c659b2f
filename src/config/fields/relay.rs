//! The table that says what a relay does beside what it takes in.

use super::field;
use crate::config::RelayConfig;
use crate::config::endpoint;
use crate::config::field::{Kind, Preset, Reload, Section};
use crate::limits;

use Kind::{Integer, Parsed};
use Preset::Value;

pub(in crate::config) static RELAY: Section<RelayConfig> = Section {
    name: "relay",
    reload: Reload::Never,
    repeated: false,
    doc: "`kvrouted relay` only: what is said once more of the file's one worker. Routers name these endpoints.",
    fields: &[
        field(
            "endpoint",
            "",
            Value("tcp://*:5567"),
            Parsed {
                what: "a string: tcp://*:port, tcp://address:port or ipc://path",
                set: |c, text| {
                    endpoint::check_bound(text)?;
                    text.clone_into(&mut c.endpoint);
                    Ok(())
                },
            },
            "Where the relay publishes. Port 0: a free one, which the log names.",
        ),
        field(
            "replay",
            "",
            Value("tcp://*:5667"),
            Parsed {
                what: "a string: tcp://*:port, tcp://address:port or ipc://path",
                set: |c, text| {
                    endpoint::check_bound(text)?;
                    text.clone_into(&mut c.replay);
                    Ok(())
                },
            },
            "Where it replays lost batches and sends snapshots.",
        ),
        field(
            "heartbeat_ms",
            "milliseconds",
            Value("1000"),
            Integer { min: 200, max: limits::RELAY_SILENT_MS_MAX / 2, set: |c, v| c.heartbeat_ms = v },
            "How long it may say nothing. A router that hears nothing for 5 s believes the worker no more.",
        ),
        field(
            "buffer_batches_max",
            "batches",
            Value("16384"),
            Integer { min: 1, max: 1 << 32, set: |c, v| c.buffer_batches_max = v as usize },
            "Batches kept for replays. Who asks for an older one gets a snapshot.",
        ),
        field(
            "buffer_bytes_max",
            "bytes",
            Value("268435456"),
            Integer { min: 1, max: 1 << 40, set: |c, v| c.buffer_bytes_max = v as usize },
            "Bytes of those batches.",
        ),
    ],
};
