//! Tokens into block hashes, by block size, and beside XXH3 one block after the other.

use std::hint::black_box;
use std::time::{Duration, Instant};

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use kvrouted::hash;
use kvrouted::ids::{LocalHash, Scheme, Seed, Window};
use xxhash_rust::xxh3::xxh3_64_with_seed;

const PROMPT_TOKENS: u32 = 12_000;

fn tokens(count: u32) -> Vec<u32> {
    (0..count).map(|token| token.wrapping_mul(2_654_435_761)).collect()
}

fn local_hashes(c: &mut Criterion) {
    let tokens = tokens(PROMPT_TOKENS);
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

/// What the same blocks cost by the crate that says what is right: one block after the other.
fn one_by_one(scheme: Scheme, seed: Seed, tokens: &[u8], out: &mut Vec<LocalHash>) {
    let stride = scheme.block_size as usize * hash::TOKEN_BYTES;
    let window = stride + if scheme.window == Window::Bigram { hash::TOKEN_BYTES } else { 0 };
    let count = hash::block_count(tokens.len() / hash::TOKEN_BYTES, scheme);
    out.resize(count, LocalHash(0));
    for (block, to) in out.iter_mut().enumerate() {
        to.0 = xxh3_64_with_seed(&tokens[block * stride..][..window], seed.0);
    }
}

/// Measures both in alternation, so that other load of the machine affects both alike: medians and their ratio.
#[expect(clippy::print_stdout, reason = "criterion compares a function with itself only")]
fn beside_one_by_one(_: &mut Criterion) {
    const MEASUREMENTS: usize = 101;
    let seed = hash::seed(None, None);
    println!("window  block_bytes  blocks  one_by_one_ns  side_by_side_ns  ratio");
    for (window, block_size) in [Window::Plain, Window::Bigram].into_iter().flat_map(|w| [(w, 16), (w, 32), (w, 64)]) {
        let scheme = Scheme { block_size, window };
        for prompt_tokens in [block_size * 8 + 1, PROMPT_TOKENS + 1] {
            let tokens = tokens(prompt_tokens);
            let tokens = hash::token_bytes(&tokens);
            let blocks = hash::block_count(prompt_tokens as usize, scheme);
            let rounds = 1 + 30_000 / blocks;
            let (mut theirs, mut ours) = (Vec::new(), Vec::new());
            let (mut expected, mut out) = (Vec::new(), Vec::new());
            for _ in 0..MEASUREMENTS {
                let started = Instant::now();
                (0..rounds)
                    .for_each(|_| one_by_one(scheme, black_box(seed), black_box(tokens), black_box(&mut expected)));
                theirs.push(started.elapsed());
                let started = Instant::now();
                (0..rounds).for_each(|_| {
                    hash::local_hashes(scheme, black_box(seed), black_box(tokens), &[], black_box(&mut out))
                });
                ours.push(started.elapsed());
                assert_eq!(out, expected);
            }
            theirs.sort_unstable();
            ours.sort_unstable();
            let nanos = |times: &[Duration]| times[MEASUREMENTS / 2].as_nanos() as f64 / (rounds * blocks) as f64;
            let (theirs, ours) = (nanos(&theirs), nanos(&ours));
            let bytes = (block_size + u32::from(window == Window::Bigram)) * 4;
            println!("{window:?}  {bytes}  {blocks}  {theirs:.2}  {ours:.2}  {:.2}", theirs / ours);
        }
    }
}

criterion_group!(benches, local_hashes, sequence_hashes, beside_one_by_one);
criterion_main!(benches);
