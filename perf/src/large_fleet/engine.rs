//! One rank of a simulated engine: a publisher, a replay socket, and the cache that both speak of.
//!
//! The sockets are those of `kvrouted::zmtp`, which a relay binds too: on one thread, without a thread or a queue for
//! each socket, thousands of them leave the processors to the daemon.

use std::collections::VecDeque;
use std::io;
use std::time::Duration;

use kvrouted::endpoint::BoundEndpoint;
use kvrouted::limits::ZMQ_COMMAND_BYTES_MAX;
use kvrouted::zmtp::{self, Bounds, Message, PeerId, Role, Sent, Server, ServerPlan};
use rand::{RngExt, SeedableRng};
use rand_xoshiro::Xoshiro256PlusPlus;

use super::cache::Cache;
use super::contents::{Owner, SHARED_PROMPTS, Step};
use super::orders::{Endpoints, RankState};
use crate::failure::Failure;

/// Batches kept for replays: vLLM's default of `buffer_steps`.
const REPLAY_BATCHES_MAX: usize = 10_000;
/// Messages of one answer that are sent before other work goes on.
const ANSWER_MESSAGES_MAX: u32 = 256;
/// The sequence number of the end marker, -1.
const END: u64 = u64::MAX;

/// What a subscriber or a requester may send: it sends next to nothing.
const REQUESTS: Bounds =
    Bounds { message_bytes_max: 1 << 10, parts_max: 4, command_bytes_max: ZMQ_COMMAND_BYTES_MAX, keeps_parts: false };
/// More daemons than any run starts.
const DAEMONS_MAX: usize = 256;
/// vLLM's default of `hwm`.
const PUBLISHING: ServerPlan = ServerPlan {
    role: Role::Publisher,
    bounds: REQUESTS,
    waiting_bytes_max: 64 << 20,
    waiting_messages_max: 100_000,
    peers_max: DAEMONS_MAX,
    peers_per_address_max: DAEMONS_MAX,
};
const REPLAYING: ServerPlan =
    ServerPlan { role: Role::Router, waiting_bytes_max: 4 << 20, waiting_messages_max: 512, ..PUBLISHING };

/// Where a rank binds its sockets.
pub(crate) struct Sockets {
    /// The publisher.
    pub(crate) events: String,
    /// The replay socket.
    pub(crate) replays: String,
}

/// Where a requester is in its answer.
struct Asker {
    peer: PeerId,
    next_seq: u64,
}

/// A rank.
pub(crate) struct Rank {
    owner: Owner,
    events: Server,
    replays: Server,
    cache: Cache,
    random: Xoshiro256PlusPlus,
    /// The last batches, oldest first. A replay encodes them again.
    history: VecDeque<Step>,
    next_seq: u64,
    askers: Vec<Asker>,
    /// Batches that were not published.
    dropped: u64,
}

impl Rank {
    /// Binds the sockets of a rank with an empty cache.
    ///
    /// # Errors
    /// No port or no descriptor is left.
    pub(crate) fn new(owner: Owner, cache_blocks: u32) -> Result<Self, Failure> {
        let any = || "tcp://127.0.0.1:*".to_owned();
        Self::bound(owner, cache_blocks, &Sockets { events: any(), replays: any() }, 0)
    }

    /// Binds these sockets. An engine does other work in each of its lives.
    ///
    /// # Errors
    /// An address is taken or not of this host, or no descriptor is left.
    pub(crate) fn bound(owner: Owner, cache_blocks: u32, sockets: &Sockets, life: u64) -> Result<Self, Failure> {
        let bind = |at: &str, plan| {
            let at = BoundEndpoint::parse(at).map_err(|error| error.to_string());
            at.and_then(|at| Server::bind(&at, plan).map_err(|error| error.to_string())).map_err(Failure::Contract)
        };
        let seed = life << 48 | u64::from(owner.worker) << 16 | u64::from(owner.rank);
        Ok(Self {
            owner,
            events: bind(&sockets.events, PUBLISHING)?,
            replays: bind(&sockets.replays, REPLAYING)?,
            cache: Cache::new(cache_blocks),
            random: Xoshiro256PlusPlus::seed_from_u64(seed),
            history: VecDeque::new(),
            next_seq: 0,
            askers: Vec::new(),
            dropped: 0,
        })
    }

    /// The worker's id.
    pub(crate) const fn worker(&self) -> u32 {
        self.owner.worker
    }

    /// Computes until the cache is full.
    pub(crate) fn fill(&mut self) {
        while !self.cache.is_full() {
            self.step(0.0);
        }
    }

    /// Whether each further step evicts.
    pub(crate) const fn is_full(&self) -> bool {
        self.cache.is_full()
    }

    /// Leading blocks of a prompt that it holds.
    pub(crate) fn depth(&self, prompt: u32) -> u8 {
        self.cache.depth(prompt)
    }

    /// Computes a step and publishes its batch, unless chance (`loss`, 0 to 1) drops it. The number of the batch.
    pub(crate) fn step(&mut self, loss: f64) -> (u64, Step) {
        let step = self.cache.step(&mut self.random);
        let seq = self.next_seq;
        self.next_seq += 1;
        if self.history.len() == REPLAY_BATCHES_MAX {
            self.history.pop_front();
        }
        self.history.push_back(step);
        if loss > 0.0 && self.random.random_bool(loss) {
            self.dropped += 1;
        } else if self.events.peers() > 0 {
            self.events.publish(&zmtp::message(&[b"", &seq.to_be_bytes()], &self.owner.payload(seq, &step)));
        }
        (seq, step)
    }

    /// Takes connections and questions, and sends what the kernel takes.
    ///
    /// # Errors
    /// An event loop failed.
    pub(crate) fn attend(&mut self, now_ms: u64, received: &mut Vec<(PeerId, Message)>) -> io::Result<()> {
        self.events.serve_peers(Duration::ZERO, now_ms, received)?;
        received.clear();
        self.replays.serve_peers(Duration::ZERO, now_ms, received)?;
        for (peer, question) in received.drain(..) {
            // As the engines: a question of another form is not answered.
            if let Ok(from) = <[u8; 8]>::try_from(&question.last[..]) {
                self.askers.retain(|asker| asker.peer != peer);
                self.askers.push(Asker { peer, next_seq: u64::from_be_bytes(from) });
            }
        }
        Ok(())
    }

    /// Whether a daemon is connected to its replay socket.
    pub(crate) const fn has_requester(&self) -> bool {
        self.replays.peers() > 0
    }

    /// Goes on with its answers; `true` = an answer has more.
    pub(crate) fn answer(&mut self) -> bool {
        let first_seq = self.next_seq - self.history.len() as u64;
        let Self { owner, replays, history, askers, .. } = self;
        askers.retain_mut(|asker| {
            for _ in 0..ANSWER_MESSAGES_MAX {
                let seq = asker.next_seq.max(first_seq);
                let step = history.get((seq - first_seq) as usize);
                let (number, payload) = step.map_or((END, Vec::new()), |step| (seq, owner.payload(seq, step)));
                let message = zmtp::message(&[b"", b"", &number.to_be_bytes()], &payload);
                match replays.send(asker.peer, [message]) {
                    Sent::Yes if number == END => return false,
                    Sent::Yes => asker.next_seq = seq + 1,
                    Sent::Full => return true,
                    Sent::Gone => return false,
                }
            }
            true
        });
        !self.askers.is_empty()
    }

    /// Where its sockets are.
    pub(crate) fn endpoints(&self) -> Endpoints {
        let Owner { worker, rank } = self.owner;
        let (endpoint, replay) = (self.events.endpoint().to_owned(), self.replays.endpoint().to_owned());
        Endpoints { worker, rank, endpoint, replay }
    }

    /// What the daemon should know of it.
    pub(crate) fn state(&self) -> RankState {
        let newest = self.cache.newest_private();
        RankState {
            worker: self.owner.worker,
            rank: self.owner.rank,
            next_seq: self.next_seq,
            held_blocks: self.cache.held_blocks(),
            shared: (0..SHARED_PROMPTS).map(|prompt| self.cache.depth(prompt)).collect(),
            private: newest.map(|prompt| (prompt, self.cache.depth(prompt))),
            dropped: self.dropped + self.events.counts().messages_dropped,
            cut: self.events.counts().peers_stalled + self.events.counts().peers_cut,
        }
    }
}
