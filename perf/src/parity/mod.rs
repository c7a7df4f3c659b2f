//! `parity`: random fleets and requests, decided by kvrouted and by the peer's reference policy on equal inputs.
//!
//! `case` → (`ours` | `peer`) → `answer` → `compare`. The peer says who it chooses, and costs only to its log: `logged`
//! reads them there, one candidate after the other, drawn at a temperature at which all are equal.

mod answer;
mod case;
mod compare;
mod logged;
mod ours;
mod peer;

use serde::Serialize;

use self::case::Case;
use self::compare::Compared;
use self::logged::Log;
use crate::args::ParityArgs;
use crate::failure::Failure;
use crate::mix::mix;

/// What a run found.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Report {
    /// What the cases follow from.
    pub(crate) seed: u64,
    /// What was compared.
    #[serde(flatten)]
    pub(crate) compared: Compared,
}

/// Compares as many random cases as asked for.
///
/// # Errors
/// A side fails.
pub(crate) fn run(args: &ParityArgs) -> Result<Report, Failure> {
    Ok(Report { seed: args.seed, compared: compare(args.cases, args.seed)? })
}

fn compare(cases: u64, seed: u64) -> Result<Compared, Failure> {
    let log = Log::default();
    let mut compared = Compared::default();
    tracing::subscriber::with_default(log.clone(), || {
        (0..cases).try_for_each(|at| compared.case(&Case::of(mix(seed, at)), &log))
    })?;
    Ok(compared)
}

impl Report {
    /// The report as a person reads it.
    #[must_use]
    pub(crate) fn text(&self) -> String {
        let Compared { cases, bookings, costs, costs_equal_bits, cost_difference_max, choices, different, .. } =
            &self.compared;
        let Compared { refused, pinned, sampled, tied, differences, .. } = &self.compared;
        let mut text = format!(
            "{cases} cases from seed {}: {refused} refused, {pinned} pinned, {sampled} sampled, {tied} tied; {bookings} \
             bookings before\n{costs} costs, {costs_equal_bits} of them equal bit for bit, the others apart by at most \
             {cost_difference_max:.1e} of the larger; {choices} choices\n{different} cases differ",
            self.seed
        );
        for difference in differences {
            text.push_str("\n  ");
            text.push_str(difference);
        }
        text
    }
}
