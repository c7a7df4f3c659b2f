//! Compares what daemons say with what the engines held.

use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use kvrouted::client::{Client, ClientOptions, Prompt, RouteRequest};
use kvrouted::error::Result;
use kvrouted::ids::{LocalHash, SpaceId};
use kvrouted::trust::TrustLevel;
use kvrouted::wire::OverlapReply;
use serde::Serialize;

use super::engine::Engine;
use crate::ingest::{BLOCK_SIZE, SCHEME};

/// Overlaps so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub(super) struct Compared {
    /// Those that the daemon called exact, and that were compared.
    pub(super) exact: u64,
    /// Of these, those that were wrong.
    pub(super) wrong: u64,
    /// Those that it did not call exact.
    pub(super) inexact: u64,
    /// Questions that it did not answer: it was dead, or just starting.
    pub(super) unanswered: u64,
}

/// Connections to daemons that are asked for overlaps.
pub(super) struct Checker {
    clients: Vec<Option<Client>>,
    prompts: Vec<Vec<u8>>,
    pub(super) compared: Compared,
    /// What was wrong first.
    pub(super) first_wrong: Vec<String>,
}

/// Wrong overlaps that the report shows.
const SHOWN_MAX: usize = 10;
/// How often a daemon is asked whether it has moved on, and the pause before each time.
const MOVES_MAX: u32 = 10;
const MOVES_WITHIN: Duration = Duration::from_millis(100);

impl Checker {
    /// Makes a checker for a number of daemons. It asks about these prompts.
    pub(super) fn new(daemons: usize, prompts: &[Vec<LocalHash>]) -> Self {
        let bytes = |prompt: &Vec<LocalHash>| prompt.iter().flat_map(|local| local.0.to_le_bytes()).collect();
        Self {
            clients: (0..daemons).map(|_| None).collect(),
            prompts: prompts.iter().map(bytes).collect(),
            compared: Compared::default(),
            first_wrong: Vec::new(),
        }
    }

    /// Asks one daemon about one shared prompt, while engines compute.
    ///
    /// A daemon reads its tree after the number of the last batch, which moves only when it has applied all that has come.
    /// So the daemon is asked three times: what it says second was true at a batch between those that it names first and
    /// third. If it was not, the thread that applies batches may have been kept from moving the number, so the third
    /// question is put again.
    pub(super) fn look(&mut self, daemon: usize, socket: &Path, prompt: usize, engines: &[Engine]) {
        let asked = self.ask_twice(daemon, socket, prompt);
        let Ok([before, reply]) = asked else { return self.unanswered(daemon) };
        let mut open: Vec<_> = Vec::new();
        for entry in reply.workers {
            match engines.get(entry.worker.id.0 as usize).filter(|_| entry.trust.level == TrustLevel::Exact) {
                Some(_) => open.push(entry),
                None => self.compared.inexact += 1,
            }
        }
        let exact = open.len() as u64;
        for again in 0..=MOVES_MAX {
            if again > 0 {
                thread::sleep(MOVES_WITHIN);
            }
            let Ok(after) = self.ask(daemon, socket, prompt) else { return self.unanswered(daemon) };
            open.retain(|entry| {
                let at = entry.worker.id.0 as usize;
                let range = (last_batch(&before, at).unwrap_or(0), last_batch(&after, at).unwrap_or(u64::MAX));
                // An engine that began anew in between counts its batches from 0.
                let range = if range.0 <= range.1 { range } else { (0, u64::MAX) };
                !engines[at].truth().held(prompt as u32, range, entry.overlap.device, Instant::now())
            });
            if open.is_empty() {
                break;
            }
        }
        self.compared.exact += exact;
        for entry in open {
            let at = entry.worker.id.0 as usize;
            let (found, seq) = (entry.overlap.device, last_batch(&before, at));
            let truth = engines[at].truth().tell(prompt as u32);
            self.wrong(format!(
                "router {daemon}, engine {at}, prompt {prompt}: {found} from batch {seq:?} on; {truth}"
            ));
        }
    }

    fn unanswered(&mut self, daemon: usize) {
        self.clients[daemon] = None;
        self.compared.unanswered += 1;
    }

    /// Asks one daemon about every shared prompt, while nothing is computed. Whether it has applied all batches.
    ///
    /// # Errors
    /// It does not answer.
    pub(super) fn look_at_all(&mut self, daemon: usize, socket: &Path, engines: &[Engine]) -> Result<bool> {
        let mut has_all = true;
        for prompt in 0..self.prompts.len() {
            let reply = self.ask(daemon, socket, prompt)?;
            has_all &= reply.workers.len() == engines.len();
            for entry in &reply.workers {
                let at = entry.worker.id.0 as usize;
                let is_exact = entry.trust.level == TrustLevel::Exact;
                let Some(engine) = engines.get(at).filter(|_| is_exact) else {
                    self.compared.inexact += 1;
                    has_all = false;
                    continue;
                };
                let truth = engine.truth();
                let (held, last) = (u32::from(truth.now(prompt as u32)), truth.last_seq());
                drop(truth);
                if entry.trust.as_of_seq.map(|seq| seq.0) != last {
                    has_all = false;
                    continue;
                }
                self.compared.exact += 1;
                if entry.overlap.device != held {
                    let found = entry.overlap.device;
                    self.wrong(format!("router {daemon}, engine {at}, prompt {prompt}: {found} in place of {held}"));
                }
            }
        }
        Ok(has_all)
    }

    fn wrong(&mut self, what: String) {
        self.compared.wrong += 1;
        if self.first_wrong.len() < SHOWN_MAX {
            self.first_wrong.push(what);
        }
    }

    fn ask_twice(&mut self, daemon: usize, socket: &Path, prompt: usize) -> Result<[OverlapReply; 2]> {
        let mut ask = || self.ask(daemon, socket, prompt);
        Ok([ask()?, ask()?])
    }

    fn ask(&mut self, daemon: usize, socket: &Path, prompt: usize) -> Result<OverlapReply> {
        let client = match &mut self.clients[daemon] {
            Some(client) => client,
            none => none.insert(Client::connect(socket, &ClientOptions::default())?),
        };
        let hashes = &self.prompts[prompt];
        let token_count = (hashes.len() / size_of::<u64>()) as u32 * BLOCK_SIZE;
        client.overlap(&RouteRequest::new(SpaceId(0), Prompt::LocalHashes { hashes, scheme: SCHEME, token_count }))
    }
}

/// The last batch of an engine that a daemon had applied.
fn last_batch(reply: &OverlapReply, engine: usize) -> Option<u64> {
    let entry = reply.workers.iter().find(|entry| entry.worker.id.0 == engine as u64);
    entry.and_then(|entry| entry.trust.as_of_seq).map(|seq| seq.0)
}
