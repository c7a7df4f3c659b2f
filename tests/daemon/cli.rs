//! The command line as a script uses it: exit codes, output streams, and commands that must bind nothing.

use std::ffi::OsString;
use std::path::Path;
use std::process::{Output, Stdio};

use kvrouted::cli::{self, Cli, Exit, Failure, Prepared, ServeArgs};
use kvrouted::config::{Config, FullReports, IoSetting, Salts};
use kvrouted::ids::{Scheme, Window, Worker};

use crate::kit::{kvrouted, run};

fn stdout(output: &Output) -> &str {
    std::str::from_utf8(&output.stdout).expect("UTF-8")
}

fn stderr(output: &Output) -> &str {
    std::str::from_utf8(&output.stderr).expect("UTF-8")
}

fn serve_args(args: &[&str]) -> ServeArgs {
    let args = ["kvrouted", "serve"].iter().chain(args).map(OsString::from);
    match cli::parse(args) {
        Ok(Cli { command: cli::Command::Serve(args) }) => *args,
        other => panic!("{other:?}"),
    }
}

fn prepared(args: &[&str]) -> Config {
    match serve_args(args).prepare() {
        Ok(Prepared::Run(config)) => *config,
        other => panic!("{other:?}"),
    }
}

fn refused(args: &[&str]) -> Failure {
    serve_args(args).prepare().expect_err("the flags are bad")
}

#[test]
fn a_daemon_without_a_file_is_what_its_flags_say() {
    let config = prepared(&[
        "--socket",
        "/tmp/k.sock",
        "--model",
        "m",
        "--block-size",
        "16",
        "--worker",
        "id=1,endpoint=tcp://127.0.0.1:5557,replay=tcp://127.0.0.1:5657",
        "--worker",
        "id=1,dp_rank=1,topic=kv,endpoint=ipc:///run/e1,name=second,capacity_blocks=100,device=cpu,weight=2",
        "--metrics-port",
        "9100",
        "--pin",
        "--salts",
        "none",
        "--full-reports",
        "none",
    ]);
    assert_eq!(config.spaces[0].full_reports, FullReports::None);
    assert_eq!(config.serve.socket, Path::new("/tmp/k.sock"));
    assert_eq!(config.serve.admin_socket, Path::new("/tmp/k.sock.admin"));
    assert!(config.serve.pin);
    assert_eq!(config.metrics.port, 9100);
    assert_eq!(config.spaces[0].scheme(), Some(Scheme { block_size: 16, window: Window::Plain }));
    let [first, second] = config.workers.as_slice() else { panic!("{:?}", config.workers) };
    assert_eq!((first.worker, first.name.as_str()), (Worker::new(1, 0), "w1"));
    assert_eq!(first.events.as_ref().and_then(|e| e.replay.as_deref()), Some("tcp://127.0.0.1:5657"));
    assert_eq!((second.worker, second.name.as_str(), second.capacity_blocks), (Worker::new(1, 1), "second", 100));
    assert_eq!((second.weight, second.events.as_ref().map(|e| e.topic.as_str())), (2.0, Some("kv")));
}

#[test]
fn a_bad_worker_flag_is_named_with_every_problem() {
    let failure =
        refused(&["--model", "m", "--worker", "id=1,endpont=tcp://h:1", "--worker", "id=x,endpoint=tcp://*:1"]);
    assert_eq!(failure.exit, Exit::Usage);
    for words in
        ["worker[0].endpont: unknown field; did you mean `endpoint`?", "worker[1].id: expected an integer", "binds"]
    {
        assert!(failure.message.contains(words), "{words}: {}", failure.message);
    }
}

#[test]
fn usage_errors_exit_64_and_help_exits_0() {
    for args in [
        &[][..],
        &["nonsense"],
        &["serve"],
        &["serve", "--model", "m", "--config", "x.toml"],
        &["serve", "--modle", "m"],
        &["query", "--model", "m"],
        &["query", "--tokens", "1"],
        &["query", "--model", "m", "--tokens", "1", "--batch", "x"],
        &["query", "--model", "m", "--tokens", "1,x"],
        &["query", "--model", "m", "--tokens-file", "/no/such/file"],
        &["query", "--model", "m", "--batch", "x", "--salt", "s"],
        &["status", "--nonsense"],
        &["doctor", "--nonsense"],
    ] {
        let output = run(args);
        assert_eq!(output.status.code(), Some(64), "{args:?}: {}", stderr(&output));
        assert!(stdout(&output).is_empty() && !stderr(&output).is_empty(), "{args:?}");
    }
    for args in [
        &["--help"][..],
        &["--version"],
        &["serve", "--help"],
        &["query", "--help"],
        &["status", "--help"],
        &["doctor", "--help"],
    ] {
        let output = run(args);
        assert_eq!(output.status.code(), Some(0), "{args:?}");
        assert!(!stdout(&output).is_empty() && stderr(&output).is_empty(), "{args:?}");
    }
}

#[test]
fn what_was_asked_for_and_cannot_be_written_is_a_failure() {
    for args in [&["--help"][..], &["--version"], &["serve", "--help"], &["completions", "bash"]] {
        let full = std::fs::OpenOptions::new().write(true).open("/dev/full").expect("a full device");
        let output = kvrouted(args).stdout(full).output().expect("kvrouted");
        assert_eq!(output.status.code(), Some(74), "{args:?}: {}", stderr(&output));
    }
}

#[test]
fn a_negative_number_is_told_the_bounds() {
    for (flag, field, bounds) in [
        ("--block-size", "space[0].block_size", "0 to 65536"),
        ("--cores", "serve.cores", "0 to 256"),
        ("--metrics-port", "metrics.port", "0 to 65535"),
    ] {
        let output = run(&["serve", "--check", "--model", "m", flag, "-3"]);
        assert_eq!(output.status.code(), Some(64), "{flag}: {}", stderr(&output));
        let said = stderr(&output);
        assert!(said.contains(flag) && said.contains(&format!("out of range, must be {bounds}")), "{field}: {said}");
    }
}

#[test]
fn the_help_of_serve_says_the_defaults_there_are() {
    let output = run(&["serve", "--help"]);
    let config = prepared(&["--model", "m"]);
    let salts = if config.spaces[0].salts == Salts::Possible { "possible" } else { "none" };
    let io = IoSetting::NAMES[config.serve.io as usize];
    for (flag, default) in [
        ("--socket ", config.serve.socket.to_str().expect("UTF-8")),
        ("--salts ", salts),
        ("--full-reports ", if config.spaces[0].full_reports == FullReports::Possible { "possible" } else { "none" }),
        ("--io ", io),
        ("--log-level ", config.log.level),
    ] {
        let line = stdout(&output).lines().find(|line| line.contains(flag)).expect(flag);
        assert!(line.ends_with(&format!("[default: {default}]")), "{line}");
    }
}

#[test]
fn check_says_ok_or_every_problem_and_binds_nothing() {
    let dir = tempfile::tempdir().expect("a folder");
    let socket = dir.path().join("k.sock");
    let file = dir.path().join("k.toml");
    let path = file.to_str().expect("UTF-8");
    let text = format!(
        "[serve]\nsocket = \"{}\"\n[[space]]\nmodel = \"m\"\n[[worker]]\nid = 1\n[[worker]]\nid = 2\n",
        socket.display()
    );
    std::fs::write(&file, &text).expect("written");
    let output = run(&["serve", "--config", path, "--check"]);
    assert_eq!((output.status.code(), stdout(&output)), (Some(0), "ok: 1 space, 2 workers\n"));
    std::fs::write(&file, format!("{text}[[worker]]\nid = 3\nurl = \"http://10.0.0.8:30000\"\n")).expect("written");
    let output = run(&["serve", "--config", path, "--check"]);
    assert_eq!(stdout(&output), "ok: 1 space, 2 workers, 1 engine named by url\n");

    std::fs::write(&file, text.replace("id = 2", "id = 1\nreplya = 2").replace("[serve]", "[serve]\ncores = -1"))
        .expect("written");
    for args in [&["serve", "--config", path, "--check"][..], &["serve", "--config", path]] {
        let output = run(args);
        assert_eq!(output.status.code(), Some(64), "{}", stderr(&output));
        assert!(stdout(&output).is_empty());
        for line in [
            ":2:9: serve.cores: out of range",
            ":9:6: worker[1].id: worker 1",
            ":10:1: worker[1].replya: unknown field; did you mean `replay`?",
        ] {
            assert!(stderr(&output).contains(&format!("{path}{line}")), "{line}: {}", stderr(&output));
        }
        assert!(!socket.exists());
    }
}

#[test]
fn the_example_goes_to_standard_output_and_is_a_valid_file() {
    let output = run(&["serve", "--example-config"]);
    assert_eq!(output.status.code(), Some(0));
    let dir = tempfile::tempdir().expect("a folder");
    let file = dir.path().join("k.toml");
    std::fs::write(&file, stdout(&output)).expect("written");
    let output = run(&["serve", "--check", "--config", file.to_str().expect("UTF-8")]);
    assert_eq!(stdout(&output), "ok: 1 space, 1 worker\n", "{}", stderr(&output));
}

#[test]
fn a_reader_that_closes_the_pipe_ends_the_command_quietly() {
    let (reader, writer) = std::io::pipe().expect("a pipe");
    drop(reader);
    let output = kvrouted(&["serve", "--example-config"])
        .stdout(writer)
        .stderr(Stdio::piped())
        .spawn()
        .and_then(std::process::Child::wait_with_output)
        .expect("the binary runs");
    assert_eq!((output.status.code(), stderr(&output)), (Some(0), ""));
}

#[test]
fn commands_say_when_no_daemon_answers() {
    let dir = tempfile::tempdir().expect("a folder");
    let socket = dir.path().join("none.sock");
    let path = socket.to_str().expect("UTF-8");
    for args in [&["query", "--socket", path, "--model", "m", "--tokens", "1,2"][..], &["status", "--socket", path]] {
        let output = run(args);
        assert_eq!(output.status.code(), Some(69), "{args:?}: {}", stderr(&output));
        assert_eq!(stderr(&output).matches(path).count(), 1, "{}", stderr(&output));
        assert!(stdout(&output).is_empty());
    }
}

#[test]
fn bad_prompts_are_refused_before_anybody_is_asked() {
    let dir = tempfile::tempdir().expect("a folder");
    let batch = dir.path().join("batch.jsonl");
    std::fs::write(&batch, "{\"tokens\":[1]}\n{\"tokens\":\"x\"}\n{}\n").expect("written");
    let path = batch.to_str().expect("UTF-8");
    let output = run(&["query", "--socket", "/no/such/socket", "--model", "m", "--batch", path]);
    assert_eq!(output.status.code(), Some(64));
    for line in ["line 2: ", "line 3: missing field `tokens`"] {
        assert!(stderr(&output).contains(&format!("{path}: {line}")), "{line}: {}", stderr(&output));
    }
}
