//! What engines and the Kubernetes API say of themselves.

use kvrouted_gateway::engines::read_replies;
use kvrouted_gateway::kubernetes::read_watch;
use kvrouted_gateway::tokens::readers::rendered;

/// Tokens of a prompt, as many as the daemon accepts.
const PROMPT_TOKENS_MAX: usize = 1 << 21;
const RANKS_MAX: u32 = 4096;
const NAME_BYTES_MAX: usize = 512;

/// A reply to any question about an engine. Names are short and free of control characters, ranks are few.
pub(crate) fn engine_replies(data: &[u8]) {
    for host in ["10.0.0.8", "[fd00::1]", "engine-3.example"] {
        for (rank, text) in read_replies(data, host) {
            assert!(rank < RANKS_MAX, "rank {rank}");
            assert!(text.len() <= NAME_BYTES_MAX + 300 && !text.chars().any(char::is_control), "{text:?}");
        }
    }
}

/// The first byte is the block size, the rest a renderer's reply.
pub(crate) fn renders(data: &[u8]) {
    let [block_size, reply @ ..] = data else { return };
    let Some((tokens, blocks)) = rendered(reply, u32::from(*block_size)) else { return };
    assert!((1..=PROMPT_TOKENS_MAX).contains(&tokens.len()), "{} tokens", tokens.len());
    let all = tokens.len() as u32 / u32::from(*block_size).max(1);
    assert!(blocks.iter().all(|(block, _)| *block < all), "a block outside of the prompt: {blocks:?}");
    assert!(blocks.is_sorted_by_key(|(block, _)| *block), "blocks in disorder");
}

/// The first byte is the length of the pieces in which a watch comes. How it is cut changes nothing.
pub(crate) fn watch(data: &[u8]) {
    let [piece, events @ ..] = data else { return };
    let whole = read_watch(events, events.len());
    assert_eq!(read_watch(events, usize::from(*piece)), whole, "how a watch is cut");
    for fleet in whole.iter().flatten() {
        assert!(fleet.pods.is_sorted_by_key(|pod| (pod.worker, pod.name.clone())), "pods in disorder");
        for pod in &fleet.pods {
            assert!(!pod.ports.is_empty() && !pod.ports.contains(&0), "{pod:?}");
            assert!(!pod.address.is_unspecified() && !pod.address.is_multicast(), "{pod:?}");
        }
    }
}
