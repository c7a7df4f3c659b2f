//! The child against the real daemon, if it is built.

use std::time::{Duration, Instant};

use kvrouted::client::{AsyncClient, SteadyOptions};
use kvrouted::ids::Worker;
use rustix::process::{Pid, Signal, kill_process, test_kill_process};

use super::plan::tests::{engine, of_model};
use super::*;

const PATIENCE: Duration = Duration::from_secs(30);

/// The daemon's program as the environment names it or the root package builds it; `None` = it is not built.
fn built() -> Option<PathBuf> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../target");
    let named = std::env::var_os("KVROUTED_BIN").map(PathBuf::from);
    let places = named.into_iter().chain(["debug", "release"].map(|profile| root.join(profile).join("kvrouted")));
    places.into_iter().find(|place| place.is_file())
}

fn options() -> Option<DaemonOptions> {
    let program = built();
    if program.is_none() {
        // Past the test harness, which shows what tests print only if they fail; scripts/test collects these lines.
        let line =
            "\nskipped: the daemon as a child of the gateway: kvrouted is not built; run cargo build in the root\n";
        std::io::Write::write_all(&mut std::io::stderr().lock(), line.as_bytes()).expect("said");
    }
    program.map(|program| DaemonOptions {
        program: Some(program),
        log_level: "warn".into(),
        ..DaemonOptions::default()
    })
}

fn starter() -> DaemonStarter {
    DaemonStarter::new(Mode::Off).expect("a thread")
}

fn plan(engines: &[PlannedEngine]) -> FleetPlan {
    FleetPlan::of(engines)
}

async fn running(daemon: &DaemonProcess) -> u32 {
    daemon.ready(Instant::now() + PATIENCE).await.expect("the daemon runs");
    let DaemonState::Running { pid } = daemon.state() else { panic!("{:?}", daemon.state()) };
    pid
}

/// Waits until the state holds.
async fn until(daemon: &DaemonProcess, holds: impl Fn(&DaemonState) -> bool) -> DaemonState {
    let mut states = daemon.states.clone();
    let state = tokio::time::timeout(PATIENCE, states.wait_for(|state| holds(state))).await;
    state.expect("in time").expect("a supervisor").clone()
}

fn client(daemon: &DaemonProcess) -> AsyncClient {
    AsyncClient::new(daemon.socket(), SteadyOptions::default())
}

/// Waits until the daemon has these workers.
async fn has_workers(client: &AsyncClient, wanted: &[Worker]) {
    let begun = Instant::now();
    loop {
        let mut workers: Vec<_> =
            client.workers(None).await.unwrap_or_default().iter().map(|info| info.worker).collect();
        workers.sort_unstable();
        if workers == wanted {
            return;
        }
        assert!(begun.elapsed() < PATIENCE, "{workers:?} instead of {wanted:?}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

fn signal(pid: u32, signal: Signal) {
    let pid = i32::try_from(pid).ok().and_then(Pid::from_raw).expect("a process id");
    kill_process(pid, signal).expect("the process is there");
}

fn is_alive(pid: u32) -> bool {
    i32::try_from(pid).ok().and_then(Pid::from_raw).is_some_and(|pid| test_kill_process(pid).is_ok())
}

#[tokio::test]
async fn the_daemon_has_the_engines_ranks_and_learns_of_more_without_a_restart() {
    let Some(options) = options() else { return };
    let daemon = DaemonProcess::start_planned(starter(), options, plan(&[engine(1, &[5557, 5558])])).expect("a child");
    let pid = running(&daemon).await;
    let client = client(&daemon);
    client.connected().await.expect("a connection");
    has_workers(&client, &[Worker::new(1, 0), Worker::new(1, 1)]).await;
    let space = client.space("m", None, None).expect("the model's space");
    assert_eq!(space.scheme.map(|scheme| scheme.block_size), Some(16));

    daemon.update_planned(plan(&[engine(1, &[5557]), engine(u64::MAX, &[])]));
    has_workers(&client, &[Worker::new(1, 0), Worker::new(u64::MAX, 0)]).await;
    assert_eq!((running(&daemon).await, daemon.restarts()), (pid, 0));
    let folder = daemon.folder.socket().parent().expect("a folder").to_owned();
    assert!(folder.exists());
    daemon.stop().await;
    assert!(!is_alive(pid) && !folder.exists(), "nothing is left");
}

#[tokio::test]
async fn a_daemon_that_is_killed_is_started_again() {
    let Some(options) = options() else { return };
    let daemon = DaemonProcess::start_planned(starter(), options, plan(&[engine(1, &[5557])])).expect("a child");
    let pid = running(&daemon).await;
    signal(pid, Signal::KILL);
    let next = until(&daemon, |state| matches!(state, DaemonState::Running { pid: now } if *now != pid)).await;
    assert!(matches!(next, DaemonState::Running { .. }));
    assert_eq!(daemon.restarts(), 1);
    let client = client(&daemon);
    client.connected().await.expect("a connection");
    has_workers(&client, &[Worker::new(1, 0)]).await;
    daemon.stop().await;
}

#[tokio::test]
async fn the_first_model_starts_the_daemon_and_a_new_model_starts_it_again() {
    let Some(options) = options() else { return };
    let daemon = DaemonProcess::start_planned(starter(), options, plan(&[])).expect("a child");
    assert_eq!(daemon.state(), DaemonState::NoModels);
    daemon.update_planned(plan(&[engine(1, &[5557])]));
    let pid = running(&daemon).await;
    daemon.update_planned(plan(&[engine(1, &[5557]), of_model(engine(2, &[5557]), "other")]));
    until(&daemon, |state| matches!(state, DaemonState::Running { pid: now } if *now != pid)).await;
    let client = client(&daemon);
    client.connected().await.expect("a connection");
    assert!(client.space("m", None, None).is_ok() && client.space("other", None, None).is_ok());
    has_workers(&client, &[Worker::new(1, 0), Worker::new(2, 0)]).await;
    assert_eq!(daemon.restarts(), 0, "it did not end by itself");
    daemon.stop().await;
}

#[tokio::test]
async fn a_program_that_ends_at_once_is_an_error_with_its_last_words() {
    let folder = tempfile::tempdir().expect("a folder");
    let program = folder.path().join("kvrouted");
    std::fs::write(&program, "#!/bin/sh\necho 'the cache is on fire' >&2\nexit 3\n").expect("a script");
    std::fs::set_permissions(&program, std::os::unix::fs::PermissionsExt::from_mode(0o700)).expect("its mode");
    let options = DaemonOptions { program: Some(program), ..DaemonOptions::default() };
    let daemon = DaemonProcess::start_planned(starter(), options, plan(&[engine(1, &[5557])])).expect("a supervisor");
    let error = daemon.ready(Instant::now() + PATIENCE).await.expect_err("it ended");
    let text = error.to_string();
    assert!(text.contains("exit status: 3") && text.contains("the cache is on fire"), "{text}");
    until(&daemon, |_| daemon.restarts() > 1).await;
    daemon.stop().await;
}
