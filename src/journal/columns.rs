//! The values of a decision that a journal writes, and how each becomes a *word*: a number of 64 bits, in as few bytes
//! as it needs. A file's head names its values, so a release with more or fewer values still reads the others.

use super::decision_record::{DecisionRecord, ListedCandidate, RemovedWorker};
use crate::fleet::{DeviceClass, PoolRole, WorkerState};
use crate::ids::{DpRank, EventSeq, Worker, WorkerId, WorkerIndex};
use crate::load::EngineLoad;
use crate::route::{AffinityMode, AffinitySession, MatchStatus, Mode, Policy, ReplyNotes, RequestFacts, WorkerFacts};
use crate::trust::{TrustLevel, TrustReasons};

/// One value of a row, with its name in the files.
pub(super) struct Column<T> {
    pub(super) name: &'static str,
    pub(super) get: fn(&T) -> u64,
    /// `None` if the word is no value of this column.
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

pub(super) const RECORD: &[Column<DecisionRecord>] = columns! {
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
    "nobody_code": outcome.no_worker_code;
};

/// No decision depends on when a worker's trust changed, or on how many requests its engine reports: both are left out.
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
        get: |facts| facts.load.engine.map(|report| report.prefill_tokens).to_word(),
        set: |facts, word| set_reported(facts, word, |report, tokens| report.prefill_tokens = tokens),
    },
    Column {
        name: "engine_decode_blocks",
        get: |facts| facts.load.engine.map(|report| report.decode_blocks).to_word(),
        set: |facts, word| set_reported(facts, word, |report, blocks| report.decode_blocks = blocks),
    },
    Column {
        name: "engine_kv_usage_millionths",
        get: |facts| facts.load.engine.map(|report| report.kv_usage_millionths).to_word(),
        set: |facts, word| set_reported(facts, word, |report, usage| report.kv_usage_millionths = usage),
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

pub(super) const LISTED: &[Column<ListedCandidate>] = columns! {
    "index": index;
    "cached_tokens": cached_tokens;
    "prefill": prefill;
    "decode": decode;
    "cost": cost;
};

pub(super) const REMOVED: &[Column<RemovedWorker>] = columns! {
    "rule": rule;
    "worker_id": worker.id;
    "dp_rank": worker.rank;
};

/// The worker that the session is bound to; worker 0/0 if it is not bound.
const fn bound(request: &RequestFacts) -> Worker {
    match request.session {
        AffinitySession::Bound(worker) => worker,
        AffinitySession::None | AffinitySession::Unbound => Worker::new(0, 0),
    }
}

/// Sets the worker of a bound session.
fn set_bound(request: &mut RequestFacts, worker: Worker) -> Option<()> {
    if let AffinitySession::Bound(bound) = &mut request.session {
        *bound = worker;
    }
    Some(())
}

/// Sets one number of an engine's own load report, if the engine reported it.
fn set_reported<T: Word>(facts: &mut WorkerFacts, word: u64, set: fn(&mut EngineLoad, T)) -> Option<()> {
    if let Some(value) = Option::from_word(word)? {
        set(facts.load.engine.get_or_insert_default(), value);
    }
    Some(())
}

/// The names of a list of columns.
pub(super) fn names<T>(columns: &[Column<T>]) -> Vec<String> {
    columns.iter().map(|column| column.name.to_owned()).collect()
}

// ---- words ----

/// The bytes of the longest word.
const WORD_BYTES_MAX: u32 = 10;

/// Appends `word`, seven bits a byte, the lowest first; all bytes but the last have their highest bit set.
pub(super) fn put(mut word: u64, out: &mut Vec<u8>) {
    while word >= 0x80 {
        out.push(word as u8 | 0x80);
        word >>= 7;
    }
    out.push(word as u8);
}

/// Takes a word off the front of `bytes`; `None` if they end before it does, or it has more than 64 bits.
pub(super) fn take(bytes: &mut &[u8]) -> Option<u64> {
    let mut word = 0;
    for at in 0..WORD_BYTES_MAX {
        let (byte, rest) = bytes.split_first()?;
        *bytes = rest;
        let bits = u64::from(byte & 0x7f);
        if at == WORD_BYTES_MAX - 1 && bits > 1 {
            return None;
        }
        word |= bits << (7 * at);
        if byte & 0x80 == 0 {
            return Some(word);
        }
    }
    None
}

/// A value that a journal writes as one word.
pub(super) trait Word: Copy {
    fn to_word(self) -> u64;

    /// The value of a word; `None` if the word has none.
    fn from_word(word: u64) -> Option<Self>;
}

impl Word for u64 {
    fn to_word(self) -> u64 {
        self
    }

    fn from_word(word: u64) -> Option<Self> {
        Some(word)
    }
}

impl Word for u32 {
    fn to_word(self) -> u64 {
        u64::from(self)
    }

    fn from_word(word: u64) -> Option<Self> {
        word.try_into().ok()
    }
}

impl Word for bool {
    fn to_word(self) -> u64 {
        u64::from(self)
    }

    fn from_word(word: u64) -> Option<Self> {
        (word <= 1).then_some(word == 1)
    }
}

/// Bit for bit, with the bytes in reverse order: the low bytes of common numbers are zero. Reversed they are the high
/// bytes of the word, which take no room in a file.
impl Word for f64 {
    fn to_word(self) -> u64 {
        self.to_bits().swap_bytes()
    }

    fn from_word(word: u64) -> Option<Self> {
        Some(Self::from_bits(word.swap_bytes()))
    }
}

/// 0 is `None`, and other words are one more than the value's. The largest word is written as the one below it; no
/// optional value reaches it.
impl<T: Word> Word for Option<T> {
    fn to_word(self) -> u64 {
        self.map_or(0, |value| value.to_word().saturating_add(1))
    }

    fn from_word(word: u64) -> Option<Self> {
        match word {
            0 => Some(None),
            word => T::from_word(word - 1).map(Some),
        }
    }
}

macro_rules! wrapped {
    ($($name:ident($inner:ty);)*) => {
        $(impl Word for $name {
            fn to_word(self) -> u64 {
                self.0.to_word()
            }

            fn from_word(word: u64) -> Option<Self> {
                <$inner>::from_word(word).map(Self)
            }
        })*
    };
}

wrapped! {
    WorkerIndex(u32);
    WorkerId(u64);
    DpRank(u32);
    EventSeq(u64);
    ReplyNotes(u64);
}

/// Variants by fixed numbers: their order in the code may change without changing the file format.
macro_rules! numbered {
    ($($name:ident { $($variant:ident = $number:literal),* })*) => {
        $(impl Word for $name {
            fn to_word(self) -> u64 {
                match self { $(Self::$variant => $number,)* }
            }

            fn from_word(word: u64) -> Option<Self> {
                match word { $($number => Some(Self::$variant),)* _ => None }
            }
        })*
    };
}

numbered! {
    PoolRole { Both = 0, Prefill = 1, Decode = 2 }
    WorkerState { Joining = 0, Ready = 1, Draining = 2, Down = 3 }
    DeviceClass { Gpu = 0, Cpu = 1 }
    TrustLevel { None = 0, Predicted = 1, Unproven = 2, LowerBound = 3, Exact = 4 }
    Mode {
        Kv = 1, LoadAware = 2, Approximate = 3, LeastLoaded = 4, PowerOfTwo = 5, RoundRobin = 6, Random = 7, Direct = 8,
        DeviceAwareWeighted = 9, Lmetric = 10
    }
    MatchStatus { Matched = 0, Unmatchable = 1 }
    AffinityMode { Off = 0, Soft = 1, Hard = 2 }
}

impl Word for TrustReasons {
    fn to_word(self) -> u64 {
        self.bits()
    }

    fn from_word(word: u64) -> Option<Self> {
        Some(Self::from_bits(word))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn numbers_come_back(words in proptest::collection::vec(any::<u64>().prop_map(|word| word >> (word % 64)), 0..20)) {
            let mut bytes = Vec::new();
            words.iter().for_each(|word| put(*word, &mut bytes));
            let mut rest = bytes.as_slice();
            let back: Vec<u64> = words.iter().map_while(|_| take(&mut rest)).collect();
            prop_assert_eq!(back, words);
            prop_assert!(rest.is_empty());
        }

        #[test]
        fn any_bytes_are_read_or_refused(bytes in proptest::collection::vec(any::<u8>(), 0..20)) {
            let mut rest = bytes.as_slice();
            while take(&mut rest).is_some() {}
        }

        #[test]
        fn every_bit_of_a_fraction_comes_back(bits in any::<u64>()) {
            let back = f64::from_word(f64::from_bits(bits).to_word()).map(f64::to_bits);
            prop_assert_eq!(back, Some(bits));
        }
    }

    #[test]
    fn common_fractions_take_few_bytes() {
        for (value, bytes_max) in [(0.0, 1), (1.0, 3), (0.5, 3), (0.75, 3), (1.0e9, 7)] {
            let mut bytes = Vec::new();
            put(f64::to_word(value), &mut bytes);
            assert!(bytes.len() <= bytes_max, "{value}: {} bytes", bytes.len());
        }
    }

    #[test]
    fn a_missing_value_differs_from_zero() {
        for value in [None, Some(0.0), Some(1.5)] {
            assert_eq!(Option::<f64>::from_word(value.to_word()), Some(value));
        }
        assert_eq!((bool::from_word(2), DeviceClass::from_word(7), u32::from_word(1 << 40)), (None, None, None));
    }
}
