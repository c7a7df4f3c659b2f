//! A gateway over HTTP in front of kvrouted's simulated engines.
//!
//! ```console
//! cargo run --example gateway -- --socket /tmp/kvrouted.sock --engine 1=/tmp/engine-1 --engine 2=/tmp/engine-2
//! curl -N -d '{"prompt": "Tell me a story.", "max_tokens": 64}' http://127.0.0.1:8080/v1/completions
//! ```
//!
//! What a gateway does about kvrouted is in `completion`: route and book, send the prompt, say when its first token came and
//! how much has been put out, free however it ends. `engine` stands in for an inference server's streaming API, `http` is
//! hyper.

// An example says what it does on standard output, and what is wrong on standard error.
#![allow(clippy::print_stdout, clippy::print_stderr)]

mod completion;
mod engine;
mod http;

use std::collections::HashMap;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;

use clap::Parser;
use kvrouted::client::{AsyncClient, SteadyOptions};
use tokio::net::TcpListener;

use completion::Gateway;
use engine::Engine;

/// Streams completions from the workers that kvrouted chooses.
#[derive(Parser)]
struct Args {
    /// The daemon's Unix socket
    #[arg(long, value_name = "PATH")]
    socket: PathBuf,
    /// The model
    #[arg(long, default_value = "demo")]
    model: String,
    /// A worker's id and the --link of its demo-engine
    #[arg(long = "engine", value_name = "ID=PATH", value_parser = engine_at, required = true)]
    engines: Vec<(u64, PathBuf)>,
    /// Where to listen
    #[arg(long, value_name = "HOST:PORT", default_value = "127.0.0.1:8080")]
    listen: SocketAddr,
}

fn engine_at(text: &str) -> Result<(u64, PathBuf), String> {
    let (id, path) = text.split_once('=').ok_or("it is ID=PATH")?;
    Ok((id.parse().map_err(|_| "the id is a number")?, path.into()))
}

fn main() -> ExitCode {
    let args = Args::parse();
    // One thread, as is enough here; the client is for any number.
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    match runtime.map_err(Into::into).and_then(|runtime| runtime.block_on(run(args))) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("gateway: {error}");
            ExitCode::FAILURE
        }
    }
}

async fn run(args: Args) -> Result<(), Box<dyn std::error::Error>> {
    let options = SteadyOptions { name: "gateway".into(), ..SteadyOptions::default() };
    let client = AsyncClient::new(&args.socket, options);
    // The workers too, so that the gateway can go on without the daemon from the first request on.
    client.connected().await?;
    let space = client.space(&args.model, None, None)?.id;
    let mut engines = HashMap::new();
    for (id, path) in args.engines {
        let engine = Engine::connect(&path).await;
        engines.insert(id, engine.map_err(|error| format!("no engine at {}: {error}", path.display()))?);
    }
    let listener = TcpListener::bind(args.listen).await?;
    println!("listening on {}", listener.local_addr()?);
    http::serve(listener, Arc::new(Gateway { client, space, model: args.model, engines })).await
}
