//! Names that an engine uses and that no rule here covers, so that people are told which ones they are.

use crate::limits::UNRULED_NAME_BYTES_MAX;

/// What a name is of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Unruled {
    /// A kind of event: skipped.
    Tag,
    /// A place where blocks are: its blocks are not counted.
    Medium,
    /// What a KV group serves, other than main attention.
    GroupKind,
}

impl Unruled {
    /// The name used in status.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Tag => "tag",
            Self::Medium => "medium",
            Self::GroupKind => "group_kind",
        }
    }
}

/// The characters of a name that may be shown: its first bytes, with a `?` for each that is no printable ASCII.
pub(super) fn shown(name: &[u8]) -> impl Iterator<Item = char> + Clone + '_ {
    let shown = |byte: &u8| if byte.is_ascii_graphic() { char::from(*byte) } else { '?' };
    name.iter().take(UNRULED_NAME_BYTES_MAX).map(shown)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_shown_is_short_and_printable() {
        assert_eq!(shown(b"sliding_window").collect::<String>(), "sliding_window");
        assert_eq!(shown("a b\n\u{e9}".as_bytes()).collect::<String>(), "a?b???");
        assert_eq!(shown(&[b'x'; 1000]).count(), UNRULED_NAME_BYTES_MAX);
    }
}
