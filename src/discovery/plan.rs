//! What has to be done for the fleet to be as the directory says.

use std::collections::BTreeMap;

use super::directory::Merged;
use crate::config::WorkerConfig;
use crate::ids::Worker;

/// One change of the fleet.
#[derive(Clone, Debug, PartialEq)]
pub enum Step {
    /// A worker goes.
    Remove(Worker),
    /// A worker stays and its record changes.
    Change {
        /// What it is from now on.
        config: WorkerConfig,
        /// Whether its events come from elsewhere now.
        restream: bool,
    },
    /// A worker comes.
    Add(WorkerConfig),
}

/// The steps from who there is to who there shall be, those that make room first.
///
/// A worker that changes its space, or that begins or ceases to publish events, goes and comes as another.
#[must_use]
pub fn plan(is: &BTreeMap<Worker, WorkerConfig>, shall: &Merged) -> Vec<Step> {
    let (mut removes, mut changes, mut adds) = (Vec::new(), Vec::new(), Vec::new());
    removes.extend(is.keys().filter(|worker| !shall.workers.contains_key(worker)).map(|worker| Step::Remove(*worker)));
    for (worker, (_, config)) in &shall.workers {
        match is.get(worker) {
            Some(was) if was == config => {}
            Some(was) if was.space == config.space && was.events.is_some() == config.events.is_some() => {
                changes.push(Step::Change { config: config.clone(), restream: was.events != config.events });
            }
            Some(_) => {
                removes.push(Step::Remove(*worker));
                adds.push(Step::Add(config.clone()));
            }
            None => adds.push(Step::Add(config.clone())),
        }
    }
    // A restream may want an endpoint that another lets go of: engines' sockets take any number of subscribers.
    removes.into_iter().chain(changes).chain(adds).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{FileFormat, NamedWorkers, SpaceConfig, parse_workers};
    use crate::discovery::{Directory, Source};

    fn named(json: &str) -> NamedWorkers {
        let spaces = ["m", "n"].map(|model| SpaceConfig { model: model.into(), ..SpaceConfig::default() });
        parse_workers("t", json, FileFormat::Json, &spaces).expect("valid")
    }

    fn steps(from: &str, to: &str) -> Vec<String> {
        let is = named(from).workers.into_iter().map(|worker| (worker.worker, worker)).collect();
        let mut directory = Directory::default();
        directory.say(Source::Config, named(to));
        let said = |step: Step| match step {
            Step::Remove(worker) => format!("remove {}", worker.id),
            Step::Change { config, restream } => format!("change {} {restream}", config.worker.id),
            Step::Add(config) => format!("add {}", config.worker.id),
        };
        plan(&is, directory.merged()).into_iter().map(said).collect()
    }

    #[test]
    fn the_least_is_done() {
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
