//! Second copies of a prefix, and full reports that look like them, over a block pool that behaves like vLLM's.

use std::collections::{BTreeMap, VecDeque};

use proptest::prelude::*;

use super::vllm::Batch;
use super::{C, Options, R, Rig, SCHEME, chain};
use crate::trust::TrustLevel;

/// Blocks of the pool; one of them is never given out.
const POOL_BLOCKS: usize = 40;
/// Blocks of the longest shared prefix.
const PREFIX_BLOCKS: usize = 14;
/// Prompts that share nothing.
const FAMILIES: u32 = 4;
/// Reports of fewer blocks than a pool may have in use and unfilled cannot be distinguished from copies.
const REPORT_BLOCKS_MIN: usize = 5;

fn counting() -> Rig {
    Rig::new(&Options {
        scheme: Some(SCHEME),
        counts_copies: true,
        capacity_blocks: POOL_BLOCKS as u64,
        ..Options::default()
    })
}

fn names(path: &[u32]) -> Vec<u64> {
    let mut name = 1_u64;
    path.iter()
        .map(|content| {
            name = name.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ u64::from(*content);
            name
        })
        .collect()
}

/// One request.
#[derive(Clone, Debug)]
struct Request {
    family: u32,
    shared: usize,
    /// Blocks that no other prompt has.
    own: usize,
    /// Its last tokens fill no block.
    has_tail: bool,
    /// It may not read the cache, as with `prompt_logprobs`.
    computes_anew: bool,
    /// The engine announces the blocks that it found: `kv_cache_report_mode = "full"`.
    reports: bool,
}

/// `vllm/v1/core/block_pool.py`, as far as events go: blocks without a hash are reused first, the others in the order
/// in which they were last used; the first block of a hash is the one that is found.
#[derive(Debug)]
struct Pool {
    hashes: Vec<Option<u64>>,
    users: Vec<u32>,
    free: VecDeque<usize>,
    cached: BTreeMap<u64, Vec<usize>>,
    running: VecDeque<Vec<usize>>,
    unique: u32,
    stamp: u32,
}

impl Pool {
    fn new() -> Self {
        Self {
            hashes: vec![None; POOL_BLOCKS],
            users: vec![0; POOL_BLOCKS],
            free: (1..POOL_BLOCKS).collect(),
            cached: BTreeMap::new(),
            running: VecDeque::new(),
            unique: 1000,
            stamp: 0,
        }
    }

    fn batch(&mut self) -> Batch {
        self.stamp += 1;
        Batch::new(self.stamp)
    }

    fn depth(&self, path: &[u32]) -> usize {
        names(path).iter().take_while(|name| self.cached.contains_key(name)).count()
    }

    fn schedule(&mut self, request: &Request, mut batch: Batch) -> Batch {
        let mut path: Vec<u32> = prefix(request.family, request.shared);
        for _ in 0..request.own {
            self.unique += 1;
            path.push(self.unique);
        }
        let names = names(&path);
        let findable = if request.has_tail { path.len() } else { path.len().saturating_sub(1) };
        let found = if request.computes_anew { 0 } else { self.depth(&path[..findable]) };
        if request.reports && found >= REPORT_BLOCKS_MIN {
            batch = batch.stored(None, &names[..found], &path[..found]);
        }
        let mut blocks: Vec<usize> = names[..found].iter().map(|name| self.cached[name][0]).collect();
        let new = path.len() - found + 1;
        let unused = blocks.iter().filter(|block| self.users[**block] == 0).count();
        if self.free.len() < new + unused {
            return batch;
        }
        for block in &blocks {
            if self.users[*block] == 0 {
                self.free.retain(|free| free != block);
            }
            self.users[*block] += 1;
        }
        for _ in 0..new {
            let block = self.free.pop_front().expect("counted above");
            if let Some(name) = self.hashes[block].take() {
                let copies = self.cached.get_mut(&name).expect("a hash is of a block");
                copies.retain(|copy| *copy != block);
                if copies.is_empty() {
                    self.cached.remove(&name);
                }
                batch = batch.removed(&[name]);
            }
            self.users[block] = 1;
            blocks.push(block);
        }
        for at in found..path.len() {
            self.hashes[blocks[at]] = Some(names[at]);
            self.cached.entry(names[at]).or_default().push(blocks[at]);
        }
        self.running.push_back(blocks);
        if found < path.len() {
            let parent = found.checked_sub(1).map(|last| names[last]);
            batch = batch.stored(parent, &names[found..], &path[found..]);
        }
        batch
    }

    fn end_oldest(&mut self) {
        for block in self.running.pop_front().into_iter().flatten().rev() {
            self.users[block] -= 1;
            match (self.users[block], self.hashes[block]) {
                (0, None) => self.free.push_front(block),
                (0, Some(_)) => self.free.push_back(block),
                _ => {}
            }
        }
    }

    fn clear(&mut self) -> Batch {
        while !self.running.is_empty() {
            self.end_oldest();
        }
        self.hashes.fill(None);
        self.cached.clear();
        self.batch().cleared()
    }
}

fn prefix(family: u32, blocks: usize) -> Vec<u32> {
    (0..blocks as u32).map(|at| family * 100 + at + 1).collect()
}

#[derive(Clone, Debug)]
enum Step {
    Schedule(Vec<Request>),
    End,
    Clear,
}

fn request(reports: bool) -> impl Strategy<Value = Request> {
    let blocks = (0..FAMILIES, 1..=PREFIX_BLOCKS, 0_usize..4);
    let kinds = (any::<bool>(), prop::bool::weighted(0.2), prop::bool::weighted(if reports { 0.3 } else { 0.0 }));
    (blocks, kinds).prop_map(|((family, shared, own), (has_tail, computes_anew, reports))| Request {
        family,
        shared,
        own,
        has_tail,
        computes_anew,
        reports,
    })
}

fn steps(reports: bool, at_once: usize) -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        60 => prop::collection::vec(request(reports), 1..=at_once).prop_map(Step::Schedule),
        30 => Just(Step::End),
        1 => Just(Step::Clear),
    ];
    prop::collection::vec(step, 1..120)
}

/// Runs an engine beside a worker, and answers how often the worker was exact.
fn run(steps: &[Step], rig: &mut Rig) -> Result<(usize, usize), TestCaseError> {
    let (mut pool, mut seq, mut exact) = (Pool::new(), 0, 0);
    for step in steps {
        let batch = match step {
            Step::End => {
                pool.end_oldest();
                continue;
            }
            Step::Clear => pool.clear(),
            Step::Schedule(requests) => {
                while pool.running.len() + requests.len() > 3 {
                    pool.end_oldest();
                }
                let batch = pool.batch();
                requests.iter().fold(batch, |batch, request| pool.schedule(request, batch))
            }
        };
        rig.send(seq, &batch);
        seq += 1;
        let trust = rig.trust();
        exact += usize::from(trust.level == TrustLevel::Exact);
        for family in 0..FAMILIES {
            let path = prefix(family, PREFIX_BLOCKS);
            let (said, held) = (rig.device(&path) as usize, pool.depth(&path));
            prop_assert!(said <= held, "batch {}: {} said, {} held, {:?}", seq - 1, said, held, trust);
            if trust.level == TrustLevel::Exact {
                prop_assert_eq!(said, held, "batch {}: {:?}", seq - 1, trust);
            }
        }
    }
    Ok((exact, seq as usize))
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 96, ..ProptestConfig::default() })]

    #[test]
    fn copies_are_counted_as_the_pool_has_them(steps in steps(false, 1)) {
        let mut rig = counting();
        let (exact, batches) = run(&steps, &mut rig)?;
        prop_assert_eq!(exact, batches, "{:?}", rig.trust());
    }

    #[test]
    fn copies_of_requests_of_one_step_are_never_exact_and_wrong(steps in steps(false, 2)) {
        run(&steps, &mut counting())?;
    }

    #[test]
    fn full_reports_are_never_exact_and_wrong(steps in steps(true, 1)) {
        run(&steps, &mut counting())?;
    }

    #[test]
    fn without_the_setting_nothing_is_over_counted(steps in steps(true, 2)) {
        let options = Options { scheme: Some(SCHEME), ..Options::default() };
        run(&steps, &mut Rig::new(&options))?;
    }
}

/// The names and contents of a chain.
fn told(blocks: u64) -> (Vec<u64>, Vec<u32>) {
    ((1..=blocks).collect(), (1..=blocks as u32).collect())
}

#[test]
fn a_hot_prefix_survives_the_eviction_of_its_copy() {
    for counts_copies in [false, true] {
        let mut rig = Rig::new(&Options { counts_copies, ..Options::default() });
        rig.send(0, &chain(0));
        rig.send(1, &Batch::new(1).stored(None, &[11, 12, 13], &[1, 2, 3]));
        rig.send(2, &Batch::new(2).removed(&[13]).removed(&[12]).removed(&[11]));
        if counts_copies {
            rig.expect(TrustLevel::Exact, &[], 2);
            assert_eq!((rig.device(&[1, 2, 3]), rig.count(C::StoresCopied)), (3, 1));
        } else {
            rig.expect(TrustLevel::LowerBound, &[R::AmbiguousStore], 2);
            assert_eq!((rig.device(&[1, 2, 3]), rig.count(C::StoresCopied)), (0, 0));
        }
    }
    // A prompt of one whole block, sent twice: vLLM computes the last token always.
    let mut rig = Rig::new(&Options { counts_copies: true, ..Options::default() });
    rig.send(0, &Batch::new(0).stored(None, &[11], &[1]));
    rig.send(1, &Batch::new(1).stored(None, &[11], &[1]));
    rig.send(2, &Batch::new(2).removed(&[11]));
    rig.expect(TrustLevel::Exact, &[], 2);
    assert_eq!(rig.device(&[1]), 1);
    rig.send(3, &Batch::new(3).removed(&[11]));
    assert_eq!(rig.device(&[1]), 0);
}

#[test]
fn a_report_of_a_partly_held_chain_counts_only_the_rest() {
    let mut rig = Rig::new(&Options::default());
    rig.send(0, &chain(0));
    // A copy that is not counted, and its eviction: only the first block is known to be held.
    rig.send(1, &Batch::new(1).stored(None, &[11, 12, 13], &[1, 2, 3]).removed(&[13]).removed(&[12]));
    assert_eq!(rig.device(&[1, 2, 3]), 1);
    rig.send(2, &Batch::new(2).stored(None, &[11, 12, 13], &[1, 2, 3]));
    assert_eq!(rig.device(&[1, 2, 3]), 3, "the engine still holds all of it");
    rig.send(3, &Batch::new(3).removed(&[11]).removed(&[12]).removed(&[13]));
    assert_eq!(rig.device(&[1, 2, 3]), 0, "the report was no copy of the first block");
    // Where nothing is missed such a store is the engine's own: its first block was evicted, and it computes all again.
    let mut rig = Rig::new(&Options::default());
    rig.send(0, &chain(0).removed(&[11]));
    rig.send(1, &Batch::new(1).stored(None, &[11, 12, 13], &[1, 2, 3]).removed(&[12]).removed(&[13]));
    rig.expect(TrustLevel::Exact, &[], 1);
    assert_eq!(rig.device(&[1, 2, 3]), 3);
}

#[test]
fn a_repeated_chain_with_new_blocks_behind_it_is_a_report() {
    let mut rig = counting();
    rig.send(0, &chain(0));
    rig.send(1, &Batch::new(1).stored(None, &[11, 12, 13], &[1, 2, 3]).removed(&[77]).stored(Some(13), &[14], &[4]));
    rig.expect(TrustLevel::LowerBound, &[R::FullReports], 1);
    assert_eq!((rig.device(&[1, 2, 3, 4]), rig.count(C::FullReports)), (0, 1));
    // From then on nothing is counted again, until the engine's cache is cleared.
    rig.send(2, &Batch::new(2).stored(None, &[21], &[7]));
    rig.send(3, &Batch::new(3).stored(None, &[21], &[7]));
    rig.expect(TrustLevel::LowerBound, &[R::AmbiguousStore, R::FullReports], 3);
    rig.send(4, &Batch::new(4).cleared().stored(None, &[21], &[7]));
    rig.send(5, &Batch::new(5).stored(None, &[21], &[7]));
    rig.expect(TrustLevel::Exact, &[], 5);
    // A copy is computed in parts over several steps, and others go on below it later.
    rig.send(6, &Batch::new(6).stored(Some(21), &[22], &[8]));
    rig.expect(TrustLevel::Exact, &[], 6);
}

/// vLLM schedules a step ahead: a block that the first token of a copy fills is announced in the batch of the copy.
#[test]
fn a_copy_whose_first_token_fills_a_block_is_not_a_report() {
    let (names, contents) = told(12);
    let other: Vec<u64> = (101..=112).collect();
    for evicted in [12, 6, 5, 0] {
        let mut rig = counting();
        rig.send(0, &Batch::new(0).stored(None, &names, &contents).stored(None, &other, &[90; 12]));
        let copy = Batch::new(1).removed(&other[..evicted]).stored(None, &names, &contents);
        rig.send(1, &copy.stored(Some(12), &[13], &[13]));
        if evicted >= 6 {
            rig.expect(TrustLevel::Exact, &[], 1);
            rig.send(2, &Batch::new(2).removed(&[13]).removed(&names));
            assert_eq!(rig.device(&contents), 12);
            rig.expect(TrustLevel::Exact, &[], 2);
        } else {
            rig.expect(TrustLevel::LowerBound, &[R::FullReports], 1);
        }
    }
    // An eviction for another request of the step is no sign of a copy.
    let mut rig = counting();
    rig.send(0, &Batch::new(0).stored(None, &names, &contents).stored(None, &other, &[90; 12]));
    let step = Batch::new(1).removed(&other).stored(None, &[201, 202, 203, 204, 205, 206, 207, 208], &[80; 8]);
    rig.send(1, &step.stored(None, &names, &contents).stored(Some(12), &[13], &[13]));
    rig.expect(TrustLevel::LowerBound, &[R::FullReports], 1);
}

#[test]
fn a_long_chain_repeated_by_an_engine_that_evicts_and_evicted_nothing_for_it_is_a_report() {
    let (names, contents) = told(12);
    for evicts in [true, false] {
        let mut rig = counting();
        rig.send(0, &Batch::new(0).stored(None, &names, &contents).stored(None, &[90], &[90]));
        rig.send(1, &Batch::new(1).removed(&[90]));
        let batch = if evicts { Batch::new(2).removed(&[91]).removed(&[12]) } else { Batch::new(2) };
        rig.send(2, &batch.stored(None, &names[..11], &contents[..11]));
        if evicts {
            rig.expect(TrustLevel::Exact, &[], 2);
        } else {
            rig.expect(TrustLevel::LowerBound, &[R::FullReports], 2);
        }
    }
}

#[test]
fn more_copies_than_the_device_has_blocks_are_reports() {
    let (names, contents) = told(12);
    let mut rig = counting();
    for seq in 0..3 {
        rig.send(seq, &Batch::new(seq as u32).stored(None, &names, &contents));
        rig.expect(TrustLevel::Exact, &[], seq);
    }
    rig.send(3, &Batch::new(3).stored(None, &names, &contents));
    rig.expect(TrustLevel::LowerBound, &[R::FullReports], 3);
    assert_eq!(rig.device(&contents), 0);
}

/// An engine that announces a removal only when the last copy of a block is gone.
fn names_last_copies(rig: &Rig, as_of: u64) {
    let trust = rig.trust();
    let names: Vec<_> = trust.reasons.iter().map(R::name).collect();
    assert_eq!((trust.level, names), (TrustLevel::LowerBound, vec!["last_copy_removals"]), "batch {as_of}");
    assert_eq!(rig.device(&[1, 2, 3]), 0);
}

#[test]
fn a_request_that_computes_a_held_block_shows_that_removals_stand_for_all_copies() {
    let mut rig = Rig::new(&Options { scheme: Some(SCHEME), ..Options::default() });
    // The last block of a prompt of whole blocks is computed again: two copies, and one removal for both.
    rig.send(0, &chain(0));
    rig.send(1, &Batch::new(1).stored(Some(12), &[13], &[3]).removed(&[13]));
    // The engine would have found the other copy of the third block.
    rig.expect(TrustLevel::Exact, &[], 1);
    rig.send(2, &Batch::new(2).stored(Some(12), &[13, 14], &[3, 4]));
    names_last_copies(&rig, 2);
    // From then on a removal takes all copies, and a repeated chain changes nothing.
    rig.send(3, &Batch::new(3).cleared().stored(None, &[11, 12, 13], &[1, 2, 3]));
    rig.send(4, &Batch::new(4).stored(Some(12), &[13], &[3]).stored(None, &[11, 12, 13], &[1, 2, 3]));
    rig.expect(TrustLevel::Exact, &[], 4);
    assert_eq!(rig.device(&[1, 2, 3]), 3);
    rig.send(5, &Batch::new(5).removed(&[13]).removed(&[12]));
    rig.expect(TrustLevel::Exact, &[], 5);
    assert_eq!(rig.device(&[1, 2, 3]), 1);
    // Removed once more, it was a copy of its own after all.
    rig.send(6, &Batch::new(6).removed(&[13]));
    rig.expect(TrustLevel::LowerBound, &[R::LastCopyRemovals], 6);
    rig.send(7, &chain(7).cleared().stored(None, &[11, 12], &[1, 2]).stored(Some(11), &[12], &[2]).removed(&[12]));
    rig.expect(TrustLevel::Exact, &[], 7);
    assert_eq!(rig.device(&[1, 2]), 2);
    // Alone, the third block is the last of a prompt of whole blocks.
    let mut rig = Rig::new(&Options { scheme: Some(SCHEME), ..Options::default() });
    rig.send(0, &chain(0));
    rig.send(1, &Batch::new(1).stored(Some(12), &[13], &[3]).removed(&[13]));
    rig.send(2, &Batch::new(2).stored(Some(12), &[13], &[3]));
    rig.send(3, &Batch::new(3).removed(&[13]).removed(&[13]).removed(&[12]));
    rig.expect(TrustLevel::Exact, &[], 3);
    assert_eq!(rig.device(&[1, 2, 3]), 1);
}

#[test]
fn more_copies_than_blocks_after_removals_that_left_some_are_those_of_removals_for_all_copies() {
    let mut rig = Rig::new(&Options { scheme: Some(SCHEME), capacity_blocks: 4, ..Options::default() });
    rig.send(0, &chain(0));
    rig.send(1, &Batch::new(1).stored(Some(12), &[13], &[3]).removed(&[13]));
    rig.send(2, &Batch::new(2).stored(Some(12), &[13], &[3]).removed(&[13]));
    rig.send(3, &Batch::new(3).stored(None, &[21, 22], &[7, 8]));
    names_last_copies(&rig, 3);
}
