//! The audit lines of the log: who changed what, from which value to which. Each change by an administrator is one line
//! with the target `audit`, at the level `info`.

use std::fmt::Display;

use crate::limits::AUDIT_TEXT_BYTES_MAX;

/// The target of the lines.
pub(crate) const TARGET: &str = "audit";
/// What stands for a value that is not there.
pub(crate) const ABSENT: &str = "absent";

/// Logs one change.
pub(crate) fn changed(who: &dyn Display, what: &'static str, object: &dyn Display, (before, after): (&str, &str)) {
    let (before, after) = (shortened(before), shortened(after));
    tracing::info!(target: TARGET, who = %who, what, object = %object, before, after, "changed");
}

/// A text within the bound of a line; `…` stands for what is left out.
fn shortened(text: &str) -> String {
    match text.len() > AUDIT_TEXT_BYTES_MAX {
        true => format!("{}…", &text[..text.floor_char_boundary(AUDIT_TEXT_BYTES_MAX)]),
        false => text.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_text_is_shortened() {
        let long = "ä".repeat(AUDIT_TEXT_BYTES_MAX);
        assert!(shortened(&long).len() <= AUDIT_TEXT_BYTES_MAX + '…'.len_utf8());
        assert_eq!(shortened("short"), "short");
    }
}
