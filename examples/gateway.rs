//! The client in a gateway: an HTTP proxy for completions whose prompts are token ids. For traffic use `kvrouted-gateway`.
//!
//! ```console
//! cargo run --example gateway -- /tmp/kvrouted.sock MODEL 127.0.0.1:8080 1=10.0.0.8:8000 2=10.0.0.9:8000
//! curl -N -d '{"model": "MODEL", "prompt": [1, 2, 3], "stream": true}' http://127.0.0.1:8080/v1/completions
//! ```

// An example says what it does on standard output.
#![allow(clippy::print_stdout)]

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Instant;

use kvrouted::client::{Answer, AsyncClient, BookingRequest, Prompt, RouteRequest, SteadyOptions};
use kvrouted::ids::SpaceId;
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};

type Result<T> = std::result::Result<T, Box<dyn std::error::Error + Send + Sync>>;

/// Bytes of a request with its headers.
const REQUEST_BYTES_MAX: u64 = 16 << 20;

struct Gateway {
    client: AsyncClient,
    space: SpaceId,
    /// Addresses of the engines, by the ids of their workers.
    engines: HashMap<u64, String>,
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [socket, model, listen, engines @ ..] = arguments.as_slice() else {
        return Err("give SOCKET MODEL HOST:PORT, and ID=HOST:PORT of each engine".into());
    };
    let engine = |text: &String| text.split_once('=').and_then(|(id, at)| Some((id.parse().ok()?, at.to_owned())));
    let engines = engines.iter().map(engine).collect::<Option<_>>().ok_or("an engine is ID=HOST:PORT")?;
    let client = AsyncClient::new(socket, SteadyOptions { name: "example".into(), ..SteadyOptions::default() });
    // From here on the client knows the workers, and chooses one itself while the daemon does not answer.
    client.connected().await?;
    let space = client.space(model, None, None)?.id;
    let gateway = Arc::new(Gateway { client, space, engines });
    let listener = TcpListener::bind(listen).await?;
    println!("listening on {}", listener.local_addr()?);
    loop {
        let (caller, gateway) = (listener.accept().await?.0, Arc::clone(&gateway));
        tokio::spawn(async move {
            let (mut caller, mut to) = caller.into_split();
            let served = async {
                let (body, tokens) = read_request(&mut caller).await?;
                gateway.serve(caller, &body, &tokens, &mut to).await
            };
            let Err(error) = served.await else { return };
            let is_body = error.is::<serde_json::Error>();
            let status = if is_body { "400 Bad Request" } else { "503 Service Unavailable" };
            let body = serde_json::json!({"error": {"message": error.to_string()}});
            // A caller that has left gets no reply.
            to.write_all(format!("HTTP/1.1 {status}\r\n\r\n{body}").as_bytes()).await.ok();
        });
    }
}

impl Gateway {
    /// Serves one request. An error is one from before the first byte of the reply.
    async fn serve(&self, mut from: OwnedReadHalf, body: &[u8], tokens: &[u32], to: &mut OwnedWriteHalf) -> Result<()> {
        let request_id = format!("{:032x}", rand::random::<u128>());
        let book = Some(BookingRequest { request_id: &request_id, attempt: 0 });
        let question = RouteRequest { book, ..RouteRequest::new(self.space, Prompt::of_tokens(tokens)) };
        let answer = self.client.route(&question).await?;
        let mut nowhere = tokio::io::sink();
        let ended = tokio::select! {
            ended = self.run(&answer, body, to) => ended,
            // Ends when the caller hangs up. The connection to the engine is then closed, which cancels the request.
            _ = tokio::io::copy(&mut from, &mut nowhere) => Ok(()),
        };
        // However the request ended. The client repeats a report that the daemon did not get.
        if let Some(booking) = answer.booking() {
            self.client.free(booking).await.ok();
        }
        ended
    }

    /// Runs a prompt on the first candidate that begins to answer.
    async fn run(&self, answer: &Answer, body: &[u8], to: &mut OwnedWriteHalf) -> Result<()> {
        let (started, booking) = (Instant::now(), answer.booking());
        for worker in answer.workers() {
            let Some(address) = self.engines.get(&worker.id.0) else { continue };
            let mut engine = match ask(address, body).await {
                Ok(engine) => engine,
                Err(error) => {
                    // The daemon avoids this worker for a while, for all its gateways.
                    self.client.report_failure(self.space, worker, &error.to_string()).await.ok();
                    continue;
                }
            };
            if let Some(booking) = booking.filter(|_| answer.best() != Some(worker)) {
                self.client.served(booking, worker).await?; // another worker than the first one: the load is its
            }
            println!("worker {worker}, chosen by the {}", if answer.is_fallback() { "client" } else { "daemon" });
            let (mut line, mut events) = (Vec::new(), 0);
            // The caller sees by the reply's framing whether an engine broke off.
            while engine.read_until(b'\n', &mut line).await.is_ok_and(|bytes| bytes > 0) {
                to.write_all(&line).await?;
                // A streaming engine sends an event for each token, more or less.
                if let Some(booking) = booking.filter(|_| line.starts_with(b"data: ")) {
                    events += 1;
                    if events == 1 {
                        let prefill_us = started.elapsed().as_micros() as u64;
                        self.client.prefill_complete(booking, prefill_us).await.ok();
                    } else if events % 64 == 0 {
                        self.client.output_progress(booking, events).await.ok();
                    }
                }
                line.clear();
            }
            return Ok(());
        }
        Err("no worker can run it".into())
    }
}

/// The body of a request, and its prompt.
async fn read_request(caller: &mut OwnedReadHalf) -> Result<(Vec<u8>, Vec<u32>)> {
    let (mut reading, mut line, mut body_bytes) = (BufReader::new(caller.take(REQUEST_BYTES_MAX)), String::new(), 0);
    while reading.read_line(&mut line).await? > 2 {
        line.make_ascii_lowercase();
        if let Some(length) = line.strip_prefix("content-length:") {
            body_bytes = length.trim().parse()?;
        }
        line.clear();
    }
    let mut body = Vec::new();
    reading.take(body_bytes).read_to_end(&mut body).await?;
    let request: serde_json::Value = serde_json::from_slice(&body)?;
    Ok((body, serde_json::from_value(request["prompt"].clone())?))
}

/// Sends a body to an engine and waits for the first byte of the reply.
async fn ask(address: &str, body: &[u8]) -> Result<BufReader<TcpStream>> {
    let mut engine = BufReader::new(TcpStream::connect(address).await?);
    let head = "POST /v1/completions HTTP/1.1\r\nconnection: close\r\ncontent-type: application/json\r\n";
    let head = format!("{head}host: {address}\r\ncontent-length: {}\r\n\r\n", body.len());
    engine.write_all(&[head.as_bytes(), body].concat()).await?;
    if engine.fill_buf().await?.is_empty() { Err("it closed the connection".into()) } else { Ok(engine) }
}
