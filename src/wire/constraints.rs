//! What a route demands of its worker, and what it sets in place of the policy: read, and written.

use super::compose::{FrameWriter, Layout, PADDING, REFERENCE, element};
use super::convert::{mode_from_wire, mode_to_wire, unknown_value};
use super::request::{bounded, invalid};
use super::table::Elements;
use crate::error::Result;
use crate::limits::{NAME_BYTES_MAX, REQUEST_TAINTS_MAX, SHARED_HITS_MAX};
use crate::protocol::{Names, Overrides, Preferences};
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
        check_label(field, name)?;
        self.text.push_str(name);
        self.ends.push(self.text.len() as u32);
        Ok(())
    }

    fn names(&self) -> Names<'_> {
        Names::Packed { text: &self.text, ends: &self.ends }
    }
}

pub(super) fn check_label(field: &str, name: &str) -> Result<()> {
    if (1..=NAME_BYTES_MAX).contains(&name.len()) {
        return Ok(());
    }
    let message = format!("{field} has a label of {} bytes", name.len());
    Err(invalid(message, format!("keep labels within 1 to {NAME_BYTES_MAX} bytes")))
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
            scratch.weights.push(check_label_weight(taint.weight())?);
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

pub(super) fn check_label_weight(weight: f64) -> Result<f64> {
    finite("preferred_taints.weight", weight, f64::MIN)
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
    let overrides = Overrides {
        mode: match table.mode() {
            fb::Mode::Default => None,
            mode => Some(mode_from_wire(mode).ok_or_else(|| unknown_value("overrides.mode", mode.0))?),
        },
        device_credit: table.device_credit(),
        prefill_load_scale: table.prefill_load_scale(),
        temperature: table.temperature(),
        shared_multiplier: table.shared_multiplier(),
        assume_kv_reuse: table.assume_kv_reuse(),
        track_prefill_tokens: table.track_prefill_tokens(),
    };
    check_overrides(&overrides).map(|()| overrides)
}

pub(super) fn check_overrides(overrides: &Overrides) -> Result<()> {
    let weights = [
        ("overrides.device_credit", overrides.device_credit),
        ("overrides.prefill_load_scale", overrides.prefill_load_scale),
        ("overrides.temperature", overrides.temperature),
        ("overrides.shared_multiplier", overrides.shared_multiplier),
    ];
    let mut set = weights.into_iter().filter_map(|(field, value)| Some((field, value?)));
    set.try_for_each(|(field, value)| finite(field, value, 0.0).map(drop))
}

const TAINT: Layout<16, 8> = Layout::of(&[(fb::Taint::VT_KEY, REFERENCE), (fb::Taint::VT_WEIGHT, 8)]);

const OVERRIDES: Layout<40, 18> = Layout::of(&[
    (fb::Overrides::VT_MODE, 1),
    (fb::Overrides::VT_ASSUME_KV_REUSE, 1),
    (fb::Overrides::VT_TRACK_PREFILL_TOKENS, 1),
    (PADDING, 1),
    (fb::Overrides::VT_DEVICE_CREDIT, 8),
    (fb::Overrides::VT_PREFILL_LOAD_SCALE, 8),
    (fb::Overrides::VT_TEMPERATURE, 8),
    (fb::Overrides::VT_SHARED_MULTIPLIER, 8),
]);

/// Writes labels that the worker must have. Returns the vector's place.
pub(super) fn write_required(frame: &mut FrameWriter<'_>, taints: Names<'_>) -> usize {
    let vector = frame.references(taints.len());
    for (n, taint) in taints.iter().enumerate() {
        let place = frame.string(taint);
        frame.refer(element(vector, n), place);
    }
    vector
}

/// Writes labels that the worker should have, or should not. Returns the vector's place.
pub(super) fn write_preferred(frame: &mut FrameWriter<'_>, taints: Preferences<'_>) -> usize {
    let vector = frame.references(taints.iter().count());
    for (n, (key, weight)) in taints.iter().enumerate() {
        let mut taint = TAINT.blank();
        taint.set(fb::Taint::VT_WEIGHT, weight.to_le_bytes());
        let place = frame.table(taint);
        let key = frame.string(key);
        frame.refer_field((&TAINT, place), fb::Taint::VT_KEY, key);
        frame.refer(element(vector, n), place);
    }
    vector
}

/// Writes what is set in place of the policy. Returns its place.
pub(super) fn write_overrides(frame: &mut FrameWriter<'_>, set: &Overrides) -> usize {
    let mut table = OVERRIDES.blank();
    table.set_if(fb::Overrides::VT_MODE, set.mode.map(|mode| [mode_to_wire(mode).0]));
    table.set_if(fb::Overrides::VT_DEVICE_CREDIT, set.device_credit.map(f64::to_le_bytes));
    table.set_if(fb::Overrides::VT_PREFILL_LOAD_SCALE, set.prefill_load_scale.map(f64::to_le_bytes));
    table.set_if(fb::Overrides::VT_TEMPERATURE, set.temperature.map(f64::to_le_bytes));
    table.set_if(fb::Overrides::VT_SHARED_MULTIPLIER, set.shared_multiplier.map(f64::to_le_bytes));
    table.set_if(fb::Overrides::VT_ASSUME_KV_REUSE, set.assume_kv_reuse.map(|is_so| [u8::from(is_so)]));
    table.set_if(fb::Overrides::VT_TRACK_PREFILL_TOKENS, set.track_prefill_tokens.map(|is_so| [u8::from(is_so)]));
    frame.table(table)
}
