//! Whether ours won, by rules that were written down before: a line for each condition, with its numbers.

use super::experiment::OURS;
use super::measure::Measured;
use super::statistics::{bootstrap, median, paired_ratios};
use super::suite::{CaseResults, Condition, IDLE_SHARE, TAIL_PEER, VERDICT_SHARE};
use super::suite_workloads::Case;

/// The seed of the bootstraps.
const SEED: u64 = 1;

/// How a condition stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Standing {
    /// It holds.
    Won,
    /// It does not.
    Lost,
    /// It was not measured.
    Unknown,
    /// It is no condition, but a figure that one of them counts.
    Figure,
}

/// One condition or figure.
#[derive(Clone, Debug, PartialEq)]
pub struct Line {
    /// How it stands.
    pub standing: Standing,
    /// What it is, with the numbers.
    pub text: String,
}

impl Line {
    fn new(is_won: bool, text: String) -> Self {
        Self { standing: if is_won { Standing::Won } else { Standing::Lost }, text }
    }

    fn unknown(text: impl Into<String>) -> Self {
        Self { standing: Standing::Unknown, text: text.into() }
    }
}

impl std::fmt::Display for Line {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let verdict = match self.standing {
            Standing::Won => "won",
            Standing::Lost => "NOT won",
            Standing::Unknown => "unknown",
            Standing::Figure => "",
        };
        write!(f, "{verdict:8}{}", self.text)
    }
}

/// The peer of a case that ours is compared with.
type Peer = fn(&CaseResults) -> Option<&'static str>;

/// A metric of which less is better.
pub type Metric = fn(&Measured) -> f64;

/// The metrics of the verdict.
pub const METRICS: [(&str, Metric); 3] =
    [("mean TTFT", |run| run.ttft_s.mean), ("mean E2E", |run| run.e2e_s.mean), ("TPOT p99", |run| run.tpot_s.p99)];

/// A workload of the verdict: its cases, whose mean counts.
struct Group<'a> {
    name: &'static str,
    cases: Vec<&'a CaseResults>,
}

impl Group<'_> {
    /// By seed: the mean over the cases of `ratios`. Seeds that a case lacks are left out.
    fn mean(&self, ratios: impl Fn(&CaseResults) -> Vec<f64>) -> Vec<f64> {
        let of_cases: Vec<Vec<f64>> = self.cases.iter().map(|case| ratios(case)).collect();
        let seeds = of_cases.iter().map(Vec::len).min().unwrap_or(0);
        let cases = of_cases.len().max(1) as f64;
        (0..seeds).map(|at| of_cases.iter().filter_map(|ratios| ratios.get(at)).sum::<f64>() / cases).collect()
    }

    /// Ours against a peer of each case by a metric, at the load of the verdict, by seed.
    fn against(&self, metric: Metric, peer: impl Fn(&CaseResults) -> Option<&'static str>) -> Vec<f64> {
        self.mean(|case| {
            let theirs = peer(case).map_or_else(Vec::new, |peer| values(case, peer, Condition::Plain, metric));
            paired_ratios(&values(case, OURS, Condition::Plain, metric), &theirs)
        })
    }
}

fn values(case: &CaseResults, policy: &'static str, condition: Condition, metric: Metric) -> Vec<(u64, f64)> {
    case.at(policy, VERDICT_SHARE, condition).iter().map(|(seed, run)| (*seed, metric(run))).collect()
}

/// The peer with the lowest median of a metric.
pub fn best_by(case: &CaseResults, metric: Metric) -> Option<&'static str> {
    let of = |peer: &str| {
        let peer = case.ranking.iter().find(|ranked| **ranked == peer)?;
        let values: Vec<f64> =
            values(case, peer, Condition::Plain, metric).into_iter().map(|(_, value)| value).collect();
        Some(median(&values)).filter(|value| value.is_finite())
    };
    // A median of a few seeds is not compared with one of many.
    let seeds = |peer: &'static str| case.at(peer, VERDICT_SHARE, Condition::Plain).len();
    let most = case.ranking.iter().map(|peer| seeds(peer)).max().unwrap_or(0);
    let known = case.ranking.iter().filter(|peer| seeds(peer) == most).filter_map(|peer| Some((*peer, of(peer)?)));
    known.min_by(|a, b| a.1.total_cmp(&b.1)).map(|(peer, _)| peer)
}

/// The verdict over the cases of a suite.
#[must_use]
pub fn verdict(cases: &[Case], results: &[CaseResults]) -> Vec<Line> {
    let mut groups: Vec<Group> = Vec::new();
    for (case, of_case) in cases.iter().zip(results) {
        match groups.iter_mut().find(|group| group.name == case.group) {
            Some(group) => group.cases.push(of_case),
            None => groups.push(Group { name: case.group, cases: vec![of_case] }),
        }
    }
    let mut lines = capacities(&groups);
    for group in &groups {
        figures(group, &mut lines);
    }
    for group in &groups {
        robustness(group, &mut lines);
    }
    let lost = lines.iter().filter(|line| line.standing == Standing::Lost).count();
    let unknown = lines.iter().filter(|line| line.standing == Standing::Unknown).count();
    lines.push(Line::new(
        lost == 0 && unknown == 0,
        format!("altogether: {lost} conditions not won, {unknown} without a verdict"),
    ));
    lines
}

fn capacities(groups: &[Group]) -> Vec<Line> {
    let (mut lines, mut ahead, mut below) = (Vec::new(), 0, 0);
    for group in groups {
        let of = |case: &CaseResults, policy: &str| case.capacities.get(policy).cloned().unwrap_or_default();
        let ratios = group.mean(|case| {
            let peer = case.ranking.first().map_or_else(Vec::new, |peer| of(case, peer));
            paired_ratios(&of(case, OURS), &peer)
        });
        if ratios.is_empty() {
            lines.push(Line::unknown(format!("{} capacity: not measured", group.name)));
            continue;
        }
        let interval = bootstrap(&ratios, SEED);
        ahead += usize::from(interval.median >= 1.1);
        below += usize::from(interval.high < 1.0);
        let peers: Vec<&str> = group.cases.iter().filter_map(|case| case.ranking.first().copied()).collect();
        let text = format!(
            "{} capacity: {:+.1} % (95 %: {:+.1} to {:+.1} %) against {}, {} seeds",
            group.name,
            percent(interval.median),
            percent(interval.low),
            percent(interval.high),
            peers.join(", "),
            ratios.len()
        );
        lines.push(Line { standing: Standing::Figure, text });
    }
    lines.push(Line::new(
        ahead >= 3,
        format!("capacity at least 10 % above the best peer's on {ahead} workloads; 3 of 4 are needed"),
    ));
    lines.push(Line::new(
        below == 0,
        format!("capacity wholly below the best peer's on {below} workloads; none is allowed"),
    ));
    lines
}

fn percent(ratio: f64) -> f64 {
    (ratio - 1.0) * 100.0
}

fn figures(group: &Group, lines: &mut Vec<Line>) {
    let (mut better, mut measured) = (0, 0);
    for (name, metric) in METRICS {
        let ratios = group.against(metric, |case| best_by(case, metric));
        if ratios.is_empty() {
            lines.push(Line::unknown(format!("{} {name}: not measured", group.name)));
            continue;
        }
        let interval = bootstrap(&ratios, SEED);
        measured += 1;
        better += usize::from(interval.median <= 0.9);
        let peers: Vec<&str> = group.cases.iter().filter_map(|case| best_by(case, metric)).collect();
        lines.push(Line::new(
            interval.median <= 1.03,
            format!(
                "{} {name} at {VERDICT_SHARE}: {:+.1} % (95 %: {:+.1} to {:+.1} %) against {}; at most +3 %, {} seeds",
                group.name,
                percent(interval.median),
                percent(interval.low),
                percent(interval.high),
                peers.join(", "),
                ratios.len()
            ),
        ));
    }
    if measured == METRICS.len() {
        let text = format!("{} at least 10 % better in {better} of the three; two are needed", group.name);
        lines.push(Line::new(better >= 2, text));
    }
    let tails = group.against(|run| run.ttft_s.p99, |_| Some(TAIL_PEER));
    if !tails.is_empty() {
        let tail = percent(median(&tails));
        let text =
            format!("{} TTFT p99: {tail:+.1} % against {TAIL_PEER}; at most +5 %, {} seeds", group.name, tails.len());
        lines.push(Line::new(tail <= 5.0, text));
    }
}

/// Wrong constants are compared with right ones, and several routers with one; a slow worker costs every policy something,
/// so ours is compared with the best peer on the same fleet. A loss is the greater of those of the mean times to the last
/// and to the first token.
fn robustness(group: &Group, lines: &mut Vec<Line>) {
    let loss = |metric: Metric, (of, condition): (Peer, Condition), (against, under): (Peer, Condition)| {
        percent(median(&group.mean(|case| {
            let of = of(case).map_or_else(Vec::new, |policy| values(case, policy, condition, metric));
            let theirs = against(case).map_or_else(Vec::new, |policy| values(case, policy, under, metric));
            paired_ratios(&of, &theirs)
        })))
    };
    let losses = |of: (Peer, Condition), against: (Peer, Condition)| {
        let e2e = loss(|run| run.e2e_s.mean, of, against);
        e2e.is_finite().then(|| (e2e, loss(|run| run.ttft_s.mean, of, against)))
    };
    let (ours, best): (Peer, Peer) = (|_| Some(OURS), |case| case.ranking.first().copied());
    let conditions: [(Condition, (Peer, Condition), &str); 4] = [
        (Condition::ConstantsHalved, (ours, Condition::Plain), "right constants"),
        (Condition::ConstantsDoubled, (ours, Condition::Plain), "right constants"),
        (Condition::SlowWorker, (best, Condition::SlowWorker), "the best peer beside it"),
        (Condition::Routers, (ours, Condition::Plain), "one router"),
    ];
    for (condition, against, against_name) in conditions {
        let Some((e2e, ttft)) = losses((ours, condition), against) else {
            lines.push(Line::unknown(format!("{} {}: not measured", group.name, condition.name())));
            continue;
        };
        let text = format!(
            "{} {}: mean E2E {e2e:+.1} %, mean TTFT {ttft:+.1} % against {against_name}; at most +5 %",
            group.name,
            condition.name()
        );
        lines.push(Line::new(e2e.max(ttft) <= 5.0, text));
    }
    if let Some((e2e, ttft)) = losses((best, Condition::Routers), (best, Condition::Plain)) {
        let text = format!(
            "{} {}: the best peer loses mean E2E {e2e:+.1} %, mean TTFT {ttft:+.1} %",
            group.name,
            Condition::Routers.name()
        );
        lines.push(Line { standing: Standing::Figure, text });
    }
    let idle = |of: fn(&Measured) -> Option<f64>| {
        let runs = group.cases.iter().flat_map(|case| case.at(OURS, IDLE_SHARE, Condition::Plain));
        median(&runs.filter_map(|(_, run)| of(run)).collect::<Vec<_>>()) * 100.0
    };
    let (mean, p99) = (idle(|run| run.ttft_error), idle(|run| run.ttft_error_p99));
    if mean.is_finite() {
        let text = format!(
            "{} predicted TTFT, unloaded: mean error {mean:.1} % of at most 15 %, p99 {p99:.1} % of at most 30 %",
            group.name
        );
        lines.push(Line::new(mean <= 15.0 && p99 <= 30.0, text));
    }
}

#[cfg(test)]
mod tests {
    use super::super::figures::Distribution;
    use super::super::suite_workloads::cases;
    use super::*;

    /// Results in which ours has `factor` times the capacity of the peer, and its times divided by it.
    fn results(factor: f64) -> CaseResults {
        results_behind_routers(factor, 1.0)
    }

    /// The same, in which several routers make all times this many times as long.
    fn results_behind_routers(factor: f64, routers: f64) -> CaseResults {
        let mut of_case = CaseResults { ranking: vec!["lpwl"], reference_load: 1.0, ..CaseResults::default() };
        let seeds = 1..=20_u64;
        let noise = |seed: u64| 1.0 + (seed as f64 - 10.0) * 1e-3;
        let run = |seconds: f64| {
            let of = Distribution { mean: seconds, p50: seconds, p90: seconds, p99: seconds };
            Measured {
                ttft_s: of,
                tpot_s: of,
                e2e_s: of,
                ttft_error: Some(0.1),
                ttft_error_p99: Some(0.2),
                ..Measured::default()
            }
        };
        for (policy, factor) in [(OURS, factor), ("lpwl", 1.0)] {
            of_case.capacities.insert(policy, seeds.clone().map(|seed| (seed, factor * noise(seed))).collect());
            for condition in [
                Condition::Plain,
                Condition::ConstantsHalved,
                Condition::ConstantsDoubled,
                Condition::SlowWorker,
                Condition::Routers,
            ] {
                let slowed = if condition == Condition::Routers { routers } else { 1.0 };
                let runs = seeds.clone().map(|seed| (seed, run(noise(seed) * slowed / factor))).collect();
                of_case.runs.insert((policy, 850, condition), runs);
            }
            of_case.runs.insert((policy, 100, Condition::Plain), vec![(1, run(1.0))]);
        }
        of_case
    }

    fn lost(factor: f64) -> Vec<String> {
        let cases = cases();
        let lines = verdict(&cases, &vec![results(factor); cases.len()]);
        lines.into_iter().filter(|line| line.standing == Standing::Lost).map(|line| line.text).collect()
    }

    #[test]
    fn a_quarter_better_wins_all_that_was_measured() {
        assert_eq!(lost(1.25), [""; 0]);
    }

    #[test]
    fn as_good_as_the_peer_is_not_won() {
        let lost = lost(1.0);
        assert!(lost.iter().any(|text| text.contains("on 0 workloads; 3 of 4")), "{lost:?}");
        assert!(!lost.iter().any(|text| text.contains("wholly below")), "{lost:?}");
    }

    #[test]
    fn worse_than_the_peer_is_named_with_its_numbers() {
        let lost = lost(0.8);
        assert!(lost.iter().any(|text| text.contains("wholly below the best peer's on 4")), "{lost:?}");
        assert!(lost.iter().any(|text| text.contains("W1 mean TTFT at 0.85: +25.0 %")), "{lost:?}");
        assert!(lost.iter().any(|text| text.contains("W2 TTFT p99: +25.0 %")), "{lost:?}");
    }

    #[test]
    fn several_routers_may_cost_a_twentieth() {
        let cases = cases();
        for (routers, is_lost) in [(1.04, false), (1.06, true)] {
            let lines = verdict(&cases, &vec![results_behind_routers(1.25, routers); cases.len()]);
            let of_routers = |line: &&Line| line.text.contains("4 routers and 50 ms: mean E2E");
            let standings: Vec<Standing> = lines.iter().filter(of_routers).map(|line| line.standing).collect();
            assert_eq!(standings, [if is_lost { Standing::Lost } else { Standing::Won }; 4]);
        }
    }

    #[test]
    fn what_was_not_measured_has_no_verdict() {
        let cases = cases();
        let lines = verdict(&cases, &vec![CaseResults::default(); cases.len()]);
        assert!(
            lines
                .iter()
                .any(|line| line.standing == Standing::Unknown && line.text.contains("W3 capacity: not measured"))
        );
        assert_eq!(lines.last().map(|line| line.standing), Some(Standing::Lost));
    }
}
