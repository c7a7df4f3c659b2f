//! Leaves engines out of the daemon's plan that change its spaces again and again. No I/O.
//!
//! A daemon's spaces are fixed at its start, so another model or block size of an engine starts the daemon again, which
//! costs all engines their bookings. One engine that says something else each time it is asked must not do that to the
//! others: after [`SPACE_CHANGES_MAX`] changes within [`SPACE_CHANGES_WINDOW`] it counts as one that has said nothing.

use std::collections::BTreeMap;
use std::time::Instant;

use super::plan::PlannedEngine;
use crate::limits::{SPACE_CHANGES_MAX, SPACE_CHANGES_WINDOW};

/// What an engine has said of the space that it needs.
#[derive(Debug)]
struct Said {
    base: String,
    /// `None` = it has not said.
    block_size: Option<u32>,
    /// When it last said something else, the oldest first.
    changes: Vec<Instant>,
}

impl Said {
    fn is_steady(&self) -> bool {
        self.changes.len() < SPACE_CHANGES_MAX
    }

    fn hear(&mut self, base: &str, block_size: Option<u32>, now: Instant) {
        self.changes.retain(|change| now.saturating_duration_since(*change) < SPACE_CHANGES_WINDOW);
        let is_other =
            self.base != base || block_size.is_some_and(|size| self.block_size.is_some_and(|old| old != size));
        if is_other {
            self.changes.push(now);
            // More would only make it wait longer than the window.
            let extra = self.changes.len().saturating_sub(SPACE_CHANGES_MAX);
            self.changes.drain(..extra);
        }
        base.clone_into(&mut self.base);
        self.block_size = block_size.or(self.block_size);
    }
}

/// What the engines have said so far, by worker.
#[derive(Debug, Default)]
pub(super) struct Steadiness(BTreeMap<u64, Said>);

impl Steadiness {
    /// The engines as the plan should see them, and what is wrong with those that are left out.
    pub(super) fn of(&mut self, mut engines: Vec<PlannedEngine>, now: Instant) -> (Vec<PlannedEngine>, Vec<String>) {
        self.0.retain(|worker, _| engines.iter().any(|engine| engine.worker == *worker));
        let mut problems = Vec::new();
        for engine in &mut engines {
            let Some(base) = &engine.base else { continue };
            let block_size = engine.facts.block_size;
            let said = self.0.entry(engine.worker).or_insert_with(|| Said {
                base: base.clone(),
                block_size,
                changes: Vec::new(),
            });
            said.hear(base, block_size, now);
            if !said.is_steady() {
                engine.base = None;
                problems.push(format!(
                    "engine {}: it has named another model or block size {SPACE_CHANGES_MAX} times within {} minutes: \
                     it is left out until it stays the same; find out why it changes, and whether it is the engine that \
                     it should be",
                    engine.name,
                    SPACE_CHANGES_WINDOW.as_secs() / 60
                ));
            }
        }
        (engines, problems)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::super::plan::tests::{engine, of_model};
    use super::*;

    #[test]
    fn an_engine_that_names_other_models_is_left_out_until_it_stays_the_same() {
        let (mut steadiness, mut now) = (Steadiness::default(), Instant::now());
        let mut bases = Vec::new();
        for at in 0..2 * SPACE_CHANGES_MAX {
            let changing = of_model(engine(2, &[1]), &format!("m{at}"));
            let (engines, problems) = steadiness.of(vec![engine(1, &[1]), changing], now);
            assert_eq!(engines[0].base.as_deref(), Some("m"), "the other engine is not touched");
            assert_eq!(problems.len(), usize::from(engines[1].base.is_none()));
            bases.push(engines[1].base.is_some());
            now += Duration::from_secs(15);
        }
        assert_eq!(bases.iter().filter(|is_planned| **is_planned).count(), SPACE_CHANGES_MAX);
        let last = || of_model(engine(2, &[1]), &format!("m{}", 2 * SPACE_CHANGES_MAX - 1));
        assert!(steadiness.of(vec![last()], now).0[0].base.is_none(), "not yet");
        assert!(steadiness.of(vec![last()], now + SPACE_CHANGES_WINDOW).0[0].base.is_some(), "it has stayed the same");
    }

    #[test]
    fn an_engine_that_restarts_or_learns_its_block_size_is_steady() {
        let (mut steadiness, now) = (Steadiness::default(), Instant::now());
        for _ in 0..10 {
            let silent = PlannedEngine { base: None, ..engine(1, &[1]) };
            for said in [silent, engine(1, &[1])] {
                let (_, problems) = steadiness.of(vec![said], now);
                assert_eq!(problems, [""; 0]);
            }
        }
    }
}
