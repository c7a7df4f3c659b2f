//! One simulated engine: continuous batching with chunked prefill, in the order of vLLM's scheduler (first come, first
//! served; decodes first; preemption of the youngest, which is computed again).

mod hand_over;
#[cfg(test)]
mod tests;

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};
use std::rc::Rc;

use super::Block;
use super::kv_pool::{CachedBlock, KvPool};
use super::spec::EngineSpec;
use super::tier_store::TierStore;
use crate::ids::Tier;

/// A request, by its number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RequestId(pub u32);

/// A request for an engine.
#[derive(Clone, Debug)]
pub struct EngineRequest {
    /// Its number, which no other request of the engine has.
    pub id: RequestId,
    /// The whole blocks of its prompt and its output, without the output's last token, which is never computed.
    pub blocks: Rc<[Block]>,
    /// Tokens of its prompt, at least 1.
    pub prompt_tokens: u32,
    /// Tokens of its output, at least 1.
    pub output_tokens: u32,
    /// What of it runs here.
    pub part: Part,
}

/// The part of a request that an engine runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// All of it.
    Whole,
    /// Up to the first token. The blocks stay until [`Engine::forget`].
    Prefill,
    /// From the first token on. The KV of the prompt comes from another engine.
    Decode,
}

/// What an engine has to say after a step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Progress {
    /// The prompt has its place in a batch, with this many tokens of it found in caches.
    Scheduled {
        /// The request.
        id: RequestId,
        /// Tokens that need not be computed.
        cached_tokens: u32,
    },
    /// The prompt is computed.
    FirstToken(RequestId),
    /// The KV of a prompt has come from the engine that computed it.
    Received(RequestId),
    /// The output is complete.
    Finished(RequestId),
    /// The request lost its place and waits again, for lack of KV memory.
    Preempted(RequestId),
}

/// A change of what an engine holds.
#[derive(Clone, Debug)]
pub enum KvEvent {
    /// Blocks `from..to` of a request.
    Stored {
        /// Where they are.
        tier: Tier,
        /// The request.
        id: RequestId,
        /// All its blocks.
        blocks: Rc<[Block]>,
        /// The first of those that are stored.
        from: u32,
        /// The first after them.
        to: u32,
    },
    /// Blocks that are gone.
    Removed {
        /// Where they were.
        tier: Tier,
        /// Their chains.
        chains: Vec<u64>,
    },
    /// Blocks that a lower tier took from the tier above. They are still held above.
    Copied {
        /// Where they are now, too.
        tier: Tier,
        /// Their chains.
        chains: Vec<u64>,
    },
}

/// Where a request of the engine is.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Phase {
    Waiting,
    /// Blocks of lower tiers or of another engine are on their way until this time.
    Fetching {
        until_ns: u64,
        fetched: u32,
    },
    /// The KV of the prompt has come, and the batch has no place yet.
    Received,
    Prefilling,
    /// The first token has come, and another engine fetches the KV.
    HandingOver,
    /// Since this decode step, with this many tokens in the KV memory then.
    Decoding {
        since_step: u64,
        tokens: u32,
    },
}

#[derive(Debug)]
struct Running {
    request: EngineRequest,
    phase: Phase,
    /// Counts admissions: the highest is preempted first.
    admission: u64,
    /// Tokens to compute before the next output token.
    target: u32,
    computed: u32,
    generated: u32,
    /// Its cached blocks, which are the first of its blocks, but for copies of what others have cached.
    held: Vec<CachedBlock>,
    /// Blocks it has taken, cached ones among them. Of a decoding request, those at the beginning of decoding.
    taken: u32,
    /// Whole blocks that were offered to the cache.
    offered: u32,
    was_scheduled: bool,
}

/// The state of one engine between and during steps.
#[derive(Debug)]
pub struct Engine {
    spec: EngineSpec,
    pool: KvPool,
    tiers: Vec<TierStore>,
    slots: Vec<Option<Running>>,
    unused_slots: Vec<u32>,
    waiting: VecDeque<u32>,
    fetching: Vec<u32>,
    /// Until when the link to other engines is busy.
    link_busy_ns: u64,
    prefilling: Vec<u32>,
    /// Decoding requests by the decode step after which they end. An entry whose admission is not that of its slot is
    /// of a request that was preempted.
    decoding: BinaryHeap<Reverse<(u64, u32, u64)>>,
    decoding_count: u32,
    decoding_tokens: u64,
    decode_steps: u64,
    /// Decoding requests by the remainder of the decode step in which they need a new block.
    growth: Vec<u32>,
    admissions: u64,
    /// The step under way: prompts and the tokens of them that it computes.
    chunks: Vec<(u32, u32)>,
    is_stepping: bool,
    decodes_in_step: bool,
    /// Whether decoding requests have the blocks for the next step.
    has_grown: bool,
    /// Whether the step preempted a request; it then admits none.
    has_preempted: bool,
    events: Vec<KvEvent>,
    evicted: Vec<u64>,
}

impl Engine {
    /// An engine that has computed nothing yet.
    #[must_use]
    pub fn new(spec: EngineSpec) -> Self {
        let capacity_blocks = u32::try_from(spec.kv_tokens / u64::from(spec.block_size)).unwrap_or(u32::MAX / 2);
        Self {
            pool: KvPool::new(capacity_blocks),
            tiers: spec.tiers.iter().map(|tier| TierStore::new(*tier, spec.block_size)).collect(),
            growth: vec![0; spec.block_size as usize],
            spec,
            slots: Vec::new(),
            unused_slots: Vec::new(),
            waiting: VecDeque::new(),
            fetching: Vec::new(),
            link_busy_ns: 0,
            prefilling: Vec::new(),
            decoding: BinaryHeap::new(),
            decoding_count: 0,
            decoding_tokens: 0,
            decode_steps: 0,
            admissions: 0,
            chunks: Vec::new(),
            is_stepping: false,
            decodes_in_step: false,
            has_grown: false,
            has_preempted: false,
            events: Vec::new(),
            evicted: Vec::new(),
        }
    }

    /// Whether a request can ever run here.
    #[must_use]
    pub fn can_hold(&self, prompt_tokens: u32, output_tokens: u32) -> bool {
        let tokens = u64::from(prompt_tokens) + u64::from(output_tokens);
        tokens.div_ceil(u64::from(self.spec.block_size)) <= u64::from(self.pool.capacity_blocks())
    }

    /// What the engine is.
    #[must_use]
    pub fn spec(&self) -> &EngineSpec {
        &self.spec
    }

    /// Whether a step has begun and not ended.
    #[must_use]
    pub fn is_stepping(&self) -> bool {
        self.is_stepping
    }

    /// Requests that have a place in a batch, and those that wait.
    #[cfg(test)]
    fn counts(&self) -> (u32, usize) {
        (self.prefilling.len() as u32 + self.decoding_count, self.waiting.len() + self.fetching.len())
    }

    /// Takes a request, which waits behind the others.
    pub fn push(&mut self, request: EngineRequest) {
        let target = request.prompt_tokens;
        let running = Running {
            request,
            phase: Phase::Waiting,
            admission: 0,
            target,
            computed: 0,
            generated: 0,
            held: Vec::new(),
            taken: 0,
            offered: 0,
            was_scheduled: false,
        };
        let slot = match self.unused_slots.pop() {
            Some(slot) => {
                self.slots[slot as usize] = Some(running);
                slot
            }
            None => {
                self.slots.push(Some(running));
                self.slots.len() as u32 - 1
            }
        };
        self.waiting.push_back(slot);
    }

    /// Plans the next step. Returns its duration in seconds; `None` if there is nothing to compute now.
    pub fn begin_step(&mut self, now_ns: u64, progress: &mut Vec<Progress>) -> Option<f64> {
        self.chunks.clear();
        (self.has_grown, self.has_preempted) = (false, false);
        self.land_fetched(now_ns, progress);
        self.grow_decoding(progress);
        let mut budget = self.spec.step_tokens_max.saturating_sub(self.decoding_count);
        self.continue_prefills(&mut budget, progress);
        if !self.has_preempted {
            self.admit(now_ns, &mut budget, progress);
        }
        self.decodes_in_step = self.decoding_count > 0;
        if self.chunks.is_empty() && !self.decodes_in_step {
            return None;
        }
        self.is_stepping = true;
        let (mut tokens, mut attention) = (0.0, 0.0);
        for (slot, chunk) in &self.chunks {
            let (chunk, before) = (f64::from(*chunk), f64::from(self.at(*slot).computed));
            tokens += chunk;
            attention += chunk * (before + chunk / 2.0);
        }
        let decoding = f64::from(self.decoding_count);
        Some(self.spec.law.step_s(tokens, attention, decoding, self.decoding_tokens as f64))
    }

    /// The time at which the next fetch ends, if nothing else is to be done before.
    #[must_use]
    pub fn next_fetched_ns(&self) -> Option<u64> {
        let until = |slot: &u32| match self.at(*slot).phase {
            Phase::Fetching { until_ns, .. } => Some(until_ns),
            _ => None,
        };
        self.fetching.iter().filter_map(until).min()
    }

    /// Ends the step that began last.
    pub fn end_step(&mut self, progress: &mut Vec<Progress>) {
        self.is_stepping = false;
        if self.decodes_in_step {
            self.decode_steps += 1;
            self.decoding_tokens += u64::from(self.decoding_count);
        }
        let chunks = std::mem::take(&mut self.chunks);
        for (slot, chunk) in &chunks {
            self.advance(*slot, *chunk, progress);
        }
        self.chunks = chunks;
        while let Some(&Reverse((until, slot, admission))) = self.decoding.peek() {
            let is_live = self.slots[slot as usize].as_ref().is_some_and(|running| running.admission == admission);
            if is_live && until > self.decode_steps {
                break;
            }
            self.decoding.pop();
            if is_live {
                self.stop_decoding(slot);
                self.finish(slot, progress);
            }
        }
    }

    /// Seconds of prefill until the first token of a request that would come now: of all prompts that are before it, and
    /// its own, with what is cached now. Decodes beside them are left out.
    #[must_use]
    pub fn prefill_ahead_s(&self, blocks: &[Block], prompt_tokens: u32) -> f64 {
        let step = f64::from(self.spec.step_tokens_max);
        let law = &self.spec.law;
        let prompts = self.waiting.iter().chain(&self.fetching).chain(&self.prefilling);
        let prompts = prompts.filter(|slot| self.at(**slot).request.part != Part::Decode);
        let ahead = prompts.map(|slot| {
            let running = self.at(*slot);
            let computed = match running.phase {
                Phase::Waiting => self.device_hits(*slot).len() as u32 * self.spec.block_size,
                _ => running.computed,
            };
            law.prefill_s(f64::from(running.target - computed.min(running.target)), f64::from(computed), step)
        });
        let usable = (prompt_tokens.saturating_sub(1) / self.spec.block_size) as usize;
        let held = blocks.iter().take(usable).take_while(|block| self.pool.find(block.chain).is_some()).count() as u32;
        let held = held * self.spec.block_size;
        ahead.sum::<f64>() + law.prefill_s(f64::from(prompt_tokens - held), f64::from(held), step)
    }

    /// Moves what changed in the KV memory since the last call to `to`, in order.
    pub fn take_events(&mut self, to: &mut Vec<KvEvent>) {
        self.note_evicted();
        to.append(&mut self.events);
    }

    /// The requests that are here, in no particular order.
    pub fn requests(&self) -> impl Iterator<Item = RequestId> {
        self.slots.iter().flatten().map(|running| running.request.id)
    }

    fn at(&self, slot: u32) -> &Running {
        self.slots[slot as usize].as_ref().expect("a slot in a list is used")
    }

    fn at_mut(&mut self, slot: u32) -> &mut Running {
        self.slots[slot as usize].as_mut().expect("a slot in a list is used")
    }

    /// Gives every decoding request the block of its next token, or preempts.
    fn grow_decoding(&mut self, progress: &mut Vec<Progress>) {
        loop {
            let needed = self.growth[self.growing()];
            self.has_grown = self.pool.take_plain(needed);
            if self.has_grown || !self.preempt_youngest(progress) {
                return;
            }
        }
    }

    fn continue_prefills(&mut self, budget: &mut u32, progress: &mut Vec<Progress>) {
        let mut at = 0;
        while at < self.prefilling.len() && *budget > 0 {
            let slot = self.prefilling[at];
            let running = self.at(slot);
            let chunk = (running.target - running.computed).min(*budget);
            let needed = (running.computed + chunk).div_ceil(self.spec.block_size) - running.taken;
            if !self.pool.take_plain(needed) {
                if !self.preempt_youngest(progress) {
                    return;
                }
                continue;
            }
            self.at_mut(slot).taken += needed;
            self.chunks.push((slot, chunk));
            *budget -= chunk;
            at += 1;
        }
    }

    /// Admits waiting requests while the batch has room for them.
    fn admit(&mut self, now_ns: u64, budget: &mut u32, progress: &mut Vec<Progress>) {
        while *budget > 0 && self.prefilling.len() as u32 + self.decoding_count < self.spec.sequences_max {
            let Some(&slot) = self.waiting.front() else { return };
            if self.at(slot).request.part == Part::Decode && !self.begins_receiving(slot, now_ns) {
                return;
            }
            if self.at(slot).request.part == Part::Decode || self.begins_fetch(slot, now_ns) {
                self.waiting.pop_front();
                continue;
            }
            let hits = self.device_hits(slot);
            let size = self.spec.block_size;
            let running = self.at(slot);
            let computed = (hits.len() as u32 * size).max(running.computed);
            let chunk = (running.target - computed).min(*budget);
            let needed = (computed + chunk).div_ceil(size) - hits.len() as u32;
            if !self.has_room(&hits, needed) {
                return;
            }
            hits.iter().for_each(|block| self.pool.refer(*block));
            let is_taken = self.pool.take_plain(needed);
            debug_assert!(is_taken);
            self.waiting.pop_front();
            self.admissions += 1;
            let admission = self.admissions;
            let running = self.at_mut(slot);
            (running.phase, running.admission, running.computed) = (Phase::Prefilling, admission, computed);
            (running.taken, running.offered) = (hits.len() as u32 + needed, hits.len() as u32);
            running.held = hits;
            let id = running.request.id;
            if !std::mem::replace(&mut running.was_scheduled, true) {
                progress.push(Progress::Scheduled { id, cached_tokens: computed });
            }
            self.prefilling.push(slot);
            self.chunks.push((slot, chunk));
            *budget -= chunk;
        }
    }

    /// The leading blocks of a request that the device holds. The last token is always computed, here or elsewhere.
    fn device_hits(&self, slot: u32) -> Vec<CachedBlock> {
        let running = self.at(slot);
        let computed_elsewhere = running.request.part == Part::Decode;
        let usable = ((running.target - u32::from(!computed_elsewhere)) / self.spec.block_size) as usize;
        let blocks = running.request.blocks.iter().take(usable);
        blocks.map_while(|block| self.pool.find(block.chain)).collect()
    }

    /// Begins to fetch the blocks that lower tiers hold behind those of the device, if there are any and they have room.
    fn begins_fetch(&mut self, slot: u32, now_ns: u64) -> bool {
        if self.tiers.is_empty() {
            return false;
        }
        let hits = self.device_hits(slot);
        let running = self.at(slot);
        let usable = ((running.target - 1) / self.spec.block_size) as usize;
        let blocks = running.request.blocks.clone();
        let (mut fetched, mut seconds) = (0_u32, 0.0);
        for block in blocks.iter().take(usable).skip(hits.len()) {
            let Some(tier) = self.tiers.iter().find(|tier| tier.holds(block.chain)) else { break };
            seconds += tier.block_s();
            fetched += 1;
        }
        if fetched == 0 || !self.has_room(&hits, fetched) {
            return false;
        }
        self.begin_fetching(slot, hits, fetched, now_ns + (seconds * 1e9) as u64);
        true
    }

    /// Whether there is room for blocks beside the cached ones that a request finds.
    fn has_room(&self, hits: &[CachedBlock], needed: u32) -> bool {
        let unreferenced = hits.iter().filter(|block| !self.pool.is_referenced(**block)).count() as u32;
        needed + unreferenced <= self.pool.available_blocks()
    }

    /// Takes the cached blocks that a request finds, and room for the blocks that come until a time.
    fn begin_fetching(&mut self, slot: u32, hits: Vec<CachedBlock>, fetched: u32, until_ns: u64) {
        hits.iter().for_each(|block| self.pool.refer(*block));
        self.pool.take_plain(fetched);
        let running = self.at_mut(slot);
        running.taken = hits.len() as u32 + fetched;
        running.offered = hits.len() as u32;
        running.held = hits;
        running.phase = Phase::Fetching { until_ns, fetched };
        self.fetching.push(slot);
    }

    /// Blocks whose fetch has ended are cached; their requests go to the head of the queue, or begin to decode.
    fn land_fetched(&mut self, now_ns: u64, progress: &mut Vec<Progress>) {
        let mut at = 0;
        while at < self.fetching.len() {
            let slot = self.fetching[at];
            let running = self.at(slot);
            let lands = match running.phase {
                Phase::Fetching { until_ns, .. } if until_ns > now_ns => false,
                _ if running.request.part == Part::Decode => self.land_received(slot, progress),
                Phase::Fetching { fetched, .. } => {
                    self.offer(slot, running.offered + fetched);
                    // The blocks are cached now: what admission does is the same as for every other prompt.
                    self.release(slot);
                    self.at_mut(slot).phase = Phase::Waiting;
                    self.waiting.push_front(slot);
                    true
                }
                _ => true,
            };
            if lands {
                self.fetching.remove(at);
            } else {
                at += 1;
            }
        }
    }

    /// Offers the whole blocks of a request before block `end` to the cache.
    fn offer(&mut self, slot: u32, end: u32) {
        let running = self.slots[slot as usize].as_mut().expect("a slot in a list is used");
        let (id, blocks) = (running.request.id, &running.request.blocks);
        let (from, end) = (running.offered, end.min(blocks.len() as u32));
        let mut stored = from;
        for at in from..end {
            match self.pool.cache(blocks[at as usize].chain) {
                Some(block) => running.held.push(block),
                None => {
                    if stored < at {
                        let blocks = blocks.clone();
                        self.events.push(KvEvent::Stored { tier: Tier::Device, id, blocks, from: stored, to: at });
                    }
                    stored = at + 1;
                }
            }
        }
        if stored < end {
            let blocks = blocks.clone();
            self.events.push(KvEvent::Stored { tier: Tier::Device, id, blocks, from: stored, to: end });
        }
        running.offered = running.offered.max(end);
    }

    /// A chunk of a prompt was computed.
    fn advance(&mut self, slot: u32, chunk: u32, progress: &mut Vec<Progress>) {
        let size = self.spec.block_size;
        let running = self.at_mut(slot);
        running.computed += chunk;
        let (computed, is_done) = (running.computed, running.computed == running.target);
        self.note_evicted();
        self.offer(slot, computed / size);
        if !is_done {
            return;
        }
        self.prefilling.retain(|prefilling| *prefilling != slot);
        let running = self.at_mut(slot);
        let (id, is_first) = (running.request.id, running.generated == 0);
        running.generated += 1;
        let only_prefills = running.request.part == Part::Prefill;
        if only_prefills {
            running.phase = Phase::HandingOver;
        }
        if is_first {
            progress.push(Progress::FirstToken(id));
        }
        if only_prefills {
            return;
        }
        if self.at(slot).generated >= self.at(slot).request.output_tokens {
            self.finish(slot, progress);
        } else {
            self.start_decoding(slot);
        }
    }

    fn phase_of(&self, since_step: u64, tokens: u32) -> usize {
        let size = u64::from(self.spec.block_size);
        ((u64::from(tokens) % size + size - since_step % size) % size) as usize
    }

    fn start_decoding(&mut self, slot: u32) {
        let since_step = self.decode_steps;
        let running = self.at_mut(slot);
        let tokens = running.computed;
        running.phase = Phase::Decoding { since_step, tokens };
        let until = since_step + u64::from(running.request.output_tokens - running.generated);
        self.decoding.push(Reverse((until, slot, self.at(slot).admission)));
        self.decoding_count += 1;
        self.decoding_tokens += u64::from(tokens);
        let phase = self.phase_of(since_step, tokens);
        self.growth[phase] += 1;
    }

    /// Takes a request out of the decoding ones, and brings its counters up to date.
    fn stop_decoding(&mut self, slot: u32) {
        let Phase::Decoding { since_step, tokens } = self.at(slot).phase else { return };
        let phase = self.phase_of(since_step, tokens);
        self.growth[phase] -= 1;
        self.decoding_count -= 1;
        let steps = (self.decode_steps - since_step) as u32;
        self.decoding_tokens -= u64::from(tokens + steps);
        let size = self.spec.block_size;
        let running = self.at_mut(slot);
        running.computed = tokens + steps;
        running.generated += steps;
        running.taken = running.computed.div_ceil(size);
    }

    fn finish(&mut self, slot: u32, progress: &mut Vec<Progress>) {
        let end = self.at(slot).computed / self.spec.block_size;
        self.note_evicted();
        self.offer(slot, end);
        self.release(slot);
        if let Some(running) = self.slots[slot as usize].take() {
            progress.push(Progress::Finished(running.request.id));
        }
        self.unused_slots.push(slot);
    }

    /// Gives back all blocks of a request. The end of its chain becomes the first to be evicted.
    fn release(&mut self, slot: u32) {
        let running = self.slots[slot as usize].as_mut().expect("a slot in a list is used");
        let held = std::mem::take(&mut running.held);
        let plain = running.taken - held.len() as u32;
        (running.taken, running.offered) = (0, 0);
        held.iter().rev().for_each(|block| self.pool.release(*block));
        self.pool.give_back_plain(plain);
    }

    /// Preempts the request that was admitted last. `false`: there is none.
    fn preempt_youngest(&mut self, progress: &mut Vec<Progress>) -> bool {
        let is_running = |running: &Running| matches!(running.phase, Phase::Prefilling | Phase::Decoding { .. });
        let running = self.slots.iter().enumerate().filter_map(|(slot, running)| Some((slot, running.as_ref()?)));
        let youngest = running.filter(|(_, running)| is_running(running)).max_by_key(|(_, running)| running.admission);
        let Some(slot) = youngest.map(|(slot, _)| slot as u32) else { return false };
        self.give_back_growth(slot);
        self.stop_decoding(slot);
        self.prefilling.retain(|prefilling| *prefilling != slot);
        if let Some(at) = self.chunks.iter().position(|(chunk, _)| *chunk == slot) {
            self.chunks.remove(at);
        }
        self.release(slot);
        let running = self.at_mut(slot);
        // All tokens so far are prompt now; the last one was never computed.
        running.target = running.request.prompt_tokens + running.generated;
        (running.computed, running.phase, running.admission) = (0, Phase::Waiting, 0);
        progress.push(Progress::Preempted(running.request.id));
        self.has_preempted = true;
        self.waiting.push_front(slot);
        true
    }

    /// Gives back the block that a decoding request got for this step.
    fn give_back_growth(&mut self, slot: u32) {
        if let Phase::Decoding { since_step, tokens } = self.at(slot).phase
            && self.has_grown
            && self.phase_of(since_step, tokens) == self.growing()
        {
            self.pool.give_back_plain(1);
        }
    }

    /// The phase of the requests that need a new block in the next decode step.
    fn growing(&self) -> usize {
        let size = u64::from(self.spec.block_size);
        ((size - self.decode_steps % size) % size) as usize
    }

    /// Tells of evictions, and moves evicted blocks down a tier.
    fn note_evicted(&mut self) {
        if !self.pool.has_evicted() {
            return;
        }
        self.pool.take_evicted(&mut self.evicted);
        let (mut above, mut chains) = (Tier::Device, std::mem::take(&mut self.evicted));
        for tier in &mut self.tiers {
            self.events.push(KvEvent::Copied { tier: tier.tier(), chains: chains.clone() });
            self.events.push(KvEvent::Removed { tier: above, chains: chains.clone() });
            tier.push(&mut chains);
            above = tier.tier();
        }
        if !chains.is_empty() {
            self.events.push(KvEvent::Removed { tier: above, chains });
        }
    }
}
