//! The one tape that both sides are fed with: a fleet's events, and the prompts that caused them.

use crate::args::TapeArgs;
use crate::failure::Failure;
use crate::fleet::Fleet;
use crate::generator::{self, FRESH_ROWS_DEFAULT, ROWS_DEFAULT};
use crate::mix::mix;
use crate::nodes::{NodeId, Nodes};
use crate::script::Script;
use crate::trace::{self, Request};

/// Events, and the prompts that caused them.
#[derive(Debug)]
pub(crate) struct Tape {
    /// Every prefix that occurs.
    pub(crate) nodes: Nodes,
    /// The events.
    pub(crate) script: Script,
    paths: Vec<NodeId>,
    rows: Vec<Row>,
}

/// Where things stood after a row of the trace.
#[derive(Clone, Copy, Debug)]
struct Row {
    path_end: usize,
    batches: usize,
}

impl Tape {
    /// The tape of these arguments, always the same.
    ///
    /// # Errors
    /// The trace cannot be read.
    pub(crate) fn new(args: &TapeArgs) -> Result<Self, Failure> {
        let requests = match &args.trace {
            Some(file) => trace::parse(&std::fs::read_to_string(file).map_err(Failure::file(file))?, args.rows)?,
            None if args.fresh => generator::generate_fresh(args.rows.unwrap_or(FRESH_ROWS_DEFAULT), args.seed),
            None => generator::generate(args.rows.unwrap_or(ROWS_DEFAULT), args.seed),
        };
        Ok(Self::play(args, &requests))
    }

    /// What a fleet says while it serves these requests.
    #[must_use]
    pub(crate) fn play(args: &TapeArgs, requests: &[Request]) -> Self {
        let mut nodes = Nodes::new(args.engine_hash);
        let mut fleet = Fleet::new(args);
        let (mut paths, mut rows) = (Vec::new(), Vec::new());
        for (at, request) in requests.iter().enumerate() {
            for copy in 0..args.copies {
                let start = paths.len();
                nodes.prompt(request, args.block_size, copy, &mut paths);
                let output_blocks = if args.decode { request.output_tokens / args.block_size } else { 0 };
                // Far from the contents of prompts: no prompt contains what was generated.
                let content = mix(u64::MAX - at as u64, u64::from(copy));
                fleet.serve(&nodes, &paths[start..], output_blocks, content);
                fleet.tick(&mut nodes);
                rows.push(Row { path_end: paths.len(), batches: fleet.script.batches() });
            }
        }
        Self { nodes, script: fleet.script, paths, rows }
    }

    /// Rows, copies included.
    #[must_use]
    pub(crate) fn rows(&self) -> usize {
        self.rows.len()
    }

    /// The prompt of a row.
    #[must_use]
    pub(crate) fn path(&self, row: usize) -> &[NodeId] {
        let start = if row == 0 { 0 } else { self.rows[row - 1].path_end };
        &self.paths[start..self.rows[row].path_end]
    }

    /// Batches that are over after `rows` rows.
    #[must_use]
    pub(crate) fn batches_after(&self, rows: usize) -> usize {
        if rows == 0 { 0 } else { self.rows[rows.min(self.rows.len()) - 1].batches }
    }

    /// The local hashes of a path, in whatever type they are wanted.
    pub(crate) fn locals<T>(&self, path: &[NodeId], wrap: impl Fn(u64) -> T) -> Vec<T> {
        path.iter().map(|node| wrap(self.nodes.local(*node))).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args::EngineHashing;
    use crate::oracle::Oracle;
    use crate::script::Action;
    use kvrouted::ids::Tier;

    fn args() -> TapeArgs {
        TapeArgs {
            trace: None,
            fresh: false,
            workers: 4,
            capacity: 1500,
            block_size: 64,
            copies: 1,
            rows: Some(300),
            decode: true,
            engine_hash: EngineHashing::Shared,
            dup: 0.5,
            tiers: true,
            seed: 3,
        }
    }

    #[test]
    fn the_fleet_keeps_its_books() {
        let args = args();
        let tape = Tape::new(&args).expect("no file is read");
        let script = &tape.script;
        let mut oracle = Oracle::new(args.workers);
        let mut removed = [0; 2];
        for batch in 0..script.batches() {
            let workers: Vec<u16> = script.batch(batch).iter().map(|op| op.worker).collect();
            assert!(workers.windows(2).all(|pair| pair[0] == pair[1]), "a batch is of one worker");
            for op in script.batch(batch) {
                let blocks = script.blocks_of(op);
                match op.action {
                    Action::Store => {
                        let chain = |pair: &[NodeId]| tape.nodes.parent(pair[1]) == Some(pair[0]);
                        assert!(blocks.windows(2).all(chain), "a store is a chain");
                    }
                    Action::Remove => removed[usize::from(op.tier == Tier::Host)] += blocks.len(),
                }
            }
            oracle.apply(script, batch..batch + 1);
        }
        assert!(removed[0] > 1000 && removed[1] > 0, "{removed:?}: the caches are too large for the test");
        assert!(oracle.memberships() <= 2 * 4 * 1500);
        let last = tape.rows() - 1;
        let path = tape.path(last);
        let best = (0..4).map(|worker| oracle.depth(worker, path).device as usize).max();
        assert_eq!(best, Some(path.len().min(1500)), "whoever served the last prompt holds it");
        assert_eq!(tape.batches_after(tape.rows()), script.batches());
    }

    #[test]
    fn equal_arguments_make_equal_tapes() {
        let (a, b) = (Tape::new(&args()).expect("no file"), Tape::new(&args()).expect("no file"));
        assert_eq!((a.script.blocks(), a.script.events()), (b.script.blocks(), b.script.events()));
        assert_eq!(a.path(299), b.path(299));
        let plain = TapeArgs { decode: false, dup: 0.0, tiers: false, copies: 2, ..args() };
        let plain = Tape::new(&plain).expect("no file");
        assert_eq!(plain.rows(), 600);
        assert!(plain.path(0).iter().all(|node| !plain.path(1).contains(node)), "copies share nothing");
    }
}
