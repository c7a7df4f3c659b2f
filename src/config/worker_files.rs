//! Workers outside the configuration file: files of workers, single workers in requests, and changes of workers.

use serde_json::Value as Json;
use toml_edit::{Array, ArrayOfTables, DocumentMut, Item, Table, Value};

use super::check;
use super::document::{self, Draft, EachTable, TableDraft};
use super::field::Section;
use super::fields::{self, WorkerDraft};
use super::problem::{Location, Problem, Problems};
use super::{NamedWorkers, SpaceConfig, WorkerConfig};
use crate::ids::Worker;
use crate::limits;

/// The format of a file of workers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FileFormat {
    /// `[[worker]]`, as in the configuration file.
    Toml,
    /// One worker, a list of workers, or `{"worker": [...]}`, with the same fields.
    Json,
}

/// Fields that [`WorkerPatch`] may set. None of them affects the worker's event stream.
const PATCHABLE: [&str; 14] = [
    "draining",
    "weight",
    "taints",
    "loras",
    "name",
    "capacity_blocks",
    "blocks_max",
    "batched_tokens_max",
    "prefill_base_us",
    "prefill_token_ns",
    "prefill_cached_token_ns",
    "engine_class",
    "engine_preset",
    "device",
];

/// Reads a file of workers. `source` names it in problems.
///
/// # Errors
/// Every problem of the file.
pub fn parse_workers(
    source: &str,
    text: &str,
    format: FileFormat,
    spaces: &[SpaceConfig],
) -> Result<NamedWorkers, Problems> {
    let fail = |list| Err(Problems { source: source.to_owned(), list });
    if let Err(problem) = has_bounded_marks(text) {
        return fail(vec![problem]);
    }
    let mut problems = Vec::new();
    let draft = match format {
        FileFormat::Toml => document::read(text, &mut problems),
        FileFormat::Json => match json_as_toml(text) {
            Ok(document) => Some(document::read_document(&document, &mut problems)),
            Err(problem) => return fail(vec![problem]),
        },
    };
    let named = draft.map(|mut draft| {
        only_workers(&mut draft, &mut problems);
        check::workers(&draft.workers, &as_entries(spaces), &mut problems)
    });
    match named {
        Some(named) if problems.is_empty() => Ok(named),
        _ => fail(problems),
    }
}

/// Reads one worker from names and values of fields.
///
/// # Errors
/// Every problem of the fields.
pub(crate) fn parse_worker(
    source: &str,
    pairs: &[(String, String)],
    spaces: &[SpaceConfig],
) -> Result<NamedWorkers, Problems> {
    let mut problems = Vec::new();
    let entry = entry(pairs, &mut problems);
    entry.note_missing(&fields::WORKER, &mut problems);
    let named = check::workers(&[entry], &as_entries(spaces), &mut problems);
    if problems.is_empty() { Ok(named) } else { Err(Problems { source: source.to_owned(), list: problems }) }
}

/// Fields of a worker that a request sets over those of its source.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct WorkerPatch {
    draft: WorkerDraft,
    written: Vec<&'static str>,
}

impl WorkerPatch {
    /// Reads names and values of fields.
    ///
    /// # Errors
    /// Every problem of the fields, including fields that cannot change while the worker stays.
    pub(crate) fn parse(source: &str, pairs: &[(String, String)]) -> Result<Self, Problems> {
        let mut problems = Vec::new();
        let entry = entry(pairs, &mut problems);
        let written: Vec<&'static str> = fields::WORKER.names().filter(|name| entry.written(name).is_some()).collect();
        for name in written.iter().filter(|name| !PATCHABLE.contains(name)) {
            let message = format!(
                "cannot change while the worker stays, only {} can; remove the worker and add it again",
                PATCHABLE.join(", ")
            );
            problems.push(entry.problem(name, message));
        }
        if problems.is_empty() {
            return Ok(Self { draft: entry.value, written });
        }
        Err(Problems { source: source.to_owned(), list: problems })
    }

    /// Adds the fields of `later`, which win.
    pub(crate) fn add(&mut self, later: &Self) {
        later.written.iter().for_each(|name| copy_draft(name, &later.draft, &mut self.draft));
        self.written.extend(later.written.iter().filter(|name| !self.written.contains(name)).collect::<Vec<_>>());
    }

    /// Checks the fields of a worker against each other, as they are with the patch.
    ///
    /// # Errors
    /// The problem.
    pub(crate) fn check(&self, source: &str, worker: &WorkerConfig) -> Result<(), Problems> {
        let mut patched = worker.clone();
        self.apply(&mut patched);
        check::beyond_blocks_max(patched.capacity_blocks, patched.blocks_max).map_or(Ok(()), |message| {
            let problem = Problem::new(Location::Document, "worker.capacity_blocks", message);
            Err(Problems { source: source.to_owned(), list: vec![problem] })
        })
    }

    /// Sets the fields of the patch in a worker.
    pub(crate) fn apply(&self, worker: &mut WorkerConfig) {
        let draft = &self.draft;
        for name in &self.written {
            match *name {
                "draining" => worker.state = check::state(draft),
                "weight" => worker.weight = check::weight(draft),
                "taints" => worker.taints.clone_from(&draft.taints),
                "loras" => worker.loras.clone_from(&draft.loras),
                "name" => worker.name = draft.name.clone().unwrap_or_default(),
                "capacity_blocks" => worker.capacity_blocks = draft.capacity_blocks,
                "blocks_max" => worker.blocks_max = draft.blocks_max,
                "batched_tokens_max" => worker.batched_tokens_max = draft.batched_tokens_max,
                "prefill_base_us" => worker.prefill.base_ns = check::prefill(draft).base_ns,
                "prefill_token_ns" => worker.prefill.token_ns = draft.prefill_token_ns,
                "prefill_cached_token_ns" => worker.prefill.cached_token_ns = draft.prefill_cached_token_ns,
                "engine_class" => worker.engine_class = draft.engine_class.clone().unwrap_or_default(),
                "engine_preset" => worker.engine_preset = draft.engine_preset,
                "device" => worker.device_class = draft.device,
                _ => {}
            }
        }
    }
}

fn copy_draft(name: &str, from: &WorkerDraft, to: &mut WorkerDraft) {
    match name {
        "draining" => to.draining = from.draining,
        "weight" => to.weight = from.weight,
        "taints" => to.taints.clone_from(&from.taints),
        "loras" => to.loras.clone_from(&from.loras),
        "name" => to.name.clone_from(&from.name),
        "capacity_blocks" => to.capacity_blocks = from.capacity_blocks,
        "blocks_max" => to.blocks_max = from.blocks_max,
        "batched_tokens_max" => to.batched_tokens_max = from.batched_tokens_max,
        "prefill_base_us" => to.prefill_base_us = from.prefill_base_us,
        "prefill_token_ns" => to.prefill_token_ns = from.prefill_token_ns,
        "prefill_cached_token_ns" => to.prefill_cached_token_ns = from.prefill_cached_token_ns,
        "engine_class" => to.engine_class.clone_from(&from.engine_class),
        "engine_preset" => to.engine_preset = from.engine_preset,
        "device" => to.device = from.device,
        _ => {}
    }
}

fn entry(pairs: &[(String, String)], problems: &mut Vec<Problem>) -> TableDraft<WorkerDraft> {
    let mut entry = TableDraft::preset(&fields::WORKER, "worker".to_owned(), Location::Document);
    for (name, value) in pairs {
        if entry.written(name).is_some() {
            problems.push(Problem::new(Location::Document, entry.path_of(name), "is set twice"));
            continue;
        }
        super::load::set(&fields::WORKER, &mut entry, name, value, Location::Document, problems);
    }
    entry
}

fn as_entries(spaces: &[SpaceConfig]) -> Vec<TableDraft<SpaceConfig>> {
    let entry = |(at, space): (usize, &SpaceConfig)| {
        let mut entry = TableDraft::preset(&fields::SPACE, format!("space[{at}]"), Location::Document);
        entry.value = space.clone();
        entry
    };
    spaces.iter().enumerate().map(entry).collect()
}

/// Refuses other tables: a file of workers has nothing but workers.
fn only_workers(draft: &mut Draft, problems: &mut Vec<Problem>) {
    draft.each_table(&mut OnlyWorkers(problems));
}

struct OnlyWorkers<'a>(&'a mut Vec<Problem>);

impl EachTable for OnlyWorkers<'_> {
    fn table<T: Default>(&mut self, section: &'static Section<T>, entry: &mut TableDraft<T>) {
        if section.name != fields::WORKER.name && entry.head != Location::Document {
            let message = "belongs in the configuration file; a file of workers has only [[worker]]";
            self.0.push(Problem::new(entry.head.clone(), entry.path.clone(), message));
        }
    }
}

/// Refuses a text with more entries than workers can have, before a parser builds a tree: two bytes of text become
/// about a hundred bytes of tree. Marks within strings count too, because only a parser can tell strings apart.
fn has_bounded_marks(text: &str) -> Result<(), Problem> {
    let marks = text.bytes().filter(|byte| b"=:,.[{".contains(byte)).count();
    if marks <= limits::DISCOVERY_FILE_MARKS_MAX {
        return Ok(());
    }
    let message = format!(
        "has {marks} of the characters = : , . [ {{ and so more entries than workers can have; at most {} are allowed: split \
         the file",
        limits::DISCOVERY_FILE_MARKS_MAX
    );
    Err(Problem::new(Location::Document, "worker", message))
}

/// Converts workers from JSON to a TOML document, so that one reader serves both. The document has no locations,
/// because its lines would mean nothing to the author of the JSON.
fn json_as_toml(text: &str) -> Result<DocumentMut, Problem> {
    let wrong = |message: String| Problem::new(Location::Document, "worker", message);
    let json: Json = serde_json::from_str(text).map_err(|error| {
        let location = Location::Line { line: error.line() as u32, column: error.column() as u32 };
        Problem::new(location, "", format!("syntax: {error}"))
    })?;
    let list = match json {
        Json::Array(list) => list,
        Json::Object(mut object) if object.len() == 1 && object.contains_key("worker") => {
            match object.remove("worker") {
                Some(Json::Array(list)) => list,
                _ => return Err(wrong("expected a list of workers".to_owned())),
            }
        }
        Json::Object(object) => vec![Json::Object(object)],
        _ => return Err(wrong("expected a worker, or a list of workers".to_owned())),
    };
    if list.len() > limits::WORKERS_MAX {
        return Err(wrong(format!("there are {}, at most {} are allowed", list.len(), limits::WORKERS_MAX)));
    }
    let mut tables = ArrayOfTables::new();
    for (at, worker) in list.into_iter().enumerate() {
        let Json::Object(object) = worker else {
            return Err(wrong(format!("worker[{at}] is not an object")));
        };
        if object.len() > limits::WORKER_FIELDS_MAX {
            let message =
                format!("worker[{at}] has {} fields, at most {} are read", object.len(), limits::WORKER_FIELDS_MAX);
            return Err(wrong(message));
        }
        let mut table = Table::new();
        for (name, value) in object.into_iter().filter(|(_, value)| !value.is_null()) {
            let value = toml_value(&value)
                .ok_or_else(|| wrong(format!("worker[{at}].{name} has a value of an unsupported type")))?;
            table.insert(&name, Item::Value(value));
        }
        tables.push(table);
    }
    let mut document = DocumentMut::new();
    document.insert("worker", Item::ArrayOfTables(tables));
    Ok(document)
}

fn toml_value(value: &Json) -> Option<Value> {
    Some(match value {
        Json::Bool(flag) => (*flag).into(),
        Json::String(text) => text.into(),
        // Integers too large for TOML become strings, as in the configuration file.
        Json::Number(number) => match (number.as_i64(), number.as_u64(), number.as_f64()) {
            (Some(value), ..) => value.into(),
            (None, Some(value), _) => value.to_string().into(),
            (None, None, value) => value?.into(),
        },
        Json::Array(values) => {
            let values: Option<Vec<Value>> = values.iter().map(toml_value).collect();
            values?.into_iter().collect::<Array>().into()
        }
        Json::Null | Json::Object(_) => return None,
    })
}

impl NamedWorkers {
    /// Workers and engines.
    pub(crate) fn len(&self) -> usize {
        self.workers.len() + self.servers.len()
    }

    /// Every worker named by its endpoints, and the first rank of every server.
    pub fn identities(&self) -> impl Iterator<Item = Worker> {
        self.workers.iter().map(|worker| worker.worker).chain(self.servers.iter().map(|server| server.worker.worker))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fleet::WorkerState;
    use crate::load::PrefillFigures;

    fn spaces() -> Vec<SpaceConfig> {
        ["a", "b"].map(|model| SpaceConfig { model: model.into(), ..SpaceConfig::default() }).into()
    }

    #[test]
    fn both_formats_give_the_same_workers() {
        let toml = "[[worker]]\nid = 1\nmodel = \"a\"\nendpoint = \"tcp://h:1\"\nranks = 2\ntaints = [\"x\"]\n\
                    [[worker]]\nid = \"18446744073709551615\"\nmodel = \"b\"\nweight = 2.5\ndraining = true\n";
        let json = r#"[{"id": 1, "model": "a", "endpoint": "tcp://h:1", "ranks": 2, "taints": ["x"], "name": null},
            {"id": 18446744073709551615, "model": "b", "weight": 2.5, "draining": true}]"#;
        let read = |text, format| parse_workers("f", text, format, &spaces()).expect("valid");
        let named = read(toml, FileFormat::Toml);
        assert_eq!(named, read(json, FileFormat::Json));
        assert_eq!(named, read(&format!(r#"{{"worker": {json}}}"#), FileFormat::Json));
        let [first, second, third] = named.workers.as_slice() else { panic!("{named:?}") };
        assert_eq!((first.worker, second.worker, third.worker.id.0), (Worker::new(1, 0), Worker::new(1, 1), u64::MAX));
        assert_eq!(second.events.as_ref().map(|events| events.endpoint.as_str()), Some("tcp://h:2"));
        assert_eq!((first.name.as_str(), second.name.as_str(), third.state), ("w1", "w1.1", WorkerState::Draining));
        let one = parse_workers("f", r#"{"id": 3, "model": "a"}"#, FileFormat::Json, &spaces()).expect("valid");
        assert_eq!(one.workers.len(), 1);
    }

    #[test]
    fn every_problem_is_named() {
        use FileFormat::{Json, Toml};
        for (text, format, words) in [
            ("[[worker]]\nid = 1\n", Toml, "space is ambiguous"),
            ("[[worker]]\nid = 1\nmodel = \"c\"\n", Toml, "no [[space]] has model `c`"),
            ("[[worker]]\nmodel = \"a\"\n", Toml, "is missing"),
            ("[serve]\nsocket = \"/x\"\n", Toml, "belongs in the configuration file"),
            ("[[space]]\nmodel = \"x\"\n", Toml, "belongs in the configuration file"),
            ("{", Json, "syntax"),
            ("[1]", Json, "worker[0] is not an object"),
            ("7", Json, "expected a worker"),
            (r#"[{"id": {}, "model": "a"}]"#, Json, "worker[0].id has a value of an unsupported type"),
            (r#"[{"id": 1, "modle": "a"}]"#, Json, "did you mean"),
            (r#"[{"id": 1, "model": "a", "url": "http://h:1", "ranks": 2}]"#, Json, "cannot be set with url"),
            (r#"[{"id": 1, "model": "a", "endpoint": "ipc:///e", "ranks": 2}]"#, Json, "needs tcp ports"),
            (
                r#"[{"id": 1, "model": "a", "endpoint": "tcp://h:1", "ranks": 2}, {"id": 1, "dp_rank": 1, "model": "a"}]"#,
                Json,
                "already defined",
            ),
        ] {
            let problems = parse_workers("f", text, format, &spaces()).expect_err(text).to_string();
            assert!(problems.contains(words), "{text}: {problems}");
        }
    }

    #[test]
    fn no_other_table_is_passed_over() {
        for (name, _) in document::sections().into_iter().filter(|(name, _)| *name != fields::WORKER.name) {
            let header =
                if name == fields::SPACE.name { format!("[[{name}]]\nmodel = \"x\"") } else { format!("[{name}]") };
            let text = format!("{header}\n[[worker]]\nid = 1\nmodel = \"a\"\n");
            let problems = parse_workers("f", &text, FileFormat::Toml, &spaces()).expect_err(name).to_string();
            assert!(problems.contains("belongs in the configuration file"), "{name}: {problems}");
        }
    }

    #[test]
    fn a_patch_sets_only_its_own_fields() {
        let pairs = |pairs: &[(&str, &str)]| -> Vec<(String, String)> {
            pairs.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect()
        };
        let named =
            parse_worker("t", &pairs(&[("id", "1"), ("model", "a"), ("weight", "3")]), &spaces()).expect("valid");
        let before = named.workers[0].clone();
        let mut patch =
            WorkerPatch::parse("t", &pairs(&[("draining", "true"), ("taints", "x+y"), ("prefill_base_us", "3")]))
                .expect("valid");
        patch.add(&WorkerPatch::parse("t", &pairs(&[("draining", "false"), ("name", "n")])).expect("valid"));
        let mut after = before.clone();
        patch.apply(&mut after);
        let taints = vec!["x".to_owned(), "y".to_owned()];
        let prefill = PrefillFigures { base_ns: Some(3000), ..PrefillFigures::default() };
        assert_eq!(after, WorkerConfig { taints, prefill, name: "n".into(), ..before });
        for (fields, fits) in [
            (&[("blocks_max", "4")][..], true),
            (&[("blocks_max", "4"), ("capacity_blocks", "4")], true),
            (&[("blocks_max", "4"), ("capacity_blocks", "5")], false),
            (&[("capacity_blocks", "99999999")], false),
        ] {
            let patch = WorkerPatch::parse("t", &pairs(fields)).expect("valid");
            assert_eq!(patch.check("t", &after).is_ok(), fits, "{fields:?}");
        }
        let refused =
            WorkerPatch::parse("t", &pairs(&[("endpoint", "tcp://h:1")])).expect_err("the stream").to_string();
        assert!(refused.contains("cannot change while the worker stays"), "{refused}");
    }
}
