//! What the system does to a daemon: signals, a clock that jumps, a process that stands still, memory that runs out, and
//! an end in the middle of a snapshot.

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvrouted::ids::Worker;
use kvrouted::load::{BookingOutcome, BookingRef};
use kvrouted::route::{BookingRequest, Prompt, RouteRequest};
use kvrouted::trust::TrustLevel;
use tempfile::TempDir;

use crate::attackers::Attackers;
use crate::kit::engine::BLOCK_SIZE;
use crate::kit::replayer::Engine;
use crate::kit::{Daemon, Process, configure_serve, folder, kvrouted, prompt, skipped, text, until};
use crate::scene::{Scene, asks};
use crate::trial::{Bystander, Trial, Watch};

pub(crate) fn hangups(trial: &mut Trial) {
    let scene = Scene::configured("", "");
    let attackers = scene.attacked_by(trial, "send_garbage", 1);
    for at in 0..300 {
        // Every third file is refused, and every third changes the workers.
        let more = ["", "[[worker]]\nid = 2\n", "nonsense = 1\n"][at % 3];
        let worker = format!("[[worker]]\nid = 1\nendpoint = \"{}\"\n", scene.engine.publisher.endpoint());
        scene.daemon.reconfigure(&format!("{worker}{more}"));
        trial.count("SIGHUPs", 1);
        std::thread::sleep(Duration::from_millis(3));
    }
    attackers.end(trial);
    trial.must_count("config_reloads", scene.counter("config_reloads"), 10);
    trial.must_count("config_reloads_refused", scene.counter("config_reloads_refused"), 1);
    scene.end(trial, 128);
}

pub(crate) fn stands_still(trial: &mut Trial) {
    let mut scene = Scene::configured("", "");
    for seed in 2..5 {
        scene.daemon.process.signal("-STOP");
        // The engine goes on meanwhile.
        for more in 0..50 {
            scene.engine.store(&prompt(seed * 100 + more, 4 * BLOCK_SIZE));
        }
        std::thread::sleep(trial.lasts() / 3);
        scene.daemon.process.signal("-CONT");
        let last = prompt(seed * 100 + 49, 4 * BLOCK_SIZE);
        until("all of it is heard", || scene.daemon.device(&last, Worker::new(1, 0)) == Some(4));
        trial.count("times stopped", 1);
    }
    trial.must(scene.daemon.status().workers[0].trust.level == TrustLevel::Exact, || "not exact again".to_owned());
    scene.end(trial, 96);
}

// ---- the clock ----------------------------------------------------------------------------------------------------------

/// Adds the number of seconds in a file to what the process hears of the wall clock. A time namespace cannot do that: it
/// moves the monotonic clock only.
const SHIM: &str = r#"
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static const volatile long long *offset_s;
static int (*real)(clockid_t, struct timespec *);

__attribute__((constructor)) static void begin(void) {
    int file = open(getenv("KVROUTED_CLOCK_OFFSET"), O_RDONLY | O_CLOEXEC);
    void *page = mmap(NULL, sizeof *offset_s, PROT_READ, MAP_SHARED, file, 0);
    close(file);
    real = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
    offset_s = page == MAP_FAILED ? NULL : page;
}

int clock_gettime(clockid_t clock, struct timespec *time) {
    int failed = real(clock, time);
    if (!failed && offset_s && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE || clock == CLOCK_TAI))
        time->tv_sec += *offset_s;
    return failed;
}

int gettimeofday(struct timeval *time, void *zone) {
    struct timespec now;
    (void)zone;
    if (clock_gettime(CLOCK_REALTIME, &now)) return -1;
    time->tv_sec = now.tv_sec, time->tv_usec = now.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *out) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (out) *out = now.tv_sec;
    return now.tv_sec;
}
"#;

/// The wall clock of the processes that use the shim.
struct Clock {
    shim: PathBuf,
    offset: PathBuf,
}

impl Clock {
    /// `None` if there is no compiler.
    fn build(folder: &Path) -> Option<Self> {
        let (source, shim, offset) = (folder.join("clock.c"), folder.join("clock.so"), folder.join("offset"));
        std::fs::write(&source, SHIM).expect("written");
        std::fs::write(&offset, 0_i64.to_ne_bytes()).expect("written");
        let built =
            Command::new("g++").args(["-x", "c", "-shared", "-fPIC", "-O1", "-o", text(&shim), text(&source)]).status();
        built.is_ok_and(|status| status.success()).then_some(Self { shim, offset })
    }

    fn jump_to(&self, offset_s: i64) {
        // In place: the file is mapped.
        let mut file = std::fs::File::options().write(true).open(&self.offset).expect("the file");
        file.write_all(&offset_s.to_ne_bytes()).expect("written");
    }

    fn start(&self, folder: &Path, config: &Path) -> Process {
        let mut command = kvrouted(&["serve", "--config", text(config)]);
        command.env("LD_PRELOAD", &self.shim).env("KVROUTED_CLOCK_OFFSET", &self.offset);
        Process::spawn(folder, "daemon", command)
    }
}

const YEAR_S: i64 = 365 * 24 * 3600;

pub(crate) fn clock_jumps(trial: &mut Trial) {
    let (folder, engine) = (folder(), Engine::new());
    let Some(clock) = Clock::build(folder.path()) else { return skipped("a clock that jumps", "no C compiler") };
    let config = configure_serve(folder.path(), "frame_timeout_ms = 1000", &with_snapshots(&folder, &engine));
    let mut scene = Scene::of(Daemon::served_by(clock.start(folder.path(), &config), Arc::clone(&folder)), engine);
    let mut client = scene.daemon.client();
    let space = client.space("m", None).expect("the space").id;
    let (tokens, book) = ([3; 64], Some(BookingRequest { request_id: "kept", attempt: 0 }));
    let booked = client.route(&RouteRequest { book, ..RouteRequest::new(space, Prompt::of_tokens(&tokens)) });
    let booking = booked.expect("a decision").booking.expect("a booking");
    let until_then = Instant::now() + trial.lasts();
    let jumps = [10 * YEAR_S, -20 * YEAR_S, 1, -1, 270 * YEAR_S, -3600, 5, 0];
    for (at, jump) in jumps.iter().cycle().enumerate() {
        clock.jump_to(*jump);
        scene.engine.store(&prompt(at as u32 + 10, 4 * BLOCK_SIZE));
        trial.count("jumps", 1);
        std::thread::sleep(Duration::from_millis(50));
        if Instant::now() >= until_then && at >= jumps.len() {
            break;
        }
    }
    // The log shows that the clock did jump, and nothing else does: all deadlines are the monotonic clock's.
    clock.jump_to(10 * YEAR_S);
    scene.daemon.process.signal("-HUP");
    let now_s = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).expect("after 1970").as_secs();
    let year = |offset_s: i64| (1970 + (now_s as i64 + offset_s) / (YEAR_S + 21_600)).to_string();
    until("the log is of another year", || {
        scene.daemon.process.log().lines().any(|line| line.starts_with(&year(10 * YEAR_S)))
    });
    let told = client.free(&BookingRef::Handle(booking)).expect("told");
    trial.must(told == BookingOutcome::Applied, || format!("a booking ended by the wall clock: {told:?}"));
    let status = scene.daemon.status();
    trial.must(status.workers[0].trust.level == TrustLevel::Exact, || format!("{:?}", status.workers[0].trust));
    for counter in ["connections_frame_overdue", "connections_hello_overdue", "connections_unread"] {
        trial.must(scene.counter(counter) == 0, || format!("{counter} counts a deadline that was not over"));
    }
    until("a snapshot is written", || scene.counter("snapshots_written") > 0);
    drop(client);
    let (mut daemon, engine, seen, heard) = scene.taken_apart();
    trial.answered(heard);
    trial.saw(seen, 160);
    assert_eq!(daemon.process.end("-TERM"), Some(0));
    // The next one starts twenty years before the snapshot was written.
    clock.jump_to(-10 * YEAR_S);
    let mut daemon = Daemon::served_by(clock.start(folder.path(), &config), Arc::clone(&folder));
    until("it knows what it knew", || daemon.device(&prompt(1, 8 * BLOCK_SIZE), Worker::new(1, 0)) == Some(8));
    until("the worker is exact", || daemon.status().workers[0].trust.level == TrustLevel::Exact);
    trial.must(daemon.process.end("-TERM") == Some(0), || "it does not end".to_owned());
    drop(engine);
}

// ---- snapshots ------------------------------------------------------------------------------------------------------------

fn with_snapshots(folder: &TempDir, engine: &Engine) -> String {
    format!(
        "[snapshot]\ndir = \"{}\"\nevery_s = 1\n[[worker]]\nid = 1\nendpoint = \"{}\"\nreplay = \"{}\"\n",
        folder.path().join("snapshots").display(),
        engine.publisher.endpoint(),
        engine.replayer.endpoint
    )
}

/// Whether an unfinished snapshot lies in the folder.
fn is_being_written(folder: &TempDir) -> bool {
    let files = std::fs::read_dir(folder.path().join("snapshots")).into_iter().flatten().flatten();
    files.into_iter().any(|file| file.file_name().to_string_lossy().ends_with(".partial"))
}

pub(crate) fn killed_in_a_snapshot(trial: &mut Trial) {
    ended_in_a_snapshot(trial, "-KILL");
}

pub(crate) fn terminated_in_a_snapshot(trial: &mut Trial) {
    ended_in_a_snapshot(trial, "-TERM");
}

/// Ends a daemon while a snapshot of it is half written, and starts it again.
fn ended_in_a_snapshot(trial: &mut Trial, signal: &str) {
    let (folder, mut engine) = (folder(), Engine::new());
    let config = configure_serve(folder.path(), "", &with_snapshots(&folder, &engine));
    let start = || Daemon::serve(Arc::clone(&folder), &["--config", text(&config)]);
    let mut daemon = start();
    engine.await_subscription();
    for seed in 1..60 {
        engine.store(&prompt(seed, 2048 * BLOCK_SIZE));
    }
    let mut last = 59;
    for _ in 0..3 {
        until("all of it is known", || {
            daemon.device(&prompt(last, 2048 * BLOCK_SIZE), Worker::new(1, 0)) == Some(2048)
        });
        let watch = Watch::begin(daemon.process.id());
        let by = Instant::now() + Duration::from_secs(20);
        // It has changed since the last snapshot, so another one is due.
        last += 1;
        engine.store(&prompt(last, 2048 * BLOCK_SIZE));
        while !is_being_written(&folder) && Instant::now() < by {
            std::thread::sleep(Duration::from_micros(200));
        }
        trial.count("snapshots interrupted", u64::from(is_being_written(&folder)));
        daemon.process.signal(signal);
        // Of a process that is gone nothing can be read.
        drop(watch);
        let code = daemon.process.ended();
        trial.must(code == (signal == "-TERM").then_some(0), || format!("{signal} ended it with {code:?}"));
        trial.must(signal == "-KILL" || !is_being_written(&folder), || "an unfinished snapshot is left".to_owned());
        daemon = start();
        engine.await_subscription();
        trial.must(!is_being_written(&folder), || "an unfinished snapshot stays".to_owned());
    }
    until("all of it is known", || daemon.device(&prompt(last, 2048 * BLOCK_SIZE), Worker::new(1, 0)) == Some(2048));
    until("the worker is exact again", || daemon.status().workers[0].trust.level == TrustLevel::Exact);
    let refused: u64 = daemon.counter("snapshots_failed");
    trial.count("snapshots_failed", refused);
    let (watch, bystander) = (Watch::begin(daemon.process.id()), Bystander::begin(asks_for_all(&daemon)));
    std::thread::sleep(Duration::from_millis(300));
    trial.answered(bystander.end());
    trial.saw(watch.end(), 320);
    trial.must(daemon.process.end("-TERM") == Some(0), || "it does not end".to_owned());
}

/// Asks for the prompt that the first batch stored.
fn asks_for_all(daemon: &Daemon) -> impl FnMut() -> Result<(), String> + Send + use<> {
    let mut client = daemon.client();
    let space = client.space("m", None).expect("the space").id;
    let tokens = prompt(1, 2048 * BLOCK_SIZE);
    move || {
        let reply = client.route(&RouteRequest::new(space, Prompt::of_tokens(&tokens)));
        let reply = reply.map_err(|error| error.to_string())?;
        let device = reply.candidates.first().map(|best| best.overlap.device);
        if device == Some(2048) { Ok(()) } else { Err(format!("{device:?} blocks of 2048")) }
    }
}

// ---- memory ---------------------------------------------------------------------------------------------------------------

/// Memory that the daemon may have, bytes.
const MEMORY_BYTES_MAX: u64 = 160 << 20;

/// How the memory of a process is limited.
enum Limit {
    /// A cgroup of its own, by its folder.
    Group(PathBuf),
    /// Of address space, which is all that an unprivileged process can limit.
    AddressSpace,
}

impl Limit {
    fn set() -> Self {
        let name = format!("kvrouted-attack-{}", std::process::id());
        // Version 2 and version 1, each below the group that this process is in, or at the root.
        let own = std::fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
        for (root, controller, file) in
            [("/sys/fs/cgroup", "", "memory.max"), ("/sys/fs/cgroup/memory", "memory", "memory.limit_in_bytes")]
        {
            let line =
                own.lines().map(|line| line.splitn(3, ':').collect::<Vec<_>>()).find(|parts| parts[1] == controller);
            let below = line.map(|parts| format!("{root}{}", parts[2])).filter(|path| Path::new(path).is_dir());
            let group = PathBuf::from(below.unwrap_or_else(|| root.to_owned())).join(&name);
            if std::fs::create_dir(&group).is_ok() {
                // A folder that is no group has no such file.
                let is_group = group.join(file).exists();
                if is_group && std::fs::write(group.join(file), MEMORY_BYTES_MAX.to_string()).is_ok() {
                    // Without swap. Where there is no such file, there is no swap to turn off.
                    let _ = std::fs::write(group.join("memory.swap.max"), "0");
                    return Self::Group(group);
                }
                let _ = std::fs::remove_dir(&group);
            }
        }
        Self::AddressSpace
    }

    fn command(&self, config: &Path) -> Command {
        let mut command = Command::new("sh");
        let first = match self {
            Self::Group(group) => format!("echo $$ > {}/cgroup.procs", group.display()),
            Self::AddressSpace => format!("ulimit -v {}", (MEMORY_BYTES_MAX >> 10) * 8),
        };
        command.args(["-c", &format!("{first} && exec \"$0\" \"$@\""), env!("CARGO_BIN_EXE_kvrouted")]);
        command.args(["serve", "--config", text(config)]).env_remove("RUST_LOG");
        command
    }
}

impl Drop for Limit {
    fn drop(&mut self) {
        if let Self::Group(group) = self {
            // Its last process may not be gone yet.
            until("the group is empty", || std::fs::remove_dir(&*group).is_ok());
        }
    }
}

pub(crate) fn memory_runs_out(trial: &mut Trial) {
    let limit = Limit::set();
    let (folder, mut engine) = (folder(), Engine::new());
    let config = configure_serve(folder.path(), "cores = 1", &with_snapshots(&folder, &engine));
    let process = Process::spawn(folder.path(), "daemon", limit.command(&config));
    let mut daemon = Daemon::served_by(process, Arc::clone(&folder));
    engine.await_subscription();
    engine.store(&prompt(1, 8 * BLOCK_SIZE));
    until("the engine is heard", || daemon.device(&prompt(1, 8 * BLOCK_SIZE), Worker::new(1, 0)) == Some(8));
    until("a snapshot is written", || daemon.counter("snapshots_written") > 0);
    // More than it may have, all of it within the bounds of its configuration.
    let attackers = Attackers::start("send_large_frames", 2, text(&daemon.socket()), trial.lasts());
    let by = Instant::now() + trial.lasts() + Duration::from_secs(5);
    while Instant::now() < by && daemon.process.is_running() {
        std::thread::sleep(Duration::from_millis(20));
    }
    let is_killed = !daemon.process.is_running();
    trial.count(if matches!(limit, Limit::Group(_)) { "by a cgroup" } else { "by the address space" }, 1);
    trial.count("killed by the kernel", u64::from(is_killed));
    drop(attackers);
    let log = daemon.process.log();
    trial.must(!log.contains("panicked"), || log.clone());
    drop(daemon);
    // The next one takes the stale socket's place and knows what the first one knew.
    let mut again = Daemon::serve(Arc::clone(&folder), &["--config", text(&config)]);
    engine.await_subscription();
    until("it knows what it knew", || again.device(&prompt(1, 8 * BLOCK_SIZE), Worker::new(1, 0)) == Some(8));
    let (watch, bystander) = (Watch::begin(again.process.id()), Bystander::begin(asks(&again.socket())));
    std::thread::sleep(Duration::from_millis(300));
    trial.answered(bystander.end());
    trial.saw(watch.end(), 160);
    trial.must(again.process.end("-TERM") == Some(0), || "it does not end".to_owned());
}
