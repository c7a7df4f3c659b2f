//! One simulated engine: continuous batching with chunked prefill, in the order of vLLM's scheduler (first come, first
//! served; decodes first; preemption of the youngest, which is computed again).

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};
use std::rc::Rc;

use super::kv_pool::{CachedBlock, KvPool};
use super::prompt_blocks::Block;
use super::spec::EngineSpec;
use super::tier_store::TierStore;
use crate::ids::Tier;

/// A request of the run, by its number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct RequestId(pub(super) u32);

/// A request for an engine.
#[derive(Clone, Debug)]
pub(super) struct EngineRequest {
    pub(super) id: RequestId,
    /// The whole blocks of its prompt and its output.
    pub(super) blocks: Rc<[Block]>,
    pub(super) prompt_tokens: u32,
    /// At least 1.
    pub(super) output_tokens: u32,
}

/// What an engine has to say after a step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Progress {
    /// The prompt has its place in a batch, with this many tokens of it found in caches.
    Scheduled {
        id: RequestId,
        cached_tokens: u32,
    },
    FirstToken(RequestId),
    Finished(RequestId),
    Preempted(RequestId),
}

/// A change of what an engine holds.
#[derive(Clone, Debug)]
pub(super) enum KvEvent {
    /// Blocks `from..to` of a request.
    Stored { tier: Tier, blocks: Rc<[Block]>, from: u32, to: u32 },
    /// Blocks by their chains.
    Removed { tier: Tier, chains: Vec<u64> },
    /// Blocks that a lower tier took from the tier above, by their chains. The blocks are still held above.
    Copied { tier: Tier, chains: Vec<u64> },
}

/// Where a request of the engine is.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Phase {
    Waiting,
    /// Blocks of lower tiers are on their way until this time.
    Fetching {
        until_ns: u64,
        fetched: u32,
    },
    Prefilling,
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
pub(super) struct Engine {
    spec: EngineSpec,
    pool: KvPool,
    tiers: Vec<TierStore>,
    slots: Vec<Option<Running>>,
    unused_slots: Vec<u32>,
    waiting: VecDeque<u32>,
    fetching: Vec<u32>,
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
    pub(super) fn new(spec: EngineSpec) -> Self {
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
    pub(super) fn can_hold(&self, prompt_tokens: u32, output_tokens: u32) -> bool {
        let tokens = u64::from(prompt_tokens) + u64::from(output_tokens);
        tokens.div_ceil(u64::from(self.spec.block_size)) <= u64::from(self.pool.capacity_blocks())
    }

    pub(super) fn spec(&self) -> &EngineSpec {
        &self.spec
    }

    pub(super) fn is_stepping(&self) -> bool {
        self.is_stepping
    }

    /// Requests that have a place in a batch, and those that wait.
    #[cfg(test)]
    pub(super) fn counts(&self) -> (u32, usize) {
        (self.prefilling.len() as u32 + self.decoding_count, self.waiting.len() + self.fetching.len())
    }

    pub(super) fn push(&mut self, request: EngineRequest) {
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
    pub(super) fn begin_step(&mut self, now_ns: u64, progress: &mut Vec<Progress>) -> Option<f64> {
        self.chunks.clear();
        (self.has_grown, self.has_preempted) = (false, false);
        self.land_fetched(now_ns);
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
    pub(super) fn next_fetched_ns(&self) -> Option<u64> {
        let until = |slot: &u32| match self.at(*slot).phase {
            Phase::Fetching { until_ns, .. } => Some(until_ns),
            _ => None,
        };
        self.fetching.iter().filter_map(until).min()
    }

    /// Ends the step that began last.
    pub(super) fn end_step(&mut self, progress: &mut Vec<Progress>) {
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
    pub(super) fn prefill_ahead_s(&self, blocks: &[Block], prompt_tokens: u32) -> f64 {
        let step = f64::from(self.spec.step_tokens_max);
        let law = &self.spec.law;
        let ahead = self.waiting.iter().chain(&self.fetching).chain(&self.prefilling).map(|slot| {
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
    pub(super) fn take_events(&mut self, to: &mut Vec<KvEvent>) {
        self.note_evicted();
        to.append(&mut self.events);
    }

    /// The requests of an engine that dies, in the order of their arrival here.
    pub(super) fn requests(&self) -> impl Iterator<Item = RequestId> {
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
            if self.begins_fetch(slot, now_ns) {
                self.waiting.pop_front();
                continue;
            }
            let hits = self.device_hits(slot);
            let size = self.spec.block_size;
            let running = self.at(slot);
            let computed = (hits.len() as u32 * size).max(running.computed);
            let chunk = (running.target - computed).min(*budget);
            let needed = (computed + chunk).div_ceil(size) - hits.len() as u32;
            let unreferenced = hits.iter().filter(|block| !self.pool.is_referenced(**block)).count() as u32;
            if needed + unreferenced > self.pool.available_blocks() {
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

    /// The leading blocks of a request that the device holds. The last token is always computed.
    fn device_hits(&self, slot: u32) -> Vec<CachedBlock> {
        let running = self.at(slot);
        let usable = ((running.target - 1) / self.spec.block_size) as usize;
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
        let unreferenced = hits.iter().filter(|block| !self.pool.is_referenced(**block)).count() as u32;
        if fetched == 0 || fetched + unreferenced > self.pool.available_blocks() {
            return false;
        }
        hits.iter().for_each(|block| self.pool.refer(*block));
        self.pool.take_plain(fetched);
        let until_ns = now_ns + (seconds * 1e9) as u64;
        let running = self.at_mut(slot);
        running.taken = hits.len() as u32 + fetched;
        running.offered = hits.len() as u32;
        running.held = hits;
        running.phase = Phase::Fetching { until_ns, fetched };
        self.fetching.push(slot);
        true
    }

    /// Blocks whose fetch has ended are cached; their requests go to the head of the queue.
    fn land_fetched(&mut self, now_ns: u64) {
        let mut at = 0;
        while at < self.fetching.len() {
            let slot = self.fetching[at];
            let Phase::Fetching { until_ns, fetched } = self.at(slot).phase else { break };
            if until_ns > now_ns {
                at += 1;
                continue;
            }
            self.fetching.remove(at);
            let end = self.at(slot).offered + fetched;
            self.offer(slot, end);
            // The blocks are cached now: what admission does is the same as for every other prompt.
            self.release(slot);
            self.at_mut(slot).phase = Phase::Waiting;
            self.waiting.push_front(slot);
        }
    }

    /// Offers the whole blocks of a request before block `end` to the cache.
    fn offer(&mut self, slot: u32, end: u32) {
        let running = self.slots[slot as usize].as_mut().expect("a slot in a list is used");
        let blocks = &running.request.blocks;
        let (from, end) = (running.offered, end.min(blocks.len() as u32));
        let mut stored = from;
        for at in from..end {
            match self.pool.cache(blocks[at as usize].chain) {
                Some(block) => running.held.push(block),
                None => {
                    if stored < at {
                        let blocks = blocks.clone();
                        self.events.push(KvEvent::Stored { tier: Tier::Device, blocks, from: stored, to: at });
                    }
                    stored = at + 1;
                }
            }
        }
        if stored < end {
            self.events.push(KvEvent::Stored { tier: Tier::Device, blocks: blocks.clone(), from: stored, to: end });
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
        if is_first {
            progress.push(Progress::FirstToken(id));
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

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use rand::{RngExt, SeedableRng};
    use rand_xoshiro::Xoshiro256PlusPlus;

    use super::*;
    use crate::engine_law::EngineLaw;
    use crate::simulate::spec::TierSpec;

    /// 1 s a step with new tokens, 10 ms a new token; 0.5 s a step without.
    fn spec(kv_tokens: u64, step_tokens_max: u32) -> EngineSpec {
        EngineSpec {
            class: "test".into(),
            law: EngineLaw::of([1.0, 0.01, 0.0], [0.5, 0.0, 0.0]),
            kv_tokens,
            block_size: 4,
            step_tokens_max,
            sequences_max: 8,
            tiers: Vec::new(),
        }
    }

    /// A request whose first `shared` blocks are those of content 7, and the others its own.
    fn request(id: u32, shared: u64, prompt_tokens: u32, output_tokens: u32) -> EngineRequest {
        let count = u64::from((prompt_tokens + output_tokens - 1) / 4);
        let own = |at: u64| if at < shared { 7_000 + at } else { 1_000_000 * u64::from(id + 1) + at };
        let blocks = (0..count).map(|at| Block { local: own(at), chain: own(at) }).collect();
        EngineRequest { id: RequestId(id), blocks, prompt_tokens, output_tokens }
    }

    /// An engine with its own clock, and what it said so far.
    struct Bench {
        engine: Engine,
        now_s: f64,
        told: Vec<(f64, Progress)>,
    }

    impl Bench {
        fn new(spec: EngineSpec) -> Self {
            Self { engine: Engine::new(spec), now_s: 0.0, told: Vec::new() }
        }

        /// Runs one step. `false`: there is nothing to do.
        fn step(&mut self) -> bool {
            let mut progress = Vec::new();
            let now_ns = (self.now_s * 1e9) as u64;
            let step_s = self.engine.begin_step(now_ns, &mut progress);
            match (step_s, self.engine.next_fetched_ns()) {
                (Some(step_s), _) => {
                    self.now_s += step_s;
                    self.engine.end_step(&mut progress);
                }
                (None, Some(at_ns)) => self.now_s = at_ns as f64 * 1e-9,
                (None, None) => return false,
            }
            self.told.extend(progress.into_iter().map(|told| (self.now_s, told)));
            true
        }

        fn run(&mut self) -> &[(f64, Progress)] {
            while self.step() {}
            &self.told
        }

        fn at(&self, what: Progress) -> Option<f64> {
            self.told.iter().find(|(_, told)| *told == what).map(|(at_s, _)| *at_s)
        }
    }

    #[test]
    fn a_prompt_is_computed_in_chunks_and_each_later_token_takes_a_step() {
        let mut bench = Bench::new(spec(1000, 100));
        bench.engine.push(request(0, 0, 250, 4));
        bench.run();
        // Steps of 100, 100 and 50 tokens, then three of one decoding request.
        assert_eq!(bench.at(Progress::FirstToken(RequestId(0))), Some(3.0 + 2.5));
        assert_eq!(bench.at(Progress::Finished(RequestId(0))), Some(5.5 + 3.0 * 0.5));
    }

    #[test]
    fn a_prefix_that_was_computed_is_found_but_for_the_last_block() {
        let mut bench = Bench::new(spec(1000, 100));
        bench.engine.push(request(0, 20, 80, 1));
        bench.run();
        bench.engine.push(request(1, 20, 80, 1));
        bench.engine.push(request(2, 10, 80, 1));
        bench.run();
        let cached = |id| {
            bench.told.iter().find_map(|(_, told)| match told {
                Progress::Scheduled { id: of, cached_tokens } if of.0 == id => Some(*cached_tokens),
                _ => None,
            })
        };
        assert_eq!([0, 1, 2].map(cached), [Some(0), Some(76), Some(40)]);
    }

    #[test]
    fn two_prompts_in_one_step_do_not_find_each_other() {
        let mut bench = Bench::new(spec(1000, 200));
        bench.engine.push(request(0, 20, 80, 1));
        bench.engine.push(request(1, 20, 80, 1));
        bench.run();
        assert!(bench.told.contains(&(2.6, Progress::FirstToken(RequestId(1)))), "{:?}", bench.told);
    }

    #[test]
    fn decoding_requests_are_in_every_step_of_a_long_prompt() {
        let mut bench = Bench::new(spec(1000, 101));
        bench.engine.push(request(0, 0, 40, 3));
        assert!(bench.step());
        bench.engine.push(request(1, 0, 200, 1));
        bench.run();
        // The first request needs two steps more, which also compute 100 tokens each.
        assert_eq!(bench.at(Progress::Finished(RequestId(0))), Some(1.4 + 2.0 + 2.0));
        assert_eq!(bench.at(Progress::FirstToken(RequestId(1))), Some(5.4));
    }

    #[test]
    fn without_room_the_youngest_is_preempted_and_computed_again() {
        let mut bench = Bench::new(spec(64, 100));
        bench.engine.push(request(0, 0, 24, 30));
        bench.engine.push(request(1, 0, 24, 30));
        bench.run();
        let preempted: Vec<_> = bench.told.iter().filter(|(_, told)| matches!(told, Progress::Preempted(_))).collect();
        assert!(!preempted.is_empty() && preempted.iter().all(|(_, told)| *told == Progress::Preempted(RequestId(1))));
        let first_tokens = bench.told.iter().filter(|(_, told)| matches!(told, Progress::FirstToken(_))).count();
        assert_eq!(first_tokens, 2, "the engine reports a first token once");
        assert!(bench.at(Progress::Finished(RequestId(0))) < bench.at(Progress::Finished(RequestId(1))));
        assert_eq!(bench.engine.counts(), (0, 0));
        assert_eq!(bench.engine.pool.used_blocks(), 0);
    }

    #[test]
    fn an_evicted_prefix_is_fetched_from_the_host() {
        let tier = TierSpec { tier: Tier::Host, tokens: 400, token_s: 0.001 };
        let mut bench = Bench::new(EngineSpec { tiers: vec![tier], ..spec(100, 100) });
        bench.engine.push(request(0, 20, 80, 1));
        bench.engine.push(request(1, 0, 80, 1));
        bench.run();
        let before_s = bench.now_s;
        bench.engine.push(request(2, 20, 80, 1));
        bench.run();
        assert_eq!(bench.told.last().map(|(_, told)| *told), Some(Progress::Finished(RequestId(2))));
        let took_s = bench.now_s - before_s;
        assert!((1.04..1.2).contains(&took_s), "four tokens and a fetch of at most 76: {took_s}");
    }

    #[test]
    fn a_request_beyond_the_memory_does_not_fit() {
        let engine = Engine::new(spec(64, 100));
        assert!(engine.can_hold(60, 4) && !engine.can_hold(60, 5) && !engine.can_hold(u32::MAX, u32::MAX));
    }

    /// Random requests on a small memory: all end, no block is lost, and the events tell what is cached.
    #[test]
    fn no_block_is_lost_and_events_tell_what_is_cached() {
        for seed in 0..40 {
            let mut rng = Xoshiro256PlusPlus::seed_from_u64(seed);
            let mut bench = Bench::new(spec(rng.random_range(120..400), rng.random_range(9..90)));
            let mut cached: HashSet<u64> = HashSet::new();
            let mut events = Vec::new();
            let count = 60;
            for id in 0..count {
                let asked = request(id, rng.random_range(0..12), rng.random_range(1..70), rng.random_range(1..30));
                bench.engine.push(asked);
                for _ in 0..rng.random_range(0..12) {
                    bench.step();
                }
            }
            bench.run();
            bench.engine.take_events(&mut events);
            for event in events {
                match event {
                    KvEvent::Stored { blocks, from, to, .. } => {
                        let stored = &blocks[from as usize..to as usize];
                        assert!(stored.iter().all(|block| cached.insert(block.chain)), "seed {seed}: stored twice");
                    }
                    KvEvent::Removed { chains, .. } => {
                        assert!(chains.iter().all(|chain| cached.remove(chain)), "seed {seed}: removed twice");
                    }
                    KvEvent::Copied { .. } => panic!("there is no lower tier"),
                }
            }
            let ended = bench.told.iter().filter(|(_, told)| matches!(told, Progress::Finished(_))).count();
            assert_eq!(ended, count as usize, "seed {seed}");
            assert_eq!(bench.engine.pool.used_blocks(), 0, "seed {seed}");
            assert_eq!(cached, bench.engine.pool.cached().collect(), "seed {seed}");
            assert_eq!((bench.engine.decoding_tokens, bench.engine.growth.iter().sum::<u32>()), (0, 0), "seed {seed}");
        }
    }
}
