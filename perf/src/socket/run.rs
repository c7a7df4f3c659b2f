//! The sides in turns: each size of requests, each way to ask.

use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use kvrouted::client::{Client, ClientOptions};
use kvrouted::hash;
use kvrouted::ids::{CorrelationId, SpaceId};
use kvrouted::limits::FRAME_HEADER_BYTES;
use kvrouted::route::{Prompt, RouteRequest};
use kvrouted::wire::{FrameHeader, RequestEncoder};

use super::contents::{Engines, PROMPTS, SIZES, Size, WORKERS, held, prompt_tokens};
use super::dialect::{Dialect, Frames, Http};
use super::floor::ReplyBytes;
use super::load::{Measured, Pace, Wire, run as ask};
use super::report::{Report, Row, Sides};
use super::server::Server;
use crate::args::{ServedBy, SocketArgs};
use crate::failure::Failure;

/// How long an index may take to hold what it was told.
const FILL_MAX: Duration = Duration::from_secs(30);
/// Connections, and requests in flight on each.
const WAYS: [(u32, u32); 3] = [(1, 1), (1, 32), (8, 1)];

/// Measures everything.
///
/// # Errors
/// A server does not start, refuses a request, or holds other blocks than it was told.
pub(crate) fn run(args: &SocketArgs) -> Result<Report, Failure> {
    let mut rows = Vec::new();
    for size in SIZES {
        let frames = Frames::new(size, SpaceId(0))?;
        let http = Http::new(size)?;
        let mut ours = Vec::new();
        let bytes = {
            let engines = Engines::start()?;
            let server = Server::kvrouted(&engines, &args.io, &args.serve.join("\n"))?;
            fill(&engines, |prompt| held_by_us(&server, prompt))?;
            every_way(&server, args, &mut ours, |_| framed(&server, &frames))?;
            let [route, free] = frames.reply_bytes.get();
            ReplyBytes { route, free }
        };
        let mut floor = Vec::new();
        {
            let server = Server::floor(bytes, args.floor_spins)?;
            every_way(&server, args, &mut floor, |_| framed(&server, &frames))?;
        }
        let mut peer = Vec::new();
        if !args.no_peer {
            let engines = Engines::start()?;
            let server = Server::peer(&engines)?;
            fill(&engines, |prompt| held_by_peer(&server, prompt))?;
            every_way(&server, args, &mut peer, |_| {
                let stream = server.connect_peer()?;
                stream.set_nonblocking(true).map_err(Failure::system("make a socket non-blocking"))?;
                Ok((stream.into(), Box::new(http.clone())))
            })?;
        }
        let sides = [(ServedBy::Floor, floor), (ServedBy::Kvrouted, ours), (ServedBy::Peer, peer)];
        let request_bytes = [frames.request_bytes(), http.request_bytes()];
        rows.push(Sides::new(size, request_bytes, [bytes.route, bytes.free], sides));
    }
    Ok(Report::new(args.clone(), rows))
}

/// A connection and how to ask on it.
type Connected = (OwnedFd, Box<dyn Dialect>);

/// Closed and open loop, sleeping and spinning clients, all [`WAYS`].
fn every_way(
    server: &Server,
    args: &SocketArgs,
    rows: &mut Vec<Row>,
    connect: impl Fn(u32) -> Result<Connected, Failure>,
) -> Result<(), Failure> {
    let (time, mut number) = (Duration::from_secs_f64(args.seconds), 0);
    for (connections, depth) in WAYS {
        for spins in [false, true] {
            for pace in [Pace::Closed, Pace::Open(args.rate)] {
                let open = |at| connect(at).map(|(fd, dialect)| Wire::new(fd, dialect, depth));
                let mut wires = (0..connections).map(open).collect::<Result<Vec<_>, _>>()?;
                ask(&mut wires, pace, spins, time / 5, &mut number)?;
                let before_ns = server.cpu_ns()?;
                let measured: Measured = ask(&mut wires, pace, spins, time, &mut number)?;
                let cpu_ns = server.cpu_ns()? - before_ns;
                rows.push(Row::new((connections, depth), spins, pace, &measured, cpu_ns));
            }
        }
    }
    Ok(())
}

/// A connection that has said hello.
fn framed(server: &Server, frames: &Frames) -> Result<Connected, Failure> {
    let mut stream = server.connect()?;
    let mut hello = Vec::new();
    RequestEncoder::default().hello(CorrelationId(0), "perf", None, &mut hello);
    stream.write_all(&hello).map_err(Failure::system("say hello"))?;
    let mut header = [0; FRAME_HEADER_BYTES];
    stream.read_exact(&mut header).map_err(Failure::system("hear hello"))?;
    let header = FrameHeader::parse(&header).map_err(|fault| Failure::Contract(fault.to_string()))?;
    let mut body = vec![0; header.body_bytes as usize];
    stream.read_exact(&mut body).map_err(Failure::system("hear hello"))?;
    stream.set_nonblocking(true).map_err(Failure::system("make a socket non-blocking"))?;
    Ok((stream.into(), Box::new(frames.clone())))
}

/// Tells the workers' blocks and waits until all are known: both sides hold the same, or nothing is measured.
fn fill(engines: &Engines, known: impl Fn(u64) -> Result<Vec<(u64, u64)>, Failure>) -> Result<(), Failure> {
    engines.publish()?;
    let began = Instant::now();
    for prompt in 0..PROMPTS {
        let mut wanted: Vec<(u64, u64)> =
            (0..WORKERS).map(|worker| (worker, held(worker, prompt))).filter(|(_, blocks)| *blocks > 0).collect();
        wanted.sort_unstable();
        loop {
            let mut found = known(prompt)?;
            found.retain(|(_, blocks)| *blocks > 0);
            found.sort_unstable();
            if found == wanted {
                break;
            }
            if began.elapsed() > FILL_MAX {
                return Err(Failure::Contract(format!("prompt {prompt}: {found:?} is held, not {wanted:?}")));
            }
            std::thread::sleep(Duration::from_millis(10));
        }
    }
    Ok(())
}

fn whole_prompt(prompt: u64) -> Vec<u32> {
    prompt_tokens(prompt, SIZES.iter().map(|size: &Size| size.blocks).max().unwrap_or(0))
}

fn held_by_us(server: &Server, prompt: u64) -> Result<Vec<(u64, u64)>, Failure> {
    let contract = |error: kvrouted::error::Error| Failure::Contract(error.to_string());
    server.connect()?;
    let mut client = Client::connect(&server.socket(), &ClientOptions::default()).map_err(contract)?;
    let tokens = whole_prompt(prompt);
    let asked = RouteRequest::new(SpaceId(0), Prompt::Tokens(hash::token_bytes(&tokens)));
    let overlaps = client.overlap(&asked).map_err(contract)?;
    Ok(overlaps.workers.iter().map(|entry| (entry.worker.id.0, u64::from(entry.overlap.device))).collect())
}

fn held_by_peer(server: &Server, prompt: u64) -> Result<Vec<(u64, u64)>, Failure> {
    let body = serde_json::json!({ "token_ids": whole_prompt(prompt) }).to_string();
    let reply = server.ask_peer("/overlap_scores", &body)?;
    let reply: serde_json::Value = serde_json::from_slice(&reply).map_err(|error| Failure::Peer(error.to_string()))?;
    let workers = reply["workers"].as_array().ok_or_else(|| Failure::Peer(reply.to_string()))?;
    let number = |value: &serde_json::Value| value.as_u64().unwrap_or(0);
    Ok(workers.iter().map(|worker| (number(&worker["worker_id"]), number(&worker["device_blocks"]))).collect())
}
