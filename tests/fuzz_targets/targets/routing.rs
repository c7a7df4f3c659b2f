//! The routing protocol: frames are split as a plain reader splits them, requests survive our encoder.

use kvrouted::error::Error;
use kvrouted::ids::CorrelationId;
use kvrouted::limits::{
    ALLOW_LIST_MAX, CANDIDATES_MAX, FRAME_HEADER_BYTES, MEDIA_HASHES_MAX, NAME_BYTES_MAX, POLICY_SETTINGS_MAX,
    PROMPT_TOKENS_MAX, RECEIVE_BUFFER_BYTES_MIN, WORKER_FIELDS_MAX,
};
use kvrouted::load::BookingRef;
use kvrouted::serve::{Connection, Flow, Peer, Respond};
use kvrouted::wire::{
    AdminRequest, FrameHeader, FrameKind, PROTOCOL_VERSION, PolicyOrder, Request, RequestEncoder, RequestScratch,
    decode_reply, decode_request,
};

/// Largest body of the connections under test.
const BODY_BYTES_MAX: u32 = 4096;

/// A kind and the body of a request.
pub(crate) fn request(data: &[u8]) {
    let Some((kind, body)) = data.split_first() else { return };
    let (mut scratch, mut other) = (RequestScratch::default(), RequestScratch::default());
    let request = decode_request(*kind, body, &mut scratch);
    // A body lies at any address.
    let moved: Vec<u8> = std::iter::once(0).chain(body.iter().copied()).collect();
    let again = decode_request(*kind, &moved[1..], &mut other);
    match (&request, &again) {
        (Ok(one), Ok(two)) => assert_eq!(one, two),
        (Err(one), Err(two)) => assert_eq!((one.kind(), one.message()), (two.kind(), two.message())),
        _ => panic!("{request:?} and, elsewhere, {again:?}"),
    }
    match request {
        Ok(request) => {
            within_bounds(&request);
            goes_round(&request);
        }
        Err(error) => assert!(!error.message().is_empty() && !error.remedy().is_empty()),
    }
}

fn within_bounds(request: &Request<'_>) {
    let name = |text: &str| assert!(text.len() <= NAME_BYTES_MAX);
    match request {
        Request::Hello(hello) => name(hello.client_name),
        Request::Route(route) | Request::Overlap(route) | Request::PotentialLoads(route) => {
            assert!(route.prompt.token_count() <= PROMPT_TOKENS_MAX && route.media.len() <= MEDIA_HASHES_MAX);
            assert!((1..=CANDIDATES_MAX).contains(&route.candidates_max));
            assert!(route.allow.is_none_or(|allow| allow.len() <= ALLOW_LIST_MAX));
            route.lora.iter().chain(route.salt.iter()).for_each(|text| name(text));
            route.book.iter().for_each(|book| name(book.request_id));
        }
        Request::PrefillComplete { booking, .. }
        | Request::OutputProgress { booking, .. }
        | Request::Served { booking, .. }
        | Request::Free(booking) => {
            if let BookingRef::Request { request_id, .. } = booking {
                name(request_id);
            }
        }
        Request::Admin(AdminRequest::ChangeWorker(change)) => assert!(change.fields.len() <= WORKER_FIELDS_MAX),
        Request::Admin(AdminRequest::SetPolicy(PolicyOrder::Shadow { settings, share })) => {
            assert!(settings.len() <= POLICY_SETTINGS_MAX && (0.0..=1.0).contains(share));
        }
        Request::Workers { .. }
        | Request::Watch { .. }
        | Request::ReportLoad { .. }
        | Request::ReportFailure { .. }
        | Request::Admin(_)
        | Request::OpenLane(_) => {}
    }
}

/// Encodes what gateways tell of bookings and workers.
fn encode_told(encoder: &mut RequestEncoder, id: CorrelationId, told: &Request<'_>, out: &mut Vec<u8>) -> FrameKind {
    match told {
        Request::PrefillComplete { booking, prefill_us } => {
            encoder.prefill_complete(id, booking, *prefill_us, out);
            FrameKind::PrefillComplete
        }
        Request::OutputProgress { booking, output_tokens } => {
            encoder.output_progress(id, booking, *output_tokens, out);
            FrameKind::OutputProgress
        }
        Request::ReportLoad { space, worker, load } => {
            encoder.report_load(id, (*space, *worker), load, out);
            FrameKind::ReportLoad
        }
        Request::ReportFailure { space, worker, reason } => {
            encoder.report_failure(id, (*space, *worker), reason, out);
            FrameKind::ReportFailure
        }
        Request::Served { booking, worker } => {
            encoder.served(id, booking, *worker, out);
            FrameKind::Served
        }
        Request::Free(booking) => {
            encoder.free(id, booking, out);
            FrameKind::Free
        }
        question => panic!("no report: {question:?}"),
    }
}

/// A gateway that asks the same is understood the same.
fn goes_round(request: &Request<'_>) {
    let (mut encoder, mut out, id) = (RequestEncoder::default(), Vec::new(), CorrelationId(7));
    let sent = |encoded: Result<(), Error>| encoded.expect("within what any daemon takes");
    let kind = match request {
        Request::Hello(hello) => {
            let versions = (hello.version_min, hello.version_max);
            encoder.hello_range(id, versions, hello.client_name, hello.session, &mut out);
            FrameKind::Hello
        }
        Request::Route(route) => {
            sent(encoder.route(id, route, &mut out));
            FrameKind::Route
        }
        Request::Overlap(route) => {
            sent(encoder.overlap(id, route, &mut out));
            FrameKind::Overlap
        }
        Request::PotentialLoads(route) => {
            sent(encoder.potential_loads(id, route, &mut out));
            FrameKind::PotentialLoads
        }
        Request::Workers { space, cursor, limit } => {
            encoder.workers(id, *space, *cursor, *limit, &mut out);
            FrameKind::Workers
        }
        Request::Watch { space, fleet_version_seen, page_limit } => {
            encoder.watch(id, *space, (*fleet_version_seen, *page_limit), &mut out);
            FrameKind::Watch
        }
        Request::Admin(request) => {
            encoder.admin(id, request, &mut out);
            request.kind()
        }
        Request::OpenLane(asked) => {
            encoder.open_lane(id, *asked, &mut out);
            FrameKind::OpenLane
        }
        told => encode_told(&mut encoder, id, told, &mut out),
    };
    let (head, body) = out.split_first_chunk().expect("a header");
    let header = FrameHeader::parse(head).expect("a header that is sound");
    assert_eq!((header.kind, header.body_bytes as usize, header.correlation_id), (kind as u8, body.len(), id));
    assert_eq!(header.encode(), *head);
    let mut scratch = RequestScratch::default();
    let again = decode_request(header.kind, body, &mut scratch).expect("what is encoded can be decoded");
    assert_eq!(again, *request);
}

/// A kind and the body of a reply, as a client reads it.
pub(crate) fn reply(data: &[u8]) {
    let Some((kind, body)) = data.split_first() else { return };
    let moved: Vec<u8> = std::iter::once(0).chain(body.iter().copied()).collect();
    let (one, two) = (decode_reply(*kind, body), decode_reply(*kind, &moved[1..]));
    // By what is shown of them: costs may be no number.
    assert_eq!(format!("{one:?}"), format!("{two:?}"));
}

/// What came of a stream of frames: answered ones with their bodies, refused ones without.
#[derive(Debug, Default, PartialEq, Eq)]
struct Log {
    frames: Vec<(u64, Option<Vec<u8>>)>,
}

impl Respond for Log {
    fn respond(&mut self, _: &mut Peer, header: &FrameHeader, body: &[u8], _: &mut Vec<u8>) {
        self.frames.push((header.correlation_id.0, Some(body.to_vec())));
    }

    fn refuse(&mut self, id: CorrelationId, _: &Error, _: &mut Vec<u8>) {
        self.frames.push((id.0, None));
    }

    fn closed(&mut self, _: &mut Peer) {}
}

/// How many bytes each read brings, then what they are.
pub(crate) fn frames(data: &[u8]) {
    let Some((step, stream)) = data.split_first() else { return };
    let step = usize::from(*step) * 7 + 1;
    let (mut connection, mut log, mut out) = (Connection::new(0, BODY_BYTES_MAX), Log::default(), Vec::new());
    let mut closed = false;
    for chunk in stream.chunks(step) {
        let mut buffer = connection.take_buffer();
        assert!(buffer.capacity() > buffer.len(), "there is room to read");
        let bytes_max = FRAME_HEADER_BYTES + BODY_BYTES_MAX as usize + 2 * RECEIVE_BUFFER_BYTES_MIN;
        assert!(buffer.capacity() <= bytes_max, "{} bytes", buffer.capacity());
        buffer.extend_from_slice(chunk);
        connection.give_back(buffer);
        let flow = loop {
            let flow = connection.on_bytes(&mut log, &mut out);
            if !matches!(flow, Flow::Yield | Flow::Write) {
                break flow;
            }
        };
        if let Flow::Close { .. } = flow {
            closed = true;
            break;
        }
    }
    let (expected, fault) = plain(stream);
    assert_eq!((log, closed), (expected, fault));
    connection.on_closed(&mut Log::default());
}

/// The frames of a stream that lies there whole, and whether one of them cannot be trusted.
fn plain(mut stream: &[u8]) -> (Log, bool) {
    let mut log = Log::default();
    while let Some((head, rest)) = stream.split_first_chunk::<FRAME_HEADER_BYTES>() {
        let Ok(header) = FrameHeader::parse(head) else { return (log, true) };
        let id = header.correlation_id.0;
        let bytes = header.body_bytes as usize;
        if header.body_bytes > BODY_BYTES_MAX {
            log.frames.push((id, None));
            stream = rest.get(bytes..).unwrap_or_default();
            continue;
        }
        let Some((body, rest)) = rest.split_at_checked(bytes) else { break };
        log.frames.push((id, (header.version == PROTOCOL_VERSION).then(|| body.to_vec())));
        stream = rest;
    }
    (log, false)
}
