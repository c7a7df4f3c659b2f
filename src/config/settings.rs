//! A policy with some of its fields set otherwise, each as `field=value`: what recorded decisions are judged by once
//! more.

use super::fields;
use super::load::set;
use super::problem::{Place, Problem, Problems};
use super::walk::Entry;
use crate::route::{Mode, Policy};

/// `base` with what `settings` say, each `field=value` with a field of `[policy]`; `source` names them in problems.
///
/// # Errors
/// Everything that is wrong with them.
pub fn policy_with(base: &Policy, source: &str, settings: &[impl AsRef<str>]) -> Result<Policy, Problems> {
    let mut problems = Vec::new();
    let mut entry = Entry::preset(&fields::POLICY, "policy".to_owned(), Place::Document);
    entry.value.weights = *base;
    for setting in settings {
        let setting = setting.as_ref();
        let place = Place::Flag(setting.to_owned());
        match setting.split_once('=') {
            None => problems.push(Problem::new(place, "policy", "expected field=value")),
            Some(("seed", _)) => {
                problems.push(Problem::new(place, "policy.seed", "is one for all policies and belongs to [policy]"));
            }
            Some((name, value)) => {
                set(&fields::POLICY, &mut entry, name.trim(), value.trim(), place.clone(), &mut problems);
                if name.trim() == "mode" && entry.value.weights.mode == Mode::Approximate {
                    let message =
                        "approximate judges by what would have been predicted, which no decision that was made says";
                    problems.push(Problem::new(place, "policy.mode", message));
                }
            }
        }
    }
    match problems.is_empty() {
        true => Ok(entry.value.weights),
        false => Err(Problems { source: source.to_owned(), list: problems }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_are_set_over_what_is_there() {
        let base = Policy { device_credit: 2.0, credit_decay: 0.5, ..Policy::default() };
        let policy = policy_with(&base, "t", &["device_credit = 0.25", "track_active_blocks=false"]).unwrap();
        assert_eq!(policy, Policy { device_credit: 0.25, track_active_blocks: false, ..base });
        assert_eq!(policy_with(&base, "t", &[""; 0]).unwrap(), base);
    }

    #[test]
    fn all_that_is_wrong_is_named() {
        let wrong = ["device_credits=1", "credit_decay=-1", "seed=3", "nothing", "mode=approximate"];
        let problems = policy_with(&Policy::default(), "t", &wrong).unwrap_err();
        assert_eq!(problems.list.len(), wrong.len(), "{problems}");
        let approximate = Policy { mode: Mode::Approximate, ..Policy::default() };
        assert!(policy_with(&approximate, "t", &["credit_decay=1"]).is_ok(), "what is decided by is not in question");
        assert_eq!(problems.list[0].nearest.as_deref(), Some("device_credit"));
    }
}
