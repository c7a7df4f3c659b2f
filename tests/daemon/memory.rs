//! The memory budget of a running daemon: what it refuses while memory is short, in which order, and that it takes
//! everything up again.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use kvrouted::client::Client;
use kvrouted::error::Kind;
use kvrouted::ids::{CorrelationId, Worker};
use kvrouted::route::{BookingRequest, Prompt, RouteRequest};
use kvrouted::trust::{TrustLevel, TrustReason};
use kvrouted::wire::StatusPage;
use serde_json::json;
use tempfile::TempDir;

use crate::kit::engine::Publisher;
use crate::kit::http::get;
use crate::kit::ports::free_port;
use crate::kit::raw::{Raw, encoded};
use crate::kit::{Daemon, Process, configure_serve, folder, options, prompt, run, skipped, text, until};

/// One serving thread, and frames that are small.
const SERVE: &str = "cores = 1\nframe_body_bytes_max = 65536\n";
/// A budget that leaves the index some ten MiB.
const BUDGET_BYTES: u64 = 128 << 20;

fn tables(publishers: &[&Publisher], more: &str) -> String {
    let worker = |(at, publisher): (usize, &&Publisher)| {
        format!("[[worker]]\nid = {}\nendpoint = \"{}\"\n", at + 1, publisher.endpoint())
    };
    let workers: String = publishers.iter().enumerate().map(worker).collect();
    format!("[process]\nmemory_bytes_max = {BUDGET_BYTES}\n{more}{workers}")
}

/// Blocks of one store.
const BLOCKS: u32 = 4096;
/// Blocks of a question: a frame holds them.
const ASKED: u32 = 256;

fn shed_now(daemon: &Daemon) -> serde_json::Value {
    daemon.said(&["status"])["memory"]["sheds"].clone()
}

fn has_reason(page: &StatusPage, worker: usize, reason: TrustReason) -> bool {
    page.workers[worker].trust.reasons.contains(reason)
}

#[test]
fn the_worker_with_the_most_blocks_is_held_back_and_the_others_stay_exact() {
    let (mut large, mut small) = (Publisher::new(), Publisher::new());
    let folder = folder();
    let config = configure_serve(folder.path(), SERVE, &tables(&[&large, &small], "[ingest]\nshards = 1\n"));
    // The test sets the resident memory: an unoptimised program alone nearly fills the budget.
    let told = Told::start(folder, &config);
    let daemon = &told.daemon;
    [&large, &small].into_iter().for_each(Publisher::await_subscription);
    small.store(&prompt(1, 64));
    until("it is applied", || daemon.status().workers[1].blocks_held == 4);
    let mut stores = 0;
    until("a store finds no memory", || {
        large.store(&prompt(100 + stores, BLOCKS * 16));
        stores += 1;
        has_reason(&daemon.status(), 0, TrustReason::MemoryShort)
    });
    // What is left suffices for small stores, until nearly all is used.
    let mut small_stores = 0;
    until("the large worker is held back", || {
        small_stores += 1;
        large.store(&prompt(100_000 + small_stores, BLOCKS));
        shed_now(daemon) == json!(["stores"])
    });
    assert!(daemon.counter("memory_shed_stores") >= 1 && daemon.worker_counter(0, "stores_memory_short") >= 1);
    until("the finding is there", || daemon.status().findings.iter().any(|finding| finding.name == "memory_shed"));
    // What it holds counts, and what was refused does not: too low, never too high.
    assert_eq!(daemon.device(&prompt(100, ASKED * 16), Worker::new(1, 0)), Some(ASKED));
    let page = daemon.status();
    assert_eq!(page.workers[0].trust.level, TrustLevel::LowerBound);
    assert!(page.workers[0].blocks_held < u64::from(stores * BLOCKS + small_stores * BLOCKS / 16));
    assert_eq!(daemon.device(&prompt(99 + stores, ASKED * 16), Worker::new(1, 0)), Some(0));
    let parts = daemon.said(&["status"])["memory"]["parts"].clone();
    assert!(parts["index"]["bytes"].as_u64() <= parts["index"]["bytes_max"].as_u64(), "{parts}");
    // The others go on.
    small.store(&prompt(2, 64));
    until("it is applied", || daemon.device(&prompt(2, 64), Worker::new(2, 0)) == Some(4));
    assert_eq!(daemon.status().workers[1].trust.level, TrustLevel::Exact);
    // Once there is room, nothing is refused, and a clear makes the worker exact.
    large.clear();
    until("nothing is given up", || shed_now(daemon) == json!([]));
    large.store(&prompt(3, 64));
    until("it is applied", || daemon.device(&prompt(3, 64), Worker::new(1, 0)) == Some(4));
    assert_eq!(daemon.status().workers[0].trust.level, TrustLevel::Exact);
    assert!(daemon.process.log().contains("there is memory again"));
}

/// A daemon that reads its resident memory from a file of the test.
struct Told {
    daemon: Daemon,
    statm: PathBuf,
}

impl Told {
    fn start(folder: Arc<TempDir>, config: &Path) -> Self {
        let statm = folder.path().join("statm");
        write_percent(&statm, 10);
        let variable = ("KVROUTED_STATM", text(&statm));
        let process = Process::start_with(folder.path(), "daemon", variable, &["serve", "--config", text(config)]);
        Self { daemon: Daemon::served_by(process, folder), statm }
    }

    /// From now on this share of the budget is resident.
    fn takes(&self, percent: u64) {
        write_percent(&self.statm, percent);
    }
}

fn write_percent(statm: &Path, percent: u64) {
    let pages = BUDGET_BYTES / 100 * percent / rustix::param::page_size() as u64;
    // Not replaced: the daemon keeps the file open.
    std::fs::write(statm, format!("0 {pages} 0 0 0 0 0\n")).expect("written");
}

#[test]
fn what_is_given_up_comes_in_a_stated_order_and_is_taken_up_again() {
    let (mut engine, port, folder) = (Publisher::new(), free_port(), folder());
    let more = format!("[http]\nport = {port}\nbody_bytes_max = 65536\n[ingest]\nshards = 1\n");
    // The space is the last table before these.
    let tables = tables(&[&engine], &more);
    // The predictions are of the worker without events.
    let tables = format!("approximate = true\napproximate_memory_bytes_max = 16777216\n{tables}[[worker]]\nid = 9\n");
    let config = configure_serve(folder.path(), SERVE, &tables);
    let told = Told::start(folder, &config);
    let daemon = &told.daemon;
    engine.await_subscription();
    engine.store(&prompt(1, 64));
    let mut client = daemon.client();
    let space = client.space("m", None).expect("the space").id;
    let mut seed = 10;
    let mut book = || {
        seed += 1;
        let (tokens, request_id) = (prompt(seed, 64), format!("r{seed}"));
        let book = Some(BookingRequest { request_id: &request_id, attempt: 0 });
        client.route(&RouteRequest { book, ..RouteRequest::new(space, Prompt::of_tokens(&tokens)) }).expect("routed");
    };
    until("a booking is predicted", || {
        book();
        daemon.counter("predicted_bookings") > 0
    });
    // Each share, and all that is given up then.
    for (percent, shed) in [
        (86, json!(["connections"])),
        (89, json!(["connections", "dumps"])),
        (92, json!(["connections", "dumps", "predictions"])),
        (97, json!(["connections", "dumps", "predictions", "stores"])),
    ] {
        told.takes(percent);
        until("it is given up", || shed_now(daemon) == shed);
    }
    let refused = Client::connect(&daemon.socket(), &options()).expect_err("no new connection");
    assert_eq!(refused.kind(), Kind::Overloaded, "{refused}");
    assert!(daemon.counter("connections_refused_memory") >= 1);
    let (_, dump) = get(port, "/dump");
    assert!(dump.contains("overloaded") && daemon.counter("dumps_refused_memory") == 1, "{dump}");
    until("nothing is predicted from a booking", || {
        book();
        daemon.counter("predicted_bookings_shed") > 0
    });
    engine.store(&prompt(2, 64));
    until("a new block is refused", || has_reason(&daemon.status(), 0, TrustReason::MemoryShort));
    engine.store(&prompt(1, 64));
    until("a block that is there needs no memory", || {
        daemon.status().workers[0].trust.as_of_seq.is_some_and(|seq| seq.0 == 2)
    });
    told.takes(88);
    until("the last one ends", || shed_now(daemon) == json!(["connections", "dumps", "predictions"]));
    told.takes(50);
    until("all have ended", || shed_now(daemon) == json!([]));
    assert_eq!(daemon.client().space("m", None).expect("the space").id, space, "connections are taken again");
    let counters =
        ["connections", "dumps", "predictions", "stores"].map(|of| daemon.counter(&format!("memory_shed_{of}")));
    assert_eq!(counters, [1; 4]);
}

#[test]
fn a_budget_below_the_fixed_parts_is_refused_with_their_sum_and_what_to_do() {
    let folder = folder();
    let config = configure_serve(folder.path(), "cores = 64\n", "[process]\nmemory_bytes_max = 67108864\n");
    let output = run(&["serve", "--config", text(&config)]);
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && said.contains("memory_bytes_max") && said.contains("serve.cores"), "{said}");
    assert!(!folder.path().join("s").exists(), "no socket is left");
}

/// A cgroup with a memory limit, which a drop removes.
struct Cgroup(PathBuf);

impl Cgroup {
    fn with_limit(bytes: u64) -> Result<Self, String> {
        let name = format!("kvrouted-test-{}", std::process::id());
        let of_v1 = (Path::new("/sys/fs/cgroup/memory"), "memory.limit_in_bytes");
        let (mount, limit) = if of_v1.0.is_dir() { of_v1 } else { (Path::new("/sys/fs/cgroup"), "memory.max") };
        let this = Self(mount.join(name));
        std::fs::create_dir(&this.0).map_err(|error| format!("{}: {error}", this.0.display()))?;
        std::fs::write(this.0.join(limit), bytes.to_string()).map_err(|error| format!("{limit}: {error}"))?;
        Ok(this)
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        // The kernel may take a while to let go of the process that ended.
        for _ in 0..100 {
            if std::fs::remove_dir(&self.0).is_ok() {
                return;
            }
            std::thread::sleep(std::time::Duration::from_millis(10));
        }
    }
}

#[test]
fn the_budget_is_a_share_of_what_the_cgroup_allows_unless_configured() {
    const LIMIT_BYTES: u64 = 512 << 20;
    let cgroup = match Cgroup::with_limit(LIMIT_BYTES) {
        Ok(cgroup) => cgroup,
        Err(why) => return skipped("the budget in a cgroup", &why),
    };
    let folder = folder();
    let config = configure_serve(folder.path(), SERVE, "[ingest]\nshards = 1\n");
    let join = format!("echo $$ > {}/cgroup.procs && exec \"$0\" \"$@\"", cgroup.0.display());
    let process = Process::start_by(folder.path(), "daemon", &join, &["serve", "--config", text(&config)]);
    let mut daemon = Daemon::served_by(process, folder);
    let budget = daemon.said(&["status"])["memory"]["budget_bytes"].as_u64().expect("a budget");
    assert_eq!(budget, LIMIT_BYTES / 100 * kvrouted::limits::MEMORY_SHARE_PERCENT);
    let resident = daemon.said(&["status"])["memory"]["resident_bytes"].as_u64().expect("known");
    assert!(resident > 1 << 20 && resident < budget, "{resident}");
    daemon.process.end("-TERM");
    drop((daemon, cgroup));
}

/// Workers without events: a reply that lists them is long.
const LISTED: usize = 512;
/// Lists that one gateway asks for, far more than sockets hold.
const LISTS: usize = 100;
const MUTE_GATEWAYS: usize = 64;

#[test]
fn replies_that_are_not_read_stay_within_their_part_and_the_largest_holder_is_closed() {
    let workers: String =
        (0..LISTED).map(|id| format!("[[worker]]\nid = {id}\nname = \"{}\"\n", "w".repeat(200))).collect();
    let folder = folder();
    let config = configure_serve(folder.path(), SERVE, &format!("{}{workers}", tables(&[], "[ingest]\nshards = 1\n")));
    let daemon = Daemon::serve(folder, &["--config", text(&config)]);
    let asked: Vec<u8> = (0..LISTS)
        .flat_map(|id| encoded(|encoder, out| encoder.workers(CorrelationId(id as u64), None, 0, u32::MAX, out)))
        .collect();
    let mut mute: Vec<Raw> = (0..MUTE_GATEWAYS).map(|_| Raw::greeted(&daemon.socket())).collect();
    for raw in &mut mute {
        raw.stream.set_write_timeout(Some(Duration::from_secs(1))).expect("set");
        // Fails once the daemon has closed it.
        drop(std::io::Write::write_all(&mut raw.stream, &asked));
    }
    until("one is closed", || daemon.counter("connections_unread_memory") > 0);
    let within = || {
        let parts = daemon.said(&["status"])["memory"]["parts"].clone();
        let [bytes, most] = ["bytes", "bytes_max"].map(|of| parts["replies"][of].as_u64().expect("a figure"));
        bytes <= most + most / 100 * kvrouted::limits::MEMORY_MARGIN_PERCENT
    };
    until("the rest is within its part", within);
    Raw::greeted(&daemon.socket()).assert_served();
    drop(mute);
    until("all of it is free", || daemon.said(&["status"])["memory"]["parts"]["replies"]["bytes"] == 0);
}
