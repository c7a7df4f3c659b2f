//! A gateway with a rule of its own: whoever gives the first token soonest, by what each worker would have to do and how
//! fast it is known to be.
//!
//! `cargo run --example least_time_to_first_token -- MODEL SOCKET 1,2,3 [WORKER=TOKENS_PER_S,MICROSECONDS_PER_BLOCK ...]`

// An example says what it does on standard output.
#![allow(clippy::print_stdout)]

use std::collections::HashMap;
use std::path::Path;
use std::str::FromStr;
use std::time::Duration;

use kvrouted::client::{BookingRef, BookingRequest, Client, ClientOptions, PotentialLoad, Prompt, RouteRequest};
use kvrouted::error::{Error, Kind, Result};

/// How fast a worker is.
#[derive(Clone, Copy)]
struct Speed {
    prefill_tokens_per_s: f64,
    /// What every block of the prompts it runs adds to a step.
    step_s_per_block: f64,
}

/// Of workers that nothing is said of.
const ORDINARY: Speed = Speed { prefill_tokens_per_s: 10_000.0, step_s_per_block: 1e-6 };

/// Seconds until the prompt's first token: all that is to be prefilled, and then one step of everything.
fn first_token_s(load: &PotentialLoad, speed: Speed) -> f64 {
    load.prefill_tokens as f64 / speed.prefill_tokens_per_s + load.decode_blocks as f64 * speed.step_s_per_block
}

fn usage() -> Error {
    let remedy = "give MODEL SOCKET 1,2,3 and, for each worker you know, WORKER=TOKENS_PER_S,MICROSECONDS_PER_BLOCK";
    Error::new(Kind::InvalidArgument, "the arguments are not understood", remedy)
}

fn parsed<T: FromStr>(text: &str) -> Result<T> {
    text.parse().map_err(|_| usage())
}

fn speed(text: &str) -> Result<(u64, Speed)> {
    let (worker, speed) = text.split_once('=').ok_or_else(usage)?;
    let (tokens_per_s, microseconds) = speed.split_once(',').ok_or_else(usage)?;
    let (prefill_tokens_per_s, step_us_per_block) = (parsed(tokens_per_s)?, parsed::<f64>(microseconds)?);
    Ok((parsed(worker)?, Speed { prefill_tokens_per_s, step_s_per_block: step_us_per_block / 1e6 }))
}

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [model, socket, tokens, speeds @ ..] = arguments.as_slice() else { return Err(usage()) };
    let tokens: Vec<u32> = tokens.split(',').map(parsed).collect::<Result<_>>()?;
    let speeds: HashMap<u64, Speed> = speeds.iter().map(|text| speed(text)).collect::<Result<_>>()?;

    let timeout = Some(Duration::from_secs(1));
    let options = ClientOptions { name: "least_time_to_first_token".into(), timeout, ..ClientOptions::default() };
    let mut client = Client::connect(Path::new(socket), &options)?;
    let space = client.space(model, None)?.id;
    let question = RouteRequest::new(space, Prompt::of_tokens(&tokens));

    let loads = client.potential_loads(&question)?;
    let time_s = |load: &PotentialLoad| first_token_s(load, *speeds.get(&load.worker.id.0).unwrap_or(&ORDINARY));
    let mut workers: Vec<_> = loads.workers.iter().map(|load| (time_s(load), load.worker)).collect();
    workers.sort_by(|(one, _), (other, _)| one.total_cmp(other));

    // Loads are of every worker, also of those that drain or are down: the daemon says who may be booked.
    for (attempt, (time_s, worker)) in (0..).zip(workers) {
        let book = Some(BookingRequest { request_id: "example-1", attempt });
        let reply = client.route(&RouteRequest { book, pin: Some(worker), ..question })?;
        let Some(handle) = reply.booking else { continue };
        println!("worker {worker}: the first token in {:.1} ms", time_s * 1e3);
        // Here the prompt is sent to the worker; its first token ends the prefill, and its last the booking.
        let booking = BookingRef::Handle(handle);
        client.prefill_complete(&booking)?;
        client.free(&booking)?;
        return Ok(());
    }
    Err(Error::new(Kind::NobodyAvailable, "no worker may be booked", "see `kvrouted doctor`"))
}
