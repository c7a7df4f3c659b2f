//! The worker that a prompt was sent to some time ago: a bounded sample, one for each serving thread. Pure.
//!
//! The sample shows whether a repeated prompt is still cached by the worker that computed it. A place is kept until its
//! prompt comes again or gets too old, so at a high rate it is a sample rather than a cache of the latest prompts.

use crate::ids::{LocalHash, SpaceId, WorkerIndex};
use crate::limits::{REPEAT_AGE_MS_MAX, REPEAT_AGE_MS_MIN, REPEAT_BLOCKS, REPEATS_REMEMBERED};

/// A prompt, by the hash of its first blocks, and its worker. Key 0 = empty.
#[derive(Clone, Copy, Debug, Default)]
struct Sent {
    key: u64,
    worker: WorkerIndex,
    at_ms: u64,
}

/// Prompts and the workers they were sent to.
#[derive(Clone, Debug)]
pub struct Repeats {
    places: Box<[Sent]>,
}

impl Default for Repeats {
    fn default() -> Self {
        Self { places: vec![Sent::default(); REPEATS_REMEMBERED].into() }
    }
}

impl Repeats {
    /// Notes that a prompt is sent to `worker` now (milliseconds of a monotonic clock). Returns the worker that the
    /// same first blocks were sent to, if that is between the minimum and maximum age ago. Ignores prompts of too few
    /// blocks.
    pub fn sent(
        &mut self,
        space: SpaceId,
        blocks: &[LocalHash],
        worker: WorkerIndex,
        now_ms: u64,
    ) -> Option<WorkerIndex> {
        let key = key(space, blocks.first_chunk()?);
        let place = &mut self.places[key as usize & (REPEATS_REMEMBERED - 1)];
        let age_ms = now_ms.saturating_sub(place.at_ms);
        let is_judged = place.key == key && (REPEAT_AGE_MS_MIN..=REPEAT_AGE_MS_MAX).contains(&age_ms);
        let before = is_judged.then_some(place.worker);
        if is_judged || place.key == 0 || age_ms > REPEAT_AGE_MS_MAX {
            *place = Sent { key, worker, at_ms: now_ms };
        }
        before
    }
}

/// Local hashes are well mixed; the rotation only keeps their order apart. Never 0.
fn key(space: SpaceId, blocks: &[LocalHash; REPEAT_BLOCKS]) -> u64 {
    let own = u64::from(space.0).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    blocks.iter().fold(own, |key, block| key.rotate_left(17) ^ block.0).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    const SPACE: SpaceId = SpaceId(0);
    const AGE: u64 = REPEAT_AGE_MS_MIN;

    fn prompt(first: u64) -> [LocalHash; 5] {
        [first, 2, 3, 4, 5].map(LocalHash)
    }

    #[test]
    fn a_prompt_is_found_again_neither_too_soon_nor_too_late() {
        let (one, two) = (WorkerIndex(1), WorkerIndex(2));
        for (again_ms, found) in [
            (0, None),
            (AGE - 1, None),
            (AGE, Some(one)),
            (REPEAT_AGE_MS_MAX, Some(one)),
            (REPEAT_AGE_MS_MAX + 1, None),
        ] {
            let mut repeats = Repeats::default();
            assert_eq!(repeats.sent(SPACE, &prompt(1), one, 50), None);
            assert_eq!(repeats.sent(SPACE, &prompt(1), two, 50 + again_ms), found, "{again_ms}");
        }
    }

    #[test]
    fn what_was_judged_is_of_the_worker_it_went_to_last() {
        let mut repeats = Repeats::default();
        repeats.sent(SPACE, &prompt(1), WorkerIndex(1), 0);
        assert_eq!(repeats.sent(SPACE, &prompt(1), WorkerIndex(2), 1), None, "too soon: the first still counts");
        assert_eq!(repeats.sent(SPACE, &prompt(1), WorkerIndex(3), AGE), Some(WorkerIndex(1)));
        assert_eq!(repeats.sent(SPACE, &prompt(1), WorkerIndex(4), 2 * AGE), Some(WorkerIndex(3)));
    }

    #[test]
    fn short_prompts_other_prompts_and_other_spaces_are_not_mistaken() {
        let mut repeats = Repeats::default();
        repeats.sent(SPACE, &prompt(1), WorkerIndex(1), 0);
        assert_eq!(repeats.sent(SPACE, &prompt(1)[..REPEAT_BLOCKS - 1], WorkerIndex(1), AGE), None);
        assert_eq!(repeats.sent(SPACE, &prompt(9), WorkerIndex(1), AGE), None);
        assert_eq!(repeats.sent(SpaceId(1), &prompt(1), WorkerIndex(1), AGE), None);
        assert_eq!(repeats.sent(SPACE, &prompt(1)[..REPEAT_BLOCKS], WorkerIndex(1), AGE), Some(WorkerIndex(1)));
    }

    #[test]
    fn a_taken_place_is_kept_until_it_is_old() {
        let mut repeats = Repeats::default();
        let same_place = |n: u64| [0, 0, 0, n << 32 | 7].map(LocalHash);
        repeats.sent(SPACE, &same_place(1), WorkerIndex(1), 0);
        assert_eq!(repeats.sent(SPACE, &same_place(2), WorkerIndex(2), 1), None);
        assert_eq!(repeats.sent(SPACE, &same_place(1), WorkerIndex(3), AGE), Some(WorkerIndex(1)));
    }
}
