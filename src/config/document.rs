//! The first step: the document, walked with its spans along the field table, becomes a draft.
//!
//! `toml_edit` stops at a document's first syntax error. A line that cannot be read is noted, taken out
//! and the document read again, so that one run lists them all.

use toml_edit::{Document, DocumentMut, Item, TableLike, Value};

use super::field::{Fault, Field, Preset, Section, Written};
use super::fields::{self, WorkerDraft};
use super::problem::{Place, Problem, nearest};
use super::{
    AdminConfig, BookingConfig, DiscoveryConfig, HttpConfig, IngestConfig, JournalConfig, LogConfig, MetricsConfig,
    PolicyConfig, RelayConfig, ServeConfig, ShadowConfig, SnapshotConfig, SpaceConfig,
};
use crate::limits::{PROBLEMS_MAX, WORKERS_MAX};

/// A document with more unreadable lines than this is not a configuration; the rest is not listed.
const SYNTAX_ERRORS_MAX: usize = 64;

/// Stands, with a number, for a header that could not be read, so that the fields under it are not taken for
/// the table's before.
const LOST_HEADER: &str = "unreadable header ";

/// One table of the document: its values, and where each was written.
#[derive(Debug)]
pub(super) struct Entry<T> {
    pub(super) value: T,
    /// How its fields are named in problems: `serve`, `worker[2]`.
    pub(super) path: String,
    /// Where the table starts.
    pub(super) head: Place,
    places: Vec<(&'static str, Place)>,
    refused: Vec<&'static str>,
}

impl<T: Default> Entry<T> {
    /// A table that nobody has written: every field at its preset.
    pub(super) fn preset(section: &Section<T>, path: String, head: Place) -> Self {
        let mut value = T::default();
        for field in section.fields {
            if let Preset::Value(text) = field.preset {
                let set = field.kind.set_text(&mut value, text);
                debug_assert!(set.is_ok(), "the preset of {}.{} is refused: {set:?}", section.name, field.name);
            }
        }
        Self { value, path, head, places: Vec::new(), refused: Vec::new() }
    }
}

impl<T> Entry<T> {
    /// Where a field was written, else where its table starts.
    pub(super) fn place(&self, field: &str) -> Place {
        self.written(field).unwrap_or(&self.head).clone()
    }

    /// Where a field was written, if it was.
    pub(super) fn written(&self, field: &str) -> Option<&Place> {
        self.places.iter().find(|(name, _)| *name == field).map(|(_, place)| place)
    }

    /// Whether a field was written with a value that was refused, so that nothing follows from it.
    pub(super) fn is_refused(&self, field: &str) -> bool {
        self.refused.contains(&field)
    }

    pub(super) fn path_of(&self, field: &str) -> String {
        format!("{}.{field}", self.path)
    }

    /// A problem with one field's value.
    pub(super) fn problem(&self, field: &str, message: impl Into<String>) -> Problem {
        Problem::new(self.place(field), self.path_of(field), message)
    }

    /// Notes what came of setting a field.
    pub(super) fn note(
        &mut self,
        field: &Field<T>,
        place: Place,
        outcome: Result<(), Fault>,
        problems: &mut Vec<Problem>,
    ) {
        self.places.retain(|(name, _)| *name != field.name);
        self.places.push((field.name, place.clone()));
        self.refused.retain(|name| *name != field.name);
        if let Err(fault) = outcome {
            self.refused.push(field.name);
            let problem = Problem::new(place, self.path_of(field.name), fault.message);
            problems.push(problem.suggest(fault.nearest.as_deref()));
        }
    }

    /// Notes every required field that was not written.
    pub(super) fn note_missing(&self, section: &Section<T>, problems: &mut Vec<Problem>) {
        for field in section.fields {
            if let Preset::Required(example) = field.preset
                && self.written(field.name).is_none()
            {
                let message = format!("is missing, e.g. {} = {}", field.name, super::example::render(field, example));
                problems.push(Problem::new(self.head.clone(), self.path_of(field.name), message));
            }
        }
    }
}

/// The whole document, every field accepted or at its preset.
#[derive(Debug)]
pub(super) struct Draft {
    pub(super) serve: Entry<ServeConfig>,
    pub(super) admin: Entry<AdminConfig>,
    pub(super) metrics: Entry<MetricsConfig>,
    pub(super) http: Entry<HttpConfig>,
    pub(super) log: Entry<LogConfig>,
    pub(super) ingest: Entry<IngestConfig>,
    pub(super) booking: Entry<BookingConfig>,
    pub(super) snapshot: Entry<SnapshotConfig>,
    pub(super) journal: Entry<JournalConfig>,
    pub(super) shadow: Entry<ShadowConfig>,
    pub(super) policy: Entry<PolicyConfig>,
    pub(super) discovery: Entry<DiscoveryConfig>,
    pub(super) relay: Entry<RelayConfig>,
    pub(super) spaces: Vec<Entry<SpaceConfig>>,
    /// `[space.policy]`, by space as far as they are listed: what stands there over what stands in `[policy]`.
    pub(super) space_policies: Vec<Entry<PolicyConfig>>,
    pub(super) workers: Vec<Entry<WorkerDraft>>,
}

/// The one table within a table: of a space, what differs for it.
const SPACE_POLICY: (&str, &str) = ("space", "policy");

fn preset<T: Default>(section: &Section<T>) -> Entry<T> {
    Entry::preset(section, section.name.to_owned(), Place::Document)
}

impl Draft {
    /// An empty document.
    pub(super) fn preset() -> Self {
        Self {
            serve: preset(&fields::SERVE),
            admin: preset(&fields::ADMIN),
            metrics: preset(&fields::METRICS),
            http: preset(&fields::HTTP),
            log: preset(&fields::LOG),
            ingest: preset(&fields::INGEST),
            booking: preset(&fields::BOOKING),
            snapshot: preset(&fields::SNAPSHOT),
            journal: preset(&fields::JOURNAL),
            shadow: preset(&fields::SHADOW),
            policy: preset(&fields::POLICY),
            discovery: preset(&fields::DISCOVERY),
            relay: preset(&fields::RELAY),
            spaces: Vec::new(),
            space_policies: Vec::new(),
            workers: Vec::new(),
        }
    }
}

/// Every table's name, and which fields it has.
fn sections() -> [(&'static str, Vec<&'static str>); 15] {
    fn of<T>(section: &Section<T>) -> (&'static str, Vec<&'static str>) {
        (section.name, section.names().collect())
    }
    [
        of(&fields::SERVE),
        of(&fields::ADMIN),
        of(&fields::METRICS),
        of(&fields::HTTP),
        of(&fields::LOG),
        of(&fields::INGEST),
        of(&fields::BOOKING),
        of(&fields::SNAPSHOT),
        of(&fields::JOURNAL),
        of(&fields::SHADOW),
        of(&fields::POLICY),
        of(&fields::DISCOVERY),
        of(&fields::RELAY),
        of(&fields::SPACE),
        of(&fields::WORKER),
    ]
}

/// Reads a document into a draft; what is wrong goes to `problems`. `None` where lines were so broken that the
/// draft as a whole means nothing; its tables have been looked at where they could be.
pub(super) fn read(text: &str, problems: &mut Vec<Problem>) -> Option<Draft> {
    let mut readable = text.to_owned();
    let mut lost_headers = 0;
    let document = loop {
        let error = match Document::parse(readable.clone()) {
            Ok(document) => break document,
            Err(error) => error,
        };
        let offset = floor_char(&readable, error.span().map_or(0, |span| span.start));
        let message = format!("syntax: {}", one_line(error.message()));
        problems.push(Problem::new(place_at(&readable, offset), "", message));
        let line = line_around(&readable, offset);
        let written = readable[line.clone()].trim_start();
        // What is reported at a line that was already replaced cannot be cured by replacing it again.
        if written.is_empty()
            || written.trim_start_matches(['[', '"']).starts_with(LOST_HEADER)
            || problems.len() >= SYNTAX_ERRORS_MAX
        {
            return None;
        }
        let instead = if written.starts_with('[') {
            lost_headers += 1;
            format!("[\"{LOST_HEADER}{lost_headers}\"]")
        } else {
            String::new()
        };
        readable.replace_range(line, &instead);
    };
    let mut walk = Walk { text: &readable, syntax_is_whole: problems.is_empty(), problems };
    let draft = walk.document(document.as_table());
    (lost_headers == 0).then_some(draft)
}

/// Reads a document that was made and not written, so that nothing in it has a place.
pub(super) fn read_document(document: &DocumentMut, problems: &mut Vec<Problem>) -> Draft {
    Walk { text: "", syntax_is_whole: true, problems }.document(document.as_table())
}

/// A table and the bytes it takes.
type Spanned<'a> = (&'a dyn TableLike, Option<std::ops::Range<usize>>);

struct Walk<'a> {
    text: &'a str,
    /// Whether every line could be read; where not, a missing field may stand on one that could not.
    syntax_is_whole: bool,
    problems: &'a mut Vec<Problem>,
}

impl Walk<'_> {
    fn document(&mut self, root: &dyn TableLike) -> Draft {
        let mut draft = Draft::preset();
        for (name, item) in root.iter() {
            if name.starts_with(LOST_HEADER) {
                continue;
            }
            let place = self.key_place(root, name);
            match name {
                "serve" => self.single(&fields::SERVE, item, place, &mut draft.serve),
                "admin" => self.single(&fields::ADMIN, item, place, &mut draft.admin),
                "metrics" => self.single(&fields::METRICS, item, place, &mut draft.metrics),
                "http" => self.single(&fields::HTTP, item, place, &mut draft.http),
                "log" => self.single(&fields::LOG, item, place, &mut draft.log),
                "ingest" => self.single(&fields::INGEST, item, place, &mut draft.ingest),
                "booking" => self.single(&fields::BOOKING, item, place, &mut draft.booking),
                "snapshot" => self.single(&fields::SNAPSHOT, item, place, &mut draft.snapshot),
                "journal" => self.single(&fields::JOURNAL, item, place, &mut draft.journal),
                "shadow" => self.single(&fields::SHADOW, item, place, &mut draft.shadow),
                "policy" => self.single(&fields::POLICY, item, place, &mut draft.policy),
                "relay" => self.single(&fields::RELAY, item, place, &mut draft.relay),
                "discovery" => self.single(&fields::DISCOVERY, item, place, &mut draft.discovery),
                "space" => draft.spaces = self.repeated(&fields::SPACE, item, place),
                "worker" => draft.workers = self.repeated(&fields::WORKER, item, place),
                _ => self.unknown_section(name, item, place),
            }
        }
        // Last, as it starts from what [policy] says, wherever that stands.
        let spaces = root.get(SPACE_POLICY.0).and_then(tables).unwrap_or_default();
        for (at, (space, _)) in spaces.into_iter().enumerate() {
            let entry = self.space_policy(at, space, &draft.policy.value);
            draft.space_policies.push(entry);
        }
        draft
    }

    /// What a space says over `[policy]`.
    fn space_policy(&mut self, at: usize, space: &dyn TableLike, over: &PolicyConfig) -> Entry<PolicyConfig> {
        let mut entry = Entry::preset(&fields::POLICY, format!("space[{at}].policy"), Place::Document);
        entry.value = over.clone();
        let Some(item) = space.get(SPACE_POLICY.1) else { return entry };
        let place = self.key_place(space, SPACE_POLICY.1);
        self.single(&fields::POLICY, item, place, &mut entry);
        // What the daemon sets up once for all spaces is also what needs a restart.
        for field in fields::POLICY.fields.iter().filter(|field| !field.is_live()) {
            if entry.written(field.name).is_some() {
                self.problems.push(entry.problem(field.name, "is one for all spaces and belongs to [policy]"));
            }
        }
        entry
    }

    fn single<T: Default>(&mut self, section: &Section<T>, item: &Item, place: Place, entry: &mut Entry<T>) {
        match item.as_table_like() {
            Some(table) => {
                entry.head = place;
                self.table(section, table, entry);
            }
            None => {
                let message = format!("expected a table, written [{}], found {}", section.name, type_name(item));
                self.problems.push(Problem::new(place, section.name, message));
            }
        }
    }

    fn repeated<T: Default>(&mut self, section: &Section<T>, item: &Item, place: Place) -> Vec<Entry<T>> {
        let Some(tables) = tables(item) else {
            let message =
                format!("expected one table for each, written [[{}]], found {}", section.name, type_name(item));
            self.problems.push(Problem::new(place, section.name, message));
            return Vec::new();
        };
        let mut entries = Vec::with_capacity(tables.len());
        for (at, (table, span)) in tables.into_iter().enumerate() {
            // One more than there may be, so that it shows; none of them is looked at further.
            if self.problems.len() >= PROBLEMS_MAX || at > WORKERS_MAX {
                break;
            }
            let head = span.map_or_else(|| place.clone(), |span| place_at(self.text, span.start));
            let mut entry = Entry::preset(section, format!("{}[{at}]", section.name), head);
            self.table(section, table, &mut entry);
            entries.push(entry);
        }
        entries
    }

    fn table<T: Default>(&mut self, section: &Section<T>, table: &dyn TableLike, entry: &mut Entry<T>) {
        for (name, item) in table.iter().filter(|(name, _)| (section.name, *name) != SPACE_POLICY) {
            if self.problems.len() >= PROBLEMS_MAX {
                return;
            }
            match section.field(name) {
                Some(field) => {
                    let place = item.span().map(|span| place_at(self.text, span.start));
                    let place = place.unwrap_or_else(|| self.key_place(table, name));
                    let outcome = field.kind.set(&mut entry.value, written(item));
                    entry.note(field, place, outcome, self.problems);
                }
                None => {
                    let place = self.key_place(table, name);
                    self.problems.push(unknown_field(section, &entry.path, name, place));
                }
            }
        }
        if self.syntax_is_whole {
            entry.note_missing(section, self.problems);
        }
    }

    fn unknown_section(&mut self, name: &str, item: &Item, place: Place) {
        let sections = sections();
        let problem = if item.is_table_like() || item.is_array_of_tables() {
            let near = nearest(name, sections.iter().map(|(name, _)| *name));
            Problem::new(place, name, "unknown table").suggest(near)
        } else if let Some((section, _)) = sections.iter().find(|(_, fields)| fields.contains(&name)) {
            Problem::new(place, name, format!("stands outside every table; `{name}` belongs to [{section}]"))
        } else {
            let near = nearest(name, sections.iter().flat_map(|(_, fields)| fields.iter().copied()));
            Problem::new(place, name, "unknown field outside every table").suggest(near)
        };
        self.problems.push(problem);
    }

    fn key_place(&self, table: &dyn TableLike, name: &str) -> Place {
        let span = table.key(name).and_then(toml_edit::Key::span);
        span.map_or(Place::Document, |span| place_at(self.text, span.start))
    }
}

/// The problem of a name that its table does not have.
pub(super) fn unknown_field<T>(section: &Section<T>, path: &str, name: &str, place: Place) -> Problem {
    let path = format!("{path}.{name}");
    if let Some(near) = nearest(name, section.names()) {
        return Problem::new(place, path, "unknown field").suggest(Some(near));
    }
    match sections().iter().find(|(_, fields)| fields.contains(&name)) {
        Some((owner, _)) => Problem::new(place, path, format!("unknown field; `{name}` belongs to [{owner}]")),
        None => Problem::new(place, path, "unknown field"),
    }
}

/// The tables of an array of tables, however it is written.
fn tables(item: &Item) -> Option<Vec<Spanned<'_>>> {
    match item {
        Item::ArrayOfTables(tables) => Some(tables.iter().map(|table| (table as _, table.span())).collect()),
        Item::Value(Value::Array(values)) => {
            let table = |value: &'_ Value| value.as_inline_table().is_some();
            values.iter().all(table).then(|| {
                values.iter().filter_map(Value::as_inline_table).map(|table| (table as _, table.span())).collect()
            })
        }
        _ => None,
    }
}

fn written(item: &Item) -> Written<'_> {
    match item {
        Item::Value(Value::Integer(value)) => Written::Integer(*value.value()),
        Item::Value(Value::Float(value)) => Written::Number(*value.value()),
        Item::Value(Value::Boolean(value)) => Written::Flag(*value.value()),
        Item::Value(Value::String(value)) => Written::Text(value.value()),
        Item::Value(Value::Array(values)) => {
            let items: Option<Vec<String>> = values.iter().map(|value| value.as_str().map(str::to_owned)).collect();
            items.map_or(Written::Other("a list of something else"), Written::List)
        }
        other => Written::Other(type_name(other)),
    }
}

fn type_name(item: &Item) -> &'static str {
    match item {
        Item::None => "nothing",
        Item::Table(_) | Item::Value(Value::InlineTable(_)) => "a table",
        Item::ArrayOfTables(_) => "a list of tables",
        Item::Value(Value::Integer(_)) => "an integer",
        Item::Value(Value::Float(_)) => "a number",
        Item::Value(Value::Boolean(_)) => "a boolean",
        Item::Value(Value::String(_)) => "a string",
        Item::Value(Value::Datetime(_)) => "a date",
        Item::Value(Value::Array(_)) => "a list",
    }
}

/// Line and column, from 1, of a byte of the document.
fn place_at(text: &str, offset: usize) -> Place {
    let before = &text[..floor_char(text, offset)];
    let line = before.bytes().filter(|byte| *byte == b'\n').count() + 1;
    let column = before.chars().rev().take_while(|c| *c != '\n').count() + 1;
    Place::Line { line: line as u32, column: column as u32 }
}

fn floor_char(text: &str, offset: usize) -> usize {
    let mut offset = offset.min(text.len());
    while !text.is_char_boundary(offset) {
        offset -= 1;
    }
    offset
}

/// The bytes of the line around `offset`, without its end.
fn line_around(text: &str, offset: usize) -> std::ops::Range<usize> {
    let start = text[..offset].rfind('\n').map_or(0, |newline| newline + 1);
    start..text[offset..].find('\n').map_or(text.len(), |newline| offset + newline)
}

fn one_line(message: &str) -> String {
    message.split_whitespace().collect::<Vec<_>>().join(" ")
}
