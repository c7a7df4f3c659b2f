//! A soak: one daemon, engines that publish and evict, gateways that compare every reply with the engines' caches, and
//! misbehaving clients. At the end no reply was wrong, nothing hangs or is left over, and memory is flat.
//!
//! `scripts/soak` runs it for any time.
#![allow(clippy::unwrap_used, reason = "a test may fail by a panic")]

mod chaos;
mod engine;
mod gateway;
mod report;

use std::collections::{BTreeMap, HashMap};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::kit::{self, Daemon, open_descriptors, resident_kib, text, until_ok};
use chaos::{Vice, Villain};
use engine::{Engine, Prompts};
use gateway::{Gateway, Truth};
use report::{LeftOver, Memory, Report};

const ENGINES: u64 = 4;
const GATEWAYS: u64 = 3;
/// Between two looks at the daemon's memory.
const CHECK_EVERY: Duration = Duration::from_millis(250);
/// What one user may have: far more than all of ours, who are one, and less than the greedy one wants.
const USER_SHARE_PERCENT: usize = 10;
/// Bookings expire soon, and a connection with an unfinished frame is closed soon.
const CONFIG: &str = "\
cores = 2
socket_mode = \"0666\"
frame_timeout_ms = 1000
[booking]
age_s_max = 12
session_grace_s = 1
[[space]]
model = \"m\"
block_size = 16
[[space]]
model = \"q\"
block_size = 16
[space.policy]
queue_threshold = 0.5
queue_wait_ms_max = 1500
[[worker]]
id = 101
model = \"q\"
batched_tokens_max = 1000
[[worker]]
id = 102
model = \"q\"
batched_tokens_max = 1000
";

#[test]
fn twenty_seconds() {
    let report = soak(Duration::from_secs(20), 1, &[]);
    assert!(report.faults().is_empty(), "{}", report.table());
}

#[test]
fn a_short_run_in_a_sandbox_breaks_no_promise() {
    let report = soak(Duration::from_secs(10), 2, &["--sandbox", "on"]);
    assert!(report.faults().is_empty(), "{}", report.table());
}

#[test]
#[ignore = "a process that the soak starts and kills"]
fn a_victim() {
    chaos::be_a_victim();
}

#[test]
#[ignore = "scripts/soak runs it for any time"]
fn as_long_as_asked() {
    let asked = |name| std::env::var(name).ok().and_then(|value| value.parse::<f64>().ok());
    let seconds = asked("KVROUTED_SOAK_SECONDS").unwrap_or(600.0);
    let seed = asked("KVROUTED_SOAK_SEED").unwrap_or(1.0) as u64;
    let report = soak(Duration::from_secs_f64(seconds), seed, &[]);
    if let Ok(path) = std::env::var("KVROUTED_SOAK_OUT") {
        std::fs::write(Path::new(&path).with_extension("json"), report.json().to_string()).expect("written");
        std::fs::write(Path::new(&path).with_extension("txt"), report.table()).expect("written");
    }
    assert!(report.faults().is_empty(), "{}", report.table());
}

fn start_daemon(engines: &[Engine], flags: &[&str]) -> Daemon {
    let folder = kit::folder();
    let workers = (1..)
        .zip(engines)
        .map(|(id, engine)| format!("[[worker]]\nid = {id}\nmodel = \"m\"\nendpoint = \"{}\"\n", engine.endpoint));
    let config = folder.path().join("kvrouted.toml");
    let socket = folder.path().join("s");
    let share = format!("user_share_percent = {USER_SHARE_PERCENT}");
    let head = format!("[serve]\nsocket = \"{}\"\n{share}\n{CONFIG}", text(&socket));
    // Another user is among its clients.
    std::fs::set_permissions(folder.path(), std::fs::Permissions::from_mode(0o755)).expect("opened");
    kit::replace(&config, &format!("{head}{}", workers.collect::<String>()));
    Daemon::serve(folder, &[&["--config", text(&config)], flags].concat())
}

/// `flags` are more flags of the daemon.
fn soak(lasts: Duration, seed: u64, flags: &[&str]) -> Report {
    let prompts = Arc::new(Prompts::new());
    let engines: Vec<Engine> = (1..=ENGINES).map(|id| Engine::start(&prompts, seed * 1000 + id)).collect();
    let daemon = start_daemon(&engines, flags);
    let truth = Truth { prompts, engines, tally: std::sync::Mutex::default() };
    let descriptors_before = open_descriptors(daemon.process.id());
    let rounds: Vec<(Vice, AtomicU64)> = Vice::ALL.map(|vice| (vice, AtomicU64::new(0))).into();
    let (stop, began, mut memory) = (AtomicBool::new(false), Instant::now(), Memory::default());
    std::thread::scope(|scope| {
        for number in 1..=GATEWAYS {
            let gateway = Gateway::new(&truth, &daemon.socket(), seed * 100 + number);
            let stop = &stop;
            scope.spawn(move || gateway.run(stop));
        }
        let patient = Gateway::new(&truth, &daemon.socket(), seed * 100 + 98);
        let stop_patient = &stop;
        scope.spawn(move || patient.run_patiently(stop_patient));
        for (vice, rounds) in &rounds {
            let villain = Villain::new(*vice, &daemon.socket(), &truth, seed, rounds);
            let stop = &stop;
            scope.spawn(move || villain.run(stop));
        }
        while began.elapsed() < lasts {
            std::thread::sleep(CHECK_EVERY);
            memory.rss_kib.push(resident_kib(daemon.process.id()));
        }
        // Relaxed: it is only to be seen some time.
        stop.store(true, Ordering::Relaxed);
    });
    let last: Vec<u64> = truth.engines.iter().map(Engine::stop).collect();
    let left_over = settle(&daemon, descriptors_before);
    let before_rest = truth.tally.lock().unwrap().exact;
    await_last(&daemon, &last);
    Gateway::new(&truth, &daemon.socket(), seed * 100 + 99).ask_all_at_rest(&last);
    let tally = std::mem::take(&mut *truth.tally.lock().unwrap());
    Report {
        seed,
        lasted: began.elapsed(),
        at_rest: tally.exact - before_rest,
        tally,
        memory,
        left_over,
        rounds: rounds.into_iter().map(|(vice, rounds)| (format!("{vice:?}"), rounds.into_inner())).collect(),
        counters: counters(&daemon),
        batches: last.iter().map(|last| last + 1).sum(),
    }
}

/// Lets all that was left behind end by itself.
fn settle(daemon: &Daemon, descriptors_before: usize) -> LeftOver {
    let look = || {
        let counters: HashMap<String, u64> = daemon.status().counters.into_iter().collect();
        let open = counters["connections"].saturating_sub(counters["connections_closed"]);
        LeftOver {
            // The status request has had a connection itself, to learn where the admin socket is.
            connections: open.saturating_sub(1),
            waiting: counters["queue_waiting"],
            bookings: counters["bookings_live"],
            descriptors: open_descriptors(daemon.process.id()) as i64 - descriptors_before as i64,
        }
    };
    let deadline = Instant::now() + Duration::from_secs(60);
    loop {
        let left = look();
        let is_settled = left.connections == 0 && left.waiting == 0 && left.bookings == 0 && left.descriptors <= 4;
        if is_settled || Instant::now() >= deadline {
            return left;
        }
        std::thread::sleep(CHECK_EVERY);
    }
}

/// Waits until the daemon has applied every engine's last batch.
fn await_last(daemon: &Daemon, last: &[u64]) {
    until_ok("all that was published is applied", || {
        let mut heard = HashMap::new();
        for one in daemon.status().workers {
            heard.insert(one.worker.id.0, one.trust.as_of_seq.map(|seq| seq.0));
        }
        let is_heard = (1..).zip(last).all(|(id, last)| heard.get(&id) == Some(&Some(*last)));
        if is_heard { Ok(()) } else { Err(format!("{last:?}, heard {heard:?}")) }
    });
}

/// What the daemon counted of its clients.
fn counters(daemon: &Daemon) -> BTreeMap<String, u64> {
    let told = ["connections", "requests", "errors", "routes", "bookings", "queue", "admin", "lane", "watch", "turns"];
    let is_told = |name: &str| told.iter().any(|start| name.starts_with(start));
    daemon.status().counters.into_iter().filter(|(name, count)| is_told(name) && *count > 0).collect()
}
