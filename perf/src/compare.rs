//! `index`: both sides on one tape, in turns.

use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use dynamo_kv_router::LocalBlockHash;
use kvrouted::ids::LocalHash;

use crate::args::{IndexArgs, Side};
use crate::failure::Failure;
use crate::measure::{Approach, Percentiles, Queries, clock_ns, median, time_lookups};
use crate::memory;
use crate::ours::{Feed, OurReader, Ours};
use crate::peer::{self, Peer, PeerQueued};
use crate::report::{Config, Ratio, Report, SideReport, Wrong};
use crate::script::Script;
use crate::tape::Tape;
use crate::verify;

/// Prompts that are looked up: the last ones of the tape.
const QUERIES_MAX: usize = 6000;
/// Rows whose events are cut into single blocks.
const SINGLE_BLOCK_ROWS: usize = 4000;
/// Rows at the end of the tape that are applied and taken back while lookups are timed.
const TAIL_ROWS: usize = 1000;
/// Lookups beside a writer go on at least that long, so that the writer is met in every state.
const UNDER_WRITE_MIN: Duration = Duration::from_millis(500);

/// One measurement of one side.
#[derive(Clone, Copy, Debug, Default)]
struct Repeat {
    ingest: f64,
    ingest_queued: f64,
    single_block: f64,
    find: Percentiles,
    find_cold: Percentiles,
    checksum: u64,
}

/// One measurement of lookups beside a writer.
#[derive(Clone, Copy, Debug, Default)]
struct UnderWrite {
    find: Percentiles,
    blocks_per_s: f64,
    contended: u64,
}

/// The tape in the shapes that are measured.
struct Bench<'a> {
    tape: &'a Tape,
    args: &'a IndexArgs,
    single: Script,
    clock_ns: f64,
    channel_ns: f64,
    ours: Queries<LocalHash>,
    peers: Queries<LocalBlockHash>,
}

/// Runs the comparison.
///
/// # Errors
/// The tape cannot be made, or a side fails.
pub(crate) fn run(args: &IndexArgs) -> Result<Report, Failure> {
    let tape = Tape::new(&args.tape)?;
    let bench = Bench::new(args, &tape)?;
    let wrong = verify::run(&tape, &args.tape, args.shards)?;
    let (mut ours, mut peers, mut under_write) = (Vec::new(), Vec::new(), Vec::new());
    for repeat in 0..args.repeat {
        // Whoever goes first finds other caches and another clock speed: take turns.
        if repeat % 2 == 0 {
            peers.push(bench.peer()?);
        }
        let (measured, beside) = bench.kvrouted()?;
        ours.push(measured);
        under_write.push(beside);
        if repeat % 2 == 1 {
            peers.push(bench.peer()?);
        }
    }
    let mut peer = summary(&peers);
    let mut kvrouted = summary(&ours);
    let memberships = wrong.memberships.max(1) as f64;
    let peer_memory = memory::measure(Side::Peer, &args.tape, args.shards)?;
    let our_memory = memory::measure(Side::Kvrouted, &args.tape, args.shards)?;
    peer.bytes_per_membership = peer_memory.anonymous_bytes as f64 / memberships;
    kvrouted.bytes_per_membership = our_memory.anonymous_bytes as f64 / memberships;
    kvrouted.accounted_bytes_per_membership = our_memory.accounted_bytes.map(|bytes| bytes as f64 / memberships);
    let beside: Vec<Percentiles> = under_write.iter().map(|under| under.find).collect();
    kvrouted.read_under_write_ns = Some(Percentiles::medians(&beside));
    let blocks_per_s = under_write.iter().map(|under| under.blocks_per_s).collect();
    kvrouted.written_beside_blocks_per_s = Some(median(blocks_per_s));
    kvrouted.contended = Some(under_write.iter().map(|under| under.contended).sum());
    Ok(Report {
        config: bench.config(wrong.memberships),
        ratio: Ratio::of(&peer, &kvrouted),
        checksum_equal: peer.checksum == kvrouted.checksum,
        peer,
        kvrouted,
        wrong: Wrong { peer: wrong.peer, kvrouted: wrong.kvrouted, answers: wrong.answers },
    })
}

fn summary(repeats: &[Repeat]) -> SideReport {
    let of = |field: fn(&Repeat) -> f64| median(repeats.iter().map(field).collect());
    let times = |field: fn(&Repeat) -> Percentiles| {
        let all: Vec<Percentiles> = repeats.iter().map(field).collect();
        Percentiles::medians(&all)
    };
    SideReport {
        ingest_blocks_per_s: of(|repeat| repeat.ingest),
        ingest_queued_blocks_per_s: of(|repeat| repeat.ingest_queued),
        single_block_events_per_s: of(|repeat| repeat.single_block),
        find_ns: times(|repeat| repeat.find),
        find_cold_ns: times(|repeat| repeat.find_cold),
        checksum: repeats.first().map_or(0, |repeat| repeat.checksum),
        ..SideReport::default()
    }
}

impl<'a> Bench<'a> {
    fn new(args: &'a IndexArgs, tape: &'a Tape) -> Result<Self, Failure> {
        let (mut ours, mut peers) = (Queries::default(), Queries::default());
        for row in tape.rows().saturating_sub(QUERIES_MAX)..tape.rows() {
            ours.push(&tape.locals(tape.path(row), LocalHash));
            peers.push(&tape.locals(tape.path(row), LocalBlockHash));
        }
        let single = tape.script.in_single_blocks(0..tape.batches_after(SINGLE_BLOCK_ROWS));
        Ok(Self { tape, args, single, clock_ns: clock_ns(), channel_ns: peer::channel_ns()?, ours, peers })
    }

    fn peer(&self) -> Result<Repeat, Failure> {
        let script = &self.tape.script;
        let all = || peer::events(&self.tape.nodes, script, 0..script.batches());
        let index = Peer::default();
        let direct = index.apply(all(), self.channel_ns)?;
        let mut reader = index.reader();
        let (find, checksum) = time_lookups(&mut reader, &self.peers, Approach::Hot, self.clock_ns);
        let (find_cold, again) = time_lookups(&mut reader, &self.peers, Approach::Cold, self.clock_ns);
        if checksum != again {
            return Err(Failure::Peer("its answers change without events".to_owned()));
        }
        drop(index);
        let single = peer::events(&self.tape.nodes, &self.single, 0..self.single.batches());
        let single = Peer::default().apply(single, self.channel_ns)?;
        let events = all();
        let queued = PeerQueued::start(self.args.tape.block_size, self.args.tape.tiers)?.apply(events)?;
        Ok(Repeat {
            ingest: script.blocks() as f64 / direct.as_secs_f64(),
            ingest_queued: script.blocks() as f64 / queued.as_secs_f64(),
            single_block: self.single.events() as f64 / single.as_secs_f64(),
            find,
            find_cold,
            checksum,
        })
    }

    fn kvrouted(&self) -> Result<(Repeat, UnderWrite), Failure> {
        let fresh = || Ours::new(self.args.tape.workers, self.args.shards);
        let script = &self.tape.script;
        let feed = Feed::new(&self.tape.nodes, script);
        let mut index = fresh()?;
        let start = Instant::now();
        index.apply(&feed, 0..feed.batches());
        let direct = start.elapsed();
        let mut reader = index.reader();
        let (find, checksum) = time_lookups(&mut reader, &self.ours, Approach::Hot, self.clock_ns);
        let (find_cold, again) = time_lookups(&mut reader, &self.ours, Approach::Cold, self.clock_ns);
        if checksum != again || reader.contended > 0 {
            return Err(Failure::Contract("answers change without events".to_owned()));
        }
        let under_write = self.under_write(&mut index, reader);
        drop(index);
        let single_feed = Feed::new(&self.tape.nodes, &self.single);
        let mut index = fresh()?;
        let start = Instant::now();
        index.apply(&single_feed, 0..single_feed.batches());
        let single = start.elapsed();
        drop(index);
        let (_, queued) = fresh()?.apply_queued(&feed);
        let repeat = Repeat {
            ingest: script.blocks() as f64 / direct.as_secs_f64(),
            ingest_queued: script.blocks() as f64 / queued.as_secs_f64(),
            single_block: self.single.events() as f64 / single.as_secs_f64(),
            find,
            find_cold,
            checksum,
        };
        Ok((repeat, under_write))
    }

    /// Times the lookups while another thread takes the end of the tape back and applies it again, without a
    /// pause.
    fn under_write(&self, index: &mut Ours, mut reader: OurReader) -> UnderWrite {
        let (script, nodes) = (&self.tape.script, &self.tape.nodes);
        let tail = script.slice(self.tape.batches_after(self.tape.rows().saturating_sub(TAIL_ROWS))..script.batches());
        let (undo, redo) = (Feed::new(nodes, &tail.undone(nodes)), Feed::new(nodes, &tail));
        let stop = AtomicBool::new(false);
        let ready = Barrier::new(2);
        std::thread::scope(|threads| {
            let writer = threads.spawn(|| {
                ready.wait();
                let start = Instant::now();
                let mut rounds = 0_u32;
                // Relaxed: pairs with the store below; nothing but the flag is passed on.
                while !stop.load(Ordering::Relaxed) {
                    index.apply(&undo, 0..undo.batches());
                    index.apply(&redo, 0..redo.batches());
                    rounds += 1;
                }
                f64::from(rounds) * 2.0 * tail.blocks() as f64 / start.elapsed().as_secs_f64()
            });
            ready.wait();
            let start = Instant::now();
            let mut passes = Vec::new();
            while passes.is_empty() || start.elapsed() < UNDER_WRITE_MIN {
                passes.push(time_lookups(&mut reader, &self.ours, Approach::Hot, self.clock_ns).0);
            }
            // Relaxed: pairs with the load above.
            stop.store(true, Ordering::Relaxed);
            let blocks_per_s = writer.join().expect("the writer does not panic");
            UnderWrite { find: Percentiles::medians(&passes), blocks_per_s, contended: reader.contended }
        })
    }

    fn config(&self, memberships: usize) -> Config {
        let script = &self.tape.script;
        Config {
            tape: self.args.tape.clone(),
            shards: self.args.shards,
            repeat: self.args.repeat,
            rows: self.tape.rows(),
            events: script.events(),
            blocks: script.blocks(),
            single_block_events: self.single.events(),
            memberships,
            queries: self.ours.len(),
            blocks_per_query: self.ours.blocks() as f64 / self.ours.len().max(1) as f64,
            clock_ns: self.clock_ns,
            channel_ns: self.channel_ns,
            machine: machine(),
        }
    }
}

/// The processor and how many of it there are.
pub(crate) fn machine() -> String {
    let cores = std::thread::available_parallelism().map_or(0, std::num::NonZero::get);
    let cpuinfo = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let name = cpuinfo.lines().find_map(|line| line.strip_prefix("model name")?.split_once(':'));
    format!("{}, {cores} cores", name.map_or("unknown", |(_, name)| name.trim()))
}
