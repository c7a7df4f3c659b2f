//! An engine's own publisher in its own process, started by scripts/engines.

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};

use serde_json::Value;

use crate::kit::{WAIT_MAX, skipped_without_engines};

/// Says that an engine is missing, or fails where it must not be.
pub(crate) fn skip(engine: &str, reason: &str) {
    skipped_without_engines(&format!("{engine}'s publisher"), reason);
}

/// The Python that runs the publisher, fetched if need be, or why there is none.
pub(crate) fn environment(engine: &str) -> Result<PathBuf, String> {
    if std::env::var("KVROUTED_SKIP_ENGINES").is_ok_and(|value| value == "1") {
        return Err("KVROUTED_SKIP_ENGINES is set".into());
    }
    let version = match engine {
        "vllm" => "0.33.0",
        _ => "0.5.23",
    };
    let fetch = root().join("scripts/engines/fetch");
    let fetched = Command::new(&fetch)
        .arg(format!("{engine}=={version}"))
        .output()
        .map_err(|error| format!("{}: {error}", fetch.display()))?;
    if !fetched.status.success() {
        let words = String::from_utf8_lossy(&fetched.stderr);
        let last = words.lines().last().unwrap_or("no reason given").to_string();
        return Err(format!("scripts/engines/fetch ended with {}: {last}", fetched.status));
    }
    Ok(Path::new(String::from_utf8_lossy(&fetched.stdout).trim()).join("venv/bin/python"))
}

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// A publisher of scripts/engines, and the stages it announces.
pub(crate) struct Engine {
    child: Child,
    stages: Receiver<String>,
    log: PathBuf,
}

impl Engine {
    pub(crate) fn start(folder: &Path, python: &Path, engine: &str, options: &[&str]) -> Self {
        let log = folder.join("engine.log");
        let mut child = Command::new(python)
            .arg(root().join("scripts/engines/publish.py"))
            .args(["--engine", engine])
            .args(options)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(std::fs::File::create(&log).unwrap())
            .spawn()
            .unwrap();
        let (sender, stages) = channel();
        let output = BufReader::new(child.stdout.take().unwrap());
        std::thread::spawn(move || output.lines().map_while(Result::ok).try_for_each(|line| sender.send(line)));
        Self { child, stages, log }
    }

    pub(crate) fn next_stage(&self) -> Value {
        match self.stages.recv_timeout(WAIT_MAX) {
            Ok(line) => serde_json::from_str(&line).unwrap_or_else(|error| panic!("{line}: {error}")),
            Err(error) => panic!("the publisher says nothing: {error}\n{}", self.log()),
        }
    }

    /// Waits until everything is published, without a subscriber.
    pub(crate) fn published_before_anybody_asks(&self) {
        assert_eq!(self.next_stage()["stage"], "listening", "{}", self.log());
        assert_eq!(self.next_stage()["stage"], "published", "{}", self.log());
    }

    pub(crate) fn publish_more(&mut self) {
        let id = rustix::process::Pid::from_child(&self.child);
        rustix::process::kill_process(id, rustix::process::Signal::USR1).unwrap();
    }

    /// Says nothing more and keeps its sockets.
    pub(crate) fn pause(&self) {
        rustix::process::kill_process(rustix::process::Pid::from_child(&self.child), rustix::process::Signal::STOP)
            .unwrap();
    }

    pub(crate) fn log(&self) -> String {
        std::fs::read_to_string(&self.log).unwrap_or_default()
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        self.child.kill().and_then(|()| self.child.wait()).ok();
    }
}
