//! A simulated fleet: prefix caches that evict by last use, and a placement that prefers overlap to load.

use kvrouted::ids::Tier;
use rand::{RngExt, SeedableRng};
use rand_xoshiro::Xoshiro256PlusPlus;
use rustc_hash::FxHashMap;
use std::collections::VecDeque;

use crate::args::TapeArgs;
use crate::lru::Lru;
use crate::nodes::{NodeId, Nodes};
use crate::script::{Action, Script};

/// Longest run that is stored a second time, in blocks.
const COPY_BLOCKS_MAX: usize = 32;
/// Prompts a worker takes before it frees a second copy.
const COPY_LIFE_PROMPTS: u64 = 8;
/// Requests after which a worker's load has halved, times the workers: what it did is done by then.
const LOAD_HALF_LIFE_ROUNDS: f64 = 3.0;

/// One worker.
#[derive(Debug, Default)]
struct Worker {
    device: Lru,
    host: Lru,
    /// Blocks placed here of late that had to be computed.
    load: f64,
    /// Second copies, beside the first, by block.
    copies: FxHashMap<NodeId, u32>,
    /// Prompts taken so far.
    prompts: u64,
    /// Runs that were stored again, oldest first, and after which prompt they are freed.
    copied_runs: VecDeque<(u64, Vec<NodeId>)>,
}

/// A request that still generates.
#[derive(Debug)]
struct Generating {
    worker: u16,
    last: NodeId,
    blocks_left: u32,
    /// What it says; different from all others.
    content: u64,
}

/// The fleet, and what it has to say.
#[derive(Debug)]
pub(crate) struct Fleet {
    workers: Vec<Worker>,
    generating: Vec<Generating>,
    capacity: usize,
    with_host: bool,
    copy_ratio: f64,
    chance: Xoshiro256PlusPlus,
    /// The events so far.
    pub(crate) script: Script,
}

impl Fleet {
    /// Empty caches.
    #[must_use]
    pub(crate) fn new(args: &TapeArgs) -> Self {
        Self {
            workers: (0..args.workers).map(|_| Worker::default()).collect(),
            generating: Vec::new(),
            capacity: args.capacity as usize,
            with_host: args.tiers,
            copy_ratio: args.dup,
            chance: Xoshiro256PlusPlus::seed_from_u64(args.seed),
            script: Script::default(),
        }
    }

    /// Places a prompt and computes it there; what it generates comes later, one block each [`tick`](Self::tick).
    pub(crate) fn serve(&mut self, nodes: &Nodes, path: &[NodeId], output_blocks: u32, content: u64) {
        let at = self.place(path);
        let path = &path[..path.len().min(self.capacity)];
        let Some(last) = path.last() else { return };
        let held = self.workers[at].device.leading(path);
        let worker = &mut self.workers[at];
        worker.load += (path.len() - held) as f64;
        worker.prompts += 1;
        path[..held].iter().rev().for_each(|node| worker.device.touch(*node));
        self.evict(nodes, at, path.len() - held);
        self.free_copies(at);
        let worker = &mut self.workers[at];
        for fresh in held..path.len() {
            worker.device.insert_behind(path[fresh], fresh.checked_sub(1).map(|before| path[before]));
        }
        self.script.push(at as u16, Action::Store, Tier::Device, &path[held..]);
        if self.copy_ratio > 0.0 && self.chance.random_bool(self.copy_ratio) {
            self.copy(at, &path[..held]);
        }
        self.script.end_batch();
        if output_blocks > 0 {
            self.generating.push(Generating { worker: at as u16, last: *last, blocks_left: output_blocks, content });
        }
    }

    /// One more block of every request that still generates, each an event in a batch of its own.
    pub(crate) fn tick(&mut self, nodes: &mut Nodes) {
        for mut request in std::mem::take(&mut self.generating) {
            let at = usize::from(request.worker);
            self.evict(nodes, at, 1);
            let device = &mut self.workers[at].device;
            // A request whose prompt was evicted under it stops.
            if device.contains(request.last) {
                let content = crate::mix::mix(request.content, u64::from(request.blocks_left));
                let next = nodes.intern(Some(request.last), content);
                device.insert_behind(next, Some(request.last));
                self.script.push(request.worker, Action::Store, Tier::Device, &[next]);
                request.last = next;
                request.blocks_left -= 1;
                if request.blocks_left > 0 {
                    self.generating.push(request);
                }
            }
            self.script.end_batch();
        }
    }

    /// The worker with the fewest blocks to compute, counting those it was given of late.
    fn place(&mut self, path: &[NodeId]) -> usize {
        let keep = 0.5_f64.powf(1.0 / (LOAD_HALF_LIFE_ROUNDS * self.workers.len() as f64));
        let mut best = (f64::INFINITY, 0);
        for (at, worker) in self.workers.iter_mut().enumerate() {
            worker.load *= keep;
            let cost = worker.load + (path.len() - worker.device.leading(path)) as f64;
            if cost < best.0 {
                best = (cost, at);
            }
        }
        best.1
    }

    /// Makes room for `wanted` blocks.
    fn evict(&mut self, nodes: &Nodes, at: usize, wanted: usize) {
        let worker = &mut self.workers[at];
        let mut evicted = Vec::new();
        while worker.device.len() + wanted > self.capacity
            && let Some(node) = worker.device.pop_oldest()
        {
            evicted.push(node);
        }
        if evicted.is_empty() {
            return;
        }
        if self.with_host {
            self.demote(nodes, at, &evicted);
        }
        // A block with copies is removed once for each of them.
        let copies = &mut self.workers[at].copies;
        let times = |node| std::iter::repeat_n(node, 1 + copies.remove(&node).unwrap_or(0) as usize);
        let removed: Vec<NodeId> = evicted.into_iter().flat_map(times).collect();
        self.script.push(at as u16, Action::Remove, Tier::Device, &removed);
    }

    /// Keeps what the device evicts, ends of sequences first, in the host's memory, before it is gone.
    fn demote(&mut self, nodes: &Nodes, at: usize, evicted: &[NodeId]) {
        let host = &mut self.workers[at].host;
        let mut fresh: Vec<NodeId> = Vec::new();
        for node in evicted {
            if !host.contains(*node) {
                fresh.push(*node);
            }
            host.touch(*node);
        }
        fresh.reverse();
        let mut dropped = Vec::new();
        while host.len() > self.capacity
            && let Some(node) = host.pop_oldest()
        {
            dropped.push(node);
        }
        self.script.store_runs(nodes, at as u16, Tier::Host, &fresh);
        self.script.push(at as u16, Action::Remove, Tier::Host, &dropped);
    }

    /// Stores a run of held blocks a second time, never from the root: whether a repeated root is a second
    /// copy or an old one announced again, no index can tell.
    fn copy(&mut self, at: usize, held: &[NodeId]) {
        if held.len() < 2 {
            return;
        }
        let from = self.chance.random_range(1..held.len());
        let to = held.len().min(from + self.chance.random_range(1..=COPY_BLOCKS_MAX));
        let worker = &mut self.workers[at];
        held[from..to].iter().for_each(|node| *worker.copies.entry(*node).or_insert(0) += 1);
        worker.copied_runs.push_back((worker.prompts + COPY_LIFE_PROMPTS, held[from..to].to_vec()));
        self.script.push(at as u16, Action::Store, Tier::Device, &held[from..to]);
    }

    /// Removes what is left of second copies whose time is over.
    fn free_copies(&mut self, at: usize) {
        let worker = &mut self.workers[at];
        while let Some((_, run)) = worker.copied_runs.pop_front_if(|(due, _)| *due <= worker.prompts) {
            let copies = &mut worker.copies;
            let freed: Vec<NodeId> = run.into_iter().rev().filter(|node| take_copy(copies, *node)).collect();
            self.script.push(at as u16, Action::Remove, Tier::Device, &freed);
        }
    }
}

/// One copy less of a node; whether there was one.
fn take_copy(copies: &mut FxHashMap<NodeId, u32>, node: NodeId) -> bool {
    match copies.get_mut(&node) {
        Some(1) => copies.remove(&node).is_some(),
        Some(count) => {
            *count -= 1;
            true
        }
        None => false,
    }
}
