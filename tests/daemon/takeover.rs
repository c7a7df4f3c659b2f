//! A daemon takes over from a running one: under load, with either of the two killed at each step, and asked by callers
//! that may not or cannot.
//!
//! Between the two daemons stands the test itself where it has to stop at a step: it has the old daemon's socket under
//! another name, and passes messages and descriptors on.

mod ports;

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use kvrouted::client::{Answer, Client, ClientOptions, SteadyClient, SteadyOptions};
use kvrouted::fleet::WorkerState;
use kvrouted::ids::Worker;
use kvrouted::load::{BookingHandle, BookingOutcome, BookingRef, SessionToken};
use kvrouted::route::{BookingRequest, Prompt, RouteRequest};
use kvrouted::trust::TrustLevel;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, SocketAddrUnix, SocketFlags, SocketType, accept_with, bind, connect, listen, recvmsg, sendmsg,
    socket_with,
};
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::kit::engine::Publisher;
use crate::kit::{Daemon, Process, WAIT_MAX, configure, folder, options, prompt, text, until, until_ok};

const GATEWAY: SessionToken = SessionToken { hi: 5, lo: 6 };
const DESCRIPTORS_MAX: usize = 32;
/// Bookings that live through all takeovers.
const HELD: u32 = 20;

/// A folder with a configuration, and the daemon that serves there now.
struct Site {
    folder: Arc<TempDir>,
    engine: Publisher,
    started: u32,
    /// The seed of the prompt that was stored last.
    stored: u32,
}

impl Site {
    fn new() -> Self {
        let (folder, engine) = (folder(), Publisher::new());
        let (dir, endpoint) = (folder.path().join("snapshots"), engine.endpoint());
        let tables = format!(
            "[log]\nlevel = \"info\"\n[snapshot]\ndir = {dir:?}\nbookings_image_ms = 100\n\
             [[worker]]\nid = 1\nendpoint = \"{endpoint}\"\n[[worker]]\nid = 2\n"
        );
        configure(folder.path(), &tables);
        Self { folder, engine, started: 0, stored: 1 }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// The daemon of the site, whose worker holds the blocks of one prompt.
    fn start(&mut self) -> Daemon {
        let config = self.path("kvrouted.toml");
        // Daemons that have taken over have subscribed too.
        self.engine.forget_subscriptions();
        let daemon = Daemon::serve(Arc::clone(&self.folder), &["--config", text(&config)]);
        self.engine.await_subscription();
        // A block that is stored twice would make the worker a lower bound.
        self.engine.clear();
        self.engine.store(&prompt(1, 320));
        until("the blocks are known", || daemon.device(&prompt(1, 320), Worker::new(1, 0)) == Some(20));
        daemon
    }

    /// A daemon that takes over.
    fn next(&mut self) -> Process {
        self.started += 1;
        let (config, socket) = (self.path("kvrouted.toml"), self.path("s"));
        let arguments = ["serve", "--config", text(&config), "--take-over", text(&socket)];
        Process::start(self.folder.path(), &format!("next-{}", self.started), &arguments)
    }

    /// Has a daemon take over, and waits until the old one has ended and has said who that was.
    fn hand_over(&mut self, mut daemon: Daemon) -> Daemon {
        let next = self.next();
        assert_eq!(daemon.process.ended(), Some(0), "the old daemon ends well");
        let (log, who) = (daemon.process.log(), format!(" pid={} what=\"takeover\" object=the daemon", next.id()));
        let lines: Vec<&str> =
            log.lines().filter(|line| line.contains(" audit: ") && line.contains("takeover")).collect();
        assert!(matches!(&lines[..], [line] if line.contains(&who)), "{who}: {lines:?}");
        Daemon::served_by(next, Arc::clone(&self.folder))
    }

    /// Puts the test between the daemon and the next one.
    fn stand_between(&self) -> Between {
        let (path, moved) = (self.path("s.next"), self.path("moved"));
        std::fs::rename(&path, &moved).expect("renamed");
        let listener = seqpacket();
        bind(&listener, &SocketAddrUnix::new(&path).expect("short")).expect("bound");
        listen(&listener, 1).expect("listening");
        Between { listener, moved }
    }
}

fn seqpacket() -> OwnedFd {
    socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).expect("a socket")
}

// ---- messages -----------------------------------------------------------------------------------------------

/// A message and its descriptors; `None` = the other end has gone.
fn receive(socket: &OwnedFd) -> Option<(Vec<u8>, Vec<OwnedFd>)> {
    let mut bytes = [0; 64 << 10];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS_MAX))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let got = recvmsg(socket, &mut [IoSliceMut::new(&mut bytes)], &mut control, RecvFlags::CMSG_CLOEXEC).ok()?;
    let rights = |part| if let RecvAncillaryMessage::ScmRights(rights) = part { Some(rights) } else { None };
    let descriptors = control.drain().filter_map(rights).flatten().collect();
    (got.bytes > 0).then(|| (bytes[..got.bytes].to_vec(), descriptors))
}

fn send(socket: &OwnedFd, bytes: &[u8], descriptors: &[OwnedFd]) -> bool {
    let borrowed: Vec<BorrowedFd<'_>> = descriptors.iter().map(AsFd::as_fd).collect();
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS_MAX))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    assert!(borrowed.is_empty() || control.push(SendAncillaryMessage::ScmRights(&borrowed)));
    sendmsg(socket, &[IoSlice::new(bytes)], &mut control, SendFlags::NOSIGNAL).is_ok()
}

fn said(bytes: &[u8]) -> String {
    let value: Value = serde_json::from_slice(bytes).expect("JSON");
    value["says"].as_str().expect("a name").to_owned()
}

/// The test between two daemons.
struct Between {
    listener: OwnedFd,
    moved: PathBuf,
}

impl Between {
    /// Passes messages on until one of this name comes, of either side, which is not passed on; `None` = a side has gone
    /// before. The connections stay open until the value is dropped.
    fn until(&self, name: &str) -> (bool, [OwnedFd; 2]) {
        self.until_with(name, &[])
    }

    /// The same, and in place of each answer of the old daemon of some name, the next daemon gets another one.
    fn until_with(&self, name: &str, others: &[(&str, Value)]) -> (bool, [OwnedFd; 2]) {
        let next = accept_with(&self.listener, SocketFlags::CLOEXEC).expect("the next daemon");
        let old = seqpacket();
        connect(&old, &SocketAddrUnix::new(&self.moved).expect("short")).expect("the old daemon");
        loop {
            let mut polled = [PollFd::new(&next, PollFlags::IN), PollFd::new(&old, PollFlags::IN)];
            poll(&mut polled, None).expect("polled");
            let ready = [!polled[0].revents().is_empty(), !polled[1].revents().is_empty()];
            for at in (0..2).filter(|at| ready[*at]) {
                let (from, to) = if at == 0 { (&next, &old) } else { (&old, &next) };
                let Some((bytes, descriptors)) = receive(from) else { return (false, [next, old]) };
                let said = said(&bytes);
                if said == name {
                    return (true, [next, old]);
                }
                match others.iter().find(|(of, _)| *of == said) {
                    Some((_, other)) => send(to, other.to_string().as_bytes(), &[]),
                    None => send(to, &bytes, &descriptors),
                };
            }
        }
    }
}

/// A caller that speaks to the daemon itself.
struct Caller(OwnedFd);

impl Caller {
    fn of(site: &Site) -> Self {
        let socket = seqpacket();
        connect(&socket, &SocketAddrUnix::new(site.path("s.next")).expect("short")).expect("connected");
        Self(socket)
    }

    fn say(&self, message: &Value) {
        send(&self.0, message.to_string().as_bytes(), &[]);
    }

    /// The name of the next answer; `None` = the daemon has closed the connection.
    fn answer(&self) -> Option<String> {
        receive(&self.0).map(|(bytes, _)| said(&bytes))
    }
}

/// What the next daemon says of its spaces, heard from one that is then refused its answer.
fn spaces(site: &Site) -> String {
    let next = site.stand_between();
    let (config, daemon) = (site.path("kvrouted.toml"), site.path("s"));
    let arguments = ["serve", "--config", text(&config), "--take-over", text(&daemon)];
    let mut process = Process::start(site.folder.path(), "asked", &arguments);
    let socket = accept_with(&next.listener, SocketFlags::CLOEXEC).expect("the next daemon");
    let (bytes, _) = receive(&socket).expect("hello");
    drop(socket);
    assert_ne!(process.ended(), Some(0));
    std::fs::rename(&next.moved, site.path("s.next")).expect("as before");
    let hello: Value = serde_json::from_slice(&bytes).expect("JSON");
    hello["spaces"].as_str().expect("a text").to_owned()
}

// ---- what has to hold ---------------------------------------------------------------------------------------

fn gateway(socket: &Path) -> Client {
    Client::connect(socket, &ClientOptions { session: Some(GATEWAY), ..options() }).expect("a connection")
}

fn book(client: &mut Client, request_id: &str) -> BookingHandle {
    let space = client.space("m", None).expect("the space").id;
    let tokens = prompt(7, 64);
    let book = Some(BookingRequest { request_id, attempt: 0 });
    let request = RouteRequest { book, ..RouteRequest::new(space, Prompt::of_tokens(&tokens)) };
    client.route(&request).expect("a reply").booking.expect("a booking")
}

fn free(client: &mut Client, booking: BookingHandle) -> BookingOutcome {
    client.free(&BookingRef::Handle(booking)).expect("a reply")
}

/// Whether the daemon has the blocks of the engine, believes in them, and hears of further ones.
fn assert_knows_blocks(site: &mut Site, daemon: &Daemon) {
    let worker = Worker::new(1, 0);
    assert_eq!(daemon.device(&prompt(1, 320), worker), Some(20));
    site.stored += 1;
    let further = prompt(site.stored, 320);
    site.engine.store(&further);
    until("further blocks are known", || daemon.device(&further, worker) == Some(20));
    assert_eq!(daemon.status().workers[0].trust.level, TrustLevel::Exact);
}

/// The booking is there, and a worker of which the daemon has nothing goes on with what its engine says next.
fn assert_goes_on(site: &mut Site, daemon: &Daemon, booking: BookingHandle) {
    assert_eq!(free(&mut gateway(&daemon.socket()), booking), BookingOutcome::Applied);
    site.engine.clear();
    site.engine.store(&prompt(1, 320));
    until("its blocks are known", || daemon.device(&prompt(1, 320), Worker::new(1, 0)) == Some(20));
}

// ---- tests --------------------------------------------------------------------------------------------------

#[test]
fn bookings_sessions_blocks_and_the_instance_go_on() {
    let mut site = Site::new();
    let daemon = site.start();
    let mut client = gateway(&daemon.socket());
    let instance = client.hello().instance_id;
    let [first, second] = ["a", "b"].map(|name| book(&mut client, name));
    let daemon = site.hand_over(daemon);
    assert_knows_blocks(&mut site, &daemon);
    let mut client = gateway(&daemon.socket());
    assert_eq!(client.hello().instance_id, instance);
    assert_eq!(free(&mut client, first), BookingOutcome::Applied);
    let third = book(&mut client, "c");
    // And once more, from one that has taken over itself.
    let mut daemon = site.hand_over(daemon);
    assert_knows_blocks(&mut site, &daemon);
    let mut client = gateway(&daemon.socket());
    assert_eq!(client.hello().instance_id, instance);
    assert_eq!(free(&mut client, second), BookingOutcome::Applied);
    assert_eq!(free(&mut client, third), BookingOutcome::Applied);
    let left: u64 = (0..2).map(|worker| daemon.worker_counter(worker, "active_requests")).sum();
    assert_eq!(left, 0);
    assert_eq!(daemon.process.end("-TERM"), Some(0));
    for file in ["s", "s.admin", "s.next"] {
        assert!(!site.path(file).exists(), "{file} is removed by the last daemon");
    }
    // What the last daemon kept is what the next start finds.
    let daemon = site.start();
    assert_eq!(daemon.client().hello().instance_id, instance);
}

/// The steps of a takeover, by the message with which each begins.
const STEPS: [&str; 10] =
    ["hello", "welcome", "workers", "dump", "dumped", "switch", "image", "taken", "yours", "serving"];

/// Without a replay, nothing of what the old daemon knew is proven once the engine has reconnected.
#[test]
fn a_worker_that_reconnects_and_stays_idle_does_not_keep_the_next_daemon_from_taking_over() {
    let mut site = Site::new();
    let daemon = site.start();
    let mut client = gateway(&daemon.socket());
    let booking = book(&mut client, "kept");
    let endpoint = site.engine.endpoint();
    site.engine = Publisher::bind("tcp://127.0.0.1:*").expect("a free port");
    site.engine = Publisher::start(&endpoint).subscribed();
    until("it is back and has nothing", || {
        let worker = &daemon.status().workers[0];
        worker.state == WorkerState::Ready && worker.blocks_held == 0
    });
    assert!(daemon.status().workers[0].trust.as_of_seq.is_some());
    let daemon = site.hand_over(daemon);
    assert_goes_on(&mut site, &daemon, booking);
}

#[test]
fn a_worker_that_cannot_be_passed_begins_anew_and_the_log_says_why() {
    let mut site = Site::new();
    let mut daemon = site.start();
    let mut client = gateway(&daemon.socket());
    let booking = book(&mut client, "kept");
    let between = site.stand_between();
    let next = site.next();
    let why = json!({"says": "not_dumped", "why": "overflow"});
    // The old daemon closes the connection when the next one serves.
    let (_, connections) = between.until_with("nothing that is ever said", &[("dumped", why)]);
    drop(connections);
    assert_eq!(daemon.process.ended(), Some(0));
    let daemon = Daemon::served_by(next, Arc::clone(&site.folder));
    let log = daemon.process.log();
    assert!(log.contains("cannot be taken over") && log.contains("not_dumped: overflow"), "{log}");
    assert_goes_on(&mut site, &daemon, booking);
}

#[test]
fn the_old_daemon_goes_on_if_the_new_one_dies_at_any_step() {
    let mut site = Site::new();
    let daemon = site.start();
    let mut client = gateway(&daemon.socket());
    let booking = book(&mut client, "kept");
    let between = site.stand_between();
    for step in &STEPS[..STEPS.len() - 1] {
        let mut next = site.next();
        let (came, connections) = between.until(step);
        assert!(came, "{step}");
        next.end("-KILL");
        drop(connections);
        // The same connection, and the same booking.
        let other = book(&mut client, step);
        assert_eq!(free(&mut client, other), BookingOutcome::Applied, "{step}");
        assert_knows_blocks(&mut site, &daemon);
    }
    assert_eq!(free(&mut client, booking), BookingOutcome::Applied);
    std::fs::rename(&between.moved, site.path("s.next")).expect("as before");
    let daemon = site.hand_over(daemon);
    assert_knows_blocks(&mut site, &daemon);
}

#[test]
fn the_new_daemon_ends_or_goes_on_with_all_if_the_old_one_dies() {
    for step in STEPS {
        let mut site = Site::new();
        let mut daemon = site.start();
        let mut client = gateway(&daemon.socket());
        let (instance, booking) = (client.hello().instance_id, book(&mut client, "kept"));
        let between = site.stand_between();
        let mut next = site.next();
        let (came, connections) = between.until(step);
        assert!(came, "{step}");
        daemon.process.end("-KILL");
        drop(connections);
        if ["taken", "yours", "serving"].contains(&step) {
            let daemon = Daemon::served_by(next, Arc::clone(&site.folder));
            let mut client = gateway(&daemon.socket());
            assert_eq!(client.hello().instance_id, instance, "{step}");
            assert_eq!(free(&mut client, booking), BookingOutcome::Applied, "{step}");
            assert_knows_blocks(&mut site, &daemon);
        } else {
            assert!(next.ended().is_some_and(|code| code > 0), "{step}");
            assert!(next.log().contains("ended before it had handed over"), "{step}: {}", next.log());
        }
    }
}

#[test]
fn callers_that_do_not_fit_are_refused_and_the_daemon_goes_on() {
    let mut site = Site::new();
    let daemon = site.start();
    let mut client = gateway(&daemon.socket());
    let booking = book(&mut client, "kept");
    let spaces = spaces(&site);
    let first = [
        json!({"says": "hello", "format": 2, "spaces": spaces}),
        json!({"says": "hello", "format": 1, "spaces": "others"}),
        json!({"says": "switch"}),
        json!({"says": "taken"}),
        json!({"says": "no such message"}),
        json!([1, 2]),
        Value::String("x".repeat(20_000)),
    ];
    for message in first {
        let caller = Caller::of(&site);
        caller.say(&message);
        assert_eq!(caller.answer().as_deref(), Some("refused"), "{message}");
        assert_eq!(caller.answer(), None);
    }
    for (messages, last) in [
        (vec![json!({"says": "dump", "id": 77, "rank": 0})], "not_dumped"),
        (vec![json!({"says": "serving"})], "refused"),
        (vec![json!({"says": "switch"}), json!({"says": "behind"})], "resumed"),
        (vec![json!({"says": "switch"}), json!({"says": "serving"})], "refused"),
        (vec![json!({"says": "switch"}), json!({"says": "give_up", "why": "tired"})], "refused"),
        // As a daemon that was told to end in the pause.
        (
            vec![json!({"says": "switch"}), json!({"says": "taken"}), json!({"says": "give_up", "why": "tired"})],
            "refused",
        ),
        // It says nothing in the pause, which then ends.
        (vec![json!({"says": "switch"})], "refused"),
    ] {
        let caller = Caller::of(&site);
        caller.say(&json!({"says": "hello", "format": 1, "spaces": spaces}));
        assert_eq!(caller.answer().as_deref(), Some("welcome"));
        let mut answer = None;
        for message in &messages {
            caller.say(message);
            answer = caller.answer();
        }
        if answer.as_deref() == Some("image") {
            answer = caller.answer();
        }
        assert_eq!(answer.as_deref(), Some(last), "{messages:?}");
    }
    assert!(daemon.counter("takeovers_refused") >= 2 && daemon.counter("takeovers_failed") >= 5);
    assert_eq!(free(&mut client, booking), BookingOutcome::Applied);
    let daemon = site.hand_over(daemon);
    assert_knows_blocks(&mut site, &daemon);
}

#[test]
fn a_daemon_with_other_spaces_or_no_daemon_to_take_over_from_says_why() {
    let mut site = Site::new();
    let socket = site.path("s");
    let mut alone = site.next();
    assert!(alone.ended().is_some_and(|code| code > 0));
    assert!(alone.log().contains("no daemon can be taken over"), "{}", alone.log());
    let daemon = site.start();
    let others = ["serve", "--socket", text(&socket), "--model", "other", "--take-over", text(&socket)];
    let mut others = Process::start(site.folder.path(), "others", &others);
    assert!(others.ended().is_some_and(|code| code > 0));
    assert!(others.log().contains("its spaces are not those of this daemon"), "{}", others.log());
    assert_knows_blocks(&mut site, &daemon);
}

#[test]
fn nothing_is_refused_or_lost_under_load() {
    let figures = under_load(5, false);
    assert_eq!(figures.refused, 0, "{figures:?}");
    assert_eq!(figures.lost, 0, "{figures:?}");
    assert_eq!(figures.alone, 0, "{figures:?}");
}

/// Prints what 100 takeovers and 100 crashes cost. `cargo test --release --test daemon takeover::figures -- --ignored
/// --nocapture`
#[test]
#[ignore = "it takes minutes"]
fn figures() {
    let rounds = std::env::var("ROUNDS").ok().and_then(|rounds| rounds.parse().ok()).unwrap_or(100);
    println!("{rounds} takeovers: {:?}", under_load(rounds, false));
    println!("{rounds} crashes: {:?}", under_load(rounds, true));
}

// ---- load ---------------------------------------------------------------------------------------------------

/// What the clients met.
#[derive(Debug, Default)]
#[expect(dead_code, reason = "they are printed")]
struct Figures {
    requests: u64,
    connects: u64,
    refused: u64,
    /// Bookings that the daemon does not know any more.
    lost: u64,
    /// Requests that a client decided alone.
    alone: u64,
    /// Requests that failed.
    failed: u64,
    pause_us_p50: u64,
    pause_us_p99: u64,
    pause_us_max: u64,
    /// From the start of the new daemon until it serves.
    ready_ms_p50: u64,
    ready_ms_max: u64,
    /// Between two answers of one client, the longest.
    gap_ms_max: u64,
    /// From the end of the clients until no booking was left.
    left_ms: u64,
}

#[derive(Debug, Default)]
struct Counts {
    requests: AtomicU64,
    connects: AtomicU64,
    refused: AtomicU64,
    lost: AtomicU64,
    alone: AtomicU64,
    failed: AtomicU64,
    gap_ms: AtomicU64,
    stop: AtomicBool,
}

impl Counts {
    fn bump(counter: &AtomicU64) {
        counter.fetch_add(1, Ordering::Relaxed);
    }

    fn stopped(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }
}

/// A gateway that books and frees.
fn route_and_free(socket: &Path, number: u64, counts: &Counts) {
    let session = Some(SessionToken { hi: 9, lo: number });
    let options = SteadyOptions { name: "load".into(), session, timeout: WAIT_MAX, ..SteadyOptions::default() };
    let client = SteadyClient::new(socket, options).expect("a client");
    // The daemon may be killed meanwhile.
    let space = until_ok("the space is known", || {
        client.connected().and_then(|()| client.space("m", None, None)).map_err(|error| error.to_string())
    });
    let space = space.id;
    let mut last = Instant::now();
    for request in 0_u64.. {
        if counts.stopped() {
            // What a crash has brought back is freed once more on the next connection.
            until_ok("it is connected", || client.connected().map_err(|error| error.to_string()));
            return;
        }
        let (request_id, tokens) = (format!("{number}-{request}"), prompt(request as u32 % 50, 320));
        let book = Some(BookingRequest { request_id: &request_id, attempt: 0 });
        let answer = client.route(&RouteRequest { book, ..RouteRequest::new(space, Prompt::of_tokens(&tokens)) });
        Counts::bump(&counts.requests);
        counts.gap_ms.fetch_max(last.elapsed().as_millis() as u64, Ordering::Relaxed);
        last = Instant::now();
        match answer {
            Ok(Answer::Fallback(_)) => Counts::bump(&counts.alone),
            Ok(answer) => match answer.booking().map(|booking| client.free(booking)) {
                Some(Ok(Some(BookingOutcome::Unknown))) => Counts::bump(&counts.lost),
                Some(Err(_)) | None => Counts::bump(&counts.failed),
                Some(Ok(_)) => {}
            },
            Err(_) => Counts::bump(&counts.failed),
        }
    }
}

fn connect_again_and_again(socket: &Path, counts: &Counts) {
    while !counts.stopped() {
        Counts::bump(&counts.connects);
        if UnixStream::connect(socket).is_err() {
            Counts::bump(&counts.refused);
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Waits until an image has all that is booked now.
fn await_image(daemon: &Daemon, client: &mut Client) {
    let (before, mut further) = (daemon.counter("booking_images_written"), 0);
    // Images follow only changes. One may just be written, so the second one from here has everything.
    until("an image is written", || {
        further += 1;
        let booking = book(client, &format!("further {further}"));
        free(client, booking);
        daemon.counter("booking_images_written") > before + 1
    });
}

/// Replaces the daemon again and again while three gateways book and free: by takeovers, or by kills and starts.
fn under_load(rounds: usize, crashes: bool) -> Figures {
    let mut site = Site::new();
    let mut daemon = site.start();
    let mut client = gateway(&daemon.socket());
    let instance = client.hello().instance_id;
    let held: Vec<BookingHandle> = (0..HELD).map(|at| book(&mut client, &format!("held {at}"))).collect();
    if crashes {
        await_image(&daemon, &mut client);
    }
    drop(client);
    let (socket, counts) = (daemon.socket(), Counts::default());
    let (mut pauses, mut ready) = (Vec::new(), Vec::new());
    std::thread::scope(|scope| {
        let (socket, counts) = (&socket, &counts);
        for number in 0..3 {
            scope.spawn(move || route_and_free(socket, number, counts));
        }
        scope.spawn(move || connect_again_and_again(socket, counts));
        for round in 0..rounds {
            let began = Instant::now();
            site.engine.store(&prompt(100 + round as u32, 160));
            if crashes {
                daemon.process.end("-KILL");
                site.started += 1;
                let (config, name) = (site.path("kvrouted.toml"), format!("next-{}", site.started));
                let process = Process::start(site.folder.path(), &name, &["serve", "--config", text(&config)]);
                daemon = replace_by(process, &site);
            } else {
                let next = site.next();
                let old = std::mem::replace(&mut daemon, Daemon { process: next, folder: Arc::clone(&site.folder) });
                let Daemon { mut process, .. } = old;
                assert_eq!(process.ended(), Some(0), "round {round}");
                until("the new daemon says so", || daemon.process.log().contains("has taken over"));
                pauses.push(logged(&daemon.process.log(), "pause_us="));
            }
            ready.push(began.elapsed().as_millis() as u64);
        }
        counts.stop.store(true, Ordering::Relaxed);
    });
    let mut client = gateway(&socket);
    let ended = Instant::now();
    let outcomes: Vec<BookingOutcome> = held.iter().map(|booking| free(&mut client, *booking)).collect();
    assert_eq!(client.hello().instance_id, instance);
    assert!(outcomes.iter().all(|outcome| *outcome == BookingOutcome::Applied), "{outcomes:?}");
    // Reports that were stored are delivered by now, or by the clients' last calls.
    until("no booking is left", || (0..2).map(|at| daemon.worker_counter(at, "active_requests")).sum::<u64>() == 0);
    let left_ms = ended.elapsed().as_millis() as u64;
    pauses.sort_unstable();
    ready.sort_unstable();
    let percentile = |sorted: &[u64], percent| sorted.get(sorted.len() * percent / 100).copied().unwrap_or(0);
    let of = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
    Figures {
        requests: of(&counts.requests),
        connects: of(&counts.connects),
        refused: of(&counts.refused),
        lost: of(&counts.lost),
        alone: of(&counts.alone),
        failed: of(&counts.failed),
        pause_us_p50: percentile(&pauses, 50),
        pause_us_p99: percentile(&pauses, 99),
        pause_us_max: pauses.last().copied().unwrap_or(0),
        ready_ms_p50: percentile(&ready, 50),
        ready_ms_max: ready.last().copied().unwrap_or(0),
        gap_ms_max: of(&counts.gap_ms),
        left_ms,
    }
}

fn replace_by(process: Process, site: &Site) -> Daemon {
    Daemon::served_by(process, Arc::clone(&site.folder))
}

/// The number behind a name in the last line of a log that has it.
fn logged(log: &str, name: &str) -> u64 {
    let line = log.lines().rfind(|line| line.contains(name)).expect("a line");
    let (_, number) = line.split_once(name).expect("the name");
    number.split(|byte: char| !byte.is_ascii_digit()).next().and_then(|digits| digits.parse().ok()).expect("a number")
}
