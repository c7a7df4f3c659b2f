//! What a worker should have of a prompt, from the daemon's reply.

use kvrouted::client::{Candidate, MatchStatus, ReplyNotes, RouteReply, TrustLevel};

use crate::parity::Prediction;
use crate::tokens::PromptTokens;

/// The prediction for one candidate; `None` = the prompt has no tokens, or the size of a block is not known.
pub(super) fn of(
    candidate: &Candidate,
    reply: &RouteReply,
    prompt: &PromptTokens,
    block_size: Option<u32>,
) -> Option<Prediction> {
    let tokens = prompt.tokens.as_ref()?;
    let block_size = block_size.filter(|size| *size > 0)?;
    let unsure = [ReplyNotes::SCHEME_UNKNOWN, ReplyNotes::READ_CONTENDED];
    let is_sure = reply.matched == MatchStatus::Matched && !unsure.into_iter().any(|note| reply.notes.contains(note));
    Some(Prediction {
        worker: (candidate.worker.id.0, candidate.worker.rank.0),
        // The engine's `cached_tokens` counts what it loads from lower tiers too.
        overlap_blocks: candidate.overlap.total(),
        block_size,
        prompt_tokens: u32::try_from(tokens.len()).unwrap_or(u32::MAX),
        is_exact: is_sure && prompt.is_comparable && candidate.trust.level == TrustLevel::Exact,
        source: prompt.source,
    })
}

#[cfg(test)]
mod tests {
    use kvrouted::client::{Trust, WorkerState};
    use kvrouted::ids::{TierBlocks, Worker};

    use super::*;
    use crate::tokens::TokenSource;

    fn candidate(level: TrustLevel) -> Candidate {
        Candidate {
            worker: Worker::new(7, 1),
            name: String::new(),
            overlap: TierBlocks { device: 3, host: 2, disk: 0, external: 1 },
            trust: Trust { level, ..Trust::default() },
            cost: 0.0,
            state: WorkerState::Ready,
            terms: None,
        }
    }

    fn prompt(tokens: Option<&[u32]>) -> PromptTokens {
        PromptTokens {
            tokens: tokens.map(Into::into),
            source: TokenSource::Body,
            why_none: None,
            media: Vec::new(),
            salt: None,
            is_comparable: true,
        }
    }

    #[test]
    fn only_a_matched_prompt_on_an_exact_worker_is_predicted_exactly() {
        let (tokens, matched) = (prompt(Some(&[1; 100])), RouteReply::default());
        let exact = of(&candidate(TrustLevel::Exact), &matched, &tokens, Some(16)).expect("a prediction");
        assert_eq!((exact.worker, exact.overlap_blocks, exact.prompt_tokens), ((7, 1), 6, 100), "over all tiers");
        assert!(exact.is_exact);
        let is_exact = |level, reply: &RouteReply| {
            of(&candidate(level), reply, &tokens, Some(16)).is_some_and(|prediction| prediction.is_exact)
        };
        assert!(!is_exact(TrustLevel::LowerBound, &matched));
        let unmatchable = RouteReply { matched: MatchStatus::Unmatchable, ..RouteReply::default() };
        assert!(!is_exact(TrustLevel::Exact, &unmatchable));
        let part = PromptTokens { is_comparable: false, ..tokens.clone() };
        let of_part = of(&candidate(TrustLevel::Exact), &matched, &part, Some(16));
        assert!(of_part.is_some_and(|prediction| !prediction.is_exact), "the reply counts more than these tokens");
        let contended = RouteReply { notes: ReplyNotes::READ_CONTENDED, ..RouteReply::default() };
        assert!(!is_exact(TrustLevel::Exact, &contended));
    }

    #[test]
    fn nothing_is_predicted_without_tokens_or_without_the_size_of_a_block() {
        let reply = RouteReply::default();
        assert!(of(&candidate(TrustLevel::Exact), &reply, &prompt(None), Some(16)).is_none());
        for size in [None, Some(0)] {
            assert!(of(&candidate(TrustLevel::Exact), &reply, &prompt(Some(&[1])), size).is_none());
        }
    }
}
