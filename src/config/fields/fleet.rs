//! The tables of the fleet: spaces and workers.

use super::{at_start, live};
use crate::config::field::{Kind, Preset, Section};
use crate::config::values;
use crate::config::{FullReports, Salts, SpaceConfig};
use crate::endpoint::Endpoint;
use crate::engine_law::{ENGINE_PRESET_NAMES, ENGINE_PRESETS, EnginePreset};
use crate::fleet::{DeviceClass, PoolRole};
use crate::ids::{SnapshotProposal, Window};
use crate::limits;

use Kind::{Choice, Flag, Integer, List, Number, Parsed, Text};
use Preset::{Absent, Required, Value};

pub(super) const ROLES: [PoolRole; 3] = [PoolRole::Both, PoolRole::Prefill, PoolRole::Decode];
pub(super) const ROLE_NAMES: [&str; 3] = ["both", "prefill", "decode"];

const SNAPSHOTS: [Option<SnapshotProposal>; 3] =
    [None, Some(SnapshotProposal::Vllm57789), Some(SnapshotProposal::Sglang34407)];
const SNAPSHOT_NAMES: [&str; 3] = ["off", "vllm-57789", "sglang-34407"];

/// A `[[worker]]` as written, before the check finds its space and fills in absent fields.
#[derive(Clone, Debug, Default, PartialEq)]
pub(in crate::config) struct WorkerDraft {
    pub(in crate::config) id: u64,
    pub(in crate::config) dp_rank: u32,
    pub(in crate::config) ranks: u32,
    pub(in crate::config) url: Option<String>,
    pub(in crate::config) model: Option<String>,
    pub(in crate::config) namespace: Option<String>,
    pub(in crate::config) role: Option<PoolRole>,
    pub(in crate::config) name: Option<String>,
    pub(in crate::config) endpoint: Option<Endpoint>,
    pub(in crate::config) replay: Option<Endpoint>,
    pub(in crate::config) topic: String,
    pub(in crate::config) engine_snapshots: Option<SnapshotProposal>,
    pub(in crate::config) snapshot_endpoint: Option<Endpoint>,
    pub(in crate::config) load: Option<Endpoint>,
    pub(in crate::config) capacity_blocks: u64,
    pub(in crate::config) blocks_max: u64,
    pub(in crate::config) batched_tokens_max: u64,
    pub(in crate::config) prefill_base_us: Option<u64>,
    pub(in crate::config) prefill_token_ns: Option<u64>,
    pub(in crate::config) prefill_cached_token_ns: Option<u64>,
    pub(in crate::config) engine_class: Option<String>,
    pub(in crate::config) engine_preset: Option<&'static EnginePreset>,
    pub(in crate::config) device: DeviceClass,
    pub(in crate::config) weight: Option<f64>,
    pub(in crate::config) taints: Vec<String>,
    pub(in crate::config) loras: Vec<String>,
    pub(in crate::config) draining: bool,
}

pub(in crate::config) static SPACE: Section<SpaceConfig> = Section {
    name: "space",
    repeated: true,
    doc: "The workers whose blocks may be compared: one model, one namespace, one role. At least one. [space.policy] below a space\n\
          overrides fields of [policy] for it.",
    fields: &[
        at_start(
            "model",
            "",
            Required("example-model"),
            Text { bytes_min: 1, bytes_max: limits::NAME_BYTES_MAX, set: |c, v| c.model = v.to_owned() },
            "The model's name, exactly as gateways send it.",
        ),
        at_start(
            "namespace",
            "",
            Value(""),
            Text { bytes_min: 0, bytes_max: limits::NAME_BYTES_MAX, set: |c, v| c.namespace = v.to_owned() },
            "Separates spaces of one model. Empty: the default namespace.",
        ),
        at_start(
            "role",
            "",
            Value("both"),
            Choice { names: &ROLE_NAMES, set: |c, at| c.role = ROLES[at] },
            "Which part of a request the workers run. Gateways read it. Decisions use only decode: without a prefill term.",
        ),
        at_start(
            "block_size",
            "tokens",
            Value("0"),
            Integer { min: 0, max: limits::BLOCK_SIZE_TOKENS_MAX as u64, set: |c, v| c.block_size = v as u32 },
            "Tokens in a KV block, as set for the engines. 0: learnt from the first events; until then decisions are by load alone.",
        ),
        at_start(
            "window",
            "",
            Value("plain"),
            Choice { names: &["plain", "bigram"], set: |c, at| c.window = [Window::Plain, Window::Bigram][at] },
            "How the tokens of consecutive blocks relate. plain: no overlap; bigram: one shared token, for engines with EAGLE drafting.",
        ),
        at_start(
            "salts",
            "",
            Value("possible"),
            Choice { names: &["possible", "none"], set: |c, at| c.salts = [Salts::Possible, Salts::None][at] },
            "Whether prompts may carry cache salts. none: engines whose events do not show salts can be `exact`.",
        ),
        at_start(
            "full_reports",
            "",
            Value("possible"),
            Choice {
                names: &["possible", "none"],
                set: |c, at| c.full_reports = [FullReports::Possible, FullReports::None][at],
            },
            "Whether a caller can send vLLM kv_cache_report_mode=full. none: a prefix announced again counts as a second copy and costs no\n\
             trust.",
        ),
        at_start(
            "memory_bytes_max",
            "bytes",
            Value("0"),
            Integer { min: 0, max: limits::SPACE_MEMORY_BYTES_CEILING, set: |c, v| c.memory_bytes_max = v },
            "Memory limit of the space's index; each shard gets an equal part. Beyond it new blocks are refused, which lowers trust. 0: no\n\
             limit.",
        ),
        at_start(
            "approximate",
            "",
            Value("false"),
            Flag { set: |c, v| c.approximate = v },
            "Predict the blocks of workers without events from the prompts booked on them. Needs block_size. false: by load alone.",
        ),
        at_start(
            "approximate_ttl_s",
            "s",
            Value("120"),
            Integer { min: 1, max: limits::PREDICTED_TTL_S_CEILING, set: |c, v| c.approximate_ttl_s = v },
            "A predicted block is forgotten if no prompt books it again for this long. Longer: more hits, and more wrong predictions.",
        ),
        at_start(
            "approximate_blocks_max",
            "blocks",
            Value("32768"),
            Integer { min: 1, max: limits::WORKER_BLOCKS_CEILING, set: |c, v| c.approximate_blocks_max = v },
            "Predicted blocks for a worker without capacity_blocks. Beyond it the least recently booked are forgotten.",
        ),
        at_start(
            "approximate_memory_bytes_max",
            "bytes",
            Value("268435456"),
            Integer {
                min: limits::PREDICTED_MEMORY_BYTES_MIN,
                max: limits::SPACE_MEMORY_BYTES_CEILING,
                set: |c, v| c.approximate_memory_bytes_max = v,
            },
            "Memory limit of the predictions. A block takes about 100 bytes. Beyond it the least recently booked blocks are forgotten.",
        ),
    ],
};

pub(in crate::config) static WORKER: Section<WorkerDraft> = Section {
    name: "worker",
    repeated: true,
    doc: "One data-parallel rank of an engine, or several.",
    fields: &[
        live(
            "id",
            "",
            Required("1"),
            Integer { min: 0, max: u64::MAX, set: |c, v| c.id = v },
            "The engine's number, as replies name it. Write numbers above 2^63-1 in quotes.",
        ),
        live(
            "dp_rank",
            "",
            Value("0"),
            Integer { min: 0, max: u32::MAX as u64 - 1, set: |c, v| c.dp_rank = v as u32 },
            "The data-parallel rank. Every rank is a worker of its own, with an endpoint of its own.",
        ),
        live(
            "ranks",
            "",
            Value("1"),
            Integer { min: 1, max: limits::WORKERS_MAX as u64, set: |c, v| c.ranks = v as u32 },
            "The number of workers that this record names: the ranks from dp_rank on. The ports of endpoint, replay, snapshot_endpoint and\n\
             load count up with the rank.",
        ),
        live(
            "url",
            "",
            Absent("http://127.0.0.1:30000"),
            Parsed {
                what: "a string: http://host:port",
                set: |c, text| {
                    c.url = Some(values::url(text)?);
                    Ok(())
                },
            },
            "The engine's HTTP server, instead of endpoint, replay, topic, load and ranks: the daemon asks it for them\n\
             (SGLang: GET /server_info, vLLM: GET /kv_event_sources).",
        ),
        live(
            "model",
            "",
            Absent("example-model"),
            Text { bytes_min: 1, bytes_max: limits::NAME_BYTES_MAX, set: |c, v| c.model = Some(v.to_owned()) },
            "The model of the worker's space. Optional if there is one space.",
        ),
        live(
            "namespace",
            "",
            Absent(""),
            Text { bytes_min: 0, bytes_max: limits::NAME_BYTES_MAX, set: |c, v| c.namespace = Some(v.to_owned()) },
            "The namespace of the worker's space. Optional if the model has one namespace.",
        ),
        live(
            "role",
            "",
            Absent("both"),
            Choice { names: &ROLE_NAMES, set: |c, at| c.role = Some(ROLES[at]) },
            "The role of the worker's space. Optional if the model has one role.",
        ),
        live(
            "name",
            "",
            Absent("w1"),
            Text { bytes_min: 1, bytes_max: limits::NAME_BYTES_MAX, set: |c, v| c.name = Some(v.to_owned()) },
            "A short name for people. Absent: `w<id>`, or `w<id>.<dp_rank>` if the rank is not 0.",
        ),
        live(
            "endpoint",
            "",
            Absent("tcp://127.0.0.1:5557"),
            Parsed {
                what: "a string: tcp://host:port, ipc://path, nats://host:port or tls://host:port",
                set: |c, text| {
                    c.endpoint = Some(values::publisher(text)?);
                    Ok(())
                },
            },
            "Where the engine publishes KV events, or the NATS server where its relay stores them, in a daemon built with the feature\n\
             `nats`; tls:// needs nats_ca_file in [ingest]. Absent: it publishes none and gets requests by load alone.",
        ),
        live(
            "replay",
            "",
            Absent("tcp://127.0.0.1:5657"),
            Parsed {
                what: "a string: tcp://host:port or ipc://path",
                set: |c, text| {
                    c.replay = Some(values::endpoint(text)?);
                    Ok(())
                },
            },
            "Where the engine replays lost events. Absent: after a gap or a broken connection the daemon drops the worker's blocks.",
        ),
        live(
            "topic",
            "",
            Value(""),
            Parsed {
                what: "a string of at most 256 bytes without control characters",
                set: |c, text| {
                    values::check_topic(text)?;
                    text.clone_into(&mut c.topic);
                    Ok(())
                },
            },
            "Prefix of the subscription. Empty: everything the engine publishes.",
        ),
        live(
            "engine_snapshots",
            "",
            Value("off"),
            Choice { names: &SNAPSHOT_NAMES, set: |c, at| c.engine_snapshots = SNAPSHOTS[at] },
            "Experimental. Whether the daemon asks the engine for a snapshot of its blocks when lost events cannot be replayed. The values\n\
             name open proposals, which no release has: pull requests 57789 of vLLM and 34407 of SGLang.",
        ),
        live(
            "snapshot_endpoint",
            "",
            Absent("tcp://127.0.0.1:5857"),
            Parsed {
                what: "a string: tcp://host:port or ipc://path",
                set: |c, text| {
                    c.snapshot_endpoint = Some(values::endpoint(text)?);
                    Ok(())
                },
            },
            "Where the engine sends snapshots of its blocks, with engine_snapshots.",
        ),
        live(
            "load",
            "",
            Absent("tcp://127.0.0.1:5757"),
            Parsed {
                what: "a string: tcp://host:port or ipc://path",
                set: |c, text| {
                    c.load = Some(values::endpoint(text)?);
                    Ok(())
                },
            },
            "Where the engine reports its load, as SGLang does with --load-publish-endpoint. Absent: bookings alone count.",
        ),
        live(
            "capacity_blocks",
            "blocks",
            Value("0"),
            Integer { min: 0, max: limits::WORKER_BLOCKS_CEILING, set: |c, v| c.capacity_blocks = v },
            "KV blocks in the worker's device memory. The daemon does not believe an engine that announces more as held. 0: not known.",
        ),
        live(
            "blocks_max",
            "blocks",
            Value("16777216"),
            Integer { min: 1, max: limits::WORKER_BLOCKS_CEILING, set: |c, v| c.blocks_max = v },
            "Blocks that the daemon remembers for the worker, over all tiers. It refuses further blocks, and blocks beyond 64 bytes of\n\
             memory for each (at least 1 GiB), which lowers trust.",
        ),
        live(
            "batched_tokens_max",
            "tokens",
            Value("8192"),
            Integer { min: 1, max: limits::BATCHED_TOKENS_CEILING, set: |c, v| c.batched_tokens_max = v },
            "Tokens that the worker batches in one step. busy_prefill_steps in [policy] counts in these.",
        ),
        live(
            "prefill_base_us",
            "microseconds",
            Absent("5000"),
            Integer { min: 0, max: limits::PREFILL_NS_CEILING / 1000, set: |c, v| c.prefill_base_us = Some(v) },
            "This worker's time for each prefill, with prefill_model = \"fixed\" in [booking]. Absent: the value in [booking].",
        ),
        live(
            "prefill_token_ns",
            "nanoseconds",
            Absent("50000"),
            Integer { min: 0, max: limits::PREFILL_NS_CEILING, set: |c, v| c.prefill_token_ns = Some(v) },
            "This worker's time for each token that is not cached, likewise.",
        ),
        live(
            "prefill_cached_token_ns",
            "nanoseconds",
            Absent("0"),
            Integer { min: 0, max: limits::PREFILL_NS_CEILING, set: |c, v| c.prefill_cached_token_ns = Some(v) },
            "This worker's time for each cached token, likewise.",
        ),
        live(
            "engine_class",
            "",
            Absent("llama-70b/h100/tp4"),
            Text { bytes_min: 1, bytes_max: limits::NAME_BYTES_MAX, set: |c, v| c.engine_class = Some(v.to_owned()) },
            "Workers of one class are alike: same model, device and parallelism. The daemon learns how long prefills take for each class,\n\
             and how much slower or faster each worker is. Absent: the space's workers of one kind of device are a class.",
        ),
        live(
            "engine_preset",
            "",
            Absent("70b-tp4"),
            Choice { names: &ENGINE_PRESET_NAMES, set: |c, at| c.engine_preset = Some(&ENGINE_PRESETS[at]) },
            "What the daemon believes of the class's prefill times before it has learnt them: a size of model and a number of H100.\n\
             Absent: no more than the usual ratios.",
        ),
        live(
            "device",
            "",
            Value("gpu"),
            Choice { names: &["gpu", "cpu"], set: |c, at| c.device = [DeviceClass::Gpu, DeviceClass::Cpu][at] },
            "The kind of device. Mode device-aware-weighted fills one kind before the other.",
        ),
        live(
            "weight",
            "",
            Absent("8.0"),
            Number { min: 0.001, max: 1e6, set: |c, v| c.weight = Some(v) },
            "The worker's throughput, for mode device-aware-weighted and for `capability` in [policy]. Absent: 8 for gpu, 1 for cpu.",
        ),
        live(
            "taints",
            "",
            Value(""),
            List { items_max: limits::TAINTS_MAX, bytes_max: limits::NAME_BYTES_MAX, set: |c, v| c.taints = v },
            "Labels that requests may require or prefer.",
        ),
        live(
            "loras",
            "",
            Value(""),
            List { items_max: limits::LORAS_MAX, bytes_max: limits::NAME_BYTES_MAX, set: |c, v| c.loras = v },
            "LoRA adapters that the worker has loaded. A prompt with an adapter goes to workers that list it, if there are any.",
        ),
        live(
            "draining",
            "",
            Value("false"),
            Flag { set: |c, v| c.draining = v },
            "Take no new requests, from the start.",
        ),
    ],
};

/// The name of a proposal for snapshots of engines, as `engine_snapshots` has it.
pub(in crate::config) fn snapshot_name(proposal: SnapshotProposal) -> &'static str {
    let at = SNAPSHOTS.iter().position(|known| *known == Some(proposal)).unwrap_or(0);
    SNAPSHOT_NAMES[at]
}
