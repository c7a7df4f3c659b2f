//! kvrouted's decision, as its serving thread makes it: decide, book, and later free.

use std::collections::VecDeque;
use std::time::Instant;

use kvrouted::fleet::{FleetTable, PoolRole};
use kvrouted::ids::{Scheme, Window, Worker};
use kvrouted::index::IndexReader;
use kvrouted::load::{BookingRef, Loads, LoadsConfig, SessionId};
use kvrouted::route::{AffinityTable, Decision, Draws, Policy, Prompt, RouteRequest, Scratch, View, decide};

use super::prompts::Prompts;
use super::{Decider, Given, Timed, since};
use crate::args::TapeArgs;
use crate::failure::Failure;
use crate::ours::{Feed, Ours as Index};
use crate::table::{SPACE, record, table};
use crate::tape::Tape;

/// How the blocks of a tape are cut.
pub(crate) const fn scheme(args: &TapeArgs) -> Scheme {
    Scheme { block_size: args.block_size, window: Window::Plain }
}

/// An index of one shard that has applied a feed, and the table of its workers.
///
/// # Errors
/// There is no room for the workers.
pub(crate) fn filled(feed: &Feed, args: &TapeArgs) -> Result<(Index, FleetTable), Failure> {
    let mut index = Index::new(args.workers, 1)?;
    index.apply(feed, 0..feed.batches());
    let workers = (0..args.workers)
        .map(|worker| record(u32::from(worker), Worker::new(u64::from(worker), 0), index.slot(worker)))
        .collect();
    Ok((index, table(scheme(args), PoolRole::Both, workers)))
}

/// A filled index, and a fleet with its loads under either rule.
pub(crate) struct Ours {
    scheme: Scheme,
    fleet: FleetTable,
    indexes: [IndexReader; 1],
    /// The rule of the next pass.
    pub(crate) rule: Rule,
    rules: [Deciding; 2],
    affinities: AffinityTable,
    scratch: Scratch,
    decision: Decision,
    began: Instant,
    asked: u64,
    _index: Index,
}

/// By which of its modes kvrouted decides.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Rule {
    /// The peer's rule.
    Kv,
    /// The default of a daemon.
    Latency,
}

/// A rule's policy, and the loads that it has caused.
struct Deciding {
    policy: Policy,
    loads: Loads,
    session: SessionId,
}

impl Deciding {
    fn new(policy: &Policy, workers: u16) -> Result<Self, Failure> {
        let loads = Loads::new(usize::from(workers), LoadsConfig::default());
        let session = loads.open_session(None, 0).map_err(contract)?;
        Ok(Self { policy: *policy, loads, session })
    }
}

impl Ours {
    /// Holds what the tape says.
    ///
    /// # Errors
    /// There is no room for the workers.
    pub(crate) fn new(tape: &Tape, args: &TapeArgs) -> Result<Self, Failure> {
        let (index, fleet) = filled(&Feed::new(&tape.nodes, &tape.script), args)?;
        Ok(Self {
            scheme: scheme(args),
            fleet,
            indexes: [index.index()],
            rule: Rule::Kv,
            rules: [Deciding::new(&Policy::kv(), args.workers)?, Deciding::new(&Policy::default(), args.workers)?],
            affinities: AffinityTable::new(0, 0),
            scratch: Scratch::default(),
            // As for a request that does not ask to explain.
            decision: Decision { only_costs: true, ..Decision::default() },
            began: Instant::now(),
            asked: 0,
            _index: index,
        })
    }

    fn decide(&mut self, prompt: Prompt<'_>, request_id: &str, now_ns: u64) -> Result<(), Failure> {
        let request = RouteRequest::new(SPACE, prompt);
        let Deciding { policy, loads, session } = &self.rules[self.rule as usize];
        let view = View {
            fleet: &self.fleet,
            indexes: &self.indexes,
            predictions: &[],
            loads,
            policy,
            round_robin_counters: &[],
            affinities: &self.affinities,
            now_ns,
        };
        let (scratch, decision) = (&mut self.scratch, &mut self.decision);
        decide(&view, &request, scratch, Draws::new(self.asked), decision).map_err(contract)?;
        let chosen = decision.candidates.first().ok_or_else(|| contract("nobody was chosen"))?;
        let demand = scratch.demand(&request, decision, chosen);
        loads.book(*session, request_id, 0, chosen.index, demand, now_ns).map_err(contract)?;
        Ok(())
    }

    fn first_token(&self, request_id: &str) {
        let reference = BookingRef::Request { request_id, attempt: 0 };
        let Deciding { loads, session, .. } = &self.rules[self.rule as usize];
        loads.prefill_complete(*session, reference, 0, since(self.began));
    }

    fn free(&self, request_id: &str) {
        let reference = BookingRef::Request { request_id, attempt: 0 };
        let Deciding { loads, session, .. } = &self.rules[self.rule as usize];
        loads.free(*session, reference, since(self.began));
    }
}

impl Decider for Ours {
    fn run(&mut self, prompts: &Prompts, given: Given, in_flight: usize, timed: &mut Timed) -> Result<(), Failure> {
        let mut running: VecDeque<String> = VecDeque::with_capacity(in_flight + 1);
        let mut copied = Vec::new();
        for prompt in prompts.iter() {
            self.asked += 1;
            let request_id = format!("request-{}", self.asked);
            // Just read: what is in a connection's buffer.
            copied.clear();
            match given {
                Given::Tokens => copied.extend(prompt.tokens.iter().flat_map(|token| token.to_le_bytes())),
                Given::Hashes => copied.extend_from_slice(&prompt.hashes),
            }
            let asked = match given {
                Given::Tokens => Prompt::Tokens(&copied),
                Given::Hashes => Prompt::LocalHashes {
                    hashes: &copied,
                    scheme: self.scheme,
                    token_count: prompt.tokens.len() as u32,
                },
            };
            let start = Instant::now();
            self.decide(asked, &request_id, (start - self.began).as_nanos() as u64)?;
            let decide_ns = since(start);
            running.push_back(request_id);
            // Without first tokens mode `latency` would take all of them for prefills. In `kv` neither side reports any.
            if self.rule == Rule::Latency
                && let Some(prefilled) = running.len().checked_sub(in_flight / 2 + 1)
            {
                self.first_token(&running[prefilled]);
            }
            if running.len() > in_flight
                && let Some(oldest) = running.pop_front()
            {
                let start = Instant::now();
                self.free(&oldest);
                timed.take(decide_ns, since(start));
            }
        }
        running.iter().for_each(|request_id| self.free(request_id));
        Ok(())
    }
}

fn contract(error: impl std::fmt::Display) -> Failure {
    Failure::Contract(error.to_string())
}
