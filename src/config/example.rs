//! The example file: the field table as a configuration, each field with its default, bounds and description.

use std::fmt::Write as _;

use super::field::{Field, Preset, Section};
use super::fields::{self, EachSection};

const HEAD: &str = "\
# kvrouted: every field, with its default. A change takes effect at the next start. A change of a field with
# `Reload: yes` also takes effect when the daemon gets SIGHUP.
";

/// A configuration file with every field at its default and its documentation. Fields without a default are comments
/// with an example value.
#[must_use]
pub fn example() -> String {
    let mut example = Example(String::from(HEAD));
    fields::each_section(&mut example);
    example.0
}

struct Example(String);

impl EachSection for Example {
    fn section<T: Default>(&mut self, of: &'static Section<T>) {
        section(&mut self.0, of);
    }
}

#[cfg(feature = "simulate")]
const FLEET_HEAD: &str = "\
# A simulated fleet: every field, with its default, for kvrouted simulate --fleet FILE.
";

/// A file that describes a simulated fleet, as [`example`] is one of a configuration.
#[cfg(feature = "simulate")]
#[must_use]
pub fn example_fleet() -> String {
    let mut text = String::from(FLEET_HEAD);
    section(&mut text, &fields::FLEET);
    section(&mut text, &fields::FLEET_ROUTERS);
    section(&mut text, &fields::POOLS);
    section(&mut text, &fields::ENGINES);
    section(&mut text, &fields::CHANGE);
    text
}

/// A default or example value in TOML.
pub(super) fn render<T>(field: &Field<T>, value: &str) -> String {
    match field.kind {
        _ if field.kind.is_quoted() => format!("\"{value}\""),
        super::field::Kind::List { .. } => {
            let items: Vec<_> = value.split('+').filter(|item| !item.is_empty()).map(|i| format!("\"{i}\"")).collect();
            format!("[{}]", items.join(", "))
        }
        _ => value.to_owned(),
    }
}

fn section<T>(text: &mut String, section: &Section<T>) {
    let (open, close) = if section.repeated { ("[[", "]]") } else { ("[", "]") };
    // Writing to a string cannot fail.
    let _ = writeln!(text, "\n{}\n{open}{}{close}", comment(section.doc), section.name);
    for field in section.fields {
        let _ = writeln!(text, "{}", comment(field.doc));
        let unit = if field.unit.is_empty() { String::new() } else { format!("Unit: {}. ", field.unit) };
        let reload = if field.is_live() { " Reload: yes." } else { "" };
        let _ = writeln!(text, "# {unit}Values: {}.{reload}", field.kind.bounds());
        let _ = match field.preset {
            Preset::Value(value) => writeln!(text, "{} = {}", field.name, render(field, value)),
            Preset::Required(value) => writeln!(text, "{} = {} # required", field.name, render(field, value)),
            Preset::Absent(value) => writeln!(text, "# {} = {}", field.name, render(field, value)),
        };
    }
}

/// A description as comment lines.
fn comment(doc: &str) -> String {
    format!("# {}", doc.replace('\n', "\n# "))
}
