//! Whether answers are right: both sides beside the plain model at several moments of the tape.

use dynamo_kv_router::LocalBlockHash;
use kvrouted::ids::{LocalHash, TierBlocks};
use rand::{RngExt, SeedableRng};
use rand_xoshiro::Xoshiro256PlusPlus;

use crate::args::TapeArgs;
use crate::failure::Failure;
use crate::measure::Lookups;
use crate::oracle::Oracle;
use crate::ours::{Feed, OurReader, Ours};
use crate::peer::{self, PeerQueued, PeerReader};
use crate::tape::Tape;

/// Moments at which the tape is held.
const MOMENTS: usize = 12;
/// Prompts that are looked up at each.
const QUERIES: usize = 100;
/// Half of them are as near as this to the moment, in rows; the others are anywhere.
const NEAR_ROWS: usize = 200;

/// How many answers were wrong. An answer is the depth of one worker for one prompt.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Verdict {
    /// Of the peer's: the device tier.
    pub(crate) peer: u64,
    /// Of kvrouted's: all tiers.
    pub(crate) kvrouted: u64,
    /// Looked at, on each side.
    pub(crate) answers: u64,
    /// Blocks held at the end of the tape, over all workers and tiers.
    pub(crate) memberships: usize,
}

/// Plays the tape to both sides and to the model.
///
/// # Errors
/// A side fails.
pub(crate) fn run(tape: &Tape, args: &TapeArgs, shards: u16) -> Result<Verdict, Failure> {
    let mut verdict = Verdict::default();
    let mut oracle = Oracle::new(args.workers);
    let mut ours = Ours::new(args.workers, shards)?;
    let peer = PeerQueued::start(args.block_size, args.tiers)?;
    let mut chance = Xoshiro256PlusPlus::seed_from_u64(args.seed);
    let mut from = 0;
    for moment in 1..=MOMENTS {
        let row = tape.rows() * moment / MOMENTS;
        let to = tape.batches_after(row);
        let feed = Feed::new(&tape.nodes, &tape.script.slice(from..to));
        ours.apply(&feed, 0..feed.batches());
        peer.apply(peer::events(&tape.nodes, &tape.script, from..to))?;
        oracle.apply(&tape.script, from..to);
        from = to;
        let mut reader = ours.reader();
        for query in 0..QUERIES {
            let (low, high) = match query % 2 {
                0 => (row.saturating_sub(NEAR_ROWS), (row + NEAR_ROWS).min(tape.rows())),
                _ => (0, tape.rows()),
            };
            verdict.look(tape, chance.random_range(low..high), &oracle, &mut reader, &mut peer.reader());
        }
    }
    verdict.memberships = oracle.memberships();
    Ok(verdict)
}

impl Verdict {
    fn look(&mut self, tape: &Tape, row: usize, oracle: &Oracle, reader: &mut OurReader, peer: &mut PeerReader<'_>) {
        let path = tape.path(row);
        reader.look(&tape.locals(path, LocalHash));
        let answer = peer.look(&tape.locals(path, LocalBlockHash));
        let depths = PeerReader::depths(&answer, oracle.workers());
        for (worker, peer_depth) in (0..oracle.workers()).zip(depths) {
            let right: TierBlocks = oracle.depth(worker, path);
            self.answers += 1;
            self.kvrouted += u64::from(reader.of(worker) != right);
            self.peer += u64::from(peer_depth != right.device);
        }
    }
}
