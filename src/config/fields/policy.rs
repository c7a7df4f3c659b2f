//! The table that says how workers are chosen.

use super::live;
use crate::config::PolicyConfig;
use crate::config::field::{Kind, Preset, Section};
use crate::limits;
use crate::queue::Discipline;
use crate::route::{AffinityMode, Bypass, Mode};
use crate::trust::TrustLevel;

use Kind::{Choice, Flag, Integer, Number};
use Preset::{Absent, Value};

const TRUST: [TrustLevel; 5] =
    [TrustLevel::None, TrustLevel::Predicted, TrustLevel::Unproven, TrustLevel::LowerBound, TrustLevel::Exact];
const TRUST_NAMES: [&str; 5] = ["none", "predicted", "unproven", "lower_bound", "exact"];

pub(in crate::config) static POLICY: Section<PolicyConfig> = Section {
    name: "policy",
    repeated: false,
    doc: "How workers are chosen, in every space unless its [space.policy] says otherwise. Costs are in blocks; the lowest wins.",
    fields: &[
        live(
            "mode",
            "",
            Value("kv"),
            Choice { names: &Mode::NAMES, set: |c, at| c.weights.mode = Mode::ALL[at] },
            "kv: by what would have to be computed and what a worker is busy with. The others: docs/policy.md, \"Modes\".",
        ),
        live(
            "device_credit",
            "",
            Value("1.0"),
            Number { min: 0.0, max: f64::MAX, set: |c, v| c.weights.device_credit = v },
            "Credit per block held in device memory. 0: route by load alone.",
        ),
        live(
            "credit_decay",
            "",
            Value("0.0"),
            Number { min: 0.0, max: f64::MAX, set: |c, v| c.weights.credit_decay = v },
            "How fast a prefill backlog above the least loaded worker's lessens the device credit. 0: not at all.",
        ),
        live(
            "prefill_load_scale",
            "",
            Value("1.0"),
            Number { min: 0.0, max: f64::MAX, set: |c, v| c.weights.prefill_load_scale = v },
            "Weight of prefill against decode. Higher: shorter time to the first token, less even decode.",
        ),
        live(
            "active_request_weight",
            "blocks",
            Value("0.0"),
            Number { min: 0.0, max: f64::MAX, set: |c, v| c.weights.active_request_weight = v },
            "Cost per request a worker is busy with. Above 0 spreads many short requests.",
        ),
        live(
            "host_hit_weight",
            "",
            Value("0.75"),
            Number { min: 0.0, max: 1.0, set: |c, v| c.weights.host_hit_weight = v },
            "Credit per block held in host memory.",
        ),
        live(
            "disk_hit_weight",
            "",
            Value("0.25"),
            Number { min: 0.0, max: 1.0, set: |c, v| c.weights.disk_hit_weight = v },
            "Credit per block held on disk or in an external store.",
        ),
        live(
            "shared_multiplier",
            "",
            Value("0.0"),
            Number { min: 0.0, max: 1.0, set: |c, v| c.weights.shared_multiplier = v },
            "Credit per block that a request says a cache shared by all workers holds, beyond those in device memory.",
        ),
        live(
            "temperature",
            "",
            Value("0.0"),
            Number { min: 0.0, max: f64::MAX, set: |c, v| c.weights.temperature = v },
            "Chance in kv, load-aware, approximate and lmetric. 0: the lowest cost. 1: the highest is still drawn 0.37 times as often.",
        ),
        restart!(
            policy.seed,
            "",
            Value("0"),
            Integer { min: 0, max: u64::MAX, set: |c, v| c.seed = v },
            "Seed of everything drawn by chance, for repeatable runs. 0: drawn at the start. Only in [policy] itself.",
        ),
        live(
            "track_prefill_tokens",
            "",
            Value("true"),
            Flag { set: |c, v| c.weights.track_prefill_tokens = v },
            "Count prefill: what a worker is busy with and what this prompt adds. false: no prefill term.",
        ),
        live(
            "track_active_blocks",
            "",
            Value("true"),
            Flag { set: |c, v| c.weights.track_active_blocks = v },
            "Count decode blocks: what a worker is busy with and what this prompt adds. false: no decode term.",
        ),
        live(
            "assume_kv_reuse",
            "",
            Value("true"),
            Flag { set: |c, v| c.weights.assume_kv_reuse = v },
            "Take requests in flight with a common prefix to share its blocks. false: each is counted in full.",
        ),
        live(
            "capability",
            "",
            Value("false"),
            Flag { set: |c, v| c.weights.capability = v },
            "Divide the cost by the worker's weight, so that a stronger worker is given more.",
        ),
        live(
            "trust_min",
            "",
            Value("none"),
            Choice { names: &TRUST_NAMES, set: |c, at| c.weights.trust_min = TRUST[at] },
            "Workers whose cache is believed less are out of the running. none: nobody is, for that.",
        ),
        live(
            "credit_trust_min",
            "",
            Value("none"),
            Choice { names: &TRUST_NAMES, set: |c, at| c.weights.credit_trust_min = TRUST[at] },
            "What workers that are believed less hold is not counted. none: all of it is.",
        ),
        live(
            "busy_decode_blocks_share",
            "",
            Absent("0.9"),
            Number { min: 0.0, max: 1.0, set: |c, v| c.weights.busy.decode_blocks_share = Some(v) },
            "A worker with more active decode blocks than this share of its capacity_blocks takes no requests. Absent: no bound.",
        ),
        live(
            "busy_prefill_tokens",
            "tokens",
            Absent("65536"),
            Integer {
                min: 0,
                max: limits::BATCHED_TOKENS_CEILING,
                set: |c, v| c.weights.busy.prefill_tokens = Some(v),
            },
            "A worker with more tokens to prefill takes no requests. Absent: no bound.",
        ),
        live(
            "busy_prefill_steps",
            "",
            Absent("2.0"),
            Number { min: 0.0, max: f64::MAX, set: |c, v| c.weights.busy.prefill_steps = Some(v) },
            "A worker with more tokens to prefill than so many times its batched_tokens_max takes no requests. Absent: no bound.",
        ),
        live(
            "affinity",
            "",
            Value("off"),
            Choice { names: &AffinityMode::NAMES, set: |c, at| c.weights.affinity.mode = AffinityMode::ALL[at] },
            "Whether the requests of a session come to the worker it last booked. soft: it costs less. hard: it is taken while it may be and is not overloaded.",
        ),
        live(
            "affinity_factor",
            "",
            Value("0.5"),
            Number { min: 0.0, max: 1.0, set: |c, v| c.weights.affinity.factor = v },
            "What the cost of a session's worker is multiplied by where affinity is soft. 1: no preference.",
        ),
        live(
            "affinity_load_max",
            "",
            Value("1.25"),
            Number { min: 1.0, max: f64::MAX, set: |c, v| c.weights.affinity.load_max = v },
            "A session leaves a worker that would have more requests in flight than so many times the average of those that may be chosen.",
        ),
        live(
            "affinity_ttl_s",
            "seconds",
            Value("3600"),
            Integer { min: 1, max: limits::AFFINITY_TTL_S_CEILING, set: |c, v| c.weights.affinity.ttl_s = v as u32 },
            "A session that books nothing for this long is bound no more.",
        ),
        restart!(
            policy.affinity_sessions_max,
            "sessions",
            Value("65536"),
            Integer {
                min: 8,
                max: limits::AFFINITY_SESSIONS_CEILING as u64,
                set: |c, v| c.affinity_sessions_max = v as usize,
            },
            "Sessions that can be bound at once, 40 bytes each; beyond it those used least recently are not. Only in [policy] itself.",
        ),
        live(
            "prefill_bypass",
            "",
            Value("off"),
            Choice { names: &Bypass::NAMES, set: |c, at| c.weights.disaggregation.bypass = Bypass::ALL[at] },
            "When a request that asks for a pair is prefilled where it is decoded: if little of it is new there (isl_bounding), if prefill is busy, or either.",
        ),
        live(
            "prefill_bypass_tokens",
            "tokens",
            Value("2048"),
            Integer {
                min: 0,
                max: limits::PROMPT_TOKENS_MAX as u64,
                set: |c, v| c.weights.disaggregation.new_tokens_max = v,
            },
            "Little is fewer new tokens than this, and less than prefill_bypass_share of the prompt.",
        ),
        live(
            "prefill_bypass_share",
            "",
            Value("0.7"),
            Number { min: 0.0, max: 1.0, set: |c, v| c.weights.disaggregation.new_share_max = v },
            "The share of the prompt that goes with prefill_bypass_tokens.",
        ),
        live(
            "prefill_bypass_busy_steps",
            "",
            Absent("4.0"),
            Number { min: 0.0, max: f64::MAX, set: |c, v| c.weights.disaggregation.prefill_busy_steps = Some(v) },
            "Prefill is busy where the worker that would do it has more tokens to prefill than so many times its batched_tokens_max. Absent: never.",
        ),
        live(
            "prefill_bypass_decode_share",
            "",
            Absent("0.8"),
            Number { min: 0.0, max: 1.0, set: |c, v| c.weights.disaggregation.decode_busy_share = Some(v) },
            "Nothing is prefilled on a worker that decodes with more active blocks than this share of its capacity_blocks. Absent: wherever.",
        ),
        live(
            "queue_threshold",
            "",
            Absent("1.0"),
            Number { min: 0.0, max: f64::MAX, set: |c, v| c.weights.queue.threshold = Some(v) },
            "A request that is booked waits while every worker has more tokens to prefill than so many times its batched_tokens_max. Absent: nobody waits.",
        ),
        live(
            "queue_policy",
            "",
            Value("fcfs"),
            Choice { names: &Discipline::NAMES, set: |c, at| c.weights.queue.discipline = Discipline::ALL[at] },
            "Who is first of those that wait with one priority and no deadline: who came first, who came last, or (wspt) who has least to prefill.",
        ),
        live(
            "queue_wait_ms_max",
            "milliseconds",
            Value("30000"),
            Integer { min: 1, max: limits::QUEUE_WAIT_MS_CEILING, set: |c, v| c.weights.queue.wait_ms_max = v },
            "A request that says no deadline waits this long, and is then refused.",
        ),
        restart!(
            policy.queue_requests_max,
            "requests",
            Value("4096"),
            Integer {
                min: 1,
                max: limits::QUEUE_REQUESTS_CEILING as u64,
                set: |c, v| c.queue_requests_max = v as usize,
            },
            "Requests that wait at once; more are refused, with a time to come again. Only in [policy] itself.",
        ),
    ],
};
