//! What a configuration says, as text: every field that differs from its default. A daemon tells it on its admin socket, and
//! a difference of two configurations names fields and values by it.

use std::fmt::Write as _;

use super::document::{self, Draft, EachTable, TableDraft};
use super::field::{Preset, Section};
use super::fields;
use super::problem::{Location, Problem, Problems};
use super::{Config, check};

/// One table and those of its fields that differ from their defaults.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct WrittenTable {
    /// `serve`, `space[0]`, `space[0].policy`, `worker[3]`: numbers are from 0, in the order of the file.
    pub path: String,
    /// Names and values; values in TOML, in one notation of several.
    pub fields: Vec<(String, String)>,
}

impl WrittenTable {
    /// The value of a field; `None` = it has its default.
    #[must_use]
    pub fn value(&self, field: &str) -> Option<&str> {
        self.fields.iter().find(|(name, _)| name == field).map(|(_, value)| value.as_str())
    }
}

/// The tables of a draft that have such a field, in the order of the example file.
pub(super) fn tables(draft: &mut Draft) -> Vec<WrittenTable> {
    let mut tables = Tables(Vec::new());
    draft.each_table(&mut tables);
    tables.0
}

struct Tables(Vec<WrittenTable>);

impl EachTable for Tables {
    fn table<T: Default>(&mut self, section: &'static Section<T>, entry: &mut TableDraft<T>) {
        // A space's own policy is compared with [policy], so it keeps what is a default there.
        let keeps_defaults = entry.path != section.name && section.name == fields::POLICY.name;
        let differs = |name: &str, value: &str| keeps_defaults || default_of(section, name).as_deref() != Some(value);
        let written = entry.values().iter().filter(|(name, value)| differs(name, value));
        let mut fields: Vec<_> = written.map(|(name, value)| ((*name).to_owned(), value.clone())).collect();
        if !fields.is_empty() {
            fields.sort_by_key(|(name, _)| section.names().position(|known| known == name));
            self.0.push(WrittenTable { path: entry.path.clone(), fields });
        }
    }
}

/// The default of a field in TOML; `None` = it has none.
pub(super) fn default_of<T>(section: &Section<T>, field: &str) -> Option<String> {
    let field = section.field(field)?;
    match field.preset {
        Preset::Value(text) => Some(field.kind.toml_of_text(text)),
        Preset::Required(_) | Preset::Absent(_) => None,
    }
}

/// Tables as a document.
fn document_of(tables: &[WrittenTable]) -> String {
    let mut text = String::new();
    for table in tables {
        let header = match table.path.strip_suffix(".policy") {
            Some(_) => format!("[{}.{}]", fields::SPACE.name, fields::POLICY.name),
            None => match table.path.split_once('[') {
                Some((name, _)) => format!("[[{name}]]"),
                None => format!("[{}]", table.path),
            },
        };
        // Writing to a string cannot fail.
        let _ = writeln!(text, "{header}");
        table.fields.iter().for_each(|(name, value)| {
            let _ = writeln!(text, "{name} = {value}");
        });
    }
    text
}

impl Config {
    /// The configuration of a daemon that told `tables`. It may join fields of its start with fields that it read later, so
    /// relations between fields are not checked again.
    ///
    /// # Errors
    /// A table or field that this release does not know, or a value that it does not accept.
    pub fn told(source: &str, tables: Vec<WrittenTable>) -> Result<Self, Problems> {
        let mut problems = Vec::new();
        let draft = document::read(&document_of(&tables), &mut problems);
        match draft {
            Some(draft) if problems.is_empty() => Ok(Self { written: tables, ..check::check(&draft, &mut Vec::new()) }),
            _ => {
                // Lines of the made document mean nothing to its reader.
                let list = problems.into_iter().map(|problem| Problem { location: Location::Document, ..problem });
                Err(Problems { source: source.to_owned(), list: list.collect() })
            }
        }
    }

    /// The configuration of a daemon that runs with `self` and takes over what a reload may change from `next`.
    #[must_use]
    pub fn reloaded(&self, next: &Self) -> Self {
        let mut is = self.clone();
        is.serve.access.clone_from(&next.serve.access);
        is.admin.access.clone_from(&next.admin.access);
        is.policy.weights = next.policy.weights;
        is.policy.spaces.clone_from(&next.policy.spaces);
        is.shadow.clone_from(&next.shadow);
        is.discovery.grace_ms = next.discovery.grace_ms;
        is.routers.peers.clone_from(&next.routers.peers);
        is.workers.clone_from(&next.workers);
        is.servers.clone_from(&next.servers);
        is.written = merged(&self.written, &next.written);
        is
    }

    /// The same after an order that set fields of every space's policy, each `field=value`.
    #[must_use]
    pub fn with_policy_settings(mut self, settings: &[String]) -> Self {
        let pairs = settings.iter().filter_map(|setting| setting.split_once('='));
        for (name, text) in pairs.map(|(name, text)| (name.trim(), text.trim())) {
            let Some(field) = fields::POLICY.field(name) else { continue };
            let value = field.kind.toml_of_text(text);
            for table in self.written.iter_mut().filter(|table| is_policy(&table.path)) {
                table.fields.retain(|(of, _)| of != name);
            }
            if default_of(&fields::POLICY, name).as_ref() != Some(&value) {
                put(&mut self.written, fields::POLICY.name, name, value);
            }
        }
        self.written.retain(|table| !table.fields.is_empty());
        self
    }
}

fn is_policy(path: &str) -> bool {
    path == fields::POLICY.name || path.ends_with(".policy")
}

/// Sets a field of a table, which is made if it is not there.
fn put(tables: &mut Vec<WrittenTable>, path: &str, name: &str, value: String) {
    let field = (name.to_owned(), value);
    match tables.iter_mut().find(|table| table.path == path) {
        Some(table) => table.fields.push(field),
        None => {
            let at = tables.iter().position(|table| table.path.contains('[')).unwrap_or(tables.len());
            tables.insert(at, WrittenTable { path: path.to_owned(), fields: vec![field] });
        }
    }
}

/// Fields that a reload takes over as in `is`, all others as in `was`.
fn merged(was: &[WrittenTable], is: &[WrittenTable]) -> Vec<WrittenTable> {
    let part = |table: &WrittenTable, live: bool| {
        let fields = table.fields.iter().filter(|(name, _)| is_live(&table.path, name) == live);
        WrittenTable { path: table.path.clone(), fields: fields.cloned().collect() }
    };
    // A reload takes over all of a worker. There may be thousands, so no table of theirs is looked for.
    let is_worker = |table: &&WrittenTable| table.path.starts_with("worker[");
    let mut merged: Vec<_> = was.iter().filter(|table| !is_worker(table)).map(|table| part(table, false)).collect();
    for table in is.iter().filter(|table| !is_worker(table)).map(|table| part(table, true)) {
        match merged.iter_mut().find(|other| other.path == table.path) {
            Some(other) => other.fields.extend(table.fields),
            None => merged.push(table),
        }
    }
    merged.retain(|table| !table.fields.is_empty());
    merged.sort_by_key(|table| order(&table.path));
    merged.extend(is.iter().filter(is_worker).cloned());
    merged
}

/// Where a table stands in the example file.
fn order(path: &str) -> (Option<usize>, usize, bool) {
    let name = path.split(['[', '.']).next().unwrap_or(path);
    let number = path.split_once('[').and_then(|(_, rest)| rest.split(']').next()?.parse().ok()).unwrap_or(0);
    (document::sections().iter().position(|(known, _)| *known == name), number, path.ends_with(".policy"))
}

/// Whether a reload takes over a field of the table with this path.
pub(super) fn is_live(path: &str, field: &str) -> bool {
    super::catalog::table(path).is_some_and(|table| table.field(field).is_some_and(|field| field.is_live))
}
