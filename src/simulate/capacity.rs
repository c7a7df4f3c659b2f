//! Capacity: the highest load at which a share of the requests meets the SLO, found by bracketing and bisection.
//!
//! Goodput falls with load, but not strictly: a run is one sample, and a small change of the load may move a hot prefix
//! to another worker. The search therefore reports the **lower** of the crossings that it can tell apart: after the
//! bisection it probes a little below the result, and if goodput dips there, it searches again below the dip. Crossings
//! that are closer together than that are noise, which the median over seeds takes out.

/// How to search.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Search {
    /// The share of requests that must meet the SLO, from 0 to 1.
    pub share: f64,
    /// The ratio of the bracket's ends, minus 1, at which the search ends.
    pub precision: f64,
    /// The first load to probe; above 0.
    pub first: f64,
    /// The first bracket's ends are this factor apart; above 1. A small one suits a good first guess.
    pub step: f64,
    /// Whether loads are whole numbers (sessions) rather than rates.
    pub is_whole: bool,
    /// The highest load that means anything.
    pub load_max: f64,
    /// Runs, at most.
    pub probes_max: usize,
}

impl Search {
    /// A search for 90 % to 1 % of load, with no good guess of where it is.
    #[must_use]
    pub const fn new(first: f64, is_whole: bool) -> Self {
        Self { share: 0.9, precision: 0.01, first, step: 1.5, is_whole, load_max: f64::INFINITY, probes_max: 40 }
    }

    /// The same search with a good guess.
    #[must_use]
    pub const fn near(self, first: f64) -> Self {
        Self { first, step: 1.06, ..self }
    }

    fn rounded(&self, load: f64) -> f64 {
        if self.is_whole { load.round().max(1.0) } else { load }
    }

    /// Whether nothing is left to learn between two loads.
    fn is_narrow(&self, low: f64, high: f64) -> bool {
        high <= low * (1.0 + self.precision) || (self.is_whole && high - low <= 1.0)
    }
}

/// The result of a search.
#[derive(Clone, Debug, PartialEq)]
pub struct Capacity {
    /// The load: a factor of the workload's own rate, or live sessions.
    pub load: f64,
    /// Every load that was probed and the goodput there, in the order of the probes.
    pub probes: Vec<(f64, f64)>,
}

/// A probe below the result looks for a dip at this share of it.
const DIP_SHARE: f64 = 0.97;
/// The lowest and the highest load that a search tries, as a factor of the first.
const RANGE: (f64, f64) = (1e-3, 1e3);

/// The capacity by `goodput`, which runs the workload at a load. `None` if it is outside a thousandth to a thousand
/// times the first load, above `load_max`, or not found within `probes_max` runs.
pub fn search(search: &Search, goodput: impl FnMut(f64) -> f64) -> Option<Capacity> {
    let mut probing = Probing { search, goodput, probes: Vec::new() };
    let (mut low, mut high) = probing.bracket(search.rounded(search.first))?;
    loop {
        probing.narrow(&mut low, &mut high)?;
        let below = search.rounded(low * DIP_SHARE);
        if below >= low || probing.meets(below)? {
            let load = probing.crossing(low, high);
            return Some(Capacity { load, probes: probing.probes });
        }
        (low, high) = probing.descend(below)?;
    }
}

struct Probing<'a, F> {
    search: &'a Search,
    goodput: F,
    probes: Vec<(f64, f64)>,
}

impl<F: FnMut(f64) -> f64> Probing<'_, F> {
    /// The goodput at a load, which is run once. `None`: there were too many runs.
    fn goodput_at(&mut self, load: f64) -> Option<f64> {
        if let Some((_, known)) = self.probes.iter().find(|(probed, _)| probed.total_cmp(&load).is_eq()) {
            return Some(*known);
        }
        if self.probes.len() >= self.search.probes_max {
            return None;
        }
        let goodput = (self.goodput)(load);
        self.probes.push((load, goodput));
        Some(goodput)
    }

    fn meets(&mut self, load: f64) -> Option<bool> {
        Some(self.goodput_at(load)? >= self.search.share)
    }

    /// A load at which the share meets the SLO and a higher one at which it does not.
    fn bracket(&mut self, first: f64) -> Option<(f64, f64)> {
        if !self.meets(first)? {
            return self.descend(first);
        }
        let (mut low, mut step) = (first, self.search.step);
        loop {
            let high = self.next_whole(low, low * step, 1.0);
            if high > (first * RANGE.1).min(self.search.load_max) {
                return None;
            }
            if !self.meets(high)? {
                return Some((low, high));
            }
            (low, step) = (high, step * step.min(1.5));
        }
    }

    /// The same, if the share does not meet it at `high`.
    fn descend(&mut self, mut high: f64) -> Option<(f64, f64)> {
        let mut step = self.search.step;
        loop {
            let low = self.next_whole(high, high / step, -1.0);
            let low = if self.search.is_whole && high > 1.0 { low.max(1.0) } else { low };
            if low < self.search.first * RANGE.0 || low <= 0.0 {
                return None;
            }
            if self.meets(low)? {
                return Some((low, high));
            }
            (high, step) = (low, step * step.min(1.5));
        }
    }

    /// `to`, or the whole number next to `from` in its direction if rounding would not move.
    fn next_whole(&self, from: f64, to: f64, direction: f64) -> f64 {
        if !self.search.is_whole {
            return to;
        }
        let to = to.round();
        if (to - from) * direction >= 1.0 { to } else { from + direction }
    }

    /// Narrows the bracket: by guesses where a straight line between its ends crosses the share, and by halving it
    /// where a guess took too little off.
    fn narrow(&mut self, low: &mut f64, high: &mut f64) -> Option<()> {
        // A guess is moved a little towards the far end of the bracket, so that two guesses leave a narrow one.
        let margin = 1.0 + 0.4 * self.search.precision;
        let mut halves = false;
        while !self.search.is_narrow(*low, *high) {
            let (middle, width) = ((*low * *high).sqrt(), (*high / *low).ln());
            let guess = self.crossing(*low, *high);
            let guess = if guess < middle { guess * margin } else { guess / margin };
            let load = if halves { middle } else { guess }.clamp(*low * margin, *high / margin);
            let load = if self.search.is_whole { load.round().clamp(*low + 1.0, *high - 1.0) } else { load };
            if self.meets(load)? {
                *low = load;
            } else {
                *high = load;
            }
            halves = !halves && (*high / *low).ln() > 0.6 * width;
        }
        Some(())
    }

    /// Where a straight line between the goodput at `low` and that at `high` crosses the share.
    fn crossing(&self, low: f64, high: f64) -> f64 {
        let of =
            |load: f64| self.probes.iter().find(|(probed, _)| probed.total_cmp(&load).is_eq()).map(|probe| probe.1);
        // Of neighbouring numbers of sessions, the lower is the answer.
        let is_exact = self.search.is_whole && high - low <= 1.0;
        match (of(low), of(high)) {
            (Some(above), Some(below)) if above > below && !is_exact => {
                low + (high - low) * ((above - self.search.share) / (above - below)).clamp(0.0, 1.0)
            }
            _ => low,
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_dip_below_the_crossing_is_taken_as_the_capacity() {
        // Goodput dips at 0.965 to 0.975 of the upper crossing.
        let goodput = |load: f64| if load > 10.0 || (9.6..9.79).contains(&load) { 0.8 } else { 0.95 };
        let found = search(&Search::new(5.0, false), goodput).expect("a crossing");
        assert!((found.load - 9.6).abs() < 0.1, "{found:?}");
    }

    #[test]
    fn sessions_are_found_exactly() {
        for capacity in [1.0, 2.0, 7.0, 63.0, 64.0, 90.0] {
            let goodput = |live: f64| if live <= capacity { 1.0 } else { 0.5 };
            let found = search(&Search::new(24.0, true), goodput).expect("a crossing");
            assert_eq!(found.load, capacity);
            assert!(found.probes.iter().all(|(live, _)| live.fract() == 0.0));
        }
    }

    #[test]
    fn a_goodput_that_never_falls_has_no_capacity() {
        assert_eq!(search(&Search::new(1.0, false), |_| 1.0), None);
        assert_eq!(search(&Search::new(1.0, false), |_| 0.0), None);
        assert_eq!(search(&Search::new(8.0, true), |_| 0.0), None);
    }

    #[test]
    fn a_capacity_beyond_the_highest_load_is_not_reported() {
        let goodput = |live: f64| if live <= 50.0 { 1.0 } else { 0.5 };
        let up_to = |load_max| search(&Search { load_max, ..Search::new(16.0, true) }, goodput).map(|found| found.load);
        assert_eq!((up_to(48.0), up_to(200.0)), (None, Some(50.0)));
    }

    #[test]
    fn a_good_guess_needs_few_runs() {
        let goodput = |load: f64| 1.0 / (1.0 + (load / 2.0).powi(12) / 9.0);
        let found = search(&Search::new(1.0, false).near(2.05), goodput).expect("a crossing");
        assert!(found.probes.len() <= 6 && (found.load - 2.0).abs() < 0.02, "{found:?}");
    }

    proptest! {
        #[test]
        fn the_crossing_of_a_falling_curve_is_found_within_one_percent(
            capacity in 0.05..50.0_f64, steepness in 1.0..40.0_f64, step in 1.05..2.0_f64,
        ) {
            let goodput = |load: f64| 1.0 / (1.0 + (load / capacity).powf(steepness) / 9.0);
            let found = search(&Search { step, ..Search::new(1.0, false) }, goodput);
            let found = found.expect("a crossing");
            prop_assert!((found.load / capacity - 1.0).abs() <= 0.01, "{:?}", found);
            prop_assert!(found.probes.len() < 24, "{:?}", found);
        }
    }
}
