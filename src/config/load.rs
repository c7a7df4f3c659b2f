//! Loads the configuration from a file, from flags, or from both: flags win. Also applies `field=value` settings to a
//! policy.

use std::path::{Path, PathBuf};

use super::check;
use super::document::{self, Draft, TableDraft};
use super::field::Section;
use super::fields::{self, WorkerDraft};
use super::problem::{Location, Problem, Problems};
use super::{Config, SpaceConfig};
use crate::route::{Mode, Policy};

/// One field set by a flag.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Setting {
    /// The flag, as written: `--socket`.
    pub flag: &'static str,
    /// The field's table: `serve` and so on, or `space` for the one space that flags can make.
    pub section: &'static str,
    /// The field's name in that table.
    pub field: &'static str,
    /// Its value, without quotes.
    pub text: String,
}

/// The configuration fields that the command line sets.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Flags {
    /// Single fields.
    pub settings: Vec<Setting>,
    /// Workers, each `field=value,field=value` with the fields of `[[worker]]`; lists are joined by `+`.
    pub workers: Vec<String>,
}

/// Reads a configuration from a file, if there is one, and from flags.
///
/// # Errors
/// Every problem, in the order of the lines.
pub fn load(path: Option<&Path>, flags: &Flags) -> Result<Config, Problems> {
    let Some(path) = path else {
        return finish("command line", Some(Draft::preset()), Vec::new(), flags);
    };
    let source = path.display().to_string();
    match std::fs::read(path).map(String::from_utf8) {
        Ok(Ok(text)) => parse(&source, &text, flags),
        Ok(Err(error)) => {
            let before = &error.as_bytes()[..error.utf8_error().valid_up_to()];
            let line = before.iter().filter(|byte| **byte == b'\n').count() as u32 + 1;
            let column = before.iter().rev().take_while(|byte| **byte != b'\n').count() as u32 + 1;
            let problem = Problem::new(Location::Line { line, column }, "", "syntax: the file is not UTF-8");
            Err(Problems { source, list: vec![problem] })
        }
        Err(error) => {
            let problem = Problem::new(Location::Document, "", format!("cannot be read: {error}"));
            Err(Problems { source, list: vec![problem] })
        }
    }
}

/// Reads a configuration from the text of a file and from flags. `source` names the file in problems.
///
/// # Errors
/// Every problem, in the order of the lines.
pub fn parse(source: &str, text: &str, flags: &Flags) -> Result<Config, Problems> {
    let mut problems = Vec::new();
    let draft = document::read(text, &mut problems);
    finish(source, draft, problems, flags)
}

/// The default socket, of the daemon and of its clients.
#[must_use]
pub(crate) fn socket_default() -> PathBuf {
    Draft::preset().serve.value.socket
}

fn finish(source: &str, draft: Option<Draft>, mut problems: Vec<Problem>, flags: &Flags) -> Result<Config, Problems> {
    let config = draft.map(|mut draft| {
        apply_flags(&mut draft, flags, &mut problems);
        check::check(&draft, &mut problems)
    });
    match config {
        Some(config) if problems.is_empty() => Ok(config),
        _ => {
            problems.sort_by(|a, b| a.location.cmp(&b.location));
            Err(Problems { source: source.to_owned(), list: problems })
        }
    }
}

fn apply_flags(draft: &mut Draft, flags: &Flags, problems: &mut Vec<Problem>) {
    let mut space: Option<TableDraft<SpaceConfig>> = None;
    for setting in &flags.settings {
        match setting.section {
            "serve" => apply(&fields::SERVE, &mut draft.serve, setting, problems),
            "admin" => apply(&fields::ADMIN, &mut draft.admin, setting, problems),
            "metrics" => apply(&fields::METRICS, &mut draft.metrics, setting, problems),
            "http" => apply(&fields::HTTP, &mut draft.http, setting, problems),
            "log" => apply(&fields::LOG, &mut draft.log, setting, problems),
            "ingest" => apply(&fields::INGEST, &mut draft.ingest, setting, problems),
            "booking" => apply(&fields::BOOKING, &mut draft.booking, setting, problems),
            "process" => apply(&fields::PROCESS, &mut draft.process, setting, problems),
            "sandbox" => apply(&fields::SANDBOX, &mut draft.sandbox, setting, problems),
            "snapshot" => apply(&fields::SNAPSHOT, &mut draft.snapshot, setting, problems),
            "journal" => apply(&fields::JOURNAL, &mut draft.journal, setting, problems),
            "shadow" => apply(&fields::SHADOW, &mut draft.shadow, setting, problems),
            "policy" => apply(&fields::POLICY, &mut draft.policy, setting, problems),
            "relay" => apply(&fields::RELAY, &mut draft.relay, setting, problems),
            "discovery" => apply(&fields::DISCOVERY, &mut draft.discovery, setting, problems),
            "space" => {
                let entry = space.get_or_insert_with(|| {
                    let path = format!("space[{}]", draft.spaces.len());
                    TableDraft::preset(&fields::SPACE, path, Location::Flag(setting.flag.to_owned()))
                });
                apply(&fields::SPACE, entry, setting, problems);
            }
            other => {
                let location = Location::Flag(setting.flag.to_owned());
                problems.push(Problem::new(location, format!("{other}.{}", setting.field), "unknown table"));
            }
        }
    }
    if let Some(space) = space {
        space.note_missing(&fields::SPACE, problems);
        draft.spaces.push(space);
    }
    for text in &flags.workers {
        let worker = worker(draft.workers.len(), text, problems);
        draft.workers.push(worker);
    }
}

fn apply<T>(section: &Section<T>, entry: &mut TableDraft<T>, setting: &Setting, problems: &mut Vec<Problem>) {
    let location = Location::Flag(setting.flag.to_owned());
    set(section, entry, setting.field, &setting.text, location, problems);
}

pub(super) fn set<T>(
    section: &Section<T>,
    entry: &mut TableDraft<T>,
    name: &str,
    text: &str,
    location: Location,
    problems: &mut Vec<Problem>,
) {
    match section.field(name) {
        Some(field) => {
            let outcome = field.kind.set_text(&mut entry.value, text);
            entry.note(field, location, outcome, problems);
        }
        None => problems.push(document::unknown_field(&document::sections(), section, &entry.path, name, location)),
    }
}

/// Reads one `--worker id=1,endpoint=tcp://host:port`.
fn worker(at: usize, text: &str, problems: &mut Vec<Problem>) -> TableDraft<WorkerDraft> {
    let location = Location::Flag(format!("--worker {text}"));
    let mut entry = TableDraft::preset(&fields::WORKER, format!("worker[{at}]"), location.clone());
    for pair in text.split(',').filter(|pair| !pair.trim().is_empty()) {
        let Some((name, value)) = pair.split_once('=') else {
            problems.push(Problem::new(location.clone(), entry.path_of(pair.trim()), "expected field=value"));
            continue;
        };
        let name = name.trim();
        if entry.written(name).is_some() {
            problems.push(Problem::new(location.clone(), entry.path_of(name), "is set twice"));
            continue;
        }
        set(&fields::WORKER, &mut entry, name, value.trim(), location.clone(), problems);
    }
    entry.note_missing(&fields::WORKER, problems);
    entry
}

/// `base` with settings over it, each `field=value` with a field of `[policy]`. `source` names the settings in
/// problems.
///
/// # Errors
/// Every problem with the settings.
pub(crate) fn policy_with(base: &Policy, source: &str, settings: &[impl AsRef<str>]) -> Result<Policy, Problems> {
    let mut problems = Vec::new();
    let mut entry = TableDraft::preset(&fields::POLICY, "policy".to_owned(), Location::Document);
    entry.value.weights = *base;
    for setting in settings {
        let setting = setting.as_ref();
        let location = Location::Flag(setting.to_owned());
        match setting.split_once('=') {
            None => problems.push(Problem::new(location, "policy", "expected field=value")),
            Some(("seed", _)) => {
                problems.push(Problem::new(
                    location,
                    "policy.seed",
                    "is the same for all policies; set it in [policy]",
                ));
            }
            Some((name, value)) => {
                set(&fields::POLICY, &mut entry, name.trim(), value.trim(), location.clone(), &mut problems);
                if name.trim() == "mode" && entry.value.weights.mode == Mode::Approximate {
                    let message = "approximate needs the predictions of its own decisions, which recorded decisions do not have; use another mode";
                    problems.push(Problem::new(location, "policy.mode", message));
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
    fn settings_replace_fields_of_the_base_policy() {
        let base = Policy { device_credit: 2.0, credit_decay: 0.5, ..Policy::default() };
        let policy = policy_with(&base, "t", &["device_credit = 0.25", "track_active_blocks=false"]).unwrap();
        assert_eq!(policy, Policy { device_credit: 0.25, track_active_blocks: false, ..base });
        assert_eq!(policy_with(&base, "t", &[""; 0]).unwrap(), base);
    }

    #[test]
    fn every_wrong_setting_is_named() {
        let wrong = ["device_credits=1", "credit_decay=-1", "seed=3", "nothing", "mode=approximate"];
        let problems = policy_with(&Policy::default(), "t", &wrong).unwrap_err();
        assert_eq!(problems.list.len(), wrong.len(), "{problems}");
        let approximate = Policy { mode: Mode::Approximate, ..Policy::default() };
        assert!(policy_with(&approximate, "t", &["credit_decay=1"]).is_ok(), "the base policy's mode is not checked");
        assert_eq!(problems.list[0].nearest.as_deref(), Some("device_credit"));
    }
}
