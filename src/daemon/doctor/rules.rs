//! The rules of the diagnosis: pure functions from [`Facts`] to symptoms.

use super::super::sandboxed::SandboxCondition;
use super::facts::{Facts, MemoryCondition, SpaceCondition, ThreadCondition, WorkerCondition};
use super::findings::{Cause, FoundSymptom};
use super::router_rules;
use crate::finding::{Harm, Symptom};
use crate::fleet::WorkerState;
use crate::ids::{Scheme, Window};
use crate::limits::{
    BOOKINGS_LEAKED_RECENT_MIN, CLOCK_STEP_MS_MIN, CONTENDED_RECENT_MIN, DISCONNECTS_RECENT_MIN, DUPLICATES_RECENT_MIN,
    EVENTS_OFF_DECISIONS_MIN, EVENTS_OFF_MS_MIN, FIRST_TOKENS_RECENT_MIN, FIRST_TOKENS_SHARE, FOREIGN_BLOCKS_HELD_MIN,
    FOREIGN_REPEATS_MIN, HELD_MESSAGES_MAX, RECOVERIES_FAILED_RECENT_MIN, REPLAYS_SILENT_RECENT_MIN,
    RESTARTS_RECENT_MIN, TTFT_ERROR_MAX, TTFT_PREDICTIONS_MIN,
};
use crate::load::PrefillClass;
use crate::metrics::{
    CoreCounter as Core, CounterName, DaemonCounter as Daemon, RemoteCounter, RouteCounter, SnapshotCounter,
    TraceCounter, WorkerCounter as C,
};
use crate::trust::{TrustLevel, TrustReason};

/// All symptoms in these facts.
pub(super) fn symptoms(facts: &Facts) -> Vec<FoundSymptom> {
    let space_of = |worker: &WorkerCondition| facts.spaces.iter().find(|space| space.id == worker.space);
    let mut symptoms: Vec<FoundSymptom> =
        facts.workers.iter().flat_map(|worker| of_worker(worker, space_of(worker))).collect();
    symptoms.extend(facts.spaces.iter().flat_map(|space| foreign_hashes(space, &facts.workers)));
    symptoms.extend(decisions(facts));
    symptoms.extend(process(facts));
    symptoms.extend(traces(facts));
    symptoms.extend(sandbox(&facts.sandbox));
    symptoms.extend(router_rules::symptoms(&facts.routers));
    symptoms.extend(facts.prefill_classes.iter().filter_map(mispredicted));
    symptoms.extend(first_tokens_missing(facts));
    symptoms.extend(naming(facts));
    let pending = FoundSymptom::new(Cause::Symptom(Symptom::RestartPending), None).saying(facts.pending.join(", "));
    symptoms.extend((!facts.pending.is_empty()).then_some(pending));
    symptoms
}

/// Reasons that explain why a worker's blocks are not found.
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

/// Prompts never match the blocks that workers hold.
///
/// The rule for a worker with events: it holds many blocks; many prompts were sent to it seconds before and came again,
/// and the index found nothing of them there; and nothing of any recent prompt was found there. If the rule holds for
/// all workers of the space together, the finding is about the space. Otherwise it is about each worker for which it
/// holds alone. A prompt that the engine refused, or evicted within the minute, counts wrongly. A single hit clears the
/// symptom.
fn foreign_hashes(space: &SpaceCondition, workers: &[WorkerCondition]) -> Vec<FoundSymptom> {
    let missed = |worker: &WorkerCondition| worker.routed_recent.get(RouteCounter::RepeatsMissed);
    let found = |worker: &WorkerCondition| worker.routed_recent.get(RouteCounter::OverlapsFound);
    // Workers without events have only predicted blocks.
    let of_space = || workers.iter().filter(|worker| worker.space == space.id && worker.topic.is_some());
    let judged: Vec<&WorkerCondition> = of_space()
        .filter(|worker| worker.blocks_held >= FOREIGN_BLOCKS_HELD_MIN && missed(worker) > 0)
        .filter(|worker| !EXPLAINED.iter().any(|reason| worker.trust.reasons.contains(*reason)))
        .collect();
    let whole_space = of_space().all(|worker| found(worker) == 0);
    let in_vain: u64 = judged.iter().map(|worker| missed(worker)).sum();
    let detail = if whole_space {
        format!("no recent prompt matched any worker of the space {:?}", space.model)
    } else {
        format!("prompts match other workers of the space {:?}", space.model)
    };
    let is_foreign = |worker: &&WorkerCondition| {
        let enough = if whole_space { in_vain } else { missed(worker) };
        found(worker) == 0 && enough >= FOREIGN_REPEATS_MIN
    };
    let name = RouteCounter::RepeatsMissed.name();
    let symptom_of = |worker: &WorkerCondition| {
        FoundSymptom::symptom(Symptom::ForeignHashes, worker.worker).counted(name, missed(worker))
    };
    judged.into_iter().filter(is_foreign).map(|worker| symptom_of(worker).saying(&*detail)).collect()
}

/// The times to the first token of a class are not as predicted.
fn mispredicted(class: &PrefillClass) -> Option<FoundSymptom> {
    let is_off = class.predictions >= TTFT_PREDICTIONS_MIN && class.error_mean > TTFT_ERROR_MAX;
    let percent = (100.0 * class.error_mean).round() as u64;
    let symptom = || FoundSymptom::new(Cause::Symptom(Symptom::TtftMispredicted), None);
    is_off.then(|| symptom().saying(format!("class {:?}", class.name)).counted("ttft_error_percent", percent))
}

/// Gateways free bookings and report hardly any first token, which mode latency learns from.
fn first_tokens_missing(facts: &Facts) -> Option<FoundSymptom> {
    let (freed, reported) = (facts.cores.get(Core::BookingsFreed), facts.cores.get(Core::PrefillsReported));
    let is_missing = freed >= FIRST_TOKENS_RECENT_MIN && reported * FIRST_TOKENS_SHARE < freed;
    let found = || about_daemon(Cause::Symptom(Symptom::FirstTokensMissing), Core::BookingsFreed.name(), freed);
    (facts.decides_by_latency && is_missing).then(|| found().saying(format!("of {reported} recent bookings they came")))
}

fn about_daemon(cause: Cause, counter: &'static str, count: u64) -> FoundSymptom {
    FoundSymptom::new(cause, None).counted(counter, count)
}

/// Symptoms in recent decisions.
fn decisions(facts: &Facts) -> Vec<FoundSymptom> {
    let recent = |counter: Core| facts.cores.get(counter);
    let mut symptoms = Vec::new();
    let mut say = |symptom, counter: Core, detail: String| {
        symptoms.push(about_daemon(Cause::Symptom(symptom), counter.name(), recent(counter)).saying(detail));
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
            format!("no engine of {} has published it yet", unknown.join(", ")),
        );
    }
    let contended = recent(Core::RoutesContended);
    if contended >= CONTENDED_RECENT_MIN && contended >= recent(Core::Routes) / 100 {
        symptoms.push(about_daemon(Cause::Reason(TrustReason::ReadContended), Core::RoutesContended.name(), contended));
    }
    if recent(Core::PredictionsDropped) > 0 {
        let cause = Cause::Symptom(Symptom::PredictionsDropped);
        let name = Core::PredictionsDropped.name();
        symptoms.push(about_daemon(cause, name, recent(Core::PredictionsDropped)));
    }
    symptoms
}

/// Workers that a source names and the daemon refuses.
fn naming(facts: &Facts) -> Option<FoundSymptom> {
    let mut problems =
        facts.naming.iter().filter_map(|source| Some(format!("{}: {}", source.name, source.problem.as_ref()?)));
    let full = facts.daemon.get(Daemon::WorkersRefusedFull);
    let found = FoundSymptom::new(Cause::Symptom(Symptom::SourceUnusable), None);
    let Some(first) = problems.next() else {
        let found =
            found.saying("the daemon has no room for more workers").counted(Daemon::WorkersRefusedFull.name(), full);
        return (full > 0).then_some(found);
    };
    Some(found.saying(match problems.count() {
        0 => first,
        more => format!("{first}, and {more} more"),
    }))
}

/// Symptoms of the daemon's own process.
fn process(facts: &Facts) -> Vec<FoundSymptom> {
    let recent = |counter: Daemon| facts.daemon.get(counter);
    let mut symptoms = Vec::new();
    let refusals = [
        Daemon::ConnectionsRefused,
        Daemon::ConnectionsRefusedUser,
        Daemon::ConnectionsRefusedMemory,
        Daemon::MailboxFull,
    ];
    if let Some(counter) = refusals.into_iter().find(|of| recent(*of) > 0) {
        let cause = Cause::Symptom(Symptom::ConnectionsRefused);
        symptoms.push(about_daemon(cause, counter.name(), recent(counter)));
    }
    symptoms.extend(remote(facts));
    let leaked = recent(Daemon::BookingsExpiredAge);
    if leaked >= BOOKINGS_LEAKED_RECENT_MIN && leaked >= facts.cores.get(Core::Bookings) / 100 {
        let cause = Cause::Symptom(Symptom::BookingsLeak);
        symptoms.push(about_daemon(cause, Daemon::BookingsExpiredAge.name(), leaked));
    }
    let unwritten = facts.snapshots.get(SnapshotCounter::SnapshotsFailed);
    if unwritten > 0 {
        let cause = Cause::Symptom(Symptom::SnapshotsFail);
        symptoms.push(about_daemon(cause, SnapshotCounter::SnapshotsFailed.name(), unwritten));
    }
    if let Some((open, limit)) = facts.open_files.filter(|(open, limit)| *open >= limit - limit / 10) {
        let low = FoundSymptom::new(Cause::Symptom(Symptom::OpenFilesLow), None);
        symptoms.push(low.saying(format!("nine in ten of {limit}")).counted("open_files", open));
    }
    symptoms.extend(memory(&facts.memory));
    symptoms.extend(threads(facts));
    if facts.numa_nodes.len() > 1 {
        let nodes: Vec<String> = facts.numa_nodes.iter().map(u32::to_string).collect();
        let several = FoundSymptom::new(Cause::Symptom(Symptom::NumaNodes), None);
        symptoms.push(several.saying(format!("nodes {}", nodes.join(", "))));
    }
    if facts.clock_step_ms.unsigned_abs() >= CLOCK_STEP_MS_MIN {
        let by = format!("by {} ms", facts.clock_step_ms);
        symptoms.push(FoundSymptom::new(Cause::Symptom(Symptom::ClockStepped), None).saying(by));
    }
    symptoms
}

/// The remote port refuses callers. A peer that speaks no TLS may be a probe, and says nothing of callers.
fn remote(facts: &Facts) -> Option<FoundSymptom> {
    let refusals = [
        RemoteCounter::RefusedToken,
        RemoteCounter::RefusedShare,
        RemoteCounter::RefusedFull,
        RemoteCounter::RefusedOpening,
        RemoteCounter::RefusedDisplaced,
        RemoteCounter::RefusedFrequent,
        RemoteCounter::RefusedStrangers,
        RemoteCounter::RefusedSystem,
    ];
    let counter = refusals.into_iter().find(|counter| facts.remote.get(*counter) > 0)?;
    Some(about_daemon(Cause::Symptom(Symptom::RemoteRefused), counter.name(), facts.remote.get(counter)))
}

/// Spans do not reach the collector, or were never made. While the collector does not take any, spans wait for it until there is
/// no room, which needs no finding of its own.
fn traces(facts: &Facts) -> Option<FoundSymptom> {
    let recent = |counter: TraceCounter| facts.traces.get(counter);
    let first = |of: &[TraceCounter]| of.iter().copied().find(|counter| recent(*counter) > 0);
    let found = |symptom, counter: TraceCounter| about_daemon(Cause::Symptom(symptom), counter.name(), recent(counter));
    let takes_none = || first(&[TraceCounter::ExportsFailed]).filter(|_| recent(TraceCounter::Exports) == 0);
    if let Some(counter) = first(&[TraceCounter::SpansRefused, TraceCounter::SpansGivenUp]).or_else(takes_none) {
        return Some(found(Symptom::TracesUndelivered, counter));
    }
    let unmade = [TraceCounter::RecordsLost, TraceCounter::BookingsUntracked, TraceCounter::SpansDropped];
    first(&unmade).map(|counter| found(Symptom::TracesLost, counter))
}

/// What the daemon gives up because memory is short.
fn memory(memory: &MemoryCondition) -> Option<FoundSymptom> {
    let shed: Vec<&str> = memory.shed.iter().map(|shed| shed.meaning().trim_end_matches('.')).collect();
    let found = FoundSymptom::new(Cause::Symptom(Symptom::MemoryShed), None);
    (!shed.is_empty()).then(|| found.saying(shed.join("; ")).counted("memory_used_bytes", memory.used_bytes))
}

/// Threads that stand still, or did recently.
fn threads(facts: &Facts) -> Vec<FoundSymptom> {
    let standing = |thread: &ThreadCondition| {
        let symptom = if thread.is_vital { Symptom::ThreadStalled } else { Symptom::ThreadSlow };
        // Without the time: findings with equal details are one finding, and the beginning is shown anyway.
        FoundSymptom::new(Cause::Symptom(symptom), None).saying(format!("{} is {}", thread.name, thread.activity))
    };
    let now: Vec<FoundSymptom> = facts.threads_stalled.iter().map(standing).collect();
    let recent = facts.daemon.get(Daemon::ThreadStalls);
    if now.is_empty() && recent > 0 {
        return vec![about_daemon(Cause::Symptom(Symptom::ThreadSlow), Daemon::ThreadStalls.name(), recent)];
    }
    now
}

/// Symptoms of the sandbox.
fn sandbox(sandbox: &SandboxCondition) -> Vec<FoundSymptom> {
    let Some(in_force) = &sandbox.in_force else { return Vec::new() };
    let found = |symptom, detail: String| FoundSymptom::new(Cause::Symptom(symptom), None).saying(detail);
    let mut symptoms = Vec::new();
    if !sandbox.refused.is_empty() {
        let calls: Vec<_> = sandbox.refused.iter().map(|of| format!("{} on {}", of.call, of.thread)).collect();
        let times = sandbox.refused.iter().map(|of| of.times).sum();
        symptoms.push(found(Symptom::SandboxRefused, calls.join(", ")).counted("sandbox_refused", times));
    }
    if !in_force.is_whole() || sandbox.threads_unconfined > 0 {
        let parts: Vec<_> = in_force.figures().iter().map(|(name, value)| format!("{name} {value}")).collect();
        let threads = sandbox.threads_unconfined;
        let found = found(Symptom::SandboxPartial, parts.join(", "));
        symptoms.push(found.counted("sandbox_threads_unconfined", threads));
    }
    if !sandbox.files_replaced.is_empty() {
        symptoms.push(found(Symptom::SandboxFileReplaced, sandbox.files_replaced.join(", ")));
    }
    symptoms
}

/// The rules about one worker. The rule of foreign hashes is about a whole space.
const RULES: [fn(&WorkerCondition) -> Option<FoundSymptom>; 12] = [
    unreachable,
    unbounded,
    refused,
    no_events_received,
    choked,
    restart_loop,
    duplicate_storm,
    messages_wait,
    replay_silent,
    recovery_fails,
    engine_snapshots_fail,
    ingest_panicked,
];

/// The symptoms of one worker.
fn of_worker(worker: &WorkerCondition, space: Option<&SpaceCondition>) -> Vec<FoundSymptom> {
    let mut symptoms: Vec<FoundSymptom> = RULES.iter().filter_map(|rule| rule(worker)).collect();
    let explains_joining = symptoms.iter().any(|found| found.cause.harm() == Harm::Severe);
    let shown = worker.trust.reasons.iter().filter(|_| worker.trust.level != TrustLevel::Exact).filter(|reason| {
        match reason {
            // A rule explains these two better.
            TrustReason::Joining => !explains_joining,
            TrustReason::NoEvents => worker.topic.is_none(),
            _ => true,
        }
    });
    symptoms.extend(shown.map(|reason| because(worker, space, reason)));
    symptoms
}

fn found_in(symptom: Symptom, worker: &WorkerCondition, counter: C, count: u64) -> Option<FoundSymptom> {
    Some(FoundSymptom::symptom(symptom, worker.worker).counted(counter.name(), count))
}

/// Down, or its endpoint is not a publisher's.
fn unreachable(worker: &WorkerCondition) -> Option<FoundSymptom> {
    let failed = worker.recent.get(C::HandshakesFailed);
    if failed > 0 && matches!(worker.state, WorkerState::Joining | WorkerState::Down) {
        return found_in(Symptom::NoPublisher, worker, C::HandshakesFailed, failed);
    }
    (worker.state == WorkerState::Down).then(|| FoundSymptom::symptom(Symptom::WorkerDown, worker.worker))
}

/// It sends messages larger than any engine's.
fn unbounded(worker: &WorkerCondition) -> Option<FoundSymptom> {
    let cut = worker.recent.get(C::MessagesUnbounded);
    (cut > 0).then(|| found_in(Symptom::MessageUnbounded, worker, C::MessagesUnbounded, cut)).flatten()
}

/// Its record names events, and the daemon does not receive them.
fn refused(worker: &WorkerCondition) -> Option<FoundSymptom> {
    let is_refused = worker.topic.is_some() && worker.trust.reasons.contains(TrustReason::NoEvents);
    is_refused.then(|| FoundSymptom::symptom(Symptom::EventsRefused, worker.worker))
}

/// Connected and busy, but without a single message. An engine that computes prompts stores blocks, so either its
/// events are off or the topic filters them out.
fn no_events_received(worker: &WorkerCondition) -> Option<FoundSymptom> {
    let topic = worker.topic.as_ref()?;
    let has_published = worker.trust.as_of_seq.is_some()
        || [C::Batches, C::MessagesMisframed, C::MessagesHeld].iter().any(|counter| worker.total.get(*counter) > 0);
    let decisions = worker.routed_total.get(RouteCounter::Decisions);
    if has_published || worker.state != WorkerState::Ready || decisions < EVENTS_OFF_DECISIONS_MIN {
        return None;
    }
    let symptom = if topic.is_empty() { Symptom::EventsOff } else { Symptom::TopicFiltersAll };
    let found = FoundSymptom::symptom(symptom, worker.worker).counted(RouteCounter::Decisions.name(), decisions);
    let found = if topic.is_empty() { found } else { found.saying(format!("the topic is {topic:?}")) };
    Some(FoundSymptom { lasting_ms_min: EVENTS_OFF_MS_MIN, ..found })
}

fn choked(worker: &WorkerCondition) -> Option<FoundSymptom> {
    worker.choked.then(|| FoundSymptom::symptom(Symptom::EventsChoked, worker.worker))
}

fn restart_loop(worker: &WorkerCondition) -> Option<FoundSymptom> {
    let (restarts, breaks) = (worker.recent.get(C::Restarts), worker.recent.get(C::Disconnects));
    if restarts >= RESTARTS_RECENT_MIN {
        return found_in(Symptom::RestartLoop, worker, C::Restarts, restarts);
    }
    if breaks >= DISCONNECTS_RECENT_MIN {
        return found_in(Symptom::RestartLoop, worker, C::Disconnects, breaks);
    }
    None
}

/// Many duplicates, and a good part of all batches: a reconnect repeats a few batches once. Messages that wait for a
/// recovery are expected in the replay as well.
fn duplicate_storm(worker: &WorkerCondition) -> Option<FoundSymptom> {
    let batches = worker.recent.get(C::Batches);
    [C::Duplicates, C::StoresAmbiguous].into_iter().find_map(|counter| {
        let explained = if counter == C::Duplicates { worker.recent.get(C::MessagesHeld) } else { 0 };
        let times = worker.recent.get(counter).saturating_sub(explained);
        let is_storm = times >= DUPLICATES_RECENT_MIN && times >= batches / 4;
        is_storm.then(|| found_in(Symptom::DuplicateStorm, worker, counter, times)).flatten()
    })
}

fn messages_wait(worker: &WorkerCondition) -> Option<FoundSymptom> {
    let waiting = worker.messages_waiting;
    let is_near = waiting >= HELD_MESSAGES_MAX as u64 / 2;
    is_near.then(|| FoundSymptom::symptom(Symptom::MessagesWait, worker.worker).counted("messages_waiting", waiting))
}

/// The replay endpoint never answers while the worker's events arrive.
fn replay_silent(worker: &WorkerCondition) -> Option<FoundSymptom> {
    let (silent, answered) = (worker.recent.get(C::ReplaysTimedOut), worker.recent.get(C::ReplaysAnswered));
    let is_silent = worker.state != WorkerState::Down && answered == 0 && silent >= REPLAYS_SILENT_RECENT_MIN;
    is_silent.then(|| found_in(Symptom::ReplaySilent, worker, C::ReplaysTimedOut, silent)).flatten()
}

fn recovery_fails(worker: &WorkerCondition) -> Option<FoundSymptom> {
    let failed = worker.recent.get(C::ReplaysUnfillable);
    let is_frequent = failed >= RECOVERIES_FAILED_RECENT_MIN;
    is_frequent.then(|| found_in(Symptom::RecoveryFails, worker, C::ReplaysUnfillable, failed)).flatten()
}

/// The engine's own snapshots fail, and none has been loaded.
fn engine_snapshots_fail(worker: &WorkerCondition) -> Option<FoundSymptom> {
    let (failed, loaded) = (worker.recent.get(C::EngineSnapshotsFailed), worker.recent.get(C::EngineSnapshotsLoaded));
    let fails = failed > 0 && loaded == 0;
    fails.then(|| found_in(Symptom::EngineSnapshotsFail, worker, C::EngineSnapshotsFailed, failed)).flatten()
}

fn ingest_panicked(worker: &WorkerCondition) -> Option<FoundSymptom> {
    let rebuilds = worker.recent.get(C::Rebuilds);
    // While it lasts, the reason of the worker's trust says so.
    let is_over = rebuilds > 0 && !worker.trust.reasons.contains(TrustReason::IngestFailed);
    is_over.then(|| found_in(Symptom::IngestPanicked, worker, C::Rebuilds, rebuilds)).flatten()
}

/// A reason of its trust, with counter and details.
fn because(worker: &WorkerCondition, space: Option<&SpaceCondition>, reason: TrustReason) -> FoundSymptom {
    let found = FoundSymptom::new(Cause::Reason(reason), Some(worker.worker));
    let found = match counter_of(reason) {
        Some(counter) => found.counted(counter.name(), worker.total.get(counter)),
        None => found,
    };
    let found = FoundSymptom { since_unix_ms: Some(worker.trust.since_unix_ms), ..found };
    let schemes = space.and_then(|space| Some((space, space.scheme?, worker.refused_scheme?)));
    match (reason, schemes) {
        (TrustReason::SchemeMismatch, Some((space, known, own))) if known != own => mismatch(found, space, known, own),
        (TrustReason::UnknownRoot, _) => unknown_root(found, worker),
        _ => found,
    }
}

/// Blocks below blocks that are not counted have no chain. The remedy is that of the other reasons. If there are none,
/// the engine has announced something that kvrouted does not know.
fn unknown_root(found: FoundSymptom, worker: &WorkerCondition) -> FoundSymptom {
    const LEAVE_BLOCKS_OUT: [TrustReason; 14] = [
        TrustReason::JoinedLate,
        TrustReason::Gap,
        TrustReason::Undecodable,
        TrustReason::SchemeMismatch,
        TrustReason::HashConflict,
        TrustReason::AmbiguousStore,
        TrustReason::FullReports,
        TrustReason::LastCopyRemovals,
        TrustReason::CapacityBound,
        TrustReason::MemoryBound,
        TrustReason::MemoryShort,
        TrustReason::UnknownEvents,
        TrustReason::UnchainedHashes,
        TrustReason::ClearAwaited,
    ];
    let reasons = worker.trust.reasons.iter().filter(|reason| LEAVE_BLOCKS_OUT.contains(reason));
    let names: Vec<_> = reasons.map(TrustReason::name).collect();
    found.saying(match names.as_slice() {
        [] => "nothing else explains it: if it comes back, report it with a capture of the engine's events".to_owned(),
        _ => format!("they are below blocks that are not counted because of {}", names.join(", ")),
    })
}

/// Names both block sizes, and the setting to change.
fn mismatch(found: FoundSymptom, space: &SpaceCondition, known: Scheme, own: Scheme) -> FoundSymptom {
    let (known_tokens, own_tokens, model) = (known.block_size, own.block_size, &space.model);
    let remedy = if known_tokens == own_tokens {
        format!(
            "windows differ: give the worker a [[space]] of its own with window = {:?}, or start the engine like the others",
            window(own)
        )
    } else {
        format!(
            "start the engine with blocks of {known_tokens} tokens (vLLM --block-size {known_tokens}, SGLang --page-size \
             {known_tokens}), or set block_size = {own_tokens} in the [[space]] of model {model:?} (kvrouted serve \
             --block-size {own_tokens}) if all its engines have that"
        )
    };
    let detail = format!(
        "the worker's blocks have {own_tokens} tokens ({}), those of its space {model:?} have {known_tokens} ({})",
        window(own),
        window(known)
    );
    FoundSymptom { remedy: Some(remedy), ..found.saying(detail) }
}

const fn window(scheme: Scheme) -> &'static str {
    match scheme.window {
        Window::Plain => "plain",
        Window::Bigram => "bigram",
    }
}

/// The counter of a reason.
const fn counter_of(reason: TrustReason) -> Option<C> {
    Some(match reason {
        TrustReason::Gap => C::BatchesMissed,
        TrustReason::Disconnected => C::Disconnects,
        TrustReason::Undecodable => C::BatchesUndecodable,
        TrustReason::SchemeMismatch => C::StoresSchemeMismatch,
        TrustReason::HashConflict => C::StoresHashConflict,
        TrustReason::AmbiguousStore => C::StoresAmbiguous,
        TrustReason::FullReports => C::FullReports,
        TrustReason::LastCopyRemovals => C::LastCopyRemovals,
        TrustReason::UnknownRoot => C::StoresUnknownRoot,
        TrustReason::CapacityBound => C::StoresBounded,
        TrustReason::Hybrid => C::EventsOtherGroup,
        TrustReason::UnknownMedium => C::EventsUnknownMedium,
        TrustReason::RankConflict => C::RankConflicts,
        TrustReason::UnknownEvents => C::UnknownTags,
        TrustReason::Misframed => C::MessagesMisframed,
        TrustReason::MemoryBound => C::StoresMemoryBound,
        TrustReason::MemoryShort => C::StoresMemoryShort,
        TrustReason::Recovering => C::ReplaysAsked,
        TrustReason::UnchainedHashes => C::StoresUnchained,
        TrustReason::OffloadUnbound => C::BlocksUnresolved,
        TrustReason::LowerTiersUnknown => C::EventsNeverRemoved,
        TrustReason::IngestFailed => C::Rebuilds,
        _ => return None,
    })
}
