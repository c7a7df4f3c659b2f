//! Seeds for mutations, from the project's own encoders and from recordings of engines.

mod bookings;
mod engine_snapshots;
mod journals;
mod load_events;

use std::path::{Path, PathBuf};

use kvrouted::event::{
    BatchInfo, Cleared, Content, GroupKind, KvEvent, Medium, Removed, Salt, Snapshot, SnapshotPhase, SourceTrust,
    Stored, flat,
};
use kvrouted::ids::{
    CorrelationId, DpRank, EngineHash, EventSeq, GroupId, LocalHash, Scheme, Seed, SpaceId, Tier, Window, Worker,
    WorkerId,
};
use kvrouted::index::StoreBlocks;
use kvrouted::ingest::{DumpBegin, DumpChunk, References};
use kvrouted::limits::{TOKEN_BYTES_MAX, TOKEN_BYTES_MIN};
use kvrouted::load::{BookingOutcome, BookingRef, EngineLoad, LearntClass, LearntLaws, LearntWorker, SessionToken};
use kvrouted::remote::opening::{self, Verdict};
use kvrouted::route::{BookingHandle, BookingRequest, Prompt, RouteRequest};
use kvrouted::snapshot::{Encoder, Header, SpaceName, encode_laws};
use kvrouted::trust::{Trust, TrustLevel, TrustReasons};
use kvrouted::wire::{
    AdminReply, AdminRequest, FrameHeader, FrameKind, HelloFacts, PolicyOrder, ReplyEncoder, RequestEncoder,
    ServerLimits, StatusPage, WorkerChange, WorkerOp,
};
use kvrouted::zmtp::{self, Role};
use kvrouted::{config, error, fleet};

use crate::targets::apply::{self, Step};
use crate::targets::lane;
use crate::vllm::Batch;

const PLAIN: Scheme = Scheme { block_size: 4, window: Window::Plain };
const BIGRAM: Scheme = Scheme { block_size: 2, window: Window::Bigram };

/// Seeds of a target; `recordings` are folders with recordings of engines, which events are taken from.
pub(crate) fn of(target: &str, recordings: &[PathBuf]) -> Vec<Vec<u8>> {
    match target {
        "msgpack" => recordings.iter().flat_map(|folder| recorded(folder)).flatten().chain(vllm_batches()).collect(),
        "flatbuffer" => flatbuffers(),
        "gate" | "recovery" => steps(),
        "apply" => streams(recordings),
        "request" => requests().iter().map(|frame| kind_and_body(frame)).collect(),
        "reply" => replies().iter().map(|frame| kind_and_body(frame)).collect(),
        "frames" => frame_streams(),
        "snapshot" => snapshots(),
        "bookings" => bookings::images(),
        "journal" => journals::journals(),
        "config" => configurations(),
        "endpoint" => endpoints(),
        "load_stat" => load_stats(),
        "load_events" => load_events::load_events(),
        "lane" => lane_steps(),
        "zmtp" => peers(),
        "opening" => openings(),
        "engine_snapshot" => engine_snapshots::answers(),
        _ => Vec::new(),
    }
}

/// Callers' openings with the shortest and the longest token, and both answers.
fn openings() -> Vec<Vec<u8>> {
    let with = |bytes: usize| opening::encode(&vec![b't'; bytes]);
    let answers = [Verdict::Accepted, Verdict::Refused].map(|verdict| opening::answer(verdict).to_vec());
    [with(TOKEN_BYTES_MIN), with(TOKEN_BYTES_MAX), with(0)].into_iter().chain(answers).collect()
}

/// Both ends of what the daemon and a relay say to each other, and of what libzmq says.
fn peers() -> Vec<Vec<u8>> {
    let (batch, end) = (zmtp::message(&[b"", &[7; 8]], &[1; 300]), zmtp::message(&[b"", b"", &[0xff; 8]], b""));
    let said = |role: u8, as_socket: Role, rest: &[&[u8]]| {
        [&[role, 16][..], &zmtp::greeting(), &zmtp::ready(as_socket), &zmtp::ping(), &rest.concat()].concat()
    };
    let longer = [&[1, 1, 0][..], &[3, 0, 0, 0, 0, 0, 0, 0, 2, 9, 9], &[2, 0, 0, 0, 0, 0, 0, 1, 0], &[5; 256]].concat();
    vec![
        said(0, Role::Publisher, &[&batch, &zmtp::pong(b"context"), &batch]),
        said(0, Role::Publisher, &[&longer]),
        said(1, Role::Router, &[&batch, &end]),
        said(2, Role::Subscriber, &[b"\x04\x0a\x09SUBSCRIBE", b"\x04\x08\x06CANCELt", b"\0\x01\x01"]),
        said(3, Role::Dealer, &[&zmtp::message(&[b""], &[0; 8])]),
    ]
}

/// Rings that are filled and read in steps of several lengths, and one of each lie.
fn lane_steps() -> Vec<Vec<u8>> {
    let honest = |words: u8, reads: &[u8]| {
        let mut steps = Vec::new();
        for round in 0..5_u8 {
            for at in 0..words {
                let place = round.wrapping_mul(words).wrapping_add(at) % lane::WORDS as u8;
                steps.extend([lane::Step::Store as u8, place]);
                steps.extend(u64::from_be_bytes([round, at, 3, 4, 5, 6, 7, 8]).to_le_bytes());
            }
            steps.extend([lane::Step::Publish as u8, words]);
            steps.extend(reads.iter().flat_map(|words| [lane::Step::Read as u8, *words]));
        }
        steps
    };
    let lie = |tail: u64| {
        let mut steps = honest(3, &[3]);
        steps.push(lane::Step::Lie as u8);
        steps.extend(tail.to_le_bytes());
        steps.extend([lane::Step::Read as u8, 255]);
        steps
    };
    let mut seeds = vec![honest(1, &[1]), honest(7, &[2, 4, 255]), honest(32, &[31, 1]), honest(9, &[10])];
    seeds.extend([0, 14, 15 + 32, 15 + 33, u64::MAX].map(lie));
    seeds
}

/// Readings of the lengths that engines send, and of numbers of each width.
fn load_stats() -> Vec<Vec<u8>> {
    let numbers: [&[u8]; 4] = [&[7], &[0xcc, 200], &[0xcd, 1, 2], &[0xcf, 0, 0, 0, 1, 2, 3, 4, 5]];
    let reading = |places: u8, number: &[u8]| {
        let counts = (2..places).map(|place| if place == 5 { &[0xc0][..] } else { number });
        [&[0x90 | places, 0xa8][..], b"LoadStat", number].into_iter().chain(counts).collect::<Vec<_>>().concat()
    };
    let lengths = [6, 7, 11, 15];
    lengths.iter().flat_map(|places| numbers.map(|number| reading(*places, number))).collect()
}

/// The payloads of each recording in a folder, and in the folders in it; their layout is in
/// tests/fixtures/events/README.md.
fn recorded(folder: &Path) -> Vec<Vec<Vec<u8>>> {
    let Ok(entries) = std::fs::read_dir(folder) else { return Vec::new() };
    let mut paths: Vec<_> = entries.flatten().map(|entry| entry.path()).collect();
    paths.sort();
    let mut recordings = Vec::new();
    for path in paths {
        if path.is_dir() {
            recordings.extend(recorded(&path));
        } else if path.extension().is_some_and(|extension| extension == "bin") {
            let bytes = std::fs::read(&path).unwrap_or_default();
            recordings.push(payloads(&bytes));
        }
    }
    recordings
}

fn payloads(mut recording: &[u8]) -> Vec<Vec<u8>> {
    let mut payloads = Vec::new();
    while let Some((frames, rest)) = length(recording) {
        recording = rest;
        let mut last = Vec::new();
        for _ in 0..frames {
            let Some((bytes, rest)) = length(recording) else { return payloads };
            let Some((frame, rest)) = rest.split_at_checked(bytes) else { return payloads };
            (last, recording) = (frame.to_vec(), rest);
        }
        // The end of a replay has none.
        if !last.is_empty() {
            payloads.push(last);
        }
    }
    payloads
}

fn length(bytes: &[u8]) -> Option<(usize, &[u8])> {
    let (head, rest) = bytes.split_first_chunk()?;
    Some((u32::from_le_bytes(*head) as usize, rest))
}

/// Batches of one engine that stores, extends, removes and stores again.
fn vllm_batches() -> Vec<Vec<u8>> {
    let batches = [
        Batch::new(0).stored(None, &[1, 2, 3], &[1, 2, 3]).stored(Some(3), &[4], &[4]),
        Batch::new(1).stored(Some(2), &[5, 6], &[5, 6]).removed(&[3]).stored_with(
            None,
            &[9],
            &[1, 2, 3, 4],
            4,
            Some("CPU"),
            &[("lora_name", "adapter"), ("cache_salt", "salt")],
        ),
        Batch::new(2).removed(&[4, 6]).removed_from(&[9], Some("CPU")),
        Batch::new(3).stored(Some(2), &[3], &[3]).rank(None).other("BlockUpdated"),
        Batch::new(4).cleared().stored(None, &[1], &[1]),
        // More tokens than blocks have, and fewer.
        Batch::new(5).stored_with(None, &[1], &[1, 2, 3, 4, 5, 6], 4, Some("GPU"), &[]),
        Batch::new(6).stored_with(None, &[1, 2], &[1, 2, 3, 4, 5, 6], 4, Some("GPU"), &[]),
    ];
    batches.iter().map(Batch::payload).collect()
}

fn stored<'a>(hashes: &'a [EngineHash], parent: Option<u64>, content: Content<'a>, block_size: u32) -> Stored<'a> {
    Stored {
        hashes,
        parent: parent.map(EngineHash),
        content,
        block_size,
        medium: Medium::Tier(Tier::Device),
        group: GroupId(0),
        group_kind: GroupKind::Main,
        lora: None,
        salt: Salt::Inherited,
        media: &[],
    }
}

/// Batches of a relay, each with what the others do not have.
fn flatbuffers() -> Vec<Vec<u8>> {
    let hashes = [EngineHash(1), EngineHash(2), EngineHash(3)];
    let tokens: Vec<u32> = (1..=12).collect();
    let plain = stored(&hashes, None, Content::Tokens { tokens: &tokens, bigram: false }, 4);
    let bigram = stored(&hashes, Some(1), Content::Tokens { tokens: &tokens[..7], bigram: true }, 2);
    let locals = [LocalHash(1), LocalHash(2), LocalHash(3)];
    let hashed = stored(&hashes, None, Content::LocalHashes(&locals), 4);
    let named = Stored { lora: Some("adapter"), salt: Salt::Of("salt"), media: &[(0, 7), (2, 9)], ..plain };
    let host = Stored { medium: Medium::Tier(Tier::Host), group: GroupId(1), salt: Salt::Unknown, ..hashed };
    let relayed = Stored { salt: Salt::Seed(Seed(7)), ..hashed };
    let removed = Removed { hashes: &hashes[1..], medium: Medium::Tier(Tier::Device), group: GroupId(0) };
    let of_batch = |scheme| BatchInfo { scheme, published_at_unix_s: 1.5, generation: Some(3), ..BatchInfo::default() };
    let said = BatchInfo {
        worker_id: Some(WorkerId(1)),
        dp_rank: Some(DpRank(0)),
        source: Some(SourceTrust { level: TrustLevel::Unproven, reasons: TrustReasons::from_bits(3) }),
        heartbeat_last_seq: Some(EventSeq(9)),
        ..of_batch(Some(PLAIN))
    };
    let snapshot = Snapshot {
        id: 1,
        phase: SnapshotPhase::Chunk,
        watermark: EventSeq(4),
        chunk: 2,
        chunks: 3,
        blocks: 100,
        digest: 77,
        watermark_hash: 0,
    };
    let batches: [(BatchInfo, Vec<KvEvent<'_>>); 6] = [
        (of_batch(Some(PLAIN)), vec![KvEvent::Stored(plain), KvEvent::Removed(removed)]),
        (of_batch(Some(BIGRAM)), vec![KvEvent::Stored(bigram), KvEvent::Cleared(Cleared { tier: Some(Tier::Host) })]),
        (of_batch(Some(PLAIN)), vec![KvEvent::Stored(hashed), KvEvent::Stored(host), KvEvent::Removed(removed)]),
        (of_batch(None), vec![KvEvent::Stored(named), KvEvent::Cleared(Cleared { tier: None })]),
        (said, Vec::new()),
        (BatchInfo { snapshot: Some(snapshot), ..of_batch(Some(PLAIN)) }, vec![KvEvent::Stored(relayed)]),
    ];
    let mut encoder = flat::Encoder::new();
    batches.into_iter().map(|(info, events)| encoder.encode(&info, events).to_vec()).collect()
}

/// What a gate or a recovery is made to see.
fn steps() -> Vec<Vec<u8>> {
    let ordinary = [0, 1].repeat(100);
    let broken = [[0, 1].repeat(5), vec![5, 0, 0, 1, 4, 3, 7, 0, 0, 0x90]].concat();
    let replayed = [vec![0, 0, 5, 0], (0..12).flat_map(|seq| [8, 0xc0 + seq]).collect(), vec![13, 0]].concat();
    let failing = [vec![0, 0], [5, 200, 14, 255, 5, 255].repeat(30)].concat();
    let mixed = (0..200_u8).flat_map(|at| [at.wrapping_mul(37), at.wrapping_mul(101)]).collect();
    vec![ordinary, broken, replayed, failing, mixed]
}

fn streams(recordings: &[PathBuf]) -> Vec<Vec<u8>> {
    let own = [vllm_batches(), flatbuffers()];
    let all = own.into_iter().chain(recordings.iter().flat_map(|folder| recorded(folder)));
    let steps = [Step::Next, Step::Next, Step::Twice, Step::Next, Step::Next, Step::Lost, Step::Broken, Step::Restart];
    all.flat_map(|payloads| {
        let short = || payloads.iter().filter(|payload| payload.len() <= usize::from(u16::MAX)).take(40).cloned();
        let whole: Vec<_> = short().map(|payload| (Step::Next, payload)).collect();
        let troubled: Vec<_> = steps.iter().copied().cycle().zip(short().chain(short())).collect();
        [apply::messages(&whole), apply::messages(&troubled)]
    })
    .collect()
}

fn requests() -> Vec<Vec<u8>> {
    let (mut encoder, id, mut frames) = (RequestEncoder::default(), CorrelationId(1), Vec::new());
    let mut frame = |write: &mut dyn FnMut(&mut RequestEncoder, &mut Vec<u8>)| {
        let mut out = Vec::new();
        write(&mut encoder, &mut out);
        frames.push(out);
    };
    let tokens: Vec<u32> = (0..40).collect();
    let plain = RouteRequest::new(SpaceId(0), Prompt::of_tokens(&tokens));
    let hashes: Vec<u8> = (0..10_u64).flat_map(u64::to_le_bytes).collect();
    let hashed = Prompt::LocalHashes { hashes: &hashes, scheme: PLAIN, token_count: 41 };
    let allow = [Worker::new(1, 0), Worker::new(2, u32::MAX)];
    let full = RouteRequest {
        lora: Some("adapter"),
        salt: Some("salt"),
        media: &[(0, 5), (3, 6)],
        book: Some(BookingRequest { request_id: "request", attempt: 2 }),
        explain: true,
        allow: Some(&allow),
        expected_output_tokens: 100,
        ..RouteRequest::new(SpaceId(1), hashed)
    };
    let handle = BookingRef::Handle(BookingHandle { slot: 3, generation: 4 });
    let named = BookingRef::Request { request_id: "request", attempt: 1 };
    frame(&mut |encoder, out| encoder.hello(id, "gateway", None, out));
    frame(&mut |encoder, out| encoder.hello(id, "gateway", Some(SessionToken { hi: 1, lo: 2 }), out));
    frame(&mut |encoder, out| encoder.route(id, &plain, out).expect("a short prompt"));
    frame(&mut |encoder, out| encoder.route(id, &full, out).expect("a short prompt"));
    frame(&mut |encoder, out| encoder.overlap(id, &full, out).expect("a short prompt"));
    frame(&mut |encoder, out| encoder.prefill_complete(id, &handle, 1000, out));
    frame(&mut |encoder, out| encoder.output_progress(id, &handle, 1000, out));
    frame(&mut |encoder, out| encoder.served(id, &named, Worker::new(1, 0), out));
    let (here, load) = ((SpaceId(1), Worker::new(1, 0)), EngineLoad { running: 3, ..EngineLoad::default() });
    frame(&mut |encoder, out| encoder.report_load(id, here, &load, out));
    frame(&mut |encoder, out| encoder.report_failure(id, here, "timeout", out));
    frame(&mut |encoder, out| encoder.free(id, &named, out));
    frame(&mut |encoder, out| encoder.workers(id, Some(SpaceId(1)), 1, 10, out));
    frame(&mut |encoder, out| encoder.admin(id, &AdminRequest::Status { cursor: 0, limit: 0 }, out));
    let fields = [("model".to_owned(), "m".to_owned())];
    let change = WorkerChange { op: WorkerOp::Set, worker: Some(Worker::new(1, 0)), fields: &fields };
    frame(&mut |encoder, out| encoder.admin(id, &AdminRequest::ChangeWorker(change), out));
    frame(&mut |encoder, out| {
        let order = kvrouted::wire::ResetOrder { worker: None, engine_cleared: true };
        encoder.admin(id, &AdminRequest::Reset(order), out)
    });
    let settings = [("device_credit".to_owned(), "0.5".to_owned())];
    let shadow = PolicyOrder::Shadow { settings: &settings, share: 0.5 };
    frame(&mut |encoder, out| encoder.admin(id, &AdminRequest::SetPolicy(shadow), out));
    frame(&mut |encoder, out| encoder.admin(id, &AdminRequest::RunningConfig { cursor: 1 }, out));
    frames
}

fn replies() -> Vec<Vec<u8>> {
    let (mut encoder, id, mut frames) = (ReplyEncoder::default(), CorrelationId(1), Vec::new());
    let fleet = fleet::FleetTable::default();
    let facts = HelloFacts {
        version: 1,
        instance_id: 5,
        limits: ServerLimits::default(),
        features: 3,
        admin_socket: Some("a.sock"),
    };
    let page = AdminReply::Status(StatusPage {
        counters: vec![("requests".into(), 4)],
        uptime_ms: 9,
        ..StatusPage::default()
    });
    let refused = error::Error::new(error::Kind::Malformed, "the body does not verify", "send another");
    let mut frame = |write: &mut dyn FnMut(&mut ReplyEncoder, &mut Vec<u8>)| {
        let mut out = Vec::new();
        write(&mut encoder, &mut out);
        frames.push(out);
    };
    frame(&mut |encoder, out| encoder.hello(id, &facts, &fleet, out));
    frame(&mut |encoder, out| encoder.free(id, BookingOutcome::Applied, 5, out));
    frame(&mut |encoder, out| encoder.admin(id, &page, out));
    frame(&mut |encoder, out| encoder.error(id, &refused, out));
    frames
}

fn kind_and_body(frame: &[u8]) -> Vec<u8> {
    let (head, body) = frame.split_first_chunk().expect("a header");
    let header = FrameHeader::parse(head).expect("a header that is sound");
    [&[header.kind], body].concat()
}

/// All requests behind each other, read in small and in large pieces, and some that are too large or too new.
fn frame_streams() -> Vec<Vec<u8>> {
    let all = requests().concat();
    let good = FrameHeader::new(FrameKind::Route, 0, CorrelationId(8));
    let newer = FrameHeader { version: 9, ..good }.encode();
    let large = FrameHeader { body_bytes: 8192, ..good }.encode();
    let skipped = [&[9][..], &newer, &large, &[7; 8192], &all].concat();
    vec![[&[0][..], &all].concat(), [&[255][..], &all].concat(), skipped, [&[3][..], &good.encode(), &[0; 16]].concat()]
}

/// Snapshots of no, a few and many blocks, and learnt prefill times.
fn snapshots() -> Vec<Vec<u8>> {
    let begin = DumpBegin {
        watermark: Some(EventSeq(9)),
        remembered: vec![(EventSeq(8), 80), (EventSeq(9), 90)],
        scheme: Some(PLAIN),
        groups: vec![(Tier::Device, GroupId(0)), (Tier::Host, GroupId(0))],
        trust: Trust { level: TrustLevel::Exact, as_of_seq: Some(EventSeq(9)), ..Trust::default() },
        view: SourceTrust { level: TrustLevel::Exact, ..SourceTrust::default() },
        lifetime: None,
        republished: None,
    };
    let header = Header {
        worker: Worker::new(1, 0),
        space: SpaceName { model: "m".into(), ..SpaceName::default() },
        taken_unix_ms: 1_700_000_000_000,
        begin,
    };
    [0_u64, 1, 4, 60]
        .into_iter()
        .map(|count| {
            let (mut chunk, mut references) = (DumpChunk::default(), References::default());
            let hashes: Vec<_> = (1..=count).map(EngineHash).collect();
            let locals: Vec<_> = (1..=count).map(LocalHash).collect();
            for (tier, parent) in [(Tier::Device, None), (Tier::Host, Some(EngineHash(99)))] {
                let (group, seed) = (GroupId(0), Seed(7));
                let store = StoreBlocks { parent, hashes: &hashes, locals: &locals, tier, group, seed };
                if count > 0 {
                    chunk.push(&store);
                    references.add(&store);
                }
            }
            let mut encoder = Encoder::begin(Vec::new(), &header).expect("memory");
            encoder.chunk(&chunk).and_then(|()| encoder.end(references)).expect("memory").0
        })
        .chain([learnt_laws()])
        .collect()
}

/// Learnt prefill times of a class and of a worker.
fn learnt_laws() -> Vec<u8> {
    let class = LearntClass {
        name: "c".into(),
        prior: [0.0069, 60.5e-6, 0.99e-9],
        is_preset: true,
        factors: [1.0, 0.5, 2.0],
        variance: [1.0, 0.5, 2.0, 0.1, 0.1, 0.1],
        error: 0.1,
        samples: 9,
        learnt_unix_ms: 1_700_000_000_000,
    };
    let worker = LearntWorker { id: 1, rank: 0, class: 0, slowness: 1.5, learnt_unix_ms: 1_700_000_000_000 };
    encode_laws(&LearntLaws { classes: vec![class], workers: vec![worker] }).expect("finite numbers")
}

fn endpoints() -> Vec<Vec<u8>> {
    let lines =
        "tcp://127.0.0.1:5557\ntcp://[fe80::1%eth0]:1\nipc:///run/e\nipc://@e\ntcp://*:5567\nhttp://h:1/\nudp://h:1";
    let sglang = r#"{"kv_events": {"publisher": "zmq", "endpoint_host": "*", "endpoint_port_base": 5557, "topic": "t",
        "block_size": 16, "dp_size": 2, "replay_endpoint_port_base": 5657, "load_endpoint_port_base": 5757}}"#;
    let vllm = r#"{"0": {"publisher": "zmq", "endpoint": "tcp://*:5557", "replay_endpoint": null, "topic": ""},
        "1": {"endpoint": "tcp://10.0.0.1:5558", "replay_endpoint": "ipc:///r", "buffer_steps": 10}}"#;
    let json =
        r#"[{"id": 1, "endpoint": "tcp://h:1", "replay": "ipc:///tmp/x\u0000y", "topic": "t", "load": "tcp://h:3"}]"#;
    let toml = "[[worker]]\nid = 1\nendpoint = \"tcp://h:1\"\nreplay = \"ipc:///r\"\nranks = 1\n";
    [lines, sglang, vllm, json, toml, "ipc:///tmp/x\0y"].map(|text| text.as_bytes().to_vec()).to_vec()
}

fn configurations() -> Vec<Vec<u8>> {
    let small = "[serve]\nsocket = \"kv.sock\"\n[[space]]\nmodel = \"m\"\n[[worker]]\nid = 1\nmodel = \"m\"\n\
                 endpoint = \"tcp://127.0.0.1:5557\"\ntaints = [\"a\", \"b\"]\nweight = 2.5\n";
    let flag = "id=1,model=m,endpoint=tcp://127.0.0.1:5557,taints=a+b";
    vec![
        config::example().into_bytes(),
        small.into(),
        flag.into(),
        "[policy]\nseed = 7\n\n[ingest]\nshards = 2\n".into(),
    ]
}
