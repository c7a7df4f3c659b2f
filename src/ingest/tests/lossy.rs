//! No loss of messages makes a worker seem to hold a block that its engine does not hold.

mod recovered;
mod relayed;

use std::collections::BTreeMap;

use proptest::prelude::*;

use super::vllm::{self, Batch};
use super::{Options, Rig};
use crate::trust::TrustLevel;

/// Contents a block can have, and the longest chain: small, so that chains meet.
const CONTENTS: u32 = 3;
const DEPTH: usize = 4;

/// A prefix cache as vLLM's: a block is a path of contents, evicted in any order, stored again whether or
/// not it is still held, and removed once for every store.
#[derive(Clone, Debug, Default)]
struct Engine {
    references: BTreeMap<Vec<u32>, u32>,
    seq: u64,
    stamp: u32,
}

impl Engine {
    fn hash(path: &[u32]) -> u64 {
        path.iter().fold(1, |hash, content| hash * 10 + u64::from(*content))
    }

    fn batch(&mut self) -> Batch {
        self.stamp += 1;
        Batch::new(self.stamp)
    }

    /// Computes a prompt: stores the blocks behind the longest held prefix.
    fn compute(&mut self, path: &[u32]) -> Batch {
        let held = self.depth(path);
        let batch = self.batch();
        if held == path.len() {
            return batch;
        }
        let hashes: Vec<u64> = (held..path.len()).map(|at| Self::hash(&path[..=at])).collect();
        for at in held..path.len() {
            *self.references.entry(path[..=at].to_vec()).or_default() += 1;
        }
        batch.stored((held > 0).then(|| Self::hash(&path[..held])), &hashes, &path[held..])
    }

    /// Evicts one reference.
    fn evict(&mut self, at: usize) -> Batch {
        let batch = self.batch();
        let Some(path) = self.references.keys().nth(at % self.references.len().max(1)).cloned() else { return batch };
        let count = self.references.get_mut(&path).expect("a path just found");
        *count -= 1;
        if *count == 0 {
            self.references.remove(&path);
        }
        batch.removed(&[Self::hash(&path)])
    }

    fn clear(&mut self) -> Batch {
        self.references.clear();
        self.batch().cleared()
    }

    fn restart(&mut self) {
        self.references.clear();
        self.seq = 0;
    }

    /// One batch of work.
    fn work(&mut self, work: &Work) -> Batch {
        match work {
            Work::Compute(path) => self.compute(path),
            Work::Evict(at) => self.evict(*at),
            Work::Clear => self.clear(),
        }
    }

    fn depth(&self, path: &[u32]) -> usize {
        (0..path.len()).take_while(|at| self.references.contains_key(&path[..=*at])).count()
    }
}

#[derive(Clone, Debug)]
enum Work {
    Compute(Vec<u32>),
    Evict(usize),
    Clear,
}

#[derive(Clone, Copy, Debug)]
enum Fate {
    Arrives,
    Twice,
    Lost,
    Damaged,
    /// The connection breaks first.
    Breaks,
    /// The engine restarts first and the connection breaks.
    Restarts,
    /// The engine restarts first without a broken connection, but its first batch arrives.
    RestartsUnseen,
}

fn work() -> impl Strategy<Value = Work> {
    prop_oneof![
        12 => prop::collection::vec(1..=CONTENTS, 1..=DEPTH).prop_map(Work::Compute),
        8 => any::<usize>().prop_map(Work::Evict),
        1 => Just(Work::Clear),
    ]
}

fn fate() -> impl Strategy<Value = Fate> {
    prop_oneof![
        40 => Just(Fate::Arrives),
        3 => Just(Fate::Twice),
        2 => Just(Fate::Lost),
        1 => Just(Fate::Damaged),
        1 => Just(Fate::Breaks),
        1 => Just(Fate::Restarts),
        1 => Just(Fate::RestartsUnseen),
    ]
}

fn paths() -> Vec<Vec<u32>> {
    (0..CONTENTS.pow(DEPTH as u32))
        .map(|number| (0..DEPTH as u32).map(|at| number / CONTENTS.pow(at) % CONTENTS + 1).collect())
        .collect()
}

/// One step of the engine through a channel that may lose it; `true` = something arrived.
fn step(rig: &mut Rig, engine: &mut Engine, work: &Work, fate: Fate) -> bool {
    if matches!(fate, Fate::Restarts | Fate::RestartsUnseen) {
        engine.restart();
    }
    if matches!(fate, Fate::Breaks | Fate::Restarts) {
        let now = rig.now;
        rig.streams[0].disconnected(&mut rig.space, now);
    }
    let batch = engine.work(work);
    let seq = engine.seq;
    engine.seq += 1;
    let mut payload = batch.payload();
    match fate {
        Fate::Lost => return false,
        Fate::Damaged => payload.truncate(payload.len() - 1),
        Fate::Twice => rig.send_bytes(0, seq, &payload),
        _ => {}
    }
    rig.send_bytes(0, seq, &payload);
    true
}

proptest! {
    #[test]
    fn a_lossy_stream_is_never_over_counted_and_exact_means_exact(
        steps in prop::collection::vec((work(), fate()), 1..120),
        salts_possible in any::<bool>(),
    ) {
        let mut rig = Rig::new(&Options { salts_possible, scheme: Some(super::SCHEME), ..Options::default() });
        let (mut engine, paths) = (Engine::default(), paths());
        for (work, fate) in steps {
            if !step(&mut rig, &mut engine, &work, fate) {
                continue;
            }
            let trust = rig.trust();
            for path in &paths {
                let (held, said) = (engine.depth(path), rig.device(path) as usize);
                prop_assert!(said <= held, "{path:?}: {said} said, {held} held, after {work:?} {fate:?}");
                if trust.level == TrustLevel::Exact {
                    prop_assert_eq!(said, held, "{:?} after {:?} {:?}", path, work, fate);
                }
            }
        }
    }
}

#[test]
fn a_stream_that_loses_nothing_stays_exact() {
    let mut rig = Rig::new(&Options::default());
    let mut engine = Engine::default();
    for path in [[1, 2, 3, 1], [1, 2, 1, 1], [1, 2, 3, 2], [2, 2, 2, 2]] {
        step(&mut rig, &mut engine, &Work::Compute(path.into()), Fate::Arrives);
        step(&mut rig, &mut engine, &Work::Evict(3), Fate::Twice);
        assert_eq!(rig.trust().level, TrustLevel::Exact);
        assert_eq!(rig.device(&path) as usize, engine.depth(&path));
    }
    assert_eq!(vllm::tokens(&[1]).len(), vllm::BLOCK_SIZE);
}
