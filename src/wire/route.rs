//! What a route request says, and what any question says of its prompt: routes both directions.

use flatbuffers::VOffsetT;

use super::compose::{FrameWriter, Layout, PADDING, REFERENCE, Table};
use super::constraints::{self, Constraints};
use super::convert::{scheme_said, window_to_wire, worker_from_wire, worker_to_wire};
use super::encode_request::{RequestEncoder, check_lengths};
use super::header::FrameKind;
use super::request::{Request, RequestScratch, bounded, invalid, name, understood};
use super::table::{Elements, Field, HotTable, TableReader, hot_tables};
use crate::error::{Result, counted};
use crate::hash::TOKEN_BYTES;
use crate::ids::{CorrelationId, Scheme, SpaceId, Window};
use crate::limits::{ALLOW_LIST_MAX, BLOCK_SIZE_TOKENS_MAX, CANDIDATES_MAX, MEDIA_HASHES_MAX, PROMPT_TOKENS_MAX};
use crate::protocol::{BookingRequest, Overrides, Prompt, RouteRequest};
use crate::schema_generated::routing as fb;

/// Bytes of a local hash.
const HASH_BYTES: usize = 8;

hot_tables! {
    Route of Route unless rare: VT_REQUIRED_TAINTS | VT_PREFERRED_TAINTS | VT_OVERRIDES {
        space_id: u32 = VT_SPACE_ID,
        must_understand: u64 = VT_MUST_UNDERSTAND,
        request_id: Option<&'a str> = VT_REQUEST_ID,
        attempt: u32 = VT_ATTEMPT,
        tokens: Elements<'a, u32> = VT_TOKENS,
        local_hashes: Elements<'a, u64> = VT_LOCAL_HASHES,
        scheme: Option<SchemeSaid<'a>> = VT_SCHEME,
        token_count: u32 = VT_TOKEN_COUNT,
        lora: Option<&'a str> = VT_LORA,
        salt: Option<&'a str> = VT_SALT,
        media: Elements<'a, fb::MediaHash> = VT_MEDIA,
        book: bool = VT_BOOK,
        explain: bool = VT_EXPLAIN,
        candidates_max: u32 = VT_CANDIDATES_MAX or fb::RouteArgs::default().candidates_max,
        allow: Elements<'a, fb::WorkerRef> = VT_ALLOW,
        pin: Option<fb::WorkerRef> = VT_PIN,
        expected_output_tokens: u32 = VT_EXPECTED_OUTPUT_TOKENS,
        shared_hits: Elements<'a, fb::BlockRange> = VT_SHARED_HITS,
        affinity_session: Option<&'a str> = VT_AFFINITY_SESSION,
        priority: i32 = VT_PRIORITY,
        priority_jump: f64 = VT_PRIORITY_JUMP,
        deadline_us: u32 = VT_DEADLINE_US,
        disaggregate: bool = VT_DISAGGREGATE,
    }

    SchemeSaid of Scheme {
        block_size: u32 = VT_BLOCK_SIZE,
        window: fb::Window = VT_WINDOW,
        seed_rule: fb::SeedRule = VT_SEED_RULE,
    }
}

impl<'a> Field<'a> for Option<SchemeSaid<'a>> {
    type Accessed = Option<fb::Scheme<'a>>;

    fn of(accessed: Self::Accessed) -> Self {
        accessed.map(SchemeSaid::of)
    }

    fn at(table: &mut TableReader<'a>, at: usize) -> Option<Self> {
        table.nested(at).map(Some)
    }
}

pub(super) fn decode<'a>(route: &Route<'a>, scratch: &'a mut RequestScratch) -> Result<Request<'a>> {
    understood(route.must_understand)?;
    let request_id = name("request_id", route.request_id)?;
    let book = match (route.book, request_id) {
        (false, _) => None,
        (true, Some(request_id)) => Some(BookingRequest { request_id, attempt: route.attempt }),
        (true, None) => {
            return Err(invalid("book without a request_id", "name the request, unique within the session"));
        }
    };
    if route.candidates_max == 0 {
        return Err(invalid("candidates_max is 0", "ask for at least one candidate"));
    }
    let question = Question {
        tokens: route.tokens.bytes,
        local_hashes: route.local_hashes.bytes,
        scheme: route.scheme.as_ref(),
        token_count: route.token_count,
    };
    let RequestScratch { media, allow, constraints, .. } = scratch;
    let Constraints { required_taints, preferred_taints, shared_hits } =
        constraints::read(route.rare.as_ref(), &route.shared_hits, constraints)?;
    let allow = match route.allow.bytes {
        Some(_) => {
            let listed = route.allow.structs();
            bounded("allow", listed.len(), ALLOW_LIST_MAX)?;
            allow.clear();
            allow.extend(listed.map(|worker| worker_from_wire(&worker)));
            Some(allow.as_slice())
        }
        None => None,
    };
    Ok(Request::Route(RouteRequest {
        lora: name("lora", route.lora)?,
        salt: name("salt", route.salt)?,
        media: read_media(&route.media, media)?,
        book,
        explain: route.explain,
        candidates_max: (route.candidates_max as usize).min(CANDIDATES_MAX),
        allow,
        pin: route.pin.as_ref().map(worker_from_wire),
        required_taints,
        preferred_taints,
        shared_hits,
        overrides: constraints::overrides(route.rare.and_then(|table| table.overrides()))?,
        expected_output_tokens: route.expected_output_tokens,
        affinity_session: name("affinity_session", route.affinity_session)?,
        disaggregate: route.disaggregate,
        priority: route.priority,
        priority_jump: priority_jump(route.priority_jump)?,
        deadline_us: route.deadline_us,
        ..RouteRequest::new(SpaceId(route.space_id), prompt(&question)?)
    }))
}

pub(super) fn priority_jump(jump: f64) -> Result<f64> {
    if jump.is_finite() {
        return Ok(jump);
    }
    Err(invalid("priority_jump is not a finite number", "give seconds, or leave it out"))
}

/// The fields that say what the prompt is, the same in every request that has one.
pub(super) struct Question<'q, 'a> {
    pub(super) tokens: Option<&'a [u8]>,
    pub(super) local_hashes: Option<&'a [u8]>,
    pub(super) scheme: Option<&'q SchemeSaid<'a>>,
    pub(super) token_count: u32,
}

pub(super) fn prompt<'a>(question: &Question<'_, 'a>) -> Result<Prompt<'a>> {
    match (question.tokens, question.local_hashes) {
        (Some(tokens), None) => {
            let sent = tokens.len() / TOKEN_BYTES;
            bounded("tokens", sent, PROMPT_TOKENS_MAX)?;
            if question.scheme.is_some() {
                return Err(invalid("scheme beside tokens", "a scheme goes with local_hashes; leave it out"));
            }
            if question.token_count != 0 && question.token_count as usize != sent {
                let said = question.token_count;
                return Err(invalid(
                    format!("token_count says {said}, tokens has {sent}"),
                    "leave token_count out beside tokens",
                ));
            }
            Ok(Prompt::Tokens(tokens))
        }
        (None, Some(hashes)) => hashed_prompt(hashes, question),
        (Some(_), Some(_)) => Err(invalid("both tokens and local_hashes", "give one of them")),
        (None, None) => Err(invalid("neither tokens nor local_hashes", "give one of them")),
    }
}

fn hashed_prompt<'a>(hashes: &'a [u8], question: &Question<'_, 'a>) -> Result<Prompt<'a>> {
    bounded("token_count", question.token_count as usize, PROMPT_TOKENS_MAX)?;
    let scheme = match question.scheme {
        Some(said) => scheme_said(said.block_size, said.window, said.seed_rule)?,
        None => None,
    };
    let scheme = check_hashes(hashes, scheme, question.token_count)?;
    Ok(Prompt::LocalHashes { hashes, scheme, token_count: question.token_count })
}

/// Refuses a prompt of hashes without a usable scheme, or without one hash for each whole block.
pub(super) fn check_hashes(hashes: &[u8], scheme: Option<Scheme>, token_count: u32) -> Result<Scheme> {
    let Some(scheme) = scheme.filter(|scheme| (1..=BLOCK_SIZE_TOKENS_MAX).contains(&scheme.block_size)) else {
        let remedy = format!("say the scheme the hashes were made with, block_size 1 to {BLOCK_SIZE_TOKENS_MAX}");
        return Err(invalid("local_hashes without a usable scheme", remedy));
    };
    let blocks = whole_blocks(token_count, scheme);
    let sent = hashes.len() / HASH_BYTES;
    if sent != blocks {
        let message = format!(
            "{sent} local_hashes for {}, which make {}",
            counted(token_count as usize, "token"),
            counted(blocks, "whole block")
        );
        return Err(invalid(message, "give one hash for every whole block, and the prompt's full token_count"));
    }
    Ok(scheme)
}

/// Whole blocks of a prompt; a bigram block needs one token beyond its end.
const fn whole_blocks(token_count: u32, scheme: Scheme) -> usize {
    let tokens = match scheme.window {
        Window::Plain => token_count,
        Window::Bigram => token_count.saturating_sub(1),
    };
    (tokens / scheme.block_size) as usize
}

pub(super) fn read_media<'a>(
    listed: &Elements<'_, fb::MediaHash>,
    media: &'a mut Vec<(u32, u64)>,
) -> Result<&'a [(u32, u64)]> {
    media.clear();
    let listed = listed.structs();
    bounded("media", listed.len(), MEDIA_HASHES_MAX)?;
    media.extend(listed.map(|entry| (entry.block(), entry.hash())));
    Ok(media)
}

const ROUTE: Layout<112, 56> = Layout::of(&[
    (fb::Route::VT_SPACE_ID, 4),
    (fb::Route::VT_REQUEST_ID, REFERENCE),
    (fb::Route::VT_ATTEMPT, 4),
    (fb::Route::VT_TOKENS, REFERENCE),
    (fb::Route::VT_LOCAL_HASHES, REFERENCE),
    (fb::Route::VT_SCHEME, REFERENCE),
    (fb::Route::VT_TOKEN_COUNT, 4),
    (fb::Route::VT_LORA, REFERENCE),
    (fb::Route::VT_SALT, REFERENCE),
    (fb::Route::VT_MEDIA, REFERENCE),
    (fb::Route::VT_CANDIDATES_MAX, 4),
    (fb::Route::VT_ALLOW, REFERENCE),
    (fb::Route::VT_REQUIRED_TAINTS, REFERENCE),
    (fb::Route::VT_PREFERRED_TAINTS, REFERENCE),
    (fb::Route::VT_EXPECTED_OUTPUT_TOKENS, 4),
    (fb::Route::VT_OVERRIDES, REFERENCE),
    (fb::Route::VT_SHARED_HITS, REFERENCE),
    (fb::Route::VT_AFFINITY_SESSION, REFERENCE),
    (fb::Route::VT_PRIORITY, 4),
    (fb::Route::VT_PRIORITY_JUMP, 8),
    (fb::Route::VT_PIN, 16),
    (fb::Route::VT_DEADLINE_US, 4),
    (fb::Route::VT_BOOK, 1),
    (fb::Route::VT_EXPLAIN, 1),
    (fb::Route::VT_DISAGGREGATE, 1),
    (PADDING, 1),
]);

const SCHEME: Layout<12, 10> = Layout::of(&[
    (fb::Scheme::VT_BLOCK_SIZE, 4),
    (fb::Scheme::VT_WINDOW, 1),
    (fb::Scheme::VT_SEED_RULE, 1),
    (PADDING, 2),
]);

/// What is reserved for a request beside its prompt, bytes: more than most take.
const REQUEST_BYTES: usize = 512;

impl RequestEncoder {
    /// Appends a route.
    ///
    /// # Errors
    /// [`Kind::InvalidArgument`](crate::error::Kind::InvalidArgument) if a list is longer than any daemon takes; nothing
    /// is appended then.
    pub fn route(&mut self, id: CorrelationId, request: &RouteRequest<'_>, out: &mut Vec<u8>) -> Result<()> {
        check_lengths(request)?;
        let (Prompt::Tokens(prompt) | Prompt::LocalHashes { hashes: prompt, .. }) = request.prompt;
        let mut frame = FrameWriter::begin(out, FrameKind::Route, id, REQUEST_BYTES + prompt.len());
        let root = frame.table(route_table(request));
        let refer = |frame: &mut FrameWriter<'_>, field, to| frame.refer_field((&ROUTE, root), field, to);
        for (field, text) in texts(request) {
            if let Some(text) = text {
                let place = frame.string(text);
                refer(&mut frame, field, place);
            }
        }
        match request.prompt {
            Prompt::Tokens(tokens) => {
                let place = frame.vector(
                    tokens.len() / TOKEN_BYTES,
                    TOKEN_BYTES,
                    tokens.as_chunks::<TOKEN_BYTES>().0.as_flattened(),
                );
                refer(&mut frame, fb::Route::VT_TOKENS, place);
            }
            Prompt::LocalHashes { hashes, scheme, .. } => {
                let place = frame.vector(
                    hashes.len() / HASH_BYTES,
                    HASH_BYTES,
                    hashes.as_chunks::<HASH_BYTES>().0.as_flattened(),
                );
                refer(&mut frame, fb::Route::VT_LOCAL_HASHES, place);
                let mut table = SCHEME.blank();
                table.set(fb::Scheme::VT_BLOCK_SIZE, scheme.block_size.to_le_bytes());
                table.set(fb::Scheme::VT_WINDOW, [window_to_wire(scheme.window).0]);
                table.set(fb::Scheme::VT_SEED_RULE, [fb::SeedRule::Xxh3Additive.0]);
                let place = frame.table(table);
                refer(&mut frame, fb::Route::VT_SCHEME, place);
            }
        }
        if !request.media.is_empty() {
            let place = frame.begin_vector(request.media.len(), 8);
            request.media.iter().for_each(|&(block, hash)| frame.bytes(&fb::MediaHash::new(block, hash).0));
            refer(&mut frame, fb::Route::VT_MEDIA, place);
        }
        if let Some(allow) = request.allow {
            let place = frame.begin_vector(allow.len(), 8);
            allow.iter().for_each(|worker| frame.bytes(&worker_to_wire(*worker).0));
            refer(&mut frame, fb::Route::VT_ALLOW, place);
        }
        if !request.shared_hits.is_empty() {
            let place = frame.begin_vector(request.shared_hits.len(), 4);
            request.shared_hits.iter().for_each(|&(start, end)| frame.bytes(&fb::BlockRange::new(start, end).0));
            refer(&mut frame, fb::Route::VT_SHARED_HITS, place);
        }
        if !request.required_taints.is_empty() {
            let place = constraints::write_required(&mut frame, request.required_taints);
            refer(&mut frame, fb::Route::VT_REQUIRED_TAINTS, place);
        }
        if !request.preferred_taints.names.is_empty() {
            let place = constraints::write_preferred(&mut frame, request.preferred_taints);
            refer(&mut frame, fb::Route::VT_PREFERRED_TAINTS, place);
        }
        if request.overrides != Overrides::NONE {
            let place = constraints::write_overrides(&mut frame, &request.overrides);
            refer(&mut frame, fb::Route::VT_OVERRIDES, place);
        }
        frame.end(root);
        Ok(())
    }
}

/// The strings of a request.
fn texts<'a>(request: &RouteRequest<'a>) -> [(VOffsetT, Option<&'a str>); 4] {
    [
        (fb::Route::VT_REQUEST_ID, request.book.map(|book| book.request_id)),
        (fb::Route::VT_LORA, request.lora),
        (fb::Route::VT_SALT, request.salt),
        (fb::Route::VT_AFFINITY_SESSION, request.affinity_session),
    ]
}

/// The table of a request, references not yet set. What is as the schema has it anyway is left out.
fn route_table(request: &RouteRequest<'_>) -> Table<'static, 112, 56> {
    let mut table = ROUTE.blank();
    let unless_zero = |value: u32| (value != 0).then_some(value.to_le_bytes());
    let if_so = |is_so: bool| is_so.then_some([1]);
    let (tokens, hashes, token_count) = match request.prompt {
        Prompt::Tokens(_) => (true, false, 0),
        Prompt::LocalHashes { token_count, .. } => (false, true, token_count),
    };
    table.set(fb::Route::VT_SPACE_ID, request.space.0.to_le_bytes());
    table.set_if(fb::Route::VT_ATTEMPT, unless_zero(request.book.map_or(0, |book| book.attempt)));
    table.leave_out(fb::Route::VT_TOKENS, !tokens);
    table.leave_out(fb::Route::VT_LOCAL_HASHES, !hashes);
    table.leave_out(fb::Route::VT_SCHEME, !hashes);
    table.set_if(fb::Route::VT_TOKEN_COUNT, unless_zero(token_count));
    table.leave_out(fb::Route::VT_MEDIA, request.media.is_empty());
    table.set(fb::Route::VT_CANDIDATES_MAX, u32::try_from(request.candidates_max).unwrap_or(u32::MAX).to_le_bytes());
    table.leave_out(fb::Route::VT_ALLOW, request.allow.is_none());
    table.leave_out(fb::Route::VT_REQUIRED_TAINTS, request.required_taints.is_empty());
    table.leave_out(fb::Route::VT_PREFERRED_TAINTS, request.preferred_taints.names.is_empty());
    table.set_if(fb::Route::VT_EXPECTED_OUTPUT_TOKENS, unless_zero(request.expected_output_tokens));
    table.leave_out(fb::Route::VT_OVERRIDES, request.overrides == Overrides::NONE);
    table.leave_out(fb::Route::VT_SHARED_HITS, request.shared_hits.is_empty());
    table.set_if(fb::Route::VT_PRIORITY, (request.priority != 0).then_some(request.priority.to_le_bytes()));
    let jump = request.priority_jump;
    table.set_if(fb::Route::VT_PRIORITY_JUMP, (jump.to_bits() != 0).then_some(jump.to_le_bytes()));
    table.set_if(fb::Route::VT_PIN, request.pin.map(|worker| worker_to_wire(worker).0));
    table.set_if(fb::Route::VT_DEADLINE_US, unless_zero(request.deadline_us));
    table.set_if(fb::Route::VT_BOOK, if_so(request.book.is_some()));
    table.set_if(fb::Route::VT_EXPLAIN, if_so(request.explain));
    table.set_if(fb::Route::VT_DISAGGREGATE, if_so(request.disaggregate));
    for (field, text) in texts(request) {
        table.leave_out(field, text.is_none());
    }
    table
}
