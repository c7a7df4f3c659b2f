//! Asks a daemon for a worker, books it, and ends the request: what a gateway does for each request.
//!
//! `cargo run --example route -- SOCKET MODEL 1,2,3`

// An example says what it does on standard output.
#![allow(clippy::print_stdout)]

use kvrouted::client::{AsyncClient, BookingRequest, Prompt, RouteRequest, SteadyOptions};
use kvrouted::error::{Error, Kind, Result};

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [socket, model, tokens] = arguments.as_slice() else {
        return Err(Error::new(Kind::InvalidArgument, "three arguments are needed", "give SOCKET MODEL 1,2,3"));
    };
    let not_tokens = |_| Error::new(Kind::InvalidArgument, "the prompt is no list of token ids", "give 1,2,3");
    let tokens: Vec<u32> =
        tokens.split(',').map(str::parse).collect::<std::result::Result<_, _>>().map_err(not_tokens)?;

    let client = AsyncClient::new(socket, SteadyOptions { name: "my-gateway".into(), ..SteadyOptions::default() });
    client.connected().await?;
    let space = client.space(model, None, None)?.id;
    let book = Some(BookingRequest { request_id: "request-1", attempt: 0 });
    let answer = client.route(&RouteRequest { book, ..RouteRequest::new(space, Prompt::of_tokens(&tokens)) }).await?;
    println!("send the prompt to worker {}", answer.best().map_or("none".into(), |worker| worker.to_string()));
    if let Some(booking) = answer.booking() {
        client.prefill_complete(booking, 0).await?; // when the first token has come
        client.free(booking).await?; // when the request has ended
    }
    Ok(())
}
