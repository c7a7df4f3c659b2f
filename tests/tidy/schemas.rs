//! The schemas, the files generated from them, and the tables that document them agree.

// clippy.toml allows it in #[test] functions; all of this file is test.
#![allow(clippy::unwrap_used)]

use std::collections::BTreeSet;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use kvrouted::error::{Kind, Side};
use kvrouted::finding::{Harm, Symptom};
use kvrouted::route::{Mode, ReplyNotes, Rule};
use kvrouted::schema_generated::{events, routing};
use kvrouted::trust::{TrustLevel, TrustReason};
use kvrouted::wire::{FrameKind, features};

use crate::kit::skipped;
use crate::root;

fn read(path: impl AsRef<Path>) -> String {
    let path = root().join(path);
    std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

#[test]
fn generated_files_are_those_of_the_schemas() {
    let generated = root().join("src/schema_generated");
    let mut stamped = Vec::new();
    let mut expected = String::new();
    for line in read("src/schema_generated/STAMP").lines() {
        let (digest, name) = line.split_once("  ").unwrap_or_else(|| panic!("STAMP: '{line}' is not 'digest  name'"));
        let folder = if name.ends_with(".fbs") { root() } else { &generated };
        expected.push_str(&format!("{digest}  {}\n", folder.join(name).display()));
        stamped.push(PathBuf::from(name));
    }
    for folder in ["schemas", "src/schema_generated"] {
        for entry in std::fs::read_dir(root().join(folder)).unwrap() {
            let name = entry.unwrap().file_name().into_string().unwrap();
            let listed = match name.rsplit_once('.') {
                Some((_, "fbs")) => stamped.contains(&Path::new("schemas").join(&name)),
                _ if name.ends_with("_generated.rs") => stamped.contains(&PathBuf::from(&name)),
                _ => true,
            };
            assert!(listed, "{folder}/{name} is not in STAMP: run scripts/gen-schemas");
        }
    }
    let spawned =
        Command::new("sha256sum").args(["--check", "--strict"]).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn();
    let mut check = match spawned {
        Ok(check) => check,
        Err(error) => {
            return skipped("the stamp of the generated files", &format!("sha256sum does not run: {error}"));
        }
    };
    check.stdin.take().unwrap().write_all(expected.as_bytes()).unwrap();
    let output = check.wait_with_output().unwrap();
    let report = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "the generated files are stale: run scripts/gen-schemas\n{report}");
    assert_eq!(report.lines().filter(|line| line.ends_with(": OK")).count(), stamped.len());
}

/// The constants of the C client's header.
fn c_constants() -> Vec<(String, usize)> {
    let constant = |line: &str| {
        let (name, value) = line.trim().strip_suffix(',').unwrap_or(line.trim()).split_once(" = ")?;
        Some((name.strip_prefix("KVR__")?.to_string(), value.parse().ok()?))
    };
    read("clients/c/kvrouted_fields.h").lines().filter_map(constant).collect()
}

/// `RouteReply` becomes `ROUTE_REPLY`.
fn upper(name: &str) -> String {
    let mut upper = String::new();
    for c in name.chars() {
        if c.is_uppercase() && !upper.is_empty() {
            upper.push('_');
        }
        upper.push(c.to_ascii_uppercase());
    }
    upper
}

/// The schema compiler made the constants of `routing_generated.rs`; `scripts/gen-client-fields` made those of the header.
#[test]
fn the_c_clients_numbers_are_those_of_the_schema_compiler() {
    let constants = c_constants();
    let value = |name: &str| constants.iter().find(|(other, _)| other == name).map(|(_, value)| *value);
    let (mut table, mut compared, mut fields) = (String::new(), 0, 0);
    let table_ends = |table: &str, fields: usize| {
        assert_eq!(value(&format!("{table}_FIELD_COUNT")).unwrap_or(0), fields, "the number of fields of {table}");
    };
    for line in read("src/schema_generated/routing_generated.rs").lines().map(str::trim) {
        let begun = line.strip_prefix("impl<'a> ").and_then(|line| line.strip_suffix("<'a> {"));
        if let Some(name) = begun.filter(|name| name.chars().all(char::is_alphanumeric)) {
            table_ends(&table, fields);
            (table, fields) = (upper(name), 0);
        } else if let Some((field, offset)) =
            line.strip_prefix("pub const VT_").and_then(|line| line.split_once(": ::flatbuffers::VOffsetT = "))
        {
            let offset: usize = offset.trim_end_matches(';').parse().unwrap();
            // Rust's keywords get an underscore. A vtable begins with two numbers of two bytes each.
            let field = field.trim_end_matches('_');
            assert_eq!(value(&format!("{table}_{field}")), Some(offset / 2 - 2), "{table}.{field}");
            (fields, compared) = (fields + 1, compared + 1);
        }
    }
    table_ends(&table, fields);
    assert!(compared > 200, "only {compared} fields were compared");
    let sizes = [
        ("WORKER_REF_BYTES", size_of::<routing::WorkerRef>()),
        ("SESSION_TOKEN_BYTES", size_of::<routing::SessionToken>()),
        ("BOOKING_HANDLE_BYTES", size_of::<routing::BookingHandle>()),
        ("MEDIA_HASH_BYTES", size_of::<routing::MediaHash>()),
        ("TRACE_CONTEXT_BYTES", size_of::<routing::TraceContext>()),
        ("BLOCK_RANGE_BYTES", size_of::<routing::BlockRange>()),
        ("TIER_BLOCKS_BYTES", size_of::<routing::TierBlocks>()),
        ("TRUST_BYTES", size_of::<routing::Trust>()),
    ];
    sizes.iter().for_each(|(name, size)| assert_eq!(value(name), Some(*size), "{name}"));
    for kind in routing::Kind::ENUM_VALUES {
        let name = format!("KIND_{}", upper(kind.variant_name().unwrap()));
        assert_eq!(value(&name), Some(usize::from(kind.0)), "{name}");
    }
}

/// A field that a client does not know would be lost without a word.
#[test]
fn the_c_client_sends_every_field_of_a_route() {
    let client = read("clients/c/kvrouted_types.h") + &read("clients/c/kvrouted.h");
    let constants = c_constants();
    let fields = constants.iter().filter_map(|(name, _)| name.strip_prefix("ROUTE_"));
    let fields: Vec<_> = fields.filter(|field| !field.starts_with("REPLY_") && *field != "FIELD_COUNT").collect();
    assert!(fields.len() > 20, "{fields:?}");
    for field in fields {
        let name = format!("KVR__ROUTE_{field}");
        let is_name = |rest: &str| !rest.starts_with(|c: char| c.is_alphanumeric() || c == '_');
        assert!(client.match_indices(&name).any(|(at, _)| is_name(&client[at + name.len()..])), "{name} is never used");
    }
}

/// The rows of the table under `## title` of schemas/README.md, cell by cell, without backticks.
fn table(title: &str) -> Vec<Vec<String>> {
    let text = read("schemas/README.md");
    let section = text.split("\n## ").find(|section| section.lines().next() == Some(title));
    let section = section.unwrap_or_else(|| panic!("schemas/README.md has no section '{title}'"));
    let rows: Vec<Vec<String>> = section
        .lines()
        .filter(|line| line.starts_with('|'))
        .skip(2)
        .map(|line| line.trim_matches('|').split('|').map(|cell| cell.trim().trim_matches('`').to_string()).collect())
        .collect();
    assert!(!rows.is_empty(), "section '{title}' has no table");
    rows
}

/// Compares the rows of the table under `## title` of schemas/README.md with these cells, or writes them when
/// `KVROUTED_FREEZE` is set.
fn make(title: &str, rows: &[Vec<String>]) {
    let plain = |row: &Vec<String>| row.iter().map(|cell| cell.trim_matches('`').to_owned()).collect::<Vec<_>>();
    let (made, found) = (rows.iter().map(plain).collect::<Vec<_>>(), table(title));
    if made == found || !crate::frozen_list::is_writing() {
        return assert_eq!(found, made, "schemas/README.md, {title}: {}", crate::frozen_list::WRITE);
    }
    let text = read("schemas/README.md");
    let (before, section) = text.split_once(&format!("\n## {title}\n")).unwrap();
    let (section, after) = section.split_once("\n## ").unwrap();
    let is_row = |line: &&str| line.starts_with('|');
    let head: Vec<_> = section.lines().take_while(|line| !is_row(line)).collect();
    let rest: Vec<_> = section.lines().skip(head.len()).skip_while(is_row).collect();
    let titles: Vec<_> = section.lines().filter(is_row).take(2).collect();
    let rows: Vec<_> = rows.iter().map(|row| format!("| {} |", row.join(" | "))).collect();
    let lines = head.into_iter().chain(titles).chain(rows.iter().map(String::as_str)).chain(rest);
    let section: String = lines.map(|line| format!("{line}\n")).collect();
    let text = format!("{before}\n## {title}\n{section}\n## {after}");
    // In one step, because other tests read it.
    std::fs::write(root().join("schemas/README.md.part"), text).unwrap();
    std::fs::rename(root().join("schemas/README.md.part"), root().join("schemas/README.md")).unwrap();
}

/// The first `columns` cells of each row.
fn head(rows: Vec<Vec<String>>, columns: usize) -> Vec<Vec<String>> {
    rows.into_iter().map(|row| row.into_iter().take(columns).collect()).collect()
}

fn side_name(side: Side) -> &'static str {
    match side {
        Side::Gateway => "gateway",
        Side::Worker => "worker",
        Side::Kernel => "kernel",
        Side::Config => "config",
        Side::Daemon => "daemon",
    }
}

#[test]
fn error_codes_are_documented() {
    let retry = |kind: Kind| if kind.is_retryable() { "yes" } else { "no" };
    let expected: Vec<Vec<String>> = Kind::ALL
        .iter()
        .map(|kind| {
            vec![(*kind as u16).to_string(), kind.name().into(), side_name(kind.side()).into(), retry(*kind).into()]
        })
        .collect();
    assert_eq!(head(table("Error codes"), 4), expected);
}

#[test]
fn error_sides_are_the_schemas() {
    for side in routing::ErrorSide::ENUM_VALUES {
        let ours = [Side::Gateway, Side::Worker, Side::Kernel, Side::Config, Side::Daemon][usize::from(side.0)];
        assert_eq!(side.variant_name().unwrap().to_lowercase(), side_name(ours));
        assert_eq!(side.0, ours as u8);
    }
    assert_eq!(routing::ErrorSide::ENUM_VALUES.len(), 5);
}

#[test]
fn trust_reasons_are_documented() {
    let row = |reason: &TrustReason| {
        let meaning = reason.meaning().trim_end_matches('.');
        let bit = (*reason as u8).to_string();
        [&bit, reason.name(), reason.cap().name(), reason.harm().name(), meaning, reason.remedy()]
            .map(String::from)
            .into()
    };
    let expected: Vec<Vec<String>> = TrustReason::ALL.iter().map(row).collect();
    assert_eq!(table("Trust reasons"), expected);
}

#[test]
fn findings_are_documented() {
    let row = |symptom: &Symptom| {
        let meaning = symptom.meaning().trim_end_matches('.');
        [symptom.name(), symptom.harm().name(), meaning, symptom.why(), symptom.remedy()].map(String::from).into()
    };
    let expected: Vec<Vec<String>> = Symptom::ALL.iter().map(row).collect();
    assert_eq!(table("Findings"), expected);
}

#[test]
fn harms_are_the_schemas() {
    for harm in routing::Harm::ENUM_VALUES {
        assert_eq!(Harm::from_u8(harm.0) as u8, harm.0);
        assert_eq!(harm.variant_name().unwrap().to_lowercase(), Harm::from_u8(harm.0).name());
    }
    assert_eq!(routing::Harm::ENUM_VALUES.len(), 3);
}

#[test]
fn trust_levels_are_documented_and_those_of_both_schemas() {
    let levels: Vec<TrustLevel> = (0..=u8::MAX).map_while(TrustLevel::from_u8).collect();
    let expected: Vec<Vec<String>> =
        levels.iter().map(|level| vec![(*level as u8).to_string(), level.name().into()]).collect();
    assert_eq!(head(table("Trust levels"), 2), expected);
    let snake = |name: &str| if name == "LowerBound" { "lower_bound".to_string() } else { name.to_lowercase() };
    let of_routing: Vec<_> =
        routing::TrustLevel::ENUM_VALUES.iter().map(|v| (v.0, snake(v.variant_name().unwrap()))).collect();
    let of_events: Vec<_> =
        events::SourceTrust::ENUM_VALUES.iter().map(|v| (v.0, snake(v.variant_name().unwrap()))).collect();
    let ours: Vec<_> = levels.iter().map(|level| (*level as u8, level.name().to_string())).collect();
    assert_eq!(of_routing, ours);
    assert_eq!(of_events, ours);
}

#[test]
fn message_kinds_are_documented_and_replies_follow_their_requests() {
    let kinds = routing::Kind::ENUM_VALUES;
    let row = |kind: &routing::Kind| {
        let purpose = FrameKind::from_u8(kind.0).map_or("No message; never sent", FrameKind::purpose);
        let purpose = purpose.trim().trim_end_matches('.');
        vec![kind.0.to_string(), format!("`{}`", kind.variant_name().unwrap()), purpose.to_owned()]
    };
    make("Message kinds", &kinds.iter().map(row).collect::<Vec<_>>());
    let known: Vec<u8> = FrameKind::ALL.iter().map(|kind| *kind as u8).collect();
    let numbers: Vec<u8> = kinds.iter().map(|kind| kind.0).filter(|number| *number != 0).collect();
    assert_eq!(known, numbers, "every kind of the schema is known by its number");
    for reply in kinds.iter().filter(|kind| kind.variant_name().unwrap().ends_with("Reply")) {
        let request = routing::Kind(reply.0 - 1).variant_name().unwrap();
        assert_eq!(reply.0 % 2, 0);
        assert_eq!(reply.variant_name().unwrap(), format!("{request}Reply"));
    }
}

#[test]
fn reply_notes_are_documented() {
    let notes = [
        ("scheme_unknown", ReplyNotes::SCHEME_UNKNOWN),
        ("read_contended", ReplyNotes::READ_CONTENDED),
        ("all_down", ReplyNotes::ALL_DOWN),
        ("affinity_off", ReplyNotes::AFFINITY_OFF),
        ("prefill_local", ReplyNotes::PREFILL_LOCAL),
        ("prefill_nobody", ReplyNotes::PREFILL_NOBODY),
    ];
    let expected: Vec<Vec<String>> =
        notes.iter().map(|(name, note)| vec![note.0.trailing_zeros().to_string(), (*name).into()]).collect();
    assert_eq!(head(table("Reply notes"), 2), expected);
}

#[test]
fn rules_and_modes_are_documented() {
    let expected: Vec<Vec<String>> = Rule::ALL.iter().map(|rule| vec![rule.name().into()]).collect();
    assert_eq!(head(table("Rules"), 1), expected);
    let modes = routing::Mode::ENUM_VALUES.iter().skip(1).map(|mode| mode.variant_name().unwrap_or_default());
    assert!(modes.eq(Mode::ALL.iter().map(|mode| format!("{mode:?}"))), "the schema's modes, in its order");
    let page = read("docs/policy.md");
    assert!(Mode::NAMES.iter().all(|name| page.contains(&format!("| `{name}` | "))), "docs/policy.md, Modes");
}

#[test]
fn feature_bits_are_documented() {
    let bits = [
        ("routing", features::ROUTING),
        ("bookings", features::BOOKINGS),
        ("local_hash_prompts", features::LOCAL_HASHES),
        ("media_hashes", features::MEDIA),
        ("explain", features::EXPLAIN),
        ("overlap_query", features::OVERLAP),
        ("workers_query", features::WORKERS),
        ("overrides", features::OVERRIDES),
        ("constraints", features::CONSTRAINTS),
        ("shared_hits", features::SHARED_HITS),
        ("progress", features::PROGRESS),
        ("reports", features::REPORTS),
        ("queue", features::QUEUE),
        ("affinity", features::AFFINITY),
        ("pairs", features::PAIRS),
        ("potential_loads", features::POTENTIAL_LOADS),
        ("watch", features::WATCH),
        ("lanes", features::LANES),
    ];
    let expected: Vec<Vec<String>> =
        bits.iter().map(|(name, bit)| vec![bit.trailing_zeros().to_string(), (*name).into()]).collect();
    assert_eq!(head(table("Feature bits"), 2), expected);
    assert_eq!(bits.iter().fold(0, |all, (_, bit)| all | bit), features::SERVED, "what is served has a row");
}

#[test]
fn bits_of_features_and_notes_are_dense_and_their_names_unique() {
    for title in ["Feature bits", "Reply notes", "Trust reasons"] {
        let rows = table(title);
        let mut names: Vec<&String> = rows.iter().map(|row| &row[1]).collect();
        for (bit, row) in rows.iter().enumerate() {
            assert_eq!(row[0], bit.to_string(), "{title}");
        }
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), rows.len(), "{title}: a name is used twice");
        assert!(rows.len() <= 64, "{title}: more bits than the field has");
    }
}

/// A line for each field and value of a schema: `FILE.fbs table Route 0 space_id: uint`.
fn schema_lines(file: &str, lines: &mut BTreeSet<String>) {
    let text = read(Path::new("schemas").join(file));
    let code: String = text.lines().map(|line| line.split("//").next().unwrap()).collect::<Vec<_>>().join("\n");
    let mut rest = code.as_str();
    while let Some(at) = rest.find(['{', ';']) {
        let head = rest[..at].split_whitespace().collect::<Vec<_>>().join(" ");
        if rest[at..].starts_with(';') {
            lines.insert(format!("{file} {head}"));
            rest = &rest[at + 1..];
            continue;
        }
        let end = at + rest[at..].find('}').unwrap();
        let name = head.split(" :").next().unwrap();
        lines.insert(format!("{file} {head}"));
        let is_enum = head.starts_with("enum ");
        let members = rest[at + 1..end].split(if is_enum { ',' } else { ';' });
        let members = members.map(|member| member.split_whitespace().collect::<Vec<_>>().join(" "));
        for (id, member) in members.filter(|member| !member.is_empty()).enumerate() {
            // An enum's value carries its number; a field's number is its place, as no field has an `id`.
            assert!(!member.contains("(id") && is_enum != member.contains(':'), "{file}: {member}");
            lines.insert(if is_enum {
                format!("{file} {name} {member}")
            } else {
                format!("{file} {name} {id:02} {member}")
            });
        }
        rest = &rest[end + 1..];
    }
}

#[test]
fn the_wire_is_the_frozen_one() {
    let mut lines = BTreeSet::new();
    for file in ["kv_events.fbs", "load_events.fbs", "routing.fbs", "snapshot.fbs"] {
        schema_lines(file, &mut lines);
    }
    // The tests above hold these tables to the code.
    let numbered = ["Error codes", "Trust reasons", "Trust levels", "Reply notes", "Feature bits"];
    for title in numbered {
        lines.extend(head(table(title), 2).iter().map(|row| format!("{title} {:>5} {}", row[0], row[1])));
    }
    for kind in routing::Kind::ENUM_VALUES {
        lines.insert(format!("Message kinds {:>5} {}", kind.0, kind.variant_name().unwrap()));
    }
    for title in ["Findings", "Rules"] {
        lines.extend(head(table(title), 1).iter().map(|row| format!("{title} {}", row[0])));
    }
    crate::frozen_list::compare("wire.txt", &lines);
}
