//! One query over one [`Trie`]: all lanes at once, one block at a time.

use super::lanes::{Lane, LaneSet};
use super::trie::{ROOT_NODE, Step, Trie};
use crate::ids::{LocalHash, Tier, TierBlocks};

/// The working memory of a query, kept from one to the next.
#[derive(Clone, Debug, Default)]
pub(super) struct Walk {
    /// Lanes whose run goes on, zero outside `words`.
    active: Vec<u64>,
    words: std::ops::Range<usize>,
    /// Where the run of an active lane began, by lane; a worker's first lane begins at 0.
    began: Vec<u32>,
    /// What the tiers before the active one gave, by worker.
    so_far: Vec<TierBlocks>,
    /// Ways not yet taken, and the lanes that go there.
    forks: Vec<Fork>,
    fork_lanes: Vec<ForkLane>,
}

#[derive(Clone, Copy, Debug)]
struct Fork {
    node: u32,
    depth: usize,
    lanes_from: usize,
}

#[derive(Clone, Copy, Debug)]
struct ForkLane {
    lane: Lane,
    began: u32,
    so_far: TierBlocks,
}

impl Walk {
    /// Fills `best`, indexed by worker slot, with what each worker of `trie` holds of `locals`.
    pub(super) fn run(&mut self, trie: &Trie, locals: &[LocalHash], best: &mut Vec<TierBlocks>) {
        best.clear();
        best.resize(trie.workers().len(), TierBlocks::default());
        self.reset(trie);
        let (mut node, mut depth) = (ROOT_NODE, 0);
        loop {
            while let Some(next) = self.hop(trie, node, locals, depth, best) {
                node = next;
                depth += 1;
            }
            let Some(fork) = self.forks.pop() else { return };
            self.resume(trie, fork);
            (node, depth) = (fork.node, fork.depth);
        }
    }

    fn reset(&mut self, trie: &Trie) {
        self.active.clear();
        self.active.extend_from_slice(trie.start());
        self.words = 0..self.active.len();
        self.began.resize(trie.lanes_len(), 0);
        self.so_far.resize(trie.workers().len(), TierBlocks::default());
        self.forks.clear();
        self.fork_lanes.clear();
        self.narrow();
    }

    /// One block further along the first way; `None` where every lane has ended.
    fn hop(
        &mut self,
        trie: &Trie,
        node: u32,
        locals: &[LocalHash],
        depth: usize,
        best: &mut [TierBlocks],
    ) -> Option<u32> {
        if self.words.is_empty() {
            return None;
        }
        let step = locals.get(depth).map(|local| Step { parent: node, local: *local });
        let Some((step, (id, next))) = step.and_then(|step| Some((step, trie.follow(step)?))) else {
            self.finish(trie, depth as u32, best);
            return None;
        };
        if next.forked {
            for (alias, node) in trie.aliases(step) {
                self.branch(trie, alias, &node.lanes, depth as u32, best);
            }
        }
        self.enter(trie, &next.lanes, depth as u32, best);
        Some(id)
    }

    /// Takes every active lane over the edge to a position that `lanes` hold, `depth` blocks from the root.
    fn enter(&mut self, trie: &Trie, lanes: &LaneSet, depth: u32, best: &mut [TierBlocks]) {
        let (first, held) = lanes.window();
        for word in self.words.clone() {
            let held = held.get(word.wrapping_sub(first)).copied().unwrap_or(0);
            let mut ended = self.active[word] & !held;
            self.active[word] &= held;
            if depth == 0 {
                // Nothing found is what `best` says already; only another tier can change that.
                ended &= trie.lower()[word];
            }
            while ended != 0 {
                let lane = Lane::lowest(word, ended);
                ended &= ended - 1;
                if let Some(next) = self.fall(trie, lane, depth, Some(lanes), best) {
                    self.activate(trie, next);
                }
            }
        }
        self.narrow();
    }

    /// Remembers the way through another position of the same step, for the lanes that can go there.
    fn branch(&mut self, trie: &Trie, node: u32, lanes: &LaneSet, depth: u32, best: &mut [TierBlocks]) {
        let lanes_from = self.fork_lanes.len();
        for word in self.words.clone() {
            let mut bits = self.active[word];
            while bits != 0 {
                let lane = Lane::lowest(word, bits);
                bits &= bits - 1;
                let goes = if lanes.contains(lane) {
                    Some(self.state_of(trie, lane))
                } else {
                    self.fall(trie, lane, depth, Some(lanes), best)
                };
                self.fork_lanes.extend(goes);
            }
        }
        if self.fork_lanes.len() > lanes_from {
            self.forks.push(Fork { node, depth: depth as usize + 1, lanes_from });
        }
    }

    fn resume(&mut self, trie: &Trie, fork: Fork) {
        self.active.fill(0);
        self.words = 0..0;
        while self.fork_lanes.len() > fork.lanes_from {
            if let Some(lane) = self.fork_lanes.pop() {
                self.activate(trie, lane);
            }
        }
    }

    fn state_of(&self, trie: &Trie, lane: Lane) -> ForkLane {
        if trie.start()[lane.word()] & lane.bit() != 0 {
            return ForkLane { lane, began: 0, so_far: TierBlocks::default() };
        }
        let so_far = trie.owner(lane).map(|owner| self.so_far[usize::from(owner.slot.0)]);
        ForkLane { lane, began: self.began[lane.index()], so_far: so_far.unwrap_or_default() }
    }

    fn activate(&mut self, trie: &Trie, state: ForkLane) {
        let Some(owner) = trie.owner(state.lane) else { return };
        let word = state.lane.word();
        self.active[word] |= state.lane.bit();
        self.words = if self.words.is_empty() {
            word..word + 1
        } else {
            self.words.start.min(word)..self.words.end.max(word + 1)
        };
        self.began[state.lane.index()] = state.began;
        self.so_far[usize::from(owner.slot.0)] = state.so_far;
    }

    /// The run of `lane` ends at `depth`. Where the next position is held by a tier further away, that
    /// tier's lane goes on; else what was found is the worker's, if it is its best.
    fn fall(
        &self,
        trie: &Trie,
        lane: Lane,
        depth: u32,
        into: Option<&LaneSet>,
        best: &mut [TierBlocks],
    ) -> Option<ForkLane> {
        let owner = trie.owner(lane)?;
        let worker = usize::from(owner.slot.0);
        let ForkLane { began, mut so_far, .. } = self.state_of(trie, lane);
        *blocks_mut(&mut so_far, owner.tier) = depth - began;
        let further = trie.workers()[worker][owner.tier.index() + 1..].iter();
        let next = into.and_then(|lanes| further.copied().find(|next| next.is_some() && lanes.contains(*next)));
        if next.is_none() && rank(so_far) > rank(best[worker]) {
            best[worker] = so_far;
        }
        next.map(|lane| ForkLane { lane, began: depth, so_far })
    }

    /// Ends every active lane at `depth`.
    fn finish(&mut self, trie: &Trie, depth: u32, best: &mut [TierBlocks]) {
        if depth == 0 {
            return;
        }
        for word in self.words.clone() {
            let mut bits = self.active[word];
            while bits != 0 {
                self.fall(trie, Lane::lowest(word, bits), depth, None, best);
                bits &= bits - 1;
            }
        }
    }

    /// Leaves out the words at both ends that have become zero.
    fn narrow(&mut self) {
        while !self.words.is_empty() && self.active[self.words.start] == 0 {
            self.words.start += 1;
        }
        while !self.words.is_empty() && self.active[self.words.end - 1] == 0 {
            self.words.end -= 1;
        }
    }
}

const fn rank(blocks: TierBlocks) -> [u32; 4] {
    [blocks.device, blocks.host, blocks.disk, blocks.external]
}

const fn blocks_mut(blocks: &mut TierBlocks, tier: Tier) -> &mut u32 {
    match tier {
        Tier::Device => &mut blocks.device,
        Tier::Host => &mut blocks.host,
        Tier::Disk => &mut blocks.disk,
        Tier::External => &mut blocks.external,
    }
}
