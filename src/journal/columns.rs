//! What of a decision is written, value by value. The names stand at the head of every file: a release that knows more
//! values, or fewer, still reads the others.

use super::record::{Listed, Record, Removed};
use super::word::Word;
use crate::ids::Worker;
use crate::load::EngineLoad;
use crate::route::{AffinitySession, Policy, RequestFacts, WorkerFacts};

/// One value of a row: its name, and how it is read and set.
pub(super) struct Column<T> {
    pub(super) name: &'static str,
    pub(super) get: fn(&T) -> u64,
    /// `None` if the number means no value of it.
    pub(super) set: fn(&mut T, u64) -> Option<()>,
}

macro_rules! column {
    ($name:literal: $($field:ident).+) => {
        Column {
            name: $name,
            get: |row| row.$($field).+.to_word(),
            set: |row, word| {
                row.$($field).+ = Word::from_word(word)?;
                Some(())
            },
        }
    };
}

macro_rules! columns {
    ($($name:literal: $($field:ident).+;)*) => { &[$(column!($name: $($field).+),)*] };
}

pub(super) const POLICY: &[Column<Policy>] = columns! {
    "version": version;
    "mode": mode;
    "device_credit": device_credit;
    "credit_decay": credit_decay;
    "prefill_load_scale": prefill_load_scale;
    "active_request_weight": active_request_weight;
    "host_hit_weight": host_hit_weight;
    "disk_hit_weight": disk_hit_weight;
    "shared_multiplier": shared_multiplier;
    "temperature": temperature;
    "track_prefill_tokens": track_prefill_tokens;
    "track_active_blocks": track_active_blocks;
    "assume_kv_reuse": assume_kv_reuse;
    "capability": capability;
    "trust_min": trust_min;
    "credit_trust_min": credit_trust_min;
    "busy_decode_blocks_share": busy.decode_blocks_share;
    "busy_prefill_tokens": busy.prefill_tokens;
    "busy_prefill_steps": busy.prefill_steps;
    "affinity": affinity.mode;
    "affinity_ttl_s": affinity.ttl_s;
    "affinity_factor": affinity.factor;
    "affinity_load_max": affinity.load_max;
};

pub(super) const REQUEST: &[Column<RequestFacts>] = &[
    column!("prompt_tokens": prompt_tokens),
    column!("block_size": block_size),
    column!("whole_blocks": whole_blocks),
    column!("role": role),
    column!("candidates_max": candidates_max),
    Column {
        name: "pin_worker_id",
        get: |request| request.pin.map(|pin| pin.id).to_word(),
        set: |request, word| {
            request.pin = Option::from_word(word)?.map(|id| Worker { id, ..Worker::default() });
            Some(())
        },
    },
    Column {
        name: "pin_dp_rank",
        get: |request| request.pin.map_or(0, |pin| pin.rank.to_word()),
        set: |request, word| {
            let rank = Word::from_word(word)?;
            request.pin = request.pin.map(|pin| Worker { rank, ..pin });
            Some(())
        },
    },
    column!("prefers_taints": prefers_taints),
    column!("shared_blocks": shared_blocks),
    column!("turn": round_robin_counter),
    Column {
        name: "session",
        get: |request| match request.session {
            AffinitySession::None => 0,
            AffinitySession::Unbound => 1,
            AffinitySession::Bound(_) => 2,
        },
        set: |request, word| {
            request.session = match word {
                0 => AffinitySession::None,
                1 => AffinitySession::Unbound,
                2 => AffinitySession::Bound(Worker::default()),
                _ => return None,
            };
            Some(())
        },
    },
    Column {
        name: "session_worker_id",
        get: |request| bound(request).id.to_word(),
        set: |request, word| set_bound(request, Worker { id: Word::from_word(word)?, ..bound(request) }),
    },
    Column {
        name: "session_dp_rank",
        get: |request| bound(request).rank.to_word(),
        set: |request, word| set_bound(request, Worker { rank: Word::from_word(word)?, ..bound(request) }),
    },
    column!("override_mode": overrides.mode),
    column!("override_device_credit": overrides.device_credit),
    column!("override_prefill_load_scale": overrides.prefill_load_scale),
    column!("override_temperature": overrides.temperature),
    column!("override_shared_multiplier": overrides.shared_multiplier),
    column!("override_assume_kv_reuse": overrides.assume_kv_reuse),
    column!("override_track_prefill_tokens": overrides.track_prefill_tokens),
];

pub(super) const RECORD: &[Column<Record>] = columns! {
    "at_ns": at_ns;
    "booked": booked;
    "matched": observation.matched;
    "notes": observation.notes;
    "request_blocks": observation.request_blocks;
    "fleet_version": observation.fleet_version;
    "index_epoch": observation.index_epoch;
    "seed": outcome.seed;
    "eligible": outcome.eligible;
    "ties": outcome.ties;
    "notes_after": outcome.notes;
    "nobody_code": outcome.nobody_code;
};

/// When a worker's trust was last raised or lowered is left out, and how many requests it says it runs: no decision
/// depends on it.
pub(super) const WORKER: &[Column<WorkerFacts>] = &[
    column!("index": index),
    column!("worker_id": worker.id),
    column!("dp_rank": worker.rank),
    column!("device": overlap.device),
    column!("host": overlap.host),
    column!("disk": overlap.disk),
    column!("external": overlap.external),
    column!("active_depth_blocks": active_depth_blocks),
    column!("shared_blocks": shared_blocks),
    column!("prefill_tokens": load.prefill_tokens),
    column!("decode_blocks": load.decode_blocks),
    column!("requests": load.requests),
    column!("load_version": load.version),
    Column {
        name: "engine_prefill_tokens",
        get: |facts| facts.load.engine.map(|said| said.prefill_tokens).to_word(),
        set: |facts, word| say(facts, word, |said, tokens| said.prefill_tokens = tokens),
    },
    Column {
        name: "engine_decode_blocks",
        get: |facts| facts.load.engine.map(|said| said.decode_blocks).to_word(),
        set: |facts, word| say(facts, word, |said, blocks| said.decode_blocks = blocks),
    },
    Column {
        name: "engine_kv_usage_millionths",
        get: |facts| facts.load.engine.map(|said| said.kv_usage_millionths).to_word(),
        set: |facts, word| say(facts, word, |said, usage| said.kv_usage_millionths = usage),
    },
    column!("trust": trust.level),
    column!("reasons": trust.reasons),
    column!("as_of_seq": trust.as_of_seq),
    column!("state": state),
    column!("device_class": device_class),
    column!("weight": weight),
    column!("capacity_blocks": capacity_blocks),
    column!("batched_tokens_max": batched_tokens_max),
    column!("allowed": allowed),
    column!("backing_off": backing_off),
    column!("is_pinned": is_pinned),
    column!("has_adapter": has_adapter),
    column!("has_required_taints": has_required_taints),
    column!("taint_weight": taint_weight),
];

pub(super) const LISTED: &[Column<Listed>] = columns! {
    "index": index;
    "cached_tokens": cached_tokens;
    "prefill": prefill;
    "decode": decode;
    "cost": cost;
};

pub(super) const REMOVED: &[Column<Removed>] = columns! {
    "rule": rule;
    "worker_id": worker.id;
    "dp_rank": worker.rank;
};

/// Whom the session is bound to, if it is.
const fn bound(request: &RequestFacts) -> Worker {
    match request.session {
        AffinitySession::Bound(worker) => worker,
        AffinitySession::None | AffinitySession::Unbound => Worker::new(0, 0),
    }
}

/// Sets whom it is bound to, if it is.
fn set_bound(request: &mut RequestFacts, worker: Worker) -> Option<()> {
    if let AffinitySession::Bound(bound) = &mut request.session {
        *bound = worker;
    }
    Some(())
}

/// Sets a part of what a worker says of itself, if it says it.
fn say<T: Word>(facts: &mut WorkerFacts, word: u64, set: fn(&mut EngineLoad, T)) -> Option<()> {
    if let Some(value) = Option::from_word(word)? {
        set(facts.load.engine.get_or_insert_default(), value);
    }
    Some(())
}

/// The names of a list of columns.
pub(super) fn names<T>(columns: &[Column<T>]) -> Vec<String> {
    columns.iter().map(|column| column.name.to_owned()).collect()
}
