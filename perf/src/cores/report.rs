//! What `cores` found, as JSON and as text.

use comfy_table::{CellAlignment, Table, presets};
use serde::Serialize;

use super::model::{DecisionCost, Growth};
use super::{decisions, shards};
use crate::args::TapeArgs;
use crate::measure::{Percentiles, median};

/// All passes over decisions.
#[derive(Clone, Debug)]
pub(super) struct DecisionPasses {
    /// By number of threads, ascending, one thread first.
    pub(super) by_threads: Vec<(u16, Vec<decisions::Pass>)>,
    /// Of one thread: in `Loads::book` and `Loads::free` for each decision, nanoseconds; one for each round.
    pub(super) locked_ns: Vec<f64>,
}

/// All passes over the tape by number of shards, ascending, one shard first.
pub(super) type ShardPasses = Vec<(u16, Vec<shards::Pass>)>;

/// The part of their time for which threads may wait for a processor in a measurement of scaling.
const QUEUED_SHARE_MAX: f64 = 0.05;

/// Whether each thread has a processor of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Processors {
    /// Each thread has one: the figure is a measurement of scaling.
    Measured,
    /// Another process had one of them for more than [`QUEUED_SHARE_MAX`] of the time: measure again when it is quiet.
    Disturbed,
    /// More threads than processors: the figure says nothing about scaling.
    Shared,
}

impl Processors {
    fn of(threads: u16, processors: usize, queued_share: f64) -> Self {
        match queued_share <= QUEUED_SHARE_MAX {
            _ if usize::from(threads) > processors => Self::Shared,
            true => Self::Measured,
            false => Self::Disturbed,
        }
    }

    const fn name(self) -> &'static str {
        match self {
            Self::Measured => "measured",
            Self::Disturbed => "disturbed",
            Self::Shared => "shared",
        }
    }

    /// A speed-up, where it says something.
    fn speedup(self, per_s: f64, of_one_per_s: f64) -> Option<f64> {
        (self == Self::Measured).then_some(per_s / of_one_per_s)
    }
}

/// What was measured, and where.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Circumstances {
    pub(super) tape: TapeArgs,
    /// Requests in flight, over all threads.
    pub(super) in_flight: u32,
    /// Of each measurement of decisions.
    pub(super) seconds: f64,
    /// Passes of which medians are taken.
    pub(super) repeat: u32,
    /// The processor.
    pub(super) machine: String,
    /// Processors that this process may use.
    pub(super) processors: usize,
    /// Tasks that ran or waited to, before the measurements.
    pub(super) load_average: f64,
    /// What a reading of the clock costs, taken off.
    pub(super) clock_ns: f64,
    pub(super) prompts: usize,
    pub(super) blocks_per_prompt: f64,
    /// Blocks that the tape stores and removes.
    pub(super) tape_blocks: usize,
}

/// What the model makes of a number of threads.
#[derive(Clone, Copy, Debug, Serialize)]
struct Modelled {
    /// With the growth of a decision's processor time at each doubling of threads.
    decisions_per_s: f64,
    speedup: f64,
    /// With the same growth for each further thread.
    decisions_per_s_low: f64,
    speedup_low: f64,
}

impl Modelled {
    fn new(cost: DecisionCost, threads: u16) -> Self {
        Self {
            decisions_per_s: cost.per_s(threads, Growth::EachDoubling),
            speedup: cost.speedup(threads, Growth::EachDoubling),
            decisions_per_s_low: cost.per_s(threads, Growth::EachThread),
            speedup_low: cost.speedup(threads, Growth::EachThread),
        }
    }
}

/// What the model is fed with: measured on one thread, the growth on two.
#[derive(Clone, Copy, Debug, Serialize)]
struct ModelInputs {
    /// A whole decision with its booking and its end: T.
    decision_ns: f64,
    /// Of it in `Loads::book` and `Loads::free`, at least the time for which they hold the lock: S.
    locked_ns: f64,
    /// Decisions a second that a lock held for all of S allows: 1 / S.
    locked_bound_per_s: f64,
    /// Processor time that a decision gains from one thread to two; `None` = two threads had no processor each, or were
    /// not measured. The model then counts 0, and below 0 too.
    growth_ns: Option<f64>,
}

/// Decisions of one number of threads: medians over repeats.
#[derive(Clone, Copy, Debug, Serialize)]
struct DecisionPoint {
    threads: u16,
    processors: Processors,
    /// Of all threads together.
    decisions_per_s: f64,
    /// `None` unless measured.
    speedup: Option<f64>,
    /// Processor time of a decision.
    cpu_us: f64,
    /// Processors that the threads had, on average.
    processors_used: f64,
    p50_us: f64,
    p99_us: f64,
    decided_again_percent: f64,
    active_locked_percent: f64,
    modelled: Modelled,
}

/// Ingest by one number of shards: medians over repeats.
#[derive(Clone, Copy, Debug, Serialize)]
struct ShardPoint {
    shards: u16,
    processors: Processors,
    /// Stored and removed, of all writers together.
    blocks_per_s: f64,
    /// `None` unless measured.
    speedup: Option<f64>,
    /// Processor time of a block.
    cpu_ns_per_block: f64,
    /// Processors that the threads had, on average.
    processors_used: f64,
    /// The part of all blocks that is of the shard with most of them.
    largest_share: f64,
}

/// What a run found.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Report {
    #[serde(flatten)]
    circumstances: Circumstances,
    decisions: Vec<DecisionPoint>,
    model: ModelInputs,
    shards: Vec<ShardPoint>,
}

impl Report {
    /// Medians of all passes, and the model.
    #[must_use]
    pub(super) fn new(circumstances: Circumstances, decisions: &DecisionPasses, shards: &ShardPasses) -> Self {
        let model = ModelInputs::new(decisions, circumstances.processors);
        let cost = DecisionCost {
            whole_ns: model.decision_ns,
            locked_ns: model.locked_ns,
            growth_ns: model.growth_ns.unwrap_or(0.0),
        };
        let of_one = decisions.median(1, |pass| pass.decisions_per_s);
        let decision_point = |(threads, passes): &(u16, Vec<decisions::Pass>)| {
            let of = |field: fn(&decisions::Pass) -> f64| median(passes.iter().map(field).collect());
            let latency = Percentiles::medians(&passes.iter().map(|pass| pass.latency).collect::<Vec<_>>());
            let processors = Processors::of(*threads, circumstances.processors, of(|pass| pass.queued_share));
            let decisions_per_s = of(|pass| pass.decisions_per_s);
            DecisionPoint {
                threads: *threads,
                processors,
                decisions_per_s,
                speedup: processors.speedup(decisions_per_s, of_one),
                cpu_us: of(|pass| pass.cpu_ns) / 1e3,
                processors_used: of(|pass| pass.processors_used),
                p50_us: latency.p50 / 1e3,
                p99_us: latency.p99 / 1e3,
                decided_again_percent: of(|pass| pass.again_share) * 100.0,
                active_locked_percent: of(|pass| pass.locked_share) * 100.0,
                modelled: Modelled::new(cost, *threads),
            }
        };
        let decisions = decisions.by_threads.iter().map(decision_point).collect();
        let shards = ShardPoint::all(shards, circumstances.processors);
        Self { circumstances, decisions, model, shards }
    }
}

impl DecisionPasses {
    /// The median of a figure at a number of threads; 0 = not measured.
    fn median(&self, threads: u16, field: fn(&decisions::Pass) -> f64) -> f64 {
        let passes = self.by_threads.iter().filter(|(of, _)| *of == threads).flat_map(|(_, passes)| passes);
        median(passes.map(field).collect())
    }
}

impl ModelInputs {
    fn new(passes: &DecisionPasses, processors: usize) -> Self {
        let decision_ns = 1e9 / passes.median(1, |pass| pass.decisions_per_s).max(1e-9);
        let locked_ns = median(passes.locked_ns.clone()).min(decision_ns);
        let queued_share = passes.median(2, |pass| pass.queued_share);
        let of_two = passes.by_threads.iter().any(|(threads, _)| *threads == 2)
            && Processors::of(2, processors, queued_share) == Processors::Measured;
        let cpu_ns = |threads| passes.median(threads, |pass| pass.cpu_ns);
        Self {
            decision_ns,
            locked_ns,
            locked_bound_per_s: 1e9 / locked_ns.max(1e-9),
            growth_ns: of_two.then(|| cpu_ns(2) - cpu_ns(1)),
        }
    }
}

impl ShardPoint {
    fn all(passes: &ShardPasses, processors: usize) -> Vec<Self> {
        let of = |passes: &[shards::Pass], field: fn(&shards::Pass) -> f64| median(passes.iter().map(field).collect());
        let of_one = passes.first().map_or(0.0, |(_, first)| of(first, |pass| pass.blocks_per_s));
        let point = |(shards, passes): &(u16, Vec<shards::Pass>)| {
            let of = |field| of(passes, field);
            let has = Processors::of(*shards, processors, of(|pass| pass.queued_share));
            let blocks_per_s = of(|pass| pass.blocks_per_s);
            Self {
                shards: *shards,
                processors: has,
                blocks_per_s,
                speedup: has.speedup(blocks_per_s, of_one),
                cpu_ns_per_block: of(|pass| pass.cpu_ns_per_block),
                processors_used: of(|pass| pass.processors_used),
                largest_share: of(|pass| pass.largest_share),
            }
        };
        passes.iter().map(point).collect()
    }
}

impl Report {
    /// The report as a person reads it.
    #[must_use]
    pub(crate) fn text(&self) -> String {
        let of = &self.circumstances;
        format!(
            "{}, {} processors for this process, load average before {:.1}; medians of {} rounds\n\
             measured: each thread has a processor; shared: more threads than processors, which says nothing about \
             scaling;\ndisturbed: threads waited for a processor that another process had, so neither does this\n\n\
             Decisions on {} workers: {} prompts of {:.0} blocks as hashes, {} in flight over all threads, {} s; clock \
             {:.0} ns taken off p50 and p99\n{}\n\n{}\n{}\n\n\
             Ingest: {} blocks of the tape stored and removed, one writing thread for each shard\n{}",
            of.machine,
            of.processors,
            of.load_average,
            of.repeat,
            of.tape.workers,
            of.prompts,
            of.blocks_per_prompt,
            of.in_flight,
            of.seconds,
            of.clock_ns,
            self.decision_table(),
            self.model_inputs(),
            self.model_table(),
            of.tape_blocks,
            self.shard_table(),
        )
    }

    fn decision_table(&self) -> Table {
        let header =
            "threads|processors|decisions/s|speed-up|CPU us|processors used|p50 us|p99 us|decided again|lock reads";
        let rows = self.decisions.iter().map(|point| {
            vec![
                point.threads.to_string(),
                point.processors.name().to_owned(),
                format!("{:.0}", point.decisions_per_s),
                speedup_text(point.speedup),
                format!("{:.2}", point.cpu_us),
                format!("{:.2}", point.processors_used),
                format!("{:.2}", point.p50_us),
                format!("{:.2}", point.p99_us),
                format!("{:.2} %", point.decided_again_percent),
                format!("{:.3} %", point.active_locked_percent),
            ]
        });
        table(header, rows)
    }

    /// What the model is, and what it is fed with.
    fn model_inputs(&self) -> String {
        let ModelInputs { decision_ns, locked_ns, locked_bound_per_s, growth_ns } = self.model;
        let growth = match growth_ns {
            Some(growth_ns) => format!("From one thread to two a decision's CPU time grew by {:.3} us.", growth_ns / 1e3),
            None => "Two threads with a processor each were not measured: a decision's CPU time is taken not to grow, which \
                     is too favourable."
                .to_owned(),
        };
        format!(
            "Modelled, not measured: threads with a processor each that share only the bookings' lock. On one thread a \
             decision takes {:.3} us,\n{:.3} us of it in book and free: a lock held for all of that allows \
             {locked_bound_per_s:.0} decisions/s. {growth}\nThe lower figure adds that growth for each further thread, the upper one for each \
             doubling.",
            decision_ns / 1e3,
            locked_ns / 1e3,
        )
    }

    fn model_table(&self) -> Table {
        let rows = self.decisions.iter().map(|point| {
            let of = &point.modelled;
            let measured = match point.processors {
                Processors::Measured => format!("{:.0}", point.decisions_per_s),
                Processors::Disturbed | Processors::Shared => "-".to_owned(),
            };
            vec![
                point.threads.to_string(),
                measured,
                speedup_text(point.speedup),
                format!("{:.0} to {:.0}", of.decisions_per_s_low, of.decisions_per_s),
                format!("{:.2} to {:.2}", of.speedup_low, of.speedup),
            ]
        });
        table("threads|measured/s|measured speed-up|modelled/s|modelled speed-up", rows)
    }

    fn shard_table(&self) -> Table {
        let rows = self.shards.iter().map(|point| {
            vec![
                point.shards.to_string(),
                point.processors.name().to_owned(),
                format!("{:.0}", point.blocks_per_s),
                speedup_text(point.speedup),
                format!("{:.1}", point.cpu_ns_per_block),
                format!("{:.2}", point.processors_used),
                format!("{:.1} %", point.largest_share * 100.0),
            ]
        });
        table("shards|processors|blocks/s|speed-up|CPU ns/block|processors used|largest shard", rows)
    }
}

fn speedup_text(speedup: Option<f64>) -> String {
    speedup.map_or_else(|| "-".to_owned(), |speedup| format!("{speedup:.2}"))
}

fn table(header: &str, rows: impl Iterator<Item = Vec<String>>) -> Table {
    let mut table = Table::new();
    table.load_style(presets::UTF8_FULL_CONDENSED).set_header(header.split('|'));
    for row in rows {
        table.add_row(row);
    }
    table.column_iter_mut().for_each(|column| column.set_cell_alignment(CellAlignment::Right));
    table
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pass(decisions_per_s: f64, cpu_ns: f64) -> decisions::Pass {
        decisions::Pass {
            decisions_per_s,
            cpu_ns,
            processors_used: 1.0,
            queued_share: 0.0,
            latency: Percentiles::default(),
            again_share: 0.0,
            locked_share: 0.0,
            locked_ns: 0.0,
        }
    }

    fn passes() -> DecisionPasses {
        let by_threads = vec![(1, vec![pass(100_000.0, 9_900.0); 3]), (2, vec![pass(180_000.0, 10_900.0); 3])];
        DecisionPasses { by_threads, locked_ns: vec![1_000.0; 3] }
    }

    #[test]
    fn only_threads_that_had_a_processor_each_have_a_speedup() {
        assert_eq!(Processors::of(2, 2, 0.3).speedup(180.0, 100.0), None);
        assert_eq!(Processors::of(2, 2, 0.01).speedup(180.0, 100.0), Some(1.8));
        assert_eq!(Processors::of(4, 2, 0.5), Processors::Shared);
        assert_eq!(Processors::of(4, 2, 0.5).speedup(180.0, 100.0), None);
    }

    #[test]
    fn growth_is_known_only_with_a_processor_for_each_of_two_threads() {
        let of_two = ModelInputs::new(&passes(), 2);
        assert_eq!((of_two.decision_ns, of_two.locked_ns), (10_000.0, 1_000.0));
        assert_eq!(of_two.growth_ns, Some(1_000.0));
        assert_eq!(ModelInputs::new(&passes(), 1).growth_ns, None);
        let mut disturbed = passes();
        disturbed.by_threads[1].1.iter_mut().for_each(|pass| pass.queued_share = 0.3);
        assert_eq!(ModelInputs::new(&disturbed, 2).growth_ns, None);
        let one_only = DecisionPasses { by_threads: passes().by_threads[..1].to_vec(), locked_ns: vec![1_000.0] };
        assert_eq!(ModelInputs::new(&one_only, 2).growth_ns, None);
    }
}
