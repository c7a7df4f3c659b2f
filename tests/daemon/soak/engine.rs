//! Simulated engines whose cache at any past batch can be looked up. Conversations share the beginning of their family;
//! engines store them as they are prompted and evict them from their ends.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use kvrouted::event::flat::Encoder;
use kvrouted::event::{BatchInfo, Cleared, Content, GroupKind, KvEvent, Medium, Removed, Salt, Stored};
use kvrouted::ids::{EngineHash, GroupId, Tier};
use rand::{RngExt, SeedableRng};
use rand_xoshiro::Xoshiro256PlusPlus;

use crate::kit::engine::{BLOCK_SIZE, Publisher, SCHEME, engine_hashes};

/// Families of conversations, and conversations of each.
pub(crate) const FAMILIES: usize = 12;
const SIBLINGS: usize = 6;
/// Conversations there are.
pub(crate) const CONVERSATIONS: usize = FAMILIES * SIBLINGS;
/// Blocks at the beginning of a conversation that its family shares, and those that are its own.
const SHARED_BLOCKS: usize = 6;
const OWN_BLOCKS: usize = 18;
/// Blocks of a whole conversation.
pub(crate) const BLOCKS: usize = SHARED_BLOCKS + OWN_BLOCKS;
/// Blocks an engine has room for: about a third of all.
const CAPACITY_BLOCKS: usize = CONVERSATIONS * OWN_BLOCKS / 3;
/// Batches of which it is remembered what was held.
const REMEMBERED_BATCHES: u64 = 1 << 15;
/// One of this many batches clears everything.
const CLEAR_ONE_IN: u32 = 4000;
/// Between two batches.
const BATCH_EVERY: Duration = Duration::from_millis(5);

/// What can be prompted: every conversation's tokens, and what engines call its blocks.
pub(crate) struct Prompts {
    tokens: Vec<Vec<u32>>,
    hashes: Vec<Vec<EngineHash>>,
}

impl Prompts {
    pub(crate) fn new() -> Self {
        let of = |conversation: usize| -> Vec<u32> {
            let family = conversation / SIBLINGS;
            let block = |at: usize| if at < SHARED_BLOCKS { family } else { 1000 + conversation };
            let tokens = (0..BLOCKS * BLOCK_SIZE as usize).map(|at| (at, block(at / BLOCK_SIZE as usize)));
            tokens.map(|(at, whose)| (whose * 4096 + at) as u32).collect()
        };
        let tokens: Vec<Vec<u32>> = (0..CONVERSATIONS).map(of).collect();
        let hashes = tokens.iter().map(|tokens| engine_hashes(tokens)).collect();
        Self { tokens, hashes }
    }

    /// The first `tokens` tokens of a conversation.
    pub(crate) fn tokens(&self, conversation: usize, tokens: usize) -> &[u32] {
        &self.tokens[conversation][..tokens]
    }

    fn blocks(&self, conversation: usize, from: usize, to: usize) -> (&[EngineHash], &[u32]) {
        let size = BLOCK_SIZE as usize;
        (&self.hashes[conversation][from..to], &self.tokens[conversation][from * size..to * size])
    }
}

/// What an engine holds, and what it held.
struct Cache {
    shared: [usize; FAMILIES],
    own: [usize; CONVERSATIONS],
    /// By conversation: as of which batch it was held how deep.
    depths: Vec<VecDeque<(u64, u32)>>,
    /// The next batch.
    next_seq: u64,
}

impl Cache {
    fn depth(&self, conversation: usize) -> usize {
        self.shared[conversation / SIBLINGS] + self.own[conversation]
    }

    fn held(&self) -> usize {
        self.shared.iter().sum::<usize>() + self.own.iter().sum::<usize>()
    }

    /// Notes what is held within the next batch.
    fn note(&mut self) {
        let (seq, oldest) = (self.next_seq, self.next_seq.saturating_sub(REMEMBERED_BATCHES));
        for conversation in 0..CONVERSATIONS {
            let depth = self.depth(conversation) as u32;
            let depths = &mut self.depths[conversation];
            if depths.back().is_none_or(|(_, last)| *last != depth) {
                depths.push_back((seq, depth));
            }
            // The one before the oldest says what was held then.
            while depths.get(1).is_some_and(|(since, _)| *since < oldest) {
                depths.pop_front();
            }
        }
    }
}

/// One change of a cache.
enum Change {
    Store { conversation: usize, from: usize, to: usize },
    Remove { conversation: usize, from: usize, to: usize },
    Clear,
}

impl Change {
    fn draw(cache: &Cache, random: &mut Xoshiro256PlusPlus) -> Option<Self> {
        let conversation = random.random_range(0..CONVERSATIONS);
        if cache.held() >= CAPACITY_BLOCKS || random.random_range(0..4) == 0 {
            return Self::evict(cache, conversation, random);
        }
        let from = cache.depth(conversation);
        let to = (from + random.random_range(1..=8)).min(BLOCKS);
        (from < to).then_some(Self::Store { conversation, from, to })
    }

    /// The end of a conversation, or of the beginning of a family whose conversations have no blocks of their own.
    fn evict(cache: &Cache, conversation: usize, random: &mut Xoshiro256PlusPlus) -> Option<Self> {
        let (family, own) = (conversation / SIBLINGS, cache.own[conversation]);
        let to = cache.depth(conversation);
        let is_leaf = cache.own[family * SIBLINGS..][..SIBLINGS].iter().all(|own| *own == 0);
        let most = if own > 0 {
            own
        } else if is_leaf {
            cache.shared[family]
        } else {
            0
        };
        (most > 0).then(|| Self::Remove { conversation, from: to - random.random_range(1..=most), to })
    }

    fn apply(&self, cache: &mut Cache) {
        match *self {
            Self::Store { conversation, to: depth, .. } | Self::Remove { conversation, from: depth, .. } => {
                // What is removed of the own part leaves the shared one as it is.
                cache.shared[conversation / SIBLINGS] = depth.min(SHARED_BLOCKS);
                cache.own[conversation] = depth.saturating_sub(SHARED_BLOCKS);
            }
            Self::Clear => (cache.shared, cache.own) = ([0; FAMILIES], [0; CONVERSATIONS]),
        }
    }

    fn event<'a>(&self, prompts: &'a Prompts) -> KvEvent<'a> {
        let medium = Medium::Tier(Tier::Device);
        match *self {
            Self::Store { conversation, from, to } => {
                let (hashes, tokens) = prompts.blocks(conversation, from, to);
                KvEvent::Stored(Stored {
                    hashes,
                    parent: from.checked_sub(1).map(|before| prompts.hashes[conversation][before]),
                    content: Content::Tokens { tokens, bigram: false },
                    block_size: BLOCK_SIZE,
                    medium,
                    group: GroupId(0),
                    group_kind: GroupKind::Main,
                    lora: None,
                    salt: Salt::Inherited,
                    media: &[],
                })
            }
            Self::Remove { conversation, from, to } => {
                let (hashes, _) = prompts.blocks(conversation, from, to);
                KvEvent::Removed(Removed { hashes, medium, group: GroupId(0) })
            }
            Self::Clear => KvEvent::Cleared(Cleared { tier: None }),
        }
    }
}

/// An engine as those who check answers see it.
pub(crate) struct Engine {
    pub(crate) endpoint: String,
    cache: Arc<Mutex<Cache>>,
    is_stopped: Arc<AtomicBool>,
    thread: Mutex<Option<std::thread::JoinHandle<Publisher>>>,
    /// Its socket once it is silent, which has to stay: closing drops what is not sent.
    silent: Mutex<Option<Publisher>>,
}

impl Engine {
    /// An engine that publishes once it has a subscriber.
    pub(crate) fn start(prompts: &Arc<Prompts>, seed: u64) -> Self {
        let publisher = Publisher::new();
        let cache = Cache {
            shared: [0; FAMILIES],
            own: [0; CONVERSATIONS],
            depths: vec![VecDeque::new(); CONVERSATIONS],
            next_seq: 0,
        };
        let (endpoint, cache, is_stopped) = (publisher.endpoint(), Arc::new(Mutex::new(cache)), Arc::default());
        let run = {
            let (prompts, cache, is_stopped) = (Arc::clone(prompts), Arc::clone(&cache), Arc::clone(&is_stopped));
            move || publish(publisher, &prompts, &cache, &is_stopped, seed)
        };
        let thread = Mutex::new(Some(std::thread::spawn(run)));
        Self { endpoint, cache, is_stopped, thread, silent: Mutex::default() }
    }

    /// Falls silent; answers with its last batch.
    pub(crate) fn stop(&self) -> u64 {
        // Relaxed: it is only to end some time.
        self.is_stopped.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.lock().unwrap().take() {
            *self.silent.lock().unwrap() = Some(thread.join().expect("the engine ends well"));
        }
        self.published().expect("it has published")
    }

    /// The last batch that may have been heard of.
    pub(crate) fn published(&self) -> Option<u64> {
        self.cache.lock().unwrap().next_seq.checked_sub(1)
    }

    /// The fewest and the most blocks of a conversation that were held between two batches, both included; `None` =
    /// before the first.
    pub(crate) fn depths(&self, conversation: usize, first: Option<u64>, last: Option<u64>) -> (u32, u32) {
        let cache = self.cache.lock().unwrap();
        let depths = &cache.depths[conversation];
        let before = depths.iter().rev().find(|(since, _)| first.is_some_and(|first| *since <= first));
        let mut bounds = before.map_or((0, 0), |(_, depth)| (*depth, *depth));
        let within = |since: u64| first.is_none_or(|first| since > first) && last.is_some_and(|last| since <= last);
        for (_, depth) in depths.iter().filter(|(since, _)| within(*since)) {
            bounds = (bounds.0.min(*depth), bounds.1.max(*depth));
        }
        bounds
    }
}

fn publish(
    mut publisher: Publisher,
    prompts: &Prompts,
    cache: &Mutex<Cache>,
    is_stopped: &AtomicBool,
    seed: u64,
) -> Publisher {
    let (mut encoder, mut random) = (Encoder::new(), Xoshiro256PlusPlus::seed_from_u64(seed));
    publisher.await_subscription();
    while !is_stopped.load(Ordering::Relaxed) {
        let mut changes = Vec::new();
        {
            let mut cache = cache.lock().unwrap();
            let is_cleared = random.random_range(0..CLEAR_ONE_IN) == 0;
            for at in 0..random.random_range(1..6) {
                let change =
                    if at == 0 && is_cleared { Some(Change::Clear) } else { Change::draw(&cache, &mut random) };
                let Some(change) = change else { continue };
                change.apply(&mut cache);
                cache.note();
                changes.push(change);
            }
            if changes.is_empty() {
                continue;
            }
            assert_eq!(cache.next_seq, publisher.seq);
            // Before it is sent, so that no answer can be ahead of it.
            cache.next_seq += 1;
        }
        let info = BatchInfo { scheme: Some(SCHEME), ..BatchInfo::default() };
        let payload = encoder.encode(&info, changes.iter().map(|change| change.event(prompts))).to_vec();
        publisher.send_payload(&payload);
        std::thread::sleep(BATCH_EVERY);
    }
    publisher
}
