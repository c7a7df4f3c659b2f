//! Overrides: fields that variables of the environment and command-line options set in place of the file. Options win.
//!
//! One rule gives each field its variable: [`VARIABLE_PREFIX`], the table and the field in upper case, with `__` between
//! them. A repeated table is followed by its number, from 0: `KVROUTED_CONFIG__SPACE__0__POLICY__MODE`. No name of a table
//! or field has two underscores in a row, so a variable names at most one field.

use super::document::{self, Draft, EachTable, TableDraft};
use super::field::Section;
use super::fields::{self, WorkerDraft};
use super::load::{Flags, set};
use super::problem::{Location, Problem, nearest};
use super::{PolicyConfig, SpaceConfig};
use crate::limits::{SPACES_MAX, WORKERS_MAX};

/// The prefix of every variable that sets a field. A variable with this prefix that names no field is an error.
pub const VARIABLE_PREFIX: &str = "KVROUTED_CONFIG__";

/// One field that a variable or an option sets.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Override {
    /// The variable or the option, as written.
    pub source: String,
    /// The table: `serve`, `space[0]`, `space[0].policy`, `worker[2]`.
    pub table: String,
    /// The field.
    pub field: String,
    /// Its value without quotes; lists are joined by `+`.
    pub text: String,
}

impl Override {
    /// Whether a variable of the environment sets it.
    #[must_use]
    pub fn is_variable(&self) -> bool {
        self.source.starts_with(VARIABLE_PREFIX)
    }

    fn location(&self) -> Location {
        match self.is_variable() {
            true => Location::Variable(self.source.clone()),
            false => Location::Flag(self.source.clone()),
        }
    }
}

/// The variables of an environment that set fields.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Environment {
    /// Names with [`VARIABLE_PREFIX`], and values; `None` = the value is not UTF-8.
    variables: Vec<(String, Option<String>)>,
}

impl Environment {
    /// The environment of this process.
    #[must_use]
    pub fn of_process() -> Self {
        let variables = std::env::vars_os().filter_map(|(name, value)| {
            let name = name.to_string_lossy().into_owned();
            name.starts_with(VARIABLE_PREFIX).then(|| (name, value.into_string().ok()))
        });
        Self { variables: variables.collect() }
    }

    /// An environment with these variables; those without the prefix are left out.
    #[must_use]
    pub fn of(variables: &[(&str, &str)]) -> Self {
        let ours = variables.iter().filter(|(name, _)| name.starts_with(VARIABLE_PREFIX));
        Self { variables: ours.map(|(name, value)| ((*name).to_owned(), Some((*value).to_owned()))).collect() }
    }

    /// The fields that the variables set: tables in the order of their numbers, each space before its policy. Adds a problem
    /// for each variable that names no field or whose value is not UTF-8.
    pub(super) fn overrides(&self, problems: &mut Vec<Problem>) -> Vec<Override> {
        let sections = document::sections();
        let mut named: Vec<(Place, Override)> = Vec::new();
        for (name, value) in &self.variables {
            let located = |message: &str| Problem::new(Location::Variable(name.clone()), "", message);
            let Some((place, field)) = named_by(name, &sections) else {
                let candidates = candidates(name, &sections);
                let near = nearest(name, candidates.iter().map(String::as_str));
                problems.push(located("names no field of the configuration").suggest(near));
                continue;
            };
            match value {
                None => problems.push(located("the value is not UTF-8")),
                Some(text) => {
                    let (source, table, text) = (name.clone(), place.path(), text.clone());
                    named.push((place, Override { source, table, field: field.to_owned(), text }));
                }
            }
        }
        named.sort_by(|(a, x), (b, y)| (a, &x.source).cmp(&(b, &y.source)));
        named.into_iter().map(|(_, set)| set).collect()
    }
}

/// A table of the configuration.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Place {
    name: &'static str,
    /// The number of a repeated table, from 0; `None` = the table is not repeated.
    number: Option<usize>,
    /// Whether this is the `[space.policy]` of the space with that number.
    is_policy: bool,
}

impl Place {
    fn path(self) -> String {
        let number = self.number.map_or_else(String::new, |number| format!("[{number}]"));
        let policy = if self.is_policy { ".policy" } else { "" };
        format!("{}{number}{policy}", self.name)
    }

    /// The table with this path.
    fn of_path(path: &str) -> Option<Self> {
        let names = document::sections().into_iter().map(|(name, _)| name);
        let (head, is_policy) = match path.strip_suffix(".policy") {
            Some(head) => (head, true),
            None => (path, false),
        };
        let (name, number) = match head.strip_suffix(']').and_then(|head| head.split_once('[')) {
            Some((name, number)) => (name, Some(number.parse().ok()?)),
            None => (head, None),
        };
        let name = names.into_iter().find(|known| *known == name)?;
        (is_repeated(name) == number.is_some() && (!is_policy || name == "space")).then_some(Self {
            name,
            number,
            is_policy,
        })
    }
}

fn is_repeated(table: &str) -> bool {
    table == fields::SPACE.name || table == fields::WORKER.name
}

/// The variable that sets a field. `table` is a path as in [`Override`].
#[must_use]
pub fn variable_of(table: &str, field: &str) -> String {
    let table = table.replace('[', "__").replace(']', "").replace('.', "__");
    format!("{VARIABLE_PREFIX}{table}__{field}").to_ascii_uppercase()
}

/// The table and the field that a variable names.
fn named_by(variable: &str, sections: &[document::SectionNames]) -> Option<(Place, &'static str)> {
    let parts: Vec<&str> = variable.strip_prefix(VARIABLE_PREFIX)?.split("__").collect();
    let (table, number, is_policy, field) = match parts.as_slice() {
        [table, field] => (*table, None, false, *field),
        [table, number, field] => (*table, Some(number.parse().ok()?), false, *field),
        ["SPACE", number, "POLICY", field] => ("SPACE", Some(number.parse().ok()?), true, *field),
        _ => return None,
    };
    let upper = |name: &&str, text: &str| name.to_ascii_uppercase() == text;
    let (name, names) = sections.iter().find(|(name, _)| upper(name, table))?;
    let names = match is_policy {
        true => &sections.iter().find(|(name, _)| *name == fields::POLICY.name)?.1,
        false => names,
    };
    let field = names.iter().find(|name| upper(name, field))?;
    let place = Place { name, number, is_policy };
    // A number has one notation: `0`, neither `00` nor `+0`.
    (is_repeated(name) == number.is_some() && variable_of(&place.path(), field) == variable).then_some((place, *field))
}

/// The variables that a misspelt one may mean: those of all fields, with the number that the misspelt one has.
fn candidates(variable: &str, sections: &[document::SectionNames]) -> Vec<String> {
    let number = variable.split("__").find_map(|part| part.parse::<usize>().ok()).unwrap_or(0);
    let of_table = |(name, names): &document::SectionNames| {
        let number = is_repeated(name).then_some(number);
        let path = Place { name, number, is_policy: false }.path();
        names.iter().map(|field| variable_of(&path, field)).collect::<Vec<_>>()
    };
    let of_spaces = format!("{}[{number}].policy", fields::SPACE.name);
    let policies = fields::POLICY.names().map(|field| variable_of(&of_spaces, field));
    sections.iter().flat_map(of_table).chain(policies).collect()
}

impl Flags {
    /// The fields that the options set. Options make a space only without a file, so that space is the first.
    pub(super) fn overrides(&self) -> Vec<Override> {
        let set = self.settings.iter().map(|setting| {
            let table = if setting.section == fields::SPACE.name { "space[0]" } else { setting.section };
            let (source, field) = (setting.flag.to_owned(), setting.field.to_owned());
            Override { source, table: table.to_owned(), field, text: setting.text.clone() }
        });
        set.collect()
    }
}

/// Sets fields of a draft, in this order. If an override names the next [[space]] or [[worker]], makes that table.
pub(super) fn apply(draft: &mut Draft, overrides: &[Override], problems: &mut Vec<Problem>) {
    for set in overrides {
        let path = || format!("{}.{}", set.table, set.field);
        let Some(place) = Place::of_path(&set.table) else {
            problems.push(Problem::new(set.location(), path(), "unknown table"));
            continue;
        };
        if let Err(message) = make(draft, place, &set.location()) {
            problems.push(Problem::new(set.location(), path(), message));
            continue;
        }
        if place.is_policy && fields::POLICY.field(&set.field).is_some_and(|field| !field.is_live()) {
            problems.push(Problem::new(set.location(), path(), document::GENERAL));
            continue;
        }
        let mut setting = SetField { place: set.table.clone(), set, problems };
        draft.each_table(&mut setting);
    }
    draft.rebase_space_policies();
}

/// Makes a repeated table if it is the next one. Any other table always exists.
fn make(draft: &mut Draft, place: Place, location: &Location) -> Result<(), String> {
    let Some(number) = place.number else { return Ok(()) };
    let is_space = place.name == fields::SPACE.name;
    let (there, max) = if is_space { (draft.spaces.len(), SPACES_MAX) } else { (draft.workers.len(), WORKERS_MAX) };
    if number > there || number >= max {
        return Err(format!(
            "there are {there} [[{}]] tables before it, so the next has the number {there}; at most {max} are allowed",
            place.name
        ));
    }
    if is_space {
        if number == there {
            draft.spaces.push(TableDraft::<SpaceConfig>::preset(&fields::SPACE, place.path(), location.clone()));
        }
        // A space of the file without a policy of its own has an empty one already.
        while draft.space_policies.len() <= number {
            let path = format!("space[{}].policy", draft.space_policies.len());
            draft.space_policies.push(TableDraft::<PolicyConfig>::preset(&fields::POLICY, path, Location::Document));
        }
    } else if number == there {
        draft.workers.push(TableDraft::<WorkerDraft>::preset(&fields::WORKER, place.path(), location.clone()));
    }
    Ok(())
}

/// Sets one field of the table with this path.
struct SetField<'a> {
    place: String,
    set: &'a Override,
    problems: &'a mut Vec<Problem>,
}

impl EachTable for SetField<'_> {
    fn table<T: Default>(&mut self, section: &'static Section<T>, entry: &mut TableDraft<T>) {
        if entry.path == self.place {
            let Override { field, text, .. } = self.set;
            set(section, entry, field, text, self.set.location(), self.problems);
        }
    }
}

/// Every variable that sets a field, with the field as `table.field`; of repeated tables those of the first.
#[cfg(test)]
fn all_variables() -> Vec<(String, String)> {
    struct All(Vec<(String, String)>);
    impl fields::EachSection for All {
        fn section<T: Default>(&mut self, section: &'static Section<T>) {
            let path = if section.repeated { format!("{}[0]", section.name) } else { section.name.to_owned() };
            let named = |name: &'static str| (variable_of(&path, name), format!("{path}.{name}"));
            self.0.extend(section.names().map(named));
        }
    }
    let mut all = All(Vec::new());
    fields::each_section(&mut all);
    all.0
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn each_field_has_a_variable_of_its_own_which_names_it() {
        let (all, sections) = (all_variables(), document::sections());
        let names: BTreeSet<&String> = all.iter().map(|(variable, _)| variable).collect();
        assert_eq!(names.len(), all.len(), "two fields share a variable");
        for (variable, field) in &all {
            let (place, name) = named_by(variable, &sections).unwrap_or_else(|| panic!("{variable} names nothing"));
            assert_eq!(format!("{}.{name}", place.path()), *field);
            assert_eq!(Place::of_path(&place.path()), Some(place), "{field}");
        }
        assert!(all.contains(&("KVROUTED_CONFIG__SERVE__SOCKET".to_owned(), "serve.socket".to_owned())));
        assert!(all.contains(&("KVROUTED_CONFIG__WORKER__0__ENDPOINT".to_owned(), "worker[0].endpoint".to_owned())));
    }

    #[test]
    fn a_variable_is_written_in_one_way() {
        let sections = document::sections();
        for bad in [
            "KVROUTED_CONFIG__serve__socket",
            "KVROUTED_CONFIG__SERVE_SOCKET",
            "KVROUTED_CONFIG__SERVE__0__SOCKET",
            "KVROUTED_CONFIG__WORKER__ID",
            "KVROUTED_CONFIG__WORKER__00__ID",
            "KVROUTED_CONFIG__WORKER__+1__ID",
            "KVROUTED_CONFIG__WORKER__0__POLICY__MODE",
            "KVROUTED_CONFIG__SPACE__0__POLICY",
            "KVROUTED_CONFIG__",
        ] {
            assert_eq!(named_by(bad, &sections), None, "{bad}");
        }
        let policy = named_by("KVROUTED_CONFIG__SPACE__12__POLICY__MODE", &sections);
        assert_eq!(policy.map(|(place, field)| (place.path(), field)), Some(("space[12].policy".into(), "mode")));
    }
}
