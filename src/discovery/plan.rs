//! The plan: the changes that make the fleet match the merge.

use std::collections::BTreeMap;

use super::merge::Merged;
use crate::config::WorkerConfig;
use crate::ids::Worker;

/// One change of the fleet.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Step {
    /// Remove a worker.
    Remove(Worker),
    /// Change the record of a worker that stays.
    Change {
        /// The new record.
        config: WorkerConfig,
        /// Whether its events now come from another source.
        resubscribe: bool,
    },
    /// Add a worker.
    Add(WorkerConfig),
}

/// The steps from the current fleet to the wanted one. Removals come first, to make room.
///
/// A worker that changes its space, or that starts or stops publishing events, is removed and added again.
#[must_use]
pub(crate) fn plan(is: &BTreeMap<Worker, WorkerConfig>, shall: &Merged) -> Vec<Step> {
    let (mut removes, mut changes, mut adds) = (Vec::new(), Vec::new(), Vec::new());
    removes.extend(is.keys().filter(|worker| !shall.workers.contains_key(worker)).map(|worker| Step::Remove(*worker)));
    for (worker, (_, config)) in &shall.workers {
        match is.get(worker) {
            Some(was) if was == config => {}
            Some(was) if was.space == config.space && was.events.is_some() == config.events.is_some() => {
                changes.push(Step::Change { config: config.clone(), resubscribe: was.events != config.events });
            }
            Some(_) => {
                removes.push(Step::Remove(*worker));
                adds.push(Step::Add(config.clone()));
            }
            None => adds.push(Step::Add(config.clone())),
        }
    }
    // A changed worker may take over the endpoint of another one at any time: an engine's socket takes any number of
    // subscribers.
    removes.into_iter().chain(changes).chain(adds).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{FileFormat, NamedWorkers, SpaceConfig, parse_workers};
    use crate::discovery::{Source, SourceMerge};

    fn named(json: &str) -> NamedWorkers {
        let spaces = ["m", "n"].map(|model| SpaceConfig { model: model.into(), ..SpaceConfig::default() });
        parse_workers("t", json, FileFormat::Json, &spaces).expect("valid")
    }

    fn steps(from: &str, to: &str) -> Vec<String> {
        let is = named(from).workers.into_iter().map(|worker| (worker.worker, worker)).collect();
        let mut merge = SourceMerge::default();
        merge.replace(Source::Config, named(to));
        let shown = |step: Step| match step {
            Step::Remove(worker) => format!("remove {}", worker.id),
            Step::Change { config, resubscribe } => format!("change {} {resubscribe}", config.worker.id),
            Step::Add(config) => format!("add {}", config.worker.id),
        };
        plan(&is, merge.merged()).into_iter().map(shown).collect()
    }

    #[test]
    fn a_plan_has_only_the_needed_steps() {
        let one = r#"[{"id": 1, "model": "m", "endpoint": "tcp://h:1"}]"#;
        for (to, done) in [
            (one, &[][..]),
            ("[]", &["remove 1"]),
            (r#"[{"id": 1, "model": "m", "endpoint": "tcp://h:1", "weight": 3}]"#, &["change 1 false"]),
            (r#"[{"id": 1, "model": "m", "endpoint": "tcp://h:1", "draining": true}]"#, &["change 1 false"]),
            (r#"[{"id": 1, "model": "m", "endpoint": "tcp://h:2"}]"#, &["change 1 true"]),
            (r#"[{"id": 1, "model": "m", "endpoint": "tcp://h:1", "topic": "t"}]"#, &["change 1 true"]),
            (r#"[{"id": 1, "model": "n", "endpoint": "tcp://h:1"}]"#, &["remove 1", "add 1"]),
            (r#"[{"id": 1, "model": "m"}]"#, &["remove 1", "add 1"]),
            (r#"[{"id": 2, "model": "m", "endpoint": "tcp://h:1"}]"#, &["remove 1", "add 2"]),
        ] {
            assert_eq!(steps(one, to), done, "{to}");
        }
    }
}
