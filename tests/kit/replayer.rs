//! The replay socket of a simulated engine: a ROUTER in a thread of its own. It can be made to misbehave. An engine that
//! has one.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

use kvrouted::event::flat::Encoder;
use kvrouted::event::{BatchInfo, Cleared, KvEvent, Medium, Removed};
use kvrouted::ids::{GroupId, Tier};

use super::engine::{BLOCK_SIZE, Publisher, SCHEME, engine_hashes, stored};
use super::until;

/// What is wrong with the next answer.
#[derive(Clone, Debug)]
pub(crate) enum Fault {
    /// There is none.
    Silence,
    /// It lacks these sequence numbers.
    Without(Vec<u64>),
    /// It begins with this sequence number, not with the one asked for.
    Late(u64),
    /// It has every batch twice.
    Twice,
    /// It ends with this sequence number.
    Short(u64),
    /// It has no end marker.
    NoMarker,
    /// A message of too few frames precedes it.
    Misframed,
}

/// The batches an engine can send again, and the faults of its next answers.
#[derive(Debug, Default)]
struct Kept {
    batches: Vec<(u64, Vec<u8>)>,
    faults: VecDeque<Fault>,
    asked: Vec<u64>,
}

/// A publisher's replay socket.
pub(crate) struct Replayer {
    pub(crate) endpoint: String,
    kept: Arc<Mutex<Kept>>,
    ends: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Replayer {
    /// Answers with a topic frame where `has_topic`, as newer engines do.
    pub(crate) fn start(endpoint: &str, has_topic: bool) -> Self {
        let router = zmq::Context::new().socket(zmq::ROUTER).expect("a socket");
        router.set_linger(0).expect("no linger");
        router.set_sndhwm(0).expect("no mark");
        router.set_rcvtimeo(20).expect("a time limit");
        until("the endpoint is free", || router.bind(endpoint).is_ok());
        let endpoint = router.get_last_endpoint().expect("an endpoint").expect("of text");
        let (kept, ends) = (Arc::new(Mutex::new(Kept::default())), Arc::new(AtomicBool::new(false)));
        let (kept_there, ends_there) = (Arc::clone(&kept), Arc::clone(&ends));
        let thread = std::thread::spawn(move || {
            // Relaxed: nothing hangs on it.
            while !ends_there.load(Ordering::Relaxed) {
                if let Ok(frames) = router.recv_multipart(0) {
                    serve(&router, &frames, &kept_there, has_topic);
                }
            }
        });
        Self { endpoint, kept, ends, thread: Some(thread) }
    }

    /// Keeps a batch for replays.
    pub(crate) fn keep(&self, seq: u64, payload: Vec<u8>) {
        self.kept.lock().expect("not poisoned").batches.push((seq, payload));
    }

    /// Gives the next answers these faults, one each.
    pub(crate) fn misbehave(&self, faults: impl IntoIterator<Item = Fault>) {
        self.kept.lock().expect("not poisoned").faults.extend(faults);
    }

    /// Forgets every batch, as an engine does that restarts.
    pub(crate) fn forget(&self) {
        self.kept.lock().expect("not poisoned").batches.clear();
    }

    /// Forgets the batches before one, as an engine does whose buffer is full.
    pub(crate) fn forget_before(&self, first: u64) {
        self.kept.lock().expect("not poisoned").batches.retain(|(seq, _)| *seq >= first);
    }

    /// The first sequence number of each request so far.
    pub(crate) fn asked(&self) -> Vec<u64> {
        self.kept.lock().expect("not poisoned").asked.clone()
    }
}

impl Drop for Replayer {
    fn drop(&mut self) {
        self.ends.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            drop(thread.join());
        }
    }
}

fn serve(router: &zmq::Socket, frames: &[Vec<u8>], kept: &Mutex<Kept>, has_topic: bool) {
    // As the engines: another count of frames is not answered.
    let [identity, _, start] = frames else { return };
    let Ok(start) = <[u8; 8]>::try_from(start.as_slice()).map(u64::from_be_bytes) else { return };
    let (batches, fault) = {
        let mut kept = kept.lock().expect("not poisoned");
        kept.asked.push(start);
        (kept.batches.clone(), kept.faults.pop_front())
    };
    let send = |seq: u64, payload: &[u8]| {
        let (seq, topic) = (seq.to_be_bytes(), b"kv".as_slice());
        let mut reply: Vec<&[u8]> = vec![identity, b""];
        if has_topic {
            reply.push(if payload.is_empty() { b"" } else { topic });
        }
        reply.extend([seq.as_slice(), payload]);
        router.send_multipart(reply, 0).expect("sent");
    };
    if matches!(fault, Some(Fault::Silence)) {
        return;
    }
    if matches!(fault, Some(Fault::Misframed)) {
        router.send_multipart([identity.as_slice(), b"", b"short", b"x"], 0).expect("sent");
    }
    for (seq, payload) in batches.iter().filter(|(seq, _)| *seq >= start) {
        match &fault {
            Some(Fault::Without(lost)) if lost.contains(seq) => continue,
            Some(Fault::Late(first)) if seq < first => continue,
            Some(Fault::Short(last)) if seq > last => continue,
            Some(Fault::Twice) => send(*seq, payload),
            _ => {}
        }
        send(*seq, payload);
    }
    if !matches!(fault, Some(Fault::NoMarker)) {
        send(u64::MAX, b"");
    }
}

/// An engine that sends again what it has published.
pub(crate) struct Engine {
    pub(crate) publisher: Publisher,
    pub(crate) replayer: Replayer,
    encoder: Encoder,
}

impl Engine {
    pub(crate) fn new() -> Self {
        let replayer = Replayer::start("tcp://127.0.0.1:*", true);
        Self { publisher: Publisher::new(), replayer, encoder: Encoder::new() }
    }

    pub(crate) fn await_subscription(&self) {
        self.publisher.await_subscription();
    }

    /// Stores the whole blocks of `tokens` at the root.
    pub(crate) fn store(&mut self, tokens: &[u32]) {
        let hashes = engine_hashes(tokens);
        self.send(stored(&hashes, tokens, BLOCK_SIZE));
    }

    /// Removes the last blocks of `tokens`.
    pub(crate) fn remove_last(&mut self, tokens: &[u32], blocks: usize) {
        let hashes = engine_hashes(tokens);
        let removed = &hashes[hashes.len() - blocks..];
        self.send(KvEvent::Removed(Removed { hashes: removed, medium: Medium::Tier(Tier::Device), group: GroupId(0) }));
    }

    /// Clears every tier.
    pub(crate) fn clear(&mut self) {
        self.send(KvEvent::Cleared(Cleared { tier: None }));
    }

    fn send(&mut self, event: KvEvent<'_>) {
        let seq = self.publisher.seq;
        let info = BatchInfo { scheme: Some(SCHEME), published_at_unix_s: seq as f64, ..BatchInfo::default() };
        let payload = self.encoder.encode(&info, [event]).to_vec();
        self.replayer.keep(seq, payload.clone());
        self.publisher.send_payload(&payload);
    }

    /// Begins again with an empty cache, at the same endpoints.
    pub(crate) fn restart(&mut self) {
        self.replayer.forget();
        self.publisher.seq = 0;
    }
}
