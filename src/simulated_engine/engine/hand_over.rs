//! What a pair adds to an engine: blocks that wait until another engine has fetched them, and the KV of a prompt that
//! comes from another engine.

use super::{Engine, Part, Phase, Progress, RequestId};

impl Engine {
    /// Begins to receive the KV of a prompt, but for what the device holds. `false`: there is no room for it.
    pub(super) fn begins_receiving(&mut self, slot: u32, now_ns: u64) -> bool {
        let (hits, size) = (self.device_hits(slot), self.spec.block_size);
        let tokens = self.at(slot).target;
        let fetched = tokens.div_ceil(size) - hits.len() as u32;
        if !self.has_room(&hits, fetched) {
            return false;
        }
        let seconds = f64::from(tokens - hits.len() as u32 * size) * self.spec.receive_token_s;
        // The link carries one prompt after the other.
        self.link_busy_ns = self.link_busy_ns.max(now_ns) + (seconds * 1e9) as u64;
        self.begin_fetching(slot, hits, fetched, self.link_busy_ns);
        true
    }

    /// Notes that the KV of a prompt is there, and begins to decode if the batch has a place. `false`: it has none.
    pub(super) fn land_received(&mut self, slot: u32, progress: &mut Vec<Progress>) -> bool {
        if self.at(slot).phase != Phase::Received {
            let end = self.at(slot).target / self.spec.block_size;
            self.note_evicted();
            self.offer(slot, end);
            let running = self.at_mut(slot);
            (running.phase, running.computed, running.generated) = (Phase::Received, running.target, 1);
            progress.push(Progress::Received(running.request.id));
        }
        if self.prefilling.len() as u32 + self.decoding_count >= self.spec.sequences_max {
            return false;
        }
        self.admissions += 1;
        let admission = self.admissions;
        let running = self.at_mut(slot);
        (running.admission, running.was_scheduled) = (admission, true);
        // If it is preempted, this engine computes it again.
        running.request.part = Part::Whole;
        self.start_decoding(slot);
        true
    }

    /// Drops a request that has handed over its KV, or that does not run yet.
    pub fn forget(&mut self, id: RequestId) {
        let found = self.slots.iter().position(|running| {
            let is_idle =
                |phase| matches!(phase, Phase::Waiting | Phase::Fetching { .. } | Phase::Received | Phase::HandingOver);
            running.as_ref().is_some_and(|running| running.request.id == id && is_idle(running.phase))
        });
        let Some(slot) = found.map(|slot| slot as u32) else { return };
        self.waiting.retain(|waiting| *waiting != slot);
        self.fetching.retain(|fetching| *fetching != slot);
        self.release(slot);
        self.slots[slot as usize] = None;
        self.unused_slots.push(slot);
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{Bench, request, spec};
    use super::super::{EngineRequest, EngineSpec};
    use super::*;

    /// A token takes 10 ms on the link.
    fn receiver(kv_tokens: u64) -> Bench {
        Bench::new(EngineSpec { receive_token_s: 0.01, ..spec(kv_tokens, 100) })
    }

    fn part(part: Part, request: EngineRequest) -> EngineRequest {
        EngineRequest { part, ..request }
    }

    fn tenths(bench: &Bench, progress: Progress) -> Option<i64> {
        bench.at(progress).map(|at_s| (at_s * 10.0).round() as i64)
    }

    #[test]
    fn a_prefill_ends_with_the_first_token_and_keeps_its_blocks_until_they_are_fetched() {
        let mut bench = Bench::new(spec(400, 100));
        bench.engine.push(part(Part::Prefill, request(0, 0, 250, 40)));
        bench.run();
        assert_eq!(bench.told.last(), Some(&(5.5, Progress::FirstToken(RequestId(0)))), "steps of 100, 100 and 50");
        assert_eq!(bench.engine.pool.used_blocks(), 63);
        bench.engine.push(part(Part::Prefill, request(1, 0, 250, 40)));
        assert!(bench.step() && !bench.step(), "there is room for one step of it, and not for the second");
        bench.engine.forget(RequestId(0));
        bench.run();
        assert!(bench.at(Progress::FirstToken(RequestId(1))).is_some());
        bench.engine.forget(RequestId(1));
        assert_eq!((bench.engine.pool.used_blocks(), bench.engine.requests().count()), (0, 0));
    }

    #[test]
    fn decoding_begins_when_the_kv_is_there_and_the_link_carries_one_prompt_after_the_other() {
        let mut bench = receiver(1000);
        bench.engine.push(part(Part::Decode, request(0, 0, 40, 3)));
        bench.engine.push(part(Part::Decode, request(1, 0, 80, 2)));
        bench.run();
        // 0.4 s of transfer and two steps; the other one comes at 1.2 s, while a step runs until 1.4 s.
        assert_eq!(tenths(&bench, Progress::Finished(RequestId(0))), Some(14));
        assert_eq!(tenths(&bench, Progress::Finished(RequestId(1))), Some(19));
        assert_eq!(bench.engine.pool.used_blocks(), 0);
    }

    #[test]
    fn blocks_that_the_device_holds_are_not_sent() {
        let mut bench = receiver(1000);
        bench.engine.push(part(Part::Decode, request(0, 20, 80, 2)));
        bench.run();
        let before_s = bench.now_s;
        bench.engine.push(part(Part::Decode, request(1, 15, 80, 2)));
        bench.run();
        let took_s = bench.now_s - before_s;
        assert!((took_s - 0.2 - 0.5).abs() < 1e-9, "20 tokens and one step: {took_s}");
    }

    #[test]
    fn a_prompt_takes_memory_while_it_comes() {
        let mut bench = receiver(100);
        bench.engine.push(part(Part::Decode, request(0, 0, 60, 3)));
        bench.engine.push(part(Part::Decode, request(1, 0, 60, 3)));
        assert!(bench.step());
        assert_eq!(bench.engine.pool.used_blocks(), 15);
        assert_eq!(bench.engine.counts(), (0, 2), "one comes, and the other one waits for room");
        bench.run();
        let ended = |id| tenths(&bench, Progress::Finished(RequestId(id)));
        assert_eq!((ended(0), ended(1)), (Some(16), Some(32)), "0.6 s and two steps each");
    }

    #[test]
    fn a_prompt_that_has_come_waits_for_a_place_in_the_batch() {
        let mut bench = receiver(1000);
        (0..9).for_each(|id| bench.engine.push(part(Part::Decode, request(id, 0, 10, 10))));
        bench.run();
        // The batch has eight places. The first prompt comes at 0.1 s and the last at 0.9 s, which takes the place of the
        // first one after its nine steps.
        let at = |progress| tenths(&bench, progress);
        assert!(at(Progress::Received(RequestId(8))) < at(Progress::Finished(RequestId(0))));
        assert_eq!(at(Progress::Finished(RequestId(0))), Some(46));
        assert_eq!(at(Progress::Finished(RequestId(8))), Some(46 + 45));
    }

    #[test]
    fn a_preempted_request_is_computed_where_it_decodes() {
        let mut bench = receiver(64);
        bench.engine.push(part(Part::Decode, request(0, 0, 24, 30)));
        bench.engine.push(part(Part::Decode, request(1, 0, 24, 30)));
        bench.run();
        assert!(bench.at(Progress::Preempted(RequestId(1))).is_some());
        assert!(bench.at(Progress::Finished(RequestId(1))).is_some());
        let first_tokens = bench.told.iter().filter(|(_, told)| matches!(told, Progress::FirstToken(_)));
        assert_eq!((first_tokens.count(), bench.engine.pool.used_blocks()), (0, 0));
    }

    #[test]
    fn a_request_that_waits_or_comes_can_be_dropped() {
        let mut bench = receiver(100);
        bench.engine.push(part(Part::Decode, request(0, 0, 60, 3)));
        bench.engine.push(part(Part::Decode, request(1, 0, 60, 3)));
        assert!(bench.step());
        bench.engine.forget(RequestId(0));
        bench.engine.forget(RequestId(1));
        bench.engine.forget(RequestId(7));
        assert_eq!((bench.engine.pool.used_blocks(), bench.engine.requests().count()), (0, 0));
        assert!(!bench.step());
    }
}
