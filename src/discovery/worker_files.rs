//! Files of workers over time. The merge keeps a file's last valid workers while the file is invalid, and for a grace
//! period after it is deleted: no change is reported meanwhile.

use std::collections::BTreeMap;
use std::path::PathBuf;

use crate::config::NamedWorkers;

/// The result of reading one file.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Seen {
    /// The file has not changed since the last check.
    Unchanged,
    /// Its current workers.
    Read(NamedWorkers),
    /// Why the file cannot be used.
    Unusable(String),
}

/// The state of one file.
#[derive(Clone, Debug, Default, PartialEq)]
struct FileState {
    /// Why it cannot be used now, if so.
    problem: Option<String>,
    /// When it went missing, milliseconds of the caller's clock.
    missing_since_ms: Option<u64>,
}

/// The files, by path.
#[derive(Debug, Default)]
pub(crate) struct Files {
    held: BTreeMap<PathBuf, FileState>,
}

/// The changes found by one check of all files.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct FilesChange {
    /// Files with changed workers; an empty list for a file whose grace period is over.
    pub changed: Vec<(PathBuf, NamedWorkers)>,
    /// Files with a new problem.
    pub unusable: Vec<(PathBuf, String)>,
    /// Files that went missing; their workers stay for the grace period.
    pub missing: Vec<PathBuf>,
    /// Files whose grace period is over.
    pub gone: Vec<PathBuf>,
}

impl Files {
    /// Applies one check of all files. `seen` has the files that exist.
    pub(crate) fn update(&mut self, seen: BTreeMap<PathBuf, Seen>, grace_ms: u64, now_ms: u64) -> FilesChange {
        let mut change = FilesChange::default();
        for (path, state) in &mut self.held {
            if !seen.contains_key(path) && state.missing_since_ms.is_none() {
                state.missing_since_ms = Some(now_ms);
                change.missing.push(path.clone());
            }
        }
        for (path, seen) in seen {
            let state = self.held.entry(path.clone()).or_default();
            state.missing_since_ms = None;
            match seen {
                Seen::Unchanged => {}
                Seen::Read(named) => {
                    state.problem = None;
                    change.changed.push((path, named));
                }
                Seen::Unusable(problem) => {
                    if state.problem.as_ref() != Some(&problem) {
                        state.problem = Some(problem.clone());
                        change.unusable.push((path, problem));
                    }
                }
            }
        }
        let over =
            |state: &FileState| state.missing_since_ms.is_some_and(|since| now_ms.saturating_sub(since) >= grace_ms);
        change.gone = self.held.iter().filter(|(_, state)| over(state)).map(|(path, _)| path.clone()).collect();
        for path in &change.gone {
            self.held.remove(path);
            change.changed.push((path.clone(), NamedWorkers::default()));
        }
        change
    }

    /// When the next grace period ends, milliseconds of the caller's clock.
    #[must_use]
    pub(crate) fn next_ms(&self, grace_ms: u64) -> Option<u64> {
        self.held.values().filter_map(|state| state.missing_since_ms).min().map(|since| since.saturating_add(grace_ms))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{FileFormat, SpaceConfig, parse_workers};

    fn named(id: u64) -> NamedWorkers {
        let spaces = [SpaceConfig { model: "m".into(), ..SpaceConfig::default() }];
        parse_workers("t", &format!(r#"{{"id": {id}}}"#), FileFormat::Json, &spaces).expect("valid")
    }

    fn update(files: &mut Files, seen: Option<Seen>, now_ms: u64) -> FilesChange {
        files.update(seen.into_iter().map(|seen| ("f".into(), seen)).collect(), 100, now_ms)
    }

    #[test]
    fn an_invalid_file_changes_nothing_and_is_reported_once() {
        let mut files = Files::default();
        assert_eq!(update(&mut files, Some(Seen::Read(named(1))), 0).changed, [("f".into(), named(1))]);
        let change = update(&mut files, Some(Seen::Unusable("torn".into())), 1);
        assert_eq!((change.changed, change.unusable), (vec![], vec![("f".into(), "torn".into())]));
        assert_eq!(update(&mut files, Some(Seen::Unusable("torn".into())), 2), FilesChange::default());
        assert!(files.held.values().all(|state| state.problem.as_deref() == Some("torn")));
        assert_eq!(update(&mut files, Some(Seen::Read(named(2))), 3).changed, [("f".into(), named(2))]);
        assert!(files.held.values().all(|state| state.problem.is_none()));
    }

    #[test]
    fn a_deleted_file_has_a_grace_period() {
        let mut files = Files::default();
        update(&mut files, Some(Seen::Read(named(1))), 0);
        assert_eq!(update(&mut files, None, 10).missing, [PathBuf::from("f")]);
        assert_eq!(files.next_ms(100), Some(110));
        assert_eq!(update(&mut files, None, 109), FilesChange::default());
        assert_eq!(update(&mut files, Some(Seen::Unchanged), 110), FilesChange::default(), "just in time");
        assert_eq!(files.next_ms(100), None);
        update(&mut files, None, 200);
        let change = update(&mut files, None, 300);
        assert_eq!((change.changed, change.gone), (vec![("f".into(), NamedWorkers::default())], vec!["f".into()]));
        assert_eq!(files.held.len(), 0);
    }
}
