//! What is wrong, as far as it shows: pure functions over [`Facts`].

use super::facts::{Facts, SpaceFacts, WorkerFacts};
use super::sign::{Cause, Sign};
use super::worker_rules;
use crate::finding::Symptom;
use crate::limits::{
    BOOKINGS_LEAKED_RECENT_MIN, CLOCK_STEP_MS_MIN, CONTENDED_RECENT_MIN, FOREIGN_BLOCKS_HELD_MIN, FOREIGN_REPEATS_MIN,
};
use crate::metrics::{CoreCounter as Core, CounterName, DaemonCounter as Daemon, RouteCounter, SnapshotCounter};
use crate::trust::TrustReason;

/// Everything that is wrong.
pub(super) fn signs(facts: &Facts) -> Vec<Sign> {
    let space_of = |worker: &WorkerFacts| facts.spaces.iter().find(|space| space.id == worker.space);
    let mut signs: Vec<Sign> =
        facts.workers.iter().flat_map(|worker| worker_rules::signs(worker, space_of(worker))).collect();
    signs.extend(facts.spaces.iter().flat_map(|space| foreign_hashes(space, &facts.workers)));
    signs.extend(decisions(facts));
    signs.extend(process(facts));
    signs.extend(naming(facts));
    let pending = Sign::new(Cause::Symptom(Symptom::RestartPending), None).saying(facts.pending.join(", "));
    signs.extend((!facts.pending.is_empty()).then_some(pending));
    signs
}

/// Reasons by which a worker's blocks are rightly not found.
const EXPLAINED: [TrustReason; 8] = [
    TrustReason::Joining,
    TrustReason::Disconnected,
    TrustReason::Undecodable,
    TrustReason::SchemeMismatch,
    TrustReason::Hybrid,
    TrustReason::Recovering,
    TrustReason::UnchainedHashes,
    TrustReason::IngestFailed,
];

/// Prompts never match what workers hold.
///
/// The rule: a worker with events holds many blocks, and nothing of many prompts that were sent to it seconds before
/// was found there when they came again, while nothing of any prompt was found there of late. If that is so of every
/// worker of the space together, it is the space's; else it is said of each worker of which it is so alone.
/// A prompt that the engine refused or evicted within the minute is counted wrongly; one hit takes it all back.
fn foreign_hashes(space: &SpaceFacts, workers: &[WorkerFacts]) -> Vec<Sign> {
    let missed = |worker: &WorkerFacts| worker.routed_recent.get(RouteCounter::RepeatsMissed);
    let found = |worker: &WorkerFacts| worker.routed_recent.get(RouteCounter::OverlapsFound);
    // Of workers without events only guesses are found.
    let of_space = || workers.iter().filter(|worker| worker.space == space.id && worker.topic.is_some());
    let judged: Vec<&WorkerFacts> = of_space()
        .filter(|worker| worker.blocks_held >= FOREIGN_BLOCKS_HELD_MIN && missed(worker) > 0)
        .filter(|worker| !EXPLAINED.iter().any(|reason| worker.trust.reasons.contains(*reason)))
        .collect();
    let whole_space = of_space().all(|worker| found(worker) == 0);
    let in_vain: u64 = judged.iter().map(|worker| missed(worker)).sum();
    let detail = if whole_space {
        format!("nothing of any prompt was found on any worker of the space {:?}", space.model)
    } else {
        format!("on other workers of the space {:?} prompts are found", space.model)
    };
    let is_foreign = |worker: &&WorkerFacts| {
        let enough = if whole_space { in_vain } else { missed(worker) };
        found(worker) == 0 && enough >= FOREIGN_REPEATS_MIN
    };
    let name = RouteCounter::RepeatsMissed.name();
    let sign =
        |worker: &WorkerFacts| Sign::symptom(Symptom::ForeignHashes, worker.worker).counted(name, missed(worker));
    judged.into_iter().filter(is_foreign).map(|worker| sign(worker).saying(&*detail)).collect()
}

fn about_daemon(cause: Cause, counter: &'static str, count: u64) -> Sign {
    Sign::new(cause, None).counted(counter, count)
}

/// What decisions of late had to do without.
fn decisions(facts: &Facts) -> Vec<Sign> {
    let recent = |counter: Core| facts.cores.get(counter);
    let mut signs = Vec::new();
    let mut say = |symptom, counter: Core, detail: String| {
        signs.push(about_daemon(Cause::Symptom(symptom), counter.name(), recent(counter)).saying(detail));
    };
    if recent(Core::RequestsSchemeMismatch) > 0 {
        say(Symptom::GatewayScheme, Core::RequestsSchemeMismatch, String::new());
    }
    if let Some(counter) = [Core::RoutesNobody, Core::RoutesAllDown].into_iter().find(|of| recent(*of) > 0) {
        say(Symptom::NobodyEligible, counter, String::new());
    }
    let unknown: Vec<_> =
        facts.spaces.iter().filter(|space| space.scheme.is_none()).map(|space| format!("{:?}", space.model)).collect();
    if recent(Core::RoutesSchemeUnknown) > 0 && !unknown.is_empty() {
        say(
            Symptom::SchemeUnknown,
            Core::RoutesSchemeUnknown,
            format!("no engine of {} has shown it", unknown.join(", ")),
        );
    }
    let contended = recent(Core::RoutesContended);
    if contended >= CONTENDED_RECENT_MIN && contended >= recent(Core::Routes) / 100 {
        signs.push(about_daemon(Cause::Reason(TrustReason::ReadContended), Core::RoutesContended.name(), contended));
    }
    if recent(Core::PredictionsDropped) > 0 {
        let cause = Cause::Symptom(Symptom::PredictionsDropped);
        let name = Core::PredictionsDropped.name();
        signs.push(about_daemon(cause, name, recent(Core::PredictionsDropped)));
    }
    signs
}

/// Workers that are named and not taken.
fn naming(facts: &Facts) -> Option<Sign> {
    let mut problems =
        facts.naming.iter().filter_map(|source| Some(format!("{}: {}", source.name, source.problem.as_ref()?)));
    let full = facts.daemon.get(Daemon::WorkersRefusedFull);
    let sign = Sign::new(Cause::Symptom(Symptom::SourceUnusable), None);
    let Some(first) = problems.next() else {
        let sign = sign.saying("there is no room for more workers").counted(Daemon::WorkersRefusedFull.name(), full);
        return (full > 0).then_some(sign);
    };
    Some(sign.saying(match problems.count() {
        0 => first,
        more => format!("{first}, and {more} more"),
    }))
}

/// What the daemon itself is short of.
fn process(facts: &Facts) -> Vec<Sign> {
    let recent = |counter: Daemon| facts.daemon.get(counter);
    let mut signs = Vec::new();
    let refusals = [Daemon::ConnectionsRefused, Daemon::ConnectionsRefusedUser, Daemon::MailboxFull];
    if let Some(counter) = refusals.into_iter().find(|of| recent(*of) > 0) {
        let cause = Cause::Symptom(Symptom::ConnectionsRefused);
        signs.push(about_daemon(cause, counter.name(), recent(counter)));
    }
    let leaked = recent(Daemon::BookingsExpiredAge);
    if leaked >= BOOKINGS_LEAKED_RECENT_MIN && leaked >= facts.cores.get(Core::Bookings) / 100 {
        let cause = Cause::Symptom(Symptom::BookingsLeak);
        signs.push(about_daemon(cause, Daemon::BookingsExpiredAge.name(), leaked));
    }
    let unwritten = facts.snapshots.get(SnapshotCounter::SnapshotsFailed);
    if unwritten > 0 {
        let cause = Cause::Symptom(Symptom::SnapshotsFail);
        signs.push(about_daemon(cause, SnapshotCounter::SnapshotsFailed.name(), unwritten));
    }
    if let Some((open, limit)) = facts.open_files.filter(|(open, limit)| *open >= limit - limit / 10) {
        let low = Sign::new(Cause::Symptom(Symptom::OpenFilesLow), None);
        signs.push(low.saying(format!("nine in ten of {limit}")).counted("open_files", open));
    }
    if facts.clock_step_ms.unsigned_abs() >= CLOCK_STEP_MS_MIN {
        let by = format!("by {} ms", facts.clock_step_ms);
        signs.push(Sign::new(Cause::Symptom(Symptom::ClockStepped), None).saying(by));
    }
    signs
}
