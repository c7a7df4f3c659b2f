//! A daemon process, publishers for it, and what is asked of both.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use kvrouted::client::{Client, ClientOptions};
use kvrouted::event::flat::Encoder;
use kvrouted::event::{BatchInfo, Content, GroupKind, KvEvent, Medium, Salt, Stored};
use kvrouted::hash;
use kvrouted::ids::{EngineHash, GroupId, Scheme, Tier, Window, Worker};
use kvrouted::route::{Prompt, RouteRequest};
use kvrouted::wire::StatusPage;

/// Far beyond what anything here takes: reached only by a failure.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);
pub(crate) const SCHEME: Scheme = Scheme { block_size: 16, window: Window::Plain };

#[track_caller]
pub(crate) fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !holds() {
        assert!(Instant::now() < deadline, "waited in vain until {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// A publisher of our own flatbuffers. XPUB, to know when a subscription has arrived.
pub(crate) struct Publisher {
    socket: zmq::Socket,
    encoder: Encoder,
    seq: u64,
}

impl Publisher {
    pub(crate) fn new() -> Self {
        Self::bind("tcp://127.0.0.1:*").expect("a free port")
    }

    pub(crate) fn bind(endpoint: &str) -> zmq::Result<Self> {
        let socket = zmq::Context::new().socket(zmq::XPUB)?;
        socket.set_linger(0)?;
        socket.set_rcvtimeo(PATIENCE.as_millis() as i32)?;
        // Every subscription is told, also one that somebody else has.
        socket.set_xpub_verbose(true)?;
        socket.bind(endpoint)?;
        Ok(Self { socket, encoder: Encoder::new(), seq: 0 })
    }

    pub(crate) fn endpoint(&self) -> String {
        self.socket.get_last_endpoint().expect("an endpoint").expect("of text")
    }

    pub(crate) fn await_subscription(&self) {
        while self.socket.recv_bytes(0).expect("a subscription").first() != Some(&1) {}
    }

    /// Stores the whole blocks of `tokens` at the root.
    pub(crate) fn store(&mut self, tokens: &[u32]) {
        let (mut locals, mut chain) = (Vec::new(), Vec::new());
        hash::local_hashes(SCHEME, hash::seed(None, None), hash::token_bytes(tokens), &[], &mut locals);
        hash::sequence_hashes(&locals, &mut chain);
        let hashes: Vec<EngineHash> = chain.into_iter().map(|sequence| EngineHash(!sequence.0)).collect();
        let info = BatchInfo { scheme: Some(SCHEME), ..BatchInfo::default() };
        let event = KvEvent::Stored(Stored {
            hashes: &hashes,
            parent: None,
            content: Content::Tokens { tokens: &tokens[..hashes.len() * 16], bigram: false },
            block_size: 16,
            medium: Medium::Tier(Tier::Device),
            group: GroupId(0),
            group_kind: GroupKind::Main,
            lora: None,
            salt: Salt::Inherited,
            media: &[],
        });
        let payload = self.encoder.encode(&info, [event]).to_vec();
        self.socket.send_multipart([b"".as_slice(), &self.seq.to_be_bytes(), &payload], 0).expect("sent");
        self.seq += 1;
    }
}

/// What distinguishes one prompt from another.
pub(crate) fn prompt(seed: u32, tokens: u32) -> Vec<u32> {
    (0..tokens).map(|at| seed.wrapping_mul(7919).wrapping_add(at * 31)).collect()
}

pub(crate) struct Daemon {
    process: Child,
    pub(crate) folder: tempfile::TempDir,
}

impl Daemon {
    /// A daemon on a configuration file of `tables` and one space, `m`.
    pub(crate) fn start(tables: &str) -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        configure(folder.path(), tables);
        let process = Command::new(env!("CARGO_BIN_EXE_kvrouted"))
            .args(["serve", "--log-level", "error", "--config"])
            .arg(folder.path().join("kvrouted.toml"))
            .stderr(Stdio::inherit())
            .spawn()
            .expect("the daemon starts");
        let daemon = Self { process, folder };
        until("the daemon serves", || Client::connect(&daemon.socket(), &options()).is_ok());
        daemon
    }

    /// Writes the configuration file anew; SIGHUP makes the daemon read it.
    pub(crate) fn reconfigure(&self, tables: &str) {
        configure(self.folder.path(), tables);
        let pid = self.process.id().to_string();
        assert!(Command::new("kill").args(["-HUP", &pid]).status().expect("kill").success());
    }

    pub(crate) fn socket(&self) -> PathBuf {
        self.folder.path().join("s")
    }

    pub(crate) fn client(&self) -> Client {
        Client::connect(&self.socket(), &options()).expect("a connection")
    }

    pub(crate) fn admin(&self) -> Client {
        Client::connect_admin(&self.socket(), &options()).expect("a connection")
    }

    pub(crate) fn status(&self) -> StatusPage {
        self.admin().status_all().expect("status")
    }

    /// `id/rank state source` of every worker.
    pub(crate) fn workers(&self) -> Vec<String> {
        let line = |worker: &kvrouted::wire::WorkerStatus| {
            let source = worker.source.replace(&*self.folder.path().to_string_lossy(), "");
            format!("{} {} {source}", worker.worker, worker.state.name())
        };
        let mut lines: Vec<_> = self.status().workers.iter().map(line).collect();
        lines.sort();
        lines
    }

    pub(crate) fn counter(&self, name: &str) -> u64 {
        let counters = self.status().counters;
        counters.iter().find(|(of, _)| of == name).map(|(_, value)| *value).expect("a counter")
    }

    /// The problem of a source whose name ends so.
    pub(crate) fn problem(&self, of: &str) -> Option<String> {
        self.status().sources.into_iter().find(|source| source.name.ends_with(of)).and_then(|source| source.problem)
    }

    /// `kvrouted worker ARGUMENTS`.
    pub(crate) fn worker(&self, arguments: &[&str]) -> Output {
        let mut command = Command::new(env!("CARGO_BIN_EXE_kvrouted"));
        command.args(["worker", "--socket"]).arg(self.socket()).args(arguments);
        command.output().expect("the binary runs")
    }

    #[track_caller]
    pub(crate) fn worker_ok(&self, arguments: &[&str]) {
        let output = self.worker(arguments);
        assert!(output.status.success(), "{output:?}");
    }

    /// What a worker's device holds of a prompt; `None` if it is not there.
    pub(crate) fn device(&self, tokens: &[u32], worker: Worker) -> Option<u32> {
        let mut client = self.client();
        let space = client.space("m", None).expect("the space").id;
        let overlap = client.overlap(&RouteRequest::new(space, Prompt::of_tokens(tokens))).expect("overlaps");
        overlap.workers.iter().find(|entry| entry.worker == worker).map(|entry| entry.overlap.device)
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn configure(folder: &Path, tables: &str) {
    let text = format!(
        "[serve]\nsocket = \"{}\"\n[[space]]\nmodel = \"m\"\nblock_size = 16\n{tables}",
        folder.join("s").display()
    );
    replace(&folder.join("kvrouted.toml"), &text);
}

/// Writes a file as whole: readers see the one before or this one.
pub(crate) fn replace(path: &Path, text: &str) {
    let unfinished = path.with_extension("unfinished");
    std::fs::write(&unfinished, text).expect("written");
    std::fs::rename(unfinished, path).expect("renamed");
}

pub(crate) fn options() -> ClientOptions {
    ClientOptions { name: "test".into(), session: None, timeout: Some(PATIENCE) }
}
