//! Robust regression with constants that are not negative: few columns, thousands of rows, some of them far off.
//!
//! Iteratively reweighted least squares on relative errors. A row counts less the further it is off (Huber), so that late
//! reports do not move the constants. No constant may be negative: of all subsets of the columns, the one with the least
//! loss whose least-squares solution has no negative constant is taken. With at most six columns that is exact and cheap,
//! where a library for it would bring a whole package for matrices of any size.

/// Columns, at most.
const COLUMNS_MAX: usize = 6;
/// Rounds of reweighting; a few suffice to be within a thousandth.
const ROUNDS: usize = 12;
/// A row counts in full up to this many times the usual error.
const SURPRISE_MAX: f64 = 1.5;
/// The least usual relative error: below it rows are as good as exact.
const ERROR_MIN: f64 = 0.01;

/// One observation: the columns, and what they explain, above 0.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Row<const N: usize> {
    pub(super) columns: [f64; N],
    pub(super) value: f64,
}

/// The constants that explain the rows best; `None` if there are no more rows than columns, or none of the columns explains
/// anything.
pub(super) fn constants<const N: usize>(rows: &[Row<N>]) -> Option<[f64; N]> {
    const { assert!(N <= COLUMNS_MAX, "all subsets of the columns are tried") };
    let is_usable =
        |row: &&Row<N>| row.value > 0.0 && row.value.is_finite() && row.columns.iter().all(|of| of.is_finite());
    let rows: Vec<Row<N>> = rows.iter().filter(is_usable).copied().collect();
    if rows.len() <= N {
        return None;
    }
    let mut weights = vec![1.0; rows.len()];
    let mut expected: Vec<f64> = rows.iter().map(|row| row.value).collect();
    let mut found = None;
    for _ in 0..ROUNDS {
        let fitted = least_squares(&rows, &expected, &weights)?;
        let errors: Vec<f64> = rows.iter().map(|row| row.value / explained(row, &fitted).max(1e-12) - 1.0).collect();
        let usual = median(errors.iter().map(|error| error.abs()).collect()).max(ERROR_MIN);
        for ((weight, error), (expected, row)) in weights.iter_mut().zip(&errors).zip(expected.iter_mut().zip(&rows)) {
            *weight = (SURPRISE_MAX * usual / error.abs().max(1e-12)).min(1.0);
            // Relative to what is expected, so that a few small values do not outweigh all others.
            *expected = explained(row, &fitted).max(row.value * 0.1);
        }
        found = Some(fitted);
    }
    found
}

/// What constants make of a row.
pub(super) fn explained<const N: usize>(row: &Row<N>, constants: &[f64; N]) -> f64 {
    row.columns.iter().zip(constants).map(|(column, constant)| column * constant).sum()
}

/// The median; 0 without values.
fn median(mut values: Vec<f64>) -> f64 {
    let middle = values.len() / 2;
    if values.is_empty() {
        return 0.0;
    }
    *values.select_nth_unstable_by(middle, f64::total_cmp).1
}

/// The constants, none of them negative, with the least sum of weighted squares of `(value - explained) / expected`.
fn least_squares<const N: usize>(rows: &[Row<N>], expected: &[f64], weights: &[f64]) -> Option<[f64; N]> {
    // Columns of very different size are brought to one scale, for the sake of the elimination.
    let mut scales = [0.0_f64; N];
    let relative = |row: &Row<N>, expected: f64, at: usize| row.columns[at] / expected;
    for (row, expected) in rows.iter().zip(expected) {
        (0..N).for_each(|at| scales[at] = scales[at].max(relative(row, *expected, at).abs()));
    }
    let (mut matrix, mut right, mut square) = ([[0.0; N]; N], [0.0; N], 0.0);
    for ((row, expected), weight) in rows.iter().zip(expected).zip(weights) {
        let value = row.value / expected;
        let columns: [f64; N] = std::array::from_fn(|at| match scales[at] > 0.0 {
            true => relative(row, *expected, at) / scales[at],
            false => 0.0,
        });
        for (line, one) in matrix.iter_mut().zip(columns) {
            line.iter_mut().zip(columns).for_each(|(sum, other)| *sum += weight * one * other);
        }
        right.iter_mut().zip(columns).for_each(|(sum, one)| *sum += weight * one * value);
        square += weight * value * value;
    }
    let candidates = (1..1_u32 << N).filter_map(|subset| {
        let solution = solve(&matrix, &right, subset)?;
        let is_allowed = solution.iter().all(|constant| *constant >= 0.0);
        // The sum of squares at the solution of the normal equations.
        let loss = square - right.iter().zip(&solution).map(|(right, constant)| right * constant).sum::<f64>();
        is_allowed.then_some((solution, loss))
    });
    let (solution, _) = candidates.min_by(|a, b| a.1.total_cmp(&b.1))?;
    Some(std::array::from_fn(|at| if scales[at] > 0.0 { solution[at] / scales[at] } else { 0.0 }))
}

/// Solves the normal equations of a subset of the columns; the others are 0. `None` if they do not tell the columns apart.
fn solve<const N: usize>(matrix: &[[f64; N]; N], right: &[f64; N], subset: u32) -> Option<[f64; N]> {
    let chosen: Vec<usize> = (0..N).filter(|at| subset >> at & 1 == 1).collect();
    let mut lines: Vec<Vec<f64>> =
        chosen.iter().map(|line| chosen.iter().map(|at| matrix[*line][*at]).chain([right[*line]]).collect()).collect();
    for at in 0..chosen.len() {
        let pivot = (at..chosen.len()).max_by(|a, b| lines[*a][at].abs().total_cmp(&lines[*b][at].abs()))?;
        lines.swap(at, pivot);
        let scale = matrix[chosen[at]][chosen[at]];
        if lines[at][at].abs() <= 1e-9 * scale.abs() || lines[at][at] == 0.0 {
            return None;
        }
        let line = lines[at].clone();
        for other in (0..chosen.len()).filter(|other| *other != at) {
            let factor = lines[other][at] / line[at];
            lines[other].iter_mut().zip(&line).for_each(|(of, with)| *of -= factor * with);
        }
    }
    let mut solution = [0.0; N];
    for (at, line) in chosen.iter().zip(lines.iter().enumerate()) {
        solution[*at] = line.1[chosen.len()] / line.1[line.0];
    }
    Some(solution)
}

#[cfg(test)]
mod tests {
    use rand::{RngExt, SeedableRng};
    use rand_xoshiro::Xoshiro256PlusPlus;

    use super::*;

    /// Rows of `constants` over columns of very different size, each off by up to `noise` of its value.
    fn rows(constants: [f64; 3], noise: f64, count: usize) -> Vec<Row<3>> {
        let mut rng = Xoshiro256PlusPlus::seed_from_u64(5);
        let row = |_| {
            let tokens = rng.random_range(3.0_f64..10.0).exp();
            let columns = [1.0, tokens, tokens * rng.random_range(0.0..60_000.0)];
            let exact = columns.iter().zip(constants).map(|(column, constant)| column * constant).sum::<f64>();
            Row { columns, value: exact * (1.0 + noise * rng.random_range(-1.0..1.0)) }
        };
        (0..count).map(row).collect()
    }

    fn errors(found: [f64; 3], truth: [f64; 3]) -> [f64; 3] {
        std::array::from_fn(|at| (found[at] / truth[at] - 1.0).abs())
    }

    const TRUTH: [f64; 3] = [7e-3, 5e-5, 1e-9];

    #[test]
    fn constants_are_found_in_noise() {
        let exact = constants(&rows(TRUTH, 0.0, 50)).expect("enough rows");
        assert!(errors(exact, TRUTH).iter().all(|error| *error < 1e-6), "{exact:?}");
        let noisy = constants(&rows(TRUTH, 0.3, 2000)).expect("enough rows");
        assert!(errors(noisy, TRUTH).iter().all(|error| *error < 0.1), "{noisy:?}");
    }

    #[test]
    fn late_reports_do_not_move_the_constants() {
        let mut rows = rows(TRUTH, 0.1, 1000);
        rows.iter_mut().step_by(6).for_each(|row| row.value *= 20.0);
        rows.push(Row { columns: [1.0, f64::NAN, 1.0], value: 1.0 });
        rows.push(Row { columns: [1.0, 1.0, 1.0], value: f64::INFINITY });
        let found = constants(&rows).expect("enough rows");
        assert!(errors(found, TRUTH).iter().all(|error| *error < 0.15), "{found:?}");
    }

    #[test]
    fn a_constant_is_never_negative() {
        let mut rows = rows([0.0, 5e-5, 1e-9], 0.2, 500);
        rows.iter_mut().for_each(|row| row.value *= 1.0 - 0.2 / (1.0 + row.columns[1] * 1e-3));
        let found = constants(&rows).expect("enough rows");
        assert!(found.iter().all(|constant| *constant >= 0.0), "{found:?}");
    }

    #[test]
    fn columns_that_cannot_be_told_apart_share_one_constant() {
        let rows: Vec<Row<2>> =
            (1..40).map(|at| Row { columns: [f64::from(at); 2], value: f64::from(at) * 3.0 }).collect();
        let found = constants(&rows).expect("enough rows");
        assert!((found.iter().sum::<f64>() - 3.0).abs() < 1e-6, "{found:?}");
    }

    #[test]
    fn too_few_rows_have_no_constants() {
        assert_eq!(constants(&rows(TRUTH, 0.0, 3)), None);
        assert_eq!(constants(&[Row { columns: [0.0, 0.0], value: 1.0 }; 9]), None);
    }
}
