//! `kvrouted demo` as a process: its output, and that no process or file of it stays.

#![allow(clippy::unwrap_used, reason = "a test may fail by a panic")]

use std::fs;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use crate::kit::{kvrouted, until};

/// The demo with its folder in `folder`.
fn demo(folder: &Path, arguments: &[&str]) -> Command {
    let mut command = kvrouted(&["demo"]);
    command.args(arguments).env("TMPDIR", folder).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

/// A folder with a path short enough for the sockets in it.
fn folder() -> tempfile::TempDir {
    tempfile::Builder::new().prefix("kvd").tempdir_in("/tmp").unwrap()
}

fn text(bytes: &[u8]) -> &str {
    std::str::from_utf8(bytes).unwrap()
}

fn run(command: &mut Command) -> Output {
    let output = command.output().unwrap();
    assert!(output.status.success(), "{}\n{}", output.status, text(&output.stderr));
    output
}

/// Process ids and command lines of everything that was told of `folder`, zombies left out.
fn processes(folder: &Path) -> Vec<(i32, String)> {
    let entries = fs::read_dir("/proc").unwrap().filter_map(Result::ok);
    let told = entries.filter_map(|entry| {
        let pid = entry.file_name().to_str()?.parse().ok()?;
        let line = fs::read(entry.path().join("cmdline")).ok()?;
        Some((pid, String::from_utf8_lossy(&line).replace('\0', " ")))
    });
    told.filter(|(_, line)| line.contains(folder.to_str().unwrap())).collect()
}

/// Starts a demo that would run for long, and waits until its gateway works.
fn start(folder: &Path) -> Child {
    let mut command = demo(folder, &["--json", "--workers", "2", "--requests", "20000"]);
    let child = command.spawn().unwrap();
    until("the gateway answers", || {
        let kept = fs::read_dir(folder).unwrap().next();
        let log = kept.and_then(|kept| fs::metadata(kept.unwrap().path().join("replies.jsonl")).ok());
        log.is_some_and(|log| log.len() > 0)
    });
    child
}

fn signal(pid: i32, signal: Signal) {
    kill_process(Pid::from_raw(pid).unwrap(), signal).unwrap();
}

#[test]
fn json_is_one_object_with_every_overlap_right() {
    let folder = folder();
    let output = run(&mut demo(folder.path(), &["--json", "--workers", "3", "--requests", "90", "--seed", "7"]));
    let printed = text(&output.stdout);
    assert_eq!(printed.lines().count(), 1, "{printed}");
    let object: Value = serde_json::from_str(printed).unwrap();
    let keys = |value: &Value| value.as_object().unwrap().keys().cloned().collect::<Vec<_>>().join(" ");
    assert_eq!(keys(&object), "events kv latency requests round_robin seed workers wrong_overlaps");
    for policy in ["round_robin", "kv", "latency"] {
        let told = &object[policy];
        assert_eq!(keys(told), "decision_us e2e_s hit_rate imbalance prefill_tokens tpot_s ttft_s");
        assert_eq!(keys(&told["decision_us"]), "p50 p99 p999");
        let means = ["ttft_s", "tpot_s", "e2e_s"].map(|times| {
            assert_eq!(keys(&told[times]), "mean p50 p99");
            told[times]["mean"].as_f64().unwrap()
        });
        // No step of the engines is shorter than one that only decodes: 15 ms.
        assert!(means[0] >= 0.015 && means[1] >= 0.015 && means[2] > means[0], "{policy}: {means:?}");
    }
    assert_eq!(keys(&object["events"]), "batches blocks gaps");
    assert_eq!((&object["seed"], &object["requests"], &object["workers"]), (&7.into(), &90.into(), &3.into()));
    assert_eq!((&object["wrong_overlaps"], &object["events"]["gaps"]), (&0.into(), &0.into()));
    let number = |value: &Value| value.as_f64().unwrap();
    assert!(number(&object["kv"]["hit_rate"]) > number(&object["round_robin"]["hit_rate"]), "{printed}");
    assert!(number(&object["kv"]["prefill_tokens"]) < number(&object["round_robin"]["prefill_tokens"]), "{printed}");
    assert!(number(&object["kv"]["imbalance"]) >= 1.0 && number(&object["kv"]["imbalance"]) <= 3.0, "{printed}");
    assert!(number(&object["events"]["blocks"]) > number(&object["events"]["batches"]), "{printed}");
    let times = ["p50", "p99", "p999"].map(|quantile| number(&object["kv"]["decision_us"][quantile]));
    assert!(times[0] > 0.0 && times.is_sorted(), "{times:?}");
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0, "its folder is gone");
    assert!(processes(folder.path()).is_empty());
}

#[test]
fn a_trace_is_replayed_and_the_table_is_for_people_and_logs_can_be_kept() {
    let folder = folder();
    let trace = folder.path().join("trace.jsonl");
    let lines: String = (0..30)
        .map(|turn| {
            // Three conversations that grow by a block a turn.
            let ids: Vec<u64> = (0..=turn / 3).map(|block| block * 3 + turn % 3).collect();
            let tokens = ids.len() * 512 - 100;
            format!("{{\"timestamp\":{turn},\"input_length\":{tokens},\"output_length\":20,\"hash_ids\":{ids:?}}}\n")
        })
        .collect();
    fs::write(&trace, lines).unwrap();
    let kept = folder.path().join("kept");
    let output = run(demo(folder.path(), &["--workers", "2", "--trace"]).arg(&trace).arg("--keep").arg(&kept));
    let table = text(&output.stdout);
    for part in [
        "prefix hit rate",
        "prefill tokens",
        "load imbalance",
        "TTFT mean / p99",
        "TPOT mean / p99",
        "E2E mean / p99",
        "round trip to the daemon p50 / p99",
        "decision inside the daemon",
        "wrong overlaps: 0 of 180",
    ] {
        assert!(table.contains(part), "{part} is missing in\n{table}");
    }
    for name in ["engine-1.jsonl", "engine-2.jsonl", "replies.jsonl", "daemon.log", "gateway.log"] {
        assert!(kept.join(name).is_file(), "{name} was not kept");
    }
    let replies = fs::read_to_string(kept.join("replies.jsonl")).unwrap();
    assert_eq!(replies.lines().count(), 90);

    let again = demo(folder.path(), &["--keep"]).arg(&kept).output().unwrap();
    assert!(!again.status.success() && text(&again.stderr).contains("is not empty"), "{}", text(&again.stderr));
}

#[test]
fn a_trace_that_is_none_is_refused_before_anything_starts() {
    let folder = folder();
    let output = demo(folder.path(), &["--trace", "/dev/null"]).output().unwrap();
    assert!(!output.status.success());
    assert!(text(&output.stderr).contains("the trace has no requests"), "{}", text(&output.stderr));
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
}

#[test]
fn a_signal_ends_everything_and_removes_the_folder() {
    let folder = folder();
    let mut child = start(folder.path());
    signal(child.id() as i32, Signal::TERM);
    assert_eq!(child.wait().unwrap().code(), Some(128 + 15));
    assert_eq!(processes(folder.path()), []);
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
}

#[test]
fn nothing_outlives_a_demo_that_is_killed() {
    let folder = folder();
    let mut child = start(folder.path());
    assert!(processes(folder.path()).len() >= 4, "two engines, daemon and gateway");
    child.kill().unwrap();
    child.wait().unwrap();
    until("every process has ended", || processes(folder.path()).is_empty());
}

#[test]
fn a_daemon_that_dies_is_named_with_its_log() {
    let folder = folder();
    let child = start(folder.path());
    let running = processes(folder.path());
    let daemon = running.iter().find(|(_, line)| line.contains(" serve --socket ")).unwrap();
    signal(daemon.0, Signal::KILL);
    let output = child.wait_with_output().unwrap();
    assert!(output.status.code().is_some_and(|code| code != 0), "{}", output.status);
    let said = text(&output.stderr);
    assert!(said.contains("the daemon process ended") && said.contains("log"), "{said}");
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
}
