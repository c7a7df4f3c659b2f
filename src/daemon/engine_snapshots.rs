//! Snapshots that engines send themselves: which workers need one, and when the daemon asks for it.
//!
//! A worker needs one if batches were missed that no replay has brought: its trust says so, and nothing is being
//! fetched for it. The first question comes at once. After a failure the next one waits, twice as long each time. Few
//! run at once, each on a thread beside the control thread ([`SnapshotOrder::fetch`]).

use std::collections::HashMap;
use std::time::Duration;

use crossbeam::channel::bounded;
use tokio::runtime::Handle;
use tokio::task::JoinSet;
use tokio::time::Instant;

use super::ingest_threads::IngestThreads;
use crate::budget::Shed;
use crate::config::{Config, FullReports, Salts};
use crate::error::Result;
use crate::fleet::{Fleet, FleetTable, WorkerRecord, WorkerState};
use crate::ids::Worker;
use crate::ingest::{AbortReason, References, SnapshotOrder};
use crate::limits::{
    DUMP_PARTS_MAX, ENGINE_SNAPSHOT_BACK_OFF_MS, ENGINE_SNAPSHOT_CHECK_EVERY_MS, ENGINE_SNAPSHOTS_AT_ONCE_MAX,
};
use crate::trust::{Trust, TrustReason};

/// Reasons that a snapshot removes.
const MISSED: [TrustReason; 3] = [TrustReason::JoinedLate, TrustReason::Gap, TrustReason::Undecodable];
/// Reasons for which it has to wait: the worker's stream is not known to go on, or something is being fetched.
const UNSETTLED: [TrustReason; 5] = [
    TrustReason::Joining,
    TrustReason::Disconnected,
    TrustReason::Recovering,
    TrustReason::Silent,
    TrustReason::IngestFailed,
];

/// A worker that needs a snapshot.
#[derive(Debug)]
struct Need {
    /// The earliest time of the next question.
    next: Instant,
    back_off_ms: u64,
    is_asking: bool,
}

type Asked = (Worker, std::result::Result<References, AbortReason>);

/// Asks for snapshots, for ever, on `threads`.
pub(super) async fn run(config: &Config, fleet: &Fleet, ingest_threads: &IngestThreads, threads: &Handle) {
    let mut needs: HashMap<Worker, Need> = HashMap::new();
    let mut asking: JoinSet<Asked> = JoinSet::new();
    let mut every = tokio::time::interval(Duration::from_millis(ENGINE_SNAPSHOT_CHECK_EVERY_MS));
    every.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            _ = every.tick() => {}
            Some(asked) = asking.join_next(), if !asking.is_empty() => match asked {
                Ok(asked) => note(asked, &mut needs),
                Err(error) => {
                    tracing::error!(%error, "a question for an engine's snapshot panicked");
                    needs.values_mut().for_each(|need| need.is_asking = false);
                }
            },
        }
        let table = fleet.load();
        update(&mut needs, &table);
        for record in table.workers.iter() {
            let is_due = |need: &&mut Need| !need.is_asking && need.next <= Instant::now();
            let Some(need) = needs.get_mut(&record.worker).filter(is_due) else { continue };
            // A snapshot takes memory for a while, so it waits while memory is short.
            if asking.len() >= ENGINE_SNAPSHOTS_AT_ONCE_MAX || ingest_threads.shed.has(Shed::Dumps) {
                break;
            }
            match ask((config, record, &table), ingest_threads, (&mut asking, threads)) {
                Ok(()) => need.is_asking = true,
                Err(error) => {
                    tracing::debug!(worker = %record.worker, %error, "no snapshot can be asked for now");
                    need.put_off();
                }
            }
        }
    }
}

impl Need {
    fn new() -> Self {
        let [first_ms, _] = ENGINE_SNAPSHOT_BACK_OFF_MS;
        Self { next: Instant::now(), back_off_ms: first_ms, is_asking: false }
    }

    /// Asks again later.
    fn put_off(&mut self) {
        let [_, longest_ms] = ENGINE_SNAPSHOT_BACK_OFF_MS;
        self.is_asking = false;
        self.next = Instant::now() + Duration::from_millis(self.back_off_ms);
        self.back_off_ms = (self.back_off_ms * 2).min(longest_ms);
    }
}

/// Whether a snapshot would raise a worker's trust.
fn needs_snapshot(trust: &Trust) -> bool {
    let has = |reasons: &[TrustReason]| reasons.iter().any(|reason| trust.reasons.contains(*reason));
    has(&MISSED) && !has(&UNSETTLED)
}

/// Adds the workers that need a snapshot now, and drops those that need none any more.
fn update(needs: &mut HashMap<Worker, Need>, table: &FleetTable) {
    let in_need = |record: &&WorkerRecord| {
        let has_source = record.events.as_ref().is_some_and(|events| events.snapshots.is_some());
        has_source && record.state != WorkerState::Down && needs_snapshot(&record.trust.load())
    };
    let workers: Vec<Worker> = table.workers.iter().filter(in_need).map(|record| record.worker).collect();
    // While one that failed is being put off, its worker may recover by itself for a moment.
    needs.retain(|worker, need| need.is_asking || workers.contains(worker));
    for worker in workers {
        needs.entry(worker).or_insert_with(Need::new);
    }
}

/// Asks for one snapshot on another thread.
fn ask(
    (config, record, table): (&Config, &WorkerRecord, &FleetTable),
    ingest_threads: &IngestThreads,
    (asking, threads): (&mut JoinSet<Asked>, &Handle),
) -> Result<()> {
    let source = record.events.as_ref().and_then(|events| events.snapshots.clone());
    let (Some(source), Some(space)) = (source, config.spaces.get(record.space.0 as usize)) else { return Ok(()) };
    let (worker, shard) = (record.worker, record.shard);
    let order = SnapshotOrder {
        worker,
        source,
        scheme: table.space(record.space).and_then(|space| space.scheme.get()),
        salts_possible: space.salts == Salts::Possible,
        counts_copies: space.full_reports == FullReports::None,
    };
    let own_blocks = if order.needs_own_blocks() { Some(ingest_threads.dump(shard, worker)?) } else { None };
    let (parts, received) = bounded(DUMP_PARTS_MAX);
    let answers = ingest_threads.load_engine_snapshot(shard, worker, received)?;
    asking.spawn_blocking_on(move || (worker, order.fetch(own_blocks.as_ref(), &parts, &answers)), threads);
    Ok(())
}

fn note((worker, outcome): Asked, needs: &mut HashMap<Worker, Need>) {
    match outcome {
        Ok(references) => {
            needs.remove(&worker);
            tracing::info!(%worker, references = references.blocks, "the engine's own snapshot is loaded");
        }
        Err(reason) => {
            tracing::debug!(%worker, reason = reason.name(), "no snapshot of the engine");
            needs.get_mut(&worker).into_iter().for_each(Need::put_off);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::trust::TrustLevel;

    fn trust(reasons: &[TrustReason]) -> Trust {
        Trust { level: TrustLevel::LowerBound, reasons: reasons.iter().copied().collect(), ..Trust::default() }
    }

    #[test]
    fn only_a_worker_with_missed_batches_and_nothing_under_way_needs_a_snapshot() {
        for missed in MISSED {
            assert!(needs_snapshot(&trust(&[missed, TrustReason::UnknownRoot])), "{missed:?}");
            for unsettled in UNSETTLED {
                assert!(!needs_snapshot(&trust(&[missed, unsettled])), "{missed:?} {unsettled:?}");
            }
        }
        assert!(!needs_snapshot(&trust(&[])) && !needs_snapshot(&trust(&[TrustReason::Hybrid])));
    }

    #[test]
    fn the_time_before_the_next_question_doubles_up_to_its_bound() {
        let (mut need, [first_ms, longest_ms]) = (Need::new(), ENGINE_SNAPSHOT_BACK_OFF_MS);
        let mut waits = Vec::new();
        for _ in 0..10 {
            waits.push(need.back_off_ms);
            need.is_asking = true;
            need.put_off();
            assert!(!need.is_asking);
        }
        assert_eq!((waits[0], waits[1], waits[9]), (first_ms, 2 * first_ms, longest_ms));
    }
}
