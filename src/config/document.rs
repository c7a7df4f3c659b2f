//! The first step: reads a TOML document into a draft, guided by the table of fields.
//!
//! `toml_edit` stops at the first syntax error. To list them all in one run, the reader notes the bad line, removes it
//! and parses the document again.

use toml_edit::{Document, DocumentMut, Item, TableLike, Value};

use super::field::{Field, Preset, Section, ValueError, Written};
use super::fields::{self, EachSection, WorkerDraft};
use super::problem::{Location, Problem, nearest};
use super::{
    AdminConfig, BookingConfig, DiscoveryConfig, HttpConfig, IngestConfig, JournalConfig, LogConfig, MetricsConfig,
    PolicyConfig, ProcessConfig, RelayConfig, RemoteConfig, RoutersConfig, SandboxConfig, ServeConfig, ShadowConfig,
    SnapshotConfig, SpaceConfig, TracesConfig,
};
use crate::limits::{PROBLEMS_MAX, WORKERS_MAX};

/// Most syntax errors listed. A document with more is no configuration.
const SYNTAX_ERRORS_MAX: usize = 64;

/// Replaces, with a number appended, a header that could not be read, so that its fields do not join the table before.
const LOST_HEADER: &str = "unreadable header ";

/// One table of the document: its values, and the location of each.
#[derive(Debug)]
pub(super) struct TableDraft<T> {
    pub(super) value: T,
    /// The prefix of its fields in problems: `serve`, `worker[2]`.
    pub(super) path: String,
    /// The location of its header.
    pub(super) head: Location,
    locations: Vec<(&'static str, Location)>,
    /// Every accepted field that was written, in TOML.
    values: Vec<(&'static str, String)>,
    refused: Vec<&'static str>,
}

impl<T: Default> TableDraft<T> {
    /// A table with every field at its default.
    pub(super) fn preset(section: &Section<T>, path: String, head: Location) -> Self {
        let mut value = T::default();
        for field in section.fields {
            if let Preset::Value(text) = field.preset {
                let set = field.kind.set_text(&mut value, text);
                debug_assert!(set.is_ok(), "the default of {}.{} is refused: {set:?}", section.name, field.name);
            }
        }
        Self { value, path, head, locations: Vec::new(), values: Vec::new(), refused: Vec::new() }
    }
}

impl<T> TableDraft<T> {
    /// The location of a field, or of its table's header if the field was not written.
    pub(super) fn location(&self, field: &str) -> Location {
        self.written(field).unwrap_or(&self.head).clone()
    }

    /// The location of a field, if it was written.
    pub(super) fn written(&self, field: &str) -> Option<&Location> {
        self.locations.iter().find(|(name, _)| *name == field).map(|(_, location)| location)
    }

    /// Whether a field's value was refused, so that later checks must ignore it.
    pub(super) fn is_refused(&self, field: &str) -> bool {
        self.refused.contains(&field)
    }

    pub(super) fn path_of(&self, field: &str) -> String {
        format!("{}.{field}", self.path)
    }

    /// A problem with one field's value.
    pub(super) fn problem(&self, field: &str, message: impl Into<String>) -> Problem {
        Problem::new(self.location(field), self.path_of(field), message)
    }

    /// The fields that were written and accepted, with their values in TOML.
    pub(super) fn values(&self) -> &[(&'static str, String)] {
        &self.values
    }

    /// Notes the location of a field and the result of setting it. `toml` is the value in TOML.
    pub(super) fn note(
        &mut self,
        field: &Field<T>,
        (location, toml): (Location, String),
        outcome: Result<(), ValueError>,
        problems: &mut Vec<Problem>,
    ) {
        self.locations.retain(|(name, _)| *name != field.name);
        self.locations.push((field.name, location.clone()));
        self.values.retain(|(name, _)| *name != field.name);
        self.refused.retain(|name| *name != field.name);
        match outcome {
            Ok(()) => self.values.push((field.name, toml)),
            Err(fault) => {
                self.refused.push(field.name);
                let problem = Problem::new(location, self.path_of(field.name), fault.message);
                problems.push(problem.suggest(fault.nearest.as_deref()));
            }
        }
    }

    /// Lists every required field that was not written.
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

/// The whole document: every field at its accepted value or its default.
#[derive(Debug)]
pub(super) struct Draft {
    pub(super) serve: TableDraft<ServeConfig>,
    pub(super) admin: TableDraft<AdminConfig>,
    pub(super) metrics: TableDraft<MetricsConfig>,
    pub(super) http: TableDraft<HttpConfig>,
    pub(super) remote: TableDraft<RemoteConfig>,
    pub(super) log: TableDraft<LogConfig>,
    pub(super) sandbox: TableDraft<SandboxConfig>,
    pub(super) ingest: TableDraft<IngestConfig>,
    pub(super) booking: TableDraft<BookingConfig>,
    pub(super) process: TableDraft<ProcessConfig>,
    pub(super) snapshot: TableDraft<SnapshotConfig>,
    pub(super) journal: TableDraft<JournalConfig>,
    pub(super) traces: TableDraft<TracesConfig>,
    pub(super) shadow: TableDraft<ShadowConfig>,
    pub(super) policy: TableDraft<PolicyConfig>,
    pub(super) discovery: TableDraft<DiscoveryConfig>,
    pub(super) routers: TableDraft<RoutersConfig>,
    pub(super) relay: TableDraft<RelayConfig>,
    pub(super) spaces: Vec<TableDraft<SpaceConfig>>,
    /// The policy of each space in the document: `[policy]` with the fields of `[space.policy]`.
    pub(super) space_policies: Vec<TableDraft<PolicyConfig>>,
    pub(super) workers: Vec<TableDraft<WorkerDraft>>,
    /// Whether every line could be read. If not, a missing field may stand on an unreadable line.
    pub(super) is_whole: bool,
}

/// Does the same with every table of a draft, or of the configuration.
pub(super) trait EachTable {
    /// Gets each table that occurs in the draft.
    fn table<T: Default>(&mut self, section: &'static Section<T>, entry: &mut TableDraft<T>);
}

/// The one table within a table: a space's own policy.
const SPACE_POLICY: (&str, &str) = ("space", "policy");

/// Why a field of [space.policy] is refused.
pub(super) const GENERAL: &str = "is the same for all spaces; set it in [policy]";

/// A table that may occur once, with every field at its default.
pub(super) fn preset<T: Default>(section: &Section<T>) -> TableDraft<T> {
    TableDraft::preset(section, section.name.to_owned(), Location::Document)
}

impl Draft {
    /// The draft of an empty document.
    pub(super) fn preset() -> Self {
        Self {
            serve: preset(&fields::SERVE),
            admin: preset(&fields::ADMIN),
            metrics: preset(&fields::METRICS),
            http: preset(&fields::HTTP),
            remote: preset(&fields::REMOTE),
            log: preset(&fields::LOG),
            sandbox: preset(&fields::SANDBOX),
            ingest: preset(&fields::INGEST),
            booking: preset(&fields::BOOKING),
            process: preset(&fields::PROCESS),
            snapshot: preset(&fields::SNAPSHOT),
            journal: preset(&fields::JOURNAL),
            traces: preset(&fields::TRACES),
            shadow: preset(&fields::SHADOW),
            policy: preset(&fields::POLICY),
            discovery: preset(&fields::DISCOVERY),
            routers: preset(&fields::ROUTERS),
            relay: preset(&fields::RELAY),
            spaces: Vec::new(),
            space_policies: Vec::new(),
            workers: Vec::new(),
            is_whole: true,
        }
    }

    /// Gives every table to `each`, in the order of the example file; each space before its policy.
    pub(super) fn each_table(&mut self, each: &mut impl EachTable) {
        each.table(&fields::SERVE, &mut self.serve);
        each.table(&fields::ADMIN, &mut self.admin);
        each.table(&fields::METRICS, &mut self.metrics);
        each.table(&fields::HTTP, &mut self.http);
        each.table(&fields::REMOTE, &mut self.remote);
        each.table(&fields::LOG, &mut self.log);
        each.table(&fields::PROCESS, &mut self.process);
        each.table(&fields::SANDBOX, &mut self.sandbox);
        each.table(&fields::INGEST, &mut self.ingest);
        each.table(&fields::BOOKING, &mut self.booking);
        each.table(&fields::SNAPSHOT, &mut self.snapshot);
        each.table(&fields::JOURNAL, &mut self.journal);
        each.table(&fields::SHADOW, &mut self.shadow);
        each.table(&fields::TRACES, &mut self.traces);
        each.table(&fields::POLICY, &mut self.policy);
        each.table(&fields::DISCOVERY, &mut self.discovery);
        each.table(&fields::ROUTERS, &mut self.routers);
        each.table(&fields::RELAY, &mut self.relay);
        for (at, space) in self.spaces.iter_mut().enumerate() {
            each.table(&fields::SPACE, space);
            if let Some(policy) = self.space_policies.get_mut(at) {
                each.table(&fields::POLICY, policy);
            }
        }
        self.workers.iter_mut().for_each(|worker| each.table(&fields::WORKER, worker));
    }

    /// Lists the required fields that neither the document nor what was set over it has.
    pub(super) fn note_missing(&self, problems: &mut Vec<Problem>) {
        if self.is_whole {
            self.spaces.iter().for_each(|space| space.note_missing(&fields::SPACE, problems));
            self.workers.iter().for_each(|worker| worker.note_missing(&fields::WORKER, problems));
        }
    }

    /// Makes each space's policy anew: `[policy]` as it is now, with the fields of the space's own.
    pub(super) fn rebase_space_policies(&mut self) {
        for entry in &mut self.space_policies {
            entry.value.clone_from(&self.policy.value);
            for (name, toml) in &entry.values {
                // The field has accepted this value before.
                let outcome = fields::POLICY.field(name).map(|field| field.kind.set_text(&mut entry.value, bare(toml)));
                debug_assert!(matches!(outcome, Some(Ok(()))), "{name} = {toml}: {outcome:?}");
            }
        }
    }
}

/// A number, a flag or a simple string of TOML without quotes.
pub(super) fn bare(toml: &str) -> &str {
    toml.trim_matches('"')
}

/// A table's name and the names of its fields.
pub(super) type SectionNames = (&'static str, Vec<&'static str>);

/// The names of a table.
pub(super) fn names_of<T>(section: &Section<T>) -> SectionNames {
    (section.name, section.names().collect())
}

/// The names of every table of the configuration.
pub(super) fn sections() -> Vec<SectionNames> {
    struct Names(Vec<SectionNames>);
    impl EachSection for Names {
        fn section<T: Default>(&mut self, section: &'static Section<T>) {
            self.0.push(names_of(section));
        }
    }
    let mut names = Names(Vec::new());
    fields::each_section(&mut names);
    names.0
}

/// Reads a document into a draft and adds what is wrong to `problems`. `None` if lines are so broken that the draft as
/// a whole has no meaning; the readable tables were still checked.
pub(super) fn read(text: &str, problems: &mut Vec<Problem>) -> Option<Draft> {
    read_tables(text, sections(), problems, |reader, root| reader.document(root))
}

/// As [`read`], of a document over which fields are set next: [`Draft::note_missing`] lists what is missing then.
pub(super) fn read_incomplete(text: &str, problems: &mut Vec<Problem>) -> Option<Draft> {
    read_tables(text, sections(), problems, |reader, root| {
        let is_whole = std::mem::take(&mut reader.notes_missing);
        Draft { is_whole, ..reader.document(root) }
    })
}

/// As [`read`], of a document with these `sections`, whose tables `read` reads.
pub(super) fn read_tables<D>(
    text: &str,
    sections: Vec<SectionNames>,
    problems: &mut Vec<Problem>,
    read: impl FnOnce(&mut Reader<'_>, &dyn TableLike) -> D,
) -> Option<D> {
    let mut readable = text.to_owned();
    let mut lost_headers = 0;
    let document = loop {
        let error = match Document::parse(readable.clone()) {
            Ok(document) => break document,
            Err(error) => error,
        };
        let offset = floor_char(&readable, error.span().map_or(0, |span| span.start));
        let message = format!("syntax: {}", one_line(error.message()));
        problems.push(Problem::new(location_at(&readable, offset), "", message));
        let line = line_around(&readable, offset);
        let written = readable[line.clone()].trim_start();
        // An error at a line that was already replaced would come again.
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
    let mut reader = Reader { text: &readable, notes_missing: problems.is_empty(), sections, problems };
    let draft = read(&mut reader, document.as_table());
    (lost_headers == 0).then_some(draft)
}

/// Reads a document that was built in memory, so that nothing in it has a location.
pub(super) fn read_document(document: &DocumentMut, problems: &mut Vec<Problem>) -> Draft {
    Reader { text: "", notes_missing: true, sections: sections(), problems }.document(document.as_table())
}

/// A table and its byte range.
type Spanned<'a> = (&'a dyn TableLike, Option<std::ops::Range<usize>>);

/// Reads the tables of a document.
pub(super) struct Reader<'a> {
    text: &'a str,
    /// Whether missing fields are listed: not if a line could not be read, on which a missing field may stand.
    notes_missing: bool,
    /// The names of every table that the document may have.
    sections: Vec<SectionNames>,
    problems: &'a mut Vec<Problem>,
}

impl Reader<'_> {
    fn document(&mut self, root: &dyn TableLike) -> Draft {
        let mut draft = Draft::preset();
        self.each_table(root, |reader, name, item, location| match name {
            "serve" => reader.single(&fields::SERVE, item, location, &mut draft.serve),
            "admin" => reader.single(&fields::ADMIN, item, location, &mut draft.admin),
            "metrics" => reader.single(&fields::METRICS, item, location, &mut draft.metrics),
            "http" => reader.single(&fields::HTTP, item, location, &mut draft.http),
            "remote" => reader.single(&fields::REMOTE, item, location, &mut draft.remote),
            "log" => reader.single(&fields::LOG, item, location, &mut draft.log),
            "process" => reader.single(&fields::PROCESS, item, location, &mut draft.process),
            "sandbox" => reader.single(&fields::SANDBOX, item, location, &mut draft.sandbox),
            "ingest" => reader.single(&fields::INGEST, item, location, &mut draft.ingest),
            "booking" => reader.single(&fields::BOOKING, item, location, &mut draft.booking),
            "snapshot" => reader.single(&fields::SNAPSHOT, item, location, &mut draft.snapshot),
            "journal" => reader.single(&fields::JOURNAL, item, location, &mut draft.journal),
            "traces" => reader.single(&fields::TRACES, item, location, &mut draft.traces),
            "shadow" => reader.single(&fields::SHADOW, item, location, &mut draft.shadow),
            "policy" => reader.single(&fields::POLICY, item, location, &mut draft.policy),
            "routers" => reader.single(&fields::ROUTERS, item, location, &mut draft.routers),
            "relay" => reader.single(&fields::RELAY, item, location, &mut draft.relay),
            "discovery" => reader.single(&fields::DISCOVERY, item, location, &mut draft.discovery),
            "space" => draft.spaces = reader.repeated(&fields::SPACE, item, location),
            "worker" => draft.workers = reader.repeated(&fields::WORKER, item, location),
            _ => reader.unknown_section(name, item, location),
        });
        // Last, because it starts from [policy], which may stand anywhere.
        let spaces = root.get(SPACE_POLICY.0).and_then(tables).unwrap_or_default();
        for (at, (space, _)) in spaces.into_iter().enumerate() {
            let entry = self.space_policy(at, space, &draft.policy.value);
            draft.space_policies.push(entry);
        }
        draft
    }

    /// Calls `read` with the name, the item and the location of everything that stands in the root of a document.
    pub(super) fn each_table(&mut self, root: &dyn TableLike, mut read: impl FnMut(&mut Self, &str, &Item, Location)) {
        for (name, item) in root.iter().filter(|(name, _)| !name.starts_with(LOST_HEADER)) {
            let location = self.key_location(root, name);
            read(self, name, item, location);
        }
    }

    /// A space's policy: `[policy]` with the fields of `[space.policy]`.
    fn space_policy(&mut self, at: usize, space: &dyn TableLike, over: &PolicyConfig) -> TableDraft<PolicyConfig> {
        let mut entry = TableDraft::preset(&fields::POLICY, format!("space[{at}].policy"), Location::Document);
        entry.value = over.clone();
        let Some(item) = space.get(SPACE_POLICY.1) else { return entry };
        let location = self.key_location(space, SPACE_POLICY.1);
        self.single(&fields::POLICY, item, location, &mut entry);
        // What the daemon sets up once for all spaces is also what needs a restart.
        for field in fields::POLICY.fields.iter().filter(|field| !field.is_live()) {
            if entry.written(field.name).is_some() {
                self.problems.push(entry.problem(field.name, GENERAL));
            }
        }
        entry
    }

    pub(super) fn single<T: Default>(
        &mut self,
        section: &Section<T>,
        item: &Item,
        location: Location,
        entry: &mut TableDraft<T>,
    ) {
        match item.as_table_like() {
            Some(table) => {
                entry.head = location;
                self.table(section, table, entry);
            }
            None => {
                let message = format!("expected a table with the header [{}], found {}", section.name, type_name(item));
                self.problems.push(Problem::new(location, section.name, message));
            }
        }
    }

    pub(super) fn repeated<T: Default>(
        &mut self,
        section: &Section<T>,
        item: &Item,
        location: Location,
    ) -> Vec<TableDraft<T>> {
        let Some(tables) = tables(item) else {
            let message = format!("expected tables with the header [[{}]], found {}", section.name, type_name(item));
            self.problems.push(Problem::new(location, section.name, message));
            return Vec::new();
        };
        let mut entries = Vec::with_capacity(tables.len());
        for (at, (table, span)) in tables.into_iter().enumerate() {
            // Read one more than allowed, so that the check sees that there are too many.
            if self.problems.len() >= PROBLEMS_MAX || at > WORKERS_MAX {
                break;
            }
            let head = span.map_or_else(|| location.clone(), |span| location_at(self.text, span.start));
            let mut entry = TableDraft::preset(section, format!("{}[{at}]", section.name), head);
            self.table(section, table, &mut entry);
            entries.push(entry);
        }
        entries
    }

    fn table<T: Default>(&mut self, section: &Section<T>, table: &dyn TableLike, entry: &mut TableDraft<T>) {
        for (name, item) in table.iter().filter(|(name, _)| (section.name, *name) != SPACE_POLICY) {
            if self.problems.len() >= PROBLEMS_MAX {
                return;
            }
            match section.field(name) {
                Some(field) => {
                    let location = item.span().map(|span| location_at(self.text, span.start));
                    let location = location.unwrap_or_else(|| self.key_location(table, name));
                    let written = written(item);
                    let toml = field.kind.toml(&written);
                    let outcome = field.kind.set(&mut entry.value, written);
                    entry.note(field, (location, toml), outcome, self.problems);
                }
                None => {
                    let location = self.key_location(table, name);
                    self.problems.push(unknown_field(&self.sections, section, &entry.path, name, location));
                }
            }
        }
        if self.notes_missing {
            entry.note_missing(section, self.problems);
        }
    }

    pub(super) fn unknown_section(&mut self, name: &str, item: &Item, location: Location) {
        let sections = &self.sections;
        let problem = if item.is_table_like() || item.is_array_of_tables() {
            let near = nearest(name, sections.iter().map(|(name, _)| *name));
            Problem::new(location, name, "unknown table").suggest(near)
        } else if let Some((section, _)) = sections.iter().find(|(_, fields)| fields.contains(&name)) {
            Problem::new(location, name, format!("stands outside every table; put it under [{section}]"))
        } else {
            let near = nearest(name, sections.iter().flat_map(|(_, fields)| fields.iter().copied()));
            Problem::new(location, name, "unknown field outside every table").suggest(near)
        };
        self.problems.push(problem);
    }

    fn key_location(&self, table: &dyn TableLike, name: &str) -> Location {
        let span = table.key(name).and_then(toml_edit::Key::span);
        span.map_or(Location::Document, |span| location_at(self.text, span.start))
    }
}

/// The problem of a field name that the table does not have. `sections` are all tables of the document.
pub(super) fn unknown_field<T>(
    sections: &[SectionNames],
    section: &Section<T>,
    path: &str,
    name: &str,
    location: Location,
) -> Problem {
    let path = format!("{path}.{name}");
    if let Some(near) = nearest(name, section.names()) {
        return Problem::new(location, path, "unknown field").suggest(Some(near));
    }
    match sections.iter().find(|(_, fields)| fields.contains(&name)) {
        Some((owner, _)) => Problem::new(location, path, format!("unknown field here; `{name}` belongs to [{owner}]")),
        None => Problem::new(location, path, "unknown field"),
    }
}

/// The tables of an array of tables, in either TOML notation.
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
pub(super) fn location_at(text: &str, offset: usize) -> Location {
    let before = &text[..floor_char(text, offset)];
    let line = before.bytes().filter(|byte| *byte == b'\n').count() + 1;
    let column = before.chars().rev().take_while(|c| *c != '\n').count() + 1;
    Location::Line { line: line as u32, column: column as u32 }
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
