//! The thread that starts the child, starts it again when it ends, and ends it.
//!
//! The child is started from this one thread, because the kernel ends it with the thread that started it. A worker
//! thread of a shared runtime may end at any time.

use std::collections::VecDeque;
use std::path::PathBuf;
use std::process::Stdio;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use kvrouted::client::{AsyncClient, SteadyOptions};
use rustix::process::{Pid, Signal, kill_process};
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, BufReader};
use tokio::process::{Child, ChildStderr, Command};
use tokio::sync::watch;
use tokio::task::JoinHandle;

use super::files::Folder;
use super::log_lines::LogLine;
use super::plan::FleetPlan;
use super::{DaemonOptions, DaemonState};
use crate::limits::{
    CONNECT_PAUSE, DAEMON_STOP_MAX, LOG_LINE_BYTES_MAX, LOG_LINES_SHOWN, RESTART_PAUSE_FIRST, RESTART_PAUSE_MAX,
    RUN_HEALTHY_MIN,
};

/// What the supervisor should do.
#[derive(Clone, Debug)]
pub(super) struct Order {
    /// The fleet that the child should have.
    pub(super) plan: Arc<FleetPlan>,
    /// Whether to end the child and the supervisor.
    pub(super) is_stop: bool,
}

/// See the module.
pub(super) struct Supervisor {
    pub(super) program: PathBuf,
    pub(super) options: DaemonOptions,
    pub(super) folder: Arc<Folder>,
    pub(super) orders: watch::Receiver<Order>,
    pub(super) state: watch::Sender<DaemonState>,
    pub(super) restarts: Arc<AtomicU64>,
}

/// Why one run of the child ended.
enum RunEnd {
    /// As ordered, for good.
    Stopped,
    /// As ordered, to start with other spaces.
    Respaced,
    /// By itself, or it could not be started.
    Died(String),
}

impl Supervisor {
    /// Runs on its thread, to the end of the child.
    pub(super) async fn run(mut self) {
        let mut failures = 0;
        while self.has_spaces().await {
            self.state.send_replace(DaemonState::Starting);
            let started = Instant::now();
            match self.run_child().await {
                RunEnd::Stopped => break,
                RunEnd::Respaced => failures = 0,
                RunEnd::Died(why) => {
                    failures = if started.elapsed() >= RUN_HEALTHY_MIN { 1 } else { failures + 1 };
                    let pause = pause_after(failures);
                    tracing::error!(pause_ms = pause.as_millis(), "the daemon ended and is started again: {why}");
                    self.state.send_replace(DaemonState::BackingOff { why });
                    // Relaxed: a figure for people.
                    self.restarts.fetch_add(1, Ordering::Relaxed);
                    if !self.pause(pause).await {
                        break;
                    }
                }
            }
        }
        self.folder.remove();
        self.state.send_replace(DaemonState::Stopped);
    }

    /// Waits until there is a space. `false` = stop.
    async fn has_spaces(&mut self) -> bool {
        let needed = |order: &Order| order.is_stop || !order.plan.spaces.is_empty();
        let order = self.orders.wait_for(needed).await;
        order.is_ok_and(|order| !order.is_stop)
    }

    /// Waits. `false` = stop.
    async fn pause(&mut self, pause: Duration) -> bool {
        let stopped = self.orders.wait_for(|order| order.is_stop);
        tokio::time::timeout(pause, stopped).await.is_err()
    }

    async fn run_child(&mut self) -> RunEnd {
        let plan = Arc::clone(&self.orders.borrow_and_update().plan);
        if let Err(error) = self.folder.write(&plan, &self.options) {
            return RunEnd::Died(error.to_string());
        }
        let mut child = match self.spawn() {
            Ok(child) => child,
            Err(error) => return RunEnd::Died(format!("{} cannot be started: {error}", self.program.display())),
        };
        let log = child.stderr.take().map(|stderr| tokio::spawn(pass_on(stderr)));
        let answers = answers(self.folder.socket().to_owned());
        tokio::pin!(answers);
        // A change that came before the child answers: until then a SIGHUP may end it.
        let (mut is_running, mut is_behind) = (false, false);
        loop {
            tokio::select! {
                status = child.wait() => {
                    let how = status.map_or_else(|error| error.to_string(), |status| status.to_string());
                    return RunEnd::Died(with_log(&how, log).await);
                }
                () = &mut answers, if !is_running => {
                    is_running = true;
                    let pid = child.id().unwrap_or_default();
                    tracing::info!(pid, socket = %self.folder.socket().display(), "the daemon answers");
                    self.state.send_replace(DaemonState::Running { pid });
                }
                changed = self.orders.changed() => {
                    let order = self.orders.borrow_and_update().clone();
                    // Without a sender, nobody needs the child any more.
                    if changed.is_err() || order.is_stop {
                        end(child).await;
                        return RunEnd::Stopped;
                    }
                    if !plan.has_spaces_of(&order.plan) {
                        tracing::info!("the daemon is started again for another set of models");
                        end(child).await;
                        return RunEnd::Respaced;
                    }
                    is_behind = true;
                }
            }
            if is_running && is_behind {
                is_behind = false;
                self.rewrite(&plan, &child);
            }
        }
    }

    /// Has the child read its configuration again, with the workers that are ordered now and the spaces that it has.
    fn rewrite(&self, running: &FleetPlan, child: &Child) {
        let ordered = Arc::clone(&self.orders.borrow().plan);
        let plan = FleetPlan { spaces: running.spaces.clone(), ..FleetPlan::clone(&ordered) };
        match self.folder.write(&plan, &self.options) {
            Ok(()) => send_signal(child, Signal::HUP),
            Err(error) => tracing::error!(%error, "the daemon does not learn of a change of the engines"),
        }
    }

    fn spawn(&self) -> std::io::Result<Child> {
        let mut command = Command::new(&self.program);
        command.args(["demo-daemon", "--parent", &std::process::id().to_string(), "serve", "--config"]);
        command.arg(self.folder.configuration());
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
        // A process group of its own: an interrupt from the terminal goes to the gateway, which first ends its
        // requests.
        command.process_group(0).kill_on_drop(true).spawn()
    }
}

/// The pause after this many failures in a row, at least 1.
fn pause_after(failures: u32) -> Duration {
    let doublings = failures.saturating_sub(1).min(16);
    RESTART_PAUSE_FIRST.saturating_mul(1 << doublings).min(RESTART_PAUSE_MAX)
}

/// Waits until a daemon answers at the socket.
async fn answers(socket: PathBuf) {
    let options =
        SteadyOptions { name: "kvrouted-gateway-start".to_owned(), fallback: false, ..SteadyOptions::default() };
    let client = AsyncClient::new(socket, options);
    while client.connected().await.is_err() {
        tokio::time::sleep(CONNECT_PAUSE).await;
    }
}

/// Passes the child's log on until it ends, and returns its last lines.
async fn pass_on(stderr: ChildStderr) -> VecDeque<String> {
    let (mut reader, mut last) = (BufReader::new(stderr), VecDeque::new());
    loop {
        let mut line = Vec::new();
        match (&mut reader).take(LOG_LINE_BYTES_MAX as u64).read_until(b'\n', &mut line).await {
            Ok(1..) => {}
            Ok(0) | Err(_) => return last,
        }
        let line = LogLine::read(String::from_utf8_lossy(&line).trim_end());
        line.log();
        last.push_back(line.text().to_owned());
        if last.len() > LOG_LINES_SHOWN {
            last.pop_front();
        }
    }
}

async fn with_log(how: &str, log: Option<JoinHandle<VecDeque<String>>>) -> String {
    let lines = match log {
        // The child's end closed the pipe.
        Some(log) => log.await.unwrap_or_default(),
        None => VecDeque::new(),
    };
    let lines = Vec::from(lines).join("\n  ");
    if lines.is_empty() { how.to_owned() } else { format!("{how}; the end of its log:\n  {lines}") }
}

/// Sends a signal to a child that was not reaped yet, so that the id is still the child's.
fn send_signal(child: &Child, signal: Signal) {
    if let Some(pid) = child.id().and_then(|id| i32::try_from(id).ok()).and_then(Pid::from_raw) {
        // An error means that it has just ended.
        let _ = kill_process(pid, signal);
    }
}

/// Ends the child: first it may drain, then it is killed.
async fn end(mut child: Child) {
    send_signal(&child, Signal::TERM);
    if tokio::time::timeout(DAEMON_STOP_MAX, child.wait()).await.is_err() {
        tracing::warn!("the daemon did not end in time and is killed");
        // An error means that it has just ended.
        let _ = child.kill().await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_double_up_to_their_limit() {
        let pauses = [1, 2, 3, 7, 8, 40].map(|failures| pause_after(failures).as_millis());
        assert_eq!(pauses, [100, 200, 400, 6_400, 10_000, 10_000]);
    }
}
