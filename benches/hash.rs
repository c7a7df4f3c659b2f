//! Tokens into block hashes, by prompt length and block size.

use std::hint::black_box;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use kvrouted::hash;
use kvrouted::ids::{Scheme, Window};

const PROMPT_TOKENS: u32 = 12_000;

fn local_hashes(c: &mut Criterion) {
    let tokens: Vec<u32> = (0..PROMPT_TOKENS).map(|token| token.wrapping_mul(2_654_435_761)).collect();
    let seed = hash::seed(None, None);
    let mut group = c.benchmark_group("hash/local");
    for block_size in [16, 32, 64] {
        for window in [Window::Plain, Window::Bigram] {
            let scheme = Scheme { block_size, window };
            group.throughput(Throughput::Elements(hash::block_count(tokens.len(), scheme) as u64));
            group.bench_function(BenchmarkId::new(format!("{window:?}"), block_size), |bencher| {
                let mut out = Vec::new();
                bencher.iter(|| {
                    hash::local_hashes(scheme, seed, hash::token_bytes(black_box(&tokens)), &[], &mut out);
                    out.last().copied()
                });
            });
        }
    }
    group.finish();
}

fn sequence_hashes(c: &mut Criterion) {
    let tokens: Vec<u32> = (0..PROMPT_TOKENS).collect();
    let scheme = Scheme { block_size: 16, window: Window::Plain };
    let (mut locals, mut out) = (Vec::new(), Vec::new());
    hash::local_hashes(scheme, hash::seed(None, None), hash::token_bytes(&tokens), &[], &mut locals);
    let mut group = c.benchmark_group("hash/sequence");
    group.throughput(Throughput::Elements(locals.len() as u64));
    group.bench_function("chain", |bencher| {
        bencher.iter(|| {
            hash::sequence_hashes(black_box(&locals), &mut out);
            out.last().copied()
        });
    });
    group.finish();
}

criterion_group!(benches, local_hashes, sequence_hashes);
criterion_main!(benches);
