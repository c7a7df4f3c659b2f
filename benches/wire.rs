//! Requests and replies of the routing protocol ↔ bytes, as a gateway and the daemon pay for them.

use std::hint::black_box;

use criterion::{BenchmarkId, Criterion, criterion_group, criterion_main};
use kvrouted::fleet::{FleetTable, WorkerRecord, WorkerState};
use kvrouted::ids::{CorrelationId, Scheme, SpaceId, TierBlocks, Window, Worker, WorkerIndex, WorkerSlot};
use kvrouted::limits::FRAME_HEADER_BYTES;
use kvrouted::load::{BookingHandle, BookingOutcome, BookingRef};
use kvrouted::route::{BookingRequest, CostTerms, Decision, Prompt, RouteRequest, Scored};
use kvrouted::trust::Trust;
use kvrouted::wire::{FrameKind, ReplyEncoder, RequestEncoder, RequestScratch, decode_reply, decode_request};

const ID: CorrelationId = CorrelationId(7);
const CANDIDATES: u32 = 8;

fn requests(c: &mut Criterion) {
    let (mut encoder, mut scratch, mut out) = (RequestEncoder::default(), RequestScratch::default(), Vec::new());
    let mut group = c.benchmark_group("request");
    let book = Some(BookingRequest { request_id: "request-0123456789", attempt: 0 });
    let bytes: Vec<u8> = (0..12_000_u32).flat_map(u32::to_le_bytes).collect();
    let scheme = Scheme { block_size: 16, window: Window::Plain };
    let hashed = |n: usize| Prompt::LocalHashes { hashes: &bytes[..8 * n], scheme, token_count: 16 * n as u32 };
    let prompts = [("14 hashes", hashed(14)), ("720 hashes", hashed(720)), ("12000 tokens", Prompt::Tokens(&bytes))];
    for (name, prompt) in prompts {
        let request = RouteRequest { book, ..RouteRequest::new(SpaceId(0), prompt) };
        group.bench_function(BenchmarkId::new("encode route", name), |bencher| {
            bencher.iter(|| {
                out.clear();
                let encoded = encoder.route(ID, black_box(&request), &mut out);
                assert!(encoded.is_ok());
            });
        });
        let body = out[FRAME_HEADER_BYTES..].to_vec();
        group.bench_function(BenchmarkId::new("decode route", name), |bencher| {
            bencher.iter(|| decode_request(FrameKind::Route as u8, black_box(&body), &mut scratch).is_ok());
        });
    }
    let handle = BookingRef::Handle(BookingHandle { slot: 3, generation: 9 });
    out.clear();
    encoder.free(ID, &handle, &mut out);
    group.bench_function("decode free", |bencher| {
        let body = &out[FRAME_HEADER_BYTES..];
        bencher.iter(|| decode_request(FrameKind::Free as u8, black_box(body), &mut scratch).is_ok());
    });
    group.finish();
}

fn record(n: u32) -> WorkerRecord {
    WorkerRecord {
        name: format!("worker-{n}"),
        ..WorkerRecord::new(WorkerIndex(n), Worker::new(u64::from(n), 0), WorkerSlot(0))
    }
}

fn replies(c: &mut Criterion) {
    let fleet = FleetTable { version: 1, spaces: Vec::new(), workers: (0..CANDIDATES).map(record).collect() };
    let scored = |n| Scored {
        index: WorkerIndex(n),
        worker: Worker::new(u64::from(n), 0),
        overlap: TierBlocks { device: n, ..TierBlocks::default() },
        trust: Trust::default(),
        state: WorkerState::Ready,
        terms: CostTerms { cost: f64::from(n), ..CostTerms::default() },
    };
    let booking = Some(BookingHandle { slot: 3, generation: 9 });
    let decision = Decision { candidates: (0..CANDIDATES).map(scored).collect(), booking, ..Decision::default() };
    let (mut encoder, mut out) = (ReplyEncoder::default(), Vec::new());
    let mut group = c.benchmark_group("reply");
    for explain in [true, false] {
        group.bench_function(
            BenchmarkId::new("encode route", if explain { "explained" } else { "plain" }),
            |bencher| {
                bencher.iter(|| {
                    out.clear();
                    encoder.route(ID, black_box(&decision), explain, &fleet, &mut out);
                });
            },
        );
        let body = out[FRAME_HEADER_BYTES..].to_vec();
        group.bench_function(
            BenchmarkId::new("decode route", if explain { "explained" } else { "plain" }),
            |bencher| {
                bencher.iter(|| decode_reply(FrameKind::RouteReply as u8, black_box(&body)));
            },
        );
    }
    group.bench_function("encode free", |bencher| {
        bencher.iter(|| {
            out.clear();
            encoder.free(ID, BookingOutcome::Applied, black_box(8), &mut out);
        });
    });
    group.finish();
}

criterion_group!(benches, requests, replies);
criterion_main!(benches);
