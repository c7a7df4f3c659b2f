//! The prompts that both sides are asked for, in every shape that a side wants.

use dynamo_kv_router::protocols::{LocalBlockHash, compute_seq_hash_for_block};
use kvrouted::hash;
use kvrouted::ids::{LocalHash, Scheme, Window};

use crate::mix::mix;
use crate::tape::Tape;

/// Token ids are below this.
const VOCABULARY: u64 = 128_000;

/// One prompt.
#[derive(Debug)]
pub(crate) struct Prompt {
    /// Its tokens.
    pub(crate) tokens: Vec<u32>,
    /// The local hashes of its blocks, little-endian.
    pub(crate) hashes: Vec<u8>,
    /// The same as the peer's requests carry them.
    pub(crate) peer_hashes: Vec<i64>,
    /// The hashes of its prefixes, as the peer's requests carry them.
    pub(crate) peer_sequence: Vec<i64>,
}

/// All of them.
#[derive(Debug)]
pub(crate) struct Prompts(Vec<Prompt>);

impl Prompts {
    /// The last `most` prompts of a tape, whose blocks are from now on named by what their tokens hash to: tokens and
    /// hashes are found in an index alike.
    pub(crate) fn new(tape: &mut Tape, block_size: u32, most: usize) -> Self {
        let scheme = Scheme { block_size, window: Window::Plain };
        let seed = hash::seed(None, None);
        let rows = tape.rows().saturating_sub(most)..tape.rows();
        let texts: Vec<Vec<u32>> = rows
            .map(|row| tape.path(row).iter().flat_map(|node| block(tape.nodes.local(*node), block_size)).collect())
            .collect();
        let mut locals = Vec::new();
        tape.nodes.rename(|content| {
            let tokens: Vec<u32> = block(content, block_size).collect();
            hash::local_hashes(scheme, seed, hash::token_bytes(&tokens), &[], &mut locals);
            locals.first().map_or(content, |local| local.0)
        });
        let prompt = |tokens: Vec<u32>| {
            let mut locals: Vec<LocalHash> = Vec::new();
            hash::local_hashes(scheme, seed, hash::token_bytes(&tokens), &[], &mut locals);
            let theirs: Vec<LocalBlockHash> = locals.iter().map(|local| LocalBlockHash(local.0)).collect();
            Prompt {
                hashes: locals.iter().flat_map(|local| local.0.to_le_bytes()).collect(),
                peer_hashes: locals.iter().map(|local| local.0 as i64).collect(),
                peer_sequence: compute_seq_hash_for_block(&theirs).into_iter().map(|hash| hash as i64).collect(),
                tokens,
            }
        };
        Self(texts.into_iter().filter(|tokens| !tokens.is_empty()).map(prompt).collect())
    }

    /// All of them, in order.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &Prompt> {
        self.0.iter()
    }

    /// How many.
    #[must_use]
    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }

    /// Blocks of all of them.
    #[must_use]
    pub(crate) fn blocks(&self) -> usize {
        self.0.iter().map(|prompt| prompt.peer_hashes.len()).sum()
    }
}

/// The tokens of a block with this content.
fn block(content: u64, block_size: u32) -> impl Iterator<Item = u32> {
    (0..u64::from(block_size)).map(move |at| (mix(content, at) % VOCABULARY) as u32)
}
