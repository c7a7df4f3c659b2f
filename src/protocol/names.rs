//! A list of names, borrowed from the request.

/// A list of names, borrowed. Requests from the wire have it packed.
#[derive(Clone, Copy, Debug)]
pub enum Names<'a> {
    /// Separate strings.
    Listed(&'a [&'a str]),
    /// One string; each name begins where the previous one ends.
    Packed {
        /// The concatenated names.
        text: &'a str,
        /// Where each name ends.
        ends: &'a [u32],
    },
}

impl<'a> Names<'a> {
    /// The empty list.
    pub const NONE: Names<'static> = Names::Listed(&[]);

    /// Names in the list.
    #[must_use]
    pub const fn len(&self) -> usize {
        match self {
            Self::Listed(names) => names.len(),
            Self::Packed { ends, .. } => ends.len(),
        }
    }

    /// Whether the list is empty.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The name at a position.
    #[must_use]
    pub fn get(&self, at: usize) -> Option<&'a str> {
        match self {
            Self::Listed(names) => names.get(at).copied(),
            Self::Packed { text, ends } => {
                let end = *ends.get(at)? as usize;
                let start = at.checked_sub(1).map_or(0, |before| ends[before] as usize);
                text.get(start..end)
            }
        }
    }

    /// All names, in order.
    pub fn iter(&self) -> impl Iterator<Item = &'a str> + use<'a> {
        let names = *self;
        (0..names.len()).filter_map(move |at| names.get(at))
    }
}

impl Default for Names<'_> {
    fn default() -> Self {
        Self::NONE
    }
}

impl PartialEq for Names<'_> {
    fn eq(&self, other: &Self) -> bool {
        self.iter().eq(other.iter())
    }
}

impl Eq for Names<'_> {}

/// Labels that a request prefers or avoids.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Preferences<'a> {
    /// The labels.
    pub names: Names<'a>,
    /// The weight of each label, in the order of the names; negative = avoid.
    pub weights: &'a [f64],
}

impl<'a> Preferences<'a> {
    /// Each label with its weight.
    pub fn iter(&self) -> impl Iterator<Item = (&'a str, f64)> + use<'a> {
        self.names.iter().zip(self.weights.iter().copied())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packed_names_are_the_same_names() {
        let listed = Names::Listed(&["a", "", "bcd"]);
        let packed = Names::Packed { text: "abcd", ends: &[1, 1, 4] };
        assert_eq!(listed, packed);
        assert_eq!((packed.len(), packed.get(2), packed.get(3)), (3, Some("bcd"), None));
        assert!(Names::NONE.is_empty() && listed != Names::NONE);
    }
}
