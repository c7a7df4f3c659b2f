//! When something is wrong with a worker: one rule per symptom, and one for the reasons of its trust. Pure.

use super::facts::{SpaceFacts, WorkerFacts};
use super::sign::{Cause, Sign};
use crate::finding::{Harm, Symptom};
use crate::fleet::WorkerState;
use crate::ids::{Scheme, Window};
use crate::limits::{
    DISCONNECTS_RECENT_MIN, DUPLICATES_RECENT_MIN, EVENTS_OFF_DECISIONS_MIN, EVENTS_OFF_MS_MIN, HELD_MESSAGES_MAX,
    RECOVERIES_FAILED_RECENT_MIN, REPLAYS_SILENT_RECENT_MIN, RESTARTS_RECENT_MIN,
};
use crate::metrics::{CounterName, RouteCounter, WorkerCounter as C};
use crate::trust::{TrustLevel, TrustReason};

/// Every rule about one worker but that of foreign hashes, which looks at a whole space.
const RULES: [fn(&WorkerFacts) -> Option<Sign>; 11] = [
    unreachable,
    unbounded,
    refused,
    unheard,
    choked,
    restart_loop,
    duplicate_storm,
    messages_wait,
    replay_silent,
    recovery_fails,
    ingest_panicked,
];

/// Everything that is wrong with one worker.
pub(super) fn signs(worker: &WorkerFacts, space: Option<&SpaceFacts>) -> Vec<Sign> {
    let mut signs: Vec<Sign> = RULES.iter().filter_map(|rule| rule(worker)).collect();
    let says_why_unheard = signs.iter().any(|sign| sign.cause.harm() == Harm::Severe);
    let told = worker.trust.reasons.iter().filter(|_| worker.trust.level != TrustLevel::Exact).filter(|reason| {
        match reason {
            // Said better by a rule.
            TrustReason::Joining => !says_why_unheard,
            TrustReason::NoEvents => worker.topic.is_none(),
            _ => true,
        }
    });
    signs.extend(told.map(|reason| because(worker, space, reason)));
    signs
}

fn sign(symptom: Symptom, worker: &WorkerFacts, counter: C, count: u64) -> Option<Sign> {
    Some(Sign::symptom(symptom, worker.worker).counted(counter.name(), count))
}

/// Down, or answered by something that is no publisher.
fn unreachable(worker: &WorkerFacts) -> Option<Sign> {
    let failed = worker.recent.get(C::HandshakesFailed);
    if failed > 0 && matches!(worker.state, WorkerState::Joining | WorkerState::Down) {
        return sign(Symptom::NoPublisher, worker, C::HandshakesFailed, failed);
    }
    (worker.state == WorkerState::Down).then(|| Sign::symptom(Symptom::WorkerDown, worker.worker))
}

/// What it sends takes more memory than any engine's message.
fn unbounded(worker: &WorkerFacts) -> Option<Sign> {
    let cut = worker.recent.get(C::MessagesUnbounded);
    (cut > 0).then(|| sign(Symptom::MessageUnbounded, worker, C::MessagesUnbounded, cut)).flatten()
}

/// Its record names events and the daemon does not listen to them.
fn refused(worker: &WorkerFacts) -> Option<Sign> {
    let is_refused = worker.topic.is_some() && worker.trust.reasons.contains(TrustReason::NoEvents);
    is_refused.then(|| Sign::symptom(Symptom::EventsRefused, worker.worker))
}

/// Connected, busy, and not one message. An engine that computes prompts stores blocks, so it has nothing to say only
/// if it does not say it, or if the topic keeps it away.
fn unheard(worker: &WorkerFacts) -> Option<Sign> {
    let topic = worker.topic.as_ref()?;
    let is_heard = worker.trust.as_of_seq.is_some()
        || [C::Batches, C::MessagesMisframed, C::MessagesHeld].iter().any(|counter| worker.total.get(*counter) > 0);
    let decisions = worker.routed_total.get(RouteCounter::Decisions);
    if is_heard || worker.state != WorkerState::Ready || decisions < EVENTS_OFF_DECISIONS_MIN {
        return None;
    }
    let symptom = if topic.is_empty() { Symptom::EventsOff } else { Symptom::TopicFiltersAll };
    let sign = Sign::symptom(symptom, worker.worker).counted(RouteCounter::Decisions.name(), decisions);
    let sign = if topic.is_empty() { sign } else { sign.saying(format!("the topic is {topic:?}")) };
    Some(Sign { patience_ms: EVENTS_OFF_MS_MIN, ..sign })
}

fn choked(worker: &WorkerFacts) -> Option<Sign> {
    worker.choked.then(|| Sign::symptom(Symptom::EventsChoked, worker.worker))
}

fn restart_loop(worker: &WorkerFacts) -> Option<Sign> {
    let (restarts, breaks) = (worker.recent.get(C::Restarts), worker.recent.get(C::Disconnects));
    if restarts >= RESTARTS_RECENT_MIN {
        return sign(Symptom::RestartLoop, worker, C::Restarts, restarts);
    }
    if breaks >= DISCONNECTS_RECENT_MIN {
        return sign(Symptom::RestartLoop, worker, C::Disconnects, breaks);
    }
    None
}

/// Many, and a good part of all that comes: a reconnect repeats a few batches once. What waits for a recovery is
/// rightly in the replay too.
fn duplicate_storm(worker: &WorkerFacts) -> Option<Sign> {
    let batches = worker.recent.get(C::Batches);
    [C::Duplicates, C::StoresAmbiguous].into_iter().find_map(|counter| {
        let explained = if counter == C::Duplicates { worker.recent.get(C::MessagesHeld) } else { 0 };
        let times = worker.recent.get(counter).saturating_sub(explained);
        let is_storm = times >= DUPLICATES_RECENT_MIN && times >= batches / 4;
        is_storm.then(|| sign(Symptom::DuplicateStorm, worker, counter, times)).flatten()
    })
}

fn messages_wait(worker: &WorkerFacts) -> Option<Sign> {
    let waiting = worker.messages_waiting;
    let is_near = waiting >= HELD_MESSAGES_MAX as u64 / 2;
    is_near.then(|| Sign::symptom(Symptom::MessagesWait, worker.worker).counted("messages_waiting", waiting))
}

/// Nothing at all comes from there, while the worker's events do.
fn replay_silent(worker: &WorkerFacts) -> Option<Sign> {
    let (silent, answered) = (worker.recent.get(C::ReplaysTimedOut), worker.recent.get(C::ReplaysAnswered));
    let is_silent = worker.state != WorkerState::Down && answered == 0 && silent >= REPLAYS_SILENT_RECENT_MIN;
    is_silent.then(|| sign(Symptom::ReplaySilent, worker, C::ReplaysTimedOut, silent)).flatten()
}

fn recovery_fails(worker: &WorkerFacts) -> Option<Sign> {
    let failed = worker.recent.get(C::ReplaysUnfillable);
    let is_told = failed >= RECOVERIES_FAILED_RECENT_MIN;
    is_told.then(|| sign(Symptom::RecoveryFails, worker, C::ReplaysUnfillable, failed)).flatten()
}

fn ingest_panicked(worker: &WorkerFacts) -> Option<Sign> {
    let rebuilds = worker.recent.get(C::Rebuilds);
    // While it lasts, the reason of its trust says it.
    let is_over = rebuilds > 0 && !worker.trust.reasons.contains(TrustReason::IngestFailed);
    is_over.then(|| sign(Symptom::IngestPanicked, worker, C::Rebuilds, rebuilds)).flatten()
}

/// A reason of its trust, with what is known beside it.
fn because(worker: &WorkerFacts, space: Option<&SpaceFacts>, reason: TrustReason) -> Sign {
    let sign = Sign::new(Cause::Reason(reason), Some(worker.worker));
    let sign = match counter_of(reason) {
        Some(counter) => sign.counted(counter.name(), worker.total.get(counter)),
        None => sign,
    };
    let sign = Sign { since_unix_ms: Some(worker.trust.since_unix_ms), ..sign };
    let schemes = space.and_then(|space| Some((space, space.scheme?, worker.refused_scheme?)));
    match (reason, schemes) {
        (TrustReason::SchemeMismatch, Some((space, known, own))) if known != own => mismatch(sign, space, known, own),
        (TrustReason::UnknownRoot, _) => unknown_root(sign, worker),
        _ => sign,
    }
}

/// Blocks below others that are not counted have no chain: what is to be done is what the other reasons say. Where there
/// is none, an engine has announced something that is not known here.
fn unknown_root(sign: Sign, worker: &WorkerFacts) -> Sign {
    const LEAVE_BLOCKS_OUT: [TrustReason; 13] = [
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
        TrustReason::UnknownEvents,
        TrustReason::UnchainedHashes,
        TrustReason::ClearAwaited,
    ];
    let reasons = worker.trust.reasons.iter().filter(|reason| LEAVE_BLOCKS_OUT.contains(reason));
    let names: Vec<_> = reasons.map(TrustReason::name).collect();
    sign.saying(match names.as_slice() {
        [] => "nothing else explains it: if it comes back, report it with a capture of the engine's events".to_owned(),
        _ => format!("they are below blocks that are not counted because of {}", names.join(", ")),
    })
}

/// Says both sizes, and what to set where.
fn mismatch(sign: Sign, space: &SpaceFacts, known: Scheme, own: Scheme) -> Sign {
    let (known_tokens, own_tokens, model) = (known.block_size, own.block_size, &space.model);
    let remedy = if known_tokens == own_tokens {
        format!(
            "windows differ: give the worker a [[space]] of its own with window = {:?}, or start the engine as the others",
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
        "the worker's blocks are of {own_tokens} tokens ({}), those of its space {model:?} of {known_tokens} ({})",
        window(own),
        window(known)
    );
    Sign { remedy: Some(remedy), ..sign.saying(detail) }
}

const fn window(scheme: Scheme) -> &'static str {
    match scheme.window {
        Window::Plain => "plain",
        Window::Bigram => "bigram",
    }
}

/// The counter that shows how often a reason was met.
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
        TrustReason::Recovering => C::ReplaysAsked,
        TrustReason::UnchainedHashes => C::StoresUnchained,
        TrustReason::OffloadUnbound => C::BlocksUnresolved,
        TrustReason::LowerTiersUnknown => C::EventsNeverRemoved,
        TrustReason::IngestFailed => C::Rebuilds,
        _ => return None,
    })
}
