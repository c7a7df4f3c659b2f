//! The serving half of a daemon, and a raw connection to it.

use std::cell::Cell;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::atomic::AtomicI64;
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use kvrouted::client::{Client, ClientOptions, Reply};
use kvrouted::error::Kind;
use kvrouted::fleet::Fleet;
use kvrouted::ids::{CorrelationId, SpaceId};
use kvrouted::limits::{FRAME_HEADER_BYTES, SPIN_US_CEILING};
use kvrouted::metrics::{CoreCounter, CounterSet, DaemonCounter};
use kvrouted::route::{Prompt, RouteRequest};
use kvrouted::serve::{Acceptor, AdminServer, BoundSocket, Core, CoreOptions, Engine, admin_path, probe_uring};
use kvrouted::wire::{FrameHeader, FrameKind, RequestEncoder, decode_reply};

use super::service::{FakeAdmin, FakeService, Stage, fleet};

pub(crate) const BODY_MAX: u32 = 1 << 20;

/// Longer than anything here takes; only a failing test waits for it.
pub(crate) const PATIENCE: Duration = Duration::from_secs(120);

thread_local! {
    /// How long the cores of the daemons that a test starts look for work before they sleep.
    static SPIN_US_MAX: Cell<u32> = const { Cell::new(0) };
}

/// A daemon's serving half, without what it serves.
pub(crate) struct Daemon {
    pub(crate) cores: Vec<Core>,
    pub(crate) path: PathBuf,
    stop: Option<tokio::sync::oneshot::Sender<()>>,
    control: Option<thread::JoinHandle<()>>,
    pub(crate) counters: Arc<CounterSet<CoreCounter>>,
    pub(crate) refused: Arc<CounterSet<DaemonCounter>>,
    pub(crate) sessions_open: Arc<AtomicI64>,
    pub(crate) stage: Arc<Stage>,
    pub(crate) fleet: Arc<Fleet>,
    _directory: tempfile::TempDir,
}

impl Daemon {
    pub(crate) fn start(engine: Engine, cores: usize, connections_max: usize) -> Self {
        Self::start_as(engine, cores, connections_max, |options| options)
    }

    /// The same on cores with other options.
    pub(crate) fn start_as(
        engine: Engine,
        cores: usize,
        connections_max: usize,
        set: impl Fn(CoreOptions) -> CoreOptions,
    ) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("kvrouted.sock");
        let admin = admin_path(&path);
        let (fleet, sessions_open) = (fleet(), Arc::new(AtomicI64::new(0)));
        let (counters, refused) = (Arc::new(CounterSet::default()), Arc::new(CounterSet::default()));
        let stage: Arc<Stage> = Arc::default();
        let start_core = |index| {
            let spin_us_max = SPIN_US_MAX.get();
            let options =
                CoreOptions { frame_body_bytes_max: BODY_MAX, spin_us_max, ..CoreOptions::new(index, engine) };
            let stage = Arc::clone(&stage);
            let (fleet, sessions_open, admin) = (Arc::clone(&fleet), Arc::clone(&sessions_open), admin.clone());
            let make = move || Ok(FakeService { fleet, admin, sessions_open, last_session: 0, stage });
            Core::start(set(options), Arc::clone(&counters), make).unwrap()
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
    pub(crate) fn stop(&mut self, patience: Duration) {
        self.stop.take().unwrap().send(()).unwrap();
        self.control.take().unwrap().join().unwrap();
        for core in &self.cores {
            core.drain(Instant::now() + patience);
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
        let mut raw = Raw::connect(&self.path);
        raw.hello();
        raw
    }
}

pub(crate) fn options() -> ClientOptions {
    ClientOptions { name: "test".into(), timeout: Some(PATIENCE), ..ClientOptions::default() }
}

/// A socket and what was encoded for it.
pub(crate) struct Raw {
    pub(crate) stream: UnixStream,
    pub(crate) encoder: RequestEncoder,
    /// What is left of a frame of which the socket took a part.
    pub(crate) unsent: Vec<u8>,
}

impl Raw {
    pub(crate) fn connect(path: &Path) -> Self {
        let stream = UnixStream::connect(path).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        Self { stream, encoder: RequestEncoder::default(), unsent: Vec::new() }
    }

    pub(crate) fn hello(&mut self) {
        let bytes = encode(|out| self.encoder.hello(CorrelationId(1), "raw", None, out));
        self.stream.write_all(&bytes).unwrap();
        assert!(matches!(self.reply(), (1, Reply::Hello(_))));
    }

    pub(crate) fn send(&mut self, bytes: &[u8]) {
        self.stream.write_all(bytes).unwrap();
    }

    pub(crate) fn reply(&mut self) -> (u64, Reply) {
        let mut header = [0; FRAME_HEADER_BYTES];
        self.stream.read_exact(&mut header).unwrap();
        let header = FrameHeader::parse(&header).unwrap();
        let mut body = vec![0; header.body_bytes as usize];
        self.stream.read_exact(&mut body).unwrap();
        (header.correlation_id.0, decode_reply(header.kind, &body).unwrap())
    }

    /// The kind of the error that answers request `id`.
    pub(crate) fn error(&mut self, id: u64) -> Kind {
        match self.reply() {
            (got, Reply::Error(error)) if got == id => {
                assert!(!error.remedy.is_empty() && !error.message.is_empty());
                error.kind.unwrap()
            }
            other => panic!("no error on {id}: {other:?}"),
        }
    }

    pub(crate) fn is_at_end(&mut self) -> bool {
        matches!(self.stream.read(&mut [0; 1]), Ok(0))
    }

    /// A route of `tokens` tokens is answered as it should be.
    pub(crate) fn assert_served(&mut self, tokens: usize) {
        let id = 1000 + tokens as u64;
        self.send(&route_frame(id, tokens));
        let (got, reply) = self.reply();
        let Reply::Route(reply) = reply else { panic!("{reply:?}") };
        assert_eq!((got, reply.candidates[0].worker.id.0), (id, tokens as u64));
    }
}

pub(crate) fn encode(fill: impl FnOnce(&mut Vec<u8>)) -> Vec<u8> {
    let mut out = Vec::new();
    fill(&mut out);
    out
}

pub(crate) fn question(tokens: &[u8]) -> RouteRequest<'_> {
    RouteRequest { candidates_max: 1, ..RouteRequest::new(SpaceId(0), Prompt::Tokens(tokens)) }
}

pub(crate) fn route_frame(id: u64, tokens: usize) -> Vec<u8> {
    let tokens = vec![0; tokens * 4];
    encode(|out| RequestEncoder::default().route(CorrelationId(id), &question(&tokens), out).unwrap())
}

pub(crate) fn frame(header: FrameHeader, body: &[u8]) -> Vec<u8> {
    [&header.encode(), body].concat()
}

pub(crate) fn header(kind: FrameKind, body_bytes: u32, id: u64) -> FrameHeader {
    FrameHeader::new(kind, body_bytes, CorrelationId(id))
}

/// Waits for what happens on another thread.
pub(crate) fn eventually(what: &str, holds: impl Fn() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !holds() {
        assert!(Instant::now() < deadline, "never: {what}");
        thread::sleep(Duration::from_millis(1));
    }
}

/// Runs a test once per engine that works here, and once on cores that do not sleep.
pub(crate) fn on_every_engine(test: impl Fn(Engine)) {
    test(Engine::Epoll);
    SPIN_US_MAX.set(SPIN_US_CEILING);
    test(Engine::Epoll);
    SPIN_US_MAX.set(0);
    match probe_uring() {
        Ok(()) => test(Engine::Uring),
        // Past the test harness, which would swallow it.
        Err(why) => writeln!(std::io::stdout().lock(), "SKIPPED on io_uring: {why}").unwrap(),
    }
}
