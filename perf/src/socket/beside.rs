//! What the engines say while requests are asked: chains of blocks that come and go, and none of what is asked about.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use super::contents::{BLOCKS, Engines, PROMPTS};
use crate::failure::Failure;
use crate::ingest::{name, stored, tokens, turned_over};

/// Chains of a worker that take turns; half of them are held.
const CHAINS: u64 = 32;
/// Blocks of a chain: what a message stores, and removes.
pub(crate) const CHAIN_BLOCKS: u64 = 16;
/// What is due is sent this often: a sleep for each message would take more of a processor than the message.
const TICK: Duration = Duration::from_millis(1);

/// Engines that publish until they are told to stop.
pub(crate) struct Beside {
    stop: Arc<AtomicBool>,
    thread: JoinHandle<Result<(Told, Engines), Failure>>,
}

/// What was published.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Told {
    /// Messages a second.
    pub(crate) messages_per_s: f64,
    /// Who said something last, and the first block of the chain that it stored.
    pub(crate) last: (u64, u64),
}

impl Beside {
    /// Lets `engines` publish so many messages a second, in turns.
    #[must_use]
    pub(crate) fn start(engines: Engines, messages_per_s: f64) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let told = Arc::clone(&stop);
        Self { stop, thread: thread::spawn(move || publish(engines, messages_per_s, &told)) }
    }

    /// Ends it. What is still on its way arrives only while the engines are there.
    ///
    /// # Errors
    /// Those of libzmq.
    pub(crate) fn end(self) -> Result<(Told, Engines), Failure> {
        // Relaxed: nothing else is passed on by it; `join` brings what was told.
        self.stop.store(true, Ordering::Relaxed);
        self.thread.join().map_err(|_| Failure::Contract("publishing panicked".to_owned()))?
    }
}

/// The first block of a chain of a worker, behind those of the prompts.
const fn first_block(worker: u64, chain: u64) -> u64 {
    PROMPTS * BLOCKS + (worker * CHAINS + chain) * CHAIN_BLOCKS
}

/// The messages of a worker: those of the first half of a round, in which nothing is removed yet, and those of a round.
fn messages(worker: u64) -> [Vec<Vec<u8>>; 2] {
    let names = |chain| (first_block(worker, chain)..).take(CHAIN_BLOCKS as usize).map(name).collect::<Vec<_>>();
    let content = |chain| tokens(first_block(worker, chain), CHAIN_BLOCKS);
    let opening = (0..CHAINS / 2).map(|chain| stored(chain, names(chain), content(chain)));
    let round = (0..CHAINS).map(|chain| {
        let removed: Vec<_> = names((chain + CHAINS / 2) % CHAINS).into_iter().rev().collect();
        turned_over(chain, names(chain), content(chain), &removed)
    });
    [opening.collect(), round.collect()]
}

fn publish(mut engines: Engines, per_s: f64, stop: &AtomicBool) -> Result<(Told, Engines), Failure> {
    let workers = engines.publishers.len() as u64;
    let said: Vec<_> = (0..workers).map(messages).collect();
    let (began, mut sent, mut last) = (Instant::now(), 0_u64, (0, first_block(0, 0)));
    while !stop.load(Ordering::Relaxed) || sent == 0 {
        let due = (began.elapsed().as_secs_f64() * per_s) as u64;
        while sent < due {
            let (worker, at) = (sent % workers, sent / workers);
            let [opening, round] = &said[worker as usize];
            let payload = opening.get(at as usize).unwrap_or_else(|| &round[(at % CHAINS) as usize]);
            engines.publishers[worker as usize].send(payload)?;
            last = (worker, first_block(worker, at % CHAINS));
            sent += 1;
        }
        thread::sleep(TICK);
    }
    let messages_per_s = sent as f64 / began.elapsed().as_secs_f64().max(1e-9);
    Ok((Told { messages_per_s, last }, engines))
}

#[cfg(test)]
mod tests {
    use kvrouted::ids::{EventSeq, LocalHash, Worker};
    use kvrouted::index::{Depths, ShardLimits};
    use kvrouted::ingest::Feed;
    use kvrouted::metrics::WorkerCounter;

    use super::*;
    use crate::ingest::SCHEME;

    fn hashes(first: u64) -> Vec<LocalHash> {
        let (tokens, mut locals) = (tokens(first, CHAIN_BLOCKS), Vec::new());
        let bytes = kvrouted::hash::token_bytes(&tokens);
        kvrouted::hash::local_hashes(SCHEME, kvrouted::hash::seed(None, None), bytes, &[], &mut locals);
        locals
    }

    #[test]
    fn chains_come_and_go_and_half_of_them_are_held() {
        let [opening, round] = messages(3);
        let (mut feed, reader) = Feed::new(Worker::new(1, 0), None, true, ShardLimits::default());
        // As `publish` sends them: the opening stands for the first half of the first round.
        let rounds = (CHAINS / 2..2 * CHAINS + CHAINS / 2).map(|at| &round[(at % CHAINS) as usize]);
        for (seq, payload) in opening.iter().chain(rounds).enumerate() {
            feed.message(EventSeq(seq as u64), payload);
        }
        assert_eq!(feed.view().counters.get(WorkerCounter::RemovesUnknown), 0);
        let mut depths = Depths::new();
        let mut held = |chain| {
            reader.lookup(&hashes(first_block(3, chain)), &mut depths);
            u64::from(depths.of(Feed::SHARD, Feed::SLOT).device)
        };
        let last = CHAINS / 2 - 1;
        assert_eq!((held(last), held(last + 1), held(last + CHAINS / 2)), (CHAIN_BLOCKS, 0, 0));
        assert_eq!((0..CHAINS).filter(|chain| held(*chain) == CHAIN_BLOCKS).count() as u64, CHAINS / 2);
    }
}
