//! What a side answers to a case.

use super::case::Rank;

/// Why nobody can be chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Refusal {
    /// There is nobody, or nobody fits.
    Nobody,
    /// All who fit are busy.
    Busy,
    /// The pinned engine is not on the allow-list.
    PinNotAllowed,
    /// The pinned engine is busy.
    PinBusy,
}

/// The prompt's place in what is known.
#[derive(Clone, Debug, Default)]
pub(crate) struct Answer {
    /// The hashes of the question's blocks.
    pub(crate) locals: Vec<u64>,
    /// Who may be chosen at what cost, ascending.
    pub(crate) costs: Vec<(Rank, f64)>,
    /// Whether the costs are whole, or known to three places after the point.
    pub(crate) is_rounded: bool,
    /// Why nobody.
    pub(crate) refusal: Option<Refusal>,
}

impl Answer {
    /// Who costs least.
    #[must_use]
    pub(crate) fn lowest(&self) -> Vec<Rank> {
        let least = self.costs.iter().map(|(_, cost)| *cost).fold(f64::INFINITY, f64::min);
        self.costs.iter().filter(|(_, cost)| *cost == least).map(|(rank, _)| *rank).collect()
    }
}
