//! What a daemon says, compared with what the simulated caches hold. Nothing is published meanwhile.

use std::hash::Hasher;

use kvrouted::trust::TrustLevel;
use rustc_hash::{FxHashMap, FxHasher};
use serde::Serialize;

use super::contents::{Owner, SHARED_PROMPTS, shared_prompt};
use super::orders::RankState;
use super::router::Router;
use crate::failure::Failure;

/// Ranks whose newest own prompt is asked about.
const PRIVATE_PROMPTS: usize = 64;

/// What came of it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub(super) struct Verified {
    /// Overlaps that were exact, and compared.
    pub(super) compared: u64,
    /// Those that were wrong.
    pub(super) wrong: u64,
    /// Overlaps that were not exact, or not listed.
    pub(super) inexact: u64,
    /// A digest of all overlaps.
    pub(super) digest: u64,
}

/// Compares every rank's overlap with all shared prompts, and with some of the ranks' own.
///
/// # Errors
/// The daemon does not answer.
pub(super) fn verify(router: &mut Router, engines: &[RankState]) -> Result<Verified, Failure> {
    let places = engines.iter().enumerate().map(|(at, rank)| ((u64::from(rank.worker), rank.rank), at)).collect();
    let (mut verified, mut digest) = (Verified::default(), FxHasher::default());
    let mut compare = |prompt: &[_], held: &dyn Fn(usize) -> u8| {
        let found = depths(router, prompt, &places, engines.len())?;
        for (at, found) in found.into_iter().enumerate() {
            digest.write_u32(found.map_or(u32::MAX, |depth| depth));
            match found {
                Some(depth) => {
                    verified.compared += 1;
                    verified.wrong += u64::from(depth != u32::from(held(at)));
                }
                None => verified.inexact += 1,
            }
        }
        Ok::<_, Failure>(())
    };
    for prompt in 0..SHARED_PROMPTS {
        compare(&shared_prompt(prompt), &|at| engines[at].shared[prompt as usize])?;
    }
    for place in (0..engines.len()).step_by(engines.len().div_ceil(PRIVATE_PROMPTS)) {
        let RankState { worker, rank, private, .. } = engines[place];
        let Some((prompt, depth)) = private else { continue };
        compare(&Owner { worker, rank }.prompt(prompt), &|at| if at == place { depth } else { 0 })?;
    }
    Ok(Verified { digest: digest.finish(), ..verified })
}

/// Leading blocks of a prompt in device memory by rank; `None` = not exact, or not listed.
fn depths(
    router: &mut Router,
    prompt: &[kvrouted::ids::LocalHash],
    places: &FxHashMap<(u64, u32), usize>,
    ranks: usize,
) -> Result<Vec<Option<u32>>, Failure> {
    let mut depths = vec![None; ranks];
    for entry in router.overlaps(prompt)?.workers {
        if let Some(at) = places.get(&(entry.worker.id.0, entry.worker.rank.0))
            && entry.trust.level == TrustLevel::Exact
        {
            depths[*at] = Some(entry.overlap.device);
        }
    }
    Ok(depths)
}
