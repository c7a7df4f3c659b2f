//! Journals of simulated fleets: what is read from them is what the fleet was.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use super::*;
use crate::engine_law::EngineLaw;
use crate::ids::{TierBlocks, WorkerIndex};
use crate::journal::{DecisionRecord, Encoder, JournalEntry, ListedCandidate, Origin, Reader, RequestIdentity};
use crate::load::{EndReason, Load};
use crate::route::{Mode, Observation, RequestFacts, WorkerFacts};
use crate::simulate::policy_trials::Stretch;
use crate::simulate::prompt_blocks::blocks_of;
use crate::simulate::workload::generators::Chat;
use crate::simulate::workload::{Arrivals, Lognormal, Session, Turn, Workload};
use crate::simulate::{FleetChange, FleetChangeKind, Outcome, Settings, simulate_under};
use crate::trust::{Trust, TrustLevel};

/// Tokens of an identity, and of a simulated block.
const IDENTITY_TOKENS: u32 = 64;
/// Tokens of a block of the recorded space.
const BLOCK_SIZE: u32 = 16;

/// One request of a run: its session, its turn and what it went through.
type Ran<'a> = (usize, &'a Turn, Outcome);

/// What the requests of a workload went through, in the order of their arrival.
fn ran<'a>(workload: &'a Workload, settings: &Settings, policy: &Policy) -> Vec<Ran<'a>> {
    let outcomes = simulate_under(workload, settings, policy).expect("a fleet");
    let starts = workload.sessions.iter().enumerate();
    let mut coming: BinaryHeap<_> =
        starts.map(|(at, session)| Reverse(((session.start_s * 1e9) as u64, at, 0_usize))).collect();
    let next = |outcome: Outcome| {
        let Reverse((at_ns, session, turn)) = coming.pop().expect("it came from somewhere");
        assert_eq!(at_ns, outcome.arrived_ns);
        let turns = &workload.sessions[session].turns;
        if let Some(next) = turns.get(turn + 1) {
            coming.push(Reverse((outcome.end_ns + (next.think_s * 1e9) as u64, session, turn + 1)));
        }
        (session, &turns[turn], outcome)
    };
    outcomes.into_iter().map(next).collect()
}

/// The journal that a daemon before this fleet would have written.
struct Recording<'a> {
    ran: Vec<Ran<'a>>,
    settings: &'a Settings,
    policy: Policy,
    /// Whether the daemon knows the size of the engines' memory.
    knows_capacity: bool,
    /// Whether requests name their session.
    names_sessions: bool,
}

impl Recording<'_> {
    fn facts(&self, at: usize) -> Vec<WorkerFacts> {
        let (_, _, asked) = &self.ran[at];
        let in_flight = |worker: usize| {
            self.ran[..at]
                .iter()
                .map(|(.., outcome)| outcome)
                .filter(move |outcome| outcome.worker as usize == worker && outcome.end_ns > asked.arrived_ns)
        };
        let facts = |(worker, spec): (usize, &crate::simulate::EngineSpec)| {
            let is_chosen = worker == asked.worker as usize;
            let prompts: u64 = in_flight(worker).map(|outcome| u64::from(outcome.prompt_tokens)).sum();
            WorkerFacts {
                index: WorkerIndex(worker as u32),
                worker: Worker::new(worker as u64 + 1, 0),
                overlap: TierBlocks {
                    device: if is_chosen { asked.believed_tokens / BLOCK_SIZE } else { 0 },
                    ..TierBlocks::default()
                },
                load: Load {
                    requests: in_flight(worker).count() as u64,
                    decode_blocks: prompts / u64::from(BLOCK_SIZE),
                    ..Load::default()
                },
                trust: Trust {
                    level: if is_chosen { TrustLevel::Exact } else { TrustLevel::None },
                    ..Trust::default()
                },
                capacity_blocks: if self.knows_capacity { spec.kv_tokens / u64::from(BLOCK_SIZE) } else { 0 },
                batched_tokens_max: u64::from(spec.step_tokens_max),
                ..WorkerFacts::default()
            }
        };
        self.settings.engines.iter().enumerate().map(facts).collect()
    }

    fn decision(&self, at: usize) -> DecisionRecord {
        let (session, turn, outcome) = &self.ran[at];
        let mut blocks = Vec::new();
        blocks_of(turn, IDENTITY_TOKENS, &mut blocks);
        blocks.truncate((outcome.prompt_tokens / IDENTITY_TOKENS) as usize);
        let request = RequestFacts {
            prompt_tokens: u64::from(outcome.prompt_tokens),
            block_size: BLOCK_SIZE,
            whole_blocks: outcome.prompt_tokens / BLOCK_SIZE,
            ..RequestFacts::default()
        };
        let workers = self.facts(at).into_iter().collect();
        let mut record = DecisionRecord {
            at_ns: outcome.arrived_ns,
            booked: true,
            policy: self.policy,
            observation: Observation { request, workers, ..Observation::default() },
            identity: RequestIdentity {
                booking: Some(at as u64),
                session: self.names_sessions.then_some(*session as u64),
                prefix_tokens: IDENTITY_TOKENS,
                prefix: blocks.iter().map(|block| block.chain).collect(),
                ..RequestIdentity::default()
            },
            ..DecisionRecord::default()
        };
        record.outcome.listed =
            vec![ListedCandidate { index: WorkerIndex(outcome.worker), ..ListedCandidate::default() }];
        record
    }

    fn end(&self, at: usize) -> EndedBooking {
        let (_, _, outcome) = &self.ran[at];
        let on_worker = || self.ran.iter().enumerate().filter(|(_, (.., of))| of.worker == outcome.worker);
        let prefills_at =
            |now_ns: u64| on_worker().filter(move |(of, (.., other))| *of < at && other.first_ns > now_ns).count();
        let law = self.settings.engines[outcome.worker as usize].law;
        let work_s = |of: &Outcome| {
            law.prefill.prefill_s(f64::from(of.prompt_tokens - of.believed_tokens), f64::from(of.believed_tokens))
        };
        let between = |of: &Outcome| of.first_ns > outcome.first_ns && of.first_ns <= outcome.end_ns;
        let prefilled_s: f64 = on_worker().filter(|(_, (.., of))| between(of)).map(|(_, (.., of))| work_s(of)).sum();
        let at_end = |of: &Outcome| of.arrived_ns <= outcome.end_ns && of.end_ns >= outcome.end_ns;
        let prompts = on_worker().filter(|(_, (.., of))| at_end(of)).map(|(_, (.., of))| u64::from(of.prompt_tokens));
        EndedBooking {
            booking: at as u64,
            reason: EndReason::Freed,
            worker: WorkerIndex(outcome.worker),
            prefill_tokens: u64::from(outcome.prompt_tokens - outcome.believed_tokens),
            cached_tokens: u64::from(outcome.believed_tokens),
            first_token_ns: Some(outcome.first_ns - outcome.arrived_ns),
            end_ns: outcome.end_ns - outcome.arrived_ns,
            output_tokens: outcome.output_tokens,
            began_alone: prefills_at(outcome.arrived_ns) == 0,
            requests: prompts.clone().count() as u64,
            decode_blocks: prompts.sum::<u64>() / u64::from(BLOCK_SIZE),
            prefilled_us: (prefilled_s * 1e6) as u32,
            class: 0,
        }
    }

    /// The file, of the requests for which `is_sampled` holds.
    fn file(&self, sample: f64, is_sampled: impl Fn(&Ran<'_>) -> bool) -> Vec<u8> {
        let origin = Origin { instance_id: 3, sample, classes: vec!["class".into()], ..Origin::default() };
        let mut file = Vec::new();
        let mut encoder = Encoder::begin(&origin, &mut file);
        for at in (0..self.ran.len()).filter(|at| is_sampled(&self.ran[*at])) {
            encoder.decision(0, &self.decision(at), &mut file);
            encoder.ended(&self.end(at), &mut file);
        }
        encoder.end(&mut file);
        file
    }
}

fn read(file: &[u8], bounds: &LoadBounds) -> Result<RecordedLoad, String> {
    let mut record = DecisionRecord::default();
    let (mut survey, mut reader) = (LoadSurvey::default(), Reader::open(file).expect("a journal"));
    let origin = reader.origin().clone();
    loop {
        match reader.next(&mut record) {
            JournalEntry::Decision { .. } => survey.add(bounds, &origin, &record),
            JournalEntry::End(_) => break,
            _ => {}
        }
    }
    let mut load = LoadReader::new(survey.choose(None)?, bounds);
    let mut reader = Reader::open(file).expect("a journal");
    loop {
        match reader.next(&mut record) {
            JournalEntry::End(_) => return Ok(load.finish()),
            entry => load.take(&origin, entry, &record),
        }
    }
}

fn loaded_from(file: &[u8]) -> RecordedLoad {
    read(file, &LoadBounds::of(100_000)).expect("a load")
}

fn chat(requests: usize) -> Workload {
    let think_s = Lognormal::new(8.0, 6.0, 1.0, 60.0);
    Chat { requests, sessions_per_s: 1.6, think_s, ..Chat::default() }.generate(9)
}

/// The error of a fitted law on prompts and steps of many sizes: the mean of each.
fn errors(fitted: &EngineLaw, truth: &EngineLaw) -> (f64, f64) {
    let sizes = [(200.0, 0.0), (2000.0, 0.0), (500.0, 4000.0), (4000.0, 8000.0)];
    let of_prefill = |(uncached, cached): (f64, f64)| {
        fitted.prefill.prefill_s(uncached, cached) / truth.prefill.prefill_s(uncached, cached) - 1.0
    };
    let steps = [(1.0, 2000.0), (8.0, 16_000.0), (24.0, 60_000.0)];
    let of_step = |(batch, tokens): (f64, f64)| {
        fitted.step_s(0.0, 0.0, batch, tokens) / truth.step_s(0.0, 0.0, batch, tokens) - 1.0
    };
    let mean = |errors: Vec<f64>| errors.iter().map(|error| error.abs()).sum::<f64>() / errors.len() as f64;
    (mean(sizes.map(of_prefill).to_vec()), mean(steps.map(of_step).to_vec()))
}

#[test]
fn the_fleet_behind_a_journal_is_fitted_and_its_load_feels_the_same() {
    let original = chat(900);
    let settings = crate::simulate::tests::fleet(3);
    let policy = Policy { mode: Mode::Kv, ..Policy::default() };
    let ran = ran(&original, &settings, &policy);
    let recording = Recording { ran, settings: &settings, policy, knows_capacity: true, names_sessions: true };
    let load = loaded_from(&recording.file(1.0, |_| true));
    assert_eq!((load.len(), *load.policy(), load.block_size()), (900, Policy { version: 0, ..policy }, BLOCK_SIZE));

    let fleet = FittedFleet::of(&load, IDENTITY_TOKENS);
    let class = &fleet.classes[0];
    assert_eq!((fleet.classes.len(), class.spec.class.as_str(), class.kv), (1, "class", KvSource::Known));
    assert_eq!(class.spec.kv_tokens, settings.engines[0].kv_tokens / 16 * 16);
    let (of_prefills, of_steps) = errors(&class.spec.law, &settings.engines[0].law);
    assert!(of_prefills < 0.25 && of_steps < 0.25, "{of_prefills} {of_steps}\n{}", fleet.table());
    assert!(matches!(class.prefill, LawSource::Fitted { error, .. } if error < 0.3), "{}", fleet.table());
    assert!(fleet.settings().changes.is_empty(), "all workers are equally fast: {}", fleet.table());

    let workload = load.workload();
    assert_eq!((workload.requests(), workload.arrivals), (900, Arrivals::Timed));
    assert!(workload.sessions.iter().any(|session| session.turns.len() > 2 && session.turns[1].think_s > 0.0));
    let stretch = Stretch::of(&workload, 0.1, 1.0);
    let outcomes = stretch.outcomes(&fleet.settings(), load.policy(), 1.0, 1);
    let agreement = Agreement { recorded: load.felt(stretch.measured_from_s()), simulated: Felt::of(&outcomes) };
    assert_eq!(agreement.agrees(), Some(true), "{}", agreement.text());

    // What the fitted fleet says of another policy is what that policy does on the true one.
    let other = Policy { mode: Mode::Latency, ..policy };
    let truth = Felt::of(&Stretch::of(&original, 0.1, 1.0).outcomes(&settings, &other, 1.0, 1));
    let predicted = Felt::of(&stretch.outcomes(&fleet.settings(), &other, 1.0, 1));
    let prediction = Agreement { recorded: truth, simulated: predicted };
    assert_eq!(prediction.agrees(), Some(true), "{}", prediction.text());
    let change =
        |of: fn(&Felt) -> f64| (of(&truth) / of(&agreement.recorded), of(&predicted) / of(&agreement.simulated));
    let (truth, predicted) = change(|felt| felt.ttft_s.mean);
    assert!((truth / predicted - 1.0).abs() < 0.15, "times {truth} of the mean TTFT, and {predicted} in simulation");
}

#[test]
fn a_workload_from_a_journal_has_the_turns_of_the_recorded_one() {
    let workload = chat(200);
    let settings = crate::simulate::tests::fleet(2);
    let ran = ran(&workload, &settings, &Policy::default());
    let recording =
        Recording { ran, settings: &settings, policy: Policy::default(), knows_capacity: true, names_sessions: true };
    let read = loaded_from(&recording.file(1.0, |_| true)).workload();
    assert_eq!(read.sessions.len(), workload.sessions.len());
    let tokens = |turn: &Turn| (turn.prompt_tokens(), turn.output.tokens);
    for (read, truth) in read.sessions.iter().zip(&workload.sessions) {
        assert!((read.start_s - truth.start_s).abs() < 1e-6);
        let both = read.turns.iter().zip(&truth.turns);
        assert!(both.clone().all(|(read, truth)| tokens(read) == tokens(truth)));
        assert!(both.clone().all(|(read, truth)| (read.think_s - truth.think_s).abs() < 1e-6));
    }
    // The same fleet finds about as much cached: what is lost is the rounding to identities.
    let hits = |workload: &Workload| {
        let outcomes = simulate_under(workload, &settings, &Policy::default()).expect("a fleet");
        outcomes.iter().map(|outcome| f64::from(outcome.cached_tokens)).sum::<f64>()
    };
    let (read, truth) = (hits(&read), hits(&workload));
    assert!((0.9..1.02).contains(&(read / truth)), "{read} of {truth}");
}

#[test]
fn conversations_that_no_request_names_run_in_closed_loop_too() {
    let workload = chat(200);
    let settings = crate::simulate::tests::fleet(2);
    let ran = ran(&workload, &settings, &Policy::default());
    let policy = Policy::default();
    let recording = Recording { ran, settings: &settings, policy, knows_capacity: true, names_sessions: false };
    let read = loaded_from(&recording.file(1.0, |_| true)).workload();
    let waits = |workload: &Workload| {
        let turns = workload.sessions.iter().flat_map(|session| session.turns.iter().skip(1));
        let mut waits: Vec<u64> = turns.map(|turn| (turn.think_s * 1e6).round() as u64).collect();
        waits.sort_unstable();
        waits
    };
    let (read, truth) = (waits(&read), waits(&workload));
    assert!(read.len() * 10 >= truth.len() * 9, "{} of {} turns wait for the one before", read.len(), truth.len());
    let known = |wait: &u64| truth.iter().any(|of| of.abs_diff(*wait) <= 1);
    assert!(read.iter().all(known), "a turn waits for another than its own");
}

#[test]
fn a_sample_of_sessions_is_scaled_back_to_the_recorded_rate() {
    let workload = chat(600);
    let settings = crate::simulate::tests::fleet(2);
    let ran = ran(&workload, &settings, &Policy::default());
    let recording =
        Recording { ran, settings: &settings, policy: Policy::default(), knows_capacity: true, names_sessions: true };
    let all = loaded_from(&recording.file(1.0, |_| true));
    let half = loaded_from(&recording.file(0.5, |(session, ..)| session % 2 == 0));
    assert!(half.len() < all.len() * 6 / 10 && (half.sample() - 0.5).abs() < 1e-9);
    assert!((half.felt(0.0).arrivals_rps / all.felt(0.0).arrivals_rps - 1.0).abs() < 0.25);
    let (all, half_load) = (all.workload(), half.workload());
    assert!((half_load.requests() as f64 / all.requests() as f64 - 1.0).abs() < 0.2);
    let end_s = |workload: &Workload| workload.sessions.last().map_or(0.0, |session: &Session| session.start_s);
    assert!((end_s(&half_load) / end_s(&all) - 1.0).abs() < 0.1);
    // As much is found in caches: copies share system prompts, and nothing of a user.
    let hits = |workload: &Workload| {
        let outcomes = simulate_under(workload, &settings, &Policy::default()).expect("a fleet");
        let sum = |of: fn(&Outcome) -> u32| outcomes.iter().map(|outcome| f64::from(of(outcome))).sum::<f64>();
        sum(|outcome| outcome.cached_tokens) / sum(|outcome| outcome.prompt_tokens)
    };
    assert!((hits(&half_load) - hits(&all)).abs() < 0.05, "{} {}", hits(&half_load), hits(&all));
    assert!(half.remarks()[0].contains("a sample of 0.5"), "{:?}", half.remarks());
}

#[test]
fn a_slow_worker_and_the_size_of_caches_are_found() {
    let workload = chat(900);
    let mut settings = crate::simulate::tests::fleet(2);
    settings.engines.iter_mut().for_each(|engine| engine.kv_tokens = 24_000);
    settings.changes = vec![FleetChange { at_s: 0.0, worker: 1, kind: FleetChangeKind::Slows(1.8) }];
    let policy = Policy { mode: Mode::Lmetric, ..Policy::default() };
    let ran = ran(&workload, &settings, &policy);
    let recording = Recording { ran, settings: &settings, policy, knows_capacity: false, names_sessions: true };
    let fleet = FittedFleet::of(&loaded_from(&recording.file(1.0, |_| true)), IDENTITY_TOKENS);
    let changes = fleet.settings().changes;
    let slowness = |worker: usize| {
        changes.iter().find(|change| change.worker == worker).map_or(1.0, |change| match change.kind {
            FleetChangeKind::Slows(factor) => factor,
            _ => f64::NAN,
        })
    };
    assert!((1.4..2.2).contains(&(slowness(1) / slowness(0))), "{changes:?}");
    let class = &fleet.classes[0];
    assert!(matches!(class.kv, KvSource::Evictions { .. }), "{}", fleet.table());
    assert!((10_000..50_000).contains(&class.spec.kv_tokens), "{}", fleet.table());
}

#[test]
fn what_a_journal_lacks_is_said() {
    let workload = chat(120);
    let settings = crate::simulate::tests::fleet(2);
    let ran = ran(&workload, &settings, &Policy::default());
    let recording =
        Recording { ran, settings: &settings, policy: Policy::default(), knows_capacity: false, names_sessions: true };
    let mut file = Vec::new();
    let mut encoder = Encoder::begin(&Origin { sample: 1.0, ..Origin::default() }, &mut file);
    for at in 0..recording.ran.len() {
        let record = DecisionRecord { identity: RequestIdentity::default(), ..recording.decision(at) };
        encoder.decision(0, &record, &mut file);
    }
    let load = loaded_from(&file);
    let remarks = load.remarks().join("\n");
    assert!(remarks.contains("no identity of their prefix") && remarks.contains("no request has an end"), "{remarks}");
    let workload = load.workload();
    assert_eq!((workload.requests(), workload.sessions.len()), (120, 120));
    let fleet = FittedFleet::of(&load, IDENTITY_TOKENS);
    assert!(matches!(fleet.classes[0].prefill, LawSource::Guessed { .. }) && fleet.table().contains("guessed"));
    assert_eq!(fleet.classes[0].kv, KvSource::Guessed);
    let outcomes = simulate_under(&workload, &fleet.settings(), load.policy()).expect("a fleet");
    let agreement = Agreement { recorded: load.felt(0.0), simulated: Felt::of(&outcomes) };
    assert!(!agreement.recorded.ttft_s.p50.is_finite());
    assert!(agreement.text().contains("TTFT p50 were not recorded"), "{}", agreement.text());

    let unbooked = DecisionRecord { booked: false, ..recording.decision(0) };
    let mut file = Vec::new();
    Encoder::begin(&Origin::default(), &mut file).decision(0, &unbooked, &mut file);
    assert!(read(&file, &LoadBounds::of(10)).is_err_and(|why| why.contains("gateways must book")));
}

#[test]
fn absurd_values_are_bounded() {
    let workload = chat(80);
    let settings = crate::simulate::tests::fleet(2);
    let ran = ran(&workload, &settings, &Policy::default());
    let recording =
        Recording { ran, settings: &settings, policy: Policy::default(), knows_capacity: false, names_sessions: true };
    let mut file = Vec::new();
    let origin = Origin { sample: -3.0, started_unix_ms: u64::MAX, ..Origin::default() };
    let mut encoder = Encoder::begin(&origin, &mut file);
    for at in 0..recording.ran.len() {
        let mut record = recording.decision(at);
        match at % 6 {
            0 => record.at_ns = u64::MAX,
            1 => record.at_ns = 5_000_000_000 - at as u64,
            2 => record.identity.waited_ns = u64::MAX,
            3 => record.identity.prefix_tokens = 1,
            4 => record.observation.request.prompt_tokens = 0,
            _ => record.identity.expected_output_tokens = u32::MAX,
        }
        encoder.decision(0, &record, &mut file);
        let end = recording.end(at);
        encoder.ended(&EndedBooking { first_token_ns: Some(u64::MAX - 1), end_ns: u64::MAX, ..end }, &mut file);
        encoder.ended(&EndedBooking { booking: u64::MAX - at as u64, output_tokens: u32::MAX, ..end }, &mut file);
    }
    let load = loaded_from(&file);
    assert!(load.len() > 60 && load.len() < 80, "broken clocks are left out: {}", load.len());
    assert!(load.requests.is_sorted_by_key(|request| request.arrived_ns));
    let fleet = FittedFleet::of(&load, IDENTITY_TOKENS);
    let constants = fleet.json().to_string();
    assert!(!constants.contains("null"), "{constants}");
    let outcomes = simulate_under(&load.workload(), &fleet.settings(), load.policy()).expect("a fleet");
    assert_eq!(outcomes.len(), load.len());
    assert!(
        !load.remarks().is_empty()
            && !Agreement { recorded: load.felt(0.1), simulated: Felt::of(&outcomes) }.text().is_empty()
    );
}

#[test]
fn blocks_of_absurd_sizes_are_bounded() {
    let workload = chat(40);
    let settings = crate::simulate::tests::fleet(2);
    let ran = ran(&workload, &settings, &Policy::default());
    let recording =
        Recording { ran, settings: &settings, policy: Policy::default(), knows_capacity: true, names_sessions: true };
    for (block_size, prefix_tokens) in [(u32::MAX, u32::MAX), (u32::MAX - 1, 1), (3 << 30, 1 << 31), (1, 1)] {
        let mut file = Vec::new();
        let mut encoder = Encoder::begin(&Origin { sample: 1.0, ..Origin::default() }, &mut file);
        for at in 0..recording.ran.len() {
            let mut record = recording.decision(at);
            record.observation.request.block_size = block_size;
            record.identity.prefix_tokens = prefix_tokens;
            encoder.decision(0, &record, &mut file);
            encoder.ended(&recording.end(at), &mut file);
        }
        let load = loaded_from(&file);
        let simulated = load.simulated_block_size(64);
        assert!((1..=SIMULATED_BLOCK_TOKENS_MAX).contains(&simulated), "{simulated}");
        let fleet = FittedFleet::of(&load, simulated);
        let outcomes = simulate_under(&load.workload(), &fleet.settings(), load.policy()).expect("a fleet");
        // A request that no engine has room for ends its session.
        assert!((1..=load.len()).contains(&outcomes.len()), "{} of {}", outcomes.len(), load.len());
    }
}

#[test]
fn a_large_journal_gives_its_newest_requests() {
    let workload = chat(300);
    let settings = crate::simulate::tests::fleet(2);
    let ran = ran(&workload, &settings, &Policy::default());
    let last_ns = ran[260].2.arrived_ns;
    let recording =
        Recording { ran, settings: &settings, policy: Policy::default(), knows_capacity: true, names_sessions: true };
    let file = recording.file(1.0, |_| true);
    let load = read(&file, &LoadBounds::of(40)).expect("a load");
    assert_eq!((load.len(), load.losses.skipped, load.requests[0].booked_ns), (40, 260, last_ns));
    let bounded = LoadBounds { tokens_max: 60_000, prefixes_max: 50, ..LoadBounds::of(300) };
    let load = read(&file, &bounded).expect("a load");
    let tokens: u64 = load.requests.iter().map(|request| u64::from(request.prompt_tokens)).sum();
    assert!(tokens <= 60_000 && load.prefixes.len() <= 50 && load.len() > 3, "{tokens}");
}
