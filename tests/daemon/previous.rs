//! This build beside, and after, an earlier one whose program `KVROUTED_PREVIOUS_BIN` names: `scripts/test-previous`.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;

use kvrouted::client::{Client, ClientOptions};
use kvrouted::ids::Worker;
use kvrouted::load::{BookingHandle, BookingOutcome, BookingRef, SessionToken};
use kvrouted::route::{BookingRequest, Prompt, RouteRequest};
use kvrouted::trust::TrustLevel;
use kvrouted::wire::RouterStatus;
use tempfile::TempDir;

use crate::kit::replayer::Engine;
use crate::kit::{Daemon, Process, configure, folder, kvrouted, options, prompt, text, until, until_ok};

const GATEWAY: SessionToken = SessionToken { hi: 5, lo: 6 };
const SECRET: &str = "0123456789abcdef0123456789abcdef";

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Build {
    Previous,
    This,
}

use Build::{Previous, This};

fn previous() -> PathBuf {
    std::env::var_os("KVROUTED_PREVIOUS_BIN").expect("scripts/test-previous names the earlier program").into()
}

fn spawn(build: Build, folder: &Path, name: &str, arguments: &[&str]) -> Process {
    let command = match build {
        This => kvrouted(arguments),
        Previous => {
            let mut command = Command::new(previous());
            command.args(arguments).env_remove("RUST_LOG").stdin(Stdio::null());
            command
        }
    };
    Process::spawn(folder, name, command)
}

fn serve(build: Build, folder: &Arc<TempDir>, name: &str) -> Daemon {
    let config = folder.path().join("kvrouted.toml");
    let process = spawn(build, folder.path(), name, &["serve", "--config", text(&config)]);
    Daemon::served_by(process, Arc::clone(folder))
}

fn gateway(of: &Daemon) -> Client {
    Client::connect(&of.socket(), &ClientOptions { session: Some(GATEWAY), ..options() }).expect("a connection")
}

fn book(client: &mut Client, request_id: &str, worker: u64) -> BookingHandle {
    let space = client.space("m", None).expect("the space").id;
    let tokens = prompt(7, 320);
    let book = Some(BookingRequest { request_id, attempt: 0 });
    let pin = Some(Worker::new(worker, 0));
    let request = RouteRequest { book, pin, ..RouteRequest::new(space, Prompt::of_tokens(&tokens)) };
    client.route(&request).expect("a reply").booking.expect("a booking")
}

fn free(client: &mut Client, booking: BookingHandle) -> BookingOutcome {
    client.free(&BookingRef::Handle(booking)).expect("a reply")
}

fn active_requests(of: &Daemon) -> Vec<u64> {
    (0..2).map(|worker| of.worker_counter(worker, "active_requests")).collect()
}

// ---- beside it --------------------------------------------------------------------------------------------------------

/// What a router holds of the one at `address`.
fn held(at: &Daemon, address: &str) -> Option<RouterStatus> {
    at.status().routers.into_iter().find(|of| of.address == address)
}

fn until_equal(at: &Daemon, address: &str, of: &Daemon) {
    until_ok("both hold the same", || {
        let own = of.status().routers.into_iter().find(|of| of.state == "self").expect("its own row");
        let held = held(at, address);
        let is_equal = held.as_ref().is_some_and(|held| {
            held.state == "live"
                && (held.digest, held.sequence, held.workers) == (own.digest, own.sequence, own.workers)
        });
        is_equal.then_some(()).ok_or(format!("{held:?}, {own:?}"))
    });
}

#[test]
#[ignore = "scripts/test-previous runs it"]
fn routers_of_both_builds_count_each_others_bookings() {
    let folders = [folder(), folder()];
    let addresses = folders.each_ref().map(|folder| format!("ipc://{}/routers", folder.path().display()));
    for ((folder, address), name) in folders.iter().zip(&addresses).zip(["a", "b"]) {
        let secret = folder.path().join("secret");
        std::fs::write(&secret, SECRET).expect("written");
        let tables = format!(
            "[routers]\nname = \"{name}\"\nlisten = \"{address}\"\npeers = {addresses:?}\nsecret_file = {secret:?}\n\
             [[worker]]\nid = 1\n[[worker]]\nid = 2\n"
        );
        configure(folder.path(), &tables);
    }
    let start =
        |builds: [Build; 2]| [0, 1].map(|place| serve(builds[place], &folders[place], &format!("{:?}", builds[place])));
    for builds in [[This, Previous], [Previous, This]] {
        let mut routers = start(builds);
        let bookings = [0, 1].map(|place| {
            let mut client = gateway(&routers[place]);
            let kept = book(&mut client, "kept", 1 + place as u64);
            (client, kept)
        });
        for at in &routers {
            until("the other one's booking counts", || active_requests(at) == [1, 1]);
        }
        until_equal(&routers[0], &addresses[1], &routers[1]);
        until_equal(&routers[1], &addresses[0], &routers[0]);
        let [(mut client, kept), (_other, _lost)] = bookings;
        assert_eq!(free(&mut client, kept), BookingOutcome::Applied);
        until("it no longer counts", || active_requests(&routers[1]) == [0, 1]);
        assert_eq!(routers[1].process.end("-KILL"), None);
        until("no phantom is left of the router that was killed", || active_requests(&routers[0]) == [0, 0]);
    }
}

// ---- after it ---------------------------------------------------------------------------------------------------------

/// A folder for one daemon after the other, and the engine of its first worker.
struct Site {
    folder: Arc<TempDir>,
    engine: Engine,
}

impl Site {
    fn new() -> Self {
        let (folder, engine) = (folder(), Engine::new());
        let (dir, endpoint) = (folder.path().join("snapshots"), engine.publisher.endpoint());
        let replay = &engine.replayer.endpoint;
        let tables = format!(
            "[snapshot]\ndir = {dir:?}\nbookings_image_ms = 100\n\
             [[worker]]\nid = 1\nendpoint = \"{endpoint}\"\nreplay = \"{replay}\"\n[[worker]]\nid = 2\n"
        );
        configure(folder.path(), &tables);
        Self { folder, engine }
    }

    /// The earlier build, whose worker holds the blocks of one prompt.
    fn start_previous(&mut self) -> Daemon {
        let daemon = serve(Previous, &self.folder, "previous");
        self.engine.await_subscription();
        self.engine.store(&prompt(1, 320));
        until("the blocks are known", || daemon.device(&prompt(1, 320), Worker::new(1, 0)) == Some(20));
        daemon
    }
}

#[test]
#[ignore = "scripts/test-previous runs it"]
fn a_restart_into_this_build_keeps_what_the_earlier_one_kept() {
    let mut site = Site::new();
    let mut daemon = site.start_previous();
    let mut client = gateway(&daemon);
    let instance = client.hello().instance_id;
    let kept = book(&mut client, "kept", 2);
    assert_eq!(daemon.process.end("-TERM"), Some(0));
    let daemon = serve(This, &site.folder, "this");
    assert_eq!(active_requests(&daemon), [0, 1]);
    let mut client = gateway(&daemon);
    assert_eq!(client.hello().instance_id, instance);
    assert_eq!(free(&mut client, kept), BookingOutcome::Applied);
    until("the snapshot is loaded", || daemon.counter("snapshots_loaded") == 1);
    until("the blocks are proven", || daemon.status().workers[0].trust.level == TrustLevel::Exact);
    assert_eq!(daemon.device(&prompt(1, 320), Worker::new(1, 0)), Some(20));
}

#[test]
#[ignore = "scripts/test-previous runs it"]
fn this_build_takes_over_from_the_earlier_one() {
    let mut site = Site::new();
    let mut daemon = site.start_previous();
    let mut client = gateway(&daemon);
    let instance = client.hello().instance_id;
    let kept = book(&mut client, "kept", 2);
    let (config, socket) = (site.folder.path().join("kvrouted.toml"), daemon.socket());
    let next =
        spawn(This, site.folder.path(), "this", &["serve", "--config", text(&config), "--take-over", text(&socket)]);
    assert_eq!(daemon.process.ended(), Some(0), "the earlier daemon ends well");
    let daemon = Daemon::served_by(next, Arc::clone(&site.folder));
    let mut client = gateway(&daemon);
    assert_eq!(client.hello().instance_id, instance);
    assert_eq!(free(&mut client, kept), BookingOutcome::Applied);
    assert_eq!(daemon.device(&prompt(1, 320), Worker::new(1, 0)), Some(20));
    assert_eq!(daemon.status().workers[0].trust.level, TrustLevel::Exact);
    site.engine.store(&prompt(2, 320));
    until("further blocks are known", || daemon.device(&prompt(2, 320), Worker::new(1, 0)) == Some(20));
}
