//! Decisions against a plain reference: the published formulas and rules, written a second time and in another way.

// clippy.toml allows it in #[test] functions; all of this folder is test.
#![allow(clippy::unwrap_used)]

mod chance;
mod invent;
mod reference;

use kvrouted::route::{Decision, Draws, judge};
use proptest::prelude::*;

/// As near as two ways of adding the same numbers come.
fn near(a: f64, b: f64) -> bool {
    a == b || (a - b).abs() <= 1e-9 * a.abs().max(b.abs()).max(1.0)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, ..ProptestConfig::default() })]

    #[test]
    fn rules_remove_whom_the_reference_removes(
        (policy, observation) in (invent::policy(), invent::observation()), seed: u64,
    ) {
        let mut decision = Decision::default();
        judge(&policy, &observation, Draws::new(seed), &mut decision);
        let expected = reference::sift(&policy, &observation);
        let running: Vec<_> = decision.eligible_rows.iter().map(|place| *place as usize).collect();
        prop_assert_eq!(&running, &expected.running);
        let removed: Vec<_> = decision.removed.iter().map(|(rule, worker)| (rule.name(), *worker)).collect();
        prop_assert_eq!(removed, expected.removed);
        prop_assert_eq!(decision.no_worker.map(|kind| kind.name()), expected.no_worker);
        prop_assert_eq!(decision.eligible as usize, running.len());
        let listed = running.len().min(observation.request.candidates_max.max(1) as usize);
        prop_assert_eq!(decision.candidates.len(), listed);
    }

    #[test]
    fn costs_are_those_of_the_reference_and_explain_themselves(
        (policy, observation) in (invent::policy(), invent::observation()), seed: u64,
    ) {
        let mut decision = Decision::default();
        judge(&policy, &observation, Draws::new(seed), &mut decision);
        let policy = policy.under(&observation.request.overrides);
        let running = reference::sift(&policy, &observation).running;
        for scored in &decision.candidates {
            let place = running.iter().position(|at| observation.workers.row(*at).index == scored.index).unwrap();
            let expected = reference::cost(&policy, &observation, &running, place);
            let terms = &scored.terms;
            prop_assert!(near(terms.cost, expected), "{} against {expected}: {terms:?}", terms.cost);
            if reference::is_sum_of_terms(&policy, &observation) {
                let sum = terms.prefill + terms.decode + terms.active_requests_cost;
                prop_assert!(near(sum / terms.capability_weight * terms.taint_factor, terms.cost), "{terms:?}");
            }
        }
        let behind: Vec<_> = decision.candidates.iter().skip(1).map(|scored| scored.terms.cost).collect();
        prop_assert!(behind.is_sorted(), "behind the first by cost: {behind:?}");
    }

    #[test]
    fn who_is_chosen_is_one_that_the_mode_may_choose(
        (policy, observation) in (invent::policy(), invent::observation()), seed: u64,
    ) {
        let mut decision = Decision::default();
        judge(&policy, &observation, Draws::new(seed), &mut decision);
        let policy = policy.under(&observation.request.overrides);
        let running = reference::sift(&policy, &observation).running;
        let Some(chosen) = decision.candidates.first() else { return Ok(()) };
        let place = running.iter().position(|at| observation.workers.row(*at).index == chosen.index).unwrap();
        let fit = reference::may_be_chosen(&policy, &observation, &running);
        prop_assert!(fit.contains(&place), "{place} of {fit:?} in {:?}", policy.mode);
    }

    #[test]
    fn the_same_is_judged_to_the_same_bits(
        (policy, observation) in (invent::policy(), invent::observation()), seed: u64,
    ) {
        let (mut once, mut again) = (Decision::default(), Decision::default());
        judge(&policy, &observation, Draws::new(seed), &mut once);
        // Also in buffers that something else was judged in.
        judge(&policy, &observation, Draws::new(!seed), &mut again);
        judge(&policy, &observation.clone(), Draws::new(once.seed), &mut again);
        let bits = |decision: &Decision| {
            let costs: Vec<_> = decision.candidates.iter().map(|scored| scored.terms.cost.to_bits()).collect();
            (format!("{decision:?}"), costs)
        };
        prop_assert_eq!(bits(&once), bits(&again));
    }
}
