//! Two daemons, each with its own fleet: both are asked, and the better one's worker is booked.
//!
//! `cargo run --example better_of_two -- MODEL SOCKET SOCKET 1,2,3`

// An example says what it does on standard output.
#![allow(clippy::print_stdout)]

use std::path::Path;
use std::time::Duration;

use kvrouted::client::{BookingRef, BookingRequest, Client, ClientOptions, Mode, Overrides, Prompt, RouteRequest};
use kvrouted::error::{Error, Kind, Result};

/// One daemon's fleet of the model.
struct Fleet {
    socket: String,
    client: Client,
    model: String,
}

impl Fleet {
    fn connect(socket: String, model: &str) -> Result<Self> {
        let timeout = Some(Duration::from_secs(1));
        let options = ClientOptions { name: "better_of_two".into(), timeout, ..ClientOptions::default() };
        let client = Client::connect(Path::new(&socket), &options)?;
        Ok(Self { socket, client, model: model.to_owned() })
    }

    /// The prompt as a question to this fleet. Costs are in blocks of the fleet's own size, and only those of one mode
    /// compare: `kv` here, whatever the daemon's policy says.
    fn request<'a>(&self, tokens: &'a [u32], book: Option<BookingRequest<'a>>) -> Result<RouteRequest<'a>> {
        let space = self.client.space(&self.model, None)?.id;
        let overrides = Overrides { mode: Some(Mode::Kv), ..Overrides::NONE };
        Ok(RouteRequest { book, overrides, ..RouteRequest::new(space, Prompt::of_tokens(tokens)) })
    }

    /// What the best worker would cost, in tokens. Nothing is booked.
    fn cost_tokens(&mut self, tokens: &[u32]) -> Result<f64> {
        let request = self.request(tokens, None)?;
        let cost_blocks = self.client.route(&request)?.chosen()?.cost;
        let scheme = self.client.space(&self.model, None)?.scheme;
        Ok(cost_blocks * scheme.map_or(1.0, |scheme| f64::from(scheme.block_size)))
    }
}

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [model, one, other, tokens] = arguments.as_slice() else {
        return Err(Error::new(Kind::InvalidArgument, "four arguments are needed", "give MODEL SOCKET SOCKET 1,2,3"));
    };
    let not_tokens = |_| Error::new(Kind::InvalidArgument, "the prompt is no list of token ids", "give 1,2,3");
    let tokens: Vec<u32> =
        tokens.split(',').map(str::parse).collect::<std::result::Result<_, _>>().map_err(not_tokens)?;

    let mut best: Option<(f64, Fleet)> = None;
    for socket in [one, other] {
        let mut fleet = match Fleet::connect(socket.clone(), model) {
            Ok(fleet) => fleet,
            // One fleet is enough.
            Err(error) => {
                println!("{socket} is left out: {error}");
                continue;
            }
        };
        match fleet.cost_tokens(&tokens) {
            Ok(cost) if best.as_ref().is_none_or(|(least, _)| cost < *least) => best = Some((cost, fleet)),
            Ok(_) => {}
            Err(error) => println!("{socket} is left out: {error}"),
        }
    }
    let Some((cost, mut fleet)) = best else {
        return Err(Error::new(Kind::NobodyAvailable, "neither daemon has a worker", "see `kvrouted doctor` of both"));
    };

    // Decided anew, with the booking: the fleet may have moved since it was asked.
    let request = fleet.request(&tokens, Some(BookingRequest { request_id: "example-1", attempt: 0 }))?;
    let reply = fleet.client.route(&request)?;
    let chosen = reply.chosen()?;
    println!("worker {} of {}, for {cost:.0} tokens' worth of work", chosen.worker, fleet.socket);
    if let Some(handle) = reply.booking {
        // Here the prompt is sent to the worker; its first token ends the prefill, and its last the booking.
        let booking = BookingRef::Handle(handle);
        fleet.client.prefill_complete(&booking)?;
        fleet.client.free(&booking)?;
    }
    Ok(())
}
