//! The tables of a file that describes a simulated fleet.

use super::at_start;
use super::fleet::{ROLE_NAMES, ROLES};
use crate::config::field::{Field, Kind, Preset, Section};
use crate::config::fleet_file::{EnginesDraft, FleetChangeDraft, FleetChangeName, FleetDraft, RoutersDraft};
use crate::engine_law::{ENGINE_PRESET_NAMES, ENGINE_PRESETS};
use crate::limits;
use crate::route::{Bypass, DisaggregationPolicy};

use Kind::{Choice, Flag, Integer, Number, Text};
use Preset::{Absent, Required, Value};

/// The most milliseconds that events or reports may be on their way.
const LAG_MS_MAX: f64 = 60_000.0;
const BANDWIDTH_GB_S_MAX: f64 = 1e6;
/// The largest constant of an engine, in its unit.
const CONSTANT_MAX: f64 = 1e6;
/// A year.
const TIME_S_MAX: f64 = 365.0 * 86_400.0;
const CHANGES: [FleetChangeName; 3] = [FleetChangeName::Dies, FleetChangeName::Joins, FleetChangeName::Slows];
const CHANGE_NAMES: [&str; 3] = ["dies", "joins", "slows"];

pub(in crate::config) static FLEET: Section<FleetDraft> = Section {
    name: "fleet",
    repeated: false,
    doc: "What all engines of the fleet have in common.",
    fields: &[
        at_start(
            "block_size",
            "tokens",
            Value("64"),
            Integer { min: 1, max: limits::BLOCK_SIZE_TOKENS_MAX as u64, set: |c, v| c.block_size = v as u32 },
            "Tokens of a KV block.",
        ),
        at_start(
            "event_lag_ms",
            "milliseconds",
            Value("5"),
            Number { min: 0.0, max: LAG_MS_MAX, set: |c, v| c.event_lag_ms = v },
            "From a change of an engine's cache to the effect of its event in the routers.",
        ),
    ],
};

pub(in crate::config) static FLEET_ROUTERS: Section<RoutersDraft> = Section {
    name: "routers",
    repeated: false,
    doc: "The routers: how many there are, and what they know of each other and of the engines.",
    fields: &[
        at_start(
            "count",
            "",
            Value("1"),
            Integer { min: 1, max: limits::SIMULATED_ROUTERS_MAX as u64, set: |c, v| c.count = v as usize },
            "Routers, over which requests are spread at random.",
        ),
        at_start(
            "age_ms",
            "milliseconds",
            Value("0"),
            Number { min: 0.0, max: LAG_MS_MAX, set: |c, v| c.age_ms = v },
            "How late a router learns of the others' bookings, first tokens and ends.",
        ),
        at_start(
            "share_bookings",
            "",
            Value("true"),
            Flag { set: |c, v| c.share_bookings = v },
            "false: a router never learns of the others' bookings.",
        ),
        at_start(
            "sessions_stick",
            "",
            Value("false"),
            Flag { set: |c, v| c.sessions_stick = v },
            "true: all requests of a session go to one router.",
        ),
        at_start(
            "constants_known",
            "",
            Value("true"),
            Flag { set: |c, v| c.constants_known = v },
            "false: the routers begin without knowing how fast the engines are.",
        ),
        at_start(
            "constants_factor",
            "",
            Value("1"),
            Number { min: 1e-3, max: 1e3, set: |c, v| c.constants_factor = v },
            "The routers begin with prefill constants that are this many times the true ones.",
        ),
    ],
};

pub(in crate::config) static POOLS: Section<DisaggregationPolicy> = Section {
    name: "pools",
    repeated: false,
    doc: "When our policies let the worker that decodes also prefill, in a fleet with pools. The fields are those of the daemon's\n\
          [policy].",
    fields: &[
        at_start(
            "prefill_bypass",
            "",
            Value("off"),
            Choice { names: &Bypass::NAMES, set: |c, at| c.bypass = Bypass::ALL[at] },
            "isl_bounding: if few tokens of the prompt are new to it; prefill_load: if the prefill worker is busy; isl_or_load:\n\
             in either case.",
        ),
        at_start(
            "prefill_bypass_tokens",
            "tokens",
            Value("2048"),
            Integer { min: 0, max: limits::PROMPT_TOKENS_MAX as u64, set: |c, v| c.new_tokens_max = v },
            "Few means: fewer new tokens than this, and a smaller share of the prompt than prefill_bypass_share.",
        ),
        at_start(
            "prefill_bypass_share",
            "",
            Value("0.7"),
            Number { min: 0.0, max: 1.0, set: |c, v| c.new_share_max = v },
            "The share of the prompt that goes with prefill_bypass_tokens.",
        ),
        at_start(
            "prefill_bypass_busy_steps",
            "",
            Absent("4.0"),
            Number { min: 0.0, max: f64::MAX, set: |c, v| c.prefill_busy_steps = Some(v) },
            "The prefill worker is busy if it has more tokens to prefill than this many times its step_tokens_max. Absent: never.",
        ),
        at_start(
            "prefill_bypass_decode_share",
            "",
            Absent("0.8"),
            Number { min: 0.0, max: 1.0, set: |c, v| c.decode_busy_share = Some(v) },
            "A decode worker with more active blocks than this share of its memory does no prefill. Absent: no limit.",
        ),
    ],
};

/// The room of a store below the device.
const fn room(name: &'static str, set: fn(&mut EnginesDraft, u64), doc: &'static str) -> Field<EnginesDraft> {
    let max = limits::SIMULATED_KV_TOKENS_MAX;
    at_start(name, "tokens", Absent("1000000"), Integer { min: 1, max, set }, doc)
}

/// A bandwidth.
const fn bandwidth(name: &'static str, set: fn(&mut EnginesDraft, f64), doc: &'static str) -> Field<EnginesDraft> {
    at_start(name, "GB/s", Absent("50"), Number { min: 1e-3, max: BANDWIDTH_GB_S_MAX, set }, doc)
}

/// A constant of the time of an engine's steps.
const fn constant(
    name: &'static str,
    unit: &'static str,
    example: &'static str,
    set: fn(&mut EnginesDraft, f64),
    doc: &'static str,
) -> Field<EnginesDraft> {
    at_start(name, unit, Absent(example), Number { min: 0.0, max: CONSTANT_MAX, set }, doc)
}

pub(in crate::config) static ENGINES: Section<EnginesDraft> = Section {
    name: "engines",
    repeated: true,
    doc: "Engines that are alike. The workers of the fleet are numbered from 0 through all groups, in their order.",
    fields: &[
        at_start(
            "count",
            "",
            Value("1"),
            Integer { min: 1, max: limits::SIMULATED_ENGINES_MAX as u64, set: |c, v| c.count = v as usize },
            "Engines of the group.",
        ),
        at_start(
            "role",
            "",
            Value("both"),
            Choice { names: &ROLE_NAMES, set: |c, at| c.role = ROLES[at] },
            "both: they run whole requests. prefill, decode: they are one of the two pools through which each request passes.",
        ),
        at_start(
            "preset",
            "",
            Absent("70b-tp4"),
            Choice { names: &ENGINE_PRESET_NAMES, set: |c, at| c.preset = Some(&ENGINE_PRESETS[at]) },
            "A model on some H100, split over the tp GPUs of the name. Absent: every constant below must be set.",
        ),
        at_start(
            "class",
            "",
            Absent("h100"),
            Text { bytes_min: 1, bytes_max: limits::NAME_BYTES_MAX, set: |c, v| c.class = Some(v.to_owned()) },
            "Routers learn one set of constants for all engines of a class. Absent: the preset's name, or one of the group's own.",
        ),
        room(
            "kv_tokens",
            |c, v| c.kv_tokens = Some(v),
            "Tokens that the KV memory holds. Absent: those of the preset.",
        ),
        at_start(
            "kv_token_bytes",
            "bytes",
            Absent("327680"),
            Integer { min: 1, max: 1 << 30, set: |c, v| c.kv_token_bytes = Some(v as u32) },
            "The KV of one token, which bandwidths depend on. Absent: that of the preset.",
        ),
        at_start(
            "step_tokens_max",
            "tokens",
            Value("8192"),
            Integer { min: 1, max: limits::SIMULATED_STEP_TOKENS_MAX, set: |c, v| c.step_tokens_max = v as u32 },
            "Tokens of one step, one for each decoding request among them.",
        ),
        at_start(
            "sequences_max",
            "",
            Value("256"),
            Integer { min: 1, max: 1 << 20, set: |c, v| c.sequences_max = v as u32 },
            "Requests of one batch.",
        ),
        constant("base_ms", "milliseconds", "6.9", |c, v| c.constants[0] = Some(v), "A step that computes prompts."),
        constant("token_us", "microseconds", "60.5", |c, v| c.constants[1] = Some(v), "Each token of a prompt."),
        constant(
            "attention_ns",
            "nanoseconds",
            "0.99",
            |c, v| c.constants[2] = Some(v),
            "Each pair of a token to compute and a token before it.",
        ),
        constant("step_ms", "milliseconds", "15.2", |c, v| c.constants[3] = Some(v), "A step that only decodes."),
        constant(
            "request_us",
            "microseconds",
            "33.2",
            |c, v| c.constants[4] = Some(v),
            "Each decoding request of a step.",
        ),
        constant(
            "kv_token_ns",
            "nanoseconds",
            "26.6",
            |c, v| c.constants[5] = Some(v),
            "Each token in the KV memory of the decoding requests of a step.",
        ),
        room(
            "host_tokens",
            |c, v| c.stores[0].tokens = Some(v),
            "Tokens whose KV host memory holds, after the device.",
        ),
        bandwidth("host_gb_s", |c, v| c.stores[0].gb_s = Some(v), "From host memory to the device."),
        room("disk_tokens", |c, v| c.stores[1].tokens = Some(v), "Tokens whose KV a disk holds, after the host."),
        bandwidth("disk_gb_s", |c, v| c.stores[1].gb_s = Some(v), "From the disk to the device."),
        room("external_tokens", |c, v| c.stores[2].tokens = Some(v), "Tokens whose KV an external store holds, last."),
        bandwidth("external_gb_s", |c, v| c.stores[2].gb_s = Some(v), "From the external store to the device."),
        bandwidth(
            "receive_gb_s",
            |c, v| c.receive_gb_s = Some(v),
            "Of engines that decode: from the engine that prefilled a prompt. The link carries one prompt after the other.\n\
             Absent: 50, one link of 400 Gb/s.",
        ),
    ],
};

pub(in crate::config) static CHANGE: Section<FleetChangeDraft> = Section {
    name: "change",
    repeated: true,
    doc: "What happens to a worker.",
    fields: &[
        at_start(
            "at_s",
            "seconds",
            Required("60"),
            Number { min: 0.0, max: TIME_S_MAX, set: |c, v| c.at_s = v },
            "When, from the beginning.",
        ),
        at_start(
            "worker",
            "",
            Required("0"),
            Integer { min: 0, max: limits::SIMULATED_ENGINES_MAX as u64 - 1, set: |c, v| c.worker = v as usize },
            "The worker, from 0.",
        ),
        at_start(
            "what",
            "",
            Required("dies"),
            Choice { names: &CHANGE_NAMES, set: |c, at| c.what = CHANGES[at] },
            "dies: it loses its cache, and its requests begin again elsewhere. joins: it is there from now on, with an empty cache.\n\
             slows: its steps take factor times as long from now on.",
        ),
        at_start(
            "factor",
            "",
            Absent("2"),
            Number { min: 1e-3, max: 1e3, set: |c, v| c.factor = Some(v) },
            "Of a worker that slows: how many times as long its steps take. 1: it is as fast as at first again.",
        ),
    ],
};
