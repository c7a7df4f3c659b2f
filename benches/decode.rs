//! Event batches into values: engines' own messages, and the project's format by batch size.

use std::hint::black_box;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use kvrouted::event::{
    self, BatchInfo, Content, EventBatch, GroupKind, KvEvent, Medium, Salt, Stored, flat, format::Format,
};
use kvrouted::ids::{EngineHash, GroupId, Scheme, Tier, Window};

const BLOCK_SIZE: u32 = 16;

/// The payloads of a recording; its layout is told in tests/fixtures/events/README.md.
fn payloads(mut recording: &[u8]) -> Vec<&[u8]> {
    let mut payloads = Vec::new();
    while let Some((count, rest)) = length(recording) {
        recording = rest;
        let mut last = &[][..];
        for _ in 0..count {
            let Some((bytes, rest)) = length(recording) else { return payloads };
            (last, recording) = rest.split_at(bytes);
        }
        payloads.push(last);
    }
    payloads
}

fn length(bytes: &[u8]) -> Option<(usize, &[u8])> {
    let (head, rest) = bytes.split_first_chunk()?;
    Some((u32::from_le_bytes(*head) as usize, rest))
}

fn blocks_stored(batch: &EventBatch) -> usize {
    let stored = |event| if let KvEvent::Stored(stored) = event { stored.hashes.len() } else { 0 };
    batch.events().map(stored).sum()
}

/// Decodes `payloads` again and again; the throughput is in stored blocks.
fn decode(c: &mut Criterion, name: BenchmarkId, payloads: &[&[u8]]) {
    let mut batch = EventBatch::new();
    let mut format: Option<Format> = None;
    let mut pass = || {
        payloads
            .iter()
            .map(|payload| {
                let decoded = event::decode(black_box(payload), &mut format, &mut batch);
                assert!(decoded.is_ok(), "{decoded:?}");
                blocks_stored(&batch)
            })
            .sum::<usize>()
    };
    let blocks = pass();
    let mut group = c.benchmark_group("decode");
    group.throughput(Throughput::Elements(blocks as u64));
    group.bench_function(name, |bencher| bencher.iter(&mut pass));
    group.finish();
}

fn engines(c: &mut Criterion) {
    let vllm = payloads(include_bytes!("../tests/fixtures/events/vllm_0_33.bin"));
    let sglang = payloads(include_bytes!("../tests/fixtures/events/sglang_0_5_23.bin"));
    decode(c, BenchmarkId::new("recorded", "vllm_0_33"), &vllm);
    decode(c, BenchmarkId::new("recorded", "sglang_0_5_23"), &sglang);
}

fn flatbuffers(c: &mut Criterion) {
    for blocks in [1_u64, 16, 256] {
        let hashes: Vec<_> = (1..=blocks).map(EngineHash).collect();
        let tokens: Vec<u32> = (0..blocks as u32 * BLOCK_SIZE).collect();
        let stored = KvEvent::Stored(Stored {
            hashes: &hashes,
            parent: None,
            content: Content::Tokens { tokens: &tokens, bigram: false },
            block_size: BLOCK_SIZE,
            medium: Medium::Tier(Tier::Device),
            group: GroupId(0),
            group_kind: GroupKind::Main,
            lora: None,
            salt: Salt::Inherited,
            media: &[],
        });
        let scheme = Some(Scheme { block_size: BLOCK_SIZE, window: Window::Plain });
        let mut encoder = flat::Encoder::new();
        let payload = encoder.encode(&BatchInfo { scheme, ..BatchInfo::default() }, [stored]);
        decode(c, BenchmarkId::new("flatbuffers", blocks), &[payload]);
    }
}

criterion_group!(benches, engines, flatbuffers);
criterion_main!(benches);
