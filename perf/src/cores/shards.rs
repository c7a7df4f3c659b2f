//! Ingest of one tape by several writers, each with the shard of its own workers.

use std::sync::Barrier;
use std::time::Instant;

use kvrouted::ids::LocalHash;

use super::{HashedPrompt, Scheduled, Span};
use crate::failure::Failure;
use crate::measure::Lookups;
use crate::ours::{Feed, Ours as Index, Shard};

/// Prompts that are looked up in the filled index.
const PROMPTS_CHECKED: usize = 100;

/// What the writers of one pass did, together.
#[derive(Clone, Copy, Debug)]
pub(super) struct Pass {
    /// Stored and removed.
    pub(super) blocks_per_s: f64,
    /// Processor time of a block, nanoseconds.
    pub(super) cpu_ns_per_block: f64,
    /// Processors that the threads had, on average.
    pub(super) processors_used: f64,
    /// The part of their time for which threads were ready to run, but another thread had the processor.
    pub(super) queued_share: f64,
    /// The part of all blocks that is of the shard with most of them.
    pub(super) largest_share: f64,
    /// Of the depths of all workers over the checked prompts: equal for every number of shards.
    pub(super) checksum: u64,
}

/// What one writer did.
struct Done {
    span: Span,
    scheduled: Scheduled,
    blocks: u64,
    /// It is freed after everything is measured.
    _shard: Shard,
}

/// Applies a feed to an empty index with one writing thread for each shard.
///
/// # Errors
/// There is no room for the workers, or the index does not take what it should.
pub(super) fn pass(workers: u16, shards: u16, feed: &Feed, prompts: &[HashedPrompt]) -> Result<Pass, Failure> {
    let index = Index::new(workers, shards)?;
    let mut reader = index.reader();
    let start_line = Barrier::new(usize::from(shards));
    let done: Result<Vec<Done>, Failure> = std::thread::scope(|scope| {
        let writing = index.into_shards().into_iter().map(|shard| scope.spawn(|| write(shard, feed, &start_line)));
        let writing: Vec<_> = writing.collect();
        let failed = |_| Failure::Contract("a shard did not take its blocks".to_owned());
        writing.into_iter().map(|writer| writer.join().map_err(failed)).collect()
    });
    let done = done?;
    let mut checksum = 0;
    for prompt in prompts.iter().rev().take(PROMPTS_CHECKED) {
        let answer = reader.look(&prompt.locals());
        checksum += reader.sum(answer);
    }
    let sum = |of: fn(&Done) -> u64| done.iter().map(of).sum::<u64>() as f64;
    let (seconds, blocks) = (Span::seconds_around(done.iter().map(|done| done.span)), sum(|done| done.blocks).max(1.0));
    let largest = done.iter().map(|done| done.blocks).max().unwrap_or(0);
    Ok(Pass {
        blocks_per_s: blocks / seconds,
        cpu_ns_per_block: sum(|done| done.scheduled.cpu_ns) / blocks,
        processors_used: sum(|done| done.scheduled.cpu_ns) / 1e9 / seconds,
        queued_share: sum(|done| done.scheduled.queued_ns) / 1e9 / seconds / done.len().max(1) as f64,
        largest_share: largest as f64 / blocks,
        checksum,
    })
}

fn write(mut shard: Shard, feed: &Feed, start_line: &Barrier) -> Done {
    let batches = shard.batches(feed);
    start_line.wait();
    let (before, began) = (Scheduled::so_far(), Instant::now());
    shard.apply(feed, &batches);
    let (ended, scheduled) = (Instant::now(), Scheduled::since(before));
    Done { span: Span { began, ended }, scheduled, blocks: feed.blocks_in(&batches), _shard: shard }
}

impl HashedPrompt {
    fn locals(&self) -> Vec<LocalHash> {
        let (hashes, _) = self.hashes.as_chunks();
        hashes.iter().map(|hash| LocalHash(u64::from_le_bytes(*hash))).collect()
    }
}
