//! The route request, in both directions: its fields, its prompt and its constraints.

use flatbuffers::VOffsetT;

use super::decode_request::{Request, RequestScratch, bounded, invalid, name, understood};
use super::encode_request::{RequestEncoder, check_lengths};
use super::frame_composer::{
    FrameWriter, Layout, PADDING, Plain as _, REFERENCE, Table, element, places, vtable_bytes,
};
use super::header::FrameKind;
use super::schema_conversions::{
    mode_from_wire, mode_to_wire, scheme_of_fields, trace_from_wire, trace_to_wire, unknown_value, window_to_wire,
    worker_from_wire, worker_to_wire,
};
use super::table::{Elements, Field, HotTable, TableReader, hot_tables};
use crate::error::{Error, Result, counted};
use crate::hash::TOKEN_BYTES;
use crate::ids::{CorrelationId, Scheme, SpaceId, Window};
use crate::limits::{
    ALLOW_LIST_MAX, BLOCK_SIZE_TOKENS_MAX, CANDIDATES_MAX, MEDIA_HASHES_MAX, NAME_BYTES_MAX, PROMPT_TOKENS_MAX,
    REQUEST_TAINTS_MAX, SHARED_HITS_MAX,
};
use crate::protocol::{BookingRequest, Names, Overrides, Preferences, Prompt, RouteRequest, plain_request_fields};
use crate::schema_generated::routing as fb;

/// Bytes of a local hash.
const HASH_BYTES: usize = 8;

/// The fields of a route on the wire. The plain ones come from the list in `protocol`.
macro_rules! route_table {
    ($($(#[$doc:meta])* $field:ident: $type:ty = $default:expr, $slot:ident;)*) => {
        hot_tables! {
            Route of Route unless rare: VT_REQUIRED_TAINTS | VT_PREFERRED_TAINTS | VT_OVERRIDES {
                space_id: u32 = VT_SPACE_ID,
                must_understand: u64 = VT_MUST_UNDERSTAND,
                request_id: Option<&'a str> = VT_REQUEST_ID,
                attempt: u32 = VT_ATTEMPT,
                tokens: Elements<'a, u32> = VT_TOKENS,
                local_hashes: Elements<'a, u64> = VT_LOCAL_HASHES,
                scheme: Option<SchemeFields<'a>> = VT_SCHEME,
                token_count: u32 = VT_TOKEN_COUNT,
                lora: Option<&'a str> = VT_LORA,
                salt: Option<&'a str> = VT_SALT,
                media: Elements<'a, fb::MediaHash> = VT_MEDIA,
                book: bool = VT_BOOK,
                candidates_max: u32 = VT_CANDIDATES_MAX or fb::RouteArgs::default().candidates_max,
                allow: Elements<'a, fb::WorkerRef> = VT_ALLOW,
                pin: Option<fb::WorkerRef> = VT_PIN,
                shared_hits: Elements<'a, fb::BlockRange> = VT_SHARED_HITS,
                affinity_session: Option<&'a str> = VT_AFFINITY_SESSION,
                trace: Option<fb::TraceContext> = VT_TRACE,
                $($field: $type = $slot,)*
            }
        }

        const FIELDS: usize = 20 + [$(stringify!($field)),*].len();
        const ROUTE_FIELDS: [(VOffsetT, usize); FIELDS] = [
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
            (fb::Route::VT_OVERRIDES, REFERENCE),
            (fb::Route::VT_SHARED_HITS, REFERENCE),
            (fb::Route::VT_AFFINITY_SESSION, REFERENCE),
            (fb::Route::VT_PIN, 16),
            (fb::Route::VT_TRACE, 32),
            (fb::Route::VT_BOOK, 1),
            $((fb::Route::$slot, size_of::<$type>()),)*
        ];

        /// The request with the plain fields of a route.
        #[inline]
        fn with_plain_fields<'a>(route: &Route<'_>, request: RouteRequest<'a>) -> RouteRequest<'a> {
            RouteRequest { $($field: route.$field,)* ..request }
        }

        fn put_plain_fields(request: &RouteRequest<'_>, table: &mut RouteTable) {
            $(request.$field.put(table, fb::Route::$slot);)*
        }
    };
}

plain_request_fields!(route_table);

const ROUTE_BYTES: usize = places(&ROUTE_FIELDS).1;
// Every request takes the bytes before it.
const _: () = assert!(ROUTE.at(fb::Route::VT_TRACE) + 32 == ROUTE_BYTES, "the trace context has the last place");

const ROUTE_VTABLE_BYTES: usize = vtable_bytes(&ROUTE_FIELDS);
const ROUTE: Layout<ROUTE_BYTES, ROUTE_VTABLE_BYTES> = Layout::packed(&ROUTE_FIELDS);
type RouteTable = Table<'static, ROUTE_BYTES, ROUTE_VTABLE_BYTES>;

hot_tables! {
    SchemeFields of Scheme {
        block_size: u32 = VT_BLOCK_SIZE,
        window: fb::Window = VT_WINDOW,
        seed_rule: fb::SeedRule = VT_SEED_RULE,
    }
}

impl<'a> Field<'a> for Option<SchemeFields<'a>> {
    type Accessed = Option<fb::Scheme<'a>>;

    fn of(accessed: Self::Accessed) -> Self {
        accessed.map(SchemeFields::of)
    }

    fn at(table: &mut TableReader<'a>, at: usize) -> Option<Self> {
        table.nested(at).map(Some)
    }
}

pub(super) fn unnamed_booking() -> Error {
    invalid("book without a request_id", "name the request, unique within the session")
}

pub(super) fn check_candidates_max(candidates_max: usize) -> Result<()> {
    if candidates_max == 0 {
        return Err(invalid("candidates_max is 0", "ask for at least one candidate"));
    }
    Ok(())
}

pub(super) fn decode<'a>(route: &Route<'a>, scratch: &'a mut RequestScratch) -> Result<Request<'a>> {
    understood(route.must_understand)?;
    let request_id = name("request_id", route.request_id)?;
    let book = match (route.book, request_id) {
        (false, _) => None,
        (true, Some(request_id)) => Some(BookingRequest { request_id, attempt: route.attempt }),
        (true, None) => return Err(unnamed_booking()),
    };
    check_candidates_max(route.candidates_max as usize)?;
    let question = Question {
        tokens: route.tokens.bytes,
        local_hashes: route.local_hashes.bytes,
        scheme: route.scheme.as_ref(),
        token_count: route.token_count,
    };
    let RequestScratch { media, allow, constraints, .. } = scratch;
    let Constraints { required_taints, preferred_taints, shared_hits } =
        read_constraints(route.rare.as_ref(), &route.shared_hits, constraints)?;
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
    let request = RouteRequest {
        lora: name("lora", route.lora)?,
        salt: name("salt", route.salt)?,
        media: read_media(&route.media, media)?,
        book,
        candidates_max: (route.candidates_max as usize).min(CANDIDATES_MAX),
        allow,
        pin: route.pin.as_ref().map(worker_from_wire),
        required_taints,
        preferred_taints,
        shared_hits,
        overrides: read_overrides(route.rare.and_then(|table| table.overrides()))?,
        affinity_session: name("affinity_session", route.affinity_session)?,
        trace: route.trace.as_ref().map(trace_from_wire),
        priority_jump: priority_jump(route.priority_jump)?,
        ..RouteRequest::new(SpaceId(route.space_id), prompt(&question)?)
    };
    Ok(Request::Route(with_plain_fields(route, request)))
}

pub(super) fn priority_jump(jump: f64) -> Result<f64> {
    if jump.is_finite() {
        return Ok(jump);
    }
    Err(invalid("priority_jump is not a finite number", "give seconds, or leave it out"))
}

/// The fields that define a prompt, the same in every request about one.
pub(super) struct Question<'q, 'a> {
    pub(super) tokens: Option<&'a [u8]>,
    pub(super) local_hashes: Option<&'a [u8]>,
    pub(super) scheme: Option<&'q SchemeFields<'a>>,
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
        Some(said) => scheme_of_fields(said.block_size, said.window, said.seed_rule)?,
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

/// The whole blocks of a prompt. A bigram block needs one token after its end.
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
    if listed.bytes.is_none() {
        return Ok(&[]);
    }
    media.clear();
    let listed = listed.structs();
    bounded("media", listed.len(), MEDIA_HASHES_MAX)?;
    media.extend(listed.map(|entry| (entry.block(), entry.hash())));
    Ok(media)
}

const SCHEME: Layout<12, 10> = Layout::of(&[
    (fb::Scheme::VT_BLOCK_SIZE, 4),
    (fb::Scheme::VT_WINDOW, 1),
    (fb::Scheme::VT_SEED_RULE, 1),
    (PADDING, 2),
]);

/// Bytes reserved for a request beside its prompt: more than most take.
const REQUEST_BYTES: usize = 512;

impl RequestEncoder {
    /// Appends a route request to `out`, as one frame.
    ///
    /// # Errors
    /// [`Kind::InvalidArgument`](crate::error::Kind::InvalidArgument) if a list is longer than any daemon takes. Nothing
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
            let place = write_required(&mut frame, request.required_taints);
            refer(&mut frame, fb::Route::VT_REQUIRED_TAINTS, place);
        }
        if !request.preferred_taints.names.is_empty() {
            let place = write_preferred(&mut frame, request.preferred_taints);
            refer(&mut frame, fb::Route::VT_PREFERRED_TAINTS, place);
        }
        if request.overrides != Overrides::NONE {
            let place = write_overrides(&mut frame, &request.overrides);
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

/// The table of a request, without its references yet. Fields with the schema's default are left out.
fn route_table(request: &RouteRequest<'_>) -> RouteTable {
    let mut table = ROUTE.blank();
    let (tokens, hashes, token_count) = match request.prompt {
        Prompt::Tokens(_) => (true, false, 0),
        Prompt::LocalHashes { token_count, .. } => (false, true, token_count),
    };
    table.set(fb::Route::VT_SPACE_ID, request.space.0.to_le_bytes());
    request.book.map_or(0, |book| book.attempt).put(&mut table, fb::Route::VT_ATTEMPT);
    table.leave_out(fb::Route::VT_TOKENS, !tokens);
    table.leave_out(fb::Route::VT_LOCAL_HASHES, !hashes);
    table.leave_out(fb::Route::VT_SCHEME, !hashes);
    token_count.put(&mut table, fb::Route::VT_TOKEN_COUNT);
    table.leave_out(fb::Route::VT_MEDIA, request.media.is_empty());
    table.set(fb::Route::VT_CANDIDATES_MAX, u32::try_from(request.candidates_max).unwrap_or(u32::MAX).to_le_bytes());
    table.leave_out(fb::Route::VT_ALLOW, request.allow.is_none());
    table.leave_out(fb::Route::VT_REQUIRED_TAINTS, request.required_taints.is_empty());
    table.leave_out(fb::Route::VT_PREFERRED_TAINTS, request.preferred_taints.names.is_empty());
    table.leave_out(fb::Route::VT_OVERRIDES, request.overrides == Overrides::NONE);
    table.leave_out(fb::Route::VT_SHARED_HITS, request.shared_hits.is_empty());
    table.set_if(fb::Route::VT_PIN, request.pin.map(|worker| worker_to_wire(worker).0));
    table.set_last_if(fb::Route::VT_TRACE, request.trace.map(|trace| trace_to_wire(trace).0));
    request.book.is_some().put(&mut table, fb::Route::VT_BOOK);
    put_plain_fields(request, &mut table);
    for (field, text) in texts(request) {
        table.leave_out(field, text.is_none());
    }
    table
}

/// Buffers for the constraints of a request, reused by the next one.
#[derive(Debug, Default)]
pub(super) struct ConstraintScratch {
    required: Packed,
    preferred: Packed,
    weights: Vec<f64>,
    shared: Vec<(u32, u32)>,
}

/// Names, concatenated.
#[derive(Debug, Default)]
struct Packed {
    text: String,
    ends: Vec<u32>,
}

impl Packed {
    fn clear(&mut self) {
        self.text.clear();
        self.ends.clear();
    }

    fn push(&mut self, field: &str, name: &str) -> Result<()> {
        check_label(field, name)?;
        self.text.push_str(name);
        self.ends.push(self.text.len() as u32);
        Ok(())
    }

    fn names(&self) -> Names<'_> {
        Names::Packed { text: &self.text, ends: &self.ends }
    }
}

pub(super) fn check_label(field: &str, name: &str) -> Result<()> {
    if (1..=NAME_BYTES_MAX).contains(&name.len()) {
        return Ok(());
    }
    let message = format!("{field} has a label of {} bytes", name.len());
    Err(invalid(message, format!("keep labels within 1 to {NAME_BYTES_MAX} bytes")))
}

/// The constraints of a request.
pub(super) struct Constraints<'a> {
    pub(super) required_taints: Names<'a>,
    pub(super) preferred_taints: Preferences<'a>,
    pub(super) shared_hits: &'a [(u32, u32)],
}

/// Reads the constraints into `scratch`. Without a table there are no labels.
pub(super) fn read_constraints<'a>(
    table: Option<&fb::Route<'_>>,
    shared_hits: &Elements<'_, fb::BlockRange>,
    scratch: &'a mut ConstraintScratch,
) -> Result<Constraints<'a>> {
    if table.is_none() && shared_hits.bytes.is_none() {
        // As most requests are.
        let names = Names::Packed { text: "", ends: &[] };
        let preferred_taints = Preferences { names, weights: &[] };
        return Ok(Constraints { required_taints: names, preferred_taints, shared_hits: &[] });
    }
    scratch.required.clear();
    scratch.preferred.clear();
    scratch.weights.clear();
    scratch.shared.clear();
    if let Some(taints) = table.and_then(fb::Route::required_taints) {
        bounded("required_taints", taints.len(), REQUEST_TAINTS_MAX)?;
        taints.iter().try_for_each(|taint| scratch.required.push("required_taints", taint))?;
    }
    if let Some(taints) = table.and_then(fb::Route::preferred_taints) {
        bounded("preferred_taints", taints.len(), REQUEST_TAINTS_MAX)?;
        for taint in taints {
            scratch.preferred.push("preferred_taints", taint.key())?;
            scratch.weights.push(check_label_weight(taint.weight())?);
        }
    }
    let ranges = shared_hits.structs();
    bounded("shared_hits", ranges.len(), SHARED_HITS_MAX)?;
    scratch.shared.extend(ranges.map(|range| (range.start(), range.end())));
    Ok(Constraints {
        required_taints: scratch.required.names(),
        preferred_taints: Preferences { names: scratch.preferred.names(), weights: &scratch.weights },
        shared_hits: &scratch.shared,
    })
}

pub(super) fn check_label_weight(weight: f64) -> Result<f64> {
    finite("preferred_taints.weight", weight, f64::MIN)
}

fn finite(field: &str, value: f64, min: f64) -> Result<f64> {
    match value.is_finite() && value >= min {
        true => Ok(value),
        false if min == 0.0 => Err(invalid(format!("{field} is {value}"), "give a number that is not below 0")),
        false => Err(invalid(format!("{field} is {value}"), "give a number")),
    }
}

/// Reads the values that replace the policy's.
pub(super) fn read_overrides(table: Option<fb::Overrides<'_>>) -> Result<Overrides> {
    let Some(table) = table else { return Ok(Overrides::NONE) };
    let overrides = Overrides {
        mode: match table.mode() {
            fb::Mode::Default => None,
            mode => Some(mode_from_wire(mode).ok_or_else(|| unknown_value("overrides.mode", mode.0))?),
        },
        device_credit: table.device_credit(),
        prefill_load_scale: table.prefill_load_scale(),
        temperature: table.temperature(),
        shared_multiplier: table.shared_multiplier(),
        assume_kv_reuse: table.assume_kv_reuse(),
        track_prefill_tokens: table.track_prefill_tokens(),
    };
    check_overrides(&overrides).map(|()| overrides)
}

pub(super) fn check_overrides(overrides: &Overrides) -> Result<()> {
    let weights = [
        ("overrides.device_credit", overrides.device_credit),
        ("overrides.prefill_load_scale", overrides.prefill_load_scale),
        ("overrides.temperature", overrides.temperature),
        ("overrides.shared_multiplier", overrides.shared_multiplier),
    ];
    let mut set = weights.into_iter().filter_map(|(field, value)| Some((field, value?)));
    set.try_for_each(|(field, value)| finite(field, value, 0.0).map(drop))
}

const TAINT: Layout<16, 8> = Layout::of(&[(fb::Taint::VT_KEY, REFERENCE), (fb::Taint::VT_WEIGHT, 8)]);

const OVERRIDES: Layout<40, 18> = Layout::of(&[
    (fb::Overrides::VT_MODE, 1),
    (fb::Overrides::VT_ASSUME_KV_REUSE, 1),
    (fb::Overrides::VT_TRACK_PREFILL_TOKENS, 1),
    (PADDING, 1),
    (fb::Overrides::VT_DEVICE_CREDIT, 8),
    (fb::Overrides::VT_PREFILL_LOAD_SCALE, 8),
    (fb::Overrides::VT_TEMPERATURE, 8),
    (fb::Overrides::VT_SHARED_MULTIPLIER, 8),
]);

/// Writes the required labels. Returns the vector's place.
pub(super) fn write_required(frame: &mut FrameWriter<'_>, taints: Names<'_>) -> usize {
    let vector = frame.references(taints.len());
    for (n, taint) in taints.iter().enumerate() {
        let place = frame.string(taint);
        frame.refer(element(vector, n), place);
    }
    vector
}

/// Writes the preferred labels. Returns the vector's place.
pub(super) fn write_preferred(frame: &mut FrameWriter<'_>, taints: Preferences<'_>) -> usize {
    let vector = frame.references(taints.iter().count());
    for (n, (key, weight)) in taints.iter().enumerate() {
        let mut taint = TAINT.blank();
        taint.set(fb::Taint::VT_WEIGHT, weight.to_le_bytes());
        let place = frame.table(taint);
        let key = frame.string(key);
        frame.refer_field((&TAINT, place), fb::Taint::VT_KEY, key);
        frame.refer(element(vector, n), place);
    }
    vector
}

/// Writes the values that replace the policy's. Returns the table's place.
pub(super) fn write_overrides(frame: &mut FrameWriter<'_>, set: &Overrides) -> usize {
    let mut table = OVERRIDES.blank();
    table.set_if(fb::Overrides::VT_MODE, set.mode.map(|mode| [mode_to_wire(mode).0]));
    table.set_if(fb::Overrides::VT_DEVICE_CREDIT, set.device_credit.map(f64::to_le_bytes));
    table.set_if(fb::Overrides::VT_PREFILL_LOAD_SCALE, set.prefill_load_scale.map(f64::to_le_bytes));
    table.set_if(fb::Overrides::VT_TEMPERATURE, set.temperature.map(f64::to_le_bytes));
    table.set_if(fb::Overrides::VT_SHARED_MULTIPLIER, set.shared_multiplier.map(f64::to_le_bytes));
    table.set_if(fb::Overrides::VT_ASSUME_KV_REUSE, set.assume_kv_reuse.map(|is_so| [u8::from(is_so)]));
    table.set_if(fb::Overrides::VT_TRACK_PREFILL_TOKENS, set.track_prefill_tokens.map(|is_so| [u8::from(is_so)]));
    frame.table(table)
}
