//! The shadow policy of a running daemon: what judges, what it has counted, and how it is replaced.

use parking_lot::Mutex;
use std::sync::Arc;

use crate::config::{Problems, policy_with};
use crate::error::{Error, Kind, Result};
use crate::ids::SpaceId;
use crate::journal::{Judge, Record};
use crate::route::Policy;
use crate::shadow::{PolicyComparison, ShadowTally};

/// What the shadow policy is, and what it has counted. The thread that judges and those who ask hold the lock for
/// one decision or one copy; no core ever does.
#[derive(Clone, Debug, Default)]
pub(super) struct Shadowing(Arc<Mutex<State>>);

#[derive(Debug, Default)]
struct State {
    /// What differs from each space's policy: `field=value`.
    settings: Vec<String>,
    spaces: Vec<OfSpace>,
    comparison: PolicyComparison,
}

#[derive(Debug, Default)]
struct OfSpace {
    /// What the policy below was made of.
    base: Option<Policy>,
    policy: Policy,
    tally: ShadowTally,
}

impl Shadowing {
    /// Judges by each space's policy with these settings from now on, and counts anew. What one policy refuses, all
    /// do.
    ///
    /// # Errors
    /// `InvalidArgument` with everything that is wrong with them; nothing changes then.
    pub(super) fn replace(&self, settings: &[String]) -> Result<()> {
        policy_with(&Policy::default(), "the shadow policy", settings).map_err(|problems| refused(&problems))?;
        *self.0.lock() = State { settings: settings.to_vec(), ..State::default() };
        Ok(())
    }

    /// What it sets otherwise.
    pub(super) fn settings(&self) -> Vec<String> {
        self.0.lock().settings.clone()
    }

    /// What is counted, by space; nothing where no decision has been judged.
    pub(super) fn tallies(&self) -> Vec<(SpaceId, ShadowTally)> {
        let state = self.0.lock();
        let judged = state.spaces.iter().enumerate().filter(|(_, of)| of.tally.decisions > 0);
        judged.map(|(at, of)| (SpaceId(at as u32), of.tally)).collect()
    }

    /// All spaces together.
    pub(super) fn total(&self) -> ShadowTally {
        let mut total = ShadowTally::default();
        self.tallies().iter().for_each(|(_, tally)| total.merge(tally));
        total
    }
}

/// A policy with settings that were accepted before. What one policy takes, every policy takes: each field is checked
/// by itself.
pub(super) fn with(policy: &Policy, settings: &[String]) -> Policy {
    policy_with(policy, "the shadow policy", settings).unwrap_or(*policy)
}

fn refused(problems: &Problems) -> Error {
    let what = problems.to_string().lines().collect::<Vec<_>>().join("; ");
    Error::new(Kind::InvalidArgument, what, "name fields of [policy] as field=value")
}

impl Judge for Shadowing {
    fn judge(&mut self, record: &mut Record) {
        let state = &mut *self.0.lock();
        let space = record.space.0 as usize;
        if state.spaces.len() <= space {
            state.spaces.resize_with(space + 1, OfSpace::default);
        }
        let of = &mut state.spaces[space];
        if of.base != Some(record.policy) {
            of.base = Some(record.policy);
            of.policy = with(&record.policy, &state.settings);
        }
        let (chosen, seed) = (record.outcome.chosen(), record.outcome.seed);
        let compare = state.comparison.compare(&of.policy, &mut record.observation, seed, chosen);
        of.tally.add(compare);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_that_are_refused_change_nothing() {
        let shadowing = Shadowing::default();
        shadowing.replace(&["device_credit=0.5".into()]).unwrap();
        let mut judge = shadowing.clone();
        judge.judge(&mut Record { space: SpaceId(1), ..Record::default() });
        let error = shadowing.replace(&["device_credits=0.5".into(), "x".into()]).unwrap_err();
        assert!(error.kind() == Kind::InvalidArgument && error.message().contains("device_credit"), "{error}");
        let tallies = shadowing.tallies();
        assert_eq!((tallies.len(), tallies[0].0, tallies[0].1.agreements), (1, SpaceId(1), 1));
        assert_eq!(shadowing.total().decisions, 1);
        shadowing.replace(&[]).unwrap();
        assert!(shadowing.tallies().is_empty(), "it counts anew");
    }
}
