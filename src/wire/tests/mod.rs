//! Both halves of the protocol against each other, and the daemon's half against everything else.

mod built;
mod hot;
mod replies;
mod written;

use std::sync::Arc;

use flatbuffers::FlatBufferBuilder;
use proptest::prelude::*;

use super::*;
use crate::error::{Error, Kind, Side};
use crate::fleet::{FleetTable, SchemeCell, Space, WorkerRecord};
use crate::ids::{CorrelationId, EventSeq, Scheme, SpaceId, TierBlocks, Window, Worker, WorkerIndex, WorkerSlot};
use crate::limits::{CANDIDATES_MAX, FRAME_HEADER_BYTES, NAME_BYTES_MAX};
use crate::protocol::OtherLoad;
use crate::protocol::{
    BookingHandle, BookingOutcome, BookingRef, BookingRequest, CostTerms, EngineLoad, MatchStatus, Mode, Names,
    Overrides, PoolRole, Preferences, Prompt, ReplyNotes, RouteRequest, SessionToken, TraceContext, WorkerState,
};
use crate::route::{Decision, Rule, Scored};
use crate::schema_generated::routing as fb;
use crate::trust::{Trust, TrustLevel, TrustReason};

const ID: CorrelationId = CorrelationId(0xfeed);
const LANE: LaneRequest = LaneRequest { request_ring_bytes: 4096, reply_ring_bytes: 0 };
const PLAIN_4: Scheme = Scheme { block_size: 4, window: Window::Plain };

/// Header and body of the only frame in `bytes`.
fn split(bytes: &[u8]) -> (FrameHeader, &[u8]) {
    let header = FrameHeader::parse(bytes.first_chunk().unwrap()).unwrap();
    let body = &bytes[FRAME_HEADER_BYTES..];
    assert_eq!((header.body_bytes as usize, header.correlation_id), (body.len(), ID));
    (header, body)
}

fn question(prompt: Prompt<'_>) -> RouteRequest<'_> {
    RouteRequest::new(SpaceId(3), prompt)
}

fn le_bytes(tokens: &[u32]) -> Vec<u8> {
    tokens.iter().flat_map(|token| token.to_le_bytes()).collect()
}

/// A route body made by hand, for what the encoder would never send.
fn raw_route(fill: impl FnOnce(&mut FlatBufferBuilder<'static>, &mut fb::RouteArgs<'static>)) -> Vec<u8> {
    let mut builder = FlatBufferBuilder::new();
    let tokens = builder.create_vector(&[1_u32, 2, 3]);
    let mut args = fb::RouteArgs { tokens: Some(tokens), ..fb::RouteArgs::default() };
    fill(&mut builder, &mut args);
    let root = fb::Route::create(&mut builder, &args);
    builder.finish(root, Some(FRAME_IDENTIFIER));
    builder.finished_data().to_vec()
}

fn route_error(body: &[u8]) -> Error {
    decode_request(FrameKind::Route as u8, body, &mut RequestScratch::default()).unwrap_err()
}

/// A value of a plain field that frames do not leave out.
trait Example {
    const EXAMPLE: Self;
}

impl Example for bool {
    const EXAMPLE: Self = true;
}

impl Example for u32 {
    const EXAMPLE: Self = 70;
}

impl Example for i32 {
    const EXAMPLE: Self = -3;
}

impl Example for f64 {
    const EXAMPLE: Self = 1.5;
}

macro_rules! define_example {
    ($($(#[$doc:meta])* $field:ident: $type:ty = $default:expr, $slot:ident;)*) => {
        fn with_every_plain_field(request: RouteRequest<'_>) -> RouteRequest<'_> {
            RouteRequest { $($field: <$type>::EXAMPLE,)* ..request }
        }
    };
}

crate::protocol::plain_request_fields!(define_example);

const TRACE: TraceContext = TraceContext { trace_id: 1 << 127 | 2, span_id: u64::MAX, flags: 1 };

/// A frame without a trace context has no bytes for one.
#[test]
fn a_trace_context_takes_bytes_only_where_there_is_one() {
    let (tokens, mut encoder) = (le_bytes(&[1, 2, 3]), RequestEncoder::default());
    let mut bytes_of = |trace| {
        let mut out = Vec::new();
        encoder.route(ID, &RouteRequest { trace, ..question(Prompt::Tokens(&tokens)) }, &mut out).unwrap();
        let (header, body) = split(&out);
        let mut scratch = RequestScratch::default();
        let decoded = decode_request(header.kind, body, &mut scratch).unwrap();
        let Request::Route(decoded) = decoded else { panic!("{decoded:?}") };
        assert_eq!(decoded.trace, trace);
        out.len()
    };
    let (without, with) = (bytes_of(None), bytes_of(Some(TRACE)));
    assert_eq!(with - without, 32);
    // A caller's mistake is the tracer's to judge: the request itself is answered.
    assert_eq!(bytes_of(Some(TraceContext::default())), with);
}

/// A daemon of the release before reads a frame with a context as one with a field that it does not know.
#[test]
fn a_field_beyond_the_known_ones_is_ignored() {
    let beyond = fb::Route::VT_TRACE + 2;
    let mut builder = FlatBufferBuilder::new();
    let tokens = builder.create_vector(&[1_u32, 2]);
    let table = builder.start_table();
    builder.push_slot_always(beyond, fb::TraceContext::new(1, 2, 3, 1));
    builder.push_slot_always(fb::Route::VT_TOKENS, tokens);
    let root = builder.end_table(table);
    builder.finish(flatbuffers::WIPOffset::<fb::Route<'_>>::new(root.value()), Some(FRAME_IDENTIFIER));
    let body = builder.finished_data();
    let mut scratch = RequestScratch::default();
    let Request::Route(decoded) = decode_request(FrameKind::Route as u8, body, &mut scratch).unwrap() else {
        panic!("no route")
    };
    assert_eq!((decoded.trace, decoded.prompt), (None, Prompt::Tokens(&le_bytes(&[1, 2]))));
}

#[test]
fn requests_round_trip() {
    let (mut encoder, mut scratch) = (RequestEncoder::default(), RequestScratch::default());
    let tokens = le_bytes(&[1, 2, u32::MAX]);
    let (media, allow) = ([(0, 7), (2, u64::MAX)], [Worker::new(1, 0), Worker::new(2, u32::MAX)]);
    let full = RouteRequest {
        lora: Some("adapter"),
        salt: Some("salt"),
        media: &media,
        book: Some(BookingRequest { request_id: "r-1", attempt: 2 }),
        candidates_max: 3,
        allow: Some(&allow),
        pin: Some(Worker::new(7, u32::MAX)),
        required_taints: Names::Listed(&["zone-a", "h100"]),
        preferred_taints: Preferences { names: Names::Listed(&["spot"]), weights: &[-0.5] },
        shared_hits: &[(0, 4), (9, u32::MAX)],
        overrides: Overrides {
            mode: Some(Mode::Lmetric),
            device_credit: Some(0.0),
            prefill_load_scale: Some(2.5),
            temperature: Some(0.1),
            shared_multiplier: Some(1.0),
            assume_kv_reuse: Some(false),
            track_prefill_tokens: Some(true),
        },
        affinity_session: Some("conversation"),
        trace: Some(TRACE),
        ..with_every_plain_field(question(Prompt::Tokens(&tokens)))
    };
    let hashes = [5_u64.to_le_bytes(), 6_u64.to_le_bytes()].concat();
    let hashed = question(Prompt::LocalHashes { hashes: &hashes, scheme: PLAIN_4, token_count: 11 });
    let empty_allow_list = RouteRequest { allow: Some(&[]), ..question(Prompt::Tokens(&[])) };
    for request in [full, hashed, empty_allow_list] {
        let mut out = Vec::new();
        encoder.route(ID, &request, &mut out).unwrap();
        let (header, body) = split(&out);
        assert_eq!(decode_request(header.kind, body, &mut scratch).unwrap(), Request::Route(request));
        assert_eq!(hot::is_hot(FrameKind::Route, body), request.required_taints.is_empty());
        assert!(table::root::<fb::Route<'_>>(body, 9).is_ok(), "{request:?}");
        let mut out = Vec::new();
        encoder.overlap(ID, &request, &mut out).unwrap();
        let (header, body) = split(&out);
        let RouteRequest { space, prompt, lora, salt, media, .. } = request;
        let asked = RouteRequest { space, lora, salt, media, candidates_max: CANDIDATES_MAX, ..question(prompt) };
        assert_eq!(decode_request(header.kind, body, &mut scratch).unwrap(), Request::Overlap(asked));
        let mut out = Vec::new();
        encoder.potential_loads(ID, &request, &mut out).unwrap();
        let (header, body) = split(&out);
        assert_eq!(decode_request(header.kind, body, &mut scratch).unwrap(), Request::PotentialLoads(asked));
    }
}

#[test]
fn small_requests_round_trip() {
    let mut encoder = RequestEncoder::default();
    let token = SessionToken { hi: 1, lo: 2 };
    let handle = BookingRef::Handle(BookingHandle { slot: 0, generation: 4 });
    let named = BookingRef::Request { request_id: "r", attempt: 3 };
    let hello = Hello { version_min: 1, version_max: 1, client_name: "gw", session: Some(token) };
    let said = EngineLoad { prefill_tokens: 1, decode_blocks: 2, running: 3, waiting: 4, kv_usage_millionths: 999_999 };
    type Encode<'a> = &'a dyn Fn(&mut RequestEncoder, &mut Vec<u8>);
    let cases: [(Encode<'_>, Request<'_>); 12] = [
        (
            &|e, out| e.watch(ID, None, (0, 0), out),
            Request::Watch { space: None, fleet_version_seen: 0, page_limit: 0 },
        ),
        (
            &|e, out| e.watch(ID, Some(SpaceId(3)), (9, 256), out),
            Request::Watch { space: Some(SpaceId(3)), fleet_version_seen: 9, page_limit: 256 },
        ),
        (&|e, out| e.hello(ID, "gw", Some(token), out), Request::Hello(hello)),
        (
            &|e, out| e.prefill_complete(ID, &handle, 12, out),
            Request::PrefillComplete { booking: handle, prefill_us: 12 },
        ),
        (
            &|e, out| e.output_progress(ID, &named, 12, out),
            Request::OutputProgress { booking: named, output_tokens: 12 },
        ),
        (
            &|e, out| e.served(ID, &handle, Worker::new(9, 2), out),
            Request::Served { booking: handle, worker: Worker::new(9, 2) },
        ),
        (
            &|e, out| e.report_load(ID, (SpaceId(1), Worker::new(9, 2)), &said, out),
            Request::ReportLoad { space: SpaceId(1), worker: Worker::new(9, 2), load: said },
        ),
        (
            &|e, out| e.report_failure(ID, (SpaceId(1), Worker::new(9, 2)), "timeout", out),
            Request::ReportFailure { space: SpaceId(1), worker: Worker::new(9, 2), reason: "timeout" },
        ),
        (&|e, out| e.free(ID, &named, out), Request::Free(named)),
        (&|e, out| e.workers(ID, None, 4, 5, out), Request::Workers { space: None, cursor: 4, limit: 5 }),
        (
            &|e, out| e.workers(ID, Some(SpaceId(0)), 0, 0, out),
            Request::Workers { space: Some(SpaceId(0)), cursor: 0, limit: 0 },
        ),
        (&|e, out| e.open_lane(ID, LANE, out), Request::OpenLane(LANE)),
    ];
    for (encode, expected) in cases {
        let mut out = Vec::new();
        encode(&mut encoder, &mut out);
        let (header, body) = split(&out);
        assert_eq!(decode_request(header.kind, body, &mut RequestScratch::default()).unwrap(), expected);
    }
}

#[test]
fn every_request_with_an_unknown_feature_bit_is_refused() {
    macro_rules! body {
        ($table:ident, $args:ident) => {{
            let mut builder = FlatBufferBuilder::new();
            let args = fb::$args { must_understand: 1 << 63, ..fb::$args::default() };
            let root = fb::$table::create(&mut builder, &args);
            builder.finish(root, Some(FRAME_IDENTIFIER));
            (FrameKind::$table, builder.finished_data().to_vec())
        }};
    }
    let bodies = [
        body!(Route, RouteArgs),
        body!(Overlap, OverlapArgs),
        body!(PrefillComplete, PrefillCompleteArgs),
        body!(OutputProgress, OutputProgressArgs),
        body!(Served, ServedArgs),
        body!(ReportLoad, ReportLoadArgs),
        body!(ReportFailure, ReportFailureArgs),
        body!(Free, FreeArgs),
        body!(Workers, WorkersArgs),
        body!(OpenLane, OpenLaneArgs),
    ];
    for (kind, body) in bodies {
        let error = decode_request(kind as u8, &body, &mut RequestScratch::default()).unwrap_err();
        assert_eq!(error.kind(), Kind::Unsupported, "{}", kind.name());
        assert!(error.message().contains("must_understand bit 63"), "{error}");
    }
}

#[test]
fn versions_are_negotiated() {
    let hello = |version_min, version_max| Hello { version_min, version_max, client_name: "", session: None };
    assert_eq!(hello(1, 1).negotiate().unwrap(), 1);
    assert_eq!(hello(0, 9).negotiate().unwrap(), 1);
    assert_eq!(hello(2, 9).negotiate().unwrap_err().kind(), Kind::UnsupportedVersion);
    assert_eq!(hello(9, 0).negotiate().unwrap_err().kind(), Kind::UnsupportedVersion);
}

#[test]
fn an_unserved_field_is_refused_by_name() {
    type Fill = fn(&mut FlatBufferBuilder<'static>, &mut fb::RouteArgs<'static>);
    let overrides = |args: fb::OverridesArgs| raw_route(|b, a| a.overrides = Some(fb::Overrides::create(b, &args)));
    let fills: [(&str, Fill); 1] = [("must_understand bit 40", |_, a| a.must_understand = 1 << 40 | 1)];
    let mut bodies: Vec<_> = fills.into_iter().map(|(name, fill)| (name, raw_route(fill))).collect();
    bodies.push(("overrides.mode", overrides(fb::OverridesArgs { mode: fb::Mode(200), ..Default::default() })));
    for (name, body) in bodies {
        let error = route_error(&body);
        assert_eq!(error.kind(), Kind::Unsupported, "{name}");
        assert!(error.message().contains(name), "{error}");
    }
    let defaults = raw_route(|b, a| {
        a.must_understand = features::SERVED;
        a.overrides = Some(fb::Overrides::create(b, &fb::OverridesArgs::default()));
        a.affinity_session = Some(b.create_string(""));
    });
    assert!(decode_request(FrameKind::Route as u8, &defaults, &mut RequestScratch::default()).is_ok());
    for kind in [FrameKind::RouteReply as u8, FrameKind::WatchReply as u8, 201] {
        let error = decode_request(kind, &defaults, &mut RequestScratch::default()).unwrap_err();
        assert_eq!(error.kind(), Kind::Unsupported);
        assert!(error.message().contains(&kind.to_string()), "{error}");
    }
}

#[test]
fn values_that_mean_nothing_are_refused_by_name() {
    let scheme = |b: &mut FlatBufferBuilder<'static>, block_size| {
        let args = fb::SchemeArgs { block_size, ..Default::default() };
        Some(fb::Scheme::create(b, &args))
    };
    let hashes = |b: &mut FlatBufferBuilder<'static>, n: usize| Some(b.create_vector(&vec![1_u64; n]));
    let cases = [
        ("neither tokens nor local_hashes", raw_route(|_, a| a.tokens = None)),
        ("both tokens and local_hashes", raw_route(|b, a| a.local_hashes = hashes(b, 1))),
        ("scheme beside tokens", raw_route(|b, a| a.scheme = scheme(b, 4))),
        ("token_count says 4", raw_route(|_, a| a.token_count = 4)),
        ("book without a request_id", raw_route(|_, a| a.book = true)),
        ("candidates_max is 0", raw_route(|_, a| a.candidates_max = 0)),
        ("salt has 257 bytes", raw_route(|b, a| a.salt = Some(b.create_string(&"x".repeat(NAME_BYTES_MAX + 1))))),
        (
            "without a usable scheme",
            raw_route(|b, a| {
                (a.tokens, a.local_hashes) = (None, hashes(b, 1));
                a.token_count = 4;
            }),
        ),
        (
            "without a usable scheme",
            raw_route(|b, a| (a.tokens, a.local_hashes, a.scheme) = (None, hashes(b, 1), scheme(b, 0))),
        ),
        (
            "2 local_hashes for 7 tokens, which make 1 whole block",
            raw_route(|b, a| {
                (a.tokens, a.local_hashes, a.scheme) = (None, hashes(b, 2), scheme(b, 4));
                a.token_count = 7;
            }),
        ),
    ];
    for (what, body) in cases {
        let error = route_error(&body);
        assert_eq!(error.kind(), Kind::InvalidArgument, "{error}");
        assert!(error.message().contains(what), "{error}");
        assert!(!error.remedy().is_empty());
    }
    let bigram = raw_route(|b, a| {
        let args = fb::SchemeArgs { block_size: 4, window: fb::Window::Bigram, ..Default::default() };
        (a.tokens, a.local_hashes, a.scheme) = (None, hashes(b, 1), Some(fb::Scheme::create(b, &args)));
        a.token_count = 8;
    });
    assert!(decode_request(FrameKind::Route as u8, &bigram, &mut RequestScratch::default()).is_ok());
    let mut out = Vec::new();
    RequestEncoder::default().hello(ID, "gw", Some(SessionToken { hi: 0, lo: 0 }), &mut out);
    let (header, body) = split(&out);
    assert_eq!(
        decode_request(header.kind, body, &mut RequestScratch::default()).unwrap_err().kind(),
        Kind::InvalidArgument
    );
}

#[test]
fn constraints_that_mean_nothing_are_refused_by_name() {
    let cases = [
        (
            "overrides.temperature is -1",
            raw_route(|b, a| {
                let args = fb::OverridesArgs { temperature: Some(-1.0), ..Default::default() };
                a.overrides = Some(fb::Overrides::create(b, &args));
            }),
        ),
        (
            "preferred_taints.weight is NaN",
            raw_route(|b, a| {
                let key = b.create_string("gpu");
                let taint = fb::Taint::create(b, &fb::TaintArgs { key: Some(key), weight: f64::NAN });
                a.preferred_taints = Some(b.create_vector(&[taint]));
            }),
        ),
        (
            "required_taints is 33",
            raw_route(|b, a| {
                let taint = b.create_string("gpu");
                a.required_taints = Some(b.create_vector(&[taint; 33]));
            }),
        ),
        (
            "shared_hits is 1025",
            raw_route(|b, a| a.shared_hits = Some(b.create_vector(&[fb::BlockRange::new(0, 1); 1025]))),
        ),
    ];
    for (what, body) in cases {
        let error = route_error(&body);
        assert_eq!(error.kind(), Kind::InvalidArgument, "{error}");
        assert!(error.message().contains(what) && !error.remedy().is_empty(), "{error}");
    }
}

#[test]
fn a_small_body_cannot_cost_a_large_walk() {
    // Many elements that all point at one string: each verifies, together they exceed the body's share.
    let body = raw_route(|b, a| {
        let long = b.create_string(&"x".repeat(4000));
        a.required_taints = Some(b.create_vector(&vec![long; 4000]));
    });
    assert_eq!(route_error(&body).kind(), Kind::Malformed);
}

#[test]
fn a_jump_that_orders_nothing_is_refused() {
    for jump in [f64::NAN, f64::INFINITY] {
        let error = route_error(&raw_route(|_, a| a.priority_jump = jump));
        assert!(error.kind() == Kind::InvalidArgument && error.message().contains("priority_jump"), "{error}");
    }
}
