//! Lists of the names that users rely on, in `tests/fixtures/frozen`: a change of one shows as a changed line.

use std::collections::BTreeSet;
use std::path::Path;

/// What takes every list anew, for a change that is meant.
pub(crate) const WRITE: &str = "KVROUTED_FREEZE=1 cargo test --test tidy frozen";

/// Whether the lists are to be written.
pub(crate) fn is_writing() -> bool {
    std::env::var_os("KVROUTED_FREEZE").is_some()
}

/// Compares lines with those of a frozen list, or writes the list when `KVROUTED_FREEZE` is set.
#[track_caller]
pub(crate) fn compare(name: &str, lines: &BTreeSet<String>) {
    assert!(!lines.is_empty(), "{name}: the test found nothing to compare");
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/frozen").join(name);
    if is_writing() {
        let text: String = lines.iter().map(|line| format!("{line}\n")).collect();
        return std::fs::write(&path, text).expect("the list is written");
    }
    let frozen = std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    let frozen: BTreeSet<String> = frozen.lines().map(str::to_owned).collect();
    let gone = frozen.difference(lines).map(|line| format!("- {line}"));
    let new = lines.difference(&frozen).map(|line| format!("+ {line}"));
    let changes: Vec<String> = gone.chain(new).collect();
    assert!(
        changes.is_empty(),
        "users rely on what tests/fixtures/frozen/{name} lists, and it changed:\n{}\nIf the change is meant: {WRITE}",
        changes.join("\n")
    );
}
