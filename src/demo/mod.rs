//! `kvrouted demo`: the whole system with nothing but this program.
//!
//! ```text
//! demo ─┬─ engine × N   a simulated engine that publishes events as vLLM does   ──ZeroMQ──▶ daemon
//!       ├─ daemon       `kvrouted serve`, started as an operator would
//!       └─ gateway      replays conversations ──Unix socket──▶ daemon, and runs them on the engines
//! ```
//!
//! All are processes of the same binary. The workload runs once under each policy, with caches cleared in between; by
//! default round-robin, then Dynamo's rule (`kv`), then the default one (`latency`). Engines and gateway record what
//! happened. At the end `verify` compares every overlap that the daemon reported with the engines' own caches.

pub(crate) mod args;
pub mod engine;
mod engine_messages;
pub mod gateway;
mod processes;
mod report;
mod run_records;
mod verify;
mod workload;

use std::io::{BufRead, BufReader, IsTerminal, Write};
use std::net::{Ipv4Addr, TcpListener};
use std::path::Path;
use std::process::ChildStdout;
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use rustc_hash::FxHashMap;

use self::args::DemoArgs;
use self::engine::BLOCK_TOKENS;
use self::processes::Processes;
pub use self::processes::run_daemon;
use self::report::{EventTotals, GatewayMessage, Report};
use self::verify::{History, Verdict};
use self::workload::Workload;
use crate::client::{Client, ClientOptions};
use crate::error::{Error, Kind, counted};
use crate::metrics::{CounterName, WorkerCounter};

/// The model's name in the demo's only space.
const MODEL: &str = "demo";
/// Generated requests under each policy.
const REQUESTS_DEFAULT: u32 = 1500;
/// Requests of a trace under each policy: fewer, because its prompts are several times as long.
const TRACE_REQUESTS_DEFAULT: u32 = 600;
/// Time for the daemon to start, and to apply the last batches.
const DAEMON_TIMEOUT: Duration = Duration::from_secs(20);

/// Runs the demo and prints its report.
///
/// # Errors
/// `internal` if an overlap was wrong or a batch was lost; the message says which. Otherwise the error of the process,
/// file or socket that failed.
pub fn run(args: &DemoArgs) -> Result<(), Error> {
    let requests = args.requests.unwrap_or(match args.trace {
        Some(_) => TRACE_REQUESTS_DEFAULT,
        None => REQUESTS_DEFAULT,
    });
    let workload = load_workload(args.seed, requests, args.trace.as_deref())?;
    let processes = Processes::new(args.keep.as_deref())?;
    let outcome = run_in(&processes, args, &workload);
    if outcome.is_err() {
        processes.unless_interrupted();
    }
    let (report, verdict) = outcome?;
    let text = if args.json { report.json() } else { report.table() };
    writeln!(std::io::stdout().lock(), "{text}")
        .map_err(|error| Error::new(Kind::System, "standard output is closed", "keep it open").caused_by(error))?;
    judge(&report, &verdict)
}

/// The workload of these options: the same in every process.
fn load_workload(seed: u64, requests: u32, trace: Option<&Path>) -> Result<Workload, Error> {
    let Some(path) = trace else { return Ok(Workload::generate(seed, requests as usize)) };
    let text = std::fs::read_to_string(path).map_err(|error| {
        Error::new(Kind::Config, format!("the trace {} cannot be read", path.display()), "name a Mooncake jsonl file")
            .caused_by(error)
    })?;
    workload::parse_trace(&text, seed, requests as usize)
}

fn run_in(processes: &Processes, args: &DemoArgs, workload: &Workload) -> Result<(Report, Verdict), Error> {
    let capacity_blocks = workload.capacity_blocks(args.workers as usize);
    let progress = progress_bar(args, args.policies.len() * workload.requests.len());
    let ids: Vec<u64> = (1..=u64::from(args.workers)).collect();
    let endpoints = start_engines(processes, &ids, capacity_blocks)?;
    let metrics_port = start_daemon(processes, &daemon_arguments(args.seed, &ids, &endpoints, capacity_blocks))?;
    let gateway = start_gateway(processes, args, &ids, workload.requests.len(), metrics_port)?;

    let mut report = Report {
        workload: match &args.trace {
            Some(trace) => format!("the trace {}", trace.display()),
            None => "generated multi-turn conversations".to_owned(),
        },
        seed: args.seed,
        requests: workload.requests.len() as u32,
        workers: args.workers,
        phases: args.policies.iter().map(|policy| (*policy, Default::default())).collect(),
        cores: std::thread::available_parallelism().map_or(0, std::num::NonZero::get),
        ..Report::default()
    };
    let published = follow(gateway, &progress, &mut report);
    // The daemon or an engine, rather than the gateway, is the likely cause.
    if published.is_none() {
        std::thread::sleep(Duration::from_millis(100));
        if let Some(error) = processes.ended() {
            return Err(error);
        }
    }
    processes.wait("gateway")?;
    let published = published.ok_or_else(|| internal("the gateway ended without its last message"))?;
    progress.set_message("checking every overlap");
    report.events = collect_events(processes, &published)?;
    let verdict = verify_all(processes, &published)?;
    progress.finish_and_clear();
    (report.checked_overlaps, report.wrong_overlaps) = (verdict.checked, verdict.wrong);
    for ((_, totals), wrong) in report.phases.iter_mut().zip(&verdict.wrong_by_phase) {
        totals.wrong_overlaps = *wrong;
    }
    report.not_exact_overlaps = verdict.not_exact;
    Ok((report, verdict))
}

fn progress_bar(args: &DemoArgs, requests: usize) -> ProgressBar {
    if args.json || !std::io::stderr().is_terminal() {
        return ProgressBar::hidden();
    }
    let bar = ProgressBar::with_draw_target(Some(requests as u64), ProgressDrawTarget::stderr());
    if let Ok(style) = ProgressStyle::with_template("{msg:28} {bar:40} {pos}/{len} requests, {elapsed}") {
        bar.set_style(style);
    }
    bar.set_message("starting");
    bar.tick();
    bar
}

/// Starts the engines and returns their endpoints.
fn start_engines(processes: &Processes, ids: &[u64], capacity_blocks: usize) -> Result<Vec<String>, Error> {
    let starting = |id: &u64| {
        processes.start(&format!("engine-{id}"), |command| {
            command.arg("demo-engine").arg("--link").arg(processes.path(&format!("engine-{id}.sock")));
            command.arg("--log").arg(processes.path(&format!("engine-{id}.jsonl")));
            command.arg("--capacity-blocks").arg(capacity_blocks.to_string());
        })
    };
    // Start all, then wait for each: they start in parallel.
    let outputs: Vec<ChildStdout> = ids.iter().map(starting).collect::<Result<_, _>>()?;
    let mut endpoints = Vec::with_capacity(outputs.len());
    for output in outputs {
        let mut line = String::new();
        let read = BufReader::new(output).read_line(&mut line);
        if !matches!(read, Ok(1..)) {
            std::thread::sleep(Duration::from_millis(100));
            return Err(processes.ended().unwrap_or_else(|| internal("an engine did not report its endpoint")));
        }
        endpoints.push(line.trim().to_owned());
    }
    Ok(endpoints)
}

/// The daemon's arguments except sockets and ports. Random draws repeat with the demo's seed.
fn daemon_arguments(seed: u64, ids: &[u64], endpoints: &[String], capacity_blocks: usize) -> Vec<String> {
    // 0 would make the daemon use a random seed.
    let common = [
        ("--model", MODEL.to_owned()),
        ("--block-size", BLOCK_TOKENS.to_string()),
        ("--seed", seed.max(1).to_string()),
    ];
    let worker = |(id, endpoint): (&u64, &String)| {
        ("--worker", format!("id={id},endpoint={endpoint},capacity_blocks={capacity_blocks}"))
    };
    let workers = ids.iter().zip(endpoints).map(worker);
    common.into_iter().chain(workers).flat_map(|(flag, value)| [flag.to_owned(), value]).collect()
}

/// Starts the daemon and waits until it answers. Returns the port of its metrics, if it has one.
fn start_daemon(processes: &Processes, arguments: &[String]) -> Result<Option<u16>, Error> {
    if let Ok(port) = free_port() {
        let Err(error) = try_daemon(processes, arguments, port) else { return Ok(Some(port)) };
        processes.unless_interrupted();
        // Another process may have taken the port meanwhile. A daemon that cannot bind ends before it subscribes to any
        // engine, so the demo tries again without metrics. If the cause was another, the second try fails as well.
        if !processes.forget_ended("daemon") {
            return Err(error);
        }
    }
    // Port 0: no metrics.
    try_daemon(processes, arguments, 0).map(|()| None)
}

/// A port of the loopback interface that was free a moment ago.
fn free_port() -> std::io::Result<u16> {
    Ok(TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?.local_addr()?.port())
}

/// Starts the daemon as an operator would, with metrics on `metrics_port`, and waits until it answers.
fn try_daemon(processes: &Processes, arguments: &[String], metrics_port: u16) -> Result<(), Error> {
    let socket = processes.path("kvrouted.sock");
    // The daemon prints nothing on standard output.
    drop(processes.start("daemon", |command| {
        command.args(["demo-daemon", "--parent", &std::process::id().to_string(), "--", "serve"]);
        command.arg("--socket").arg(&socket).args(["--metrics-port", &metrics_port.to_string()]).args(arguments);
    })?);
    let deadline = Instant::now() + DAEMON_TIMEOUT;
    loop {
        let Err(error) = Client::connect(&socket, &client_options()) else { return Ok(()) };
        if let Some(ended) = processes.ended() {
            return Err(ended);
        }
        if Instant::now() > deadline {
            return Err(internal("the daemon does not answer").caused_by(error));
        }
        std::thread::sleep(Duration::from_millis(10));
    }
}

fn start_gateway(
    processes: &Processes,
    args: &DemoArgs,
    ids: &[u64],
    requests: usize,
    metrics_port: Option<u16>,
) -> Result<ChildStdout, Error> {
    processes.start("gateway", |command| {
        command.arg("demo-gateway").arg("--socket").arg(processes.path("kvrouted.sock"));
        command.arg("--log").arg(processes.path("replies.jsonl"));
        command.args(["--seed", &args.seed.to_string(), "--requests", &requests.to_string()]);
        let names: Vec<_> = args.policies.iter().map(|policy| policy.name()).collect();
        command.args(["--policies", &names.join(",")]);
        for id in ids {
            let link = processes.path(&format!("engine-{id}.sock"));
            let mut engine = std::ffi::OsString::from(format!("{id}="));
            engine.push(link);
            command.arg("--engine").arg(engine);
        }
        if let Some(port) = metrics_port {
            command.args(["--metrics-port", &port.to_string()]);
        }
        if let Some(trace) = &args.trace {
            command.arg("--trace").arg(trace);
        }
    })
}

/// Reads the gateway's messages to the end. Returns the batches of each engine, if the gateway got that far.
fn follow(gateway: ChildStdout, progress: &ProgressBar, report: &mut Report) -> Option<Vec<(u64, u64)>> {
    let mut published = None;
    for line in BufReader::new(gateway).lines() {
        // Anything else means failure: the caller misses the last message.
        let Ok(message) = serde_json::from_str(&line.ok()?) else { return None };
        match message {
            GatewayMessage::Progress(place, done) => show(progress, report, place, done),
            GatewayMessage::Over(place, totals) => {
                report.phases.get_mut(place)?.1 = totals;
            }
            GatewayMessage::Finished(batches) => published = Some(batches),
        }
    }
    published
}

fn show(progress: &ProgressBar, report: &Report, place: usize, done: usize) {
    let name = report.phases.get(place).map_or("", |(policy, _)| policy.name());
    progress.set_message(format!("{}/{} {name}", place + 1, report.phases.len()));
    progress.set_position((place * report.requests as usize + done) as u64);
}

/// Waits until the daemon has applied everything, and reads its counters.
fn collect_events(processes: &Processes, published: &[(u64, u64)]) -> Result<EventTotals, Error> {
    let mut client = Client::connect_admin(&processes.path("kvrouted.sock"), &client_options())?;
    let deadline = Instant::now() + DAEMON_TIMEOUT;
    loop {
        let workers = client.status()?;
        let applied = |id: u64, batches: u64| {
            let of = workers.iter().find(|status| status.worker.id.0 == id);
            of.and_then(|status| status.trust.as_of_seq).map_or(0, |seq| seq.0 + 1) >= batches
        };
        if published.iter().all(|(id, batches)| applied(*id, *batches)) || Instant::now() > deadline {
            let count = |counter: WorkerCounter| -> u64 {
                let named = workers.iter().flat_map(|status| &status.counters);
                named.filter(|(name, _)| name == counter.name()).map(|(_, value)| value).sum()
            };
            return Ok(EventTotals {
                batches: count(WorkerCounter::Batches),
                blocks: count(WorkerCounter::BlocksStored) + count(WorkerCounter::BlocksRemoved),
                gaps: count(WorkerCounter::Gaps),
            });
        }
        if let Some(error) = processes.ended() {
            return Err(error);
        }
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Reads every log and checks every reply.
fn verify_all(processes: &Processes, published: &[(u64, u64)]) -> Result<Verdict, Error> {
    let mut engines = FxHashMap::default();
    for (id, batches) in published {
        let mut history = History::default();
        run_records::read_all(&processes.path(&format!("engine-{id}.jsonl")), |batch| history.push(&batch))?;
        if history.batches() != *batches || history.out_of_order() > 0 {
            return Err(internal(&format!("the log of engine {id} lacks some of its {batches} batches")));
        }
        engines.insert(*id, history);
    }
    let mut verdict = Verdict::default();
    run_records::read_all(&processes.path("replies.jsonl"), |reply| verify::check(&reply, &engines, &mut verdict))?;
    verdict.published = published.iter().map(|(_, batches)| batches).sum();
    Ok(verdict)
}

/// Fails if the run did not work as it should, and says why.
fn judge(report: &Report, verdict: &Verdict) -> Result<(), Error> {
    let EventTotals { batches, gaps, .. } = report.events;
    let mut faults = Vec::new();
    if verdict.wrong > 0 {
        faults.push(format!("{} of {} overlaps were wrong:", verdict.wrong, verdict.checked));
        faults.extend(verdict.examples.iter().map(|example| format!("  {example}")));
    }
    if gaps > 0 {
        faults.push(format!("{} in the engines' event streams", counted(gaps as usize, "gap")));
    }
    if batches != verdict.published {
        faults.push(format!("the engines published {} batches, the daemon applied {batches}", verdict.published));
    }
    if verdict.checked == 0 {
        faults.push("no overlap was checked".to_owned());
    }
    if faults.is_empty() {
        return Ok(());
    }
    Err(Error::new(Kind::Internal, faults.join("\n"), "run again with --keep DIR and report the files in that folder"))
}

fn client_options() -> ClientOptions {
    ClientOptions { name: "demo".to_owned(), timeout: Some(Duration::from_secs(5)), ..ClientOptions::default() }
}

fn internal(what: &str) -> Error {
    Error::new(Kind::Internal, what, "run again with --keep DIR and read the logs")
}

#[cfg(test)]
mod tests {
    use std::collections::{HashSet, VecDeque};

    use super::engine::{block_names, spec};
    use super::*;
    use crate::simulated_engine::{Block, Engine, EngineRequest, KvEvent, Part, RequestId};

    /// An engine that runs one request after another, and the blocks that its events say it holds.
    struct SerialEngine {
        engine: Engine,
        held: HashSet<u64>,
        evicted: usize,
    }

    impl SerialEngine {
        fn new(capacity_blocks: usize) -> Self {
            Self { engine: Engine::new(spec(capacity_blocks)), held: HashSet::new(), evicted: 0 }
        }

        fn run(&mut self, request: EngineRequest) {
            self.engine.push(request);
            let (mut progress, mut events) = (Vec::new(), Vec::new());
            while self.engine.begin_step(0, &mut progress).is_some() {
                self.engine.end_step(&mut progress);
            }
            self.engine.take_events(&mut events);
            for event in events {
                match event {
                    KvEvent::Stored { blocks, from, to, .. } => {
                        self.held.extend(blocks[from as usize..to as usize].iter().map(|block| block.chain));
                    }
                    KvEvent::Removed { chains, .. } => {
                        self.evicted += chains.iter().filter(|chain| self.held.remove(*chain)).count();
                    }
                    KvEvent::Copied { .. } => panic!("there is no lower tier"),
                }
            }
        }
    }

    /// Hit rate of a workload on caches of the demo's size. `pick` sees the index of the request, what the
    /// prompt would cost each engine to compute, and how many blocks the last five requests keep busy on each.
    fn hit_rate(workload: &Workload, workers: usize, pick: impl Fn(usize, &[usize], &[usize]) -> usize) -> f64 {
        let capacity_blocks = workload.capacity_blocks(workers);
        let mut engines: Vec<_> = (0..workers).map(|_| SerialEngine::new(capacity_blocks)).collect();
        let (mut cached, mut asked) = (0, 0);
        let mut running: VecDeque<(usize, usize)> = VecDeque::new();
        for index in 0..workload.requests.len() {
            let mut tokens = workload.prompt(index);
            let (prompt_tokens, prompt_blocks) = (tokens.len(), tokens.len() / BLOCK_TOKENS);
            tokens.extend(workload.output(index));
            let names = block_names(&tokens[..tokens.len() - 1]);
            let depth = |engine: &SerialEngine| names.iter().take_while(|name| engine.held.contains(name)).count();
            let missing: Vec<usize> =
                engines.iter().map(|engine| prompt_blocks - depth(engine).min(prompt_blocks)).collect();
            let mut busy = vec![0; workers];
            running.iter().for_each(|(place, blocks)| busy[*place] += blocks);
            let chosen = pick(index, &missing, &busy);
            running.push_back((chosen, prompt_blocks));
            if running.len() >= 5 {
                running.pop_front();
            }
            cached += prompt_blocks - missing[chosen];
            asked += prompt_blocks;
            engines[chosen].run(EngineRequest {
                id: RequestId(index as u32),
                blocks: names.iter().map(|name| Block { local: *name, chain: *name }).collect(),
                prompt_tokens: prompt_tokens as u32,
                output_tokens: (tokens.len() - prompt_tokens) as u32,
                part: Part::Whole,
            });
        }
        assert!(engines.iter().any(|engine| engine.evicted > 0), "everything fits: there is nothing to show");
        cached as f64 / asked as f64
    }

    #[test]
    fn the_workload_rewards_routing_by_cached_blocks() {
        let workload = Workload::generate(1, REQUESTS_DEFAULT as usize);
        let in_turn = hit_rate(&workload, 8, |index, _, _| index % 8);
        let by_cost = hit_rate(&workload, 8, |_, missing, busy| {
            (0..8).min_by_key(|place| missing[*place] + busy[*place]).unwrap()
        });
        assert!((0.2..0.5).contains(&in_turn), "{in_turn}");
        assert!((0.55..0.95).contains(&by_cost), "{by_cost}");
    }

    fn fine() -> (Report, Verdict) {
        let events = EventTotals { batches: 5, blocks: 9, gaps: 0 };
        let verdict = Verdict { checked: 10, published: 5, ..Verdict::default() };
        (Report { events, ..Report::default() }, verdict)
    }

    #[test]
    fn a_faulty_run_fails_and_says_why() {
        let (report, verdict) = fine();
        assert!(judge(&report, &verdict).is_ok());

        let wrong = Verdict { wrong: 2, examples: vec!["request 7".to_owned()], ..verdict.clone() };
        let error = judge(&report, &wrong).unwrap_err();
        assert!(error.message().contains("2 of 10 overlaps were wrong:\n  request 7"), "{}", error.message());

        let gaps = Report { events: EventTotals { gaps: 1, ..report.events }, ..report.clone() };
        assert!(judge(&gaps, &verdict).unwrap_err().message().contains("1 gap in"));
        let lost = Report { events: EventTotals { batches: 4, ..report.events }, ..report.clone() };
        assert!(judge(&lost, &verdict).unwrap_err().message().contains("published 5 batches, the daemon applied 4"));
        assert!(judge(&report, &Verdict { published: 5, ..Verdict::default() }).is_err(), "nothing was checked");
    }
}
