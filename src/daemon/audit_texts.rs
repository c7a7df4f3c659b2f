//! Workers and configurations in the audit log: as text, before and after a change.

use crate::audit::ABSENT;
use crate::config::{Difference, FieldDifference, WorkerConfig, WorkerDifference, fields_of_worker};

/// The fields of a worker that are set, `field=value`; [`ABSENT`] = there is no worker.
pub(super) fn worker(config: Option<&WorkerConfig>) -> String {
    let set =
        |config| fields_of_worker(config).into_iter().filter_map(|(name, value)| Some(format!("{name}={}", value?)));
    config.map_or_else(|| ABSENT.to_owned(), |config| set(config).collect::<Vec<_>>().join(" "))
}

/// The fields in which a worker differs, before and after.
pub(super) fn worker_fields(before: &WorkerConfig, after: &WorkerConfig) -> (String, String) {
    let pairs =
        fields_of_worker(before).into_iter().zip(fields_of_worker(after)).filter(|(before, after)| before != after);
    let text = |name: &str, value: Option<String>| format!("{name}={}", value.as_deref().unwrap_or(ABSENT));
    let texts = pairs.map(|((name, before), (_, after))| (text(name, before), text(name, after)));
    let (before, after): (Vec<_>, Vec<_>) = texts.unzip();
    (before.join(" "), after.join(" "))
}

/// What differs, before and after. The numbers of workers come first: a line may have no room for all of them.
pub(super) fn difference(difference: &Difference) -> (String, String) {
    let (mut before, mut after) = (Vec::new(), Vec::new());
    let mut add = |name: &str, was: &str, is: &str| {
        before.push(format!("{name}={was}"));
        after.push(format!("{name}={is}"));
    };
    let Difference { added, removed, changed, .. } = difference;
    for (name, workers) in [("added", added.len()), ("removed", removed.len()), ("changed", changed.len())] {
        if workers > 0 {
            add(&format!("workers_{name}"), "0", &workers.to_string());
        }
    }
    let value = |value: &Option<String>| value.clone().unwrap_or_else(|| ABSENT.to_owned());
    for FieldDifference { field, before, after, .. } in &difference.fields {
        add(field, &value(before), &value(after));
    }
    added.iter().for_each(|worker| add(&format!("worker {worker}"), ABSENT, "present"));
    removed.iter().for_each(|worker| add(&format!("worker {worker}"), "present", ABSENT));
    for WorkerDifference { worker, fields } in changed {
        for FieldDifference { field, before, after, .. } in fields {
            add(&format!("worker {worker} {field}"), &value(before), &value(after));
        }
    }
    (before.join(" "), after.join(" "))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{Config, Flags, parse};

    fn read(text: &str) -> Config {
        let text = format!("[[space]]\nmodel = \"m\"\n{text}");
        parse("t", &text, &Flags::default()).unwrap_or_else(|problems| panic!("{problems}"))
    }

    #[test]
    fn a_difference_is_two_texts_with_the_same_names() {
        let was = read("[[worker]]\nid = 1\n[[worker]]\nid = 2\n");
        let is = read("[policy]\ntemperature = 1\n[[worker]]\nid = 2\ndraining = true\n[[worker]]\nid = 3\n");
        let (before, after) = difference(&was.difference(&is));
        let counted =
            |workers: u32| format!("workers_added={workers} workers_removed={workers} workers_changed={workers} ");
        let (before, after) =
            (before.strip_prefix(&counted(0)).expect("numbers"), after.strip_prefix(&counted(1)).expect("numbers"));
        assert_eq!(before, "policy.temperature=0.0 worker 3/0=absent worker 1/0=present worker 2/0 draining=false");
        assert_eq!(after, "policy.temperature=1.0 worker 3/0=present worker 1/0=absent worker 2/0 draining=true");
        let texts = worker_fields(&was.workers[1], &is.workers[0]);
        assert_eq!(texts, ("draining=false".to_owned(), "draining=true".to_owned()));
        assert!(worker(None) == ABSENT && worker(Some(&is.workers[0])).contains("draining=true"));
    }
}
