//! The audit lines of the log: who changed what, with the values before and after. Each change by an administrator, by a file of
//! workers or by a daemon that takes over is one line with the target `audit`, at the level `info`.

use std::fmt::Display;

use crate::limits::AUDIT_TEXT_BYTES_MAX;

/// The `tracing` target of audit lines.
pub(crate) const TARGET: &str = "audit";
/// The text for a value that does not exist.
pub(crate) const ABSENT: &str = "absent";

/// Logs one change as an audit line, with at most [`AUDIT_TEXT_BYTES_MAX`] bytes of each value.
pub(crate) fn changed(who: &dyn Display, what: &'static str, object: &dyn Display, (before, after): (&str, &str)) {
    let (before, after) = (shortened(before), shortened(after));
    tracing::info!(target: TARGET, who = %who, what, object = %object, before, after, "changed");
}

/// The text, cut to [`AUDIT_TEXT_BYTES_MAX`] bytes; `…` stands for the rest.
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
