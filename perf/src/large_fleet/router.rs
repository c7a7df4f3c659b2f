//! The daemons that hear the fleet, and the files by which they learn of its workers.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use kvrouted::client::{Client, ClientOptions};
use kvrouted::fleet::WorkerState;
use kvrouted::ids::{LocalHash, SpaceId};
use kvrouted::route::{Prompt, RouteRequest};
use kvrouted::trust::TrustLevel;
use kvrouted::wire::OverlapReply;
use rustc_hash::FxHashMap;

use super::contents::{PROMPT_BLOCKS, shared_prompt};
use super::orders::{Endpoints, RankState};
use crate::failure::Failure;
use crate::ingest::{BLOCK_SIZE, SCHEME, clock_ns};
use crate::memory::rss_bytes_of;
use crate::socket::Server;

/// How long a daemon may take to reply.
const REPLY_MAX: Duration = Duration::from_secs(60);
/// How long it may take until it trusts the whole fleet.
const EXACT_MAX: Duration = Duration::from_secs(300);

/// A folder with one file for each worker's place, as an operator's deployment writes them. A new worker takes the
/// place of another by renaming.
pub(super) struct WorkerFiles {
    folder: PathBuf,
}

impl WorkerFiles {
    /// An empty folder.
    pub(super) fn new() -> Result<Self, Failure> {
        let folder = std::env::temp_dir().join(format!("perf-fleet-{}-{:x}", std::process::id(), clock_ns()));
        std::fs::create_dir_all(&folder).map_err(Failure::file(&folder))?;
        Ok(Self { folder })
    }

    /// Writes the ranks of the worker in a place.
    pub(super) fn write(&self, place: usize, ranks: &[Endpoints]) -> Result<(), Failure> {
        let workers = ranks.iter().map(|rank| {
            serde_json::json!({
                "id": rank.worker, "dp_rank": rank.rank, "endpoint": rank.endpoint, "replay": rank.replay,
            })
        });
        let text = serde_json::Value::from(workers.collect::<Vec<_>>()).to_string();
        let (new, file) = (self.folder.join(format!("{place}.new")), self.folder.join(format!("{place}.json")));
        std::fs::write(&new, text).map_err(Failure::file(&new))?;
        std::fs::rename(&new, &file).map_err(Failure::file(&file))
    }
}

impl Drop for WorkerFiles {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}

/// The configuration of each daemon, which begins within `[serve]`. What daemons are to know of each other comes here.
fn config(workers: &Path, shards: u16) -> String {
    format!(
        "[ingest]\nshards = {shards}\n[discovery]\npath = \"{}\"\n[[space]]\nmodel = \"m\"\nblock_size = {BLOCK_SIZE}\n\
         salts = \"none\"\nfull_reports = \"none\"\n",
        workers.display()
    )
}

/// How long a daemon took, seconds from its start.
#[derive(Clone, Copy, Debug, Default, serde::Serialize)]
pub(super) struct Started {
    /// Until it answered a connection.
    pub(super) answers_s: f64,
    /// Until every worker was connected: `ready`.
    pub(super) ready_s: f64,
    /// Until every overlap was exact.
    pub(super) exact_s: f64,
}

/// What the kernel says of a daemon.
#[derive(Clone, Copy, Debug, serde::Serialize)]
pub(super) struct Resources {
    /// Open descriptors.
    pub(super) descriptors: usize,
    /// Resident memory.
    pub(super) resident_bytes: u64,
}

/// A running daemon.
pub(super) struct Router {
    server: Server,
    began: Instant,
    client: Option<Client>,
    reached: Started,
}

impl Router {
    /// Starts a daemon on the workers of these files.
    pub(super) fn start(files: &WorkerFiles, shards: u16) -> Result<Self, Failure> {
        let server = Server::daemon(&config(&files.folder, shards), &[])?;
        Ok(Self { server, began: Instant::now(), client: None, reached: Started::default() })
    }

    /// Asks how far it is, once; what it has reached once it trusts every one of `ranks` ranks.
    pub(super) fn look(&mut self, ranks: usize) -> Result<Option<Started>, Failure> {
        if self.client.is_none() {
            let options = ClientOptions { timeout: Some(REPLY_MAX), ..ClientOptions::default() };
            // Until it listens there is nothing to connect to.
            self.client = Client::connect(&self.server.socket(), &options).ok();
            self.reached.answers_s = self.began.elapsed().as_secs_f64();
        }
        let Some(client) = &mut self.client else { return Ok(None) };
        let workers = client.workers(None)?;
        let elapsed_s = self.began.elapsed().as_secs_f64();
        let ready = workers.iter().filter(|worker| worker.state == WorkerState::Ready).count();
        let exact = workers.iter().filter(|worker| worker.trust.level == TrustLevel::Exact).count();
        if ready == ranks && self.reached.ready_s == 0.0 {
            self.reached.ready_s = elapsed_s;
        }
        if self.reached.ready_s > 0.0 && exact == ranks {
            self.reached.exact_s = elapsed_s;
            return Ok(Some(self.reached));
        }
        if self.began.elapsed() > EXACT_MAX {
            return Err(Failure::Contract(format!("of {ranks} ranks {ready} are ready and {exact} exact")));
        }
        Ok(None)
    }

    /// Its routing socket.
    pub(super) fn socket(&self) -> PathBuf {
        self.server.socket()
    }

    /// Descriptors and memory.
    pub(super) fn resources(&self) -> Result<Resources, Failure> {
        let folder = PathBuf::from(format!("/proc/{}/fd", self.server.process()));
        let descriptors = std::fs::read_dir(&folder).map_err(Failure::file(&folder))?.count();
        Ok(Resources { descriptors, resident_bytes: rss_bytes_of(self.server.process())? })
    }

    /// Processor time of its threads so far, nanoseconds, by name; numbered threads of one kind together.
    pub(super) fn threads_ns(&self) -> Result<BTreeMap<String, u64>, Failure> {
        let mut kinds = BTreeMap::new();
        for (name, ns) in self.server.threads_ns()? {
            let kind = name.trim_end_matches(|c: char| c.is_ascii_digit() || c == '-').to_owned();
            *kinds.entry(kind).or_default() += ns;
        }
        Ok(kinds)
    }

    /// Who holds how much of a prompt.
    pub(super) fn overlaps(&mut self, prompt: &[LocalHash]) -> Result<OverlapReply, Failure> {
        let hashes: Vec<u8> = prompt.iter().flat_map(|local| local.0.to_le_bytes()).collect();
        let token_count = u32::from(PROMPT_BLOCKS) * BLOCK_SIZE;
        let prompt = Prompt::LocalHashes { hashes: &hashes, scheme: SCHEME, token_count };
        Ok(self.client()?.overlap(&RouteRequest::new(SpaceId(0), prompt))?)
    }

    /// Batches of the engines that it has not applied yet, and ranks whose overlaps are not exact. Ranks that it does not
    /// list count as wholly unapplied.
    pub(super) fn behind(&mut self, engines: &[RankState]) -> Result<Behind, Failure> {
        let reply = self.overlaps(&shared_prompt(0))?;
        let known: FxHashMap<_, _> =
            reply.workers.iter().map(|entry| ((entry.worker.id.0, entry.worker.rank.0), entry.trust)).collect();
        let mut behind = Behind::default();
        for rank in engines {
            let trust = known.get(&(u64::from(rank.worker), rank.rank));
            let applied = trust.and_then(|trust| trust.as_of_seq).map_or(0, |seq| seq.0 + 1);
            behind.batches += rank.next_seq.saturating_sub(applied);
            behind.inexact_ranks += usize::from(trust.is_none_or(|trust| trust.level != TrustLevel::Exact));
        }
        Ok(behind)
    }

    /// Counters of the daemon, and those of its workers summed.
    pub(super) fn counters(&self) -> Result<BTreeMap<String, u64>, Failure> {
        let options = ClientOptions { timeout: Some(REPLY_MAX), ..ClientOptions::default() };
        let mut admin = Client::connect_admin(&self.server.socket(), &options)?;
        let page = admin.status_all()?;
        let mut counters: BTreeMap<String, u64> = page.counters.into_iter().collect();
        for (name, value) in page.workers.into_iter().flat_map(|worker| worker.counters) {
            *counters.entry(format!("worker_{name}")).or_default() += value;
        }
        Ok(counters)
    }

    fn client(&mut self) -> Result<&mut Client, Failure> {
        self.client.as_mut().ok_or_else(|| Failure::Contract("the daemon has not started".to_owned()))
    }
}

/// How far a daemon is behind the engines.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Behind {
    /// Batches not applied.
    pub(super) batches: u64,
    /// Ranks whose overlaps are not exact.
    pub(super) inexact_ranks: usize,
}
