//! A question about a prompt, as it is put to the daemon of one connection.

use super::asking::Put;
use crate::client::conversation::Leaves;
use crate::error::Result;
use crate::hash;
use crate::ids::{CorrelationId, Scheme, SpaceId};
use crate::protocol::{Prompt, RouteRequest};
use crate::wire::RequestEncoder;

/// What is asked of a prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Question {
    Route,
    Overlap,
    PotentialLoads,
}

/// The hashes of a prompt that the caller gave as tokens.
#[derive(Debug)]
pub(super) struct Hashed {
    /// Little endian.
    bytes: Vec<u8>,
    scheme: Scheme,
    token_count: u32,
}

impl Hashed {
    /// Hashes a request's tokens; `None` = it has hashes already.
    pub(super) fn of(request: &RouteRequest<'_>, scheme: Scheme) -> Option<Self> {
        let Prompt::Tokens(tokens) = request.prompt else { return None };
        let token_count = u32::try_from(request.prompt.token_count()).ok()?;
        let mut locals = Vec::new();
        let seed = hash::seed(request.lora, request.salt);
        hash::local_hashes(scheme, seed, tokens, request.media, &mut locals);
        let bytes = locals.iter().flat_map(|local| local.0.to_le_bytes()).collect();
        Some(Self { bytes, scheme, token_count })
    }
}

/// The question under the daemon's own id of the space.
pub(super) struct PutPrompt<'a> {
    pub(super) question: Question,
    pub(super) request: RouteRequest<'a>,
    pub(super) space: SpaceId,
    pub(super) hashed: Option<Hashed>,
}

impl Put for PutPrompt<'_> {
    fn encode(&self, encoder: &mut RequestEncoder, id: CorrelationId, out: &mut Vec<u8>) -> Result<()> {
        let request = match &self.hashed {
            None => RouteRequest { space: self.space, ..self.request },
            Some(hashed) => {
                let (scheme, token_count) = (hashed.scheme, hashed.token_count);
                let prompt = Prompt::LocalHashes { hashes: &hashed.bytes, scheme, token_count };
                // What the objects are is in the hashes already.
                RouteRequest { space: self.space, prompt, media: &[], ..self.request }
            }
        };
        match self.question {
            Question::Route => encoder.route(id, &request, out),
            Question::Overlap => encoder.overlap(id, &request, out),
            Question::PotentialLoads => encoder.potential_loads(id, &request, out),
        }
    }

    fn leaves(&self) -> Leaves {
        match (self.question, self.request.book) {
            (Question::Route, Some(book)) => {
                Leaves::Booking { request_id: book.request_id.into(), attempt: book.attempt }
            }
            _ => Leaves::Nothing,
        }
    }
}
