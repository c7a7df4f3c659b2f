//! The servers, each a process of its own: a child of this binary.

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use dynamo_kv_router::services::selection::{RouterPluginRegistry, SelectionServiceBuilder, run_server};
use dynamo_kv_router::{KvRouterConfig, WorkerSelectionPolicy, WorkerType};
use kvrouted::cli::{self, Command as Daemon, Prepared};

use super::contents::Engines;
use super::dialect::{post, whole};
use super::floor::{self, ReplyBytes};
use super::processors::keep;
use crate::args::{Io, ServedBy, SocketServeArgs};
use crate::failure::Failure;
use crate::ingest::BLOCK_SIZE;

/// How long a server may take to be there.
const START_MAX: Duration = Duration::from_secs(30);
/// The peer's own default.
const INDEX_THREADS: usize = 4;

/// A running server. It ends with this.
pub(crate) struct Server {
    child: Child,
    folder: PathBuf,
    port: u16,
}

impl Server {
    /// Starts the floor with so many threads, on these processors (none = all).
    ///
    /// # Errors
    /// It does not start.
    pub(crate) fn floor(
        bytes: ReplyBytes,
        io: Io,
        (spins, cores): (bool, u16),
        processors: &[usize],
    ) -> Result<Self, Failure> {
        let folder = folder()?;
        let mut command = this(ServedBy::Floor, processors)?;
        command.arg("--path").arg(folder.join("s"));
        command.args(["--route-bytes", &bytes.route.to_string(), "--free-bytes", &bytes.free.to_string()]);
        command.args(["--io", io.name(), "--cores", &cores.to_string()]);
        if spins {
            command.arg("--spin");
        }
        Self::spawn(command, folder, 0)
    }

    /// Starts the daemon with so many serving cores and these `lines` more in its `[serve]`, on these processors.
    ///
    /// # Errors
    /// It does not start.
    pub(crate) fn kvrouted(
        engines: &Engines,
        (io, cores): (Io, u16),
        lines: &[&[String]],
        processors: &[usize],
    ) -> Result<Self, Failure> {
        let mut config = format!("io = \"{}\"\ncores = {cores}\n", io.name());
        for line in lines.iter().copied().flatten() {
            config.push_str(&format!("{line}\n"));
        }
        config.push_str(&format!("[[space]]\nmodel = \"m\"\nblock_size = {BLOCK_SIZE}\n"));
        for (worker, endpoint) in engines.endpoints.iter().enumerate() {
            config.push_str(&format!("[[worker]]\nid = {worker}\nendpoint = \"{endpoint}\"\n"));
        }
        Self::daemon(&config, processors)
    }

    /// Starts the daemon on these processors (none = all). `config` begins within `[serve]`, after its socket.
    ///
    /// # Errors
    /// It does not start.
    pub(crate) fn daemon(config: &str, processors: &[usize]) -> Result<Self, Failure> {
        let folder = folder()?;
        let config = format!("[serve]\nsocket = \"{}\"\n{config}", folder.join("s").display());
        let file = folder.join("kvrouted.toml");
        std::fs::write(&file, config).map_err(Failure::file(&file))?;
        Self::spawn(daemon_command(&file, processors)?, folder, 0)
    }

    /// Starts the peer's selection service on these processors and tells it of its workers.
    ///
    /// # Errors
    /// It does not start, or refuses a worker.
    pub(crate) fn peer(engines: &Engines, processors: &[usize]) -> Result<Self, Failure> {
        let free = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).and_then(|listener| listener.local_addr());
        let port = free.map_err(Failure::system("find a free port"))?.port();
        let mut command = this(ServedBy::Peer, processors)?;
        command.args(["--port", &port.to_string()]);
        let server = Self::spawn(command, folder()?, port)?;
        for (worker, endpoint) in engines.endpoints.iter().enumerate() {
            let body = serde_json::json!({
                "worker_id": worker, "endpoint": format!("http://worker-{worker}:8000"), "block_size": BLOCK_SIZE,
                "max_num_batched_tokens": 8192, "kv_events_endpoint": endpoint,
            });
            server.ask_peer("/workers", &body.to_string())?;
        }
        Ok(server)
    }

    fn spawn(mut command: Command, folder: PathBuf, port: u16) -> Result<Self, Failure> {
        let child = command.stdin(Stdio::null()).spawn().map_err(Failure::system("start a child process"))?;
        Ok(Self { child, folder, port })
    }

    /// Its Unix socket.
    #[must_use]
    pub(crate) fn socket(&self) -> PathBuf {
        self.folder.join("s")
    }

    /// Connects to the peer's port.
    ///
    /// # Errors
    /// It is not there in time.
    pub(crate) fn connect_peer(&self) -> Result<TcpStream, Failure> {
        let stream = patiently(|| TcpStream::connect((Ipv4Addr::LOCALHOST, self.port)))?;
        stream.set_nodelay(true).map_err(Failure::system("set TCP_NODELAY"))?;
        Ok(stream)
    }

    /// Asks the peer one thing, and answers with its reply's body.
    ///
    /// # Errors
    /// It refuses.
    pub(crate) fn ask_peer(&self, path: &str, body: &str) -> Result<Vec<u8>, Failure> {
        let mut stream = self.connect_peer()?;
        stream.write_all(&post(path, body)).map_err(Failure::system("ask the peer"))?;
        let (mut received, mut chunk) = (Vec::new(), [0; 4096]);
        loop {
            if let Some((head, body)) = whole(&received)? {
                return Ok(received[head..head + body].to_vec());
            }
            match stream.read(&mut chunk).map_err(Failure::system("hear the peer"))? {
                0 => return Err(Failure::Child("has closed a connection".to_owned())),
                read => received.extend_from_slice(&chunk[..read]),
            }
        }
    }

    /// Processor time of all its threads, nanoseconds.
    ///
    /// # Errors
    /// It is gone.
    pub(crate) fn cpu_ns(&self) -> Result<u64, Failure> {
        Ok(self.threads_ns()?.values().sum())
    }

    /// The same by the names of its threads.
    ///
    /// # Errors
    /// It is gone.
    pub(crate) fn threads_ns(&self) -> Result<BTreeMap<String, u64>, Failure> {
        let folder = PathBuf::from(format!("/proc/{}/task", self.child.id()));
        let mut threads = BTreeMap::new();
        for task in std::fs::read_dir(&folder).map_err(Failure::file(&folder))?.flatten() {
            // A thread may end while it is asked about.
            let Ok(spent) = std::fs::read_to_string(task.path().join("schedstat")) else { continue };
            let Ok(name) = std::fs::read_to_string(task.path().join("comm")) else { continue };
            let ns = spent.split_whitespace().next().and_then(|ns| ns.parse::<u64>().ok()).unwrap_or(0);
            *threads.entry(name.trim_end().to_owned()).or_default() += ns;
        }
        Ok(threads)
    }

    /// Its process.
    #[must_use]
    pub(crate) fn process(&self) -> u32 {
        self.child.id()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // It has nothing to save. That it is gone already is no fault.
        let _ = self.child.kill();
        let _ = self.child.wait();
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}

/// A folder of its own, with a path short enough for a socket.
fn folder() -> Result<PathBuf, Failure> {
    let of_clock = crate::ingest::clock_ns();
    let folder = std::env::temp_dir().join(format!("perf-socket-{}-{of_clock:x}", std::process::id()));
    std::fs::create_dir_all(&folder).map_err(Failure::file(&folder))?;
    Ok(folder)
}

fn this(side: ServedBy, processors: &[usize]) -> Result<Command, Failure> {
    let own = std::env::current_exe().map_err(Failure::system("find this program"))?;
    let mut command = Command::new(own);
    command.args(["socket-serve", "--side", side.name()]);
    if !processors.is_empty() {
        let processors: Vec<_> = processors.iter().map(usize::to_string).collect();
        command.args(["--processors", &processors.join(",")]);
    }
    Ok(command)
}

/// What runs the daemon of a configuration file on these processors (none = all).
///
/// # Errors
/// This program cannot be found.
pub(crate) fn daemon_command(config: &Path, processors: &[usize]) -> Result<Command, Failure> {
    let mut command = this(ServedBy::Kvrouted, processors)?;
    command.arg("--path").arg(config);
    Ok(command)
}

/// Connects to a server's Unix socket.
///
/// # Errors
/// It is not there in time.
pub(crate) fn connect(socket: &Path) -> Result<UnixStream, Failure> {
    patiently(|| UnixStream::connect(socket))
}

fn patiently<T>(mut connect: impl FnMut() -> std::io::Result<T>) -> Result<T, Failure> {
    let began = Instant::now();
    loop {
        match connect() {
            Ok(stream) => return Ok(stream),
            Err(_) if began.elapsed() < START_MAX => std::thread::sleep(Duration::from_millis(5)),
            Err(error) => return Err(Failure::system("connect to a server")(error)),
        }
    }
}

/// The child's part: serves until it is killed.
///
/// # Errors
/// It cannot serve.
pub(crate) fn serve(args: &SocketServeArgs) -> Result<(), Failure> {
    // Before anything else: threads inherit it.
    keep(&args.processors)?;
    match args.side {
        ServedBy::Floor => floor::serve(args),
        ServedBy::Kvrouted => daemon(&args.path),
        ServedBy::Peer => peer(args.port),
    }
}

fn daemon(file: &Path) -> Result<(), Failure> {
    let line = ["kvrouted", "serve", "--log-level", "error", "--config"].map(Into::into);
    let parsed = cli::parse(line.into_iter().chain([file.as_os_str().to_owned()]));
    let Ok(cli::Cli { command: Daemon::Serve(args) }) = parsed else {
        return Err(Failure::Contract("does not know `serve`".to_owned()));
    };
    match args.prepare().map_err(|failure| Failure::Contract(failure.message))? {
        Prepared::Run(config) => {
            cli::init_logging(&config.log);
            kvrouted::daemon::run(&config, std::sync::Arc::new(move || args.read_again()))
                .map_err(|error| Failure::Contract(error.to_string()))
        }
        Prepared::Done(_) => Ok(()),
    }
}

/// Its service with everything at its defaults, on a runtime with a thread for each processor.
fn peer(port: u16) -> Result<(), Failure> {
    let failed = |error: &dyn std::fmt::Display| Failure::Peer(error.to_string());
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build();
    let runtime = runtime.map_err(Failure::system("start a runtime for the peer"))?;
    runtime.block_on(async {
        let (config, role) = (KvRouterConfig::default(), WorkerType::Aggregated);
        let service = SelectionServiceBuilder::new(config, role, RouterPluginRegistry::default())
            .worker_selection_policy_factory(std::sync::Arc::new(|config: &KvRouterConfig, role: WorkerType, _| {
                WorkerSelectionPolicy::reference(config.clone(), role.default_selector_label())
            }))
            .indexer_threads(INDEX_THREADS)
            .build()
            .await
            .map_err(|error| failed(&error))?;
        run_server(port, service).await.map_err(|error| failed(&error))
    })
}
