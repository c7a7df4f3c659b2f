//! Conversions between the enums and structs of the schema and those of the crate.

use flatbuffers::VOffsetT;

use super::admin::WorkerOp;
use super::frame_composer::{Layout, PADDING, Table};
use crate::error::{Error, Kind, Result, Side};
use crate::ids::{EventSeq, Scheme, TierBlocks, Window, Worker};
use crate::limits::FRAME_ALIGN_BYTES;
use crate::protocol::{
    BookingOutcome, CostTerms, DeviceClass, MatchStatus, Mode, OtherLoad, PoolRole, TraceContext, WorkerState,
    cost_terms,
};
use crate::schema_generated::routing as fb;
use crate::trust::{Trust, TrustLevel, TrustReasons};

/// "No batch applied yet" on the wire.
const NO_SEQ: u64 = u64::MAX;

/// Maps an enum of the schema to one of the crate, both ways.
macro_rules! enum_map {
    ($to_wire:ident, $from_wire:ident, $ours:ident, $theirs:ident { $($variant:ident),* }) => {
        pub(super) const fn $to_wire(value: $ours) -> fb::$theirs {
            match value { $($ours::$variant => fb::$theirs::$variant,)* }
        }
        pub(super) const fn $from_wire(value: fb::$theirs) -> Option<$ours> {
            match value { $(fb::$theirs::$variant => Some($ours::$variant),)* _ => None }
        }
    };
}

enum_map!(role_to_wire, role_from_wire, PoolRole, PoolRole { Both, Prefill, Decode });
enum_map!(state_to_wire, state_from_wire, WorkerState, WorkerState { Joining, Ready, Draining, Down });
enum_map!(device_to_wire, device_from_wire, DeviceClass, DeviceClass { Gpu, Cpu });
enum_map!(window_to_wire, window_from_wire, Window, Window { Plain, Bigram });
enum_map!(match_to_wire, match_from_wire, MatchStatus, MatchStatus { Matched, Unmatchable });
enum_map!(
    outcome_to_wire,
    outcome_from_wire,
    BookingOutcome,
    BookingOutcome { Applied, AlreadyApplied, Unknown, Superseded }
);
enum_map!(
    mode_to_wire,
    mode_from_wire,
    Mode,
    Mode {
        Kv,
        LoadAware,
        Approximate,
        LeastLoaded,
        PowerOfTwo,
        RoundRobin,
        Random,
        Direct,
        DeviceAwareWeighted,
        Lmetric,
        Latency
    }
);
enum_map!(op_to_wire, op_from_wire, WorkerOp, WorkerOp { Add, Remove, Set });
enum_map!(side_to_wire, side_from_wire, Side, ErrorSide { Gateway, Worker, Kernel, Config, Daemon });

/// The error for a value that this version does not know.
pub(super) fn unknown_value(field: &str, value: impl std::fmt::Display) -> Error {
    Error::new(
        Kind::Unsupported,
        format!("{field} has the value {value}, which this version does not know"),
        "use both sides from the same release",
    )
}

pub(super) fn worker_to_wire(worker: Worker) -> fb::WorkerRef {
    fb::WorkerRef::new(worker.id.0, worker.rank.0)
}

pub(super) fn worker_from_wire(worker: &fb::WorkerRef) -> Worker {
    Worker::new(worker.worker_id(), worker.dp_rank())
}

pub(super) fn trace_to_wire(trace: TraceContext) -> fb::TraceContext {
    let TraceContext { trace_id, span_id, flags } = trace;
    fb::TraceContext::new((trace_id >> 64) as u64, trace_id as u64, span_id, u32::from(flags))
}

/// The flags beyond the eight that are defined are dropped.
pub(super) fn trace_from_wire(trace: &fb::TraceContext) -> TraceContext {
    let trace_id = u128::from(trace.trace_hi()) << 64 | u128::from(trace.trace_lo());
    TraceContext { trace_id, span_id: trace.span(), flags: trace.flags() as u8 }
}

pub(super) fn other_to_wire(load: &OtherLoad) -> fb::OtherLoad {
    let OtherLoad { worker, origin, age_ms, requests, prefill_tokens, decode_blocks } = *load;
    fb::OtherLoad::new(worker.id.0, origin, age_ms, prefill_tokens, decode_blocks, requests, worker.rank.0)
}

pub(super) fn other_from_wire(load: &fb::OtherLoad) -> OtherLoad {
    OtherLoad {
        worker: Worker::new(load.worker_id(), load.dp_rank()),
        origin: load.origin(),
        age_ms: load.age_ms(),
        requests: load.requests(),
        prefill_tokens: load.prefill_tokens(),
        decode_blocks: load.decode_blocks(),
    }
}

pub(super) fn tiers_to_wire(blocks: TierBlocks) -> fb::TierBlocks {
    fb::TierBlocks::new(blocks.device, blocks.host, blocks.disk, blocks.external)
}

pub(super) fn tiers_from_wire(blocks: Option<&fb::TierBlocks>) -> TierBlocks {
    blocks.map_or_else(TierBlocks::default, |blocks| TierBlocks {
        device: blocks.device(),
        host: blocks.host(),
        disk: blocks.disk(),
        external: blocks.external(),
    })
}

pub(super) fn trust_to_wire(trust: Trust) -> fb::Trust {
    let as_of_seq = trust.as_of_seq.map_or(NO_SEQ, |seq| seq.0);
    let level = fb::TrustLevel(trust.level as u8);
    fb::Trust::new(level, trust.reasons.bits(), trust.since_unix_ms, as_of_seq, trust.as_of_unix_ms)
}

pub(super) fn trust_from_wire(trust: Option<&fb::Trust>) -> Result<Trust> {
    let Some(trust) = trust else { return Ok(Trust::default()) };
    let level = TrustLevel::from_u8(trust.level().0).ok_or_else(|| unknown_value("trust.level", trust.level().0))?;
    Ok(Trust {
        level,
        reasons: TrustReasons::from_bits(trust.reasons()),
        since_unix_ms: trust.since_unix_ms(),
        as_of_seq: (trust.as_of_seq() != NO_SEQ).then(|| EventSeq(trust.as_of_seq())),
        as_of_unix_ms: trust.as_of_unix_ms(),
    })
}

/// The scheme of a space; block size 0 = not known yet.
pub(super) fn scheme_from_wire(scheme: fb::Scheme<'_>) -> Result<Option<Scheme>> {
    scheme_of_fields(scheme.block_size(), scheme.window(), scheme.seed_rule())
}

/// The scheme with these fields; block size 0 = not known yet.
pub(super) fn scheme_of_fields(block_size: u32, window: fb::Window, seed_rule: fb::SeedRule) -> Result<Option<Scheme>> {
    let window = window_from_wire(window).ok_or_else(|| unknown_value("scheme.window", window.0))?;
    if seed_rule != fb::SeedRule::Xxh3Additive {
        return Err(unknown_value("scheme.seed_rule", seed_rule.0));
    }
    Ok((block_size != 0).then_some(Scheme { block_size, window }))
}

pub(super) fn scheme_args(scheme: Option<Scheme>) -> fb::SchemeArgs {
    let window = window_to_wire(scheme.map_or(Window::Plain, |scheme| scheme.window));
    let block_size = scheme.map_or(0, |scheme| scheme.block_size);
    fb::SchemeArgs { block_size, window, seed_rule: fb::SeedRule::Xxh3Additive }
}

macro_rules! codec_of_terms {
    ($($(#[$doc:meta])* $term:ident: $unit:literal = $slot:ident;)*) => {
        const TERMS: usize = [$(stringify!($term)),*].len();
        /// Bytes of the table of the terms, and of its vtable.
        const TERMS_BYTES: usize = FRAME_ALIGN_BYTES + TERMS * size_of::<f64>();
        const TERMS_VTABLE_BYTES: usize = 2 * size_of::<VOffsetT>() + TERMS * size_of::<VOffsetT>();

        /// The layout of the terms.
        pub(super) const COST_TERMS: Layout<TERMS_BYTES, TERMS_VTABLE_BYTES> =
            Layout::of(&[(PADDING, 4), $((fb::CostTerms::$slot, size_of::<f64>()),)*]);

        pub(super) fn terms_to_wire(terms: &CostTerms) -> Table<'static, TERMS_BYTES, TERMS_VTABLE_BYTES> {
            let mut table = COST_TERMS.blank();
            $(table.set(fb::CostTerms::$slot, terms.$term.to_le_bytes());)*
            table
        }
        #[cfg(test)]
        pub(super) const fn terms_args(terms: &CostTerms) -> fb::CostTermsArgs {
            fb::CostTermsArgs { $($term: terms.$term,)* }
        }
        pub(super) fn terms_from_wire(terms: fb::CostTerms<'_>) -> CostTerms {
            CostTerms { $($term: terms.$term(),)* }
        }
    };
}

cost_terms!(codec_of_terms);
