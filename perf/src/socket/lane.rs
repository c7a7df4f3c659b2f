//! A lane beside the socket, as a gateway with the Rust client meets them: each request a route that books, timed from
//! its call to its decoded reply, and then the free of that booking.
//!
//! Both ways ask one daemon in turns, with both sides asleep between requests and with both looking. Where they look,
//! each side has processors of its own. The floor of a lane is two threads that pass as many bytes through its rings
//! and think nothing.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use hdrhistogram::Histogram;
use kvrouted::client::{Client, ClientOptions, LaneUse};
use kvrouted::lane::{LaneEnd, LaneMemory, LaneSide, LaneSizes};
use kvrouted::limits::LANE_RING_BYTES_CEILING;
use kvrouted::load::BookingRef;
use kvrouted::route::{BookingRequest, Prompt, RouteRequest};
use serde::Serialize;

use super::contents::{Engines, Given, PROMPTS, SIZES, Size, prompt_hashes, prompt_tokens, size_named};
use super::known::{fill, held_by_us};
use super::processors::{Processors, keep};
use super::server::Server;
use crate::args::{Io, LaneArgs};
use crate::failure::Failure;
use crate::ingest::SCHEME;

/// How long either side looks before it sleeps, where it looks.
const SPIN: Duration = Duration::from_micros(1000);
/// Bytes of a reply with eight candidates, nearly.
const FLOOR_REPLY_BYTES: usize = 1024;
/// Longest latency that is told from longer ones, nanoseconds.
const LATENCY_NS_MAX: u64 = 60_000_000_000;
/// Workers of the fleet.
const WORKERS: u64 = 8;

/// A size of requests by one way.
#[derive(Debug, Serialize)]
pub(crate) struct Row {
    size: &'static str,
    /// `socket`, `lane`, or the `floor` of a lane.
    way: &'static str,
    /// Whether both sides look before they sleep.
    looks: bool,
    /// The lowest p50 of the rounds, and their median, microseconds.
    p50_us: [f64; 2],
    /// The same of p99.
    p99_us: [f64; 2],
    /// The daemon's processor time for a route and its free, the lowest of the rounds, microseconds.
    cpu_us: f64,
    requests: u64,
}

/// What was measured.
#[derive(Debug, Serialize)]
pub(crate) struct Report {
    args: LaneArgs,
    rows: Vec<Row>,
    /// p50 of the lane by p50 of the socket, 720 hashes, by the lowest of the rounds: asleep, and looking.
    lane_of_socket: [f64; 2],
}

#[derive(Default)]
struct Rounds {
    p50_ns: Vec<u64>,
    p99_ns: Vec<u64>,
    cpu_ns: Vec<f64>,
    requests: u64,
}

/// Measures every size by both ways.
///
/// # Errors
/// The daemon does not start, refuses a request, or gives no lane.
pub(crate) fn run(args: &LaneArgs) -> Result<Report, Failure> {
    let (mut rows, processors) = (Vec::new(), Processors::of_this_thread()?);
    let sizes: Vec<Size> = match args.sizes.as_slice() {
        [] => SIZES.to_vec(),
        names => names.iter().filter_map(|name| size_named(name)).collect(),
    };
    for looks in [false, true].into_iter().filter(|looks| *looks || !args.looking) {
        let mut engines = Engines::start(WORKERS)?;
        let lines = if looks { vec![format!("spin_us_max = {}", SPIN.as_micros())] } else { Vec::new() };
        let of_server = if looks { processors.of_server() } else { &[] };
        let server = Server::kvrouted(&engines, (Io::Epoll, 1), &[&lines], of_server)?;
        fill(&mut engines, |tokens| held_by_us(&server, tokens))?;
        let _kept = looks.then(|| processors.keep_client()).transpose()?;
        for size in &sizes {
            rows.extend(measure(args, &server, *size, of_server)?);
        }
    }
    let best = |way: &str, looks: bool| {
        let row = rows.iter().find(|row| row.size == SIZES[1].name && row.way == way && row.looks == looks);
        row.map_or(f64::NAN, |row: &Row| row.p50_us[0])
    };
    let lane_of_socket = [false, true].map(|looks| best("lane", looks) / best("socket", looks));
    Ok(Report { args: args.clone(), rows, lane_of_socket })
}

fn client(server: &Server, lane: LaneUse, looks: bool) -> Result<Client, Failure> {
    let spin = if looks { SPIN } else { Duration::ZERO };
    let options = ClientOptions { name: "perf".to_owned(), lane, spin, ..ClientOptions::default() };
    Ok(Client::connect(&server.socket(), &options)?)
}

/// A size of requests by both ways. Both sides look where the server has processors of its own.
fn measure(args: &LaneArgs, server: &Server, size: Size, of_server: &[usize]) -> Result<Vec<Row>, Failure> {
    let looks = !of_server.is_empty();
    let ways = [("socket", LaneUse::Off), ("lane", LaneUse::Require)];
    let mut rounds = [Rounds::default(), Rounds::default(), Rounds::default()];
    for round in 0..args.repeat {
        let [socket, lane, floor] = &mut rounds;
        let mut order = [(ways[0], socket), (ways[1], lane)];
        if round % 2 == 1 {
            order.reverse();
        }
        for ((_, lane), rounds) in order {
            let mut client = client(server, lane, looks)?;
            ask(&mut client, size, Duration::from_secs_f64(args.seconds / 5.0))?;
            let before_ns = server.cpu_ns()?;
            let latency_ns = ask(&mut client, size, Duration::from_secs_f64(args.seconds))?;
            rounds.add(&latency_ns, (server.cpu_ns()? - before_ns) as f64);
        }
        if looks {
            floor.add(&echo(size, Duration::from_secs_f64(args.seconds), of_server)?, 0.0);
        }
    }
    let names = ways.map(|(name, _)| name).into_iter().chain(["floor"]);
    let rows = names.zip(rounds).filter(|(_, rounds)| rounds.requests > 0);
    Ok(rows.map(|(way, rounds)| rounds.row(size, way, looks)).collect())
}

fn histogram() -> Result<Histogram<u64>, Failure> {
    Histogram::new_with_max(LATENCY_NS_MAX, 3).map_err(|error| Failure::Contract(error.to_string()))
}

/// Routes and frees for `time`.
fn ask(client: &mut Client, size: Size, time: Duration) -> Result<Histogram<u64>, Failure> {
    let space = client.space("m", None)?.id;
    let prompts: Vec<(Vec<u32>, Vec<u8>)> = (0..PROMPTS)
        .map(|prompt| {
            let hashes = prompt_hashes(prompt, size.blocks);
            (prompt_tokens(prompt, size.blocks), hashes.iter().flat_map(|hash| hash.0.to_le_bytes()).collect())
        })
        .collect();
    let (mut latency_ns, began) = (histogram()?, Instant::now());
    for (tokens, hashes) in prompts.iter().cycle() {
        let prompt = match size.given {
            Given::Tokens => Prompt::of_tokens(tokens),
            Given::Hashes => Prompt::LocalHashes { hashes, scheme: SCHEME, token_count: tokens.len() as u32 },
        };
        let book = Some(BookingRequest { request_id: "perf-lane", attempt: 0 });
        let request = RouteRequest { book, ..RouteRequest::new(space, prompt) };
        let asked = Instant::now();
        let reply = client.route(&request)?;
        latency_ns.saturating_record(asked.elapsed().as_nanos() as u64);
        let handle = reply.booking.ok_or_else(|| Failure::Contract("nothing was booked".to_owned()))?;
        client.free(&BookingRef::Handle(handle))?;
        if began.elapsed() >= time {
            break;
        }
    }
    Ok(latency_ns)
}

/// The rings alone, between two threads that look; the one that answers on the server's processors.
fn echo(size: Size, time: Duration, of_server: &[usize]) -> Result<Histogram<u64>, Failure> {
    let request = match size.given {
        Given::Hashes => size.blocks as usize * 8,
        Given::Tokens => prompt_tokens(0, size.blocks).len() * 4,
    };
    let (request, reply) = (vec![7; request], vec![9; FLOOR_REPLY_BYTES]);
    let sizes = LaneSizes::requested(0, 0, LANE_RING_BYTES_CEILING)?;
    let mut made = LaneMemory::make(sizes)?;
    let mapped = LaneMemory::map(&made.share()?, sizes)?;
    let (mut gateway, mut daemon) = (LaneEnd::new(mapped, LaneSide::Gateway), LaneEnd::new(made, LaneSide::Daemon));
    let (done, request_bytes, mut latency_ns) = (AtomicBool::new(false), request.len(), histogram()?);
    std::thread::scope(|scope| {
        // Relaxed: it ends a loop and hands on nothing.
        scope.spawn(|| {
            // Where it may not, it is wherever it is put, and the figure says so.
            let _ = keep(of_server);
            let mut received = Vec::new();
            while !done.load(Ordering::Relaxed) {
                match daemon.receive(usize::MAX, &mut received) {
                    Ok(moved) if moved.bytes == 0 => daemon.own_ahead(),
                    Ok(_) => {}
                    Err(_) => break,
                }
                if received.len() >= request_bytes {
                    received.clear();
                    let _ = daemon.send(&reply);
                }
                std::hint::spin_loop();
            }
        });
        let (began, mut received) = (Instant::now(), Vec::new());
        while began.elapsed() < time {
            let asked = Instant::now();
            let _ = gateway.send(&request);
            while received.len() < reply.len() && gateway.receive(usize::MAX, &mut received).is_ok() {
                gateway.own_ahead();
                std::hint::spin_loop();
            }
            latency_ns.saturating_record(asked.elapsed().as_nanos() as u64);
            received.clear();
        }
        done.store(true, Ordering::Relaxed);
    });
    Ok(latency_ns)
}

impl Rounds {
    fn add(&mut self, latency_ns: &Histogram<u64>, cpu_ns: f64) {
        self.p50_ns.push(latency_ns.value_at_quantile(0.5));
        self.p99_ns.push(latency_ns.value_at_quantile(0.99));
        self.cpu_ns.push(cpu_ns / latency_ns.len() as f64);
        self.requests += latency_ns.len();
    }

    fn row(mut self, size: Size, way: &'static str, looks: bool) -> Row {
        let lowest_and_median = |values: &mut Vec<u64>| {
            values.sort_unstable();
            [values.first(), values.get(values.len() / 2)].map(|ns| ns.copied().unwrap_or(0) as f64 / 1000.0)
        };
        let (p50_us, p99_us) = (lowest_and_median(&mut self.p50_ns), lowest_and_median(&mut self.p99_ns));
        let cpu_us = self.cpu_ns.into_iter().fold(f64::INFINITY, f64::min) / 1000.0;
        Row { size: size.name, way, looks, p50_us, p99_us, cpu_us, requests: self.requests }
    }
}

impl Report {
    /// For people.
    #[must_use]
    pub(crate) fn table(&self) -> String {
        let mut text = format!(
            "a route that books, µs, lowest and median of {} rounds of {} s\n{:<14}{:<8}{:<8}{:>16}{:>16}{:>10}{:>10}\n",
            self.args.repeat, self.args.seconds, "size", "way", "both", "p50", "p99", "CPU", "requests"
        );
        for row in &self.rows {
            let both = if row.looks { "look" } else { "sleep" };
            let pair = |[lowest, median]: [f64; 2]| format!("{lowest:.1} / {median:.1}");
            text.push_str(&format!(
                "{:<14}{:<8}{both:<8}{:>16}{:>16}{:>10.1}{:>10}\n",
                row.size,
                row.way,
                pair(row.p50_us),
                pair(row.p99_us),
                row.cpu_us,
                row.requests
            ));
        }
        for (ratio, how) in
            self.lane_of_socket.into_iter().zip(["asleep", "looking"]).filter(|(ratio, _)| ratio.is_finite())
        {
            text.push_str(&format!("lane by socket, p50 of 720 hashes, {how}: {ratio:.2}\n"));
        }
        text
    }
}
