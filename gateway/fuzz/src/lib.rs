//! The targets of the gateway's `tests/fuzz_targets`, for libFuzzer. See `scripts/fuzz`.

#[allow(dead_code, reason = "the seeds and their test need the rest")]
#[path = "../../tests/fuzz_targets/targets/mod.rs"]
mod targets;

/// Runs a target.
///
/// # Panics
/// Where a promise is broken, or there is no target of that name.
pub fn run(target: &str, data: &[u8]) {
    let (_, function) = targets::ALL.iter().find(|(name, _)| *name == target).expect("a target of that name");
    function(data);
}
