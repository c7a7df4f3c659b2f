//! The lowest cost, and chance among equals.

use super::decision::Scored;
use super::draws::Drawing;

/// Puts the chosen candidate first and the next `listed - 1` in ascending cost behind it; the rest is cut
/// off. Equal costs: the first place is drawn uniformly, the others stand in table order. Returns how
/// many shared the lowest cost.
pub(super) fn choose(candidates: &mut Vec<Scored>, listed: usize, drawing: &mut Drawing) -> u32 {
    let Some(lowest) = candidates.iter().map(|scored| scored.terms.cost).min_by(f64::total_cmp) else { return 0 };
    // Reservoir of one: the n-th equal replaces the choice with probability 1/n.
    let (mut ties, mut chosen) = (0, 0);
    for (place, scored) in candidates.iter().enumerate() {
        if scored.terms.cost == lowest {
            ties += 1;
            if ties == 1 || drawing.below(ties as usize) == 0 {
                chosen = place;
            }
        }
    }
    candidates.swap(0, chosen);
    let order = |a: &Scored, b: &Scored| a.terms.cost.total_cmp(&b.terms.cost).then(a.index.cmp(&b.index));
    let rest = candidates.len() - 1;
    let listed_rest = listed.saturating_sub(1).min(rest);
    if listed_rest < rest {
        candidates[1..].select_nth_unstable_by(listed_rest, order);
        candidates.truncate(1 + listed_rest);
    }
    candidates[1..].sort_unstable_by(order);
    ties
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fleet::WorkerState;
    use crate::ids::{TierBlocks, Worker, WorkerIndex};
    use crate::route::CostTerms;
    use crate::route::Draws;
    use crate::trust::Trust;

    fn scored(costs: &[f64]) -> Vec<Scored> {
        let one = |(index, cost): (usize, &f64)| Scored {
            index: WorkerIndex(index as u32),
            worker: Worker::new(index as u64, 0),
            overlap: TierBlocks::default(),
            trust: Trust::default(),
            state: WorkerState::Ready,
            terms: CostTerms { cost: *cost, ..CostTerms::default() },
        };
        costs.iter().enumerate().map(one).collect()
    }

    fn order(candidates: &[Scored]) -> Vec<u32> {
        candidates.iter().map(|scored| scored.index.0).collect()
    }

    #[test]
    fn the_lowest_comes_first_and_the_rest_by_cost() {
        let mut drawing = Draws::new(1).begin();
        let mut candidates = scored(&[3.0, 1.0, 2.0, 0.5]);
        assert_eq!(choose(&mut candidates, 8, &mut drawing), 1);
        assert_eq!(order(&candidates), [3, 1, 2, 0]);
        let mut candidates = scored(&[3.0, 1.0, 2.0, 0.5]);
        choose(&mut candidates, 2, &mut drawing);
        assert_eq!(order(&candidates), [3, 1]);
        let mut candidates = scored(&[3.0, 1.0]);
        choose(&mut candidates, 0, &mut drawing);
        assert_eq!(order(&candidates), [1], "the chosen one is always listed");
        assert_eq!(choose(&mut Vec::new(), 8, &mut drawing), 0);
    }

    #[test]
    fn equals_are_chosen_uniformly_and_by_seed() {
        let draw = |seed| {
            let mut drawing = Draws::new(seed).begin();
            let mut counts = [0_u32; 4];
            for _ in 0..9000 {
                let mut candidates = scored(&[1.0, 2.0, 1.0, 1.0]);
                assert_eq!(choose(&mut candidates, 1, &mut drawing), 3);
                counts[candidates[0].index.0 as usize] += 1;
            }
            counts
        };
        let counts = draw(7);
        assert_eq!(counts[1], 0);
        for place in [0, 2, 3] {
            assert!((2700..3300).contains(&counts[place]), "{counts:?}");
        }
        assert_eq!(counts, draw(7));
        assert_ne!(counts, draw(8));
    }
}
