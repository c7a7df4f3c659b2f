//! The text of a configuration for a reader outside the machine: its known fields, with values that may be secret masked.

use std::collections::BTreeSet;
use std::fmt::Write as _;

use toml_edit::{Array, Document, Item, TableLike, Value};

use super::document::{location_at, sections};
use super::problem::Location;
use super::{Flags, parse};
use crate::limits::PROBLEMS_MAX;
use crate::masking::{MASK, is_secret_name, masked};

/// Fields whose values are always masked, although no rule for names or words would.
const HIDDEN: [&str; 1] = ["nats_user"];

/// A configuration without secrets.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MaskedConfig {
    /// A TOML document. It has no comments.
    pub text: String,
    /// Values that are masked, in whole or in part.
    pub masked: usize,
}

/// Why a configuration cannot be shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unshowable {
    /// It is not valid TOML; the line of the first error, from 1.
    Syntax(u32),
    /// It has more problems than a check lists.
    TooManyProblems,
}

/// The known tables of a configuration, in the order of the text, without comments and unknown tables. Masks the values of
/// unknown fields, of fields that the check refuses, and of fields for secrets. In all other values [`masked`] masks words
/// that look like secrets.
///
/// # Errors
/// The text cannot be shown, because no part of it can be told from a secret: see [`Unshowable`].
pub fn without_secrets(text: &str) -> Result<MaskedConfig, Unshowable> {
    let document = Document::parse(text).map_err(|error| {
        let offset = error.span().map_or(0, |span| span.start);
        match location_at(text, offset.min(text.len())) {
            Location::Line { line, .. } => Unshowable::Syntax(line),
            Location::Document | Location::Flag(_) | Location::Variable(_) => Unshowable::Syntax(1),
        }
    })?;
    let problems = parse("", text, &Flags::default()).err().map(|problems| problems.list).unwrap_or_default();
    if problems.len() >= PROBLEMS_MAX {
        return Err(Unshowable::TooManyProblems);
    }
    let refused = problems.into_iter().map(|problem| problem.path).collect();
    let mut writer = Writer { refused, out: MaskedConfig::default() };
    writer.document(document.as_table());
    Ok(writer.out)
}

struct Writer {
    /// The paths of fields that the check refuses.
    refused: BTreeSet<String>,
    out: MaskedConfig,
}

impl Writer {
    fn document(&mut self, root: &dyn TableLike) {
        let known = sections();
        for (name, item) in root.iter() {
            let Some((name, fields)) = known.iter().find(|(known, _)| *known == name) else {
                self.line("# a table or a field that kvrouted does not know is left out");
                continue;
            };
            match (item.as_table_like(), item.as_array_of_tables(), item.as_array()) {
                (Some(table), ..) => self.table(&format!("[{name}]"), name, fields, table),
                (_, Some(tables), _) => {
                    for (at, table) in tables.iter().enumerate() {
                        self.repeated((name, at), fields, table);
                    }
                }
                (.., Some(tables)) => {
                    for (at, table) in tables.iter().enumerate() {
                        match table.as_inline_table() {
                            Some(table) => self.repeated((name, at), fields, table),
                            None => self.line(&format!("# {name} {at} is no table, and left out")),
                        }
                    }
                }
                _ => self.line(&format!("# {name} is no table, and left out")),
            }
        }
    }

    fn line(&mut self, line: &str) {
        self.out.text.push_str(line);
        self.out.text.push('\n');
    }

    fn repeated(&mut self, (name, at): (&str, usize), fields: &[&str], table: &dyn TableLike) {
        let path = format!("{name}[{at}]");
        self.table(&format!("[[{name}]]"), &path, fields, table);
        if let Some(policy) = table.get("policy").and_then(Item::as_table_like) {
            let fields = sections().into_iter().find(|(of, _)| *of == "policy").map(|(_, fields)| fields);
            self.table(&format!("[{name}.policy]"), &format!("{path}.policy"), &fields.unwrap_or_default(), policy);
        }
    }

    fn table(&mut self, header: &str, path: &str, fields: &[&str], table: &dyn TableLike) {
        self.line(header);
        for (name, item) in table.iter() {
            // `repeated` writes it after this table.
            if item.is_table_like() && name == "policy" {
                continue;
            }
            let is_known = fields.contains(&name);
            let is_refused = !is_known || self.refused.contains(&format!("{path}.{name}"));
            let is_hidden = HIDDEN.contains(&name) || is_secret_name(name) || is_secret_in_place_of_a_path(name, item);
            let shown = item.as_value().filter(|_| !is_refused && !is_hidden).and_then(shown);
            let (value, is_whole) = shown.unwrap_or_else(|| (format!("\"{MASK}\""), false));
            self.out.masked += usize::from(!is_whole);
            match is_known {
                true => drop(writeln!(self.out.text, "{name} = {value}")),
                // An unknown name may be a secret too.
                false => drop(writeln!(self.out.text, "# unknown field {:?} = {value}", masked(name))),
            }
        }
    }
}

/// Whether a field for the path of a file has a value that is no path, which may be the secret itself.
fn is_secret_in_place_of_a_path(name: &str, item: &Item) -> bool {
    let is_path = |text: &str| ["/", "./", "../"].iter().any(|begins| text.starts_with(begins));
    name.ends_with("_file") && !item.as_str().is_some_and(is_path)
}

/// A value as TOML, and whether nothing of it is masked; `None` = a kind of value that no field has.
fn shown(value: &Value) -> Option<(String, bool)> {
    Some(match value {
        Value::String(text) => {
            let shown = masked(text.value());
            let is_whole = shown == *text.value();
            (Value::from(shown).to_string(), is_whole)
        }
        Value::Integer(_) | Value::Float(_) | Value::Boolean(_) => (value.clone().decorated("", "").to_string(), true),
        Value::Array(array) => list(array)?,
        Value::Datetime(_) | Value::InlineTable(_) => return None,
    })
}

fn list(array: &Array) -> Option<(String, bool)> {
    let items: Option<Vec<(String, bool)>> = array.iter().map(shown).collect();
    let (items, are_whole): (Vec<String>, Vec<bool>) = items?.into_iter().unzip();
    Some((format!("[{}]", items.join(", ")), are_whole.into_iter().all(|is_whole| is_whole)))
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOSTILE: &str = r#"
# the old password was c0mment-secret
token = "root-secret"
[serve]
socket = "/run/k.sock" # trailing-secret
user_share_percent = "number-secret"
passwort = "field-secret"
[ingest]
nats_user = "user-secret"
nats_secret_file = "/etc/kvrouted/nats.secret"
[routers]
nats = ["nats://alice:url-secret@n1:4222", "nats://n2:4222"]
[vault]
anything = "table-secret"
[[space]]
model = "m"
[space.policy]
mode = "mode-secret"
device_credit = 0.5
[[worker]]
id = 7
url = "http://bob:worker-secret@h:8000"
name = "hf_namesecretnamesecret"
taints = ["a", "sk-taintsecret"]
"#;

    #[test]
    fn no_secret_of_a_configuration_is_shown_and_its_fields_are() {
        let shown = without_secrets(HOSTILE).unwrap();
        assert!(!shown.text.contains("-secret"), "{}", shown.text);
        for secret in ["alice", "bob", "namesecret", "taintsecret"] {
            assert!(!shown.text.contains(secret), "{secret}: {}", shown.text);
        }
        for line in [
            "socket = \"/run/k.sock\"",
            "nats_secret_file = \"/etc/kvrouted/nats.secret\"",
            "user_share_percent = \"(masked)\"",
            "nats_user = \"(masked)\"",
            "[[space]]\nmodel = \"m\"\n[space.policy]\nmode = \"(masked)\"\ndevice_credit = 0.5",
            "id = 7",
        ] {
            assert!(shown.text.contains(line), "{line}: {}", shown.text);
        }
        assert!(shown.masked >= 7, "{shown:?}");
        assert!(shown.text.parse::<toml_edit::DocumentMut>().is_ok(), "{}", shown.text);
    }

    #[test]
    fn a_valid_configuration_is_shown_as_it_is() {
        let text =
            "[serve]\nsocket = \"/s\"\n[[space]]\nmodel = \"a/b\"\n[[worker]]\nid = 1\nendpoint = \"tcp://h:1\"\n";
        assert_eq!(without_secrets(text), Ok(MaskedConfig { text: text.to_owned(), masked: 0 }));
        let shown = without_secrets(&super::super::example()).unwrap();
        assert!(shown.masked == 0 && shown.text.len() > 1000, "{shown:?}");
    }

    #[test]
    fn a_text_that_is_no_toml_is_not_shown() {
        assert_eq!(without_secrets("[serve]\nsocket = secret\n"), Err(Unshowable::Syntax(2)));
        let many = "[serve]\n".to_owned() + &(0..PROBLEMS_MAX).map(|at| format!("f{at} = 1\n")).collect::<String>();
        assert_eq!(without_secrets(&many), Err(Unshowable::TooManyProblems));
    }
}
