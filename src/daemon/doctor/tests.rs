//! The findings in given facts: one row for each symptom, and one for each reason.

use std::sync::Arc;

use super::super::sandboxed::SandboxCondition;
use super::facts::{Facts, MemoryCondition, SpaceCondition, ThreadCondition, WorkerCondition};
use super::history::Counts;
use super::{findings, rules};
use crate::budget::Shed;
use crate::finding::{Finding, Harm, Symptom};
use crate::fleet::WorkerState;
use crate::ids::{EventSeq, Scheme, SpaceId, Window, Worker};
use crate::limits::*;
use crate::load::PrefillClass;
use crate::metrics::{
    CoreCounter as Core, DaemonCounter as Daemon, RemoteCounter, RouteCounter as Route, SnapshotCounter, TraceCounter,
    WorkerCounter as C,
};
use crate::routers::protocol::Fault;
use crate::routers::{Digest, Joining, Link, LinkShown, Notice, OriginId, OriginLoad, OwnShown, RoutersShown, Sender};
use crate::sandbox::{InForce, Mode, Refused};
use crate::trust::{Trust, TrustLevel, TrustReason};
use crate::wire::SourceStatus;

const PLAIN_16: Scheme = Scheme { block_size: 16, window: Window::Plain };

/// A worker without symptoms.
fn well(id: u64) -> WorkerCondition {
    WorkerCondition {
        worker: Worker::new(id, 0),
        space: SpaceId(0),
        state: WorkerState::Ready,
        trust: Trust { level: TrustLevel::Exact, as_of_seq: Some(EventSeq(7)), ..Trust::default() },
        topic: Some(String::new()),
        refused_scheme: None,
        blocks_held: 10 * FOREIGN_BLOCKS_HELD_MIN,
        messages_waiting: 0,
        choked: false,
        total: Counts::of(&[(C::Batches, 1000)]),
        recent: Counts::of(&[(C::Batches, 100)]),
        routed_total: Counts::of(&[(Route::Decisions, 1000)]),
        routed_recent: Counts::of(&[(Route::Decisions, 100), (Route::OverlapsFound, 1)]),
    }
}

fn doubted(reason: TrustReason) -> WorkerCondition {
    let reasons = [reason].into_iter().collect();
    WorkerCondition { trust: Trust { level: reason.cap(), reasons, since_unix_ms: 5, ..well(1).trust }, ..well(1) }
}

fn facts(workers: Vec<WorkerCondition>) -> Facts {
    let spaces = vec![SpaceCondition { id: SpaceId(0), model: "m".into(), scheme: Some(PLAIN_16) }];
    Facts { workers, spaces, ..Facts::default() }
}

fn found(facts: &Facts) -> Vec<Finding> {
    findings::findings(rules::symptoms(facts))
}

#[track_caller]
fn names(facts: &Facts) -> Vec<String> {
    found(facts).into_iter().map(|finding| finding.name).collect()
}

#[test]
fn a_healthy_fleet_has_no_findings() {
    assert_eq!(found(&facts(vec![well(1), well(2)])), []);
    assert_eq!(found(&Facts::default()), []);
}

#[test]
fn every_reason_is_a_finding_with_a_remedy() {
    for reason in TrustReason::ALL {
        let worker = doubted(*reason);
        // An events endpoint that the daemon does not receive from is worse than none, and has a symptom of its own.
        let no_events = *reason == TrustReason::NoEvents;
        let worker = if no_events { WorkerCondition { topic: None, ..worker } } else { worker };
        let found = found(&facts(vec![worker]));
        let [finding] = found.as_slice() else { panic!("{reason:?}: {found:?}") };
        assert_eq!((finding.name.as_str(), finding.harm, finding.since_unix_ms), (reason.name(), reason.harm(), 5));
        assert!(finding.what.starts_with(reason.meaning().trim_end_matches('.')), "{finding:?}");
        assert_eq!(finding.remedy, reason.remedy());
        assert_eq!(finding.why, reason.cap().consequence());
        assert_eq!(finding.workers, [Worker::new(1, 0)]);
    }
}

#[test]
fn second_copies_are_a_finding_with_its_setting_and_their_consequences_ask_for_no_report() {
    let doubted_by = |reasons: &[TrustReason]| {
        let reasons = reasons.iter().copied().collect();
        found(&facts(vec![WorkerCondition { trust: Trust { reasons, ..doubted(TrustReason::Gap).trust }, ..well(1) }]))
    };
    let both = doubted_by(&[TrustReason::AmbiguousStore, TrustReason::UnknownRoot]);
    let of = |found: &[Finding], name: &str| found.iter().find(|finding| finding.name == name).cloned().expect("found");
    let copies = of(&both, "ambiguous_store");
    assert!(copies.harm > Harm::Note && copies.remedy.contains("full_reports = \"none\""), "{copies:?}");
    let below = of(&both, "unknown_root");
    assert!(!below.remedy.contains("capture") && !below.what.contains("capture"), "{below:?}");
    assert!(below.what.contains("ambiguous_store"), "{below:?}");
    let alone = of(&doubted_by(&[TrustReason::UnknownRoot]), "unknown_root");
    assert!(alone.what.contains("capture"), "{alone:?}");
}

/// Facts with a symptom, and facts that just miss it.
type Examples = (Facts, Facts);

fn changed(change: impl Fn(&mut WorkerCondition)) -> Facts {
    let mut worker = well(1);
    change(&mut worker);
    facts(vec![worker])
}

fn recent(counter: C, n: u64) -> Facts {
    changed(|worker| worker.recent = Counts::of(&[(C::Batches, 100), (counter, n)]))
}

fn without_events(topic: &str, decisions: u64) -> Facts {
    changed(|worker| {
        worker.topic = Some(topic.into());
        worker.trust.as_of_seq = None;
        worker.total = Counts::default();
        worker.routed_total = Counts::of(&[(Route::Decisions, decisions)]);
    })
}

fn cores(counts: &[(Core, u64)]) -> Facts {
    Facts { cores: Counts::of(counts), ..facts(vec![well(1)]) }
}

fn daemon(counter: Daemon, n: u64) -> Facts {
    Facts { daemon: Counts::of(&[(counter, n)]), ..facts(vec![well(1)]) }
}

fn snapshots(counter: SnapshotCounter) -> Facts {
    Facts { snapshots: Counts::of(&[(counter, 1)]), ..facts(vec![well(1)]) }
}

fn remote(counter: RemoteCounter) -> Facts {
    Facts { remote: Counts::of(&[(counter, 1)]), ..facts(vec![well(1)]) }
}

fn traces(counts: &[(TraceCounter, u64)]) -> Facts {
    Facts { traces: Counts::of(counts), ..facts(vec![well(1)]) }
}

/// One source of workers for each problem.
fn named(problems: &[Option<&str>]) -> Facts {
    let source = |problem: &Option<&str>| SourceStatus {
        name: "file f".into(),
        workers: 1,
        problem: problem.map(str::to_owned),
    };
    Facts { naming: problems.iter().map(source).collect(), ..facts(vec![well(1)]) }
}

/// Of symptoms of workers.
fn of_worker(symptom: Symptom) -> Option<Examples> {
    let in_state = |state| changed(|worker| worker.state = state);
    let foreign = |missed, found| facts(vec![routed(1, missed, found)]);
    let waiting = |messages| changed(|worker| worker.messages_waiting = messages);
    let fine = || facts(vec![well(1)]);
    Some(match symptom {
        Symptom::WorkerDown => (in_state(WorkerState::Down), in_state(WorkerState::Draining)),
        Symptom::NoPublisher => {
            let sick = changed(|worker| {
                worker.state = WorkerState::Joining;
                worker.recent = Counts::of(&[(C::HandshakesFailed, 1)]);
            });
            (sick, recent(C::HandshakesFailed, 1))
        }
        Symptom::MessageUnbounded => (recent(C::MessagesUnbounded, 1), fine()),
        Symptom::EventsRefused => {
            let WorkerCondition { trust, .. } = doubted(TrustReason::NoEvents);
            (changed(|worker| worker.trust = trust), fine())
        }
        Symptom::EventsOff => {
            (without_events("", EVENTS_OFF_DECISIONS_MIN), without_events("", EVENTS_OFF_DECISIONS_MIN - 1))
        }
        Symptom::TopicFiltersAll => (without_events("kv@", EVENTS_OFF_DECISIONS_MIN), without_events("kv@", 0)),
        Symptom::ForeignHashes => (foreign(FOREIGN_REPEATS_MIN, 0), foreign(FOREIGN_REPEATS_MIN, 1)),
        Symptom::EventsChoked => (changed(|worker| worker.choked = true), fine()),
        Symptom::RestartLoop => {
            (recent(C::Restarts, RESTARTS_RECENT_MIN), recent(C::Restarts, RESTARTS_RECENT_MIN - 1))
        }
        Symptom::DuplicateStorm => {
            (recent(C::Duplicates, DUPLICATES_RECENT_MIN), recent(C::Duplicates, DUPLICATES_RECENT_MIN - 1))
        }
        Symptom::MessagesWait => (waiting(HELD_MESSAGES_MAX as u64 / 2), waiting(HELD_MESSAGES_MAX as u64 / 2 - 1)),
        Symptom::ReplaySilent => {
            let silent = recent(C::ReplaysTimedOut, REPLAYS_SILENT_RECENT_MIN);
            (silent, recent(C::ReplaysTimedOut, REPLAYS_SILENT_RECENT_MIN - 1))
        }
        Symptom::RecoveryFails => {
            let failed = recent(C::ReplaysUnfillable, RECOVERIES_FAILED_RECENT_MIN);
            (failed, recent(C::ReplaysUnfillable, RECOVERIES_FAILED_RECENT_MIN - 1))
        }
        Symptom::EngineSnapshotsFail => (recent(C::EngineSnapshotsFailed, 1), recent(C::EngineSnapshotsLoaded, 1)),
        Symptom::IngestPanicked => (recent(C::Rebuilds, 1), recent(C::Rebuilds, 0)),
        _ => return None,
    })
}

/// Of symptoms of the daemon.
fn of_routers(symptom: Symptom) -> Option<Examples> {
    let address = || "tcp://b:1".to_owned();
    let (sender, digest, load) = (Sender::default(), Digest::default(), OriginLoad::default());
    let own = OwnShown { sender, address: address(), sequence: 0, digest, load };
    let shown = RoutersShown { own: Some(own), ..RoutersShown::default() };
    let with = |change: &dyn Fn(&mut RoutersShown)| {
        let mut shown = shown.clone();
        change(&mut shown);
        Facts { routers: Arc::new(shown), ..Facts::default() }
    };
    let unproven = || Link { address: address(), is_up: true, origin: None, is_broker: false };
    let link = |refused| LinkShown { link: unproven(), refused };
    let noticed = |notice| with(&|shown| shown.recent.push((OriginId(2), notice)));
    let sick = match symptom {
        Symptom::RouterMissing => with(&|shown| shown.links.push(link(None))),
        Symptom::RouterUnlisted => with(&|shown| shown.unlisted.push(OriginId(2))),
        Symptom::RouterRefused => with(&|shown| shown.links.push(link(Some(Fault::WrongMac)))),
        Symptom::RouterNameShared => noticed(Notice::OwnId),
        Symptom::RouterSecret => noticed(Notice::WrongMac),
        Symptom::RouterDiffers => noticed(Notice::DigestDiffers),
        Symptom::RoutersTooMany => noticed(Notice::NoPlace),
        Symptom::RoutersJoining => with(&|shown| shown.joining = Joining::Waiting { missing: 1 }),
        _ => return None,
    };
    Some((sick, noticed(Notice::Stale)))
}

fn of_daemon(symptom: Symptom) -> Option<Examples> {
    let unschemed = |n| Facts {
        spaces: vec![SpaceCondition { id: SpaceId(0), model: "m".into(), scheme: None }],
        ..cores(&[(Core::RoutesSchemeUnknown, n)])
    };
    let leaked = |bookings| Facts {
        daemon: Counts::of(&[(Daemon::BookingsExpiredAge, BOOKINGS_LEAKED_RECENT_MIN)]),
        ..cores(&[(Core::Bookings, bookings)])
    };
    let mispredicted = |error_mean| {
        let (name, predictions) = ("c".to_owned(), TTFT_PREDICTIONS_MIN);
        let class = PrefillClass { name, predictions, error_mean, ..PrefillClass::default() };
        Facts { prefill_classes: vec![class], ..Facts::default() }
    };
    let freed = |reported| Facts {
        decides_by_latency: true,
        ..cores(&[(Core::BookingsFreed, FIRST_TOKENS_RECENT_MIN), (Core::PrefillsReported, reported)])
    };
    let open = |open| Facts { open_files: Some((open, 1000)), ..Facts::default() };
    let memory =
        |shed: &[Shed]| Facts { memory: MemoryCondition { used_bytes: 950, shed: shed.to_vec() }, ..Facts::default() };
    let stalled = |is_vital| Facts {
        threads_stalled: vec![ThreadCondition {
            name: "ingest-0".into(),
            is_vital,
            activity: "applying events of worker 7/1".into(),
        }],
        ..Facts::default()
    };
    let nodes = |nodes: &[u32]| Facts { numa_nodes: nodes.to_vec(), ..Facts::default() };
    let step = |clock_step_ms| Facts { clock_step_ms, ..Facts::default() };
    Some(match symptom {
        Symptom::GatewayScheme => (cores(&[(Core::RequestsSchemeMismatch, 1)]), cores(&[(Core::Errors, 1)])),
        Symptom::NobodyEligible => (cores(&[(Core::RoutesAllDown, 1)]), cores(&[(Core::Routes, 1)])),
        Symptom::ConnectionsRefused => (daemon(Daemon::MailboxFull, 1), daemon(Daemon::AdminConnectionsRefused, 1)),
        Symptom::RemoteRefused => (remote(RemoteCounter::RefusedToken), remote(RemoteCounter::RefusedTls)),
        Symptom::SchemeUnknown => (unschemed(1), unschemed(0)),
        Symptom::PredictionsDropped => (cores(&[(Core::PredictionsDropped, 1)]), cores(&[(Core::Bookings, 1)])),
        Symptom::SnapshotsFail => {
            (snapshots(SnapshotCounter::SnapshotsFailed), snapshots(SnapshotCounter::SnapshotsLate))
        }
        Symptom::SourceUnusable => (named(&[Some("torn")]), named(&[None])),
        Symptom::BookingsLeak => (leaked(100), leaked(1_000_000)),
        Symptom::FirstTokensMissing => (freed(9), freed(10)),
        Symptom::TtftMispredicted => (mispredicted(0.31), mispredicted(0.3)),
        Symptom::OpenFilesLow => (open(900), open(899)),
        Symptom::MemoryShed => (memory(&[Shed::Connections, Shed::Stores]), memory(&[])),
        Symptom::ThreadStalled => (stalled(true), stalled(false)),
        Symptom::ThreadSlow => (daemon(Daemon::ThreadStalls, 1), Facts::default()),
        Symptom::RestartPending => {
            let pending = Facts { pending: vec!["journal.dir", "serve.cores"], ..Facts::default() };
            (pending, Facts::default())
        }
        Symptom::SandboxRefused => {
            let refused = Refused { thread: "ingest", call: "execve", times: 1 };
            (confined(WHOLE, |sandbox| sandbox.refused.push(refused)), confined(WHOLE, |_| {}))
        }
        Symptom::SandboxPartial => (confined(InForce { landlock: 0, ..WHOLE }, |_| {}), confined(WHOLE, |_| {})),
        Symptom::SandboxFileReplaced => {
            let replaced = |sandbox: &mut SandboxCondition| sandbox.files_replaced.push("/etc/hosts".to_owned());
            (confined(WHOLE, replaced), confined(WHOLE, |_| {}))
        }
        Symptom::NumaNodes => (nodes(&[0, 1]), nodes(&[1])),
        Symptom::ClockStepped => (step(-(CLOCK_STEP_MS_MIN as i64)), step(CLOCK_STEP_MS_MIN as i64 - 1)),
        _ => return None,
    })
}

/// Of symptoms of traces.
fn of_traces(symptom: Symptom) -> Option<Examples> {
    Some(match symptom {
        Symptom::TracesUndelivered => {
            (traces(&[(TraceCounter::SpansGivenUp, 1)]), traces(&[(TraceCounter::Exports, 1)]))
        }
        Symptom::TracesLost => (traces(&[(TraceCounter::RecordsLost, 1)]), traces(&[(TraceCounter::Requests, 1)])),
        _ => return None,
    })
}

/// A sandbox without a fault.
const WHOLE: InForce =
    InForce { mode: Mode::On, no_new_privileges: true, capabilities_dropped: true, filters: true, landlock: 7 };

/// A daemon in a sandbox.
fn confined(in_force: InForce, change: impl FnOnce(&mut SandboxCondition)) -> Facts {
    let mut sandbox = SandboxCondition { in_force: Some(in_force), ..SandboxCondition::default() };
    change(&mut sandbox);
    Facts { sandbox, ..Facts::default() }
}

/// Symptoms that only `kvrouted doctor` can see, from outside the daemon.
const OUTSIDE: [Symptom; 11] = [
    Symptom::SocketUnreachable,
    Symptom::SocketDenied,
    Symptom::AdminUnreachable,
    Symptom::SocketOpen,
    Symptom::MetricsUnreachable,
    Symptom::VersionDiffers,
    Symptom::ConfigInvalid,
    Symptom::ConfigDiffers,
    Symptom::OpenFilesShort,
    Symptom::GatewayFinding,
    Symptom::GatewayUnreachable,
];

#[test]
fn every_symptom_is_found_at_its_threshold_and_not_below() {
    for symptom in Symptom::ALL.iter().filter(|symptom| !OUTSIDE.contains(symptom)) {
        let (sick, well) = of_worker(*symptom)
            .or_else(|| of_routers(*symptom))
            .or_else(|| of_daemon(*symptom))
            .or_else(|| of_traces(*symptom))
            .expect("every symptom has a row");
        assert_eq!(names(&sick), [symptom.name()], "{symptom:?}");
        assert!(!names(&well).contains(&symptom.name().to_owned()), "{symptom:?}");
        let finding = &found(&sick)[0];
        assert_eq!((finding.harm, finding.why.as_str()), (symptom.harm(), symptom.why()));
    }
}

#[test]
fn a_stalled_thread_is_named_with_its_activity_once_and_not_also_as_a_past_one() {
    let thread = |name: &str, is_vital, activity: &str| ThreadCondition {
        name: name.into(),
        is_vital,
        activity: activity.into(),
    };
    let threads_stalled = vec![thread("core-1", true, "deciding"), thread("snapshot", false, "writing a snapshot")];
    let daemon = Counts::of(&[(Daemon::ThreadStalls, 2)]);
    let found = found(&Facts { threads_stalled, daemon, ..Facts::default() });
    let [stalled, slow] = found.as_slice() else { panic!("{found:?}") };
    assert_eq!((stalled.name.as_str(), slow.name.as_str()), ("thread_stalled", "thread_slow"));
    assert!(stalled.what.contains("core-1 is deciding"), "{}", stalled.what);
    assert!(slow.what.contains("snapshot is writing a snapshot"), "{}", slow.what);
}

#[test]
fn a_block_size_mismatch_names_both_sizes_and_what_to_set() {
    let refused_scheme = Some(Scheme { block_size: 32, ..PLAIN_16 });
    let total = Counts::of(&[(C::StoresSchemeMismatch, 12)]);
    let found = found(&facts(vec![WorkerCondition { refused_scheme, total, ..doubted(TrustReason::SchemeMismatch) }]));
    let finding = &found[0];
    for words in ["have 32 tokens", "have 16", "(stores_scheme_mismatch 12)"] {
        assert!(finding.what.contains(words), "{words}: {}", finding.what);
    }
    for words in ["vLLM --block-size 16", "SGLang --page-size 16", "block_size = 32 in the [[space]] of model \"m\""] {
        assert!(finding.remedy.contains(words), "{words}: {}", finding.remedy);
    }
    let refused_scheme = Some(Scheme { window: Window::Bigram, ..PLAIN_16 });
    let facts = facts(vec![WorkerCondition { refused_scheme, ..doubted(TrustReason::SchemeMismatch) }]);
    assert!(self::found(&facts)[0].what.contains("(bigram)"), "{:?}", self::found(&facts));
}

fn routed(id: u64, missed: u64, found: u64) -> WorkerCondition {
    let routed_recent = Counts::of(&[(Route::RepeatsMissed, missed), (Route::OverlapsFound, found)]);
    WorkerCondition { routed_recent, ..well(id) }
}

#[test]
fn foreign_hashes_are_reported_for_the_space_or_for_single_workers() {
    let half = FOREIGN_REPEATS_MIN / 2;
    let space = found(&facts(vec![routed(1, half, 0), routed(2, half, 0), routed(3, 0, 0)]));
    assert_eq!(space[0].workers, [Worker::new(1, 0), Worker::new(2, 0)], "the misses of both are added up");
    assert!(space[0].what.contains("any worker of the space \"m\""), "{}", space[0].what);
    let single = found(&facts(vec![routed(1, FOREIGN_REPEATS_MIN, 0), routed(2, half, 0), routed(3, 0, 1)]));
    assert_eq!(single[0].workers, [Worker::new(1, 0)]);
    assert!(single[0].what.contains("other workers"), "{}", single[0].what);
}

#[test]
fn foreign_hashes_are_not_reported_if_something_else_explains_the_misses() {
    let foreign = || routed(1, 10 * FOREIGN_REPEATS_MIN, 0);
    assert_eq!(names(&facts(vec![foreign()])), ["foreign_hashes"]);
    let named = |worker| names(&facts(vec![worker])).contains(&"foreign_hashes".to_owned());
    assert!(!named(WorkerCondition { blocks_held: FOREIGN_BLOCKS_HELD_MIN - 1, ..foreign() }), "a nearly empty cache");
    assert!(!named(WorkerCondition { topic: None, ..foreign() }), "no events");
    for reason in [TrustReason::Joining, TrustReason::Disconnected, TrustReason::SchemeMismatch, TrustReason::Hybrid] {
        let WorkerCondition { trust, .. } = doubted(reason);
        assert!(!named(WorkerCondition { trust, ..foreign() }), "{reason:?}");
    }
    let WorkerCondition { trust, .. } = doubted(TrustReason::JoinedLate);
    assert!(named(WorkerCondition { trust, ..foreign() }), "the blocks it holds by now are known, and would match");
    assert!(!named(WorkerCondition { space: SpaceId(9), ..foreign() }));
}

#[test]
fn duplicates_and_disconnects_are_compared_with_their_usual_number() {
    let recent = |counts: &[(C, u64)]| names(&facts(vec![WorkerCondition { recent: Counts::of(counts), ..well(1) }]));
    let (many, busy) = (DUPLICATES_RECENT_MIN, 4 * DUPLICATES_RECENT_MIN);
    assert_eq!(recent(&[(C::StoresAmbiguous, many), (C::Batches, busy)]), ["duplicate_storm"]);
    assert!(recent(&[(C::Duplicates, many), (C::Batches, busy + 4)]).is_empty(), "a small part of many batches");
    assert!(
        recent(&[(C::Duplicates, many), (C::MessagesHeld, 1)]).is_empty(),
        "the replay has the messages that waited for it"
    );
    assert_eq!(recent(&[(C::Disconnects, DISCONNECTS_RECENT_MIN)]), ["restart_loop"]);
}

#[test]
fn an_answered_replay_is_not_silent() {
    let counts = &[(C::ReplaysTimedOut, 9 * REPLAYS_SILENT_RECENT_MIN), (C::ReplaysAnswered, 1)];
    assert!(names(&changed(|worker| worker.recent = Counts::of(counts))).is_empty());
    let down = changed(|worker| {
        worker.state = WorkerState::Down;
        worker.recent = Counts::of(&counts[..1]);
    });
    assert_eq!(names(&down), ["worker_down"]);
}

#[test]
fn of_several_refused_sources_the_first_is_named_and_the_rest_counted() {
    let said = found(&named(&[Some("torn"), None, Some("owned")]));
    assert!(said[0].what.ends_with(": file f: torn, and 1 more."), "{}", said[0].what);
    let full = found(&daemon(Daemon::WorkersRefusedFull, 2));
    assert!(full[0].what.ends_with("no room for more workers. (workers_refused_full 2)"), "{}", full[0].what);
}

#[test]
fn a_collector_that_takes_no_spans_explains_those_that_were_dropped() {
    use TraceCounter::{BookingsUntracked, Exports, ExportsFailed, RecordsLost, SpansDropped, SpansRefused, SpansSent};
    let named = |counts: &[(TraceCounter, u64)]| names(&traces(counts));
    assert!(named(&[(ExportsFailed, 4), (Exports, 1), (SpansSent, 9)]).is_empty(), "later attempts succeeded");
    assert_eq!(named(&[(ExportsFailed, 1)]), ["traces_undelivered"], "none has succeeded");
    assert_eq!(named(&[(ExportsFailed, 1), (SpansDropped, 5), (RecordsLost, 5)]), ["traces_undelivered"]);
    assert_eq!(named(&[(Exports, 9), (SpansRefused, 1)]), ["traces_undelivered"], "it rejects some");
    for counter in [SpansDropped, BookingsUntracked] {
        assert_eq!(named(&[(Exports, 9), (counter, 1)]), ["traces_lost"], "{counter:?}");
    }
}

#[test]
fn contended_reads_are_found_by_their_share() {
    let cores = |contended, routes| {
        let cores = Counts::of(&[(Core::RoutesContended, contended), (Core::Routes, routes)]);
        found(&Facts { cores, ..Facts::default() })
    };
    let many = cores(CONTENDED_RECENT_MIN, 100 * CONTENDED_RECENT_MIN);
    assert_eq!((many[0].name.as_str(), many[0].harm), ("read_contended", Harm::Warning));
    assert_eq!(many[0].remedy, TrustReason::ReadContended.remedy());
    assert!(cores(CONTENDED_RECENT_MIN, 1000 * CONTENDED_RECENT_MIN).is_empty());
    assert!(cores(CONTENDED_RECENT_MIN - 1, 0).is_empty());
}

#[test]
fn a_worker_that_is_down_is_not_reported_as_joining_too() {
    let down = WorkerCondition { state: WorkerState::Down, ..doubted(TrustReason::Joining) };
    assert_eq!(names(&facts(vec![down])), ["worker_down"]);
}
