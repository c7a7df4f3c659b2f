//! Encodes the gateway's requests, in one reused buffer, and appends them to the send buffer.

use flatbuffers::{FlatBufferBuilder, Vector, WIPOffset};

use super::header::{FRAME_IDENTIFIER, FrameKind, PROTOCOL_VERSION, append_frame};
use super::schema_conversions::scheme_args;
use crate::error::{Error, Kind, Result};
use crate::ids::{CorrelationId, SpaceId};
use crate::limits::{ALLOW_LIST_MAX, MEDIA_HASHES_MAX, PROMPT_TOKENS_MAX, REQUEST_TAINTS_MAX, SHARED_HITS_MAX};
use crate::protocol::{BookingRef, Prompt, RouteRequest, SessionToken};
use crate::schema_generated::routing as fb;

/// Encodes requests. Keep it from one to the next: its buffers are reused.
#[derive(Default)]
pub struct RequestEncoder {
    pub(super) builder: FlatBufferBuilder<'static>,
    tokens: Vec<u32>,
    hashes: Vec<u64>,
    media: Vec<fb::MediaHash>,
}

impl std::fmt::Debug for RequestEncoder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RequestEncoder").finish_non_exhaustive()
    }
}

/// The encoded fields that every request about a prompt has.
pub(super) struct Question {
    pub(super) tokens: Option<WIPOffset<Vector<'static, u32>>>,
    pub(super) local_hashes: Option<WIPOffset<Vector<'static, u64>>>,
    pub(super) scheme: Option<WIPOffset<fb::Scheme<'static>>>,
    pub(super) token_count: u32,
    pub(super) lora: Option<WIPOffset<&'static str>>,
    pub(super) salt: Option<WIPOffset<&'static str>>,
    pub(super) media: Option<WIPOffset<Vector<'static, fb::MediaHash>>>,
}

impl RequestEncoder {
    /// Appends a hello for this protocol version.
    pub fn hello(&mut self, id: CorrelationId, client_name: &str, session: Option<SessionToken>, out: &mut Vec<u8>) {
        self.hello_range(id, (PROTOCOL_VERSION, PROTOCOL_VERSION), client_name, session, out);
    }

    /// Appends a hello for a range of protocol versions, oldest and newest.
    pub fn hello_range(
        &mut self,
        id: CorrelationId,
        (version_min, version_max): (u16, u16),
        client_name: &str,
        session: Option<SessionToken>,
        out: &mut Vec<u8>,
    ) {
        let client_name = self.builder.create_string(client_name);
        let session = session.map(|token| fb::SessionToken::new(token.hi, token.lo));
        let args =
            fb::HelloArgs { version_min, version_max, client_name: Some(client_name), session: session.as_ref() };
        let root = fb::Hello::create(&mut self.builder, &args);
        self.finish(FrameKind::Hello, id, root, out);
    }

    /// Appends an overlap. Only the request's prompt and space are sent.
    ///
    /// # Errors
    /// As [`RequestEncoder::route`].
    pub fn overlap(&mut self, id: CorrelationId, request: &RouteRequest<'_>, out: &mut Vec<u8>) -> Result<()> {
        check_lengths(request)?;
        let question = self.question(request);
        let args = fb::OverlapArgs {
            space_id: request.space.0,
            tokens: question.tokens,
            local_hashes: question.local_hashes,
            scheme: question.scheme,
            token_count: question.token_count,
            lora: question.lora,
            salt: question.salt,
            media: question.media,
            ..fb::OverlapArgs::default()
        };
        let root = fb::Overlap::create(&mut self.builder, &args);
        self.finish(FrameKind::Overlap, id, root, out);
        Ok(())
    }

    /// Appends a prefill-complete; `prefill_us` 0 = not known.
    pub fn prefill_complete(
        &mut self,
        id: CorrelationId,
        booking: &BookingRef<'_>,
        prefill_us: u64,
        out: &mut Vec<u8>,
    ) {
        let (handle, request_id, attempt) = self.booking(booking);
        let args = fb::PrefillCompleteArgs {
            booking: handle.as_ref(),
            request_id,
            attempt,
            prefill_us,
            ..fb::PrefillCompleteArgs::default()
        };
        let root = fb::PrefillComplete::create(&mut self.builder, &args);
        self.finish(FrameKind::PrefillComplete, id, root, out);
    }

    /// Appends a free.
    pub fn free(&mut self, id: CorrelationId, booking: &BookingRef<'_>, out: &mut Vec<u8>) {
        let (handle, request_id, attempt) = self.booking(booking);
        let args = fb::FreeArgs { booking: handle.as_ref(), request_id, attempt, ..fb::FreeArgs::default() };
        let root = fb::Free::create(&mut self.builder, &args);
        self.finish(FrameKind::Free, id, root, out);
    }

    /// Appends a request for a page of workers; limit 0 = the daemon's limit.
    pub fn workers(&mut self, id: CorrelationId, space: Option<SpaceId>, cursor: u32, limit: u32, out: &mut Vec<u8>) {
        let args = fb::WorkersArgs {
            space_id: space.map_or(u32::MAX, |space| space.0),
            cursor,
            limit,
            ..fb::WorkersArgs::default()
        };
        let root = fb::Workers::create(&mut self.builder, &args);
        self.finish(FrameKind::Workers, id, root, out);
    }

    pub(super) fn question(&mut self, request: &RouteRequest<'_>) -> Question {
        let builder = &mut self.builder;
        let mut question = Question {
            tokens: None,
            local_hashes: None,
            scheme: None,
            token_count: 0,
            lora: request.lora.map(|name| builder.create_string(name)),
            salt: request.salt.map(|name| builder.create_string(name)),
            media: None,
        };
        if !request.media.is_empty() {
            self.media.clear();
            self.media.extend(request.media.iter().map(|&(block, hash)| fb::MediaHash::new(block, hash)));
            question.media = Some(builder.create_vector(&self.media));
        }
        match request.prompt {
            Prompt::Tokens(bytes) => {
                self.tokens.clear();
                self.tokens.extend(bytes.as_chunks().0.iter().map(|token| u32::from_le_bytes(*token)));
                question.tokens = Some(builder.create_vector(&self.tokens));
            }
            Prompt::LocalHashes { hashes, scheme, token_count } => {
                self.hashes.clear();
                self.hashes.extend(hashes.as_chunks().0.iter().map(|hash| u64::from_le_bytes(*hash)));
                question.local_hashes = Some(builder.create_vector(&self.hashes));
                question.scheme = Some(fb::Scheme::create(builder, &scheme_args(Some(scheme))));
                question.token_count = token_count;
            }
        }
        question
    }

    pub(super) fn booking(
        &mut self,
        booking: &BookingRef<'_>,
    ) -> (Option<fb::BookingHandle>, Option<WIPOffset<&'static str>>, u32) {
        match *booking {
            BookingRef::Handle(handle) => (Some(fb::BookingHandle::new(handle.slot, handle.generation)), None, 0),
            BookingRef::Request { request_id, attempt } => {
                (None, Some(self.builder.create_string(request_id)), attempt)
            }
        }
    }

    pub(super) fn finish<T>(&mut self, kind: FrameKind, id: CorrelationId, root: WIPOffset<T>, out: &mut Vec<u8>) {
        self.builder.finish(root, Some(FRAME_IDENTIFIER));
        append_frame(out, kind, id, self.builder.finished_data());
        self.builder.reset();
    }
}

/// Checks that a request fits in a frame. The daemon checks the rest.
pub(super) fn check_lengths(request: &RouteRequest<'_>) -> Result<()> {
    let hashes = match request.prompt {
        Prompt::Tokens(_) => 0,
        Prompt::LocalHashes { hashes, .. } => hashes.len() / 8,
    };
    let lists = [
        ("prompt tokens", request.prompt.token_count(), PROMPT_TOKENS_MAX),
        ("local hashes", hashes, PROMPT_TOKENS_MAX),
        ("media hashes", request.media.len(), MEDIA_HASHES_MAX),
        ("required labels", request.required_taints.len(), REQUEST_TAINTS_MAX),
        ("preferred labels", request.preferred_taints.names.len(), REQUEST_TAINTS_MAX),
        ("shared ranges", request.shared_hits.len(), SHARED_HITS_MAX),
        ("allow list entries", request.allow.map_or(0, <[_]>::len), ALLOW_LIST_MAX),
    ];
    match lists.iter().find(|(_, len, max)| len > max) {
        Some((what, len, max)) => {
            Err(Error::new(Kind::InvalidArgument, format!("{len} {what}"), format!("send at most {max}")))
        }
        None => Ok(()),
    }
}
