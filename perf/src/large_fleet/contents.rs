//! What prompts are made of. Prompts below [`SHARED_PROMPTS`] are the same for all ranks, the others are of one rank.

use kvrouted::hash;
use kvrouted::ids::{EngineHash, LocalHash};

use crate::ingest::{SCHEME, continued, name, tokens};

/// Blocks of a prompt: 2048 tokens.
pub(crate) const PROMPT_BLOCKS: u8 = 128;
/// Blocks that a batch stores, and removes once the cache is full: what 64 requests generate in one step.
pub(crate) const BATCH_BLOCKS: u8 = 4;
/// Prompts that every rank runs, and that gateways ask about.
pub(crate) const SHARED_PROMPTS: u32 = 256;
/// Prompts of one rank, in a run.
const PRIVATE_PROMPTS_MAX: u64 = 1 << 24;
/// Ranks of a worker.
const RANKS_MAX: u64 = 64;

/// Blocks `from..to` of a prompt, by the rank's own number of the prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Range {
    /// The prompt.
    pub(crate) prompt: u32,
    /// The first block.
    pub(crate) from: u8,
    /// The first block after them.
    pub(crate) to: u8,
}

/// One step of an engine: what a batch says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Step {
    /// What is stored.
    pub(crate) stored: Range,
    /// What is evicted.
    pub(crate) removed: Option<Range>,
}

/// A rank, which knows what its prompts are made of.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Owner {
    /// The worker's id. No other worker of the run has it.
    pub(crate) worker: u32,
    /// The rank.
    pub(crate) rank: u32,
}

impl Owner {
    /// The number of a prompt's first block.
    fn first_block(self, prompt: u32) -> u64 {
        let private = (u64::from(self.worker) * RANKS_MAX + u64::from(self.rank)) * PRIVATE_PROMPTS_MAX;
        let prompt = if prompt < SHARED_PROMPTS { u64::from(prompt) } else { private + u64::from(prompt) };
        prompt * u64::from(PROMPT_BLOCKS)
    }

    fn names(self, range: Range) -> Vec<EngineHash> {
        let first = self.first_block(range.prompt);
        (first + u64::from(range.from)..first + u64::from(range.to)).map(name).collect()
    }

    /// The message of a step, as vLLM puts it.
    #[must_use]
    pub(crate) fn payload(self, at: u64, step: &Step) -> Vec<u8> {
        let Step { stored, removed } = *step;
        let first = self.first_block(stored.prompt) + u64::from(stored.from);
        let parent = (stored.from > 0).then(|| name(first - 1));
        let content = tokens(first, u64::from(stored.to - stored.from));
        // Engines free the end of a sequence first.
        let removed: Vec<_> = removed.into_iter().flat_map(|range| self.names(range).into_iter().rev()).collect();
        continued((at, self.rank), parent, self.names(stored), content, &removed)
    }

    /// The hashes by which gateways ask about a prompt.
    #[must_use]
    pub(crate) fn prompt(self, prompt: u32) -> Vec<LocalHash> {
        let (tokens, mut locals) = (tokens(self.first_block(prompt), u64::from(PROMPT_BLOCKS)), Vec::new());
        hash::local_hashes(SCHEME, hash::seed(None, None), hash::token_bytes(&tokens), &[], &mut locals);
        locals
    }
}

/// A prompt that all ranks share.
#[must_use]
pub(crate) fn shared_prompt(prompt: u32) -> Vec<LocalHash> {
    Owner { worker: 0, rank: 0 }.prompt(prompt)
}
