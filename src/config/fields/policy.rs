//! The table of the policy: how workers are chosen.

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
    doc: "How workers are chosen, in every space unless its [space.policy] overrides a field. The lowest cost wins.",
    fields: &[
        live(
            "mode",
            "",
            Value("latency"),
            Choice { names: &Mode::NAMES, set: |c, at| c.weights.mode = Mode::ALL[at] },
            "latency: fewest seconds until the first token, and of delay for others; gateways must report first tokens. kv: Dynamo's\n\
             rule, fewest blocks to compute and to decode. All modes: docs/policy.md, \"Modes\".",
        ),
        live(
            "device_credit",
            "",
            Value("1.0"),
            Number { min: 0.0, max: f64::MAX, set: |c, v| c.weights.device_credit = v },
            "Mode kv: credit for each block held in device memory. 0: route by load alone.",
        ),
        live(
            "credit_decay",
            "",
            Value("0.0"),
            Number { min: 0.0, max: f64::MAX, set: |c, v| c.weights.credit_decay = v },
            "Mode kv: how fast the device credit shrinks as a worker's prefill backlog exceeds that of the least loaded worker. 0: not at all.",
        ),
        live(
            "prefill_load_scale",
            "",
            Value("1.0"),
            Number { min: 0.0, max: f64::MAX, set: |c, v| c.weights.prefill_load_scale = v },
            "Mode kv: weight of prefill against decode. Higher: shorter time to the first token, less even decode.",
        ),
        live(
            "delay_weight",
            "",
            Value("0.2"),
            Number { min: 0.0, max: limits::DELAY_WEIGHT_CEILING, set: |c, v| c.weights.delay_weight = v },
            "Mode latency: what a second by which a prefill delays another request of its worker costs, in seconds of the prompt's own\n\
             wait. 0: only the time to the first token counts.",
        ),
        live(
            "later_delay_weight",
            "",
            Value("1.0"),
            Number { min: 0.0, max: limits::DELAY_WEIGHT_CEILING, set: |c, v| c.weights.later_delay_weight = v },
            "Mode latency: what a second by which a prefill delays requests that come later costs. The busier all workers are, the more\n\
             such seconds there are. 0: held blocks count in a busy fleet as much as in an idle one.",
        ),
        live(
            "output_delay_weight",
            "",
            Value("1.0"),
            Number { min: 0.0, max: limits::DELAY_WEIGHT_CEILING, set: |c, v| c.weights.output_delay_weight = v },
            "Mode latency: what a second by which a worker's other prefills delay this request's output costs. 0: outputs do not count.",
        ),
        live(
            "near_cost_s",
            "seconds",
            Value("0.0"),
            Number { min: 0.0, max: 3600.0, set: |c, v| c.weights.near_cost_s = v },
            "Mode latency: costs up to this much above the lowest count as equal, if the first token comes about as early. Among such\n\
             workers each daemon has an order of its own, which follows from its seed. For several daemons that route to the same\n\
             workers and do not know of each other's last bookings: give each a seed of its own, or 0. 0.0: the lowest cost wins.",
        ),
        live(
            "active_request_weight",
            "blocks",
            Value("0.0"),
            Number { min: 0.0, max: f64::MAX, set: |c, v| c.weights.active_request_weight = v },
            "Mode kv: cost for each active request of a worker. Above 0: many short requests spread out.",
        ),
        live(
            "host_hit_weight",
            "",
            Value("0.75"),
            Number { min: 0.0, max: 1.0, set: |c, v| c.weights.host_hit_weight = v },
            "The share of a block's computation that is saved if it is held in host memory. Mode kv: its credit.",
        ),
        live(
            "disk_hit_weight",
            "",
            Value("0.25"),
            Number { min: 0.0, max: 1.0, set: |c, v| c.weights.disk_hit_weight = v },
            "The same for a block held on disk or in an external store.",
        ),
        live(
            "shared_multiplier",
            "",
            Value("0.0"),
            Number { min: 0.0, max: 1.0, set: |c, v| c.weights.shared_multiplier = v },
            "Mode kv: credit for each block that, according to the request, a cache shared by all workers holds beyond the worker's\n\
             device memory.",
        ),
        live(
            "temperature",
            "",
            Value("0.0"),
            Number { min: 0.0, max: f64::MAX, set: |c, v| c.weights.temperature = v },
            "Randomness in the modes kv, load-aware, approximate, lmetric and latency. 0: the lowest cost wins. 1: the highest cost is still drawn\n\
             0.37 times as often as the lowest.",
        ),
        restart!(
            policy.seed,
            "",
            Value("0"),
            Integer { min: 0, max: u64::MAX, set: |c, v| c.seed = v },
            "Seed of all random draws, for repeatable runs. 0: a random seed at the start. Only in [policy] itself.",
        ),
        live(
            "track_prefill_tokens",
            "",
            Value("true"),
            Flag { set: |c, v| c.weights.track_prefill_tokens = v },
            "Count prefill: the worker's backlog and the tokens this prompt adds. false: no prefill term, and mode latency counts blocks.",
        ),
        live(
            "track_active_blocks",
            "",
            Value("true"),
            Flag { set: |c, v| c.weights.track_active_blocks = v },
            "Mode kv: count decode blocks: the worker's active blocks and the blocks this prompt adds. false: no decode term.",
        ),
        live(
            "assume_kv_reuse",
            "",
            Value("true"),
            Flag { set: |c, v| c.weights.assume_kv_reuse = v },
            "Mode kv: count the blocks of a prefix that active requests share once. false: each request counts in full.",
        ),
        live(
            "capability",
            "",
            Value("false"),
            Flag { set: |c, v| c.weights.capability = v },
            "Mode kv: divide the cost by the worker's weight, so that faster workers get more requests.",
        ),
        live(
            "trust_min",
            "",
            Value("none"),
            Choice { names: &TRUST_NAMES, set: |c, at| c.weights.trust_min = TRUST[at] },
            "Workers with a lower trust level are not eligible. none: every worker is.",
        ),
        live(
            "credit_trust_min",
            "",
            Value("none"),
            Choice { names: &TRUST_NAMES, set: |c, at| c.weights.credit_trust_min = TRUST[at] },
            "Cached blocks of workers with a lower trust level earn no credit. none: all do.",
        ),
        live(
            "busy_decode_blocks_share",
            "",
            Absent("0.9"),
            Number { min: 0.0, max: 1.0, set: |c, v| c.weights.busy.decode_blocks_share = Some(v) },
            "A worker is busy, and takes no requests, with more active decode blocks than this share of its capacity_blocks. Absent: no\n\
             limit.",
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
            "A worker is busy, and takes no requests, with more tokens to prefill than this. Absent: no limit.",
        ),
        live(
            "busy_prefill_steps",
            "",
            Absent("2.0"),
            Number { min: 0.0, max: f64::MAX, set: |c, v| c.weights.busy.prefill_steps = Some(v) },
            "A worker is busy, and takes no requests, with more tokens to prefill than this many times its batched_tokens_max. Absent: no\n\
             limit.",
        ),
        live(
            "affinity",
            "",
            Value("off"),
            Choice { names: &AffinityMode::NAMES, set: |c, at| c.weights.affinity.mode = AffinityMode::ALL[at] },
            "Whether requests of a session go to the worker that the session booked last. soft: that worker costs less. hard: that worker\n\
             is chosen while it is eligible and not overloaded.",
        ),
        live(
            "affinity_factor",
            "",
            Value("0.5"),
            Number { min: 0.0, max: 1.0, set: |c, v| c.weights.affinity.factor = v },
            "With soft affinity, the cost of the session's worker is multiplied by this. 1: no preference.",
        ),
        live(
            "affinity_load_max",
            "",
            Value("1.25"),
            Number { min: 1.0, max: f64::MAX, set: |c, v| c.weights.affinity.load_max = v },
            "A session leaves a worker that would have more requests in flight than this many times the average of the eligible workers.",
        ),
        live(
            "affinity_ttl_s",
            "seconds",
            Value("3600"),
            Integer { min: 1, max: limits::AFFINITY_TTL_S_CEILING, set: |c, v| c.weights.affinity.ttl_s = v as u32 },
            "A session that books nothing for this long is no longer bound.",
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
            "Sessions that can be bound at once, 40 bytes each. Further bindings evict the least recently used. Only in [policy] itself.",
        ),
        live(
            "prefill_bypass",
            "",
            Value("off"),
            Choice { names: &Bypass::NAMES, set: |c, at| c.weights.disaggregation.bypass = Bypass::ALL[at] },
            "When the decode worker also does the prefill of a request that asks for a pair. isl_bounding: if few tokens of the prompt are\n\
             new there; prefill_load: if prefill is busy; isl_or_load: in either case.",
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
            "Few means: fewer new tokens than this, and a smaller share of the prompt than prefill_bypass_share.",
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
            "Prefill is busy if its chosen worker has more tokens to prefill than this many times its batched_tokens_max. Absent: never.",
        ),
        live(
            "prefill_bypass_decode_share",
            "",
            Absent("0.8"),
            Number { min: 0.0, max: 1.0, set: |c, v| c.weights.disaggregation.decode_busy_share = Some(v) },
            "A decode worker with more active blocks than this share of its capacity_blocks does no prefill. Absent: no limit.",
        ),
        live(
            "queue_threshold",
            "",
            Absent("1.0"),
            Number { min: 0.0, max: f64::MAX, set: |c, v| c.weights.queue.threshold = Some(v) },
            "A request with a booking waits while every worker has more tokens to prefill than this many times its batched_tokens_max.\n\
             Absent: no request waits.",
        ),
        live(
            "queue_policy",
            "",
            Value("fcfs"),
            Choice { names: &Discipline::NAMES, set: |c, at| c.weights.queue.discipline = Discipline::ALL[at] },
            "The order of waiting requests with equal priority and no deadline. fcfs: first come, first served; lcfs: last come, first\n\
             served; wspt: least prefill first.",
        ),
        live(
            "queue_wait_ms_max",
            "milliseconds",
            Value("30000"),
            Integer { min: 1, max: limits::QUEUE_WAIT_MS_CEILING, set: |c, v| c.weights.queue.wait_ms_max = v },
            "A request without a deadline of its own waits this long and is then refused.",
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
            "Requests that may wait at once. Further requests are refused with a time to retry. Only in [policy] itself.",
        ),
    ],
};
