//! The field table without the types of its values: what tools and people read about fields.

use std::sync::LazyLock;

use super::example::render;
use super::field::{Field, Kind, Preset, Section};
use super::fields::{self, EachSection};
use super::overrides::variable_of;
use super::written::default_of;

/// The type of a field's values, and their bounds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum ValueType {
    /// An integer in these bounds.
    Integer {
        /// The smallest.
        min: u64,
        /// The largest; above 2⁶³ - 1 values may be strings.
        max: u64,
    },
    /// A number in these bounds.
    Number {
        /// The smallest.
        min: f64,
        /// The largest; `None` = no bound.
        max: Option<f64>,
    },
    /// `true` or `false`.
    Flag,
    /// One of these strings.
    Choice(&'static [&'static str]),
    /// A string.
    Text {
        /// The least bytes.
        bytes_min: usize,
        /// The most bytes.
        bytes_max: usize,
    },
    /// A list of strings that are not empty.
    List {
        /// The most strings.
        items_max: usize,
        /// The most bytes of one.
        bytes_max: usize,
    },
    /// A string with a syntax of its own, in words.
    Parsed(&'static str),
}

/// A field.
#[derive(Clone, Debug, PartialEq)]
pub struct FieldInfo {
    /// Its name.
    pub name: &'static str,
    /// Its unit; empty = it has none.
    pub unit: &'static str,
    /// What it does, and what follows from its value; several lines.
    pub doc: &'static str,
    /// The type of its values.
    pub values: ValueType,
    /// The bounds of its values in words.
    pub bounds: String,
    /// Its default in TOML; `None` = it has none.
    pub default: Option<String>,
    /// A value in TOML: the default, or an example.
    pub example: String,
    /// Whether it must be set.
    pub is_required: bool,
    /// Whether a running daemon takes over a change.
    pub is_live: bool,
}

/// A table.
#[derive(Clone, Debug, PartialEq)]
pub struct TableInfo {
    /// Its name.
    pub name: &'static str,
    /// Whether its header is `[[name]]` and may occur several times.
    pub is_repeated: bool,
    /// What it is about.
    pub doc: &'static str,
    /// Its fields, in the order of the example file.
    pub fields: Vec<FieldInfo>,
}

impl TableInfo {
    /// Its header in the file.
    #[must_use]
    pub fn header(&self) -> String {
        if self.is_repeated { format!("[[{}]]", self.name) } else { format!("[{}]", self.name) }
    }

    /// The field with this name.
    #[must_use]
    pub fn field(&self, name: &str) -> Option<&FieldInfo> {
        self.fields.iter().find(|field| field.name == name)
    }

    /// The variable that sets a field; of a repeated table that of the first.
    #[must_use]
    pub fn variable(&self, field: &str) -> String {
        let path = if self.is_repeated { format!("{}[0]", self.name) } else { self.name.to_owned() };
        variable_of(&path, field)
    }
}

static TABLES: LazyLock<Vec<TableInfo>> = LazyLock::new(|| {
    struct Tables(Vec<TableInfo>);
    impl EachSection for Tables {
        fn section<T: Default>(&mut self, section: &'static Section<T>) {
            self.0.push(TableInfo {
                name: section.name,
                is_repeated: section.repeated,
                doc: section.doc,
                fields: section.fields.iter().map(|field| info(section, field)).collect(),
            });
        }
    }
    let mut tables = Tables(Vec::new());
    fields::each_section(&mut tables);
    tables.0
});

/// Every table, in the order of the example file.
#[must_use]
pub fn tables() -> &'static [TableInfo] {
    &TABLES
}

fn info<T>(section: &Section<T>, field: &Field<T>) -> FieldInfo {
    let (Preset::Value(example) | Preset::Required(example) | Preset::Absent(example)) = field.preset;
    FieldInfo {
        name: field.name,
        unit: field.unit,
        doc: field.doc,
        values: values(&field.kind),
        bounds: field.kind.bounds(),
        default: default_of(section, field.name),
        example: render(field, example),
        is_required: matches!(field.preset, Preset::Required(_)),
        is_live: field.is_live(),
    }
}

fn values<T>(kind: &Kind<T>) -> ValueType {
    match *kind {
        Kind::Integer { min, max, .. } => ValueType::Integer { min, max },
        Kind::Number { min, max, .. } => ValueType::Number { min, max: Some(max).filter(|max| *max < f64::MAX) },
        Kind::Flag { .. } => ValueType::Flag,
        Kind::Choice { names, .. } => ValueType::Choice(names),
        Kind::Text { bytes_min, bytes_max, .. } => ValueType::Text { bytes_min, bytes_max },
        Kind::List { items_max, bytes_max, .. } => ValueType::List { items_max, bytes_max },
        Kind::Parsed { what, .. } => ValueType::Parsed(what),
    }
}

/// The table of a path: `serve`, `worker` or `worker[3]`, `space.policy` or `space[0].policy`, whose fields are those of
/// `policy`.
#[must_use]
pub fn table(path: &str) -> Option<&'static TableInfo> {
    let name = match path.strip_suffix(".policy") {
        Some(space) if unnumbered(space) == fields::SPACE.name => fields::POLICY.name,
        _ => unnumbered(path),
    };
    TABLES.iter().find(|table| table.name == name)
}

fn unnumbered(path: &str) -> &str {
    path.split_once('[').map_or(path, |(name, _)| name)
}

/// The field with this path, `table.field`, and its table. `space.policy.mode` is the field `mode` of `policy`.
#[must_use]
pub fn field(path: &str) -> Option<(&'static TableInfo, &'static FieldInfo)> {
    let (of, name) = path.rsplit_once('.')?;
    let table = table(of)?;
    Some((table, table.field(name)?))
}

/// Up to `most` paths of fields that `written` may mean: fields of that very name in any table, then the most similar.
#[must_use]
pub fn similar(written: &str, most: usize) -> Vec<String> {
    let written = written.to_lowercase();
    let name = written.rsplit('.').next().unwrap_or_default();
    let paths = TABLES.iter().flat_map(|table| table.fields.iter().map(move |field| (table.name, field.name)));
    let mut found: Vec<(usize, String)> = paths
        .filter_map(|(table, field)| {
            let path = format!("{table}.{field}");
            let alone = strsim::damerau_levenshtein(name, field);
            let whole = strsim::damerau_levenshtein(&written, &path);
            let is_near = whole <= 1 + path.len() / 3 || alone <= field.len() / 3;
            is_near.then(|| (if alone == 0 { 0 } else { alone.min(whole) }, path))
        })
        .collect();
    found.sort();
    found.into_iter().take(most).map(|(_, path)| path).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_names_a_field_and_a_misspelt_one_brings_up_others() {
        let named = |path: &str| field(path).map(|(table, field)| (table.name, field.name));
        assert_eq!(named("serve.socket"), Some(("serve", "socket")));
        assert_eq!(named("worker[3].endpoint"), Some(("worker", "endpoint")));
        assert_eq!(named("space.policy.mode"), Some(("policy", "mode")));
        assert_eq!(named("space[0].policy.mode"), Some(("policy", "mode")));
        for bad in ["", "socket", "serve", "serve.sokcet", "serve.policy.mode", "policy.policy"] {
            assert_eq!(named(bad), None, "{bad}");
        }
        assert_eq!(similar("serve.sokcet", 1), ["serve.socket"]);
        assert_eq!(similar("temperature", 3)[0], "policy.temperature");
        assert!(similar("port", 5).contains(&"http.port".to_owned()));
        assert!(similar("qqqqqqqqqq", 3).is_empty());
    }

    #[test]
    fn every_field_is_described_with_a_value_that_the_file_may_have() {
        for (table, field) in tables().iter().flat_map(|table| table.fields.iter().map(move |field| (table, field))) {
            assert!(!field.doc.is_empty() && !field.bounds.is_empty(), "{}.{}", table.name, field.name);
            let line = format!("x = {}", field.example);
            assert!(line.parse::<toml_edit::DocumentMut>().is_ok(), "{}.{}: {line}", table.name, field.name);
        }
    }
}
