//! Workers without events, as a gateway meets them: the binary, a real socket, and predictions of what was booked.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use kvrouted::client::{Client, ClientOptions};
use kvrouted::ids::Worker;
use kvrouted::load::BookingRef;
use kvrouted::route::{BookingRequest, Prompt, RouteRequest};

/// Far beyond what anything here takes: reached only by a failure.
const PATIENCE: Duration = Duration::from_secs(60);

struct Daemon {
    process: Child,
    folder: tempfile::TempDir,
}

impl Daemon {
    fn start(space: &str) -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let socket = folder.path().join("s");
        let text = format!(
            "[serve]\nsocket = {:?}\n[[space]]\nmodel = \"m\"\nblock_size = 16\n{space}\n[[worker]]\nid = 1\n[[worker]]\nid = 2\n",
            socket.display().to_string()
        );
        let config = folder.path().join("kvrouted.toml");
        std::fs::write(&config, text).expect("written");
        let mut daemon = Command::new(env!("CARGO_BIN_EXE_kvrouted"));
        daemon.args(["serve", "--config"]).arg(&config).stderr(Stdio::inherit());
        let daemon = Self { process: daemon.spawn().expect("the daemon starts"), folder };
        until("the daemon serves", || Client::connect(&daemon.socket(), &options()).is_ok());
        daemon
    }

    fn socket(&self) -> PathBuf {
        self.folder.path().join("s")
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        // One that ended by itself has nothing left to kill.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

#[track_caller]
fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !holds() {
        assert!(Instant::now() < deadline, "waited in vain until {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn options() -> ClientOptions {
    ClientOptions { name: "test".into(), session: None, timeout: Some(PATIENCE) }
}

fn connect(socket: &Path) -> Client {
    Client::connect(socket, &options()).expect("a connection")
}

/// The chosen worker, its device blocks, and how far that is believed.
fn route(client: &mut Client, tokens: &[u32], book: Option<&str>) -> (Worker, u32, String) {
    let space = client.space("m", None).expect("the space").id;
    let book = book.map(|request_id| BookingRequest { request_id, attempt: 0 });
    let request = RouteRequest { book, ..RouteRequest::new(space, Prompt::of_tokens(tokens)) };
    let reply = client.route(&request).expect("a decision");
    let chosen = &reply.candidates[0];
    (chosen.worker, chosen.overlap.device, format!("{} {:?}", chosen.trust.level, chosen.trust.reasons))
}

fn prompt() -> Vec<u32> {
    (0..16 * 20).collect()
}

#[test]
fn a_booked_prompt_is_predicted_where_it_was_booked_until_its_time_is_over() {
    let daemon = Daemon::start("approximate = true\napproximate_ttl_s = 5");
    let mut client = connect(&daemon.socket());
    let tokens = prompt();
    let (first, held, trust) = route(&mut client, &tokens, Some("a"));
    assert_eq!((held, trust.as_str()), (0, "predicted {own_decisions}"));
    client.free(&BookingRef::Request { request_id: "a", attempt: 0 }).expect("freed");
    // The predictor takes bookings over by and by.
    let mut seen = None;
    until("the booking is predicted", || {
        let decided = route(&mut client, &tokens, None);
        let predicted = decided.1 == 20;
        seen = predicted.then_some(decided);
        predicted
    });
    assert_eq!(seen, Some((first, 20, "predicted {own_decisions}".into())));
    until("the prediction has expired", || route(&mut client, &tokens, None).1 == 0);
}

#[test]
fn nothing_is_predicted_unless_the_space_says_so() {
    let daemon = Daemon::start("");
    let mut client = connect(&daemon.socket());
    let tokens = prompt();
    for request in ["a", "b", "c"] {
        let (_, held, trust) = route(&mut client, &tokens, Some(request));
        assert_eq!((held, trust.as_str()), (0, "none {no_events}"));
    }
}
