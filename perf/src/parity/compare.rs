//! Both answers to a case, side by side.

use rand_xoshiro::SplitMix64;
use rand_xoshiro::rand_core::{Rng, SeedableRng};
use serde::Serialize;

use super::answer::{Answer, Refusal};
use super::case::{Case, Step};
use super::logged::Log;
use super::ours::Ours;
use super::peer::Peer;
use crate::failure::Failure;
use crate::mix::mix;

/// How far two costs may be apart, as a share of the larger: what sums in another order differ by.
const COST_TOLERANCE: f64 = 1e-9;
/// How far from a cost that the peer rounds, in blocks.
const ROUNDED_TOLERANCE: f64 = 0.000_500_1;
/// Choices that are compared in a case with a temperature, and how often the peer's lowest is drawn without.
const CHOICES: u64 = 16;

/// What was compared.
#[derive(Clone, Debug, Default, Serialize)]
pub(crate) struct Compared {
    /// Cases.
    pub(crate) cases: u64,
    /// Of them: those in which nobody could be chosen.
    pub(crate) refused: u64,
    /// Of them: those in which the request was pinned.
    pub(crate) pinned: u64,
    /// Of them: those with a temperature.
    pub(crate) sampled: u64,
    /// Of them: those without one in which several cost least.
    pub(crate) tied: u64,
    /// Requests that were booked before.
    pub(crate) bookings: u64,
    /// Costs of one candidate in one case.
    pub(crate) costs: u64,
    /// Of them: those that are equal bit for bit.
    pub(crate) costs_equal_bits: u64,
    /// How far two costs were apart at most, as a share of the larger; rounded ones left out.
    pub(crate) cost_difference_max: f64,
    /// Choices of one worker by one draw.
    pub(crate) choices: u64,
    /// Cases that differ.
    pub(crate) different: u64,
    /// The first of them, in words.
    pub(crate) differences: Vec<String>,
}

/// Differences that are told in words.
const TOLD_MAX: usize = 20;

impl Compared {
    /// Compares one more case.
    ///
    /// # Errors
    /// A side fails.
    pub(crate) fn case(&mut self, case: &Case, log: &Log) -> Result<(), Failure> {
        let mut ours = Ours::new(case)?;
        let mut peer = Peer::new(case, log.clone())?;
        let (answer, theirs) = (ours.answer()?, peer.answer()?);
        self.cases += 1;
        self.refused += u64::from(theirs.refusal.is_some());
        self.pinned += u64::from(case.ask.pin.is_some());
        self.bookings += case.steps.iter().filter(|(_, step)| matches!(step, Step::Booked(_))).count() as u64;
        let difference = match self.answers(&answer, &theirs) {
            None if theirs.refusal.is_none() && case.ask.pin.is_none() => {
                self.choices(case, &mut ours, &peer, &answer, &theirs)?
            }
            difference => difference,
        };
        if let Some(difference) = difference {
            self.different += 1;
            if self.differences.len() < TOLD_MAX {
                self.differences.push(format!("case {}: {difference}", case.seed));
            }
        }
        Ok(())
    }

    /// The first difference between two answers.
    fn answers(&mut self, ours: &Answer, theirs: &Answer) -> Option<String> {
        if ours.locals != theirs.locals {
            return Some("the blocks are hashed differently".to_owned());
        }
        if !refusals_agree(ours.refusal, theirs.refusal) {
            return Some(format!("refused: {:?}, the peer: {:?}", ours.refusal, theirs.refusal));
        }
        let who = |answer: &Answer| answer.costs.iter().map(|(rank, _)| *rank).collect::<Vec<_>>();
        if who(ours) != who(theirs) {
            return Some(format!("in the running: {:?}, the peer: {:?}", who(ours), who(theirs)));
        }
        for ((rank, our), (_, their)) in ours.costs.iter().zip(&theirs.costs) {
            self.costs += 1;
            self.costs_equal_bits += u64::from(our.to_bits() == their.to_bits());
            let apart = (our - their).abs();
            let share = if apart == 0.0 { 0.0 } else { apart / our.abs().max(their.abs()) };
            let agree = if theirs.is_rounded { apart <= ROUNDED_TOLERANCE } else { share <= COST_TOLERANCE };
            if !agree {
                return Some(format!("{rank:?} costs {our}, the peer says {their}"));
            }
            if !theirs.is_rounded {
                self.cost_difference_max = self.cost_difference_max.max(share);
            }
        }
        None
    }

    /// The first difference between who is chosen.
    fn choices(
        &mut self,
        case: &Case,
        ours: &mut Ours<'_>,
        peer: &Peer<'_>,
        answer: &Answer,
        theirs: &Answer,
    ) -> Result<Option<String>, Failure> {
        if peer.temperature() == 0.0 {
            return self.lowest(ours, peer, answer, theirs);
        }
        self.sampled += 1;
        if answer.lowest().len() == answer.costs.len() {
            // Any is as good as any other, and each side draws in its own way.
            return Ok(None);
        }
        let place = |rank| answer.costs.iter().position(|(of, _)| *of == rank);
        for turn in 0..CHOICES {
            let seed = mix(case.seed, turn);
            let drawn = draw(seed, answer);
            let around = peer.picks_around(drawn)?;
            let pick = ours.pick(seed);
            self.choices += 1;
            // Where the draws next to ours choose the same, ours lies between them and must too.
            let [below, above] = around.map(place);
            if !pick.and_then(place).is_some_and(|pick| below <= Some(pick) && Some(pick) <= above) {
                return Ok(Some(format!("{drawn} chooses {pick:?}, the peer {around:?}")));
            }
        }
        Ok(None)
    }

    /// Whether the same workers cost least, and none but they are chosen.
    fn lowest(
        &mut self,
        ours: &mut Ours<'_>,
        peer: &Peer<'_>,
        answer: &Answer,
        theirs: &Answer,
    ) -> Result<Option<String>, Failure> {
        let (lowest, their_lowest) = (answer.lowest(), theirs.lowest());
        self.tied += u64::from(lowest.len() > 1);
        if lowest != their_lowest {
            return Ok(Some(format!("{lowest:?} cost least, the peer: {their_lowest:?}")));
        }
        for seed in 0..CHOICES {
            self.choices += 1;
            let picks = peer.picks_around((seed as f64 + 0.5) / CHOICES as f64)?;
            let pick = ours.pick(seed);
            if !pick.is_some_and(|pick| lowest.contains(&pick)) || !picks.iter().all(|pick| lowest.contains(pick)) {
                return Ok(Some(format!("of {lowest:?} {pick:?} is chosen, by the peer {picks:?}")));
            }
        }
        Ok(None)
    }
}

/// Both refuse, for the same reason; or the request is pinned to an engine that is neither there nor allowed, of which
/// the peer says the second and kvrouted the first.
fn refusals_agree(ours: Option<Refusal>, theirs: Option<Refusal>) -> bool {
    ours == theirs || (ours, theirs) == (Some(Refusal::Nobody), Some(Refusal::PinNotAllowed))
}

/// The number from 0 to 1 by which kvrouted samples from these candidates: the next that the seed draws after one for
/// each candidate that costs as little as the lowest before it.
fn draw(seed: u64, answer: &Answer) -> f64 {
    let mut drawing = SplitMix64::seed_from_u64(seed);
    let mut lowest = f64::INFINITY;
    for (place, (_, cost)) in answer.costs.iter().enumerate() {
        if place > 0 && cost.total_cmp(&lowest).is_eq() {
            drawing.next_u64();
        }
        lowest = lowest.min(*cost);
    }
    (drawing.next_u64() >> 11) as f64 / (1_u64 << 53) as f64
}

#[cfg(test)]
mod tests {
    use super::super::case::Rank;
    use super::*;

    fn rank(engine: u64) -> Rank {
        Rank { engine, rank: 0 }
    }

    fn answer(costs: &[f64]) -> Answer {
        let costs = costs.iter().enumerate().map(|(engine, cost)| (rank(engine as u64), *cost)).collect();
        Answer { costs, ..Answer::default() }
    }

    #[test]
    fn a_difference_is_found_and_told() {
        let differs = |ours: &Answer, theirs: &Answer| Compared::default().answers(ours, theirs);
        assert_eq!(differs(&answer(&[1.0, 2.0]), &answer(&[1.0, 2.0 + 1e-12])), None);
        assert!(differs(&answer(&[1.0, 2.0]), &answer(&[1.0, 2.1])).is_some_and(|told| told.contains("2.1")));
        assert!(differs(&answer(&[1.0, 2.0]), &answer(&[1.0])).is_some());
        let refused = Answer { refusal: Some(Refusal::Busy), ..Answer::default() };
        assert!(differs(&refused, &Answer::default()).is_some());
        let rounded = Answer { is_rounded: true, ..answer(&[2.000]) };
        assert_eq!(differs(&answer(&[2.0004]), &rounded), None);
        assert!(differs(&answer(&[2.0006]), &rounded).is_some());
        let hashed = Answer { locals: vec![1], ..answer(&[1.0]) };
        assert!(differs(&hashed, &answer(&[1.0])).is_some());
    }

    #[test]
    fn hundreds_of_random_cases_do_not_differ() {
        let compared = super::super::compare(300, 1).expect("both sides answer");
        assert_eq!(compared.differences, Vec::<String>::new());
        assert_eq!(compared.cases, 300);
        for (what, count) in [
            ("refused", compared.refused),
            ("pinned", compared.pinned),
            ("sampled", compared.sampled),
            ("tied", compared.tied),
        ] {
            assert!(count >= 5, "{what}: {count} cases");
        }
        assert!(compared.costs > 3000 && compared.choices > 1000 && compared.bookings > 1000, "{compared:?}");
    }
}
