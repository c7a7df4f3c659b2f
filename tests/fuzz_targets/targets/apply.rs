//! Messages into the index, beside a model of their engine: the index never counts more than the engine can have meant.

use kvrouted::event::format::Format;
use kvrouted::event::{self, EventBatch};
use kvrouted::ids::{EventSeq, Tier, Worker};
use kvrouted::index::{Depths, IndexReader, ShardLimits};
use kvrouted::ingest::Feed;

use super::engine::Engine;

/// Bytes before the payload of each message: what happens, and the payload's length, little-endian.
const HEAD_BYTES: usize = 3;
/// Prompts asked for after a message, and their blocks.
const PROMPTS_MAX: usize = 8;
const PROMPT_BLOCKS_MAX: usize = 24;

/// What happens with a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Step {
    /// It is the next one.
    Next,
    /// It comes twice.
    Twice,
    /// Some before it are lost.
    Lost,
    /// The publisher starts anew with it.
    Restart,
    /// The connection breaks before it.
    Broken,
}

impl Step {
    const ALL: [Self; 5] = [Self::Next, Self::Twice, Self::Lost, Self::Restart, Self::Broken];

    /// As one byte, of which most mean [`Step::Next`].
    fn of(byte: u8) -> Self {
        Self::ALL[usize::from(byte % 16).saturating_sub(11)]
    }
}

/// Messages as [`apply`] reads them.
pub(crate) fn messages(payloads: &[(Step, Vec<u8>)]) -> Vec<u8> {
    let mut out = Vec::new();
    for (step, payload) in payloads {
        out.push(if *step == Step::Next { 0 } else { 11 + *step as u8 });
        out.extend((payload.len() as u16).to_le_bytes());
        out.extend(payload);
    }
    out
}

/// What is counted is never more than the engine can have meant.
pub(crate) fn apply(data: &[u8]) {
    overlap(data);
}

/// As [`apply`]; answers how many blocks of the prompts asked for were found, and how many could have been.
pub(crate) fn overlap(mut data: &[u8]) -> (u64, u64) {
    let mut rig = Rig::new(data.first().is_some_and(|byte| byte & 0x80 != 0));
    let mut found = (0, 0);
    while let Some((head, rest)) = data.split_first_chunk::<HEAD_BYTES>() {
        let bytes = usize::from(u16::from_le_bytes([head[1], head[2]])).min(rest.len());
        let (payload, rest) = rest.split_at(bytes);
        data = rest;
        rig.take(Step::of(head[0]), payload);
        let (counted, meant) = rig.compare();
        found = (found.0 + counted, found.1 + meant);
    }
    found
}

/// A worker and its engine.
struct Rig {
    feed: Feed,
    reader: IndexReader,
    depths: Depths,
    engine: Engine,
    batch: EventBatch,
    format: Option<Format>,
    worker: Worker,
    seq: u64,
}

impl Rig {
    fn new(salts_possible: bool) -> Self {
        let worker = Worker::new(1, 0);
        let (feed, reader) = Feed::new(worker, None, salts_possible, ShardLimits::default());
        let (depths, batch) = (Depths::new(), EventBatch::new());
        Self { feed, reader, depths, engine: Engine::default(), batch, format: None, worker, seq: 0 }
    }

    fn take(&mut self, step: Step, payload: &[u8]) {
        match step {
            Step::Next | Step::Twice => {}
            // After a gap nothing is believed; the format is still the stream's.
            Step::Lost => {
                self.engine.clear();
                // Before the first batch nothing can be missed: this is then where the stream is joined.
                self.seq += 3;
            }
            Step::Restart => {
                // The same number with other bytes; were they the same, it would be a batch that comes twice.
                if self.seq > 0 {
                    self.feed.message(EventSeq(0), b"another incarnation");
                    self.forget();
                    self.seq = 1;
                }
            }
            Step::Broken => {
                self.feed.disconnected();
                self.forget();
            }
        }
        for _ in 0..if step == Step::Twice { 2 } else { 1 } {
            self.feed.message(EventSeq(self.seq), payload);
        }
        self.seq += 1;
        self.mean(payload);
    }

    fn forget(&mut self) {
        self.engine.clear();
        self.format = None;
    }

    /// The meaning of the payload, if it is believed.
    fn mean(&mut self, payload: &[u8]) {
        if event::decode(payload, &mut self.format, &mut self.batch).is_err() {
            return self.engine.clear();
        }
        let info = self.batch.info();
        let of_another = info.dp_rank.is_some_and(|rank| rank != self.worker.rank)
            || info.worker_id.is_some_and(|id| id != self.worker.id);
        if !of_another && info.snapshot.is_none() {
            self.engine.apply(&self.batch);
        }
    }

    fn compare(&mut self) -> (u64, u64) {
        let held = self.feed.held();
        assert!(held.bound <= self.engine.blocks(), "{held:?} of {:?}", self.engine);
        for tier in Tier::ALL {
            assert!(held.references[tier.index()] <= self.engine.references(tier), "{held:?} of {:?}", self.engine);
        }
        let (mut counted, mut could_be) = (0, 0);
        for prompt in self.engine.prompts(PROMPTS_MAX, PROMPT_BLOCKS_MAX) {
            self.reader.lookup(&prompt, &mut self.depths);
            let found = self.depths.of(Feed::SHARD, Feed::SLOT);
            let all = found.device + found.host + found.disk + found.external;
            let (device, any) = (self.engine.depth(&prompt, &[Tier::Device]), self.engine.depth(&prompt, &Tier::ALL));
            assert!(found.device <= device && all <= any, "{found:?} of {prompt:?}, {device} {any}: {:?}", self.engine);
            counted += u64::from(all);
            could_be += u64::from(any);
        }
        (counted, could_be)
    }
}
