//! `kvrouted serve` as a child of the gateway, for users who start no daemon of their own.
//!
//! ```text
//!  engines' facts ─▶ steadiness ─▶ plan (spaces, workers, what does not fit) ─▶ files (kvrouted.toml)
//!                                                                                    │
//!  DaemonProcess ── orders ──▶ supervisor (one thread) ── starts ─────▶ kvrouted ── log ──▶ log_lines
//! ```
//!
//! A new worker needs no restart: on SIGHUP the daemon reads the workers of its configuration again. (It would also
//! watch a folder of worker files, but then it answers before it has read them.) A new model needs one, because the
//! daemon's spaces are fixed at its start. While the daemon is down, the router decides without it.
//!
//! The child never outlives this process: the kernel kills it when the supervisor's thread ends, also after SIGKILL.
//! The daemon's own hidden command `demo-daemon` asks the kernel for that before it becomes `kvrouted serve`, because
//! safe code cannot do so between fork and exec.

mod files;
mod log_lines;
mod plan;
mod program;
mod starter;
mod steadiness;
mod supervisor;
#[cfg(test)]
mod tests;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use kvrouted::client;
use kvrouted::sandbox::Mode;
use parking_lot::Mutex;
use tokio::sync::watch;

use self::files::Folder;
use self::plan::{FleetPlan, PlannedEngine};
use self::steadiness::Steadiness;
use self::supervisor::{Order, Supervisor};
use crate::engines::EngineSet;

pub use self::program::find_program;
pub use self::starter::DaemonStarter;

/// Why there is no daemon.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DaemonError {
    /// The program cannot be found.
    #[error("there is no program kvrouted at {places}; build it, or name it with --kvrouted or KVROUTED_BIN")]
    NoProgram {
        /// Where it was looked for.
        places: String,
    },
    /// Its folder cannot be made or written.
    #[error("the daemon's folder {folder} cannot be used: {why}; set TMPDIR to a short path that can be written")]
    Folder {
        /// The folder.
        folder: String,
        /// Why.
        why: String,
    },
    /// The supervisor's thread or its runtime cannot be started.
    #[error("the daemon's supervisor cannot be started: {0}; raise the limits on processes and files")]
    Supervisor(String),
    /// It started and ended, or cannot be started.
    #[error("the daemon does not run: {0}")]
    Ended(String),
    /// It did not answer in time.
    #[error("the daemon did not answer in time; its log is above")]
    Silent,
}

/// What an operator may set of the child.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DaemonOptions {
    /// The program; `None` = see [`find_program`].
    pub program: Option<PathBuf>,
    /// The port of its Prometheus page on the loopback interface; 0 = none.
    pub metrics_port: u16,
    /// Its memory budget, bytes; 0 = its own default.
    pub memory_bytes_max: u64,
    /// How it chooses workers.
    pub mode: client::Mode,
    /// The least severe level that it logs.
    pub log_level: String,
    /// How long a request may take. The daemon drops bookings that are older.
    pub request_max: Duration,
    /// Whether a caller's body with `kv_cache_report_mode` reaches an engine. If the gateway refuses or strips the
    /// field, the daemon can count copies of blocks exactly.
    pub report_mode_passes: bool,
    /// How much it gives up once it has started.
    pub sandbox: Mode,
}

impl Default for DaemonOptions {
    fn default() -> Self {
        Self {
            program: None,
            metrics_port: 0,
            memory_bytes_max: 0,
            mode: client::Mode::Latency,
            log_level: "info".to_owned(),
            request_max: Duration::from_secs(600),
            report_mode_passes: true,
            sandbox: Mode::Off,
        }
    }
}

/// The state of the child.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DaemonState {
    /// No engine has named a model yet, and the daemon needs one.
    NoModels,
    /// It was started and has not answered yet.
    Starting,
    /// It answers.
    Running {
        /// Its process id.
        pid: u32,
    },
    /// It ended, and is started again after a pause.
    BackingOff {
        /// Why it ended, with the last lines of its log.
        why: String,
    },
    /// It was stopped.
    Stopped,
}

/// The daemon as a child of this process.
#[derive(Debug)]
pub struct DaemonProcess {
    folder: Arc<Folder>,
    orders: watch::Sender<Order>,
    states: watch::Receiver<DaemonState>,
    restarts: Arc<AtomicU64>,
    steadiness: Mutex<Steadiness>,
}

impl DaemonProcess {
    /// Starts the child with what the engines have said so far. It runs in the background; see
    /// [`DaemonProcess::ready`].
    ///
    /// # Errors
    /// There is no program, no folder or no thread.
    pub fn start(options: DaemonOptions, engines: &EngineSet) -> Result<Self, DaemonError> {
        Self::start_on(DaemonStarter::new(options.sandbox)?, options, engines)
    }

    /// The same on a thread that was started before this process entered its sandbox.
    ///
    /// # Errors
    /// There is no program.
    pub fn start_on(starter: DaemonStarter, options: DaemonOptions, engines: &EngineSet) -> Result<Self, DaemonError> {
        let mut steadiness = Steadiness::default();
        let plan = plan_of(engines, &mut steadiness);
        Ok(Self { steadiness: Mutex::new(steadiness), ..Self::start_planned(starter, options, plan)? })
    }

    fn start_planned(starter: DaemonStarter, options: DaemonOptions, plan: FleetPlan) -> Result<Self, DaemonError> {
        let program = find_program(options.program.as_deref())?;
        let folder = starter.folder();
        plan.log_problems_beside(&FleetPlan::default());
        let (orders, ordered) = watch::channel(Order { plan: Arc::new(plan), is_stop: false });
        let (state, states) = watch::channel(DaemonState::NoModels);
        let restarts = Arc::new(AtomicU64::new(0));
        let supervisor = Supervisor {
            program,
            options,
            folder: Arc::clone(&folder),
            orders: ordered,
            state,
            restarts: Arc::clone(&restarts),
        };
        starter.start(supervisor)?;
        Ok(Self { folder, orders, states, restarts, steadiness: Mutex::default() })
    }

    /// The child's socket.
    #[must_use]
    pub fn socket(&self) -> &Path {
        self.folder.socket()
    }

    /// Passes on what the engines say now. Call it after their facts changed, and now and then.
    pub fn update(&self, engines: &EngineSet) {
        let plan = plan_of(engines, &mut self.steadiness.lock());
        self.update_planned(plan);
    }

    fn update_planned(&self, plan: FleetPlan) {
        let plan = Arc::new(plan);
        self.orders.send_if_modified(|order| {
            let is_new = order.plan != plan;
            if is_new {
                plan.log_problems_beside(&order.plan);
                order.plan = plan;
            }
            is_new
        });
    }

    /// The child's state.
    #[must_use]
    pub fn state(&self) -> DaemonState {
        self.states.borrow().clone()
    }

    /// How often the child ended by itself and was started again.
    #[must_use]
    pub fn restarts(&self) -> u64 {
        // Relaxed: a figure for people.
        self.restarts.load(Ordering::Relaxed)
    }

    /// What of the engines' facts the daemon's configuration cannot express, each a sentence with the remedy.
    #[must_use]
    pub fn problems(&self) -> Vec<String> {
        self.orders.borrow().plan.problems.clone()
    }

    /// Waits until the child answers.
    ///
    /// # Errors
    /// The child ended, or did not answer by `deadline`. The supervisor goes on trying.
    pub async fn ready(&self, deadline: Instant) -> Result<(), DaemonError> {
        let mut states = self.states.clone();
        let decided = states.wait_for(|state| !matches!(state, DaemonState::Starting | DaemonState::NoModels));
        match tokio::time::timeout_at(deadline.into(), decided).await {
            Ok(Ok(state)) => match &*state {
                DaemonState::BackingOff { why } => Err(DaemonError::Ended(why.clone())),
                DaemonState::Stopped => Err(DaemonError::Ended("it was stopped".to_owned())),
                DaemonState::Running { .. } | DaemonState::Starting | DaemonState::NoModels => Ok(()),
            },
            Ok(Err(_)) => Err(DaemonError::Ended("its supervisor has ended".to_owned())),
            Err(_) => Err(DaemonError::Silent),
        }
    }

    /// Ends the child, which gets time to drain, and removes its folder.
    pub async fn stop(&self) {
        self.orders.send_modify(|order| order.is_stop = true);
        let mut states = self.states.clone();
        // An error means that the supervisor has ended, and the child before it.
        let _ = states.wait_for(|state| *state == DaemonState::Stopped).await;
    }
}

fn plan_of(engines: &EngineSet, steadiness: &mut Steadiness) -> FleetPlan {
    let planned = engines.iter().map(|engine| PlannedEngine {
        worker: engine.worker(),
        role: engine.config().role,
        base: engines.base_of(&engine),
        name: engine.base().authority().map(ToString::to_string).unwrap_or_default(),
        facts: engine.facts(),
    });
    let (planned, unsteady) = steadiness.of(planned.collect(), Instant::now());
    let mut plan = FleetPlan::of(&planned);
    plan.problems.extend(unsteady);
    plan
}
