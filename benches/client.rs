//! The time of a request through each of the clients, against a daemon of this build: a route that books, and the free
//! of that booking, from the call to the decoded reply. Over the socket and over a shm lane; with both sides asleep
//! between requests, and with both busy-polling.
//!
//! One daemon, one gateway, one request at a time. To busy-poll, the serving thread and the gateway each need a
//! processor that no other process uses; otherwise the figures mean nothing.

#[path = "../tests/kit/mod.rs"]
mod kit;

use std::time::{Duration, Instant};

use criterion::{BenchmarkGroup, Criterion, criterion_group, criterion_main, measurement::WallTime};
use kvrouted::client::{Answer, AsyncClient, Client, ClientOptions, LaneUse, SteadyClient, SteadyOptions};
use kvrouted::ids::{Scheme, SpaceId, Window};
use kvrouted::load::BookingRef;
use kvrouted::route::{BookingRequest, Prompt, RouteRequest};
use tokio::runtime::Builder;

use kit::Daemon;

/// How long each side busy-polls before it sleeps, if it does.
const SPIN: Duration = Duration::from_millis(1);
/// Blocks of the prompt, of 16 tokens each: 8 bytes a block are sent.
const BLOCKS: u64 = 720;
const BLOCK_SIZE: u32 = 16;
const WORKERS: u64 = 8;

/// A daemon of this build with [`WORKERS`] workers.
fn daemon(busy_polls: bool) -> Daemon {
    let folder = kit::folder();
    let spin_us = if busy_polls { SPIN.as_micros() } else { 0 };
    let workers: String = (1..=WORKERS).map(|id| format!("[[worker]]\nid = {id}\n")).collect();
    let config = kit::configure_serve(folder.path(), &format!("spin_us_max = {spin_us}"), &workers);
    Daemon::serve(folder, &["--config", kit::text(&config)])
}

/// How the daemon is asked.
#[derive(Clone, Copy)]
struct Way {
    name: &'static str,
    lane: LaneUse,
    spin: Duration,
}

impl Way {
    fn steady(self) -> SteadyOptions {
        let Self { lane, spin, .. } = self;
        SteadyOptions { name: "bench".to_owned(), timeout: kit::WAIT_MAX, lane, spin, ..SteadyOptions::default() }
    }
}

fn request(space: SpaceId, hashes: &[u8]) -> RouteRequest<'_> {
    let scheme = Scheme { block_size: BLOCK_SIZE, window: Window::Plain };
    let token_count = BLOCKS as u32 * BLOCK_SIZE;
    let book = Some(BookingRequest { request_id: "bench", attempt: 0 });
    RouteRequest { book, ..RouteRequest::new(space, Prompt::LocalHashes { hashes, scheme, token_count }) }
}

fn bare(group: &mut BenchmarkGroup<'_, WallTime>, daemon: &Daemon, way: Way, hashes: &[u8]) {
    let Way { lane, spin, name } = way;
    let options = ClientOptions { name: "bench".to_owned(), lane, spin, ..ClientOptions::default() };
    let mut client = Client::connect(&daemon.socket(), &options).expect("a connection");
    let request = request(client.space("m", None).expect("the space").id, hashes);
    group.bench_function(format!("Client/{name}"), |bencher| {
        bencher.iter(|| {
            let handle = client.route(&request).expect("a decision").booking.expect("a booking");
            client.free(&BookingRef::Handle(handle)).expect("told")
        });
    });
}

fn steady(group: &mut BenchmarkGroup<'_, WallTime>, daemon: &Daemon, way: Way, hashes: &[u8]) {
    let client = SteadyClient::new(daemon.socket(), way.steady()).expect("a client");
    client.connected().expect("a connection");
    let request = request(client.space("m", None, None).expect("the space").id, hashes);
    group.bench_function(format!("SteadyClient/{}", way.name), |bencher| {
        bencher.iter(|| {
            let booking = booking(&client.route(&request).expect("a decision"));
            client.free(booking).expect("told")
        });
    });
    assert_eq!(client.has_lane(), way.lane != LaneUse::Off);
}

fn asynchronous(group: &mut BenchmarkGroup<'_, WallTime>, daemon: &Daemon, way: Way, hashes: &[u8]) {
    let runtime = Builder::new_current_thread().enable_all().build().expect("a runtime");
    let client = runtime.block_on(async {
        let client = AsyncClient::new(daemon.socket(), way.steady());
        client.connected().await.expect("a connection");
        client
    });
    let request = request(client.space("m", None, None).expect("the space").id, hashes);
    group.bench_function(format!("AsyncClient/{}", way.name), |bencher| {
        bencher.iter_custom(|rounds| {
            runtime.block_on(async {
                let began = Instant::now();
                for _ in 0..rounds {
                    let booking = booking(&client.route(&request).await.expect("a decision"));
                    client.free(booking).await.expect("told");
                }
                began.elapsed()
            })
        });
    });
    assert_eq!(client.has_lane(), way.lane != LaneUse::Off);
}

#[track_caller]
fn booking(answer: &Answer) -> kvrouted::client::Booking {
    answer.booking().expect("a booking of the daemon's")
}

/// A route of 720 hashes that books, and its free.
fn route_and_free(c: &mut Criterion) {
    let hashes: Vec<u8> = (0..BLOCKS).flat_map(|at| (at.wrapping_mul(0x9e37_79b9_7f4a_7c15)).to_le_bytes()).collect();
    for busy_polls in [false, true] {
        let daemon = daemon(busy_polls);
        let mut group = c.benchmark_group(format!("client/{}", if busy_polls { "busy-polling" } else { "asleep" }));
        let spin = if busy_polls { SPIN } else { Duration::ZERO };
        for (name, lane) in [("socket", LaneUse::Off), ("lane", LaneUse::Require)] {
            let way = Way { name, lane, spin };
            bare(&mut group, &daemon, way, &hashes);
            steady(&mut group, &daemon, way, &hashes);
            asynchronous(&mut group, &daemon, way, &hashes);
        }
        group.finish();
    }
}

criterion_group!(benches, route_and_free);
criterion_main!(benches);
