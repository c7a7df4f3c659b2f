//! What the way over `kvrouted connect` and TLS adds to a route. It asserts no time: run it on a quiet machine, in release.

use std::io::Write as _;
use std::path::Path;
use std::time::Instant;

use kvrouted::client::Client;
use kvrouted::ids::{Scheme, Window};
use kvrouted::route::{Prompt, RouteRequest};

use crate::kit::options;
use crate::kit::remote::Site;

const TURNS: usize = 20;
const REQUESTS: usize = 1000;
const COLD: usize = 100;
const BLOCKS: u32 = 14;

#[test]
#[ignore = "a measurement: cargo test --release --test protocol -- --ignored --nocapture the_cost_of_a_route_from_another_host"]
fn the_cost_of_a_route_from_another_host() {
    let site = Site::new();
    site.configure("cores = 1", "", "");
    let daemon = site.daemon();
    let east = site.caller("east", &[]);
    let ways = [("Unix socket", daemon.socket()), ("kvrouted connect", east.socket.clone())];
    let mut times: [Vec<u64>; 2] = Default::default();
    for _ in 0..TURNS {
        for ((_, socket), times) in ways.iter().zip(&mut times) {
            times.extend(routes(socket));
        }
    }
    for ((way, _), times) in ways.iter().zip(&mut times) {
        times.sort_unstable();
        let at = |percent: usize| times[times.len() * percent / 100] as f64 / 1e3;
        let line = format!("{way}: p50 {} us, p99 {} us of {} routes\n", at(50), at(99), times.len());
        std::io::stdout().lock().write_all(line.as_bytes()).expect("said");
    }
}

/// The times of routes on one connection, nanoseconds.
fn routes(socket: &Path) -> Vec<u64> {
    let mut client = Client::connect(socket, &options()).expect("a connection");
    let space = client.space("m", None).expect("the space").id;
    let hashes: Vec<u8> = (0..u64::from(BLOCKS)).flat_map(u64::to_le_bytes).collect();
    let scheme = Scheme { block_size: 16, window: Window::Plain };
    let prompt = Prompt::LocalHashes { hashes: &hashes, scheme, token_count: BLOCKS * 16 };
    let mut one = || {
        let began = Instant::now();
        client.route(&RouteRequest::new(space, prompt)).expect("a decision");
        began.elapsed().as_nanos() as u64
    };
    // The first requests find caches cold.
    (0..REQUESTS + COLD).map(|_| one()).skip(COLD).collect()
}
