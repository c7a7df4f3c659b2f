//! What the daemon sends, and both decoders against garbage.

use super::*;
use crate::limits::CLIENT_SPACES_MAX;
use crate::protocol::{PotentialLoad, PotentialLoads};

fn terms(seed: f64) -> CostTerms {
    CostTerms {
        request_blocks: seed,
        prefill: seed + 1.0,
        decay: 0.5,
        taint_factor: 1.0,
        affinity_factor: 0.5,
        cost: seed * 2.0,
        ..CostTerms::default()
    }
}

fn decision() -> (Decision, FleetTable) {
    let trust = Trust {
        level: TrustLevel::LowerBound,
        reasons: [TrustReason::JoinedLate].into_iter().collect(),
        since_unix_ms: 5,
        as_of_seq: Some(EventSeq(0)),
        as_of_unix_ms: 6,
    };
    let scored = |n: u32| Scored {
        index: WorkerIndex(n),
        worker: Worker::new(u64::from(n) + 10, n),
        overlap: TierBlocks { device: n, host: 1, disk: 2, external: 3 },
        trust: if n == 0 { trust } else { Trust::default() },
        state: WorkerState::Ready,
        terms: terms(f64::from(n)),
    };
    let decision = Decision {
        candidates: (0..3).map(scored).collect(),
        eligible: 4,
        ties: 2,
        matched: MatchStatus::Unmatchable,
        notes: ReplyNotes::READ_CONTENDED,
        request_blocks: 12,
        policy_version: 1,
        fleet_version: 2,
        index_epoch: 3,
        booking: Some(BookingHandle { slot: 0, generation: 9 }),
        removed: vec![
            (Rule::Down, Worker::new(1, 0)),
            (Rule::NotAllowed, Worker::new(2, 0)),
            (Rule::Down, Worker::new(3, 0)),
        ],
        eligible_rows: vec![0, 1],
        seed: 3,
        mode: Mode::LeastLoaded,
        no_worker: None,
        shares_blocks: true,
        tracks_prefill: true,
        ..Decision::default()
    };
    let space = Space {
        id: SpaceId(0),
        model: "m".into(),
        namespace: "ns".into(),
        role: PoolRole::Decode,
        scheme: Arc::new(SchemeCell::new(Some(PLAIN_4))),
    };
    (decision, FleetTable { version: 2, spaces: vec![space], workers: Vec::new() })
}

#[test]
fn a_route_reply_round_trips() {
    let (mut encoder, (decision, fleet)) = (ReplyEncoder::default(), decision());
    for explain in [false, true] {
        let mut out = Vec::new();
        encoder.route(ID, &decision, explain, &fleet, &mut out);
        let (header, body) = split(&out);
        let Reply::Route(reply) = decode_reply(header.kind, body).unwrap() else { panic!("another kind") };
        for (got, sent) in reply.candidates.iter().zip(&decision.candidates) {
            assert_eq!(
                (got.worker, got.overlap, got.trust, got.state),
                (sent.worker, sent.overlap, sent.trust, sent.state)
            );
            assert_eq!((got.cost, got.terms), (sent.terms.cost, explain.then_some(sent.terms)));
        }
        assert_eq!((reply.candidates.len(), reply.eligible, reply.ties), (3, 4, 2));
        assert_eq!((reply.matched, reply.notes, reply.booking), (decision.matched, decision.notes, decision.booking));
        let versions = (reply.request_blocks, reply.policy_version, reply.fleet_version, reply.index_epoch);
        assert_eq!(versions, (12, 1, 2, 3));
        assert_eq!((reply.mode, reply.nobody, reply.retry_after_us), (Some(Mode::LeastLoaded), 0, 0));
        assert_eq!(reply.chosen().unwrap().worker, Worker::new(10, 0));
        let removed = [
            ("not_allowed".to_owned(), vec![Worker::new(2, 0)]),
            ("down".to_owned(), vec![Worker::new(1, 0), Worker::new(3, 0)]),
        ];
        assert_eq!(reply.removed, if explain { removed.to_vec() } else { Vec::new() });
    }
    let mut out = Vec::new();
    encoder.route(
        ID,
        &Decision { candidates: Vec::new(), no_worker: Some(Kind::AllBusy), ..decision },
        false,
        &fleet,
        &mut out,
    );
    let (header, body) = split(&out);
    let Reply::Route(reply) = decode_reply(header.kind, body).unwrap() else { panic!("another kind") };
    assert_eq!((reply.candidates.len(), reply.removed.len()), (0, 2), "who removed them is said unasked");
    assert_eq!((reply.nobody, reply.retry_after_us), (Kind::AllBusy as u16, 10_000));
    let error = reply.chosen().unwrap_err();
    assert_eq!((error.kind(), error.message()), (Kind::AllBusy, "no worker is eligible: 1 not_allowed, 2 down"));
    let silent = RouteReply { nobody: 0, ..reply };
    assert_eq!(silent.chosen().unwrap_err().kind(), Kind::NobodyAvailable, "from a daemon that does not say");
}

#[test]
fn the_other_replies_round_trip() {
    let (mut encoder, (decision, fleet)) = (ReplyEncoder::default(), decision());
    let limits = ServerLimits { frame_body_bytes_max: 1, prompt_tokens_max: 2, ..Default::default() };
    let facts = HelloFacts { version: 1, instance_id: 8, limits, features: 7, admin_socket: Some("/run/a") };
    let lane = LaneOpened { layout: 1, request_ring_bytes: 4096, reply_ring_bytes: 8192 };
    let load =
        PotentialLoad { worker: Worker::new(9, 1), active_requests: 3, prefill_tokens: u64::MAX, decode_blocks: 5 };
    let potential = PotentialLoads {
        workers: vec![load, PotentialLoad { worker: Worker::new(9, 2), ..load }],
        matched: MatchStatus::Unmatchable,
        request_blocks: 6,
        notes: ReplyNotes::SCHEME_UNKNOWN,
    };
    let refusal = Error::new(Kind::Overloaded, "full", "wait");
    let mut replies = Vec::new();
    let mut encode = |encode: &mut dyn FnMut(&mut ReplyEncoder, &mut Vec<u8>)| {
        let mut out = Vec::new();
        encode(&mut encoder, &mut out);
        let (header, body) = split(&out);
        replies.push(decode_reply(header.kind, body).unwrap());
    };
    encode(&mut |e, out| e.hello(ID, &facts, &fleet, out));
    encode(&mut |e, out| e.prefill_complete(ID, BookingOutcome::Superseded, 8, out));
    encode(&mut |e, out| e.free(ID, BookingOutcome::Unknown, 8, out));
    encode(&mut |e, out| e.output_progress(ID, BookingOutcome::Applied, 8, out));
    encode(&mut |e, out| e.report_load(ID, true, out));
    encode(&mut |e, out| e.report_failure(ID, 500, out));
    encode(&mut |e, out| e.served(ID, BookingOutcome::AlreadyApplied, 8, out));
    encode(&mut |e, out| e.overlap(ID, &decision, out));
    encode(&mut |e, out| e.potential_loads(ID, &potential, out));
    encode(&mut |e, out| e.lane_opened(ID, lane, out));
    encode(&mut |e, out| e.error(ID, &refusal, out));
    let [
        Reply::Hello(hello),
        Reply::PrefillComplete(done),
        Reply::Free(freed),
        Reply::OutputProgress(BookingOutcome::Applied),
        Reply::ReportLoad(true),
        Reply::ReportFailure(500),
        Reply::Served(BookingOutcome::AlreadyApplied),
        Reply::Overlap(overlap),
        Reply::PotentialLoads(loads),
        Reply::OpenLane(opened),
        Reply::Error(error),
    ] = replies.as_slice()
    else {
        panic!("other kinds: {replies:?}")
    };
    assert_eq!((hello.version, hello.instance_id, hello.limits, hello.features), (1, 8, limits, 7));
    assert_eq!(*opened, lane);
    assert_eq!(hello.admin_socket.as_deref(), Some(std::path::Path::new("/run/a")));
    let (model, namespace) = ("m".to_owned(), "ns".to_owned());
    assert_eq!(
        hello.spaces,
        [SpaceInfo { id: SpaceId(0), model, namespace, role: PoolRole::Decode, scheme: Some(PLAIN_4) }]
    );
    assert_eq!((*done, *freed), (BookingOutcome::Superseded, BookingOutcome::Unknown));
    let overlaps: Vec<_> = overlap.workers.iter().map(|entry| entry.overlap.device).collect();
    assert_eq!((overlaps, overlap.matched, overlap.request_blocks), (vec![0, 1, 2], MatchStatus::Unmatchable, 12));
    assert_eq!(loads, &potential);
    assert_eq!((error.kind, error.side, error.retryable), (Some(Kind::Overloaded), Side::Daemon, true));
    assert!(error.retry_after_us > 0);
    let error = Error::from(error.clone());
    assert_eq!((error.kind(), error.message(), error.remedy()), (Kind::Overloaded, "full", "wait"));
}

#[test]
fn an_unknown_error_code_keeps_its_number() {
    let remote = RemoteError {
        code: 999,
        kind: None,
        side: Side::Daemon,
        retryable: false,
        retry_after_us: 0,
        message: "new".into(),
        remedy: "update".into(),
    };
    assert!(Error::from(remote).message().contains("999"));
}

/// One valid body of every request kind.
fn valid_bodies() -> Vec<(u8, Vec<u8>)> {
    let mut encoder = RequestEncoder::default();
    let tokens = le_bytes(&[1, 2, 3, 4, 5]);
    let (media, allow) = ([(0, 7)], [Worker::new(1, 0)]);
    let book = Some(BookingRequest { request_id: "r-1", attempt: 2 });
    let request =
        RouteRequest { lora: Some("l"), media: &media, allow: Some(&allow), book, ..question(Prompt::Tokens(&tokens)) };
    let mut outs = vec![Vec::new(); 7];
    encoder.hello(ID, "gw", Some(SessionToken { hi: 1, lo: 1 }), &mut outs[0]);
    encoder.route(ID, &request, &mut outs[1]).unwrap();
    encoder.overlap(ID, &request, &mut outs[2]).unwrap();
    encoder.free(ID, &BookingRef::Request { request_id: "x", attempt: 1 }, &mut outs[3]);
    encoder.workers(ID, None, 1, 2, &mut outs[4]);
    let (decision, fleet) = decision();
    ReplyEncoder::default().route(ID, &decision, true, &fleet, &mut outs[5]);
    let fields = [("id".to_owned(), "1".to_owned())];
    let change = WorkerChange { op: WorkerOp::Set, worker: None, fields: &fields };
    encoder.admin(ID, &AdminRequest::ChangeWorker(change), &mut outs[6]);
    outs.iter().map(|out| (split(out).0.kind, split(out).1.to_vec())).collect()
}

proptest! {
    #[test]
    fn garbage_is_refused_without_a_panic(kind in any::<u8>(), mut body in proptest::collection::vec(any::<u8>(), 0..300), named: bool) {
        if named && body.len() >= 8 {
            body[4..8].copy_from_slice(FRAME_IDENTIFIER.as_bytes());
        }
        let mut scratch = RequestScratch::default();
        let _ = decode_request(kind, &body, &mut scratch);
        let _ = decode_reply(kind, &body);
    }

    #[test]
    fn a_valid_body_with_lies_in_it_never_panics(
        which in 0_usize..7, lies in proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6), cut in any::<prop::sample::Index>(), shorten: bool,
    ) {
        let (kind, mut body) = valid_bodies().swap_remove(which);
        for (at, value) in lies {
            let at = at.index(body.len());
            body[at] = value;
        }
        if shorten {
            body.truncate(cut.index(body.len()));
        }
        let mut scratch = RequestScratch::default();
        if let Ok(Request::Route(request)) = decode_request(kind, &body, &mut scratch) {
            // What verified lies within the body.
            let (Prompt::Tokens(bytes) | Prompt::LocalHashes { hashes: bytes, .. }) = request.prompt;
            prop_assert!(body.as_ptr_range().contains(&bytes.as_ptr()) && bytes.len() <= body.len());
        }
        let _ = decode_reply(kind, &body);
    }

    #[test]
    fn any_prompt_round_trips(tokens in proptest::collection::vec(any::<u32>(), 0..2000), salt in "[a-z]{1,20}") {
        let bytes = le_bytes(&tokens);
        let request = RouteRequest { salt: Some(&salt), ..question(Prompt::Tokens(&bytes)) };
        let mut out = Vec::new();
        RequestEncoder::default().route(ID, &request, &mut out).unwrap();
        let (header, body) = split(&out);
        let mut scratch = RequestScratch::default();
        prop_assert_eq!(decode_request(header.kind, body, &mut scratch).unwrap(), Request::Route(request));
    }
}

/// A worker in place `place` that another one may have had before.
fn named(place: u32, worker: u64, name: &str) -> WorkerRecord {
    let slot = WorkerSlot(place as u16);
    WorkerRecord { name: name.to_owned(), ..WorkerRecord::new(WorkerIndex(place), Worker::new(worker, 1), slot) }
}

#[test]
fn names_are_those_of_the_fleet_table_of_the_reply() {
    let (mut encoder, (decision, fleet)) = (ReplyEncoder::default(), decision());
    let mut names = |version: u64, workers: Vec<WorkerRecord>| {
        let fleet = FleetTable { version, workers, ..fleet.clone() };
        let listed = fleet.workers.iter().map(|record| Scored {
            index: record.index,
            worker: record.worker,
            ..decision.candidates[0]
        });
        let decision = Decision { candidates: listed.collect(), ..decision.clone() };
        // Twice: made, and made before.
        let replies = [(); 2].map(|()| {
            let mut out = Vec::new();
            encoder.route(ID, &decision, false, &fleet, &mut out);
            out
        });
        assert_eq!(replies[0], replies[1]);
        let (header, body) = split(&replies[1]);
        let Reply::Route(reply) = decode_reply(header.kind, body).unwrap() else { panic!("another kind") };
        let worker =
            |it: &crate::wire::Candidate| (it.name.clone(), it.worker, it.overlap, it.trust, it.cost.to_bits());
        let sent = fleet.workers.iter().map(|record| {
            let Scored { overlap, trust, terms, .. } = decision.candidates[0];
            (record.name.clone(), record.worker, overlap, trust, terms.cost.to_bits())
        });
        assert_eq!(reply.candidates.iter().map(worker).collect::<Vec<_>>(), sent.collect::<Vec<_>>());
    };
    names(1, vec![named(0, 1, "a"), named(5, 2, "b")]);
    names(2, vec![named(0, 1, "renamed"), named(5, 2, "b"), named(6, 3, "")]);
    // Around the length beyond which a name has no template.
    for (version, bytes) in (3..).zip(50..70) {
        names(version, vec![named(0, 1, &"n".repeat(bytes)), named(5, 2, &"ä".repeat(bytes / 2)), named(6, 7, "c")]);
    }
}

#[test]
fn a_hello_with_more_spaces_than_any_daemon_has_is_refused() {
    let of = |count: usize| {
        let mut builder = FlatBufferBuilder::new();
        let model = Some(builder.create_string("m"));
        let scheme = Some(fb::Scheme::create(&mut builder, &fb::SchemeArgs::default()));
        let space = fb::SpaceArgs { model, scheme, ..fb::SpaceArgs::default() };
        let spaces: Vec<_> = (0..count).map(|_| fb::Space::create(&mut builder, &space)).collect();
        let spaces = Some(builder.create_vector(&spaces));
        let limits = Some(fb::Limits::create(&mut builder, &fb::LimitsArgs::default()));
        let args = fb::HelloReplyArgs { limits, spaces, ..fb::HelloReplyArgs::default() };
        let root = fb::HelloReply::create(&mut builder, &args);
        builder.finish(root, Some(FRAME_IDENTIFIER));
        decode_reply(FrameKind::HelloReply as u8, builder.finished_data())
    };
    assert!(of(CLIENT_SPACES_MAX).is_ok());
    assert_eq!(of(CLIENT_SPACES_MAX + 1).unwrap_err().kind(), Kind::Malformed);
}
