//! Device memory and a connector's pool under any order of events, with salts, adapters and images, against what the
//! engine holds: never a block too much, and `exact` is exact.

use std::collections::BTreeSet;

use super::formats::{placeholder, removed, say, stored};
use super::{Options, Rig, SCHEME, vllm};
use crate::event::media::identifier_hash;
use crate::hash;
use crate::ids::{ShardId, TierBlocks};
use crate::index::Depths;
use crate::trust::TrustLevel;
use proptest::prelude::*;
use serde_json::{Value, json};

/// The names that separate equal tokens from each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Kind {
    Plain,
    Salted,
    Adapter,
    Image,
}

const KINDS: [Kind; 4] = [Kind::Plain, Kind::Salted, Kind::Adapter, Kind::Image];
const IMAGE: &str = "aa";

/// A block: the names of its prompt beside tokens, and the contents of its chain up to it.
type Block = (Kind, Vec<u32>);

#[derive(Clone, Debug)]
enum Step {
    /// A request computes or reuses all blocks of a prompt.
    Run(Block),
    /// Device memory drops a block.
    Evict(Block),
    /// The connector has written the blocks of a prompt, described in full or by hash alone.
    Offload(Block, bool),
    /// The connector drops a block.
    Drop(Block),
    /// A store that never announces removals has written a block.
    Share(Block),
    /// The prefix cache is reset; `true`: the connector's pool too.
    Reset(bool),
}

fn block() -> impl Strategy<Value = Block> {
    (prop::sample::select(&KINDS[..]), prop::collection::vec(1..3_u32, 1..4))
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        6 => block().prop_map(Step::Run),
        5 => block().prop_map(Step::Evict),
        5 => (block(), any::<bool>()).prop_map(|(block, full)| Step::Offload(block, full)),
        3 => block().prop_map(Step::Drop),
        1 => block().prop_map(Step::Share),
        1 => any::<bool>().prop_map(Step::Reset),
    ]
}

fn hash_of((kind, path): &Block) -> u64 {
    path.iter().fold(1 + *kind as u64, |hash, content| hash * 10 + u64::from(*content))
}

/// The blocks of a chain, its first one first.
fn chain_of((kind, path): &Block) -> impl Iterator<Item = Block> {
    (1..=path.len()).map(|len| (*kind, path[..len].to_vec()))
}

/// A stored event of one block in device memory.
fn event(block: &Block, more: &Value) -> Value {
    let (kind, path) = block;
    let parent = (path.len() > 1).then(|| hash_of(&(*kind, path[..path.len() - 1].to_vec())));
    let mut said = stored(parent, &[hash_of(block)], &path[path.len() - 1..], more);
    if *kind == Kind::Adapter {
        said["lora_name"] = json!("l");
    }
    said
}

/// The engine: a model of the blocks that it holds.
#[derive(Debug, Default)]
struct Engine {
    device: BTreeSet<Block>,
    pool: BTreeSet<Block>,
}

impl Engine {
    fn step(&mut self, step: &Step) -> Vec<Value> {
        let Self { device, pool } = self;
        match step {
            Step::Run(prompt) => chain_of(prompt)
                .filter(|block| device.insert(block.clone()))
                .map(|block| {
                    let keys = match block {
                        (Kind::Salted, ref path) if path.len() == 1 => json!([["s"]]),
                        (Kind::Image, ref path) if path.len() == 1 => json!([[[IMAGE, 0]]]),
                        (Kind::Adapter, _) => json!([["l"]]),
                        _ => json!(null),
                    };
                    event(&block, &json!({"extra_keys": keys}))
                })
                .collect(),
            Step::Evict(block) => {
                device.remove(block).then(|| removed(&[hash_of(block)], &json!({}))).into_iter().collect()
            }
            Step::Offload(prompt, full) => chain_of(prompt)
                .filter(|block| pool.insert(block.clone()))
                .map(|block| match full {
                    true => event(&block, &json!({"medium": "CPU"})),
                    false => placeholder(&[hash_of(&block)], "CPU"),
                })
                .collect(),
            Step::Drop(block) => {
                pool.remove(block).then(|| removed(&[hash_of(block)], &json!({"medium": "CPU"}))).into_iter().collect()
            }
            Step::Share(block) => vec![event(block, &json!({"medium": "cpu", "lora_name": null}))],
            Step::Reset(with_pool) => {
                device.clear();
                if *with_pool {
                    pool.clear();
                }
                vec![json!({"type": "AllBlocksCleared"})]
            }
        }
    }

    fn holds(&self, prompt: &Block) -> (u32, u32) {
        let mut rest = chain_of(prompt).peekable();
        let mut run =
            |of: &BTreeSet<Block>| std::iter::from_fn(|| rest.next_if(|block| of.contains(block))).count() as u32;
        (run(&self.device), run(&self.pool))
    }
}

fn answer(rig: &Rig, (kind, path): &Block) -> TierBlocks {
    let lora = (*kind == Kind::Adapter).then_some("l");
    let salt = (*kind == Kind::Salted).then_some("s");
    let media = if *kind == Kind::Image { vec![(0, identifier_hash(IMAGE))] } else { Vec::new() };
    let mut locals = Vec::new();
    let tokens = vllm::tokens(path);
    hash::local_hashes(SCHEME, hash::seed(lora, salt), hash::token_bytes(&tokens), &media, &mut locals);
    let mut depths = Depths::new();
    rig.reader.lookup(&locals, &mut depths);
    depths.of(ShardId(0), rig.streams[0].slot)
}

/// All prompts of full length, and so all others.
fn prompts() -> Vec<Block> {
    let paths = (0..8_u32).map(|bits| (0..3).map(|at| 1 + (bits >> at & 1)).collect::<Vec<_>>());
    paths.flat_map(|path| KINDS.map(|kind| (kind, path.clone()))).collect()
}

fn check(rig: &Rig, engine: &Engine, is_pool_known: bool) -> Result<(), TestCaseError> {
    for prompt in prompts() {
        let said = answer(rig, &prompt);
        let chain: Vec<Block> = chain_of(&prompt).collect();
        let (on_device, offloaded) = chain[..said.total() as usize].split_at(said.device as usize);
        prop_assert!(on_device.iter().all(|block| engine.device.contains(block)), "{prompt:?} {said:?}");
        prop_assert!(offloaded.iter().all(|block| engine.pool.contains(block)), "{prompt:?} {said:?}");
        if rig.trust().level == TrustLevel::Exact {
            let (device, pool) = engine.holds(&prompt);
            prop_assert_eq!(said.device, device, "{:?}", prompt);
            prop_assert!(!is_pool_known || said.host == pool, "{:?} {:?} {}", prompt, said, pool);
        }
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 256, failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn device_and_pool_never_count_too_much_and_exact_is_exact(
        steps in prop::collection::vec(step(), 1..60),
        missed in prop_oneof![2 => Just(0_usize), 1 => 1..20_usize],
    ) {
        let mut rig = Rig::new(&Options { scheme: Some(SCHEME), ..Options::default() });
        let mut engine = Engine::default();
        // After a late join, a tier that no connector has announced is not known.
        let mut is_pool_known = missed == 0;
        for (seq, step) in steps.iter().enumerate() {
            let events = engine.step(step);
            if seq >= missed {
                is_pool_known |= matches!(step, Step::Offload(..) | Step::Drop(_)) && !events.is_empty();
                say(&mut rig, seq as u64, &json!(events));
                check(&rig, &engine, is_pool_known)?;
            }
        }
    }
}
