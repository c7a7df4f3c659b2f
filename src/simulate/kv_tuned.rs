//! `kv-tuned`: the block cost of Dynamo's `kv` mode, with the weights that suit a training workload best.

use super::figures::Slo;
use super::measure::Measured;
use super::run::Settings;
use super::simulate_under;
use super::workload::Workload;
use crate::route::Policy;

/// Weights of the block cost that an operator of Dynamo can tune.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TunedWeights {
    /// Credit of a block in device memory.
    pub device_credit: f64,
    /// Factor of the prefill term.
    pub prefill_load_scale: f64,
    /// Cost of a request in flight, in blocks.
    pub active_request_weight: f64,
}

impl TunedWeights {
    /// The product's default policy with these weights.
    pub(super) fn policy(self) -> Policy {
        let Self { device_credit, prefill_load_scale, active_request_weight } = self;
        Policy { device_credit, prefill_load_scale, active_request_weight, ..Policy::kv() }
    }
}

/// The weights that the policy `kv-tuned` uses. [`tuned_weights`] found them on the first half of the Mooncake
/// conversation trace (6015 requests), at 1.0, 1.25 and 1.5 times its rate, on 8 workers `70b-tp4` with blocks of 16
/// tokens. In the geometric mean of the three rates they reach 81 % of the default weights' score. They lie on an edge of
/// the grid, where it is flat: the scores of the next five are within 2 %.
pub const KV_TUNED: TunedWeights =
    TunedWeights { device_credit: 1.5, prefill_load_scale: 32.0, active_request_weight: 4096.0 };

const DEVICE_CREDITS: [f64; 4] = [1.0, 1.25, 1.5, 2.0];
const PREFILL_LOAD_SCALES: [f64; 6] = [1.0, 2.0, 4.0, 8.0, 16.0, 32.0];
/// In blocks of 16 tokens, the largest is a prompt of 65 536 tokens.
const ACTIVE_REQUEST_WEIGHTS: [f64; 5] = [0.0, 64.0, 256.0, 1024.0, 4096.0];

/// Searches a grid for the weights with the least mean TTFT times mean time to the last token. `workload` arrives at
/// each of `rates` times its own rate; the products of all rates are multiplied, so that no rate dominates. Of equal
/// weights the first of the grid is returned.
#[must_use]
pub fn tuned_weights(workload: &Workload, rates: &[f64], settings: &Settings) -> TunedWeights {
    let workloads: Vec<Workload> = rates.iter().map(|rate| workload.clone().scaled(*rate)).collect();
    least_of(grid(), |weights| {
        let of_rate = |workload: &Workload| {
            let outcomes = simulate_under(workload, settings, &weights.policy()).unwrap_or_default();
            let figures = Measured::of(&outcomes, &Slo::default(), &settings.engines);
            figures.ttft_s.mean * figures.e2e_s.mean
        };
        workloads.iter().map(of_rate).product()
    })
}

/// All combinations, the default weights first.
fn grid() -> impl Iterator<Item = TunedWeights> {
    let with_credit = |device_credit: f64| {
        PREFILL_LOAD_SCALES.into_iter().flat_map(move |prefill_load_scale| {
            ACTIVE_REQUEST_WEIGHTS.into_iter().map(move |active_request_weight| TunedWeights {
                device_credit,
                prefill_load_scale,
                active_request_weight,
            })
        })
    };
    DEVICE_CREDITS.into_iter().flat_map(with_credit)
}

/// The weights with the least score, the first of equals; [`KV_TUNED`] if there are none with a finite score.
fn least_of(
    candidates: impl Iterator<Item = TunedWeights>,
    mut score: impl FnMut(TunedWeights) -> f64,
) -> TunedWeights {
    let (mut best, mut least) = (KV_TUNED, f64::INFINITY);
    for weights in candidates {
        let score = score(weights);
        if score < least {
            (best, least) = (weights, score);
        }
    }
    best
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_of_the_best_weights_wins() {
        let distance = |weights: TunedWeights| (weights.prefill_load_scale - 6.0).abs();
        let best = least_of(grid(), distance);
        assert_eq!(best, TunedWeights { device_credit: 1.0, prefill_load_scale: 4.0, active_request_weight: 0.0 });
        assert_eq!(least_of(grid(), |_| f64::NAN), KV_TUNED);
    }

    #[test]
    fn the_grid_begins_with_the_default_and_has_the_tuned_weights() {
        let all: Vec<TunedWeights> = grid().collect();
        assert_eq!(all.len(), 120);
        assert_eq!(all.first().map(|weights| weights.policy()), Some(Policy::kv()));
        assert!(all.contains(&KV_TUNED));
    }
}
