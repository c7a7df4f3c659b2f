//! Files, disks and descriptors: too few descriptors, a disk that is full, files of workers that are no files, and
//! endpoints that cannot be.

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvrouted::ids::Worker;

use crate::attackers::{Attackers, Orders, Role};
use crate::kit::replayer::Engine;
use crate::kit::{Daemon, Process, configure_serve, folder, kvrouted, prompt, replace, run, skipped, text, until};
use crate::scene::{Scene, asks, snapshot_tables, worker_table};
use crate::trial::{Bystander, Trial, Watch};

pub(crate) const ROLES: &[(&str, Role)] = &[("spoil_worker_files", spoil_worker_files)];

pub(crate) fn few_descriptors(trial: &mut Trial) {
    for open_files in [4, 5, 6, 7, 8, 9, 12, 16, 32, 48] {
        let folder = folder();
        let config = configure_serve(folder.path(), "", "[[worker]]\nid = 1\n");
        let flags = ["serve", "--config", text(&config)];
        let mut process = Process::start_limited(folder.path(), "daemon", open_files, &flags);
        let code = process.ended();
        let log = process.log();
        // The loader itself may have too few.
        let is_clear = code == Some(71) && log.contains("open files") || code == Some(127);
        trial.must(is_clear && !log.contains("panicked"), || format!("{open_files} descriptors: {code:?}: {log}"));
        trial.must(!folder.path().join("s").exists(), || format!("{open_files} descriptors: a socket file is left"));
        trial.count("starts refused", 1);
    }
}

/// A disk of its own. Dropped, it is unmounted.
struct Disk(PathBuf);

impl Disk {
    /// `None` where this process may not mount.
    fn mount(at: &Path, bytes: u32) -> Option<Self> {
        std::fs::create_dir(at).expect("a folder");
        let size = format!("size={bytes}");
        let mounted = Command::new("mount").args(["-t", "tmpfs", "-o", &size, "tmpfs", text(at)]).output();
        mounted.is_ok_and(|output| output.status.success()).then(|| Self(at.to_owned()))
    }

    /// Fills what is left of it.
    fn fill(&self) {
        let mut file = std::fs::File::create(self.0.join("full")).expect("a file");
        while file.write_all(&[0; 4096]).is_ok() {}
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        // Its user may still be ending.
        let _ = Command::new("umount").args(["-l", text(&self.0)]).status();
    }
}

/// The tables of a daemon that writes snapshots and a journal below a folder.
fn writing(folder: &Path, engine: &Engine) -> String {
    format!("[journal]\ndir = \"{}\"\n{}", folder.join("journal").display(), snapshot_tables(folder, engine))
}

pub(crate) fn full_disk(trial: &mut Trial) {
    let (folder, mut engine) = (folder(), Engine::new());
    let Some(disk) = Disk::mount(&folder.path().join("disk"), 4 << 20) else {
        return skipped("a full disk", "only root may mount one");
    };
    let config = configure_serve(folder.path(), "", &writing(&disk.0, &engine));
    // Its log is on the disk, too.
    let process = Process::start(&disk.0, "daemon", &["serve", "--config", text(&config)]);
    let daemon = Daemon::served_by(process, Arc::clone(&folder));
    engine.await_subscription();
    engine.store(&prompt(1, 128));
    until("the engine is heard", || daemon.device(&prompt(1, 128), Worker::new(1, 0)) == Some(8));
    let watch = Watch::begin(daemon.process.id());
    let bystander = Bystander::begin(asks(&daemon.socket()));
    disk.fill();
    // Every decision is written, every snapshot has changed.
    let mut seed = 2;
    until("writes fail", || {
        engine.store(&prompt(seed, 256));
        seed += 1;
        daemon.counter("snapshots_failed") > 1 && daemon.counter("journal_writes_failed") > 0
    });
    std::thread::sleep(trial.lasts());
    for counter in ["snapshots_failed", "journal_writes_failed", "journal_unwritten"] {
        trial.must_count(counter, daemon.counter(counter), 1);
    }
    trial.answered(bystander.end());
    trial.used(watch.end(), 160);
    // With room again, it writes again.
    std::fs::remove_file(disk.0.join("full")).expect("removed");
    let written = daemon.counter("snapshots_written");
    engine.store(&prompt(seed, 256));
    until("a snapshot is written again", || daemon.counter("snapshots_written") > written);
    ends_well(trial, daemon);
    drop(disk);
}

/// The daemon ends as it should, and said of nothing that it panicked.
fn ends_well(trial: &mut Trial, mut daemon: Daemon) {
    let code = daemon.process.end("-TERM");
    let log = daemon.process.log();
    trial.must(code == Some(0), || format!("it ended with {code:?}"));
    trial.must(!log.contains("panicked"), || "it panicked".to_owned());
}

pub(crate) fn file_size_limit(trial: &mut Trial) {
    let (folder, mut engine) = (folder(), Engine::new());
    let config = configure_serve(folder.path(), "", &writing(folder.path(), &engine));
    let mut command = Command::new("sh");
    // In blocks of 512 bytes.
    command.args(["-c", "ulimit -f 64 && exec \"$0\" \"$@\"", env!("CARGO_BIN_EXE_kvrouted")]);
    command.args(["serve", "--config", text(&config)]).env_remove("RUST_LOG");
    let daemon = Daemon::served_by(Process::spawn(folder.path(), "daemon", command), Arc::clone(&folder));
    engine.await_subscription();
    engine.store(&prompt(1, 128));
    until("the engine is heard", || daemon.device(&prompt(1, 128), Worker::new(1, 0)) == Some(8));
    let watch = Watch::begin(daemon.process.id());
    let bystander = Bystander::begin(asks(&daemon.socket()));
    for seed in 2..40 {
        engine.store(&prompt(seed, 4096));
    }
    until("writes fail", || daemon.counter("snapshots_failed") > 0 && daemon.counter("journal_writes_failed") > 0);
    std::thread::sleep(trial.lasts() / 2);
    for counter in ["snapshots_failed", "journal_writes_failed"] {
        trial.must_count(counter, daemon.counter(counter), 1);
    }
    trial.answered(bystander.end());
    trial.used(watch.end(), 160);
    ends_well(trial, daemon);
}

/// What becomes of the process that reads the daemon's log.
#[derive(Clone, Copy)]
enum LogReader {
    Stops,
    Leaves,
}

pub(crate) fn log_reader_stops(trial: &mut Trial) {
    log_reader(trial, LogReader::Stops);
}

pub(crate) fn log_reader_leaves(trial: &mut Trial) {
    log_reader(trial, LogReader::Leaves);
}

fn log_reader(trial: &mut Trial, becomes: LogReader) {
    let (folder, engine) = (folder(), Engine::new());
    let tables = format!("[log]\nlevel = \"trace\"\n{}", worker_table(&engine));
    let config = configure_serve(folder.path(), "", &tables);
    let (reader, writer) = std::io::pipe().expect("a pipe");
    let mut filler = writer.try_clone().expect("a descriptor");
    let mut command = kvrouted(&["serve", "--config", text(&config)]);
    command.stdout(Stdio::null()).stderr(writer);
    let process = Process::of(command.spawn().expect("the binary runs"), folder.path());
    drop(command);
    // Nothing reads from now on, or nothing can be written any more.
    let reader = matches!(becomes, LogReader::Stops).then_some(reader);
    let scene = Scene::of(Daemon::served_by(process, folder), engine);
    // Until the pipe is full, or broken.
    std::thread::spawn(move || while filler.write_all(&[b'.'; 4096]).is_ok() {});
    for _ in 0..100 {
        // Each is worth a line.
        scene.daemon.process.signal("-HUP");
        std::thread::sleep(trial.lasts() / 100);
    }
    trial.must_count("config_reloads", scene.counter("config_reloads"), 1);
    scene.end(trial, 128);
    drop(reader);
}

pub(crate) fn worker_files(trial: &mut Trial) {
    let files = folder();
    let path = files.path().join("workers");
    std::fs::create_dir(&path).expect("a folder");
    let tables = format!("[discovery]\npath = \"{}\"\ngrace_ms = 100\nrescan_ms = 100\n", path.display());
    let scene = Scene::configured("", &tables);
    Attackers::start("spoil_worker_files", 1, text(&path), trial.lasts()).end(trial);
    trial.must_count("discovery_files_unusable", scene.counter("discovery_files_unusable"), 10);
    let is_found = scene.is_found("source_unusable");
    trial.must(is_found, || "no finding names the files that cannot be used".to_owned());
    // A good file is still read.
    replace(&path.join("good.json"), r#"{"id": 77}"#);
    until("a good file is read", || scene.daemon.status().workers.iter().any(|one| one.worker == Worker::new(77, 0)));
    // What a parser makes of 1 MiB, and a thousand workers that come and go.
    scene.end(trial, 128);
}

/// Pipes, links to themselves and to devices, huge files, thousands of files, files that change while they are read.
fn spoil_worker_files(orders: &mut Orders) {
    let folder = PathBuf::from(&orders.at);
    let at = |name: &str| folder.join(name);
    let made = Command::new("mkfifo").arg(at("pipe.json")).status().expect("mkfifo");
    assert!(made.success());
    for (name, to) in [
        ("self.json", "self.json"),
        ("one.json", "two.json"),
        ("two.json", "one.json"),
        ("zero.json", "/dev/zero"),
        ("mem.toml", "/proc/self/mem"),
        ("up.json", ".."),
    ] {
        std::os::unix::fs::symlink(to, at(name)).expect("a link");
    }
    let huge = std::fs::File::create(at("huge.toml")).expect("a file");
    huge.set_len(1 << 40).expect("a file with a hole");
    std::fs::write(at("bomb.json"), "[".repeat(1 << 20)).expect("written");
    std::fs::write(at("nul.json"), "{\"id\": 9, \"endpoint\": \"ipc:///tmp/x\\u0000y\"}").expect("written");
    orders.count("files", 10);
    let mut round = 0_u64;
    while orders.goes_on() {
        for file in 0..200 {
            let id = 1000 + round % 7 * 200 + file;
            std::fs::write(at(&format!("w{file}.json")), format!("{{\"id\": {id}}}")).expect("written");
        }
        // Cut and written again while they are read, and removed.
        let mut torn = std::fs::File::create(at("torn.json")).expect("a file");
        let _ = torn.write_all(b"[{\"id\": 5}").and_then(|()| torn.set_len(3)).and_then(|()| torn.write_all(b"}]"));
        for file in (0..200).filter(|file| (file + round).is_multiple_of(3)) {
            std::fs::remove_file(at(&format!("w{file}.json"))).expect("removed");
        }
        orders.count("files", 201);
        round += 1;
        std::thread::sleep(Duration::from_millis(50));
    }
    for file in 0..200 {
        // A third of them is gone.
        let _ = std::fs::remove_file(at(&format!("w{file}.json")));
    }
}

/// Endpoints that name nothing that can be.
fn absurd_endpoints() -> Vec<String> {
    let long = "x".repeat(5000);
    let fixed = [
        "",
        "tcp://",
        "tcp://:",
        "tcp://127.0.0.1:99999999999",
        "tcp://127.0.0.1:-1",
        "tcp://[::1",
        "tcp://\u{0}:1",
        "ipc://",
        "ipc://\u{0}",
        "ipc:///tmp/x\u{0}y",
        "inproc://a",
        "udp://127.0.0.1:1",
        "tcp://a b:1",
        "tcp://127.0.0.1",
        "tcp://..:1",
        "tcp://\u{202e}:1",
        "tcp://%00:1",
    ];
    let mut all: Vec<String> = fixed.map(str::to_owned).into();
    all.extend([format!("tcp://{long}:1"), format!("ipc://{long}"), format!("{long}://a:1")]);
    all
}

pub(crate) fn absurd_workers(trial: &mut Trial) {
    let scene = Scene::configured("", "");
    let began = Instant::now();
    for (id, endpoint) in (10..).zip(absurd_endpoints()) {
        // A zero byte cannot be an argument: it comes by a file of workers, which another attack writes.
        if endpoint.contains('\0') {
            continue;
        }
        for field in ["endpoint", "replay", "load"] {
            let rest = if field == "replay" { ",endpoint=tcp://127.0.0.1:1" } else { "" };
            let output = scene.daemon.worker(&["add", &format!("id={id},{field}={endpoint}{rest}")]);
            let said = String::from_utf8_lossy(&output.stderr).into_owned();
            // An empty one is none at all.
            let is_refused = !output.status.success() && said.len() < 2000 && !said.contains("panicked");
            trial.must(is_refused || endpoint.is_empty(), || format!("{field}={endpoint:.60}: {said:.400}"));
            trial.count("refused", u64::from(is_refused));
        }
    }
    trial.count("ms in all", began.elapsed().as_millis() as u64);
    // The same at the start, by the command line and by a file.
    let folder = folder();
    for endpoint in absurd_endpoints().iter().filter(|endpoint| !endpoint.is_empty()) {
        let quoted = serde_json::to_string(endpoint).expect("text");
        let config = configure_serve(folder.path(), "", &format!("[[worker]]\nid = 1\nendpoint = {quoted}\n"));
        let output = run(&["serve", "--config", text(&config), "--check"]);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        trial.must(output.status.code() == Some(64), || format!("{endpoint:.60}: {:?} {said:.400}", output.status));
        trial.count("refused at the start", 1);
    }
    scene.end(trial, 96);
}
