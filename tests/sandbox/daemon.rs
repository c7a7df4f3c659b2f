//! A daemon in its sandbox does everything that a daemon does.

use std::fs;
use std::path::Path;
use std::sync::Arc;

use kvrouted::client::{Answer, LaneUse, SteadyClient, SteadyOptions};
use kvrouted::event::flat::Encoder;
use kvrouted::event::{BatchInfo, KvEvent};
use kvrouted::ids::{Scheme, Worker};
use kvrouted::load::BookingRef;
use kvrouted::route::{BookingRequest, Prompt, RouteRequest};
use kvrouted::trust::TrustLevel;
use seccompiler::{BpfProgram, SeccompAction, SeccompFilter, TargetArch};
use tempfile::TempDir;

use crate::kit::collector::{Collector, Manner};
use crate::kit::engine::{BLOCK_SIZE, Publisher, SCHEME, engine_hashes, stored};
use crate::kit::http::{scrape, server};
use crate::kit::ports::free_port;
use crate::kit::replayer::Replayer;
use crate::kit::{self, Daemon, Process, WAIT_MAX, prompt, replace, run, text, until, until_ok};
use crate::{kernel_has_all, sandbox_of};

/// An engine whose daemon gets some batches by replay alone.
struct Engine {
    publisher: Publisher,
    replayer: Replayer,
}

impl Engine {
    fn new() -> Self {
        Self { publisher: Publisher::new(), replayer: Replayer::start("tcp://127.0.0.1:*", true) }
    }

    /// Stores the blocks of a prompt. A batch that is not sent is lost on its way.
    fn store(&mut self, tokens: &[u32], is_sent: bool) {
        let info = BatchInfo { scheme: Some(Scheme { block_size: BLOCK_SIZE, ..SCHEME }), ..BatchInfo::default() };
        let hashes = engine_hashes(tokens);
        let event: KvEvent<'_> = stored(&hashes, &tokens[..hashes.len() * BLOCK_SIZE as usize], BLOCK_SIZE);
        let payload = Encoder::new().encode(&info, [event]).to_vec();
        self.replayer.keep(self.publisher.seq, payload.clone());
        if is_sent {
            self.publisher.send_payload(&payload);
        } else {
            self.publisher.seq += 1;
        }
    }

    /// Its endpoints with the host's name, which the daemon has to look up.
    fn fields(&self) -> String {
        let named = |endpoint: String| endpoint.replace("127.0.0.1", "localhost");
        let (endpoint, replay) = (named(self.publisher.endpoint()), named(self.replayer.endpoint.clone()));
        format!("endpoint = \"{endpoint}\"\nreplay = \"{replay}\"\n")
    }
}

/// A daemon with all that can be on.
struct Site {
    folder: Arc<TempDir>,
    http: u16,
    metrics: u16,
    collector: Collector,
}

impl Site {
    fn new() -> Self {
        let folder = kit::folder();
        fs::create_dir(folder.path().join("workers")).expect("made");
        fs::write(folder.path().join("secret"), [b'x'; 32]).expect("written");
        Self { folder, http: free_port(), metrics: free_port(), collector: Collector::start(Manner::Takes) }
    }

    fn path(&self, name: &str) -> String {
        text(&self.folder.path().join(name)).to_owned()
    }

    fn configure(&self, engine: &Engine, more: &str) {
        let tables = format!(
            "[sandbox]\nmode = \"required\"\n[http]\nport = {}\nadminister = true\n[metrics]\nport = {}\n[snapshot]\ndir = {:?}\n\
             every_s = 1\n[journal]\ndir = {:?}\nfile_bytes_max = 4096\nfiles_max = 2\n[shadow]\nshare = 1.0\n\
             policy = [\"device_credit=0.5\"]\n[routers]\nlisten = \"ipc://{}\"\npeers = [\"ipc://{}\", \"tcp://localhost:1\"]\n\
             secret_file = {:?}\n[discovery]\npath = {:?}\nrescan_ms = 100\n[traces]\nendpoint = {:?}\nsample_ratio = 1.0\n\
             [[space]]\nmodel = \"guessed\"\napproximate = true\nblock_size = 16\n[[worker]]\nid = 90\nmodel = \"guessed\"\n\
             [[worker]]\nid = 1\nmodel = \"m\"\n{}{more}",
            self.http,
            self.metrics,
            self.path("snapshots"),
            self.path("journal"),
            self.path("routers"),
            self.path("routers"),
            self.path("secret"),
            self.path("workers"),
            // A name, which has to be looked up.
            self.collector.url().replace("127.0.0.1", "localhost"),
            engine.fields(),
        );
        kit::configure_serve(self.folder.path(), "allow_uids = [\"root\", \"0\", \"65534\"]", &tables);
    }

    fn start(&self, more: &[&str]) -> Daemon {
        let config = self.path("kvrouted.toml");
        Daemon::serve(Arc::clone(&self.folder), &[&["--config", config.as_str()], more].concat())
    }
}

fn is_root() -> bool {
    rustix::process::getuid().is_root()
}

#[track_caller]
fn await_device(daemon: &Daemon, tokens: &[u32], worker: u64, blocks: u32) {
    let worker = Worker::new(worker, 0);
    until_ok(&format!("worker {worker} holds {blocks} blocks"), || match daemon.device(tokens, worker) {
        Some(device) if device == blocks => Ok(()),
        other => Err(format!("{other:?}; {}", daemon.process.log().lines().last().unwrap_or_default())),
    });
}

/// Decisions over the socket and over a shm lane, each booked and freed.
fn decide(daemon: &Daemon, decisions: u32) {
    let mut client = daemon.client();
    let space = client.space("m", None).expect("the space").id;
    let options =
        SteadyOptions { name: "lane".into(), timeout: WAIT_MAX, lane: LaneUse::Require, ..Default::default() };
    let by_lane = SteadyClient::new(daemon.socket(), options).expect("a lane");
    for at in 0..decisions {
        let (tokens, name) = (prompt(at, 64), format!("r{at}"));
        let book = Some(BookingRequest { request_id: &name, attempt: 0 });
        let request = RouteRequest { book, ..RouteRequest::new(space, Prompt::of_tokens(&tokens)) };
        let booking = client.route(&request).expect("a decision").booking.expect("booked");
        client.free(&BookingRef::Handle(booking)).expect("freed");
        let question = RouteRequest::new(space, Prompt::of_tokens(&tokens));
        assert!(matches!(by_lane.route(&question).expect("an answer"), Answer::Daemon { .. }));
    }
    let guessed = client.space("guessed", None).expect("the space").id;
    let tokens = prompt(7, 64);
    let book = Some(BookingRequest { request_id: "guess", attempt: 0 });
    client.route(&RouteRequest { book, ..RouteRequest::new(guessed, Prompt::of_tokens(&tokens)) }).expect("a decision");
}

/// New workers from every source: a request, a file, an engine's URL, and the configuration read again.
fn change_workers(site: &Site, daemon: &Daemon, engine: &Engine) {
    let added = Publisher::bind(&format!("ipc://{}", site.path("engine.sock"))).expect("a socket");
    daemon.worker_ok(&["add", &format!("id=2,model=m,endpoint=ipc://{}", site.path("engine.sock"))]);
    let mut added = added.subscribed();
    added.store(&prompt(2, 32));
    await_device(daemon, &prompt(2, 32), 2, 2);

    let mut in_file = Publisher::new();
    let file = site.folder.path().join("workers/one.toml");
    replace(&file, &format!("[[worker]]\nid = 3\nmodel = \"m\"\nendpoint = \"{}\"\n", in_file.endpoint()));
    in_file.await_subscription();
    in_file.store(&prompt(3, 32));
    await_device(daemon, &prompt(3, 32), 3, 2);

    let mut asked = Publisher::new();
    let port: u16 = asked.endpoint().rsplit(':').next().and_then(|port| port.parse().ok()).expect("a port");
    let info = format!(
        r#"{{"model_path": "m", "kv_events": {{"publisher": "zmq", "endpoint_host": "*", "endpoint_port_base": {port},
        "topic": "", "block_size": 16, "dp_size": 1}}}}"#
    );
    let url = server(info);
    daemon.worker_ok(&["add", &format!("id=4,model=m,url=http://localhost:{url}")]);
    asked.await_subscription();
    asked.store(&prompt(4, 32));
    await_device(daemon, &prompt(4, 32), 4, 2);

    let mut reloaded = Publisher::new();
    let more = format!("[[worker]]\nid = 5\nmodel = \"m\"\nendpoint = \"{}\"\n", reloaded.endpoint());
    site.configure(engine, &more);
    daemon.process.signal("-HUP");
    reloaded.await_subscription();
    reloaded.store(&prompt(5, 32));
    await_device(daemon, &prompt(5, 32), 5, 2);
}

/// Nothing was refused, and every thread is confined.
#[track_caller]
fn nothing_was_refused(daemon: &Daemon) {
    let sandbox = sandbox_of(daemon);
    assert_eq!((&sandbox["mode"], &sandbox["filters"]), (&"required".into(), &1.into()), "{sandbox}");
    assert!(sandbox["landlock"].as_u64() >= Some(1), "{sandbox}");
    let refused: Vec<_> =
        daemon.process.log().lines().filter(|line| line.contains("refused a system call")).map(str::to_owned).collect();
    assert_eq!((&sandbox["refused"], &sandbox["threads_unconfined"]), (&0.into(), &0.into()), "{refused:#?}");
    let findings = daemon.status().findings;
    assert!(findings.iter().all(|finding| !finding.name.starts_with("sandbox")), "{findings:?}");
}

#[test]
fn a_daemon_does_all_its_work_inside() {
    if !kernel_has_all("a daemon in its sandbox") {
        return;
    }
    if !is_root() {
        kit::skipped("a daemon in its sandbox", "its list of users names root");
        return;
    }
    let (site, mut engine) = (Site::new(), Engine::new());
    site.configure(&engine, "");
    let mut daemon = site.start(&[]);
    engine.publisher.await_subscription();
    for (seed, is_sent) in [(10, true), (11, false), (12, true)] {
        engine.store(&prompt(seed, 64), is_sent);
    }
    // The second batch comes by a replay.
    for seed in [10, 11, 12] {
        await_device(&daemon, &prompt(seed, 64), 1, 4);
    }
    decide(&daemon, 400);
    change_workers(&site, &daemon, &engine);
    let (_, page) = scrape(site.metrics);
    assert!(page.contains("kvrouted_sandbox{part=\"filters\"} 1"), "{page}");
    assert!(scrape(site.http).1.contains("kvrouted_routes_total"));
    until("files of the journal have been closed and removed", || daemon.counter("journal_files_removed") > 0);
    until("the collector has spans", || daemon.counter("trace_spans_sent") > 0);
    until("there is a snapshot", || daemon.counter("snapshots_written") > 0);
    assert!(run(&["doctor", "--socket", text(&daemon.socket())]).status.code().is_some());
    assert!(daemon.counter("router_heartbeats") > 0 && daemon.counter("router_messages_received") > 0);
    nothing_was_refused(&daemon);
    assert_eq!(daemon.process.end("-TERM"), Some(0), "it drains");
    assert!(!Path::new(&site.path("routers")).exists(), "its sockets are gone");
    drop(daemon);

    // The next one has the blocks from the snapshot, and believes them once the stream has gone on.
    let daemon = site.start(&["--io", "epoll"]);
    engine.publisher.await_subscription();
    engine.store(&prompt(13, 64), true);
    await_device(&daemon, &prompt(11, 64), 1, 4);
    until("it is exact", || daemon.status().workers.iter().any(|worker| worker.trust.level == TrustLevel::Exact));
    assert!(daemon.counter("snapshots_loaded") >= 1);
    nothing_was_refused(&daemon);
}

#[test]
fn serving_threads_on_io_uring_work_inside() {
    if !kernel_has_all("io_uring in a sandbox") {
        return;
    }
    if let Err(error) = kvrouted::serve::probe_uring() {
        kit::skipped("io_uring in a sandbox", &error.to_string());
        return;
    }
    let site = Site::new();
    site.configure(&Engine::new(), "");
    let daemon = site.start(&["--io", "uring"]);
    decide(&daemon, 20);
    nothing_was_refused(&daemon);
}

#[test]
fn a_file_that_is_replaced_where_only_the_file_is_granted_is_a_finding() {
    if !kernel_has_all("replaced files") {
        return;
    }
    // `/tmp` holds the files of many programs, so the daemon gets only the file that it names.
    let folder = kit::folder();
    let config = Path::new("/tmp").join(format!("kvrouted-test-{}.toml", std::process::id()));
    let socket = folder.path().join("s");
    let configuration = format!("[serve]\nsocket = {socket:?}\n[[space]]\nmodel = \"m\"\n[sandbox]\nmode = \"on\"\n");
    replace(&config, &configuration);
    let daemon = Daemon::serve(folder, &["--config", text(&config)]);
    replace(&config, &configuration);
    until("there is a finding", || {
        daemon.status().findings.iter().any(|finding| finding.name == "sandbox_file_replaced")
    });
    drop(fs::remove_file(config));
}

#[test]
fn report_refuses_nothing() {
    let mut daemon = Daemon::start(&["--sandbox", "report", "--worker", "id=1"]);
    let tokens = prompt(1, 64);
    assert_eq!(daemon.device(&tokens, Worker::new(1, 0)), Some(0));
    let sandbox = sandbox_of(&daemon);
    assert_eq!((&sandbox["mode"], &sandbox["filters"], &sandbox["landlock"]), (&"report".into(), &0.into(), &0.into()));
    assert_eq!(daemon.process.end("-TERM"), Some(0));
}

/// Starts the binary on a kernel without Landlock, as a filter of the test makes it look.
fn start_without_landlock(folder: &Path, name: &str, arguments: &[&str]) -> Process {
    let call = syscalls::Sysno::landlock_create_ruleset.id().into();
    let absent = SeccompAction::Errno(rustix::io::Errno::NOSYS.raw_os_error() as u32);
    let arch = TargetArch::try_from(std::env::consts::ARCH).expect("a processor with filters");
    let filter = SeccompFilter::new([(call, Vec::new())].into(), SeccompAction::Allow, absent, arch).expect("a filter");
    let program = BpfProgram::try_from(filter).expect("a program");
    std::thread::scope(|scope| {
        let start = || {
            // Only for this thread and what it starts.
            seccompiler::apply_filter(&program).expect("installed");
            Process::start(folder, name, arguments)
        };
        scope.spawn(start).join().expect("started")
    })
}

#[test]
fn without_a_part_required_does_not_start_and_on_goes_on() {
    if !kernel_has_all("a kernel without Landlock") {
        return;
    }
    let folder = kit::folder();
    let socket = folder.path().join("s");
    let arguments = |mode| ["serve", "--socket", text(&socket), "--model", "m", "--sandbox", mode];
    let mut process = start_without_landlock(folder.path(), "required", &arguments("required"));
    assert_eq!(process.ended(), Some(71), "{}", process.log());
    assert!(process.log().contains("the kernel has no Landlock") && !socket.exists(), "{}", process.log());

    let process = start_without_landlock(folder.path(), "on", &arguments("on"));
    let daemon = Daemon::served_by(process, Arc::clone(&folder));
    let sandbox = sandbox_of(&daemon);
    assert_eq!((&sandbox["landlock"], &sandbox["filters"]), (&0.into(), &1.into()), "{sandbox}");
    until("there is a finding", || daemon.status().findings.iter().any(|finding| finding.name == "sandbox_partial"));
}

/// Requests of one round trip each, and how often the two daemons take turns.
const REQUESTS: usize = 2_000;
const TURNS: usize = 15;

/// Prints what the sandbox adds to a route over the socket. It asserts no time: run it on a quiet machine, in release.
#[test]
#[ignore = "a measurement: cargo test --release --test sandbox -- --ignored --nocapture cost"]
fn the_cost_of_a_route_inside_and_outside() {
    let daemons =
        ["off", "required"].map(|mode| Daemon::start(&["--worker", "id=1", "--cores", "1", "--sandbox", mode]));
    let mut times: [Vec<u64>; 2] = Default::default();
    for _ in 0..TURNS {
        for (daemon, times) in daemons.iter().zip(&mut times) {
            let mut client = daemon.client();
            let space = client.space("m", None).expect("the space").id;
            let tokens = prompt(1, 64);
            for _ in 0..REQUESTS {
                let began = std::time::Instant::now();
                client.route(&RouteRequest::new(space, Prompt::of_tokens(&tokens))).expect("a decision");
                times.push(began.elapsed().as_nanos() as u64);
            }
        }
    }
    for (mode, times) in ["off", "required"].into_iter().zip(&mut times) {
        times.sort_unstable();
        let at = |percent: usize| times[times.len() * percent / 100];
        let line = format!(
            "sandbox {mode}: p50 {} ns, p90 {} ns, p99 {} ns of {} routes\n",
            at(50),
            at(90),
            at(99),
            times.len()
        );
        std::io::Write::write_all(&mut std::io::stdout().lock(), line.as_bytes()).expect("said");
    }
}
