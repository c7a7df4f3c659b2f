//! The tables that say who there is: spaces and workers.

use super::{at_start, live};
use crate::config::field::{Kind, Preset, Section};
use crate::config::values;
use crate::config::{FullReports, Salts, SpaceConfig};
use crate::endpoint::Endpoint;
use crate::fleet::{DeviceClass, PoolRole};
use crate::ids::Window;
use crate::limits;

use Kind::{Choice, Flag, Integer, List, Number, Parsed, Text};
use Preset::{Absent, Required, Value};

const ROLES: [PoolRole; 3] = [PoolRole::Both, PoolRole::Prefill, PoolRole::Decode];
const ROLE_NAMES: [&str; 3] = ["both", "prefill", "decode"];

/// A `[[worker]]` as written, before its space is found and its absent fields are filled in.
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
    pub(in crate::config) load: Option<Endpoint>,
    pub(in crate::config) capacity_blocks: u64,
    pub(in crate::config) blocks_max: u64,
    pub(in crate::config) batched_tokens_max: u64,
    pub(in crate::config) prefill_base_us: Option<u64>,
    pub(in crate::config) prefill_token_ns: Option<u64>,
    pub(in crate::config) prefill_cached_token_ns: Option<u64>,
    pub(in crate::config) device: DeviceClass,
    pub(in crate::config) weight: Option<f64>,
    pub(in crate::config) taints: Vec<String>,
    pub(in crate::config) loras: Vec<String>,
    pub(in crate::config) draining: bool,
}

pub(in crate::config) static SPACE: Section<SpaceConfig> = Section {
    name: "space",
    repeated: true,
    doc: "Prompts and blocks that may be compared: one model, namespace and pool. At least one. What differs from\n\
          # [policy] for one space stands below it, under [space.policy].",
    fields: &[
        at_start(
            "model",
            "",
            Required("example-model"),
            Text { bytes_min: 1, bytes_max: limits::NAME_BYTES_MAX, set: |c, v| c.model = v.to_owned() },
            "The model's name, exactly as gateways say it.",
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
            "The pool's part of a request, for gateways. Decisions heed only decode, where prefill is not tracked.",
        ),
        at_start(
            "block_size",
            "tokens",
            Value("0"),
            Integer { min: 0, max: limits::BLOCK_SIZE_TOKENS_MAX as u64, set: |c, v| c.block_size = v as u32 },
            "Tokens per KV block, as the engines are started. 0: learnt from the first events; until then load decides.",
        ),
        at_start(
            "window",
            "",
            Value("plain"),
            Choice { names: &["plain", "bigram"], set: |c, at| c.window = [Window::Plain, Window::Bigram][at] },
            "How the tokens of consecutive blocks lie; bigram for engines with EAGLE drafting.",
        ),
        at_start(
            "salts",
            "",
            Value("possible"),
            Choice { names: &["possible", "none"], set: |c, at| c.salts = [Salts::Possible, Salts::None][at] },
            "Whether prompts may carry cache salts. none: engines whose events cannot tell are believed in full.",
        ),
        at_start(
            "full_reports",
            "",
            Value("possible"),
            Choice {
                names: &["possible", "none"],
                set: |c, at| c.full_reports = [FullReports::Possible, FullReports::None][at],
            },
            "Whether a caller can send vLLM kv_cache_report_mode=full. none: second copies of a prefix are counted, not doubted.",
        ),
        at_start(
            "memory_bytes_max",
            "bytes",
            Value("0"),
            Integer { min: 0, max: limits::SPACE_MEMORY_BYTES_CEILING, set: |c, v| c.memory_bytes_max = v },
            "Memory of its index, each shard an equal part. Beyond it new blocks are refused, which lowers trust. 0: no ceiling.",
        ),
        at_start(
            "approximate",
            "",
            Value("false"),
            Flag { set: |c, v| c.approximate = v },
            "Guess what workers without events hold from the prompts booked on them. Needs block_size. false: load decides.",
        ),
        at_start(
            "approximate_ttl_s",
            "s",
            Value("120"),
            Integer { min: 1, max: limits::PREDICTED_TTL_S_CEILING, set: |c, v| c.approximate_ttl_s = v },
            "A guessed block is forgotten when it was not booked again for this long. Longer: more hits, and more wrong ones.",
        ),
        at_start(
            "approximate_blocks_max",
            "blocks",
            Value("32768"),
            Integer { min: 1, max: limits::WORKER_BLOCKS_CEILING, set: |c, v| c.approximate_blocks_max = v },
            "Blocks guessed for a worker without capacity_blocks. Beyond it those booked least recently are forgotten.",
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
            "Memory of the guesses: a block takes about 100 bytes. Beyond it those booked least recently are forgotten.",
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
            "The engine's number, as replies name it. Beyond 2^63-1 it is written in quotes.",
        ),
        live(
            "dp_rank",
            "",
            Value("0"),
            Integer { min: 0, max: u32::MAX as u64 - 1, set: |c, v| c.dp_rank = v as u32 },
            "Its data-parallel rank. Every rank is a worker of its own, with its own endpoint.",
        ),
        live(
            "ranks",
            "",
            Value("1"),
            Integer { min: 1, max: limits::WORKERS_MAX as u64, set: |c, v| c.ranks = v as u32 },
            "So many workers at once: the ranks from dp_rank on, the ports of endpoint, replay and load counting up with them.",
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
            "In place of endpoint, replay, topic, load and ranks: the engine's HTTP server, which is asked (SGLang: GET /server_info, vLLM: GET /kv_event_sources).",
        ),
        live(
            "model",
            "",
            Absent("example-model"),
            Text { bytes_min: 1, bytes_max: limits::NAME_BYTES_MAX, set: |c, v| c.model = Some(v.to_owned()) },
            "The model of the space it serves. May be absent where there is one space.",
        ),
        live(
            "namespace",
            "",
            Absent(""),
            Text { bytes_min: 0, bytes_max: limits::NAME_BYTES_MAX, set: |c, v| c.namespace = Some(v.to_owned()) },
            "The namespace of its space. May be absent where the model is in one namespace.",
        ),
        live(
            "role",
            "",
            Absent("both"),
            Choice { names: &ROLE_NAMES, set: |c, at| c.role = Some(ROLES[at]) },
            "The role of its space. May be absent where the model has one pool.",
        ),
        live(
            "name",
            "",
            Absent("w1"),
            Text { bytes_min: 1, bytes_max: limits::NAME_BYTES_MAX, set: |c, v| c.name = Some(v.to_owned()) },
            "A short name for people. Absent: `w<id>`, or `w<id>.<dp_rank>` where the rank is not 0.",
        ),
        live(
            "endpoint",
            "",
            Absent("tcp://127.0.0.1:5557"),
            Parsed {
                what: "a string: tcp://host:port or ipc://path",
                set: |c, text| {
                    c.endpoint = Some(values::endpoint(text)?);
                    Ok(())
                },
            },
            "Where it publishes KV events. Absent: it publishes none, and is routed to by load alone.",
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
            "Where it replays lost events. Absent: a gap or a broken connection empties what is known of the worker.",
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
            "Subscription prefix. Empty: everything it publishes.",
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
            "Where it says how busy it is, as SGLang does with --load-publish-endpoint. Absent: bookings alone tell.",
        ),
        live(
            "capacity_blocks",
            "blocks",
            Value("0"),
            Integer { min: 0, max: limits::WORKER_BLOCKS_CEILING, set: |c, v| c.capacity_blocks = v },
            "KV blocks its device holds. More than that announced as held is not believed. 0: not known.",
        ),
        live(
            "blocks_max",
            "blocks",
            Value("16777216"),
            Integer { min: 1, max: limits::WORKER_BLOCKS_CEILING, set: |c, v| c.blocks_max = v },
            "Blocks remembered of it over all tiers. Beyond it, or beyond 64 bytes of memory for each (1 GiB at least), blocks are refused, which lowers trust.",
        ),
        live(
            "batched_tokens_max",
            "tokens",
            Value("8192"),
            Integer { min: 1, max: limits::BATCHED_TOKENS_CEILING, set: |c, v| c.batched_tokens_max = v },
            "Tokens it batches in one step: what busy_prefill_steps in [policy] is counted in.",
        ),
        live(
            "prefill_base_us",
            "microseconds",
            Absent("5000"),
            Integer { min: 0, max: limits::PREFILL_NS_CEILING / 1000, set: |c, v| c.prefill_base_us = Some(v) },
            "What every prefill takes on it, with `prefill_model = \"fixed\"` in [booking]. Absent: as said there.",
        ),
        live(
            "prefill_token_ns",
            "nanoseconds",
            Absent("50000"),
            Integer { min: 0, max: limits::PREFILL_NS_CEILING, set: |c, v| c.prefill_token_ns = Some(v) },
            "What a token that is not cached adds on it, likewise.",
        ),
        live(
            "prefill_cached_token_ns",
            "nanoseconds",
            Absent("0"),
            Integer { min: 0, max: limits::PREFILL_NS_CEILING, set: |c, v| c.prefill_cached_token_ns = Some(v) },
            "What a cached token adds on it, likewise.",
        ),
        live(
            "device",
            "",
            Value("gpu"),
            Choice { names: &["gpu", "cpu"], set: |c, at| c.device = [DeviceClass::Gpu, DeviceClass::Cpu][at] },
            "What it computes on. Mode device-aware-weighted fills one kind before the other.",
        ),
        live(
            "weight",
            "",
            Absent("8.0"),
            Number { min: 0.001, max: 1e6, set: |c, v| c.weight = Some(v) },
            "Its throughput, which mode device-aware-weighted and `capability` in [policy] go by. Absent: 8 for gpu, 1 for cpu.",
        ),
        live(
            "taints",
            "",
            Value(""),
            List { items_max: limits::TAINTS_MAX, bytes_max: limits::NAME_BYTES_MAX, set: |c, v| c.taints = v },
            "Labels of it, which requests may require or prefer.",
        ),
        live(
            "loras",
            "",
            Value(""),
            List { items_max: limits::LORAS_MAX, bytes_max: limits::NAME_BYTES_MAX, set: |c, v| c.loras = v },
            "LoRA adapters it has loaded. A prompt with an adapter goes to workers that name it, if there are any.",
        ),
        live(
            "draining",
            "",
            Value("false"),
            Flag { set: |c, v| c.draining = v },
            "Take no new requests from the start.",
        ),
    ],
};
