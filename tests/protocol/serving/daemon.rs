//! The serving half of a daemon on threads of this process, with a service whose answers are fixed.

use std::cell::Cell;
use std::io::Write;
use std::path::PathBuf;
use std::rc::Rc;
use std::sync::atomic::AtomicI64;
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use kvrouted::client::Client;
use kvrouted::fleet::Fleet;
use kvrouted::limits::SPIN_US_CEILING;
use kvrouted::metrics::{CoreCounter, CounterSet, DaemonCounter};
use kvrouted::serve::{Acceptor, AdminServer, BoundSocket, Core, CoreOptions, IoBackend, admin_path, probe_uring};

use super::service::{FakeAdmin, FakeService, Stage, fleet};
use crate::kit::options;
use crate::kit::raw::{Raw, route_frame};

pub(crate) const BODY_MAX: u32 = 1 << 20;

thread_local! {
    /// How long the cores of the daemons that a test starts look for work before they sleep.
    static SPIN_US_MAX: Cell<u32> = const { Cell::new(0) };
}

/// The counters of all cores. Each core counts into a set of its own, which no other thread writes.
pub(crate) struct CoreCounters(Vec<Arc<CounterSet<CoreCounter>>>);

impl CoreCounters {
    fn of(cores: usize) -> Self {
        Self((0..cores).map(|_| Arc::default()).collect())
    }

    /// The sum over the cores.
    pub(crate) fn get(&self, counter: CoreCounter) -> u64 {
        self.0.iter().map(|set| set.get(counter)).sum()
    }
}

/// A daemon's serving half, without what it serves.
pub(crate) struct Daemon {
    pub(crate) cores: Vec<Core>,
    pub(crate) path: PathBuf,
    stop: Option<tokio::sync::oneshot::Sender<()>>,
    control: Option<thread::JoinHandle<()>>,
    pub(crate) counters: CoreCounters,
    pub(crate) refused: Arc<CounterSet<DaemonCounter>>,
    pub(crate) sessions_open: Arc<AtomicI64>,
    pub(crate) stage: Arc<Stage>,
    pub(crate) fleet: Arc<Fleet>,
    _directory: tempfile::TempDir,
}

impl Daemon {
    pub(crate) fn start(engine: IoBackend, cores: usize, connections_max: usize) -> Self {
        Self::start_as(engine, cores, connections_max, |options| options)
    }

    /// The same on cores with other options.
    pub(crate) fn start_as(
        engine: IoBackend,
        cores: usize,
        connections_max: usize,
        set: impl Fn(CoreOptions) -> CoreOptions,
    ) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("kvrouted.sock");
        let admin = admin_path(&path);
        let (fleet, sessions_open) = (fleet(), Arc::new(AtomicI64::new(0)));
        let (counters, refused) = (CoreCounters::of(cores), Arc::new(CounterSet::default()));
        let stage: Arc<Stage> = Arc::default();
        let start_core = |index| {
            let spin_us_max = SPIN_US_MAX.get();
            let options =
                CoreOptions { frame_body_bytes_max: BODY_MAX, spin_us_max, ..CoreOptions::new(index, engine) };
            let stage = Arc::clone(&stage);
            let (fleet, sessions_open, admin) = (Arc::clone(&fleet), Arc::clone(&sessions_open), admin.clone());
            let make = move || Ok(FakeService { fleet, admin, sessions_open, last_session: 0, stage });
            Core::start(set(options), Arc::clone(&counters.0[index]), make).unwrap()
        };
        let cores: Vec<_> = (0..cores).map(start_core).collect();
        let handles = cores.iter().map(Core::handle).collect();
        let (stop, stopped) = tokio::sync::oneshot::channel();
        let (up, is_up) = mpsc::channel();
        let (routing, admin_socket) = (path.clone(), admin.clone());
        let (daemon_counters, told) = (Arc::clone(&refused), Arc::clone(&fleet));
        let control = thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(async {
                let socket = BoundSocket::bind(&routing, 0o660).unwrap();
                let mut acceptor =
                    Acceptor::new(socket, handles, connections_max, Arc::clone(&daemon_counters)).unwrap();
                let service = Rc::new(FakeAdmin { fleet, admin: admin_socket.clone() });
                let admin = BoundSocket::bind(&admin_socket, 0o600).unwrap();
                let admin = AdminServer::new(admin, service, daemon_counters).unwrap();
                up.send(()).unwrap();
                tokio::select! {
                    () = acceptor.run() => {}
                    () = admin.run() => {}
                    _ = stopped => {}
                }
            });
        });
        is_up.recv().unwrap();
        Self {
            cores,
            path,
            stop: Some(stop),
            control: Some(control),
            counters,
            refused,
            sessions_open,
            stage,
            fleet: told,
            _directory: directory,
        }
    }

    /// Stops accepting, then drains the cores.
    pub(crate) fn stop(&mut self, drain: Duration) {
        self.stop.take().unwrap().send(()).unwrap();
        self.control.take().unwrap().join().unwrap();
        for core in &self.cores {
            core.drain(Instant::now() + drain);
        }
        for core in self.cores.drain(..) {
            core.join().unwrap();
        }
    }

    pub(crate) fn client(&self) -> Client {
        Client::connect(&self.path, &options()).unwrap()
    }

    /// A raw connection that has said hello.
    pub(crate) fn greeted(&self) -> Raw {
        Raw::greeted(&self.path)
    }
}

impl Raw {
    /// A route of `tokens` tokens gets the answer of [`FakeService`]: the worker of that number.
    pub(crate) fn assert_decided(&mut self, tokens: usize) {
        let id = 1000 + tokens as u64;
        self.send(&route_frame(id, tokens));
        assert_eq!(self.decided(id).candidates[0].worker.id.0, tokens as u64);
    }
}

/// Runs a test once per engine that works here, and once on cores that do not sleep.
pub(crate) fn on_every_engine(test: impl Fn(IoBackend)) {
    test(IoBackend::Epoll);
    SPIN_US_MAX.set(SPIN_US_CEILING);
    test(IoBackend::Epoll);
    SPIN_US_MAX.set(0);
    match probe_uring() {
        Ok(()) => test(IoBackend::Uring),
        // Past the test harness, which would swallow it.
        Err(why) => writeln!(std::io::stdout().lock(), "SKIPPED on io_uring: {why}").unwrap(),
    }
}
