//! Snapshots that engines send themselves, loaded into streams without a socket: what they leave is what the engine
//! holds, and one that cannot be used leaves the worker as it was.

use bytes::Bytes;
use crossbeam::channel::{Sender, bounded};
use rand::{RngExt, SeedableRng};
use rand_xoshiro::Xoshiro256PlusPlus;
use rustc_hash::FxHashMap;

use super::dump::ended;
use super::vllm::{self, BLOCK_SIZE, Batch};
use super::{C, Options, R, Rig, chain};
use crate::event::engine_snapshot::{Cut, EngineSnapshot, SnapshotContent};
use crate::event::msgpack::Placed;
use crate::fleet::SnapshotSource;
use crate::ids::{EngineHash, EventSeq, Lifetime, SnapshotProposal, Worker};
use crate::ingest::dump::{LoadAnswer, Loading, Step};
use crate::ingest::engine_snapshot::SnapshotOrder;
use crate::ingest::engine_snapshot::known::Known;
use crate::ingest::{AbortReason, DumpPart};
use crate::limits::{ENGINE_HEARTBEAT_SILENT_MS_MAX, TRANSFER_STALL_MS_MAX};
use crate::trust::TrustLevel;

const OWN: Lifetime = Lifetime([7; 16]);
const OTHER: Lifetime = Lifetime([8; 16]);

fn order(proposal: SnapshotProposal, counts_copies: bool) -> SnapshotOrder {
    let source = SnapshotSource { proposal, endpoint: "ipc://@absent".parse().expect("an endpoint") };
    SnapshotOrder {
        worker: Worker::new(1, 0),
        source,
        scheme: Some(super::SCHEME),
        salts_possible: true,
        counts_copies,
    }
}

fn snapshot(lifetime: Lifetime, watermark: u64, batches: &[Batch]) -> EngineSnapshot {
    let batches = batches.iter().map(|batch| Bytes::from(batch.payload())).collect();
    EngineSnapshot { cut: Cut { lifetime, watermark: EventSeq(watermark) }, content: SnapshotContent::Batches(batches) }
}

fn built(snapshot: EngineSnapshot) -> Vec<DumpPart> {
    order(SnapshotProposal::Vllm57789, false).parts(snapshot, None).expect("a snapshot")
}

/// A rig whose engine sends snapshots.
fn rig(options: &Options) -> Rig {
    let mut rig =
        Rig::new(&Options { scheme: Some(super::SCHEME), counts_copies: options.counts_copies, ..Options::default() });
    rig.streams[0].set_snapshots(Some(SnapshotProposal::Vllm57789));
    rig
}

impl Rig {
    /// Sends a batch of a lifetime.
    fn send_of(&mut self, lifetime: Lifetime, seq: u64, batch: &Batch) {
        let now = self.now;
        self.streams[0].note_lifetime(&mut self.space, &mut self.scratch, (lifetime, EventSeq(seq)), now);
        self.send(seq, batch);
    }

    /// Begins a load of an engine's snapshot: the messages wait from now on.
    fn hold(&mut self) -> (Loading, Sender<DumpPart>, crossbeam::channel::Receiver<LoadAnswer>) {
        let (sender, received) = bounded(64);
        let (loading, answers) = Loading::new(received);
        let mut loading = loading.of_engine();
        assert_eq!(self.loading(&mut loading), Step::Waits);
        (loading, sender, answers)
    }

    /// Gives the parts to a load, and runs it to its end or until the time that it may wait is over.
    fn finish(&mut self, loading: &mut Loading, sender: &Sender<DumpPart>, parts: Vec<DumpPart>) {
        parts.into_iter().for_each(|part| sender.try_send(part).expect("room"));
        loop {
            match self.loading(loading) {
                Step::Over => break,
                Step::Waits => self.now.uptime_ms += TRANSFER_STALL_MS_MAX,
                Step::Moved => {}
            }
        }
        self.release();
    }
}

#[test]
fn a_late_joiner_is_exact_behind_an_engines_snapshot() {
    let mut rig = rig(&Options::default());
    rig.send_of(OWN, 7, &Batch::new(7).stored(Some(13), &[14], &[4]));
    rig.expect(TrustLevel::LowerBound, &[R::JoinedLate, R::UnknownRoot], 7);
    let (mut loading, sender, answers) = rig.hold();
    // One that the snapshot contains, and one behind it.
    rig.send_of(OWN, 8, &Batch::new(8).removed(&[12]));
    rig.send_of(OWN, 9, &Batch::new(9).stored(Some(11), &[12], &[2]));
    rig.expect(TrustLevel::LowerBound, &[R::JoinedLate, R::UnknownRoot], 7);
    let program = [chain(0), Batch::new(1).stored(Some(13), &[14], &[4]), Batch::new(2).removed(&[12])];
    rig.finish(&mut loading, &sender, built(snapshot(OWN, 8, &program)));
    assert!(ended(&answers).is_ok());
    rig.expect(TrustLevel::Exact, &[], 9);
    assert_eq!(rig.device(&[1, 2, 3, 4]), 4);
    let counts = [C::EngineSnapshotsAsked, C::EngineSnapshotsLoaded, C::EngineSnapshotsFailed, C::Gaps, C::Duplicates];
    assert_eq!(counts.map(|counter| rig.count(counter)), [1, 1, 0, 0, 1]);
    rig.send_of(OWN, 10, &Batch::new(10).removed(&[13]));
    rig.expect(TrustLevel::Exact, &[], 10);
    assert_eq!(rig.device(&[1, 2, 3, 4]), 2);
}

#[test]
fn a_snapshot_that_does_not_join_leaves_the_worker_as_it_was() {
    let blocks = [chain(0)];
    let after = |seqs: &'static [u64]| seqs;
    let cases = [
        ("another lifetime", OTHER, 8, after(&[8, 9]), AbortReason::OtherIncarnation),
        ("older than what was applied", OWN, 6, after(&[8]), AbortReason::Outdated),
        ("the next batch is missing", OWN, 8, after(&[8, 10]), AbortReason::NotJoined),
        ("the next batch is missing, and the last too", OWN, 9, after(&[8, 11]), AbortReason::NotJoined),
        ("the stream does not reach it", OWN, 12, after(&[8, 9]), AbortReason::NotJoined),
    ];
    for (name, lifetime, watermark, seqs, reason) in cases {
        let mut rig = rig(&Options::default());
        rig.send_of(OWN, 7, &Batch::new(7).stored(None, &[21], &[7]));
        let (mut loading, sender, answers) = rig.hold();
        for seq in seqs {
            rig.send_of(OWN, *seq, &Batch::new(*seq as u32));
        }
        rig.finish(&mut loading, &sender, built(snapshot(lifetime, watermark, &blocks)));
        assert_eq!(ended(&answers), Err(reason), "{name}");
        assert_eq!(rig.device(&[1, 2, 3]), 0, "{name}");
        let is_whole = seqs.windows(2).all(|pair| pair[0] + 1 == pair[1]);
        assert_eq!(
            rig.device(&[7]),
            u32::from(is_whole),
            "{name}: its own blocks stay unless the live stream lost them"
        );
        let level = (rig.trust().level, rig.count(C::EngineSnapshotsFailed), rig.aborted());
        assert_eq!(level, (TrustLevel::LowerBound, 1, vec![(reason.name(), 1)]), "{name}");
    }
}

#[test]
fn an_answer_that_is_no_snapshot_leaves_the_worker_as_it_was() {
    for reason in [AbortReason::Unanswered, AbortReason::Unavailable, AbortReason::Oversized, AbortReason::Corrupt] {
        let mut rig = rig(&Options::default());
        rig.send_of(OWN, 7, &Batch::new(7).stored(None, &[21], &[7]));
        let (mut loading, sender, answers) = rig.hold();
        rig.send_of(OWN, 8, &Batch::new(8).stored(None, &[22], &[8]));
        rig.finish(&mut loading, &sender, vec![DumpPart::Aborted(reason)]);
        assert_eq!(ended(&answers), Err(reason));
        rig.expect(TrustLevel::LowerBound, &[R::JoinedLate], 8);
        assert_eq!((rig.device(&[7]), rig.device(&[8]), rig.count(C::EngineSnapshotsFailed)), (1, 1, 1));
    }
    // The thread that fetches it has gone.
    let mut rig = rig(&Options::default());
    rig.send_of(OWN, 7, &Batch::new(7).stored(None, &[21], &[7]));
    let (mut loading, sender, answers) = rig.hold();
    drop(sender);
    assert_eq!(rig.loading(&mut loading), Step::Over);
    assert_eq!((ended(&answers), rig.device(&[7])), (Err(AbortReason::PeerGone), 1));
}

#[test]
fn a_batch_that_is_none_of_a_snapshot_refuses_all_of_it() {
    let window = Batch::new(0).stored_with(
        None,
        &[1],
        &vllm::tokens(&[1]),
        BLOCK_SIZE,
        Some("GPU"),
        &[("kv_cache_spec_kind", "sliding_window")],
    );
    let refused =
        |batches: &[Batch]| order(SnapshotProposal::Vllm57789, false).parts(snapshot(OWN, 1, batches), None).map(drop);
    assert_eq!(refused(&[chain(0), Batch::new(1).rank(Some(3))]), Err(AbortReason::Corrupt));
    assert_eq!(refused(&[Batch::new(1).cleared()]), Err(AbortReason::Corrupt));
    assert_eq!(refused(&[window]), Err(AbortReason::Unsupported));
    let content = SnapshotContent::Batches(vec![Bytes::from_static(b"torn")]);
    let torn = EngineSnapshot { cut: Cut { lifetime: OWN, watermark: EventSeq(1) }, content };
    let built = order(SnapshotProposal::Vllm57789, false).parts(torn, None);
    assert_eq!(built, Err(AbortReason::Corrupt));
}

#[test]
fn another_lifetime_is_a_restart_although_the_numbers_go_on() {
    for is_held in [false, true] {
        let mut rig = rig(&Options::default());
        rig.send_of(OWN, 0, &chain(0));
        rig.expect(TrustLevel::Exact, &[], 0);
        let held = is_held.then(|| rig.hold());
        if is_held {
            rig.send_of(OWN, 1, &Batch::new(1).stored(Some(13), &[14], &[4]));
        }
        rig.send_of(OTHER, 2, &Batch::new(2).stored(None, &[31], &[9]));
        rig.expect(TrustLevel::LowerBound, &[R::JoinedLate], 2);
        assert_eq!((rig.device(&[1, 2, 3]), rig.device(&[9]), rig.count(C::Restarts)), (0, 1, 1));
        if let Some((mut loading, _sender, answers)) = held {
            assert_eq!(rig.loading(&mut loading), Step::Over);
            assert_eq!(ended(&answers), Err(AbortReason::Restarted));
        }
        rig.send_of(Lifetime([9; 16]), 0, &chain(5));
        rig.expect(TrustLevel::Exact, &[], 0);
    }
}

#[test]
fn heartbeats_show_a_gap_of_an_idle_stream_and_their_absence_is_silence() {
    let mut rig = rig(&Options::default());
    rig.send_of(OWN, 0, &chain(0));
    rig.send_of(OWN, 1, &Batch::new(1));
    rig.expect(TrustLevel::Exact, &[], 1);
    let tick = |rig: &mut Rig, after_ms: u64| {
        rig.now.uptime_ms += after_ms;
        let now = rig.now;
        rig.streams[0].tick(0, now);
        rig.streams[0].show(&mut rig.space);
    };
    tick(&mut rig, ENGINE_HEARTBEAT_SILENT_MS_MAX);
    rig.expect(TrustLevel::Exact, &[], 1);
    tick(&mut rig, 1);
    rig.expect(TrustLevel::Unproven, &[R::Silent], 1);
    rig.send_of(OWN, 2, &Batch::new(2));
    rig.expect(TrustLevel::Exact, &[], 2);
    // The batch before this heartbeat was lost, and nothing but the heartbeat shows it.
    rig.send_of(OWN, 4, &Batch::new(4));
    rig.expect(TrustLevel::LowerBound, &[R::Gap], 4);
    assert_eq!((rig.device(&[1]), rig.count(C::Gaps)), (0, 1));
    // Without a lifetime there are no heartbeats to miss.
    let mut quiet = Rig::new(&Options::default());
    quiet.send(0, &chain(0));
    tick(&mut quiet, 100 * ENGINE_HEARTBEAT_SILENT_MS_MAX);
    quiet.expect(TrustLevel::Exact, &[], 0);
}

/// An engine as vLLM's: a block of each chain is stored once for each copy, and removed as often. It records its events
/// as the proposal does, and makes snapshots of them.
struct Engine {
    random: Xoshiro256PlusPlus,
    /// References to each block.
    held: FxHashMap<u64, u32>,
    /// Stores so far, in order: the parent and the blocks of a chain.
    sources: Vec<(u64, std::ops::Range<u64>)>,
    copies: bool,
}

const CHAINS: u64 = 6;
const BLOCKS: u64 = 8;

impl Engine {
    fn new(seed: u64, copies: bool) -> Self {
        Self {
            random: Xoshiro256PlusPlus::seed_from_u64(seed),
            held: FxHashMap::default(),
            sources: Vec::new(),
            copies,
        }
    }

    fn hash(chain: u64, block: u64) -> u64 {
        (chain + 1) * 100 + block
    }

    fn contents(chain: u64) -> Vec<u32> {
        (0..BLOCKS).map(|block| Self::hash(chain, block) as u32).collect()
    }

    fn overlap(&self, chain: u64) -> u32 {
        (0..BLOCKS).take_while(|block| self.held.contains_key(&Self::hash(chain, *block))).count() as u32
    }

    fn stored(batch: Batch, chain: u64, blocks: &std::ops::Range<u64>) -> Batch {
        let hashes: Vec<u64> = blocks.clone().map(|block| Self::hash(chain, block)).collect();
        let contents: Vec<u32> = hashes.iter().map(|hash| *hash as u32).collect();
        batch.stored(blocks.start.checked_sub(1).map(|before| Self::hash(chain, before)), &hashes, &contents)
    }

    /// One step: some prompts are computed, some blocks evicted.
    fn step(&mut self, stamp: u64) -> Batch {
        let (mut batch, mut stores) = (Batch::new(stamp as u32), false);
        for _ in 0..self.random.random_range(0..3) {
            if self.random.random_bool(0.5) && !self.held.is_empty() {
                let mut hashes: Vec<u64> = self.held.keys().copied().collect();
                hashes.sort_unstable();
                let evicted = hashes[self.random.random_range(0..hashes.len())];
                let references = self.held.get_mut(&evicted).expect("held");
                *references -= 1;
                if *references == 0 {
                    self.held.remove(&evicted);
                }
                batch = batch.removed(&[evicted]);
                continue;
            }
            let (chain, to) = (self.random.random_range(0..CHAINS), self.random.random_range(1..=BLOCKS));
            let from = if self.copies && self.random.random_bool(0.2) { 0 } else { u64::from(self.overlap(chain)) };
            // One request in a step: two of one prompt would look like a full report.
            if from >= to || std::mem::replace(&mut stores, true) {
                continue;
            }
            let blocks = from..to;
            batch = Self::stored(batch, chain, &blocks);
            blocks.clone().for_each(|block| *self.held.entry(Self::hash(chain, block)).or_default() += 1);
            self.sources.push((chain, blocks));
        }
        batch
    }

    /// All stores in their order, then removals of what is too much.
    fn program(&self) -> Vec<Batch> {
        let (mut emitted, mut batches) = (FxHashMap::<u64, u32>::default(), Vec::new());
        for sources in self.sources.chunks(3) {
            let store = |batch, (chain, blocks): &(u64, std::ops::Range<u64>)| Self::stored(batch, *chain, blocks);
            batches.push(sources.iter().fold(Batch::new(0), store));
            for (chain, blocks) in sources {
                blocks.clone().for_each(|block| *emitted.entry(Self::hash(*chain, block)).or_default() += 1);
            }
        }
        let excess = |(hash, times): (u64, u32)| {
            let live = self.held.get(&hash).copied().unwrap_or_default();
            (live..times).map(move |_| hash)
        };
        let removed: Vec<u64> = emitted.into_iter().flat_map(excess).collect();
        batches.extend(removed.chunks(5).map(|hashes| Batch::new(0).removed(hashes)));
        batches
    }
}

/// A worker that joins late, or loses batches, agrees with the engine's own cache after the snapshot and behind it.
#[test]
fn a_worker_behind_a_snapshot_is_the_engines_cache_for_any_stream() {
    let mut exact = 0;
    for seed in 0..60 {
        let copies = seed % 3 == 0;
        let (mut engine, mut rig) =
            (Engine::new(seed, copies), rig(&Options { counts_copies: copies, ..Options::default() }));
        let join = engine.random.random_range(0..40);
        let cut = join + engine.random.random_range(1..20);
        let reached = cut + engine.random.random_range(0..5);
        let (mut program, mut held) = (Vec::new(), None);
        for seq in 0..=reached {
            let batch = engine.step(seq);
            if seq >= join {
                rig.send_of(OWN, seq, &batch);
            }
            if seq == join {
                held = Some(rig.hold());
            }
            if seq == cut {
                program = engine.program();
            }
        }
        let (mut loading, sender, answers) = held.expect("it has joined");
        let order = order(SnapshotProposal::Vllm57789, copies);
        let parts = order.parts(snapshot(OWN, cut, &program), None).expect("a snapshot");
        rig.finish(&mut loading, &sender, parts);
        assert!(ended(&answers).is_ok(), "seed {seed}");
        for seq in reached + 1..reached + 30 {
            let batch = engine.step(seq);
            rig.send_of(OWN, seq, &batch);
            let is_exact = rig.trust().level == TrustLevel::Exact;
            assert!(is_exact || (!copies && rig.trust().reasons.contains(R::AmbiguousStore)), "{:?}", rig.trust());
            exact += u32::from(is_exact);
            for chain in 0..CHAINS {
                let (found, held) = (rig.device(&Engine::contents(chain)), engine.overlap(chain));
                assert!(found == held || (!is_exact && found < held), "seed {seed}, chain {chain}, after {seq}");
            }
        }
    }
    assert!(exact > 580, "{exact} states of 1740 were exact");
}

#[test]
fn a_block_held_twice_counts_once_where_the_second_may_be_a_full_report() {
    let mut rig = rig(&Options::default());
    rig.send_of(OWN, 4, &Batch::new(4));
    let (mut loading, sender, answers) = rig.hold();
    let twice = [chain(0), Batch::new(1).stored(Some(13), &[14], &[4]), chain(2)];
    rig.finish(&mut loading, &sender, built(snapshot(OWN, 4, &twice)));
    assert!(ended(&answers).is_ok());
    rig.expect(TrustLevel::LowerBound, &[R::AmbiguousStore], 4);
    assert_eq!(rig.device(&[1, 2, 3, 4]), 4);
    rig.send_of(OWN, 5, &Batch::new(5).removed(&[12]));
    assert_eq!(rig.device(&[1, 2, 3, 4]), 1, "never more than the engine holds");
}

fn placed(blocks: &[(Option<u64>, u64)]) -> EngineSnapshot {
    let block =
        |(parent, hash): &(Option<u64>, u64)| Placed { parent: parent.map(EngineHash), hash: EngineHash(*hash) };
    EngineSnapshot {
        cut: Cut { lifetime: OWN, watermark: EventSeq(9) },
        content: SnapshotContent::Placements(blocks.iter().map(block).collect()),
    }
}

/// The blocks of a snapshot, and why it is refused.
type Refused = (&'static [(Option<u64>, u64)], AbortReason);

#[test]
fn hashes_without_tokens_show_whether_all_blocks_are_known_and_add_none() {
    let sglang = order(SnapshotProposal::Sglang34407, false);
    let known = |rig: &mut Rig| {
        let parts = rig.dump();
        let (sender, received) = bounded(parts.len());
        parts.into_iter().for_each(|part| sender.try_send(part).expect("room"));
        Known::read(&received)
    };
    let joined = || {
        let mut rig = Rig::new(&Options { scheme: Some(super::SCHEME), ..Options::default() });
        rig.streams[0].set_snapshots(Some(SnapshotProposal::Sglang34407));
        rig.send_of(OWN, 8, &chain(0).stored(None, &[21, 22], &[7, 8]));
        rig
    };
    let mut rig = joined();
    rig.expect(TrustLevel::LowerBound, &[R::JoinedLate], 8);
    let all = placed(&[(Some(11), 12), (None, 11), (None, 21)]);
    let parts = sglang.parts(all, Some(known(&mut rig).expect("its blocks"))).expect("all are known");
    let (mut loading, sender, answers) = rig.hold();
    rig.send_of(OWN, 9, &Batch::new(9));
    rig.finish(&mut loading, &sender, parts);
    assert!(ended(&answers).is_ok());
    rig.expect(TrustLevel::Exact, &[], 9);
    assert_eq!((rig.device(&[1, 2, 3]), rig.device(&[7, 8])), (2, 1), "those that it does not name are dropped");

    let refused: [Refused; 5] = [
        (&[(None, 11), (Some(98), 99)], AbortReason::UnknownContent),
        (&[(None, 11), (None, 12)], AbortReason::Corrupt),
        (&[(None, 11), (None, 11)], AbortReason::Corrupt),
        (&[(Some(12), 11), (Some(11), 12)], AbortReason::Corrupt),
        (&[(None, 11), (Some(21), 22), (Some(11), 13)], AbortReason::Corrupt),
    ];
    for (blocks, reason) in refused {
        let known = known(&mut joined()).expect("its blocks");
        assert_eq!(sglang.parts(placed(blocks), Some(known)), Err(reason), "{blocks:?}");
    }
    let mut tiers = joined();
    tiers.send_of(
        OWN,
        9,
        &Batch::new(9).stored_with(Some(13), &[14], &vllm::tokens(&[4]), BLOCK_SIZE, Some("CPU_PINNED"), &[]),
    );
    assert!(known(&mut tiers).is_err_and(|reason| reason == AbortReason::Unsupported), "tiers cannot be told apart");
}
