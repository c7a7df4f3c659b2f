//! The ways to choose that the demo can show side by side.

use crate::route::Mode;

/// What is shown unless something else is asked for: nothing known of the caches, and everything.
pub(super) const POLICIES_DEFAULT: &str = "round-robin,kv";

/// A mode by its name.
///
/// # Errors
/// What the modes are, if it is none or one that shows nothing here: the demo pins no request, and its engines
/// publish events, so that nothing has to be predicted.
pub(super) fn parse_policy(text: &str) -> Result<Mode, String> {
    let shown = |mode: &&Mode| !matches!(mode, Mode::Direct | Mode::Approximate);
    let named = Mode::ALL.iter().filter(shown).find(|mode| mode.name() == text);
    named.copied().ok_or_else(|| {
        let names: Vec<_> = Mode::ALL.iter().filter(shown).map(|mode| mode.name()).collect();
        format!("expected one of {}", names.join(", "))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn modes_go_by_their_names_but_for_those_that_show_nothing() {
        assert_eq!(parse_policy("lmetric"), Ok(Mode::Lmetric));
        assert!(POLICIES_DEFAULT.split(',').all(|name| parse_policy(name).is_ok()));
        for name in ["direct", "approximate", "KV", ""] {
            assert!(parse_policy(name).unwrap_err().starts_with("expected one of kv, load-aware, least-loaded"));
        }
    }
}
