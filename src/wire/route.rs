//! What a route request says, and what any question says of its prompt.

use super::constraints::{self, Constraints};
use super::convert::{scheme_said, worker_from_wire};
use super::request::{Request, RequestScratch, bounded, invalid, name, understood};
use super::table::{Elements, Field, HotTable, TableReader, hot_tables, nested};
use crate::error::{Result, counted};
use crate::hash::TOKEN_BYTES;
use crate::ids::{Scheme, SpaceId, Window};
use crate::limits::{ALLOW_LIST_MAX, BLOCK_SIZE_TOKENS_MAX, CANDIDATES_MAX, MEDIA_HASHES_MAX, PROMPT_TOKENS_MAX};
use crate::route::{BookingRequest, Prompt, RouteRequest};
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
        nested(table, at).map(Some)
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

fn priority_jump(jump: f64) -> Result<f64> {
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
    let Some(scheme) = scheme.filter(|scheme| scheme.block_size <= BLOCK_SIZE_TOKENS_MAX) else {
        let remedy = format!("say the scheme the hashes were made with, block_size 1 to {BLOCK_SIZE_TOKENS_MAX}");
        return Err(invalid("local_hashes without a usable scheme", remedy));
    };
    let blocks = whole_blocks(question.token_count, scheme);
    let sent = hashes.len() / HASH_BYTES;
    if sent != blocks {
        let message = format!(
            "{sent} local_hashes for {}, which make {}",
            counted(question.token_count as usize, "token"),
            counted(blocks, "whole block")
        );
        return Err(invalid(message, "give one hash for every whole block, and the prompt's full token_count"));
    }
    Ok(Prompt::LocalHashes { hashes, scheme, token_count: question.token_count })
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
