//! The threat model: every line of it names a test, an attack or a fuzz target that exists, or says in parentheses why there
//! is none.

use std::collections::BTreeSet;
use std::path::Path;

use crate::{report, root};

const PAGE: &str = "docs/threat-model.md";
/// Where the attacks are listed.
const ATTACKS: [&str; 2] = ["tests/attack/main.rs", "gateway/tests/attack.rs"];
/// Where the fuzz targets are listed.
const FUZZED: [&str; 2] = ["fuzz/Cargo.toml", "gateway/fuzz/Cargo.toml"];
/// Where tests are.
const TESTED: [&str; 4] = ["src", "tests", "gateway/src", "gateway/tests"];

fn read(path: &Path) -> String {
    std::fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// The names of all functions below a folder that an attribute makes a test, those of property tests too.
fn tests_of(folder: &Path, names: &mut BTreeSet<String>) {
    for entry in std::fs::read_dir(folder).expect("a folder").flatten() {
        let path = entry.path();
        if path.is_dir() {
            tests_of(&path, names);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            let (text, mut is_test) = (read(&path), false);
            for line in text.lines().map(str::trim_start) {
                let name =
                    line.trim_start_matches("async ").strip_prefix("fn ").and_then(|rest| rest.split('(').next());
                match name {
                    Some(name) if is_test => drop(names.insert(name.to_owned())),
                    _ => {}
                }
                is_test = line.starts_with("#[test]")
                    || line.starts_with("#[tokio::test")
                    || is_test && line.starts_with("#[");
            }
        }
    }
}

/// The names of attacks: `module::NAME: "what is done";`.
fn attacks_of(text: &str) -> impl Iterator<Item = String> {
    let name = |line: &str| {
        let (path, bound) = line.trim().split_once(": ")?;
        bound.starts_with('"').then(|| path.rsplit_once("::")).flatten().map(|(_, name)| name.to_owned())
    };
    text.lines().filter_map(name)
}

/// The last cell of each row of the page's tables, with the number of its line.
fn shown(text: &str) -> Vec<(usize, String)> {
    let rows = text.lines().enumerate().filter(|(_, line)| line.starts_with('|') && !line.starts_with("|---"));
    let cells =
        rows.filter_map(|(at, line)| Some((at + 1, line.trim_end_matches('|').rsplit('|').next()?.trim().to_owned())));
    cells.filter(|(_, cell)| cell != "shown by").collect()
}

#[test]
fn every_line_of_the_threat_model_names_what_shows_it() {
    let mut names = BTreeSet::new();
    TESTED.iter().for_each(|folder| tests_of(&root().join(folder), &mut names));
    let tests = names.len();
    names.extend(ATTACKS.iter().flat_map(|path| attacks_of(&read(&root().join(path))).collect::<Vec<_>>()));
    let attacks = names.len() - tests;
    for path in FUZZED {
        let text = read(&root().join(path));
        let named = text.lines().filter_map(|line| line.strip_prefix("name = \""));
        names.extend(named.map(|name| name.trim_end_matches('"').to_owned()));
    }
    assert!(tests > 1000 && attacks > 60, "{tests} tests, {attacks} attacks");
    let mut problems = Vec::new();
    let cells = shown(&read(&root().join(PAGE)));
    for (line, cell) in &cells {
        let spans: Vec<&str> = cell.split('`').skip(1).step_by(2).collect();
        let is_reasoned = cell.starts_with('(') && cell.ends_with(')');
        if spans.is_empty() && !is_reasoned {
            problems.push(format!("{PAGE}:{line}: neither a test nor a reason"));
        }
        let unknown = spans.into_iter().filter(|name| !is_reasoned && !names.contains(*name));
        problems.extend(unknown.map(|name| format!("{PAGE}:{line}: there is no test, attack or fuzz target `{name}`")));
    }
    report(&problems);
    assert!(cells.len() > 50, "only {} lines", cells.len());
}

#[test]
fn every_attack_is_in_the_threat_model() {
    let page = read(&root().join(PAGE));
    let missing = |name: &String| !page.contains(&format!("`{name}`"));
    let problems: Vec<String> = ATTACKS
        .iter()
        .flat_map(|path| attacks_of(&read(&root().join(path))).filter(missing).collect::<Vec<_>>())
        .map(|name| format!("{PAGE}: the attack `{name}` is missing"))
        .collect();
    report(&problems);
}
