//! The example file: the field table as a configuration, each field with its default, bounds and description.

use std::fmt::Write as _;

use super::field::{Field, Preset, Section};
use super::fields;

const HEAD: &str = "\
# kvrouted: every field, with its default. A change takes effect at the next start. A change of a field with
# `Reload: yes` also takes effect when the daemon gets SIGHUP.
";

/// A configuration file with every field at its default and its documentation. Fields without a default are comments
/// with an example value.
#[must_use]
pub fn example() -> String {
    let mut text = String::from(HEAD);
    section(&mut text, &fields::SERVE);
    section(&mut text, &fields::ADMIN);
    section(&mut text, &fields::METRICS);
    section(&mut text, &fields::HTTP);
    section(&mut text, &fields::REMOTE);
    section(&mut text, &fields::LOG);
    section(&mut text, &fields::PROCESS);
    section(&mut text, &fields::SANDBOX);
    section(&mut text, &fields::INGEST);
    section(&mut text, &fields::BOOKING);
    section(&mut text, &fields::SNAPSHOT);
    section(&mut text, &fields::JOURNAL);
    section(&mut text, &fields::SHADOW);
    section(&mut text, &fields::POLICY);
    section(&mut text, &fields::DISCOVERY);
    section(&mut text, &fields::ROUTERS);
    section(&mut text, &fields::RELAY);
    section(&mut text, &fields::SPACE);
    section(&mut text, &fields::WORKER);
    text
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
