//! A thread that stands still, and what the daemon shows of it; and what must not make the control thread stand still.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use kvrouted::client::Client;
use kvrouted::route::{Prompt, RouteRequest};
use kvrouted::wire::StatusPage;

use crate::kit::engine::Publisher;
use crate::kit::http::{get, scrape};
use crate::kit::ports::free_port;
use crate::kit::{Daemon, Process, asked, configure, folder, options, prompt, text, until, until_ok};

/// A round longer than this is a stall.
const STALLED_MS_MAX: u64 = 500;
/// A stall that ends by itself, long after it was noticed.
const STALL_MS: u64 = 6_000;

/// A daemon with a worker and two ports. Once the file `order` exists, one of its threads stands still at the begin of an
/// activity.
struct Stalling {
    daemon: Daemon,
    publisher: Publisher,
    order: PathBuf,
    http: u16,
    metrics: u16,
}

impl Stalling {
    fn start(thread: &str, activity: &str) -> Self {
        let (folder, publisher) = (folder(), Publisher::new());
        let (http, metrics) = (free_port(), free_port());
        let tables = format!(
            "[process]\nstalled_ms_max = {STALLED_MS_MAX}\n[http]\nport = {http}\n[metrics]\nport = {metrics}\n\
             [[worker]]\nid = 7\nendpoint = \"{}\"\n",
            publisher.endpoint()
        );
        let config = configure(folder.path(), &tables);
        let order = folder.path().join("stall");
        let stall = format!("{thread}:{activity}:{STALL_MS}:{}", order.display());
        // A confined thread could not look for the order.
        let arguments = ["serve", "--config", text(&config), "--sandbox", "off"];
        let process = Process::start_with(folder.path(), "daemon", ("KVROUTED_STALL", &stall), &arguments);
        let publisher = publisher.subscribed();
        let this = Self { daemon: Daemon::served_by(process, folder), publisher, order, http, metrics };
        until("the daemon is ready", || this.is_ready());
        this
    }

    /// From now on the thread stands still when it begins the activity.
    fn stall(&self) {
        std::fs::write(&self.order, "").expect("written");
    }

    /// Waits for a finding; what it says.
    fn finding(&self, name: &str) -> String {
        let found = || finding(&self.daemon.status(), name).ok_or_else(|| "there is none".to_owned());
        until_ok("the finding is there", found)
    }

    fn admin(&self) -> PathBuf {
        let mut path = self.daemon.socket().into_os_string();
        path.push(".admin");
        path.into()
    }

    fn is_ready(&self) -> bool {
        let (head, _) = get(self.http, "/ready");
        let status = head.split(' ').nth(1).expect("a status");
        assert!(["200", "503"].contains(&status), "{head}");
        status == "200"
    }

    /// A figure of the thread on the metrics page.
    fn figure(&self, name: &str, thread: &str) -> f64 {
        let (_, page) = scrape(self.metrics);
        let line = format!("{name}{{thread=\"{thread}\"}} ");
        let value = page.lines().find_map(|of| of.strip_prefix(&line)).unwrap_or_else(|| panic!("no {line} in {page}"));
        value.parse().expect("a number")
    }
}

fn finding(page: &StatusPage, name: &str) -> Option<String> {
    page.findings.iter().find(|finding| finding.name == name).map(|finding| finding.what.clone())
}

#[test]
fn a_serving_thread_that_stands_still_is_named_and_readiness_comes_back_with_it() {
    let stalling = Stalling::start("core-0", "deciding");
    let is_answered = Arc::new(AtomicBool::new(false));
    stalling.stall();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut client = stalling.daemon.client();
            let space = client.space("m", None).expect("the space").id;
            client.route(&RouteRequest::new(space, Prompt::of_tokens(&prompt(1, 64)))).expect("an answer, late");
            is_answered.store(true, Ordering::Relaxed);
        });
        until("the daemon is not ready", || !stalling.is_ready());
        assert!(stalling.figure("kvrouted_thread_stalled_seconds", "core-0") > 0.0);
        assert_eq!(asked(&stalling.admin(), &["status"]).expect("JSON")["ready"], false);
        let found = || {
            let mut admin = Client::connect_admin(&stalling.admin(), &options()).expect("a connection");
            finding(&admin.status_all().expect("status"), "thread_stalled").ok_or_else(|| "there is none".to_owned())
        };
        let found = until_ok("the finding is there", found);
        assert!(found.contains("core-0 is deciding"), "{found}");
        assert!(!is_answered.load(Ordering::Relaxed), "the stall was noticed while it lasted");
    });
    until("the daemon is ready again", || stalling.is_ready());
    assert_eq!(stalling.figure("kvrouted_thread_stalls_total", "core-0"), 1.0);
    let longest = stalling.figure("kvrouted_thread_longest_stall_seconds", "core-0");
    assert!(longest >= STALLED_MS_MAX as f64 / 1e3, "{longest}");
    assert_eq!(stalling.daemon.counter("threads_stalled"), 1);
    let log = stalling.daemon.process.log();
    assert!(log.contains("a thread is stalled") && log.contains("the thread goes on"), "{log}");
}

#[test]
fn an_ingest_thread_that_stands_still_is_named_with_its_worker() {
    let mut stalling = Stalling::start("ingest-0", "applying events");
    stalling.stall();
    stalling.publisher.store(&prompt(1, 64));
    until("the daemon is not ready", || !stalling.is_ready());
    let found = stalling.finding("thread_stalled");
    assert!(found.contains("ingest-0 is applying events of worker 7/0"), "{found}");
    until("its batch is applied", || stalling.daemon.status().workers[0].blocks_held == 4);
    until("the daemon is ready again", || stalling.is_ready());
}

#[test]
fn a_control_thread_that_stands_still_is_seen_by_the_ports_that_have_their_own_threads() {
    let stalling = Stalling::start("control", "expiring bookings");
    stalling.stall();
    until("the daemon is not ready", || !stalling.is_ready());
    assert!(stalling.figure("kvrouted_thread_stalled_seconds", "control") > 0.0);
    let mut client = stalling.daemon.client();
    let space = client.space("m", None).expect("the space").id;
    client.route(&RouteRequest::new(space, Prompt::of_tokens(&prompt(1, 64)))).expect("requests are answered");
    until("the daemon is ready again", || stalling.is_ready());
}

#[test]
fn a_thread_beside_the_requests_is_a_note_and_readiness_stays() {
    let stalling = Stalling::start("memory", "measuring memory");
    stalling.stall();
    let found = stalling.finding("thread_slow");
    assert!(found.contains("memory is measuring memory"), "{found}");
    assert!(finding(&stalling.daemon.status(), "thread_stalled").is_none() && stalling.is_ready());
}

/// Puts a pipe that nothing writes to in the place of a file: opening it never returns.
fn replace_by_pipe(file: &Path) {
    std::fs::remove_file(file).expect("removed");
    let made = std::process::Command::new("mkfifo").arg(file).status().expect("mkfifo");
    assert!(made.success());
}

#[test]
fn a_configuration_that_cannot_be_read_holds_nothing_up() {
    let daemon = Daemon::configured("[process]\nstalled_ms_max = 300\n[[worker]]\nid = 1\n");
    let config = daemon.folder.path().join("kvrouted.toml");
    replace_by_pipe(&config);
    daemon.process.signal("-HUP");
    until("the reading is given up", || daemon.counter("config_reloads_refused") == 1);
    let found = || finding(&daemon.status(), "source_unusable").ok_or_else(|| "there is none".to_owned());
    let found = until_ok("the finding is there", found);
    assert!(found.contains("takes too long"), "{found}");
    std::fs::remove_file(&config).expect("removed");
    daemon.reconfigure("[process]\nstalled_ms_max = 300\n[[worker]]\nid = 1\n[[worker]]\nid = 2\n");
    until("the next one is read", || daemon.status().workers.len() == 2);
    assert_eq!((daemon.counter("config_reloads"), daemon.counter("threads_stalled")), (1, 0));
}
