//! Compares every overlap that the daemon reported with the engines' own caches. Pure.
//!
//! A candidate's overlap is **wrong** if it differs from the prompt's depth in that engine's cache at every batch
//! boundary from the last batch the daemon had applied when the request was sent to the last batch published when the
//! reply arrived. An overlap that is not marked `exact` may also be less: a lookup that gave up among changes answers
//! 0.
//!
//! The first boundary comes from the reply (`as_of_seq`, read before the index). It is never earlier than the state
//! when the request was sent, so the check is never too lax. Published are all batches stamped before the reply's
//! arrival; engines take the stamp before they send, on one clock for all processes.

use rustc_hash::FxHashMap;

use super::run_records::{BatchRecord, EventRecord, ReplyRecord};

/// Most wrong overlaps described in words.
const EXAMPLES_MAX: usize = 5;

/// One engine's cache at every batch boundary. Boundary 0 is before the first batch, boundary `s + 1` after the batch
/// with sequence number `s`.
#[derive(Debug, Default)]
pub(crate) struct History {
    /// For each block, the half-open ranges of boundaries at which it was held, ascending.
    held: FxHashMap<u64, Vec<(u32, u32)>>,
    /// When each batch was sent.
    sent_ns: Vec<u64>,
    /// Batches whose sequence number was not the next.
    out_of_order: u64,
}

/// The end of a range that has not ended.
const STILL: u32 = u32::MAX;

impl History {
    /// Adds the next batch.
    pub(crate) fn push(&mut self, batch: &BatchRecord) {
        if batch.seq != self.sent_ns.len() as u64 {
            self.out_of_order += 1;
            return;
        }
        self.sent_ns.push(batch.sent_ns);
        let boundary = self.sent_ns.len() as u32;
        for event in &batch.events {
            match event {
                EventRecord::Stored(names) => names.iter().for_each(|name| self.begin(*name, boundary)),
                EventRecord::Removed(names) => names.iter().for_each(|name| self.end(*name, boundary)),
                EventRecord::Cleared => self.held.values_mut().for_each(|ranges| end(ranges, boundary)),
            }
        }
    }

    /// The number of batches.
    pub(crate) fn batches(&self) -> u64 {
        self.sent_ns.len() as u64
    }

    /// Batches whose sequence number was not the next. The log is useless unless this is 0.
    pub(crate) fn out_of_order(&self) -> u64 {
        self.out_of_order
    }

    fn begin(&mut self, name: u64, boundary: u32) {
        let ranges = self.held.entry(name).or_default();
        if ranges.last().is_none_or(|range| range.1 != STILL) {
            ranges.push((boundary, STILL));
        }
    }

    fn end(&mut self, name: u64, boundary: u32) {
        if let Some(ranges) = self.held.get_mut(&name) {
            end(ranges, boundary);
        }
    }

    /// Leading blocks of `chain` held at `boundary`.
    fn depth_at(&self, chain: &[u64], boundary: u32) -> u32 {
        let held_then = |name: &&u64| {
            self.held
                .get(name)
                .is_some_and(|ranges| ranges.iter().rev().any(|(from, to)| (*from..*to).contains(&boundary)))
        };
        chain.iter().take_while(held_then).count() as u32
    }

    /// The last boundary at time `at_ns`.
    fn boundary_at(&self, at_ns: u64) -> u32 {
        self.sent_ns.partition_point(|sent| *sent <= at_ns) as u32
    }
}

fn end(ranges: &mut [(u32, u32)], boundary: u32) {
    if let Some(range) = ranges.last_mut()
        && range.1 == STILL
    {
        range.1 = boundary;
    }
}

/// The result of the comparison.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Verdict {
    /// Overlaps compared.
    pub(crate) checked: u64,
    /// Overlaps that were wrong.
    pub(crate) wrong: u64,
    /// The same under each policy, by its index.
    pub(crate) wrong_by_phase: Vec<u64>,
    /// Overlaps with a trust level below `exact`: wrong only if they count too much.
    pub(crate) not_exact: u64,
    /// Batches the engines published.
    pub(crate) published: u64,
    /// The first few wrong overlaps, in words.
    pub(crate) examples: Vec<String>,
}

/// Checks one reply against the engines' histories, by worker id.
pub(crate) fn check(reply: &ReplyRecord, engines: &FxHashMap<u64, History>, verdict: &mut Verdict) {
    for candidate in &reply.candidates {
        verdict.checked += 1;
        verdict.not_exact += u64::from(!candidate.exact);
        let Some(history) = engines.get(&candidate.worker) else {
            wrong(
                verdict,
                reply.phase,
                format!("request {}: no engine has the id {}", reply.request, candidate.worker),
            );
            continue;
        };
        let first = candidate.as_of_seq.map_or(0, |seq| u32::try_from(seq + 1).unwrap_or(STILL));
        let last = history.boundary_at(reply.replied_ns);
        let fits = candidate.lower == 0
            && (first..=last).any(|boundary| {
                let depth = history.depth_at(&reply.chain, boundary);
                depth == candidate.device || (!candidate.exact && candidate.device < depth)
            });
        if !fits {
            let truth = history.depth_at(&reply.chain, last);
            wrong(
                verdict,
                reply.phase,
                format!(
                    "request {}: the daemon reported that worker {} held {} blocks ({} in lower tiers) of {}, as of batch {:?}; \
                     after batch {:?}, the last one published by then, it held {truth}",
                    reply.request,
                    candidate.worker,
                    candidate.device,
                    candidate.lower,
                    reply.chain.len(),
                    candidate.as_of_seq,
                    last.checked_sub(1),
                ),
            );
        }
    }
}

fn wrong(verdict: &mut Verdict, phase: usize, words: String) {
    verdict.wrong += 1;
    if verdict.wrong_by_phase.len() <= phase {
        verdict.wrong_by_phase.resize(phase + 1, 0);
    }
    verdict.wrong_by_phase[phase] += 1;
    if verdict.examples.len() < EXAMPLES_MAX {
        verdict.examples.push(words);
    }
}

#[cfg(test)]
mod tests {
    use super::super::run_records::CandidateRecord;
    use super::*;

    /// Boundary 1: [1 2 3]; 2: [1 2]; 3: [1 2 4]; 4: nothing; 5: [1].
    fn engine() -> Vec<BatchRecord> {
        let batches = [
            vec![EventRecord::Stored(vec![1, 2, 3])],
            vec![EventRecord::Removed(vec![3])],
            vec![EventRecord::Stored(vec![4])],
            vec![EventRecord::Cleared],
            vec![EventRecord::Stored(vec![1])],
        ];
        batches
            .into_iter()
            .enumerate()
            .map(|(seq, events)| BatchRecord { seq: seq as u64, sent_ns: 100 * (seq as u64 + 1), events })
            .collect()
    }

    fn verdict(log: &[BatchRecord], reply: &ReplyRecord) -> Verdict {
        let mut history = History::default();
        log.iter().for_each(|batch| history.push(batch));
        let mut verdict = Verdict::default();
        check(reply, &FxHashMap::from_iter([(7, history)]), &mut verdict);
        verdict
    }

    fn reply(device: u32, as_of_seq: Option<u64>, replied_ns: u64) -> ReplyRecord {
        let candidate = CandidateRecord { worker: 7, device, lower: 0, as_of_seq, exact: true };
        ReplyRecord { phase: 1, request: 0, left_ns: 0, replied_ns, chain: vec![1, 2, 3], candidates: vec![candidate] }
    }

    #[test]
    fn an_overlap_may_be_that_of_any_boundary_between_applied_and_published() {
        for (device, as_of_seq, replied_ns, wrong) in [
            (0, None, 99, 0),
            (3, None, 99, 1),  // reported before it was published
            (0, None, 250, 0), // not applied yet
            (3, None, 250, 0),
            (2, None, 250, 0),
            (1, None, 250, 1),    // never so
            (3, Some(1), 250, 1), // known to be removed by then
            (2, Some(1), 250, 0),
            (2, Some(2), 399, 0),
            (0, Some(2), 399, 1), // the clear was not published yet
            (0, Some(2), 400, 0),
            (1, Some(3), 1000, 0),
            (0, Some(4), 1000, 1),
        ] {
            let verdict = verdict(&engine(), &reply(device, as_of_seq, replied_ns));
            assert_eq!(verdict.wrong, wrong, "{device} as of {as_of_seq:?} at {replied_ns}: {verdict:?}");
        }
    }

    #[test]
    fn an_overlap_that_is_not_exact_may_be_too_small_and_not_too_large() {
        for (device, wrong) in [(0, 0), (2, 0), (3, 0), (4, 1)] {
            let mut reply = reply(device, Some(0), 150);
            reply.candidates[0].exact = false;
            let verdict = verdict(&engine(), &reply);
            assert_eq!((verdict.wrong, verdict.not_exact), (wrong, 1), "{device}");
        }
    }

    #[test]
    fn a_tampered_log_is_caught() {
        let honest = reply(3, Some(0), 150);
        assert_eq!(verdict(&engine(), &honest).wrong, 0);

        let mut fewer = engine();
        fewer[0].events = vec![EventRecord::Stored(vec![1, 2])];
        assert_eq!(verdict(&fewer, &honest).wrong, 1, "a block is missing from the engine's log");
        let mut later = engine();
        later[0].sent_ns = 151;
        assert_eq!(verdict(&later, &honest).wrong, 1, "the batch was sent after the reply");
        assert_eq!(verdict(&engine()[1..], &honest).wrong, 1, "the first batch is missing");
        let mut other = honest.clone();
        other.candidates[0].worker = 8;
        assert_eq!(verdict(&engine(), &other).wrong, 1, "no such engine");
        let mut lower = honest;
        lower.candidates[0].lower = 1;
        let verdict = verdict(&engine(), &lower);
        assert_eq!(
            (verdict.wrong, verdict.wrong_by_phase.as_slice()),
            (1, &[0, 1][..]),
            "the engines have no lower tiers"
        );
        assert!(verdict.examples[0].contains("worker 7 held 3 blocks (1 in lower tiers) of 3"));
    }

    #[test]
    fn overlaps_below_exact_are_counted_and_compared() {
        let mut doubtful = reply(1, None, 99);
        doubtful.candidates[0].exact = false;
        let verdict = verdict(&engine(), &doubtful);
        assert_eq!((verdict.checked, verdict.not_exact, verdict.wrong), (1, 1, 1));
    }

    #[test]
    fn a_batch_out_of_order_is_counted_and_ignored() {
        let mut history = History::default();
        engine()[1..].iter().for_each(|batch| history.push(batch));
        assert_eq!((history.batches(), history.out_of_order()), (0, 4));
    }
}
