//! The fast path's reading of a body against that of flatbuffers' verifier and accessors.

use super::*;
use crate::limits::REQUEST_TABLES_MAX;
use crate::wire::table::{HotTable, TableReader};
use crate::wire::{decode_reply, read_only_requests, report_codec, route_request_codec, table};

/// The fields of a body, by the fast path and by the verifier.
fn both_ways<'a, T: HotTable<'a>>(body: &'a [u8]) -> (Option<T>, Option<T>) {
    let at_once = TableReader::root(body).and_then(|mut table| T::read(&mut table));
    let verified = table::root::<T::Table>(body, REQUEST_TABLES_MAX).ok().map(T::of);
    (at_once, verified)
}

/// Whether the fast path reads a body. If it does, asserts that it reads what the verifier's way reads.
pub(super) fn is_hot(kind: FrameKind, body: &[u8]) -> bool {
    let (mut one, mut two) = (RequestScratch::default(), RequestScratch::default());
    macro_rules! same {
        ($decode:expr $(, $scratch:ident)?) => {{
            let (at_once, verified) = both_ways(body);
            let Some(at_once) = at_once else { return false };
            let verified = verified.expect("a body that the fast path reads passes the verifier");
            same!(@compare $decode, at_once, verified $(, $scratch)?)
        }};
        (@compare $decode:expr, $one:ident, $two:ident) => { (format!("{:?}", $decode(&$one)), format!("{:?}", $decode(&$two))) };
        (@compare $decode:expr, $one:ident, $two:ident, scratch) => {
            (format!("{:?}", $decode(&$one, &mut one)), format!("{:?}", $decode(&$two, &mut two)))
        };
    }
    let (at_once, verified) = match kind {
        FrameKind::Route => same!(route_request_codec::decode, scratch),
        FrameKind::Overlap => same!(read_only_requests::overlap, scratch),
        FrameKind::PotentialLoads => same!(read_only_requests::potential_loads, scratch),
        FrameKind::PrefillComplete => same!(report_codec::prefill_complete),
        FrameKind::Free => same!(report_codec::free),
        FrameKind::OutputProgress => same!(report_codec::output_progress),
        FrameKind::Served => same!(report_codec::served),
        FrameKind::RouteReply => same!(decode_reply::route_reply),
        other => panic!("{other:?} is not hot"),
    };
    assert_eq!(at_once, verified);
    true
}

/// Bodies with the fields whose bits are set, in the order of the schema, of every hot kind.
fn bodies(fields: u32, (number, text): (u32, &str), prompt: &[u32]) -> Vec<(FrameKind, Vec<u8>)> {
    let has = |at: u32| fields & 1 << at != 0;
    let (number_wide, handle) = (u64::from(number) << 7, fb::BookingHandle::new(u64::from(number), 1));
    let worker = fb::WorkerRef::new(number_wide, number);
    let trace = fb::TraceContext::new(number_wide, 1, u64::from(number), number);
    let mut bodies = Vec::new();
    macro_rules! body {
        ($table:ident, $args:ident, |$b:ident, $a:ident| $fill:block) => {{
            let ($b, mut $a) = (&mut FlatBufferBuilder::new(), fb::$args::default());
            $fill
            let root = fb::$table::create($b, &$a);
            $b.finish(root, Some(FRAME_IDENTIFIER));
            bodies.push((FrameKind::$table, $b.finished_data().to_vec()));
        }};
    }
    macro_rules! question {
        ($b:ident, $a:ident) => {
            $a.space_id = if has(0) { number } else { 0 };
            $a.must_understand = u64::from(has(1));
            if has(2) {
                $a.tokens = Some($b.create_vector(prompt));
            } else {
                let hashes: Vec<u64> = prompt.iter().map(|hash| u64::from(*hash) << 20).collect();
                $a.local_hashes = Some($b.create_vector(&hashes));
                let args = fb::SchemeArgs { block_size: 1, window: fb::Window(u8::from(has(3))), ..Default::default() };
                $a.scheme = Some(fb::Scheme::create($b, &args));
                $a.token_count = prompt.len() as u32 + u32::from(has(3));
            }
            $a.lora = has(4).then(|| $b.create_string(text));
            $a.salt = has(5).then(|| $b.create_string(text));
            $a.media = has(6).then(|| $b.create_vector(&[fb::MediaHash::new(number, number_wide)]));
        };
    }
    body!(Overlap, OverlapArgs, |b, a| {
        question!(b, a);
    });
    body!(PotentialLoads, PotentialLoadsArgs, |b, a| {
        question!(b, a);
    });
    body!(Route, RouteArgs, |b, a| {
        question!(b, a);
        a.request_id = has(7).then(|| b.create_string(text));
        (a.attempt, a.book, a.explain) = (number & u32::from(has(8)), has(9), has(10));
        a.candidates_max = if has(11) { number } else { 8 };
        a.allow = has(12).then(|| b.create_vector(&[worker, worker]));
        a.pin = has(13).then_some(&worker);
        a.shared_hits = has(14).then(|| b.create_vector(&[fb::BlockRange::new(1, number)]));
        a.affinity_session = has(15).then(|| b.create_string(text));
        (a.priority, a.deadline_us) = (-i32::from(has(16)), u32::from(has(17)));
        (a.priority_jump, a.disaggregate) = (f64::from(u8::from(has(18))), has(19) != has(20));
        a.trace = has(22).then_some(&trace);
        let taint = b.create_string(text);
        a.required_taints = has(21).then(|| b.create_vector(&[taint]));
    });
    macro_rules! report {
        ($table:ident, $args:ident $(, $field:ident: $value:expr)?) => {
            body!($table, $args, |b, a| {
                a.booking = has(0).then_some(&handle);
                a.request_id = has(1).then(|| b.create_string(text));
                a.attempt = number;
                $(a.$field = $value;)?
            })
        };
    }
    report!(Free, FreeArgs);
    report!(PrefillComplete, PrefillCompleteArgs, prefill_us: number_wide);
    report!(OutputProgress, OutputProgressArgs, output_tokens: number);
    report!(Served, ServedArgs, worker: has(2).then_some(&worker));
    bodies
}

proptest! {
    #[test]
    fn the_fast_path_reads_what_the_verifiers_way_reads(
        fields in any::<u32>(), number in any::<u32>(), text in "\\PC{0,12}", prompt in proptest::collection::vec(any::<u32>(), 0..40),
    ) {
        for (kind, body) in bodies(fields, (number, &text), &prompt) {
            let has_rare = kind == FrameKind::Route && fields & 1 << 21 != 0;
            prop_assert_eq!(is_hot(kind, &body), !has_rare, "{}", kind.name());
        }
    }

    #[test]
    fn lies_do_not_get_past_the_reader(
        fields in any::<u32>(), number in any::<u32>(), prompt in proptest::collection::vec(any::<u32>(), 0..6),
        lies in proptest::collection::vec((any::<prop::sample::Index>(), prop_oneof![any::<u8>(), 0_u8..48, Just(0xff_u8)]), 1..4), cut in 0_usize..24,
    ) {
        for (kind, mut body) in bodies(fields & !(1 << 21), (number, "name"), &prompt) {
            for (at, value) in &lies {
                let at = at.index(body.len());
                body[at] = *value;
            }
            body.truncate(body.len() - cut.saturating_sub(20));
            is_hot(kind, &body);
        }
    }
}

/// Parts of a body may lie on one another; each counts for what it takes.
#[test]
fn fields_may_share_their_text() {
    let mut builder = FlatBufferBuilder::new();
    let text = builder.create_string(&"x".repeat(NAME_BYTES_MAX));
    let tokens = builder.create_vector(&[1_u32]);
    let shared = Some(text);
    let args =
        fb::RouteArgs { tokens: Some(tokens), lora: shared, salt: shared, request_id: shared, ..Default::default() };
    let root = fb::Route::create(&mut builder, &args);
    builder.finish(root, Some(FRAME_IDENTIFIER));
    assert!(is_hot(FrameKind::Route, builder.finished_data()));
}
