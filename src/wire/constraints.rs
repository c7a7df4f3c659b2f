//! What a route demands of its worker, and what it sets in place of the policy: read, and written.

use flatbuffers::{FlatBufferBuilder, ForwardsUOffset, Vector, WIPOffset};

use super::convert::{mode_from_wire, mode_to_wire, unknown_value};
use super::request::{bounded, invalid};
use super::table::Elements;
use crate::error::Result;
use crate::limits::{NAME_BYTES_MAX, REQUEST_TAINTS_MAX, SHARED_HITS_MAX};
use crate::route::{Names, Overrides, Preferences, RouteRequest};
use crate::schema_generated::routing as fb;

/// Where they are put, reused from one request to the next.
#[derive(Debug, Default)]
pub(super) struct ConstraintScratch {
    required: Packed,
    preferred: Packed,
    weights: Vec<f64>,
    shared: Vec<(u32, u32)>,
}

/// Names one behind the other.
#[derive(Debug, Default)]
struct Packed {
    text: String,
    ends: Vec<u32>,
}

impl Packed {
    fn clear(&mut self) {
        self.text.clear();
        self.ends.clear();
    }

    fn push(&mut self, field: &str, name: &str) -> Result<()> {
        if name.is_empty() || name.len() > NAME_BYTES_MAX {
            let message = format!("{field} has a label of {} bytes", name.len());
            return Err(invalid(message, format!("keep labels within 1 to {NAME_BYTES_MAX} bytes")));
        }
        self.text.push_str(name);
        self.ends.push(self.text.len() as u32);
        Ok(())
    }

    fn names(&self) -> Names<'_> {
        Names::Packed { text: &self.text, ends: &self.ends }
    }
}

/// What was read of them.
pub(super) struct Constraints<'a> {
    pub(super) required_taints: Names<'a>,
    pub(super) preferred_taints: Preferences<'a>,
    pub(super) shared_hits: &'a [(u32, u32)],
}

/// Reads them; they stay in `scratch`. Without a table there are no labels.
pub(super) fn read<'a>(
    table: Option<&fb::Route<'_>>,
    shared_hits: &Elements<'_, fb::BlockRange>,
    scratch: &'a mut ConstraintScratch,
) -> Result<Constraints<'a>> {
    scratch.required.clear();
    scratch.preferred.clear();
    scratch.weights.clear();
    scratch.shared.clear();
    if let Some(taints) = table.and_then(fb::Route::required_taints) {
        bounded("required_taints", taints.len(), REQUEST_TAINTS_MAX)?;
        taints.iter().try_for_each(|taint| scratch.required.push("required_taints", taint))?;
    }
    if let Some(taints) = table.and_then(fb::Route::preferred_taints) {
        bounded("preferred_taints", taints.len(), REQUEST_TAINTS_MAX)?;
        for taint in taints {
            scratch.preferred.push("preferred_taints", taint.key())?;
            scratch.weights.push(finite("preferred_taints.weight", taint.weight(), f64::MIN)?);
        }
    }
    let ranges = shared_hits.structs();
    bounded("shared_hits", ranges.len(), SHARED_HITS_MAX)?;
    scratch.shared.extend(ranges.map(|range| (range.start(), range.end())));
    Ok(Constraints {
        required_taints: scratch.required.names(),
        preferred_taints: Preferences { names: scratch.preferred.names(), weights: &scratch.weights },
        shared_hits: &scratch.shared,
    })
}

fn finite(field: &str, value: f64, min: f64) -> Result<f64> {
    match value.is_finite() && value >= min {
        true => Ok(value),
        false if min == 0.0 => Err(invalid(format!("{field} is {value}"), "give a number that is not below 0")),
        false => Err(invalid(format!("{field} is {value}"), "give a number")),
    }
}

/// Reads what is set in place of the policy.
pub(super) fn overrides(table: Option<fb::Overrides<'_>>) -> Result<Overrides> {
    let Some(table) = table else { return Ok(Overrides::NONE) };
    let weight = |field: &str, value: Option<f64>| {
        value.map(|value| finite(&format!("overrides.{field}"), value, 0.0)).transpose()
    };
    Ok(Overrides {
        mode: match table.mode() {
            fb::Mode::Default => None,
            mode => Some(mode_from_wire(mode).ok_or_else(|| unknown_value("overrides.mode", mode.0))?),
        },
        device_credit: weight("device_credit", table.device_credit())?,
        prefill_load_scale: weight("prefill_load_scale", table.prefill_load_scale())?,
        temperature: weight("temperature", table.temperature())?,
        shared_multiplier: weight("shared_multiplier", table.shared_multiplier())?,
        assume_kv_reuse: table.assume_kv_reuse(),
        track_prefill_tokens: table.track_prefill_tokens(),
    })
}

type Builder = FlatBufferBuilder<'static>;
type TableVector<T> = WIPOffset<Vector<'static, ForwardsUOffset<T>>>;

/// They, encoded.
pub(super) struct Encoded {
    pub(super) required_taints: Option<TableVector<&'static str>>,
    pub(super) preferred_taints: Option<TableVector<fb::Taint<'static>>>,
    pub(super) shared_hits: Option<WIPOffset<Vector<'static, fb::BlockRange>>>,
    pub(super) overrides: Option<WIPOffset<fb::Overrides<'static>>>,
}

/// Encodes those of a request; what it does not have is left out.
pub(super) fn encode(builder: &mut Builder, request: &RouteRequest<'_>) -> Encoded {
    let required: Vec<_> = request.required_taints.iter().map(|taint| builder.create_string(taint)).collect();
    let taint = |(key, weight): (&str, f64)| {
        let key = builder.create_string(key);
        fb::Taint::create(builder, &fb::TaintArgs { key: Some(key), weight })
    };
    let preferred: Vec<_> = request.preferred_taints.iter().map(taint).collect();
    let shared: Vec<_> = request.shared_hits.iter().map(|(start, end)| fb::BlockRange::new(*start, *end)).collect();
    let set = request.overrides;
    let args = fb::OverridesArgs {
        mode: set.mode.map_or(fb::Mode::Default, mode_to_wire),
        device_credit: set.device_credit,
        prefill_load_scale: set.prefill_load_scale,
        temperature: set.temperature,
        shared_multiplier: set.shared_multiplier,
        assume_kv_reuse: set.assume_kv_reuse,
        track_prefill_tokens: set.track_prefill_tokens,
    };
    Encoded {
        required_taints: (!required.is_empty()).then(|| builder.create_vector(&required)),
        preferred_taints: (!preferred.is_empty()).then(|| builder.create_vector(&preferred)),
        shared_hits: (!shared.is_empty()).then(|| builder.create_vector(&shared)),
        overrides: (set != Overrides::NONE).then(|| fb::Overrides::create(builder, &args)),
    }
}
