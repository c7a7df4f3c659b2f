//! A recorded load as a workload.
//!
//! * **Sessions** run in closed loop: a turn comes as long after the end of the turn before as it was recorded. A turn that
//!   came before that end runs beside it, at its own time.
//! * **Continuations** do too: no user continues an answer before it is there, with or without a named session.
//! * **Other requests** come at their own times.
//! * **Outputs.** The engine caches an output, and the next turn's prompt may hold it. So where a later request of the same
//!   session, or of no session, continues a prompt and has room for its output, the tokens behind the prompt are taken to
//!   be the output.
//! * **Unknown outputs** get the expected number of tokens or, without one, that of another request.

use hashbrown::HashMap;

use super::copies::{Owner, with_copies};
use super::prefixes::{Prefix, Prefixes};
use super::{RecordedLoad, RecordedRequest, SessionName};
use crate::simulate::workload::{Arrivals, OUTPUT_TOKENS_MAX, Session, Span, Turn, Workload, append, slice};

/// The last known prefix of a prompt, and the session of its request.
type PromptEnd = (Option<SessionName>, Prefix);

/// Output tokens of a request, if those of no request are known.
const OUTPUT_TOKENS_UNKNOWN: u32 = 256;

impl RecordedLoad {
    /// The workload at the fleet's own rate.
    #[must_use]
    pub fn workload(&self) -> Workload {
        let outputs = self.output_tokens();
        let continued = self.continuations(&outputs);
        let (turns, contents) = self.turns(&outputs, &continued);
        let first_ns = self.requests.first().map_or(0, |request| request.arrived_ns);
        let at_s = |request: &RecordedRequest| request.arrived_ns.saturating_sub(first_ns) as f64 * 1e-9;
        let mut sessions: Vec<(Owner, Session)> = Vec::new();
        // By session, and by the request that continues one without a session: its place, and the end of its last turn.
        let mut open: HashMap<SessionName, (usize, u64)> = HashMap::new();
        let mut awaited: HashMap<usize, (usize, u64)> = HashMap::new();
        let owners = self.owners(&continued);
        for (at, ((request, mut turn), owner)) in self.requests.iter().zip(turns).zip(owners).enumerate() {
            let before = match request.session {
                Some(name) => open.get(&name).copied(),
                None => awaited.remove(&at),
            };
            let place = match before {
                Some((place, end_ns)) if end_ns <= request.arrived_ns => {
                    turn.think_s = (request.arrived_ns - end_ns) as f64 * 1e-9;
                    sessions[place].1.turns.push(turn);
                    place
                }
                _ => {
                    sessions.push((owner, Session { start_s: at_s(request), turns: vec![turn] }));
                    sessions.len() - 1
                }
            };
            let Some(end_ns) = request.end_ns() else { continue };
            if let Some(name) = request.session {
                open.insert(name, (place, end_ns));
            } else if let Some(next) = continued[at] {
                awaited.insert(next, (place, end_ns));
            }
        }
        Workload::sorted(with_copies(sessions, self.sample, contents), Arrivals::Timed)
    }

    /// Who sent each request: the same for all of a session, and for requests that continue each other.
    fn owners(&self, continued: &[Option<usize>]) -> Vec<Owner> {
        let (mut of_sessions, mut inherited) = (HashMap::new(), HashMap::new());
        let mut owners = Vec::with_capacity(self.requests.len());
        for (place, request) in self.requests.iter().enumerate() {
            let fresh = place as Owner;
            let owner = match request.session {
                Some(name) => *of_sessions.entry(name).or_insert(fresh),
                None => inherited.remove(&place).unwrap_or(fresh),
            };
            if let Some(next) = continued[place] {
                inherited.insert(next, owner);
            }
            owners.push(owner);
        }
        owners
    }

    /// The turn of each request, without think times, and a number above all contents.
    fn turns(&self, outputs: &[u32], continued: &[Option<usize>]) -> (Vec<Turn>, u64) {
        let mut prefixes = self.prefixes.clone();
        // From the last request to the first, because a continuation says what a prompt's tail and output are.
        let mut turns: Vec<Turn> = Vec::with_capacity(self.requests.len());
        for (place, request) in self.requests.iter().enumerate().rev() {
            let next = continued[place].and_then(|next| turns.get(self.requests.len() - 1 - next));
            let (prompt, output) = self.prompt_and_output(&mut prefixes, request, outputs[place], next);
            turns.push(Turn { think_s: 0.0, prompt, output });
        }
        turns.reverse();
        (turns, prefixes.fresh_content())
    }

    /// The output tokens of each request.
    fn output_tokens(&self) -> Vec<u32> {
        let known: Vec<u32> = self.requests.iter().filter_map(RecordedRequest::output_tokens).collect();
        let mut others = known.iter().copied().cycle();
        let of = |request: &RecordedRequest| {
            let tokens = request.output_tokens().or_else(|| others.next());
            tokens.unwrap_or(OUTPUT_TOKENS_UNKNOWN).min(OUTPUT_TOKENS_MAX)
        };
        self.requests.iter().map(of).collect()
    }

    /// For each request, the one that continues its prompt and its output.
    fn continuations(&self, outputs: &[u32]) -> Vec<Option<usize>> {
        let mut continued = vec![None; self.requests.len()];
        // By the end of a prompt: the request that waits for its continuation; `None` = several
        // without a session had this prefix, so it is no conversation's own.
        let mut waiting: HashMap<PromptEnd, Option<usize>> = HashMap::new();
        for (place, request) in self.requests.iter().enumerate() {
            let continues = |before: usize| {
                let of = &self.requests[before];
                let is_over = of.end_ns().unwrap_or(of.booked_ns) <= request.arrived_ns;
                let has_room = of.prompt_tokens.saturating_add(outputs[before]) <= request.prompt_tokens;
                is_over && has_room
            };
            let found = self.prefixes.ancestors(request.prefix).find_map(|prefix| {
                let before = waiting.get(&(request.session, prefix)).copied().flatten()?;
                continues(before).then_some((prefix, before))
            });
            if let Some((prefix, before)) = found {
                continued[before] = Some(place);
                waiting.remove(&(request.session, prefix));
            }
            if Prefixes::place(request.prefix).is_some() {
                let name = (request.session, request.prefix);
                let is_own = request.session.is_some() || !waiting.contains_key(&name);
                waiting.insert(name, is_own.then_some(place));
            }
        }
        continued
    }

    /// The whole prompt, whose tail has no identity, and the output. `next` is the turn that continues them.
    fn prompt_and_output(
        &self,
        prefixes: &mut Prefixes,
        request: &RecordedRequest,
        output_tokens: u32,
        next: Option<&Turn>,
    ) -> (Vec<Span>, Span) {
        let known_tokens = prefixes.depth(request.prefix) * self.prefix_tokens;
        let mut prompt = prefixes.spans(request.prefix, self.prefix_tokens);
        let tail_tokens = request.prompt_tokens.saturating_sub(known_tokens);
        let mut own =
            |from: u32, tokens: u32| Span { content: prefixes.fresh_content(), from: u64::from(from), tokens };
        let Some(next) = next else {
            let tail = own(known_tokens, tail_tokens);
            append(&mut prompt, tail);
            let output = Span { from: u64::from(request.prompt_tokens), tokens: output_tokens, ..tail };
            return (prompt, output);
        };
        slice(&next.prompt, known_tokens, tail_tokens).into_iter().for_each(|span| append(&mut prompt, span));
        let output = match slice(&next.prompt, request.prompt_tokens, output_tokens).as_slice() {
            [output] if output.tokens == output_tokens => *output,
            _ => own(request.prompt_tokens, output_tokens),
        };
        (prompt, output)
    }
}
