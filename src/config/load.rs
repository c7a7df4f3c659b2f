//! Loads the configuration from a file, from the environment and from flags. Also applies `field=value` settings to a
//! policy.

use std::path::{Path, PathBuf};

use super::Config;
use super::check;
use super::document::{self, Draft, TableDraft};
use super::field::Section;
use super::fields::{self, WorkerDraft};
use super::overrides::{self, Environment, Override};
use super::problem::{Location, Problem, Problems};
use super::written;
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

/// Reads a configuration from a file, if there is one, from the environment, and from flags. The environment wins over the
/// file, and flags win over both.
///
/// # Errors
/// Every problem, in the order of the lines.
pub fn load(path: Option<&Path>, environment: &Environment, flags: &Flags) -> Result<Config, Problems> {
    let Some(path) = path else {
        let mut problems = Vec::new();
        let overrides = set_over(environment, flags, &mut problems);
        return finish("command line", Some(Draft::preset()), problems, (overrides, &flags.workers));
    };
    let source = path.display().to_string();
    parse_over(&source, &text_of(path)?, environment, flags)
}

/// The text of a configuration file.
///
/// # Errors
/// It cannot be read, or is not UTF-8.
pub fn text_of(path: &Path) -> Result<String, Problems> {
    let fail = |problem| Err(Problems { source: path.display().to_string(), list: vec![problem] });
    match std::fs::read(path).map(String::from_utf8) {
        Ok(Ok(text)) => Ok(text),
        Ok(Err(error)) => {
            let before = &error.as_bytes()[..error.utf8_error().valid_up_to()];
            let line = before.iter().filter(|byte| **byte == b'\n').count() as u32 + 1;
            let column = before.iter().rev().take_while(|byte| **byte != b'\n').count() as u32 + 1;
            fail(Problem::new(Location::Line { line, column }, "", "syntax: the file is not UTF-8"))
        }
        Err(error) => fail(Problem::new(Location::Document, "", format!("cannot be read: {error}"))),
    }
}

/// Reads a configuration from the text of a file and from flags, without an environment. `source` names the file in
/// problems.
///
/// # Errors
/// Every problem, in the order of the lines.
pub fn parse(source: &str, text: &str, flags: &Flags) -> Result<Config, Problems> {
    parse_over(source, text, &Environment::default(), flags)
}

/// As [`parse`], with an environment between file and flags.
///
/// # Errors
/// Every problem, in the order of the lines; those of variables come last.
pub fn parse_over(source: &str, text: &str, environment: &Environment, flags: &Flags) -> Result<Config, Problems> {
    let mut problems = Vec::new();
    let draft = document::read_incomplete(text, &mut problems);
    let overrides = set_over(environment, flags, &mut problems);
    finish(source, draft, problems, (overrides, &flags.workers))
}

/// As [`parse`], of a text over which another process sets fields: what that process would read.
///
/// # Errors
/// Every problem, in the order of the lines.
pub fn parse_as(source: &str, text: &str, overrides: &[Override]) -> Result<Config, Problems> {
    let mut problems = Vec::new();
    let draft = document::read_incomplete(text, &mut problems);
    finish(source, draft, problems, (overrides.to_vec(), &[]))
}

/// The default socket, of the daemon and of its clients.
#[must_use]
pub(crate) fn socket_default() -> PathBuf {
    Draft::preset().serve.value.socket
}

/// What environment and flags set over the file, in the order in which they win.
fn set_over(environment: &Environment, flags: &Flags, problems: &mut Vec<Problem>) -> Vec<Override> {
    let mut overrides = environment.overrides(problems);
    overrides.extend(flags.overrides());
    overrides
}

/// Makes a configuration of a document, of fields set over it, and of workers added to it.
fn finish(
    source: &str,
    draft: Option<Draft>,
    mut problems: Vec<Problem>,
    (overrides, workers): (Vec<Override>, &[String]),
) -> Result<Config, Problems> {
    let config = draft.map(|mut draft| {
        overrides::apply(&mut draft, &overrides, &mut problems);
        for text in workers {
            let worker = worker(draft.workers.len(), text, &mut problems);
            draft.workers.push(worker);
        }
        draft.note_missing(&mut problems);
        let written = written::tables(&mut draft);
        Config { written, overrides, ..check::check(&draft, &mut problems) }
    });
    match config {
        Some(config) if problems.is_empty() => Ok(config),
        _ => {
            problems.sort_by(|a, b| a.location.cmp(&b.location));
            Err(Problems { source: source.to_owned(), list: problems })
        }
    }
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
            entry.note(field, (location, field.kind.toml_of_text(text)), outcome, problems);
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
        for weight in ["delay_weight", "later_delay_weight", "output_delay_weight"] {
            assert!(policy_with(&Policy::default(), "t", &[format!("{weight}=1e308")]).is_err(), "{weight}");
        }
        let approximate = Policy { mode: Mode::Approximate, ..Policy::default() };
        assert!(policy_with(&approximate, "t", &["credit_decay=1"]).is_ok(), "the base policy's mode is not checked");
        assert_eq!(problems.list[0].nearest.as_deref(), Some("device_credit"));
    }
}
