//! What an engine held at each of its batches, in its present life and the ones before.

use std::time::{Duration, Instant};

use crate::large_fleet::contents::SHARED_PROMPTS;

/// For how long after an engine has begun anew a daemon may still speak of the life before. It has not heard of the new
/// one while the network is cut.
const FORMER_LIFE_MAX: Duration = Duration::from_secs(15);

/// Lives that are kept. None is so short that more of them could count.
const LIVES_MAX: usize = 8;

/// Changes of a prompt that a report tells.
const TOLD_MAX: usize = 12;

/// One life of an engine.
struct Life {
    /// When the next one began; `None` = it is the present one.
    succeeded: Option<Instant>,
    /// For each shared prompt, the leading blocks from a batch on.
    depths: Vec<Vec<(u64, u8)>>,
    next_seq: u64,
}

/// What an engine held.
#[derive(Default)]
pub(super) struct Truth {
    /// The present life last.
    lives: Vec<Life>,
}

impl Truth {
    /// The engine begins anew, and holds nothing.
    pub(super) fn begin(&mut self, now: Instant) {
        if let Some(former) = self.lives.last_mut() {
            former.succeeded = Some(now);
        }
        if self.lives.len() == LIVES_MAX {
            self.lives.remove(0);
        }
        self.lives.push(Life { succeeded: None, depths: vec![Vec::new(); SHARED_PROMPTS as usize], next_seq: 0 });
    }

    /// Notes that the engine holds the first `depth` blocks of a shared prompt after the batch `seq`.
    pub(super) fn note(&mut self, seq: u64, prompt: u32, depth: u8) {
        let Some(life) = self.lives.last_mut() else { return };
        life.next_seq = seq + 1;
        if let Some(depths) = life.depths.get_mut(prompt as usize) {
            depths.push((seq, depth));
        }
    }

    /// The blocks of a shared prompt that it holds now.
    pub(super) fn now(&self, prompt: u32) -> u8 {
        let depths = self.lives.last().and_then(|life| life.depths[prompt as usize].last());
        depths.map_or(0, |(_, depth)| *depth)
    }

    /// Its last batch; `None` = none yet.
    pub(super) fn last_seq(&self) -> Option<u64> {
        self.lives.last()?.next_seq.checked_sub(1)
    }

    /// The last blocks of a shared prompt in each life, with their batches, for a report.
    pub(super) fn tell(&self, prompt: u32) -> String {
        let lives = self.lives.iter().rev().map(|life| {
            let depths = life.depths[prompt as usize].iter().rev().take(TOLD_MAX);
            format!("{:?} at batch {} and before", depths.collect::<Vec<_>>(), life.next_seq)
        });
        lives.collect::<Vec<_>>().join("; in the life before ")
    }

    /// Whether the engine held exactly `depth` blocks of a shared prompt after some batch from `first` to `last`.
    pub(super) fn held(&self, prompt: u32, (first, last): (u64, u64), depth: u32, now: Instant) -> bool {
        let counts = |life: &&Life| life.succeeded.is_none_or(|at| now.saturating_duration_since(at) < FORMER_LIFE_MAX);
        let lives = self.lives.iter().filter(counts);
        lives.map(|life| &life.depths[prompt as usize]).any(|depths| {
            let before = depths.partition_point(|(seq, _)| *seq <= first);
            let at_first = before.checked_sub(1).map_or(0, |at| depths[at].1);
            let later = depths[before..].iter().take_while(|(seq, _)| *seq <= last).map(|(_, depth)| *depth);
            std::iter::once(at_first).chain(later).any(|held| u32::from(held) == depth)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_prompt_is_held_as_it_was_at_any_batch_of_the_range() {
        let (mut truth, now) = (Truth::default(), Instant::now());
        truth.begin(now);
        for (seq, depth) in [(3, 4), (5, 8), (9, 4)] {
            truth.note(seq, 7, depth);
        }
        let held = |range| (0..=12).filter(|depth| truth.held(7, range, *depth, now)).collect::<Vec<_>>();
        assert_eq!(held((0, 2)), [0]);
        assert_eq!(held((3, 4)), [4]);
        assert_eq!(held((4, 5)), [4, 8]);
        assert_eq!(held((6, 8)), [8]);
        assert_eq!((truth.now(7), truth.last_seq()), (4, Some(9)));
        assert!(truth.held(8, (0, 9), 0, now), "another prompt");
    }

    #[test]
    fn the_former_life_counts_for_a_while() {
        let (mut truth, began) = (Truth::default(), Instant::now());
        truth.begin(began);
        truth.note(0, 1, 4);
        truth.begin(began);
        truth.note(0, 1, 8);
        assert!(truth.held(1, (0, 0), 4, began) && truth.held(1, (0, 0), 8, began));
        let later = began + FORMER_LIFE_MAX;
        assert!(!truth.held(1, (0, 0), 4, later) && truth.held(1, (0, 0), 8, later));
    }
}
