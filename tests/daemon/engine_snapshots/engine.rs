//! An engine that sends snapshots of its own, as the open proposals describe it: a publisher whose batches name its
//! lifetime, and a ROUTER socket in a thread that answers with a snapshot. It can be made to misbehave.
//!
//! It shares no code with the reader in the daemon.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread::JoinHandle;

use kvrouted::ids::EngineHash;
use kvrouted::limits::ENGINE_SNAPSHOT_PARTS_MAX;

use crate::kit::engine::{BLOCK_SIZE, Publisher, engine_hashes};
use crate::kit::until;
use crate::vllm::Batch;

/// Whose proposal it follows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Proposal {
    Vllm,
    Sglang,
}

impl Proposal {
    /// The value of `engine_snapshots`.
    pub(crate) const fn field(self) -> &'static str {
        match self {
            Self::Vllm => "vllm-57789",
            Self::Sglang => "sglang-34407",
        }
    }
}

/// What is wrong with every answer while it lasts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fault {
    /// There is none.
    Silence,
    /// The engine has no snapshot.
    Unavailable,
    /// The frame of the cut lacks a byte.
    Torn,
    /// A batch of the snapshot is cut off.
    TornBatch,
    /// It is of another lifetime.
    OtherLifetime,
    /// It ends behind what was ever sent.
    Ahead,
    /// It ends at the first batch, which is older than every question. The engine may send more before it answers, so the
    /// batch before the last one need not be.
    Behind,
    /// It has more parts than a snapshot may have.
    TooManyParts,
}

/// What the publisher's thread and the answering thread share.
struct State {
    proposal: Proposal,
    publisher: Publisher,
    lifetime: [u8; 16],
    /// The sequence number of the next batch.
    next: u64,
    /// Every store so far, in order: the tokens of a chain from the root.
    sources: Vec<Vec<u32>>,
    /// References to each block.
    held: BTreeMap<u64, u32>,
    /// References stored since the start of this lifetime.
    emitted: BTreeMap<u64, u32>,
    fault: Option<Fault>,
    asked: u32,
}

/// The engine.
pub(crate) struct Engine {
    pub(crate) snapshots: String,
    state: Arc<Mutex<State>>,
    ends: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Engine {
    pub(crate) fn new(proposal: Proposal) -> Self {
        let state = Arc::new(Mutex::new(State {
            proposal,
            publisher: Publisher::new(),
            lifetime: [1; 16],
            next: 0,
            sources: Vec::new(),
            held: BTreeMap::new(),
            emitted: BTreeMap::new(),
            fault: None,
            asked: 0,
        }));
        let router = zmq::Context::new().socket(zmq::ROUTER).expect("a socket");
        router.set_linger(0).expect("no linger");
        router.set_rcvtimeo(20).expect("a time limit");
        until("a port is free", || router.bind("tcp://127.0.0.1:*").is_ok());
        let snapshots = router.get_last_endpoint().expect("an endpoint").expect("of text");
        let ends = Arc::new(AtomicBool::new(false));
        let (state_there, ends_there) = (Arc::clone(&state), Arc::clone(&ends));
        let thread = std::thread::spawn(move || {
            // Relaxed: nothing hangs on it.
            while !ends_there.load(Ordering::Relaxed) {
                if let Ok(frames) = router.recv_multipart(0) {
                    answer(&router, &frames, &mut state_there.lock().expect("not poisoned"));
                }
            }
        });
        Self { snapshots, state, ends, thread: Some(thread) }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("not poisoned")
    }

    /// The lines of its `[[worker]]`.
    pub(crate) fn table(&self, id: u64) -> String {
        let state = self.state();
        format!(
            "[[worker]]\nid = {id}\nendpoint = \"{}\"\nengine_snapshots = \"{}\"\nsnapshot_endpoint = \"{}\"\n",
            state.publisher.endpoint(),
            state.proposal.field(),
            self.snapshots,
        )
    }

    pub(crate) fn await_subscription(&self) {
        self.state().publisher.await_subscription();
    }

    pub(crate) fn misbehave(&self, fault: Option<Fault>) {
        self.state().fault = fault;
    }

    pub(crate) fn asked(&self) -> u32 {
        self.state().asked
    }

    /// Leading blocks of a prompt that it holds.
    pub(crate) fn overlap(&self, tokens: &[u32]) -> u32 {
        let state = self.state();
        engine_hashes(tokens).iter().take_while(|hash| state.held.contains_key(&hash.0)).count() as u32
    }

    /// Stores the whole blocks of `tokens`, unless `is_lost` on the way.
    pub(crate) fn store(&self, tokens: &[u32], is_lost: bool) {
        let mut state = self.state();
        let batch = stored(Batch::new(state.next as u32), tokens);
        for hash in engine_hashes(tokens) {
            *state.held.entry(hash.0).or_default() += 1;
            *state.emitted.entry(hash.0).or_default() += 1;
        }
        state.sources.push(tokens.to_vec());
        state.send(&batch, is_lost);
    }

    /// Evicts the last blocks of a chain.
    pub(crate) fn evict(&self, tokens: &[u32], blocks: usize) {
        let mut state = self.state();
        let hashes = engine_hashes(tokens);
        let evicted: Vec<u64> = hashes[hashes.len() - blocks..].iter().map(|hash| hash.0).collect();
        for hash in &evicted {
            let references = state.held.get_mut(hash).expect("held");
            *references -= 1;
            if *references == 0 {
                state.held.remove(hash);
            }
        }
        let batch = Batch::new(state.next as u32).removed(&evicted);
        state.send(&batch, false);
    }

    /// Sends a batch without events.
    pub(crate) fn heartbeat(&self) {
        let mut state = self.state();
        let batch = Batch::new(state.next as u32);
        state.send(&batch, false);
    }

    /// Begins another lifetime with an empty cache, although its sequence numbers go on.
    pub(crate) fn restart(&self) {
        let mut state = self.state();
        state.lifetime[0] += 1;
        state.sources.clear();
        state.held.clear();
        state.emitted.clear();
    }
}

impl State {
    fn send(&mut self, batch: &Batch, is_lost: bool) {
        self.send_as(batch, None, is_lost);
    }

    /// Sends a batch. SGLang names a barrier in its topic.
    fn send_as(&mut self, batch: &Batch, barrier: Option<&str>, is_lost: bool) {
        let seq = self.next.to_be_bytes();
        self.next += 1;
        if is_lost {
            return;
        }
        let (topic, framed) = match self.proposal {
            Proposal::Vllm => (b"".to_vec(), [&seq[..], &self.lifetime].concat()),
            Proposal::Sglang => (topic(&self.lifetime, barrier), seq.to_vec()),
        };
        self.publisher.send_frames(&[&topic, &framed, &batch.payload()]);
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        self.ends.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            drop(thread.join());
        }
    }
}

fn topic(lifetime: &[u8; 16], barrier: Option<&str>) -> Vec<u8> {
    let barrier = barrier.map_or(String::new(), |id| format!("\0sgl-kv-snapshot={id}"));
    format!("\0sgl-kv-epoch={}{barrier}", epoch(lifetime)).into_bytes()
}

fn epoch(lifetime: &[u8; 16]) -> String {
    lifetime.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn stored(batch: Batch, tokens: &[u32]) -> Batch {
    let hashes: Vec<u64> = engine_hashes(tokens).iter().map(|EngineHash(hash)| *hash).collect();
    let whole = &tokens[..hashes.len() * BLOCK_SIZE as usize];
    batch.stored_with(None, &hashes, whole, BLOCK_SIZE as usize, Some("GPU"), &[])
}

/// Answers a question, or does not.
fn answer(router: &zmq::Socket, frames: &[Vec<u8>], state: &mut State) {
    let [identity, delimiter, question] = frames else { return };
    let expected: &[u8] = if state.proposal == Proposal::Vllm { b"snapshot" } else { b"snapshot-v1" };
    assert!(delimiter.is_empty() && question == expected, "{frames:?}");
    state.asked += 1;
    let send = |frames: &[Vec<u8>]| {
        let mut message = vec![identity.clone(), Vec::new()];
        message.extend_from_slice(frames);
        // The daemon may have cut the connection.
        let _ = router.send_multipart(message, 0);
    };
    match (state.proposal, state.fault) {
        (_, Some(Fault::Silence)) => {}
        (Proposal::Vllm, _) => send(&vllm(state)),
        (Proposal::Sglang, _) => sglang(state).iter().for_each(|message| send(message)),
    }
}

/// The cut, the lifetime, and batches: every store in its order, then removals of what is too much.
fn vllm(state: &State) -> Vec<Vec<u8>> {
    let last = state.next as i64 - 1;
    let cut = match state.fault {
        Some(Fault::Unavailable) => -2,
        Some(Fault::Ahead) => last + 1_000_000,
        Some(Fault::Behind) => 0,
        _ => last,
    };
    let (mut cut, mut lifetime) = (cut.to_be_bytes().to_vec(), state.lifetime.to_vec());
    match state.fault {
        Some(Fault::Torn) => drop(cut.pop()),
        Some(Fault::OtherLifetime) => lifetime[15] ^= 1,
        _ => {}
    }
    let mut frames = vec![cut, lifetime];
    if state.fault == Some(Fault::Unavailable) {
        return frames;
    }
    frames.extend(state.sources.iter().map(|tokens| stored(Batch::new(0), tokens).payload()));
    let mut excess = Vec::new();
    for (hash, times) in &state.emitted {
        let live = state.held.get(hash).copied().unwrap_or_default();
        excess.extend((live..*times).map(|_| *hash));
    }
    frames.extend(excess.chunks(100).map(|hashes| Batch::new(0).removed(hashes).payload()));
    match state.fault {
        Some(Fault::TornBatch) => drop(frames.last_mut().expect("a batch").pop()),
        Some(Fault::TooManyParts) => frames.extend(vec![Vec::new(); ENGINE_SNAPSHOT_PARTS_MAX]),
        _ => {}
    }
    frames
}

/// A batch without events as the barrier; then a header, one chunk and the end.
fn sglang(state: &mut State) -> Vec<Vec<Vec<u8>>> {
    let message = |kind: &str, payload: Vec<u8>| vec![kind.as_bytes().to_vec(), payload];
    if state.fault == Some(Fault::Unavailable) {
        return vec![message("error", b"snapshot provider busy".to_vec())];
    }
    let mut records: Vec<(Option<u64>, u64)> = Vec::new();
    for tokens in &state.sources {
        let mut parent = None;
        for EngineHash(hash) in engine_hashes(tokens) {
            if state.held.contains_key(&hash) && records.iter().all(|(_, of)| *of != hash) {
                records.push((parent, hash));
            }
            parent = Some(hash);
        }
    }
    let barrier = Batch::new(state.next as u32);
    state.send_as(&barrier, Some("b"), false);
    let (last, mut header) = (state.next - 1, vec![0x97, 1]);
    let epoch = epoch(&state.lifetime);
    header.extend([0xd9, epoch.len() as u8]);
    header.extend(epoch.as_bytes());
    header.push(0);
    header.extend(number(last + 1));
    header.extend(number(last));
    header.extend([0xa1, b'b']);
    header.extend(number(records.len() as u64));
    let mut chunk = vec![0xdc];
    chunk.extend((records.len() as u16).to_be_bytes());
    for (parent, hash) in records {
        chunk.push(0x92);
        match parent {
            Some(parent) => chunk.extend(number(parent)),
            None => chunk.push(0xc0),
        }
        chunk.push(0x91);
        chunk.extend(number(hash));
    }
    vec![message("header", header), message("chunk", chunk), message("end", Vec::new())]
}

fn number(number: u64) -> Vec<u8> {
    [&[0xcf][..], &number.to_be_bytes()].concat()
}
