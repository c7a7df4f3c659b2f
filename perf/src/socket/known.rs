//! Connections that have said hello, and what a server holds: nothing is asked before both sides hold the same.

use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::path::Path;
use std::time::{Duration, Instant};

use kvrouted::client::{Client, ClientOptions};
use kvrouted::hash;
use kvrouted::ids::{CorrelationId, SpaceId};
use kvrouted::limits::FRAME_HEADER_BYTES;
use kvrouted::route::{Prompt, RouteRequest};
use kvrouted::wire::{FrameHeader, RequestEncoder};

use super::beside::{Beside, CHAIN_BLOCKS};
use super::contents::{BLOCKS, Engines, PROMPTS, held, prompt_tokens};
use super::server::{Server, connect};
use crate::failure::Failure;
use crate::ingest::tokens;

/// How long an index may take to hold what it was told.
const FILL_MAX: Duration = Duration::from_secs(30);
/// How often it is asked.
const ASK_EVERY: Duration = Duration::from_millis(5);

/// Connects and says hello. The connection never blocks.
///
/// # Errors
/// The server is not there, or is no kvrouted.
pub(crate) fn framed(socket: &Path) -> Result<OwnedFd, Failure> {
    let mut stream = connect(socket)?;
    let mut hello = Vec::new();
    RequestEncoder::default().hello(CorrelationId(0), "perf", None, &mut hello);
    stream.write_all(&hello).map_err(Failure::system("say hello"))?;
    let mut header = [0; FRAME_HEADER_BYTES];
    stream.read_exact(&mut header).map_err(Failure::system("hear hello"))?;
    let header = FrameHeader::parse(&header).map_err(|fault| Failure::Contract(fault.to_string()))?;
    let mut body = vec![0; header.body_bytes as usize];
    stream.read_exact(&mut body).map_err(Failure::system("hear hello"))?;
    stream.set_nonblocking(true).map_err(Failure::system("make a socket non-blocking"))?;
    Ok(stream.into())
}

/// Who holds how many blocks of a prompt, as a server says.
pub(crate) type Holders = Vec<(u64, u64)>;

/// As kvrouted says.
///
/// # Errors
/// It does not answer.
pub(crate) fn held_by_us(server: &Server, tokens: &[u32]) -> Result<Holders, Failure> {
    connect(&server.socket())?;
    let mut client = Client::connect(&server.socket(), &ClientOptions::default())?;
    let asked = RouteRequest::new(SpaceId(0), Prompt::Tokens(hash::token_bytes(tokens)));
    let overlaps = client.overlap(&asked)?;
    Ok(overlaps.workers.iter().map(|entry| (entry.worker.id.0, u64::from(entry.overlap.device))).collect())
}

/// As the peer says.
///
/// # Errors
/// It does not answer.
pub(crate) fn held_by_peer(server: &Server, tokens: &[u32]) -> Result<Holders, Failure> {
    let body = serde_json::json!({ "token_ids": tokens }).to_string();
    let reply = server.ask_peer("/overlap_scores", &body)?;
    let reply: serde_json::Value = serde_json::from_slice(&reply).map_err(|error| Failure::Peer(error.to_string()))?;
    let workers = reply["workers"].as_array().ok_or_else(|| Failure::Peer(reply.to_string()))?;
    let number = |value: &serde_json::Value| value.as_u64().unwrap_or(0);
    Ok(workers.iter().map(|worker| (number(&worker["worker_id"]), number(&worker["device_blocks"]))).collect())
}

/// Tells the workers' blocks and waits until `known` says all of them: both sides hold the same, or nothing is
/// measured.
///
/// # Errors
/// They are not held in time.
pub(crate) fn fill(engines: &mut Engines, known: impl Fn(&[u32]) -> Result<Holders, Failure>) -> Result<(), Failure> {
    engines.publish()?;
    let workers = engines.endpoints.len() as u64;
    for prompt in 0..PROMPTS {
        let tokens = prompt_tokens(prompt, BLOCKS);
        let wanted: Holders =
            (0..workers).map(|worker| (worker, held(worker, prompt))).filter(|(_, blocks)| *blocks > 0).collect();
        until(|| {
            let mut found = known(&tokens)?;
            found.retain(|(_, blocks)| *blocks > 0);
            found.sort_unstable();
            Ok(found == wanted)
        })?;
    }
    Ok(())
}

/// What came of messages beside the requests.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Caught {
    /// Messages a second that were published.
    pub(crate) messages_per_s: f64,
    /// From the last to when it was known, milliseconds.
    pub(crate) lag_ms: f64,
}

/// Ends what engines say, and waits until the last of it is known.
///
/// # Errors
/// It is not, in time.
pub(crate) fn catch_up(beside: Beside, known: impl Fn(&[u32]) -> Result<Holders, Failure>) -> Result<Caught, Failure> {
    let (told, _engines) = beside.end()?;
    let (began, (worker, first)) = (Instant::now(), told.last);
    let tokens = tokens(first, CHAIN_BLOCKS);
    until(|| Ok(known(&tokens)?.contains(&(worker, CHAIN_BLOCKS))))?;
    Ok(Caught { messages_per_s: told.messages_per_s, lag_ms: began.elapsed().as_secs_f64() * 1e3 })
}

fn until(is_known: impl Fn() -> Result<bool, Failure>) -> Result<(), Failure> {
    let began = Instant::now();
    while !is_known()? {
        if began.elapsed() > FILL_MAX {
            return Err(Failure::Contract("a server does not hold what it was told".to_owned()));
        }
        std::thread::sleep(ASK_EVERY);
    }
    Ok(())
}
