//! What a daemon serves beside its socket goes on when another one takes over: its ports, shm lanes, a worker's replay
//! socket, and the journal.

use std::io::{ErrorKind, Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use kvrouted::client::{Answer, Client, ClientOptions, LaneUse, SteadyClient, SteadyOptions};
use kvrouted::ids::Worker;
use kvrouted::load::BookingRef;
use kvrouted::route::{BookingRequest, Prompt, RouteRequest};
use kvrouted::trust::TrustLevel;

use crate::kit::ports::free_port;
use crate::kit::remote::{EAST, Site};
use crate::kit::replayer::Engine;
use crate::kit::{Daemon, Process, WAIT_MAX, options, prompt, run, text, until};

/// Takeovers of one test.
const TAKEOVERS: u32 = 3;
const REPLAYED: Worker = Worker::new(2, 0);

/// The last of the daemons that serve a site.
struct Served {
    site: Site,
    daemon: Daemon,
    takeovers: u32,
}

impl Served {
    /// A daemon with a remote port and these tables.
    fn with(serve: &str, tables: &str) -> Self {
        let site = Site::new();
        site.configure(serve, "", tables);
        let daemon = site.daemon();
        Self { site, daemon, takeovers: 0 }
    }

    fn hand_over(&mut self) {
        self.takeovers += 1;
        let (config, socket) = (self.site.path("kvrouted.toml"), self.site.path("s"));
        let arguments = ["serve", "--config", text(&config), "--take-over", text(&socket)];
        let next = Process::start(self.site.folder.path(), &format!("next-{}", self.takeovers), &arguments);
        assert_eq!(self.daemon.process.ended(), Some(0), "the old daemon ends well");
        self.daemon = Daemon::served_by(next, Arc::clone(&self.site.folder));
    }
}

/// How requests to a port ended.
#[derive(Debug, Default)]
struct Requests {
    answered: AtomicU64,
    /// The connection ended, and nothing of an answer had come.
    ended: AtomicU64,
    /// Anything else: a connection that was refused, or half an answer.
    failed: AtomicU64,
}

impl Requests {
    fn ask_again_and_again(&self, address: SocketAddr, path: &str, stop: &AtomicBool) {
        // Relaxed: these are numbers, and nothing hangs on when the end is seen.
        while !stop.load(Ordering::Relaxed) {
            let counter = match asked(address, path) {
                Ok(true) => &self.answered,
                Ok(false) => &self.ended,
                Err(_) => &self.failed,
            };
            counter.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn of(counter: &AtomicU64) -> u64 {
        counter.load(Ordering::Relaxed)
    }
}

/// Whether a request got a whole answer, and not an end of the connection in its place.
fn asked(address: SocketAddr, path: &str) -> Result<bool, String> {
    let mut stream = TcpStream::connect(address).map_err(|error| format!("refused: {error}"))?;
    let request = format!("GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n");
    let has_ended = |kind| matches!(kind, ErrorKind::ConnectionReset | ErrorKind::BrokenPipe);
    let mut answer = Vec::new();
    let read = stream.write_all(request.as_bytes()).and_then(|()| stream.read_to_end(&mut answer));
    match read {
        Ok(_) if answer.is_empty() => Ok(false),
        Err(error) if answer.is_empty() && has_ended(error.kind()) => Ok(false),
        Ok(_) => match is_whole(&String::from_utf8_lossy(&answer)) {
            true => Ok(true),
            false => Err("half an answer".into()),
        },
        Err(error) => Err(error.to_string()),
    }
}

fn is_whole(answer: &str) -> bool {
    let Some((head, body)) = answer.split_once("\r\n\r\n") else { return false };
    let length = head.lines().find_map(|line| line.to_ascii_lowercase().strip_prefix("content-length: ")?.parse().ok());
    head.starts_with("HTTP/1.1 200") && length == Some(body.len())
}

#[test]
fn no_port_refuses_a_connection_and_requests_are_answered_or_end() {
    let [http, metrics] = [free_port(), free_port()];
    let mut served = Served::with("", &format!("[http]\nport = {http}\n[metrics]\nport = {metrics}\n"));
    let (stop, remote) = (AtomicBool::new(false), served.site.address);
    let (of_http, of_metrics, remote_failed) = (Requests::default(), Requests::default(), AtomicU64::new(0));
    let caller = served.site.caller("east", &[]);
    let [http, metrics] = [http, metrics].map(|port| SocketAddr::from(([127, 0, 0, 1], port)));
    std::thread::scope(|scope| {
        scope.spawn(|| of_http.ask_again_and_again(http, "/loads", &stop));
        scope.spawn(|| of_metrics.ask_again_and_again(metrics, "/metrics", &stop));
        scope.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                remote_failed.fetch_add(u64::from(TcpStream::connect(remote).is_err()), Ordering::Relaxed);
                std::thread::sleep(std::time::Duration::from_millis(5));
            }
        });
        for _ in 0..TAKEOVERS {
            served.hand_over();
            drop(served.site.opened(EAST));
        }
        stop.store(true, Ordering::Relaxed);
    });
    for requests in [&of_http, &of_metrics] {
        assert_eq!(Requests::of(&requests.failed), 0, "{requests:?}");
        assert!(Requests::of(&requests.answered) > 0, "{requests:?}");
        // One request at a time is in flight.
        assert!(Requests::of(&requests.ended) <= u64::from(TAKEOVERS), "{requests:?}");
    }
    assert_eq!(Requests::of(&remote_failed), 0);
    // The same process of the other host is connected to the last daemon.
    until("the caller is connected again", || caller.try_client().is_ok());
}

#[test]
fn a_client_on_a_shm_lane_gets_another_lane_and_is_not_left_alone() {
    let mut served = Served::with("", "");
    let lane = LaneUse::Require;
    let steady = SteadyOptions { name: "lane".into(), timeout: WAIT_MAX, lane, ..SteadyOptions::default() };
    let client = SteadyClient::new(served.daemon.socket(), steady).expect("a lane");
    client.connected().expect("a connection");
    let space = client.space("m", None, None).expect("the space").id;
    for round in 0..TAKEOVERS {
        let (tokens, request_id) = (prompt(round, 64), format!("r{round}"));
        let book = Some(BookingRequest { request_id: &request_id, attempt: 0 });
        let request = RouteRequest { book, ..RouteRequest::new(space, Prompt::of_tokens(&tokens)) };
        let answer = client.route(&request).expect("an answer");
        assert!(matches!(answer, Answer::Daemon { .. }), "{answer:?}");
        served.hand_over();
    }
    let again = RouteRequest::new(space, Prompt::of_tokens(&[1; 64]));
    assert!(matches!(client.route(&again).expect("an answer"), Answer::Daemon { .. }));
    let by_lane = ClientOptions { lane: LaneUse::Require, ..options() };
    assert!(Client::connect(&served.daemon.socket(), &by_lane).is_ok());
}

#[test]
fn a_worker_with_a_replay_socket_stays_exact_and_the_journal_goes_on() {
    let mut engine = Engine::new();
    let folder = crate::kit::folder();
    let journal = folder.path().join("journal");
    let worker = format!("endpoint = \"{}\"\nreplay = \"{}\"\n", engine.publisher.endpoint(), engine.replayer.endpoint);
    let tables = format!("[[worker]]\nid = 2\n{worker}[policy]\nseed = 7\n[journal]\ndir = {journal:?}\n");
    let mut served = Served::with("", &tables);
    engine.await_subscription();
    let mut decisions = 0;
    for round in 0..=TAKEOVERS {
        let tokens = prompt(round, 64);
        engine.store(&tokens);
        until("the blocks are known", || served.daemon.device(&tokens, REPLAYED) == Some(4));
        assert_eq!(served.daemon.device(&prompt(0, 64), REPLAYED), Some(4), "the first are still there");
        let workers = served.daemon.status().workers;
        let of_engine = workers.iter().find(|worker| worker.worker == REPLAYED).expect("the worker");
        assert_eq!(of_engine.trust.level, TrustLevel::Exact, "round {round}");
        let mut client = served.daemon.client();
        let space = client.space("m", None).expect("the space").id;
        for at in 0..20 {
            let request_id = format!("{round}-{at}");
            let book = Some(BookingRequest { request_id: &request_id, attempt: 0 });
            let request = RouteRequest { book, ..RouteRequest::new(space, Prompt::of_tokens(&tokens)) };
            let booking = client.route(&request).expect("a decision").booking.expect("a booking");
            client.free(&BookingRef::Handle(booking)).expect("freed");
            decisions += 1;
        }
        drop(client);
        if round < TAKEOVERS {
            served.hand_over();
        }
    }
    assert_eq!(served.daemon.process.end("-TERM"), Some(0));
    let output = run(&["replay", text(&journal), "--json"]);
    let said: serde_json::Value = serde_json::from_slice(&output.stdout).expect("JSON");
    assert_eq!((&said["decisions"], &said["equal"]), (&decisions.into(), &decisions.into()), "{said}");
    let files = said["files"].as_array().expect("files");
    assert_eq!(files.len(), TAKEOVERS as usize + 1, "one of each daemon: {said}");
    assert!(files.iter().all(|file| file["ending"] == "closed"), "{said}");
}
