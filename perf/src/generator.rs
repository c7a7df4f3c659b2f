//! Requests of our own: system prompts that conversations share, turns that extend them, and branches.

use rand::{RngExt, SeedableRng};
use rand_xoshiro::Xoshiro256PlusPlus;

use crate::mix::mix;
use crate::trace::{ID_TOKENS, Request};

/// Requests when no number is given.
pub(crate) const ROWS_DEFAULT: usize = 12_000;
/// The same where most blocks are new: of 64 workers with 20 000 blocks, all are full by then.
pub(crate) const FRESH_ROWS_DEFAULT: usize = 1_500;
/// Prompts that all conversations begin with.
const SYSTEM_PROMPTS: u32 = 24;
/// Longest system prompt, in ids.
const SYSTEM_IDS_MAX: u32 = 6;
/// Conversations that may be continued; the oldest is forgotten first.
const OPEN_CONVERSATIONS: usize = 512;
/// Longest conversation, in ids; one that is longer ends.
const CONVERSATION_IDS_MAX: usize = 96;
/// Chance that a request begins a conversation.
const NEW: f64 = 0.35;
/// Chance that a request which continues one does so from an earlier turn.
const BRANCH: f64 = 0.15;
/// Longest turn, in ids: a question and the answer before it.
const TURN_IDS_MAX: u32 = 24;
/// New ids of a request whose blocks are mostly new.
const FRESH_IDS_MIN: u64 = 8;
const FRESH_IDS_MAX: u64 = 56;
/// Longest output, in tokens.
const OUTPUT_TOKENS_MAX: u32 = 800;

/// A conversation: its ids, and where its turns end.
#[derive(Clone, Debug)]
struct Conversation {
    ids: Vec<u64>,
    turn_ends: Vec<usize>,
}

/// `rows` requests that follow from `seed`.
#[must_use]
pub(crate) fn generate(rows: usize, seed: u64) -> Vec<Request> {
    let mut chance = Xoshiro256PlusPlus::seed_from_u64(seed);
    let mut open: Vec<Conversation> = Vec::new();
    let mut fresh = 1_u64;
    (0..rows)
        .map(|row| {
            let mut conversation = match open.is_empty() || chance.random_bool(NEW) {
                true => begin(&mut chance),
                false => resume(&mut chance, &open),
            };
            let turn = skewed(&mut chance, TURN_IDS_MAX) + 1;
            conversation.ids.extend((0..turn).map(|id| mix(seed, fresh + u64::from(id))));
            fresh += u64::from(turn);
            conversation.turn_ends.push(conversation.ids.len());
            let missing_tokens = chance.random_range(0..ID_TOKENS);
            let request = Request {
                prompt_tokens: conversation.ids.len() as u32 * ID_TOKENS - missing_tokens,
                output_tokens: 1 + skewed(&mut chance, OUTPUT_TOKENS_MAX),
                ids: conversation.ids.clone(),
            };
            if conversation.ids.len() < CONVERSATION_IDS_MAX {
                match open.len() < OPEN_CONVERSATIONS {
                    true => open.push(conversation),
                    false => open[row % OPEN_CONVERSATIONS] = conversation,
                }
            }
            request
        })
        .collect()
}

/// A conversation that is only a system prompt so far. Low numbers are used far more often.
fn begin(chance: &mut Xoshiro256PlusPlus) -> Conversation {
    let system = skewed(chance, SYSTEM_PROMPTS);
    let ids = 1 + system % SYSTEM_IDS_MAX;
    let ids: Vec<u64> = (0..ids).map(|id| mix(u64::MAX - u64::from(system), u64::from(id))).collect();
    Conversation { turn_ends: vec![ids.len()], ids }
}

/// A recent conversation as it is, or as it was after one of its turns.
fn resume(chance: &mut Xoshiro256PlusPlus, open: &[Conversation]) -> Conversation {
    let mut conversation = open[chance.random_range(0..open.len())].clone();
    if chance.random_bool(BRANCH) {
        let turn = chance.random_range(0..conversation.turn_ends.len());
        conversation.turn_ends.truncate(turn + 1);
        conversation.ids.truncate(conversation.turn_ends[turn]);
    }
    conversation
}

/// `rows` requests of which most blocks are new: half of them begin with a short system prompt, and nothing else is shared.
#[must_use]
pub(crate) fn generate_fresh(rows: usize, seed: u64) -> Vec<Request> {
    let mut chance = Xoshiro256PlusPlus::seed_from_u64(seed);
    let mut fresh = 1_u64;
    (0..rows)
        .map(|_| {
            let system = chance.random_bool(0.5).then(|| chance.random_range(0..u64::from(SYSTEM_PROMPTS)));
            let mut ids: Vec<u64> = system.map(|system| mix(u64::MAX - system, 0)).into_iter().collect();
            let new = chance.random_range(FRESH_IDS_MIN..=FRESH_IDS_MAX);
            ids.extend((fresh..fresh + new).map(|id| mix(seed, id)));
            fresh += new;
            let missing_tokens = chance.random_range(0..ID_TOKENS);
            Request {
                prompt_tokens: ids.len() as u32 * ID_TOKENS - missing_tokens,
                output_tokens: 1 + skewed(&mut chance, OUTPUT_TOKENS_MAX),
                ids,
            }
        })
        .collect()
}

/// Below `end`; the square of a uniform number, so mostly small.
fn skewed(chance: &mut Xoshiro256PlusPlus, end: u32) -> u32 {
    let uniform: f64 = chance.random();
    (uniform * uniform * f64::from(end)) as u32
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn requests_follow_from_the_seed_and_share_prefixes() {
        let requests = generate(600, 4);
        assert_eq!(requests, generate(600, 4));
        assert_ne!(requests, generate(600, 5));
        let named: usize = requests.iter().map(|request| request.ids.len()).sum();
        let distinct: HashSet<u64> = requests.iter().flat_map(|request| request.ids.iter().copied()).collect();
        assert!(distinct.len() * 2 < named, "{} of {named} ids are distinct", distinct.len());
        for request in &requests {
            assert_eq!(request.ids.len() as u32, request.prompt_tokens.div_ceil(ID_TOKENS));
        }
    }

    #[test]
    fn fresh_requests_share_little() {
        let requests = generate_fresh(600, 4);
        assert_eq!(requests, generate_fresh(600, 4));
        let named: usize = requests.iter().map(|request| request.ids.len()).sum();
        let distinct: HashSet<u64> = requests.iter().flat_map(|request| request.ids.iter().copied()).collect();
        assert!(distinct.len() * 10 > named * 9, "{} of {named} ids are distinct", distinct.len());
        assert!(distinct.len() < named, "some begin alike");
        for request in &requests {
            assert_eq!(request.ids.len() as u32, request.prompt_tokens.div_ceil(ID_TOKENS));
        }
    }
}
